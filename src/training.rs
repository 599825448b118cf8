//! What is trained and how: a model, prepared and planned.

use std::collections::BTreeMap;
use std::path::Path;

use ir::import::{Architecture, Description, Init, Model, Options, Weight};
use ir::lora::{Adapter, Lora, adapt, trained_count};
use ir::plan::{FunctionPlan, Optimizer};
use ir::precision::Precision;
use ir::{Diagnostic, Function, Module, Plan, Span};
use planner::cluster::Cluster;
use planner::footprint::Footprint;
use runtime::execute::{Classes, Samples, Session};
use runtime::processes::Peers;

use crate::argument::PathArg;
use crate::failure::{self, Failure};
use crate::job::{self, PlanRequest, Where};
use crate::processes::lead;
use crate::run::Settings;
use crate::{LOSS, output};

/// The parameter in which functions are given the documents of their tokens.
const DOCUMENTS: &str = "documents";

/// A model with its plan.
#[derive(Clone, Debug)]
pub struct Training {
    /// The model, with its adapters where there are any.
    pub model: Model,
    /// The adapters, where the model's own weights are frozen.
    adapters: Vec<Adapter>,
    lora: Option<Lora>,
    /// What the planner was asked.
    pub question: PlanRequest,
    /// What it answered, or the user gave.
    pub plan: Plan,
    /// The plan in a few words.
    summary: String,
}

/// Where a plan comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum PlanFrom {
    /// It is searched for.
    Search,
    /// From a file that the user names.
    File(PathArg),
    /// It was searched for, and has a name.
    Found(Box<Plan>, String),
    /// From a checkpoint: its place and the plan's text. Another is searched for where this one
    /// cannot be used any more, as on another machine.
    Checkpoint(String, String),
}

impl Training {
    /// Imports, prepares and plans.
    pub fn prepare(
        settings: &Settings,
        description: &Description,
        from: &PlanFrom,
    ) -> Result<Training, Failure> {
        let precision = settings.precision()?;
        job::check_graph(description, precision.accumulate)?;
        let (seq, dtype, dropout) = (settings.seq, precision.accumulate, settings.dropout);
        let documents = settings.document_mask;
        let options = Options { seq, dtype, dropout, documents };
        let mut model = crate::import_drawing(description, &options, settings.draw_bits)?;
        let lora = settings.lora.clone();
        let adapters = lora.as_ref().map(|lora| adapt(&mut model, lora)).transpose()?;
        let adapters = adapters.unwrap_or_default();
        let place = Where {
            cluster: settings.cluster.clone(),
            ranks: Some(settings.ranks),
            nodes: None,
            calibration: settings.calibration.clone(),
        };
        let cluster = place.measured_cluster()?;
        check_runs_on(&cluster)?;
        crate::choose_layout(&mut model, cluster.target(), &precision);
        let question = PlanRequest {
            cluster,
            module: crate::prepare_as(&model, &precision)?,
            model: model.name.clone(),
            ranks: settings.ranks,
            global_batch_size: settings.gbs,
            seq,
            precision,
            optimizer: settings.optimizer(),
            clip: settings.clip(),
            lora: lora.clone(),
            limits: settings.limits.limits()?,
        };
        let (plan, summary) = find_plan(from, &question)?;
        Ok(Training { model, adapters, lora, question, plan, summary })
    }

    /// What the plan says that a step takes.
    pub fn predicted_step_s(&self) -> Option<f64> {
        Some(self.plan.predictions.get("step_time_s")?.value)
    }

    /// How the plan cuts a batch.
    pub fn samples(&self) -> Samples {
        let Plan { microbatch_size: size, microbatch_count: count, mesh, seq, .. } = self.plan;
        Samples { size, dp: mesh.dp, count, seq }
    }

    /// Two lines for the user.
    pub fn describe(&self, settings: &Settings) -> String {
        let mut count = output::count(self.model.param_count());
        if self.lora.is_some() {
            let trained = output::count(trained_count(&self.model));
            count = format!("{count} parameters, {trained} of them trained, in");
        } else {
            count.push_str(" parameters in");
        }
        let Settings { gbs, seq, dtype, .. } = settings;
        let step = self.predicted_step_s().map(output::seconds);
        format!(
            "model    {}: {count} {dtype}, steps of {gbs} samples of {seq} tokens\n\
             plan     {} on {} of {}, predicted {} a step",
            self.model.name,
            self.summary,
            self.plan.mesh,
            self.question.cluster.describe(),
            step.as_deref().unwrap_or("nothing for"),
        )
    }

