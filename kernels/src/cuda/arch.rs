//! Targets that text is compiled for.

use std::fmt;

pub use ir::target::{Arch, Unknown};

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
