//! `Attention` and `RotaryEmbedding`.
//!
//! Legend: B batch, H heads, G heads of keys and values, Q queries, K keys, D numbers of a head.

use super::indexing::{check_ids, not_negative};
use super::moving::padded;
use super::narrowing::narrowed;
use super::site::{Made, Site, Translated};
use super::sums::softmax_of;
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Combiner, Comparison, Op, Unary};

/// `[B, Q, H D]` as `[B, H, Q, D]`.
fn heads(s: &mut Site, x: ValueId, attribute: &str) -> Made {
    let dims = s.dims(x);
    match dims[..] {
        [_, _, _, _] => Ok(x),
        [batch, length, width] => {
            let count = s.count(attribute, 0)?;
            let size = width.checked_div(count).filter(|size| size * count == width);
            let size = size.ok_or_else(|| format!("{count} heads of {width} numbers"))?;
            let apart = s.reshape(x, &[batch, length, count, size])?;
            s.transpose(apart, &[0, 2, 1, 3])
        }
        _ => Err(format!("an operand of dims {dims:?}")),
    }
}

pub(super) fn attention(s: &mut Site) -> Translated {
    let is_flat = s.ndim(s.operand(0)?) == 3;
    let narrow = s.elements.first().copied().flatten();
    let round = |s: &mut Site, x: ValueId| match narrow {
        Some(element) => narrowed(s, x, element),
        None => Ok(x),
    };
    let (q, k, v) = (s.operand(0)?, s.operand(1)?, s.operand(2)?);
    let q = heads(s, q, "q_num_heads")?;
    let (mut k, mut v) = (heads(s, k, "kv_num_heads")?, heads(s, v, "kv_num_heads")?);
    let past = match (s.optional(4), s.optional(5)) {
        (Some(past_k), Some(past_v)) => {
            let length = s.dims(past_k)[2];
            k = s.concat(2, &[past_k, k])?;
            v = s.concat(2, &[past_v, v])?;
            length
        }
        (None, None) => 0,
        _ => return Err("a past of keys or values alone".to_owned()),
    };
    let (present_k, present_v) = (k, v);
    let (k, v) = (grouped(s, k, q)?, grouped(s, v, q)?);
    let [batch, count, queries, size] = s.dims(q)[..] else { return Err("queries".to_owned()) };
    let keys = s.dims(k)[2];
    let scale = match s.float("scale", 0.0) {
        0.0 if !s.has("scale") => 1.0 / (size as f64).sqrt(),
        scale => scale,
    };
    let root = scale.sqrt();
    let (q, k) = (s.with(Binary::Mul, q, root)?, s.with(Binary::Mul, k, root)?);
    let (q, k) = (round(s, q)?, round(s, k)?);
    let product = s.contract("bhqd,bhkd->bhqk", q, k)?;
    let product = round(s, product)?;
    let cap = s.float("softcap", 0.0);
    let capped = if cap > 0.0 {
        let less = s.with(Binary::Div, product, cap)?;
        let bounded = s.unary(Unary::Tanh, less)?;
        s.with(Binary::Mul, bounded, cap)?
    } else {
        product
    };
    let dims = [batch, count, queries, keys];
    let bias = bias(s, &dims, past, s.dtype(product))?;
    let (scores, probabilities) = match bias {
        None => (capped, softmax_of(s, capped, 3, true)?),
        Some(bias) => {
            let scores = s.add(capped, bias)?;
            (scores, masked_softmax(s, scores, bias)?)
        }
    };
    let probabilities = round(s, probabilities)?;
    let mut y = s.contract("bhqk,bhkd->bhqd", probabilities, v)?;
    if is_flat {
        let width = count * s.dims(y)[3];
        y = s.transpose(y, &[0, 2, 1, 3])?;
        y = s.reshape(y, &[batch, queries, width])?;
    }
    let shown = match s.int("qk_matmul_output_mode", 0) {
        0 => product,
        // Before opset 24 the modes 1 and 2 stood for the bias and the cap in the other order.
        1 => capped,
        2 => scores,
        _ => probabilities,
    };
    Ok(vec![y, present_k, present_v, shown])
}

