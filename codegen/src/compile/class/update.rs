//! The end of a step: gradients are reduced, their norm taken, parameters updated.

mod offload;
mod shard;

use std::sync::Arc;

use ir::plan::{Offload, Optimizer, Place};
use ir::precision::Precision;
use ir::program::{Group, STATE_BLOCK, Step};
use ir::{Axis, DType};
use kernels::kernel::Copy;
use kernels::rows::{Access, BinaryOp, Instr, Output, RowInput, Rows, UnaryOp};
use kernels::{Kernel, Offset};

use super::launch::{all_reduce, fill, launch};
use super::{Class, data_group, shard_group};
use crate::optimizer::Update;
use crate::store::{BufferId, Region, RegionPlace};

/// Added to the norm before the clipping factor is taken, as PyTorch's `clip_grad_norm_` does.
const CLIP_EPS: f64 = 1e-6;

/// The scalars of a step: see [`Feed::Scalars`](ir::program::Feed::Scalars).
pub(super) const SCALARS: usize = 5;
/// The places of the clipping norm and the loss scale among them.
const CLIP: usize = 3;
const LOSS_SCALE: usize = 4;

/// Clears what micro-batches add to, and gradients where `clears` says that they are added to. The
/// cotangent of the loss is the loss scale.
pub(super) fn begin(class: &mut Class<'_>, clears: bool, scalars: BufferId, steps: &mut Vec<Step>) {
    if let Some((grads, elements)) = class.store.all_grads().filter(|_| clears) {
        fill(class, grads, (class.plan.precision.gradients, elements), 0.0, steps);
    }
    begin_evaluation(class, steps);
    if !class.has_loss() {
        return;
    }
    let zero = class.store.constant(0);
    fill(class, zero, (class.sums(), 1), 0.0, steps);
    let copy = Copy {
        loops: Vec::new(),
        source_offset: Offset::Fixed(LOSS_SCALE as i64),
        target_offset: 0,
        zero_first: 0,
        dtype: class.sums(),
    };
    let one = class.store.constant(1);
    launch(class, "seed", Kernel::Copy(copy), &[scalars], &[one], steps);
}

/// Clears the statistics.
pub(super) fn begin_evaluation(class: &mut Class<'_>, steps: &mut Vec<Step>) {
    let stats = class.store.all_stats();
    fill(class, stats, (class.sums(), 3), 0.0, steps);
}

/// Sums loss and count over all ranks, each term once.
pub(super) fn reduce_loss(class: &mut Class<'_>, steps: &mut Vec<Step>) {
    if class.tensor > 0 && !class.loss_is_partial {
        let loss = class.store.loss_stats();
        fill(class, loss, (class.sums(), 2), 0.0, steps);
    }
    if class.plan.mesh.ranks() > 1 {
        let loss = class.store.loss_stats();
        all_reduce(class, loss, ([class.sums(); 2], 2), Group::World, steps);
    }
}

/// Reduces gradients, takes their norm and updates parameters.
///
/// # Errors
/// A sentence, when the optimizer has no kernel.
pub(super) fn finish(
    class: &mut Class<'_>,
    scalars: BufferId,
    steps: &mut Vec<Step>,
) -> Result<(), String> {
    reduce_loss(class, steps);
    let pieces = shard::reduce(class, steps);
    let counted = match pieces.is_empty() {
        true => {
            reduce_gradients(class, steps);
            counted_gradients(class)
        }
        false => shard::counted(class, &pieces),
    };
    sum_squares(class, &counted, steps);
    let optimizer = class.plan.optimizer;
    if optimizer == Optimizer::None {
        return Ok(());
    }
    let scale = scale(class, scalars, steps);
    if !pieces.is_empty() {
        return shard::update(class, &pieces, [scalars, scale], steps);
    }
    // One launch updates all weights with the same hyper-parameters, however small they are.
    let alike = |region: Region| Some((decay(optimizer, region.is_matrix), region.is_coded));
    let regions = class.store.runs(alike).into_iter();
    let all: Vec<Updated> = regions.map(|region| updated_region(class, &region)).collect();
    offload::update_all(class, &all, [scalars, scale], steps, &mut |_, _, _| {})
}

/// The decay of weights: the one hyper-parameter in which they differ.
fn decay(optimizer: Optimizer, is_matrix: bool) -> f64 {
    match optimizer {
        Optimizer::None => 0.0,
        Optimizer::Sgd { decay, decay_biases } | Optimizer::AdamW { decay, decay_biases, .. } => {
            if is_matrix {
                decay
            } else {
                decay_biases
            }
        }
    }
}

