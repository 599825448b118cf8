//! SIMD vectors behind one trait, so that each loop is written once.
//!
//! A [`Job`] is code generic over the vector. [`Isa::run`] enters it through a function compiled
//! for the instruction set; everything inside is `#[inline(always)]`, because a function that is
//! not inlined there would be compiled without those instructions. [`Vector::call`] is such an
//! entrance for code that is too large to inline. The scheme is that of the `pulp` crate.

use std::ops::{Add, Div, Mul, Sub};

use super::formats::{BF16, F16, load_lanes, round_lanes, store_lanes};
use super::math;

/// Code generic over the vector type.
pub(super) trait Job<S: Scalar> {
    /// Runs it; implementations are `#[inline(always)]`.
    fn run<V: Vector<Scalar = S>>(self);
}

/// A number that kernels compute with.
pub(super) trait Scalar:
    Copy
    + PartialOrd
    + Send
    + Sync
    + std::fmt::Debug
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + 'static
{
    const ZERO: Self;
    const ONE: Self;
    const LOWEST: Self;
    const HIGHEST: Self;

    fn from_f64(x: f64) -> Self;
    fn from_f32(x: f32) -> Self;
    fn to_f64(self) -> f64;
    /// The number of f32 that rounds to any narrower type as this one does: of f64 that towards
    /// zero with an odd last bit, unless it is exact (rounding to odd).
    fn sticky(self) -> f32;

    /// Runs a job with the vector type of an instruction set.
    fn dispatch<J: Job<Self>>(isa: Isa, job: J);
    /// Runs a job with the vectors of sets that multiply pairs, whose sums are of F32.
    fn dispatch_pairs<J: Job<Self>>(job: J);

    fn exp<V: Vector<Scalar = Self>>(x: V) -> V;
    fn log<V: Vector<Scalar = Self>>(x: V) -> V;
    fn tanh<V: Vector<Scalar = Self>>(x: V) -> V;
    fn erf<V: Vector<Scalar = Self>>(x: V) -> V;
    fn sigmoid<V: Vector<Scalar = Self>>(x: V) -> V;
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    /// The largest power of two not above `|self|`, with the sign of `self`.
    fn power_floor(self) -> Self;
    fn pow(self, exponent: Self) -> Self;
}

/// A vector of `LANES` numbers.
///
/// Values exist only in functions that were entered through [`Isa::run`] or [`Vector::call`], which
/// is why methods may use the instructions of the set without being unsafe themselves.
pub(super) trait Vector: Copy {
    type Scalar: Scalar;
    const LANES: usize;
    /// Height of the register tile of products: accumulators of two vectors each.
    const ROWS: usize;
    /// Side of the square that [`Vector::transpose`] turns.
    const TILE: usize;

    fn splat(x: Self::Scalar) -> Self;
    /// # Safety
    /// `LANES` numbers are readable at `p`.
    unsafe fn load(p: *const Self::Scalar) -> Self;
    /// # Safety
    /// `LANES` numbers are writable at `p`.
    unsafe fn store(self, p: *mut Self::Scalar);

