//! Elementwise functions. Those of f32 are computed in f64 and rounded once, which for the four
//! operations and the square root is what f32 arithmetic yields.

use crate::op::{Binary, Comparison, Unary};
use crate::tensor::{Data, Tensor, wrap};

pub(super) fn unary(how: Unary, x: &Tensor) -> Tensor {
    let data = match &x.data {
        Data::F64(x) => Data::F64(x.iter().map(|e| unary_of(how, *e)).collect()),
        Data::F32(x) => Data::F32(x.iter().map(|e| unary_of(how, f64::from(*e)) as f32).collect()),
        Data::Int(x_int) => {
            let of = |e: &i64| if how == Unary::Neg { e.wrapping_neg() } else { e.wrapping_abs() };
            Data::Int(x_int.iter().map(|e| wrap(x.dtype, of(e))).collect())
        }
        Data::Bool(_) => panic!("verified: unary functions take no bool"),
    };
    Tensor::new(x.dtype, &x.dims, data)
}

pub(super) fn binary(how: Binary, a: &Tensor, b: &Tensor) -> Tensor {
    let data = match (&a.data, &b.data) {
        (Data::F64(x), Data::F64(y)) => {
            Data::F64(x.iter().zip(y).map(|(x, y)| binary_of(how, *x, *y)).collect())
        }
        (Data::F32(x), Data::F32(y)) => {
            let of = |(x, y): (&f32, &f32)| binary_of(how, f64::from(*x), f64::from(*y)) as f32;
            Data::F32(x.iter().zip(y).map(of).collect())
        }
        (Data::Int(x), Data::Int(y)) => {
            let of = |(x, y): (&i64, &i64)| wrap(a.dtype, integer_of(how, *x, *y));
            Data::Int(x.iter().zip(y).map(of).collect())
        }
        (Data::F64(_) | Data::F32(_) | Data::Int(_) | Data::Bool(_), _) => {
            panic!("verified: both operands are numbers of one type")
        }
    };
    Tensor::new(a.dtype, &a.dims, data)
}

pub(super) fn compare(how: Comparison, a: &Tensor, b: &Tensor) -> Tensor {
    fn all<T: PartialOrd>(how: Comparison, a: &[T], b: &[T]) -> Vec<bool> {
        let pairs = a.iter().zip(b);
        match how {
            Comparison::Eq => pairs.map(|(a, b)| a == b).collect(),
            Comparison::Lt => pairs.map(|(a, b)| a < b).collect(),
            Comparison::Le => pairs.map(|(a, b)| a <= b).collect(),
        }
    }
    let data = match (&a.data, &b.data) {
        (Data::F64(a), Data::F64(b)) => all(how, a, b),
        (Data::F32(a), Data::F32(b)) => all(how, a, b),
        (Data::Int(a), Data::Int(b)) => all(how, a, b),
        (Data::Bool(a), Data::Bool(b)) => all(how, a, b),
        (Data::F64(_) | Data::F32(_) | Data::Int(_) | Data::Bool(_), _) => {
            panic!("verified: both operands are of one type")
        }
    };
    Tensor::bool(&a.dims, data)
}

pub(super) fn select(condition: &Tensor, a: &Tensor, b: &Tensor) -> Tensor {
    let Data::Bool(condition) = &condition.data else { panic!("verified: a bool selects") };
    let mut out = b.clone();
    let chosen: Vec<usize> = (0..condition.len()).filter(|at| condition[*at]).collect();
    out.data.put(&chosen, &a.data.pick(&chosen));
    out
}

fn unary_of(how: Unary, x: f64) -> f64 {
    match how {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Tanh => x.tanh(),
        Unary::Erf => erf(x),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Floor => x.floor(),
        Unary::PowerFloor => power_floor(x),
    }
}

/// [`Unary::PowerFloor`], by halving or doubling a power of two until it fits.
fn power_floor(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let mut power = 1.0;
    while power > x.abs() {
        power /= 2.0;
    }
    while power * 2.0 <= x.abs() {
        power *= 2.0;
    }
    power.copysign(x)
}

