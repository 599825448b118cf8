//! Views composed, cancelled and moved to where they cost nothing.

use super::{Keeps, Rule};
use crate::dim::Dim;
use crate::op::{Einsum, Op};
use crate::rewrite::pattern::Site;

type Yielded = Option<Vec<(&'static str, Op)>>;

pub(super) const RULES: &[Rule] = &[
    Rule {
        name: "drop-transpose-in-order",
        left: "(transpose#p ?x)",
        right: "?x",
        when: |site| (perm(site, "p")?.is_sorted()).then(Vec::new),
        keeps: Keeps::Bits,
        why: "nothing moves",
    },
    Rule {
        name: "compose-transposes",
        left: "(transpose#p (transpose#q ?x))",
        right: "(transpose#r ?x)",
        when: composed_transposes,
        keeps: Keeps::Bits,
        why: "two permutations are one; the next rule may then move it into a product",
    },
    Rule {
        name: "drop-reshape-to-same",
        left: "(reshape#r ?x)",
        right: "?x",
        when: |site| (site.root_type() == site.ty("x")).then(Vec::new),
        keeps: Keeps::Bits,
        why: "nothing changes",
    },
    Rule {
        name: "compose-reshapes",
        left: "(reshape#r (reshape#s ?x))",
        right: "(reshape#r ?x)",
        when: super::always,
        keeps: Keeps::Bits,
        why: "the order of elements is the same",
    },
    Rule {
        name: "drop-broadcast-along-nothing",
        left: "(broadcast#b ?x)",
        right: "?x",
        when: |site| (site.root_type() == site.ty("x")).then(Vec::new),
        keeps: Keeps::Bits,
        why: "nothing is repeated",
    },
    Rule {
        name: "compose-broadcasts",
        left: "(broadcast#b (broadcast#a ?x))",
        right: "(broadcast#c ?x)",
        when: composed_broadcasts,
        keeps: Keeps::Bits,
        why: "repeating twice is repeating once",
    },
    Rule {
        name: "drop-slice-of-whole",
        left: "(slice#s ?x)",
        right: "?x",
        when: |site| (site.root_type() == site.ty("x")).then(Vec::new),
        keeps: Keeps::Bits,
        why: "nothing is left out",
    },
    Rule {
        name: "compose-slices",
        left: "(slice#s (slice#t ?x))",
        right: "(slice#u ?x)",
        when: composed_slices,
        keeps: Keeps::Bits,
        why: "a range of a range is a range",
    },
    Rule {
        name: "drop-pad-with-nothing",
        left: "(pad#p ?x)",
        right: "?x",
        when: |site| (site.root_type() == site.ty("x")).then(Vec::new),
        keeps: Keeps::Bits,
        why: "nothing is added",
    },
    Rule {
        name: "slice-before-pad",
        left: "(slice#s (pad#p ?x))",
        right: "(slice#t ?x)",
        when: slice_inside_pad,
        keeps: Keeps::Bits,
        why: "the range holds none of the zeros",
    },
    Rule {
        name: "slice-before-broadcast",
        left: "(slice#s (broadcast#b ?x))",
        right: "(broadcast#c ?x)",
        when: slice_of_repeats,
        keeps: Keeps::Bits,
        why: "fewer repeats in the first place",
    },
    Rule {
        name: "slice-before-function",
        left: "(slice#s (unary#f ?x))",
        right: "(unary#f (slice#s ?x))",
        when: super::always,
        keeps: Keeps::Bits,
        why: "what is cut off need not be computed",
    },
    Rule {
        name: "pick-first-of-pair",
        left: "(slice#s (concat#c ?x ?y))",
        right: "(slice#t ?x)",
        when: first_of_pair,
        keeps: Keeps::Bits,
        why: "the other half is not needed",
    },
    Rule {
        name: "pick-second-of-pair",
        left: "(slice#s (concat#c ?x ?y))",
        right: "(slice#t ?y)",
        when: second_of_pair,
        keeps: Keeps::Bits,
        why: "the other half is not needed",
    },
    Rule {
        name: "join-slices-side-by-side",
        left: "(concat#c (slice#s ?x) (slice#t ?x))",
        right: "(slice#u ?x)",
        when: joined_slices,
        keeps: Keeps::Bits,
        why: "two halves are one range",
    },
    Rule {
        name: "hoist-broadcast-from-function",
        left: "(unary#f (broadcast#b ?x))",
        right: "(broadcast#b (unary#f ?x))",
        when: super::always,
        keeps: Keeps::Bits,
        why: "the function of fewer elements",
    },
    Rule {
        name: "hoist-broadcast-from-pair",
        left: "(binary#f (broadcast#b ?x) (broadcast#c ?y))",
        right: "(broadcast#b (binary#f ?x ?y))",
        when: |site| (site.op("b") == site.op("c")).then(Vec::new),
        keeps: Keeps::Bits,
        why: "the function of fewer elements",
    },
    Rule {
        name: "hoist-broadcast-from-constant",
        left: "(binary#f (broadcast#b ?x) ?c)",
        right: "(broadcast#b (binary#f ?x #c))",
        when: constant_like_x,
        keeps: Keeps::Bits,
        why: "the function of fewer elements",
    },
    Rule {
        name: "hoist-broadcast-from-constant-on-left",
        left: "(binary#f ?c (broadcast#b ?x))",
        right: "(broadcast#b (binary#f #c ?x))",
        when: constant_like_x,
        keeps: Keeps::Bits,
        why: "the function of fewer elements",
    },
    Rule {
        name: "hoist-transpose-from-function",
        left: "(unary#f (transpose#p ?x))",
        right: "(transpose#p (unary#f ?x))",
        when: super::always,
        keeps: Keeps::Bits,
        why: "towards a product or another transpose that takes it up",
    },
    Rule {
        name: "hoist-transpose-from-pair",
        left: "(binary#f (transpose#p ?x) (transpose#q ?y))",
        right: "(transpose#p (binary#f ?x ?y))",
        when: |site| (site.op("p") == site.op("q")).then(Vec::new),
        keeps: Keeps::Bits,
        why: "one transpose in place of two",
    },
    Rule {
        name: "hoist-transpose-from-constant",
        left: "(binary#f (transpose#p ?x) ?c)",
        right: "(transpose#p (binary#f ?x #c))",
        when: constant_like_x,
        keeps: Keeps::Bits,
        why: "towards a product or another transpose that takes it up",
    },
    Rule {
        name: "read-product-operand-transposed",
        left: "(contract#e (transpose#p ?x) ?y)",
        right: "(contract#f ?x ?y)",
        when: transposed_operand,
        keeps: Keeps::Rounding,
        why: "a product reads its operands in any order of dims",
    },
    Rule {
        name: "write-product-transposed",
        left: "(transpose#p (contract#e ?x ?y))",
        right: "(contract#f ?x ?y)",
        when: transposed_result,
        keeps: Keeps::Rounding,
        why: "a product writes its result in any order of dims",
    },
    Rule {
        name: "drop-gather-in-order",
        left: "(gather#g ?x ?i)",
        right: "?x",
        when: gathers_in_order,
        keeps: Keeps::Bits,
        why: "every slice is picked once, in its place",
    },
    Rule {
        name: "drop-reduction-over-nothing",
        left: "(reduce#r ?x)",
        right: "?x",
        when: |site| (site.root_type() == site.ty("x")).then(Vec::new),
        keeps: Keeps::Rounding,
        why: "each element alone is its sum",
    },
    Rule {
        name: "join-reductions",
        left: "(reduce#r (reduce#s ?x))",
        right: "(reduce#t ?x)",
        when: joined_reductions,
        keeps: Keeps::Rounding,
        why: "one pass over the elements in place of two",
    },
];

fn perm<'s>(site: &'s Site<'_>, slot: &str) -> Option<&'s [usize]> {
    let Op::Transpose { perm } = site.op(slot) else { return None };
    Some(perm)
}

fn composed_transposes(site: &Site<'_>) -> Yielded {
    let (outer, inner) = (perm(site, "p")?, perm(site, "q")?);
    Some(vec![("r", Op::Transpose { perm: outer.iter().map(|at| inner[*at]).collect() })])
}

/// The dims that are new to the first operand among those of the last result.
fn composed_broadcasts(site: &Site<'_>) -> Yielded {
    let Op::Broadcast { new: outer, dims } = site.op("b") else { return None };
    let Op::Broadcast { new: inner, .. } = site.op("a") else { return None };
    let kept = (0..dims.len()).filter(|at| !outer.contains(at));
    let also = kept.enumerate().filter(|(at, _)| inner.contains(at)).map(|(_, outer)| outer);
    let mut new: Vec<usize> = outer.iter().copied().chain(also).collect();
    new.sort_unstable();
    Some(vec![("c", Op::Broadcast { new, dims: dims.clone() })])
}

fn composed_slices(site: &Site<'_>) -> Yielded {
    let Op::Slice { dim, start, size } = site.op("s") else { return None };
    let Op::Slice { dim: inner, start: first, .. } = site.op("t") else { return None };
    let start = start + first;
    (dim == inner).then(|| vec![("u", Op::Slice { dim: *dim, start, size: *size })])
}

fn slice_inside_pad(site: &Site<'_>) -> Yielded {
    let Op::Slice { dim, start, size } = site.op("s") else { return None };
    let Op::Pad { dim: padded, before, .. } = site.op("p") else { return None };
    let whole = site.ty("x").dims.get(*padded)?.as_constant()? as usize;
    let is_inside = dim == padded && start >= before && start + size <= before + whole;
    is_inside.then(|| vec![("t", Op::Slice { dim: *dim, start: start - before, size: *size })])
}

fn slice_of_repeats(site: &Site<'_>) -> Yielded {
    let Op::Slice { dim, size, .. } = site.op("s") else { return None };
    let Op::Broadcast { new, dims } = site.op("b") else { return None };
    let mut dims = dims.clone();
    dims[*dim] = Dim::from(*size);
    new.contains(dim).then(|| vec![("c", Op::Broadcast { new: new.clone(), dims })])
}

/// The slice of the one operand of a pair in which a range lies.
fn of_pair(site: &Site<'_>, which: &str) -> Yielded {
    let Op::Slice { dim, start, size } = site.op("s") else { return None };
    let Op::Concat { dim: along } = site.op("c") else { return None };
    if dim != along {
        return None;
    }
    let size_of = |name| Some(site.ty(name).dims[*dim].as_constant()? as usize);
    let (first, second) = (size_of("x")?, size_of("y")?);
    let (from, to) = if which == "x" { (0, first) } else { (first, first + second) };
    let is_inside = *start >= from && start + size <= to;
    is_inside.then(|| vec![("t", Op::Slice { dim: *dim, start: start - from, size: *size })])
}

fn first_of_pair(site: &Site<'_>) -> Yielded {
    of_pair(site, "x")
}

fn second_of_pair(site: &Site<'_>) -> Yielded {
    of_pair(site, "y")
}

fn joined_slices(site: &Site<'_>) -> Yielded {
    let Op::Concat { dim } = site.op("c") else { return None };
    let Op::Slice { dim: a, start, size } = site.op("s") else { return None };
    let Op::Slice { dim: b, start: next, size: more } = site.op("t") else { return None };
    let fits = a == dim && b == dim && start + size == *next;
    fits.then(|| vec![("u", Op::Slice { dim: *dim, start: *start, size: size + more })])
}

/// The constant with the type of what is not repeated or moved yet.
fn constant_like_x(site: &Site<'_>) -> Yielded {
    let value = site.fact("c").constant?;
    let ty = site.ty("x");
    Some(vec![("c", Op::Constant { value, dtype: ty.dtype, dims: ty.dims.clone() })])
}

fn transposed_operand(site: &Site<'_>) -> Yielded {
    let Op::Contract(einsum) = site.op("e") else { return None };
    let perm = perm(site, "p")?;
    // Dim `i` of the operand that is read is dim `perm[i]` of what is transposed.
    let mut a = einsum.a.clone();
    for (at, from) in perm.iter().enumerate() {
        a[*from] = einsum.a[at];
    }
    Some(vec![("f", Op::Contract(Einsum { a, ..einsum.clone() }))])
}

fn transposed_result(site: &Site<'_>) -> Yielded {
    let Op::Contract(einsum) = site.op("e") else { return None };
    let result = perm(site, "p")?.iter().map(|at| einsum.result[*at]).collect();
    Some(vec![("f", Op::Contract(Einsum { result, ..einsum.clone() }))])
}

/// Whether the ids count up along their only dim, from the table's first slice to its last.
fn gathers_in_order(site: &Site<'_>) -> Yielded {
    let Op::Gather { dim, start: first } = site.op("g") else { return None };
    let ids = site.ty("i");
    let counts_up = |op: &Op| matches!(op, Op::Iota { start, .. } if start == first);
    let is_whole = ids.ndim() == 1 && ids.dims[0] == site.ty("x").dims[*dim];
    (is_whole && site.ops_of("i").any(counts_up)).then(Vec::new)
}

fn joined_reductions(site: &Site<'_>) -> Yielded {
    let Op::Reduce { combiner, dims: outer } = site.op("r") else { return None };
    let Op::Reduce { combiner: inner_combiner, dims: inner } = site.op("s") else { return None };
    if combiner != inner_combiner {
        return None;
    }
    let ndim = outer.len() + inner.len() + site.root_type().ndim();
    let kept: Vec<usize> = (0..ndim).filter(|at| !inner.contains(at)).collect();
    let mut dims: Vec<usize> = inner.clone();
    dims.extend(outer.iter().map(|at| kept[*at]));
    dims.sort_unstable();
    Some(vec![("t", Op::Reduce { combiner: *combiner, dims })])
}
