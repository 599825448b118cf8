//! The functions of a module and its entries, the same for all families.

use super::layers::{Rates, key_type};
use super::{Init, Options, Source, Weight};
use crate::build::Builder;
use crate::dim::Dim;
use crate::module::{Kind, Module, ValueId};
use crate::op::Op;
use crate::types::TensorType;
use crate::{DType, Diagnostic, Span};

/// A family of models: what its functions compute, from parameters that are found by name.
pub(crate) trait Family {
    /// The sizes that entries and options depend on.
    fn sizes(&self) -> Sizes;
    /// The dropout of the config or, where one is given, that at every site the family has.
    fn rates(&self, given: Option<f64>) -> Rates;
    /// The weights.
    fn weights(&self) -> Weights;
    /// `tokens`, weights [, `position`] [, `key`] to activations.
    fn embed(&self, b: &mut Builder<'_>, rates: Rates) -> ValueId;
    /// `x`, weights [, `k_cache`, `v_cache`, `position`] [, `key`] to activations [and caches].
    fn block(&self, b: &mut Builder<'_>, rates: Rates) -> Vec<ValueId>;
    /// `x`, weights, `w_lm` to logits.
    fn head(&self, b: &mut Builder<'_>) -> ValueId;
}

/// The sizes that entries and options depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// How many different tokens there are.
    pub(crate) vocab: usize,
    /// The longest sequence that the model was made for.
    pub(crate) positions_max: usize,
    /// Whether positions beyond that have no weights.
    pub(crate) positions_are_learned: bool,
    /// Calls of `block`.
    pub(crate) layers: usize,
    /// The last dim of activations.
    pub(crate) model: usize,
    /// Query heads.
    pub(crate) heads: usize,
    /// The dims of a key: heads, and size of a head.
    pub(crate) key: [usize; 2],
}

/// The weights of a model, by the function that takes them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Weights {
    /// Of `embed`; the first is the table of tokens.
    pub(crate) embed: Vec<Weight>,
    /// Of `block`, for each layer.
    pub(crate) layers: Vec<Vec<Weight>>,
    /// Of `head`; the last is `lm_head`, unless it is tied to the table of tokens.
    pub(crate) head: Vec<Weight>,
    /// Whether it is.
    pub(crate) tied: bool,
}

impl Weights {
    /// All, in the order of the entries' parameters.
    pub(crate) fn all(self) -> Vec<Weight> {
        let layers = self.layers.into_iter().flatten();
        self.embed.into_iter().chain(layers).chain(self.head).collect()
    }
}

/// A weight that is a whole tensor.
pub(crate) fn weight(name: &str, dims: &[usize], init: Init, source: Source) -> Weight {
    Weight { name: name.to_owned(), dims: dims.to_vec(), init, source, layer: None }
}

/// The name that a function gives to a weight: `wq` for `h.0.attn.wq`, `ln1_w` for `h.0.ln1.w`.
fn param_name(weight: &Weight) -> String {
    let name = weight.layer.map_or(weight.name.as_str(), |layer| {
        weight.name.strip_prefix(&format!("h.{layer}.")).unwrap_or(&weight.name)
    });
    if name == "lm_head" {
        return "w_lm".to_owned();
    }
    name.trim_start_matches("attn.").trim_start_matches("mlp.").replace('.', "_")
}

/// The types of what is no weight.
pub(crate) struct Types {
    pub(crate) ids: TensorType,
    pub(crate) x: TensorType,
    pub(crate) dtype: DType,
}

impl Types {
    pub(crate) fn new(sizes: &Sizes, seq: usize, dtype: DType) -> Types {
        let dims = [Dim::symbol(Dim::BATCH), Dim::from(seq)];
        let ids = TensorType::new(DType::I32, dims.clone());
        let x = TensorType::new(dtype, dims.into_iter().chain([Dim::from(sizes.model)]));
        Types { ids, x, dtype }
    }
}

/// The diagnostics of options that do not fit the model.
pub(crate) fn check_options(family: &dyn Family, options: &Options) -> Result<(), Vec<Diagnostic>> {
    let mut wrong = Vec::new();
    if !options.dtype.is_float() {
        let headline = format!("`{}` is no floating-point type", options.dtype);
        wrong.push(Diagnostic::error("E1108", Span::of("--dtype"), headline));
    }
    if let Some(p) = options.dropout.filter(|p| !(0.0..1.0).contains(p)) {
        let headline = format!("a dropout of {p} is not in 0 ≤ p < 1");
        wrong.push(Diagnostic::error("E1108", Span::of("--dropout"), headline));
    }
    wrong.extend(check_seq(&family.sizes(), options.seq));
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

/// The diagnostic of a sequence with more tokens than a learned table of positions has rows.
pub fn check_positions(seq: usize, positions: usize) -> Option<Diagnostic> {
    let headline = format!("a sequence of {seq} tokens is longer than the model's {positions}");
    let found = Diagnostic::error("E1108", Span::of("--seq"), headline)
        .note("every position has a learned vector of its own")
        .help(format!("write `--seq {positions}` or less"));
    (seq > positions).then_some(found)
}

/// The diagnostic of a sequence that the model cannot take.
pub(crate) fn check_seq(sizes: &Sizes, seq: usize) -> Option<Diagnostic> {
    let wrong = |headline: String| Diagnostic::error("E1108", Span::of("--seq"), headline);
    if seq == 0 {
        return Some(wrong("a sequence of 0 tokens".into()));
    }
    let learned = sizes.positions_are_learned.then_some(sizes.positions_max);
    if let Some(found) = learned.and_then(|positions| check_positions(seq, positions)) {
        return Some(found);
    }
    let widest = sizes.vocab.max(sizes.model).max(sizes.heads.saturating_mul(seq));
    let fits = seq.checked_mul(widest).is_some_and(|n| n <= super::config::ELEMENTS_MAX);
    let why = || wrong(format!("one sequence of {seq} tokens has too many activations"));
    (!fits).then(why)
}

/// Adds the functions and entries for training and evaluation; returns the entries' names.
pub(crate) fn training(module: &mut Module, family: &dyn Family, options: &Options) -> Vec<String> {
    let maker = Maker::new(family, options.seq, options.dtype);
    let rates = family.rates(options.dropout);
    let trained = Body { embed: "embed", block: "block", rates };
    let mut evaluated = Body { rates: Rates::NONE, ..trained };
    maker.add_embed(module, &trained, &[]);
    maker.add_block(module, &trained, &[]);
    if rates.embed > 0.0 {
        evaluated.embed = "embed_eval";
        maker.add_embed(module, &evaluated, &[]);
    }
    if rates.in_block() {
        evaluated.block = "block_eval";
        maker.add_block(module, &evaluated, &[]);
    }
    maker.add_head_logits(module);
    maker.add_head(module);
    maker.add_entry(module, "loss", &trained, Ending::Loss);
    let mut entries = vec!["loss".to_owned()];
    if rates.any() {
        maker.add_entry(module, "loss_eval", &evaluated, Ending::Loss);
        entries.push("loss_eval".to_owned());
    }
    maker.add_entry(module, "logits", &evaluated, Ending::Logits);
    entries.push("logits".to_owned());
    entries
}

/// The functions that an entry calls before the head, and what they drop.
#[derive(Clone, Copy)]
pub(super) struct Body {
    pub(super) embed: &'static str,
    pub(super) block: &'static str,
    pub(super) rates: Rates,
}

/// What an entry ends with.
#[derive(Clone, Copy, PartialEq)]
enum Ending {
    Loss,
    Logits,
}

/// Values of an entry that are weights, by the function that takes them.
pub(super) struct Taken {
    pub(super) embed: Vec<ValueId>,
    pub(super) layers: Vec<Vec<ValueId>>,
    pub(super) head: Vec<ValueId>,
}

/// Adds functions of one family to a module.
pub(super) struct Maker<'f> {
    family: &'f dyn Family,
    pub(super) sizes: Sizes,
    pub(super) types: Types,
    pub(super) weights: Weights,
}

impl<'f> Maker<'f> {
    pub(super) fn new(family: &'f dyn Family, seq: usize, dtype: DType) -> Maker<'f> {
        let sizes = family.sizes();
        Maker { family, sizes, types: Types::new(&sizes, seq, dtype), weights: family.weights() }
    }

    fn weight_type(&self, weight: &Weight) -> TensorType {
        TensorType::of(self.types.dtype, &weight.dims)
    }

    fn add_params(&self, b: &mut Builder<'_>, weights: &[Weight], more: &[(&str, TensorType)]) {
        for weight in weights {
            b.param(&param_name(weight), self.weight_type(weight));
        }
        for (name, ty) in more {
            b.param(name, ty.clone());
        }
    }

    pub(super) fn add_embed(&self, module: &mut Module, body: &Body, more: &[(&str, TensorType)]) {
        let mut b = Builder::new(module, body.embed, Kind::Layer);
        b.param("tokens", self.types.ids.clone());
        self.add_params(&mut b, &self.weights.embed, more);
        if body.rates.embed > 0.0 {
            b.param("key", key_type());
        }
        let x = self.family.embed(&mut b, body.rates);
        b.finish(&[x]);
    }

    pub(super) fn add_block(&self, module: &mut Module, body: &Body, more: &[(&str, TensorType)]) {
        let mut b = Builder::new(module, body.block, Kind::Layer);
        b.param("x", self.types.x.clone());
        self.add_params(&mut b, &self.weights.layers[0], more);
        if body.rates.in_block() {
            b.param("key", key_type());
        }
        let results = self.family.block(&mut b, body.rates);
        b.finish(&results);
    }

    fn start_head<'m>(&self, module: &'m mut Module, name: &str) -> Builder<'m> {
        let mut b = Builder::new(module, name, Kind::Layer);
        b.param("x", self.types.x.clone());
        self.add_params(&mut b, &self.weights.head, &[]);
        if self.weights.tied {
            b.param("w_lm", self.weight_type(&self.weights.embed[0]));
        }
        b
    }

