//! `explain` on groups of devices: where a step goes, and what other ways over them would take.

use ir::Diagnostic;
use kernels::Seconds;
use planner::cluster::Cluster;
use planner::limits::Limits;
use planner::search::groups::{Grouped, share};
use planner::search::hetero_pipeline::across;
use serde_json::json;

use super::Mixed;
use super::page::{breakdown, document, fits, kind, page};
use crate::argument::PathArg;
use crate::cache;
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, read_text};
use crate::verbs::flags::{Aim, RequestFlags};
use crate::verbs::gpus::{check_model, signed};
use crate::verbs::score::read;

/// How much slower the other kind of plan may be to be told. Chosen.
const TOLD: f64 = 3.0;

/// Answers `explain`: where a step goes, and what other ways over the groups would take.
pub fn explain(asked: &RequestFlags, cluster: Cluster) -> Result<Exit, Failure> {
    let mixed = Mixed::new(asked, cluster, None)?;
    let key = asked.key("explain-groups", &(&mixed, asked));
    cache::answer(key, || Ok((Exit::Success, explanation(&mixed, asked, None)?)))
}

/// Answers `explain` about the plan in a file, beside the fastest one.
pub fn explain_file(
    asked: &RequestFlags,
    path: &PathArg,
    cluster: Cluster,
) -> Result<Exit, Failure> {
    let text = read_text(path, "--plan")?;
    let path = &path.to_string();
    let said = read::of_groups(path, &text)?;
    let mut asked = asked.clone();
    let size = |number: Option<u32>| number.map(|number| number as usize);
    asked.gbs = asked.gbs.or(size(said.global_batch));
    asked.seq = asked.seq.or(size(said.seq));
    asked.dtype = asked.dtype.or(said.dtype);
    let mixed = Mixed::new(&asked, cluster, None)?;
    check_model(path, &said.model, &mixed.work)?;
    let given = mixed.score((path, &said.text), &|c| c, &mixed.question(&asked)?)?;
    let key = asked.key("explain-groups-file", &(&mixed, &asked, &said.text));
    cache::answer(key, || Ok((Exit::Success, explanation(&mixed, &asked, Some(given))?)))
}

/// What is explained: the fastest way, or a given one beside it.
struct Explained {
    way: Grouped,
    /// The fastest way, or why there is none, where another one is explained.
    fastest: Option<Result<Grouped, Diagnostic>>,
}

impl Explained {
    fn new(
        mixed: &Mixed,
        asked: &RequestFlags,
        given: Option<Grouped>,
    ) -> Result<Explained, Failure> {
        let best = mixed.best(asked, Aim::Time);
        Ok(match (given, best) {
            (None, best) => Explained { way: best?, fastest: None },
            (Some(way), Ok(best)) => Explained { way, fastest: Some(Ok(best)) },
            (Some(way), Err(none)) => Explained { way, fastest: Some(Err(none.into_no()?)) },
        })
    }

    /// How a given way stands to the fastest one within the limits, and whether it fits.
    fn verdict(&self, mixed: &Mixed, limits: &Limits) -> String {
        let text = mixed.text(&self.way);
        let within = match limits.is_empty() {
            true => String::new(),
            false => format!(" within `{limits}`"),
        };
        let mut said = match &self.fastest {
            None => return String::new(),
            Some(Ok(best)) if mixed.text(best) == text => {
                format!("It is the fastest that fits{within}\n")
            }
            Some(Ok(best)) => {
                let more = signed(best.step_time_s() - self.way.step_time_s());
                format!("The fastest that fits{within}, {more}: {}\n", mixed.text(best))
            }
            Some(Err(none)) => format!("No plan is found beside it: {}\n", none.headline),
        };
        if !fits(&self.way) {
            said += "It does not fit\n";
        }
        said
    }
}

/// Other ways: on fewer groups, and of the other kind.
fn others(mixed: &Mixed, asked: &RequestFlags, best: &Grouped) -> Result<Vec<Grouped>, Failure> {
    let question = mixed.question(asked)?;
    let mut all = mixed.ways(asked)?;
    match best {
        Grouped::Stages(_) => all.extend(share(&question).ok().map(Grouped::Shares)),
        Grouped::Shares(shared) => {
            let across = across(&question, TOLD * shared.step_time_s);
            all.extend(across.map_err(Failure::from)?.map(Grouped::Stages));
        }
    }
    let what = |way: &Grouped| (kind(way), mixed.names(way), way.step_time_s().to_bits());
    all.retain(|way| what(way) != what(best));
    all.sort_by(|a, b| a.step_time_s().total_cmp(&b.step_time_s()));
    all.dedup_by(|a, b| what(a) == what(b));
    Ok(all)
}

fn explanation(
    mixed: &Mixed,
    asked: &RequestFlags,
    given: Option<Grouped>,
) -> Result<String, Failure> {
    let explained = Explained::new(mixed, asked, given)?;
    let Explained { way, fastest } = &explained;
    let others = match fastest {
        Some(Err(_)) => Vec::new(),
        Some(Ok(_)) | None => others(mixed, asked, way)?,
    };
    let parts = breakdown(way).unwrap_or_default();
    if asked.json {
        let best = fastest.as_ref().and_then(|fastest| fastest.as_ref().ok());
        let none = fastest.as_ref().and_then(|fastest| fastest.as_ref().err());
        let told = |way: &Grouped| {
            json!({
                "kind": kind(way),
                "groups": mixed.names(way),
                "devices": way.devices(),
                "step_time_s": way.step_time_s(),
            })
        };
        let document = documents::ExplainGroups {
            plan: document(mixed, way),
            breakdown: parts,
            others: others.iter().map(told).collect(),
            fits: fits(way),
            fastest: best.map(|best| document(mixed, best)),
            infeasible: none.map(|none| none.headline.clone()),
        };
        return Ok(format!("{:#}", document.to_json()));
    }
    let limits = asked.all_limits()?;
    let mut text = mixed.header() + &page(mixed, way) + &explained.verdict(mixed, &limits);
    let total = parts.total_s();
    text += match way {
        Grouped::Shares(_) => "\nWhere a step goes, on the slowest group\n",
        Grouped::Stages(_) => "\nWhere a step goes\n",
    };
    for (name, seconds) in parts.parts().iter().filter(|(_, s)| *s > 0.0) {
        let (time, share) = (Seconds(*seconds).to_string(), 100.0 * seconds / total);
        text += &format!("  {name:<12}{time:>10} {share:>6.1}%\n");
    }
    text += "\nWhy not, with all else as it is…\n";
    for other in &others {
        let more = signed(other.step_time_s() - way.step_time_s());
        text += &format!("  {} on {}  {more}\n", kind(other), mixed.names(other).join(", "));
    }
    Ok(text)
}
