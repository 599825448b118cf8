//! Recognition: composites of the library found again among primitive ops.
//!
//! For each template, largest first, its definition is a pattern. What it is found by is read off
//! the library itself, so that a composite that is added there is recognised without a word here:
//!
//! 1. the *skeleton* of a template, an instance for sample types in which only what does not depend
//!    on sizes and attributes counts, is matched backwards from the template's first result. That
//!    binds the parameters; attributes are read off the numbers in which they stand;
//! 2. the instance for exactly these types and attributes is matched again, op by op. Only this
//!    decides, so that a call computes what the nodes did.
//!
//! Operands of commutative ops match both ways, products under any letters. Values inside must not
//! be used by anything else, but tables that only depend on positions: those are computed again.
//! Composites are found where they are written out node for node; what is written in another way
//! takes rewriting first.

mod matching;
mod skeleton;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::sync::OnceLock;

use crate::library::{read_instance, templates};
use crate::module::{Attributes, Function, Kind, Module, Node, Value, ValueId};
use crate::op::Op;
use crate::pass::{remove_dead_nodes, renumber_values};
use crate::types::TensorType;

use matching::{Matching, matches_both_ways};
use skeleton::Skeleton;

/// Replaces the nodes of composites by calls, in every function that is none itself. Returns how
/// many calls were made.
///
/// Keeps what functions compute, their parameters and results. Instances that are new stand first
/// in the module. At most quadratic in the nodes of a function for each composite in it.
pub fn recognise(module: &mut Module) -> usize {
    let there = module.functions.len();
    let mut count = 0;
    for at in 0..there {
        if matches!(module.functions[at].kind, Kind::Composite { .. }) {
            continue;
        }
        let empty = Function::new(module.functions[at].name.clone(), Kind::Layer);
        let mut function = std::mem::replace(&mut module.functions[at], empty);
        count += recognise_in(&mut function, module);
        module.functions[at] = function;
    }
    let mut made = module.functions.split_off(there);
    made.retain(|instance| module.functions.iter().any(|f| callees(f).any(|c| c == instance.name)));
    module.functions.splice(0..0, made);
    count
}

fn callees(function: &Function) -> impl Iterator<Item = &str> {
    function.nodes.iter().filter_map(|node| {
        let Op::Call { function } = &node.op else { return None };
        Some(function.as_str())
    })
}

/// The skeletons of all templates, those of most nodes first.
fn skeletons() -> &'static [Skeleton] {
    static SKELETONS: OnceLock<Vec<Skeleton>> = OnceLock::new();
    SKELETONS.get_or_init(|| {
        let mut skeletons: Vec<Skeleton> = templates().values().map(Skeleton::of).collect();
        skeletons.sort_by_key(|skeleton| Reverse(skeleton.function.nodes.len()));
        skeletons
    })
}

fn recognise_in(function: &mut Function, module: &mut Module) -> usize {
    remove_dead_nodes(function);
    let mut count = 0;
    for skeleton in skeletons() {
        let mut anchor = function.nodes.len();
        while anchor > 0 {
            anchor -= 1;
            let Some(found) = find(skeleton, function, anchor) else { continue };
            if let Some(replaced) = replace(function, anchor, &found, module) {
                *function = replaced;
                count += 1;
                anchor = anchor.min(function.nodes.len());
            }
        }
    }
    count
}

/// An instance of a composite among the nodes of a function.
struct Found {
    composite: String,
    attributes: Attributes,
    operands: Vec<ValueId>,
    /// For each result the value that it is; none for one that nothing computes.
    results: Vec<Option<ValueId>>,
}

/// The instance whose first result the node `anchor` computes.
fn find(skeleton: &Skeleton, function: &Function, anchor: usize) -> Option<Found> {
    let pattern = &skeleton.function;
    let root = pattern.results[0];
    let made_by = pattern.nodes.iter().find(|node| node.results.contains(&root))?;
    let result = *function.nodes[anchor].results.first()?;
    if !matches_both_ways(&made_by.op, &function.nodes[anchor]) {
        return None;
    }
    let outline = Matching::outline(skeleton, function);
    let mut found = None;
    outline.solve(vec![(root, result)], &mut |bound| {
        found = confirm(skeleton, function, bound, result);
        found.is_some()
    });
    found
}

