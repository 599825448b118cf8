//! Specialisation: the local gradient function → a forward and a backward function.
//!
//! Both are slices of one function, so that what is recomputed is the very same node. Products,
//! calls, look-ups and reductions that the forward pass needs itself are kept where the plan keeps;
//! elementwise nodes and views are recomputed, as they fuse into their readers, and so are calls of
//! elementwise composites that only such nodes read (the gate of SwiGLU, not a GELU that a product
//! reads); a gather is repeated rather than its result kept. Of several kept values that nothing
//! reads but what is computed of them element by element, that is kept.

use ir::op::Collective;
use ir::plan::Keep;
use ir::{Class, Function, Kind, Module, Node, Op, Value, ValueId};

use crate::epilogue::epilogues;

/// The two halves of a training function.
#[derive(Clone, Debug)]
pub struct Halves {
    /// Computes the results and what is kept.
    pub forward: Function,
    /// For each parameter of `forward`, that of the gradient function.
    pub forward_params: Vec<usize>,
    /// How many results of `forward` are those of the primal; the rest are kept.
    pub primal_results: usize,
    /// Computes the gradients.
    pub backward: Function,
    /// Where each parameter of `backward` comes from.
    pub backward_params: Vec<Source>,
    /// Computes the gradients that are put off, which `backward` does not.
    pub late: Option<Late>,
}

/// What is left of a backward pass.
#[derive(Clone, Debug)]
pub struct Late {
    /// Computes gradients.
    pub function: Function,
    /// Where each of its parameters comes from.
    pub params: Vec<Source>,
}

/// The end of the name of a value that is kept in place of the one that it was rounded from.
pub(crate) const SAVED: &str = ".saved";

/// The composites that are attention.
const ATTENTION: [&str; 2] = ["attention", "attention_dropout"];

/// Where a parameter of a backward function comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A parameter of the gradient function: an operand of the call, or a cotangent.
    Param(usize),
    /// A result of the forward function.
    Kept(usize),
    /// A result of the backward function that is no gradient.
    Passed(usize),
}

/// Cuts a gradient function, whose composites are in `module`, in two.
///
/// `cotangent_from` is its first cotangent parameter, `primal_results` the number of results that
/// are the primal's. Gradients that `is_late` marks, in the order of results, are left to a third
/// function. O(nodes + operands).
pub fn specialise(
    gradient: &Function,
    module: &Module,
    [cotangent_from, primal_results]: [usize; 2],
    keep: Keep,
    is_late: &[bool],
) -> Halves {
    let late =
        depends_on(gradient, |id| (cotangent_from..gradient.param_count).contains(&id.index()));
    let backward_results = &gradient.results[primal_results..];
    // What the forward half does not compute for itself is left to the backward half.
    let early = needed(gradient, &gradient.results[..primal_results]);
    let keeping =
        Keeping { function: gradient, module, early: &early, late: &late, primal_results };
    let kept = match keep {
        Keep::None => Vec::new(),
        Keep::Full => keeping.values(|_| false),
        Keep::AllButAttention => {
            let attended = attended(gradient, module);
            keeping.values(|node| attended[node.results[0].index()])
        }
    };
    // A kept value that is a result anyway is not stored twice.
    let primal = &gradient.results[..primal_results];
    let (again, kept): (Vec<ValueId>, Vec<ValueId>) =
        kept.into_iter().partition(|value| primal.contains(value));
    let mut forward_results = primal.to_vec();
    forward_results.extend(&kept);
    let params: Vec<ValueId> = gradient.params().collect();
    let early: Vec<ValueId> = params[..cotangent_from].to_vec();
    let (forward, forward_params) =
        slice(gradient, &format!("{}.forward", gradient.name), &early, &forward_results);
    let mut inputs = params;
    inputs.extend(&kept);
    inputs.extend(&again);
    let is_late = |at: usize| is_late.get(at).copied().unwrap_or(false);
    let [late, soon] = [true, false].map(|wanted| -> Vec<ValueId> {
        let results = backward_results.iter().enumerate();
        results.filter(|(at, _)| is_late(*at) == wanted).map(|(_, result)| *result).collect()
    });
    let passed = match late.is_empty() {
        true => Vec::new(),
        false => passed((gradient, module), &inputs, &soon, &late),
    };
    let soon = [&soon[..], &passed].concat();
    let (backward, backward_inputs) =
        slice(gradient, &format!("{}.backward", gradient.name), &inputs, &soon);
    let result = |value: ValueId| {
        let at = forward_results.iter().position(|r| *r == value);
        at.expect("what is kept is a result of the forward half")
    };
    let source = |at: usize| match at {
        at if at < gradient.param_count => Source::Param(at),
        at if at < inputs.len() => Source::Kept(result(inputs[at])),
        at => Source::Passed(soon.len() - passed.len() + at - inputs.len()),
    };
    let backward_params = backward_inputs.into_iter().map(source).collect();
    let late = (!late.is_empty()).then(|| {
        let inputs = [&inputs[..], &passed].concat();
        let (function, params) =
            slice(gradient, &format!("{}.weights", gradient.name), &inputs, &late);
        Late { function, params: params.into_iter().map(source).collect() }
    });
    Halves { forward, forward_params, primal_results, backward, backward_params, late }
}

