//! Results rounded or wrapped to the element types of ONNX that are narrower than what computes.

use super::element::{Element, Format};
use super::site::{Made, Site};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Comparison, Unary};

/// The results of a translation with their types, rounded to them.
pub(super) fn concluded(
    s: &mut Site,
    results: Vec<ValueId>,
) -> Result<Vec<(ValueId, Option<Element>)>, String> {
    let mut all = Vec::new();
    for (at, id) in results.into_iter().enumerate() {
        let carrier = s.dtype(id);
        let stated = s.stated.iter().rev().find(|(of, _)| *of == at).map(|(_, element)| *element);
        let of_operand = || {
            let operands = s.operands.iter().zip(&s.elements);
            let mut same = operands.filter_map(|(operand, element)| {
                (s.dtype(operand.as_ref()?.id) == carrier).then_some(*element)
            });
            same.next().flatten()
        };
        let element = match stated {
            Some(element) => element.is_carried().then_some(element),
            None => of_operand(),
        };
        let is_known = s.held.iter().any(|(held, _)| *held == id);
        let id = match element.filter(|_| !is_known && !keeps(&s.node.op_type)) {
            Some(element) => narrowed(s, id, element)?,
            None => id,
        };
        all.push((id, element));
    }
    Ok(all)
}

/// Operators whose results are numbers of an operand, or rounded already.
fn keeps(operator: &str) -> bool {
    matches!(
        operator,
        "Cast"
            | "CastLike"
            | "Reshape"
            | "Transpose"
            | "Squeeze"
            | "Unsqueeze"
            | "Flatten"
            | "Concat"
            | "Split"
            | "Slice"
            | "Expand"
            | "Tile"
            | "Gather"
            | "GatherElements"
            | "GatherND"
            | "Identity"
            | "Where"
            | "Max"
            | "Min"
            | "Relu"
            | "MaxPool"
            | "Pad"
            | "Trilu"
            | "TopK"
            | "DepthToSpace"
            | "SpaceToDepth"
            | "Constant"
            | "Compress"
            | "QuantizeLinear"
            | "DynamicQuantizeLinear"
            | "BitCast"
            | "ReduceMax"
            | "ReduceMin"
            | "ReverseSequence"
            | "CenterCropPad"
            | "Unique"
            | "TensorScatter"
            | "Range"
    )
}

/// The nearest number of a narrow type: integers wrap.
pub(super) fn narrowed(s: &mut Site, x: ValueId, to: Element) -> Made {
    match (to.integer(), to.format()) {
        (Some((bits, is_signed)), _) => wrapped(s, x, bits, is_signed),
        (None, Some(format)) => {
            let wide = s.cast(x, DType::F64)?;
            let top = if format.has_infinity { f64::INFINITY } else { f64::NAN };
            let top = if format.has_nan { top } else { format.most };
            let near = rounded(s, wide, format, top)?;
            s.cast(near, DType::F32)
        }
        (None, None) => Ok(x),
    }
}

/// The same, where the largest number stands for all beyond it.
pub(super) fn saturated(s: &mut Site, x: ValueId, to: Element) -> Made {
    let Some(format) = to.format() else { return narrowed(s, x, to) };
    let wide = s.cast(x, DType::F64)?;
    let near = rounded(s, wide, format, format.most)?;
    s.cast(near, DType::F32)
}

/// An integer modulo a power of two, in the range of its type.
fn wrapped(s: &mut Site, x: ValueId, bits: u32, is_signed: bool) -> Made {
    let x = s.cast(x, DType::I32)?;
    let size = f64::from(1 << bits);
    let offset = if is_signed { size / 2.0 } else { 0.0 };
    let moved = s.with(Binary::Add, x, offset)?;
    let whole = s.with(Binary::Div, moved, size)?;
    let above = s.with(Binary::Mul, whole, size)?;
    let rest = s.binary(Binary::Sub, moved, above)?;
    s.with(Binary::Sub, rest, offset)
}

/// The nearest number of `precision` bits, ties to even, of one in f64; `top` beyond the largest.
///
/// With `c = 2^(53 - precision)`, the sum `x c + x` has its last bit where the result has, and is
/// rounded there, since `x c` is an even multiple of that bit (after T. J. Dekker, A floating-point
/// technique for extending the available precision, 1971). Below the normal numbers the last bit
/// is fixed, and a large number takes all bits below it away.
fn rounded(s: &mut Site, x: ValueId, format: Format, top: f64) -> Made {
    let factor = f64::from(53 - format.precision).exp2();
    let raised = s.with(Binary::Mul, x, factor + 1.0)?;
    let scaled = s.with(Binary::Mul, x, factor)?;
    let normal = s.binary(Binary::Sub, raised, scaled)?;
    let bias = 1.5 * f64::from(52 + format.least - format.precision + 1).exp2();
    let moved = s.with(Binary::Add, x, bias)?;
    let small = s.with(Binary::Sub, moved, bias)?;
    let size = s.unary(Unary::Abs, x)?;
    let least = s.number(f64::from(format.least).exp2(), x)?;
    let is_small = s.compare(Comparison::Lt, size, least)?;
    let near = s.select(is_small, small, normal)?;
    let zero = s.number(0.0, x)?;
    let is_zero = s.compare(Comparison::Eq, near, zero)?;
    let signed = if format.has_negative_zero { s.with(Binary::Mul, x, 0.0)? } else { zero };
    let near = s.select(is_zero, signed, near)?;
    let infinity = s.number(f64::INFINITY, x)?;
    let is_finite = s.compare(Comparison::Lt, size, infinity)?;
    let near = s.select(is_finite, near, x)?;
    let near = if format.has_nan {
        near
    } else {
        let is_number = s.compare(Comparison::Eq, x, x)?;
        s.select(is_number, near, zero)?
    };
    let near_size = s.unary(Unary::Abs, near)?;
    let most = s.number(format.most, x)?;
    let is_beyond = s.compare(Comparison::Lt, most, near_size)?;
    let is_negative = s.compare(Comparison::Lt, x, zero)?;
    let (above, below) = (s.number(top, x)?, s.number(-top, x)?);
    let limit = s.select(is_negative, below, above)?;
    s.select(is_beyond, limit, near)
}
