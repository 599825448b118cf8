//! An opened GPU: its memory, the machine code of kernels, and their launches.
//!
//! A launch is queued and runs after those before it. What reads results waits for them.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError, ctx, device, event, module, primary_ctx};
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute as Attribute, CUdeviceptr, CUevent, CUfunction,
    CUmodule, CUtensorMap,
};
use ir::DType;
use kernels::Kernel;
use kernels::cuda::{Arch, Buffer, Function, Functions, TensorMap};

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

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} fails on the GPU: {}", self.call, self.name)
    }
}

impl std::error::Error for Failure {}

fn failure(call: &'static str) -> impl Fn(DriverError) -> Failure {
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
    fn bind(&self) -> Result<(), Failure> {
        // SAFETY: the context is retained until this is dropped.
        unsafe { ctx::set_current(self.handle) }.map_err(failure("cuCtxSetCurrent"))
    }

    /// Multiprocessors of the GPU.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
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

    /// Memory of the GPU, with anything in it.
    ///
    /// # Errors
    /// There is too little of it.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Memory, Failure> {
        self.bind()?;
        // SAFETY: the memory is freed once, when it is dropped.
        let start = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(failure("cuMemAlloc"))?;
        Ok(Memory { start, bytes, context: Arc::clone(self) })
    }

    /// Loads machine code.
    ///
    /// # Errors
    /// It is not for this GPU.
    pub fn load(self: &Arc<Self>, cubin: &[u8]) -> Result<Module, Failure> {
        self.bind()?;
        // SAFETY: the driver reads as many bytes as the file's own header says, which a compiler
        // has just written.
        let handle = unsafe { module::load_data(cubin.as_ptr().cast()) };
        let handle = handle.map_err(failure("cuModuleLoadData"))?;
        Ok(Module { handle, context: Arc::clone(self) })
    }

    /// Waits for all launches.
    ///
    /// # Errors
    /// One of them has failed. Nothing else can be done with the GPU by this process then.
    pub fn synchronize(&self) -> Result<(), Failure> {
        self.bind()?;
        ctx::synchronize().map_err(failure("cuCtxSynchronize"))
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

/// Memory of a GPU.
#[derive(Debug)]
pub struct Memory {
    start: CUdeviceptr,
    bytes: usize,
    context: Arc<Context>,
}

impl Memory {
    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies bytes to its start.
    ///
    /// # Errors
    /// An earlier launch has failed.
    ///
    /// # Panics
    /// There are more than it has.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        assert!(bytes.len() <= self.bytes, "{} bytes into {}", bytes.len(), self.bytes);
        self.context.bind()?;
        // SAFETY: the memory has room for the bytes.
        unsafe { result::memcpy_htod_sync(self.start, bytes) }.map_err(failure("cuMemcpyHtoD"))
    }

    /// Copies its first bytes.
    ///
    /// # Errors
    /// A launch has failed.
    ///
    /// # Panics
    /// It has fewer.
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), Failure> {
        assert!(bytes.len() <= self.bytes, "{} bytes of {}", bytes.len(), self.bytes);
        self.context.bind()?;
        // SAFETY: the memory has as many bytes, and any bytes are valid.
        unsafe { result::memcpy_dtoh_sync(bytes, self.start) }.map_err(failure("cuMemcpyDtoH"))
    }

    /// Sets each of its bytes.
    ///
    /// # Errors
    /// An earlier launch has failed.
    pub fn fill(&mut self, byte: u8) -> Result<(), Failure> {
        self.context.bind()?;
        // SAFETY: the memory has as many bytes.
        unsafe { result::memset_d8_sync(self.start, byte, self.bytes) }
            .map_err(failure("cuMemsetD8"))
    }

    /// Queues a copy of all bytes of other memory to its start.
    ///
    /// # Errors
    /// An earlier launch has failed.
    ///
    /// # Panics
    /// There are more than it has.
    pub fn copy(&mut self, from: &Memory) -> Result<(), Failure> {
        assert!(from.bytes <= self.bytes, "{} bytes into {}", from.bytes, self.bytes);
        self.context.bind()?;
        // SAFETY: both have as many bytes, and stay until the driver has freed them, which waits.
        unsafe {
            result::memcpy_dtod_async(self.start, from.start, from.bytes, std::ptr::null_mut())
        }
        .map_err(failure("cuMemcpyDtoDAsync"))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: it was allocated once; the driver waits for launches that use it.
        let _ = unsafe { result::free_sync(self.start) };
    }
}

/// Machine code on a GPU.
#[derive(Debug)]
pub struct Module {
    handle: CUmodule,
    context: Arc<Context>,
}

// SAFETY: a handle of the driver, which takes calls of any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: launches keep the module, so that none of its functions is used afterwards.
        let _ = unsafe { module::unload(self.handle) };
    }
}

/// A kernel that a GPU can launch: its functions in their order, and their workspaces.
#[derive(Debug)]
pub struct Launch {
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    functions: Vec<Loaded>,
    workspaces: Vec<Memory>,
    module: Arc<Module>,
}

#[derive(Debug)]
struct Loaded {
    handle: CUfunction,
    function: Function,
    /// Blocks that are started.
    blocks: u32,
}

