mod lora;
mod inference;
mod printed;
mod recommended;
mod unseen;

use super::row::{self, Columns};
use super::workload::Shape;
use super::*;
use crate::machine::Machine;
use crate::origin::Origin;
use crate::validate::{Compared, Errors, Summary, summarise};
use ir::target::{Arch, Target};

pub(crate) fn machine() -> Machine {
    Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() }
}

pub(crate) fn gpt3() -> Workload {
    let shape = Shape {
        name: "gpt3-175b".into(),
        layers: 96,
        hidden: 12288,
        heads: 96,
        kv_heads: 96,
        head_dim: 128,
        ffn: 4 * 12288,
        gated: false,
        vocab: 51200,
        seq: 2048,
        positions: 2048,
        causal: true,
        biases: true,
        tied: true,
        routed: None,
        head_norm: 0,
        low_rank: None,
    };
    shape.workload().unwrap()
}

/// Korthikanti et al. 2022, table 5: 175B on 64 A100 takes 18.13 s with full recomputation and
/// 13.75 s with selective recomputation and sequence parallelism.
#[test]
fn published_steps_are_met() {
    let cluster = Cluster::load_on("a100", &machine()).unwrap();
    let work = gpt3();
    let profile = profile::of_framework("Korthikanti").unwrap();
    let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
    let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
    for (text, seconds) in [
        ("tp=8 pp=8 dp=1 mbs=1 vpp=3 recompute=full", 18.13),
        ("tp=8 pp=8 dp=1 mbs=1 vpp=3 sp recompute=attention", 13.75),
    ] {
        let found = estimator.estimate(&text.parse().unwrap()).unwrap();
        let error = found.step_time_s / seconds - 1.0;
        println!("{text}: {:.2} s, {:?}", found.step_time_s, found.breakdown);
        println!("{:?}", found.memory);
        assert!(error.abs() < 0.10, "{text}: {:.2} s against {seconds} s", found.step_time_s);
        assert!(found.step_time_low_s < found.step_time_s);
        assert!(found.step_time_s < found.step_time_high_s);
        let sum: f64 = found.breakdown.parts().iter().map(|part| part.1).sum();
        assert_eq!(sum, found.step_time_s);
    }
}

/// More of a resource is never slower, where nothing else changes.
#[test]
fn recomputation_costs_time_and_saves_memory() {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    let work = gpt3();
    let job = Job { global_batch: 128, arithmetic: Arithmetic::Half };
    let estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
    let of = |recompute: &str| {
        let text = format!("tp=8 pp=8 dp=2 mbs=1 sp recompute={recompute}");
        estimator.estimate(&text.parse().unwrap()).unwrap()
    };
    let (none, full) = (of("none"), of("full"));
    assert!(none.step_time_s < full.step_time_s);
    assert!(none.memory.total_bytes() > full.memory.total_bytes());
    let wrong: Configuration = "tp=1 pp=1 dp=3 mbs=1".parse().unwrap();
    assert_eq!(estimator.estimate(&wrong).unwrap_err()[0].code, "E3401");
}

/// Our own kernels have the fastest instructions of Ampere and Hopper. On devices of later
/// architectures, and where they are compiled for earlier ones, they multiply by `mma.sync`, and a
/// user who states otherwise is believed.
#[test]
fn our_products_are_those_of_the_architecture_that_they_are_compiled_for() {
    let work = gpt3();
    let job = Job { global_batch: 128, arithmetic: Arithmetic::Half };
    let layout: Configuration = "tp=8 pp=8 dp=2 mbs=1 sp".parse().unwrap();
    let products = |cluster: &Cluster, facts: &[&str]| {
        let facts: Vec<String> = facts.iter().map(ToString::to_string).collect();
        let stated = profile::GANTLINE.stating(profile::Stated::read(&facts).unwrap());
        let estimator = Estimator::new(&work, cluster, stated, job).unwrap();
        let shown: Vec<String> = (stated.on(cluster).assumptions().into_iter())
            .filter(|fact| ["products", "attention"].contains(&fact.name))
            .map(|fact| fact.value)
            .collect();
        (estimator.estimate(&layout).unwrap().breakdown.products_s, shown.join(" "))
    };
    let fastest = ["products=fastest", "attention=flash-best"];
    for (name, arch, is_slower) in [
        ("a100", None, false),
        ("h100", None, false),
        ("h100", Some(Arch::Sm80), true),
        ("b200", None, true),
    ] {
        let mut cluster = Cluster::load(name).unwrap();
        cluster.compiled_for = arch.map(Target::Cuda);
        let (own_s, own) = products(&cluster, &[]);
        let (stated_s, _) = products(&cluster, &fastest);
        let wanted = if is_slower { "mma-sync flash-2" } else { "fastest flash-best" };
        assert_eq!(own, wanted, "{name} {arch:?}");
        assert_eq!(own_s > 1.5 * stated_s, is_slower, "{name} {arch:?}: {own_s}, {stated_s}");
        assert_eq!(own_s > stated_s, is_slower, "{name} {arch:?}: {own_s}, {stated_s}");
    }
}

