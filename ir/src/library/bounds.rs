//! What a composite asks of its attributes, as the header of its template states it.
//!
//! Every attribute is finite. Beyond that, each line of a header is about the attributes in it:
//!
//! | line | meaning |
//! |---|---|
//! | `whole group salt` | each is a whole number |
//! | `either sign -1 1` | it is one of these numbers |
//! | `bound 0 <= p < 1` | the sums are in this order |
//!
//! A sum is one of products of numbers, attributes and sizes of operands, with spaces around `+`,
//! `-` and `*`. A size that is not fixed yet leaves its comparison open until it is.
//!
//! Sums are computed in binary64. Attributes that index something are below 2^32 by a bound of
//! their own and sizes below 2^50, so what is rounded is far from what it is compared with.

use crate::module::Attributes;

/// A line of a template's header.
#[derive(Clone, Debug, PartialEq)]
pub enum Bound {
    /// An attribute is a whole number.
    Whole(String),
    /// An attribute is one of these numbers.
    Either {
        /// The attribute.
        attribute: String,
        /// The numbers.
        values: Vec<f64>,
    },
    /// Sums are in ascending order.
    Order {
        /// As the template has it.
        text: String,
        /// The sums.
        sums: Vec<Sum>,
        /// For each sum but the last, whether the next one is larger and not only as large.
        is_strict: Vec<bool>,
    },
}

/// A sum of products.
pub type Sum = Vec<Term>;

/// A product of numbers and of what names stand for.
#[derive(Clone, Debug, PartialEq)]
pub struct Term {
    /// The product of its numbers, with the sign of the term.
    pub number: f64,
    /// Attributes and sizes.
    pub names: Vec<String>,
}

/// A bound that attributes do not keep to.
#[derive(Clone, Debug, PartialEq)]
pub struct Breach {
    /// The first attribute that the bound is about.
    pub attribute: String,
    /// Its value.
    pub value: f64,
    /// The bound: `a whole number`, `0 <= p < 1`.
    pub wanted: String,
    /// The values of all other names in the bound.
    pub with: Vec<(String, f64)>,
}

impl Bound {
    /// Reads a line of a header; more than one bound where it lists several attributes.
    pub(super) fn read(keyword: &str, rest: &str) -> Option<Vec<Bound>> {
        let words: Vec<&str> = rest.split(' ').collect();
        match keyword {
            "whole" => Some(words.into_iter().map(|word| Bound::Whole(word.to_owned())).collect()),
            "either" => {
                let (attribute, values) = words.split_first()?;
                let values = values.iter().map(|value| value.parse().ok());
                let attribute = (*attribute).to_owned();
                Some(vec![Bound::Either { attribute, values: values.collect::<Option<_>>()? }])
            }
            "bound" => Some(vec![read_order(rest, &words)?]),
            _ => None,
        }
    }

    /// The names in it, each once, in order.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        match self {
            Bound::Whole(attribute) | Bound::Either { attribute, .. } => names.push(attribute),
            Bound::Order { sums, .. } => {
                for name in sums.iter().flatten().flat_map(|term| &term.names) {
                    if !names.contains(&name.as_str()) {
                        names.push(name);
                    }
                }
            }
        }
        names
    }

    /// How attributes break it, where `size` tells the sizes that are fixed.
    pub(super) fn breach(
        &self,
        attributes: &Attributes,
        size: impl Fn(&str) -> Option<f64>,
    ) -> Option<Breach> {
        let value = |name: &str| attributes.get(name).copied().or_else(|| size(name));
        let (is_kept, wanted) = match self {
            Bound::Whole(name) => (value(name)?.fract() == 0.0, "a whole number".to_owned()),
            Bound::Either { attribute, values } => {
                let list: Vec<String> = values.iter().map(f64::to_string).collect();
                (values.contains(&value(attribute)?), list.join(" or "))
            }
            Bound::Order { text, sums, is_strict } => {
                let totals: Vec<Option<f64>> = sums.iter().map(|sum| total(sum, value)).collect();
                let pairs = totals.windows(2).zip(is_strict);
                let is_kept = pairs.into_iter().all(|(pair, is_strict)| match pair {
                    [Some(a), Some(b)] => {
                        if *is_strict {
                            a < b
                        } else {
                            a <= b
                        }
                    }
                    _ => true,
                });
                (is_kept, text.clone())
            }
        };
        if is_kept {
            return None;
        }
        let names = self.names();
        let attribute = *names.iter().find(|name| attributes.contains_key(**name))?;
        let others = names.iter().filter(|name| **name != attribute);
        let with = others.filter_map(|name| Some(((*name).to_owned(), value(name)?)));
        Some(Breach {
            attribute: attribute.to_owned(),
            value: attributes[attribute],
            wanted,
            with: with.collect(),
        })
    }
}

