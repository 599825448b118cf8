//! A search request for a workload on a cluster, and its result: the best configuration, other
//! configurations that were priced, and how far from the optimum the best can be.

use std::fmt;

use ir::{Axis, Diagnostic, Span};
use kernels::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::batches;
use super::branch_and_bound::{Aim, Budget, Counter, Explored, Leaf, Objective, Path, explore};
use super::decisions::SearchDomain;
use super::table::Tables;
use super::uniform::Space;
use crate::cluster::Power;
use crate::configuration::{Configuration, Place};
use crate::divisors::divisors;
use crate::estimate::workload::Workload;
use crate::estimate::{Estimate, Estimator, legal};
use crate::limits::cause::Cause;
use crate::limits::{Decision, Limits, memory_setting};
use crate::tools::{Form, Sizes, Target};

/// The budget of a search, unless the question says otherwise. Chosen: some seconds.
pub const EVALUATIONS_MAX: u64 = 4_000_000;
/// Doublings of the devices that are tried where nothing fits.
const DOUBLINGS: u32 = 10;
/// Configurations listed beside the best.
const LISTED: usize = 8;

/// What is asked.
pub struct SearchRequest<'a> {
    /// Prices steps of the workload on the cluster.
    pub estimator: &'a Estimator<'a>,
    /// Devices, all of which are used.
    pub devices: u32,
    /// Samples of a step.
    pub global_batch: u32,
    /// What the user fixes and forbids.
    pub limits: Limits,
    /// Objective to minimise.
    pub objective: Objective,
    /// What a device draws, where its energy is minimised in place of the time.
    pub power: Option<&'a Power>,
    /// How far the search may go.
    pub budget: Budget<'a>,
}

/// A configuration and what it costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Chosen {
    /// The configuration.
    pub configuration: Configuration,
    /// Its step.
    pub estimate: Estimate,
    /// Whether it fits.
    pub fits: bool,
}

/// What the search did.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Effort {
    /// Configurations of the space; one counts once, with all cuts of its layers into stages.
    pub total: u128,
    /// Configurations that were priced.
    pub evaluated: u64,
    /// Those of them that were priced beside the walk: ahead, to know soon what is fast, for the
    /// list of other meshes, and at further limits of memory. Most are among the others again.
    pub priced_ahead: u64,
    /// Configurations that cannot be better than the best.
    pub bounded_out: u128,
    /// Configurations that cannot fit.
    pub too_large: u128,
    /// Tables of prices that were made.
    pub tables: usize,
}

impl Effort {
    /// The effort of a search of a part of a domain that has `total` configurations.
    fn new(explored: &Explored, total: u128, tables: usize) -> Effort {
        Effort {
            total,
            evaluated: explored.evaluated + explored.scored_ahead,
            priced_ahead: explored.scored_ahead,
            // What is not searched for the least memory is never smaller.
            bounded_out: explored.bounded_out + (total - explored.total),
            too_large: explored.too_large,
            tables,
        }
    }
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SearchResult {
    /// The best; several where the objective is a frontier.
    pub best: Vec<Chosen>,
    /// The best that was looked at of other meshes, the best first.
    pub others: Vec<Chosen>,
    /// Of what was looked at, what would be faster and does not fit, the fastest first.
    pub misses: Vec<Chosen>,
    /// What the search did.
    pub space: Effort,
    /// Bytes that a device has for a job.
    pub have_bytes: f64,
    /// Lower bound on the seconds of a step over all plans of the domain and all their stage
    /// partitions. None where memory is minimised: then nothing is known about times.
    pub bound_s: Option<f64>,
    /// Optimality gap, `best / bound - 1`: the most by which the best plan's objective (seconds,
    /// joules or bytes) can be above the optimum. None where a search for little memory was cut
    /// off.
    pub gap: Option<f64>,
    /// Whether the search ended by itself.
    pub complete: bool,
}

impl SearchResult {
    /// What is known of one configuration where nothing was found beside it, of devices with so
    /// many bytes for a job.
    pub fn alone(chosen: Chosen, have_bytes: f64) -> SearchResult {
        let space = Effort {
            total: 1,
            evaluated: 1,
            priced_ahead: 0,
            bounded_out: 0,
            too_large: 0,
            tables: 1,
        };
        SearchResult {
            best: vec![chosen],
            others: Vec::new(),
            misses: Vec::new(),
            space,
            have_bytes,
            bound_s: None,
            gap: None,
            complete: true,
        }
    }
}

/// Whether anything is fixed to lie on a disk.
fn asks_for_disk(limits: &Limits) -> bool {
    let moved =
        [Decision::OffloadOptimizer, Decision::OffloadParameters, Decision::OffloadActivations];
    moved.into_iter().any(|decision| limits.fixed(decision) == Some(Place::Disk as usize))
}

impl SearchDomain {
    /// The frame of a workload.
    pub fn new(work: &Workload, devices: u32, global_batch: u32, limits: Limits) -> SearchDomain {
        SearchDomain {
            devices,
            global_batch,
            layers: work.depth(),
            heads: legal::tensor_units(work),
            seq: work.seq,
            experts: legal::expert_units(work),
            // Cluster files describe no disks: one is looked at where somebody asks for it.
            disk: asks_for_disk(&limits),
            all_cuts: false,
            sizes: Sizes::of(work),
            of_plans: limits.target().is_none(),
            uneven: limits.target().is_none_or(Target::takes_uneven_stages),
            limits,
        }
    }

