//! Gradients that nobody reads: the companion of a layer yields one for each of its parameters,
//! whether a caller has a use for it or not. The gradient of an attention's bias costs about half
//! of what the other three take, and a mask of padding has none.

use std::collections::BTreeMap;

use crate::build::Builder;
use crate::call_graph::CallGraph;
use crate::library::templates;
use crate::module::{Function, Kind, Module};
use crate::op::Op;
use crate::pass::remove_dead_nodes;

/// Makes zeros of the gradients that companions yield and no caller reads, and drops the optional
/// results of gradient composites that nothing reads then. Where no composite has such a result,
/// nothing changes.
///
/// Callers come after what they call, so that one sweep from the last function on sees all reads.
pub(super) fn drop_unused_gradients(module: &mut Module) {
    if module.functions.iter().all(|f| optional_result(f).is_none()) {
        return;
    }
    let mut read: BTreeMap<String, Vec<bool>> = BTreeMap::new();
    for at in (0..module.functions.len()).rev() {
        if let Some(read) = read.get(&module.functions[at].name) {
            zero_unread(module, at, read);
        }
        let at = drop_optional_results(module, at);
        let function = &module.functions[at];
        let is_read = reads(function);
        for node in &function.nodes {
            let Some(callee) = node.callee() else { continue };
            let of =
                read.entry(callee.to_owned()).or_insert_with(|| vec![false; node.results.len()]);
            for (known, result) in of.iter_mut().zip(&node.results) {
                *known |= is_read[result.index()];
            }
        }
    }
    let calls = CallGraph::of(module);
    let is_used = |f: &Function| optional_result(f).is_none() || calls.is_called(&f.name);
    let used: Vec<bool> = module.functions.iter().map(is_used).collect();
    let mut used = used.into_iter();
    module.functions.retain(|_| used.next().unwrap_or(true));
}

/// For each value of a function, whether a node or the caller reads it.
fn reads(function: &Function) -> Vec<bool> {
    let mut read = vec![false; function.values.len()];
    let operands = function.nodes.iter().flat_map(|node| &node.operands);
    for value in operands.chain(&function.results) {
        read[value.index()] = true;
    }
    read
}

/// The attribute of an instance that asks for its last result.
fn optional_result(function: &Function) -> Option<String> {
    let Kind::Composite { name, attributes } = &function.kind else { return None };
    let definition = templates().get(name)?.definition(attributes);
    let last = &function.value(*function.results.last()?).name;
    let (_, attribute) = definition.optional_results.iter().find(|(result, _)| result == last)?;
    Some(attribute.clone())
}

/// Zeros in place of a companion's gradients that are not read, and none of what only they need.
fn zero_unread(module: &mut Module, at: usize, read: &[bool]) {
    let function = module.functions[at].clone();
    let Some(primal) = function.name.strip_suffix(".grad").and_then(|f| module.function(f)) else {
        return;
    };
    let (results, nodes) = (primal.results.len(), primal.nodes.len());
    let unread: Vec<usize> = (results..function.results.len()).filter(|at| !read[*at]).collect();
    if unread.is_empty() {
        return;
    }
    let mut results = function.results.clone();
    let forward = function.nodes.iter().take(nodes).flat_map(|node| node.results.clone());
    let forward: Vec<_> = forward.collect();
    let mut b = Builder::resume(module, function);
    for at in unread {
        let name = format!("{}.unread", b.function().value(results[at]).name);
        results[at] = b.constant_like(&name, 0.0, results[at]);
    }
    let count = results.len();
    results.extend(forward);
    let mut function = b.into_function(&results);
    remove_dead_nodes(&mut function);
    function.results.truncate(count);
    module.functions[at] = function;
}

/// Replaces calls whose optional result is not read; returns where the function is then.
fn drop_optional_results(module: &mut Module, mut at: usize) -> usize {
    let mut node_at = 0;
    while let Some(node) = module.functions[at].nodes.get(node_at) {
        node_at += 1;
        let Some(callee) = node.callee().and_then(|callee| module.function(callee)) else {
            continue;
        };
        let is_read = reads(&module.functions[at]);
        let is_unread = node.results.last().is_some_and(|last| !is_read[last.index()]);
        let Some(attribute) = optional_result(callee).filter(|_| is_unread) else { continue };
        let Kind::Composite { name, attributes } = callee.kind.clone() else { continue };
        let mut given = attributes;
        given.remove(&attribute);
        let types = callee.param_types();
        let Some(instead) = module.composite(&name, &given, &types) else { continue };
        // What is called stands before its callers.
        let place = module.functions.iter().position(|f| f.name == instead);
        if let Some(place) = place.filter(|place| *place > at) {
            let callee = module.functions.remove(place);
            module.functions.insert(at, callee);
            at += 1;
        }
        let function = &mut module.functions[at];
        let node = &mut function.nodes[node_at - 1];
        node.op = Op::Call { function: instead };
        node.results.pop();
        crate::pass::renumber_values(function);
    }
    at
}
