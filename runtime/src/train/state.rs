//! The state of a run: what is in its checkpoints besides the values of tensors, and those.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use ir::{DType, Diagnostic, Span};
use serde::{Deserialize, Serialize};

use crate::checkpoint::{Checkpoint, Slice, Store};
use crate::convert::{Stored, convert};
use crate::error::Failure;
use crate::execute::{Part, Samples, Session, Shard};
use crate::rate::{Decay, Schedule};

use super::Config;
use super::scaling::LossScale;

/// What is trained with what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The configuration of the model, as text.
    pub model: String,
    /// The plan, as text.
    pub plan: String,
    /// What tells tokenisers apart: [`Tokenizer::identity`](crate::tokens::Tokenizer::identity).
    pub tokenizer: String,
    /// The hash of the data: [`Corpus::hash`](crate::data::Corpus::hash).
    pub data: String,
}

/// The state of a run as a checkpoint has it.
///
/// Numbers with a fraction are texts, since JSON may change their last bit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunState {
    /// What is trained with what.
    #[serde(flatten)]
    pub identity: Identity,
    /// The seed.
    pub seed: u32,
    /// Samples of a step.
    pub global_batch_size: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// The steps that were planned.
    pub steps: u64,
    /// The norm to which gradients are scaled down.
    pub clip: Option<String>,
    /// The settings of the run, as text; checkpoints of earlier versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
    schedule: ScheduleText,
    /// The loss scale of the next step: a power of two, as text, and the steps since it changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    loss_scale: Option<(String, u32)>,
    /// Steps that were skipped.
    #[serde(default)]
    pub skipped: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ScheduleText {
    peak: String,
    warmup_steps: u64,
    decay: String,
    decay_steps: Option<u64>,
    ratio_min: String,
}

impl RunState {
    /// The state of a run.
    pub fn new(config: &Config, identity: &Identity, samples: Samples) -> RunState {
        let Schedule { peak, warmup_steps, decay, decay_steps, ratio_min } = config.schedule;
        let decay = match decay {
            Decay::Constant => "constant",
            Decay::Linear => "linear",
            Decay::Cosine => "cosine",
        };
        RunState {
            identity: identity.clone(),
            seed: config.seed,
            global_batch_size: samples.global(),
            seq: samples.seq,
            steps: config.steps,
            clip: config.clip.map(|clip| clip.to_string()),
            settings: Some(config.settings.clone()),
            schedule: ScheduleText {
                peak: peak.to_string(),
                warmup_steps,
                decay: decay.to_owned(),
                decay_steps,
                ratio_min: ratio_min.to_string(),
            },
            loss_scale: None,
            skipped: 0,
        }
    }

    /// The loss scale of the next step, where there is one.
    pub fn loss_scale(&self) -> Option<LossScale> {
        let (scale, steps) = self.loss_scale.as_ref()?;
        let scale = scale.parse().ok().filter(|scale: &f64| scale.is_finite() && *scale > 0.0)?;
        Some(LossScale { scale, steps: *steps })
    }

    /// Keeps what the next step needs to know.
    pub fn keep(&mut self, loss_scale: Option<LossScale>, skipped: u64) {
        self.loss_scale = loss_scale.map(|LossScale { scale, steps }| (scale.to_string(), steps));
        self.skipped = skipped;
    }

    /// The state in a checkpoint.
    ///
    /// **Errors.** E4041 if it is not the state of a run.
    pub fn read(checkpoint: &Checkpoint) -> Result<RunState, Diagnostic> {
        let damaged = |what: String| Diagnostic::error("E4041", at(checkpoint), what);
        let state: RunState = serde_json::from_value(checkpoint.state().clone())
            .map_err(|error| damaged(format!("the checkpoint has no state of a run: {error}")))?;
        match state.schedule() {
            Some(_) => Ok(state),
            None => Err(damaged("the checkpoint has no learning-rate schedule".to_owned())),
        }
    }

    /// The learning rate, exactly.
    pub fn schedule(&self) -> Option<Schedule> {
        let text = &self.schedule;
        let decay = match text.decay.as_str() {
            "constant" => Decay::Constant,
            "linear" => Decay::Linear,
            "cosine" => Decay::Cosine,
            _ => return None,
        };
        Some(Schedule {
            peak: text.peak.parse().ok()?,
            warmup_steps: text.warmup_steps,
            decay,
            decay_steps: text.decay_steps,
            ratio_min: text.ratio_min.parse().ok()?,
        })
    }

    /// Checks that a checkpoint is of this run; plan, schedule and length may be others.
    ///
    /// **Errors.** E4041; E4051, one for each difference.
    pub fn check(&self, checkpoint: &Checkpoint) -> Result<(), Failure> {
        let theirs = RunState::read(checkpoint)?;
        let mut found = Vec::new();
        let mut compare = |what: &str, ours: String, theirs: String, help: &str| {
            if ours != theirs {
                let headline = format!("the checkpoint was made with {what} {theirs}, not {ours}");
                found.push(Diagnostic::error("E4051", at(checkpoint), headline).help(help));
            }
        };
        compare("seed", self.seed.to_string(), theirs.seed.to_string(), "give the same --seed");
        let shape = |s: &RunState| format!("{} samples of {} tokens", s.global_batch_size, s.seq);
        compare("steps of", shape(self), shape(&theirs), "give the same --gbs and --seq");
        let short = |hash: &str| hash.chars().take(12).collect::<String>();
        let [ours, other] = [&self.identity, &theirs.identity];
        let help = "give the data that the run was begun with, in the same files";
        compare("data", short(&ours.data), short(&other.data), help);
        let help = "give the tokeniser that the run was begun with";
        compare("tokeniser", short(&ours.tokenizer), short(&other.tokenizer), help);
        if ours.model != other.model {
            let headline = "the checkpoint is of another model";
            let help = "give the model that the run was begun with, or begin a new run";
            found.push(Diagnostic::error("E4051", at(checkpoint), headline).help(help));
        }
        if found.is_empty() { Ok(()) } else { Err(found.into()) }
    }
}

