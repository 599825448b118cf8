//! `verify MODEL`: every mesh computes what one device does, and one device what the reference
//! interpreter does.
//!
//! Weights and data are drawn from a seed. For each mesh of the ranks, and of their divisors, the
//! loss and all gradients of one step are compared with those of one rank. The error of a gradient
//! is its largest difference, in parts of its largest element; gradients that are tiny beside the
//! others are measured in parts of a thousandth of the largest of all. Equal infinities, and NaN
//! on both sides, are no difference; that one rank's loss is no number is said. Where the terms of
//! a gradient cancel, the interpreter tells how much of a difference rounding explains.

mod reference;
mod narrow;
mod rules;
mod small;

use std::collections::BTreeMap;
use std::ops::Range;

use clap::builder::ArgPredicate;
use ir::formats::nearest;
use ir::ids::{Feed, IGNORED, Ids};
use ir::import::{Description, Init, Model, Options, Weight};
use ir::lora::{Lora, adapt};
use ir::plan::{ContextForm, Optimizer};
use ir::precision::Products;
use ir::random::mix;
use ir::{DType, Diagnostic, ExpertParallel, Mesh, Plan, Span};
use planner::cluster::Cluster;
use planner::compiled::{Usable, ways_to_share};
use planner::divisors::divisors;
use planner::elaborate::name_of;
use planner::limits::{Decision, Limits};
use runtime::execute::{Batch, Part, Scalars, Session};

use crate::argument::{PathArg, length, positive};
use crate::documents::{Document, MeshRow, Verify};
use crate::failure::{self, Exit, Failure, usage};
use crate::job::{self, PlanRequest, positions_max};
use crate::output::{self, Table};
use crate::run::model_argument;
use crate::training::check_plan;
use reference::Reference;
use small::Small;

/// Flags of `verify`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The model: a directory, that of a run too, a config.json, a .graph text or a preset
    #[arg(value_parser = model_argument())]
    pub model: PathArg,
    /// Number of ranks: every mesh of N ranks, and of each divisor of N, is compared with one
    /// rank; 1 compares one rank with the interpreter
    #[arg(long, visible_alias = "devices", value_name = "N", value_parser = positive)]
    #[arg(default_value_if("plan", ArgPredicate::IsPresent, "1"))]
    #[arg(default_value_if("shrink", ArgPredicate::Equals("true".into()), "1"))]
    pub ranks: usize,
    /// Compare the plan in this file, and no meshes; its ranks, sequence, batch and types count
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ranks", "seq", "gbs", "dtype"])]
    #[arg(conflicts_with_all = ["precision", "dropout", "bisect_rules"])]
    pub plan: Option<PathArg>,
    /// Compare the plan in small: what it decides, on two ranks of each axis and 32 at most; MODEL
    /// may then be a smaller one of the same layers
    #[arg(long)]
    pub shrink: bool,
    /// The plan in small.
    #[arg(skip)]
    pub small: Option<Plan>,
    /// Tokens of a sequence; 33 by default, or fewer where the model has fewer; ranks share them
    /// where they are pieces of one size
    #[arg(long, alias = "seq-length", value_name = "N", value_parser = length)]
    pub seq: Option<usize>,
    /// Samples of the step [default: the number of ranks]
    #[arg(long, alias = "global-batch-size", value_name = "N", value_parser = positive)]
    pub gbs: Option<usize>,
    /// The element type: f64, f32, or bf16 and f16, which are compared with f64 [default: f64, or
    /// that of a graph]
    #[arg(long, value_name = "TYPE", value_parser = job::dtype)]
    pub dtype: Option<DType>,
    /// Types of single roles: parameters, compute, accumulate, master (or none), gradients, reduce,
    /// states, saved (activations), logits; products (own, tf32, f8e4m3, f8-hybrid)
    #[arg(long, value_name = "ROLE=TYPE", value_delimiter = ',')]
    pub precision: Vec<String>,
    /// Probability of dropout, the same elements on every mesh
    #[arg(long, value_name = "P", default_value = "0", value_parser = crate::argument::amount)]
    pub dropout: f64,
    /// Keep packed documents apart, which are drawn too: as `train --document-mask`
    #[arg(long, visible_alias = "reset-attention-mask")]
    pub document_mask: bool,
    /// Freeze the model and compare the gradients of adapters: as `train --lora`
    #[arg(long, value_name = "rank=N,alpha=X,targets=NAME,…")]
    pub lora: Option<Lora>,
    /// Seed of the weights and the data
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u32,
    /// Compare one rank with and without rewriting, and find the rule that makes a difference
    #[arg(long)]
    pub bisect_rules: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// An odd number of tokens, so that most cuts of a sequence are uneven.