fn reduce_gradients(class: &mut Class<'_>, steps: &mut Vec<Step>) {
    let Precision { gradients: dtype, reduce: exchanged, .. } = class.plan.precision;
    let types = [dtype, exchanged];
    let over_data = class.plan.mesh.data_ranks() > 1;
    if class.plan.experts.data_ranks(class.plan.mesh) > 1 {
        reduce_by_experts(class, types, steps);
    } else if let Some((grads, elements)) = class.store.all_grads().filter(|_| over_data) {
        all_reduce(class, grads, (types, elements), data_group(class.plan), steps);
    }
    reduce_copies(class, steps);
}

/// Sums the gradients of experts over the ranks that have the same, and all others over all.
fn reduce_by_experts(class: &mut Class<'_>, types: [DType; 2], steps: &mut Vec<Step>) {
    let mesh = class.plan.mesh;
    let sharers = class.plan.experts.data_ranks(mesh);
    for region in class.store.runs(|region| Some(region.is_expert)) {
        let group = match region.region.is_expert {
            true => Group::Copies(sharers),
            false => data_group(class.plan),
        };
        if !region.region.is_expert || sharers < mesh.data_ranks() {
            let grads = class.store.run("grads", types[0], region.grads, region.elements);
            all_reduce(class, grads, (types, region.elements), group, steps);
        }
    }
}

/// Sums the gradients of which tensor-parallel ranks or other stages have terms.
fn reduce_copies(class: &mut Class<'_>, steps: &mut Vec<Step>) {
    let Precision { gradients: dtype, reduce: exchanged, .. } = class.plan.precision;
    let types = [dtype, exchanged];
    for region in class.store.runs(|region| region.is_partial.then_some(())) {
        let grads = class.store.run("grads", dtype, region.grads, region.elements);
        all_reduce(class, grads, (types, region.elements), Group::Axis(Axis::Tp), steps);
    }
    // Copies of one weight in several stages have the sum of their gradients.
    for place in class.store.weights.clone() {
        if place.stages.len() > 1 && !place.is_frozen {
            let elements = place.ranges.iter().map(|r| r.1).product();
            let grad = class.store.grad(place.weight);
            all_reduce(class, grad, (types, elements), Group::Stages(place.stages), steps);
        }
    }
}

/// Whether a rank counts a region in the norm.
fn counts(class: &Class<'_>, region: Region) -> bool {
    !region.foreign && (class.tensor == 0 || region.is_cut)
}

/// Gradients side by side that a rank counts in the norm.
struct Counted {
    grads: BufferId,
    elements: usize,
    is_expert: bool,
}

/// Runs of gradients that this rank counts in the norm.
fn counted_gradients(class: &mut Class<'_>) -> Vec<Counted> {
    let dtype = class.plan.precision.gradients;
    let runs = class.store.runs(|region| counts(class, region).then_some(region.is_expert));
    let run = |RegionPlace { region, grads, elements, .. }: RegionPlace| {
        let grads = class.store.run("grads", dtype, grads, elements);
        Counted { grads, elements, is_expert: region.is_expert }
    };
    runs.into_iter().map(run).collect()
}

/// The squared norm of all gradients, every element counted once.
fn sum_squares(class: &mut Class<'_>, counted: &[Counted], steps: &mut Vec<Step>) {
    let squares = class.store.stat(2);
    let is_split = !class.store.buckets.is_empty();
    // Ranks that share experts have the squares of each other's only where all have pieces.
    let (experts, others): (Vec<&Counted>, Vec<&Counted>) =
        counted.iter().partition(|counted| counted.is_expert && !is_split);
    for counted in &experts {
        add_squares(class, counted, steps);
    }
    if !experts.is_empty() {
        let group = Group::Shards(class.plan.experts.data_ranks(class.plan.mesh));
        all_reduce(class, squares, ([class.sums(); 2], 1), group, steps);
    }
    for counted in others {
        add_squares(class, counted, steps);
    }
    let over_data = is_split.then(|| shard_group(class.plan, false));
    let over_axes = [Axis::Tp, Axis::Pp].into_iter();
    let over_axes = over_axes.filter(|axis| class.plan.mesh.size(*axis) > 1).map(Group::Axis);
    for group in over_data.into_iter().chain(over_axes).collect::<Vec<_>>() {
        all_reduce(class, squares, ([class.sums(); 2], 1), group, steps);
    }
}

/// Adds the squares of gradients to those that the norm has so far.
fn add_squares(class: &mut Class<'_>, counted: &Counted, steps: &mut Vec<Step>) {
    let Counted { grads, elements, .. } = *counted;
    let squares = class.store.stat(2);
    let dtype = class.plan.precision.gradients;
    let rows = Rows {
        rows: 1,
        cols: elements,
        dtype: class.sums(),
        inputs: vec![RowInput { dtype, access: Access::full(1, elements) }],
        instrs: vec![Instr::Load { input: 0 }, Instr::Unary { op: UnaryOp::Square, x: 0 }],
        outputs: vec![Output::TotalSum { value: 1, accumulate: true }],
    };
    launch(class, "squares", Kernel::Rows(rows), &[grads], &[squares], steps);
}

