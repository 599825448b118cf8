//! The gradient of attention, which computes the scores again from `q`, `k` and `lse`.
//!
//! With `P = exp(bound(scale · q kᵀ) + bias - lse)`, dropout factors `Z` and
//! `D = rowsum(dout ∘ out)`: `dv = (P ∘ Z)ᵀ dout`, `dbias = P ∘ (Z ∘ (dout vᵀ) - D)`,
//! `dS = dbias · bound' · scale`, `dq = dS k` and `dk = dSᵀ q`.
//!
//! A task is a key-value head of a sample, with all query heads that read it: it alone writes
//! these rows of `dk` and `dv`, tile by tile in ascending order of head, query and key.
//!
//! A gradient of the bias is summed over samples, heads or queries that share it. It has tasks of
//! its own, which compute the scores once more: a tile of it each, in ascending order of sample,
//! head and query.

use std::ops::Range;

use super::Cpu;
use super::attention::{
    BiasRows, Documents, KEY_TILE, Mask, Matrix, Multiplier, QUERY_TILE, Tensor, bias,
    bound_scores, documents, input, load_up_to, multiplier_bytes, output, pairs_of, room_of,
    round_rows, seen_at_most, store_up_to, stream,
};
use super::formats::{Format, Round};
use super::scratch::{Bump, lines_of};
use super::vector::{Job, Pairs, Scalar, Vector};
use super::view::{Shared, View, ViewMut};
use crate::kernel::{Attention, Dropout};

/// Bytes of scratch per thread.
pub(super) fn scratch<S: Scalar>(a: &Attention) -> usize {
    2 * lines_of::<S>(QUERY_TILE * KEY_TILE)
        + lines_of::<S>(a.queries)
        + 2 * lines_of::<S>(KEY_TILE)
        + Rooms::<S>::bytes(a)
        + multiplier_bytes::<S>(a)
}

/// Numbers of narrow tensors; empty where tensors are of the type that is computed with.
#[derive(Clone, Copy)]
struct Rooms<S> {
    /// Of a tile of queries.
    q: *mut S,
    dout: *mut S,
    dq: *mut S,
    /// Of a tile of keys.
    k: *mut S,
    v: *mut S,
    bias: *mut S,
    /// Of all keys.
    dk: *mut S,
    dv: *mut S,
    /// Of a tile of queries and keys.
    dbias: *mut S,
    /// Weights, and gradients of scores, as numbers of BF16.
    halves: [Matrix<u16>; 2],
}

impl<S: Scalar> Rooms<S> {
    fn lens(a: &Attention) -> [usize; 9] {
        let (queries, keys, all) = (QUERY_TILE * a.dim, KEY_TILE * a.dim, a.keys * a.dim);
        let dbias = if a.bias_grad { QUERY_TILE * KEY_TILE } else { 0 };
        [queries, queries, queries, keys, keys, KEY_TILE, all, all, dbias]
            .map(|len| room_of(a, len))
    }

    fn bytes(a: &Attention) -> usize {
        let halves = 2 * lines_of::<u16>(room_of(a, QUERY_TILE * KEY_TILE));
        Rooms::<S>::lens(a).map(lines_of::<S>).iter().sum::<usize>() + halves
    }

    fn take(a: &Attention, scratch: &mut Bump) -> Rooms<S> {
        let [q, dout, dq, k, v, bias, dk, dv, dbias] =
            Rooms::<S>::lens(a).map(|len| scratch.take(len));
        let halves = [(); 2].map(|()| Matrix {
            start: scratch.take(room_of(a, QUERY_TILE * KEY_TILE)),
            row: KEY_TILE,
            col: 1,
        });
        Rooms { q, dout, dq, k, v, bias, dk, dv, dbias, halves }
    }
}

/// The tensors of a launch.
struct Tensors<'v, S> {
    q: Tensor<S>,
    k: Tensor<S>,
    v: Tensor<S>,
    out: Tensor<S>,
    dout: Tensor<S>,
    dq: Tensor<S>,
    dk: Tensor<S>,
    dv: Tensor<S>,
    lse: Shared<S>,
    bias: Option<Tensor<S>>,
    dbias: Option<Tensor<S>>,
    documents: Option<&'v [i32]>,
}

impl<S> Tensors<'_, S> {
    /// Which keys a head of a sample sees.
    fn mask<'a>(
        &'a self,
        attention: &'a Attention,
        dropout: &'a Option<(Dropout, u64, u64)>,
        [batch, head]: [usize; 2],
    ) -> Mask<'a> {
        let documents = Documents::of(attention, self.documents, batch);
        Mask { attention, dropout, documents, batch, head }
    }
}

