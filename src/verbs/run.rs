//! `run MODEL --input input_ids=ids.npy`: one batch through a model, results in files.
//!
//! Logits come from a program that only runs forward, loss and gradients from that of training.
//!
//! The loss is that of transformers: labels are shifted by one, those of -100 count for nothing,
//! and what is left is averaged. Any other id that the model does not have is refused. Gradients
//! are of that mean, under the names that the model's checkpoint has for its weights.
//!
//! A compiled file runs as it was compiled: see `compiled.rs`.

mod compiled;

use std::path::{Path, PathBuf};

use codegen::compile::Compiled;
use codegen::inference::compile_inference;
use codegen::prepare::prepare_inference_as;
use ir::ids::{self, IGNORED, Ids, Unknown};
use ir::import::{Model, Options};
use ir::precision::Precision;
use ir::{DType, Diagnostic, Mesh, Plan, Span};
use planner::cluster::Cluster;
use planner::inference::plan_forward;
use runtime::convert::{Stored, convert};
use runtime::execute::{Batch, Classes, Part, Scalars, Session, StepReport, Values};
use runtime::load::{Named, collect_weights, write_named};
use runtime::npy;

use crate::argument::{PathArg, positive};
use crate::artefact::is_artefact;
use crate::documents::{Document, RunBatch};
use crate::failure::{Exit, Failure, usage};
use crate::job::{self, Limited, PlanRequest, Where};
use crate::verbs::generate::{Origin, described};
use crate::{onnx, output};

/// The entry that computes logits.
const LOGITS: &str = "logits";

/// Flags of `run`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The model: a directory with weights, that of a run, an ONNX file, or a .gtl that `compile`
    /// wrote
    pub model: PathArg,
    /// An input as a .npy file; input_ids are whole numbers, [samples, tokens]; a .gtl draws some
    #[arg(long, value_name = "NAME=FILE")]
    pub input: Vec<PathArg>,
    /// Give a dim that an ONNX file leaves open its size
    #[arg(long, value_name = "NAME=N", value_parser = onnx::dim)]
    pub dim: Vec<(String, usize)>,
    /// The labels: a .npy file of the same shape, not shifted; -100 counts for nothing
    #[arg(long, value_name = "FILE")]
    pub labels: Option<PathBuf>,
    /// Also compute the gradients of the loss
    #[arg(long, requires = "labels")]
    pub grad: bool,
    /// The weights of a .gtl: a directory of its model, or a run [default: drawn]
    #[arg(long, value_name = "RUN|DIR")]
    pub weights: Option<PathArg>,
    /// The directory for logits.npy, loss.npy and grads.safetensors
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// The cluster: cpu-local for the cores of this machine, or GPUs like its own
    #[arg(long, value_name = "PRESET|FILE")]
    pub cluster: Option<PathArg>,
    /// Ranks: threads of this process with memory of their own [default: 1]
    #[arg(
        long,
        visible_alias = "devices",
        alias = "world-size",
        value_name = "N",
        value_parser = positive
    )]
    pub ranks: Option<usize>,
    /// Rates that `gantline calibrate` measured
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathArg>,
    /// What the planner keeps to
    #[command(flatten)]
    pub limited: Limited,
    /// The element type: f32, f64, bf16 or f16 [default: f32, or without labels that of the files
    /// of a directory]
    #[arg(long, value_name = "TYPE", value_parser = job::dtype)]
    pub dtype: Option<DType>,
    /// Run N times, and print how long one run takes
    #[arg(long, value_name = "N", value_parser = positive)]
    pub bench: Option<usize>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// A batch as it stands in files, labels shifted.
struct Arrays {
    samples: usize,
    seq: usize,
    tokens: Vec<i64>,
    labels: Option<Vec<i64>>,
}

/// A batch, labels shifted.
struct Feed {
    samples: usize,
    seq: usize,
    tokens: Vec<i32>,
    labels: Option<Vec<i32>>,
}

