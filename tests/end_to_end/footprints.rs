//! What is said of the memory of a plan is what its programs allocate.

use std::ops::Range;
use std::path::Path;

use gantline::planned::Wanted as PlansOf;
use gantline::verbs::gpus::finalists::{Beside, Programs};
use ir::lora::Lora;
use ir::plan::{Keep, Place, Schedule, Zero};
use ir::precision::Precision;
use ir::{DType, Mesh, Module, Plan};
use planner::cluster::Cluster;
use planner::estimate::described::described;
use planner::estimate::memory::Memory;
use planner::estimate::profile::GANTLINE;
use planner::estimate::rates::Arithmetic;
use planner::estimate::{Estimator, Job};
use serde_json::Value;

use crate::cli::tiny;
use crate::mesh::{gpt2, interleave, llama};
use crate::model::{Wanted, plan, prepared_as, session};

const SEQ: usize = 16;
const SAMPLES: usize = 12;
/// The most that the closed form is off, at the median and the 95th percentile of plans.
const ACTIVATIONS: [f64; 2] = [0.03, 0.32];
const BOTH: [f64; 2] = [0.05, 0.25];
const ALL: [f64; 2] = [0.01, 0.05];

fn check_arenas(module: &Module, plan: &Plan) {
    let footprint = codegen::footprint(module, "loss", plan).expect("it compiles");
    let session = session(module, plan);
    let ranks = 0..plan.mesh.ranks();
    let allocated = ranks.map(|rank| session.lend(rank, |lent| lent.arena_bytes(Place::Device)));
    let most = allocated.max().expect("there are ranks");
    assert_eq!(footprint.arena, most, "{plan}");
}

/// The fullest rank of a session has allocated the footprint's arena, to the byte.
#[test]
fn footprints_are_what_sessions_allocate() {
    for (description, precision) in
        [(gpt2(), Precision::training(DType::BF16)), (llama(), Precision::uniform(DType::F32))]
    {
        let (_, module) = prepared_as(&description, SEQ, &precision);
        for (mesh, microbatch_size, keep) in [
            ([1, 1, 1], 3, Keep::Full),
            ([1, 2, 2], 2, Keep::None),
            ([2, 2, 1], 1, Keep::AllButAttention),
            ([3, 1, 2], 2, Keep::Full),
        ] {
            let [pp, dp, tp] = mesh;
            let mesh = Mesh { pp, dp, tp, ..Mesh::ONE };
            let microbatch_count = SAMPLES / dp / microbatch_size;
            let sequence = tp > 1;
            let wanted = Wanted { mesh, microbatch_size, microbatch_count, keep, sequence };
            let whole = plan(&module, SEQ, precision.accumulate, wanted).expect("the mesh fits");
            let usual = Schedule::OneForwardOneBackward;
            for (stage, schedule) in [(0, usual), (1, Schedule::GPipe), (2, usual), (3, usual)] {
                let zero = Zero { stage, shard: 0 };
                let plan = Plan { precision, zero, schedule, ..whole.clone() };
                check_arenas(&module, &plan);
            }
            if pp > 1 {
                let schedule = Schedule::ZeroBubbleH1;
                check_arenas(&module, &Plan { precision, schedule, ..whole.clone() });
                let mut plan = Plan { precision, ..whole };
                interleave(&mut plan, 3, 11);
                check_arenas(&module, &plan);
            }
        }
    }
}

