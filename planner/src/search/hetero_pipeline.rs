//! A pipeline over groups of other devices each: some stages on one group, some on the next, with
//! as many layers as each has time for.
//!
//! All groups have as many copies of the pipeline, micro-batches as large, and sequences cut over
//! as many ranks; what else a group does is its own: the ranks that share a layer, and so how many
//! stages it has. Only activations cross from one group to the next: copies of a stage, which share
//! the shards of its states, gradients or weights, are on one group. Schedules are 1F1B; no offload
//! is tried.
//!
//! Candidates are looked at in the order of a bound of their steps. With `Tᵢ` seconds of all layers
//! on one stage's devices, no cut has a slowest stage faster than `t = 1 / Σ 1/Tᵢ`, and all stages
//! together take the least `T` at least. The slowest stage s, which works on m micro-batches, waits
//! for the stages before it and for those after it, so that a step takes at least `Σ_{i<s} + m t`
//! and `T + Σ_{i>s} + (m − p + s) t`; as no stage is slower, the latter is `2T + (m − p − 1) t` or
//! more where m > p.
//!
//! Where a candidate has few cuts of its layers, all are tried; where it has many, the one whose
//! slowest stage is fastest, and those that moving single layers from there leads to.

use std::collections::BTreeMap;
use std::rc::Rc;

use ir::Diagnostic;
use serde::Serialize;

use self::pace::{Seconds, bottleneck_s, least_s, likeness};
use super::branch_and_bound::ROUNDING;
use super::decisions::{SearchDomain, may_cut_sequence};
use super::groups::{GROUPS_MAX, GroupRequest};
use super::stage_partition::moves;
use crate::configuration::{Configuration, Recompute, Schedule, Zero};
use crate::divisors::{divisors, gcd};
use crate::estimate::Estimator;
use crate::estimate::line::{self, LineStep, Section};
use crate::estimate::price::{Inside, LayerPrice, Prices};
use crate::estimate::step::Breakdown;
use crate::limits::Decision;

mod given;
mod pace;
#[cfg(test)]
pub(crate) mod tests;

pub(super) use given::score;

/// Cuts of the layers that are all tried. Chosen: some milliseconds.
const CUTS_MAX: u64 = 400;
/// How much slower than the best so far a balanced cut may be to have its layers moved. Chosen.
const NEAR: f64 = 1.2;
/// Candidates that are kept, those with the least bounds. Chosen: some megabytes.
const CANDIDATES_MAX: usize = 20_000;
/// Stages that are priced at most. Chosen: some seconds.
const WORK_MAX: u64 = 8_000_000;
/// Stages that are priced at most to move the layers of one candidate. Chosen: some milliseconds.
const MOVES_MAX: u64 = 50_000;
/// Stages beyond which layers move between neighbours alone. Chosen: as for [`MOVES_MAX`].
const ALL_PAIRS_MAX: usize = 16;
/// Orders of groups that are looked at, at most: all of six groups. Chosen: each takes some
/// milliseconds.
const ORDERS_MAX: usize = 2_100;
/// What is recomputed.
const AGAIN: [(usize, Recompute); 3] =
    [(0, Recompute::None), (1, Recompute::Attention), (3, Recompute::Full)];

/// The stages on one group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// The group, by its place in the cluster.
    pub group: usize,
    /// Its first rank.
    pub first_rank: u32,
    /// Its ranks.
    pub ranks: u32,
    /// The first of its layers.
    pub first_layer: u32,
    /// How its ranks are used; `pp` and the layers of stages are those of the group.
    pub configuration: Configuration,
    /// Seconds of a micro-batch on its slowest stage.
    pub slowest_s: f64,
    /// Seconds of a step in which its devices compute, on average.
    pub busy_s: f64,
    /// Bytes of its fullest device.
    pub peak_bytes: f64,
    /// Bytes that a device of it has for a job.
    pub have_bytes: f64,
}

/// A pipeline over groups.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeteroPipeline {
    /// Its parts, the first stages first.
    pub parts: Vec<Part>,
    /// Seconds of a step.
    pub step_time_s: f64,
    /// One in ten steps is shorter than the first, one in ten longer than the second.
    pub interval_s: [f64; 2],
    /// Where the time goes.
    pub breakdown: Breakdown,
    /// Micro-batches of each copy of the pipeline.
    pub microbatch_count: u64,
    /// Pipelines with their cuts that were priced; none where the cut was given.
    pub priced: u64,
    /// The cuts of its layers that it was compared with.
    pub cuts: StagePartitions,
    /// Whether no candidate was left out unseen.
    pub complete: bool,
}

