//! `explain` where ranks are GPUs: where a step goes, why not a neighbour, what memory is worth.

use super::finalists::{self, Programs, needs, oversized_lines};
use super::{check_model, signed};
use codegen::footprint::NotYet;
use ir::{Diagnostic, Span};
use kernels::{Bytes, Seconds};
use planner::cluster::Cluster;
use planner::configuration::{Configuration, Offload, Place, Recompute, Schedule, Zero};
use planner::estimate::described::described;
use planner::estimate::memory::Memory;
use planner::estimate::{Estimate, Estimator};
use planner::finalists::{Finalists, Held};
use planner::limits::Limits;
use planner::search::neighbours::Variations;
use planner::search::request::{Chosen, SearchResult};
use serde_json::{Value, json};

use super::{Subject, adapted, answer, groups, padding_line, plan_row, question};
use crate::argument::PathArg;
use crate::cache;
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, read_text};
use crate::verbs::flags::{Aim, RequestFlags};
use crate::verbs::score::read::{self, Known};

/// Answers `explain`.
pub fn explain(asked: &RequestFlags, cluster: Cluster) -> Result<Exit, Failure> {
    if !cluster.groups.is_empty() {
        return groups::explain::explain(asked, cluster);
    }
    let subject = Subject::new(asked, cluster)?;
    let key = asked.key("explain", &(&subject, asked));
    cache::answer(key, || Ok((Exit::Success, explanation(&subject, asked, None)?)))
}

/// Answers `explain` about the plan in a file, beside the fastest one.
pub fn explain_file(asked: &RequestFlags, path: &PathArg) -> Result<Exit, Failure> {
    let text = read_text(path, "--plan")?;
    let path = &path.to_string();
    let mut asked = asked.clone();
    let work = described(&asked.model, None)?.work;
    let layers = work.depth();
    let devices = asked.place.ranks.and_then(|ranks| u32::try_from(ranks).ok());
    let global_batch = asked.gbs.and_then(|gbs| u32::try_from(gbs).ok());
    let per_node = asked.place.cluster()?.devices_per_node;
    let per_node = per_node.and_then(|count| u32::try_from(count).ok());
    let known = Known { layers, devices, per_node, global_batch, ..Known::default() };
    let layout = read::read_for(path, &text, Some(asked.model.path()), known)?;
    layout.note_remarks();
    asked.lora = layout.adapters(path, asked.lora.as_ref())?;
    check_model(path, &layout.model, &adapted(work, asked.lora.as_ref())?)?;
    let given = layout.configuration;
    let size = |number: Option<u32>| number.map(|number| number as usize);
    asked.gbs = asked.gbs.or(size(layout.global_batch));
    asked.seq = asked.seq.or(size(layout.seq));
    asked.dtype = asked.dtype.or(layout.dtype);
    let ranks = usize::try_from(given.ranks()).unwrap_or(usize::MAX);
    let devices = *asked.place.ranks.get_or_insert(ranks);
    if devices != ranks {
        let headline = format!("the plan is for {ranks} devices, and {devices} are asked for");
        let help = format!("write `--devices {ranks}`, or plan again");
        return Err(Diagnostic::error("E5006", Span::of(path), headline).help(help).into());
    }
    let cluster = asked.place.cluster()?;
    let subject = Subject::new(&asked, cluster)?;
    let key = asked.key("explain-file", &(&subject, &asked, &given));
    cache::answer(key, || Ok((Exit::Success, explanation(&subject, &asked, Some(given))?)))
}

/// What is explained: a plan in the place of the best one.
struct Explained {
    answer: SearchResult,
    /// The fastest plan, where another one is explained.
    fastest: Option<Chosen>,
    /// Why there is no fastest plan.
    none: Option<Diagnostic>,
    /// What became of the finalists.
    finalists: Finalists,
}

/// The fastest plan, or a given one beside it, though nothing that is asked for fits.
fn explained(
    subject: &Subject,
    asked: &RequestFlags,
    given: Option<Configuration>,
) -> Result<Explained, Failure> {
    let found = answer(subject, asked);
    let Some(configuration) = given else {
        let mut answer = found?;
        let finalists = finalists::settle(subject, asked, Aim::Time, &mut answer)?;
        return Ok(Explained { answer, fastest: None, none: None, finalists });
    };
    subject.check_expressible("--plan", &configuration)?;
    let estimator = subject.estimator()?;
    let estimate = estimator.estimate(&configuration)?;
    let have_bytes = estimator.memory_bytes;
    let fits = estimate.memory.total_bytes() <= have_bytes;
    let step_s = estimate.step_time_s;
    let mut given = Chosen { configuration: estimate.configuration.clone(), estimate, fits };
    let held = Programs::of(subject, asked)?.held(&given.configuration);
    (_, given.fits) = needs(&given, &held, have_bytes);
    let finalists = Finalists { held, oversized: Vec::new() };
    match found {
        Ok(mut answer) => {
            answer.gap = answer.bound_s.map(|bound_s| step_s / bound_s - 1.0);
            let fastest = Some(std::mem::replace(&mut answer.best[0], given));
            Ok(Explained { answer, fastest, none: None, finalists })
        }
        Err(failure) => {
            let answer = SearchResult::alone(given, have_bytes);
            Ok(Explained { answer, fastest: None, none: Some(failure.into_no()?), finalists })
        }
    }
}