// SAFETY: a handle of the driver, which takes calls of any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Launch {
    /// The launch of a kernel whose functions are in a module under these names.
    ///
    /// # Errors
    /// A function is not there, needs more shared memory than a block can have, or there is no
    /// memory for workspaces.
    pub fn new(
        module: &Arc<Module>,
        kernel: &Kernel,
        functions: &Functions,
        name: impl Fn(usize) -> String,
    ) -> Result<Launch, Failure> {
        let context = &module.context;
        context.bind()?;
        let loaded = |(number, function): (usize, &Function)| {
            let name = CString::new(name(number)).unwrap_or_default();
            // SAFETY: the module is loaded, and is kept beside the function.
            let handle = unsafe { module::get_function(module.handle, name) }
                .map_err(failure("cuModuleGetFunction"))?;
            let shared = function.tile.dynamic_shared_bytes();
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            if shared > 0 {
                // SAFETY: the function exists.
                unsafe {
                    result::function::set_function_attribute(handle, attribute, shared as c_int)
                }
                .map_err(failure("cuFuncSetAttribute"))?;
            }
            // SAFETY: the function exists.
            let resident = unsafe {
                result::occupancy::max_active_block_per_multiprocessor(
                    handle,
                    function.threads as c_int,
                    shared,
                )
            }
            .map_err(failure("cuOccupancyMaxActiveBlocksPerMultiprocessor"))?;
            let resident = u64::from(context.multiprocessors) * resident.max(1) as u64;
            let grid =
                if function.is_persistent() { function.grid.min(resident) } else { function.grid };
            let blocks = u32::try_from(grid).unwrap_or(u32::MAX);
            Ok(Loaded { handle, function: function.clone(), blocks })
        };
        let workspaces = functions.workspaces.iter().map(|bytes| context.allocate(*bytes as usize));
        Ok(Launch {
            inputs: kernel.inputs().iter().map(|of| of.bytes()).collect(),
            outputs: kernel.outputs().iter().map(|of| of.bytes()).collect(),
            functions: functions
                .functions
                .iter()
                .enumerate()
                .map(loaded)
                .collect::<Result<_, _>>()?,
            workspaces: workspaces.collect::<Result<_, _>>()?,
            module: Arc::clone(module),
        })
    }

    /// The workspaces.
    pub fn workspaces_mut(&mut self) -> &mut [Memory] {
        &mut self.workspaces
    }

    /// Queues the functions, with the scalars of a launch.
    ///
    /// # Errors
    /// They cannot be started.
    ///
    /// # Panics
    /// A buffer is missing, or is shorter than the kernel says.
    pub fn start(
        &self,
        scalars: &[i64],
        inputs: &[&Memory],
        outputs: &[&Memory],
    ) -> Result<(), Failure> {
        for (buffers, wanted) in [(inputs, &self.inputs), (outputs, &self.outputs)] {
            assert_eq!(buffers.len(), wanted.len(), "the buffers of a launch");
            let is_long = |(buffer, wanted): (&&Memory, &usize)| buffer.bytes >= *wanted;
            assert!(buffers.iter().zip(wanted).all(is_long), "a buffer is too short");
        }
        self.module.context.bind()?;
        let start = |buffer: Buffer| match buffer {
            Buffer::Input(at) => inputs[at].start,
            Buffer::Output(at) => outputs[at].start,
            Buffer::Workspace(at) => self.workspaces[at].start,
        };
        for Loaded { handle, function, blocks } in &self.functions {
            let mut buffers: Vec<CUdeviceptr> = function.passed().into_iter().map(start).collect();
            let mut scalars = function.scalars(scalars);
            let encoded =
                |map: &TensorMap| encode(map, start(function.parameters[map.parameter].buffer));
            let mut maps: Vec<CUtensorMap> =
                function.tile.maps().into_iter().map(encoded).collect::<Result<_, _>>()?;
            let buffers = buffers.iter_mut().map(|of| std::ptr::from_mut(of).cast::<c_void>());
            let scalars = scalars.iter_mut().map(|of| std::ptr::from_mut(of).cast::<c_void>());
            let maps = maps.iter_mut().map(|of| std::ptr::from_mut(of).cast::<c_void>());
            let mut parameters: Vec<*mut c_void> = buffers.chain(scalars).chain(maps).collect();
            // SAFETY: the function is loaded, and is passed what its text declares, of which the
            // driver takes a copy; buffers are as long as the kernel says, and memory of the GPU
            // alone is accessed.
            unsafe {
                result::launch_kernel(
                    *handle,
                    (*blocks, 1, 1),
                    (function.threads as c_uint, 1, 1),
                    function.tile.dynamic_shared_bytes() as c_uint,
                    std::ptr::null_mut(),
                    &mut parameters,
                )
            }
            .map_err(failure("cuLaunchKernel"))?;
        }
        Ok(())
    }
}

/// The driver's form of a tensor map of memory that starts there.
fn encode(map: &TensorMap, start: CUdeviceptr) -> Result<CUtensorMap, Failure> {
    use sys::CUtensorMapDataType as Kind;
    let kind = match map.dtype {
        DType::BF16 => Kind::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F16 => Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::F32 => Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        // Only their size matters to TMA, which copies.
        DType::F64 => Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
        DType::I64 => Kind::CU_TENSOR_MAP_DATA_TYPE_INT64,
        DType::I32 => Kind::CU_TENSOR_MAP_DATA_TYPE_INT32,
        DType::U32 => Kind::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        DType::I8 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 => {
            Kind::CU_TENSOR_MAP_DATA_TYPE_UINT8
        }
    };
    let steps = vec![1_u32; map.dims.len()];
    let mut encoded = MaybeUninit::<CUtensorMap>::uninit();
    // SAFETY: dims, strides and boxes are as many as the rank says, and the map can be written.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            encoded.as_mut_ptr(),
            kind,
            map.dims.len() as u32,
            start as *mut c_void,
            map.dims.as_ptr(),
            map.strides_bytes.as_ptr(),
            map.box_dims.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(failure("cuTensorMapEncodeTiled"))?;
    // SAFETY: the call has succeeded, so that the map is written.
    Ok(unsafe { encoded.assume_init() })
}
