//! Dropout between a softmax and the product that it weighs: the composite, or a draw compared
//! with a probability that chooses or multiplies, scaled before or after.

use super::element::{Element, Graph, Index, regrouped};
use super::expansion::is_near;
use super::views::sizes;
use crate::dim::{Dim, product};
use crate::module::{Attributes, Kind, Node, ValueId};
use crate::op::{Binary, Comparison, Op};
use crate::random::DrawBits;

/// How many steps dropout takes at most.
const STEPS_MAX: usize = 8;

/// What drops elements.
pub(super) struct Dropout {
    /// The probability with which each is.
    pub(super) p: f64,
    /// The site's salt and key.
    pub(super) salt: u32,
    pub(super) key: ValueId,
    /// The element that is drawn for an element; its value has the dims of the draw.
    drawn: Element,
    /// Indices of the first dim of the draw that belong to one sample.
    per_sample: u32,
    /// The bits of the draw.
    pub(super) bits: DrawBits,
}

impl Dropout {
    /// The dropout that an element is the result of, and what it drops.
    pub(super) fn of(graph: &Graph, of: &Element) -> Option<(Dropout, Element)> {
        let of = graph.peel(of);
        called(graph, &of).or_else(|| written(graph, &of))
    }

    /// Whether each score gets the draw that attention makes for it, which numbers scores by
    /// sample, head, query and key, and counts samples by the first dim.
    pub(super) fn is_of(&self, graph: &Graph, scores: &[Index; 4]) -> bool {
        let row = |groups: &[Index]| {
            let whole = [product(&sizes(groups))];
            regrouped(groups.iter().flatten().cloned().collect(), &whole)
        };
        let batch = &sizes(&scores[..1])[0];
        let first = graph.dims(self.drawn.value).first();
        // Of samples that are no dim of their own, planning would not know which is which.
        *batch == Dim::symbol(Dim::BATCH)
            && first.and_then(|first| first.ratio(batch)) == Some(i64::from(self.per_sample))
            && row(&self.drawn.index).is_some_and(|drawn| Some(drawn) == row(scores))
    }
}

/// The composite of a node that calls one.
fn composite<'g>(graph: &'g Graph, node: &Node) -> Option<(&'g str, &'g Attributes)> {
    match &graph.module.function(node.callee()?)?.kind {
        Kind::Composite { name, attributes } => Some((name, attributes)),
        Kind::Layer | Kind::Kernel => None,
    }
}

fn called(graph: &Graph, of: &Element) -> Option<(Dropout, Element)> {
    let node = graph.node(of.value)?;
    let ("dropout", attributes) = composite(graph, node)? else { return None };
    let (p, salt) = (*attributes.get("p")?, *attributes.get("salt")? as u32);
    let x = Element { value: node.operands[0], index: of.index.clone() };
    let bits = DrawBits::of_composite(attributes);
    let (key, drawn) = (node.operands[1], of.clone());
    Some((Dropout { p, salt, key, drawn, per_sample: 1, bits }, graph.peel(&x)))
}

/// What is found on the way from the result to what is dropped.
struct Way<'g> {
    graph: &'g Graph<'g>,
    /// The product of all constant factors.
    factor: f64,
    /// The condition under which an element is kept, and whether it says so or the opposite.
    kept: Option<(Element, bool)>,
}

fn written(graph: &Graph, of: &Element) -> Option<(Dropout, Element)> {
    let mut way = Way { graph, factor: 1.0, kept: None };
    let mut x = of.clone();
    for _ in 0..STEPS_MAX {
        match way.step(&x) {
            Some(under) => x = under,
            None => break,
        }
    }
    let (condition, is_kept) = way.kept?;
    let dropout = drawn(graph, &condition, is_kept)?;
    let dtype = graph.function.ty(of.value).dtype;
    is_near(way.factor * (1.0 - dropout.p), 1.0, dtype).then_some((dropout, x))
}

