//! From prices to a step: the closed formula that estimates and searches share.
//!
//! One stage is the slowest; the step takes as long as that stage works, plus what it waits for:
//!
//! ```text
//! T = passes + exchange + gather + optimizer + offload
//! passes = m · max tᵢ + (Σ tᵢ − max tᵢ) / v    where stages interleave v chunks
//! passes = the longest path through them       elsewhere (`bubble`)
//! ```
//!
//! Legend: m micro-batches, tᵢ seconds of one micro-batch on stage i.

use codegen::schedule::splits_backward;
use schemars::JsonSchema;
use serde::Serialize;

use super::collective::{Exchanges, Weights};
use super::memory::Memory;
use super::network::{Group, INNER_INTERFERENCE};
use super::price::Prices;
use super::profile::{Profile, Whole};
use super::stage::{Run, Stage, hold, runs, stage};
use super::terms::Terms;
use super::{bubble, interleaved};
use crate::configuration::{Configuration, Place, Recompute, Schedule};
use ir::Axis;

/// Seconds of a step, by what takes them. They add up to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Breakdown {
    /// Products with weights, on the slowest stage.
    pub products_s: f64,
    /// The inside of attention.
    pub attention_s: f64,
    /// Kernels that move rows.
    pub rows_s: f64,
    /// The device waits for the host to dispatch.
    pub dispatch_s: f64,
    /// What is recomputed.
    pub recompute_s: f64,
    /// Collectives of tensor and sequence parallelism.
    pub tensor_s: f64,
    /// Collectives of context parallelism.
    pub context_s: f64,
    /// Collectives of expert parallelism.
    pub expert_s: f64,
    /// Messages between stages that nothing hides.
    pub send_s: f64,
    /// The slowest stage waits for others.
    pub bubble_s: f64,
    /// The exchange of gradients that nothing hides.
    pub gradients_s: f64,
    /// The gathering of weights that nothing hides.
    pub weights_s: f64,
    /// The update.
    pub optimizer_s: f64,
    /// Moves to and from the host that nothing hides.
    pub offload_s: f64,
}

impl Breakdown {
    /// The parts with their names, in order.
    pub fn parts(&self) -> [(&'static str, f64); 14] {
        [
            ("products", self.products_s),
            ("attention", self.attention_s),
            ("rows", self.rows_s),
            ("dispatch", self.dispatch_s),
            ("recompute", self.recompute_s),
            ("tensor", self.tensor_s),
            ("context", self.context_s),
            ("expert", self.expert_s),
            ("send", self.send_s),
            ("bubble", self.bubble_s),
            ("gradients", self.gradients_s),
            ("weights", self.weights_s),
            ("optimizer", self.optimizer_s),
            ("offload", self.offload_s),
        ]
    }

    /// The step: the sum of the parts.
    pub fn total_s(&self) -> f64 {
        self.parts().iter().map(|(_, seconds)| seconds).sum()
    }
}

/// What a step costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Step {
    /// Where the time goes.
    pub breakdown: Breakdown,
    /// Seconds in which a device computes, as the mean of all stages: the rest of the step it
    /// waits or communicates.
    pub busy_s: f64,
    /// The fullest stage.
    pub memory: Memory,
    /// The first stage.
    pub first_memory: Memory,
}

