//! Operators that move elements or make them from sizes.

use super::casts::named;
use super::element::Element;
use super::site::{ELEMENTS_MAX, Made, Site, Translated, check_size, dim_at, is_f64, sizes};
use super::stored::stored;
use super::unsigned::is_u64;
use crate::module::ValueId;
use crate::op::{Comparison, Op};
use crate::tensor::Data;
use crate::{DType, Tensor};

/// Elements of a range at most. Chosen: half a GiB of `f64`.
const RANGE_MAX: f64 = 67_108_864.0;

/// A list of whole numbers.
fn list(s: &mut Site, numbers: &[i64]) -> Made {
    let tensor = Tensor::int(DType::I64, &[numbers.len()], numbers.to_vec());
    s.hold(tensor)
}

pub(super) fn shape(s: &mut Site) -> Translated {
    s.state(0, Element::I64);
    let dims = s.dims(s.operand(0)?);
    let ndim = dims.len() as i64;
    let bound = |at: i64| (if at < 0 { at + ndim } else { at }).clamp(0, ndim) as usize;
    let (start, end) = (bound(s.int("start", 0)), bound(s.int("end", ndim)));
    let dims: Vec<i64> = dims[start..end.max(start)].iter().map(|d| *d as i64).collect();
    Ok(vec![list(s, &dims)?])
}

pub(super) fn size(s: &mut Site) -> Translated {
    s.state(0, Element::I64);
    let count: usize = s.dims(s.operand(0)?).iter().product();
    Ok(vec![s.constant(count as f64, DType::I64, &[])?])
}

pub(super) fn constant(s: &mut Site) -> Translated {
    if let Some(proto) = s.tensor("value") {
        let beside = &mut |_: &str| Err("in another file".to_owned());
        let found = stored(proto, beside).map_err(|wrong| wrong.text())?;
        s.state(0, found.element);
        return Ok(vec![s.hold(found.tensor())?]);
    }
    if let Some(numbers) = s.ints("value_ints") {
        return Ok(vec![list(s, &numbers)?]);
    }
    if let Some(numbers) = s.floats("value_floats") {
        return Ok(vec![s.hold(Tensor::f32(&[numbers.len()], numbers))?]);
    }
    if s.has("value_int") {
        return Ok(vec![s.integer(s.int("value_int", 0), DType::I64, &[])?]);
    }
    if s.has("value_float") {
        return Ok(vec![s.constant(s.float("value_float", 0.0), DType::F32, &[])?]);
    }
    Err("a constant of this kind".to_owned())
}

fn lengths(numbers: &[i64]) -> Result<Vec<usize>, String> {
    let size = |n: &i64| usize::try_from(*n).map_err(|_| format!("dims {numbers:?}"));
    numbers.iter().map(size).collect()
}

pub(super) fn constant_of_shape(s: &mut Site) -> Translated {
    let dims = lengths(&s.integers(0)?.unwrap_or_default())?;
    check_size(&dims)?;
    let Some(proto) = s.tensor("value") else {
        return Ok(vec![s.constant(0.0, DType::F32, &dims)?]);
    };
    let beside = &mut |_: &str| Err("in another file".to_owned());
    let stored = stored(proto, beside).map_err(|wrong| wrong.text())?;
    let value = stored.tensor();
    if value.count() != 1 {
        return Err(format!("a value of {} elements", value.count()));
    }
    s.state(0, stored.element);
    Ok(vec![match &value.data {
        Data::Int(numbers) => s.integer(numbers[0], value.dtype, &dims)?,
        Data::F64(_) | Data::F32(_) | Data::Bool(_) => {
            s.constant(value.scalar(), value.dtype, &dims)?
        }
    }])
}

