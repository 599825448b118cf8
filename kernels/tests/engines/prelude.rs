//! The prelude for CPUs, compiled: a header that is read at once, and an object file that each
//! library of text is linked with. Both are made once for some options and kept by content, beside
//! what else tests write.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use gantline_kernels::cuda::{host_prelude, host_source};

/// What texts are compiled behind, and linked with.
pub(crate) struct Prelude {
    pub(crate) header: PathBuf,
    pub(crate) object: PathBuf,
}

impl Prelude {
    /// The prelude for texts that are compiled with the same options, with more source behind its
    /// own.
    pub(crate) fn new(compiler: &Path, options: &[&str], more: &str) -> Prelude {
        /// Threads that want the same wait for one of them.
        static BUILDS: Mutex<()> = Mutex::new(());
        let (header, source) = (host_prelude(), host_source() + more);
        let version =
            Command::new(compiler).arg("--version").output().expect("the compiler starts");
        let mut hasher = DefaultHasher::new();
        (version.stdout, options, &header, &source).hash(&mut hasher);
        let name = format!("host-{:016x}", hasher.finish());
        let all = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let folder = all.join(&name);
        let _held = BUILDS.lock().expect("no compilation has failed");
        if !folder.is_dir() {
            // Other processes may build the same: the first that is done gives it its name.
            let own = all.join(format!("{name}.{}", std::process::id()));
            build(&own, &[(HEADER, &header), (SOURCE, &source)], compiler, options);
            if std::fs::rename(&own, &folder).is_err() {
                assert!(folder.is_dir(), "{} can be renamed", own.display());
                let _ = std::fs::remove_dir_all(&own);
            }
        }
        Prelude { header: folder.join(HEADER), object: folder.join(OBJECT) }
    }
}

const HEADER: &str = "host.h";
const SOURCE: &str = "host.cpp";
const OBJECT: &str = "host.o";

/// Writes files to a folder, and compiles them there.
fn build(folder: &Path, files: &[(&str, &str)], compiler: &Path, options: &[&str]) {
    std::fs::create_dir_all(folder).expect("the folder for tests can be written");
    for (name, text) in files {
        std::fs::write(folder.join(name), text).expect("the folder for tests can be written");
    }
    let compile = |arguments: &[&str]| {
        run(Command::new(compiler).current_dir(folder).args(options).args(arguments));
    };
    compile(&["-x", "c++-header", HEADER, "-o", &format!("{HEADER}.gch")]);
    compile(&["-include", HEADER, "-c", SOURCE, "-o", OBJECT]);
}

/// Options for texts, whose numbers have the bits of the CPU's.
pub(crate) fn options() -> Vec<&'static str> {
    let mut options = vec!["-std=c++17", "-O1", "-w", "-fPIC", "-ffp-contract=off"];
    if cfg!(target_arch = "x86_64") {
        options.push("-mfma");
    }
    // It takes a third of the time that GNU's other linker does.
    if executable(&["ld.gold"]).is_some() {
        options.push("-fuse-ld=gold");
    }
    options
}

/// The first program of these names that this machine has.
pub(crate) fn executable(names: &[&str]) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths)
        .flat_map(|folder| names.iter().map(move |name| folder.join(name)))
        .find(|path| path.is_file())
}

/// Runs a compiler, which has to succeed.
pub(crate) fn run(command: &mut Command) {
    let output = command.output().expect("the compiler starts");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {told}");
}
