//! The text of kernels as CUDA C++, compiled for this machine: blocks run one after the other, or
//! a few in turn, and their threads are fibers. Where a GPU is asked for, it executes the text
//! instead.

#[path = "gpu.rs"]
mod gpu;
#[path = "prelude.rs"]
mod prelude;

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use gantline_kernels::Kernel;
use gantline_kernels::cpu::{View, ViewMut};
use gantline_kernels::cuda::{Buffer, Functions};

pub(crate) use prelude::{Prelude, options, run};

/// Kernels, compiled.
pub(crate) struct Library {
    kernels: Vec<Compiled>,
    report: Option<Report>,
    counters: Option<Counters>,
    gpu: Option<gpu::Launches>,
}

/// What counts, and the counts of each function that was launched since they were last taken.
struct Counters {
    name: Region,
    take: TakeCounts,
    taken: Mutex<Vec<Counts>>,
}

/// A kernel, its device functions, and for each what launches it.
struct Compiled {
    kernel: Kernel,
    functions: Functions,
    launchers: Vec<Launcher>,
}

/// The first finding of the checks since the last call on this thread, as text of C.
type Report = unsafe extern "C" fn() -> *const c_char;

/// Names a buffer whose accesses are counted.
type Region = unsafe extern "C" fn(*const c_void, usize);

/// Stores the counts since the last call.
type TakeCounts = unsafe extern "C" fn(*mut Counts);

/// What launches have accessed.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Sectors of global memory that requests touch, and as many as their bytes fill.
    pub(crate) sectors: [u64; 2],
    /// Turns of the banks of shared memory that requests take, and as many as their words fill.
    pub(crate) turns: [u64; 2],
    /// Those of `ldmatrix`.
    pub(crate) matrix_turns: [u64; 2],
}

/// Buffers, scalars, and the seed of the order of threads.
type Launcher = unsafe extern "C" fn(*const *mut c_void, *const i64, u64);

/// Changes the text of a device function, given the number of its kernel.
type Change<'a> = &'a dyn Fn(usize, String) -> String;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Has accesses counted.
const COUNTED: &str = "-DSHIM_COUNTED";

/// Symbols are found when the library is opened.
const RTLD_NOW: c_int = 2;

impl Library {
    /// Compiles and opens some kernels; none where there is no compiler.
    pub(crate) fn new(name: &str, kernels: Vec<(Kernel, Functions)>) -> Option<Library> {
        if let Some(context) = gpu::wanted() {
            let gpu = Some(gpu::Launches::new(context, &kernels));
            let of_kernel = |(kernel, functions)| Compiled { kernel, functions, launchers: vec![] };
            let kernels = kernels.into_iter().map(of_kernel).collect();
            return Some(Library { kernels, report: None, counters: None, gpu });
        }
        Library::changed(name, kernels, &|_, text| text)
    }

    /// The same, with changed text.
    pub(crate) fn changed(
        name: &str,
        kernels: Vec<(Kernel, Functions)>,
        change: Change<'_>,
    ) -> Option<Library> {
        Library::compile(name, kernels, change, &[])
    }

    /// The same with checks of each access to shared memory; none where the compiler has no hooks.
    pub(crate) fn checked(
        name: &str,
        kernels: Vec<(Kernel, Functions)>,
        change: Change<'_>,
    ) -> Option<Library> {
        Library::compile(name, kernels, change, &["-fsanitize=thread", "-DSHIM_CHECKED"])
    }

    /// The same, which counts accesses to buffers and to shared memory.
    pub(crate) fn counted(name: &str, kernels: Vec<(Kernel, Functions)>) -> Option<Library> {
        // What a compiler copies for some of a warp's lanes, or for some turns of a loop, would be
        // a request of its own, and what it moves to a branch would be asked for by some lanes.
        let own = ["-fno-thread-jumps", "-fno-tree-loop-optimize", "-fno-tree-sink"];
        let options = [&["-fsanitize=thread", "-DSHIM_CHECKED", COUNTED][..], &own].concat();
        Library::compile(name, kernels, &|_, text| text, &options)
    }

