//! Operations along one dim that is no fused reduction: running combinations, products, orders,
//! the largest, reversal, and sums of windows.
//!
//! A task owns whole lines, so that no result depends on the number of tasks. An order holds the
//! indices of one line in memory of its own.

use std::cmp::Ordering;

use ir::DType;

use super::Cpu;
use super::moves::{piece, tasks};
use super::view::{Shared, View, ViewMut};
use crate::kernel::{Line, Lines};
use crate::rows::ReduceOp;

/// Elements of lines.
trait Number: Copy {
    const ZERO: Self;
    const ONE: Self;
    fn combined(self, other: Self, how: ReduceOp) -> Self;
    /// The product of some, in order.
    fn product(items: impl Iterator<Item = Self>) -> Self;
    /// The order of numbers, with a NaN above all others.
    fn order(self, other: Self) -> Ordering;
}

macro_rules! floats {
    ($($number:ty),*) => {$(
        impl Number for $number {
            const ZERO: $number = 0.0;
            const ONE: $number = 1.0;
            fn combined(self, other: $number, how: ReduceOp) -> $number {
                match how {
                    ReduceOp::Sum => self + other,
                    ReduceOp::Max => if self > other || self.is_nan() { self } else { other },
                    ReduceOp::Min => if self < other || self.is_nan() { self } else { other },
                }
            }
            fn product(items: impl Iterator<Item = $number>) -> $number {
                items.map(f64::from).product::<f64>() as $number
            }
            fn order(self, other: $number) -> Ordering {
                let nans = self.is_nan().cmp(&other.is_nan());
                self.partial_cmp(&other).unwrap_or(nans)
            }
        }
    )*};
}

macro_rules! integers {
    ($($number:ty),*) => {$(
        impl Number for $number {
            const ZERO: $number = 0;
            const ONE: $number = 1;
            fn combined(self, other: $number, how: ReduceOp) -> $number {
                match how {
                    ReduceOp::Sum => self.wrapping_add(other),
                    ReduceOp::Max => self.max(other),
                    ReduceOp::Min => self.min(other),
                }
            }
            fn product(items: impl Iterator<Item = $number>) -> $number {
                items.fold(Self::ONE, <$number>::wrapping_mul)
            }
            fn order(self, other: $number) -> Ordering {
                self.cmp(&other)
            }
        }
    )*};
}

floats!(f32, f64);
integers!(i32, u32, i64, u8);

/// Runs the operation on every line.
pub(super) fn execute(cpu: &Cpu, l: &Lines, inputs: &[View], outputs: &[ViewMut]) {
    match l.dtype {
        DType::F64 => typed::<f64>(cpu, l, inputs, outputs),
        DType::I32 => typed::<i32>(cpu, l, inputs, outputs),
        DType::U32 => typed::<u32>(cpu, l, inputs, outputs),
        DType::I64 => typed::<i64>(cpu, l, inputs, outputs),
        DType::Bool => typed::<u8>(cpu, l, inputs, outputs),
        DType::F32 => typed::<f32>(cpu, l, inputs, outputs),
        DType::BF16 | DType::F16 => reverse::<u16>(cpu, l, inputs, outputs),
        DType::F8E4M3 | DType::F8E5M2 => reverse::<u8>(cpu, l, inputs, outputs),
        DType::I8 => unreachable!("verified: lines are of a type that is converted"),
    }
}

/// Reverses lines of elements that are not computed with.
fn reverse<T: Copy>(cpu: &Cpu, l: &Lines, inputs: &[View], outputs: &[ViewMut]) {
    assert!(matches!(l.how, Line::Reverse), "verified: narrow elements are only moved");
    each(cpu, l, inputs, outputs, |x: &Strided<T>, y| {
        x.all().enumerate().for_each(|(at, value)| y.set(x.len - 1 - at, value));
    });
}

/// Every `step`-th element from a start on.
struct Strided<T> {
    start: *mut T,
    step: usize,
    len: usize,
}

impl<T: Copy> Strided<T> {
    fn get(&self, at: usize) -> T {
        assert!(at < self.len, "a line is read within its length");
        // SAFETY: the arguments were checked to hold all lines, of which this is one.
        unsafe { *self.start.add(at * self.step) }
    }

    fn set(&self, at: usize, value: T) {
        assert!(at < self.len, "a line is written within its length");
        // SAFETY: as in `get`; a line of the output belongs to one task.
        unsafe { *self.start.add(at * self.step) = value }
    }

    fn all(&self) -> impl Iterator<Item = T> {
        (0..self.len).map(|at| self.get(at))
    }
}

