//! For tests: programs small enough to be written by hand.

use std::sync::Arc;
use std::time::Duration;

use ir::DType;
use ir::ids::Ids;
use ir::op::Combiner;
use ir::plan::Mesh;
use ir::program::{
    Buffer, BufferId, Contents, Exchange, Feed, Group, Instruction, LocalBuffer, Program, Ref,
    Routine, Step, WeightShard, aligned,
};
use ir::sharding::Axis;
use kernels::{
    Access, BinaryOp, Digit, Fill, Instr, Kernel, Offset, Output, RowInput, Rows, UnaryOp,
};

use crate::trace::Tracing;

use super::{Classes, Options, Session};

/// Tokens of a sample, and elements of the weight.
pub(crate) const SEQ: usize = 8;

/// Options for tests.
pub(crate) fn options() -> Options {
    let deadline = Duration::from_secs(20);
    Options { threads_per_rank: 1, deadline, tracing: Tracing::None, disk: None }
}

/// A session of [`classes`].
pub(crate) fn session(mesh: Mesh, size: usize, count: usize) -> Session {
    Session::start(Arc::new(classes(mesh, size, count)), &options()).unwrap()
}

/// A mesh without stages.
pub(crate) fn mesh(dp: usize, tp: usize) -> Mesh {
    Mesh { pp: 1, dp, tp, ..Mesh::ONE }
}

/// Trains `w[SEQ]` towards the mean of the tokens at each position, by descent with momentum.
///
/// The loss of a token `x` at `j` is `(w[j] - x)² / 2`. Dim 0 of `w` is cut over `tp`.
pub(crate) fn classes(mesh: Mesh, size: usize, count: usize) -> Classes {
    let (programs, kernels, ids) = (Vec::new(), Vec::new(), Ids::default());
    let mut classes = Classes { programs, kernels, mesh, ids };
    for tensor in 0..mesh.tp {
        let program = program(mesh, tensor, size, count, &mut classes.kernels);
        classes.programs.push(program);
    }
    classes
}

/// Adds buffers one after the other.
pub(crate) struct Layout {
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) end: u64,
}

impl Layout {
    pub(crate) fn add(&mut self, contents: Contents, dtype: DType, sizes: &[usize]) -> BufferId {
        let bytes = sizes.iter().product::<usize>() as u64 * dtype.size();
        let name = format!("{contents:?}").to_lowercase();
        let sizes = sizes.to_vec();
        self.buffers.push(Buffer { name, contents, dtype, sizes, bytes, offset: self.end });
        self.end += aligned(bytes);
        BufferId(self.buffers.len() as u32 - 1)
    }
}

