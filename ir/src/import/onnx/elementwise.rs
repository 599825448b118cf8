//! Operators of one element at a time.

use super::checks::Limit;
use super::site::{Made, Site, Translated};
use super::unsigned::{self, is_u64, ordered, to_float};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Comparison, Unary};

pub(super) fn unary(s: &mut Site, how: Unary) -> Translated {
    let x = s.operand(0)?;
    if how == Unary::Abs && (s.dtype(x) == DType::U32 || is_u64(s, 0)) {
        return Ok(vec![x]);
    }
    Ok(vec![s.unary(how, x)?])
}

/// Of operands that are repeated to common dims.
pub(super) fn binary(s: &mut Site, how: Binary) -> Translated {
    let is_u64 = is_u64(s, 0);
    // The order of numbers without a sign.
    let turns = is_u64 && matches!(how, Binary::Max | Binary::Min);
    let operands = s.all();
    let operands: Result<Vec<ValueId>, String> =
        operands.into_iter().map(|x| ordered(s, x, turns)).collect();
    let aligned = s.aligned(&operands?)?;
    let (first, rest) = aligned.split_first().ok_or("no operands")?;
    let mut result = *first;
    for x in rest {
        result = match how {
            Binary::Div if is_u64 => unsigned::quotient(s, result, *x)?,
            Binary::Div => divide(s, result, *x)?,
            Binary::Add | Binary::Sub | Binary::Mul | Binary::Max | Binary::Min | Binary::Pow => {
                s.binary(how, result, *x)?
            }
        };
    }
    Ok(vec![ordered(s, result, turns)?])
}

/// A quotient of integers is rounded towards zero.
pub(super) fn divide(s: &mut Site, a: ValueId, b: ValueId) -> Made {
    let quotient = s.binary(Binary::Div, a, b)?;
    if s.is_float(a) {
        return Ok(quotient);
    }
    let product = s.binary(Binary::Mul, quotient, b)?;
    let zero = s.number(0.0, a)?;
    let low = s.compare(Comparison::Lt, quotient, zero)?;
    let exact = s.compare(Comparison::Eq, product, a)?;
    let up = s.with(Binary::Add, quotient, 1.0)?;
    let rounded = s.select(low, up, quotient)?;
    s.select(exact, quotient, rounded)
}

pub(super) fn mean(s: &mut Site) -> Translated {
    let sum = binary(s, Binary::Add)?[0];
    let count = s.all().len() as f64;
    Ok(vec![s.with(Binary::Div, sum, count)?])
}

/// `fmod=0` has the sign of the divisor, `fmod=1` that of the dividend.
pub(super) fn modulo(s: &mut Site) -> Translated {
    let aligned = s.aligned(&s.all())?;
    let [a, b] = aligned[..] else { return Err("not two operands".to_owned()) };
    if s.is_float(a) && s.int("fmod", 0) == 0 {
        return Err("fmod=0 of floating-point numbers".to_owned());
    }
    if s.is_float(a) {
        return Ok(vec![remainder(s, a, b)?]);
    }
    let quotient = match s.int("fmod", 0) {
        _ if is_u64(s, 0) => unsigned::quotient(s, a, b)?,
        0 => s.binary(Binary::Div, a, b)?,
        _ => divide(s, a, b)?,
    };
    let product = s.binary(Binary::Mul, quotient, b)?;
    Ok(vec![s.binary(Binary::Sub, a, product)?])
}

/// How many bits a quotient may have so that its products with divisors of 24 bits are binary64.
const QUOTIENT_BITS: i32 = 28;

