//! What a saturation did: which rules added what.

use std::collections::BTreeMap;

use egg::Id;

use super::term::Term;

/// One use of a rule that added an equality.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The rule.
    pub rule: &'static str,
    /// The class that the rule is about.
    pub class: Id,
    /// The terms that were found, the root's last.
    pub from: Vec<Term>,
    /// The terms that were built, the root's last.
    pub to: Vec<Term>,
}

/// What a saturation did.
#[derive(Clone, Debug, Default)]
pub struct Saturation {
    /// How often all rules were tried.
    pub rounds: usize,
    /// Whether nothing new comes up any more.
    pub is_complete: bool,
    /// The limits that were hit, in words.
    pub limits_hit: Vec<String>,
    /// How often each rule added an equality.
    pub uses: BTreeMap<&'static str, usize>,
    /// Every use, in order.
    pub steps: Vec<Step>,
}

impl Saturation {
    /// Notes a limit.
    pub(super) fn hit(&mut self, limit: String) {
        if !self.limits_hit.contains(&limit) {
            self.limits_hit.push(limit);
        }
    }

    /// Notes a use of a rule.
    pub(super) fn note(&mut self, step: Step) {
        *self.uses.entry(step.rule).or_default() += 1;
        self.steps.push(step);
    }
}
