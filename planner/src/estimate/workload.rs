//! What a training step computes, without saying where: classes of layers and how often each
//! occurs, each a list of items with their sizes per token.
//!
//! A transformer is described by its [`Shape`]; any other model by the items themselves.

mod adapters;
pub(super) mod assumptions;
pub mod encoders;
pub(crate) mod family;
pub mod module;
#[cfg(test)]
mod tests;

use ir::import::ParameterCounts;
use ir::lora::Base;
use ir::{Diagnostic, Span};
use serde::{Deserialize, Serialize};

/// Which dim of a product tensor parallelism cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cut {
    /// The weight's columns: the result is cut; the gradient of the input is a partial sum.
    Columns,
    /// So, where columns are words of a vocabulary, which is padded.
    Words,
    /// The weight's rows: the input is cut already; the result is a partial sum.
    Rows,
    /// Not cut.
    Whole,
}

/// What tensor parallelism cuts of a product of any kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Split {
    /// Nothing.
    Whole,
    /// The weight's columns: the gradient of the input is a partial sum.
    Columns,
    /// The weight's columns, where another product's exchange sums the gradient of the same input.
    ColumnsAgain,
    /// What is summed over: the result is a partial sum.
    Rows,
    /// Inputs and result alike: nothing is exchanged.
    Inside,
}

/// A piece of work of a layer, sized per token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Item {
    /// Layer or RMS normalisation of rows of `width`.
    Norm {
        /// Elements of a row.
        width: u32,
        /// Parameters of the norm: `width`, or twice that with a bias.
        parameters: u32,
        /// Whether it is of heads, which tensor-parallel ranks have parts of.
        heads: bool,
    },
    /// `[tokens, k] · [k, n]` with a weight.
    Product {
        /// Columns of the input.
        k: u32,
        /// Columns of the result.
        n: u32,
        /// What tensor parallelism cuts.
        cut: Cut,
        /// Whether a vector is added.
        bias: bool,
    },
    /// Scaled dot-product attention over the sequence.
    Attention {
        /// Heads of the queries.
        heads: u32,
        /// Heads of keys and values.
        kv_heads: u32,
        /// Elements of a query or key of a head.
        qk_dim: u32,
        /// Elements of a value of a head.
        v_dim: u32,
        /// Whether a token sees only earlier ones.
        causal: bool,
    },
    /// Rotation of queries and keys, `width` elements in all.
    Rope {
        /// Elements.
        width: u32,
    },
    /// An activation function on `width` elements; gated reads twice that.
    Activation {
        /// Elements of the result.
        width: u32,
        /// Whether one half gates the other.
        gated: bool,
    },
    /// Adds to the stream between layers, with dropout or without.
    Residual {
        /// Elements.
        width: u32,
    },
    /// A routed feed-forward layer.
    Experts {
        /// Experts of the layer.
        count: u32,
        /// Experts of a token.
        top_k: u32,
        /// Elements of a token.
        width: u32,
        /// Elements inside an expert.
        ffn: u32,
        /// Whether experts are gated.
        gated: bool,
        /// Expert load imbalance: the busiest rank's tokens over the mean.
        busiest: f64,
    },
    /// Looks up rows of a table.
    Embedding {
        /// Rows.
        vocab: u32,
        /// Elements of a row.
        width: u32,
        /// Rows of a second table, of positions; 0 for none.
        positions: u32,
    },
    /// Cross-entropy over `vocab` logits.
    Loss {
        /// Logits.
        vocab: u32,
    },
    /// Any other kernel without products.
    Rows {
        /// Elements read.
        reads: u64,
        /// Elements written.
        writes: u64,
        /// Elements kept for the backward pass: whole ones, and those that are cut.
        saves: [u64; 2],
        /// Parameters.
        parameters: u64,
        /// Whether tensor parallelism cuts what is read and written.
        cut: bool,
    },
    /// Any other product: `batch` times `[rows, k] · [k, n]`.
    Contraction {
        /// Rows of the input.
        rows: u64,
        /// Elements that are summed.
        k: u64,
        /// Columns of the result.
        n: u64,
        /// Products: for all tokens together with a weight, for each token without.
        batch: u64,
        /// Whether the second operand is a weight.
        weighted: bool,
        /// Whether the weight is counted here.
        own: bool,
        /// Elements kept for the backward pass: whole ones, and those that are cut.
        saves: [u64; 2],
        /// What tensor parallelism cuts.
        split: Split,
    },
    /// Attention of the tokens of a sample to each other, all in one.
    Mixing {
        /// Tokens of a sample.
        seq: u32,
        /// Heads of the queries.
        heads: u32,
        /// Heads of keys and values.
        kv_heads: u32,
        /// Elements of a query, key or value of a head.
        dim: u32,
        /// Whether a token sees only earlier ones.
        causal: bool,
        /// Whether tensor parallelism cuts the heads.
        cut: bool,
    },
    /// Makes a value whole that tensor parallelism has cut, or sums it.
    Exchange {
        /// Elements.
        elements: u64,
    },
    /// Low-rank adapters of a product: `parts` times `[tokens, k] · [k, rank] · [rank, n / parts]`,
    /// added to its result.
    Adapter {
        /// Columns of the input.
        k: u32,
        /// Columns of all results.
        n: u32,
        /// Columns between.
        rank: u32,
        /// How many of them there are.
        parts: u32,
        /// What tensor parallelism cuts of the product.
        cut: Cut,
    },
}