const SEQ: usize = 33;

/// What one step of a mesh yields: the loss and the gradients by name.
pub(super) struct Computed {
    pub(super) loss: f64,
    pub(super) grads: BTreeMap<String, Vec<f64>>,
}

/// One line of the answer.
pub(super) struct Line {
    mesh: Mesh,
    /// How ranks share experts.
    experts: ExpertParallel,
    sequence: bool,
    pub(super) error: f64,
    /// How far all tensors are from what is expected: the root of the mean of the squares of each
    /// tensor's difference, in parts of that tensor.
    pub(super) distance: f64,
    worst: String,
    pub(super) is_ok: bool,
}

/// A mesh that does not fit, and why.
type Refused = (Mesh, Vec<Diagnostic>);

/// Answers.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let description = crate::resolve(&args.model)?.description;
    let (given, description) = given(args, description)?;
    let args = &match &given {
        Some(plan) => Args {
            ranks: plan.mesh.ranks(),
            seq: Some(plan.seq),
            gbs: Some(plan.global_batch_size()),
            small: given.clone().filter(|_| args.shrink),
            lora: args.lora.clone().or_else(|| plan.lora.clone()),
            ..args.clone()
        },
        None => args.clone(),
    };
    let dtype = args.dtype.or(job::graph_dtype(&description)).unwrap_or(DType::F64);
    let precision = match &given {
        Some(plan) => plan.precision,
        None => job::training_precision(dtype, &args.precision)?,
    };
    job::check_graph(&description, precision.accumulate)?;
    let seq = args.seq.unwrap_or_else(|| positions_max(&description).min(SEQ));
    // A plan has the values of the model with its own dropout.
    let dropout = given.is_none().then_some(args.dropout);
    let dtype = precision.accumulate;
    let options = Options { seq, dtype, dropout, documents: args.document_mask };
    let mut model = crate::import(&description, &options)?;
    if let Some(lora) = &args.lora {
        adapt(&mut model, lora)?;
    }
    let cluster = Cluster::load("cpu-local")?;
    job::check_local(&cluster, args.ranks)?;
    let mut question = PlanRequest {
        cluster,
        module: crate::prepare_as(&model, &precision)?,
        model: model.name.clone(),
        ranks: 1,
        global_batch_size: args.gbs.unwrap_or(args.ranks),
        seq,
        precision,
        optimizer: Optimizer::Sgd { decay: 0.0, decay_biases: 0.0 },
        clip: None,
        lora: args.lora.clone(),
        limits: Limits::default(),
    };
    let job = question.job();
    let job = planner::compiled::Job { ranks: args.ranks, ..job };
    Usable::of(&job)?.check(&job)?;
    if args.bisect_rules {
        return rules::run(args, &model, &mut question);
    }
    let expected = step_of_one(&mut question, &model, args.seed).map_err(with_shrink(args))?;
    let is_own = precision.products == Products::Own && precision.saved == precision.compute;
    if precision.compute.is_narrow() || !is_own {
        return narrow::run(args, &model, &mut question, &expected);
    }
    if args.ranks == 1 && args.plan.is_none() {
        return compare_with_interpreter(args, &model, &mut question, &expected);
    }
    let (mut lines, refused) = lines_of(args, &model, &mut question, &expected)?;
    let mut error_max = error_max(dtype);
    if lines.iter().any(|line| line.error > error_max && line.error.is_finite())
        && let Some(reference) = Reference::of(&mut question, &model, args.seed)?
    {
        error_max = reference.error_max(error_max);
    }
    error_max += rounding_of_sums(&question, args.ranks);
    lines.iter_mut().for_each(|line| line.is_ok = line.error <= error_max);
    note_loss(expected.loss);
    finish(args, (dtype.name(), dtype.is_narrow()), &expected, lines, refused)
}

