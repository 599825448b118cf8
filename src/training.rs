//! What is trained and how: a model, prepared and planned.

use std::collections::BTreeMap;

use ir::import::{Architecture, Description, Init, Model, Options};
use ir::{Diagnostic, Plan, Span};
use planner::cluster::Kind;
use runtime::execute::Session;

use crate::failure::{self, Failure};
use crate::job::{self, Question, Where};
use crate::run::Settings;
use crate::{LOSS, output};

/// A model with its plan.
#[derive(Clone, Debug)]
pub struct Training {
    /// The model.
    pub model: Model,
    /// What the planner was asked.
    pub question: Question,
    /// What it answered, or the user gave.
    pub plan: Plan,
    /// The plan in a few words.
    summary: String,
}

impl Training {
    /// Imports, prepares and plans; reads the plan where a file is given.
    pub fn prepare(
        settings: &Settings,
        description: &Description,
        plan: Option<&str>,
    ) -> Result<Training, Failure> {
        job::check_executable(settings.dtype)?;
        let (seq, dtype, dropout) = (settings.seq, settings.dtype, settings.dropout);
        let model = crate::import(description, &Options { seq, dtype, dropout })?;
        let place = Where {
            cluster: settings.cluster.clone(),
            ranks: settings.ranks,
            nodes: None,
            calibration: settings.calibration.clone(),
        };
        let cluster = place.cluster()?;
        if cluster.device.kind != Kind::Cpu {
            let headline =
                format!("`{}` has other devices than this machine's cores", cluster.name);
            return Err(Diagnostic::error("E5010", Span::of("--cluster"), headline)
                .help("use `--cluster cpu-local`, or a file with `extends = \"preset:cpu-local\"`")
                .into());
        }
        let question = Question {
            cluster,
            module: crate::prepare(&model)?,
            model: model.name.clone(),
            ranks: settings.ranks,
            global_batch_size: settings.gbs,
            seq,
            dtype,
            optimizer: settings.optimizer(),
            clip: settings.clip(),
            limits: settings.limits.limits()?,
        };
        let (plan, summary) = match plan {
            Some(path) => (read_plan(path, &question)?, format!("from `{path}`")),
            None => {
                let found = crate::plan(&question.job())?;
                (found.plan, found.best.candidate.to_string())
            }
        };
        Ok(Training { model, question, plan, summary })
    }

    /// What the plan says that a step takes.
    pub fn predicted_step_s(&self) -> Option<f64> {
        Some(self.plan.predictions.get("step_time_s")?.value)
    }

    /// Two lines for the user.
    pub fn describe(&self, settings: &Settings) -> String {
        let count = output::count(self.model.param_count());
        let Settings { gbs, seq, dtype, .. } = settings;
        let step = self.predicted_step_s().map(output::seconds);
        format!(
            "model    {}: {count} parameters in {dtype}, steps of {gbs} samples of {seq} tokens\n\
             plan     {} on {} of {}, predicted {} a step",
            self.model.name,
            self.summary,
            self.plan.mesh,
            self.question.cluster.describe(),
            step.as_deref().unwrap_or("nothing for"),
        )
    }

    /// What a checkpoint must have been made with to go on with this.
    pub fn identity(&self) -> String {
        match &self.model.config {
            Architecture::Graph(module) => format!("{module}"),
            config @ (Architecture::Gpt2(_) | Architecture::Llama(_)) => {
                format!("{config:?} in {}", self.question.dtype)
            }
        }
    }

    /// Compiles, and starts the ranks.
    pub fn start(&self, settings: &Settings) -> Result<Session, Failure> {
        let classes = crate::compile(&self.question.module, LOSS, &self.plan)?;
        let ranks = self.plan.mesh.ranks();
        let threads = settings.threads.unwrap_or_else(|| self.question.cluster.threads(ranks));
        crate::start(classes, threads)
    }

    /// Gives every weight the first value that the model says.
    pub fn draw_weights(&self, session: &mut Session, seed: u32) {
        let inits: BTreeMap<&str, Init> =
            self.model.weights.iter().map(|w| (w.name.as_str(), w.init)).collect();
        session.init_weights(seed, &|name, _| match inits.get(name) {
            Some(Init::Normal { std }) => runtime::init::Init::Normal { std: *std },
            Some(Init::Ones) => runtime::init::Init::Ones,
            Some(Init::Zeros) | None => runtime::init::Init::Zeros,
        });
    }
}

/// Reads a plan, and checks that it is one for what is asked.
pub fn read_plan(path: &str, question: &Question) -> Result<Plan, Failure> {
    let text = failure::read_text(path, "--plan")?;
    let plan = ir::text::parse_plan(path, &text)?;
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
    compare("elements of", "--dtype", question.dtype.to_string(), plan.dtype.to_string());
    wrong.extend(planner::check::check(&question.module, LOSS, &plan, &question.cluster));
    if wrong.is_empty() { Ok(plan) } else { Err(wrong.into()) }
}
