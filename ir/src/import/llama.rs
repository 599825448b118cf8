//! Llama: rotary positions, RMS norms, a gated feed-forward network, heads that share keys.
//!
//! Letters: B batch, S sequence, M model, H heads, G key heads, D size of a head, I intermediate,
//! V vocabulary. Facts as of transformers 5.23 (`models/llama`).

use super::config::{Activation, Fields, check_elements, layers, quotient};
use super::entry::{Family, Sizes, Weights, weight};
use super::layers::{self as layer, Heads, Rates, linear, param, rows};
use super::{Init, Source, Weight};
use crate::DType;
use crate::build::Builder;
use crate::module::ValueId;
use crate::types::TensorType;

/// What a `config.json` of Llama says.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// `vocab_size`
    pub vocab: usize,
    /// `max_position_embeddings`
    pub positions: usize,
    /// `hidden_size`
    pub model: usize,
    /// `num_hidden_layers`
    pub layers: usize,
    /// `num_attention_heads`
    pub heads: usize,
    /// `num_key_value_heads`, as many as heads where it is left out
    pub key_heads: usize,
    /// `head_dim`, `hidden_size` over heads where it is left out
    pub head_size: usize,
    /// `intermediate_size`
    pub inner: usize,
    /// `hidden_act`
    pub activation: Activation,
    /// `attention_dropout`
    pub dropout_attention: f64,
    /// `rms_norm_eps`
    pub eps: f64,
    /// `initializer_range`
    pub init_std: f64,
    /// `rope_theta`
    pub theta: f64,
    /// `attention_bias`
    pub attention_bias: bool,
    /// `mlp_bias`
    pub mlp_bias: bool,
    /// `tie_word_embeddings`
    pub tied: bool,
}

impl Default for LlamaConfig {
    /// The first published model of seven billion parameters.
    fn default() -> LlamaConfig {
        LlamaConfig {
            vocab: 32000,
            positions: 2048,
            model: 4096,
            layers: 32,
            heads: 32,
            key_heads: 32,
            head_size: 128,
            inner: 11008,
            activation: Activation::Silu,
            dropout_attention: 0.0,
            eps: 1e-6,
            init_std: 0.02,
            theta: 10000.0,
            attention_bias: false,
            mlp_bias: false,
            tied: false,
        }
    }
}

impl LlamaConfig {
    /// Reads the fields; what is wrong is reported there.
    pub(crate) fn read(fields: &mut Fields<'_>) -> LlamaConfig {
        let default = LlamaConfig::default();
        let model = fields.size(&["hidden_size"], default.model);
        let heads = fields.size(&["num_attention_heads"], default.heads);
        let key_heads = fields.size(&["num_key_value_heads"], heads);
        quotient(fields, [("num_attention_heads", heads), ("num_key_value_heads", key_heads)]);
        let head_size = match fields.optional_size(&["head_dim"]) {
            Some(head_size) => head_size,
            None => quotient(fields, [("hidden_size", model), ("num_attention_heads", heads)]),
        };
        if !head_size.is_multiple_of(2) {
            let headline = format!("heads of {head_size} numbers cannot be rotated in pairs");
            let wrong = fields.wrong("E1105", "head_dim", headline);
            fields.report(wrong.help("write an even `head_dim`"));
        }
        let config = LlamaConfig {
            vocab: fields.size(&["vocab_size"], default.vocab),
            positions: fields.size(&["max_position_embeddings"], default.positions),
            model,
            layers: layers(fields, &["num_hidden_layers"], default.layers),
            heads,
            key_heads,
            head_size,
            inner: fields.size(&["intermediate_size"], default.inner),
            activation: Activation::read(fields, "hidden_act", default.activation),
            dropout_attention: fields.probability("attention_dropout", default.dropout_attention),
            eps: fields.positive("rms_norm_eps", default.eps),
            init_std: fields.number("initializer_range", default.init_std),
            theta: rope_theta(fields, default.theta),
            attention_bias: fields.flag("attention_bias", default.attention_bias),
            mlp_bias: fields.flag("mlp_bias", default.mlp_bias),
            tied: fields.flag("tie_word_embeddings", default.tied),
        };
        check_elements(fields, "the largest projection", &[heads, head_size, model]);
        check_elements(fields, "the largest table", &[config.vocab.max(config.inner), model]);
        config
    }

