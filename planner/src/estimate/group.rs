//! The ranks of a collective, and how they lie in domains of a cluster: in nodes, racks, and so on.
//!
//! Ranks of a job are numbered along its axes, innermost first, and lie in domains in that order. A
//! group has all ranks along some of the axes, so that its members are evenly spaced along each. A
//! job takes as many devices of each domain as divide its ranks, as schedulers give them out; where
//! too few do, it fills one domain after the other. Groups whose extent does not divide a domain
//! then lie across its edge, some with few members on one side. All steps wait for the worst group:
//! the one that has the fewest members in some domain, and that which touches the most of them.
//!
//! Legend: n members of a run, s ranks from one to the next, R devices of a domain.

use crate::configuration::{Configuration, RankAxis};

/// Members of a collective: evenly spaced ones, and such runs again evenly spaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// Innermost first; a run of one has a stride of 0.
    runs: [Run; 2],
    /// Ranks of the job; 0 for a group that lies as near as so many members can.
    ranks: u64,
}

/// Members that are evenly spaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Run {
    size: u64,
    stride: u64,
}

/// How the worst group of a kind lies in domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// Members in a domain that has some, at least.
    pub least: u64,
    /// Domains that have some, at most.
    pub domains: u64,
}

/// The part of a domain that a job leaves idle at most where that lets all of them have as many
/// ranks. Chosen: racks of 72 devices are given out as 64.
const IDLE_MAX: f64 = 0.25;

const ONE: Run = Run { size: 1, stride: 0 };

impl Group {
    /// Members as near to each other as so many can be, whatever else there is.
    pub fn near(size: u64) -> Group {
        Group { runs: [Run { size: size.max(1), stride: 1 }, ONE], ranks: 0 }
    }

    /// So many members so many ranks apart, in a job of so many ranks.
    pub fn apart(size: u64, stride: u64, ranks: u64) -> Group {
        Group::joined([Run { size, stride }, ONE], ranks)
    }

    /// The ranks along an axis.
    pub fn along(c: &Configuration, axis: RankAxis) -> Group {
        Group::apart(c.size(axis).into(), c.stride(axis), c.ranks())
    }

    /// The ranks that hold the same weights: those along `dp` and `cp`, whichever is further in.
    pub fn data(c: &Configuration) -> Group {
        let run = |axis| Run { size: c.size(axis).into(), stride: c.stride(axis) };
        let is_cp_first = c.stride(RankAxis::Cp) <= c.stride(RankAxis::Dp);
        let [cp, dp] = [RankAxis::Cp, RankAxis::Dp].map(run);
        Group::joined(if is_cp_first { [cp, dp] } else { [dp, cp] }, c.ranks())
    }

    /// The ranks of a stage: those along all axes but `pp`.
    pub fn stage(c: &Configuration) -> Group {
        let inside = c.stride(RankAxis::Pp);
        let around = c.ranks() / inside.max(1) / u64::from(c.pp.max(1));
        let around = Run { size: around, stride: inside * u64::from(c.pp) };
        Group::joined([Run { size: inside, stride: 1 }, around], c.ranks())
    }

    /// The ranks that share the experts of a stage: `ep` neighbours of it.
    pub fn experts(c: &Configuration) -> Group {
        Group::stage(c).first(c.ep.into())
    }

    /// The ranks that hold the same experts.
    pub fn expert_copies(c: &Configuration) -> Group {
        Group::stage(c).every(c.ep.into())
    }

    /// Members.
    pub fn size(&self) -> u64 {
        self.runs[0].size * self.runs[1].size
    }

    /// Groups of so many neighbours among the members, whose number they divide.
    pub fn first(&self, size: u64) -> Group {
        let ([inner, outer], size) = (self.runs, size.max(1));
        let runs = if inner.size.is_multiple_of(size) {
            [Run { size, ..inner }, ONE]
        } else if size.is_multiple_of(inner.size) {
            [inner, Run { size: size / inner.size, ..outer }]
        } else {
            // Some lie in two runs, others do not: as if all parts were apart.
            let part = gcd(size, inner.size);
            [Run { size: part, ..inner }, self.scattered(size / part)]
        };
        Group::joined(runs, self.ranks)
    }

