//! Steps of optimizers, of any number of tensors at once.

use super::site::{Made, Site, Translated};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Comparison, Unary};

/// What all tensors of a step share.
struct Step {
    rate: ValueId,
    round: ValueId,
}

/// How one tensor is updated: its own value first, then its states.
type Update = fn(&mut Site, &Step, &[ValueId]) -> Result<Vec<ValueId>, String>;

pub(super) fn momentum(s: &mut Site) -> Translated {
    updated(s, 3, |s, step, of| {
        let [x, gradient, momentum] = of[..] else { return Err("three operands".to_owned()) };
        let gradient = regularised(s, x, gradient)?;
        let zero = s.number(0.0, step.round)?;
        let is_later = s.compare(Comparison::Lt, zero, step.round)?;
        let beta = s.constant(s.float("beta", 0.0), s.dtype(x), &[])?;
        let one = s.number(1.0, beta)?;
        let beta = s.select(is_later, beta, one)?;
        let new = s.broadcast(beta, &s.dims(x))?;
        let new = s.mul(new, gradient)?;
        let alpha = s.float("alpha", 0.0);
        let old = s.with(Binary::Mul, momentum, alpha)?;
        let new = s.add(old, new)?;
        let direction = match s.text("mode", "").as_str() {
            "nesterov" => {
                let ahead = s.with(Binary::Mul, new, alpha)?;
                s.add(gradient, ahead)?
            }
            "standard" => new,
            other => return Err(format!("mode `{other}`")),
        };
        Ok(vec![moved(s, x, step.rate, direction)?, new])
    })
}

pub(super) fn adagrad(s: &mut Site) -> Translated {
    updated(s, 3, |s, step, of| {
        let [x, gradient, squares] = of[..] else { return Err("three operands".to_owned()) };
        let gradient = regularised(s, x, gradient)?;
        let square = s.mul(gradient, gradient)?;
        let squares = s.add(squares, square)?;
        let round = s.cast(step.round, s.dtype(x))?;
        let decay = s.with(Binary::Mul, round, s.float("decay_factor", 0.0))?;
        let below = s.with(Binary::Add, decay, 1.0)?;
        let rate = s.div(step.rate, below)?;
        let root = s.unary(Unary::Sqrt, squares)?;
        let root = s.with(Binary::Add, root, s.float("epsilon", 1e-6))?;
        let direction = s.div(gradient, root)?;
        Ok(vec![moved(s, x, rate, direction)?, squares])
    })
}

pub(super) fn adam(s: &mut Site) -> Translated {
    updated(s, 4, |s, step, of| {
        let [x, gradient, mean, squares] = of[..] else { return Err("four operands".to_owned()) };
        let gradient = regularised(s, x, gradient)?;
        let (alpha, beta) = (s.float("alpha", 0.9), s.float("beta", 0.999));
        let mean = averaged(s, alpha, mean, gradient)?;
        let square = s.mul(gradient, gradient)?;
        let squares = averaged(s, beta, squares, square)?;
        let round = s.cast(step.round, DType::F64)?;
        let left = |s: &mut Site, decay: f64| -> Made {
            let base = s.number(decay, round)?;
            let power = s.binary(Binary::Pow, base, round)?;
            let one = s.number(1.0, round)?;
            s.sub(one, power)
        };
        let (of_mean, of_squares) = (left(s, alpha)?, left(s, beta)?);
        let root = s.unary(Unary::Sqrt, of_squares)?;
        let factor = s.div(root, of_mean)?;
        let (zero, one) = (s.number(0.0, round)?, s.number(1.0, round)?);
        let is_later = s.compare(Comparison::Lt, zero, round)?;
        let factor = s.select(is_later, factor, one)?;
        let factor = s.cast(factor, s.dtype(x))?;
        let rate = s.mul(step.rate, factor)?;
        let root = s.unary(Unary::Sqrt, squares)?;
        let root = s.with(Binary::Add, root, s.float("epsilon", 1e-6))?;
        let direction = s.div(mean, root)?;
        let new = moved(s, x, rate, direction)?;
        let kept = 1.0 - s.float("norm_coefficient_post", 0.0);
        Ok(vec![s.with(Binary::Mul, new, kept)?, mean, squares])
    })
}

/// Operands are the rate, the round, all tensors, all gradients and all states of each kind;
/// results all tensors and all states.
fn updated(s: &mut Site, kinds: usize, update: Update) -> Translated {
    let (rate, round) = (s.operand(0)?, s.operand(1)?);
    let (rate, round) = (s.reshape(rate, &[])?, s.reshape(round, &[])?);
    let operands = s.all()[2..].to_vec();
    let count = operands.len() / kinds;
    if count == 0 || count * kinds != operands.len() {
        return Err(format!("{} operands", operands.len()));
    }
    let mut results = vec![Vec::new(); kinds - 1];
    for at in 0..count {
        let of: Vec<ValueId> = (0..kinds).map(|kind| operands[kind * count + at]).collect();
        let rate = s.cast(rate, s.dtype(of[0]))?;
        let made = update(s, &Step { rate, round }, &of)?;
        results.iter_mut().zip(made).for_each(|(all, one)| all.push(one));
    }
    Ok(results.concat())
}

fn regularised(s: &mut Site, x: ValueId, gradient: ValueId) -> Made {
    let term = s.with(Binary::Mul, x, s.float("norm_coefficient", 0.0))?;
    s.add(term, gradient)
}

fn averaged(s: &mut Site, decay: f64, old: ValueId, new: ValueId) -> Made {
    let (old, new) = (s.with(Binary::Mul, old, decay)?, s.with(Binary::Mul, new, 1.0 - decay)?);
    s.add(old, new)
}

fn moved(s: &mut Site, x: ValueId, rate: ValueId, direction: ValueId) -> Made {
    let rate = s.broadcast(rate, &s.dims(x))?;
    let step = s.mul(rate, direction)?;
    s.sub(x, step)
}
