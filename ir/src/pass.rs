//! Small passes over one function. Each says whether it changed anything.

use std::collections::{BTreeMap, BTreeSet};

use crate::class::Class;
use crate::infer::name;
use crate::module::{Function, Kind, Module, Node, ValueId};
use crate::op::Op;

/// Removes nodes whose results nobody reads. Linear.
pub fn remove_dead_nodes(function: &mut Function) -> bool {
    let mut live = vec![false; function.values.len()];
    for result in &function.results {
        live[result.index()] = true;
    }
    let mut kept = vec![false; function.nodes.len()];
    for (at, node) in function.nodes.iter().enumerate().rev() {
        if node.results.iter().any(|r| live[r.index()]) {
            kept[at] = true;
            for operand in &node.operands {
                live[operand.index()] = true;
            }
        }
    }
    if kept.iter().all(|kept| *kept) {
        return false;
    }
    let mut kept = kept.into_iter();
    function.nodes.retain(|_| kept.next().unwrap_or(true));
    renumber_values(function);
    true
}

/// Lets layers that are called yield each value once; callers read the first of equal results.
/// Whether there were others. `O(nodes)` for each such layer.
pub fn yield_once(module: &mut Module) -> bool {
    let mut firsts: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for function in module.functions.iter().filter(|function| function.kind == Kind::Layer) {
        let first = |result: &ValueId| function.results.iter().position(|other| other == result);
        let first: Vec<usize> = function.results.iter().filter_map(first).collect();
        if !first.is_sorted_by(|a, b| a < b) {
            firsts.insert(function.name.clone(), first);
        }
    }
    let called: BTreeSet<String> = module
        .functions
        .iter()
        .flat_map(|function| function.nodes.iter().filter_map(|node| node.callee()))
        .map(str::to_owned)
        .collect();
    firsts.retain(|name, _| called.contains(name));
    for function in &mut module.functions {
        let mut same: Vec<ValueId> = (0..function.values.len() as u32).map(ValueId).collect();
        let mut changed = false;
        for node in &mut function.nodes {
            node.operands.iter_mut().for_each(|operand| *operand = same[operand.index()]);
            let Some(first) = node.callee().and_then(|callee| firsts.get(callee)) else { continue };
            let all = std::mem::take(&mut node.results);
            all.iter().zip(first).for_each(|(of, first)| same[of.index()] = all[*first]);
            let is_first = |(at, _): &(usize, &ValueId)| first[*at] == *at;
            node.results = all.iter().enumerate().filter(is_first).map(|(_, of)| *of).collect();
            changed = true;
        }
        function.results.iter_mut().for_each(|result| *result = same[result.index()]);
        if firsts.contains_key(&function.name) {
            let mut seen = BTreeSet::new();
            function.results.retain(|result| seen.insert(*result));
        }
        if changed {
            renumber_values(function);
        }
    }
    !firsts.is_empty()
}

/// Lets layers take each value once, where all that call them pass one twice. Whether some did.
pub fn take_once(module: &mut Module) -> bool {
    let mut merged: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for layer in module.functions.iter().filter(|function| function.kind == Kind::Layer) {
        let nodes = || module.functions.iter().flat_map(|function| &function.nodes);
        let calls: Vec<&Node> = nodes().filter(|n| n.callee() == Some(&layer.name)).collect();
        let is_same = |a: usize, b: usize| calls.iter().all(|n| n.operands[a] == n.operands[b]);
        let first = |at: usize| (0..at).find(|before| is_same(*before, at)).unwrap_or(at);
        let first: Vec<usize> = (0..layer.param_count).map(first).collect();
        if !calls.is_empty() && !first.is_sorted_by(|a, b| a < b) {
            merged.insert(layer.name.clone(), first);
        }
    }
    for function in &mut module.functions {
        for node in &mut function.nodes {
            let Some(first) = node.callee().and_then(|name| merged.get(name)) else { continue };
            let mut at = 0..;
            node.operands.retain(|_| at.next().is_some_and(|at| first[at] == at));
        }
        let Some(first) = merged.get(&function.name) else { continue };
        let of = |id: &mut ValueId| {
            if let Some(first) = first.get(id.index()) {
                *id = ValueId(*first as u32);
            }
        };
        for node in &mut function.nodes {
            node.operands.iter_mut().for_each(of);
        }
        function.results.iter_mut().for_each(of);
        keep_params(function, first);
    }
    !merged.is_empty()
}

/// Leaves the parameters that are the first of their value.
fn keep_params(function: &mut Function, first: &[usize]) {
    let kept: Vec<usize> = (0..first.len()).filter(|at| first[*at] == *at).collect();
    let dropped = (first.len() - kept.len()) as u32;
    let place = |id: &mut ValueId| match kept.iter().position(|at| *at == id.index()) {
        Some(at) => *id = ValueId(at as u32),
        None => id.0 -= dropped,
    };
    for node in &mut function.nodes {
        node.operands.iter_mut().chain(&mut node.results).for_each(place);
    }
    function.results.iter_mut().for_each(place);
    let mut at = 0..;
    let is_kept = |at: usize| first.get(at).is_none_or(|first| *first == at);
    function.values.retain(|_| at.next().is_some_and(is_kept));
    function.param_count = kept.len();
}

