//! What was run.

use std::collections::BTreeMap;

use planner::validate::Summary;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

/// One batch through a model.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RunBatch {
    /// Mean loss of a label in nats.
    pub loss: Option<f64>,
    /// Labels that count.
    pub labels: Option<f64>,
    /// Dims of the logits.
    pub logits: Option<Vec<u64>>,
    /// Median of the repetitions.
    pub step_time_s: Option<f64>,
    /// The fastest of them.
    pub step_time_low_s: Option<f64>,
    /// The slowest of them.
    pub step_time_high_s: Option<f64>,
    /// What the plan predicted.
    pub predicted_step_time_s: Option<f64>,
    /// Tokens of all ranks per second.
    pub tokens_per_s: Option<f64>,
}

/// What an ONNX model yields.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RunOnnx {
    /// Outputs: name, dims, dtype, and the file that each is written to.
    pub outputs: Vec<Value>,
    /// Seconds of the repetitions, ascending.
    pub seconds: Vec<f64>,
}

/// How a training ended.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Train {
    /// Steps done, over all resumptions.
    pub steps: u64,
    /// Whether all are done.
    pub complete: bool,
    /// Mean loss of a token in the first step, in nats.
    pub loss_first: Option<f64>,
    /// Mean loss of a token in the last step, in nats.
    pub loss: Option<f64>,
    /// Mean loss of a token over the validation data, in nats.
    pub validation_loss: Option<f64>,
    /// The median step.
    pub step_time_s: Option<f64>,
    /// What the plan predicted.
    pub predicted_step_time_s: Option<f64>,
    /// Tokens of all ranks per second.
    pub tokens_per_s: Option<f64>,
    /// Share of the time that went into steps.
    pub goodput: f64,
    /// The directory of the last one.
    pub checkpoint: Option<String>,
}

/// The checkpoints of a run.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Checkpoints {
    /// The directory of the run.
    pub run: String,
    /// Step, latest, bytes, saved_s, intact where it was verified, damage: texts.
    pub checkpoints: Vec<Value>,
}

/// A text that was continued.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Generate {
    /// Prompt and continuation.
    pub text: String,
    /// The new tokens.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Seconds to the first new token.
    pub prefill_s: f64,
    /// Tokens per second after it.
    pub decode_tokens_per_s: f64,
    /// `length` at the limit or the end of the context, `stop` at a token that ends texts.
    pub finish_reason: String,
    /// Of a beam search the continuations with the best scores, the best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub beams: Vec<BeamRow>,
}

/// A continuation that a beam search found.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct BeamRow {
    /// Prompt and continuation.
    pub text: String,
    /// The new tokens.
    pub tokens: Vec<u32>,
    /// The natural logarithm of the probability of these, and of the token that ends the text.
    pub log_probability: f64,
    /// `log_probability` over the number of tokens to the power of the length penalty.
    pub score: f64,
    /// `length` or `stop`.
    pub finish_reason: String,
}

/// Prompts that were continued with in-flight batching.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Continued {
    /// The continuations, in the order of the file.
    pub texts: Vec<ContinuedRow>,
    /// Replicas of the model.
    pub replicas: u64,
    /// Slots of a replica: its concurrent sequences.
    pub slots: u64,
    /// Output tokens of all prompts.
    pub new_tokens: u64,
    /// Seconds of the run.
    pub seconds: f64,
    /// Output tokens per second.
    pub tokens_per_s: f64,
    /// Median time to first token, in seconds from the start of the run.
    pub median_first_s: f64,
}

/// A prompt with its continuation.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ContinuedRow {
    /// Prompt and continuation.
    pub text: String,
    /// The new tokens.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Seconds from the start of the run to the first output token.
    pub first_s: f64,
    /// Seconds from the start of the run to the last output token.
    pub last_s: f64,
    /// `length` at the limit or the end of the context, `stop` at a token that ends texts.
    pub finish_reason: String,
}

/// Predictions beside measured runs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Validate {
    /// Rows that were predicted.
    pub predicted: u64,
    /// Errors over all rows.
    pub all: Summary,
    /// Errors by source.
    pub sources: BTreeMap<String, Summary>,
    /// Rows, each with what was predicted.
    pub rows: Vec<Value>,
    /// Rows that cannot be predicted, and why.
    pub unexpressed: Vec<Value>,
    /// With `--blind`: the constants that a source was seen for, and what stands instead.
    pub without: Vec<Value>,
    /// Columns that were not read, each with the nearest name that would be.
    pub unread_columns: Vec<Value>,
}