pub(super) fn range(s: &mut Site) -> Translated {
    let [start, end, step] = [0, 1, 2].map(|at| s.known(at));
    let (Some(start), Some(end), Some(step)) = (start?, end?, step?) else {
        return Err("an operand is missing".to_owned());
    };
    if let [Data::Int(low), Data::Int(high), Data::Int(by)] = [&start.data, &end.data, &step.data]
        && let (&[low], &[high], &[by]) = (&low[..], &high[..], &by[..])
    {
        return Ok(vec![whole_range(s, start.dtype, [low, high, by])?]);
    }
    if [&start, &end, &step].iter().any(|t| t.count() != 1) {
        return Err("operands of more than one element".to_owned());
    }
    let (low, high, by) = (start.scalar(), end.scalar(), step.scalar());
    if by == 0.0 {
        return Err("a step of zero".to_owned());
    }
    let count = ((high - low) / by).ceil().max(0.0);
    if count > RANGE_MAX {
        return Err(format!("{count} elements"));
    }
    let numbers = (0..count as usize).map(|at| low + at as f64 * by).collect();
    Ok(vec![s.hold(Tensor::from_f64(start.dtype, &[count as usize], numbers))?])
}

/// Of integers, exactly.
fn whole_range(s: &mut Site, dtype: DType, [low, high, by]: [i64; 3]) -> Made {
    let (low, high, by) = (i128::from(low), i128::from(high), i128::from(by));
    if by == 0 {
        return Err("a step of zero".to_owned());
    }
    let count = (high - low + by - by.signum()).div_euclid(by).max(0);
    if count as f64 > RANGE_MAX {
        return Err(format!("{count} elements"));
    }
    let numbers = (0..count).map(|at| (low + at * by) as i64).collect();
    s.hold(Tensor::int(dtype, &[count as usize], numbers))
}

pub(super) fn reshape(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let (from, wanted) = (s.dims(x), s.list("shape", 1)?.ok_or("no shape")?);
    let allow_zero = s.int("allowzero", 0) != 0;
    let size = |(at, n): (usize, &i64)| match n {
        0 if !allow_zero => from.get(at).copied().ok_or_else(|| format!("no dim {at}")),
        -1 => Ok(1),
        n => usize::try_from(*n).map_err(|_| format!("dims {wanted:?}")),
    };
    let mut dims = wanted.iter().enumerate().map(size).collect::<Result<Vec<_>, String>>()?;
    if wanted.iter().filter(|n| **n == -1).count() > 1 {
        return Err(format!("dims {wanted:?}, of which more than one is open"));
    }
    if let Some(open) = wanted.iter().position(|n| *n == -1) {
        let (count, rest): (usize, usize) = (from.iter().product(), dims.iter().product());
        dims[open] = count.checked_div(rest).unwrap_or(0);
    }
    Ok(vec![s.reshape(x, &dims)?])
}

pub(super) fn flatten(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let (dims, axis) = (s.dims(x), s.int("axis", 1));
    let at = if axis == dims.len() as i64 { dims.len() } else { dim_at(axis, dims.len())? };
    let two = [dims[..at].iter().product(), dims[at..].iter().product()];
    Ok(vec![s.reshape(x, &two)?])
}

pub(super) fn transpose(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let ndim = s.ndim(x);
    let perm = s.ints("perm").unwrap_or_else(|| (0..ndim as i64).rev().collect());
    let perm = perm.iter().map(|p| dim_at(*p, ndim)).collect::<Result<Vec<_>, _>>()?;
    Ok(vec![s.transpose(x, &perm)?])
}

pub(super) fn squeeze(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let dims = s.dims(x);
    let gone: Vec<usize> = match s.list("axes", 1)? {
        Some(axes) => axes.iter().map(|a| dim_at(*a, dims.len())).collect::<Result<_, _>>()?,
        None => (0..dims.len()).filter(|at| dims[*at] == 1).collect(),
    };
    let kept: Vec<usize> =
        (0..dims.len()).filter(|at| !gone.contains(at)).map(|at| dims[at]).collect();
    Ok(vec![s.reshape(x, &kept)?])
}

