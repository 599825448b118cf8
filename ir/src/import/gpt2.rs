//! GPT-2: learned positions, a norm before each half of a block, biases everywhere.
//!
//! Letters: B batch, S sequence, M model, H heads, D size of a head, F inner, V vocabulary,
//! P positions. Facts as of transformers 5.23 (`models/gpt2`).

use std::ops::Range;

use super::config::{Activation, Fields, check_elements, layers, quotient};
use super::entry::{Family, Sizes, Weights, weight};
use super::layers::{self as layer, Heads, Rates, dropout, linear, param, rows, salt};
use super::{Init, Source, Weight};
use crate::build::Builder;
use crate::module::ValueId;

/// What a `config.json` of GPT-2 says.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// `vocab_size`
    pub vocab: usize,
    /// `n_positions`
    pub positions: usize,
    /// `n_embd`
    pub model: usize,
    /// `n_layer`
    pub layers: usize,
    /// `n_head`
    pub heads: usize,
    /// `n_inner`, four times `n_embd` where it is left out
    pub inner: usize,
    /// `activation_function`
    pub activation: Activation,
    /// `resid_pdrop`
    pub dropout_residual: f64,
    /// `embd_pdrop`
    pub dropout_embed: f64,
    /// `attn_pdrop`
    pub dropout_attention: f64,
    /// `layer_norm_epsilon`
    pub eps: f64,
    /// `initializer_range`
    pub init_std: f64,
    /// `scale_attn_weights`: whether scores are divided by the root of the size of a head
    pub scaled: bool,
    /// `tie_word_embeddings`
    pub tied: bool,
}

impl Default for Gpt2Config {
    /// The smallest published model.
    fn default() -> Gpt2Config {
        Gpt2Config {
            vocab: 50257,
            positions: 1024,
            model: 768,
            layers: 12,
            heads: 12,
            inner: 4 * 768,
            activation: Activation::GeluTanh,
            dropout_residual: 0.1,
            dropout_embed: 0.1,
            dropout_attention: 0.1,
            eps: 1e-5,
            init_std: 0.02,
            scaled: true,
            tied: true,
        }
    }
}

impl Gpt2Config {
    /// Reads the fields; what is wrong is reported there.
    pub(crate) fn read(fields: &mut Fields<'_>) -> Gpt2Config {
        let default = Gpt2Config::default();
        let model = fields.size(&["n_embd", "hidden_size"], default.model);
        let activation = Activation::read(fields, "activation_function", default.activation);
        for flag in ["scale_attn_by_inverse_layer_idx", "add_cross_attention"] {
            fields.refuse(flag);
        }
        let config = Gpt2Config {
            vocab: fields.size(&["vocab_size"], default.vocab),
            positions: fields.size(&["n_positions", "max_position_embeddings"], default.positions),
            model,
            layers: layers(fields, &["n_layer", "num_hidden_layers"], default.layers),
            heads: fields.size(&["n_head", "num_attention_heads"], default.heads),
            inner: fields.size(&["n_inner"], 4 * model),
            activation,
            dropout_residual: fields.probability("resid_pdrop", default.dropout_residual),
            dropout_embed: fields.probability("embd_pdrop", default.dropout_embed),
            dropout_attention: fields.probability("attn_pdrop", default.dropout_attention),
            eps: fields.positive("layer_norm_epsilon", default.eps),
            init_std: fields.number("initializer_range", default.init_std),
            scaled: fields.flag("scale_attn_weights", default.scaled),
            tied: fields.flag("tie_word_embeddings", default.tied),
        };
        let model_key = fields.key_of(&["n_embd", "hidden_size"]);
        let heads_key = fields.key_of(&["n_head", "num_attention_heads"]);
        quotient(fields, [(model_key, config.model), (heads_key, config.heads)]);
        let widest = config.vocab.max(config.positions).max(config.inner).max(3 * config.model);
        check_elements(fields, "the largest weight", &[widest, config.model]);
        config
    }

    /// The size of a head.
    fn head_size(&self) -> usize {
        self.model / self.heads
    }

    fn layer_weights(&self, layer: usize) -> Vec<Weight> {
        let (m, h, d, f) = (self.model, self.heads, self.head_size(), self.inner);
        let normal = Init::Normal { std: self.init_std };
        // What is added to the residual stream starts smaller, so that its variance stays.
        let std = self.init_std / (2.0 * self.layers as f64).sqrt();
        let added = Init::Normal { std };
        let at = |path: &str| -> Vec<String> {
            vec![format!("transformer.h.{layer}.{path}"), format!("h.{layer}.{path}")]
        };
        let whole = |path: &str, dims: &[usize]| Source {
            names: at(path),
            dims: dims.to_vec(),
            columns: None,
        };
        let third = |path: &str, dims: &[usize], part: usize| {
            let columns: Range<usize> = part * m..(part + 1) * m;
            Source { names: at(path), dims: dims.to_vec(), columns: Some(columns) }
        };
        let mut weights = vec![
            weight("ln1.w", &[m], Init::Ones, whole("ln_1.weight", &[m])),
            weight("ln1.b", &[m], Init::Zeros, whole("ln_1.bias", &[m])),
        ];
        for (part, (w, b)) in
            [("attn.wq", "attn.bq"), ("attn.wk", "attn.bk"), ("attn.wv", "attn.bv")]
                .into_iter()
                .enumerate()
        {
            let matrix = third("attn.c_attn.weight", &[m, 3 * m], part);
            weights.push(weight(w, &[m, h, d], normal, matrix));
            let bias = third("attn.c_attn.bias", &[3 * m], part);
            weights.push(weight(b, &[h, d], Init::Zeros, bias));
        }
        weights.extend([
            weight("attn.wo", &[h, d, m], added, whole("attn.c_proj.weight", &[m, m])),
            weight("attn.bo", &[m], Init::Zeros, whole("attn.c_proj.bias", &[m])),
            weight("ln2.w", &[m], Init::Ones, whole("ln_2.weight", &[m])),
            weight("ln2.b", &[m], Init::Zeros, whole("ln_2.bias", &[m])),
            weight("mlp.w_fc", &[m, f], normal, whole("mlp.c_fc.weight", &[m, f])),
            weight("mlp.b_fc", &[f], Init::Zeros, whole("mlp.c_fc.bias", &[f])),
            weight("mlp.w_proj", &[f, m], added, whole("mlp.c_proj.weight", &[f, m])),
            weight("mlp.b_proj", &[m], Init::Zeros, whole("mlp.c_proj.bias", &[m])),
        ]);
        for weight in &mut weights {
            weight.name = format!("h.{layer}.{}", weight.name);
            weight.layer = Some(layer);
        }
        weights
    }