    /// The part of the frame that holds an optimum: for the least memory, the smallest micro-batch
    /// and the schedule with the fewest of them in flight, wherever ranks are placed.
    pub(super) fn searched_for(mut self, objective: Objective) -> SearchDomain {
        self.all_cuts = objective == Objective::Time && self.uneven;
        if objective == Objective::Memory {
            for decision in [Decision::Mbs, Decision::Schedule, Decision::Vpp, Decision::Placement]
            {
                if self.limits.allow(decision, decision.without()) {
                    self.limits.fix(decision, decision.without());
                }
            }
        }
        self
    }
}

/// Answers a question.
///
/// # Errors
/// `E3203` when the limits leave nothing; `E3201` when nothing fits, with the arithmetic of the
/// smallest configuration and the nearest one that fits; `E3205` when the budget ended first.
pub fn search(question: &SearchRequest<'_>) -> Result<SearchResult, Vec<Diagnostic>> {
    let SearchRequest { estimator, devices, global_batch, limits, .. } = question;
    let domain = SearchDomain::new(estimator.workload(), *devices, *global_batch, limits.clone());
    let mut space = Space::new(estimator, domain.clone().searched_for(question.objective));
    space.power = question.power;
    space.only_fits = question.objective == Objective::Time;
    let have = estimator.memory_bytes;
    let aim = Aim { listed: LISTED, ..Aim::new(question.objective, have) };
    let mut explored = explore(&space, &space.another(), aim, &question.budget);
    let total = match question.objective {
        Objective::Time => explored.total,
        // A part of the space was searched.
        Objective::Memory => {
            Counter::default().count(&Space::new(estimator, domain), &Path::default())
        }
    };
    if total == 0 {
        return Err(vec![nothing_left(question)]);
    }
    let Some(mut best) = explored.best.filter(|best| best.score.bytes <= have) else {
        let found_none = if explored.complete { nothing_fits(question, total) } else { cut_off() };
        return Err(vec![found_none]);
    };
    let untried = space.finish(&mut explored.best, [have, f64::INFINITY], question.budget.stop);
    best = explored.best.unwrap_or(best);
    let chosen = |leaf: &Leaf| choose(&space, leaf, have);
    let list = |kind: usize| {
        let all = explored.kinds[kind].iter().take(LISTED).map(chosen);
        all.collect::<Result<Vec<_>, _>>()
    };
    let mut others = list(0)?;
    others.sort_by(|a, b| objective_value_of(&space, a).total_cmp(&objective_value_of(&space, b)));
    let mut best = chosen(&best)?;
    let first = others.first().filter(|_| question.objective == Objective::Time);
    if let Some(first) =
        first.filter(|other| objective_value_of(&space, other) < objective_value_of(&space, &best))
    {
        best = first.clone();
    }
    others.retain(|other| other.configuration != best.configuration);
    let mut misses = list(1)?;
    misses.retain(|miss| miss.estimate.step_time_s < best.estimate.step_time_s);
    // A device draws no more than when it is busy, so that joules bound seconds.
    let watts = question.power.map_or(1.0, |power| power.busy_w.value);
    let objective_value = objective_value_of(&space, &best);
    let bound = explored.bound_s.min(objective_value).min(untried);
    let is_time = question.objective == Objective::Time;
    Ok(SearchResult {
        others,
        misses,
        space: Effort::new(&explored, total, space.table_count()),
        have_bytes: have,
        bound_s: is_time.then_some(bound / watts),
        gap: match question.objective {
            Objective::Time => Some(objective_value / bound - 1.0),
            Objective::Memory => explored.complete.then_some(0.0),
        },
        complete: explored.complete,
        best: vec![best],
    })
}

fn objective_value_of(space: &Space<'_>, chosen: &Chosen) -> f64 {
    space.objective_value(chosen.estimate.step_time_s, chosen.estimate.busy_s)
}

fn choose(space: &Space<'_>, leaf: &Leaf, have: f64) -> Result<Chosen, Vec<Diagnostic>> {
    let (configuration, _) = space.configuration(&leaf.path, have);
    let estimate = space.estimator.estimate(&configuration)?;
    let fits = estimate.memory.total_bytes() <= have;
    Ok(Chosen { configuration, estimate, fits })
}

fn nothing_left(question: &SearchRequest<'_>) -> Diagnostic {
    let SearchRequest { estimator, devices, global_batch, limits, .. } = question;
    let work = estimator.workload();
    let domain = |samples, limits| SearchDomain::new(work, *devices, samples, limits);
    let near = |_, samples| batches::divides(&domain(samples, limits.clone()));
    let near = batches::told(&batches::nearest(*global_batch, 1, near));
    let near = near.map(|near| format!("use a batch of {near} samples"));
    let leaves_some = |limits: &Limits| {
        let space = Space::new(estimator, domain(*global_batch, limits.clone()));
        Counter::default().count(&space, &Path::default()) > 0
    };
    let counts = [*devices, *global_batch, work.depth()].map(divisors);
    let mut numbers: Vec<usize> = counts.into_iter().flatten().map(|n| n as usize).collect();
    numbers.push(0);
    numbers.sort_unstable();
    numbers.dedup();
    let cause = Cause::of(limits, &numbers, leaves_some);
    if let Some(refused) =
        refused_by_tool(limits, &cause, domain(*global_batch, limits.clone()).sizes)
        && leaves_some(&limits.clone().for_tool(None))
    {
        return refused;
    }
    let nothing = format!("no configuration of {devices} devices and {global_batch} samples");
    let told = cause.told(&nothing);
    let diagnostic = told.unwrap_or_else(|| {
        let headline = format!(
            "no configuration of {devices} devices divides a batch of {global_batch} samples"
        );
        Diagnostic::error("E3203", Span::of("--devices"), headline)
            .help("use another number of devices")
    });
    let help = near.into_iter().chain(diagnostic.help.clone()).collect::<Vec<_>>().join(", or ");
    diagnostic
        .help(help)
        .note("dp · tp · cp · pp is the number of devices, dp · mbs divides the batch")
        .note("tp divides the heads, ep the experts, and no stage is without a layer")
}

/// The diagnostic of what is fixed and the tool that is planned for cannot express.
fn refused_by_tool(limits: &Limits, cause: &Cause, sizes: Sizes) -> Option<Diagnostic> {
    let target = limits.target()?;
    let lost = target.refusals(&limits.named(), sizes, Form::Launch);
    if lost.is_empty() {
        return None;
    }
    let fixed: Vec<String> = cause.limits.iter().map(|limit| format!("`{limit}`")).collect();
    let headline = format!("`{target}` cannot express {}: {}", fixed.join(", "), lost.join(", "));
    let help = "leave one of them out, or plan without `--for-tool`";
    Some(Diagnostic::error("E3203", Span::of("--for-tool"), headline).help(help))
}

/// A search that ended before it had seen anything that fits: nothing is known.
pub(super) fn cut_off() -> Diagnostic {
    let headline = "the search was cut off before it found anything that fits";
    Diagnostic::error("E3205", Span::of(""), headline)
        .help("give it more time with `--budget`, or leave that out")
}

/// Says how far the smallest configuration is from fitting, why, and what would fit.
fn nothing_fits(question: &SearchRequest<'_>, total: u128) -> Diagnostic {
    let headline = format!("none of {total} configurations fits in memory");
    let mut diagnostic = Diagnostic::error("E3201", Span::of(""), headline);
    let have = question.estimator.memory_bytes;
    let smallest = extreme(question, &question.limits, Objective::Memory);
    if let Some(smallest) = &smallest {
        let memory = smallest.estimate.memory;
        let mut holders = memory.parts();
        holders.sort_by(|a, b| b.1.total_cmp(&a.1));
        let bytes = |bytes: f64| Bytes(bytes as u64);
        let need = memory.total_bytes();
        let short = bytes(need - have);
        let (need, have) = (bytes(need), bytes(have));
        let held = holders[..3].iter().map(|(name, n)| format!("{name} {}", bytes(*n)));
        let held = held.collect::<Vec<_>>().join(", ");
        let stage = memory.stage;
        diagnostic = diagnostic
            .note(format!(
                "smallest is {}: it needs {need} of {have}, {short} too much",
                smallest.configuration
            ))
            .note(format!("a device of stage {stage} holds {held}"));
    }
    let near = nearest_answers(question);
    let facts = json!({
        "have_bytes": have,
        "smallest": smallest.as_ref().map(told),
        "nearest": near.iter().map(Near::told).collect::<Vec<_>>(),
    });
    let near: Vec<String> = near.iter().map(Near::to_string).collect();
    let last = || "use devices with more memory".to_owned();
    diagnostic.help(if near.is_empty() { last() } else { near.join("; ") }).facts(facts)
}

/// A configuration for programs: what it needs, and the first of the ranks that need it.
fn told(chosen: &Chosen) -> Value {
    let Chosen { configuration: c, estimate, .. } = chosen;
    let memory = estimate.memory;
    json!({
        "text": c.to_string(),
        "stage": memory.stage,
        "rank": memory.stage as u64 * c.stride(Axis::Pp),
        "need_bytes": memory.total_bytes(),
        "memory": memory,
        "step_time_s": estimate.step_time_s,
    })
}

/// What fits once something is relaxed.
struct Near {
    /// What is relaxed: `without`, or `with`, and what.
    change: String,
    devices: u32,
    chosen: Chosen,
}

impl Near {
    fn told(&self) -> Value {
        let mut told = told(&self.chosen);
        told["change"] = json!(self.change);
        told["devices"] = json!(self.devices);
        told
    }
}

impl fmt::Display for Near {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} this fits: {}", self.change, self.chosen.configuration)
    }
}