    /// The members of one such group after the other that stand at the same place in it.
    pub fn every(&self, step: u64) -> Group {
        let ([inner, outer], step) = (self.runs, step.max(1));
        let spaced = |run: Run, by: u64| Run { size: run.size / by, stride: run.stride * by };
        let runs = if inner.size.is_multiple_of(step) {
            [spaced(inner, step), outer]
        } else if step.is_multiple_of(inner.size) {
            [spaced(outer, step / inner.size), ONE]
        } else {
            [self.scattered(self.size() / step), ONE]
        };
        Group::joined(runs, self.ranks)
    }

    /// Each in a domain of its own, where the job has several.
    fn scattered(&self, size: u64) -> Run {
        Run { size, stride: self.ranks.max(1) }
    }

    /// The same with as few runs as there can be.
    fn joined(runs: [Run; 2], ranks: u64) -> Group {
        let [inner, outer] = runs.map(|run| if run.size <= 1 { ONE } else { run });
        let runs = if inner == ONE {
            [outer, ONE]
        } else if outer != ONE && outer.stride == inner.size * inner.stride {
            [Run { size: inner.size * outer.size, ..inner }, ONE]
        } else {
            [inner, outer]
        };
        Group { runs, ranks }
    }

    /// How the worst of these groups lies in domains of `reach` devices each, of which `node` form
    /// the smallest domain.
    ///
    /// Exact where extents divide domains or the other way round, and for neighbours; else no
    /// better than it is.
    pub fn spread(&self, reach: u64, node: u64) -> Spread {
        let size = self.size();
        if self.ranks == 0 {
            return Spread { least: size.min(reach).max(1), domains: size.div_ceil(reach.max(1)) };
        }
        let reach = reach * used(self.ranks, node.max(1)) / node.max(1);
        let mut spread = Spread { least: 1, domains: 1 };
        if self.ranks <= reach {
            return Spread { least: size, ..spread };
        }
        let mut is_even = true;
        for run in self.runs.iter().filter(|run| run.size > 1) {
            let Spread { least, domains } = run.spread(reach, self.ranks);
            // What lies across an edge may be alone there.
            spread.least *= if is_even { least } else { 1 };
            spread.domains *= if is_even { domains } else { run.size };
            is_even &= least * domains == run.size;
        }
        spread.domains = spread.domains.min(self.ranks.div_ceil(reach.max(1)));
        spread
    }

    /// The nearest group that lies in nodes of so many devices in the same way; itself where none
    /// is known.
    pub fn alike(&self, node: u64) -> Group {
        let spread = self.spread(node, node);
        let near = Group::near(self.size());
        if near.spread(node, node) == spread {
            return near;
        }
        let Spread { least, domains } = spread;
        let inner = Run { size: least, stride: 1 };
        let outer = Run { size: domains, stride: node };
        let even = Group::joined([inner, outer], node * domains);
        if even.size() == self.size() && even.spread(node, node) == spread { even } else { *self }
    }
}

impl Run {
    fn spread(self, reach: u64, ranks: u64) -> Spread {
        let Run { size: n, stride: s } = self;
        let extent = n * s;
        if reach.is_multiple_of(extent) {
            Spread { least: n, domains: 1 }
        } else if s >= reach {
            Spread { least: 1, domains: n }
        } else if reach.is_multiple_of(s) {
            neighbours(n, reach / s, ranks / extent)
        } else {
            // No two domains begin at the same place between two members.
            Spread { least: 1, domains: n.min((n - 1) * s / reach + 2) }
        }
    }
}

/// The worst of `groups` groups of `n` neighbours each that follow each other in domains of `room`.
fn neighbours(n: u64, room: u64, groups: u64) -> Spread {
    if n.is_multiple_of(room) {
        return Spread { least: room, domains: n / room };
    }
    let mut worst = Spread { least: room, domains: 1 };
    // The groups begin at the same places in domains again.
    for group in 0..groups.clamp(1, room / gcd(n, room)) {
        let first = (room - group * n % room).min(n);
        let rest = n - first;
        let last = if rest.is_multiple_of(room) { room } else { rest % room };
        worst.least = worst.least.min(first).min(last);
        worst.domains = worst.domains.max(1 + rest.div_ceil(room));
    }
    worst
}

/// How many devices of each node a job of so many ranks takes.
fn used(ranks: u64, node: u64) -> u64 {
    if ranks <= node {
        return node;
    }
    let least = (node as f64 * (1.0 - IDLE_MAX)).ceil() as u64;
    (least.max(1)..=node).rev().find(|used| ranks.is_multiple_of(*used)).unwrap_or(node)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests;
