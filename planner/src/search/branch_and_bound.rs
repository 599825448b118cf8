//! Decisions as a tree: counted without a visit, walked with bound and skip.
//!
//! A [`Tree`] names the values of each decision, given those before it, and a lower bound of all
//! that follows. The walk goes down the lowest bound first, so that the best so far is good early,
//! and skips what is too large or cannot be better. What was skipped is counted by [`Counter`],
//! which visits one subtree of each shape.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

mod abreast;

/// Decisions of a tree at most.
pub const DEPTH_MAX: usize = 16;
/// The part of a score below which a difference is rounding.
pub const ROUNDING: f64 = 1e-9;
/// Scored leaves from which on what is listed is looked for among fewer options. Chosen: some
/// tenths of a second.
const LISTED_MAX: u64 = 5_000;
/// Bounds that a budget counts as one scored leaf. Chosen: so many take about 0.1 ms.
const BOUNDS_PER_LEAF: u64 = 32;
/// Leaves of the budget between two looks at the clock. Chosen: a few milliseconds.
const CLOCK_EVERY: u64 = 256;

/// Values of the first decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path {
    values: [u32; DEPTH_MAX],
    len: u8,
}

impl Path {
    /// The path with one decision more.
    pub fn then(mut self, value: u32) -> Path {
        self.values[usize::from(self.len)] = value;
        self.len += 1;
        self
    }

    /// The path without its last decision.
    pub fn before(self) -> Path {
        self.first(usize::from(self.len).saturating_sub(1))
    }

    /// The path of the first decisions alone.
    pub fn first(mut self, count: usize) -> Path {
        for at in count..usize::from(self.len) {
            self.values[at] = 0;
        }
        self.len = self.len.min(count as u8);
        self
    }

    /// The values, first decision first.
    pub fn values(&self) -> &[u32] {
        &self.values[..usize::from(self.len)]
    }
}

/// What a choice costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Objective value: seconds of a step, or the joules of a device where energy is minimised.
    pub seconds: f64,
    /// Bytes of the fullest device.
    pub bytes: f64,
}

impl Score {
    /// Score of an infeasible candidate.
    pub const NEVER: Score = Score { seconds: f64::INFINITY, bytes: f64::INFINITY };
}

/// A tree of decisions. All leaves are equally deep.
pub trait Tree: Sized {
    /// What walks leave in a tree, beside what they answer.
    type Kept: Send;

    /// Takes out what was left of the leaves below a path, for a tree of the same leaves.
    fn take_kept(&self, path: &Path) -> Self::Kept;

    /// Puts in what was left in another tree.
    fn keep(&self, kept: Self::Kept);

    /// The number of decisions, at most [`DEPTH_MAX`].
    fn depth(&self) -> usize;

    /// The values of the next decision, what is simplest first. None where nothing can follow.
    fn options(&self, path: &Path, options: &mut Vec<u32>);

    /// How often the walk for the fastest leaf looks ahead, among few of the options.
    fn looks_ahead(&self) -> u32 {
        0
    }

    /// Keeps those options of the next decision that are looked at ahead, fewer the first time than
    /// the last, which is 1; most where it is 0, for what is listed. What is found among them is at
    /// hand for all that follows, however little bounds say of where it is.
    fn keep_ahead(&self, _path: &Path, _time: u32, _options: &mut Vec<u32>) {}

    /// What the options below a path depend on: equal shapes have equally many leaves.
    fn shape(&self, path: &Path) -> u64;

    /// Lower bounds, on the objective value and on the bytes, over all candidates below the path;
    /// where only fitting matters, over all that fit. Where the bound on the objective value is at
    /// least `seconds`, the bound on the bytes may be anything less.
    fn bound(&self, path: &Path, seconds: f64) -> Score;

    /// Decisions that tell apart what is listed beside the best, and what several threads walk.
    fn kind_depth(&self) -> usize {
        0
    }

    /// Whether, of two options of the last decision that follow each other, the leaf of the second
    /// is no larger than that of the first.
    fn shrinks(&self, _before: u32, _after: u32) -> bool {
        false
    }

    /// The bytes of a leaf alone: of its smallest form, where it stands for several.
    fn bytes(&self, path: &Path) -> f64 {
        self.score(path, f64::INFINITY, f64::INFINITY).bytes
    }

