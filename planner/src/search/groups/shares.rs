//! The shares of a batch over groups, each of which trains whole copies of the model.
//!
//! The best shares are found by bounds that become times: the shares whose slowest group has the
//! least bound are looked at, the bound of each group is replaced by what a search finds for its
//! number of samples, and so on until the shares with the least bound are all known. Nothing is
//! supposed of how times grow with samples. A search for a group ends as soon as it cannot be
//! faster than the best shares so far, which are first looked for where times are as much above
//! their bounds as those that are known; groups that are alike share what is found.

use ir::{Diagnostic, Span};

use super::{BatchShares, GroupRequest, Share, joined, there, wrong};
use crate::configuration::Configuration;
use crate::divisors::divisors;
use crate::estimate::Estimator;
use crate::limits::Limits;
use crate::limits::cause::Cause;
use crate::search::batches;
use crate::search::branch_and_bound::{Budget, Objective, Path, Tree};
use crate::search::decisions::SearchDomain;
use crate::search::request::{Chosen, cut_off, enough, extreme_of};
use crate::search::table::Tables;
use crate::search::uniform::Space;

/// Pieces of a batch at most. Chosen: shares are then as even as speeds are known, and twice as
/// many take twice as long.
const PIECES_MAX: u32 = 32;

/// A batch in equal pieces, and what is left over, which one group has more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pieces {
    /// Samples of a piece.
    piece: u32,
    count: usize,
    /// Samples that are left over, fewer than a piece.
    rest: u32,
}

impl Pieces {
    /// As many pieces as divide the batch; where few do, pieces of a power of two, which most
    /// layouts divide.
    fn of(batch: u32) -> Pieces {
        let even = divisors(batch).into_iter().filter(|n| *n <= PIECES_MAX).max().unwrap_or(1);
        let piece = match 2 * even >= batch.min(PIECES_MAX) {
            true => batch / even,
            false => batch.div_ceil(PIECES_MAX).next_power_of_two(),
        };
        Pieces { piece, count: (batch / piece) as usize, rest: batch % piece }
    }

    /// Samples of the share number `share`: `share / 2` pieces, and for odd numbers also the rest
    /// of the batch.
    fn samples(self, share: usize) -> u32 {
        self.piece * (share / 2) as u32 + if share % 2 == 1 { self.rest } else { 0 }
    }

    fn shares(self) -> usize {
        2 * (self.count + 1)
    }

    /// Whether a number stands for samples of its own.
    fn is_share(self, share: usize) -> bool {
        share > 0 && (share.is_multiple_of(2) || self.rest > 0)
    }
}

/// What is known of the objective value of one group with one number of samples.
#[derive(Clone, Debug)]
enum Value {
    /// A lower bound.
    Bound(f64),
    /// The best configuration; none where no configuration is possible.
    Found(Option<Box<Chosen>>),
}

impl Value {
    /// Seconds, or bytes of the fullest device.
    fn objective_value(&self, for_memory: bool) -> f64 {
        match self {
            Value::Bound(objective_value) => *objective_value,
            Value::Found(Some(chosen)) if for_memory => chosen.estimate.memory.total_bytes(),
            Value::Found(Some(chosen)) => chosen.estimate.step_time_s,
            Value::Found(None) => f64::INFINITY,
        }
    }

    fn is_found(&self) -> bool {
        matches!(self, Value::Found(_))
    }
}

/// The objective value that a share counts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// Its lower bound.
    Bound,
    /// The value that is expected.
    Guess,
    /// The value that was found; shares without one do not count.
    Found,
}

/// Shares of a set of groups, with their objective value.
#[derive(Clone, Debug)]
struct Way {
    objective_value: f64,
    set: Vec<usize>,
    /// The share of each, by number.
    shares: Vec<usize>,
}

