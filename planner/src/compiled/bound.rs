//! What a candidate takes at least: seconds and bytes, from the prices of its calls alone.
//!
//! Legend: m micro-batches, W the work of a node, C its cores.
//!
//! A step has two phases, which the reduction of the loss over all ranks parts. In the first, a
//! stage works on m micro-batches after the stages before it have worked on their first chunk of
//! one: that chain is one bound, and W / C is another. In the second, gradients are reduced and
//! parameters updated: again a chain, and W / C. The update is charged its largest region alone.

use std::collections::BTreeSet;

use codegen::calls::{Calls, Operand, Weight};
use ir::plan::{Offload, Optimizer, Place};
use ir::precision::Precision;
use ir::program::Group;
use ir::{Axis, DType, ExpertParallel, Mesh};

use super::keys::{CallPrice, Key};
use super::{Candidate, Job};
use crate::cluster::Memory;
use crate::link::Link;
use crate::price::Prices;

/// What a stage takes at least.
#[derive(Clone, Copy, Debug, Default)]
struct Stage {
    /// Kernels and collectives of the work on one micro-batch, on the first rank along `cp` and
    /// `tp`.
    seconds: f64,
    /// Of `seconds`, those of the first chunk.
    first_s: f64,
    /// Kernels of the same on all tensor-parallel ranks.
    compute_s: f64,
    /// Clearing, summing and updating on one rank.
    update_s: f64,
    /// Copying states of the optimizer to the device and back.
    moved_s: f64,
    /// The reduction of gradients.
    reduction_s: f64,
    /// Bytes of the fullest rank.
    bytes: u64,
    /// Bytes of all tensor-parallel ranks with one part of the samples.
    bytes_of_all: u64,
}

/// A lower bound of the time and of the bytes of a candidate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    /// Seconds of a step.
    pub(super) seconds: f64,
    /// Bytes of the fullest place.
    pub(super) need: u64,
    /// The bytes that it has.
    pub(super) have: u64,
}

impl Bound {
    /// Whether the candidate may fit.
    pub(super) fn fits(&self) -> bool {
        self.need <= self.have
    }
}

/// The weights that calls read, and what a tensor-parallel rank has of each at least.
pub(super) struct Weights {
    /// For each call, the weights.
    of_call: Vec<Vec<usize>>,
    /// For each weight, elements of the smallest piece.
    local: Vec<usize>,
    /// For each weight, whether ranks share it by experts.
    is_expert: Vec<bool>,
    /// For each weight, whether it has two dims or more.
    is_matrix: Vec<bool>,
}

impl Weights {
    /// The weights of an entry's calls, split as a key says; `experts` names those of experts.
    pub(super) fn new(calls: &Calls, key: Key, experts: &BTreeSet<String>) -> Weights {
        let Key { experts: sharing, tp, .. } = key;
        let ExpertParallel { ep, takes_tp } = sharing;
        let is_expert = |w: &Weight| ep > 1 && experts.contains(&w.name);
        let weight = |o: &Operand| if let Operand::Weight(at) = o { Some(*at) } else { None };
        let sizes = || calls.weights.iter().map(|w| &w.sizes);
        // Of what is not cut, nobody knows here whether it lies in one region.
        let local = |w: &Weight| {
            let all: usize = w.sizes.iter().product();
            match is_expert(w) {
                true if takes_tp => all / ep,
                true if is_cut(&w.sizes, tp) => all / tp / ep,
                false if is_cut(&w.sizes, tp) => all / tp,
                true | false => 0,
            }
        };
        let of_call = |c: &codegen::calls::Call| c.operands.iter().filter_map(weight).collect();
        Weights {
            of_call: calls.calls.iter().map(of_call).collect(),
            local: calls.weights.iter().map(local).collect(),
            is_expert: calls.weights.iter().map(is_expert).collect(),
            is_matrix: sizes().map(|s| s.len() >= 2).collect(),
        }
    }
}

/// Whether a weight of these sizes is stored cut over `tp`, or whole on the only rank.
fn is_cut(sizes: &[usize], tp: usize) -> bool {
    tp == 1 || (sizes.len() >= 2 && sizes.iter().any(|size| *size >= tp))
}

/// The bound of a candidate whose calls have these prices.
pub(super) fn bound(
    job: &Job<'_>,
    weights: &Weights,
    prices: &[CallPrice],
    candidate: &Candidate,
) -> Bound {
    let rates = Prices::new(job.cluster, candidate.mesh);
    let stages = stages(job, weights, prices, candidate, &rates);
    let (need, have) = bytes(job, candidate.mesh, &stages);
    Bound { seconds: seconds(job, candidate, &stages, &rates), need, have }
}

