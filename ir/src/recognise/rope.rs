//! Rotary embedding by halves: `x cos + (-x₂, x₁) sin`, or the halves `x₁ cos - x₂ sin` and
//! `x₂ cos + x₁ sin` side by side, with tables of cosines and sines that no input decides.
//!
//! The tables are evaluated. What angles they are of follows from the second frequency, and every
//! number of both tables has to be the one that the composite computes, as far as angles can be
//! told in the type.
//!
//! Legend: S rows, D numbers of a head, of which pair `j` turns by `theta^(-2j/D)` for each row.

use super::draft::{Draft, Finished};
use super::element::{Digit, Element, Graph, Index};
use super::mask::Pairs;
use super::views::{sizes, views};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Op, Unary};
use crate::types::TensorType;

/// What two tables are.
struct Turn {
    theta: f64,
    sign: f64,
}

/// Tables of cosines and sines, and the index that counts their pairs.
struct Tables<'e> {
    cosines: &'e Element,
    sines: &'e Element,
    pairs: &'e Index,
}

/// A rotary embedding that ends in a value.
#[expect(clippy::wildcard_enum_match_arm, reason = "it ends in no other op")]
pub(super) fn rope<'g>(graph: &'g Graph<'g>, value: ValueId) -> Option<Finished> {
    if !graph.function.ty(value).dtype.is_float() {
        return None;
    }
    let root = graph.any(value);
    match &graph.node(value)?.op {
        Op::Binary(Binary::Add) => by_whole(graph, &root),
        Op::Concat { dim } => by_halves(graph, &root, *dim),
        _ => None,
    }
}

/// `x cos + (-x₂, x₁) sin`
fn by_whole<'g>(graph: &'g Graph<'g>, root: &Element) -> Option<Finished> {
    let [a, b] = graph.binary(root, Binary::Add)?;
    let (left, right) = (graph.binary(&a, Binary::Mul)?, graph.binary(&b, Binary::Mul)?);
    let orders = [(&left, &right), (&right, &left)];
    orders.into_iter().find_map(|(plain, turned)| {
        let places = [(0, 1), (1, 0)];
        let (x, d, sines) = places.iter().find_map(|(at, other)| {
            let (x, d) = half_turned(graph, &turned[*at])?;
            Some((x, d, &turned[*other]))
        })?;
        let at = plain.iter().position(|e| graph.same(e, &x))?;
        let tables = Tables { cosines: &plain[1 - at], sines, pairs: &d };
        let digit = d.first()?;
        draft(graph, root, &x, digit, &tables)
    })
}

/// What an element is `(-x₂, x₁)` of, and the index along the head.
fn half_turned(graph: &Graph, of: &Element) -> Option<(Element, Index)> {
    let of = graph.peel(of);
    let node = graph.node(of.value)?;
    let (Op::Concat { dim }, [low, high]) = (&node.op, &node.operands[..]) else { return None };
    let whole = of.index[*dim].clone();
    let [_] = whole[..] else { return None };
    let half = graph.fresh(&graph.dims(*low)[*dim]);
    let at = |value: ValueId| {
        let mut index = of.index.clone();
        index[*dim].clone_from(&half);
        graph.peel(&Element { value, index })
    };
    let low = negated(graph, &at(*low))?;
    let x = sliced(graph, &low, &half, &whole, true)?;
    let other = sliced(graph, &at(*high), &half, &whole, false)?;
    graph.same(&x, &other).then_some((x, whole))
}

/// What an element is the negative of.
fn negated(graph: &Graph, of: &Element) -> Option<Element> {
    graph.unary(of, Unary::Neg).or_else(|| {
        let [a, b] = graph.binary(of, Binary::Mul)?;
        match (graph.constant(&a), graph.constant(&b)) {
            (Some(-1.0), None) => Some(b),
            (None, Some(-1.0)) => Some(a),
            (Some(_), _) | (None, _) => None,
        }
    })
}

/// What an element at `half` is a half of, the second one or the first, at `whole`.
fn sliced(
    graph: &Graph,
    of: &Element,
    half: &Index,
    whole: &Index,
    is_second: bool,
) -> Option<Element> {
    let of = graph.peel(of);
    let node = graph.node(of.value)?;
    let Op::Slice { dim, start, size } = node.op else { return None };
    let all = graph.dims(node.operands[0])[dim].as_constant()?;
    let wanted = if is_second { size } else { 0 };
    let is_half = all == 2 * size as i64 && start == wanted && of.index[dim] == *half;
    let is_free = half.iter().all(|h| {
        let rest = of.index.iter().enumerate().filter(|(at, _)| *at != dim);
        rest.flat_map(|(_, index)| index).all(|d| d.variable != h.variable)
    });
    let mut index = of.index.clone();
    index[dim].clone_from(whole);
    let x = Element { value: node.operands[0], index };
    (is_half && is_free).then(|| graph.peel(&x))
}

