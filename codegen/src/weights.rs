//! Which part of each weight a class of ranks holds.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use ir::autodiff::gradient_name;
use ir::factors::zeros;
use ir::op::Combiner;
use ir::plan::Optimizer;
use ir::program::{Experts, STATE_BLOCK, scale_dims};
use ir::sharding::{Layout, pieces};
use ir::{Axis, Class, DType, ExpertParallel, Function, Module, Op, Plan, ValueId};

use crate::calls::{Call, Calls, Operand, Weight};
use crate::partition::layouts;
use crate::schedule::Pipeline;
use crate::store::{Caller, Shards, WeightPlace};

/// How a weight lies on `tp`, how its gradient does, and the dim along which ranks share experts.
type Lies = (Layout, Layout, Option<usize>);

/// The weights that a stage holds, and how.
pub(crate) fn weight_places(
    module: &Module,
    calls: &Calls,
    plan: &Plan,
    stage: usize,
    tensor: usize,
) -> Result<Vec<WeightPlace>, String> {
    let mut places = Vec::new();
    // Of the layers that repeat, each parameter is looked at once.
    let mut known: BTreeMap<(&str, usize), (bool, Lies)> = BTreeMap::new();
    for ((index, weight), readers) in calls.weights.iter().enumerate().zip(readers(calls)) {
        let stages: BTreeSet<usize> = readers.iter().map(|(at, _)| plan.stage_of(*at)).collect();
        if !stages.contains(&stage) {
            continue;
        }
        let mut lies: Option<Lies> = None;
        let mut is_matrix = false;
        let callers = match shares_gradients(plan) {
            true => callers(module, calls, plan, (index, &readers))?,
            false => Vec::new(),
        };
        for (at, param) in readers {
            check_frozen(module, weight, &calls.calls[at], param)?;
            let call = &calls.calls[at];
            let (is_multiplied, here) = match known.entry((call.function.as_str(), param)) {
                Entry::Occupied(there) => *there.get(),
                Entry::Vacant(open) => {
                    let function = module.function(&call.function);
                    let is_multiplied = function.is_some_and(|f| is_multiplied(f, param));
                    *open.insert((is_multiplied, in_call(module, plan, call, param)?))
                }
            };
            is_matrix = is_matrix || is_multiplied;
            if let Some(there) = lies {
                agree(weight, there, here)?;
            }
            lies = Some(here);
        }
        if let Some((layout, gradient, experts)) = lies {
            let ranks = plan.experts.data_ranks(plan.mesh);
            let experts = experts.map(|dim| Experts { dim, ranks }).filter(|_| ranks > 1);
            let ranges = ranges(weight, (layout, experts), plan.mesh.tp, tensor)?;
            let is_coded = has_coded_states(plan) && is_coded(weight);
            if is_coded {
                check_blocks(weight, &ranges, plan.mesh.tp)?;
            }
            places.push(WeightPlace {
                weight: index,
                name: weight.name.clone(),
                global: weight.sizes.clone(),
                ranges,
                experts,
                is_coded,
                is_cut: matches!(layout, Layout::Cut { .. }) && plan.mesh.tp > 1,
                is_partial: matches!(gradient, Layout::Partial(_)) && plan.mesh.tp > 1,
                is_matrix,
                is_frozen: weight.frozen,
                callers,
                owned: stages.first() == Some(&stage),
                stages: stages.into_iter().collect(),
            });
        }
    }
    Ok(places)
}

/// Weights with fewer elements have states without scales. Chosen: as torchao's
/// `low_bit_optim` does.
const CODED_ELEMENTS_MIN: usize = 4096;

fn has_coded_states(plan: &Plan) -> bool {
    plan.precision.has_coded_states() && plan.optimizer.state_count() > 0
}

/// Whether the states of a weight are codes with scales, where the plan has such: it is large, and
/// blocks are no longer than its rows.
fn is_coded(weight: &Weight) -> bool {
    let is_large = weight.sizes.iter().product::<usize>() >= CODED_ELEMENTS_MIN;
    !weight.frozen && is_large && scale_dims(&weight.sizes).is_some()
}

/// Ranks hold whole blocks.
fn check_blocks(weight: &Weight, ranges: &[(usize, usize)], ranks: usize) -> Result<(), String> {
    let is_whole = |(start, size): &(usize, usize)| {
        start.is_multiple_of(STATE_BLOCK) && size.is_multiple_of(STATE_BLOCK)
    };
    if ranges.last().is_some_and(is_whole) {
        return Ok(());
    }
    let (Weight { name, sizes, .. }, dim) = (weight, ranges.len().saturating_sub(1));
    let size = sizes.last().copied().unwrap_or(0);
    Err(format!(
        "`{name}` cannot be cut over tp={ranks}: dim {dim} of {size} elements would be cut inside \
         a block of {STATE_BLOCK}, which share a scale of states={}",
        DType::F8E4M3
    ))
}

