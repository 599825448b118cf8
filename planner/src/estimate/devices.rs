//! The device files that come with the planner, and the links of a cluster.

use std::sync::OnceLock;

use ir::{Diagnostic, Span};
use serde::Deserialize;

use super::network::{Links, Network};
use super::rates::Rates;
use crate::cluster::{Cluster, Kind};

/// A device and the links between devices, as a file holds them.
#[derive(Clone, Debug, Deserialize)]
struct DeviceFile {
    device: Rates,
    inner: Links,
    outer: Links,
}

/// The files: one a device.
const FILES: [(&str, &str); 2] = [
    ("a100-80gb", include_str!("../device/a100-80gb.toml")),
    ("h100", include_str!("../device/h100.toml")),
];

fn files() -> &'static [DeviceFile] {
    static READ: OnceLock<Vec<DeviceFile>> = OnceLock::new();
    READ.get_or_init(|| {
        let read = FILES.iter().map(|(name, text)| {
            toml::from_str(text).unwrap_or_else(|error| panic!("device file {name}: {error}"))
        });
        read.collect()
    })
}

/// The file of a cluster's device: by its name, else the one with the nearest rate of products.
fn file(cluster: &Cluster) -> Result<&'static DeviceFile, Diagnostic> {
    let device = &cluster.device;
    if device.kind == Kind::Cpu {
        let headline = "this estimate is for devices with memory of their own, not for CPUs";
        let span = Span::of(cluster.name.clone());
        let help = "use a preset such as `a100`, or compile a plan for the ranks of this machine";
        return Err(Diagnostic::error("E3404", span, headline).help(help));
    }
    let named = files().iter().find(|file| file.device.name == device.name);
    let far = |file: &&DeviceFile| {
        let ours = device.peak.values().map(|known| known.value).fold(0.0, f64::max);
        let theirs = file.device.product.iter().map(|p| p.peak_flops).fold(0.0, f64::max);
        (ours / theirs).ln().abs()
    };
    let nearest = files().iter().min_by(|a, b| far(a).total_cmp(&far(b)));
    Ok(named.or(nearest).expect("device files come with the planner"))
}

/// The rates of a cluster's device.
pub(super) fn rates(cluster: &Cluster) -> Result<Rates, Diagnostic> {
    Ok(file(cluster)?.device.clone())
}

/// The links of a cluster: how they behave is the device file's, how fast they are the cluster's.
pub(super) fn network(cluster: &Cluster, rates: &Rates) -> Result<Network, Diagnostic> {
    let found = file(cluster)?;
    let inner = cluster.levels.first().expect("a cluster has a level");
    let outer = cluster.levels.get(1).unwrap_or(inner);
    let node = inner.count.unwrap_or_else(|| cluster.devices_per_node.unwrap_or(1));
    let _ = rates;
    Ok(Network {
        node: node.max(1) as u64,
        inner: Links { bytes_per_s: inner.bandwidth.value, ..found.inner },
        outer: Links { bytes_per_s: outer.bandwidth.value, ..found.outer },
    })
}
