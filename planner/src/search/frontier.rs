//! The frontier of time and memory: for each of some limits of memory the fastest configuration
//! that keeps it, from the fastest of all down to the smallest; or the lower end of it alone.

use ir::Diagnostic;

use super::branch_and_bound::{Objective, ROUNDING};
use super::request::{Chosen, SearchRequest, SearchResult, search};

/// Limits of memory at most, at equal ratios. Chosen: each is a search.
const LIMITS: i32 = 24;

/// How much more than the least memory there may be, of which the fastest is taken, and at which
/// others are listed. Chosen: less than a percent is no reason to take five times as long.
const NEAR_LEAST: [f64; 6] = [1.01, 1.05, 1.1, 1.25, 1.5, 2.0];

/// Answers a question with the fastest of all that need the least memory, to a percent, and with
/// what is faster where there is more. Its objective does not matter.
///
/// # Errors
/// As [`search`].
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

/// Answers a question for no more than so many bytes of a device.
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

/// Answers a question with what is not worse in both time and memory than anything else, the
/// fastest first. Its objective does not matter.
///
/// # Errors
/// As [`search`], where nothing is found at all.
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
