//! Decisions as a tree: counted without a visit, walked with bound and skip.
//!
//! A [`Tree`] names the values of each decision, given those before it, and a lower bound of all
//! that follows. The walk goes down the lowest bound first, so that the best so far is good early,
//! and skips what is too large or cannot be better. What was skipped is counted by [`Counter`],
//! which visits one subtree of each shape.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

/// Decisions of a tree at most.
pub const DEPTH_MAX: usize = 16;
/// The part of a score below which a difference is rounding.
pub const ROUNDING: f64 = 1e-9;
/// Scored leaves between two looks at the clock. Chosen: a few milliseconds.
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
    /// Seconds of a step, or what else is to be small.
    pub seconds: f64,
    /// Bytes of the fullest device.
    pub bytes: f64,
}

impl Score {
    /// Below every score.
    pub const LEAST: Score = Score { seconds: 0.0, bytes: 0.0 };
    /// Of what cannot be.
    pub const NEVER: Score = Score { seconds: f64::INFINITY, bytes: f64::INFINITY };

    /// Less or equal in both, beyond rounding of the time.
    fn covers(self, bound: Score) -> bool {
        self.seconds * (1.0 - ROUNDING) <= bound.seconds && self.bytes <= bound.bytes
    }
}

/// A tree of decisions. All leaves are equally deep.
pub trait Tree {
    /// The number of decisions, at most [`DEPTH_MAX`].
    fn depth(&self) -> usize;

    /// The values of the next decision, what is simplest first. None where nothing can follow.
    fn options(&self, path: &Path, options: &mut Vec<u32>);

    /// How often the walk for the fastest leaf looks ahead, among few of the options.
    fn looks_ahead(&self) -> u32 {
        0
    }

    /// Keeps those options of the next decision that are looked at ahead, fewer the first time than
    /// the last, which is 1. What is found among them is at hand for all that follows, however
    /// little bounds say of where it is.
    fn keep_ahead(&self, _path: &Path, _time: u32, _options: &mut Vec<u32>) {}

    /// What the options below a path depend on: equal shapes have equally many leaves.
    fn shape(&self, path: &Path) -> u64;

    /// Not above the score of any leaf below the path, in each part. Where the time is not below
    /// `seconds`, the bytes may be anything less.
    fn bound(&self, path: &Path, seconds: f64) -> Score;

    /// Decisions that tell apart what is listed beside the best.
    fn kind_depth(&self) -> usize {
        0
    }

    /// Whether, of two options of the last decision that follow each other, the leaf of the second is
    /// no larger than that of the first.
    fn shrinks(&self, _before: u32, _after: u32) -> bool {
        false
    }

    /// The bytes of a leaf alone: of its smallest form, where it stands for several.
    fn bytes(&self, path: &Path) -> f64 {
        self.score(path, f64::INFINITY, f64::INFINITY).bytes
    }

    /// The score of a leaf with two parts of its time, where options shrink ([`Tree::shrinks`]): one
    /// that no later option of the last decision makes less, and one that no earlier one does, back
    /// to where shrinking begins. No leaf between two is faster than the first part of the first and
    /// the second part of the second.
    fn parts(&self, path: &Path, bytes_max: f64, seconds: f64) -> (Score, [f64; 2]) {
        (self.score(path, bytes_max, seconds), [0.0; 2])
    }

    /// The score of a leaf with at most `bytes_max`, or of the smallest where none is. What is not
    /// below `seconds` need not be exact.
    fn score(&self, path: &Path, bytes_max: f64, seconds: f64) -> Score;
}

/// What is to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// The fastest leaf that fits.
    Time,
    /// The smallest leaf, whether it fits or not.
    Memory,
    /// All leaves that fit and that no other leaf covers.
    Pareto,
}

