//! Large functions in pieces: what a choice takes grows with the square of the terms.
//!
//! A flat graph of thousands of nodes is cut where the fewest values cross, which in a deep model
//! is between two layers. Constants and tables that a piece reads are copied into it, so that no
//! rule misses a number.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::module::{Function, Kind, Node, Value, ValueId};

/// The most nodes of a piece. Chosen: a block of a transformer with its gradient has 300.
pub(super) const NODES_MAX: usize = 1_000;

/// The pieces of a function, in order; the function itself where it is small enough.
///
/// The parameters of a piece are what it reads of those before it, its results what is read after
/// it, all under their names.
pub(super) fn cut(function: &Function, nodes_max: usize) -> Vec<Function> {
    if function.nodes.len() <= nodes_max {
        return vec![function.clone()];
    }
    ranges(function, nodes_max).into_iter().map(|range| piece(function, range)).collect()
}

/// For each node how many values are defined up to it and read behind it; sources are not counted.
fn crossings(function: &Function) -> Vec<usize> {
    let count = function.nodes.len();
    let mut last_read = vec![None; function.values.len()];
    for (at, node) in function.nodes.iter().enumerate() {
        node.operands.iter().for_each(|o| last_read[o.index()] = Some(at));
    }
    function.results.iter().for_each(|r| last_read[r.index()] = Some(count));
    let mut change = vec![0_isize; count + 1];
    for (at, node) in function.nodes.iter().enumerate().filter(|(_, n)| !n.operands.is_empty()) {
        for last in node.results.iter().filter_map(|r| last_read[r.index()]) {
            change[at] += 1;
            change[last] -= 1;
        }
    }
    let mut open = 0;
    let mut crossing = |change: isize| {
        open += change;
        open as usize
    };
    change[..count].iter().map(|change| crossing(*change)).collect()
}

/// Each piece ends in the second half of what it may have, where the fewest values cross.
fn ranges(function: &Function, nodes_max: usize) -> Vec<Range<usize>> {
    let crossings = crossings(function);
    let mut ranges = Vec::new();
    let mut start = 0;
    while function.nodes.len() - start > nodes_max {
        let window = start + nodes_max / 2..start + nodes_max;
        let last = window.rev().min_by_key(|at| crossings[*at]).unwrap_or(start);
        ranges.push(start..last + 1);
        start = last + 1;
    }
    ranges.push(start..function.nodes.len());
    ranges
}

fn piece(function: &Function, range: Range<usize>) -> Function {
    let producers = function.producers();
    let is_source = |value: ValueId| {
        producers[value.index()].filter(|at| function.nodes[*at].operands.is_empty())
    };
    let mut inside: BTreeSet<usize> = range.clone().collect();
    let mut params = BTreeSet::new();
    for operand in range.clone().flat_map(|at| &function.nodes[at].operands) {
        match is_source(*operand) {
            Some(source) => {
                inside.insert(source);
            }
            None if producers[operand.index()].is_none_or(|at| !range.contains(&at)) => {
                params.insert(*operand);
            }
            None => {}
        }
    }
    let behind = function.nodes[range.end..].iter().flat_map(|node| &node.operands);
    let read: BTreeSet<ValueId> = behind.chain(&function.results).copied().collect();
    // Those behind have copies of sources.
    let is_handed_on = |value: ValueId| match is_source(value) {
        Some(_) => function.results.contains(&value),
        None => read.contains(&value),
    };
    let mut made = Function::new(function.name.clone(), Kind::Layer);
    let mut map: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for param in &params {
        map.insert(*param, define(&mut made, function.value(*param).clone()));
    }
    made.param_count = params.len();
    for at in inside {
        let node = &function.nodes[at];
        copy(node, function, &mut made, &mut map, |name| name);
        let outer = node.results.iter().filter(|r| range.contains(&at) && is_handed_on(**r));
        let inner: Vec<ValueId> = outer.map(|r| map[r]).collect();
        made.results.extend(inner);
    }
    made
}