/// Runs the gradient of attention.
pub(super) fn execute<S: Scalar>(cpu: &Cpu, a: &Attention, inputs: &[View], outputs: &[ViewMut]) {
    // What follows the bias and the documents, where there are any.
    let rest = &inputs[3 + usize::from(a.bias.is_some()) + usize::from(a.documents.is_some())..];
    let tensors = Tensors {
        q: input(a, &inputs[0], a.q),
        k: input(a, &inputs[1], a.k),
        v: input(a, &inputs[2], a.v),
        out: input(a, &rest[0], a.out),
        lse: Shared::new(rest[1].start::<S>().cast_mut()),
        dout: input(a, &rest[2], a.out),
        bias: bias(a, inputs),
        documents: documents(a, inputs),
        dbias: a.bias.and_then(|strides| Some(output(a, outputs.get(3)?, strides))),
        dq: output(a, &outputs[0], a.q),
        dk: output(a, &outputs[1], a.k),
        dv: output(a, &outputs[2], a.v),
    };
    let dropout = stream(a, rest.get(3));
    let cycles = (a.batch * a.heads * a.queries * seen_at_most(a) * a.dim) as u64 / 8;
    let by = pairs_of(cpu.isa, a);
    cpu.for_each(a.batch * a.kv_heads, cycles, scratch::<S>(a), |task, scratch| {
        cpu.isa.run(Backward {
            attention: a,
            tensors: &tensors,
            dropout: &dropout,
            by,
            batch: task / a.kv_heads,
            kv_head: task % a.kv_heads,
            scratch,
        });
    });
    if a.bias_grad {
        bias_gradient(cpu, a, &tensors, &dropout);
    }
}

/// All work of one key-value head of a sample.
struct Backward<'a, S> {
    attention: &'a Attention,
    tensors: &'a Tensors<'a, S>,
    dropout: &'a Option<(Dropout, u64, u64)>,
    /// What multiplies pairs, if they are.
    by: Option<Pairs>,
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
    /// Derivatives of the bound of a row of scores.
    slopes: *mut S,
    rooms: Rooms<S>,
}

impl<S: Scalar> Tiles<S> {
    fn take(a: &Attention, scratch: &mut Bump) -> Tiles<S> {
        let mut tile = || {
            let start: *mut S = scratch.take(QUERY_TILE * KEY_TILE);
            Matrix { start, row: KEY_TILE, col: 1 }
        };
        let (p, ds) = (tile(), tile());
        Tiles {
            p,
            ds,
            delta: scratch.take(a.queries),
            factors: scratch.take(KEY_TILE),
            slopes: scratch.take(KEY_TILE),
            rooms: Rooms::take(a, scratch),
        }
    }

    /// Computes `D` of some queries of a head.
    #[inline(always)]
    fn sum_rows<V: Vector<Scalar = S>>(
        &self,
        t: &Tensors<'_, S>,
        [batch, head]: [usize; 2],
        queries: Range<usize>,
        dim: usize,
    ) {
        for query in queries {
            let (at, row) = ([batch, query, head], [1, dim]);
            // SAFETY: both rows hold the dim, as does a room of queries, the table a number per
            // query.
            unsafe {
                let x = t.out.read::<V>(at, row, self.rooms.q);
                let y = t.dout.read::<V>(at, row, self.rooms.dout);
                *self.delta.add(query) = dot::<V>(x.start, y.start, dim);
            }
        }
    }
}

