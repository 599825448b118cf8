//! Attention in tiles of queries × keys, after FlashAttention (Dao et al. 2022): the scores of a
//! tile live in cache, a running maximum and sum make the softmax exact.
//!
//! A task is a tile of queries of one head. Keys come in fixed tiles in ascending order, hidden
//! tiles are skipped: for a query whose keys are all hidden in a tile, the tile adds zeros, so that
//! its bits do not depend on which queries share its tile.

use std::marker::PhantomData;
use std::ops::Range;

use ir::DType;
use ir::random::Key;

use super::Cpu;
use super::formats::{Format, Operand, Round, Widen};
use super::pairs::{self, PairedPart};
use super::scratch::{Bump, lines_of};
use super::tiles::{self, Loop, Nest, Part};
use super::vector::{Isa, Job, Pairs, Scalar, Vector};
use super::view::{Shared, View, ViewMut};
use crate::kernel::{Attention, Dropout};

/// Queries per tile: a multiple of all register tiles' heights that keeps 64 × 128 scores, their
/// queries and outputs in a second-level cache. Chosen.
pub(super) const QUERY_TILE: usize = 96;
/// Keys per tile: a multiple of all register tiles' widths.
pub(super) const KEY_TILE: usize = 128;

/// A matrix in strided memory.
#[derive(Clone, Copy)]
pub(super) struct Matrix<S> {
    pub(super) start: *mut S,
    pub(super) row: usize,
    pub(super) col: usize,
}

impl<S> Matrix<S> {
    pub(super) fn transposed(self) -> Matrix<S> {
        Matrix { start: self.start, row: self.col, col: self.row }
    }
}

/// The products of tiles, whose loops are made once per task.
pub(super) struct Multiplier {
    nest: Nest,
}

/// What multiplies pairs: it depends on the kernel and the set alone. A window is not among them,
/// as its tiles start at keys that depend on the queries of a tile.
pub(super) fn pairs_of(isa: Isa, a: &Attention) -> Option<Pairs> {
    isa.pairs().filter(|_| a.dtype == DType::BF16 && a.window == 0 && !a.position)
}

impl Multiplier {
    pub(super) fn new() -> Multiplier {
        let one = || vec![Loop { size: 0, strides: [0; 3] }];
        Multiplier {
            nest: Nest {
                m: one(),
                n: one(),
                k: one(),
                accumulate: false,
                frames: Vec::new(),
                planes: None,
            },
        }
    }

    /// `c (+)= a b` for `a[m, k]`, `b[k, n]`.
    ///
    /// # Safety
    ///
    /// The matrices hold their points, and `scratch` what [`tiles::scratch_bytes`] says.
    #[inline(always)]
    pub(super) unsafe fn multiply<V: Vector>(
        &mut self,
        [m, n, k]: [usize; 3],
        a: Matrix<V::Scalar>,
        b: Matrix<V::Scalar>,
        c: Matrix<V::Scalar>,
        accumulate: bool,
        mut scratch: Bump,
    ) {
        let operands = [a.start, b.start].map(|start| Operand::own(start.cast_const()));
        V::call(self.part([m, n, k], (a, b), operands, c, accumulate, &mut scratch));
    }

    /// [`Multiplier::multiply`] of numbers of BF16 by an instruction for pairs.
    ///
    /// # Safety
    ///
    /// As there, for what [`pairs::scratch_bytes`] says; the machine has the instruction.
    #[inline(always)]
    pub(super) unsafe fn multiply_pairs<S: Scalar>(
        &mut self,
        by: Pairs,
        [m, n, k]: [usize; 3],
        [a, b]: [Matrix<u16>; 2],
        c: Matrix<S>,
        accumulate: bool,
        mut scratch: Bump,
    ) {
        let of = |matrix: Matrix<u16>| Operand::new(matrix.start.cast(), Format::BF16);
        let part = self.part([m, n, k], (a, b), [of(a), of(b)], c, accumulate, &mut scratch);
        S::dispatch_pairs(PairedPart { part, by });
    }

