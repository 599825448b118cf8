//! Accesses of products by `mma.sync`, and of sums of slices.
//!
//! Copies of stages depend on the block's rows or columns alone, so each operand is counted once
//! for all blocks that share it.

use super::{Accesses, Blocks, LANES, SECTOR, Site, Sites, Warp, nested, relative};
use crate::cuda::loops::Loops;
use crate::cuda::quads::QuadStore;
use crate::cuda::shared::{Operand, SharedTile, lane_of_matrix};
use crate::cuda::slices::{self, SliceSum};
use crate::cuda::tensor::{TensorTile, joined_loops};

/// Bytes of a unit, in memory and in shared memory.
const UNIT: usize = 2;

/// An operand of a block tile.
struct Stages<'a> {
    loops: [&'a [[usize; 2]]; 3],
    /// Elements along m or n, and units along k.
    sizes: [usize; 2],
    tile: SharedTile,
    extent: usize,
    k_major: bool,
    width: usize,
    threads: usize,
    tile_k: usize,
    /// Steps whose stages are copied before any is multiplied.
    ahead: usize,
}

impl Stages<'_> {
    /// The byte of a unit, but for where its batch starts.
    fn at(&self, side: usize, k: usize) -> u64 {
        (nested(self.loops[1], side) + nested(self.loops[2], k)) * UNIT as u64
    }

    /// Lists the copies of all steps of a block, from a row or column and a point of k on.
    fn list(&self, warp: &mut Warp, from: u64, [first, first_k, steps]: [usize; 3]) {
        let per_row = self.tile.columns / self.width;
        let count = self.tile.rows * per_row;
        let mut sites = Sites::default();
        let site = sites.device(self.width * UNIT);
        for start in (0..self.threads).step_by(LANES) {
            for step in 0..steps {
                // Threads meet before copies that a stage is used again for.
                if step >= self.ahead {
                    warp.end();
                }
                for lane in 0..LANES {
                    for i in (start + lane..count).step_by(self.threads) {
                        let (row, column) = (i / per_row, i % per_row * self.width);
                        let [side, k] = if self.k_major { [row, column] } else { [column, row] };
                        let (side, k) = (first + side, first_k + step * self.tile_k + k);
                        let is_there = side < self.sizes[0] && k < self.sizes[1];
                        let at = is_there.then(|| from + self.at(side, k));
                        // Lanes of `cp.async` that copy zeros take part in the request of others.
                        if self.width > 1 || is_there {
                            warp.pass(site, lane, at);
                        }
                    }
                }
            }
            warp.end();
        }
    }

    /// Counts the copies of all blocks; `readers` of them read the same tile of the operand.
    fn count(&self, readers: u64, slices: &[[usize; 2]], batches: usize) -> Option<Accesses> {
        let mut blocks = Blocks::new();
        for batch in 0..batches {
            let from = nested(self.loops[0], batch) * UNIT as u64;
            for [first_k, steps] in slices {
                for first in (0..self.sizes[0]).step_by(self.extent) {
                    let rows = first..(first + self.extent).min(self.sizes[0]);
                    let mut key = vec![*first_k as u64, *steps as u64, rows.len() as u64];
                    relative(&mut key, rows.map(|row| from + self.at(row, *first_k)));
                    blocks.count(key, readers, |warp| {
                        self.list(warp, from, [first, *first_k, *steps]);
                    })?;
                }
            }
        }
        Some(blocks.count)
    }

    /// Turns of the loads of a warp's fragments of a step.
    fn fragments(&self, operand: Operand, sides: [usize; 2]) -> [u64; 2] {
        fragment_turns(self.tile, (operand, self.k_major), sides, self.tile_k)
    }
}

