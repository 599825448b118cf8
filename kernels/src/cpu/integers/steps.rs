//! Instructions that multiply integers and add the products to sums of 32 bits.
//!
//! Operands are packed in groups of 32 bits: two numbers of 16 bits, or four of 8. An instruction
//! multiplies the groups of two vectors number by number and adds all products of a group to one
//! sum, which wraps. Nothing saturates on the way, so that every way to sum gives the same bits.

use crate::cpu::vector::{Array, Vector};

/// How the numbers of a group are packed.
pub(super) trait Number: Copy {
    /// Numbers of a group.
    const DEPTH: usize;

    /// A number, of which the low bits count, at place `at` of a group.
    fn place(x: i32, at: usize) -> i32;
}

impl Number for i16 {
    const DEPTH: usize = 2;

    #[inline(always)]
    fn place(x: i32, at: usize) -> i32 {
        (x & 0xffff) << (16 * at)
    }
}

impl Number for i8 {
    const DEPTH: usize = 4;

    #[inline(always)]
    fn place(x: i32, at: usize) -> i32 {
        (x & 0xff) << (8 * at)
    }
}

/// A vector of sums and the instruction that adds to it.
///
/// Values exist only in functions that were entered through [`Step::enter`], which is why methods
/// may use the instructions of a set without being unsafe themselves.
pub(super) trait Step: Copy {
    /// The numbers that it multiplies.
    type Number: Number;
    /// Vectors of the same code, which pack operands with borders.
    type Packing: Vector<Scalar = f32>;
    /// Groups of a vector.
    type Groups: Copy;
    const LANES: usize;
    /// Height of the register tile, whose rows are two vectors of sums.
    const ROWS: usize;
    /// Whether the numbers of rows are unsigned: 128 is added to each of them when it is packed,
    /// and 128 times the sum of a column is taken from that column's sums.
    const IS_OFFSET: bool;

    fn splat(group: i32) -> Self;
    fn of(groups: Self::Groups) -> Self;
    /// # Safety
    /// `LANES` groups are readable at `p`.
    unsafe fn load(p: *const i32) -> Self;
    /// # Safety
    /// `LANES` sums are writable at `p`.
    unsafe fn store(self, p: *mut i32);
    /// The sums of both, which wrap.
    fn add(self, other: Self) -> Self;
    /// The sums, with the products of a group of rows and of groups of columns added.
    fn step(self, row: Self, columns: Self) -> Self;

    /// Runs a job in code that is compiled for the instruction.
    fn enter<J: Job>(job: J);
}

/// Code generic over the instruction.
pub(super) trait Job {
    /// Runs it; implementations are `#[inline(always)]`.
    fn run<S: Step>(self);
}

/// Lanes of the portable vectors.
const LANES: usize = 4;

/// Two numbers of 16 bits in a group, without instructions.
#[derive(Clone, Copy)]
pub(super) struct Words([i32; LANES]);

/// What `vpdpbusd` does, without it: four unsigned numbers of rows by four signed ones of columns.
#[cfg(test)]
#[derive(Clone, Copy)]
pub(super) struct Bytes([i32; LANES]);

macro_rules! portable {
    ($name:ident, $number:ty, $offset:literal, $products:expr) => {
        impl Step for $name {
            type Number = $number;
            type Packing = Array<f32>;
            type Groups = [i32; LANES];
            const LANES: usize = LANES;
            const ROWS: usize = 4;
            const IS_OFFSET: bool = $offset;

            #[inline(always)]
            fn splat(group: i32) -> Self {
                $name([group; LANES])
            }
            #[inline(always)]
            fn of(groups: [i32; LANES]) -> Self {
                $name(groups)
            }
            #[inline(always)]
            unsafe fn load(p: *const i32) -> Self {
                // SAFETY: by the contract of the function.
                $name(unsafe { p.cast::<[i32; LANES]>().read_unaligned() })
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut i32) {
                // SAFETY: by the contract of the function.
                unsafe { p.cast::<[i32; LANES]>().write_unaligned(self.0) }
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                $name(std::array::from_fn(|i| self.0[i].wrapping_add(other.0[i])))
            }
            #[inline(always)]
            fn step(self, row: Self, columns: Self) -> Self {
                let products: fn(i32, i32) -> i32 = $products;
                let lane = |i: usize| self.0[i].wrapping_add(products(row.0[i], columns.0[i]));
                $name(std::array::from_fn(lane))
            }
            fn enter<J: Job>(job: J) {
                job.run::<Self>();
            }
        }
    };
}

portable!(Words, i16, false, |row, column| {
    let low = |x: i32| i32::from(x as i16);
    let high = |x: i32| x >> 16;
    (low(row) * low(column)).wrapping_add(high(row) * high(column))
});

#[cfg(test)]
portable!(Bytes, i8, true, |row, column| {
    let pairs = row.to_le_bytes().into_iter().zip(column.to_le_bytes());
    pairs.map(|(row, column)| i32::from(row) * i32::from(column.cast_signed())).sum()
});