/// How far a walk may go.
pub struct Budget<'a> {
    /// Leaves that are scored at most.
    pub evaluations_max: u64,
    /// Says when to stop, by a clock: answers then depend on the machine.
    pub stop: &'a dyn Fn() -> bool,
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
pub struct Walked {
    /// The best leaf; all that no other covers, fastest first, for [`Objective::Pareto`].
    pub best: Vec<Leaf>,
    /// The fastest leaf that was scored of each kind, fastest first; those that fit, and others.
    pub kinds: [Vec<Leaf>; 2],
    /// Leaves of the tree.
    pub total: u128,
    /// Leaves that were scored.
    pub evaluated: u64,
    /// Leaves that were scored ahead of that; they are accounted for once more.
    pub scored_ahead: u64,
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

/// Walks a tree. Leaves with more than `bytes_max` do not fit.
///
/// # Determinism
/// The same tree and counted budget have the same answer: of equal leaves, the one first found.
pub fn walk<T: Tree>(
    tree: &T,
    objective: Objective,
    bytes_max: f64,
    budget: &Budget<'_>,
) -> Walked {
    walk_below(tree, objective, bytes_max, budget, f64::INFINITY)
}

/// Walks a tree for leaves whose time is below `below_s` alone, where time is to be small.
pub fn walk_below<T: Tree>(
    tree: &T,
    objective: Objective,
    bytes_max: f64,
    budget: &Budget<'_>,
    below_s: f64,
) -> Walked {
    let mut walker = Walker {
        tree,
        objective,
        bytes_max,
        budget,
        below_s,
        counter: Counter::default(),
        best: Vec::new(),
        kinds: Default::default(),
        evaluated: 0,
        bounded_out: 0,
        too_large: 0,
        open_s: f64::INFINITY,
        stopped: false,
        ahead: 0,
        scored_ahead: 0,
    };
    let root = Path::default();
    let total = walker.counter.count(tree, &root);
    if total > 0 {
        if objective == Objective::Time {
            walker.look_ahead(&root);
        }
        walker.visit(&root, tree.bound(&root, f64::INFINITY));
    }
    walker.best.sort_by(|a, b| a.score.seconds.total_cmp(&b.score.seconds));
    let fastest = walker.best.first().map_or(f64::INFINITY, |leaf| leaf.score.seconds);
    Walked {
        total,
        evaluated: walker.evaluated,
        scored_ahead: walker.scored_ahead,
        bounded_out: walker.bounded_out,
        too_large: walker.too_large,
        complete: !walker.stopped,
        bound_s: fastest.min(walker.open_s).min(below_s),
        best: walker.best,
        kinds: walker.kinds.map(|kind| {
            let mut leaves: Vec<Leaf> = kind.into_values().collect();
            leaves.sort_by(|a, b| a.score.seconds.total_cmp(&b.score.seconds));
            leaves
        }),
    }
}

struct Walker<'a, T> {
    tree: &'a T,
    objective: Objective,
    bytes_max: f64,
    budget: &'a Budget<'a>,
    below_s: f64,
    counter: Counter,
    best: Vec<Leaf>,
    kinds: [BTreeMap<Path, Leaf>; 2],
    evaluated: u64,
    bounded_out: u128,
    too_large: u128,
    /// The least bound of what the budget left out.
    open_s: f64,
    stopped: bool,
    /// The time that it looks ahead; 0 where it looks at everything.
    ahead: u32,
    scored_ahead: u64,
}

/// What is to be done with what lies below a path.
enum Fate {
    Visit,
    BoundedOut,
    TooLarge,
}

