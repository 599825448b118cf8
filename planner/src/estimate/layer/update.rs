//! What an update keeps and computes of each matrix, where that is more than bytes for each
//! parameter: sums of rows and columns, and matrices that are made orthogonal.
//!
//! Legend: n and m the sides of a matrix, m the shorter one.

use super::Lowering;
use crate::estimate::price::Moments;
use crate::estimate::profile::Update;
use crate::estimate::rates::Arithmetic;
use crate::estimate::workload::{Cut, Item};

/// Steps of the iteration. Source: Jordan et al. 2024, Muon's default, and Liu et al. 2025.
const NEWTON_SCHULZ_STEPS: f64 = 5.0;
/// Bytes of a number of a state in f32.
const STATE_BYTES: f64 = 4.0;
/// Bytes of a number in the iteration, which runs in bf16.
const ITERATED_BYTES: f64 = 2.0;

/// Matrices of one size.
#[derive(Clone, Copy, Debug)]
struct Matrices {
    sides: [f64; 2],
    count: f64,
    /// Whether they are between embedding and head.
    are_inner: bool,
}

impl Lowering<'_> {
    /// The update of an item on one rank, with `parameters` dense ones and those of experts, where
    /// its moments are not as many for each parameter.
    ///
    /// A rank updates its part of a matrix that tensor-parallel ranks split as a matrix of its own
    /// (`--muon-tp-mode blockwise` of Megatron-Core).
    pub(super) fn moments(&self, item: &Item, parameters: [f64; 2]) -> Moments {
        let update = self.profile.stated.update;
        if update == Update::Elements {
            return Moments::default();
        }
        let mut found = Moments::default();
        if self.weights.frozen.is_some() && parameters == [0.0; 2] {
            return found;
        }
        for (at, matrices) in self.matrices(item).into_iter().enumerate() {
            let mut vectors = parameters[at];
            for Matrices { sides: [rows, columns], count, are_inner } in matrices {
                let elements = rows * columns * count;
                vectors -= elements;
                found.bytes[at] += STATE_BYTES
                    * match (update, are_inner) {
                        (Update::Factored, _) => (rows + columns) * count,
                        (Update::Orthogonal, true) => elements,
                        (Update::Orthogonal | Update::Elements, _) => 2.0 * elements,
                    };
                if update == Update::Orthogonal && are_inner {
                    found.seconds[at] += self.orthogonal_s([rows, columns], count);
                }
            }
            // Vectors have Adam's moments beside muon, and their second one with Adafactor.
            let each = if update == Update::Factored { 1.0 } else { 2.0 };
            found.bytes[at] += STATE_BYTES * each * vectors.max(0.0);
        }
        found
    }

    /// Bytes of the moments of the last product of an end.
    pub(in crate::estimate) fn head_moments(&self, items: &[Item]) -> f64 {
        let product = items.iter().rfind(|item| matches!(item, Item::Product { .. }));
        product.map_or(0.0, |head| self.item_updated(head).moments.bytes[0])
    }

    /// The weights of an item that are matrices: dense ones, and those of experts.
    fn matrices(&self, item: &Item) -> [Vec<Matrices>; 2] {
        let inner = |sides, count| Matrices { sides, count, are_inner: true };
        let end = |sides| vec![Matrices { sides, count: 1.0, are_inner: false }];
        match *item {
            Item::Product { k, n, cut, .. } => {
                let (k, n) = (f64::from(k), f64::from(n));
                let dense = match cut {
                    Cut::Words => end([k, self.words(n)]),
                    Cut::Columns => vec![inner([k, (n / self.tp()).ceil()], 1.0)],
                    Cut::Rows => vec![inner([(k / self.tp()).ceil(), n], 1.0)],
                    Cut::Whole => vec![inner([k, n], 1.0)],
                };
                [dense, Vec::new()]
            }
            Item::Experts { count, width, ffn, gated, .. } => {
                let local = (f64::from(count) / f64::from(self.inside.ep)).ceil();
                let (h, f) = (f64::from(width), f64::from(ffn));
                let up = if gated { 2.0 * local } else { local };
                let experts = vec![inner([h, f], up), inner([f, h], local)];
                [vec![inner([h, f64::from(count)], 1.0)], experts]
            }
            Item::Embedding { vocab, width, positions } => {
                let width = f64::from(width);
                let mut tables = end([self.words(f64::from(vocab)), width]);
                if positions > 0 {
                    tables.extend(end([f64::from(positions), width]));
                }
                [tables, Vec::new()]
            }
            Item::Contraction { k, n, batch, own: true, .. } => {
                let dense = vec![inner([k as f64, n as f64], batch as f64)];
                [dense, Vec::new()]
            }
            Item::Adapter { k, n, rank, parts, cut } => {
                let [k, n, rank, parts] = [k, n, rank, parts].map(f64::from);
                let [k, n] = match cut {
                    Cut::Columns | Cut::Words => [k, (n / self.tp()).ceil()],
                    Cut::Rows => [(k / self.tp()).ceil(), n],
                    Cut::Whole => [k, n],
                };
                let up = inner([rank, n / parts], parts);
                [vec![inner([k, rank], parts), up], Vec::new()]
            }
            Item::Contraction { .. }
            | Item::Norm { .. }
            | Item::Attention { .. }
            | Item::Rope { .. }
            | Item::Activation { .. }
            | Item::Residual { .. }
            | Item::Loss { .. }
            | Item::Rows { .. }
            | Item::Mixing { .. }
            | Item::Exchange { .. } => [Vec::new(), Vec::new()],
        }
    }

    /// Seconds in which matrices are made orthogonal: a step is `A = X Xᵀ`, `B = b A + c A²`,
    /// `X = a X + B X`, which is `4 m² n + 2 m³` operations (Jordan et al. 2024).
    fn orthogonal_s(&self, [rows, columns]: [f64; 2], count: f64) -> f64 {
        let (m, n) = (rows.min(columns), rows.max(columns));
        let time = |sizes: [f64; 3]| {
            let [m, n, k] = sizes;
            self.rates.product_s(Arithmetic::Half, [m, n, k, count])
        };
        let products = time([m, m, n]) + time([m, m, m]) + time([m, n, m]);
        // Both sums read two matrices and write one.
        let sums = self.rates.rows_s(3.0 * ITERATED_BYTES * count * (m * m + m * n));
        NEWTON_SCHULZ_STEPS * (products + sums)
    }
}
