//! The end of a replay: every micro-batch was done once, and what outlasts the step is there.

use std::collections::{BTreeMap, HashSet};

use ir::plan::Optimizer;
use ir::program::{Buffer, BufferId, Contents, Feed, Program, ShardRole, Step};

use super::Rank;
use crate::check::memory::Owner;
use crate::check::places::is_split;
use crate::check::traffic::World;
use crate::check::{At, Phase, Setup};
use crate::schedule::Pipeline;

/// A call that reads nothing of any micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::check) struct Unlabelled {
    pub(in crate::check) step: usize,
    /// Whether it takes parameters, as no call does that is not a layer's.
    pub(in crate::check) takes_parameters: bool,
    /// Whether it can belong to a micro-batch.
    pub(in crate::check) has_turn: bool,
}

/// For each step, the micro-batch that it belongs to as a call, were its routine called equally
/// often with the same weights for each, and for each in turn; none before the first data come.
pub(in crate::check) fn turns(
    program: &Program,
    phase: Phase,
    microbatches: usize,
) -> Vec<Option<usize>> {
    let steps = phase.steps(program);
    let brings = |step: &Step| matches!(step, Step::Feed { .. } | Step::Receive { .. });
    let first = steps.iter().position(brings).unwrap_or(0);
    let is_of_weight = |buffer: &&BufferId| {
        let contents = program.buffers.get(buffer.0 as usize).map(|buffer| &buffer.contents);
        let is_whole = matches!(contents, Some(Contents::Param(_) | Contents::Grad(_)));
        is_whole || contents.is_some_and(|contents| contents.passing().is_some())
    };
    let called = |step: &Step| match step {
        Step::Call { routine, slots, .. } => {
            let weights: Vec<BufferId> = slots.iter().filter(is_of_weight).copied().collect();
            Some((*routine, weights))
        }
        Step::Feed { .. }
        | Step::Send { .. }
        | Step::Receive { .. }
        | Step::Move { .. }
        | Step::Await { .. } => None,
    };
    let mut counts: BTreeMap<(usize, Vec<BufferId>), usize> = BTreeMap::new();
    for call in steps[first..].iter().filter_map(called) {
        *counts.entry(call).or_default() += 1;
    }
    let mut made: BTreeMap<(usize, Vec<BufferId>), usize> = BTreeMap::new();
    let turn = |(at, step): (usize, &Step)| {
        let call = called(step)?;
        let count = counts.get(&call).filter(|_| at >= first)?;
        if !count.is_multiple_of(microbatches) {
            return None;
        }
        let before = made.entry(call).or_default();
        *before += 1;
        Some((*before - 1) / (count / microbatches))
    };
    steps.iter().enumerate().map(turn).collect()
}

pub(in crate::check) fn finish<'p>(world: &mut World<'_, 'p>, ranks: &[Rank<'p>]) {
    for rank in ranks {
        check_calls(world, rank);
        check_rest(world, rank);
        check_norm(world, rank);
    }
}

/// Every element of a gradient is counted once in the norm: by the first stage that holds it, and
/// on the tensor-parallel axis by all that have parts of it, or else by the first.
fn check_norm<'p>(world: &mut World<'_, 'p>, rank: &Rank<'p>) {
    if world.setup.phase != Phase::Step {
        return;
    }
    let has_norm = rank.program.buffers.iter().any(|b| b.contents == Contents::Stats);
    for (weight, shard) in rank.program.weights.iter().enumerate() {
        let bytes = rank.gradient_bytes(world.setup, weight);
        let of_rank = |(dim, range): (usize, &(usize, usize))| match shard.experts {
            Some(experts) if experts.dim == dim => range.1 * experts.ranks,
            Some(_) | None => range.1,
        };
        let own = shard.ranges.iter().enumerate().map(of_rank);
        let is_cut = own.ne(shard.global.iter().copied());
        let counts = shard.owned && (is_cut || rank.program.tensor == 0);
        let wanted = if counts { bytes } else { 0 };
        if has_norm && rank.normed[weight] != wanted {
            let at = At { class: rank.class, step: rank.step + weight, instruction: None };
            let (name, found) = (&shard.name, rank.normed[weight]);
            let text = format!("the norm counts {found} of {wanted} bytes of `grads.{name}`");
            world.findings.add_at(world.setup, "E2122", at, text);
        }
    }
}