/// The values on the way from `inputs` to the results `soon` that the results `late` need, and that
/// are worth keeping until then, in order of definition.
fn passed(
    (function, module): (&Function, &Module),
    inputs: &[ValueId],
    soon: &[ValueId],
    late: &[ValueId],
) -> Vec<ValueId> {
    let producers = function.producers();
    let worth = worth_keeping(function, module);
    let walk = |results: &[ValueId], stops: &dyn Fn(ValueId, usize) -> bool| {
        let mut seen = vec![false; function.values.len()];
        let mut work = results.to_vec();
        let mut found = Vec::new();
        while let Some(value) = work.pop() {
            let is_input = inputs.contains(&value);
            if std::mem::replace(&mut seen[value.index()], true) || is_input {
                continue;
            }
            let Some(at) = producers[value.index()] else { continue };
            if stops(value, at) {
                found.push(value);
            } else {
                work.extend(&function.nodes[at].operands);
            }
        }
        (seen, found)
    };
    let (is_made, _) = walk(soon, &|_, _| false);
    let (_, mut passed) = walk(late, &|value, at| is_made[value.index()] && worth[at]);
    passed.sort();
    passed
}

/// For each value, whether it depends on one that `root` names.
pub(crate) fn depends_on(function: &Function, root: impl Fn(ValueId) -> bool) -> Vec<bool> {
    let mut depends = vec![false; function.values.len()];
    for (at, flag) in depends.iter_mut().enumerate() {
        *flag = root(ValueId(at as u32));
    }
    for node in &function.nodes {
        if node.operands.iter().any(|o| depends[o.index()]) {
            for result in &node.results {
                depends[result.index()] = true;
            }
        }
    }
    depends
}

/// Whether a function of a module calls attention.
pub fn attends(module: &Module, name: &str) -> bool {
    let function = module.function(name);
    function.is_some_and(|f| f.nodes.iter().any(|node| is_attention(node, module)))
}

/// For each value, whether it is a result of attention, or of several calls of it side by side.
fn attended(function: &Function, module: &Module) -> Vec<bool> {
    let mut attended = vec![false; function.values.len()];
    for node in &function.nodes {
        let is_join = matches!(node.op, Op::Concat { .. });
        let joins = is_join && node.operands.iter().all(|operand| attended[operand.index()]);
        if joins || is_attention(node, module) {
            node.results.iter().for_each(|result| attended[result.index()] = true);
        }
    }
    attended
}

/// Whether a node is a call of attention.
fn is_attention(node: &Node, module: &Module) -> bool {
    let callee = node.callee().and_then(|callee| module.function(callee));
    let kind = callee.map(|callee| &callee.kind);
    matches!(kind, Some(Kind::Composite { name, .. }) if ATTENTION.contains(&name.as_str()))
}

/// For each value, whether what makes it is needed for some results.
fn needed(function: &Function, results: &[ValueId]) -> Vec<bool> {
    let mut needed = vec![false; function.values.len()];
    results.iter().for_each(|result| needed[result.index()] = true);
    for node in function.nodes.iter().rev() {
        if node.results.iter().any(|result| needed[result.index()]) {
            let made = node.results.iter().chain(&node.operands);
            made.for_each(|value| needed[value.index()] = true);
        }
    }
    needed
}

