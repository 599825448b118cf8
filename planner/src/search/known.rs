//! What a search has found of a schedule.

use rustc_hash::FxHashMap;

use super::branch_and_bound::Path;
use crate::configuration::Recompute;
use crate::estimate::cut::{LowerBound, Room};

/// What is known of all cuts of one schedule: many leaves below it share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// By what is recomputed: what no cut's passes are below, and the cut of which they are.
    pub(super) least: Vec<(Recompute, (LowerBound, Vec<u32>))>,
    /// What cuts have room whose step is below the seconds, with nothing recomputed: all that
    /// have it with more.
    pub(super) room: Option<(f64, Option<Room>)>,
    /// By all that is decided before what is recomputed: what no cut whose step is below the
    /// first seconds takes less than to exchange, update and move.
    pub(super) after_s: FxHashMap<Path, [f64; 2]>,
}
