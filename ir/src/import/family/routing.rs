//! Routing: which experts a token visits.

use crate::DType;
use crate::build::Builder;
use crate::dim::Dim;
use crate::module::ValueId;
use crate::op::{Combiner, Comparison, Op};
use crate::types::TensorType;

/// The `count` largest elements of each row of the last dim, and zeros for all others. Of equal
/// ones the first count as larger.
pub(super) fn largest(b: &mut Builder<'_>, name: &str, count: usize, x: ValueId) -> ValueId {
    let mask = chosen(b, "mask", count, x);
    b.mul(name, x, mask)
}

/// Ones in the places of the `count` largest elements of each row of the last dim, and zeros in all
/// others. Nothing of it depends smoothly on `x`: it has no gradient.
pub(super) fn chosen(b: &mut Builder<'_>, name: &str, count: usize, x: ValueId) -> ValueId {
    let ty = b.ty(x).clone();
    let last = ty.ndim() - 1;
    let mut dims = ty.dims.clone();
    dims.insert(last, Dim::from(count));
    let chosen = b.push("chosen", Op::TopK { dim: last, count }, &[x]);
    let number = b.iota("number", last + 1, DType::I32, dims.clone());
    let spread = Op::Broadcast { new: vec![last + 1], dims: dims.clone() };
    let wanted = b.push("wanted", spread, &[chosen]);
    let hit = b.compare("hit", Comparison::Eq, number, wanted);
    let of_chosen = TensorType { dtype: ty.dtype, dims };
    let (yes, no) = (b.constant("yes", 1.0, of_chosen.clone()), b.constant("no", 0.0, of_chosen));
    let picks = b.push("picks", Op::Select, &[hit, yes, no]);
    b.reduce(name, Combiner::Sum, vec![last], picks)
}
