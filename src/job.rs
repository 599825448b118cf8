//! What is asked: the flags that several verbs share, and what they mean to the planner.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use ir::dim::{Bindings, Dim};
use ir::import::{Architecture, Description, Options};
use ir::lora::Lora;
use ir::plan::Optimizer;
use ir::precision::{Products, ROLES};
use ir::{DType, Diagnostic, Module, TensorType};
use planner::calibration::Calibration;
use planner::cluster::{Cluster, Kind, PRESETS};
use planner::compiled::Job;
use planner::limits::{Decision, Limits};
use planner::tools::Target;
use serde::{Deserialize, Serialize};

use crate::argument::{PathArg, positive};
use crate::failure::{Failure, usage};
use crate::{LOSS, failure, probe};

/// AdamW with the betas that language models are trained with (Brown et al. 2020).
pub const ADAMW: Optimizer =
    Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1, decay_biases: 0.0 };

/// Candidates that a search compiles at most. Chosen: a hundred times what gpt2 on four ranks needs
/// until none can be faster; only where little memory refuses the fastest ones are there many more.
pub const EVALUATIONS_MAX: usize = 1024;

/// Ranks that are threads of one process at most. Chosen: no machine has more cores by far.
const LOCAL_RANKS_MAX: usize = 1024;

/// Devices of a cluster at most. Chosen: as for counts in cluster files.
const DEVICES_MAX: usize = 1 << 30;

/// Where a model runs.
#[derive(Clone, Debug, clap::Args)]
pub struct Where {
    /// The cluster: a preset (`gantline cluster ls`) or a file
    #[arg(long, value_name = "PRESET|FILE", default_value = "cpu-local")]
    pub cluster: PathArg,
    /// Number of ranks, each with one device [default: all devices of the cluster; 1 where ranks
    /// are threads]
    #[arg(
        long,
        visible_alias = "devices",
        alias = "world-size",
        value_name = "N",
        value_parser = positive
    )]
    pub ranks: Option<usize>,
    /// Number of nodes of the cluster [default: what the ranks need, or what the file says]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub nodes: Option<usize>,
    /// Rates that `gantline calibrate` measured, in place of the cluster's own, or `none` for the
    /// datasheet's [default: of cpu-local, rates that are measured for a second and kept]
    #[arg(long, value_name = "FILE|none")]
    pub calibration: Option<PathArg>,
}

impl Where {
    /// Reads the cluster and what was measured on it.
    pub fn cluster(&self) -> Result<Cluster, Failure> {
        let mut cluster = Cluster::load(&self.cluster)?;
        let is_preset = PRESETS.iter().any(|(name, _)| self.cluster.is(name));
        cluster.nodes = match (self.nodes, cluster.devices_per_node, self.ranks) {
            (Some(nodes), _, _) => nodes,
            // A preset says what a node is; there are as many as it takes.
            (None, Some(each), Some(ranks)) if is_preset => ranks.div_ceil(each.max(1)),
            (None, _, _) => cluster.nodes,
        };
        if !cluster.groups.is_empty() && self.nodes.is_some() {
            let headline = "`--nodes` is of one kind of devices, and the cluster has groups";
            let help = "write `nodes` in each group of the file";
            return Err(usage("--nodes", headline.to_owned()).help(help).into());
        }
        if let Some(path) = self.said_calibration().filter(|path| !path.is(probe::NONE)) {
            if cluster.device.kind == Kind::Gpu {
                let headline = "what was measured here are CPUs, and the cluster has GPUs";
                let help = "write the rates of its devices in a cluster file";
                return Err(usage("--calibration", headline.to_owned()).help(help).into());
            }
            let text = failure::read_text(&path, "--calibration")?;
            cluster.calibration = Some(Calibration::parse(&path.to_string(), &text)?);
        }
        let ranks = self.ranks(&cluster);
        check_local(&cluster, ranks)?;
        if let Some(devices) = cluster.devices().filter(|devices| *devices > DEVICES_MAX) {
            let headline = format!("{devices} devices, more than {DEVICES_MAX}");
            return Err(usage("--nodes", headline).help("use fewer nodes").into());
        }
        if let Some(devices) = cluster.devices().filter(|devices| ranks > *devices) {
            let headline = format!("{ranks} ranks on {devices} devices of the cluster");
            let help = format!("use --ranks {devices} or fewer, or --nodes with more nodes");
            return Err(usage("--ranks", headline).help(help).into());
        }
        Ok(cluster)
    }

