//! Vectors of x86-64: AVX2 with FMA, and AVX-512.

use std::arch::x86_64::*;

use super::formats::{BF16, F16, QUIET};
use super::vector::{Job, Vector};

/// An intrinsic on values whose existence proves that the machine has the instruction.
macro_rules! now {
    ($call:expr) => {{
        // SAFETY: values of these types exist only inside jobs that were entered for their
        // instruction set; pointers are valid by the contract of the calling method.
        unsafe { $call }
    }};
}

/// Eight numbers of 32 bits.
#[derive(Clone, Copy)]
pub(super) struct F32x8(__m256);
/// Four numbers of 64 bits.
#[derive(Clone, Copy)]
pub(super) struct F64x4(__m256d);
/// Sixteen numbers of 32 bits.
#[derive(Clone, Copy)]
pub(super) struct F32x16(__m512);
/// Eight numbers of 64 bits.
#[derive(Clone, Copy)]
pub(super) struct F64x8(__m512d);

/// The methods that are one intrinsic in both sets.
macro_rules! arithmetic {
    ($scalar:ident, $lanes:literal, $splat:ident, $load:ident, $store:ident, $add:ident,
     $sub:ident, $mul:ident, $div:ident, $max:ident, $min:ident, $fma:ident, $sqrt:ident) => {
        type Scalar = $scalar;
        const LANES: usize = $lanes;

        #[inline(always)]
        fn splat(x: $scalar) -> Self {
            Self(now!($splat(x)))
        }
        #[inline(always)]
        unsafe fn load(p: *const $scalar) -> Self {
            Self(now!($load(p)))
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut $scalar) {
            now!($store(p, self.0))
        }
        #[inline(always)]
        fn add(self, b: Self) -> Self {
            Self(now!($add(self.0, b.0)))
        }
        #[inline(always)]
        fn sub(self, b: Self) -> Self {
            Self(now!($sub(self.0, b.0)))
        }
        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            Self(now!($mul(self.0, b.0)))
        }
        #[inline(always)]
        fn div(self, b: Self) -> Self {
            Self(now!($div(self.0, b.0)))
        }
        #[inline(always)]
        fn max(self, b: Self) -> Self {
            Self(now!($max(self.0, b.0)))
        }
        #[inline(always)]
        fn min(self, b: Self) -> Self {
            Self(now!($min(self.0, b.0)))
        }
        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            Self(now!($fma(self.0, b.0, c.0)))
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            Self(now!($sqrt(self.0)))
        }
    };
}

/// The methods that AVX2 spells its own way.
macro_rules! avx2 {
    ($scalar:ident, $enter:ident, $round:ident, $and:ident, $andnot:ident, $or:ident, $cmp:ident,
     $blend:ident) => {
        #[inline(always)]
        fn floor(self) -> Self {
            Self(now!($round::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(self.0)))
        }
        #[inline(always)]
        fn round(self) -> Self {
            Self(now!($round::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)))
        }
        #[inline(always)]
        fn abs(self) -> Self {
            Self(now!($andnot(Self::splat(-0.0).0, self.0)))
        }
        #[inline(always)]
        fn copysign(self, b: Self) -> Self {
            let sign = Self::splat(-0.0).0;
            Self(now!($or($andnot(sign, self.0), $and(sign, b.0))))
        }
        #[inline(always)]
        fn lt(self, b: Self) -> Self {
            Self(now!($and($cmp::<_CMP_LT_OQ>(self.0, b.0), Self::splat(1.0).0)))
        }
        #[inline(always)]
        fn le(self, b: Self) -> Self {
            Self(now!($and($cmp::<_CMP_LE_OQ>(self.0, b.0), Self::splat(1.0).0)))
        }
        #[inline(always)]
        fn eq(self, b: Self) -> Self {
            Self(now!($and($cmp::<_CMP_EQ_OQ>(self.0, b.0), Self::splat(1.0).0)))
        }
        #[inline(always)]
        fn select(condition: Self, a: Self, b: Self) -> Self {
            let zero = Self::splat(0.0).0;
            Self(now!($blend(b.0, a.0, $cmp::<_CMP_NEQ_UQ>(condition.0, zero))))
        }
        #[inline(always)]
        fn or_nan(self, x: Self) -> Self {
            Self(now!($blend(self.0, x.0, $cmp::<_CMP_UNORD_Q>(x.0, x.0))))
        }

        #[inline(always)]
        fn prefetch(p: *const $scalar) {
            now!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
        }

        fn call<J: Job<$scalar>>(job: J) {
            now!($enter(job))
        }
    };
}

