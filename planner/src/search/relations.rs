//! Answers to questions that are related: of less freedom, and of faster links.

use super::branch_and_bound::{Budget, Objective};
use super::models;
use super::oracle::{Random, seeds};
use super::request::{EVALUATIONS_MAX, SearchRequest, SearchResult, search};
use crate::cluster::Cluster;
use crate::estimate::rates::Arithmetic;
use crate::estimate::workload::Workload;
use crate::estimate::{Estimator, Job, profile};
use crate::limits::Limits;

fn answer(
    work: &Workload,
    cluster: &Cluster,
    [devices, global_batch]: [u32; 2],
    fix: &[String],
) -> Option<SearchResult> {
    let job = Job { global_batch: global_batch.into(), arithmetic: Arithmetic::Half };
    let estimator = Estimator::new(work, cluster, profile::GANTLINE, job).unwrap();
    let question = SearchRequest {
        estimator: &estimator,
        devices,
        global_batch,
        limits: Limits::parse(fix, &[], &[]).unwrap(),
        objective: Objective::Time,
        power: None,
        budget: Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false },
    };
    search(&question).ok()
}

/// Small models on clusters of a few links of any speed: an answer is never worse than with a
/// decision taken for it, its bound is below all of them, and links of twice the bandwidth make it
/// at most a hundredth slower.
#[test]
fn no_answer_is_worse_for_having_more_choice_or_faster_links() {
    let (mut compared, mut slow) = (0, 0);
    for seed in seeds(0, 60) {
        let mut random = Random(seed);
        let mut below = |n: usize| random.below(n);
        let mut shape = models::shape(["mpt-125m", "mpt-350m", "mpt-760m"][below(3)]).unwrap();
        shape.seq = [128, 512][below(2)];
        shape.layers = [6, 9, 12, 16][below(4)];
        let work = shape.workload().unwrap();
        let mut cluster = Cluster::load(["rtx4090", "a100-pcie", "h100"][below(3)]).unwrap();
        cluster.levels[0].count = Some([2, 4, 8][below(3)]);
        for level in &mut cluster.levels {
            level.bandwidth.value *= [1.0, 0.3, 0.1, 0.02][below(4)];
        }
        let devices = [8, 12, 16, 32][below(4)];
        let size = [devices, devices * [1, 2, 4][below(3)]];
        let Some(free) = answer(&work, &cluster, size, &[]) else { continue };
        let free_s = free.best[0].estimate.step_time_s;
        let parts = free.best[0].estimate.breakdown;
        slow += usize::from(parts.gradients_s + parts.weights_s > 0.3 * free_s);
        for _ in 0..3 {
            let fix = [
                ["pp=1", "pp=2", "pp=4", "pp=8"][below(4)],
                ["tp=1", "tp=2", "tp=4"][below(3)],
                ["mbs=1", "mbs=2", "mbs=4"][below(3)],
                ["zero=0", "zero=1", "zero=2", "zero=3"][below(4)],
                ["schedule=1f1b", "schedule=gpipe", "schedule=zb-h1", "schedule=zb-h2"][below(4)],
                ["recompute=none", "recompute=full", "sp=0", "cp=1", "placement=usual"][below(5)],
            ][below(6)];
            let fixed = answer(&work, &cluster, size, &[fix.to_owned()]);
            let Some(fixed) = fixed else { continue };
            let fixed_s = fixed.best[0].estimate.step_time_s;
            let [a, b] = [&free, &fixed].map(|answer| answer.best[0].configuration.to_string());
            let about = format!("SEED={seed}: {free_s} s: {a}; with {fix} {fixed_s} s: {b}");
            assert!(free_s <= fixed_s * (1.0 + 1e-9), "{about}");
            assert!(free.bound_s.unwrap() <= fixed_s * (1.0 + 1e-9), "{about}");
            compared += 1;
        }
        let level = below(cluster.levels.len());
        let mut faster = cluster.clone();
        faster.levels[level].bandwidth.value *= 2.0;
        let twice = answer(&work, &faster, size, &[]).unwrap().best[0].estimate.step_time_s;
        assert!(twice <= 1.01 * free_s, "SEED={seed}: {free_s} s, {twice} s with level {level} x2");
    }
    println!("{compared} answers compared, {slow} of jobs that wait for gradients");
    assert!(compared < 4 || (compared > 100 && slow > 10), "{compared} {slow}");
}
