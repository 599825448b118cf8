//! What a stage exchanges with its copies: gradients, weights that ZeRO cuts, and the update.

use super::experts::ExpertRanks;
use super::host::{DISK_BYTES_PER_S, HOST_MEMORY_BYTES_PER_S};
use super::network::Group;
use super::profile::{Exchange, ExpertPlacement, Profile, Whole};
use super::stage::Stage;
use super::terms::Terms;
use crate::configuration::{Configuration, Place, Zero};
use crate::divisors::gcd;

impl Terms<'_> {
    /// The weights of all layers' dense parts, and those of experts, which have as many copies as a
    /// stage has ranks, divided by those that share them.
    pub(super) fn weights(&self, c: &Configuration, stage: &Stage) -> [Weights; 2] {
        let data = u64::from(c.dp) * u64::from(c.cp);
        let placement = self.profile.experts;
        let shared = u64::from(c.ep) * u64::from(placement.slices(c));
        let experts = (data * u64::from(c.tp) / shared.max(1)).max(1);
        let dense = (stage.parameters, data, None);
        [dense, (stage.expert_parameters, experts, Some(placement))].map(
            |(parameters, copies, experts)| {
                // Where fewer ranks have one copy, there are as many copies of all weights.
                let shard = match c.zero {
                    Zero { stage: 0, .. } => 1,
                    Zero { shard: 0, .. } => copies,
                    Zero { shard, .. } => {
                        let all = data / gcd(u64::from(shard), data);
                        copies / gcd(copies, all)
                    }
                };
                Weights { parameters, experts, shard }
            },
        )
    }

    /// The groups in which the copies of any stage exchange.
    pub(super) fn copies(&self, c: &Configuration) -> Copies {
        let all = [Group::data(c), ExpertRanks::of(c, self.profile.experts).copies];
        let parts = self.weights(c, &Stage::default()).map(|w| [w.shards(c), w.copies(c)]);
        Copies {
            all: all.map(|group| self.network.alike(group)),
            parts: parts.map(|part| part.map(|group| self.network.alike(group))),
        }
    }

    /// What a stage exchanges with its copies if it waits for nothing, without its update.
    pub(super) fn exchanges(
        &self,
        c: &Configuration,
        copies: &Copies,
        stage: &Stage,
        m: f64,
    ) -> Exchanges {
        let collectives = self.collectives(c, copies, stage);
        self.exchanges_of(c, copies, (stage, collectives), m)
    }

    /// The collectives of a stage's copies, whatever hides them and how often they are.
    pub(super) fn collectives(
        &self,
        c: &Configuration,
        copies: &Copies,
        stage: &Stage,
    ) -> Collectives {
        if c.zero.stage >= 3 {
            return self.collectives_of_a_layer(c, copies, stage);
        }
        let [group, experts] = copies.all;
        let all_reduce = |bytes, group| self.network.all_reduce_s(bytes, group);
        let gather = |bytes, group| self.network.gather_s(bytes, group);
        let (gradient, weight) = (self.profile.exchange_bytes, self.profile.weight_bytes);
        let exchanged = |parameters: f64, group: Group| match c.zero.stage {
            0 => (self.in_buckets(parameters * gradient, group, all_reduce), 0.0),
            _ => {
                let reduce_s = self.in_buckets(parameters * gradient, group, gather);
                (reduce_s, self.in_buckets(parameters * weight, group, gather))
            }
        };
        let dense = exchanged(stage.parameters, group);
        let expert = match stage.expert_parameters > 0.0 {
            true => exchanged(stage.expert_parameters, experts),
            false => (0.0, 0.0),
        };
        Collectives { reduce_s: dense.0 + expert.0, gather_s: dense.1 + expert.1 }
    }

    /// What a stage exchanges whose collectives are known.
    pub(super) fn exchanges_of(
        &self,
        c: &Configuration,
        copies: &Copies,
        (stage, collectives): (&Stage, Collectives),
        m: f64,
    ) -> Exchanges {
        if c.zero.stage >= 3 {
            return self.exchanges_of_layers(c, copies, (stage, collectives), m);
        }
        let Collectives { reduce_s, gather_s } = collectives;
        let layers = stage.layers.max(1.0);
        let interference = self.network.interference(copies.all[0]);
        let hide = |seconds: f64, behind_s: f64| {
            let hidden = seconds.min(behind_s);
            seconds - hidden + hidden * interference
        };
        let mut gradients_s = match self.profile.gradients {
            Exchange::AtEnd => reduce_s,
            Exchange::Overlapped => hide(reduce_s, stage.backward_s * (layers - 1.0) / layers),
        };
        if c.zero.stage == 2 {
            // Only a shard of the sum is kept, so that each micro-batch reduces its gradients.
            gradients_s += (m - 1.0)
                * match self.profile.gradients {
                    Exchange::AtEnd => reduce_s,
                    Exchange::Overlapped => hide(reduce_s, stage.total_s()),
                };
        }
        let mut weights_s = match self.profile.weights {
            Exchange::AtEnd => gather_s,
            Exchange::Overlapped => hide(gather_s, stage.forward_s * (layers - 1.0) / layers),
        };
        if c.zero.stage > 0 && self.profile.copies_pieces {
            weights_s += self.pieces_s(stage, copies.all[0]);
        }
        Exchanges { gradients_s, weights_s, ..Exchanges::default() }
    }

    /// Seconds in which a stage's shards are updated.
    pub(super) fn update_s(&self, c: &Configuration, stage: &Stage) -> f64 {
        let weights = self.weights(c, stage);
        let held: f64 = weights.iter().map(Weights::held).sum();
        // Ranks that share a state share its matrices, and each of their products.
        let of_shards = |parts: [f64; 2]| {
            parts.iter().zip(&weights).map(|(part, w)| part / w.shard as f64).sum::<f64>()
        };
        let [moments, products_s]: [f64; 2] =
            [stage.moments.bytes, stage.moments.seconds].map(of_shards);
        let bytes = held * self.profile.update_bytes + 2.0 * moments;
        if self.profile.whole == Whole::Calls {
            // Chunks come to the device and go back while others are updated.
            let moved_s = self.moved_s(c, held, moments);
            return products_s + self.rates.rows_s(bytes).max(moved_s);
        }
        products_s
            + match c.offload.optimizer {
                Place::Device => self.rates.rows_s(bytes),
                // The host computes the update from gradients that come, and weights go back; it is
                // never done before the device would be.
                Place::Host => {
                    let moved = held * (self.profile.exchange_bytes + self.profile.weight_bytes);
                    let moved_s = moved / self.host.bytes_per_s(c);
                    (bytes / HOST_MEMORY_BYTES_PER_S).max(moved_s).max(self.rates.rows_s(bytes))
                }
                Place::Disk => bytes / DISK_BYTES_PER_S,
            }
    }

    /// Seconds in which states of the optimizer come to the device for an update of `held`
    /// parameters and go back, and parameters too: those that are rounded from masters go back
    /// alone.
    fn moved_s(&self, c: &Configuration, held: f64, moments: f64) -> f64 {
        let Profile { state_bytes, weight_bytes, gradient_bytes, .. } = *self.profile;
        let ways = if weight_bytes < gradient_bytes { 1.0 } else { 2.0 };
        let seconds = |place: Place, bytes: f64| bytes / self.host.rate(c, place);
        seconds(c.offload.optimizer, 2.0 * (held * state_bytes + moments))
            + seconds(c.offload.parameters, ways * held * weight_bytes)
    }

    /// Joins the pieces of all tensors for each rank, and copies what was gathered back, piece by
    /// piece: as many launches as tensors times ranks, and three passes over the weights.
    fn pieces_s(&self, stage: &Stage, group: Group) -> f64 {
        if group.size() <= 1 {
            return 0.0;
        }
        let parameters = stage.parameters + stage.expert_parameters;
        let bytes = parameters * self.profile.weight_bytes * 2.0 * 3.0;
        let launches = stage.tensors * group.size() as f64;
        self.rates.rows_s(bytes).max(launches * PIECE_S)
    }

    /// Collectives of at most a bucket each, one after another.
    fn in_buckets(&self, bytes: f64, group: Group, one: impl Fn(f64, Group) -> f64) -> f64 {
        let bucket = self.profile.bucket_bytes;
        if bytes <= bucket { one(bytes, group) } else { one(bucket, group) * bytes / bucket }
    }

    /// The collectives of a layer whose weights are cut, in pieces.
    fn collectives_of_a_layer(
        &self,
        c: &Configuration,
        copies: &Copies,
        stage: &Stage,
    ) -> Collectives {
        let layers = stage.layers.max(1.0);
        let weights = self.weights(c, stage);
        let pieces = self.profile.pieces_per_layer;
        let mut found = Collectives::default();
        let parts = weights.iter().zip(copies.parts).zip(stage.frozen);
        let is_there = |w: &Weights, frozen: f64| w.parameters + frozen > 0.0;
        for ((w, [shards, same]), frozen) in parts.filter(|((w, _), frozen)| is_there(w, *frozen)) {
            let in_pieces = |bytes: f64, more: f64| {
                let bytes = bytes * w.parameters / layers + more / layers;
                pieces * self.network.gather_s(bytes / pieces, shards)
            };
            let shard = w.held() / layers * self.profile.exchange_bytes;
            found.gather_s += in_pieces(self.profile.weight_bytes, frozen);
            found.reduce_s += in_pieces(self.profile.exchange_bytes, 0.0);
            found.reduce_s += self.network.all_reduce_s(shard, same);
        }
        found
    }

    /// Weights that are gathered for each use and gradients that are reduced after it, layer by
    /// layer, beside computation.
    fn exchanges_of_layers(
        &self,
        c: &Configuration,
        copies: &Copies,
        (stage, collectives): (&Stage, Collectives),
        m: f64,
    ) -> Exchanges {
        let Collectives { reduce_s, gather_s } = collectives;
        let layers = stage.layers.max(1.0);
        let parameters = (stage.parameters + stage.expert_parameters) / layers;
        let (forward_s, backward_s) = (stage.forward_s / layers, stage.backward_s / layers);
        let interference = self.network.interference(copies.all[0]);
        let visible = |comm: f64, compute: f64| match self.profile.weights {
            Exchange::AtEnd => comm * layers,
            Exchange::Overlapped => {
                (comm - compute).max(0.0) * layers + comm.min(compute) * interference * layers
            }
        };
        // A pass over the gathered weights, and one over whole gradients.
        let copies = if self.profile.copies_gathered { layers } else { 0.0 };
        let frozen = (stage.frozen[0] + stage.frozen[1]) / layers;
        let gathered = parameters * 2.0 * self.profile.weight_bytes + 2.0 * frozen;
        let copy_s = copies * self.rates.rows_s(gathered);
        let moved = self.profile.weight_bytes + self.profile.exchange_bytes;
        let copy_out_s = copies * self.rates.rows_s(parameters * moved);
        let forward = visible(gather_s, forward_s) + gather_s + copy_s;
        let (recompute_s, late_s) = match self.profile.backward_weights {
            Exchange::AtEnd => (0.0, gather_s * layers),
            Exchange::Overlapped => (gather_s, 0.0),
        };
        let backward = visible(recompute_s, backward_s) + late_s + copy_s;
        let last = visible(recompute_s + reduce_s, backward_s) + reduce_s + late_s;
        let last = last + copy_s + copy_out_s;
        // Weights that stay whole are gathered once; sums that do are reduced once.
        let [gathers, reduces] = match self.profile.whole {
            Whole::Ends | Whole::EndsAndSums if c.pp > 1 => [1.0, 1.0],
            Whole::EndsAndSums => [m, 1.0],
            Whole::Calls | Whole::Layers | Whole::Ends => [m, m],
        };
        Exchanges {
            weights_s: gathers * forward,
            gradients_s: reduces * last + (gathers - reduces) * backward,
            ..Exchanges::default()
        }
    }
}

