//! The plan: all parallel decisions about one module on one cluster.

pub mod buckets;
mod mesh;

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::DType;
use crate::lora::Lora;
use crate::precision::Precision;
use crate::sharding::Sharding;
use crate::target::Target;

pub use mesh::{ExpertParallel, Mesh, USUAL_ORDER, parse_order};

/// The most ranks, micro-batches, and tokens of a micro-batch on one rank: their product, the
/// tokens of a step, fits a number. Chosen: beyond clusters that were ever built.
pub const RANKS_MAX: usize = 1 << 17;
/// As [`RANKS_MAX`].
pub const MICROBATCHES_MAX: usize = 1 << 16;
/// As [`RANKS_MAX`].
pub const TOKENS_MAX: usize = 1 << 30;

/// Which values of the forward pass are kept for the backward pass; what is not kept is recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Keep {
    /// Only the operands of the call.
    None,
    /// Every value that the backward pass reads.
    Full,
    /// All but the results of attention, which is recomputed from queries, keys and values
    /// (Korthikanti et al. 2022, selective recomputation).
    AllButAttention,
}

impl Keep {
    /// All of them.
    pub const ALL: [Keep; 3] = [Keep::None, Keep::Full, Keep::AllButAttention];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Keep::None => "none",
            Keep::Full => "full",
            Keep::AllButAttention => "all-but-attention",
        }
    }
}

/// The order of micro-batches in a pipeline.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// All forward passes, then all backward passes (Huang et al. 2019).
    GPipe,
    /// One forward, one backward (Narayanan et al. 2019), after a warm-up of as many forward passes
    /// as stages follow; interleaved where a stage has several chunks (Narayanan et al. 2021).
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// Zero bubble with the memory of 1F1B (Qi et al. 2023, ZB-H1): a third of its bubble.
    #[serde(rename = "zb-h1")]
    ZeroBubbleH1,
    /// Zero bubble with twice the activations (Qi et al. 2023, ZB-H2): only the optimizer waits.
    #[serde(rename = "zb-h2")]
    ZeroBubbleH2,
}

impl Schedule {
    /// All of them.
    pub const ALL: [Schedule; 4] = [
        Schedule::GPipe,
        Schedule::OneForwardOneBackward,
        Schedule::ZeroBubbleH1,
        Schedule::ZeroBubbleH2,
    ];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::GPipe => "gpipe",
            Schedule::OneForwardOneBackward => "1f1b",
            Schedule::ZeroBubbleH1 => "zb-h1",
            Schedule::ZeroBubbleH2 => "zb-h2",
        }
    }
}

/// Where something lies between its uses.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// In the device's memory.
    #[default]
    Device,
    /// In the memory of the node.
    Host,
    /// On the node's disk.
    Disk,
}

impl Place {
    /// All of them.
    pub const ALL: [Place; 3] = [Place::Device, Place::Host, Place::Disk];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Place::Device => "device",
            Place::Host => "host",
            Place::Disk => "disk",
        }
    }
}

/// What lies elsewhere than on the device.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct Offload {
    /// Optimizer state and master weights, between updates, for which programs bring them to the
    /// device.
    pub optimizer: Place,
    /// Weights, fetched before each use.
    pub parameters: Place,
    /// What the backward pass needs, fetched before it.
    pub activations: Place,
}

impl Offload {
    /// What can lie elsewhere, by the names in texts, and where it lies.
    pub fn places(&self) -> [(&'static str, Place); 3] {
        [
            ("optimizer", self.optimizer),
            ("parameters", self.parameters),
            ("activations", self.activations),
        ]
    }

    /// Where something of a name lies.
    pub fn place_mut(&mut self, name: &str) -> Option<&mut Place> {
        match name {
            "optimizer" => Some(&mut self.optimizer),
            "parameters" => Some(&mut self.parameters),
            "activations" => Some(&mut self.activations),
            _ => None,
        }
    }
}

/// How context-parallel ranks attend to each other's tokens. Of the pieces into which a sample is
/// cut, two for each of `cp` ranks, rank `i` has those numbered `i` and `2 cp - 1 - i`: so the
/// ranks have equal parts of a causal mask (Brandon et al. 2023, striped; Grattafiori et al. 2024).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum ContextForm {
    /// Keys and values of all ranks are gathered, and their gradients reduced and scattered.
    #[default]
    AllGather,
}

