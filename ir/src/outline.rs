//! Outlining: subgraphs that repeat in a flat function become functions that are called.
//!
//! The opposite of inlining: an imported graph gets the layers that its exporter unrolled, so that
//! everything that is done once per function is done once for all of them.
//!
//! 1. Nodes get a label: the op and the types around it. Constants and counters belong to whoever
//!    reads them. What depends on no weight (a mask, positions) is moved to the front where that
//!    finds more.
//! 2. A run of labels that equal those one period later is a candidate; all runs are found in one
//!    sweep per period.
//! 3. Of each candidate, every rotation is tried and compared node by node: which operands come
//!    from the same place in each block, which from outside. The rotation with the fewest
//!    parameters and results wins, which for a network of layers is the layer.
//! 4. The candidate that saves most nodes is outlined, and so on until none is left. An outlined
//!    function is not searched again.
//!
//! Deliberately absent: repeats that are no runs, and those that differ in a size or constant.

use std::collections::{BTreeMap, BTreeSet};

use crate::module::{Function, Kind, Module, Node, Value, ValueId};
use crate::op::Op;
use crate::pass::{remove_dead_nodes, renumber_values};
use crate::types::TensorType;

/// Nodes of the shortest block that is worth a function. Chosen: the projections of queries, keys
/// and values, which belong side by side so that they can be merged, are shorter.
const NODES_MIN: usize = 6;
/// The longest period that is looked for. Chosen: several times the layer of any model that
/// exporters write, which is at most some hundred nodes.
const PERIOD_MAX: usize = 2048;
/// Candidates of one sweep that are compared node by node, those that save most first. Counted, so
/// that the same input gives the same functions.
const CANDIDATES_MAX: usize = 256;

/// Outlines what repeats in a function whose first `weights` parameters are weights. Returns the
/// names of the functions that it made; each is called at least twice.
///
/// Keeps what the function computes, its parameters and results. The new functions stand before it.
/// `O(nodes · period)` for the sweep, at most `PERIOD_MAX` periods.
///
/// # Panics
/// When the module has no such function.
pub fn outline(module: &mut Module, function: &str, weights: usize) -> Vec<String> {
    let at = module.functions.iter().position(|f| f.name == function);
    let at = at.unwrap_or_else(|| panic!("the module has a function `@{function}`"));
    let mut flat = module.functions.remove(at);
    remove_dead_nodes(&mut flat);
    let apart = [split(&flat, flat.values.len()), split(&flat, weights)];
    let saved = |(_, sequence): &(_, Vec<usize>)| {
        best(&flat, sequence, module).map_or(0, |blocks| blocks.saved())
    };
    let [all, weighing] = &apart;
    let (front, mut sequence) = if saved(weighing) > saved(all) { weighing } else { all }.clone();
    let mut made = Vec::new();
    while let Some(blocks) = best(&flat, &sequence, module) {
        let name = free_name(module, &flat.name, &made);
        let block = blocks.function(&flat, &name);
        module.functions.insert(at + made.len(), block);
        blocks.replace(&mut flat, &mut sequence, &name);
        made.push(name);
    }
    if !made.is_empty() {
        let order = front.into_iter().chain(sequence);
        let nodes = std::mem::take(&mut flat.nodes);
        let mut nodes: Vec<Option<Node>> = nodes.into_iter().map(Some).collect();
        flat.nodes = order.filter_map(|node| nodes[node].take()).collect();
        remove_unread(&mut flat);
    }
    module.functions.insert(at + made.len(), flat);
    made
}

/// Constants and counters that only outlined nodes read are made again inside.
fn remove_unread(function: &mut Function) {
    let read: BTreeSet<ValueId> = function.nodes.iter().flat_map(|n| n.operands.clone()).collect();
    let results = function.results.clone();
    let is_read = |id: &ValueId| read.contains(id) || results.contains(id);
    function.nodes.retain(|node| !is_leaf(&node.op) || node.results.iter().any(is_read));
    renumber_values(function);
}

