//! Fusion: local function → a function whose elementwise and row-reduction chains are calls of
//! kernels.
//!
//! A group is a set of nodes computed in one type over one domain `rows × cols`: values over all of
//! it, values per row (results of row reductions), and sums over rows or over everything, which
//! leave the group.
//! Constants, counters, draws and broadcasts are recomputed in every group that reads them.
//! What a product adds to its result itself, an epilogue, is in no group.
//! Groups merge along edges, then beside each other where they read the same value, or results of
//! products and calls that do, then wherever two can be one, as long as the graph of groups stays
//! free of cycles. Collectives stay in their order: each waits for the one before it, so that ranks
//! whose shards differ in size, and therefore in what fits a kernel, still make the same exchanges
//! one after the other. From this greedy choice [`crate::grouping`] searches for a cheaper one; of
//! both no two groups are left that could be one.
//! Fusing is outlining: each group becomes a function marked `kernel`.

use std::collections::{BTreeMap, BTreeSet};

use ir::rewrite::price::launch_bytes;
use ir::{Class, DType, Function, Kind, Module, Node, Op, Target, Value, ValueId};

use crate::domain::{Sites, is_int_op_exact};
use crate::epilogue::{absorbed, epilogues};
use crate::grouping::{Choice, Item, Problem, mask, ones};
use crate::leaf::is_leaf;
use crate::pool::pools;
use crate::reachability::Waits;

/// The most nodes of one group.
pub const GROUP_NODES_MAX: usize = 160;

/// Replaces fusible nodes by calls of kernels, which are added to `module`; and what is known of
/// the choice of these, none where there are too many nodes to tell.
///
/// Keeps results and their types. What a launch costs follows from the target. O(edges × groups),
/// then a search with a counted budget.
pub fn fuse(
    function: &Function,
    module: &mut Module,
    target: Option<Target>,
) -> (Function, Option<Choice>) {
    let sites = Sites::new(function);
    let mut groups = Groups::new(&sites, module);
    groups.merge_along_edges();
    groups.merge_siblings();
    groups.merge_cousins();
    groups.merge_rest();
    let choice = groups.choose(launch_bytes(target));
    (outline(&groups, module), choice)
}

/// Whether a node can be part of a kernel.
pub(crate) fn is_fusible(node: &Node, function: &Function, module: &Module) -> bool {
    match node.op.class() {
        Class::Elementwise => {
            let Op::Cast { dtype } = &node.op else { return is_int_op_exact(node, function) };
            let from = function.ty(node.operands[0]).dtype;
            // Between integers of 64 bits and numbers of binary fractions there is a kernel alone.
            match from == DType::I64 || *dtype == DType::I64 {
                true => !from.is_float() && !dtype.is_float(),
                false => dtype.is_float(),
            }
        }
        Class::Reduction => matches!(node.op, Op::Reduce { .. }),
        Class::Call => node.callee().is_some_and(|f| superinstruction(module, f).is_some()),
        Class::Source
        | Class::Product
        | Class::Scan
        | Class::View
        | Class::Join
        | Class::Indexed
        | Class::Collective => false,
    }
}

/// The composite of a call that a kernel computes with one instruction.
pub(crate) fn superinstruction<'m>(module: &'m Module, callee: &str) -> Option<&'m str> {
    let Kind::Composite { name, .. } = &module.function(callee)?.kind else { return None };
    let known = ["gelu_tanh", "gelu_tanh_bwd", "gelu_erf", "gelu_erf_bwd", "silu", "silu_bwd"];
    known.contains(&name.as_str()).then_some(name.as_str())
}

struct Groups<'f> {
    sites: &'f Sites<'f>,
    function: &'f Function,
    /// For each node, those that it reads, looking through leaves; for an exchange also the one
    /// before it.
    sources: Vec<Vec<usize>>,
    /// For each value, the nodes that read it, looking through leaves, which are none.
    readers: Vec<Vec<usize>>,
    /// For each value, whether it is a result, or read by a leaf that is one.
    is_result: Vec<bool>,
    /// For each node, its group; leaves have none of their own.
    of_node: Vec<usize>,
    /// For each group, its nodes in order. A merged group is empty.
    members: Vec<Vec<usize>>,
    waits: Waits,
    fusible: Vec<bool>,
}

