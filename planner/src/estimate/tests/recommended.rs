//! Layouts that the makers of a tool published runs of are within the tool's space, and the search
//! finds none that is slower.

use std::collections::BTreeMap;

use super::*;
use crate::limits::Limits;
use crate::search::branch_and_bound::{Budget, Objective};
use crate::search::request::{EVALUATIONS_MAX, SearchRequest, search};
use crate::tools::{Form, Sizes, Target};

const UNSEEN: &str = include_str!("../../../tests/unseen_runs.csv");

/// Frameworks of published runs, and the releases that ran them.
const TOOLS: [(&str, &str); 9] = [
    ("Megatron-LM (Korthikanti", "megatron@v3.0"),
    ("Megatron-LM PTD-P", "megatron@v3.0"),
    ("NeMo-Megatron launcher", "megatron@v3.0"),
    ("Megatron-Bridge", "megatron@core-0.13"),
    ("NeMo 24.12", "megatron@core-0.13"),
    ("DeepSpeed ZeRO-3", "deepspeed@0.5"),
    ("torchtitan 2025", "torchtitan@0.2"),
    ("torchtitan 2024-09", "torchtitan@0.0.2"),
    ("torchtitan", "torchtitan@0.0.2"),
];

fn target(framework: &str) -> Option<Target> {
    let (_, name) = TOOLS.iter().find(|(begin, _)| framework.starts_with(begin))?;
    Some(Target::parse(name).unwrap())
}

/// Each of the published runs within its tool's space, the found plan beside it. Layouts that the
/// model says do not fit are no bound.
#[test]
fn published_layouts_are_within_the_space_of_their_tool() {
    let mut counts: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    let mut wrong = Vec::new();
    let all = runs().into_iter().chain(read_runs(UNSEEN));
    for run in all {
        let Some(target) = target(run.text("framework")) else { continue };
        let question = row::read(&run).unwrap();
        let row::Question { work, cluster, job, configuration, .. } = &question;
        let told = format!("{} {target}: {configuration}", run.text("row_id"));
        let lost = target.refusals(configuration, Sizes::of(work), Form::Launch);
        if !lost.is_empty() {
            wrong.push(format!("{told}: {}", lost.join(", ")));
            continue;
        }
        let profile = target.profile_on(cluster).unwrap();
        let devices = configuration.ranks();
        let estimator = Estimator::over(devices, work, cluster, profile, *job).unwrap();
        let published = estimator.estimate(configuration).unwrap();
        let count = counts.entry(target.to_string()).or_default();
        count[0] += 1;
        if published.memory.total_bytes() > estimator.memory_bytes {
            continue;
        }
        count[1] += 1;
        let limits = Limits::default().for_tool(Some(target));
        let found = search(&SearchRequest {
            estimator: &estimator,
            devices: devices as u32,
            global_batch: job.global_batch as u32,
            limits,
            objective: Objective::Time,
            power: None,
            budget: Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false },
        });
        match found {
            Ok(found) => {
                let best = &found.best[0];
                let more = best.estimate.step_time_s / published.step_time_s - 1.0;
                if more > 1e-9 {
                    let best = &best.configuration;
                    wrong.push(format!("{told}: {best} is slower by {:.2} %", 100.0 * more));
                }
            }
            Err(none) => wrong.push(format!("{told}: nothing is found: {}", none[0].headline)),
        }
    }
    println!("published and fitting layouts: {counts:?}");
    assert!(wrong.is_empty(), "{} of {counts:?}:\n{}", wrong.len(), wrong.join("\n"));
    let [published, fitting] =
        counts.values().fold([0, 0], |sum, [all, fit]| [sum[0] + all, sum[1] + fit]);
    assert!(published >= 40 && fitting >= 40, "{published} layouts, {fitting} fit");
}
