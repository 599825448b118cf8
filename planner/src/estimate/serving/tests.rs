//! Inference against published numbers, counting and limits.

use super::*;
use crate::cluster::Cluster;
use crate::estimate::described::{Described, described};
use crate::estimate::profile::Stated;
use crate::estimate::rates::Arithmetic;
use crate::estimate::workload::Workload;
use crate::estimate::{Job, profile};
use crate::machine::Machine;
use crate::search::models;

fn h100() -> Cluster {
    let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
    Cluster::load_on("h100", &machine).unwrap()
}

fn estimator<'a>(work: &'a Workload, cluster: &Cluster) -> Estimator<'a> {
    let job = Job { global_batch: 1, arithmetic: Arithmetic::Half };
    Estimator::new(work, cluster, profile::GANTLINE, job).unwrap()
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
        let serving = Serving::new(&estimator, latent);
        let held = serving.held(serving.alone(1, 1));
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
    let serving = Serving::new(&estimator, None);
    let copy = serving.alone(1, 1);
    let elements = 24 * 2 * 2 * 128 * 128;
    assert_eq!(serving.held(copy).cache_bytes_per_token, 2.0 * f64::from(elements));
    let mut decoder = work.clone();
    decoder.layers.retain(|layer| layer.name.starts_with("decoder"));
    assert_eq!(decoder.layers.len(), 1);
    let alone = self::estimator(&decoder, &cluster);
    let alone = Serving::new(&alone, None);
    assert_eq!(serving.forward(copy, 3, 1, 512), alone.forward(copy, 3, 1, 512));
    assert!(serving.forward(copy, 3, 512, 0).latency_s > alone.forward(copy, 3, 512, 0).latency_s);
    let bert = described("bert-large", Some(512)).unwrap().work;
    let estimator = self::estimator(&bert, &cluster);
    assert!(!Serving::new(&estimator, None).decodes() && serving.decodes());
}

