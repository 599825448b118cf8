//! Softmax over the last dim, as a composite or as exponentials over their sum.

use super::draft::{Draft, Finished};
use super::element::{Element, Graph, Index};
use crate::module::{Kind, ValueId};
use crate::op::{Binary, Combiner, Op, Unary};

/// A softmax over the last dim that ends in a value.
pub(super) fn softmax<'g>(graph: &'g Graph<'g>, value: ValueId) -> Option<Finished> {
    if !matches!(graph.node(value)?.op, Op::Binary(Binary::Div | Binary::Mul)) {
        return None;
    }
    // What weighs values is a part of attention: that is found as a whole, or by its definition.
    if graph.is_multiplied(value) {
        return None;
    }
    let root = graph.any(value);
    let last = root.index.last().filter(|index| !index.is_empty())?;
    let x = opened(graph, &root, last)?;
    let mut draft = Draft::new(graph);
    let x = draft.laid(&x, &root.index)?;
    let y = draft.composite("softmax", &[], &[x])?[0];
    draft.finish("softmax", y, value)
}

/// What an element is the softmax of, along the index `along`.
pub(super) fn softmax_of(graph: &Graph, of: &Element, along: &Index) -> Option<Element> {
    let of = graph.peel(of);
    let closed = graph.node(of.value).filter(|node| {
        let callee = node.callee().and_then(|callee| graph.module.function(callee));
        callee.is_some_and(|callee| match &callee.kind {
            Kind::Composite { name, .. } => name == "softmax",
            Kind::Layer | Kind::Kernel => false,
        })
    });
    match closed {
        Some(call) => {
            let is_along = of.index.last() == Some(along);
            let x = Element { value: call.operands[0], index: of.index.clone() };
            let elsewhere = &of.index[..of.index.len() - 1];
            let is_free =
                elsewhere.iter().flatten().all(|d| along.iter().all(|a| a.variable != d.variable));
            (is_along && is_free).then(|| graph.peel(&x))
        }
        None => opened(graph, &of, along),
    }
}

/// The same of a softmax that is written out.
fn opened(graph: &Graph, of: &Element, along: &Index) -> Option<Element> {
    let (e, sum) = match graph.binary(of, Binary::Div) {
        Some([e, sum]) => (e, sum),
        None => {
            let [a, b] = graph.binary(of, Binary::Mul)?;
            let inverse = |x: &Element| {
                let [one, sum] = graph.binary(x, Binary::Div)?;
                (graph.constant(&one) == Some(1.0)).then_some(sum)
            };
            match (inverse(&a), inverse(&b)) {
                (_, Some(sum)) => (a, sum),
                (Some(sum), None) => (b, sum),
                (None, None) => return None,
            }
        }
    };
    let summed = over(graph, &sum, Combiner::Sum, along)?;
    if !graph.same(&summed, &e) {
        return None;
    }
    let shifted = graph.unary(&e, Unary::Exp)?;
    let [x, max] = graph.binary(&shifted, Binary::Sub)?;
    let largest = over(graph, &max, Combiner::Max, along)?;
    graph.same(&largest, &x).then_some(x)
}

/// What a reduction over one dim reduces, at the index `along` of that dim.
fn over(graph: &Graph, of: &Element, wanted: Combiner, along: &Index) -> Option<Element> {
    let of = graph.peel(of);
    let Op::Reduce { combiner, dims } = graph.op(&of)? else { return None };
    let [digit] = &along[..] else { return None };
    let is_over = *combiner == wanted && graph.reduced(&of) == [digit.size.clone()];
    let is_free = !of.mentions(digit.variable);
    (is_over && is_free).then(|| graph.inside(&of, dims, std::slice::from_ref(along)))
}
