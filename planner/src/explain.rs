//! Why this plan: what it is called, where a step goes, what the alternatives would cost.

use std::fmt;

use ir::plan::Keep;
use ir::{ExpertParallel, Mesh};
use kernels::Seconds;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::compiled::{Candidate, Found, Scored};
use crate::footprint::Footprint;
use crate::simulate::Breakdown;

/// The widest bar of the breakdown, in characters.
const BAR: usize = 28;
/// Alternatives that are shown. Chosen: one screen.
const ALTERNATIVES: usize = 6;

/// A plan explained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    /// What the plan is called: its decisions in a few words.
    pub plan: String,
    /// The kinds of parallelism that it uses, with what each is.
    pub kinds: Vec<(String, String)>,
    /// Seconds of a step.
    pub step_time_s: f64,
    /// Seconds that a step takes at least, as far as the prices can be trusted.
    pub step_time_low_s: f64,
    /// Seconds that it takes at most.
    pub step_time_high_s: f64,
    /// How the times are known.
    pub origin: String,
    /// Where the time goes; the parts sum to the step.
    pub breakdown: Breakdown,
    /// The rank whose bytes are the most.
    pub rank: usize,
    /// Its bytes.
    pub footprint: Footprint,
    /// Bytes of the fullest place, and those that it has.
    pub need_bytes: u64,
    /// Bytes that it has.
    pub have_bytes: u64,
    /// The number that decided: what the nearest other plan pays more, or the bytes that a faster
    /// one would need. None where there is no other plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided: Option<String>,
    /// What would be otherwise, the fastest first.
    pub alternatives: Vec<Alternative>,
    /// Candidates, and how many of them could be left out unseen.
    pub candidate_count: usize,
    /// Candidates that a bound or their size ruled out.
    pub bounded_out: usize,
    /// How much slower than the fastest possible plan of the space the plan may be: 0 for not at
    /// all.
    pub gap: f64,
}

/// A plan that was not chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Alternative {
    /// What it is called.
    pub plan: String,
    /// Seconds of a step.
    pub step_time_s: f64,
    /// Why not: the part of the breakdown that grew the most, or the bytes that are missing.
    pub reason: String,
}

/// Explains what a search found. `origin` is how the times are known.
pub fn explain(found: &Found) -> Explanation {
    let best = &found.best;
    let candidate = &best.candidate;
    let classes = best.footprints.iter().enumerate();
    let (class, footprint) = classes.max_by_key(|(_, f)| f.total()).expect("a plan has a rank");
    let origin = found.plan.predictions.get("step_time_s").map(|p| p.origin.clone());
    let gap = match found.bound_s {
        Some(bound) if !found.complete => (best.time.seconds / bound - 1.0).max(0.0),
        Some(_) | None => 0.0,
    };
    let predicted = |name: &str| found.plan.predictions.get(name).map(|p| p.value);
    let seconds = best.time.seconds;
    Explanation {
        plan: best.name.to_string(),
        kinds: kinds(candidate, found.plan.microbatch_count),
        step_time_s: seconds,
        step_time_low_s: predicted("step_time_low_s").unwrap_or(seconds),
        step_time_high_s: predicted("step_time_high_s").unwrap_or(seconds),
        origin: origin.unwrap_or_default(),
        breakdown: best.time.breakdown,
        rank: candidate.mesh.first_of_class(class),
        footprint: *footprint,
        need_bytes: best.need.0,
        have_bytes: best.have.0,
        decided: decided(best, &found.evaluated),
        alternatives: alternatives(best, &found.evaluated),
        candidate_count: found.candidate_count,
        bounded_out: found.bounded_out,
        gap,
    }
}

