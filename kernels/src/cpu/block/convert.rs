//! Elements of other types, to and from the compute type.

use super::super::formats::{self, BF16, F8E4M3, F8E5M2, F16};
use super::super::vector::{Job, Scalar, Vector};

/// A type that buffers hold.
pub(super) trait Stored: Copy {
    /// Copies numbers by vectors; says whether it does.
    ///
    /// # Safety
    /// Both hold `len` of them and do not overlap.
    #[inline(always)]
    unsafe fn widen_all<V: Vector>(_: *const Self, _: *mut V::Scalar, _len: usize) -> bool {
        false
    }
    /// As [`Stored::widen_all`].
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn narrow_all<V: Vector>(_: *const V::Scalar, _: *mut Self, _len: usize) -> bool {
        false
    }
    fn widen<S: Scalar>(self) -> S;
    fn narrow<S: Scalar>(x: S) -> Self;
    /// `self + x` in this type.
    fn plus<S: Scalar>(self, x: S) -> Self;
}

macro_rules! stored {
    ($($number:ty),*) => {$(
        impl Stored for $number {
            #[inline(always)]
            fn widen<S: Scalar>(self) -> S {
                S::from_f64(f64::from(self))
            }
            #[inline(always)]
            fn narrow<S: Scalar>(x: S) -> $number {
                x.to_f64() as $number
            }
            #[inline(always)]
            fn plus<S: Scalar>(self, x: S) -> $number {
                self + Self::narrow(x)
            }
        }
    )*};
}

stored!(f64, i32, u32);

impl Stored for f32 {
    #[inline(always)]
    fn widen<S: Scalar>(self) -> S {
        S::from_f32(self)
    }
    #[inline(always)]
    fn narrow<S: Scalar>(x: S) -> f32 {
        x.to_f64() as f32
    }
    #[inline(always)]
    fn plus<S: Scalar>(self, x: S) -> f32 {
        self + Self::narrow(x)
    }
}

/// A truth value: one byte.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Truth(u8);

impl Stored for Truth {
    #[inline(always)]
    fn widen<S: Scalar>(self) -> S {
        if self.0 != 0 { S::ONE } else { S::ZERO }
    }
    #[inline(always)]
    fn narrow<S: Scalar>(x: S) -> Truth {
        Truth(u8::from(x != S::ZERO))
    }
    #[inline(always)]
    fn plus<S: Scalar>(self, x: S) -> Truth {
        Truth(self.0 | Self::narrow(x).0)
    }
}

macro_rules! narrow {
    ($($number:ty),*) => {$(
        impl Stored for $number {
            #[inline(always)]
            unsafe fn widen_all<V: Vector>(
                source: *const Self,
                target: *mut V::Scalar,
                len: usize,
            ) -> bool {
                // SAFETY: by the contract of the function.
                unsafe { formats::widen_all::<$number, V>(source, target, len) };
                true
            }
            #[inline(always)]
            unsafe fn narrow_all<V: Vector>(
                source: *const V::Scalar,
                target: *mut Self,
                len: usize,
            ) -> bool {
                // SAFETY: by the contract of the function.
                unsafe { formats::narrow_all::<$number, V>(source, target, len) };
                true
            }
            #[inline(always)]
            fn widen<S: Scalar>(self) -> S {
                S::from_f32(formats::Narrow::widen(self))
            }
            #[inline(always)]
            fn narrow<S: Scalar>(x: S) -> $number {
                <$number as formats::Narrow>::nearest(x.sticky())
            }
            #[inline(always)]
            fn plus<S: Scalar>(self, x: S) -> $number {
                <$number as formats::Narrow>::nearest((Stored::widen::<S>(self) + x).sticky())
            }
        }
    )*};
}

narrow!(BF16, F16, F8E4M3, F8E5M2);

/// `target[i] = source[i * stride]`.
pub(super) struct Widen<T, S> {
    pub(super) target: *mut S,
    pub(super) source: *const T,
    pub(super) stride: usize,
    pub(super) len: usize,
}

impl<T: Stored, S: Scalar> Job<S> for Widen<T, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        // SAFETY: registers hold `len` numbers and never overlap an argument, which holds all
        // elements of its access.
        unsafe {
            if self.stride == 1 {
                if T::widen_all::<V>(self.source, self.target, self.len) {
                    return;
                }
                let source = std::slice::from_raw_parts(self.source, self.len);
                let target = std::slice::from_raw_parts_mut(self.target, self.len);
                for (t, s) in target.iter_mut().zip(source) {
                    *t = s.widen();
                }
            } else {
                for i in 0..self.len {
                    *self.target.add(i) = (*self.source.add(i * self.stride)).widen();
                }
            }
        }
    }
}

/// `target[i * stride] (+)= source[i]`, or `source[0]` throughout.
pub(super) struct Narrow<T, S> {
    pub(super) target: *mut T,
    pub(super) stride: usize,
    pub(super) source: *const S,
    pub(super) repeat: bool,
    pub(super) accumulate: bool,
    pub(super) len: usize,
}

impl<T: Stored, S: Scalar> Job<S> for Narrow<T, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        // SAFETY: the argument holds all elements of its access, the register `len` numbers.
        unsafe {
            if self.stride == 1 && !self.repeat && !self.accumulate {
                if T::narrow_all::<V>(self.source, self.target, self.len) {
                    return;
                }
                for i in 0..self.len {
                    *self.target.add(i) = T::narrow(*self.source.add(i));
                }
                return;
            }
            for i in 0..self.len {
                let x = *self.source.add(if self.repeat { 0 } else { i });
                let element = self.target.add(i * self.stride);
                *element = if self.accumulate { (*element).plus(x) } else { T::narrow(x) };
            }
        }
    }
}
