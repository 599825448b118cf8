//! The time of collectives and messages between ranks of a cluster of several levels.
//!
//! Inside a node, timings of the vendor's library count, between their points on a logarithmic
//! scale. Between nodes, rings pass every member once, so that a node's ports carry a group's bytes
//! once, over as many ports as the node has members; groups that communicate at the same time share
//! the ports evenly, as the usual placements do. A ring is as slow as where it has the fewest.
//!
//! No group is faster for lying further apart, as there is no way between nodes that ranks of one
//! node could not take as well: what goes through a network takes at least as long as the same
//! inside a node. Searches rely on it, and take the nearest groups for a bound.
//!
//! Switches join any to any. Where members have links to each other instead, a group has those
//! between its members; where they lie in a ring, part of it is a line. Rails join devices of equal
//! place in their nodes: what is for another rail hops inside its node or takes the spine.
//!
//! Legend: n members, w of them at least in one node, V bytes of the whole value.

#[cfg(test)]
mod ways;

use serde::Deserialize;

pub use super::group::{Crossing, Group, Spread};
use crate::cluster::Shape;

/// Timings of one number of members, in µs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Timing {
    /// Members.
    pub members: u64,
    /// Every member gets all bytes.
    pub gather_us: Row,
    /// Every member sends a part to each.
    pub exchange_us: Row,
    /// Every member gets the sum.
    pub all_reduce_us: Row,
}

/// Timings of one collective, in µs: of 1 KiB and each four times as much up to 256 MiB, then of
/// 512 MiB.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "Vec<f64>")]
pub struct Row {
    first_us: f64,
    last_us: f64,
    /// The logarithm of the least of each timing and those of larger messages.
    least: Vec<f64>,
}

/// Links inside a node.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Inner {
    /// Bytes per second, per device and direction, of the links that were timed.
    pub bytes_per_s: f64,
    /// Share of it that messages reach.
    pub share: f64,
    /// Seconds to start a message.
    pub start_s: f64,
    /// Seconds of each member beyond those that were timed.
    pub step_s: f64,
    /// Timings, by members.
    pub timing: Vec<Timing>,
}

/// A network between nodes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Fabric {
    /// The name of the level in clusters.
    pub name: String,
    /// Share of the bandwidth that an all-reduce over two nodes reaches.
    pub reduce_share: f64,
    /// Share that gathers, scatters and messages reach.
    pub gather_share: f64,
    /// How much an all-reduce loses with each doubling of the nodes: `1 / (1 + loss · log₂(N/2))`.
    pub loss_per_doubling: f64,
    /// Seconds that an all-reduce takes longer with each doubling of the nodes beyond two, whatever
    /// its bytes.
    pub doubling_s: f64,
    /// Seconds that it takes longer with each node beyond two.
    pub node_s: f64,
    /// Seconds of one step of a ring.
    pub step_s: f64,
    /// Seconds of one step of a tree.
    pub hop_s: f64,
    /// Seconds to start a collective.
    pub start_s: f64,
    /// Share of a hidden collective that slows down what hides it.
    pub interference: f64,
}

/// How the members of a level are joined, as far as it bounds what they send.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wires {
    /// The shape.
    pub shape: Shape,
    /// Members that are joined so.
    pub members: u64,
}

impl Wires {
    /// Any to any, however many there are.
    pub const SWITCH: Wires = Wires { shape: Shape::Switch, members: 1 };

    /// The share of a member's bandwidth that rings over `m` of the members reach: links to others
    /// lie idle, and a line goes back where it came from.
    fn in_rings(self, m: u64) -> f64 {
        match self.shape {
            Shape::Switch => 1.0,
            Shape::Full => self.joined(m),
            Shape::Ring if m >= self.members => 1.0,
            Shape::Ring => 0.5,
        }
    }

    /// The share where each of `m` members sends to each: half of what a ring carries crosses its
    /// middle, where it has two links, and a line one.
    fn in_exchanges(self, m: u64) -> f64 {
        match self.shape {
            Shape::Switch => 1.0,
            Shape::Full => self.joined(m),
            Shape::Ring if m >= self.members => (4.0 / m as f64).min(1.0),
            Shape::Ring => (2.0 / m as f64).min(0.5),
        }
    }

    /// The share that one member sends to another.
    fn to_one(self) -> f64 {
        self.in_rings(2)
    }

    /// Of its links to all others, those of a member to `m - 1` of them.
    fn joined(self, m: u64) -> f64 {
        let others = |n: u64| n.saturating_sub(1).max(1) as f64;
        (others(m) / others(self.members)).min(1.0)
    }
}

