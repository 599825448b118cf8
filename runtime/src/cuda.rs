//! The NVIDIA GPUs of this machine, as the driver lists them. Its library is opened at run time.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;

/// A GPU, as the driver names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The name: `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
}

/// Why no GPU is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Absent {
    /// The library cannot be opened: what the dynamic linker says.
    Library(String),
    /// The library lacks a function.
    Function(&'static CStr),
    /// A call failed: its name and the driver's code.
    Call(&'static CStr, c_int),
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Absent::Library(message) => write!(f, "no driver of NVIDIA GPUs: {message}"),
            Absent::Function(name) => {
                write!(f, "the driver's library has no `{}`", name.to_string_lossy())
            }
            Absent::Call(_, NO_DEVICE) => f.write_str("the driver sees no GPU"),
            Absent::Call(name, code) => {
                write!(f, "the driver's `{}` failed with {code}", name.to_string_lossy())
            }
        }
    }
}

/// `CUDA_ERROR_NO_DEVICE` of the driver API.
const NO_DEVICE: c_int = 100;
/// The name that the driver's library is installed under.
const LIBRARY: &CStr = c"libcuda.so.1";
/// Bytes of a name at most, its end included. Chosen: many times the longest.
const NAME_BYTES: usize = 256;

/// The driver's library, open until the program ends: it starts threads that outlive a handle.
struct Library(*mut c_void);

impl Library {
    fn open() -> Result<Library, Absent> {
        // SAFETY: the name ends with a zero; the library's constructors run as in any CUDA program.
        let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !handle.is_null() {
            return Ok(Library(handle));
        }
        // SAFETY: `dlerror` gives null or a text that lives until the thread's next such call.
        let message = unsafe { libc::dlerror() };
        let text = match message.is_null() {
            true => LIBRARY,
            // SAFETY: not null, so that it is a text that ends with a zero.
            false => unsafe { CStr::from_ptr(message) },
        };
        Err(Absent::Library(text.to_string_lossy().into_owned()))
    }

    fn function(&self, name: &'static CStr) -> Result<*mut c_void, Absent> {
        // SAFETY: the handle is open, and the name ends with a zero.
        let function = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if function.is_null() { Err(Absent::Function(name)) } else { Ok(function) }
    }
}

fn check(name: &'static CStr, code: c_int) -> Result<(), Absent> {
    if code == 0 { Ok(()) } else { Err(Absent::Call(name, code)) }
}

/// All GPUs that the driver shows this process.
///
/// # Errors
/// Why there is none to ask about.
pub fn gpus() -> Result<Vec<Gpu>, Absent> {
    const INIT: &CStr = c"cuInit";
    const COUNT: &CStr = c"cuDeviceGetCount";
    const GET: &CStr = c"cuDeviceGet";
    const NAME: &CStr = c"cuDeviceGetName";
    const MEMORY: &CStr = c"cuDeviceTotalMem_v2";
    let library = Library::open()?;
    // SAFETY: the driver API declares these functions so (cuda.h); a device is an int there.
    let (init, count, get, name_of, memory_of) = unsafe {
        use std::mem::transmute;
        type Pointer = *mut c_void;
        (
            transmute::<Pointer, extern "C" fn(c_uint) -> c_int>(library.function(INIT)?),
            transmute::<Pointer, extern "C" fn(*mut c_int) -> c_int>(library.function(COUNT)?),
            transmute::<Pointer, extern "C" fn(*mut c_int, c_int) -> c_int>(library.function(GET)?),
            transmute::<Pointer, extern "C" fn(*mut c_char, c_int, c_int) -> c_int>(
                library.function(NAME)?,
            ),
            transmute::<Pointer, extern "C" fn(*mut usize, c_int) -> c_int>(
                library.function(MEMORY)?,
            ),
        )
    };
    check(INIT, init(0))?;
    let mut number = 0;
    check(COUNT, count(&mut number))?;
    let mut gpus = Vec::new();
    for ordinal in 0..number {
        let mut device = 0;
        check(GET, get(&mut device, ordinal))?;
        let mut name = [0u8; NAME_BYTES];
        check(NAME, name_of(name.as_mut_ptr().cast(), NAME_BYTES as c_int, device))?;
        let mut bytes = 0;
        check(MEMORY, memory_of(&mut bytes, device))?;
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
        let name = String::from_utf8_lossy(&name[..end]).into_owned();
        gpus.push(Gpu { name, memory_bytes: bytes as u64 });
    }
    Ok(gpus)
}