    fn add(self, b: Self) -> Self;
    fn sub(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    fn div(self, b: Self) -> Self;
    fn max(self, b: Self) -> Self;
    fn min(self, b: Self) -> Self;
    /// `x` where that is NaN, else `self`.
    fn or_nan(self, x: Self) -> Self;
    /// `self * b + c`.
    fn fma(self, b: Self, c: Self) -> Self;
    fn sqrt(self) -> Self;
    /// `1 / self` to two units in the last place, for normal numbers below `2^126`.
    #[inline(always)]
    fn recip(self) -> Self {
        Self::splat(Self::Scalar::ONE).div(self)
    }
    fn floor(self) -> Self;
    /// To the nearest integer, ties to even.
    fn round(self) -> Self;
    fn abs(self) -> Self;
    /// The magnitude of `self` with the sign of `b`.
    fn copysign(self, b: Self) -> Self;

    /// 1 where `self < b`, else 0; the others alike.
    fn lt(self, b: Self) -> Self;
    fn le(self, b: Self) -> Self;
    fn eq(self, b: Self) -> Self;
    /// `a` where `condition` is not zero, else `b`.
    fn select(condition: Self, a: Self, b: Self) -> Self;

    /// `self * 2^n` for integral `n`, with one rounding at most.
    fn scale(self, n: Self) -> Self;
    /// `(m, e)` with `self = m * 2^e` and `1 <= m < 2`, for positive finite numbers.
    fn split(self) -> (Self, Self);

    /// # Safety
    /// `LANES` elements are readable at `p`.
    #[inline(always)]
    unsafe fn load_bf16(p: *const BF16) -> Self {
        // SAFETY: by the contract of the function.
        unsafe { load_lanes(p) }
    }
    /// # Safety
    /// `LANES` elements are writable at `p`.
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut BF16) {
        // SAFETY: by the contract of the function.
        unsafe { store_lanes(self, p) }
    }
    /// The nearest numbers of BF16.
    #[inline(always)]
    fn round_bf16(self) -> Self {
        round_lanes::<BF16, _>(self)
    }
    /// # Safety
    /// `LANES` elements are readable at `p`.
    #[inline(always)]
    unsafe fn load_f16(p: *const F16) -> Self {
        // SAFETY: by the contract of the function.
        unsafe { load_lanes(p) }
    }
    /// # Safety
    /// `LANES` elements are writable at `p`.
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut F16) {
        // SAFETY: by the contract of the function.
        unsafe { store_lanes(self, p) }
    }
    /// The nearest numbers of F16.
    #[inline(always)]
    fn round_f16(self) -> Self {
        round_lanes::<F16, _>(self)
    }

    /// Transposes `TILE` rows of `TILE` numbers.
    ///
    /// # Safety
    /// Rows of `TILE` numbers are readable at `source + i * source_stride` and writable at
    /// `target + i * target_stride`, and do not overlap.
    #[inline(always)]
    unsafe fn transpose(
        source: *const Self::Scalar,
        source_stride: usize,
        target: *mut Self::Scalar,
        target_stride: usize,
    ) {
        for i in 0..Self::TILE {
            for j in 0..Self::TILE {
                // SAFETY: by the contract of the function.
                unsafe { *target.add(j * target_stride + i) = *source.add(i * source_stride + j) };
            }
        }
    }

    /// Asks for the cache line at `p`, which may be anywhere.
    #[inline(always)]
    fn prefetch(p: *const Self::Scalar) {
        let _ = p;
    }

    /// Enters a job without inlining it here.
    fn call<J: Job<Self::Scalar>>(job: J);

    #[inline(always)]
    fn neg(self) -> Self {
        // Of zero, the zero of the other sign.
        Self::splat(Self::Scalar::from_f64(-0.0)).sub(self)
    }

    /// Applies a scalar function to each lane.
    #[inline(always)]
    fn map(self, f: impl Fn(Self::Scalar) -> Self::Scalar) -> Self {
        let mut lanes = [Self::Scalar::ZERO; MAX_LANES];
        // SAFETY: LANES <= MAX_LANES numbers are there to write and to read.
        unsafe {
            self.store(lanes.as_mut_ptr());
            for lane in &mut lanes[..Self::LANES] {
                *lane = f(*lane);
            }
            Self::load(lanes.as_ptr())
        }
    }

    /// Combines the lanes as a balanced tree, halves first.
    #[inline(always)]
    fn fold(self, f: impl Fn(Self::Scalar, Self::Scalar) -> Self::Scalar) -> Self::Scalar {
        let mut lanes = [Self::Scalar::ZERO; MAX_LANES];
        // SAFETY: LANES <= MAX_LANES numbers are there to write.
        unsafe { self.store(lanes.as_mut_ptr()) };
        let mut half = Self::LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] = f(lanes[i], lanes[i + half]);
            }
            half /= 2;
        }
        lanes[0]
    }

    /// Loads the first `n < LANES` lanes, the others are `rest`.
    ///
    /// # Safety
    /// `n` numbers are readable at `p`.
    #[inline(always)]
    unsafe fn load_first(p: *const Self::Scalar, n: usize, rest: Self::Scalar) -> Self {
        let mut lanes = [rest; MAX_LANES];
        for (i, lane) in lanes.iter_mut().enumerate().take(n) {
            // SAFETY: by the contract of the function.
            *lane = unsafe { *p.add(i) };
        }
        // SAFETY: LANES <= MAX_LANES numbers are there to read.
        unsafe { Self::load(lanes.as_ptr()) }
    }

    /// Stores the first `n < LANES` lanes.
    ///
    /// # Safety
    /// `n` numbers are writable at `p`.
    #[inline(always)]
    unsafe fn store_first(self, p: *mut Self::Scalar, n: usize) {
        let mut lanes = [Self::Scalar::ZERO; MAX_LANES];
        // SAFETY: LANES <= MAX_LANES numbers are there to write.
        unsafe { self.store(lanes.as_mut_ptr()) };
        for (i, lane) in lanes.iter().enumerate().take(n) {
            // SAFETY: by the contract of the function.
            unsafe { *p.add(i) = *lane };
        }
    }
}