impl Terms<'_> {
    /// The step of `count` micro-batches.
    pub(super) fn step(&self, c: &Configuration, prices: &Prices, count: u64) -> Step {
        let stages = self.stages(c, prices);
        let breakdown = passes_of(c, self.send_s(c, prices), &stages, count);
        let mut step = Step { breakdown, ..Step::default() };
        self.after_of(c, prices, &stages, count).tell(&mut step.breakdown);
        let mut busy_s = 0.0;
        for (run, stage) in &stages {
            busy_s += (stage.pass.busy_s() + stage.again_busy_s) * f64::from(run.count);
            // Of equal stages the first has the most in flight.
            let memory = self.held(c, prices, run, stage, count);
            if run.index == 0 {
                step.first_memory = memory;
            }
            if memory.total_bytes() > step.memory.total_bytes() {
                step.memory = memory;
            }
        }
        // A host that updates leaves the device waiting.
        let update_s = match c.offload.optimizer {
            Place::Device => step.breakdown.optimizer_s,
            Place::Host | Place::Disk => 0.0,
        };
        step.busy_s = count as f64 * busy_s / f64::from(c.pp) + update_s;
        step
    }

    /// What of a step is passes, and waiting for them.
    pub(super) fn passes(&self, c: &Configuration, prices: &Prices, count: u64) -> Breakdown {
        passes_of(c, self.send_s(c, prices), &self.stages(c, prices), count)
    }

    /// What of a step is exchanged, updated and moved beside passes.
    pub(super) fn after(&self, c: &Configuration, prices: &Prices, count: u64) -> Breakdown {
        let mut breakdown = Breakdown::default();
        self.after_of(c, prices, &self.stages(c, prices), count).tell(&mut breakdown);
        breakdown
    }

    /// Bytes of the fullest stage alone.
    pub(super) fn bytes(&self, c: &Configuration, prices: &Prices, count: u64) -> f64 {
        let bytes = runs(c, prices).map(|run| {
            let mut stage = Stage::default();
            hold(&mut stage, c, prices, &run);
            self.held(c, prices, &run, &stage, count).total_bytes()
        });
        bytes.fold(0.0, f64::max)
    }

    /// What a stage holds at its peak, with what it sends.
    pub(super) fn held(
        &self,
        c: &Configuration,
        prices: &Prices,
        run: &Run,
        stage: &Stage,
        count: u64,
    ) -> Memory {
        let stage = Stage { sent: self.sent_bytes(c, prices, run.index), ..*stage };
        self.memory(c, &stage, run.index, count)
    }

    /// Stages in order, one of each run.
    fn stages(&self, c: &Configuration, prices: &Prices) -> Vec<(Run, Stage)> {
        let is_far = self.sends_far(c);
        runs(c, prices).map(|run| (run, stage(c, prices, &run, is_far))).collect()
    }

    fn after_of(
        &self,
        c: &Configuration,
        prices: &Prices,
        stages: &[(Run, Stage)],
        count: u64,
    ) -> After {
        let send_s = self.send_s(c, prices);
        let (mut after, copies) = (After::default(), self.copies(c));
        for (run, stage) in stages {
            let exchanges = self.exchanges(c, &copies, stage, count as f64);
            after.take(&self.alone(c, stage, exchanges, count as f64), run.count, send_s);
        }
        after
    }

    /// Seconds that one stage spends outside its passes, on collectives (`exchanges`), on the
    /// optimizer update and on offload, in a step of `m` micro-batches.
    pub(super) fn alone(
        &self,
        c: &Configuration,
        stage: &Stage,
        exchanges: Exchanges,
        m: f64,
    ) -> Alone {
        Alone {
            exchanges: Exchanges { optimizer_s: self.update_s(c, stage), ..exchanges },
            offload_s: self.offload_s(c, stage, m),
            backward_s: stage.backward_s,
        }
    }

    /// Bytes that a stage sends for a micro-batch and keeps.
    fn sent_bytes(&self, c: &Configuration, prices: &Prices, index: u32) -> f64 {
        let keeps = self.profile.keeps_sent && index + 1 < c.pp;
        let cut = if c.sequence_parallel { f64::from(c.tp) } else { 1.0 };
        if keeps { prices.boundary_bytes / cut } else { 0.0 }
    }

    /// Whether stages are on different nodes.
    pub(super) fn sends_far(&self, c: &Configuration) -> bool {
        self.network.leaves_node(Group::along(c, Axis::Pp))
    }

    /// How many ranks apart the stages are that follow each other and are furthest apart: all wait
    /// for these.
    pub(super) fn stages_apart(&self, c: &Configuration) -> u64 {
        self.network.furthest(Group::along(c, Axis::Pp), c.stride(Axis::Pp))
    }

    /// Seconds that a stage waits for one message.
    pub(super) fn send_s(&self, c: &Configuration, prices: &Prices) -> f64 {
        match c.pp {
            ..=1 => 0.0,
            _ => self.send_over_s(c, prices, self.stages_apart(c)),
        }
    }

    /// Seconds that a stage waits for one message from a stage `stride` ranks away.
    pub(super) fn send_over_s(&self, c: &Configuration, prices: &Prices, stride: u64) -> f64 {
        let cut =
            if self.profile.scatter_gather || c.sequence_parallel { f64::from(c.tp) } else { 1.0 };
        let mut seconds = self.network.send_s(prices.boundary_bytes / cut, stride);
        if self.profile.scatter_gather && !c.sequence_parallel {
            let group = Group::along(c, Axis::Tp);
            seconds += self.network.gather_s(prices.boundary_bytes, group);
        }
        if self.profile.sends_hidden { seconds * INNER_INTERFERENCE } else { seconds }
    }

    /// What a stage holds at its peak.
    fn memory(&self, c: &Configuration, stage: &Stage, index: u32, count: u64) -> Memory {
        let parameters = stage.parameters + stage.expert_parameters;
        let of_weights = self.weights(c, stage);
        let shards: f64 = of_weights.iter().map(Weights::held).sum();
        let held = |from: u8| if c.zero.stage >= from { shards } else { parameters };
        let m = count as f64;
        let [in_flight, waiting] = held_microbatches(c, index, m);
        let on_device = |place: Place| if place == Place::Device { 1.0 } else { 0.0 };
        let on_host = |place: Place| if place == Place::Host { 1.0 } else { 0.0 };
        let is_apart = self.profile.whole != Whole::Calls;
        let gathered =
            if c.zero.stage == 3 && is_apart { self.gathered_bytes(c, stage) } else { 0.0 };
        let sums_whole = match self.profile.whole {
            Whole::Calls | Whole::Layers => false,
            Whole::Ends => c.pp > 1,
            Whole::EndsAndSums => m > 1.0,
        };
        let weights = held(3) * self.profile.weight_bytes + frozen_bytes(c, stage, &of_weights);
        let states = held(1) * self.profile.optimizer_bytes() + moments_bytes(stage, &of_weights);
        let [read, made] = stage.put_off;
        // Those that a backward pass makes are there beside what it reads.
        let made = if splits_backward(c.schedule) { made * (waiting + 1.0).min(m) } else { 0.0 };
        let kept = stage.saved * (in_flight - 1.0) + read * waiting + made;
        let sent = stage.sent * (in_flight + waiting);
        let is_moved = c.offload.activations != Place::Device;
        // The loss is followed by its backward pass.
        let [here, of_running, room] = match is_moved && self.profile.whole == Whole::Calls {
            true => {
                let here = (stage.moved + stage.end_saved).min(stage.saved);
                [here, stage.moved_working, stage.moved_room]
            }
            false => [stage.saved, stage.working, stage.room],
        };
        // What a backward pass makes for late gradients stays, recomputed or not.
        let again = if c.recompute == Recompute::Full { read * waiting } else { 0.0 };
        let made = if self.profile.whole == Whole::Calls { made + again } else { 0.0 };
        let away = kept - made + stage.saved - here;
        let activations_bytes =
            (kept - made) * on_device(c.offload.activations) + made + here + sent;
        // Each is at its peak when the other is not there.
        let pieces = self.piece_bytes(c, &of_weights) - activations_bytes;
        let [of_layer, of_end] = self.passing_bytes(c, stage, &of_weights);
        // By then the loss has read what its end of the model keeps.
        let of_experts = (room - stage.end_saved).max(0.0);
        let working =
            (of_running.max(of_experts) + of_layer).max(stage.end_working + of_end).max(pieces);
        // Of what the allocator holds for these, a share is of no use.
        let fragmentation = self.profile.stated.fragmentation;
        let unused = (activations_bytes + working) * fragmentation / (1.0 - fragmentation);
        let moved = weights * on_host(c.offload.parameters)
            + states * on_host(c.offload.optimizer)
            + away * on_host(c.offload.activations);
        Memory {
            stage: index,
            weights_bytes: weights * on_device(c.offload.parameters) + gathered,
            gradients_bytes: if sums_whole { parameters } else { held(2) }
                * self.profile.gradient_bytes,
            optimizer_bytes: states * on_device(c.offload.optimizer),
            activations_bytes,
            working_bytes: working,
            freed_bytes: stage.working.min(stage.end_working)
                + stage.freed
                + stage.late_bytes(c, in_flight + waiting),
            reserve_bytes: self.profile.reserve_bytes + unused,
            // What the host cannot take stays.
            host_excess_bytes: (moved - self.host.bytes(c)).max(0.0),
        }
    }

    /// Bytes of the pieces of gradients and weights that an update over sharded states makes.
    fn piece_bytes(&self, c: &Configuration, weights: &[Weights; 2]) -> f64 {
        let Profile { weight_bytes, gradient_bytes, updates_in_pieces, .. } = *self.profile;
        let makes_pieces = updates_in_pieces && matches!(c.zero.stage, 1 | 2);
        if !makes_pieces || weights.iter().all(|w| w.shard == 1) {
            return 0.0;
        }
        // Where gradients are shared, a rank has its pieces of their sums.
        let summed = if c.zero.stage == 1 { gradient_bytes } else { 0.0 };
        // Narrow weights are rounded from what is updated; all that there are, where they lie.
        let rounded = if weight_bytes < gradient_bytes { weight_bytes } else { 0.0 };
        let bytes = |w: &Weights| w.held() * (summed + if w.shard > 1 { rounded } else { 0.0 });
        weights.iter().map(bytes).sum()
    }

    /// Whole weights and gradients of a layer, and of an end of the model, while it is called,
    /// where they are sharded between calls or lie elsewhere. Weights of the next call are
    /// gathered, or fetched, meanwhile.
    fn passing_bytes(
        &self,
        c: &Configuration,
        stage: &Stage,
        of_weights: &[Weights; 2],
    ) -> [f64; 2] {
        let is_fetched = c.offload.parameters != Place::Device;
        let is_shared = c.zero.stage > 1 && c.dp * c.cp > 1;
        if self.profile.whole != Whole::Calls || !is_shared && !is_fetched {
            return [0.0; 2];
        }
        let layers = stage.layers.max(1.0);
        let parameters = [stage.parameters - stage.end_parameters, stage.expert_parameters];
        let layer = (parameters[0] + parameters[1]) / layers;
        let end = stage.end_parameters_most;
        let Profile { weight_bytes, gradient_bytes, .. } = *self.profile;
        // What a rank has all of is where it is, beside masters; of sums it has no other piece.
        let has_masters = weight_bytes < gradient_bytes;
        let gradient_bytes = if is_shared { gradient_bytes } else { 0.0 };
        let [mut brought, mut added] = [0.0; 2];
        for (parameters, weights) in parameters.into_iter().zip(of_weights) {
            let is_cut = weights.shard > 1;
            if is_cut || is_fetched || !has_masters {
                brought += parameters / layers;
            }
            added += if is_cut { parameters / layers / weights.shard as f64 } else { 0.0 };
        }
        let is_brought = c.zero.stage == 3 && is_shared || is_fetched;
        let of_experts = of_weights[1].shard > 1 || is_fetched;
        let gathered = if is_brought { weight_bytes } else { 0.0 };
        let [frozen, of_ends] = match is_brought {
            true => {
                let experts = if of_experts { stage.frozen[1] } else { 0.0 };
                [(stage.frozen[0] - stage.end_frozen + experts) / layers, stage.end_frozen]
            }
            false => [0.0; 2],
        };
        [
            brought * 2.0 * gathered + (layer + added) * gradient_bytes + 2.0 * frozen,
            end * (gathered + gradient_bytes) + brought * gathered + of_ends + frozen,
        ]
    }

    /// Weights that are whole for a while where they are sharded.
    fn gathered_bytes(&self, c: &Configuration, stage: &Stage) -> f64 {
        // What has one copy is whole where it lies.
        let [_, experts] = self.weights(c, stage);
        let expert_parameters = if experts.shard > 1 { experts.parameters } else { 0.0 };
        let all = stage.parameters + expert_parameters;
        // The layer in use and the next.
        let two = 2.0 / stage.layers.max(1.0);
        let whole = match self.profile.whole {
            Whole::Calls | Whole::Layers => two * all,
            Whole::Ends | Whole::EndsAndSums if c.pp > 1 => all,
            Whole::Ends | Whole::EndsAndSums => {
                stage.end_parameters + two.min(1.0) * (all - stage.end_parameters)
            }
        };
        let frozen = stage.frozen[0] + if experts.shard > 1 { stage.frozen[1] } else { 0.0 };
        let frozen = match self.profile.whole {
            Whole::Calls | Whole::Layers => two * frozen,
            Whole::Ends | Whole::EndsAndSums if c.pp > 1 => frozen,
            Whole::Ends | Whole::EndsAndSums => {
                stage.end_frozen + two.min(1.0) * (frozen - stage.end_frozen)
            }
        };
        whole * self.profile.weight_bytes + frozen
    }

    /// What moving a stage's activations and weights to the host costs beyond what its computation
    /// hides.
    fn offload_s(&self, c: &Configuration, stage: &Stage, m: f64) -> f64 {
        let of_weights = self.weights(c, stage);
        let held: f64 = match c.zero.stage {
            3.. => of_weights.iter().map(Weights::held).sum(),
            _ => stage.parameters + stage.expert_parameters,
        };
        let held = held * self.profile.weight_bytes + frozen_bytes(c, stage, &of_weights);
        // Both passes fetch weights; activations go and come back.
        let moved_s = 2.0 * stage.saved / self.host.rate(c, c.offload.activations)
            + 2.0 * held / self.host.rate(c, c.offload.parameters);
        let hidden_s = moved_s.min(stage.total_s());
        m * (moved_s - hidden_s + hidden_s * INNER_INTERFERENCE)
    }
}