impl Item {
    /// Weights without work of their own.
    fn parameters_alone(parameters: u64) -> Item {
        Item::Rows { reads: 0, writes: 0, saves: [0, 0], parameters, cut: false }
    }

    /// Number of parameters: `[outside experts, of experts]`. A router is outside experts.
    pub fn parameters(&self) -> [u64; 2] {
        let of = |a: u32, b: u32| u64::from(a) * u64::from(b);
        match *self {
            Item::Norm { parameters, .. } => [u64::from(parameters), 0],
            Item::Rows { parameters, .. } => [parameters, 0],
            Item::Contraction { k, n, batch, own, .. } => {
                let weight = k.saturating_mul(n).saturating_mul(batch);
                [if own { weight } else { 0 }, 0]
            }
            Item::Adapter { k, n, rank, parts, .. } => {
                [of(k, rank) * u64::from(parts) + of(rank, n), 0]
            }
            Item::Product { k, n, bias, .. } => [of(k, n) + if bias { u64::from(n) } else { 0 }, 0],
            Item::Experts { count, width, ffn, gated, .. } => {
                let products = if gated { 3 } else { 2 };
                let experts = u64::from(count) * products;
                [of(count, width), experts.saturating_mul(of(width, ffn))]
            }
            Item::Embedding { vocab, width, positions } => {
                [of(vocab, width) + of(positions, width), 0]
            }
            Item::Attention { .. }
            | Item::Mixing { .. }
            | Item::Rope { .. }
            | Item::Activation { .. }
            | Item::Residual { .. }
            | Item::Exchange { .. }
            | Item::Loss { .. } => [0, 0],
        }
    }

    /// Operations of the forward pass for one token of a sequence of `seq`; causal attention
    /// counts the half that is seen.
    pub fn forward_flops(&self, seq: u32) -> f64 {
        let of = |a: u32, b: u32| 2.0 * f64::from(a) * f64::from(b);
        match *self {
            Item::Product { k, n, .. } => of(k, n),
            Item::Adapter { k, n, rank, parts, .. } => of(k, rank) * f64::from(parts) + of(rank, n),
            Item::Attention { heads, qk_dim, v_dim, causal, .. } => {
                of(heads, qk_dim + v_dim) * f64::from(seq) * if causal { 0.5 } else { 1.0 }
            }
            Item::Mixing { seq, heads, dim, causal, .. } => {
                let square = f64::from(seq) * f64::from(seq);
                of(heads, dim) * 2.0 * square * if causal { 0.5 } else { 1.0 }
            }
            Item::Experts { count, top_k, width, ffn, gated, .. } => {
                let products = if gated { 3.0 } else { 2.0 };
                of(count, width) + f64::from(top_k) * products * of(width, ffn)
            }
            Item::Contraction { rows, k, n, batch, .. } => {
                2.0 * rows as f64 * k as f64 * n as f64 * batch as f64
            }
            Item::Norm { .. }
            | Item::Exchange { .. }
            | Item::Rope { .. }
            | Item::Activation { .. }
            | Item::Residual { .. }
            | Item::Embedding { .. }
            | Item::Loss { .. }
            | Item::Rows { .. } => 0.0,
        }
    }
}