/// What `explain` prints of the fastest plan, or of a given one beside it.
fn explanation(
    subject: &Subject,
    asked: &RequestFlags,
    given: Option<Configuration>,
) -> Result<String, Failure> {
    let explained = explained(subject, asked, given)?;
    let (answer, estimator) = (&explained.answer, subject.estimator()?);
    let question = question(subject, asked, &estimator, Aim::Time, &|| false)?;
    let mut neighbours = neighbours(subject, &estimator, answer);
    let best = &answer.best[0];
    let listed = answer.best.iter().chain(&answer.others).chain(&answer.misses);
    let known = listed.chain(&explained.fastest);
    let known = known.chain(neighbours.iter().map(|neighbour| &neighbour.chosen));
    let mut variations = Variations::new(&question, known.cloned().collect());
    for neighbour in &mut neighbours {
        let decision = Limits::decision(&neighbour.change).ok();
        neighbour.best =
            decision.and_then(|(decision, number)| variations.with_decision(decision, number));
    }
    let resized = SIZES.map(|size| {
        let memory_bytes = size * estimator.memory_bytes;
        Resized { memory_bytes, best: variations.with_memory(memory_bytes) }
    });
    if asked.json {
        let document = document(subject, &explained, &neighbours, &resized);
        return Ok(format!("{document:#}"));
    }
    let estimate = &best.estimate;
    let total = estimate.step_time_s;
    let mut text = format!("{}\nPlan {}\n", subject.header(), best.configuration);
    if let Some(target) = subject.cluster.target() {
        text += &format!("Kernels for {target}\n");
    }
    text += &explained.verdict(&asked.all_limits()?);
    text.push('\n');
    text += &parts(estimate, &explained.finalists.held, answer.have_bytes);
    text += &oversized_lines(&explained.finalists.oversized, answer.have_bytes);
    text += &padding_line(subject.padding(&best.configuration), best.configuration.tp);
    text += "\nWhy not, with all else as it is, and at its best…\n";
    let width = neighbours.iter().map(|other| other.change.len()).max().unwrap_or(0);
    for other in &neighbours {
        let more = |chosen: &Chosen| signed(chosen.estimate.step_time_s - total);
        let [one, all] = [more(&other.chosen), other.best.as_ref().map(more).unwrap_or_default()];
        let why = other.reason(best, answer.have_bytes);
        text += &format!("  {:<width$}  {one:>11}  {all:>11}  {why}\n", other.change);
    }
    let mut parts = estimate.breakdown.parts();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let help = parts.iter().take(4).filter(|(_, seconds)| *seconds > 0.0);
    let help = help.map(|(name, s)| format!("{name} -{:.2}%", s / total));
    text += &format!("\nWhat 1% less of it saves: {}\n", help.collect::<Vec<_>>().join(", "));
    text += &sizes(best, &resized);
    let saved = saved_per_gib(best, answer.have_bytes, &resized);
    if saved > 0.0 {
        text += &format!("A GiB more on each device saves {} a step at best\n", Seconds(saved));
    }
    Ok(text)
}

impl Explained {
    /// How the plan stands to the fastest one within the limits, and whether it fits.
    fn verdict(&self, limits: &Limits) -> String {
        let best = &self.answer.best[0];
        let mut text = String::new();
        let within = match limits.is_empty() {
            true => String::new(),
            false => format!(" within `{limits}`"),
        };
        match &self.fastest {
            Some(found) if found.configuration == best.configuration => {
                text += &format!("It is the fastest that fits{within}\n");
            }
            Some(found) => {
                let more = signed(found.estimate.step_time_s - best.estimate.step_time_s);
                let found = &found.configuration;
                text += &format!("The fastest that fits{within}, {more}: {found}\n");
            }
            None => {}
        }
        if !best.fits {
            text += "It does not fit\n";
        }
        if let Some(none) = &self.none {
            text += &format!("No plan is found beside it: {}\n", none.headline);
            text += &none.help.iter().map(|help| format!("  {help}\n")).collect::<String>();
        }
        text
    }
}

