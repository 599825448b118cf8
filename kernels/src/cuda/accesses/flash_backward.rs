//! Accesses of the gradient of attention on tensor cores: what those by `mma.sync` and by `wgmma`
//! have in common, and what threads of the former access.
//!
//! Threads of a block meet in each step, and steps that lie alike are counted once. A counter is
//! read once by a block that waits for its turn, as if that had come.

use std::collections::BTreeMap;
use std::ops::Range;

use super::attention::{distance, is_known, is_seen, key_loads};
use super::flash::{Copied, HALF, Head, Rows};
use super::tensor::fragment_turns;
use super::{Accesses, Blocks, LANES, SECTOR, Site, Sites, Warp};
use crate::cuda::flash::{THREADS, VECTOR, WARPS};
use crate::cuda::flash_backward::{FlashBackward, ROWS, SUMS};
use crate::cuda::quads::QuadStore;
use crate::cuda::shared::Operand;
use crate::cuda::turns::Turns;
use crate::kernel::Attention;

/// The query heads of each head of keys, and how many of the latter lie alike.
fn groups_of_heads(a: &Attention) -> BTreeMap<Vec<Head>, u64> {
    let mut all = BTreeMap::new();
    for b in 0..a.batch {
        for g in 0..a.kv_heads {
            let own = (0..a.heads).filter(|h| a.kv_head(*h) == g);
            let heads: Vec<Head> = own.map(|h| Head::of(a, [b, h, g])).collect();
            *all.entry(heads).or_default() += 1;
        }
    }
    all
}

impl Turns<'_> {
    /// The tiles of queries of a tile of keys.
    pub(super) fn tiles(self, own: usize) -> Range<usize> {
        let Attention { causal, window, query_offset, .. } = *self.attention;
        let queries = self.query_tiles() * self.queries;
        let first = (own * self.keys) as i64 - query_offset;
        let tile = |at: i64| at.clamp(0, queries as i64) as usize / self.queries;
        let begin = if causal && own > 0 { tile(first) } else { 0 };
        let behind = first + (window + self.keys + self.queries) as i64 - 2;
        let is_last = own + 1 == self.key_tiles();
        begin..if window == 0 || is_last { self.query_tiles() } else { tile(behind) }
    }

    /// Which turn a tile of keys has of a tile of queries, and whether it is the last one.
    pub(super) fn turn(self, own: usize, tile: usize) -> (usize, bool) {
        let Attention { causal, window, query_offset, .. } = *self.attention;
        let last = (self.key_tiles() * self.keys) as i64 - 1;
        let first_query = (tile * self.queries) as i64 + query_offset;
        let key_tile = |at: i64| at.clamp(0, last) as usize / self.keys;
        let last_own = match causal {
            true => key_tile(first_query + self.queries as i64 - 1),
            false => self.key_tiles() - 1,
        };
        let first_own = if window == 0 { 0 } else { key_tile(first_query + 1 - window as i64) };
        (last_own - own, own == first_own)
    }
}

/// Accesses of all blocks; none where a scalar of the launch decides.
pub(super) fn flash_backward(tile: &FlashBackward) -> Option<Accesses> {
    let of = Backward {
        a: &tile.attention,
        turns: tile.turns(),
        warps: WARPS,
        copied: Copied::ByThreads,
        list: &|step, warp| list_step(tile, step, warp),
    };
    let (count, steps) = of.all()?;
    let count = count.plus(1, key_loads(&tile.attention, tile.blocks() * WARPS as u64));
    let fragments = (0..WARPS).map(|warp| tile.fragments(warp));
    let turns = fragments.fold([0; 2], |sum, turns| [sum[0] + turns[0], sum[1] + turns[1]]);
    Some(count.plus(steps, Accesses { sectors: [0; 2], turns }))
}

impl FlashBackward {
    /// The first group of columns of dQ that a warp has, and how many.
    fn first_group(&self, warp: usize) -> usize {
        warp / self.row_warps() * self.groups()
    }

    fn groups_of(&self, warp: usize) -> usize {
        let all = self.attention.dim / 16;
        self.groups().min(all.saturating_sub(self.first_group(warp)))
    }

