//! Sizes of dims: integer polynomials in named symbols.
//!
//! After import only `B` may stay unbound: the samples of one micro-batch over all data-parallel
//! ranks. Equality of polynomials is equality of sizes for every value of the symbols.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Add, Mul};

use serde::{Deserialize, Serialize};

/// An integer polynomial: a sum of products of symbols, each with a coefficient.
///
/// The map's keys are sorted lists of symbols; the empty list is the constant. No coefficient is
/// zero, so that equality of maps is equality of polynomials. Coefficients saturate at the range of
/// `i64`, beyond every size that a machine can hold.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
pub struct Dim(BTreeMap<Vec<String>, i64>);

/// What the symbols of a module are bound to.
pub type Bindings = BTreeMap<String, i64>;

impl Dim {
    /// The symbol that counts the samples of a micro-batch over all data-parallel ranks.
    pub const BATCH: &'static str = "B";

    /// A constant size.
    pub fn constant(size: i64) -> Dim {
        let mut terms = BTreeMap::new();
        if size != 0 {
            terms.insert(Vec::new(), size);
        }
        Dim(terms)
    }

    /// A symbolic size.
    pub fn symbol(name: impl Into<String>) -> Dim {
        Dim(BTreeMap::from([(vec![name.into()], 1)]))
    }

    /// The size, when it is a constant.
    pub fn as_constant(&self) -> Option<i64> {
        match self.0.len() {
            0 => Some(0),
            1 => self.0.get(&Vec::new()).copied(),
            _ => None,
        }
    }

    /// Whether it can be the size of a dim: not a negative constant, and no coefficient so large
    /// that a text would not keep it.
    pub fn is_size(&self) -> bool {
        let negative = self.as_constant().is_some_and(|size| size < 0);
        !negative && self.0.values().all(|c| c.unsigned_abs() < 1 << 53)
    }

    /// Whether the symbol `name` occurs.
    pub fn mentions(&self, name: &str) -> bool {
        self.0.keys().any(|symbols| symbols.iter().any(|s| s == name))
    }

    /// The symbols that occur, in order.
    pub fn symbols(&self) -> impl Iterator<Item = &str> {
        self.0.keys().flatten().map(String::as_str)
    }

    /// The polynomial with every bound symbol replaced by its value.
    #[must_use]
    pub fn bind(&self, bindings: &Bindings) -> Dim {
        let mut result = Dim::default();
        for (symbols, coefficient) in &self.0 {
            let mut coefficient = *coefficient;
            let mut left = Vec::new();
            for symbol in symbols {
                match bindings.get(symbol) {
                    Some(value) => coefficient = coefficient.saturating_mul(*value),
                    None => left.push(symbol.clone()),
                }
            }
            result.add_term(left, coefficient);
        }
        result
    }

    /// The polynomial with every symbol replaced by a polynomial where `values` names one.
    #[must_use]
    pub fn substitute(&self, values: &BTreeMap<String, Dim>) -> Dim {
        let mut result = Dim::default();
        for (symbols, coefficient) in &self.0 {
            let mut product = Dim::constant(*coefficient);
            for symbol in symbols {
                let factor = values.get(symbol).cloned().unwrap_or_else(|| Dim::symbol(symbol));
                product = &product * &factor;
            }
            result = &result + &product;
        }
        result
    }

    /// The quotient, when every coefficient is divisible by the constant `divisor`.
    pub fn divide(&self, divisor: i64) -> Option<Dim> {
        if divisor == 0 || self.0.values().any(|c| c % divisor != 0) {
            return None;
        }
        Some(Dim(self.0.iter().map(|(s, c)| (s.clone(), c / divisor)).collect()))
    }

    /// How many times `other` it is, when that is a whole number above zero.
    pub fn ratio(&self, other: &Dim) -> Option<i64> {
        let (own, theirs) = (self.0.values().next()?, other.0.values().next()?);
        let ratio = own.checked_div(*theirs)?;
        (ratio > 0 && *self == other * &Dim::constant(ratio)).then_some(ratio)
    }

    fn add_term(&mut self, symbols: Vec<String>, coefficient: i64) {
        let entry = self.0.entry(symbols.clone()).or_insert(0);
        *entry = entry.saturating_add(coefficient);
        if *entry == 0 {
            self.0.remove(&symbols);
        }
    }
}

impl From<usize> for Dim {
    fn from(size: usize) -> Dim {
        Dim::constant(size as i64)
    }
}

impl Add for &Dim {
    type Output = Dim;

    fn add(self, other: &Dim) -> Dim {
        let mut result = self.clone();
        for (symbols, coefficient) in &other.0 {
            result.add_term(symbols.clone(), *coefficient);
        }
        result
    }
}

impl Mul for &Dim {
    type Output = Dim;

    fn mul(self, other: &Dim) -> Dim {
        let mut result = Dim::default();
        for (a, x) in &self.0 {
            for (b, y) in &other.0 {
                let mut symbols: Vec<String> = a.iter().chain(b).cloned().collect();
                symbols.sort();
                result.add_term(symbols, x.saturating_mul(*y));
            }
        }
        result
    }
}

impl fmt::Display for Dim {
    /// Prints `2*B*S+B+3`: terms of more symbols first, the constant last.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("0");
        }
        let mut terms: Vec<_> = self.0.iter().collect();
        terms.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then(a.0.cmp(b.0)));
        for (at, (symbols, coefficient)) in terms.into_iter().enumerate() {
            if at > 0 && *coefficient > 0 {
                f.write_str("+")?;
            }
            match (symbols.is_empty(), *coefficient) {
                (true, c) => write!(f, "{c}")?,
                (false, 1) => f.write_str(&symbols.join("*"))?,
                (false, -1) => write!(f, "-{}", symbols.join("*"))?,
                (false, c) => write!(f, "{c}*{}", symbols.join("*"))?,
            }
        }
        Ok(())
    }
}

/// The product of dims: the number of elements.
pub fn product<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Dim {
    dims.into_iter().fold(Dim::constant(1), |product, dim| &product * dim)
}
