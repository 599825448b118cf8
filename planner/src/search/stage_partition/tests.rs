//! Answers against every leaf and every contiguous cut of its layers, on small random jobs.

use super::*;
use crate::cluster::Cluster;
use crate::configuration::Schedule;
use crate::estimate::rates::Arithmetic;
use crate::estimate::workload::Shape;
use crate::estimate::{Estimator, Job, profile};
use crate::limits::Limits;
use crate::search::branch_and_bound::{Aim, Budget, Objective, explore};
use crate::search::decisions::{self, STEPS, SearchDomain};
use crate::search::models;
use crate::search::oracle::{Random, seeds};
use crate::search::request::{EVALUATIONS_MAX, SearchRequest, search};

/// Every cut of so many layers into stages.
fn all_cuts(layers: u32, stages: u32) -> Vec<Vec<u32>> {
    let cuts = (0..1u32 << (layers - 1)).filter(|cut| cut.count_ones() + 1 == stages);
    cuts.map(|cut| {
        let mut all = vec![1];
        for layer in 1..layers {
            match cut >> (layer - 1) & 1 {
                1 => all.push(1),
                _ => *all.last_mut().unwrap() += 1,
            }
        }
        all
    })
    .collect()
}

/// What trying everything finds: the least step that fits, how many decisions had more than one
/// value, and how many configurations there were.
fn tried(space: &Space<'_>, have: f64) -> (f64, usize, usize) {
    let mut paths = vec![Path::default()];
    let (mut options, mut open) = (Vec::new(), 0);
    for _ in STEPS {
        let mut longer = Vec::new();
        let mut most = 0;
        for path in &paths {
            decisions::options(&space.domain, path, &mut options);
            most = most.max(options.len());
            longer.extend(options.iter().map(|value| path.then(*value)));
        }
        open += usize::from(most > 1);
        paths = longer;
    }
    let layers = space.domain.layers;
    let cuts: Vec<Vec<Vec<u32>>> = (1..=layers).map(|pp| all_cuts(layers, pp)).collect();
    let (mut best, mut count) = (f64::INFINITY, 0);
    for path in paths {
        let mut c = decisions::configuration(&space.domain, &path);
        let whole = c.recompute;
        if matches!(whole, Recompute::Layers(_)) {
            continue;
        }
        for cut in &cuts[c.pp as usize - 1] {
            c.stage_layers.clear();
            let is_even = |c: &Configuration| {
                (0..c.pp).zip(cut).all(|(stage, size)| c.layers_of(layers, stage).0 == *size)
            };
            if c.vpp > 1 && !is_even(&c) {
                continue;
            }
            c.stage_layers.clone_from(cut);
            // Beside all layers of a stage, any number of them: values of their own here.
            let deepest = if whole == Recompute::Full { *cut.iter().max().unwrap() } else { 1 };
            let counted = (1..deepest).map(Recompute::Layers);
            for recompute in std::iter::once(whole).chain(counted) {
                c.recompute = recompute;
                let step = space.step(&c);
                count += 1;
                if step.memory.total_bytes() <= have {
                    best = best.min(step.breakdown.total_s());
                }
            }
        }
    }
    (best, open, count)
}

/// A job of few layers and devices, on links of any speed, some with little memory.
fn job(random: &mut Random) -> (Shape, Cluster, [u32; 2], f64, Vec<String>) {
    let mut below = |n: usize| random.below(n);
    let name = ["mpt-125m", "gpt-7.5b", "llama-3-8b", "mixtral-8x7b", "deepseek-v2"][below(5)];
    let mut shape = models::shape(name).unwrap();
    shape.layers = 3 + below(3) as u32;
    shape.seq = [256, 1024][below(2)];
    let mut cluster = Cluster::load(["h100", "a100", "a100-pcie", "rtx4090"][below(4)]).unwrap();
    cluster.levels[0].count = Some([2, 4, 8][below(3)]);
    for level in &mut cluster.levels {
        level.bandwidth.value *= [1.0, 0.3, 0.05][below(3)];
    }
    let devices = [4, 4, 6, 8][below(4)];
    let batch = devices * [1, 2, 4][below(3)];
    let fix = ["offload=off", "placement=usual", ["cp=1", "ep=1", "sp=0", "shard=0"][below(4)]];
    let memory = [0.1, 0.2, 0.4, 2.0][below(4)];
    (shape, cluster, [devices, batch], memory, fix.into_iter().map(str::to_owned).collect())
}