fn at(checkpoint: &Checkpoint) -> Span {
    Span::of(checkpoint.folder().display().to_string())
}

/// The name of a tensor in a checkpoint; gradients are not kept, nor what is rounded from weights.
fn key(name: &str, part: Part) -> Option<String> {
    match part {
        Part::Weight => Some(name.to_owned()),
        Part::State(index) => Some(format!("{name}/state{index}")),
        Part::Scale(index) => Some(format!("{name}/state{index}.scale")),
        Part::Grad | Part::Rounded => None,
    }
}

/// The bytes of the tensors of a checkpoint.
pub fn checkpoint_bytes(session: &Session) -> u64 {
    let shards = session.shards();
    let kept =
        shards.iter().filter(|shard| shard.is_first && key(&shard.name, shard.part).is_some());
    kept.map(|shard| shard.bytes() as u64).sum()
}

/// Writes a checkpoint: each slice of weights and states once, by the first rank that holds it.
///
/// Returns its directory.
///
/// **Errors.** E4054 if a weight or state is not finite: such a checkpoint is of no use. The disk.
pub fn save(
    session: &Session,
    store: &Store,
    step: u64,
    state: &RunState,
) -> Result<PathBuf, Failure> {
    if let Some(found) = session.weight_not_finite()? {
        let headline = format!("weights or optimizer are not finite after step {step}");
        return Err(Diagnostic::error("E4054", Span::default(), headline)
            .note(found.to_string())
            .note("the last checkpoint is from before this step")
            .help("use a smaller learning rate, more steps of warm-up, or clip gradients")
            .into());
    }
    store.check_room(checkpoint_bytes(session), 1).map_err(|cause| store.failed(step, cause))?;
    let draft = store.begin(step)?;
    let shards: Vec<(&Shard, String)> = session
        .shards()
        .iter()
        .filter(|shard| shard.is_first)
        .filter_map(|shard| key(&shard.name, shard.part).map(|key| (shard, key)))
        .collect();
    let mut files = Vec::new();
    for of_rank in shards.chunk_by(|a, b| a.0.rank == b.0.rank) {
        let rank = of_rank[0].0.rank;
        let entry = session.lend(rank, |memory| {
            let bytes = |(shard, _): &(&Shard, String)| memory.bytes(shard.buffer, shard.range());
            let bytes: Vec<Cow<'_, [u8]>> = of_rank.iter().map(bytes).collect::<Result<_, _>>()?;
            let slices: Vec<Slice<'_>> = of_rank
                .iter()
                .zip(&bytes)
                .map(|((shard, key), bytes)| Slice {
                    name: key,
                    dtype: shard.dtype,
                    dims: &shard.dims,
                    block: &shard.block,
                    bytes,
                })
                .collect();
            draft.write(&format!("rank-{rank}"), &slices)
        })?;
        files.push(entry);
    }
    let state = serde_json::to_value(state).expect("its map keys are strings");
    Ok(draft.commit(files, state)?)
}

/// Reads weights and states of the optimizer into a session, however both are cut.
///
/// **Errors.** E4041 if the checkpoint is damaged, E4043 if it lacks a tensor or has another.
pub fn restore(session: &mut Session, checkpoint: &Checkpoint) -> Result<(), Failure> {
    let mut tensors: Vec<(String, Part)> =
        session.shards().iter().map(|shard| (shard.name.clone(), shard.part)).collect();
    tensors.sort_unstable();
    tensors.dedup();
    for (name, part) in tensors {
        let Some(key) = key(&name, part) else { continue };
        let mut read = |block: &[Range<usize>], dtype: DType| checkpoint.read(&key, block, dtype);
        session.write_weight(&name, part, &mut read)?;
    }
    Ok(())
}

/// Reads the weights of a checkpoint into a session that only runs forward, rounded to the types
/// that it has.
///
/// **Errors.** As [`restore`], but for floating-point numbers of another type.
pub fn restore_weights(session: &mut Session, checkpoint: &Checkpoint) -> Result<(), Failure> {
    let stored: BTreeMap<String, DType> =
        checkpoint.tensors().map(|(name, _, dtype)| (name.to_owned(), dtype)).collect();
    for (name, _) in session.weights() {
        let stored = stored.get(&name).copied().filter(|dtype| dtype.is_float());
        let mut read = |block: &[Range<usize>], dtype: DType| {
            let from = stored.filter(|_| dtype.is_float()).unwrap_or(dtype);
            let bytes = checkpoint.read(&name, block, from)?;
            Ok::<_, Failure>(convert(Stored::DType(from), &bytes, dtype))
        };
        session.write_weight(&name, Part::Weight, &mut read)?;
    }
    Ok(())
}
