//! A plan over groups of devices in another tool's terms, as far as the tool can be told of it.

use ir::{Diagnostic, Span};
use planner::configuration::Configuration;
use planner::search::interop::groups::{Kind, Part, joined};
use planner::search::interop::{Tool, Use};
use serde_json::Value;

use crate::failure::{Failure, usage};
use crate::output;

/// The schema of what `plan --json` prints about groups.
pub(super) const SCHEMA: &str = "gantline.plan-groups/1";

/// A group of the document.
struct Group {
    part: Part,
    first_rank: u64,
    ranks: u64,
    layers: u32,
}

/// The configuration that a plan over groups is, or that of one of its groups, with what it is for.
pub(super) fn configuration(
    (source, document): (&str, &Value),
    only: Option<&str>,
    tool: Tool,
) -> Result<(Configuration, Use), Failure> {
    let kind = match document["kind"].as_str() {
        Some("shares") => Kind::Shares,
        Some("stages") => Kind::Stages,
        _ => return Err(bad(source, "`kind` is neither `shares` nor `stages`").into()),
    };
    let rows = document["groups"].as_array().ok_or_else(|| bad(source, "`groups` is no list"))?;
    let mut groups = Vec::new();
    for row in rows.iter().filter(|row| !row["text"].is_null()) {
        groups.push(group(source, row)?);
    }
    let seq = count(source, document, "seq")?;
    if let Some(name) = only {
        return one(kind, &groups, name).map(|group| {
            let Part { configuration, samples, .. } = &group.part;
            (configuration.clone(), Use { global_batch: *samples, seq, layers: group.layers })
        });
    }
    let layers = match kind {
        Kind::Shares => groups.first().map_or(0, |group| group.layers),
        Kind::Stages => groups.iter().map(|group| group.layers).sum(),
    };
    let parts: Vec<Part> = groups.iter().map(|group| group.part.clone()).collect();
    let whole = joined(kind, &parts, tool).map_err(|refusal| {
        let headline = format!("{} cannot be told this plan: {refusal}", tool.name());
        Diagnostic::error("E5017", Span::of(source), headline).help(way_out(kind, &parts))
    })?;
    for Group { part, first_rank, ranks, .. } in groups.iter().filter(|_| groups.len() > 1) {
        let (group, last) = (&part.group, first_rank + ranks - 1);
        output::note(&format!("`{group}` is ranks {first_rank} to {last} of the plan"));
    }
    Ok((whole, Use { global_batch: count(source, document, "gbs")?, seq, layers }))
}

/// What can be exported instead: the layout of one group for its share, or a plan for one alone.
fn way_out(kind: Kind, parts: &[Part]) -> String {
    let names: Vec<String> = parts.iter().map(|part| format!("`{}`", part.group)).collect();
    let most = parts.iter().max_by_key(|part| match kind {
        Kind::Shares => u64::from(part.samples),
        Kind::Stages => part.configuration.stage_layers.iter().map(|n| u64::from(*n)).sum(),
    });
    let most = most.map_or("", |part| part.group.as_str());
    match kind {
        Kind::Shares => format!(
            "export the share of one of {} with `--group`; `{most}` has the most samples",
            names.join(", ")
        ),
        Kind::Stages => format!(
            "plan for one of {} alone, and export that; `{most}` has the most layers",
            names.join(", ")
        ),
    }
}

/// The group of a name, where it has a whole model.
fn one<'g>(kind: Kind, groups: &'g [Group], name: &str) -> Result<&'g Group, Failure> {
    let found = groups.iter().find(|group| group.part.group == name);
    let names = || groups.iter().map(|group| group.part.group.as_str());
    let Some(group) = found else {
        let help = match ir::import::nearest(name, names()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("these take part: {}", names().collect::<Vec<_>>().join(", ")),
        };
        return Err(usage("--group", format!("no group `{name}` takes part")).help(help).into());
    };
    if kind == Kind::Stages {
        let headline = format!("`{name}` has {} of the model's layers alone", group.layers);
        let help = "plan for its devices alone, and export that";
        return Err(usage("--group", headline).help(help).into());
    }
    Ok(group)
}

fn group(source: &str, row: &Value) -> Result<Group, Failure> {
    let text = |name: &str| {
        row[name].as_str().ok_or_else(|| bad(source, &format!("a group has no `{name}`")))
    };
    let configuration: Configuration = text("text")?.parse()?;
    let samples = count(source, row, "samples")?;
    let layers = count(source, row, "layers")?;
    configuration.check(layers)?;
    if configuration.microbatch_count(samples.into()).is_none() {
        return Err(bad(source, &format!("{samples} samples are no multiple of dp · mbs")).into());
    }
    Ok(Group {
        part: Part {
            group: text("group")?.to_owned(),
            device: text("device")?.to_owned(),
            samples,
            configuration,
        },
        first_rank: row["first_rank"].as_u64().unwrap_or(0),
        ranks: count(source, row, "ranks")?.into(),
        layers,
    })
}

fn count(source: &str, row: &Value, name: &str) -> Result<u32, Failure> {
    let number = row[name].as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0);
    Ok(number.ok_or_else(|| bad(source, &format!("`{name}` is no count")))?)
}

fn bad(source: &str, headline: &str) -> Diagnostic {
    let help = "write it with `gantline plan MODEL --cluster FILE --json`";
    Diagnostic::error("E5005", Span::of(source), headline).help(help)
}
