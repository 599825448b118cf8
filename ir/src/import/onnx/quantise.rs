//! Quantised operators, by value: integers are computed in f64, which has their products and sums
//! exactly, and results rounded to even and bounded by their type.

use super::casts::named;
use super::element::Element;
use super::narrowing::{narrowed, saturated};
use super::site::{Made, Operand, Site, Translated, dim_at};
use super::sums::{conv, matmul};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Combiner, Comparison, Op, Unary};

/// The nearest integer of floating-point numbers, ties to even.
pub(super) fn rounded(s: &mut Site, x: ValueId) -> Made {
    let low = s.unary(Unary::Floor, x)?;
    let rest = s.sub(x, low)?;
    let half = s.number(0.5, x)?;
    let is_above = s.compare(Comparison::Lt, half, rest)?;
    let is_tie = s.compare(Comparison::Eq, half, rest)?;
    let halved = s.with(Binary::Mul, low, 0.5)?;
    let floor = s.unary(Unary::Floor, halved)?;
    let is_even = s.compare(Comparison::Eq, halved, floor)?;
    let up = s.with(Binary::Add, low, 1.0)?;
    let tie = s.select(is_even, low, up)?;
    let near = s.select(is_above, up, low)?;
    s.select(is_tie, tie, near)
}

/// Whole numbers as those of an integer type, the nearest that it has.
fn bounded(s: &mut Site, x: ValueId, to: Element) -> Made {
    let (low, high) = to.range().ok_or_else(|| format!("results of type {}", to.name()))?;
    let x = s.with(Binary::Max, x, low)?;
    let x = s.with(Binary::Min, x, high)?;
    s.cast(x, to.carrier())
}

/// A scale or zero point repeated to dims: one number, one for each index of a dim, or one for each
/// block of a dim.
fn spread(s: &mut Site, x: ValueId, dims: &[usize]) -> Made {
    let own = s.dims(x);
    if own.iter().product::<usize>() == 1 {
        let one = s.reshape(x, &[])?;
        return s.broadcast(one, dims);
    }
    let dim = dim_at(s.int("axis", 1), dims.len())?;
    if own.len() == 1 && own[0] == dims[dim] {
        let new = (0..dims.len()).filter(|at| *at != dim).collect();
        return s.push(Op::Broadcast { new, dims: super::site::sizes(dims) }, &[x]);
    }
    let block = s.count("block_size", 0)?;
    let blocks = dims[dim].checked_div(block).filter(|count| count * block == dims[dim]);
    match blocks {
        Some(count) if own.len() == dims.len() && own[dim] == count => {
            let mut apart = own.clone();
            apart.insert(dim + 1, block);
            let new = vec![dim + 1];
            let repeated = s.push(Op::Broadcast { new, dims: super::site::sizes(&apart) }, &[x])?;
            s.reshape(repeated, dims)
        }
        _ => Err(format!("scales of dims {own:?} for {dims:?} along dim {dim}")),
    }
}

pub(super) fn quantise(s: &mut Site) -> Translated {
    let (x, scale) = (s.operand(0)?, s.operand(1)?);
    let stated = named(s, "output_dtype", Element::U8)?;
    let to = s.element(2).unwrap_or(stated);
    s.state(0, to);
    let dims = s.dims(x);
    let x = s.cast(x, DType::F32)?;
    let scale = s.cast(scale, DType::F32)?;
    let scale = spread(s, scale, &dims)?;
    let mut y = s.div(x, scale)?;
    // The quotient has the type of the operands, or the one that is asked for.
    let of_operands = s.elements.first().copied().flatten();
    let wanted = named(s, "precision", of_operands.unwrap_or(Element::F32))?;
    y = narrowed(s, y, wanted)?;
    if to.format().is_some() {
        if let (Some(zero), Element::F4E2M1) = (s.optional(2), to) {
            let zero = spread(s, zero, &dims)?;
            y = s.add(y, zero)?;
        }
        let saturates = s.int("saturate", 1) != 0;
        return Ok(vec![if saturates { saturated(s, y, to)? } else { narrowed(s, y, to)? }]);
    }
    y = s.cast(y, DType::F64)?;
    y = rounded(s, y)?;
    if let Some(zero) = s.optional(2) {
        let zero = s.cast(zero, DType::F64)?;
        let zero = spread(s, zero, &dims)?;
        y = s.add(y, zero)?;
    }
    Ok(vec![bounded(s, y, to)?])
}

