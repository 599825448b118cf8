//! NVRTC: CUDA C++ to machine code, without a GPU. Its library is opened at run time.
//!
//! It is looked for where `GANTLINE_NVRTC` says, a file or a folder, then where the loader looks,
//! then in the usual place of the CUDA toolkit.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// Where the library is, for users who say it.
pub const VARIABLE: &str = "GANTLINE_NVRTC";

/// Names of the library, the newest first: later ones compile the same text.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
/// The folder of the CUDA toolkit.
const TOOLKIT: &str = "/usr/local/cuda/lib64";
/// What the library opens beside itself.
const BUILTINS: &str = "libnvrtc-builtins.so";

type Program = *mut c_void;

/// The compiler.
pub struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    version: (i32, i32),
    /// Closed after everything that was found in them.
    _libraries: Vec<Library>,
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("version", &self.version).finish_non_exhaustive()
    }
}

/// Machine code, and what its compiler says of each function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// The bytes of the file.
    pub bytes: Vec<u8>,
    /// What each function takes.
    pub used: Vec<Used>,
    /// What the compiler warns of.
    pub warnings: Vec<String>,
}

/// What a function takes of a multiprocessor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// The function.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's stack.
    pub stack_bytes: u32,
    /// Bytes that are stored for want of registers.
    pub spill_bytes: u32,
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
}

/// Why there is no compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent(String);

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no compiler of CUDA C++: {}; {VARIABLE} says where `libnvrtc.so` is", self.0)
    }
}

impl Nvrtc {
    /// Opens the library.
    ///
    /// # Errors
    /// It is not there, or lacks a function.
    pub fn open() -> Result<Nvrtc, Absent> {
        let said = std::env::var_os(VARIABLE).map(PathBuf::from);
        let mut tried = String::from("it is not installed");
        for path in candidates(said.as_deref()) {
            match Nvrtc::at(&path) {
                Ok(found) => return Ok(found),
                Err(error) => tried = error,
            }
        }
        Err(Absent(tried))
    }

    fn at(path: &Path) -> Result<Nvrtc, String> {
        let mut libraries: Vec<Library> = Vec::new();
        // A library beside which its other half lies does not find that by itself.
        if let Some(folder) = path.parent().filter(|folder| folder.is_dir()) {
            let beside = std::fs::read_dir(folder).into_iter().flatten().flatten();
            let is_meant = |name: &str| name.starts_with(BUILTINS);
            let halves = beside.filter(|file| file.file_name().to_str().is_some_and(is_meant));
            libraries.extend(halves.filter_map(|file| load(&file.path()).ok()));
        }
        let library = load(path)?;
        macro_rules! symbol {
            ($name:literal) => {{
                // SAFETY: the library declares the function with this signature: `nvrtc.h`.
                let found = unsafe { library.get($name) };
                *found.map_err(|error| format!("{}: {error}", path.display()))?
            }};
        }
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
            symbol!(b"nvrtcVersion\0");
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both numbers can be written.
        unsafe { version(&raw mut major, &raw mut minor) };
        Ok(Nvrtc {
            create: symbol!(b"nvrtcCreateProgram\0"),
            compile: symbol!(b"nvrtcCompileProgram\0"),
            destroy: symbol!(b"nvrtcDestroyProgram\0"),
            log_size: symbol!(b"nvrtcGetProgramLogSize\0"),
            log: symbol!(b"nvrtcGetProgramLog\0"),
            cubin_size: symbol!(b"nvrtcGetCUBINSize\0"),
            cubin: symbol!(b"nvrtcGetCUBIN\0"),
            version: (major, minor),
            _libraries: {
                libraries.push(library);
                libraries
            },
        })
    }

