//! `train MODEL --data …` and `train --resume DIR`: from data to checkpoints.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ir::import::{Options, Resolved};
use ir::lora::Lora;
use ir::plan::Optimizer;
use ir::precision::Precision;
use ir::{DType, Plan};
use planner::cluster::{Cluster, Kind};
use runtime::checkpoint::Checkpoint;
use runtime::data::{Batches, Corpus};
use runtime::execute::Session;
use runtime::load::check_weights;
use runtime::lock::RunLock;
use runtime::processes::Bootstrap;
use runtime::signal::StopSignal;
use runtime::tokens::Tokenizer;
use runtime::train::{self, Config, Identity, LossScale, OnSpike, Outcome, RunState};
use runtime::weights::Weights;

use crate::argument::{PathArg, amount, duration, positive};
use crate::documents::{self, Document};
use crate::failure::{self, Exit, Failure, usage};
use crate::job::{self, Limited, positions_max};
use crate::output;
use crate::processes;
use crate::progress::Watcher;
use crate::run::{PLAN, Run, Settings};
use crate::training::{PlanFrom, Training};
use crate::verbs::compile::read as read_plan;
use crate::verbs::flags::RequestFlags;
use crate::verbs::gpus;

/// Headings of the help.
const WHERE: &str = "Where it runs";
const STEP: &str = "A step";
const LEARNING: &str = "Learning";
const REPORTS: &str = "Validations and checkpoints";