/// Of floating-point numbers, with the sign of the dividend: exact. Quotients of f64 from
/// 2^[`LIMIT`] on are refused when the model runs.
fn remainder(s: &mut Site, a: ValueId, b: ValueId) -> Made {
    let own = s.dtype(a);
    let (wide, divisor) = (s.cast(a, DType::F64)?, s.cast(b, DType::F64)?);
    let (size, divisor) = (s.unary(Unary::Abs, wide)?, s.unary(Unary::Abs, divisor)?);
    let left = if own == DType::F64 {
        rest_of_double(s, size, divisor)?
    } else {
        rest_in_steps(s, size, divisor, if own == DType::F16 { 2 } else { 10 })?
    };
    // An infinite divisor leaves what is smaller.
    let infinity = s.number(f64::INFINITY, divisor)?;
    let is_whole = s.compare(Comparison::Eq, divisor, infinity)?;
    let is_finite = s.compare(Comparison::Lt, size, infinity)?;
    let finite = s.select(is_finite, size, left)?;
    let left = s.select(is_whole, finite, left)?;
    let negative = s.unary(Unary::Neg, left)?;
    let zero = s.number(0.0, wide)?;
    let is_negative = s.compare(Comparison::Lt, wide, zero)?;
    let made = s.select(is_negative, negative, left)?;
    s.cast(made, own)
}

/// As in long division: what is left of `a` by ever smaller multiples of `b`, each with a quotient
/// of [`QUOTIENT_BITS`]. Of numbers of 24 bits no step rounds: the product is of 52 bits, what is
/// left of 24, and the quotient is below an integer if it is so unrounded. Ten steps divide the
/// largest f32, 2^128, by the least, 2^-149; two do so for f16.
fn rest_in_steps(s: &mut Site, a: ValueId, b: ValueId, steps: i32) -> Made {
    let mut left = a;
    for step in (0..steps).rev() {
        let multiple = s.with(Binary::Mul, b, f64::from(QUOTIENT_BITS * step).exp2())?;
        let ratio = s.binary(Binary::Div, left, multiple)?;
        let quotient = s.unary(Unary::Floor, ratio)?;
        let product = s.binary(Binary::Mul, quotient, multiple)?;
        left = s.binary(Binary::Sub, left, product)?;
    }
    Ok(left)
}

/// Bits of a quotient of one step of f64, and steps: quotients up to 2^200 are divided.
const STEP_BITS: i32 = 25;
const STEPS: i32 = 8;
const LIMIT: i32 = STEP_BITS * STEPS;

/// What is left of `a` by multiples of `b`, of non-negative f64: in each step by the nearest
/// multiple of `b` times a power of two, and that more where too much was taken.
fn rest_of_double(s: &mut Site, a: ValueId, b: ValueId) -> Made {
    demand_quotient(s, a, b)?;
    // So that halves of what is divided by are finite; it is of no fewer bits unless the quotient
    // is beyond the limit.
    let (scale, bound) = (60.0_f64.exp2(), s.number(900.0_f64.exp2(), a)?);
    let is_huge = s.compare(Comparison::Lt, bound, a)?;
    let scaled = |s: &mut Site, x: ValueId, by: f64| -> Made {
        let other = s.with(Binary::Mul, x, by)?;
        s.select(is_huge, other, x)
    };
    let (mut left, b) = (scaled(s, a, 1.0 / scale)?, scaled(s, b, 1.0 / scale)?);
    for step in (0..STEPS).rev() {
        let multiple = s.with(Binary::Mul, b, f64::from(STEP_BITS * step).exp2())?;
        left = rest_of_step(s, left, multiple)?;
    }
    scaled(s, left, scale)
}

/// Demands that the quotient is one that [`rest_of_double`] divides; what is no number by itself
/// remains none.
fn demand_quotient(s: &mut Site, a: ValueId, b: ValueId) -> Result<(), String> {
    let ratio = s.binary(Binary::Div, a, b)?;
    let (zero, infinity) = (s.number(0.0, a)?, s.number(f64::INFINITY, a)?);
    let is_finite = s.compare(Comparison::Lt, a, infinity)?;
    let of_finite = s.select(is_finite, ratio, zero)?;
    let is_divided = s.compare(Comparison::Lt, zero, b)?;
    let size = s.select(is_divided, of_finite, zero)?;
    s.demand(size, Limit::QuotientBits(LIMIT))
}

