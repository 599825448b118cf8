//! Casts, and formulas that make values of a stated type.

use super::element::Element;
use super::narrowing::{narrowed, saturated};
use super::site::{Made, Site, Translated};
use super::unsigned::to_float;
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Comparison};

/// The type that an attribute names, or another one where it is left out.
pub(super) fn named(s: &Site, attribute: &str, default: Element) -> Result<Element, String> {
    match s.int(attribute, 0) {
        0 => Ok(default),
        number => Element::of(i32::try_from(number).unwrap_or(-1)),
    }
}

pub(super) fn cast(s: &mut Site) -> Translated {
    let to = named(s, "to", Element::F32)?;
    to_element(s, to)
}

pub(super) fn cast_like(s: &mut Site) -> Translated {
    let to = s.element(1).ok_or("operand 1 is missing")?;
    to_element(s, to)
}

fn to_element(s: &mut Site, to: Element) -> Translated {
    let x = s.operand(0)?;
    let from = s.element(0).ok_or("operand 0 is missing")?;
    s.state(0, to);
    let saturates = s.int("saturate", 1) != 0;
    Ok(vec![converted(s, x, from, to, saturates)?])
}

/// A value of one type as one of another.
pub(super) fn converted(
    s: &mut Site,
    x: ValueId,
    from: Element,
    to: Element,
    saturates: bool,
) -> Made {
    if from == to {
        return Ok(x);
    }
    if to == Element::F8E8M0 {
        return Err("elements of type f8e8m0".to_owned());
    }
    let (is_u64, is_real) = (from == Element::U64, to.carrier().is_float());
    let x = if is_u64 && is_real { to_float(s, x, to.carrier())? } else { x };
    if to == Element::U64 && s.is_float(x) {
        return to_u64(s, x);
    }
    if to.format().is_none() {
        let wide = if to.integer().is_some() { DType::I32 } else { to.carrier() };
        let cast = s.cast(x, wide)?;
        return narrowed(s, cast, to);
    }
    // From f64 the nearest number of the narrow type is rounded to at once.
    let wide = if s.dtype(x) == DType::F64 { x } else { s.cast(x, DType::F32)? };
    let is_eight = matches!(
        to,
        Element::F8E4M3 | Element::F8E4M3Z | Element::F8E5M2 | Element::F8E5M2Z | Element::F4E2M1
    );
    if is_eight && saturates { saturated(s, wide, to) } else { narrowed(s, wide, to) }
}

fn to_u64(s: &mut Site, x: ValueId) -> Made {
    let wide = s.cast(x, DType::F64)?;
    let half = s.number(63.0_f64.exp2(), wide)?;
    let is_low = s.compare(Comparison::Lt, wide, half)?;
    let less = s.with(Binary::Sub, wide, 64.0_f64.exp2())?;
    let held = s.select(is_low, wide, less)?;
    s.cast(held, DType::I64)
}