/// Matches the instance of the types and attributes that an outline has bound.
fn confirm(
    skeleton: &Skeleton,
    function: &Function,
    outline: &[Option<ValueId>],
    result: ValueId,
) -> Option<Found> {
    let operands: Vec<ValueId> =
        outline[..skeleton.function.param_count].iter().copied().collect::<Option<_>>()?;
    let attributes = skeleton.attributes(function, outline)?;
    let types: Vec<TensorType> = operands.iter().map(|o| function.ty(*o).clone()).collect();
    let instance = read_instance(&skeleton.composite, &attributes, &types, "instance")?.ok()?;
    let exact = Matching::exact(&instance, function);
    let params = instance.params().zip(operands.iter().copied());
    // The root is popped first: parameters only have to agree with what follows from it.
    let pairs = params.chain([(instance.results[0], result)]).collect();
    let mut found = None;
    exact.solve(pairs, &mut |bound| {
        let bound = exact.extend(bound);
        if exact.is_closed(&bound) {
            let results = instance.results.iter().map(|r| bound[r.index()]).collect();
            let composite = skeleton.composite.clone();
            let (attributes, operands) = (attributes.clone(), operands.clone());
            found = Some(Found { composite, attributes, operands, results });
        }
        found.is_some()
    });
    found
}

/// The function with a call in place of the nodes; none when the call would need a result of its
/// own.
fn replace(
    function: &Function,
    anchor: usize,
    found: &Found,
    module: &mut Module,
) -> Option<Function> {
    let types: Vec<TensorType> = found.operands.iter().map(|o| function.ty(*o).clone()).collect();
    let callee = module.composite(&found.composite, &found.attributes, &types)?;
    let callee = module.function(&callee)?;
    let mut replaced = function.clone();
    let prefix = &function.value(function.nodes[anchor].result()).name;
    let mut results = Vec::new();
    for (inner, bound) in callee.results.iter().zip(&found.results) {
        results.push(match bound {
            Some(id) => *id,
            None => {
                let Value { name, ty } = callee.value(*inner).clone();
                let name = unique(&replaced, format!("{prefix}.{name}"));
                replaced.values.push(Value { name, ty });
                ValueId(replaced.values.len() as u32 - 1)
            }
        });
    }
    let op = Op::Call { function: callee.name.clone() };
    replaced.nodes[anchor] = Node { op, operands: found.operands.clone(), results };
    let bound: BTreeSet<ValueId> = found.results.iter().flatten().copied().collect();
    let mut at = 0;
    replaced.nodes.retain(|node| {
        at += 1;
        at - 1 == anchor || !node.results.iter().any(|r| bound.contains(r))
    });
    remove_dead_nodes(&mut replaced);
    let sorted = sort_nodes(&mut replaced);
    renumber_values(&mut replaced);
    sorted.then_some(replaced)
}

fn unique(function: &Function, name: String) -> String {
    let taken = |candidate: &String| function.find(candidate).is_some();
    let candidates = (1..).map(|count| format!("{name}.{count}"));
    std::iter::once(name.clone()).chain(candidates).find(|c| !taken(c)).unwrap_or(name)
}

/// Orders nodes so that operands are defined before they are used, else as they are; whether that
/// is possible. `O(n log n)`.
fn sort_nodes(function: &mut Function) -> bool {
    let producers = function.producers();
    let count = function.nodes.len();
    let mut waits = vec![0; count];
    let mut users = vec![Vec::new(); count];
    for (at, node) in function.nodes.iter().enumerate() {
        for producer in node.operands.iter().filter_map(|o| producers[o.index()]) {
            waits[at] += 1;
            users[producer].push(at);
        }
    }
    let free = (0..count).filter(|at| waits[*at] == 0).map(Reverse);
    let mut ready: BinaryHeap<Reverse<usize>> = free.collect();
    let mut order = Vec::with_capacity(count);
    while let Some(Reverse(at)) = ready.pop() {
        order.push(at);
        for user in &users[at] {
            waits[*user] -= 1;
            if waits[*user] == 0 {
                ready.push(Reverse(*user));
            }
        }
    }
    if order.len() < count {
        return false;
    }
    function.nodes = order.into_iter().map(|at| function.nodes[at].clone()).collect();
    true
}

#[cfg(test)]
mod tests;
