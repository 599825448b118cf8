//! Operators that read or write where an operand says.

use super::element::Element;
use super::site::{Made, Site, Translated, dim_at, sizes};
use super::unsigned::{is_u64, ordered};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Comparison, Op};
use crate::tensor::strides;

/// Negative ids count from the end.
pub(super) fn not_negative(s: &mut Site, ids: ValueId, size: usize) -> Made {
    let zero = s.number(0.0, ids)?;
    let below = s.compare(Comparison::Lt, ids, zero)?;
    let from_end = s.with(Binary::Add, ids, size as f64)?;
    s.select(below, from_end, ids)
}

/// Refuses ids out of range: where they are known when the model is read, then.
pub(super) fn check_ids(s: &mut Site, at: usize, ids: ValueId, size: usize) -> Result<(), String> {
    let Some(known) = s.hint(at) else { return s.demand_rows(ids, size) };
    let size = size as f64;
    match known.to_f64().into_iter().find(|id| !(-size..size).contains(id)) {
        Some(id) => Err(format!("the id {id} of {size}")),
        None => Ok(()),
    }
}

pub(super) fn gather(s: &mut Site) -> Translated {
    let (x, ids) = (s.operand(0)?, s.operand(1)?);
    let dim = dim_at(s.int("axis", 0), s.ndim(x))?;
    let size = s.dims(x)[dim];
    check_ids(s, 1, ids, size)?;
    let ids = not_negative(s, ids, size)?;
    Ok(vec![s.push(Op::Gather { dim, start: 0 }, &[x, ids])?])
}

/// Places in a flat tensor of `dims`, for ids along `dim` that stand at the places' own other dims.
pub(super) fn places_along(s: &mut Site, ids: ValueId, dims: &[usize], dim: usize) -> Made {
    let ids = s.cast(ids, DType::I64)?;
    let ids = not_negative(s, ids, dims[dim])?;
    let (own, steps) = (s.dims(ids), strides(dims));
    let mut places = s.with(Binary::Mul, ids, steps[dim] as f64)?;
    for (other, step) in steps.iter().enumerate().filter(|(at, _)| *at != dim) {
        let index = Op::Iota { dim: other, start: 0, dtype: DType::I64, dims: sizes(&own) };
        let index = s.push(index, &[])?;
        let offset = s.with(Binary::Mul, index, *step as f64)?;
        places = s.binary(Binary::Add, places, offset)?;
    }
    Ok(places)
}

fn flat(s: &mut Site, x: ValueId) -> Made {
    let count = s.dims(x).iter().product();
    s.reshape(x, &[count])
}

pub(super) fn gather_elements(s: &mut Site) -> Translated {
    let (x, ids) = (s.operand(0)?, s.operand(1)?);
    let dim = dim_at(s.int("axis", 0), s.ndim(x))?;
    check_ids(s, 1, ids, s.dims(x)[dim])?;
    Ok(vec![along(s, x, ids, dim)?])
}

/// The elements of `x` at the ids along a dim.
pub(super) fn along(s: &mut Site, x: ValueId, ids: ValueId, dim: usize) -> Made {
    let dims = s.dims(x);
    if s.ndim(ids) != dims.len() {
        return Err("ids with other dims".to_owned());
    }
    let places = places_along(s, ids, &dims, dim)?;
    let x = flat(s, x)?;
    s.push(Op::Gather { dim: 0, start: 0 }, &[x, places])
}

pub(super) fn scatter_elements(s: &mut Site) -> Translated {
    let (x, ids, updates) = (s.operand(0)?, s.operand(1)?, s.operand(2)?);
    let dims = s.dims(x);
    let dim = dim_at(s.int("axis", 0), dims.len())?;
    if s.ndim(ids) != dims.len() {
        return Err("ids with other dims".to_owned());
    }
    check_ids(s, 1, ids, dims[dim])?;
    let places = places_along(s, ids, &dims, dim)?;
    let (x, places, updates) = (flat(s, x)?, flat(s, places)?, flat(s, updates)?);
    let written = write(s, x, places, updates)?;
    Ok(vec![s.reshape(written, &dims)?])
}

/// Rows of `x` replaced, or added to, as the attribute `reduction` says.
fn write(s: &mut Site, x: ValueId, places: ValueId, updates: ValueId) -> Made {
    match s.text("reduction", "none").as_str() {
        "none" => s.push(Op::Scatter { dim: 0, start: 0 }, &[x, places, updates]),
        "add" => {
            let size = s.ty(x).dims[0].clone();
            let sums = s.push(Op::ScatterAdd { dim: 0, start: 0, size }, &[places, updates])?;
            s.binary(Binary::Add, x, sums)
        }
        other => Err(format!("reduction `{other}`")),
    }
}

