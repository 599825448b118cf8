//! Pads of all kinds, crops, and sums and products along a dim.

use super::moving::{pad as pad_with_number, padded};
use super::site::{Made, Site, Translated, dim_at, sizes};
use super::sums::average;
use crate::module::ValueId;
use crate::op::{Binary, Combiner, Op, Unary, Windows};

/// Elements along a dim that is padded by others than a number at most: each place is a number.
/// Chosen: half a GiB of them.
const PLACES_MAX: i64 = 1 << 26;

/// Pads with a number, the elements at the edge, or those that a reflection or a repetition has
/// there.
pub(super) fn pad(s: &mut Site) -> Translated {
    let mode = s.text("mode", "constant");
    if mode == "constant" {
        return pad_with_number(s);
    }
    let mut x = s.operand(0)?;
    let ndim = s.ndim(x);
    let pads = s.list("pads", 1)?.ok_or("no pads")?;
    let axes = match s.integers(3)? {
        Some(axes) => axes.iter().map(|a| dim_at(*a, ndim)).collect::<Result<Vec<_>, _>>()?,
        None => (0..ndim).collect(),
    };
    if pads.len() != 2 * axes.len() {
        return Err(format!("{} pads of {} dims", pads.len(), axes.len()));
    }
    for (at, dim) in axes.iter().enumerate() {
        let (before, after) = (pads[at], pads[at + axes.len()]);
        let size = s.dims(x)[*dim] as i64;
        let count = size.checked_add(before).and_then(|n| n.checked_add(after));
        let Some(count) = count.filter(|count| (0..=PLACES_MAX).contains(count)) else {
            return Err(format!("pads {before} and {after} of {size}, to more than 2^26"));
        };
        if (before, after) == (0, 0) {
            continue;
        }
        if size == 0 {
            return Err("pads of nothing".to_owned());
        }
        let place = |at: i64| {
            let at = at - before;
            match mode.as_str() {
                "edge" => Ok(at.clamp(0, size - 1)),
                "wrap" => Ok(at.rem_euclid(size)),
                "reflect" if size == 1 => Ok(0),
                "reflect" => {
                    let at = at.rem_euclid(2 * (size - 1));
                    Ok(if at < size { at } else { 2 * (size - 1) - at })
                }
                other => Err(format!("mode `{other}`")),
            }
        };
        let places = (0..count).map(place).collect::<Result<Vec<i64>, _>>()?;
        let places: Vec<usize> = places.into_iter().map(|at| at as usize).collect();
        x = s.picked(x, *dim, &places)?;
    }
    Ok(vec![x])
}

/// The middle of a dim, or the dim in the middle of zeros.
pub(super) fn centre(s: &mut Site) -> Translated {
    let mut x = s.operand(0)?;
    let ndim = s.ndim(x);
    let wanted = s.integers(1)?.ok_or("no shape")?;
    let axes = match s.ints("axes") {
        Some(axes) => axes.iter().map(|a| dim_at(*a, ndim)).collect::<Result<Vec<_>, _>>()?,
        None => (0..ndim).collect(),
    };
    if wanted.len() != axes.len() {
        return Err(format!("{} sizes of {} dims", wanted.len(), axes.len()));
    }
    for (dim, wanted) in axes.iter().zip(&wanted) {
        let size = s.dims(x)[*dim] as i64;
        let more = wanted - size;
        // The odd one is at the end, of what is cut off and of what is added.
        let before = if more < 0 { -(-more / 2) } else { more / 2 };
        x = padded(s, x, *dim, [before, more - before], 0.0)?;
    }
    Ok(vec![x])
}

/// Products of the elements up to each one: of twice as many in every step.
pub(super) fn cumulative_product(s: &mut Site) -> Translated {
    let mut x = s.operand(0)?;
    let axis = s.integers(1)?.and_then(|a| a.first().copied()).ok_or("no axis")?;
    let dim = dim_at(axis, s.ndim(x))?;
    let flip = Op::Reverse { dims: vec![dim] };
    let is_reversed = s.int("reverse", 0) != 0;
    if is_reversed {
        x = s.push(flip.clone(), &[x])?;
    }
    let size = s.dims(x)[dim];
    if s.int("exclusive", 0) != 0 && size > 0 {
        let less = s.cut(x, dim, 0, size - 1)?;
        x = padded(s, less, dim, [1, 0], 1.0)?;
    }
    let mut step = 1;
    while step < size {
        let less = s.cut(x, dim, 0, size - step)?;
        let moved = padded(s, less, dim, [step as i64, 0], 1.0)?;
        x = s.mul(x, moved)?;
        step *= 2;
    }
    Ok(vec![if is_reversed { s.push(flip, &[x])? } else { x }])
}