fn binary_of(how: Binary, a: f64, b: f64) -> f64 {
    match how {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Max => larger(a, b),
        Binary::Min => -larger(-a, -b),
        Binary::Pow => a.powf(b),
    }
}

/// The larger one; NaN when one is.
pub(super) fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// Division by zero yields zero; a negative power is rounded towards zero.
fn integer_of(how: Binary, a: i64, b: i64) -> i64 {
    match how {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        Binary::Div => floor_div(a, b),
        Binary::Max => a.max(b),
        Binary::Min => a.min(b),
        Binary::Pow if b < 0 => match a {
            1 => 1,
            -1 if b % 2 == 0 => 1,
            -1 => -1,
            _ => 0,
        },
        Binary::Pow => {
            let square = |x: i64| x.wrapping_mul(x);
            let bits = (0..63).rev().map(|bit| b >> bit & 1 == 1);
            bits.fold(
                1,
                |power, is_odd| {
                    if is_odd { square(power).wrapping_mul(a) } else { square(power) }
                },
            )
        }
    }
}

fn floor_div(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    let quotient = a.wrapping_div(b);
    let exact = a.wrapping_rem(b) == 0;
    if exact || (a < 0) == (b < 0) { quotient } else { quotient - 1 }
}

/// The error function, to a few units of the last place of f64.
///
/// Up to 3 the series with terms of one sign, `2/sqrt(pi) e^(-x²) Σ 2^n x^(2n+1) / (2n+1)!!`;
/// beyond, the continued fraction of the complement (Abramowitz and Stegun 7.1.6 and 7.1.14).
fn erf(x: f64) -> f64 {
    let a = x.abs();
    if a.is_nan() {
        return x;
    }
    if a > 6.0 {
        return 1.0_f64.copysign(x);
    }
    let gauss = (-a * a).exp();
    let magnitude = if a < 3.0 {
        let (mut term, mut sum) = (a, a);
        for n in 1..80 {
            term *= 2.0 * a * a / f64::from(2 * n + 1);
            sum += term;
        }
        std::f64::consts::FRAC_2_SQRT_PI * gauss * sum
    } else {
        let fraction = (1..80).rev().fold(a, |below, n| a + f64::from(n) / 2.0 / below);
        1.0 - gauss * std::f64::consts::FRAC_2_SQRT_PI / 2.0 / fraction
    };
    magnitude.copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_is_exact_to_the_last_places() {
        // Abramowitz and Stegun, table 7.1, and mpmath at 20 digits.
        let known = [
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (2.999, 0.999_977_771_269_5),
            (3.5, 0.999_999_256_901_627_7),
        ];
        for (x, y) in known {
            let tolerance = if x == 2.999 { 1e-8 } else { 1e-15 };
            assert!((erf(x) - y).abs() <= tolerance, "erf({x}) = {}, not {y}", erf(x));
            assert_eq!(erf(-x), -erf(x));
        }
        assert!((erf(3.0 - 1e-9) - erf(3.0)).abs() < 1e-12);
    }

    #[test]
    fn integers_divide_downwards() {
        assert_eq!([floor_div(7, 2), floor_div(-7, 2), floor_div(7, -2)], [3, -4, -4]);
        assert_eq!([floor_div(-6, 2), floor_div(1, 0)], [-3, 0]);
    }

    #[test]
    fn powers_of_integers_wrap_and_negative_ones_are_cut() {
        let power = |a, b| integer_of(Binary::Pow, a, b);
        assert_eq!([power(3, 4), power(-2, 63), power(2, 64), power(7, 0)], [81, i64::MIN, 0, 1]);
        assert_eq!([power(3, 1 << 62), power(-1, (1 << 40) + 1)], [1, -1]);
        assert_eq!([power(-2, -3), power(-1, -3), power(1, -9), power(0, -1)], [0, -1, 1, 0]);
    }
}
