//! A run: what it is made with, and what its directory holds.
//!
//! ```text
//! OUT/run.toml       every setting with its value, which a resumption starts from
//! OUT/run.plan       the plan
//! OUT/run.lock       who writes to the directory now: see `runtime::lock`
//! OUT/model/         config.json or model.graph, and tokenizer.json, where the model has them
//! OUT/checkpoints/   and the metrics: see `runtime::train`
//! ```
//!
//! Settings are in TOML since its floating-point numbers read back to the bit. Every checkpoint has
//! them too: where the file is lost, they are those of the newest one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{fs, io};

use ir::diagnostic::Severity;
use ir::import::{Architecture, Description, Resolved};
use ir::lora::Lora;
use ir::plan::Optimizer;
use ir::precision::Precision;
use ir::random::DrawBits;
use ir::{DType, Diagnostic, Span};
use runtime::checkpoint::{Checkpoint, Damage, Store};
use runtime::lock::RunLock;
use runtime::rate::{Decay, Schedule};
use runtime::tokens::Tokenizer;
use runtime::train::{CHECKPOINTS, RunState};
use serde::{Deserialize, Serialize};

use crate::argument::PathArg;
use crate::failure::{Failure, draw, usage};
use crate::job::{self, Limited};
use crate::output;
use clap::builder::{OsStringValueParser, TypedValueParser};

/// The settings of a run, in its directory.
pub const SETTINGS: &str = "run.toml";
/// The plan of a run, in its directory.
pub const PLAN: &str = "run.plan";
/// The description of its model.
const MODEL: &str = "model";
/// The version of the settings.
const SCHEMA: &str = "gantline.run/1";

/// What a run is made with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The version of this format.
    pub schema: String,
    /// The model's name.
    pub name: String,
    /// The MODEL argument.
    pub model: PathArg,
    /// Files and patterns of the data.
    pub data: Vec<PathArg>,
    /// The tokeniser, where one was named.
    pub tokenizer: Option<PathArg>,
    /// Whether the first weights are drawn although the model has some.
    pub from_scratch: bool,
    /// The cluster.
    pub cluster: PathArg,
    /// What was measured on it.
    pub calibration: Option<PathArg>,
    /// Ranks.
    pub ranks: usize,
    /// Threads of a rank; a share of the cores where none.
    pub threads: Option<usize>,
    /// Tokens of a sample.
    pub seq: usize,
    /// Samples of a step.
    pub gbs: usize,
    /// The element type.
    pub dtype: DType,
    /// Roles that have other types than training in that one usually has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub precision: Vec<String>,
    /// The probability of dropout; that of the model where none.
    pub dropout: Option<f64>,
    /// The bits of a draw of dropout; runs that were begun by earlier versions say nothing, and
    /// draw 24.
    #[serde(default)]
    pub draw_bits: DrawBits,
    /// Whether packed documents are kept apart.
    #[serde(default, skip_serializing_if = "is_false")]
    pub document_mask: bool,
    /// The token that ends a document, beside the ends of files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eod_token: Option<u32>,
    /// What is trained beside the weights of the model, which are then frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<Lora>,
    /// Steps of the whole run.
    pub steps: u64,
    /// The greatest learning rate.
    pub lr: f64,
    /// Steps of warm-up.
    pub warmup: u64,
    /// How the learning rate falls: `constant`, `linear`, `cosine`.
    pub lr_decay: String,
    /// The step at which it has fallen.
    pub lr_decay_steps: Option<u64>,
    /// The smallest learning rate.
    pub min_lr: f64,
    /// Weight decay of what products and look-ups read.
    pub weight_decay: f64,
    /// Weight decay of biases and norms.
    pub bias_weight_decay: f64,
    /// The norm to which gradients are scaled down; 0 for none.
    pub clip: f64,
    /// The seed.
    pub seed: u32,
    /// Steps between validations; 0 for none.
    pub val_every: u64,
    /// Batches of one validation at most.
    pub val_batches: usize,
    /// Steps between checkpoints; 0 for one at the end.
    pub save_every: u64,
    /// Checkpoints that are kept; 0 for all.
    pub keep: usize,
    /// What is done about a loss that leaps: `warn`, `skip`, `stop`.
    #[serde(default = "warn")]
    pub on_spike: String,
    /// The norm of the gradient above which that is done, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spike_norm: Option<f64>,
    /// The loss scale to begin with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// What the planner keeps to.
    pub limits: Limited,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// What runs do about a leap that nobody has said anything about.
fn warn() -> String {
    "warn".to_owned()
}