/// What a node's memory has no room for stays on the device.
#[test]
fn hosts_are_not_endless() {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    let work = gpt3();
    let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
    let estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
    let of = |text: &str| estimator.estimate(&text.parse().unwrap()).unwrap();
    // One device holds 12 bytes or more of 175 billion parameters, or an eighth of them.
    for (layout, is_full) in [("tp=1 pp=1 dp=8 mbs=1", true), ("tp=8 pp=4 dp=2 mbs=1", false)] {
        let device = of(layout);
        let host = of(&format!("{layout} offload-optimizer=host"));
        let excess = host.memory.host_excess_bytes;
        assert_eq!(excess > 0.0, is_full, "{layout}: {excess}");
        let moved = device.memory.total_bytes() - host.memory.total_bytes();
        let room = device.memory.optimizer_bytes - excess;
        assert!((moved / room - 1.0).abs() < 1e-9, "{layout}: {moved} moved, room for {room}");
        assert!(room <= 2e12 / 8.0, "{layout}: {room} of a host");
        // And it is never for free.
        assert!(host.step_time_s > device.step_time_s, "{layout}");
    }
}

/// Devices of a node move at the same time: a way that they share is each one's in part, and a
/// node's memory is that of the devices that are used.
#[test]
fn devices_share_their_host() {
    let mut cluster = Cluster::load_on("h100", &machine()).unwrap();
    let work = gpt3();
    let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
    let text = "tp=8 pp=8 dp=1 mbs=1 offload-activations=host";
    let of = |cluster: &Cluster| {
        let estimator = Estimator::new(&work, cluster, profile::GANTLINE, job).unwrap();
        let found = estimator.estimate(&text.parse().unwrap()).unwrap();
        (found.breakdown.offload_s, found.memory.host_excess_bytes)
    };
    let known =
        |value: f64| Some(Known { value, origin: Origin::Datasheet, source: "test".to_owned() });
    let alone = of(&cluster);
    let link = 55e9;
    // As wide as all links together, it is not in the way.
    cluster.host.bandwidth = known(8.0 * link);
    assert_eq!(of(&cluster), alone);
    let mut before = alone.0;
    for part in [4.0, 2.0, 1.0, 0.5] {
        cluster.host.bandwidth = known(part * link);
        let (now, _) = of(&cluster);
        assert!(now > before, "{part}: {now}, with more {before}");
        before = now;
    }
    // Once nothing hides it, half the width is twice the time, but for what is hidden.
    cluster.host.bandwidth = known(0.25 * link);
    let (slow, _) = of(&cluster);
    cluster.host.bandwidth = known(0.125 * link);
    let (slower, _) = of(&cluster);
    assert!((slower / slow - 2.0).abs() < 0.2, "{slow} {slower}");
    // A host with less memory leaves more on the device, byte for byte.
    cluster.host.memory_bytes = known(8e9);
    let (_, excess) = of(&cluster);
    cluster.host.memory_bytes = known(4e9);
    let (_, more) = of(&cluster);
    assert!(excess > 0.0, "{excess}");
    assert_eq!((more - excess).round(), (4e9 / 8.0 * 7.0 / 8.0_f64).round());
}

fn bloom(heads: u32) -> Shape {
    Shape {
        name: "bloom prototype".into(),
        layers: 78,
        hidden: 13824,
        heads,
        kv_heads: heads,
        head_dim: 13824 / heads,
        ffn: 4 * 13824,
        gated: false,
        vocab: 250_880,
        seq: 2048,
        positions: 2048,
        causal: true,
        biases: true,
        tied: true,
        routed: None,
        head_norm: 0,
        low_rank: None,
    }
}

