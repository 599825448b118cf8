//! Arithmetic as sums of products, so that the order and form in which it is written do not matter.
//!
//! `0.5 x (1 + erf(x / √2))` and `x / 2 + x erf(0.7071068 x) 0.5` are one polynomial of `x` and
//! `erf(…)`. Atoms are elements that are not expanded further; exponents count halves, so that a
//! division by a square root and a product with its reciprocal are one.

use std::collections::BTreeMap;

use super::element::{Element, Graph};
use crate::DType;
use crate::op::{Binary, Op, Unary};

/// Products in an expansion at most; longer ones stay atoms.
const PRODUCTS_MAX: usize = 12;

/// Elements that are expanded; further ones stay atoms.
const ELEMENTS_MAX: usize = 60;

/// Atoms with exponents in halves, ascending, none zero.
pub(super) type Product = Vec<(usize, i32)>;

/// Products of atoms with their coefficients.
pub(super) type Polynomial = BTreeMap<Product, f64>;

/// How far constants may be off: what an exporter rounds to the type, several times over.
pub(super) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 5e-7,
        DType::BF16 | DType::F16 => 2e-3,
        DType::F8E4M3
        | DType::F8E5M2
        | DType::I8
        | DType::I32
        | DType::I64
        | DType::U32
        | DType::Bool => 0.0,
    }
}

/// Whether a constant is a number, as far as its type tells.
pub(super) fn is_near(found: f64, wanted: f64, dtype: DType) -> bool {
    (found - wanted).abs() <= tolerance(dtype) * wanted.abs()
}

/// An expansion: a table of atoms.
pub(super) struct Expansion<'g> {
    graph: &'g Graph<'g>,
    /// The atoms; the first ones are never expanded.
    pub(super) atoms: Vec<Element>,
    stops: usize,
    /// Only elements that depend on one of these variables are expanded.
    rows: Option<Vec<usize>>,
    /// How many more elements are expanded.
    left: usize,
}

impl<'g> Expansion<'g> {
    /// An expansion in which some elements are atoms.
    pub(super) fn new(graph: &'g Graph<'g>, stops: &[&Element]) -> Expansion<'g> {
        let atoms: Vec<Element> = stops.iter().map(|stop| graph.peel(stop)).collect();
        Expansion { graph, stops: atoms.len(), atoms, rows: None, left: ELEMENTS_MAX }
    }

    /// The same, in which elements that do not depend on any of the variables are atoms.
    pub(super) fn along(mut self, rows: Vec<usize>) -> Expansion<'g> {
        self.rows = Some(rows);
        self
    }

    fn atom(&mut self, of: &Element, exponent: i32) -> Polynomial {
        let there = self.atoms.iter().position(|atom| self.graph.same(atom, of));
        let at = there.unwrap_or_else(|| {
            self.atoms.push(of.clone());
            self.atoms.len() - 1
        });
        BTreeMap::from([(vec![(at, exponent)], 1.0)])
    }

    /// The polynomial of an element.
    pub(super) fn of(&mut self, of: &Element) -> Polynomial {
        let of = self.graph.peel(of);
        if let Some(value) = self.graph.constant(&of) {
            return BTreeMap::from([(Product::new(), value)]);
        }
        let is_stop = (0..self.stops).any(|at| self.graph.same(&self.atoms[at], &of));
        let is_closed =
            self.rows.as_ref().is_some_and(|rows| !rows.iter().any(|row| of.mentions(*row)));
        if self.left == 0 || is_stop || is_closed {
            return self.atom(&of, 2);
        }
        self.left -= 1;
        let under = self.graph.operands(&of);
        let made = match (self.graph.op(&of), &under[..]) {
            (Some(Op::Unary(Unary::Neg)), [x]) => Some(scaled(self.of(x), -1.0)),
            (Some(Op::Unary(Unary::Sqrt)), [x]) => Some(self.atom(x, 1)),
            (Some(Op::Unary(Unary::Rsqrt)), [x]) => Some(self.atom(x, -1)),
            (Some(Op::Binary(how)), [x, y]) => self.binary(*how, x, y),
            _ => None,
        };
        made.unwrap_or_else(|| self.atom(&of, 2))
    }

    fn binary(&mut self, how: Binary, x: &Element, y: &Element) -> Option<Polynomial> {
        match how {
            Binary::Add => sum(self.of(x), self.of(y)),
            Binary::Sub => sum(self.of(x), scaled(self.of(y), -1.0)),
            Binary::Mul => times(&self.of(x), &self.of(y)),
            Binary::Div => {
                let divisor = self.of(y);
                let inverse = match inverse(&divisor) {
                    Some(inverse) => inverse,
                    None => self.atom(y, -2),
                };
                times(&self.of(x), &inverse)
            }
            Binary::Pow => match self.graph.constant(y)? {
                2.0 => {
                    let x = self.of(x);
                    times(&x, &x)
                }
                3.0 => {
                    let x = self.of(x);
                    times(&times(&x, &x)?, &x)
                }
                0.5 => Some(self.atom(x, 1)),
                -0.5 => Some(self.atom(x, -1)),
                _ => None,
            },
            Binary::Max | Binary::Min => None,
        }
    }
}

fn scaled(mut of: Polynomial, by: f64) -> Polynomial {
    of.values_mut().for_each(|coefficient| *coefficient *= by);
    of
}

fn sum(mut a: Polynomial, b: Polynomial) -> Option<Polynomial> {
    for (product, coefficient) in b {
        *a.entry(product).or_insert(0.0) += coefficient;
    }
    a.retain(|_, coefficient| *coefficient != 0.0);
    (a.len() <= PRODUCTS_MAX).then_some(a)
}

fn times(a: &Polynomial, b: &Polynomial) -> Option<Polynomial> {
    let mut all = Polynomial::new();
    for (x, c) in a {
        for (y, d) in b {
            let mut exponents: BTreeMap<usize, i32> = x.iter().copied().collect();
            for (atom, exponent) in y {
                *exponents.entry(*atom).or_insert(0) += exponent;
            }
            let product = exponents.into_iter().filter(|(_, exponent)| *exponent != 0).collect();
            all = sum(all, BTreeMap::from([(product, c * d)]))?;
        }
    }
    Some(all)
}

/// One over a single product.
fn inverse(of: &Polynomial) -> Option<Polynomial> {
    let mut products = of.iter();
    let (product, coefficient) = products.next().filter(|_| of.len() == 1)?;
    let product = product.iter().map(|(atom, exponent)| (*atom, -exponent)).collect();
    Some(BTreeMap::from([(product, 1.0 / coefficient)]))
}

/// Whether a polynomial has these products and coefficients, and no others.
pub(super) fn is_polynomial(
    found: &Polynomial,
    wanted: &[(&[(usize, i32)], f64)],
    dtype: DType,
) -> bool {
    found.len() == wanted.len()
        && wanted.iter().all(|(product, coefficient)| {
            found.get(*product).is_some_and(|found| is_near(*found, *coefficient, dtype))
        })
}