    /// Turns of the loads of a warp's fragments of a step.
    fn fragments(&self, warp: usize) -> [u64; 2] {
        let (dim, step) = (self.attention.dim, self.step);
        let own = [self.first_group(warp) * 16, self.groups_of(warp) * 16];
        let ([block, queries, slopes], side) = (
            [self.block_tile(), self.step_tile(), self.slopes_tile()],
            warp % self.row_warps() * 16,
        );
        // Of S and of dP, of dK and of dV, and of the part of dQ.
        let rows = fragment_turns(block, (Operand::A, true), [warp * 16, 16], dim);
        let columns = fragment_turns(queries, (Operand::B, true), [0, step], dim);
        let gradient = fragment_turns(queries, (Operand::B, false), [0, dim], step);
        let of_slopes = fragment_turns(slopes, (Operand::A, false), [side, 16], ROWS);
        let keys = fragment_turns(block, (Operand::B, false), own, ROWS);
        let twice = [rows, columns, gradient].into_iter().flat_map(|turns| [turns; 2]);
        let all = twice.chain([of_slopes, keys]);
        all.fold([0; 2], |sum, turns| [sum[0] + turns[0], sum[1] + turns[1]])
    }
}

/// A step of a block.
pub(super) struct Step {
    /// Where the tile of queries starts: in Q, in `lse`, and in the bias.
    pub(super) q: u64,
    pub(super) lse: u64,
    pub(super) bias: u64,
    /// Where the documents of its queries and of the block's keys start.
    pub(super) documents: [u64; 2],
    /// The first query and the first key.
    pub(super) first: [usize; 2],
    /// Queries and keys that are there.
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Whether the block is the first to add to the tile's sums, and the last one.
    pub(super) is_first: bool,
    pub(super) is_last: bool,
}

impl Step {
    fn key(&self, a: &Attention) -> Vec<u64> {
        let Step { q, lse, bias, documents, first, queries, keys, is_first, is_last } = *self;
        let turn = u64::from(is_first) + 2 * u64::from(is_last);
        let mut key = vec![1, q, lse, bias, queries as u64, keys as u64, turn];
        if a.documents.is_some() {
            key.extend(documents);
            key.extend(distance(a, first));
        }
        key
    }

    /// Lists a lane's loads of the documents of a query and a key, counted from the first ones,
    /// which the query sees where both are of one document.
    pub(super) fn list_documents(
        &self,
        a: &Attention,
        [s, j]: [usize; 2],
        sites: [Site; 2],
        (warp, lane): (&mut Warp, usize),
    ) {
        let is_read = a.documents.is_some() && s < self.queries;
        if is_read && is_seen(a, [self.first[0] + s, self.first[1] + j]) {
            for (site, from, at) in
                [(sites[0], self.documents[0], s), (sites[1], self.documents[1], j)]
            {
                warp.access(site, lane, from + 4 * at as u64);
            }
        }
    }
}

/// A gradient, as its blocks are counted.
pub(super) struct Backward<'a> {
    pub(super) a: &'a Attention,
    pub(super) turns: Turns<'a>,
    /// Warps that have 16 keys each.
    pub(super) warps: usize,
    pub(super) copied: Copied,
    /// Lists what threads access in a step but for copies of rows.
    pub(super) list: &'a dyn Fn(&Step, &mut Warp),
}

impl Backward<'_> {
    /// Counts all blocks, and their steps.
    pub(super) fn all(&self) -> Option<(Accesses, u64)> {
        if !is_known(self.a) {
            return None;
        }
        let (mut blocks, mut steps) = (Blocks::new(), 0);
        for (heads, times) in groups_of_heads(self.a) {
            for own in 0..self.turns.key_tiles() {
                steps += times * self.block(&heads, own, (&mut blocks, times))?;
            }
        }
        Some((blocks.count, steps))
    }

    /// Counts a block of as many heads of keys. Returns its steps.
    fn block(
        &self,
        heads: &[Head],
        own: usize,
        (blocks, times): (&mut Blocks, u64),
    ) -> Option<u64> {
        let (a, turns, first_row) = (self.a, self.turns, own * self.turns.keys);
        let keys = (a.keys - first_row).min(turns.keys);
        let mut steps = 0;
        for (head, number) in heads.iter().flat_map(|of| turns.tiles(own).map(move |at| (of, at))) {
            let first = number * turns.queries;
            let queries = (a.queries - first).min(turns.queries);
            let at = |start: u64, stride: usize| start + (first * stride) as u64 * HALF;
            for (start, stride) in [(head.q, a.q[1]), (head.out, a.out[1])] {
                let rows = Rows { from: at(start, stride), stride, there: queries };
                rows.count(self.copied, [turns.queries, a.dim], (blocks, times))?;
            }
            let (turn, is_last) = turns.turn(own, number);
            let of_bias = a.bias.map_or(0, |[.., of_s]| of_s);
            let step = Step {
                q: at(head.q, a.q[1]) % SECTOR,
                lse: (head.lse + 4 * first as u64) % SECTOR,
                bias: (at(head.bias, of_bias) + first_row as u64 * HALF) % SECTOR,
                documents: [first + a.documents.unwrap_or(0), first_row]
                    .map(|token| (head.documents + 4 * token as u64) % SECTOR),
                first: [first, first_row],
                queries,
                keys,
                is_first: turn == 0,
                is_last,
            };
            steps += 1;
            blocks.count(step.key(a), times, |warp| (self.list)(&step, warp))?;
        }
        // Some query head reads each head of keys.
        let head = heads.first()?;
        let at = |start: u64, stride: usize| start + (first_row * stride) as u64 * HALF;
        let both = [(at(head.k, a.k[1]), a.k[1]), (at(head.v, a.v[1]), a.v[1])];
        for (from, stride) in both {
            let rows = Rows { from, stride, there: keys };
            if steps > 0 || self.copied == Copied::ByThreads {
                rows.count(self.copied, [turns.keys, a.dim], (blocks, times))?;
            }
        }
        self.gradients(both, keys, (blocks, times))?;
        Some(steps)
    }

    /// Counts the stores of the gradients of keys and values.
    fn gradients(
        &self,
        both: [(u64, usize); 2],
        keys: usize,
        (blocks, times): (&mut Blocks, u64),
    ) -> Option<()> {
        let a = self.a;
        let store = QuadStore::of(a.dtype, a.dim / 8, VECTOR);
        let key = [2, keys as u64].into_iter().chain(both.map(|(at, _)| at % SECTOR)).collect();
        let mut sites = Sites::default();
        let sites = [0; 2].map(|_| sites.device(store.width * HALF as usize));
        blocks.count(key, times, |warp| {
            for number in 0..self.warps {
                for lane in 0..LANES {
                    for row in [0, 8].map(|r| number * 16 + lane / 4 + r) {
                        for n in (0..a.dim / 8).step_by(store.tiles()) {
                            for (site, (from, stride)) in sites.into_iter().zip(both) {
                                let column = n * 8 + store.column_of(lane, 0);
                                let at = from + (row * stride + column) as u64 * HALF;
                                warp.pass(site, lane, (row < keys).then_some(at));
                            }
                        }
                    }
                }
                warp.end();
            }
        })
    }
}