/// Flags of `train`. Those that are left out are as the run has them that is resumed, or as
/// [`Settings::defaults`] says.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The model: a directory, a config.json, a .graph text or a preset
    #[arg(required_unless_present = "resume", conflicts_with = "resume")]
    pub model: Option<PathArg>,
    /// Go on with the run in this directory, with its settings unless others are given
    #[arg(long, value_name = "DIR", alias = "load")]
    pub resume: Option<PathBuf>,
    /// The step of the checkpoint to go on from [default: the newest that is intact]
    #[arg(long, value_name = "N", requires = "resume")]
    pub step: Option<u64>,
    /// Texts or files of tokens: files, directories, patterns such as 'src/**/*.rs'
    #[arg(
        long,
        value_name = "PATH",
        alias = "data-path",
        num_args = 1..,
        required_unless_present = "resume"
    )]
    pub data: Vec<PathArg>,
    /// The directory that the run is written to
    #[arg(
        long,
        value_name = "DIR",
        alias = "save",
        required_unless_present_any = ["resume", "dry_run"],
        conflicts_with = "resume"
    )]
    pub out: Option<PathBuf>,
    /// Steps of the whole run
    #[arg(
        long,
        value_name = "N",
        alias = "train-iters",
        value_parser = positive,
        required_unless_present = "resume"
    )]
    pub steps: Option<usize>,
    /// The cluster: cpu-local for the cores of this machine, or GPUs like its own [default:
    /// cpu-local]
    #[arg(long, value_name = "PRESET|FILE", help_heading = WHERE)]
    pub cluster: Option<PathArg>,
    /// Ranks, each with memory of its own: threads of this process, or of those that a launcher
    /// starts [default: 1]
    #[arg(
        long,
        visible_alias = "devices",
        alias = "world-size",
        value_name = "N",
        value_parser = positive,
        help_heading = WHERE
    )]
    pub ranks: Option<usize>,
    /// Rates that `gantline calibrate` measured
    #[arg(long, value_name = "FILE", help_heading = WHERE)]
    pub calibration: Option<PathArg>,
    /// What the planner keeps to
    #[command(flatten)]
    pub limited: Limited,
    /// Train as this plan says, and search for none; ranks, batch, length, types,
    /// clipping and decay that no flag says are the plan's
    #[arg(long, value_name = "FILE", help_heading = WHERE)]
    pub plan: Option<PathArg>,
    /// Tokens of a sample [default: the longest the model was made for]
    #[arg(
        long,
        alias = "seq-length",
        value_name = "N",
        value_parser = positive,
        help_heading = STEP
    )]
    pub seq: Option<usize>,
    /// Samples of a step, over all ranks [default: 8]
    #[arg(
        long,
        alias = "global-batch-size",
        value_name = "N",
        value_parser = positive,
        help_heading = STEP
    )]
    pub gbs: Option<usize>,
    /// The element type: f32, f64, or bf16, f16 and f8 (products of bf16 that read 8 bits) with
    /// weights and sums of f32 [default: f32]
    #[arg(long, value_name = "TYPE", value_parser = job::dtype, help_heading = STEP)]
    pub dtype: Option<DType>,
    /// Types of single roles: parameters, compute, accumulate, master (or none), gradients, reduce,
    /// states, saved (activations), logits; products (own, tf32, f8e4m3, f8-hybrid)
    #[arg(long, value_name = "ROLE=TYPE", value_delimiter = ',', help_heading = STEP)]
    pub precision: Vec<String>,
    /// Probability of every dropout [default: as the model's config says]
    #[arg(long, value_name = "P", value_parser = amount, help_heading = STEP)]
    pub dropout: Option<f64>,
    /// Keep packed documents apart: neither attention nor the loss crosses the end of a document,
    /// and learned positions restart after it. Documents end with files, where the index of a
    /// Megatron data set says, and after --eod-token
    #[arg(long, visible_alias = "reset-attention-mask", help_heading = STEP)]
    pub document_mask: bool,
    /// The token that ends a document; where it is not said, the tokenizer's `<|endoftext|>`,
    /// `<|end_of_text|>` or `</s>`
    #[arg(long, value_name = "ID", help_heading = STEP)]
    pub eod_token: Option<u32>,
    /// Freeze the model and train low-rank adapters of the weights that are named: modules as peft
    /// names them, weights as `inspect` does, or all-linear [default: alpha=rank, targets=q,v]
    #[arg(long, value_name = "rank=N,alpha=X,targets=NAME,…", help_heading = LEARNING)]
    pub lora: Option<Lora>,
    /// The greatest learning rate [default: by size, 1e-3 up to 10 M parameters]
    #[arg(long, value_name = "RATE", value_parser = amount, help_heading = LEARNING)]
    pub lr: Option<f64>,
    /// Warmup: steps in which the learning rate rises [default: 20]
    #[arg(long, alias = "lr-warmup-iters", value_name = "N", help_heading = LEARNING)]
    pub warmup: Option<u64>,
    /// How the learning rate falls after the warmup [default: constant; cosine with
    /// --lr-decay-steps]
    #[arg(
        long,
        alias = "lr-decay-style",
        value_name = "STYLE",
        value_parser = ["constant", "linear", "cosine"],
        help_heading = LEARNING
    )]
    pub lr_decay: Option<String>,
    /// The step at which the learning rate has fallen to --min-lr [default: the last]
    #[arg(
        long,
        visible_alias = "decay-steps",
        alias = "lr-decay-iters",
        value_name = "N",
        help_heading = LEARNING
    )]
    pub lr_decay_steps: Option<u64>,
    /// The smallest learning rate [default: 0]
    #[arg(long, value_name = "RATE", value_parser = amount, help_heading = LEARNING)]
    pub min_lr: Option<f64>,
    /// Weight decay of AdamW, for matrices and tables [default: 0.1]
    #[arg(long, value_name = "SHARE", value_parser = amount, help_heading = LEARNING)]
    pub weight_decay: Option<f64>,
    /// Weight decay of AdamW, for biases and norms [default: 0]
    #[arg(long, value_name = "SHARE", value_parser = amount, help_heading = LEARNING)]
    pub bias_weight_decay: Option<f64>,
    /// The norm to which gradients are scaled down, 0 for none [default: 1]
    #[arg(
        long,
        alias = "clip-grad",
        value_name = "NORM",
        value_parser = amount,
        help_heading = LEARNING
    )]
    pub clip: Option<f64>,
    /// Seed of the first weights, of the order of the data and of dropout [default: 1]
    #[arg(long, value_name = "N", help_heading = STEP)]
    pub seed: Option<u32>,
    /// Steps between validations, 0 for none [default: 50]
    #[arg(long, alias = "eval-interval", value_name = "N", help_heading = REPORTS)]
    pub val_every: Option<u64>,
    /// Batches of one validation at most [default: 8]
    #[arg(
        long,
        alias = "eval-iters",
        value_name = "N",
        value_parser = positive,
        help_heading = REPORTS
    )]
    pub val_batches: Option<usize>,
    /// Steps between checkpoints, 0 for one at the end [default: 100]
    #[arg(long, alias = "save-interval", value_name = "N", help_heading = REPORTS)]
    pub save_every: Option<u64>,
    /// Checkpoints that are kept, 0 for all [default: 3]
    #[arg(long, value_name = "N", help_heading = REPORTS)]
    pub keep: Option<usize>,
    /// Report a loss that leaps, leave its step out, or end the run there [default: warn]
    #[arg(
        long,
        value_name = "POLICY",
        value_parser = ["warn", "skip", "stop"],
        help_heading = REPORTS
    )]
    pub on_spike: Option<String>,
    /// The norm of the gradient, before clipping, from which on a step is a spike too
    #[arg(long, value_name = "NORM", value_parser = amount, help_heading = REPORTS)]
    pub spike_norm: Option<f64>,
    /// Scale the loss, from this power of two on: halved where gradients overflow [default: 65536
    /// over the tokens of a step in f16, none elsewhere]
    #[arg(
        long,
        alias = "initial-loss-scale",
        value_name = "SCALE",
        value_parser = power_of_two,
        help_heading = LEARNING
    )]
    pub loss_scale: Option<f64>,
    /// How long a step may go on after a signal; then the step before is kept
    #[arg(
        long,
        value_name = "TIME",
        value_parser = duration,
        default_value = "30s",
        help_heading = REPORTS
    )]
    pub grace: f64,
    /// The model's tokenizer.json [default: beside the model, else bytes]
    #[arg(long, alias = "tokenizer-model", value_name = "FILE")]
    pub tokenizer: Option<PathArg>,
    /// Draw the first weights although the model has some
    #[arg(long)]
    pub from_scratch: bool,
    /// Threads of a rank [default: its share of the cores]
    #[arg(long, value_name = "N", value_parser = positive, help_heading = WHERE)]
    pub threads: Option<usize>,
    /// Say what would be done, and stop
    #[arg(long, help_heading = WHERE)]
    pub dry_run: bool,
    /// Print the summary as one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Reads a loss scale. Other numbers than powers of two would round gradients.
