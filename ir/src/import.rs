//! Model descriptions in, a [`Model`] out: what to compute, from which weights.
//!
//! Two steps. [`resolve`] reads a description: a Hugging Face directory or its `config.json`, the
//! name of a preset, a `.graph` text. [`import`] builds the module for training and evaluation from
//! it, [`decoding`] the one for generation with a static cache. Neither reads weights: each
//! [`Weight`] says in which tensor of a checkpoint it stands, and how it starts without one.
//!
//! # Entries
//!
//! | entry | parameters | results |
//! |---|---|---|
//! | `loss` | weights…, `tokens`, `labels`, `key` if anything is dropped | `loss_sum`, `count` |
//! | `loss_eval` | weights…, `tokens`, `labels`; only beside a `loss` with `key` | the same |
//! | `logits` | weights…, `tokens` | `logits` |
//! | `decode` | weights…, caches…, `tokens`, `position`, see [`decoding`] | `logits`, caches… |
//!
//! Labels are shifted by the caller; negative ones count for nothing. Layers are calls of one
//! function `block`, so that what happens per function does not grow with depth.
//!
//! # Diagnostics
//!
//! | code | what is wrong | exit code |
//! |---|---|--:|
//! | `E1101` | a model that is not there: no preset, no file, no model directory | 2 |
//! | `E1102` | a file that cannot be read | 7 |
//! | `E1103` | a `config.json` that is no JSON object | 6 |
//! | `E1104` | a field that is missing, of the wrong type or out of range | 6 |
//! | `E1105` | fields that contradict each other | 6 |
//! | `E1106` | a kind of model that is not supported | 4 |
//! | `E1107` | a feature of a supported kind that is not supported | 4 |
//! | `E1108` | an option that does not fit the model | 2 |
//!
//! A `.graph` text may also have what the chapter of this crate lists for texts.

mod config;
mod decoding;
mod entry;
mod gpt2;
mod graph;
mod layers;
mod llama;
mod nearest;
pub mod onnx;
mod preset;
mod resolve;
mod sizes;

use std::ops::Range;

use crate::{DType, Diagnostic, Module, Span};

pub use config::{Activation, read_config};
pub use decoding::{Cache, Decoding, DecodingOptions, LogitsOf, decoding};
pub use entry::check_positions;
pub use gpt2::Gpt2Config;
pub use graph::read_graph;
pub use llama::LlamaConfig;
pub use nearest::{nearest, nearest_within};
pub use preset::{PRESETS, preset};
pub use resolve::{Resolved, resolve};
pub use sizes::{BertSizes, LowRankSizes, RoutedSizes, Sizes, T5Sizes};

use entry::Family;

/// A description of a model, before it is known what it is built for.
#[derive(Clone, Debug)]
pub struct Description {
    /// The name: of the preset, or of the directory or file.
    pub name: String,
    /// What it is.
    pub architecture: Architecture,
    /// The element type of the stored weights, where the description says it.
    pub stored: Option<DType>,
}

/// The kinds of models.
#[derive(Clone, Debug, PartialEq)]
pub enum Architecture {
    /// GPT-2, and GPT-3 as it was published.
    Gpt2(Gpt2Config),
    /// Llama, of all versions.
    Llama(LlamaConfig),
    /// A module written as text.
    Graph(Box<Module>),
    /// A transformer whose sizes are known, and that is not built.
    Sized(Sizes),
}

impl Architecture {
    fn family(&self) -> Option<&dyn Family> {
        match self {
            Architecture::Gpt2(config) => Some(config),
            Architecture::Llama(config) => Some(config),
            Architecture::Graph(_) | Architecture::Sized(_) => None,
        }
    }
}

/// What [`import`] builds for. There are no defaults: the caller decides.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Tokens in a sequence.
    pub seq: usize,
    /// The element type of weights and activations.
    pub dtype: DType,
    /// The probability of every dropout in `loss`, 0 for none; as the model's config has it where
    /// this is not given.
    pub dropout: Option<f64>,
}

/// A model: its module and what its entries take.
#[derive(Clone, Debug)]
pub struct Model {
    /// The name, as the user knows it.
    pub name: String,
    /// The functions; `B` is left unbound.
    pub module: Module,
    /// The names of the entries.
    pub entries: Vec<String>,
    /// The first parameters of every entry, in order.
    pub weights: Vec<Weight>,
    /// What it was built from.
    pub config: Architecture,
    /// How many different tokens there are; 0 where a graph does not say.
    pub vocab: usize,
    /// The longest sequence that the model was made for; of a graph, the length asked for.
    pub positions_max: usize,
    /// How often `block` is called.
    pub layer_count: usize,
}

