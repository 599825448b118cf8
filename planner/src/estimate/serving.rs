//! Inference in closed form: the passes of a prompt and of one token more, and what weights and
//! caches hold.
//!
//! A copy of the model lies over `tp · pp` devices; stages work on as many groups of sequences at
//! once as there are stages. A pass over new tokens costs what the forward pass of training costs,
//! without a loss; each new token reads all that is cached. Experts lie over the tensor-parallel
//! ranks, and those that no token chose are not read.
//!
//! Legend: b sequences of a group, t new tokens of each, c cached tokens of each.

use serde::Serialize;

use super::Estimator;
use super::layer::Lowering;
use super::network::Group;
use super::price::{Inside, LayerPrice};
use super::workload::{Item, Layer};
use crate::configuration::Configuration;

/// Bytes of a cached element. Chosen: two-byte floats, whatever arithmetic products have.
const CACHE_BYTES: f64 = 2.0;
/// Tokens beyond which no context is looked for. Chosen: far above any model.
const CONTEXT_MAX: u64 = 1 << 30;

/// How a copy of the model lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Replica {
    /// Tensor-parallel ranks.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
}

/// A forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Forward {
    /// Seconds from the first layer to the last.
    pub latency_s: f64,
    /// Seconds of the slowest stage: so often a group is done.
    pub slowest_s: f64,
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
}