/// Layouts of eight devices that programs carry out.
const LAYOUTS: [&str; 29] = [
    "dp=8 mbs=1",
    "dp=8 mbs=4",
    "dp=8 mbs=2 zero=1",
    "tp=2 dp=4 mbs=2",
    "tp=2 dp=4 mbs=2 sp",
    "tp=4 dp=2 mbs=4 sp zero=1",
    "pp=2 dp=4 mbs=1",
    "pp=4 dp=2 mbs=2 schedule=gpipe",
    "pp=4 dp=2 mbs=1 recompute=full",
    "dp=8 mbs=2 recompute=full",
    "dp=8 mbs=2 recompute=attention",
    "tp=2 pp=2 dp=2 mbs=2 sp",
    "pp=2 dp=4 mbs=1 vpp=3",
    "tp=2 pp=4 dp=1 mbs=2 vpp=2 sp",
    "pp=2 dp=4 mbs=1 schedule=zb-h1",
    "pp=4 dp=2 mbs=2 schedule=zb-h2",
    "dp=8 mbs=1 zero=1 recompute=full",
    "dp=8 mbs=2 zero=2",
    "dp=8 mbs=1 zero=3",
    "dp=8 mbs=1 zero=3 recompute=full",
    "tp=2 pp=2 dp=2 mbs=1 sp zero=3",
    "dp=8 mbs=2 offload-activations=host",
    "dp=8 mbs=2 recompute=full offload-activations=host",
    "pp=4 dp=2 mbs=1 offload-activations=host",
    "pp=2 dp=4 mbs=1 vpp=3 offload-activations=host",
    "tp=2 pp=2 dp=2 mbs=1 sp offload-activations=host",
    "dp=8 mbs=2 offload-parameters=host",
    "pp=4 dp=2 mbs=1 offload-parameters=host offload-optimizer=host",
    "dp=8 mbs=1 zero=3 offload-parameters=host",
];

/// The relative errors of some numbers, without sign, in their order.
fn errors(pairs: impl Iterator<Item = (f64, f64)>) -> Vec<f64> {
    let error = |(of, to): (f64, f64)| if of == to { 0.0 } else { (of / to - 1.0).abs() };
    let mut errors: Vec<f64> = pairs.map(error).collect();
    errors.sort_by(f64::total_cmp);
    errors
}

/// What the closed form may expect of a layout's activations and working memory, as parts of what
/// its programs hold.
fn nearness(layout: &str) -> Range<f64> {
    if layout.contains("offload-activations") {
        // Little is left: two layers' activations, and those of the loss.
        0.6..1.4
    } else if layout.contains("vpp") {
        // Interleaved stages keep so much that no other part hides an error.
        0.88..1.25
    } else if layout.contains("zero=2") || layout.contains("zero=3") {
        // What calls hold of shared weights is most of it where little is kept.
        0.75..1.25
    } else {
        0.0..f64::INFINITY
    }
}

/// What the closed form expects of a device is near what programs allocate, role by role. Run with
/// `--nocapture`, it prints how near.
#[test]
fn the_closed_form_is_near_the_programs() {
    let cluster = Cluster::load("h100").expect("a preset");
    let mut compared: Vec<[Memory; 2]> = Vec::new();
    for (model, seq) in [
        ("gpt2", 1024),
        ("gpt2-mini", 128),
        ("gpt2-xl", 1024),
        ("llama-3-8b", 2048),
        ("qwen2.5-7b", 2048),
        ("mistral-7b", 2048),
        ("falcon-40b", 2048),
        ("gpt-22b", 2048),
    ] {
        let work = described(model, Some(seq)).expect("a preset").work;
        let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
        let estimator = Estimator::over(8, &work, &cluster, GANTLINE, job).expect("GPUs");
        let wanted = PlansOf {
            model: Path::new(model),
            cluster: "h100".to_owned(),
            // The closed form knows no workspaces of kernels.
            target: None,
            global_batch_size: 64,
            seq: seq as usize,
            dtype: DType::BF16.into(),
            lora: None,
            predictions: Default::default(),
        };
        let on_gpus = PlansOf { target: cluster.target(), ..wanted.clone() };
        let programs = Programs::new(wanted, Beside::of(&estimator), &[]);
        // GPUs gather one call ahead.
        let gathering = Programs::new(on_gpus, Beside::of(&estimator), &[]);
        for layout in LAYOUTS {
            // The heads of gpt2-xl are odd.
            let Ok(estimate) = estimator.estimate(&layout.parse().expect("a name")) else {
                continue;
            };
            let programs = if layout.contains("zero=3") { &gathering } else { &programs };
            let held = programs.held(&estimate.configuration).expect("it compiles");
            let both = [estimate.memory, held.memory()];
            let [expected, found] = both.map(|m| m.activations_bytes + m.working_bytes);
            println!("{model:<12} {layout:<36} activations {:.3}", expected / found);
            let near = nearness(layout);
            assert!(near.contains(&(expected / found)), "{model} {layout}: {expected} of {found}");
            compared.push(both);
        }
    }
    assert!(compared.len() >= 60, "{} plans", compared.len());
    let of = |what: &str, part: &dyn Fn(&Memory) -> f64| {
        let errors = errors(compared.iter().map(|[expected, held]| (part(expected), part(held))));
        let [median, most] = [50, 95].map(|share| errors[(errors.len() - 1) * share / 100]);
        println!("{what:<24} median {:5.1}%  p95 {:5.1}%", 100.0 * median, 100.0 * most);
        (median, most)
    };
    let weights = of("weights", &|m| m.weights_bytes);
    let gradients = of("gradients", &|m| m.gradients_bytes);
    let optimizer = of("optimizer", &|m| m.optimizer_bytes);
    let activations = of("activations", &|m| m.activations_bytes);
    of("working", &|m| m.working_bytes);
    let both = of("activations and working", &|m| m.activations_bytes + m.working_bytes);
    let all = of("all", &Memory::total_bytes);
    for (median, most) in [weights, gradients, optimizer] {
        assert!(median < 0.001 && most < 0.03, "{median} {most}");
    }
    for ((median, most), [median_max, most_max]) in
        [(activations, ACTIVATIONS), (both, BOTH), (all, ALL)]
    {
        assert!(median < median_max && most < most_max, "{median} {most}");
    }
}

