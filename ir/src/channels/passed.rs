//! What layers pass to one another.

use std::collections::BTreeMap;

use petgraph::unionfind::UnionFind;

use super::layer::Layer;
use super::moved::{Order, place};
use crate::module::{Function, Module, Value, ValueId};
use crate::op::Op;

/// Replaces the layers of a module. What all that yield it and all that read it want to lie in the
/// same order lies so; the rest is transposed inside of layers.
pub(super) fn pass_on(module: &mut Module, layers: Vec<(usize, Layer)>) {
    let passed = passed(module, &layers);
    for ((at, mut layer), [params, results]) in layers.into_iter().zip(passed) {
        let is_passed = params.iter().chain(&results).any(Option::is_some);
        if !is_passed && !super::convolves(&layer.function) {
            continue;
        }
        take(&mut layer.function, &params);
        for (at, order) in layer.results.iter().enumerate() {
            if let (Some(order), None) = (order, &results[at]) {
                turn_back(&mut layer.function, at, order);
            }
        }
        crate::pass::remove_dead_nodes(&mut layer.function);
        for caller in &mut module.functions {
            for node in &caller.nodes {
                if node.callee() != Some(&layer.function.name) {
                    continue;
                }
                for (result, order) in node.results.iter().zip(&results) {
                    lie(&mut caller.values[result.index()], order.as_ref());
                }
            }
        }
        module.functions[at] = layer.function;
    }
}

/// Gives a value the type of what lies in an order.
fn lie(value: &mut Value, order: Option<&Order>) {
    let Some(order) = order else { return };
    let dims = &mut value.ty.dims;
    *dims = order.iter().map(|dim| dims[*dim].clone()).collect();
}

/// Which slots of the layers are passed on in another order: of each layer, of parameters and of
/// results.
fn passed(module: &Module, layers: &[(usize, Layer)]) -> Vec<[Vec<Option<Order>>; 2]> {
    let mut first = Vec::new();
    let mut wanted: Vec<Option<Order>> = Vec::new();
    let mut numbers = BTreeMap::new();
    for (number, (_, layer)) in layers.iter().enumerate() {
        numbers.insert(layer.function.name.as_str(), number);
        first.push([wanted.len(), wanted.len() + layer.params.len()]);
        wanted.extend(layer.params.iter().chain(&layer.results).cloned());
    }
    let mut of = Slots { first, numbers, sets: UnionFind::new(wanted.len()), fixed: Vec::new() };
    for (number, (_, layer)) in layers.iter().enumerate() {
        let calls = |function: &Function| {
            function.nodes.iter().any(|node| node.callee() == Some(&layer.function.name))
        };
        if !module.functions.iter().any(calls) {
            of.fix(number);
        }
    }
    for (at, function) in module.functions.iter().enumerate() {
        of.read(function, layers.iter().any(|(layer, _)| *layer == at));
    }
    let fixed: Vec<usize> = of.fixed.iter().map(|slot| of.sets.find(*slot)).collect();
    let agreed = |slot: usize| -> Option<Order> {
        let order = wanted[slot].as_ref()?;
        let set = of.sets.find(slot);
        let agrees =
            |other: usize| of.sets.find(other) != set || wanted[other].as_ref() == Some(order);
        (!fixed.contains(&set) && (0..wanted.len()).all(agrees)).then(|| order.clone())
    };
    let of_layer = |((_, layer), [params, results]): (&(usize, Layer), &[usize; 2])| {
        [(*params, layer.params.len()), (*results, layer.results.len())]
            .map(|(first, count)| (first..first + count).map(agreed).collect())
    };
    layers.iter().zip(&of.first).map(of_layer).collect()
}

/// Parameters and results of layers, by what is passed from one to the other.
struct Slots<'m> {
    /// Of each layer, its first parameter and its first result.
    first: Vec<[usize; 2]>,
    numbers: BTreeMap<&'m str, usize>,
    sets: UnionFind<usize>,
    /// Those that lie as they did.
    fixed: Vec<usize>,
}

impl Slots<'_> {
    /// All slots of a layer lie as they did.
    fn fix(&mut self, number: usize) {
        let end = self.first.get(number + 1).map_or(self.sets.len(), |next| next[0]);
        self.fixed.extend(self.first[number][0]..end);
    }

    /// Reads what a function passes on. Inside of a layer, all lie as they did.
    fn read(&mut self, function: &Function, is_layer: bool) {
        let mut slots: Vec<Option<usize>> = vec![None; function.values.len()];
        for node in &function.nodes {
            let callee = node.callee().and_then(|name| self.numbers.get(name).copied());
            for (at, operand) in node.operands.iter().enumerate() {
                let to = callee.map(|callee| self.first[callee][0] + at);
                match (slots[operand.index()], to) {
                    (Some(from), Some(to)) => _ = self.sets.union(from, to),
                    (from, to) => self.fixed.extend(from.into_iter().chain(to)),
                }
            }
            if let Some(callee) = callee {
                for (at, result) in node.results.iter().enumerate() {
                    slots[result.index()] = Some(self.first[callee][1] + at);
                }
                if is_layer {
                    self.fix(callee);
                }
            }
        }
        let yielded = function.results.iter().filter_map(|result| slots[result.index()]);
        self.fixed.extend(yielded);
    }
}

/// Parameters come as they are read.
fn take(function: &mut Function, params: &[Option<Order>]) {
    let mut same: Vec<ValueId> = (0..function.values.len()).map(|at| ValueId(at as u32)).collect();
    for node in &mut function.nodes {
        let read = |of: &ValueId| params.get(of.index()).is_some_and(Option::is_some);
        if node.operands.first().is_some_and(read) {
            same[node.results[0].index()] = node.operands[0];
        }
        node.operands.iter_mut().for_each(|operand| *operand = same[operand.index()]);
    }
    function.results.iter_mut().for_each(|result| *result = same[result.index()]);
    for (param, order) in params.iter().enumerate() {
        lie(&mut function.values[param], order.as_ref());
    }
}

/// A result that lies in an order is yielded in the usual one.
fn turn_back(function: &mut Function, at: usize, order: &Order) {
    let lying = function.results[at];
    let perm: Vec<usize> = (0..order.len()).map(|dim| place(order, dim)).collect();
    let Value { name, ty, .. } = function.value(lying).clone();
    let mut usual = ty.clone();
    usual.dims = perm.iter().map(|dim| ty.dims[*dim].clone()).collect();
    let result = ValueId(function.values.len() as u32);
    function.values.push(Value::new(format!("{name}.usual"), usual));
    let node =
        crate::Node { op: Op::Transpose { perm }, operands: vec![lying], results: vec![result] };
    function.nodes.push(node);
    function.results[at] = result;
}
