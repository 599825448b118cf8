//! The text of kernels as CUDA C++, compiled for this machine: blocks run one after the other,
//! their threads are fibers.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

use gantline_kernels::cuda::{Functions, host_prelude};

/// The launches of some kernels.
pub(crate) struct Library {
    functions: Vec<Functions>,
    /// By kernel and function.
    launches: Vec<Vec<Launch>>,
    report: Option<Report>,
}

/// What checks have found since the last time: a text of C.
type Report = unsafe extern "C" fn() -> *const c_char;

/// Buffers, scalars, and what decides the order of threads.
type Launch = unsafe extern "C" fn(*const *mut c_void, *const i64, u64);

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Symbols are found when the library is opened.
const RTLD_NOW: c_int = 2;

impl Library {
    /// Compiles and opens what some kernels launch; none where there is no compiler.
    pub(crate) fn new(name: &str, functions: Vec<Functions>) -> Option<Library> {
        Library::changed(name, functions, &|_, text| text)
    }

    /// The same of text that was changed: that of each function of a kernel, by its number.
    pub(crate) fn changed(
        name: &str,
        functions: Vec<Functions>,
        change: &dyn Fn(usize, String) -> String,
    ) -> Option<Library> {
        Library::compile(name, functions, change, &[])
    }

    /// The same with checks of each access to shared memory; none where the compiler has no hooks.
    pub(crate) fn checked(
        name: &str,
        functions: Vec<Functions>,
        change: &dyn Fn(usize, String) -> String,
    ) -> Option<Library> {
        Library::compile(name, functions, change, &["-fsanitize=thread", "-DSHIM_CHECKED"])
    }

    fn compile(
        name: &str,
        functions: Vec<Functions>,
        change: &dyn Fn(usize, String) -> String,
        options: &[&str],
    ) -> Option<Library> {
        let mut text = host_prelude();
        for (at, of) in functions.iter().enumerate() {
            for (number, function) in of.functions.iter().enumerate() {
                let name = symbol(at, number);
                text += &change(at, function.text(&name));
                text += &function.launcher(&name);
            }
        }
        let library = open(&compiled(name, &text, options)?);
        // SAFETY: the library is open; what has checks declares the report with this signature.
        let report = unsafe {
            let found = dlsym(library, c"shim_report".as_ptr());
            (!found.is_null()).then(|| std::mem::transmute::<*mut c_void, Report>(found))
        };
        let launch = |at: usize, number: usize| {
            let name = CString::new(format!("{}_launch", symbol(at, number))).expect("no zeros");
            // SAFETY: the library is open, and stays so.
            let found = unsafe { dlsym(library, name.as_ptr()) };
            assert!(!found.is_null(), "{name:?} is in the library");
            // SAFETY: the text declares each launcher with this signature.
            unsafe { std::mem::transmute::<*mut c_void, Launch>(found) }
        };
        let of_kernel = |(at, of): (usize, &Functions)| {
            (0..of.functions.len()).map(|number| launch(at, number)).collect()
        };
        let launches = functions.iter().enumerate().map(of_kernel).collect();
        Some(Library { functions, launches, report })
    }

    /// What checks have found on this thread since the last time, the first thing alone.
    pub(crate) fn report(&self) -> Option<String> {
        // SAFETY: the library is open, and its text ends with a zero and stays until the next call.
        let text = unsafe { CStr::from_ptr((self.report?)()) };
        Some(text.to_string_lossy().into_owned()).filter(|text| !text.is_empty())
    }

    /// What was compiled, by kernel.
    pub(crate) fn functions(&self) -> &[Functions] {
        &self.functions
    }

    /// Launches a function of a kernel on buffers in the order of
    /// [`gantline_kernels::cuda::Function::passed`], with the scalars of the kernel's launch.
    ///
    /// # Safety
    ///
    /// The buffers are those that the kernel wants, and as long as it says.
    pub(crate) unsafe fn launch(
        &self,
        at: usize,
        number: usize,
        buffers: &[*mut c_void],
        scalars: &[i64],
        seed: u64,
    ) {
        let function = &self.functions[at].functions[number];
        let scalars = function.scalars(scalars);
        assert_eq!(buffers.len(), function.passed().len(), "each buffer is passed once");
        // SAFETY: by the contract of the function.
        unsafe { (self.launches[at][number])(buffers.as_ptr(), scalars.as_ptr(), seed) };
    }
}

/// The name of a function of a kernel.
fn symbol(at: usize, number: usize) -> String {
    format!("k{at}_{number}")
}

/// The C++ compiler of this machine.
pub(crate) fn compiler() -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths)
        .flat_map(|folder| ["c++", "g++", "clang++"].map(|name| folder.join(name)))
        .find(|path| path.is_file())
}

fn compiled(name: &str, text: &str, options: &[&str]) -> Option<PathBuf> {
    let compiler = compiler()?;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, object) =
        (folder.join(format!("{name}.cpp")), folder.join(format!("lib{name}.so")));
    std::fs::write(&source, text).expect("the folder for tests can be written");
    let run = |arguments: &[&str], from: &Path, to: &Path| {
        let mut command = Command::new(&compiler);
        command.args(arguments).arg("-o").arg(to).arg(from);
        let output = command.output().expect("the compiler starts");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {told}", source.display());
    };
    let unlinked = folder.join(format!("{name}.o"));
    let mut arguments = vec!["-std=c++17", "-O1", "-w", "-fPIC", "-c", "-ffp-contract=off"];
    if cfg!(target_arch = "x86_64") {
        arguments.push("-mfma");
    }
    arguments.extend(options);
    run(&arguments, &source, &unlinked);
    // Without options: hooks are those of the text, not those of a library of the compiler's.
    run(&["-shared"], &unlinked, &object);
    Some(object)
}

fn open(object: &Path) -> *mut c_void {
    let path = CString::new(object.to_str().expect("the path is text")).expect("no zeros");
    // SAFETY: the path is a text that ends with a zero; the library runs nothing when it is opened.
    let library = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
    assert!(!library.is_null(), "the library that was compiled is opened");
    library
}
