//! Legality of a plan, by code that did not search for it: from the module, the plan and the op
//! table's factors alone.
//!
//! Checked: the mesh and its ranks, stages, micro-batches; that every value has a sharding whose
//! pieces exist and are not empty; that every node can be computed in its results' shardings from
//! its operands'; that weights are stored cut and gradients as their weights; that layers meet in
//! equal shardings; that memory suffices. Plans over groups of devices are checked in [`groups`].

pub mod groups;
mod shardings;

#[cfg(test)]
mod tests;

use ir::plan::{
    ExpertParallel, FunctionPlan, Keep, Mesh, Offload, Optimizer, Purpose, Schedule, Zero,
};
use ir::{Diagnostic, Module, Op, Plan, Span};
use kernels::Bytes;

use crate::cluster::Cluster;
use crate::footprint::{Footprint, fullest};

/// The most diagnostics that one check reports.
const DIAGNOSTICS_MAX: usize = 20;

/// What is illegal about a plan for an entry of a prepared module: at most twenty diagnostics,
/// `E3301` to `E3307`.
pub fn check(module: &Module, entry: &str, plan: &Plan, cluster: &Cluster) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    check_mesh(plan, cluster, &mut found);
    if found.is_empty() {
        return check_anywhere(module, entry, plan);
    }
    found
}

/// What is illegal about a plan for an entry of a prepared module, whatever the cluster is: as
/// [`check`], of any number of devices.
pub fn check_anywhere(module: &Module, entry: &str, plan: &Plan) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    check_stages(module, entry, plan, &mut found);
    check_batch(plan, &mut found);
    check_groups(plan, &mut found);
    check_purpose(plan, &mut found);
    if found.is_empty() {
        shardings::check_shardings(module, entry, plan, &mut found);
    }
    found.truncate(DIAGNOSTICS_MAX);
    found
}

/// What is illegal about a plan whatever the module is: as [`check`], of any number of ranks.
pub fn check_decisions(plan: &Plan) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    if plan.mesh.checked_ranks().is_none_or(|ranks| ranks == 0) {
        found.push(error("E3301", plan, format!("the mesh {} has no ranks", plan.mesh)));
        return found;
    }
    check_chunks(plan, &mut found);
    check_batch(plan, &mut found);
    check_groups(plan, &mut found);
    check_purpose(plan, &mut found);
    found
}

/// Whether the bytes of all classes fit: `E3308` where they do not, with the fullest rank.
pub fn check_memory(
    plan: &Plan,
    footprints: &[Footprint],
    cluster: &Cluster,
) -> Option<Diagnostic> {
    let (need, have) = fullest(footprints, plan.mesh.dp, (cluster.memory(), cluster.nodes));
    if need <= have {
        return None;
    }
    let classes = footprints.iter().enumerate();
    let (class, most) = classes.max_by_key(|(_, footprint)| footprint.total())?;
    // The first data-parallel rank stands for all.
    let rank = plan.mesh.first_of_class(class);
    let holders: Vec<String> =
        most.holders().iter().take(3).map(|(name, bytes)| format!("{name} {bytes}")).collect();
    let total = Bytes(most.total());
    let headline = format!("the plan needs {need} of memory, there is {have}");
    let note = format!("rank {rank} holds {total}: {}", holders.join(", "));
    let help = "leave the plan out, and one that fits is searched for";
    Some(error("E3308", plan, headline).note(note).help(help))
}

fn error(code: &'static str, plan: &Plan, headline: String) -> Diagnostic {
    Diagnostic::error(code, Span::of(format!("the plan of {}", plan.model)), headline)
}

fn check_mesh(plan: &Plan, cluster: &Cluster, found: &mut Vec<Diagnostic>) {
    match (plan.mesh.checked_ranks(), cluster.devices()) {
        (None | Some(0), _) => {
            let headline = format!("the mesh {} has no ranks", plan.mesh);
            found.push(error("E3301", plan, headline));
        }
        (Some(ranks), Some(devices)) if ranks > devices => {
            let headline = format!("the mesh {} has {ranks} ranks", plan.mesh);
            let note = format!("`{}` has {devices} devices", cluster.name);
            found.push(error("E3301", plan, headline).note(note));
        }
        (Some(_), _) => {}
    }
}

fn check_stages(module: &Module, entry: &str, plan: &Plan, found: &mut Vec<Diagnostic>) {
    let is_layer_call = |op: &Op| matches!(op, Op::Call { .. });
    let Some(function) = module.function(entry) else {
        let headline = format!("`{}` has no entry `{entry}`", module.name);
        found.push(error("E3302", plan, headline));
        return;
    };
    let calls = function.nodes.iter().filter(|n| is_layer_call(&n.op)).count();
    check_chunks(plan, found);
    for (name, decisions) in &plan.functions {
        let is_own = |op: &Op| matches!(op, Op::Call { function } if function == name);
        let own = function.nodes.iter().filter(|node| is_own(&node.op)).count();
        if let Some((last, _)) = decisions.exceptions.last_key_value().filter(|(at, _)| **at >= own)
        {
            let headline = format!("call {last} of `{name}` keeps something, of {own} calls");
            found.push(error("E3302", plan, headline));
        }
    }
    let last = plan.stage_ends.last().copied().unwrap_or(0);
    if last != calls {
        let headline = format!("the stages end at call {last}, `{entry}` has {calls} calls");
        found.push(error("E3302", plan, headline));
    }
}