fn program(
    mesh: Mesh,
    tensor: usize,
    size: usize,
    count: usize,
    kernels: &mut Vec<Kernel>,
) -> Program {
    let cols = SEQ / mesh.tp;
    let mut layout = Layout { buffers: Vec::new(), end: 0 };
    let w = layout.add(Contents::Param(0), DType::F32, &[cols]);
    let grad = layout.add(Contents::Grad(0), DType::F32, &[cols]);
    let state = Contents::State { weight: 0, index: 0 };
    let momentum = layout.add(state, DType::F32, &[cols]);
    let tokens = layout.add(Contents::Feed(Feed::Tokens), DType::I32, &[size, SEQ]);
    let scalars = layout.add(Contents::Feed(Feed::Scalars), DType::F32, &[5]);
    let key = layout.add(Contents::Feed(Feed::Key { path: 3 }), DType::U32, &[4]);
    let stats = layout.add(Contents::Stats, DType::F32, &[3]);
    let frame = layout.add(Contents::Frame, DType::U32, &[64]);
    let first = kernels.len();
    let mut parts = [true, false].map(|with_grad| loss(size, cols, tensor * cols, with_grad));
    kernels.extend([fill(cols), fill(3), count_in(size * cols), update(cols)]);
    kernels.extend(parts.iter_mut().map(|rows| Kernel::Rows(rows.clone())));
    let launch = |kernel: usize, inputs: &[Ref], outputs: &[Ref]| -> Instruction {
        launch(first + kernel, inputs, outputs)
    };
    let total = |group, elements| all_reduce(group, elements, Ref::Slot(0));
    let (slot, local) = (Ref::Slot, Ref::Local(0));
    let routines = vec![
        routine("zero", 2, [launch(0, &[], &[slot(0)]), launch(1, &[], &[slot(1)])]),
        routine(
            "forward",
            4,
            [launch(4, &[slot(0), slot(1)], &[slot(2), local]), launch(2, &[local], &[slot(3)])],
        ),
        routine(
            "measure",
            3,
            [launch(5, &[slot(0), slot(1)], &[local]), launch(2, &[local], &[slot(2)])],
        ),
        routine("reduce", 1, [total(Group::Axis(Axis::Dp), cols)]),
        routine("sum", 1, [total(Group::World, 3)]),
        routine(
            "update",
            4,
            [launch(3, &[slot(0), slot(1), slot(2), slot(3)], &[slot(1), slot(0)])],
        ),
    ];
    let call = |routine, slots: &[BufferId]| Step::Call {
        routine,
        slots: slots.to_vec(),
        frame: Some(frame),
    };
    let feed = |feed, microbatch, buffer| Step::Feed { feed, microbatch, buffer };
    let mut steps = vec![feed(Feed::Scalars, 0, scalars), call(0, &[grad, stats])];
    let mut evaluate = vec![call(0, &[grad, stats])];
    for microbatch in 0..count {
        let inputs =
            [feed(Feed::Tokens, microbatch, tokens), feed(Feed::Key { path: 3 }, microbatch, key)];
        steps.extend(inputs.clone());
        steps.push(call(1, &[w, tokens, grad, stats]));
        evaluate.extend(inputs);
        evaluate.push(call(2, &[w, tokens, stats]));
    }
    steps.extend([call(3, &[grad]), call(4, &[stats])]);
    steps.push(call(5, &[w, momentum, grad, scalars]));
    evaluate.push(call(4, &[stats]));
    let ranges = vec![(tensor * cols, cols)];
    finish(0, tensor, vec![weight(ranges)], layout, routines, [steps, evaluate])
}

fn weight(ranges: Vec<(usize, usize)>) -> WeightShard {
    WeightShard { name: "w".into(), global: vec![SEQ], ranges, experts: None, owned: true }
}

/// A launch of a kernel without scalars.
pub(crate) fn launch(kernel: usize, inputs: &[Ref], outputs: &[Ref]) -> Instruction {
    let (inputs, outputs) = (inputs.to_vec(), outputs.to_vec());
    Instruction::Launch { kernel, scalars: Vec::new(), inputs, outputs, workspace: None }
}

/// A program from its parts.
pub(crate) fn finish(
    stage: usize,
    tensor: usize,
    weights: Vec<WeightShard>,
    layout: Layout,
    mut routines: Vec<Routine>,
    [steps, evaluate]: [Vec<Step>; 2],
) -> Program {
    for step in steps.iter().chain(&evaluate) {
        if let Step::Call { routine, slots, .. } = step {
            for (slot, id) in routines[*routine].slots.iter_mut().zip(slots) {
                slot.1 = layout.buffers[id.0 as usize].bytes;
            }
        }
    }
    Program {
        name: "tiny".into(),
        stage,
        context: 0,
        tensor,
        weights,
        buffers: layout.buffers,
        arena_bytes: layout.end,
        live_bytes_max: layout.end,
        host_bytes: 0,
        disk_bytes: 0,
        routines,
        steps,
        evaluate,
        entries: Vec::new(),
    }
}