fn free_name(module: &Module, of: &str, made: &[String]) -> String {
    let mut count = made.len();
    loop {
        let name = if count == 0 { format!("{of}.block") } else { format!("{of}.block{count}") };
        if module.function(&name).is_none() && !made.contains(&name) {
            return name;
        }
        count += 1;
    }
}

/// Whether a node is made again wherever it is read.
fn is_leaf(op: &Op) -> bool {
    matches!(op, Op::Constant { .. } | Op::Iota { .. })
}

/// The nodes that stand in front, and the others, in which repeats are looked for: those that
/// depend on one of the first `weights` values, but leaves.
fn split(function: &Function, weights: usize) -> (Vec<usize>, Vec<usize>) {
    let mut weighs = vec![false; function.values.len()];
    weighs[..weights.min(function.values.len())].fill(true);
    let mut stays = Vec::new();
    for node in &function.nodes {
        let depends = node.operands.iter().any(|o| weighs[o.index()]);
        node.results.iter().for_each(|r| weighs[r.index()] |= depends);
        stays.push(depends);
    }
    (0..function.nodes.len()).partition(|at| !stays[*at])
}

/// A run of equal labels: nodes `start..start + length` of the sequence equal those `period` later.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: usize,
    length: usize,
    period: usize,
}

impl Run {
    /// How many blocks there are from `start` on.
    fn count(&self, start: usize) -> usize {
        (self.start + self.length + self.period - start) / self.period
    }

    /// Nodes that calls save.
    fn saved(&self) -> usize {
        (self.count(self.start) - 1) * self.period
    }
}

/// Blocks of equal nodes, one after the other in a sequence.
struct Blocks {
    /// The index in the sequence of the first node of the first block.
    start: usize,
    period: usize,
    count: usize,
    /// For each block the values from outside, as the block reads them.
    outside: Vec<Vec<ValueId>>,
    /// Which results of a block's nodes are read outside of it: node and result.
    results: Vec<(usize, usize)>,
    /// The nodes of the first block.
    nodes: Vec<usize>,
}

/// The blocks that save most, or none.
fn best(function: &Function, sequence: &[usize], module: &Module) -> Option<Blocks> {
    let labels = labels(function, sequence, module);
    let mut runs = runs(&labels);
    runs.sort_by_key(|run| (std::cmp::Reverse(run.saved()), run.period, run.start));
    let reader = Reader::new(function, sequence);
    runs.iter().take(CANDIDATES_MAX).find_map(|run| reader.rotated(run))
}

/// A number for the op of each node and the types around it. The call of a layer is like no other
/// node: layers are not grouped.
fn labels(function: &Function, sequence: &[usize], module: &Module) -> Vec<usize> {
    let producers = function.producers();
    let mut known: BTreeMap<String, usize> = BTreeMap::new();
    let label = |at: &usize| {
        let node = &function.nodes[*at];
        let types = |ids: &[ValueId]| -> Vec<TensorType> {
            ids.iter().map(|id| function.ty(*id).clone()).collect()
        };
        let leaves: Vec<Option<&Op>> = node
            .operands
            .iter()
            .map(|o| producers[o.index()].map(|at| &function.nodes[at].op).filter(|op| is_leaf(op)))
            .collect();
        let callee = node.callee().and_then(|callee| module.function(callee));
        let layer = callee.filter(|callee| callee.kind == Kind::Layer).map(|_| *at);
        let text = (&node.op, layer, leaves, types(&node.operands), types(&node.results));
        let count = known.len();
        *known.entry(format!("{text:?}")).or_insert(count)
    };
    sequence.iter().map(label).collect()
}

