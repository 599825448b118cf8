//! Element types of ONNX, and how each is held: by value, in a type that the module computes in.
//!
//! Numbers of fewer than 32 bits are computed in f32 or i32, and the results of each operator are
//! rounded to their type, or wrapped: once, as an implementation with wide registers does it.

use crate::DType;

/// A type of elements that ONNX has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    /// IEEE binary32.
    F32,
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 16 bits.
    U16,
    /// Signed, 16 bits.
    I16,
    /// Signed, 32 bits.
    I32,
    /// Signed, 64 bits.
    I64,
    /// True or false.
    Bool,
    /// IEEE binary16.
    F16,
    /// IEEE binary64.
    F64,
    /// Unsigned, 32 bits.
    U32,
    /// Unsigned, 64 bits.
    U64,
    /// The upper half of binary32.
    BF16,
    /// Four bits of exponent, three of mantissa, no infinities.
    F8E4M3,
    /// The same with another bias, and no negative zero.
    F8E4M3Z,
    /// Five bits of exponent, two of mantissa.
    F8E5M2,
    /// The same with another bias, no infinities and no negative zero.
    F8E5M2Z,
    /// Unsigned, 4 bits.
    U4,
    /// Signed, 4 bits.
    I4,
    /// Two bits of exponent, one of mantissa: neither infinities nor NaN.
    F4E2M1,
    /// A power of two.
    F8E8M0,
    /// Unsigned, 2 bits.
    U2,
    /// Signed, 2 bits.
    I2,
}

/// What numbers a narrow floating-point type has.
#[derive(Clone, Copy)]
pub(super) struct Format {
    /// Bits of a significand, the leading one included.
    pub(super) precision: i32,
    /// The exponent of the smallest normal number.
    pub(super) least: i32,
    /// The largest number.
    pub(super) most: f64,
    pub(super) has_infinity: bool,
    pub(super) has_nan: bool,
    pub(super) has_negative_zero: bool,
}

impl Element {
    /// The type of ONNX's number for it.
    ///
    /// # Errors
    /// The name of a type that is not supported.
    pub(super) fn of(number: i32) -> Result<Element, String> {
        Ok(match number {
            1 => Element::F32,
            2 => Element::U8,
            3 => Element::I8,
            4 => Element::U16,
            5 => Element::I16,
            6 => Element::I32,
            7 => Element::I64,
            9 => Element::Bool,
            10 => Element::F16,
            11 => Element::F64,
            12 => Element::U32,
            13 => Element::U64,
            16 => Element::BF16,
            17 => Element::F8E4M3,
            18 => Element::F8E4M3Z,
            19 => Element::F8E5M2,
            20 => Element::F8E5M2Z,
            21 => Element::U4,
            22 => Element::I4,
            23 => Element::F4E2M1,
            24 => Element::F8E8M0,
            25 => Element::U2,
            26 => Element::I2,
            0 => return Err("elements of type undefined".to_owned()),
            8 => return Err("elements of type string".to_owned()),
            14 => return Err("elements of type complex64".to_owned()),
            15 => return Err("elements of type complex128".to_owned()),
            _ => return Err(format!("elements of type number {number}")),
        })
    }

    /// The type whose elements a type of modules has.
    pub(super) fn natural(dtype: DType) -> Element {
        match dtype {
            DType::F64 => Element::F64,
            DType::F32 => Element::F32,
            DType::BF16 => Element::BF16,
            DType::F16 => Element::F16,
            DType::F8E4M3 => Element::F8E4M3,
            DType::F8E5M2 => Element::F8E5M2,
            DType::I8 => Element::I8,
            DType::I32 => Element::I32,
            DType::I64 => Element::I64,
            DType::U32 => Element::U32,
            DType::Bool => Element::Bool,
        }
    }

    /// The type in which it is computed.
    #[expect(clippy::wildcard_enum_match_arm, reason = "small types have formats or ranges")]
    pub fn carrier(self) -> DType {
        match self {
            Element::F64 => DType::F64,
            Element::I64 | Element::U64 => DType::I64,
            Element::U32 => DType::U32,
            Element::Bool => DType::Bool,
            Element::I32 => DType::I32,
            _ if self.integer().is_some() => DType::I32,
            _ => DType::F32,
        }
    }

