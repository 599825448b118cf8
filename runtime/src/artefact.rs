//! The artefact: everything that ranks need to run, in one file `NAME.gtl` that is also a zip.
//!
//! | member | content |
//! |---|---|
//! | `kernels.ARCH.cu` | of programs for GPUs: the text of their kernels for an architecture |
//! | `kernels.postcard` | the kernels that programs launch |
//! | `manifest.json` | format, version, what it needs, and a hash of each other member |
//! | `module.graph` | the module, as text |
//! | `plan.plan` | the plan, as text |
//! | `programs.postcard` | one program for each class of ranks |
//! | `report.json` | what was predicted, for people and tools |
//!
//! Members are stored as they are, in the order of their names and without dates, so that equal
//! contents give equal bytes, and a member takes no more memory than it takes in the file. Weights
//! are not in it.
//!
//! **Reading** believes nothing: sizes are compared with the file before memory is reserved, hashes
//! are compared, and programs go through [`kernels::bounds`], so that what is returned can be
//! executed without touching memory that is not its own. Whether programs compute what the module
//! says is not looked at here.

mod read;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Cursor, Write};
use std::path::Path;

use ir::ids::Ids;
use ir::target::InstructionSet;
use ir::{Diagnostic, Module, Plan, Program, Span};
use kernels::Kernel;
use kernels::cuda::{Arch, unit};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

pub use read::{decode, read};

use crate::error::Error;
use crate::execute::Classes;

/// The version of the format, raised by a change that other versions can't read.
const FORMAT: u64 = 15;
/// The version of the program. Programs and kernels are stored without names of their fields, so
/// that another version would read them as something else.
const VERSION: &str = env!("CARGO_PKG_VERSION");

const KERNELS: &str = "kernels.postcard";
const MANIFEST: &str = "manifest.json";
const MODULE: &str = "module.graph";
const PLAN: &str = "plan.plan";
const PROGRAMS: &str = "programs.postcard";
const REPORT: &str = "report.json";
/// The members of every artefact, in their order.
const MEMBERS: [&str; 6] = [KERNELS, MANIFEST, MODULE, PLAN, PROGRAMS, REPORT];

/// The member with the text of kernels for an architecture.
fn source_member(arch: Arch) -> String {
    format!("kernels.{arch}.cu")
}

/// What is in an artefact.
#[derive(Clone, Debug, PartialEq)]
pub struct Contents {
    /// The module that was compiled.
    pub module: Module,
    /// The plan that it was compiled under.
    pub plan: Plan,
    /// One program for each class of ranks.
    pub programs: Vec<Program>,
    /// The kernels that they launch.
    pub kernels: Vec<Kernel>,
    /// The architectures that kernels have text for, in their order; none where CPUs run them.
    pub archs: Vec<Arch>,
    /// What it needs to run.
    pub requirements: Requirements,
    /// What was predicted.
    pub report: Value,
}

impl Contents {
    /// What a session of an entry of the module is started from.
    pub fn into_classes(self, entry: &str) -> Classes {
        let Contents { module, plan, programs, kernels, .. } = self;
        Classes { programs, kernels, mesh: plan.mesh, ids: Ids::of(&module, entry) }
    }

    /// The bytes of the arenas of all ranks in memory: the device's and, where that is a CPU, the
    /// host's.
    pub fn arena_bytes(&self) -> u64 {
        let is_host = self.archs.is_empty();
        let in_memory = |program: &Program| {
            program.arena_bytes.saturating_add(if is_host { program.host_bytes } else { 0 })
        };
        let one_each = self.programs.iter().map(in_memory).fold(0, u64::saturating_add);
        one_each.saturating_mul(self.plan.mesh.dp as u64)
    }
}

/// What programs need of the machine that they run on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requirements {
    /// Ranks.
    pub ranks: usize,
    /// The machine that they share must have at least this.
    #[serde(flatten)]
    pub machine: Machine,
}

/// A machine, as far as programs care.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The kind of devices: `cpu`, `cuda`.
    pub device: String,
    /// The instruction set: `portable`, `avx2`, `avx512`, `avx512bf16`, `amx`; of a GPU, its
    /// architecture.
    pub instruction_set: String,
    /// Cores that run at once.
    pub cores: usize,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

impl Machine {
    /// Whether code for an instruction set, or for one of several architectures, runs here.
    fn executes(&self, instruction_set: &str) -> bool {
        let level = |set: &str| set.parse::<InstructionSet>();
        match (level(&self.instruction_set), level(instruction_set)) {
            (Ok(present), Ok(wanted)) => wanted <= present,
            _ => instruction_set.split(',').any(|one| one == self.instruction_set),
        }
    }
}