    /// What the steps that are left will take: memory, time and room on the disk, for people.
    ///
    /// # Errors
    /// Those of compiling.
    pub fn forecast(&self, settings: &Settings, done: u64) -> Result<String, Failure> {
        let classes = crate::compile(&self.question.module, LOSS, &self.plan)?;
        let ranks = self.plan.mesh.ranks();
        let threads = self.threads(settings);
        let Classes { programs, kernels, .. } = &classes;
        let footprints = Footprint::of_all(programs, kernels, self.plan.target, threads);
        let held = |rank: usize| &footprints[classes.class_of(rank)];
        let fullest = (0..ranks).rev().max_by_key(|rank| held(*rank).total()).unwrap_or(0);
        let all = (0..ranks).map(|rank| held(rank).total()).sum();
        let offloaded = (0..ranks).map(|rank| held(rank).disk).sum::<u64>();
        let steps = settings.steps.saturating_sub(done);
        let mut text = format!(
            "memory   {} on {ranks} ranks, of which rank {fullest} holds {}: {}\n",
            output::bytes(all),
            output::bytes(held(fullest).total()),
            held(fullest),
        );
        text += &match self.predicted_step_s() {
            Some(step_s) => format!(
                "time     {} for {} steps, without validation and checkpoints\n",
                output::seconds(step_s * steps as f64),
                output::count(steps),
            ),
            None => "time     not predicted: the plan has no step time\n".to_owned(),
        };
        let checkpoint = self.checkpoint_bytes();
        // The newest is complete before the oldest goes.
        let saved = runtime::train::checkpoints(settings.checkpoint_every(), done..settings.steps);
        let most = if settings.keep > 0 { saved.min(settings.keep as u64 + 1) } else { saved };
        text += &format!(
            "disk     {} for {most} checkpoint{} of {}\n",
            output::bytes(most * checkpoint),
            if most == 1 { "" } else { "s" },
            output::bytes(checkpoint)
        );
        if offloaded > 0 {
            let bytes = output::bytes(offloaded);
            text += &format!("         {bytes} while it trains, for what the plan offloads\n");
        }
        let plan = "`gantline plan -o FILE` writes the plan, and `train --plan FILE` takes it";
        Ok(text + &format!("nothing was trained or written; {plan}"))
    }

    /// Bytes of the tensors of a checkpoint: what is updated, and its states.
    fn checkpoint_bytes(&self) -> u64 {
        let Precision { parameters, master, states, .. } = self.question.precision;
        let moments = match self.question.optimizer {
            Optimizer::None | Optimizer::Sgd { .. } => 0,
            Optimizer::AdamW { .. } => 2,
        };
        let each = master.unwrap_or(parameters).size() + moments * states.size();
        let trained = trained_count(&self.model);
        trained * each + (self.model.param_count() - trained) * parameters.size()
    }

    /// Threads of a rank.
    fn threads(&self, settings: &Settings) -> usize {
        let own = || self.question.cluster.threads(self.plan.mesh.ranks());
        settings.threads.unwrap_or_else(own)
    }

    /// What a checkpoint must have been made with to go on with this.
    pub fn identity(&self) -> String {
        let model = self.identity_of_model();
        match &self.lora {
            Some(lora) => format!("{model} with {lora}"),
            None => model,
        }
    }

    fn identity_of_model(&self) -> String {
        match &self.model.config {
            Architecture::Graph(module) => format!("{module}"),
            Architecture::Family(model) => {
                let config = serde_json::Value::from(model.config());
                format!("{config} in {}", types(&self.question.precision))
            }
            Architecture::Sized(sizes) => {
                format!("{sizes:?} in {}", types(&self.question.precision))
            }
        }
    }

    /// Compiles, and starts the ranks: on GPUs, where the plan is for these. What the plan places
    /// on a disk lies on that of a directory.
    /// `peers` are the other processes of the run, where there are any.
    pub fn start(
        &self,
        settings: &Settings,
        folder: &Path,
        peers: Option<Peers>,
    ) -> Result<Session, Failure> {
        let classes = crate::compile(&self.question.module, LOSS, &self.plan)?;
        let (threads, step_s) = (self.threads(settings), self.predicted_step_s());
        let (target, disk) = (self.plan.target, Some(folder.to_owned()));
        match peers {
            Some(peers) => lead(classes, target, settings.threads, (step_s, disk), peers),
            None => crate::start_predicted(classes, target, threads, step_s, disk),
        }
    }

