//! `export`: a run as a directory that transformers reads, a model as text or as a picture, a plan
//! in the terms of another tool.

mod dot;
mod groups;
mod hf;

use std::path::PathBuf;

use clap::ValueEnum;
use ir::import::Options;
use ir::{DType, Diagnostic, Span};
use planner::configuration::Configuration;
use planner::elaborate::Name;
use planner::estimate::profile::{ExpertPlacement, GANTLINE};
use planner::search::interop::{NO_SCORES, Tool, Use, export};
use serde_json::Value;

use crate::argument::{PathArg, length};
use crate::failure::{Exit, Failure, read_text, usage};
use crate::job::{self, positions_max};
use crate::output;
use crate::planned;
use crate::run::Run;

/// Flags of `export`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A run (for hf), a model or run (for dot and graph), or a plan: its text, or what `plan
    /// --json` prints about GPUs
    #[arg(value_name = "RUN|MODEL|PLAN")]
    pub source: PathArg,
    /// What to write: a directory for transformers, a picture for Graphviz, a .graph text, or a
    /// plan in another tool's terms
    #[arg(long, value_enum)]
    pub to: Format,
    /// The directory of hf; the file of the others [default: stdout]
    #[arg(short, long, value_name = "PATH", required_if_eq("to", "hf"))]
    pub output: Option<PathBuf>,
    /// The group whose share is exported, of a plan over groups [default: all, if they lie alike]
    #[arg(long, value_name = "NAME")]
    pub group: Option<String>,
    /// Leave out what the tool cannot express, and say so, where the plan needs it
    #[arg(long)]
    pub lossy: bool,
    /// The model of a plan's text, where the plan names no preset
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathArg>,
    /// Tokens of a sequence, for dot and graph [default: the longest the model was made for]
    #[arg(long, alias = "seq-length", value_name = "N", value_parser = length)]
    pub seq: Option<usize>,
    /// The element type, for dot and graph [default: f32]
    #[arg(long, value_name = "TYPE", value_parser = job::dtype)]
    pub dtype: Option<DType>,
}

/// What can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// config.json, model.safetensors and tokenizer.json, as transformers reads them
    Hf,
    /// Graphviz: a box for each operation, a frame for each function
    Dot,
    /// The text form of modules, which every verb reads as a model
    Graph,
    /// Flags of Megatron-LM
    Megatron,
    /// The JSON of DeepSpeed
    Deepspeed,
    /// The TOML of torchtitan
    Torchtitan,
    /// The JSON of an execution of Calculon
    Calculon,
}

/// Answers.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let is_plan =
        !matches!(args.to, Format::Hf | Format::Dot | Format::Graph) || args.group.is_none();
    if !is_plan {
        let headline = "a run or a model has no groups of devices".to_owned();
        return Err(usage("--group", headline).help("leave it out").into());
    }
    let text = match args.to {
        Format::Hf => return run_to_hf(args),
        Format::Dot => dot::print(&module(args)?),
        Format::Graph => module(args)?.to_string(),
        Format::Megatron => plan(args, Tool::Megatron)?,
        Format::Deepspeed => plan(args, Tool::DeepSpeed)?,
        Format::Torchtitan => plan(args, Tool::Torchtitan)?,
        Format::Calculon => plan(args, Tool::Calculon)?,
    };
    match &args.output {
        Some(path) => {
            std::fs::write(path, &text).map_err(runtime::Error::io("write", path))?;
            output::note(&format!("wrote {}", path.display()));
        }
        None => output::answer(&text),
    }
    Ok(Exit::Success)
}

fn run_to_hf(args: &Args) -> Result<Exit, Failure> {
    if args.seq.is_some() || args.dtype.is_some() {
        let headline = "a run has its own length of sequences and element type";
        return Err(usage("--to hf", headline).help("leave --seq and --dtype out").into());
    }
    let Some(folder) = &args.output else {
        return Err(usage("--output", "there is no directory").help("write -o DIR").into());
    };
    let written = hf::export(args.source.path(), folder)?;
    output::answer(&written.join("\n"));
    Ok(Exit::Success)
}

