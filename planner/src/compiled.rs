//! The search for plans on the ranks of CPUs: every mesh, sequence parallelism, micro-batch, keep
//! set and stage partition, compiled, so that times and bytes are those of the programs.
//!
//! Candidates wait in a queue, ordered by a lower bound of their step time, which is made of the
//! prices of the routines that the programs will hold. The first of the queue is simulated from the
//! same prices, and goes back with that time. If it comes first again, it is compiled: its arena is
//! known then, and its programs are simulated. The search ends when no time in the queue is below
//! the best one, so that the answer is that of an exhaustive search, and each distinct layer is
//! compiled once. Of every other mesh the most promising candidate is compiled too, for why-nots.

mod keys;
mod candidate;
mod bound;
mod candidates;
mod layers;
mod pricer;
mod ranks;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeSet;

use ir::lora::Lora;
use ir::plan::{ContextForm, FunctionPlan, Keep, Offload, Optimizer, Prediction, Purpose};
use ir::precision::Precision;
use ir::{Diagnostic, ExpertParallel, Mesh, Module, Plan, Span};
use kernels::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::cluster::{Cluster, Memory};
use crate::divisors::divisors;
use crate::elaborate::Name;
use crate::footprint::Footprint;
use crate::limits::cause::Cause;
use crate::limits::{Decision, Limits};
use crate::price::Prices;
use crate::simulate::StepTime;

use bound::Bound;
pub use candidate::Candidate;
pub use candidates::ways_to_share;
use candidates::{candidates, has_candidates, offloads};
use layers::LayerTable;
pub use ranks::Usable;

/// The part by which a bound may exceed a time that is equal but for rounding.
const ROUNDING: f64 = 1e-9;
/// Candidates that are compiled for each relaxation when nothing fits. Chosen: an answer in
/// seconds.
const NEAREST_EVALUATIONS: usize = 16;
/// Meshes and boundaries of which a candidate is compiled in any case, with those that were.
/// Chosen: more than a page shows.
const KINDS_MAX: usize = 16;
/// Candidates of another mesh or boundary that are timed at most before one of them is compiled.
/// Chosen: in models of a dozen layers the fastest one is among them.
const PROMISING: usize = 64;
/// Candidates of which values lie elsewhere that are timed at most, each of which is compiled.
/// Chosen: a second or two, for jobs that lack memory.
const OFFLOADED_MAX: usize = 64;

/// What a plan is wanted for.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// The prepared module: composites without kernels inlined, gradient functions there.
    pub module: &'a Module,
    /// The entry.
    pub entry: &'a str,
    /// The model's name.
    pub model: String,
    /// The cluster.
    pub cluster: &'a Cluster,
    /// The ranks, all of which are used.
    pub ranks: usize,
    /// Samples of a step.
    pub global_batch_size: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// The element types, which the module has.
    pub precision: Precision,
    /// The update.
    pub optimizer: Optimizer,
    /// The norm to which gradients are clipped.
    pub clip: Option<f64>,
    /// The adapters that are trained in place of the model: the module has them.
    pub lora: Option<Lora>,
    /// What the user fixes and forbids.
    pub limits: Limits,
    /// Candidates that are compiled at most.
    pub evaluations_max: usize,
}

impl Job<'_> {
    /// The bytes that ranks, or nodes that ranks share, have for the job.
    pub fn memory(&self) -> Memory {
        self.cluster.memory().limited(self.limits.memory_bytes())
    }
}

/// A candidate that was compiled and simulated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scored {
    /// The candidate.
    pub candidate: Candidate,
    /// The name of its plan, with the number of decisions that the name does not say, but for
    /// shardings.
    pub name: Name,
    /// The time of a step.
    pub time: StepTime,
    /// The bytes of each class of ranks.
    pub footprints: Vec<Footprint>,
    /// The bytes of the fullest place.
    pub need: Bytes,
    /// The bytes that it has.
    pub have: Bytes,
}

impl Scored {
    /// Whether it fits.
    pub fn fits(&self) -> bool {
        self.need <= self.have
    }
}

