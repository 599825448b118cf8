//! The block machine: runs block programs over registers of a thousand lanes.
//!
//! Interpretation costs one dispatch per instruction and block, so that the arithmetic runs at the
//! speed of compiled loops while registers stay in the first-level cache. Reading order: [`plan`]
//! decides, [`step`] executes one instruction, [`lanes`], [`functions`] and [`convert`] are its
//! loops. [`whole`] runs the programs of integers of 64 bits.

mod convert;
mod functions;
mod lanes;
mod plan;
mod step;
pub(super) mod whole;

use super::Cpu;
use super::scratch::{Bump, lines_of};
use super::vector::{Job, Scalar, Vector};
use super::view::{Shared, View, ViewMut};
use crate::rows::{Output, Rows};
use plan::Plan;
pub(super) use step::Machine;

/// Bytes of scratch per thread, and those shared by the tasks of a launch.
pub(super) fn scratch<S: Scalar>(rows: &Rows) -> [usize; 2] {
    // Work in place needs the most registers.
    let plan = Plan::new(rows, &vec![true; rows.outputs.len()]);
    [thread_bytes::<S>(&plan), shared_bytes::<S>(&plan)]
}

fn thread_bytes<S>(plan: &Plan) -> usize {
    lines_of::<S>(plan.lane_registers * plan.lane_stride())
        + lines_of::<S>(plan.row_registers * plan.row_stride())
        + lines_of::<*const S>(plan.places.len())
}

fn shared_bytes<S>(plan: &Plan) -> usize {
    let bytes = |output: &Output| match output {
        Output::Store { .. } => 0,
        Output::ColSum { .. } => lines_of::<S>(plan.tasks[0] * plan.rows.cols),
        Output::TotalSum { .. } => lines_of::<f64>(plan.tasks[0] * plan.tasks[1]),
    };
    plan.rows.outputs.iter().map(bytes).sum()
}

/// Where an output goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sink<S> {
    /// Stored by the block.
    Memory(Shared<u8>),
    /// Partial sums per row task: `[tasks, cols]`.
    Columns(Shared<S>),
    /// Partial sums per task.
    Total(Shared<f64>),
}

