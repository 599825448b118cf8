//! Operators on the bits of integers, by arithmetic: quotients by two are rounded down, so that
//! they are shifts of numbers in two's complement.

use super::element::Element;
use super::site::{Made, Site, Translated};
use super::unsigned::halved;
use crate::module::ValueId;
use crate::op::{Binary, Comparison, Unary};
use crate::{DType, Tensor};

/// The bits of an operand's type, and whether it has a sign.
#[expect(clippy::wildcard_enum_match_arm, reason = "other types are smaller")]
fn width(s: &Site, at: usize) -> Result<(u32, bool), String> {
    let element = s.element(at).ok_or_else(|| format!("operand {at} is missing"))?;
    match element {
        Element::I32 => Ok((32, true)),
        Element::U32 => Ok((32, false)),
        Element::I64 => Ok((64, true)),
        Element::U64 => Ok((64, false)),
        other => other.integer().ok_or_else(|| format!("elements of type {}", other.name())),
    }
}

/// Of unsigned numbers zeros come in, of signed ones the sign; nothing else is left where the shift
/// is negative, or as far as the type has bits.
pub(super) fn shift(s: &mut Site) -> Translated {
    let (bits, is_signed) = width(s, 0)?;
    let aligned = s.aligned(&s.all())?;
    let [x, by] = aligned[..] else { return Err("not two operands".to_owned()) };
    let zero = s.number(0.0, x)?;
    let is_inside = is_shift(s, by, bits)?;
    Ok(vec![match s.text("direction", "").as_str() {
        "LEFT" => {
            let power = power_of_two(s, by, bits)?;
            let moved = s.mul(x, power)?;
            s.select(is_inside, moved, zero)?
        }
        "RIGHT" => shift_right(s, x, by, bits, is_signed)?,
        other => return Err(format!("direction `{other}`")),
    }])
}

/// Whether a shift is not negative, and by less than all bits.
fn is_shift(s: &mut Site, by: ValueId, bits: u32) -> Made {
    let (none, limit) = (s.number(0.0, by)?, s.number(f64::from(bits), by)?);
    let is_some = s.compare(Comparison::Le, none, by)?;
    let is_below = s.compare(Comparison::Lt, by, limit)?;
    s.select(is_some, is_below, is_some)
}

fn shift_right(s: &mut Site, x: ValueId, by: ValueId, bits: u32, is_signed: bool) -> Made {
    let zero = s.number(0.0, by)?;
    let is_inside = is_shift(s, by, bits)?;
    // The first step apart, so that the divisor is below the largest power of two.
    let is_none = s.compare(Comparison::Eq, by, zero)?;
    let less = s.with(Binary::Sub, by, 1.0)?;
    let rest = s.select(is_none, zero, less)?;
    let most = s.number(f64::from(bits - 2), by)?;
    let rest = s.binary(Binary::Min, rest, most)?;
    let power = power_of_two(s, rest, bits)?;
    let mut half = s.with(Binary::Div, x, 2.0)?;
    let nothing = s.number(0.0, x)?;
    let is_negative = s.compare(Comparison::Lt, x, nothing)?;
    let mut beyond = nothing;
    if is_signed {
        let minus = s.number(-1.0, x)?;
        beyond = s.select(is_negative, minus, nothing)?;
    } else if bits == 64 {
        half = halved(s, x)?;
    }
    let moved = s.div(half, power)?;
    let moved = s.select(is_none, x, moved)?;
    s.select(is_inside, moved, beyond)
}

/// `2^by`, for `by` below the number of bits: a product over the bits of `by`.
fn power_of_two(s: &mut Site, by: ValueId, bits: u32) -> Made {
    let mut product = s.number(1.0, by)?;
    let (mut rest, mut at) = (by, 0);
    while 1 << at < bits {
        let half = s.with(Binary::Div, rest, 2.0)?;
        let whole = s.with(Binary::Mul, half, 2.0)?;
        let is_even = s.compare(Comparison::Eq, whole, rest)?;
        let raised = s.with(Binary::Mul, product, f64::from(1 << at).exp2())?;
        product = s.select(is_even, product, raised)?;
        (rest, at) = (half, at + 1);
    }
    Ok(product)
}

