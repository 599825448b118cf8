//! Scatters that combine with what is there, and operators that read or write at places which
//! other operands shift.

use super::indexing::{
    along, check_ids, gather_nd, not_negative, places_along, scatter_elements, scatter_nd,
};
use super::site::{Made, Operand, Site, Translated, dim_at};
use super::unsigned::{is_u64, ordered};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Combiner, Comparison, Op};

/// Pairs of a place and an update at most, which a combination of other than sums looks at all of.
const PAIRS_MAX: usize = 1 << 24;

/// Rows of `x` combined with the updates of each: the largest, the least or the product.
pub(super) fn combined(
    s: &mut Site,
    x: ValueId,
    places: ValueId,
    updates: ValueId,
    how: &str,
) -> Made {
    let dims = s.dims(x);
    let (rows, width) = (dims[0], dims[1..].iter().product::<usize>());
    let count: usize = s.dims(places).iter().product();
    let pairs = rows.checked_mul(count).and_then(|pairs| pairs.checked_mul(width));
    if pairs.is_none_or(|pairs| pairs > PAIRS_MAX) {
        return Err(format!("reduction `{how}` of {count} updates of {rows} rows of {width}"));
    }
    if count == 0 {
        return Ok(x);
    }
    let whole = [rows, count, width];
    let places = s.cast(places, DType::I64)?;
    let places = s.reshape(places, &[1, count, 1])?;
    let places = s.broadcast(places, &whole)?;
    let updates = s.reshape(updates, &[1, count, width])?;
    let updates = s.broadcast(updates, &whole)?;
    let row = s.index(0, DType::I64, &whole)?;
    let is_own = s.compare(Comparison::Eq, row, places)?;
    let (neutral, binary) = match how {
        "mul" => (s.number(1.0, updates)?, Binary::Mul),
        "max" => (updates, Binary::Max),
        "min" => (updates, Binary::Min),
        other => return Err(format!("reduction `{other}`")),
    };
    let turns = how != "mul" && is_u64(s, 0);
    let (x, updates) = (ordered(s, x, turns)?, ordered(s, updates, turns)?);
    let flat = s.reshape(x, &[rows, 1, width])?;
    let own = s.broadcast(flat, &whole)?;
    let table = s.reshape(x, &[rows, width])?;
    // What is not of a row leaves it as it is.
    let neutral = if how == "mul" { neutral } else { own };
    let terms = s.select(is_own, updates, neutral)?;
    let made = match how {
        "mul" => s.push(Op::Prod { dims: vec![1] }, &[terms])?,
        "max" => s.reduce(Combiner::Max, vec![1], terms)?,
        _ => s.reduce(Combiner::Min, vec![1], terms)?,
    };
    let made = s.binary(binary, table, made)?;
    let made = ordered(s, made, turns)?;
    s.reshape(made, &dims)
}

/// With dims of batches that data and ids share.
pub(super) fn gather_of_batches(s: &mut Site) -> Translated {
    let batches = s.count("batch_dims", 0)?;
    if batches == 0 {
        return gather_nd(s);
    }
    let (x, ids) = (s.operand(0)?, s.operand(1)?);
    let (dims, of_ids) = (s.dims(x), s.dims(ids));
    if dims.len() < batches || of_ids.len() <= batches || dims[..batches] != of_ids[..batches] {
        return Err(format!("{batches} dims of batches of {dims:?} and {of_ids:?}"));
    }
    let ids = s.cast(ids, DType::I64)?;
    let mut one = of_ids.clone();
    let last = one.len() - 1;
    one[last] = 1;
    let mut parts = Vec::new();
    for dim in 0..batches {
        parts.push(s.index(dim, DType::I64, &one)?);
    }
    parts.push(ids);
    let all = s.concat(last, &parts)?;
    let own = std::mem::take(&mut s.operands);
    s.operands = [x, all].iter().map(|id| Some(Operand { id: *id, known: None })).collect();
    let made = gather_nd(s);
    s.operands = own;
    made
}