/// Seconds of the host to copy one piece of a tensor: a launch without module or gradient. Chosen:
/// half of an operation that has them.
const PIECE_S: f64 = 5e-6;

/// The groups in which copies exchange: of ranks with the same weights, and with the same experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copies {
    /// All copies.
    all: [Group; 2],
    /// Those whose shards make up a copy, and those that hold the same shard.
    parts: [[Group; 2]; 2],
}

/// Seconds of the collectives of a stage's copies: of all its weights, or of those of a layer where
/// weights are cut.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Collectives {
    /// Sums of gradients.
    reduce_s: f64,
    /// Weights.
    gather_s: f64,
}

/// What stages exchange with their copies.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Exchanges {
    pub(super) gradients_s: f64,
    pub(super) weights_s: f64,
    pub(super) optimizer_s: f64,
}

impl Exchanges {
    /// Keeps the stage that is done last. One that waits `before_s` for others exchanges meanwhile.
    pub(super) fn cover(&mut self, other: Exchanges, before_s: f64) {
        let hidden = before_s.min(other.gradients_s);
        let other = Exchanges { gradients_s: other.gradients_s - hidden, ..other };
        let sum = |e: &Exchanges| e.gradients_s + e.weights_s + e.optimizer_s;
        if sum(&other) > sum(self) {
            *self = other;
        }
    }
}

/// Weights that have equally many copies.
pub(super) struct Weights {
    /// How many one rank computes with.
    pub(super) parameters: f64,
    /// Where their experts lie; none where they are no experts'.
    experts: Option<ExpertPlacement>,
    /// Over how many ranks that hold copies the parts that ZeRO shards are cut.
    pub(super) shard: u64,
}

impl Weights {
    /// Parameters of a shard.
    pub(super) fn held(&self) -> f64 {
        self.parameters / self.shard as f64
    }

    /// The ranks that hold copies.
    fn group(&self, c: &Configuration) -> Group {
        let experts = self.experts.map(|placement| ExpertRanks::of(c, placement));
        experts.map_or_else(|| Group::data(c), |experts| experts.copies)
    }

    /// Ranks whose shards make up a copy.
    pub(super) fn shards(&self, c: &Configuration) -> Group {
        self.group(c).first(self.shard)
    }

    /// Ranks that hold the same shard.
    pub(super) fn copies(&self, c: &Configuration) -> Group {
        self.group(c).every(self.shard)
    }
}
