//! Losses of classes, and the class that scores highest.

use super::indexing::along;
use super::site::{Made, Site, Translated, dim_at, sizes};
use super::sums::softmax_of;
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Combiner, Comparison, Op, Unary};

/// `-w[t] x[n, t, d]` for each target `t[n, d]`, reduced; targets that are ignored count nothing.
pub(super) fn negative_log_likelihood(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    Ok(vec![likelihood(s, x)?])
}

/// The same of the logarithms of the softmax over classes, which are the second result.
pub(super) fn softmax_cross_entropy(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    if s.ndim(x) < 2 {
        return Err("scores without classes".to_owned());
    }
    let logs = softmax_of(s, x, 1, false)?;
    Ok(vec![likelihood(s, logs)?, logs])
}

fn likelihood(s: &mut Site, x: ValueId) -> Made {
    let (target, weight) = (s.operand(1)?, s.optional(2));
    let (dims, of_target) = (s.dims(x), s.dims(target));
    if dims.len() < 2 || of_target.len() + 1 != dims.len() {
        return Err(format!("scores {dims:?} and targets {of_target:?}"));
    }
    let target = s.cast(target, DType::I64)?;
    let is_ignored = match s.has("ignore_index") {
        true => {
            let ignored = s.integer(s.int("ignore_index", 0), DType::I64, &of_target)?;
            Some(s.compare(Comparison::Eq, target, ignored)?)
        }
        false => None,
    };
    let none = s.number(0.0, target)?;
    let target = match is_ignored {
        Some(is_ignored) => s.select(is_ignored, none, target)?,
        None => target,
    };
    // Targets are not counted from the end: a negative one is beyond all classes.
    let is_negative = s.compare(Comparison::Lt, target, none)?;
    let beyond = s.number(dims[1] as f64, target)?;
    let class = s.select(is_negative, beyond, target)?;
    s.demand_rows(class, dims[1])?;
    let mut one_class = of_target.clone();
    one_class.insert(1, 1);
    let ids = s.reshape(target, &one_class)?;
    let picked = along(s, x, ids, 1)?;
    let picked = s.reshape(picked, &of_target)?;
    let mut weights = match weight {
        Some(weight) => s.push(Op::Gather { dim: 0, start: 0 }, &[weight, target])?,
        None => s.number(1.0, picked)?,
    };
    let mut picked = picked;
    if let Some(is_ignored) = is_ignored {
        let zero = s.number(0.0, picked)?;
        weights = s.select(is_ignored, zero, weights)?;
        picked = s.select(is_ignored, zero, picked)?;
    }
    let weighted = s.binary(Binary::Mul, picked, weights)?;
    let losses = s.unary(Unary::Neg, weighted)?;
    let all: Vec<usize> = (0..of_target.len()).collect();
    match s.text("reduction", "mean").as_str() {
        "none" => Ok(losses),
        "sum" => s.reduce(Combiner::Sum, all, losses),
        _ => {
            let sum = s.reduce(Combiner::Sum, all.clone(), losses)?;
            let count = s.reduce(Combiner::Sum, all, weights)?;
            s.binary(Binary::Div, sum, count)
        }
    }
}

/// One at the first of the largest along a dim, zero elsewhere.
pub(super) fn hardmax(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let (dims, axis) = (s.dims(x), s.int("axis", -1));
    if s.opset < 13 {
        return Err(format!("opset {}", s.opset));
    }
    let dim = dim_at(axis, dims.len())?;
    let found = s.push(Op::ArgMax { dim }, &[x])?;
    let found = s.push(Op::Broadcast { new: vec![dim], dims: sizes(&dims) }, &[found])?;
    let index = Op::Iota { dim, start: 0, dtype: DType::I32, dims: sizes(&dims) };
    let index = s.push(index, &[])?;
    let is_it = s.compare(Comparison::Eq, found, index)?;
    let dtype = s.dtype(x);
    Ok(vec![s.cast(is_it, dtype)?])
}
