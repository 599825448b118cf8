//! Products of few rows, such as a decoding step: `b` is read once, in place and in order.
//!
//! The sums of a block of columns stay in the first-level cache and `b` streams past them, four of
//! its rows at a time. An element is the same chain of multiply-adds as in a register tile.

use super::tiles::{Block, THIN};
use super::vector::{Scalar, Vector};

/// Rows of `b` per sweep over the columns.
const DEPTH: usize = 4;

/// Multiplies a block of at most [`THIN`] rows, whose columns are contiguous in `b`.
///
/// # Safety
///
/// Operands hold all sums of their tables; `sums` has room for [`THIN`] rows of columns.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector>(
    block: &Block<V::Scalar>,
    sums: *mut V::Scalar,
    add: bool,
) {
    const { assert!(THIN == 4) };
    // SAFETY: by the contract of the function.
    unsafe {
        match block.am.len() {
            1 => rows::<V, 1>(block, sums, add),
            2 => rows::<V, 2>(block, sums, add),
            3 => rows::<V, 3>(block, sums, add),
            _ => rows::<V, 4>(block, sums, add),
        }
    }
}

#[inline(always)]
unsafe fn rows<V: Vector, const R: usize>(
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
            sweep::<V, R, DEPTH>(block, sums, i);
        }
        for i in deep..k {
            sweep::<V, R, 1>(block, sums, i);
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
unsafe fn sweep<V: Vector, const R: usize, const D: usize>(
    block: &Block<V::Scalar>,
    sums: *mut V::Scalar,
    first: usize,
) {
    let n = block.bn.len();
    let whole = n - n % V::LANES;
    // SAFETY: by the contract of `multiply`.
    unsafe {
        let mut b = [block.b; D];
        let mut a = [[V::splat(V::Scalar::ZERO); D]; R];
        for d in 0..D {
            b[d] = block.b.add(block.bk[first + d] + block.bn[0]);
            for (row, &offset) in a.iter_mut().zip(block.am) {
                row[d] = V::splat(*block.a.add(offset + block.ak[first + d]));
            }
        }
        for j in (0..whole).step_by(V::LANES) {
            let b = b.map(|b| V::load(b.add(j)));
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
            let b = b.map(|b| V::load_first(b.add(whole), rest, V::Scalar::ZERO));
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
