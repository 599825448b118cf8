//! The search over the whole space: cold, every decision free, for large models on many devices.
//!
//! ```text
//! cargo bench --bench search                     # all, with what each search looked at
//! cargo bench --bench search -- gpt3             # one
//! cargo bench --bench search -- evaluation       # evaluations a second
//! ```

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use planner::cluster::Cluster;
use planner::configuration::Configuration;
use planner::estimate::rates::Arithmetic;
use planner::estimate::workload::Workload;
use planner::estimate::{Estimator, Job, profile};
use planner::limits::Limits;
use planner::search::branch_and_bound::{Budget, Objective};
use planner::search::models;
use planner::search::request;
use planner::search::request::{EVALUATIONS_MAX, SearchRequest, SearchResult};

/// A model, its layers if not its own, tokens of a sample, a cluster, devices, samples of a step.
struct Case {
    name: &'static str,
    model: &'static str,
    layers: Option<u32>,
    seq: u32,
    cluster: &'static str,
    devices: u32,
    batch: u32,
}

fn cases() -> Vec<Case> {
    let case = |name, model, layers, seq, cluster, devices, batch| Case {
        name,
        model,
        layers,
        seq,
        cluster,
        devices,
        batch,
    };
    vec![
        case("gpt3-175b/1024-h100", "gpt3-175b", None, 2048, "h100", 1024, 1536),
        case("gpt3-175b/1024-a100", "gpt3-175b", None, 2048, "a100", 1024, 1536),
        case("gpt-1t/3072-a100", "gpt-1t", None, 2048, "a100", 3072, 3072),
        case("llama-3-405b/16384-h100", "llama-3-405b", None, 8192, "h100", 16384, 2048),
        case("deepseek-v3/2048-h100", "deepseek-v3", None, 4096, "h100", 2048, 15360),
        case("gpt-1t/100000-h100", "gpt-1t", None, 2048, "h100", 100_000, 100_000),
        case("1024-layers/1024-h100", "gpt-7.5b", Some(1024), 2048, "h100", 1024, 1536),
    ]
}

fn workload(case: &Case) -> Workload {
    let mut shape = models::shape(case.model).expect("a known shape");
    shape.seq = case.seq;
    shape.layers = case.layers.unwrap_or(shape.layers);
    shape.workload().expect("a shape that makes sense")
}

fn search(case: &Case) -> SearchResult {
    let work = workload(case);
    let mut cluster = Cluster::load(case.cluster).expect("a preset");
    let each = cluster.devices_per_node.expect("a cluster of nodes");
    cluster.nodes = (case.devices as usize).div_ceil(each);
    let job = Job { global_batch: case.batch.into(), arithmetic: Arithmetic::Half };
    let estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).expect("devices");
    let answer = request::search(&SearchRequest {
        estimator: &estimator,
        devices: case.devices,
        global_batch: case.batch,
        limits: Limits::default(),
        objective: Objective::Time,
        power: None,
        budget: Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false },
    });
    answer.expect("something fits")
}

#[expect(clippy::print_stdout, reason = "a bench says what was found")]
fn searches(criterion: &mut Criterion) {
    for case in cases() {
        let answer = search(&case);
        let best = &answer.best[0];
        println!(
            "{}: {} in {:.3} s, gap {:.1} %; {} of {:e} priced, {} tables",
            case.name,
            best.configuration,
            best.estimate.step_time_s,
            100.0 * answer.gap.unwrap_or(f64::INFINITY),
            answer.space.evaluated,
            answer.space.total as f64,
            answer.space.tables
        );
        let mut group = criterion.benchmark_group("search");
        group.sample_size(10);
        group.bench_function(case.name, |bencher| bencher.iter(|| search(&case)));
        group.finish();
    }
}

/// One configuration after the other, with prices that many of them share: on one thread.
fn evaluations(criterion: &mut Criterion) {
    let case = &cases()[0];
    let (work, cluster) = (workload(case), Cluster::load(case.cluster).expect("a preset"));
    let job = Job { global_batch: case.batch.into(), arithmetic: Arithmetic::Half };
    let estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).expect("devices");
    let mut group = criterion.benchmark_group("evaluation");
    group.throughput(Throughput::Elements(1));
    for layout in ["tp=8 pp=1 dp=128 mbs=1", "tp=8 pp=8 dp=16 mbs=1", "tp=8 pp=8 dp=16 mbs=1 vpp=6"]
    {
        let c: Configuration = layout.parse().expect("a layout");
        let count = c.microbatch_count(job.global_batch).expect("a whole number");
        let prices = estimator.prices(estimator.inside(&c));
        group.bench_function(layout, |bencher| bencher.iter(|| estimator.step(&c, &prices, count)));
    }
    group.finish();
}

criterion_group!(benches, searches, evaluations);
criterion_main!(benches);