    fn part<'a, S: Scalar, T>(
        &'a mut self,
        [m, n, k]: [usize; 3],
        (a, b): (Matrix<T>, Matrix<T>),
        operands: [Operand; 2],
        c: Matrix<S>,
        accumulate: bool,
        scratch: &'a mut Bump,
    ) -> Part<'a, S> {
        self.nest.m[0] = Loop { size: m, strides: [a.row, 0, c.row] };
        self.nest.n[0] = Loop { size: n, strides: [0, b.col, c.col] };
        self.nest.k[0] = Loop { size: k, strides: [a.col, b.row, 0] };
        self.nest.accumulate = accumulate;
        Part {
            epilogue: tiles::Epilogue::none(),
            rounded: None,
            then: None,
            nest: &self.nest,
            rows: [0, m],
            columns: [0, n],
            a: operands[0],
            b: operands[1],
            c: c.start,
            scratch,
        }
    }
}

/// Rounds rows of a tile of numbers to BF16.
///
/// # Safety
///
/// Both matrices hold `rows` rows of `len` numbers, whose columns are contiguous.
#[inline(always)]
pub(super) unsafe fn round_rows<V: Vector>(
    source: Matrix<V::Scalar>,
    target: Matrix<u16>,
    [rows, len]: [usize; 2],
) {
    for row in 0..rows {
        let source = source.start.wrapping_add(row * source.row).cast_const();
        let start = target.start.wrapping_add(row * target.row);
        let target = Operand::new(start.cast(), Format::BF16);
        V::call(Round { source, target, len });
    }
}

/// Scratch of the products of tiles.
pub(super) fn multiplier_bytes<S>(a: &Attention) -> usize {
    let longest = a.dim.max(KEY_TILE);
    tiles::scratch_bytes::<S>([longest; 3], 0).max(pairs::scratch_bytes([longest; 3]))
}

/// The stream of a launch's dropout, and its first index.
pub(super) fn stream(a: &Attention, key: Option<&View>) -> Option<(Dropout, u64, u64)> {
    let dropout = a.dropout.clone()?;
    let words = key?.start::<[u32; 4]>();
    // SAFETY: the key input was checked to hold four words.
    let key = Key::from_words(unsafe { words.read_unaligned() });
    let sample = u64::from(key.sample) + dropout.sample_offset;
    Some((dropout.clone(), key.stream(dropout.salt), sample))
}

/// Which keys a tile of queries sees, and which it drops.
#[derive(Clone)]
pub(super) struct Mask<'a> {
    pub(super) attention: &'a Attention,
    pub(super) dropout: &'a Option<(Dropout, u64, u64)>,
    /// The documents of the sample, where there are several.
    pub(super) documents: Option<Documents<'a>>,
    pub(super) batch: usize,
    pub(super) head: usize,
}

/// The documents of a sample: the numbers of those of queries and of keys.
#[derive(Clone, Copy)]
pub(super) struct Documents<'a> {
    queries: &'a [i32],
    keys: &'a [i32],
}

impl<'a> Documents<'a> {
    /// Those of one sample, of the numbers of all.
    pub(super) fn of(
        a: &Attention,
        documents: Option<&'a [i32]>,
        batch: usize,
    ) -> Option<Documents<'a>> {
        let keys = &documents?[batch * a.keys..][..a.keys];
        Some(Documents { queries: &keys[a.documents?..][..a.queries], keys })
    }
}

/// The smallest and the largest of some numbers.
fn extremes(numbers: &[i32]) -> [i32; 2] {
    let of = |[low, high]: [i32; 2], &n: &i32| [low.min(n), high.max(n)];
    numbers.iter().fold([i32::MAX, i32::MIN], of)
}

