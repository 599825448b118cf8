//! `run MODEL --input input_ids=ids.npy`: one batch through a model, results in files.
//!
//! The loss is that of transformers: labels are shifted by one, those of -100 count for nothing,
//! and what is left is averaged. Gradients are of that mean, under the names that the model's
//! checkpoint has for its weights.

use std::path::{Path, PathBuf};
use std::time::Instant;

use ir::import::{Model, Options, resolve};
use ir::{DType, Diagnostic, Span};
use runtime::convert::{Stored, convert};
use runtime::execute::{Batch, Part, Scalars, Session, StepReport};
use runtime::load::{collect_weights, load_weights, write_named};
use runtime::npy;
use runtime::weights::Weights;
use serde_json::json;

use crate::cli::positive;
use crate::failure::{Exit, Failure, usage};
use crate::job::{self, Limited, Question, Where};
use crate::output;

/// Flags of `run`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The model: a directory with weights
    pub model: String,
    /// The tokens: a .npy file of whole numbers, [samples, tokens]
    #[arg(long, value_name = "input_ids=FILE")]
    pub input: String,
    /// The labels: a .npy file of the same shape, not shifted; -100 counts for nothing
    #[arg(long, value_name = "FILE")]
    pub labels: PathBuf,
    /// Also compute the gradients of the loss
    #[arg(long)]
    pub grad: bool,
    /// The directory for loss.npy and grads.safetensors
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Where the model runs
    #[command(flatten)]
    pub place: Where,
    /// What the planner keeps to
    #[command(flatten)]
    pub limited: Limited,
    /// The element type: f32 or f64
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = job::dtype)]
    pub dtype: DType,
    /// Run so many times, and say how long one takes
    #[arg(long, value_name = "N", value_parser = positive)]
    pub bench: Option<usize>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// The label that counts for nothing, as transformers has it.
const IGNORED: i32 = -100;

/// A batch, labels shifted.
struct Feed {
    samples: usize,
    seq: usize,
    tokens: Vec<i32>,
    labels: Vec<i32>,
}

/// Answers.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    job::check_executable(args.dtype)?;
    let resolved = resolve(&args.model)?;
    let feed = read_feed(args)?;
    let options = Options { seq: feed.seq, dtype: args.dtype, dropout: Some(0.0) };
    let model = crate::import(&resolved.description, &options)?;
    check_tokens(&feed, &model, args)?;
    let Some(directory) = &resolved.directory else {
        let headline = format!("the preset `{}` has no weights", args.model);
        return Err(usage("MODEL", headline).help("name a directory with weights").into());
    };
    let weights = Weights::open(directory)?;
    let question = Question {
        cluster: args.place.cluster()?,
        module: crate::prepare(&model)?,
        model: model.name.clone(),
        ranks: args.place.ranks,
        global_batch_size: feed.samples,
        seq: feed.seq,
        dtype: args.dtype,
        optimizer: ir::plan::Optimizer::Sgd { decay: 0.0 },
        clip: None,
        limits: args.limited.limits()?,
    };
    let plan = crate::plan(&question.job())?.plan;
    let classes = crate::compile(&question.module, crate::LOSS, &plan)?;
    let mut session = crate::start(classes, question.cluster.threads(args.place.ranks))?;
    load_weights(&mut session, &model.weights, &weights)?;
    let report = step(&mut session, &feed, args.grad)?;
    let times = (0..args.bench.unwrap_or(0))
        .map(|_| {
            let start = Instant::now();
            step(&mut session, &feed, args.grad)?;
            Ok(start.elapsed().as_secs_f64())
        })
        .collect::<Result<Vec<f64>, Failure>>()?;
    if let Some(folder) = &args.output {
        write(folder, &session, &model, &report, args)?;
    }
    answer(args, &report, times);
    Ok(Exit::Success)
}

/// Runs the batch; nothing is updated, since the rate is zero.
fn step(session: &mut Session, feed: &Feed, grad: bool) -> Result<StepReport, Failure> {
    let batch = Batch { tokens: &feed.tokens, labels: &feed.labels, ..Batch::default() };
    Ok(if grad { session.step(&batch, Scalars::default())? } else { session.evaluate(&batch)? })
}

