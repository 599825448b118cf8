//! `doctor`: what this machine has, and what is missing for what.
//!
//! Libraries are looked for by name where the dynamic linker looks, and not opened: a library that
//! is found may still be broken.

use std::path::{Path, PathBuf};

use kernels::Bytes;
use planner::machine::Machine;
use runtime::cuda::Gpu;
use runtime::cuda::context::Context;
use runtime::cuda::nvrtc::{self, Nvrtc};
use runtime::processes::Launch;
use serde_json::Value;

use crate::documents::{Doctor, Document, ExecutingGpu, Launcher, LibraryRow};
use crate::failure::{Exit, Failure};
use crate::output;

/// Flags of `doctor`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// A library that programs on other devices or machines need.
struct Library {
    name: &'static str,
    /// What it is for.
    gives: &'static str,
    /// File names, any of which will do.
    files: &'static [&'static str],
    /// What to do without it.
    way_out: &'static str,
    /// Whether this version uses it.
    is_used: bool,
}

/// Names of files: those of CUDA 12 and 13.
const LIBRARIES: [Library; 4] = [
    Library {
        name: "CUDA driver",
        gives: "NVIDIA GPUs",
        files: &["libcuda.so.1"],
        way_out: "install NVIDIA's driver; in a container, start it with --gpus all",
        is_used: true,
    },
    Library {
        name: "NVRTC",
        gives: "generated kernels on GPUs",
        files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
        way_out: "install the CUDA toolkit, or its package cuda-nvrtc; GANTLINE_NVRTC says where \
                  it is",
        is_used: true,
    },
    Library {
        name: "cuBLASLt",
        gives: "products on GPUs",
        files: &["libcublasLt.so.13", "libcublasLt.so.12"],
        way_out: "install the CUDA toolkit, or its package libcublas",
        is_used: false,
    },
    Library {
        name: "NCCL",
        gives: "collectives between GPUs",
        files: &["libnccl.so"],
        way_out: "install NCCL (Debian: libnccl-dev), or link libnccl.so to libnccl.so.2 in a \
                  folder of LD_LIBRARY_PATH",
        is_used: true,
    },
];

/// Directories of libraries besides those that the machine is configured with.
const FOLDERS: [&str; 8] = [
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
];

/// Answers.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let machine = Machine::detect();
    let folders = folders();
    let found = LIBRARIES.map(|library| find(&library, &folders));
    let gpus = gpus();
    if args.json {
        output::answer_json(&document(&machine, &gpus, &found));
    } else {
        output::answer(&page(&machine, &gpus, &found));
    }
    Ok(Exit::Success)
}

/// The GPUs of this machine; none where the driver shows none.
fn gpus() -> Vec<ExecutingGpu> {
    let listed = runtime::cuda::gpus().unwrap_or_default();
    let row = |(number, gpu): (usize, Gpu)| ExecutingGpu {
        name: gpu.name,
        memory_bytes: gpu.memory_bytes,
        kernels_for: Context::open(number).ok().and_then(|it| Some(it.arch()?.to_string())),
    };
    listed.into_iter().enumerate().map(row).collect()
}

/// Where libraries are looked for: what GANTLINE_NVRTC says, then where the dynamic linker looks,
/// LD_LIBRARY_PATH first and then what it is configured with.
fn folders() -> Vec<PathBuf> {
    let said = std::env::var_os(nvrtc::VARIABLE).map(PathBuf::from);
    let said = said.map(|at| if at.is_file() { at.parent().map(PathBuf::from) } else { Some(at) });
    let given = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let given = std::env::split_paths(&given).filter(|folder| !folder.as_os_str().is_empty());
    let mut folders: Vec<PathBuf> = said.flatten().into_iter().chain(given).collect();
    let configured = std::fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = configured.map(|entry| entry.path()).collect();
    files.sort();
    for text in files.iter().filter_map(|file| std::fs::read_to_string(file).ok()) {
        folders
            .extend(text.lines().map(str::trim).filter(|l| l.starts_with('/')).map(PathBuf::from));
    }
    folders.extend(FOLDERS.map(PathBuf::from));
    folders
}

