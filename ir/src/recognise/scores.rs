//! Scores of attention: a product of queries and keys, and all that is done with it before the
//! softmax.

use super::draft::{Draft, Source};
use super::element::{Digit, Element, Graph, Index};
use super::mask::{HIDDEN, Pairs};
use crate::op::{Binary, Combiner, Comparison, Op, Unary};
use crate::types::TensorType;

/// How many steps lie between the softmax and the product at most.
const STEPS_MAX: usize = 24;

/// From here on the sum with a score is the number itself, in f32 and f64.
pub(super) const ABSORBING: f64 = -1e30;

/// What is found between a softmax and a product.
pub(super) struct Scores {
    /// The factor of the product.
    pub(super) scale: f64,
    /// The bound of the scores; 0 for none.
    pub(super) softcap: f64,
    /// What is added or hides keys, all after the scale and the bound.
    pub(super) masks: Vec<Mask>,
    /// No sum of score and mask is below this number.
    pub(super) least: Option<f64>,
    /// Queries and keys, without constant factors.
    pub(super) operands: [Element; 2],
    /// The index that the product sums over.
    pub(super) inner: Index,
    /// The variables of the scores in the order of their dims.
    pub(super) order: Vec<usize>,
    /// The index of the dim before that of the keys.
    pub(super) row: Index,
    /// Whether a row that sees no key is zero.
    pub(super) is_guarded: bool,
}

impl Scores {
    /// Whether a mask depends on a variable.
    pub(super) fn mentions(&self, variable: usize) -> bool {
        self.masks.iter().any(|mask| mask.element().mentions(variable))
    }
}

/// Something that is done to scores.
#[derive(Clone, Debug)]
pub(super) enum Mask {
    /// An element is added, times a factor.
    Added { element: Element, factor: f64 },
    /// Where an element does not hold as wanted, the score is this number instead.
    Hidden { element: Element, wanted: bool, score: f64 },
}

impl Mask {
    /// The element that decides.
    pub(super) fn element(&self) -> &Element {
        match self {
            Mask::Added { element, .. } | Mask::Hidden { element, .. } => element,
        }
    }

    /// Which pairs are seen, where all that the mask does is to hide the others, whatever inputs
    /// are and for all samples and heads; and whether it hides them by minus infinity.
    pub(super) fn sees(
        &self,
        graph: &Graph,
        others: &[Digit],
        queries: &Index,
        keys: &Index,
    ) -> Option<(Vec<bool>, bool)> {
        let element = self.element();
        let read: Vec<Digit> =
            others.iter().filter(|digit| element.mentions(digit.variable)).cloned().collect();
        let pairs = Pairs::of(&read, queries, keys)?;
        let values = pairs.values(graph, self.element())?;
        match self {
            Mask::Hidden { wanted, score, .. } => {
                let sees = values.into_iter().map(|x| (x != 0.0) == *wanted).collect();
                Some((sees, *score == f64::NEG_INFINITY))
            }
            Mask::Added { factor, .. } => {
                let scores: Vec<f64> =
                    values.into_iter().map(|x| if x == 0.0 { 0.0 } else { x * factor }).collect();
                let is_mask = scores.iter().all(|x| *x == 0.0 || *x <= HIDDEN);
                let is_whole = scores.iter().all(|x| *x == 0.0 || *x == f64::NEG_INFINITY);
                is_mask.then(|| (scores.iter().map(|x| *x == 0.0).collect(), is_whole))
            }
        }
    }

    /// Whether it surely leaves every score in sight.
    pub(super) fn hides_nothing(&self, graph: &Graph) -> bool {
        match self {
            Mask::Hidden { .. } => false,
            Mask::Added { element, factor } => {
                let whole = graph.evaluate(graph.peel(element).value);
                whole.is_some_and(|whole| whole.to_f64().iter().all(|x| x * factor > HIDDEN))
            }
        }
    }

    /// What is added to the scores in all, where `inner` is added before, with a dim for each
    /// group of digits. Where `is_whole`, scores are hidden by minus infinity.
    pub(super) fn bias(
        &self,
        draft: &mut Draft<'_>,
        inner: Option<Source>,
        wanted: &[Index],
        ty: &TensorType,
        is_whole: bool,
    ) -> Option<Source> {
        let laid = draft.laid(self.element(), wanted)?;
        match self {
            Mask::Added { factor, .. } => {
                let mut term = laid;
                if *factor != 1.0 {
                    let factor = draft.number(*factor, ty.clone())?;
                    term = draft.op(Op::Binary(Binary::Mul), &[laid, factor])?;
                }
                match inner {
                    Some(inner) => draft.op(Op::Binary(Binary::Add), &[inner, term]),
                    None => Some(term),
                }
            }
            // A row that sees no key keeps its meaning only if the sum is the number alone.
            Mask::Hidden { score, .. } if *score > ABSORBING && !is_whole => None,
            Mask::Hidden { wanted, score, .. } => {
                let inner = match inner {
                    Some(inner) => inner,
                    None => draft.number(0.0, ty.clone())?,
                };
                let score = if is_whole { f64::NEG_INFINITY } else { *score };
                let score = draft.number(score, ty.clone())?;
                let (yes, no) = if *wanted { (inner, score) } else { (score, inner) };
                draft.op(Op::Select, &[laid, yes, no])
            }
        }
    }