impl ContextForm {
    /// All of them.
    pub const ALL: [ContextForm; 1] = [ContextForm::AllGather];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            ContextForm::AllGather => "all-gather",
        }
    }

    /// Pieces of a sample over `cp` ranks.
    pub fn pieces(self, cp: usize) -> usize {
        if cp == 1 { 1 } else { 2 * cp }
    }
}

/// Sharding over data-parallel ranks of what they all hold (Rajbhandari et al. 2020).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct Zero {
    /// 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.
    pub stage: u8,
    /// Ranks over which one copy is split; 0 for all of `dp` × `cp`.
    pub shard: u32,
}

impl Zero {
    /// The ranks over which one copy is split, of `ranks` that could each have one.
    pub fn ranks(self, ranks: usize) -> usize {
        match (self.stage, self.shard) {
            (0, _) => 1,
            (_, 0) => ranks,
            (_, shard) => shard as usize,
        }
    }
}

/// The update of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum Optimizer {
    /// None: gradients are made, and parameters stay as they are.
    None,
    /// Stochastic gradient descent with decoupled weight decay.
    Sgd {
        /// Weight decay of what products and look-ups read.
        decay: f64,
        /// Weight decay of everything else: biases and the weights of norms.
        decay_biases: f64,
    },
    /// AdamW (Loshchilov, Hutter 2019), as PyTorch computes it.
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
        /// Weight decay of what products and look-ups read.
        decay: f64,
        /// Weight decay of everything else: biases and the weights of norms.
        decay_biases: f64,
    },
}

impl Optimizer {
    /// The composite that computes it, where there is an update.
    pub fn composite(self) -> Option<&'static str> {
        match self {
            Optimizer::None => None,
            Optimizer::Sgd { .. } => Some("sgd"),
            Optimizer::AdamW { .. } => Some("adamw"),
        }
    }

    /// State tensors per parameter.
    pub fn state_count(self) -> usize {
        match self {
            Optimizer::None | Optimizer::Sgd { .. } => 0,
            Optimizer::AdamW { .. } => 2,
        }
    }
}

/// Training or inference.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// Steps of training.
    #[default]
    Training,
    /// Generation by `dp` replicas of the model on `tp` · `pp` ranks each. A replica has a slot for
    /// each sample of a micro-batch, and KV caches of `seq` tokens per slot.
    Inference {
        /// Prefill buckets in tokens, ascending from 1.
        buckets: Vec<usize>,
    },
}

/// The decisions about all calls of one function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FunctionPlan {
    /// What calls keep for the backward pass, but for those in `exceptions`.
    pub keep: Keep,
    /// The calls that keep something else, by their number among the calls of the function in the
    /// entry.
    pub exceptions: BTreeMap<usize, Keep>,
    /// The sharding of each value of the function and of its gradient that is not replicated, by
    /// name.
    pub shardings: BTreeMap<String, Sharding>,
}

impl FunctionPlan {
    /// Decisions of which all calls keep the same. Shardings of what is replicated are left out.
    pub fn new(keep: Keep, mut shardings: BTreeMap<String, Sharding>) -> FunctionPlan {
        shardings.retain(|_, sharding| sharding.layouts().next().is_some());
        FunctionPlan { keep, exceptions: BTreeMap::new(), shardings }
    }

    /// The same on a mesh: on an axis of one rank everything is whole.
    pub fn on(self, mesh: Mesh) -> FunctionPlan {
        self.on_besides(mesh, ExpertParallel::NONE)
    }