fn power_of_two(text: &str) -> Result<f64, String> {
    let scale = text.parse().ok().filter(|scale: &f64| (1.0..=LOSS_SCALE_MAX).contains(scale));
    let scale = scale.filter(|scale| scale.log2().fract() == 0.0);
    scale.ok_or_else(|| "write a power of two from 1 to 4294967296".to_owned())
}

impl Args {
    /// The same training under a plan: what no flag says is as the plan has it.
    fn about(&self, plan: &Plan) -> Args {
        let mut args = self.clone();
        args.ranks.get_or_insert(plan.mesh.ranks());
        args.seq.get_or_insert(plan.seq);
        args.gbs.get_or_insert(plan.global_batch_size());
        args.clip.get_or_insert(plan.clip.unwrap_or(0.0));
        args.lora = args.lora.or_else(|| plan.lora.clone());
        if let Optimizer::AdamW { decay, decay_biases, .. } = plan.optimizer {
            args.weight_decay.get_or_insert(decay);
            args.bias_weight_decay.get_or_insert(decay_biases);
        }
        if args.dtype.is_none() {
            args.dtype = Some(plan.dtype());
            if args.precision.is_empty() && plan.precision != Precision::training(plan.dtype()) {
                let roles = plan.precision.to_string();
                args.precision = roles.split_whitespace().map(str::to_owned).collect();
            }
        }
        args
    }
}

/// The largest loss scale to begin with: Megatron-LM's.
const LOSS_SCALE_MAX: f64 = 4_294_967_296.0;