/// What is kept of a gradient function's forward half for its backward half.
struct Keeping<'a> {
    function: &'a Function,
    module: &'a Module,
    /// For each value, whether the forward half computes it for itself.
    early: &'a [bool],
    /// For each value, whether it depends on a cotangent.
    late: &'a [bool],
    primal_results: usize,
}

impl Keeping<'_> {
    /// The values that the backward half reads and that are worth keeping, in order of definition.
    fn values(&self, is_recomputed: impl Fn(&Node) -> bool) -> Vec<ValueId> {
        let Keeping { function, module, early, late, .. } = *self;
        let producers = function.producers();
        let worth = worth_keeping(function, module);
        let mut seen = vec![false; function.values.len()];
        let mut kept = Vec::new();
        let mut runs = vec![false; function.nodes.len()];
        let mut work = function.results[self.primal_results..].to_vec();
        while let Some(value) = work.pop() {
            if std::mem::replace(&mut seen[value.index()], true) {
                continue;
            }
            let Some(at) = producers[value.index()] else { continue };
            let node = &function.nodes[at];
            // A product that adds to its result does not leave what it adds to.
            let is_worth = early[value.index()] && worth[at];
            let is_saved = !late[value.index()] && function.value(value).name.ends_with(SAVED);
            if (is_worth || is_saved) && !is_recomputed(node) {
                kept.push(value);
            } else {
                runs[at] = true;
                work.extend(&node.operands);
            }
        }
        self.join(&mut runs, &mut kept);
        kept.sort();
        kept
    }

    /// Keeps what is computed element by element of several kept values, in place of those of them
    /// that nothing else reads, where it takes half as much: the sum of a product and of an
    /// adapter's. Where it takes little less, writing it would cost more than it saves. `runs` are
    /// the nodes of the backward half. O(nodes²).
    fn join(&self, runs: &mut [bool], kept: &mut Vec<ValueId>) {
        let Keeping { function, module, early, late, primal_results } = *self;
        let (primal, gradients) = function.results.split_at(primal_results);
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); function.values.len()];
        for (at, node) in function.nodes.iter().enumerate().filter(|(at, _)| runs[*at]) {
            node.operands.iter().for_each(|operand| readers[operand.index()].push(at));
        }
        let fuses = |at: usize| {
            let node = &function.nodes[at];
            let is_view = node.op.class() == Class::View;
            let is_early = node.results.iter().all(|r| !late[r.index()] && !gradients.contains(r));
            is_early && (is_view || is_elementwise(node, module))
        };
        // What is a result of the forward half anyway takes nothing.
        let bytes = |value: &ValueId| match primal.contains(value) {
            true => 0,
            false => function.ty(*value).bytes().unwrap_or(0),
        };
        for last in (0..function.nodes.len()).rev().filter(|at| fuses(*at)) {
            let [result] = function.nodes[last].results[..] else { continue };
            if !runs[last] || !early[result.index()] {
                continue;
            }
            let mut is_inside = vec![false; function.nodes.len()];
            is_inside[last] = true;
            let read_inside = |value: &ValueId, is_inside: &[bool]| {
                let readers = &readers[value.index()];
                !readers.is_empty() && readers.iter().all(|reader| is_inside[*reader])
            };
            for at in (0..last).rev().filter(|at| runs[*at] && fuses(*at)) {
                is_inside[at] =
                    function.nodes[at].results.iter().all(|r| read_inside(r, &is_inside));
            }
            let (inside, others): (Vec<ValueId>, Vec<ValueId>) =
                kept.iter().partition(|value| read_inside(value, &is_inside));
            if inside.iter().map(bytes).sum::<u64>() < 2 * bytes(&result).max(1) {
                continue;
            }
            *kept = others;
            kept.push(result);
            let inside = (0..=last).filter(|at| is_inside[*at]);
            inside.for_each(|at| runs[at] = false);
            let stay = |reader: &usize| !is_inside[*reader];
            readers.iter_mut().for_each(|readers| readers.retain(stay));
        }
    }
}

