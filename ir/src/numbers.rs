//! The numbers that stand in ops: what types cannot say of them.
//!
//! [`infer`](crate::infer) looks at types alone. A text may hold any number, so what it holds is
//! compared here with what its element type and its dims can take. What passes builds of modules
//! make is taken to be right.

use crate::DType;
use crate::dim::Dim;
use crate::infer::OpError;
use crate::op::Op;

/// The integers that an element type has.
fn integers(dtype: DType) -> Option<(f64, f64)> {
    match dtype {
        DType::I8 => Some((f64::from(i8::MIN), f64::from(i8::MAX))),
        DType::I32 => Some((f64::from(i32::MIN), f64::from(i32::MAX))),
        // The largest number of binary64 that is one.
        DType::I64 => Some((i64::MIN as f64, (i64::MAX - 1023) as f64)),
        DType::U32 => Some((0.0, f64::from(u32::MAX))),
        DType::Bool => Some((0.0, 1.0)),
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => None,
    }
}

/// Checks the numbers of an op that has a type.
///
/// # Errors
/// The number of the op's constraint that does not hold.
#[expect(clippy::wildcard_enum_match_arm, reason = "the numbers of other ops are in their types")]
pub(crate) fn check(op: &Op) -> Result<(), OpError> {
    match op {
        Op::Constant { value, dtype, .. } => constant(*value, *dtype),
        Op::Iota { dim, start, dtype, dims } => iota(*start, *dtype, &dims[*dim]),
        Op::Random { start, extent, dims, .. } => random(start, extent, dims),
        _ => Ok(()),
    }
}

fn constant(value: f64, dtype: DType) -> Result<(), OpError> {
    let Some((least, most)) = integers(dtype) else { return Ok(()) };
    if value.fract() == 0.0 && (least..=most).contains(&value) {
        return Ok(());
    }
    let found = format!("{value} is no {dtype}");
    Err(OpError { op: "constant", constraint: 1, found })
}

fn iota(start: i64, dtype: DType, size: &Dim) -> Result<(), OpError> {
    let Some((least, most)) = integers(dtype) else { return Ok(()) };
    // A size that is not known yet is taken for one.
    let last = start.checked_add(size.as_constant().unwrap_or(1).max(1) - 1);
    let fits = |number: i64| (least..=most).contains(&(number as f64));
    if fits(start) && last.is_some_and(fits) {
        return Ok(());
    }
    let found = format!("{size} numbers from {start} on are not all of {dtype}");
    Err(OpError { op: "iota", constraint: 2, found })
}

fn random(start: &[i64], extent: &[Dim], dims: &[Dim]) -> Result<(), OpError> {
    let wrong = |found: String| Err(OpError { op: "random", constraint: 3, found });
    if let Some(start) = start.iter().find(|start| **start < 0) {
        return wrong(format!("it starts at {start}"));
    }
    // That of the first dim is not used.
    for ((start, extent), dim) in start.iter().zip(extent).zip(dims).skip(1) {
        let (Some(extent), Some(size)) = (extent.as_constant(), dim.as_constant()) else {
            continue;
        };
        if start.checked_add(size).is_none_or(|end| end > extent) {
            return wrong(format!("{size} elements from {start} on are not among {extent}"));
        }
    }
    Ok(())
}
