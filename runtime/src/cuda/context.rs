//! An opened GPU.
//!
//! A launch is queued and runs after those before it. What reads results waits for them.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::result::{DriverError, ctx, device, event, primary_ctx};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute as Attribute, CUevent};
use kernels::cuda::Arch;

use super::Absent;

/// A GPU of this machine, opened. All threads queue their launches one after the other.
#[derive(Debug)]
pub struct Context {
    device: CUdevice,
    handle: CUcontext,
    /// What a launch that fills the GPU is measured by.
    multiprocessors: u32,
    capability: (i32, i32),
}

// SAFETY: the driver takes calls of any thread, each of which first makes the context its own.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Why a GPU does not do what it is asked for: the call, and the driver's name of the failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    call: &'static str,
    name: String,
}

impl Failure {
    pub(super) fn new(call: &'static str, name: String) -> Failure {
        Failure { call, name }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} fails on the GPU: {}", self.call, self.name)
    }
}

impl std::error::Error for Failure {}

pub(super) fn failure(call: &'static str) -> impl Fn(DriverError) -> Failure {
    move |error| {
        let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
        Failure { call, name: name.unwrap_or_else(|_| format!("code {}", error.0 as u32)) }
    }
}

impl Context {
    /// Opens the GPU of this number.
    ///
    /// # Errors
    /// There is no driver, no such GPU, or it cannot be opened.
    pub fn open(ordinal: usize) -> Result<Arc<Context>, Absent> {
        super::gpus()?;
        let device = device::get(ordinal as c_int)?;
        // SAFETY: the driver has just given the device.
        let attribute = |of: Attribute| unsafe { device::get_attribute(device, of) };
        let multiprocessors =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        // SAFETY: the device is one, and is released once, when the context is dropped.
        let handle = unsafe { primary_ctx::retain(device)? };
        Ok(Arc::new(Context { device, handle, multiprocessors, capability }))
    }

    /// Makes it the one that calls of this thread are for.
    pub(super) fn bind(&self) -> Result<(), Failure> {
        // SAFETY: the context is retained until this is dropped.
        unsafe { ctx::set_current(self.handle) }.map_err(failure("cuCtxSetCurrent"))
    }

    pub(super) fn handle(&self) -> CUcontext {
        self.handle
    }

    /// Multiprocessors of the GPU.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Whether text waits for the launch before it: from sm_90 on.
    pub(super) fn waits_in_kernels(&self) -> bool {
        self.capability.0 >= 9
    }

    /// The architecture of which it runs all text; none of those that text is written for.
    pub fn arch(&self) -> Option<Arch> {
        match self.capability {
            (8, 0) => Some(Arch::Sm80),
            (8, 9) => Some(Arch::Sm89),
            (9, 0) => Some(Arch::Sm90a),
            (10, 0) => Some(Arch::Sm100),
            _ => None,
        }
    }

    /// Waits for all launches.
    ///
    /// # Errors
    /// One of them has failed. Nothing else can be done with the GPU by this process then.
    pub fn synchronize(&self) -> Result<(), Failure> {
        self.bind()?;
        ctx::synchronize().map_err(failure("cuCtxSynchronize"))
    }

    /// Whether all launches have ended.
    ///
    /// # Errors
    /// As [`Context::synchronize`].
    pub(super) fn is_idle(&self) -> Result<bool, Failure> {
        self.bind()?;
        // SAFETY: the null stream always exists.
        let status = unsafe { sys::cuStreamQuery(std::ptr::null_mut()) };
        if status == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        status.result().map(|()| true).map_err(failure("cuStreamQuery"))
    }

    /// A moment between launches.
    ///
    /// # Errors
    /// The driver has no more of them.
    pub fn moment(self: &Arc<Self>) -> Result<Moment, Failure> {
        self.bind()?;
        let handle = event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let moment =
            Moment { handle: handle.map_err(failure("cuEventCreate"))?, context: Arc::clone(self) };
        // SAFETY: the event exists; the null stream always does.
        unsafe { event::record(moment.handle, std::ptr::null_mut()) }
            .map_err(failure("cuEventRecord"))?;
        Ok(moment)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once, and all that was made in it is gone.
        let _ = unsafe { primary_ctx::release(self.device) };
    }
}

/// A moment of the queue of launches.
#[derive(Debug)]
pub struct Moment {
    handle: CUevent,
    context: Arc<Context>,
}

// SAFETY: a handle of the driver, which takes calls of any thread.
unsafe impl Send for Moment {}
// SAFETY: as above.
unsafe impl Sync for Moment {}

impl Moment {
    /// Lets launches of a GPU that are queued from now on wait for this moment, which may be one of
    /// another GPU.
    ///
    /// # Errors
    /// The wait cannot be queued.
    pub(super) fn precedes_launches_of(&self, context: &Context) -> Result<(), Failure> {
        context.bind()?;
        // SAFETY: the event exists and was recorded; the null stream always exists.
        unsafe { sys::cuStreamWaitEvent(std::ptr::null_mut(), self.handle, 0) }
            .result()
            .map_err(failure("cuStreamWaitEvent"))
    }

    /// Seconds from an earlier moment to this one, for which this waits.
    ///
    /// # Errors
    /// A launch before it has failed.
    pub fn since(&self, earlier: &Moment) -> Result<f64, Failure> {
        self.context.bind()?;
        // SAFETY: both events exist and were recorded.
        let milliseconds = unsafe {
            event::synchronize(self.handle).map_err(failure("cuEventSynchronize"))?;
            event::elapsed(earlier.handle, self.handle).map_err(failure("cuEventElapsedTime"))?
        };
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: nobody else has the event.
        let _ = unsafe { event::destroy(self.handle) };
    }
}
