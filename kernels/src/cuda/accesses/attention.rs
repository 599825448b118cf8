//! Accesses of attention on CUDA cores, and of what its gradient on tensor cores computes before.
//!
//! The lanes of a warp meet after each step of 32 keys or queries: steps that lie alike are counted
//! once. No row of `lse` is taken to be minus infinity but where a query sees no key, and all
//! tokens of a sample are taken to be of one document.

use std::ops::Range;

use ir::DType;

use super::{Accesses, Blocks, LANES, SECTOR, Site, Sites, Warp};
use crate::cuda::attention::{AttentionTile, Part, THREADS, WARPS, bias_elements, bias_sizes};
use crate::kernel::Attention;
use crate::offset::Offset;

/// Whether shapes alone decide what is accessed: not scalars of the launch or positions. Where no
/// query sees a key, a compiler may leave out what draws and documents are read for.
pub(super) fn is_known(a: &Attention) -> bool {
    let has_more = a.dropout.is_some() || a.documents.is_some();
    let is_fixed = matches!(a.head_offset, Offset::Fixed(_)) && !a.position;
    is_fixed && !(has_more && sees_nothing(a))
}

/// Whether no query sees a key.
fn sees_nothing(a: &Attention) -> bool {
    (0..a.queries).all(|s| a.visible(s).is_empty())
}

/// Loads of the key of dropout, four words by each of some warps at their start.
pub(super) fn key_loads(a: &Attention, warps: u64) -> Accesses {
    let words = if a.dropout.is_some() { 4 * warps } else { 0 };
    Accesses { sectors: [words; 2], turns: [0; 2] }
}

/// Whether a query sees a key, if both are of one document.
pub(super) fn is_seen(a: &Attention, [s, j]: [usize; 2]) -> bool {
    let (own, j) = (s as i64 + a.query_offset, j as i64);
    let is_before = !a.causal || j <= own;
    let is_in_window = a.window == 0 || j > own - a.window as i64;
    j < a.keys as i64 && is_before && is_in_window
}

/// What decides which pairs of a query and a key are seen beside how many there are of both: none
/// where all are.
pub(super) fn distance(a: &Attention, [s, j]: [usize; 2]) -> Option<u64> {
    let is_masked = a.causal || a.window > 0;
    is_masked.then_some((s as i64 + a.query_offset - j as i64).cast_unsigned())
}

/// Where buffers lie, in bytes.
#[derive(Clone, Copy)]
struct Layout<'a> {
    a: &'a Attention,
    part: Part,
    /// Of an element, and of a number that is computed.
    bytes: usize,
    computed: usize,
}

/// The loads of a query and a key.
struct PairSites {
    documents: [Site; 2],
    score: [Site; 2],
    bias: Site,
    slope: [Site; 2],
}

impl PairSites {
    fn of(bytes: usize, sites: &mut Sites) -> PairSites {
        let mut two = |bytes: usize| [0; 2].map(|_| sites.device(bytes));
        let (documents, score, slope) = (two(4), two(bytes), two(bytes));
        PairSites { documents, score, slope, bias: sites.device(bytes) }
    }
}

