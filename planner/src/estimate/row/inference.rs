//! A measured run of inference, as a row of a table, becomes a question to the estimator.
//!
//! The column `mode` says what was measured: the latency of a static batch, the time per output
//! token of a single stream, or the output tokens per second of in-flight batching.

use super::{Columns, RowReader};
use crate::cluster::Cluster;
use crate::estimate::profile::{self, Profile};
use crate::estimate::rates::Arithmetic;
use crate::estimate::serving::storage::Format;
use crate::estimate::serving::{Lengths, Load, PASS_TOKENS, Parts, Replica, Serving, Storage};
use crate::estimate::workload::Workload;
use crate::estimate::{Estimator, Job, chosen};

/// The columns that a table of inference must have.
pub const COLUMNS: [&str; 7] =
    ["row_id", "model", "gpu", "n_gpus", "mode", "input_len", "output_len"];

/// The other columns that are read where a table of inference has them.
pub const OPTIONAL: [&str; 8] = [
    "layers",
    "hidden",
    "heads",
    "weight_dtype",
    "kv_dtype",
    "engine",
    "batch_size",
    "concurrency",
];

/// The columns of measurements: times by mode, and memory.
pub const MEASURED: [&str; 4] = ["latency_ms", "tpot_ms", "out_tok_s", "peak_mem_gib"];

/// Requests of a copy at once, where a run does not say. Source: the default of TensorRT-LLM's
/// `max_batch_size`.
const REQUESTS_MAX: u64 = 2048;
/// Tokens of a prompt, and new ones, of a single stream that does not say. Chosen: a sentence, and
/// a paragraph; both are read far faster than weights are.
const USUAL_LENGTHS: [u32; 2] = [16, 200];

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// A static batch of this many requests.
    Static(u64),
    /// A single stream: one request alone.
    Single,
    /// In-flight batching of at most this many requests of a copy.
    InFlight(u64),
}

/// A row of a table of inference.
#[derive(Clone, Debug)]
pub struct InferenceRun {
    work: Workload,
    cluster: Cluster,
    profile: Profile,
    arithmetic: Arithmetic,
    latent: Option<u32>,
    storage: Storage,
    copy: Replica,
    copies: u32,
    mode: Mode,
    lengths: Lengths,
    /// Seconds, measured: of a batch, of a token, or devices' seconds of a token.
    pub measured_s: Option<f64>,
    /// What the row does not say and was taken as: `column=value`.
    pub defaults: Vec<String>,
}

/// What is predicted of a run of inference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    /// Seconds of what was measured.
    pub seconds: f64,
    /// The interval in which four of five lie.
    pub interval_s: [f64; 2],
    /// Bytes of the fullest device.
    pub bytes: f64,
    /// Whether it fits.
    pub fits: bool,
    /// Where the seconds go.
    pub parts: Parts,
}

impl InferenceRun {
    /// Reads a row, without what was chosen with runs of `table` in view.
    ///
    /// # Errors
    /// Why the row cannot be expressed, in words.
    pub fn read(table: &str, row: &dyn Columns) -> Result<InferenceRun, String> {
        let seen = AsTraining::of(row);
        let mut reader = RowReader { row: &seen, defaults: Vec::new() };
        let mode = reader.mode(row)?;
        let lengths = reader.lengths(row, mode)?;
        let shape = reader.shape()?;
        let latent = shape.low_rank.map(|rank| rank.kv_rank + rank.rope_dim);
        let engine = profile::of_engine(row.text("engine"));
        let mut profile = engine.unwrap_or_else(|| reader.profile());
        chosen::set_aside_of_style(table, &mut profile);
        let work = shape
            .workload()
            .map_err(|all| all.into_iter().map(|d| d.headline).collect::<Vec<_>>().join("; "))?;
        let stored = row.text("weight_dtype").trim().to_lowercase();
        let weights = weight_format(&stored);
        let arithmetic = match weights {
            Some(_) => Arithmetic::Half,
            None => reader.arithmetic()?,
        };
        let cache = cache_format(row.text("kv_dtype"))?;
        let [tp, pp] = [reader.axis("tp")?, reader.axis("pp")?];
        let ranks = reader.ranks()?;
        let cluster = reader.cluster(ranks)?;
        let copies = (ranks / tp.saturating_mul(pp).max(1)).max(1);
        let measured_s = measured(&reader, mode, ranks)?;
        let mut run = InferenceRun {
            work,
            cluster,
            profile,
            arithmetic,
            latent,
            storage: Storage { weights, cache },
            copy: Replica { tp, pp, ep: 1 },
            copies,
            mode,
            lengths,
            measured_s,
            defaults: Vec::new(),
        };
        let stated = reader.count("ep")?.filter(|ep| *ep > 1);
        let estimator = run.estimator(table)?;
        let serving = run.serving(&estimator);
        // Engines slice experts over all ranks where a run does not say that they are whole.
        let sliced = Replica { tp, pp, ep: 1 };
        let usual = if serving.allows(sliced) { sliced } else { serving.alone(tp, pp) };
        let copy = Replica { ep: stated.unwrap_or(usual.ep), ..usual };
        if !serving.allows(copy) {
            return Err(format!("no copy of this model lies over {copy}"));
        }
        run.copy = copy;
        run.defaults = reader.defaults;
        Ok(run)
    }