/// What gradients are multiplied by: `min(1, clip / (norm + eps)) / count / s`, with the norm of
/// the mean gradient and the loss scale `s` that is in them.
fn scale(class: &mut Class<'_>, scalars: BufferId, steps: &mut Vec<Step>) -> BufferId {
    let dtype = class.sums();
    let scale =
        class.store.persistent("scale", ir::program::Contents::Activation, dtype, Vec::new());
    let at = |offset: usize| RowInput { dtype, access: Access { offset, ..Access::scalar() } };
    let binary = |op, a, b| Instr::Binary { op, a, b };
    let rows = Rows {
        rows: 1,
        cols: 1,
        dtype,
        inputs: vec![at(1), at(2), at(CLIP), at(LOSS_SCALE)],
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Load { input: 1 },
            Instr::Load { input: 2 },
            Instr::Load { input: 3 },
            Instr::Const { value: 1.0 },
            // A batch without labels moves nothing.
            binary(BinaryOp::Max, 0, 4),
            Instr::Unary { op: UnaryOp::Sqrt, x: 1 },
            binary(BinaryOp::Div, 6, 5),
            binary(BinaryOp::Div, 7, 3),
            Instr::Const { value: CLIP_EPS },
            binary(BinaryOp::Add, 8, 9),
            binary(BinaryOp::Div, 2, 10),
            binary(BinaryOp::Min, 11, 4),
            binary(BinaryOp::Div, 12, 5),
            binary(BinaryOp::Div, 13, 3),
        ],
        outputs: vec![Output::Store {
            value: 14,
            access: Access::scalar(),
            dtype,
            accumulate: false,
        }],
    };
    let stats = class.store.all_stats();
    launch(class, "scale", Kernel::Rows(rows), &[stats, stats, scalars, scalars], &[scale], steps);
    scale
}

/// What one launch updates.
#[derive(Clone)]
struct Updated {
    is_matrix: bool,
    elements: usize,
    /// What is updated, by which gradients, states and scales of these.
    params: BufferId,
    grads: BufferId,
    states: Vec<BufferId>,
    scales: Vec<BufferId>,
    /// Where what layers read is rounded to.
    rounded: Option<BufferId>,
}

fn updated_region(class: &mut Class<'_>, region: &RegionPlace) -> Updated {
    let Precision { parameters, gradients, master, accumulate, .. } = class.plan.precision;
    let of_states = class.plan.precision.state(region.region.is_coded);
    let Offload { optimizer: away, parameters: at_rest, .. } = class.plan.offload;
    let blocks = region.elements / STATE_BLOCK;
    let scale = |scale: &u64| class.store.run_in(away, "scale", accumulate, (*scale, blocks));
    let scales = region.scales.iter().map(scale).collect();
    let mut run = |place, name, dtype, offset| {
        class.store.run_in(place, name, dtype, (offset, region.elements))
    };
    let params = run(at_rest, "params", parameters, region.params);
    let grads = run(Place::Device, "grads", gradients, region.grads);
    let masters = master.zip(region.masters);
    let masters = masters.map(|(dtype, offset)| run(away, "master", dtype, offset));
    let states = region.states.iter();
    let states = states.map(|state| run(away, "state", of_states, *state)).collect();
    Updated {
        is_matrix: region.region.is_matrix,
        elements: region.elements,
        params: masters.unwrap_or(params),
        grads,
        states,
        scales,
        rounded: masters.map(|_| params),
    }
}

fn update(
    class: &mut Class<'_>,
    updated: &Updated,
    [scalars, scale]: [BufferId; 2],
    steps: &mut Vec<Step>,
) -> Result<(), String> {
    let Updated { params, grads, ref states, ref scales, rounded, .. } = *updated;
    let decay = decay(class.plan.optimizer, updated.is_matrix);
    let update = update_of(class, decay, updated.elements, !scales.is_empty())?;
    let mut rows = update.rows.clone();
    let mut inputs = Vec::new();
    for (input, param) in rows.inputs.iter_mut().zip(&update.inputs) {
        let (buffer, offset) = match param.as_str() {
            "p" => (params, 0),
            "g" => (grads, 0),
            "m" => (states[0], 0),
            "v" => (states[1], 0),
            "m.scale" => (scales[0], 0),
            "v.scale" => (scales[1], 0),
            "scale" => (scale, 0),
            "rate" => (scalars, 0),
            "correction1" => (scalars, 1),
            "correction2" => (scalars, 2),
            other => return Err(format!("the optimizer takes `%{other}`")),
        };
        input.access.offset = offset;
        inputs.push(buffer);
    }
    let kept = states.iter().chain(scales).copied();
    let outputs: Vec<BufferId> = std::iter::once(params).chain(kept).chain(rounded).collect();
    launch(class, "update", Kernel::Rows(rows), &inputs, &outputs, steps);
    Ok(())
}

