//! The memory of a node beside its devices, and the disks: what can be moved there, how fast.

use crate::configuration::{Configuration, Place};

/// Bytes of a node's memory for each device where the cluster does not say. Source: 2 TB for eight
/// devices in a DGX A100 640GB and in a DGX H100 (datasheets).
const USUAL_HOST_BYTES: f64 = 2e12 / 8.0;

/// Share of a node's memory that is not left to the system. Chosen.
const HOST_SHARE: f64 = 7.0 / 8.0;

/// Bytes per second that one device's share of a host's cores updates parameters with. Source: Ren
/// et al. 2021, a fused update on the host reaches half of a socket's bandwidth; eight share two.
pub(super) const HOST_MEMORY_BYTES_PER_S: f64 = 25e9;

/// Bytes per second of one device's share of the node's disks. Chosen: one NVMe disk of 2021.
pub(crate) const DISK_BYTES_PER_S: f64 = 3e9;

/// What a node's memory beside its devices can take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostLimits {
    /// Bytes of a node, where they are known.
    pub(super) memory_bytes: Option<f64>,
    /// Bytes per second between a device and its host, each direction.
    pub(super) link_bytes_per_s: f64,
    /// Bytes per second to and from all devices of a node together, where they share a way.
    pub(super) shared_bytes_per_s: f64,
    /// Devices of a node.
    pub(super) devices: u64,
}

impl HostLimits {
    /// Ranks that share a node's host: they move at the same time.
    fn sharers(&self, c: &Configuration) -> f64 {
        self.devices.min(c.ranks()).max(1) as f64
    }

    /// Bytes that one device may use.
    pub fn bytes(&self, c: &Configuration) -> f64 {
        let usual = USUAL_HOST_BYTES;
        self.memory_bytes.map_or(usual, |bytes| bytes / self.sharers(c)) * HOST_SHARE
    }

    /// Bytes per second that one device moves to the host while all others do.
    pub(super) fn bytes_per_s(&self, c: &Configuration) -> f64 {
        self.link_bytes_per_s.min(self.shared_bytes_per_s / self.sharers(c))
    }

    /// Bytes per second that one device moves to a place while all others do.
    pub(super) fn rate(&self, c: &Configuration, place: Place) -> f64 {
        match place {
            Place::Device => f64::INFINITY,
            Place::Host => self.bytes_per_s(c),
            Place::Disk => DISK_BYTES_PER_S,
        }
    }
}