/// A plan in the terms of a tool.
fn plan(args: &Args, tool: Tool) -> Result<String, Failure> {
    let source = &args.source.to_string();
    let bad = |headline: String| Diagnostic::error("E5005", Span::of(source), headline);
    let text = read_text(&args.source, "PLAN")?;
    if planned::is_plan(&text) {
        return whole_plan(args, &text, tool);
    }
    let document: Value = serde_json::from_str(&text).map_err(|error| {
        let help = "write it with `gantline plan MODEL --cluster h100 --devices 64 -o plan.json`";
        bad(format!("not JSON: {error}")).help(help)
    })?;
    if document["schema"] == groups::SCHEMA {
        let (whole, purpose) =
            groups::configuration((source, &document), args.group.as_deref(), tool)?;
        return exported(args, &told(&whole, &document), purpose, tool);
    }
    if args.group.is_some() {
        let headline = format!("`{source}` is a plan of devices that are alike");
        return Err(usage("--group", headline).help("leave it out").into());
    }
    let words = document["text"].as_str();
    let number = |name: &str| {
        let number = document[name].as_u64().and_then(|n| u32::try_from(n).ok());
        number.filter(|n| *n > 0).ok_or_else(|| bad(format!("`{name}` is no count")))
    };
    let words = words.ok_or_else(|| bad("`text` is missing: this is no plan for GPUs".into()))?;
    let configuration: Configuration = words.parse()?;
    let purpose =
        Use { global_batch: number("gbs")?, seq: number("seq")?, layers: number("layers")? };
    configuration.check(purpose.layers)?;
    if configuration.microbatch_count(purpose.global_batch.into()).is_none() {
        let headline = format!("{} samples are no multiple of dp · mbs", purpose.global_batch);
        return Err(bad(headline).into());
    }
    exported(args, &told(&configuration, &document), purpose, tool)
}

/// The text of a plan in the terms of a tool. What only the text decides is not exported.
fn whole_plan(args: &Args, text: &str, tool: Tool) -> Result<String, Failure> {
    let source = &args.source.to_string();
    let model = args.model.as_ref().map(PathArg::path);
    let read = planned::read(source, text, model)?;
    let Name { configuration, differences } = &read.name;
    if *differences > 0 {
        let headline =
            format!("{differences} decisions of the plan are not in its name `{configuration}`");
        let help = "no tool expresses them: plan again, and export that";
        return Err(Diagnostic::error("E5005", Span::of(source), headline).help(help).into());
    }
    if let Some(lora) = read.plan.lora.as_ref().filter(|_| !args.lossy) {
        let headline = format!("the plan trains adapters (`{lora}`), and tools' files all weights");
        let help = "write `--lossy`, and the layout into the fine-tuning recipe";
        return Err(Diagnostic::error("E5005", Span::of(source), headline).help(help).into());
    }
    let size = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let layers = size(read.model.layer_count);
    let purpose =
        Use { global_batch: size(read.plan.global_batch_size()), seq: size(read.plan.seq), layers };
    exported(
        args,
        &GANTLINE.experts.told(ExpertPlacement::FromTensor, configuration),
        purpose,
        tool,
    )
}

/// The layout of a document, as other tools mean it: those of ours place experts otherwise.
fn told(c: &Configuration, document: &Value) -> Configuration {
    match document["executor"]["profile"].as_str() {
        Some(profile) if profile != GANTLINE.name => c.clone(),
        Some(_) | None => GANTLINE.experts.told(ExpertPlacement::FromTensor, c),
    }
}

/// A configuration in the terms of a tool. Decisions that the tool cannot express are an error, or
/// go to stderr with `--lossy`.
fn exported(
    args: &Args,
    configuration: &Configuration,
    purpose: Use,
    tool: Tool,
) -> Result<String, Failure> {
    let exported = export(configuration, purpose, tool);
    let lost = exported.left_out.iter().filter(|what| **what != NO_SCORES);
    let lost: Vec<&str> = lost.map(String::as_str).collect();
    if lost.is_empty() {
        if !exported.left_out.is_empty() {
            output::note(&format!("{} knows no {NO_SCORES}", tool.title()));
        }
        return Ok(exported.text);
    }
    let headline = format!("{} cannot express this plan: {}", tool.title(), lost.join(", "));
    if args.lossy {
        output::note(&format!("{headline}; that is left out"));
        return Ok(exported.text);
    }
    let help = "plan without it, with `--forbid` or `--fix`, or write `--lossy` to leave it out";
    Err(Diagnostic::error("E5010", Span::of(args.source.to_string()), headline).help(help).into())
}

/// The module of a model, as it is imported.
fn module(args: &Args) -> Result<ir::Module, Failure> {
    let description = Run::model(&args.source)?;
    let seq = args.seq.unwrap_or_else(|| positions_max(&description));
    let dtype = args.dtype.unwrap_or(DType::F32);
    Ok(crate::import(&description, &Options { seq, dtype, dropout: None, documents: false })?
        .module)
}