/// The way out where the whole model of a plan does not fit on this machine.
fn with_shrink(args: &Args) -> impl Fn(Failure) -> Failure {
    let is_whole = args.plan.is_some() && !args.shrink;
    move |failure| match failure {
        Failure::Input(wrong) if is_whole && wrong.iter().any(|one| one.code == "E3201") => {
            let help = "add `--shrink`: the same plan on at most 32 ranks of a small model";
            wrong.into_iter().map(|one| one.help(help)).collect::<Vec<_>>().into()
        }
        Failure::Input(_) | Failure::World(_) => failure,
    }
}

/// The plan that is compared, where there is one, and the model on which it is.
fn given(args: &Args, description: Description) -> Result<(Option<Plan>, Description), Failure> {
    match &args.plan {
        Some(path) if args.shrink => {
            let Small { description, plan } = small::of(path, &description, args.document_mask)?;
            Ok((Some(plan), description))
        }
        Some(path) => Ok((Some(given_plan(path)?), description)),
        None if args.shrink => {
            let headline = "there is no plan to shrink".to_owned();
            Err(usage("--shrink", headline).help("write `--plan FILE` too").into())
        }
        None => Ok((None, description)),
    }
}

/// The plan in a file.
fn given_plan(path: &PathArg) -> Result<Plan, Failure> {
    let text = failure::read_text(path, "--plan")?;
    Ok(crate::training::training_plan(&path.to_string(), &text)?)
}

/// How far the step of the plan in a file is from the one that is expected.
fn line_of_plan(
    args: &Args,
    path: &PathArg,
    model: &Model,
    question: &PlanRequest,
    expected: &Computed,
) -> Result<Line, Failure> {
    let own = match &args.small {
        Some(plan) => plan.clone(),
        None => given_plan(path)?,
    };
    let (optimizer, clip) = (own.optimizer, own.clip);
    let asked = PlanRequest { ranks: args.ranks, optimizer, clip, ..question.clone() };
    let plan = check_plan(&path.to_string(), own, &asked)?;
    let name = name_of(&asked.module, crate::LOSS, &plan)?;
    // Gradients are compared, and nothing is updated.
    let plan = Plan { optimizer: question.optimizer, clip: question.clip, ..plan };
    let found = step(&asked, model, &plan, args.seed)?;
    Ok(compare(plan.mesh, name.configuration.sequence_parallel, expected, &found))
}

/// How far the step of each mesh is from the one that is expected, and the meshes that do not fit.
pub(super) fn lines_of(
    args: &Args,
    model: &Model,
    question: &mut PlanRequest,
    expected: &Computed,
) -> Result<(Vec<Line>, Vec<Refused>), Failure> {
    if let Some(path) = &args.plan {
        return Ok((vec![line_of_plan(args, path, model, question, expected)?], Vec::new()));
    }
    let (mut lines, mut refused) = (Vec::new(), Vec::new());
    let experts = Usable::of(&question.job())?.experts;
    for (mesh, sequence, experts) in meshes(args.ranks, question.seq, experts) {
        match plan_of(question, (mesh, experts), sequence) {
            Ok(plan) => {
                let found = step(question, model, &plan, args.seed)?;
                lines.push(Line { experts, ..compare(mesh, sequence, expected, &found) });
            }
            Err(Failure::Input(diagnostics)) => refused.push((mesh, diagnostics)),
            Err(failure) => return Err(failure),
        }
    }
    Ok((lines, refused))
}