fn has_gradients(program: &Program) -> bool {
    let is_whole = |buffer: &Buffer| matches!(buffer.contents, Contents::Grad(_));
    program.buffers.iter().any(is_whole) || program.splits_gradients()
}

/// Each micro-batch makes as many calls as the plan gives to the stage, forwards and backwards,
/// in one order, and none of them twice.
fn check_calls<'p>(world: &mut World<'_, 'p>, rank: &Rank<'p>) {
    let setup = world.setup;
    let steps = setup.phase.steps(rank.program);
    let mut calls: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for made in &rank.made {
        calls.entry(made.microbatch).or_default().push(made.step);
    }
    let stage = rank.program.stage;
    let calls_of = |chunk| setup.plan.calls_of(chunk).len();
    let passes = match setup.phase {
        // A stage without weights passes cotangents on.
        Phase::Step if setup.programs.iter().any(has_gradients) => 2,
        Phase::Step | Phase::Evaluate | Phase::Entry(_) => 1,
    };
    let calls_each = setup.plan.chunks_of(stage).map(calls_of).sum::<usize>();
    let wanted = passes * calls_each;
    // Calls with gradients of weights and of activations make both apart.
    let may_split = passes == 2 && Pipeline::of(setup.plan).splits();
    let most = if may_split { 3 * calls_each } else { wanted };
    let routine_of = |step: &usize| match &steps[*step] {
        Step::Call { routine, slots, .. } => Some((*routine, slots)),
        Step::Feed { .. }
        | Step::Send { .. }
        | Step::Receive { .. }
        | Step::Move { .. }
        | Step::Await { .. } => None,
    };
    let mut unlabelled: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
    for call in rank.unlabelled.iter().filter(|call| call.takes_parameters) {
        let routine = routine_of(&call.step).map(|(routine, _)| routine);
        unlabelled.entry(routine).or_default().push(call.step);
    }
    for steps in unlabelled.values() {
        let each = (steps.len() / setup.plan.microbatch_count).max(1);
        for (microbatch, steps) in steps.chunks(each).enumerate() {
            calls.entry(microbatch).or_default().extend(steps);
        }
    }
    // Calls that take neither data nor parameters: layers whose gradient is constant make them,
    // and so does what clears and reduces, so that they may make up the number and need not.
    let spare = rank.unlabelled.iter().filter(|call| call.has_turn && !call.takes_parameters);
    let spare = spare.count() / setup.plan.microbatch_count;
    calls.values_mut().for_each(|steps| steps.sort_unstable());
    let first: Vec<usize> = calls.get(&0).into_iter().flatten().copied().collect();
    let routines = |made: &[usize]| -> Vec<_> {
        made.iter().filter_map(routine_of).map(|call| call.0).collect()
    };
    for microbatch in 0..setup.plan.microbatch_count {
        let made = calls.remove(&microbatch).unwrap_or_default();
        let mut seen = HashSet::new();
        let twice = made.iter().find(|step| !seen.insert(routine_of(step)));
        let text = if let Some(step) = twice {
            format!("micro-batch {microbatch} makes the call of step {step} a second time")
        } else if made.len() > most || made.len() + spare < wanted {
            let count = made.len();
            format!("micro-batch {microbatch} makes {count} calls, where the plan has {wanted}")
        } else if routines(&made) != routines(&first) {
            format!("micro-batch {microbatch} makes other calls than micro-batch 0")
        } else {
            continue;
        };
        let step = twice.or(made.last()).copied().unwrap_or(steps.len());
        let at = At { class: rank.class, step, instruction: None };
        world.findings.add_at(setup, "E2114", at, text);
    }
}

/// What outlasts a phase: a buffer's bytes, and what must have happened to them.
struct Rest {
    bytes: u64,
    /// Whether the phase must have written them.
    is_changed: bool,
    /// Whether they are a sum over micro-batches and ranks.
    is_sum: bool,
}