/// The kinds of parallelism that a plan uses, by their names.
pub fn kinds(candidate: &Candidate, microbatches: usize) -> Vec<(String, String)> {
    let Mesh { pp, dp, cp, tp, .. } = candidate.mesh;
    let mut kinds = Vec::new();
    let mut push = |name: &str, what: String| kinds.push((name.to_owned(), what));
    if dp > 1 {
        push("DP", format!("{dp} groups of ranks take different samples"));
    }
    match candidate.experts {
        ExpertParallel { ep: 1, .. } => {}
        ExpertParallel { ep, takes_tp: false } => {
            push("EP", format!("{ep} of these share the experts of a layer"));
        }
        ExpertParallel { ep, takes_tp: true } => {
            push("EP", format!("{ep} ranks share the experts of a layer, those of TP first"));
        }
    }
    if cp > 1 {
        push("CP", format!("{cp} ranks share the tokens of a sample"));
    }
    if candidate.zero.stage > 0 {
        let ranks = candidate.zero.ranks(candidate.mesh.data_ranks());
        push("ZeRO", format!("each of {ranks} ranks updates a part of their weights"));
    }
    if tp > 1 {
        push("TP", format!("{tp} ranks share every weight matrix"));
    }
    if candidate.sequence {
        push("SP", "between layers each of them holds a part of the tokens".to_owned());
    }
    if pp > 1 {
        let ends: Vec<String> = candidate.stage_ends.iter().map(usize::to_string).collect();
        let ends = ends.join(", ");
        let (chunks, schedule) = (candidate.stage_ends.len() / pp, candidate.schedule.name());
        push(
            "PP",
            match chunks {
                1 => format!("{pp} stages that end before calls {ends}, {schedule}"),
                _ => {
                    format!("{pp} stages of {chunks} chunks that end before calls {ends}, in turn")
                }
            },
        );
    }
    if kinds.is_empty() {
        kinds.push(("none".to_owned(), "one rank does everything".to_owned()));
    }
    let size = candidate.microbatch_size;
    kinds.push(("micro-batches".to_owned(), format!("{microbatches} of {size} samples a rank")));
    let recomputed = candidate.keeps.iter().filter(|k| **k == Keep::None).count();
    if recomputed > 0 {
        let layers = candidate.keeps.len();
        kinds
            .push(("recompute".to_owned(), format!("in {recomputed} of {layers} layer functions")));
    }
    kinds
}

/// The number that made this plan the best one: memory, where a faster plan does not fit; else the
/// part of the time that the fastest plan of another mesh or boundary pays more.
fn decided(best: &Scored, evaluated: &[Scored]) -> Option<String> {
    let faster = evaluated.iter().filter(|s| !s.fits() && s.time.seconds < best.time.seconds);
    if let Some(faster) = faster.min_by(|a, b| a.time.seconds.total_cmp(&b.time.seconds)) {
        let Scored { name, need, have, .. } = faster;
        let less = Seconds(best.time.seconds - faster.time.seconds);
        return Some(format!("memory: {name} takes {less} less, but needs {need} of {have}"));
    }
    let kind = |s: &Scored| (s.candidate.mesh, s.candidate.experts, s.candidate.sequence);
    let others = evaluated.iter().filter(|s| s.fits() && kind(s) != kind(best));
    let second = others.min_by(|a, b| a.time.seconds.total_cmp(&b.time.seconds))?;
    let (part, ours, theirs) = grown(best, second)?;
    let (ours, theirs) = (Seconds(ours), Seconds(theirs));
    let name = &second.name;
    Some(format!("{part}: {theirs} in {name}, the next best, and {ours} here"))
}

/// The part of a step that takes the most longer in another plan, with both times.
fn grown(best: &Scored, other: &Scored) -> Option<(&'static str, f64, f64)> {
    let parts = best.time.breakdown.parts().into_iter().zip(other.time.breakdown.parts());
    let grown = parts.map(|((name, ours), (_, theirs))| (name, ours, theirs));
    let most = grown.max_by(|a, b| (a.2 - a.1).total_cmp(&(b.2 - b.1)));
    most.filter(|(_, ours, theirs)| theirs > ours)
}

