//! `plan`, `fit` and `explain` where ranks are GPUs: answered by the search over the whole space,
//! in closed form; of what is answered, the program is compiled for its memory.

pub mod explain;
mod fewer;
pub mod finalists;
mod launch;
pub mod fit;
pub mod groups;
pub mod largest;
pub mod what_if;

use std::time::Instant;

use codegen::executable::{Features, shares_whole_samples};
use codegen::footprint::NotYet;
use ir::lora::Lora;
use ir::plan::Prediction;
use ir::target::Arch;
use ir::{DType, Diagnostic, Plan, Span};
use kernels::{Bytes, Seconds};
use planner::cluster::{Cluster, Power};
use planner::configuration::Configuration;
use planner::elaborate::{mesh_of, sharing_of};
use planner::estimate::described::{Described, described};
use planner::estimate::padding::Padding;
use planner::estimate::rates::{Arithmetic, ProductKernels};
use planner::estimate::workload::{Frozen, Workload};

use planner::estimate::profile::{self, Profile, Stated};
use planner::estimate::{self, Estimate, Estimator, Job};
use planner::finalists::{Finalists, Held};
use planner::origin::Origin;
use planner::search::branch_and_bound::{Budget, Objective};
use planner::search::events::replayed_s;
use planner::search::frontier::{frontier, smallest};
use planner::search::request::{Chosen, EVALUATIONS_MAX, SearchRequest, SearchResult, search};
use planner::tools::{Form, Sizes, Target};
use serde_json::json;

use self::finalists::{device_memory, memory_lines, needs, oversized_lines};
use crate::cache;
use crate::documents::{self, Document, PlanRow, StepParts};
use crate::failure::{self, Exit, Failure, usage};
use crate::job::Precision;
use crate::output::{self, Table};
use crate::planned::{self, Wanted};
use crate::verbs::assume;
use crate::verbs::flags::{Aim, PlanArgs, RequestFlags};

/// A question about GPUs, with everything that it borrows.
#[derive(Clone, Debug)]
pub struct Subject {
    /// What a step computes.
    pub work: Workload,
    /// Where.
    pub cluster: Cluster,
    /// Devices.
    pub devices: u32,
    /// Samples of a step.
    pub global_batch: u32,
    /// The element type.
    pub dtype: Precision,
    /// Operations per second of a device in it.
    pub peak_flops: f64,
    /// Tokens of a sample.
    pub seq: u32,
    /// Elements that attention caches of a token and layer, where that is one shared vector.
    pub latent: Option<u32>,
    /// Bytes of a device that a job may use, where the user limits them.
    pub memory_bytes: Option<f64>,
    /// The tool that is to execute the plan.
    pub target: Option<Target>,
    /// What the user states of the executor.
    pub stated: Stated,
}

/// The arithmetic of products.
pub fn arithmetic(precision: Precision) -> Arithmetic {
    let dtype = match precision {
        Precision::Of(dtype) => dtype,
        Precision::Tf32 => return Arithmetic::Tf32,
    };
    match dtype {
        DType::BF16 | DType::F16 => Arithmetic::Half,
        DType::F8E4M3 | DType::F8E5M2 => Arithmetic::F8,
        DType::F64
        | DType::F32
        | DType::I8
        | DType::I32
        | DType::I64
        | DType::U32
        | DType::Bool => Arithmetic::F32,
    }
}

/// The element type that is asked for, or what the devices usually train in.
pub fn element_type(asked: Option<Precision>, cluster: &Cluster) -> Result<Precision, Diagnostic> {
    if asked == Some(Precision::Of(DType::F64)) {
        let headline = "no device file has the times of products in f64".to_owned();
        return Err(usage("--dtype", headline).help("use f32, bf16 or f16"));
    }
    let usual = cluster.usual_dtype();
    let lacks = |precision: &Precision| match precision {
        Precision::Of(dtype) => !cluster.multiplies(*dtype),
        Precision::Tf32 => !estimate::rounds_to_tf32(cluster),
    };
    match asked.filter(lacks) {
        None => Ok(asked.unwrap_or(Precision::Of(usual))),
        Some(dtype) => {
            let headline = format!("`{}` has no products in {dtype}", cluster.name);
            Err(usage("--dtype", headline).help(format!("use {usual}, or f32")))
        }
    }
}

fn count(flag: &str, number: usize) -> Result<u32, Diagnostic> {
    u32::try_from(number).map_err(|_| usage(flag, format!("{number} is more than there can be")))
}

