//! Factors: an op on pieces, put together again, is the op on the whole; and an op on terms, where
//! it is linear in them, is a sum of terms.

use std::collections::{BTreeMap, BTreeSet};

use gantline_ir::build::Builder;
use gantline_ir::dim::Bindings;
use gantline_ir::eval::{eval, eval_op};
use gantline_ir::factors::{Factor, factors, make_local, term_ways};
use gantline_ir::op::Combiner;
use gantline_ir::sharding::{Layout, pieces};
use gantline_ir::{Dim, Function, Kind, Module, Op, Tensor};

use crate::draws::{Draws, seeds};
use crate::ops::{Case, cases, kinds};

/// The largest difference: a sum in pieces is rounded in another order.
const TOLERANCE: f64 = 1e-12;

fn function_of(case: &Case) -> Function {
    let mut module = Module::new("m");
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operand = |(at, t): (usize, &Tensor)| b.param(&format!("x{at}"), t.ty());
    let operands: Vec<_> = case.operands.iter().enumerate().map(operand).collect();
    let results = b.push_all("y", case.op.clone(), &operands);
    b.into_function(&results)
}

fn eval_one(op: Op, operands: &[&Tensor]) -> Tensor {
    eval_op(&op, operands, &Bindings::new()).unwrap_or_else(|found| panic!("{op:?}: {found}"))
}

/// A range of a dim.
fn range(x: &Tensor, dim: usize, start: usize, size: usize) -> Tensor {
    eval_one(Op::Slice { dim, start, size }, &[x])
}

/// What of a value a rank holds.
pub(crate) fn piece(x: &Tensor, layout: Layout, ranks: usize, rank: usize) -> Tensor {
    match layout {
        Layout::Cut { dim, unit } => {
            let own = pieces(x.dims[dim], unit, ranks).unwrap()[rank];
            range(x, dim, own.start, own.size)
        }
        Layout::Replicated => x.clone(),
        Layout::Partial(_) => panic!("no factor asks for a partial operand"),
    }
}

/// The whole from what the ranks hold.
pub(crate) fn whole(parts: &[Tensor], layout: Layout) -> Tensor {
    match layout {
        Layout::Cut { dim, .. } => eval_one(Op::Concat { dim }, &parts.iter().collect::<Vec<_>>()),
        Layout::Replicated => parts[0].clone(),
        Layout::Partial(combiner) => {
            let stacked: Vec<Tensor> = parts
                .iter()
                .map(|part| {
                    let dims = std::iter::once(1).chain(part.dims.iter().copied());
                    eval_one(Op::Reshape { dims: dims.map(Dim::from).collect() }, &[part])
                })
                .collect();
            let stacked = whole(&stacked, Layout::cut(0));
            eval_one(Op::Reduce { combiner, dims: vec![0] }, &[&stacked])
        }
    }
}

/// The results of every rank's part; none when a unit is left over.
fn in_parts(case: &Case, factor: &Factor, result: &Tensor, ranks: usize) -> Vec<Tensor> {
    let units = factor.units.as_constant().unwrap() as usize;
    let starts = pieces(units, 1, ranks).unwrap();
    let one = |rank: usize| {
        let local = case.operands.iter().zip(&factor.operands);
        let local: Vec<Tensor> = local.map(|(x, l)| piece(x, *l, ranks, rank)).collect();
        let dims = match factor.results[0] {
            layout @ Layout::Cut { .. } => piece(result, layout, ranks, rank).dims,
            Layout::Replicated | Layout::Partial(_) => result.dims.clone(),
        };
        let dims: Vec<Dim> = dims.into_iter().map(Dim::from).collect();
        let start = starts[rank].start as i64;
        let offsets: Vec<_> = factor.offsets.iter().map(|o| (o.clone(), start)).collect();
        let mut op = case.op.clone();
        make_local(&mut op, &dims, &offsets);
        eval_one(op, &local.iter().collect::<Vec<_>>())
    };
    (0..ranks).map(one).collect()
}

/// For each op the factors that were tried; ops without one are those that need the whole.
#[test]
fn pieces_of_every_factor_make_the_whole() {
    let mut tried = BTreeMap::new();
    for seed in seeds(60) {
        let mut r = Draws::new(seed);
        for kind in kinds() {
            if matches!(kind, Op::Call { .. } | Op::Collective { .. }) {
                continue;
            }
            for case in cases(&kind, &mut r) {
                let function = function_of(&case);
                let mut module = Module::new("m");
                module.add(function.clone());
                let result = eval(&module, "f", &case.operands).unwrap().remove(0);
                for factor in factors(&function.nodes[0], &function, &module) {
                    let units = factor.units.as_constant().unwrap() as usize;
                    let ranks = 2 + r.below(2);
                    if units < ranks {
                        continue;
                    }
                    *tried.entry(gantline_ir::infer::name(&kind)).or_insert(0) += 1;
                    let parts = in_parts(&case, &factor, &result, ranks);
                    let found = whole(&parts, factor.results[0]);
                    let off = found.max_relative_difference(&result);
                    assert!(off <= TOLERANCE, "SEED={seed} {:?} {factor:?}: off {off}", case.op);
                }
            }
        }
    }
    let without = |op: &&Op| !tried.contains_key(gantline_ir::infer::name(op));
    let untried: Vec<Op> = kinds().into_iter().filter(|op| without(&op)).collect();
    let needs_whole = |op: &Op| {
        matches!(op, Op::FoldKey { .. } | Op::Call { .. } | Op::Collective { .. })
            || matches!(op, Op::ScaledContract { .. })
    };
    if std::env::var("SEED").is_err() {
        assert!(untried.iter().all(needs_whole), "no factor was tried of {untried:?}");
    }
}

