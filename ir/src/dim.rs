//! Sizes of dims: integer polynomials in named symbols.
//!
//! After import only `B` may stay unbound: the samples of one micro-batch over all data-parallel
//! ranks. Equality of polynomials is equality of sizes for every value of the symbols.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Add, Mul};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Products of symbols with their coefficients: sorted lists of symbols, none empty; no coefficient
/// is zero.
type Terms = BTreeMap<Vec<String>, i64>;

/// An integer polynomial: a constant, and a sum of products of symbols, each with a coefficient.
///
/// Every polynomial has one form, so that equality of forms is equality of polynomials.
/// Coefficients saturate at the range of `i64`, beyond every size that a machine can hold. Nearly
/// all dims are constants; those hold nothing on the heap, and copies of the others share it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
#[serde(from = "Vec<(Vec<String>, i64)>", into = "Vec<(Vec<String>, i64)>")]
pub struct Dim {
    constant: i64,
    /// None without symbols.
    terms: Option<Arc<Terms>>,
}

/// What the symbols of a module are bound to.
pub type Bindings = BTreeMap<String, i64>;

impl Dim {
    /// The symbol that counts the samples of a micro-batch over all data-parallel ranks.
    pub const BATCH: &'static str = "B";

    /// A constant size.
    pub fn constant(size: i64) -> Dim {
        Dim { constant: size, terms: None }
    }

    /// A symbolic size.
    pub fn symbol(name: impl Into<String>) -> Dim {
        Dim::of(0, BTreeMap::from([(vec![name.into()], 1)]))
    }

    fn of(constant: i64, terms: Terms) -> Dim {
        Dim { constant, terms: (!terms.is_empty()).then(|| Arc::new(terms)) }
    }

    /// The size, when it is a constant.
    pub fn as_constant(&self) -> Option<i64> {
        self.terms.is_none().then_some(self.constant)
    }

    /// The products of symbols, in order, with their coefficients.
    fn terms(&self) -> impl Iterator<Item = (&Vec<String>, i64)> {
        self.terms.iter().flat_map(|terms| terms.iter()).map(|(symbols, c)| (symbols, *c))
    }

    /// All coefficients that are not zero, the constant first.
    fn coefficients(&self) -> impl Iterator<Item = i64> {
        let constant = (self.constant != 0).then_some(self.constant);
        constant.into_iter().chain(self.terms().map(|(_, coefficient)| coefficient))
    }

    /// Whether it can be the size of a dim: not a negative constant, and no coefficient so large
    /// that a text would not keep it.
    pub fn is_size(&self) -> bool {
        let negative = self.as_constant().is_some_and(|size| size < 0);
        !negative && self.coefficients().all(|c| c.unsigned_abs() < 1 << 53)
    }

    /// Whether the symbol `name` occurs.
    pub fn mentions(&self, name: &str) -> bool {
        self.symbols().any(|symbol| symbol == name)
    }

    /// The symbols that occur, in order.
    pub fn symbols(&self) -> impl Iterator<Item = &str> {
        self.terms().flat_map(|(symbols, _)| symbols).map(String::as_str)
    }

    /// The polynomial with every bound symbol replaced by its value.
    #[must_use]
    pub fn bind(&self, bindings: &Bindings) -> Dim {
        if self.terms.is_none() {
            return self.clone();
        }
        let mut sum = Sum::from(self.constant);
        for (symbols, mut coefficient) in self.terms() {
            let mut left = Vec::new();
            for symbol in symbols {
                match bindings.get(symbol) {
                    Some(value) => coefficient = coefficient.saturating_mul(*value),
                    None => left.push(symbol.clone()),
                }
            }
            sum.add(left, coefficient);
        }
        sum.into_dim()
    }

    /// The quotient, when every coefficient is divisible by the constant `divisor`.
    pub fn divide(&self, divisor: i64) -> Option<Dim> {
        if divisor == 0 || self.coefficients().any(|c| c % divisor != 0) {
            return None;
        }
        let terms = self.terms().map(|(symbols, c)| (symbols.clone(), c / divisor)).collect();
        Some(Dim::of(self.constant / divisor, terms))
    }

