//! Attention of few queries over many keys, as in decoding: it is as fast as keys and values are
//! read.
//!
//! A task is a key-value head of one sample with all query heads that read it, so that keys and
//! values are read once. Keys come in tiles in ascending order with a running softmax, as in
//! [`super::attention`]; nothing is packed.

use super::Cpu;
use super::attention::{
    BiasRows, KEY_TILE, Mask, Running, Tensor, at_position, bias, input, load_up_to, output,
    positions, room_of, scale_row, seen_at_most, softmax_row, store_up_to,
};
use super::scratch::{Bump, lines_of};
use super::vector::{Job, Scalar, Vector};
use super::view::{View, ViewMut};
use crate::kernel::Attention;

/// Queries from which on tiles are faster. Chosen.
const QUERIES_MAX: usize = 4;
/// Keys whose products are computed at once: enough to hide the latency of an addition.
const KEYS_AT_ONCE: usize = 4;

/// Whether a launch is one of few queries.
pub(super) fn fits(a: &Attention) -> bool {
    a.position && a.dropout.is_none() && a.queries <= QUERIES_MAX
}

/// Pairs of a query and a query head that read one key-value head, at most.
fn rows_max(a: &Attention) -> usize {
    a.queries * a.group.min(a.heads)
}

/// Bytes of scratch per thread.
pub(super) fn scratch<S>(a: &Attention) -> usize {
    lines_of::<S>(rows_max(a) * KEY_TILE)
        + lines_of::<S>(rows_max(a) * a.dim)
        + 2 * lines_of::<S>(rows_max(a))
        + lines_of::<S>(room_of(a, rows_max(a) * a.dim))
        + 2 * lines_of::<S>(room_of(a, KEY_TILE * a.dim))
        + lines_of::<S>(room_of(a, KEY_TILE))
}

/// Runs attention.
pub(super) fn execute<S: Scalar>(cpu: &Cpu, a: &Attention, inputs: &[View], outputs: &[ViewMut]) {
    let positions = positions(a, inputs);
    let (q, k) = (input::<S>(a, &inputs[0], a.q), input::<S>(a, &inputs[1], a.k));
    let (v, out) = (input::<S>(a, &inputs[2], a.v), output::<S>(a, &outputs[0], a.out));
    let bias = bias::<S>(a, inputs);
    let seen_of = |batch: usize| {
        let a = at_position(a, positions, batch);
        a.visible(a.queries.saturating_sub(1)).end.min(seen_at_most(&a))
    };
    let seen: usize = (0..a.batch).map(seen_of).sum();
    let cycles = (a.heads * a.queries * seen * a.dim) as u64 / 4;
    cpu.for_each(a.batch * a.kv_heads, cycles, scratch::<S>(a), |task, scratch| {
        let (batch, kv_head) = (task / a.kv_heads, task % a.kv_heads);
        let a = &at_position(a, positions, batch);
        let mask = Mask { attention: a, dropout: &None, documents: None, batch: 0, head: 0 };
        cpu.isa.run(Few { mask, batch, kv_head, q, k, v, out, bias, scratch });
    });
}

/// One key-value head of one sample.
struct Few<'a, S> {
    mask: Mask<'a>,
    batch: usize,
    kv_head: usize,
    q: Tensor<S>,
    k: Tensor<S>,
    v: Tensor<S>,
    out: Tensor<S>,
    bias: Option<Tensor<S>>,
    scratch: &'a mut Bump,
}