/// What was computed.
struct Answer {
    /// The element type.
    dtype: DType,
    logits: Option<Values>,
    report: Option<StepReport>,
    grads: Vec<Named>,
    /// Seconds of each repetition.
    times: Vec<f64>,
    /// Tokens of one repetition.
    tokens: usize,
    /// What a repetition was predicted to take.
    predicted_s: Option<f64>,
}

impl Answer {
    fn of(dtype: DType, feed: &Feed) -> Answer {
        Answer {
            dtype,
            logits: None,
            report: None,
            grads: Vec::new(),
            times: Vec::new(),
            tokens: feed.tokens.len(),
            predicted_s: None,
        }
    }

    /// The least, the median and the greatest time of a repetition; none without repetitions.
    fn spread(&self) -> Option<[f64; 3]> {
        let mut times = self.times.clone();
        times.sort_by(f64::total_cmp);
        let (low, high) = (*times.first()?, *times.last()?);
        let middle = [times[(times.len() - 1) / 2], times[times.len() / 2]];
        Some([low, middle[0].midpoint(middle[1]), high])
    }
}

impl Args {
    /// The cluster, on whose devices programs run, and how many of them.
    fn devices(&self) -> Result<(Cluster, usize), Failure> {
        let ranks = self.ranks.unwrap_or(1);
        let place = Where {
            cluster: self.cluster.clone().unwrap_or_else(|| PathArg::from("cpu-local")),
            ranks: Some(ranks),
            nodes: None,
            calibration: self.calibration.clone(),
        };
        let cluster = place.cluster()?;
        crate::training::check_runs_on(&cluster)?;
        Ok((cluster, ranks))
    }
}

/// Answers.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    if is_artefact(args.model.path()) {
        return compiled::run(args);
    }
    if onnx::is_onnx(args.model.path()) {
        check_onnx_flags(args)?;
        let running = onnx::Running {
            dims: &args.dim,
            inputs: &args.input,
            folder: args.output.as_deref(),
            bench: args.bench,
            as_json: args.json,
        };
        return onnx::run(args.model.path(), running);
    }
    args.dtype.map_or(Ok(()), job::check_executable)?;
    check_flags(args)?;
    let arrays = read_arrays(args)?;
    let (description, trained) = described(&args.model)?;
    let of_weights = trained.as_ref().filter(|_| args.labels.is_none());
    let usual = of_weights.map_or(DType::F32, |(_, weights)| weights.usual_dtype());
    let own = args.dtype.unwrap_or(usual);
    let precision = job::training_precision(own, &[])?;
    job::check_graph(&description, precision.accumulate)?;
    let dtype = precision.accumulate;
    let options = Options { seq: arrays.seq, dtype, dropout: Some(0.0), documents: false };
    let mut model = crate::import(&description, &options)?;
    let feed = arrays.feed(&Ids::of(&model.module, crate::LOSS), args)?;
    let Some((_, weights)) = trained else {
        let headline = format!("the preset `{}` has no weights", args.model);
        let help = "name a directory with weights, or that of a run";
        return Err(usage("MODEL", headline).help(help).into());
    };
    let (cluster, ranks) = args.devices()?;
    crate::choose_layout(&mut model, cluster.target(), &precision);
    let question = PlanRequest {
        module: crate::prepare_as(&model, &precision)?,
        model: model.name.clone(),
        ranks,
        cluster,
        global_batch_size: feed.samples,
        seq: feed.seq,
        precision,
        optimizer: ir::plan::Optimizer::Sgd { decay: 0.0, decay_biases: 0.0 },
        clip: None,
        lora: None,
        limits: args.limited.limits()?,
    };
    let plan = crate::plan(&question.job())?.plan;
    let work = Work {
        args,
        question: &question,
        plan: &plan,
        model: &model,
        weights: &weights,
        feed: &feed,
    };
    let mut answer = Answer::of(own, &feed);
    if feed.labels.is_some() {
        work.compute_loss(&mut answer)?;
    }
    // Timing the loss, logits would only take memory.
    if args.bench.is_none() || feed.labels.is_none() {
        work.compute_logits(&mut answer)?;
    }
    args.output.as_ref().map_or(Ok(()), |folder| write(folder, &answer))?;
    tell(args, &answer);
    Ok(Exit::Success)
}

