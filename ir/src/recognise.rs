//! Recognition by meaning: composites found in functions as exporters write them.
//!
//! The rules of [`rewrite`](crate::rewrite) find a composite where its definition stands, op for
//! op. Exporters write the same in many forms: with dims of one kept between ops, heads repeated or
//! shared, scales before or after a product, masks stored or computed, constants rounded to the
//! type. Here a composite is found from one of its ops backwards, by what is computed: elements are
//! followed through views (`element`), arithmetic is compared as polynomials (`expansion`), and
//! masks are evaluated. What replaces the value is drafted and checked (`draft`), then built.
//!
//! **Keeps** all but rounding, so that it is left out where only exact rules are selected. Each
//! composite that is called computes what stood there, with constants that are equal as far as the
//! type tells. Values that stay keep their names.
//!
//! One sweep from the results backwards, so that what a larger composite contains is not looked at.

mod element;
mod views;
mod draft;
mod expansion;
mod norm;
mod activation;
mod rope;
mod softmax;
mod mask;
mod dropout;
mod scores;
mod attention;

use std::collections::BTreeMap;

use crate::build::Builder;
use crate::module::{Function, Module, ValueId};
use crate::tensor::Tensor;

use draft::Finished;
use element::Graph;

/// A composite that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The composite.
    pub composite: &'static str,
    /// The value that it computes.
    pub value: String,
}

/// Recognises composites in a function of a module; `takes` tells which, by name, and `known` the
/// elements of parameters that are constants.
///
/// # Panics
/// When the module has no such function.
pub fn recognise(
    module: &mut Module,
    function: &str,
    takes: &dyn Fn(&str) -> bool,
    known: &dyn Fn(usize) -> Option<Tensor>,
) -> Vec<Found> {
    let at = module.functions.iter().position(|f| f.name == function);
    let at = at.unwrap_or_else(|| panic!("the module has a function `@{function}`"));
    let old = module.functions[at].clone();
    let drafts = drafts(&old, module, takes, known);
    if drafts.is_empty() {
        return Vec::new();
    }
    let found = drafts.iter().map(|(at, draft)| Found {
        composite: draft.composite,
        value: old.value(old.nodes[*at].result()).name.clone(),
    });
    let found = found.collect();
    let new = rebuilt(&old, module, &drafts);
    module.functions[at] = new;
    place_above(module, function);
    found
}

/// Whether [`recognise`] finds any in a function, without constants beside those of its nodes.
pub fn is_recognised(module: &Module, function: &str, takes: &dyn Fn(&str) -> bool) -> bool {
    let function = module.function(function);
    function.is_some_and(|function| !drafts(function, module, takes, &|_| None).is_empty())
}

/// What replaces values, by the nodes that make them.
fn drafts(
    function: &Function,
    module: &Module,
    takes: &dyn Fn(&str) -> bool,
    known: &dyn Fn(usize) -> Option<Tensor>,
) -> BTreeMap<usize, Finished> {
    let graph = Graph::new(function, module, known);
    let mut live = vec![false; function.values.len()];
    function.results.iter().for_each(|result| live[result.index()] = true);
    let readers = readers(function);
    let mut drafts = BTreeMap::new();
    for (at, node) in function.nodes.iter().enumerate().rev() {
        if !node.results.iter().any(|result| live[result.index()]) {
            continue;
        }
        let draft = one(&graph, node.result()).filter(|draft| takes(draft.composite));
        let is_worth_it = |draft: &Finished| {
            draft.spares.is_none_or(|v| !is_needed(function, (&live, &readers), v, at))
        };
        match draft.filter(is_worth_it) {
            Some(draft) => {
                draft.reads().for_each(|value| live[value.index()] = true);
                drafts.insert(at, draft);
            }
            None => node.operands.iter().for_each(|value| live[value.index()] = true),
        }
    }
    drafts
}