/// What is known of the shares of a job, kept for one set of groups after another.
pub(super) struct Shares<'a> {
    asked: &'a GroupRequest<'a>,
    /// By group: the first one that is alike.
    kinds: Vec<usize>,
    estimators: Vec<Estimator<'a>>,
    /// By kind: the tables of its layouts.
    tables: Vec<Tables>,
    pieces: Pieces,
    /// By kind and share.
    values: Vec<Vec<Value>>,
    /// By kind: how far above its bound the share is that was found last.
    above: Vec<f64>,
    searched: usize,
    /// Whether no search was cut off.
    complete: bool,
}

/// Rounds of guesses at most. Chosen: guesses that do not settle are as good as bounds.
const GUESSES_MAX: usize = 8;

impl<'a> Shares<'a> {
    /// Nothing is known but bounds.
    ///
    /// # Errors
    /// `E3404` for a cluster without groups, with too many, or with groups that nothing joins.
    pub(super) fn new(asked: &'a GroupRequest<'a>) -> Result<Shares<'a>, Vec<Diagnostic>> {
        let mut shares = Shares::unknown(asked)?;
        for group in shares.kinds_there() {
            for share in 0..shares.pieces.shares() {
                let bound = shares.bound(group, share);
                shares.values[group].push(Value::Bound(bound));
            }
        }
        Ok(shares)
    }

    fn unknown(asked: &'a GroupRequest<'a>) -> Result<Shares<'a>, Vec<Diagnostic>> {
        there(asked)?;
        joined(asked)?;
        let count = asked.cluster.groups.len();
        let estimators = (0..count).map(|group| asked.estimator(group));
        let estimators = estimators.collect::<Result<_, _>>().map_err(|wrong| vec![wrong])?;
        Ok(Shares {
            asked,
            kinds: asked.kinds(),
            estimators,
            // Copies of tables are the same tables.
            tables: (0..count).map(|_| Tables::default()).collect(),
            pieces: Pieces::of(asked.batch()),
            values: vec![Vec::new(); count],
            above: vec![1.0; count],
            searched: 0,
            complete: true,
        })
    }

    /// The first group of each kind.
    fn kinds_there(&self) -> Vec<usize> {
        (0..self.kinds.len()).filter(|group| self.kinds[*group] == *group).collect()
    }

    fn domain(&self, group: usize, samples: u32) -> SearchDomain {
        let GroupRequest { work, limits, .. } = self.asked;
        SearchDomain::new(work, self.asked.devices(group), samples, limits.clone())
    }

    /// Lower bound on the objective value of a share; infinite where no layout divides it.
    fn bound(&self, group: usize, share: usize) -> f64 {
        if !self.pieces.is_share(share) {
            return f64::INFINITY;
        }
        let domain = self.domain(group, self.pieces.samples(share));
        if self.asked.for_memory {
            return if batches::divides(&domain) { 0.0 } else { f64::INFINITY };
        }
        let space = Space::with(&self.estimators[group], domain, &self.tables[group]);
        space.bound(&Path::default(), f64::INFINITY).seconds
    }

    /// Searches for the best configuration of a share, once. A configuration whose objective value
    /// is `below` or more need not be found.
    fn find(&mut self, group: usize, share: usize, below: f64) {
        let group = self.kinds[group];
        if self.values[group][share].is_found() {
            return;
        }
        let GroupRequest { evaluations_max, for_memory, stop, .. } = *self.asked;
        let objective = if for_memory { Objective::Memory } else { Objective::Time };
        let samples = self.pieces.samples(share);
        let estimator = self.estimators[group].of_batch(samples.into());
        let domain = self.domain(group, samples).searched_for(objective);
        let mut space = Space::with(&estimator, domain, &self.tables[group]);
        space.only_fits = objective == Objective::Time;
        let budget = Budget { evaluations_max, stop };
        let (found, complete) = extreme_of(&space, objective, &budget, below);
        let found = found.filter(|chosen| chosen.fits);
        let bound = self.values[group][share].objective_value(for_memory);
        if let Some(chosen) = found.as_ref().filter(|_| bound > 0.0) {
            self.above[group] = chosen.estimate.step_time_s / bound;
        }
        self.values[group][share] = match found {
            None if below < f64::INFINITY && !for_memory && complete => Value::Bound(below),
            found => Value::Found(found.map(Box::new)),
        };
        self.searched += 1;
        self.complete &= complete;
    }

    /// Shares of the groups of a set, all of which take some, whose slowest group has the least
    /// time as far as it is known.
    fn least(&self, set: &[usize], by: By) -> Option<Way> {
        let states = self.pieces.shares();
        let rest = usize::from(self.pieces.rest > 0);
        // By what is given away: the slowest of the groups so far, and the share of the last one.
        let mut levels = vec![vec![(f64::INFINITY, 0); states]];
        levels[0][0].0 = 0.0;
        for group in set {
            let mut next = vec![(f64::INFINITY, 0); states];
            let values = &self.values[self.kinds[*group]];
            let above = self.above[self.kinds[*group]];
            for share in (1..states).filter(|share| self.pieces.is_share(*share)) {
                let objective_value = values[share].objective_value(self.asked.for_memory);
                let objective_value = match by {
                    By::Found if !values[share].is_found() => continue,
                    By::Guess if !values[share].is_found() => objective_value * above,
                    By::Found | By::Guess | By::Bound => objective_value,
                };
                // What is left over goes to one of them.
                let free = (0..states - share).filter(|given| share % 2 + given % 2 < 2);
                for given in free {
                    let slowest: f64 = levels[levels.len() - 1][given].0.max(objective_value);
                    if slowest < next[given + share].0 {
                        next[given + share] = (slowest, share);
                    }
                }
            }
            levels.push(next);
        }
        let mut given = 2 * self.pieces.count + rest;
        let slowest = levels[set.len()][given].0;
        let mut shares = Vec::new();
        for level in levels[1..].iter().rev() {
            shares.push(level[given].1);
            given -= level[given].1;
        }
        shares.reverse();
        let more = if self.asked.for_memory { 0.0 } else { self.asked.exchange_s(set) };
        let objective_value = slowest + more;
        objective_value.is_finite().then(|| Way { objective_value, set: set.to_vec(), shares })
    }

    /// Asks the search about shares, those first that are likely to be too slow; the others need
    /// not be known where one is not below a worth. Says whether anything was asked.
    fn find_of(&mut self, way: &Way, below: f64) -> bool {
        let searched = self.searched;
        let for_memory = self.asked.for_memory;
        let more = if for_memory { 0.0 } else { self.asked.exchange_s(&way.set) };
        let objective_value = |shares: &Shares<'_>, (group, share): (usize, usize)| {
            let kind = shares.kinds[group];
            (shares.values[kind][share].objective_value(for_memory), shares.above[kind])
        };
        let mut pairs: Vec<(usize, usize)> =
            way.set.iter().copied().zip(way.shares.iter().copied()).collect();
        let likely = |shares: &Shares<'_>, pair| {
            let (objective_value, above) = objective_value(shares, pair);
            objective_value * above
        };
        pairs.sort_by(|a, b| likely(self, *b).total_cmp(&likely(self, *a)));
        for pair in pairs {
            self.find(pair.0, pair.1, below - more);
            if objective_value(self, pair).0 >= below - more || (self.asked.stop)() {
                break;
            }
        }
        self.searched > searched
    }

    /// The best of the shares that are looked at where times are expected to be the least.
    fn guessed(&mut self, sets: &[Vec<usize>]) -> Option<Way> {
        let mut best: Option<Way> = None;
        for _ in 0..GUESSES_MAX {
            let guesses = sets.iter().filter_map(|set| self.least(set, By::Guess));
            let guess = guesses.min_by(|a, b| a.objective_value.total_cmp(&b.objective_value))?;
            let below = best.as_ref().map_or(f64::INFINITY, |best| best.objective_value);
            if guess.objective_value >= below || !self.find_of(&guess, below) {
                break;
            }
            let known =
                self.least(&guess.set, By::Found).filter(|known| known.objective_value < below);
            best = known.or(best);
        }
        best
    }

    /// The best shares, of the groups of `only` where that is said.
    ///
    /// # Errors
    /// `E3203` where no layouts divide the batch, `E3201` where none fits, `E3205` where a budget
    /// ended first.
    pub(super) fn best(&mut self, only: Option<&[usize]>) -> Result<BatchShares, Vec<Diagnostic>> {
        let sets: Vec<Vec<usize>> = self.asked.sets_like(only);
        let mut open: Vec<Way> = sets.iter().filter_map(|set| self.least(set, By::Bound)).collect();
        if open.is_empty() {
            return Err(vec![self.nothing_divides()]);
        }
        let mut best = self.guessed(&sets);
        let first = |open: &[Way]| {
            (0..open.len())
                .min_by(|a, b| open[*a].objective_value.total_cmp(&open[*b].objective_value))
        };
        let mut stopped = (self.asked.stop)();
        while let Some(at) = first(&open).filter(|_| !stopped) {
            let before = open.swap_remove(at);
            // What is found of one set may raise what others are worth.
            let Some(way) = self.least(&before.set, By::Bound) else { continue };
            let least = best.as_ref().map_or(f64::INFINITY, |best| best.objective_value);
            if way.objective_value >= least {
                continue;
            }
            if way.objective_value > before.objective_value {
                open.push(way);
                continue;
            }
            if self.find_of(&way, least) {
                open.push(way.clone());
            }
            stopped = (self.asked.stop)();
            let known =
                self.least(&way.set, By::Found).filter(|known| known.objective_value < least);
            best = known.or(best);
        }
        self.complete &= !stopped;
        match best {
            Some(way) => Ok(self.told(&way, only)),
            None if !self.complete => Err(vec![cut_off()]),
            None => Err(vec![self.nothing_fits()]),
        }
    }

    /// The answer.
    fn told(&self, way: &Way, only: Option<&[usize]>) -> BatchShares {
        let mut first_rank = 0;
        let mut shares = Vec::new();
        for group in 0..self.kinds.len() {
            let ranks = self.asked.devices(group);
            let at = way.set.iter().position(|other| *other == group);
            let share = at.map_or(0, |at| way.shares[at]);
            let chosen = match &self.values[self.kinds[group]][share] {
                Value::Found(Some(chosen)) if share > 0 => Some((**chosen).clone()),
                Value::Found(_) | Value::Bound(_) => None,
            };
            let samples = self.pieces.samples(share);
            shares.push(Share { group, first_rank, ranks, samples, chosen });
            first_rank += ranks;
        }
        let chosen = shares.iter().filter_map(|share| share.chosen.as_ref());
        let slowest_s = chosen.map(|chosen| chosen.estimate.step_time_s).fold(0.0, f64::max);
        let exchange_s = self.asked.exchange_s(&way.set);
        let all: Vec<usize> = (0..self.kinds.len()).collect();
        let leaves_some = only.is_none() && self.least(&all, By::Bound).is_none();
        BatchShares {
            shares,
            piece: self.pieces.piece,
            rest: self.pieces.rest,
            exchange_s,
            step_time_s: slowest_s + exchange_s,
            searched: self.searched,
            complete: self.complete,
            nearest: if leaves_some && way.set != all { self.nearest() } else { Vec::new() },
        }
    }

    /// The batches next to this one of which all groups can have a share.
    fn nearest(&self) -> Vec<u32> {
        let divides = |group: usize, samples| batches::divides(&self.domain(group, samples));
        batches::nearest(self.asked.batch(), self.kinds.len(), divides)
    }

    fn nothing_divides(&self) -> Diagnostic {
        let GroupRequest { limits, cluster, .. } = self.asked;
        let batch = self.asked.batch();
        let leaves_some = |limits: &Limits| {
            let asked =
                GroupRequest { limits: limits.clone(), for_memory: true, ..self.asked.clone() };
            let sets = asked.sets_like(asked.set.as_deref());
            let shares = Shares::new(&asked);
            let has_way =
                |shares: Shares<'_>| sets.iter().any(|set| shares.least(set, By::Bound).is_some());
            shares.is_ok_and(has_way)
        };
        let cause = Cause::of(limits, &[], leaves_some);
        let nothing = format!("no shares of {batch} samples that the groups' devices divide");
        let diagnostic = cause.told(&nothing).unwrap_or_else(|| {
            let span = Span::of(cluster.name.clone());
            Diagnostic::error("E3203", span, nothing).help("use another batch")
        });
        let near = batches::told(&self.nearest()).map(|near| format!("use {near} samples"));
        let help = near.into_iter().chain(diagnostic.help.clone());
        let help = help.collect::<Vec<_>>().join(", or ");
        diagnostic
            .help(help)
            .note("a group's share is a multiple of dp · mbs, and dp divides its devices")
    }

    fn nothing_fits(&self) -> Diagnostic {
        let limits = &self.asked.limits;
        let within = if limits.is_empty() { String::new() } else { format!(" within `{limits}`") };
        let headline = format!("no group fits a share of the batch in memory{within}");
        let diagnostic = wrong(self.asked, "E3201", headline);
        if limits.memory_bytes().is_none() {
            return diagnostic;
        }
        // With all the memory that there is, the shares that need the least of it.
        let limits = limits.without_memory();
        let free = GroupRequest { limits, for_memory: true, ..self.asked.clone() };
        let Ok(shared) = Shares::new(&free).and_then(|mut shares| shares.best(None)) else {
            return diagnostic;
        };
        let needs = shared.shares.iter().filter_map(|share| share.chosen.as_ref());
        let needs = needs.map(|chosen| chosen.estimate.memory.total_bytes());
        let enough = enough(needs.fold(0.0, f64::max));
        diagnostic.help(format!("with `{enough}` some shares fit"))
    }

    /// The best shares of groups whose layouts are known; see [`score`](super::score).
    pub(super) fn of_layouts(
        asked: &'a GroupRequest<'a>,
        layouts: &[Option<Configuration>],
    ) -> Result<BatchShares, Vec<Diagnostic>> {
        let mut shares = Shares::unknown(asked)?;
        // Groups that are alike may have other layouts.
        shares.kinds = (0..layouts.len()).collect();
        for (group, c) in layouts.iter().enumerate() {
            for share in 0..shares.pieces.shares() {
                let samples = shares.pieces.samples(share);
                let estimator = shares.estimators[group].of_batch(samples.into());
                let chosen = c.as_ref().filter(|_| share > 0).and_then(|c| {
                    let estimate = estimator.estimate(c).ok()?;
                    let fits = estimate.memory.total_bytes() <= estimator.memory_bytes;
                    Some(Box::new(Chosen { configuration: c.clone(), estimate, fits }))
                });
                shares.values[group].push(Value::Found(chosen));
            }
        }
        let set: Vec<usize> =
            (0..layouts.len()).filter(|group| layouts[*group].is_some()).collect();
        match shares.least(&set, By::Bound) {
            Some(way) => Ok(shares.told(&way, Some(&set))),
            None => Err(vec![undivided(asked, &set, layouts)]),
        }
    }
}

