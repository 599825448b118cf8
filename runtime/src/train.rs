//! Training: batch after batch, with what is reported and kept on the way.
//!
//! ```text
//! OUT/metrics.jsonl       one line for each step
//! OUT/events.out.…        the same for TensorBoard
//! OUT/loss.svg            a picture of the loss, drawn at the end
//! OUT/checkpoints/        see `checkpoint`
//! ```
//!
//! A step is a pure function of weights, optimizer states and its number. So a run that is resumed
//! under the same plan repeats, bit for bit, what it would have done without the interruption;
//! under another plan, sums are added in another order.

mod slow;
mod spike;
mod guard;
mod scaling;
mod state;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use ir::plan::Optimizer;
use ir::{Diagnostic, Span};
use serde_json::Value;

pub use guard::Skipped;
pub use scaling::LossScale;
pub use slow::{Paces, SlowRank};
pub use spike::{Losses, OnSpike};
pub use state::{Identity, RunState, checkpoint_bytes, restore, restore_weights, save};

use crate::checkpoint::{Checkpoint, Store};
use crate::data::{self, Batches, Prefetch};
use crate::error::{Error, Failure};
use crate::execute::{Batch, Phase, RankTime, Samples, Session, StepReport};
use crate::metrics::{Events, Lines, Plot, series};
use crate::rate::Schedule;
use guard::{Guard, Verdict};

/// The file of metrics in the directory of a run.
pub const METRICS: &str = "metrics.jsonl";
/// The picture of the loss in the directory of a run.
pub const PLOT: &str = "loss.svg";
/// The directory of checkpoints in the directory of a run.
pub const CHECKPOINTS: &str = "checkpoints";

/// How to train.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Steps of the whole run, those before a resumption included.
    pub steps: u64,
    /// Decides the order of the data, the first weights, and what is dropped out.
    pub seed: u32,
    /// The learning rate.
    pub schedule: Schedule,
    /// The norm to which gradients are scaled down.
    pub clip: Option<f64>,
    /// The update, for the scalars that it takes.
    pub optimizer: Optimizer,
    /// Validates after so many steps each, and at the end; never if none.
    pub validate_every: Option<u64>,
    /// Batches of one validation, at most.
    pub validation_batches: usize,
    /// Writes a checkpoint after so many steps each; at the end in any case.
    pub checkpoint_every: Option<u64>,
    /// Checkpoints that are kept, the newest ones; all if none.
    pub keep: Option<usize>,
    /// The directory of the run.
    pub out: PathBuf,
    /// What the plan says that a step takes.
    pub predicted_step_s: Option<f64>,
    /// The settings of the run as text: kept in each checkpoint, and not looked at here.
    pub settings: String,
    /// What is done about a loss that leaps.
    pub on_spike: OnSpike,
    /// The norm of the gradient above which that is done, too.
    pub spike_norm: Option<f64>,
    /// The loss scale to begin with, where losses are scaled.
    pub loss_scale: Option<LossScale>,
}

/// What is known after a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Steps done.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// The mean loss of a token in this step.
    pub loss: f64,
    /// The norm of the gradient before it was clipped.
    pub grad_norm: f64,
    /// The learning rate.
    pub rate: f64,
    /// Tokens of the global batch per second of the step.
    pub tokens_per_s: f64,
    /// Time of the step.
    pub step_s: f64,
    /// The same as the plan predicted it.
    pub predicted_step_s: Option<f64>,
    /// The mean loss of a token over the validation batches, if this step was followed by one.
    pub validation: Option<f64>,
    /// How many standard deviations the loss lies above the last ones, if it leaps.
    pub spike: Option<f64>,
    /// What the loss was multiplied by, where it was.
    pub loss_scale: Option<f64>,
    /// Why the step was not done, if it was not.
    pub skipped: Option<Skipped>,
    /// A rank that has held up the others for some steps.
    pub slow: Option<SlowRank>,
    /// How each rank spent the step.
    pub ranks: Vec<RankTime>,
}

/// How a run ended; both have written a checkpoint, if there is a step to keep.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// All steps are done.
    Finished(Summary),
    /// The run was asked to stop.
    Interrupted(Summary),
}