impl Serving<'_> {
    /// Whether a copy can lie so: heads and experts divide, and no stage is without a layer.
    pub fn allows(&self, copy: Replica) -> bool {
        let mut items = self.estimator.work.layers.iter().flat_map(|layer| &layer.items);
        let is_even = items.all(|item| {
            let Item::Attention { heads, .. } = item else { return true };
            heads.is_multiple_of(copy.tp)
        });
        is_even && copy.pp >= 1 && copy.pp <= self.estimator.work.depth()
    }

    /// Whether the model goes on after what it was given: some of its layers see earlier tokens
    /// alone.
    pub fn decodes(&self) -> bool {
        self.estimator.work.layers.iter().any(caches)
    }

    /// A pass of `batch` sequences over `tokens` new tokens of each, after `cached` ones. An
    /// encoder runs in the first pass alone.
    pub fn forward(&self, copy: Replica, batch: u32, tokens: u32, cached: u64) -> Forward {
        let work = self.estimator.work;
        let runs = |layer: &&Layer| cached == 0 || caches(layer);
        let all: f64 = work
            .layers
            .iter()
            .filter(runs)
            .map(|layer| {
                let items = used(&layer.items, u64::from(batch) * u64::from(tokens));
                let ep = expert_ranks(copy, &layer.items);
                let pass = self.price_over(ep, copy, &items, [batch, tokens]).forward.total_s();
                f64::from(layer.count) * (pass + self.cached_s(copy, &items, batch, cached))
            })
            .sum();
        let first = self.price(copy, &work.first, batch, tokens).forward.total_s();
        let last: Vec<Item> =
            work.last.iter().copied().filter(|item| !matches!(item, Item::Loss { .. })).collect();
        // The next token follows from the last one alone.
        let last = self.price(copy, &last, batch, 1).forward.total_s();
        let bytes = f64::from(batch) * f64::from(tokens) * f64::from(work.width) * 2.0;
        let network = &self.estimator.network;
        let (tp, pp) = (u64::from(copy.tp), u64::from(copy.pp));
        let stages = Group::apart(pp, tp, tp * pp);
        let near_s = network.send_s(bytes, tp);
        let far_s = network.send_s(bytes, network.furthest(stages, tp));
        let far = network.nodes(stages) - 1.0;
        let sends_s = far * far_s + (f64::from(copy.pp - 1) - far) * near_s;
        let most = self.most(copy, runs);
        let between_s = if copy.pp > 1 { far_s } else { 0.0 };
        Forward {
            latency_s: first + all + last + sends_s,
            slowest_s: all * most
                + if copy.pp > 1 { first.max(last) } else { first + last }
                + between_s,
        }
    }

    /// What the fullest device holds besides working memory.
    pub fn held(&self, copy: Replica) -> Held {
        let work = self.estimator.work;
        let bytes = self.estimator.job.arithmetic.operand_bytes();
        let most = self.most(copy, |_| true);
        let (mut parameters, mut cache) = (0.0, 0.0);
        for layer in &work.layers {
            let price = self.price(copy, &layer.items, 1, 1);
            let count = f64::from(layer.count);
            parameters += count * (price.parameters + price.expert_parameters);
            if caches(layer) {
                cache += count * self.cached_elements(copy, &layer.items);
            }
        }
        let end = |items: &[Item]| self.price(copy, items, 1, 1).parameters;
        let (first, last) = (end(&work.first), end(&work.last));
        let ends = match copy.pp {
            1 if work.tied => first,
            1 => first + last,
            _ => first.max(last),
        };
        Held {
            weights_bytes: (parameters * most + ends) * bytes,
            cache_bytes_per_token: cache * self.most(copy, |layer| caches(layer)) * CACHE_BYTES,
            reserve_bytes: self.estimator.style.reserve_bytes,
        }
    }

    /// Bytes of the fullest device where every stage has a group of `batch` sequences of `context`
    /// tokens, of which `tokens` new ones of each are worked on.
    pub fn bytes(&self, copy: Replica, batch: u32, context: u64, tokens: u32) -> f64 {
        let held = self.held(copy);
        let sequences = f64::from(batch) * f64::from(copy.pp);
        let cache = held.cache_bytes_per_token * context as f64 * sequences;
        held.weights_bytes + cache + held.reserve_bytes + self.working(copy, batch, tokens)
    }

    /// The longest context of one sequence on each stage, its prompt worked on in pieces of at most
    /// `tokens`; 0 where weights alone do not fit.
    pub fn longest_context(&self, copy: Replica, tokens: u32) -> u64 {
        let held = self.held(copy);
        let fixed = held.weights_bytes + held.reserve_bytes + self.working(copy, 1, tokens);
        let each = held.cache_bytes_per_token * f64::from(copy.pp);
        let left = self.estimator.memory_bytes - fixed;
        if left < 0.0 { 0 } else { ((left / each) as u64).min(CONTEXT_MAX) }
    }

    /// The largest group of sequences of `context` tokens on each stage that decodes; 0 where none
    /// does.
    pub fn largest_batch(&self, copy: Replica, context: u64) -> u32 {
        let fits = |batch: u32| self.bytes(copy, batch, context, 1) <= self.estimator.memory_bytes;
        let (mut low, mut high) = (0, 1u32 << 20);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// The largest share of some layers that lie on one stage.
    fn most(&self, copy: Replica, are: impl Fn(&&Layer) -> bool) -> f64 {
        let work = self.estimator.work;
        let all: u32 = work.layers.iter().filter(are).map(|layer| layer.count).sum();
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
        self.price_over(expert_ranks(copy, items), copy, items, [batch, tokens])
    }

    fn price_over(
        &self,
        ep: u32,
        copy: Replica,
        items: &[Item],
        [batch, tokens]: [u32; 2],
    ) -> LayerPrice {
        let Estimator { rates, network, style, job, work, .. } = self.estimator;
        let (tp, microbatch) = (copy.tp, batch);
        let inside =
            Inside::near(&Configuration { tp, ep, microbatch, ..Configuration::default() });
        let seq = f64::from(tokens);
        Lowering { rates, network, style, job, inside, seq }.price(items, work.width)
    }

    /// Elements of a token that a device caches for these items.
    fn cached_elements(&self, copy: Replica, items: &[Item]) -> f64 {
        let elements = items.iter().map(|item| {
            let Item::Attention { kv_heads, qk_dim, v_dim, .. } = item else { return 0.0 };
            let heads = (f64::from(*kv_heads) / f64::from(copy.tp)).ceil();
            // A shared vector is whole on every device.
            self.latent.map_or(heads * f64::from(qk_dim + v_dim), f64::from)
        });
        elements.sum()
    }

    /// Seconds in which a layer reads what is cached: more than it computes with it.
    fn cached_s(&self, copy: Replica, items: &[Item], batch: u32, cached: u64) -> f64 {
        let elements = self.cached_elements(copy, items) * f64::from(batch) * cached as f64;
        self.estimator.rates.rows_s(elements * CACHE_BYTES)
    }
}

/// Whether a layer keeps keys and values for tokens to come: those of an encoder are made once, and
/// kept by the decoder's layers that look at them.
fn caches(layer: &Layer) -> bool {
    layer.items.iter().any(|item| matches!(item, Item::Attention { causal: true, .. }))
}