    /// The weights that a checkpoint of the model has: all but those of adapters.
    pub fn own_weights(&self) -> Vec<Weight> {
        let is_new =
            |name: &String| self.adapters.iter().any(|one| [&one.a, &one.b].contains(&name));
        self.model.weights.iter().filter(|weight| !is_new(&weight.name)).cloned().collect()
    }

    /// Gives every weight the first value that the model says.
    pub fn draw_weights(&self, session: &mut Session, seed: u32) {
        let inits: BTreeMap<&str, Init> =
            self.model.weights.iter().map(|w| (w.name.as_str(), w.init)).collect();
        session.init_weights(seed, &|name, _| match inits.get(name) {
            Some(&Init::Normal { std, zero_row }) => runtime::init::Init::Normal { std, zero_row },
            Some(Init::Ones) => runtime::init::Init::Ones,
            Some(Init::Zeros) | None => runtime::init::Init::Zeros,
        });
    }
}

/// Whether programs run on devices like those of a cluster: cores, or GPUs for which kernels are
/// written.
///
/// # Errors
/// `E5010` where they do not.
pub fn check_runs_on(cluster: &Cluster) -> Result<(), Diagnostic> {
    if cluster.groups.is_empty() && cluster.target().is_some() {
        return Ok(());
    }
    let headline = match cluster.groups.is_empty() {
        true => format!("no kernels are written for the devices of `{}`", cluster.name),
        false => format!("`{}` has devices of several kinds", cluster.name),
    };
    Err(Diagnostic::error("E5010", Span::of("--cluster"), headline)
        .help("use `--cluster cpu-local`, or GPUs of one kind: a100, l4, h100, b200"))
}

/// A plan, and a few words on it.
fn find_plan(from: &PlanFrom, question: &PlanRequest) -> Result<(Plan, String), Failure> {
    match from {
        PlanFrom::File(path) => {
            let text = failure::read_text(path, "--plan")?;
            let plan = read_plan(&path.to_string(), &text, question)?;
            check_fits(question, &plan)?;
            let plan = predicted_here(plan, question)?;
            return Ok((plan, format!("from `{path}`")));
        }
        PlanFrom::Checkpoint(place, text) => match read_plan(place, text, question) {
            Ok(plan) => return Ok((plan, "as before".to_owned())),
            Err(why) => {
                let headline = why.first().map_or("", |first| first.headline.as_str());
                output::note(&format!("warning: another plan is searched for: {headline}"));
            }
        },
        PlanFrom::Found(plan, name) => {
            let optimizer = question.optimizer;
            let plan = Plan { optimizer, clip: question.clip, ..(**plan).clone() };
            return Ok((check_plan(name, plan, question)?, name.clone()));
        }
        PlanFrom::Search => {}
    }
    let found = crate::plan(&question.job())?;
    Ok((found.plan, found.best.name.to_string()))
}

/// A plan with what is predicted of it on the cluster that is asked about, if it was made for
/// another: nothing, where that has GPUs.
pub fn predicted_here(plan: Plan, question: &PlanRequest) -> Result<Plan, Diagnostic> {
    let cluster = &question.cluster;
    let is_of_cpus = cluster.target().is_some_and(|target| target.arch().is_none());
    if plan.cluster.split(" (").next() == Some(cluster.name.as_str()) {
        return Ok(plan);
    }
    if !is_of_cpus {
        // What was predicted is of other devices.
        return Ok(Plan { predictions: BTreeMap::new(), ..plan });
    }
    planner::compiled::predicted(&question.job(), &plan)
}

/// Whether a plan that nobody searched for fits in memory: `E3308` where it does not.
fn check_fits(question: &PlanRequest, plan: &Plan) -> Result<(), Failure> {
    let cluster = &question.cluster;
    let classes = crate::compile(&question.module, LOSS, plan)?;
    let threads = cluster.threads(cluster.ranks_per_node(plan.mesh.ranks()));
    let Classes { programs, kernels, .. } = &classes;
    let footprints = Footprint::of_all(programs, kernels, plan.target, threads);
    match planner::check::check_memory(plan, &footprints, cluster) {
        Some(diagnostic) => Err(diagnostic.into()),
        None => Ok(()),
    }
}

/// The element types of a run, for people and to tell runs apart.
fn types(precision: &Precision) -> String {
    match precision.is_uniform() {
        true => precision.compute.to_string(),
        false => precision.to_string(),
    }
}