/// On the space that is shipped, with all knobs open but three, uneven stages and counts of
/// layers that are recomputed included: the answer is the best of all.
#[test]
fn answers_are_the_best_of_all_configurations_and_cuts() {
    let seeds = seeds(0, 300);
    let is_all = seeds.len() > 1;
    let (mut answered, mut uneven, mut counted, mut all) = (0, 0, 0, 0);
    for seed in seeds {
        let (shape, cluster, [devices, batch], memory, fix) = job(&mut Random(seed));
        let work = shape.workload().unwrap();
        let limits = Limits::parse(&fix, &[], &[]).unwrap();
        let job = Job { global_batch: batch.into(), arithmetic: Arithmetic::Half };
        let mut estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
        estimator.memory_bytes *= memory;
        let domain = SearchDomain::new(&work, devices, batch, limits.clone());
        let (best, open, count) = tried(&Space::new(&estimator, domain), estimator.memory_bytes);
        all += count;
        let question = SearchRequest {
            estimator: &estimator,
            devices,
            global_batch: batch,
            limits,
            objective: Objective::Time,
            power: None,
            budget: Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false },
        };
        let Ok(answer) = search(&question) else {
            assert!(best.is_infinite(), "SEED={seed}: nothing fits, but {best} s");
            continue;
        };
        let found = &answer.best[0];
        let off = found.estimate.step_time_s / best - 1.0;
        let about = format!("SEED={seed}: {}: {off:e} off {best} s", found.configuration);
        assert!(off.abs() <= 1e-8, "{about}");
        assert!(answer.bound_s.unwrap() <= best * (1.0 + 1e-9), "{about}");
        answered += usize::from(6 <= open);
        uneven += usize::from(!found.configuration.stage_layers.is_empty());
        counted += usize::from(matches!(found.configuration.recompute, Recompute::Layers(_)));
    }
    println!("{answered} jobs of {all} configurations, {uneven} uneven, {counted} count layers");
    let enough = answered >= 200 && uneven >= 20 && counted > 0;
    assert!(!is_all || enough, "{answered} {uneven} {counted}");
}

/// Jobs of more layers, with few knobs open: however many cuts there are, the answer is the best.
#[test]
fn answers_are_the_best_of_many_cuts() {
    let (mut uneven, mut jobs) = (0, 0);
    for seed in seeds(0, 60) {
        let mut random = Random(seed);
        let mut below = |n: usize| random.below(n);
        let name = ["gpt-7.5b", "llama-3-8b", "deepseek-v2"][below(3)];
        let mut shape = models::shape(name).unwrap();
        (shape.layers, shape.seq) = (7 + below(5) as u32, 2048);
        let work = shape.workload().unwrap();
        let cluster = Cluster::load(["h100", "a100"][below(2)]).unwrap();
        let (devices, batch) = (8, 8 * [1, 2, 3][below(3)]);
        let fix = ["cp=1", "ep=1", "mbs=1", "sp=0", "offload=off", "placement=usual", "zero=0"];
        let limits = Limits::parse(&fix.map(str::to_owned), &[], &[]).unwrap();
        let job = Job { global_batch: batch.into(), arithmetic: Arithmetic::Half };
        let mut estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
        estimator.memory_bytes *= [0.4, 0.7, 1.0, 4.0][below(4)];
        let domain = SearchDomain::new(&work, devices, batch, limits.clone());
        let (best, ..) = tried(&Space::new(&estimator, domain), estimator.memory_bytes);
        let question = SearchRequest {
            estimator: &estimator,
            devices,
            global_batch: batch,
            limits,
            objective: Objective::Time,
            power: None,
            budget: Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false },
        };
        let Ok(answer) = search(&question) else {
            assert!(best.is_infinite(), "SEED={seed}: nothing fits, but {best} s");
            continue;
        };
        let found = &answer.best[0];
        let off = found.estimate.step_time_s / best - 1.0;
        let about = format!("SEED={seed}: {}: {off:e} off {best} s", found.configuration);
        assert!(off.abs() <= 1e-8 && answer.gap.unwrap() < 1e-8, "{about}");
        (uneven, jobs) =
            (uneven + usize::from(!found.configuration.stage_layers.is_empty()), jobs + 1);
    }
    assert!(jobs == 1 || (jobs > 30 && uneven > 8), "{jobs} jobs, {uneven} uneven");
}