/// Trains.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let followed = if args.dry_run { None } else { processes::follow()? };
    if let Some(exit) = followed {
        return Ok(exit);
    }
    // The port is open while this process plans, so that the others end with it if it fails.
    let bootstrap = if args.dry_run { None } else { processes::open()? };
    match &args.resume {
        Some(folder) => {
            let is_written = Run::is_at(folder) && !args.dry_run;
            let _lock = is_written.then(|| RunLock::take(folder)).transpose()?;
            let (run, stored) = Run::open(folder)?;
            let checkpoint = run.resumable(args.step)?;
            let description = run.description(&stored)?;
            check_lora(&stored, args)?;
            check_documents(&stored, args)?;
            let settings = overlay(stored.clone(), args);
            let resolved = Resolved { description, directory: Some(run.model_folder()) };
            let from = match &args.plan {
                Some(path) => PlanFrom::File(path.clone()),
                None if settings.asks_as(&stored) => plan_of(&checkpoint)?,
                None if gpus_of(&Some(settings.cluster.clone()))?.is_some() => {
                    plan_for_gpus(&settings)?
                }
                None => PlanFrom::Search,
            };
            execute((args, bootstrap), &settings, &resolved, &from, Some(&run), Some(&checkpoint))
        }
        None => {
            let planned = args.plan.as_ref().map(read_plan).transpose()?;
            if planned.is_some() && !args.limited.is_empty() {
                let headline = "a plan is given, and what a search keeps to as well";
                return Err(usage("--plan", headline).help("leave one of them out").into());
            }
            let mut args = planned.map_or_else(|| args.clone(), |(_, plan)| args.about(&plan));
            let model = args.model.as_ref().expect("clap: a model unless a run is resumed");
            let resolved = crate::resolve(model)?;
            let out = args.out.as_deref();
            let begun = out.map(|out| Run::begin(out, !args.dry_run)).transpose()?;
            let (run, _lock) = begun.unzip();
            let cluster = gpus_of(&args.cluster)?;
            args.dtype = args.dtype.or_else(|| {
                let own = job::graph_dtype(&resolved.description);
                own.or(cluster.as_ref().map(Cluster::usual_dtype))
            });
            let settings = overlay(defaults(&resolved, &args)?, &args);
            let from = match (&args.plan, cluster) {
                (Some(path), _) => PlanFrom::File(path.clone()),
                (None, Some(_)) => plan_for_gpus(&settings)?,
                (None, None) => PlanFrom::Search,
            };
            execute((&args, bootstrap), &settings, &resolved, &from, run.as_ref(), None)
        }
    }
}

/// The cluster that is named, if its ranks are GPUs.
fn gpus_of(named: &Option<PathArg>) -> Result<Option<Cluster>, Failure> {
    let Some(name) = named else { return Ok(None) };
    let cluster = Cluster::load(name)?;
    Ok((cluster.device.kind == Kind::Gpu).then_some(cluster))
}

/// The plan that is searched for on GPUs.
fn plan_for_gpus(settings: &Settings) -> Result<PlanFrom, Failure> {
    let asked = RequestFlags::of_run(settings)?;
    let cluster = asked.place.cluster()?;
    let (plan, name) = gpus::fastest(&asked, cluster)?;
    Ok(PlanFrom::Found(Box::new(plan), name.to_string()))
}

/// A run goes on with the adapters that it began with.
fn check_lora(stored: &Settings, args: &Args) -> Result<(), Failure> {
    let Some(asked) = args.lora.as_ref().filter(|asked| stored.lora.as_ref() != Some(asked)) else {
        return Ok(());
    };
    let begun = match &stored.lora {
        Some(lora) => format!("with `--lora {lora}`"),
        None => "without adapters".to_owned(),
    };
    let headline = format!("the run was begun {begun}, and `{asked}` is asked for");
    let help = "leave --lora out, or begin a new run";
    Err(usage("--lora", headline).help(help).into())
}

/// A run goes on with the documents that it began with.
fn check_documents(stored: &Settings, args: &Args) -> Result<(), Failure> {
    if !args.document_mask || stored.document_mask {
        return Ok(());
    }
    let headline = "the run was begun with documents that are not kept apart";
    let help = "leave --document-mask out, or begin a new run";
    Err(usage("--document-mask", headline).help(help).into())
}

/// The plan that a checkpoint was made under: under it the run goes on bit for bit.
fn plan_of(checkpoint: &Checkpoint) -> Result<PlanFrom, Failure> {
    let place = checkpoint.folder().display().to_string();
    Ok(PlanFrom::Checkpoint(place, RunState::read(checkpoint)?.identity.plan))
}

fn defaults(resolved: &Resolved, args: &Args) -> Result<Settings, Failure> {
    let description = &resolved.description;
    let seq = args.seq.unwrap_or_else(|| positions_max(description));
    let options = Options { seq, dtype: DType::F32, dropout: Some(0.0), documents: false };
    let params = crate::import(description, &options)?.param_count();
    let mut settings = Settings::defaults(description, params, seq);
    settings.model = args.model.clone().unwrap_or_default();
    Ok(settings)
}