/// Reads a plan, and checks that it is one for what is asked.
///
/// # Errors
/// Those of its text; `E5006`, one for each difference; those of [`planner::check`].
pub fn read_plan(path: &str, text: &str, question: &PlanRequest) -> Result<Plan, Vec<Diagnostic>> {
    check_plan(path, training_plan(path, text)?, question)
}

/// Reads a plan of training.
///
/// # Errors
/// Those of its text; `E5006` for a plan of inference.
pub fn training_plan(path: &str, text: &str) -> Result<Plan, Vec<Diagnostic>> {
    let plan = ir::text::parse_plan(path, text)?;
    if plan.is_inference() {
        let headline = "this is a plan of inference, and one of training is needed";
        let help = "`generate --plan` takes it";
        return Err(vec![Diagnostic::error("E5006", Span::of(path), headline).help(help)]);
    }
    Ok(plan)
}

/// Whether functions read documents that a plan says nothing of.
fn lacks_documents(plan: &Plan, module: &Module) -> bool {
    let reads = |function: &Function| {
        function.params().any(|param| function.value(param).name == DOCUMENTS)
    };
    let is_there = |function: &FunctionPlan| function.shardings.contains_key(DOCUMENTS);
    module.functions.iter().any(reads) && !plan.functions.values().any(is_there)
}

/// A plan, if it is one for what is asked and computes what the model does. `path` is where it
/// comes from.
///
/// # Errors
/// As [`read_plan`].
pub fn check_plan(path: &str, plan: Plan, question: &PlanRequest) -> Result<Plan, Vec<Diagnostic>> {
    // It is compiled for the cluster that is asked about. Older texts do not say for which one,
    // nor whose adapters are trained.
    let says_adapters = plan.lora.is_some();
    let lora = plan.lora.clone().or_else(|| question.lora.clone());
    let plan = Plan { target: question.cluster.target(), lora, ..plan };
    let mut wrong = Vec::new();
    let mut compare = |what: &str, flag: &str, asked: String, planned: String| {
        if asked != planned {
            let headline = format!("the plan is for {what} {planned}, and {asked} is asked for");
            let help = format!("write `{flag} {planned}`, or plan again");
            wrong.push(Diagnostic::error("E5006", Span::of(path), headline).help(help));
        }
    };
    let show = |number: usize| number.to_string();
    compare("the model", "MODEL", question.model.clone(), plan.model.clone());
    compare("ranks", "--ranks", show(question.ranks), show(plan.mesh.ranks()));
    compare("sequences of", "--seq", show(question.seq), show(plan.seq));
    let planned = plan.global_batch_size();
    compare("batches of", "--gbs", show(question.global_batch_size), show(planned));
    let show = |precision: &Precision| precision.compute.to_string();
    compare("elements of", "--dtype", show(&question.precision), show(&plan.precision));
    if question.precision.compute == plan.dtype() {
        let show = |precision: &Precision| precision.to_string().replace(' ', ",");
        compare("types", "--precision", show(&question.precision), show(&plan.precision));
    }
    let shown = |clip: Option<f64>| clip.unwrap_or(0.0).to_string();
    compare("gradients clipped to", "--clip", shown(question.clip), shown(plan.clip));
    let shown =
        |lora: &Option<Lora>| lora.as_ref().map_or("none".to_owned(), |lora| lora.to_string());
    compare("the adapters", "--lora", shown(&question.lora), shown(&plan.lora));
    if plan.optimizer != question.optimizer {
        let headline = "the plan is for another optimizer, or another weight decay";
        let help = "write its `decay` as --weight-decay and its `decay_biases` as \
                    --bias-weight-decay, or plan again";
        wrong.push(Diagnostic::error("E5006", Span::of(path), headline).help(help));
    }
    if wrong.is_empty() {
        wrong = planner::check::check(&question.module, LOSS, &plan, &question.cluster);
        if !says_adapters && question.lora.is_some() && !wrong.is_empty() {
            let headline = "the plan is of a model without adapters, and `--lora` is asked for";
            let help = "plan again, with `--lora`";
            wrong = vec![Diagnostic::error("E5006", Span::of(path), headline).help(help)];
        }
        if !wrong.is_empty() && lacks_documents(&plan, &question.module) {
            let headline = "the plan is of samples of one document each, and others are asked for";
            let help = "leave --document-mask out; `plan --document-mask` plans for cores";
            wrong = vec![Diagnostic::error("E5006", Span::of(path), headline).help(help)];
        }
    }
    if wrong.is_empty() { Ok(plan) } else { Err(wrong) }
}
