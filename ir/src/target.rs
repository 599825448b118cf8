//! Targets: what kernels are compiled for.
//!
//! A target decides workspaces, how sums are split and which layouts pay: never what a program
//! means. It follows from the cluster and is written into the plan, so that equal plans are
//! compiled to equal programs on every machine.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What kernels are compiled for: `avx512`, `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    /// CPUs with an instruction set.
    Cpu(InstructionSet),
    /// GPUs of an architecture of CUDA.
    Cuda(Arch),
}

impl Target {
    /// All of them: CPUs, then GPUs.
    pub fn all() -> impl Iterator<Item = Target> {
        let cpus = InstructionSet::ALL.into_iter().map(Target::Cpu);
        cpus.chain(Arch::ALL.into_iter().map(Target::Cuda))
    }

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Target::Cpu(set) => set.name(),
            Target::Cuda(arch) => arch.name(),
        }
    }

    /// The architecture of GPUs.
    pub fn arch(self) -> Option<Arch> {
        match self {
            Target::Cpu(_) => None,
            Target::Cuda(arch) => Some(arch),
        }
    }
}

/// An instruction set of CPUs, each able to run what is made for those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InstructionSet {
    /// What every CPU has.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, DQ, BW and VL.
    Avx512,
    /// The same with AVX512-BF16.
    Avx512Bf16,
    /// The same with AMX and its tiles of BF16.
    Amx,
}

impl InstructionSet {
    /// All of them, the narrowest first.
    pub const ALL: [InstructionSet; 5] = [
        InstructionSet::Portable,
        InstructionSet::Avx2,
        InstructionSet::Avx512,
        InstructionSet::Avx512Bf16,
        InstructionSet::Amx,
    ];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            InstructionSet::Portable => "portable",
            InstructionSet::Avx2 => "avx2",
            InstructionSet::Avx512 => "avx512",
            InstructionSet::Avx512Bf16 => "avx512bf16",
            InstructionSet::Amx => "amx",
        }
    }
}

/// An architecture of GPUs, as NVIDIA's compilers name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    /// A100.
    Sm80,
    /// L4, L40S, RTX 4090.
    Sm89,
    /// H100, H200, with what no later one has.
    Sm90a,
    /// B200.
    Sm100,
}

impl Arch {
    /// All of them, the oldest first.
    pub const ALL: [Arch; 4] = [Arch::Sm80, Arch::Sm89, Arch::Sm90a, Arch::Sm100];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm89 => "sm_89",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100 => "sm_100",
        }
    }

    /// Whether blocks of a cluster have each other's shared memory.
    pub fn has_clusters(self) -> bool {
        match self {
            Arch::Sm80 | Arch::Sm89 => false,
            Arch::Sm90a | Arch::Sm100 => true,
        }
    }

    /// Multiprocessors of the usual device: A100, RTX 4090, H100 SXM and H200, B200.
    pub fn multiprocessors(self) -> usize {
        match self {
            Arch::Sm80 => 108,
            Arch::Sm89 => 128,
            Arch::Sm90a => 132,
            Arch::Sm100 => 148,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is no target, no architecture or no instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unknown;

impl FromStr for Target {
    type Err = Unknown;

    fn from_str(text: &str) -> Result<Target, Unknown> {
        Target::all().find(|target| target.name() == text).ok_or(Unknown)
    }
}

impl FromStr for InstructionSet {
    type Err = Unknown;

    fn from_str(text: &str) -> Result<InstructionSet, Unknown> {
        InstructionSet::ALL.into_iter().find(|set| set.name() == text).ok_or(Unknown)
    }
}

impl FromStr for Arch {
    type Err = Unknown;

    fn from_str(text: &str) -> Result<Arch, Unknown> {
        Arch::ALL.into_iter().find(|arch| arch.name() == text).ok_or(Unknown)
    }
}
