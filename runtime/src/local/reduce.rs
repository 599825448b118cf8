//! Combining the same elements of several buffers, in order.

use std::marker::PhantomData;

use half::{bf16, f16};
use ir::DType;

use crate::communicator::{Combiner, Types};

/// Elements that are accumulated on the stack at a time; chosen to stay within the L1 cache.
const CHUNK: usize = 1024;

/// Whether elements of this type can be combined.
pub(super) fn supports(Types { dtype, exchanged }: Types) -> bool {
    match (dtype, exchanged) {
        (DType::F32, DType::BF16 | DType::F16) => true,
        _ => dtype == exchanged && !matches!(dtype, DType::F8E4M3 | DType::F8E5M2),
    }
}

/// Combines `len` elements of `n` sources, first to last, into `target`.
///
/// # Safety
///
/// `source(i)` for `i < n` can be read, and `target` written, for `len` elements of `dtype`, and
/// nobody else writes there meanwhile. `target` may be one of the sources; it doesn't overlap one
/// otherwise. Alignment does not matter.
pub(super) unsafe fn combine(
    Types { dtype, exchanged }: Types,
    combiner: Combiner,
    n: usize,
    source: &dyn Fn(usize) -> *const u8,
    target: *mut u8,
    len: usize,
) {
    let job = Job { combiner, n, source, target, len };
    // SAFETY: the caller's promise, with the element type that belongs to `dtype`.
    unsafe {
        match dtype {
            DType::F32 if exchanged == DType::BF16 => job.run::<Rounded<bf16>>(),
            DType::F32 if exchanged == DType::F16 => job.run::<Rounded<f16>>(),
            DType::F64 => job.run::<f64>(),
            DType::F32 => job.run::<f32>(),
            DType::BF16 => job.run::<bf16>(),
            DType::F16 => job.run::<f16>(),
            DType::I8 => job.run::<i8>(),
            DType::I32 => job.run::<i32>(),
            DType::I64 => job.run::<i64>(),
            DType::U32 => job.run::<u32>(),
            DType::Bool => job.run::<Truth>(),
            DType::F8E4M3 | DType::F8E5M2 => unreachable!("checked by `supports`"),
        }
    }
}

/// Combines the elements of some terms, first to last.
///
/// # Panics
/// A term is longer or shorter than the target.
pub(super) fn combine_slices(types: Types, combiner: Combiner, terms: &[&[u8]], target: &mut [u8]) {
    let len = target.len() / types.dtype.size() as usize;
    assert!(terms.iter().all(|term| term.len() == target.len()), "terms have equal lengths");
    let source = |term: usize| terms[term].as_ptr();
    // SAFETY: terms and target have `len` elements, and the target is borrowed by itself.
    unsafe { combine(types, combiner, terms.len(), &source, target.as_mut_ptr(), len) };
}

#[derive(Clone, Copy)]
struct Job<'a> {
    combiner: Combiner,
    n: usize,
    source: &'a dyn Fn(usize) -> *const u8,
    target: *mut u8,
    len: usize,
}

impl Job<'_> {
    /// As [`combine`].
    unsafe fn run<T: Element>(self) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.combiner {
                Combiner::Sum => self.fold::<T>(T::add),
                Combiner::Max => self.fold::<T>(T::max),
                Combiner::Min => self.fold::<T>(T::min),
            }
        }
    }

    /// As [`combine`].
    unsafe fn fold<T: Element>(self, merge: impl Fn(T::Wide, T::Wide) -> T::Wide) {
        let mut sums = [T::Wide::default(); CHUNK];
        for start in (0..self.len).step_by(CHUNK) {
            let sums = &mut sums[..CHUNK.min(self.len - start)];
            for member in 0..self.n {
                let base = (self.source)(member).cast::<T>();
                // SAFETY: `start + i < len`; every bit pattern is a valid `T`.
                let read = |i: usize| unsafe { base.add(start + i).read_unaligned() }.widen();
                if member == 0 {
                    sums.iter_mut().enumerate().for_each(|(i, sum)| *sum = read(i));
                } else {
                    sums.iter_mut().enumerate().for_each(|(i, sum)| *sum = merge(*sum, read(i)));
                }
            }
            let target = self.target.cast::<T>();
            for (i, &sum) in sums.iter().enumerate() {
                // SAFETY: `start + i < len`. All sources of this chunk have been read.
                unsafe { target.add(start + i).write_unaligned(T::narrow(sum)) };
            }
        }
    }
}

/// An element, and the type in which it is combined.
trait Element: Copy {
    type Wide: Copy + Default;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! float {
    ($type:ty, $wide:ty, $widen:expr, $narrow:expr) => {
        impl Element for $type {
            type Wide = $wide;
            #[inline(always)]
            fn widen(self) -> $wide {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(wide: $wide) -> $type {
                $narrow(wide)
            }
            #[inline(always)]
            fn add(a: $wide, b: $wide) -> $wide {
                a + b
            }
            #[inline(always)]
            fn max(a: $wide, b: $wide) -> $wide {
                if a > b || a.is_nan() { a } else { b }
            }
            #[inline(always)]
            fn min(a: $wide, b: $wide) -> $wide {
                if a < b || a.is_nan() { a } else { b }
            }
        }
    };
}

float!(f64, f64, |x| x, |x| x);
float!(f32, f32, |x| x, |x| x);
float!(bf16, f32, bf16::to_f32, bf16::from_f32);
float!(f16, f32, f16::to_f32, f16::from_f32);

/// A number of f32 that is exchanged as a narrower one.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Rounded<T>(f32, PhantomData<T>);

impl<T: Element<Wide = f32>> Element for Rounded<T> {
    type Wide = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        T::narrow(self.0).widen()
    }
    #[inline(always)]
    fn narrow(wide: f32) -> Rounded<T> {
        Rounded(T::narrow(wide).widen(), PhantomData)
    }
    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        T::add(a, b)
    }
    #[inline(always)]
    fn max(a: f32, b: f32) -> f32 {
        T::max(a, b)
    }
    #[inline(always)]
    fn min(a: f32, b: f32) -> f32 {
        T::min(a, b)
    }
}

macro_rules! integer {
    ($type:ty) => {
        impl Element for $type {
            type Wide = $type;
            #[inline(always)]
            fn widen(self) -> $type {
                self
            }
            #[inline(always)]
            fn narrow(wide: $type) -> $type {
                wide
            }
            #[inline(always)]
            fn add(a: $type, b: $type) -> $type {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn max(a: $type, b: $type) -> $type {
                Ord::max(a, b)
            }
            #[inline(always)]
            fn min(a: $type, b: $type) -> $type {
                Ord::min(a, b)
            }
        }
    };
}

integer!(i8);
integer!(i32);
integer!(i64);
integer!(u32);

/// A `bool` as a byte, so that every bit pattern is valid: zero is false.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Truth(u8);

impl Element for Truth {
    type Wide = bool;
    fn widen(self) -> bool {
        self.0 != 0
    }
    fn narrow(wide: bool) -> Truth {
        Truth(u8::from(wide))
    }
    fn add(a: bool, b: bool) -> bool {
        a | b
    }
    fn max(a: bool, b: bool) -> bool {
        a | b
    }
    fn min(a: bool, b: bool) -> bool {
        a & b
    }
}
