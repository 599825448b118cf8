//! The functions of a module and its entries, the same for all families.

use super::family::{DOCUMENTS, FamilyModel, Mode, Part, Weights};
use super::{Options, Weight};
use crate::build::Builder;
use crate::dim::Dim;
use crate::module::{Kind, Module, ValueId};
use crate::op::Op;
use crate::random::DrawBits;
use crate::types::TensorType;
use crate::{DType, Diagnostic, Span};

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

/// The type of a key of random numbers.
fn key_type() -> TensorType {
    TensorType::of(DType::U32, &[4])
}

/// The types of what is no weight.
pub(crate) struct Types {
    pub(crate) ids: TensorType,
    pub(crate) x: TensorType,
    pub(crate) dtype: DType,
}

impl Types {
    pub(crate) fn new(model: usize, seq: usize, dtype: DType) -> Types {
        let dims = [Dim::symbol(Dim::BATCH), Dim::from(seq)];
        let ids = TensorType::new(DType::I32, dims.clone());
        let x = TensorType::new(dtype, dims.into_iter().chain([Dim::from(model)]));
        Types { ids, x, dtype }
    }
}

/// The diagnostics of options that do not fit the model.
pub(crate) fn check_options(model: &FamilyModel, options: &Options) -> Result<(), Vec<Diagnostic>> {
    let mut wrong = Vec::new();
    if !options.dtype.is_float() {
        let headline = format!("`{}` is no floating-point type", options.dtype);
        wrong.push(Diagnostic::error("E1108", Span::of("--dtype"), headline));
    }
    if let Some(p) = options.dropout.filter(|p| !(0.0..1.0).contains(p)) {
        let headline = format!("a dropout of {p} is not in 0 ≤ p < 1");
        wrong.push(Diagnostic::error("E1108", Span::of("--dropout"), headline));
    }
    wrong.extend(check_seq(model, options.seq));
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
pub(crate) fn check_seq(model: &FamilyModel, seq: usize) -> Option<Diagnostic> {
    let wrong = |headline: String| Diagnostic::error("E1108", Span::of("--seq"), headline);
    if seq == 0 {
        return Some(wrong("a sequence of 0 tokens".into()));
    }
    if let Some(found) = model.learned.and_then(|positions| check_positions(seq, positions)) {
        return Some(found);
    }
    let heads = model.size("H").saturating_mul(seq);
    let widest = model.size("V").max(model.size("M")).max(heads);
    let fits = seq.checked_mul(widest).is_some_and(|n| n <= super::config::fields::ELEMENTS_MAX);
    let why = || wrong(format!("one sequence of {seq} tokens has too many activations"));
    (!fits).then(why)
}

/// Adds the functions and entries for training, whose dropout draws `bits`, and for evaluation;
/// returns the entries' names.
pub(crate) fn training(
    module: &mut Module,
    model: &FamilyModel,
    options: &Options,
    bits: DrawBits,
) -> Vec<String> {
    let mut maker = Maker::new(model, options.seq, options.dtype);
    maker.documents = options.documents;
    let mode = Mode::Train(options.dropout, bits);
    let mut trained = Callees { embed: "embed".into(), blocks: Vec::new(), mode };
    maker.add_embed(module, "embed", mode, &[]);
    trained.blocks = maker.add_blocks(module, "block", mode, &|_| Vec::new());
    let mut evaluated = Callees { mode: Mode::Eval, ..trained.clone() };
    if maker.model.drops(Part::Embed, mode) {
        evaluated.embed = "embed_eval".into();
        maker.add_embed(module, &evaluated.embed, Mode::Eval, &[]);
    }
    if maker.blocks_drop(mode) {
        evaluated.blocks = maker.add_blocks(module, "block_eval", Mode::Eval, &|_| Vec::new());
    }
    maker.add_head_logits(module);
    maker.add_head(module);
    maker.add_entry(module, "loss", &trained, Ending::Loss);
    let mut entries = vec!["loss".to_owned()];
    if maker.drops(mode) {
        maker.add_entry(module, "loss_eval", &evaluated, Ending::Loss);
        entries.push("loss_eval".to_owned());
    }
    maker.add_entry(module, "logits", &evaluated, Ending::Logits);
    entries.push("logits".to_owned());
    entries
}

/// The functions that an entry calls before the head: `embed`, and one for each kind of layers.
#[derive(Clone)]
pub(super) struct Callees {
    pub(super) embed: String,
    pub(super) blocks: Vec<String>,
    pub(super) mode: Mode,
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

/// Adds functions of one model to a module.
pub(super) struct Maker<'f> {
    pub(super) model: &'f FamilyModel,
    pub(super) types: Types,
    pub(super) weights: Weights,
    /// The kind of each layer.
    pub(super) kinds: Vec<usize>,
    /// Whether functions keep packed documents apart.
    documents: bool,
}

impl<'f> Maker<'f> {
    pub(super) fn new(model: &'f FamilyModel, seq: usize, dtype: DType) -> Maker<'f> {
        let types = Types::new(model.size("M"), seq, dtype);
        Maker { model, types, weights: model.weights(), kinds: model.kinds(), documents: false }
    }

    /// The first layer of each kind.
    pub(super) fn firsts(&self) -> Vec<usize> {
        let count = self.kinds.iter().max().map_or(0, |last| last + 1);
        let first = |kind| self.kinds.iter().position(|of| *of == kind);
        (0..count).filter_map(first).collect()
    }

    fn blocks_drop(&self, mode: Mode) -> bool {
        self.firsts().into_iter().any(|layer| self.model.drops(Part::Block(layer), mode))
    }

    fn drops(&self, mode: Mode) -> bool {
        self.model.drops(Part::Embed, mode) || self.blocks_drop(mode)
    }

    /// Whether the function takes the documents of its tokens.
    fn reads_documents(&self, part: Part) -> bool {
        self.documents && self.model.reads_documents(part)
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

    pub(super) fn add_embed(
        &self,
        module: &mut Module,
        name: &str,
        mode: Mode,
        more: &[(&str, TensorType)],
    ) {
        let mut b = Builder::new(module, name, Kind::Layer);
        b.param("tokens", self.types.ids.clone());
        self.add_params(&mut b, &self.weights.embed, more);
        if self.reads_documents(Part::Embed) {
            b.param(DOCUMENTS, self.types.ids.clone());
        }
        if self.model.drops(Part::Embed, mode) {
            b.param("key", key_type());
        }
        let x = self.model.build(&mut b, Part::Embed, mode, self.types.dtype);
        b.finish(&x);
    }

    /// Adds one function for each kind of layers, whose further parameters `more` names for its
    /// first layer; returns their names.
    pub(super) fn add_blocks(
        &self,
        module: &mut Module,
        name: &str,
        mode: Mode,
        more: &dyn Fn(usize) -> Vec<(&'static str, TensorType)>,
    ) -> Vec<String> {
        let mut names = Vec::new();
        for (kind, layer) in self.firsts().into_iter().enumerate() {
            let name = if kind == 0 { name.to_owned() } else { format!("{name}_{kind}") };
            let part = Part::Block(layer);
            let mut b = Builder::new(module, &name, Kind::Layer);
            b.param("x", self.types.x.clone());
            self.add_params(&mut b, &self.weights.layers[layer], &more(layer));
            if self.reads_documents(part) {
                b.param(DOCUMENTS, self.types.ids.clone());
            }
            if self.model.drops(part, mode) {
                b.param("key", key_type());
            }
            let results = self.model.build(&mut b, part, mode, self.types.dtype);
            names.push(b.finish(&results));
        }
        names
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

    fn logits(&self, b: &mut Builder<'_>) -> ValueId {
        self.model.build(b, Part::Head, Mode::Eval, self.types.dtype)[0]
    }

    pub(super) fn add_head_logits(&self, module: &mut Module) {
        let mut b = self.start_head(module, "head_logits");
        let logits = self.logits(&mut b);
        b.finish(&[logits]);
    }

    fn add_head(&self, module: &mut Module) {
        let mut b = self.start_head(module, "head");
        let labels = b.param("labels", self.types.ids.clone());
        let logits = self.logits(&mut b);
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

    fn add_entry(&self, module: &mut Module, name: &str, callees: &Callees, ending: Ending) {
        let mode = callees.mode;
        let mut b = Builder::new(module, name, Kind::Layer);
        let weights = self.take_weights(&mut b);
        let tokens = b.param("tokens", self.types.ids.clone());
        let labels = (ending == Ending::Loss).then(|| b.param("labels", self.types.ids.clone()));
        let documents = self.documents.then(|| b.param(DOCUMENTS, self.types.ids.clone()));
        let key = self.drops(mode).then(|| b.param("key", key_type()));
        let documents_of = |part| documents.filter(|_| self.reads_documents(part));
        let embed_key = key.filter(|_| self.model.drops(Part::Embed, mode));
        let operands = [tokens].into_iter().chain(weights.embed);
        let operands = operands.chain(documents_of(Part::Embed)).chain(embed_key);
        let mut x = b.call("x", &callees.embed, &operands.collect::<Vec<_>>())[0];
        for (layer, weights) in weights.layers.into_iter().enumerate() {
            let key = key.filter(|_| self.model.drops(Part::Block(layer), mode));
            let salt = layer as u32;
            let key =
                key.map(|key| b.push(&format!("h.{layer}.key"), Op::FoldKey { salt }, &[key]));
            let documents = documents_of(Part::Block(layer));
            let operands = [x].into_iter().chain(weights).chain(documents).chain(key);
            let block = &callees.blocks[self.kinds[layer]];
            x = b.call(&format!("h.{layer}.x"), block, &operands.collect::<Vec<_>>())[0];
        }
        let operands: Vec<ValueId> = [x].into_iter().chain(weights.head).chain(labels).collect();
        let results = match ending {
            Ending::Loss => b.call("loss", "head", &operands),
            Ending::Logits => b.call("logits", "head_logits", &operands),
        };
        b.finish(&results);
    }
}