fn typed<T: Number>(cpu: &Cpu, l: &Lines, inputs: &[View], outputs: &[ViewMut]) {
    match l.how {
        Line::ArgMax => each(cpu, l, inputs, outputs, |x, y| y.set(0, largest::<T>(x))),
        Line::Order { descending } => {
            each(cpu, l, inputs, outputs, |x: &Strided<T>, y| order(x, y, descending));
        }
        Line::Cumulative(how) => each(cpu, l, inputs, outputs, |x: &Strided<T>, y| {
            let mut sum = None;
            for (at, value) in x.all().enumerate() {
                let next = sum.map_or(value, |sum: T| sum.combined(value, how));
                y.set(at, next);
                sum = Some(next);
            }
        }),
        Line::Prod => {
            each(cpu, l, inputs, outputs, |x: &Strided<T>, y| y.set(0, T::product(x.all())));
        }
        Line::Reverse => each(cpu, l, inputs, outputs, |x: &Strided<T>, y| {
            x.all().enumerate().for_each(|(at, value)| y.set(x.len - 1 - at, value));
        }),
        Line::Fold { size, stride, dilation } => {
            each(cpu, l, inputs, outputs, |x: &Strided<T>, y| {
                (0..y.len).for_each(|at| y.set(at, T::ZERO));
                for (at, value) in x.all().enumerate() {
                    let place = at / size * stride + at % size * dilation;
                    y.set(place, y.get(place).combined(value, ReduceOp::Sum));
                }
            });
        }
        Line::Pool { op, size, stride, dilation } => {
            pool::<T>(cpu, l, inputs, outputs, op, [size, stride, dilation]);
        }
    }
}

/// One number for each window: all lines that lie side by side at once.
fn pool<T: Number>(
    cpu: &Cpu,
    l: &Lines,
    inputs: &[View],
    outputs: &[ViewMut],
    op: ReduceOp,
    [size, stride, dilation]: [usize; 3],
) {
    let x = Shared::new(inputs[0].start::<T>().cast_mut());
    let y = Shared::new(outputs[0].start::<T>());
    let (from, to) = (l.extent * l.inner, l.result * l.inner);
    let tasks = tasks(l.outer, l.outer * from.max(to));
    cpu.for_each(tasks, (l.outer * to * size) as u64, 0, |task, _| {
        for outer in piece(l.outer, tasks, task) {
            // SAFETY: the arguments were checked to hold all lines; those of the output belong to
            // one task, and the input is only read.
            let (x, y) = unsafe {
                let x = std::slice::from_raw_parts(x.get().add(outer * from), from);
                (x, std::slice::from_raw_parts_mut(y.get().add(outer * to), to))
            };
            if l.inner == 1 {
                for (at, y) in y.iter_mut().enumerate() {
                    let window = &x[at * stride..];
                    let all = (1..size).map(|tap| window[tap * dilation]);
                    *y = all.fold(window[0], |sum, next| sum.combined(next, op));
                }
                continue;
            }
            for (at, y) in y.chunks_exact_mut(l.inner.max(1)).enumerate() {
                let row = |tap: usize| (at * stride + tap * dilation) * l.inner;
                y.copy_from_slice(&x[row(0)..][..l.inner]);
                for tap in 1..size {
                    let taken = y.iter_mut().zip(&x[row(tap)..][..l.inner]);
                    taken.for_each(|(sum, next)| *sum = sum.combined(*next, op));
                }
            }
        }
    });
}

/// Runs with every line of the input and of the output.
fn each<T: Copy, U: Copy>(
    cpu: &Cpu,
    l: &Lines,
    inputs: &[View],
    outputs: &[ViewMut],
    run: impl Fn(&Strided<T>, &Strided<U>) + Sync,
) {
    let x = Shared::new(inputs[0].start::<T>().cast_mut());
    let y = Shared::new(outputs[0].start::<U>());
    let (lines, length) = (l.outer * l.inner, l.extent.max(l.result));
    let tasks = tasks(lines, lines * length);
    cpu.for_each(tasks, (lines * length) as u64, 0, |task, _| {
        for line in piece(lines, tasks, task) {
            let (outer, inner) = (line / l.inner, line % l.inner);
            let start = |of: usize| outer * of * l.inner + inner;
            let x = x.get().wrapping_add(start(l.extent));
            let y = y.get().wrapping_add(start(l.result));
            run(
                &Strided { start: x, step: l.inner, len: l.extent },
                &Strided { start: y, step: l.inner, len: l.result },
            );
        }
    });
}

/// The first index of the largest; zero where there is none.
fn largest<T: Number>(x: &Strided<T>) -> i32 {
    let mut best = 0;
    for at in 1..x.len {
        if x.get(at).order(x.get(best)) == Ordering::Greater {
            best = at;
        }
    }
    best as i32
}

fn order<T: Number>(x: &Strided<T>, y: &Strided<i32>, descending: bool) {
    let mut indices: Vec<usize> = (0..x.len).collect();
    indices.sort_by(|a, b| {
        let ascending = x.get(*a).order(x.get(*b));
        if descending { ascending.reverse() } else { ascending }
    });
    indices.truncate(y.len);
    indices.into_iter().enumerate().for_each(|(at, index)| y.set(at, index as i32));
}