/// The explanation as a JSON document.
fn document(
    subject: &Subject,
    explained: &Explained,
    neighbours: &[Neighbour],
    resized: &[Resized],
) -> Value {
    let Explained { answer, fastest, none, finalists } = explained;
    let best = &answer.best[0];
    let neighbour = |neighbour: &Neighbour| documents::Neighbour {
        row: plan_row(subject, &neighbour.chosen),
        change: neighbour.change.to_string(),
        reason: neighbour.reason(best, answer.have_bytes),
        best: neighbour.best.as_ref().map(|found| plan_row(subject, found)),
    };
    let other = |other: &Resized| {
        let plan = other.best.as_ref().map(|found| plan_row(subject, found));
        json!({"memory_bytes": other.memory_bytes, "best": plan})
    };
    let document = documents::SpaceExplain {
        plan: super::document(subject, answer, &finalists.held),
        neighbours: neighbours.iter().map(neighbour).collect(),
        fastest: fastest.as_ref().map(|found| plan_row(subject, found)),
        infeasible: none.as_ref().map(|none| none.headline.clone()),
        seconds_saved_per_gib: saved_per_gib(best, answer.have_bytes, resized),
        other_memory: resized.iter().map(other).collect(),
    };
    document.to_json()
}

/// Where the time and the memory of a step go.
fn parts(estimate: &Estimate, held: &Result<Held, NotYet>, have: f64) -> String {
    let total = estimate.step_time_s;
    let mut text = format!("Where a step goes ({})\n", Seconds(total));
    for (name, seconds) in estimate.breakdown.parts().iter().filter(|(_, s)| *s > 0.0) {
        let share = seconds / total;
        let bar = "█".repeat((share * 28.0).round() as usize);
        let time = Seconds(*seconds).to_string();
        text += format!("  {name:<12}{time:>10} {:>6.1}%  {bar}", 100.0 * share).trim_end();
        text.push('\n');
    }
    text + &held_parts(&estimate.memory, held, have)
}

/// What a device holds: under the compiled program beside the closed form, where there is one.
fn held_parts(expected: &Memory, held: &Result<Held, NotYet>, have: f64) -> String {
    let bytes = |bytes: f64| Bytes(bytes as u64).to_string();
    let compiled = held.as_ref().ok().map(Held::memory);
    let memory = compiled.as_ref().unwrap_or(expected);
    let (need, stage) = (bytes(memory.total_bytes()), memory.stage);
    let both = if held.is_ok() { ", compiled and in closed form" } else { "" };
    let mut text =
        format!("Memory {need} of {}; what a device of stage {stage} holds{both}:\n", bytes(have));
    for ((name, compiled), (_, expected)) in memory.parts().into_iter().zip(expected.parts()) {
        let beside = held.as_ref().map_or(String::new(), |_| format!("{:>11}", bytes(expected)));
        text += &format!("  {name:<13}{:>11}{beside}\n", bytes(compiled));
    }
    if let Err(why) = held {
        text += &format!("In closed form; not compiled yet: {why}\n");
    }
    text
}

/// The best plan with one decision changed.
struct Neighbour {
    change: String,
    /// All else as it is.
    chosen: Chosen,
    /// All else at its best, as far as something fits and was found.
    best: Option<Chosen>,
}

impl Neighbour {
    /// Why it is not the best: what is missing, or what takes longer.
    fn reason(&self, best: &Chosen, have: f64) -> String {
        let estimate = &self.chosen.estimate;
        if !self.chosen.fits {
            let short = Bytes((estimate.memory.total_bytes() - have) as u64);
            return format!("does not fit: {short} too much");
        }
        let parts = best.estimate.breakdown.parts().into_iter();
        let grown = parts.zip(estimate.breakdown.parts()).map(|((name, a), (_, b))| (name, b - a));
        match grown.max_by(|a, b| a.1.total_cmp(&b.1)) {
            Some((name, seconds)) if seconds > 0.0 => format!("{name} +{}", Seconds(seconds)),
            Some(_) | None => "as fast".to_owned(),
        }
    }
}

/// A configuration, priced, if it makes sense.
fn priced(estimator: &Estimator<'_>, configuration: Configuration) -> Option<Chosen> {
    let estimate = estimator.estimate(&configuration).ok()?;
    let fits = estimate.memory.total_bytes() <= estimator.memory_bytes;
    Some(Chosen { configuration, estimate, fits })
}

