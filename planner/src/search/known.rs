//! What a search already knows about a schedule.

use rustc_hash::FxHashMap;

use super::branch_and_bound::Path;
use crate::configuration::{Configuration, Offload, Recompute, Zero};
use crate::estimate::cut::{LowerBound, Room};

/// What is known of all cuts of one schedule: many leaves below it share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// By recomputation: the lower bound on the passes over all stage partitions, and the partition
    /// that attains it.
    pub(super) least: Vec<(Recompute, (LowerBound, Vec<u32>))>,
    /// `(seconds, room)`: the room of stage partitions whose step is faster than `seconds`, with
    /// nothing recomputed. Partitions that recompute more have no more room.
    pub(super) room: Option<(f64, Option<Room>)>,
    /// By the decisions before recomputation: `[seconds, bound_s]`, where `bound_s` is a lower
    /// bound on the seconds of collectives, optimizer update and offload over all stage partitions
    /// whose step is faster than `seconds`.
    pub(super) after_s: FxHashMap<Path, [f64; 2]>,
    /// Bytes of the smallest of the usual stage partitions.
    pub(super) bytes: FxHashMap<MemoryDecisions, f64>,
    /// Whether any stage partition fits.
    pub(super) fits: FxHashMap<MemoryDecisions, bool>,
}

/// The decisions after the schedule: with it and the stage partition they say what a device holds.
pub(super) type MemoryDecisions = (Zero, Offload, Recompute);

/// Those of a configuration.
pub(super) fn memory_decisions(c: &Configuration) -> MemoryDecisions {
    (c.zero, c.offload, c.recompute)
}
