//! The work of transformers with an encoder: BERT, and T5 with its decoder.

use ir::import::{BertSizes, T5Sizes};
use ir::{Diagnostic, Span};

use super::{Cut, Item, Layer, SIZE_MAX, Workload};

/// What is wrong with sizes, each with its name.
fn check(name: &str, sizes: &[(&str, usize)]) -> Result<(), Vec<Diagnostic>> {
    let large = sizes.iter().filter(|(_, size)| *size > SIZE_MAX as usize);
    let wrong = large.map(|(what, size)| {
        let headline = format!("`{what}` is {size}, more than {SIZE_MAX}");
        Diagnostic::error("E3403", Span::of(name.to_owned()), headline)
    });
    let wrong: Vec<Diagnostic> = wrong.collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

fn product([k, n]: [u32; 2], cut: Cut, bias: bool) -> Item {
    Item::Product { k, n, cut, bias }
}

/// A size that [`check`] has seen.
fn small(size: usize) -> u32 {
    u32::try_from(size).expect("checked to be small")
}

/// BERT as it was trained: logits of all tokens by a head that shares the embedding's weight, and,
/// where its class has that, whether two sentences follow each other.
///
/// # Errors
/// `E3403` for each size that is too large.
pub fn bert(name: &str, sizes: &BertSizes, seq: u32) -> Result<Workload, Vec<Diagnostic>> {
    let BertSizes { vocab, positions, segments, model, layers, heads, inner, follows } = *sizes;
    let rows = positions.saturating_add(segments);
    check(
        name,
        &[
            ("vocab_size", vocab),
            ("max_position_embeddings", rows),
            ("hidden_size", 3usize.saturating_mul(model)),
            ("intermediate_size", inner),
        ],
    )?;
    let (vocab, positions, width, ffn) = (small(vocab), small(rows), small(model), small(inner));
    let heads = small(heads);
    let dim = width / heads;
    let norm = Item::Norm { width, parameters: 2 * width, heads: false };
    let residual = Item::Residual { width };
    let items = vec![
        product([width, 3 * width], Cut::Columns, true),
        Item::Attention { heads, kv_heads: heads, qk_dim: dim, v_dim: dim, causal: false },
        product([width, width], Cut::Rows, true),
        residual,
        norm,
        product([width, ffn], Cut::Columns, true),
        Item::Activation { width: ffn, gated: false },
        product([ffn, width], Cut::Rows, true),
        residual,
        norm,
    ];
    // The pooled first token with its classifier, and a bias for each token of the vocabulary.
    let pooled = if follows { (u64::from(width) + 3) * u64::from(width) + 2 } else { 0 };
    let few = Item::parameters_alone(pooled + u64::from(vocab));
    Ok(Workload {
        name: name.to_owned(),
        seq,
        width,
        layers: vec![Layer { name: "layer".into(), count: small(layers), width, items }],
        first: vec![Item::Embedding { vocab, width, positions }, norm],
        last: vec![
            product([width, width], Cut::Whole, true),
            Item::Activation { width, gated: false },
            norm,
            few,
            product([width, vocab], Cut::Words, false),
            Item::Loss { vocab },
        ],
        tied: true,
        tensor_units: None,
        assumptions: Vec::new(),
        frozen: None,
    })
}

/// Rows of the table of the source for the target, with the biases of positions.
fn target_rows(width: u32, biases: u32) -> Item {
    Item::Rows {
        reads: width.into(),
        writes: width.into(),
        saves: [0, 0],
        parameters: biases.into(),
        cut: false,
    }
}

/// T5 on samples of as many tokens of a source as of a target: `seq` each.
///
/// Stages of the decoder hand on what the encoder found beside their own result. The norm after
/// the encoder is counted with the one after the decoder, and biases of positions with the
/// embedding.
///
/// # Errors
/// `E3403` for each size that is too large.
pub fn t5(name: &str, sizes: &T5Sizes, seq: u32) -> Result<Workload, Vec<Diagnostic>> {
    let T5Sizes { vocab, buckets, model, encoders, decoders, heads, head_size, inner, .. } = *sizes;
    let rows = heads.saturating_mul(head_size);
    check(
        name,
        &[
            ("vocab_size", vocab),
            ("d_model", model.saturating_mul(2)),
            ("num_heads", rows.saturating_mul(3)),
            ("relative_attention_num_buckets", buckets.saturating_mul(heads)),
            ("d_ff", inner.saturating_mul(2)),
        ],
    )?;
    let (vocab, width, ffn) = (small(vocab), small(model), small(inner));
    let (heads, dim, rows) = (small(heads), small(head_size), small(rows));
    let (gated, biases) = (sizes.gated, 2 * small(buckets) * heads);
    let norm = Item::Norm { width, parameters: width, heads: false };
    let attention = |causal: bool| {
        let mix = Item::Attention { heads, kv_heads: heads, qk_dim: dim, v_dim: dim, causal };
        [mix, product([rows, width], Cut::Rows, false), Item::Residual { width }]
    };
    let own = |causal: bool| {
        let mut items = vec![norm, product([width, 3 * rows], Cut::Columns, false)];
        items.extend(attention(causal));
        items
    };
    let up = if gated { 2 * ffn } else { ffn };
    let inside = [
        norm,
        product([width, up], Cut::Columns, false),
        Item::Activation { width: ffn, gated },
        product([ffn, width], Cut::Rows, false),
        Item::Residual { width },
    ];
    let mut encoder = own(false);
    encoder.extend(inside);
    let mut decoder = own(true);
    decoder.extend([
        norm,
        product([width, rows], Cut::Columns, false),
        product([width, 2 * rows], Cut::Columns, false),
    ]);
    decoder.extend(attention(false));
    decoder.extend(inside);
    let layer = |name: &str, count: usize, width: u32, items: Vec<Item>| Layer {
        name: name.to_owned(),
        count: small(count),
        width,
        items,
    };
    Ok(Workload {
        name: name.to_owned(),
        seq,
        width: 2 * width,
        layers: vec![
            layer("encoder layer", encoders, width, encoder),
            layer("decoder layer", decoders, 2 * width, decoder),
        ],
        first: vec![Item::Embedding { vocab, width, positions: 0 }, target_rows(width, biases)],
        last: vec![norm, norm, product([width, vocab], Cut::Words, false), Item::Loss { vocab }],
        tied: sizes.tied,
        tensor_units: None,
        assumptions: Vec::new(),
        frozen: None,
    })
}