/// Turns of the loads of a warp's fragments from a tile that starts at the first bank: given how it
/// lies, the first row or column and how many there are, and points of k.
pub(super) fn fragment_turns(
    tile: SharedTile,
    (operand, k_major): (Operand, bool),
    [first, extent]: [usize; 2],
    tile_k: usize,
) -> [u64; 2] {
    let mut sites = Sites::default();
    let (mut warp, site) = (Warp::default(), sites.shared(16));
    for k in (0..tile_k).step_by(16) {
        for i in (0..extent).step_by(16) {
            for lane in 0..LANES {
                let [row, column] = lane_of_matrix(operand, k_major, lane);
                let [row, column] = match k_major {
                    true => [first + i + row, k + column],
                    false => [k + row, first + i + column],
                };
                warp.access(site, lane, 2 * tile.place(row, column) as u64);
            }
        }
    }
    warp.end();
    warp.count.turns
}

/// Accesses of a product by `mma.sync`; none of one whose second operand is an image, that has
/// scales, whose loads a compiler merges, or whose tiles depend on how tokens are routed.
pub(super) fn tensor(tile: &TensorTile) -> Option<Accesses> {
    let p = &tile.product;
    if !p.borders.is_empty() || tile.scales.is_some() || tile.grouped.is_some() {
        return None;
    }
    let loops = joined_loops(p, tile.elements, None);
    let [batches, tiles_m, tiles_n] = tile.tiles();
    let ([tile_m, tile_n, tile_k], [warp_m, warp_n]) = (tile.shape.tile, tile.shape.warp_tile);
    let k: usize = loops.k[0].iter().map(|[size, _]| size).product();
    let slices = tile.slices(k)?;
    let [_, m, n, _] = p.sizes();
    let stages = |at: usize, size: usize, extent: usize| {
        let k_major = tile.copies[at].k_major;
        let [rows, columns] = if k_major { [extent, tile_k] } else { [tile_k, extent] };
        Stages {
            loops: [
                &loops.batch[at],
                if at == 0 { &loops.m[0] } else { &loops.n[0] },
                &loops.k[at],
            ],
            sizes: [size, k],
            tile: SharedTile { rows, columns },
            extent,
            k_major,
            width: tile.copies[at].width,
            threads: tile.threads() as usize,
            tile_k,
            ahead: tile.shape.stages - 1,
        }
    };
    let (a, b) = (stages(0, m, tile_m), stages(1, n, tile_n));
    let mut all = Accesses::default();
    all = all.plus(1, a.count(tiles_n as u64, &slices, batches)?);
    all = all.plus(1, b.count(tiles_m as u64, &slices, batches)?);
    let steps: usize = slices.iter().map(|[_, steps]| steps).sum();
    let blocks = (batches * tiles_m * tiles_n * steps) as u64;
    for first_m in (0..tile_m).step_by(warp_m) {
        for first_n in (0..tile_n).step_by(warp_n) {
            let of_a = a.fragments(Operand::A, [first_m, warp_m]);
            let of_b = b.fragments(Operand::B, [first_n, warp_n]);
            for turns in [of_a, of_b] {
                all = all.plus(blocks, Accesses { sectors: [0; 2], turns });
            }
        }
    }
    Some(all.plus(1, epilogue(tile, &loops, slices.len())?))
}

impl TensorTile {
    /// For each slice the first unit of k, and its steps.
    fn slices(&self, k: usize) -> Option<Vec<[usize; 2]>> {
        let sizes = [k, self.shape.tile[2]];
        let slice = match self.workspace {
            Some(_) => Some(self.elements.in_units(self.product.slice())?),
            None => None,
        };
        Some(slices_of_k(sizes, slice, self.product.tiling.split))
    }
}

/// The first point of k of each slice and its steps, given points of k and of a step; those of the
/// whole where no slice is summed by itself.
pub(super) fn slices_of_k(
    [k, tile_k]: [usize; 2],
    slice: Option<usize>,
    split: usize,
) -> Vec<[usize; 2]> {
    let all = k.div_ceil(tile_k);
    let Some(slice) = slice else { return vec![[0, all]] };
    let per_slice = slice / tile_k;
    let steps = |at: usize| [at * slice, all.saturating_sub(at * per_slice).min(per_slice)];
    (0..split).map(steps).collect()
}

