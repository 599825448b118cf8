//! The frontier of time and memory: for each of some limits of memory the fastest configuration
//! that keeps it, from the fastest of all down to the smallest; or the lower end of it alone.

use ir::Diagnostic;

use super::branch_and_bound::{Objective, ROUNDING};
use super::request::{Chosen, SearchRequest, SearchResult, search};

/// Limits of memory at most, at equal ratios. Chosen: each is a search.
const LIMITS: i32 = 24;

/// Memory limits as multiples of the least memory. The first gives the best plan, the fastest
/// within it, and the others are listed. Chosen: less than a percent of memory is no reason to take
/// five times as long.
const NEAR_LEAST: [f64; 6] = [1.01, 1.05, 1.1, 1.25, 1.5, 2.0];

/// Finds the fastest plan within a percent of the least memory, and faster plans that need more.
/// The request's objective does not matter.
///
/// # Errors
/// Those of [`search`].
pub fn smallest(question: &SearchRequest<'_>) -> Result<SearchResult, Vec<Diagnostic>> {
    let mut smallest = limited(question, Objective::Memory, None)?;
    let least = bytes(&smallest);
    let mut found: Vec<Chosen> = Vec::new();
    for more in NEAR_LEAST {
        let Ok(next) = limited(question, Objective::Time, Some(least * more)) else {
            smallest.complete = false;
            continue;
        };
        smallest.space.evaluated += next.space.evaluated;
        smallest.space.priced_ahead += next.space.evaluated;
        smallest.complete &= next.complete;
        let next = next.best.into_iter().filter(|one| !found.contains(one));
        found.extend(next.collect::<Vec<_>>());
    }
    if !found.is_empty() {
        smallest.others = found.split_off(1);
        smallest.best = found;
    }
    smallest.misses.clear();
    Ok(smallest)
}

/// Searches for plans that need at most `bytes_max` bytes of a device.
fn limited(
    question: &SearchRequest<'_>,
    objective: Objective,
    bytes_max: Option<f64>,
) -> Result<SearchResult, Vec<Diagnostic>> {
    let have = question.estimator.memory_bytes;
    let most = bytes_max.map_or(have, |bytes| bytes.min(have));
    let estimator = question.estimator.clone().limited(Some(most));
    let limits = question.limits.clone();
    search(&SearchRequest { estimator: &estimator, objective, limits, ..*question })
}

fn bytes(answer: &SearchResult) -> f64 {
    answer.best[0].estimate.memory.total_bytes()
}

/// Finds the Pareto frontier of time and memory, the fastest plan first. The request's objective
/// does not matter.
///
/// # Errors
/// Those of [`search`], where no plan is found at all.
pub fn frontier(question: &SearchRequest<'_>) -> Result<SearchResult, Vec<Diagnostic>> {
    let mut all = limited(question, Objective::Time, None)?;
    let mut most = bytes(&all);
    let Ok(least) = limited(question, Objective::Memory, None).map(|smallest| bytes(&smallest))
    else {
        all.complete = false;
        return Ok(all);
    };
    let ratio = (least / most).powf(1.0 / f64::from(LIMITS));
    // The last limit is the least, but for rounding.
    let least = least * (1.0 + ROUNDING);
    while most > least {
        most = (most * ratio).max(least);
        let Ok(next) = limited(question, Objective::Time, Some(most)) else {
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
