//! Products of few rows, such as a decoding step: `b` is read once, in place and in order.
//!
//! The sums of a block of columns stay in the first-level cache and `b` streams past them, four of
//! its rows at a time. An element is the same chain of multiply-adds as in a register tile.

use std::marker::PhantomData;

use super::blocked::Block;
use super::extent::THIN;
use super::formats::{BF16, F16, Format, Tf32};
use super::pack::Element;
use super::vector::{Job, Scalar, Vector};

/// Rows of `b` per sweep over the columns.
const DEPTH: usize = 4;

/// Whether there is a loop for operands that are stored so.
pub(super) fn reads([a, b]: [Format; 2]) -> bool {
    a == b && matches!(a, Format::Own | Format::BF16 | Format::F16 | Format::Tf32)
}

/// Multiplies a block of at most [`THIN`] rows, whose columns are contiguous in `b`.
///
/// # Safety
///
/// Operands are such as [`reads`] says and hold all sums of their tables; `sums` has room for
/// [`THIN`] rows of columns.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector>(
    block: &Block<V::Scalar>,
    sums: *mut V::Scalar,
    add: bool,
) {
    match block.b.format {
        Format::BF16 => V::call(Thin::<BF16, V::Scalar> { block, sums, add, of: PhantomData }),
        Format::F16 => V::call(Thin::<F16, V::Scalar> { block, sums, add, of: PhantomData }),
        Format::Tf32 => V::call(Thin::<Tf32, V::Scalar> { block, sums, add, of: PhantomData }),
        // SAFETY: by the contract of the function.
        Format::Own | Format::F8E4M3 | Format::F8E5M2 => unsafe {
            multiply_elements::<V, V::Scalar>(block, sums, add);
        },
    }
}

/// [`multiply`] of narrow elements.
struct Thin<'a, T, S> {
    block: &'a Block<'a, S>,
    sums: *mut S,
    add: bool,
    of: PhantomData<T>,
}

impl<T: Element<S>, S: Scalar> Job<S> for Thin<'_, T, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        // SAFETY: by the contract of `multiply`.
        unsafe { multiply_elements::<V, T>(self.block, self.sums, self.add) };
    }
}

/// # Safety
///
/// As [`multiply`], whose operands are of `T`.
#[inline(always)]
unsafe fn multiply_elements<V: Vector, T: Element<V::Scalar>>(
    block: &Block<V::Scalar>,
    sums: *mut V::Scalar,
    add: bool,
) {
    const { assert!(THIN == 4) };
    // SAFETY: by the contract of the function.
    unsafe {
        match block.am.len() {
            1 => rows::<V, T, 1>(block, sums, add),
            2 => rows::<V, T, 2>(block, sums, add),
            3 => rows::<V, T, 3>(block, sums, add),
            _ => rows::<V, T, 4>(block, sums, add),
        }
    }
}

#[inline(always)]
unsafe fn rows<V: Vector, T: Element<V::Scalar>, const R: usize>(
    block: &Block<V::Scalar>,
    sums: *mut V::Scalar,
    add: bool,
) {
    let (n, k) = (block.bn.len(), block.ak.len());
    let deep = k - k % DEPTH;
    // SAFETY: by the contract of `multiply`.
    unsafe {
        std::slice::from_raw_parts_mut(sums, R * n).fill(V::Scalar::ZERO);
        for i in (0..deep).step_by(DEPTH) {
            sweep::<V, T, R, DEPTH>(block, sums, i);
        }
        for i in deep..k {
            sweep::<V, T, R, 1>(block, sums, i);
        }
        for (i, &row) in block.cm.iter().enumerate() {
            for (j, &column) in block.cn.iter().enumerate() {
                let (element, sum) = (block.c.add(row + column), *sums.add(i * n + j));
                *element = if add { *element + sum } else { sum };
            }
        }
    }
}

/// Adds the products of `D` points of `k` from `first` on to the sums.
#[inline(always)]
unsafe fn sweep<V: Vector, T: Element<V::Scalar>, const R: usize, const D: usize>(
    block: &Block<V::Scalar>,
    sums: *mut V::Scalar,
    first: usize,
) {
    let n = block.bn.len();
    let whole = n - n % V::LANES;
    // SAFETY: by the contract of `multiply`.
    unsafe {
        let (first_a, first_b) = (block.a.start::<T>(), block.b.start::<T>());
        let mut b = [first_b; D];
        let mut a = [[V::splat(V::Scalar::ZERO); D]; R];
        for d in 0..D {
            b[d] = first_b.add(block.bk[first + d] + block.bn[0]);
            for (row, &offset) in a.iter_mut().zip(block.am) {
                row[d] = V::splat((*first_a.add(offset + block.ak[first + d])).number());
            }
        }
        for j in (0..whole).step_by(V::LANES) {
            let b = b.map(|b| T::load::<V>(b.add(j)));
            for (i, row) in a.iter().enumerate() {
                let target = sums.add(i * n + j);
                let mut sum = V::load(target);
                for d in 0..D {
                    sum = row[d].fma(b[d], sum);
                }
                sum.store(target);
            }
        }
        if whole < n {
            let rest = n - whole;
            let b = b.map(|b| T::load_first::<V>(b.add(whole), rest));
            for (i, row) in a.iter().enumerate() {
                let target = sums.add(i * n + whole);
                let mut sum = V::load_first(target, rest, V::Scalar::ZERO);
                for d in 0..D {
                    sum = row[d].fma(b[d], sum);
                }
                sum.store_first(target, rest);
            }
        }
    }
}
