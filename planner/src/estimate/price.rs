//! What layers cost when their insides are cut in one way: the tables that are made once and read
//! for every configuration that agrees with them.

use std::ops::{Add, AddAssign, Mul};

use serde::Serialize;

use super::experts::{ExpertPlacement, ExpertRanks};
use super::network::Group;
use crate::configuration::Configuration;
use ir::Axis;

/// Everything that the price of a layer on one rank depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Inside {
    /// Tensor-parallel ranks.
    pub tp: u32,
    /// How they lie.
    pub tp_group: Group,
    /// Context-parallel ranks.
    pub cp: u32,
    /// How they lie.
    pub cp_group: Group,
    /// Expert-parallel ranks.
    pub ep: u32,
    /// How they lie.
    pub ep_group: Group,
    /// Tensor-parallel ranks that each hold a slice of the same experts.
    pub slices_group: Group,
    /// Samples of a micro-batch.
    pub microbatch: u32,
    /// Whether tensor-parallel ranks cut the sequence between products.
    pub sequence_parallel: bool,
}

impl Inside {
    /// The part of a configuration that layers see.
    pub fn of(configuration: &Configuration, placement: ExpertPlacement) -> Inside {
        let experts = ExpertRanks::of(configuration, placement);
        Inside {
            tp: configuration.tp,
            tp_group: Group::along(configuration, Axis::Tp),
            cp: configuration.cp,
            cp_group: Group::along(configuration, Axis::Cp),
            ep: configuration.ep,
            ep_group: experts.ranks,
            slices_group: experts.slices,
            microbatch: configuration.microbatch,
            sequence_parallel: configuration.sequence_parallel,
        }
    }

    /// These groups with all ranks as near to each other as they can be: no
    /// placement costs less.
    pub fn near(self) -> Inside {
        self.placed(|group| Group::near(group.size()))
    }

    /// These groups with `place` applied to each, which keeps its size.
    pub(super) fn placed(self, place: impl Fn(Group) -> Group) -> Inside {
        Inside {
            tp_group: place(self.tp_group),
            cp_group: place(self.cp_group),
            ep_group: place(self.ep_group),
            slices_group: place(self.slices_group),
            ..self
        }
    }
}

/// Seconds of work, by what takes them. They add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Pass {
    /// Products with weights.
    pub products_s: f64,
    /// The inside of attention.
    pub attention_s: f64,
    /// Kernels that move rows.
    pub rows_s: f64,
    /// The device waits for the host to dispatch.
    pub dispatch_s: f64,
    /// Collectives of tensor and sequence parallelism.
    pub tensor_s: f64,
    /// Collectives of context parallelism.
    pub context_s: f64,
    /// Collectives of expert parallelism.
    pub expert_s: f64,
}

impl Pass {
    /// All of it.
    pub fn total_s(&self) -> f64 {
        self.compute_s() + self.tensor_s + self.context_s + self.expert_s
    }

    /// What the device itself computes or moves: neither communication nor waiting.
    pub fn busy_s(&self) -> f64 {
        self.products_s + self.attention_s + self.rows_s
    }

    /// What is not communication.
    pub fn compute_s(&self) -> f64 {
        self.products_s + self.attention_s + self.rows_s + self.dispatch_s
    }
}

impl Add for Pass {
    type Output = Pass;

    fn add(self, other: Pass) -> Pass {
        Pass {
            products_s: self.products_s + other.products_s,
            attention_s: self.attention_s + other.attention_s,
            rows_s: self.rows_s + other.rows_s,
            dispatch_s: self.dispatch_s + other.dispatch_s,
            tensor_s: self.tensor_s + other.tensor_s,
            context_s: self.context_s + other.context_s,
            expert_s: self.expert_s + other.expert_s,
        }
    }
}

impl AddAssign for Pass {
    fn add_assign(&mut self, other: Pass) {
        *self = *self + other;
    }
}