/// The model that is asked about. What would not be priced is refused.
fn model(asked: &RequestFlags) -> Result<Described, Failure> {
    if asked.optimizer != "adamw" {
        let headline =
            format!("on GPUs, steps are priced with adamw, not with {}", asked.optimizer);
        let words = profile::FACTS.iter().find(|fact| fact.name == "optimizer").map(|o| o.words);
        let names: Vec<&str> = words.unwrap_or_default().iter().map(|word| word.name).collect();
        let help = format!("write `--assume optimizer=NAME`: {}", names.join(", "));
        return Err(usage("--optimizer", headline).help(help).into());
    }
    let seq = asked.seq.map(|seq| count("--seq", seq)).transpose()?;
    let described = described(&asked.model, seq)?;
    if let Some(seq) = seq.filter(|seq| *seq != described.tokens) {
        let name = &described.work.name;
        let headline =
            format!("samples of `{name}` have no {seq} tokens: its graph has their size");
        return Err(usage("--seq", headline).help("leave it out").into());
    }
    let imbalance = imbalance(asked.imbalance, &asked.assumed.stated()?)?;
    let work = adapted(routed(described.work, imbalance)?, asked.lora.as_ref())?;
    Ok(Described { work, ..described })
}

/// The model that is asked about; what there is to know about it is said.
pub fn noted_model(asked: &RequestFlags) -> Result<Described, Failure> {
    let described = model(asked)?;
    note_warnings(&described);
    Ok(described)
}

/// Says what there is to know about the description, such as fields that nobody reads.
pub fn note_warnings(described: &Described) {
    for warning in &described.warnings {
        output::note(&failure::draw(warning));
    }
}

/// One line on the words that the execution profile adds to the vocabulary over `tp`
/// tensor-parallel ranks; empty where it adds none.
pub fn padding_line(padding: Option<Padding>, tp: u32) -> String {
    let Some(Padding { words, padded_words, parameters, bytes }) = padding else {
        return String::new();
    };
    let [words, padded, more] = [words, padded_words, parameters].map(output::count);
    let bytes = Bytes(bytes.max(0.0) as u64);
    format!(
        "vocabulary of {words} padded to {padded} for tp={tp}: {more} parameters, {bytes} on the \
         fullest device\n"
    )
}

/// The workload with adapters, where there are some.
pub fn adapted(work: Workload, lora: Option<&Lora>) -> Result<Workload, Diagnostic> {
    match lora {
        Some(lora) => work.with_adapters(lora),
        None => Ok(work),
    }
}

/// One line on what is trained, where that is not all.
pub fn adapter_line(work: &Workload) -> String {
    let Some(Frozen { base }) = work.frozen else { return String::new() };
    let trained = output::count(work.trained_parameters());
    let stored = base.map(|base| format!(", stored in {} in layers", base.name()));
    let stored = stored.unwrap_or_default();
    format!("adapters {trained} parameters are trained, all others frozen{stored}\n")
}

/// What is computed and not priced, a line each.
pub fn assumption_lines(work: &Workload) -> String {
    let line = |assumption: &String| format!("assumes  {assumption}\n");
    work.assumptions.iter().map(line).collect()
}

/// The expert load imbalance, which may be said by a flag of its own or by `--assume`.
pub fn imbalance(flag: Option<f64>, stated: &Stated) -> Result<Option<f64>, Diagnostic> {
    match (flag, stated.number("imbalance")) {
        (Some(_), Some(times)) => {
            let headline =
                format!("the imbalance is stated twice: here, and as {times} in --assume");
            Err(usage("--imbalance", headline).help("leave one out"))
        }
        (flag, stated) => Ok(flag.or(stated)),
    }
}

/// The workload with the given expert load imbalance: the busiest rank's tokens over the mean.
pub fn routed(work: Workload, imbalance: Option<f64>) -> Result<Workload, Diagnostic> {
    let Some(times) = imbalance else { return Ok(work) };
    let headline = format!("`{}` has no experts", work.name);
    work.routed_unevenly(times).ok_or_else(|| usage("--imbalance", headline).help("leave it out"))
}

impl Subject {
    /// What is asked about: a shape by its name, or a description that is a transformer. Warnings
    /// about it are printed, and where products of our own kernels are slow.
    pub fn new(asked: &RequestFlags, cluster: Cluster) -> Result<Subject, Failure> {
        let subject = Subject::with_warnings(asked, cluster)?;
        if let Some(note) = subject.products_note() {
            output::note(&note);
        }
        Ok(subject)
    }