/// Removes casts to the type that a value has. What made the value takes the cast's name, so that
/// results keep theirs; parameters keep their own. `O(nodes + operands)`.
pub fn remove_casts_to_same(function: &mut Function) -> bool {
    let mut same: Vec<ValueId> = (0..function.values.len()).map(|v| ValueId(v as u32)).collect();
    let count = function.nodes.len();
    for mut node in std::mem::take(&mut function.nodes) {
        node.operands.iter_mut().for_each(|operand| *operand = same[operand.index()]);
        let is_cast = matches!(node.op, Op::Cast { .. });
        if is_cast && function.ty(node.operands[0]).dtype == function.ty(node.result()).dtype {
            let (from, to) = (node.operands[0], node.result());
            same[to.index()] = from;
            if from.index() >= function.param_count {
                function.values[from.index()].name = function.value(to).name.clone();
            }
        } else {
            function.nodes.push(node);
        }
    }
    function.results.iter_mut().for_each(|result| *result = same[result.index()]);
    let changed = function.nodes.len() < count;
    if changed {
        renumber_values(function);
    }
    changed
}

/// Merges nodes that compute the same from the same operands; the first one's name stays.
/// Every op is pure, so that equal ops of equal operands have equal results. Collectives are merged
/// only where they read the very same value: of two equal ones, other ranks may hold unequal
/// pieces, and all ranks have to make as many exchanges. `O(n log n)`.
pub fn remove_common_nodes(function: &mut Function) -> bool {
    let mut seen: BTreeMap<(&'static str, Vec<ValueId>), Vec<usize>> = BTreeMap::new();
    let mut same: Vec<ValueId> = (0..function.values.len()).map(|v| ValueId(v as u32)).collect();
    let mut nodes = Vec::with_capacity(function.nodes.len());
    let count = function.nodes.len();
    for mut node in std::mem::take(&mut function.nodes) {
        let own = node.operands.clone();
        for operand in &mut node.operands {
            *operand = same[operand.index()];
        }
        let read = if node.op.class() == Class::Collective { own } else { node.operands.clone() };
        let candidates = seen.entry((name(&node.op), read)).or_default();
        let twin = candidates.iter().find(|at| {
            let twin: &crate::Node = &nodes[**at];
            is_same_op(&twin.op, &node.op)
        });
        match twin {
            Some(twin) => {
                for (from, to) in node.results.iter().zip(&nodes[*twin].results) {
                    same[from.index()] = *to;
                }
            }
            None => {
                candidates.push(nodes.len());
                nodes.push(node);
            }
        }
    }
    function.nodes = nodes;
    for result in &mut function.results {
        *result = same[result.index()];
    }
    let changed = function.nodes.len() < count;
    if changed {
        renumber_values(function);
    }
    changed
}

/// Equality, by which constants of different sign differ even when they are zero.
fn is_same_op(a: &Op, b: &Op) -> bool {
    match (a, b) {
        (Op::Constant { value: x, .. }, Op::Constant { value: y, .. }) => {
            x.to_bits() == y.to_bits() && a == b
        }
        _ => a == b,
    }
}

/// Orders the values again: parameters first, then what the nodes define, and nothing else. Linear.
///
/// # Panics
/// When a node or a result reads a value that no node defines.
pub fn renumber_values(function: &mut Function) {
    let params = function.params();
    let defined = function.nodes.iter().flat_map(|node| node.results.iter().copied());
    let order: Vec<ValueId> = params.chain(defined).collect();
    let mut place = vec![None; function.values.len()];
    for (at, id) in order.iter().enumerate() {
        place[id.index()] = Some(ValueId(at as u32));
    }
    let of = |id: &ValueId| place[id.index()].expect("every value that is read is defined");
    function.values = order.iter().map(|id| function.values[id.index()].clone()).collect();
    for node in &mut function.nodes {
        node.operands.iter_mut().chain(&mut node.results).for_each(|id| *id = of(id));
    }
    function.results.iter_mut().for_each(|id| *id = of(id));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::build::Builder;
    use crate::module::{Kind, Module};
    use crate::op::{Collective, Combiner};
    use crate::types::TensorType;

    /// Of values that are equal here, other ranks may hold unequal pieces.
    #[test]
    fn collectives_are_merged_where_they_read_one_value() {
        let mut module = Module::default();
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let x = b.param("x", TensorType::of(DType::F32, &[8]));
        let piece = Op::Slice { dim: 0, start: 0, size: 4 };
        let [y, z] = ["y", "z"].map(|name| b.push(name, piece.clone(), &[x]));
        let mut sum = |name, of| {
            let kind = Collective::AllReduce(Combiner::Sum);
            b.push(name, Op::Collective { kind, axis: "tp".into() }, &[of])
        };
        let results = [sum("a", y), sum("b", z), sum("c", z)];
        let mut function = b.into_function(&results);
        assert!(remove_common_nodes(&mut function));
        let ops: Vec<&str> = function.nodes.iter().map(|node| name(&node.op)).collect();
        assert_eq!(ops[0], "slice");
        assert_eq!(ops.len(), 3, "{ops:?}");
        let [a, b, c] = function.results[..] else { panic!("three results") };
        assert!(a != b && b == c);
    }
}