    /// Whether it surely is never minus infinity.
    pub(super) fn is_finite(&self, graph: &Graph) -> bool {
        match self {
            Mask::Hidden { score, .. } => score.is_finite(),
            Mask::Added { element, factor } => factor.is_finite() && finite(graph, element, 12),
        }
    }
}

/// Whether an element is a finite number, as long as no product overflows.
fn finite(graph: &Graph, of: &Element, depth: usize) -> bool {
    let of = graph.peel(of);
    if let Some(value) = graph.constant(&of) {
        return value.is_finite();
    }
    if !graph.function.ty(of.value).dtype.is_float() {
        return true;
    }
    if let Some(whole) = graph.evaluate(of.value) {
        return whole.to_f64().iter().all(|x| x.is_finite());
    }
    let all = |from: usize| {
        let operands = graph.operands(&of);
        depth > 0 && operands[from..].iter().all(|operand| finite(graph, operand, depth - 1))
    };
    match graph.op(&of) {
        Some(Op::Cast { .. } | Op::Binary(Binary::Add | Binary::Sub | Binary::Mul)) => all(0),
        Some(Op::Binary(Binary::Max | Binary::Min) | Op::Unary(Unary::Neg | Unary::Abs)) => all(0),
        Some(Op::Select) => all(1),
        Some(Op::Gather { .. }) => {
            let table = graph.node(of.value).map(|node| node.operands[0]);
            let known = table.and_then(|table| graph.evaluate(table));
            known.is_some_and(|table| table.to_f64().iter().all(|x| x.is_finite()))
        }
        _ => false,
    }
}

/// What makes the softmax of a row that sees no key zero. Scores that are no numbers for another
/// reason stay so in attention.
pub(super) enum Guard {
    /// Nothing does.
    None,
    /// Where the softmax is no number, it is zero.
    NotANumber,
    /// Where this holds, it is zero.
    Where(Element),
}

impl Guard {
    /// The guard around a softmax, and what is inside.
    pub(super) fn of(graph: &Graph, weights: &Element) -> (Guard, Element) {
        let weights = graph.peel(weights);
        if let (Some(Op::Select), [condition, yes, no]) =
            (graph.op(&weights), &graph.operands(&weights)[..])
            && graph.constant(yes) == Some(0.0)
        {
            let guard = match is_no_number(graph, condition) {
                Some(of) if graph.same(&of, no) => Guard::NotANumber,
                Some(_) | None => Guard::Where(condition.clone()),
            };
            return (guard, no.clone());
        }
        (Guard::None, weights)
    }
}

/// What a condition asks of whether it is no number.
fn is_no_number(graph: &Graph, condition: &Element) -> Option<Element> {
    let compared = |of: &Element| {
        let of = graph.peel(of);
        let Some(Op::Compare(Comparison::Eq)) = graph.op(&of) else { return None };
        <[Element; 2]>::try_from(graph.operands(&of)).ok()
    };
    let [equal, no] = compared(condition)?;
    let [a, b] = compared(&equal).filter(|_| graph.constant(&no) == Some(0.0))?;
    graph.same(&a, &b).then_some(a)
}

