//! `inspect MODEL`: what a model is; of a compiled file the programs, see `compiled.rs`.

mod compiled;
mod kernels;
mod resources;

use std::collections::BTreeMap;

use ir::import::{Architecture, Model, Options};
use ir::{DType, Diagnostic, Function};
use serde_json::Value;

use crate::argument::{PathArg, length};
use crate::artefact::is_artefact;
use crate::documents::{self, Document, LayerRow};
use crate::failure::{Exit, Failure, usage};
use crate::flops::forward_flops;
use crate::job::{self, positions_max};
use crate::onnx;
use crate::ops::{function_row, layers, op_table};
use crate::output::{self, Table};
use crate::run::Run;
use crate::verbs::fusions::{self, Fusions};

/// Flags of `inspect`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The model: a directory, that of a run too, a config.json, a .graph text, an ONNX file or a
    /// preset; of a .gtl the plan, the kernels and each rank's program are printed
    pub model: PathArg,
    /// Tokens of a sequence, for what depends on it; the model's longest by default
    #[arg(long, alias = "seq-length", value_name = "N", value_parser = length)]
    pub seq: Option<usize>,
    /// The element type of weights; that of the checkpoint by default
    #[arg(long, value_name = "TYPE", value_parser = job::dtype)]
    pub dtype: Option<DType>,
    /// Give a dim that an ONNX file leaves open its size
    #[arg(long, value_name = "NAME=N", value_parser = onnx::dim)]
    pub dim: Vec<(String, usize)>,
    /// Of a .gtl that was compiled for GPUs: each device function, what it takes at least, and
    /// where NVRTC is installed its registers, shared memory and occupancy
    #[arg(long)]
    pub kernels: bool,
    /// Say what rewriting makes of each function, by which rules, and what is launched then
    #[arg(long)]
    pub fusions: bool,
    /// Say by which rules a value came about
    #[arg(long, value_name = "VALUE")]
    pub explain: Option<String>,
    /// Leave a rule out; may be given several times
    #[arg(long, value_name = "RULE")]
    pub no_rule: Vec<String>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// What a part of the model holds and does: the embedding, a layer, what follows the last one.
struct Part {
    name: String,
    count: usize,
    params: u64,
    flops: Option<u64>,
}

/// Answers.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    if is_artefact(args.model.path()) {
        return compiled::run(args);
    }
    check_flags(args)?;
    if onnx::is_onnx(args.model.path()) {
        if args.fusions || args.explain.is_some() {
            let module = onnx::outlined(args.model.path(), &args.dim)?.module;
            return show(args, &fusions::report_of(module, &args.no_rule)?);
        }
        return onnx::inspect(args.model.path(), &args.dim, args.json);
    }
    let description = Run::model(&args.model)?;
    let seq = args.seq.unwrap_or_else(|| positions_max(&description));
    let dtype = args.dtype.or(description.stored).unwrap_or(DType::F32);
    let model =
        crate::import(&description, &Options { seq, dtype, dropout: Some(0.0), documents: false })?;
    if args.fusions || args.explain.is_some() {
        return show(args, &fusions::report(&model, &args.no_rule)?);
    }
    let flops = entry(&model).and_then(|entry| forward_flops(&model.module, &entry.name));
    if args.json {
        output::answer_json(&document(&model, seq, dtype, flops));
    } else {
        output::answer(&page(&model, seq, dtype, flops));
    }
    Ok(Exit::Success)
}

/// What only one of the two kinds of models takes.
fn check_flags(args: &Args) -> Result<(), Vec<Diagnostic>> {
    let is_onnx = onnx::is_onnx(args.model.path());
    let said = |flag: &'static str, is_wrong: bool, what: &str| {
        let headline = format!("`{}` is {what}", args.model);
        is_wrong.then(|| usage(flag, headline).help("leave the flag out"))
    };
    let own = "an ONNX file, which has sizes and types of its own";
    let wrong: Vec<Diagnostic> = [
        said("--kernels", args.kernels, "no compiled file, and has no kernels yet"),
        said("--seq", is_onnx && args.seq.is_some(), own),
        said("--dtype", is_onnx && args.dtype.is_some(), own),
        said("--dim", !is_onnx && !args.dim.is_empty(), "no ONNX file, and has no dims to give"),
    ]
    .into_iter()
    .flatten()
    .collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

/// Says what rewriting does.
fn show(args: &Args, fusions: &Fusions) -> Result<Exit, Failure> {
    if let Some(why) = &fusions.refused {
        output::note(&format!("note: no launches are listed: {why}"));
    }
    match &args.explain {
        Some(value) => output::answer(&fusions::explain(fusions, value)?),
        None if args.json => output::answer_json(&fusions::document(fusions)),
        None => output::answer(&fusions::page(fusions)),
    }
    Ok(Exit::Success)
}

/// Whether operations can be counted by tokens: a graph need not have any.
fn is_of_tokens(model: &Model) -> bool {
    model.vocab > 0
}

