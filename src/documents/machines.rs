//! Clusters, and the machine at hand.

use planner::cluster::Cluster as Machines;
use schemars::JsonSchema;
use serde::Serialize;

/// A cluster, each value with where it comes from.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Cluster {
    /// Its devices, levels and groups.
    #[serde(flatten)]
    pub cluster: Machines,
}

/// The clusters that need no file.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Clusters {
    /// The presets.
    pub presets: Vec<PresetRow>,
}

/// A preset of a cluster.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PresetRow {
    /// Its name.
    pub preset: String,
    /// What a rank computes on.
    pub device: String,
}

/// What this machine is, as a cluster.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Detect {
    /// Threads that run at once.
    pub cores: u64,
    /// Memory that this process may use.
    pub memory_bytes: u64,
    /// The widest that kernels are made for.
    pub instruction_set: String,
    /// The GPUs.
    pub gpus: Vec<GpuRow>,
    /// Why no GPU is listed.
    pub absent: Option<String>,
    /// The text of a cluster file.
    pub file: String,
}

/// A GPU of this machine.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GpuRow {
    /// Its name.
    pub name: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// The preset with its rates, where there is one.
    pub preset: Option<String>,
}

/// What this machine has.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Doctor {
    /// The version of this program.
    pub version: String,
    /// Threads that run at once.
    pub cores: u64,
    /// Memory that this process may use.
    pub memory_bytes: u64,
    /// The widest that kernels are made for.
    pub instruction_set: String,
    /// Kinds of devices that programs run on.
    pub executes_on: Vec<String>,
    /// What the driver of NVIDIA GPUs shows.
    pub gpus: Vec<ExecutingGpu>,
    /// Libraries that it looks for.
    pub libraries: Vec<LibraryRow>,
    /// Who started this process.
    pub launcher: Option<Launcher>,
}

/// A GPU of this machine.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ExecutingGpu {
    /// As its driver names it.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// The architecture whose kernels run on it; none where no kernels are written for it.
    pub kernels_for: Option<String>,
}

/// A library that is opened where it is there.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LibraryRow {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub gives: String,
    /// Where it was found.
    pub file: Option<String>,
    /// The names of its file.
    pub looked_for: Vec<String>,
    /// How to get it, where it is missing.
    pub way_out: Option<String>,
}

/// Who started a process.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Launcher {
    /// Its name.
    pub name: String,
    /// The rank, as it says.
    pub rank: String,
    /// The number of ranks, as it says.
    pub ranks: String,
}