    /// The same on a mesh on which ranks share experts.
    pub fn on_besides(mut self, mesh: Mesh, experts: ExpertParallel) -> FunctionPlan {
        self.shardings.retain(|_, sharding| {
            *sharding = mesh.relevant_besides(experts, sharding);
            sharding.layouts().next().is_some()
        });
        self
    }

    /// What a call keeps, by its number among the calls of the function.
    pub fn keep_of(&self, call: usize) -> Keep {
        self.exceptions.get(&call).copied().unwrap_or(self.keep)
    }
}

/// A predicted number with where it comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The number, in SI base units.
    pub value: f64,
    /// `measured`, `fitted` or `datasheet`.
    pub origin: String,
}

/// All parallel decisions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The model.
    pub model: String,
    /// The cluster.
    pub cluster: String,
    /// What kernels are compiled for, as follows from the cluster; none for devices that no kernels
    /// are written for, and in texts that do not say.
    #[serde(default)]
    pub target: Option<Target>,
    /// The mesh.
    pub mesh: Mesh,
    /// Samples of one micro-batch on one rank.
    pub microbatch_size: usize,
    /// Micro-batches of one step.
    pub microbatch_count: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// Training or inference.
    #[serde(default)]
    pub purpose: Purpose,
    /// The element types, by role.
    pub precision: Precision,
    /// The order of micro-batches.
    pub schedule: Schedule,
    /// For each stage, one past its last call in the order of the entry's calls. Interleaved stages
    /// have several chunks each: there are `vpp` ends for each stage, and chunk `c` of all belongs
    /// to stage `c mod pp`.
    pub stage_ends: Vec<usize>,
    /// How context-parallel ranks attend to each other's tokens, where there are several.
    #[serde(default)]
    pub context: ContextForm,
    /// How ranks share the experts of layers.
    pub experts: ExpertParallel,
    /// What data-parallel ranks shard.
    pub zero: Zero,
    /// What lies elsewhere than on the device.
    pub offload: Offload,
    /// The update.
    pub optimizer: Optimizer,
    /// Gradients are scaled down to this global norm; none leaves them.
    pub clip: Option<f64>,
    /// The adapters that are trained in place of the model, where there are any.
    #[serde(default)]
    pub lora: Option<Lora>,
    /// The decisions per function.
    pub functions: BTreeMap<String, FunctionPlan>,
    /// What is predicted, by name: `step_time_s`, `arena_bytes`, …
    pub predictions: BTreeMap<String, Prediction>,
}

impl Plan {
    /// Whether this is a plan of inference.
    pub fn is_inference(&self) -> bool {
        self.purpose != Purpose::Training
    }

    /// The plan of one replica of a plan of inference: replicas do not communicate.
    pub fn replica(&self) -> Plan {
        Plan { mesh: Mesh { dp: 1, ..self.mesh }, ..self.clone() }
    }

    /// Samples of one step over all ranks.
    pub fn global_batch_size(&self) -> usize {
        self.microbatch_size * self.microbatch_count * self.mesh.dp
    }

    /// The element type of activations.
    pub fn dtype(&self) -> DType {
        self.precision.compute
    }

    /// Chunks of calls that a stage has.
    pub fn chunks_per_stage(&self) -> usize {
        (self.stage_ends.len() / self.mesh.pp.max(1)).max(1)
    }

    /// The chunks of a stage, by their numbers among those of all stages.
    pub fn chunks_of(&self, stage: usize) -> impl Iterator<Item = usize> {
        (stage..self.stage_ends.len()).step_by(self.mesh.pp.max(1))
    }

    /// The calls of a chunk, which is counted among those of all stages.
    pub fn calls_of(&self, chunk: usize) -> Range<usize> {
        let begin = chunk.checked_sub(1).map_or(0, |before| self.stage_ends[before]);
        begin..self.stage_ends[chunk].max(begin)
    }

    /// The stage of a call.
    pub fn stage_of(&self, call: usize) -> usize {
        let chunk = self.stage_ends.iter().take_while(|end| **end <= call).count();
        if self.stage_ends.len() > self.mesh.pp { chunk % self.mesh.pp } else { chunk }
    }
}