impl<'f> Groups<'f> {
    fn new(sites: &'f Sites<'f>, module: &Module) -> Groups<'f> {
        let function = sites.function;
        let count = function.nodes.len();
        let mut absorbed = absorbed(function, &epilogues(function));
        absorbed.extend(pools(function).keys());
        // What fits no domain even alone is left as it is, and refused where it has no kernel.
        let fusible = |at: usize| {
            !absorbed.contains(&at)
                && is_fusible(&function.nodes[at], function, module)
                && sites.domain(&[at]).is_some()
        };
        let mut readers = vec![Vec::new(); function.values.len()];
        for (at, node) in function.nodes.iter().enumerate().filter(|(_, n)| !is_leaf(&n.op)) {
            for value in through_leaves(sites, &node.operands) {
                readers[value.index()].push(at);
            }
        }
        let mut is_result = vec![false; function.values.len()];
        for value in through_leaves(sites, &function.results) {
            is_result[value.index()] = true;
        }
        let mut sources: Vec<Vec<usize>> = (0..count).map(|at| sources(sites, at)).collect();
        chain_exchanges(function, module, &mut sources);
        Groups {
            sites,
            function,
            readers,
            is_result,
            waits: Waits::of(&sources),
            sources,
            of_node: (0..count).collect(),
            members: (0..count).map(|at| vec![at]).collect(),
            fusible: (0..count).map(fusible).collect(),
        }
    }

    fn merge_along_edges(&mut self) {
        for node in 0..self.function.nodes.len() {
            if !self.fusible[node] {
                continue;
            }
            for at in (0..self.sources[node].len()).rev() {
                let source = self.sources[node][at];
                if self.fusible[source] {
                    self.try_merge(self.of_node[source], self.of_node[node]);
                }
            }
        }
    }

    /// Merges groups that read one value, so that it is read once.
    fn merge_siblings(&mut self) {
        let mut readers: BTreeMap<ValueId, BTreeSet<usize>> = BTreeMap::new();
        for (at, node) in self.function.nodes.iter().enumerate() {
            if self.fusible[at] {
                for operand in &node.operands {
                    readers.entry(*operand).or_default().insert(at);
                }
            }
        }
        self.merge_readers(&readers);
    }

    /// Merges groups that read results of products or calls of one value, such as the biases of
    /// queries, keys and values: one launch in place of three.
    fn merge_cousins(&mut self) {
        let mut readers: BTreeMap<ValueId, BTreeSet<usize>> = BTreeMap::new();
        for at in (0..self.function.nodes.len()).filter(|at| self.fusible[*at]) {
            for source in self.sources[at].iter().filter(|source| !self.fusible[**source]) {
                for operand in &self.function.nodes[*source].operands {
                    readers.entry(*operand).or_default().insert(at);
                }
            }
        }
        self.merge_readers(&readers);
    }

    fn merge_readers(&mut self, readers: &BTreeMap<ValueId, BTreeSet<usize>>) {
        for nodes in readers.values() {
            let nodes: Vec<usize> = nodes.iter().copied().collect();
            for pair in nodes.windows(2) {
                self.try_merge(self.of_node[pair[0]], self.of_node[pair[1]]);
            }
        }
    }

    /// Merges what is left, until no two groups can be one: a launch less, and no byte more.
    fn merge_rest(&mut self) {
        // What could not be one stays so until one of the two grows.
        let mut is_new = vec![true; self.members.len()];
        while is_new.contains(&true) {
            let is_live = |group: &usize| {
                self.members[*group].first().is_some_and(|node| self.fusible[*node])
            };
            let live: Vec<usize> = (0..self.members.len()).filter(is_live).collect();
            let mut grown = vec![false; self.members.len()];
            for (at, a) in live.iter().enumerate() {
                for b in &live[at + 1..] {
                    let is_open = is_new[*a] || is_new[*b] || grown[*a] || grown[*b];
                    let is_there = !self.members[*a].is_empty() && !self.members[*b].is_empty();
                    grown[*a] |=
                        is_open && is_there && self.may_fit(*a, *b) && self.try_merge(*a, *b);
                }
            }
            is_new = grown;
        }
    }

    /// Takes the cheapest grouping that is found.
    fn choose(&mut self, launch_bytes: u64) -> Option<Choice> {
        let items = self.items();
        let problem = Problem::new(self.sites, &items, launch_bytes)?;
        let place = |node: &usize| items.binary_search_by_key(node, |item| item.node).ok();
        let group = |members: &Vec<usize>| {
            let places: Vec<usize> = members.iter().filter_map(place).collect();
            (!places.is_empty()).then(|| mask(&places))
        };
        let greedy: Vec<_> = self.members.iter().filter_map(group).collect();
        let (groups, mut choice) = problem.solve(greedy.clone());
        if groups != greedy {
            for item in &items {
                self.members[item.node].clear();
            }
            for nodes in groups.iter().map(|group| ones(*group).map(|at| items[at].node)) {
                let nodes: Vec<usize> = nodes.collect();
                nodes.iter().for_each(|node| self.of_node[*node] = nodes[0]);
                self.members[nodes[0]] = nodes.clone();
            }
            // What was not looked at may be groups that can be one, which no cheapest choice has.
            if choice.bound < choice.price() {
                self.wait_anew();
                self.merge_rest();
                let merged: Vec<_> = self.members.iter().filter_map(group).collect();
                choice.work = problem.work(&merged);
            }
        }
        Some(choice)
    }

    /// Finds anew which groups wait for which.
    fn wait_anew(&mut self) {
        self.waits = Waits::of(&self.sources);
        for nodes in &self.members {
            let Some((first, rest)) = nodes.split_first() else { continue };
            rest.iter().for_each(|node| self.waits.merge(*first, *node));
        }
    }

    /// What is grouped, in order.
    fn items(&self) -> Vec<Item> {
        let mut places: Vec<Option<usize>> = vec![None; self.members.len()];
        // For each node that is no kernel's, the items that it waits for.
        let mut waits: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); self.members.len()];
        let mut items = Vec::new();
        for at in 0..self.members.len() {
            let mut direct = BTreeSet::new();
            let mut around = BTreeSet::new();
            for source in &self.sources[at] {
                match places[*source] {
                    Some(item) => _ = direct.insert(item),
                    None => around.extend(&waits[*source]),
                }
            }
            if !self.fusible[at] {
                waits[at] = direct.into_iter().chain(around).collect();
                continue;
            }
            places[at] = Some(items.len());
            let node = &self.function.nodes[at];
            let mut reads: Vec<usize> = through_leaves(self.sites, &node.operands)
                .into_iter()
                .filter(|value| !self.is_made_by_leaf(*value))
                .map(ValueId::index)
                .collect();
            reads.sort_unstable();
            reads.dedup();
            items.push(Item {
                node: at,
                reads,
                direct: direct.into_iter().collect(),
                around: around.into_iter().collect(),
                is_kept: self.is_read(node.result(), |reader| !self.fusible[reader]),
            });
        }
        items
    }

    /// Whether a value is a result, or read by a node of some kind.
    fn is_read(&self, value: ValueId, by: impl Fn(usize) -> bool) -> bool {
        self.is_result[value.index()] || self.readers[value.index()].iter().any(|at| by(*at))
    }

    fn is_made_by_leaf(&self, value: ValueId) -> bool {
        self.sites.producers[value.index()].is_some_and(|at| is_leaf(&self.function.nodes[at].op))
    }

    /// Whether the sizes of two groups do not exclude that they share a domain.
    fn may_fit(&self, a: usize, b: usize) -> bool {
        let [a, b] = [a, b].map(|group| self.sites.widest(&self.members[group]));
        let (Some(a), Some(b)) = (a, b) else { return false };
        a.starts_with(b) || b.starts_with(a)
    }

    /// Merges two groups, if they can be one; says whether it did.
    fn try_merge(&mut self, a: usize, b: usize) -> bool {
        let is_too_large = self.members[a].len() + self.members[b].len() > GROUP_NODES_MAX;
        if a == b || is_too_large || self.waits.has_between(a, b) {
            return false;
        }
        let mut nodes: Vec<usize> =
            self.members[a].iter().chain(&self.members[b]).copied().collect();
        nodes.sort_unstable();
        if self.sites.domain(&nodes).is_none() {
            return false;
        }
        for node in &self.members[b] {
            self.of_node[*node] = a;
        }
        self.members[b].clear();
        self.members[a] = nodes;
        self.waits.merge(a, b);
        true
    }

    /// The groups that a group reads.
    fn inputs(&self, group: usize) -> BTreeSet<usize> {
        let sources = self.members[group].iter().flat_map(|node| &self.sources[*node]);
        sources.map(|node| self.of_node[*node]).filter(|g| *g != group).collect()
    }

    /// The groups in an order in which each comes after what it reads.
    fn order(&self) -> Vec<usize> {
        let live: Vec<usize> =
            (0..self.members.len()).filter(|g| !self.members[*g].is_empty()).collect();
        let mut waiting: BTreeMap<usize, BTreeSet<usize>> =
            live.iter().map(|g| (*g, self.inputs(*g))).collect();
        let mut order = Vec::new();
        while !waiting.is_empty() {
            let ready = waiting.iter().filter(|(_, inputs)| inputs.is_empty());
            let first = |g: &usize| self.members[*g].first().copied();
            let next = ready.map(|(g, _)| *g).min_by_key(first).expect("groups have no cycle");
            waiting.remove(&next);
            for inputs in waiting.values_mut() {
                inputs.remove(&next);
            }
            order.push(next);
        }
        order
    }
}