/// A collective, as timings know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gather,
    Exchange,
    AllReduce,
}

impl Kind {
    fn row(self, timing: &Timing) -> &Row {
        match self {
            Kind::Gather => &timing.gather_us,
            Kind::Exchange => &timing.exchange_us,
            Kind::AllReduce => &timing.all_reduce_us,
        }
    }

    /// Trips of all bytes around a ring.
    fn rings(self) -> f64 {
        if self == Kind::AllReduce { 2.0 } else { 1.0 }
    }

    /// The share of the bandwidth of `m` of some members that it reaches.
    fn share(self, wires: Wires, m: u64) -> f64 {
        if self == Kind::Exchange { wires.in_exchanges(m) } else { wires.in_rings(m) }
    }
}

/// Links between domains that are larger than a node: what lies beyond the outer level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beyond {
    /// Devices of one of the domains.
    pub reach: u64,
    /// Bytes per second between them, per device and direction.
    pub bytes_per_s: f64,
    /// How the domains are joined.
    pub wires: Wires,
    /// Seconds by which a step through them is longer than one between nodes.
    pub more_s: f64,
}

/// The links of a cluster, as ranks see them.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// Devices of a node: of one domain of the inner level.
    pub node: u64,
    /// Inside a node.
    pub inner: Inner,
    /// Bytes per second inside a node, per device and direction.
    pub inner_bytes_per_s: f64,
    /// Between nodes.
    pub outer: Fabric,
    /// Bytes per second between nodes, per device and direction.
    pub outer_bytes_per_s: f64,
    /// How the devices of a node are joined, and nodes.
    pub wires: [Wires; 2],
    /// Devices of a node on one rail, where ranks of equal place in their nodes share one, and a
    /// way to another rail leads through a node or through what lies beyond.
    pub of_rail: Option<u64>,
    /// Seconds by which each step inside a node is longer than it was timed.
    pub inner_more_s: f64,
    /// Links between larger domains, from the inside out.
    pub beyond: Vec<Beyond>,
}

/// Share of a collective inside a node that slows down what hides it: it takes multiprocessors and
/// memory bandwidth. Source: Isaev et al. 2023 take 15 % of the multiprocessors for NVLink; half of
/// the hiding work is limited by them.
pub const INNER_INTERFERENCE: f64 = 0.08;

/// The sizes of timings: the first, the factor between them, and the last.
const FIRST_BYTES: f64 = 1024.0;
const LAST_BYTES: f64 = 536_870_912.0;

impl Network {
    /// How a group lies in nodes.
    fn spread(&self, group: Group) -> Spread {
        group.spread(self.node, self.node)
    }

    /// The domains larger than a node that a group leaves, each with the members in one of them.
    fn left(&self, group: Group) -> impl Iterator<Item = (&Beyond, Spread)> {
        self.beyond.iter().filter_map(move |beyond| {
            let spread = group.spread(beyond.reach, self.node);
            (spread.domains > 1).then_some((beyond, spread))
        })
    }

    /// The least rate of each member of a group over all that it leaves: `carried` bytes in all
    /// pass each domain's edge, over the ports of its members there.
    fn across_s(&self, carried: f64, group: Group, kind: Kind, share: f64) -> f64 {
        let Spread { least, domains } = self.spread(group);
        let over = |w: u64, rate: f64| carried / (rate * w as f64 * share);
        let near = over(least, self.outer_bytes_per_s * kind.share(self.wires[1], domains));
        self.left(group).fold(near, |slowest, (beyond, spread)| {
            let rate = beyond.bytes_per_s * kind.share(beyond.wires, spread.domains);
            slowest.max(over(spread.least, rate))
        })
    }

    /// How often a group goes to another rail; never where there are none.
    fn crossing(&self, group: Group) -> Crossing {
        self.of_rail.map_or(Crossing::default(), |of_rail| group.crossing(self.node, of_rail))
    }

    /// Seconds in which bytes of each of `w` members of a node go to other rails beyond it: through
    /// what lies beyond the rails, where there is something.
    fn over_spine_s(&self, bytes: f64, w: f64) -> f64 {
        let rate = |beyond: &Beyond| beyond.bytes_per_s * w * self.outer.gather_share;
        self.beyond.first().map_or(f64::INFINITY, |beyond| bytes / rate(beyond))
    }

    /// Seconds by which a step of a group's ring or tree is longer than one between nodes.
    fn far_s(&self, group: Group) -> f64 {
        self.left(group).map(|(beyond, _)| beyond.more_s).fold(0.0, f64::max)
    }