impl<S: Scalar> Job<S> for Backward<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let (a, t) = (self.attention, self.tensors);
        let tiles = Tiles::take(a, self.scratch);
        let rooms = tiles.rooms;
        let mut multiplier = Multiplier::new();
        let keys = [self.batch, 0, self.kv_head];
        let dk = t.dk.matrix(keys, a.dim, rooms.dk);
        let dv = t.dv.matrix(keys, a.dim, rooms.dv);
        clear(dk, a.keys, a.dim);
        clear(dv, a.keys, a.dim);
        for head in (0..a.heads).filter(|&h| a.kv_head(h) == self.kv_head) {
            let mask = t.mask(a, self.dropout, [self.batch, head]);
            tiles.sum_rows::<V>(t, [self.batch, head], 0..a.queries, a.dim);
            for query in (0..a.queries).step_by(QUERY_TILE) {
                let m = QUERY_TILE.min(a.queries - query);
                let (place, sizes) = ([self.batch, query, head], [m, a.dim]);
                let dq = t.dq.matrix(place, a.dim, rooms.dq);
                clear(dq, m, a.dim);
                // SAFETY: tensors hold all rows of the tiles, scratch a tile each.
                unsafe {
                    let wide = self.by.is_none();
                    let of_queries = [t.q, t.dout].map(|tensor| (tensor, place));
                    let q = t.q.read_if::<V>(wide, place, sizes, rooms.q);
                    let dout = t.dout.read_if::<V>(wide, place, sizes, rooms.dout);
                    for [key, n] in mask.key_tiles(query, m) {
                        let (place, sizes) = ([self.batch, key, self.kv_head], [n, a.dim]);
                        let from = |all: Matrix<S>| Matrix {
                            start: all.start.wrapping_add(key * all.row),
                            ..all
                        };
                        let sides = Sides {
                            q,
                            dout,
                            dq,
                            k: t.k.read_if::<V>(wide, place, sizes, rooms.k),
                            v: t.v.read_if::<V>(wide, place, sizes, rooms.v),
                            dk: from(dk),
                            dv: from(dv),
                            pairs: self.by.map(|by| {
                                let [q, dout] = of_queries;
                                (by, [q, dout, (t.k, place), (t.v, place)].map(halves))
                            }),
                        };
                        let (queries, keys) = ([query, m], [key, n]);
                        let s = &mut *self.scratch;
                        tile_gradients::<V>(
                            &mask,
                            t,
                            &tiles,
                            &mut multiplier,
                            sides,
                            queries,
                            keys,
                            s,
                        );
                    }
                    t.dq.write::<V>(place, sizes, rooms.dq);
                }
            }
        }
        // SAFETY: the tensors hold all keys.
        unsafe {
            t.dk.write::<V>(keys, [a.keys, a.dim], rooms.dk);
            t.dv.write::<V>(keys, [a.keys, a.dim], rooms.dv);
        }
    }
}

/// The matrices of a tile of queries and keys.
#[derive(Clone, Copy)]
struct Sides<S> {
    q: Matrix<S>,
    dout: Matrix<S>,
    dq: Matrix<S>,
    k: Matrix<S>,
    v: Matrix<S>,
    dk: Matrix<S>,
    dv: Matrix<S>,
    /// If pairs are multiplied, by what, and `q`, `dout`, `k` and `v`, which are not above.
    pairs: Option<(Pairs, [Matrix<u16>; 4])>,
}

fn halves<S: Scalar>((tensor, place): (Tensor<S>, [usize; 3])) -> Matrix<u16> {
    tensor.halves(place)
}

/// # Safety
///
/// Tensors and tiles hold their elements, scratch what [`multiplier_bytes`] says.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn tile_gradients<V: Vector>(
    mask: &Mask,
    t: &Tensors<'_, V::Scalar>,
    tiles: &Tiles<V::Scalar>,
    multiplier: &mut Multiplier,
    sides: Sides<V::Scalar>,
    [query, m]: [usize; 2],
    [key, n]: [usize; 2],
    scratch: &mut Bump,
) {
    let d = mask.attention.dim;
    let Sides { q, dout, dq, k, v, dk, dv, pairs } = sides;
    // SAFETY: by the contract of the function.
    unsafe {
        if let Some((by, [q, dout, k, v])) = pairs {
            let mut multiply = |sizes, operands, c, add| {
                multiplier.multiply_pairs(by, sizes, operands, c, add, scratch.rest());
            };
            multiply([m, n, d], [q, k.transposed()], tiles.p, false);
            multiply([m, n, d], [dout, v.transposed()], tiles.ds, false);
            gradient_rows::<V>(mask, t, tiles, [query, m], [key, n], Of::Products);
            let [p, ds] = tiles.rooms.halves;
            round_rows::<V>(tiles.p, p, [m, n]);
            round_rows::<V>(tiles.ds, ds, [m, n]);
            multiply([n, d, m], [p.transposed(), dout], dv, true);
            multiply([n, d, m], [ds.transposed(), q], dk, true);
            multiply([m, d, n], [ds, k], dq, true);
            return;
        }
        multiplier.multiply::<V>([m, n, d], q, k.transposed(), tiles.p, false, scratch.rest());
        multiplier.multiply::<V>([m, n, d], dout, v.transposed(), tiles.ds, false, scratch.rest());
        gradient_rows::<V>(mask, t, tiles, [query, m], [key, n], Of::Products);
        multiplier.multiply::<V>([n, d, m], tiles.p.transposed(), dout, dv, true, scratch.rest());
        multiplier.multiply::<V>([n, d, m], tiles.ds.transposed(), q, dk, true, scratch.rest());
        multiplier.multiply::<V>([m, d, n], tiles.ds, k, dq, true, scratch.rest());
    }
}

