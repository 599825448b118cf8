//! `doctor`: what this machine has, and what is missing for what.
//!
//! Libraries are looked for by name where the dynamic linker looks, and not opened: a library that
//! is found may still be broken.

use std::path::{Path, PathBuf};

use kernels::Bytes;
use planner::machine::Machine;
use serde_json::Value;

use crate::documents::{Doctor, Document, Launcher, LibraryRow};
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
}

/// Names of files: those of Open MPI 4 and 5, of MPICH and its relatives; of CUDA 12 and 13.
const LIBRARIES: [Library; 5] = [
    Library {
        name: "MPI",
        gives: "ranks on several machines",
        files: &["libmpi.so.40", "libmpi.so.12", "libmpi.so"],
        way_out: "install Open MPI or MPICH (Debian: libopenmpi3, libmpich12)",
    },
    Library {
        name: "CUDA driver",
        gives: "NVIDIA GPUs",
        files: &["libcuda.so.1"],
        way_out: "install NVIDIA's driver; in a container, start it with --gpus all",
    },
    Library {
        name: "NVRTC",
        gives: "generated kernels on GPUs",
        files: &["libnvrtc.so.13", "libnvrtc.so.12"],
        way_out: "install the CUDA toolkit, or its package cuda-nvrtc",
    },
    Library {
        name: "cuBLASLt",
        gives: "products on GPUs",
        files: &["libcublasLt.so.13", "libcublasLt.so.12"],
        way_out: "install the CUDA toolkit, or its package libcublas",
    },
    Library {
        name: "NCCL",
        gives: "collectives between GPUs",
        files: &["libnccl.so.2"],
        way_out: "install NCCL (Debian: libnccl2)",
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

/// Variables by which launchers tell a process its rank and the number of ranks.
const LAUNCHERS: [(&str, &str, &str); 4] = [
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
    ("torchrun", "RANK", "WORLD_SIZE"),
];

/// Answers.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let machine = Machine::detect();
    let folders = folders();
    let found = LIBRARIES.map(|library| find(&library, &folders));
    if args.json {
        output::answer_json(&document(&machine, &found));
    } else {
        output::answer(&page(&machine, &found));
    }
    Ok(Exit::Success)
}

/// Where the dynamic linker looks: LD_LIBRARY_PATH first, then what it is configured with.
fn folders() -> Vec<PathBuf> {
    let given = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> =
        std::env::split_paths(&given).filter(|folder| !folder.as_os_str().is_empty()).collect();
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

/// The launcher that has started this process, with its rank and the number of ranks.
fn launcher() -> Option<(&'static str, String, String)> {
    LAUNCHERS.into_iter().find_map(|(name, rank, ranks)| {
        Some((name, std::env::var(rank).ok()?, std::env::var(ranks).ok()?))
    })
}

fn document(machine: &Machine, found: &[Option<PathBuf>]) -> Value {
    let library = |(library, found): (&Library, &Option<PathBuf>)| LibraryRow {
        name: library.name.to_owned(),
        gives: library.gives.to_owned(),
        file: found.as_ref().map(|path| path.display().to_string()),
        looked_for: library.files.iter().map(|file| (*file).to_owned()).collect(),
        way_out: found.is_none().then(|| library.way_out.to_owned()),
    };
    let launcher =
        launcher().map(|(name, rank, ranks)| Launcher { name: name.to_owned(), rank, ranks });
    let document = Doctor {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cores: machine.cores as u64,
        memory_bytes: machine.memory_bytes,
        instruction_set: machine.instruction_set.clone(),
        executes_on: vec!["cpu".to_owned()],
        libraries: LIBRARIES.iter().zip(found).map(library).collect(),
        launcher,
    };
    document.to_json()
}

fn page(machine: &Machine, found: &[Option<PathBuf>]) -> String {
    let Machine { cores, memory_bytes, instruction_set } = machine;
    let mut text = format!(
        "gantline {}, executes on the cores of one machine\n\
         cores    {cores}: as many ranks as that do not share one\n\
         memory   {}\n\
         kernels  for {instruction_set}{}\n",
        env!("CARGO_PKG_VERSION"),
        Bytes(*memory_bytes),
        match instruction_set.as_str() {
            "portable" => ": slow; AVX2 or AVX-512 make products several times faster",
            _ => "",
        },
    );
    if let Some((name, rank, ranks)) = launcher() {
        text += &format!("started  by {name} as rank {rank} of {ranks}\n");
    }
    text += "\nlibraries, which this version looks for and does not use yet\n";
    for (library, found) in LIBRARIES.iter().zip(found) {
        let (name, gives) = (library.name, library.gives);
        text += &match found {
            Some(path) => format!("  found    {name}: {}, for {gives}\n", path.display()),
            None => format!("  missing  {name}, for {gives}: {}\n", library.way_out),
        };
    }
    text
}