    fn layer_weights(&self, layer: usize) -> Vec<Weight> {
        let (m, h, g, d) = (self.model, self.heads, self.key_heads, self.head_size);
        let i = self.inner;
        let normal = Init::Normal { std: self.init_std };
        let whole = |path: &str, kind: &str, dims: &[usize]| {
            let name = format!("layers.{layer}.{path}.{kind}");
            let names = vec![format!("model.{name}"), name];
            Source { names, dims: dims.to_vec(), columns: None }
        };
        let mut weights = Vec::new();
        let mut add = |name: &str, dims: &[usize], init: Init, source: Source| {
            let mut weight = weight(&format!("h.{layer}.{name}"), dims, init, source);
            weight.layer = Some(layer);
            weights.push(weight);
        };
        add("ln1.w", &[m], Init::Ones, whole("input_layernorm", "weight", &[m]));
        for (letter, heads) in [("q", h), ("k", g), ("v", g)] {
            let path = format!("self_attn.{letter}_proj");
            let matrix = whole(&path, "weight", &[heads * d, m]);
            add(&format!("attn.w{letter}"), &[heads, d, m], normal, matrix);
            if self.attention_bias {
                let bias = whole(&path, "bias", &[heads * d]);
                add(&format!("attn.b{letter}"), &[heads, d], Init::Zeros, bias);
            }
        }
        let o_proj = whole("self_attn.o_proj", "weight", &[m, h * d]);
        add("attn.wo", &[m, h, d], normal, o_proj);
        if self.attention_bias {
            add("attn.bo", &[m], Init::Zeros, whole("self_attn.o_proj", "bias", &[m]));
        }
        add("ln2.w", &[m], Init::Ones, whole("post_attention_layernorm", "weight", &[m]));
        for (name, out, of) in [("gate", i, m), ("up", i, m), ("down", m, i)] {
            let path = format!("mlp.{name}_proj");
            let matrix = whole(&path, "weight", &[out, of]);
            add(&format!("mlp.w_{name}"), &[out, of], normal, matrix);
            if self.mlp_bias {
                let bias = whole(&path, "bias", &[out]);
                add(&format!("mlp.b_{name}"), &[out], Init::Zeros, bias);
            }
        }
        weights
    }

    fn norm(&self, b: &mut Builder<'_>, name: &str, x: ValueId, which: &str) -> ValueId {
        let w = param(b, which);
        b.composite(name, "rms_norm", &[("eps", self.eps)], &[x, w])[0]
    }
}

impl Family for LlamaConfig {
    fn sizes(&self) -> Sizes {
        Sizes {
            vocab: self.vocab,
            positions_max: self.positions,
            positions_are_learned: false,
            layers: self.layers,
            model: self.model,
            heads: self.heads,
            key: [self.key_heads, self.head_size],
        }
    }

    fn rates(&self, given: Option<f64>) -> Rates {
        Rates { attention: given.unwrap_or(self.dropout_attention), ..Rates::NONE }
    }

    fn weights(&self) -> Weights {
        let (m, v) = (self.model, self.vocab);
        let normal = Init::Normal { std: self.init_std };
        let whole = |path: &str, dims: &[usize]| {
            let names = vec![format!("model.{path}"), path.to_owned()];
            Source { names, dims: dims.to_vec(), columns: None }
        };
        let mut table = whole("embed_tokens.weight", &[v, m]);
        let mut head = vec![weight("lnf.w", &[m], Init::Ones, whole("norm.weight", &[m]))];
        let lm_head = "lm_head.weight".to_owned();
        if self.tied {
            table.names.push(lm_head);
        } else {
            let source = Source { names: vec![lm_head], dims: vec![v, m], columns: None };
            head.push(weight("lm_head", &[v, m], normal, source));
        }
        Weights {
            embed: vec![weight("wte", &[v, m], normal, table)],
            layers: (0..self.layers).map(|layer| self.layer_weights(layer)).collect(),
            head,
            tied: self.tied,
        }
    }