/// How sums of a block are stored.
struct Epilogue<'a> {
    tile: &'a TensorTile,
    /// Of the result: along m and n.
    loops: [&'a [[usize; 2]]; 2],
    sizes: [usize; 2],
    /// Of the old value by how many at once, of what is added, and of the result.
    old: Option<(Site, Site, usize)>,
    added: Vec<(bool, Site, Site)>,
    result: [Site; 2],
    bytes: usize,
}

/// Accesses of the results of all blocks.
fn epilogue(tile: &TensorTile, loops: &Loops, slices: usize) -> Option<Accesses> {
    let p = &tile.product;
    let ([batches, m, n, _], mut sites) = (p.sizes(), Sites::default());
    let dtype = if tile.workspace.is_some() { ir::DType::F32 } else { p.stored.c };
    let (bytes, of_c) = (dtype.size() as usize, p.stored.c.size() as usize);
    let width = tile.store.width;
    let old = tile.old_values(loops);
    let old = old.map(|of: QuadStore| (sites.device(of.width * 4), sites.device(4), of.width));
    let is_added = tile.workspace.is_none();
    let added = [(tile.bias, true), (tile.addend, false)].into_iter();
    let added = added.filter(|(at, _)| at.is_some() && is_added);
    let added = added
        .map(|(_, is_bias)| (is_bias, sites.device(width * of_c), sites.device(of_c)))
        .collect();
    let result = [sites.device(width * bytes), sites.device(bytes)];
    let along = [&loops.m[1][..], &loops.n[1]];
    let of = Epilogue { tile, loops: along, sizes: [m, n], old, added, result, bytes };
    let mut blocks = Blocks::new();
    let [tile_m, tile_n, _] = tile.shape.tile;
    for slice in 0..slices {
        for batch in 0..batches {
            let batch_c = nested(&loops.batch[2], batch) as usize;
            let from = if is_added { batch_c } else { (slice * batches + batch) * m * n };
            for first_m in (0..m).step_by(tile_m) {
                for first_n in (0..n).step_by(tile_n) {
                    let first = [first_m, first_n];
                    let key = of.key([slice, from, batch_c], first);
                    blocks.count(key, 1, |warp| of.list(warp, [slice, from, batch_c], first))?;
                }
            }
        }
    }
    Some(blocks.count)
}