/// Says which batches layouts divide.
fn undivided(
    asked: &GroupRequest<'_>,
    set: &[usize],
    layouts: &[Option<Configuration>],
) -> Diagnostic {
    let batch = asked.batch();
    let headline = format!("no shares of {batch} samples that these layouts divide");
    let divides = |at: usize, samples: u32| {
        let c = layouts[set[at]].as_ref();
        c.is_some_and(|c| c.microbatch_count(samples.into()).is_some())
    };
    let near = batches::told(&batches::nearest(batch, set.len(), divides));
    let near = near.map(|near| format!(": {near}")).unwrap_or_default();
    let help = format!("choose a batch of a multiple of dp × mbs of each group{near}");
    let span = Span::of(asked.cluster.name.clone());
    Diagnostic::error("E3401", span, headline).help(help)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::groups::tests::{asked, cluster};
    use crate::search::models;
    use crate::search::oracle::{Random, seeds};

    /// Every share of each group, so that they are the batch: pieces, and who takes the rest.
    fn all_shares(pieces: Pieces, groups: usize) -> Vec<Vec<usize>> {
        let states = pieces.shares();
        let numbers = (0..states.pow(groups as u32))
            .map(|code| (0..groups).map(|g| code / states.pow(g as u32) % states).collect());
        let is_batch = |shares: &Vec<usize>| {
            let rests: usize = shares.iter().map(|share| share % 2).sum();
            shares.iter().map(|share| share / 2).sum::<usize>() == pieces.count
                && rests == usize::from(pieces.rest > 0)
                && shares.iter().all(|share| pieces.is_share(*share))
        };
        numbers.filter(is_batch).collect()
    }

    /// Whatever shares are worth, the least slowest of all is found, and it is the batch.
    #[test]
    fn the_least_shares_are_those_of_trying_all() {
        let work = models::shape("gpt-7.5b").unwrap().workload().unwrap();
        let mixed = cluster(&[("h100", 1), ("a100", 1), ("v100", 1)]);
        let mut rests = 0;
        for seed in seeds(0, 60) {
            let mut random = Random(seed);
            let batch = 3 + random.below(3000) as u64;
            let asked = asked(&work, &mixed, batch, &[]);
            let mut shares = Shares::unknown(&asked).unwrap();
            // Few, as all are tried.
            shares.pieces.count = 1 + random.below(4);
            let (states, pieces) = (shares.pieces.shares(), shares.pieces);
            rests += usize::from(pieces.rest > 0);
            let mut objective_value = || Value::Bound(random.below(1000) as f64);
            shares.values =
                (0..3).map(|_| (0..states).map(|_| objective_value()).collect()).collect();
            let set = [0, 1, 2];
            let of = |way: &[usize]| {
                let each =
                    way.iter().zip(&shares.values).map(|(s, v)| v[*s].objective_value(false));
                each.fold(0.0, f64::max) + asked.exchange_s(&set)
            };
            let all = all_shares(pieces, 3);
            let least = all.iter().map(|way| of(way)).fold(f64::INFINITY, f64::min);
            let found = shares.least(&set, By::Bound);
            assert_eq!(found.is_some(), !all.is_empty(), "SEED={seed}");
            let Some(found) = found else { continue };
            assert_eq!(found.objective_value, least, "SEED={seed}: {found:?}");
            assert!(all.contains(&found.shares), "SEED={seed}: {found:?}");
        }
        assert!(seeds(0, 60).len() == 1 || rests > 10, "{rests}");
    }

    /// Pieces and what is left over are the batch; there are neither too many nor, where the batch
    /// is large enough, too few.
    #[test]
    fn pieces_are_the_batch() {
        for batch in 1..3000 {
            let pieces = Pieces::of(batch);
            let Pieces { piece, count, rest } = pieces;
            assert_eq!(piece * count as u32 + rest, batch);
            assert!(rest < piece && count <= PIECES_MAX as usize, "{batch}: {pieces:?}");
            let least = PIECES_MAX as usize / 2;
            assert!(count >= least || (piece, rest) == (1, 0), "{pieces:?}");
            assert_eq!(pieces.samples(pieces.shares() - 1), batch);
        }
    }
}