    /// The same for an executor that the subject does not name: the model's warnings alone.
    pub fn with_warnings(asked: &RequestFlags, cluster: Cluster) -> Result<Subject, Failure> {
        Subject::of(asked, cluster, noted_model(asked)?)
    }

    /// The subject on another cluster, without repeating the model's warnings.
    pub fn quiet(asked: &RequestFlags, cluster: Cluster) -> Result<Subject, Failure> {
        Subject::of(asked, cluster, model(asked)?)
    }

    fn of(
        asked: &RequestFlags,
        cluster: Cluster,
        described: Described,
    ) -> Result<Subject, Failure> {
        asked.refuse_documents()?;
        let ranks = asked.place.ranks(&cluster);
        let devices = count("--devices", ranks)?;
        let dtype = element_type(asked.dtype, &cluster)?;
        let global_batch = count("--gbs", asked.gbs.unwrap_or(ranks.max(8)))?;
        let job = Job { global_batch: global_batch.into(), arithmetic: arithmetic(dtype) };
        let peak_flops =
            Estimator::new(&described.work, &cluster, profile::GANTLINE, job)?.peak_flops();
        let Described { work, latent, tokens: seq, warnings: _ } = described;
        let memory_bytes = asked.all_limits()?.memory_bytes();
        Ok(Subject {
            work,
            cluster,
            devices,
            global_batch,
            dtype,
            peak_flops,
            seq,
            latent,
            memory_bytes,
            target: asked.for_tool,
            stated: asked.assumed.stated()?,
        })
    }

    /// What prices its steps.
    pub fn estimator(&self) -> Result<Estimator<'_>, Failure> {
        self.estimator_as(self.release())
    }

    /// Devices, links and the workload, priced as `profile` executes.
    pub fn estimator_as(&self, profile: Profile) -> Result<Estimator<'_>, Failure> {
        let global_batch = u64::from(self.global_batch);
        let job = Job { global_batch, arithmetic: arithmetic(self.dtype) };
        let devices = u64::from(self.devices);
        let all = Estimator::over(devices, &self.work, &self.cluster, profile, job)?;
        Ok(all.limited(self.memory_bytes))
    }

    /// Tokens of a step.
    pub fn tokens(&self) -> f64 {
        f64::from(self.global_batch) * f64::from(self.seq)
    }

    /// Operations of a step.
    pub fn flops(&self) -> f64 {
        self.work.flops_per_sample() * f64::from(self.global_batch)
    }

    /// The share of the peak of a step's ranks that the model's operations take, both as they are
    /// counted.
    pub fn mfu(&self, estimate: &Estimate) -> f64 {
        let profile = self.profile();
        let flops = self.counted_flops() / profile.counted_peak(self.peak_flops);
        flops / ranks(estimate) / estimate.step_time_s
    }

    /// Operations of a step, as they are counted.
    fn counted_flops(&self) -> f64 {
        self.profile().counted_flops(&self.work) * f64::from(self.global_batch)
    }

    /// Seconds of a step at the peak rate of `devices` devices.
    pub fn seconds_at_peak(&self, devices: f64) -> f64 {
        self.flops() / (self.peak_flops * devices)
    }

    /// What devices draw, which the user alone can say.
    pub fn power(&self) -> Option<&Power> {
        self.cluster.device.power.as_ref()
    }

    /// Joules of a step on all its ranks, where it is known what they draw.
    pub fn joules(&self, estimate: &Estimate) -> Option<f64> {
        let joules = self.power()?.joules(estimate.step_time_s, estimate.busy_s);
        Some(ranks(estimate) * joules)
    }

    /// Seconds of a step whose passes are replayed one by one, where they are not too many.
    pub fn simulated_s(&self, estimate: &Estimate) -> Option<f64> {
        replayed_s(&self.estimator().ok()?, estimate)
    }

    /// What the execution profile adds to the vocabulary in a plan.
    pub fn padding(&self, configuration: &Configuration) -> Option<Padding> {
        self.estimator().ok()?.padding(configuration).ok()?
    }

    /// The tool that executes the plan, and whose numbers its prices are.
    fn tool(&self) -> Option<documents::ForTool> {
        let target = self.target?;
        let measured = target.whose_numbers(&self.cluster);
        Some(documents::ForTool { name: target.to_string(), measured })
    }

    /// How the program is assumed to execute, as documents have it.
    pub fn executor(&self) -> documents::Executor {
        documents::Executor::of(&self.profile(), self.tool())
    }

    /// What is asked about, in three lines.
    pub fn header(&self) -> String {
        let node = self.cluster.devices_per_node.unwrap_or(1);
        self.header_of(&format!("{} devices, {node} a node", self.devices))
    }

    /// The header in three lines, for any number of devices.
    pub fn open_header(&self) -> String {
        self.header_of(&format!("{} devices a node", self.cluster.devices_per_node.unwrap_or(1)))
    }

    /// The execution profile: of the tool's release, or our own.
    fn release(&self) -> Profile {
        let of_tool = self.target.and_then(|target| target.profile_on(&self.cluster));
        of_tool.unwrap_or(profile::GANTLINE).stating(self.stated)
    }

    /// How the program is assumed to execute.
    fn profile(&self) -> Profile {
        assumed(self.release().on(&self.cluster), arithmetic(self.dtype), &self.work)
    }

    /// As the function of this name.
    pub fn products_note(&self) -> Option<String> {
        products_note(&self.profile(), &self.cluster)
    }

    /// Refuses a configuration that the tool cannot express.
    pub fn check_expressible(&self, flag: &str, c: &Configuration) -> Result<(), Diagnostic> {
        match self.target {
            Some(target) => check_expressible(target, flag, c, &self.work),
            None => Ok(()),
        }
    }

    /// How the program is assumed to execute, fact by fact.
    pub fn executor_lines(&self) -> String {
        let profile = self.profile();
        format!("executor {}\n{}", profile.describe(), assume::lines(&profile))
    }

    fn header_of(&self, devices: &str) -> String {
        let Subject { work, cluster, global_batch, dtype, .. } = self;
        let mut text = format!("model    {}: {}", work.name, output::count(work.parameters()));
        text += &format!(" parameters in {dtype}\n");
        text += &adapter_line(work);
        text += &format!("cluster  {}, {devices}\n", cluster.describe());
        text += &samples_of(*global_batch, self.seq);
        text += &self.executor_lines();
        if let Some(target) = self.target {
            text += &format!("for tool {target}: numbers of {}\n", target.whose_numbers(cluster));
        }
        text += &conventions(&self.profile());
        if work.busiest() > 1.0 {
            text +=
                &format!("routing  the busiest rank has {} times the average\n", work.busiest());
        }
        text + &assumption_lines(work)
    }
}

