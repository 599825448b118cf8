//! Plans: what training takes, and why.

use planner::estimate::memory::Memory;
use planner::estimate::padding::Padding;
use planner::estimate::profile::{Assumption, Profile};
use planner::estimate::step::Breakdown;
use planner::explain::Explanation;
use planner::fit::Fit as Strategies;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::Object;

/// Configurations side by side.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Compare {
    /// The model's name.
    pub model: String,
    /// Bytes of a device for a job.
    pub have_bytes: f64,
    /// The configurations.
    pub plans: Vec<CompareRow>,
    /// Whether the last one is the best there is.
    pub last_is_best: bool,
    /// On GPUs, how the program is assumed to execute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub executor: Option<Executor>,
}

/// A configuration with what it costs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CompareRow {
    /// The configuration.
    #[serde(flatten)]
    pub row: PlanRow,
    /// Seconds of the step by part.
    pub breakdown: Breakdown,
    /// Bytes of the fullest device, by what holds them.
    pub memory: Memory,
}

/// What training on a data set takes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Cost {
    /// The model's name.
    pub model: String,
    /// The cluster, with what was read from it.
    pub cluster: String,
    /// Devices.
    pub devices: u64,
    /// Tokens that are trained on.
    pub tokens: f64,
    /// Steps.
    pub steps: f64,
    /// The configuration.
    pub plan: String,
    /// Seconds of a step.
    pub step_time_s: f64,
    /// Of the shortest steps.
    pub low: Run,
    /// Of the expected steps.
    pub expected: Run,
    /// Of the longest steps.
    pub high: Run,
    /// Seconds that there are.
    pub deadline_s: Option<f64>,
    /// Whether the expected time is not longer.
    pub meets_deadline: bool,
    /// The currency of money, where there is a price.
    pub currency: Option<String>,
    /// What failures and saves take of the times above, where it is said how often devices fail.
    pub interrupted: Option<Interrupted>,
    /// On GPUs, how the program is assumed to execute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub executor: Option<Executor>,
}

/// How a program is assumed to execute.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Executor {
    /// The execution profile.
    pub profile: String,
    /// The attention kernel.
    pub attention: String,
    /// Bytes of a parameter's weight.
    pub weight_bytes: f64,
    /// Bytes of its gradient.
    pub gradient_bytes: f64,
    /// Bytes of its optimizer state, master weight included.
    pub optimizer_bytes: f64,
    /// Everything that is assumed, fact by fact.
    pub assumptions: Vec<Assumed>,
    /// The tool that is planned for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub for_tool: Option<ForTool>,
}

/// A fact of an executor, as `--assume` states it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Assumed {
    /// The fact.
    pub name: String,
    /// Its value, in words.
    pub value: String,
    /// Whether the user stated it.
    pub stated: bool,
}

/// The tool that executes a plan.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ForTool {
    /// The tool and its release, as `--for-tool` takes them.
    pub name: String,
    /// Whose runs the prices were compared with.
    pub measured: String,
}

impl From<Assumption> for Assumed {
    fn from(Assumption { name, value, stated }: Assumption) -> Assumed {
        Assumed { name: name.to_owned(), value, stated }
    }
}

impl Executor {
    /// What a profile assumes.
    pub fn of(profile: &Profile, for_tool: Option<ForTool>) -> Executor {
        Executor {
            assumptions: profile.assumptions().into_iter().map(Assumed::from).collect(),
            profile: profile.name.to_owned(),
            attention: profile.attention.name().to_owned(),
            weight_bytes: profile.weight_bytes,
            gradient_bytes: profile.gradient_bytes,
            optimizer_bytes: profile.optimizer_bytes(),
            for_tool,
        }
    }
}

/// What failures and saves take of a run (Daly 2006).
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct Interrupted {
    /// Mean seconds between failures of the job.
    pub mtbf_s: f64,
    /// Seconds that a save takes.
    pub save_s: f64,
    /// Seconds from a failure to the first step after it.
    pub restart_s: f64,
    /// Seconds of steps between saves, which give the best goodput.
    pub interval_s: f64,
    /// The share of the time that goes into steps that count.
    pub goodput: f64,
}

/// A training run.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Run {
    /// Its seconds.
    pub time_s: f64,
    /// Hours of all devices.
    pub device_hours: f64,
    /// Its price, where the price of a device is known.
    pub money: Option<f64>,
    /// Its energy, where the power of a device is known.
    pub energy_kwh: Option<f64>,
}

/// Why the plan is as it is.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Explain {
    /// What a step is made of, and what was not chosen.
    #[serde(flatten)]
    pub explanation: Explanation,
}

