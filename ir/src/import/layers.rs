//! What the layers of all families are made of. Parameters are found by their names.

use crate::build::Builder;
use crate::module::ValueId;
use crate::op::Op;
use crate::types::TensorType;
use crate::{DType, Dim};

/// The probabilities of dropout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rates {
    /// After the embedding.
    pub(crate) embed: f64,
    /// Before each residual sum.
    pub(crate) residual: f64,
    /// Of the attention's probabilities.
    pub(crate) attention: f64,
}

impl Rates {
    /// No dropout.
    pub(crate) const NONE: Rates = Rates { embed: 0.0, residual: 0.0, attention: 0.0 };

    /// Whether a block drops anything.
    pub(crate) fn in_block(&self) -> bool {
        self.residual > 0.0 || self.attention > 0.0
    }

    /// Whether anything is dropped.
    pub(crate) fn any(&self) -> bool {
        self.embed > 0.0 || self.in_block()
    }
}

/// The sites of dropout in one function, which tell their draws apart.
pub(crate) mod salt {
    /// After the embedding; it is alone in its function.
    pub(crate) const EMBED: u32 = 0;
    /// The attention's probabilities.
    pub(crate) const ATTENTION: u32 = 0;
    /// What attention adds.
    pub(crate) const AFTER_ATTENTION: u32 = 1;
    /// What the feed-forward network adds.
    pub(crate) const AFTER_MLP: u32 = 2;
}

/// The parameter of a name.
pub(crate) fn param(b: &Builder<'_>, name: &str) -> ValueId {
    match b.function().find(name) {
        Some(id) => id,
        None => panic!("`@{}` has no parameter `{name}`", b.function().name),
    }
}

/// Rows of a table, one for each id.
pub(crate) fn rows(b: &mut Builder<'_>, name: &str, table: ValueId, ids: ValueId) -> ValueId {
    b.push(name, Op::Gather { dim: 0, start: 0 }, &[table, ids])
}

/// The positions `i32[S]` of the tokens: from 0 or, where there is one, from `position` on.
pub(crate) fn positions(b: &mut Builder<'_>, seq: Dim) -> ValueId {
    let row = b.iota("row", 0, DType::I32, vec![seq]);
    match b.function().find("position") {
        Some(position) => {
            let from = b.broadcast_like("from", position, row);
            b.add("at", row, from)
        }
        None => row,
    }
}

/// A product with the parameter `weight` plus, where there is one, the parameter `bias` along the
/// last dims.
pub(crate) fn linear(
    b: &mut Builder<'_>,
    name: &str,
    einsum: &str,
    x: ValueId,
    [weight, bias]: [&str; 2],
) -> ValueId {
    let weight = param(b, weight);
    let Some(bias) = b.function().find(bias) else { return b.contract(name, einsum, x, weight) };
    let product = b.contract(&format!("{name}_0"), einsum, x, weight);
    let wide = b.broadcast_like(&format!("{name}_b"), bias, product);
    b.add(name, product, wide)
}

/// Drops elements, where the rate is not zero.
pub(crate) fn dropout(
    b: &mut Builder<'_>,
    name: &str,
    x: ValueId,
    rate: f64,
    salt: u32,
) -> ValueId {
    if rate == 0.0 {
        return x;
    }
    let key = param(b, "key");
    b.composite(name, "dropout", &[("p", rate), ("salt", f64::from(salt))], &[x, key])[0]
}

/// The heads of an attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    /// Query heads.
    pub(crate) count: usize,
    /// Query heads that share one key head.
    pub(crate) group: usize,
    /// What scores are multiplied with.
    pub(crate) scale: f64,
}

/// Causal attention: over the tokens themselves or, where there is a `k_cache`, over the cache with
/// the tokens written into it. Returns the result and the new caches.
///
/// Shapes: `q` is `[B, S, H, D]`, `k` and `v` are `[B, S, G, D]`, caches `[B, C, G, D]`.
pub(crate) fn attend(
    b: &mut Builder<'_>,
    heads: Heads,
    rate: f64,
    [q, k, v]: [ValueId; 3],
) -> (ValueId, Vec<ValueId>) {
    let mut attributes = vec![("scale", heads.scale), ("group", heads.group as f64)];
    if let Some(k_cache) = b.function().find("k_cache") {
        let (v_cache, position) = (param(b, "v_cache"), param(b, "position"));
        let update = Op::DynamicUpdateSlice { dim: 1 };
        let keys = b.push("keys", update.clone(), &[k_cache, k, position]);
        let values = b.push("values", update, &[v_cache, v, position]);
        let operands = [q, keys, values, position];
        let out = b.composite("mixed", "attention_cached", &attributes, &operands)[0];
        return (out, vec![keys, values]);
    }
    attributes.push(("query_offset", 0.0));
    if rate == 0.0 {
        return (b.composite("mixed", "attention", &attributes, &[q, k, v])[0], Vec::new());
    }
    let dropped = [("p", rate), ("salt", f64::from(salt::ATTENTION))];
    attributes.extend(dropped);
    attributes.push(("heads", heads.count as f64));
    let operands = [q, k, v, param(b, "key")];
    (b.composite("mixed", "attention_dropout", &attributes, &operands)[0], Vec::new())
}

/// The type of a key of random numbers.
pub(crate) fn key_type() -> TensorType {
    TensorType::of(DType::U32, &[4])
}