impl Mask<'_> {
    /// The range of a tile of keys, from `key` on, outside which query `query` sees none. Of
    /// several documents, [`Mask::hide`] says what it does not see within.
    #[inline(always)]
    pub(super) fn seen(&self, query: usize, [key, keys]: [usize; 2]) -> Range<usize> {
        let visible = self.attention.visible(query);
        let within = |at: usize| at.clamp(key, key + keys) - key;
        let (start, end) = (within(visible.start), within(visible.end));
        let Some(documents) = self.documents.filter(|_| start < end) else { return start..end };
        let (own, tile) = (documents.queries[query], &documents.keys[key + start..key + end]);
        let Some(first) = tile.iter().position(|&n| n == own) else { return start..start };
        let behind = tile.iter().rev().take_while(|&&n| n != own).count();
        start + first..end - behind
    }

    /// Makes the scores of keys of other documents, from `key` on, minus infinity.
    #[inline(always)]
    pub(super) fn hide<S: Scalar>(&self, query: usize, key: usize, scores: &mut [S]) {
        let Some(documents) = self.documents else { return };
        let own = documents.queries[query];
        for (score, &n) in scores.iter_mut().zip(&documents.keys[key..]) {
            if n != own {
                *score = S::LOWEST;
            }
        }
    }

    /// The first key and the number of keys, of each tile, that some of the queries from `first` on
    /// see. Tiles lie where they would without a window, and what all of the queries do not see of
    /// one would only add zeros, so that the bits of a query do not depend on the others.
    ///
    /// Tiles whose documents all have numbers below or above those of the queries are left out:
    /// where documents are packed one after the other, all of other documents.
    pub(super) fn key_tiles(
        &self,
        first: usize,
        queries: usize,
    ) -> impl Iterator<Item = [usize; 2]> + use<'_> {
        let last = first + queries.max(1) - 1;
        let start = self.attention.visible(first).start;
        let end = self.attention.visible(last).end;
        let own = self.documents.map(|documents| extremes(&documents.queries[first..=last]));
        let tiles = (start / KEY_TILE * KEY_TILE..end).step_by(KEY_TILE).map(move |tile| {
            let key = tile.max(start);
            [key, end.min(tile + KEY_TILE) - key]
        });
        tiles.filter(move |&[key, keys]| {
            let (Some(documents), Some([low, high])) = (self.documents, own) else { return true };
            let [least, most] = extremes(&documents.keys[key..key + keys]);
            least <= high && low <= most
        })
    }

    /// Writes the factors of `keys` scores from `key` on: zero or `1 / (1 - p)`.
    #[inline(always)]
    pub(super) fn factors<S: Scalar>(&self, query: usize, key: usize, factors: &mut [S]) {
        let Some((d, stream, sample)) = self.dropout else { return };
        let head = d.head_base.bound().cast_unsigned() + self.head as u64;
        let row = ((sample + self.batch as u64) * d.heads_total + head) * d.queries_total
            + d.query_base
            + query as u64;
        let first = row * d.keys_total + d.key_base + key as u64;
        let (p, scale) = (d.p as f32, S::from_f64(1.0 / (1.0 - d.p)));
        for (i, factor) in factors.iter_mut().enumerate() {
            let keep = d.bits.uniform(*stream, first.wrapping_add(i as u64)) >= p;
            *factor = if keep { scale } else { S::ZERO };
        }
    }
}

/// A tensor of a launch that computes in `S`.
pub(super) struct Tensor<S> {
    start: Shared<u8>,
    pub(super) format: Format,
    pub(super) strides: [usize; 3],
    of: PhantomData<S>,
}

impl<S> Clone for Tensor<S> {
    fn clone(&self) -> Tensor<S> {
        *self
    }
}

impl<S> Copy for Tensor<S> {}

impl<S: Scalar> Tensor<S> {
    /// The elements from an offset on.
    pub(super) fn at(self, offset: usize) -> Operand {
        Operand::new(self.start.get(), self.format).moved::<S>(offset)
    }

    /// One row of the sequence of one sample and head.
    pub(super) fn row(self, batch: usize, row: usize, head: usize) -> Operand {
        let [b, s, h] = self.strides;
        self.at(batch * b + row * s + head * h)
    }