/// What programs hold more than the closed form expects: of 95 in a hundred 3 % at most, as the
/// end-to-end tests of footprints measure; of zero-bubble schedules 5 % in models with many words.
const PROGRAM_EXCESS: f64 = 0.06;

/// The limit of memory that a program is within whose memory is expected to be `bytes`, as a flag:
/// rounded up to quarters of a GiB.
pub(super) fn enough(bytes: f64) -> String {
    let quarter = f64::from(1u32 << 28);
    memory_setting(((bytes * (1.0 + PROGRAM_EXCESS) / quarter).ceil() * quarter) as u64)
}

/// Relaxations under which something fits, each with it: more memory, where that is limited;
/// fewer limits of decisions; all there is; or else more devices.
fn nearest_answers(question: &SearchRequest<'_>) -> Vec<Near> {
    let SearchRequest { devices, limits, estimator, .. } = question;
    let decisions = limits.without_memory();
    let whole = (*estimator).clone().limited(None);
    let free = SearchRequest { estimator: &whole, limits: limits.clone(), ..*question };
    let mut near = Vec::new();
    if limits.memory_bytes().is_some()
        && let Some(smallest) = extreme(&free, &decisions, Objective::Memory)
        && smallest.fits
    {
        let need = enough(smallest.estimate.memory.total_bytes());
        near.push(Near { change: format!("with `{need}`"), devices: *devices, chosen: smallest });
    }
    let none = limits.released();
    // Where a plan is the fastest that is expected to fit, its program may need some more.
    let spare_bytes = estimator.memory_bytes / (1.0 + PROGRAM_EXCESS);
    let spare = (*estimator).clone().limited(Some(spare_bytes));
    let spare = SearchRequest { estimator: &spare, limits: limits.clone(), ..*question };
    if !decisions.is_empty()
        && let Some(found) = extreme(&spare, &none, Objective::Time)
    {
        let change = format!("without `{decisions}`");
        near.push(Near { change, devices: *devices, chosen: found });
    }
    if near.is_empty()
        && limits.memory_bytes().is_some()
        && let Some(found) = extreme(&free, &none, Objective::Time)
    {
        near.push(Near { change: format!("without `{limits}`"), devices: *devices, chosen: found });
    }
    if near.is_empty()
        && let Some((more, found)) = fewest_more(question)
    {
        let change = format!("with {more} devices");
        near.push(Near { change, devices: more, chosen: found });
    }
    near
}