    /// What the user says of rates: by the flag, or for all commands by the variable.
    fn said_calibration(&self) -> Option<PathArg> {
        let variable = || std::env::var_os(probe::VARIABLE).filter(|said| !said.is_empty());
        self.calibration.clone().or_else(|| variable().map(PathArg::from))
    }

    /// Reads the cluster. For `cpu-local` without a calibration, the rates of this machine are
    /// measured once and kept.
    pub fn measured_cluster(&self) -> Result<Cluster, Failure> {
        let mut cluster = self.cluster()?;
        if self.cluster.is("cpu-local") && self.said_calibration().is_none() {
            cluster.calibration = Some(probe::rates()?);
        }
        Ok(cluster)
    }

    /// The ranks that are asked for: all devices of the cluster where nothing is said.
    pub fn ranks(&self, cluster: &Cluster) -> usize {
        self.ranks.or_else(|| cluster.devices()).unwrap_or(1)
    }
}

/// The diagnostic of more ranks than one process has threads for.
pub fn check_local(cluster: &Cluster, ranks: usize) -> Result<(), Diagnostic> {
    let most = LOCAL_RANKS_MAX * cluster.nodes;
    if cluster.device.kind != Kind::Cpu || ranks <= most {
        return Ok(());
    }
    let headline = format!("{ranks} ranks are more threads than one process should have");
    Err(usage("--ranks", headline).help(format!("use --ranks {most} or fewer")))
}

/// The heading of flags that fix, bound or forbid decisions of a plan.
const DECISIONS: &str = "Decisions";

/// What a search may choose.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
#[serde(default)]
pub struct Limited {
    /// Fix a decision: pp, dp, cp, tp, ep, etp, sp, mbs, vpp, zero, keep, recompute, offload,
    /// offload-optimizer, offload-parameters, offload-activations; on GPUs also schedule, shard,
    /// placement
    #[arg(long, help_heading = DECISIONS, value_name = "KNOB=N", value_delimiter = ',')]
    pub fix: Vec<String>,
    /// Forbid a kind of parallelism, or another decision
    #[arg(long, help_heading = DECISIONS, value_name = "KNOB", value_delimiter = ',')]
    pub forbid: Vec<String>,
    /// Bound a decision from above, or what a device or a node of CPUs holds: memory=60GiB
    #[arg(long, help_heading = DECISIONS, value_name = "KNOB=N", value_delimiter = ',')]
    pub max: Vec<String>,
    /// What a device or a node of CPUs may hold at most, such as 60GiB: as --max memory=SIZE
    #[arg(long, help_heading = DECISIONS, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// Ranks of the axes
    #[command(flatten)]
    #[serde(flatten)]
    pub axes: Axes,
}

/// Sizes that are written as flags of their own; where a plan is looked for, they are fixed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
#[serde(default)]
pub struct Axes {
    /// Tensor-parallel ranks: as --fix tp=N
    #[arg(long, help_heading = DECISIONS, value_name = "N", value_parser = positive)]
    #[arg(alias = "tensor-model-parallel-size")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tp: Option<usize>,
    /// Pipeline stages: as --fix pp=N
    #[arg(long, help_heading = DECISIONS, value_name = "N", value_parser = positive)]
    #[arg(alias = "pipeline-model-parallel-size")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pp: Option<usize>,
    /// Data-parallel ranks: as --fix dp=N
    #[arg(long, help_heading = DECISIONS, value_name = "N", value_parser = positive)]
    #[arg(alias = "data-parallel-size")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp: Option<usize>,
    /// Samples of a micro-batch on one rank: as --fix mbs=N
    #[arg(long, help_heading = DECISIONS, value_name = "N", value_parser = positive)]
    #[arg(alias = "micro-batch-size")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mbs: Option<usize>,
}

impl Limited {
    /// Whether no flag limits a decision.
    pub fn is_empty(&self) -> bool {
        *self == Limited::default()
    }