    /// The matrix of the sequence from `from` on, of one sample and head: of a narrow tensor, room
    /// in which its `cols` columns are contiguous.
    pub(super) fn matrix(
        self,
        [batch, from, head]: [usize; 3],
        cols: usize,
        room: *mut S,
    ) -> Matrix<S> {
        if self.format != Format::Own {
            return Matrix { start: room, row: cols, col: 1 };
        }
        let start = self.row(batch, from, head).start::<S>().cast_mut();
        Matrix { start, row: self.strides[1], col: 1 }
    }

    /// The matrix of the sequence from `from` on, of one sample and head, of a tensor of BF16.
    pub(super) fn halves(self, [batch, from, head]: [usize; 3]) -> Matrix<u16> {
        debug_assert!(self.format == Format::BF16, "pairs are of BF16");
        let start = self.row(batch, from, head).start::<u16>().cast_mut();
        Matrix { start, row: self.strides[1], col: 1 }
    }

    /// The numbers of some rows as [`Tensor::matrix`] has them, widened into the room if they must.
    ///
    /// # Safety
    ///
    /// The tensor holds the rows, and `room`, if it is narrow, as many numbers.
    #[inline(always)]
    pub(super) unsafe fn read<V: Vector<Scalar = S>>(
        self,
        [batch, from, head]: [usize; 3],
        [rows, cols]: [usize; 2],
        room: *mut S,
    ) -> Matrix<S> {
        if self.format != Format::Own {
            for row in 0..rows {
                let target = room.wrapping_add(row * cols);
                V::call(Widen { source: self.row(batch, from + row, head), target, len: cols });
            }
        }
        self.matrix([batch, from, head], cols, room)
    }

    /// [`Tensor::read`] if they are wanted; else the room holds anything.
    ///
    /// # Safety
    ///
    /// As there.
    #[inline(always)]
    pub(super) unsafe fn read_if<V: Vector<Scalar = S>>(
        self,
        wanted: bool,
        place: [usize; 3],
        [rows, cols]: [usize; 2],
        room: *mut S,
    ) -> Matrix<S> {
        if wanted {
            // SAFETY: by the contract of the function.
            return unsafe { self.read::<V>(place, [rows, cols], room) };
        }
        self.matrix(place, cols, room)
    }

    /// Rounds the numbers of some rows from [`Tensor::matrix`] to the tensor, if they are not
    /// there.
    ///
    /// # Safety
    ///
    /// As [`Tensor::read`].
    #[inline(always)]
    pub(super) unsafe fn write<V: Vector<Scalar = S>>(
        self,
        [batch, from, head]: [usize; 3],
        [rows, cols]: [usize; 2],
        room: *const S,
    ) {
        if self.format != Format::Own {
            for row in 0..rows {
                let source = room.wrapping_add(row * cols);
                V::call(Round { source, target: self.row(batch, from + row, head), len: cols });
            }
        }
    }
}

/// Numbers that a task holds of narrow tensors beside what it does otherwise: as many as are said,
/// none where tensors are those of `S`.
pub(super) fn room_of(a: &Attention, len: usize) -> usize {
    if a.dtype.is_narrow() { len } else { 0 }
}

/// The rows of a bias that the queries of one sample and head read.
#[derive(Clone, Copy)]
pub(super) struct BiasRows<S> {
    start: Operand,
    /// From query to query.
    stride: usize,
    /// Room for a tile of keys of a narrow bias.
    room: *mut S,
}

impl<S: Scalar> BiasRows<S> {
    /// The rows of a sample and head, for queries from `first` on.
    pub(super) fn of(
        bias: Option<Tensor<S>>,
        [batch, head, first]: [usize; 3],
        room: *mut S,
    ) -> Option<BiasRows<S>> {
        let bias = bias?;
        let [b, h, s] = bias.strides;
        Some(BiasRows { start: bias.at(batch * b + head * h + first * s), stride: s, room })
    }

    /// The numbers of query `row` of the tile, for `keys` keys from `key` on: until the next call.
    ///
    /// # Safety
    ///
    /// The bias holds them.
    #[inline(always)]
    pub(super) unsafe fn at<V: Vector<Scalar = S>>(
        self,
        row: usize,
        [key, keys]: [usize; 2],
    ) -> *const S {
        let source = self.start.moved::<S>(row * self.stride + key);
        if source.format == Format::Own {
            return source.start();
        }
        V::call(Widen { source, target: self.room, len: keys });
        self.room
    }
}

