//! The numbers of narrow floating-point types: rounding to them, and their bits.
//!
//! Every conversion rounds once, to nearest, ties to even. What is beyond the largest number
//! becomes infinite, or no number in [`DType::F8E4M3`], which has no infinities (the formats of
//! OCP's 8-bit specification, 2023, without saturation). Subnormal numbers are kept.

use std::cmp::Ordering;

use half::{bf16, f16};

use crate::DType;

/// The nearest number of an element type to `x`, one that is no integer.
///
/// # Panics
/// When the type is one of integers.
pub fn nearest(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F64 => x,
        DType::F32 => f64::from(x as f32),
        DType::BF16 => bf16::from_f32(odd(x)).to_f64(),
        DType::F16 => f16::from_f32(odd(x)).to_f64(),
        DType::F8E4M3 | DType::F8E5M2 => decode(dtype, encode(dtype, x)),
        DType::I8 | DType::I32 | DType::I64 | DType::U32 | DType::Bool => {
            panic!("{dtype} is no floating-point type")
        }
    }
}

/// The nearest number of a narrow type to a number of binary32.
///
/// # Panics
/// As [`nearest`].
pub fn round(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::F64
        | DType::F32
        | DType::F8E4M3
        | DType::F8E5M2
        | DType::I8
        | DType::I32
        | DType::I64
        | DType::U32
        | DType::Bool => nearest(dtype, f64::from(x)) as f32,
    }
}

/// The nearest number of TF32, which has the exponents of binary32 and 10 bits of mantissa; of two
/// that are as near the one farther from zero, as `cvt.rna.tf32.f32` of PTX rounds. What is no
/// number stays so.
pub fn tf32(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    f32::from_bits((x.to_bits() + 0x1000) & !0x1fff)
}

/// The bits of the nearest number of a narrow type.
///
/// # Panics
/// When the type is not narrow.
pub fn encode(dtype: DType, x: f64) -> u16 {
    match dtype {
        DType::BF16 => bf16::from_f32(odd(x)).to_bits(),
        DType::F16 => f16::from_f32(odd(x)).to_bits(),
        DType::F8E4M3 => encode_8(dtype, x, 0x7e, 0x7f),
        DType::F8E5M2 => encode_8(dtype, x, 0x7b, 0x7c),
        DType::F64
        | DType::F32
        | DType::I8
        | DType::I32
        | DType::I64
        | DType::U32
        | DType::Bool => panic!("{dtype} is not narrow"),
    }
}

/// The number that bits of a narrow type mean.
///
/// # Panics
/// As [`encode`].
pub fn decode(dtype: DType, bits: u16) -> f64 {
    match dtype {
        DType::BF16 => bf16::from_bits(bits).to_f64(),
        DType::F16 => f16::from_bits(bits).to_f64(),
        DType::F8E4M3 => decode_e4m3(bits),
        // The upper byte of an f16.
        DType::F8E5M2 => f16::from_bits(bits << 8).to_f64(),
        DType::F64
        | DType::F32
        | DType::I8
        | DType::I32
        | DType::I64
        | DType::U32
        | DType::Bool => panic!("{dtype} is not narrow"),
    }
}

/// The number of binary32 next to `x`, of two the one whose last bit is set, so that it is on the
/// same side of every number with fewer bits: `half` drops the lower half of binary64 before it
/// rounds.
fn odd(x: f64) -> f32 {
    let near = x as f32;
    let exact = f64::from(near);
    if exact == x || x.is_nan() {
        return near;
    }
    let below = near.to_bits() - u32::from(exact.abs() > x.abs());
    f32::from_bits(below | 1)
}

