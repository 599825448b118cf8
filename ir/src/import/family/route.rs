//! Routing: which experts a token visits, and how much each of them counts.

use crate::DType;
use crate::build::Builder;
use crate::dim::Dim;
use crate::module::ValueId;
use crate::op::{Combiner, Comparison, Op};
use crate::types::TensorType;

/// Of the shares of each token `[B, S, E]` the `count` largest, divided by their sum; all others
/// are zero. Of equal shares those of the first experts count as larger.
pub(super) fn route(b: &mut Builder<'_>, name: &str, count: usize, shares: ValueId) -> ValueId {
    let of_all = b.ty(shares).clone();
    let mut of_chosen = of_all.dims.clone();
    of_chosen.insert(2, Dim::from(count));
    let chosen = b.push("chosen", Op::TopK { dim: 2, count }, &[shares]);
    let expert = b.iota("expert", 3, DType::I32, of_chosen.clone());
    let spread = Op::Broadcast { new: vec![3], dims: of_chosen.clone() };
    let wanted = b.push("wanted", spread, &[chosen]);
    let hit = b.compare("hit", Comparison::Eq, expert, wanted);
    let kept = TensorType { dtype: of_all.dtype, dims: of_chosen };
    let (yes, no) = (b.constant("yes", 1.0, kept.clone()), b.constant("no", 0.0, kept));
    let picks = b.push("picks", Op::Select, &[hit, yes, no]);
    let mask = b.reduce("mask", Combiner::Sum, vec![2], picks);
    let largest = b.mul("largest", shares, mask);
    let sum = b.reduce("largest_sum", Combiner::Sum, vec![2], largest);
    let total = Op::Broadcast { new: vec![2], dims: of_all.dims };
    let total = b.push("largest_total", total, &[sum]);
    b.binary(name, crate::op::Binary::Div, largest, total)
}