pub(super) fn elements(s: &mut Site) -> Translated {
    let how = s.text("reduction", "none");
    if matches!(how.as_str(), "none" | "add") {
        return scatter_elements(s);
    }
    let (x, ids, updates) = (s.operand(0)?, s.operand(1)?, s.operand(2)?);
    let dims = s.dims(x);
    let dim = dim_at(s.int("axis", 0), dims.len())?;
    if s.ndim(ids) != dims.len() {
        return Err("ids with other dims".to_owned());
    }
    check_ids(s, 1, ids, dims[dim])?;
    let places = places_along(s, ids, &dims, dim)?;
    let count = dims.iter().product();
    let flat = s.reshape(x, &[count])?;
    let made = combined(s, flat, places, updates, &how)?;
    Ok(vec![s.reshape(made, &dims)?])
}

pub(super) fn rows(s: &mut Site) -> Translated {
    let how = s.text("reduction", "none");
    if matches!(how.as_str(), "none" | "add") {
        return scatter_nd(s);
    }
    let (x, ids, updates) = (s.operand(0)?, s.operand(1)?, s.operand(2)?);
    let dims = s.dims(x);
    let (places, of_rows) = super::indexing::rows(s, x, ids)?;
    let table = super::indexing::by_rows(s, x, &of_rows)?;
    let made = combined(s, table, places, updates, &how)?;
    Ok(vec![s.reshape(made, &dims)?])
}

/// A cache with rows that are written from a place of each sample on.
pub(super) fn cached(s: &mut Site) -> Translated {
    let (cache, update) = (s.operand(0)?, s.operand(1)?);
    let (dims, own) = (s.dims(cache), s.dims(update));
    let dim = dim_at(s.int("axis", -2), dims.len())?;
    if own.len() != dims.len() || dim == 0 {
        return Err(format!("an update {own:?} of {dims:?} along {dim}"));
    }
    let mut places = s.index(dim, DType::I64, &own)?;
    if let Some(first) = s.optional(2) {
        let first = s.cast(first, DType::I64)?;
        let new = (1..own.len()).collect();
        let op = Op::Broadcast { new, dims: super::site::sizes(&own) };
        let first = s.push(op, &[first])?;
        places = s.add(places, first)?;
    }
    if s.text("mode", "linear") == "circular" {
        let size = dims[dim] as f64;
        let whole = s.with(Binary::Div, places, size)?;
        let whole = s.with(Binary::Mul, whole, size)?;
        places = s.sub(places, whole)?;
    }
    s.demand_rows(places, dims[dim])?;
    let places = places_along(s, places, &dims, dim)?;
    let (count, written) = (dims.iter().product(), own.iter().product());
    let flat = s.reshape(cache, &[count])?;
    let (places, update) = (s.reshape(places, &[written])?, s.reshape(update, &[written])?);
    let made = s.push(Op::Scatter { dim: 0, start: 0 }, &[flat, places, update])?;
    Ok(vec![s.reshape(made, &dims)?])
}

/// The first elements of each sequence in opposite order.
pub(super) fn reverse_sequences(s: &mut Site) -> Translated {
    let (x, lengths) = (s.operand(0)?, s.operand(1)?);
    let dims = s.dims(x);
    let batch = dim_at(s.int("batch_axis", 1), dims.len())?;
    let time = dim_at(s.int("time_axis", 0), dims.len())?;
    if s.dims(lengths) != [dims[batch]] || batch == time {
        return Err(format!("lengths {:?} of {dims:?}", s.dims(lengths)));
    }
    let lengths = s.cast(lengths, DType::I64)?;
    let new = (0..dims.len()).filter(|at| *at != batch).collect();
    let op = Op::Broadcast { new, dims: super::site::sizes(&dims) };
    let lengths = s.push(op, &[lengths])?;
    let at = s.index(time, DType::I64, &dims)?;
    let is_inside = s.compare(Comparison::Lt, at, lengths)?;
    let last = s.with(Binary::Sub, lengths, 1.0)?;
    let turned = s.sub(last, at)?;
    let places = s.select(is_inside, turned, at)?;
    let places = not_negative(s, places, dims[time])?;
    Ok(vec![along(s, x, places, time)?])
}
