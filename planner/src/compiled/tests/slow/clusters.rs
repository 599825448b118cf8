//! One model on four clusters: four plans, each the fastest of all that there are.

use ir::plan::{Schedule, Zero};
use ir::{ExpertParallel, Mesh};

use super::*;
use crate::check::check;
use crate::explain::explain;
use crate::machine::Machine;
use crate::price::Prices;
use crate::shard::{Request, shard};

/// Devices that make what they are connected by matter: slow ones for a small model.
fn cluster(memory: &str, levels: &str, nodes: usize, devices: usize) -> Cluster {
    let text = format!(
        "name = \"test\"\norigin = \"datasheet\"\n[device]\nkind = \"gpu\"\nname = \"test\"\n\
         launch = \"1 us\"\n\
         memory = {{ capacity = \"{memory}\", reserved = \"0 B\", bandwidth = \"4 GB/s\" }}\n\
         [device.peak]\nf32 = \"20 GFLOP/s\"\n{levels}\n\
         [deployment]\nnodes = {nodes}\ndevices_per_node = {devices}\n"
    );
    let machine = Machine { cores: 1, memory_bytes: 1 << 30, instruction_set: "any".into() };
    Cluster::parse("test.toml", &text, &machine).unwrap_or_else(|all| {
        panic!("{}", all.iter().map(|d| ir::diagnostic::render(d, Some(&text))).collect::<String>())
    })
}

fn level(name: &str, count: usize, bandwidth: &str, latency: &str) -> String {
    let count = if count > 0 { format!("count = {count}\n") } else { String::new() };
    format!(
        "[[level]]\nname = \"{name}\"\n{count}\
         bandwidth = \"{bandwidth}\"\nlatency = \"{latency}\"\n"
    )
}

/// All ways to choose `stages` numbers up to `calls`, ascending, the last one being `calls`.
fn all_stage_ends(calls: usize, stages: usize) -> Vec<Vec<usize>> {
    (0..1u32 << (calls - 1))
        .filter(|set| set.count_ones() as usize == stages - 1)
        .map(|set| (1..=calls).filter(|end| *end == calls || set >> (end - 1) & 1 == 1).collect())
        .collect()
}

/// The time of the fastest legal plan that fits, by trying all.
fn fastest(job: &Job<'_>) -> (f64, usize) {
    let calls = codegen::calls::Calls::of(job.module, job.entry).unwrap();
    let layers: Vec<String> = calls.functions().into_iter().map(str::to_owned).collect();
    let mut scorer = Scorer::new(job).unwrap();
    let (mut least, mut legal, offload) = (f64::INFINITY, 0, Offload::default());
    for at in 0..job.ranks * job.ranks * 2 * job.global_batch_size {
        let (pp, tp) = (1 + at % job.ranks, 1 + at / job.ranks % job.ranks);
        let rest = at / job.ranks / job.ranks;
        let (sequence, mbs) = (rest % 2 == 1, 1 + rest / 2);
        let dp = job.ranks / pp / tp;
        let fits = dp > 0 && pp * dp * tp == job.ranks && pp <= calls.calls.len();
        if !fits || !job.global_batch_size.is_multiple_of(dp * mbs) || (sequence && tp == 1) {
            continue;
        }
        let mesh = Mesh { pp, dp, tp, ..Mesh::ONE };
        let prices = Prices::new(job.cluster, mesh);
        let rates = crate::shard::Rates {
            flops_per_s: prices.product_rate(job.precision.compute.accumulation(), 1e9),
            memory_bytes_per_s: prices.memory_rate(1e6, false),
            link: job.cluster.link(tp),
        };
        // What one rank has does not depend on how many data-parallel ones there are.
        let request = Request {
            module: job.module,
            entry: job.entry,
            dp: 1,
            cp: 1,
            tp,
            experts: ExpertParallel::NONE,
            microbatch_size: mbs,
            sequence,
            rates,
        };
        let Ok(sharded) = shard(&request) else { continue };
        let goes_round = pp > 1 && (job.global_batch_size / dp / mbs).is_multiple_of(pp);
        let most = if goes_round { calls.calls.len() / pp } else { 1 };
        let ends = (1..=most).flat_map(|vpp| all_stage_ends(calls.calls.len(), pp * vpp));
        for stage_ends in ends {
            let kept = 0..1usize << layers.len();
            let splits = if mesh.dp > 1 { 0..=3 } else { 0..=0 };
            for (keeps, stage) in kept.flat_map(|k| splits.clone().map(move |s| (k, s))) {
                let keep = |at| if keeps >> at & 1 == 1 { Keep::Full } else { Keep::None };
                let candidate = Candidate {
                    experts: ExpertParallel::NONE,
                    mesh,
                    sequence,
                    microbatch_size: mbs,
                    keeps: (0..layers.len()).map(keep).collect(),
                    stage_ends: stage_ends.clone(),
                    zero: Zero { stage, shard: 0 },
                    schedule: Schedule::default(),
                    offload,
                };
                let functions = layers.iter().enumerate().map(|(at, name)| {
                    let shardings = sharded.functions[name].clone();
                    (name.clone(), FunctionPlan::new(keep(at), shardings))
                });
                let plan = assemble(job, &candidate, functions);
                let scored = scorer.score(&plan, &candidate).unwrap();
                if scored.fits() {
                    let wrong = check(job.module, job.entry, &plan, job.cluster);
                    assert!(wrong.is_empty(), "{candidate:?}: {wrong:?}");
                    legal += 1;
                    least = least.min(scored.time.seconds);
                }
            }
        }
    }
    (least, legal)
}

#[test]
fn each_cluster_has_a_plan_of_its_own_and_it_is_the_fastest() {
    let module = module(2);
    let wide = |bandwidth, latency| level("link", 0, bandwidth, latency);
    let nodes = level("board", 2, "20 GB/s", "1 us") + &level("cable", 0, "10 MB/s", "100 us");
    let fast = cluster("1 GiB", &wide("50 GB/s", "0.5 us"), 1, 4);
    // One byte less than what the plan for a fast link needs.
    let need = search(&job(&module, &fast, 4)).unwrap().best.need;
    let little = format!("{} B", need.0 - 1);
    let clusters = [
        ("fast link", fast, "other kernels"),
        ("slow link", cluster("1 GiB", &wide("20 MB/s", "200 us"), 1, 4), "dp reduction"),
        ("little memory", cluster(&little, &wide("50 GB/s", "0.5 us"), 1, 4), "memory"),
        ("many small nodes", cluster("1 GiB", &nodes, 2, 2), "other kernels"),
    ];
    let mut plans = Vec::new();
    for (name, cluster, number) in &clusters {
        let mut job = job(&module, cluster, 4);
        job.global_batch_size = 4;
        // All is tried that lies on the devices.
        job.limits = Limits::parse(&[], &["offload".to_owned()], &[]).unwrap();
        let (least, legal) = fastest(&job);
        let found = search(&job).unwrap_or_else(|d| {
            panic!("{name}: {}", ir::diagnostic::render(&d, None));
        });
        let candidate = &found.best.candidate;
        assert_eq!(found.best.time.seconds, least, "{name}: {candidate:?}, {legal} legal plans");
        assert!(found.complete && legal > 1, "{name}");
        let decided = explain(&found).decided.unwrap();
        assert!(decided.starts_with(number), "{name}: {candidate:?}, decided by {decided}");
        assert!(!plans.contains(candidate), "{name}: {candidate:?} again");
        plans.push(candidate.clone());
    }
}