/// Adds parameters that belong to no product, or takes them from norms, until there are `wanted`.
fn set_parameters(items: &mut Vec<Item>, wanted: u64) {
    let count = |items: &[Item]| items.iter().map(|item| item.parameters()[0]).sum::<u64>();
    let mut surplus = count(items).saturating_sub(wanted);
    for item in items.iter_mut() {
        if let Item::Norm { parameters, .. } = item {
            let less = surplus.min(u64::from(*parameters));
            *parameters -= less as u32;
            surplus -= less;
        }
    }
    let missing = wanted.saturating_sub(count(items));
    if missing > 0 {
        items.push(Item::parameters_alone(missing));
    }
}

/// Layers that are alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// For people.
    pub name: String,
    /// How many there are.
    pub count: u32,
    /// Elements of a token that it takes from the layer before.
    pub width: u32,
    /// What each computes, in order.
    pub items: Vec<Item>,
}

impl Layer {
    /// Parameters of one layer: dense ones, and those of experts.
    pub fn parameters(&self) -> [u64; 2] {
        self.items.iter().fold([0, 0], |sum, item| {
            let [dense, expert] = item.parameters();
            [sum[0].saturating_add(dense), sum[1].saturating_add(expert)]
        })
    }
}

/// What a step computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// The model's name.
    pub name: String,
    /// Tokens of a sample.
    pub seq: u32,
    /// Elements of a token between layers at most: what stages send each other.
    pub width: u32,
    /// The classes of layers, in the order of the model.
    pub layers: Vec<Layer>,
    /// What the first stage does before its layers.
    pub first: Vec<Item>,
    /// What the last stage does after its layers.
    pub last: Vec<Item>,
    /// Whether the last product's weight is the embedding's: counted once, held by both ends.
    pub tied: bool,
    /// What tensor-parallel ranks have to divide, where that is not the heads of attention.
    pub tensor_units: Option<u32>,
    /// What the model computes and this work leaves out, in words.
    pub assumptions: Vec<String>,
    /// What of the model is frozen; none where all of it is trained.
    #[serde(default)]
    pub frozen: Option<Frozen>,
}

/// A model of which adapters alone are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// How the weights of the layers' products are stored; none for the type of the others.
    pub base: Option<Base>,
}

impl Workload {
    /// Sets the expert load imbalance of a model: the busiest of the ranks that share experts has
    /// `times` the mean number of tokens, and all others wait for it. None without experts.
    pub fn routed_unevenly(mut self, times: f64) -> Option<Workload> {
        let mut routed = 0;
        for item in self.layers.iter_mut().flat_map(|layer| &mut layer.items) {
            if let Item::Experts { busiest, .. } = item {
                *busiest = times;
                routed += 1;
            }
        }
        (routed > 0).then_some(self)
    }

    /// Expert load imbalance: the busiest rank's tokens over the mean.
    pub fn busiest(&self) -> f64 {
        let items = self.layers.iter().flat_map(|layer| &layer.items);
        let busiest =
            items.map(|item| if let Item::Experts { busiest, .. } = item { *busiest } else { 1.0 });
        busiest.fold(1.0, f64::max)
    }

    /// Layers of all classes.
    pub fn depth(&self) -> u32 {
        self.layers.iter().map(|layer| layer.count).sum()
    }

    /// Parameters of the model; shared ones once.
    pub fn parameters(&self) -> u64 {
        let layers = self.layers.iter().map(|layer| {
            let [dense, expert] = layer.parameters();
            u64::from(layer.count).saturating_mul(dense.saturating_add(expert))
        });
        let ends = self.first.iter().chain(&self.last).map(|item| item.parameters()[0]);
        let shared = if self.tied { self.head_parameters() } else { 0 };
        let layers = layers.fold(0, u64::saturating_add);
        layers.saturating_add(ends.sum::<u64>() - shared)
    }

