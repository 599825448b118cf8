//! Layer norm and RMS norm over the last dims, with and without weights.
//!
//! `y = w (x - mean) / √(mean((x - mean)²) + ε) + b`: the mean of squares under a root is found
//! first, which says what is normalised and along which dims; then everything around it has to be
//! that product.

use super::draft::{Draft, Finished, Source};
use super::element::{Digit, Element, Graph, Index, regrouped};
use super::expansion::{Expansion, Product, is_near};
use super::views::{sizes, views};
use crate::dim::{Dim, product};
use crate::module::ValueId;
use crate::op::{Binary, Combiner, Op, Unary};
use crate::types::TensorType;

/// How deep a root is looked for under a product.
const REACH: usize = 6;

/// What is under the root of a norm.
struct Spread {
    /// The sum of the mean of squares and epsilon.
    under_root: Element,
    epsilon: f64,
    /// The sum of squares.
    sum: Element,
    /// How many squares there are.
    count: Dim,
}

/// A norm that ends in a value.
pub(super) fn norm<'g>(graph: &'g Graph<'g>, value: ValueId) -> Option<Finished> {
    let is_end = matches!(
        graph.node(value)?.op,
        Op::Binary(Binary::Mul | Binary::Div | Binary::Add | Binary::Sub)
    );
    if !is_end || !graph.function.ty(value).dtype.is_float() {
        return None;
    }
    let root = graph.any(value);
    let (mut spreads, mut seen) = (Vec::new(), Vec::new());
    reach(graph, &root, REACH, &mut spreads, &mut seen);
    spreads.iter().find_map(|spread| draft(graph, &root, spread, &seen))
}

/// The roots of mean squares under arithmetic, and all elements on the way.
fn reach(
    graph: &Graph,
    of: &Element,
    depth: usize,
    found: &mut Vec<Spread>,
    seen: &mut Vec<Element>,
) {
    let of = graph.peel(of);
    if seen.contains(&of) {
        return;
    }
    seen.push(of.clone());
    let root = match graph.op(&of) {
        Some(Op::Unary(Unary::Sqrt | Unary::Rsqrt)) => graph.operands(&of).pop(),
        Some(Op::Binary(Binary::Pow)) => {
            let under = graph.operands(&of);
            let exponent = under.get(1).and_then(|e| graph.constant(e));
            exponent.filter(|e| e.abs() == 0.5).and(under.into_iter().next())
        }
        Some(_) | None => None,
    };
    found.extend(root.and_then(|root| spread(graph, &root)));
    if let Some(
        Op::Binary(Binary::Mul | Binary::Div | Binary::Add | Binary::Sub) | Op::Unary(Unary::Neg),
    ) = graph.op(&of)
        && depth > 0
    {
        for under in graph.operands(&of) {
            reach(graph, &under, depth - 1, found, seen);
        }
    }
}

/// What an element under a root is, where it is a mean of squares and epsilon.
fn spread(graph: &Graph, under_root: &Element) -> Option<Spread> {
    let dtype = graph.function.ty(under_root.value).dtype;
    let mut expansion = Expansion::new(graph, &[]);
    let found = expansion.of(under_root);
    let epsilon = found.get(&Product::new()).copied().unwrap_or(0.0);
    let mut means = found.iter().filter(|(product, _)| !product.is_empty());
    let (mean, factor) = (means.next()?, means.next());
    let ([(atom, 2)], None) = (&mean.0[..], factor) else { return None };
    let sum = expansion.atoms[*atom].clone();
    let Op::Reduce { combiner: Combiner::Sum, .. } = graph.op(&sum)? else { return None };
    let count = product(&graph.reduced(&sum));
    let is_mean = is_near(mean.1 * count.as_constant()? as f64, 1.0, dtype);
    let is_fine = is_mean && epsilon.is_finite() && epsilon >= 0.0;
    is_fine.then(|| Spread { under_root: graph.peel(under_root), epsilon, sum, count })
}

/// What a sum sums along digits.
fn summed(graph: &Graph, sum: &Element, along: &[Digit]) -> Option<Element> {
    let Op::Reduce { combiner: Combiner::Sum, dims } = graph.op(sum)? else { return None };
    let is_free = |digit: &Digit| along.iter().all(|a| a.variable != digit.variable);
    let with = regrouped(along.to_vec(), &graph.reduced(sum))?;
    sum.digits().all(is_free).then(|| graph.inside(sum, dims, &with))
}

/// What is squared in an element.
fn root_of_square(graph: &Graph, square: &Element) -> Option<Element> {
    match (graph.binary(square, Binary::Mul), graph.binary(square, Binary::Pow)) {
        (Some([a, b]), _) if graph.same(&a, &b) => Some(a),
        (_, Some([a, b])) if graph.constant(&b) == Some(2.0) => Some(a),
        _ => None,
    }
}

