//! Loops over the lanes of a block.
//!
//! Each loop loads, computes and stores explicitly and treats its last partial vector with masked
//! accesses: left to the compiler, a loop whose target may be its source is not vectorised.

use std::marker::PhantomData;

use ir::random::DrawBits;

use super::super::vector::{Job, MAX_LANES, Scalar, Vector};
use super::functions::{self, Function1, Function2};
use crate::rows::ReduceOp;

/// What an operand holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One number per lane.
    Lanes,
    /// One number per row.
    PerRow,
    /// One number.
    Uniform,
}

/// An operand of a loop.
#[derive(Clone, Copy)]
pub(super) struct Operand<S> {
    pub(super) start: *const S,
    pub(super) kind: Kind,
}

impl<S> Operand<S> {
    /// The operand of one row of `cols` lanes.
    #[inline(always)]
    pub(super) fn of_row(self, row: usize, cols: usize) -> *const S {
        match self.kind {
            Kind::Lanes => self.start.wrapping_add(row * cols),
            Kind::PerRow => self.start.wrapping_add(row),
            Kind::Uniform => self.start,
        }
    }
}

/// The lanes of a block: whole rows, or a part of one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl Span {
    /// Lines that a loop runs over: one, unless an operand changes from row to row.
    #[inline(always)]
    fn lines<S>(self, operands: &[Operand<S>]) -> Span {
        if operands.iter().any(|o| o.kind == Kind::PerRow) {
            self
        } else {
            Span { rows: 1, cols: self.rows * self.cols }
        }
    }
}

/// `target = O(x)`. All pointers of this and the following jobs hold the lanes of their span.
pub(super) struct Map<O, S> {
    pub(super) target: *mut S,
    pub(super) x: *const S,
    pub(super) len: usize,
    pub(super) function: PhantomData<O>,
}

impl<O: Function1, S: Scalar> Job<S> for Map<O, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let whole = self.len - self.len % V::LANES;
        // SAFETY: both hold `len` lanes.
        unsafe {
            for i in (0..whole).step_by(V::LANES) {
                O::apply(V::load(self.x.add(i))).store(self.target.add(i));
            }
            if whole < self.len {
                let rest = self.len - whole;
                let y = O::apply(V::load_first(self.x.add(whole), rest, S::ONE));
                y.store_first(self.target.add(whole), rest);
            }
        }
    }
}

/// `target = O(a, b)`.
pub(super) struct Zip<O, S> {
    pub(super) target: *mut S,
    pub(super) a: Operand<S>,
    pub(super) b: Operand<S>,
    pub(super) span: Span,
    pub(super) function: PhantomData<O>,
}

impl<O: Function2, S: Scalar> Job<S> for Zip<O, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let lines = self.span.lines(&[self.a, self.b]);
        for row in 0..lines.rows {
            let target = self.target.wrapping_add(row * lines.cols);
            let a = self.a.of_row(row, lines.cols);
            let b = self.b.of_row(row, lines.cols);
            let scalars = (self.a.kind != Kind::Lanes, self.b.kind != Kind::Lanes);
            // SAFETY: all three hold the lanes of the span.
            unsafe {
                match scalars {
                    (false, false) => zip::<V, O, false, false>(target, a, b, lines.cols),
                    (false, true) => zip::<V, O, false, true>(target, a, b, lines.cols),
                    (true, false) => zip::<V, O, true, false>(target, a, b, lines.cols),
                    (true, true) => zip::<V, O, true, true>(target, a, b, lines.cols),
                }
            }
        }
    }
}

/// Loads lanes, or repeats one number.
#[inline(always)]
unsafe fn take<V: Vector, const REPEAT: bool>(p: *const V::Scalar, i: usize) -> V {
    // SAFETY: by the contract of the loop.
    unsafe { if REPEAT { V::splat(*p) } else { V::load(p.add(i)) } }
}

/// As [`take`], of the last `n` lanes.
#[inline(always)]
unsafe fn take_first<V: Vector>(p: *const V::Scalar, i: usize, n: usize, repeat: bool) -> V {
    // SAFETY: by the contract of the loop.
    unsafe { if repeat { V::splat(*p) } else { V::load_first(p.add(i), n, V::Scalar::ONE) } }
}

