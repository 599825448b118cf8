//! `explain` where ranks are GPUs: where a step goes, why not a neighbour, what memory is worth.

use kernels::{Bytes, Seconds};
use planner::cluster::Cluster;
use planner::configuration::{Configuration, Recompute, Schedule, Zero};
use planner::estimate::Estimator;
use planner::space::ask::{Answer, Chosen, EVALUATIONS_MAX, Question, ask};
use planner::space::tree::{Budget, Objective};
use serde_json::json;

use super::{Subject, answer, document, told};
use crate::cache;
use crate::failure::{Exit, Failure};
use crate::verbs::plan::Asked;

/// Answers `explain`.
pub fn explain(asked: &Asked, cluster: Cluster) -> Result<Exit, Failure> {
    let subject = Subject::new(asked, cluster)?;
    let key = asked.key("explain", &(&subject, asked));
    cache::answer(key, || Ok((Exit::Success, explanation(&subject, asked)?)))
}

/// What `explain` prints.
fn explanation(subject: &Subject, asked: &Asked) -> Result<String, Failure> {
    let answer = answer(subject, asked)?;
    let estimator = subject.estimator()?;
    let neighbours = neighbours(&estimator, &answer);
    let best = &answer.best[0];
    let resized = resized(subject, asked)?;
    if asked.json {
        let mut document = document(subject, &answer);
        document["schema"] = json!("gantline.space-explain/1");
        document["neighbours"] = neighbours
            .iter()
            .map(|(what, other)| {
                let mut told = told(subject, other);
                told["change"] = json!(what);
                told["reason"] = json!(reason(best, other, answer.have_bytes));
                told
            })
            .collect();
        document["seconds_saved_per_gib"] = json!(saved_per_gib(best, answer.have_bytes, &resized));
        document["other_memory"] = resized
            .iter()
            .map(|other| {
                let plan = other.best.as_ref().map(|found| told(subject, found));
                json!({"memory_bytes": other.memory_bytes, "best": plan})
            })
            .collect();
        return Ok(format!("{document:#}"));
    }
    let estimate = &best.estimate;
    let total = estimate.step_time_s;
    let mut text = format!("{}\nPlan {}\n\n", subject.header(), best.configuration);
    text += &format!("Where a step goes ({})\n", Seconds(total));
    for (name, seconds) in estimate.breakdown.parts().iter().filter(|(_, s)| *s > 0.0) {
        let share = seconds / total;
        let bar = "█".repeat((share * 28.0).round() as usize);
        let time = Seconds(*seconds).to_string();
        text += format!("  {name:<12}{time:>10} {:>6.1}%  {bar}", 100.0 * share).trim_end();
        text.push('\n');
    }
    let need = Bytes(estimate.memory.total_bytes() as u64);
    let have = Bytes(answer.have_bytes as u64);
    text += &format!(
        "Memory {need} of {have}; what a device of stage {} holds:\n",
        estimate.memory.stage
    );
    for (name, bytes) in estimate.memory.parts() {
        text += &format!("  {name:<12}{:>12}\n", Bytes(bytes as u64).to_string());
    }
    text += "\nWhy not…\n";
    let width = neighbours.iter().map(|(what, _)| what.len()).max().unwrap_or(0);
    for (what, other) in &neighbours {
        let more = signed(other.estimate.step_time_s - total);
        let why = reason(best, other, answer.have_bytes);
        text += &format!("  {what:<width$}  {more:>11}  {why}\n");
    }
    let mut parts = estimate.breakdown.parts();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let help = parts.iter().take(4).filter(|(_, seconds)| *seconds > 0.0);
    let help = help.map(|(name, s)| format!("{name} -{:.2}%", s / total));
    text += &format!("\nWhat 1% less of it saves: {}\n", help.collect::<Vec<_>>().join(", "));
    text += &sizes(best, &resized);
    Ok(text)
}

