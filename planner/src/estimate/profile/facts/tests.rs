//! Each fact changes what it says, by as many bytes and operations, and nothing else.

use super::*;
use crate::cluster::Cluster;
use crate::configuration::Configuration;
use crate::estimate::profile::{DEEPSPEED, GANTLINE, MEGATRON_BRIDGE, PROFILES, TORCHTITAN_2025};
use crate::estimate::rates::Arithmetic;
use crate::estimate::tests::{gpt3, machine};
use crate::estimate::{Estimate, Estimator, Job};

fn stated(text: &str) -> Stated {
    text.parse().unwrap_or_else(|wrong| panic!("{text}: {wrong:?}"))
}

fn half(profile: Profile) -> Profile {
    profile.in_arithmetic(Arithmetic::Half)
}

/// The step of a plan with facts on top of a profile.
fn step(profile: Profile, facts: &str, plan: &str) -> Estimate {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    let work = gpt3();
    let job = Job { global_batch: 1536, arithmetic: Arithmetic::Half };
    let facts = if facts.is_empty() { Stated::NOTHING } else { stated(facts) };
    let estimator = Estimator::over(1024, &work, &cluster, profile.stating(facts), job).unwrap();
    estimator.estimate(&plan.parse::<Configuration>().unwrap()).unwrap()
}

const PLAN: &str = "tp=8 pp=8 dp=16 mbs=1 sp zero=1";

/// A fact that says what the profile has changes nothing, for any profile; and one that says other
/// things changes something.
#[test]
fn stating_what_is_so_changes_nothing() {
    for profile in PROFILES {
        let base = step(profile, "", PLAN);
        let is = half(profile);
        let same = [
            format!("weights={}", is.weight_bytes),
            format!("gradients={}", is.gradient_bytes),
            format!("moments={}", is.moments_bytes()),
            format!("masters={}", is.master_bytes()),
            format!("attention={}", attention_word(is.attention)),
            format!("overlap-gradients={}", yes_no(is.gradients == Exchange::Overlapped)),
            format!("reserve={}MB", is.reserve_bytes / 1e6),
            "fragmentation=0".to_owned(),
            "imbalance=1".to_owned(),
            "power=700W".to_owned(),
            "saved=computed".to_owned(),
        ];
        for facts in &same {
            let other = step(profile, facts, PLAN);
            let off = other.step_time_s / base.step_time_s - 1.0;
            assert!(off.abs() < 1e-12, "{} {facts}: {off}", profile.name);
            let off = other.memory.total_bytes() / base.memory.total_bytes() - 1.0;
            assert!(off.abs() < 1e-12, "{} {facts}: {off}", profile.name);
        }
        let different = "optimizer=sgd,gradients=1,fragmentation=0.2,straggler=50%";
        assert_ne!(step(profile, different, PLAN), base, "{}", profile.name);
    }
}

/// Bytes of a parameter, as the optimizers' sources have them.
#[test]
fn optimizers_keep_as_many_bytes_as_they_say() {
    let state = |facts: &str, profile: Profile| half(profile.stating(stated(facts))).state_bytes;
    for (facts, bytes) in [
        ("optimizer=adamw", 12.0),
        // Dettmers et al. 2022: two moments of a byte, each 256 with a scale of 4.
        ("optimizer=adam-8bit", 4.0 + 2.0 + 8.0 / 256.0),
        ("optimizer=adam-bf16", 8.0),
        ("optimizer=sgd-momentum", 8.0),
        ("optimizer=sgd", 4.0),
        ("masters=none", 8.0),
        ("optimizer=adam-bf16,masters=none", 4.0),
        ("optimizer=adamw,moments=6", 10.0),
    ] {
        assert_eq!(state(facts, GANTLINE), bytes, "{facts}");
    }
    // Sharded masters are the weights: two of their bytes are counted as such.
    assert_eq!(state("optimizer=sgd", TORCHTITAN_2025), 2.0);
    assert_eq!(state("masters=none", TORCHTITAN_2025), 8.0);
    // Megatron-Core copies gradients that are narrower than f32 for its update.
    let held = |facts: &str| {
        let profile = half(MEGATRON_BRIDGE.stating(stated(facts)));
        profile.gradient_bytes + profile.optimizer_bytes()
    };
    assert_eq!(held("gradients=bf16"), 2.0 + 4.0 + 4.0 + 8.0);
    assert_eq!(held("gradients=f32"), 4.0 + 4.0 + 8.0);
    assert_eq!(held("gradients=bf16,masters=none"), 2.0 + 8.0);
    // An update reads gradients, reads and writes moments and masters, and writes weights.
    let moved = |facts: &str| half(GANTLINE.stating(stated(facts))).update_bytes;
    for (facts, bytes) in [
        ("optimizer=adamw", 4.0 + 16.0 + 8.0 + 2.0),
        ("optimizer=sgd", 4.0 + 8.0 + 2.0),
        ("gradients=bf16", 2.0 + 16.0 + 8.0 + 2.0),
        // The weight itself is read, too.
        ("masters=none", 4.0 + 16.0 + 2.0 + 2.0),
    ] {
        assert_eq!(moved(facts), bytes, "{facts}");
    }
}