fn parts(model: &Model) -> Vec<Part> {
    let is_uniform = match &model.config {
        Architecture::Family(family) => family.kinds().iter().all(|kind| *kind == 0),
        Architecture::Graph(_) | Architecture::Sized(_) => false,
    };
    if !is_uniform {
        return called_parts(model);
    }
    let params = |is_in: &dyn Fn(Option<usize>, usize) -> bool| -> u64 {
        let weights = model.weights.iter().enumerate();
        weights.filter(|(at, w)| is_in(w.layer, *at)).map(|(_, w)| w.count()).sum()
    };
    let first = model.weights.iter().position(|w| w.layer.is_some()).unwrap_or(0);
    let flops = |name| forward_flops(&model.module, name);
    let part =
        |name: &str, count, params, flops| Part { name: name.to_owned(), count, params, flops };
    vec![
        part("embed", 1, params(&|l, at| l.is_none() && at < first), flops("embed")),
        part("block", model.layer_count, params(&|l, _| l == Some(0)), flops("block")),
        part("head", 1, params(&|l, at| l.is_none() && at >= first), flops("head_logits")),
    ]
}

/// The entry that says what a model is.
fn entry(model: &Model) -> Option<&Function> {
    let logits = model.module.function("logits");
    logits.or_else(|| model.module.function(model.entries.first()?))
}

/// What the functions that a graph's entry calls hold and do, equal ones that follow each other as
/// one part. A weight is of the first that takes it; what none takes comes last.
fn called_parts(model: &Model) -> Vec<Part> {
    let Some(main) = entry(model) else { return Vec::new() };
    let mut left: BTreeMap<&str, u64> =
        model.weights.iter().map(|weight| (weight.name.as_str(), weight.count())).collect();
    let mut parts: Vec<Part> = Vec::new();
    for node in &main.nodes {
        let Some(callee) = node.callee().and_then(|name| model.module.function(name)) else {
            continue;
        };
        let given = node.operands.iter().map(|operand| main.value(*operand).name.as_str());
        let params: u64 = given.filter_map(|name| left.remove(name)).sum();
        match parts.last_mut() {
            Some(last) if last.name == callee.name && last.params == params => last.count += 1,
            _ => parts.push(Part {
                name: callee.name.clone(),
                count: 1,
                params,
                flops: forward_flops(&model.module, &callee.name),
            }),
        }
    }
    let params: u64 = left.values().sum();
    if params > 0 {
        parts.push(Part { name: format!("@{}", main.name), count: 1, params, flops: None });
    }
    parts
}

fn page(model: &Model, seq: usize, dtype: DType, flops: Option<u64>) -> String {
    let count = model.param_count();
    let mut text = format!("{}\n", model.name);
    text += &format!("  parameters  {}", output::count(count));
    text += &format!(" ({} in {dtype})\n", output::bytes(count * dtype.size()));
    if is_of_tokens(model) {
        text += &format!("  layers      {}\n", model.layer_count);
        text += &format!("  tokens      {} known", output::count(model.vocab as u64));
        text += &format!(", sequences of up to {}\n", output::count(model.positions_max as u64));
    }
    if let Some(flops) = flops {
        let (unit, forward) = match is_of_tokens(model) {
            true => ("token", flops as f64 / seq as f64),
            false => ("sample", flops as f64),
        };
        let show = |flops: f64| output::flops(flops.round() as u64);
        text += &format!("  per {unit:<7} {} forward", show(forward));
        text += &format!(", {} forward and backward", show(3.0 * forward));
        text +=
            &if is_of_tokens(model) { format!(", in a sequence of {seq}\n") } else { "\n".into() };
    }
    if is_of_tokens(model) {
        text += &format!("\n{}", part_table(model, seq, dtype).text());
    }
    text += &format!("\n{}", op_table(&model.module).text());
    text
}

fn part_table(model: &Model, seq: usize, dtype: DType) -> Table {
    let mut table = Table::new(["layer", "times", "parameters", "weights", "forward/token"]);
    for Part { name, count, params, flops } in parts(model) {
        let flops = flops.map(|flops| output::flops((flops as f64 / seq as f64).round() as u64));
        table.row([
            name,
            count.to_string(),
            output::count(params),
            output::bytes(params * dtype.size()),
            flops.unwrap_or_default(),
        ]);
    }
    table
}

fn document(model: &Model, seq: usize, dtype: DType, flops: Option<u64>) -> Value {
    let per = if is_of_tokens(model) { ("token", seq as f64) } else { ("sample", 1.0) };
    let functions = layers(&model.module).map(|f| function_row(&model.module, f)).collect();
    let parts = if is_of_tokens(model) { parts(model) } else { Vec::new() };
    let layer = |part: Part| LayerRow {
        name: part.name,
        count: part.count as u64,
        params: part.params,
        weight_bytes: part.params * dtype.size(),
        flops_forward_per_token: part.flops.map(|flops| flops as f64 / seq as f64),
    };
    let forward = flops.map(|flops| flops as f64 / per.1);
    let flops = [("forward", forward), ("backward", forward.map(|flops| 2.0 * flops))];
    let document = documents::Inspect {
        model: model.name.clone(),
        params: model.param_count(),
        weight_bytes: model.param_count() * dtype.size(),
        dtype: dtype.name().to_owned(),
        vocab: model.vocab as u64,
        positions_max: model.positions_max as u64,
        layer_count: model.layer_count as u64,
        seq: seq as u64,
        entries: model.entries.clone(),
        layers: parts.into_iter().map(layer).collect(),
        functions,
        flops: flops.map(|(pass, flops)| (format!("flops_{pass}_per_{}", per.0), flops)).into(),
    };
    document.to_json()
}