pub(super) fn unsqueeze(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let axes = s.list("axes", 1)?.ok_or("no axes")?;
    let ndim = s.ndim(x) + axes.len();
    let new = axes.iter().map(|a| dim_at(*a, ndim)).collect::<Result<Vec<_>, _>>()?;
    let mut old = s.dims(x).into_iter();
    let size = |at: usize| if new.contains(&at) { 1 } else { old.next().unwrap_or(1) };
    let dims: Vec<usize> = (0..ndim).map(size).collect();
    Ok(vec![s.reshape(x, &dims)?])
}

pub(super) fn concat(s: &mut Site) -> Translated {
    let operands = s.all();
    let first = *operands.first().ok_or("no operands")?;
    let dim = dim_at(s.int("axis", 0), s.ndim(first))?;
    Ok(vec![s.push(Op::Concat { dim }, &operands)?])
}

pub(super) fn split(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let dim = dim_at(s.int("axis", 0), s.ndim(x))?;
    let (whole, count) = (s.dims(x)[dim], s.node.output.len());
    let said = s.int("num_outputs", count as i64);
    if said != count as i64 {
        return Err(format!("{said} pieces for {count} outputs"));
    }
    let parts = match s.list("split", 1)? {
        Some(parts) => lengths(&parts)?,
        None => {
            let size = whole.div_ceil(count.max(1));
            (0..count).map(|at| size.min(whole.saturating_sub(at * size))).collect()
        }
    };
    let sum = parts.iter().try_fold(0_usize, |sum, part| sum.checked_add(*part));
    if sum != Some(whole) {
        return Err(format!("pieces of {parts:?} of a dim of {whole}"));
    }
    let mut start = 0;
    let mut pieces = Vec::new();
    for size in parts {
        pieces.push(s.push(Op::Slice { dim, start, size }, &[x])?);
        start += size;
    }
    Ok(pieces)
}

pub(super) fn slice(s: &mut Site) -> Translated {
    let mut x = s.operand(0)?;
    let ndim = s.ndim(x);
    let starts = s.list("starts", 1)?.ok_or("no starts")?;
    let ends = s.list("ends", 2)?.ok_or("no ends")?;
    let axes = s.list("axes", 3)?.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = s.integers(4)?.unwrap_or_else(|| vec![1; starts.len()]);
    for (((start, end), axis), step) in starts.iter().zip(&ends).zip(&axes).zip(&steps) {
        let dim = dim_at(*axis, ndim)?;
        x = range_of(s, x, dim, *start, *end, *step)?;
    }
    Ok(vec![x])
}

/// Every `step`-th element of a range: whole windows of `step` elements, of which the first stays.
fn range_of(s: &mut Site, x: ValueId, dim: usize, start: i64, end: i64, step: i64) -> Made {
    let size = s.dims(x)[dim] as i64;
    if size == 0 {
        return Ok(x);
    }
    let bound = |at: i64, low: i64, high: i64| {
        (if at < 0 { at.saturating_add(size) } else { at }).clamp(low, high)
    };
    if step == 0 {
        return Err("a step of zero".to_owned());
    }
    if step < 0 {
        let (first, last) = (bound(start, 0, size - 1), bound(end, -1, size - 1));
        let x = s.push(Op::Reverse { dims: vec![dim] }, &[x])?;
        let (start, end) = (size - 1 - first, size - 1 - last);
        return forward_range(s, x, dim, start, end, step.saturating_neg());
    }
    forward_range(s, x, dim, bound(start, 0, size), bound(end, 0, size), step)
}