    /// Makes the parameters those of a model whose layers are one class: what its first functions,
    /// its layers and what follows them have beyond products is counted as norms and vectors.
    pub(super) fn set_parameters(&mut self, counts: &ParameterCounts) {
        let [head, tied] = [self.head_parameters(), u64::from(self.tied)];
        set_parameters(&mut self.first, counts.first);
        set_parameters(&mut self.last, counts.last + head * tied);
        let mut left = counts.layers.iter();
        for layer in &mut self.layers {
            let own: u64 = left.by_ref().take(layer.count as usize).sum();
            let own = own / u64::from(layer.count.max(1));
            let of_experts = layer.parameters()[1];
            set_parameters(&mut layer.items, own.saturating_sub(of_experts));
        }
    }

    /// Operations of a step for one token, forward and backward: three times the forward ones, but
    /// for the gradients of frozen weights.
    pub fn flops_per_token(&self) -> f64 {
        let of = |items: &[Item]| items.iter().map(|i| i.forward_flops(self.seq)).sum::<f64>();
        let layers = self.layers.iter().map(|l| f64::from(l.count) * of(&l.items)).sum::<f64>();
        let all = 3.0 * (layers + of(&self.first) + of(&self.last));
        all - self.frozen.map_or(0.0, |_| self.frozen_flops_per_token())
    }

    /// Operations that gradients of frozen weights would take.
    fn frozen_flops_per_token(&self) -> f64 {
        let is_frozen = |item: &&Item| {
            matches!(item, Item::Product { .. } | Item::Experts { .. })
                || matches!(item, Item::Contraction { weighted: true, .. })
        };
        let of = |items: &[Item]| {
            items.iter().filter(is_frozen).map(|item| item.forward_flops(self.seq)).sum::<f64>()
        };
        let layers = self.layers.iter().map(|l| f64::from(l.count) * of(&l.items)).sum::<f64>();
        layers + of(&self.first) + of(&self.last)
    }

    /// Operations of attention for one token, forward and backward: those of tokens that are seen,
    /// and those of tokens that causal attention masks.
    pub fn attention_flops_per_token(&self) -> [f64; 2] {
        let mut sum = [0.0; 2];
        for layer in &self.layers {
            for item in &layer.items {
                let flops = 3.0 * f64::from(layer.count) * item.forward_flops(self.seq);
                let (Item::Attention { causal, .. } | Item::Mixing { causal, .. }) = item else {
                    continue;
                };
                sum[0] += flops;
                sum[1] += if *causal { flops } else { 0.0 };
            }
        }
        sum
    }

    /// Parameters that a token visits: of the experts of a layer, those that it is routed to.
    pub fn visited_parameters(&self) -> f64 {
        let mut visited = self.parameters() as f64;
        for layer in &self.layers {
            for item in &layer.items {
                if let Item::Experts { count, top_k, .. } = item {
                    let idle = 1.0 - f64::from(*top_k) / f64::from((*count).max(1));
                    visited -= f64::from(layer.count) * item.parameters()[1] as f64 * idle;
                }
            }
        }
        visited
    }

    /// Operations of a step for one sample, forward and backward.
    pub fn flops_per_sample(&self) -> f64 {
        self.flops_per_token() * f64::from(self.seq)
    }

    /// Parameters of the last product.
    pub(super) fn head_parameters(&self) -> u64 {
        let products = self.last.iter().filter(|item| matches!(item, Item::Product { .. }));
        products.map(|item| item.parameters()[0]).next_back().unwrap_or(0)
    }
}

/// Routed layers of a transformer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Routed {
    /// Experts of a layer.
    pub experts: u32,
    /// Experts of a token.
    pub top_k: u32,
    /// Elements inside an expert.
    pub ffn: u32,
    /// Elements inside the expert that every token visits; 0 for none.
    pub shared_ffn: u32,
    /// Layers at the beginning that are not routed.
    pub dense_layers: u32,
}