/// Bytes of moments that are not as many for each parameter, of a shard where the optimizer state
/// is sharded.
fn moments_bytes(stage: &Stage, weights: &[Weights; 2]) -> f64 {
    stage.moments.bytes.iter().zip(weights).map(|(bytes, of)| bytes / of.shard as f64).sum()
}

/// Bytes of frozen weights that a rank holds between their uses.
fn frozen_bytes(c: &Configuration, stage: &Stage, weights: &[Weights; 2]) -> f64 {
    let shards = weights.iter().map(|of| if c.zero.stage == 3 { of.shard as f64 } else { 1.0 });
    stage.frozen.iter().zip(shards).map(|(bytes, shard)| bytes / shard).sum()
}

/// Of `m` micro-batches those whose activations a stage holds at once, and those that wait for
/// their gradients of weights: what [`Pipeline`](codegen::schedule::Pipeline) counts.
fn held_microbatches(c: &Configuration, stage: u32, m: f64) -> [f64; 2] {
    let (p, i, v) = (f64::from(c.pp), f64::from(stage), f64::from(c.vpp));
    // Qi et al. 2023, figures 2 and 3.
    let [in_flight, waiting] = match c.schedule {
        Schedule::GPipe => [m, 0.0],
        // Narayanan et al. 2021: 2 (p − 1 − i) + (v − 1) p passes of a chunk, and one. On the first
        // stage 1 + (p−1)/(p v) of p, as in Korthikanti et al. 2022, 4.2.3.
        Schedule::OneForwardOneBackward if c.vpp > 1 => [p + (p - 1.0 - 2.0 * i) / v, 0.0],
        Schedule::OneForwardOneBackward => [p - i, 0.0],
        Schedule::ZeroBubbleH1 => [p - i, i],
        Schedule::ZeroBubbleH2 => [2.0 * (p - i) - 1.0, 2.0 * i],
    };
    let in_flight = in_flight.min(m);
    [in_flight, waiting.min(m - in_flight)]
}