/// A strided slice from `start` on: one element of each group of `every`. The groups are whole.
fn one_of_each(
    s: &mut Site,
    x: ValueId,
    dim: usize,
    start: usize,
    count: usize,
    every: usize,
) -> Made {
    let mut dims = s.dims(x);
    let groups = dims[dim] / every;
    dims[dim] = every;
    dims.insert(dim, groups);
    let apart = s.reshape(x, &dims)?;
    let one = s.push(Op::Slice { dim: dim + 1, start: start % every, size: 1 }, &[apart])?;
    dims.remove(dim + 1);
    let one = s.reshape(one, &dims)?;
    if count == groups {
        return Ok(one);
    }
    s.push(Op::Slice { dim, start: start / every, size: count }, &[one])
}

fn forward_range(s: &mut Site, x: ValueId, dim: usize, start: i64, end: i64, step: i64) -> Made {
    let (start, size) = (start as usize, (end - start).max(0) as usize);
    let whole = s.dims(x)[dim];
    if let Some(every) = usize::try_from(step).ok().filter(|every| *every > 1)
        && whole.is_multiple_of(every)
        && size > 0
    {
        return one_of_each(s, x, dim, start, size.div_ceil(every), every);
    }
    let x = if size == whole { x } else { s.push(Op::Slice { dim, start, size }, &[x])? };
    let step = usize::try_from(step).unwrap_or(usize::MAX).min(size.max(1));
    if step == 1 {
        return Ok(x);
    }
    let count = size.div_ceil(step);
    let padded = s.push(Op::Pad { dim, before: 0, after: count * step - size }, &[x])?;
    let dims = s.dims(padded);
    let mut split = dims.clone();
    split.splice(dim..=dim, [count, step]);
    let split = s.reshape(padded, &split)?;
    let first = s.push(Op::Slice { dim: dim + 1, start: 0, size: 1 }, &[split])?;
    let mut result = dims;
    result[dim] = count;
    s.reshape(first, &result)
}

pub(super) fn expand(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let wanted = lengths(&s.integers(1)?.ok_or("no shape")?)?;
    let dims = super::site::joint(&s.dims(x), &wanted)?;
    Ok(vec![s.broadcast(x, &dims)?])
}

pub(super) fn tile(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let repeats = lengths(&s.integers(1)?.ok_or("no repeats")?)?;
    let dims = s.dims(x);
    if repeats.len() != dims.len() {
        return Err(format!("{} repeats of {} dims", repeats.len(), dims.len()));
    }
    let pairs = || repeats.iter().zip(&dims);
    check_size(&repeats)?;
    let apart: Vec<usize> = pairs().flat_map(|(r, d)| [*r, *d]).collect();
    let new = (0..dims.len()).map(|at| 2 * at).collect();
    let repeated = s.push(Op::Broadcast { new, dims: sizes(&apart) }, &[x])?;
    // Checked: the elements were made to fill these dims.
    let joined: Vec<usize> = pairs().map(|(r, d)| r * d).collect();
    Ok(vec![s.reshape(repeated, &joined)?])
}

/// Pads with a number; negative amounts cut off.
pub(super) fn pad(s: &mut Site) -> Translated {
    let mut x = s.operand(0)?;
    let ndim = s.ndim(x);
    let mode = s.text("mode", "constant");
    if mode != "constant" {
        return Err(format!("mode `{mode}`"));
    }
    let pads = s.list("pads", 1)?.ok_or("no pads")?;
    let axes = match s.integers(3)? {
        Some(axes) => axes.iter().map(|a| dim_at(*a, ndim)).collect::<Result<Vec<_>, _>>()?,
        None => (0..ndim).collect(),
    };
    if pads.len() != 2 * axes.len() {
        return Err(format!("{} pads of {} dims", pads.len(), axes.len()));
    }
    let value = match s.known(2)? {
        Some(value) if value.count() != 1 => return Err("more than one value".to_owned()),
        Some(value) => match &value.data {
            Data::Int(numbers) if !is_f64(numbers[0]) => {
                return Err(format!("a value of {}", numbers[0]));
            }
            Data::Int(_) | Data::F64(_) | Data::F32(_) | Data::Bool(_) => value.scalar(),
        },
        None => s.float("value", 0.0),
    };
    for (at, dim) in axes.iter().enumerate() {
        x = padded(s, x, *dim, [pads[at], pads[at + axes.len()]], value)?;
    }
    Ok(vec![x])
}