/// What is left of `a` by the nearest multiple of `b`, and `b` more where that is too large; `a`
/// where it is below half of `b`.
///
/// `b` is split into halves of 26 bits (T. J. Dekker, A floating-point technique for extending the
/// available precision, 1971), so that both products with a quotient below 2^26 are exact; the rest
/// is at most half of `b`, so that the differences are as well.
fn rest_of_step(s: &mut Site, a: ValueId, b: ValueId) -> Made {
    let ratio = s.binary(Binary::Div, a, b)?;
    let raised = s.with(Binary::Add, ratio, 0.5)?;
    let quotient = s.unary(Unary::Floor, raised)?;
    let scaled = s.with(Binary::Mul, b, 134_217_729.0)?;
    let excess = s.binary(Binary::Sub, scaled, b)?;
    let high = s.binary(Binary::Sub, scaled, excess)?;
    let low = s.binary(Binary::Sub, b, high)?;
    let mut left = a;
    for half in [high, low] {
        let product = s.binary(Binary::Mul, quotient, half)?;
        left = s.binary(Binary::Sub, left, product)?;
    }
    let raised = s.binary(Binary::Add, left, b)?;
    let zero = s.number(0.0, left)?;
    let is_negative = s.compare(Comparison::Lt, left, zero)?;
    let left = s.select(is_negative, raised, left)?;
    let half = s.number(0.5, ratio)?;
    let is_small = s.compare(Comparison::Lt, ratio, half)?;
    s.select(is_small, a, left)
}

/// Of the type of the base. An integer to the power of a fraction is computed in binary64, which
/// has all integers up to 2^53.
pub(super) fn power(s: &mut Site) -> Translated {
    let (x, exponent) = (s.operand(0)?, s.operand(1)?);
    let own = s.dtype(x);
    let exponent = match is_u64(s, 1) {
        true if s.is_float(x) => to_float(s, exponent, own)?,
        true => return Err("exponents of type u64 of integers".to_owned()),
        false => exponent,
    };
    if is_u64(s, 0) {
        return Err("elements of type u64".to_owned());
    }
    let wide = if s.is_float(exponent) && !s.is_float(x) { DType::F64 } else { own };
    let operands = [s.cast(x, wide)?, s.cast(exponent, wide)?];
    let aligned = s.aligned(&operands)?;
    let made = s.binary(Binary::Pow, aligned[0], aligned[1])?;
    Ok(vec![s.cast(made, own)?])
}

/// Whether the first operand is larger is whether the second one is smaller.
pub(super) fn compare(s: &mut Site, how: Comparison, swapped: bool) -> Translated {
    let aligned = s.aligned(&s.all())?;
    let [a, b] = aligned[..] else { return Err("not two operands".to_owned()) };
    let (a, b) = if swapped { (b, a) } else { (a, b) };
    let turns = how != Comparison::Eq && is_u64(s, 0);
    let (a, b) = (ordered(s, a, turns)?, ordered(s, b, turns)?);
    Ok(vec![s.compare(how, a, b)?])
}

pub(super) fn not(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    Ok(vec![s.not(x)?])
}

/// `and`, `or` and `xor` of truth values.
pub(super) fn logic(s: &mut Site, name: &str) -> Translated {
    let aligned = s.aligned(&s.all())?;
    let [a, b] = aligned[..] else { return Err("not two operands".to_owned()) };
    let made = match name {
        "And" => s.select(a, b, a)?,
        "Or" => s.select(a, a, b)?,
        _ => {
            let same = s.compare(Comparison::Eq, a, b)?;
            s.not(same)?
        }
    };
    Ok(vec![made])
}