/// Rows of `x` that the last dim of the ids names: their numbers, and the dims that are rows.
pub(super) fn rows(
    s: &mut Site,
    x: ValueId,
    ids: ValueId,
) -> Result<(ValueId, Vec<usize>), String> {
    let (dims, of_ids) = (s.dims(x), s.dims(ids));
    let (depth, outer) = of_ids.split_last().ok_or("ids without dims")?;
    if *depth == 0 || *depth > dims.len() {
        return Err(format!("ids of {depth} numbers in {} dims", dims.len()));
    }
    let steps = strides(&dims[..*depth]);
    let ids = s.cast(ids, DType::I64)?;
    let last = outer.len();
    let mut places = None;
    for (at, step) in steps.iter().enumerate() {
        let one = s.push(Op::Slice { dim: last, start: at, size: 1 }, &[ids])?;
        let one = s.reshape(one, outer)?;
        s.demand_rows(one, dims[at])?;
        let one = not_negative(s, one, dims[at])?;
        let term = s.with(Binary::Mul, one, *step as f64)?;
        places = Some(match places {
            Some(sum) => s.binary(Binary::Add, sum, term)?,
            None => term,
        });
    }
    Ok((places.ok_or("no ids")?, dims[..*depth].to_vec()))
}

pub(super) fn by_rows(s: &mut Site, x: ValueId, rows: &[usize]) -> Made {
    let dims = s.dims(x);
    let whole = [&[rows.iter().product()], &dims[rows.len()..]].concat();
    s.reshape(x, &whole)
}

pub(super) fn gather_nd(s: &mut Site) -> Translated {
    let (x, ids) = (s.operand(0)?, s.operand(1)?);
    let (places, of_rows) = rows(s, x, ids)?;
    let x = by_rows(s, x, &of_rows)?;
    Ok(vec![s.push(Op::Gather { dim: 0, start: 0 }, &[x, places])?])
}

pub(super) fn scatter_nd(s: &mut Site) -> Translated {
    let (x, ids, updates) = (s.operand(0)?, s.operand(1)?, s.operand(2)?);
    let dims = s.dims(x);
    let (places, of_rows) = rows(s, x, ids)?;
    let x = by_rows(s, x, &of_rows)?;
    let written = write(s, x, places, updates)?;
    Ok(vec![s.reshape(written, &dims)?])
}

/// The largest or smallest elements, largest or smallest first, and where they stand.
pub(super) fn top_k(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let dim = dim_at(s.int("axis", -1), s.ndim(x))?;
    let count = s.integers(1)?.and_then(|k| k.first().copied()).unwrap_or(s.int("k", 0));
    let whole = s.dims(x)[dim];
    let count = usize::try_from(count).ok().filter(|count| *count <= whole);
    let count = count.ok_or_else(|| format!("k is not one of 0 to {whole}"))?;
    let key = ordered(s, x, is_u64(s, 0))?;
    let ids = if s.int("largest", 1) == 0 {
        let all = s.push(Op::Sort { dim, descending: false }, &[key])?;
        s.push(Op::Slice { dim, start: 0, size: count }, &[all])?
    } else {
        s.push(Op::TopK { dim, count }, &[key])?
    };
    let ids = s.cast(ids, DType::I64)?;
    s.state(1, Element::I64);
    Ok(vec![along(s, x, ids, dim)?, ids])
}

/// The index of the largest or smallest element.
pub(super) fn arg(s: &mut Site, smallest: bool) -> Translated {
    let own = s.operand(0)?;
    let mut x = ordered(s, own, is_u64(s, 0))?;
    let dim = dim_at(s.int("axis", 0), s.ndim(x))?;
    let (mut dims, last) = (s.dims(x), s.int("select_last_index", 0) != 0);
    let size = dims[dim];
    if size == 0 {
        return Err(format!("the place of the largest along dim {dim} of {dims:?}"));
    }
    let is_sorted = smallest && !s.is_float(x);
    if smallest && !is_sorted {
        x = s.unary(crate::op::Unary::Neg, x)?;
    }
    if last {
        x = s.push(Op::Reverse { dims: vec![dim] }, &[x])?;
    }
    let found = if is_sorted {
        // The least integer has no negative.
        let all = s.push(Op::Sort { dim, descending: false }, &[x])?;
        let first = s.push(Op::Slice { dim, start: 0, size: 1 }, &[all])?;
        let left: Vec<_> = (0..dims.len()).filter(|at| *at != dim).map(|at| dims[at]).collect();
        s.reshape(first, &left)?
    } else {
        s.push(Op::ArgMax { dim }, &[x])?
    };
    let mut found = s.cast(found, DType::I64)?;
    if last {
        let end = s.number(size as f64 - 1.0, found)?;
        found = s.binary(Binary::Sub, end, found)?;
    }
    if s.int("keepdims", 1) != 0 {
        dims[dim] = 1;
        found = s.reshape(found, &dims)?;
    }
    s.state(0, Element::I64);
    Ok(vec![found])
}