impl Settings {
    /// The settings of a run that nobody has said anything about.
    ///
    /// Chosen so that a small model learns a small text well: the learning rates are those of
    /// GPT-3's smallest models (Brown et al. 2020, table 2.1), lowered for small batches.
    pub fn defaults(resolved: &Description, params: u64, seq: usize) -> Settings {
        Settings {
            schema: SCHEMA.to_owned(),
            name: resolved.name.clone(),
            model: PathArg::default(),
            data: Vec::new(),
            tokenizer: None,
            from_scratch: false,
            cluster: PathArg::from("cpu-local"),
            calibration: None,
            ranks: 1,
            threads: None,
            seq,
            gbs: 8,
            dtype: job::graph_dtype(resolved).unwrap_or(DType::F32),
            precision: Vec::new(),
            dropout: None,
            draw_bits: DrawBits::B16,
            document_mask: false,
            eod_token: None,
            lora: None,
            steps: 0,
            lr: if params <= 10_000_000 {
                1e-3
            } else if params <= 400_000_000 {
                3e-4
            } else {
                1e-4
            },
            warmup: 20,
            lr_decay: "constant".to_owned(),
            lr_decay_steps: None,
            min_lr: 0.0,
            weight_decay: 0.1,
            bias_weight_decay: 0.0,
            clip: 1.0,
            seed: 1,
            val_every: 50,
            val_batches: 8,
            save_every: 100,
            keep: 3,
            on_spike: warn(),
            spike_norm: None,
            loss_scale: None,
            limits: Limited::default(),
        }
    }

    /// The learning rate; diagnostics where it makes no sense.
    pub fn schedule(&self) -> Result<Schedule, Vec<Diagnostic>> {
        let decay = match self.lr_decay.as_str() {
            "linear" => Decay::Linear,
            "cosine" => Decay::Cosine,
            _ => Decay::Constant,
        };
        if self.min_lr > self.lr {
            let headline = format!(
                "the smallest learning rate {} is above the greatest {}",
                self.min_lr, self.lr
            );
            return Err(vec![usage("--min-lr", headline).help("use a smaller --min-lr")]);
        }
        let schedule = Schedule {
            peak: self.lr,
            warmup_steps: self.warmup,
            decay,
            decay_steps: self.lr_decay_steps,
            ratio_min: if self.lr > 0.0 { self.min_lr / self.lr } else { 0.0 },
        };
        let wrong = schedule.check();
        if wrong.is_empty() { Ok(schedule) } else { Err(wrong) }
    }

    /// As text, which reads back to the bit.
    pub fn to_text(&self) -> String {
        toml::to_string(self).expect("settings are a table of plain values")
    }

    /// Whether both ask the planner the same.
    pub fn asks_as(&self, other: &Settings) -> bool {
        let place = |s: &Settings| (s.cluster.clone(), s.calibration.clone(), s.ranks);
        let work =
            |s: &Settings| (s.model.clone(), s.seq, s.gbs, s.dtype, s.precision.clone(), s.dropout);
        place(self) == place(other)
            && self.lora == other.lora
            && self.document_mask == other.document_mask
            && work(self) == work(other)
            && (self.optimizer(), self.clip()) == (other.optimizer(), other.clip())
            && self.limits == other.limits
    }

    /// The element types.
    pub fn precision(&self) -> Result<Precision, Vec<Diagnostic>> {
        job::training_precision(self.dtype, &self.precision)
    }

    /// The update.
    pub fn optimizer(&self) -> Optimizer {
        Optimizer::AdamW {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decay: self.weight_decay,
            decay_biases: self.bias_weight_decay,
        }
    }

    /// Steps from one checkpoint to the next, where any is written before the end.
    pub fn checkpoint_every(&self) -> Option<u64> {
        (self.save_every > 0).then_some(self.save_every)
    }

    /// The norm to which gradients are scaled down.
    pub fn clip(&self) -> Option<f64> {
        (self.clip > 0.0).then_some(self.clip)
    }
}

/// Reads the MODEL argument of verbs that take the directory of a run too.
pub fn model_argument() -> impl TypedValueParser<Value = PathArg> {
    OsStringValueParser::new().try_map(Run::model_argument)
}

/// The directory of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Where it is.
    pub folder: PathBuf,
}

/// What to do where a run's settings are damaged.
const SETTINGS_HELP: &str = "restore the file as `gantline train` wrote it, or remove it: without \
    it the settings are those of the newest checkpoint";

impl Run {
    /// Whether a path is the directory of a run.
    pub fn is_at(path: &Path) -> bool {
        path.join(SETTINGS).is_file() || path.join(CHECKPOINTS).is_dir()
    }

