//! Copies of a model that answer prompts.

use std::collections::BTreeMap;

use planner::estimate::serving::Parts;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::{Assumed, Object};

/// A model that copies serve, and where.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ServedModel {
    /// The model's name.
    pub model: String,
    /// The cluster, with what was read from it.
    pub cluster: String,
    /// Devices.
    pub devices: u64,
    /// Tokens of a sample.
    pub seq: u64,
    /// The element type.
    pub dtype: String,
    /// On GPUs: what is computed and not priced, in words.
    pub assumptions: Vec<String>,
    /// Bytes of a device for a job.
    pub have_bytes: f64,
    /// On GPUs: how passes are assumed to be executed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub executor: Option<Engine>,
}

/// How an engine is assumed to execute passes of inference.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Engine {
    /// The execution profile.
    pub profile: String,
    /// Where its facts can be read.
    pub source: String,
    /// The attention kernel.
    pub attention: String,
    /// Everything that the price depends on, fact by fact.
    pub assumptions: Vec<Assumed>,
}

/// How copies of a model answer prompts.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Inference {
    /// What is asked about.
    #[serde(flatten)]
    pub subject: ServedModel,
    /// Whether any copy can answer one prompt of the whole context.
    pub fits: bool,
    /// The row to take, with its reason.
    pub recommended: Option<Object>,
    /// What the smallest copy lacks, where none fits.
    pub missing_bytes: Option<f64>,
    /// Ways to lie, the best first: tp, pp, ep, what they hold and give.
    pub rows: Vec<Value>,
}

/// The longest context, or the most sequences at once, for which a layout fits.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LargestInference {
    /// What is asked about.
    #[serde(flatten)]
    pub subject: ServedModel,
    /// `seq`, `mbs` or `gbs`.
    pub of: String,
    /// The largest that fits.
    pub largest: Option<u64>,
    /// The way to lie with which it does.
    pub row: Option<Value>,
    /// The smallest that was tried and does not fit; null where all fit.
    pub next: Option<u64>,
    /// Why that does not.
    pub reason: Option<String>,
}

/// Where the time of a token and of a prompt goes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ExplainInference {
    /// What is asked about.
    #[serde(flatten)]
    pub subject: ServedModel,
    /// The way to lie that is explained.
    pub row: Value,
    /// A token of each sequence.
    pub token: Latency,
    /// A prompt.
    pub prompt: Latency,
    /// Bytes of the fullest device, by what holds them.
    pub memory: BTreeMap<String, f64>,
    /// Ways that differ in one decision, each with a reason.
    pub neighbours: Vec<Value>,
    /// What the same way gives with other memory_bytes.
    pub other_memory: Vec<Value>,
    /// Tokens of context that one GiB more holds.
    pub tokens_per_gib: f64,
    /// Sequences of the whole context that one GiB more holds.
    pub sequences_per_gib: f64,
}

/// How long something takes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Latency {
    /// Seconds.
    pub time_s: f64,
    /// The low end of the interval.
    pub low_s: f64,
    /// The high end of the interval.
    pub high_s: f64,
    /// Its parts.
    pub breakdown: Parts,
}

/// Layouts of copies that answer prompts, side by side.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CompareInference {
    /// The model's name.
    pub model: String,
    /// Tokens of a sample.
    pub seq: u64,
    /// The layouts, each with its cluster, bytes, rates and parts.
    pub plans: Vec<Value>,
    /// How many of the last ones are the best of their clusters.
    pub bests: u64,
    /// How passes are assumed to be executed.
    pub executor: Engine,
}

/// What tokens of inference take, or an hour of a rate of them.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CostInference {
    /// The model's name.
    pub model: String,
    /// The cluster, with what was read from it.
    pub cluster: String,
    /// Devices.
    pub devices: f64,
    /// Tokens of a sample.
    pub seq: u64,
    /// How a copy lies.
    pub plan: String,
    /// Copies.
    pub copies: u64,
    /// Tokens of prompts.
    pub prompt_tokens: f64,
    /// New tokens.
    pub tokens: f64,
    /// New tokens per second that are asked for.
    pub rate: Option<f64>,
    /// Where passes are short.
    pub low: Served,
    /// As expected.
    pub expected: Served,
    /// Where passes are long.
    pub high: Served,
    /// Seconds that there are.
    pub deadline_s: Option<f64>,
    /// The currency of money, where there is a price.
    pub currency: Option<String>,
    /// Whether devices are enough for the rate or the deadline.
    pub meets: bool,
    /// How passes are assumed to be executed.
    pub executor: Engine,
}

/// What tokens of inference take.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Served {
    /// Seconds.
    pub time_s: f64,
    /// Share of the devices that is busy.
    pub utilisation: f64,
    /// Hours of all devices.
    pub device_hours: f64,
    /// The price, where that of a device is known.
    pub money: Option<f64>,
    /// The energy, where the power of a device is known.
    pub energy_kwh: Option<f64>,
    /// The price of a million new tokens.
    pub money_per_million_tokens: Option<f64>,
}

/// How few devices give tokens soon enough, or enough of them.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SizeInference {
    /// The model's name.
    pub model: String,
    /// Seconds from one token to the next, at most.
    pub token_time_s: Option<f64>,
    /// New tokens per second that are asked for.
    pub rate: Option<f64>,
    /// Tokens of prompts per second that are.
    pub prompt_rate: Option<f64>,
    /// Sequences at once that are.
    pub sequences: Option<u64>,
    /// The fewest or cheapest devices that are enough.
    pub devices: Option<u64>,
    /// Of which kind.
    pub cluster: Option<String>,
    /// Ways that are enough, each with devices, nodes, money.
    pub rows: Vec<Value>,
    /// How passes are assumed to be executed.
    pub executor: Engine,
}
