//! `score`: what a layout that the user wrote costs.

pub mod read;

use codegen::footprint::NotYet;
use ir::lora::Lora;
use ir::{Diagnostic, Span};
use planner::cluster::Cluster;
use planner::configuration::{Configuration, Zero};
use planner::estimate::described::{Described, decoder, described};
use planner::estimate::padding::Padding;
use planner::estimate::profile::{self, PROFILES, Profile, Stated};
use planner::estimate::rates::Arithmetic;
use planner::estimate::workload::Workload;
use planner::estimate::{Estimate, Estimator, Job};
use planner::finalists::Held;
use planner::limits::Limits;
use planner::search::groups;
use planner::search::request::EVALUATIONS_MAX;
use planner::tools::{Target, Tool};
use serde_json::Value;

use self::read::{Allocation, DecoderSizes, Known, Layout, OfGroups};
use crate::argument::{PathArg, length, positive};
use crate::documents::{self, DeviceMemory, Document};
use crate::failure::{Exit, Failure, read_text, usage};
use crate::job::{self, Axes, Precision};
use crate::output::{self, Table};
use crate::planned::{self, Wanted};
use crate::run::model_argument;
use crate::verbs::assume::{self, Assumed};
use crate::verbs::flags::Served;
use crate::verbs::gpus::finalists::{
    Beside, FEW_BITS, Programs, STATED, device_memory, memory_lines, stores_in_few_bits,
};
use crate::verbs::gpus::groups::Mixed;
use crate::verbs::gpus::groups::page::{document, fits, page};
use crate::verbs::gpus::{
    Subject, adapted, adapter_line, arithmetic, assumed, assumption_lines, check_expressible,
    element_type, imbalance, note_warnings, padding_line, routed,
};
use crate::verbs::inference;

/// Flags of `score`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The model: a directory, that of a run too, a config.json or a preset
    #[arg(value_parser = model_argument())]
    pub model: PathArg,
    /// The cluster: a preset or a file [default: that of the plan in the file, or h100]
    #[arg(long, value_name = "PRESET|FILE")]
    pub cluster: Option<PathArg>,
    /// The layout in one text, such as "tp=8 pp=4 dp=2 mbs=1 sp zero=1", or of each group of
    /// devices, as `plan --plan` prints them; other flags override it
    #[arg(long, value_name = "TEXT", default_value = "", allow_hyphen_values = true)]
    pub config: String,
    /// The layout in a file: a script with flags of Megatron-LM, JSON of DeepSpeed or Calculon,
    /// TOML of torchtitan, our own TOML, or what `plan --json` prints; other flags override it
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub from: Option<PathArg>,
    /// Devices, where the file does not say how many there are
    #[arg(long, value_name = "N", value_parser = positive)]
    pub devices: Option<usize>,
    /// Ranks of the axes
    #[command(flatten)]
    pub axes: Axes,
    /// Context-parallel ranks
    #[arg(long, alias = "context-parallel-size", value_name = "N", value_parser = positive)]
    pub cp: Option<usize>,
    /// Expert-parallel ranks
    #[arg(long, alias = "expert-model-parallel-size", value_name = "N", value_parser = positive)]
    pub ep: Option<usize>,
    /// Interleaved chunks of layers on each stage: virtual pipeline stages
    #[arg(long, value_name = "N", value_parser = positive)]
    pub vpp: Option<usize>,
    /// What the devices are for
    #[command(flatten)]
    pub served: Served,
    /// Samples of a step, over all ranks; sequences at once in inference [default: what the file
    /// says, or as many sequences as fit]
    #[arg(long, alias = "global-batch-size", value_name = "N", value_parser = positive,
          required_unless_present_any = ["from", "purpose"])]
    pub gbs: Option<usize>,
    /// Tokens of a sample [default: what the file says, or the longest the model was made for]
    #[arg(long, alias = "seq-length", value_name = "N", value_parser = length)]
    pub seq: Option<usize>,
    /// ZeRO stage, what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 gradients too,
    /// 3 weights too
    #[arg(long, value_name = "0..3", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub zero: Option<u8>,
    /// Sequence parallelism: split the sequence over tensor-parallel ranks between products
    #[arg(long, alias = "sequence-parallel")]
    pub sp: bool,
    /// What is recomputed: none, attention, full, layers:N of each stage, or auto
    #[arg(long, value_name = "WHAT")]
    pub recompute: Option<String>,
    /// Where the optimizer lies and is computed: device, host or disk
    #[arg(long, value_name = "PLACE")]
    pub offload_optimizer: Option<String>,
    /// Where weights lie between their uses: device, host or disk
    #[arg(long, value_name = "PLACE")]
    pub offload_parameters: Option<String>,
    /// Where what the backward pass needs lies: device, host or disk
    #[arg(long, value_name = "PLACE")]
    pub offload_activations: Option<String>,
    /// The order of micro-batches: gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zb
    #[arg(long, value_name = "NAME")]
    pub schedule: Option<String>,
    /// The execution profile: what a release overlaps, fuses and stores; gantline, or that of a
    /// peer's release [default: that of the tool that the file is for, or gantline]
    #[arg(long, alias = "style", value_name = "NAME")]
    pub profile: Option<String>,
    /// The tool that executes the layout: megatron, deepspeed or torchtitan, with a release as in
    /// megatron@core-0.13; a layout that it cannot express is refused
    #[arg(long, value_name = "TOOL[@RELEASE]", value_parser = job::tool)]
    #[arg(conflicts_with = "profile")]
    pub for_tool: Option<Target>,
    /// The arithmetic of products [default: what the file says, or bf16 where the devices have it]
    #[arg(long, value_name = "TYPE", value_parser = job::precision)]
    pub dtype: Option<Precision>,
    /// Expert load imbalance: the busiest rank's tokens over the mean [default: 1]
    #[arg(long, value_name = "TIMES", value_parser = job::imbalance)]
    pub imbalance: Option<f64>,
    /// Freeze the model and train low-rank adapters: as `plan --lora`
    #[arg(long, value_name = "rank=N,alpha=X,targets=NAME,…")]
    pub lora: Option<Lora>,
    /// What is stated of the executor
    #[command(flatten)]
    pub assumed: Assumed,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