/// Settings with everything replaced that the command line says.
fn overlay(mut settings: Settings, args: &Args) -> Settings {
    fn set<T: Clone>(setting: &mut T, flag: &Option<T>) {
        if let Some(value) = flag {
            setting.clone_from(value);
        }
    }
    if !args.data.is_empty() {
        settings.data.clone_from(&args.data);
    }
    if !args.limited.is_empty() {
        settings.limits.clone_from(&args.limited);
    }
    set(&mut settings.cluster, &args.cluster);
    set(&mut settings.ranks, &args.ranks);
    set(&mut settings.seq, &args.seq);
    set(&mut settings.gbs, &args.gbs);
    set(&mut settings.dtype, &args.dtype);
    if !args.precision.is_empty() || args.dtype.is_some() {
        settings.precision.clone_from(&args.precision);
    }
    set(&mut settings.steps, &args.steps.map(|steps| steps as u64));
    settings.document_mask |= args.document_mask;
    settings.eod_token = args.eod_token.or(settings.eod_token);
    settings.lora = args.lora.clone().or(settings.lora);
    set(&mut settings.lr, &args.lr);
    set(&mut settings.warmup, &args.warmup);
    set(&mut settings.min_lr, &args.min_lr);
    set(&mut settings.weight_decay, &args.weight_decay);
    set(&mut settings.bias_weight_decay, &args.bias_weight_decay);
    set(&mut settings.clip, &args.clip);
    set(&mut settings.seed, &args.seed);
    set(&mut settings.val_every, &args.val_every);
    set(&mut settings.val_batches, &args.val_batches);
    set(&mut settings.save_every, &args.save_every);
    set(&mut settings.keep, &args.keep);
    set(&mut settings.on_spike, &args.on_spike);
    settings.spike_norm = args.spike_norm.or(settings.spike_norm);
    settings.loss_scale = args.loss_scale.or(settings.loss_scale);
    settings.calibration = args.calibration.clone().or(settings.calibration);
    settings.dropout = args.dropout.or(settings.dropout);
    settings.tokenizer = args.tokenizer.clone().or(settings.tokenizer);
    settings.threads = args.threads.or(settings.threads);
    settings.from_scratch |= args.from_scratch;
    set(&mut settings.lr_decay, &args.lr_decay);
    settings.lr_decay_steps = args.lr_decay_steps.or(settings.lr_decay_steps);
    match (settings.lr_decay.as_str(), settings.lr_decay_steps) {
        ("constant", Some(_)) if args.lr_decay.is_none() => {
            "cosine".clone_into(&mut settings.lr_decay)
        }
        ("linear" | "cosine", None) => settings.lr_decay_steps = Some(settings.steps),
        _ => {}
    }
    settings
}

/// The data of a run.
struct Data {
    tokenizer: Tokenizer,
    corpus: Corpus,
    batches: Batches,
}

impl Data {
    fn read(settings: &Settings, resolved: &Resolved, vocab: usize) -> Result<Data, Failure> {
        let file = settings.tokenizer.as_ref().map(PathArg::path);
        let tokenizer = Tokenizer::choose(file, resolved.directory.as_deref(), vocab)?;
        tokenizer.doubt().iter().for_each(|doubt| output::note(&failure::draw(doubt)));
        let mut corpus = Corpus::load(&settings.data, &tokenizer)?;
        if settings.document_mask {
            corpus = keep_documents_apart(corpus, settings, &tokenizer)?;
        } else if settings.eod_token.is_some() {
            let headline = "documents are not kept apart without --document-mask";
            return Err(usage("--eod-token", headline).help("write --document-mask too").into());
        }
        let batches = corpus.batches(u64::from(settings.seed), settings.seq, settings.gbs)?;
        Ok(Data { tokenizer, corpus, batches })
    }

    /// What tells checkpoints of this training apart from others.
    fn identity(&self, training: &Training) -> Identity {
        Identity {
            model: training.identity(),
            plan: training.plan.to_string(),
            tokenizer: self.tokenizer.identity(),
            data: self.corpus.hash(),
        }
    }

    /// One line for the user.
    fn describe(&self) -> String {
        let count = |number: usize| output::count(number as u64);
        let kind =
            if self.tokenizer.is_bytes() { "bytes, one token each" } else { "tokenizer.json" };
        let files = if self.corpus.files() == 1 { "file" } else { "files" };
        let documents = self.corpus.documents();
        let documents = documents.map(|number| format!(", {} documents kept apart", count(number)));
        format!(
            "data     {} {files}: {} tokens to train on, {} for validation ({kind}){}",
            count(self.corpus.files()),
            count(self.corpus.training_tokens()),
            count(self.corpus.validation_tokens()),
            documents.unwrap_or_default(),
        )
    }
}