/// The methods that AVX-512 spells its own way.
macro_rules! avx512 {
    ($scalar:ident, $enter:ident, $roundscale:ident, $abs:ident, $and:ident, $andnot:ident,
     $or:ident, $cmp:ident, $maskz:ident, $blend:ident, $scalef:ident, $getmant:ident,
     $getexp:ident) => {
        #[inline(always)]
        fn floor(self) -> Self {
            Self(now!($roundscale::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(self.0)))
        }
        #[inline(always)]
        fn round(self) -> Self {
            Self(now!($roundscale::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)))
        }
        #[inline(always)]
        fn abs(self) -> Self {
            Self(now!($abs(self.0)))
        }
        #[inline(always)]
        fn copysign(self, b: Self) -> Self {
            let sign = Self::splat(-0.0).0;
            Self(now!($or($andnot(sign, self.0), $and(sign, b.0))))
        }
        #[inline(always)]
        fn lt(self, b: Self) -> Self {
            Self(now!($maskz($cmp::<_CMP_LT_OQ>(self.0, b.0), Self::splat(1.0).0)))
        }
        #[inline(always)]
        fn le(self, b: Self) -> Self {
            Self(now!($maskz($cmp::<_CMP_LE_OQ>(self.0, b.0), Self::splat(1.0).0)))
        }
        #[inline(always)]
        fn eq(self, b: Self) -> Self {
            Self(now!($maskz($cmp::<_CMP_EQ_OQ>(self.0, b.0), Self::splat(1.0).0)))
        }
        #[inline(always)]
        fn select(condition: Self, a: Self, b: Self) -> Self {
            let zero = Self::splat(0.0).0;
            Self(now!($blend($cmp::<_CMP_NEQ_UQ>(condition.0, zero), b.0, a.0)))
        }
        #[inline(always)]
        fn or_nan(self, x: Self) -> Self {
            Self(now!($blend($cmp::<_CMP_UNORD_Q>(x.0, x.0), self.0, x.0)))
        }
        #[inline(always)]
        fn scale(self, n: Self) -> Self {
            Self(now!($scalef(self.0, n.0)))
        }
        #[inline(always)]
        fn split(self) -> (Self, Self) {
            let mantissa = now!($getmant::<_MM_MANT_NORM_1_2, _MM_MANT_SIGN_SRC>(self.0));
            (Self(mantissa), Self(now!($getexp(self.0))))
        }

        #[inline(always)]
        fn prefetch(p: *const $scalar) {
            now!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
        }

        fn call<J: Job<$scalar>>(job: J) {
            now!($enter(job))
        }
    };
}

#[target_feature(enable = "avx2,fma,f16c")]
fn enter_f32x8<J: Job<f32>>(job: J) {
    job.run::<F32x8>();
}