/// Whether one rank computes what the interpreter does.
fn compare_with_interpreter(
    args: &Args,
    model: &Model,
    question: &mut PlanRequest,
    one: &Computed,
) -> Result<Exit, Failure> {
    let Some(reference) = Reference::of(question, model, args.seed)? else {
        let headline = "the interpreter does no step of this model: it is too large, or draws";
        let help = "write --ranks 2 or more to compare meshes with one rank";
        return Err(usage("--ranks", headline).help(help).into());
    };
    let mut line = compare(Mesh::ONE, false, &reference.step, one);
    let rounding = rounding_of_sums(question, args.ranks);
    line.is_ok =
        line.error <= reference.error_max(error_max(question.precision.compute)) + rounding;
    note_loss(reference.step.loss);
    let dtype = question.precision.compute;
    let numbers = (dtype.name(), dtype.is_narrow());
    finish(args, numbers, &reference.step, vec![line], Vec::new())
}

/// What one rank computes.
pub(super) fn step_of_one(
    question: &mut PlanRequest,
    model: &Model,
    seed: u32,
) -> Result<Computed, Failure> {
    let plan = plan_of(question, (Mesh::ONE, ExpertParallel::NONE), false)?;
    step(question, model, &plan, seed)
}

/// The largest difference of two steps of one rank, in parts of the largest element.
pub(super) fn difference(expected: &Computed, found: &Computed) -> f64 {
    compare(Mesh::ONE, false, expected, found).error
}

/// How far a step may be from another one. Chosen: a few thousand roundings; where that is too
/// little, the interpreter says what rounding does.
pub(super) fn error_max(dtype: DType) -> f64 {
    if dtype == DType::F64 { 1e-10 } else { 1e-4 }
}

/// How far gradients are moved where they are added up or exchanged as narrow numbers: each term
/// and each sum by half a unit in the last place, in either direction, so that the distance grows
/// with the root of their number. Chosen: four times that, for terms larger than the sum.
pub(super) fn rounding_of_sums(question: &PlanRequest, ranks: usize) -> f64 {
    let precision = &question.precision;
    if !precision.reduce.is_narrow() {
        return 0.0;
    }
    // A micro-batch has a sample or more, and each is a term.
    let samples = if precision.gradients.is_narrow() { question.global_batch_size } else { 1 };
    let least = [8, 9, 10, 11].map(|bits| 2.0_f64.powi(-bits));
    let is_between = |x: &f64| nearest(precision.reduce, 1.0 + x) != 1.0 + x;
    let terms = (ranks.max(samples) + 1) as f64;
    4.0 * terms.sqrt() * least.into_iter().find(is_between).unwrap_or(0.0)
}

/// The weights that a step starts from, by name.
pub(super) fn drawn_weights(
    question: &mut PlanRequest,
    model: &Model,
    seed: u32,
) -> Result<BTreeMap<String, Vec<f64>>, Failure> {
    let plan = plan_of(question, (Mesh::ONE, ExpertParallel::NONE), false)?;
    let session = session(question, model, &plan, seed)?;
    let weight = |weight: &Weight| {
        let values = session.read_weight(&weight.name, Part::Weight)?;
        Some((weight.name.clone(), values.to_f64()))
    };
    Ok(model.weights.iter().filter_map(weight).collect())
}

/// All meshes of a number of ranks and of its divisors, but that of one rank, which can share
/// samples of `seq` tokens, with each way to share the sequence and the experts of a layer.
fn meshes(ranks: usize, seq: usize, experts: usize) -> Vec<(Mesh, bool, ExpertParallel)> {
    let shares = |mesh: Mesh| {
        let sequences = [false, true].into_iter().filter(move |sequence| !sequence || mesh.tp > 1);
        sequences.flat_map(move |sequence| {
            let ways = ways_to_share(mesh, experts, sequence.then_some(seq)).into_iter();
            ways.map(move |way| (mesh, sequence, way))
        })
    };
    let fits = |cp: &usize| seq.is_multiple_of(ContextForm::default().pieces(*cp));
    let mut meshes = Vec::new();
    for size in divisors(ranks).into_iter().filter(|size| *size > 1) {
        for pp in divisors(size) {
            for tp in divisors(size / pp) {
                let replicas = size / pp / tp;
                let mesh = |cp: usize| Mesh { pp, dp: replicas / cp, cp, tp, ..Mesh::ONE };
                meshes
                    .extend(divisors(replicas).into_iter().filter(fits).map(mesh).flat_map(shares));
            }
        }
    }
    meshes
}

