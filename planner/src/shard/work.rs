//! The work of a node, counted on global sizes: the currency in which options are compared.
//!
//! Elementwise nodes are fused later, so that each is charged the bytes of its result alone.

use ir::{Function, Module, Node, Op};

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
    let bytes = |ids: &[ir::ValueId]| -> f64 {
        ids.iter().map(|id| function.ty(*id).bytes().unwrap_or(0) as f64).sum()
    };
    let (read, written) = (bytes(&node.operands), bytes(&node.results));
    match &node.op {
        Op::Contract(einsum) => {
            let dims = |at: usize| function.ty(node.operands[at]).sizes().unwrap_or_default();
            let (a, b) = (dims(0), dims(1));
            let size = |letter: &char| {
                let in_a = einsum.a.iter().position(|c| c == letter).map(|at| a[at]);
                in_a.or_else(|| einsum.b.iter().position(|c| c == letter).map(|at| b[at]))
            };
            let points: f64 = einsum.letters().iter().filter_map(size).map(|s| s as f64).product();
            Work { flops: 2.0 * points, bytes: read + written }
        }
        Op::Call { function: callee } => {
            let inner = module.function(callee).map_or(0.0, |callee| {
                callee.nodes.iter().map(|n| work(n, callee, module).flops).sum()
            });
            Work { flops: inner, bytes: read + written }
        }
        Op::Reduce { .. } | Op::ScatterAdd { .. } | Op::Concat { .. } => {
            Work { flops: 0.0, bytes: read + written }
        }
        Op::Gather { .. } => Work { flops: 0.0, bytes: 2.0 * written },
        Op::Reshape { .. } | Op::FoldKey { .. } => Work::default(),
        Op::Constant { .. }
        | Op::Iota { .. }
        | Op::Random { .. }
        | Op::Unary(_)
        | Op::Binary(_)
        | Op::Compare(_)
        | Op::Select
        | Op::Cast { .. }
        | Op::Transpose { .. }
        | Op::Broadcast { .. }
        | Op::Slice { .. }
        | Op::Pad { .. }
        | Op::DynamicUpdateSlice { .. }
        | Op::DynamicSlice { .. }
        | Op::Collective { .. } => Work { flops: 0.0, bytes: written },
    }
}