#[target_feature(enable = "avx2,fma,f16c")]
fn enter_f64x4<J: Job<f64>>(job: J) {
    job.run::<F64x4>();
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl")]
fn enter_f32x16<J: Job<f32>>(job: J) {
    job.run::<F32x16>();
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl")]
fn enter_f64x8<J: Job<f64>>(job: J) {
    job.run::<F64x8>();
}

impl Vector for F32x8 {
    const ROWS: usize = 6;
    const TILE: usize = 8;

    arithmetic!(
        f32,
        8,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_add_ps,
        _mm256_sub_ps,
        _mm256_mul_ps,
        _mm256_div_ps,
        _mm256_max_ps,
        _mm256_min_ps,
        _mm256_fmadd_ps,
        _mm256_sqrt_ps
    );
    avx2!(
        f32,
        enter_f32x8,
        _mm256_round_ps,
        _mm256_and_ps,
        _mm256_andnot_ps,
        _mm256_or_ps,
        _mm256_cmp_ps,
        _mm256_blendv_ps
    );

    #[inline(always)]
    fn scale(self, n: Self) -> Self {
        // Two factors: one alone would leave the range of exponents before the product does.
        let half = n.mul(Self::splat(0.5)).floor();
        let power = |n: Self| {
            let biased = now!(_mm256_add_epi32(_mm256_cvtps_epi32(n.0), _mm256_set1_epi32(127)));
            Self(now!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))))
        };
        self.mul(power(half)).mul(power(n.sub(half)))
    }

    #[inline(always)]
    fn split(self) -> (Self, Self) {
        let tiny = self.lt(Self::splat(f32::MIN_POSITIVE));
        let normal = Self::select(tiny, self.mul(Self::splat(8_388_608.0)), self);
        let bits = now!(_mm256_castps_si256(normal.0));
        let biased = now!(_mm256_cvtepi32_ps(_mm256_srli_epi32::<23>(bits)));
        let exponent = Self(biased).sub(Self::splat(127.0)).sub(tiny.mul(Self::splat(23.0)));
        let fraction = now!(_mm256_and_si256(bits, _mm256_set1_epi32(0x007f_ffff)));
        let mantissa = now!(_mm256_or_si256(fraction, _mm256_set1_epi32(0x3f80_0000)));
        (Self(now!(_mm256_castsi256_ps(mantissa))), exponent)
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const BF16) -> Self {
        let halves = now!(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())));
        let x = now!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves)));
        let quiet = now!(_mm256_castsi256_ps(_mm256_set1_epi32(QUIET as i32)));
        Self(now!(_mm256_or_ps(x, _mm256_and_ps(quiet, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x)))))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut BF16) {
        let upper = now!(_mm256_srli_epi32::<16>(self.upper()));
        let [low, high] =
            now!([_mm256_castsi256_si128(upper), _mm256_extracti128_si256::<1>(upper)]);
        now!(_mm_storeu_si128(p.cast(), _mm_packus_epi32(low, high)))
    }

    #[inline(always)]
    fn round_bf16(self) -> Self {
        let mask = now!(_mm256_set1_epi32(-0x1_0000));
        Self(now!(_mm256_castsi256_ps(_mm256_and_si256(self.upper(), mask))))
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const F16) -> Self {
        Self(now!(_mm256_cvtph_ps(_mm_loadu_si128(p.cast()))))
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut F16) {
        now!(_mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)))
    }

    #[inline(always)]
    fn round_f16(self) -> Self {
        Self(now!(_mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))))
    }

    #[inline(always)]
    unsafe fn transpose(source: *const f32, rows: usize, target: *mut f32, columns: usize) {
        now!(transpose_8x8(source, rows, target, columns))
    }
}

impl F32x8 {
    /// Bits whose upper halves are the nearest numbers of BF16.
    #[inline(always)]
    fn upper(self) -> __m256i {
        let bits = now!(_mm256_castps_si256(self.0));
        let odd = now!(_mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1)));
        let half = now!(_mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let near = now!(_mm256_castsi256_ps(_mm256_add_epi32(bits, half)));
        let quiet = now!(_mm256_castsi256_ps(_mm256_set1_epi32(QUIET as i32)));
        let nan = now!(_mm256_or_ps(self.0, quiet));
        let is_nan = now!(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
        now!(_mm256_castps_si256(_mm256_blendv_ps(near, nan, is_nan)))
    }
}