/// Heads of keys and values as often as those of the queries that share them.
fn grouped(s: &mut Site, x: ValueId, like: ValueId) -> Made {
    let (dims, wanted) = (s.dims(x), s.dims(like)[1]);
    let [batch, count, length, size] = dims[..] else { return Err(format!("dims {dims:?}")) };
    if count == wanted {
        return Ok(x);
    }
    let repeats = wanted.checked_div(count).filter(|repeats| repeats * count == wanted);
    let repeats = repeats.ok_or_else(|| format!("{wanted} heads on {count}"))?;
    let dims = super::site::sizes(&[batch, count, repeats, length, size]);
    let apart = s.push(Op::Broadcast { new: vec![2], dims }, &[x])?;
    s.reshape(apart, &[batch, wanted, length, size])
}

/// What is added to scores of dims `[B, H, Q, K]`: negative infinity where a query does not see a
/// key; none where all see all.
fn bias(
    s: &mut Site,
    dims: &[usize; 4],
    past: usize,
    dtype: DType,
) -> Result<Option<ValueId>, String> {
    let [batch, _, queries, keys] = *dims;
    let mut sum = None;
    if let Some(mask) = s.optional(3) {
        let mask = match s.dims(mask).last().copied() {
            Some(own) if own < keys => {
                let outside = if s.dtype(mask) == DType::Bool { 0.0 } else { f64::NEG_INFINITY };
                let last = s.ndim(mask) - 1;
                padded(s, mask, last, [0, (keys - own) as i64], outside)?
            }
            _ => mask,
        };
        let mask = s.broadcast(mask, dims)?;
        sum = Some(if s.dtype(mask) == DType::Bool { seen(s, mask, dtype)? } else { mask });
    }
    // How many keys come before the first query: the same for all samples, or one for each.
    let lengths = match s.optional(6) {
        Some(lengths) => {
            let lengths = s.cast(lengths, DType::I64)?;
            let lengths = s.reshape(lengths, &[batch, 1, 1, 1])?;
            Some(s.broadcast(lengths, dims)?)
        }
        None => None,
    };
    let (row, column) = (s.index(2, DType::I64, dims)?, s.index(3, DType::I64, dims)?);
    let position = match lengths {
        Some(lengths) => {
            let more = s.add(row, lengths)?;
            s.with(Binary::Sub, more, queries as f64)?
        }
        None => s.with(Binary::Add, row, past as f64)?,
    };
    let mut rules = Vec::new();
    if s.int("is_causal", 0) != 0 {
        rules.push(s.compare(Comparison::Le, column, position)?);
    }
    let (left, right) = (s.int("left_window_size", -1), s.int("right_window_size", -1));
    if left >= 0 {
        let least = s.with(Binary::Sub, position, left as f64)?;
        rules.push(s.compare(Comparison::Le, least, column)?);
    }
    if right >= 0 {
        let most = s.with(Binary::Add, position, right as f64)?;
        rules.push(s.compare(Comparison::Le, column, most)?);
    }
    if let Some(lengths) = lengths {
        rules.push(s.compare(Comparison::Lt, column, lengths)?);
    }
    for rule in rules {
        let term = seen(s, rule, dtype)?;
        sum = Some(match sum {
            Some(sum) => s.add(sum, term)?,
            None => term,
        });
    }
    Ok(sum)
}

/// Zero where something holds, negative infinity elsewhere.
fn seen(s: &mut Site, holds: ValueId, dtype: DType) -> Made {
    let dims = s.dims(holds);
    let (zero, never) =
        (s.constant(0.0, dtype, &dims)?, s.constant(f64::NEG_INFINITY, dtype, &dims)?);
    s.select(holds, zero, never)
}

/// A softmax over keys, zero in the rows that see none.
fn masked_softmax(s: &mut Site, scores: ValueId, bias: ValueId) -> Made {
    let most = s.reduce(Combiner::Max, vec![3], bias)?;
    let never = s.number(f64::NEG_INFINITY, most)?;
    let is_empty = s.compare(Comparison::Eq, most, never)?;
    let is_empty = s.repeat(is_empty, &[3], scores)?;
    let zero = s.number(0.0, scores)?;
    let safe = s.select(is_empty, zero, scores)?;
    let made = softmax_of(s, safe, 3, true)?;
    s.select(is_empty, zero, made)
}

