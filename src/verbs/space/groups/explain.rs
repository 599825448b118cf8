//! `explain` on groups of devices: where a step goes, and what other ways over them would take.

use kernels::Seconds;
use planner::cluster::Cluster;
use planner::space::across::across;
use planner::space::groups::{Grouped, share};
use serde_json::json;

use super::Mixed;
use super::page::{breakdown, document, kind, page};
use crate::cache;
use crate::failure::{Exit, Failure};
use crate::verbs::plan::Asked;
use crate::verbs::space::Aim;

/// How much slower the other kind of plan may be to be told. Chosen.
const TOLD: f64 = 3.0;

/// Answers `explain`: where a step goes, and what other ways over the groups would take.
pub fn explain(asked: &Asked, cluster: Cluster) -> Result<Exit, Failure> {
    let mixed = Mixed::new(asked, cluster, None)?;
    let key = asked.key("explain-groups", &(&mixed, asked));
    cache::answer(key, || Ok((Exit::Success, explanation(&mixed, asked)?)))
}

/// Other ways: on fewer groups, and of the other kind.
fn others(mixed: &Mixed, asked: &Asked, best: &Grouped) -> Result<Vec<Grouped>, Failure> {
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

fn explanation(mixed: &Mixed, asked: &Asked) -> Result<String, Failure> {
    let best = mixed.best(asked, Aim::Time)?;
    let others = others(mixed, asked, &best)?;
    let parts = breakdown(&best).unwrap_or_default();
    if asked.json {
        let mut document = document(mixed, &best);
        document["schema"] = json!("gantline.explain-groups/1");
        document["breakdown"] = json!(parts);
        let told = |way: &Grouped| {
            json!({
                "kind": kind(way),
                "groups": mixed.names(way),
                "devices": way.devices(),
                "step_time_s": way.step_time_s(),
            })
        };
        document["others"] = others.iter().map(told).collect();
        return Ok(format!("{document:#}"));
    }
    let mut text = mixed.header() + &page(mixed, &best);
    let total = parts.total_s();
    text += match best {
        Grouped::Shares(_) => "\nWhere a step goes, on the slowest group\n",
        Grouped::Stages(_) => "\nWhere a step goes\n",
    };
    for (name, seconds) in parts.parts().iter().filter(|(_, s)| *s > 0.0) {
        let (time, share) = (Seconds(*seconds).to_string(), 100.0 * seconds / total);
        text += &format!("  {name:<12}{time:>10} {share:>6.1}%\n");
    }
    text += "\nWhy not…\n";
    for way in &others {
        let more = Seconds((way.step_time_s() - best.step_time_s()).max(0.0)).to_string();
        text += &format!("  {} on {}  +{more}\n", kind(way), mixed.names(way).join(", "));
    }
    Ok(text)
}
