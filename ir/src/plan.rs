//! The plan: all parallel decisions about one module on one cluster.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::DType;
use crate::precision::Precision;
use crate::sharding::{Axis, Sharding};

/// The most ranks, micro-batches, and tokens of a micro-batch on one rank: their product, the
/// tokens of a step, fits a number. Chosen: beyond clusters that were ever built.
pub const RANKS_MAX: usize = 1 << 16;
/// As [`RANKS_MAX`].
pub const MICROBATCHES_MAX: usize = 1 << 16;
/// As [`RANKS_MAX`].
pub const TOKENS_MAX: usize = 1 << 30;

/// The logical grid of ranks: the size of each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Mesh {
    /// Pipeline stages.
    pub pp: usize,
    /// Data parallelism.
    pub dp: usize,
    /// Tensor parallelism.
    pub tp: usize,
}

impl Mesh {
    /// The number of ranks.
    pub fn ranks(self) -> usize {
        self.pp * self.dp * self.tp
    }

    /// The size of an axis.
    pub fn size(self, axis: Axis) -> usize {
        match axis {
            Axis::Pp => self.pp,
            Axis::Dp => self.dp,
            Axis::Tp => self.tp,
            Axis::Cp => 1,
        }
    }

    /// The coordinate of a rank on an axis. `pp` is outermost, `tp` innermost.
    pub fn coordinate(self, rank: usize, axis: Axis) -> usize {
        match axis {
            Axis::Pp => rank / (self.dp * self.tp),
            Axis::Dp => rank / self.tp % self.dp,
            Axis::Tp => rank % self.tp,
            Axis::Cp => 0,
        }
    }

    /// The rank at coordinates.
    pub fn rank(self, stage: usize, data: usize, tensor: usize) -> usize {
        (stage * self.dp + data) * self.tp + tensor
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[pp={}, dp={}, tp={}]", self.pp, self.dp, self.tp)
    }
}

/// Which values of the forward pass are kept for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// Only the function's operands: everything else is computed again.
    None,
    /// Every value that the backward pass reads.
    Full,
}

impl Keep {
    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Keep::None => "none",
            Keep::Full => "full",
        }
    }
}

/// The order of micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Schedule {
    /// One forward, one backward, after a warm-up of as many forwards as stages follow.
    #[serde(rename = "1f1b")]
    OneFOneB,
}

impl Schedule {
    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::OneFOneB => "1f1b",
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

/// The decisions about all calls of one function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FunctionPlan {
    /// What is kept for the backward pass.
    pub keep: Keep,
    /// The sharding of each value of the function and of its gradient, by name.
    pub shardings: BTreeMap<String, Sharding>,
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
    /// The mesh.
    pub mesh: Mesh,
    /// Samples of one micro-batch on one rank.
    pub microbatch_size: usize,
    /// Micro-batches of one step.
    pub microbatch_count: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// The element types, by role.
    pub precision: Precision,
    /// The order of micro-batches.
    pub schedule: Schedule,
    /// For each stage, one past its last call in the order of the entry's calls.
    pub stage_ends: Vec<usize>,
    /// The update.
    pub optimizer: Optimizer,
    /// Gradients are scaled down to this global norm; none leaves them.
    pub clip: Option<f64>,
    /// The decisions per function.
    pub functions: BTreeMap<String, FunctionPlan>,
    /// What is predicted, by name: `step_time_s`, `arena_bytes`, …
    pub predictions: BTreeMap<String, Prediction>,
}

impl Plan {
    /// Samples of one step over all ranks.
    pub fn global_batch_size(&self) -> usize {
        self.microbatch_size * self.microbatch_count * self.mesh.dp
    }

    /// The element type of activations.
    pub fn dtype(&self) -> DType {
        self.precision.compute
    }

    /// The stage of a call.
    pub fn stage_of(&self, call: usize) -> usize {
        self.stage_ends.iter().take_while(|end| **end <= call).count()
    }
}
