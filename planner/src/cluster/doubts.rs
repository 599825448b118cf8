//! Numbers of a cluster that are possible and that no device or link has.

use ir::{Diagnostic, Span};

use super::{Cluster, Kind, Known};
use crate::quantity::Unit;

/// What is usual of one quantity.
struct Usual {
    unit: Unit,
    least: f64,
    most: f64,
}

// All bounds are chosen: ten times below the smallest and above the largest of the presets, or
// more.
const MEMORY: Usual = Usual { unit: Unit::Bytes, least: 1e9, most: 4e12 };
const MEMORY_BANDWIDTH: Usual = Usual { unit: Unit::BytesPerSecond, least: 1e9, most: 1e14 };
const PEAK: Usual = Usual { unit: Unit::FlopsPerSecond, least: 1e9, most: 1e18 };
const LAUNCH: Usual = Usual { unit: Unit::Seconds, least: 0.0, most: 1e-3 };
const BANDWIDTH: Usual = Usual { unit: Unit::BytesPerSecond, least: 1e7, most: 2e13 };
const LATENCY: Usual = Usual { unit: Unit::Seconds, least: 0.0, most: 0.1 };

impl Cluster {
    /// Numbers that are far from those of any device or link: `W3009` for each.
    pub fn doubts(&self) -> Vec<Diagnostic> {
        if !self.groups.is_empty() {
            return self.groups.iter().flat_map(Cluster::doubts).collect();
        }
        let device = &self.device;
        let mut all = vec![
            (MEMORY, "memory of a device".to_owned(), &device.memory_bytes),
            (MEMORY_BANDWIDTH, "bandwidth of memory".to_owned(), &device.memory_bandwidth),
            (LAUNCH, "seconds of a launch".to_owned(), &device.launch_s),
        ];
        if device.kind == Kind::Gpu {
            let peak = device.peak.iter();
            all.extend(peak.map(|(dtype, rate)| (PEAK, format!("peak in {dtype}"), rate)));
        }
        for level in &self.levels {
            all.push((BANDWIDTH, format!("bandwidth of `{}`", level.name), &level.bandwidth));
            all.push((LATENCY, format!("latency of `{}`", level.name), &level.latency));
        }
        all.into_iter().filter_map(|(usual, what, known)| usual.doubt(&what, known)).collect()
    }
}

impl Usual {
    fn doubt(&self, what: &str, known: &Known) -> Option<Diagnostic> {
        let print = |value| self.unit.print(value);
        let help = match known.value {
            value if value < self.least => format!("the least of any is {}", print(self.least)),
            value if value > self.most => format!("the most of any is {}", print(self.most)),
            _ => return None,
        };
        let headline = format!("{} is hardly the {what}", print(known.value));
        Some(Diagnostic::warning("W3009", Span::of(&*known.source), headline).help(help))
    }
}