    fn estimator(&self, table: &str) -> Result<Estimator<'_>, String> {
        let job = Job { global_batch: 1, arithmetic: self.arithmetic };
        Estimator::without_source(table, &self.work, &self.cluster, self.profile, job)
            .map_err(|diagnostic| diagnostic.headline)
    }

    fn serving<'a>(&self, estimator: &'a Estimator<'a>) -> Serving<'a> {
        Serving { storage: self.storage, ..Serving::new(estimator, self.latent) }
    }

    /// Predicts what was measured, without what was chosen with runs of `table` in view.
    ///
    /// # Errors
    /// Why it cannot be answered, in words.
    pub fn answer(&self, table: &str) -> Result<Answer, String> {
        let estimator = self.estimator(table)?;
        let serving = self.serving(&estimator);
        let (copy, lengths) = (self.copy, self.lengths);
        let piece = lengths.own_prompt().min(PASS_TOKENS);
        let most = serving.most_sequences(copy, [lengths.context(), 0], piece);
        let (seconds, sequences) = match self.mode {
            Mode::Static(sequences) => {
                (serving.static_batch(copy, sequences, lengths, u32::MAX).total_s, sequences)
            }
            Mode::Single => (serving.forward(copy, 1, 1, lengths.middle()).turn_s(1), 1),
            Mode::InFlight(requests) => {
                let each = requests.div_ceil(self.copies.into());
                let found = serving.in_flight(copy, most.max(1).min(each), lengths, PASS_TOKENS);
                let found = found.ok_or("`output_len` is 0, and tokens per second are compared")?;
                let ranks = f64::from(copy.tp) * f64::from(copy.pp);
                (ranks / found.tokens_per_s, found.sequences)
            }
        };
        let Load { batch, .. } = Load::of(sequences, copy.pp);
        let parts = serving.parts(copy, batch, 1, lengths.middle());
        let [low, high] = serving.factors(&parts);
        let bytes = serving.bytes(copy, sequences, [lengths.context(), 0], piece);
        Ok(Answer {
            seconds,
            interval_s: [low * seconds, high * seconds],
            bytes,
            fits: bytes <= estimator.memory_bytes,
            parts,
        })
    }
}

/// Seconds that a row measured, by its mode.
fn measured(reader: &RowReader<'_>, mode: Mode, ranks: u32) -> Result<Option<f64>, String> {
    let positive = |column: &str| Ok::<_, String>(reader.number(column)?.filter(|n| *n > 0.0));
    let per_token = positive("out_tok_s")?.map(|rate| 1.0 / rate);
    Ok(match mode {
        Mode::Static(_) => positive("latency_ms")?.map(|ms| ms / 1e3),
        Mode::Single => positive("tpot_ms")?.map(|ms| ms / 1e3).or(per_token),
        Mode::InFlight(_) => per_token.map(|seconds| seconds * f64::from(ranks)),
    })
}

/// The format of weights that are narrower than what products compute in.
fn weight_format(text: &str) -> Option<Format> {
    let has = |part: &str| text.contains(part);
    let name = if has("nf4-dq") {
        "nf4-dq"
    } else if has("nf4") {
        "nf4"
    } else if has("int4") && has("g32") {
        "int4-g32"
    } else if has("int4") || has("awq") || has("gptq") {
        "int4"
    } else if has("int8") {
        "int8"
    } else {
        return None;
    };
    Format::of_weights(name)
}

/// The format of cached keys and values; two bytes where the text is blank.
fn cache_format(text: &str) -> Result<Format, String> {
    let lower = text.trim().to_lowercase();
    let name = match lower.as_str() {
        "" | "fp16" | "float16" | "half" => "f16",
        "bfloat16" => "bf16",
        "fp8" | "float8" | "fp8_e4m3" | "fp8_e5m2" => "f8",
        other => other,
    };
    Format::of_cache(name).ok_or_else(|| format!("`kv_dtype` is `{text}`, which is no format"))
}

/// A row of inference under the names that rows of training have.
struct AsTraining<'r> {
    row: &'r dyn Columns,
    seq: String,
}

impl<'r> AsTraining<'r> {
    fn of(row: &'r dyn Columns) -> AsTraining<'r> {
        let count = |column: &str| row.text(column).trim().parse::<u64>().unwrap_or(0);
        let tokens = count("input_len") + count("output_len");
        AsTraining { row, seq: if tokens > 0 { tokens.to_string() } else { "2048".to_owned() } }
    }
}

impl Columns for AsTraining<'_> {
    fn text(&self, column: &str) -> &str {
        match column {
            "seq_len" => &self.seq,
            "framework" => self.row.text("engine"),
            "precision" => self.row.text("weight_dtype"),
            other => self.row.text(other),
        }
    }
}

impl RowReader<'_> {
    fn mode(&mut self, row: &dyn Columns) -> Result<Mode, String> {
        let text = row.text("mode").trim().to_lowercase();
        let has = |part: &str| text.contains(part);
        if has("flight") || has("continuous") {
            let requests = self.count("concurrency")?.or(self.count("batch_size")?);
            let requests = requests.map_or(REQUESTS_MAX, u64::from);
            Ok(Mode::InFlight(requests.max(1)))
        } else if has("single") {
            Ok(Mode::Single)
        } else if has("static") {
            Ok(Mode::Static(self.count_or("batch_size", 1)?.max(1).into()))
        } else {
            Err(format!("`mode` is `{text}`, not a static batch, a single stream or in flight"))
        }
    }

    fn lengths(&mut self, row: &dyn Columns, mode: Mode) -> Result<Lengths, String> {
        let mut length = |column: &str, usual: u32| {
            let is_number = row.text(column).trim().parse::<f64>().is_ok();
            match (is_number, mode) {
                (true, _) => self.needed(column),
                (false, Mode::Single) => {
                    self.defaults.push(format!("{column}={usual}"));
                    Ok(usual)
                }
                (false, Mode::Static(_) | Mode::InFlight(_)) => self.needed(column),
            }
        };
        let [prompt, output] = USUAL_LENGTHS;
        Ok(Lengths {
            prompt: length("input_len", prompt)?,
            output: length("output_len", output)?,
            shared: 0,
        })
    }
}