/// A dim with so many elements of a value before and after.
pub(super) fn padded(s: &mut Site, x: ValueId, dim: usize, pads: [i64; 2], value: f64) -> Made {
    if pads.iter().any(|pad| pad.unsigned_abs() > ELEMENTS_MAX as u64) {
        return Err(format!("pads of {} and {}, of more than 2^33", pads[0], pads[1]));
    }
    let cut = pads.map(|pad| pad.min(0).unsigned_abs() as usize);
    let more = pads.map(|pad| pad.max(0) as usize);
    let left = s.dims(x)[dim].checked_sub(cut[0] + cut[1]).ok_or("pads cut more than there is")?;
    let x = match cut {
        [0, 0] => x,
        _ => s.push(Op::Slice { dim, start: cut[0], size: left }, &[x])?,
    };
    if more == [0, 0] {
        return Ok(x);
    }
    let ty = s.ty(x);
    if value == 0.0 && ty.dtype != DType::Bool {
        return s.push(Op::Pad { dim, before: more[0], after: more[1] }, &[x]);
    }
    let mut dims = s.dims(x);
    let mut side = |size: usize, s: &mut Site| {
        dims[dim] = size;
        s.constant(value, ty.dtype, &dims)
    };
    let (before, after) = (side(more[0], s)?, side(more[1], s)?);
    s.push(Op::Concat { dim }, &[before, x, after])
}

/// The triangle of the last two dims.
pub(super) fn trilu(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let (dims, ndim) = (s.dims(x), s.ndim(x));
    if ndim < 2 {
        return Err("fewer than two dims".to_owned());
    }
    let k = s.integers(1)?.and_then(|k| k.first().copied()).unwrap_or(0);
    let k = diagonal(k, &dims[ndim - 2..]);
    let index =
        |dim: usize, start: i64| Op::Iota { dim, start, dtype: DType::I64, dims: sizes(&dims) };
    let column = s.push(index(ndim - 1, 0), &[])?;
    let row = s.push(index(ndim - 2, k), &[])?;
    let inside = match s.int("upper", 1) {
        0 => s.compare(Comparison::Le, column, row)?,
        _ => s.compare(Comparison::Le, row, column)?,
    };
    let zero = s.number(0.0, x)?;
    Ok(vec![s.select(inside, x, zero)?])
}

/// The nearest diagonal to `k` that is one of a matrix or beside its corners: beyond those all
/// elements lie on one side of it.
fn diagonal(k: i64, sizes: &[usize]) -> i64 {
    let [rows, columns] = [0, 1].map(|at| sizes[at] as i64);
    k.clamp(-rows, columns)
}

pub(super) fn eye_like(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let dims = s.dims(x);
    let own = s.element(0).ok_or("operand 0 is missing")?;
    let to = named(s, "dtype", own)?;
    s.state(0, to);
    if dims.len() != 2 {
        return Err(format!("{} dims", dims.len()));
    }
    let index =
        |dim: usize, start: i64| Op::Iota { dim, start, dtype: DType::I64, dims: sizes(&dims) };
    let column = s.push(index(1, 0), &[])?;
    let row = s.push(index(0, diagonal(s.int("k", 0), &dims)), &[])?;
    let on = s.compare(Comparison::Eq, column, row)?;
    Ok(vec![s.cast(on, to.carrier())?])
}