impl Layout<'_> {
    /// A row of a tensor, given the sample, the query or key, and the head.
    fn row(&self, [of_b, of_s, of_h]: [usize; 3], [b, s, h]: [usize; 3]) -> u64 {
        ((b * of_b + s * of_s + h * of_h) * self.bytes) as u64
    }

    /// The number of a query in `lse` or `delta`.
    fn query(&self, [b, h, s]: [usize; 3]) -> u64 {
        (((b * self.a.heads + h) * self.a.queries + s) * self.computed) as u64
    }

    /// The rows of Q, K, dO and V, the bias, and the documents of the query and of the key, of a
    /// sample, head, query and key.
    fn pair(&self, [b, h, s, j]: [usize; 4]) -> [u64; 7] {
        let (a, g) = (self.a, self.a.kv_head(h));
        let bias = self.row(a.bias.map_or([0; 3], |[b, h, s]| [b, s, h]), [b, s, h]);
        let [q, dout] = [a.q, a.out].map(|strides| self.row(strides, [b, s, h]));
        let [k, v] = [a.k, a.v].map(|strides| self.row(strides, [b, j, g]));
        let document = |token: usize| a.documents.map_or(0, |_| 4 * (b * a.keys + token) as u64);
        let [own, other] = [s + a.documents.unwrap_or(0), j].map(document);
        [q, k, dout, v, bias + (j * self.bytes) as u64, own, other]
    }

    /// Lists a row, of which lanes have elements in turn.
    fn list_row(&self, warp: &mut Warp, site: Site, at: u64) {
        for lane in 0..LANES {
            for d in (lane..self.a.dim).step_by(LANES) {
                warp.access(site, lane, at + (d * self.bytes) as u64);
            }
        }
    }

    /// Lists what a lane loads of a query and a key: for their score, and in a gradient its slope.
    fn list_pair(&self, warp: &mut Warp, sites: &PairSites, lane: usize, pair: [usize; 4]) {
        let [q, k, dout, v, bias, own, other] = self.pair(pair);
        if self.a.documents.is_some() {
            let documents = sites.documents.into_iter().zip([own, other]);
            documents.for_each(|(site, at)| warp.access(site, lane, at));
        }
        let mut dot = |sites: [Site; 2], rows: [u64; 2]| {
            for (site, row) in sites.into_iter().zip(rows) {
                for d in 0..self.a.dim {
                    warp.access(site, lane, row + (d * self.bytes) as u64);
                }
            }
        };
        dot(sites.score, [q, k]);
        if self.part != Part::Forward {
            dot(sites.slope, [dout, v]);
        }
        if self.a.bias.is_some() {
            warp.access(sites.bias, lane, bias);
        }
    }

    /// Lists a query's step over some keys.
    fn list_keys(&self, warp: &mut Warp, [b, h, s]: [usize; 3], keys: Range<usize>) {
        let (a, g, mut sites) = (self.a, self.a.kv_head(h), Sites::default());
        let pair = PairSites::of(self.bytes, &mut sites);
        let [store, load] = [0; 2].map(|_| sites.shared(self.computed));
        let row = sites.device(self.bytes);
        for lane in 0..LANES {
            if lane < keys.len() {
                self.list_pair(warp, &pair, lane, [b, h, s, keys.start + lane]);
            }
            warp.access(store, lane, (lane * self.computed) as u64);
        }
        let strides = if self.part == Part::Forward { a.v } else { a.k };
        for (t, j) in keys.enumerate() {
            (0..LANES).for_each(|lane| warp.access(load, lane, (t * self.computed) as u64));
            self.list_row(warp, row, self.row(strides, [b, j, g]));
        }
        warp.end();
    }

    /// Lists what a query takes before and behind its steps.
    fn list_query(&self, warp: &mut Warp, [b, h, s]: [usize; 3]) {
        let (a, mut sites) = (self.a, Sites::default());
        let [out, dout, to] = [0; 3].map(|_| sites.device(self.bytes));
        let [lse, delta] = [0; 2].map(|_| sites.device(self.computed));
        let counter = sites.device(4);
        let [of_query, of_out] = [a.q, a.out].map(|strides| self.row(strides, [b, s, h]));
        let number = self.query([b, h, s]);
        if self.part != Part::Forward {
            self.list_row(warp, out, of_out);
            self.list_row(warp, dout, of_out);
            warp.access(delta, 0, number);
        }
        match self.part {
            Part::Forward => {
                self.list_row(warp, to, of_out);
                warp.access(lse, 0, number);
            }
            Part::Delta { tile, counters } => {
                // Counters of a tile of queries lie in one sector.
                let lanes = if s.is_multiple_of(tile) { counters } else { 0 };
                (0..lanes).for_each(|lane| warp.access(counter, lane, 4 * lane as u64));
            }
            Part::Queries | Part::Keys | Part::Bias => {
                (0..LANES).for_each(|lane| warp.access(lse, lane, number));
                self.list_row(warp, to, of_query);
            }
        }
        warp.end();
    }

    /// Lists a key's step over some queries.
    fn list_queries(&self, warp: &mut Warp, [b, h, j]: [usize; 3], queries: Range<usize>) {
        let (a, mut sites) = (self.a, Sites::default());
        let pair = PairSites::of(self.bytes, &mut sites);
        let [lse, delta] = [0; 2].map(|_| sites.device(self.computed));
        // Of slopes, then of weights.
        let shared = [0; 4].map(|_| sites.shared(self.computed));
        let rows = [0; 2].map(|_| sites.device(self.bytes));
        for lane in 0..LANES {
            let s = queries.start + lane;
            if lane < queries.len() {
                warp.access(lse, lane, self.query([b, h, s]));
                if a.visible(s).contains(&j) {
                    warp.access(delta, lane, self.query([b, h, s]));
                    self.list_pair(warp, &pair, lane, [b, h, s, j]);
                }
            }
            for store in &shared[..2] {
                warp.access(*store, lane, (lane * self.computed) as u64);
            }
        }
        for (t, s) in queries.enumerate() {
            for load in &shared[2..] {
                (0..LANES).for_each(|lane| warp.access(*load, lane, (t * self.computed) as u64));
            }
            for (site, strides) in rows.into_iter().zip([a.q, a.out]) {
                self.list_row(warp, site, self.row(strides, [b, s, h]));
            }
        }
        warp.end();
    }

    /// Lists the elements of the bias of a warp, from one on.
    fn list_bias(&self, warp: &mut Warp, first: usize) {
        let (a, own, mut sites) = (self.a, bias_sizes(self.a), Sites::default());
        let pair = PairSites::of(self.bytes, &mut sites);
        let [lse, delta] = [0; 2].map(|_| sites.device(self.computed));
        let to = sites.device(self.bytes);
        for item in first..(first + LANES).min(bias_elements(a)) {
            let (lane, j) = (item - first, item % a.keys);
            let at = [
                item / (a.keys * own[2] * own[1]),
                item / (a.keys * own[2]) % own[1],
                item / a.keys % own[2],
            ];
            let sizes = [a.batch, a.heads, a.queries];
            let [of_b, of_h, of_s] = std::array::from_fn(|dim| match own[dim] {
                1 => 0..sizes[dim],
                _ => at[dim]..at[dim] + 1,
            });
            for (b, h) in of_b.flat_map(|b| of_h.clone().map(move |h| (b, h))) {
                for s in of_s.clone() {
                    warp.access(lse, lane, self.query([b, h, s]));
                    if a.visible(s).contains(&j) {
                        warp.access(delta, lane, self.query([b, h, s]));
                        self.list_pair(warp, &pair, lane, [b, h, s, j]);
                    }
                }
            }
            warp.access(to, lane, self.pair([at[0], at[1], at[2], j])[4]);
        }
        warp.end();
    }

    /// Counts the queries of all warps.
    fn count_queries(&self, blocks: &mut Blocks) -> Option<()> {
        let a = self.a;
        for item in 0..a.batch * a.heads * a.queries {
            let (b, h, s) =
                (item / (a.heads * a.queries), item / a.queries % a.heads, item % a.queries);
            let [q, _, out, ..] = self.pair([b, h, s, 0]);
            let is_first = matches!(self.part, Part::Delta { tile, .. } if s.is_multiple_of(tile));
            let key = vec![0, q % SECTOR, out % SECTOR, u64::from(is_first)];
            blocks.count(key, 1, |warp| self.list_query(warp, [b, h, s]))?;
            if matches!(self.part, Part::Delta { .. }) {
                continue;
            }
            let keys = a.visible(s);
            for first in keys.clone().step_by(LANES) {
                let keys = first..keys.end.min(first + LANES);
                let mut key = vec![1, keys.len() as u64];
                key.extend(self.pair([b, h, s, first]).map(|at| at % SECTOR));
                blocks.count(key, 1, |warp| self.list_keys(warp, [b, h, s], keys))?;
            }
        }
        Some(())
    }

    /// Counts the keys of all warps.
    fn count_keys(&self, blocks: &mut Blocks) -> Option<()> {
        let a = self.a;
        for item in 0..a.batch * a.kv_heads * a.keys {
            let (b, g, j) =
                (item / (a.kv_heads * a.keys), item / a.keys % a.kv_heads, item % a.keys);
            for h in (0..a.heads).filter(|h| a.kv_head(*h) == g) {
                for first in (0..a.queries).step_by(LANES) {
                    let queries = first..a.queries.min(first + LANES);
                    let seen = queries.clone().map(|s| u64::from(a.visible(s).contains(&j)));
                    let seen = seen.fold(0, |all, seen| 2 * all + seen);
                    let mut key = vec![0, queries.len() as u64, seen];
                    key.push(self.query([b, h, first]) % SECTOR);
                    key.extend(self.pair([b, h, first, j]).map(|at| at % SECTOR));
                    blocks.count(key, 1, |warp| self.list_queries(warp, [b, h, j], queries))?;
                }
            }
            let gradients = [a.k, a.v].map(|strides| self.row(strides, [b, j, g]));
            let key = [1].into_iter().chain(gradients.map(|at| at % SECTOR)).collect();
            let mut sites = Sites::default();
            let sites = [0; 2].map(|_| sites.device(self.bytes));
            blocks.count(key, 1, |warp| {
                let rows = sites.into_iter().zip(gradients);
                rows.for_each(|(site, at)| self.list_row(warp, site, at));
                warp.end();
            })?;
        }
        Some(())
    }
}