/// All runs that hold at least two blocks.
fn runs(labels: &[usize]) -> Vec<Run> {
    let mut runs = Vec::new();
    for period in NODES_MIN..=(labels.len() / 2).min(PERIOD_MAX) {
        let mut length = 0;
        for at in 0..=labels.len() - period {
            if at + period < labels.len() && labels[at] == labels[at + period] {
                length += 1;
                continue;
            }
            if length >= period {
                runs.push(Run { start: at - length, length, period });
            }
            length = 0;
        }
    }
    runs
}

/// What is looked up while blocks are compared.
struct Reader<'f> {
    function: &'f Function,
    sequence: &'f [usize],
    producers: Vec<Option<usize>>,
    /// Where each node stands in the sequence.
    place: BTreeMap<usize, usize>,
    /// Where in the sequence each value is read last; beyond the end for results.
    last: Vec<Option<usize>>,
}

/// An operand as a block sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// A result of a node of the block.
    Inside(usize, usize),
    /// A value from outside, by the order in which they are read first.
    Outside(usize),
    /// A constant or counter; the label says which.
    Leaf,
}

impl<'f> Reader<'f> {
    fn new(function: &'f Function, sequence: &'f [usize]) -> Reader<'f> {
        let place: BTreeMap<usize, usize> =
            sequence.iter().enumerate().map(|(at, node)| (*node, at)).collect();
        let mut last = vec![None; function.values.len()];
        for (at, node) in sequence.iter().enumerate() {
            for operand in &function.nodes[*node].operands {
                last[operand.index()] = Some(at);
            }
        }
        for result in &function.results {
            last[result.index()] = Some(usize::MAX);
        }
        Reader { function, sequence, producers: function.producers(), place, last }
    }

    /// The rotation of a run whose blocks are equal and have the smallest interface.
    fn rotated(&self, run: &Run) -> Option<Blocks> {
        let mut found: Option<((usize, usize), Blocks)> = None;
        for start in run.start..run.start + run.period {
            let Some(blocks) = self.blocks(start, run.period, run.count(start)) else { continue };
            let interface = blocks.outside[0].len() + blocks.results.len();
            let key = (usize::MAX - blocks.saved(), interface);
            // One block less costs more than a wider interface only where there are few.
            let key = if blocks.count > 3 { (interface, key.0) } else { key };
            if found.as_ref().is_none_or(|(best, _)| key < *best) {
                found = Some((key, blocks));
            }
        }
        found.map(|(_, blocks)| blocks)
    }

    /// The longest row of equal blocks among those from `start` on.
    fn blocks(&self, start: usize, period: usize, count: usize) -> Option<Blocks> {
        let seen: Vec<(Vec<Seen>, Vec<ValueId>)> =
            (0..count).map(|block| self.seen(start + block * period, period)).collect();
        let (mut from, mut best) = (0, 0..0);
        for block in 0..count {
            if seen[block].0 != seen[from].0 {
                from = block;
            }
            if block + 1 - from > best.len() {
                best = from..block + 1;
            }
        }
        if best.len() < 2 {
            return None;
        }
        let start = start + best.start * period;
        let outside: Vec<Vec<ValueId>> = seen[best].iter().map(|(_, o)| o.clone()).collect();
        let count = outside.len();
        let mut results = BTreeSet::new();
        for block in 0..count {
            results.extend(self.escaping(start + block * period, period));
        }
        let nodes = self.sequence[start..start + period].to_vec();
        let results = results.into_iter().collect();
        Some(Blocks { start, period, count, outside, results, nodes })
    }

    /// The operands of the nodes of a block, and the values that come from outside.
    fn seen(&self, start: usize, period: usize) -> (Vec<Seen>, Vec<ValueId>) {
        let mut outside: Vec<ValueId> = Vec::new();
        let mut all = Vec::new();
        for node in &self.sequence[start..start + period] {
            for operand in &self.function.nodes[*node].operands {
                all.push(self.operand(*operand, start..start + period, &mut outside));
            }
        }
        (all, outside)
    }

    fn operand(
        &self,
        id: ValueId,
        block: std::ops::Range<usize>,
        outside: &mut Vec<ValueId>,
    ) -> Seen {
        if let Some(node) = self.producers[id.index()] {
            let producer = &self.function.nodes[node];
            if is_leaf(&producer.op) {
                return Seen::Leaf;
            }
            if let Some(at) = self.place.get(&node).filter(|at| block.contains(at)) {
                let which = producer.results.iter().position(|r| *r == id).unwrap_or(0);
                return Seen::Inside(at - block.start, which);
            }
        }
        let there = outside.iter().position(|o| *o == id);
        Seen::Outside(there.unwrap_or_else(|| {
            outside.push(id);
            outside.len() - 1
        }))
    }

    /// The results of a block's nodes that something outside of the block reads.
    fn escaping(&self, start: usize, period: usize) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        for at in 0..period {
            let node = &self.function.nodes[self.sequence[start + at]];
            for (which, result) in node.results.iter().enumerate() {
                if self.last[result.index()].is_some_and(|last| last >= start + period) {
                    found.push((at, which));
                }
            }
        }
        found
    }
}