/// BigScience, chronicles of the 176B model, 26 February 2022: 48 nodes take 107.12 s with 96 heads
/// of 144 elements and 147.41 s with 128 heads of 108, which are no whole pieces of 16 bytes.
#[test]
fn heads_of_an_odd_size_are_slow() {
    let cluster = Cluster::load_on("a100", &machine()).unwrap();
    let profile = profile::of_framework("Megatron-DeepSpeed").unwrap();
    let job = Job { global_batch: 2048, arithmetic: Arithmetic::Half };
    let of = |heads: u32| {
        let work = bloom(heads).workload().unwrap();
        let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
        let text = "tp=4 pp=12 dp=8 mbs=2 zero=1 recompute=full";
        estimator.estimate(&text.parse().unwrap()).unwrap().step_time_s
    };
    let (even, odd) = (of(96), of(128));
    assert!(odd / even > 1.15, "{odd} s against {even} s; measured 147.41 and 107.12");
}

/// The Ultra-Scale Playbook: a micro-batch of the 3B model takes 337 ms over two nodes and two
/// stages with `tp=8`, 24 ms a layer, where its kernels need some 6.
#[test]
fn hosts_that_poll_are_late() {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    let work = gpt3();
    let job = Job { global_batch: 256, arithmetic: Arithmetic::Half };
    let far = "tp=8 pp=2 dp=1 mbs=1 sp recompute=none";
    let near = "tp=4 pp=2 dp=1 mbs=1 sp recompute=none";
    let nanotron = profile::of_framework("nanotron").unwrap();
    let dispatch = |profile: Profile, text: &str| {
        let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
        estimator.estimate(&text.parse().unwrap()).unwrap().breakdown.dispatch_s
    };
    assert!(dispatch(nanotron, far) > 10.0 * dispatch(nanotron, near));
    assert!(dispatch(profile::GANTLINE, far) <= dispatch(profile::GANTLINE, near) + 1e-9);
}

/// 134 published runs of nine sources, evenly chosen from 2,578; `source` says where it is printed.
const RUNS: &str = include_str!("../../tests/measured_runs.csv");

#[derive(Clone)]
struct Run {
    columns: Vec<String>,
    texts: csv::StringRecord,
}

impl Columns for Run {
    fn text(&self, column: &str) -> &str {
        let at = self.columns.iter().position(|name| name == column);
        at.and_then(|at| self.texts.get(at)).unwrap_or("")
    }
}

fn runs() -> Vec<Run> {
    read_runs(RUNS)
}

fn read_runs(text: &str) -> Vec<Run> {
    let mut reader = csv::ReaderBuilder::new().comment(Some(b'#')).from_reader(text.as_bytes());
    let columns: Vec<String> = reader.headers().unwrap().iter().map(str::to_owned).collect();
    let run = |texts: csv::Result<_>| Run { columns: columns.clone(), texts: texts.unwrap() };
    reader.records().map(run).collect()
}

/// The runs whose source begins so, predicted.
fn predicted(source: &str) -> Vec<Compared> {
    predicted_of(&runs(), source)
}

fn predicted_of(runs: &[Run], source: &str) -> Vec<Compared> {
    let runs = runs.iter().filter(|run| run.text("file").starts_with(source));
    let compare = |run: &Run| {
        let question = row::read(run).unwrap();
        let estimate = question.answer().unwrap();
        let sum: f64 = estimate.breakdown.parts().iter().map(|part| part.1).sum();
        assert!((sum / estimate.step_time_s - 1.0).abs() < 1e-9, "the parts add up");
        let usable = run.text("usable_for_memory") == "1";
        Compared {
            row_id: run.text("row_id").to_owned(),
            source: source.to_owned(),
            group: String::new(),
            measured_s: run.text("step_time_s").parse().ok(),
            predicted_s: estimate.step_time_s,
            interval_s: [estimate.step_time_low_s, estimate.step_time_high_s],
            measured_gib: run.text("peak_mem_gib").parse().ok().filter(|_| usable),
            predicted_gib: estimate.printed_memory.total_bytes() / 1_073_741_824.0,
            memory: serde_json::json!(estimate.printed_memory),
            fits: true,
            defaults: question.defaults,
            breakdown: serde_json::json!(estimate.breakdown),
        }
    };
    runs.map(compare).collect()
}