/// `x₁ cos - x₂ sin` and `x₂ cos + x₁ sin`, side by side.
fn by_halves<'g>(graph: &'g Graph<'g>, root: &Element, dim: usize) -> Option<Finished> {
    let [low, high] = graph.node(root.value)?.operands[..] else { return None };
    let whole = root.index[dim].clone();
    let digit = whole.first()?;
    let half = graph.fresh(&graph.dims(low)[dim]);
    let at = |value: ValueId| {
        let mut index = root.index.clone();
        index[dim].clone_from(&half);
        graph.peel(&Element { value, index })
    };
    let [ac, bs] = graph.binary(&at(low), Binary::Sub)?;
    let [bc, as_] = graph.binary(&at(high), Binary::Add)?;
    // A product of a half and a table.
    let parts = |of: &Element, is_second: bool| -> Option<(Element, Element)> {
        let [p, q] = graph.binary(of, Binary::Mul)?;
        let of_half = |e: &Element| sliced(graph, e, &half, &whole, is_second);
        match (of_half(&p), of_half(&q)) {
            (Some(x), _) => Some((x, q)),
            (None, Some(x)) => Some((x, p)),
            (None, None) => None,
        }
    };
    let (x, cosines) = parts(&ac, false)?;
    let (x2, sines) = parts(&bs, true)?;
    let (first, second) = match parts(&bc, true) {
        Some(first) => (first, parts(&as_, false)?),
        None => (parts(&as_, true)?, parts(&bc, false)?),
    };
    let is_same = [&x2, &first.0, &second.0].iter().all(|other| graph.same(&x, other))
        && graph.same(&first.1, &cosines)
        && graph.same(&second.1, &sines);
    let tables = Tables { cosines: &cosines, sines: &sines, pairs: &half };
    if is_same { draft(graph, root, &x, digit, &tables) } else { None }
}

fn draft<'g>(
    graph: &'g Graph<'g>,
    root: &Element,
    x: &Element,
    head: &Digit,
    tables: &Tables<'_>,
) -> Option<Finished> {
    let dtype = graph.function.ty(root.value).dtype;
    let others: Vec<&Index> = root.index.iter().filter(|i| !i.contains(head)).collect();
    let rows = others.iter().rev().filter(|i| !i.is_empty());
    let width = usize::try_from(head.size.as_constant()?).ok()?;
    let (rows, turn) = rows.into_iter().find_map(|rows| {
        let rest: Vec<Digit> = others
            .iter()
            .filter(|index| *index != rows)
            .flat_map(|index| index.iter().cloned())
            .collect();
        let values = |of: &Element| {
            let of = graph.peel(of);
            let read = rest.iter().filter(|d| of.mentions(d.variable)).cloned().collect::<Vec<_>>();
            Pairs::of(&read, rows, tables.pairs)?.values(graph, &of)
        };
        let found = turn(&values(tables.cosines)?, &values(tables.sines)?, width, tables, dtype)?;
        Some(((*rows).clone(), found))
    })?;
    let lead: Vec<Digit> =
        root.digits().filter(|d| *d != head && !rows.contains(d)).cloned().collect();
    let (batch, heads) = lead.split_at(lead.len().saturating_sub(1).max(lead.len().min(1)));
    let wanted = vec![batch.to_vec(), rows, heads.to_vec(), vec![head.clone()]];
    let mut draft = Draft::new(graph);
    let x = draft.laid(x, &wanted)?;
    let position = draft.number(0.0, TensorType::scalar(DType::I32))?;
    let attributes = [("theta", turn.theta), ("sign", turn.sign)];
    let y = draft.composite("rope", &attributes, &[x, position])?[0];
    let back = views(&sizes(&wanted), &wanted, &root.index)?;
    let y = draft.views(y, back)?;
    draft.finish("rope", y, root.value)
}

/// The turn that two tables of rows and pairs are, where they are one; whole tables have each pair
/// twice.
fn turn(
    cosines: &[f64],
    sines: &[f64],
    width: usize,
    tables: &Tables<'_>,
    dtype: DType,
) -> Option<Turn> {
    let columns = usize::try_from(tables.pairs.first()?.size.as_constant()?).ok()?;
    let (rows, half) = (cosines.len() / columns, width / 2);
    if rows < 2 || half < 2 || !width.is_multiple_of(2) || (columns != half && columns != width) {
        return None;
    }
    let angle =
        |row: usize, pair: usize| sines[row * columns + pair].atan2(cosines[row * columns + pair]);
    // The first pair turns by one for each row.
    let sign = angle(1, 0).signum();
    let frequency = |theta: f64, pair: usize| theta.powf(-2.0 * pair as f64 / width as f64);
    let raw = |row: usize, pair: usize| {
        (sign * angle(row, pair) / row as f64).powf(-(width as f64) / (2.0 * pair as f64))
    };
    let first = raw(1, 1);
    if !first.is_normal() {
        return None;
    }
    let last = half - 1;
    // The slowest pair tells more of theta the further it has turned.
    let is_within = (rows - 1) as f64 * frequency(first, last) < 3.0;
    let best = if is_within { raw(rows - 1, last) } else { first };
    let digits = |x: f64, count: i32| {
        let unit = 10_f64.powi(x.abs().log10().floor() as i32 + 1 - count);
        (x / unit).round() * unit
    };
    let loose = match dtype {
        DType::F64 => 1e-13,
        DType::F32 => 5e-7,
        DType::BF16
        | DType::F16
        | DType::F8E4M3
        | DType::F8E5M2
        | DType::I8
        | DType::I32
        | DType::I64
        | DType::U32
        | DType::Bool => return None,
    };
    let fits = |theta: &f64| {
        theta.is_finite()
            && *theta > 0.0
            && (0..rows * columns).all(|at| {
                let (row, pair) = (at / columns, at % columns % half);
                let angle = row as f64 * frequency(*theta, pair);
                let most = loose * (2.0 + angle);
                let (sin, cos) = angle.sin_cos();
                (cosines[at] - cos).abs() <= most && (sines[at] - sign * sin).abs() <= most
            })
    };
    // People choose round numbers.
    let best = if best.is_normal() { best } else { first };
    let rounded = [digits(best, 2), digits(best, 4), digits(first, 2), best, first];
    let theta = rounded.into_iter().find(fits)?;
    Some(Turn { theta, sign })
}