/// Whether a model fits a cluster.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Fit {
    /// The strategies, with what each needs.
    #[serde(flatten)]
    pub strategies: Strategies,
    /// Whether any strategy fits.
    pub fits: bool,
}

/// The fastest plan that fits.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Plan {
    /// The model's name.
    pub model: String,
    /// Numbers in the weights.
    pub params: u64,
    /// Layers.
    pub layers: u64,
    /// The cluster, with what was read from it.
    pub cluster: String,
    /// Ranks.
    pub ranks: u64,
    /// Devices.
    pub devices: u64,
    /// Samples of a step over all ranks.
    pub gbs: u64,
    /// Tokens of a sample.
    pub seq: u64,
    /// The element type.
    pub dtype: String,
    /// Operations of a step, forward and backward.
    pub flops_per_step: Option<f64>,
    /// On GPUs: what is computed and not priced, in words.
    pub assumptions: Vec<String>,
    /// On GPUs: what is added to the vocabulary, where something is.
    pub vocabulary_padding: Option<Padding>,
    /// The plan and what it costs.
    #[serde(flatten)]
    pub row: PlanRow,
    /// On GPUs: seconds of a step whose passes are replayed one by one.
    pub simulated_step_time_s: Option<f64>,
    /// How times are known: measured, fitted, datasheet.
    pub origin: String,
    /// Parts of a step in seconds, which sum to it.
    pub breakdown: StepParts,
    /// On GPUs: bytes of the fullest device, by what holds them.
    pub memory: Option<DeviceMemory>,
    /// Bytes of a device for a job, or of the fullest place on CPUs.
    pub have_bytes: f64,
    /// By which share the best possible plan may be better, at most.
    pub gap: Option<f64>,
    /// Lower bound on the seconds of a step of any plan.
    pub bound_s: Option<f64>,
    /// Whether no candidate was left out unseen.
    pub complete: bool,
    /// Candidates of the search.
    pub candidates: u64,
    /// On GPUs: what became of the candidates.
    pub space: Option<Candidates>,
    /// On GPUs: the plans that no other beats in both time and memory.
    pub frontier: Vec<PlanRow>,
    /// The best of each kind, the fastest first.
    pub plans: Vec<Value>,
    /// On GPUs: plans that would be faster and do not fit.
    pub too_large: Vec<PlanRow>,
    /// Decisions that this version plans and does not execute.
    pub not_executed: Vec<String>,
    /// BLAKE3 hash of the plan's decisions, of plans that are compiled: equal for equal decisions,
    /// whatever is predicted.
    pub decision_hash: Option<String>,
    /// On GPUs: how the program is assumed to execute.
    pub executor: Option<Executor>,
}

/// What the bytes of a device are known from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MemorySource {
    /// The compiled program.
    Compiled,
    /// The closed form.
    Estimate,
}

/// Bytes of the fullest device, by what holds them.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct DeviceMemory {
    /// What they are known from.
    pub from: MemorySource,
    /// The bytes.
    #[serde(flatten)]
    pub bytes: Memory,
    /// Of a compiled program: those of working_bytes that only operands of collectives take.
    pub communication_bytes: Option<f64>,
    /// Of a compiled program: what it allocates, as one block.
    pub arena_bytes: Option<u64>,
    /// Of a compiled program: what it places on the host.
    pub host_bytes: Option<u64>,
    /// Of a compiled program: what it places on a disk.
    pub disk_bytes: Option<u64>,
    /// Of a compiled program: what the closed form expects instead.
    pub expected: Option<Memory>,
    /// Why no program is compiled: what none carries out yet, in words.
    pub not_compiled: Option<String>,
}

/// Where a step goes.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum StepParts {
    /// On CPUs.
    Ranks(planner::simulate::Breakdown),
    /// On GPUs.
    Devices(Breakdown),
}

/// A plan and what it costs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PlanRow {
    /// The plan in a few words.
    pub text: String,
    /// The plan: every decision.
    pub plan: Value,
    /// Micro-batches of a step.
    pub microbatch_count: u64,
    /// Seconds of a step.
    pub step_time_s: f64,
    /// Seconds of a step at least: the low end of the interval.
    pub step_time_low_s: f64,
    /// Seconds of a step at most: the high end of the interval.
    pub step_time_high_s: f64,
    /// Tokens of all ranks per second.
    pub tokens_per_s: f64,
    /// Tokens of one device per second.
    pub tokens_per_s_per_device: f64,
    /// Share of the peak that the model's operations take.
    pub mfu: Option<f64>,
    /// Bytes of the fullest device.
    pub peak_mem_bytes: f64,
    /// Bytes that all ranks of CPUs place on a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// Joules of a step on all devices, where watts are known.
    pub energy_j: Option<f64>,
    /// Whether it fits.
    pub fits: bool,
}

