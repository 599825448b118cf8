//! The search over all stage partitions, where time is minimised.
//!
//! There are far too many to walk. Below a configuration all of them have one bound
//! ([`cut`](crate::estimate::cut)), and where it is below the best so far, the cuts within it are
//! tried. Where they are too many, single layers of the answers are moved from stage to stage
//! instead, and how far the answer may be from the best of all cuts is part of its gap.

use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::branch_and_bound::{Leaf, Path, ROUNDING, Score};
use super::decisions;
use super::known::{Known, memory_decisions};
use super::table::{AGAIN, Table};
use super::uniform::{INSIDE, SCHEDULE, Space};
use crate::configuration::{Configuration, Recompute};
use crate::estimate::cut::{Exchanged, LowerBound, Room, StagePartitions, Wanted};
use crate::estimate::step::Step;

#[cfg(test)]
mod tests;

/// Stages beyond which layers move between neighbours alone. Chosen: as for [`WORK_MAX`].
const ALL_PAIRS_MAX: u32 = 16;
/// Stages that are priced at most to move the layers of a configuration. Chosen: some milliseconds.
const WORK_MAX: u32 = 20_000;
/// Stages that are looked at for all cuts of a leaf, at most: while the best is sought, and where
/// they may be better than what was found. Chosen: some hundredths of a millisecond; some
/// milliseconds.
const LOOKS: [u32; 2] = [100, 10_000];

/// Leaves that are searched longer after one whose partitions were not all tried, where none is
/// better: the lower bound is that of the first, and grows no more. Chosen: about half a second.
const IN_VAIN_MAX: u32 = 50;

/// Stages beyond which it is not asked how much has to be recomputed. Chosen: to find out takes
/// longer than what it saves.
const FITTED_MAX: u32 = 16;

/// A cut and its step.
type Priced = (Configuration, Step);

