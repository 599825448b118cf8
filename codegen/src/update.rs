//! The end of a step: gradients are reduced, their norm taken, parameters updated.

use std::rc::Rc;

use ir::module::Attributes;
use ir::op::Combiner;
use ir::plan::Optimizer;
use ir::program::{Exchange, Group, Instruction, Ref, Routine, Step};
use ir::{Axis, DType, Function, Kind, Module, TensorType};
use kernels::Kernel;
use kernels::kernel::Fill;
use kernels::rows::{Access, BinaryOp, Instr, Output, RowInput, Rows, UnaryOp};

use crate::compile::Class;
use crate::store::BufferId;
use crate::tile::lower_kernel;

/// Added to the norm before the clipping factor is taken, as PyTorch's `clip_grad_norm_` does.
const CLIP_EPS: f64 = 1e-6;

/// Clears what micro-batches add to, and gradients where `clears` says that they are added to.
pub(crate) fn begin(class: &mut Class<'_>, clears: bool, steps: &mut Vec<Step>) {
    if clears {
        let (grads, elements) = class.store.all_grads();
        fill(class, grads, elements, 0.0, steps);
    }
    begin_evaluation(class, steps);
}

/// Clears the statistics.
pub(crate) fn begin_evaluation(class: &mut Class<'_>, steps: &mut Vec<Step>) {
    let stats = class.store.all_stats();
    fill(class, stats, 3, 0.0, steps);
    for (value, constant) in [0.0, 1.0].into_iter().enumerate() {
        let buffer = class.store.constant(value);
        fill(class, buffer, 1, constant, steps);
    }
}

/// Sums loss and count over all ranks, each term once.
pub(crate) fn reduce_loss(class: &mut Class<'_>, steps: &mut Vec<Step>) {
    if class.tensor > 0 && !class.loss_is_partial() {
        let loss = class.store.loss_stats();
        fill(class, loss, 2, 0.0, steps);
    }
    if class.plan.mesh.ranks() > 1 {
        let loss = class.store.loss_stats();
        all_reduce(class, loss, 2, Group::World, steps);
    }
}

/// Reduces gradients, takes their norm and updates parameters.
///
/// # Errors
/// A sentence, when the optimizer has no kernel.
pub(crate) fn finish(
    class: &mut Class<'_>,
    scalars: BufferId,
    steps: &mut Vec<Step>,
) -> Result<(), String> {
    reduce_loss(class, steps);
    reduce_gradients(class, steps);
    sum_squares(class, steps);
    if class.plan.optimizer == Optimizer::None {
        return Ok(());
    }
    let scale = scale(class, scalars, steps);
    for at in 0..class.store.regions.len() {
        update_region(class, at, scalars, scale, steps)?;
    }
    Ok(())
}

fn reduce_gradients(class: &mut Class<'_>, steps: &mut Vec<Step>) {
    let (grads, elements) = class.store.all_grads();
    if class.plan.mesh.dp > 1 && elements > 0 {
        all_reduce(class, grads, elements, Group::Axis(Axis::Dp), steps);
    }
    for region in class.store.regions.clone() {
        if region.region.is_partial {
            all_reduce(class, region.grads, region.elements, Group::Axis(Axis::Tp), steps);
        }
    }
    // Copies of one weight in several stages have the sum of their gradients.
    for place in class.store.weights.clone() {
        if place.stages.len() > 1 {
            let elements = place.ranges.iter().map(|r| r.1).product();
            let grad = class.store.grad(place.weight);
            all_reduce(class, grad, elements, Group::Stages(place.stages), steps);
        }
    }
}