/// All devices together hold the moments that a rule says, of every matrix: muon's of 96 layers
/// have one momentum, Adafactor's a number for each row and column.
#[test]
fn moments_of_matrices_are_counted_one_by_one() {
    let plan = "tp=1 pp=1 dp=512 mbs=1 zero=0 recompute=full";
    let [none, muon, adafactor, adam] = ["sgd", "muon", "adafactor", "adamw"]
        .map(|name| step(GANTLINE, &format!("optimizer={name}"), plan).memory.optimizer_bytes);
    let (layers, h, vocab, seq) = (96.0, 12_288.0, 51_200.0, 2048.0);
    let matrices = layers * 12.0 * h * h;
    let all = gpt3().parameters() as f64;
    let expected = 4.0 * matrices + 8.0 * (all - matrices);
    let off = (muon - none) / expected - 1.0;
    assert!(off.abs() < 1e-3, "muon: {off}");
    assert!(((adam - none) / (8.0 * all) - 1.0).abs() < 1e-3);
    let sides = layers * ((h + 3.0 * h) + 2.0 * h + 2.0 * (h + 4.0 * h)) + (vocab + h) + (seq + h);
    let vectors = all - matrices - (vocab + seq) * h;
    let expected = 4.0 * (sides + vectors);
    let off = (adafactor - none) / expected - 1.0;
    assert!(off.abs() < 0.02, "adafactor: {off}, {} of {expected}", adafactor - none);
}

/// Muon's products are five times `4 m² n + 2 m³` operations of each matrix: at the peak they take
/// less than they are priced with, and at a third of it more.
#[test]
fn newton_schulz_takes_its_products() {
    let plan = "tp=8 pp=8 dp=16 mbs=1 sp zero=0";
    let [muon, adam] = ["optimizer=muon", "optimizer=adamw"]
        .map(|facts| step(GANTLINE, facts, plan).breakdown.optimizer_s);
    let h = 12_288.0_f64;
    // A rank's part of each matrix: columns of an eighth, or rows.
    let one = |rows: f64, columns: f64| {
        let (m, n) = (rows.min(columns), rows.max(columns));
        5.0 * (4.0 * m * m * n + 2.0 * m * m * m)
    };
    let parts = [one(h, 3.0 * h / 8.0), one(h / 8.0, h), one(h, h / 2.0), one(h / 2.0, h)];
    let least_s = 12.0 * parts.iter().sum::<f64>() / 989.5e12;
    let more_s = muon - adam;
    assert!(least_s < more_s && more_s < 3.0 * least_s, "{more_s} s of {least_s} s");
    // Ranks that share the optimizer's state share its products.
    let shared = step(GANTLINE, "optimizer=muon", PLAN).breakdown.optimizer_s;
    let off = shared * 16.0 / muon - 1.0;
    assert!(off.abs() < 0.05, "{off}");
}

