//! Accesses of products by `wgmma`.
//!
//! Copies of a step depend on the block's rows or columns alone, so each operand is counted once
//! for all blocks that share it. Which block has a tile changes nothing.

use super::flash::count_box;
use super::tensor::slices_of_k;
use super::{Accesses, Blocks, LANES, Sites, Warp, nested, relative};
use crate::cuda::loops::Loops;
use crate::cuda::tensor::OperandCopy;
use crate::cuda::warpgroup::{
    HALF, MappedOperand, ROWS, SIDE, SWIZZLE_ROW, StagedOperand, WARPGROUP, WarpgroupTile,
};

/// Accesses of a product; none of one that has scales, whose loads a compiler merges, or whose
/// tiles depend on how tokens are routed.
pub(super) fn warpgroup(tile: &WarpgroupTile) -> Option<Accesses> {
    if tile.scales.is_some() || tile.grouped.is_some() {
        return None;
    }
    let p = &tile.product;
    let (loops, [_, m, n, k], [tile_m, tile_n, tile_k]) = (Loops::of(p), p.sizes(), tile.tile());
    let [_, tiles_m, tiles_n] = tile.tiles();
    let slice = tile.workspace.map(|_| p.slice());
    let slices = slices_of_k([k, tile_k], slice, p.tiling.split);
    let bytes = tile.bytes();
    let of = |at: usize| {
        let side = if at == 0 { &loops.m[0][..] } else { &loops.n[0] };
        let ([size, other], extent) =
            if at == 0 { ([m, tiles_n], tile_m) } else { ([n, tiles_m], tile_n) };
        let loops = [&loops.batch[at][..], side, &loops.k[at]];
        let operand = Operand { loops, sizes: [size, k], extent, bytes, tile_k };
        operand.count(&tile.operands[at], &slices, other as u64)
    };
    let all = of(0)?.plus(1, of(1)?);
    Some(all.plus(1, results(tile, &loops, slices.len())?))
}

/// An operand of a block tile.
struct Operand<'a> {
    /// Over batch, m or n, and k.
    loops: [&'a [[usize; 2]]; 3],
    /// Elements along m or n, and along k.
    sizes: [usize; 2],
    extent: usize,
    bytes: usize,
    tile_k: usize,
}

impl Operand<'_> {
    /// The byte of an element, but for where its batch starts.
    fn at(&self, side: usize, k: usize) -> u64 {
        (nested(self.loops[1], side) + nested(self.loops[2], k)) * self.bytes as u64
    }

    /// Counts the copies of all blocks; `readers` of them read the same tile of the operand.
    fn count(
        &self,
        operand: &StagedOperand,
        slices: &[[usize; 2]],
        readers: u64,
    ) -> Option<Accesses> {
        let mut blocks = Blocks::new();
        let batches = self.loops[0].iter().map(|[size, _]| size).product();
        for batch in 0..batches {
            let from = nested(self.loops[0], batch) * self.bytes as u64;
            for [first_k, steps] in slices {
                for k in (0..*steps).map(|step| first_k + step * self.tile_k) {
                    for side in (0..self.sizes[0]).step_by(self.extent) {
                        let of = (&mut blocks, readers);
                        match operand {
                            StagedOperand::Mapped(map) => self.boxes(map, from, [side, k], of)?,
                            StagedOperand::Copied(copy, _) => {
                                self.copies(*copy, from, [side, k], of)?;
                            }
                        }
                    }
                }
            }
        }
        Some(blocks.count)
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
        let [rows_of_tile, columns] =
            if k_major { [self.extent, self.tile_k] } else { [self.tile_k, self.extent] };
        let (per_row, mut sites) = (columns / width, Sites::default());
        let (load, store) = (sites.device(width * self.bytes), sites.shared(width * self.bytes));
        blocks.count(key, times, |warp| {
            for start in (0..WARPGROUP as usize).step_by(LANES) {
                for lane in 0..LANES {
                    for i in (start + lane..rows_of_tile * per_row).step_by(WARPGROUP as usize) {
                        let (row, column) = (i / per_row, i % per_row * width);
                        let [side, k] = if k_major { [row, column] } else { [column, row] };
                        let (side, k) = (first + side, first_k + k);
                        if rows.contains(&side) && points.contains(&k) {
                            warp.access(load, lane, from + self.at(side, k));
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
    loops: &'a Loops,
    sizes: [usize; 2],
    bytes: usize,
}

/// Accesses of the results of all blocks, and of old values.
fn results(tile: &WarpgroupTile, loops: &Loops, slices: usize) -> Option<Accesses> {
    let ([batches, m, n, _], [tile_m, tile_n, _]) = (tile.product.sizes(), tile.tile());
    let bytes = if tile.workspace.is_some() { 4 } else { tile.product.stored.c.size() as usize };
    let of = Results { tile, loops, sizes: [m, n], bytes };
    let mut blocks = Blocks::new();
    for slice in 0..slices {
        for batch in 0..batches {
            for first_m in (0..m).step_by(tile_m) {
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
        let [rows, columns] = self.sizes;
        let place = match self.tile.workspace {
            None => self.place(batch, [m, n]),
            Some(_) => {
                let first = (slice * self.tile.product.sizes()[0] + batch) * rows * columns;
                let in_slice = if self.tile.is_transposed { n * rows + m } else { m * columns + n };
                (first + in_slice) as u64
            }
        };
        place * self.bytes as u64
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
        let is_added = tile.workspace.is_none();
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
                if p.accumulate && slice == 0 {
                    warp.access(old, lane, place);
                }
                if tile.bias.is_some() && is_added {
                    let at = if tile.is_transposed { m } else { n };
                    warp.access(bias, lane, (at * of_c) as u64);
                }
                if tile.addend.is_some() && is_added {
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
