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

/// What text is compiled for: `sm_80`, or `sm_80-tf32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// The architecture.
    pub arch: Arch,
    /// How operands of F32 are multiplied.
    pub f32_products: F32Products,
}

/// How operands of F32 are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum F32Products {
    /// As they are, on CUDA cores.
    Exact,
    /// Rounded to TF32, which has 10 bits of the mantissa, on tensor cores. Operands with borders
    /// of zeros, such as those of padded convolutions, are exact all the same.
    Tf32,
}

impl Target {
    /// All of them: architectures in their order, exact products first.
    pub fn all() -> impl Iterator<Item = Target> {
        let both = [F32Products::Exact, F32Products::Tf32];
        Arch::ALL
            .into_iter()
            .flat_map(move |arch| both.map(|f32_products| Target { arch, f32_products }))
    }
}

impl From<Arch> for Target {
    /// Numbers are as exact as their types.
    fn from(arch: Arch) -> Target {
        Target { arch, f32_products: F32Products::Exact }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.f32_products {
            F32Products::Exact => write!(f, "{}", self.arch),
            F32Products::Tf32 => write!(f, "{}-tf32", self.arch),
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
