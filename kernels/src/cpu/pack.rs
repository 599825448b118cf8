//! Packing: strided operands of a product become panels that register tiles read in order.

use super::tiles::step;
use super::vector::{Scalar, Vector};

/// Packs columns of `b` into a panel of `width` columns, padded with zeros.
///
/// # Safety
///
/// `b` holds all sums of the two tables, the panel `bk.len() * width` numbers.
#[inline(always)]
pub(super) unsafe fn pack_columns<V: Vector>(
    b: *const V::Scalar,
    bn: &[usize],
    bk: &[usize],
    width: usize,
    panel: *mut V::Scalar,
) {
    // SAFETY: by the contract of the function.
    unsafe { pack::<V>(b, bn, bk, width, panel) };
}

/// Packs rows of `a` into panels as tall as the register tiles that will read them: `height` of the
/// rows that are left.
///
/// # Safety
///
/// `a` holds all sums of the two tables, the panel a number for each.
#[inline(always)]
pub(super) unsafe fn pack_rows<V: Vector>(
    a: *const V::Scalar,
    am: &[usize],
    ak: &[usize],
    height: impl Fn(usize) -> usize,
    panel: *mut V::Scalar,
) {
    let mut done = 0;
    while done < am.len() {
        let rows = height(am.len() - done);
        // SAFETY: panels follow each other in the room of a block.
        unsafe { pack::<V>(a, &am[done..done + rows], ak, rows, panel.add(done * ak.len())) };
        done += rows;
    }
}

/// Writes `panel[k, i] = source[wide[i] + deep[k]]`, and zeros for `i` past `wide.len()`.
#[inline(always)]
unsafe fn pack<V: Vector>(
    source: *const V::Scalar,
    wide: &[usize],
    deep: &[usize],
    width: usize,
    panel: *mut V::Scalar,
) {
    if wide.is_empty() || deep.is_empty() {
        return;
    }
    // SAFETY: the operand holds all sums of the two tables, the panel `deep.len() * width`.
    unsafe {
        if wide.len() < width {
            for k in 0..deep.len() {
                for i in wide.len()..width {
                    *panel.add(k * width + i) = V::Scalar::ZERO;
                }
            }
        }
        let wide_step = step(wide);
        if wide_step == Some(1) {
            let whole = wide.len() - wide.len() % V::LANES;
            let rest = wide.len() - whole;
            for (k, &offset) in deep.iter().enumerate() {
                let (row, target) = (source.add(offset + wide[0]), panel.add(k * width));
                for i in (0..whole).step_by(V::LANES) {
                    V::load(row.add(i)).store(target.add(i));
                }
                if rest > 0 {
                    let lanes = V::load_first(row.add(whole), rest, V::Scalar::ZERO);
                    lanes.store_first(target.add(whole), rest);
                }
            }
        } else if let (Some(stride), Some(1)) = (wide_step, step(deep)) {
            let start = source.add(wide[0] + deep[0]);
            pack_transposed::<V>(start, stride, [wide.len(), deep.len()], width, panel);
        } else {
            for (k, &offset) in deep.iter().enumerate() {
                for (i, &start) in wide.iter().enumerate() {
                    *panel.add(k * width + i) = *source.add(offset + start);
                }
            }
        }
    }
}

/// Writes `panel[k, i] = start[i * stride + k]`.
#[inline(always)]
unsafe fn pack_transposed<V: Vector>(
    start: *const V::Scalar,
    stride: usize,
    [wide, deep]: [usize; 2],
    width: usize,
    panel: *mut V::Scalar,
) {
    // SAFETY: by the contract of `pack`.
    unsafe {
        if wide < V::TILE || deep < V::TILE {
            for i in 0..wide {
                for k in 0..deep {
                    *panel.add(k * width + i) = *start.add(i * stride + k);
                }
            }
            return;
        }
        // The last square of a side overlaps the one before, rather than leave a remainder.
        for i in (0..wide).step_by(V::TILE) {
            let i = i.min(wide - V::TILE);
            for k in (0..deep).step_by(V::TILE) {
                let k = k.min(deep - V::TILE);
                if k % 16 == 0 {
                    // The rows after these: each is a stream too short for the hardware to learn.
                    for next in i + V::TILE..i + 2 * V::TILE {
                        V::prefetch(start.wrapping_add(next * stride + k));
                    }
                }
                let source = start.add(i * stride + k);
                V::transpose(source, stride, panel.add(k * width + i), width);
            }
        }
    }
}