/// What is computed from what.
#[derive(Clone, Copy)]
struct Work<'a> {
    args: &'a Args,
    question: &'a PlanRequest,
    plan: &'a Plan,
    model: &'a Model,
    weights: &'a Origin,
    feed: &'a Feed,
}

/// What an ONNX file does not take: it has weights and an element type of its own, and no loss.
fn check_onnx_flags(args: &Args) -> Result<(), Vec<Diagnostic>> {
    let given = [
        ("--labels", args.labels.is_some()),
        ("--grad", args.grad),
        ("--weights", args.weights.is_some()),
        ("--cluster", args.cluster.is_some()),
        ("--ranks", args.ranks.is_some()),
        ("--calibration", args.calibration.is_some()),
        ("--dtype", args.dtype.is_some()),
        ("--fix", !args.limited.is_empty()),
    ];
    let wrong: Vec<Diagnostic> = given
        .into_iter()
        .filter(|(_, is_given)| *is_given)
        .map(|(flag, _)| {
            let headline = format!("`{}` is an ONNX file, which runs as it is", args.model);
            usage(flag, headline).help("leave the flag out")
        })
        .collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

/// What only one of the two kinds of models takes.
fn check_flags(args: &Args) -> Result<(), Diagnostic> {
    if !args.dim.is_empty() {
        let headline = format!("`{}` is no ONNX file, and has no dims to give", args.model);
        return Err(usage("--dim", headline).help("leave the flag out"));
    }
    if args.input.is_empty() {
        let help = "write --input input_ids=FILE, with a file that `numpy.save` wrote";
        return Err(usage("--input", "there are no tokens to run on").help(help));
    }
    if args.weights.is_some() {
        let headline = "a directory has its own weights, and --weights is for compiled files";
        return Err(usage("--weights", headline).help("name the directory in place of the model"));
    }
    Ok(())
}

impl Work<'_> {
    /// Loss and gradients; nothing is updated, since the rate is zero.
    fn compute_loss(&self, answer: &mut Answer) -> Result<(), Failure> {
        let Work { args, question, plan, model, weights, feed } = *self;
        let classes = crate::compile(&question.module, crate::LOSS, plan)?;
        let mut session =
            crate::start(classes, plan.target, question.cluster.threads(question.ranks))?;
        weights.fill(&mut session, model)?;
        let labels = feed.labels.as_deref().unwrap_or_default();
        let batch = Batch { tokens: &feed.tokens, labels, ..Batch::default() };
        let mut step = || -> Result<StepReport, Failure> {
            Ok(match args.grad {
                true => session.step(&batch, Scalars::default())?,
                false => session.evaluate(&batch)?,
            })
        };
        let report = step()?;
        for _ in 0..args.bench.unwrap_or(0) {
            answer.times.push(step()?.seconds);
        }
        if args.grad {
            answer.grads = mean_grads(&session, model, &report);
        }
        answer.report = Some(report);
        Ok(())
    }

    /// Logits, on the same mesh.
    fn compute_logits(&self, answer: &mut Answer) -> Result<(), Failure> {
        let Work { args, question, plan, model, weights, feed } = *self;
        let precision = Precision::uniform(answer.dtype);
        let module = prepare_inference_as(model.module.clone(), LOGITS, &precision)?;
        // Programs for inference share no tokens.
        let mesh = Mesh { cp: 1, ..plan.mesh };
        let samples = feed.samples / mesh.dp;
        let forward = plan_forward(&module, LOGITS, mesh, [samples, feed.seq], precision)?;
        let forward = Plan { target: plan.target, ..forward };
        let Compiled { programs, kernels } = compile_inference(&module, LOGITS, &forward)?;
        let ids = Ids::of(&module, LOGITS);
        let classes = Classes { programs, kernels, mesh, ids };
        let mut session =
            crate::start(classes, plan.target, question.cluster.threads(mesh.ranks()))?;
        weights.fill(&mut session, model)?;
        let batch = Batch { tokens: &feed.tokens, ..Batch::default() };
        session.infer(0, &batch)?;
        for _ in 0..args.bench.unwrap_or(0) {
            answer.times.push(session.infer(0, &batch)?.seconds);
        }
        answer.logits = Some(session.output(0, 0)?);
        Ok(())
    }
}