fn summary(source: &str) -> Summary {
    let rows = predicted(source);
    assert!(!rows.is_empty(), "{source} has no rows");
    let found = summarise(rows.iter());
    println!("{source}: {:?} coverage {:.2}", found.time, found.coverage);
    found
}

/// Korthikanti et al. 2022, table 5: the goal is 3 % on average and 7 % at most; Calculon reaches
/// 3.65 % and 8.87 % there with a device file of its own.
#[test]
fn korthikanti_is_met() {
    let Errors { rows, mean, max, .. } = summary("korthikanti").time;
    assert_eq!(rows, 9);
    assert!(mean <= 0.03 && max <= 0.07, "mean {mean}, max {max}");
}

/// Each source with the error that it had when this was written, and a little more.
#[test]
fn published_runs_are_predicted() {
    let limits = [
        ("megatron_2020", 0.10),
        ("narayanan", 0.06),
        ("nemo", 0.12),
        ("megatron_bridge", 0.15),
        ("mosaicml", 0.10),
        ("bloom", 0.10),
        ("vtrain", 0.08),
        ("nanotron", 0.08),
    ];
    for (source, limit) in limits {
        let Errors { median, .. } = summary(source).time;
        assert!(median <= limit, "{source}: median {median}, was at most {limit}");
    }
}

/// In single precision a weight, a gradient and an activation have four bytes, and nothing is held
/// twice: 16 bytes a parameter with AdamW.
#[test]
fn single_precision_is_held_once() {
    let cluster = Cluster::load_on("a100", &machine()).unwrap();
    let work = gpt3();
    let memory = |arithmetic| {
        let job = Job { global_batch: 64, arithmetic };
        let estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
        let text = "tp=8 pp=8 dp=1 mbs=1 recompute=none";
        estimator.estimate(&text.parse().unwrap()).unwrap().memory
    };
    let (half, single) = (memory(Arithmetic::Half), memory(Arithmetic::F32));
    let parameters = half.weights_bytes / 2.0;
    assert_eq!(single.weights_bytes, 4.0 * parameters);
    assert_eq!(single.gradients_bytes, 4.0 * parameters);
    assert_eq!(single.optimizer_bytes, 8.0 * parameters);
    let grown = single.activations_bytes / half.activations_bytes;
    assert!((1.95..=2.0).contains(&grown), "{grown} times the activations");
}

/// Nothing that was chosen with runs of a table in view is in force where they are predicted
/// blindly, and everything is elsewhere.
#[test]
fn blind_predictions_do_without_what_was_chosen() {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    let work = gpt3();
    let job = Job { global_batch: 256, arithmetic: Arithmetic::Half };
    let nanotron = profile::of_framework("nanotron").unwrap();
    let dispatch = |table: &str| {
        let estimator = Estimator::without_source(table, &work, &cluster, nanotron, job).unwrap();
        let text = "tp=8 pp=2 dp=1 mbs=1 sp recompute=none";
        estimator.estimate(&text.parse().unwrap()).unwrap().breakdown.dispatch_s
    };
    assert!(dispatch("nanotron_ultrascale_playbook.csv") < 0.2 * dispatch("vtrain_a100.csv"));
    assert_eq!(dispatch("korthikanti_2022.csv"), dispatch(""));
    for choice in chosen::CHOICES {
        let known = |name: &&str| runs().iter().any(|run| run.text("file").starts_with(*name));
        assert!(choice.seen.iter().all(known), "{} was chosen beside runs", choice.name);
    }
}

/// Where ranks copy each piece of what they gather, sharding the optimizer costs the more the more
/// ranks share it.
#[test]
fn copied_pieces_take_time() {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    let work = gpt3();
    let job = Job { global_batch: 1024, arithmetic: Arithmetic::Half };
    let weights = |copies_pieces, dp: u32| {
        let nanotron = profile::of_framework("nanotron").unwrap();
        let profile = Profile { copies_pieces, ..nanotron };
        let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
        let text = format!("tp=8 pp=1 dp={dp} mbs=1 sp zero=1 recompute=none");
        estimator.estimate(&text.parse().unwrap()).unwrap().breakdown.weights_s
    };
    // 96 layers of 12 tensors, two embeddings and a norm of two: 5 us a piece.
    let more = weights(true, 256) - weights(false, 256);
    assert!((more / (256.0 * 1157.0 * 5e-6) - 1.0).abs() < 0.01, "{more}");
    assert_eq!(weights(true, 1), weights(false, 1));
}