    /// Whether it is computed in a wider type than its own.
    pub fn is_carried(self) -> bool {
        Element::natural(self.carrier()) != self
    }

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Element::F32 => "f32",
            Element::U8 => "u8",
            Element::I8 => "i8",
            Element::U16 => "u16",
            Element::I16 => "i16",
            Element::I32 => "i32",
            Element::I64 => "i64",
            Element::Bool => "bool",
            Element::F16 => "f16",
            Element::F64 => "f64",
            Element::U32 => "u32",
            Element::U64 => "u64",
            Element::BF16 => "bf16",
            Element::F8E4M3 => "f8e4m3fn",
            Element::F8E4M3Z => "f8e4m3fnuz",
            Element::F8E5M2 => "f8e5m2",
            Element::F8E5M2Z => "f8e5m2fnuz",
            Element::U4 => "u4",
            Element::I4 => "i4",
            Element::F4E2M1 => "f4e2m1",
            Element::F8E8M0 => "f8e8m0",
            Element::U2 => "u2",
            Element::I2 => "i2",
        }
    }

    /// Bits of an element in a file.
    pub fn bits(self) -> usize {
        match self {
            Element::U2 | Element::I2 => 2,
            Element::U4 | Element::I4 | Element::F4E2M1 => 4,
            Element::U8
            | Element::I8
            | Element::Bool
            | Element::F8E4M3
            | Element::F8E4M3Z
            | Element::F8E5M2
            | Element::F8E5M2Z
            | Element::F8E8M0 => 8,
            Element::U16 | Element::I16 | Element::F16 | Element::BF16 => 16,
            Element::F32 | Element::I32 | Element::U32 => 32,
            Element::F64 | Element::I64 | Element::U64 => 64,
        }
    }

    /// The bits and the sign of an integer type below 32 bits.
    pub(super) fn integer(self) -> Option<(u32, bool)> {
        let is_signed = matches!(self, Element::I8 | Element::I16 | Element::I4 | Element::I2);
        let is_unsigned = matches!(self, Element::U8 | Element::U16 | Element::U4 | Element::U2);
        (is_signed || is_unsigned).then_some((self.bits() as u32, is_signed))
    }

    /// The least and the largest number of an integer type below 64 bits.
    #[expect(clippy::wildcard_enum_match_arm, reason = "of other types the bits tell")]
    pub(super) fn range(self) -> Option<(f64, f64)> {
        match self {
            Element::I32 => Some((i32::MIN.into(), i32::MAX.into())),
            Element::U32 => Some((0.0, u32::MAX.into())),
            _ => self.integer().map(|(bits, is_signed)| match is_signed {
                true => (-f64::from(1 << (bits - 1)), f64::from((1 << (bits - 1)) - 1)),
                false => (0.0, f64::from((1 << bits) - 1)),
            }),
        }
    }

    /// What numbers it has, where it is a narrow floating-point type.
    #[expect(clippy::wildcard_enum_match_arm, reason = "other types are none")]
    pub(super) fn format(self) -> Option<Format> {
        let format = |precision, least, most, infinity, nan, negative_zero| {
            let (has_infinity, has_nan, has_negative_zero) = (infinity, nan, negative_zero);
            Some(Format { precision, least, most, has_infinity, has_nan, has_negative_zero })
        };
        match self {
            Element::F16 => format(11, -14, 65504.0, true, true, true),
            Element::BF16 => {
                format(8, -126, f64::from(f32::from_bits(0x7f7f_0000)), true, true, true)
            }
            Element::F8E4M3 => format(4, -6, 448.0, false, true, true),
            Element::F8E4M3Z => format(4, -7, 240.0, false, true, false),
            Element::F8E5M2 => format(3, -14, 57344.0, true, true, true),
            Element::F8E5M2Z => format(3, -15, 57344.0, false, true, false),
            Element::F4E2M1 => format(2, 0, 6.0, false, false, true),
            _ => None,
        }
    }

    /// The least and the largest number of an integer type or of truth values, as they are held:
    /// of `u64` the largest is held as minus one.
    #[expect(clippy::wildcard_enum_match_arm, reason = "of other types the range tells")]
    pub(super) fn bounds(self) -> Option<(i64, i64)> {
        match self {
            Element::I64 => Some((i64::MIN, i64::MAX)),
            Element::U64 => Some((0, -1)),
            Element::Bool => Some((0, 1)),
            _ => self.range().map(|(low, high)| (low as i64, high as i64)),
        }
    }

    /// The nearest number that a floating-point type has; none of a number beyond its largest, and
    /// of infinities and what is no number where it has none.
    pub(super) fn nearest(self, x: f64) -> Option<f64> {
        if self == Element::F8E8M0 {
            let is_power = x.is_normal() && x > 0.0 && x.log2().fract() == 0.0;
            return (x.is_nan() || is_power && x.log2().abs() <= 127.0).then_some(x);
        }
        let Some(format) = self.format() else {
            let near = if self == Element::F64 { x } else { f64::from(x as f32) };
            return (near.is_finite() || !x.is_finite()).then_some(near);
        };
        let near = format.nearest(x);
        let is_there = match (x.is_nan(), x.is_infinite()) {
            (true, _) => format.has_nan,
            (_, true) => format.has_infinity,
            // Where nothing is beyond the largest number, it is the nearest to all of them.
            (false, false) => near.is_finite() && (format.has_nan || x.abs() <= format.most),
        };
        is_there.then_some(near)
    }

    /// The number that bits of a narrow floating-point type mean.
    fn float(self, bits: u32) -> f32 {
        if self == Element::F8E8M0 {
            let power = f64::from(bits as i32 - 127).exp2();
            return if bits == 255 { f32::NAN } else { power as f32 };
        }
        let Some(Format { precision, least, has_infinity, has_nan, has_negative_zero, .. }) =
            self.format()
        else {
            return f32::NAN;
        };
        let (width, fraction_bits) = (self.bits() as u32, (precision - 1) as u32);
        let sign = bits >> (width - 1) & 1;
        let magnitude = bits & ((1 << (width - 1)) - 1);
        let (exponent, fraction) = (magnitude >> fraction_bits, magnitude % (1 << fraction_bits));
        let last = (1 << (width - 1 - fraction_bits)) - 1;
        let is_special = match (has_infinity, has_negative_zero) {
            (true, _) => exponent == last,
            (false, true) => has_nan && magnitude == (1 << (width - 1)) - 1,
            (false, false) => sign == 1 && magnitude == 0,
        };
        if is_special && has_infinity && fraction == 0 {
            return if sign == 1 { f32::NEG_INFINITY } else { f32::INFINITY };
        }
        if is_special {
            return f32::NAN;
        }
        let ulp = f64::from(least - precision + 1).exp2();
        let significand = if exponent == 0 { fraction } else { fraction + (1 << fraction_bits) };
        let scale = f64::from(exponent.saturating_sub(1)).exp2();
        let number = f64::from(significand) * scale * ulp;
        (if sign == 1 { -number } else { number }) as f32
    }

    /// The numbers that the bytes of a narrow type mean.
    pub(super) fn numbers(self, bytes: &[u8], count: usize) -> Vec<f64> {
        let width = self.bits();
        let mask = ((1_u64 << width) - 1) as u32;
        let bits = |at: usize| {
            let (byte, shift) = (at * width / 8, at * width % 8);
            let low = u32::from(bytes[byte]) >> shift;
            let high = if width == 16 { u32::from(bytes[byte + 1]) << 8 } else { 0 };
            (low | high) & mask
        };
        let number = |at: usize| match self.integer() {
            Some((width, true)) => f64::from(((bits(at) << (32 - width)) as i32) >> (32 - width)),
            Some((_, false)) => f64::from(bits(at)),
            None => f64::from(self.float(bits(at))),
        };
        (0..count).map(number).collect()
    }
}