/// One alternative per other mesh and boundary, the fastest first.
fn alternatives(best: &Scored, evaluated: &[Scored]) -> Vec<Alternative> {
    let kind = |s: &Scored| {
        let Candidate { mesh, experts, sequence, .. } = s.candidate;
        (mesh, experts, sequence, s.fits())
    };
    let mut sorted: Vec<&Scored> = evaluated.iter().filter(|s| *s != best).collect();
    sorted.sort_by(|a, b| a.time.seconds.total_cmp(&b.time.seconds));
    let mut seen = vec![kind(best)];
    let mut chosen = Vec::new();
    for scored in sorted {
        if seen.contains(&kind(scored)) || chosen.len() == ALTERNATIVES {
            continue;
        }
        seen.push(kind(scored));
        chosen.push(Alternative {
            plan: scored.name.to_string(),
            step_time_s: scored.time.seconds,
            reason: reason(best, scored),
        });
    }
    chosen
}

fn reason(best: &Scored, other: &Scored) -> String {
    if !other.fits() {
        let short = kernels::Bytes(other.need.0 - other.have.0);
        return format!("does not fit: {short} too much");
    }
    match grown(best, other) {
        Some((name, ours, theirs)) => format!("{name} +{}", Seconds(theirs - ours)),
        None => "as fast".to_owned(),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Plan {}", self.plan)?;
        for (name, what) in &self.kinds {
            writeln!(f, "  {name:<14}{what}")?;
        }
        writeln!(f, "\nWhere a step goes ({}, {})", Seconds(self.step_time_s), self.origin)?;
        for (name, seconds) in self.breakdown.parts().iter().filter(|(_, s)| *s > 0.0) {
            let share = seconds / self.step_time_s;
            let bar = "█".repeat((share * BAR as f64).round() as usize);
            let line = format!(
                "  {name:<16}{:>10} {:>6.1}%  {bar}",
                Seconds(*seconds).to_string(),
                100.0 * share
            );
            writeln!(f, "{}", line.trim_end())?;
        }
        let (need, have) = (kernels::Bytes(self.need_bytes), kernels::Bytes(self.have_bytes));
        writeln!(f, "Memory {need} of {have}; what rank {} holds:", self.rank)?;
        for (name, bytes) in self.footprint.holders() {
            writeln!(f, "  {name:<16}{:>10}", bytes.to_string())?;
        }
        if let Some(decided) = &self.decided {
            writeln!(f, "\nDecided by {decided}")?;
        }
        if !self.alternatives.is_empty() {
            writeln!(f, "\nWhy not…")?;
        }
        let width = self.alternatives.iter().map(|a| a.plan.chars().count()).max().unwrap_or(0);
        for Alternative { plan, step_time_s, reason } in &self.alternatives {
            let more = step_time_s - self.step_time_s;
            let sign = if more < 0.0 { "-" } else { "+" };
            let more = format!("{sign}{}", Seconds(more.abs()));
            writeln!(f, "  {plan:<width$}  {more:>11}  {reason}")?;
        }
        let (all, out) = (self.candidate_count, self.bounded_out);
        writeln!(f, "\n{all} candidates, {out} ruled out by bounds, {} compiled", all - out)?;
        if self.gap > 0.0 {
            let percent = 100.0 * self.gap;
            writeln!(f, "at most {percent:.1} % slower than the fastest plan")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiled::search;
    use crate::compiled::tests::{cluster, job, module};

    #[test]
    fn a_plan_is_named_and_its_parts_sum_to_the_step() {
        let module = module(2);
        let cluster = cluster(1 << 30);
        let found = search(&job(&module, &cluster, 2)).unwrap();
        let explanation = explain(&found);
        let sum = explanation.breakdown.total();
        assert!((sum - explanation.step_time_s).abs() < 1e-9 * sum);
        let text = explanation.to_string();
        assert!(text.contains("Where a step goes") && text.contains("products"), "{text}");
        assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
    }
}