/// The plans of a kernel, by which outputs share memory with another argument. They are made at
/// the first launch that needs them.
#[derive(Debug, Default)]
pub(super) struct Plans(Vec<(Vec<bool>, Plan<'static>)>);

impl Plans {
    fn of(&mut self, rows: &Rows, aliased: Vec<bool>) -> &Plan<'static> {
        let found = self.0.iter().position(|(key, _)| *key == aliased);
        let at = found.unwrap_or_else(|| {
            let plan = Plan::new(rows, &aliased).into_owned();
            self.0.push((aliased, plan));
            self.0.len() - 1
        });
        &self.0[at].1
    }
}

/// Runs a block program that computes in `S`.
pub(super) fn execute<S: Scalar>(
    cpu: &Cpu,
    rows: &Rows,
    plans: &mut Plans,
    inputs: &[View],
    outputs: &[ViewMut],
) {
    if rows.rows * rows.cols == 0 {
        return clear_sums::<S>(rows, outputs);
    }
    let plan = plans.of(rows, aliased(inputs, outputs));
    let mut buffer = super::lock(&cpu.shared);
    let sinks = sinks::<S>(plan, &mut buffer.bump(shared_bytes::<S>(plan)), outputs);
    let inputs: Vec<Shared<u8>> =
        inputs.iter().map(|i| Shared::new(i.start::<u8>().cast_mut())).collect();
    let tasks = plan.tasks[0] * plan.tasks[1];
    let cycles = (rows.rows * rows.cols * rows.instrs.len()) as u64 / 4;
    cpu.for_each(tasks, cycles, thread_bytes::<S>(plan), |task, scratch| {
        cpu.isa.run(Task { plan, inputs: &inputs, sinks: &sinks, task, scratch });
    });
    combine(plan, &sinks, outputs);
}

/// Which outputs share memory with another argument.
fn aliased(inputs: &[View], outputs: &[ViewMut]) -> Vec<bool> {
    let range = |start: *const u8, len: usize| (start as usize, start as usize + len);
    let spans = |index: usize| range(outputs[index].start::<u8>(), outputs[index].len());
    let overlap = |a: (usize, usize), b: (usize, usize)| a.0 < b.1 && b.0 < a.1;
    let is_aliased = |index: usize| {
        let others = (0..outputs.len()).filter(|&o| o != index).map(spans);
        let inputs = inputs.iter().map(|i| range(i.start::<u8>(), i.len()));
        others.chain(inputs).any(|other| overlap(other, spans(index)))
    };
    (0..outputs.len()).map(is_aliased).collect()
}

fn sinks<S: Scalar>(plan: &Plan, shared: &mut Bump, outputs: &[ViewMut]) -> Vec<Sink<S>> {
    let sink = |(output, view): (&Output, &ViewMut)| match output {
        Output::Store { .. } => Sink::Memory(Shared::new(view.start::<u8>())),
        Output::ColSum { .. } => {
            Sink::Columns(Shared::new(shared.zeros::<S>(plan.tasks[0] * plan.rows.cols)))
        }
        Output::TotalSum { .. } => {
            Sink::Total(Shared::new(shared.zeros::<f64>(plan.tasks[0] * plan.tasks[1])))
        }
    };
    plan.rows.outputs.iter().zip(outputs).map(sink).collect()
}

/// Sums over nothing are zero.
fn clear_sums<S: Scalar>(rows: &Rows, outputs: &[ViewMut]) {
    for (output, view) in rows.outputs.iter().zip(outputs) {
        let len = match output {
            Output::ColSum { accumulate: false, .. } => rows.cols,
            Output::TotalSum { accumulate: false, .. } => 1,
            Output::Store { .. } | Output::ColSum { .. } | Output::TotalSum { .. } => 0,
        };
        // SAFETY: the argument was checked to hold the sums.
        unsafe { std::slice::from_raw_parts_mut(view.start::<S>(), len) }.fill(S::ZERO);
    }
}

/// Adds the partial sums in ascending order of tasks.
fn combine<S: Scalar>(plan: &Plan, sinks: &[Sink<S>], outputs: &[ViewMut]) {
    for ((output, sink), view) in plan.rows.outputs.iter().zip(sinks).zip(outputs) {
        let target = view.start::<S>();
        match (output, sink) {
            (Output::ColSum { accumulate, .. }, Sink::Columns(partial)) => {
                let cols = plan.rows.cols;
                // SAFETY: the argument holds `cols` sums, the buffer as many per row task; the
                // tasks are over.
                let (target, partial) = unsafe {
                    let partial = std::slice::from_raw_parts(partial.get(), plan.tasks[0] * cols);
                    (std::slice::from_raw_parts_mut(target, cols), partial)
                };
                for (index, part) in partial.chunks_exact(cols).enumerate() {
                    for (sum, &x) in target.iter_mut().zip(part) {
                        *sum = if index == 0 && !accumulate { x } else { *sum + x };
                    }
                }
            }
            (Output::TotalSum { accumulate, .. }, Sink::Total(partial)) => {
                let tasks = plan.tasks[0] * plan.tasks[1];
                // SAFETY: the buffer holds a sum per task, the argument one element.
                unsafe {
                    let start = if *accumulate { (*target).to_f64() } else { 0.0 };
                    let partial = std::slice::from_raw_parts(partial.get(), tasks);
                    *target = S::from_f64(partial.iter().fold(start, |a, b| a + b));
                }
            }
            _ => {}
        }
    }
}

/// A block program that runs on rectangles of its points, each as one piece per row.
#[derive(Debug)]
pub(super) struct Patch(Plan<'static>);

impl Patch {
    /// A program whose outputs are stores and that reduces nothing. Where it is `in_place`, its
    /// first output lies where one of its inputs does.
    pub(super) fn new(rows: &Rows, in_place: bool) -> Patch {
        let aliased = |at: usize| in_place && at == 0;
        let aliased: Vec<bool> = (0..rows.outputs.len()).map(aliased).collect();
        Patch(Plan::of_patches(rows, &aliased).into_owned())
    }

    /// Bytes of scratch of a machine.
    pub(super) fn scratch<S>(rows: &Rows) -> usize {
        // Work in place needs the most registers.
        thread_bytes::<S>(&Plan::of_patches(rows, &vec![true; rows.outputs.len()]))
    }

    /// Where the outputs go.
    pub(super) fn sinks<'a, S>(outputs: impl Iterator<Item = &'a ViewMut<'a>>) -> Vec<Sink<S>> {
        outputs.map(|view| Sink::Memory(Shared::new(view.start::<u8>()))).collect()
    }

    /// What runs it in one task.
    pub(super) fn machine<'a, V: Vector>(
        &'a self,
        inputs: &'a [Shared<u8>],
        sinks: &'a [Sink<V::Scalar>],
        scratch: &mut Bump,
    ) -> Machine<'a, V> {
        Machine::new(&self.0, inputs, sinks, scratch)
    }
}

/// One task of a launch: some rows and columns.
struct Task<'a, S> {
    plan: &'a Plan<'a>,
    inputs: &'a [Shared<u8>],
    sinks: &'a [Sink<S>],
    task: usize,
    scratch: &'a mut Bump,
}

impl<S: Scalar> Job<S> for Task<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let plan = self.plan;
        let mut machine = Machine::<V>::new(plan, self.inputs, self.sinks, self.scratch);
        let [row_tasks, col_tasks] = plan.tasks;
        let (row_task, col_task) = (self.task / col_tasks, self.task % col_tasks);
        let rows = |i: usize| plan.rows.rows * i / row_tasks;
        let blocks = plan.rows.cols.div_ceil(plan.block_cols);
        let cols = |i: usize| (blocks * i / col_tasks * plan.block_cols).min(plan.rows.cols);
        machine.run(
            [rows(row_task), rows(row_task + 1)],
            [cols(col_task), cols(col_task + 1)],
            [row_task, self.task],
        );
    }
}
