//! Rotary embedding: `x cos + (-x₂, x₁) sin`, or `x₁ cos - x₂ sin` and `x₂ cos + x₁ sin` side by
//! side, with tables of cosines and sines that no input decides. `x₁` and `x₂` are halves of the
//! head, or every other number of it, which become halves for the composite.
//!
//! The tables are evaluated. What angles they are of follows from the second frequency, and every
//! number of both tables has to be the one that the composite computes, as far as angles can be
//! told in the type.
//!
//! Legend: S rows, D numbers of a head, of which pair `j` turns by `theta^(-2j/D)` for each row.

use super::draft::{Draft, Finished};
use super::element::{Digit, Element, Graph, Index, is_one, quotient};
use super::mask::Pairs;
use super::views::{sizes, views};
use crate::DType;
use crate::dim::{Dim, product};
use crate::module::ValueId;
use crate::op::{Binary, Op, Unary};
use crate::types::TensorType;

/// What two tables are: of row `s` and pair `j` the angle is `scale (s + start) theta^(-2j/D)`.
struct Turn {
    theta: f64,
    sign: f64,
    start: f64,
    scale: f64,
    gain: f64,
}

/// Tables of cosines and sines, and the index that counts their columns.
struct Tables<'e> {
    cosines: &'e Element,
    sines: &'e Element,
    columns: &'e Index,
    /// Whether the two columns of a pair are neighbours, not half a head apart.
    are_neighbours: bool,
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
        let part = d.first()?;
        let mut of_head = root.index.iter().filter(|index| {
            let [digit] = &index[..] else { return false };
            digit.variable == part.variable && is_one(&digit.stride)
        });
        let columns = of_head.next()?;
        let whole = columns.first()?;
        // The last number of a pair's index, where it is no half of the head's.
        let are_neighbours = part != whole && is_one(&part.stride) && is_two(&part.size);
        if part != whole && !are_neighbours {
            return None;
        }
        let tables = Tables { cosines: &plain[1 - at], sines, columns, are_neighbours };
        let head = match are_neighbours {
            true => {
                let pairs = quotient(&whole.size, &part.size)?;
                vec![
                    part.clone(),
                    Digit { stride: part.size.clone(), size: pairs, ..whole.clone() },
                ]
            }
            false => vec![whole.clone()],
        };
        draft(graph, root, &x, &head, &tables)
    })
}

fn is_two(size: &Dim) -> bool {
    size.as_constant() == Some(2)
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
    let half = graph.fresh(&graph.dims(low)[dim]);
    // Pairs side by side along a dim of two: the dim before counts them.
    let (columns, head) = match half.is_empty() {
        true => {
            let pairs = root.index[dim.checked_sub(1)?].clone();
            (pairs.clone(), [&whole[..], &pairs].concat())
        }
        false => (half.clone(), whole.clone()),
    };
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
    let columns = &columns;
    let tables = Tables { cosines: &cosines, sines: &sines, columns, are_neighbours: false };
    if is_same { draft(graph, root, &x, &head, &tables) } else { None }
}

/// The draft of the embedding of an element whose head is counted by digits, halves first.
fn draft<'g>(
    graph: &'g Graph<'g>,
    root: &Element,
    x: &Element,
    head: &[Digit],
    tables: &Tables<'_>,
) -> Option<Finished> {
    let dtype = graph.function.ty(root.value).dtype;
    let is_head = |digit: &Digit| head.iter().any(|h| h.variable == digit.variable);
    let others: Vec<&Index> = root.index.iter().filter(|i| !i.iter().any(is_head)).collect();
    let rows = others.iter().rev().filter(|i| !i.is_empty());
    let width = product(head.iter().map(|digit| &digit.size));
    let width = usize::try_from(width.as_constant()?).ok()?;
    let (rows, turn) = rows.into_iter().find_map(|rows| {
        let rest: Vec<Digit> = others
            .iter()
            .filter(|index| *index != rows)
            .flat_map(|index| index.iter().cloned())
            .collect();
        let values = |of: &Element| {
            let of = graph.peel(of);
            let read = rest.iter().filter(|d| of.mentions(d.variable)).cloned().collect::<Vec<_>>();
            Pairs::of(&read, rows, tables.columns)?.values(graph, &of)
        };
        let found = turn(&values(tables.cosines)?, &values(tables.sines)?, width, tables, dtype)?;
        Some(((*rows).clone(), found))
    })?;
    let lead: Vec<Digit> =
        root.digits().filter(|d| !is_head(d) && !rows.contains(d)).cloned().collect();
    let (batch, heads) = lead.split_at(lead.len().saturating_sub(1).max(lead.len().min(1)));
    let wanted = vec![batch.to_vec(), rows, heads.to_vec(), head.to_vec()];
    let mut draft = Draft::new(graph);
    let x = draft.laid(x, &wanted)?;
    let position = draft.number(turn.start, TensorType::scalar(DType::I32))?;
    let mut attributes = vec![("theta", turn.theta), ("sign", turn.sign)];
    let is_plain = turn.scale == 1.0 && turn.gain == 1.0;
    let name = if is_plain { "rope" } else { "rope_scaled" };
    if !is_plain {
        // All frequencies are stretched alike.
        let stretch = turn.scale - 1.0;
        attributes.extend([("offset", 1.0), ("by_pair", 0.0), ("by_frequency", 0.0)]);
        attributes.extend([("stretch", stretch), ("gain", turn.gain)]);
    }
    let y = draft.composite(name, &attributes, &[x, position])?[0];
    let back = views(&sizes(&wanted), &wanted, &root.index)?;
    let y = draft.views(y, back)?;
    draft.finish(name, y, root.value)
}

