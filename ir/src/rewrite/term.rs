//! Terms: what an e-node is, and the e-graph made of them.
//!
//! Attributes are part of the node: an op is interned whole, so that two terms are equal when their
//! ops print alike and their operands are equal. A call yields a tuple, whatever the number of its
//! results; a projection picks one.

use std::collections::HashMap;

use egg::{EGraph, Id, Language};

use super::facts::Facts;
use crate::infer::name;
use crate::op::{Binary, Comparison, Einsum, Op};

/// The e-graph of a function.
pub type Graph = EGraph<Term, Facts>;

/// The number of an interned op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(u32);

/// What a term is, apart from its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Head {
    /// A parameter of the function, by number.
    Param(u32),
    /// An op, under its name in texts.
    Op(&'static str, OpId),
    /// One result of a call.
    Projection(u32),
}

/// An e-node: a head and the classes of its operands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Term {
    /// What it is.
    pub head: Head,
    /// From what.
    pub operands: Vec<Id>,
}

impl Term {
    /// The interned op, if it is one.
    pub fn op(&self) -> Option<OpId> {
        if let Head::Op(_, op) = self.head { Some(op) } else { None }
    }
}

impl Language for Term {
    type Discriminant = &'static str;

    fn discriminant(&self) -> &'static str {
        match self.head {
            Head::Param(_) => "param",
            Head::Op(name, _) => name,
            Head::Projection(_) => "projection",
        }
    }

    fn matches(&self, other: &Term) -> bool {
        self.head == other.head && self.operands.len() == other.operands.len()
    }

    fn children(&self) -> &[Id] {
        &self.operands
    }

    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.operands
    }
}

/// Makes a graph whole after changes.
///
/// Egg times this, and the first reading of its clock spins for up to 200 ms to learn how fast the
/// processor counts. Nobody asks for the time: it is read off a clock that stands still.
pub(super) fn rebuild(graph: &mut Graph) {
    let (clock, _) = quanta::Clock::mock();
    quanta::with_clock(&clock, || graph.rebuild());
}

/// The ops of an e-graph, each once.
#[derive(Clone, Debug, Default)]
pub struct Ops {
    ops: Vec<Op>,
    numbers: HashMap<String, OpId>,
}

impl Ops {
    /// The number of an op. Contractions that differ in letters alone are one; the letters of the
    /// first stay.
    pub fn intern(&mut self, op: &Op) -> OpId {
        let next = OpId(self.ops.len() as u32);
        let number = *self.numbers.entry(key(op)).or_insert(next);
        if number == next {
            self.ops.push(op.clone());
        }
        number
    }

    /// The number of an op that is there.
    pub fn find(&self, op: &Op) -> Option<OpId> {
        self.numbers.get(&key(op)).copied()
    }

    /// The op of a number.
    pub fn get(&self, op: OpId) -> &Op {
        &self.ops[op.0 as usize]
    }
}

/// A text that tells ops apart; the sign of zero counts.
fn key(op: &Op) -> String {
    format!("{:?}", with_plain_letters(op))
}

/// A contraction with letters `a`, `b`, `c` in the order in which they come up; other ops as is.
pub(super) fn with_plain_letters(op: &Op) -> Op {
    let Op::Contract(einsum) = op else { return op.clone() };
    let letters = einsum.letters();
    let plain = |letter: &char| {
        let at = letters.iter().position(|l| l == letter).unwrap_or(0);
        char::from_u32('a' as u32 + at as u32).unwrap_or(*letter)
    };
    let all = |letters: &[char]| letters.iter().map(plain).collect();
    let (a, b, result) = (all(&einsum.a), all(&einsum.b), all(&einsum.result));
    Op::Contract(Einsum { a, b, result, ..einsum.clone() })
}

/// The op that yields the same bits from swapped operands, if there is one.
///
/// `max` and `min` are none: of zeros of different sign they yield the second.
pub(super) fn swapped(op: &Op) -> Option<Op> {
    if let Op::Contract(einsum) = op {
        let turned = Einsum { a: einsum.b.clone(), b: einsum.a.clone(), ..einsum.clone() };
        return Some(Op::Contract(turned));
    }
    let is_commutative =
        matches!(op, Op::Binary(Binary::Add | Binary::Mul) | Op::Compare(Comparison::Eq));
    is_commutative.then(|| op.clone())
}

/// The term of an op.
pub(super) fn op_term(graph: &mut Graph, op: &Op, operands: Vec<Id>) -> Term {
    let number = graph.analysis.ops.intern(op);
    Term { head: Head::Op(name(op), number), operands }
}

/// The class of an op and operands that is there, with the operands in either order.
pub(super) fn lookup(graph: &Graph, op: &Op, operands: &[Id]) -> Option<Id> {
    let look = |op: &Op, operands: Vec<Id>| {
        let number = graph.analysis.ops.find(op)?;
        graph.lookup(Term { head: Head::Op(name(op), number), operands })
    };
    look(op, operands.to_vec()).or_else(|| {
        let op = swapped(op)?;
        look(&op, operands.iter().rev().copied().collect())
    })
}