/// What a phase must leave in a buffer; none where nothing reads it later.
fn rest_of(setup: &Setup<'_>, program: &Program, index: usize) -> Option<Rest> {
    let (phase, buffer) = (setup.phase, &program.buffers[index]);
    let sums = phase == Phase::Step && has_gradients(program);
    let updates = sums && setup.plan.optimizer != Optimizer::None;
    let rest = |is_changed, is_sum| Some(Rest { bytes: buffer.bytes, is_changed, is_sum });
    match buffer.contents {
        Contents::Param(weight) => rest(updates && program.trains(weight), false),
        Contents::Master(_) | Contents::State { .. } | Contents::Scale { .. } => {
            rest(updates, false)
        }
        // Where ranks share the update, the sum over them is in their pieces.
        Contents::Grad(_) if sums => rest(true, !is_split(program)),
        Contents::Shard { role, bucket } => match role {
            ShardRole::Grad if sums => rest(true, true),
            ShardRole::Master | ShardRole::State(_) | ShardRole::Scale(_) => rest(updates, false),
            // What is not trained is not changed.
            ShardRole::Param => {
                let mut members = program.members(bucket).into_iter();
                rest(updates && members.any(|member| program.trains(member.weight)), false)
            }
            ShardRole::Grad | ShardRole::Term | ShardRole::Rounded => None,
        },
        // The norm is that of gradients.
        Contents::Stats if phase == Phase::Evaluate => {
            Some(Rest { bytes: 2 * buffer.dtype.size(), is_changed: true, is_sum: true })
        }
        Contents::Stats if phase == Phase::Step => rest(true, true),
        Contents::Cache(_) => rest(is_written_by(phase, program, buffer), false),
        Contents::Output if gives(phase, program, index) => rest(true, false),
        Contents::Stats
        | Contents::Grad(_)
        | Contents::Gathered { .. }
        | Contents::Term { .. }
        | Contents::Output
        | Contents::Feed(_)
        | Contents::View
        | Contents::Part { .. }
        | Contents::Activation
        | Contents::Frame => None,
    }
}

/// Whether a phase writes into a KV cache: an entry writes into the caches of its own batch size,
/// which is that of its positions.
fn is_written_by(phase: Phase, program: &Program, cache: &Buffer) -> bool {
    let Phase::Entry(entry) = phase else { return false };
    program.entries[entry].steps.iter().any(|step| {
        let Step::Feed { feed: Feed::Position, buffer, .. } = step else { return false };
        program.buffers[buffer.0 as usize].sizes.first() == cache.sizes.first()
    })
}

/// Whether the host reads a buffer after an entry.
fn gives(phase: Phase, program: &Program, index: usize) -> bool {
    match phase {
        Phase::Entry(entry) => program.entries[entry].outputs.contains(&BufferId(index as u32)),
        Phase::Step | Phase::Evaluate => false,
    }
}

/// What a phase leaves is there.
fn check_rest<'p>(world: &mut World<'_, 'p>, rank: &Rank<'p>) {
    let setup = world.setup;
    for term in &rank.unsummed {
        let text = format!("nobody adds `{}`", rank.program.buffers[*term as usize].name);
        let at = At { class: rank.class, step: rank.step, instruction: None };
        world.findings.add_at(setup, "E2113", at, text);
    }
    for (index, buffer) in rank.program.buffers.iter().enumerate() {
        let Some(rest) = rest_of(setup, rank.program, index) else { continue };
        let name = &buffer.name;
        for (range, note) in rank.memory.read(buffer.offset..buffer.offset + rest.bytes) {
            let owner = Owner::Buffer(index as u32);
            let wanted = rank.wanted_sums(setup, index as u32, range.start);
            let (code, text) = match note {
                None => ("E2111", format!("`{name}` is not there")),
                Some(note) if note.owner != owner => {
                    let other = rank.name_of(setup.phase, note.owner);
                    ("E2112", format!("the bytes of `{name}` hold `{other}`"))
                }
                Some(note) if rest.is_changed && note.step.is_none() => {
                    ("E2115", format!("`{name}` is not updated"))
                }
                Some(note) if rest.is_sum && !note.summed.has(wanted) => {
                    ("E2116", format!("`{name}` is not summed over {}", wanted.names()))
                }
                Some(note) if rest.is_sum && !world.labels.is_complete(note.label) => {
                    ("E2113", format!("`{name}` is not the sum over all micro-batches"))
                }
                Some(_) => continue,
            };
            let at = At { class: rank.class, step: rank.step + index, instruction: None };
            world.findings.add_at(setup, code, at, text);
        }
    }
}