fn find(library: &Library, folders: &[PathBuf]) -> Option<PathBuf> {
    let mut paths = folders.iter().flat_map(|f| library.files.iter().map(move |file| f.join(file)));
    paths.find(|path| Path::is_file(path))
}

/// What a launcher says to this process; none where it was started by itself, or that makes no
/// sense.
fn launch() -> Option<Launch> {
    Launch::from_environment().ok().flatten()
}

fn document(machine: &Machine, gpus: &[ExecutingGpu], found: &[Option<PathBuf>]) -> Value {
    let library = |(library, found): (&Library, &Option<PathBuf>)| LibraryRow {
        name: library.name.to_owned(),
        gives: library.gives.to_owned(),
        file: found.as_ref().map(|path| path.display().to_string()),
        looked_for: library.files.iter().map(|file| (*file).to_owned()).collect(),
        way_out: found.is_none().then(|| library.way_out.to_owned()),
    };
    let launcher = launch().map(|launch| Launcher {
        name: launch.launcher.to_owned(),
        rank: launch.process.to_string(),
        ranks: launch.count.to_string(),
    });
    let document = Doctor {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cores: machine.cores as u64,
        memory_bytes: machine.memory_bytes,
        instruction_set: machine.instruction_set.clone(),
        executes_on: [Some("cpu"), executes_on_gpus(gpus).then_some("cuda")]
            .into_iter()
            .flatten()
            .map(str::to_owned)
            .collect(),
        gpus: gpus.to_vec(),
        libraries: LIBRARIES.iter().zip(found).map(library).collect(),
        launcher,
    };
    document.to_json()
}

/// Whether programs run on some GPU.
fn executes_on_gpus(gpus: &[ExecutingGpu]) -> bool {
    gpus.iter().any(|gpu| gpu.kernels_for.is_some()) && Nvrtc::open().is_ok()
}

fn page(machine: &Machine, gpus: &[ExecutingGpu], found: &[Option<PathBuf>]) -> String {
    let Machine { cores, memory_bytes, instruction_set } = machine;
    let mut text = format!(
        "gantline {}, executes on the cores of one machine{}\n\
         cores    {cores}: as many ranks as that do not share one\n\
         memory   {}\n\
         kernels  for {instruction_set}{}\n",
        env!("CARGO_PKG_VERSION"),
        if executes_on_gpus(gpus) { " and on its GPUs" } else { "" },
        Bytes(*memory_bytes),
        match instruction_set.as_str() {
            "portable" => ": slow; AVX2 or AVX-512 make products several times faster",
            _ => "",
        },
    );
    match Launch::from_environment() {
        Ok(None) => {}
        Ok(Some(launch)) => {
            let Launch { launcher, process, count, local: (own, beside), leader, .. } = launch;
            let (host, port) = leader;
            text += &format!(
                "started  by {launcher} as process {process} of {count}, and {own} of {beside} on \
                 this machine, counted from 0; the first is on {host}:{port}\n"
            );
        }
        Err(why) => text += &format!("started  in a way that makes no sense: {why}\n"),
    }
    for (number, ExecutingGpu { name, memory_bytes, kernels_for }) in gpus.iter().enumerate() {
        let kernels = match kernels_for {
            Some(arch) => format!("kernels for {arch}"),
            None => "no kernels are written for it".to_owned(),
        };
        text += &format!("gpu {number:<5}{name}, {}: {kernels}\n", Bytes(*memory_bytes));
    }
    for (is_used, what) in [(true, "libraries"), (false, "libraries that are not used yet")] {
        text += &format!("\n{what}\n");
        let all = LIBRARIES.iter().zip(found);
        for (library, found) in all.filter(|(library, _)| library.is_used == is_used) {
            let (name, gives) = (library.name, library.gives);
            text += &match found {
                Some(path) => format!("  found    {name}: {}, for {gives}\n", path.display()),
                None => format!("  missing  {name}, for {gives}: {}\n", library.way_out),
            };
        }
    }
    text
}