impl Args {
    /// The cluster that is asked about: that of a plan in a file where no flag says it.
    fn cluster(&self) -> Result<PathArg, Diagnostic> {
        if let Some(cluster) = &self.cluster {
            return Ok(cluster.clone());
        }
        let text = self.from.as_ref().and_then(|path| ir::file::read_text(path.path()).ok());
        let of_plan = text.map(|text| planned::cluster_of(&text)).transpose()?.flatten();
        Ok(of_plan.unwrap_or("h100").into())
    }
}

/// The model of the request, with samples of `seq` tokens.
fn model(args: &Args, seq: Option<u32>) -> Result<Described, Failure> {
    let described = described(&args.model, seq)?;
    let imbalance = imbalance(args.imbalance, &args.assumed.stated()?)?;
    let work = adapted(routed(described.work, imbalance)?, args.lora.as_ref())?;
    Ok(Described { work, ..described })
}

/// Answers `score`; no where the layout does not fit.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let seq = args.seq.or(args.served.requests.context()?);
    let described_as = model(args, count(seq))?;
    note_warnings(&described_as);
    let Described { mut work, latent, mut tokens, warnings } = described_as;
    let args = &Args { cluster: Some(args.cluster()?), ..args.clone() };
    let mut cluster = Cluster::load(args.cluster()?)?;
    if !cluster.groups.is_empty() {
        refuse_tool(args, "lays all devices out alike, and the cluster has groups")?;
        return over_groups(args, Described { work, latent, tokens, warnings }, cluster);
    }
    let words = words(args)?;
    let layout = layout(args, &cluster, work.depth())?;
    let args = &with_adapters(args, &layout)?;
    if seq.is_none() && layout.seq.is_some() || layout.lora.is_some() {
        Described { work, tokens, .. } = model(args, count(seq).or(layout.seq))?;
    }
    let configuration = configuration(args, &words, layout.configuration.clone());
    check_devices(args, &configuration)?;
    take_nodes(&mut cluster, &configuration);
    let named = args.profile.as_deref().map(|name| find_profile(name, &cluster)).transpose()?;
    let (dtype, arithmetic) = products(args, layout.dtype, &cluster)?;
    let profile = named.map_or_else(|| profile_of(args, &layout, &cluster), Ok)?;
    let profile = profile.stating(args.assumed.stated_beside(&layout.facts)?);
    if args.served.is_inference()? {
        refuse_tool(args, "trains, and `--for` asks about inference")?;
        refuse_profile(named)?;
        layout.note_remarks();
        let model = Described { work, latent, tokens, warnings };
        let subject = copies(model, cluster, configuration.ranks(), (dtype, arithmetic))?;
        let subject = Subject { stated: args.assumed.stated_of_inference()?, ..subject };
        return inference::score(subject, &configuration, count(args.gbs), &args.served, args.json);
    }
    let Some(batch) = count(args.gbs).or(layout.global_batch) else {
        let headline = "the number of samples of a step is missing";
        return Err(usage("--gbs", headline).help("write --gbs N").into());
    };
    if let Some(target) = args.for_tool {
        check_expressible(target, "--for-tool", &configuration, &work)?;
    }
    let job = Job { global_batch: batch.into(), arithmetic };
    let estimator = Estimator::over(configuration.ranks(), &work, &cluster, profile, job)?;
    let estimate = estimator.estimate(&configuration)?;
    let wanted = wanted(args, &cluster, [batch, tokens], dtype);
    let programs = programs(args, &profile, wanted, Beside::of(&estimator));
    let held = programs.held(&estimate.configuration);
    let memory = device_memory(&estimate.memory, &held);
    let fits = memory.bytes.total_bytes() <= estimator.memory_bytes;
    let profile = assumed(profile, arithmetic, &work);
    let answer = Answer {
        padding: estimator.padding(&configuration)?,
        memory,
        held,
        estimate,
        fits,
        have_bytes: estimator.memory_bytes,
        flops: profile.counted_flops(&work) * f64::from(batch),
        peak: profile.counted_peak(estimator.peak_flops()),
        tokens: f64::from(batch) * f64::from(tokens),
        layout,
        profile,
        work: work.clone(),
    };
    if args.json {
        output::answer_json(&answer.document(args));
    } else {
        output::answer(&answer.page(args));
    }
    Ok(if fits { Exit::Success } else { Exit::Infeasible })
}