    /// How many times `other` it is, when that is a whole number above zero.
    pub fn ratio(&self, other: &Dim) -> Option<i64> {
        let (own, theirs) = (self.coefficients().next()?, other.coefficients().next()?);
        let ratio = own.checked_div(theirs)?;
        (ratio > 0 && *self == other * &Dim::constant(ratio)).then_some(ratio)
    }
}

/// A polynomial that is being added up.
#[derive(Default)]
struct Sum {
    constant: i64,
    terms: Terms,
}

impl From<i64> for Sum {
    fn from(constant: i64) -> Sum {
        Sum { constant, terms: Terms::new() }
    }
}

impl Sum {
    fn add(&mut self, symbols: Vec<String>, coefficient: i64) {
        if symbols.is_empty() {
            self.constant = self.constant.saturating_add(coefficient);
            return;
        }
        let entry = self.terms.entry(symbols).or_insert(0);
        *entry = entry.saturating_add(coefficient);
    }

    fn into_dim(mut self) -> Dim {
        self.terms.retain(|_, coefficient| *coefficient != 0);
        Dim::of(self.constant, self.terms)
    }
}

impl From<Vec<(Vec<String>, i64)>> for Dim {
    fn from(terms: Vec<(Vec<String>, i64)>) -> Dim {
        let mut sum = Sum::default();
        for (mut symbols, coefficient) in terms {
            symbols.sort();
            sum.add(symbols, coefficient);
        }
        sum.into_dim()
    }
}

impl From<Dim> for Vec<(Vec<String>, i64)> {
    fn from(dim: Dim) -> Vec<(Vec<String>, i64)> {
        let constant = (dim.constant != 0).then(|| (Vec::new(), dim.constant));
        constant.into_iter().chain(dim.terms().map(|(s, c)| (s.clone(), c))).collect()
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
        if let (Some(x), Some(y)) = (self.as_constant(), other.as_constant()) {
            return Dim::constant(x.saturating_add(y));
        }
        let mut sum = Sum::from(self.constant.saturating_add(other.constant));
        for (symbols, coefficient) in self.terms().chain(other.terms()) {
            sum.add(symbols.clone(), coefficient);
        }
        sum.into_dim()
    }
}

impl Mul for &Dim {
    type Output = Dim;

    fn mul(self, other: &Dim) -> Dim {
        match (self.as_constant(), other.as_constant()) {
            (Some(x), Some(y)) => return Dim::constant(x.saturating_mul(y)),
            (Some(1), None) => return other.clone(),
            (None, Some(1)) => return self.clone(),
            (Some(_), None) | (None, Some(_) | None) => {}
        }
        let mut sum = Sum::from(self.constant.saturating_mul(other.constant));
        for (symbols, x) in self.terms().filter(|_| other.constant != 0) {
            sum.add(symbols.clone(), x.saturating_mul(other.constant));
        }
        for (symbols, y) in other.terms().filter(|_| self.constant != 0) {
            sum.add(symbols.clone(), y.saturating_mul(self.constant));
        }
        for (a, x) in self.terms() {
            for (b, y) in other.terms() {
                let mut symbols: Vec<String> = a.iter().chain(b).cloned().collect();
                symbols.sort();
                sum.add(symbols, x.saturating_mul(y));
            }
        }
        sum.into_dim()
    }
}

impl fmt::Display for Dim {
    /// Prints `2*B*S+B+3`: terms of more symbols first, the constant last.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(constant) = self.as_constant() {
            return write!(f, "{constant}");
        }
        let mut terms: Vec<_> = self.terms().collect();
        terms.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then(a.0.cmp(b.0)));
        for (at, (symbols, coefficient)) in terms.into_iter().enumerate() {
            if at > 0 && coefficient > 0 {
                f.write_str("+")?;
            }
            match coefficient {
                1 => f.write_str(&symbols.join("*"))?,
                -1 => write!(f, "-{}", symbols.join("*"))?,
                c => write!(f, "{c}*{}", symbols.join("*"))?,
            }
        }
        match self.constant {
            0 => Ok(()),
            constant => write!(f, "{constant:+}"),
        }
    }
}

/// The product of dims: the number of elements.
pub fn product<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Dim {
    dims.into_iter().fold(Dim::constant(1), |product, dim| &product * dim)
}