/// The plan of exactly this mesh.
fn plan_of(
    question: &mut PlanRequest,
    (mesh, experts): (Mesh, ExpertParallel),
    sequence: bool,
) -> Result<Plan, Failure> {
    let decisions = [
        (Decision::Pp, mesh.pp),
        (Decision::Dp, mesh.dp),
        (Decision::Cp, mesh.cp),
        (Decision::Tp, mesh.tp),
        (Decision::Ep, experts.ep),
        (Decision::Etp, if experts.takes_tp { 1 } else { mesh.tp }),
        (Decision::Sp, usize::from(sequence)),
    ];
    question.limits = Limits::default();
    decisions.into_iter().for_each(|(decision, number)| question.limits.fix(decision, number));
    question.ranks = mesh.ranks();
    let mut job = question.job();
    job.evaluations_max = 1;
    Ok(crate::plan(&job)?.plan)
}

/// A session with drawn weights.
fn session(
    question: &PlanRequest,
    model: &Model,
    plan: &Plan,
    seed: u32,
) -> Result<Session, Failure> {
    let classes = crate::compile(&question.module, crate::LOSS, plan)?;
    let mut session = crate::start(classes, plan.target, 1)?;
    let inits: BTreeMap<&str, Init> =
        model.weights.iter().map(|w| (w.name.as_str(), w.init)).collect();
    let normal = |std| runtime::init::Init::Normal { std, zero_row: None };
    session.init_weights(seed, &|name, _| match inits.get(name) {
        Some(Init::Ones) => runtime::init::Init::Ones,
        Some(Init::Normal { std, .. }) => normal(*std),
        // A bias or a row of zeros would hide what is left out.
        Some(Init::Zeros) | None => normal(0.02),
    });
    Ok(session)
}

/// The tokens and labels of a step.
pub(super) fn batch(question: &PlanRequest, model: &Model, seed: u32) -> (Vec<i32>, Vec<i32>) {
    let ids = Ids::of(&model.module, crate::LOSS);
    let draw = |feed: Feed, at: usize, number: usize| {
        let known = ids.range(feed, at % question.seq);
        let Range { start, end } = known.unwrap_or(0..model.vocab.max(1) as i64);
        let word = mix(u64::from(seed) << 32 | number as u64);
        (start + (word % (end - start) as u64) as i64) as i32
    };
    let count = question.global_batch_size * question.seq;
    let tokens: Vec<i32> = (0..count).map(|at| draw(Feed::Tokens, at, at)).collect();
    let is_ignored = |at: usize| at % 11 == 3;
    let label = |at: usize| match is_ignored(at) {
        true => IGNORED,
        false => draw(Feed::Labels, at, count + at),
    };
    (tokens, (0..count).map(label).collect())
}

/// The documents of a step: about one starts at every sixth token.
pub(super) fn documents(question: &PlanRequest, seed: u32) -> Vec<i32> {
    let starts = |at: usize| mix(!u64::from(seed) << 32 | at as u64).is_multiple_of(6);
    let mut document = 0;
    let place = |at: usize| {
        let place = at % question.seq;
        if place == 0 || starts(at) {
            document = place as i32;
        }
        document
    };
    (0..question.global_batch_size * question.seq).map(place).collect()
}

/// Runs one step from drawn weights on drawn data, and changes nothing.
fn step(
    question: &PlanRequest,
    model: &Model,
    plan: &Plan,
    seed: u32,
) -> Result<Computed, Failure> {
    let mut session = session(question, model, plan, seed)?;
    let (tokens, labels) = batch(question, model, seed);
    let documents = documents(question, seed);
    let batch =
        Batch { tokens: &tokens, labels: &labels, documents: &documents, ..Batch::default() };
    let report = session.step(&batch, Scalars { seed, ..Scalars::default() })?;
    let grads = model.weights.iter().filter_map(|weight| {
        Some((weight.name.clone(), session.read_grad(&weight.name)?.to_f64()))
    });
    Ok(Computed { loss: report.loss(), grads: grads.collect() })
}

