//! The space of configurations priced by [`Estimator`]: what the walk needs to know of it.
//!
//! A candidate stands for all its stage partitions. Where time is minimised it is scored at the
//! best of them ([`stage_partition`](super::stage_partition)); where memory is, at the better of
//! two: the even one, and the one with the least bottleneck time.
//!
//! Bounds call the step formula itself, at the least of what is open: with the same stages, passes
//! are not slower without recomputation, exchanges not slower beside full recomputation, and memory
//! is not larger with full sharding and all offloaded, or all but weights, of which those that are
//! fetched take room; where even that does not fit, as much is recomputed as makes it fit. Above
//! the inside of layers, a bound is the work of a stage in equal parts: `m · Σ t / p`, with every
//! axis placed best, and the way of a micro-batch through all stages where these are not filled.
//! That equal steps have equal formulas, and that the bounds hold, is tested on random
//! configurations.
//!
//! Bounds say little of which of two subtrees has the faster leaves. So the walk looks ahead, along
//! the decisions that tell most, and has a fast leaf before it begins.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::branch_and_bound::{Path, Score, Tree};
use super::decisions::{self, STEPS, SearchDomain};
use super::known::{Known, memory_decisions};
use super::table::{AGAIN, Table, Tables};
use crate::cluster::Power;
use crate::configuration::{Configuration, Offload, Place, Recompute, Zero};
use crate::estimate::cut::Exchanged;
use crate::estimate::price::Inside;
use crate::estimate::step::Step;
use crate::estimate::{Estimator, Placement};

/// Decisions after which the mesh is known.
const MESH: usize = 3;
/// Decisions after which the inside of layers is known.
pub(super) const INSIDE: usize = 7;
/// Decisions after which the schedule is known.
pub(super) const SCHEDULE: usize = 8;
/// Decisions after which the ZeRO stage is known.
const ZERO: usize = SCHEDULE + 1;

/// The space of one job.
#[derive(Debug)]
pub struct Space<'a> {
    /// The prices.
    pub estimator: &'a Estimator<'a>,
    /// The values of decisions.
    pub domain: SearchDomain,
    /// Samples of a step.
    pub global_batch: u64,
    /// What a device draws, where energy is minimised and not time: scores are joules then.
    pub power: Option<&'a Power>,
    /// Whether of what fits it does not matter how large it is: a leaf is then the best of all
    /// cuts of its layers that fit.
    pub only_fits: bool,
    tables: Tables,
    /// The table that was asked for last.
    last: RefCell<Option<(Inside, Arc<Table>)>>,
    meshes: RefCell<FxHashMap<Path, Score>>,
    passes: RefCell<Option<(Path, FxHashMap<Recompute, Rc<Passes>>)>>,
    placements: RefCell<Option<(Path, Rc<Placements>)>>,
    /// Lower bounds of the schedule that was asked for last.
    pub(super) known: RefCell<Option<(Path, Known)>>,
    /// By what is sharded: collectives of stages, of the inside that was asked for last.
    pub(super) exchanged: RefCell<Option<(Path, FxHashMap<Option<u32>, Rc<Exchanged>>)>>,
    /// Stage partitions of candidates that are better than the usual ones.
    pub(super) found: RefCell<FxHashMap<Path, Vec<u32>>>,
    /// Candidates whose stage partitions were not all tried, with the lower bound over these.
    pub(super) unfinished: RefCell<FxHashMap<Path, f64>>,
}

/// Orders of axes, with what of each a step depends on.
type Placements = Vec<(u32, Placement)>;

/// Cuts into stages, with seconds of their passes.
type Passes = Vec<(Vec<u32>, f64)>;