/// What of a step is passes, and waiting for them. `send_s` is how long a message takes.
pub(super) fn passes_of(
    c: &Configuration,
    send_s: f64,
    stages: &[(Run, Stage)],
    count: u64,
) -> Breakdown {
    let m = count as f64;
    let mut slowest = Stage::default();
    for (_, stage) in stages {
        if stage.total_s() > slowest.total_s() {
            slowest = *stage;
        }
    }
    let chunks = f64::from(c.vpp);
    let passes_s = match (c.pp, c.vpp) {
        (1, _) => m * slowest.total_s(),
        (_, 1) => {
            let alike: Vec<_> = stages.iter().map(|(run, stage)| stage.alike(run)).collect();
            bubble::passes_s(c.schedule, &alike, count)
        }
        (_, _) => {
            let alike: Vec<_> = stages.iter().map(|(run, stage)| stage.chunks(c, run)).collect();
            interleaved::passes_s(&alike, c.vpp, count)
        }
    };
    let bubble_s = passes_s - m * slowest.total_s();
    let sends = if c.pp > 1 { 2.0 * send_s * (m * chunks + f64::from(c.pp - 1)) } else { 0.0 };
    let pass = slowest.pass * m;
    Breakdown {
        products_s: pass.products_s,
        attention_s: pass.attention_s,
        rows_s: pass.rows_s,
        dispatch_s: pass.dispatch_s,
        recompute_s: slowest.recompute_s * m,
        tensor_s: pass.tensor_s,
        context_s: pass.context_s,
        expert_s: pass.expert_s,
        send_s: sends,
        bubble_s: bubble_s.max(0.0),
        ..Breakdown::default()
    }
}