pub(super) fn dequantise(s: &mut Site) -> Translated {
    let (x, scale) = (s.operand(0)?, s.operand(1)?);
    let of_scale = s.element(1).unwrap_or(Element::F32);
    let to = named(s, "output_dtype", of_scale)?;
    s.state(0, to);
    let dims = s.dims(x);
    let wide = if s.dtype(x) == DType::F32 { DType::F32 } else { DType::F64 };
    let mut x = s.cast(x, wide)?;
    if let Some(zero) = s.optional(2) {
        let zero = s.cast(zero, wide)?;
        let zero = spread(s, zero, &dims)?;
        x = s.sub(x, zero)?;
    }
    let x = s.cast(x, DType::F32)?;
    let scale = s.cast(scale, DType::F32)?;
    let scale = spread(s, scale, &dims)?;
    let y = s.mul(x, scale)?;
    Ok(vec![s.cast(y, to.carrier())?])
}

/// Scale and zero point from the least and the largest number.
pub(super) fn quantise_dynamically(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let dims = s.dims(x);
    let all: Vec<usize> = (0..dims.len()).collect();
    let high = s.reduce(Combiner::Max, all.clone(), x)?;
    let low = s.reduce(Combiner::Min, all, x)?;
    let (high, low) = (s.with(Binary::Max, high, 0.0)?, s.with(Binary::Min, low, 0.0)?);
    let span = s.sub(high, low)?;
    let (zero, one) = (s.number(0.0, span)?, s.number(1.0, span)?);
    let is_flat = s.compare(Comparison::Eq, span, zero)?;
    let span = s.select(is_flat, one, span)?;
    let scale = s.with(Binary::Div, span, 255.0)?;
    let offset = s.div(low, scale)?;
    let offset = s.unary(Unary::Neg, offset)?;
    let offset = s.with(Binary::Max, offset, 0.0)?;
    let offset = s.with(Binary::Min, offset, 255.0)?;
    let offset = rounded(s, offset)?;
    let scales = s.broadcast(scale, &dims)?;
    let offsets = s.broadcast(offset, &dims)?;
    let y = s.div(x, scales)?;
    let y = rounded(s, y)?;
    let y = s.add(y, offsets)?;
    let y = bounded(s, y, Element::U8)?;
    let offset = bounded(s, offset, Element::U8)?;
    s.state(0, Element::U8);
    s.state(1, Element::F32);
    s.state(2, Element::U8);
    Ok(vec![y, scale, offset])
}

/// An operand less its zero point, in f64: of one number, or of one for each index of a dim.
fn centred(s: &mut Site, x: usize, zero: usize, dim: Option<usize>) -> Made {
    let x = s.operand(x)?;
    let dims = s.dims(x);
    let wide = s.cast(x, DType::F64)?;
    let Some(zero) = s.optional(zero) else { return Ok(wide) };
    let zero = s.cast(zero, DType::F64)?;
    let zero = along(s, zero, &dims, dim)?;
    s.sub(wide, zero)
}

/// One number, or one for each index of a dim.
fn along(s: &mut Site, x: ValueId, dims: &[usize], dim: Option<usize>) -> Made {
    let own = s.dims(x);
    if own.iter().product::<usize>() == 1 {
        let one = s.reshape(x, &[])?;
        return s.broadcast(one, dims);
    }
    match (own.len(), dim) {
        (1, Some(dim)) if own[0] == dims[dim] => {
            let new = (0..dims.len()).filter(|at| *at != dim).collect();
            s.push(Op::Broadcast { new, dims: super::site::sizes(dims) }, &[x])
        }
        _ => s.broadcast(x, dims),
    }
}