/// Tensor-parallel ranks over which the experts of a layer lie: as many as divide them.
fn expert_ranks(copy: Replica, items: &[Item]) -> u32 {
    let ep = items.iter().find_map(|item| {
        let Item::Experts { count, .. } = item else { return None };
        (1..=copy.tp).rev().find(|ep| count.is_multiple_of(*ep) && copy.tp.is_multiple_of(*ep))
    });
    ep.unwrap_or(1)
}

/// Items where of routed experts only those count that some of `tokens` tokens chose: evenly, as
/// many as `n (1 - (1 - k/n)^t)`.
fn used(items: &[Item], tokens: u64) -> Vec<Item> {
    let mut items = items.to_vec();
    for item in &mut items {
        if let Item::Experts { count, top_k, .. } = item {
            let (n, k) = (f64::from(*count), f64::from(*top_k));
            let hit = n * (1.0 - (1.0 - (k / n).min(1.0)).powf(tokens as f64));
            *count = (hit.ceil() as u32).clamp((*top_k).min(*count), *count).max(1);
        }
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::estimate::described::{Described, described};
    use crate::estimate::rates::Arithmetic;
    use crate::estimate::workload::Workload;
    use crate::estimate::{Job, style};
    use crate::machine::Machine;
    use crate::space::models;

    fn h100() -> Cluster {
        let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
        Cluster::load_on("h100", &machine).unwrap()
    }

    fn estimator<'a>(work: &'a Workload, cluster: &Cluster) -> Estimator<'a> {
        let job = Job { global_batch: 1, arithmetic: Arithmetic::Half };
        Estimator::new(work, cluster, style::OURS, job).unwrap()
    }

    /// DeepSeek-AI 2025, "Insights into DeepSeek-V3", table 1.
    #[test]
    fn caches_are_as_large_as_published() {
        let cluster = h100();
        let published = [
            ("deepseek-v3", 70_272.0),
            ("llama-3-405b", 516_096.0),
            ("llama-3-70b", 327_680.0),
            // Two values of 768 elements in each of 12 layers; one table for both ends.
            ("gpt2", 36_864.0),
        ];
        for (model, bytes) in published {
            let Described { work, latent, .. } = described(model, None).unwrap();
            let estimator = estimator(&work, &cluster);
            let serving = Serving { estimator: &estimator, latent };
            let held = serving.held(Replica { tp: 1, pp: 1 });
            assert_eq!(held.cache_bytes_per_token, bytes, "{model}");
            let weights = held.weights_bytes / (2.0 * work.parameters() as f64);
            assert!((weights - 1.0).abs() < 1e-3, "{model}: {weights}");
        }
    }

    /// Raffel et al. 2020: 24 decoder layers of 128 heads of 128, each with keys and values of the
    /// target and of the source. The encoder caches nothing, and runs once.
    #[test]
    fn encoders_run_once_and_cache_nothing() {
        let cluster = h100();
        let work = described("t5-11b", Some(512)).unwrap().work;
        let estimator = estimator(&work, &cluster);
        let serving = Serving { estimator: &estimator, latent: None };
        let copy = Replica { tp: 1, pp: 1 };
        let elements = 24 * 2 * 2 * 128 * 128;
        assert_eq!(serving.held(copy).cache_bytes_per_token, 2.0 * f64::from(elements));
        let mut decoder = work.clone();
        decoder.layers.retain(|layer| layer.name.starts_with("decoder"));
        assert_eq!(decoder.layers.len(), 1);
        let alone = self::estimator(&decoder, &cluster);
        let alone = Serving { estimator: &alone, latent: None };
        assert_eq!(serving.forward(copy, 3, 1, 512), alone.forward(copy, 3, 1, 512));
        assert!(
            serving.forward(copy, 3, 512, 0).latency_s > alone.forward(copy, 3, 512, 0).latency_s
        );
        let bert = described("bert-large", Some(512)).unwrap().work;
        let estimator = self::estimator(&bert, &cluster);
        assert!(!Serving { estimator: &estimator, latent: None }.decodes() && serving.decodes());
    }

    /// A token takes no less for more sequences.
    #[test]
    fn more_sequences_are_never_faster() {
        let cluster = h100();
        for model in ["llama-3-8b", "llama-3-70b", "mixtral-8x7b", "deepseek-v3", "t5-11b"] {
            let Described { work, latent, .. } = described(model, Some(512)).unwrap();
            let estimator = estimator(&work, &cluster);
            let serving = Serving { estimator: &estimator, latent };
            for tp in [1, 2, 8] {
                let copy = Replica { tp, pp: 1 };
                let pass = |batch| serving.forward(copy, batch, 1, 4096).latency_s;
                let mut before = 0.0;
                for batch in (1..40).chain([63, 64, 65, 128, 200, 256]) {
                    let now = pass(batch);
                    assert!(
                        now >= before,
                        "{model} tp={tp}: {batch} sequences {now} s, {before} s"
                    );
                    before = now;
                }
            }
        }
    }

    /// No pass is faster than what it reads and computes at the datasheet's rates, and none is many
    /// times slower where the batch is large.
    #[test]
    fn passes_are_between_their_limits() {
        let cluster = h100();
        for model in ["llama-3-8b", "llama-3-70b", "gpt-18.4b", "mixtral-8x7b"] {
            let work = models::shape(model).unwrap().workload().unwrap();
            let estimator = estimator(&work, &cluster);
            let serving = Serving { estimator: &estimator, latent: None };
            let routed = model.starts_with("mixtral");
            for tp in [1, 2, 4, 8] {
                let copy = Replica { tp, pp: 1 };
                let held = serving.held(copy);
                let bandwidth = estimator.rates.memory_bytes_per_s;
                for batch in [1, 16, 64] {
                    let decode = serving.forward(copy, batch, 1, 4096);
                    let cache = held.cache_bytes_per_token * 4096.0 * f64::from(batch);
                    // Few tokens choose few experts, and the embedding is looked up.
                    let weights = if routed { 0.0 } else { 0.9 * held.weights_bytes };
                    let least_s = (weights + cache) / bandwidth;
                    assert!(decode.latency_s > least_s, "{model} tp={tp} b={batch}");
                    // Across devices, small kernels and collectives have start-up.
                    let is_close = decode.latency_s < 4.0 * least_s;
                    assert!(routed || tp > 1 || is_close, "{model} b={batch}: {decode:?}");
                }
                let prompt = serving.forward(copy, 4, 4096, 0);
                let flops = work.flops_per_token() / 3.0 * 4.0 * 4096.0;
                let peak = cluster.flops_per_s(ir::DType::BF16, 1).value * f64::from(tp);
                assert!(prompt.latency_s > 0.85 * flops / peak, "{model} tp={tp}");
                let is_close = prompt.latency_s < 6.0 * flops / peak;
                assert!(routed || is_close, "{model} tp={tp}: {prompt:?}");
            }
        }
    }

    /// A pass over stages takes that of one device and a message between each two; the slowest
    /// stage has its part of the layers, the larger of both ends, and a message.
    #[test]
    fn stages_share_a_pass() {
        let cluster = h100();
        let work = models::shape("llama-3-70b").unwrap().workload().unwrap();
        let estimator = estimator(&work, &cluster);
        let serving = Serving { estimator: &estimator, latent: None };
        let head: Vec<Item> =
            work.last.iter().copied().filter(|item| !matches!(item, Item::Loss { .. })).collect();
        for (tp, batch, tokens, cached) in [(8, 2, 2048, 0), (8, 16, 1, 4096), (4, 1, 1, 100)] {
            let of = |pp| serving.forward(Replica { tp, pp }, batch, tokens, cached);
            let one = of(1);
            let copy = Replica { tp, pp: 1 };
            let first_s = serving.price(copy, &work.first, batch, tokens).forward.total_s();
            // Logits are made of the last token of each sequence.
            let last_s = serving.price(copy, &head, batch, 1).forward.total_s();
            let layers_s = one.latency_s - first_s - last_s;
            assert!((one.slowest_s / one.latency_s - 1.0).abs() < 1e-12);
            let bytes = f64::from(batch * tokens * 8192) * 2.0;
            let send_s = |apart: u32| estimator.network.send_s(bytes, apart.into());
            for pp in [2, 8, 80] {
                let (found, stages) = (of(pp), f64::from(pp));
                // Eight devices share a node.
                let leaves = |at: u32| (at * tp) / 8 != ((at + 1) * tp) / 8;
                let sends = (0..pp - 1).map(|at| send_s(if leaves(at) { 8 } else { tp }));
                let latency_s = one.latency_s + sends.clone().sum::<f64>();
                let slowest_s = layers_s / stages + first_s.max(last_s) + sends.fold(0.0, f64::max);
                let about = format!("tp={tp} pp={pp}: {found:?}, {latency_s} s, {slowest_s} s");
                assert!((found.latency_s / latency_s - 1.0).abs() < 1e-9, "{about}");
                assert!((found.slowest_s / slowest_s - 1.0).abs() < 1e-9, "{about}");
            }
        }
        let allows = |tp, pp| serving.allows(Replica { tp, pp });
        assert!(allows(64, 80) && !allows(1, 81) && !allows(3, 1) && !allows(128, 1));
    }

    /// What devices hold, by hand: Llama-3-8B has two tables of 128,256 · 4,096 and a last norm.
    #[test]
    fn devices_hold_their_part() {
        let cluster = h100();
        let work = models::shape("llama-3-8b").unwrap().workload().unwrap();
        let estimator = estimator(&work, &cluster);
        let serving = Serving { estimator: &estimator, latent: None };
        let held = |tp, pp| serving.held(Replica { tp, pp });
        let table = 128_256.0 * 4096.0;
        let layers = 8_030_261_248.0 - 2.0 * table - 4096.0;
        for pp in [2, 4, 32] {
            let bytes = 2.0 * (layers / f64::from(pp) + table + 4096.0);
            assert_eq!(held(1, pp).weights_bytes, bytes, "{pp} stages");
            let each = held(1, 1).cache_bytes_per_token / f64::from(pp);
            assert_eq!(held(1, pp).cache_bytes_per_token, each, "{pp} stages");
        }
        // Eight heads of keys and values: more ranks than these have one each.
        let cache = |tp| held(tp, 1).cache_bytes_per_token;
        assert_eq!([cache(8), cache(16), cache(32)], [cache(1) / 8.0; 3]);
        // A sequence more is its cache, its logits in four bytes, and what its layer needs.
        let copy = Replica { tp: 1, pp: 1 };
        let more = serving.bytes(copy, 101, 64, 1) - serving.bytes(copy, 100, 64, 1);
        assert!(more > 64.0 * cache(1) + 4.0 * 128_256.0, "{more}");
    }

    /// Mixtral's experts lie over all ranks, and one token reads two of eight; many read all.
    #[test]
    fn experts_are_shared_and_chosen() {
        let cluster = h100();
        let work = models::shape("mixtral-8x7b").unwrap().workload().unwrap();
        let estimator = estimator(&work, &cluster);
        let serving = Serving { estimator: &estimator, latent: None };
        let all = 2.0 * work.parameters() as f64;
        for tp in [2, 4, 8] {
            let part = serving.held(Replica { tp, pp: 1 }).weights_bytes * f64::from(tp) / all;
            assert!((0.99..1.1).contains(&part), "tp={tp}: {part}");
        }
        let least_s = all / estimator.rates.memory_bytes_per_s;
        let pass =
            |batch| serving.forward(Replica { tp: 1, pp: 1 }, batch, 1, 16).latency_s / least_s;
        assert!(pass(1) < 0.85 && pass(64) > 1.0, "{} {}", pass(1), pass(64));
    }

    #[test]
    fn what_is_said_to_fit_fits_and_no_more() {
        let cluster = h100();
        let work = models::shape("llama-3-70b").unwrap().workload().unwrap();
        let estimator = estimator(&work, &cluster);
        let serving = Serving { estimator: &estimator, latent: None };
        let have = estimator.memory_bytes;
        assert_eq!(serving.largest_batch(Replica { tp: 1, pp: 1 }, 1), 0, "141 GB of weights");
        assert_eq!(serving.longest_context(Replica { tp: 1, pp: 1 }, 1), 0);
        for (tp, pp) in [(4, 1), (8, 1), (2, 4), (8, 2)] {
            let copy = Replica { tp, pp };
            let batch = serving.largest_batch(copy, 8192);
            assert!(batch > 0 && serving.bytes(copy, batch, 8192, 1) <= have, "{copy:?}");
            assert!(serving.bytes(copy, batch + 1, 8192, 1) > have, "{copy:?}");
            let longest = serving.longest_context(copy, 2048);
            assert!(serving.bytes(copy, 1, longest, 2048) <= have, "{copy:?}");
            assert!(serving.bytes(copy, 1, longest + 1, 2048) > have, "{copy:?}");
        }
    }
}