/// How far two numbers are from each other: what is a number on one side only, infinitely far.
fn distance(a: f64, b: f64) -> f64 {
    match (a - b).abs() {
        _ if a == b || a.is_nan() && b.is_nan() => 0.0,
        distance if distance.is_nan() => f64::INFINITY,
        distance => distance,
    }
}

/// Says that a loss is no number.
pub(super) fn note_loss(loss: f64) {
    if !loss.is_finite() {
        output::note(&format!("note: the loss of one rank is {loss}: little can be compared"));
    }
}

/// The root of the mean of squared relative differences of the loss and of all gradients; of a
/// gradient that is tiny beside the others, in parts of a thousandth of the largest.
fn distance_of(one: &Computed, found: &Computed) -> f64 {
    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let floor = 1e-3 * one.grads.values().map(|grad| norm(grad)).fold(0.0, f64::max);
    let loss = distance(one.loss, found.loss) / one.loss.abs().max(f64::MIN_POSITIVE);
    let mut squares = loss * loss;
    for (name, expected) in &one.grads {
        let Some(grad) = found.grads.get(name) else { return f64::INFINITY };
        let difference: Vec<f64> =
            expected.iter().zip(grad).map(|(a, b)| distance(*a, *b)).collect();
        let part = norm(&difference) / norm(expected).max(floor).max(f64::MIN_POSITIVE);
        squares += part * part;
    }
    (squares / (1 + one.grads.len()) as f64).sqrt()
}

pub(super) fn compare(mesh: Mesh, sequence: bool, one: &Computed, found: &Computed) -> Line {
    // What is infinite would make all other differences small.
    let largest = |values: &[f64]| {
        values.iter().filter(|x| x.is_finite()).fold(0.0_f64, |m, x| m.max(x.abs()))
    };
    let floor = 1e-3 * one.grads.values().map(|grad| largest(grad)).fold(0.0, f64::max);
    let worst = "loss".to_owned();
    let (experts, error) = (ExpertParallel::NONE, 0.0);
    let distance_all = distance_of(one, found);
    let mut line =
        Line { mesh, experts, sequence, error, distance: distance_all, worst, is_ok: true };
    line.error = distance(one.loss, found.loss) / largest(&[one.loss]).max(f64::MIN_POSITIVE);
    for (name, expected) in &one.grads {
        let Some(grad) = found.grads.get(name) else {
            return Line { error: f64::INFINITY, worst: name.clone(), is_ok: false, ..line };
        };
        let worst = expected.iter().zip(grad).map(|(a, b)| distance(*a, *b)).fold(0.0, f64::max);
        let error = worst / largest(expected).max(floor).max(f64::MIN_POSITIVE);
        if error > line.error {
            (line.error, line.worst) = (error, name.clone());
        }
    }
    line
}