/// Sizes of which a determinant is written out at most.
const DETERMINANT_MAX: usize = 5;

/// The determinants of the last two dims, by the elements of the first row.
pub(super) fn determinant(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let dims = s.dims(x);
    let [outer @ .., rows, columns] = &dims[..] else { return Err("not a matrix".to_owned()) };
    if rows != columns || *rows == 0 || *rows > DETERMINANT_MAX {
        return Err(format!("matrices of {rows} by {columns}, not of 1 to {DETERMINANT_MAX}"));
    }
    let mut elements = Vec::new();
    for row in 0..*rows {
        for column in 0..*rows {
            let of_row = s.cut(x, outer.len(), row, 1)?;
            let one = s.cut(of_row, outer.len() + 1, column, 1)?;
            elements.push(s.reshape(one, outer)?);
        }
    }
    let all: Vec<usize> = (0..*rows).collect();
    Ok(vec![minor(s, &elements, *rows, 0, &all)?])
}

/// Of the rows from one on, and of some columns.
fn minor(s: &mut Site, elements: &[ValueId], size: usize, row: usize, columns: &[usize]) -> Made {
    let mut sum = None;
    for (at, column) in columns.iter().enumerate() {
        let mut term = elements[row * size + column];
        if row + 1 < size {
            let rest: Vec<usize> = columns.iter().copied().filter(|c| c != column).collect();
            let rest = minor(s, elements, size, row + 1, &rest)?;
            term = s.mul(term, rest)?;
        }
        sum = Some(match (sum, at % 2) {
            (None, _) => term,
            (Some(sum), 0) => s.add(sum, term)?,
            (Some(sum), _) => s.sub(sum, term)?,
        });
    }
    sum.ok_or_else(|| "a matrix of nothing".to_owned())
}

/// `x / (bias + alpha / size Σ x²)^beta`, over channels nearby.
pub(super) fn local_response(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let size = s.count("size", 1)?;
    if s.ndim(x) < 2 || size == 0 {
        return Err(format!("{size} channels of {:?}", s.dims(x)));
    }
    let square = s.mul(x, x)?;
    let before = (size - 1) / 2;
    let pads = [before as i64, (size - 1 - before) as i64];
    let padded = padded(s, square, 1, pads, 0.0)?;
    let windows = Windows { dim: 1, size, stride: 1, dilation: 1 };
    let windows = s.push(Op::Window(windows), &[padded])?;
    let sum = s.reduce(Combiner::Sum, vec![2], windows)?;
    let scaled = s.with(Binary::Mul, sum, s.float("alpha", 1e-4) / size as f64)?;
    let more = s.with(Binary::Add, scaled, s.float("bias", 1.0))?;
    let below = s.with(Binary::Pow, more, s.float("beta", 0.75))?;
    Ok(vec![s.div(x, below)?])
}

/// `(x - mean) / (deviation + 1e-9)` along dims.
pub(super) fn standardised(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let axes = s.ints("axes").unwrap_or_else(|| vec![0, 2, 3]);
    let mut over = axes.iter().map(|a| dim_at(*a, s.ndim(x))).collect::<Result<Vec<_>, _>>()?;
    over.sort_unstable();
    over.dedup();
    let mean = average(s, x, &over)?;
    let means = s.repeat(mean, &over, x)?;
    let centred = s.sub(x, means)?;
    let square = s.mul(centred, centred)?;
    let variance = average(s, square, &over)?;
    let deviation = s.unary(Unary::Sqrt, variance)?;
    let below = s.with(Binary::Add, deviation, 1e-9)?;
    let below = s.repeat(below, &over, x)?;
    Ok(vec![s.div(centred, below)?])
}