/// How far a number of a table may be off, in parts of one more than the angle.
fn slack(dtype: DType) -> Option<f64> {
    match dtype {
        DType::F64 => Some(1e-13),
        DType::F32 => Some(5e-7),
        DType::BF16
        | DType::F16
        | DType::F8E4M3
        | DType::F8E5M2
        | DType::I8
        | DType::I32
        | DType::I64
        | DType::U32
        | DType::Bool => None,
    }
}

/// A number with a limited count of digits.
fn rounded(x: f64, count: i32) -> f64 {
    let unit = 10_f64.powi(x.abs().log10().floor() as i32 + 1 - count);
    (x / unit).round() * unit
}

/// The turn that two tables are, where they are one; whole tables have each pair twice.
fn turn(
    cosines: &[f64],
    sines: &[f64],
    width: usize,
    tables: &Tables<'_>,
    dtype: DType,
) -> Option<Turn> {
    let columns = usize::try_from(tables.columns.first()?.size.as_constant()?).ok()?;
    let (rows, half) = (cosines.len() / columns, width / 2);
    if rows < 2 || half < 2 || !width.is_multiple_of(2) || (columns != half && columns != width) {
        return None;
    }
    let pair_of = |column: usize| match tables.are_neighbours {
        true => column / 2,
        false => column % half,
    };
    let column_of = |pair: usize| if tables.are_neighbours { 2 * pair } else { pair };
    let loose = slack(dtype)?;
    let near_one = |x: f64, far: f64| if (x - 1.0).abs() <= loose * far { 1.0 } else { x };
    let gain = near_one(cosines[0].hypot(sines[0]), 4.0);
    let angle = |row: usize, pair: usize| {
        let at = row * columns + column_of(pair);
        sines[at].atan2(cosines[at])
    };
    // By how much a pair turns from the first row to another, less than half a turn either way.
    let turned = |row: usize, pair: usize| {
        let whole = std::f64::consts::TAU;
        let by = angle(row, pair) - angle(0, pair);
        by - (by / whole).round() * whole
    };
    let sign = turned(1, 0).signum();
    let frequency = |theta: f64, pair: usize| theta.powf(-2.0 * pair as f64 / width as f64);
    let far = angle(0, 0).abs() + 16.0;
    let scales =
        [near_one(sign * turned(1, 0), far), 1.0 / rounded(1.0 / (sign * turned(1, 0)), 4)];
    scales.into_iter().find_map(|scale| {
        let raw = |row: usize, pair: usize| {
            let by = sign * turned(row, pair) / row as f64 / scale;
            by.powf(-(width as f64) / (2.0 * pair as f64))
        };
        let first = raw(1, 1);
        if !first.is_normal() {
            return None;
        }
        let last = half - 1;
        // The slowest pair tells more of theta the further it has turned.
        let is_within = (rows - 1) as f64 * scale * frequency(first, last) < 3.0;
        let best = if is_within { raw(rows - 1, last) } else { first };
        // People choose round numbers.
        let best = if best.is_normal() { best } else { first };
        let thetas = [rounded(best, 2), rounded(best, 4), rounded(first, 2), best, first];
        thetas.into_iter().filter(|theta| theta.is_finite() && *theta > 0.0).find_map(|theta| {
            let start = sign * angle(0, last) / (scale * frequency(theta, last));
            let start = start.round();
            let fits = (0.0..1e6).contains(&start)
                && (0..rows * columns).all(|at| {
                    let (row, pair) = (at / columns, pair_of(at % columns));
                    let angle = (row as f64 + start) * scale * frequency(theta, pair);
                    let most = loose * (2.0 + angle) * gain;
                    let (sin, cos) = angle.sin_cos();
                    (cosines[at] - gain * cos).abs() <= most
                        && (sines[at] - gain * sign * sin).abs() <= most
                });
            fits.then_some(Turn { theta, sign, start, scale, gain })
        })
    })
}
