//! Ops on what lies in another order.

use crate::dim::Dim;
use crate::factors::{ReshapeGroup, reshape_groups};
use crate::op::{Op, Windows};
use crate::types::TensorType;

/// Dim `i` of what lies so is dim `order[i]` of what lies in the usual order.
pub(super) type Order = Vec<usize>;

/// Where a dim lies.
pub(super) fn place(order: &Order, dim: usize) -> usize {
    order.iter().position(|of| *of == dim).unwrap_or(dim)
}

/// The op on an operand that lies in an order, and how its result lies: none where the operand is
/// that already. None for ops that read the usual order only. Types are those of the usual order.
#[expect(clippy::wildcard_enum_match_arm, reason = "other ops read the usual order")]
pub(super) fn moved(
    op: &Op,
    order: &Order,
    [x, result]: [&TensorType; 2],
) -> Option<(Option<Op>, Order)> {
    let at = |dim: usize| place(order, dim);
    let places = |dims: &[usize]| {
        let mut places: Vec<usize> = dims.iter().map(|dim| at(*dim)).collect();
        places.sort_unstable();
        places
    };
    let op = match op {
        Op::Unary(_) | Op::Cast { .. } => (op.clone(), order.clone()),
        Op::Reduce { combiner, dims } => {
            (Op::Reduce { combiner: *combiner, dims: places(dims) }, without(order, dims))
        }
        Op::Prod { dims } => (Op::Prod { dims: places(dims) }, without(order, dims)),
        Op::ArgMax { dim } => (Op::ArgMax { dim: at(*dim) }, without(order, &[*dim])),
        Op::Cumulative { combiner, dim } => {
            (Op::Cumulative { combiner: *combiner, dim: at(*dim) }, order.clone())
        }
        Op::Reverse { dims } => (Op::Reverse { dims: places(dims) }, order.clone()),
        Op::Slice { dim, start, size } => {
            (Op::Slice { dim: at(*dim), start: *start, size: *size }, order.clone())
        }
        Op::Pad { dim, before, after } => {
            (Op::Pad { dim: at(*dim), before: *before, after: *after }, order.clone())
        }
        Op::Gather { dim, start } if x.ndim() == result.ndim() => {
            (Op::Gather { dim: at(*dim), start: *start }, order.clone())
        }
        Op::Window(windows) => {
            let inside = windows.dim + 1;
            let mut wider: Order =
                order.iter().map(|dim| if *dim < inside { *dim } else { dim + 1 }).collect();
            wider.insert(at(windows.dim) + 1, inside);
            (Op::Window(Windows { dim: at(windows.dim), ..*windows }), wider)
        }
        Op::Transpose { perm } => {
            return Some((None, order.iter().map(|dim| place(perm, *dim)).collect()));
        }
        Op::Reshape { .. } => {
            let order = reshaped(order, &x.dims, &result.dims)?;
            let dims = order.iter().map(|dim| result.dims[*dim].clone()).collect();
            (Op::Reshape { dims }, order)
        }
        _ => return None,
    };
    Some((Some(op.0), op.1))
}

/// How what is left lies where dims vanish.
fn without(order: &Order, dims: &[usize]) -> Order {
    let kept = order.iter().filter(|dim| !dims.contains(dim));
    kept.map(|dim| dim - dims.iter().filter(|gone| *gone < dim).count()).collect()
}

/// Of a broadcast whose result lies in an order, the places that are new, and how its operand lies.
pub(super) fn repeated(order: &Order, new: &[usize]) -> (Vec<usize>, Order) {
    let places = (0..order.len()).filter(|place| new.contains(&order[*place])).collect();
    (places, without(order, new))
}

/// How reshaped elements lie, where the dims that are split or joined lie side by side.
fn reshaped(order: &Order, x: &[Dim], result: &[Dim]) -> Option<Order> {
    let groups = groups(x, result)?;
    let one = Dim::constant(1);
    let mut lying = order.iter().copied().filter(|dim| x[*dim] != one);
    let mut to = Order::new();
    while let Some(first) = lying.next() {
        let (from, into) = groups.iter().find(|(from, _)| from.first() == Some(&first))?;
        if !from[1..].iter().all(|dim| lying.next() == Some(*dim)) {
            return None;
        }
        to.extend(into);
    }
    (to.len() == result.len()).then_some(to)
}

/// The groups, outermost first; dims of one element of the result are with those before them, or
/// with the first.
fn groups(x: &[Dim], result: &[Dim]) -> Option<Vec<ReshapeGroup>> {
    let (mut groups, has_all) = reshape_groups(x, result);
    let one = Dim::constant(1);
    for dim in (0..result.len()).filter(|dim| result[*dim] == one) {
        let before = groups.iter_mut().rev().find(|(_, into)| into[0] < dim);
        match before {
            Some((_, into)) => into.push(dim),
            None => groups.first_mut()?.1.push(dim),
        }
    }
    groups.iter_mut().for_each(|(_, into)| into.sort_unstable());
    has_all.then_some(groups)
}
