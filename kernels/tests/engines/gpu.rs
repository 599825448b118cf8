//! The text of kernels as CUDA C++, compiled by NVRTC and launched on a GPU of this machine.

use std::sync::{Arc, Mutex, OnceLock};

use gantline_kernels::Kernel;
use gantline_kernels::cpu::{View, ViewMut};
use gantline_kernels::cuda::{Functions, device_prelude, name};
use runtime::cuda::context::Context;
use runtime::cuda::launch::{Launch, Module};
use runtime::cuda::memory::Memory;
use runtime::cuda::nvrtc::Nvrtc;

/// The number of the GPU on which text is executed instead of by the shim.
pub(crate) const VARIABLE: &str = "GANTLINE_GPU";

/// Kernels whose text is compiled at once.
const AT_ONCE: usize = 4;
/// Launches of which all have the same bits.
const RUNS: usize = 10;
/// What lies behind each buffer, and stays so.
const BEHIND: [u8; 64] = [0xa5; 64];

/// The GPU that was asked for.
pub(crate) fn wanted() -> Option<Arc<Context>> {
    static OPENED: OnceLock<Option<Arc<Context>>> = OnceLock::new();
    let open = || {
        let said = std::env::var(VARIABLE).ok()?;
        let number = said.parse().unwrap_or_else(|_| panic!("{VARIABLE}={said} is no number"));
        Some(Context::open(number).unwrap_or_else(|absent| panic!("{VARIABLE}={said}: {absent}")))
    };
    OPENED.get_or_init(open).clone()
}

/// The launches of some kernels.
pub(crate) struct Launches {
    context: Arc<Context>,
    /// Each with its workspace, which one launch at a time has.
    launches: Vec<(Launch, Mutex<Memory>)>,
}

impl Launches {
    /// Compiles and loads the text of functions.
    pub(crate) fn new(context: Arc<Context>, kernels: &[(Kernel, Functions)]) -> Launches {
        let arch = context.arch().expect("text is written for the GPU");
        let nvrtc = Nvrtc::open().unwrap_or_else(|absent| panic!("{absent}"));
        let chunks: Vec<&[(Kernel, Functions)]> = kernels.chunks(AT_ONCE).collect();
        let compiled = |chunk: &[(Kernel, Functions)]| {
            let mut text = device_prelude();
            for (at, (_, functions)) in chunk.iter().enumerate() {
                for (number, function) in functions.functions.iter().enumerate() {
                    text += &function.text(&name(at, number));
                }
            }
            nvrtc.compile(&text, arch.name()).unwrap_or_else(|log| panic!("{log}")).bytes
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut launches = Vec::new();
        for chunks in chunks.chunks(threads) {
            let cubins: Vec<Vec<u8>> = std::thread::scope(|scope| {
                let all: Vec<_> =
                    chunks.iter().map(|chunk| scope.spawn(|| compiled(chunk))).collect();
                all.into_iter().map(|thread| thread.join().expect("it compiles")).collect()
            });
            for (chunk, cubin) in chunks.iter().zip(cubins) {
                let module = Module::load(&context, &cubin).expect("the code is loaded");
                let module = Arc::new(module);
                let launch = |(at, of)| launch(&context, &module, at, of);
                launches.extend(chunk.iter().enumerate().map(launch));
            }
        }
        Launches { context, launches }
    }

    /// Launches a kernel, with workspaces of NaNs, several times on the same bits.
    pub(crate) fn launch(
        &self,
        at: usize,
        scalars: &[i64],
        inputs: &[View<'_>],
        outputs: &[ViewMut<'_>],
    ) {
        let (launch, workspace) = &self.launches[at];
        let mut workspace = workspace.lock().expect("no launch has failed");
        let upload = |start: *const u8, len: usize| {
            // SAFETY: the view lives until the launch returns, and has as many bytes.
            let bytes = unsafe { std::slice::from_raw_parts(start, len) };
            let bytes = [bytes, &BEHIND].concat();
            let mut memory = Memory::new(&self.context, bytes.len()).expect("there is memory");
            memory.write(0, &bytes).expect("bytes are copied to the GPU");
            memory
        };
        let inputs: Vec<Memory> =
            inputs.iter().map(|view| upload(view.as_ptr(), view.len())).collect();
        let pieces = inputs.iter().map(Memory::whole).collect::<Vec<_>>();
        let mut first: Option<Vec<Vec<u8>>> = None;
        for _ in 0..RUNS {
            workspace.fill(0xff).expect("workspaces are filled");
            let results: Vec<Memory> =
                outputs.iter().map(|view| upload(view.as_ptr(), view.len())).collect();
            let written = results.iter().map(Memory::whole).collect::<Vec<_>>();
            let started = launch.start(scalars, &pieces, &written, &workspace.whole());
            started.expect("the functions are started");
            self.context.synchronize().expect("the functions end");
            let read = |memory: &Memory| {
                let mut bytes = vec![0; memory.bytes()];
                memory.read(0, &mut bytes).expect("bytes are copied from the GPU");
                assert!(bytes.ends_with(&BEHIND), "kernel {at} writes behind a buffer");
                bytes.truncate(bytes.len() - BEHIND.len());
                bytes
            };
            let found: Vec<Vec<u8>> = results.iter().map(read).collect();
            // Nothing was written behind the inputs either.
            inputs.iter().for_each(|memory| drop(read(memory)));
            match &first {
                Some(first) => assert!(*first == found, "kernel {at} has other bits each time"),
                None => first = Some(found),
            }
        }
        for (view, bytes) in outputs.iter().zip(first.unwrap_or_default()) {
            // SAFETY: the view is an output of this launch, and has as many bytes.
            unsafe { view.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
    }
}

fn launch(
    context: &Arc<Context>,
    module: &Arc<Module>,
    at: usize,
    (kernel, functions): &(Kernel, Functions),
) -> (Launch, Mutex<Memory>) {
    let launch = Launch::new(module, kernel, functions, |number| name(at, number));
    let launch = launch.unwrap_or_else(|why| panic!("{kernel:?}: {why}"));
    let workspace = Memory::new(context, launch.workspace_bytes()).expect("there is memory");
    (launch, Mutex::new(workspace))
}