/// The operand of a layer norm: what an element is the difference from its mean of.
fn centred(graph: &Graph, of: &Element, last: &[Digit], count: f64) -> Option<Element> {
    let dtype = graph.function.ty(of.value).dtype;
    let parts = graph.binary(of, Binary::Sub).or_else(|| {
        let [a, b] = graph.binary(of, Binary::Add)?;
        let negated = |e: &Element| graph.unary(e, Unary::Neg);
        match (negated(&a), negated(&b)) {
            (_, Some(b)) => Some([a, b]),
            (Some(a), None) => Some([b, a]),
            (None, None) => None,
        }
    });
    let [x, mean] = parts?;
    let mut expansion = Expansion::new(graph, &[]);
    let found = expansion.of(&mean);
    let (product, factor) = found.iter().next().filter(|_| found.len() == 1)?;
    let [(atom, 2)] = product[..] else { return None };
    let inner = summed(graph, &expansion.atoms[atom], last)?;
    (graph.same(&inner, &x) && is_near(factor * count, 1.0, dtype)).then_some(x)
}

fn draft<'g>(
    graph: &'g Graph<'g>,
    root: &Element,
    spread: &Spread,
    seen: &[Element],
) -> Option<Finished> {
    // The averaged dims are the last ones of the result.
    let all: Vec<Digit> = root.digits().cloned().collect();
    let mut rows = all.len();
    while product(all[rows..].iter().map(|digit| &digit.size)) != spread.count {
        rows = rows.checked_sub(1)?;
    }
    let last_digits = all[rows..].to_vec();
    let rows: Vec<usize> = all[..rows].iter().map(|digit| digit.variable).collect();
    let is_row = |digit: &Digit| rows.contains(&digit.variable);
    if last_digits.is_empty() || !spread.under_root.digits().all(is_row) {
        return None;
    }
    let square = summed(graph, &spread.sum, &last_digits)?;
    let squared = root_of_square(graph, &square)?;
    let normal = seen.iter().find(|element| graph.same(element, &squared))?.clone();
    let Weights { weight, scale, bias } = weights(graph, root, &normal, spread, &rows)?;
    let count = spread.count.as_constant()? as f64;
    let centred = centred(graph, &normal, &last_digits, count);
    let (name, x) = match (&centred, &bias) {
        (Some(x), _) => ("layer_norm", x),
        (None, None) => ("rms_norm", &normal),
        (None, Some(_)) => return None,
    };
    let ty = graph.function.ty(root.value);
    let mut before = 0;
    let lead = root.index.iter().position(|index| {
        before += index.len();
        before > rows.len()
    })?;
    let mut wanted: Vec<Index> = root.index[..lead].to_vec();
    wanted.push(last_digits.clone());
    let mut draft = Draft::new(graph);
    let x = draft.laid(x, &wanted)?;
    let one = std::slice::from_ref(&last_digits);
    let along = TensorType { dtype: ty.dtype, dims: sizes(one) };
    let mut operands = vec![x, shared(&mut draft, weight.as_ref(), scale, &along, one)?];
    if name == "layer_norm" {
        let (bias, scale) = bias.map_or((None, 0.0), |(bias, scale)| (bias, scale));
        operands.push(shared(&mut draft, bias.as_ref(), scale, &along, one)?);
    }
    let y = draft.composite(name, &[("eps", spread.epsilon)], &operands)?[0];
    let back = views(&sizes(&wanted), &wanted, &root.index)?;
    let y = draft.views(y, back)?;
    draft.finish(name, y, root.value)
}

/// A number for each of the averaged elements: a value times a factor, or the factor alone.
fn shared(
    draft: &mut Draft<'_>,
    of: Option<&Element>,
    factor: f64,
    along: &TensorType,
    wanted: &[Index],
) -> Option<Source> {
    let Some(of) = of else { return draft.number(factor, along.clone()) };
    let laid = draft.laid(of, wanted)?;
    if factor == 1.0 {
        return Some(laid);
    }
    let factor = draft.number(factor, along.clone())?;
    draft.op(Op::Binary(Binary::Mul), &[laid, factor])
}

/// What normal numbers are multiplied by, and what is added to them.
struct Weights {
    /// None for one.
    weight: Option<Element>,
    scale: f64,
    /// An element and its factor, or a number; none for zero.
    bias: Option<(Option<Element>, f64)>,
}

/// The weights of a norm: nothing else than a factor and a term that are the same for all rows.
fn weights(
    graph: &Graph,
    root: &Element,
    normal: &Element,
    spread: &Spread,
    rows: &[usize],
) -> Option<Weights> {
    let mut whole = Expansion::new(graph, &[normal, &spread.under_root]);
    if !rows.is_empty() {
        whole = whole.along(rows.to_vec());
    }
    let found = whole.of(root);
    let (mut weight, mut bias) = (None, None);
    for (product, factor) in &found {
        let (normals, rest): (Product, Product) =
            product.iter().copied().partition(|(atom, _)| *atom < 2);
        let own = match rest[..] {
            [] => None,
            [(atom, 2)] => Some(whole.atoms[atom].clone()),
            _ => return None,
        };
        if own.as_ref().is_some_and(|own| rows.iter().any(|row| own.mentions(*row))) {
            return None;
        }
        match normals[..] {
            [(0, 2), (1, -1)] if weight.is_none() => weight = Some((own, *factor)),
            [] if bias.is_none() => bias = Some((own, *factor)),
            _ => return None,
        }
    }
    let (weight, scale) = weight?;
    Some(Weights { weight, scale, bias })
}
