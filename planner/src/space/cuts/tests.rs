//! Answers against every contiguous cut of the layers, on small random jobs.

use super::*;
use crate::cluster::Cluster;
use crate::estimate::rates::Arithmetic;
use crate::estimate::{Estimator, Job, style};
use crate::limits::Limits;
use crate::space::ask::{EVALUATIONS_MAX, Question, ask};
use crate::space::knobs::{self, Frame, STEPS};
use crate::space::models;
use crate::space::oracle::{Random, seeds};
use crate::space::tree::{Budget, Objective, Path};

/// All leaves of a space that fit in some cut: with every cut of their layers, the least step.
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
    let mut best = f64::INFINITY;
    for path in paths {
        let mut c = knobs::configuration(&space.frame, &path);
        let layers = space.frame.layers;
        let cuts = (0..1u32 << (layers - 1)).filter(|cut| cut.count_ones() + 1 == c.pp);
        for cut in cuts {
            c.stage_layers = vec![1];
            for layer in 1..layers {
                match cut >> (layer - 1) & 1 {
                    1 => c.stage_layers.push(1),
                    _ => *c.stage_layers.last_mut().unwrap() += 1,
                }
            }
            if c.vpp > 1 && c.stage_layers != even(layers, c.pp) {
                continue;
            }
            let step = space.step(&c);
            if step.memory.total_bytes() <= have {
                best = best.min(step.breakdown.total_s());
            }
        }
    }
    best
}

/// Jobs of few layers, some with little memory: the answer is never faster than the best of all
/// cuts, and hardly slower.
#[test]
fn other_cuts_are_hardly_faster() {
    let seeds = seeds(0, 300);
    let is_all = seeds.len() > 1;
    let (mut offs, mut uneven) = (Vec::new(), 0);
    for seed in seeds {
        let mut random = Random(seed);
        let mut below = |n: usize| random.below(n);
        let mut shape = models::shape(["gpt-7.5b", "llama-3-8b", "deepseek-v2"][below(3)]).unwrap();
        (shape.layers, shape.seq) = (4 + below(6) as u32, 2048);
        let work = shape.workload().unwrap();
        let cluster = Cluster::load(["h100", "a100"][below(2)]).unwrap();
        let devices = [4, 8][below(2)];
        let batch = devices * [1, 2, 3][below(3)];
        let fix = ["cp=1", "ep=1", "mbs=1", "sp=0", "offload=off", "placement=usual", "zero=0"];
        let limits = Limits::parse(&fix.map(str::to_owned), &[], &[]).unwrap();
        let job = Job { global_batch: batch.into(), arithmetic: Arithmetic::Half };
        let mut estimator = Estimator::new(&work, &cluster, style::OURS, job).unwrap();
        estimator.memory_bytes *= [0.4, 0.7, 1.0, 4.0][below(4)];
        let have = estimator.memory_bytes;
        let frame = Frame::new(&work, devices, batch, limits.clone());
        let best = tried(&Space::new(&estimator, frame), have);
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
        let about = format!("SEED={seed}: {}: {off:.4} off {best} s", found.configuration);
        assert!(off > -1e-9 && off <= OFF_MAX, "{about}");
        uneven += usize::from(!found.configuration.stage_layers.is_empty());
        offs.push(off);
    }
    offs.sort_by(f64::total_cmp);
    let worst: Vec<&f64> = offs.iter().rev().take(4).collect();
    println!("{} jobs, {uneven} uneven, off by {worst:?} at most", offs.len());
    assert!(!is_all || (offs.len() >= 200 && uneven >= 40), "{} {uneven}", offs.len());
    assert!(!is_all || offs[offs.len() / 2] < 1e-9, "median {}", offs[offs.len() / 2]);
}
