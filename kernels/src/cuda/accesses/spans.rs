//! Points of k that blocks of a product go over. Those of the rows of experts are as `dealt` says.

use super::dealt::{RowsOfExpert, rows_of_experts};
use super::{Accesses, LANES};
use crate::cuda::grouped::{Along, Grouped};
use crate::kernel::Product;

/// Points of k that blocks go over, by steps, given the number of their batch.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) batch: usize,
    pub(super) first_k: usize,
    pub(super) steps: usize,
    /// Where k ends.
    pub(super) end: usize,
    /// Blocks that copy the same tile of an operand.
    pub(super) readers: u64,
}

/// The spans of both operands of a product.
pub(super) struct Spans {
    pub(super) of: [Vec<Span>; 2],
    /// Rows of the first operand and of the result that blocks take.
    pub(super) rows: usize,
    /// Batches of the result.
    pub(super) batches: usize,
}

impl Spans {
    /// Those of a product with `k` points, of which a step takes `tile_k`, in slices given as their
    /// first points and steps; of the rows of experts in tiles of as many. Tiles are counted along
    /// m and n.
    pub(super) fn of(
        p: &Product,
        grouped: Option<(Grouped, usize)>,
        ([k, tile_k], slices): ([usize; 2], &[[usize; 2]]),
        [tiles_m, tiles_n]: [usize; 2],
    ) -> Spans {
        let [batches, rows, ..] = p.sizes();
        let readers = [tiles_n, tiles_m].map(|tiles| tiles as u64);
        let Some((grouped, tile)) = grouped else {
            let all = |readers: u64| {
                let of_batch = |batch: usize| {
                    slices.iter().map(move |[first_k, steps]| Span {
                        batch,
                        first_k: *first_k,
                        steps: *steps,
                        end: k,
                        readers,
                    })
                };
                (0..batches).flat_map(of_batch).collect()
            };
            return Spans { of: readers.map(all), rows, batches };
        };
        let experts = rows_of_experts(grouped.pairs, batches, tile);
        match grouped.along {
            Along::Rows { .. } => {
                let steps = k.div_ceil(tile_k);
                let span =
                    |batch: usize, readers: u64| Span { batch, first_k: 0, steps, end: k, readers };
                let of_expert =
                    |(batch, rows): (usize, &RowsOfExpert)| span(batch, rows.tiles as u64);
                let of_b = experts.iter().enumerate().map(of_expert).collect();
                let tiles: usize = experts.iter().map(|rows| rows.tiles).sum();
                let of_a = vec![span(0, readers[0])];
                Spans { of: [of_a, of_b], rows: tiles * tile, batches: 1 }
            }
            Along::Contracted { .. } => {
                let all = |readers: u64| {
                    let of_expert = |(batch, of): (usize, &RowsOfExpert)| Span {
                        batch,
                        first_k: of.first,
                        steps: of.count.div_ceil(tile_k),
                        end: of.first + of.count,
                        readers,
                    };
                    experts.iter().enumerate().map(of_expert).collect()
                };
                Spans { of: readers.map(all), rows, batches }
            }
        }
    }

    /// Steps of all blocks, given the rows of a tile.
    pub(super) fn steps(&self, tile_m: usize) -> u64 {
        let tiles = self.rows.div_ceil(tile_m) as u64;
        self.of[0].iter().map(|span| span.readers * span.steps as u64 * tiles).sum()
    }

    /// Points of k of all blocks.
    pub(super) fn points(&self, tile_m: usize) -> u64 {
        let tiles = self.rows.div_ceil(tile_m) as u64;
        let points = |span: &Span| (span.end - span.first_k) as u64;
        self.of[0].iter().map(|span| span.readers * points(span) * tiles).sum()
    }
}

impl Along {
    /// Numbers that say which rows are an expert's.
    pub(super) fn tables(self) -> u64 {
        match self {
            Along::Rows { .. } => 1,
            Along::Contracted { .. } => 2,
        }
    }
}

/// Loads of what says which rows experts have, given how many warps load each number.
pub(super) fn table_loads(warps: u64) -> Accesses {
    Accesses { sectors: [warps; 2], turns: [0; 2] }
}

/// Warps of some threads.
pub(super) fn warps(threads: u32) -> u64 {
    u64::from(threads) / LANES as u64
}