/// Low-rank attention (DeepSeek-AI 2024): queries and keys have parts with and without positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LowRank {
    /// Elements of the compressed queries; 0 where these are computed from activations.
    pub q_rank: u32,
    /// Elements of the compressed keys and values.
    pub kv_rank: u32,
    /// Elements of a head's query without positions.
    pub plain_dim: u32,
    /// Elements of a head's query with positions.
    pub rope_dim: u32,
    /// Elements of a head's value.
    pub v_dim: u32,
}

/// The shape of a transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// The model's name.
    pub name: String,
    /// Layers.
    pub layers: u32,
    /// Elements of a token between layers.
    pub hidden: u32,
    /// Heads of the queries.
    pub heads: u32,
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Elements inside the feed-forward layers.
    pub ffn: u32,
    /// Whether they are gated; such models rotate queries and keys.
    pub gated: bool,
    /// Tokens that the model knows.
    pub vocab: u32,
    /// Tokens of a sample.
    pub seq: u32,
    /// Rows of a learned table of positions; 0 for none.
    pub positions: u32,
    /// Whether a token sees only earlier ones.
    pub causal: bool,
    /// Whether products add vectors.
    pub biases: bool,
    /// Whether the head's weight is the embedding's.
    pub tied: bool,
    /// Parameters of the norms of queries and keys; 0 for none.
    #[serde(default)]
    pub head_norm: u32,
    /// Routed layers.
    pub routed: Option<Routed>,
    /// Low-rank attention.
    pub low_rank: Option<LowRank>,
}

impl Shape {
    /// The work of the transformer.
    ///
    /// # Errors
    /// `E3403` for each size that is 0 or does not fit the others.
    pub fn workload(&self) -> Result<Workload, Vec<Diagnostic>> {
        self.check()?;
        let dense = self.routed.map_or(self.layers, |routed| routed.dense_layers.min(self.layers));
        let mut layers = Vec::new();
        if dense > 0 {
            let items = self.layer(None);
            layers.push(Layer { name: "layer".into(), count: dense, width: self.hidden, items });
        }
        if dense < self.layers {
            let (items, count) = (self.layer(self.routed), self.layers - dense);
            layers.push(Layer { name: "routed layer".into(), count, width: self.hidden, items });
        }
        let Shape { vocab, hidden: width, positions, .. } = *self;
        let embedding = Item::Embedding { vocab, width, positions };
        let head = Item::Product { k: self.hidden, n: self.vocab, cut: Cut::Words, bias: false };
        Ok(Workload {
            name: self.name.clone(),
            seq: self.seq,
            width: self.hidden,
            layers,
            first: vec![embedding],
            last: vec![self.norm(), head, Item::Loss { vocab: self.vocab }],
            tied: self.tied,
            tensor_units: None,
            assumptions: Vec::new(),
            frozen: None,
        })
    }

    fn check(&self) -> Result<(), Vec<Diagnostic>> {
        let sizes = [
            ("layers", self.layers),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("vocab", self.vocab),
            ("seq", self.seq),
        ];
        let mut wrong: Vec<String> = Vec::new();
        wrong.extend(sizes.iter().filter(|s| s.1 == 0).map(|s| format!("`{}` is 0", s.0)));
        wrong.extend(
            sizes
                .iter()
                .filter(|s| s.1 > SIZE_MAX)
                .map(|(name, size)| format!("`{name}` is {size}, more than {SIZE_MAX}")),
        );
        let rows = u64::from(self.heads) * u64::from(self.head_dim);
        if rows > u64::from(SIZE_MAX) {
            wrong.push(format!("{} heads of {} elements", self.heads, self.head_dim));
        }
        let inner = self.routed.map_or(0, |routed| routed.ffn.max(routed.shared_ffn));
        if self.ffn.max(inner) > SIZE_MAX {
            wrong.push(format!("`ffn` is {}, more than {SIZE_MAX}", self.ffn.max(inner)));
        }
        if self.ffn == 0 && self.routed.is_none_or(|routed| routed.dense_layers > 0) {
            wrong.push("`ffn` is 0".into());
        }
        if self.kv_heads > 0 && !self.heads.is_multiple_of(self.kv_heads) {
            let (heads, kv_heads) = (self.heads, self.kv_heads);
            wrong.push(format!("{heads} heads cannot share {kv_heads} heads of keys and values"));
        }
        if let Some(routed) = self.routed
            && (routed.experts == 0 || routed.top_k == 0 || routed.top_k > routed.experts)
        {
            let (top_k, experts) = (routed.top_k, routed.experts);
            wrong.push(format!("a token visits {top_k} of {experts} experts"));
        }
        if wrong.is_empty() {
            return Ok(());
        }
        let span = || Span::of(self.name.clone());
        Err(wrong.into_iter().map(|text| Diagnostic::error("E3403", span(), text)).collect())
    }

