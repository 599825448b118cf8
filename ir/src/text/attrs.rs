//! The attributes of ops, as `key=value` pairs that a name or a number may stand for.

use std::collections::BTreeMap;

use crate::DType;
use crate::dim::Dim;

/// What the names in a template stand for. Empty for a plain module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    /// Element types, such as `T`.
    pub(crate) dtypes: BTreeMap<String, DType>,
    /// Sizes, such as `M`.
    pub(crate) dims: BTreeMap<String, Dim>,
    /// What `..` stands for.
    pub(crate) pack: Vec<Dim>,
    /// The numbers of the instance, such as `eps`.
    pub(crate) attributes: BTreeMap<String, f64>,
    /// Whether this is a template at all: names that are not bound are errors then.
    pub(crate) template: bool,
}

/// A value on the right of `key=`, or a bare word after the op.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Attr {
    /// A number, or a name that stands for one.
    Number(f64),
    /// A word, such as `sum` or an axis.
    Word(String),
    /// A list of numbers or sizes; `..` is expanded to as many entries as the pack has.
    List(Vec<Item>),
}

/// An entry of a list.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Item {
    /// A size.
    Dim(Dim),
    /// The pack.
    Pack,
}

/// The attributes of one node.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attrs {
    /// The bare words and numbers, in order.
    pub(crate) bare: Vec<Attr>,
    /// The named ones.
    pub(crate) named: BTreeMap<String, Attr>,
}

impl Attrs {
    /// A whole number, negative ones allowed.
    pub(crate) fn integer(&self, key: &str) -> Option<i64> {
        let Attr::Number(n) = self.named.get(key)? else { return None };
        (n.fract() == 0.0 && n.abs() < 9e15).then_some(*n as i64)
    }

    /// A whole number that may be left out, as it is where an instance of a template names a number
    /// that is not whole.
    pub(crate) fn integer_or(&self, key: &str, default: i64) -> Option<i64> {
        match self.named.get(key) {
            Some(Attr::Number(_)) | None => Some(self.integer(key).unwrap_or(default)),
            Some(Attr::Word(_) | Attr::List(_)) => None,
        }
    }

    /// An attribute that is a number and not whole.
    pub(crate) fn fraction(&self) -> Option<&str> {
        let is_fraction = |key: &String| {
            matches!(self.named.get(key), Some(Attr::Number(_))) && self.integer(key).is_none()
        };
        self.named.keys().find(|key| is_fraction(key)).map(String::as_str)
    }

    /// A size.
    pub(crate) fn size(&self, key: &str) -> Option<usize> {
        usize::try_from(self.integer(key)?).ok()
    }

    /// The index of a dim of a value of `ndim` dims; negative ones count from the end.
    pub(crate) fn dim(&self, key: &str, ndim: usize) -> Option<usize> {
        resolve(self.integer(key)?, ndim)
    }

    /// A list of dim indices; a pack stands for `0..pack`.
    pub(crate) fn dims(&self, key: &str, ndim: usize, pack: usize) -> Option<Vec<usize>> {
        let Attr::List(items) = self.named.get(key)? else { return None };
        let mut dims = Vec::new();
        for item in items {
            match item {
                Item::Pack => dims.extend(0..pack),
                Item::Dim(dim) => dims.push(resolve(dim.as_constant()?, ndim)?),
            }
        }
        dims.sort_unstable();
        Some(dims)
    }

    /// A list of sizes.
    pub(crate) fn sizes(&self, key: &str) -> Option<Vec<Dim>> {
        let Attr::List(items) = self.named.get(key)? else { return None };
        items.iter().map(|i| if let Item::Dim(d) = i { Some(d.clone()) } else { None }).collect()
    }

    /// A word.
    pub(crate) fn word(&self, key: &str) -> Option<&str> {
        match self.named.get(key)? {
            Attr::Word(word) => Some(word),
            Attr::Number(_) | Attr::List(_) => None,
        }
    }
}

fn resolve(dim: i64, ndim: usize) -> Option<usize> {
    let dim = if dim < 0 { dim + ndim as i64 } else { dim };
    usize::try_from(dim).ok().filter(|d| *d <= 64)
}