/// Reads scores from the softmax backwards.
pub(super) fn scores(graph: &Graph, x: &Element, guard: &Guard, keys: &Index) -> Option<Scores> {
    let mut walk =
        Walk { graph, guard, keys, masks: vec![], added: vec![], least: None, empty: None };
    let at = walk.masked(x, 1.0, 0)?;
    // `cap · tanh(s / cap)`: the factor inside, times the cap, is part of the scale.
    let (at, outer) = at;
    let (softcap, at) = match graph.unary(&at, Unary::Tanh) {
        Some(inner) if outer > 0.0 => (outer, inner),
        Some(_) => return None,
        None => (0.0, at),
    };
    let (product, scale) = factored(graph, &at, outer);
    let node = graph.node(product.value)?;
    let Op::Contract(einsum) = &node.op else { return None };
    let letters = einsum.letters();
    let mut summed = letters.iter().filter(|l| !einsum.result.contains(l));
    let (letter, None) = (summed.next()?, summed.next()) else { return None };
    let dim = einsum.a.iter().position(|l| l == letter)?;
    let inner = graph.fresh(&graph.dims(node.operands[0])[dim]);
    let index = |letter: &char| match einsum.result.iter().position(|l| l == letter) {
        Some(at) => product.index[at].clone(),
        None => inner.clone(),
    };
    let mut scale = scale;
    let mut operand = |at: usize, letters: &[char]| {
        let index = letters.iter().map(index).collect();
        let (element, by) = factored(graph, &Element { value: node.operands[at], index }, scale);
        scale = by;
        element
    };
    let [a, b] = [operand(0, &einsum.a), operand(1, &einsum.b)];
    let of_keys = |e: &Element| keys.iter().any(|digit| e.mentions(digit.variable));
    let operands = match (of_keys(&a), of_keys(&b)) {
        (false, true) => [a, b],
        (true, false) => [b, a],
        (true, true) | (false, false) => return None,
    };
    let at = x.index.iter().position(|index| index == keys)?;
    let row = at.checked_sub(1).map_or_else(Index::new, |at| x.index[at].clone());
    let order = x.digits().map(|digit| digit.variable).collect();
    let Walk { masks, added, least, empty, .. } = walk;
    let is_guarded = match (guard, empty) {
        (Guard::None, None) => false,
        (Guard::NotANumber, None) => true,
        (Guard::Where(_), Some(of)) => is_row_of(graph, &of, &added, keys),
        (Guard::None | Guard::NotANumber, Some(_)) | (Guard::Where(_), None) => return None,
    };
    if matches!(guard, Guard::Where(_)) && !is_guarded {
        return None;
    }
    let is_fine = scale.is_finite() && scale != 0.0;
    is_fine.then_some(Scores {
        scale,
        softcap,
        masks,
        least,
        operands,
        inner,
        order,
        row,
        is_guarded,
    })
}

/// Whether a condition holds in the rows where all that is added is nothing but minus infinity.
fn is_row_of(graph: &Graph, condition: &Element, added: &[Element], keys: &Index) -> bool {
    let [element] = added else { return false };
    let condition = graph.peel(condition);
    let operands = graph.operands(&condition);
    let (Some(Op::Compare(Comparison::Eq)), [max, least]) = (graph.op(&condition), &operands[..])
    else {
        return false;
    };
    let Some(Op::Reduce { combiner: Combiner::Max, dims }) = graph.op(max) else { return false };
    let [size] = &graph.reduced(max)[..] else { return false };
    keys.iter().all(|d| d.size == *size && !max.mentions(d.variable))
        && graph.constant(least) == Some(f64::NEG_INFINITY)
        && graph.same(&graph.inside(max, dims, std::slice::from_ref(keys)), element)
}

/// An element without constant factors, which join a factor.
fn factored(graph: &Graph, of: &Element, factor: f64) -> (Element, f64) {
    let of = graph.peel(of);
    if let Some(x) = graph.unary(&of, Unary::Neg) {
        return factored(graph, &x, -factor);
    }
    if let Some([x, y]) = graph.binary(&of, Binary::Mul) {
        match (graph.constant(&x), graph.constant(&y)) {
            (None, Some(by)) => return factored(graph, &x, factor * by),
            (Some(by), None) => return factored(graph, &y, factor * by),
            (Some(_), Some(_)) | (None, None) => {}
        }
    }
    if let Some([x, y]) = graph.binary(&of, Binary::Div)
        && let Some(by) = graph.constant(&y)
    {
        return factored(graph, &x, factor / by);
    }
    (of, factor)
}

struct Walk<'g> {
    graph: &'g Graph<'g>,
    guard: &'g Guard,
    keys: &'g Index,
    masks: Vec<Mask>,
    /// What was added, before it was taken apart.
    added: Vec<Element>,
    least: Option<f64>,
    /// The condition under which all scores are zero.
    empty: Option<Element>,
}

