//! Reverse-mode differentiation, function by function.
//!
//! `@block` gets a companion `@block.grad` of the same parameters and one cotangent `%d.y` for each
//! floating-point result `%y`. It computes everything that `@block` computes, under the same names,
//! then sweeps backwards; its results are those of `@block` and the gradient of each floating-point
//! parameter that is not frozen. A call of a layer becomes a call of the layer's companion, so that
//! the derivative of a deep model is as small as the model. What of the forward part is kept from
//! one run to the next and what is recomputed is not decided here: a plan's keep sets do that.
//!
//! Composites that name a gradient composite use it; others are inlined first.

mod unused;

use std::collections::BTreeSet;

use crate::build::Builder;
use crate::inline::{composites, inline_calls};
use crate::library::{Argument, Gradient, templates};
use crate::module::{Attributes, Function, Kind, Module, Node, Value, ValueId};
use crate::op::Op;
use crate::pass::remove_dead_nodes;
use crate::types::TensorType;
use crate::vjp::{Cotangents, vjp};
use crate::{Diagnostic, Span};

/// The name of the training entry that [`training_step`] adds.
pub const STEP_PART: &str = "step_part";

/// What the name of a function's derivative ends with.
pub const GRAD: &str = ".grad";

/// What the cotangent of a result is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seed {
    /// A parameter of the derivative.
    Parameter,
    /// The number one.
    One,
    /// There is none.
    Nothing,
}

/// Adds the derivative of a function to the module, and of every layer that it calls, where they
/// are not there yet. Returns its name, `<function>.grad`.
///
/// Parameters: those of the function, then `%d.y` for each floating-point result `%y`.
/// Results: those of the function, then the gradient of each floating-point parameter that is not
/// frozen, in order, zeros where nothing depends on it. The first nodes are those of the function,
/// unless a composite without a gradient of its own had to be inlined.
///
/// # Errors
/// `E1012` for an op without gradient, `E1013` when there is no such function.
pub fn differentiate(module: &mut Module, function: &str) -> Result<String, Diagnostic> {
    let name = gradient_name(function);
    if module.function(&name).is_some() {
        return Ok(name);
    }
    let primal = find(module, function)?;
    let is_float = |r: &ValueId| primal.ty(*r).dtype.is_float();
    let seed = |r: &ValueId| if is_float(r) { Seed::Parameter } else { Seed::Nothing };
    let seeds: Vec<Seed> = primal.results.iter().map(seed).collect();
    let derivative = derive(module, primal, &name, &seeds)?;
    module.add(derivative);
    Ok(name)
}

/// Adds `step_part` to the module: the parameters of the entry to its results `(loss_sum, count)`
/// and the gradient of `loss_sum` by each floating-point parameter that is not frozen, in order.
///
/// # Errors
/// `E1012` for an op without gradient, `E1013` when there is no such entry or its results are not
/// a floating-point scalar and a count.
pub fn training_step(module: &mut Module, entry: &str) -> Result<String, Diagnostic> {
    let primal = find(module, entry)?;
    let types = primal.result_types();
    let is_scalar = |ty: &TensorType| ty.ndim() == 0;
    if types.len() != 2 || !types.iter().all(is_scalar) || !types[0].dtype.is_float() {
        let list = types.iter().map(TensorType::to_string).collect::<Vec<_>>().join(", ");
        let headline = format!("`@{entry}` yields ({list}), not the sum of losses and a count");
        return Err(Diagnostic::error("E1013", Span::of(format!("@{entry}")), headline));
    }
    let derivative = derive(module, primal, STEP_PART, &[Seed::One, Seed::Nothing])?;
    module.add(derivative);
    unused::drop_unused_gradients(module);
    Ok(STEP_PART.to_owned())
}

/// The name of the gradient of a layer.
pub fn gradient_name(function: &str) -> String {
    format!("{function}{GRAD}")
}

fn find(module: &Module, function: &str) -> Result<Function, Diagnostic> {
    module.function(function).cloned().ok_or_else(|| {
        let span = Span::of(format!("@{function}"));
        Diagnostic::error("E1013", span, format!("no function `@{function}` to differentiate"))
    })
}