/// The gradients of the mean loss, under the names of the model's checkpoint.
fn mean_grads(session: &Session, model: &Model, report: &StepReport) -> Vec<Named> {
    let mut grads = collect_weights(session, &model.weights, Part::Grad);
    for grad in &mut grads {
        let mean: Vec<f64> = grad.values.to_f64().iter().map(|g| g / report.count).collect();
        grad.values.bytes = bytes_of(&mean, grad.values.dtype);
    }
    grads
}

fn bytes_of(values: &[f64], dtype: DType) -> Vec<u8> {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    convert(Stored::DType(DType::F64), &bytes, dtype)
}

fn read_arrays(args: &Args) -> Result<Arrays, Failure> {
    let path = token_path(args)?;
    let (tokens, dims) = read_ints(path.path())?;
    let [samples, seq] = dims[..] else {
        let headline = format!("`{path}` has {} dims, and tokens have two", dims.len());
        return Err(wrong_array(&path, headline).help("save it as [samples, tokens]").into());
    };
    let labels = args.labels.as_deref().map(|labels| shifted_labels(labels, &dims)).transpose()?;
    Ok(Arrays { samples, seq, tokens, labels })
}

impl Arrays {
    /// The batch, if the model knows all of its tokens and labels and any label counts.
    fn feed(self, ids: &Ids, args: &Args) -> Result<Feed, Diagnostic> {
        let Arrays { samples, seq, tokens, labels } = self;
        let help = "use the model's own tokeniser";
        if let Some(unknown) = ids.unknown(ids::Feed::Tokens, &tokens, seq) {
            return Err(wrong_array(&token_path(args)?, unknown.to_string()).help(help));
        }
        let tokens = narrow(&tokens, &token_path(args)?.to_string())?;
        let (Some(labels), Some(path)) = (labels, &args.labels) else {
            return Ok(Feed { samples, seq, tokens, labels: None });
        };
        let path = path.display().to_string();
        if let Some(unknown) = ids.unknown(ids::Feed::Labels, &labels, seq) {
            // In the file, a label stands one place further.
            let unknown = Unknown { column: unknown.column + 1, ..unknown };
            let help = format!("{help}, and {IGNORED} for what counts for nothing");
            return Err(wrong_array(&path, unknown.to_string()).help(help));
        }
        if labels.iter().all(|label| *label == i64::from(IGNORED)) {
            let note = "the first label of a sequence belongs to no token before it";
            return Err(wrong_array(&path, "no label counts".to_owned()).note(note));
        }
        Ok(Feed { samples, seq, tokens, labels: Some(narrow(&labels, &path)?) })
    }
}

/// The ids as numbers of 32 bits: ids that no table bounds may be any.
fn narrow(ids: &[i64], path: &str) -> Result<Vec<i32>, Diagnostic> {
    let narrow = |id: &i64| {
        i32::try_from(*id)
            .map_err(|_| wrong_array(path, format!("{id} is no id: they have 32 bits")))
    };
    ids.iter().map(narrow).collect()
}

/// The one input of a language model.
fn token_path(args: &Args) -> Result<PathArg, Diagnostic> {
    let help = "write --input input_ids=FILE";
    let [input] = &args.input[..] else {
        let headline = format!("{} inputs, and the model takes `input_ids` only", args.input.len());
        return Err(usage("--input", headline).help(help));
    };
    match input.pair() {
        Some((name, file)) if name == "input_ids" => Ok(file),
        Some((name, _)) => {
            let headline = format!("the model takes `input_ids`, and no `{name}`");
            Err(usage("--input", headline).help(help))
        }
        None => Ok(input.clone()),
    }
}

