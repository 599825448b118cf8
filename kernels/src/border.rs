//! Borders: dims of an operand around and between whose elements a product reads zeros.

use serde::{Deserialize, Serialize};

/// A dim of `b` that a loop of `n` and one of `k` index together, as in a convolution.
///
/// Point `i` of the first and `j` of the second read position `i * stride + j * dilation - before`:
/// the element `position / spread` where that is whole and there is one, else zero. Both loops have
/// stride zero in `b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Border {
    /// The loop of `n`, by its number.
    pub n: usize,
    /// The loop of `k`.
    pub k: usize,
    /// Positions between neighbours along `n`.
    pub stride: usize,
    /// Positions between neighbours along `k`.
    pub dilation: usize,
    /// Positions before the first element; fewer than none where elements are left out.
    pub before: i64,
    /// Positions between neighbours of `b`.
    pub spread: usize,
    /// Elements of the dim.
    pub size: usize,
    /// The stride of the dim in `b`.
    pub step: usize,
}

impl Border {
    /// The element at a position, counted from the first one.
    pub fn element(&self, position: isize) -> Option<usize> {
        let position = usize::try_from(position).ok()?;
        let (element, rest) = match self.spread {
            1 => (position, 0),
            spread => (position / spread, position % spread),
        };
        (rest == 0 && element < self.size).then_some(element)
    }

    /// The element that point `n` of the first loop and point `k` of the second read.
    pub fn read(&self, n: usize, k: usize) -> Option<usize> {
        let position = (n * self.stride + k * self.dilation) as i64 - self.before;
        self.element(isize::try_from(position).ok()?)
    }
}
