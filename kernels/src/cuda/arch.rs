//! Architectures of GPUs that text is compiled for.

use std::fmt;
use std::str::FromStr;

/// An architecture, as NVIDIA's compilers name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is no architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unknown;

impl FromStr for Arch {
    type Err = Unknown;

    fn from_str(text: &str) -> Result<Arch, Unknown> {
        Arch::ALL.into_iter().find(|arch| arch.name() == text).ok_or(Unknown)
    }
}
