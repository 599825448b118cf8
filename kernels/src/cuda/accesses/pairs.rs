//! Accesses of what becomes of two products of the rows of experts, `g` and `u`.

use std::ops::Range;

use super::{Site, Sites, Warp};
use crate::cuda::grouped::Pair;
use crate::cuda::quads::QuadStore;
use crate::kernel::Product;

/// What is loaded and stored of the rows of a product.
pub(super) struct PairResults {
    store: QuadStore,
    /// Columns of the result.
    columns: usize,
    /// Parts of the gradient of the gate of a row.
    parts: usize,
    /// Bytes of a gate, of an element of `dy w_down`, and of a part of the gradient of a gate.
    bytes: u64,
    is_gradient: bool,
    gate: Site,
    outer: Site,
    /// Of each result, of vectors or of both elements of a pair.
    results: Vec<[Site; 2]>,
    part: Site,
}

/// A row of a lane.
pub(super) struct PairRow {
    pub(super) m: usize,
    /// Columns of the warp.
    pub(super) columns: Range<usize>,
    /// The number of the part of the gradient of the row's gate.
    pub(super) part: usize,
}

impl PairResults {
    pub(super) fn of(p: &Product, pair: Pair, store: QuadStore, parts: usize) -> PairResults {
        let (mut sites, [_, _, columns, _]) = (Sites::default(), p.sizes());
        let bytes = p.stored.a.accumulation().size();
        let [gate, outer, part] = [0; 3].map(|_| sites.device(bytes as usize));
        let vector = store.width * store.dtype.size() as usize;
        let results = pair.results().iter().map(|_| [0; 2].map(|_| sites.device(vector))).collect();
        let is_gradient = pair.gradient.is_some();
        PairResults { store, columns, parts, bytes, is_gradient, gate, outer, results, part }
    }

    /// Lists what a lane loads and stores of a row of accumulators of tensor cores.
    pub(super) fn list_row(&self, row: &PairRow, (warp, lane): (&mut Warp, usize)) {
        let tiles = self.store.tiles();
        warp.access(self.gate, lane, row.m as u64 * self.bytes);
        for first in row.columns.clone().step_by(8 * tiles) {
            for (t, e) in (0..tiles).flat_map(|t| [(t, 0), (t, 1)]) {
                self.list_outer(row.m, first + t * 8 + lane % 4 * 2 + e, (&mut *warp, lane));
            }
            let n = first + self.store.column_of(lane, 0);
            for sites in &self.results {
                // Of single elements both have a store of their own.
                let count = if self.store.width == 1 { 2 } else { 1 };
                for (e, site) in sites.iter().enumerate().take(count) {
                    self.list_result(*site, row.m, n + e, (&mut *warp, lane));
                }
            }
        }
        self.list_part(row, 4, (warp, lane));
    }

    fn list_outer(&self, m: usize, n: usize, (warp, lane): (&mut Warp, usize)) {
        if self.is_gradient && n < self.columns {
            warp.access(self.outer, lane, (m * self.columns + n) as u64 * self.bytes);
        }
    }

    fn list_result(&self, site: Site, m: usize, n: usize, (warp, lane): (&mut Warp, usize)) {
        if n < self.columns {
            warp.access(site, lane, (m * self.columns + n) as u64 * self.store.dtype.size());
        }
    }

    fn list_part(&self, row: &PairRow, lanes: usize, (warp, lane): (&mut Warp, usize)) {
        if self.is_gradient && lane.is_multiple_of(lanes) {
            warp.access(self.part, lane, (row.m * self.parts + row.part) as u64 * self.bytes);
        }
    }
}