/// Tokens that end a document, as tokenisers name them.
const ENDS: [&str; 3] = ["<|endoftext|>", "<|end_of_text|>", "</s>"];

/// The data with its documents apart.
fn keep_documents_apart(
    corpus: Corpus,
    settings: &Settings,
    tokenizer: &Tokenizer,
) -> Result<Corpus, Failure> {
    let vocabulary = tokenizer.vocabulary();
    if let Some(end) = settings.eod_token.filter(|end| *end as usize >= vocabulary) {
        let headline = format!("the model has {vocabulary} tokens, and none is {end}");
        return Err(usage("--eod-token", headline).help("name a token of the model").into());
    }
    let named = || ENDS.iter().find_map(|end| tokenizer.token(end));
    let corpus = corpus.with_documents_apart(settings.eod_token.or_else(named));
    if corpus.documents().is_none_or(|count| count < 2) {
        let headline = "the data is one document: it is one file, without a token that ends one";
        let help = "name the token that ends a document: --eod-token 50256 for GPT-2's";
        return Err(usage("--document-mask", headline).help(help).into());
    }
    Ok(corpus)
}

fn execute(
    (args, bootstrap): (&Args, Option<Bootstrap>),
    settings: &Settings,
    resolved: &Resolved,
    from: &PlanFrom,
    run: Option<&Run>,
    resumed: Option<&Checkpoint>,
) -> Result<Exit, Failure> {
    let since = Instant::now();
    let schedule = settings.schedule()?;
    // What fails soonest comes first: planning takes the longest.
    let data = Data::read(settings, resolved, job::vocab(&resolved.description)?)?;
    let weights = if resumed.is_none() { given_weights(settings, resolved)? } else { None };
    let training = Training::prepare(settings, &resolved.description, from)?;
    if let (Some(checkpoint), Some(run)) = (resumed, run) {
        let config = config(settings, schedule, &training, run);
        RunState::new(&config, &data.identity(&training), training.samples()).check(checkpoint)?;
    }
    output::note(&data.describe());
    output::note(&training.describe(settings));
    let Some(run) = run.filter(|_| !args.dry_run) else {
        output::answer(&training.forecast(settings, resumed.map_or(0, Checkpoint::step))?);
        return Ok(Exit::Success);
    };
    let peers = bootstrap.map(processes::connect).transpose()?;
    let grace = Duration::try_from_secs_f64(args.grace).unwrap_or(Duration::MAX);
    let stop = StopSignal::watch(grace)?;
    let mut session = training.start(settings, &run.folder, peers)?;
    let abandon = session.abandon();
    stop.after_grace(move || abandon.now());
    if resumed.is_none() {
        first_weights(&mut session, &training, settings, weights.as_ref())?;
        run.write_model(settings, resolved, &data.tokenizer)?;
    }
    // What a run is made with is on the disk before the first step that is done with it.
    run.write_file(PLAN, training.plan.to_string().as_bytes())?;
    run.write_settings(settings)?;
    let config = config(settings, schedule, &training, run);
    let mut watcher = Watcher::new(settings.steps, resumed.map_or(0, Checkpoint::step));
    let outcome = train::train(
        &mut session,
        &mut train::Run {
            since,
            config: &config,
            batches: &data.batches,
            identity: &data.identity(&training),
            stop: &|| stop.name().is_some(),
            progress: &mut |progress| watcher.report(progress),
        },
        resumed,
    );
    watcher.finish();
    let exit = finish(args, run, &watcher, &outcome?, &stop)?;
    session.end_with(exit.code());
    Ok(exit)
}