/// Layouts of routed models: how experts are shared and sliced, beside what else lies elsewhere.
const OF_EXPERTS: [&str; 18] = [
    "dp=8 mbs=2",
    "ep=2 dp=8 mbs=2",
    "ep=4 dp=8 mbs=2 zero=1",
    "ep=4 dp=8 mbs=4",
    "ep=2 dp=8 mbs=2 zero=3/4",
    "cp=2 ep=4 dp=4 mbs=2 zero=2",
    "cp=2 ep=2 dp=2 pp=2 mbs=2 zero=3",
    "ep=4 dp=8 mbs=2 zero=2",
    "ep=4 dp=4 pp=2 mbs=1 zero=3",
    "ep=2 dp=2 pp=4 mbs=1",
    "ep=2 dp=2 pp=4 mbs=1 schedule=gpipe",
    "ep=4 dp=8 mbs=2 recompute=full",
    "ep=4 dp=8 mbs=2 recompute=attention",
    "tp=2 ep=4 dp=4 mbs=2 sp",
    "tp=2 ep=4 dp=4 mbs=8 sp recompute=full",
    "tp=2 ep=4 dp=4 mbs=8 recompute=full",
    "tp=4 ep=2 dp=2 mbs=1 sp zero=3",
    "tp=4 dp=2 mbs=1 sp",
];

/// Likewise of routed models, whose kernels have room for all rows that may come.
#[test]
fn the_closed_form_of_experts_is_near_the_programs() {
    let cluster = Cluster::load("h100").expect("a preset");
    let mut compared = 0;
    for model in
        ["mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen2-57b-a14b", "qwen3-30b-a3b", "deepseek-v2-lite"]
    {
        let work = described(model, Some(2048)).expect("a preset").work;
        let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
        let estimator = Estimator::over(8, &work, &cluster, GANTLINE, job).expect("GPUs");
        let wanted = PlansOf {
            model: Path::new(model),
            cluster: "h100".to_owned(),
            target: cluster.target(),
            global_batch_size: 64,
            seq: 2048,
            dtype: DType::BF16.into(),
            lora: None,
            predictions: Default::default(),
        };
        let programs = Programs::new(wanted, Beside::of(&estimator), &[]);
        for layout in OF_EXPERTS {
            let estimate = estimator.estimate(&layout.parse().expect("a name"));
            let estimate = estimate.expect("a layout that fits the model");
            // Too many values are kept under some.
            let Ok(held) = programs.held(&estimate.configuration) else { continue };
            let held = held.memory();
            compared += 1;
            let of = |m: &Memory| m.activations_bytes + m.working_bytes;
            let ratio = of(&estimate.memory) / of(&held);
            println!("{model:<18} {layout:<40} activations {ratio:.3}");
            // The closed form counts the queries of DeepSeek-V2-Lite twice, a twentieth of all.
            assert!((0.94..1.08).contains(&ratio), "{model} {layout}: {ratio}");
            let all = estimate.memory.total_bytes() / held.total_bytes();
            assert!((0.98..1.02).contains(&all), "{model} {layout}: {all}");
        }
    }
    assert!(compared > 44, "{compared} plans");
}

