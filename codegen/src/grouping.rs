//! Which nodes share a kernel: the cheapest grouping, by branch and bound.
//!
//! A grouping is legal if every group fits a domain and the graph of groups, with all that is no
//! kernel, has no cycle. Its price is that of its launches, which follows from the target, and of
//! the bytes that they move: each kernel reads a value once and writes what something outside of it
//! reads. Operations are not in it, because each node is computed once whatever the grouping.
//!
//! Nodes are assigned one by one, each to a group that is there or to a new one: first those of
//! which no two can share a kernel, then those with the fewest of these to join. What a group has
//! read and written stays so when nodes join it, a part of a group that fits a domain fits one
//! too, and a cycle among assigned nodes remains; so all three prune. The bound adds what nodes
//! that cannot share a kernel cost in any case. The search starts from a grouping that is given,
//! usually finds that the bound proves it, and ends after a counted number of tries.

mod search;

use ir::Function;
use ir::rewrite::price::Work;

use crate::domain::Sites;

/// A set of items.
type Mask = u128;

/// The most nodes of a function that are searched and bounded: those of a [`Mask`].
const ITEMS_MAX: usize = 128;

/// The most pairs of groups that are looked at to bound assignments. Chosen: some milliseconds,
/// because `verify` compiles each layer for hundreds of meshes.
const PAIRS_MAX: usize = 100_000;

/// The most tries to extend a clique. Chosen as above.
const CLIQUE_TRIES_MAX: usize = 20_000;

/// What is known of a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Kernels and the bytes that they move.
    pub work: Work,
    /// The bytes that a launch counts as.
    pub launch_bytes: u64,
    /// What the first, greedy choice would cost.
    pub greedy: u64,
    /// No grouping is cheaper than this.
    pub bound: u64,
    /// How many assignments of a node were bounded.
    pub tries: usize,
}

impl Choice {
    /// Price of the choice, in bytes moved: a launch counts as the bytes that could be moved in its
    /// time.
    pub fn price(&self) -> u64 {
        self.work.price_at(self.launch_bytes)
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
    sites: &'f Sites<'f>,
    /// The bytes that a launch counts as.
    launch_bytes: u64,
    nodes: Vec<usize>,
    moved: Vec<Moved>,
    /// For each item, all that it waits for, directly or not.
    before: Vec<Mask>,
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
    /// The problem of items in order, where a launch counts as some bytes; none where there are too
    /// many.
    pub(crate) fn new(
        sites: &'f Sites<'f>,
        items: &[Item],
        launch_bytes: u64,
    ) -> Option<Problem<'f>> {
        if items.len() > ITEMS_MAX {
            return None;
        }
        let mut problem = Problem {
            sites,
            launch_bytes,
            nodes: items.iter().map(|item| item.node).collect(),
            moved: moved(sites.function, items),
            before: Vec::new(),
            after: Vec::new(),
            apart: Vec::new(),
            clique: 0,
        };
        problem.find_apart(items);
        let all = mask(&(0..items.len()).collect::<Vec<_>>());
        problem.find_clique(0, all, &mut 0, &mut 0);
        Some(problem)
    }

    /// Pairs that fit no domain with all that stands between them, or something that is no kernel.
    fn find_apart(&mut self, items: &[Item]) {
        let count = items.len();
        let mut apart: Vec<Mask> = vec![0; count];
        // All that an item waits for, and what of it through something that is no kernel.
        let (mut before, mut around): (Vec<Mask>, Vec<Mask>) = (vec![0; count], vec![0; count]);
        let mut after: Vec<Mask> = vec![0; count];
        let sizes: Vec<_> = self.nodes.iter().map(|n| self.sites.widest(&[*n])).collect();
        for (at, item) in items.iter().enumerate() {
            for source in item.direct.iter().chain(&item.around).copied() {
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
                let starts = match (sizes[other], sizes[at]) {
                    (Some(a), Some(b)) => a.starts_with(b) || b.starts_with(a),
                    _ => false,
                };
                let hull = between | bit(other) | bit(at);
                let is_apart = !starts
                    || around[at] & bit(other) != 0
                    || ones(hull).any(|item| apart[item] & hull != 0)
                    || !self.fits(hull);
                if is_apart {
                    apart[other] |= bit(at);
                    apart[at] |= bit(other);
                }
            }
        }
        (self.before, self.after, self.apart) = (before, after, apart);
    }

    /// Looks for the largest clique that holds the given one and any of the `open` items.
    fn find_clique(&mut self, clique: Mask, mut open: Mask, largest: &mut u32, tries: &mut usize) {
        let own = clique.count_ones();
        if own > *largest {
            (self.clique, *largest) = (clique, own);
        }
        let mut left = open.count_ones();
        while own + left > *largest {
            *tries += 1;
            let Some(at) = ones(open).next().filter(|_| *tries < CLIQUE_TRIES_MAX) else { return };
            open &= !bit(at);
            left -= 1;
            self.find_clique(clique | bit(at), open & self.apart[at], largest, tries);
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
        let mut bytes = 0;
        for value in &self.moved {
            let own = value.producer.map_or(0, bit);
            let reads = |group: &&Mask| **group & value.readers != 0 && **group & own == 0;
            let times = groups.iter().filter(reads).count() as u64;
            let is_stored = own != 0 && (value.is_kept || times > 0);
            bytes += value.bytes * (times + u64::from(is_stored));
        }
        Work { launches: groups.len() as u64, bytes, ..Work::default() }
    }

    /// How many kernels a set of items needs at least: those of the largest clique that is found
    /// from each of them.
    fn apart_among(&self, items: Mask) -> u32 {
        let grown = |first: usize| self.grow_clique(bit(first), items).count_ones();
        match items.count_ones() {
            few @ 0..=1 => few,
            2 => grown(items.trailing_zeros() as usize),
            _ => ones(items).map(grown).max().unwrap_or(0),
        }
    }

    /// Whether items fit a domain together.
    fn fits(&self, items: Mask) -> bool {
        let nodes: Vec<usize> = ones(items).map(|item| self.nodes[item]).collect();
        self.sites.domain(&nodes).is_some()
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