    pub(super) fn add_head_logits(&self, module: &mut Module) {
        let mut b = self.start_head(module, "head_logits");
        let logits = self.family.head(&mut b);
        b.finish(&[logits]);
    }

    fn add_head(&self, module: &mut Module) {
        let mut b = self.start_head(module, "head");
        let labels = b.param("labels", self.types.ids.clone());
        let logits = self.family.head(&mut b);
        let loss = b.composite("loss", "cross_entropy", &[], &[logits, labels]);
        b.finish(&loss[..2]);
    }

    /// Adds all weights as parameters of an entry.
    pub(super) fn take_weights(&self, b: &mut Builder<'_>) -> Taken {
        let mut take = |weights: &[Weight]| -> Vec<ValueId> {
            weights.iter().map(|w| b.param(&w.name, self.weight_type(w))).collect()
        };
        let embed = take(&self.weights.embed);
        let layers = self.weights.layers.iter().map(|layer| take(layer)).collect();
        let mut head = take(&self.weights.head);
        if self.weights.tied {
            head.push(embed[0]);
        }
        Taken { embed, layers, head }
    }

    fn add_entry(&self, module: &mut Module, name: &str, body: &Body, ending: Ending) {
        let mut b = Builder::new(module, name, Kind::Layer);
        let weights = self.take_weights(&mut b);
        let tokens = b.param("tokens", self.types.ids.clone());
        let labels = (ending == Ending::Loss).then(|| b.param("labels", self.types.ids.clone()));
        let key = body.rates.any().then(|| b.param("key", key_type()));
        let embed_key = key.filter(|_| body.rates.embed > 0.0);
        let operands = [tokens].into_iter().chain(weights.embed).chain(embed_key);
        let mut x = b.call("x", body.embed, &operands.collect::<Vec<_>>())[0];
        for (layer, weights) in weights.layers.into_iter().enumerate() {
            let key = key.filter(|_| body.rates.in_block());
            let salt = layer as u32;
            let key =
                key.map(|key| b.push(&format!("h.{layer}.key"), Op::FoldKey { salt }, &[key]));
            let operands = [x].into_iter().chain(weights).chain(key);
            x = b.call(&format!("h.{layer}.x"), body.block, &operands.collect::<Vec<_>>())[0];
        }
        let operands: Vec<ValueId> = [x].into_iter().chain(weights.head).chain(labels).collect();
        let results = match ending {
            Ending::Loss => b.call("loss", "head", &operands),
            Ending::Logits => b.call("logits", "head_logits", &operands),
        };
        b.finish(&results);
    }
}
