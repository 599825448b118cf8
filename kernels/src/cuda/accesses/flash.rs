//! Accesses of attention on tensor cores: copies of rows by `cp.async` or by TMA, and what threads
//! themselves load and store, which is the same of `mma.sync` and of `wgmma`.
//!
//! Blocks differ in how many tiles of keys they go over, and heads in how their rows lie in
//! sectors: heads that lie alike are counted once.

use std::collections::BTreeMap;
use std::ops::Range;

use super::attention::{distance, is_known, is_seen, key_loads};
use super::tensor::fragment_turns;
use super::{Accesses, Blocks, LANES, SECTOR, Sites, Warp};
use crate::cuda::flash::{FlashTile, THREADS, VECTOR, WARPS};
use crate::cuda::flash_warpgroup::{self, FlashWarpgroup, SWIZZLE_COLUMNS};
use crate::cuda::quads::QuadStore;
use crate::cuda::shared::Operand;
use crate::kernel::Attention;

/// Bytes of an element of the operands.
pub(super) const HALF: u64 = 2;
/// What a key of boxes starts with, beside which other keys may be in use.
const BOX: u64 = 9;

/// Where a head starts in each buffer, in bytes from a sector on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Head {
    pub(super) q: u64,
    pub(super) k: u64,
    pub(super) v: u64,
    pub(super) out: u64,
    pub(super) lse: u64,
    pub(super) bias: u64,
    pub(super) documents: u64,
}

impl Head {
    pub(super) fn of(a: &Attention, [b, h, g]: [usize; 3]) -> Head {
        let start =
            |[of_b, _, of_h]: [usize; 3], h: usize| (b * of_b + h * of_h) as u64 * HALF % SECTOR;
        let [of_b, of_h, of_s] = a.bias.unwrap_or_default();
        Head {
            q: start(a.q, h),
            k: start(a.k, g),
            v: start(a.v, g),
            out: start(a.out, h),
            lse: ((b * a.heads + h) * a.queries * 4) as u64 % SECTOR,
            bias: start([of_b, of_s, of_h], h),
            documents: a.documents.map_or(0, |_| (b * a.keys * 4) as u64 % SECTOR),
        }
    }
}

/// Accesses of the forward pass by `mma.sync`; none where a position or a scalar of the launch
/// decides.
pub(super) fn flash(tile: &FlashTile) -> Option<Accesses> {
    let a = &tile.attention;
    let of = Forward::all(a, [tile.query_tile, tile.key_tile], WARPS, Copied::ByThreads)?;
    let rows = 16 * tile.row_tiles();
    let [of_queries, of_keys, of_values] = [
        (tile.query_tile(), (Operand::A, true), rows, a.dim),
        (tile.key_tile(), (Operand::B, true), tile.key_tile, a.dim),
        (tile.key_tile(), (Operand::B, false), a.dim, tile.key_tile),
    ]
    .map(|(tile, of, side, k)| {
        let turns = |warp: usize| {
            // Each warp has queries of its own, and all keys.
            let first = if of.0 == Operand::A { warp * rows } else { 0 };
            Accesses { sectors: [0; 2], turns: fragment_turns(tile, of, [first, side], k) }
        };
        (0..WARPS).fold(Accesses::default(), |all, warp| all.plus(1, turns(warp)))
    });
    let all = of.blocks.count.plus(tile.blocks(), of_queries);
    let all = all.plus(1, key_loads(a, tile.blocks() * WARPS as u64));
    Some(all.plus(of.steps, of_keys).plus(of.steps, of_values))
}

/// The same by `wgmma`, whose operands threads do not load.
pub(super) fn flash_warpgroup(tile: &FlashWarpgroup) -> Option<Accesses> {
    let (a, tiles) = (&tile.attention, [flash_warpgroup::QUERY_TILE, tile.key_tile]);
    let of = Forward::all(a, tiles, flash_warpgroup::WARPS, Copied::ByTma)?;
    // Warps that copy load the key of dropout too.
    let warps = tile.blocks() * u64::from(flash_warpgroup::THREADS) / LANES as u64;
    Some(of.blocks.count.plus(1, key_loads(a, warps)))
}

/// How rows are copied to shared memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Copied {
    /// By `cp.async`.
    ByThreads,
    ByTma,
}

/// Rows that a block copies, of which some are there.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// The byte of the first one, and elements from one to the next.
    pub(super) from: u64,
    pub(super) stride: usize,
    pub(super) there: usize,
}

impl Rows {
    /// Counts their copies to a tile of some rows.
    pub(super) fn count(
        self,
        copied: Copied,
        [tile, dim]: [usize; 2],
        of: (&mut Blocks, u64),
    ) -> Option<()> {
        match copied {
            Copied::ByThreads => self.count_by_threads([tile, dim], of),
            Copied::ByTma => self.count_boxes(dim, of),
        }
    }

