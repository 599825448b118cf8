//! Results of products that are stored narrow: sums are rounded when they are complete.

use super::blocked::Block;
use super::extent::step;
use super::formats::{BF16, F8E4M3, F8E5M2, F16, Format, Narrow, Operand};
use super::pack::Element;
use super::vector::{Job, Scalar, Vector};

/// A result and what is added to it, each with one rounding, all stored alike.
#[derive(Clone, Copy)]
pub(super) struct Rounded {
    pub(super) c: Operand,
    /// One number for each row.
    pub(super) by_row: Option<Operand>,
    /// One number for each column.
    pub(super) by_column: Option<Operand>,
    /// One number for each element, at the same offset as it.
    pub(super) addend: Option<Operand>,
}

impl Rounded {
    /// The same for a result that starts at an offset.
    pub(super) fn moved<S>(self, offset: usize) -> Rounded {
        let addend = self.addend.map(|addend| addend.moved::<S>(offset));
        Rounded { c: self.c.moved::<S>(offset), addend, ..self }
    }

    /// Rounds and stores the sums of a block, whose first row and column are given, at offsets of
    /// rows and columns.
    ///
    /// # Safety
    ///
    /// The block holds the sums, the operands all elements of it, which nobody else uses.
    #[inline(always)]
    pub(super) unsafe fn store<V: Vector>(
        &self,
        block: &Block<V::Scalar>,
        first: [usize; 2],
        [rows, columns]: [&[usize]; 2],
    ) {
        macro_rules! to {
            ($element:ty) => {{
                let of = self.of::<$element>();
                V::call(Store::<$element, V::Scalar> { of, block, first, rows, columns })
            }};
        }
        match self.c.format {
            Format::Own | Format::Tf32 => unreachable!("such a result is not rounded"),
            Format::BF16 => to!(BF16),
            Format::F16 => to!(F16),
            Format::F8E4M3 => to!(F8E4M3),
            Format::F8E5M2 => to!(F8E5M2),
        }
    }

    fn of<T>(&self) -> Pointers<T> {
        let [by_row, by_column, addend] =
            [self.by_row, self.by_column, self.addend].map(|operand| Some(operand?.start()));
        Pointers { c: self.c.start::<T>().cast_mut(), by_row, by_column, addend }
    }
}

/// [`Rounded`] of one type of elements.
struct Pointers<T> {
    c: *mut T,
    by_row: Option<*const T>,
    by_column: Option<*const T>,
    addend: Option<*const T>,
}

/// See [`Rounded::store`].
struct Store<'a, T, S> {
    of: Pointers<T>,
    block: &'a Block<'a, S>,
    first: [usize; 2],
    rows: &'a [usize],
    columns: &'a [usize],
}

impl<T: Narrow + Element<S>, S: Scalar> Job<S> for Store<'_, T, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let contiguous = step(self.columns) == Some(1);
        let whole = self.columns.len() - self.columns.len() % V::LANES;
        let whole = if contiguous { whole } else { 0 };
        for (i, &row) in self.rows.iter().enumerate() {
            // SAFETY: by the contract of `Rounded::store`.
            unsafe {
                let sums = self.block.c.add(self.block.cm[i]);
                let by_row = self.of.by_row.map(|bias| (*bias.add(self.first[0] + i)).number());
                for j in (0..whole).step_by(V::LANES) {
                    let place = row + self.columns[j];
                    let by_column = self.of.by_column.map(|bias| bias.add(self.first[1] + j));
                    let addend = self.of.addend.map(|addend| addend.add(place));
                    let mut x: V = V::load(sums.add(self.block.cn[j]));
                    if let Some(bias) = by_row {
                        x = T::round(x).add(V::splat(bias));
                    }
                    for operand in [by_column, addend].into_iter().flatten() {
                        x = T::round(x).add(<T as Element<S>>::load(operand));
                    }
                    T::store(x, self.of.c.add(place));
                }
                for (j, &column) in self.columns.iter().enumerate().skip(whole) {
                    let place = row + column;
                    let by_column = self.of.by_column.map(|bias| *bias.add(self.first[1] + j));
                    let addend = self.of.addend.map(|addend| *addend.add(place));
                    let added = [by_column, addend].map(|operand| Some(operand?.number()));
                    let mut x = T::nearest((*sums.add(self.block.cn[j])).sticky());
                    for operand in [by_row, added[0], added[1]].into_iter().flatten() {
                        x = T::nearest((Element::<S>::number(x) + operand).sticky());
                    }
                    *self.of.c.add(place) = x;
                }
            }
        }
    }
}