/// Lanes of the widest vector.
pub(super) const MAX_LANES: usize = 16;

/// An instruction set that loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// As [`Isa::Avx512Bf16`], with AMX and its tiles of BF16.
    Amx,
    /// As [`Isa::Avx512`], with AVX512-BF16.
    Avx512Bf16,
    /// x86-64 with AVX-512 F, DQ, BW and VL.
    Avx512,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// Whatever the compiler targets.
    Portable,
}

impl Isa {
    /// All sets, the widest first.
    pub const ALL: [Isa; 5] = [Isa::Amx, Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Portable];

    /// The fastest set that this machine has: the widest, but AVX512-BF16 where it multiplies no
    /// faster than numbers of F32. Of an Intel Xeon of 2.6 GHz with AMX it reaches 121 Gflop/s in
    /// registers, and F32 243. That it is faster on AMD is taken as given, not measured.
    pub fn detect() -> Isa {
        let is_fast = |isa: &Isa| *isa != Isa::Avx512Bf16 || has_fast_dots();
        let found = Isa::ALL.into_iter().filter(is_fast).find(|i| i.is_available());
        found.unwrap_or(Isa::Portable)
    }

    /// Whether this machine has the set.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        match self {
            Isa::Portable => true,
            // Every machine that has the first two has the third.
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            Isa::Avx512Bf16 => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512bf16"),
            Isa::Amx => Isa::Avx512Bf16.is_available() && super::pairs::amx::is_available(),
        }
        #[cfg(not(target_arch = "x86_64"))]
        matches!(self, Isa::Portable)
    }

    /// The instruction that multiplies pairs of numbers of BF16.
    pub(super) fn pairs(self) -> Option<Pairs> {
        match self {
            Isa::Amx => Some(Pairs::Tiles),
            Isa::Avx512Bf16 => Some(Pairs::Dot),
            Isa::Avx512 | Isa::Avx2 | Isa::Portable => None,
        }
    }

    /// Runs a job with the vectors of a set that has [`Isa::pairs`].
    pub(super) fn run_pairs<S: Scalar, J: Job<S>>(self, job: J) {
        debug_assert!(self.is_available() && self.pairs().is_some(), "the set has pairs");
        S::dispatch_pairs(job);
    }

    /// Runs a job with this set's vectors.
    pub(super) fn run<S: Scalar, J: Job<S>>(self, job: J) {
        debug_assert!(self.is_available(), "an executor is made for an available set");
        S::dispatch(self, job);
    }
}

/// Whether dot products of pairs are faster than multiplications in F32, by the maker.
fn has_fast_dots() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let maker = std::arch::x86_64::__cpuid(0);
        [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// An instruction that multiplies pairs of numbers of BF16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pairs {
    /// Of AVX512-BF16.
    Dot,
    /// Of AMX.
    Tiles,
}

