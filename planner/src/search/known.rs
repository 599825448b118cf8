//! Lower bounds that a search has already computed for a schedule.

use rustc_hash::FxHashMap;

use super::branch_and_bound::Path;
use crate::configuration::Recompute;
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
}