/// A layer that has a gradient for a weight which is not trained would write it nowhere.
fn check_frozen(module: &Module, weight: &Weight, call: &Call, param: usize) -> Result<(), String> {
    let layer = module.function(&call.function).ok_or("a call of nothing")?;
    let value = layer.value(ValueId(param as u32));
    if weight.frozen == value.frozen {
        return Ok(());
    }
    let (here, there) = if weight.frozen { ("", " not") } else { (" not", "") };
    let Weight { name, .. } = weight;
    Err(format!("`{name}` is{here} frozen, and `@{}.%{}` is{there}", layer.name, value.name))
}

/// For each weight, the calls that read it, and the first parameter as which each does.
fn readers(calls: &Calls) -> Vec<Vec<(usize, usize)>> {
    let mut readers: Vec<Vec<(usize, usize)>> = vec![Vec::new(); calls.weights.len()];
    for (at, call) in calls.calls.iter().enumerate() {
        for (param, operand) in call.operands.iter().enumerate() {
            let Operand::Weight(weight) = operand else { continue };
            if readers[*weight].last().is_none_or(|(last, _)| *last != at) {
                readers[*weight].push((at, param));
            }
        }
    }
    readers
}

/// The pieces into which the optimizer's part of weights is split.
pub(crate) fn shards(plan: &Plan) -> Shards {
    if plan.optimizer == Optimizer::None {
        return Shards::ONE;
    }
    let whole = plan.zero.ranks(plan.mesh.data_ranks());
    Shards { whole, experts: (whole / plan.experts.data_ranks(plan.mesh)).max(1) }
}

/// Whether ranks share gradients, not only what is updated (ZeRO 2 and 3).
pub(crate) fn shares_gradients(plan: &Plan) -> bool {
    plan.zero.stage > 1 && !shards(plan).are_one()
}

/// The calls that read a weight.
///
/// # Errors
/// A sentence, where one makes a part of its gradient late and the rest not.
fn callers(
    module: &Module,
    calls: &Calls,
    plan: &Plan,
    (weight, readers): (usize, &[(usize, usize)]),
) -> Result<Vec<Caller>, String> {
    let caller = |(call, _): &(usize, usize)| {
        let is_late = is_late(module, calls, plan, &calls.calls[*call]);
        let params = calls.calls[*call].operands.iter().zip(is_late);
        let mut lates = params.filter(|(o, _)| **o == Operand::Weight(weight)).map(|p| p.1);
        let is_late = lates.next().unwrap_or(false);
        if lates.any(|late| late != is_late) {
            let name = &calls.weights[weight].name;
            return Err(format!("gradients of `{name}` are only in part put off in one call"));
        }
        Ok(Caller { call: *call, is_late })
    };
    readers.iter().map(caller).collect()
}

/// For each operand of a call, whether its gradient is that of a weight and is made after those of
/// activations. What the loss is made of is large, and not kept for later; gradients of biases and
/// norms take little time, and would need what is large.
pub(crate) fn is_late(module: &Module, calls: &Calls, plan: &Plan, call: &Call) -> Vec<bool> {
    let is_last = call.results.iter().any(|r| calls.results.contains(r));
    let splits = Pipeline::of(plan).splits() && !is_last;
    let function = module.function(&call.function).filter(|_| splits);
    let is_late = |(at, operand): (usize, &Operand)| {
        let is_multiplied = function.is_some_and(|function| is_multiplied(function, at));
        matches!(operand, Operand::Weight(_)) && is_multiplied
    };
    call.operands.iter().enumerate().map(is_late).collect()
}

/// Whether a product or a look-up reads a parameter of a layer, itself or through views.
pub(crate) fn is_multiplied(function: &Function, param: usize) -> bool {
    let mut views = vec![ValueId(param as u32)];
    for node in &function.nodes {
        if !node.operands.iter().any(|operand| views.contains(operand)) {
            continue;
        }
        let op = &node.op;
        if op.class() == Class::Product || matches!(op, Op::Gather { .. }) {
            return true;
        }
        let keeps_elements = matches!(op, Op::Reshape { .. } | Op::Transpose { .. });
        if keeps_elements || matches!(op, Op::Cast { .. } | Op::Slice { .. }) {
            views.extend(&node.results);
        }
    }
    false
}