/// Lists what threads access but for copies.
fn list_step(tile: &FlashBackward, step: &Step, warp: &mut Warp) {
    let mut sites = Sites::default();
    let values = [0; 2].map(|_| sites.device(4));
    let bias = sites.device(HALF as usize);
    let documents = [0; 2].map(|_| sites.device(4));
    let sums = [0; 2].map(|_| sites.device(SUMS * 4));
    let counter = [0; 2].map(|_| sites.device(4));
    let groups = if tile.is_even() { tile.groups() } else { 1 };
    let store = QuadStore::of(tile.attention.dtype, 2 * groups, VECTOR);
    let to = sites.device(store.width * HALF as usize);
    for number in 0..WARPS {
        for lane in 0..LANES {
            for score in 0..tile.step / 2 {
                let (n, e) = (score / 4, score % 4);
                let s = n * 8 + lane % 4 * 2 + e % 2;
                let j = number * 16 + lane / 4 + e / 2 * 8;
                if s >= step.queries {
                    continue;
                }
                for site in values {
                    warp.access(site, lane, step.lse + 4 * s as u64);
                }
                if let Some([.., stride]) = tile.attention.bias
                    && j < step.keys
                {
                    warp.access(bias, lane, step.bias + (s * stride + j) as u64 * HALF);
                }
                step.list_documents(&tile.attention, [s, j], documents, (&mut *warp, lane));
            }
            let thread = number * LANES + lane;
            for vector in 0..2 * tile.groups_of(number) {
                let at = ((vector * THREADS + thread) * SUMS * 4) as u64;
                let [load, store] = sums;
                if !step.is_first {
                    warp.access(load, lane, at);
                }
                if !step.is_last {
                    warp.access(store, lane, at);
                }
            }
            if thread == 0 {
                let passed = if step.is_last { &counter[..1] } else { &counter[..] };
                passed.iter().for_each(|site| warp.access(*site, lane, 0));
            }
        }
        if step.is_last {
            (0..LANES).for_each(|lane| list_queries(tile, step, (store, to), number, (warp, lane)));
        }
        warp.end();
    }
}

/// Lists a lane's stores of the gradient of queries.
fn list_queries(
    tile: &FlashBackward,
    step: &Step,
    (store, to): (QuadStore, Site),
    number: usize,
    (warp, lane): (&mut Warp, usize),
) {
    let first_group = tile.first_group(number);
    for row in [0, 8].map(|r| number % tile.row_warps() * 16 + lane / 4 + r) {
        for c in (0..tile.groups_of(number)).step_by(store.tiles().div_ceil(2)) {
            let column = (first_group + c) * 16 + store.column_of(lane, 0);
            if row < step.queries {
                let at = (row * tile.attention.q[1] + column) as u64 * HALF;
                warp.access(to, lane, step.q + at);
            }
        }
    }
}
