//! Accesses of products on CUDA cores.
//!
//! Copies of tiles depend on the block's rows or columns alone, so each operand is counted once for
//! all blocks that share it; what a block does with shared memory depends on k alone.

use super::spans::{Span, Spans, table_loads, warps};
use super::{Accesses, Blocks, LANES, Site, Sites, Warp, nested, relative};
use crate::border::Border;
use crate::cuda::loops::Loops;
use crate::cuda::product::{PITCH, ProductTile, ROWS, THREAD_TILE, THREADS, TILE_K};
use crate::kernel::Scales;

/// Threads of a row of thread tiles.
const ACROSS: usize = ROWS / THREAD_TILE;

/// An operand of a block tile.
struct Operand<'a> {
    /// Over batch, m or n, and k.
    loops: [&'a [[usize; 2]]; 3],
    /// Rows or columns of the result that blocks take.
    size: usize,
    bytes: u64,
    /// Whether threads that follow each other copy elements along k; else along m or n.
    is_along_k: bool,
    scales: Option<Scales>,
    borders: &'a [Border],
}

impl Operand<'_> {
    /// The element of a row or column and a point of k, but for where its batch starts; none beyond
    /// the border of an image.
    fn at(&self, side: usize, k: usize) -> Option<u64> {
        let at = nested(self.loops[1], side) + nested(self.loops[2], k);
        Some(at + image_offset(self.borders, [self.loops[1], self.loops[2]], [side, k])?)
    }

    /// The byte of the scale of a row or column at a point of k.
    fn scale(&self, side: usize, k: usize) -> Option<u64> {
        let Scales { block, of_block, of_run } = self.scales?;
        Some(4 * (side / block * of_block + k / Scales::RUN * of_run) as u64)
    }

    /// What the counts of a block depend on.
    fn key(&self, from: u64, first: usize, span: &Span) -> Vec<u64> {
        let rows = first..(first + ROWS).min(self.size);
        let mut key = vec![rows.len() as u64, span.first_k as u64, span.end as u64];
        if !self.borders.is_empty() {
            key.extend([rows.start as u64, from]);
            return key;
        }
        let from = from + nested(self.loops[2], span.first_k);
        let at = |row: usize| (from + nested(self.loops[1], row)) * self.bytes;
        relative(&mut key, rows.clone().map(at));
        relative(&mut key, rows.filter_map(|row| self.scale(row, 0)));
        key
    }

    /// Lists the copies of a block from a row or column on.
    fn list(&self, warp: &mut Warp, from: u64, first: usize, span: &Span) {
        let mut sites = Sites::default();
        let (site, scale) = (sites.device(self.bytes as usize), sites.device(4));
        for start in (0..THREADS as usize).step_by(LANES) {
            for first_k in (span.first_k..span.end).step_by(TILE_K) {
                for lane in 0..LANES {
                    for i in (start + lane..ROWS * TILE_K).step_by(THREADS as usize) {
                        let [side, k] = self.local(i);
                        let (side, k) = (first + side, first_k + k);
                        if side >= self.size || k >= span.end {
                            continue;
                        }
                        let Some(at) = self.at(side, k) else { continue };
                        warp.access(site, lane, (from + at) * self.bytes);
                        if let Some(at) = self.scale(side, k) {
                            warp.access(scale, lane, at);
                        }
                    }
                }
                // Threads meet after each step.
                warp.end();
            }
        }
    }

    /// The row or column and the point of k of an element of the tile, by its number.
    fn local(&self, i: usize) -> [usize; 2] {
        if self.is_along_k { [i / TILE_K, i % TILE_K] } else { [i % ROWS, i / ROWS] }
    }

    /// Counts the copies of all blocks.
    fn count(&self, spans: &[Span]) -> Option<Accesses> {
        let mut blocks = Blocks::new();
        for span in spans.iter().filter(|span| span.readers > 0) {
            let from = nested(self.loops[0], span.batch);
            for first in (0..self.size).step_by(ROWS) {
                blocks.count(self.key(from, first, span), span.readers, |warp| {
                    self.list(warp, from, first, span);
                })?;
            }
        }
        Some(blocks.count)
    }

    /// Turns of the stores of a step, and of the loads of a thread's elements of each point of k,
    /// given the first that it has of the tile.
    fn turns(&self, compute: usize, thread: fn(usize) -> usize) -> [[u64; 2]; 2] {
        let mut sites = Sites::default();
        let [store, load] = [0; 2].map(|_| sites.shared(compute));
        let count = |list: &dyn Fn(&mut Warp, usize, usize)| {
            let mut warp = Warp::default();
            for first in (0..THREADS as usize).step_by(LANES) {
                (0..LANES).for_each(|lane| list(&mut warp, lane, first + lane));
                warp.end();
            }
            warp.count.turns
        };
        let stores = count(&|warp, lane, number| {
            for i in (number..ROWS * TILE_K).step_by(THREADS as usize) {
                let [side, k] = self.local(i);
                warp.access(store, lane, ((k * PITCH + side) * compute) as u64);
            }
        });
        let loads = count(&|warp, lane, number| {
            for i in 0..THREAD_TILE {
                warp.access(load, lane, ((thread(number) + i) * compute) as u64);
            }
        });
        [stores, loads]
    }
}

/// The offset of an element along dims of an image with borders, given loops over m or n and over k
/// and an index in both; none beyond a border.
pub(super) fn image_offset(
    borders: &[Border],
    [of_side, of_k]: [&[[usize; 2]]; 2],
    [side, k]: [usize; 2],
) -> Option<u64> {
    borders.iter().try_fold(0, |sum, border| {
        let [n, k] = [coordinate(of_side, border.n, side), coordinate(of_k, border.k, k)];
        Some(sum + (border.read(n, k)? * border.step) as u64)
    })
}

