//! Answers against every leaf and every contiguous cut of its layers, on small random jobs.

use super::*;
use crate::cluster::Cluster;
use crate::estimate::rates::Arithmetic;
use crate::estimate::{Estimator, Job, style};
use crate::limits::Limits;
use crate::space::ask::{EVALUATIONS_MAX, Question, ask};
use crate::space::knobs::{self, Frame, STEPS};
use crate::space::models;
use crate::space::oracle::{Random, seeds};
use crate::space::tree::{Budget, Objective};

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

/// What trying everything finds: the least step that fits.
fn tried(space: &Space<'_>, have: f64) -> f64 {
    let mut paths = vec![Path::default()];
    let mut options = Vec::new();
    for _ in STEPS {
        let mut longer = Vec::new();
        for path in &paths {
            knobs::options(&space.frame, path, &mut options);
            longer.extend(options.iter().map(|value| path.then(*value)));
        }
        paths = longer;
    }
    let layers = space.frame.layers;
    let cuts: Vec<Vec<Vec<u32>>> = (1..=layers).map(|pp| all_cuts(layers, pp)).collect();
    let mut best = f64::INFINITY;
    for path in paths {
        let mut c = knobs::configuration(&space.frame, &path);
        for cut in &cuts[c.pp as usize - 1] {
            if c.vpp > 1 && *cut != even(layers, c.pp) {
                continue;
            }
            c.stage_layers.clone_from(cut);
            let step = space.step(&c);
            if step.memory.total_bytes() <= have {
                best = best.min(step.breakdown.total_s());
            }
        }
    }
    best
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
        let mut estimator = Estimator::new(&work, &cluster, style::OURS, job).unwrap();
        estimator.memory_bytes *= [0.4, 0.7, 1.0, 4.0][below(4)];
        let frame = Frame::new(&work, devices, batch, limits.clone());
        let best = tried(&Space::new(&estimator, frame), estimator.memory_bytes);
        let question = Question {
            estimator: &estimator,
            devices,
            global_batch: batch,
            limits,
            objective: Objective::Time,
            power: None,
            budget: Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false },
        };
        let Ok(answer) = ask(&question) else {
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
