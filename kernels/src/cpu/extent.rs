//! Sizes of register tiles, and steps between the offsets of a table.

use super::vector::Vector;

/// Most rows for which reading `b` in place beats packing it.
pub(super) const THIN: usize = 4;

/// The common difference of a table, if there is one.
#[inline(always)]
pub(super) fn step(offsets: &[usize]) -> Option<usize> {
    let step = if offsets.len() < 2 { 1 } else { offsets[1].wrapping_sub(offsets[0]) };
    offsets.windows(2).all(|w| w[1].wrapping_sub(w[0]) == step).then_some(step)
}

/// Height of the next register tile of so many vectors when `rows` are left.
#[inline(always)]
pub(super) fn height<V: Vector>(vectors: usize, rows: usize) -> usize {
    match rows {
        12.. if V::ROWS == 12 && vectors == 2 => 12,
        8.. if V::ROWS == 12 => 8,
        6.. if V::ROWS == 6 => 6,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}
