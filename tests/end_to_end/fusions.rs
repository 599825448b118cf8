//! What fusion leaves apart could not have been one kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use codegen::calls::Calls;
use codegen::domain::Domain;
use codegen::fuse::GROUP_NODES_MAX;
use codegen::grouping::Choice;
use codegen::leaf::is_leaf;
use codegen::partition::{Place, Shardings};
use codegen::prepare::prepare_training;
use codegen::routines::{Fused, LayerDecisions, Layers};
use codegen::tile::lower_kernel;
use ir::plan::Keep;
use ir::text::parse_module;
use ir::{DType, Function, Kind, Module, Node, ValueId};
use kernels::{Kernel, price};

use crate::mesh::{gpt2, llama};
use crate::model::prepared;

pub(crate) fn models() -> Vec<Module> {
    let graph = |name: &str| {
        let path = format!("{}/tests/models/{name}.graph", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(Path::new(&path)).expect("the model is there");
        let module = parse_module(name, &text).expect("it is a module");
        prepare_training(module, "loss").expect("it is prepared")
    };
    let config = |description| prepared(&description, 33, DType::F32, 0.0).1;
    let graphs = ["t5", "resnet", "dlrm", "moe"].map(graph);
    [config(gpt2()), config(llama())].into_iter().chain(graphs).collect()
}

/// The fused halves of a layer on one rank, the kernels that they call and how these were chosen.
pub(crate) fn halves(
    module: &Module,
    layer: &str,
    keep: Keep,
) -> Vec<(Function, Module, Option<Choice>)> {
    let whole = Shardings::new();
    let place = Place {
        sizes: [1; 4],
        coordinates: [0; 4],
        takes_tp: false,
        microbatch_size: 2,
        target: None,
    };
    let decisions = LayerDecisions { shardings: &whole, keep, is_late: &[] };
    let layer = Layers::new(module).fused(layer, decisions, place).expect("it is whole");
    let half = |Fused { function, module, choice, .. }: &Fused| {
        (function.clone(), module.clone(), *choice)
    };
    layer.fused.iter().map(half).collect()
}

/// Whether a path leads from a node to another one through a third.
fn reaches_around(function: &Function, from: usize, to: usize) -> bool {
    let producers = function.producers();
    let mut seen = BTreeSet::new();
    let mut work: Vec<usize> = vec![to];
    while let Some(at) = work.pop() {
        for operand in &function.nodes[at].operands {
            let Some(producer) = producers[operand.index()] else { continue };
            if producer == from {
                if at != to {
                    return true;
                }
            } else if seen.insert(producer) {
                work.push(producer);
            }
        }
    }
    false
}

/// Two kernels as one: what the second reads of the first is there.
fn joined(function: &Function, module: &Module, calls: [usize; 2]) -> Function {
    let mut union = Function::new("union", Kind::Kernel);
    let mut outer: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let kernel = |at: usize| {
        let callee = function.nodes[at].callee().expect("it is a call");
        module.function(callee).expect("it was outlined")
    };
    let define = |union: &mut Function, value: &ir::Value| {
        union.values.push(value.clone());
        ValueId(union.values.len() as u32 - 1)
    };
    for at in calls {
        for operand in &function.nodes[at].operands {
            let is_made = calls.iter().any(|c| function.nodes[*c].results.contains(operand));
            if !is_made && !outer.contains_key(operand) {
                let own = define(&mut union, function.value(*operand));
                outer.insert(*operand, own);
            }
        }
    }
    union.param_count = union.values.len();
    for at in calls {
        let (node, kernel) = (&function.nodes[at], kernel(at));
        let params = kernel.params().zip(&node.operands);
        let mut map: BTreeMap<ValueId, ValueId> =
            params.map(|(param, operand)| (param, outer[operand])).collect();
        for inner in &kernel.nodes {
            let operands = inner.operands.iter().map(|o| map[o]).collect();
            let result = define(&mut union, kernel.value(inner.result()));
            map.insert(inner.result(), result);
            union.nodes.push(Node { op: inner.op.clone(), operands, results: vec![result] });
        }
        for (result, own) in node.results.iter().zip(&kernel.results) {
            outer.insert(*result, map[own]);
        }
    }
    union
}

/// Whether one kernel can compute all that a function does.
fn is_one_kernel(function: &Function) -> bool {
    let computed = (0..function.nodes.len()).filter(|at| !is_leaf(&function.nodes[*at].op));
    let computed: Vec<usize> = computed.collect();
    computed.len() <= GROUP_NODES_MAX && Domain::of(function, &computed).is_some()
}

/// The pairs of kernels that a function calls, and those that could be one.
fn pairs(function: &Function, module: &Module) -> (usize, Vec<String>) {
    let name = |at: usize| function.nodes[at].callee().unwrap_or("an op");
    let is_kernel = |at: &usize| module.function(name(*at)).is_some_and(|f| f.kind == Kind::Kernel);
    let calls: Vec<usize> = (0..function.nodes.len()).filter(is_kernel).collect();
    let pairs = calls.iter().enumerate();
    let pairs = pairs.flat_map(|(at, a)| calls[at + 1..].iter().map(move |b| [*a, *b]));
    let (mut count, mut apart) = (0, Vec::new());
    for [a, b] in pairs {
        count += 1;
        if is_one_kernel(&joined(function, module, [a, b])) && !reaches_around(function, a, b) {
            apart.push(format!("{} and {}", name(a), name(b)));
        }
    }
    (count, apart)
}

/// The bytes that the kernels of a function move, and those that they cannot do without: each value
/// that a kernel takes or yields, once.
fn moved(function: &Function, module: &Module) -> [u64; 2] {
    let (mut all, mut compulsory) = (0, 0);
    for node in &function.nodes {
        let callee = node.callee().and_then(|name| module.function(name));
        let Some(kernel) = callee.filter(|callee| callee.kind == Kind::Kernel) else { continue };
        let values: BTreeSet<&ValueId> = node.operands.iter().chain(&node.results).collect();
        compulsory += values.iter().filter_map(|v| function.ty(**v).bytes()).sum::<u64>();
        all += price::bytes(&Kernel::Rows(lower_kernel(kernel, module).rows)).0;
    }
    [all, compulsory]
}

#[test]
fn kernels_of_a_layer_move_little_more_than_they_must() {
    let (mut table, mut is_fine, mut count) = (String::new(), true, 0);
    for module in models() {
        let calls = Calls::of(&module, "loss").expect("a list of calls");
        for layer in calls.functions() {
            for (fused, kernels, _) in halves(&module, layer, Keep::Full) {
                let [all, compulsory] = moved(&fused, &kernels);
                table += &format!("{} {layer}: {all} of {compulsory}\n", module.name);
                is_fine &= all as f64 <= 1.1 * compulsory as f64;
                count += usize::from(compulsory > 0);
            }
        }
    }
    println!("{table}");
    assert!(is_fine && count >= 30, "{table}");
}

/// One kernel less is one launch less, and no more bytes: values that both read are read once, what
/// passes between them is not read. So nothing that could be one kernel is two.
#[test]
fn no_two_kernels_of_a_layer_could_be_one() {
    let (mut count, mut apart) = (0, Vec::new());
    for module in models() {
        let calls = Calls::of(&module, "loss").expect("a list of calls");
        for layer in calls.functions() {
            for keep in [Keep::Full, Keep::None] {
                for (fused, kernels, _) in halves(&module, layer, keep) {
                    let (pairs, of_half) = pairs(&fused, &kernels);
                    count += pairs;
                    apart.extend(of_half.iter().map(|p| format!("{} {keep:?}: {p}", module.name)));
                }
            }
        }
    }
    assert!(count >= 500, "only {count} pairs");
    assert!(apart.is_empty(), "{} of {count}:\n{}", apart.len(), apart.join("\n"));
}