impl Vector for F64x4 {
    const ROWS: usize = 6;
    const TILE: usize = 4;

    arithmetic!(
        f64,
        4,
        _mm256_set1_pd,
        _mm256_loadu_pd,
        _mm256_storeu_pd,
        _mm256_add_pd,
        _mm256_sub_pd,
        _mm256_mul_pd,
        _mm256_div_pd,
        _mm256_max_pd,
        _mm256_min_pd,
        _mm256_fmadd_pd,
        _mm256_sqrt_pd
    );
    avx2!(
        f64,
        enter_f64x4,
        _mm256_round_pd,
        _mm256_and_pd,
        _mm256_andnot_pd,
        _mm256_or_pd,
        _mm256_cmp_pd,
        _mm256_blendv_pd
    );

    #[inline(always)]
    fn scale(self, _n: Self) -> Self {
        unreachable!("functions of f64 are those of the standard library")
    }

    #[inline(always)]
    fn split(self) -> (Self, Self) {
        unreachable!("functions of f64 are those of the standard library")
    }
}

impl Vector for F32x16 {
    const ROWS: usize = 12;
    const TILE: usize = 8;

    arithmetic!(
        f32,
        16,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_add_ps,
        _mm512_sub_ps,
        _mm512_mul_ps,
        _mm512_div_ps,
        _mm512_max_ps,
        _mm512_min_ps,
        _mm512_fmadd_ps,
        _mm512_sqrt_ps
    );
    avx512!(
        f32,
        enter_f32x16,
        _mm512_roundscale_ps,
        _mm512_abs_ps,
        _mm512_and_ps,
        _mm512_andnot_ps,
        _mm512_or_ps,
        _mm512_cmp_ps_mask,
        _mm512_maskz_mov_ps,
        _mm512_mask_blend_ps,
        _mm512_scalef_ps,
        _mm512_getmant_ps,
        _mm512_getexp_ps
    );

    /// An estimate of 14 bits and one step of Newton's: a quarter of the time of a division.
    #[inline(always)]
    fn recip(self) -> Self {
        let estimate = Self(now!(_mm512_rcp14_ps(self.0)));
        let error = now!(_mm512_fnmadd_ps(self.0, estimate.0, Self::splat(1.0).0));
        estimate.fma(Self(error), estimate)
    }

    #[inline(always)]
    unsafe fn transpose(source: *const f32, rows: usize, target: *mut f32, columns: usize) {
        now!(transpose_8x8(source, rows, target, columns))
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const BF16) -> Self {
        let halves = now!(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())));
        let bits = now!(_mm512_slli_epi32::<16>(halves));
        let x = now!(_mm512_castsi512_ps(bits));
        let is_nan = now!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x));
        let quiet = now!(_mm512_set1_epi32(QUIET as i32));
        Self(now!(_mm512_castsi512_ps(_mm512_mask_or_epi32(bits, is_nan, bits, quiet))))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut BF16) {
        let upper = now!(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(self.upper())));
        now!(_mm256_storeu_si256(p.cast(), upper))
    }

    #[inline(always)]
    fn round_bf16(self) -> Self {
        let mask = now!(_mm512_set1_epi32(-0x1_0000));
        Self(now!(_mm512_castsi512_ps(_mm512_and_si512(self.upper(), mask))))
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const F16) -> Self {
        Self(now!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))))
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut F16) {
        let halves = now!(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
        now!(_mm256_storeu_si256(p.cast(), halves))
    }

    #[inline(always)]
    fn round_f16(self) -> Self {
        Self(now!(_mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))))
    }

    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize, rest: f32) -> Self {
        let mask = ((1_u32 << n) - 1) as __mmask16;
        Self(now!(_mm512_mask_loadu_ps(_mm512_set1_ps(rest), mask, p)))
    }

    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, n: usize) {
        let mask = ((1_u32 << n) - 1) as __mmask16;
        now!(_mm512_mask_storeu_ps(p, mask, self.0))
    }
}