/// The squared norm of all gradients, every element counted once.
fn sum_squares(class: &mut Class<'_>, steps: &mut Vec<Step>) {
    let squares = class.store.stat(2);
    for region in class.store.regions.clone() {
        if region.region.foreign || (class.tensor > 0 && !region.region.is_cut) {
            continue;
        }
        let rows = Rows {
            rows: 1,
            cols: region.elements,
            dtype: class.dtype,
            inputs: vec![RowInput { dtype: class.dtype, access: Access::full(1, region.elements) }],
            instrs: vec![Instr::Load { input: 0 }, Instr::Unary { op: UnaryOp::Square, x: 0 }],
            outputs: vec![Output::TotalSum { value: 1, accumulate: true }],
        };
        launch(class, "squares", Kernel::Rows(rows), &[region.grads], &[squares], steps);
    }
    for axis in [Axis::Tp, Axis::Pp] {
        if class.plan.mesh.size(axis) > 1 {
            all_reduce(class, squares, 1, Group::Axis(axis), steps);
        }
    }
}

/// What gradients are multiplied by: `min(1, clip / (norm + eps)) / count`, with the norm of the
/// mean gradient.
fn scale(class: &mut Class<'_>, scalars: BufferId, steps: &mut Vec<Step>) -> BufferId {
    let dtype = class.dtype;
    let scale =
        class.store.persistent("scale", ir::program::Contents::Activation, dtype, Vec::new());
    let at = |offset: usize| RowInput { dtype, access: Access { offset, ..Access::scalar() } };
    let binary = |op, a, b| Instr::Binary { op, a, b };
    let rows = Rows {
        rows: 1,
        cols: 1,
        dtype,
        inputs: vec![at(1), at(2), at(3)],
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Load { input: 1 },
            Instr::Load { input: 2 },
            Instr::Const { value: 1.0 },
            // A batch without labels moves nothing.
            binary(BinaryOp::Max, 0, 3),
            Instr::Unary { op: UnaryOp::Sqrt, x: 1 },
            binary(BinaryOp::Div, 5, 4),
            Instr::Const { value: CLIP_EPS },
            binary(BinaryOp::Add, 6, 7),
            binary(BinaryOp::Div, 2, 8),
            binary(BinaryOp::Min, 9, 3),
            binary(BinaryOp::Div, 10, 4),
        ],
        outputs: vec![Output::Store {
            value: 11,
            access: Access::scalar(),
            dtype,
            accumulate: false,
        }],
    };
    let stats = class.store.all_stats();
    launch(class, "scale", Kernel::Rows(rows), &[stats, stats, scalars], &[scale], steps);
    scale
}

fn update_region(
    class: &mut Class<'_>,
    at: usize,
    scalars: BufferId,
    scale: BufferId,
    steps: &mut Vec<Step>,
) -> Result<(), String> {
    let region = class.store.regions[at].clone();
    let update = update_of(class, region.region.is_matrix, region.elements)?;
    let mut rows = update.rows.clone();
    let mut inputs = Vec::new();
    for (input, param) in rows.inputs.iter_mut().zip(&update.inputs) {
        let (buffer, offset) = match param.as_str() {
            "p" => (region.params, 0),
            "g" => (region.grads, 0),
            "m" => (region.states[0], 0),
            "v" => (region.states[1], 0),
            "scale" => (scale, 0),
            "rate" => (scalars, 0),
            "correction1" => (scalars, 1),
            "correction2" => (scalars, 2),
            other => return Err(format!("the optimizer takes `%{other}`")),
        };
        input.access.offset = offset;
        inputs.push(buffer);
    }
    let outputs: Vec<BufferId> =
        std::iter::once(region.params).chain(region.states.iter().copied()).collect();
    launch(class, "update", Kernel::Rows(rows), &inputs, &outputs, steps);
    Ok(())
}

/// The block program of an update, and which of its operands each input is.
#[derive(Clone, Debug)]
pub(crate) struct Update {
    rows: Rows,
    inputs: Vec<String>,
}

