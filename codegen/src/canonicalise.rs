//! Reductions as fused kernels have them: of the last dims, or sums of the first ones.

use ir::{Function, Node, Op, TensorType, Value, ValueId};

use crate::domain::sums_rows;
use crate::pool::pools;

/// Transposes what is reduced along other dims, so that these come last; but no windows of pools.
///
/// Keeps results and their types; sums are added in the same order. O(nodes).
pub fn put_reduced_dims_last(function: &mut Function) {
    let pools = pools(function);
    for (at, mut node) in std::mem::take(&mut function.nodes).into_iter().enumerate() {
        let order = if let Op::Reduce { dims, .. } = &node.op
            && !pools.contains_key(&at)
        {
            order(sums_rows(function, &node), dims, function.ty(node.operands[0]).ndim())
        } else {
            None
        };
        if let Some(perm) = order {
            turn(function, &mut node, perm);
        }
        function.nodes.push(node);
    }
}

/// The dims that stay, then those that vanish; none where they already lie well.
fn order(sums_rows: bool, dims: &[usize], ndim: usize) -> Option<Vec<usize>> {
    let kept = ndim - dims.len();
    let last = dims.iter().copied().eq(kept..ndim);
    let first = sums_rows && dims.iter().copied().eq(0..dims.len());
    if last || first {
        return None;
    }
    let stay = (0..ndim).filter(|dim| !dims.contains(dim));
    Some(stay.chain(dims.iter().copied()).collect())
}

fn turn(function: &mut Function, node: &mut Node, perm: Vec<usize>) {
    let x = node.operands[0];
    let TensorType { dtype, dims } = function.ty(x).clone();
    let ty = TensorType { dtype, dims: perm.iter().map(|dim| dims[*dim].clone()).collect() };
    let name = format!("{}.turned", function.value(node.result()).name);
    let turned = ValueId(function.values.len() as u32);
    function.values.push(Value::new(name, ty));
    function.nodes.push(Node {
        op: Op::Transpose { perm },
        operands: vec![x],
        results: vec![turned],
    });
    node.operands[0] = turned;
    if let Op::Reduce { dims, .. } = &mut node.op {
        let ndim = function.ty(turned).ndim();
        *dims = (ndim - dims.len()..ndim).collect();
    }
}