/// For each node, whether what it yields is worth keeping for the backward pass.
/// O(nodes + operands).
pub(crate) fn worth_keeping(function: &Function, module: &Module) -> Vec<bool> {
    let sums = epilogues(function);
    let mut is_read_by_others = vec![false; function.values.len()];
    let others = function
        .nodes
        .iter()
        .filter(|node| !is_elementwise(node, module))
        .flat_map(|node| &node.operands);
    others.chain(&function.results).for_each(|value| is_read_by_others[value.index()] = true);
    let is_fused = |node: &Node| {
        let reads = node.results.iter().any(|result| is_read_by_others[result.index()]);
        is_elementwise_call(node, module) && !reads
    };
    let worth =
        |(at, node): (usize, &Node)| is_kept(&node.op) && !is_fused(node) || sums.contains_key(&at);
    function.nodes.iter().enumerate().map(worth).collect()
}

/// Whether a node is computed element by element, so that it fuses into what reads it.
fn is_elementwise(node: &Node, module: &Module) -> bool {
    node.op.class() == Class::Elementwise || is_elementwise_call(node, module)
}

/// Whether a node calls a composite that is computed element by element, and draws nothing.
fn is_elementwise_call(node: &Node, module: &Module) -> bool {
    let Some(callee) = node.callee().and_then(|callee| module.function(callee)) else {
        return false;
    };
    let is_simple = |node: &Node| match node.op.class() {
        Class::Elementwise | Class::View => true,
        Class::Source => matches!(node.op, Op::Constant { .. }),
        Class::Product
        | Class::Reduction
        | Class::Scan
        | Class::Join
        | Class::Indexed
        | Class::Call
        | Class::Collective => false,
    };
    matches!(callee.kind, Kind::Composite { .. }) && callee.nodes.iter().all(is_simple)
}

/// Whether what an op yields is worth keeping for the backward pass, whoever reads it.
fn is_kept(op: &Op) -> bool {
    match op.class() {
        Class::Product
        | Class::Reduction
        | Class::Scan
        | Class::Join
        | Class::Indexed
        | Class::Call => true,
        Class::Collective => {
            let of = |kind: &Collective| {
                matches!(kind, Collective::AllGather { .. } | Collective::Dispatch { .. })
            };
            !matches!(op, Op::Collective { kind, .. } if of(kind))
        }
        Class::Source | Class::Elementwise | Class::View => false,
    }
}

/// The part of a function that computes `results` from `inputs`, and which inputs it needs.
pub fn slice(
    function: &Function,
    name: &str,
    inputs: &[ValueId],
    results: &[ValueId],
) -> (Function, Vec<usize>) {
    let producers = function.producers();
    let mut needed = vec![false; function.values.len()];
    let mut is_input = vec![false; function.values.len()];
    for input in inputs {
        is_input[input.index()] = true;
    }
    let mut node_needed = vec![false; function.nodes.len()];
    let mut work = results.to_vec();
    while let Some(value) = work.pop() {
        if std::mem::replace(&mut needed[value.index()], true) || is_input[value.index()] {
            continue;
        }
        if let Some(at) = producers[value.index()]
            && !std::mem::replace(&mut node_needed[at], true)
        {
            work.extend(&function.nodes[at].operands);
        }
    }
    let mut part = Function::new(name, Kind::Layer);
    let mut map = vec![None; function.values.len()];
    let mut used = Vec::new();
    for (at, input) in inputs.iter().enumerate() {
        if needed[input.index()] && map[input.index()].is_none() {
            map[input.index()] = Some(copy_value(&mut part, function, *input));
            used.push(at);
        }
    }
    part.param_count = part.values.len();
    for (node, _) in function.nodes.iter().zip(&node_needed).filter(|(_, needed)| **needed) {
        let operand = |o: &ValueId| map[o.index()].expect("the slice holds what its nodes read");
        let operands = node.operands.iter().map(operand).collect();
        let results: Vec<ValueId> =
            node.results.iter().map(|r| copy_value(&mut part, function, *r)).collect();
        for (old, new) in node.results.iter().zip(&results) {
            map[old.index()].get_or_insert(*new);
        }
        part.nodes.push(Node { op: node.op.clone(), operands, results });
    }
    let result = |r: &ValueId| map[r.index()].expect("the slice holds its results");
    part.results = results.iter().map(result).collect();
    (part, used)
}

fn copy_value(part: &mut Function, function: &Function, id: ValueId) -> ValueId {
    let mut value: Value = function.value(id).clone();
    if part.find(&value.name).is_some() {
        value.name = format!("{}.again", value.name);
    }
    part.values.push(value);
    ValueId(part.values.len() as u32 - 1)
}
