//! Identities of elementwise ops.

use super::{Keeps, Rule, always};
use crate::DType;
use crate::op::{Comparison, Op};
use crate::rewrite::pattern::Site;

type Yielded = Option<Vec<(&'static str, Op)>>;

pub(super) const RULES: &[Rule] = &[
    Rule {
        name: "drop-multiplication-by-one",
        left: "(mul ?x 1)",
        right: "?x",
        when: always,
        keeps: Keeps::Bits,
        why: "one is neutral, also for signed zeros and infinities",
    },
    Rule {
        name: "drop-division-by-one",
        left: "(div ?x 1)",
        right: "?x",
        when: always,
        keeps: Keeps::Bits,
        why: "one is neutral, also for signed zeros and infinities",
    },
    Rule {
        name: "drop-addition-of-zero",
        left: "(add ?x ?c)",
        right: "?x",
        when: is_neutral_zero,
        keeps: Keeps::Bits,
        why: "negative zero is neutral; zero is where no negative zero can be",
    },
    Rule {
        name: "drop-subtraction-of-zero",
        left: "(sub ?x 0)",
        right: "?x",
        when: always,
        keeps: Keeps::Bits,
        why: "zero is neutral on the right, also for negative zeros",
    },
    Rule {
        name: "subtract-what-is-added-negated",
        left: "(add ?x (neg ?y))",
        right: "(sub ?x ?y)",
        when: always,
        keeps: Keeps::Bits,
        why: "one op less, by the definition of subtraction",
    },
    Rule {
        name: "negate-by-a-negated-factor",
        left: "(neg (mul ?x ?c))",
        right: "(mul ?x #c)",
        when: negated_constant,
        keeps: Keeps::Bits,
        why: "the sign goes into the constant",
    },
    Rule {
        name: "multiply-by-exact-reciprocal",
        left: "(div ?x ?c)",
        right: "(mul ?x #c)",
        when: reciprocal_of_power_of_two,
        keeps: Keeps::Bits,
        why: "division is slow, and the reciprocal of a power of two is exact",
    },
    Rule {
        name: "multiply-by-reciprocal-root",
        left: "(div ?x (sqrt ?y))",
        right: "(mul ?x (rsqrt ?y))",
        when: always,
        keeps: Keeps::Rounding,
        why: "norms are written with a division in many exports; `rsqrt` is one instruction",
    },
    Rule {
        name: "take-reciprocal-root",
        left: "(div 1 (sqrt ?y))",
        right: "(rsqrt ?y)",
        when: always,
        keeps: Keeps::Rounding,
        why: "norms are written so in many exports; `rsqrt` is one instruction",
    },
    Rule {
        name: "multiply-by-repeated-reciprocal-root",
        left: "(div ?x (broadcast#b (sqrt ?y)))",
        right: "(mul ?x (broadcast#b (rsqrt ?y)))",
        when: always,
        keeps: Keeps::Rounding,
        why: "the same, with one root for each row",
    },
    Rule {
        name: "divide-once",
        left: "(mul ?x (div 1 ?y))",
        right: "(div ?x ?y)",
        when: |site| site.root_type().dtype.is_float().then(Vec::new),
        keeps: Keeps::Rounding,
        why: "gates are written as a product with a sigmoid in many exports",
    },
    Rule {
        name: "apply-constant-factor-first",
        left: "(mul ?c (mul ?x ?y))",
        right: "(mul (mul ?c ?x) ?y)",
        when: is_scale_of_two_values,
        keeps: Keeps::Rounding,
        why: "the order in which the library writes activations",
    },
    Rule {
        name: "join-constant-factors",
        left: "(mul (mul ?x ?c) ?d)",
        right: "(mul ?x #c)",
        when: product_of_constants,
        keeps: Keeps::Rounding,
        why: "scales that follow each other are one scale",
    },
    Rule {
        name: "square-by-multiplication",
        left: "(pow ?x 2)",
        right: "(mul ?x ?x)",
        when: |site| site.root_type().dtype.is_float().then(Vec::new),
        keeps: Keeps::Rounding,
        why: "a power costs tens of multiplications",
    },
    Rule {
        name: "cube-by-multiplication",
        left: "(pow ?x 3)",
        right: "(mul ?x (mul ?x ?x))",
        when: |site| site.root_type().dtype.is_float().then(Vec::new),
        keeps: Keeps::Rounding,
        why: "a power costs tens of multiplications",
    },
    Rule {
        name: "choose-first",
        left: "(select ?c ?x ?y)",
        right: "?x",
        when: |site| (site.fact("c").low >= 1.0).then(Vec::new),
        keeps: Keeps::Bits,
        why: "the condition holds everywhere",
    },
    Rule {
        name: "choose-second",
        left: "(select ?c ?x ?y)",
        right: "?y",
        when: |site| (site.fact("c").high <= 0.0).then(Vec::new),
        keeps: Keeps::Bits,
        why: "the condition holds nowhere",
    },
    Rule {
        name: "decide-comparison-by-bounds",
        left: "(compare#o ?x ?y)",
        right: "#c",
        when: decided,
        keeps: Keeps::Bits,
        why: "a mask of integers that hides nothing or everything is none",
    },
    Rule {
        name: "drop-cast-to-same",
        left: "(cast#t ?x)",
        right: "?x",
        when: |site| (site.root_type() == site.ty("x")).then(Vec::new),
        keeps: Keeps::Bits,
        why: "nothing changes",
    },
    Rule {
        name: "drop-cast-there-and-back",
        left: "(cast#t (cast#u ?x))",
        right: "?x",
        when: is_there_and_back,
        keeps: Keeps::Bits,
        why: "the wider type holds every number of the narrower",
    },
];

fn constant_like(site: &Site<'_>, value: f64) -> Yielded {
    let ty = site.root_type();
    Some(vec![("c", Op::Constant { value, dtype: ty.dtype, dims: ty.dims.clone() })])
}

fn is_neutral_zero(site: &Site<'_>) -> Yielded {
    let zero = site.fact("c").constant.filter(|c| *c == 0.0)?;
    let x = site.fact("x");
    let is_neutral = zero.is_sign_negative() || !x.ty().dtype.is_float() || x.low > 0.0;
    is_neutral.then(Vec::new)
}

fn negated_constant(site: &Site<'_>) -> Yielded {
    let value = site.fact("c").constant?;
    let is_float = site.root_type().dtype.is_float();
    if is_float { constant_like(site, -value) } else { None }
}

/// Neither factor is a constant: those are joined.
fn is_scale_of_two_values(site: &Site<'_>) -> Yielded {
    let is_constant = |name| site.fact(name).constant.is_some();
    (is_constant("c") && !is_constant("x") && !is_constant("y")).then(Vec::new)
}

/// Exact as long as the reciprocal is a normal number of the type.
fn reciprocal_of_power_of_two(site: &Site<'_>) -> Yielded {
    let value = site.fact("c").constant?;
    let exponent_max = match site.root_type().dtype {
        DType::F64 => 1000,
        DType::F32 | DType::BF16 => 120,
        DType::F16
        | DType::F8E4M3
        | DType::F8E5M2
        | DType::I8
        | DType::I32
        | DType::I64
        | DType::U32
        | DType::Bool => return None,
    };
    let power = value.abs().log2();
    let is_power = power.fract() == 0.0 && power.abs() < f64::from(exponent_max);
    if is_power && value.abs() == power.exp2() { constant_like(site, 1.0 / value) } else { None }
}

fn product_of_constants(site: &Site<'_>) -> Yielded {
    let product = site.fact("c").constant? * site.fact("d").constant?;
    let is_float = site.root_type().dtype.is_float();
    let is_normal = product.abs() > 1e-30 && product.abs() < 1e30;
    if is_float && is_normal { constant_like(site, product) } else { None }
}

/// Only for integers: a NaN is not within its bounds.
fn decided(site: &Site<'_>) -> Yielded {
    let Op::Compare(how) = site.op("o") else { return None };
    let (x, y) = (site.fact("x"), site.fact("y"));
    if x.ty().dtype.is_float() || x.ty().dtype == DType::Bool {
        return None;
    }
    let truth = match how {
        Comparison::Lt if x.high < y.low => true,
        Comparison::Lt if x.low >= y.high => false,
        Comparison::Le if x.high <= y.low => true,
        Comparison::Le if x.low > y.high => false,
        Comparison::Eq if x.high < y.low || x.low > y.high => false,
        Comparison::Lt | Comparison::Le | Comparison::Eq => return None,
    };
    constant_like(site, f64::from(u8::from(truth)))
}

fn is_there_and_back(site: &Site<'_>) -> Yielded {
    let (Op::Cast { dtype: back }, Op::Cast { dtype: there }) = (site.op("t"), site.op("u")) else {
        return None;
    };
    let from = site.ty("x").dtype;
    let widens = matches!(
        (from, *there),
        (DType::F32 | DType::BF16 | DType::F16, DType::F64)
            | (DType::BF16 | DType::F16, DType::F32)
            | (DType::I32 | DType::U32 | DType::I8, DType::F64 | DType::I64)
            | (DType::I8, DType::I32 | DType::F32)
    );
    (widens && *back == from).then(Vec::new)
}
