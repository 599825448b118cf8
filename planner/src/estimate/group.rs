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

use std::collections::BTreeMap;

use crate::configuration::Configuration;
use crate::divisors::gcd;
use ir::Axis;

/// Members of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    size: u64,
    lies: Lies,
}

/// Where members are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Lies {
    /// As near to each other as the group's size allows.
    Near,
    /// In nodes like this; nothing is known of its parts.
    Known(Spread),
    /// Two nested runs of evenly spaced members, innermost first, and the number of ranks of the
    /// job; a run of one member has a stride of 0.
    Runs([Run; 2], u64),
}

/// Members that are evenly spaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Run {
    size: u64,
    stride: u64,
}

/// How the worst group of a kind lies in domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Spread {
    /// Members in a domain that has some, at least.
    pub least: u64,
    /// Domains that have some, at most.
    pub domains: u64,
}

/// How often members go to another rail where devices of equal place in their nodes share one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Crossing {
    /// Of what a ring carries from node to node, the part that ends on another rail.
    pub ring: f64,
    /// Of what each member sends to each in other nodes, that part.
    pub exchange: f64,
}

/// Members whose rails are looked at, at most. Chosen: patterns repeat within a few nodes.
const LOOKED_AT: u64 = 1024;

/// The part of a domain that a job leaves idle at most where that lets all of them have as many
/// ranks. Chosen: racks of 72 devices are given out as 64.
const IDLE_MAX: f64 = 0.25;

const ONE: Run = Run { size: 1, stride: 0 };

impl Group {
    /// A group of `size` members that lie as near to each other as they can.
    pub fn near(size: u64) -> Group {
        Group { size: size.max(1), lies: Lies::Near }
    }

    /// A group of `size` members, `stride` ranks from one to the next, in a job of `ranks` ranks.
    pub fn apart(size: u64, stride: u64, ranks: u64) -> Group {
        Group::joined([Run { size, stride }, ONE], ranks)
    }

    /// The ranks along an axis.
    pub fn along(c: &Configuration, axis: Axis) -> Group {
        Group::apart(c.size(axis).into(), c.stride(axis), c.ranks())
    }

    /// The ranks that hold the same weights: those along `dp` and `cp`, whichever is further in.
    pub fn data(c: &Configuration) -> Group {
        let run = |axis| Run { size: c.size(axis).into(), stride: c.stride(axis) };
        let is_cp_first = c.stride(Axis::Cp) <= c.stride(Axis::Dp);
        let [cp, dp] = [Axis::Cp, Axis::Dp].map(run);
        Group::joined(if is_cp_first { [cp, dp] } else { [dp, cp] }, c.ranks())
    }

    /// The ranks of a stage: those along all axes but `pp`.
    pub fn stage(c: &Configuration) -> Group {
        let inside = c.stride(Axis::Pp);
        let around = c.ranks() / inside.max(1) / u64::from(c.pp.max(1));
        let around = Run { size: around, stride: inside * u64::from(c.pp) };
        Group::joined([Run { size: inside, stride: 1 }, around], c.ranks())
    }

    /// Members.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// A group of `size` neighbours among the members; `size` divides the number of members.
    pub fn first(&self, size: u64) -> Group {
        let size = size.max(1);
        let Lies::Runs([inner, outer], ranks) = self.lies else {
            return self.part(size);
        };
        let runs = if inner.size.is_multiple_of(size) {
            [Run { size, ..inner }, ONE]
        } else if size.is_multiple_of(inner.size) {
            [inner, Run { size: size / inner.size, ..outer }]
        } else {
            // Some lie in two runs, others do not: as if all parts were apart.
            let part = gcd(size, inner.size);
            [Run { size: part, ..inner }, Run { size: size / part, stride: ranks }]
        };
        Group::joined(runs, ranks)
    }

    /// The members of one such group after the other that stand at the same place in it.
    pub fn every(&self, step: u64) -> Group {
        let step = step.max(1);
        let Lies::Runs([inner, outer], ranks) = self.lies else {
            return self.part(self.size / step);
        };
        let spaced = |run: Run, by: u64| Run { size: run.size / by, stride: run.stride * by };
        let runs = if inner.size.is_multiple_of(step) {
            [spaced(inner, step), outer]
        } else if step.is_multiple_of(inner.size) {
            [spaced(outer, step / inner.size), ONE]
        } else {
            // Each as if in a domain of its own, where the job has several.
            [Run { size: self.size / step, stride: ranks }, ONE]
        };
        Group::joined(runs, ranks)
    }