/// Whether a compiler may leave out loads of `lse` in a gradient: where no query sees a key, whose
/// loads nothing uses, and beside the functions of F64.
fn may_be_left_out(a: &Attention) -> bool {
    a.dtype == DType::F64 || sees_nothing(a)
}

/// Accesses of a part of attention; none where a position or a scalar of the launch decides, or
/// where a compiler may leave out loads.
pub(super) fn attention(tile: &AttentionTile, grid: u64) -> Option<Accesses> {
    let a = &tile.attention;
    if !is_known(a) || tile.part != Part::Forward && may_be_left_out(a) {
        return None;
    }
    let (bytes, computed) = (a.dtype.size() as usize, a.dtype.accumulation().size() as usize);
    let layout = Layout { a, part: tile.part, bytes, computed };
    let mut blocks = Blocks::new();
    match tile.part {
        Part::Forward | Part::Delta { .. } | Part::Queries => layout.count_queries(&mut blocks)?,
        Part::Keys => layout.count_keys(&mut blocks)?,
        Part::Bias => {
            for first in (0..grid as usize * THREADS as usize).step_by(LANES) {
                blocks.count(vec![first as u64], 1, |warp| layout.list_bias(warp, first))?;
            }
        }
    }
    // Nothing is drawn in dot products.
    let warps = if matches!(tile.part, Part::Delta { .. }) { 0 } else { grid * u64::from(WARPS) };
    Some(blocks.count.plus(1, key_loads(a, warps)))
}