fn config(
    settings: &Settings,
    schedule: runtime::rate::Schedule,
    training: &Training,
    run: &Run,
) -> Config {
    let unless_zero = |number: u64| (number > 0).then_some(number);
    let precision = training.plan.precision;
    Config {
        steps: settings.steps,
        seed: settings.seed,
        schedule,
        clip: settings.clip(),
        optimizer: training.plan.optimizer,
        validate_every: unless_zero(settings.val_every),
        validation_batches: settings.val_batches,
        checkpoint_every: settings.checkpoint_every(),
        keep: (settings.keep > 0).then_some(settings.keep),
        out: run.folder.clone(),
        predicted_step_s: training.predicted_step_s(),
        settings: settings.to_text(),
        on_spike: match settings.on_spike.as_str() {
            "stop" => OnSpike::Stop,
            "skip" => OnSpike::Skip,
            _ => OnSpike::Warn,
        },
        spike_norm: settings.spike_norm,
        loss_scale: match settings.loss_scale {
            Some(scale) => Some(LossScale::first(scale)),
            // Only f16 has too few powers of two for gradients.
            None => [precision.compute, precision.gradients, precision.reduce]
                .contains(&DType::F16)
                .then(|| LossScale::of_tokens(settings.gbs * settings.seq)),
        },
    }
}

/// The weights that the model has, all of them, unless others are to be drawn.
fn given_weights(settings: &Settings, resolved: &Resolved) -> Result<Option<Weights>, Failure> {
    let directory = resolved.directory.as_deref().filter(|_| !settings.from_scratch);
    let Some(directory) = directory else { return Ok(None) };
    let with_way_out = |failure| match Failure::from(failure) {
        Failure::Input(mut diagnostics) => {
            for diagnostic in diagnostics.iter_mut().filter(|d| d.code == "E4001") {
                let help = "--from-scratch starts from weights that are drawn";
                diagnostic.help.get_or_insert(help.to_owned());
            }
            Failure::Input(diagnostics)
        }
        failure @ Failure::World(_) => failure,
    };
    let weights = Weights::open(directory).map_err(with_way_out)?;
    let Settings { seq, dropout, .. } = *settings;
    let dtype = settings.precision()?.accumulate;
    let model =
        crate::import(&resolved.description, &Options { seq, dtype, dropout, documents: false })?;
    let wrong = check_weights(&model.weights, &weights);
    if wrong.is_empty() { Ok(Some(weights)) } else { Err(wrong.into()) }
}

/// Draws the weights of a run that starts, and replaces them by those that the model has.
fn first_weights(
    session: &mut Session,
    training: &Training,
    settings: &Settings,
    given: Option<&Weights>,
) -> Result<(), Failure> {
    training.draw_weights(session, settings.seed);
    let Some(given) = given else {
        output::note(&format!("weights  drawn with seed {}", settings.seed));
        return Ok(());
    };
    let count = runtime::load::load_weights(session, &training.own_weights(), given)?;
    output::note(&format!("weights  {} from `{}`", output::count(count), settings.model));
    Ok(())
}

fn finish(
    args: &Args,
    run: &Run,
    watcher: &Watcher,
    outcome: &Outcome,
    stop: &StopSignal,
) -> Result<Exit, Failure> {
    let (summary, exit) = match outcome {
        Outcome::Finished(summary) => (summary, Exit::Success),
        Outcome::Interrupted(summary) if summary.steps == 0 => (summary, Exit::Killed),
        Outcome::Interrupted(summary) => (summary, Exit::Interrupted),
    };
    let out = run.folder.display();
    if args.json {
        let checkpoint = summary.checkpoint.as_ref().map(|path| path.display().to_string());
        let document = documents::Train {
            steps: summary.steps,
            complete: exit == Exit::Success,
            loss_first: watcher.first_loss,
            loss: summary.last.as_ref().map(|last| last.loss),
            validation_loss: watcher.validation,
            step_time_s: watcher.median_step_s(),
            predicted_step_time_s: summary.last.as_ref().and_then(|l| l.predicted_step_s),
            tokens_per_s: summary.last.as_ref().map(|last| last.tokens_per_s),
            goodput: summary.goodput,
            checkpoint,
        };
        output::answer_json(&document.to_json());
    } else if exit == Exit::Success || summary.last.is_some() {
        output::answer(&watcher.summary(summary));
    }
    if exit == Exit::Success {
        output::note(&format!("next     gantline generate {out} --prompt …"));
        return Ok(exit);
    }
    let signal = stop.awaited_name().unwrap_or("a signal");
    if exit == Exit::Killed {
        output::note(&format!("note: stopped by {signal} before the first step"));
        output::note("  = help: nothing was learned; give the same command again");
    } else {
        output::note(&format!("note: stopped by {signal} after step {}", summary.steps));
        output::note(&format!("  = help: go on with `gantline train --resume {out}`"));
    }
    Ok(exit)
}