/// Plans that differ from the best in one decision, as far as that makes sense, fastest first.
fn neighbours(
    subject: &Subject,
    estimator: &Estimator<'_>,
    answer: &SearchResult,
) -> Vec<Neighbour> {
    let best = &answer.best[0].configuration;
    let changed = changed(best, subject.work.depth()).into_iter();
    let mut all: Vec<Neighbour> = changed
        .filter(|(_, c)| subject.check_expressible("", c).is_ok())
        .filter_map(|(change, c)| {
            Some(Neighbour { change, chosen: priced(estimator, c)?, best: None })
        })
        .collect();
    all.sort_by(|a, b| a.chosen.estimate.step_time_s.total_cmp(&b.chosen.estimate.step_time_s));
    all
}

/// Configurations with twice and half the ranks of an axis, for a model of `layers` layers;
/// data-parallel ranks take what is left. What depends on a number that changes follows it.
fn other_meshes(best: &Configuration, layers: u32) -> Vec<(String, Configuration)> {
    let mut all = Vec::new();
    for (name, now) in [("tp", best.tp), ("pp", best.pp), ("cp", best.cp)] {
        let shared = u64::from(best.dp) * u64::from(now);
        for other in [2 * now, now / 2] {
            let divides = other > now || (other > 0 && now.is_multiple_of(2));
            if !divides || !shared.is_multiple_of(u64::from(other)) {
                continue;
            }
            let mut c = best.clone();
            match name {
                "tp" => {
                    c.tp = other;
                    c.sequence_parallel = other > 1 && (best.sequence_parallel || now == 1);
                }
                "pp" => in_stages(&mut c, other, layers),
                _ => c.cp = other,
            }
            c.dp = (shared / u64::from(other)) as u32;
            let replicas = c.dp.saturating_mul(c.cp);
            if replicas == 1 {
                c.zero = Zero::default();
            } else if c.zero.shard > 0 && !replicas.is_multiple_of(c.zero.shard) {
                c.zero.shard = 0;
            }
            all.push((format!("{name}={other}"), c));
        }
    }
    all
}

/// Changes `c` to an even partition of `layers` layers into `stages` stages that recomputes the
/// same share of each stage.
fn in_stages(c: &mut Configuration, stages: u32, layers: u32) {
    if let Recompute::Layers(count) = c.recompute {
        let deepest = u64::from(c.deepest(layers).max(1));
        let scaled = u64::from(count) * u64::from(layers.div_ceil(stages));
        c.recompute = Recompute::Layers(scaled.div_ceil(deepest) as u32);
    }
    c.pp = stages;
    c.stage_layers.clear();
    if stages == 1 {
        (c.vpp, c.schedule) = (1, Schedule::default());
    }
}

/// Configurations one decision away, with what was changed.
fn changed(best: &Configuration, layers: u32) -> Vec<(String, Configuration)> {
    let mut changed = other_meshes(best, layers);
    let mut push = |c: Configuration, what: String| changed.push((what, c));
    let one = |change: &dyn Fn(&mut Configuration)| {
        let mut c = best.clone();
        change(&mut c);
        c
    };
    let half =
        (best.microbatch > 1 && best.microbatch.is_multiple_of(2)).then_some(best.microbatch / 2);
    for microbatch in half.into_iter().chain(best.microbatch.checked_mul(2)) {
        push(one(&|c| c.microbatch = microbatch), format!("mbs={microbatch}"));
    }
    // One replica has nobody to shard with.
    let has_replicas = best.dp.saturating_mul(best.cp) > 1;
    for stage in (0..=3).filter(|stage| *stage != best.zero.stage && (*stage == 0 || has_replicas))
    {
        let shard = if stage == 0 { 0 } else { best.zero.shard };
        push(one(&|c| c.zero = Zero { stage, shard }), format!("zero={stage}"));
    }
    for recompute in [Recompute::None, Recompute::Attention, Recompute::Full] {
        if recompute != best.recompute {
            push(one(&|c| c.recompute = recompute), format!("recompute={recompute}"));
        }
    }
    if best.vpp > 1 {
        push(one(&|c| c.vpp = 1), "vpp=1".to_owned());
    }
    let is_pipeline = best.pp > 1 && best.vpp == 1;
    for schedule in Schedule::ALL.into_iter().filter(|s| *s != best.schedule && is_pipeline) {
        push(one(&|c| c.schedule = schedule), format!("schedule={}", schedule.name()));
    }
    let places: [(&str, fn(&mut Offload) -> &mut Place); 3] = [
        ("optimizer", |offload| &mut offload.optimizer),
        ("parameters", |offload| &mut offload.parameters),
        ("activations", |offload| &mut offload.activations),
    ];
    for (what, place) in places {
        let (other, name) = match place(&mut best.offload.clone()) {
            Place::Device => (Place::Host, "host"),
            Place::Host | Place::Disk => (Place::Device, "device"),
        };
        push(one(&|c| *place(&mut c.offload) = other), format!("offload-{what}={name}"));
    }
    changed
}