/// The best plan, and how it was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The plan, with predictions.
    pub plan: Plan,
    /// How it was scored.
    pub best: Scored,
    /// All candidates that were compiled, in the order in which they were.
    pub evaluated: Vec<Scored>,
    /// All candidates.
    pub candidate_count: usize,
    /// Candidates that could not be better than the best, or cannot fit.
    pub bounded_out: usize,
    /// A lower bound of the time of every candidate that was not compiled, when any was not.
    pub bound_s: Option<f64>,
    /// Whether all candidates were compiled or bounded out.
    pub complete: bool,
    /// Layers in which the sharding search left out states.
    pub capped: Vec<String>,
}

/// Finds the fastest plan that fits.
///
/// # Errors
/// `E3201` when nothing fits, with the arithmetic of the closest candidate and the nearest answer;
/// `E3203` when the limits leave no candidate; `E3204` when the model cannot use the ranks; what
/// sharding and compiling report.
///
/// # Determinism
/// The same job gives the same plan: candidates are ordered by time and then as enumerated.
pub fn search(job: &Job<'_>) -> Result<Found, Diagnostic> {
    let attempt = attempt(job)?;
    match attempt.best {
        Some(best) => attempt.found(job, best),
        None => Err(nothing_fits(job, &attempt)),
    }
}

/// Candidates of one kind differ in more than numbers.
fn kind(c: &Candidate) -> (Mesh, ExpertParallel, bool) {
    (c.mesh, c.experts, c.sequence)
}

/// A search as far as it went.
struct Attempt<'a> {
    table: LayerTable<'a>,
    evaluated: Vec<Scored>,
    best: Option<usize>,
    candidate_count: usize,
    bounded_out: usize,
    bound_s: Option<f64>,
    complete: bool,
}

/// Candidates in line: the seconds by their bits, which sort as they do; the place among all
/// candidates; and whether the seconds are those of the candidate or a bound of them.
type Line = BTreeSet<(u64, usize, bool)>;

fn attempt<'a>(job: &'a Job<'a>) -> Result<Attempt<'a>, Diagnostic> {
    let mut table = LayerTable::new(job)?;
    let [first, others] = offloads(job);
    let (all, failed) = candidates(job, &mut table, &first)?;
    if all.is_empty() {
        return Err(failed.unwrap_or_else(|| no_candidates(job)));
    }
    let mut attempt = Attempt {
        table,
        evaluated: Vec::new(),
        best: None,
        candidate_count: 0,
        bounded_out: 0,
        bound_s: None,
        complete: true,
    };
    let is_moved = first.iter().all(|offload| *offload != Offload::default());
    if is_moved {
        attempt.evaluate_offloaded(&all)?;
    }
    let line = if is_moved { Line::new() } else { attempt.evaluate_in_order(&all)? };
    if attempt.evaluated.is_empty() {
        // Nothing to show: the candidate that comes closest, and that keeps the least.
        let size = |(c, b): &&(Candidate, Bound)| (b.need, c.keeps.clone(), c.microbatch_size);
        let smallest = all.iter().min_by_key(size);
        attempt.evaluate(&smallest.expect("there are candidates").0)?;
    } else {
        attempt.evaluate_other_kinds(&all, &line)?;
    }
    let best_s = attempt.best_s();
    // Whether a faster plan lacks memory, by its bound or compiled.
    let cannot_fit = |(_, bound): &(_, Bound)| !bound.fits() && bound.seconds < best_s;
    let is_oversized = |scored: &Scored| !scored.fits() && scored.time.seconds < best_s;
    if all.iter().any(cannot_fit) || attempt.evaluated.iter().any(is_oversized) {
        let (others, _) = candidates(job, &mut attempt.table, &others)?;
        attempt.evaluate_offloaded(&others)?;
    }
    attempt.bounded_out = attempt.candidate_count.saturating_sub(attempt.evaluated.len());
    Ok(attempt)
}

