//! Recognition: composites of the library found among the terms of an e-graph.
//!
//! Each template of the library is a rule: its definition on the left, a call on the right. What it
//! is found by is read off the library itself, so that a composite that is added there is found
//! without a word here:
//!
//! 1. the *skeleton* of a template, an instance for sample types in which only what does not depend
//!    on sizes and attributes counts, is matched backwards from the template's first result. That
//!    binds the parameters; attributes are read off the numbers in which they stand;
//! 2. the instance for exactly these types and attributes is looked up in the graph, op by op. Only
//!    this decides: the first result has to be in the class that is looked at.
//!
//! A composite may have simpler forms for some attributes, such as attention without a mask: these
//! are derived from its definition by the rules, and found in the same way.
//!
//! The call is one more term of the class, so that nothing has to be decided here: whether values
//! inside are used elsewhere, and which of two composites that overlap is taken, is a matter of
//! price. Other spellings of a definition are found where rules prove them equal.

mod skeleton;

use std::cell::Cell;
use std::cmp::Reverse;
use std::sync::OnceLock;

use egg::Id;

use super::pattern::add;
use super::region::{Region, project};
use super::saturation::{Saturation, Step};
use super::term::{Graph, Term, lookup, swapped, with_plain_letters};
use crate::infer::name;
use crate::library::check::faults;
use crate::library::{Template, read_instance, templates};
use crate::module::{Attributes, Function, ValueId};
use crate::op::Op;
use crate::types::TensorType;

use skeleton::{Case, Skeleton, numbers};

/// The most pairs that the search in one class looks at: chosen, a thousand times what the largest
/// template of the library takes when nothing is tried in vain.
const STEPS_MAX: usize = 50_000;

/// The number by which every key is seen.
const UNMASKED: f64 = (1_u64 << 30) as f64;

/// What attention is when it is written without shared key heads, and without a mask, both of which
/// the rules derive from the definition; dropout whose draws have 16 bits; and rotations of samples
/// that begin at positions of their own.
const CASES: &[Case] = &[
    Case {
        composite: "attention",
        fixed: &[("group", 1.0), ("head_offset", 0.0), ("kv_offset", 0.0)],
        has_heads_alike: true,
        is_simpler: true,
    },
    Case {
        composite: "attention",
        fixed: &[
            ("group", 1.0),
            ("query_offset", UNMASKED),
            ("head_offset", 0.0),
            ("kv_offset", 0.0),
        ],
        has_heads_alike: true,
        is_simpler: true,
    },
    Case {
        composite: "attention",
        fixed: &[("query_offset", UNMASKED), ("head_offset", 0.0), ("kv_offset", 0.0)],
        has_heads_alike: false,
        is_simpler: true,
    },
    Case::with("dropout", &SHORT),
    Case::with("attention_dropout", &SHORT),
    Case::with("attention_dropout_bwd", &SHORT),
    Case::with("rope", &BY_SAMPLE),
    Case::with("rope_scaled", &BY_SAMPLE),
];

/// Draws of 16 bits.
const SHORT: [(&str, f64); 1] = [("short_draws", 1.0)];

/// A position of each sample.
const BY_SAMPLE: [(&str, f64); 1] = [("by_sample", 1.0)];

/// An instance of a composite among the terms of a graph.
pub(super) struct Found {
    composite: &'static str,
    attributes: Attributes,
    operands: Vec<Id>,
    /// For each result its class; none for one that nothing computes.
    results: Vec<Option<Id>>,
    terms: Vec<Term>,
}

/// Composites of which only who calls them means them: their gradient is not that of what they
/// compute, or an attribute says what the definition does not.
const NOT_RECOGNISED: [&str; 4] = ["shut_gradient", "shut_gradient_bwd", "experts", "experts_bwd"];

/// The composites that are recognised.
fn recognisable() -> impl Iterator<Item = &'static Template> {
    templates().values().filter(|template| !NOT_RECOGNISED.contains(&template.name.as_str()))
}

/// The names of the rules: those of the composites.
pub fn names() -> impl Iterator<Item = &'static str> {
    recognisable().map(|template| template.name.as_str())
}