/// Likewise where adapters are trained: what frozen weights are multiplied by is not kept, and of
/// the sums of products and of adapters' nothing but these.
#[test]
fn the_closed_form_of_adapters_is_near_the_programs() {
    let cluster = Cluster::load("h100").expect("a preset");
    for (model, seq, lora) in [
        ("llama-3.2-1b", 2048, "rank=8"),
        ("llama-3-8b", 2048, "rank=16,targets=all-linear"),
        ("qwen2.5-7b", 2048, "rank=16"),
        ("gpt2-large", 1024, "rank=8,targets=c_attn"),
    ] {
        let lora: Lora = lora.parse().expect("adapters");
        let work = described(model, Some(seq)).expect("a preset").work;
        let work = work.with_adapters(&lora).expect("the model has the targets");
        let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
        let estimator = Estimator::over(8, &work, &cluster, GANTLINE, job).expect("GPUs");
        let wanted = PlansOf {
            model: Path::new(model),
            cluster: "h100".to_owned(),
            target: cluster.target(),
            global_batch_size: 64,
            seq: seq as usize,
            dtype: DType::BF16.into(),
            lora: Some(lora),
            predictions: Default::default(),
        };
        let programs = Programs::new(wanted, Beside::of(&estimator), &[]);
        for layout in ["dp=8 mbs=1", "tp=2 dp=4 mbs=1 sp", "dp=8 mbs=1 recompute=full"] {
            let estimate = estimator.estimate(&layout.parse().expect("a name"));
            let estimate = estimate.expect("a layout that fits the model");
            let held = programs.held(&estimate.configuration).expect("it is compiled").memory();
            let ratio = estimate.memory.activations_bytes / held.activations_bytes;
            assert!((0.96..1.04).contains(&ratio), "{model} {layout}: {ratio}");
            let all = estimate.memory.total_bytes() / held.total_bytes();
            assert!((0.98..1.02).contains(&all), "{model} {layout}: {all}");
        }
    }
}

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number of bytes"))
}

/// The sum of the parts that a document has of a device's memory.
fn sum(memory: &Value) -> f64 {
    let roles = ["weights", "gradients", "optimizer", "activations", "working", "reserve"];
    roles.iter().filter_map(|role| memory[format!("{role}_bytes")].as_f64()).sum()
}

/// The memory of an answer is that of the program which `compile` makes of the very plan that was
/// written, and all verbs say the same of it.
/// What a plan places on the host must fit there: eight devices of a node share it.
#[test]
fn programs_do_not_fit_where_their_host_is_too_small() {
    let scratch = tiny("small-host");
    let asked = "score gpt3-175b --cluster b200 --gbs 32 --seq 512 --json";
    for (layout, fits) in [
        ("tp=2 pp=2 dp=2 mbs=8 sp zero=3 recompute=layers:47", false),
        ("tp=8 pp=8 dp=2 mbs=8 sp zero=3 recompute=layers:11", true),
    ] {
        let layout = format!("{layout} offload-optimizer=host");
        let mut score = scratch.command(&[], asked);
        let answer = score.args(["--config", &layout]).output().expect("it starts").stdout;
        let answer: Value = serde_json::from_slice(&answer).expect("a document");
        let memory = &answer["memory"];
        assert_eq!((&memory["from"], &answer["fits"]), (&"compiled".into(), &fits.into()));
        let excess = memory["host_excess_bytes"].as_f64().expect("bytes");
        assert_eq!(excess == 0.0, fits, "{layout}: {memory:#}");
    }
}