/// The bias of a launch, which is its fourth input.
pub(super) fn bias<S>(a: &Attention, inputs: &[View]) -> Option<Tensor<S>> {
    let strides = a.bias?;
    Some(input(a, &inputs[3], strides))
}

/// The documents of all samples, an input behind the bias.
pub(super) fn documents<'v>(a: &Attention, inputs: &'v [View]) -> Option<&'v [i32]> {
    let view = inputs.get(3 + usize::from(a.bias.is_some())).filter(|_| a.documents.is_some())?;
    // SAFETY: the input was checked to hold a number per key, and nobody writes it meanwhile.
    Some(unsafe { std::slice::from_raw_parts(view.start::<i32>(), a.batch * a.keys) })
}

pub(super) fn input<S>(a: &Attention, view: &View, strides: [usize; 3]) -> Tensor<S> {
    let start = Shared::new(view.start::<u8>().cast_mut());
    Tensor { start, format: Format::of(a.dtype), strides, of: PhantomData }
}

pub(super) fn output<S>(a: &Attention, view: &ViewMut, strides: [usize; 3]) -> Tensor<S> {
    let start = Shared::new(view.start::<u8>());
    Tensor { start, format: Format::of(a.dtype), strides, of: PhantomData }
}

/// Bytes of scratch per thread of the forward pass.
pub(super) fn scratch<S>(a: &Attention) -> usize {
    lines_of::<S>(QUERY_TILE * KEY_TILE)
        + lines_of::<S>(QUERY_TILE * a.dim)
        + 2 * lines_of::<S>(QUERY_TILE)
        + lines_of::<S>(KEY_TILE)
        + lines_of::<S>(room_of(a, QUERY_TILE * a.dim))
        + lines_of::<S>(room_of(a, KEY_TILE * a.dim))
        + lines_of::<S>(room_of(a, KEY_TILE))
        + lines_of::<u16>(room_of(a, QUERY_TILE * KEY_TILE))
        + multiplier_bytes::<S>(a)
}

/// The positions of all samples that a launch passes; none where it passes none.
pub(super) fn positions<'v>(a: &Attention, inputs: &'v [View]) -> &'v [i32] {
    match inputs.last().filter(|_| a.position) {
        // SAFETY: the last input was checked to hold a number per sample, and nobody writes it
        // meanwhile.
        Some(view) => unsafe { std::slice::from_raw_parts(view.start::<i32>(), a.batch) },
        None => &[],
    }
}

/// The attention of a sample at its position.
pub(super) fn at_position(a: &Attention, positions: &[i32], batch: usize) -> Attention {
    let position = positions.get(batch).map_or(0, |position| i64::from(*position));
    Attention { query_offset: a.query_offset + position, ..a.clone() }
}

/// Runs attention.
pub(super) fn execute<S: Scalar>(cpu: &Cpu, a: &Attention, inputs: &[View], outputs: &[ViewMut]) {
    let positions = positions(a, inputs);
    let (q, k) = (input::<S>(a, &inputs[0], a.q), input::<S>(a, &inputs[1], a.k));
    let v = input::<S>(a, &inputs[2], a.v);
    let out = output::<S>(a, &outputs[0], a.out);
    let lse = outputs.get(1).map(|lse| Shared::new(lse.start::<S>()));
    let bias = bias::<S>(a, inputs);
    let all_documents = documents(a, inputs);
    let key_at = 3 + usize::from(bias.is_some()) + usize::from(a.documents.is_some());
    let dropout = a.dropout.as_ref().and_then(|_| stream(a, inputs.get(key_at)));
    let by = pairs_of(cpu.isa, a);
    let query_tiles = a.queries.div_ceil(QUERY_TILE);
    let cycles = (a.batch * a.heads * a.queries * seen_at_most(a) * a.dim) as u64 / 16;
    cpu.for_each(a.batch * a.heads * query_tiles, cycles, scratch::<S>(a), |task, scratch| {
        // Late tiles of queries see more keys: they go first.
        let tile = query_tiles - 1 - task % query_tiles;
        let (batch, head) = (task / query_tiles / a.heads, task / query_tiles % a.heads);
        let first = tile * QUERY_TILE;
        let documents = Documents::of(a, all_documents, batch);
        let a = &at_position(a, positions, batch);
        cpu.isa.run(Forward {
            mask: Mask { attention: a, dropout: &dropout, documents, batch, head },
            first,
            queries: QUERY_TILE.min(a.queries - first),
            q,
            k,
            v,
            out,
            bias,
            by,
            lse: lse
                .map(|lse| lse.get().wrapping_add((batch * a.heads + head) * a.queries + first)),
            scratch,
        });
    });
}