/// What became of the candidates of a search.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Candidates {
    /// Candidates.
    pub total: f64,
    /// Candidates that were priced.
    pub evaluated: u64,
    /// Those of them that were priced before their turn.
    pub priced_ahead: u64,
    /// Candidates that could not be better.
    pub bounded_out: f64,
    /// Candidates that do not fit.
    pub too_large: f64,
}

/// What a layout costs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Score {
    /// The model's name.
    pub model: String,
    /// The cluster's name.
    pub cluster: String,
    /// The layout, with what was open decided.
    pub configuration: String,
    /// How the program executes.
    pub style: String,
    /// Ranks.
    pub ranks: u64,
    /// On GPUs: what is computed and not priced, in words.
    pub assumptions: Vec<String>,
    /// On GPUs: what is added to the vocabulary, where something is.
    pub vocabulary_padding: Option<Padding>,
    /// Seconds of a step.
    pub step_time_s: f64,
    /// Seconds of a step at least: the low end of the interval.
    pub step_time_low_s: f64,
    /// Seconds of a step at most: the high end of the interval.
    pub step_time_high_s: f64,
    /// Tokens of all ranks per second.
    pub tokens_per_s: f64,
    /// Tokens of one device per second.
    pub tokens_per_s_per_device: f64,
    /// Share of the peak that the model's operations take.
    pub mfu: f64,
    /// Parts of a step in seconds, which sum to it.
    pub breakdown: Breakdown,
    /// Bytes of the fullest device.
    pub peak_mem_bytes: f64,
    /// Bytes of a device for a job.
    pub have_bytes: f64,
    /// Whether it fits.
    pub fits: bool,
    /// Bytes of the fullest device, by what holds them.
    pub memory: DeviceMemory,
    /// Names in the file that were not used.
    pub left_out: Vec<String>,
    /// How the file was read, where that is not plain.
    pub notes: Vec<String>,
    /// On GPUs, how the program is assumed to execute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub executor: Option<Executor>,
}

/// The fewest and the cheapest devices that meet a deadline.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Size {
    /// The model's name.
    pub model: String,
    /// Tokens that are trained on.
    pub tokens: f64,
    /// Samples of a step over all ranks.
    pub gbs: Option<u64>,
    /// Seconds that there are.
    pub deadline_s: f64,
    /// The fewest devices that are enough.
    pub devices: Option<u64>,
    /// The cheapest of those that are.
    pub cheapest_devices: Option<u64>,
    /// What was tried.
    pub tried: Vec<SizeRow>,
    /// Why no number of devices is enough.
    pub reason: Option<String>,
    /// On GPUs, how the program is assumed to execute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub executor: Option<Executor>,
}

/// A number of devices that was tried.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SizeRow {
    /// What it takes.
    #[serde(flatten)]
    pub run: Run,
    /// Devices.
    pub devices: u64,
    /// The configuration.
    pub plan: String,
    /// Seconds of a step.
    pub step_time_s: f64,
    /// Whether it meets the deadline.
    pub meets_deadline: bool,
}

/// Why the plan for GPUs is as it is: gantline.plan/1, and beside it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SpaceExplain {
    /// The plan.
    #[serde(flatten)]
    pub plan: Plan,
    /// The plan with one decision changed.
    pub neighbours: Vec<Neighbour>,
    /// What one GiB more on each device saves.
    pub seconds_saved_per_gib: f64,
    /// Sizes of memory: memory_bytes, best (a plan or null).
    pub other_memory: Vec<Value>,
    /// The fastest plan, where one in a file is explained.
    pub fastest: Option<PlanRow>,
    /// Why there is no fastest plan, where one is explained.
    pub infeasible: Option<String>,
}

/// A plan with one decision changed.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Neighbour {
    /// The plan.
    #[serde(flatten)]
    pub row: PlanRow,
    /// The decision.
    pub change: String,
    /// What is worse.
    pub reason: String,
    /// The best with that decision and all others searched.
    pub best: Option<PlanRow>,
}