#[inline(always)]
unsafe fn zip<V: Vector, O: Function2, const A: bool, const B: bool>(
    target: *mut V::Scalar,
    a: *const V::Scalar,
    b: *const V::Scalar,
    len: usize,
) {
    let whole = len - len % V::LANES;
    // SAFETY: by the contract of the job.
    unsafe {
        for i in (0..whole).step_by(V::LANES) {
            O::apply(take::<V, A>(a, i), take::<V, B>(b, i)).store(target.add(i));
        }
        if whole < len {
            let rest = len - whole;
            let x = take_first::<V>(a, whole, rest, A);
            let y = take_first::<V>(b, whole, rest, B);
            O::apply(x, y).store_first(target.add(whole), rest);
        }
    }
}

/// `target = condition ? a : b`.
pub(super) struct Choose<S> {
    pub(super) target: *mut S,
    /// Condition, `a`, `b`.
    pub(super) operands: [Operand<S>; 3],
    pub(super) span: Span,
}

impl<S: Scalar> Job<S> for Choose<S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let lines = self.span.lines(&self.operands);
        let [condition, a, b] = self.operands.map(|o| o.kind != Kind::Lanes);
        for row in 0..lines.rows {
            let target = self.target.wrapping_add(row * lines.cols);
            let rows = self.operands.map(|o| o.of_row(row, lines.cols));
            // SAFETY: all hold the lanes of the span.
            unsafe {
                match (condition, a, b) {
                    (false, false, false) => {
                        choose::<V, false, false>(target, rows, lines.cols);
                    }
                    (false, false, true) => {
                        choose::<V, false, true>(target, rows, lines.cols);
                    }
                    (false, true, false) => {
                        choose::<V, true, false>(target, rows, lines.cols);
                    }
                    (false, true, true) => {
                        choose::<V, true, true>(target, rows, lines.cols);
                    }
                    (true, ..) => {
                        // One side for the whole row.
                        let is_true = *rows[0] != S::ZERO;
                        let (x, repeat) = if is_true { (rows[1], a) } else { (rows[2], b) };
                        if repeat {
                            zip::<V, First, true, true>(target, x, x, lines.cols);
                        } else {
                            zip::<V, First, false, true>(target, x, x, lines.cols);
                        }
                    }
                }
            }
        }
    }
}

/// The first of two values.
struct First;

impl Function2 for First {
    #[inline(always)]
    fn apply<V: Vector>(a: V, _b: V) -> V {
        a
    }
}

/// One line of [`Choose`], whose condition is lanes; the parameters say which of the values is one
/// number.
#[inline(always)]
unsafe fn choose<V: Vector, const A: bool, const B: bool>(
    target: *mut V::Scalar,
    [condition, a, b]: [*const V::Scalar; 3],
    len: usize,
) {
    let whole = len - len % V::LANES;
    // SAFETY: by the contract of the job.
    unsafe {
        for i in (0..whole).step_by(V::LANES) {
            let condition = take::<V, false>(condition, i);
            V::select(condition, take::<V, A>(a, i), take::<V, B>(b, i)).store(target.add(i));
        }
        if whole < len {
            let rest = len - whole;
            let condition = take_first::<V>(condition, whole, rest, false);
            let x = take_first::<V>(a, whole, rest, A);
            let y = take_first::<V>(b, whole, rest, B);
            V::select(condition, x, y).store_first(target.add(whole), rest);
        }
    }
}

/// `target[row] = combine(target[row], reduction of the row)` for each row of the span.
pub(super) struct Reduce<S> {
    pub(super) op: ReduceOp,
    pub(super) target: *mut S,
    pub(super) x: *const S,
    pub(super) span: Span,
}

impl<S: Scalar> Job<S> for Reduce<S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        for row in 0..self.span.rows {
            let x = self.x.wrapping_add(row * self.span.cols);
            // SAFETY: `x` holds the lanes of the span, `target` its rows.
            unsafe {
                let target = self.target.add(row);
                *target = match self.op {
                    ReduceOp::Sum => {
                        let vector = reduce::<V>(x, self.span.cols, S::ZERO, V::add);
                        *target + vector.fold(|a, b| a + b)
                    }
                    ReduceOp::Max => {
                        let vector = reduce::<V>(x, self.span.cols, S::LOWEST, functions::larger);
                        larger(*target, vector.fold(larger))
                    }
                    ReduceOp::Min => {
                        let vector = reduce::<V>(x, self.span.cols, S::HIGHEST, functions::smaller);
                        smaller(*target, vector.fold(smaller))
                    }
                };
            }
        }
    }
}