    /// The limits of plans that are compiled, which do not have all decisions.
    pub fn limits(&self) -> Result<Limits, Vec<Diagnostic>> {
        let limits = self.all_limits()?;
        let compiled = [
            Decision::Pp,
            Decision::Dp,
            Decision::Cp,
            Decision::Tp,
            Decision::Ep,
            Decision::Etp,
            Decision::Sp,
            Decision::Zero,
            Decision::Mbs,
            Decision::Vpp,
            Decision::Keep,
            Decision::Recompute,
            Decision::Offload,
            Decision::OffloadOptimizer,
            Decision::OffloadParameters,
            Decision::OffloadActivations,
        ];
        let refuse = |decision: Decision| {
            if decision == Decision::Schedule {
                let headline = "plans for CPUs are searched with `schedule=1f1b`".to_owned();
                let help = "plan for a cluster of GPUs with -o FILE, and write `--plan FILE` here";
                return usage("--fix", headline).help(help);
            }
            if decision == Decision::Shard {
                let headline = "plans for CPUs are searched with pieces over all ranks".to_owned();
                let help = "write it into a plan file, `zero 3 over 2`, and that as `--plan FILE`";
                return usage("--fix", headline).help(help);
            }
            let headline = format!("plans that this version compiles have no `{decision}`");
            usage("--fix", headline).help("leave it out, or plan for a cluster of GPUs")
        };
        let wrong: Vec<Diagnostic> = self.lacking(&compiled)?.into_iter().map(refuse).collect();
        if wrong.is_empty() { Ok(limits) } else { Err(wrong) }
    }

    /// The decisions that are limited to what is not usual, beside those that there are.
    pub fn lacking(&self, there: &[Decision]) -> Result<Vec<Decision>, Vec<Diagnostic>> {
        let limits = self.all_limits()?;
        let others = Decision::ALL.into_iter().filter(|decision| !there.contains(decision));
        Ok(others.filter(|decision| !limits.allow(*decision, decision.without())).collect())
    }

    /// The limits that the flags say.
    pub fn all_limits(&self) -> Result<Limits, Vec<Diagnostic>> {
        let memory = self.memory.iter().map(|size| format!("memory={size}"));
        let max: Vec<String> = self.max.iter().cloned().chain(memory).collect();
        let mut limits = Limits::parse(&self.fix, &self.forbid, &max)?;
        let Axes { tp, pp, dp, mbs } = self.axes;
        let short =
            [(Decision::Tp, tp), (Decision::Pp, pp), (Decision::Dp, dp), (Decision::Mbs, mbs)];
        for (decision, number) in short {
            if let Some(number) = number {
                limits.fix_once(decision, number).map_err(|one| vec![one])?;
            }
        }
        limits.check()?;
        Ok(limits)
    }
}

/// A question to the planner with everything that it borrows.
#[derive(Clone, Debug)]
pub struct PlanRequest {
    /// The cluster.
    pub cluster: Cluster,
    /// The prepared module.
    pub module: Module,
    /// The model's name.
    pub model: String,
    /// The ranks.
    pub ranks: usize,
    /// Samples of a step.
    pub global_batch_size: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// The element types, which the module has.
    pub precision: ir::precision::Precision,
    /// The update.
    pub optimizer: Optimizer,
    /// The norm to which gradients are clipped.
    pub clip: Option<f64>,
    /// The adapters that are trained in place of the model: the module has them.
    pub lora: Option<Lora>,
    /// What may be chosen.
    pub limits: Limits,
}

impl PlanRequest {
    /// The planner's form of it.
    pub fn job(&self) -> Job<'_> {
        Job {
            module: &self.module,
            entry: LOSS,
            model: self.model.clone(),
            cluster: &self.cluster,
            ranks: self.ranks,
            global_batch_size: self.global_batch_size,
            seq: self.seq,
            precision: self.precision,
            optimizer: self.optimizer,
            clip: self.clip,
            lora: self.lora.clone(),
            limits: self.limits.clone(),
            evaluations_max: EVALUATIONS_MAX,
        }
    }
}

/// The longest sequence that a model was made for; of a graph, that of its tokens, or 1 where they
/// have any.
pub fn positions_max(description: &Description) -> usize {
    match &description.architecture {
        Architecture::Family(model) => model.size("P"),
        Architecture::Graph(module) => {
            let sizes = fed(module).filter_map(|(_, dim)| usize::try_from(dim.as_constant()?).ok());
            sizes.max().unwrap_or(1).max(1)
        }
        Architecture::Sized(sizes) => sizes.positions(),
    }
}