fn stages(
    job: &Job<'_>,
    weights: &Weights,
    prices: &[CallPrice],
    candidate: &Candidate,
    rates: &Prices<'_>,
) -> Vec<Stage> {
    let Mesh { pp, tp, .. } = candidate.mesh;
    let [whole, shared] = bytes_of_weight(job, candidate);
    // The ranks that hold the same weights, and those that share the update of one copy: of all
    // weights but those of experts, and of these.
    let sharers = candidate.experts.data_ranks(candidate.mesh);
    let groups = [Group::Data, Group::Copies(sharers)].map(|group| rates.group(&group));
    let shares = groups.map(|(_, ranks)| if candidate.zero.stage > 0 { ranks } else { 1 });
    // For each weight, one more than the last stage that has it.
    let (mut holder, pipeline) = (vec![0; weights.local.len()], candidate.pipeline(job));
    let mut stages = Vec::with_capacity(pp);
    for at in 0..pp {
        let mut stage = Stage::default();
        let (mut held, mut updated, mut fetched_s) = ([0; 2], [0; 2], 0.0);
        let mut kept = vec![0; candidate.chunks()];
        let mut kept_of_all = kept.clone();
        for (chunk, [from, to]) in candidate.calls_of(at).into_iter().enumerate() {
            for (price, read) in prices[from..to].iter().zip(&weights.of_call[from..to]) {
                // Ranks that share gradients add none of their own.
                let added_s = if candidate.zero.stage > 1 { price.added_s } else { 0.0 };
                stage.seconds += price.seconds - added_s;
                stage.compute_s += price.compute_s - added_s * tp as f64;
                if candidate.offload.activations != Place::Disk {
                    kept[chunk] += price.kept_bytes;
                    kept_of_all[chunk] += price.kept_bytes_of_all;
                }
                for weight in read {
                    if holder[*weight] == at + 1 {
                        continue;
                    }
                    let which = usize::from(weights.is_expert[*weight]);
                    held[which] += weights.local[*weight];
                    if holder[*weight] == 0 && weights.is_matrix[*weight] {
                        updated[which] += weights.local[*weight];
                    }
                    holder[*weight] = at + 1;
                }
            }
            if chunk == 0 {
                stage.first_s = stage.seconds;
            }
        }
        for which in [0, 1].into_iter().filter(|which| held[*which] > 0) {
            let share = (updated[which] / shares[which]) as f64;
            stage.update_s = stage.update_s.max(update_seconds(job, share, rates));
            stage.moved_s += moved_seconds(job, candidate, share, rates);
            let [each, once] = reduction(job, candidate, held[which] as f64, groups[which]);
            stage.seconds += each;
            let own = (held[which] / shares[which]) as u64;
            fetched_s += fetched_seconds(job, candidate, own, rates);
            stage.reduction_s += once;
        }
        stage.seconds = stage.seconds.max(fetched_s);
        let size = |which: usize| {
            let held = held[which] as u64;
            whole * held + shared * held / shares[which] as u64
        };
        let size = size(0) + size(1);
        stage.bytes = size + pipeline.most_held(at, &kept);
        stage.bytes_of_all = size * tp as u64 + pipeline.most_held(at, &kept_of_all);
        stages.push(stage);
    }
    stages
}

/// Seconds in which ranks with the same weights exchange gradients and parameters of `elements`,
/// for each micro-batch and once a step: gradients are scattered once, or after each micro-batch;
/// parameters gathered after the update, or for each micro-batch.
fn reduction(
    job: &Job<'_>,
    candidate: &Candidate,
    elements: f64,
    (link, members): (Link, usize),
) -> [f64; 2] {
    let Precision { parameters, gradients, reduce, .. } = job.precision;
    let scattered = link.reduce_scatter(elements * gradients.size() as f64, members).0;
    let gathered = link.all_gather(elements * parameters.size() as f64, members).0;
    match candidate.zero.stage {
        0 => [0.0, link.all_reduce(elements * reduce.size() as f64, members).0],
        1 => [0.0, scattered + gathered],
        2 => [scattered, gathered],
        _ => [scattered + gathered, 0.0],
    }
}

/// Seconds of the gradient norm and the optimizer update of `elements` contiguous elements.
fn update_seconds(job: &Job<'_>, elements: f64, rates: &Prices<'_>) -> f64 {
    let Precision { parameters, gradients, states, master, .. } = job.precision;
    let rounded = master.map_or(0, |_| parameters.size());
    // What is updated and states are read and written, gradients read, what is rounded written.
    let update = match job.optimizer {
        Optimizer::None => 0,
        Optimizer::Sgd { .. } | Optimizer::AdamW { .. } => {
            let states = job.optimizer.state_count() as u64 * states.size();
            2 * (job.precision.updated().size() + states) + gradients.size() + rounded
        }
    };
    // Gradients are read once more for their norm.
    let moved = [update, gradients.size()];
    let seconds = |moved: &u64| {
        let bytes = *moved as f64 * elements;
        if bytes > 0.0 { bytes / rates.memory_rate_max(bytes) } else { 0.0 }
    };
    moved.iter().map(seconds).sum()
}