    /// The score of a leaf with two parts of its time, where options shrink ([`Tree::shrinks`]):
    /// one that no later option of the last decision makes less, and one that no earlier one does,
    /// back to where shrinking begins. No leaf between two is faster than the first part of the
    /// first and the second part of the second.
    fn parts(&self, path: &Path, bytes_max: f64, seconds: f64) -> (Score, [f64; 2]) {
        (self.score(path, bytes_max, seconds), [0.0; 2])
    }

    /// The score of a leaf with at most `bytes_max`, or of the smallest where none is. What is not
    /// below `seconds` need not be exact.
    fn score(&self, path: &Path, bytes_max: f64, seconds: f64) -> Score;
}

/// The objective of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// The fastest leaf that fits.
    Time,
    /// The smallest leaf, whether it fits or not.
    Memory,
}

/// How far a walk may go.
#[derive(Clone, Copy)]
pub struct Budget<'a> {
    /// Leaves that are scored at most; each bound counts as a 32nd of one.
    pub evaluations_max: u64,
    /// Says when to stop, by a clock: answers then depend on the machine.
    pub stop: &'a (dyn Fn() -> bool + Sync),
}

/// A leaf and its score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leaf {
    /// The decisions.
    pub path: Path,
    /// What they cost.
    pub score: Score,
}

/// What a walk found, and what it did not look at.
#[derive(Clone, Debug, PartialEq)]
pub struct Explored {
    /// The best leaf.
    pub best: Option<Leaf>,
    /// The fastest leaf that was scored of each kind, fastest first; those that fit, and others.
    pub kinds: [Vec<Leaf>; 2],
    /// Leaves of the tree.
    pub total: u128,
    /// Leaves that were scored.
    pub evaluated: u64,
    /// Leaves that were scored ahead of that; they are accounted for once more.
    pub scored_ahead: u64,
    /// The budget that is spent: these leaves, and a 32nd for each bound.
    pub spent: u64,
    /// Leaves that cannot be better than the best.
    pub bounded_out: u128,
    /// Leaves that cannot fit.
    pub too_large: u128,
    /// Whether all leaves are accounted for.
    pub complete: bool,
    /// No leaf of the tree that fits has a time below this.
    pub bound_s: f64,
}

/// Counts leaves, one subtree of each shape.
#[derive(Debug, Default)]
pub struct Counter {
    known: FxHashMap<(u8, u64), u128>,
}

impl Counter {
    /// The leaves below a path.
    pub fn count(&mut self, tree: &impl Tree, path: &Path) -> u128 {
        if usize::from(path.len) == tree.depth() {
            return 1;
        }
        let key = (path.len, tree.shape(path));
        if let Some(count) = self.known.get(&key) {
            return *count;
        }
        let mut options = Vec::new();
        tree.options(path, &mut options);
        let count = if usize::from(path.len) + 1 == tree.depth() {
            options.len() as u128
        } else {
            options.iter().map(|value| self.count(tree, &path.then(*value))).sum()
        };
        self.known.insert(key, count);
        count
    }
}

/// What a walk looks for.
#[derive(Clone, Copy, Debug)]
pub struct Aim {
    /// Objective to minimise.
    pub objective: Objective,
    /// Leaves with more do not fit.
    pub bytes_max: f64,
    /// Where time is minimised, candidates whose objective value is this or more need not be found.
    pub below_s: f64,
    /// Number of kinds whose fastest candidate is listed, where time is minimised: the kinds with
    /// the fastest ones, as far as looking ahead finds them.
    pub listed: usize,
}

impl Aim {
    /// Looks for what is small of all that fits.
    pub fn new(objective: Objective, bytes_max: f64) -> Aim {
        Aim { objective, bytes_max, below_s: f64::INFINITY, listed: 0 }
    }
}