impl Model {
    /// How many numbers the weights are; a tied weight counts once.
    pub fn param_count(&self) -> u64 {
        self.weights.iter().map(Weight::count).sum()
    }
}

/// A weight: a parameter of the entries.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// The parameter's name, such as `h.0.attn.wq`.
    pub name: String,
    /// The parameter's dims.
    pub dims: Vec<usize>,
    /// How it starts without a checkpoint.
    pub init: Init,
    /// Where a checkpoint has it.
    pub source: Source,
    /// The layer that it belongs to; none for the embedding and what follows the last layer.
    pub layer: Option<usize>,
}

impl Weight {
    /// How many numbers it is.
    pub fn count(&self) -> u64 {
        self.dims.iter().map(|d| *d as u64).product()
    }

    /// Whether it is a matrix or table, which weight decay usually applies to, and no bias or norm.
    pub fn is_matrix(&self) -> bool {
        self.source.dims.len() > 1
    }
}

/// How a weight starts without a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Drawn from a normal distribution around zero.
    Normal {
        /// The standard deviation.
        std: f64,
    },
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
}

/// Where a checkpoint has a weight: a tensor, or some columns of it.
///
/// The columns in row-major order are the elements of the weight in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The tensor's name; others under which checkpoints have it follow the one that is written.
    pub names: Vec<String>,
    /// The dims of the whole tensor.
    pub dims: Vec<usize>,
    /// The range of its last dim; none for all of it.
    pub columns: Option<Range<usize>>,
}

impl Source {
    /// The name under which the tensor is written.
    pub fn name(&self) -> &str {
        &self.names[0]
    }
}

/// Whether a tensor of a checkpoint is a constant that old versions saved beside the weights: the
/// causal mask of GPT-2, the frequencies of the rotary embedding.
pub fn is_buffer(tensor: &str) -> bool {
    [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"].iter().any(|b| tensor.ends_with(b))
}

/// The exit code of a diagnostic's code, from the table above; 6, a bad file, for any other.
pub fn exit_code(code: &str) -> u8 {
    match code {
        "E1101" | "E1108" | "E1112" | "E1113" => 2,
        "E1106" | "E1107" | "E1111" => 4,
        "E1102" => 7,
        _ => 6,
    }
}

/// Builds the entries `loss` and `logits` of a model; a graph has the entries that it has.
///
/// # Errors
/// `E1108` for options that do not fit the model.
pub fn import(description: &Description, options: &Options) -> Result<Model, Vec<Diagnostic>> {
    let family: &dyn Family = match &description.architecture {
        Architecture::Gpt2(config) => config,
        Architecture::Llama(config) => config,
        Architecture::Graph(module) => {
            return Ok(graph::import_graph(description, module, options));
        }
        Architecture::Sized(_) => return Err(vec![not_built(description)]),
    };
    entry::check_options(family, options)?;
    let mut module = Module::new(module_name(&description.name));
    let entries = entry::training(&mut module, family, options);
    Ok(model(description, family, module, entries))
}

/// The diagnostic of a model of which only the sizes are known.
fn not_built(description: &Description) -> Diagnostic {
    let name = &description.name;
    let headline = format!("`{name}` can be planned for on GPUs, and not be built");
    let help = "ask `plan`, `fit`, `score`, `compare`, `cost` or `size`";
    Diagnostic::error("E1106", Span::of(name.clone()), headline).help(help)
}

fn model(
    description: &Description,
    family: &dyn Family,
    module: Module,
    entries: Vec<String>,
) -> Model {
    let sizes = family.sizes();
    Model {
        name: description.name.clone(),
        module,
        entries,
        weights: family.weights().all(),
        config: description.architecture.clone(),
        vocab: sizes.vocab,
        positions_max: sizes.positions_max,
        layer_count: sizes.layers,
    }
}

/// The name with everything replaced that a module's name cannot have.
fn module_name(name: &str) -> String {
    let word = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let name: String = name.chars().map(word).collect();
    if name.starts_with(|c: char| c.is_ascii_alphabetic()) { name } else { format!("m{name}") }
}

#[cfg(test)]
mod tests;