/// The nodes that a node reads, looking through leaves.
fn sources(sites: &Sites<'_>, node: usize) -> Vec<usize> {
    let Sites { function, producers, .. } = sites;
    let mut sources = Vec::new();
    let mut work: Vec<ValueId> = function.nodes[node].operands.clone();
    while let Some(value) = work.pop() {
        let Some(producer) = producers[value.index()] else { continue };
        if is_leaf(&function.nodes[producer].op) {
            work.extend(&function.nodes[producer].operands);
        } else {
            sources.push(producer);
        }
    }
    sources.sort_unstable();
    sources.dedup();
    sources
}

/// Lets each exchange wait for the one before it.
fn chain_exchanges(function: &Function, module: &Module, sources: &mut [Vec<usize>]) {
    // A call of what the module does not hold runs in pieces, each of which may exchange something.
    let exchanges = |node: &Node| match node.callee() {
        Some(callee) => module.function(callee).is_none(),
        None => node.op.class() == Class::Collective,
    };
    let all: Vec<usize> =
        (0..function.nodes.len()).filter(|at| exchanges(&function.nodes[*at])).collect();
    for pair in all.windows(2) {
        if let Err(place) = sources[pair[1]].binary_search(&pair[0]) {
            sources[pair[1]].insert(place, pair[0]);
        }
    }
}