/// Stages have calls, in order, and as many chunks each.
fn check_chunks(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let (ends, pp) = (&plan.stage_ends, plan.mesh.pp);
    let chunks = ends.len() / pp.max(1);
    if ends.is_empty() || !ends.len().is_multiple_of(pp) {
        let headline = format!("{} stages end, the mesh has pp={pp}", ends.len());
        found.push(error("E3302", plan, headline));
    }
    if chunks > 1 && (pp == 1 || plan.schedule != Schedule::OneForwardOneBackward) {
        let headline =
            format!("{chunks} chunks a stage, of pp={pp} under {}", plan.schedule.name());
        let note = "chunks of two or more stages are interleaved by 1F1B alone";
        found.push(error("E3302", plan, headline).note(note));
    }
    if chunks > 1 && !plan.microbatch_count.is_multiple_of(pp) {
        let headline = format!("{} micro-batches for interleaved stages", plan.microbatch_count);
        let note = format!("they go round in groups of pp={pp}");
        found.push(error("E3302", plan, headline).note(note));
    }
    let mut begin = 0;
    for (stage, end) in ends.iter().enumerate() {
        if *end <= begin {
            let headline = format!("stage {stage} has no call");
            let note = format!("it begins at call {begin} and ends before call {end}");
            found.push(error("E3302", plan, headline).note(note));
        }
        begin = *end;
    }
}

/// Ranks that share experts, and that shard what data-parallel ranks hold, are parts of the mesh.
fn check_groups(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let Mesh { dp, cp, tp, .. } = plan.mesh;
    let Zero { stage, shard } = plan.zero;
    let divides = |part: usize, whole: usize| part > 0 && whole.is_multiple_of(part);
    let ep = plan.experts.ep;
    if !divides(ep, dp * cp * tp) {
        let headline = format!("{ep} ranks share experts, of dp · cp · tp = {}", dp * cp * tp);
        found.push(error("E3301", plan, headline));
    } else if plan.mesh.besides_experts(plan.experts).is_none() {
        let headline = format!("{ep} ranks share experts, of dp · cp = {}", dp * cp);
        let note = "in a plan, ranks that share experts are none of tp, or all with `etp=1`";
        found.push(error("E3301", plan, headline).note(note));
    }
    let shares_equally = !plan.experts.takes_tp || divides(tp, plan.seq / cp.max(1));
    if !shares_equally {
        let headline =
            format!("ranks of tp={tp} share experts, and not {} tokens equally", plan.seq / cp);
        found.push(error("E3301", plan, headline));
    }
    let pieces = plan.context.pieces(cp);
    if !plan.seq.is_multiple_of(pieces) {
        let headline = format!("cp={cp} shares {pieces} equal pieces of {} tokens", plan.seq);
        found.push(error("E3301", plan, headline));
    }
    if stage > 3 || (shard > 0 && !divides(shard as usize, dp * cp)) {
        let headline = format!("ZeRO {stage} over {shard} of dp · cp = {} ranks", dp * cp);
        found.push(error("E3301", plan, headline));
    }
}

/// A plan of inference takes no decision of training.
fn check_purpose(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let Purpose::Inference { buckets } = &plan.purpose else { return };
    let keeps = |of: &FunctionPlan| of.keep != Keep::None || !of.exceptions.is_empty();
    let taken = [
        (plan.microbatch_count != 1, "several micro-batches"),
        (plan.mesh.cp != 1, "context parallelism"),
        (plan.experts != ExpertParallel::NONE, "ranks that share experts"),
        (plan.stage_ends.len() > plan.mesh.pp, "interleaved stages"),
        (plan.zero != Zero::default(), "ZeRO"),
        (plan.offload != Offload::default(), "offload"),
        (plan.optimizer != Optimizer::None, "an optimizer"),
        (plan.clip.is_some(), "clipped gradients"),
        (plan.lora.is_some(), "adapters"),
        (plan.functions.values().any(keeps), "values for a backward pass"),
    ];
    for (_, what) in taken.iter().filter(|(is_taken, _)| *is_taken) {
        found.push(error("E3309", plan, format!("a plan of inference is none with {what}")));
    }
    if let Some(longest) = buckets.iter().max().filter(|longest| **longest > plan.seq) {
        let headline =
            format!("a prefill bucket of {longest} tokens exceeds KV caches of {}", plan.seq);
        found.push(error("E3309", plan, headline));
    }
}

fn check_batch(plan: &Plan, found: &mut Vec<Diagnostic>) {
    let (size, count) = (plan.microbatch_size, plan.microbatch_count);
    if size == 0 || count == 0 {
        let headline = format!("{count} micro-batches of {size} samples are no batch");
        found.push(error("E3303", plan, headline));
    }
}
