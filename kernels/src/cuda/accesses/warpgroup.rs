//! Accesses of products by `wgmma`.
//!
//! Copies of a step depend on the block's rows or columns alone, so each operand is counted once
//! for all blocks that share it. Which block has a tile changes nothing.

use super::flash::count_box;
use super::pairs::{PairResults, PairRow};
use super::scales::{runs, scales};
use super::spans::{Span, Spans, table_loads, warps};
use super::tensor::{slices_of_k, ticket};
use super::{Accesses, Blocks, LANES, OTHER, Sites, Warp, nested, relative};
use crate::cuda::grouped::{Along, Pair};
use crate::cuda::loops::Loops;
use crate::cuda::mapped::{HALF, MappedOperand, ROWS, SIDE, SWIZZLE_ROW};
use crate::cuda::slices;
use crate::cuda::tensor::OperandCopy;
use crate::cuda::warpgroup::{StagedOperand, WARPGROUP, WarpgroupTile};

/// Accesses of a product. Those of the rows of experts are as if these were spread evenly.
pub(super) fn warpgroup(tile: &WarpgroupTile) -> Option<Accesses> {
    let p = &tile.product;
    let (loops, [_, _, n, k], [tile_m, tile_n, tile_k]) = (Loops::of(p), p.sizes(), tile.tile());
    let [_, tiles_m, tiles_n] = tile.tiles();
    let slice = tile.workspace.map(|_| p.slice());
    let slices = slices_of_k([k, tile_k], slice, p.tiling.split);
    let spans = Spans::of(
        p,
        tile.grouped.map(|of| (of, tile_m)),
        ([k, tile_k], &slices),
        [tiles_m, tiles_n],
    );
    let pair = tile.grouped.and_then(|grouped| grouped.pair);
    let bytes = tile.bytes();
    let of = |at: usize| {
        let side = if at == 0 { &loops.m[0][..] } else { &loops.n[0] };
        let (size, extent) = if at == 0 { (spans.rows, tile_m) } else { (n, tile.columns()) };
        let loops = [&loops.batch[at][..], side, &loops.k[at]];
        let weights = if at == 1 && pair.is_some() { 2 } else { 1 };
        let operand = Operand { loops, sizes: [size, k], extent, weights, bytes, tile_k };
        operand.count(&tile.operands[at], &spans.of[at])
    };
    let runs = runs(&slices, [slices::run(p), slices::run(p) / tile_k]);
    let multiplying = warps(WARPGROUP * tile.shape.consumers);
    let scales = scales(p, [tile_m, tile_n], [tiles_m, tiles_n], (&runs, multiplying))?;
    let all = of(0)?.plus(1, of(1)?).plus(1, scales).plus(1, tables(tile));
    if let Some(pair) = pair {
        return Some(all.plus(1, pair_results(tile, pair, spans.rows / tile_m)?));
    }
    let mut all = all;
    if tile.workspace.is_some() {
        all = all.plus(1, results(tile, &loops, &spans, Some(slices.len()))?);
        if tile.tickets.is_none() {
            return Some(all);
        }
        let blocks: usize = tile.tiles().iter().product::<usize>() * slices.len();
        all = all.plus(blocks as u64, ticket());
    }
    Some(all.plus(1, results(tile, &loops, &spans, None)?))
}

/// Loads of what says which rows experts have, by warps that copy and by those that multiply, for
/// each tile.
fn tables(tile: &WarpgroupTile) -> Accesses {
    let Some(grouped) = tile.grouped else { return Accesses::default() };
    let tiles: usize = tile.tiles().iter().product();
    let is_copied = |of: &StagedOperand| matches!(of, StagedOperand::Copied(..));
    // One thread starts TMA.
    let copying = if tile.operands.iter().any(is_copied) { warps(WARPGROUP) } else { 1 };
    let multiplying = warps(WARPGROUP * tile.shape.consumers);
    table_loads(match grouped.along {
        Along::Rows { .. } => tiles as u64 * (copying + multiplying),
        // How many rows there are, and of those that copy the first one.
        Along::Contracted { .. } => tiles as u64 * (2 * copying + multiplying),
    })
}