/// What one stage exchanges, updates and moves, if it waits for no other.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Alone {
    exchanges: Exchanges,
    offload_s: f64,
    /// Of a micro-batch.
    backward_s: f64,
}

/// What stages exchange, update and move, stage by stage.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct After {
    exchanges: Exchanges,
    before_s: f64,
    offload_s: f64,
}

impl After {
    /// The end of a step before a stage that waits `before_s` seconds for the stages before it.
    pub(super) fn waiting(before_s: f64) -> After {
        After { before_s, ..After::default() }
    }

    /// Goes on to the next stages, `count` that are alike. `send_s` is how long a message takes.
    pub(super) fn take(&mut self, stage: &Alone, count: u32, send_s: f64) {
        // Stages move at the same time.
        self.offload_s = stage.offload_s.max(self.offload_s);
        // Later stages are done earlier, by the backward passes of those before them. Of equal
        // stages the first has the least time to hide behind.
        self.exchanges.cover(stage.exchanges, self.before_s);
        self.before_s += (stage.backward_s + send_s) * f64::from(count);
    }

    /// Writes the parts of a step.
    pub(super) fn tell(self, parts: &mut Breakdown) {
        parts.gradients_s = self.exchanges.gradients_s;
        parts.weights_s = self.exchanges.weights_s;
        parts.optimizer_s = self.exchanges.optimizer_s;
        parts.offload_s = self.offload_s;
    }
}