    /// The distance between those neighbours of a group that are furthest from each other, of which
    /// most are `stride` ranks apart: some lie across the edge of a domain that the group leaves.
    pub fn furthest(&self, group: Group, stride: u64) -> u64 {
        let node = if self.leaves_node(group) { self.node } else { 0 };
        let far = self.left(group).map(|(beyond, _)| beyond.reach).fold(stride.max(node), u64::max);
        // The neighbour across an edge has another place in its node, and so another rail.
        let shifted = self.of_rail.map_or(0, |_| stride % self.node.max(1));
        if far > stride { far + shifted } else { far }
    }

    /// What of the distance of two ranks a message between them depends on.
    pub fn distance_alike(&self, stride: u64) -> u64 {
        if self.of_rail.is_some() {
            return stride;
        }
        let reaches = std::iter::once(self.node).chain(self.beyond.iter().map(|b| b.reach));
        reaches.filter(|reach| stride < *reach).count() as u64
    }

    /// A group whose collectives take as long, the same for many that do.
    pub fn alike(&self, group: Group) -> Group {
        // Where there are more domains than nodes, each may be left; and rails are many.
        let is_plain = self.beyond.is_empty() && self.of_rail.is_none();
        if is_plain { group.alike(self.node) } else { group }
    }

    /// The same, where those of parts of the group take as long too.
    pub fn alike_in_parts(&self, group: Group) -> Group {
        let is_plain = self.beyond.is_empty() && self.of_rail.is_none();
        if is_plain { group.alike_in_parts(self.node) } else { group }
    }

    /// Whether a group leaves its node.
    pub fn leaves_node(&self, group: Group) -> bool {
        self.spread(group).domains > 1
    }

    /// Share of a hidden collective that slows down what hides it.
    pub fn interference(&self, group: Group) -> f64 {
        if self.leaves_node(group) { self.outer.interference } else { INNER_INTERFERENCE }
    }

    /// Every member gets `V` bytes, of which it has an n-th; or an n-th of the sum of `V` bytes.
    pub fn gather_s(&self, bytes: f64, group: Group) -> f64 {
        if group.size() <= 1 || bytes <= 0.0 {
            return 0.0;
        }
        if !self.leaves_node(group) {
            return self.inner_s(bytes, group.size(), Kind::Gather);
        }
        let n = group.size() as f64;
        let steps_s = (n - 1.0) * (self.outer.step_s + self.far_s(group));
        let ring_s = self.ring_s(bytes, group, Kind::Gather, self.outer.gather_share);
        let near_s = self.near_s(bytes, group, Kind::Gather);
        (self.outer.start_s + steps_s + ring_s).max(near_s)
    }

    /// Every member gets the sum of `V` bytes.
    pub fn all_reduce_s(&self, bytes: f64, group: Group) -> f64 {
        let size = group.size();
        if size <= 1 || bytes <= 0.0 {
            return 0.0;
        }
        let Spread { least, domains } = self.spread(group);
        if domains <= 1 {
            return self.inner_s(bytes, size, Kind::AllReduce);
        }
        let nodes = domains as f64;
        let doublings = (nodes / 2.0).max(1.0).log2();
        let share = self.outer.reduce_share / (1.0 + self.outer.loss_per_doubling * doublings);
        // Up and down a tree of nodes, with a ring inside each; or twice around a ring. Ranks that
        // are further apart take no shorter way.
        let tree = |w: u64, nodes: u64| 2.0 * (nodes as f64).log2().ceil() + 2.0 * (w as f64 - 1.0);
        let most = self.most_inside(size);
        let tree = tree(least, domains).max(tree(most, size.div_ceil(most)));
        let steps = tree.min(2.0 * (size as f64 - 1.0));
        let far_s = self.outer.doubling_s * doublings + self.outer.node_s * (nodes - 2.0).max(0.0);
        let hop_s = self.outer.hop_s + self.far_s(group);
        let steps_s = self.outer.start_s + steps * hop_s + far_s;
        let near_s = self.near_s(bytes, group, Kind::AllReduce);
        (steps_s + self.ring_s(bytes, group, Kind::AllReduce, share)).max(near_s)
    }

    /// Nodes of a group, at least 1.
    pub fn nodes(&self, group: Group) -> f64 {
        self.spread(group).domains as f64
    }