/// Of what gradients are taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    /// The products of queries and keys.
    Products,
    /// The scores, to which the bias is added.
    Scores,
}

/// [`gradient_row`] for a tile of `m` queries from `query` on.
///
/// # Safety
///
/// See [`tile_gradients`].
#[inline(always)]
unsafe fn gradient_rows<V: Vector>(
    mask: &Mask,
    t: &Tensors<'_, V::Scalar>,
    tiles: &Tiles<V::Scalar>,
    [query, m]: [usize; 2],
    [key, n]: [usize; 2],
    of: Of,
) {
    let a = mask.attention;
    let first = (mask.batch * a.heads + mask.head) * a.queries + query;
    let bias = BiasRows::of(t.bias, [mask.batch, mask.head, query], tiles.rooms.bias);
    for row in 0..m {
        // SAFETY: by the contract of the function; there is a number per query.
        unsafe {
            let lse = *t.lse.get().add(first + row);
            let bias = bias.map(|bias| bias.at::<V>(row, [key, n]));
            gradient_row::<V>(mask, tiles, [query, row], [key, n], lse, bias, of);
        }
    }
}

/// Turns one row of products and of `dout vᵀ` into dropped weights and gradients. `bias` is that of
/// the tile's first key.
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
    bias: Option<*const V::Scalar>,
    of: Of,
) {
    let a = mask.attention;
    let zero = V::Scalar::ZERO;
    let Range { start, mut end } = mask.seen(query + row, [key, keys]);
    if lse == V::Scalar::LOWEST {
        end = start;
    }
    let seen = end - start;
    // SAFETY: by the contract of the function.
    unsafe {
        let p = tiles.p.start.add(row * KEY_TILE);
        let ds = tiles.ds.start.add(row * KEY_TILE);
        for x in [p, ds] {
            std::slice::from_raw_parts_mut(x, start).fill(zero);
            std::slice::from_raw_parts_mut(x.add(end), keys - end).fill(zero);
        }
        let (p, ds) = (p.add(start), ds.add(start));
        let factors = std::slice::from_raw_parts_mut(tiles.factors, seen);
        mask.factors(query + row, key + start, factors);
        let has_dropout = mask.dropout.is_some();
        let mut scale = V::splat(V::Scalar::from_f64(a.scale));
        let mut back = scale;
        if a.softcap != 0.0 || bias.is_some() || mask.documents.is_some() {
            let bias = bias.map(|bias| bias.wrapping_add(start));
            bound_scores::<V>(a, [p, tiles.slopes], bias, seen);
            mask.hide(query + row, key + start, std::slice::from_raw_parts_mut(p, seen));
            scale = V::splat(V::Scalar::ONE);
        }
        if of == Of::Scores {
            back = V::splat(V::Scalar::ONE);
        }
        let has_slopes = a.softcap != 0.0 && of == Of::Products;
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
            let mut dscore = weight.mul(dweight.sub(delta));
            if has_slopes {
                dscore = dscore.mul(load_up_to::<V>(tiles.slopes, i, seen, zero));
            }
            store_up_to(dscore.mul(back), ds, i, seen);
        }
    }
}

/// Runs the gradient of the bias.
fn bias_gradient<S: Scalar>(
    cpu: &Cpu,
    a: &Attention,
    t: &Tensors<'_, S>,
    dropout: &Option<(Dropout, u64, u64)>,
) {
    let Some(dbias) = t.dbias else { return };
    let own = |dim: usize, size: usize| if dbias.strides[dim] > 0 { size } else { 1 };
    let (samples, heads) = (own(0, a.batch), own(1, a.heads));
    let query_tiles = own(2, a.queries.div_ceil(QUERY_TILE));
    let key_tiles = a.keys.div_ceil(KEY_TILE);
    let cycles = (a.batch * a.heads * a.queries * seen_at_most(a) * a.dim) as u64 / 16;
    let tasks = samples * heads * query_tiles * key_tiles;
    cpu.for_each(tasks, cycles, scratch::<S>(a), |task, scratch| {
        let (key, task) = (task % key_tiles * KEY_TILE, task / key_tiles);
        let (tile, task) = (task % query_tiles, task / query_tiles);
        let (head, sample) = (task % heads, task / heads);
        let all = |dim: usize, at: usize, size: usize| {
            if dbias.strides[dim] > 0 { at..at + 1 } else { 0..size }
        };
        let first = tile * QUERY_TILE;
        let end = if dbias.strides[2] > 0 { a.queries.min(first + QUERY_TILE) } else { a.queries };
        cpu.isa.run(BiasGradient {
            attention: a,
            tensors: t,
            dropout,
            dbias,
            samples: all(0, sample, a.batch),
            heads: all(1, head, a.heads),
            queries: first..end,
            key,
            scratch,
        });
    });
}