/// Where there are more cuts than are looked at while the best is sought, they are looked at
/// afterwards: no cut is below what is then said.
#[test]
fn what_is_left_open_is_looked_at_again() {
    let (mut open, mut closed) = (0, 0);
    for seed in seeds(0, 24) {
        let mut random = Random(seed);
        let mut below = |n: usize| random.below(n);
        let mut shape = models::shape(["gpt-7.5b", "llama-3-8b", "deepseek-v2"][below(3)]).unwrap();
        (shape.layers, shape.seq) = (12 + below(4) as u32, 2048);
        let work = shape.workload().unwrap();
        let cluster = Cluster::load(["h100", "a100"][below(2)]).unwrap();
        let stages = ["pp=6", "pp=8"][below(2)];
        let devices = if stages == "pp=6" { 6 } else { 8 };
        let fix = [stages, "mbs=1", "sp=0", "vpp=1", "offload=off", "zero=0", "placement=usual"];
        let limits = Limits::parse(&fix.map(str::to_owned), &[], &[]).unwrap();
        let batch = devices * [1, 3][below(2)];
        let job = Job { global_batch: batch.into(), arithmetic: Arithmetic::Half };
        let mut estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
        estimator.memory_bytes *= [0.4, 0.6, 1.0, 4.0][below(4)];
        let have = estimator.memory_bytes;
        let mut space = Space::new(&estimator, SearchDomain::new(&work, devices, batch, limits));
        space.only_fits = true;
        space.domain.all_cuts = true;
        let budget = Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false };
        let aim = Aim::new(Objective::Time, have);
        let mut explored = explore(&space, &space.another(), aim, &budget);
        let (least, ..) = tried(&space, have);
        open += space.unfinished.borrow().len();
        let untried = space.finish(&mut explored.best, [have, f64::INFINITY], &|| false);
        let Some(best) = explored.best else {
            assert!(least.is_infinite(), "SEED={seed}: nothing fits, but {least} s");
            continue;
        };
        closed += usize::from(untried >= best.score.seconds);
        let said = untried.min(best.score.seconds);
        assert!(said <= least * (1.0 + 1e-8), "SEED={seed}: {said} s, but {least} s");
    }
    println!("{open} leaves were open, {closed} answers are the best");
    assert!(closed < 2 || (open > 0 && closed > 10), "{open} {closed}");
}

/// Llama 3 8B on two B200 that hold just what it takes: a stage of 17 layers that recomputes 16 of
/// them is faster than two of 16 that recompute all of theirs, and the answer is no slower.
#[test]
fn more_layers_than_an_even_stage_has_are_counted() {
    let mut shape = models::shape("llama-3-8b").unwrap();
    shape.seq = 8192;
    let (work, cluster) = (shape.workload().unwrap(), Cluster::load("b200").unwrap());
    let fix = ["pp=2", "vpp=1", "offload=off"].map(str::to_owned);
    let job = Job { global_batch: 16, arithmetic: Arithmetic::Half };
    let mut estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
    let of = |estimator: &Estimator<'_>, recompute, stage_layers| {
        let schedule = Schedule::ZeroBubbleH2;
        let c = Configuration { pp: 2, schedule, recompute, stage_layers, ..Default::default() };
        estimator.estimate(&c).unwrap()
    };
    let deep = of(&estimator, Recompute::Layers(16), vec![17, 15]);
    let even = of(&estimator, Recompute::Full, Vec::new());
    estimator.memory_bytes = deep.memory.total_bytes();
    assert!(deep.step_time_s < even.step_time_s);
    let question = SearchRequest {
        estimator: &estimator,
        devices: 2,
        global_batch: 16,
        limits: Limits::parse(&fix, &[], &[]).unwrap(),
        objective: Objective::Time,
        power: None,
        budget: Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false },
    };
    let best = &search(&question).unwrap().best[0];
    let most_s = deep.step_time_s * (1.0 + 1e-9);
    assert!(best.estimate.step_time_s <= most_s, "{}", best.configuration);
}
