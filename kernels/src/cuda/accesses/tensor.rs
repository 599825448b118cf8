//! Accesses of products by `mma.sync`, and of sums of slices.
//!
//! Copies of stages depend on the block's rows or columns alone, so each operand is counted once
//! for all blocks that share it.

use super::pairs::{PairResults, PairRow};
use super::product::image_offset;
use super::scales::{runs, scales};
use super::spans::{Span, Spans, table_loads, warps};
use super::{Accesses, Blocks, LANES, OTHER, SECTOR, Site, Sites, Warp, nested, relative};
use crate::border::Border;
use crate::cuda::grouped::Pair;
use crate::cuda::loops::Loops;
use crate::cuda::quads::QuadStore;
use crate::cuda::shared::{Operand, SharedTile, lane_of_matrix};
use crate::cuda::slices::{self, SliceSum};
use crate::cuda::tensor::{ROWS, TensorTile, joined_loops, slice_store};

/// Bytes of a unit, in memory and in shared memory.
const UNIT: usize = 2;

/// An operand of a block tile.
struct Stages<'a> {
    loops: [&'a [[usize; 2]]; 3],
    /// Rows or columns of the result that blocks take.
    size: usize,
    tile: SharedTile,
    /// Those of a block tile.
    extent: usize,
    /// Of the operand that two weights take turns in, how many columns each has at a time.
    run: Option<usize>,
    /// Of an image, dims with zeros around them.
    borders: &'a [Border],
    k_major: bool,
    width: usize,
    threads: usize,
    tile_k: usize,
    /// Steps whose stages are copied before any is multiplied.
    ahead: usize,
}

