//! Which nodes share a kernel: the cheapest grouping, by branch and bound.
//!
//! A grouping is legal if every group fits a domain and the graph of groups, with all that is no
//! kernel, has no cycle. Its price is that of its launches and of the bytes that they move: each
//! kernel reads a value once and writes what something outside of it reads. Operations are not in
//! it, because each node is computed once whatever the grouping.
//!
//! Nodes are assigned in order, each to a group that is there or to a new one. What a group has
//! read and written stays so when nodes join it, a part of a group that fits a domain fits one
//! too, and a cycle among assigned nodes remains; so all three prune. The bound adds what nodes
//! that cannot share a kernel cost in any case. The search starts from a grouping that is given,
//! usually finds that the bound proves it, and ends after a counted number of tries.

use std::collections::HashMap;

use ir::Function;
use ir::rewrite::price::Work;

use crate::domain::{Domain, widest};

/// A set of items.
type Mask = u128;

/// The most nodes of a function that are searched and bounded: those of a [`Mask`].
const ITEMS_MAX: usize = 128;

/// The most pairs of groups that are looked at to bound assignments. Chosen: about a millisecond,
/// because `verify` compiles each layer for hundreds of meshes.
const PAIRS_MAX: usize = 100_000;

/// The most tries to extend a clique. Chosen as above.
const CLIQUE_TRIES_MAX: usize = 20_000;

/// What is known of a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Kernels and the bytes that they move.
    pub work: Work,
    /// What the first, greedy choice would cost.
    pub greedy: u64,
    /// No grouping is cheaper than this.
    pub bound: u64,
    /// How many assignments of a node were bounded.
    pub tries: usize,
}

impl Choice {
    /// What the choice costs, in bytes: a launch counts as many as could be moved in its time.
    pub fn price(&self) -> u64 {
        self.work.price()
    }

    /// By how much a cheaper grouping could be below this one, as a share of this one.
    pub fn gap(&self) -> f64 {
        let price = self.price();
        (price - self.bound.min(price)) as f64 / price.max(1) as f64
    }
}

/// A value that kernels read or write.
struct Moved {
    bytes: u64,
    /// The item that makes it.
    producer: Option<usize>,
    /// Whether something that is no kernel reads it.
    is_kept: bool,
    readers: Mask,
}

/// The nodes of a function that kernels compute, as items in their order.
pub(crate) struct Problem<'f> {
    function: &'f Function,
    nodes: Vec<usize>,
    moved: Vec<Moved>,
    /// For each item, the items that it waits for, of which one may be in the same group only if
    /// no third stands between.
    waits: Vec<Mask>,
    /// For each item, all that wait for it, directly or not.
    after: Vec<Mask>,
    /// For each item, those with which it can share no kernel.
    apart: Vec<Mask>,
    /// Items of which no two can share a kernel.
    clique: Mask,
}

/// What an item reads, as [`Problem::new`] takes it.
pub(crate) struct Item {
    /// The node.
    pub(crate) node: usize,
    /// The values that it reads, looking through leaves.
    pub(crate) reads: Vec<usize>,
    /// The items whose results it reads.
    pub(crate) direct: Vec<usize>,
    /// The items that it waits for through what is no kernel.
    pub(crate) around: Vec<usize>,
    /// Whether something that is no kernel reads its result.
    pub(crate) is_kept: bool,
}