pub(super) fn choose(s: &mut Site) -> Translated {
    let operands = s.all();
    let aligned = s.aligned(&operands)?;
    let [condition, a, b] = aligned[..] else { return Err("not three operands".to_owned()) };
    Ok(vec![s.select(condition, a, b)?])
}

pub(super) fn is_nan(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let same = s.compare(Comparison::Eq, x, x)?;
    Ok(vec![s.not(same)?])
}

/// Infinities of either sign, or of the one that is asked for.
pub(super) fn is_infinite(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let (up, down) = (s.int("detect_positive", 1) != 0, s.int("detect_negative", 1) != 0);
    let x = match (up, down) {
        (true, true) => s.unary(Unary::Abs, x)?,
        (false, true) => s.unary(Unary::Neg, x)?,
        (true, false) => x,
        (false, false) => return Ok(vec![s.constant(0.0, DType::Bool, &s.dims(x))?]),
    };
    let infinity = s.number(f64::INFINITY, x)?;
    Ok(vec![s.compare(Comparison::Eq, x, infinity)?])
}

/// Towards zero by `bias` beyond `lambd`, zero between.
pub(super) fn shrink(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let (bias, bound) = (s.float("bias", 0.0), s.float("lambd", 0.5));
    let (less, more) = (s.with(Binary::Sub, x, bias)?, s.with(Binary::Add, x, bias)?);
    let [zero, low, high] = [s.number(0.0, x)?, s.number(-bound, x)?, s.number(bound, x)?];
    let is_low = s.compare(Comparison::Lt, x, low)?;
    let is_high = s.compare(Comparison::Lt, high, x)?;
    let inner = s.select(is_low, more, zero)?;
    Ok(vec![s.select(is_high, less, inner)?])
}

pub(super) fn clip(s: &mut Site) -> Translated {
    let (own, turns) = (s.operand(0)?, is_u64(s, 0));
    let mut x = ordered(s, own, turns)?;
    let dims = s.dims(x);
    for (at, name, how) in [(1, "min", Binary::Max), (2, "max", Binary::Min)] {
        let bound = match s.optional(at) {
            Some(bound) => {
                let bound = ordered(s, bound, turns)?;
                Some(s.broadcast(bound, &dims)?)
            }
            None if s.has(name) => Some(s.number(s.float(name, 0.0), x)?),
            None => None,
        };
        if let Some(bound) = bound {
            x = s.binary(how, x, bound)?;
        }
    }
    Ok(vec![ordered(s, x, turns)?])
}

pub(super) fn reciprocal(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let one = s.number(1.0, x)?;
    Ok(vec![s.binary(Binary::Div, one, x)?])
}

pub(super) fn sign(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let [zero, one, minus] = [s.number(0.0, x)?, s.number(1.0, x)?, s.number(-1.0, x)?];
    if is_u64(s, 0) {
        let is_zero = s.compare(Comparison::Eq, x, zero)?;
        return Ok(vec![s.select(is_zero, zero, one)?]);
    }
    let above = s.compare(Comparison::Lt, zero, x)?;
    let below = s.compare(Comparison::Lt, x, zero)?;
    let low = s.select(below, minus, zero)?;
    let sign = s.select(above, one, low)?;
    let is_number = s.compare(Comparison::Eq, x, x)?;
    Ok(vec![s.select(is_number, sign, x)?])
}

pub(super) fn ceil(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let minus = s.unary(Unary::Neg, x)?;
    let down = s.unary(Unary::Floor, minus)?;
    Ok(vec![s.unary(Unary::Neg, down)?])
}

