//! The NVIDIA GPUs of this machine, as the driver lists them. Its library is opened at run time.

pub mod compiled;
pub mod context;
pub(crate) mod copies;
pub mod gpus;
pub mod launch;
pub(crate) mod mailboxes;
pub mod memory;
pub(crate) mod nccl;
pub mod nvrtc;
pub(crate) mod space;

use std::fmt;

use cudarc::driver::result::{self, DriverError, device};
use cudarc::driver::sys::{CUresult, is_culib_present};

/// A GPU, as the driver names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The name: `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
}

/// Why no GPU is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absent {
    /// The driver's library cannot be opened.
    Library,
    /// A call failed: the driver's code.
    Call(u32),
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Absent::Library => f.write_str("no driver of NVIDIA GPUs: there is no `libcuda.so`"),
            Absent::Call(code) if *code == CUresult::CUDA_ERROR_NO_DEVICE as u32 => {
                f.write_str("the driver sees no GPU")
            }
            Absent::Call(code) => write!(f, "the driver of NVIDIA GPUs failed with {code}"),
        }
    }
}

impl From<DriverError> for Absent {
    fn from(error: DriverError) -> Absent {
        Absent::Call(error.0 as u32)
    }
}

/// All GPUs that the driver shows this process.
///
/// # Errors
/// Why there is none to ask about.
pub fn gpus() -> Result<Vec<Gpu>, Absent> {
    // SAFETY: the library's constructors run as in any CUDA program.
    if !unsafe { is_culib_present() } {
        return Err(Absent::Library);
    }
    result::init()?;
    let gpu = |ordinal| {
        let device = device::get(ordinal)?;
        // SAFETY: the driver has just given the device.
        let bytes = unsafe { device::total_mem(device)? };
        Ok(Gpu { name: device::get_name(device)?, memory_bytes: bytes as u64 })
    };
    (0..device::get_count()?).map(gpu).collect()
}
