//! The gradient of attention, which computes the scores again from `q`, `k` and `lse`.
//!
//! With `P = exp(scale · q kᵀ - lse)`, dropout factors `Z` and `D = rowsum(dout ∘ out)`:
//! `dv = (P ∘ Z)ᵀ dout`, `dS = P ∘ (Z ∘ (dout vᵀ) - D) · scale`, `dq = dS k` and
//! `dk = dSᵀ q`.
//!
//! A task is a key-value head of a sample, with all query heads that read it: it alone writes
//! these rows of `dk` and `dv`, tile by tile in ascending order of head, query and key.

use super::Cpu;
use super::attention::{
    KEY_TILE, Mask, Matrix, Multiplier, QUERY_TILE, Tensor, input, load_up_to, multiplier_bytes,
    output, store_up_to, stream,
};
use super::scratch::{Bump, lines_of};
use super::vector::{Job, Scalar, Vector};
use super::view::{Shared, View, ViewMut};
use crate::kernel::{Attention, Dropout};

/// Bytes of scratch per thread.
pub(super) fn scratch<S>(a: &Attention) -> usize {
    2 * lines_of::<S>(QUERY_TILE * KEY_TILE)
        + lines_of::<S>(a.queries)
        + lines_of::<S>(KEY_TILE)
        + multiplier_bytes::<S>(a)
}

/// The tensors of a launch.
struct Tensors<S> {
    q: Tensor<S>,
    k: Tensor<S>,
    v: Tensor<S>,
    out: Tensor<S>,
    dout: Tensor<S>,
    dq: Tensor<S>,
    dk: Tensor<S>,
    dv: Tensor<S>,
    lse: Shared<S>,
}

/// Runs the gradient of attention.
pub(super) fn execute<S: Scalar>(cpu: &Cpu, a: &Attention, inputs: &[View], outputs: &[ViewMut]) {
    let tensors = Tensors {
        q: input(&inputs[0], a.q),
        k: input(&inputs[1], a.k),
        v: input(&inputs[2], a.v),
        out: input(&inputs[3], a.out),
        lse: Shared::new(inputs[4].start::<S>().cast_mut()),
        dout: input(&inputs[5], a.out),
        dq: output(&outputs[0], a.q),
        dk: output(&outputs[1], a.k),
        dv: output(&outputs[2], a.v),
    };
    let dropout = stream(a, inputs.get(6));
    let cycles = (a.batch * a.heads * a.queries * a.keys * a.dim) as u64 / 8;
    cpu.for_each(a.batch * a.kv_heads, cycles, scratch::<S>(a), |task, scratch| {
        cpu.isa.run(Backward {
            attention: a,
            tensors: &tensors,
            dropout: &dropout,
            batch: task / a.kv_heads,
            kv_head: task % a.kv_heads,
            scratch,
        });
    });
}

/// All work of one key-value head of a sample.
struct Backward<'a, S> {
    attention: &'a Attention,
    tensors: &'a Tensors<S>,
    dropout: &'a Option<(Dropout, u64, u64)>,
    batch: usize,
    kv_head: usize,
    scratch: &'a mut Bump,
}

/// Tiles in scratch.
struct Tiles<S> {
    /// Weights, then weights after dropout.
    p: Matrix<S>,
    /// Gradients of weights, then of scores.
    ds: Matrix<S>,
    /// `D` of all queries of a head.
    delta: *mut S,
    factors: *mut S,
}

impl<S: Scalar> Job<S> for Backward<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let (a, t) = (self.attention, self.tensors);
        let mut tile = || {
            let start: *mut S = self.scratch.take(QUERY_TILE * KEY_TILE);
            Matrix { start, row: KEY_TILE, col: 1 }
        };
        let (p, ds) = (tile(), tile());
        let tiles = Tiles {
            p,
            ds,
            delta: self.scratch.take(a.queries),
            factors: self.scratch.take(KEY_TILE),
        };
        let mut multiplier = Multiplier::new();
        clear(t.dk.matrix(self.batch, 0, self.kv_head), a.keys, a.dim);
        clear(t.dv.matrix(self.batch, 0, self.kv_head), a.keys, a.dim);
        for head in (0..a.heads).filter(|&h| a.kv_head(h) == self.kv_head) {
            let mask = Mask { attention: a, dropout: self.dropout, batch: self.batch, head };
            clear(t.dq.matrix(self.batch, 0, head), a.queries, a.dim);
            for query in 0..a.queries {
                let (x, y) =
                    (t.out.matrix(self.batch, query, head), t.dout.matrix(self.batch, query, head));
                // SAFETY: both rows hold the dim, the table a number per query.
                unsafe { *tiles.delta.add(query) = dot::<V>(x.start, y.start, a.dim) };
            }
            for query in (0..a.queries).step_by(QUERY_TILE) {
                let m = QUERY_TILE.min(a.queries - query);
                for key in (0..mask.visible(query + m - 1)).step_by(KEY_TILE) {
                    let n = KEY_TILE.min(a.keys - key);
                    let heads = [head, self.kv_head];
                    // SAFETY: tensors hold all rows of the tiles, scratch a tile each.
                    unsafe {
                        tile_gradients::<V>(
                            &mask,
                            t,
                            &tiles,
                            &mut multiplier,
                            heads,
                            [query, m],
                            [key, n],
                            self.scratch,
                        );
                    }
                }
            }
        }
    }
}