/// Whether something that is live needs a value, other than the node at `root`.
fn is_needed(
    function: &Function,
    (live, readers): (&[bool], &[Vec<usize>]),
    value: ValueId,
    root: usize,
) -> bool {
    let is_live =
        |at: &usize| function.nodes[*at].results.iter().any(|result| live[result.index()]);
    live[value.index()] || readers[value.index()].iter().any(|at| *at != root && is_live(at))
}

/// The nodes that read each value.
fn readers(function: &Function) -> Vec<Vec<usize>> {
    let mut readers = vec![Vec::new(); function.values.len()];
    for (at, node) in function.nodes.iter().enumerate() {
        node.operands.iter().for_each(|operand| readers[operand.index()].push(at));
    }
    readers
}

/// The composite that ends in a value.
fn one<'g>(graph: &'g Graph<'g>, value: ValueId) -> Option<Finished> {
    attention::attention(graph, value)
        .or_else(|| norm::norm(graph, value))
        .or_else(|| activation::activation(graph, value))
        .or_else(|| rope::rope(graph, value))
        .or_else(|| softmax::softmax(graph, value))
}

/// The function with drafts in place of nodes; nodes that nobody reads any more are left out.
fn rebuilt(old: &Function, module: &mut Module, drafts: &BTreeMap<usize, Finished>) -> Function {
    let mut live = vec![false; old.values.len()];
    old.results.iter().for_each(|result| live[result.index()] = true);
    for (at, node) in old.nodes.iter().enumerate().rev() {
        if !node.results.iter().any(|result| live[result.index()]) {
            continue;
        }
        match drafts.get(&at) {
            Some(draft) => draft.reads().for_each(|value| live[value.index()] = true),
            None => node.operands.iter().for_each(|value| live[value.index()] = true),
        }
    }
    let mut b = Builder::new(module, old.name.clone(), old.kind.clone());
    let mut places: Vec<Option<ValueId>> = vec![None; old.values.len()];
    for id in old.params() {
        let value = old.value(id);
        places[id.index()] = Some(b.param(&value.name, value.ty.clone()));
    }
    for (at, node) in old.nodes.iter().enumerate() {
        if !node.results.iter().any(|result| live[result.index()]) {
            continue;
        }
        let place = |value: ValueId| places[value.index()].expect("a value is made before its use");
        match drafts.get(&at) {
            Some(draft) => {
                let name = &old.value(node.result()).name;
                let made = draft.build(&mut b, name, place);
                b.claim_name(name, made);
                places[node.result().index()] = Some(made);
            }
            None => {
                let operands: Vec<ValueId> = node.operands.iter().map(|o| place(*o)).collect();
                let names: Vec<String> =
                    node.results.iter().map(|result| old.value(*result).name.clone()).collect();
                let made = b.push_named(&names, node.op.clone(), &operands);
                for ((result, made), name) in node.results.iter().zip(made).zip(&names) {
                    // What a draft is made of may have taken the name.
                    if b.function().value(made).name != *name {
                        b.claim_name(name, made);
                    }
                    places[result.index()] = Some(made);
                }
            }
        }
    }
    let results: Vec<ValueId> = old
        .results
        .iter()
        .map(|result| places[result.index()].expect("a result is made"))
        .collect();
    b.into_function(&results)
}

/// Puts the composites that a function calls above it.
fn place_above(module: &mut Module, caller: &str) {
    let place = |module: &Module, name: &str| module.functions.iter().position(|f| f.name == name);
    let Some(function) = module.function(caller) else { return };
    let callees: Vec<String> =
        function.nodes.iter().filter_map(|node| node.callee().map(str::to_owned)).collect();
    for callee in callees {
        if let (Some(at), Some(of_caller)) = (place(module, &callee), place(module, caller))
            && at > of_caller
        {
            let callee = module.functions.remove(at);
            module.functions.insert(of_caller, callee);
        }
    }
}