/// What a run leaves behind.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// What was known after the last step; none if there was nothing left to do.
    pub last: Option<Progress>,
    /// Steps done, over all resumptions.
    pub steps: u64,
    /// The last checkpoint; none if none was written now.
    pub checkpoint: Option<PathBuf>,
    /// The share of the time of the process that went into steps that are kept.
    pub goodput: f64,
}

/// What a run needs besides a session.
pub struct Run<'a> {
    /// When the process began.
    pub since: Instant,
    /// How to train.
    pub config: &'a Config,
    /// The data.
    pub batches: &'a Batches,
    /// What is trained with what, for checkpoints.
    pub identity: &'a Identity,
    /// Whether the run is asked to stop.
    pub stop: &'a dyn Fn() -> bool,
    /// Is told of every step.
    pub progress: &'a mut dyn FnMut(&Progress),
}

/// Trains from the weights that are in the session, or goes on from a checkpoint.
///
/// A run that is asked to stop ends after its step; one whose step is abandoned, with the step
/// before. Either has a checkpoint then.
///
/// **Errors.** E4051 if the checkpoint is of another run; E4052 if the loss is not finite any more,
/// after which the last checkpoint is untouched; E4053 if it leaps and
/// [`Config::on_spike`] says to stop; E4054 if weights are not finite any more; those of
/// checkpoints; a rank, the disk.
pub fn train(
    session: &mut Session,
    run: &mut Run<'_>,
    resumed: Option<&Checkpoint>,
) -> Result<Outcome, Failure> {
    let samples = session.classes().samples(Phase::Step);
    let samples = samples.expect("a training program is fed with tokens");
    let state = RunState::new(run.config, run.identity, samples);
    let mut guard = Guard::new(run.config);
    if let Some(checkpoint) = resumed {
        state.check(checkpoint)?;
        restore(session, checkpoint)?;
        guard.resume(&RunState::read(checkpoint)?);
    }
    let done = resumed.map(Checkpoint::step);
    let mut journal = Journal::open(&run.config.out, done)?;
    let mut keeper = Keeper {
        store: Store::new(&run.config.out.join(CHECKPOINTS), run.config.keep),
        state,
        step: done.unwrap_or(0),
        last: None,
        seconds: None,
    };
    let steps = done.unwrap_or(0)..run.config.steps;
    let coming = checkpoints(run.config.checkpoint_every, steps.clone());
    keeper.store.check_room(checkpoint_bytes(session), coming)?;
    let mut data = Prefetch::start(run.batches, steps.clone())?;
    let mut paces = Paces::default();
    let mut recovery_s = done.map(|_| run.since.elapsed().as_secs_f64());
    let (mut done, mut last, mut kept_s) = (steps.start, None, 0.0);
    let mut is_stopped = (run.stop)();
    while done < run.config.steps && !is_stopped {
        let step = done + 1;
        let mut progress = match advance(session, run, &mut data, samples, (step, &mut guard)) {
            Err(Failure::World(Error::Abandoned)) => {
                is_stopped = true;
                break;
            }
            advanced => advanced?,
        };
        check_spike(run.config, &progress)?;
        keeper.state.keep(guard.loss_scale, guard.skipped);
        (done, kept_s) = (step, kept_s + progress.step_s);
        let costs = Costs { recovery_s: recovery_s.take(), checkpoint_s: keeper.seconds.take() };
        match journal.append(&progress, costs) {
            // What asks to stop here is SIGXFSZ: a file may grow no more.
            Err(error) if error.is_file_too_large() => is_stopped = true,
            appended => appended?,
        }
        progress.slow = paces.add(&progress.ranks);
        (run.progress)(&progress);
        last = Some(progress);
        is_stopped |= (run.stop)();
        if is_due(run.config.checkpoint_every, step, run.config.steps) {
            keeper.keep(session, step)?;
        }
    }
    if is_stopped {
        keeper.keep(session, done)?;
    }
    let is_finished = done >= run.config.steps;
    match plot(&run.config.out) {
        // A run that is asked to stop has what it needs to go on.
        Err(_) if !is_finished => {}
        drawn => drawn?,
    }
    let goodput = kept_s / run.since.elapsed().as_secs_f64();
    let summary = Summary { last, steps: done, checkpoint: keeper.last, goodput };
    Ok(if is_finished { Outcome::Finished(summary) } else { Outcome::Interrupted(summary) })
}

