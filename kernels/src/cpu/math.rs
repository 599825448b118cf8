//! Elementary functions of f32 vectors, and the error function of f64.
//!
//! Polynomials: Cephes (Moshier) for `exp`, `log` and `tanh`; N. Juffa's for `erf`. Errors against
//! f64 are asserted by the tests below and stay under two units in the last place.

use super::vector::Vector;

#[inline(always)]
fn polynomial<V: Vector<Scalar = f32>>(x: V, coefficients: &[f32]) -> V {
    let mut y = V::splat(coefficients[0]);
    for &c in &coefficients[1..] {
        y = y.fma(x, V::splat(c));
    }
    y
}

/// `e^x`; zero below -104, infinite above 88.73.
#[inline(always)]
pub(super) fn exp<V: Vector<Scalar = f32>>(x: V) -> V {
    // Clamped so that NaN, the second argument, survives.
    let x = V::splat(89.0).min(V::splat(-105.0).max(x));
    let n = x.mul(V::splat(std::f32::consts::LOG2_E)).round();
    // ln 2 in two parts; the first has few bits, so that its product with `n` is exact.
    let r = n.fma(V::splat(-0.693_359_4), x);
    let r = n.fma(V::splat(2.121_944_4e-4), r);
    let p = polynomial(
        r,
        &[1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5],
    );
    p.fma(r.mul(r), r).add(V::splat(1.0)).scale(n)
}

/// Natural logarithm; minus infinity at zero, NaN below.
#[inline(always)]
pub(super) fn log<V: Vector<Scalar = f32>>(x: V) -> V {
    let (m, e) = x.split();
    // Mantissas in [sqrt(1/2), sqrt 2), so that the polynomial is used around one.
    let high = V::splat(std::f32::consts::SQRT_2).lt(m);
    let m = V::select(high, m.mul(V::splat(0.5)), m);
    let e = e.add(high);
    let r = m.sub(V::splat(1.0));
    let p = polynomial(
        r,
        &[
            7.037_683_6e-2,
            -1.151_461e-1,
            1.167_699_9e-1,
            -1.242_014_1e-1,
            1.424_932_3e-1,
            -1.666_805_8e-1,
            2.000_071_5e-1,
            -2.499_999_4e-1,
            3.333_333e-1,
        ],
    );
    let r2 = r.mul(r);
    let y = e.fma(V::splat(-2.121_944_4e-4), p.mul(r).mul(r2));
    let y = r2.fma(V::splat(-0.5), y).add(r);
    let y = e.fma(V::splat(0.693_359_4), y);
    let zero = V::splat(0.0);
    let y = V::select(x.eq(V::splat(f32::INFINITY)), x, y);
    let y = V::select(x.eq(zero), V::splat(f32::NEG_INFINITY), y);
    V::select(zero.le(x), y, V::splat(f32::NAN))
}

/// Hyperbolic tangent.
#[inline(always)]
pub(super) fn tanh<V: Vector<Scalar = f32>>(x: V) -> V {
    let a = x.abs();
    let s = x.mul(x);
    let p = polynomial(
        s,
        &[-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1],
    );
    let near = p.mul(s).fma(x, x);
    // Beyond 10 the result is one.
    let a = V::splat(10.0).min(a);
    let e = exp(a.add(a)).add(V::splat(1.0));
    let far = V::splat(1.0).sub(V::splat(2.0).mul(e.recip())).copysign(x);
    V::select(a.lt(V::splat(0.625)), near, far)
}

/// `1 / (1 + e^-x)`; below -86 the exponential stops growing, lest the reciprocal leave its range.
#[inline(always)]
pub(super) fn sigmoid<V: Vector<Scalar = f32>>(x: V) -> V {
    let e = exp(V::splat(86.0).min(x.neg()));
    e.add(V::splat(1.0)).recip()
}

/// Error function.
#[inline(always)]
pub(super) fn erf<V: Vector<Scalar = f32>>(x: V) -> V {
    let t = x.abs();
    let s = x.mul(x);
    let r = V::splat(-1.728_534_7e-5).fma(t, V::splat(3.831_972e-4));
    let u = V::splat(-3.883_964_4e-3).fma(t, V::splat(2.425_462_2e-2));
    let r = r.fma(s, u);
    let r = r.fma(t, V::splat(-1.067_777_9e-1));
    let r = r.fma(t, V::splat(-6.348_468_7e-1));
    let r = r.fma(t, V::splat(-1.287_175_1e-1));
    let r = r.fma(t, t.neg());
    let far = V::splat(1.0).sub(exp(r)).copysign(x);
    let p = polynomial(
        s,
        &[
            -5.967_617e-4,
            4.991_194e-3,
            -2.676_813_5e-2,
            1.128_199_25e-1,
            -3.761_253_4e-1,
            1.283_791_7e-1,
        ],
    );
    let near = p.fma(x, x);
    V::select(V::splat(0.927_734_4).lt(t), far, near)
}