impl Attempt<'_> {
    fn best_s(&self) -> f64 {
        self.best.map_or(f64::INFINITY, |at| self.evaluated[at].time.seconds)
    }

    /// Compiles those of some candidates that may fit and be the fastest, the most promising ones
    /// first. Those that are left.
    fn evaluate_in_order(&mut self, all: &[(Candidate, Bound)]) -> Result<Line, Diagnostic> {
        self.candidate_count += all.len();
        let in_line = |(at, (_, bound)): (usize, &(_, Bound))| (bound.seconds.to_bits(), at, false);
        let line = all.iter().enumerate().filter(|(_, (_, bound))| bound.fits());
        let mut line: Line = line.map(in_line).collect();
        while let Some(first) = line.pop_first() {
            let (bits, at, is_exact) = first;
            let seconds = f64::from_bits(bits);
            let beaten = self.best_s() <= seconds * (1.0 - ROUNDING);
            if beaten || self.is_over() {
                self.complete &= beaten;
                self.bound_at(seconds);
                line.insert(first);
                break;
            }
            if is_exact {
                self.evaluate(&all[at].0)?;
            } else {
                line.insert((self.table.seconds(&all[at].0)?.to_bits(), at, true));
            }
        }
        line.extend(all.iter().enumerate().filter(|(_, (_, bound))| !bound.fits()).map(in_line));
        Ok(line)
    }

    /// Whether as many candidates were compiled as the job allows.
    fn is_over(&self) -> bool {
        self.evaluated.len() >= self.table.job().evaluations_max
    }

    /// Notes the bound of candidates that are not compiled.
    fn bound_at(&mut self, seconds: f64) {
        self.bound_s = Some(self.bound_s.map_or(seconds, |other| other.min(seconds)));
    }

    /// Compiles candidates with offloaded values: while nothing fits, the one of each mesh and
    /// boundary that needs the least; then the most promising ones. What does not fit tells of all
    /// that hold as much.
    fn evaluate_offloaded(&mut self, all: &[(Candidate, Bound)]) -> Result<(), Diagnostic> {
        self.candidate_count += all.len();
        let mut left: Vec<usize> = (0..all.len()).filter(|at| all[*at].1.fits()).collect();
        let (mut oversized, mut looked_at) = (Vec::new(), BTreeSet::new());
        if self.best.is_none() {
            let size =
                |at: &usize| (all[*at].1.need, &all[*at].0.keeps, all[*at].0.microbatch_size);
            left.sort_by_key(size);
            let mut seen = BTreeSet::new();
            let smallest: Vec<usize> = left
                .iter()
                .copied()
                .filter(|at| seen.len() < KINDS_MAX && seen.insert(kind(&all[*at].0)))
                .collect();
            for at in smallest {
                if self.best.is_some() {
                    break;
                }
                looked_at.insert(at);
                if !self.evaluate(&all[at].0)? {
                    oversized.push(at);
                }
            }
        }
        left.sort_by_key(|at| (all[*at].1.seconds.to_bits(), *at));
        let mut compiled = 0;
        for at in left {
            let (candidate, bound) = &all[at];
            let is_part_of = |other: &usize| all[*other].0.is_part_of(candidate);
            if looked_at.contains(&at) || oversized.iter().any(is_part_of) {
                continue;
            }
            let beaten = self.best_s() <= bound.seconds * (1.0 - ROUNDING);
            if beaten || self.is_over() || compiled == OFFLOADED_MAX {
                self.complete &= beaten;
                self.bound_at(bound.seconds);
                break;
            }
            compiled += 1;
            if !self.evaluate(candidate)? {
                oversized.push(at);
            }
        }
        Ok(())
    }

    /// Compiles a candidate; whether it fits.
    fn evaluate(&mut self, candidate: &Candidate) -> Result<bool, Diagnostic> {
        let scored = self.table.score_candidate(candidate)?;
        let fits = scored.fits();
        if fits && scored.time.seconds < self.best_s() {
            self.best = Some(self.evaluated.len());
        }
        self.evaluated.push(scored);
        Ok(fits)
    }

    /// Of each mesh and boundary that nothing was compiled of, compiles the fastest of the most
    /// promising candidates.
    fn evaluate_other_kinds(
        &mut self,
        all: &[(Candidate, Bound)],
        line: &Line,
    ) -> Result<(), Diagnostic> {
        let mut seen: BTreeSet<_> = self.evaluated.iter().map(|s| kind(&s.candidate)).collect();
        // What more memory would buy.
        let faster = |bound: &Bound| !bound.fits() && bound.seconds < self.best_s();
        if let Some((_, at, _)) = line.iter().find(|(_, at, _)| faster(&all[*at].1)) {
            let candidate = &all[*at].0;
            seen.insert(kind(candidate));
            self.evaluate(candidate)?;
        }
        // The times of those whose ranks share gradients are known once they are compiled: where
        // there are others of the kind, one of these is named.
        let is_quick = |c: &Candidate| c.zero.stage < 2;
        let quick: BTreeSet<_> = line
            .iter()
            .map(|waiting| &all[waiting.1].0)
            .filter(|c| is_quick(c))
            .map(kind)
            .collect();
        let mut lines: Vec<(_, Line)> = Vec::new();
        for waiting in line {
            let candidate = &all[waiting.1].0;
            let of = kind(candidate);
            if !is_quick(candidate) && quick.contains(&of) {
                continue;
            }
            match lines.iter_mut().find(|(known, _)| *known == of) {
                Some((_, line)) => _ = line.insert(*waiting),
                None if seen.len() < KINDS_MAX && seen.insert(of) => {
                    lines.push((of, Line::from([*waiting])));
                }
                None => {}
            }
        }
        for (_, mut line) in lines {
            let mut timed = 0;
            while let Some((_, at, is_exact)) = line.pop_first() {
                let candidate = &all[at].0;
                if is_exact {
                    self.evaluate(candidate)?;
                    break;
                }
                line.insert((self.table.seconds(candidate)?.to_bits(), at, true));
                timed += 1;
                if timed == PROMISING {
                    line.retain(|(_, _, is_exact)| *is_exact);
                }
            }
        }
        Ok(())
    }

    fn found(mut self, job: &Job<'_>, best: usize) -> Result<Found, Diagnostic> {
        let best = self.evaluated[best].clone();
        let mut plan = self.table.plan(&best.candidate)?;
        predict(&mut plan, job, &best);
        let bound_s = self.bound_s.map(|bound_s| bound_s.min(best.time.seconds));
        Ok(Found {
            plan,
            best,
            capped: self.table.capped(),
            evaluated: self.evaluated,
            candidate_count: self.candidate_count,
            bounded_out: self.bounded_out,
            bound_s,
            complete: self.complete,
        })
    }
}