pub(super) fn one_hot(s: &mut Site) -> Translated {
    let (ids, values) = (s.operand(0)?, s.operand(2)?);
    let depth = s.integers(1)?.and_then(|d| d.first().copied()).ok_or("no depth")?;
    let depth = usize::try_from(depth).map_err(|_| format!("depth {depth}"))?;
    let dim = dim_at(s.int("axis", -1), s.ndim(ids) + 1)?;
    let ids = s.cast(ids, DType::I64)?;
    // Numbers without a sign are beyond all classes where they are held as negative ones.
    let ids = match is_u64(s, 0) {
        true => ids,
        false => super::indexing::not_negative(s, ids, depth)?,
    };
    let mut dims = s.dims(ids);
    dims.insert(dim, depth);
    let ids = s.push(Op::Broadcast { new: vec![dim], dims: sizes(&dims) }, &[ids])?;
    let index = Op::Iota { dim, start: 0, dtype: DType::I64, dims: sizes(&dims) };
    let index = s.push(index, &[])?;
    let hit = s.compare(Comparison::Eq, ids, index)?;
    let value = |s: &mut Site, start: usize| {
        let one = s.push(Op::Slice { dim: 0, start, size: 1 }, &[values])?;
        s.broadcast(one, &dims)
    };
    let (off, on) = (value(s, 0)?, value(s, 1)?);
    Ok(vec![s.select(hit, on, off)?])
}

/// Blocks of channels to squares of elements, or back.
pub(super) fn depth_and_space(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let block = usize::try_from(s.int("blocksize", 1)).map_err(|_| "a negative block size")?;
    let [n, c, h, w] = s.dims(x)[..] else { return Err("not four dims".to_owned()) };
    let area = block * block;
    let (split, perm, dims) = if s.node.op_type == "SpaceToDepth" {
        let (h, w) = (h.checked_div(block).unwrap_or(0), w.checked_div(block).unwrap_or(0));
        // Columns, rows, depth; or the depth first.
        let perm = match s.text("mode", "DCR").as_str() {
            "DCR" => [0, 3, 5, 1, 2, 4],
            _ => [0, 1, 3, 5, 2, 4],
        };
        ([n, c, h, block, w, block], perm, [n, c * area, h, w])
    } else {
        let inner = c.checked_div(area).unwrap_or(0);
        let dims = [n, inner, h * block, w * block];
        match s.text("mode", "DCR").as_str() {
            "DCR" => ([n, block, block, inner, h, w], [0, 3, 4, 1, 5, 2], dims),
            _ => ([n, inner, block, block, h, w], [0, 1, 4, 2, 5, 3], dims),
        }
    };
    let apart = s.reshape(x, &split)?;
    let turned = s.transpose(apart, &perm)?;
    Ok(vec![s.reshape(turned, &dims)?])
}

/// The sum of elements up to each one.
pub(super) fn cumulative_sum(s: &mut Site) -> Translated {
    let mut x = s.operand(0)?;
    let axis = s.integers(1)?.and_then(|a| a.first().copied()).ok_or("no axis")?;
    let dim = dim_at(axis, s.ndim(x))?;
    let reversed = s.int("reverse", 0) != 0;
    let flip = Op::Reverse { dims: vec![dim] };
    if reversed {
        x = s.push(flip.clone(), &[x])?;
    }
    let combiner = crate::op::Combiner::Sum;
    let mut sum = s.push(Op::Cumulative { combiner, dim }, &[x])?;
    if s.int("exclusive", 0) != 0 {
        let size = s.dims(x)[dim];
        let less = s.push(Op::Slice { dim, start: 0, size: size.saturating_sub(1) }, &[sum])?;
        sum = s.push(Op::Pad { dim, before: 1.min(size), after: 0 }, &[less])?;
    }
    Ok(vec![if reversed { s.push(flip, &[sum])? } else { sum }])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What no number of 64 bits can be added to is beside the matrix all the same.
    #[test]
    fn diagonals_beyond_a_matrix_are_beside_it() {
        let of = |k| diagonal(k, &[3, 5]);
        assert_eq!([of(i64::MAX), of(5), of(2), of(0)], [5, 5, 2, 0]);
        assert_eq!([of(i64::MIN), of(-3), of(-1)], [-3, -3, -1]);
    }
}