/// The breach of what is asked of every attribute.
pub(super) fn infinite(attributes: &Attributes) -> Option<Breach> {
    let (attribute, value) = attributes.iter().find(|(_, value)| !value.is_finite())?;
    let (attribute, wanted) = (attribute.clone(), "a finite number".to_owned());
    Some(Breach { attribute, value: *value, wanted, with: Vec::new() })
}

fn total(sum: &Sum, value: impl Fn(&str) -> Option<f64>) -> Option<f64> {
    sum.iter().try_fold(0.0, |total, term| {
        let product = term.names.iter().try_fold(term.number, |p, name| Some(p * value(name)?));
        Some(total + product?)
    })
}

fn read_order(text: &str, words: &[&str]) -> Option<Bound> {
    let is_sign = |word: &&str| matches!(*word, "<" | "<=");
    let is_strict: Vec<bool> =
        words.iter().copied().filter(|word| is_sign(word)).map(|word| word == "<").collect();
    let sums: Option<Vec<Sum>> = words.split(is_sign).map(read_sum).collect();
    let order = Bound::Order { text: text.to_owned(), sums: sums?, is_strict };
    (!order.names().is_empty()).then_some(order)
}

/// Reads `2 * a + b - 1`.
fn read_sum(words: &[&str]) -> Option<Sum> {
    if matches!(words.last(), Some(&"+" | &"-")) {
        return None;
    }
    let mut sum = Vec::new();
    let mut sign = 1.0;
    for product in words.split_inclusive(|word| matches!(*word, "+" | "-")) {
        let (factors, next) = match product.split_last()? {
            (&"+", factors) => (factors, 1.0),
            (&"-", factors) => (factors, -1.0),
            _ => (product, 1.0),
        };
        let mut term = Term { number: sign, names: Vec::new() };
        for factor in factors.split(|word| *word == "*") {
            let [factor] = factor else { return None };
            match factor.parse::<f64>() {
                Ok(number) => term.number *= number,
                Err(_) if factor.starts_with(|c: char| c.is_ascii_alphabetic()) => {
                    term.names.push((*factor).to_owned());
                }
                Err(_) => return None,
            }
        }
        sum.push(term);
        sign = next;
    }
    (!sum.is_empty()).then_some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(line: &str, attributes: &[(&str, f64)], sizes: &[(&str, f64)]) -> Vec<String> {
        let (keyword, rest) = line.split_once(' ').unwrap();
        let attributes = attributes.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect();
        let size = |name: &str| sizes.iter().find(|(n, _)| *n == name).map(|(_, size)| *size);
        let bounds = Bound::read(keyword, rest).unwrap();
        bounds
            .iter()
            .filter_map(|bound| bound.breach(&attributes, size))
            .map(|b| format!("{} is {}, not {} {:?}", b.attribute, b.value, b.wanted, b.with))
            .collect()
    }

    #[test]
    fn bounds_hold_at_their_ends_and_nowhere_beyond() {
        let p = |value: f64| broken("bound 0 <= p < 1", &[("p", value)], &[]).len();
        assert_eq!([-0.1, 0.0, 0.5, 1.0, f64::NAN].map(p), [1, 0, 0, 1, 1]);
        let whole = |value: f64| broken("whole n", &[("n", value)], &[]).len();
        assert_eq!([-3.0, 0.5, 7.0, f64::NAN].map(whole), [0, 1, 0, 1]);
        let sign = |value: f64| broken("either sign -1 1", &[("sign", value)], &[]).len();
        assert_eq!([-1.0, 1.0, 0.0, 2.0].map(sign), [0, 0, 1, 1]);
        let line = "bound head + H <= group * kv + group * G";
        let served = |head: f64, kv: f64| {
            broken(line, &[("head", head), ("kv", kv), ("group", 2.0)], &[("H", 4.0), ("G", 3.0)])
        };
        assert_eq!(served(2.0, 0.0), [""; 0]);
        assert_eq!(
            served(3.0, 0.0),
            ["head is 3, not head + H <= group * kv + group * G \
              [(\"H\", 4.0), (\"group\", 2.0), (\"kv\", 0.0), (\"G\", 3.0)]"]
        );
        assert_eq!(served(4.0, 1.0), [""; 0]);
        // A size that is not known yet breaks nothing.
        assert_eq!(broken(line, &[("head", 9.0), ("kv", 0.0), ("group", 1.0)], &[]), [""; 0]);
        assert_eq!(broken("bound q < 8 - 3 * S", &[("q", 1.0)], &[("S", 2.0)]), [""; 0]);
        assert_eq!(broken("bound q < 8 - 3 * S", &[("q", 2.0)], &[("S", 2.0)]).len(), 1);
    }

    #[test]
    fn lines_that_are_no_bounds_are_not_read() {
        for (keyword, rest) in [
            ("bound", "0 <= "),
            ("bound", "1 < 2"),
            ("bound", "a b <= 2"),
            ("bound", "a + <= 2"),
            ("either", "sign one"),
            ("under", "p"),
        ] {
            assert_eq!(Bound::read(keyword, rest), None, "{keyword} {rest}");
        }
    }
}