/// Scores a given plan against the search: the result is that plan, and its bound is the time of
/// the fastest plan.
///
/// # Errors
/// Those of [`search`] except `E3201`; `E2002` when the plan does not fit the module.
pub fn judge(job: &Job<'_>, plan: &Plan) -> Result<Found, Diagnostic> {
    let mut attempt = attempt(job)?;
    let candidate = attempt.table.candidate_of(plan);
    let best = attempt.table.score(plan, &candidate)?;
    let fastest = attempt.bound_s.unwrap_or(f64::INFINITY).min(attempt.best_s());
    let mut plan = plan.clone();
    predict(&mut plan, job, &best);
    Ok(Found {
        plan,
        bound_s: Some(fastest.min(best.time.seconds)),
        best,
        capped: attempt.table.capped(),
        evaluated: attempt.evaluated,
        candidate_count: attempt.candidate_count,
        bounded_out: attempt.bounded_out,
        complete: false,
    })
}

/// A plan that was made for another cluster, with what is predicted of it on that of a job.
///
/// # Errors
/// `E2002` when the plan does not fit the module.
pub fn predicted(job: &Job<'_>, plan: &Plan) -> Result<Plan, Diagnostic> {
    let mut table = LayerTable::new(job)?;
    let candidate = table.candidate_of(plan);
    let scored = table.score(plan, &candidate)?;
    let (cluster, predictions) = (job.cluster.describe(), Default::default());
    let mut plan = Plan { cluster, predictions, ..plan.clone() };
    predict(&mut plan, job, &scored);
    Ok(plan)
}

/// Scores plans of a job, which share what is compiled for them.
pub struct Scorer<'a>(LayerTable<'a>);

impl<'a> Scorer<'a> {
    /// A scorer of a job.
    ///
    /// # Errors
    /// `E2001` when the entry is no list of calls.
    pub fn new(job: &'a Job<'a>) -> Result<Scorer<'a>, Diagnostic> {
        Ok(Scorer(LayerTable::new(job)?))
    }

    /// Scores the first candidate that limits of the job leave, whether it fits or not.
    ///
    /// # Errors
    /// Those of [`search`] except `E3201`.
    pub fn first(&mut self, limits: &Limits) -> Result<Scored, Diagnostic> {
        let job = Job { limits: limits.clone(), ..self.0.job().clone() };
        let [usual, _] = offloads(&job);
        let (all, failed) = candidates(&job, &mut self.0, &usual)?;
        let Some((candidate, _)) = all.first() else {
            return Err(failed.unwrap_or_else(|| no_candidates(&job)));
        };
        self.0.score_candidate(candidate)
    }

    /// The time and the memory of a plan that someone else made.
    ///
    /// # Errors
    /// `E2002` when the plan does not fit the module.
    pub fn score(&mut self, plan: &Plan, candidate: &Candidate) -> Result<Scored, Diagnostic> {
        self.0.score(plan, candidate)
    }
}

