//! Neighbours of a plan at their best: one decision is another, and all others are searched again.

use super::ask::{Chosen, Question, best_with};
use super::table::Tables;
use super::tree::Budget;
use crate::limits::Knob;

/// Configurations that are priced for a neighbour at most. Chosen: less than a second; searches of
/// dense models end by themselves before.
const EVALUATIONS_MAX: u64 = 4_000;

/// A decision, the number that it is fixed to, and seconds that a step is to be faster than.
pub type Change = (Knob, usize, f64);

/// The fastest configuration that fits, for each decision that is fixed to a number in turn,
/// whatever the question fixes it to; none where nothing was found that is fast enough.
pub fn searched_again(question: &Question<'_>, changes: &[Change]) -> Vec<Option<Chosen>> {
    // All are on the same devices.
    let tables = Tables::default();
    let changed = |(knob, number, below_s): &Change| {
        let mut limits = question.limits.clone();
        limits.fix(*knob, *number);
        limits.check().ok()?;
        let budget = Budget { evaluations_max: EVALUATIONS_MAX, ..question.budget };
        best_with(&Question { limits, budget, ..*question }, &tables, *below_s)
    };
    changes.iter().map(changed).collect()
}
