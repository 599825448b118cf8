//! Instructions of x86-64 for products of integers: `vpmaddwd`, and those of VNNI.
//!
//! `vpmaddubsw`, which multiplies bytes without VNNI, adds two products in 16 bits and saturates:
//! it is exact for operands of 7 bits only, and is not used.

use std::arch::x86_64::*;

use super::steps::{Job, Step};
use crate::cpu::x86::{F32x8, F32x16};

/// An intrinsic on values whose existence proves that the machine has the instruction.
macro_rules! now {
    ($call:expr) => {{
        // SAFETY: values of these types exist only inside jobs that were entered for their
        // instructions; pointers are valid by the contract of the calling method.
        unsafe { $call }
    }};
}

macro_rules! steps {
    ($($(#[$doc:meta])* $name:ident($vector:ty, $lanes:literal, $rows:literal, $packing:ty)
      of $number:ty, offset $offset:literal, $features:literal, $enter:ident,
      $splat:ident, $load:ident, $store:ident, $add:ident,
      |$sum:ident, $row:ident, $columns:ident| $step:expr;
    )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name($vector);

        impl Step for $name {
            type Number = $number;
            type Packing = $packing;
            type Groups = [i32; $lanes];
            const LANES: usize = $lanes;
            const ROWS: usize = $rows;
            const IS_OFFSET: bool = $offset;

            #[inline(always)]
            fn splat(group: i32) -> Self {
                Self(now!($splat(group)))
            }
            #[inline(always)]
            fn of(groups: [i32; $lanes]) -> Self {
                // SAFETY: both are as many integers.
                Self(unsafe { std::mem::transmute::<[i32; $lanes], $vector>(groups) })
            }
            #[inline(always)]
            unsafe fn load(p: *const i32) -> Self {
                Self(now!($load(p.cast())))
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut i32) {
                now!($store(p.cast(), self.0))
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                Self(now!($add(self.0, other.0)))
            }
            #[inline(always)]
            fn step(self, row: Self, columns: Self) -> Self {
                let ($sum, $row, $columns) = (self.0, row.0, columns.0);
                Self(now!($step))
            }
            fn enter<J: Job>(job: J) {
                now!($enter(job))
            }
        }

        /// # Safety
        ///
        /// The machine has the instructions.
        #[target_feature(enable = $features)]
        unsafe fn $enter<J: Job>(job: J) {
            job.run::<$name>();
        }
    )*};
}

steps! {
    /// `vpmaddwd` of AVX2: pairs of 16 bits.
    Words8(__m256i, 8, 6, F32x8) of i16, offset false, "avx2,fma,f16c", enter_words8,
    _mm256_set1_epi32, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_add_epi32,
    |sum, row, columns| _mm256_add_epi32(sum, _mm256_madd_epi16(row, columns));

    /// `vpdpwssd` of AVX-VNNI: the same in one instruction.
    VnniWords8(__m256i, 8, 6, F32x8) of i16, offset false, "avx2,fma,f16c,avxvnni",
    enter_vnni_words8, _mm256_set1_epi32, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_add_epi32,
    |sum, row, columns| _mm256_dpwssd_avx_epi32(sum, row, columns);

    /// `vpdpbusd` of AVX-VNNI: four unsigned bytes by four signed ones.
    VnniBytes8(__m256i, 8, 6, F32x8) of i8, offset true, "avx2,fma,f16c,avxvnni", enter_vnni_bytes8,
    _mm256_set1_epi32, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_add_epi32,
    |sum, row, columns| _mm256_dpbusd_avx_epi32(sum, row, columns);

    /// `vpmaddwd` of AVX-512 BW.
    Words16(__m512i, 16, 12, F32x16) of i16, offset false, "avx512f,avx512bw,avx512vl,avx512dq",
    enter_words16, _mm512_set1_epi32, _mm512_loadu_si512, _mm512_storeu_si512,
    _mm512_add_epi32, |sum, row, columns| _mm512_add_epi32(sum, _mm512_madd_epi16(row, columns));

    /// `vpdpwssd` of AVX512-VNNI.
    VnniWords16(__m512i, 16, 12, F32x16) of i16, offset false,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni",
    enter_vnni_words16, _mm512_set1_epi32, _mm512_loadu_si512, _mm512_storeu_si512,
    _mm512_add_epi32, |sum, row, columns| _mm512_dpwssd_epi32(sum, row, columns);

    /// `vpdpbusd` of AVX512-VNNI.
    VnniBytes16(__m512i, 16, 12, F32x16) of i8, offset true,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni",
    enter_vnni_bytes16, _mm512_set1_epi32, _mm512_loadu_si512, _mm512_storeu_si512,
    _mm512_add_epi32, |sum, row, columns| _mm512_dpbusd_epi32(sum, row, columns);
}