/// Writes into a plan what is predicted of it.
pub fn predict(plan: &mut Plan, job: &Job<'_>, scored: &Scored) {
    let origin = Prices::new(job.cluster, plan.mesh).origin().name();
    let tokens = (job.global_batch_size * job.seq) as f64;
    let arena = scored.footprints.iter().map(|f| f.arena).max().unwrap_or(0);
    let [low, high] = Prices::new(job.cluster, plan.mesh).interval(scored.time.seconds);
    let mut numbers = vec![
        ("step_time_s", scored.time.seconds, origin),
        ("step_time_low_s", low, origin),
        ("step_time_high_s", high, origin),
        ("tokens_per_s", tokens / scored.time.seconds, origin),
        ("arena_bytes", arena as f64, "derived"),
    ];
    let parts = scored.time.breakdown.parts();
    let named: Vec<(String, f64)> = parts
        .iter()
        .map(|(name, seconds)| (format!("{}_s", name.replace(' ', "_")), *seconds))
        .collect();
    numbers.extend(named.iter().map(|(name, seconds)| (name.as_str(), *seconds, origin)));
    for (name, value, origin) in numbers {
        let prediction = Prediction { value, origin: origin.to_owned() };
        plan.predictions.insert(name.to_owned(), prediction);
    }
}

/// A plan of the decisions that a candidate names.
fn assemble(
    job: &Job<'_>,
    candidate: &Candidate,
    functions: impl IntoIterator<Item = (String, FunctionPlan)>,
) -> Plan {
    let mesh = candidate.mesh;
    Plan {
        model: job.model.clone(),
        cluster: job.cluster.describe(),
        target: job.cluster.target(),
        mesh,
        microbatch_size: candidate.microbatch_size,
        microbatch_count: job.global_batch_size / mesh.dp / candidate.microbatch_size,
        seq: job.seq,
        purpose: Purpose::Training,
        precision: job.precision,
        schedule: candidate.schedule,
        stage_ends: candidate.stage_ends.clone(),
        context: ContextForm::default(),
        experts: candidate.experts,
        zero: candidate.zero,
        offload: candidate.offload,
        optimizer: job.optimizer,
        clip: job.clip,
        lora: job.lora.clone(),
        functions: functions
            .into_iter()
            .map(|(name, f)| (name, f.on_besides(mesh, candidate.experts)))
            .collect(),
        predictions: Default::default(),
    }
}

fn no_candidates(job: &Job<'_>) -> Diagnostic {
    let Job { ranks, global_batch_size: samples, .. } = job;
    let leaves_some =
        |limits: &Limits| has_candidates(&Job { limits: limits.clone(), ..job.clone() });
    let mut numbers = [divisors(*ranks), divisors(*samples)].concat();
    numbers.sort_unstable();
    numbers.dedup();
    let cause = Cause::of(&job.limits, &numbers, leaves_some);
    let told = cause.told(&format!("no mesh of {ranks} ranks for {samples} samples"));
    let diagnostic = told.unwrap_or_else(|| {
        let headline = format!("no mesh of {ranks} ranks divides a batch of {samples} samples");
        Diagnostic::error("E3203", Span::of("--ranks"), headline)
            .help("use a batch that is a multiple of the number of ranks")
    });
    let mut diagnostic =
        diagnostic.note("pp · dp · cp · tp is the number of ranks, and dp · mbs divides the batch");
    if job.limits.fixed(Decision::Zero).is_some_and(|stage| stage > 0) {
        diagnostic =
            diagnostic.note("zero is 1, 2 or 3 where dp · cp > 1, and weights are updated");
    }
    if job.limits.fixed(Decision::Ep).is_some_and(|ranks| ranks > 1) {
        diagnostic = diagnostic
            .note("ep divides dp · cp and the experts of each layer, and is a multiple of cp")
            .note("with etp=1 and sp, so does ep / tp; ranks of tp have equally many tokens");
    }
    match job.limits.fixed(Decision::Vpp).is_some_and(|chunks| chunks > 1) {
        true => diagnostic.note("with vpp, pp divides the micro-batches, and pp · vpp are calls"),
        false => diagnostic,
    }
}