    fn norm(&self, b: &mut Builder<'_>, name: &str, x: ValueId, which: &str) -> ValueId {
        let (w, bias) = (param(b, &format!("{which}_w")), param(b, &format!("{which}_b")));
        b.composite(name, "layer_norm", &[("eps", self.eps)], &[x, w, bias])[0]
    }
}

impl Family for Gpt2Config {
    fn sizes(&self) -> Sizes {
        Sizes {
            vocab: self.vocab,
            positions_max: self.positions,
            positions_are_learned: true,
            layers: self.layers,
            model: self.model,
            heads: self.heads,
            key: [self.heads, self.head_size()],
        }
    }

    fn rates(&self, given: Option<f64>) -> Rates {
        Rates {
            embed: given.unwrap_or(self.dropout_embed),
            residual: given.unwrap_or(self.dropout_residual),
            attention: given.unwrap_or(self.dropout_attention),
        }
    }

    fn weights(&self) -> Weights {
        let (m, v, p) = (self.model, self.vocab, self.positions);
        let normal = Init::Normal { std: self.init_std };
        let whole = |path: &str, dims: &[usize]| {
            let names = vec![format!("transformer.{path}"), path.to_owned()];
            Source { names, dims: dims.to_vec(), columns: None }
        };
        let mut table = whole("wte.weight", &[v, m]);
        let mut head = vec![
            weight("lnf.w", &[m], Init::Ones, whole("ln_f.weight", &[m])),
            weight("lnf.b", &[m], Init::Zeros, whole("ln_f.bias", &[m])),
        ];
        let lm_head = "lm_head.weight".to_owned();
        if self.tied {
            table.names.push(lm_head);
        } else {
            let source = Source { names: vec![lm_head], dims: vec![v, m], columns: None };
            head.push(weight("lm_head", &[v, m], normal, source));
        }
        Weights {
            embed: vec![
                weight("wte", &[v, m], normal, table),
                weight("wpe", &[p, m], normal, whole("wpe.weight", &[p, m])),
            ],
            layers: (0..self.layers).map(|layer| self.layer_weights(layer)).collect(),
            head,
            tied: self.tied,
        }
    }

    fn embed(&self, b: &mut Builder<'_>, rates: Rates) -> ValueId {
        let (tokens, wte, wpe) = (param(b, "tokens"), param(b, "wte"), param(b, "wpe"));
        let word = rows(b, "word", wte, tokens);
        let seq = b.ty(tokens).dims[1].clone();
        let positions = layer::positions(b, seq);
        let place = rows(b, "place", wpe, positions);
        let place = b.broadcast_like("place_x", place, word);
        let x = b.add("sum", word, place);
        dropout(b, "dropped", x, rates.embed, salt::EMBED)
    }

    fn block(&self, b: &mut Builder<'_>, rates: Rates) -> Vec<ValueId> {
        let x = param(b, "x");
        let n = self.norm(b, "n1", x, "ln1");
        let project = |b: &mut Builder<'_>, which: &str| {
            let names = [format!("w{which}"), format!("b{which}")];
            linear(b, which, "bsm,mhd->bshd", n, names.each_ref().map(String::as_str))
        };
        let qkv = [project(b, "q"), project(b, "k"), project(b, "v")];
        let scale = if self.scaled { 1.0 / (self.head_size() as f64).sqrt() } else { 1.0 };
        let heads = Heads { count: self.heads, group: 1, scale };
        let (mixed, caches) = layer::attend(b, heads, rates.attention, qkv);
        let o = linear(b, "o", "bshd,hdm->bsm", mixed, ["wo", "bo"]);
        let o = dropout(b, "o_dropped", o, rates.residual, salt::AFTER_ATTENTION);
        let r = b.add("r", x, o);
        let n = self.norm(b, "n2", r, "ln2");
        let f = linear(b, "f", "bsm,mf->bsf", n, ["w_fc", "b_fc"]);
        let g = b.composite("g", self.activation.composite(), &[], &[f])[0];
        let p = linear(b, "p", "bsf,fm->bsm", g, ["w_proj", "b_proj"]);
        let p = dropout(b, "p_dropped", p, rates.residual, salt::AFTER_MLP);
        let y = b.add("y", r, p);
        [y].into_iter().chain(caches).collect()
    }

    fn head(&self, b: &mut Builder<'_>) -> ValueId {
        let x = param(b, "x");
        let n = self.norm(b, "n", x, "lnf");
        let w_lm = param(b, "w_lm");
        b.contract("logits", "bsm,vm->bsv", n, w_lm)
    }
}
