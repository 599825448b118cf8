//! What an operator demands of numbers that are there when a model runs: a number that is computed
//! with the results, and what it has to be below.
//!
//! A gather of a row that is not there has no meaning, and ops of the module yield zeros for it. A
//! number beside the results says whether there was one, so that no engine has to.

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
