//! Names of steps and instructions, for messages and traces.

use ir::plan::Place;
use ir::program::{Exchange, Feed, Group, Instruction, Program, Step};
use kernels::Kernel;

use crate::trace::Span;

use super::buffer_of;

/// Where a rank is: ``step 12 (call `block`), instruction 3 (all-reduce over tp)``.
pub(super) fn place(
    program: &Program,
    kernels: &[Kernel],
    steps: &[Step],
    at: (usize, Option<usize>),
) -> String {
    let (index, instruction) = at;
    let Some(step) = steps.get(index) else { return "before its first step".to_owned() };
    let outer = format!("step {index} ({})", step_name(program, step));
    match instruction.and_then(|i| Some((i, instruction_name(program, kernels, step, i)?))) {
        Some((index, name)) => format!("{outer}, instruction {index} ({name})"),
        None => outer,
    }
}

/// The name of what a span timed.
pub(super) fn span(program: &Program, kernels: &[Kernel], steps: &[Step], span: &Span) -> String {
    let Some(step) = steps.get(span.step) else { return String::new() };
    let inner = span.instruction.and_then(|i| instruction_name(program, kernels, step, i));
    inner.unwrap_or_else(|| step_name(program, step))
}

fn step_name(program: &Program, step: &Step) -> String {
    match step {
        Step::Feed { feed, microbatch, .. } => {
            let what = match feed {
                Feed::Tokens => "tokens",
                Feed::Labels => "labels",
                Feed::Documents => "documents",
                Feed::Key { .. } => "key",
                Feed::Scalars => "scalars",
                Feed::Position => "position",
                Feed::Last => "last",
            };
            format!("feed {what} of micro-batch {microbatch}")
        }
        Step::Call { routine, .. } => format!("call `{}`", program.routines[*routine].name),
        Step::Send { to, buffer } => {
            format!("send `{}` to stage {to}", buffer_of(program, *buffer).name)
        }
        Step::Receive { from, buffer } => {
            format!("receive `{}` from stage {from}", buffer_of(program, *buffer).name)
        }
        Step::Move { from, to } => {
            let [from, to] = [from, to].map(|id| buffer_of(program, *id));
            let away = [from, to].into_iter().filter_map(|buffer| program.place_of(buffer));
            let away = away.filter(|place| *place != Place::Device).map(Place::name);
            let (verb, place) = match program.place_of(from) {
                Some(Place::Device) => ("offload", "to"),
                Some(Place::Host | Place::Disk) | None => ("fetch", "from"),
            };
            let away = away.collect::<Vec<_>>().join(", ");
            format!("{verb} `{}` {place} the {away}", from.name)
        }
        Step::Await { buffer } => format!("await `{}`", buffer_of(program, *buffer).name),
    }
}

fn instruction_name(
    program: &Program,
    kernels: &[Kernel],
    step: &Step,
    index: usize,
) -> Option<String> {
    let Step::Call { routine, .. } = step else { return None };
    Some(match program.routines[*routine].instructions.get(index)? {
        Instruction::Launch { kernel, .. } => {
            let name = kernels.get(*kernel).map_or("missing", kernel_name);
            format!("launch {name} k{kernel}")
        }
        Instruction::Collective { exchange, group, .. } => {
            format!("{} over {}", exchange_name(exchange), group_name(group))
        }
    })
}

fn exchange_name(exchange: &Exchange) -> String {
    match exchange {
        Exchange::AllReduce(combiner) => format!("all-reduce {}", combiner.name()),
        Exchange::AllGather { .. } => "all-gather".to_owned(),
        Exchange::ReduceScatter { .. } => "reduce-scatter".to_owned(),
        Exchange::AllToAll { .. } => "all-to-all".to_owned(),
        Exchange::Dispatch(_) => "dispatch".to_owned(),
        Exchange::Combine(_) => "combine".to_owned(),
    }
}

fn group_name(group: &Group) -> String {
    match group {
        Group::Axis(axis) => axis.to_string(),
        Group::Data => "dp and cp".to_owned(),
        Group::Shards(count) => format!("{count} neighbours along dp"),
        Group::Copies(count) => format!("ranks along dp, {count} apart"),
        Group::Strided { count, stride } => format!("{count} ranks along dp, {stride} apart"),
        Group::Experts(count) => format!("{count} ranks along tp and dp"),
        Group::Stages(stages) => {
            let list: Vec<String> = stages.iter().map(usize::to_string).collect();
            format!("stages {}", list.join(", "))
        }
        Group::World => "all ranks".to_owned(),
    }
}

fn kernel_name(kernel: &Kernel) -> &'static str {
    match kernel {
        Kernel::Product(_) => "product",
        Kernel::Products(_) => "products",
        Kernel::Rows(_) => "rows",
        Kernel::Attention(_) => "attention",
        Kernel::AttentionBwd(_) => "attention-gradient",
        Kernel::Experts(_) => "experts",
        Kernel::ExpertsBwd(_) => "experts-gradient",
        Kernel::Gather(_) => "gather",
        Kernel::ScatterAdd(_) => "scatter-add",
        Kernel::Replace(_) => "replace",
        Kernel::Lines(l) => l.how.name(),
        Kernel::Rope(_) => "rope",
        Kernel::Copy(_) => "copy",
        Kernel::Place(_) => "place",
        Kernel::Take(_) => "take",
        Kernel::Fill(_) => "fill",
    }
}