    /// The MODEL that an argument means: of the directory of a run the model that its settings
    /// name, unless that is no more the one that the run keeps a description of.
    ///
    /// # Errors
    /// Those of [`Run::open`], in words.
    fn model_argument(argument: OsString) -> Result<PathArg, String> {
        let argument = PathArg::from(argument);
        if !Run::is_at(argument.path()) {
            return Ok(argument);
        }
        match Run::open(argument.path()) {
            Ok((run, settings)) => {
                let kept = ["config.json", "model.graph"].map(|name| run.model_folder().join(name));
                let kept = kept.iter().find(|path| path.is_file());
                let own = settings.model.path();
                let same = |kept: &PathBuf| {
                    let own = if own.is_dir() { own.join("config.json") } else { own.to_owned() };
                    ir::file::read(&own).ok() == ir::file::read(kept).ok()
                };
                Ok(if kept.is_none_or(same) { settings.model } else { argument })
            }
            Err(Failure::World(error)) => Err(error.to_string()),
            Err(Failure::Input(wrong)) => {
                Err(wrong.into_iter().map(|one| one.headline).collect::<Vec<_>>().join("; "))
            }
        }
    }

    /// The description of a model: that of a run where one is there.
    ///
    /// # Errors
    /// Those of opening a run, and of [`crate::resolve`].
    pub fn model(source: &PathArg) -> Result<Description, Failure> {
        if Run::is_at(source.path()) {
            let (run, settings) = Run::open(source.path())?;
            return run.description(&settings);
        }
        Ok(crate::resolve(source)?.description)
    }

    /// The directory of a new run, and, where something is to be written, the right to do so.
    ///
    /// # Errors
    /// `E5002` when there is a run with checkpoints already, `E5001` when there is a file; a run
    /// that is being written to.
    pub fn begin(folder: &Path, is_written: bool) -> Result<(Run, Option<RunLock>), Failure> {
        let run = Run { folder: folder.to_owned() };
        let shown = folder.display();
        if folder.exists() && !folder.is_dir() {
            let wrong = usage("--out", format!("`{shown}` is there, and no directory"));
            return Err(wrong.help("choose another --out").into());
        }
        let lock = is_written.then(|| RunLock::take(folder)).transpose()?;
        if !run.store(None).steps()?.is_empty() {
            let headline = format!("`{shown}` already holds a run with checkpoints");
            return Err(Diagnostic::error("E5002", Span::of("--out"), headline)
                .help(format!(
                    "go on with `gantline train --resume {shown}`, or choose another --out"
                ))
                .into());
        }
        Ok((run, lock))
    }