/// 1 sign, 4 exponent (bias 7), 3 mantissa bits; the last code of each sign is not a number.
fn decode_e4m3(bits: u16) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2_f64.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The nearest of the codes `0..=last`, whose values ascend; beyond that is `overflow`.
fn encode_8(dtype: DType, x: f64, last: u16, overflow: u16) -> u16 {
    let sign = u16::from(x.is_sign_negative()) << 7;
    let magnitude = x.abs();
    if magnitude.is_nan() {
        return sign | 0x7f;
    }
    let value = |code| decode(dtype, code);
    // The largest code at or below, by bisection; codes 0..=last, `low` always qualifies.
    let (mut low, mut high) = (0, last + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if value(middle) <= magnitude { low = middle } else { high = middle }
    }
    let below = value(low);
    let above = if low < last { value(low + 1) } else { 2.0 * below - value(low - 1) };
    let up = match (magnitude - below).partial_cmp(&(above - magnitude)) {
        Some(Ordering::Greater) => true,
        Some(Ordering::Equal) => low % 2 == 1,
        Some(Ordering::Less) | None => false,
    };
    let code = low + u16::from(up);
    sign | if code > last { overflow } else { code }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::uniform;

    const NARROW: [DType; 4] = [DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2];

    /// All codes of a type that mean numbers, in the order of these.
    fn codes(dtype: DType) -> Vec<u16> {
        let last = if dtype.size() == 1 { 0xff } else { 0xffff };
        let mut codes: Vec<u16> = (0..=last).filter(|c| decode(dtype, *c).is_finite()).collect();
        codes.sort_by(|a, b| decode(dtype, *a).total_cmp(&decode(dtype, *b)));
        codes
    }

    #[test]
    fn every_code_comes_back() {
        for dtype in NARROW {
            for code in codes(dtype) {
                assert_eq!(encode(dtype, decode(dtype, code)), code, "{dtype} {code:#x}");
                let number = decode(dtype, code);
                assert_eq!(nearest(dtype, number), number);
                assert_eq!(f64::from(round(dtype, number as f32)), number);
            }
        }
    }

    #[test]
    fn numbers_between_two_go_to_the_nearer_and_ties_to_even() {
        for dtype in NARROW {
            for pair in codes(dtype).windows(2) {
                let [low, high] = [decode(dtype, pair[0]), decode(dtype, pair[1])];
                let middle = (low + high) / 2.0;
                let even = if pair[0] % 2 == 0 { low } else { high };
                assert_eq!(nearest(dtype, middle), even, "{dtype} between {low} and {high}");
                assert_eq!(nearest(dtype, middle.next_down()), low);
                assert_eq!(nearest(dtype, middle.next_up()), high);
                let share = f64::from(uniform(7, u64::from(pair[0])));
                let (x, near) = (low + share * (high - low), if share < 0.5 { low } else { high });
                assert!(share == 0.5 || nearest(dtype, x) == near, "{dtype} {x}");
            }
        }
    }

    #[test]
    fn what_is_beyond_overflows_as_the_format_says() {
        for (dtype, most, first) in [
            (DType::BF16, decode(DType::BF16, 0x7f7f), 2_f64.powi(128) - 2_f64.powi(119)),
            (DType::F16, 65504.0, 65520.0),
            (DType::F8E5M2, 57344.0, 61440.0),
        ] {
            for sign in [1.0, -1.0] {
                assert_eq!(nearest(dtype, sign * first), sign * f64::INFINITY, "{dtype}");
                assert_eq!(nearest(dtype, sign * f64::next_down(first)), sign * most, "{dtype}");
                assert_eq!(nearest(dtype, sign * f64::INFINITY), sign * f64::INFINITY);
            }
        }
        assert_eq!(nearest(DType::F8E4M3, -464.0), -448.0);
        for beyond in [464.0_f64.next_up(), f64::INFINITY, f64::NAN] {
            assert!(nearest(DType::F8E4M3, beyond).is_nan());
        }
        for dtype in NARROW {
            assert!(nearest(dtype, f64::NAN).is_nan() && round(dtype, f32::NAN).is_nan());
        }
    }

    #[test]
    fn single_precision_rounds_as_double_does() {
        for dtype in NARROW {
            for at in 0..100_000 {
                let bits = (f64::from(uniform(11, at)) * 4_294_967_296.0) as u32;
                let x = f32::from_bits(bits);
                let wide = nearest(dtype, f64::from(x));
                let same = f64::from(round(dtype, x)).to_bits() == wide.to_bits();
                assert!(same || wide.is_nan() && x.is_nan(), "{dtype} {x}");
            }
        }
    }
}