/// To the nearest integer, to the even one of two.
pub(super) fn round(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let down = s.unary(Unary::Floor, x)?;
    let rest = s.binary(Binary::Sub, x, down)?;
    let up = s.with(Binary::Add, down, 1.0)?;
    let half = s.number(0.5, x)?;
    let is_half = s.compare(Comparison::Eq, rest, half)?;
    let is_above = s.compare(Comparison::Lt, half, rest)?;
    let halves = s.with(Binary::Mul, down, 0.5)?;
    let floor_halves = s.unary(Unary::Floor, halves)?;
    let is_even = s.compare(Comparison::Eq, halves, floor_halves)?;
    let nearest = s.select(is_above, up, down)?;
    let even = s.select(is_even, down, up)?;
    Ok(vec![s.select(is_half, even, nearest)?])
}

pub(super) fn sigmoid_of(s: &mut Site, x: ValueId) -> Made {
    let minus = s.unary(Unary::Neg, x)?;
    let e = s.unary(Unary::Exp, minus)?;
    let below = s.with(Binary::Add, e, 1.0)?;
    let one = s.number(1.0, x)?;
    s.binary(Binary::Div, one, below)
}

/// Activations of one operand.
pub(super) fn activation(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let zero = s.number(0.0, x)?;
    let made = match s.node.op_type.as_str() {
        "Relu" => s.binary(Binary::Max, x, zero)?,
        "Sigmoid" => sigmoid_of(s, x)?,
        "HardSigmoid" => hard_sigmoid(s, x, s.float("alpha", 0.2), s.float("beta", 0.5))?,
        "HardSwish" => {
            let gate = hard_sigmoid(s, x, 1.0 / 6.0, 0.5)?;
            s.binary(Binary::Mul, x, gate)?
        }
        "Softplus" => softplus(s, x)?,
        "Mish" => {
            let soft = softplus(s, x)?;
            let tanh = s.unary(Unary::Tanh, soft)?;
            s.binary(Binary::Mul, x, tanh)?
        }
        "Softsign" => {
            let size = s.unary(Unary::Abs, x)?;
            let below = s.with(Binary::Add, size, 1.0)?;
            s.binary(Binary::Div, x, below)?
        }
        "ThresholdedRelu" => {
            let bound = s.number(s.float("alpha", 1.0), x)?;
            let above = s.compare(Comparison::Lt, bound, x)?;
            s.select(above, x, zero)?
        }
        "LeakyRelu" => {
            let low = s.with(Binary::Mul, x, s.float("alpha", 0.01))?;
            let below = s.compare(Comparison::Lt, x, zero)?;
            s.select(below, low, x)?
        }
        "PRelu" => {
            let slope = s.operand(1)?;
            let slope = s.broadcast(slope, &s.dims(x))?;
            let low = s.binary(Binary::Mul, x, slope)?;
            let below = s.compare(Comparison::Lt, x, zero)?;
            s.select(below, low, x)?
        }
        "Gelu" if s.text("approximate", "none") == "tanh" => s.composite("gelu_tanh", &[], &[x])?,
        "Gelu" => s.composite("gelu_erf", &[], &[x])?,
        _ => exponential(s, x)?,
    };
    Ok(vec![made])
}

fn hard_sigmoid(s: &mut Site, x: ValueId, alpha: f64, beta: f64) -> Made {
    let scaled = s.with(Binary::Mul, x, alpha)?;
    let moved = s.with(Binary::Add, scaled, beta)?;
    let low = s.with(Binary::Max, moved, 0.0)?;
    s.with(Binary::Min, low, 1.0)
}

/// `max(x, 0) + log(1 + e^-|x|)`
pub(super) fn softplus(s: &mut Site, x: ValueId) -> Made {
    let above = s.with(Binary::Max, x, 0.0)?;
    let size = s.unary(Unary::Abs, x)?;
    let minus = s.unary(Unary::Neg, size)?;
    let e = s.unary(Unary::Exp, minus)?;
    let more = s.with(Binary::Add, e, 1.0)?;
    let log = s.unary(Unary::Log, more)?;
    s.binary(Binary::Add, above, log)
}

