//! The scalars of a launch: where this rank's pieces begin.

use std::ops::RangeInclusive;

use kernels::Offset;
use kernels::verify::LIMIT;

/// The scalars of one launch, while its kernel is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scalars {
    values: Vec<i64>,
}

impl Scalars {
    /// What the bounds of an offset are where those of a rank's pieces are not known.
    pub(crate) const ANY: RangeInclusive<i64> = 0..=LIMIT as i64;

    /// [`Scalars::ANY`] for an offset in units of `unit` elements.
    pub(crate) fn any_of(unit: u64) -> RangeInclusive<i64> {
        0..=(LIMIT as u64 / unit).cast_signed()
    }

    /// An offset of a kernel, of which this is the value on this rank. Bounds are those of all
    /// ranks with equal sizes, so that kernels of these are equal; what they leave no choice, or
    /// exclude, is part of the kernel.
    pub(crate) fn offset(&mut self, value: i64, bounds: RangeInclusive<i64>) -> Offset {
        let (least, most) = bounds.into_inner();
        if least >= most || !(least..=most).contains(&value) {
            return Offset::Fixed(value);
        }
        self.values.push(value);
        Offset::Scalar { slot: self.values.len() - 1, least, most }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.values.len()
    }

    /// Adds those of a kernel that becomes a part of this one.
    pub(crate) fn append(&mut self, others: &Scalars) {
        self.values.extend(&others.values);
    }

    /// Their values, in order of slots.
    pub(crate) fn into_values(self) -> Vec<i64> {
        self.values
    }
}
