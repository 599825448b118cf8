//! What an operator demands of numbers that are there when a model runs: a number that is computed
//! with the results, and what it has to be below.
//!
//! A gather of a row that is not there has no meaning, and ops of the module yield zeros for it. A
//! number beside the results says whether there was one, so that no engine has to.

use super::site::Site;
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Combiner, Op};

/// Something that has to hold when a model runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    /// The node, as people call it.
    pub node: String,
    /// What the limit is of.
    pub of: Limit,
}

/// What a number beside the results has to be below.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// The number of rows that ids index. What is checked is an id, or of a negative one `-1 - id`.
    Rows(usize),
    /// The largest exponent of two of a quotient whose rest is exact.
    QuotientBits(i32),
}

impl Check {
    /// What is wrong, where the number beside the results says so.
    pub fn wrong(&self, number: f64) -> Option<String> {
        let Check { node, of } = self;
        match of {
            Limit::Rows(rows) if number >= *rows as f64 => {
                let below = -1.0 - number;
                Some(format!("{node} reads or writes row {number} or {below} of {rows}"))
            }
            Limit::QuotientBits(bits) if number >= f64::from(*bits).exp2() => {
                Some(format!("{node} has a quotient of {number:e}, of at most 2^{bits}"))
            }
            Limit::Rows(_) | Limit::QuotientBits(_) => None,
        }
    }
}

impl Site<'_, '_> {
    /// Demands that ids are below `rows`, or negative and from `-rows` on.
    pub(super) fn demand_rows(&mut self, ids: ValueId, rows: usize) -> Result<(), String> {
        if self.are_places(ids, rows) {
            return Ok(());
        }
        // -1 - id is the distance from the end.
        let minus = self.number(-1.0, ids)?;
        let from_end = self.sub(minus, ids)?;
        let distance = self.binary(Binary::Max, ids, from_end)?;
        let distance = self.cast(distance, DType::F64)?;
        self.demand(distance, Limit::Rows(rows))
    }

    /// Demands that every number is below a limit.
    pub(super) fn demand(&mut self, numbers: ValueId, of: Limit) -> Result<(), String> {
        let all = (0..self.ndim(numbers)).collect();
        let most = self.reduce(Combiner::Max, all, numbers)?;
        self.demands.push((most, of));
        Ok(())
    }

    /// Whether ids were made by an op that yields places along a dim of at most `rows` elements.
    fn are_places(&self, ids: ValueId, rows: usize) -> bool {
        let mut at = ids;
        loop {
            let nodes = &self.b.function().nodes;
            let Some(node) = nodes.iter().rev().find(|n| n.results.contains(&at)) else {
                return false;
            };
            #[expect(clippy::wildcard_enum_match_arm, reason = "few ops yield or move places")]
            match &node.op {
                Op::ArgMax { dim } | Op::TopK { dim, .. } | Op::Sort { dim, .. } => {
                    return self.dims(node.operands[0])[*dim] <= rows;
                }
                Op::Cast { .. } | Op::Reshape { .. } | Op::Slice { .. } => at = node.operands[0],
                _ => return false,
            }
        }
    }
}
