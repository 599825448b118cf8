//! Transformers that are described by their sizes alone: what can be planned for, and not built.
//!
//! Field names and defaults as of transformers 5.23 (`models/bert`, `t5`). Fields that change no
//! size are not looked at, nor is the type of stored weights.

use super::config::fields::{Fields, layers, quotient};

/// The values of `model_type` whose sizes are read.
pub(super) const SIZED_TYPES: [&str; 2] = ["bert", "t5"];

/// The sizes of a transformer that is not built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// An encoder, with the heads that BERT was trained with.
    Bert(BertSizes),
    /// An encoder and a decoder.
    T5(T5Sizes),
}

/// An encoder: BERT (Devlin et al. 2018).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BertSizes {
    /// `vocab_size`
    pub vocab: usize,
    /// `max_position_embeddings`
    pub positions: usize,
    /// `type_vocab_size`
    pub segments: usize,
    /// `hidden_size`
    pub model: usize,
    /// `num_hidden_layers`
    pub layers: usize,
    /// `num_attention_heads`
    pub heads: usize,
    /// `intermediate_size`
    pub inner: usize,
    /// Whether the class tells whether two sentences follow each other, beside words that are
    /// hidden: `BertForPreTraining`.
    pub follows: bool,
}

/// An encoder and a decoder: T5 (Raffel et al. 2019).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct T5Sizes {
    /// `vocab_size`
    pub vocab: usize,
    /// `n_positions`: what it was trained with; positions are relative
    pub positions: usize,
    /// `relative_attention_num_buckets`
    pub buckets: usize,
    /// `d_model`
    pub model: usize,
    /// `num_layers`: of the encoder
    pub encoders: usize,
    /// `num_decoder_layers`, as many as of the encoder where it is left out
    pub decoders: usize,
    /// `num_heads`
    pub heads: usize,
    /// `d_kv`
    pub head_size: usize,
    /// `d_ff`
    pub inner: usize,
    /// Whether `feed_forward_proj` begins with `gated-`.
    pub gated: bool,
    /// `tie_word_embeddings`
    pub tied: bool,
}

impl Sizes {
    /// The longest sequence that the model was made for.
    pub fn positions(&self) -> usize {
        match self {
            Sizes::Bert(sizes) => sizes.positions,
            Sizes::T5(sizes) => sizes.positions,
        }
    }

    /// Reads the fields of a type of [`SIZED_TYPES`]; what is wrong is reported there.
    pub(super) fn read(model_type: &str, fields: &mut Fields<'_>) -> Sizes {
        match model_type {
            "bert" => Sizes::Bert(bert(fields)),
            _ => Sizes::T5(t5(fields)),
        }
    }
}

fn bert(fields: &mut Fields<'_>) -> BertSizes {
    let model = fields.size(&["hidden_size"], 768);
    let heads = fields.size(&["num_attention_heads"], 12);
    quotient(fields, [("hidden_size", model), ("num_attention_heads", heads)]);
    BertSizes {
        vocab: fields.size(&["vocab_size"], 30522),
        positions: fields.size(&["max_position_embeddings"], 512),
        segments: fields.size(&["type_vocab_size"], 2),
        model,
        layers: layers(fields, &["num_hidden_layers"], 12),
        heads,
        inner: fields.size(&["intermediate_size"], 3072),
        follows: follows(fields),
    }
}

/// The classes of BERT that are computed, or are what is computed without a head, and whether they
/// also tell whether two sentences follow each other.
const BERT_HEADS: [(&str, bool); 4] = [
    ("BertForPreTraining", true),
    ("BertForMaskedLM", false),
    ("BertLMHeadModel", false),
    ("BertModel", true),
];

/// Whether the class is the one that was trained on pairs of sentences; another head, such as a
/// classifier, is refused.
fn follows(fields: &mut Fields<'_>) -> bool {
    let named = fields.words("architectures");
    let found = named.iter().find_map(|name| BERT_HEADS.iter().find(|(head, _)| head == name));
    if let (None, Some(first)) = (found, named.first()) {
        let headline = format!("the class `{first}` is not supported");
        let wrong = fields.wrong("E1107", "architectures", headline);
        let names: Vec<String> = BERT_HEADS.iter().map(|(head, _)| format!("`{head}`")).collect();
        fields.report(wrong.help(format!("supported are {}", names.join(", "))));
    }
    found.is_none_or(|(_, follows)| *follows)
}

fn t5(fields: &mut Fields<'_>) -> T5Sizes {
    let encoders = layers(fields, &["num_layers"], 6);
    let inside = fields.word("feed_forward_proj").unwrap_or_else(|| "relu".to_owned());
    T5Sizes {
        vocab: fields.size(&["vocab_size"], 32128),
        positions: fields.size(&["n_positions"], 512),
        buckets: fields.size(&["relative_attention_num_buckets"], 32),
        model: fields.size(&["d_model"], 512),
        encoders,
        decoders: layers(fields, &["num_decoder_layers"], encoders),
        heads: fields.size(&["num_heads"], 8),
        head_size: fields.size(&["d_kv"], 64),
        inner: fields.size(&["d_ff"], 2048),
        gated: inside.starts_with("gated-"),
        tied: fields.flag("tie_word_embeddings", true),
    }
}
