//! Nodes that cost less than a launch reads: computed again wherever they are read.

use ir::Op;

/// Whether a node is computed again in every group that reads it.
pub fn is_leaf(op: &Op) -> bool {
    matches!(op, Op::Constant { .. } | Op::Iota { .. } | Op::Random { .. } | Op::Broadcast { .. })
}