/// A token takes no less for more sequences.
#[test]
fn more_sequences_are_never_faster() {
    let cluster = h100();
    for model in ["llama-3-8b", "llama-3-70b", "mixtral-8x7b", "deepseek-v3", "t5-11b"] {
        let Described { work, latent, .. } = described(model, Some(512)).unwrap();
        let estimator = estimator(&work, &cluster);
        let serving = Serving::new(&estimator, latent);
        for tp in [1, 2, 8] {
            let copy = serving.alone(tp, 1);
            let pass = |batch| serving.forward(copy, batch, 1, 4096).latency_s;
            let mut before = 0.0;
            for batch in (1..40).chain([63, 64, 65, 128, 200, 256]) {
                let now = pass(batch);
                assert!(now >= before, "{model} tp={tp}: {batch} sequences {now} s, {before} s");
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
        let serving = Serving::new(&estimator, None);
        let routed = model.starts_with("mixtral");
        for tp in [1, 2, 4, 8] {
            let copy = serving.alone(tp, 1);
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
    let serving = Serving::new(&estimator, None);
    let head: Vec<Item> =
        work.last.iter().copied().filter(|item| !matches!(item, Item::Loss { .. })).collect();
    for (tp, batch, tokens, cached) in [(8, 2, 2048, 0), (8, 16, 1, 4096), (4, 1, 1, 100)] {
        let of = |pp| serving.forward(serving.alone(tp, pp), batch, tokens, cached);
        let one = of(1);
        let copy = serving.alone(tp, 1);
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
    let allows = |tp, pp| serving.allows(serving.alone(tp, pp));
    assert!(allows(64, 80) && !allows(1, 81) && !allows(3, 1) && !allows(128, 1));
}

/// What devices hold, by hand: Llama-3-8B has two tables of 128,256 · 4,096 and a last norm.
#[test]
fn devices_hold_their_part() {
    let cluster = h100();
    let work = models::shape("llama-3-8b").unwrap().workload().unwrap();
    let estimator = estimator(&work, &cluster);
    let serving = Serving::new(&estimator, None);
    let held = |tp, pp| serving.held(serving.alone(tp, pp));
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
    let copy = serving.alone(1, 1);
    let more = serving.bytes(copy, 101, [64, 0], 1) - serving.bytes(copy, 100, [64, 0], 1);
    assert!(more > 64.0 * cache(1) + 4.0 * 128_256.0, "{more}");
}

/// Mixtral's experts lie over all ranks, and one token reads two of eight; many read all.
#[test]
fn experts_are_shared_and_chosen() {
    let cluster = h100();
    let work = models::shape("mixtral-8x7b").unwrap().workload().unwrap();
    let estimator = estimator(&work, &cluster);
    let serving = Serving::new(&estimator, None);
    let all = 2.0 * work.parameters() as f64;
    for tp in [2, 4, 8] {
        let part = serving.held(serving.alone(tp, 1)).weights_bytes * f64::from(tp) / all;
        assert!((0.99..1.1).contains(&part), "tp={tp}: {part}");
    }
    let least_s = all / estimator.rates.memory_bytes_per_s;
    let pass = |batch| serving.forward(serving.alone(1, 1), batch, 1, 16).latency_s / least_s;
    assert!(pass(1) < 0.85 && pass(64) > 1.0, "{} {}", pass(1), pass(64));
}

#[test]
fn what_is_said_to_fit_fits_and_no_more() {
    let cluster = h100();
    let work = models::shape("llama-3-70b").unwrap().workload().unwrap();
    let estimator = estimator(&work, &cluster);
    let serving = Serving::new(&estimator, None);
    let have = estimator.memory_bytes;
    assert_eq!(serving.most_sequences(serving.alone(1, 1), [1, 0], 1), 0, "141 GB of weights");
    assert_eq!(serving.longest_context(serving.alone(1, 1), 1, 1), 0);
    for (tp, pp) in [(4, 1), (8, 1), (2, 4), (8, 2)] {
        let copy = serving.alone(tp, pp);
        let most = serving.most_sequences(copy, [8192, 0], 2048);
        assert!(most > 0 && serving.bytes(copy, most, [8192, 0], 2048) <= have, "{copy:?}");
        assert!(serving.bytes(copy, most + 1, [8192, 0], 2048) > have, "{copy:?}");
        for sequences in [1, 2, 7, 24] {
            let longest = serving.longest_context(copy, sequences, 2048);
            assert!(serving.bytes(copy, sequences, [longest, 0], 2048) <= have, "{copy:?}");
            assert!(serving.bytes(copy, sequences, [longest + 1, 0], 2048) > have, "{copy:?}");
        }
    }
}

/// One sequence caches on each stage what it caches on no other: as many stages as a copy has, the
/// whole caches of one sequence as one device would, and more where weights are shared too.
#[test]
fn one_sequence_may_be_as_long_on_stages_as_on_one_device() {
    let cluster = h100();
    let work = models::shape("llama-3-8b").unwrap().workload().unwrap();
    let estimator = estimator(&work, &cluster);
    let serving = Serving::new(&estimator, None);
    let one = serving.longest_context(serving.alone(1, 1), 1, 2048);
    for pp in [2, 4, 8] {
        let longest = serving.longest_context(serving.alone(1, pp), 1, 2048);
        assert!(longest > u64::from(pp) * one, "{pp} stages: {longest} of {one}");
        // Counted: two bytes of keys and values of 8 heads of 128, of a stage's layers.
        let each = 2.0 * 2.0 * 8.0 * 128.0 * (32.0 / f64::from(pp));
        let more = serving.bytes(serving.alone(1, pp), 1, [101, 0], 1);
        assert_eq!(more - serving.bytes(serving.alone(1, pp), 1, [100, 0], 1), each, "{pp} stages");
        // Of a batch each has its part.
        let of_many = serving.longest_context(serving.alone(1, pp), 24, 2048);
        let part = 24.0 * of_many as f64 / longest as f64;
        assert!((0.9..=1.001).contains(&part), "{pp} stages: {part}");
    }
}

/// Experts over the ranks of several copies: each rank holds its part of them, and whole what else
/// its copy has; the tokens of all copies cross the network twice a layer.
#[test]
fn copies_share_experts() {
    let cluster = h100();
    let Described { work, latent, .. } = described("deepseek-v3", Some(4096)).unwrap();
    let estimator = estimator(&work, &cluster);
    let serving = Serving::new(&estimator, latent);
    let copy = |ep| Replica { tp: 1, pp: 1, ep };
    // 58 layers of 256 experts of three products of 7,168 · 2,048.
    let experts = 2.0 * 58.0 * 256.0 * 3.0 * 7168.0 * 2048.0;
    let rest = serving.held(copy(1)).weights_bytes - experts;
    assert!(rest > 0.0 && rest < 40e9, "{rest}");
    let mut before_s = f64::INFINITY;
    for ep in [2, 8, 32, 256] {
        let held = serving.held(copy(ep)).weights_bytes;
        assert!((held - rest - experts / f64::from(ep)).abs() < 1.0, "ep={ep}: {held}");
        assert_eq!(serving.held(copy(ep)).cache_bytes_per_token, 70_272.0);
        let parts = serving.parts(copy(ep), 128, 1, 4096);
        // Each of 128 tokens goes to 8 experts and back: to those of other nodes once each.
        let bytes = 2.0 * 128.0 * 7168.0 * 2.0 * 58.0;
        let others = f64::from(ep - 1) / f64::from(ep);
        assert!(parts.expert_s > bytes * others / 450e9, "ep={ep}: {parts:?}");
        // A rank reads its own experts, all of which some token chose.
        let least_s = (rest + experts / f64::from(ep)) * 0.8 / 3.35e12;
        assert!(parts.weights_s > least_s, "ep={ep}: {parts:?}");
        assert!(parts.weights_s < before_s, "ep={ep}: {parts:?}");
        before_s = parts.weights_s;
    }
    assert_eq!(serving.parts(copy(1), 128, 1, 4096).expert_s, 0.0);
    // The ways that there are: of 256 experts over copies of 4 ranks, and over none twice.
    // Each sliced over a copy's ranks comes first.
    assert_eq!(serving.expert_ways(4, 6), [1, 4, 8]);
    assert_eq!(serving.expert_ways(1, 8), [1, 2, 4, 8]);
    assert!(serving.allows(copy(64)) && !serving.allows(copy(3)) && !serving.allows(copy(512)));
    let dense = models::shape("llama-3-8b").unwrap().workload().unwrap();
    let dense = self::estimator(&dense, &cluster);
    let dense = Serving::new(&dense, None);
    assert_eq!(dense.expert_ways(4, 8), [1]);
    assert!(!dense.allows(copy(2)) && dense.allows(copy(1)));
}

/// The parts sum to the pass, and each is at least what its bytes or operations take.
#[test]
fn parts_sum_to_the_pass() {
    let cluster = h100();
    for model in ["llama-3-8b", "llama-3-70b", "mixtral-8x7b", "deepseek-v3", "t5-11b"] {
        let Described { work, latent, .. } = described(model, Some(2048)).unwrap();
        let estimator = estimator(&work, &cluster);
        let serving = Serving::new(&estimator, latent);
        let copies = [(1, 1), (2, 1), (8, 1), (2, 4)].map(|(tp, pp)| serving.alone(tp, pp));
        let shared = serving.expert_ways(2, 4).into_iter().map(|ep| Replica { tp: 2, pp: 2, ep });
        for copy in copies.into_iter().chain(shared) {
            for (batch, tokens, cached) in [(1, 1, 100), (16, 1, 4096), (300, 1, 1), (1, 2048, 0)] {
                let parts = serving.parts(copy, batch, tokens, cached);
                let pass = serving.forward(copy, batch, tokens, cached);
                let ratio = parts.total_s() / pass.latency_s;
                let about = format!("{model} {copy:?} {batch} {tokens} {cached}: {parts:?}");
                assert!((ratio - 1.0).abs() < 1e-5, "{about}, {ratio}");
                let cache = serving.held(Replica { pp: 1, ..copy }).cache_bytes_per_token;
                let read_s = cache * f64::from(batch) * cached as f64 / 3.35e12;
                assert!(parts.cache_s >= 0.9 * read_s, "{about}, {read_s}");
                let [low, high] = serving.factors(&parts);
                assert!(low < 1.0 && high > 1.0 && high < 3.0, "{about}: {low} {high}");
            }
        }
    }
}

/// A prompt in pieces takes as long as the passes of its pieces one by one, on one stage; on more,
/// as pieces that follow each other.
#[test]
fn prompts_take_what_their_pieces_take() {
    let cluster = h100();
    let Described { work, latent, .. } = described("llama-3-8b", Some(8192)).unwrap();
    let estimator = estimator(&work, &cluster);
    let serving = Serving::new(&estimator, latent);
    for (prompt, shared, budget) in [(4000, 0, 512), (8192, 1000, 2048), (700, 0, 8192)] {
        let lengths = Lengths { prompt, output: 0, shared };
        for copy in [serving.alone(1, 1), serving.alone(2, 4)] {
            let mut passes = Vec::new();
            let mut at = shared;
            while at < prompt {
                let tokens = budget.min(prompt - at);
                passes.push(serving.forward(copy, 1, tokens, at.into()));
                at += tokens;
            }
            let slowest_s: f64 = passes.iter().map(|pass| pass.slowest_s).sum();
            // When each stage is free again, where a piece takes as long on all of them.
            let mut free_s = vec![0.0_f64; copy.pp as usize];
            for pass in &passes {
                let mut done_s = 0.0_f64;
                for stage in &mut free_s {
                    done_s = stage.max(done_s) + pass.slowest_s;
                    *stage = done_s;
                }
            }
            // The slowest stage has a whole end, and others have less.
            let uneven_s = f64::from(copy.pp) * passes[0].slowest_s - passes[0].latency_s;
            let latency_s = free_s[free_s.len() - 1] - uneven_s;
            let found = serving.prompt(copy, 1, lengths, budget);
            let ratios = [found.slowest_s / slowest_s, found.latency_s / latency_s];
            assert!(ratios.iter().all(|ratio| (ratio - 1.0).abs() < 0.03), "{copy}: {ratios:?}");
        }
    }
    // More pieces never take less, and a shared start saves what it would take.
    let copy = serving.alone(1, 1);
    let first_s = |shared, budget| {
        serving.prompt(copy, 1, Lengths { prompt: 8192, output: 1, shared }, budget).latency_s
    };
    assert!(first_s(0, 256) > first_s(0, 1024) && first_s(0, 1024) > 0.99 * first_s(0, 8192));
    assert!(first_s(4096, 8192) < 0.6 * first_s(0, 8192));
}

/// With requests always waiting, all tokens are paid once: the pass that mixes is no faster than
/// prompts alone and new tokens alone take together in theory, and no slower than both apart.
#[test]
fn mixed_passes_are_between_their_parts() {
    let cluster = h100();
    let Described { work, latent, .. } = described("llama-3-8b", Some(4096)).unwrap();
    let estimator = estimator(&work, &cluster);
    let serving = Serving::new(&estimator, latent);
    let copy = serving.alone(1, 1);
    for (prompt, output) in [(128, 128), (2048, 128), (128, 2048), (2048, 2048)] {
        let lengths = Lengths { prompt, output, shared: 0 };
        let found = serving.in_flight(copy, 64, lengths, 8192).unwrap();
        let token_s = serving.token(copy, found.sequences as u32, lengths.middle()).latency_s;
        let prompts_s = serving.prompt(copy, 1, lengths, 8192).latency_s;
        let beside_s = prompts_s * found.sequences as f64 / f64::from(output);
        let (least, most) = (token_s.max(beside_s), token_s + beside_s);
        let about = format!("{prompt}/{output}: {found:?}, {token_s} s, {beside_s} s");
        assert!((0.7 * least..1.1 * most).contains(&found.token_s), "{about}");
        assert!(found.token_s >= token_s, "{about}");
    }
    let none = Lengths { prompt: 128, output: 0, shared: 0 };
    assert_eq!(serving.in_flight(copy, 64, none, 8192), None);
}

/// Drafts that are always accepted give their number and one more for a pass that is hardly longer;
/// drafts that never are cost what they take. The model that drafts is held beside.
#[test]
fn drafts_pay_where_they_are_accepted() {
    let cluster = h100();
    let large = described("llama-3-70b", Some(4096)).unwrap().work;
    let small = described("llama-3-8b", Some(4096)).unwrap().work;
    let [large, small] = [&large, &small].map(|work| estimator(work, &cluster));
    let plain = Serving::new(&large, None);
    let draft = Serving::new(&small, None);
    let copy = plain.alone(8, 1);
    let with = |acceptance, model: Option<&Serving<'_>>| {
        let model = model.map(|model| Drafter { estimator: &small, latent: model.latent });
        let speculation = Speculation { drafted: 4, acceptance };
        Serving { drafting: Some(Drafting { speculation, model }), ..plain }
    };
    let token_s = |serving: &Serving<'_>| serving.token(copy, 1, 2048).latency_s;
    let looked_up = [0.0, 0.5, 1.0].map(|acceptance| token_s(&with(acceptance, None)));
    assert!(looked_up[0] >= token_s(&plain) && looked_up[0] < 1.2 * token_s(&plain));
    assert!((looked_up[0] / looked_up[2] - 5.0).abs() < 1e-9);
    assert!((looked_up[0] / looked_up[1] - 1.9375).abs() < 1e-9);
    // Four passes of the draft come before each check.
    let drafted = token_s(&with(0.0, Some(&draft)));
    let passes_s = 4.0 * draft.forward(draft.alone(8, 1), 1, 1, 2048).latency_s;
    assert!((drafted - looked_up[0] - passes_s).abs() < 0.01 * passes_s, "{drafted} {passes_s}");
    let batch = Batch::of(1, 1, 2048);
    for (model, acceptance) in [(None, 0.3), (Some(&draft), 0.7)] {
        let serving = with(acceptance, model);
        let parts = serving.token_parts(copy, &batch);
        let ratio = parts.total_s() / serving.token_pass(copy, &batch).latency_s;
        assert!((ratio - 1.0).abs() < 1e-5, "{ratio}");
        assert_eq!(parts.draft_s > 0.0, model.is_some());
    }
    let held = |serving: &Serving<'_>, copy| serving.held(copy).weights_bytes;
    let more = held(&with(0.5, Some(&draft)), copy) - held(&plain, copy);
    assert_eq!(more, held(&draft, draft.alone(8, 1)));
    // On many sequences the check is no longer free: passes are limited by operations.
    let many = |serving: &Serving<'_>| serving.token(copy, 512, 2048).latency_s;
    let gain = many(&plain) / many(&with(0.5, None));
    let alone = token_s(&plain) / looked_up[1];
    assert!(gain < alone, "{gain} with many, {alone} with one");
}

/// A start that all prompts share is held once.
#[test]
fn shared_prefixes_are_held_once() {
    let cluster = h100();
    let work = described("llama-3-8b", Some(8192)).unwrap().work;
    let estimator = estimator(&work, &cluster);
    let serving = Serving::new(&estimator, None);
    let copy = serving.alone(1, 1);
    let each = serving.held(copy).cache_bytes_per_token;
    let bytes = |shared| serving.bytes(copy, 10, [4096, shared], 512);
    assert_eq!(bytes(0) - bytes(1024), 9.0 * 1024.0 * each);
    let most = serving.most_sequences(copy, [4096, 3072], 512);
    assert!(most > 3 * serving.most_sequences(copy, [4096, 0], 512));
    assert!(serving.bytes(copy, most, [4096, 3072], 512) <= estimator.memory_bytes);
    assert!(serving.bytes(copy, most + 1, [4096, 3072], 512) > estimator.memory_bytes);
    // Half the bytes of a cached token are room for about twice the sequences.
    let narrow = Storage { cache: storage::Format::of_cache("f8").unwrap(), ..Storage::default() };
    let narrow = Serving { storage: narrow, ..serving };
    assert_eq!(2.0 * narrow.held(copy).cache_bytes_per_token, each);
}

/// Facts say truly whether the passes or the memory of inference depend on them.
#[test]
fn facts_of_inference_are_those_that_its_price_depends_on() {
    let cluster = h100();
    let Described { work, latent, .. } = described("llama-3-70b", Some(4096)).unwrap();
    let priced = |stated: Stated| {
        let job = Job { global_batch: 1, arithmetic: Arithmetic::Half };
        let engine = profile::GANTLINE.stating(stated);
        let estimator = Estimator::over(8, &work, &cluster, engine, job).unwrap();
        let serving = Serving::new(&estimator, latent);
        let copy = serving.alone(8, 1);
        let passes = [(8, 1, 2048), (1, 2048, 0)]
            .map(|(batch, tokens, cached)| serving.forward(copy, batch, tokens, cached));
        (passes, serving.bytes(copy, 8, [4096, 0], 2048))
    };
    let numbers = [
        ("moments", "2"),
        ("overlap-tp", "0.5"),
        ("fragmentation", "10%"),
        ("reserve", "3GiB"),
        ("straggler", "7%"),
        ("power", "400W"),
    ];
    let base = priced(Stated::NOTHING);
    for fact in &profile::FACTS {
        let numbers = numbers.iter().filter(|(name, _)| *name == fact.name);
        let mut values = fact.words.iter().map(|word| word.name).chain(numbers.map(|(_, n)| *n));
        let changes = values.any(|value| {
            let stated: Stated = format!("{}={value}", fact.name).parse().unwrap();
            priced(stated) != base
        });
        // Our own executor copies nothing around attention, and dense models have no experts.
        let has_effect = !["attention-copies", "imbalance"].contains(&fact.name);
        assert_eq!(changes, fact.inference && has_effect, "{}", fact.name);
    }
}