/// Seconds in which states of the optimizer and masters of `elements` elements come to the device
/// and go back, and their parameters, which come where they are updated themselves.
fn moved_seconds(job: &Job<'_>, candidate: &Candidate, elements: f64, rates: &Prices<'_>) -> f64 {
    let Precision { parameters, states, master, .. } = job.precision;
    let Offload { optimizer, parameters: at_rest, .. } = candidate.offload;
    let each = job.optimizer.state_count() as u64 * states.size() + master.map_or(0, DType::size);
    let copy = |place, each: u64| rates.copy(place, (each as f64 * elements) as u64);
    let ways = if master.is_some() { 1.0 } else { 2.0 };
    2.0 * copy(optimizer, each) + ways * copy(at_rest, parameters.size())
}

/// Seconds in which parameters come to the device for the forward pass of a micro-batch.
fn fetched_seconds(job: &Job<'_>, candidate: &Candidate, elements: u64, rates: &Prices<'_>) -> f64 {
    rates.copy(candidate.offload.parameters, elements * job.precision.parameters.size())
}

/// What is held for each element of a weight, by each rank and by all that share it: itself, its
/// gradient, its master and states. Where ranks share the update and not parameters, what is
/// updated is always a copy.
fn bytes_of_weight(job: &Job<'_>, candidate: &Candidate) -> [u64; 2] {
    let Precision { parameters, gradients, states, master, .. } = job.precision;
    // What lies in the memory of the host is in that of the ranks.
    let held = |place: Place, bytes: u64| if place == Place::Disk { 0 } else { bytes };
    let Offload { optimizer, parameters: at_rest, .. } = candidate.offload;
    let states = held(optimizer, job.optimizer.state_count() as u64 * states.size());
    let copy = (candidate.zero.stage > 0).then_some(job.precision.updated());
    // Where no type is narrower, parameters are updated themselves.
    let updated_at = if master.is_some() { optimizer } else { at_rest };
    let updated = held(updated_at, master.or(copy).map_or(0, DType::size));
    let (parameters, gradients) = (held(at_rest, parameters.size()), gradients.size());
    match candidate.zero.stage {
        0 | 1 => [parameters + gradients, updated + states],
        2 => [parameters, gradients + updated + states],
        _ => [0, master.map_or(0, |_| parameters) + gradients + updated + states],
    }
}

fn seconds(job: &Job<'_>, candidate: &Candidate, stages: &[Stage], rates: &Prices<'_>) -> f64 {
    let mesh = candidate.mesh;
    let count = candidate.microbatch_count(job) as f64;
    let (mut before, mut chain) = (0.0, 0.0f64);
    for stage in stages {
        chain = chain.max(before + count * stage.seconds);
        before += stage.first_s;
    }
    let ends = stages.iter().map(|s| s.reduction_s + s.update_s.max(s.moved_s));
    let end = ends.fold(0.0, f64::max);
    if rates.oversubscription() <= 1.0 {
        return chain + end;
    }
    let node = |rank: usize| rank / rates.ranks_per_node();
    let mut work = vec![[0.0; 2]; node(mesh.ranks() - 1) + 1];
    for rank in 0..mesh.ranks() {
        let stage = &stages[mesh.coordinate(rank, Axis::Pp)];
        // What attention to other tokens takes is known of the first of those that share them.
        let is_first = mesh.coordinate(rank, Axis::Cp) == 0;
        let compute_s = if is_first { stage.compute_s } else { 0.0 };
        work[node(rank)][0] += count * compute_s / mesh.tp as f64;
        work[node(rank)][1] += stage.update_s;
    }
    // A node that tensor-parallel ranks share with others has at least the mean of its group only
    // where the whole group is on it.
    let whole = rates.ranks_per_node().is_multiple_of(mesh.tp);
    let shared = |phase: usize| {
        let most = work.iter().map(|w| w[phase]).fold(0.0, f64::max);
        if whole || work.len() == 1 { most / rates.cores() } else { 0.0 }
    };
    let least_reduction = stages.iter().map(|s| s.reduction_s).fold(f64::INFINITY, f64::min);
    chain.max(shared(0)) + end.max(least_reduction + shared(1))
}

fn bytes(job: &Job<'_>, mesh: Mesh, stages: &[Stage]) -> (u64, u64) {
    match job.memory() {
        Memory::PerRank(have) => (stages.iter().map(|s| s.bytes).max().unwrap_or(0), have),
        Memory::PerNode(have) => {
            let all: u64 = stages.iter().map(|s| s.bytes_of_all).sum();
            (all * mesh.data_ranks() as u64 / job.cluster.nodes as u64, have)
        }
    }
}
