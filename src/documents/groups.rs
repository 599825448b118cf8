//! Plans over groups of devices.

use planner::estimate::step::Breakdown;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

/// A job on groups of other devices each: a shared batch, or stages on each.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PlanGroups {
    /// `shares`: each group has copies; `stages`: each has stages.
    pub kind: String,
    /// The model's name.
    pub model: String,
    /// Numbers in the weights.
    pub params: u64,
    /// The cluster, with what was read from it.
    pub cluster: String,
    /// Devices.
    pub devices: u64,
    /// Devices that take part.
    pub used_devices: u64,
    /// Samples of a step over all ranks.
    pub gbs: u64,
    /// Tokens of a sample.
    pub seq: u64,
    /// The element type.
    pub dtype: String,
    /// Seconds of a step.
    pub step_time_s: f64,
    /// Seconds of a step at least: the low end of the interval.
    pub step_time_low_s: f64,
    /// Seconds of a step at most: the high end of the interval.
    pub step_time_high_s: f64,
    /// Tokens of all ranks per second.
    pub tokens_per_s: f64,
    /// Joules of a step on these, where watts are known.
    pub energy_j: Option<f64>,
    /// Money for a step on these, where prices are known.
    pub money: Option<f64>,
    /// Of shares: seconds to exchange gradients.
    pub exchange_s: Option<f64>,
    /// Of shares: samples that they are multiples of.
    pub piece: Option<u64>,
    /// Of shares: samples of the batch that are no whole piece.
    pub rest: Option<u64>,
    /// Of shares: batches near this one that are whole pieces.
    pub nearest_batches: Option<Vec<u64>>,
    /// Of shares: searches done, each for one group with one number of samples.
    pub searched: Option<u64>,
    /// Of stages: micro-batches of a step.
    pub microbatch_count: Option<u64>,
    /// Of stages: stage partitions it is no slower than: given, all, moves, next-moves, balanced.
    pub cuts: Option<Value>,
    /// Whether no candidate was left out unseen.
    pub complete: bool,
    /// Groups: device, first_rank, ranks, samples, layers, plan.
    pub groups: Vec<Value>,
}

/// Where a step on groups goes, and what other ways take; with what their plan has.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ExplainGroups {
    /// The plan.
    #[serde(flatten)]
    pub plan: PlanGroups,
    /// Seconds of the step, or of the slowest group, by part.
    pub breakdown: Breakdown,
    /// Other ways: kind, groups, devices, step_time_s.
    pub others: Vec<Value>,
    /// Whether it fits.
    pub fits: bool,
    /// The fastest plan, where one in a file is explained.
    pub fastest: Option<PlanGroups>,
    /// Why there is no fastest plan, where one is explained.
    pub infeasible: Option<String>,
}

/// Layouts of groups of devices beside the best plan over them.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CompareGroups {
    /// The model's name.
    pub model: String,
    /// The layouts.
    pub plans: Vec<CompareGroupsRow>,
    /// Whether the last of them is what the search found.
    pub last_is_best: bool,
}

/// A layout of groups of devices.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CompareGroupsRow {
    /// The layout, as `plan` prints it.
    #[serde(flatten)]
    pub plan: PlanGroups,
    /// Whether it fits.
    pub fits: bool,
}

/// What devices of each group hold, and whether a job fits on groups.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct FitGroups {
    /// The model's name.
    pub model: String,
    /// The cluster, with what was read from it.
    pub cluster: String,
    /// Devices.
    pub devices: u64,
    /// Whether anything fits.
    pub fits: bool,
    /// Why nothing fits.
    pub reason: Option<String>,
    /// Seconds of the fastest way that fits.
    pub step_time_s: Option<f64>,
    /// Groups: plan, peak_mem_bytes, have_bytes.
    pub rows: Vec<Value>,
}