#[test]
fn answers_have_the_memory_of_their_programs() {
    let scratch = tiny("footprints");
    let asked = "gpt2-mini --cluster h100 --devices 4 --gbs 8 --seq 32";
    for fixed in ["dp=4", "tp=2,pp=2,schedule=1f1b", "dp=2,tp=2,zero=1", "pp=4,schedule=gpipe"] {
        let zero = if fixed.contains("zero") { "" } else { ",zero=0" };
        let fixed = format!("--fix {fixed}{zero},offload=off,vpp=1,cp=1");
        let found = scratch.json(&format!("plan {asked} {fixed} --json -o x.plan"));
        let memory = &found["memory"];
        assert_eq!(memory["from"], "compiled", "{fixed}: {memory:#}");
        let line = "compile gpt2-mini --ranks 4 --gbs 8 --seq 32 --dtype bf16 --plan x.plan";
        let compiled = scratch.json(&format!("{line} --arch sm_90a -o x.gtl --json"));
        let arenas = compiled["report"]["arena_bytes"].as_array().expect("one a class");
        let most = arenas.iter().map(bytes).max();
        assert_eq!(Some(bytes(&memory["arena_bytes"])), most, "{fixed}");
        // Both numbers are there, and each is the sum of its parts.
        let peak = found["peak_mem_bytes"].as_f64().expect("bytes");
        assert!((sum(memory) - peak).abs() < 1.0, "{fixed}: {memory:#} {peak}");
        assert!(peak > bytes(&memory["arena_bytes"]) as f64);
        assert!(sum(&memory["expected"]) > 0.0);
        let plan = std::fs::read_to_string(scratch.0.join("x.plan")).expect("it is written");
        assert!(plan.contains("arena_bytes"), "{plan}");
        let text = found["text"].as_str().expect("a name");
        let mut score = scratch.command(&[], "score gpt2-mini --gbs 8 --seq 32 --json --config");
        let scored = score.arg(text).output().expect("it starts").stdout;
        let scored: Value = serde_json::from_slice(&scored).expect("a document");
        assert_eq!(&scored["memory"], memory, "{fixed}");
        let explained = scratch.json(&format!("explain {asked} --plan x.plan --json"));
        assert_eq!(&explained["memory"], memory, "{fixed}");
    }
    // What lies on the host is no part of a GPU's memory.
    let away = "--fix dp=4,zero=0,vpp=1,cp=1,offload-activations=host";
    scratch.answer(&format!("plan {asked} {away} -o y.plan"));
    let line = "compile gpt2-mini --ranks 4 --gbs 8 --seq 32 --dtype bf16 --plan y.plan";
    let page = scratch.answer(&format!("{line} --arch sm_90a -o y.gtl"));
    assert!(page.contains("of hosts"), "{page}");
    scratch.answer("inspect y.gtl");
    let told = scratch.json(&format!("plan {asked} {away} --json"));
    let host = told["memory"]["host_bytes"].as_u64().expect("bytes");
    let told = scratch.answer(&format!("plan {asked} {away}"));
    assert!(host > 0 && told.contains(&format!("on the host {}", kernels::Bytes(host))), "{told}");
    let away = "--fix offload-parameters=disk --ranks 2 --gbs 4 --seq 32 --calibration none";
    let told = scratch.json(&format!("plan gpt2-mini {away} --json"));
    // All 3,290,624 weights of f32 at least lie there once.
    assert!(told["disk_bytes"].as_u64().expect("bytes") >= 4 * 3_290_624, "{told:#}");
    let told = scratch.answer(&format!("plan gpt2-mini {away}"));
    assert!(told.contains("on the disk of its run"), "{told}");
    let fit = scratch.json(&format!("fit {asked} --json"));
    assert_eq!(fit["memory"]["from"], "compiled", "{fit:#}");
    // What no program carries out keeps the expectation, and says why.
    let fixed = "--fix offload-parameters=host,zero=1,dp=4";
    let moved = scratch.json(&format!("plan {asked} {fixed} --json"));
    assert_eq!(moved["memory"]["from"], "estimate");
    let why = "offload of parameters under ZeRO 1 and 2";
    assert_eq!(moved["memory"]["not_compiled"], why);
    let page = scratch.answer(&format!("plan {asked} {fixed}"));
    let told = "expected in closed form; not compiled yet: offload of parameters";
    assert!(page.contains(told), "{page}");
    let page = scratch.answer(&format!("plan {asked} --fix zero=0,dp=4,offload=off"));
    assert!(page.contains("compiled, ") && page.contains("expected in closed form"), "{page}");
}