impl<T: Tree> Walker<'_, T> {
    /// Walks along few of the options, the fewest first, and accounts for no leaf.
    fn look_ahead(&mut self, root: &Path) {
        for time in (1..=self.tree.looks_ahead()).rev() {
            self.ahead = time;
            self.visit(root, self.tree.bound(root, f64::INFINITY));
        }
        self.ahead = 0;
        self.scored_ahead = std::mem::take(&mut self.evaluated);
        (self.bounded_out, self.too_large) = (0, 0);
    }

    fn visit(&mut self, path: &Path, bound: Score) {
        if self.stopped {
            self.open_s = self.open_s.min(bound.seconds);
            return;
        }
        let below = self.below();
        let mut options = Vec::new();
        self.tree.options(path, &mut options);
        if self.ahead > 0 {
            self.tree.keep_ahead(path, self.ahead, &mut options);
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
        match self.objective {
            Objective::Memory => children.sort_by(|a, b| a.1.bytes.total_cmp(&b.1.bytes)),
            Objective::Time | Objective::Pareto => {
                children.sort_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds));
            }
        }
        for (child, bound) in children {
            match self.fate(bound) {
                Fate::Visit => self.visit(&child, bound),
                Fate::BoundedOut => self.bounded_out += self.counter.count(self.tree, &child),
                Fate::TooLarge => self.too_large += self.counter.count(self.tree, &child),
            }
        }
    }

    fn visit_leaves(&mut self, path: &Path, mut bound: Score, options: &[u32]) {
        let tree = self.tree;
        let is_time = self.objective == Objective::Time;
        for run in options.chunk_by(|before, after| is_time && tree.shrinks(*before, *after)) {
            match self.fate(bound) {
                Fate::Visit => match run {
                    [alone] => self.visit_leaf(&path.then(*alone), bound),
                    run => bound = self.visit_shrinking(path, bound, run),
                },
                Fate::BoundedOut => self.bounded_out += run.len() as u128,
                Fate::TooLarge => self.too_large += run.len() as u128,
            }
        }
    }

    fn visit_leaf(&mut self, leaf: &Path, bound: Score) {
        if self.is_known_miss(leaf, bound) {
            self.too_large += 1;
        } else {
            self.score(leaf, bound);
        }
    }

    /// Whether a leaf is too large, and no faster than another of its kind that is.
    fn is_known_miss(&self, path: &Path, bound: Score) -> bool {
        let kind = path.first(self.tree.kind_depth());
        let other = self.kinds[1].get(&kind).map(|miss| miss.score.seconds);
        self.objective == Objective::Time
            && other.is_some_and(|seconds| seconds <= bound.seconds)
            && self.tree.bytes(path) > self.bytes_max
    }

    /// Looks for the first leaf that fits, by halves and by bytes alone: those before it are too
    /// large. Of those after it, the ones between two that were looked at are skipped where they
    /// cannot be better. What no later leaf is below.
    fn visit_shrinking(&mut self, path: &Path, bound: Score, options: &[u32]) -> Score {
        let low =
            options.partition_point(|value| self.tree.bytes(&path.then(*value)) > self.bytes_max);
        self.too_large += low as u128;
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
            self.bounded_out += (last - low) as u128;
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
            Fate::BoundedOut => self.bounded_out += inside as u128,
            Fate::TooLarge => self.too_large += inside as u128,
        }
    }

    /// What is not faster than this need not be known.
    fn below(&self) -> f64 {
        match (self.objective, self.best.first()) {
            (Objective::Time, Some(best)) => best.score.seconds,
            (Objective::Time, None) => self.below_s,
            (Objective::Memory | Objective::Pareto, _) => f64::INFINITY,
        }
    }

    fn fate(&self, bound: Score) -> Fate {
        if bound.bytes > self.bytes_max && self.objective != Objective::Memory {
            return Fate::TooLarge;
        }
        let beaten = match self.objective {
            Objective::Time => {
                let below = self.below();
                below < f64::INFINITY && below * (1.0 - ROUNDING) <= bound.seconds
            }
            Objective::Memory => {
                self.best.first().is_some_and(|best| best.score.bytes <= bound.bytes)
            }
            Objective::Pareto => self.best.iter().any(|best| best.score.covers(bound)),
        };
        if beaten { Fate::BoundedOut } else { Fate::Visit }
    }

    /// Scores a leaf, unless the budget is used up; `bound` is that of the decisions before its
    /// last.
    fn score(&mut self, path: &Path, bound: Score) -> Option<(Score, [f64; 2])> {
        let scored = self.scored_ahead + self.evaluated;
        let out_of_time = scored.is_multiple_of(CLOCK_EVERY) && (self.budget.stop)();
        if self.stopped || scored >= self.budget.evaluations_max || out_of_time {
            self.stopped = true;
            self.open_s = self.open_s.min(bound.seconds);
            return None;
        }
        self.evaluated += 1;
        let below = self.below();
        let bytes_max = match self.objective {
            Objective::Memory => 0.0,
            Objective::Time | Objective::Pareto => self.bytes_max,
        };
        let (score, parts) = self.tree.parts(path, bytes_max, below);
        let leaf = Leaf { path: *path, score };
        let fits = score.bytes <= self.bytes_max;
        let kinds = &mut self.kinds[usize::from(!fits)];
        let kind = kinds.entry(path.first(self.tree.kind_depth())).or_insert(leaf);
        if score.seconds < kind.score.seconds {
            *kind = leaf;
        }
        match self.objective {
            Objective::Time => {
                if fits && score.seconds < below {
                    self.best = vec![leaf];
                }
            }
            Objective::Memory => {
                if self.best.first().is_none_or(|best| score.bytes < best.score.bytes) {
                    self.best = vec![leaf];
                }
            }
            Objective::Pareto => {
                if fits && !self.best.iter().any(|best| best.score.covers(score)) {
                    self.best.retain(|best| !score.covers(best.score));
                    self.best.push(leaf);
                }
            }
        }
        Some((score, parts))
    }
}
