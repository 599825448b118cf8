//! Inference in closed form: the passes of a prompt and of one token more, and what weights and
//! caches hold.
//!
//! A copy of the model lies over `tp · pp` devices; stages work on as many groups of sequences at
//! once as there are stages. A pass over new tokens costs what the forward pass of training costs,
//! without a loss; each new token reads all that is cached. Experts lie over `ep` ranks of a stage:
//! over those of one copy, or over those of several, which then share them, exchange the tokens of
//! each layer and go on in step. As in training, tokens choose all experts equally often; those
//! that none chose are not read.
//!
//! Legend: b sequences of a group, t new tokens of each, c cached tokens of each.

mod assumed;
mod parts;
pub mod requests;
pub mod speculation;
pub mod storage;
#[cfg(test)]
mod tests;

use std::fmt;

use serde::Serialize;

pub use self::parts::Parts;
pub use self::requests::{InFlight, Lengths, PASS_TOKENS, StaticBatch};
pub use self::speculation::{Drafter, Drafting, Speculation};
pub use self::storage::Storage;

use super::Estimator;
use super::layer::{Lowering, Weights};
use super::network::Group;
use super::price::{Inside, LayerPrice, Pass};
use super::profile::ExpertPlacement;
use super::workload::{Item, Layer};
use crate::configuration::Configuration;
use crate::divisors::divisors;

/// Tokens beyond which no context is looked for. Chosen: far above any model.
const CONTEXT_MAX: u64 = 1 << 30;
/// Sequences of a copy beyond which no more are looked for. Chosen: far above any server.
const SEQUENCES_MAX: u64 = 1 << 24;

/// How a copy of the model lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Replica {
    /// Tensor-parallel ranks.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Ranks of a stage over which whole routed experts lie: more than `tp` where copies share
    /// them, 1 where each rank of a copy has a slice of every expert.
    pub ep: u32,
}

impl Replica {
    /// Ranks of a stage that go on in step: those of a copy, or of all copies that share experts.
    pub fn together(self) -> u32 {
        self.tp.max(self.ep)
    }

    /// Copies that share experts.
    pub fn sharing(self) -> u32 {
        (self.ep / self.tp).max(1)
    }
}

impl fmt::Display for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp={} pp={}", self.tp, self.pp)?;
        if self.ep > 1 { write!(f, " ep={}", self.ep) } else { Ok(()) }
    }
}

/// Sequences of a copy that are worked on at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Load {
    /// All of them.
    pub sequences: u64,
    /// Groups, of which each stage works on one at a time.
    pub groups: u32,
    /// Sequences of the largest group.
    pub batch: u32,
}

impl Load {
    /// Spreads `sequences` over one group for each of `stages` stages, or over one group for each
    /// sequence where there are fewer sequences than stages.
    pub fn of(sequences: u64, stages: u32) -> Load {
        let groups = sequences.clamp(1, stages.into()) as u32;
        let batch = sequences.div_ceil(groups.into()).min(u32::MAX.into()) as u32;
        Load { sequences, groups, batch }
    }
}

/// The tokens that one pass works on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Sequences of a group.
    pub sequences: u32,
    /// New tokens of each.
    pub tokens: u32,
    /// Tokens of each that are cached.
    pub cached: u64,
    /// Whether each new token has logits; otherwise the last one of a sequence has.
    pub all_logits: bool,
    /// Tokens of prompts that are worked on beside the sequences.
    pub prompt_tokens: u32,
    /// Tokens of each of those prompts.
    pub prompt: u32,
}

impl Batch {
    /// `tokens` new tokens of each of `sequences` sequences, after `cached` ones.
    pub fn of(sequences: u32, tokens: u32, cached: u64) -> Batch {
        Batch { sequences, tokens, cached, ..Batch::default() }
    }

    /// Rows of products.
    fn rows(&self) -> f64 {
        f64::from(self.sequences) * f64::from(self.tokens) + f64::from(self.prompt_tokens)
    }