/// What usual strategies need on GPUs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SpaceFit {
    /// The model's name.
    pub model: String,
    /// The cluster, with what was read from it.
    pub cluster: String,
    /// Devices.
    pub devices: u64,
    /// Bytes of a device for a job.
    pub have_bytes: f64,
    /// Whether any configuration fits.
    pub fits: bool,
    /// Why nothing fits.
    pub reason: Option<String>,
    /// The strategies.
    pub rows: Vec<StrategyRow>,
    /// The fastest strategy that fits, or else any plan that does.
    pub fastest: Option<PlanRow>,
    /// Bytes of that plan's fullest device, by what holds them; those of rows are estimates.
    pub memory: Option<DeviceMemory>,
    /// Where nothing fits, the plan that needs the least: text, rank, need_bytes, memory.
    pub smallest: Option<Object>,
    /// Where nothing fits, what does: change, devices, and the plan as in smallest.
    pub nearest: Vec<Value>,
    /// On GPUs, how the program is assumed to execute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub executor: Option<Executor>,
}

/// What a usual strategy needs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct StrategyRow {
    /// Its name.
    pub strategy: String,
    /// The configuration.
    pub plan: String,
    /// Bytes of the fullest device, by what holds them.
    pub memory: Memory,
    /// All of them.
    pub need_bytes: f64,
    /// Whether that fits.
    pub fits: bool,
}

/// Why the answer is no: what a verb prints in the place of its own document.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Infeasible {
    /// False.
    pub fits: bool,
    /// The code of the diagnostic.
    pub code: String,
    /// Its headline.
    pub reason: String,
    /// How that is known.
    pub notes: Vec<String>,
    /// What to ask instead.
    pub help: Option<String>,
    /// Bytes of a device for a job.
    pub have_bytes: Option<f64>,
    /// Where nothing fits, the plan that needs the least: text, rank, need_bytes, memory.
    pub smallest: Option<Object>,
    /// Where nothing fits, what does: change, devices, and the plan as in smallest.
    pub nearest: Vec<Value>,
}

/// The best plan on a cluster as it is, and with other hardware.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct WhatIf {
    /// The model's name.
    pub model: String,
    /// The cluster as it is, with each change, and with all of them.
    pub rows: Vec<WhatIfRow>,
    /// How the program is assumed to execute.
    pub executor: Option<Executor>,
}

/// One of these clusters, with its best plan.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct WhatIfRow {
    /// What is changed.
    pub hardware: String,
    /// The cluster, with what was read from it.
    pub cluster: String,
    /// Devices.
    pub devices: u64,
    /// Bytes of a device for a job.
    pub have_bytes: f64,
    /// That products are slower than the device's fastest, where they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The fastest plan.
    pub best: Option<PlanRow>,
    /// Device hours that it takes for 10⁹ tokens.
    pub device_hours_per_billion_tokens: Option<f64>,
    /// Why there is no plan.
    pub reason: Option<String>,
}

/// The fastest plan of every combination of clusters, devices, batches and lengths.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Sweep {
    /// The model, as it was asked about.
    pub model: String,
    /// Clusters outermost, then lengths, devices and batches.
    pub rows: Vec<SweepRow>,
    /// On GPUs, how the program is assumed to execute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub executor: Option<Executor>,
}

/// The fastest plan of one combination, or why there is none.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct SweepRow {
    /// The cluster, as it was asked about.
    pub cluster: String,
    /// Devices.
    pub devices: u64,
    /// Samples of a step.
    pub gbs: u64,
    /// Tokens of a sample.
    pub seq: u64,
    /// Whether a plan fits.
    pub fits: bool,
    /// The name of the plan.
    pub plan: Option<String>,
    /// The expected time of a step.
    pub step_time_s: Option<f64>,
    /// The low end of its 80 % interval.
    pub step_time_low_s: Option<f64>,
    /// The high end.
    pub step_time_high_s: Option<f64>,
    /// Tokens per second of all devices.
    pub tokens_per_s: Option<f64>,
    /// Tokens per second of one device.
    pub tokens_per_s_per_device: Option<f64>,
    /// Model flops over the peak of the devices.
    pub mfu: Option<f64>,
    /// Bytes of the fullest device.
    pub peak_mem_bytes: Option<f64>,
    /// Why there is no plan.
    pub reason: Option<String>,
}

/// The longest sequence, or the largest micro-batch, for which a plan fits.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Largest {
    /// `seq` or `mbs`.
    pub of: String,
    /// The largest that fits.
    pub largest: Option<u64>,
    /// Its fastest plan.
    pub plan: Option<PlanRow>,
    /// The smallest that was tried and does not fit; null where all fit.
    pub next: Option<u64>,
    /// Why that does not.
    pub reason: Option<String>,
}