/// The same plan with one decision changed, as far as it makes sense.
fn neighbours(estimator: &Estimator<'_>, answer: &Answer) -> Vec<(String, Chosen)> {
    let best = &answer.best[0].configuration;
    let mut changed: Vec<(String, Configuration)> = Vec::new();
    let mut push = |c: Configuration, what: String| changed.push((what, c));
    let plain = Configuration { stage_layers: Vec::new(), ..best.clone() };
    let doubled = [("tp", best.tp), ("pp", best.pp), ("cp", best.cp)];
    for (name, now) in doubled {
        for other in [2 * now, now / 2] {
            if other == 0 || (other < now && !now.is_multiple_of(2)) {
                continue;
            }
            let mut c = plain.clone();
            match name {
                "tp" => (c.tp, c.sequence_parallel) = (other, other > 1),
                "pp" => (c.pp, c.vpp) = (other, if other == 1 { 1 } else { c.vpp }),
                _ => c.cp = other,
            }
            // Data-parallel ranks take what is left.
            let all = u64::from(best.dp) * u64::from(now);
            if !all.is_multiple_of(u64::from(other)) {
                continue;
            }
            c.dp = (all / u64::from(other)) as u32;
            c.zero.shard = 0;
            push(c, format!("{name}={other}"));
        }
    }
    push(
        Configuration { microbatch: 2 * best.microbatch, ..plain.clone() },
        format!("mbs={}", 2 * best.microbatch),
    );
    if best.microbatch > 1 && best.microbatch.is_multiple_of(2) {
        push(
            Configuration { microbatch: best.microbatch / 2, ..plain.clone() },
            format!("mbs={}", best.microbatch / 2),
        );
    }
    for stage in (0..=3).filter(|stage| *stage != best.zero.stage) {
        push(
            Configuration { zero: Zero { stage, shard: 0 }, ..plain.clone() },
            format!("zero={stage}"),
        );
    }
    for (recompute, name) in
        [(Recompute::None, "none"), (Recompute::Attention, "attention"), (Recompute::Full, "full")]
    {
        if recompute != best.recompute {
            push(Configuration { recompute, ..plain.clone() }, format!("recompute={name}"));
        }
    }
    for schedule in Schedule::ALL.into_iter().filter(|s| *s != best.schedule && best.pp > 1) {
        push(
            Configuration { schedule, vpp: 1, ..plain.clone() },
            format!("schedule={}", schedule.name()),
        );
    }
    if best.vpp > 1 {
        push(Configuration { vpp: 1, ..plain.clone() }, "vpp=1".to_owned());
    }
    let have = answer.have_bytes;
    let priced = changed.into_iter().filter_map(|(what, c)| {
        let estimate = estimator.estimate(&c).ok()?;
        let fits = estimate.memory.total_bytes() <= have;
        Some((what, Chosen { configuration: c, estimate, fits }))
    });
    let mut all: Vec<(String, Chosen)> = priced.collect();
    all.sort_by(|a, b| a.1.estimate.step_time_s.total_cmp(&b.1.estimate.step_time_s));
    all
}

/// Why another plan is not the best: what is missing, or what takes longer.
fn reason(best: &Chosen, other: &Chosen, have: f64) -> String {
    if !other.fits {
        let short = Bytes((other.estimate.memory.total_bytes() - have) as u64);
        return format!("does not fit: {short} too much");
    }
    let parts = best.estimate.breakdown.parts().into_iter();
    let grown =
        parts.zip(other.estimate.breakdown.parts()).map(|((name, a), (_, b))| (name, b - a));
    match grown.max_by(|a, b| a.1.total_cmp(&b.1)) {
        Some((name, seconds)) if seconds > 0.0 => format!("{name} +{}", Seconds(seconds)),
        Some(_) | None => "as fast".to_owned(),
    }
}

/// What the best plan would be with devices of another size.
struct Resized {
    memory_bytes: f64,
    best: Option<Chosen>,
}

/// Sizes that memory is asked about, as shares of what there is. Chosen: as devices are sold.
const SIZES: [f64; 3] = [0.75, 1.25, 2.0];

/// The best plan with less and with more memory on each device, by a search each.
fn resized(subject: &Subject, asked: &Asked) -> Result<Vec<Resized>, Failure> {
    let limits = asked.limited.all_limits()?;
    let mut estimator = subject.estimator()?;
    let have = estimator.memory_bytes;
    let mut all = Vec::new();
    for size in SIZES {
        estimator.memory_bytes = size * have;
        let question = Question {
            estimator: &estimator,
            devices: subject.devices,
            global_batch: subject.global_batch,
            limits: limits.clone(),
            objective: Objective::Time,
            power: None,
            budget: Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false },
        };
        let best = ask(&question).ok().and_then(|answer| answer.best.into_iter().next());
        all.push(Resized { memory_bytes: estimator.memory_bytes, best });
    }
    Ok(all)
}

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

/// A difference of times, with its sign.
fn signed(seconds: f64) -> String {
    format!("{}{}", if seconds < 0.0 { "-" } else { "+" }, Seconds(seconds.abs()))
}