    fn count_by_threads(
        self,
        [tile, dim]: [usize; 2],
        (blocks, times): (&mut Blocks, u64),
    ) -> Option<()> {
        let Rows { from, stride, there } = self;
        let (per_row, from) = (dim / VECTOR, from % SECTOR);
        let key = vec![0, tile as u64, stride as u64, there as u64, from];
        let site = Sites::default().device(VECTOR * HALF as usize);
        blocks.count(key, times, |warp| {
            for first in (0..THREADS).step_by(LANES) {
                for lane in 0..LANES {
                    for i in (first + lane..tile * per_row).step_by(THREADS) {
                        let (row, column) = (i / per_row, i % per_row * VECTOR);
                        let at = from + (row * stride + column) as u64 * HALF;
                        warp.pass(site, lane, (row < there).then_some(at));
                    }
                }
                warp.end();
            }
        })
    }

    /// Boxes have 64 columns.
    fn count_boxes(self, dim: usize, (blocks, times): (&mut Blocks, u64)) -> Option<()> {
        let Rows { from, stride, there } = self;
        for first in (0..dim).step_by(SWIZZLE_COLUMNS) {
            let bytes = (dim - first).min(SWIZZLE_COLUMNS) as u64 * HALF;
            let from = from + first as u64 * HALF;
            count_box([from, stride as u64 * HALF], [there as u64, bytes], (blocks, times))?;
        }
        Some(())
    }
}

/// Counts the rows of a box that TMA copies or stores: where the first one starts, and bytes from
/// one to the next; how many there are, and bytes of each.
pub(super) fn count_box(
    [from, stride]: [u64; 2],
    [rows, bytes]: [u64; 2],
    (blocks, times): (&mut Blocks, u64),
) -> Option<()> {
    let site = Sites::default().device(bytes as usize);
    blocks.count(vec![BOX, from % SECTOR, stride, rows, bytes], times, |warp| {
        // Each row is a request.
        (0..rows).for_each(|row| warp.access(site, 0, from + row * stride));
        warp.end();
    })
}

/// What is counted of the blocks.
struct Forward<'a> {
    a: &'a Attention,
    query_tile: usize,
    key_tile: usize,
    /// Warps that share the queries.
    warps: usize,
    copied: Copied,
    blocks: Blocks,
    /// Tiles of keys that all blocks go over.
    steps: u64,
}