/// Error function of f64: the series of positive terms near zero, else the continued fraction.
pub(super) fn erf_f64(x: f64) -> f64 {
    let t = x.abs();
    if t.is_nan() {
        return x;
    }
    let two_over_sqrt_pi = std::f64::consts::FRAC_2_SQRT_PI;
    if t < 3.0 {
        let (mut term, mut sum, mut n) = (t, t, 0.0);
        while term > sum * 1e-17 {
            n += 1.0;
            term *= 2.0 * t * t / (2.0 * n + 1.0);
            sum += term;
        }
        return (two_over_sqrt_pi * (-t * t).exp() * sum).copysign(x);
    }
    if t > 6.0 {
        return 1.0_f64.copysign(x);
    }
    // erfc(t) = e^(-t²) / sqrt(pi) / (t + (1/2) / (t + (2/2) / (t + (3/2) / ...)))
    let mut fraction = t;
    for n in (1..=60).rev() {
        fraction = t + 0.5 * f64::from(n) / fraction;
    }
    (1.0 - 0.5 * two_over_sqrt_pi * (-t * t).exp() / fraction).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::super::vector::{Isa, Job};
    use super::*;

    struct Worst {
        name: &'static str,
        isa: Isa,
        from: f32,
        to: f32,
        reference: fn(f64) -> f64,
        limit: f64,
    }

    impl Job<f32> for Worst {
        #[inline(always)]
        fn run<V: Vector<Scalar = f32>>(self) {
            let (mut worst, mut at) = (0.0_f64, 0.0);
            let steps = 200_000;
            for i in 0..=steps {
                let x = self.from + (self.to - self.from) * (i as f32 / steps as f32);
                let v = V::splat(x);
                let y = match self.name {
                    "exp" => exp(v),
                    "log" => log(v),
                    "tanh" => tanh(v),
                    "erf" => erf(v),
                    _ => sigmoid(v),
                };
                let y = f64::from(y.fold(|a, _| a));
                let want = (self.reference)(f64::from(x));
                let error = (y - want).abs() / want.abs().max(f64::from(f32::MIN_POSITIVE));
                if error > worst {
                    (worst, at) = (error, x);
                }
            }
            let (name, isa) = (self.name, self.isa);
            assert!(worst <= self.limit, "{name} on {isa:?} is off by {worst:e} at {at}");
        }
    }

    #[test]
    fn functions_are_within_two_units_in_the_last_place() {
        type Case = (&'static str, f32, f32, fn(f64) -> f64, f64);
        let cases: [Case; 8] = [
            ("exp", -87.0, 88.0, f64::exp, 1.3e-7),
            ("log", 1e-30, 4.0, f64::ln, 1.3e-7),
            ("log", 0.9, 1.1, f64::ln, 1.6e-7),
            ("log", 4.0, 1e30, f64::ln, 1.3e-7),
            ("tanh", -9.0, 9.0, f64::tanh, 1.6e-7),
            ("erf", -4.0, 4.0, erf_f64, 1.6e-7),
            ("erf", -0.1, 0.1, erf_f64, 1.6e-7),
            ("sigmoid", -20.0, 20.0, |x| 1.0 / (1.0 + (-x).exp()), 2.4e-7),
        ];
        for isa in [Isa::Avx512, Isa::Avx2, Isa::Portable] {
            for (name, from, to, reference, limit) in cases {
                if isa.is_available() {
                    isa.run(Worst { name, isa, from, to, reference, limit });
                }
            }
        }
    }

    #[test]
    fn the_error_function_of_f64_joins_and_matches_known_values() {
        let known = [
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (3.5, 0.999_999_256_901_627_6),
        ];
        for (x, want) in known {
            assert!((erf_f64(x) - want).abs() < 4e-16, "erf({x}) = {}", erf_f64(x));
            assert_eq!(erf_f64(-x), -erf_f64(x));
        }
        assert!((erf_f64(3.0) - erf_f64(3.0 - 1e-12)).abs() < 1e-15);
    }
}
