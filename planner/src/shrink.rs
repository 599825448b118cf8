//! A plan in small: the same decisions on a few ranks, so that a plan for a cluster is executed on
//! one machine and compared with one device.
//!
//! Axes have two ranks each, stages two chunks where they are interleaved, a step a few
//! micro-batches. Shardings stay as they are, since fewer ranks can always be cut as more are.
//! Stages that are uneven stay uneven.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use ir::plan::{FunctionPlan, Keep, Offload, Place, Zero};
use ir::precision::Precision;
use ir::{Diagnostic, ExpertParallel, Mesh, Plan, Span};

/// Micro-batches of a step at most, and samples of one. Chosen: a pipeline of two stages is full
/// for a while, and samples are told apart.
const MICROBATCHES: usize = 4;
const SAMPLES: usize = 2;

/// What a plan decides that one device does not do.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Trait(String);

impl fmt::Display for Trait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A plan in small.
#[derive(Clone, Debug, PartialEq)]
pub struct Shrunk {
    /// The plan.
    pub plan: Plan,
    /// What it decides as the whole one does.
    pub kept: Vec<Trait>,
    /// What it does not.
    pub lost: Vec<Trait>,
}

/// A plan in small, for a module whose entry makes these calls of layers: the plan's own, or one of
/// the same layers that is called less often. The plan is one of which
/// [`check_decisions`](crate::check::check_decisions) finds nothing wrong.
///
/// # Errors
/// `E3302` for fewer calls than stages.
pub fn shrink(plan: &Plan, functions: &[&str]) -> Result<Shrunk, Diagnostic> {
    let calls = functions.len();
    let (mesh, shard) = mesh(plan);
    if calls < mesh.pp {
        let headline = format!("{calls} calls of layers cannot be in {} stages", mesh.pp);
        let found = Diagnostic::error("E3302", Span::of(&plan.model), headline);
        return Err(found.help("use a model with more layers"));
    }
    let chunks_per_stage = plan.chunks_per_stage().min(2).min(calls / mesh.pp);
    let chunks = mesh.pp * chunks_per_stage;
    let is_interleaved = chunks_per_stage > 1;
    let most =
        if plan.microbatch_count < MICROBATCHES && is_interleaved { mesh.pp } else { MICROBATCHES };
    let small = Plan {
        mesh,
        microbatch_size: plan.microbatch_size.min(SAMPLES),
        microbatch_count: plan.microbatch_count.min(most),
        stage_ends: stage_ends(plan, chunks, calls),
        experts: experts(plan, mesh),
        zero: Zero { shard, ..plan.zero },
        functions: functions_of(plan, functions),
        predictions: Default::default(),
        ..plan.clone()
    };
    let [whole, own] = [plan, &small].map(traits);
    let (kept, lost) = whole.into_iter().partition(|of| own.contains(of));
    Ok(Shrunk { plan: small, kept, lost })
}

/// The mesh in small, and the ranks over which ZeRO shards there: where these are some of those
/// with copies, or some of these share experts, there are four.
fn mesh(plan: &Plan) -> (Mesh, u32) {
    let two = |size: usize| size.min(2);
    let Mesh { pp, dp, cp, tp, order } = plan.mesh;
    let shard = plan.zero.shard as usize;
    let is_partial = shard > 1 && shard < dp * cp;
    let sharers = plan.experts.data_ranks(plan.mesh);
    let has_copies = sharers > 1 && sharers < dp * cp;
    let of_experts = sharers_in_small(plan);
    let copies = match (is_partial, has_copies) {
        (true, _) | (_, true) if two(cp) == 1 => 2 * of_experts.max(2),
        (false, false) if two(cp) == 1 && sharers > 1 => of_experts,
        _ => two(dp),
    };
    let mesh = Mesh { pp: two(pp), dp: dp.min(copies), cp: two(cp), tp: two(tp), order };
    let shard = if is_partial { 2 } else { shard.min(mesh.dp * mesh.cp) };
    (mesh, if plan.zero.shard == 0 { 0 } else { shard as u32 })
}

/// Of the ranks that hold the same other weights, those that share experts in small: as few as
/// divide what is shared, so that they divide the experts.
fn sharers_in_small(plan: &Plan) -> usize {
    let sharers = plan.experts.data_ranks(plan.mesh);
    (2..=sharers).find(|few| sharers.is_multiple_of(*few)).unwrap_or(1)
}

