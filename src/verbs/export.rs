//! `export`: a run as a directory that transformers reads, a model as text or as a picture.

mod dot;
mod hf;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use ir::DType;
use ir::import::{Options, resolve};

use crate::cli::positive;
use crate::failure::{Exit, Failure, usage};
use crate::job::{self, positions_max};
use crate::output;

/// Flags of `export`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A run (for hf), or a model (for dot and graph)
    #[arg(value_name = "RUN|MODEL")]
    pub source: String,
    /// What to write: a directory for transformers, a picture for Graphviz, or a .graph text
    #[arg(long, value_enum)]
    pub to: Format,
    /// The directory of hf; the file of dot and graph [default: stdout]
    #[arg(short, long, value_name = "PATH", required_if_eq("to", "hf"))]
    pub output: Option<PathBuf>,
    /// Tokens of a sequence, for dot and graph [default: the longest the model was made for]
    #[arg(long, alias = "seq-length", value_name = "N", value_parser = positive)]
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
}

/// Answers.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let text = match args.to {
        Format::Hf => return run_to_hf(args),
        Format::Dot => dot::print(&module(args)?),
        Format::Graph => module(args)?.to_string(),
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
    let written = hf::export(Path::new(&args.source), folder)?;
    output::answer(&written.join("\n"));
    Ok(Exit::Success)
}

/// The module of a model, as it is imported.
fn module(args: &Args) -> Result<ir::Module, Failure> {
    let description = resolve(&args.source)?.description;
    let seq = args.seq.unwrap_or_else(|| positions_max(&description));
    let dtype = args.dtype.unwrap_or(DType::F32);
    Ok(crate::import(&description, &Options { seq, dtype, dropout: None })?.module)
}