/// # Safety
///
/// Tensors and tiles hold their elements, scratch what [`multiplier_bytes`] says.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn tile_gradients<V: Vector>(
    mask: &Mask,
    t: &Tensors<V::Scalar>,
    tiles: &Tiles<V::Scalar>,
    multiplier: &mut Multiplier,
    [head, kv_head]: [usize; 2],
    [query, m]: [usize; 2],
    [key, n]: [usize; 2],
    scratch: &mut Bump,
) {
    let (d, b) = (mask.attention.dim, mask.batch);
    let (q, dout) = (t.q.matrix(b, query, head), t.dout.matrix(b, query, head));
    let (k, v) = (t.k.matrix(b, key, kv_head), t.v.matrix(b, key, kv_head));
    let (dk, dv) = (t.dk.matrix(b, key, kv_head), t.dv.matrix(b, key, kv_head));
    let dq = t.dq.matrix(b, query, head);
    // SAFETY: by the contract of the function.
    unsafe {
        multiplier.multiply::<V>([m, n, d], q, k.transposed(), tiles.p, false, scratch.rest());
        multiplier.multiply::<V>([m, n, d], dout, v.transposed(), tiles.ds, false, scratch.rest());
        for row in 0..m {
            let first = (b * mask.attention.heads + head) * mask.attention.queries;
            let lse = *t.lse.get().add(first + query + row);
            gradient_row::<V>(mask, tiles, [query, row], [key, n], lse);
        }
        multiplier.multiply::<V>([n, d, m], tiles.p.transposed(), dout, dv, true, scratch.rest());
        multiplier.multiply::<V>([n, d, m], tiles.ds.transposed(), q, dk, true, scratch.rest());
        multiplier.multiply::<V>([m, d, n], tiles.ds, k, dq, true, scratch.rest());
    }
}

/// Turns one row of scores and of `dout vᵀ` into dropped weights and gradients of scores.
///
/// # Safety
///
/// See [`tile_gradients`].
#[inline(always)]
unsafe fn gradient_row<V: Vector>(
    mask: &Mask,
    tiles: &Tiles<V::Scalar>,
    [query, row]: [usize; 2],
    [key, keys]: [usize; 2],
    lse: V::Scalar,
) {
    let zero = V::Scalar::ZERO;
    let seen = mask.visible(query + row).saturating_sub(key).min(keys);
    // SAFETY: by the contract of the function.
    unsafe {
        let p = tiles.p.start.add(row * KEY_TILE);
        let ds = tiles.ds.start.add(row * KEY_TILE);
        std::slice::from_raw_parts_mut(p.add(seen), keys - seen).fill(zero);
        std::slice::from_raw_parts_mut(ds.add(seen), keys - seen).fill(zero);
        let factors = std::slice::from_raw_parts_mut(tiles.factors, seen);
        mask.factors(query + row, key, factors);
        let has_dropout = mask.dropout.is_some();
        let scale = V::splat(V::Scalar::from_f64(mask.attention.scale));
        let (lse, delta) = (V::splat(lse), V::splat(*tiles.delta.add(query + row)));
        for i in (0..seen).step_by(V::LANES) {
            let score = load_up_to::<V>(p, i, seen, zero).mul(scale);
            let weight = V::Scalar::exp(score.sub(lse));
            let mut dweight = load_up_to::<V>(ds, i, seen, zero);
            let mut dropped = weight;
            if has_dropout {
                let factor = load_up_to::<V>(tiles.factors, i, seen, zero);
                dweight = dweight.mul(factor);
                dropped = weight.mul(factor);
            }
            store_up_to(dropped, p, i, seen);
            store_up_to(weight.mul(dweight.sub(delta)).mul(scale), ds, i, seen);
        }
    }
}

/// Zeroes `rows` rows of `cols` numbers.
fn clear<S: Scalar>(matrix: Matrix<S>, rows: usize, cols: usize) {
    for row in 0..rows {
        // SAFETY: callers pass matrices of that many rows, whose columns are contiguous.
        unsafe {
            let start = matrix.start.add(row * matrix.row);
            std::slice::from_raw_parts_mut(start, cols).fill(S::ZERO);
        }
    }
}

/// # Safety
///
/// Both hold `len` numbers.
#[inline(always)]
unsafe fn dot<V: Vector>(x: *const V::Scalar, y: *const V::Scalar, len: usize) -> V::Scalar {
    let zero = V::Scalar::ZERO;
    let mut sum = V::splat(zero);
    for i in (0..len).step_by(V::LANES) {
        // SAFETY: by the contract of the function.
        let (x, y) =
            unsafe { (load_up_to::<V>(x, i, len, zero), load_up_to::<V>(y, i, len, zero)) };
        sum = x.fma(y, sum);
    }
    sum.fold(|a, b| a + b)
}