/// The memory that runs print, with what their allocators hold and nobody asks for.
#[test]
fn printed_memory_is_met() {
    for (source, limit) in [("bloom", 0.05), ("nanotron", 0.06)] {
        let Errors { rows, median, .. } = summary(source).memory;
        assert!(rows > 5 && median <= limit, "{source}: {rows} rows, median {median}");
    }
    // Pieces that nobody asks for are given back before a run fails: what fits is told without.
    let cluster = Cluster::load_on("a100", &machine()).unwrap();
    let work = gpt3();
    let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
    let profile = profile::of_framework("megatron-deepspeed").unwrap();
    let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
    let found = estimator.estimate(&"tp=8 pp=8 mbs=1 recompute=full".parse().unwrap()).unwrap();
    let comes_and_goes = found.memory.activations_bytes + found.memory.working_bytes;
    let more = found.printed_memory.total_bytes() - found.memory.total_bytes();
    assert!((more / (0.15 / 0.85 * comes_and_goes) - 1.0).abs() < 1e-9, "{more}");
}

/// Sums of gradients stay whole where a release reduces them after the last micro-batch, and with
/// stages: four bytes for each of a rank's parameters.
#[test]
fn sums_of_gradients_are_whole_until_they_are_reduced() {
    let cluster = Cluster::load_on("h200", &machine()).unwrap();
    let work = gpt3();
    let held = |framework: &str, layout: &str, batch: u64| {
        let profile = profile::of_framework(framework).unwrap();
        let job = Job { global_batch: batch, arithmetic: Arithmetic::Half };
        let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
        estimator.estimate(&layout.parse().unwrap()).unwrap().memory
    };
    let layout = "tp=1 pp=1 dp=64 mbs=1 zero=3 recompute=full";
    let parameters = work.parameters() as f64;
    for (framework, batch, whole) in [
        ("torchtitan", 64, false),
        ("torchtitan", 128, false),
        ("KempnerForge", 64, false),
        ("KempnerForge", 128, true),
    ] {
        let found = held(framework, layout, batch).gradients_bytes / (4.0 * parameters);
        let expected = if whole { 1.0 } else { 1.0 / 64.0 };
        assert!((found / expected - 1.0).abs() < 1e-3, "{framework} {batch}: {found}");
    }
    // With stages weights and sums are those of a stage, whole.
    let staged = "tp=1 pp=8 dp=64 mbs=1 zero=3 recompute=full";
    let memory = held("torchtitan", staged, 64 * 16);
    let weights = memory.gradients_bytes / 4.0 * 2.0 * (1.0 + 1.0 / 64.0);
    assert!((memory.weights_bytes / weights - 1.0).abs() < 1e-6);
    assert!(memory.gradients_bytes > 4.0 * parameters / 8.0);
}

/// With stages weights are gathered once a step, and gradients reduced once; so are gradients where
/// a release accumulates them whole.
#[test]
fn whole_weights_are_gathered_once() {
    let cluster = Cluster::load_on("h200", &machine()).unwrap();
    let work = gpt3();
    let exchanged = |framework: &str, pp: u32, micro: u64| {
        let profile = profile::of_framework(framework).unwrap();
        let job = Job { global_batch: 64 * micro, arithmetic: Arithmetic::Half };
        let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
        let text = format!("tp=1 pp={pp} dp=64 mbs=1 zero=3 recompute=full");
        let found = estimator.estimate(&text.parse().unwrap()).unwrap().breakdown;
        [found.weights_s, found.gradients_s]
    };
    for framework in ["torchtitan", "KempnerForge"] {
        assert_eq!(exchanged(framework, 8, 32), exchanged(framework, 8, 16), "{framework}");
    }
    let grown = |framework| {
        let [few, many] = [4, 8].map(|micro| exchanged(framework, 1, micro));
        [0, 1].map(|part| many[part] / few[part])
    };
    let [weights, gradients] = grown("torchtitan");
    assert!((weights - 2.0).abs() < 1e-9 && (gradients - 2.0).abs() < 1e-9);
    let [weights, gradients] = grown("KempnerForge");
    assert!((weights - 2.0).abs() < 1e-9 && gradients < 1.9, "{weights} {gradients}");
}