    fn compile(
        name: &str,
        kernels: Vec<(Kernel, Functions)>,
        change: Change<'_>,
        options: &[&str],
    ) -> Option<Library> {
        let mut text = String::new();
        // Functions of the same text are one.
        let mut symbols: Vec<Vec<String>> = Vec::new();
        let mut known: HashMap<String, String> = HashMap::new();
        for (at, (_, functions)) in kernels.iter().enumerate() {
            let of_kernel = functions.functions.iter().enumerate().map(|(number, function)| {
                let name = symbol(at, number);
                let own = change(at, function.text(&name)) + &function.launcher(&name);
                let first = known.entry(own.replace(&name, "f")).or_insert_with(|| {
                    text += &own;
                    name
                });
                first.clone()
            });
            symbols.push(of_kernel.collect());
        }
        let library = open(&compiled(name, &text, options)?);
        // SAFETY: the library is open; what has checks declares the report with this signature.
        let report = unsafe {
            let found = dlsym(library, c"shim_report".as_ptr());
            (!found.is_null()).then(|| std::mem::transmute::<*mut c_void, Report>(found))
        };
        // SAFETY: the library is open; what counts declares both with these signatures.
        let counters = unsafe {
            let found = [c"shim_region", c"shim_counts"].map(|name| dlsym(library, name.as_ptr()));
            (!found[0].is_null() && !found[1].is_null()).then(|| Counters {
                name: std::mem::transmute::<*mut c_void, Region>(found[0]),
                take: std::mem::transmute::<*mut c_void, TakeCounts>(found[1]),
                taken: Mutex::default(),
            })
        };
        let launcher = |at: usize, number: usize| {
            let name = format!("{}_launch", symbols[at][number]);
            let name = CString::new(name).expect("no zeros");
            // SAFETY: the library is open, and stays so.
            let found = unsafe { dlsym(library, name.as_ptr()) };
            assert!(!found.is_null(), "{name:?} is in the library");
            // SAFETY: the text declares each launcher with this signature.
            unsafe { std::mem::transmute::<*mut c_void, Launcher>(found) }
        };
        let of_kernel = |(at, (kernel, functions)): (usize, (Kernel, Functions))| {
            let numbers = 0..functions.functions.len();
            let launchers = numbers.map(|number| launcher(at, number)).collect();
            Compiled { kernel, functions, launchers }
        };
        let kernels = kernels.into_iter().enumerate().map(of_kernel).collect();
        Some(Library { kernels, report, counters, gpu: None })
    }

    /// The functions of a kernel.
    pub(crate) fn functions(&self, at: usize) -> &Functions {
        &self.kernels[at].functions
    }

    /// What launches have accessed since the last call.
    pub(crate) fn counts(&self) -> Counts {
        let sum = |a: [u64; 2], b: [u64; 2]| [a[0] + b[0], a[1] + b[1]];
        self.counts_of_functions().into_iter().fold(Counts::default(), |all, of| Counts {
            sectors: sum(all.sectors, of.sectors),
            turns: sum(all.turns, of.turns),
            matrix_turns: sum(all.matrix_turns, of.matrix_turns),
        })
    }

    /// The same of each function, in the order of launches.
    pub(crate) fn counts_of_functions(&self) -> Vec<Counts> {
        let Some(Counters { taken, .. }) = &self.counters else { return Vec::new() };
        std::mem::take(&mut *taken.lock().expect("no launch has panicked"))
    }

    /// The first finding of the checks on this thread since the last call.
    pub(crate) fn report(&self) -> Option<String> {
        // SAFETY: the library is open, and its text ends with a zero and stays until the next call.
        let text = unsafe { CStr::from_ptr((self.report?)()) };
        Some(text.to_string_lossy().into_owned()).filter(|text| !text.is_empty())
    }

    /// The number of a kernel.
    pub(crate) fn position(&self, kernel: &Kernel) -> Option<usize> {
        self.kernels.iter().position(|compiled| compiled.kernel == *kernel)
    }