impl<'a> Space<'a> {
    /// The space of a frame.
    pub fn new(estimator: &'a Estimator<'a>, domain: SearchDomain) -> Space<'a> {
        Space::with(estimator, domain, &Tables::default())
    }

    /// The space of a frame, with tables of a space on the same devices.
    pub fn with(estimator: &'a Estimator<'a>, domain: SearchDomain, tables: &Tables) -> Space<'a> {
        let global_batch = u64::from(domain.global_batch);
        let tables = tables.clone();
        let (last, meshes, passes, placements) = Default::default();
        Space {
            estimator,
            domain,
            global_batch,
            power: None,
            only_fits: false,
            tables,
            last,
            meshes,
            passes,
            placements,
            known: RefCell::default(),
            exchanged: RefCell::default(),
            found: RefCell::default(),
            unfinished: RefCell::default(),
        }
    }

    /// Makes spaces of the same leaves, with the same tables, for other threads.
    pub fn another(&self) -> impl Fn() -> Space<'a> + Sync + use<'a> {
        let (estimator, domain, tables) =
            (self.estimator, self.domain.clone(), self.tables.clone());
        let (power, only_fits) = (self.power, self.only_fits);
        move || Space { power, only_fits, ..Space::with(estimator, domain.clone(), &tables) }
    }

    /// Objective value of a step of `seconds` in which a device computes for `busy_s`: its seconds,
    /// or the joules that a device draws.
    pub fn objective_value(&self, seconds: f64, busy_s: f64) -> f64 {
        self.power.map_or(seconds, |power| power.joules(seconds, busy_s))
    }

    /// Lower bound on the objective value of a step that takes `seconds`: a device computes at
    /// least as long as its layers take without recomputation.
    pub(super) fn least_worth(&self, seconds: f64, table: &Table, c: &Configuration) -> f64 {
        self.objective_value(seconds, self.least_busy_s(table, c))
    }

    /// Lower bound on the seconds for which a device computes in a step.
    pub(super) fn least_busy_s(&self, table: &Table, c: &Configuration) -> f64 {
        self.count(c) as f64 * table.busy_sum_s / f64::from(c.pp)
    }

    /// Tables that were made.
    pub fn table_count(&self) -> usize {
        self.tables.count()
    }

    pub(super) fn table(&self, inside: Inside) -> Arc<Table> {
        if let Some((_, table)) = self.last.borrow().as_ref().filter(|(last, _)| *last == inside) {
            return Arc::clone(table);
        }
        let table = self.tables.of(inside, self.estimator);
        *self.last.borrow_mut() = Some((inside, Arc::clone(&table)));
        table
    }

    pub(super) fn count(&self, c: &Configuration) -> u64 {
        c.microbatch_count(self.global_batch).expect("the walk divides the batch")
    }

    /// The step of a whole configuration.
    pub fn step(&self, c: &Configuration) -> Step {
        self.estimator.step(c, &self.table(self.estimator.inside(c)).prices, self.count(c))
    }

    /// The configuration of a leaf, with its stages cut by their times where that is faster.
    pub fn configuration(&self, path: &Path, bytes_max: f64) -> (Configuration, Step) {
        let (mut c, step) = self.cut(path, bytes_max);
        if c.recomputes_all(self.domain.layers) {
            c.recompute = Recompute::Full;
        }
        (c, step)
    }

    fn cut(&self, path: &Path, bytes_max: f64) -> (Configuration, Step) {
        let even = decisions::configuration(&self.domain, path);
        if self.is_free(&even) {
            return self.found(path, even, bytes_max);
        }
        let table = self.table(self.estimator.inside(&even));
        let count = self.count(&even);
        let mut best = (even.clone(), self.estimator.step(&even, &table.prices, count));
        let recomputed = AGAIN.iter().position(|recomputed| *recomputed == even.recompute);
        let Some(recomputed) = recomputed.filter(|_| self.may_be_uneven(&even)) else {
            return best;
        };
        let stage_layers = table.balanced(even.pp, recomputed).layers.clone();
        if stage_layers.is_empty() {
            return best;
        }
        let uneven = Configuration { stage_layers, ..even };
        let step = self.estimator.step(&uneven, &table.prices, count);
        let [now, other] = [&best.1, &step].map(|step| step.memory.total_bytes());
        let objective_value =
            |step: &Step| self.objective_value(step.breakdown.total_s(), step.busy_s);
        let faster = objective_value(&step) < objective_value(&best.1);
        if (now > bytes_max && other < now) || (faster && other <= bytes_max) {
            best = (uneven, step);
        }
        best
    }

    /// Whether stages that are cut by their times are a choice: interleaved ones are not, and the
    /// tool that is planned for may take none.
    pub(super) fn may_be_uneven(&self, c: &Configuration) -> bool {
        c.pp > 1 && c.vpp == 1 && self.domain.uneven
    }

    /// The stages that leaves below a configuration may have: even ones, and those that are
    /// balanced for what they recompute.
    fn cuts(&self, c: &Configuration, table: &Table, recomputed: &[usize]) -> Vec<Vec<u32>> {
        let mut cuts = vec![Vec::new()];
        if self.may_be_uneven(c) {
            for recomputed in recomputed {
                let balanced = table.balanced(c.pp, *recomputed);
                if !cuts.contains(&balanced.layers) {
                    cuts.push(balanced.layers.clone());
                }
            }
        }
        cuts
    }

    /// Lower bound on the objective value below a path that does not say where axes are placed:
    /// each is placed best.
    fn unplaced(&self, path: &Path) -> f64 {
        if path.values().len() + 1 == INSIDE {
            let c = decisions::configuration(&self.domain, path);
            let table = self.table(self.estimator.inside(&c).near());
            let passes_s = table.passes_s(c.pp, self.count(&c), table.bottleneck_s(c.pp));
            return self.least_worth(passes_s, &table, &c);
        }
        let mut options = Vec::new();
        decisions::options(&self.domain, path, &mut options);
        let below = options.iter().map(|value| self.unplaced(&path.then(*value)));
        below.fold(f64::INFINITY, f64::min)
    }

    /// The bound of a whole inside: the slowest stage works on all micro-batches. Nothing below the
    /// second of two placements that are alike is better than what is below the first.
    fn placed(&self, path: &Path) -> f64 {
        let c = decisions::configuration(&self.domain, path);
        let own = path.values()[INSIDE - 1];
        let orders = self.placements(&path.first(INSIDE - 1));
        let at = orders.iter().position(|(order, _)| *order == own).unwrap_or_default();
        if orders[..at].iter().any(|(_, other)| *other == orders[at].1) {
            return f64::INFINITY;
        }
        let table = self.table(self.estimator.inside(&c));
        let bottleneck_s = match self.may_be_uneven(&c) {
            true => table.balanced(c.pp, 0).least_s,
            false => table.bottleneck_s(c.pp),
        };
        self.least_worth(table.passes_s(c.pp, self.count(&c), bottleneck_s), &table, &c)
    }

    /// The orders that can follow, each with what of it a step depends on; kept for the next one.
    fn placements(&self, before: &Path) -> Rc<Placements> {
        let mut kept = self.placements.borrow_mut();
        if let Some((_, placements)) = kept.as_ref().filter(|(other, _)| other == before) {
            return Rc::clone(placements);
        }
        let mut orders = Vec::new();
        decisions::options(&self.domain, before, &mut orders);
        let placement = |order: u32| {
            let c = decisions::configuration(&self.domain, &before.then(order));
            (order, self.estimator.placement(&c))
        };
        let placements = Rc::new(orders.into_iter().map(placement).collect::<Vec<_>>());
        *kept = Some((*before, Rc::clone(&placements)));
        placements
    }

    /// Whether a configuration shards over some ranks what takes no longer and is smaller over all
    /// of them: gradients and weights that are exchanged among all ranks either way.
    fn shards_too_little(&self, c: &Configuration) -> bool {
        (1..3).contains(&c.zero.stage)
            && c.zero.shard > 0
            && self.domain.limits.allow_whole_shards(c)
    }

    fn bound_below_inside(&self, path: &Path, below: f64) -> Score {
        let c = decisions::configuration(&self.domain, path);
        let decided = path.values().len();
        if self.shards_too_little(&c) {
            return Score { seconds: f64::INFINITY, bytes: 0.0 };
        }
        let table = self.table(self.estimator.inside(&c));
        if self.is_free(&c) {
            return self.bound_of_all_cuts(path, &c, &table, below);
        }
        let mut passes = self.least_passes(path, &table, Recompute::None);
        let mut seconds = self.least_worth(fastest_s(&passes), &table, &c);
        let mut bytes = 0.0;
        if seconds < below {
            bytes = self.least_bytes(path, &c, decided);
            if self.only_fits && bytes <= self.estimator.memory_bytes {
                passes = self.least_passes_that_fit(path, &c, &table);
                seconds = self.least_worth(fastest_s(&passes), &table, &c);
            }
        }
        if decided > SCHEDULE && seconds < below {
            seconds = f64::INFINITY;
            // What is recomputed hides collectives, and leaves the least to be moved.
            let mut full = Configuration { recompute: Recompute::Full, ..c.clone() };
            for (stages, passes_s) in passes.iter() {
                let least = self.least_worth(*passes_s, &table, &c);
                if least >= below.min(seconds) {
                    seconds = seconds.min(least);
                    continue;
                }
                full.stage_layers.clone_from(stages);
                let parts = self.estimator.after(&full, &table.prices, self.count(&c));
                let moves_s = match decided == SCHEDULE + 1 {
                    true => 0.0,
                    false => parts.optimizer_s + parts.offload_s,
                };
                let after_s = parts.gradients_s + parts.weights_s + moves_s;
                seconds = seconds.min(self.least_worth(passes_s + after_s, &table, &c));
            }
        }
        Score { seconds, bytes }
    }

    /// The stage partitions that candidates below a schedule may have, each with a lower bound on
    /// the seconds of its passes for `recomputed` or more recomputation: every path through the
    /// passes grows with each of them. Kept for the decisions that follow.
    fn least_passes(&self, path: &Path, table: &Table, recomputed: Recompute) -> Rc<Passes> {
        let schedule = path.first(SCHEDULE);
        let mut kept = self.passes.borrow_mut();
        if kept.as_ref().is_none_or(|(other, _)| *other != schedule) {
            *kept = None;
        }
        let (_, all) = kept.get_or_insert_with(|| (schedule, FxHashMap::default()));
        let passes = all.entry(recomputed).or_insert_with(|| {
            let c = decisions::configuration(&self.domain, &schedule);
            let mut fast = Configuration { recompute: recomputed, ..c.clone() };
            let mut passes = Vec::new();
            for stages in self.cuts(&c, table, &[0, 1, 2]) {
                fast.stage_layers = stages;
                let parts = self.estimator.passes(&fast, &table.prices, self.count(&c));
                passes.push((fast.stage_layers.clone(), parts.total_s()));
            }
            Rc::new(passes)
        });
        Rc::clone(passes)
    }

    /// Lower bounds on the passes of candidates that fit in memory, by stage partition: those of
    /// the recomputation with the fastest passes among those that fit.
    fn least_passes_that_fit(&self, path: &Path, c: &Configuration, table: &Table) -> Rc<Passes> {
        let recomputed = self.least_again(c, path.values().len(), |small| {
            self.bytes_of_usual(path, small, table) <= self.estimator.memory_bytes
        });
        let passes =
            recomputed.into_iter().map(|recomputed| self.least_passes(path, table, recomputed));
        passes.min_by(|a, b| fastest_s(a).total_cmp(&fastest_s(b))).unwrap_or_default()
    }

    /// What leaves recompute that fit: one of these, or more than it. `fits` says whether a
    /// leaf does where all that is open but its stages and what it recomputes is as small as
    /// can be.
    pub(super) fn least_again(
        &self,
        c: &Configuration,
        decided: usize,
        fits: impl Fn(&Configuration) -> bool,
    ) -> Vec<Recompute> {
        let small: Vec<Configuration> = self.smallest(c, decided).collect();
        let fits = |recompute: Recompute| {
            let with = |small: &Configuration| Configuration { recompute, ..small.clone() };
            small.iter().any(|small| fits(&with(small)))
        };
        if fits(Recompute::None) {
            return vec![Recompute::None];
        }
        // Counts of layers below those of an even stage, ascending.
        let counts = (self.domain.layers.div_ceil(c.pp) - 1) / c.vpp;
        let (mut low, mut high) = (0, counts);
        while low < high {
            let middle = low + (high - low) / 2;
            match fits(Recompute::Layers((middle + 1) * c.vpp)) {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        let layers = Recompute::Layers((low + 1).min(counts) * c.vpp);
        // Stages that need not be even may be shorter.
        let whole = if low == counts && !self.is_free(c) { Recompute::Full } else { layers };
        let attention = Some(Recompute::Attention).filter(|attention| fits(*attention));
        std::iter::once(whole).chain(attention).collect()
    }

    /// Configurations of which one is the smallest of all candidates below, apart from
    /// recomputation and stage partition.
    fn smallest(&self, c: &Configuration, decided: usize) -> impl Iterator<Item = Configuration> {
        let small = c.clone();
        // What is whole while it is used may be more than what is saved between uses.
        let zeros = match decided {
            ..=SCHEDULE => [3, 2, 1, 0].map(|stage| Zero { stage, shard: 0 }).to_vec(),
            _ => vec![c.zero],
        };
        // No limit is known of a disk.
        let far = if self.domain.disk { Place::Disk } else { Place::Host };
        let [optimizer, activations] = [far; 2];
        let away = |parameters| Offload { optimizer, parameters, activations };
        let offloads = match decided {
            ..=ZERO => [far, Place::Device].map(away).to_vec(),
            _ => vec![c.offload],
        };
        let each = zeros
            .into_iter()
            .flat_map(move |zero| offloads.clone().into_iter().map(move |offload| (zero, offload)));
        each.map(move |(zero, offload)| Configuration { zero, offload, ..small.clone() })
    }

    /// Bytes that no leaf below has less of.
    pub(super) fn least_bytes(&self, path: &Path, c: &Configuration, decided: usize) -> f64 {
        let table = self.table(self.estimator.inside(c));
        let mut least = f64::INFINITY;
        for mut small in self.smallest(c, decided) {
            // What computes the most again is the least of nearly all.
            for recompute in AGAIN.into_iter().rev() {
                small.recompute = recompute;
                least = least.min(self.bytes_of_usual(path, &small, &table));
                if self.only_fits && least <= self.estimator.memory_bytes {
                    return 0.0;
                }
            }
            small.recompute = Recompute::Full;
            if self.is_free(&small) && self.fits(path, &small, &table) {
                return 0.0;
            }
        }
        least
    }

    /// Bytes of the smallest of the usual stage partitions of a configuration; where only fitting
    /// matters, of the first that fits, which is not kept. The path says what its schedule is.
    fn bytes_of_usual(&self, path: &Path, c: &Configuration, table: &Table) -> f64 {
        if let Some(bytes) =
            self.known(path, |known| known.bytes.get(&memory_decisions(c)).copied())
        {
            return bytes;
        }
        let recomputed = AGAIN.iter().position(|recomputed| *recomputed == c.recompute);
        let (mut c, count) = (c.clone(), self.count(c));
        let mut least = f64::INFINITY;
        for stages in self.cuts(&c, table, recomputed.as_slice()) {
            c.stage_layers = stages;
            least = least.min(self.estimator.bytes(&c, &table.prices, count));
            if self.only_fits && least <= self.estimator.memory_bytes {
                return least;
            }
        }
        self.known(path, |known| known.bytes.insert(memory_decisions(&c), least));
        least
    }
}

fn fastest_s(passes: &Passes) -> f64 {
    passes.iter().map(|(_, seconds)| *seconds).fold(f64::INFINITY, f64::min)
}

/// Of candidates that stand for all their stage partitions: the partitions that are better than the
/// usual ones, and the lower bounds where not all were tried.
#[derive(Debug, Default)]
pub struct Kept {
    found: FxHashMap<Path, Vec<u32>>,
    unfinished: FxHashMap<Path, f64>,
}

/// Takes out what lies below a path.
fn take_below<T>(all: &RefCell<FxHashMap<Path, T>>, path: &Path) -> FxHashMap<Path, T> {
    let decided = path.values().len();
    let all = &mut *all.borrow_mut();
    let (below, other) =
        std::mem::take(all).into_iter().partition(|(p, _)| p.first(decided) == *path);
    *all = other;
    below
}

impl Tree for Space<'_> {
    type Kept = Kept;

    fn take_kept(&self, path: &Path) -> Kept {
        let found = take_below(&self.found, path);
        Kept { found, unfinished: take_below(&self.unfinished, path) }
    }

    fn keep(&self, kept: Kept) {
        self.found.borrow_mut().extend(kept.found);
        self.unfinished.borrow_mut().extend(kept.unfinished);
    }

    fn depth(&self) -> usize {
        STEPS.len()
    }

    fn kind_depth(&self) -> usize {
        MESH
    }

    fn options(&self, path: &Path, options: &mut Vec<u32>) {
        decisions::options(&self.domain, path, options);
    }

    fn looks_ahead(&self) -> u32 {
        2
    }

    fn keep_ahead(&self, path: &Path, time: u32, options: &mut Vec<u32>) {
        decisions::keep_ahead(path, time, options);
    }

    fn shape(&self, path: &Path) -> u64 {
        decisions::shape(&self.domain, path)
    }

    fn bound(&self, path: &Path, below: f64) -> Score {
        let decided = path.values().len();
        if decided > INSIDE {
            return self.bound_below_inside(path, below);
        }
        if decided == INSIDE {
            return Score { seconds: self.placed(path), bytes: 0.0 };
        }
        if decided > MESH {
            let seconds = self.unplaced(path);
            // Where axes are placed does not matter to memory.
            let known = decided + 1 == INSIDE && seconds < below;
            let c = decisions::configuration(&self.domain, path);
            let bytes = if known { self.least_bytes(path, &c, decided) } else { 0.0 };
            return Score { seconds, bytes };
        }
        if let Some(score) = self.meshes.borrow().get(path) {
            return *score;
        }
        let mut options = Vec::new();
        self.options(path, &mut options);
        let seconds = match decided {
            MESH => self.unplaced(path),
            _ => {
                let bounds = options.iter().map(|v| self.bound(&path.then(*v), below).seconds);
                bounds.fold(f64::INFINITY, f64::min)
            }
        };
        let score = Score { seconds, bytes: 0.0 };
        self.meshes.borrow_mut().insert(*path, score);
        score
    }

    /// Each layer more that is recomputed keeps its input alone. It need not be slower: more of
    /// the exchanges may be hidden. All layers are one more than most, of all cuts.
    fn shrinks(&self, before: u32, after: u32) -> bool {
        let is_more = decisions::counts_layers(after) || decisions::is_full(after);
        // Where counts are asked for, they are looked at beside moved activations too.
        let is_asked = decisions::asks_for_counts(&self.domain);
        self.only_fits && !is_asked && decisions::counts_layers(before) && is_more
    }

    /// Passes grow with each layer that is recomputed; what is hidden behind them, and what is
    /// moved away, shrinks.
    fn parts(&self, path: &Path, bytes_max: f64, below: f64) -> (Score, [f64; 2]) {
        let c = decisions::configuration(&self.domain, path);
        if self.is_free(&c) {
            return self.parts_of_all_cuts(path, &c, bytes_max, below);
        }
        let (_, step) = self.configuration(path, bytes_max);
        let parts = step.breakdown;
        let after_s = parts.gradients_s + parts.weights_s + parts.optimizer_s + parts.offload_s;
        let seconds = parts.total_s();
        let score = Score {
            seconds: self.objective_value(seconds, step.busy_s),
            bytes: step.memory.total_bytes(),
        };
        (
            score,
            [
                self.objective_value(seconds - after_s, step.busy_s),
                self.objective_value(after_s, 0.0),
            ],
        )
    }

    /// Where nothing but time is to be small: what there is, if any cut fits.
    fn bytes(&self, path: &Path) -> f64 {
        let c = decisions::configuration(&self.domain, path);
        let table = self.table(self.estimator.inside(&c));
        let least = self.bytes_of_usual(path, &c, &table);
        let have = self.estimator.memory_bytes;
        match self.is_free(&c) && least > have && self.fits(path, &c, &table) {
            true => have,
            false => least,
        }
    }

    fn score(&self, path: &Path, bytes_max: f64, seconds: f64) -> Score {
        self.parts(path, bytes_max, seconds).0
    }
}