/// Keys that a query sees at most.
pub(super) fn seen_at_most(a: &Attention) -> usize {
    if a.window == 0 { a.keys } else { a.window.min(a.keys) }
}

/// One tile of queries of one head.
struct Forward<'a, S> {
    mask: Mask<'a>,
    first: usize,
    queries: usize,
    q: Tensor<S>,
    k: Tensor<S>,
    v: Tensor<S>,
    out: Tensor<S>,
    bias: Option<Tensor<S>>,
    /// What multiplies pairs, if they are.
    by: Option<Pairs>,
    /// None for inference.
    lse: Option<*mut S>,
    scratch: &'a mut Bump,
}

/// The running softmax of a tile of queries.
pub(super) struct Running<S> {
    pub(super) scores: *mut S,
    pub(super) out: *mut S,
    pub(super) largest: *mut S,
    pub(super) sum: *mut S,
    pub(super) factors: *mut S,
    pub(super) bias: Option<BiasRows<S>>,
}

impl<S: Scalar> Job<S> for Forward<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let (a, m) = (self.mask.attention, self.queries);
        let (batch, head) = (self.mask.batch, self.mask.head);
        let kv_head = a.kv_head(head);
        let mut running = Running {
            scores: self.scratch.take(QUERY_TILE * KEY_TILE),
            out: self.scratch.zeros(QUERY_TILE * a.dim),
            largest: self.scratch.take(QUERY_TILE),
            sum: self.scratch.zeros(QUERY_TILE),
            factors: self.scratch.take(KEY_TILE),
            bias: None,
        };
        let of_queries = self.scratch.take(room_of(a, QUERY_TILE * a.dim));
        let of_keys = self.scratch.take(room_of(a, KEY_TILE * a.dim));
        let of_bias = self.scratch.take(room_of(a, KEY_TILE));
        let weights = self.scratch.take(room_of(a, QUERY_TILE * KEY_TILE));
        let weights = Matrix { start: weights, row: KEY_TILE, col: 1 };
        running.bias = BiasRows::of(self.bias, [batch, head, self.first], of_bias);
        // SAFETY: there is room for a number per query, and for the queries, which are there.
        let q = unsafe {
            std::slice::from_raw_parts_mut(running.largest, m).fill(S::LOWEST);
            let place = [batch, self.first, head];
            self.q.read_if::<V>(self.by.is_none(), place, [m, a.dim], of_queries)
        };
        let scores = Matrix { start: running.scores, row: KEY_TILE, col: 1 };
        let sums = Matrix { start: running.out, row: a.dim, col: 1 };
        let mut multiplier = Multiplier::new();
        for [key, n] in self.mask.key_tiles(self.first, m) {
            let (place, sizes) = ([batch, key, kv_head], [n, a.dim]);
            // SAFETY: tensors hold all rows of the tiles, scratch a tile each.
            unsafe {
                let rest = self.scratch.rest();
                if let Some(by) = self.by {
                    let q = self.q.halves([batch, self.first, head]);
                    let k = self.k.halves(place).transposed();
                    multiplier.multiply_pairs(by, [m, n, a.dim], [q, k], scores, false, rest);
                } else {
                    let k = self.k.read::<V>(place, sizes, of_keys).transposed();
                    multiplier.multiply::<V>([m, n, a.dim], q, k, scores, false, rest);
                }
                for row in 0..m {
                    softmax_row::<V>(&self.mask, &running, [self.first, row], [key, n]);
                }
                if let Some(by) = self.by {
                    round_rows::<V>(scores, weights, [m, n]);
                    let (rest, v) = (self.scratch.rest(), self.v.halves(place));
                    multiplier.multiply_pairs(by, [m, a.dim, n], [weights, v], sums, true, rest);
                    continue;
                }
                let v = self.v.read::<V>(place, sizes, of_keys);
                multiplier.multiply::<V>([m, a.dim, n], scores, v, sums, true, self.scratch.rest());
            }
        }
        // SAFETY: as above.
        unsafe { self.finish::<V>(&running) };
    }
}