/// The fewest more devices on which something fits, of doublings and of eighths between two of
/// them, with the fastest configuration there.
fn fewest_more(question: &SearchRequest<'_>) -> Option<(u32, Chosen)> {
    let on = |devices: u32, objective: Objective| {
        let estimator = &question.estimator.on_devices(devices.into());
        let limits = question.limits.clone();
        let asked = SearchRequest { estimator, devices, limits, ..*question };
        extreme(&asked, &asked.limits, objective)
    };
    // The search for the least memory is the shorter one, and says whether anything fits.
    let fits = |devices: &u32| on(*devices, Objective::Memory).is_some_and(|least| least.fits);
    let mut doublings = (1..=DOUBLINGS).map_while(|n| question.devices.checked_mul(1 << n));
    let mut fewest = doublings.find(fits)?;
    if fewest.is_multiple_of(8) {
        let eighth = fewest / 8;
        let mut eighths = 5..8_u32;
        while !eighths.is_empty() {
            let middle = eighths.start.midpoint(eighths.end - 1);
            match fits(&(middle * eighth)) {
                true => (fewest, eighths.end) = (middle * eighth, middle),
                false => eighths.start = middle + 1,
            }
        }
    }
    Some((fewest, on(fewest, Objective::Time)?))
}

/// The best configuration that fits, if it is worth less than `below`: seconds, or joules of a
/// device where the question says what it draws. Nothing else is found out.
pub fn best_below(question: &SearchRequest<'_>, below: f64) -> Option<Chosen> {
    best_with(question, &Tables::default(), below)
}