impl Blocks {
    /// Nodes that calls save.
    fn saved(&self) -> usize {
        (self.count - 1) * self.period
    }

    /// The function of a block: the values from outside are its parameters, in the order in which
    /// they are read.
    fn function(&self, flat: &Function, name: &str) -> Function {
        let producers = flat.producers();
        let mut function = Function::new(name, Kind::Layer);
        let define = |function: &mut Function, id: ValueId| {
            function.values.push(Value::clone(flat.value(id)));
            ValueId(function.values.len() as u32 - 1)
        };
        let mut mapped: BTreeMap<ValueId, ValueId> = BTreeMap::new();
        for id in &self.outside[0] {
            mapped.insert(*id, define(&mut function, *id));
        }
        function.param_count = function.values.len();
        for at in &self.nodes {
            let node = &flat.nodes[*at];
            for operand in &node.operands {
                if !mapped.contains_key(operand)
                    && let Some(leaf) = producers[operand.index()].map(|leaf| &flat.nodes[leaf])
                {
                    let own = define(&mut function, *operand);
                    mapped.insert(*operand, own);
                    let op = leaf.op.clone();
                    function.nodes.push(Node { op, operands: Vec::new(), results: vec![own] });
                }
            }
            let operands = node.operands.iter().map(|o| mapped[o]).collect();
            let mut results = Vec::new();
            for result in &node.results {
                let own = define(&mut function, *result);
                mapped.insert(*result, own);
                results.push(own);
            }
            function.nodes.push(Node { op: node.op.clone(), operands, results });
        }
        let result = |(at, which): &(usize, usize)| flat.nodes[self.nodes[*at]].results[*which];
        function.results = self.results.iter().map(|r| mapped[&result(r)]).collect();
        function
    }

    /// Puts calls in the places of the blocks.
    fn replace(&self, flat: &mut Function, sequence: &mut Vec<usize>, name: &str) {
        let mut calls = Vec::new();
        for block in 0..self.count {
            let first = self.start + block * self.period;
            let nodes = &sequence[first..first + self.period];
            let results: Vec<ValueId> = self
                .results
                .iter()
                .map(|(at, which)| flat.nodes[nodes[*at]].results[*which])
                .collect();
            let op = Op::Call { function: name.to_owned() };
            flat.nodes.push(Node { op, operands: self.outside[block].clone(), results });
            calls.push(flat.nodes.len() - 1);
        }
        let all = self.start..self.start + self.count * self.period;
        for node in &sequence[all.clone()] {
            // What the calls define is defined once.
            flat.nodes[*node].results.clear();
            flat.nodes[*node].operands.clear();
        }
        sequence.splice(all, calls);
    }
}

#[cfg(test)]
mod tests;