/// A routine with one local of 64 bytes; its slots have the bytes of what is passed.
pub(crate) fn routine(
    name: &str,
    slots: usize,
    instructions: impl IntoIterator<Item = Instruction>,
) -> Routine {
    Routine {
        name: name.into(),
        slots: (0..slots).map(|slot| (format!("s{slot}"), 0)).collect(),
        locals: vec![LocalBuffer { name: "total".into(), bytes: 64, offset: 64, within: None }],
        frame_bytes: 128,
        instructions: instructions.into_iter().collect(),
    }
}

/// A sum of f32 in place.
pub(crate) fn all_reduce(group: Group, elements: usize, value: Ref) -> Instruction {
    Instruction::Collective {
        exchange: Exchange::AllReduce(Combiner::Sum),
        exchanged: DType::F32,
        group,
        dtype: DType::F32,
        elements,
        input: value,
        output: value,
        gates: None,
    }
}

fn fill(len: usize) -> Kernel {
    Kernel::Fill(Fill { len, value: 0.0, dtype: DType::F32 })
}

fn input(dtype: DType, access: Access) -> RowInput {
    RowInput { dtype, access }
}

/// `w tokens -> [grad +] loss`
fn loss(rows: usize, cols: usize, offset: usize, with_grad: bool) -> Rows {
    let row = vec![Digit { div: 1, modulus: rows, stride: SEQ }];
    let tokens = Access { row, col_stride: 1, offset };
    let mut outputs = vec![Output::TotalSum { value: 5, accumulate: false }];
    if with_grad {
        outputs.insert(0, Output::ColSum { value: 2, accumulate: true });
    }
    Rows {
        rows,
        cols,
        dtype: DType::F32,
        inputs: vec![input(DType::F32, Access::per_column()), input(DType::I32, tokens)],
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Load { input: 1 },
            Instr::Binary { op: BinaryOp::Sub, a: 0, b: 1 },
            Instr::Unary { op: UnaryOp::Square, x: 2 },
            Instr::Const { value: 0.5 },
            Instr::Binary { op: BinaryOp::Mul, a: 3, b: 4 },
        ],
        outputs,
    }
}

/// `loss -> stats +`
fn count_in(count: usize) -> Kernel {
    let store =
        Output::Store { value: 8, access: Access::full(1, 3), dtype: DType::F32, accumulate: true };
    Kernel::Rows(Rows {
        rows: 1,
        cols: 3,
        dtype: DType::F32,
        inputs: vec![input(DType::F32, Access::scalar())],
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Index { row: Vec::new(), col_stride: 1, base: Offset::ZERO },
            Instr::Const { value: 1.0 },
            Instr::Binary { op: BinaryOp::Lt, a: 1, b: 2 },
            Instr::Binary { op: BinaryOp::Eq, a: 1, b: 2 },
            Instr::Const { value: count as f64 },
            Instr::Const { value: 0.0 },
            Instr::Select { condition: 4, a: 5, b: 6 },
            Instr::Select { condition: 3, a: 0, b: 7 },
        ],
        outputs: vec![store],
    })
}

/// `w m g scalars -> m w`: `m = m / 2 + g`, `w = w - rate * m`.
fn update(cols: usize) -> Kernel {
    let store = |value| {
        let access = Access::full(1, cols);
        Output::Store { value, access, dtype: DType::F32, accumulate: false }
    };
    let column = || input(DType::F32, Access::full(1, cols));
    Kernel::Rows(Rows {
        rows: 1,
        cols,
        dtype: DType::F32,
        inputs: vec![column(), column(), column(), input(DType::F32, Access::scalar())],
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Load { input: 1 },
            Instr::Load { input: 2 },
            Instr::Load { input: 3 },
            Instr::Const { value: 0.5 },
            Instr::Binary { op: BinaryOp::Mul, a: 1, b: 4 },
            Instr::Binary { op: BinaryOp::Add, a: 5, b: 2 },
            Instr::Binary { op: BinaryOp::Mul, a: 3, b: 6 },
            Instr::Binary { op: BinaryOp::Sub, a: 0, b: 7 },
        ],
        outputs: vec![store(6), store(8)],
    })
}
