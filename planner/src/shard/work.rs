//! The work of a node, counted on global sizes: the currency in which options are compared.
//!
//! Elementwise nodes are fused later, so that each is charged the bytes of its result alone.

use ir::cost::cost;
use ir::{Class, Function, Module, Node, Op, ValueId};

/// Operations of products, and bytes that move.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    pub(super) flops: f64,
    pub(super) bytes: f64,
}

impl Work {
    /// Seconds at the given rates: whichever of the two is slower.
    pub(super) fn seconds(self, flops_per_s: f64, bytes_per_s: f64) -> f64 {
        (self.flops / flops_per_s).max(self.bytes / bytes_per_s)
    }
}

/// The work of a node of a function without open sizes.
pub(super) fn work(node: &Node, function: &Function, module: &Module) -> Work {
    let bytes = |ids: &[ValueId]| -> f64 {
        ids.iter().map(|id| function.ty(*id).bytes().unwrap_or(0) as f64).sum()
    };
    let (read, written) = (bytes(&node.operands), bytes(&node.results));
    let both = read + written;
    let (flops, bytes) = match node.op.class() {
        Class::Product => (product_flops(node, function, module), both),
        Class::Call => (called_flops(node, module), both),
        Class::Reduction | Class::Scan | Class::Join => (0.0, both),
        Class::Indexed if matches!(node.op, Op::ScatterAdd { .. }) => (0.0, both),
        Class::Indexed if matches!(node.op, Op::Gather { .. }) => (0.0, 2.0 * written),
        Class::Source if matches!(node.op, Op::FoldKey { .. }) => (0.0, 0.0),
        Class::View if matches!(node.op, Op::Reshape { .. }) => (0.0, 0.0),
        Class::Source | Class::Elementwise | Class::View | Class::Indexed | Class::Collective => {
            (0.0, written)
        }
    };
    Work { flops, bytes }
}

fn product_flops(node: &Node, function: &Function, module: &Module) -> f64 {
    let types = |ids: &[ValueId]| ids.iter().map(|id| function.ty(*id)).collect::<Vec<_>>();
    let cost = cost(&node.op, &types(&node.operands), &types(&node.results), module);
    cost.product_flops.as_constant().map_or(0.0, |flops| flops as f64)
}

fn called_flops(node: &Node, module: &Module) -> f64 {
    let callee = node.callee().and_then(|callee| module.function(callee));
    callee.map_or(0.0, |f| f.nodes.iter().map(|n| work(n, f, module).flops).sum())
}