    fn embed(&self, b: &mut Builder<'_>, _: Rates) -> ValueId {
        let (tokens, wte) = (param(b, "tokens"), param(b, "wte"));
        rows(b, "x", wte, tokens)
    }

    fn block(&self, b: &mut Builder<'_>, rates: Rates) -> Vec<ValueId> {
        let x = param(b, "x");
        let position = match b.function().find("position") {
            Some(position) => position,
            None => b.constant("start", 0.0, TensorType::scalar(DType::I32)),
        };
        let n = self.norm(b, "n1", x, "ln1_w");
        let project = |b: &mut Builder<'_>, which: &str| {
            let names = [format!("w{which}"), format!("b{which}")];
            linear(b, which, "bsm,hdm->bshd", n, names.each_ref().map(String::as_str))
        };
        let [q, k, v] = [project(b, "q"), project(b, "k"), project(b, "v")];
        let theta = [("theta", self.theta)];
        let q = b.composite("q_turned", "rope", &theta, &[q, position])[0];
        let k = b.composite("k_turned", "rope", &theta, &[k, position])[0];
        let scale = 1.0 / (self.head_size as f64).sqrt();
        let heads = Heads { count: self.heads, group: self.heads / self.key_heads, scale };
        let (mixed, caches) = layer::attend(b, heads, rates.attention, [q, k, v]);
        let o = linear(b, "o", "bshd,mhd->bsm", mixed, ["wo", "bo"]);
        let r = b.add("r", x, o);
        let n = self.norm(b, "n2", r, "ln2_w");
        let gate = linear(b, "gate", "bsm,im->bsi", n, ["w_gate", "b_gate"]);
        let up = linear(b, "up", "bsm,im->bsi", n, ["w_up", "b_up"]);
        let open = b.composite("open", self.activation.composite(), &[], &[gate])[0];
        let gated = b.mul("gated", open, up);
        let down = linear(b, "down", "bsi,mi->bsm", gated, ["w_down", "b_down"]);
        let y = b.add("y", r, down);
        [y].into_iter().chain(caches).collect()
    }

    fn head(&self, b: &mut Builder<'_>) -> ValueId {
        let x = param(b, "x");
        let n = self.norm(b, "n", x, "lnf_w");
        let w_lm = param(b, "w_lm");
        b.contract("logits", "bsm,vm->bsv", n, w_lm)
    }
}

/// Reads the base of the rotary frequencies; refuses everything that changes them.
///
/// Version 5 writes `rope_parameters`, version 4 `rope_theta` and `rope_scaling`; one that is given
/// in the older form wins.
fn rope_theta(fields: &mut Fields<'_>, default: f64) -> f64 {
    let key = fields.key_of(&["rope_scaling", "rope_parameters"]);
    let mut theta = fields.positive("rope_theta", default);
    let Some(inside) = fields.object(key) else { return theta };
    let word = |name: &str| inside.get(name).and_then(|kind| kind.as_str());
    let kind = word("rope_type").or(word("type")).unwrap_or("default");
    if kind != "default" {
        let headline = format!("rotary embeddings of type `{kind}` are not supported yet");
        let wrong = fields.wrong("E1107", key, headline);
        fields.report(wrong.help("supported is `default`"));
    }
    if let Some(value) = inside.get("rope_theta").filter(|value| !value.is_null()) {
        match value.as_f64().filter(|theta| theta.is_finite() && *theta > 0.0) {
            Some(inner) => theta = inner,
            None => {
                let headline = format!("the `rope_theta` of `{key}` is no number above 0");
                let wrong = fields.wrong("E1104", key, headline);
                fields.report(wrong);
            }
        }
    }
    theta
}