    /// Every member sends a different n-th of its `V` bytes to each. `once` is the share of the
    /// bytes for other nodes that are left when what is alike goes to a node once.
    pub fn exchange_s(&self, bytes: f64, group: Group, once: f64) -> f64 {
        let size = group.size();
        if size <= 1 || bytes <= 0.0 {
            return 0.0;
        }
        let Spread { least, domains } = self.spread(group);
        if domains <= 1 {
            return self.inner_s(bytes, size, Kind::Exchange);
        }
        let (n, w) = (size as f64, least as f64);
        let most = self.node.min(size);
        let inner_rate = self.inner_bytes_per_s * self.inner.share;
        let inner_rate = inner_rate * self.wires[0].in_exchanges(most);
        let inner = bytes * (most as f64 - 1.0) / n / inner_rate;
        let share = self.outer.gather_share;
        let across = |w: f64, rate: f64| bytes * (n - w) / n * once / (rate * share);
        let near = across(w, self.outer_bytes_per_s * self.wires[1].in_exchanges(domains));
        let outer = self.left(group).fold(near, |slowest, (beyond, spread)| {
            let rate = beyond.bytes_per_s * beyond.wires.in_exchanges(spread.domains);
            slowest.max(across(spread.least as f64, rate))
        });
        // What is for other rails hops inside the node first, or takes the spine.
        let crossed = bytes * (n - w) / n * once * self.crossing(group).exchange;
        let [inner, outer] = self.crossed_s(crossed, 1.0, [inner, outer], inner_rate);
        let far_s = self.outer.start_s + self.far_s(group) + inner.max(outer);
        // Inside a node everything goes to everyone.
        match size <= self.node {
            true => far_s.max(self.near_s(bytes, group, Kind::Exchange)),
            false => far_s,
        }
    }

    /// The seconds inside nodes and between them, where some bytes of each member cross rails: they
    /// hop inside their node, or go through the spine with those of `w` members, whichever is done
    /// sooner.
    fn crossed_s(&self, crossed: f64, w: f64, [inner, outer]: [f64; 2], rate: f64) -> [f64; 2] {
        if crossed <= 0.0 {
            return [inner, outer];
        }
        let hops = if self.node > 1 { inner + crossed / (w * rate) } else { f64::INFINITY };
        let spine = outer.max(self.over_spine_s(crossed, w));
        if hops.max(outer) <= inner.max(spine) { [hops, outer] } else { [inner, spine] }
    }

    /// A message over a distance of `stride` ranks.
    pub fn send_s(&self, bytes: f64, stride: u64) -> f64 {
        let inner_rate = self.inner_bytes_per_s * self.inner.share * self.wires[0].to_one();
        let near_s = self.inner.start_s + bytes / inner_rate;
        if stride < self.node {
            near_s
        } else {
            let left = || self.beyond.iter().filter(|beyond| stride >= beyond.reach);
            let outer_rate = self.outer_bytes_per_s * self.wires[1].to_one();
            let rate = left().fold(outer_rate, |rate, beyond| {
                rate.min(beyond.bytes_per_s * beyond.wires.to_one())
            });
            let more_s = left().map(|beyond| beyond.more_s).fold(0.0, f64::max);
            let mut far_s = self.outer.start_s + more_s + bytes / (rate * self.outer.gather_share);
            let shifts = |of_rail: u64| stride % self.node >= of_rail.min(self.node);
            if self.of_rail.is_some_and(shifts) {
                let spine = self.over_spine_s(bytes, 1.0);
                let sent_s = bytes / (rate * self.outer.gather_share);
                let spine_s = self.outer.start_s + more_s + sent_s.max(spine);
                far_s = (far_s + near_s).min(spine_s);
            }
            if self.node > 1 { far_s.max(near_s) } else { far_s }
        }
    }

    /// Upper bound on the members that share a node, for a group of `size` that spans nodes.
    fn most_inside(&self, size: u64) -> u64 {
        let least_stride = if size > self.node { 1 } else { self.node / size + 1 };
        (self.node / least_stride).clamp(1, size)
    }

    /// Seconds of the collective among `min(node, group size)` members inside one node: the least
    /// that a group that spans nodes takes.
    fn near_s(&self, bytes: f64, group: Group, kind: Kind) -> f64 {
        match self.node.min(group.size()) {
            ..=1 => 0.0,
            members => self.inner_s(bytes, members, kind),
        }
    }

    /// The bytes of a collective's trips around a ring through nodes.
    fn ring_s(&self, bytes: f64, group: Group, kind: Kind, share: f64) -> f64 {
        let (n, w) = (group.size() as f64, self.spread(group).least);
        let carried = kind.rings() * bytes * (n - 1.0) / n;
        let outer = self.across_s(carried, group, kind, share);
        // Also ranks that are alone in their nodes send through its links.
        let inside = self.most_inside(group.size()).max(w);
        let rate = self.inner_bytes_per_s * self.inner.share * self.wires[0].in_rings(inside);
        let inner = if self.node > 1 { carried / rate } else { 0.0 };
        let crossed = carried * self.crossing(group).ring;
        let [inner, outer] = self.crossed_s(crossed, w as f64, [inner, outer], rate);
        outer.max(inner)
    }