/// A warning that our own kernels have no fast products on these devices; none of other executors,
/// and where the user states what products are.
pub fn products_note(profile: &Profile, cluster: &Cluster) -> Option<String> {
    let is_ours = profile.name == profile::GANTLINE.name && !profile.stated.says("products");
    (is_ours && profile.products == ProductKernels::MmaSync).then(|| {
        format!(
            "products on {} are by mma.sync here, and slower than the device's fastest: \
             `--for-tool TOOL` prices a tool's, `--assume products=fastest` the device's",
            cluster.device.name
        )
    })
}

/// A profile as it is assumed of a workload.
pub fn assumed(profile: Profile, arithmetic: Arithmetic, work: &Workload) -> Profile {
    let mut profile = profile.in_arithmetic(arithmetic);
    profile.stated.imbalance = Some(work.busiest());
    profile
}

/// How flops and MFU are counted, as a line of a header.
fn conventions(profile: &Profile) -> String {
    format!("MFU      counts {}, and no recomputation\n", profile.convention())
}

/// What a step has, as a line of a header.
fn samples_of(global_batch: u32, seq: u32) -> String {
    let samples = output::count(global_batch.into());
    match seq {
        1 => format!("step     {samples} samples\n"),
        seq => format!("step     {samples} samples of {seq} tokens\n"),
    }
}

/// Devices that a step uses.
fn ranks(estimate: &Estimate) -> f64 {
    estimate.configuration.ranks() as f64
}

/// Refuses a configuration that a tool cannot express.
pub fn check_expressible(
    target: Target,
    flag: &str,
    c: &Configuration,
    work: &Workload,
) -> Result<(), Diagnostic> {
    let lost = target.refusals(c, Sizes::of(work), Form::Launch);
    if lost.is_empty() {
        return Ok(());
    }
    let headline = format!("{target} cannot execute `{c}`: {}", lost.join(", "));
    let help = "change that, or leave `--for-tool` out";
    Err(Diagnostic::error("E5010", Span::of(flag), headline).help(help))
}

/// The fastest configuration that fits.
pub fn answer(subject: &Subject, asked: &RequestFlags) -> Result<SearchResult, Failure> {
    answer_for(subject, asked, Aim::Time, &|| false)
}