impl Stages<'_> {
    /// The byte of a unit, but for where its batch starts and for borders.
    fn at(&self, side: usize, k: usize) -> u64 {
        (nested(self.loops[1], side) + nested(self.loops[2], k)) * UNIT as u64
    }

    /// The byte of a row or column of the tile whose first one is given, at a point of k before the
    /// end, but for where its batch starts; none where zeros are copied.
    fn there(&self, [first, local]: [usize; 2], [k, end]: [usize; 2]) -> Option<u64> {
        let (side, weight) = match self.run {
            None => (first + local, 0),
            Some(run) => {
                let is_other = local / run % 2 == 1;
                (first + local / (2 * run) * run + local % run, if is_other { OTHER } else { 0 })
            }
        };
        if side >= self.size || k >= end {
            return None;
        }
        let in_image = image_offset(self.borders, [self.loops[1], self.loops[2]], [side, k])?;
        Some(weight + self.at(side, k) + in_image * UNIT as u64)
    }

    /// Lists the copies of all steps of a block, from a row or column on.
    fn list(&self, warp: &mut Warp, from: u64, first: usize, span: &Span) {
        let per_row = self.tile.columns / self.width;
        let count = self.tile.rows * per_row;
        let mut sites = Sites::default();
        let site = sites.device(self.width * UNIT);
        for start in (0..self.threads).step_by(LANES) {
            for step in 0..span.steps {
                // Threads meet before copies that a stage is used again for.
                if step >= self.ahead {
                    warp.end();
                }
                for lane in 0..LANES {
                    for i in (start + lane..count).step_by(self.threads) {
                        let (row, column) = (i / per_row, i % per_row * self.width);
                        let [side, k] = if self.k_major { [row, column] } else { [column, row] };
                        let k = span.first_k + step * self.tile_k + k;
                        let at = self.there([first, side], [k, span.end]).map(|at| from + at);
                        // Lanes of `cp.async` that copy zeros take part in the request of others.
                        if self.width > 1 || at.is_some() {
                            warp.pass(site, lane, at);
                        }
                    }
                }
            }
            warp.end();
        }
    }

    /// What the counts of a block depend on, given where its batch starts.
    fn key(&self, from: u64, first: usize, span: &Span) -> Vec<u64> {
        let rows = first..(first + self.extent).min(self.size);
        let Span { first_k, steps, end, .. } = *span;
        let mut key = vec![first_k as u64, steps as u64, end as u64, rows.len() as u64];
        if self.borders.is_empty() {
            relative(&mut key, rows.map(|row| from + self.at(row, first_k)));
            return key;
        }
        // Images that follow each other differ in where they start alone, unless they have borders.
        let side = self.loops[1];
        let inside: usize = side[1..].iter().map(|[size, _]| size).product();
        let has_border = self.borders.iter().any(|border| border.n == 0);
        let period = if has_border { self.size } else { inside.max(1) };
        let start = from + self.at(first / period * period, 0);
        key.extend([(first % period) as u64, start % SECTOR]);
        key
    }

    /// Counts the copies of all blocks.
    fn count(&self, spans: &[Span]) -> Option<Accesses> {
        let mut blocks = Blocks::new();
        for span in spans.iter().filter(|span| span.readers > 0) {
            let from = nested(self.loops[0], span.batch) * UNIT as u64;
            for first in (0..self.size).step_by(self.extent) {
                blocks.count(self.key(from, first, span), span.readers, |warp| {
                    self.list(warp, from, first, span);
                })?;
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

/// Accesses of a product by `mma.sync`. Those of the rows of experts are as if these were spread
/// evenly.
pub(super) fn tensor(tile: &TensorTile) -> Option<Accesses> {
    let p = &tile.product;
    let loops = joined_loops(p, tile.elements, tile.image);
    let [_, tiles_m, tiles_n] = tile.tiles();
    let ([tile_m, tile_n, tile_k], [warp_m, warp_n]) = (tile.shape.tile, tile.shape.warp_tile);
    let k: usize = loops.k[0].iter().map(|[size, _]| size).product();
    let slices = tile.slices(k)?;
    let spans =
        Spans::of(p, tile.grouped.map(|of| (of, ROWS)), ([k, tile_k], &slices), [tiles_m, tiles_n]);
    let sides = [(spans.rows, tile_m), (p.sizes()[2], tile_n)];
    let [a, b] = [0, 1].map(|at| stages(tile, &loops, at, sides[at]));
    let mut all = Accesses::default();
    for (of, spans) in [&a, &b].into_iter().zip(&spans.of) {
        all = all.plus(1, of.count(spans)?);
    }
    let steps = spans.steps(tile_m);
    for first_m in (0..tile_m).step_by(warp_m) {
        for first_n in (0..tile_n).step_by(warp_n) {
            let of_a = a.fragments(Operand::A, [first_m, warp_m]);
            let of_b = b.fragments(Operand::B, [first_n, warp_n]);
            for turns in [of_a, of_b] {
                all = all.plus(steps, Accesses { sectors: [0; 2], turns });
            }
        }
    }
    let points = tile.elements.in_units(slices::run(p))?;
    let runs = runs(&slices, [points, points / tile_k]);
    let warps_of_block = warps(tile.threads());
    let of_scales = scales(p, [tile_m, tile_n], [tiles_m, tiles_n], (&runs, warps_of_block))?;
    all = all.plus(1, of_scales);
    if let Some(grouped) = tile.grouped {
        let blocks: usize = tile.tiles().iter().product();
        let loads = table_loads(grouped.along.tables() * warps_of_block);
        all = all.plus(blocks as u64, loads);
        if let Some(pair) = grouped.pair {
            return Some(all.plus(1, pair_results(tile, pair, spans.rows / tile_m)?));
        }
    }
    if tile.workspace.is_some() {
        all = all.plus(1, epilogue(tile, &loops, &spans, Some(slices.len()))?);
        if tile.tickets.is_none() {
            return Some(all);
        }
        let blocks: usize = tile.tiles().iter().product::<usize>() * slices.len();
        all = all.plus(blocks as u64, ticket());
    }
    Some(all.plus(1, epilogue(tile, &loops, &spans, None)?))
}

/// Accesses of the ticket that a block takes.
pub(super) fn ticket() -> Accesses {
    Accesses { sectors: [1; 2], turns: [0; 2] }
}

/// The stages of an operand, given rows or columns of the result and of a tile in shared memory.
fn stages<'a>(
    tile: &'a TensorTile,
    loops: &'a Loops,
    at: usize,
    (size, side): (usize, usize),
) -> Stages<'a> {
    let tile_k = tile.shape.tile[2];
    let k_major = tile.copies[at].k_major;
    let [rows, columns] = if k_major { [side, tile_k] } else { [tile_k, side] };
    let is_image = tile.image == Some(if at == 0 { Operand::A } else { Operand::B });
    let pair = tile.grouped.and_then(|grouped| grouped.pair).filter(|_| at == 1);
    Stages {
        loops: [&loops.batch[at], if at == 0 { &loops.m[0] } else { &loops.n[0] }, &loops.k[at]],
        size,
        tile: SharedTile { rows, columns },
        extent: if at == 0 { side } else { tile.columns() },
        run: pair.map(|_| tile.run()),
        borders: if is_image { &tile.product.borders } else { &[] },
        k_major,
        width: tile.copies[at].width,
        threads: tile.threads() as usize,
        tile_k,
        ahead: tile.shape.stages - 1,
    }
}

/// Accesses of what becomes of two products, given how many tiles of rows have an expert.
fn pair_results(tile: &TensorTile, pair: Pair, row_tiles: usize) -> Option<Accesses> {
    let of = PairResults::of(&tile.product, pair, tile.store, tile.parts());
    let ([tile_m, tile_n, _], [warp_m, warp_n]) = (tile.shape.tile, tile.shape.warp_tile);
    let mut blocks = Blocks::new();
    for block_n in (0..tile.product.sizes()[2]).step_by(tile.columns()) {
        // Tiles of rows lie alike in sectors.
        blocks.count(vec![block_n as u64], row_tiles as u64, |warp| {
            for first_m in (0..tile_m).step_by(warp_m) {
                for first_n in (0..tile_n).step_by(warp_n) {
                    let first_n = block_n + first_n / 2;
                    let part = first_n / tile.run();
                    for (lane, row) in (0..LANES)
                        .flat_map(|lane| (0..warp_m).step_by(8).map(move |row| (lane, row)))
                    {
                        let m = first_m + row + lane / 4;
                        let row = PairRow { m, columns: first_n..first_n + warp_n / 2, part };
                        of.list_row(&row, (&mut *warp, lane));
                    }
                    warp.end();
                }
            }
        })?;
    }
    Some(blocks.count)
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
    /// To the workspace, or to the result, and how.
    is_slice: bool,
    store: QuadStore,
    /// Slices that are added before.
    slices: Option<Site>,
    /// Of the result: along m and n.
    loops: [&'a [[usize; 2]]; 2],
    sizes: [usize; 2],
    /// Of the old value by how many at once, of what is added, and of the result.
    old: Option<(Site, Site, usize)>,
    added: Vec<(bool, Site, Site)>,
    result: [Site; 2],
    bytes: usize,
}

/// Accesses of what all blocks store: of that many slices, or of the result.
fn epilogue(
    tile: &TensorTile,
    loops: &Loops,
    spans: &Spans,
    slices: Option<usize>,
) -> Option<Accesses> {
    let p = &tile.product;
    let (batches, [_, m, n, _], mut sites) = (spans.batches, p.sizes(), Sites::default());
    let is_slice = slices.is_some();
    let store = if is_slice { slice_store(n) } else { tile.store };
    let (bytes, of_c) = (store.dtype.size() as usize, p.stored.c.size() as usize);
    let width = store.width;
    let is_first = is_slice == tile.workspace.is_some();
    let old = tile.old_values(loops).filter(|_| is_first);
    let old = old.map(|of: QuadStore| (sites.device(of.width * 4), sites.device(4), of.width));
    let added = [(tile.bias, true), (tile.addend, false)].into_iter();
    let added = added.filter(|(at, _)| at.is_some() && !is_slice);
    let added = added
        .map(|(_, is_bias)| (is_bias, sites.device(width * of_c), sites.device(of_c)))
        .collect();
    let result = [sites.device(width * bytes), sites.device(bytes)];
    let partial = (!is_first).then(|| sites.device(4));
    let along = [&loops.m[1][..], &loops.n[1]];
    let of = Epilogue {
        tile,
        is_slice,
        store,
        slices: partial,
        loops: along,
        sizes: [m, n],
        old,
        added,
        result,
        bytes,
    };
    let mut blocks = Blocks::new();
    let [tile_m, tile_n, _] = tile.shape.tile;
    for slice in 0..slices.unwrap_or(1) {
        for batch in 0..batches {
            let batch_c = nested(&loops.batch[2], batch) as usize;
            let from = (slice * batches + batch) * m * n;
            for first_m in (0..spans.rows).step_by(tile_m) {
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
                self.list_slices(warp, lane, from, first);
                self.each(self.store, lane, first, |place| {
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

    /// Lists the loads of all slices.
    fn list_slices(&self, warp: &mut Warp, lane: usize, from: [usize; 3], first: [usize; 2]) {
        let (Some(site), p) = (self.slices, &self.tile.product) else { return };
        let [batch, m, n, _] = p.sizes();
        let store = QuadStore { dtype: ir::DType::F32, width: 1 };
        for slice in 0..p.tiling.split {
            self.each(store, lane, first, |[row, column]| {
                let [_, in_workspace] = self.at(row, column);
                let place = slice * batch * m * n + from[1] + in_workspace;
                warp.access(site, lane, 4 * place as u64);
            });
        }
    }

    fn list_result(&self, warp: &mut Warp, lane: usize, from: [usize; 3], [m, n]: [usize; 2]) {
        let [of_result, in_workspace] = self.at(m, n);
        let of_c = self.tile.product.stored.c.size();
        let width = self.store.width;
        let place = if self.is_slice { from[1] + in_workspace } else { from[2] + of_result };
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