impl Format {
    /// The nearest number, ties to even: see [`rounded`].
    fn nearest(self, x: f64) -> f64 {
        let ulp = x.abs().max(f64::from(self.least).exp2()).log2().floor();
        let ulp = (ulp - f64::from(self.precision - 1)).exp2();
        let near = (x / ulp).round_ties_even() * ulp;
        match (x.is_finite(), near.abs() > self.most) {
            (true, false) => near,
            (true, true) if self.has_infinity => f64::INFINITY.copysign(x),
            (true, true) if self.has_nan => f64::NAN,
            (true, true) => self.most.copysign(x),
            (false, _) => x,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::narrowing::narrowed;
    use super::super::site::Site;
    use super::*;
    use crate::Tensor;

    #[test]
    fn bits_mean_the_numbers_of_their_type() {
        let of = |element: Element, bits: u32| element.float(bits);
        assert_eq!([of(Element::F16, 0x3c00), of(Element::F16, 0x0001)], [1.0, 2.0_f32.powi(-24)]);
        assert_eq!(of(Element::F16, 0xfc00), f32::NEG_INFINITY);
        assert_eq!([of(Element::BF16, 0x3f80), of(Element::BF16, 0xc040)], [1.0, -3.0]);
        assert_eq!([of(Element::F8E4M3, 0x7e), of(Element::F8E4M3, 0x01)], [448.0, 0.001_953_125]);
        assert!(of(Element::F8E4M3, 0xff).is_nan() && of(Element::F8E4M3Z, 0x80).is_nan());
        assert_eq!([of(Element::F8E4M3Z, 0x7f), of(Element::F8E5M2Z, 0x7f)], [240.0, 57344.0]);
        assert_eq!(
            [of(Element::F8E5M2, 0x7b), of(Element::F8E5M2, 0x7c)],
            [57344.0, f32::INFINITY]
        );
        let all: Vec<f32> = (0..8).map(|bits| of(Element::F4E2M1, bits)).collect();
        assert_eq!(all, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    }

    #[test]
    fn small_integers_are_packed_from_the_low_bits_on() {
        assert_eq!(Element::I4.numbers(&[0x8f], 2), [-1.0, -8.0]);
        assert_eq!(Element::U2.numbers(&[0b1101_1000], 3), [0.0, 2.0, 1.0]);
        assert_eq!(Element::I16.numbers(&[0xff, 0xff, 1, 0], 2), [-1.0, 1.0]);
    }

    /// The number of a type that is nearest, of two the one with an even last bit, found by looking
    /// at all of them: no formula.
    fn looked_up(element: Element, all: &[(f64, u32)], x: f64) -> f64 {
        let most = all.last().map_or(0.0, |(number, _)| *number);
        let last = all[all.len() - 2].0;
        // What rounds to one step beyond the largest is beyond.
        if x.abs() >= most + (most - last) / 2.0 {
            let format = element.format().expect("a floating-point type");
            let beyond = if format.has_infinity { f64::INFINITY } else { f64::NAN };
            return if format.has_nan { beyond.copysign(x) } else { most.copysign(x) };
        }
        let distance = |(number, _): &&(f64, u32)| (number - x.abs()).abs();
        let least = all.iter().map(|one| distance(&one)).fold(f64::INFINITY, f64::min);
        let mut near = all.iter().filter(|one| distance(one) == least);
        let (first, second) = (near.next(), near.next());
        let found = match (first, second) {
            (Some((_, bits)), Some(second)) if bits % 2 != 0 => Some(second),
            (first, _) => first,
        };
        found.map_or(0.0, |(number, _)| *number).copysign(x)
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest_of_their_type() {
        let elements = [
            Element::F16,
            Element::BF16,
            Element::F8E4M3,
            Element::F8E4M3Z,
            Element::F8E5M2,
            Element::F8E5M2Z,
            Element::F4E2M1,
        ];
        for element in elements {
            let count = 1_u32 << (element.bits() - 1);
            let number = |bits: u32| (f64::from(element.float(bits)), bits);
            let all: Vec<(f64, u32)> =
                (0..count).map(number).filter(|(number, _)| number.is_finite()).collect();
            // All numbers of small types, some of large ones; what lies between; ties.
            let step = (all.len() / 97).max(1);
            let mut numbers = vec![0.0, 1e-300, 1e9, -1e9, 3.0e38, 1.0 / 3.0];
            for pair in all.windows(2).step_by(step) {
                let (low, high) = (pair[0].0, pair[1].0);
                numbers.extend([low, (low + high) / 2.0, low + (high - low) * 0.501, -high]);
            }
            let most = all[all.len() - 1].0;
            numbers.extend([most, -most, most * 1.01, most * 1.5]);
            let x = Tensor::f64(&[numbers.len()], numbers.clone());
            let mut module = crate::Module::new("m");
            let mut b = crate::build::Builder::new(&mut module, "f", crate::Kind::Layer);
            let id = b.param("x", x.ty());
            let node = super::super::proto::NodeProto::default();
            let mut s = Site::new(&mut b, &node, 23, Vec::new(), Vec::new(), "y".to_owned());
            let y = narrowed(&mut s, id, element).expect("it is translated");
            b.finish(&[y]);
            let found =
                crate::eval::eval(&module, "f", std::slice::from_ref(&x)).expect("it evaluates");
            let format = element.format().expect("a floating-point type");
            let scalar: Vec<f64> = numbers.iter().map(|x| format.nearest(*x)).collect();
            for ((x, found), scalar) in numbers.iter().zip(found[0].to_f64()).zip(scalar) {
                let wanted = looked_up(element, &all, *x);
                let same = |y: f64| y == wanted || (y.is_nan() && wanted.is_nan());
                let name = element.name();
                assert!(same(found), "{name} of {x:e}: {found:e}, not {wanted:e}");
                assert!(same(scalar), "{name} of {x:e}: {scalar:e}, not {wanted:e}");
            }
        }
    }
}