/// The coordinate of a linear index in one of nested loops.
fn coordinate(loops: &[[usize; 2]], at: usize, index: usize) -> usize {
    let inside: usize = loops[at + 1..].iter().map(|[size, _]| size).product();
    index / inside.max(1) % loops[at][0].max(1)
}

/// Accesses of a product on CUDA cores. Those of the rows of experts are as if these were spread
/// evenly. None of two weights that take turns: a compiler may load each by an instruction.
pub(super) fn product(tile: &ProductTile) -> Option<Accesses> {
    let p = &tile.product;
    if tile.grouped.is_some_and(|grouped| grouped.pair.is_some()) {
        return None;
    }
    let (loops, [_, _, n, k], [batches, tiles_m, tiles_n]) =
        (Loops::of(p), p.sizes(), tile.tiles());
    let grouped = tile.grouped.map(|grouped| (grouped, ROWS));
    let slices = [[0, k.div_ceil(TILE_K)]];
    let spans = Spans::of(p, grouped, ([k, TILE_K], &slices), [tiles_m, tiles_n]);
    let scales = p.scales.filter(|_| tile.scales.is_some());
    let a = Operand {
        loops: [&loops.batch[0], &loops.m[0], &loops.k[0]],
        size: spans.rows,
        bytes: p.stored.a.size(),
        is_along_k: true,
        scales: scales.map(|of| of[0]),
        borders: &[],
    };
    let b = Operand {
        loops: [&loops.batch[1], &loops.n[0], &loops.k[1]],
        size: n,
        bytes: p.stored.b.size(),
        is_along_k: false,
        scales: scales.map(|of| of[1]),
        borders: &p.borders,
    };
    let compute = p.dtype.size() as usize;
    let mut all = Accesses::default();
    all = all.plus(1, a.count(&spans.of[0])?);
    all = all.plus(1, b.count(&spans.of[1])?);
    let of_a = a.turns(compute, |thread| thread / ACROSS * THREAD_TILE);
    let of_b = b.turns(compute, |thread| thread % ACROSS * THREAD_TILE);
    for [stores, loads] in [of_a, of_b] {
        // A point of k is behind the one before by a whole number of words.
        for (times, turns) in [(spans.steps(ROWS), stores), (spans.points(ROWS), loads)] {
            all = all.plus(times, Accesses { sectors: [0; 2], turns });
        }
    }
    let Some(grouped) = tile.grouped else {
        return Some(all.plus(1, results(tile, &loops, &spans)?));
    };
    let blocks = (batches * tiles_m * tiles_n) as u64;
    all = all.plus(blocks, table_loads(grouped.along.tables() * warps(THREADS)));
    Some(all.plus(1, results(tile, &loops, &spans)?))
}

/// Accesses of the results of all blocks, and of old values.
fn results(tile: &ProductTile, loops: &Loops, spans: &Spans) -> Option<Accesses> {
    let (p, [_, _, n, _]) = (&tile.product, tile.product.sizes());
    let (batches, m) = (spans.batches, spans.rows);
    let (bytes, mut sites) = (p.stored.c.size(), Sites::default());
    let [old, bias, addend, result] = [0; 4].map(|_| sites.device(bytes as usize));
    let old = p.accumulate.then_some(old);
    let bias = tile.bias.map(|_| bias);
    let behind: Vec<Site> = tile.addend.map(|_| addend).into_iter().chain([result]).collect();
    let mut blocks = Blocks::new();
    for batch in 0..batches {
        let from = nested(&loops.batch[2], batch);
        let at =
            |m: usize, n: usize| (from + nested(&loops.m[1], m) + nested(&loops.n[1], n)) * bytes;
        for first_m in (0..m).step_by(ROWS) {
            for first_n in (0..n).step_by(ROWS) {
                let rows = first_m..(first_m + ROWS).min(m);
                let columns = first_n..(first_n + ROWS).min(n);
                let mut key = vec![rows.len() as u64, columns.len() as u64];
                relative(&mut key, rows.map(|m| at(m, first_n)));
                relative(&mut key, columns.map(|n| at(first_m, n)));
                blocks.count(key, 1, |warp| {
                    each(warp, [first_m, first_n], [m, n], |warp, lane, [m, n]| {
                        old.iter().for_each(|site| warp.access(*site, lane, at(m, n)));
                        bias.iter().for_each(|site| warp.access(*site, lane, n as u64 * bytes));
                        behind.iter().for_each(|site| warp.access(*site, lane, at(m, n)));
                    });
                })?;
            }
        }
    }
    Some(blocks.count)
}

/// Visits the elements of each thread of a block, warp by warp.
fn each(
    warp: &mut Warp,
    [first_m, first_n]: [usize; 2],
    [m_size, n_size]: [usize; 2],
    visit: impl Fn(&mut Warp, usize, [usize; 2]),
) {
    for thread in 0..THREADS as usize {
        for i in 0..THREAD_TILE {
            for j in 0..THREAD_TILE {
                let m = first_m + thread / ACROSS * THREAD_TILE + i;
                let n = first_n + thread % ACROSS * THREAD_TILE + j;
                if m < m_size && n < n_size {
                    visit(warp, thread % LANES, [m, n]);
                }
            }
        }
        if thread % LANES == LANES - 1 {
            warp.end();
        }
    }
}