/// What a layout is for, in steps of `batch` samples of `tokens` tokens.
fn wanted<'a>(
    args: &'a Args,
    cluster: &Cluster,
    [batch, tokens]: [u32; 2],
    dtype: Precision,
) -> Wanted<'a> {
    Wanted {
        model: args.model.path(),
        cluster: cluster.describe(),
        target: cluster.target(),
        global_batch_size: batch as usize,
        seq: tokens as usize,
        dtype,
        lora: args.lora.clone(),
        predictions: Default::default(),
    }
}

/// Refuses an execution profile of training where inference is asked about.
fn refuse_profile(asked: Option<Profile>) -> Result<(), Failure> {
    let Some(profile) = asked.filter(|asked| asked.name != profile::GANTLINE.name) else {
        return Ok(());
    };
    let headline = format!("inference has no execution profile `{}`", profile.name);
    let help = "leave it out, or write `--engine` for one of inference";
    Err(usage("--profile", headline).help(help).into())
}

/// Programs of a layout, which are compiled for their memory.
fn programs<'a>(
    args: &Args,
    profile: &Profile,
    wanted: Wanted<'a>,
    beside: Beside,
) -> Programs<'a> {
    let obstacles = [
        (profile.name != profile::GANTLINE.name, format!("programs of {}", profile.name)),
        (args.for_tool.is_some(), "programs of other tools".to_owned()),
        (!profile.stated.is_empty(), STATED.to_owned()),
        (stores_in_few_bits(args.lora.as_ref()), FEW_BITS.to_owned()),
    ];
    Programs::new(wanted, beside, &obstacles)
}

/// Refuses a tool where nothing is scored for it.
fn refuse_tool(args: &Args, why: &str) -> Result<(), Failure> {
    let Some(target) = args.for_tool else { return Ok(()) };
    Err(usage("--for-tool", format!("`{target}` {why}")).help("leave it out").into())
}

/// The execution profile of the tool that a layout is for.
///
/// # Errors
/// `E5001` for the file of another tool than the one that is to execute it.
fn profile_of(args: &Args, layout: &Layout, cluster: &Cluster) -> Result<Profile, Failure> {
    let (Some(target), Some(tool)) = (args.for_tool, layout.trainer()) else {
        let profile = layout.profile_on(cluster, args.for_tool);
        return Ok(profile.unwrap_or(profile::GANTLINE));
    };
    if tool == target.tool() {
        return Ok(layout.profile_on(cluster, Some(target)).unwrap_or(profile::GANTLINE));
    }
    let headline = format!("`--from` is a file of {}, and not of `{target}`", tool.title());
    let help = format!("leave it out, or write `--for-tool {}`", tool.name());
    Err(usage("--for-tool", headline).help(help).into())
}