/// Answers, given what the numbers are called, and whether they are rounded to that.
pub(super) fn finish(
    args: &Args,
    (dtype, is_rounded): (&str, bool),
    one: &Computed,
    lines: Vec<Line>,
    refused: Vec<Refused>,
) -> Result<Exit, Failure> {
    for (mesh, diagnostics) in &refused {
        let why = diagnostics.iter().map(|d| d.headline.as_str()).collect::<Vec<_>>().join(", ");
        output::note(&format!("note: {mesh} does not fit: {why}"));
    }
    if !lines.iter().any(|line| line.mesh.ranks() == args.ranks) {
        let headline = format!("no mesh of {} ranks fits `{}`", args.ranks, args.model);
        let most = lines.iter().map(|line| line.mesh.ranks()).max().unwrap_or(1);
        let help = format!("of its divisors, {most} is the most ranks that fit");
        return Err(Diagnostic::error("E5007", Span::of("--ranks"), headline).help(help).into());
    }
    let failed = lines.iter().filter(|line| !line.is_ok).count();
    if args.json {
        let document = Verify {
            model: args.model.to_string(),
            dtype: dtype.to_owned(),
            ok: failed == 0,
            loss: Some(one.loss).filter(|loss| loss.is_finite()),
            meshes: lines.iter().map(mesh_row).collect(),
        };
        output::answer_json(&document.to_json());
    } else {
        output::answer(&table(&lines).text());
    }
    if failed == 0 {
        output::note(&match args.ranks {
            _ if is_rounded => {
                format!(
                    "{} in {dtype}: as near to f64 as rounding to it allows",
                    plans(lines.len())
                )
            }
            1 => format!("one rank agrees with the interpreter in {dtype}"),
            _ => format!("{} plans agree with one rank in {dtype}", lines.len()),
        });
        return Ok(Exit::Success);
    }
    let (headline, note) = match args.ranks {
        1 => (
            "one rank computes something else than the interpreter".to_owned(),
            "try --bisect-rules: it says whether a rule or a kernel is at fault",
        ),
        _ => (
            format!("{failed} of {} plans compute something else", lines.len()),
            "each step must yield the loss and the gradients of one rank",
        ),
    };
    Err(Diagnostic::error("E5008", Span::of(&args.model), headline).note(note).into())
}

fn plans(count: usize) -> String {
    format!("{count} plan{}", if count == 1 { "" } else { "s" })
}

fn mesh_row(line: &Line) -> MeshRow {
    let Mesh { pp, dp, cp, tp, .. } = line.mesh;
    MeshRow {
        pp: pp as u64,
        dp: dp as u64,
        cp: cp as u64,
        tp: tp as u64,
        ep: line.experts.ep as u64,
        etp: if line.experts.takes_tp { 1 } else { tp as u64 },
        sequence: line.sequence,
        error_max: line.error,
        distance: line.distance,
        worst: line.worst.clone(),
        ok: line.is_ok,
    }
}

fn table(lines: &[Line]) -> Table {
    let mut table = Table::new(["mesh", "sequence cut", "max error", "", "of"]);
    for line in lines {
        table.row([
            match line.experts {
                ExpertParallel { ep: 1, .. } => line.mesh.to_string(),
                ExpertParallel { ep, takes_tp: false } => format!("{} ep={ep}", line.mesh),
                ExpertParallel { ep, takes_tp: true } => format!("{} ep={ep} etp=1", line.mesh),
            },
            if line.sequence { "yes" } else { "no" }.to_owned(),
            format!("{:.1e}", line.error),
            if line.is_ok { "ok" } else { "FAILED" }.to_owned(),
            line.worst.clone(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(one: (f64, &[f64]), found: (f64, &[f64])) -> Line {
        let computed = |(loss, grad): (f64, &[f64])| Computed {
            loss,
            grads: BTreeMap::from([("w".to_owned(), grad.to_vec())]),
        };
        let mesh = Mesh::ONE;
        let line = compare(mesh, false, &computed(one), &computed(found));
        Line { is_ok: line.error <= error_max(DType::F64), ..line }
    }

    #[test]
    fn what_is_no_number_equals_itself_alone() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        for loss in [nan, inf, -inf, 0.0, 1.0] {
            let same = line((loss, &[nan, inf, -inf, 2.0]), (loss, &[nan, inf, -inf, 2.0]));
            assert!(same.is_ok && same.error == 0.0, "{loss}: {}", same.error);
        }
        for (a, b) in [(nan, 1.0), (1.0, nan), (inf, nan), (inf, -inf), (1.0, inf), (inf, 1.0)] {
            let loss = line((a, &[1.0]), (b, &[1.0]));
            assert!(!loss.is_ok && loss.worst == "loss", "{a} and {b}: {}", loss.error);
            let grad = line((1.0, &[a, 1.0]), (1.0, &[b, 1.0]));
            assert!(!grad.is_ok && grad.worst == "w", "{a} and {b}: {}", grad.error);
        }
        // An infinite element hides no other.
        let beside = line((nan, &[inf, 1.0]), (nan, &[inf, 1.1]));
        assert!(!beside.is_ok && beside.worst == "w", "{}", beside.error);
    }
}