fn derive(
    module: &mut Module,
    mut primal: Function,
    name: &str,
    seeds: &[Seed],
) -> Result<Function, Diagnostic> {
    let carried = inline_underivable(module, &mut primal, seeds);
    for callee in layers(module, &primal, &carried) {
        differentiate(module, &callee)?;
    }
    let active = active_values(module, &primal, &differentiable(&primal));
    let (start, seeded) = start(&primal, name, seeds);
    let mut cotangents: Cotangents = vec![None; start.values.len()];
    let shift = start.values.len() - primal.values.len();
    let place = |id: ValueId| if id.index() < primal.param_count { id } else { shifted(id, shift) };
    let mut b = Builder::resume(module, start);
    for (result, seed) in primal.results.iter().zip(seeds) {
        if *seed == Seed::One {
            let result = place(*result);
            let name = format!("d.{}", b.function().value(result).name);
            let one = b.constant_like(&name, 1.0, result);
            accumulate(&mut b, &mut cotangents[result.index()], result, one);
        }
    }
    // What is yielded twice has the sum of both cotangents.
    for (result, parameter) in seeded {
        accumulate(&mut b, &mut cotangents[result.index()], result, parameter);
    }
    for at in (0..primal.nodes.len()).rev() {
        let node = b.function().nodes[at].clone();
        let originals = &primal.nodes[at];
        let of_result = |(result, original): (&ValueId, &ValueId)| {
            cotangents[result.index()].filter(|_| active[original.index()])
        };
        let of_results: Cotangents =
            node.results.iter().zip(&originals.results).map(of_result).collect();
        if of_results.iter().all(Option::is_none) {
            continue;
        }
        let wanted: Vec<bool> = originals.operands.iter().map(|o| active[o.index()]).collect();
        let of_operands = node_vjp(&mut b, &node, &of_results, &wanted)?;
        for ((operand, d), is_wanted) in node.operands.iter().zip(of_operands).zip(wanted) {
            if let Some(d) = d.filter(|_| is_wanted) {
                accumulate(&mut b, &mut cotangents[operand.index()], *operand, d);
            }
        }
    }
    Ok(end(b, &primal, &place, &cotangents))
}

fn shifted(id: ValueId, by: usize) -> ValueId {
    ValueId(id.0 + by as u32)
}

/// The derivative as far as the primal goes, and of which results parameters are cotangents.
fn start(primal: &Function, name: &str, seeds: &[Seed]) -> (Function, Vec<(ValueId, ValueId)>) {
    let mut function = Function::new(name, Kind::Layer);
    function.values = primal.values[..primal.param_count].to_vec();
    let mut parameters = Vec::new();
    for (result, seed) in primal.results.iter().zip(seeds) {
        if *seed == Seed::Parameter {
            let Value { name, ty, .. } = primal.value(*result);
            let mut name = format!("d.{name}");
            while function.find(&name).is_some() || primal.find(&name).is_some() {
                name.push_str(".again");
            }
            parameters.push((*result, ValueId(function.values.len() as u32)));
            function.values.push(Value::new(name, ty.clone()));
        }
    }
    function.param_count = function.values.len();
    let shift = parameters.len();
    let place = |id: ValueId| if id.index() < primal.param_count { id } else { shifted(id, shift) };
    function.values.extend(primal.values[primal.param_count..].iter().cloned());
    for node in &primal.nodes {
        let operands = node.operands.iter().map(|o| place(*o)).collect();
        let results = node.results.iter().map(|r| place(*r)).collect();
        function.nodes.push(Node { op: node.op.clone(), operands, results });
    }
    let seeded = parameters.into_iter().map(|(result, parameter)| (place(result), parameter));
    (function, seeded.collect())
}

/// Names the results and removes what they do not need of the backward sweep.
fn end(
    mut b: Builder,
    primal: &Function,
    place: &impl Fn(ValueId) -> ValueId,
    cotangents: &Cotangents,
) -> Function {
    let mut results: Vec<ValueId> = primal.results.iter().map(|r| place(*r)).collect();
    for param in primal.differentiable_params() {
        let name = format!("d.{}", primal.value(param).name);
        results.push(match cotangents[param.index()] {
            Some(d) => d,
            None => b.constant_like(&name, 0.0, param),
        });
    }
    // The forward part stays whole while dead nodes are looked for.
    let count = results.len();
    results.extend(primal.nodes.iter().flat_map(|n| n.results.iter().map(|r| place(*r))));
    let mut function = b.into_function(&results);
    remove_dead_nodes(&mut function);
    function.results.truncate(count);
    function
}