/// The skeletons of all templates, those of most nodes first.
fn skeletons() -> &'static [Skeleton] {
    static SKELETONS: OnceLock<Vec<Skeleton>> = OnceLock::new();
    SKELETONS.get_or_init(|| {
        let any = recognisable().map(|template| Skeleton::of(template, &Case::ANY));
        let cases = CASES.iter().map(|case| Skeleton::of(&templates()[case.composite], case));
        let mut skeletons: Vec<Skeleton> = any.chain(cases).collect();
        skeletons.sort_by_key(|skeleton| Reverse(skeleton.function.nodes.len()));
        skeletons
    })
}

/// Every instance of the composites that are selected, in a graph that is rebuilt.
pub(super) fn find(
    region: &Region,
    takes: impl Fn(&str) -> bool,
    done: &mut Saturation,
) -> Vec<Found> {
    let graph = &region.graph;
    let mut all = Vec::new();
    for skeleton in skeletons().iter().filter(|s| takes(s.composite)) {
        let root = skeleton.root();
        let candidates = graph.classes_for_op(&name(root)).into_iter().flatten();
        let mut classes: Vec<Id> = candidates.collect();
        classes.sort_unstable();
        for class in classes {
            let search = Search::new(skeleton, graph);
            all.extend(search.find(class));
            if search.steps.get() > STEPS_MAX {
                done.hit(format!("{STEPS_MAX} steps of `{}`", skeleton.composite));
            }
        }
    }
    all
}

/// Adds the call of an instance, and its results to their classes.
pub(super) fn apply(region: &mut Region, found: Found, done: &mut Saturation) {
    let Found { composite, attributes, operands, results, terms } = found;
    let graph = &mut region.graph;
    let types: Vec<TensorType> = operands.iter().map(|o| graph[*o].data.ty().clone()).collect();
    let Some(callee) = graph.analysis.module.composite(composite, &attributes, &types) else {
        return;
    };
    let Some((call, term)) = add(graph, &Op::Call { function: callee }, operands) else { return };
    let mut is_new = false;
    for (at, class) in results.iter().enumerate() {
        let projection = project(graph, call, at);
        if let Some(class) = class {
            is_new |= graph.union(*class, projection);
        }
    }
    if is_new && let Some(Some(class)) = results.first() {
        done.note(Step { rule: composite, class: *class, from: terms, to: vec![term] });
    }
}

/// For each value of the pattern what it is bound to, and the term and op that make it.
type Bound = Vec<Option<(Id, Option<(Term, Op)>)>>;

struct Search<'s> {
    skeleton: &'s Skeleton,
    graph: &'s Graph,
    producers: Vec<Option<usize>>,
    steps: Cell<usize>,
}