/// What the search is asked, of what prices its steps.
fn question<'a>(
    subject: &'a Subject,
    asked: &RequestFlags,
    estimator: &'a Estimator<'a>,
    aim: Aim,
    stop: &'a (dyn Fn() -> bool + Sync),
) -> Result<SearchRequest<'a>, Failure> {
    Ok(SearchRequest {
        estimator,
        devices: subject.devices,
        global_batch: subject.global_batch,
        limits: asked.all_limits()?,
        objective: Objective::Time,
        power: subject.power().filter(|_| aim == Aim::Energy),
        budget: Budget { evaluations_max: EVALUATIONS_MAX, stop },
    })
}

fn answer_for(
    subject: &Subject,
    asked: &RequestFlags,
    aim: Aim,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<SearchResult, Failure> {
    let estimator = subject.estimator()?;
    let question = question(subject, asked, &estimator, aim, stop)?;
    Ok(match aim {
        Aim::Time | Aim::Cost | Aim::Energy => search(&question)?,
        Aim::Memory => smallest(&question)?,
        Aim::Pareto => frontier(&question)?,
    })
}

/// The best answer, of fewer devices where these are cheaper and that is what is asked for.
fn best_answer(subject: &mut Subject, args: &PlanArgs) -> Result<SearchResult, Failure> {
    let start = Instant::now();
    let stop = || args.budget.is_some_and(|budget_s| start.elapsed().as_secs_f64() > budget_s);
    if matches!(args.objective, Aim::Cost | Aim::Energy) {
        subject.devices = fewer::cheapest(subject, &args.asked, args.objective, &stop)?;
    }
    answer_for(subject, &args.asked, args.objective, &stop)
}

/// Answers `plan`.
pub fn plan(args: &PlanArgs, mut cluster: Cluster) -> Result<Exit, Failure> {
    let asked = &args.asked;
    if !cluster.groups.is_empty() {
        return groups::plan(args, cluster);
    }
    if let Some(watts) = args.watts {
        cluster.device.power = Some(Power::constant(watts, "--watts"));
    }
    if args.objective == Aim::Energy {
        note_power(&mut cluster, &asked.assumed.stated()?);
    }
    if args.objective == Aim::Energy && cluster.device.power.is_none() {
        let headline = format!("it is not known what a device of `{}` draws", cluster.name);
        let help =
            "write `--watts N`, or `[device.power]` with `busy` and `idle` in a cluster file";
        return Err(usage("--objective", headline).help(help).into());
    }
    let mut subject = Subject::new(asked, cluster)?;
    // What a clock has cut off is no one's answer, and a file is written each time.
    let may_be_kept = args.budget.is_none() && args.output.is_none();
    let key = asked.key("plan", &(&subject, args)).filter(|_| may_be_kept);
    cache::answer(key, || found(&mut subject, args))
}

/// Gives devices the power that is stated, or else that of their board's datasheet, where nothing
/// else says what they draw, and tells the user.
fn note_power(cluster: &mut Cluster, stated: &Stated) {
    set_power(cluster, stated);
    let of_board = |power: &&Power| power.busy_w.origin == Origin::Datasheet;
    if let Some(power) = cluster.device.power.as_ref().filter(of_board) {
        output::note(&format!(
            "energy is at {} W a device all the time, its board's limit in the datasheet; \
             `--watts N` says another",
            power.busy_w.value
        ));
    }
}

/// Gives devices the power limit that is stated, or else that of their board's datasheet, where
/// nothing else says what they draw.
pub(super) fn set_power(cluster: &mut Cluster, stated: &Stated) {
    if cluster.device.power.is_none() {
        let limit = stated.number("power").map(|watts| Power::constant(watts, "--assume power"));
        cluster.device.power = limit.or_else(|| estimate::board_power(cluster));
    }
}

/// What `plan` prints.
fn found(subject: &mut Subject, args: &PlanArgs) -> Result<(Exit, String), Failure> {
    let mut answer = best_answer(subject, args)?;
    let found = finalists::settle(subject, &args.asked, args.objective, &mut answer)?;
    let whole = || {
        let plan = whole_plan(subject, &args.asked, &answer.best[0], &found.held)?;
        Ok::<_, Failure>(plan.to_string())
    };
    if let Some(path) = &args.output {
        let ends_in = |name: &str| path.path().extension().is_some_and(|own| own == name);
        match subject.target.filter(|_| !ends_in("json") && !ends_in("plan")) {
            Some(target) => {
                let best = &answer.best[0].configuration;
                launch::write(subject, &args.asked, (target, path.path()), best)?;
            }
            None => {
                let text = match ends_in("json") {
                    true => format!("{:#}\n", document(subject, &answer, &found.held).to_json()),
                    false => whole()?,
                };
                std::fs::write(path, text).map_err(runtime::Error::io("write", path.as_ref()))?;
                output::note(&format!("wrote {path}"));
            }
        }
    }
    let text = match args {
        PlanArgs { asked: RequestFlags { json: true, .. }, .. } => {
            format!("{:#}", document(subject, &answer, &found.held).to_json())
        }
        PlanArgs { plan: true, .. } => whole()?,
        PlanArgs { name: true, .. } => answer.best[0].configuration.to_string(),
        _ => page(subject, &answer, &found, args.objective),
    };
    Ok((Exit::Success, text))
}

/// The fastest plan whose program fits, with what is predicted of it, and its name.
///
/// # Errors
/// Those of the question and of its search; those of a plan's text.
pub fn fastest(asked: &RequestFlags, cluster: Cluster) -> Result<(Plan, Configuration), Failure> {
    let subject = Subject::quiet(asked, cluster)?;
    let mut answer = answer(&subject, asked)?;
    let found = finalists::settle(&subject, asked, Aim::Time, &mut answer)?;
    let best = &answer.best[0];
    Ok((whole_plan(&subject, asked, best, &found.held)?, best.configuration.clone()))
}

/// The plan that a configuration is the name of, with what is predicted of it.
fn whole_plan(
    subject: &Subject,
    asked: &RequestFlags,
    chosen: &Chosen,
    held: &Result<Held, NotYet>,
) -> Result<Plan, Failure> {
    if finalists::stores_in_few_bits(asked.lora.as_ref()) {
        let headline = format!("plan files do not say {} yet", finalists::FEW_BITS);
        return Err(usage("--lora", headline)
            .help("leave out -o and --plan: the answer stands; or leave out `weights=`")
            .into());
    }
    let Estimate { step_time_s, step_time_low_s, step_time_high_s, memory, .. } = chosen.estimate;
    let mut numbers = vec![
        ("step_time_s", step_time_s, "fitted"),
        ("step_time_low_s", step_time_low_s, "fitted"),
        ("step_time_high_s", step_time_high_s, "fitted"),
    ];
    match held {
        Ok(held) => numbers.extend([
            ("peak_mem_bytes", held.total_bytes(), "derived"),
            ("arena_bytes", held.footprint.arena as f64, "derived"),
        ]),
        Err(_) => numbers.push(("peak_mem_bytes", memory.total_bytes(), "fitted")),
    }
    let prediction = |(name, value, origin): (&str, f64, &str)| {
        (name.to_owned(), Prediction { value, origin: origin.to_owned() })
    };
    let predictions = numbers.into_iter().map(prediction).collect();
    let wanted = Wanted { predictions, ..subject.wanted(asked) };
    // A plan's text means what our own executor does of a name.
    let placement = subject.release().experts;
    let name = placement.told(profile::GANTLINE.experts, &chosen.configuration);
    planned::plan(&name, &wanted)
}

/// What of a configuration on the subject's devices no program of this release carries out, in
/// words.
pub fn not_executed(subject: &Subject, c: &Configuration) -> Vec<&'static str> {
    let cluster = &subject.cluster;
    let lacks_kernels = cluster.target().is_none();
    Features { lacks_kernels, ..features(c) }.lacking()
}