/// Adds a contribution to a cotangent. The sum so far is always the first operand, and bears the
/// name `d.<value>` where no parameter does.
fn accumulate(b: &mut Builder, total: &mut Option<ValueId>, value: ValueId, d: ValueId) {
    *total = Some(match *total {
        None => d,
        Some(before) => {
            let name = format!("d.{}", b.function().value(value).name);
            let sum = b.add(&name, before, d);
            b.claim_name(&name, sum);
            sum
        }
    });
}

// Which values have cotangents.

fn differentiable(function: &Function) -> Vec<bool> {
    function.params().map(|p| function.is_differentiable(p)).collect()
}

/// Which values depend on the given parameters through floating-point values.
fn active_values(module: &Module, function: &Function, params: &[bool]) -> Vec<bool> {
    let mut active = params.to_vec();
    active.resize(function.values.len(), false);
    for node in &function.nodes {
        let operands: Vec<bool> = node.operands.iter().map(|o| active[o.index()]).collect();
        let results = match node.callee().map(|callee| module.function(callee)) {
            Some(callee) => {
                let callee = callee.expect("verified: the callee exists");
                let inner = active_values(module, callee, &operands);
                callee.results.iter().map(|r| inner[r.index()]).collect()
            }
            None => vec![operands.contains(&true)],
        };
        for (result, is_active) in node.results.iter().zip(results) {
            active[result.index()] = is_active && function.ty(*result).dtype.is_float();
        }
    }
    active
}

/// Which values may get a cotangent: those on a way from an active parameter to a seed.
fn carried_values(module: &Module, function: &Function, seeds: &[Seed]) -> Vec<bool> {
    let active = active_values(module, function, &differentiable(function));
    let mut carried = vec![false; function.values.len()];
    for (result, seed) in function.results.iter().zip(seeds) {
        carried[result.index()] |= *seed != Seed::Nothing && active[result.index()];
    }
    for node in function.nodes.iter().rev() {
        if node.results.iter().any(|r| carried[r.index()]) {
            for operand in &node.operands {
                carried[operand.index()] |= active[operand.index()];
            }
        }
    }
    carried
}

/// The layers that are called for a result with a cotangent.
fn layers(module: &Module, function: &Function, carried: &[bool]) -> BTreeSet<String> {
    let needed = |node: &&Node| node.results.iter().any(|r| carried[r.index()]);
    let called = function.nodes.iter().filter(needed).filter_map(Node::callee);
    let callees = called.filter_map(|callee| module.function(callee));
    let is_layer = |f: &&Function| !matches!(f.kind, Kind::Composite { .. });
    callees.filter(is_layer).map(|f| f.name.clone()).collect()
}

/// Inlines the calls of composites that have no gradient for the results which carry cotangents.
/// Returns which values of the function may carry one then.
fn inline_underivable(module: &Module, function: &mut Function, seeds: &[Seed]) -> Vec<bool> {
    let library = composites(module);
    loop {
        let carried = carried_values(module, function, seeds);
        let is_underivable = |node: &&Node| {
            let Some(callee) = node.callee() else { return false };
            let carries = |at: usize| carried[node.results[at].index()];
            let any = (0..node.results.len()).any(carries);
            any && library.function(callee).is_some_and(|callee| !has_gradient(callee, carries))
        };
        let name = |node: &Node| function.value(node.results[0]).name.clone();
        let selected: BTreeSet<String> =
            function.nodes.iter().filter(is_underivable).map(name).collect();
        if selected.is_empty() {
            return carried;
        }
        inline_calls(function, &library, |_, result| selected.contains(result));
    }
}

fn gradient_of(callee: &Function) -> Option<(Gradient, &Attributes)> {
    let Kind::Composite { name, attributes } = &callee.kind else { return None };
    let definition = templates().get(name)?.definition(attributes);
    Some((definition.gradient.clone()?, attributes))
}

/// Whether a composite's gradient takes the cotangents of all results that carry one.
fn has_gradient(callee: &Function, carries: impl Fn(usize) -> bool) -> bool {
    let Some((gradient, _)) = gradient_of(callee) else { return false };
    callee.results.iter().enumerate().filter(|(at, _)| carries(*at)).all(|(_, result)| {
        let name = callee.value(*result).name.clone();
        gradient.arguments.contains(&Argument::Cotangent(name))
    })
}