impl<'s> Search<'s> {
    fn new(skeleton: &'s Skeleton, graph: &'s Graph) -> Search<'s> {
        let producers = skeleton.function.producers();
        Search { skeleton, graph, producers, steps: Cell::new(0) }
    }

    /// The instance whose first result a class is.
    fn find(&self, class: Id) -> Option<Found> {
        let pattern = &self.skeleton.function;
        let mut found = None;
        let mut bound: Bound = vec![None; pattern.values.len()];
        self.extend(vec![(pattern.results[0], class)], &mut bound, &mut |bound| {
            found = self.confirm(bound, class);
            found.is_some()
        });
        found
    }

    fn extend(
        &self,
        mut pairs: Vec<(ValueId, Id)>,
        bound: &mut Bound,
        accept: &mut dyn FnMut(&Bound) -> bool,
    ) -> bool {
        let Some((value, class)) = pairs.pop() else { return accept(bound) };
        self.steps.set(self.steps.get() + 1);
        if self.steps.get() > STEPS_MAX {
            return false;
        }
        let class = self.graph.find(class);
        if let Some((there, _)) = &bound[value.index()] {
            return *there == class && self.extend(pairs, bound, accept);
        }
        let Some(wanted) = self.producers[value.index()] else {
            bound[value.index()] = Some((class, None));
            let is_found = self.extend(pairs, bound, accept);
            bound[value.index()] = None;
            return is_found;
        };
        let mut is_found = false;
        for term in &self.graph[class].nodes {
            for (op, operands) in self.forms(term) {
                if is_found || !self.fits(wanted, &op, operands.len()) {
                    continue;
                }
                let under = self.skeleton.function.nodes[wanted].operands.iter().copied();
                let pairs = pairs.iter().copied().chain(under.zip(operands)).collect();
                bound[value.index()] = Some((class, Some((term.clone(), op))));
                is_found = self.extend(pairs, bound, accept);
            }
        }
        bound[value.index()] = None;
        is_found
    }

    /// The ways to read a term: operands of a commutative op in both orders.
    fn forms(&self, term: &Term) -> Vec<(Op, Vec<Id>)> {
        let Some(op) = term.op().map(|op| self.graph.analysis.ops.get(op)) else {
            return Vec::new();
        };
        let mut forms = vec![(op.clone(), term.operands.clone())];
        if let Some(op) = swapped(op) {
            forms.push((op, term.operands.iter().rev().copied().collect()));
        }
        forms
    }

    fn fits(&self, wanted: usize, op: &Op, operands: usize) -> bool {
        let pattern = &self.skeleton.function.nodes[wanted];
        if name(&pattern.op) != name(op) || pattern.operands.len() != operands {
            return false;
        }
        let is_alike = match (&pattern.op, op) {
            (Op::Contract(_), Op::Contract(_)) => {
                with_plain_letters(&pattern.op) == with_plain_letters(op)
            }
            (Op::Reduce { combiner: a, .. }, Op::Reduce { combiner: b, .. }) => a == b,
            _ => true,
        };
        let fixed = &self.skeleton.fixed[wanted];
        let mut pairs = numbers(&pattern.op).into_iter().zip(numbers(op)).zip(fixed);
        is_alike && pairs.all(|((a, b), is_fixed)| !is_fixed || a.to_bits() == b.to_bits())
    }

    /// Looks up the instance of the types and attributes that are bound.
    fn confirm(&self, bound: &Bound, class: Id) -> Option<Found> {
        let skeleton = self.skeleton;
        let params = skeleton.function.param_count;
        let operands: Vec<Id> =
            bound[..params].iter().map(|b| Some(b.as_ref()?.0)).collect::<Option<_>>()?;
        let op = |value: ValueId| Some(&bound[value.index()].as_ref()?.1.as_ref()?.1);
        let attributes = skeleton.attributes(op)?;
        let data = |id: &Id| &self.graph[*id].data;
        if operands.iter().any(|id| data(id).is_tuple) {
            return None;
        }
        let types: Vec<TensorType> = operands.iter().map(|id| data(id).ty().clone()).collect();
        if !faults(skeleton.composite, &attributes, &types).is_empty() {
            return None;
        }
        let instance = read_instance(skeleton.composite, &attributes, &types, "instance")?.ok()?;
        let instance = skeleton.case.form(instance);
        let results = look_up(self.graph, &instance, &operands);
        let is_here = results[0].is_some_and(|there| self.graph.find(there) == class);
        let terms = bound.iter().flatten().filter_map(|(_, made)| Some(made.as_ref()?.0.clone()));
        is_here.then(|| Found {
            composite: skeleton.composite,
            attributes,
            operands,
            results,
            terms: terms.collect(),
        })
    }
}

/// The classes of an instance's results, as far as the graph has them.
fn look_up(graph: &Graph, instance: &Function, operands: &[Id]) -> Vec<Option<Id>> {
    let mut classes: Vec<Option<Id>> = operands.iter().copied().map(Some).collect();
    for node in &instance.nodes {
        let under: Option<Vec<Id>> = node.operands.iter().map(|o| classes[o.index()]).collect();
        classes.push(under.and_then(|under| lookup(graph, &node.op, &under)));
    }
    instance.results.iter().map(|r| classes[r.index()]).collect()
}

#[cfg(test)]
mod tests;