impl<S: Scalar> Job<S> for Few<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let a = self.mask.attention;
        let heads = (0..a.heads).filter(|head| a.kv_head(*head) == self.kv_head);
        let count = heads.clone().count();
        let first = heads.clone().next().unwrap_or(0);
        let rows = count * a.queries;
        let scores = self.scratch.take::<S>(rows_max(a) * KEY_TILE);
        let sums = self.scratch.zeros::<S>(rows_max(a) * a.dim);
        let largest = self.scratch.take::<S>(rows_max(a));
        let sum = self.scratch.zeros::<S>(rows_max(a));
        let of_queries = self.scratch.take::<S>(room_of(a, rows_max(a) * a.dim));
        let [of_keys, of_values] =
            [0; 2].map(|_| self.scratch.take::<S>(room_of(a, KEY_TILE * a.dim)));
        let of_bias = self.scratch.take::<S>(room_of(a, KEY_TILE));
        // SAFETY: there is room for a number per row.
        unsafe { std::slice::from_raw_parts_mut(largest, rows) }.fill(S::LOWEST);
        // A row is a query of a head: the queries of the first head come first.
        let place = |row: usize| (first + row / a.queries, row % a.queries);
        let bias = |row: usize| {
            let (head, query) = place(row);
            BiasRows::of(self.bias, [self.batch, head, query], of_bias)
        };
        let running = |row: usize| Running {
            scores: scores.wrapping_add(row * KEY_TILE),
            out: sums.wrapping_add(row * a.dim),
            largest: largest.wrapping_add(row),
            sum: sum.wrapping_add(row),
            factors: scores,
            bias: bias(row),
        };
        let query_of = |row: usize| {
            let (head, query) = place(row);
            let room = of_queries.wrapping_add(row * a.dim);
            // SAFETY: the tensor holds a row per query and head, and so does the room.
            unsafe { self.q.read::<V>([self.batch, query, head], [1, a.dim], room).start }
        };
        for [key, keys] in self.mask.key_tiles(0, a.queries) {
            let (at, sizes) = ([self.batch, key, self.kv_head], [keys, a.dim]);
            // SAFETY: the tensors hold the keys of the tile, and so does the room.
            let (k, v) = unsafe {
                let k = self.k.read::<V>(at, sizes, of_keys);
                (k, self.v.read::<V>(at, sizes, of_values))
            };
            for row in 0..rows {
                let (_, query) = place(row);
                let (q, own) = (query_of(row), running(row));
                // SAFETY: the tensors hold the keys of the tile, scratch a tile of scores per row.
                unsafe {
                    dots::<V>(q, [k.start, own.scores], k.row, [keys, a.dim]);
                    softmax_row::<V>(&self.mask, &own, [query, 0], [key, keys]);
                    add_scaled::<V>(own.scores, [v.start, own.out], v.row, [keys, a.dim]);
                }
            }
        }
        for row in 0..rows {
            let (head, query) = place(row);
            let (at, own) = ([self.batch, query, head], sums.wrapping_add(row * a.dim));
            let target = self.out.matrix(at, a.dim, own).start;
            // SAFETY: the output holds a row per query and head.
            unsafe {
                let total = *sum.add(row);
                let factor = if total == S::ZERO { S::ZERO } else { S::ONE / total };
                scale_row::<V>(own, target, a.dim, factor);
                self.out.write::<V>(at, [1, a.dim], own);
            }
        }
    }
}

/// `scores[j] = q · k[j]`.
///
/// # Safety
///
/// `q` holds `dim` numbers, `k` as many in each of `keys` rows, `scores` a number per key.
#[inline(always)]
unsafe fn dots<V: Vector>(
    q: *const V::Scalar,
    [k, scores]: [*mut V::Scalar; 2],
    stride: usize,
    [keys, dim]: [usize; 2],
) {
    let zero = V::Scalar::ZERO;
    for j in (0..keys).step_by(KEYS_AT_ONCE) {
        let count = KEYS_AT_ONCE.min(keys - j);
        let mut sums = [V::splat(zero); KEYS_AT_ONCE];
        for i in (0..dim).step_by(V::LANES) {
            // SAFETY: by the contract of the function; rows past the last are the last again.
            unsafe {
                let x = load_up_to::<V>(q, i, dim, zero);
                for (at, sum) in sums.iter_mut().enumerate() {
                    let row = k.add((j + at.min(count - 1)) * stride);
                    *sum = x.fma(load_up_to::<V>(row, i, dim, zero), *sum);
                }
            }
        }
        for (at, sum) in sums.iter().enumerate().take(count) {
            // SAFETY: by the contract of the function.
            unsafe { *scores.add(j + at) = sum.fold(|a, b| a + b) };
        }
    }
}

/// `out += Σ weights[j] v[j]`.
///
/// # Safety
///
/// `out` holds `dim` numbers, `v` as many in each of `keys` rows, `weights` a number per key.
#[inline(always)]
unsafe fn add_scaled<V: Vector>(
    weights: *const V::Scalar,
    [v, out]: [*mut V::Scalar; 2],
    stride: usize,
    [keys, dim]: [usize; 2],
) {
    let zero = V::Scalar::ZERO;
    for j in (0..keys).step_by(KEYS_AT_ONCE) {
        let count = KEYS_AT_ONCE.min(keys - j);
        for i in (0..dim).step_by(V::LANES) {
            // SAFETY: by the contract of the function.
            unsafe {
                let mut sum = load_up_to::<V>(out, i, dim, zero);
                for at in j..j + count {
                    let row = load_up_to::<V>(v.add(at * stride), i, dim, zero);
                    sum = V::splat(*weights.add(at)).fma(row, sum);
                }
                store_up_to(sum, out, i, dim);
            }
        }
    }
}
