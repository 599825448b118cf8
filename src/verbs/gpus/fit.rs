//! `fit` where ranks are GPUs: what usual strategies need, and whether anything fits.

use codegen::footprint::NotYet;
use kernels::{Bytes, Seconds};
use planner::cluster::Cluster;
use planner::configuration::{Configuration, Offload, Place, Recompute, Zero};
use planner::estimate::Estimate;
use planner::finalists::Held;
use planner::search::request::Chosen;

use super::finalists::{self, Programs, device_memory, memory_lines, needs};
use super::{Subject, answer, groups, plan_row};
use crate::documents::{self, Document, PlanRow, StrategyRow};
use crate::failure::{Exit, Failure, fact, or_reason};
use crate::output::{self, Table};
use crate::verbs::flags::{Aim, RequestFlags};

/// Answers `fit`: what usual strategies need, and the fastest of them that fits; any other plan
/// where none does.
pub fn fit(asked: &RequestFlags, cluster: Cluster) -> Result<Exit, Failure> {
    if !cluster.groups.is_empty() {
        return groups::fit(asked, cluster);
    }
    let subject = Subject::new(asked, cluster)?;
    let estimator = subject.estimator()?;
    let have = estimator.memory_bytes;
    let limits = asked.all_limits()?;
    let rows: Vec<(String, Estimate)> = strategies(&subject)
        .into_iter()
        .filter(|(_, c)| limits.allow_all(c))
        .filter_map(|(name, c)| Some((name, estimator.estimate(&c).ok()?)))
        .collect();
    let found = enough(&subject, asked, &rows, have);
    let fits = found.is_ok();
    if asked.json {
        let strategy = |(name, estimate): &(String, Estimate)| StrategyRow {
            strategy: name.clone(),
            plan: estimate.configuration.to_string(),
            memory: estimate.memory,
            need_bytes: estimate.memory.total_bytes(),
            fits: estimate.memory.total_bytes() <= have,
        };
        let found = or_reason(found)?;
        let fastest = found.as_ref().ok().map(|(best, held)| {
            let (peak_mem_bytes, fits) = needs(best, held, have);
            PlanRow { peak_mem_bytes, fits, ..plan_row(&subject, best) }
        });
        let memory = found.as_ref().ok();
        let memory = memory.map(|(best, held)| device_memory(&best.estimate.memory, held));
        let no = found.err();
        let of_no = |name: &str| no.as_ref().map(|no| fact(no, name)).unwrap_or_default();
        let document = documents::SpaceFit {
            model: subject.work.name.clone(),
            cluster: subject.cluster.describe(),
            devices: subject.devices.into(),
            have_bytes: have,
            fits,
            reason: no.as_ref().map(|no| no.headline.clone()),
            rows: rows.iter().map(strategy).collect(),
            fastest,
            memory,
            smallest: of_no("smallest").as_object().cloned(),
            nearest: of_no("nearest").as_array().cloned().unwrap_or_default(),
            executor: Some(subject.executor()),
        };
        output::answer_json(&document.to_json());
        return Ok(if fits { Exit::Success } else { Exit::Infeasible });
    }
    let mut text = subject.header();
    if !rows.is_empty() {
        text += &format!("\n{}\n", strategies_table(&rows, have).text());
    }
    match found {
        Ok((best, held)) => {
            output::answer(&(text + &yes(&best, &held, have)));
            Ok(Exit::Success)
        }
        Err(failure) => {
            output::answer(&text);
            output::note(&failure.message());
            Ok(failure.exit())
        }
    }
}

/// What is said of a plan that fits.
fn yes(best: &Chosen, held: &Result<Held, NotYet>, have: f64) -> String {
    let (need, _) = needs(best, held, have);
    let [need, have] = [need, have].map(|bytes| Bytes(bytes as u64));
    let seconds = Seconds(best.estimate.step_time_s);
    let mut text = format!("✓ fits: {}\n", best.configuration);
    text += &format!("  {need} of {have}, {seconds} a step; `plan` finds the fastest there is\n");
    text + &memory_lines(&best.estimate.memory, held)
}