/// Each fact moves what it is about, in its direction.
#[test]
fn facts_move_times_and_bytes() {
    let base = step(MEGATRON_BRIDGE, "", PLAN);
    let with = |facts: &str| step(MEGATRON_BRIDGE, facts, PLAN);
    let total = |estimate: &Estimate| estimate.memory.total_bytes();
    assert!(with("attention=materialised").breakdown.attention_s > base.breakdown.attention_s);
    assert!(total(&with("attention=materialised")) > total(&base));
    assert!(with("overlap-gradients=no").breakdown.gradients_s > base.breakdown.gradients_s);
    assert!(with("overlap-tp=no").breakdown.tensor_s > base.breakdown.tensor_s);
    assert!(with("cuda-graphs").breakdown.dispatch_s < 1e-9);
    assert_eq!(with("reserve=10GiB").memory.reserve_bytes, 10.0 * 1_073_741_824.0);
    // A share of what the allocator holds is of no use: 10 % of 10 parts beside 9 that are.
    let cut = with("fragmentation=10%").memory;
    let used = cut.activations_bytes + cut.working_bytes;
    assert!((cut.reserve_bytes - base.memory.reserve_bytes - used / 9.0).abs() < 1.0);
    // Half of the power, and products at the root of the clock.
    let slow = with("power=350W");
    assert!(slow.breakdown.products_s > 1.2 * base.breakdown.products_s);
    assert!(slow.breakdown.products_s < 1.5 * base.breakdown.products_s);
    let late = [0.0, 0.1, 0.2].map(|share| with(&format!("straggler={share}")).step_time_s);
    assert!(late[0] < base.step_time_s && base.step_time_s < late[1] && late[1] < late[2]);
    let narrow = with("saved=f8");
    assert!(narrow.memory.activations_bytes < base.memory.activations_bytes);
    assert!(narrow.breakdown.rows_s > base.breakdown.rows_s);
    let exchanged = step(DEEPSPEED, "reduce=f32", "dp=512 mbs=1 zero=3 recompute=full");
    let narrower = step(DEEPSPEED, "reduce=bf16", "dp=512 mbs=1 zero=3 recompute=full");
    assert!(exchanged.breakdown.gradients_s > narrower.breakdown.gradients_s);
}

/// MFU is counted as it is said: 6N leaves attention out, `full` doubles the causal one.
#[test]
fn conventions_count_as_they_say() {
    let work = gpt3();
    let flops = |facts: &str| half(GANTLINE.stating(stated(facts))).counted_flops(&work);
    let tokens = f64::from(work.seq);
    let n = work.parameters() as f64;
    // Narayanan et al. 2021, equation 3: attention of all tokens is 12 l s² h forward and backward.
    let attention = 12.0 * 96.0 * tokens * tokens * 12_288.0;
    assert_eq!(flops("flops=6n"), 6.0 * n * tokens);
    let off = flops("flops=6n+attention,causal=full") / (6.0 * n * tokens + attention) - 1.0;
    assert!(off.abs() < 1e-9, "{off}");
    let off = (flops("causal=full") - flops("causal=half")) / (attention / 2.0) - 1.0;
    assert!(off.abs() < 1e-9, "{off}");
    assert_eq!(half(GANTLINE.stating(stated("peak=sparse"))).counted_peak(1.0), 2.0);
}

/// Unknown words are refused with the nearest and the list, contradictions with their reason.
#[test]
fn mistakes_are_named() {
    for (text, said) in [
        ("optimiser=adamw", "did you mean `optimizer`?"),
        ("optimizer=adam-8bits", "did you mean `adam-8bit`?"),
        ("attention=flash", "materialised, fused-softmax, flash-1"),
        ("optimizer", "`optimizer` says nothing alone"),
        ("fragmentation=1.5", "a share from 0 to 0.9"),
        ("reserve=2", "bytes with a unit"),
        ("imbalance=0.5", "from 1 to 1024"),
        ("optimizer=sgd,moments=4", "sgd has no moments"),
        ("flops=6n,causal=full", "6n counts no attention"),
        ("weights=bf16,weights=f32", "`weights` is stated twice"),
        ("power=0W", "more than 0 W"),
    ] {
        let wrong = text.parse::<Stated>().unwrap_err();
        let all: String =
            wrong.iter().map(|(headline, help)| format!("{headline}; {help}")).collect();
        assert!(all.contains(said), "{text}: {all}");
    }
    // All mistakes are named at once.
    assert_eq!("a=1,optimizer=b,reserve=c".parse::<Stated>().unwrap_err().len(), 3);
}

/// The table is what everything is made of: each word is read back as it is completed and printed.
#[test]
fn the_table_reads_what_it_completes() {
    for (text, _) in completions().iter().filter(|(text, _)| !text.ends_with('=')) {
        let facts = stated(text);
        assert_eq!(facts.to_string(), *text);
        let marked: Vec<_> = half(GANTLINE.stating(facts)).assumptions();
        let marked: Vec<_> = marked.iter().filter(|one| one.stated).collect();
        assert!(matches!(&marked[..], [one] if text.starts_with(one.name)), "{text}");
        assert!(table().contains(text.split_once('=').unwrap().1), "{text}");
    }
    assert!(half(GANTLINE).assumptions().iter().all(|one| !one.stated));
}