/// How ranks of the mesh in small share experts.
fn experts(plan: &Plan, mesh: Mesh) -> ExpertParallel {
    let (sharers, takes_tp) = (sharers_in_small(plan), plan.experts.takes_tp);
    ExpertParallel { ep: if takes_tp { mesh.tp * sharers } else { sharers }, takes_tp }
}

/// What is decided of functions, for the calls that there are of each: where calls keep different
/// things, as large a share of them does.
fn functions_of(plan: &Plan, calls: &[&str]) -> BTreeMap<String, FunctionPlan> {
    let of_plan = plan.stage_ends.last().copied().unwrap_or(calls.len());
    let of = |(name, planned): (&String, &FunctionPlan)| {
        let own = calls.iter().filter(|call| **call == name).count();
        // Layers that do not repeat are called as often in both.
        let all = (of_plan + own).saturating_sub(calls.len()).max(1);
        let mut planned = planned.clone();
        if own < all {
            let exceptions = planned.exceptions.into_iter();
            planned.exceptions = exceptions.map(|(call, keep)| (call * own / all, keep)).collect();
        }
        (name.clone(), planned)
    };
    plan.functions.iter().map(of).collect()
}

/// The ends of chunks: those of the plan, as many of them to one, on as many calls.
fn stage_ends(plan: &Plan, chunks: usize, calls: usize) -> Vec<usize> {
    let (all, of_plan) = (&plan.stage_ends, plan.stage_ends.last().copied().unwrap_or(calls));
    let mut ends: Vec<usize> = Vec::with_capacity(chunks);
    for chunk in 1..=chunks {
        let end = all.get(chunk * all.len() / chunks - 1).copied().unwrap_or(of_plan);
        // No chunk is empty.
        let least = ends.last().map_or(1, |before| before + 1);
        ends.push((end * calls / of_plan.max(1)).clamp(least, calls - (chunks - chunk)));
    }
    if is_uneven(all) && !is_uneven(&ends) && ends.len() > 1 {
        // Chunks of one call each are as uneven as they can be.
        let next = ends[1] - ends[0];
        ends[0] += usize::from(next > 1);
    }
    ends
}

/// Whether chunks have unequal numbers of calls.
fn is_uneven(ends: &[usize]) -> bool {
    let starts = std::iter::once(&0).chain(ends);
    let mut sizes = ends.iter().zip(starts).map(|(end, start)| end - start);
    let first = sizes.next();
    sizes.any(|size| Some(size) != first)
}

fn traits(plan: &Plan) -> BTreeSet<Trait> {
    let Mesh { pp, dp, cp, tp, order } = plan.mesh;
    let mut all = BTreeSet::new();
    let mut add = |is_there: bool, name: String| {
        if is_there {
            all.insert(Trait(name));
        }
    };
    for (name, size) in [("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp), ("ep", plan.experts.ep)] {
        add(size > 1, name.to_owned());
    }
    add(order != Mesh::ONE.order, "order".to_owned());
    add(plan.chunks_per_stage() > 1, "vpp".to_owned());
    add(pp > 1 && is_uneven(&plan.stage_ends), "uneven stages".to_owned());
    add(pp > 1, format!("schedule={}", plan.schedule.name()));
    add(plan.microbatch_count > 1, "several micro-batches".to_owned());
    add(plan.microbatch_size > 1, "several samples".to_owned());
    let Zero { stage, shard } = plan.zero;
    let copies = dp * cp;
    add(stage > 0 && copies > 1, format!("zero={stage}"));
    let is_partial = stage > 0 && shard > 1 && (shard as usize) < copies;
    add(is_partial, "shards over some ranks".to_owned());
    add(plan.experts.takes_tp, "etp=1".to_owned());
    let sharers = plan.experts.data_ranks(plan.mesh);
    add(plan.experts.ep > 1 && sharers < copies, "copies of experts".to_owned());
    for (what, place) in Offload::places(&plan.offload) {
        add(place != Place::Device, format!("offload-{what}={}", place.name()));
    }
    for function in plan.functions.values() {
        let keeps = function.exceptions.values().chain([&function.keep]);
        for keep in keeps.filter(|keep| **keep != Keep::Full) {
            add(true, format!("keep {}", keep.name()));
        }
        add(!function.exceptions.is_empty(), "keep by call".to_owned());
        add(!function.shardings.is_empty(), "shardings".to_owned());
    }
    add(plan.precision != Precision::uniform(plan.dtype()), "precision".to_owned());
    all
}

#[cfg(test)]
mod tests;
