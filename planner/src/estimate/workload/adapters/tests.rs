//! Frozen weights cost what they hold and what passes through them, and adapters what they train.

use ir::lora::Lora;

use crate::cluster::Cluster;
use crate::configuration::Configuration;
use crate::estimate::described::described;
use crate::estimate::profile::{GANTLINE, Profile, TORCHTITAN_2025};
use crate::estimate::rates::Arithmetic;
use crate::estimate::tests::machine;
use crate::estimate::workload::Workload;
use crate::estimate::{Estimate, Estimator, Job};

fn llama(lora: Option<&str>) -> Workload {
    let work = described("llama-3-8b", Some(2048)).unwrap().work;
    match lora {
        None => work,
        Some(text) => work.with_adapters(&text.parse().unwrap()).unwrap(),
    }
}

fn step(profile: Profile, lora: Option<&str>, plan: &str) -> Estimate {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    let work = llama(lora);
    let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
    let estimator = Estimator::over(8, &work, &cluster, profile, job).unwrap();
    estimator.estimate(&plan.parse::<Configuration>().unwrap()).unwrap()
}

/// As many parameters as peft counts for these models and targets.
#[test]
fn adapters_have_the_parameters_that_peft_counts() {
    for (lora, trained) in [
        // `trainable params: 3,407,872 || all params: 8,033,669,120` of model cards.
        ("rank=8,targets=q_proj,v_proj", 3_407_872),
        ("rank=16,targets=q,k,v,o", 13_631_488),
        ("rank=16,targets=all-linear", 41_943_040),
    ] {
        let work = llama(Some(lora));
        assert_eq!(work.trained_parameters(), trained, "{lora}");
        assert_eq!(work.parameters(), llama(None).parameters() + trained, "{lora}");
    }
    assert_eq!(llama(None).trained_parameters(), llama(None).parameters());
}

/// Frozen weights are held, and nothing else: gradients, states and updates are those of the
/// adapters. Tensor-parallel ranks together hold the base once.
#[test]
fn frozen_weights_are_held_and_not_trained() {
    let lora = "rank=16,targets=all-linear";
    for (plan, tp) in [("dp=8 mbs=1", 1.0), ("tp=4 dp=2 mbs=1 sp", 4.0)] {
        let [all, adapted] = [None, Some(lora)].map(|lora| step(GANTLINE, lora, plan));
        let base = 2.0 * llama(None).parameters() as f64 / tp;
        // Norms are held whole by each rank.
        let near = |ours: f64, expected: f64| (ours / expected - 1.0).abs() < 0.01;
        let trained = llama(Some(lora)).trained_parameters() as f64;
        let held = adapted.memory.weights_bytes - base;
        assert!(held >= 2.0 * trained / tp * 0.9 && held <= 2.0 * trained * 1.1, "{plan}: {held}");
        let per = |bytes: f64| bytes / (adapted.memory.gradients_bytes / 4.0);
        assert!(near(per(adapted.memory.optimizer_bytes), 12.0), "{plan}");
        let share = adapted.memory.optimizer_bytes / all.memory.optimizer_bytes;
        assert!(share < 0.02, "{plan}: {share}");
        // The gradient of a weight is a third of its products.
        let products = adapted.breakdown.products_s / all.breakdown.products_s;
        // Narrow products of adapters weigh more on smaller parts.
        let most = if tp > 1.0 { 1.0 } else { 0.85 };
        assert!(0.66 < products && products < most, "{plan}: {products}");
        assert!(adapted.breakdown.optimizer_s < 0.05 * all.breakdown.optimizer_s, "{plan}");
        assert!(adapted.breakdown.gradients_s < 0.2 * all.breakdown.gradients_s + 1e-3, "{plan}");
        assert!(adapted.memory.activations_bytes < all.memory.activations_bytes * 1.1, "{plan}");
    }
}

/// Dettmers et al. 2023, section 3: 4 bits and 0.127 of scales for each parameter of a product in
/// the layers; embedding, head and norms stay in two bytes. Each pass of the eight micro-batches
/// converts them: it reads them and writes them in two bytes.
#[test]
fn base_weights_are_stored_in_the_published_bits() {
    let held = |base: &str| {
        let lora = format!("rank=16,targets=q,v{base}");
        step(TORCHTITAN_2025, Some(&lora), "dp=8 mbs=1 zero=0")
    };
    let [plain, int8, nf4, double] =
        ["", ",weights=int8", ",weights=nf4", ",weights=nf4-dq"].map(held);
    let (h, f, kv) = (4096.0, 14336.0, 1024.0);
    let linear = 32.0 * (2.0 * h * h + 2.0 * h * kv + 3.0 * h * f);
    let saved = |other: &Estimate| plain.memory.weights_bytes - other.memory.weights_bytes;
    for (other, bits) in [(&int8, 8.0), (&nf4, 4.5), (&double, 4.127)] {
        let off = saved(other) / (linear * (16.0 - bits) / 8.0) - 1.0;
        assert!(off.abs() < 1e-3, "{bits}: {off}");
        let least_s = 8.0 * 2.0 * linear * (bits / 8.0 + 2.0) / 3.35e12;
        let share = (other.breakdown.rows_s - plain.breakdown.rows_s) / least_s;
        assert!((1.0..1.4).contains(&share), "{bits}: {share} of moving them");
        assert_eq!(other.breakdown.products_s, plain.breakdown.products_s, "{bits}");
    }
}

/// Sharded frozen weights are gathered for each use, and never reduced.
#[test]
fn sharded_frozen_weights_are_gathered() {
    let lora = Some("rank=16,targets=all-linear");
    let [whole, sharded] =
        ["dp=8 mbs=1", "dp=8 mbs=1 zero=3"].map(|plan| step(TORCHTITAN_2025, lora, plan));
    assert!(sharded.memory.weights_bytes < 0.35 * whole.memory.weights_bytes);
    assert!(sharded.breakdown.weights_s > whole.breakdown.weights_s);
    let all = step(TORCHTITAN_2025, None, "dp=8 mbs=1 zero=3");
    assert!(sharded.breakdown.gradients_s < all.breakdown.gradients_s);
}

/// Targets and ranks that cannot be are named, with what can.
#[test]
fn wrong_adapters_are_refused() {
    let refused = |model: &str, lora: &str| {
        let work = described(model, Some(2048)).unwrap().work;
        let lora: Lora = lora.parse().unwrap();
        let wrong = work.with_adapters(&lora).unwrap_err();
        format!("{}: {} {}", wrong.code, wrong.headline, wrong.help.unwrap_or_default())
    };
    for (model, lora, said) in [
        ("llama-3-8b", "rank=8,targets=queries", "q_proj"),
        ("llama-3-8b", "rank=2048,targets=k", "write `rank=1024` or less"),
        ("mixtral-8x7b", "rank=8,targets=all-linear", "targets=q,k,v,o"),
        ("mixtral-8x7b", "rank=8,targets=gate", "no product"),
    ] {
        let text = refused(model, lora);
        assert!(text.contains(said), "{model} {lora}: {text}");
    }
    assert!("rank=8,weights=int3".parse::<Lora>().unwrap_err().contains("nf4-dq"));
    let lora: Lora = "rank=8,alpha=16,targets=q,v,weights=nf4".parse().unwrap();
    assert_eq!(lora.to_string().parse(), Ok(lora));
}