/// The decisions of a configuration that some device may be unable to carry out.
fn features(c: &Configuration) -> Features {
    let (mesh, experts) = (mesh_of(c), sharing_of(c));
    Features {
        lacks_kernels: false,
        cp: c.cp as usize,
        expert_ranks: experts.data_ranks(mesh),
        has_whole_samples: shares_whole_samples(mesh, experts),
        zero: c.zero,
        data_ranks: (c.dp * c.cp) as usize,
        offload: c.offload,
    }
}

fn row(subject: &Subject, chosen: &Chosen, have: f64) -> impl Iterator<Item = String> {
    let Estimate { step_time_s, memory, .. } = &chosen.estimate;
    let need = memory.total_bytes();
    let per_device = subject.tokens() / step_time_s / ranks(&chosen.estimate);
    let bubble = chosen.estimate.breakdown.bubble_s / step_time_s;
    let row = [
        chosen.configuration.to_string(),
        Seconds(*step_time_s).to_string(),
        output::count(per_device as u64),
        format!("{:.1}%", 100.0 * subject.mfu(&chosen.estimate)),
        Bytes(need as u64).to_string(),
        format!("{:.0}%", 100.0 * need / have),
        format!("{:.1}%", 100.0 * bubble),
    ];
    row.into_iter().chain(subject.joules(&chosen.estimate).map(output::joules))
}

