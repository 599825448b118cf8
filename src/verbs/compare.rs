//! `compare`: configurations side by side, and beside the best one.

use kernels::{Bytes, Seconds};
use planner::configuration::Configuration;
use planner::search::groups::Grouped;
use planner::search::request::Chosen;

use super::gpus::groups::Mixed;
use super::gpus::groups::page as shown;
use super::gpus::{Subject, answer, plan_row};
use super::inference;
use crate::cache;
use crate::documents::{self, CompareGroupsRow, CompareRow, Document};
use crate::failure::{Exit, Failure, usage};
use crate::verbs::flags::{Aim, CompareArgs, refuse_cpus};

/// Answers `compare`: what each configuration costs, part by part, against the best one.
pub fn compare(args: &CompareArgs) -> Result<Exit, Failure> {
    if args.served.is_inference()? {
        return inference::compare::compare(args);
    }
    if !args.beside.is_empty() {
        let headline = "layouts of training are compared on one cluster".to_owned();
        let help = "leave it out, or write `--for inference`";
        return Err(usage("--beside", headline).help(help).into());
    }
    let cluster = args.asked.place.cluster()?;
    refuse_cpus(&cluster, "`explain --plan FILE` lays a compiled plan beside the fastest one")?;
    if !cluster.groups.is_empty() {
        let mixed = Mixed::new(&args.asked, cluster, None)?;
        let key = args.asked.key("compare-groups", &(&mixed, args));
        return cache::answer(key, || Ok((Exit::Success, over_groups(&mixed, args)?)));
    }
    let subject = Subject::new(&args.asked, cluster)?;
    let key = args.asked.key("compare", &(&subject, args));
    cache::answer(key, || Ok((Exit::Success, compared(&subject, args)?)))
}

/// What `compare` prints of layouts of groups.
fn over_groups(mixed: &Mixed, args: &CompareArgs) -> Result<String, Failure> {
    let question = mixed.question(&args.asked)?;
    let score = |text: &String| mixed.score(("--with", text), &|c| c, &question);
    let mut all = args.with.iter().map(score).collect::<Result<Vec<_>, _>>()?;
    // Without a best one there is still something to compare.
    let best = mixed.best(&args.asked, Aim::Time).ok();
    let last_is_best = best.is_some();
    all.extend(best);
    if args.asked.json {
        let row = |way: &Grouped| CompareGroupsRow {
            plan: shown::document(mixed, way),
            fits: shown::fits(way),
        };
        let document = documents::CompareGroups {
            model: mixed.work.name.clone(),
            plans: all.iter().map(row).collect(),
            last_is_best,
        };
        return Ok(format!("{:#}", document.to_json()));
    }
    let mut text = mixed.header();
    for (index, way) in all.iter().enumerate() {
        let is_best = last_is_best && index + 1 == all.len();
        let name = if is_best { "best".to_owned() } else { format!("({})", index + 1) };
        let said = if shown::fits(way) { "" } else { ", which does not fit" };
        text += &format!("\n{name}{said}{}", shown::page(mixed, way));
    }
    Ok(text)
}

/// What `compare` prints.
fn compared(subject: &Subject, args: &CompareArgs) -> Result<String, Failure> {
    let estimator = subject.estimator()?;
    let have = estimator.memory_bytes;
    let mut all = Vec::new();
    for text in &args.with {
        let configuration: Configuration = text.parse().map_err(Failure::Input)?;
        let ranks = configuration.ranks();
        let Some(devices) = u32::try_from(ranks).ok().filter(|ranks| *ranks <= subject.devices)
        else {
            let headline = format!("{ranks} ranks on {} devices", subject.devices);
            return Err(usage("--with", headline).help("write --devices with more").into());
        };
        subject.check_expressible("--with", &configuration)?;
        let own = Subject { devices, ..subject.clone() };
        let estimate = own.estimator()?.estimate(&configuration)?;
        let fits = estimate.memory.total_bytes() <= have;
        all.push(Chosen { configuration, estimate, fits });
    }
    // Without a best one there is still something to compare.
    let best = answer(subject, &args.asked).ok();
    all.extend(best.iter().flat_map(|answer| answer.best.first().cloned()));
    if args.asked.json {
        let row = |chosen: &Chosen| CompareRow {
            row: plan_row(subject, chosen),
            breakdown: chosen.estimate.breakdown,
            memory: chosen.estimate.memory,
        };
        let document = documents::Compare {
            model: subject.work.name.clone(),
            have_bytes: have,
            plans: all.iter().map(row).collect(),
            last_is_best: best.is_some(),
            executor: Some(subject.executor()),
        };
        return Ok(format!("{:#}", document.to_json()));
    }
    Ok(page(subject, &all, best.is_some(), have))
}

fn page(subject: &Subject, all: &[Chosen], last_is_best: bool, have: f64) -> String {
    let mut text = subject.header() + "\n";
    for (index, chosen) in all.iter().enumerate() {
        let is_best = last_is_best && index + 1 == all.len();
        let name = if is_best { "best".to_owned() } else { format!("({})", index + 1) };
        text += &format!("{name:<6} {}\n", chosen.configuration);
    }
    let mut rows: Vec<Vec<String>> = Vec::new();
    let row = |name: &str, cell: &dyn Fn(&Chosen) -> String| {
        let cells = all.iter().map(cell);
        std::iter::once(name.to_owned()).chain(cells).collect::<Vec<String>>()
    };
    if all.iter().any(|c| c.configuration.ranks() != u64::from(subject.devices)) {
        rows.push(row("devices", &|c| c.configuration.ranks().to_string()));
    }
    rows.push(row("step", &|c| Seconds(c.estimate.step_time_s).to_string()));
    rows.push(row("MFU", &|c| format!("{:.1}%", 100.0 * subject.mfu(&c.estimate))));
    let parts = |c: &Chosen| c.estimate.breakdown.parts();
    for (index, (name, _)) in parts(&all[0]).iter().enumerate() {
        if all.iter().any(|chosen| parts(chosen)[index].1 > 0.0) {
            rows.push(row(&format!("  {name}"), &|c| Seconds(parts(c)[index].1).to_string()));
        }
    }
    let bytes = |bytes: f64| Bytes(bytes as u64).to_string();
    rows.push(row("memory", &|c| bytes(c.estimate.memory.total_bytes())));
    for (index, (name, _)) in all[0].estimate.memory.parts().iter().enumerate() {
        let held = |c: &Chosen| bytes(c.estimate.memory.parts()[index].1);
        rows.push(row(&format!("  {name}"), &held));
    }
    let fits = |c: &Chosen| if c.fits { "yes" } else { "no" }.to_owned();
    rows.push(row(&format!("fits {}", bytes(have)), &fits));
    text.push('\n');
    for cells in rows {
        text += &format!("  {:<18}", cells[0]);
        for cell in &cells[1..] {
            text += &format!("{cell:>14}");
        }
        text.push('\n');
    }
    text
}
