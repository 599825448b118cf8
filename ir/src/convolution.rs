//! The attributes of a convolution: stride, padding and dilation, and the dimension order of its
//! operands and its result.

use serde::{Deserialize, Serialize};

/// Stride, padding and dilation of each spatial dim, and dimension orders (dimension numbers in
/// XLA).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Convolution {
    /// From one window to the next.
    pub stride: Vec<usize>,
    /// Zeros before the operand; a negative number leaves elements out.
    pub before: Vec<i64>,
    /// Zeros after the operand; a negative number leaves elements out.
    pub after: Vec<i64>,
    /// From one element of a window to the next.
    pub dilation: Vec<usize>,
    /// From one element of the operand to the next, with zeros between them.
    pub spread: Vec<usize>,
    /// The dimension orders of `x`, of `w` and of the result.
    pub orders: [DimOrder; 3],
}

impl Convolution {
    /// The spatial sizes of the result, from those of `x` and `w`; none when a list has not one
    /// entry for each, a number is not positive, or no window fits.
    pub fn result_sizes(&self, x: &[usize], w: &[usize]) -> Option<Vec<usize>> {
        let lengths = [self.stride.len(), self.before.len(), self.after.len()];
        let more = [self.dilation.len(), self.spread.len(), w.len()];
        if lengths.iter().chain(&more).any(|length| *length != x.len()) {
            return None;
        }
        let size = |at: usize| {
            let [spread, dilation, stride] =
                [self.spread[at], self.dilation[at], self.stride[at]].map(i64::try_from);
            let (spread, dilation, stride) = (spread.ok()?, dilation.ok()?, stride.ok()?);
            let span = |size: usize, step: i64| {
                i64::try_from(size.checked_sub(1)?).ok()?.checked_mul(step)?.checked_add(1)
            };
            let padded = span(x[at], spread)?.checked_add(self.before[at])?;
            let left = padded.checked_add(self.after[at])?.checked_sub(span(w[at], dilation)?)?;
            let fits = spread > 0 && dilation > 0 && stride > 0 && left >= 0;
            fits.then(|| (left / stride) as usize + 1)
        };
        (0..x.len()).map(size).collect()
    }
}

/// The dimension order of an operand or result of a convolution. The usual one is NCHW, of `w`
/// OIHW: samples (output channels), channels, then the spatial dims.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DimOrder(Vec<usize>);

impl DimOrder {
    /// Dim `i` of the array is dim `order[i]`, as in `transpose`.
    pub fn new(ndim: usize, order: Vec<usize>) -> DimOrder {
        let is_usual = order.iter().copied().eq(0..ndim);
        if is_usual { DimOrder::default() } else { DimOrder(order) }
    }

    /// Channels last, after the spatial dims: NHWC.
    pub fn channels_last(ndim: usize) -> DimOrder {
        let spatial = 2..ndim;
        DimOrder::new(ndim, [0].into_iter().chain(spatial).chain([1]).take(ndim).collect())
    }

    /// The order that is named; none where that is the usual one.
    pub fn named(&self) -> Option<&[usize]> {
        (!self.0.is_empty()).then_some(&self.0)
    }

    /// Whether it names each of as many dims once.
    pub fn fits(&self, ndim: usize) -> bool {
        let names = |dim: usize| self.0.contains(&dim);
        self.0.is_empty() || self.0.len() == ndim && (0..ndim).all(names)
    }

    /// Which dim lies at a place.
    pub fn dim(&self, place: usize) -> usize {
        self.0.get(place).copied().unwrap_or(place)
    }

    /// Where a dim lies.
    pub fn place(&self, dim: usize) -> usize {
        self.0.iter().position(|of| *of == dim).unwrap_or(dim)
    }

    /// What belongs to the dims of an array, in the usual order.
    pub fn usual<T: Clone>(&self, lying: &[T]) -> Vec<T> {
        (0..lying.len()).map(|dim| lying[self.place(dim)].clone()).collect()
    }

    /// What belongs to the dims in the usual order, as they lie.
    pub fn lying<T: Clone>(&self, usual: &[T]) -> Vec<T> {
        (0..usual.len()).map(|place| usual[self.dim(place)].clone()).collect()
    }

    /// The same array where the first two dims take each other's part.
    pub fn exchanged(&self, ndim: usize) -> DimOrder {
        let other = |dim: usize| if dim < 2 { 1 - dim } else { dim };
        DimOrder::new(ndim, (0..ndim).map(|place| other(self.dim(place))).collect())
    }
}