/// Walks a tree; for the least time on all threads, on trees of the same leaves that `another`
/// makes.
///
/// # Determinism
/// The same tree and counted budget give the same answer: of candidates with equal scores, the one
/// found first.
pub fn explore<T: Tree>(
    tree: &T,
    another: &(impl Fn() -> T + Sync),
    aim: Aim,
    budget: &Budget<'_>,
) -> Explored {
    let mut walker = Walker::new(tree, aim, budget);
    let root = Path::default();
    let total = walker.count(&root);
    if total > 0 && aim.objective == Objective::Time {
        let paths = abreast::paths(tree, another);
        for time in (1..=tree.looks_ahead()).rev() {
            walker.ahead = Some(time);
            abreast::explore(&mut walker, another, &paths);
        }
        walker.ahead = None;
        abreast::explore(&mut walker, another, &paths);
        let is_quick = walker.scored() < LISTED_MAX;
        walker.ahead = Some(if is_quick { 1 } else { tree.looks_ahead() });
        abreast::list(&mut walker, another, &paths);
        if is_quick {
            walker.ahead = Some(0);
            abreast::list(&mut walker, another, &paths);
        }
    } else if total > 0 {
        walker.visit(&root, tree.bound(&root, f64::INFINITY));
    }
    walker.done(total)
}

/// What a walk has seen so far.
#[derive(Clone, Debug)]
struct Seen {
    best: Option<Leaf>,
    kinds: [BTreeMap<Path, Leaf>; 2],
    evaluated: u64,
    scored_ahead: u64,
    /// Bounds that were computed.
    bounds: u64,
    bounded_out: u128,
    too_large: u128,
    /// The least bound of what the budget left out.
    open_s: f64,
    stopped: bool,
}

impl Default for Seen {
    fn default() -> Seen {
        Seen {
            best: None,
            kinds: Default::default(),
            evaluated: 0,
            scored_ahead: 0,
            bounds: 0,
            bounded_out: 0,
            too_large: 0,
            open_s: f64::INFINITY,
            stopped: false,
        }
    }
}

/// A walk that goes on.
struct Walker<'a, T> {
    tree: &'a T,
    aim: Aim,
    /// The time that it looks ahead; none where it looks at everything.
    ahead: Option<u32>,
    budget: &'a Budget<'a>,
    /// How much of the budget is spent when the clock is looked at next.
    next_look: u64,
    counter: Counter,
    seen: Seen,
}

/// Keeps the fastest leaf of its kind.
fn keep_faster(kinds: &mut BTreeMap<Path, Leaf>, (kind, leaf): (Path, Leaf)) {
    let kept = kinds.entry(kind).or_insert(leaf);
    if leaf.score.seconds < kept.score.seconds {
        *kept = leaf;
    }
}

impl Seen {
    /// Adds what another walk saw that began with this.
    fn take(&mut self, other: Seen) {
        let seconds = |best: Option<Leaf>| best.map_or(f64::INFINITY, |best| best.score.seconds);
        if seconds(other.best) < seconds(self.best) {
            self.best = other.best;
        }
        for (all, own) in self.kinds.iter_mut().zip(other.kinds) {
            for leaf in own {
                keep_faster(all, leaf);
            }
        }
        self.evaluated += other.evaluated;
        self.scored_ahead += other.scored_ahead;
        self.bounds += other.bounds;
        self.bounded_out += other.bounded_out;
        self.too_large += other.too_large;
        self.open_s = self.open_s.min(other.open_s);
        self.stopped |= other.stopped;
    }

    /// Adds what another walk saw of leaves that are still to be accounted for.
    fn take_ahead(&mut self, other: Seen) {
        let Seen { best, kinds, evaluated, bounds, .. } = other;
        self.take(Seen { best, kinds, scored_ahead: evaluated, bounds, ..Seen::default() });
    }
}

/// What happens to the candidates below a path.
enum Fate {
    Visit,
    BoundedOut,
    TooLarge,
}