impl<S: Scalar> Forward<'_, S> {
    /// Divides the sums of the tile by those of the weights, and writes them.
    ///
    /// # Safety
    ///
    /// The tensors hold all rows of the tile, and the running softmax its sums.
    #[inline(always)]
    unsafe fn finish<V: Vector<Scalar = S>>(&self, running: &Running<S>) {
        let (dim, m) = (self.mask.attention.dim, self.queries);
        let place = [self.mask.batch, self.first, self.mask.head];
        let out = self.out.matrix(place, dim, running.out);
        // SAFETY: by the contract of the function.
        unsafe {
            for row in 0..m {
                let sum = *running.sum.add(row);
                let is_empty = sum == S::ZERO;
                let factor = if is_empty { S::ZERO } else { S::ONE / sum };
                let target = out.start.add(row * out.row);
                scale_row::<V>(running.out.add(row * dim), target, dim, factor);
                if let Some(lse) = self.lse {
                    let sum = S::from_f64(sum.to_f64().ln());
                    *lse.add(row) =
                        if is_empty { S::LOWEST } else { *running.largest.add(row) + sum };
                }
            }
            self.out.write::<V>(place, [m, dim], running.out);
        }
    }
}

/// Turns the scores of one query and a tile of keys into weights relative to the running maximum,
/// and rescales what was summed under the old one.
///
/// # Safety
///
/// The running softmax has room for its tiles.
#[inline(always)]
pub(super) unsafe fn softmax_row<V: Vector>(
    mask: &Mask,
    running: &Running<V::Scalar>,
    [first, row]: [usize; 2],
    [key, keys]: [usize; 2],
) {
    let a = mask.attention;
    let query = first + row;
    let Range { start, end } = mask.seen(query, [key, keys]);
    let seen = end - start;
    // SAFETY: by the contract of the function.
    unsafe {
        let scores = running.scores.add(row * KEY_TILE);
        std::slice::from_raw_parts_mut(scores, start).fill(V::Scalar::ZERO);
        std::slice::from_raw_parts_mut(scores.add(end), keys - end).fill(V::Scalar::ZERO);
        if seen == 0 {
            return;
        }
        let scores = scores.add(start);
        let mut scale = V::splat(V::Scalar::from_f64(a.scale));
        if a.softcap != 0.0 || running.bias.is_some() || mask.documents.is_some() {
            let bias = running.bias.map(|bias| bias.at::<V>(row, [key + start, seen]));
            bound_scores::<V>(a, [scores, scores], bias, seen);
            mask.hide(query, key + start, std::slice::from_raw_parts_mut(scores, seen));
            scale = V::splat(V::Scalar::ONE);
        }
        let lowest = V::Scalar::LOWEST;
        let mut largest = V::splat(lowest);
        for i in (0..seen).step_by(V::LANES) {
            store_up_to(load_up_to::<V>(scores, i, seen, lowest).mul(scale), scores, i, seen);
            largest = largest.max(load_up_to::<V>(scores, i, seen, lowest));
        }
        let found = largest.fold(|a, b| if a > b { a } else { b });
        let old = *running.largest.add(row);
        let new = if found > old { found } else { old };
        if new == lowest {
            std::slice::from_raw_parts_mut(scores, seen).fill(V::Scalar::ZERO);
            return;
        }
        let base = V::splat(new);
        let mut sum = V::splat(V::Scalar::ZERO);
        for i in (0..seen).step_by(V::LANES) {
            let x = load_up_to::<V>(scores, i, seen, lowest).sub(base);
            let weight = V::Scalar::exp(x);
            store_up_to(weight, scores, i, seen);
            // The lanes past the last key hold the exponential of minus infinity: zero.
            sum = sum.add(weight);
        }
        let shrink = V::Scalar::from_f64((old.to_f64() - new.to_f64()).exp());
        let sum = sum.fold(|a, b| a + b);
        *running.sum.add(row) = *running.sum.add(row) * shrink + sum;
        *running.largest.add(row) = new;
        if shrink != V::Scalar::ONE {
            let out = running.out.add(row * a.dim);
            scale_row::<V>(out, out, a.dim, shrink);
        }
        if mask.dropout.is_some() {
            let factors = std::slice::from_raw_parts_mut(running.factors, seen);
            mask.factors(query, key + start, factors);
            for (i, factor) in factors.iter().enumerate() {
                *scores.add(i) = *scores.add(i) * *factor;
            }
        }
    }
}