/// A row for each strategy: what its fullest device holds.
fn strategies_table(rows: &[(String, Estimate)], have: f64) -> Table {
    let mut table = Table::new([
        "strategy", "weights", "grads", "optim", "act", "working", "reserve", "overflow", "total",
        "",
    ]);
    let bytes = |bytes: f64| Bytes(bytes as u64).to_string();
    for (name, estimate) in rows {
        let [weights, grads, optim, act, working, reserve, full] =
            estimate.memory.parts().map(|(_, n)| bytes(n));
        let need = estimate.memory.total_bytes();
        let mark = if need <= have { "✓" } else { "✗" };
        let share = format!("{mark} {:.0}%", 100.0 * need / have);
        let (name, need) = (name.clone(), bytes(need));
        table.row([name, weights, grads, optim, act, working, reserve, full, need, share]);
    }
    table
}

/// The fastest of the usual strategies that fits is answer enough; only where none fits, all other
/// plans are tried. Strategies whose compiled programs do not fit are passed over.
fn enough(
    subject: &Subject,
    asked: &RequestFlags,
    rows: &[(String, Estimate)],
    have: f64,
) -> Result<(Chosen, Result<Held, NotYet>), Failure> {
    let usual = rows.iter().map(|(_, estimate)| estimate);
    let fits = |estimate: &&Estimate| estimate.memory.total_bytes() <= have;
    let mut usual: Vec<&Estimate> = usual.filter(fits).collect();
    usual.sort_by(|a, b| a.step_time_s.total_cmp(&b.step_time_s));
    let programs = Programs::of(subject, asked)?;
    for estimate in usual {
        let (configuration, estimate) = (estimate.configuration.clone(), estimate.clone());
        let held = programs.held(&configuration);
        let chosen = Chosen { configuration, estimate, fits: true };
        if needs(&chosen, &held, have).1 {
            return Ok((chosen, held));
        }
    }
    let mut answer = answer(subject, asked)?;
    let settled = finalists::settle(subject, asked, Aim::Time, &mut answer)?;
    Ok((answer.best.swap_remove(0), settled.held))
}

/// Strategies by their usual names, in micro-batches of one sample.
fn strategies(subject: &Subject) -> Vec<(String, Configuration)> {
    let devices = subject.devices;
    let zero = |stage: u8| Zero { stage, shard: 0 };
    let plain = Configuration { dp: devices, ..Configuration::default() };
    let host = Offload { optimizer: Place::Host, ..Offload::default() };
    let full = Recompute::Full;
    let mut all = vec![
        ("ddp".to_owned(), plain.clone()),
        ("zero1".to_owned(), Configuration { zero: zero(1), ..plain.clone() }),
        ("zero2".to_owned(), Configuration { zero: zero(2), ..plain.clone() }),
        ("zero3".to_owned(), Configuration { zero: zero(3), ..plain.clone() }),
        (
            "zero3 + recompute".to_owned(),
            Configuration { zero: zero(3), recompute: full, ..plain.clone() },
        ),
        (
            "zero3 + recompute + optimizer on host".to_owned(),
            Configuration { zero: zero(3), recompute: full, offload: host, ..plain },
        ),
    ];
    let node = subject.cluster.devices_per_node.unwrap_or(1) as u32;
    let tp = node.min(devices);
    if tp > 1 && devices.is_multiple_of(tp) {
        let cut = Configuration {
            tp,
            dp: devices / tp,
            sequence_parallel: true,
            zero: zero(1),
            ..Configuration::default()
        };
        all.push((format!("tp{tp} + zero1"), cut.clone()));
        let again = Configuration { recompute: full, ..cut.clone() };
        all.push((format!("tp{tp} + zero1 + recompute"), again));
        let depth = subject.work.depth();
        let stages = (2..=depth.min(16)).filter(|pp| cut.dp.is_multiple_of(*pp)).max();
        if let Some(pp) = stages {
            let deep = Configuration { pp, dp: cut.dp / pp, ..cut };
            all.push((format!("tp{tp} + pp{pp} + zero1"), deep));
        }
    }
    all
}