/// The best configuration that fits, if its objective value is less than `below`, with the price
/// tables of other requests for the same devices.
pub(super) fn best_with(
    question: &SearchRequest<'_>,
    tables: &Tables,
    below: f64,
) -> Option<Chosen> {
    let SearchRequest { estimator, devices, global_batch, limits, power, .. } = question;
    let domain = SearchDomain::new(estimator.workload(), *devices, *global_batch, limits.clone());
    let mut space = Space::with(estimator, domain.searched_for(Objective::Time), tables);
    (space.power, space.only_fits) = (*power, true);
    extreme_of(&space, Objective::Time, &question.budget, below).0
}

/// The smallest configuration, with the price tables of other requests for the same devices.
pub(super) fn smallest_with(question: &SearchRequest<'_>, tables: &Tables) -> Option<Chosen> {
    let SearchRequest { estimator, devices, global_batch, limits, .. } = question;
    let domain = SearchDomain::new(estimator.workload(), *devices, *global_batch, limits.clone());
    let space = Space::with(estimator, domain.searched_for(Objective::Memory), tables);
    extreme_of(&space, Objective::Memory, &question.budget, f64::INFINITY).0
}

/// The fastest configuration that fits, or the smallest one.
fn extreme(question: &SearchRequest<'_>, limits: &Limits, objective: Objective) -> Option<Chosen> {
    let SearchRequest { estimator, devices, global_batch, .. } = *question;
    let domain = SearchDomain::new(estimator.workload(), devices, global_batch, limits.clone());
    let mut space = Space::new(estimator, domain.searched_for(objective));
    space.only_fits = objective == Objective::Time;
    let budget = Budget { evaluations_max: EVALUATIONS_MAX, ..question.budget };
    extreme_of(&space, objective, &budget, f64::INFINITY).0
}

/// The fastest configuration of a space that fits, if that takes less than `below_s`, or the
/// smallest one; and whether the search ended by itself.
pub(super) fn extreme_of(
    space: &Space<'_>,
    objective: Objective,
    budget: &Budget<'_>,
    below_s: f64,
) -> (Option<Chosen>, bool) {
    let have = space.estimator.memory_bytes;
    let aim = Aim { below_s, ..Aim::new(objective, have) };
    let mut explored = explore(space, &space.another(), aim, budget);
    let mut complete = explored.complete;
    if objective == Objective::Time {
        let untried = space.finish(&mut explored.best, [have, below_s], budget.stop);
        let below = explored.best.map_or(below_s, |best| best.score.seconds);
        complete &= untried >= below;
    }
    let best = explored.best.and_then(|leaf| choose(space, &leaf, have).ok());
    let found = best.filter(|found| found.fits || objective == Objective::Memory);
    (found, complete)
}
