//! Values without elements: what makes them is not launched, and what sums them is known.

use ir::op::Combiner;
use ir::{Function, Node, Op, TensorType, ValueId};

use crate::precision::range_of;

/// Makes every value without elements a constant, and every reduction or product of such what it
/// is of no terms. Says whether it changed anything.
///
/// Keeps results and their types. O(nodes).
pub(crate) fn remove_empty_nodes(function: &mut Function) -> bool {
    if !function.values.iter().any(|value| is_empty(&value.ty)) {
        return false;
    }
    let mut nodes = Vec::with_capacity(function.nodes.len());
    for node in std::mem::take(&mut function.nodes) {
        let value = if matches!(node.op, Op::Collective { .. }) {
            None
        } else if node.results.iter().all(|result| is_empty(function.ty(*result))) {
            Some(0.0)
        } else {
            of_nothing(&node, function)
        };
        match value {
            Some(value) => {
                let constants =
                    node.results.iter().map(|result| constant(*result, value, function));
                nodes.extend(constants);
            }
            None => nodes.push(node),
        }
    }
    function.nodes = nodes;
    ir::pass::remove_dead_nodes(function);
    true
}

pub(crate) fn is_empty(ty: &TensorType) -> bool {
    ty.count() == Some(0)
}

/// The number that a node without terms yields.
#[expect(clippy::wildcard_enum_match_arm, reason = "other ops of no elements yield none")]
fn of_nothing(node: &Node, function: &Function) -> Option<f64> {
    let (lowest, highest) = range_of(function.ty(node.result()).dtype);
    if !node.operands.iter().any(|operand| is_empty(function.ty(*operand))) {
        return None;
    }
    match &node.op {
        Op::Contract(_) | Op::ScaledContract { .. } | Op::Conv(_) | Op::ScatterAdd { .. } => {
            Some(0.0)
        }
        Op::Prod { .. } => Some(1.0),
        Op::Reduce { combiner: Combiner::Sum, .. } => Some(0.0),
        Op::Reduce { combiner: Combiner::Max, .. } => Some(lowest),
        Op::Reduce { combiner: Combiner::Min, .. } => Some(highest),
        _ => None,
    }
}

fn constant(result: ValueId, value: f64, function: &Function) -> Node {
    let TensorType { dtype, dims } = function.ty(result).clone();
    Node { op: Op::Constant { value, dtype, dims }, operands: Vec::new(), results: vec![result] }
}