    /// Rows that have logits.
    fn logits(&self) -> u32 {
        let each = if self.all_logits { self.tokens } else { 1 };
        let prompts = self.prompt_tokens.div_ceil(self.prompt.max(1));
        self.sequences.saturating_mul(each).saturating_add(prompts)
    }
}

/// A forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Forward {
    /// Seconds from the first layer to the last.
    pub latency_s: f64,
    /// Seconds of the slowest stage: so often a group is done.
    pub slowest_s: f64,
}

impl Forward {
    /// Seconds from one token of a sequence to the next, where `groups` groups take turns:
    /// `max(latency_s, groups · slowest_s)`.
    pub fn turn_s(&self, groups: u32) -> f64 {
        self.latency_s.max(self.slowest_s * f64::from(groups))
    }
}

/// What the fullest device of a copy holds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Held {
    /// Bytes of weights.
    pub weights_bytes: f64,
    /// Bytes that a cached token of one sequence takes.
    pub cache_bytes_per_token: f64,
    /// Bytes of libraries and communicators.
    pub reserve_bytes: f64,
}

/// Inference of one workload on one cluster.
#[derive(Clone, Copy, Debug)]
pub struct Serving<'a> {
    /// Devices, links and the workload.
    pub estimator: &'a Estimator<'a>,
    /// Elements of a token that one layer caches where attention caches a shared vector
    /// (DeepSeek-AI 2024) and not keys and values.
    pub latent: Option<u32>,
    /// How weights and caches are stored.
    pub storage: Storage,
    /// Speculative decoding; none where each pass gives one token of a sequence.
    pub drafting: Option<Drafting<'a>>,
}

/// The work of a pass, before it is divided among stages.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    layers: Pass,
    first: Pass,
    last: Pass,
    /// Seconds in which all layers read what is cached.
    cached_s: f64,
    /// Seconds of all messages between stages, and of the slowest one.
    sends_s: [f64; 2],
}

