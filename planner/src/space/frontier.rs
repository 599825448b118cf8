//! The frontier of time and memory: for each of some limits of memory the fastest configuration
//! that keeps it, from the fastest of all down to the smallest.

use ir::Diagnostic;

use super::ask::{Answer, Question, ask};
use super::tree::{Budget, Objective, ROUNDING};

/// Limits of memory at most, at equal ratios. Chosen: each is a search.
const LIMITS: i32 = 24;

/// Answers a question with what is not worse in both time and memory than anything else, the
/// fastest first. Its objective does not matter.
///
/// # Errors
/// As [`ask`], where nothing is found at all.
pub fn frontier(question: &Question<'_>) -> Result<Answer, Vec<Diagnostic>> {
    let bytes = |answer: &Answer| answer.best[0].estimate.memory.total_bytes();
    let limited = |objective: Objective, bytes_max: Option<f64>| {
        let have = question.estimator.memory_bytes;
        let most = bytes_max.map_or(have, |bytes| bytes.min(have));
        let estimator = question.estimator.clone().limited(Some(most));
        let Budget { evaluations_max, stop } = question.budget;
        let budget = Budget { evaluations_max, stop };
        let limits = question.limits.clone();
        ask(&Question { estimator: &estimator, objective, limits, budget, ..*question })
    };
    let mut all = limited(Objective::Time, None)?;
    let mut most = bytes(&all);
    let Ok(least) = limited(Objective::Memory, None).map(|smallest| bytes(&smallest)) else {
        all.complete = false;
        return Ok(all);
    };
    let ratio = (least / most).powf(1.0 / f64::from(LIMITS));
    // The last limit is the least, but for rounding.
    let least = least * (1.0 + ROUNDING);
    while most > least {
        most = (most * ratio).max(least);
        let Ok(next) = limited(Objective::Time, Some(most)) else {
            all.complete = false;
            break;
        };
        all.space.evaluated += next.space.evaluated;
        all.space.priced_ahead += next.space.evaluated;
        all.complete &= next.complete;
        most = most.min(bytes(&next));
        let seconds = next.best[0].estimate.step_time_s;
        all.best.retain(|other| other.estimate.step_time_s < seconds);
        all.best.extend(next.best);
    }
    all.others.clear();
    all.misses.clear();
    Ok(all)
}