impl Space<'_> {
    /// Whether a configuration stands for all cuts of its layers.
    pub(super) fn is_free(&self, c: &Configuration) -> bool {
        self.only_fits && self.may_be_uneven(c)
    }

    /// Searches longer below candidates whose stage partitions were not all tried and may be better
    /// than the best, or than `below` where there is none. Returns the lower bound on the objective
    /// value over the partitions that are still not tried.
    pub fn finish(
        &self,
        best: &mut Option<Leaf>,
        [bytes_max, below]: [f64; 2],
        stop: &(dyn Fn() -> bool + Sync),
    ) -> f64 {
        let mut open: Vec<(f64, Path)> =
            self.unfinished.borrow().iter().map(|(path, bound)| (*bound, *path)).collect();
        open.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let (mut least, mut in_vain) = (f64::INFINITY, 0);
        for (bound, path) in open {
            let below = best.map_or(below, |best| best.score.seconds);
            if bound >= below || in_vain == IN_VAIN_MAX || stop() {
                return least.min(bound);
            }
            let c = decisions::configuration(&self.domain, &path);
            let (_, step) = self.best_cut(&path, &c, [bytes_max, below], LOOKS[1]).0;
            let score =
                Score { seconds: self.objective_value_of(&step), bytes: step.memory.total_bytes() };
            least = self.unfinished.borrow().get(&path).map_or(least, |bound| least.min(*bound));
            in_vain += u32::from(least < f64::INFINITY);
            if score.bytes <= bytes_max && score.seconds < below {
                *best = Some(Leaf { path, score });
                in_vain = 0;
            }
        }
        least
    }

    /// Whether any cut of a configuration fits. The path says what its schedule is.
    pub(super) fn fits(&self, path: &Path, c: &Configuration, table: &Table) -> bool {
        if let Some(fits) = self.known(path, |known| known.fits.get(&memory_decisions(c)).copied())
        {
            return fits;
        }
        let sums = table.sums(self.estimator.sends_far(c));
        let cuts = self.estimator.cuts(c, (&table.prices, sums), self.count(c), Rc::default());
        let fits = cuts.fitting(self.estimator.memory_bytes).is_some();
        self.known(path, |known| known.fits.insert(memory_decisions(c), fits));
        fits
    }

    /// Upper bound on the seconds of a step with the given objective value.
    fn seconds_of(&self, objective_value: f64, least_busy_s: f64) -> f64 {
        match self.power {
            Some(power) => {
                let busy_j = (power.busy_w.value - power.idle_w.value) * least_busy_s;
                (objective_value - busy_j) / power.idle_w.value.max(f64::MIN_POSITIVE)
            }
            None => objective_value,
        }
    }

    fn objective_value_of(&self, step: &Step) -> f64 {
        self.objective_value(step.breakdown.total_s(), step.busy_s)
    }

    /// The bound of what lies below a schedule that leaves all cuts open.
    pub(super) fn bound_of_all_cuts(
        &self,
        path: &Path,
        c: &Configuration,
        table: &Table,
        below: f64,
    ) -> Score {
        let decided = path.values().len();
        // Every path through the passes grows with each of them.
        let fast = Configuration { recompute: Recompute::None, ..c.clone() };
        let fast = self.all_cuts(path, &fast, table);
        let (least, _) = self.least(path, &fast, Recompute::None);
        let seconds = self.least_worth(least.passes_s, table, c);
        if seconds >= below {
            return Score { seconds, bytes: 0.0 };
        }
        let bytes = self.least_bytes(path, c, decided);
        if bytes > self.estimator.memory_bytes {
            return Score { seconds, bytes };
        }
        let passes_s = self.least_s_that_fits(path, c, table, &least);
        let mut seconds = self.least_worth(passes_s, table, c);
        if decided > SCHEDULE && below < f64::INFINITY && seconds < below {
            // What is recomputed hides collectives, and leaves the least to be moved.
            let full = Configuration { recompute: Recompute::Full, ..c.clone() };
            let cuts = self.all_cuts(path, &full, table);
            let below_s = self.seconds_of(below, self.least_busy_s(table, c));
            // What is known of the decisions before, without moves, may be enough by now.
            let known = self.known(path, |known| known.after_s.get(&path.before()).copied());
            let mut after_s =
                known.filter(|[known_s, _]| below_s <= *known_s).map_or(0.0, |k| k[1]);
            if self.least_worth(passes_s + after_s, table, c) < below {
                let room = self.room(path, &fast, &least, below_s);
                let own_s = |room: Room| cuts.after_bound_s(&room, decided > SCHEDULE + 1);
                after_s = after_s.max(room.map_or(f64::INFINITY, own_s));
            }
            self.known(path, |known| known.after_s.insert(*path, [below_s, after_s]));
            seconds = self.least_worth(passes_s + after_s, table, c);
        }
        Score { seconds, bytes }
    }

    /// Lower bound, in seconds, on the passes of the stage partitions that fit. They recompute at
    /// least as much as is needed where all else is as small as it can be. `least` is the bound
    /// with nothing recomputed.
    fn least_s_that_fits(
        &self,
        path: &Path,
        c: &Configuration,
        table: &Table,
        least: &LowerBound,
    ) -> f64 {
        if c.pp > FITTED_MAX {
            return least.passes_s;
        }
        let recomputed =
            self.least_again(c, path.values().len(), |small| self.fits(path, small, table));
        let passes_s = |recomputed: Recompute| {
            let c = Configuration { recompute: recomputed, ..c.clone() };
            self.least(path, &self.all_cuts(path, &c, table), recomputed).0.passes_s
        };
        recomputed.into_iter().map(passes_s).fold(f64::INFINITY, f64::min)
    }

    /// The cuts of a configuration below a schedule; whatever it recomputes.
    fn all_cuts<'b>(
        &'b self,
        path: &Path,
        c: &'b Configuration,
        table: &'b Table,
    ) -> StagePartitions<'b> {
        let sharded = path.values().get(SCHEDULE).copied();
        let exchanged = self.exchanged(path, sharded);
        let sums = table.sums(self.estimator.sends_far(c));
        self.estimator.cuts(c, (&table.prices, sums), self.count(c), exchanged)
    }

    /// Collectives of stages that were looked at, of an inside and of what is sharded.
    fn exchanged(&self, path: &Path, sharded: Option<u32>) -> Rc<Exchanged> {
        let inside = path.first(INSIDE);
        let mut kept = self.exchanged.borrow_mut();
        let known = match kept.take().filter(|(other, _)| *other == inside) {
            Some((_, known)) => known,
            None => FxHashMap::default(),
        };
        Rc::clone(kept.insert((inside, known)).1.entry(sharded).or_default())
    }

    /// What is known of the schedule of a path.
    pub(super) fn known<T>(&self, path: &Path, of: impl FnOnce(&mut Known) -> T) -> T {
        let schedule = path.first(SCHEDULE);
        let mut kept = self.known.borrow_mut();
        if kept.as_ref().is_some_and(|(other, _)| *other != schedule) {
            *kept = None;
        }
        of(&mut kept.get_or_insert_with(|| (schedule, Known::default())).1)
    }

    /// [`Cuts::least`] of what is recomputed, found once for a schedule.
    fn least(
        &self,
        path: &Path,
        cuts: &StagePartitions<'_>,
        recomputed: Recompute,
    ) -> (LowerBound, Vec<u32>) {
        self.known(path, |known| {
            if let Some((_, found)) = known.least.iter().find(|(other, _)| *other == recomputed) {
                return found.clone();
            }
            let found = cuts.least();
            known.least.push((recomputed, found.clone()));
            found
        })
    }

    /// How many layers stages can have in partitions whose step is faster than `below_s` seconds,
    /// whatever is recomputed; none where no partition is. `fast` recomputes nothing.
    fn room(
        &self,
        path: &Path,
        fast: &StagePartitions<'_>,
        least: &LowerBound,
        below_s: f64,
    ) -> Option<Room> {
        self.known(path, |known| match known.room {
            Some((seconds, room)) if seconds == below_s => room,
            _ => known.room.insert((below_s, fast.room(least, [below_s, f64::INFINITY]))).1,
        })
    }

    /// The best of the usual cuts and of `more`: the fastest that fits, or the smallest. Where a
    /// stage has to be deep, `more` alone.
    fn usual(
        &self,
        cuts: &StagePartitions<'_>,
        more: Vec<u32>,
        bytes_max: f64,
        table: &Table,
    ) -> Priced {
        let (c, is_deep) = (cuts.configuration(), cuts.deeper_than() > 0);
        let recomputed = AGAIN.iter().position(|recomputed| *recomputed == c.recompute);
        let balanced = recomputed.map(|recomputed| table.balanced(c.pp, recomputed).layers.clone());
        let mut cuts = if is_deep { Vec::new() } else { vec![Vec::new()] };
        for layers in balanced.into_iter().chain([more]) {
            let is_even = layers == even(self.domain.layers, c.pp);
            if !is_even && !cuts.contains(&layers) {
                cuts.push(layers);
            }
        }
        let price = |stage_layers| {
            let cut = Configuration { stage_layers, ..c.clone() };
            let step = self.estimator.step(&cut, &table.prices, self.count(c));
            (cut, step)
        };
        let mut cuts = cuts.into_iter();
        let mut best = price(cuts.next().unwrap_or_default());
        for layers in cuts {
            let other = price(layers);
            let [now, next] = [&best.1, &other.1].map(|step| step.memory.total_bytes());
            let is_faster = self.objective_value_of(&other.1) < self.objective_value_of(&best.1);
            if (now > bytes_max && next < now) || (is_faster && next <= bytes_max) {
                best = other;
            }
        }
        best
    }

    /// The best stage partition of a candidate, and the parts of its lower bound: of its passes,
    /// and of what follows them. A partition that is not better than `below` need not be found.
    fn best_cut(
        &self,
        path: &Path,
        c: &Configuration,
        [bytes_max, below]: [f64; 2],
        work_max: u32,
    ) -> (Priced, [f64; 2]) {
        // It may have been looked at before, when less was known.
        self.unfinished.borrow_mut().remove(path);
        let table = self.table(self.estimator.inside(c));
        let cuts = self.all_cuts(path, c, &table);
        let (least, filled) = self.least(path, &cuts, c.recompute);
        let mut best = self.usual(&cuts, filled, bytes_max, &table);
        let more = self.least_of_more(path, &cuts, least.passes_s);
        if best.1.memory.total_bytes() > bytes_max {
            let Some(layers) = cuts.fitting(bytes_max) else { return (best, [more, 0.0]) };
            if layers.iter().max() > Some(&cuts.deeper_than()) {
                best = self.usual(&cuts, layers, bytes_max, &table);
            }
        }
        let is_known = best.1.memory.total_bytes() <= bytes_max;
        let below = if is_known { below.min(self.objective_value_of(&best.1)) } else { below };
        let least_busy_s = self.least_busy_s(&table, c);
        let below_s = self.seconds_of(below, least_busy_s);
        let is_beaten = |after_s: f64| {
            self.least_worth(least.passes_s + after_s, &table, c) >= below * (1.0 - ROUNDING)
        };
        let [own_s, after_s] =
            self.after_bound_s(path, &cuts, &least, [below_s, bytes_max], &is_beaten, work_max);
        let parts = [more, self.objective_value(after_s, 0.0)];
        if is_beaten(own_s) {
            return (best, parts);
        }
        let wanted = Wanted {
            bytes_max,
            objective_value: &|step: &Step| self.objective_value_of(step),
            seconds: &|objective_value: f64| self.seconds_of(objective_value, least_busy_s),
            below,
            work_max,
        };
        let kept = best.0.stage_layers.clone();
        if !self.try_cuts(&cuts, (&least, own_s), &wanted, &mut best) {
            let bound = self.least_worth(least.passes_s + own_s, &table, c);
            self.unfinished.borrow_mut().insert(*path, bound);
        }
        if best.0.stage_layers != kept {
            self.found.borrow_mut().insert(*path, best.0.stage_layers.clone());
        }
        (best, parts)
    }

    /// Lower bound on the objective value of candidates that recompute more than this one, whose
    /// passes take `passes_s`. Full recomputation is compared with candidates that recompute all
    /// layers of an even stage but one: there, not all layers of the deepest stage are recomputed.
    fn least_of_more(&self, path: &Path, cuts: &StagePartitions<'_>, passes_s: f64) -> f64 {
        let c = cuts.configuration();
        let table = self.table(self.estimator.inside(c));
        if c.recompute != Recompute::Full {
            return self.least_worth(passes_s, &table, c);
        }
        let most = self.domain.layers.div_ceil(c.pp) - 1;
        let recompute = if most == 0 { Recompute::None } else { Recompute::Layers(most) };
        let fewer = Configuration { recompute, ..c.clone() };
        let (least, _) = self.least(path, &self.all_cuts(path, &fewer, &table), recompute);
        self.least_worth(least.passes_s, &table, c)
    }

    /// Lower bounds, in seconds, on collectives, optimizer update and offload over all stage
    /// partitions of a candidate whose step is faster than `below_s`: of this candidate, and of it
    /// and those that recompute less. The bound known for any recomputation is often enough, and
    /// then it is both.
    fn after_bound_s(
        &self,
        path: &Path,
        cuts: &StagePartitions<'_>,
        least: &LowerBound,
        [below_s, bytes_max]: [f64; 2],
        is_beaten: &dyn Fn(f64) -> bool,
        work_max: u32,
    ) -> [f64; 2] {
        let known = self.known(path, |known| known.after_s.get(&path.before()).copied());
        let known_s = known.filter(|[known_s, _]| below_s <= *known_s).map_or(0.0, |k| k[1]);
        if is_beaten(known_s) {
            return [known_s; 2];
        }
        let least_s =
            |room: Option<Room>| room.map_or(f64::INFINITY, |room| cuts.after_bound_s(&room, true));
        let passes_s = below_s - known_s;
        let room = cuts.room(least, [passes_s, bytes_max]);
        if room.is_some_and(|room| room.stages() > work_max) {
            return [known_s; 2];
        }
        let own_s = known_s.max(least_s(room));
        if is_beaten(own_s) || !matches!(cuts.configuration().recompute, Recompute::Layers(_)) {
            return [own_s, known_s];
        }
        // Neighbours that compute less again have more room.
        let fast = Configuration { recompute: Recompute::None, ..cuts.configuration().clone() };
        let table = self.table(self.estimator.inside(&fast));
        let fast = self.all_cuts(path, &fast, &table);
        let (least, _) = self.least(path, &fast, Recompute::None);
        let room = self.room(path, &fast, &least, below_s);
        [own_s, known_s.max(least_s(room))]
    }

    /// Tries the cuts that can be better; whether it were all.
    fn try_cuts(
        &self,
        cuts: &StagePartitions<'_>,
        (least, after_s): (&LowerBound, f64),
        wanted: &Wanted<'_>,
        best: &mut Priced,
    ) -> bool {
        let found = cuts.best(least, after_s, wanted);
        if let Some((stage_layers, step)) = found.best {
            let is_large = best.1.memory.total_bytes() > wanted.bytes_max;
            if is_large || self.objective_value_of(&step) < self.objective_value_of(&best.1) {
                *best = (Configuration { stage_layers, ..best.0.clone() }, step);
            }
        }
        if best.0.stage_layers == even(self.domain.layers, best.0.pp) {
            best.0.stage_layers.clear();
        }
        found.complete
    }

    /// Moves layers between stages as long as that makes a step less and fits.
    fn descend(&self, best: &mut Priced, bytes_max: f64, table: &Table) {
        let c = &best.0;
        let near = c.pp > ALL_PAIRS_MAX;
        let moved = if near { 2 } else { c.pp };
        let rounds = WORK_MAX / moved.saturating_mul(c.pp).saturating_mul(c.pp).max(1);
        if best.0.stage_layers.is_empty() {
            best.0.stage_layers = even(self.domain.layers, best.0.pp);
        }
        for _ in 0..rounds {
            let mut least = self.objective_value_of(&best.1);
            let mut better = None;
            for stage_layers in moves(&best.0.stage_layers, near) {
                let moved = Configuration { stage_layers, ..best.0.clone() };
                // With all layers recomputed, which may be forbidden, it is another's.
                if moved.recomputes_all(self.domain.layers) {
                    continue;
                }
                let step = self.estimator.step(&moved, &table.prices, self.count(&moved));
                let fits = step.memory.total_bytes() <= bytes_max;
                if fits && self.objective_value_of(&step) < least * (1.0 - ROUNDING) {
                    least = self.objective_value_of(&step);
                    better = Some((moved, step));
                }
            }
            match better {
                Some(moved) => *best = moved,
                None => return,
            }
        }
    }

    /// The best cut of a leaf that was scored, or of any.
    pub(super) fn found(&self, path: &Path, c: Configuration, bytes_max: f64) -> Priced {
        let found = self.found.borrow().get(path).cloned();
        let mut best = match found {
            Some(stage_layers) => {
                let cut = Configuration { stage_layers, ..c };
                let step = self.step(&cut);
                (cut, step)
            }
            None => self.best_cut(path, &c, [bytes_max, f64::INFINITY], LOOKS[0]).0,
        };
        if self.unfinished.borrow().contains_key(path) {
            let table = self.table(self.estimator.inside(&best.0));
            self.descend(&mut best, bytes_max, &table);
        }
        if best.0.stage_layers == even(self.domain.layers, best.0.pp) {
            best.0.stage_layers.clear();
        }
        best
    }

    /// The score of a leaf, and two parts that no cut of it is below ([`parts`]).
    ///
    /// [`parts`]: super::branch_and_bound::Tree::parts
    pub(super) fn parts_of_all_cuts(
        &self,
        path: &Path,
        c: &Configuration,
        bytes_max: f64,
        below: f64,
    ) -> (Score, [f64; 2]) {
        let ((_, step), parts) = self.best_cut(path, c, [bytes_max, below], LOOKS[0]);
        let score =
            Score { seconds: self.objective_value_of(&step), bytes: step.memory.total_bytes() };
        (score, parts)
    }
}

/// Stages as even as they can be, longer ones first.
fn even(layers: u32, stages: u32) -> Vec<u32> {
    (0..stages).map(|at| layers / stages + u32::from(at < layers % stages)).collect()
}

/// Cuts with one layer more in one stage and one less in another: in the next one or the one before
/// alone, or in any.
pub(super) fn moves(layers: &[u32], near: bool) -> impl Iterator<Item = Vec<u32>> {
    let count = layers.len();
    let pairs = (0..count).flat_map(move |from| {
        let reach = if near { from.saturating_sub(1)..(from + 2).min(count) } else { 0..count };
        reach.map(move |to| (from, to))
    });
    pairs.filter(|(from, to)| from != to && layers[*from] > 1).map(|(from, to)| {
        let mut moved = layers.to_vec();
        moved[from] -= 1;
        moved[to] += 1;
        moved
    })
}