fn page(subject: &Subject, answer: &SearchResult, found: &Finalists, aim: Aim) -> String {
    let best = &answer.best[0];
    let unit = if subject.seq == 1 { "samples/s" } else { "tokens/s" };
    let energy = subject.power().map(|_| "energy");
    let columns: Vec<&str> = ["plan", "step", unit, "MFU", "memory", "of it", "bubble"]
        .into_iter()
        .chain(energy)
        .collect();
    let mut table = Table::of(&columns);
    for chosen in answer.best.iter().chain(&answer.others) {
        table.cells(row(subject, chosen, answer.have_bytes));
    }
    let mut text = format!("{}\n{}", subject.header(), table.text());
    if !answer.misses.is_empty() {
        let mut table = Table::of(&columns);
        for miss in &answer.misses {
            table.cells(row(subject, miss, answer.have_bytes));
        }
        text += &format!("\nfaster, and too large\n{}", table.text());
    }
    text += &format!("\n{}", oversized_lines(&found.oversized, answer.have_bytes));
    text += &memory_lines(&best.estimate.memory, &found.held);
    let Estimate { step_time_low_s, step_time_high_s, .. } = best.estimate;
    let (low, high) = (Seconds(step_time_low_s), Seconds(step_time_high_s));
    text += &format!("80 % prediction interval: {low} to {high}; {unit} are per device\n");
    if aim == Aim::Time {
        text += &ties(answer, step_time_high_s);
    }
    let simulated_s = subject.simulated_s(&best.estimate);
    if let Some(seconds) = simulated_s.filter(|s| differs(*s, best.estimate.step_time_s)) {
        text += &format!("replayed pass by pass, the first takes {}\n", Seconds(seconds));
    }
    text += &padding_line(subject.padding(&best.configuration), best.configuration.tp);
    let space = &answer.space;
    let gap = answer.gap.map(|gap| optimality(subject, aim, 100.0 * gap));
    text += &format!(
        "{} configurations, {} priced{}\n",
        grouped(space.total),
        output::count(space.evaluated),
        gap.unwrap_or_default()
    );
    if !answer.complete {
        text += "the search was cut off\n";
    }
    text + &executed(subject, &best.configuration)
}

/// How far from the best plan the model proves that the first one is at most, in percent.
fn optimality(subject: &Subject, aim: Aim, gap: f64) -> String {
    let is_shown = gap >= 0.05;
    match aim {
        Aim::Memory => "; optimal in memory within 1% under the model".to_owned(),
        Aim::Energy if is_shown => format!("; optimality gap in energy {gap:.1}%"),
        Aim::Energy => "; optimal in energy under the model".to_owned(),
        Aim::Cost if is_shown => {
            format!("; optimality gap of {} devices {gap:.1}%", subject.devices)
        }
        Aim::Time | Aim::Pareto if is_shown => format!("; optimality gap {gap:.1}%"),
        Aim::Time | Aim::Pareto | Aim::Cost => {
            "; optimal under the model: the search was exhaustive".to_owned()
        }
    }
}

/// Who executes a plan, or why nobody does yet.
fn executed(subject: &Subject, plan: &Configuration) -> String {
    if let Some(target) = subject.target {
        return format!("executed by {}: `-o DIR` writes what starts it\n", target.tool().title());
    }
    let lacking = not_executed(subject, plan);
    let cluster = &subject.cluster.name;
    let mut text = match lacking.is_empty() {
        true => format!("executed where such GPUs are: `train --cluster {cluster} --plan FILE`\n"),
        false => format!("not executed by this version: {}\n", lacking.join(", ")),
    };
    if let Some(ir::Target::Cuda(arch @ Arch::Sm100)) = subject.cluster.target() {
        text += &format!("times are of tcgen05; kernels for {arch} still multiply by mma.sync\n");
    }
    text
}