/// What a row leaves open does not keep a run that ran from fitting; what it says does.
#[test]
fn recomputation_that_is_open_may_make_room() {
    let columns = "model,layers,hidden,heads,kv_heads,ffn,gated_mlp,vocab,seq_len,gpu,n_gpus,tp,pp,\
                   dp,micro_batch,global_batch,recompute,framework";
    let columns: Vec<String> = columns.split(',').map(str::to_owned).collect();
    for (recompute, samples, expected) in
        [("", 4, true), ("none", 4, false), ("full", 4, true), ("", 1000, false)]
    {
        let text = format!(
            "LLAMA3_70B,80,8192,64,8,28672,1,128256,8192,GB200,64,1,1,64,{samples},{},{recompute},\
             torchtitan",
            64 * samples
        );
        let run = Run { columns: columns.clone(), texts: text.split(',').collect() };
        let question = row::read(&run).unwrap();
        let answer = question.answer().unwrap();
        assert_eq!(question.fits(&answer, ""), expected, "recompute `{recompute}`, {samples}");
    }
}

/// torchtitan's selective recomputation keeps, of a layer of Llama 3 8B, its input, the result of
/// attention and half of those of products: 4096 + 4096 + (6144 + 4096 + 28672 + 4096) / 2 elements
/// of two bytes.
#[test]
fn selective_recomputation_keeps_every_second_result() {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    let shape = crate::search::models::shape("llama-3-8b").unwrap();
    let work = shape.workload().unwrap();
    let job = Job { global_batch: 8, arithmetic: Arithmetic::Half };
    let profile = profile::of_framework("torchtitan").unwrap();
    let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
    let activations = |recompute: &str| {
        let text = format!("tp=1 pp=1 dp=8 mbs=1 zero=3 recompute={recompute}");
        estimator.estimate(&text.parse().unwrap()).unwrap().memory.activations_bytes
    };
    let (some, all) = (activations("attention"), activations("full"));
    let kept = 2.0 * (4096.0 + 43008.0 / 2.0) * f64::from(work.seq) * 32.0;
    assert!(((some - all) / kept - 1.0).abs() < 1e-6, "{} of {kept}", some - all);
}

/// A row may leave out what its model's name or size says, and write words as it likes.
#[test]
fn rows_may_say_little() {
    let columns = "model,params_b,layers,hidden,heads,kv_heads,seq_len,gpu,n_gpus,global_batch,\
                   precision,n_experts,framework";
    let columns: Vec<String> = columns.split(',').map(str::to_owned).collect();
    for (texts, billions) in [
        ("LLAMA3_70B,,,,,,8192,H100 SXM,64,64,MXFP8,,Megatron-Bridge", 70.55),
        ("someone's,7,,,,,2048,A100-SXM4-40GB,8,64,,,unheard of", 7.0),
        (",,32,4096,,8,1048576,NVIDIA B200,16384,,NVFP4,,FSDP2", 10.14),
        (",,32,4096,32,8,4096,MI300X,64,64,bf16-mixed,8,", 35.9),
        ("405b-ish,,126,16384,128,8,8192,V100-32GB,,64,fp32,,", 343.4),
    ] {
        let run = Run { columns: columns.clone(), texts: texts.split(',').collect() };
        let question = row::read(&run).unwrap();
        let found = question.work.parameters() as f64 / 1e9;
        assert!((found / billions - 1.0).abs() < 0.15, "{texts}: {found} billion");
        assert!(!question.defaults.is_empty());
        let estimate = question.answer().unwrap();
        assert!(estimate.step_time_s.is_finite() && estimate.step_time_s > 0.0, "{texts}");
    }
    for (texts, reason) in [
        (",,32,4096,32,,2048,TPU v4,8,8,,,", "no preset describes"),
        ("Llama 2 7B QLoRA,7,,,,,2048,A100-80GB,8,8,,,", "adapters"),
    ] {
        let refused = Run { columns: columns.clone(), texts: texts.split(',').collect() };
        assert!(row::read(&refused).unwrap_err().contains(reason), "{texts}");
    }
}