/// How the weight that a call passes for a parameter lies. A layer without a gradient function has
/// no gradient that could be a partial sum.
fn in_call(module: &Module, plan: &Plan, call: &Call, param: usize) -> Result<Lies, String> {
    let function = module.function(&call.function).ok_or("a call of nothing")?;
    let name = &function.value(ValueId(param as u32)).name;
    let of = |value: &str| {
        let sharding = plan.functions.get(&call.function).and_then(|f| f.shardings.get(value));
        sharding.map_or([Layout::Replicated; 4], layouts)
    };
    let [_, on_ep, _, on_tp] = of(name);
    let ExpertParallel { ep, takes_tp } = plan.experts;
    let experts = on_ep.cut_dim().filter(|_| ep > 1);
    // Of the ranks that share experts, those along `tp` are told apart first.
    let with_tp = experts.filter(|_| takes_tp).map(Layout::cut);
    if with_tp.is_some() && on_tp != Layout::Replicated {
        let function = &call.function;
        return Err(format!("`@{function}.%{name}` is cut over tp, whose ranks share experts"));
    }
    let gradient = match module.function(&gradient_name(&call.function)) {
        Some(gradient) if function.is_differentiable(ValueId(param as u32)) => {
            let grad = gradient_of(gradient, function, param)
                .ok_or_else(|| format!("`@{}.%{name}` has no gradient", call.function))?;
            let [on_dp, grad_on_ep, on_cp, on_tp] = of(&gradient.value(grad).name);
            if ep > 1 && grad_on_ep.cut_dim() != experts {
                let function = &call.function;
                return Err(format!("the gradient `@{function}.%d.{name}` lies otherwise on ep"));
            }
            // All gradients are summed over the ranks that hold the same weights: a whole one would
            // count again.
            let shared = if experts.is_some() { plan.experts } else { ExpertParallel::NONE };
            let rest = plan.mesh.besides_experts(shared);
            let rest = rest.ok_or_else(|| format!("ep={ep} is no part of the mesh"))?;
            let axes = [(Axis::Dp, rest.dp, on_dp), (Axis::Cp, rest.cp, on_cp)];
            for (axis, ranks, layout) in axes {
                let is_sum = matches!(layout, Layout::Partial(Combiner::Sum));
                if ranks > 1 && !is_sum && !zeros(gradient)[grad.index()] {
                    let function = &call.function;
                    let what = format!("the gradient `@{function}.%d.{name}`");
                    return Err(format!("{what} is no sum over {axis}"));
                }
            }
            if with_tp.is_some() && on_tp.cut_dim().is_some() {
                let function = &call.function;
                return Err(format!("the gradient `@{function}.%d.{name}` is cut over tp"));
            }
            with_tp.unwrap_or(on_tp)
        }
        Some(_) | None => Layout::Replicated,
    };
    Ok((with_tp.unwrap_or(on_tp), gradient, experts))
}

/// The gradient of a layer's parameter, which may be a value with the name of another's, where both
/// are equal.
fn gradient_of(gradient: &Function, primal: &Function, param: usize) -> Option<ValueId> {
    let at = primal.differentiable_params().take_while(|p| p.index() < param).count();
    gradient.results.get(primal.results.len() + at).copied()
}

/// Two uses of one weight find it in one layout; a partial sum in one of them only would make the
/// whole gradient one.
fn agree(weight: &Weight, a: Lies, b: Lies) -> Result<(), String> {
    if a.0 != b.0 || a.2 != b.2 {
        return Err(format!("`{}` is sharded in two ways", weight.name));
    }
    let partial = |l: Layout| matches!(l, Layout::Partial(_));
    if partial(a.1) != partial(b.1) {
        return Err(format!("the gradient of `{}` is partial in one use only", weight.name));
    }
    Ok(())
}

/// For each dim, the first element held and the number held, of ranks that share experts by the
/// first of them.
fn ranges(
    weight: &Weight,
    (layout, experts): (Layout, Option<Experts>),
    ranks: usize,
    tensor: usize,
) -> Result<Vec<(usize, usize)>, String> {
    let mut ranges: Vec<(usize, usize)> = weight.sizes.iter().map(|s| (0, *s)).collect();
    if let (Layout::Cut { dim, unit }, true) = (layout, ranks > 1) {
        let cut = pieces(weight.sizes[dim], unit, ranks);
        let cut = cut
            .ok_or_else(|| format!("`{}` cannot be cut over {}={ranks}", weight.name, Axis::Tp))?;
        ranges[dim] = (cut[tensor].start, cut[tensor].size);
    }
    if let Some(Experts { dim, ranks }) = experts {
        let size = ranges[dim].1;
        if !size.is_multiple_of(ranks) {
            let name = &weight.name;
            return Err(format!("ep={ranks} does not divide the {size} experts of `{name}`"));
        }
        ranges[dim].1 = size / ranks;
    }
    Ok(ranges)
}
