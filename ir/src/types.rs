//! The type of a value: element type and dims.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::DType;
use crate::dim::{Bindings, Dim, product};

/// The type of a value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TensorType {
    /// The type of the elements.
    pub dtype: DType,
    /// The dims, outermost first; none for a scalar.
    pub dims: Vec<Dim>,
}

impl TensorType {
    /// A type of any dims.
    pub fn new(dtype: DType, dims: impl IntoIterator<Item = Dim>) -> TensorType {
        TensorType { dtype, dims: dims.into_iter().collect() }
    }

    /// A type of constant dims.
    pub fn of(dtype: DType, dims: &[usize]) -> TensorType {
        TensorType::new(dtype, dims.iter().map(|d| Dim::from(*d)))
    }

    /// A scalar type.
    pub fn scalar(dtype: DType) -> TensorType {
        TensorType { dtype, dims: Vec::new() }
    }

    /// The number of dims.
    pub fn ndim(&self) -> usize {
        self.dims.len()
    }

    /// The number of elements.
    pub fn elements(&self) -> Dim {
        product(&self.dims)
    }

    /// The dims as numbers, when no symbol is left.
    pub fn sizes(&self) -> Option<Vec<usize>> {
        self.known_sizes().collect()
    }

    /// The number of elements, when no symbol is left.
    pub fn count(&self) -> Option<usize> {
        self.known_sizes().product()
    }

    fn known_sizes(&self) -> impl Iterator<Item = Option<usize>> {
        self.dims.iter().map(|d| d.as_constant().and_then(|c| usize::try_from(c).ok()))
    }

    /// The bytes of a contiguous value, when no symbol is left.
    pub fn bytes(&self) -> Option<u64> {
        self.count().map(|count| count as u64 * self.dtype.size())
    }

    /// The type with symbols replaced by their values.
    #[must_use]
    pub fn bind(&self, bindings: &Bindings) -> TensorType {
        TensorType::new(self.dtype, self.dims.iter().map(|d| d.bind(bindings)))
    }

    /// The type with the same dims and another element type.
    #[must_use]
    pub fn with_dtype(&self, dtype: DType) -> TensorType {
        TensorType { dtype, dims: self.dims.clone() }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (at, dim) in self.dims.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{dim}")?;
        }
        f.write_str("]")
    }
}