/// The label of each token is that of the one after it; the last has none.
fn shifted_labels(path: &Path, dims: &[usize]) -> Result<Vec<i64>, Failure> {
    let (raw, label_dims) = read_ints(path)?;
    if label_dims != dims {
        let headline = format!("the labels are {label_dims:?}, and the tokens {dims:?}");
        return Err(wrong_array(path.display().to_string(), headline)
            .help("labels have the shape of the tokens; they are shifted here")
            .into());
    }
    let label = |at: usize| match (at + 1).is_multiple_of(dims[1]) {
        true => i64::from(IGNORED),
        false => raw[at + 1],
    };
    Ok((0..raw.len()).map(label).collect())
}

fn wrong_array(path: impl Into<String>, headline: String) -> Diagnostic {
    Diagnostic::error("E5009", Span::of(path), headline)
}

fn read_ints(path: &Path) -> Result<(Vec<i64>, Vec<usize>), Failure> {
    let array = npy::read(path)?;
    if array.dtype.is_float() {
        let headline = format!("the elements are {}, and token ids are whole numbers", array.dtype);
        let help = "save it as `x.astype('int64')`";
        return Err(wrong_array(path.display().to_string(), headline).help(help).into());
    }
    if array.bytes.is_empty() {
        let headline = "the array has no elements".to_owned();
        return Err(wrong_array(path.display().to_string(), headline).into());
    }
    let bytes = convert(Stored::DType(array.dtype), &array.bytes, DType::I64);
    Ok((bytes.as_chunks().0.iter().map(|&b| i64::from_le_bytes(b)).collect(), array.dims))
}

fn write(folder: &Path, answer: &Answer) -> Result<(), Failure> {
    std::fs::create_dir_all(folder).map_err(runtime::Error::io("create", folder))?;
    // Arrays of narrow numbers are of f32, which has them all: numpy has no bf16.
    if let Some(Values { dtype, dims, bytes }) = &answer.logits {
        let written = dtype.accumulation();
        let bytes = convert(Stored::DType(*dtype), bytes, written);
        npy::write(&folder.join("logits.npy"), written, dims, &bytes)?;
    }
    if let Some(report) = &answer.report {
        let written = answer.dtype.accumulation();
        npy::write(&folder.join("loss.npy"), written, &[], &bytes_of(&[report.loss()], written))?;
    }
    if !answer.grads.is_empty() {
        write_named(&folder.join("grads.safetensors"), &answer.grads)?;
    }
    output::note(&format!("wrote {}", folder.display()));
    Ok(())
}

fn tell(args: &Args, answer: &Answer) {
    let spread = answer.spread();
    let rate = spread.map(|[_, median, _]| answer.tokens as f64 / median);
    let dims = answer.logits.as_ref().map(|logits| logits.dims.clone());
    if args.json {
        let document = RunBatch {
            loss: answer.report.as_ref().map(StepReport::loss),
            labels: answer.report.as_ref().map(|report| report.count),
            logits: dims.map(|dims| dims.into_iter().map(|dim| dim as u64).collect()),
            step_time_s: spread.map(|[_, median, _]| median),
            step_time_low_s: spread.map(|[low, _, _]| low),
            step_time_high_s: spread.map(|[_, _, high]| high),
            predicted_step_time_s: answer.predicted_s,
            tokens_per_s: rate,
        };
        return output::answer_json(&document.to_json());
    }
    let mut lines = Vec::new();
    if let Some(Values { dims, dtype, .. }) = &answer.logits {
        lines.push(format!("logits  {dims:?} in {dtype}"));
    }
    if let Some(report) = &answer.report {
        lines.push(format!("loss    {} over {} labels", report.loss(), report.count));
    }
    if let (Some([low, median, high]), Some(rate)) = (spread, rate) {
        let [low, middle, high] = [low, median, high].map(output::seconds);
        let count = answer.times.len();
        lines.push(format!("time    {middle} (median of {count}, {low} to {high})"));
        if let Some(predicted) = answer.predicted_s {
            let error = 100.0 * (predicted / median - 1.0);
            lines.push(format!("        {} predicted ({error:+.0} %)", output::seconds(predicted)));
        }
        lines.push(format!("rate    {} tokens/s", output::count(rate as u64)));
    }
    output::answer(&lines.join("\n"));
}
