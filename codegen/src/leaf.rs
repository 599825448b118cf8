//! Leaves: nodes cheaper to recompute in each kernel than to load.

use ir::Op;

/// Whether a node is recomputed in every fusion group that reads it.
pub fn is_leaf(op: &Op) -> bool {
    matches!(op, Op::Constant { .. } | Op::Iota { .. } | Op::Random { .. } | Op::Broadcast { .. })
}