/// How many of the listed plans the model cannot tell from the best: their expected time is below
/// the high end of its interval.
fn ties(answer: &SearchResult, high_s: f64) -> String {
    let is_tie = |other: &&Chosen| other.fits && other.estimate.step_time_s <= high_s;
    match answer.others.iter().filter(is_tie).count() {
        0 => String::new(),
        1 => "the best is tied with another plan: its time lies in that interval\n".to_owned(),
        count => {
            format!("the best is tied with {count} others: their times lie in that interval\n")
        }
    }
}

/// Whether two times differ in the digits that are shown.
fn differs(a: f64, b: f64) -> bool {
    Seconds(a).to_string() != Seconds(b).to_string()
}

/// A count with separated thousands, of any size.
fn grouped(number: u128) -> String {
    match u64::try_from(number) {
        Ok(number) => output::count(number),
        Err(_) => format!("{:.2e}", number as f64),
    }
}

/// A configuration and what it costs, as JSON.
pub fn plan_row(subject: &Subject, chosen: &Chosen) -> PlanRow {
    let Estimate { step_time_s, step_time_low_s, step_time_high_s, .. } = chosen.estimate;
    let tokens_per_s = subject.tokens() / step_time_s;
    PlanRow {
        text: chosen.configuration.to_string(),
        plan: json!(chosen.configuration),
        microbatch_count: chosen.estimate.microbatch_count,
        step_time_s,
        step_time_low_s,
        step_time_high_s,
        tokens_per_s,
        tokens_per_s_per_device: tokens_per_s / ranks(&chosen.estimate),
        mfu: Some(subject.mfu(&chosen.estimate)),
        peak_mem_bytes: chosen.estimate.memory.total_bytes(),
        disk_bytes: None,
        energy_j: subject.joules(&chosen.estimate),
        fits: chosen.fits,
    }
}

fn document(
    subject: &Subject,
    answer: &SearchResult,
    held: &Result<Held, NotYet>,
) -> documents::Plan {
    let best = &answer.best[0];
    let (peak_mem_bytes, fits) = needs(best, held, answer.have_bytes);
    let rows =
        |all: &[Chosen]| all.iter().map(|chosen| plan_row(subject, chosen)).collect::<Vec<_>>();
    documents::Plan {
        row: PlanRow { peak_mem_bytes, fits, ..plan_row(subject, best) },
        model: subject.work.name.clone(),
        params: subject.work.parameters(),
        layers: subject.work.depth().into(),
        cluster: subject.cluster.describe(),
        ranks: subject.devices.into(),
        devices: subject.devices.into(),
        origin: "fitted".to_owned(),
        candidates: answer.space.evaluated,
        gbs: subject.global_batch.into(),
        seq: subject.seq.into(),
        dtype: subject.dtype.name().to_owned(),
        assumptions: subject.work.assumptions.clone(),
        vocabulary_padding: subject.padding(&best.configuration),
        flops_per_step: Some(subject.counted_flops()),
        simulated_step_time_s: subject.simulated_s(&best.estimate),
        breakdown: StepParts::Devices(best.estimate.breakdown),
        memory: Some(device_memory(&best.estimate.memory, held)),
        have_bytes: answer.have_bytes,
        gap: answer.gap,
        bound_s: answer.bound_s,
        complete: answer.complete,
        space: Some(documents::Candidates {
            total: answer.space.total as f64,
            evaluated: answer.space.evaluated,
            priced_ahead: answer.space.priced_ahead,
            bounded_out: answer.space.bounded_out as f64,
            too_large: answer.space.too_large as f64,
        }),
        frontier: rows(&answer.best),
        plans: answer.others.iter().map(|chosen| json!(plan_row(subject, chosen))).collect(),
        too_large: rows(&answer.misses),
        not_executed: not_executed(subject, &best.configuration)
            .into_iter()
            .map(Into::into)
            .collect(),
        decision_hash: None,
        executor: Some(subject.executor()),
    }
}

/// Checks that a plan is for the model that is asked about.
fn check_model(
    path: &str,
    planned: &Option<(String, u64)>,
    work: &Workload,
) -> Result<(), Diagnostic> {
    match planned {
        Some((name, parameters)) if *name != work.name && *parameters != work.parameters() => {
            let headline = format!("the plan is for `{name}`, and `{}` is asked about", work.name);
            let help = format!("write `gantline explain {name}`, or plan again");
            Err(Diagnostic::error("E5006", Span::of(path), headline).help(help))
        }
        Some(_) | None => Ok(()),
    }
}

/// A difference of times, with its sign.
fn signed(seconds: f64) -> String {
    format!("{}{}", if seconds < 0.0 { "-" } else { "+" }, Seconds(seconds.abs()))
}