macro_rules! scalar_constants {
    ($float:ident) => {
        const ZERO: $float = 0.0;
        const ONE: $float = 1.0;
        const LOWEST: $float = $float::NEG_INFINITY;
        const HIGHEST: $float = $float::INFINITY;

        #[inline(always)]
        fn from_f64(x: f64) -> $float {
            x as $float
        }

        #[inline(always)]
        fn from_f32(x: f32) -> $float {
            $float::from(x)
        }

        #[inline(always)]
        fn to_f64(self) -> f64 {
            f64::from(self)
        }

        fn sin(self) -> $float {
            $float::sin(self)
        }

        fn cos(self) -> $float {
            $float::cos(self)
        }

        fn power_floor(self) -> $float {
            const MANTISSA: u32 = $float::MANTISSA_DIGITS - 1;
            // Subnormal numbers have no exponent: a larger number has the same bits below it.
            const LARGER: $float = (1_u64 << MANTISSA) as $float;
            if !self.is_finite() {
                return self;
            }
            let is_subnormal = self.abs() < $float::MIN_POSITIVE;
            let normal = if is_subnormal { self * LARGER } else { self };
            let power = $float::from_bits(normal.to_bits() >> MANTISSA << MANTISSA);
            if is_subnormal { power / LARGER } else { power }
        }

        fn pow(self, exponent: $float) -> $float {
            self.powf(exponent)
        }
    };
}

impl Scalar for f32 {
    scalar_constants!(f32);

    #[inline(always)]
    fn sticky(self) -> f32 {
        self
    }

    fn dispatch_pairs<J: Job<f32>>(job: J) {
        #[cfg(target_arch = "x86_64")]
        super::x86::F32x16::call(job);
        #[cfg(not(target_arch = "x86_64"))]
        Array::<f32>::call(job);
    }

    fn dispatch<J: Job<f32>>(isa: Isa, job: J) {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => super::x86::F32x16::call(job),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => super::x86::F32x8::call(job),
            _ => Array::<f32>::call(job),
        }
    }

    #[inline(always)]
    fn exp<V: Vector<Scalar = f32>>(x: V) -> V {
        math::exp(x)
    }

    #[inline(always)]
    fn log<V: Vector<Scalar = f32>>(x: V) -> V {
        math::log(x)
    }

    #[inline(always)]
    fn tanh<V: Vector<Scalar = f32>>(x: V) -> V {
        math::tanh(x)
    }

    #[inline(always)]
    fn erf<V: Vector<Scalar = f32>>(x: V) -> V {
        math::erf(x)
    }

    #[inline(always)]
    fn sigmoid<V: Vector<Scalar = f32>>(x: V) -> V {
        math::sigmoid(x)
    }
}

impl Scalar for f64 {
    scalar_constants!(f64);

    #[inline(always)]
    fn sticky(self) -> f32 {
        let near = self as f32;
        if f64::from(near) == self || self.is_nan() {
            return near;
        }
        let beyond = u32::from(f64::from(near).abs() > self.abs());
        f32::from_bits((near.to_bits() - beyond) | 1)
    }

    fn dispatch_pairs<J: Job<f64>>(job: J) {
        let _ = job;
        unreachable!("sums of pairs are of F32");
    }

    fn dispatch<J: Job<f64>>(isa: Isa, job: J) {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => super::x86::F64x8::call(job),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => super::x86::F64x4::call(job),
            _ => Array::<f64>::call(job),
        }
    }

    #[inline(always)]
    fn exp<V: Vector<Scalar = f64>>(x: V) -> V {
        x.map(f64::exp)
    }

    #[inline(always)]
    fn log<V: Vector<Scalar = f64>>(x: V) -> V {
        x.map(f64::ln)
    }

    #[inline(always)]
    fn tanh<V: Vector<Scalar = f64>>(x: V) -> V {
        x.map(f64::tanh)
    }

    #[inline(always)]
    fn erf<V: Vector<Scalar = f64>>(x: V) -> V {
        x.map(math::erf_f64)
    }

    #[inline(always)]
    fn sigmoid<V: Vector<Scalar = f64>>(x: V) -> V {
        x.map(|x| 1.0 / (1.0 + (-x).exp()))
    }
}

/// The portable vector: an array that the compiler may or may not put into registers.
#[derive(Clone, Copy)]
pub(super) struct Array<T>([T; 4]);

