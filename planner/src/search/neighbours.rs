//! Searches near an answer: one decision is another, or devices have another memory, and all else
//! is searched again.

use super::branch_and_bound::Budget;
use super::request::{Chosen, SearchRequest, best_with, smallest_with};
use super::table::Tables;
use crate::limits::{Decision, Limits};

/// The budget of each search: leaves, and bounds as parts of one. Chosen: some seconds at most;
/// searches of dense models end by themselves before.
const EVALUATIONS_MAX: u64 = 20_000;

/// A question whose variations are answered, on the same devices.
///
/// Each search begins with the fastest configuration that is known to be within its limits, of the
/// answers before it too, so that all that is slower is left out unseen.
pub struct Variations<'a> {
    question: &'a SearchRequest<'a>,
    tables: Tables,
    known: Vec<Chosen>,
}

impl<'a> Variations<'a> {
    /// Variations of a question about time, of which some configurations are known, whether they
    /// fit or not.
    pub fn new(question: &'a SearchRequest<'a>, known: Vec<Chosen>) -> Variations<'a> {
        Variations { question, tables: Tables::default(), known }
    }

    /// The fastest configuration that fits, with a decision fixed to a number, whatever the
    /// question fixes it to; none where none was found.
    pub fn with_decision(&mut self, decision: Decision, number: usize) -> Option<Chosen> {
        let mut limits = self.question.limits.clone();
        limits.fix(decision, number);
        self.answer(&SearchRequest { limits, ..*self.question })
    }

    /// The fastest configuration that fits into other memory of a device, in bytes; none where none
    /// was found.
    pub fn with_memory(&mut self, memory_bytes: f64) -> Option<Chosen> {
        let mut estimator = self.question.estimator.clone();
        estimator.memory_bytes = memory_bytes;
        let limits = self.question.limits.clone();
        self.answer(&SearchRequest { estimator: &estimator, limits, ..*self.question })
    }

    fn answer(&mut self, request: &SearchRequest<'_>) -> Option<Chosen> {
        request.limits.check().ok()?;
        let budget = Budget { evaluations_max: EVALUATIONS_MAX, ..request.budget };
        let request = &SearchRequest { budget, limits: request.limits.clone(), ..*request };
        // The smallest is found soon, and where it fits it is fast enough to begin with.
        let smallest = || smallest_with(request, &self.tables).filter(|chosen| chosen.fits);
        let have = request.estimator.memory_bytes;
        let known = fastest(&self.known, &request.limits, have).or_else(smallest);
        let below_s = known.as_ref().map_or(f64::INFINITY, |known| known.estimate.step_time_s);
        let found = best_with(request, &self.tables, below_s);
        self.known.extend(found.clone());
        found.or(known)
    }
}

/// The fastest of some configurations that limits allow and that need no more than `have` bytes.
fn fastest(known: &[Chosen], limits: &Limits, have: f64) -> Option<Chosen> {
    let fits = |known: &&Chosen| {
        let bytes = known.estimate.memory.total_bytes();
        bytes <= have && limits.allow_all(&known.configuration)
    };
    let seconds = |known: &Chosen| known.estimate.step_time_s;
    let fastest = known.iter().filter(fits).min_by(|a, b| seconds(a).total_cmp(&seconds(b)))?;
    Some(Chosen { fits: true, ..fastest.clone() })
}