/// The larger one; NaN when one is.
#[inline(always)]
pub(super) fn larger<S: Scalar>(a: S, b: S) -> S {
    if a > b || is_nan(a) { a } else { b }
}

/// The smaller one; NaN when one is.
#[inline(always)]
pub(super) fn smaller<S: Scalar>(a: S, b: S) -> S {
    if a < b || is_nan(a) { a } else { b }
}

#[inline(always)]
fn is_nan<S: Scalar>(x: S) -> bool {
    x.partial_cmp(&x).is_none()
}

/// Combines `len` lanes into one vector, through four so that additions overlap.
#[inline(always)]
unsafe fn reduce<V: Vector>(
    x: *const V::Scalar,
    len: usize,
    start: V::Scalar,
    combine: impl Fn(V, V) -> V,
) -> V {
    let mut partial = [V::splat(start); 4];
    let quads = len - len % (4 * V::LANES);
    // SAFETY: by the contract of the job.
    unsafe {
        for i in (0..quads).step_by(4 * V::LANES) {
            for (j, p) in partial.iter_mut().enumerate() {
                *p = combine(*p, V::load(x.add(i + j * V::LANES)));
            }
        }
        for i in (quads..len).step_by(V::LANES) {
            let n = len - i;
            let lanes =
                if n < V::LANES { V::load_first(x.add(i), n, start) } else { V::load(x.add(i)) };
            partial[0] = combine(partial[0], lanes);
        }
    }
    combine(combine(partial[0], partial[1]), combine(partial[2], partial[3]))
}

/// `target[i] += x[row, i]` for each row in turn.
pub(super) struct AddRows<S> {
    pub(super) target: *mut S,
    pub(super) x: *const S,
    pub(super) span: Span,
}

impl<S: Scalar> Job<S> for AddRows<S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        for row in 0..self.span.rows {
            let x = self.x.wrapping_add(row * self.span.cols);
            // SAFETY: `x` holds the lanes of the span, `target` one row.
            unsafe {
                zip::<V, super::functions::Add, false, false>(
                    self.target,
                    self.target,
                    x,
                    self.span.cols,
                );
            }
        }
    }
}

/// `target[i] = first + i * stride`, rounded once.
pub(super) struct Ramp<S> {
    pub(super) target: *mut S,
    pub(super) first: i64,
    pub(super) stride: usize,
    pub(super) len: usize,
}

/// Integers up to this are numbers of f32, so that sums of them are exact.
const EXACT_MAX: i64 = 1 << 24;

impl<S: Scalar> Job<S> for Ramp<S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let at = |i: usize| self.first + (i * self.stride) as i64;
        let is_exact = self.first >= -EXACT_MAX && at(self.len + V::LANES) <= EXACT_MAX;
        let whole = if is_exact { self.len - self.len % V::LANES } else { 0 };
        let mut lanes = [S::ZERO; MAX_LANES];
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane = S::from_f64(at(i) as f64);
        }
        // SAFETY: `target` holds `len` lanes, `lanes` those of a vector.
        unsafe {
            let mut ramp = V::load(lanes.as_ptr());
            let step = V::splat(S::from_f64((V::LANES * self.stride) as f64));
            for i in (0..whole).step_by(V::LANES) {
                ramp.store(self.target.add(i));
                ramp = ramp.add(step);
            }
            for i in whole..self.len {
                *self.target.add(i) = S::from_f64(at(i) as f64);
            }
        }
    }
}

/// `target[i] = bits.uniform(stream, base + i * stride)`.
pub(super) struct Draws<S> {
    pub(super) target: *mut S,
    pub(super) stream: u64,
    pub(super) bits: DrawBits,
    pub(super) base: u64,
    pub(super) stride: u64,
    pub(super) len: usize,
}

impl<S: Scalar> Job<S> for Draws<S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        // SAFETY: `target` holds `len` lanes.
        let target = unsafe { std::slice::from_raw_parts_mut(self.target, self.len) };
        for (i, lane) in target.iter_mut().enumerate() {
            let index = self.base.wrapping_add((i as u64).wrapping_mul(self.stride));
            *lane = S::from_f32(self.bits.uniform(self.stream, index));
        }
    }
}