/// The names of what a graph is fed for each sample, and how many numbers that is.
fn fed(module: &Module) -> impl Iterator<Item = (&str, &Dim)> {
    let params = module.function(LOSS).into_iter().flat_map(|entry| {
        entry.params().map(|param| (entry.value(param).name.as_str(), entry.ty(param)))
    });
    let is_fed = |(name, ty): &(&str, &TensorType)| {
        ["tokens", "labels"].contains(name) && ty.ndim() == 2 && !ty.dtype.is_float()
    };
    params.filter(is_fed).map(|(name, ty)| (name, &ty.dims[1]))
}

/// The diagnostic of a sequence of other length than a graph's tokens or labels have.
pub fn check_seq(description: &Description, seq: usize) -> Result<(), Diagnostic> {
    let Architecture::Graph(module) = &description.architecture else { return Ok(()) };
    let lengths: Vec<_> = fed(module).filter(|(_, dim)| dim.as_constant().is_some()).collect();
    if let [(one, first), .., (other, last)] = lengths[..]
        && first != last
    {
        let graph = &description.name;
        let headline =
            format!("`%{one}` of `{graph}` takes {first} tokens a sample, `%{other}` {last}");
        return Err(usage("graph", headline).help("give both one size in the graph"));
    }
    let bindings = Bindings::from([("S".to_owned(), seq as i64)]);
    let wrong = fed(module).find(|(_, dim)| dim.bind(&bindings).as_constant() != Some(seq as i64));
    let Some((name, dim)) = wrong else { return Ok(()) };
    let graph = &description.name;
    let headline = format!("a sample has {seq} tokens, and `%{name}` of `{graph}` takes {dim}");
    let help = match dim.as_constant() {
        Some(size) => format!("write --seq {size}, or leave it out"),
        None => "write the size as `S` in the graph".to_owned(),
    };
    Err(usage("--seq", headline).help(help))
}

/// How many different tokens a model knows.
pub fn vocab(description: &Description) -> Result<usize, Failure> {
    let seq = match &description.architecture {
        Architecture::Graph(_) => positions_max(description),
        Architecture::Family(_) | Architecture::Sized(_) => 1,
    };
    let options = Options { seq, dtype: DType::F32, dropout: Some(0.0), documents: false };
    Ok(crate::import(description, &options)?.vocab)
}

/// The element type of a model that is written as a graph, which has no other.
pub fn graph_dtype(description: &Description) -> Option<DType> {
    let Architecture::Graph(module) = &description.architecture else { return None };
    let entry = module.function(LOSS)?;
    entry.param_types().iter().map(|ty| ty.dtype).find(|dtype| dtype.is_float())
}

/// The diagnostic of an element type that a graph does not compute in.
pub fn check_graph(description: &Description, dtype: DType) -> Result<(), Diagnostic> {
    match graph_dtype(description).filter(|own| *own != dtype) {
        None => Ok(()),
        Some(own) => {
            let name = &description.name;
            let headline = format!("`{name}` is written in {own}, and {dtype} is asked for");
            let help = format!("write --dtype {own}, or another graph");
            Err(usage("--dtype", headline).help(help))
        }
    }
}

/// Reads an element type that can be computed with on CPUs.
pub fn dtype(text: &str) -> Result<DType, String> {
    match text {
        "f32" | "fp32" | "float32" => Ok(DType::F32),
        "f64" | "fp64" | "float64" => Ok(DType::F64),
        "bf16" | "bfloat16" => Ok(DType::BF16),
        "f16" | "fp16" | "float16" => Ok(DType::F16),
        "f8" | "fp8" | "float8" => Ok(DType::F8E4M3),
        "tf32" => Err("it is f32 whose products round: use f32, with `--precision products=tf32` \
                       where there is such a flag"
            .to_owned()),
        _ => Err("known are f32, f64, bf16, f16 and f8".to_owned()),
    }
}

/// In what numbers are stored, and products of them computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Both in one type.
    Of(DType),
    /// Stored in f32, and rounded to tf32 in tensor cores.
    Tf32,
}

impl Precision {
    /// The element type of what is stored.
    pub fn stored(self) -> DType {
        match self {
            Precision::Of(dtype) => dtype,
            Precision::Tf32 => DType::F32,
        }
    }

    /// The type of activations in a training, and how its products read them.
    pub fn computed(self) -> (DType, Products) {
        match self {
            Precision::Of(DType::F8E4M3) => (DType::BF16, Products::F8E4M3),
            Precision::Of(dtype) => (dtype, Products::Own),
            Precision::Tf32 => (DType::F32, Products::Tf32),
        }
    }

