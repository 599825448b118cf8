//! Neighbours of a plan at their best: one decision is another, and all others are searched again.

use super::branch_and_bound::Budget;
use super::request::{Chosen, SearchRequest, best_with};
use super::table::Tables;
use crate::limits::Decision;

/// Configurations that are priced for a neighbour at most. Chosen: less than a second; searches of
/// dense models end by themselves before.
const EVALUATIONS_MAX: u64 = 4_000;

/// A decision, the number that it is fixed to, and seconds that a step is to be faster than.
pub type Change = (Decision, usize, f64);

/// The fastest configuration that fits, for each decision that is fixed to a number in turn,
/// whatever the question fixes it to; none where nothing was found that is fast enough.
pub fn searched_again(question: &SearchRequest<'_>, changes: &[Change]) -> Vec<Option<Chosen>> {
    // All are on the same devices.
    let tables = Tables::default();
    let changed = |(decision, number, below_s): &Change| {
        let mut limits = question.limits.clone();
        limits.fix(*decision, *number);
        limits.check().ok()?;
        let budget = Budget { evaluations_max: EVALUATIONS_MAX, ..question.budget };
        best_with(&SearchRequest { limits, budget, ..*question }, &tables, *below_s)
    };
    changes.iter().map(changed).collect()
}
