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
//! Labels are shifted by the caller; those of [`IGNORED`](crate::ids::IGNORED) count for nothing.
//! Layers are calls of one function `block`, or of one for each kind of layers (`block`,
//! `block_1`), so that what happens per function does not grow with depth.
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
//! | `W1109` | a field of a config that nobody reads | |
//! | `W1114` | weights that are stored in a form that is not read | |
//!
//! A `.graph` text may also have what the chapter of this crate lists for texts.

mod activation;
mod config;
mod decoding;
mod entry;
mod family;
mod graph;
mod nearest;
pub mod onnx;
mod preset;
mod resolve;
mod sizes;

use std::borrow::Cow;
use std::collections::BTreeSet;

use crate::random::DrawBits;
use crate::{DType, Diagnostic, Module, Span};

pub use activation::Activation;
pub use config::read_config;
pub use decoding::{Cache, Decoding, DecodingOptions, LogitsOf, decoding};
pub use entry::check_positions;
pub use family::{
    AttentionTraits, Family, FamilyModel, ParameterCounts, Preset, Ramp, Rotary, Scaling, Scope,
    Value, families, family,
};
pub use graph::read_graph;
pub use nearest::{nearest, nearest_within};
pub use preset::{preset, presets};
pub use resolve::{Resolved, resolve};
pub use sizes::{BertSizes, Sizes, T5Sizes};

/// A description of a model, before it is known what it is built for.
#[derive(Clone, Debug)]
pub struct Description {
    /// The name: of the preset, or of the directory or file.
    pub name: String,
    /// What it is.
    pub architecture: Architecture,
    /// The element type of the stored weights, where the description says it.
    pub stored: Option<DType>,
    /// Where stored matrices are codes with scales, the rows and columns of a block with one scale.
    pub scaled: Option<[usize; 2]>,
    /// What is not wrong and should be seen, such as fields that nobody reads.
    pub warnings: Vec<Diagnostic>,
}

/// The kinds of models.
#[derive(Clone, Debug, PartialEq)]
pub enum Architecture {
    /// A model of one of the [`families`].
    Family(Box<FamilyModel>),
    /// A module written as text.
    Graph(Box<Module>),
    /// A transformer whose sizes are known, and that is not built.
    Sized(Sizes),
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
    /// Whether samples are packed documents that are kept apart: the entries take `documents`,
    /// `i32[B, S]`, for each token the place of its document's first token in the sample.
    pub documents: bool,
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
    /// Whether it stays as it is in training: what transformers calls a buffer, or a parameter of
    /// a graph that is `frozen`.
    pub frozen: bool,
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
        /// The index in the first dim of a row of zeros: an embedding's token of padding.
        zero_row: Option<usize>,
    },
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
}

/// Where a checkpoint has a weight: a tensor, or a view of one; or several tensors of the same
/// dims, as if they were one, below each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The tensor's name; others under which checkpoints have it follow the one that is written.
    /// Of several tensors, `{}` in a name is the number of each.
    pub names: Vec<String>,
    /// The dims of the whole tensor, or of each.
    pub dims: Vec<usize>,
    /// How many tensors there are.
    pub count: usize,
    /// Where tensors may be codes of F8E4M3, the rows and columns of a block with one scale. The
    /// scales are a tensor of their own, under [`Source::scales_of`].
    pub scaled: Option<[usize; 2]>,
    /// The element of the tensor that is the weight's first.
    start: usize,
    /// Sizes and strides, outermost first: in row-major order of these axes the elements of the
    /// tensor are those of the weight.
    axes: Vec<(usize, usize)>,
}

impl Source {
    /// A whole tensor.
    pub fn whole(names: Vec<String>, dims: Vec<usize>) -> Source {
        let axes = vec![(dims.iter().product(), 1)];
        Source { names, dims, count: 1, scaled: None, start: 0, axes }
    }

    /// A view of a tensor: its first element, and sizes and strides, outermost first.
    pub fn view(
        names: Vec<String>,
        dims: Vec<usize>,
        start: usize,
        axes: impl IntoIterator<Item = (usize, usize)>,
    ) -> Source {
        let mut merged: Vec<(usize, usize)> = Vec::new();
        for (size, stride) in axes.into_iter().filter(|(size, _)| *size != 1) {
            match merged.last_mut() {
                Some(outer) if outer.1 == size * stride => *outer = (outer.0 * size, stride),
                _ => merged.push((size, stride)),
            }
        }
        if merged.is_empty() {
            merged.push((1, 1));
        }
        Source { names, dims, count: 1, scaled: None, start, axes: merged }
    }

    /// The tensor's element that is the weight's first, and for each dim of the weight the sizes
    /// and strides of its axes in the tensor, outermost first. None where an axis lies in two dims
    /// and cannot be split between them.
    pub(crate) fn by_dim(&self, dims: &[usize]) -> Option<(usize, Vec<Vec<(usize, usize)>>)> {
        let mut axes = self.axes.iter().rev().copied();
        let (mut size, mut stride) = axes.next()?;
        let mut by_dim = Vec::new();
        for dim in dims.iter().rev() {
            let (mut rest, mut own) = (*dim, Vec::new());
            while rest > 1 {
                if size == 1 {
                    (size, stride) = axes.next()?;
                    continue;
                }
                let here = if size.is_multiple_of(rest) { rest } else { size };
                if !rest.is_multiple_of(here) {
                    return None;
                }
                own.push((here, stride));
                (size, stride, rest) = (size / here, stride * here, rest / here);
            }
            own.reverse();
            by_dim.push(own);
        }
        by_dim.reverse();
        Some((self.start, by_dim))
    }