impl<'a> Serving<'a> {
    /// Inference with weights as products read them, a two-byte KV cache and no speculation.
    pub fn new(estimator: &'a Estimator<'a>, latent: Option<u32>) -> Serving<'a> {
        Serving { estimator, latent, storage: Storage::default(), drafting: None }
    }

    /// Whether a copy can lie so: heads and experts divide, and no stage is without a layer.
    pub fn allows(&self, copy: Replica) -> bool {
        let mut items = self.estimator.work.layers.iter().flat_map(|layer| &layer.items);
        let is_even = items.all(|item| {
            let Item::Attention { heads, .. } = item else { return true };
            heads.is_multiple_of(copy.tp)
        });
        let shares = copy.ep == self.inner_experts(copy.tp)
            || (copy.ep == 1 && self.experts_slice(copy.tp))
            || (copy.ep.is_multiple_of(copy.tp) && self.experts_divide(copy.ep));
        is_even && shares && copy.pp >= 1 && copy.pp <= self.estimator.work.depth()
    }

    /// A copy whose experts lie over its own tensor-parallel ranks: over the largest divisor of
    /// `tp` that divides the number of experts.
    pub fn alone(&self, tp: u32, pp: u32) -> Replica {
        Replica { tp, pp, ep: self.inner_experts(tp) }
    }

    /// The ways in which experts lie over `copies` copies of `tp` ranks a stage: each sliced over
    /// the ranks of one (`ep=1`), or whole over the ranks of one, or of two, or of as many more as
    /// divide the copies and the experts.
    pub fn expert_ways(&self, tp: u32, copies: u32) -> Vec<u32> {
        let inner = self.inner_experts(tp);
        let sliced = Some(1).filter(|_| inner > 1 && self.experts_slice(tp));
        let shared = divisors(copies).into_iter().filter_map(|n| tp.checked_mul(n));
        let shared = shared.filter(|ep| *ep > inner && *ep > tp && self.experts_divide(*ep));
        sliced.into_iter().chain([inner]).chain(shared).collect()
    }

    /// Whether the model goes on after what it was given: some of its layers see earlier tokens
    /// alone.
    pub fn decodes(&self) -> bool {
        self.estimator.work.layers.iter().any(caches)
    }

    /// A pass of `batch` sequences over `tokens` new tokens of each, after `cached` ones, on this
    /// copy and on each that shares its experts. An encoder runs in the first pass alone.
    pub fn forward(&self, copy: Replica, batch: u32, tokens: u32, cached: u64) -> Forward {
        self.pass(copy, &Batch::of(batch, tokens, cached))
    }

    /// A pass over a batch, on this copy and on each that shares its experts.
    pub fn pass(&self, copy: Replica, batch: &Batch) -> Forward {
        let work = self.work(copy, batch);
        let layers = work.layers.total_s() + work.cached_s;
        let (first, last) = (work.first.total_s(), work.last.total_s());
        let most = self.most(copy, |layer| runs(layer, batch.cached));
        let [sends_s, between_s] = work.sends_s;
        Forward {
            latency_s: first + layers + last + sends_s,
            slowest_s: layers * most
                + if copy.pp > 1 { first.max(last) } else { first + last }
                + between_s,
        }
    }

    fn work(&self, copy: Replica, batch: &Batch) -> Work {
        let model = self.estimator.work;
        let mut work = Work::default();
        let rows = batch.rows();
        // Where prompts are worked on beside sequences, each row is a sequence of one token to all
        // but the inside of attention.
        let (sequences, tokens) = match batch.prompt_tokens {
            0 => (batch.sequences, batch.tokens),
            beside => (batch.sequences.saturating_mul(batch.tokens).saturating_add(beside), 1),
        };
        // Tokens of all ranks that share experts.
        let routed = rows * f64::from(copy.sharing());
        for layer in model.layers.iter().filter(|layer| runs(layer, batch.cached)) {
            let items = used(&layer.items, routed);
            let mut pass = self.price(copy, &items, sequences, tokens).forward;
            if batch.prompt_tokens > 0 {
                pass += self.inside_of_prompts(copy, &items, batch);
            }
            let count = f64::from(layer.count);
            work.layers += pass * count;
            work.cached_s += count * self.cached_s(copy, &items, batch);
        }
        work.first = self.end_price(copy, &model.first, sequences, tokens).forward;
        let last: Vec<Item> =
            model.last.iter().copied().filter(|item| !matches!(item, Item::Loss { .. })).collect();
        // The next token follows from the last one alone.
        work.last = self.end_price(copy, &last, batch.logits(), 1).forward;
        let bytes = rows * f64::from(model.width) * 2.0;
        let network = &self.estimator.network;
        let (apart, pp) = (u64::from(copy.together()), u64::from(copy.pp));
        let stages = Group::apart(pp, apart, apart * pp);
        let near_s = network.send_s(bytes, apart);
        let far_s = network.send_s(bytes, network.furthest(stages, apart));
        let far = network.nodes(stages) - 1.0;
        let all_s = far * far_s + (f64::from(copy.pp - 1) - far) * near_s;
        work.sends_s = if copy.pp > 1 { [all_s, far_s] } else { [0.0; 2] };
        work
    }

    /// The inside of attention of the prompts beside a batch: their share of that of one prompt.
    fn inside_of_prompts(&self, copy: Replica, items: &[Item], batch: &Batch) -> Pass {
        let is_attention = |item: &Item| matches!(item, Item::Attention { .. });
        let inside: Vec<Item> = items.iter().copied().filter(is_attention).collect();
        let share = f64::from(batch.prompt_tokens) / f64::from(batch.prompt.max(1));
        self.price(copy, &inside, 1, batch.prompt.max(1)).forward * share
    }

    /// What the fullest device holds besides working memory.
    pub fn held(&self, copy: Replica) -> Held {
        let work = self.estimator.work;
        let most = self.most(copy, |_| true);
        let (mut parameters, mut cache) = (0.0, 0.0);
        for layer in &work.layers {
            let price = self.price(copy, &layer.items, 1, 1);
            let count = f64::from(layer.count);
            parameters += count * (price.parameters + price.expert_parameters);
            if caches(layer) {
                cache += count * self.cached_bytes(copy, &layer.items);
            }
        }
        let end = |items: &[Item]| self.price(copy, items, 1, 1).parameters;
        // A table that is looked up stays as wide as what it gives.
        let first = end(&work.first) * self.estimator.job.arithmetic.element_bytes();
        let last = end(&work.last) * self.end_bytes();
        let ends = match copy.pp {
            1 if work.tied => first,
            1 => first + last,
            _ => first.max(last),
        };
        let draft = self.drafting.and_then(|drafting| drafting.held(copy));
        let [draft_weights, draft_cache] =
            draft.map_or([0.0; 2], |held| [held.weights_bytes, held.cache_bytes_per_token]);
        Held {
            weights_bytes: parameters * most * self.weight_bytes() + ends + draft_weights,
            cache_bytes_per_token: cache * self.most(copy, caches) + draft_cache,
            reserve_bytes: self.estimator.profile.reserve_bytes,
        }
    }

    /// Bytes of an element of the head's weight. Releases that compute in one-byte floats leave
    /// it in two (NVIDIA's ModelOpt, vLLM's `compressed-tensors`, DeepSeek-AI 2024, section 3.3.1),
    /// those that only store weights narrowly do not.
    fn end_bytes(&self) -> f64 {
        match self.storage.weights {
            Some(_) => self.weight_bytes(),
            None => self.estimator.job.arithmetic.element_bytes(),
        }
    }

    /// Bytes of an element of the weights of products.
    fn weight_bytes(&self) -> f64 {
        let computed = self.estimator.job.arithmetic.operand_bytes();
        self.storage.weights.map_or(computed, |format| format.bytes(1.0, 1.0))
    }

    /// Bytes of the fullest device of a copy with `sequences` sequences of `context` tokens each,
    /// whose prefix of `shared` tokens is cached once, while prompts are prefilled in chunks of
    /// `piece` tokens.
    pub fn bytes(
        &self,
        copy: Replica,
        sequences: u64,
        [context, shared]: [u64; 2],
        piece: u32,
    ) -> f64 {
        let own = context.saturating_sub(shared) as f64 * sequences as f64;
        let cache = self.held(copy).cache_bytes_per_token;
        self.fixed_bytes(copy, sequences, piece) + cache * (own + shared as f64)
    }

    /// The longest context, in tokens, that fits for each of `sequences` sequences of a copy, with
    /// prompts worked on in pieces of at most `piece` tokens; 0 where weights alone do not fit.
    pub fn longest_context(&self, copy: Replica, sequences: u64, piece: u32) -> u64 {
        let left = self.estimator.memory_bytes - self.fixed_bytes(copy, sequences, piece);
        let each = self.held(copy).cache_bytes_per_token * sequences as f64;
        if left < 0.0 { 0 } else { ((left / each) as u64).min(CONTEXT_MAX) }
    }

    /// The largest number of sequences of `context` tokens that a copy has memory for, with a
    /// prefix of `shared` tokens cached once and prompts prefilled in chunks of `piece` tokens; 0
    /// where one does not fit.
    pub fn most_sequences(&self, copy: Replica, [context, shared]: [u64; 2], piece: u32) -> u64 {
        let held = self.held(copy);
        let once = held.cache_bytes_per_token * shared as f64;
        let left = self.estimator.memory_bytes - held.weights_bytes - held.reserve_bytes - once;
        let each = held.cache_bytes_per_token * context.saturating_sub(shared).max(1) as f64;
        let most = ((left.max(0.0) / each) as u64).min(SEQUENCES_MAX);
        let prompt = self.working(copy, 1, piece);
        greatest(most, |count| {
            let working = self.working(copy, Load::of(count, copy.pp).batch, 1).max(prompt);
            working + each * count as f64 <= left
        })
    }

    /// The largest number of sequences of `context` tokens, up to `sequences`, each of which has
    /// its next token within `limit_s` seconds; 0 where one sequence alone does not.
    pub fn most_within(&self, copy: Replica, context: u64, sequences: u64, limit_s: f64) -> u64 {
        greatest(sequences, |count| {
            let Load { groups, batch, .. } = Load::of(count, copy.pp);
            self.token(copy, batch, context).turn_s(groups) <= limit_s
        })
    }

    /// What a device holds whatever the context: weights, reserve and working memory.
    fn fixed_bytes(&self, copy: Replica, sequences: u64, piece: u32) -> f64 {
        let held = self.held(copy);
        let Load { batch, .. } = Load::of(sequences, copy.pp);
        let working = self.working_bytes(copy, batch, piece);
        held.weights_bytes + held.reserve_bytes + working
    }

    /// Bytes that a device needs while a group of `batch` sequences goes on, or while a prompt is
    /// worked on in pieces of `piece` tokens.
    pub fn working_bytes(&self, copy: Replica, batch: u32, piece: u32) -> f64 {
        self.working(copy, 1, piece).max(self.working(copy, batch, 1))
    }

    /// The largest share of some layers that lie on one stage.
    fn most(&self, copy: Replica, are: impl Fn(&Layer) -> bool) -> f64 {
        let work = self.estimator.work;
        let all: u32 = work.layers.iter().filter(|layer| are(layer)).map(|l| l.count).sum();
        let most = work.depth().div_ceil(copy.pp).min(all);
        f64::from(most) / f64::from(all.max(1))
    }

    /// Bytes that the largest layer needs while it runs, and the logits of the last tokens.
    fn working(&self, copy: Replica, batch: u32, tokens: u32) -> f64 {
        let work = self.estimator.work;
        let layers = work.layers.iter().map(|layer| {
            let price = self.price(copy, &layer.items, batch, tokens);
            price.saved_bytes + price.working_bytes
        });
        let products = work.last.iter().map(|item| {
            let Item::Product { n, .. } = item else { return 0.0 };
            (f64::from(*n) / f64::from(copy.tp)).ceil()
        });
        let logits = products.fold(0.0, f64::max) * f64::from(batch) * 4.0;
        layers.fold(0.0, f64::max) + logits
    }

    fn price(&self, copy: Replica, items: &[Item], batch: u32, tokens: u32) -> LayerPrice {
        self.price_of(copy, items, [batch, tokens], self.weight_bytes())
    }

    /// The price of what is before or after all layers, whose products are two bytes wide at
    /// least.
    fn end_price(&self, copy: Replica, items: &[Item], batch: u32, tokens: u32) -> LayerPrice {
        self.price_of(copy, items, [batch, tokens], self.end_bytes())
    }

    fn price_of(
        &self,
        copy: Replica,
        items: &[Item],
        [batch, tokens]: [u32; 2],
        bytes: f64,
    ) -> LayerPrice {
        let Estimator { rates, network, profile, job, work, .. } = self.estimator;
        let Replica { tp, ep, .. } = copy;
        let (dp, pp) = (copy.sharing(), copy.pp);
        let c = Configuration { tp, ep, dp, pp, microbatch: batch, ..Configuration::default() };
        let slices_group = Group::near(self.expert_slices(copy).into());
        let inside = Inside { slices_group, ..Inside::of(&c, ExpertPlacement::FromTensor) };
        let seq = f64::from(tokens);
        let weights = Weights {
            bytes,
            // Kernels of inference are made for few rows, and those before products cast to one
            // byte with scales that were found beforehand.
            of_training: false,
            frozen: None,
        };
        Lowering { rates, network, profile, job, inside, seq, weights }.price(items, work.width)
    }

    /// Ranks of a copy that each hold a slice of every expert.
    fn expert_slices(&self, copy: Replica) -> u32 {
        let is_sliced = copy.ep == 1 && self.expert_counts().next().is_some();
        if is_sliced { copy.tp } else { 1 }
    }

    /// Bytes of a token that a device caches for these items.
    fn cached_bytes(&self, copy: Replica, items: &[Item]) -> f64 {
        let cache = self.storage.cache;
        let bytes = items.iter().map(|item| {
            let Item::Attention { kv_heads, qk_dim, v_dim, .. } = item else { return 0.0 };
            let heads = (f64::from(*kv_heads) / f64::from(copy.tp)).ceil();
            // A shared vector is whole on every device.
            self.latent.map_or_else(
                || cache.bytes(heads, f64::from(*qk_dim)) + cache.bytes(heads, f64::from(*v_dim)),
                |elements| cache.bytes(1.0, f64::from(elements)),
            )
        });
        bytes.sum()
    }

    /// Seconds in which a layer works on what is cached: those of reading it, or of the operations
    /// of several new tokens on it where these take longer.
    fn cached_s(&self, copy: Replica, items: &[Item], batch: &Batch) -> f64 {
        let Batch { sequences, tokens, cached, .. } = *batch;
        let Estimator { rates, profile, .. } = self.estimator;
        let seen = f64::from(sequences) * cached as f64;
        let read_s = rates.rows_s(self.cached_bytes(copy, items) * seen);
        if tokens <= 1 || cached == 0 {
            return read_s;
        }
        let computed_s = items.iter().map(|item| {
            let Item::Attention { heads, qk_dim, v_dim, .. } = item else { return 0.0 };
            let heads = (f64::from(*heads) / f64::from(copy.tp)).ceil();
            let flops = 2.0 * seen * f64::from(tokens) * heads * f64::from(qk_dim + v_dim);
            let [forward_s, _] =
                rates.flash_s(profile.attention, flops, cached as f64, f64::from(*qk_dim));
            forward_s
        });
        read_s.max(computed_s.sum())
    }

    /// How many routed experts each layer has that has some.
    fn expert_counts(&self) -> impl Iterator<Item = u32> {
        let items = self.estimator.work.layers.iter().flat_map(|layer| &layer.items);
        items.filter_map(
            |item| {
                if let Item::Experts { count, .. } = item { Some(*count) } else { None }
            },
        )
    }

    /// Whether there are experts and `ep` ranks divide their number in each layer.
    fn experts_divide(&self, ep: u32) -> bool {
        let mut counts = self.expert_counts().peekable();
        counts.peek().is_some() && counts.all(|count| count.is_multiple_of(ep))
    }

    /// Whether there are experts and `tp` ranks divide the inner size of each.
    fn experts_slice(&self, tp: u32) -> bool {
        let items = self.estimator.work.layers.iter().flat_map(|layer| &layer.items);
        let mut sizes =
            items.filter_map(
                |item| {
                    if let Item::Experts { ffn, .. } = item { Some(*ffn) } else { None }
                },
            );
        sizes.next().is_some_and(|ffn| ffn.is_multiple_of(tp))
            && sizes.all(|ffn| ffn.is_multiple_of(tp))
    }

    /// Tensor-parallel ranks over which the experts of a copy lie: the largest divisor of `tp` that
    /// divides the number of experts; 1 without experts.
    fn inner_experts(&self, tp: u32) -> u32 {
        let ways = divisors(tp).into_iter().rev();
        ways.into_iter().find(|ep| self.experts_divide(*ep)).unwrap_or(1)
    }
}