/// A tile of the gradient of the bias.
struct BiasGradient<'a, S> {
    attention: &'a Attention,
    tensors: &'a Tensors<'a, S>,
    dropout: &'a Option<(Dropout, u64, u64)>,
    dbias: Tensor<S>,
    /// What is summed over, or the one that is meant.
    samples: Range<usize>,
    heads: Range<usize>,
    queries: Range<usize>,
    /// The first key.
    key: usize,
    scratch: &'a mut Bump,
}

impl<S: Scalar> Job<S> for BiasGradient<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let (a, t, tile) = (self.attention, self.tensors, self.key);
        let [_, _, stride] = self.dbias.strides;
        let tiles = Tiles::take(a, self.scratch);
        let mut multiplier = Multiplier::new();
        let rooms = tiles.rooms;
        // A row for each query, or one for all of them.
        let [b, h, s] = self.dbias.strides;
        let offset = self.samples.start * b + self.heads.start * h + self.queries.start * s + tile;
        let (rows, cols) =
            (if stride > 0 { self.queries.len() } else { 1 }, KEY_TILE.min(a.keys - tile));
        let in_memory = |row: usize| self.dbias.at(offset + row * stride);
        let first = match self.dbias.format {
            Format::Own => {
                Matrix { start: in_memory(0).start::<S>().cast_mut(), row: stride, col: 1 }
            }
            Format::BF16 | Format::F16 | Format::F8E4M3 | Format::F8E5M2 | Format::Tf32 => {
                Matrix { start: rooms.dbias, row: if stride > 0 { KEY_TILE } else { 0 }, col: 1 }
            }
        };
        let start = self.queries.start;
        let target = |query: usize, key: usize| {
            first.start.wrapping_add((query - start) * first.row + key - tile)
        };
        clear(first, rows, cols);
        for batch in self.samples {
            for head in self.heads.clone() {
                let mask = t.mask(a, self.dropout, [batch, head]);
                tiles.sum_rows::<V>(t, [batch, head], self.queries.clone(), a.dim);
                for query in self.queries.clone().step_by(QUERY_TILE) {
                    let m = QUERY_TILE.min(self.queries.end - query);
                    let is_own = |[key, _]: &[usize; 2]| key / KEY_TILE * KEY_TILE == tile;
                    let Some([key, n]) = mask.key_tiles(query, m).find(is_own) else { continue };
                    let kv_head = a.kv_head(head);
                    let d = a.dim;
                    let (of_queries, of_keys) = ([batch, query, head], [batch, key, kv_head]);
                    let s = &mut *self.scratch;
                    // SAFETY: tensors hold all rows of the tiles, scratch a tile each.
                    unsafe {
                        let q = t.q.read::<V>(of_queries, [m, d], rooms.q);
                        let dout = t.dout.read::<V>(of_queries, [m, d], rooms.dout);
                        let k = t.k.read::<V>(of_keys, [n, d], rooms.k).transposed();
                        let v = t.v.read::<V>(of_keys, [n, d], rooms.v).transposed();
                        multiplier.multiply::<V>([m, n, d], q, k, tiles.p, false, s.rest());
                        multiplier.multiply::<V>([m, n, d], dout, v, tiles.ds, false, s.rest());
                        gradient_rows::<V>(&mask, t, &tiles, [query, m], [key, n], Of::Scores);
                        for row in 0..m {
                            let ds = tiles.ds.start.add(row * KEY_TILE);
                            add_row::<V>(ds, target(query + row, key), n);
                        }
                    }
                }
            }
        }
        if self.dbias.format != Format::Own {
            for row in 0..rows {
                let source = first.start.wrapping_add(row * first.row);
                V::call(Round { source, target: in_memory(row), len: cols });
            }
        }
    }
}

/// `target += source`.
///
/// # Safety
///
/// Both hold `len` numbers.
#[inline(always)]
pub(super) unsafe fn add_row<V: Vector>(
    source: *const V::Scalar,
    target: *mut V::Scalar,
    len: usize,
) {
    let zero = V::Scalar::ZERO;
    for i in (0..len).step_by(V::LANES) {
        // SAFETY: by the contract of the function.
        unsafe {
            let sum =
                load_up_to::<V>(target, i, len, zero).add(load_up_to::<V>(source, i, len, zero));
            store_up_to(sum, target, i, len);
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