#[cfg(test)]
mod tests {
    use codegen::schedule::Pipeline;

    use crate::cluster::Cluster;
    use crate::estimate::profile::{GANTLINE, MEGATRON_BRIDGE, PROFILES};
    use crate::estimate::rates::Arithmetic;
    use crate::estimate::tests::{gpt3, machine};
    use crate::estimate::{Estimator, Job, legal};

    use super::*;

    /// As many micro-batches as the order of passes has under way on each stage.
    #[test]
    fn held_microbatches_are_those_of_the_schedule() {
        let sizes = (1..=5).flat_map(|pp| (1..=3).map(move |vpp| (pp, vpp)));
        for (pp, vpp) in sizes.filter(|(pp, vpp)| *pp > 1 || *vpp == 1) {
            for schedule in Schedule::ALL {
                if vpp > 1 && schedule != Schedule::OneForwardOneBackward {
                    continue;
                }
                let c = Configuration { pp, vpp, schedule, ..Configuration::default() };
                for (stage, rounds) in (0..pp).flat_map(|stage| [(stage, 1), (stage, 6)]) {
                    let [stages, chunks] = [pp, vpp].map(|count| count as usize);
                    let microbatches = rounds * stages;
                    let pipeline = Pipeline { schedule, stages, chunks, microbatches };
                    let passes = pipeline.most_held(stage as usize, &vec![1; chunks]) as f64;
                    let [in_flight, waiting] = held_microbatches(&c, stage, microbatches as f64);
                    let held = f64::from(vpp) * (in_flight + waiting);
                    assert!((held - passes).abs() < 1e-9, "{c} {stage}: {held} for {passes}");
                }
            }
        }
    }

