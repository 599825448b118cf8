//! What rewriting did to a module, for people and for tests.

use std::collections::BTreeSet;

use super::price::Work;
use super::saturation::Saturation;

/// What rewriting did to a module.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The functions, in order; composites are not among them.
    pub functions: Vec<FunctionReport>,
}

impl Report {
    /// The rules that added an equality, by name, in alphabetical order.
    pub fn rules(&self) -> Vec<&'static str> {
        let uses = self.functions.iter().flat_map(|function| function.saturation.uses.keys());
        let names: BTreeSet<&'static str> = uses.copied().collect();
        names.into_iter().collect()
    }
}

/// What rewriting did to one function.
#[derive(Clone, Debug)]
pub struct FunctionReport {
    /// The function's name.
    pub name: String,
    /// What it did before.
    pub before: Work,
    /// What it does now.
    pub after: Work,
    /// Classes of the e-graph in the end.
    pub classes: usize,
    /// Terms of the e-graph in the end.
    pub terms: usize,
    /// What rules found.
    pub saturation: Saturation,
    /// How many decisions the choice took.
    pub decisions: usize,
    /// How much cheaper another choice can be at most, as a part of the price.
    pub gap: f64,
    /// For each value whose term a rule made: how it came about.
    pub changes: Vec<Change>,
}

/// A value that is computed in another way than before, or is new.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The value's name.
    pub value: String,
    /// The rules that led there, the first one first.
    pub rules: Vec<&'static str>,
}