/// Cuts of the layers that one is not slower than.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StagePartitions {
    /// None: it is as given.
    Given,
    /// All that fit.
    All,
    /// Those with a layer moved from any stage to any other.
    Moves,
    /// Those with a layer moved to the next stage or the one before.
    NextMoves,
    /// None that has its layers moved: its slowest stage is the fastest that there can be.
    Balanced,
}

/// One group of a candidate: its place, and the key of its tables.
#[derive(Clone, Debug, PartialEq)]
struct Used {
    group: usize,
    inside: Inside,
    stages: u32,
    configuration: Configuration,
    seconds: Seconds,
}

impl Used {
    /// Stages per second of a micro-batch of all layers: the speeds of groups add up.
    fn speed(&self, recomputed: usize) -> f64 {
        f64::from(self.stages) / self.seconds.all[recomputed]
    }
}

/// A pipeline whose layers are not cut yet.
#[derive(Clone, Debug, PartialEq)]
struct Candidate {
    used: Vec<Used>,
    count: u64,
    bound_s: f64,
    /// Lower bound on the bottleneck time, in seconds, over all stage partitions.
    bottleneck_s: f64,
}

/// Candidates whose bounds are below a time.
struct Candidates {
    found: Vec<Candidate>,
    below_s: f64,
}

/// The search, kept for one set of groups after another.
pub(super) struct Lines<'a> {
    asked: &'a GroupRequest<'a>,
    /// By group: the first one that is alike.
    kinds: Vec<usize>,
    frames: Vec<SearchDomain>,
    estimators: Vec<Estimator<'a>>,
    /// Tables by kind, with the seconds of all layers by what is recomputed.
    prices: BTreeMap<(usize, Inside), (Prices, Seconds)>,
    /// Cuts that were priced, and their stages.
    priced: u64,
    work: u64,
    complete: bool,
}

/// The best cut that was found of a candidate.
struct Cut {
    layers: Vec<u32>,
    step: LineStep,
    cuts: StagePartitions,
}

/// The fastest pipeline over at least two groups whose step is below `below_s`.
///
/// # Errors
/// `E3404` for a group that cannot be priced.
pub fn across(
    asked: &GroupRequest<'_>,
    below_s: f64,
) -> Result<Option<HeteroPipeline>, Diagnostic> {
    Ok(Lines::new(asked)?.fastest(asked.set.as_deref(), below_s))
}

/// Orders of at least two groups, and whether they are all; of groups that are alike, the first
/// ones first.
fn orders(kinds: &[usize]) -> (Vec<Vec<usize>>, bool) {
    let mut all: Vec<Vec<usize>> = Vec::new();
    let mut longer: Vec<Vec<usize>> = vec![vec![]];
    for length in 1..=kinds.len() {
        let grow = |order: &Vec<usize>| -> Vec<Vec<usize>> {
            let is_first = |group: &usize| {
                (0..*group).all(|other| kinds[other] != kinds[*group] || order.contains(&other))
            };
            let left = (0..kinds.len()).filter(|group| !order.contains(group)).filter(is_first);
            left.map(|group| [&order[..], &[group]].concat()).collect()
        };
        longer = longer.iter().flat_map(grow).collect();
        if all.len() + longer.len() > ORDERS_MAX {
            return (all, false);
        }
        if length > 1 {
            all.extend(longer.iter().cloned());
        }
    }
    (all, true)
}

