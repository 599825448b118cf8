//! Neighbours of a plan at their best: one decision is another, and all others are searched again.

use super::ask::{Chosen, Question, extreme_of};
use super::knobs::Frame;
use super::table::Tables;
use super::tree::{Budget, Objective};
use super::uniform::Space;
use crate::limits::{Knob, Limits};

/// Configurations that are priced for a neighbour at most. Chosen: a tenth of a second; searches
/// of dense models end by themselves before.
const EVALUATIONS_MAX: u64 = 4_000;

/// A decision, the number that it is fixed to, and seconds that a step is to be faster than.
pub type Change = (Knob, usize, f64);

/// The fastest configuration that fits, for each decision that is fixed to a number in turn,
/// whatever the question fixes it to; none where nothing was found that is fast enough.
pub fn neighbours(question: &Question<'_>, changes: &[Change]) -> Vec<Option<Chosen>> {
    // All are on the same devices.
    let tables = Tables::default();
    let fastest = |limits: Limits, below_s: f64| {
        let Question { estimator, devices, global_batch, .. } = *question;
        let frame = Frame::new(estimator.workload(), devices, global_batch, limits);
        let frame = frame.searched_for(Objective::Time);
        let mut space = Space::with(estimator, frame, &tables);
        space.only_fits = true;
        let budget = Budget { evaluations_max: EVALUATIONS_MAX, stop: question.budget.stop };
        extreme_of(&space, Objective::Time, &budget, below_s).0
    };
    let changed = |(knob, number, below_s): &Change| {
        let mut limits = question.limits.clone();
        limits.fix(*knob, *number);
        limits.check().ok().and_then(|()| fastest(limits, *below_s))
    };
    changes.iter().map(changed).collect()
}