/// Pairs of numbers of a head turned by angles: real and imaginary parts lie side by side, or one
/// half of the head apart.
pub(super) fn rotary(s: &mut Site) -> Translated {
    let own = s.operand(0)?;
    let (cosines, sines) = (s.operand(1)?, s.operand(2)?);
    let x = heads(s, own, "num_heads")?;
    let dims = s.dims(x);
    let [batch, count, length, size] = dims[..] else { return Err(format!("dims {dims:?}")) };
    let turned = match s.count("rotary_embedding_dim", 0)? {
        0 => size,
        turned => turned,
    };
    if turned % 2 != 0 || turned > size {
        return Err(format!("{turned} of {size} numbers"));
    }
    let half = turned / 2;
    let angle = |s: &mut Site, table: ValueId| -> Made {
        let rows = match s.optional(3) {
            Some(ids) => {
                let rows = s.dims(table).first().copied().unwrap_or(0);
                check_ids(s, 3, ids, rows)?;
                let ids = not_negative(s, ids, rows)?;
                s.push(Op::Gather { dim: 0, start: 0 }, &[table, ids])?
            }
            None => table,
        };
        let of = s.dims(rows);
        if of != [batch, length, half] {
            return Err(format!("angles of dims {of:?}"));
        }
        let rows = s.reshape(rows, &[batch, 1, length, half])?;
        s.broadcast(rows, &[batch, count, length, half])
    };
    let (cosines, sines) = (angle(s, cosines)?, angle(s, sines)?);
    let first = s.cut(x, 3, 0, turned)?;
    let pair = [batch, count, length, half];
    let is_interleaved = s.int("interleaved", 0) != 0;
    let (a, b) = if is_interleaved {
        let apart = s.reshape(first, &[batch, count, length, half, 2])?;
        let (a, b) = (s.cut(apart, 4, 0, 1)?, s.cut(apart, 4, 1, 1)?);
        (s.reshape(a, &pair)?, s.reshape(b, &pair)?)
    } else {
        (s.cut(first, 3, 0, half)?, s.cut(first, 3, half, half)?)
    };
    let (ac, bs) = (s.mul(cosines, a)?, s.mul(sines, b)?);
    let (as_, bc) = (s.mul(sines, a)?, s.mul(cosines, b)?);
    let (real, imaginary) = (s.sub(ac, bs)?, s.add(as_, bc)?);
    let mut y = if is_interleaved {
        let one = [batch, count, length, half, 1];
        let (real, imaginary) = (s.reshape(real, &one)?, s.reshape(imaginary, &one)?);
        let pairs = s.concat(4, &[real, imaginary])?;
        s.reshape(pairs, &[batch, count, length, turned])?
    } else {
        s.concat(3, &[real, imaginary])?
    };
    if turned < size {
        let rest = s.cut(x, 3, turned, size - turned)?;
        y = s.concat(3, &[y, rest])?;
    }
    if s.ndim(own) == 3 {
        y = s.transpose(y, &[0, 2, 1, 3])?;
        y = s.reshape(y, &s.dims(own))?;
    }
    Ok(vec![y])
}

/// `x sigmoid(alpha x)`, of half of the elements times the other half for `SwiGLU`.
pub(super) fn swish(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let (x, other) = match (s.node.op_type.as_str(), s.optional(1)) {
        ("SwiGLU", Some(other)) => (x, Some(other)),
        ("SwiGLU", None) => return Err("operand 1 is missing".to_owned()),
        _ => (x, None),
    };
    let scaled = s.with(Binary::Mul, x, s.float("alpha", 1.0))?;
    let minus = s.unary(Unary::Neg, scaled)?;
    let e = s.unary(Unary::Exp, minus)?;
    let below = s.with(Binary::Add, e, 1.0)?;
    let y = s.div(x, below)?;
    Ok(vec![match other {
        Some(other) => s.mul(y, other)?,
        None => y,
    }])
}
