//! The tiling of a product: its family of block tiles and the slices of its sum.
//!
//! Chosen from sizes that are not sharded, so that ranks that share a product sum as one rank does
//! that has all of it; and from the architecture alone, so that all GPUs of one sum alike.

use crate::kernel::{Family, Tiling};
use ir::target::Arch;

/// The most rows of a skinny product.
pub const SKINNY_ROWS: usize = 16;
/// Points of k of a slice of a skinny product. Chosen: one of few rows by a weight of 4096 × 4096
/// has two blocks per multiprocessor.
const SKINNY_SLICE: usize = 1024;
/// Rows and columns of a wide block tile.
const TILE: usize = 128;
/// The fewest points of k of a slice of a wide product. Chosen: the pipeline of a block tile has
/// four stages of 64, which each slice fills and drains.
const SLICE_MIN: usize = 512;
/// What one slice of a block tile costs beside its products, in points of k: its 64 KiB of partial
/// sums are written and read again. Derived of an H100: 39 ns of its memory, in which a
/// multiprocessor multiplies 6 points at 70 % of its peak.
const SLICE_COST: usize = 6;
/// What a second function costs, in points of k. Derived as above: 3 µs.
const SUM_COST: usize = 500;

/// The tiling of a product on an architecture, given the sizes of batch, m and n that are not
/// sharded, and the k that each rank sums.
///
/// A skinny product has slices of 1024. A wide one that has fewer block tiles than there are
/// multiprocessors has as many slices as make it fastest: `waves · slice`, and what the slices
/// cost.
pub fn tiling(arch: Arch, [batch, m, n]: [usize; 3], k: usize) -> Tiling {
    if m <= SKINNY_ROWS {
        let split = k.div_ceil(SKINNY_SLICE).max(1);
        return Tiling { family: Family::Skinny, split }.without_empty(k);
    }
    let tiles = batch.saturating_mul(m.div_ceil(TILE)).saturating_mul(n.div_ceil(TILE));
    let at_once = arch.multiprocessors();
    let whole = Tiling::default();
    if tiles >= at_once {
        return whole;
    }
    let cost = |tiling: &Tiling| {
        let waves = (tiles * tiling.split).div_ceil(at_once);
        let apart = if tiling.split > 1 { SLICE_COST * tiles * tiling.split + SUM_COST } else { 0 };
        waves * tiling.slice(k) + apart
    };
    let splits = 2..=(k / SLICE_MIN).min(at_once);
    let slices = splits.map(|split| Tiling { split, ..whole }.without_empty(k));
    slices.chain([whole]).min_by_key(|tiling| (cost(tiling), tiling.split)).unwrap_or(whole)
}

/// The part of all multiprocessors that compute while a product's block tiles run, of waves that
/// each take as long.
pub fn waves_filled(arch: Arch, tiles: usize) -> f64 {
    let at_once = arch.multiprocessors();
    tiles as f64 / (tiles.div_ceil(at_once).max(1) * at_once) as f64
}