/// Accesses of what becomes of two products, given how many tiles of rows have an expert.
fn pair_results(tile: &WarpgroupTile, pair: Pair, row_tiles: usize) -> Option<Accesses> {
    let of = PairResults::of(&tile.product, pair, tile.pair_store(), tile.parts());
    let mut blocks = Blocks::new();
    for first_n in (0..tile.product.sizes()[2]).step_by(tile.columns()) {
        // Tiles of rows lie alike in sectors.
        blocks.count(vec![first_n as u64], row_tiles as u64, |warp| {
            for first_m in (0..tile.tile()[0]).step_by(16) {
                for (lane, row) in (0..LANES).flat_map(|lane| [(lane, 0), (lane, 8)]) {
                    let m = first_m + row + lane / 4;
                    let row = PairRow { m, columns: first_n..first_n + SIDE, part: first_n / SIDE };
                    of.list_row(&row, (&mut *warp, lane));
                }
                warp.end();
            }
        })?;
    }
    Some(blocks.count)
}

/// An operand of a block tile.
struct Operand<'a> {
    /// Over batch, m or n, and k.
    loops: [&'a [[usize; 2]]; 3],
    /// Elements along m or n that blocks take, and along k.
    sizes: [usize; 2],
    /// Rows or columns of the result of a block tile.
    extent: usize,
    /// Weights that take turns in a block tile.
    weights: usize,
    bytes: usize,
    tile_k: usize,
}

impl Operand<'_> {
    /// The byte of an element, but for where its batch starts.
    fn at(&self, side: usize, k: usize) -> u64 {
        (nested(self.loops[1], side) + nested(self.loops[2], k)) * self.bytes as u64
    }

    /// Counts the copies of all blocks.
    fn count(&self, operand: &StagedOperand, spans: &[Span]) -> Option<Accesses> {
        let mut blocks = Blocks::new();
        for span in spans.iter().filter(|span| span.readers > 0) {
            let from = nested(self.loops[0], span.batch) * self.bytes as u64;
            for k in (0..span.steps).map(|step| span.first_k + step * self.tile_k) {
                for side in (0..self.sizes[0]).step_by(self.extent) {
                    match operand {
                        StagedOperand::Mapped(map) => {
                            // Of each weight there is a box.
                            let times = span.readers * self.weights as u64;
                            self.boxes(map, from, [side, k], (&mut blocks, times))?;
                        }
                        StagedOperand::Copied(copy, _) => {
                            self.copies(*copy, from, [side, k], (&mut blocks, span.readers))?;
                        }
                    }
                }
            }
        }
        Some(blocks.count)
    }

    /// The row or column of the result of one of a block tile, and where its weight starts.
    fn side(&self, local: usize) -> (usize, u64) {
        match self.weights {
            1 => (local, 0),
            weights => {
                let side = local / (weights * SIDE) * SIDE + local % SIDE;
                (side, (local / SIDE % weights) as u64 * OTHER)
            }
        }
    }

    /// Counts the boxes of a step.
    fn boxes(
        &self,
        operand: &MappedOperand,
        from: u64,
        [side, k]: [usize; 2],
        (blocks, times): (&mut Blocks, u64),
    ) -> Option<()> {
        let (map, rows) = (&operand.map, if operand.k_major { self.extent } else { SIDE });
        let [columns, boxed] = [0, 1].map(|dim| map.box_dims[dim] as usize);
        for first in (0..self.extent).step_by(rows) {
            let side = side + first;
            let [first, second] = if operand.k_major { [k, side] } else { [side, k] };
            let there = |dim: usize, first: usize, most: usize| {
                map.dims[dim].saturating_sub(first as u64).min(most as u64)
            };
            let (bytes, stride) = (self.bytes as u64, map.strides_bytes[0]);
            let from = from + first as u64 * bytes + second as u64 * stride;
            let sizes = [there(1, second, boxed), there(0, first, columns) * bytes];
            if sizes[1] > 0 {
                count_box([from, stride], sizes, (blocks, times))?;
            }
        }
        Some(())
    }

    /// Counts the copies of a step by threads.
    fn copies(
        &self,
        copy: OperandCopy,
        from: u64,
        [first, first_k]: [usize; 2],
        (blocks, times): (&mut Blocks, u64),
    ) -> Option<()> {
        let rows = first..(first + self.extent).min(self.sizes[0]);
        let points = first_k..(first_k + self.tile_k).min(self.sizes[1]);
        let mut key = vec![rows.len() as u64, points.len() as u64];
        relative(&mut key, rows.clone().map(|side| from + self.at(side, first_k)));
        relative(&mut key, points.clone().map(|k| from + self.at(first, k)));
        let OperandCopy { k_major, width } = copy;
        let extent = self.extent * self.weights;
        let [rows_of_tile, columns] =
            if k_major { [extent, self.tile_k] } else { [self.tile_k, extent] };
        let (per_row, mut sites) = (columns / width, Sites::default());
        let (load, store) = (sites.device(width * self.bytes), sites.shared(width * self.bytes));
        blocks.count(key, times, |warp| {
            for start in (0..WARPGROUP as usize).step_by(LANES) {
                for lane in 0..LANES {
                    for i in (start + lane..rows_of_tile * per_row).step_by(WARPGROUP as usize) {
                        let (row, column) = (i / per_row, i % per_row * width);
                        let [local, k] = if k_major { [row, column] } else { [column, row] };
                        let (side, weight) = self.side(local);
                        let (side, k) = (first + side, first_k + k);
                        if rows.contains(&side) && points.contains(&k) {
                            warp.access(load, lane, weight + from + self.at(side, k));
                        }
                        let half = column / self.tile_k * HALF;
                        let in_row = column % self.tile_k * self.bytes;
                        warp.access(store, lane, half as u64 + swizzled(row, in_row));
                    }
                }
                warp.end();
            }
        })
    }
}