/// Makes scores of products of queries and keys: scaled, bounded, and with the bias. Where they are
/// bounded, `slopes` gets the derivatives of the bound, unless it is `scores`.
///
/// # Safety
///
/// All hold `len` numbers.
#[inline(always)]
pub(super) unsafe fn bound_scores<V: Vector>(
    a: &Attention,
    [scores, slopes]: [*mut V::Scalar; 2],
    bias: Option<*const V::Scalar>,
    len: usize,
) {
    let of = |x: f64| V::splat(V::Scalar::from_f64(x));
    let (scale, cap, one) = (of(a.scale), of(a.softcap), of(1.0));
    let zero = V::Scalar::ZERO;
    for i in (0..len).step_by(V::LANES) {
        // SAFETY: by the contract of the function.
        unsafe {
            let mut score = load_up_to::<V>(scores, i, len, zero).mul(scale);
            if a.softcap != 0.0 {
                let bounded = V::Scalar::tanh(score.div(cap));
                score = bounded.mul(cap);
                if slopes != scores {
                    store_up_to(one.sub(bounded.mul(bounded)), slopes, i, len);
                }
            }
            if let Some(bias) = bias {
                score = score.add(load_up_to::<V>(bias, i, len, zero));
            }
            store_up_to(score, scores, i, len);
        }
    }
}

/// # Safety
///
/// `len` numbers are readable at `p`.
#[inline(always)]
pub(super) unsafe fn load_up_to<V: Vector>(
    p: *const V::Scalar,
    i: usize,
    len: usize,
    rest: V::Scalar,
) -> V {
    // SAFETY: by the contract of the function.
    unsafe {
        if i + V::LANES <= len { V::load(p.add(i)) } else { V::load_first(p.add(i), len - i, rest) }
    }
}

/// # Safety
///
/// `len` numbers are writable at `p`.
#[inline(always)]
pub(super) unsafe fn store_up_to<V: Vector>(x: V, p: *mut V::Scalar, i: usize, len: usize) {
    // SAFETY: by the contract of the function.
    unsafe {
        if i + V::LANES <= len { x.store(p.add(i)) } else { x.store_first(p.add(i), len - i) }
    }
}

/// `target = source * factor`.
///
/// # Safety
///
/// Both hold `len` numbers.
#[inline(always)]
pub(super) unsafe fn scale_row<V: Vector>(
    source: *const V::Scalar,
    target: *mut V::Scalar,
    len: usize,
    factor: V::Scalar,
) {
    let factor = V::splat(factor);
    for i in (0..len).step_by(V::LANES) {
        // SAFETY: by the contract of the function.
        unsafe {
            let x = load_up_to::<V>(source, i, len, V::Scalar::ZERO);
            store_up_to(x.mul(factor), target, i, len);
        }
    }
}