/// Builds the fused function.
fn outline(groups: &Groups<'_>, module: &mut Module) -> Function {
    let function = groups.function;
    let mut fused = Function::new(function.name.clone(), Kind::Layer);
    let mut map: Vec<Option<ValueId>> = vec![None; function.values.len()];
    for param in function.params() {
        map[param.index()] = Some(define(&mut fused, function.value(param)));
    }
    fused.param_count = function.param_count;
    let mut kernels = 0;
    for group in groups.order() {
        let nodes = &groups.members[group];
        if groups.fusible[nodes[0]] {
            let outputs = outputs(groups, group);
            let name = format!("{}.k{kernels}", function.name);
            kernels += 1;
            let (kernel, inputs) = outline_group(groups, nodes, &outputs, &name);
            let operands: Vec<ValueId> =
                inputs.iter().map(|i| materialise(groups, &mut fused, &mut map, *i)).collect();
            let results: Vec<ValueId> =
                outputs.iter().map(|o| define(&mut fused, function.value(*o))).collect();
            for (output, result) in outputs.iter().zip(&results) {
                map[output.index()] = Some(*result);
            }
            module.add(kernel);
            fused.nodes.push(Node { op: Op::Call { function: name }, operands, results });
        } else if !is_leaf(&function.nodes[nodes[0]].op) {
            copy_node(groups, &mut fused, &mut map, nodes[0]);
        }
    }
    let results: Vec<ValueId> =
        function.results.iter().map(|r| materialise(groups, &mut fused, &mut map, *r)).collect();
    fused.results = results;
    fused
}

