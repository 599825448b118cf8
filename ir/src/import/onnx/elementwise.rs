//! Operators of one element at a time.

use super::site::{Made, Site, Translated};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Comparison, Unary};

pub(super) fn unary(s: &mut Site, how: Unary) -> Translated {
    let x = s.operand(0)?;
    Ok(vec![s.unary(how, x)?])
}

/// Of operands that are repeated to common dims.
pub(super) fn binary(s: &mut Site, how: Binary) -> Translated {
    let operands = s.all();
    let aligned = s.aligned(&operands)?;
    let (first, rest) = aligned.split_first().ok_or("no operands")?;
    let mut result = *first;
    for x in rest {
        result =
            if how == Binary::Div { divide(s, result, *x)? } else { s.binary(how, result, *x)? };
    }
    Ok(vec![result])
}

/// A quotient of integers is rounded towards zero.
fn divide(s: &mut Site, a: ValueId, b: ValueId) -> Made {
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
    let quotient =
        if s.int("fmod", 0) == 0 { s.binary(Binary::Div, a, b)? } else { divide(s, a, b)? };
    let product = s.binary(Binary::Mul, quotient, b)?;
    Ok(vec![s.binary(Binary::Sub, a, product)?])
}

/// How many bits a quotient may have so that its products with divisors of 24 bits are binary64.
const QUOTIENT_BITS: i32 = 28;

/// Of floating-point numbers, with the sign of the dividend: exact, but for quotients of f64 from
/// 2^26 on and divisors from 2^996 on, whose rest is no number.
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

/// What is left of `a` by the nearest multiple of `b`, and `b` more where that is too large.
///
/// `b` is split into halves of 26 bits (T. J. Dekker, A floating-point technique for extending the
/// available precision, 1971), so that both products with a quotient below 2^26 are exact; the rest
/// is at most half of `b`, so that the differences are as well.
fn rest_of_double(s: &mut Site, a: ValueId, b: ValueId) -> Made {
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
    let limit = s.number(67_108_864.0, ratio)?;
    let is_exact = s.compare(Comparison::Lt, ratio, limit)?;
    let negative = s.unary(Unary::Neg, ratio)?;
    let no_number = s.unary(Unary::Sqrt, negative)?;
    s.select(is_exact, left, no_number)
}

/// Of the type of the base. An integer to the power of a fraction is computed in binary64, which
/// has all integers up to 2^53.
pub(super) fn power(s: &mut Site) -> Translated {
    let (x, exponent) = (s.operand(0)?, s.operand(1)?);
    let own = s.dtype(x);
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
    let mut x = s.operand(0)?;
    let dims = s.dims(x);
    for (at, name, how) in [(1, "min", Binary::Max), (2, "max", Binary::Min)] {
        let bound = match s.optional(at) {
            Some(bound) => Some(s.broadcast(bound, &dims)?),
            None if s.has(name) => Some(s.number(s.float(name, 0.0), x)?),
            None => None,
        };
        if let Some(bound) = bound {
            x = s.binary(how, x, bound)?;
        }
    }
    Ok(vec![x])
}

pub(super) fn reciprocal(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let one = s.number(1.0, x)?;
    Ok(vec![s.binary(Binary::Div, one, x)?])
}

pub(super) fn sign(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let [zero, one, minus] = [s.number(0.0, x)?, s.number(1.0, x)?, s.number(-1.0, x)?];
    let above = s.compare(Comparison::Lt, zero, x)?;
    let below = s.compare(Comparison::Lt, x, zero)?;
    let low = s.select(below, minus, zero)?;
    Ok(vec![s.select(above, one, low)?])
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
        "Gelu" if s.text("approximate", "none") == "tanh" => s.composite("gelu_tanh", &[], &[x]),
        "Gelu" => s.composite("gelu_erf", &[], &[x]),
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

/// Functions made of exponentials and of the sine and cosine.
pub(super) fn trigonometric(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let (first, second, how, scale) = match s.node.op_type.as_str() {
        "Tan" => (s.unary(Unary::Sin, x)?, s.unary(Unary::Cos, x)?, Binary::Div, 1.0),
        name => {
            let e = s.unary(Unary::Exp, x)?;
            let minus = s.unary(Unary::Neg, x)?;
            let inverse = s.unary(Unary::Exp, minus)?;
            (e, inverse, if name == "Sinh" { Binary::Sub } else { Binary::Add }, 0.5)
        }
    };
    let made = s.binary(how, first, second)?;
    Ok(vec![if scale == 1.0 { made } else { s.with(Binary::Mul, made, scale)? }])
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
