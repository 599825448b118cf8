//! The shape of a model of a family.

use ir::import::{FamilyModel, Value};

use super::{LowRank, Routed, Shape};

/// The shape that the file of a family says of a model, with the longest sequence it was made for.
pub(crate) fn family_shape(name: String, model: &FamilyModel) -> Shape {
    let said = model.shape();
    let size = |key: &str| said.get(key).and_then(Value::size).map_or(0, of);
    let is = |key: &str| said.get(key) == Some(&Value::Flag(true));
    let symbol = |symbol: &str| of(model.size(symbol));
    let routed = Routed {
        experts: size("experts"),
        top_k: size("top_k"),
        // Of experts, where other layers have a width of their own.
        ffn: if said.contains_key("expert_ffn") { size("expert_ffn") } else { size("ffn") },
        shared_ffn: size("shared_ffn"),
        dense_layers: size("dense_layers"),
    };
    let low_rank = LowRank {
        q_rank: size("q_rank"),
        kv_rank: size("kv_rank"),
        plain_dim: size("plain_dim"),
        rope_dim: size("rope_dim"),
        v_dim: size("v_dim"),
    };
    Shape {
        name,
        layers: of(model.layers.len()),
        hidden: symbol("M"),
        heads: symbol("H"),
        kv_heads: symbol("G"),
        head_dim: symbol("D"),
        ffn: size("ffn"),
        gated: is("gated"),
        vocab: symbol("V"),
        seq: symbol("P"),
        positions: size("positions"),
        causal: true,
        biases: is("biases"),
        tied: model.flag("tied"),
        head_norm: size("head_norm"),
        routed: (routed.experts > 0).then_some(routed),
        low_rank: (low_rank.kv_rank > 0).then_some(low_rank),
    }
}

/// A size of a file, which is far below the largest number.
fn of(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}