/// Writes the checkpoints of a run.
struct Keeper {
    store: Store,
    state: RunState,
    /// The step whose checkpoint is the newest; 0 for none.
    step: u64,
    /// The newest that was written now.
    last: Option<PathBuf>,
    /// How long it took, until that is in the journal.
    seconds: Option<f64>,
}

impl Keeper {
    /// Writes the checkpoint of a step, unless it is there; there is none of step 0.
    fn keep(&mut self, session: &Session, step: u64) -> Result<(), Failure> {
        if step == self.step {
            return Ok(());
        }
        let start = Instant::now();
        self.last = Some(save(session, &self.store, step, &self.state)?);
        self.seconds = Some(start.elapsed().as_secs_f64());
        self.step = step;
        Ok(())
    }
}

/// Whether something that is done after so many steps each, and at the end, is done now.
fn is_due(every: Option<u64>, step: u64, last: u64) -> bool {
    step == last || every.is_some_and(|every| step.is_multiple_of(every.max(1)))
}

/// Checkpoints that are written in some steps: after so many each, and at the end.
pub fn checkpoints(every: Option<u64>, steps: Range<u64>) -> u64 {
    let regular = |every: u64| steps.end / every.max(1) - steps.start.min(steps.end) / every.max(1);
    let last = every.is_none_or(|every| !steps.end.is_multiple_of(every.max(1)));
    every.map_or(0, regular) + u64::from(last && !steps.is_empty())
}

/// One step, counted from 1, and the validation after it.
fn advance(
    session: &mut Session,
    run: &Run<'_>,
    data: &mut Prefetch,
    samples: Samples,
    (step, guard): (u64, &mut Guard),
) -> Result<Progress, Failure> {
    let config = run.config;
    let scalars = guard.scalars(config, step);
    let batch = fed(data.next_batch());
    let report = session.step(&batch, scalars)?;
    let spike = guard.losses.above(report.loss());
    let skipped = match guard.judge(config, &report) {
        Verdict::Done => None,
        Verdict::Skipped(why) => Some(why),
        Verdict::Failed(times) => {
            let wrong = not_finite(&report, step, times);
            return Err(match session.examine(&batch, scalars)? {
                Some(found) => wrong.note(found.to_string()).into(),
                None => wrong.into(),
            });
        }
    };
    let is_validated =
        config.validate_every.is_some() && is_due(config.validate_every, step, config.steps);
    let validation = match is_validated.then(|| validate(session, run, samples)) {
        None | Some(Err(Failure::World(Error::Abandoned))) => None,
        Some(validated) => validated?,
    };
    Ok(Progress {
        step,
        steps: config.steps,
        loss: report.loss(),
        grad_norm: report.grad_norm,
        rate: scalars.rate,
        tokens_per_s: (samples.global() * samples.seq) as f64 / report.seconds,
        step_s: report.seconds,
        predicted_step_s: config.predicted_step_s,
        validation,
        spike,
        loss_scale: config.loss_scale.map(|_| scalars.loss_scale),
        skipped,
        slow: None,
        ranks: report.ranks,
    })
}

/// What a step is fed of the data.
fn fed(batch: &data::Batch) -> Batch<'_> {
    let data::Batch { inputs, labels, documents, .. } = batch;
    Batch { tokens: inputs, labels, documents, ..Batch::default() }
}

/// What is wrong with a step whose loss or gradient is not finite, after so many that were skipped.
fn not_finite(report: &StepReport, step: u64, skipped: u64) -> Diagnostic {
    let (loss, norm) = (report.loss(), report.grad_norm);
    let headline = format!("step {step} has a loss of {loss} and a gradient of norm {norm}");
    let (code, help) = match skipped {
        0 => ("E4052", "use a smaller learning rate, more steps of warm-up, or clip gradients"),
        _ => ("E4055", "go on from the last checkpoint with a smaller learning rate or other data"),
    };
    let mut wrong = Diagnostic::error(code, Span::default(), headline);
    if skipped > 0 {
        wrong = wrong.note(format!("{skipped} steps in a row were skipped for that before"));
    }
    wrong.note("the last checkpoint is from before this step").help(help)
}