/// Copies of a model on some devices, which answer prompts.
fn copies(
    model: Described,
    cluster: Cluster,
    ranks: u64,
    (dtype, arithmetic): (Precision, Arithmetic),
) -> Result<Subject, Failure> {
    let Described { work, latent, tokens: seq, warnings: _ } = model;
    let Ok(devices) = u32::try_from(ranks) else {
        return Err(usage("--dp", format!("{ranks} devices are more than there can be")).into());
    };
    let job = Job { global_batch: 1, arithmetic };
    let peak_flops = Estimator::new(&work, &cluster, profile::GANTLINE, job)?.peak_flops();
    Ok(Subject {
        work,
        cluster,
        devices,
        global_batch: 1,
        dtype,
        peak_flops,
        seq,
        latent,
        memory_bytes: None,
        target: None,
        stated: Stated::NOTHING,
    })
}

/// Refuses a layout of other devices than are given. In a file that says no size of its
/// data-parallel axis, they decide that.
fn check_devices(args: &Args, configuration: &Configuration) -> Result<(), Failure> {
    let ranks = configuration.ranks();
    match args.devices {
        Some(devices) if devices as u64 != ranks => {
            let headline = format!("the layout `{configuration}` has {ranks} ranks, not {devices}");
            let each = ranks / u64::from(configuration.dp.max(1));
            let help = match devices as u64 / each.max(1) {
                dp if dp * each == devices as u64 => format!("write dp={dp}, or leave it out"),
                _ => "leave it out".to_owned(),
            };
            Err(usage("--devices", headline).help(help).into())
        }
        Some(_) | None => Ok(()),
    }
}

/// Gives a cluster as many nodes as a layout takes.
fn take_nodes(cluster: &mut Cluster, configuration: &Configuration) {
    if let Some(each) = cluster.devices_per_node {
        let ranks = usize::try_from(configuration.ranks()).unwrap_or(usize::MAX);
        cluster.nodes = cluster.nodes.max(ranks.div_ceil(each.max(1)));
    }
}

/// Answers `score` on groups of other devices each: a layout for each, over which the batch is
/// shared.
fn over_groups(
    args: &Args,
    mut described_as: Described,
    cluster: Cluster,
) -> Result<Exit, Failure> {
    if args.served.is_inference()? {
        let headline = "on groups of devices, layouts of training are scored";
        return Err(usage("--for", headline).help("ask about one group alone").into());
    }
    let said = match &args.from {
        None => OfGroups { text: args.config.clone(), ..OfGroups::default() },
        Some(path) => read::of_groups(&path.to_string(), &read_text(path, "--from")?)?,
    };
    if let (None, Some(seq)) = (args.seq, said.seq) {
        described_as = model(args, Some(seq))?;
    }
    let Some(batch) = count(args.gbs).or(said.global_batch) else {
        let headline = "the number of samples of a step is missing";
        return Err(usage("--gbs", headline).help("write --gbs N").into());
    };
    let (dtype, arithmetic) = products(args, said.dtype, &cluster)?;
    let stated = args.assumed.stated()?;
    let mixed = Mixed::of(described_as, cluster, batch, dtype).stating(stated);
    let question = groups::GroupRequest {
        work: &mixed.work,
        cluster: &mixed.cluster,
        profile: match &args.profile {
            Some(name) => find_profile(name, &mixed.cluster)?,
            None => profile::GANTLINE,
        }
        .stating(stated),
        job: Job { global_batch: batch.into(), arithmetic },
        limits: Limits::default(),
        evaluations_max: EVALUATIONS_MAX,
        for_memory: false,
        set: None,
        stop: &|| false,
    };
    let words = words(args)?;
    let change = |c| configuration(args, &words, c);
    let way = mixed.score(("--config", &said.text), &change, &question)?;
    if args.json {
        output::answer_json(&document(&mixed, &way).to_json());
    } else {
        output::answer(&(mixed.header() + &page(&mixed, &way)));
    }
    Ok(if fits(&way) { Exit::Success } else { Exit::Infeasible })
}

fn count(size: Option<usize>) -> Option<u32> {
    size.map(|n| u32::try_from(n).unwrap_or(u32::MAX))
}

/// The same with the adapters of a plan in a file.
fn with_adapters(args: &Args, layout: &Layout) -> Result<Args, Diagnostic> {
    let source = args.from.as_ref().map_or(String::new(), PathArg::to_string);
    let lora = layout.adapters(&source, args.lora.as_ref())?;
    Ok(Args { lora, ..args.clone() })
}