/// What the best plan would be with devices of another size.
struct Resized {
    memory_bytes: f64,
    best: Option<Chosen>,
}

/// Sizes that memory is asked about, as shares of what there is. Chosen: as devices are sold.
pub(in crate::verbs) const SIZES: [f64; 3] = [0.75, 1.25, 2.0];

/// Seconds of a step that a GiB more on each device saves at best.
fn saved_per_gib(best: &Chosen, have_bytes: f64, resized: &[Resized]) -> f64 {
    let larger = resized.iter().filter(|other| other.memory_bytes > have_bytes);
    let saved = larger.filter_map(|other| {
        let more = (other.memory_bytes - have_bytes) / f64::from(1 << 30);
        let time = other.best.as_ref()?.estimate.step_time_s;
        Some((best.estimate.step_time_s - time) / more)
    });
    saved.fold(0.0, f64::max)
}

/// A line for each size of memory: what its best plan takes more or less than this one.
fn sizes(best: &Chosen, resized: &[Resized]) -> String {
    let mut text = "With other memory the best plan is…\n".to_owned();
    for other in resized {
        let memory = Bytes(other.memory_bytes as u64).to_string();
        let said = match &other.best {
            None => "       none: nothing fits".to_owned(),
            Some(found) if found.configuration == best.configuration => {
                "             the same".to_owned()
            }
            Some(found) => {
                let more = found.estimate.step_time_s - best.estimate.step_time_s;
                format!("{:>11}  {}", signed(more), found.configuration)
            }
        };
        text += &format!("  {memory:>11}{said}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The neighbour of a plan of 32 layers with one change.
    fn neighbour(best: &str, change: &str) -> Option<String> {
        let best: Configuration = best.parse().unwrap();
        let found = changed(&best, 32).into_iter().find(|(what, _)| what == change);
        found.map(|(_, c)| c.to_string())
    }

    /// What depends on a number that changes follows it, and the ranks stay as many.
    #[test]
    fn neighbours_are_whole_plans() {
        for (best, change, expected) in [
            // As large a part of each stage is recomputed.
            ("pp=2 dp=4 recompute=layers:8", "pp=4", "tp=1 pp=4 dp=2 mbs=1 recompute=layers:4"),
            ("pp=2 dp=4 recompute=layers:8", "pp=1", "tp=1 pp=1 dp=8 mbs=1 recompute=layers:16"),
            // Uneven stages of another number are even, and one stage has no schedule.
            ("pp=2 dp=4 stages=20.12", "pp=4", "tp=1 pp=4 dp=2 mbs=1"),
            ("pp=2 dp=4 stages=20.12", "tp=2", "tp=2 pp=2 dp=2 mbs=1 sp stages=20.12"),
            ("pp=2 dp=4 vpp=4", "pp=1", "tp=1 pp=1 dp=8 mbs=1"),
            ("pp=2 dp=4 schedule=zb-h1", "pp=1", "tp=1 pp=1 dp=8 mbs=1"),
            // One replica shards with nobody; shards that do not divide are over all.
            ("tp=4 dp=2 sp zero=3", "tp=8", "tp=8 pp=1 dp=1 mbs=1 sp"),
            ("tp=2 dp=8 sp zero=3/8", "tp=4", "tp=4 pp=1 dp=4 mbs=1 sp zero=3"),
            ("tp=2 dp=8 sp zero=3/4", "tp=4", "tp=4 pp=1 dp=4 mbs=1 sp zero=3/4"),
            ("tp=2 dp=4 sp", "tp=1", "tp=1 pp=1 dp=8 mbs=1"),
            ("dp=8 mbs=4", "mbs=2", "tp=1 pp=1 dp=8 mbs=2"),
            ("dp=8", "zero=2", "tp=1 pp=1 dp=8 mbs=1 zero=2"),
        ] {
            assert_eq!(neighbour(best, change).as_deref(), Some(expected), "{best}: {change}");
        }
        for (best, change) in [("tp=8 sp", "zero=1"), ("tp=8", "tp=16"), ("dp=8", "mbs=0")] {
            assert_eq!(neighbour(best, change), None, "{best}: {change}");
        }
    }
}