fn read_feed(args: &Args) -> Result<Feed, Failure> {
    let path = match args.input.split_once('=') {
        Some(("input_ids", path)) => path,
        Some((name, _)) => {
            let headline = format!("the model takes `input_ids`, and no `{name}`");
            return Err(usage("--input", headline).help("write --input input_ids=FILE").into());
        }
        None => &args.input,
    };
    let (tokens, dims) = read_ints(Path::new(path))?;
    let (raw, label_dims) = read_ints(&args.labels)?;
    let shown = args.labels.display();
    let [samples, seq] = dims[..] else {
        let headline = format!("`{path}` has {} dims, and tokens have two", dims.len());
        return Err(wrong_array(path, headline).help("save it as [samples, tokens]").into());
    };
    if label_dims != dims {
        let headline = format!("the labels are {label_dims:?}, and the tokens {dims:?}");
        return Err(wrong_array(&shown.to_string(), headline)
            .help("labels have the shape of the tokens; they are shifted here")
            .into());
    }
    let label = |at: usize| if (at + 1).is_multiple_of(seq) { IGNORED } else { raw[at + 1] };
    let labels = (0..raw.len()).map(label).collect();
    Ok(Feed { samples, seq, tokens, labels })
}

fn wrong_array(path: &str, headline: String) -> Diagnostic {
    Diagnostic::error("E5009", Span::of(path), headline)
}

fn read_ints(path: &Path) -> Result<(Vec<i32>, Vec<usize>), Failure> {
    let array = npy::read(path)?;
    if array.dtype.is_float() {
        let headline = format!("the elements are {}, and token ids are whole numbers", array.dtype);
        let help = "save it as `x.astype('int64')`";
        return Err(wrong_array(&path.display().to_string(), headline).help(help).into());
    }
    if array.bytes.is_empty() {
        let headline = "the array has no elements".to_owned();
        return Err(wrong_array(&path.display().to_string(), headline).into());
    }
    let bytes = convert(Stored::DType(array.dtype), &array.bytes, DType::I32);
    Ok((bytes.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b)).collect(), array.dims))
}

/// Checks that the model has all tokens and labels.
fn check_tokens(feed: &Feed, model: &Model, args: &Args) -> Result<(), Diagnostic> {
    let vocab = i32::try_from(model.vocab).unwrap_or(i32::MAX);
    let beyond = feed.tokens.iter().find(|token| !(0..vocab).contains(token));
    if let Some(token) = beyond {
        let headline = format!("token {token} is not one of the model's {vocab}");
        return Err(wrong_array(&args.input, headline).help("use the model's own tokeniser"));
    }
    if let Some(label) = feed.labels.iter().find(|label| **label >= vocab) {
        let headline = format!("label {label} is not one of the model's {vocab} tokens");
        let path = args.labels.display().to_string();
        return Err(wrong_array(&path, headline).help("use the model's own tokeniser"));
    }
    if feed.labels.iter().all(|label| *label < 0) {
        let path = args.labels.display().to_string();
        return Err(wrong_array(&path, "no label counts".to_owned())
            .note("the first label of a sequence belongs to no token before it"));
    }
    Ok(())
}

fn write(
    folder: &Path,
    session: &Session,
    model: &Model,
    report: &StepReport,
    args: &Args,
) -> Result<(), Failure> {
    std::fs::create_dir_all(folder).map_err(runtime::Error::io("create", folder))?;
    let of_f64 = |values: &[f64]| {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        convert(Stored::DType(DType::F64), &bytes, args.dtype)
    };
    npy::write(&folder.join("loss.npy"), args.dtype, &[], &of_f64(&[report.loss()]))?;
    if args.grad {
        let mut grads = collect_weights(session, &model.weights, Part::Grad);
        for grad in &mut grads {
            let mean: Vec<f64> = grad.values.to_f64().iter().map(|g| g / report.count).collect();
            grad.values.bytes = of_f64(&mean);
        }
        write_named(&folder.join("grads.safetensors"), &grads)?;
    }
    output::note(&format!("wrote {}", folder.display()));
    Ok(())
}

fn answer(args: &Args, report: &StepReport, mut times: Vec<f64>) {
    times.sort_by(f64::total_cmp);
    let median = times.get(times.len() / 2).copied();
    if args.json {
        return output::answer_json(&json!({
            "schema": "gantline.run_once/1",
            "loss": report.loss(),
            "labels": report.count,
            "step_time_s": median,
            "step_time_low_s": times.first(),
            "step_time_high_s": times.last(),
        }));
    }
    let mut text = format!("loss  {} over {} labels", report.loss(), report.count);
    if let (Some(median), Some(low), Some(high)) = (median, times.first(), times.last()) {
        let [median, low, high] = [median, *low, *high].map(output::seconds);
        text += &format!("\ntime  {median} (median of {}, {low} to {high})", times.len());
    }
    output::answer(&text);
}