/// The byte of rows in shared memory, whose chunks of 16 bytes are permuted.
pub(super) fn swizzled(row: usize, in_row: usize) -> u64 {
    (row * SWIZZLE_ROW + ((in_row / 16) ^ (row % 8)) * 16 + in_row % 16) as u64
}

/// How sums of a block are stored.
struct Results<'a> {
    tile: &'a WarpgroupTile,
    /// To the workspace, or to the result.
    is_slice: bool,
    loops: &'a Loops,
    sizes: [usize; 2],
    bytes: usize,
}

/// Accesses of what all blocks store: of that many slices, or of the result; and of old values.
fn results(
    tile: &WarpgroupTile,
    loops: &Loops,
    spans: &Spans,
    slices: Option<usize>,
) -> Option<Accesses> {
    let ([_, m, n, _], [tile_m, tile_n, _]) = (tile.product.sizes(), tile.tile());
    let is_slice = slices.is_some();
    let bytes = if is_slice { 4 } else { tile.product.stored.c.size() as usize };
    let of = Results { tile, is_slice, loops, sizes: [m, n], bytes };
    let mut blocks = Blocks::new();
    for slice in 0..slices.unwrap_or(1) {
        for batch in 0..spans.batches {
            for first_m in (0..spans.rows).step_by(tile_m) {
                for first_n in (0..n).step_by(tile_n) {
                    of.block([slice, batch], [first_m, first_n], &mut blocks)?;
                }
            }
        }
    }
    Some(blocks.count)
}

