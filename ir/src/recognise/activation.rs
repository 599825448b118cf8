//! Both GELUs and SiLU, in whatever order they are written.

use super::draft::{Draft, Finished};
use super::element::{Element, Graph};
use super::expansion::{Expansion, Polynomial, is_polynomial};
use crate::module::ValueId;
use crate::op::{Binary, Op, Unary};

/// How deep a transcendental function is looked for under a product.
const REACH: usize = 6;

/// The factor of `x` in the error function of a GELU.
const ERF_SCALE: f64 = std::f64::consts::FRAC_1_SQRT_2;

/// `√(2/π)`
const TANH_SCALE: f64 = 0.797_884_560_802_865_4;

/// The factor of `x³` in a GELU by tanh.
const CUBIC: f64 = 0.044_715;

/// An activation that ends in a value.
pub(super) fn activation<'g>(graph: &'g Graph<'g>, value: ValueId) -> Option<Finished> {
    if !matches!(graph.node(value)?.op, Op::Binary(Binary::Mul | Binary::Div | Binary::Add)) {
        return None;
    }
    let root = graph.any(value);
    let mut curves = Vec::new();
    reach(graph, &root, REACH, &mut curves);
    curves.iter().find_map(|curve| {
        let (name, x) = recognised(graph, &root, curve)?;
        let mut draft = Draft::new(graph);
        let x = draft.laid(&x, &root.index)?;
        let y = draft.composite(name, &[], &[x])?[0];
        draft.finish(name, y, value)
    })
}

/// The error functions, tangents and exponentials under arithmetic.
fn reach(graph: &Graph, of: &Element, depth: usize, found: &mut Vec<Element>) {
    let of = graph.peel(of);
    match graph.op(&of) {
        Some(Op::Unary(Unary::Erf | Unary::Tanh | Unary::Exp)) if !found.contains(&of) => {
            found.push(of);
        }
        Some(
            Op::Binary(Binary::Mul | Binary::Div | Binary::Add | Binary::Sub)
            | Op::Unary(Unary::Neg),
        ) if depth > 0 => {
            graph.operands(&of).iter().for_each(|under| reach(graph, under, depth - 1, found));
        }
        Some(_) | None => {}
    }
}

/// The activation that an element is by a curve of its operand.
fn recognised(graph: &Graph, root: &Element, curve: &Element) -> Option<(&'static str, Element)> {
    let Op::Unary(how) = graph.op(curve)? else { return None };
    let dtype = graph.function.ty(root.value).dtype;
    let under = graph.operands(curve).pop()?;
    let of = |polynomial: &Polynomial, wanted: &[(&[(usize, i32)], f64)]| {
        is_polynomial(polynomial, wanted, dtype)
    };
    // `x` is the first atom, the curve the second.
    let x_once: &[(usize, i32)] = &[(0, 2)];
    let gate: &[(&[(usize, i32)], f64)] = &[(x_once, 0.5), (&[(0, 2), (1, 2)], 0.5)];
    let is_gated = |x: &Element| of(&Expansion::new(graph, &[x, curve]).of(root), gate);
    match how {
        Unary::Erf => {
            let x = without_factor(graph, &under);
            let inner = Expansion::new(graph, &[&x]).of(&under);
            (of(&inner, &[(x_once, ERF_SCALE)]) && is_gated(&x)).then_some(("gelu_erf", x))
        }
        Unary::Tanh => {
            let cubic: &[(&[(usize, i32)], f64)] =
                &[(x_once, TANH_SCALE), (&[(0, 6)], TANH_SCALE * CUBIC)];
            let mut candidates = Vec::new();
            operands_within(graph, &under, REACH, &mut candidates);
            let is_cubic = |x: &Element| of(&Expansion::new(graph, &[x]).of(&under), cubic);
            let x = candidates.into_iter().find(|x| is_cubic(x) && is_gated(x))?;
            Some(("gelu_tanh", x))
        }
        Unary::Exp => {
            let x = without_factor(graph, &under);
            let inner = Expansion::new(graph, &[&x]).of(&under);
            if !of(&inner, &[(x_once, -1.0)]) {
                return None;
            }
            let mut whole = Expansion::new(graph, &[&x, curve]);
            let found = whole.of(root);
            if !of(&found, &[(&[(0, 2), (2, -2)], 1.0)]) {
                return None;
            }
            let below = whole.atoms[2].clone();
            let below = Expansion::new(graph, &[&x, curve]).of(&below);
            of(&below, &[(&[], 1.0), (&[(1, 2)], 1.0)]).then_some(("silu", x))
        }
        Unary::Neg
        | Unary::Abs
        | Unary::Log
        | Unary::Sqrt
        | Unary::Rsqrt
        | Unary::Sin
        | Unary::Cos
        | Unary::Floor
        | Unary::PowerFloor => None,
    }
}

/// An element without the constant factors and signs before it.
pub(super) fn without_factor(graph: &Graph, of: &Element) -> Element {
    let of = graph.peel(of);
    let is_constant = |e: &Element| graph.constant(e).is_some();
    if let Some(x) = graph.unary(&of, Unary::Neg) {
        return without_factor(graph, &x);
    }
    if let Some([x, y]) = graph.binary(&of, Binary::Mul) {
        match (is_constant(&x), is_constant(&y)) {
            (false, true) => return without_factor(graph, &x),
            (true, false) => return without_factor(graph, &y),
            (true, true) | (false, false) => {}
        }
    }
    match graph.binary(&of, Binary::Div) {
        Some([x, y]) if is_constant(&y) => without_factor(graph, &x),
        Some(_) | None => of,
    }
}

/// All elements under arithmetic that are no constants.
fn operands_within(graph: &Graph, of: &Element, depth: usize, found: &mut Vec<Element>) {
    let of = graph.peel(of);
    if graph.constant(&of).is_some() || found.contains(&of) {
        return;
    }
    found.push(of.clone());
    if let Some(Op::Binary(Binary::Mul | Binary::Div | Binary::Add | Binary::Pow)) = graph.op(&of)
        && depth > 0
    {
        let under = graph.operands(&of);
        under.iter().for_each(|under| operands_within(graph, under, depth - 1, found));
    }
}