/// Elu, Selu and Celu: `x` above zero, `alpha (e^(x / width) - 1)` below, both scaled.
fn exponential(s: &mut Site, x: ValueId) -> Made {
    let (alpha, width, scale) = match s.node.op_type.as_str() {
        "Elu" => (s.float("alpha", 1.0), 1.0, 1.0),
        "Celu" => (s.float("alpha", 1.0), s.float("alpha", 1.0), 1.0),
        _ => (s.float("alpha", 1.673_263_2), 1.0, s.float("gamma", 1.050_701)),
    };
    let low = s.with(Binary::Min, x, 0.0)?;
    let narrow = s.with(Binary::Div, low, width)?;
    let e = s.unary(Unary::Exp, narrow)?;
    let less = s.with(Binary::Sub, e, 1.0)?;
    let below = s.with(Binary::Mul, less, alpha)?;
    let above = s.with(Binary::Max, x, 0.0)?;
    let sum = s.binary(Binary::Add, above, below)?;
    s.with(Binary::Mul, sum, scale)
}

/// The tangent, and the hyperbolic sine and cosine.
pub(super) fn trigonometric(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    Ok(vec![match s.node.op_type.as_str() {
        "Tan" => {
            let (sine, cosine) = (s.unary(Unary::Sin, x)?, s.unary(Unary::Cos, x)?);
            s.binary(Binary::Div, sine, cosine)?
        }
        "Sinh" => {
            let series = odd_series(s, x)?;
            let far = half_sum(s, x, Binary::Sub)?;
            let size = s.unary(Unary::Abs, x)?;
            let one = s.number(1.0, x)?;
            let is_near = s.compare(Comparison::Lt, size, one)?;
            s.select(is_near, series, far)?
        }
        _ => half_sum(s, x, Binary::Add)?,
    }])
}

/// `(e^x ± e^-x) / 2` as `(h/2) h ± (1/2h) / h` with `h = e^(x/2)`: neither factor is infinite
/// before the result is.
fn half_sum(s: &mut Site, x: ValueId, how: Binary) -> Made {
    let half = s.with(Binary::Mul, x, 0.5)?;
    let minus = s.unary(Unary::Neg, half)?;
    let (up, down) = (s.unary(Unary::Exp, half)?, s.unary(Unary::Exp, minus)?);
    let (up_half, down_half) = (s.with(Binary::Mul, up, 0.5)?, s.with(Binary::Mul, down, 0.5)?);
    let (first, second) = (s.mul(up_half, up)?, s.mul(down_half, down)?);
    s.binary(how, first, second)
}

/// `x + x³/3! + … + x¹⁷/17!`, which is the hyperbolic sine up to one: the next term is below
/// 1e-17 of it there. The difference of exponentials loses the digits of small numbers.
fn odd_series(s: &mut Site, x: ValueId) -> Made {
    let square = s.mul(x, x)?;
    let mut sum = s.number(1.0, x)?;
    for n in (1..=8).rev() {
        let below = f64::from(2 * n * (2 * n + 1));
        let scaled = s.with(Binary::Mul, square, 1.0 / below)?;
        let term = s.mul(scaled, sum)?;
        sum = s.with(Binary::Add, term, 1.0)?;
    }
    s.mul(sum, x)
}

pub(super) fn identity(s: &mut Site) -> Translated {
    Ok(vec![s.operand(0)?])
}

/// Nothing is dropped where nothing is trained.
pub(super) fn dropout(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let is_one = |list: &crate::Tensor, number: f64| list.to_f64().first() == Some(&number);
    let keeps = s.known(1)?.is_some_and(|ratio| is_one(&ratio, 0.0));
    if s.known(2)?.is_some_and(|training| !is_one(&training, 0.0)) && !keeps {
        return Err("training_mode is true".to_owned());
    }
    let dims = s.dims(x);
    let mask = s.constant(1.0, DType::Bool, &dims)?;
    Ok(vec![x, mask])
}