    /// How often the members go to another rail, of which each has `of_rail` neighbouring devices
    /// of a node. Groups as near as can be go to none.
    pub fn crossing(&self, node: u64, of_rail: u64) -> Crossing {
        let Lies::Runs([inner, outer], _) = self.lies else { return Crossing::default() };
        let mut nodes: BTreeMap<u64, BTreeMap<u64, f64>> = BTreeMap::new();
        let places = (0..outer.size).flat_map(|j| (0..inner.size).map(move |i| (i, j)));
        for (i, j) in places.take(LOOKED_AT as usize) {
            let rank = i * inner.stride + j * outer.stride;
            let rail = rank % node / of_rail.max(1);
            *nodes.entry(rank / node).or_default().entry(rail).or_default() += 1.0;
        }
        let mut all: BTreeMap<u64, f64> = BTreeMap::new();
        nodes.values().flatten().for_each(|(rail, count)| *all.entry(*rail).or_default() += count);
        let members: f64 = all.values().sum();
        let alike: f64 = all.values().map(|count| (count / members).powi(2)).sum();
        let pairs = nodes.values().zip(nodes.values().skip(1)).map(|(from, to)| {
            let same = from.iter().map(|(rail, n)| n.min(*to.get(rail).unwrap_or(&0.0)));
            let sizes = [from, to].map(|rails| rails.values().sum::<f64>());
            1.0 - same.sum::<f64>() / sizes[0].min(sizes[1])
        });
        let pairs: Vec<f64> = pairs.collect();
        let ring = pairs.iter().sum::<f64>() / pairs.len().max(1) as f64;
        Crossing { ring, exchange: 1.0 - alike }
    }

    /// Some members of a group of which no more is known than how it lies.
    fn part(&self, size: u64) -> Group {
        match self.lies {
            Lies::Known(Spread { domains: 2.., .. }) => {
                Group { size, lies: Lies::Known(Spread { least: 1, domains: size }) }
            }
            Lies::Near | Lies::Known(_) | Lies::Runs(..) => Group::near(size),
        }
    }

    /// The group of these two runs in canonical form: two runs that make one evenly spaced run are
    /// joined, and a run of one member comes last.
    fn joined(runs: [Run; 2], ranks: u64) -> Group {
        let [inner, outer] = runs.map(|run| if run.size <= 1 { ONE } else { run });
        let runs = if inner == ONE {
            [outer, ONE]
        } else if outer != ONE && outer.stride == inner.size * inner.stride {
            [Run { size: inner.size * outer.size, ..inner }, ONE]
        } else {
            [inner, outer]
        };
        Group { size: runs[0].size * runs[1].size, lies: Lies::Runs(runs, ranks) }
    }

    /// How the worst of these groups lies in domains of `reach` devices each, of which `node` form
    /// the smallest domain.
    ///
    /// Exact where extents divide domains or the other way round, and for neighbours; else no
    /// better than it is.
    pub fn spread(&self, reach: u64, node: u64) -> Spread {
        let (size, reach) = (self.size, reach.max(1));
        let (runs, ranks) = match self.lies {
            Lies::Near if size <= reach => return Spread { least: size, domains: 1 },
            Lies::Near => return Spread { least: reach, domains: size.div_ceil(reach) },
            Lies::Known(spread) => return spread,
            Lies::Runs(..) if size == 1 => return Spread { least: 1, domains: 1 },
            Lies::Runs(runs, ranks) => (runs, ranks),
        };
        let used = used(ranks, node.max(1));
        let reach = if used == node { reach } else { (reach * used / node.max(1)).max(1) };
        let mut spread = Spread { least: 1, domains: 1 };
        if ranks <= reach {
            return Spread { least: size, ..spread };
        }
        let mut is_even = true;
        for run in runs.iter().filter(|run| run.size > 1) {
            let Spread { least, domains } = run.spread(reach, ranks);
            // What lies across an edge may be alone there.
            spread.least *= if is_even { least } else { 1 };
            spread.domains *= if is_even { domains } else { run.size };
            is_even &= least * domains == run.size;
        }
        spread.domains = spread.domains.min(ranks.div_ceil(reach));
        spread
    }

    /// One representative of all groups that spread over nodes of `node` devices as this one does.
    pub fn alike(&self, node: u64) -> Group {
        match (self.lies, self.spread(node, node)) {
            (Lies::Near, _) => *self,
            (_, spread) => match Group::near(self.size) {
                near if near.spread(node, node) == spread => near,
                _ => Group { lies: Lies::Known(spread), ..*self },
            },
        }
    }

    /// The same, where parts of all that are alike are so too.
    pub fn alike_in_parts(&self, node: u64) -> Group {
        let Spread { least, domains } = self.spread(node, node);
        if least * domains == self.size { self.alike(node) } else { *self }
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

/// Devices that a job of `ranks` ranks takes of each node, out of `node`.
fn used(ranks: u64, node: u64) -> u64 {
    if ranks <= node {
        return node;
    }
    let least = (node as f64 * (1.0 - IDLE_MAX)).ceil() as u64;
    (least.max(1)..=node).rev().find(|used| ranks.is_multiple_of(*used)).unwrap_or(node)
}

#[cfg(test)]
mod tests;