fn define(function: &mut Function, value: &Value) -> ValueId {
    function.values.push(value.clone());
    ValueId(function.values.len() as u32 - 1)
}

/// A value outside of kernels: leaves that something other than a kernel reads become nodes.
fn materialise(
    groups: &Groups<'_>,
    fused: &mut Function,
    map: &mut [Option<ValueId>],
    value: ValueId,
) -> ValueId {
    if let Some(there) = map[value.index()] {
        return there;
    }
    let producer = groups.sites.producers[value.index()].expect("parameters are mapped");
    copy_node(groups, fused, map, producer);
    map[value.index()].expect("its node was copied")
}

fn copy_node(groups: &Groups<'_>, fused: &mut Function, map: &mut [Option<ValueId>], at: usize) {
    let node = &groups.function.nodes[at];
    let operands: Vec<ValueId> =
        node.operands.iter().map(|o| materialise(groups, fused, map, *o)).collect();
    let results: Vec<ValueId> =
        node.results.iter().map(|r| define(fused, groups.function.value(*r))).collect();
    for (old, new) in node.results.iter().zip(&results) {
        map[old.index()] = Some(*new);
    }
    fused.nodes.push(Node { op: node.op.clone(), operands, results });
}

/// The values of a group that something outside reads.
fn outputs(groups: &Groups<'_>, group: usize) -> Vec<ValueId> {
    let results = groups.members[group].iter().map(|at| groups.function.nodes[*at].result());
    // A leaf inside of which only this group looks does not make its operand leave.
    let is_outside = |reader: usize| groups.of_node[reader] != group;
    results.filter(|value| groups.is_read(*value, is_outside)).collect()
}

/// The operands, and what leaves among them read.
fn through_leaves(sites: &Sites<'_>, operands: &[ValueId]) -> Vec<ValueId> {
    let mut found = Vec::new();
    let mut work = operands.to_vec();
    while let Some(value) = work.pop() {
        found.push(value);
        if let Some(at) = sites.producers[value.index()]
            && is_leaf(&sites.function.nodes[at].op)
        {
            work.extend(&sites.function.nodes[at].operands);
        }
    }
    found
}

/// The kernel function of a group, and the outer values that its parameters stand for.
fn outline_group(
    groups: &Groups<'_>,
    nodes: &[usize],
    outputs: &[ValueId],
    name: &str,
) -> (Function, Vec<ValueId>) {
    let function = groups.function;
    let mut kernel = Function::new(name, Kind::Kernel);
    let inside: BTreeSet<usize> = nodes.iter().copied().collect();
    let mut inputs: Vec<ValueId> = Vec::new();
    let mut leaves: BTreeSet<usize> = BTreeSet::new();
    let mut work: Vec<ValueId> =
        nodes.iter().flat_map(|at| function.nodes[*at].operands.iter().copied()).collect();
    work.reverse();
    while let Some(value) = work.pop() {
        match groups.sites.producers[value.index()] {
            Some(at) if inside.contains(&at) => {}
            Some(at) if is_leaf(&function.nodes[at].op) => {
                if leaves.insert(at) {
                    work.extend(&function.nodes[at].operands);
                }
            }
            _ if inputs.contains(&value) => {}
            _ => inputs.push(value),
        }
    }
    let mut map = BTreeMap::new();
    for input in &inputs {
        map.insert(*input, define(&mut kernel, function.value(*input)));
    }
    kernel.param_count = inputs.len();
    let mut all: Vec<usize> = inside.iter().chain(&leaves).copied().collect();
    all.sort_unstable();
    for at in all {
        let node = &function.nodes[at];
        let operands = node.operands.iter().map(|o| map[o]).collect();
        let result = define(&mut kernel, function.value(node.result()));
        map.insert(node.result(), result);
        kernel.nodes.push(Node { op: node.op.clone(), operands, results: vec![result] });
    }
    kernel.results = outputs.iter().map(|o| map[o]).collect();
    (kernel, inputs)
}
