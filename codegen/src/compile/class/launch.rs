//! Calls of routines of one launch or one collective, which are around those of layers.

use ir::DType;
use ir::op::Combiner;
use ir::program::{BufferId, Exchange, Group, Instruction, LocalBuffer, Ref, Routine, Step};
use kernels::Kernel;
use kernels::kernel::Fill;

use super::Class;
use crate::executable::executed_target;
use crate::lower::WORKSPACE;

/// Appends a call of a routine of one launch. What has a workspace runs after the last micro-batch.
pub(super) fn launch(
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
    let workspace = class.table.workspace(kernel, executed_target(class.plan));
    let after = class.clock.end() + 1;
    let frame = (workspace > 0).then(|| class.store.update_frame(workspace, after));
    let local =
        LocalBuffer { name: WORKSPACE.to_owned(), bytes: workspace, offset: 0, within: None };
    let slot = |at: usize| Ref::Slot(at as u32);
    let routine = Routine {
        name: name.to_owned(),
        slots: bytes.iter().map(|b| (name.to_owned(), *b)).collect(),
        locals: frame.map(|_| local).into_iter().collect(),
        frame_bytes: workspace,
        instructions: vec![Instruction::Launch {
            kernel,
            scalars: Vec::new(),
            inputs: (0..inputs.len()).map(slot).collect(),
            outputs: (inputs.len()..inputs.len() + outputs.len()).map(slot).collect(),
            workspace: frame.map(|_| Ref::Local(0)),
        }],
    };
    let routine = class.store.routine(&routine);
    let slots = inputs.iter().chain(outputs).copied().collect();
    steps.push(Step::Call { routine, slots, frame });
}

/// Appends what gives all elements of a buffer one value.
pub(super) fn fill(
    class: &mut Class<'_>,
    buffer: BufferId,
    (dtype, len): (DType, usize),
    value: f64,
    steps: &mut Vec<Step>,
) {
    let kernel = Kernel::Fill(Fill { len, value, dtype });
    launch(class, "fill", kernel, &[], &[buffer], steps);
}

/// Appends a sum over ranks, of elements of a type in memory and one between ranks.
pub(super) fn all_reduce(
    class: &mut Class<'_>,
    buffer: BufferId,
    ([dtype, exchanged], elements): ([DType; 2], usize),
    group: Group,
    steps: &mut Vec<Step>,
) {
    let bytes = elements as u64 * dtype.size();
    let collective = Instruction::Collective {
        exchange: Exchange::AllReduce(Combiner::Sum),
        group,
        dtype,
        exchanged,
        elements,
        input: Ref::Slot(0),
        output: Ref::Slot(0),
        gates: None,
    };
    call_collective(class, "reduce", &[(buffer, bytes)], collective, steps);
}

/// Appends a call of a routine of one collective, whose slots are buffers with their bytes.
fn call_collective(
    class: &mut Class<'_>,
    name: &str,
    slots: &[(BufferId, u64)],
    collective: Instruction,
    steps: &mut Vec<Step>,
) {
    let routine = Routine {
        name: name.to_owned(),
        slots: slots.iter().map(|(_, bytes)| ("x".to_owned(), *bytes)).collect(),
        locals: Vec::new(),
        frame_bytes: 0,
        instructions: vec![collective],
    };
    let routine = class.store.routine(&routine);
    let slots = slots.iter().map(|(buffer, _)| *buffer).collect();
    steps.push(Step::Call { routine, slots, frame: None });
}

/// Appends a collective of ranks that have one copy of what is split, from one buffer to another,
/// with the elements of each: their type, and the one as which they are exchanged.
pub(super) fn exchange_pieces(
    class: &mut Class<'_>,
    (name, [dtype, exchanged]): (&str, [DType; 2]),
    (exchange, group): (Exchange, Group),
    [from, to]: [BufferId; 2],
    elements: [usize; 2],
    steps: &mut Vec<Step>,
) {
    let bytes = elements.map(|elements| elements as u64 * dtype.size());
    let collective = Instruction::Collective {
        exchange,
        group,
        dtype,
        exchanged,
        elements: elements[0],
        input: Ref::Slot(0),
        output: Ref::Slot(1),
        gates: None,
    };
    call_collective(class, name, &[(from, bytes[0]), (to, bytes[1])], collective, steps);
}