impl<'f> Problem<'f> {
    /// The problem of items in order; none where there are too many.
    pub(crate) fn new(function: &'f Function, items: &[Item]) -> Option<Problem<'f>> {
        if items.len() > ITEMS_MAX {
            return None;
        }
        let mut problem = Problem {
            function,
            nodes: items.iter().map(|item| item.node).collect(),
            moved: moved(function, items),
            waits: items.iter().map(|i| mask(i.direct.iter().chain(&i.around))).collect(),
            after: Vec::new(),
            apart: Vec::new(),
            clique: 0,
        };
        problem.find_apart(items);
        let mut tries = 0;
        problem.find_clique(0, mask(&(0..items.len()).collect::<Vec<_>>()), &mut tries);
        Some(problem)
    }

    /// Pairs that fit no domain with all that stands between them, or something that is no kernel.
    fn find_apart(&mut self, items: &[Item]) {
        let count = items.len();
        let mut apart: Vec<Mask> = vec![0; count];
        // All that an item waits for, and what of it through something that is no kernel.
        let (mut before, mut around): (Vec<Mask>, Vec<Mask>) = (vec![0; count], vec![0; count]);
        let mut after: Vec<Mask> = vec![0; count];
        let sizes: Vec<_> = self.nodes.iter().map(|n| widest(self.function, &[*n])).collect();
        for (at, item) in items.iter().enumerate() {
            for source in ones(self.waits[at]) {
                before[at] |= bit(source) | before[source];
            }
            for source in &item.direct {
                around[at] |= around[*source];
            }
            for source in &item.around {
                around[at] |= bit(*source) | before[*source];
            }
            ones(before[at]).for_each(|source| after[source] |= bit(at));
            for other in (0..at).rev() {
                let between = after[other] & before[at];
                let starts = match (&sizes[other], &sizes[at]) {
                    (Some(a), Some(b)) => a.starts_with(b) || b.starts_with(a),
                    _ => false,
                };
                let hull = between | bit(other) | bit(at);
                let is_apart = around[at] & bit(other) != 0
                    || ones(hull).any(|item| apart[item] & hull != 0)
                    || !starts
                    || !self.fits(hull);
                if is_apart {
                    apart[other] |= bit(at);
                    apart[at] |= bit(other);
                }
            }
        }
        (self.after, self.apart) = (after, apart);
    }

    /// Looks for the largest clique that holds the given one and any of the `open` items.
    fn find_clique(&mut self, clique: Mask, mut open: Mask, tries: &mut usize) {
        if clique.count_ones() > self.clique.count_ones() {
            self.clique = clique;
        }
        while clique.count_ones() + open.count_ones() > self.clique.count_ones() {
            *tries += 1;
            let Some(at) = ones(open).next().filter(|_| *tries < CLIQUE_TRIES_MAX) else { return };
            open &= !bit(at);
            self.find_clique(clique | bit(at), open & self.apart[at], tries);
        }
    }

    /// A clique that holds the given one, with more of the items that are allowed.
    fn grow_clique(&self, clique: Mask, allowed: Mask) -> Mask {
        let apart_from_all = |open: Mask, at: usize| open & self.apart[at];
        let mut open = ones(clique).fold(allowed & !clique, apart_from_all);
        let mut grown = clique;
        while let Some(at) = ones(open).next() {
            grown |= bit(at);
            open = apart_from_all(open, at) & !bit(at);
        }
        grown
    }

    /// Kernels and bytes of groups that are all there is.
    pub(crate) fn work(&self, groups: &[Mask]) -> Work {
        self.least(!0, groups)
    }

    /// The least kernels and bytes of groupings that continue the one of the items that are `done`.
    fn least(&self, done: Mask, groups: &[Mask]) -> Work {
        let closed = self.closed(groups);
        let left =
            if self.nodes.is_empty() { 0 } else { (!0 >> (ITEMS_MAX - self.nodes.len())) & !done };
        let new = closed.iter().fold(left, |new, closed| new & closed);
        let first = self.grow_clique(new & self.clique, new);
        let new = first.count_ones().max(self.grow_clique(0, new).count_ones());
        let launches = groups.len() as u64 + u64::from(new);
        let mut bytes = 0;
        for value in &self.moved {
            let is_own = |group: &Mask| value.producer.is_some_and(|at| group & bit(at) != 0);
            let own = groups.iter().position(is_own);
            let away = match (own, value.producer) {
                (Some(group), _) => closed[group],
                (None, Some(at)) => self.apart[at],
                (None, None) => !0,
            };
            let reads = |at: &usize| groups[*at] & value.readers != 0 && Some(*at) != own;
            let reading = (0..groups.len()).filter(reads);
            let elsewhere = value.readers & !done & away;
            let (times, others) = reading
                .fold((0, elsewhere), |(times, others), group| (times + 1, others & closed[group]));
            let others = self.grow_clique(0, others);
            let is_read = times > 0 || elsewhere != 0;
            let is_stored = value.producer.is_some() && (value.is_kept || is_read);
            bytes += value.bytes * (times + u64::from(others.count_ones()) + u64::from(is_stored));
        }
        Work { launches, bytes, ..Work::default() }
    }

    /// For each group, the items that cannot join it: those apart from one of its own, and those
    /// that wait for another group which waits for it.
    fn closed(&self, groups: &[Mask]) -> Vec<Mask> {
        let all = |group: Mask, of: &[Mask]| ones(group).fold(0, |all, item| all | of[item]);
        // What each group waits for, through other groups too.
        let mut before: Vec<Mask> =
            groups.iter().map(|group| all(*group, &self.waits) & !group).collect();
        let mut is_done = false;
        while !is_done {
            is_done = true;
            for at in 0..groups.len() {
                for other in (0..groups.len()).filter(|other| *other != at) {
                    let wider = before[at] | groups[other] | before[other];
                    if groups[other] & before[at] != 0 && wider != before[at] {
                        before[at] = wider;
                        is_done = false;
                    }
                }
            }
        }
        let closed = |(at, group): (usize, &Mask)| {
            let later = (0..groups.len()).filter(|k| *k != at && before[*k] & group != 0);
            later.fold(all(*group, &self.apart), |closed, k| closed | all(groups[k], &self.after))
        };
        groups.iter().enumerate().map(closed).collect()
    }

    /// Whether items fit a domain together.
    fn fits(&self, items: Mask) -> bool {
        let nodes: Vec<usize> = ones(items).map(|item| self.nodes[item]).collect();
        Domain::of(self.function, &nodes).is_some()
    }

    /// The cheapest grouping, or the given one if none is found that is cheaper.
    pub(crate) fn solve(&self, given: Vec<Mask>) -> (Vec<Mask>, Choice) {
        let root = self.least(0, &[]).price();
        let work = self.work(&given);
        let mut search = Search {
            problem: self,
            best: (work.price(), given),
            root,
            known: HashMap::new(),
            tries: 0,
            pairs: 0,
        };
        search.assign(0, &mut Vec::new());
        let Search { best: (price, groups), tries, pairs, .. } = search;
        let bound = if pairs < PAIRS_MAX { price } else { root };
        let greedy = work.price();
        let choice = Choice { work: self.work(&groups), greedy, bound, tries };
        (groups, choice)
    }
}

/// Whether the items of a group fit a domain, for groups that were looked at.
type Known = HashMap<Mask, bool>;

struct Search<'p, 'f> {
    problem: &'p Problem<'f>,
    /// The cheapest grouping so far, and its price.
    best: (u64, Vec<Mask>),
    /// The bound of all groupings.
    root: u64,
    known: Known,
    tries: usize,
    /// Pairs of groups that were looked at.
    pairs: usize,
}

impl Search<'_, '_> {
    /// Tries all groups for an item and those after it, the most promising first.
    fn assign(&mut self, at: usize, groups: &mut Vec<Mask>) {
        let problem = self.problem;
        if at == problem.nodes.len() {
            let price = problem.work(groups).price();
            if price < self.best.0 {
                self.best = (price, groups.clone());
            }
            return;
        }
        let done = bit(at) | (bit(at) - 1);
        let mut children = Vec::new();
        let closed = problem.closed(groups);
        groups.push(0);
        for place in (0..groups.len()).rev() {
            let group = groups[place];
            let is_closed = closed.get(place).is_some_and(|closed| closed & bit(at) != 0);
            let joined = group | bit(at);
            if is_closed || !*self.known.entry(joined).or_insert_with(|| problem.fits(joined)) {
                continue;
            }
            groups[place] |= bit(at);
            let len = if group == 0 { groups.len() } else { groups.len() - 1 };
            self.tries += 1;
            self.pairs += len * len;
            children.push((problem.least(done, &groups[..len]).price(), place));
            groups[place] = group;
        }
        groups.pop();
        // Stable: of equal ones the new group comes first, then the latest.
        children.sort_by_key(|(bound, _)| *bound);
        for (bound, place) in children {
            if bound >= self.best.0 || self.best.0 <= self.root || self.pairs >= PAIRS_MAX {
                return;
            }
            if place == groups.len() {
                groups.push(bit(at));
                self.assign(at + 1, groups);
                groups.pop();
            } else {
                groups[place] |= bit(at);
                self.assign(at + 1, groups);
                groups[place] &= !bit(at);
            }
        }
    }
}

/// The values that items read or make.
fn moved(function: &Function, items: &[Item]) -> Vec<Moved> {
    let bytes = |value: usize| function.values[value].ty.bytes().unwrap_or(0);
    let mut found: Vec<(usize, Moved)> = Vec::new();
    for (at, item) in items.iter().enumerate() {
        for value in &item.reads {
            match found.iter_mut().find(|(known, _)| known == value) {
                Some((_, there)) => there.readers |= bit(at),
                None => {
                    let readers = bit(at);
                    let made =
                        Moved { bytes: bytes(*value), producer: None, is_kept: false, readers };
                    found.push((*value, made));
                }
            }
        }
        let (result, is_kept) = (function.nodes[item.node].result().index(), item.is_kept);
        let own = Moved { bytes: bytes(result), producer: Some(at), is_kept, readers: 0 };
        found.push((result, own));
    }
    found.into_iter().map(|(_, value)| value).collect()
}

fn bit(at: usize) -> Mask {
    1 << at
}

/// The items of a set, in order.
pub(crate) fn ones(mut mask: Mask) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (at < ITEMS_MAX).then_some(at)
    })
}

/// The set of items.
pub(crate) fn mask<'a>(items: impl IntoIterator<Item = &'a usize>) -> Mask {
    items.into_iter().fold(0, |mask, at| mask | bit(*at))
}