/// The layout that a text or a file says, before flags override it.
fn layout(args: &Args, cluster: &Cluster, layers: u32) -> Result<Layout, Failure> {
    let Some(path) = &args.from else {
        let configuration = args.config.parse()?;
        return Ok(Layout::of(configuration));
    };
    let text = read_text(path, "--from")?;
    let (devices, per_node) = (count(args.devices), count(cluster.devices_per_node));
    let launched = read::launched(path.path(), &text, Allocation { devices, per_node });
    let said_devices = launched.as_ref().and_then(|launched| launched.devices);
    let known = Known {
        layers,
        devices: devices.or(said_devices),
        per_node,
        dp: count(args.axes.dp),
        tp: count(args.axes.tp),
        pp: count(args.axes.pp),
        cp: count(args.cp),
        microbatch: count(args.axes.mbs),
        script: [None; 2],
        global_batch: count(args.gbs),
        decoder: decoder(args.model.path()).map(|decoder| DecoderSizes::of(&decoder.shape)),
    };
    let Some(started) = launched else {
        return read::read_for(&path.to_string(), &text, Some(args.model.path()), known);
    };
    let file = started.file.display().to_string();
    let text = read_text(PathArg::from(started.file.clone().into_os_string()), "--from")?;
    started.check(&file, &text)?;
    let mut layout = read::read_for(&file, &text, None, Known { script: started.batch, ..known })?;
    layout.configuration.recompute = started.recompute.unwrap_or(layout.configuration.recompute);
    layout.seq = layout.seq.or(started.seq);
    layout.dtype = layout.dtype.or(started.dtype);
    Ok(layout)
}

/// What flags say in the words of a configuration's text.
///
/// # Errors
/// `E3402` for each that says nothing, at its flag.
fn words(args: &Args) -> Result<Configuration, Vec<Diagnostic>> {
    let given = [
        ("recompute", &args.recompute),
        ("schedule", &args.schedule),
        ("offload-optimizer", &args.offload_optimizer),
        ("offload-parameters", &args.offload_parameters),
        ("offload-activations", &args.offload_activations),
    ];
    let mut wrong = Vec::new();
    let mut all = Configuration::default();
    for (name, value) in given.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)))
    {
        let word = format!("{name}={value}");
        match all.read_word(&word) {
            Ok(()) => {}
            Err((headline, help)) => {
                let span = Span::of(format!("--{name}"));
                wrong.push(Diagnostic::error("E3402", span, headline).help(help));
            }
        }
    }
    if wrong.is_empty() { Ok(all) } else { Err(wrong) }
}

/// A layout with what flags say in its place; `words` are those of [`words`].
fn configuration(args: &Args, words: &Configuration, mut c: Configuration) -> Configuration {
    let of = |size: Option<usize>, there: u32| count(size).unwrap_or(there);
    c.tp = of(args.axes.tp, c.tp);
    c.pp = of(args.axes.pp, c.pp);
    c.dp = of(args.axes.dp, c.dp);
    c.cp = of(args.cp, c.cp);
    c.ep = of(args.ep, c.ep);
    c.vpp = of(args.vpp, c.vpp);
    c.microbatch = of(args.axes.mbs, c.microbatch);
    c.sequence_parallel |= args.sp;
    if let Some(stage) = args.zero {
        c.zero = Zero { stage, shard: c.zero.shard };
    }
    if args.recompute.is_some() {
        c.recompute = words.recompute;
    }
    if args.schedule.is_some() {
        c.schedule = words.schedule;
    }
    let places = [&args.offload_optimizer, &args.offload_parameters, &args.offload_activations];
    for ((name, place), _) in
        words.offload.places().into_iter().zip(places).filter(|(_, p)| p.is_some())
    {
        if let Some(own) = c.offload.place_mut(name) {
            *own = place;
        }
    }
    c
}

/// The execution profile of a name, or of a tool's release on the devices of a cluster.
fn find_profile(name: &str, cluster: &Cluster) -> Result<Profile, Failure> {
    // Its name before it had one.
    let name = if name == "ours" { profile::GANTLINE.name } else { name };
    let exact = PROFILES.iter().find(|profile| profile.name == name).copied();
    let tool = name.split('@').next().unwrap_or_default();
    let is_tool = Tool::TRAINING.into_iter().any(|known| known.name() == tool);
    if exact.is_none() && is_tool {
        let target = Target::parse(name)
            .map_err(|(headline, help)| usage("--profile", headline).help(help))?;
        let found = target.profile_on(cluster);
        return found.ok_or_else(|| usage("--profile", format!("no profile of {target}")).into());
    }
    exact.or_else(|| profile::of_framework(name)).ok_or_else(|| {
        let names = PROFILES.map(|profile| profile.name).join(", ");
        let headline = format!("there is no execution profile `{name}`");
        usage("--profile", headline).help(format!("use {names}")).into()
    })
}

