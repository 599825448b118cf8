//! `explain --what-if`: the best plan on a changed cluster, beside the one that there is.

use std::collections::BTreeSet;

use kernels::{Bytes, Seconds};
use planner::cluster::{Cluster, Known};
use planner::estimate::Estimate;
use planner::origin::Origin;
use planner::search::request::Chosen;

use super::{Subject, answer, plan_row, signed};
use crate::argument::{HOUR_S, PathArg};
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, or_reason, usage};
use crate::output::{self, Table};
use crate::verbs::flags::{RequestFlags, refuse_cpus};
use crate::verbs::hardware::Change;

fn given(value: f64) -> Known {
    Known { value, origin: Origin::Given, source: "--what-if".to_owned() }
}

/// The question on a cluster with some changes, the devices first.
fn changed(asked: &RequestFlags, changes: &[&Change]) -> Result<(RequestFlags, Cluster), Failure> {
    let mut asked = asked.clone();
    // All that is not changed stays as it is: also how many devices there are.
    let ranks = asked.place.ranks(&asked.place.cluster()?);
    asked.place.ranks = Some(ranks);
    for change in changes {
        match change {
            Change::Device(name) => asked.place.cluster = PathArg::from(name.as_str()),
            Change::Devices(count) => asked.place.ranks = Some(*count),
            Change::Nics(_) | Change::Memory(_) => {}
        }
        if matches!(change, Change::Device(_) | Change::Devices(_)) {
            asked.place.nodes = None;
        }
    }
    let mut cluster = asked.place.cluster()?;
    for change in changes {
        match change {
            Change::Nics(times) => {
                for level in cluster.levels.iter_mut().skip(1) {
                    level.bandwidth = given(level.bandwidth.value * times);
                }
            }
            Change::Memory(bytes) => cluster.device.memory_bytes = given(*bytes),
            Change::Device(_) | Change::Devices(_) => {}
        }
    }
    Ok((asked, cluster))
}

/// A changed cluster with its best plan, or why there is none.
struct Case {
    name: String,
    subject: Subject,
    have_bytes: f64,
    best: Result<Chosen, String>,
}

fn case(name: String, asked: &RequestFlags, changes: &[&Change]) -> Result<Case, Failure> {
    let (asked, cluster) = changed(asked, changes)?;
    refuse_cpus(&cluster, "`plan` searches for their ranks")?;
    if !cluster.groups.is_empty() {
        let headline = "other hardware is asked about for devices that are alike".to_owned();
        return Err(usage("--what-if", headline).help("ask about one group").into());
    }
    let subject = Subject::quiet(&asked, cluster)?;
    let have_bytes = subject.estimator()?.memory_bytes;
    let found = or_reason(answer(&subject, &asked))?;
    let best = match found {
        Ok(mut found) => Ok(found.best.swap_remove(0)),
        Err(no) => Err(no.headline),
    };
    Ok(Case { name, subject, have_bytes, best })
}

impl Case {
    /// Device hours for 10⁹ tokens, or money where the price is known, with its currency.
    fn cost(&self, estimate: &Estimate) -> (f64, Option<&str>) {
        let steps = 1e9 / self.subject.tokens();
        let hours = steps * estimate.step_time_s / HOUR_S * super::ranks(estimate);
        match &self.subject.cluster.price {
            Some(price) => (hours * price.per_device_hour.value, Some(&price.currency)),
            None => (hours, None),
        }
    }
}

/// Answers `explain --what-if`: the best plan as it is, with each change, and with all of them.
pub fn what_if(asked: &RequestFlags, changes: &[Change]) -> Result<Exit, Failure> {
    let mut cases = vec![case("as it is".to_owned(), asked, &[])?];
    for change in changes {
        cases.push(case(change.to_string(), asked, &[change])?);
    }
    if changes.len() > 1 {
        cases.push(case("all of these".to_owned(), asked, &changes.iter().collect::<Vec<_>>())?);
    }
    let fits = cases.iter().any(|case| case.best.is_ok());
    if asked.json {
        output::answer_json(&document(&cases).to_json());
    } else {
        output::answer(&page(&cases));
    }
    Ok(if fits { Exit::Success } else { Exit::Infeasible })
}

fn page(cases: &[Case]) -> String {
    let first = &cases[0];
    let before = first.best.as_ref().ok().map(|best| best.estimate.step_time_s);
    let mut table =
        Table::of(&["hardware", "step", "change", "memory", "of it", "1B tokens", "plan"]);
    for case in cases {
        let cells = match &case.best {
            Err(why) => {
                let none = || "-".to_owned();
                [case.name.clone(), none(), none(), none(), none(), none(), why.clone()]
            }
            Ok(Chosen { estimate, configuration, .. }) => {
                let need = estimate.memory.total_bytes();
                let change = before.map(|before| signed(estimate.step_time_s - before));
                let cost = match case.cost(estimate) {
                    (money, Some(currency)) => format!("{} {currency}", output::number(money)),
                    (hours, None) => format!("{} device hours", output::number(hours)),
                };
                [
                    case.name.clone(),
                    Seconds(estimate.step_time_s).to_string(),
                    change.unwrap_or_default(),
                    Bytes(need as u64).to_string(),
                    format!("{:.0}%", 100.0 * need / case.have_bytes),
                    cost,
                    configuration.to_string(),
                ]
            }
        };
        table.cells(cells.into_iter());
    }
    let notes = cases.iter().filter_map(|case| case.subject.products_note());
    let notes: BTreeSet<String> = notes.map(|note| format!("\n{note}\n")).collect();
    format!("{}\n{}{}", first.subject.header(), table.text(), String::from_iter(notes))
}

fn document(cases: &[Case]) -> documents::WhatIf {
    let row = |case: &Case| documents::WhatIfRow {
        hardware: case.name.clone(),
        cluster: case.subject.cluster.describe(),
        devices: case.subject.devices.into(),
        have_bytes: case.have_bytes,
        note: case.subject.products_note(),
        best: case.best.as_ref().ok().map(|best| plan_row(&case.subject, best)),
        device_hours_per_billion_tokens: case.best.as_ref().ok().map(|best| {
            let steps = 1e9 / case.subject.tokens();
            steps * best.estimate.step_time_s / HOUR_S * super::ranks(&best.estimate)
        }),
        reason: case.best.as_ref().err().cloned(),
    };
    documents::WhatIf {
        model: cases[0].subject.work.name.clone(),
        rows: cases.iter().map(row).collect(),
        executor: Some(cases[0].subject.executor()),
    }
}
