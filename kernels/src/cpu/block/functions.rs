//! The functions of block programs, for any vector.

use super::super::formats::{self, Narrow};
use super::super::vector::{Scalar, Vector};

/// A function of one value.
pub(super) trait Function1 {
    fn apply<V: Vector>(x: V) -> V;
}

/// A function of two values.
pub(super) trait Function2 {
    fn apply<V: Vector>(a: V, b: V) -> V;
}

#[inline(always)]
fn number<V: Vector>(x: f64) -> V {
    V::splat(V::Scalar::from_f64(x))
}

macro_rules! functions {
    ($trait:ident: $($name:ident($($x:ident),*) => $body:expr;)*) => {$(
        pub(super) struct $name;

        impl $trait for $name {
            #[inline(always)]
            fn apply<V: Vector>($($x: V),*) -> V {
                $body
            }
        }
    )*};
}

functions! { Function1:
    Neg(x) => x.neg();
    Abs(x) => x.abs();
    Exp(x) => V::Scalar::exp(x);
    Log(x) => V::Scalar::log(x);
    Sqrt(x) => x.sqrt();
    Rsqrt(x) => number::<V>(1.0).div(x.sqrt());
    Recip(x) => number::<V>(1.0).div(x);
    Tanh(x) => V::Scalar::tanh(x);
    Erf(x) => V::Scalar::erf(x);
    Sin(x) => x.map(V::Scalar::sin);
    Cos(x) => x.map(V::Scalar::cos);
    Floor(x) => x.floor();
    PowerFloor(x) => x.map(V::Scalar::power_floor);
    Sigmoid(x) => sigmoid(x);
    Square(x) => x.mul(x);
    GeluTanh(x) => gelu_tanh(x);
    GeluErf(x) => x.mul(normal_below(x));
    Silu(x) => x.mul(sigmoid(x));
    Not(x) => x.eq(number(0.0));
    Same(x) => x;
    WrapI32(x) => wrap(x, 0.5);
    WrapU32(x) => wrap(x, 0.0);
    RoundBF16(x) => formats::BF16::round(x);
    RoundF16(x) => formats::F16::round(x);
    RoundF8E4M3(x) => formats::F8E4M3::round(x);
    RoundF8E5M2(x) => formats::F8E5M2::round(x);
    Single(x) => x.map(|x| V::Scalar::from_f64(f64::from(x.to_f64() as f32)));
}

functions! { Function2:
    Add(a, b) => a.add(b);
    Sub(a, b) => a.sub(b);
    Mul(a, b) => a.mul(b);
    Div(a, b) => a.div(b);
    Max(a, b) => larger(a, b);
    Min(a, b) => smaller(a, b);
    Pow(a, b) => pow(a, b);
    Lt(a, b) => a.lt(b);
    Le(a, b) => a.le(b);
    Eq(a, b) => a.eq(b);
    And(a, b) => V::select(a, is_true(b), number(0.0));
    Or(a, b) => V::select(a, number(1.0), is_true(b));
    GeluTanhGrad(x, dy) => gelu_tanh_grad(x, dy);
    GeluErfGrad(x, dy) => gelu_erf_grad(x, dy);
    SiluGrad(x, dy) => silu_grad(x, dy);
}

/// The larger one; NaN when one is. That of the vector is the second where one of both is NaN.
#[inline(always)]
pub(super) fn larger<V: Vector>(a: V, b: V) -> V {
    a.max(b).or_nan(a)
}

/// The smaller one; NaN when one is.
#[inline(always)]
pub(super) fn smaller<V: Vector>(a: V, b: V) -> V {
    a.min(b).or_nan(a)
}

/// `x - 2^32 floor(x / 2^32 + half)`, exact for integers below `2^50`.
#[inline(always)]
fn wrap<V: Vector>(x: V, half: f64) -> V {
    const TURN: f64 = 4_294_967_296.0;
    let turns = x.mul(number(1.0 / TURN)).add(number(half)).floor();
    turns.fma(number(-TURN), x)
}

#[inline(always)]
fn sigmoid<V: Vector>(x: V) -> V {
    V::Scalar::sigmoid(x)
}

#[inline(always)]
fn is_true<V: Vector>(x: V) -> V {
    V::select(x, number(1.0), number(0.0))
}

#[inline(always)]
fn pow<V: Vector>(a: V, b: V) -> V {
    const LANES: usize = super::super::vector::MAX_LANES;
    let mut lanes = [[V::Scalar::ZERO; LANES]; 2];
    // SAFETY: a vector has at most `MAX_LANES` lanes.
    unsafe {
        a.store(lanes[0].as_mut_ptr());
        b.store(lanes[1].as_mut_ptr());
        let [bases, exponents] = &mut lanes;
        for (base, exponent) in bases.iter_mut().zip(exponents).take(V::LANES) {
            *base = base.pow(*exponent);
        }
        V::load(lanes[0].as_ptr())
    }
}

const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

/// `x sigmoid(2u)`, which is `x/2 (1 + tanh u)` without its cancellation,
/// `u = sqrt(2/pi) (x + 0.044715 x³)`.
#[inline(always)]
fn gelu_tanh<V: Vector>(x: V) -> V {
    let slope = x.mul(x).fma(number(2.0 * SQRT_2_OVER_PI * CUBIC), number(2.0 * SQRT_2_OVER_PI));
    x.mul(sigmoid(x.mul(slope)))
}

/// With `s = sigmoid(2u)`: `dy (s + x s (1 - s) 2u')`.
#[inline(always)]
fn gelu_tanh_grad<V: Vector>(x: V, dy: V) -> V {
    let x2 = x.mul(x);
    let slope = x2.fma(number(2.0 * SQRT_2_OVER_PI * CUBIC), number(2.0 * SQRT_2_OVER_PI));
    let rise = x2.fma(number(6.0 * SQRT_2_OVER_PI * CUBIC), number(2.0 * SQRT_2_OVER_PI));
    let s = sigmoid(x.mul(slope));
    let change = x.mul(rise).mul(s.mul(number::<V>(1.0).sub(s)));
    dy.mul(s.add(change))
}

/// The normal distribution function, `(1 + erf(x / sqrt 2)) / 2`.
#[inline(always)]
fn normal_below<V: Vector>(x: V) -> V {
    let e = V::Scalar::erf(x.mul(number(std::f64::consts::FRAC_1_SQRT_2)));
    e.fma(number(0.5), number(0.5))
}

/// `dy (normal_below(x) + x e^(-x²/2) / sqrt(2 pi))`.
#[inline(always)]
fn gelu_erf_grad<V: Vector>(x: V, dy: V) -> V {
    let density = V::Scalar::exp(x.mul(x).mul(number(-0.5))).mul(number(0.398_942_280_401_432_7));
    dy.mul(x.fma(density, normal_below(x)))
}

/// With `s = sigmoid(x)`: `dy s (1 + x (1 - s))`.
#[inline(always)]
fn silu_grad<V: Vector>(x: V, dy: V) -> V {
    let s = sigmoid(x);
    let inner = x.fma(number::<V>(1.0).sub(s), number(1.0));
    dy.mul(s.mul(inner))
}