/// The greatest number up to `most` that fits where all smaller ones do; 0 where 1 does not.
fn greatest(most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

/// Whether a layer keeps keys and values for tokens to come: those of an encoder are made once, and
/// kept by the decoder's layers that look at them.
fn caches(layer: &Layer) -> bool {
    layer.items.iter().any(|item| matches!(item, Item::Attention { causal: true, .. }))
}

/// Whether a layer runs in a pass that follows `cached` cached tokens: all layers run where
/// nothing is cached, later only those that keep keys and values.
fn runs(layer: &Layer, cached: u64) -> bool {
    cached == 0 || caches(layer)
}

/// Items with their routed experts reduced to those that some of `tokens` tokens chose. Of n
/// experts, k for each token and evenly routed, t tokens choose `n (1 - (1 - k/n)^t)`.
fn used(items: &[Item], tokens: f64) -> Vec<Item> {
    let mut items = items.to_vec();
    for item in &mut items {
        if let Item::Experts { count, top_k, .. } = item {
            let (n, k) = (f64::from(*count), f64::from(*top_k));
            let hit = n * (1.0 - (1.0 - (k / n).min(1.0)).powf(tokens));
            *count = (hit.ceil() as u32).clamp((*top_k).min(*count), *count).max(1);
        }
    }
    items
}
