//! Inverses of the circular and hyperbolic functions, in f64, from roots and logarithms.

use std::f64::consts::{FRAC_PI_2, LN_2, PI};

use super::site::{Made, Site, Translated};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Comparison, Unary};

pub(super) fn inverse(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let own = s.dtype(x);
    let x = s.cast(x, DType::F64)?;
    let made = match s.node.op_type.as_str() {
        "Atan" => arctangent(s, x)?,
        "Asin" => arcsine(s, x)?,
        "Acos" => {
            let sine = arcsine(s, x)?;
            let right = s.number(FRAC_PI_2, x)?;
            s.sub(right, sine)?
        }
        "Asinh" => {
            let size = s.unary(Unary::Abs, x)?;
            let made = area(s, size)?;
            let made = of_large(s, size, made)?;
            signed(s, made, x)?
        }
        "Acosh" => {
            let less = s.with(Binary::Sub, x, 1.0)?;
            let more = s.with(Binary::Add, x, 1.0)?;
            let (a, b) = (s.unary(Unary::Sqrt, less)?, s.unary(Unary::Sqrt, more)?);
            let root = s.mul(a, b)?;
            let sum = s.add(x, root)?;
            let log = s.unary(Unary::Log, sum)?;
            of_large(s, x, log)?
        }
        _ => {
            // (log(1 + x) - log(1 - x)) / 2, of the size, which keeps small numbers by the series.
            let size = s.unary(Unary::Abs, x)?;
            let one = s.number(1.0, x)?;
            let below = s.sub(one, size)?;
            let twice = s.with(Binary::Mul, size, 2.0)?;
            let ratio = s.div(twice, below)?;
            let log = log_of_more(s, ratio)?;
            let made = s.with(Binary::Mul, log, 0.5)?;
            signed(s, made, x)?
        }
    };
    Ok(vec![s.cast(made, own)?])
}

/// A size with the sign of a number.
fn signed(s: &mut Site, size: ValueId, like: ValueId) -> Made {
    let zero = s.number(0.0, like)?;
    let is_negative = s.compare(Comparison::Lt, like, zero)?;
    let minus = s.unary(Unary::Neg, size)?;
    s.select(is_negative, minus, size)
}

/// `log(1 + x)` of what is not negative: Kahan's correction of what `1 + x` rounds.
fn log_of_more(s: &mut Site, x: ValueId) -> Made {
    let sum = s.with(Binary::Add, x, 1.0)?;
    let log = s.unary(Unary::Log, sum)?;
    let kept = s.with(Binary::Sub, sum, 1.0)?;
    let ratio = s.div(x, kept)?;
    let made = s.mul(log, ratio)?;
    let zero = s.number(0.0, kept)?;
    let is_small = s.compare(Comparison::Eq, kept, zero)?;
    let near = s.select(is_small, x, made)?;
    // Infinities have no ratio.
    let infinity = s.number(f64::INFINITY, x)?;
    let is_finite = s.compare(Comparison::Lt, x, infinity)?;
    s.select(is_finite, near, log)
}

/// `log(x + sqrt(x² + 1))` of what is not negative.
fn area(s: &mut Site, x: ValueId) -> Made {
    let square = s.mul(x, x)?;
    let more = s.with(Binary::Add, square, 1.0)?;
    let root = s.unary(Unary::Sqrt, more)?;
    // x + sqrt(x² + 1) = 1 + x + x² / (1 + sqrt(x² + 1))
    let below = s.with(Binary::Add, root, 1.0)?;
    let term = s.div(square, below)?;
    let sum = s.add(x, term)?;
    log_of_more(s, sum)
}

/// `log(2 x)` where the square of `x` overflows.
fn of_large(s: &mut Site, x: ValueId, made: ValueId) -> Made {
    let bound = s.number(1e150, x)?;
    let is_large = s.compare(Comparison::Lt, bound, x)?;
    let log = s.unary(Unary::Log, x)?;
    let log = s.with(Binary::Add, log, LN_2)?;
    s.select(is_large, log, made)
}

/// `atan(x / sqrt((1 - x) (1 + x)))`
fn arcsine(s: &mut Site, x: ValueId) -> Made {
    let one = s.number(1.0, x)?;
    let (less, more) = (s.sub(one, x)?, s.add(one, x)?);
    let product = s.mul(less, more)?;
    let root = s.unary(Unary::Sqrt, product)?;
    let ratio = s.div(x, root)?;
    arctangent(s, ratio)
}

/// Angles are halved three times, `tan(a / 2) = tan a / (1 + sqrt(1 + tan² a))`, so that thirteen
/// terms of the series reach the last place.
fn arctangent(s: &mut Site, x: ValueId) -> Made {
    let size = s.unary(Unary::Abs, x)?;
    let one = s.number(1.0, x)?;
    let is_large = s.compare(Comparison::Lt, one, size)?;
    let turned = s.div(one, size)?;
    let mut t = s.select(is_large, turned, size)?;
    for _ in 0..3 {
        let square = s.mul(t, t)?;
        let more = s.with(Binary::Add, square, 1.0)?;
        let root = s.unary(Unary::Sqrt, more)?;
        let below = s.with(Binary::Add, root, 1.0)?;
        t = s.div(t, below)?;
    }
    let square = s.mul(t, t)?;
    let mut sum = s.number(0.0, t)?;
    for term in (0..13).rev() {
        let sign = if term % 2 == 0 { 1.0 } else { -1.0 };
        let product = s.mul(sum, square)?;
        sum = s.with(Binary::Add, product, sign / f64::from(2 * term + 1))?;
    }
    let series = s.mul(sum, t)?;
    let angle = s.with(Binary::Mul, series, 8.0)?;
    let right = s.number(PI / 2.0, angle)?;
    let rest = s.sub(right, angle)?;
    let angle = s.select(is_large, rest, angle)?;
    signed(s, angle, x)
}