/// The update of so many elements, lowered once.
fn update_of(
    class: &mut Class<'_>,
    is_matrix: bool,
    elements: usize,
) -> Result<Rc<Update>, String> {
    let (optimizer, dtype) = (class.plan.optimizer, class.dtype);
    let text = format!("{optimizer:?} {is_matrix} {elements} {dtype}");
    if let Some(there) = class.table.updates.get(&text) {
        return Ok(Rc::clone(there));
    }
    let function = optimizer_function(optimizer, is_matrix, elements, dtype)?;
    let tile = lower_kernel(&function, &Module::default());
    let name = |param: &ir::ValueId| function.value(*param).name.clone();
    let inputs = tile.inputs.iter().map(name).collect();
    let made = Rc::new(Update { rows: tile.rows, inputs });
    class.table.updates.insert(text, Rc::clone(&made));
    Ok(made)
}

/// The update of `elements` parameters, as a kernel function of the library's composite.
fn optimizer_function(
    optimizer: Optimizer,
    is_matrix: bool,
    elements: usize,
    dtype: DType,
) -> Result<Function, String> {
    let vector = TensorType::of(dtype, &[elements]);
    let scalar = TensorType::scalar(dtype);
    let chosen = |decay, decay_biases| ("decay", if is_matrix { decay } else { decay_biases });
    let (attributes, vectors, scalars) = match optimizer {
        Optimizer::None => (Vec::new(), 0, 0),
        Optimizer::Sgd { decay, decay_biases } => (vec![chosen(decay, decay_biases)], 2, 2),
        Optimizer::AdamW { beta1, beta2, eps, decay, decay_biases } => {
            let decay = chosen(decay, decay_biases);
            (vec![("beta1", beta1), ("beta2", beta2), ("eps", eps), decay], 4, 4)
        }
    };
    let attributes: Attributes =
        attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let mut operands = vec![vector; vectors];
    operands.resize(vectors + scalars, scalar);
    let name = optimizer.composite().ok_or("nothing is updated")?;
    let function = ir::library::instantiate(name, &attributes, &operands, name);
    let mut function = function.ok_or_else(|| format!("`{name}` has no instance"))?;
    function.kind = Kind::Kernel;
    Ok(function)
}

/// Appends a call of a routine of one launch.
fn launch(
    class: &mut Class<'_>,
    name: &str,
    kernel: Kernel,
    inputs: &[BufferId],
    outputs: &[BufferId],
    steps: &mut Vec<Step>,
) {
    let bytes: Vec<u64> =
        kernel.inputs().iter().chain(&kernel.outputs()).map(|a| a.bytes() as u64).collect();
    let kernel = class.table.add(kernel);
    let slot = |at: usize| Ref::Slot(at as u32);
    let routine = Routine {
        name: name.to_owned(),
        slots: bytes.iter().map(|b| (name.to_owned(), *b)).collect(),
        locals: Vec::new(),
        frame_bytes: 0,
        instructions: vec![Instruction::Launch {
            kernel,
            inputs: (0..inputs.len()).map(slot).collect(),
            outputs: (inputs.len()..inputs.len() + outputs.len()).map(slot).collect(),
        }],
    };
    let routine = class.store.routine(&routine);
    let slots = inputs.iter().chain(outputs).copied().collect();
    steps.push(Step::Call { routine, slots, frame: None });
}

fn fill(class: &mut Class<'_>, buffer: BufferId, len: usize, value: f64, steps: &mut Vec<Step>) {
    let kernel = Kernel::Fill(Fill { len, value, dtype: class.dtype });
    launch(class, "fill", kernel, &[], &[buffer], steps);
}

fn all_reduce(
    class: &mut Class<'_>,
    buffer: BufferId,
    elements: usize,
    group: Group,
    steps: &mut Vec<Step>,
) {
    let routine = Routine {
        name: "reduce".to_owned(),
        slots: vec![("x".to_owned(), elements as u64 * class.dtype.size())],
        locals: Vec::new(),
        frame_bytes: 0,
        instructions: vec![Instruction::Collective {
            exchange: Exchange::AllReduce(Combiner::Sum),
            group,
            dtype: class.dtype,
            elements,
            input: Ref::Slot(0),
            output: Ref::Slot(0),
        }],
    };
    let routine = class.store.routine(&routine);
    steps.push(Step::Call { routine, slots: vec![buffer], frame: None });
}