    /// The version: 12.9 is (12, 9).
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles text for an architecture, such as `sm_90a`.
    ///
    /// **Determinism**: equal text gives equal bytes, with one version of the library.
    ///
    /// # Errors
    /// What the compiler says of text that it refuses.
    pub fn compile(&self, text: &str, architecture: &str) -> Result<Cubin, String> {
        let source = CString::new(text).map_err(|error| error.to_string())?;
        let options = [
            format!("--gpu-architecture={architecture}"),
            "--fmad=false".to_owned(),
            "-std=c++17".to_owned(),
            "--ptxas-options=-v".to_owned(),
        ];
        let options = options.map(|option| CString::new(option).unwrap_or_default());
        let options = options.each_ref().map(|option| option.as_ptr());
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: the program is written to; the texts end with zeros, and there are no headers.
        let made = unsafe {
            (self.create)(
                &raw mut program,
                source.as_ptr(),
                c"kernels.cu".as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        if made != 0 {
            return Err(format!("the compiler cannot be started: it fails with {made}"));
        }
        // SAFETY: the program was made, and the options are texts that end with zeros.
        let status = unsafe { (self.compile)(program, options.len() as c_int, options.as_ptr()) };
        let log = self.read(program, self.log_size, self.log);
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
        let result = match status {
            0 => Ok(cubin(self.read(program, self.cubin_size, self.cubin), &log)),
            _ => Err(log.into_owned()),
        };
        // SAFETY: the program is not used again.
        unsafe { (self.destroy)(&raw mut program) };
        result
    }

    fn read(
        &self,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Vec<u8> {
        let mut length = 0;
        // SAFETY: the program was made; the length can be written.
        if unsafe { size(program, &raw mut length) } != 0 {
            return Vec::new();
        }
        let mut bytes = vec![0_u8; length];
        // SAFETY: the buffer is as long as the library says.
        if unsafe { get(program, bytes.as_mut_ptr().cast()) } != 0 {
            return Vec::new();
        }
        bytes
    }
}

fn load(path: &Path) -> Result<Library, String> {
    // SAFETY: the library's constructors run as in any program that compiles CUDA C++.
    let opened = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    opened.map_err(|error| format!("`{}` cannot be opened: {error}", path.display()))
}

/// Where the library may be.
fn candidates(said: Option<&Path>) -> Vec<PathBuf> {
    match said {
        Some(path) if path.is_dir() => NAMES.map(|name| path.join(name)).to_vec(),
        Some(path) => vec![path.to_owned()],
        None => {
            let toolkit = NAMES.map(|name| Path::new(TOOLKIT).join(name));
            NAMES.map(PathBuf::from).into_iter().chain(toolkit).collect()
        }
    }
}

/// What the log of the assembler says, line by line.
fn cubin(bytes: Vec<u8>, log: &str) -> Cubin {
    let mut used: Vec<Used> = Vec::new();
    let mut warnings = Vec::new();
    for line in log.lines() {
        if let Some(name) = between(line, "Compiling entry function '", "'") {
            used.push(Used { name: name.to_owned(), ..Used::default() });
        } else if line.contains("warning") || line.contains("Performance Loss") {
            // Warp group products that the assembler serialises are "info" to it.
            warnings.push(line.trim().to_owned());
        }
        let Some(last) = used.last_mut() else { continue };
        let number = |unit: &str| -> Option<u32> {
            let before = line.split(unit).next().filter(|before| before.len() < line.len())?;
            before.rsplit([' ', ',']).find(|word| !word.is_empty())?.parse().ok()
        };
        last.registers = number(" registers").unwrap_or(last.registers);
        last.stack_bytes = number(" bytes stack frame").unwrap_or(last.stack_bytes);
        last.spill_bytes = number(" bytes spill stores").unwrap_or(last.spill_bytes);
        last.shared_bytes = number(" bytes smem").unwrap_or(last.shared_bytes);
    }
    Cubin { bytes, used, warnings }
}

fn between<'t>(text: &'t str, before: &str, after: &str) -> Option<&'t str> {
    text.split_once(before)?.1.split_once(after).map(|(found, _)| found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_of_the_assembler_is_read() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'rows' for 'sm_80'\n\
                   ptxas info    : Function properties for rows\n\
                   ptxas         .     40 bytes stack frame, 8 bytes spill stores, 4 bytes spill \
                   loads\n\
                   ptxas info    : Used 31 registers, used 1 barriers, 8320 bytes smem, 384 bytes \
                   cmem[0]\n\
                   ptxas info    : Compiling entry function 'copy' for 'sm_80'\n\
                   ptxas info    : Used 8 registers, 376 bytes cmem[0]\n";
        let found = cubin(vec![1], log);
        let rows = Used {
            name: "rows".to_owned(),
            registers: 31,
            stack_bytes: 40,
            spill_bytes: 8,
            shared_bytes: 8320,
        };
        let copy = Used { name: "copy".to_owned(), registers: 8, ..Used::default() };
        assert_eq!(found, Cubin { bytes: vec![1], used: vec![rows, copy], warnings: Vec::new() });
    }

    #[test]
    fn a_library_that_is_not_there_is_named() {
        let absent = Nvrtc::at(Path::new("/nowhere/libnvrtc.so.12")).unwrap_err();
        assert!(absent.contains("/nowhere/libnvrtc.so.12"), "{absent}");
    }
}