macro_rules! portable {
    ($float:ident) => {
        impl Array<$float> {
            #[inline(always)]
            fn zip(self, b: Self, f: impl Fn($float, $float) -> $float) -> Self {
                Array(std::array::from_fn(|i| f(self.0[i], b.0[i])))
            }
        }

        impl Vector for Array<$float> {
            type Scalar = $float;
            const LANES: usize = 4;
            const ROWS: usize = 4;
            const TILE: usize = 4;

            #[inline(always)]
            fn splat(x: $float) -> Self {
                Array([x; 4])
            }
            #[inline(always)]
            unsafe fn load(p: *const $float) -> Self {
                // SAFETY: by the contract of the function.
                Array(unsafe { p.cast::<[$float; 4]>().read_unaligned() })
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut $float) {
                // SAFETY: by the contract of the function.
                unsafe { p.cast::<[$float; 4]>().write_unaligned(self.0) }
            }
            #[inline(always)]
            fn add(self, b: Self) -> Self {
                self.zip(b, |a, b| a + b)
            }
            #[inline(always)]
            fn sub(self, b: Self) -> Self {
                self.zip(b, |a, b| a - b)
            }
            #[inline(always)]
            fn mul(self, b: Self) -> Self {
                self.zip(b, |a, b| a * b)
            }
            #[inline(always)]
            fn div(self, b: Self) -> Self {
                self.zip(b, |a, b| a / b)
            }
            #[inline(always)]
            fn max(self, b: Self) -> Self {
                self.zip(b, |a, b| if a > b { a } else { b })
            }
            #[inline(always)]
            fn min(self, b: Self) -> Self {
                self.zip(b, |a, b| if a < b { a } else { b })
            }
            #[inline(always)]
            fn or_nan(self, x: Self) -> Self {
                self.zip(x, |a, x| if x.is_nan() { x } else { a })
            }
            /// Rounds twice: without the instruction, one rounding costs a call per lane.
            #[inline(always)]
            fn fma(self, b: Self, c: Self) -> Self {
                self.mul(b).add(c)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                Array(self.0.map($float::sqrt))
            }
            #[inline(always)]
            fn floor(self) -> Self {
                Array(self.0.map($float::floor))
            }
            #[inline(always)]
            fn round(self) -> Self {
                Array(self.0.map($float::round_ties_even))
            }
            #[inline(always)]
            fn abs(self) -> Self {
                Array(self.0.map($float::abs))
            }
            #[inline(always)]
            fn copysign(self, b: Self) -> Self {
                self.zip(b, $float::copysign)
            }
            #[inline(always)]
            fn lt(self, b: Self) -> Self {
                self.zip(b, |a, b| if a < b { 1.0 } else { 0.0 })
            }
            #[inline(always)]
            fn le(self, b: Self) -> Self {
                self.zip(b, |a, b| if a <= b { 1.0 } else { 0.0 })
            }
            #[inline(always)]
            fn eq(self, b: Self) -> Self {
                self.zip(b, |a, b| if a == b { 1.0 } else { 0.0 })
            }
            #[inline(always)]
            fn select(condition: Self, a: Self, b: Self) -> Self {
                let lane = |i: usize| if condition.0[i] != 0.0 { a.0[i] } else { b.0[i] };
                Array(std::array::from_fn(lane))
            }
            #[inline(always)]
            fn scale(self, n: Self) -> Self {
                let power = |n: $float| f64::from_bits(((n as i64 + 1023) as u64) << 52);
                self.zip(n, |x, n| (f64::from(x) * power(n)) as $float)
            }
            #[inline(always)]
            fn split(self) -> (Self, Self) {
                let bits = self.0.map(|x| f64::from(x).to_bits());
                let one = 1.0_f64.to_bits();
                let mantissa = |b: u64| f64::from_bits((b & 0x000f_ffff_ffff_ffff) | one) as $float;
                let exponent = |b: u64| ((b >> 52) as i64 - 1023) as $float;
                (Array(bits.map(mantissa)), Array(bits.map(exponent)))
            }

            fn call<J: Job<$float>>(job: J) {
                job.run::<Self>();
            }
        }
    };
}

portable!(f32);
portable!(f64);
