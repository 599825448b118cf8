//! Integers of 64 bits without a sign, which are held as integers with one: negative ones stand for
//! 2^64 more.
//!
//! Sums, differences and products are the same numbers modulo 2^64. An order is that of the numbers
//! less 2^63, which is what their bits mean with the highest one turned.

use super::element::Element;
use super::site::{Made, Site};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Comparison};

/// Whether an operand is of the type.
pub(super) fn is_u64(s: &Site, at: usize) -> bool {
    s.element(at) == Some(Element::U64)
}

/// Operators that move such numbers or add them, which is the same with and without a sign.
const MOVES: [&str; 46] = [
    "BitCast",
    "BitShift",
    "BitwiseAnd",
    "BitwiseNot",
    "BitwiseOr",
    "BitwiseXor",
    "Cast",
    "CastLike",
    "CenterCropPad",
    "Compress",
    "Concat",
    "CumProd",
    "CumSum",
    "DepthToSpace",
    "Equal",
    "Expand",
    "EyeLike",
    "Flatten",
    "Gather",
    "GatherElements",
    "GatherND",
    "Identity",
    "NonZero",
    "OneHot",
    "Pad",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
    "Reshape",
    "ReverseSequence",
    "Shape",
    "Size",
    "Slice",
    "SpaceToDepth",
    "Split",
    "Squeeze",
    "Sub",
    "Sum",
    "Add",
    "Mul",
    "TensorScatter",
    "Tile",
    "Transpose",
    "Trilu",
    "Unsqueeze",
    "Where",
];

/// Operators whose translations know of such numbers.
const ORDERS: [&str; 21] = [
    "Abs",
    "ArgMax",
    "ArgMin",
    "Clip",
    "Div",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "Max",
    "Min",
    "Mod",
    "Pow",
    "ReduceL1",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ScatterElements",
    "ScatterND",
    "Sign",
    "TopK",
];

/// Whether an operator may read such numbers.
pub(super) fn takes_u64(operator: &str) -> bool {
    MOVES.contains(&operator) || ORDERS.contains(&operator)
}

/// The number less 2^63, as one with a sign; and back.
pub(super) fn flipped(s: &mut Site, x: ValueId) -> Made {
    s.with(Binary::Add, x, -(63.0_f64.exp2()))
}

/// A value whose order is that of an operand, and whether it has to be turned back.
pub(super) fn ordered(s: &mut Site, x: ValueId, is_u64: bool) -> Made {
    if is_u64 { flipped(s, x) } else { Ok(x) }
}

/// A quotient rounded down.
///
/// Of a divisor from 2^63 on it is one or zero. Else half the dividend has no sign to mind, and
/// twice its quotient is the wanted one or one less.
pub(super) fn quotient(s: &mut Site, a: ValueId, b: ValueId) -> Made {
    let zero = s.number(0.0, a)?;
    let half = halved(s, a)?;
    let twice = s.binary(Binary::Div, half, b)?;
    let less = s.with(Binary::Mul, twice, 2.0)?;
    let product = s.mul(less, b)?;
    let rest = s.sub(a, product)?;
    let (rest, divisor) = (flipped(s, rest)?, flipped(s, b)?);
    let is_more = s.compare(Comparison::Le, divisor, rest)?;
    let more = s.with(Binary::Add, less, 1.0)?;
    let small = s.select(is_more, more, less)?;
    let dividend = flipped(s, a)?;
    let is_whole = s.compare(Comparison::Le, divisor, dividend)?;
    let one = s.number(1.0, a)?;
    let large = s.select(is_whole, one, zero)?;
    let is_large = s.compare(Comparison::Lt, b, zero)?;
    let quotient = s.select(is_large, large, small)?;
    let is_nothing = s.compare(Comparison::Eq, b, zero)?;
    s.select(is_nothing, zero, quotient)
}

/// Half of it rounded down, which is below 2^63.
pub(super) fn halved(s: &mut Site, x: ValueId) -> Made {
    let half = s.with(Binary::Div, x, 2.0)?;
    let zero = s.number(0.0, x)?;
    let is_high = s.compare(Comparison::Lt, x, zero)?;
    // Half of what is 2^64 too small is 2^63 too small.
    let high = flipped(s, half)?;
    s.select(is_high, high, half)
}

/// As a floating-point number, rounded once: of a high one half is, whose last bit is set where a
/// bit went out, and doubled.
pub(super) fn to_float(s: &mut Site, x: ValueId, to: DType) -> Made {
    let half = halved(s, x)?;
    let twice = s.with(Binary::Mul, half, 2.0)?;
    let last = s.sub(x, twice)?;
    let quarter = s.with(Binary::Div, half, 2.0)?;
    let even = s.with(Binary::Mul, quarter, 2.0)?;
    let own = s.sub(half, even)?;
    let more = s.binary(Binary::Max, last, own)?;
    let odd = s.add(even, more)?;
    let (wide, low) = (s.cast(odd, to)?, s.cast(x, to)?);
    let high = s.with(Binary::Mul, wide, 2.0)?;
    let zero = s.number(0.0, x)?;
    let is_high = s.compare(Comparison::Lt, x, zero)?;
    s.select(is_high, high, low)
}