impl<'a, T: Tree> Walker<'a, T> {
    fn new(tree: &'a T, aim: Aim, budget: &'a Budget<'a>) -> Walker<'a, T> {
        let (counter, seen) = (Counter::default(), Seen::default());
        Walker { tree, aim, ahead: None, budget, next_look: 0, counter, seen }
    }

    /// What a walk of its own below a path begins with.
    fn seen_below(&self, path: &Path) -> Seen {
        let kind = path.first(self.tree.kind_depth());
        let known = |all: &BTreeMap<Path, Leaf>| all.get(&kind).map(|leaf| (kind, *leaf));
        Seen {
            best: self.seen.best,
            kinds: [0, 1].map(|at| known(&self.seen.kinds[at]).into_iter().collect()),
            ..Seen::default()
        }
    }

    /// Leaves that may still be scored.
    fn left(&self) -> u64 {
        self.budget.evaluations_max.saturating_sub(self.spent())
    }

    /// What of the budget is spent.
    fn spent(&self) -> u64 {
        self.scored() + self.seen.bounds / BOUNDS_PER_LEAF
    }

    /// Whether the budget is used up. If so, what lies above `bound` is recorded as left open.
    fn stops(&mut self, bound: Score) -> bool {
        let spent = self.spent();
        if !self.seen.stopped {
            self.seen.stopped = spent >= self.budget.evaluations_max;
        }
        if !self.seen.stopped && spent >= self.next_look {
            self.next_look = spent + CLOCK_EVERY;
            self.seen.stopped = (self.budget.stop)();
        }
        if self.seen.stopped {
            self.seen.open_s = self.seen.open_s.min(bound.seconds);
        }
        self.seen.stopped
    }

    fn scored(&self) -> u64 {
        self.seen.scored_ahead + self.seen.evaluated
    }

    /// The leaves below a path.
    fn count(&mut self, path: &Path) -> u128 {
        self.counter.count(self.tree, path)
    }

    /// The result of the search of a tree with `total` candidates.
    fn done(self, total: u128) -> Explored {
        let spent = self.spent();
        let Seen { best, kinds, evaluated, scored_ahead, .. } = self.seen;
        let Seen { bounded_out, too_large, open_s, stopped, .. } = self.seen;
        let fastest = best.map_or(f64::INFINITY, |leaf| leaf.score.seconds);
        Explored {
            total,
            evaluated,
            scored_ahead,
            spent,
            bounded_out,
            too_large,
            complete: !stopped,
            bound_s: fastest.min(open_s).min(self.aim.below_s),
            best,
            kinds: kinds.map(|kind| {
                let mut leaves: Vec<Leaf> = kind.into_values().collect();
                leaves.sort_by(|a, b| a.score.seconds.total_cmp(&b.score.seconds));
                leaves
            }),
        }
    }

    /// Looks at what lies below a path.
    fn visit(&mut self, path: &Path, bound: Score) {
        if self.stops(bound) {
            return;
        }
        let below = self.below();
        let mut options = Vec::new();
        self.tree.options(path, &mut options);
        if let Some(time) = self.ahead {
            self.tree.keep_ahead(path, time, &mut options);
        }
        if usize::from(path.len) + 1 == self.tree.depth() {
            self.visit_leaves(path, bound, &options);
            return;
        }
        let mut children: Vec<(Path, Score)> = options
            .iter()
            .map(|value| path.then(*value))
            .map(|child| (child, self.tree.bound(&child, below)))
            .collect();
        self.seen.bounds += children.len() as u64;
        match self.aim.objective {
            Objective::Memory => children.sort_by(|a, b| a.1.bytes.total_cmp(&b.1.bytes)),
            Objective::Time => {
                children.sort_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds));
            }
        }
        for (child, bound) in children {
            if self.is_open(&child, bound) {
                self.visit(&child, bound);
            }
        }
    }

    /// Whether something better may lie below a path. If not, what lies there is accounted
    /// for.
    fn is_open(&mut self, path: &Path, bound: Score) -> bool {
        match self.fate(bound) {
            Fate::Visit => return true,
            Fate::BoundedOut | Fate::TooLarge if self.ahead.is_some() => {}
            Fate::BoundedOut => self.seen.bounded_out += self.count(path),
            Fate::TooLarge => self.seen.too_large += self.count(path),
        }
        false
    }

    fn visit_leaves(&mut self, path: &Path, mut bound: Score, options: &[u32]) {
        let tree = self.tree;
        let is_time = self.aim.objective == Objective::Time;
        for run in options.chunk_by(|before, after| is_time && tree.shrinks(*before, *after)) {
            match self.fate(bound) {
                Fate::Visit => match run {
                    [alone] => self.visit_leaf(&path.then(*alone), bound),
                    run => bound = self.visit_shrinking(path, bound, run),
                },
                Fate::BoundedOut => self.seen.bounded_out += run.len() as u128,
                Fate::TooLarge => self.seen.too_large += run.len() as u128,
            }
        }
    }

    fn visit_leaf(&mut self, leaf: &Path, bound: Score) {
        if self.is_known_miss(leaf, bound) {
            self.seen.too_large += 1;
        } else {
            self.score(leaf, bound);
        }
    }

    /// Whether a leaf is too large, and no faster than another of its kind that is.
    fn is_known_miss(&self, path: &Path, bound: Score) -> bool {
        let kind = path.first(self.tree.kind_depth());
        let other = self.seen.kinds[1].get(&kind).map(|miss| miss.score.seconds);
        self.aim.objective == Objective::Time
            && other.is_some_and(|seconds| seconds <= bound.seconds)
            && self.tree.bytes(path) > self.aim.bytes_max
    }

    /// Finds the first option that fits, by bisection on bytes alone: those before it are too
    /// large. After it, options between two that were scored are skipped where they cannot be
    /// better. Returns the lower bound over the later options.
    fn visit_shrinking(&mut self, path: &Path, bound: Score, options: &[u32]) -> Score {
        let low = options
            .partition_point(|value| self.tree.bytes(&path.then(*value)) > self.aim.bytes_max);
        self.seen.too_large += low as u128;
        let last = options.len() - 1;
        if low > last {
            return bound;
        }
        let Some((_, first)) = self.score(&path.then(options[low]), bound) else { return bound };
        // Nothing that follows has less of the first part.
        let bound = Score { seconds: bound.seconds.max(first[0]), ..bound };
        if low == last {
            return bound;
        }
        if let Fate::BoundedOut = self.fate(bound) {
            self.seen.bounded_out += (last - low) as u128;
            return bound;
        }
        if let Some((_, end)) = self.score(&path.then(options[last]), bound) {
            self.visit_between(path, bound, options, [(low, first), (last, end)]);
        }
        bound
    }

    /// Looks at the leaves between two whose parts are known, the middle one first.
    fn visit_between(
        &mut self,
        path: &Path,
        bound: Score,
        options: &[u32],
        [low, high]: [(usize, [f64; 2]); 2],
    ) {
        let inside = high.0 - low.0 - 1;
        if inside == 0 {
            return;
        }
        let seconds = bound.seconds.max(low.1[0] + high.1[1]);
        let bound = Score { seconds, ..bound };
        match self.fate(bound) {
            Fate::Visit => {
                let at = low.0 + (high.0 - low.0) / 2;
                let Some((_, parts)) = self.score(&path.then(options[at]), bound) else { return };
                self.visit_between(path, bound, options, [low, (at, parts)]);
                self.visit_between(path, bound, options, [(at, parts), high]);
            }
            Fate::BoundedOut => self.seen.bounded_out += inside as u128,
            Fate::TooLarge => self.seen.too_large += inside as u128,
        }
    }

    /// What is not faster than this need not be known.
    fn below(&self) -> f64 {
        match (self.aim.objective, self.seen.best) {
            (Objective::Time, Some(best)) => best.score.seconds,
            (Objective::Time, None) => self.aim.below_s,
            (Objective::Memory, _) => f64::INFINITY,
        }
    }

    fn fate(&self, bound: Score) -> Fate {
        if bound.bytes > self.aim.bytes_max && self.aim.objective != Objective::Memory {
            return Fate::TooLarge;
        }
        let beaten = match self.aim.objective {
            Objective::Time => {
                let below = self.below();
                below < f64::INFINITY && below * (1.0 - ROUNDING) <= bound.seconds
            }
            Objective::Memory => self.seen.best.is_some_and(|best| best.score.bytes <= bound.bytes),
        };
        if beaten { Fate::BoundedOut } else { Fate::Visit }
    }

    /// Scores a leaf, unless the budget is used up; `bound` is that of the decisions before its
    /// last.
    fn score(&mut self, path: &Path, bound: Score) -> Option<(Score, [f64; 2])> {
        if self.stops(bound) {
            return None;
        }
        self.seen.evaluated += 1;
        let below = self.below();
        let bytes_max = match self.aim.objective {
            Objective::Memory => 0.0,
            Objective::Time => self.aim.bytes_max,
        };
        let (score, parts) = self.tree.parts(path, bytes_max, below);
        let leaf = Leaf { path: *path, score };
        let fits = score.bytes <= self.aim.bytes_max;
        let kinds = &mut self.seen.kinds[usize::from(!fits)];
        keep_faster(kinds, (path.first(self.tree.kind_depth()), leaf));
        match self.aim.objective {
            Objective::Time => {
                if fits && score.seconds < below {
                    self.seen.best = Some(leaf);
                }
            }
            Objective::Memory => {
                if self.seen.best.is_none_or(|best| score.bytes < best.score.bytes) {
                    self.seen.best = Some(leaf);
                }
            }
        }
        Some((score, parts))
    }
}
