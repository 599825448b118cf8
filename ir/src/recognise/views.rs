//! Views that lay elements out as a composite wants them.

use super::element::{Digit, Index, is_one, quotient};
use crate::dim::{Dim, product};
use crate::op::Op;

/// The views that turn a value of the given dims, whose element at `index` is meant, into one of
/// dim `i` for each group `i` of digits. None where the element depends on other variables, or one
/// digit stands twice.
pub(super) fn views(dims: &[Dim], index: &[Index], wanted: &[Index]) -> Option<Vec<Op>> {
    let cuts: Vec<(usize, Dim)> = index
        .iter()
        .chain(wanted)
        .flatten()
        .flat_map(|d| [(d.variable, d.stride.clone()), (d.variable, &d.stride * &d.size)])
        .collect();
    let cut = |of: &[Index]| -> Vec<Digit> {
        of.iter().flatten().flat_map(|digit| split(digit, &cuts)).collect()
    };
    let (from, to) = (cut(index), cut(wanted));
    let is_twice = |of: &[Digit]| (1..of.len()).any(|at| of[..at].contains(&of[at]));
    if is_twice(&from) || is_twice(&to) {
        return None;
    }
    let mut ops = Vec::new();
    let mut now: Vec<Dim> = dims.to_vec();
    reshape(&mut ops, &mut now, from.iter().map(|digit| digit.size.clone()).collect());
    let kept: Vec<&Digit> = to.iter().filter(|digit| from.contains(digit)).collect();
    if kept.len() != from.len() {
        return None;
    }
    let perm: Vec<usize> =
        kept.iter().map(|k| from.iter().position(|f| f == *k)).collect::<Option<_>>()?;
    if !perm.iter().copied().eq(0..perm.len()) {
        now = perm.iter().map(|at| now[*at].clone()).collect();
        ops.push(Op::Transpose { perm });
    }
    let new: Vec<usize> = (0..to.len()).filter(|at| !from.contains(&to[*at])).collect();
    if !new.is_empty() {
        now = to.iter().map(|digit| digit.size.clone()).collect();
        ops.push(Op::Broadcast { new, dims: now.clone() });
    }
    reshape(&mut ops, &mut now, sizes(wanted));
    if matches!(ops[..], [Op::Reshape { .. }]) && now == dims {
        ops.clear();
    }
    Some(ops)
}

/// Adds a reshape, in place of one that is last.
fn reshape(ops: &mut Vec<Op>, now: &mut Vec<Dim>, dims: Vec<Dim>) {
    if *now == dims {
        return;
    }
    if let Some(Op::Reshape { .. }) = ops.last() {
        ops.pop();
    }
    ops.push(Op::Reshape { dims: dims.clone() });
    *now = dims;
}

/// The size of each group of digits.
pub(super) fn sizes(groups: &[Index]) -> Vec<Dim> {
    groups.iter().map(|group| product(group.iter().map(|digit| &digit.size))).collect()
}

/// A digit as several, at all cuts of its variable that lie in it.
pub(super) fn split(digit: &Digit, cuts: &[(usize, Dim)]) -> Vec<Digit> {
    let inner = |(variable, cut): &(usize, Dim)| {
        let steps = quotient(cut, &digit.stride).filter(|_| *variable == digit.variable)?;
        let rest = quotient(&digit.size, &steps)?;
        (!is_one(&steps) && !is_one(&rest)).then(|| (cut.clone(), steps, rest))
    };
    // The smallest one first, so that the next ones lie in what is left.
    let smallest = |(_, steps, _): &(Dim, Dim, Dim)| steps.as_constant().unwrap_or(i64::MAX);
    let Some((stride, steps, rest)) = cuts.iter().filter_map(inner).min_by_key(smallest) else {
        return vec![digit.clone()];
    };
    let outer = Digit { variable: digit.variable, stride, size: rest };
    let mut all = split(&outer, cuts);
    all.push(Digit { size: steps, ..digit.clone() });
    all
}