    /// A collective inside a node: between timings.
    fn inner_s(&self, bytes: f64, members: u64, kind: Kind) -> f64 {
        let rings = kind.rings();
        let rate = self.inner_bytes_per_s * kind.share(self.wires[0], members);
        let timings = &self.inner.timing;
        let at = |timing: &Timing| {
            let row = kind.row(timing);
            let timed = row.at_us(bytes);
            let floor = row.first_us.min(timed);
            // Links of another speed than those that were timed.
            floor + (timed - floor) * self.inner.bytes_per_s / rate
        };
        let above = timings.iter().position(|timing| timing.members >= members);
        let us = match above {
            Some(0) => at(&timings[0]),
            Some(i) => {
                let (low, high) = (&timings[i - 1], &timings[i]);
                let part = (members - low.members) as f64 / (high.members - low.members) as f64;
                at(low) * (1.0 - part) + at(high) * part
            }
            None => {
                let last = timings.last().expect("a device file has timings");
                let share = |n: u64| (n as f64 - 1.0) / n as f64;
                let more = (members - last.members) as f64 * self.inner.step_s * 1e6;
                at(last) * share(members) / share(last.members) + more
            }
        };
        // Links of another latency: at least the bytes have to pass.
        let n = members as f64;
        let least_s = (us * 1e-6).min(rings * bytes * (n - 1.0) / n / rate);
        (us * 1e-6 + rings * (n - 1.0) * self.inner_more_s).max(least_s)
    }
}

impl TryFrom<Vec<f64>> for Row {
    type Error = &'static str;

    fn try_from(timed: Vec<f64>) -> Result<Row, Self::Error> {
        let ([first_us, .., last_us], true) = (&timed[..], timed.iter().all(|us| *us > 0.0)) else {
            return Err("a row has at least two timings, and each is above 0");
        };
        let (first_us, last_us) = (*first_us, *last_us);
        let mut least: Vec<f64> = timed.iter().map(|us| us.ln()).collect();
        for at in (0..least.len() - 1).rev() {
            least[at] = least[at].min(least[at + 1]);
        }
        Ok(Row { first_us, last_us, least })
    }
}

impl Row {
    /// Between its points, on logarithmic scales; beyond the last, in proportion. No message takes
    /// longer than a larger one, which it could be padded to: timings are not that exact.
    fn at_us(&self, bytes: f64) -> f64 {
        if bytes >= LAST_BYTES {
            return self.last_us * bytes / LAST_BYTES;
        }
        let points = |bytes: f64| (bytes / FIRST_BYTES).ln() / 4f64.ln();
        let (last, at) = (self.least.len() - 1, points(bytes.max(FIRST_BYTES)));
        let from = (at as usize).min(last - 1);
        // The last two points are closer to each other.
        let width = if from + 1 == last { points(LAST_BYTES) - from as f64 } else { 1.0 };
        let part = (at - from as f64) / width;
        (self.least[from] + part * (self.least[from + 1] - self.least[from])).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row says what was timed where it was, and between two points what lies between both.
    #[test]
    fn rows_go_through_their_points() {
        let timed: Vec<f64> = (0..11).map(|at| 10.0 * 1.7f64.powi(at)).collect();
        let row = Row::try_from(timed.clone()).unwrap();
        let sizes: Vec<f64> = (0..10).map(|at| FIRST_BYTES * 4f64.powi(at)).collect();
        let sizes: Vec<f64> = sizes.into_iter().chain([LAST_BYTES]).collect();
        for (at, size) in sizes.iter().enumerate() {
            assert!((row.at_us(*size) / timed[at] - 1.0).abs() < 1e-12, "{size} bytes");
            let Some(next) = sizes.get(at + 1) else { continue };
            let middle = (timed[at] * timed[at + 1]).sqrt();
            assert!((row.at_us((size * next).sqrt()) / middle - 1.0).abs() < 1e-12, "{size} bytes");
        }
        assert!((row.at_us(3.0 * LAST_BYTES) / (3.0 * timed[10]) - 1.0).abs() < 1e-12);
        assert_eq!(row.at_us(1.0), row.at_us(FIRST_BYTES));
        Row::try_from(vec![1.0]).unwrap_err();
        Row::try_from(vec![1.0, 0.0]).unwrap_err();
    }
}
