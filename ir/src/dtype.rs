//! Element types.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary64: the reference.
    F64,
    /// IEEE binary32.
    F32,
    /// The upper half of binary32.
    BF16,
    /// IEEE binary16.
    F16,
    /// Eight bits, four of exponent, three of mantissa, no infinities.
    F8E4M3,
    /// Eight bits, five of exponent, two of mantissa.
    F8E5M2,
    /// Signed 8-bit integer.
    I8,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 32-bit integer.
    U32,
    /// True or false, one byte.
    Bool,
}

impl DType {
    /// All element types, in the order of their declaration.
    pub const ALL: [DType; 11] = [
        DType::F64,
        DType::F32,
        DType::BF16,
        DType::F16,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::I8,
        DType::I32,
        DType::I64,
        DType::U32,
        DType::Bool,
    ];

    /// Bytes of one element.
    pub fn size(self) -> u64 {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::F8E4M3 | DType::F8E5M2 | DType::I8 | DType::Bool => 1,
        }
    }

    /// Whether elements are floating-point numbers.
    pub fn is_float(self) -> bool {
        match self {
            DType::F64 | DType::F32 | DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => {
                true
            }
            DType::I8 | DType::I32 | DType::I64 | DType::U32 | DType::Bool => false,
        }
    }

    /// Whether elements are floating-point numbers of fewer than 32 bits: their [`formats`] say
    /// what numbers there are.
    ///
    /// [`formats`]: crate::formats
    pub fn is_narrow(self) -> bool {
        self.is_float() && self.size() < 4
    }

    /// The type in which numbers of this one are computed before they are rounded to it, and in
    /// which they are added.
    pub fn accumulation(self) -> DType {
        if self.is_narrow() { DType::F32 } else { self }
    }

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::I8 => "i8",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U32 => "u32",
            DType::Bool => "bool",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = ();

    fn from_str(text: &str) -> Result<DType, ()> {
        DType::ALL.into_iter().find(|d| d.name() == text).ok_or(())
    }
}