impl Walk<'_> {
    /// Follows sums and choices down to the scores alone: them, and their factor.
    fn masked(&mut self, of: &Element, factor: f64, depth: usize) -> Option<(Element, f64)> {
        let graph = self.graph;
        let of = graph.peel(of);
        if depth > STEPS_MAX {
            return None;
        }
        let operands = graph.operands(&of);
        match (graph.op(&of), &operands[..]) {
            (Some(Op::Select), [condition, yes, no]) => {
                self.chosen(condition, [yes, no], factor, depth)
            }
            (Some(Op::Binary(Binary::Max)), [a, b]) => {
                let (x, least) = match (graph.constant(a), graph.constant(b)) {
                    (None, Some(least)) => (a, least),
                    (Some(least), None) => (b, least),
                    (Some(_), Some(_)) | (None, None) => return None,
                };
                let is_first = factor == 1.0 && self.least.is_none() && self.masks.is_empty();
                if !is_first || least > ABSORBING {
                    return None;
                }
                self.least = Some(least);
                self.masked(x, factor, depth + 1)
            }
            (Some(Op::Binary(how @ (Binary::Add | Binary::Sub))), [a, b]) => {
                let sign = if *how == Binary::Sub { -1.0 } else { 1.0 };
                if factor != 1.0 && self.empty.is_some() {
                    return None;
                }
                if self.is_score(a, 0) {
                    self.added.push(b.clone());
                    self.masks.extend(terms(graph, b, factor * sign, 0));
                    self.masked(a, factor, depth + 1)
                } else {
                    self.added.push(a.clone());
                    self.masks.extend(terms(graph, a, factor, 0));
                    self.masked(b, factor * sign, depth + 1)
                }
            }
            (Some(_), _) => {
                let (inner, by) = factored(graph, &of, factor);
                let is_masked = inner != of
                    && matches!(
                        graph.op(&inner),
                        Some(Op::Select | Op::Binary(Binary::Add | Binary::Sub))
                    );
                match is_masked {
                    true => self.masked(&inner, by, depth + 1),
                    false => Some((inner, by)),
                }
            }
            (None, _) => None,
        }
    }

    fn chosen(
        &mut self,
        condition: &Element,
        [yes, no]: [&Element; 2],
        factor: f64,
        depth: usize,
    ) -> Option<(Element, f64)> {
        let graph = self.graph;
        let constants = (graph.constant(yes), graph.constant(no));
        if let (Guard::Where(empty), (Some(0.0), None)) = (self.guard, constants)
            && self.empty.is_none()
            && self.masks.is_empty()
            && graph.same(empty, condition)
            && self.keys.iter().all(|d| !condition.mentions(d.variable))
        {
            self.empty = Some(condition.clone());
            return self.masked(no, factor, depth + 1);
        }
        let (x, wanted, score) = match constants {
            (None, Some(score)) => (yes, true, score),
            (Some(score), None) => (no, false, score),
            (Some(_), Some(_)) | (None, None) => return None,
        };
        let score = score * factor;
        // What is added to a hidden score does not show it again.
        let are_fine = self.masks.iter().all(|mask| match mask {
            Mask::Hidden { .. } => true,
            Mask::Added { .. } => score <= ABSORBING || self.hides_alone(mask),
        });
        if score > HIDDEN || !are_fine {
            return None;
        }
        self.masks.push(Mask::Hidden { element: condition.clone(), wanted, score });
        self.masked(x, factor, depth + 1)
    }

    /// Whether a mask that is added only ever lowers scores.
    fn hides_alone(&self, mask: &Mask) -> bool {
        let Mask::Added { element, factor } = mask else { return false };
        let whole = self.graph.evaluate(self.graph.peel(element).value);
        whole.is_some_and(|whole| whole.to_f64().iter().all(|x| x * factor <= 0.0))
    }

    /// Whether an element is made from a product of values by what scores go through.
    fn is_score(&self, of: &Element, depth: usize) -> bool {
        let of = self.graph.peel(of);
        let operands = self.graph.operands(&of);
        let any = |from: usize| {
            depth < STEPS_MAX && operands[from..].iter().any(|o| self.is_score(o, depth + 1))
        };
        match self.graph.op(&of) {
            Some(Op::Contract(_)) => self.keys.iter().all(|d| of.mentions(d.variable)),
            Some(Op::Select) => any(1),
            Some(
                Op::Binary(Binary::Add | Binary::Sub | Binary::Mul | Binary::Div | Binary::Max)
                | Op::Unary(Unary::Tanh | Unary::Neg),
            ) => any(0),
            Some(_) | None => false,
        }
    }
}

/// What is added, term by term.
fn terms(graph: &Graph, of: &Element, factor: f64, depth: usize) -> Vec<Mask> {
    let of = graph.peel(of);
    if let Some([a, b]) = graph.binary(&of, Binary::Add).filter(|_| depth < 4) {
        let mut both = terms(graph, &a, factor, depth + 1);
        both.extend(terms(graph, &b, factor, depth + 1));
        return both;
    }
    vec![Mask::Added { element: of, factor }]
}