impl Requirements {
    /// What a machine lacks; nothing when the artefact runs on it. `source` names the artefact.
    ///
    /// **Errors.** E4074, one for each property.
    pub fn unmet(&self, source: &str, present: &Machine) -> Vec<Diagnostic> {
        let wanted = &self.machine;
        let mut unmet = Vec::new();
        let is_there = wanted.device == present.device;
        let mut lacks = |text: String, is_memory: bool| {
            let way_out = match &*wanted.device {
                "cpu" => "compile it again for this machine, with `--cluster cpu-local`".to_owned(),
                _ if is_there && is_memory => {
                    "end other programs there, or compile it again under a plan for less memory"
                        .to_owned()
                }
                _ if is_there => {
                    format!("compile it again with `--arch {}`", present.instruction_set)
                }
                _ => "compile it again for this machine, without `--arch`".to_owned(),
            };
            unmet.push(Diagnostic::error("E4074", Span::of(source), text).help(way_out));
        };
        if wanted.device != present.device {
            lacks(
                format!(
                    "it was compiled for `{}` devices, and this machine has `{}`",
                    wanted.device, present.device
                ),
                false,
            );
        } else if !present.executes(&wanted.instruction_set) {
            lacks(
                format!(
                    "it was compiled for the instruction set `{}`, and this machine has `{}`",
                    wanted.instruction_set, present.instruction_set
                ),
                false,
            );
        }
        if wanted.cores > present.cores {
            lacks(
                format!(
                    "it was compiled for {} cores, and this machine has {}",
                    wanted.cores, present.cores
                ),
                false,
            );
        }
        if wanted.memory_bytes > present.memory_bytes {
            lacks(
                format!(
                    "its {} ranks need {} bytes of memory, and this machine has {}",
                    self.ranks, wanted.memory_bytes, present.memory_bytes
                ),
                true,
            );
        }
        unmet
    }
}

/// How much of a file is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest file, in bytes. Memory for decoded members is within some tens of times it.
    pub file_bytes: u64,
}

impl Default for Limits {
    /// 1 GiB. Chosen: programs grow with layers and classes of ranks, and weights are not in it.
    fn default() -> Limits {
        Limits { file_bytes: 1 << 30 }
    }
}

/// What `manifest.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Manifest {
    format: u64,
    gantline: String,
    requirements: Requirements,
    members: BTreeMap<String, Member>,
}

/// What a member must be like.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Member {
    bytes: u64,
    blake3: String,
}

/// Writes an artefact; after a crash there is either the old file or the new one.
///
/// **Determinism.** Equal contents give equal bytes.
pub fn write(path: &Path, contents: &Contents) -> Result<(), Error> {
    write_bytes(path, &encode(contents).map_err(Error::io("encode", path))?)
}

/// Writes the bytes of an artefact, as [`write()`] does.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let fresh = path.with_file_name(name);
    let mut file = File::create(&fresh).map_err(Error::io("create", &fresh))?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    written.map_err(Error::io("write", &fresh)).inspect_err(|_| drop(fs::remove_file(&fresh)))?;
    fs::rename(&fresh, path).map_err(Error::io("rename", &fresh))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    File::open(folder).and_then(|f| f.sync_all()).map_err(Error::io("sync", folder))
}

/// The bytes of an artefact.
///
/// # Errors
/// When contents can't be serialised, which plain data can.
pub fn encode(contents: &Contents) -> io::Result<Vec<u8>> {
    let binary = |encoded: postcard::Result<Vec<u8>>| encoded.map_err(io::Error::other);
    let mut parts = BTreeMap::from([
        (KERNELS.to_owned(), binary(postcard::to_stdvec(&contents.kernels))?),
        (MODULE.to_owned(), contents.module.to_string().into_bytes()),
        (PLAN.to_owned(), contents.plan.to_string().into_bytes()),
        (PROGRAMS.to_owned(), binary(postcard::to_stdvec(&contents.programs))?),
        (REPORT.to_owned(), serde_json::to_vec_pretty(&contents.report)?),
    ]);
    for arch in &contents.archs {
        parts.insert(source_member(*arch), unit(&contents.kernels, *arch).into_bytes());
    }
    parts.insert(MANIFEST.to_owned(), manifest_of(&parts, &contents.requirements)?);
    pack(&parts)
}

fn manifest_of(
    parts: &BTreeMap<String, Vec<u8>>,
    requirements: &Requirements,
) -> io::Result<Vec<u8>> {
    let member = |(name, bytes): (&String, &Vec<u8>)| {
        let blake3 = blake3::hash(bytes).to_hex().to_string();
        (name.clone(), Member { bytes: bytes.len() as u64, blake3 })
    };
    let manifest = Manifest {
        format: FORMAT,
        gantline: VERSION.to_owned(),
        requirements: requirements.clone(),
        members: parts.iter().map(member).collect(),
    };
    Ok(serde_json::to_vec_pretty(&manifest)?)
}

/// A zip of members in the order of their names.
fn pack(parts: &BTreeMap<String, Vec<u8>>) -> io::Result<Vec<u8>> {
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .last_modified_time(DateTime::default())
        .unix_permissions(0o644);
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in parts {
        zip.start_file(name.as_str(), options)?;
        zip.write_all(bytes)?;
    }
    Ok(zip.finish()?.into_inner())
}