impl Results<'_> {
    /// The element of the result.
    fn place(&self, batch: usize, [m, n]: [usize; 2]) -> u64 {
        let along = nested(&self.loops.m[1], m) + nested(&self.loops.n[1], n);
        nested(&self.loops.batch[2], batch) + along
    }

    /// The byte that a sum is stored at.
    fn at(&self, [slice, batch]: [usize; 2], [m, n]: [usize; 2]) -> u64 {
        match self.is_slice {
            true => self.in_workspace([slice, batch], [m, n]),
            false => self.place(batch, [m, n]) * self.bytes as u64,
        }
    }

    /// The byte of a sum in the workspace.
    fn in_workspace(&self, [slice, batch]: [usize; 2], [m, n]: [usize; 2]) -> u64 {
        let [rows, columns] = self.sizes;
        let first = (slice * self.tile.product.sizes()[0] + batch) * rows * columns;
        let in_slice = if self.tile.is_transposed { n * rows + m } else { m * columns + n };
        4 * (first + in_slice) as u64
    }

    /// Counts a block tile of a slice and a batch, from a row and a column on.
    fn block(&self, part: [usize; 2], first: [usize; 2], blocks: &mut Blocks) -> Option<()> {
        let ([first_m, first_n], [tile_m, tile_n, _]) = (first, self.tile.tile());
        let rows = first_m..(first_m + tile_m).min(self.sizes[0]);
        let columns = first_n..(first_n + tile_n).min(self.sizes[1]);
        let in_c = |m: usize, n: usize| self.place(part[1], [m, n]) * self.bytes as u64;
        let mut key = vec![rows.len() as u64, columns.len() as u64, u64::from(part[0] == 0)];
        relative(&mut key, [self.at(part, first)]);
        relative(&mut key, rows.clone().map(|m| in_c(m, first_n)));
        relative(&mut key, columns.clone().map(|n| in_c(first_m, n)));
        blocks.count(key, 1, |warp| {
            for number in 0..self.tile.shape.consumers as usize * WARPGROUP as usize / LANES {
                self.list(warp, part, [first_m + number * 16, first_n]);
            }
        })?;
        let Some(result) = &self.tile.result else { return Some(()) };
        let across = result.map.box_dims[0] as usize;
        for first_m in rows.clone().step_by(ROWS) {
            for first_n in columns.clone().step_by(across) {
                let there = |end: usize, first: usize, most: usize| (end - first).min(most) as u64;
                let sizes = [
                    there(rows.end, first_m, ROWS),
                    there(columns.end, first_n, across) * self.bytes as u64,
                ];
                let from = self.at(part, [first_m, first_n]);
                count_box([from, result.map.strides_bytes[0]], sizes, (&mut *blocks, 1))?;
            }
        }
        Some(())
    }

    /// Lists what a warp accesses, given its first row and column.
    fn list(&self, warp: &mut Warp, [slice, batch]: [usize; 2], [first_m, first_n]: [usize; 2]) {
        let (tile, p, mut sites) = (self.tile, &self.tile.product, Sites::default());
        let of_c = p.stored.c.size() as usize;
        let [old, bias, addend] = [0; 3].map(|_| sites.device(of_c));
        let (store, pair) = (sites.device(self.bytes), sites.shared(2 * self.bytes));
        let partial = sites.device(4);
        let is_first = self.is_slice == tile.workspace.is_some();
        let slices = if is_first { 0 } else { p.tiling.split };
        for (lane, of) in (0..LANES).flat_map(|lane| (0..slices).map(move |of| (lane, of))) {
            for i in 0..tile.shape.columns / 2 {
                let (row, column) = (lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
                let (m, n) = (first_m + row, first_n + column);
                if m < self.sizes[0] && n < self.sizes[1] {
                    warp.access(partial, lane, self.in_workspace([of, batch], [m, n]));
                }
            }
        }
        for lane in 0..LANES {
            for i in 0..tile.shape.columns / 2 {
                let (row, column) = (lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
                if let Some(result) = tile.result.as_ref().filter(|_| i % 2 == 0) {
                    let across = result.map.box_dims[0] as usize;
                    let in_row = column % across * self.bytes;
                    let half = column / across * ROWS * SWIZZLE_ROW;
                    warp.access(pair, lane, half as u64 + swizzled(row, in_row));
                }
                let (m, n) = (first_m + row, first_n + column);
                if m >= self.sizes[0] || n >= self.sizes[1] {
                    continue;
                }
                let place = self.place(batch, [m, n]) * of_c as u64;
                if p.accumulate && slice == 0 && is_first {
                    warp.access(old, lane, place);
                }
                if tile.bias.is_some() && !self.is_slice {
                    let at = if tile.is_transposed { m } else { n };
                    warp.access(bias, lane, (at * of_c) as u64);
                }
                if tile.addend.is_some() && !self.is_slice {
                    warp.access(addend, lane, place);
                }
                if tile.result.is_none() {
                    warp.access(store, lane, self.at([slice, batch], [m, n]));
                }
            }
        }
        warp.end();
    }
}