/// All bits turned: `-x - 1`.
pub(super) fn not(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let (bits, is_signed) = width(s, 0)?;
    if is_signed || bits == 64 {
        let minus = s.unary(Unary::Neg, x)?;
        return Ok(vec![s.with(Binary::Sub, minus, 1.0)?]);
    }
    let all = s.number(f64::from(bits).exp2() - 1.0, x)?;
    Ok(vec![s.sub(all, x)?])
}

/// `a or b = a + b - (a and b)`, and without the second term twice for `xor`: modulo the numbers of
/// the type, as sums are.
pub(super) fn bitwise(s: &mut Site) -> Translated {
    let (bits, is_signed) = width(s, 0)?;
    let aligned = s.aligned(&s.all())?;
    let [a, b] = aligned[..] else { return Err("not two operands".to_owned()) };
    let both = and(s, a, b, bits, is_signed || bits == 64)?;
    let sum = s.add(a, b)?;
    Ok(vec![match s.node.op_type.as_str() {
        "BitwiseAnd" => both,
        "BitwiseOr" => s.sub(sum, both)?,
        _ => {
            let less = s.sub(sum, both)?;
            s.sub(less, both)?
        }
    }])
}

fn and(s: &mut Site, a: ValueId, b: ValueId, bits: u32, is_signed: bool) -> Made {
    let mut sum = s.number(0.0, a)?;
    let (mut rest_a, mut rest_b) = (a, b);
    let low = if is_signed { bits - 1 } else { bits };
    for at in 0..low {
        let step = |s: &mut Site, rest: &mut ValueId| -> Made {
            let half = s.with(Binary::Div, *rest, 2.0)?;
            let whole = s.with(Binary::Mul, half, 2.0)?;
            let bit = s.sub(*rest, whole)?;
            *rest = half;
            Ok(bit)
        };
        let (bit_a, bit_b) = (step(s, &mut rest_a)?, step(s, &mut rest_b)?);
        let both = s.mul(bit_a, bit_b)?;
        let term = s.with(Binary::Mul, both, f64::from(at).exp2())?;
        sum = s.add(sum, term)?;
    }
    if is_signed {
        // What is left is zero, or minus one for negative numbers.
        let both = s.mul(rest_a, rest_b)?;
        let term = s.with(Binary::Mul, both, -f64::from(bits - 1).exp2())?;
        sum = s.add(sum, term)?;
    }
    Ok(sum)
}

/// The same bits as another type of as many: between integers by wrapping; to or from
/// floating-point numbers where they are known when the model is read.
#[expect(clippy::wildcard_enum_match_arm, reason = "other types have no such bits")]
pub(super) fn cast_bits(s: &mut Site) -> Translated {
    let from = s.element(0).ok_or("operand 0 is missing")?;
    let to = Element::of(i32::try_from(s.int("to", 0)).unwrap_or(-1))?;
    if from.bits() != to.bits() {
        return Err(format!("{} as {}, of other bits", from.name(), to.name()));
    }
    s.state(0, to);
    let x = s.operand(0)?;
    let is_float = |of: Element| of.carrier().is_float();
    if from == to {
        return Ok(vec![x]);
    }
    if !is_float(from) && !is_float(to) && to != Element::Bool {
        let cast = s.cast(x, to.carrier())?;
        return Ok(vec![super::narrowing::narrowed(s, cast, to)?]);
    }
    let known = s.known(0)?.ok_or("operand 0 is missing")?;
    let bits: Vec<u64> = match (&known.data, from) {
        (crate::tensor::Data::F32(x), Element::F32) => {
            x.iter().map(|x| x.to_bits().into()).collect()
        }
        (crate::tensor::Data::F64(x), Element::F64) => x.iter().map(|x| x.to_bits()).collect(),
        (crate::tensor::Data::Int(x), _) => x.iter().map(|x| *x as u64).collect(),
        _ => return Err(format!("bits of {}", from.name())),
    };
    let tensor = match to {
        Element::F32 => {
            Tensor::f32(&known.dims, bits.iter().map(|b| f32::from_bits(*b as u32)).collect())
        }
        Element::F64 => Tensor::f64(&known.dims, bits.iter().map(|b| f64::from_bits(*b)).collect()),
        Element::I32 | Element::I64 | Element::U32 | Element::U64 => {
            Tensor::int(to.carrier(), &known.dims, bits.iter().map(|b| *b as i64).collect())
        }
        _ => return Err(format!("bits as {}", to.name())),
    };
    debug_assert!(tensor.dtype != DType::Bool, "bits of numbers");
    Ok(vec![s.hold(tensor)?])
}
