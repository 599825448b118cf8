//! Rules: equalities between terms, as records.
//!
//! A rule is data: what stands on the left may be replaced by what stands on the right where the
//! guard allows it, and what it keeps is executed against the interpreter for every rule.

mod algebra;
mod view;

use super::pattern::Site;
use crate::op::Op;

/// What two sides of a rule share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Keeps {
    /// Every bit of every result, zeros' signs included; a NaN stays a NaN.
    Bits,
    /// All but the rounding of intermediate results: other order of sums, other intermediate steps.
    /// A NaN stays a NaN, an infinity itself, and zero a zero of either sign, as long as nothing
    /// between overflows.
    Rounding,
    /// Results that are close; off unless asked for.
    Nearly,
}

impl Keeps {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Keeps::Bits => "exact",
            Keeps::Rounding => "reassociates",
            Keeps::Nearly => "approximate",
        }
    }
}

/// The ops of the right side's slots that are not those of the left; none where the rule does not
/// hold.
pub type Guard = fn(&Site<'_>) -> Option<Vec<(&'static str, Op)>>;

/// A rule.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// What it does, as a verb with its object.
    pub name: &'static str,
    /// What is found.
    pub left: &'static str,
    /// What it equals.
    pub right: &'static str,
    /// Where it holds.
    pub when: Guard,
    /// What both sides share.
    pub keeps: Keeps,
    /// What it is for.
    pub why: &'static str,
}

/// Always.
fn always(_: &Site<'_>) -> Option<Vec<(&'static str, Op)>> {
    Some(Vec::new())
}

/// All rules, in the order in which they are tried.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    algebra::RULES.iter().chain(view::RULES)
}