    /// Launches the functions of a kernel, one after the other, with the scalars of its launch and
    /// workspaces of NaNs.
    pub(crate) fn launch(
        &self,
        at: usize,
        scalars: &[i64],
        inputs: &[View<'_>],
        outputs: &[ViewMut<'_>],
        seed: u64,
    ) {
        self.launch_with(at, scalars, inputs, outputs, (None, seed));
    }

    /// As [`Library::launch`], with workspaces in a memory that is given.
    pub(crate) fn launch_with(
        &self,
        at: usize,
        scalars: &[i64],
        inputs: &[View<'_>],
        outputs: &[ViewMut<'_>],
        (memory, seed): (Option<&ViewMut<'_>>, u64),
    ) {
        let Compiled { kernel, functions, launchers } = &self.kernels[at];
        let (wanted_inputs, wanted_outputs) = (kernel.inputs(), kernel.outputs());
        assert_eq!((inputs.len(), outputs.len()), (wanted_inputs.len(), wanted_outputs.len()));
        for (view, wanted) in inputs.iter().zip(&wanted_inputs) {
            assert!(view.len() >= wanted.bytes(), "an input of {kernel:?} is too short");
        }
        for (view, wanted) in outputs.iter().zip(&wanted_outputs) {
            assert!(view.len() >= wanted.bytes(), "an output of {kernel:?} is too short");
        }
        if let Some(gpu) = &self.gpu {
            return gpu.launch(at, scalars, inputs, outputs);
        }
        let bytes = functions.workspace().0 as usize;
        let mut own = vec![u64::MAX; if memory.is_none() { bytes.div_ceil(8) } else { 0 }];
        assert!(memory.is_none_or(|memory| memory.len() == bytes), "{kernel:?}: {bytes}");
        let start: *mut u8 = memory.map_or(own.as_mut_ptr().cast(), ViewMut::as_ptr);
        let workspaces = functions.workspace_ranges();
        let mut tickets = vec![0_u32; functions.tickets as usize];
        let of_tickets = (tickets.as_ptr().cast(), size_of_val(&tickets[..]));
        let name_buffers = |counters: &Counters| {
            let inputs = inputs.iter().map(|view| (view.as_ptr().cast(), view.len()));
            let outputs =
                outputs.iter().map(|view| (view.as_ptr().cast_const().cast(), view.len()));
            let passed = workspaces.iter().map(|range| {
                let (from, to) = (range.start as usize, range.end as usize);
                // SAFETY: the memory is as long as all workspaces.
                (unsafe { start.add(from) }.cast_const().cast(), to - from)
            });
            for (at, len) in inputs.chain(outputs).chain(passed).chain([of_tickets]) {
                // SAFETY: the library is open, and keeps the address, which it does not read, until
                // counts are taken.
                unsafe { (counters.name)(at, len) };
            }
        };
        for (function, launcher) in functions.functions.iter().zip(launchers) {
            let address = |buffer: Buffer| -> *mut c_void {
                match buffer {
                    Buffer::Input(at) => inputs[at].as_ptr().cast_mut().cast(),
                    Buffer::Output(at) => outputs[at].as_ptr().cast(),
                    Buffer::Workspace(at) => {
                        // SAFETY: the memory is as long as all workspaces.
                        unsafe { start.add(workspaces[at].start as usize) }.cast()
                    }
                    Buffer::Tickets => tickets.as_mut_ptr().cast(),
                }
            };
            let buffers: Vec<*mut c_void> = function.passed().into_iter().map(address).collect();
            let scalars = function.scalars(scalars);
            self.counters.iter().for_each(name_buffers);
            // SAFETY: all buffers are as long as the kernel says, and its functions access nothing
            // else, and write outputs and workspaces alone.
            unsafe { launcher(buffers.as_ptr(), scalars.as_ptr(), seed) };
            if let Some(Counters { take, taken, .. }) = &self.counters {
                let mut counts = Counts::default();
                // SAFETY: the library is open, and stores as many numbers as there are.
                unsafe { take(&raw mut counts) };
                taken.lock().expect("no launch has panicked").push(counts);
            }
        }
    }
}

/// The name of a function of a kernel.
fn symbol(at: usize, number: usize) -> String {
    format!("k{at}_{number}")
}

/// Whether a GPU executes the text.
pub(crate) fn on_gpu() -> bool {
    gpu::wanted().is_some()
}

/// The C++ compiler of this machine.
pub(crate) fn compiler() -> Option<PathBuf> {
    prelude::executable(&["c++", "g++", "clang++"])
}

fn compiled(name: &str, text: &str, more: &[&str]) -> Option<PathBuf> {
    let compiler = compiler()?;
    let options = [&options(), more].concat();
    let counts = if more.contains(&COUNTED) { include_str!("counts.h") } else { "" };
    let prelude = Prelude::new(&compiler, &options, counts);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let [source, unlinked, object] =
        [format!("{name}.cpp"), format!("{name}.o"), format!("lib{name}.so")]
            .map(|name| folder.join(name));
    std::fs::write(&source, text).expect("the folder for tests can be written");
    let mut command = Command::new(&compiler);
    command.args(options).arg("-include").arg(&prelude.header).arg("-c").arg(&source);
    run(command.arg("-o").arg(&unlinked));
    // Without more options: hooks are the prelude's, not those of a library of the compiler's.
    let mut command = Command::new(&compiler);
    command.args(prelude::options()).arg("-shared").arg(&unlinked).arg(&prelude.object);
    run(command.arg("-o").arg(&object));
    Some(object)
}

fn open(object: &Path) -> *mut c_void {
    let path = CString::new(object.to_str().expect("the path is text")).expect("no zeros");
    // SAFETY: the path is a text that ends with a zero; the library runs nothing when it is opened.
    let library = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
    assert!(!library.is_null(), "the library that was compiled is opened");
    library
}