/// A convolution along time that sees no later step, of every channel alone, and its last inputs.
pub(super) fn causal_conv(s: &mut Site) -> Translated {
    let (x, w) = (s.operand(0)?, s.operand(1)?);
    let ([batch, channels, length], [_, 1, size]) = (&s.dims(x)[..], &s.dims(w)[..]) else {
        return Err(format!("dims {:?} and {:?}", s.dims(x), s.dims(w)));
    };
    let (batch, channels, length, size) = (*batch, *channels, *length, *size);
    let before = size.checked_sub(1).ok_or("a kernel of nothing")?;
    let past = match s.optional(3) {
        Some(past) => past,
        None => s.constant(0.0, s.dtype(x), &[batch, channels, before])?,
    };
    let whole = if before == 0 { x } else { s.concat(2, &[past, x])? };
    let state = s.cut(whole, 2, length, before)?;
    let windows = Windows { dim: 2, size, stride: 1, dilation: 1 };
    let windows = s.push(Op::Window(windows), &[whole])?;
    let w = s.reshape(w, &[channels, size])?;
    let dims = sizes(&[batch, channels, length, size]);
    let w = s.push(Op::Broadcast { new: vec![0, 2], dims }, &[w])?;
    let products = s.mul(windows, w)?;
    let mut y = s.reduce(Combiner::Sum, vec![3], products)?;
    if let Some(bias) = s.optional(2) {
        let dims = sizes(&[batch, channels, length]);
        let bias = s.push(Op::Broadcast { new: vec![0, 2], dims }, &[bias])?;
        y = s.add(y, bias)?;
    }
    match s.text("activation", "none").as_str() {
        "none" => {}
        "silu" | "swish" => {
            let minus = s.unary(Unary::Neg, y)?;
            let e = s.unary(Unary::Exp, minus)?;
            let below = s.with(Binary::Add, e, 1.0)?;
            y = s.div(y, below)?;
        }
        other => return Err(format!("activation `{other}`")),
    }
    Ok(vec![y, state])
}

/// Attention as a recurrence: a state of keys by values, which decays and learns.
///
/// Legend: B batch, G heads of keys and values, R queries of one, D numbers of a key, E of a value.
pub(super) fn linear_attention(s: &mut Site) -> Translated {
    let (q, k, v) = (s.operand(0)?, s.operand(1)?, s.operand(2)?);
    let (heads, groups) = (s.count("q_num_heads", 0)?, s.count("kv_num_heads", 0)?);
    let [batch, steps, width] = s.dims(q)[..] else { return Err("not three dims".to_owned()) };
    let shared = heads.checked_div(groups).filter(|r| *r > 0 && r * groups == heads);
    let shared = shared.ok_or_else(|| format!("{heads} heads on {groups}"))?;
    let (d, e) = (width / heads, s.dims(v)[2] / groups);
    if steps > 4096 || width != d * heads || s.dims(v)[2] != e * groups {
        return Err(format!("{steps} steps of {width} and {}", s.dims(v)[2]));
    }
    let rule = s.text("update_rule", "gated_delta");
    let (has_decay, has_rate) = (rule.starts_with("gated"), rule.ends_with("delta"));
    if !matches!(rule.as_str(), "linear" | "gated" | "delta" | "gated_delta") {
        return Err(format!("update_rule `{rule}`"));
    }
    let scale = match s.float("scale", 0.0) {
        0.0 => 1.0 / (d as f64).sqrt(),
        scale => scale,
    };
    let mut state = match s.optional(3) {
        Some(state) => state,
        None => s.constant(0.0, s.dtype(q), &[batch, groups, d, e])?,
    };
    let square = [batch, groups, d, e];
    let step = |s: &mut Site, x: ValueId, t: usize, dims: &[usize]| -> Made {
        let one = s.cut(x, 1, t, 1)?;
        s.reshape(one, dims)
    };
    let mut outputs = Vec::new();
    for t in 0..steps {
        let key = step(s, k, t, &[batch, groups, d])?;
        let mut value = step(s, v, t, &[batch, groups, e])?;
        if has_decay {
            let decay = s.operand(4)?;
            let per = s.dims(decay)[2] / groups;
            let decay = step(s, decay, t, &[batch, groups, per, 1])?;
            let decay = s.unary(Unary::Exp, decay)?;
            let decay = s.broadcast(decay, &square)?;
            state = s.mul(state, decay)?;
        }
        if has_rate {
            let rate = s.operand(5)?;
            let own = s.dims(rate)[2];
            let rate = step(s, rate, t, &[batch, own, 1])?;
            let rate = s.broadcast(rate, &[batch, groups, e])?;
            let recalled = s.contract("bgde,bgd->bge", state, key)?;
            let error = s.sub(value, recalled)?;
            value = s.mul(rate, error)?;
        }
        let new = s.contract("bgd,bge->bgde", key, value)?;
        state = s.add(state, new)?;
        let query = step(s, q, t, &[batch, groups, shared, d])?;
        let y = s.contract("bgrd,bgde->bgre", query, state)?;
        let y = s.with(Binary::Mul, y, scale)?;
        outputs.push(s.reshape(y, &[batch, 1, heads * e])?);
    }
    Ok(vec![s.concat(1, &outputs)?, state])
}
