//! The walk for the fastest leaf by several threads.
//!
//! Paths of the first decisions have no leaf in common. Some are walked at a time, each from the
//! best of those before them and on a tree of its own; what was seen below them is then added in
//! their order. So the answer is the same on any number of threads. As each begins with what was
//! found ahead, hardly more leaves are scored than by one walk.

use std::error::Error as _;
use std::sync::LazyLock;

use rayon::prelude::*;

use super::{Aim, Budget, Path, Score, Seen, Tree, Walker};

/// Paths that are walked at a time, at first and later on. Chosen: while nothing is known, each
/// finds out for itself; then enough for the threads of most machines, and few enough to learn from
/// those before them.
const ABREAST: [usize; 2] = [2, 16];

/// What is known of the leaves below a path: before a walk there, and after it.
struct Part<K> {
    path: Path,
    bound: Score,
    seen: Seen,
    kept: K,
}

/// The paths that are walked apart, with their bounds, the lowest first.
pub(super) fn paths<T: Tree>(tree: &T, another: &(impl Fn() -> T + Sync)) -> Vec<(Path, Score)> {
    let mut paths = vec![Path::default()];
    let mut options = Vec::new();
    for _ in 0..tree.kind_depth() {
        let mut longer = Vec::new();
        for path in paths {
            tree.options(&path, &mut options);
            longer.extend(options.iter().map(|value| path.then(*value)));
        }
        paths = longer;
    }
    // What differs in the first decision alone has most in common: one thread makes it once.
    paths.sort_by(|a, b| a.values().iter().skip(1).cmp(b.values().iter().skip(1)));
    let bound = |tree: &mut T, path: Path| (path, tree.bound(&path, f64::INFINITY));
    let mut paths: Vec<_> = if has_threads() {
        paths.into_par_iter().map_init(another, bound).collect()
    } else {
        let mut own = another();
        paths.into_iter().map(|path| bound(&mut own, path)).collect()
    };
    paths.sort_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds).then(a.0.cmp(&b.0)));
    paths
}

/// Walks below some paths at a time.
pub(super) fn explore<T: Tree>(
    walker: &mut Walker<'_, T>,
    another: &(impl Fn() -> T + Sync),
    paths: &[(Path, Score)],
) {
    let [first, most] = ABREAST;
    let mut abreast = if walker.seen.best.is_none() { first } else { most };
    let mut paths = paths.iter().copied();
    loop {
        let open = paths.by_ref().filter(|(path, bound)| walker.is_open(path, *bound));
        let open: Vec<(Path, Score)> = open.take(abreast).collect();
        if open.is_empty() {
            return;
        }
        let part = |(path, bound)| Part {
            path,
            bound,
            seen: walker.seen_below(&path),
            kept: walker.tree.take_kept(&path),
        };
        let parts: Vec<Part<T::Kept>> = open.into_iter().map(part).collect();
        let evaluations_max = walker.left().div_ceil(parts.len() as u64);
        let share = Budget { evaluations_max, stop: walker.budget.stop };
        let (aim, ahead) = (walker.aim, walker.ahead);
        let explore = |part: Part<T::Kept>| part.explore(another(), (aim, ahead), &share);
        let parts: Vec<Part<T::Kept>> = on_all_threads(parts, explore);
        for part in parts {
            part.add_to(walker);
        }
        abreast = (2 * abreast).min(most);
    }
}

/// Walks ahead below the paths that may be among those with the fastest leaves, each from the best
/// that is known there.
pub(super) fn list<T: Tree>(
    walker: &mut Walker<'_, T>,
    another: &(impl Fn() -> T + Sync),
    paths: &[(Path, Score)],
) {
    for paths in paths.chunks(ABREAST[1]) {
        let [fit, _] = &walker.seen.kinds;
        let mut all: Vec<f64> = fit.values().map(|leaf| leaf.score.seconds).collect();
        all.sort_by(f64::total_cmp);
        let last = walker.aim.listed.checked_sub(1);
        let below_s = last.map_or(0.0, |last| all.get(last).copied().unwrap_or(f64::INFINITY));
        let open = paths.iter().filter(|(_, bound)| bound.seconds < below_s);
        let part = |(path, bound): &(Path, Score)| {
            let known = fit.get(path).filter(|leaf| leaf.score.seconds < below_s);
            let seen = Seen { best: known.copied(), ..Seen::default() };
            Part { path: *path, bound: *bound, seen, kept: walker.tree.take_kept(path) }
        };
        let parts: Vec<Part<T::Kept>> = open.map(part).collect();
        if parts.is_empty() || walker.seen.stopped {
            parts.into_iter().for_each(|part| walker.tree.keep(part.kept));
            return;
        }
        let evaluations_max = walker.left().div_ceil(parts.len() as u64);
        let share = Budget { evaluations_max, stop: walker.budget.stop };
        let (aim, ahead) = (Aim { below_s, ..walker.aim }, walker.ahead);
        let explore = |part: Part<T::Kept>| part.explore(another(), (aim, ahead), &share);
        let parts: Vec<Part<T::Kept>> = on_all_threads(parts, explore);
        for part in parts {
            part.add_to(walker);
        }
    }
}

/// Maps parts on all threads; one after the other where the system starts none.
fn on_all_threads<A: Send, B: Send>(parts: Vec<A>, work: impl Fn(A) -> B + Sync + Send) -> Vec<B> {
    match has_threads() {
        true => parts.into_par_iter().map(work).collect(),
        false => parts.into_iter().map(work).collect(),
    }
}

/// Whether the system has started the threads of the pool.
fn has_threads() -> bool {
    static HAS_THREADS: LazyLock<bool> = LazyLock::new(|| {
        // An error with a cause is one of the system; without, there is a pool already.
        let built = rayon::ThreadPoolBuilder::new().build_global();
        built.is_ok() || built.is_err_and(|error| error.source().is_none())
    });
    *HAS_THREADS
}

impl<K: Send> Part<K> {
    /// Walks below the path, in a tree of its own.
    fn explore<T: Tree<Kept = K>>(
        self,
        tree: T,
        (aim, ahead): (Aim, Option<u32>),
        share: &Budget<'_>,
    ) -> Part<K> {
        let Part { path, bound, seen, kept } = self;
        tree.keep(kept);
        let mut walker = Walker { seen, ahead, ..Walker::new(&tree, aim, share) };
        walker.visit(&path, bound);
        let seen = walker.seen;
        Part { path, bound, seen, kept: tree.take_kept(&path) }
    }

    /// Adds what was seen below the path. Where its share of the budget was not enough, it is
    /// walked again with what is left.
    fn add_to<T: Tree<Kept = K>>(self, walker: &mut Walker<'_, T>) {
        walker.tree.keep(self.kept);
        let is_ahead = walker.ahead.is_some();
        if !is_ahead && !self.seen.stopped {
            walker.seen.take(self.seen);
            return;
        }
        walker.seen.take_ahead(self.seen);
        if !is_ahead {
            walker.visit(&self.path, self.bound);
        }
    }
}
