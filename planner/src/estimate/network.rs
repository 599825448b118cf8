//! The time of collectives and messages between ranks of a cluster of several levels.
//!
//! A group of ranks has members at equal distances. Rings pass every member once, so that a node's
//! ports carry a group's bytes once, spread over as many ports as the node has members; groups that
//! communicate at the same time share the ports evenly, as Megatron-like placements do.
//!
//! Legend: n members, w of them in one node, V bytes of the whole value, α latency of a step.

use serde::Deserialize;

/// Links of one level.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Links {
    /// Bytes per second, per device and direction.
    pub bytes_per_s: f64,
    /// Share of it that long collectives reach.
    pub share: f64,
    /// Seconds of one step of a ring.
    pub step_s: f64,
    /// Seconds to start a collective.
    pub start_s: f64,
    /// Bytes of one member's part below which half of the bandwidth is lost.
    pub ramp_bytes: f64,
    /// Share of the bandwidth of a ring that all-reduce reaches beyond it by reducing in the
    /// switches; 1 for none.
    pub switch_gain: f64,
}

/// The links of a cluster, as ranks see them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Devices of a node: of one domain of the inner level.
    pub node: u64,
    /// Inside a node.
    pub inner: Links,
    /// Between nodes; bandwidth per device.
    pub outer: Links,
}

/// Members of a collective: so many, so many ranks apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// Members.
    pub size: u64,
    /// Ranks from one to the next.
    pub stride: u64,
}

impl Network {
    /// Members that share a node, at least 1.
    fn inside(&self, group: Group) -> u64 {
        (self.node / group.stride.max(1)).clamp(1, group.size.max(1))
    }

    /// Every member gets `V` bytes, of which it has an n-th; or an n-th of the sum of `V` bytes.
    pub fn gather_s(&self, bytes: f64, group: Group) -> f64 {
        self.ring_s(bytes, group, 1.0)
    }

    /// Every member gets the sum of `V` bytes.
    pub fn all_reduce_s(&self, bytes: f64, group: Group) -> f64 {
        self.ring_s(bytes, group, 2.0)
    }

    /// `passes` trips around a ring, or a tree where that is faster.
    fn ring_s(&self, bytes: f64, group: Group, passes: f64) -> f64 {
        if group.size <= 1 || bytes <= 0.0 {
            return 0.0;
        }
        let n = group.size as f64;
        let w = self.inside(group);
        let nodes = (group.size as f64 / w as f64).ceil();
        let rate = |links: &Links, ports: f64| links.bytes_per_s * links.share * ports;
        let part = bytes / n;
        let mut steps = n - 1.0;
        let mut seconds_per_byte: f64 = 0.0;
        let mut step_s: f64 = 0.0;
        let mut start_s = 0.0;
        if w > 1 {
            let gain = if passes > 1.5 && nodes <= 1.0 { self.inner.switch_gain } else { 1.0 };
            seconds_per_byte = 1.0 / (rate(&self.inner, 1.0) * gain);
            step_s = self.inner.step_s;
            start_s = self.inner.start_s;
        }
        if nodes > 1.0 {
            seconds_per_byte = seconds_per_byte.max(1.0 / rate(&self.outer, w as f64));
            step_s = step_s.max(self.outer.step_s);
            start_s = self.outer.start_s;
            if passes > 1.5 {
                // A tree between nodes needs fewer steps than a ring through all of them.
                let tree = 2.0 * nodes.log2().ceil() + (w as f64 - 1.0);
                steps = steps.min(tree);
            }
        }
        let links = if nodes > 1.0 { &self.outer } else { &self.inner };
        let ramp = links.ramp_bytes * (n - 1.0).min(4.0);
        start_s
            + passes * steps * step_s
            + passes * seconds_per_byte * (part * (n - 1.0) + ramp * part / (part + ramp))
    }

    /// Every member sends a different n-th of its `V` bytes to each.
    pub fn exchange_s(&self, bytes: f64, group: Group) -> f64 {
        if group.size <= 1 || bytes <= 0.0 {
            return 0.0;
        }
        let (n, w) = (group.size as f64, self.inside(group) as f64);
        let inner = bytes * (w - 1.0) / n / (self.inner.bytes_per_s * self.inner.share);
        let outer = bytes * (n - w) / n / (self.outer.bytes_per_s * self.outer.share);
        let start_s = if n > w { self.outer.start_s } else { self.inner.start_s };
        start_s + inner.max(outer)
    }

    /// A message over a distance of `stride` ranks.
    pub fn send_s(&self, bytes: f64, stride: u64) -> f64 {
        let links = if stride < self.node { &self.inner } else { &self.outer };
        links.start_s + bytes / (links.bytes_per_s * links.share)
    }
}