    /// That of a plan: what its products read, or else what activations are.
    pub fn of_plan(plan: &ir::Plan) -> Precision {
        match plan.precision.products {
            Products::Own => Precision::Of(plan.dtype()),
            Products::Tf32 => Precision::Tf32,
            Products::F8E4M3 | Products::F8Hybrid => Precision::Of(DType::F8E4M3),
        }
    }

    /// The name in flags and documents.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Of(dtype) => dtype.name(),
            Precision::Tf32 => "tf32",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<DType> for Precision {
    fn from(dtype: DType) -> Precision {
        Precision::Of(dtype)
    }
}

impl FromStr for Precision {
    type Err = ();

    fn from_str(name: &str) -> Result<Precision, ()> {
        if name == "tf32" { Ok(Precision::Tf32) } else { name.parse().map(Precision::Of) }
    }
}

/// Reads the expert load imbalance: the busiest rank's tokens over the mean, 1 or more.
pub fn imbalance(text: &str) -> Result<f64, String> {
    let times = text.parse().ok().filter(|times| (1.0..=IMBALANCE_MAX).contains(times));
    times.ok_or_else(|| "write a number that is 1, where all have as many, or more: 1.3".to_owned())
}

/// Upper limit of the expert load imbalance. Chosen: nowhere do more ranks share experts.
const IMBALANCE_MAX: f64 = 1024.0;

/// Reads the tool that is to execute a plan: `megatron`, or with a release `megatron@core-0.13`.
pub fn tool(text: &str) -> Result<Target, String> {
    Target::parse(text).map_err(|(headline, help)| format!("{headline}; {help}"))
}

/// Reads what products are computed in: on GPUs, f32 may be rounded.
pub fn precision(text: &str) -> Result<Precision, String> {
    match text {
        "tf32" => Ok(Precision::Tf32),
        _ => dtype(text).map(Precision::Of).map_err(|known| known.replace("f32,", "f32, tf32,")),
    }
}

/// The diagnostic of an element type that the CPU kernels do not compute with.
pub fn check_executable(dtype: DType) -> Result<(), Diagnostic> {
    if matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16) {
        return Ok(());
    }
    let headline = format!("`{dtype}` can be planned for, and not be computed with on a CPU");
    let help = "use bf16, f16, f32 or f64";
    Err(Diagnostic::error("E5010", ir::Span::of("--dtype"), headline).help(help))
}

/// The element types of a training in a type, with the roles that `--precision` sets.
///
/// # Errors
/// A word that sets no role; a type that no kernel computes with; all roles that do not go
/// together.
pub fn training_precision(
    asked: impl Into<Precision>,
    roles: &[String],
) -> Result<ir::precision::Precision, Vec<Diagnostic>> {
    let (dtype, products) = asked.into().computed();
    check_executable(dtype).map_err(|one| vec![one])?;
    let training = ir::precision::Precision::training(dtype);
    let mut precision = ir::precision::Precision { products, ..training };
    let (mut wrong, mut said) = (Vec::new(), BTreeSet::new());
    for role in roles {
        let Some((name, to)) = role.split_once('=').map(|(name, to)| (name.trim(), to.trim()))
        else {
            let headline = format!("`{role}` sets no role");
            wrong.push(usage("--precision", headline).help("write ROLE=TYPE, as in states=bf16"));
            continue;
        };
        if !said.insert(name) {
            let headline = format!("the role `{name}` is set twice");
            wrong.push(usage("--precision", headline).help("set it once"));
        } else if let Err(why) = precision.set(name, to) {
            let help = match ROLES.contains(&name) {
                true => {
                    "types are f64, f32, bf16 and f16; masters may be none, states f8e4m3, \
                     products own, tf32, f8e4m3 or f8-hybrid"
                }
                false => "set one of these roles, as in states=bf16",
            };
            wrong.push(usage("--precision", why).help(help));
        }
    }
    // Gradients are exchanged as they are added up, unless something else is said.
    if said.contains("gradients") && !said.contains("reduce") {
        precision.reduce = precision.gradients;
    }
    if wrong.is_empty() {
        let lacking = precision.lacking().into_iter();
        wrong.extend(lacking.map(|why| {
            Diagnostic::error("E5010", ir::Span::of("--precision"), why)
                .help("leave the role out, or choose one of these types")
        }));
    }
    if wrong.is_empty() { Ok(precision) } else { Err(wrong) }
}