    fn norm(&self) -> Item {
        let parameters = if self.gated { self.hidden } else { 2 * self.hidden };
        Item::Norm { width: self.hidden, parameters, heads: false }
    }

    fn layer(&self, routed: Option<Routed>) -> Vec<Item> {
        let mut items = vec![self.norm()];
        items.extend(self.attention());
        items.push(Item::Residual { width: self.hidden });
        items.push(self.norm());
        match routed {
            None => items.extend(self.feed_forward(self.ffn)),
            Some(routed) => {
                let Routed { experts: count, top_k, ffn, shared_ffn, .. } = routed;
                let (width, gated) = (self.hidden, self.gated);
                let busiest = 1.0;
                items.push(Item::Experts { count, top_k, width, ffn, gated, busiest });
                if shared_ffn > 0 {
                    items.extend(self.feed_forward(shared_ffn));
                }
            }
        }
        items.push(Item::Residual { width: self.hidden });
        items
    }

    fn feed_forward(&self, ffn: u32) -> Vec<Item> {
        let inner = if self.gated { 2 * ffn } else { ffn };
        vec![
            self.product(self.hidden, inner, Cut::Columns),
            Item::Activation { width: ffn, gated: self.gated },
            self.product(ffn, self.hidden, Cut::Rows),
        ]
    }

    fn attention(&self) -> Vec<Item> {
        let (heads, causal) = (self.heads, self.causal);
        if let Some(rank) = self.low_rank {
            let LowRank { q_rank, kv_rank, plain_dim, rope_dim, v_dim } = rank;
            let qk_dim = plain_dim + rope_dim;
            let queries_of = if q_rank == 0 { self.hidden } else { q_rank };
            return vec![
                self.product(self.hidden, q_rank + kv_rank + rope_dim, Cut::Whole),
                Item::Norm { width: q_rank + kv_rank, parameters: q_rank + kv_rank, heads: false },
                self.product(queries_of, heads * qk_dim, Cut::Columns),
                self.product(kv_rank, heads * (plain_dim + v_dim), Cut::Columns),
                Item::Rope { width: heads * rope_dim + rope_dim },
                Item::Attention { heads, kv_heads: heads, qk_dim, v_dim, causal },
                self.product(heads * v_dim, self.hidden, Cut::Rows),
            ];
        }
        let (kv_heads, dim) = (self.kv_heads, self.head_dim);
        let (q, kv) = (heads * dim, kv_heads * dim);
        let mut items = vec![self.product(self.hidden, q + 2 * kv, Cut::Columns)];
        if self.head_norm > 0 {
            items.push(Item::Norm { width: q + kv, parameters: self.head_norm, heads: true });
        }
        if self.gated {
            items.push(Item::Rope { width: q + kv });
        }
        items.push(Item::Attention { heads, kv_heads, qk_dim: dim, v_dim: dim, causal });
        items.push(self.product(q, self.hidden, Cut::Rows));
        items
    }

    fn product(&self, k: u32, n: u32, cut: Cut) -> Item {
        Item::Product { k, n, cut, bias: self.biases }
    }
}

/// What the names of composites begin with that are attention.
const ATTENTION: &str = "attention";

/// The largest size of one dim. Chosen: far above any real one, and products of two fit in 64 bits.
const SIZE_MAX: u32 = 1 << 24;