/// The optimizer update of `elements` elements with weight decay `decay`, lowered once.
fn update_of(
    class: &mut Class<'_>,
    decay: f64,
    elements: usize,
    is_coded: bool,
) -> Result<Arc<Update>, String> {
    let (optimizer, precision) = (class.plan.optimizer, class.plan.precision);
    let text = format!("{optimizer:?} {decay} {elements} {precision} {is_coded}");
    if let Some(there) = class.table.updates.get(&text) {
        return Ok(Arc::clone(there));
    }
    let made = Arc::new(Update::new((optimizer, decay), elements, &precision, is_coded)?);
    class.table.updates.insert(text, Arc::clone(&made));
    Ok(made)
}

#[cfg(test)]
mod tests {
    use ir::DType;
    use ir::random::mix;
    use kernels::cpu::{Cpu, View, ViewMut};

    use super::*;

    const ADAMW: Optimizer =
        Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-6, decay: 0.1, decay_biases: 0.0 };
    const SGD: Optimizer = Optimizer::Sgd { decay: 0.1, decay_biases: 0.0 };

    /// Parameters, gradients and both moments of some elements.
    type Vectors = [Vec<f32>; 4];

    fn draw(len: usize, seed: u64) -> Vectors {
        let number = |n: usize| (mix(seed ^ mix(n as u64)) % 2_000_001) as f32 / 1e6 - 1.0;
        let mut vectors = [0, 1, 2, 3].map(|v| (0..len).map(|i| number(4 * i + v)).collect());
        let squares: &mut Vec<f32> = &mut vectors[3];
        squares.iter_mut().for_each(|v| *v *= *v);
        vectors
    }

    /// Runs the update of an optimizer.
    fn apply(optimizer: Optimizer, vectors: &mut Vectors) {
        let precision = Precision::uniform(DType::F32);
        let update = Update::new((optimizer, 0.1), vectors[0].len(), &precision, false);
        let update = update.expect("it updates");
        let (before, fixed) = (vectors.clone(), [[0.5_f32], [1e-2], [0.19], [0.0199]]);
        let input = |name: &String| match name.as_str() {
            "p" => View::of(&before[0]),
            "g" => View::of(&before[1]),
            "m" => View::of(&before[2]),
            "v" => View::of(&before[3]),
            "scale" => View::of(&fixed[0]),
            "rate" => View::of(&fixed[1]),
            "correction1" => View::of(&fixed[2]),
            "correction2" => View::of(&fixed[3]),
            other => panic!("the optimizer takes `%{other}`"),
        };
        let inputs: Vec<View<'_>> = update.inputs.iter().map(input).collect();
        let [params, _, first, second] = vectors.each_mut().map(|v| ViewMut::of(v));
        let count = update.rows.outputs.len();
        let outputs: Vec<ViewMut<'_>> = [params, first, second].into_iter().take(count).collect();
        Cpu::new(2).execute(&Kernel::Rows(update.rows), &inputs, &outputs);
    }

    /// Many weights side by side are updated by one launch, bit for bit as each is alone.
    #[test]
    fn one_launch_updates_weights_as_one_each_does() {
        for (optimizer, seed) in [(ADAMW, 1), (SGD, 2), (ADAMW, 3)] {
            let lens = (0..9).map(|n| 1 + (mix(seed * 100 + n) % 5000) as usize);
            let alone: Vec<Vectors> = lens.map(|len| draw(len, seed ^ len as u64)).collect();
            let whole = |v: usize| alone.iter().flat_map(|w| w[v].iter().copied()).collect();
            let mut together = [0, 1, 2, 3].map(whole);
            let before = together.clone();
            apply(optimizer, &mut together);
            assert_ne!(before[0], together[0], "something is updated");
            let mut first = 0;
            for mut weight in alone {
                apply(optimizer, &mut weight);
                for (one, all) in weight.iter().zip(&together) {
                    let all = &all[first..first + one.len()];
                    let same = one.iter().zip(all).all(|(x, y)| x.to_bits() == y.to_bits());
                    assert!(same, "{optimizer:?}, seed {seed}, weight at {first}");
                }
                first += weight[0].len();
            }
        }
    }
}