/// The function made of what its pieces have become.
pub(super) fn join(function: &Function, pieces: &[Function], simpler: &[Function]) -> Function {
    let mut joined = Function::new(function.name.clone(), function.kind.clone());
    let mut known: BTreeMap<String, ValueId> = BTreeMap::new();
    for param in function.params() {
        let value = function.value(param).clone();
        known.insert(value.name.clone(), define(&mut joined, value));
    }
    joined.param_count = function.param_count;
    let mut taken: BTreeSet<String> = known.keys().cloned().collect();
    taken.extend(pieces.iter().flat_map(results_of));
    for (piece, simpler) in pieces.iter().zip(simpler) {
        let params = simpler.params().map(|p| (p, known[&simpler.value(p).name]));
        let mut map: BTreeMap<ValueId, ValueId> = params.collect();
        let names: Vec<String> = results_of(piece).collect();
        for node in &simpler.nodes {
            copy(node, simpler, &mut joined, &mut map, |name| {
                if names.contains(&name) { name } else { unique(&mut taken, name) }
            });
        }
        let handed_on = names.into_iter().zip(&simpler.results);
        known.extend(handed_on.map(|(name, result)| (name, map[result])));
    }
    joined.results = function.results.iter().map(|r| known[&function.value(*r).name]).collect();
    joined
}

/// The names of a function's results.
fn results_of(function: &Function) -> impl Iterator<Item = String> + '_ {
    function.results.iter().map(|r| function.value(*r).name.clone())
}

fn unique(taken: &mut BTreeSet<String>, name: String) -> String {
    let others = (1..).map(|count| format!("{name}.{count}"));
    let free = std::iter::once(name.clone()).chain(others).find(|name| !taken.contains(name));
    let free = free.unwrap_or(name);
    taken.insert(free.clone());
    free
}

fn define(function: &mut Function, value: Value) -> ValueId {
    function.values.push(value);
    ValueId(function.values.len() as u32 - 1)
}

/// Adds a node of one function to another.
fn copy(
    node: &Node,
    from: &Function,
    to: &mut Function,
    map: &mut BTreeMap<ValueId, ValueId>,
    mut name: impl FnMut(String) -> String,
) {
    let operands = node.operands.iter().map(|o| map[o]).collect();
    let mut results = Vec::new();
    for result in &node.results {
        let value = from.value(*result).clone();
        let made = define(to, Value::new(name(value.name), value.ty));
        map.insert(*result, made);
        results.push(made);
    }
    to.nodes.push(Node { op: node.op.clone(), operands, results });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autodiff::training_step;
    use crate::import::{Options, import, preset};
    use crate::module::Module;
    use crate::pass::remove_dead_nodes;
    use crate::verify::verify;
    use crate::{DType, inline::inline_composites};

    /// A block and its gradient as primitives, some 200 nodes, in pieces of a few.
    #[test]
    fn pieces_put_together_are_the_function() {
        let options = Options { seq: 8, dtype: DType::F32, dropout: Some(0.1), documents: false };
        let mut module = import(&preset("gpt2-mini").unwrap(), &options).unwrap().module;
        training_step(&mut module, "loss").unwrap();
        inline_composites(&mut module, |_| false);
        for at in 0..module.functions.len() {
            let mut function = module.functions[at].clone();
            remove_dead_nodes(&mut function);
            for nodes_max in [4, 7, 30, 100] {
                let pieces = cut(&function, nodes_max);
                assert!(function.nodes.len() <= nodes_max || pieces.len() > 1);
                if pieces.len() == 1 {
                    continue;
                }
                let mut joined = join(&function, &pieces, &pieces);
                crate::pass::remove_common_nodes(&mut joined);
                let mut expected = function.clone();
                crate::pass::remove_common_nodes(&mut expected);
                let mut together = module.clone();
                together.functions[at] = joined.clone();
                assert_eq!(verify(&together), [], "{joined}");
                assert_eq!(joined.to_string(), expected.to_string(), "{nodes_max}");
            }
        }
    }

    #[test]
    fn a_chain_of_layers_is_cut_between_them() {
        let mut text = "module m\n  func @f(%x0: f32[4]) {\n".to_owned();
        for layer in 0..10 {
            let next = layer + 1;
            text += &format!("    %a{layer}: f32[4] = exp %x{layer}\n");
            text += &format!("    %b{layer}: f32[4] = tanh %x{layer}\n");
            text += &format!("    %x{next}: f32[4] = add %a{layer} %b{layer}\n");
        }
        text += "    return %x10\n  }\n";
        let module: Module = crate::text::parse_module("m", &text).unwrap();
        for piece in cut(&module.functions[0], 10) {
            assert_eq!((piece.param_count, piece.results.len()), (1, 1), "{piece}");
        }
    }
}