/// Whatever stands in a column, a row has an answer or a reason.
#[test]
fn no_row_is_too_strange() {
    let strange = ["", "0", "-1", "x", "3.5", "1e300", "NaN", "16777215", "4294967295"];
    let (mut answered, mut refused) = (0, 0);
    for run in runs().iter().step_by(9) {
        for at in 0..run.columns.len() {
            for text in strange {
                let mut run = run.clone();
                let texts = run.texts.iter().enumerate();
                run.texts = texts.map(|(i, old)| if i == at { text } else { old }).collect();
                let found = row::read(&run).and_then(|question| question.answer());
                match found {
                    Ok(estimate) => {
                        let seconds = estimate.step_time_s;
                        let place = format!("{} = {text}: {seconds}", run.columns[at]);
                        assert!(seconds.is_finite() && seconds > 0.0, "{place}");
                        answered += 1;
                    }
                    Err(reason) => {
                        assert!(!reason.is_empty());
                        refused += 1;
                    }
                }
            }
        }
    }
    assert!(answered > 1000 && refused > 300, "{answered} answered, {refused} refused");
}

/// Computing again is busy with what it computes, and not with its collectives: a forward pass of
/// layers, a third of the products. Where the host updates, the device is not busy with it.
#[test]
fn devices_are_busy_with_what_they_compute() {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    let work = gpt3();
    let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
    let estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
    let of = |text: &str| estimator.estimate(&text.parse().unwrap()).unwrap();
    for layout in ["tp=8 pp=1 dp=1 mbs=1", "tp=8 pp=1 dp=1 mbs=1 sp"] {
        let [none, full] = ["none", "full"].map(|what| of(&format!("{layout} recompute={what}")));
        let parts = none.breakdown;
        let more = full.busy_s - none.busy_s;
        let share = more / (parts.products_s + parts.attention_s + parts.rows_s);
        assert!((0.25..0.36).contains(&share), "{layout}: {share} of what is computed");
        let recompute_s = full.breakdown.recompute_s;
        assert!(more < recompute_s, "{layout}: {more} of {recompute_s} s busy");
        let host = of(&format!("{layout} offload-optimizer=host"));
        assert!(host.breakdown.optimizer_s > none.breakdown.optimizer_s);
        assert!(host.busy_s < none.busy_s, "{layout}: {} and {}", host.busy_s, none.busy_s);
    }
}

/// A job waits for the slowest of its own devices, however many there are beside.
#[test]
fn others_are_not_waited_for() {
    let work = gpt3();
    let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
    let of = |nodes: usize, devices: u64| {
        let mut cluster = Cluster::load_on("h100", &machine()).unwrap();
        cluster.nodes = nodes;
        let estimator = Estimator::over(devices, &work, &cluster, profile::GANTLINE, job).unwrap();
        estimator.estimate(&"tp=8 pp=1 dp=1 mbs=1".parse().unwrap()).unwrap().step_time_s
    };
    assert_eq!(of(1, 8), of(100, 8));
    assert!(of(1, 1) < of(1, 8) && of(100, 8) < of(100, 800));
}

/// A vocabulary is cut into equal pieces: one that does not divide is padded first, to a multiple
/// of 128 for each rank (Shoeybi et al. 2019), on one rank too where a release pads any.
#[test]
fn vocabularies_are_padded_where_they_are_cut() {
    let cluster = Cluster::load_on("a100", &machine()).unwrap();
    let ends = |profile: profile::Profile, vocab: u32, tp: u32| {
        let work = Shape { vocab, tied: false, ..bloom(32) }.workload().unwrap();
        let job = Job { global_batch: 8, arithmetic: Arithmetic::Half };
        let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
        let c: Configuration = format!("tp={tp} mbs=1").parse().unwrap();
        let prices = estimator.prices(estimator.inside(&c));
        [prices.first, prices.last]
    };
    let bare = profile::of_framework("nanogpt").unwrap();
    for profile in [profile::GANTLINE, bare] {
        for (tp, padded) in [(2, 50_432), (4, 50_688), (8, 51_200)] {
            assert_eq!(ends(profile, 50_257, tp), ends(profile, padded, tp), "{tp} ranks");
            assert_ne!(ends(profile, 50_240, 2), ends(profile, 50_432, 2));
        }
    }
    assert_eq!(ends(profile::GANTLINE, 50_257, 1), ends(profile::GANTLINE, 50_304, 1));
    // Rows of an odd number of columns are slow to load.
    let [odd, even] = [50_257, 50_304].map(|vocab| ends(bare, vocab, 1)[1].forward.products_s);
    assert!(odd > 1.5 * even, "{odd} s and {even} s");
}