// Gradients of nodes.

fn node_vjp(
    b: &mut Builder,
    node: &Node,
    d: &Cotangents,
    wanted: &[bool],
) -> Result<Cotangents, Diagnostic> {
    let Some(callee) = node.callee() else { return vjp(b, node, d) };
    let callee = b.module().function(callee).cloned().expect("verified: the callee exists");
    Ok(match gradient_of(&callee) {
        Some((gradient, attributes)) => {
            composite_vjp(b, node, &callee, (&gradient, attributes), d, wanted)
        }
        None => layer_vjp(b, node, &callee, d),
    })
}

fn cotangent_names(b: &Builder, operands: impl Iterator<Item = ValueId>) -> Vec<String> {
    operands.map(|o| format!("d.{}", b.function().value(o).name)).collect()
}

/// The cotangent of a result; zeros where there is none.
fn or_zero(b: &mut Builder, result: ValueId, d: Option<ValueId>) -> ValueId {
    d.unwrap_or_else(|| {
        let name = format!("d.{}.zero", b.function().value(result).name);
        b.constant_like(&name, 0.0, result)
    })
}

/// Calls the companion with the call's operands and the cotangents.
fn layer_vjp(b: &mut Builder, node: &Node, callee: &Function, d: &Cotangents) -> Cotangents {
    let mut operands = node.operands.clone();
    for (result, d) in node.results.iter().zip(d) {
        if b.ty(*result).dtype.is_float() {
            operands.push(or_zero(b, *result, *d));
        }
    }
    let has_gradient: Vec<bool> = differentiable(callee);
    let trained = node.operands.iter().zip(&has_gradient).filter(|(_, is)| **is);
    let trained: Vec<ValueId> = trained.map(|(operand, _)| *operand).collect();
    let again = |r: &ValueId| format!("{}.again", b.function().value(*r).name);
    let mut names: Vec<String> = node.results.iter().map(again).collect();
    names.extend(cotangent_names(b, trained.into_iter()));
    let function = gradient_name(&callee.name);
    let results = b.push_named(&names, Op::Call { function }, &operands);
    let mut gradients = results[node.results.len()..].iter().copied();
    has_gradient.into_iter().map(|has| has.then(|| gradients.next()).flatten()).collect()
}

/// Calls the gradient composite with what it asks for.
fn composite_vjp(
    b: &mut Builder,
    node: &Node,
    callee: &Function,
    (gradient, attributes): (&Gradient, &Attributes),
    d: &Cotangents,
    wanted: &[bool],
) -> Cotangents {
    let param = |name: &str| callee.find(name).filter(|id| id.index() < callee.param_count);
    let result = |name: &str| {
        let at = callee.results.iter().position(|r| callee.value(*r).name == name);
        at.expect("the library: a gradient names parameters and results")
    };
    let mut operands = Vec::new();
    for argument in &gradient.arguments {
        operands.push(match argument {
            Argument::Value(name) => match param(name) {
                Some(id) => node.operands[id.index()],
                None => node.results[result(name)],
            },
            Argument::Cotangent(name) => {
                let at = result(name);
                or_zero(b, node.results[at], d[at])
            }
        });
    }
    let known = &templates()[&gradient.callee].attributes;
    let mut given = attributes.clone();
    given.retain(|name, _| known.iter().any(|(known, _)| known == name));
    for name in &gradient.negated {
        given.entry(name.clone()).and_modify(|value| *value = -*value);
    }
    let at = |name: &String| param(name).expect("the library: targets are parameters").index();
    let mut targets: Vec<usize> = gradient.targets.iter().map(at).collect();
    for (attribute, name) in &gradient.wanted {
        if wanted[at(name)] {
            given.insert(attribute.clone(), 1.0);
        } else {
            targets.retain(|target| *target != at(name));
        }
    }
    let function = b.instance(&gradient.callee, &given, &operands);
    let names = cotangent_names(b, targets.iter().map(|at| node.operands[*at]));
    let results = b.push_named(&names, Op::Call { function }, &operands);
    let mut cotangents = vec![None; node.operands.len()];
    for (at, d) in targets.into_iter().zip(results) {
        cotangents[at] = Some(d);
    }
    cotangents
}