fn check_spike(config: &Config, progress: &Progress) -> Result<(), Diagnostic> {
    let Progress { step, loss, grad_norm, .. } = progress;
    let norm = config.spike_norm.filter(|norm| grad_norm > norm);
    let headline = match (progress.spike, norm) {
        _ if config.on_spike != OnSpike::Stop => return Ok(()),
        (Some(above), _) => format!(
            "the loss of step {step} is {loss:.4}, {above:.1} standard deviations above the last \
             ones"
        ),
        (None, Some(norm)) => {
            format!("the gradient of step {step} has a norm of {grad_norm:.4}, more than {norm}")
        }
        (None, None) => return Ok(()),
    };
    Err(Diagnostic::error("E4053", Span::default(), headline)
        .note("the last checkpoint is from before this step")
        .help("go on with a smaller learning rate, or with `--on-spike warn`"))
}

/// The mean loss of a token over the validation batches; none if there are none.
fn validate(
    session: &mut Session,
    run: &Run<'_>,
    samples: Samples,
) -> Result<Option<f64>, Failure> {
    let Some(evaluated) = session.classes().samples(Phase::Evaluate) else { return Ok(None) };
    assert_eq!(evaluated.global(), samples.global(), "both phases have one global batch");
    let (mut sum, mut count) = (0.0, 0.0);
    for index in 0..run.config.validation_batches.min(run.batches.validation_batches()) {
        let batch = run.batches.validation(index, 0..samples.global());
        let report = session.evaluate(&fed(&batch))?;
        sum += report.loss_sum;
        count += report.count;
    }
    Ok((count > 0.0).then_some(sum / count))
}

/// What was waited for before a step.
struct Costs {
    /// From the start of the process to the first step of a resumption.
    recovery_s: Option<f64>,
    /// The checkpoint that was written before.
    checkpoint_s: Option<f64>,
}

/// The metrics of a run, in both their forms.
struct Journal {
    lines: Lines,
    events: Events,
}

impl Journal {
    fn open(out: &Path, done: Option<u64>) -> Result<Journal, Error> {
        std::fs::create_dir_all(out).map_err(Error::io("create", out))?;
        let path = out.join(METRICS);
        let lines = match done {
            Some(step) => Lines::resume(&path, step)?,
            None => Lines::create(&path)?,
        };
        Ok(Journal { lines, events: Events::create(out, now_s(), done)? })
    }

    fn append(&mut self, progress: &Progress, costs: Costs) -> Result<(), Error> {
        let Progress { step, loss, grad_norm, rate, tokens_per_s, step_s, .. } = *progress;
        let mut values = vec![
            ("loss", loss),
            ("grad_norm", grad_norm),
            ("lr", rate),
            ("step_time_s", step_s),
            ("tokens_per_s", tokens_per_s),
        ];
        values.extend(progress.predicted_step_s.map(|s| ("predicted_step_time_s", s)));
        values.extend(progress.validation.map(|loss| ("validation_loss", loss)));
        values.extend(progress.spike.map(|above| ("spike", above)));
        values.extend(progress.loss_scale.map(|scale| ("loss_scale", scale)));
        values.extend(costs.recovery_s.map(|s| ("recovery_s", s)));
        values.extend(costs.checkpoint_s.map(|s| ("checkpoint_s", s)));
        let tag = |name| match name {
            "loss" => "loss/train",
            "validation_loss" => "loss/validation",
            other => other,
        };
        let events: Vec<(&str, f32)> =
            values.iter().map(|&(name, value)| (tag(name), value as f32)).collect();
        let mut values: Vec<(&str, Value)> =
            values.into_iter().map(|(name, value)| (name, value.into())).collect();
        values.extend(progress.skipped.map(|why| ("skipped", why.name().into())));
        self.lines.append(step, &values)?;
        self.events.append(step, now_s(), &events)
    }
}

/// Seconds since 1970.
fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Draws the losses of a run so far.
fn plot(out: &Path) -> Result<(), Error> {
    let metrics = out.join(METRICS);
    let (training, validation) = (series(&metrics, "loss")?, series(&metrics, "validation_loss")?);
    Plot { title: "loss".to_owned(), training, validation }.write(&out.join(PLOT))
}