impl<'a> Forward<'a> {
    /// Counts all blocks.
    fn all(
        a: &'a Attention,
        [query_tile, key_tile]: [usize; 2],
        warps: usize,
        copied: Copied,
    ) -> Option<Forward<'a>> {
        if !is_known(a) {
            return None;
        }
        let mut heads: BTreeMap<Head, u64> = BTreeMap::new();
        for b in 0..a.batch {
            for h in 0..a.heads {
                *heads.entry(Head::of(a, [b, h, a.kv_head(h)])).or_default() += 1;
            }
        }
        let blocks = Blocks::new();
        let mut of = Forward { a, query_tile, key_tile, warps, copied, blocks, steps: 0 };
        for (head, times) in heads {
            for first in (0..a.queries).step_by(query_tile) {
                of.block(head, first, times)?;
            }
        }
        Some(of)
    }

    /// Counts a block of as many heads, from a query on.
    fn block(&mut self, head: Head, first_query: usize, times: u64) -> Option<()> {
        let a = self.a;
        let queries = (a.queries - first_query).min(self.query_tile);
        let at = |start: u64, stride: usize| start + (first_query * stride) as u64 * HALF;
        let rows = Rows { from: at(head.q, a.q[1]), stride: a.q[1], there: queries };
        self.copies(rows, self.query_tile, times)?;
        for first_key in self.keys(first_query).step_by(self.key_tile) {
            self.steps += times;
            let there = (a.keys - first_key).min(self.key_tile);
            for (start, [_, stride, _]) in [(head.k, a.k), (head.v, a.v)] {
                let from = start + (first_key * stride) as u64 * HALF;
                self.copies(Rows { from, stride, there }, self.key_tile, times)?;
            }
            if let Some([_, _, stride]) = a.bias {
                let from = at(head.bias, stride) + first_key as u64 * HALF;
                self.bias(from, [queries, there], times)?;
            }
            if a.documents.is_some() {
                self.documents(head.documents, [first_query, first_key], times)?;
            }
        }
        let lse = head.lse + 4 * first_query as u64;
        self.results([at(head.out, a.out[1]), lse], queries, times)
    }

    /// Counts the copies of a tile of rows.
    fn copies(&mut self, rows: Rows, tile: usize, times: u64) -> Option<()> {
        rows.count(self.copied, [tile, self.a.dim], (&mut self.blocks, times))
    }

    /// Counts the loads of the bias of a tile of keys.
    fn bias(&mut self, from: u64, [queries, keys]: [usize; 2], times: u64) -> Option<()> {
        let (shape, stride) = (self.shape(), self.a.bias?[2]);
        let key = vec![1, queries as u64, keys as u64, from % SECTOR];
        let site = Sites::default().device(HALF as usize);
        self.blocks.count(key, times, |warp| {
            shape.each_score(warp, |warp, lane, [row, column]| {
                if row < queries && column < keys {
                    let at = (row * stride + column) as u64 * HALF;
                    warp.access(site, lane, from % SECTOR + at);
                }
            });
        })
    }

    /// Counts the loads of the documents of a tile of keys: of each pair that is seen where both
    /// are of one document, those of its query and of its key.
    fn documents(
        &mut self,
        of_sample: u64,
        [first_query, first_key]: [usize; 2],
        times: u64,
    ) -> Option<()> {
        let (shape, a) = (self.shape(), self.a);
        let first_token = first_query + a.documents?;
        let [own, other] = [first_token, first_key].map(|at| (of_sample + 4 * at as u64) % SECTOR);
        let there = [a.queries - first_query, a.keys - first_key].map(|count| count as u64);
        let of_tile = [there[0].min(self.query_tile as u64), there[1].min(self.key_tile as u64)];
        let mut key = vec![3, of_tile[0], of_tile[1], own, other];
        key.extend(distance(a, [first_query, first_key]));
        let mut sites = Sites::default();
        let sites = [0; 2].map(|_| sites.device(4));
        self.blocks.count(key, times, |warp| {
            shape.each_score(warp, |warp, lane, [row, column]| {
                let pair = [first_query + row, first_key + column];
                if pair[0] < a.queries && is_seen(a, pair) {
                    warp.access(sites[0], lane, own + 4 * row as u64);
                    warp.access(sites[1], lane, other + 4 * column as u64);
                }
            });
        })
    }

    /// Counts the stores of a tile of queries, of which some are there.
    fn results(&mut self, [out, lse]: [u64; 2], queries: usize, times: u64) -> Option<()> {
        let (shape, a) = (self.shape(), self.a);
        let [out, lse] = [out, lse].map(|at| at % SECTOR);
        let store = QuadStore::of(a.dtype, a.dim / 8, VECTOR);
        let key = vec![2, queries as u64, out, lse];
        let mut sites = Sites::default();
        let (of_out, of_lse) = (sites.device(store.width * HALF as usize), sites.device(4));
        self.blocks.count(key, times, |warp| {
            for number in 0..shape.warps {
                for lane in 0..LANES {
                    for (i, r) in (0..shape.row_tiles).flat_map(|i| [(i, 0), (i, 1)]) {
                        let row = shape.row_of(number, lane, [i, r]);
                        if row >= queries {
                            continue;
                        }
                        for n in (0..a.dim / 8).step_by(store.tiles()) {
                            let column = n * 8 + store.column_of(lane, 0);
                            let at = (row * a.out[1] + column) as u64 * HALF;
                            warp.access(of_out, lane, out + at);
                        }
                        if lane % 4 == 0 {
                            warp.access(of_lse, lane, lse + 4 * row as u64);
                        }
                    }
                }
                warp.end();
            }
        })
    }

    fn shape(&self) -> Shape {
        let row_tiles = self.query_tile / self.warps / 16;
        Shape { warps: self.warps, row_tiles, key_tile: self.key_tile }
    }

    /// The keys that some query of the tile sees, the first rounded down to a multiple of a tile.
    fn keys(&self, first_query: usize) -> Range<usize> {
        let Attention { queries, keys, causal, window, query_offset, .. } = *self.a;
        let last_query = (first_query + self.query_tile - 1).min(queries - 1);
        // The key behind those that a query sees, but for how many there are.
        let behind = |query: usize| query as i64 + query_offset + 1;
        let between = |at: i64, most: usize| at.clamp(0, most as i64) as usize;
        let end = if causal { between(behind(last_query), keys) } else { keys };
        let first = behind(first_query) - window as i64;
        let begin = if window > 0 { between(first, end) } else { 0 };
        begin / self.key_tile * self.key_tile..end
    }
}

/// How warps share a tile of scores.
#[derive(Clone, Copy)]
struct Shape {
    warps: usize,
    /// Rows of a warp, in tiles of 16.
    row_tiles: usize,
    key_tile: usize,
}

impl Shape {
    /// Visits the scores of a tile warp by warp: the lane, the row and the column of each.
    fn each_score(self, warp: &mut Warp, mut visit: impl FnMut(&mut Warp, usize, [usize; 2])) {
        for number in 0..self.warps {
            for lane in 0..LANES {
                for score in 0..self.row_tiles * self.key_tile / 2 {
                    let (i, n, e) =
                        (score / (self.key_tile / 2), score / 4 % (self.key_tile / 8), score % 4);
                    let row = self.row_of(number, lane, [i, e / 2]);
                    visit(warp, lane, [row, lane % 4 * 2 + n * 8 + e % 2]);
                }
            }
            warp.end();
        }
    }

    /// The row of the tile of queries of a thread's row `r` of 16 rows `i`.
    fn row_of(self, warp: usize, lane: usize, [i, r]: [usize; 2]) -> usize {
        (warp * self.row_tiles + i) * 16 + lane / 4 + r * 8
    }
}