/// Random terms of a value, one for each rank.
fn terms_of(x: &Tensor, ranks: usize, r: &mut Draws) -> Vec<Tensor> {
    let mut rest = x.to_f64();
    let mut terms = Vec::new();
    for _ in 1..ranks {
        let term = r.signed(&x.dims);
        rest.iter_mut().zip(term.to_f64()).for_each(|(rest, term)| *rest -= term);
        terms.push(term);
    }
    terms.push(Tensor::f64(&x.dims, rest));
    terms
}

/// Whether the results of ranks that hold terms of the marked operands sum to the result.
fn is_sum(case: &Case, is_term: &[bool], ranks: usize, r: &mut Draws) -> bool {
    let held: Vec<Vec<Tensor>> = case
        .operands
        .iter()
        .zip(is_term)
        .map(|(x, is_term)| if *is_term { terms_of(x, ranks, r) } else { vec![x.clone(); ranks] })
        .collect();
    let of_rank = |rank: usize| {
        let operands: Vec<&Tensor> = held.iter().map(|of_ranks| &of_ranks[rank]).collect();
        eval_one(case.op.clone(), &operands)
    };
    let parts: Vec<Tensor> = (0..ranks).map(of_rank).collect();
    let result = eval_one(case.op.clone(), &case.operands.iter().collect::<Vec<_>>());
    let sum = whole(&parts, Layout::Partial(Combiner::Sum));
    sum.max_relative_difference(&result) <= 1e-9
}

/// What tells ops apart that differ in whether they are linear.
fn kind_of(op: &Op) -> String {
    let name = gantline_ir::infer::name(op);
    if let Op::Reduce { combiner, .. } | Op::Cumulative { combiner, .. } = op {
        return format!("{name} {}", combiner.name());
    }
    name.to_owned()
}

/// Every set of operands is tried: an op takes terms of the largest sets in which it is linear on
/// all cases, and of no other. A cast is linear only where it does not round.
#[test]
fn ops_take_terms_where_they_are_linear() {
    // For each kind of op, how many operands it has, and the sets that were linear so far.
    let mut known: BTreeMap<String, (Op, usize, BTreeSet<Vec<bool>>)> = BTreeMap::new();
    for seed in seeds(60) {
        let mut r = Draws::new(seed);
        for kind in kinds() {
            if matches!(kind, Op::Call { .. } | Op::Collective { .. } | Op::Cast { .. }) {
                continue;
            }
            for case in cases(&kind, &mut r) {
                let is_float: Vec<bool> =
                    case.operands.iter().map(|x| x.dtype.is_float()).collect();
                let count = is_float.len();
                let sets = (1..1 << count).map(|bits: usize| -> Vec<bool> {
                    (0..count).map(|at| bits >> at & 1 == 1).collect()
                });
                let fits = |set: &Vec<bool>| set.iter().zip(&is_float).all(|(t, f)| *f || !*t);
                let yields = eval_one(case.op.clone(), &case.operands.iter().collect::<Vec<_>>());
                let all: BTreeSet<_> = sets.filter(fits).collect();
                let all = if yields.dtype.is_float() { all } else { BTreeSet::new() };
                let entry = known.entry(kind_of(&case.op));
                let (_, _, linear) = entry.or_insert((case.op.clone(), count, all));
                let ranks = 2 + r.below(3);
                linear.retain(|set| is_sum(&case, set, ranks, &mut r));
            }
        }
    }
    for (kind, (op, operands, linear)) in known {
        let is_part = |a: &[bool], b: &[bool]| a != b && a.iter().zip(b).all(|(a, b)| *b || !*a);
        let is_largest = |set: &&Vec<bool>| !linear.iter().any(|other| is_part(set, other));
        let wanted: BTreeSet<Vec<bool>> = linear.iter().filter(is_largest).cloned().collect();
        let found: BTreeSet<Vec<bool>> = term_ways(&op, operands).into_iter().collect();
        assert_eq!(found, wanted, "{kind}");
    }
}