impl Epilogue<'_> {
    /// The element of the result, but for where its batch starts, and that in the workspace.
    fn at(&self, m: usize, n: usize) -> [usize; 2] {
        let of_result = nested(self.loops[0], m) + nested(self.loops[1], n);
        [of_result as usize, m * self.sizes[1] + n]
    }

    fn key(&self, [slice, from, batch_c]: [usize; 3], [first_m, first_n]: [usize; 2]) -> Vec<u64> {
        let [tile_m, tile_n, _] = self.tile.shape.tile;
        let rows = first_m..(first_m + tile_m).min(self.sizes[0]);
        let columns = first_n..(first_n + tile_n).min(self.sizes[1]);
        let mut key = vec![rows.len() as u64, columns.len() as u64, u64::from(slice == 0)];
        // Bytes are few: what starts at the same element of 32 does at the same byte of a sector.
        let sector = SECTOR as usize;
        key.extend([from, batch_c, first_n].map(|at| (at % sector) as u64));
        relative(&mut key, rows.map(|m| self.at(m, 0)[0] as u64));
        relative(&mut key, columns.map(|n| self.at(0, n)[0] as u64));
        key.push((first_m * self.sizes[1] % sector) as u64);
        key
    }

    fn list(&self, warp: &mut Warp, from: [usize; 3], [block_m, block_n]: [usize; 2]) {
        let ([_, tile_n, _], [warp_m, warp_n]) = (self.tile.shape.tile, self.tile.shape.warp_tile);
        for number in 0..self.tile.threads() as usize / LANES {
            let across = tile_n / warp_n;
            let first = [block_m + number / across * warp_m, block_n + number % across * warp_n];
            for lane in 0..LANES {
                if let Some((_, _, width)) = self.old
                    && from[0] == 0
                {
                    let store = QuadStore { dtype: ir::DType::F32, width };
                    self.each(store, lane, first, |place| self.list_old(warp, lane, from, place));
                }
                self.each(self.tile.store, lane, first, |place| {
                    self.list_result(warp, lane, from, place);
                });
            }
            warp.end();
        }
    }

    /// Visits the first element of each vector of a lane.
    fn each(
        &self,
        store: QuadStore,
        lane: usize,
        [first_m, first_n]: [usize; 2],
        mut visit: impl FnMut([usize; 2]),
    ) {
        let [warp_m, warp_n] = self.tile.shape.warp_tile;
        for i in 0..warp_m / 16 {
            for j in (0..warp_n / 8).step_by(store.tiles()) {
                for q in (0..4).step_by(store.width.min(2)) {
                    let m = first_m + i * 16 + lane / 4 + q / 2 * 8;
                    let n = first_n + j * 8 + store.column_of(lane, q);
                    if m < self.sizes[0] && n < self.sizes[1] {
                        visit([m, n]);
                    }
                }
            }
        }
    }

    fn list_old(
        &self,
        warp: &mut Warp,
        lane: usize,
        [_, _, batch_c]: [usize; 3],
        [m, n]: [usize; 2],
    ) {
        let Some((whole, single, width)) = self.old else { return };
        let site = if n + width > self.sizes[1] { single } else { whole };
        warp.access(site, lane, 4 * (batch_c + self.at(m, n)[0]) as u64);
    }

    fn list_result(&self, warp: &mut Warp, lane: usize, from: [usize; 3], [m, n]: [usize; 2]) {
        let [of_result, in_workspace] = self.at(m, n);
        let of_c = self.tile.product.stored.c.size();
        let width = self.tile.store.width;
        let place = from[1] + if self.tile.workspace.is_some() { in_workspace } else { of_result };
        let is_whole = n + width <= self.sizes[1];
        let count = if is_whole { 1 } else { self.sizes[1] - n };
        let pick = |[whole, single]: [Site; 2]| if is_whole { whole } else { single };
        for e in 0..count {
            for (is_bias, whole, single) in &self.added {
                let at = if *is_bias { n + e } else { place + e };
                warp.access(pick([*whole, *single]), lane, at as u64 * of_c);
            }
            warp.access(pick(self.result), lane, ((place + e) * self.bytes) as u64);
        }
    }
}

/// Accesses of the sum of slices.
pub(super) fn slice_sum(tile: &SliceSum, grid: u64) -> Option<Accesses> {
    let p = &tile.product;
    let (loops, [batch, m, n, _]) = (Loops::of(p), p.sizes());
    let (count, threads, bytes) = (batch * m * n, slices::THREADS as usize, p.stored.c.size());
    let mut sites = Sites::default();
    let partial = sites.device(4);
    let [bias, addend, to] = [0; 3].map(|_| sites.device(bytes as usize));
    let place = |i: usize| {
        nested(&loops.batch[2], i / (m * n))
            + nested(&loops.m[1], i / n % m)
            + nested(&loops.n[1], i % n)
    };
    let mut blocks = Blocks::new();
    for block in 0..grid as usize {
        let all = block * threads..((block + 1) * threads).min(count);
        let mut key = vec![all.len() as u64, (all.start % n) as u64];
        relative(&mut key, all.clone().map(|i| place(i) * bytes));
        blocks.count(key, 1, |warp| {
            for (number, i) in all.enumerate() {
                let lane = number % LANES;
                if lane == 0 {
                    warp.end();
                }
                for slice in 0..p.tiling.split {
                    warp.access(partial, lane, 4 * (slice * count + i) as u64);
                }
                if tile.bias.is_some() {
                    warp.access(bias, lane, (i % n) as u64 * bytes);
                }
                if tile.addend.is_some() {
                    warp.access(addend, lane, place(i) * bytes);
                }
                warp.access(to, lane, place(i) * bytes);
            }
            warp.end();
        })?;
    }
    Some(blocks.count)
}