    /// Where nothing else cuts them, experts are weights like all others: what is exchanged, moved
    /// and held is the same whichever of both a stage's weights are.
    #[test]
    fn experts_are_sharded_and_moved_like_other_weights() {
        let cluster = Cluster::load_on("h100", &machine()).unwrap();
        let work = gpt3();
        let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
        let dense = Stage {
            layers: 4.0,
            forward_s: 0.01,
            backward_s: 0.02,
            parameters: 7e9,
            tensors: 40.0,
            ..Stage::default()
        };
        let routed = Stage { parameters: 0.0, expert_parameters: 7e9, ..dense };
        for profile in PROFILES {
            let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
            let terms = estimator.terms();
            for zero in ["0", "1", "2", "3", "3/8"] {
                for offload in ["", "offload-parameters=host", "offload-optimizer=host"] {
                    let text = format!("tp=1 pp=1 dp=32 mbs=1 zero={zero} {offload}");
                    let c: Configuration = text.parse().unwrap();
                    let [dense, routed] = [&dense, &routed].map(|stage| {
                        let exchanges = terms.exchanges(&c, &terms.copies(&c), stage, 2.0);
                        let exchanges = terms.alone(&c, stage, exchanges, 2.0);
                        let memory = terms.memory(&c, stage, 0, 2);
                        format!("{exchanges:?} {memory:?}")
                    });
                    assert_eq!(dense, routed, "{}: {text}", profile.name);
                }
            }
        }
    }

    fn check_held(c: &Configuration, terms: &Terms<'_>, slices: u32, stage: &Stage) {
        let Configuration { tp, dp, cp, ep, zero, .. } = *c;
        let [dense, experts] = terms.weights(c, stage);
        let (ranks, shared) = (tp * dp * cp, ep * slices);
        // What is summed over ranks with the same shard is summed over all copies.
        let copies = [dp * cp, ranks / shared].map(u64::from);
        let counted = [&dense, &experts].map(|w| w.shards(c).size() * w.copies(c).size());
        assert_eq!(counted, copies, "{c}");
        assert_eq!(ranks % shared, 0, "{c}");
        let all = f64::from(ranks) * experts.held();
        let one = 6e9 * f64::from(shared);
        assert!(all >= one * (1.0 - 1e-12), "{c}: {all} of {one}");
        assert!(f64::from(dp * cp) * dense.held() >= 1e9 * (1.0 - 1e-12), "{c}");
        let is_cut = zero.stage > 0 && zero.shard == 0;
        assert!(!is_cut || all <= one * (1.0 + 1e-12), "{c}: {all}, not {one}");
    }

    /// However weights and states are cut, the ranks of a stage hold each at least once.
    #[test]
    fn ranks_hold_all_there_is() {
        let stage = Stage { parameters: 1e9, expert_parameters: 6e9, ..Stage::default() };
        let sizes = [1, 2, 3, 4, 6, 8, 12];
        let cluster = Cluster::load_on("h100", &machine()).unwrap();
        let (work, job) = (gpt3(), Job { global_batch: 64, arithmetic: Arithmetic::Half });
        // Experts lie beside tensor parallelism in one, and within it in the other.
        let profiles = [GANTLINE, MEGATRON_BRIDGE];
        let all = profiles.map(|p| (p, Estimator::new(&work, &cluster, p, job).unwrap()));
        for (tp, dp, cp) in sizes
            .iter()
            .flat_map(|tp| sizes.iter().flat_map(move |dp| [1, 2, 3].map(move |cp| (*tp, *dp, cp))))
        {
            let ranks: u32 = tp * dp * cp;
            for ep in sizes.into_iter().filter(|ep| ranks.is_multiple_of(*ep)) {
                for zero in ["0", "1", "2", "3", "3/2", "1/3", "1/4", "2/6"] {
                    let text = format!("tp={tp} pp=1 dp={dp} cp={cp} ep={ep} mbs=1 zero={zero}");
                    let c: Configuration = text.parse().unwrap();
                    let shard = c.shard_ranks();
                    if !(dp * cp).is_multiple_of(shard) || !legal::may_shard(&c, c.zero.shard) {
                        continue;
                    }
                    for (profile, estimator) in &all {
                        check_held(&c, &estimator.terms(), profile.experts.slices(&c), &stage);
                    }
                }
            }
        }
    }
}