impl Way<'_> {
    /// What is under an op of dropout.
    fn step(&mut self, of: &Element) -> Option<Element> {
        let graph = self.graph;
        if let Some((condition, is_kept, x)) = chosen(graph, of) {
            self.keep(condition, is_kept)?;
            return Some(x);
        }
        if let Some([x, y]) = graph.binary(of, Binary::Div) {
            self.factor /= graph.constant(&y)?;
            return Some(x);
        }
        let [x, y] = graph.binary(of, Binary::Mul)?;
        [(&x, &y), (&y, &x)].into_iter().find_map(|(x, by)| match graph.constant(by) {
            Some(by) => {
                self.factor *= by;
                Some(x.clone())
            }
            None => {
                let (condition, is_kept, factor) = mask(graph, by)?;
                self.keep(condition, is_kept)?;
                self.factor *= factor;
                Some(x.clone())
            }
        })
    }

    /// Notes the one condition.
    fn keep(&mut self, condition: Element, is_kept: bool) -> Option<()> {
        self.kept.is_none().then(|| self.kept = Some((condition, is_kept)))
    }
}

/// A choice between something and zero: the condition, whether it chooses the former, and that.
fn chosen(graph: &Graph, of: &Element) -> Option<(Element, bool, Element)> {
    let of = graph.peel(of);
    let Some(Op::Select) = graph.op(&of) else { return None };
    let [condition, yes, no] = <[Element; 3]>::try_from(graph.operands(&of)).ok()?;
    match (graph.constant(&yes), graph.constant(&no)) {
        (_, Some(0.0)) => Some((condition, true, yes)),
        (Some(0.0), None) => Some((condition, false, no)),
        (Some(_), _) | (None, _) => None,
    }
}

/// A condition as a number, times a factor.
fn mask(graph: &Graph, of: &Element) -> Option<(Element, bool, f64)> {
    let of = graph.peel(of);
    if let Some((condition, is_kept, x)) = chosen(graph, &of) {
        return Some((condition, is_kept, graph.constant(&x)?));
    }
    if let Some(Op::Cast { .. }) = graph.op(&of) {
        let condition = graph.operands(&of).pop()?;
        let is_condition = graph.function.ty(condition.value).dtype == crate::DType::Bool;
        return is_condition.then_some((condition, true, 1.0));
    }
    if let Some([x, y]) = graph.binary(&of, Binary::Div) {
        let (condition, is_kept, factor) = mask(graph, &x)?;
        return Some((condition, is_kept, factor / graph.constant(&y)?));
    }
    let [x, y] = graph.binary(&of, Binary::Mul)?;
    [(&x, &y), (&y, &x)].into_iter().find_map(|(x, by)| {
        let by = graph.constant(by)?;
        let (condition, is_kept, factor) = mask(graph, x)?;
        Some((condition, is_kept, factor * by))
    })
}

/// The draw that decides: kept is what is not below the probability.
fn drawn(graph: &Graph, condition: &Element, is_kept: bool) -> Option<Dropout> {
    let condition = graph.peel(condition);
    let Some(Op::Compare(how)) = graph.op(&condition) else { return None };
    let [a, b] = <[Element; 2]>::try_from(graph.operands(&condition)).ok()?;
    let (limit, u) = match (how, is_kept) {
        (Comparison::Le, true) => (a, b),
        (Comparison::Lt, false) => (b, a),
        (Comparison::Eq | Comparison::Lt | Comparison::Le, _) => return None,
    };
    let (p, u) = (graph.constant(&limit)?, graph.peel(&u));
    let node = graph.node(u.value)?;
    let Op::Random { salt, start, extent, per_sample, bits, dtype, dims } = &node.op else {
        return None;
    };
    // Attention draws in the type of sums.
    let is_wide = dtype.is_float() && !dtype.is_narrow();
    let is_whole = start.iter().all(|at| *at == 0) && extent.get(1..) == dims.get(1..);
    let (salt, per_sample, bits, key) = (*salt, *per_sample, *bits, node.operands[0]);
    (is_wide && is_whole).then_some(Dropout { p, salt, key, drawn: u, per_sample, bits })
}
