//! Machine code on a GPU, and launches of its functions.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::result::{self, module};
use cudarc::driver::sys::{
    self, CUdeviceptr, CUfunction, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchConfig, CUmodule, CUtensorMap,
};
use ir::DType;
use kernels::Kernel;
use kernels::cuda::{Buffer, Function, Functions, TensorMap};

use super::context::{Context, Failure, failure};
use super::memory::{Memory, Piece};

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

impl Module {
    /// Loads machine code.
    ///
    /// # Errors
    /// It is not for this GPU.
    pub fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Module, Failure> {
        context.bind()?;
        // SAFETY: the driver reads as many bytes as the file's own header says, which a compiler
        // has written.
        let handle = unsafe { module::load_data(cubin.as_ptr().cast()) };
        let handle = handle.map_err(failure("cuModuleLoadData"))?;
        Ok(Module { handle, context: Arc::clone(context) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: launches keep the module, so that none of its functions is used afterwards.
        let _ = unsafe { module::unload(self.handle) };
    }
}

/// A kernel that a GPU can launch: its functions in their order.
#[derive(Debug)]
pub struct Launch {
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    functions: Vec<Loaded>,
    /// Which bytes of a launch's workspace are which.
    workspaces: Vec<Range<u64>>,
    workspace_bytes: usize,
    /// Counters, which each launch leaves as zeros.
    tickets: Memory,
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

impl Loaded {
    /// Queues it, with what its text declares: `parameters` are as long as the kernel says. It may
    /// start while the launch before it ends, if its text waits for that.
    fn queue(&self, waits: bool, parameters: &mut [*mut c_void]) -> Result<(), Failure> {
        let mut early = [starts_early()];
        let mut config = CUlaunchConfig {
            gridDimX: self.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.function.threads as c_uint,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.function.tile.dynamic_shared_bytes() as c_uint,
            hStream: std::ptr::null_mut(),
            attrs: early.as_mut_ptr(),
            numAttrs: c_uint::from(waits),
        };
        let (parameters, extra) = (parameters.as_mut_ptr(), std::ptr::null_mut());
        let launch = |config: &CUlaunchConfig| {
            // SAFETY: the function is loaded; the driver copies parameters and configuration, and
            // the parameters are those that the text declares. Only memory of the GPU is accessed,
            // after the function has waited for the launch before it.
            unsafe { sys::cuLaunchKernelEx(config, self.handle, parameters, extra) }
        };
        let mut status = launch(&config);
        if status == sys::CUresult::CUDA_ERROR_NOT_SUPPORTED {
            // A driver that lets no launch start early.
            config.numAttrs = 0;
            status = launch(&config);
        }
        status.result().map_err(failure("cuLaunchKernelEx"))
    }
}

impl Launch {
    /// The launch of a kernel whose functions are in a module under these names.
    ///
    /// # Errors
    /// A function is not there, or needs more shared memory than a block can have.
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
            let resident = u64::from(context.multiprocessors()) * resident.max(1) as u64;
            let grid =
                if function.is_persistent() { function.grid.min(resident) } else { function.grid };
            let blocks = u32::try_from(grid).unwrap_or(u32::MAX);
            Ok(Loaded { handle, function: function.clone(), blocks })
        };
        let mut tickets =
            Memory::new(context, functions.tickets as usize * DType::U32.size() as usize)?;
        tickets.fill(0)?;
        Ok(Launch {
            inputs: kernel.inputs().iter().map(|of| of.bytes()).collect(),
            outputs: kernel.outputs().iter().map(|of| of.bytes()).collect(),
            functions: functions
                .functions
                .iter()
                .enumerate()
                .map(loaded)
                .collect::<Result<_, _>>()?,
            workspaces: functions.workspace_ranges(),
            workspace_bytes: functions.workspace().0 as usize,
            tickets,
            module: Arc::clone(module),
        })
    }

    /// Bytes of the workspace of a launch.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Queues the functions, with the scalars of a launch and a workspace that holds nothing.
    ///
    /// # Errors
    /// They cannot be started.
    ///
    /// # Panics
    /// A buffer is missing, or is shorter than the kernel says.
    pub fn start(
        &self,
        scalars: &[i64],
        inputs: &[Piece<'_>],
        outputs: &[Piece<'_>],
        workspace: &Piece<'_>,
    ) -> Result<(), Failure> {
        for (buffers, wanted) in [(inputs, &self.inputs), (outputs, &self.outputs)] {
            assert_eq!(buffers.len(), wanted.len(), "the buffers of a launch");
            let is_long = |(buffer, wanted): (&Piece<'_>, &usize)| buffer.len() >= *wanted;
            assert!(buffers.iter().zip(wanted).all(is_long), "a buffer is too short");
        }
        self.module.context.bind()?;
        let start = |buffer: Buffer| match buffer {
            Buffer::Input(at) => inputs[at].address(),
            Buffer::Output(at) => outputs[at].address(),
            Buffer::Workspace(at) => {
                let Range { start, end } = self.workspaces[at];
                workspace.part(start as usize..end as usize).address()
            }
            Buffer::Tickets => self.tickets.whole().address(),
        };
        for loaded in &self.functions {
            let function = &loaded.function;
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
            loaded.queue(self.module.context.waits_in_kernels(), &mut parameters)?;
        }
        Ok(())
    }
}

/// Lets a launch start while the one before it ends (programmatic dependent launch): its text
/// begins with a wait for that.
fn starts_early() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
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