/// What products are computed in: as the user says, a file, or the devices.
fn products(
    args: &Args,
    said: Option<Precision>,
    cluster: &Cluster,
) -> Result<(Precision, Arithmetic), Diagnostic> {
    let precision = element_type(args.dtype.or(said), cluster)?;
    Ok((precision, arithmetic(precision)))
}

struct Answer {
    estimate: Estimate,
    memory: DeviceMemory,
    held: Result<Held, NotYet>,
    padding: Option<Padding>,
    work: Workload,
    fits: bool,
    have_bytes: f64,
    flops: f64,
    peak: f64,
    tokens: f64,
    layout: Layout,
    profile: Profile,
}

impl Answer {
    fn ranks(&self) -> f64 {
        self.estimate.configuration.ranks() as f64
    }

    fn mfu(&self) -> f64 {
        self.flops / self.estimate.step_time_s / self.ranks() / self.peak
    }

    fn page(&self, args: &Args) -> String {
        let found = &self.estimate;
        let mut text = format!(
            "{} on {} x {}: {}\n",
            args.model,
            self.ranks(),
            args.cluster.as_ref().map_or(String::new(), PathArg::to_string),
            found.configuration
        );
        text += &format!(
            "step    {} ({} to {}), {:.0} tokens/s a device, MFU {:.1} %\n",
            output::seconds(found.step_time_s),
            output::seconds(found.step_time_low_s),
            output::seconds(found.step_time_high_s),
            self.tokens / found.step_time_s / self.ranks(),
            100.0 * self.mfu()
        );
        text += &format!("profile {}: {}\n", self.profile.name, self.profile.source);
        text += &assume::lines(&self.profile);
        text += &adapter_line(&self.work);
        let verdict = if self.fits { "fits" } else { "does not fit" };
        text += &format!(
            "memory  {} of {} on stage {}: {verdict}\n",
            output::bytes(self.memory.bytes.total_bytes() as u64),
            output::bytes(self.have_bytes as u64),
            self.memory.bytes.stage
        );
        text += &memory_lines(&found.memory, &self.held);
        text += &padding_line(self.padding, found.configuration.tp);
        text += &assumption_lines(&self.work);
        text.push('\n');
        let mut table = Table::new(["where the step goes", "time", "share"]);
        for (name, seconds) in found.breakdown.parts() {
            if seconds > 0.0 {
                let share = format!("{:.1} %", 100.0 * seconds / found.step_time_s);
                table.row([name.to_owned(), output::seconds(seconds), share]);
            }
        }
        text += &table.text();
        let mut table = Table::new(["what holds the memory", "bytes"]);
        for (name, bytes) in self.memory.bytes.parts() {
            if bytes > 0.0 {
                table.row([name.to_owned(), output::bytes(bytes as u64)]);
            }
        }
        text += &format!("\n{}", table.text());
        if let Some(told) = self.layout.remarks() {
            text += &format!("\n{told}");
        }
        text
    }

    fn document(&self, args: &Args) -> Value {
        let found = &self.estimate;
        let document = documents::Score {
            model: args.model.to_string(),
            cluster: args.cluster.as_ref().map_or(String::new(), PathArg::to_string),
            configuration: found.configuration.to_string(),
            style: self.profile.name.to_owned(),
            ranks: found.configuration.ranks(),
            step_time_s: found.step_time_s,
            step_time_low_s: found.step_time_low_s,
            step_time_high_s: found.step_time_high_s,
            tokens_per_s: self.tokens / found.step_time_s,
            tokens_per_s_per_device: self.tokens / found.step_time_s / self.ranks(),
            mfu: self.mfu(),
            breakdown: found.breakdown,
            peak_mem_bytes: self.memory.bytes.total_bytes(),
            have_bytes: self.have_bytes,
            fits: self.fits,
            memory: self.memory.clone(),
            assumptions: self.work.assumptions.clone(),
            vocabulary_padding: self.padding,
            left_out: self.layout.left_out.clone(),
            notes: self.layout.notes.clone(),
            executor: Some(documents::Executor::of(&self.profile, None)),
        };
        document.to_json()
    }
}