/// Another operator on operands of f64.
fn applied(s: &mut Site, operands: &[ValueId], operator: fn(&mut Site) -> Translated) -> Made {
    let own = std::mem::take(&mut s.operands);
    s.operands = operands.iter().map(|id| Some(Operand { id: *id, known: None })).collect();
    let made = operator(s);
    s.operands = own;
    made?.into_iter().next().ok_or_else(|| "no result".to_owned())
}

fn last_but(s: &Site, at: usize, from_end: usize) -> Result<Option<usize>, String> {
    let ndim = s.ndim(s.operand(at)?);
    Ok(ndim.checked_sub(from_end))
}

pub(super) fn matmul_integer(s: &mut Site) -> Translated {
    let (rows, columns) = (last_but(s, 0, 2)?, last_but(s, 1, 1)?);
    let (a, b) = (centred(s, 0, 2, rows)?, centred(s, 1, 3, columns)?);
    let y = applied(s, &[a, b], matmul)?;
    s.state(0, Element::I32);
    Ok(vec![s.cast(y, DType::I32)?])
}

pub(super) fn conv_integer(s: &mut Site) -> Translated {
    let (x, w) = (centred(s, 0, 2, None)?, centred(s, 1, 3, Some(0))?);
    let y = applied(s, &[x, w], conv)?;
    s.state(0, Element::I32);
    Ok(vec![s.cast(y, DType::I32)?])
}

/// `y (a b / c) + z`, rounded, of a sum of products `y`, and scales of operands and of the result.
fn requantised(
    s: &mut Site,
    y: ValueId,
    scales: [usize; 3],
    zero: usize,
    dims: [Option<usize>; 2],
) -> Translated {
    let sizes = s.dims(y);
    let scale = |s: &mut Site, at: usize, dim: Option<usize>| -> Made {
        let scale = s.operand(at)?;
        let scale = s.cast(scale, DType::F64)?;
        along(s, scale, &sizes, dim)
    };
    let [a, b, c] = scales;
    let (a, b, c) = (scale(s, a, dims[0])?, scale(s, b, dims[1])?, scale(s, c, None)?);
    let factor = s.mul(a, b)?;
    let factor = s.div(factor, c)?;
    let y = s.mul(y, factor)?;
    let y = rounded(s, y)?;
    let to = s.element(zero).or(s.element(0)).ok_or("no type of the result")?;
    let y = match s.optional(zero) {
        Some(zero) => {
            let zero = s.cast(zero, DType::F64)?;
            let zero = along(s, zero, &sizes, None)?;
            s.add(y, zero)?
        }
        None => y,
    };
    s.state(0, to);
    Ok(vec![bounded(s, y, to)?])
}

pub(super) fn qlinear_matmul(s: &mut Site) -> Translated {
    let (rows, columns) = (last_but(s, 0, 2)?, last_but(s, 3, 1)?);
    let (a, b) = (centred(s, 0, 2, rows)?, centred(s, 3, 5, columns)?);
    let y = applied(s, &[a, b], matmul)?;
    let (rows, columns) = (s.ndim(y).checked_sub(2), s.ndim(y).checked_sub(1));
    requantised(s, y, [1, 4, 6], 7, [rows, columns])
}

pub(super) fn qlinear_conv(s: &mut Site) -> Translated {
    let (x, w) = (centred(s, 0, 2, None)?, centred(s, 3, 5, Some(0))?);
    let mut operands = vec![x, w];
    if let Some(bias) = s.optional(8) {
        operands.push(s.cast(bias, DType::F64)?);
    }
    let y = applied(s, &operands, conv)?;
    requantised(s, y, [1, 4, 6], 7, [None, Some(1)])
}