impl F32x16 {
    /// Bits whose upper halves are the nearest numbers of BF16.
    #[inline(always)]
    fn upper(self) -> __m512i {
        let bits = now!(_mm512_castps_si512(self.0));
        let odd = now!(_mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1)));
        let half = now!(_mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let near = now!(_mm512_add_epi32(bits, half));
        let is_nan = now!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0));
        now!(_mm512_mask_or_epi32(near, is_nan, bits, _mm512_set1_epi32(QUIET as i32)))
    }
}

impl Vector for F64x8 {
    const ROWS: usize = 12;
    const TILE: usize = 4;

    arithmetic!(
        f64,
        8,
        _mm512_set1_pd,
        _mm512_loadu_pd,
        _mm512_storeu_pd,
        _mm512_add_pd,
        _mm512_sub_pd,
        _mm512_mul_pd,
        _mm512_div_pd,
        _mm512_max_pd,
        _mm512_min_pd,
        _mm512_fmadd_pd,
        _mm512_sqrt_pd
    );
    avx512!(
        f64,
        enter_f64x8,
        _mm512_roundscale_pd,
        _mm512_abs_pd,
        _mm512_and_pd,
        _mm512_andnot_pd,
        _mm512_or_pd,
        _mm512_cmp_pd_mask,
        _mm512_maskz_mov_pd,
        _mm512_mask_blend_pd,
        _mm512_scalef_pd,
        _mm512_getmant_pd,
        _mm512_getexp_pd
    );
}

/// Transposes 8 rows of 8 numbers: pairs, then quads, then halves.
#[inline(always)]
unsafe fn transpose_8x8(source: *const f32, rows: usize, target: *mut f32, columns: usize) {
    // SAFETY: the caller runs with AVX and gives eight readable and eight writable rows.
    unsafe {
        let r: [__m256; 8] = std::array::from_fn(|i| _mm256_loadu_ps(source.add(i * rows)));
        let (a0, a1) = (_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
        let (a2, a3) = (_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
        let (a4, a5) = (_mm256_unpacklo_ps(r[4], r[5]), _mm256_unpackhi_ps(r[4], r[5]));
        let (a6, a7) = (_mm256_unpacklo_ps(r[6], r[7]), _mm256_unpackhi_ps(r[6], r[7]));
        let (b0, b1) = (_mm256_shuffle_ps::<0x44>(a0, a2), _mm256_shuffle_ps::<0xee>(a0, a2));
        let (b2, b3) = (_mm256_shuffle_ps::<0x44>(a1, a3), _mm256_shuffle_ps::<0xee>(a1, a3));
        let (b4, b5) = (_mm256_shuffle_ps::<0x44>(a4, a6), _mm256_shuffle_ps::<0xee>(a4, a6));
        let (b6, b7) = (_mm256_shuffle_ps::<0x44>(a5, a7), _mm256_shuffle_ps::<0xee>(a5, a7));
        _mm256_storeu_ps(target, _mm256_permute2f128_ps::<0x20>(b0, b4));
        _mm256_storeu_ps(target.add(columns), _mm256_permute2f128_ps::<0x20>(b1, b5));
        _mm256_storeu_ps(target.add(2 * columns), _mm256_permute2f128_ps::<0x20>(b2, b6));
        _mm256_storeu_ps(target.add(3 * columns), _mm256_permute2f128_ps::<0x20>(b3, b7));
        _mm256_storeu_ps(target.add(4 * columns), _mm256_permute2f128_ps::<0x31>(b0, b4));
        _mm256_storeu_ps(target.add(5 * columns), _mm256_permute2f128_ps::<0x31>(b1, b5));
        _mm256_storeu_ps(target.add(6 * columns), _mm256_permute2f128_ps::<0x31>(b2, b6));
        _mm256_storeu_ps(target.add(7 * columns), _mm256_permute2f128_ps::<0x31>(b3, b7));
    }
}