    /// The directory of a run that was begun, and its settings. Where these are missing or empty,
    /// those of the newest intact checkpoint are taken, and a note says so.
    ///
    /// # Errors
    /// `E5003` when it is none, `E5004` when its settings cannot be read.
    pub fn open(folder: &Path) -> Result<(Run, Settings), Failure> {
        let run = Run { folder: folder.to_owned() };
        let path = folder.join(SETTINGS);
        let text = match ir::file::read_text(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let headline = "the settings are no UTF-8 text";
                let wrong =
                    Diagnostic::error("E5004", Span::of(path.display().to_string()), headline);
                return Err(wrong.help(SETTINGS_HELP).into());
            }
            Err(error) => return Err(runtime::Error::io("read", &path)(error).into()),
        };
        let settings = if text.trim().is_empty() {
            run.settings_of_checkpoint()?
        } else {
            read_settings(&path, &text).map_err(|wrong| wrong.help(SETTINGS_HELP))?
        };
        Ok((run, settings))
    }

    /// The settings in the newest checkpoint that is intact.
    fn settings_of_checkpoint(&self) -> Result<Settings, Failure> {
        let shown = self.folder.display();
        let none = || {
            let headline = format!("`{shown}` is no directory of a run");
            Diagnostic::error("E5003", Span::of(shown.to_string()), headline)
                .note(format!("a run has a `{SETTINGS}`, which `gantline train` writes into --out"))
        };
        if self.store(None).steps()?.is_empty() {
            return Err(none().into());
        }
        let (checkpoint, _) = self.store(None).newest_intact()?;
        let text = RunState::read(&checkpoint)?.settings.ok_or_else(|| {
            none().note("its checkpoints are of a version that kept no settings in them")
        })?;
        let step = checkpoint.step();
        output::note(&format!(
            "warning: `{shown}/{SETTINGS}` is missing or empty: the settings are those of the \
             checkpoint of step {step}"
        ));
        Ok(read_settings(checkpoint.folder(), &text)?)
    }

    /// Writes the settings, which a resumption starts from.
    pub fn write_settings(&self, settings: &Settings) -> Result<(), Failure> {
        self.write_file(SETTINGS, settings.to_text().as_bytes())
    }

    /// Writes the model's description and tokeniser, so that the run can be moved.
    pub fn write_model(
        &self,
        settings: &Settings,
        resolved: &Resolved,
        tokenizer: &Tokenizer,
    ) -> Result<(), Failure> {
        let folder = self.model_folder();
        fs::create_dir_all(&folder).map_err(runtime::Error::io("create", &folder))?;
        let model = settings.model.path();
        match (&resolved.description.architecture, &resolved.directory) {
            (Architecture::Graph(module), _) => {
                self.write_file("model/model.graph", module.to_string().as_bytes())?;
            }
            (_, Some(directory)) => {
                let config = directory.join("config.json");
                let from = if model.is_file() { model } else { &config };
                let text = ir::file::read(from).map_err(runtime::Error::io("read", from))?;
                self.write_file("model/config.json", &text)?;
            }
            (_, None) => {}
        }
        if let Some(from) = tokenizer.file() {
            let text = ir::file::read(from).map_err(runtime::Error::io("read", from))?;
            self.write_file("model/tokenizer.json", &text)?;
        }
        Ok(())
    }

    /// Writes a file of the directory, so that a crash leaves the old one or the new one.
    pub fn write_file(&self, name: &str, bytes: &[u8]) -> Result<(), Failure> {
        Ok(runtime::disk::replace(&self.folder.join(name), bytes)?)
    }

    /// The description of the model that was trained, under the name it had.
    pub fn description(&self, settings: &Settings) -> Result<Description, Failure> {
        let stored = ["config.json", "model.graph"].map(|name| self.model_folder().join(name));
        let stored = stored.iter().find(|path| path.is_file());
        let model = stored.map_or(settings.model.path(), PathBuf::as_path);
        let mut description = crate::resolve(model)?.description;
        description.name.clone_from(&settings.name);
        Ok(description)
    }

    /// Where the model's description and tokeniser are.
    pub fn model_folder(&self) -> PathBuf {
        self.folder.join(MODEL)
    }

    /// The checkpoints.
    pub fn store(&self, keep: Option<usize>) -> Store {
        Store::new(&self.folder.join(CHECKPOINTS), keep)
    }

    /// The checkpoint to go on from: that of `step`, else the newest intact one. A note names newer
    /// ones that are damaged, and how many steps that loses.
    ///
    /// # Errors
    /// `E4040` when there is none, `E4041` when none is intact, or that of the step is not.
    pub fn resumable(&self, step: Option<u64>) -> Result<Checkpoint, Failure> {
        let store = self.store(None);
        if let Some(step) = step {
            let checkpoint = store.open(step)?;
            checkpoint.verify().map_err(|failure| store.with_way_out(failure, step))?;
            return Ok(checkpoint);
        }
        let (checkpoint, damages) =
            store.newest_intact().map_err(|failure| self.with_way_out(failure))?;
        for Damage { diagnostics, .. } in &damages {
            for mut wrong in diagnostics.iter().cloned() {
                wrong.severity = Severity::Warning;
                output::note(draw(&wrong).trim_end());
            }
        }
        if let Some(newest) = damages.first() {
            let step = checkpoint.step();
            output::note(&format!(
                "warning: the run goes on from step {step}; the {} steps to {} are lost and done \
                 again",
                newest.step.saturating_sub(step),
                newest.step,
            ));
        }
        Ok(checkpoint)
    }

    /// The newest checkpoint.
    ///
    /// # Errors
    /// `E4040` when there is none yet; those of damaged ones.
    pub fn latest(&self) -> Result<Checkpoint, Failure> {
        self.store(None).latest().map_err(|failure| self.with_way_out(failure))
    }

    /// Says how to begin again where there is no checkpoint.
    fn with_way_out(&self, failure: runtime::Failure) -> Failure {
        let shown = self.folder.display();
        match Failure::from(failure) {
            Failure::Input(mut diagnostics) => {
                for diagnostic in diagnostics.iter_mut().filter(|d| d.code == "E4040") {
                    let help = format!("begin again with `--out {shown}`");
                    diagnostic.help.get_or_insert(help);
                }
                Failure::Input(diagnostics)
            }
            failure @ Failure::World(_) => failure,
        }
    }
}

/// Reads settings as they are in a file.
fn read_settings(path: &Path, text: &str) -> Result<Settings, Diagnostic> {
    toml::from_str(text).map_err(|error| {
        let source = path.display().to_string();
        let span = Span { source, bytes: error.span().unwrap_or(0..0) };
        Diagnostic::error("E5004", span, error.message().to_owned())
    })
}