/// Says how far the closest candidate is from fitting, why, and what would fit.
fn nothing_fits(job: &Job<'_>, attempt: &Attempt<'_>) -> Diagnostic {
    let (all, compiled) = (attempt.candidate_count, attempt.evaluated.len());
    let headline = match attempt.complete {
        true => format!("none of {all} plans fits in memory"),
        false => format!("none of {compiled} plans that were compiled, of {all}, fits in memory"),
    };
    let mut diagnostic = Diagnostic::error("E3201", Span::of(""), headline);
    let mut facts = json!({"smallest": null, "nearest": []});
    let over = |s: &&Scored| s.need.0.saturating_sub(s.have.0);
    if let Some(closest) = attempt.evaluated.iter().min_by_key(over) {
        let classes = closest.footprints.iter().enumerate();
        let (class, most) = classes.max_by_key(|(_, f)| f.total()).expect("a plan has a rank");
        let rank = closest.candidate.mesh.first_of_class(class);
        let holders = most.holders();
        let largest: Vec<String> =
            holders.iter().take(3).map(|(name, bytes)| format!("{name} {bytes}")).collect();
        let short = Bytes(over(&closest));
        let Scored { name, need, have, .. } = closest;
        let memory: Map<String, Value> =
            holders.iter().map(|(name, bytes)| ((*name).to_owned(), json!(bytes.0))).collect();
        facts["have_bytes"] = json!(have.0);
        facts["smallest"] = json!({
            "text": name.to_string(),
            "rank": rank,
            "need_bytes": need.0,
            "memory": memory,
            "step_time_s": closest.time.seconds,
        });
        diagnostic = diagnostic
            .note(format!("closest is {name}: it needs {need} of {have}, {short} too much"))
            .note(format!("rank {rank} holds {}: {}", Bytes(most.total()), largest.join(", ")));
    }
    let near = nearest_answer(job);
    let told = |near: &(String, usize, String)| {
        let (change, ranks, text) = near;
        json!({"change": change, "devices": ranks, "text": text})
    };
    facts["nearest"] = near.iter().map(told).collect();
    let smaller = || "use a smaller model, sequence or batch, or more memory".to_owned();
    let help = near.map(|(change, _, text)| format!("{change} this fits: {text}"));
    diagnostic.help(help.unwrap_or_else(smaller)).facts(facts)
}

/// The first of a few relaxations under which something fits: what it is, the ranks, and the plan.
fn nearest_answer(job: &Job<'_>) -> Option<(String, usize, String)> {
    let answer = |job: &Job<'_>| {
        let attempt = attempt(job).ok()?;
        attempt.best.map(|best| attempt.evaluated[best].name.to_string())
    };
    let evaluations_max = NEAREST_EVALUATIONS.min(job.evaluations_max);
    if !job.limits.is_empty() {
        let free = Job { limits: Limits::default(), evaluations_max, ..job.clone() };
        if let Some(candidate) = answer(&free) {
            return Some((format!("without `{}`", job.limits), job.ranks, candidate));
        }
    }
    let mut ranks = 2 * job.ranks;
    while job.cluster.devices().is_some_and(|devices| ranks <= devices) {
        let more = Job { ranks, limits: Limits::default(), evaluations_max, ..job.clone() };
        if let Some(candidate) = answer(&more) {
            return Some((format!("with {ranks} ranks"), ranks, candidate));
        }
        ranks *= 2;
    }
    None
}

/// Whether a decision is allowed.
fn allows(job: &Job<'_>, decision: Decision, number: usize) -> bool {
    job.limits.allow(decision, number)
}

/// How a keep set counts as a limit.
fn keep_number(keep: Keep) -> usize {
    match keep {
        Keep::None => 0,
        Keep::Full => 1,
        Keep::AllButAttention => 2,
    }
}