/// All stage partitions of `layers` layers into `stages` stages of at least one layer; none where
/// there are more than [`CUTS_MAX`].
fn few_cuts(layers: u32, stages: u32) -> Option<Vec<Vec<u32>>> {
    let mut number = 1u64;
    for at in 1..u64::from(stages) {
        number = number * (u64::from(layers) - at) / at;
        if number > CUTS_MAX {
            return None;
        }
    }
    let mut all: Vec<Vec<u32>> = vec![vec![]];
    for stage in 0..stages {
        let after = stages - stage - 1;
        let grow = |cut: &Vec<u32>| {
            let left = layers - cut.iter().sum::<u32>();
            let sizes = if after == 0 { left..=left } else { 1..=left - after };
            sizes.map(|size| [&cut[..], &[size]].concat()).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(grow).collect();
    }
    Some(all)
}

impl<'a> Lines<'a> {
    /// Nothing is priced yet.
    ///
    /// # Errors
    /// `E3404` for a group that cannot be priced.
    pub(super) fn new(asked: &'a GroupRequest<'a>) -> Result<Lines<'a>, Diagnostic> {
        let count = asked.cluster.groups.len().min(GROUPS_MAX);
        let estimators = (0..count).map(|group| asked.estimator(group));
        let domain = |group| {
            SearchDomain::new(asked.work, asked.devices(group), asked.batch(), asked.limits.clone())
        };
        Ok(Lines {
            asked,
            kinds: asked.kinds()[..count].to_vec(),
            frames: (0..count).map(domain).collect(),
            estimators: estimators.collect::<Result<_, _>>()?,
            prices: BTreeMap::new(),
            priced: 0,
            work: 0,
            complete: true,
        })
    }

    /// The fastest pipeline over all groups of a set, or of any with two groups at least, if its
    /// step is below `below_s`.
    pub(super) fn fastest(
        &mut self,
        set: Option<&[usize]>,
        below_s: f64,
    ) -> Option<HeteroPipeline> {
        (self.priced, self.work, self.complete) = (0, 0, true);
        let mut candidates = Candidates { found: Vec::new(), below_s };
        let (orders, are_all) = orders(&self.kinds);
        let most = orders.iter().map(Vec::len).max().unwrap_or(0);
        let all_orders = are_all || set.is_some_and(|set| set.len() <= most);
        for order in orders {
            let is_asked = set.is_none_or(|set| {
                set.len() == order.len() && set.iter().all(|group| order.contains(group))
            });
            if is_asked {
                self.candidates(&order, &mut candidates);
            }
        }
        self.keep_least(&mut candidates);
        let candidates = candidates.found;
        let mut best: Option<(Candidate, Cut)> = None;
        let mut seconds = below_s;
        for candidate in candidates {
            if candidate.bound_s >= seconds * (1.0 - ROUNDING) {
                // What was left out has no lower bound.
                self.complete = true;
                break;
            }
            if self.work > WORK_MAX || (self.asked.stop)() {
                self.complete = false;
                break;
            }
            let Some(cut) = self.cut(&candidate, seconds) else { continue };
            if cut.step.breakdown.total_s() < seconds * (1.0 - ROUNDING) {
                seconds = cut.step.breakdown.total_s();
                best = Some((candidate, cut));
            }
        }
        self.complete &= all_orders;
        let (candidate, cut) = best?;
        Some(self.told(&candidate, cut))
    }

    /// Sorts candidates by their bounds, and leaves out the last of too many.
    fn keep_least(&mut self, candidates: &mut Candidates) {
        let Candidates { found, below_s } = candidates;
        found.sort_by(|a, b| a.bound_s.total_cmp(&b.bound_s));
        if let Some(first_out) = found.get(CANDIDATES_MAX) {
            // What follows is not kept either.
            *below_s = first_out.bound_s;
            found.truncate(CANDIDATES_MAX);
            self.complete = false;
        }
    }

    /// Pipelines over groups in an order.
    fn candidates(&mut self, order: &[usize], found: &mut Candidates) {
        let asked = self.asked;
        let limits = &asked.limits;
        let plain = [Decision::Vpp, Decision::Offload, Decision::Placement, Decision::Shard];
        let usual = plain.iter().all(|decision| limits.allow(*decision, decision.without()))
            && limits.allow(Decision::Schedule, Decision::Schedule.without());
        if !usual {
            return;
        }
        let common = order.iter().map(|group| asked.devices(*group)).fold(0, gcd);
        let copies = divisors(common).into_iter().filter(|dp| {
            asked.batch().is_multiple_of(*dp) && limits.allow(Decision::Dp, *dp as usize)
        });
        for dp in copies {
            let samples = divisors(asked.batch() / dp).into_iter();
            for microbatch in samples.filter(|mbs| limits.allow(Decision::Mbs, *mbs as usize)) {
                let domain = self.frames[order[0]].clone();
                let cuts = divisors(common / dp).into_iter();
                for cp in cuts.filter(|cp| may_cut_sequence(&domain, *cp)) {
                    let inside = |group: &usize| self.insides(*group, [dp, cp], microbatch);
                    let insides: Vec<Vec<Used>> = order.iter().map(inside).collect();
                    let likeness = likeness(insides.iter().flatten());
                    self.combine(&insides, likeness, &mut Vec::new(), found);
                    if found.found.len() > 2 * CANDIDATES_MAX {
                        self.keep_least(found);
                    }
                }
            }
        }
    }

    /// Candidates that use the first groups in one way and the others in any.
    fn combine(
        &mut self,
        insides: &[Vec<Used>],
        likeness: f64,
        used: &mut Vec<Used>,
        found: &mut Candidates,
    ) {
        let Some(options) = insides.get(used.len()) else {
            return self.with_states(used.clone(), found);
        };
        let speed = |used: &Used| used.speed(0);
        let most = |all: &Vec<Used>| all.iter().map(speed).fold(0.0, f64::max);
        let others: f64 = insides[used.len() + 1..].iter().map(most).sum();
        let before: f64 = used.iter().map(speed).sum();
        for option in options {
            let stages: u32 = used.iter().chain([option]).map(|used| used.stages).sum();
            let c = &option.configuration;
            let count = f64::from(self.asked.batch() / c.dp / c.microbatch);
            // No slowest stage is faster than all devices together.
            let bound_s = count * likeness / (before + speed(option) + others);
            if stages <= self.asked.work.depth() && bound_s < found.below_s {
                used.push(option.clone());
                self.combine(insides, likeness, used, found);
                used.pop();
            }
        }
    }

    /// How a group can be used: the ranks that share a layer, and its stages.
    fn insides(&mut self, group: usize, [dp, cp]: [u32; 2], microbatch: u32) -> Vec<Used> {
        let (domain, limits) = (self.frames[group].clone(), &self.asked.limits);
        let node = self.asked.cluster.groups[group].devices_per_node.unwrap_or(1) as u32;
        let each = self.asked.devices(group) / dp / cp;
        let allow = |decision, number: u32| limits.allow(decision, number as usize);
        let etp = limits.fixed(Decision::Etp).map_or(0, |n| u32::try_from(n).unwrap_or(u32::MAX));
        let mut all = Vec::new();
        let ranks = divisors(each).into_iter().filter(|tp| *tp <= node);
        for tp in ranks.filter(|tp| domain.heads.is_multiple_of(*tp) && allow(Decision::Tp, *tp)) {
            let mut experts = vec![1, gcd(domain.experts, dp * cp * tp)];
            experts.dedup();
            let cuts = if tp > 1 && domain.seq > 1 { &[true, false][..] } else { &[false] };
            let pairs = experts.iter().flat_map(|ep| cuts.iter().map(|sp| (*ep, *sp)));
            for (ep, sp) in pairs {
                if !allow(Decision::Ep, ep) || !allow(Decision::Sp, u32::from(sp)) {
                    continue;
                }
                let stages = each / tp;
                let configuration = Configuration {
                    tp,
                    cp,
                    ep,
                    etp,
                    dp,
                    microbatch,
                    sequence_parallel: sp,
                    schedule: Schedule::OneForwardOneBackward,
                    ..Configuration::default()
                };
                if etp > 0 && !(domain.experts > 1 && configuration.may_slice_experts(etp)) {
                    continue;
                }
                let inside = self.inside(group, &configuration, stages);
                let seconds = self.seconds(group, inside);
                all.push(Used { group, inside, stages, configuration, seconds });
            }
        }
        all
    }

    /// The communication groups inside the layers of a group that has `stages` of the stages: of
    /// its own ranks alone.
    fn inside(&self, group: usize, configuration: &Configuration, stages: u32) -> Inside {
        self.estimators[group].inside(&Configuration { pp: stages, ..configuration.clone() })
    }

    /// The candidates of groups that are used so: what is sharded, what is recomputed.
    fn with_states(&self, used: Vec<Used>, candidates: &mut Candidates) {
        let limits = &self.asked.limits;
        let (dp, microbatch) = (used[0].configuration.dp, used[0].configuration.microbatch);
        let pp: u32 = used.iter().map(|used| used.stages).sum();
        if pp > self.asked.work.depth() || !limits.allow(Decision::Pp, pp as usize) {
            return;
        }
        let count = u64::from(self.asked.batch() / dp / microbatch);
        for (recomputed, (number, recompute)) in AGAIN.into_iter().enumerate() {
            let keep = usize::from(recompute != Recompute::Full);
            let as_kept = recompute == Recompute::Attention || limits.allow(Decision::Keep, keep);
            if !as_kept || !limits.allow(Decision::Recompute, number) {
                continue;
            }
            let (bottleneck_s, least_s) =
                (bottleneck_s(&used, recomputed), least_s(&used, recomputed));
            let (m, p) = (count as f64, f64::from(pp));
            let full_s = 2.0 * least_s + (m - p - 1.0) * bottleneck_s;
            let bound_s = (m * bottleneck_s).max(if m > p { full_s } else { 0.0 });
            if bound_s >= candidates.below_s {
                continue;
            }
            let shards = if dp * used[0].configuration.cp > 1 { 3 } else { 0 };
            let zeros = (0..=shards).filter(|zero| limits.allow(Decision::Zero, (*zero).into()));
            for stage in zeros {
                let mut used = used.clone();
                for used in &mut used {
                    let c = &mut used.configuration;
                    (c.pp, c.recompute, c.zero) = (pp, recompute, Zero { stage, shard: 0 });
                }
                candidates.found.push(Candidate { used, count, bound_s, bottleneck_s });
            }
        }
    }

    fn prices(&self, used: &Used) -> &Prices {
        let alike = self.estimators[used.group].inside_alike(used.inside);
        &self.prices[&(self.kinds[used.group], alike)].0
    }

    /// What layers take on the devices of one stage.
    fn seconds(&mut self, group: usize, inside: Inside) -> Seconds {
        let estimator = &self.estimators[group];
        let key = (self.kinds[group], estimator.inside_alike(inside));
        let new = || {
            let prices = estimator.prices(key.1);
            let of = |(count, price): &(u32, LayerPrice)| {
                let both_s = price.forward.total_s() + price.backward.total_s();
                let recomputed =
                    [0.0, price.attention_again.total_s(), price.forward_again.total_s()];
                recomputed.map(|recompute_s| f64::from(*count) * (both_s + recompute_s))
            };
            let classes: Rc<[[f64; 3]]> = prices.layers.iter().map(of).collect();
            let all =
                [0, 1, 2].map(|recomputed| classes.iter().map(|class| class[recomputed]).sum());
            (prices, Seconds { all, classes })
        };
        self.prices.entry(key).or_insert_with(new).1.clone()
    }

    fn sections<'b>(&'b self, candidate: &'b Candidate) -> Vec<Section<'b>> {
        let after = candidate.used.iter().skip(1).map(Some).chain([None]);
        let section = |(used, next): (&'b Used, Option<&'b Used>)| Section {
            estimator: &self.estimators[used.group],
            configuration: &used.configuration,
            prices: self.prices(used),
            link: next.and_then(|next| self.asked.trunk(used.group, next.group)),
        };
        candidate.used.iter().zip(after).map(section).collect()
    }

    /// The step with the layers cut so, whether it fits or not.
    fn priced_step(&self, candidate: &Candidate, layers: &[u32]) -> LineStep {
        let mut rest = layers;
        let mut sections = Vec::new();
        for (section, used) in self.sections(candidate).into_iter().zip(&candidate.used) {
            let (own, after) = rest.split_at(used.stages as usize);
            sections.push((section, own));
            rest = after;
        }
        line::step(&sections, candidate.count)
    }

    /// The step with the layers cut so, if it fits.
    fn step(&self, candidate: &Candidate, layers: &[u32]) -> Option<LineStep> {
        let step = self.priced_step(candidate, layers);
        let have = candidate.used.iter().flat_map(|used| {
            let bytes = self.estimators[used.group].memory_bytes;
            std::iter::repeat_n(bytes, used.stages as usize)
        });
        let fits = step.stages.iter().zip(have).all(|(s, have)| s.memory.total_bytes() <= have);
        fits.then_some(step)
    }

    /// The best cut of a candidate; none where none fits, or none is looked at closely because the
    /// slowest stage alone takes `below_s`.
    fn cut(&mut self, candidate: &Candidate, below_s: f64) -> Option<Cut> {
        let pp: u32 = candidate.used.iter().map(|used| used.stages).sum();
        let seconds = |step: &LineStep| step.breakdown.total_s();
        if let Some(cuts) = few_cuts(self.asked.work.depth(), pp) {
            // Most candidates have no cut that fits, where memory is tight.
            self.filled(candidate, f64::INFINITY)?;
            self.priced += cuts.len() as u64;
            self.work += cuts.len() as u64 * u64::from(pp);
            let steps = cuts.into_iter().filter_map(|layers| {
                let step = self.step(candidate, &layers)?;
                Some(Cut { layers, step, cuts: StagePartitions::All })
            });
            return steps.min_by(|a, b| seconds(&a.step).total_cmp(&seconds(&b.step)));
        }
        let mut layers = self.balanced(candidate, below_s)?;
        let mut step = self.step(candidate, &layers)?;
        self.priced += 1;
        let (work, are_few) = (self.work, layers.len() <= ALL_PAIRS_MAX);
        let mut cuts = StagePartitions::Balanced;
        while seconds(&step) < NEAR * below_s && self.work - work < MOVES_MAX {
            let mut better: Option<(Vec<u32>, LineStep)> = None;
            for moved in moves(&layers, !are_few) {
                self.priced += 1;
                self.work += u64::from(pp);
                let Some(other) = self.step(candidate, &moved) else { continue };
                let now = better.as_ref().map_or(seconds(&step), |(_, step)| seconds(step));
                if seconds(&other) < now * (1.0 - ROUNDING) {
                    better = Some((moved, other));
                }
            }
            let Some(found) = better else {
                cuts = if are_few { StagePartitions::Moves } else { StagePartitions::NextMoves };
                break;
            };
            (layers, step) = found;
        }
        Some(Cut { layers, step, cuts })
    }

    /// The cut whose slowest stage is the fastest of those that fit, by halves of its time.
    fn balanced(&mut self, candidate: &Candidate, below_s: f64) -> Option<Vec<u32>> {
        let m = candidate.count as f64;
        let (mut low, mut high) = (candidate.bottleneck_s, below_s.min(f64::MAX) / m);
        let mut best = self.filled(candidate, high)?;
        // Halved until a thousandth of it is left.
        while high - low > 1e-3 * high {
            // From an end that is not known yet one comes down by steps that grow.
            let middle = if high > 4.0 * low { 2.0 * low } else { 0.5 * (low + high) };
            match self.filled(candidate, middle) {
                Some(layers) => (best, high) = (layers, middle),
                None => low = middle,
            }
        }
        Some(best)
    }

    /// Stages of which none takes longer than `pace_s` or holds too much, as many layers in each as
    /// there can be.
    fn filled(&mut self, candidate: &Candidate, bottleneck_s: f64) -> Option<Vec<u32>> {
        let depth = self.asked.work.depth();
        let pp = candidate.used[0].configuration.pp;
        self.work += u64::from(depth);
        let (mut index, mut from) = (0, 0);
        let mut sizes = Vec::new();
        for (section, used) in self.sections(candidate).iter().zip(&candidate.used) {
            let have = self.estimators[used.group].memory_bytes;
            for _ in 0..used.stages {
                let most = depth - from - (pp - index - 1);
                let fits = |size: &u32| {
                    let cost = section.cost((index, from, from + size), true, candidate.count);
                    cost.seconds <= bottleneck_s && cost.memory.total_bytes() <= have
                };
                let size = (1..=most).take_while(fits).last()?;
                (index, from) = (index + 1, from + size);
                sizes.push(size);
            }
        }
        (from == depth).then_some(sizes)
    }

    fn told(&self, candidate: &Candidate, cut: Cut) -> HeteroPipeline {
        let Cut { layers, step, cuts } = cut;
        let (mut stage, mut first_layer) = (0, 0);
        let mut parts = Vec::new();
        for used in &candidate.used {
            let own = stage..stage + used.stages as usize;
            let stage_layers = layers[own.clone()].to_vec();
            let costs = &step.stages[own];
            let most =
                |of: &dyn Fn(&line::StageCost) -> f64| costs.iter().map(of).fold(0.0, f64::max);
            let busy_s: f64 = costs.iter().map(|cost| cost.busy_s).sum();
            let held: u32 = stage_layers.iter().sum();
            parts.push(Part {
                group: used.group,
                first_rank: (0..used.group).map(|group| self.asked.devices(group)).sum(),
                ranks: self.asked.devices(used.group),
                first_layer,
                configuration: Configuration {
                    pp: used.stages,
                    stage_layers,
                    ..used.configuration.clone()
                },
                slowest_s: most(&|cost| cost.seconds),
                busy_s: busy_s * candidate.count as f64 / f64::from(used.stages),
                peak_bytes: most(&|cost| cost.memory.total_bytes()),
                have_bytes: self.estimators[used.group].memory_bytes,
            });
            (stage, first_layer) = (stage + used.stages as usize, first_layer + held);
        }
        HeteroPipeline {
            parts,
            step_time_s: step.breakdown.total_s(),
            interval_s: step.interval_s,
            breakdown: step.breakdown,
            microbatch_count: candidate.count,
            priced: self.priced,
            cuts,
            complete: self.complete,
        }
    }
}