impl Mul<f64> for Pass {
    type Output = Pass;

    fn mul(self, by: f64) -> Pass {
        Pass {
            products_s: self.products_s * by,
            attention_s: self.attention_s * by,
            rows_s: self.rows_s * by,
            dispatch_s: self.dispatch_s * by,
            tensor_s: self.tensor_s * by,
            context_s: self.context_s * by,
            expert_s: self.expert_s * by,
        }
    }
}

/// The update of a layer's dense parameters, and of those of its experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Moments {
    /// Bytes of moments.
    pub bytes: [f64; 2],
    /// Seconds of products.
    pub seconds: [f64; 2],
}

impl AddAssign for Moments {
    fn add_assign(&mut self, other: Moments) {
        for at in 0..2 {
            self.bytes[at] += other.bytes[at];
            self.seconds[at] += other.seconds[at];
        }
    }
}

impl Mul<f64> for Moments {
    type Output = Moments;

    fn mul(self, by: f64) -> Moments {
        let scaled = |parts: [f64; 2]| parts.map(|part| part * by);
        Moments { bytes: scaled(self.bytes), seconds: scaled(self.seconds) }
    }
}

/// One layer, or one end of the model, on one rank: of one micro-batch where it is a time or an
/// activation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerPrice {
    /// The forward pass.
    pub forward: Pass,
    /// The backward pass: gradients of inputs and weights.
    pub backward: Pass,
    /// Seconds that the forward pass takes longer where hosts poll a network meanwhile.
    pub forward_late_s: f64,
    /// Seconds that the backward pass does.
    pub backward_late_s: f64,
    /// Seconds of the backward pass that only weights need: what zero-bubble schedules move.
    pub weight_s: f64,
    /// The inside of attention once more, for selective recomputation.
    pub attention_again: Pass,
    /// The forward pass once more, for full recomputation.
    pub forward_again: Pass,
    /// Bytes kept for the backward pass.
    pub saved_bytes: f64,
    /// Bytes of them that selective recomputation does not keep.
    pub saved_attention_bytes: f64,
    /// Bytes that the gradients of weights need, where they are put off: what products read, and
    /// the gradients of their results (Qi et al. 2023, table 1).
    pub put_off_bytes: [f64; 2],
    /// Bytes of the input: what full recomputation keeps.
    pub input_bytes: f64,
    /// Bytes that are needed beside what is kept, at the peak of the layer.
    pub working_bytes: f64,
    /// Bytes at another peak, in which routed experts are computed.
    pub room_bytes: f64,
    /// Bytes that were freed before that peak and cannot hold what is larger.
    pub freed_bytes: f64,
    /// Bytes that were freed while the device had not come to their last use.
    pub late_bytes: f64,
    /// Tensors of parameters.
    pub tensors: f64,
    /// The update of what has other moments than as many bytes for each parameter.
    pub moments: Moments,
    /// Bytes of frozen weights: dense ones, and those of experts.
    pub frozen_bytes: [f64; 2],
    /// Parameters held by one rank, without those of experts.
    pub parameters: f64,
    /// Parameters of experts held by one rank.
    pub expert_parameters: f64,
}

/// The prices of a workload whose insides are cut in one way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prices {
    /// One of each class of layers, in the order of the model, with how many there are.
    pub layers: Vec<(u32, LayerPrice)>,
    /// What the first stage has beside layers.
    pub first: LayerPrice,
    /// What the last stage has beside layers.
    pub last: LayerPrice,
    /// Bytes of a micro-batch that one stage sends to the next.
    pub boundary_bytes: f64,
    /// Whether the ends share a weight, and its parameters on one rank.
    pub tied_parameters: f64,
    /// Bytes of that weight, where it is frozen.
    pub tied_frozen_bytes: f64,
    /// Bytes of that weight's moments, where they are not as many for each parameter.
    pub tied_moments: f64,
}