    /// The same view of several tensors, whose outermost axis counts them.
    pub(crate) fn of_several(self, count: usize) -> Source {
        Source { count, ..self }
    }

    /// The name under which the tensor is written.
    pub fn name(&self) -> &str {
        &self.names[0]
    }

    /// The names that the tensor of a number has in checkpoints, the one that is written first.
    pub fn names_of(&self, number: usize) -> impl Iterator<Item = Cow<'_, str>> {
        self.names.iter().map(move |name| match self.count {
            1 => Cow::Borrowed(name.as_str()),
            _ => Cow::Owned(name.replace("{}", &number.to_string())),
        })
    }

    /// The name of the scales of a tensor, as DeepSeek-V3 and transformers have it.
    pub fn scales_of(tensor: &str) -> String {
        format!("{tensor}_scale_inv")
    }

    /// The elements of one tensor.
    pub fn tensor_elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Whether the weight's elements are all of one tensor's, in their order.
    pub fn is_whole(&self) -> bool {
        self.count == 1 && self.axes == [(self.dims.iter().product(), 1)]
    }

    /// Whether the weight's elements are all of the tensor's, in whatever order.
    pub(crate) fn is_permuted(&self) -> bool {
        let elements: usize = self.axes.iter().map(|(size, _)| size).product();
        self.count == 1 && elements == self.dims.iter().product::<usize>()
    }

    /// Calls `each` with the first element and the length of each run of the tensor that `len`
    /// elements of the weight from `start` on are, in their order. Of several tensors, elements are
    /// counted through; a run is of one.
    pub fn each_run(&self, start: usize, len: usize, mut each: impl FnMut(usize, usize)) {
        let tensor = if self.count == 1 { usize::MAX } else { self.tensor_elements().max(1) };
        self.each_run_through(start, len, |mut from, len| {
            let end = from + len;
            while from < end {
                let here = (tensor - from % tensor).min(end - from);
                each(from, here);
                from += here;
            }
        });
    }

    /// As [`Source::each_run`], with runs that go on from one tensor to the next.
    fn each_run_through(&self, start: usize, len: usize, mut each: impl FnMut(usize, usize)) {
        let (size, stride) = self.axes.last().copied().unwrap_or((1, 1));
        let run = if stride == 1 { size } else { 1 };
        let (mut at, end) = (start, start + len);
        while at < end {
            let here = (end - at).min(run - at % run);
            let (mut rest, mut element) = (at, self.start);
            for (size, stride) in self.axes.iter().rev() {
                element += rest % size * stride;
                rest /= size;
            }
            each(element, here);
            at += here;
        }
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
        "E1101" | "E1108" | "E1112" | "E1113" | "E1201" | "E1202" | "E1203" | "E1204" => 2,
        "E1106" | "E1107" | "E1111" => 4,
        "E1102" => 7,
        _ => 6,
    }
}

/// Builds the entries `loss` and `logits` of a model; a graph has the entries that it has. Draws
/// have 16 bits.
///
/// # Errors
/// As [`import_drawing`].
pub fn import(description: &Description, options: &Options) -> Result<Model, Vec<Diagnostic>> {
    import_drawing(description, options, DrawBits::B16)
}

/// As [`import`], where dropout draws `bits`; a graph says itself how many bits its draws have.
///
/// # Errors
/// `E1108` for options that do not fit the model; those of [`crate::verify`] for a graph that does
/// not hold for sequences of the length.
pub fn import_drawing(
    description: &Description,
    options: &Options,
    bits: DrawBits,
) -> Result<Model, Vec<Diagnostic>> {
    let family = match &description.architecture {
        Architecture::Family(family) => family,
        Architecture::Graph(module) => {
            return graph::import_graph(description, module, options);
        }
        Architecture::Sized(_) => return Err(vec![not_built(description)]),
    };
    entry::check_options(family, options)?;
    let mut module = Module::new(module_name(&description.name));
    let entries = entry::training(&mut module, family, options, bits);
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
    family: &FamilyModel,
    mut module: Module,
    entries: Vec<String>,
) -> Model {
    let mut weights = family.weights().all();
    weights.iter_mut().for_each(|weight| weight.source.scaled = description.scaled);
    let frozen: BTreeSet<&str> =
        weights.iter().filter(|weight| weight.frozen).map(|weight| weight.name.as_str()).collect();
    if !frozen.is_empty() {
        crate::freeze::freeze(&mut module, |name| frozen.contains(name));
    }
    Model {
        name: description.name.clone(),
        module,
        entries,
        weights,
        config: description.architecture.clone(),
        vocab: family.size("V"),
        positions_max: family.size("P"),
        layer_count: family.layers.len(),
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
