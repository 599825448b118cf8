//! Patterns: the sides of a rule as texts, found in an e-graph and built there.
//!
//! A pattern is a term in parentheses, such as `(mul ?x 1)`. `?x` stands for any class, the same
//! one wherever it occurs; `1` for a class whose elements are all that number; the first word for
//! an op of that name, or of a kind of ops: `unary`, `binary`, `compare`. On the left `#p` behind
//! it names the op that is found; on the right `#p` is an op that the rule's guard yields. On the
//! right `#p` alone is an op without operands.
//!
//! Operands of ops that are commutative to the bit match in either order.

use egg::Id;

use super::facts::Fact;
use super::term::{Graph, Head, Term, swapped};
use crate::infer::infer;
use crate::op::Op;
use crate::types::TensorType;

/// One side of a rule.
#[derive(Clone, Debug)]
pub struct Pattern {
    /// Operands before what they are operands of; the root is last.
    parts: Vec<Part>,
}

/// A part of a pattern.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Any class, under a name.
    Any(String),
    /// A class whose elements are all one number.
    Number(f64),
    /// An op over parts.
    Op {
        /// The op's name, or the kind of ops; empty where only the slot says.
        name: String,
        /// The name of the op that is found or yielded.
        slot: Option<String>,
        /// The parts under it.
        operands: Vec<usize>,
    },
}

/// What a left side has found: what its names stand for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// The classes, by name.
    pub classes: Vec<(String, Id)>,
    /// The ops, by slot.
    pub ops: Vec<(String, Op)>,
    /// The terms, the root's last.
    pub terms: Vec<Term>,
}

impl Pattern {
    /// Reads a pattern.
    ///
    /// # Panics
    /// When it is not one: rules are part of the program, and a test reads them all.
    pub fn parse(text: &str) -> Pattern {
        let spaced = text.replace('(', " ( ").replace(')', " ) ");
        let mut words = spaced.split_whitespace();
        let mut parts = Vec::new();
        let root = parse(&mut words, &mut parts);
        assert!(root.is_some() && words.next().is_none(), "`{text}` is no pattern");
        Pattern { parts }
    }

    /// The parts; operands before what they are operands of, the root last.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Everything that the pattern finds in a class, at most `limit` of them.
    pub fn search(&self, graph: &Graph, class: Id, limit: usize) -> Vec<Found> {
        let mut all = Vec::new();
        let agenda = vec![(self.parts.len() - 1, graph.find(class))];
        self.extend(graph, agenda, Found::default(), &mut all, limit);
        all
    }

    /// The names of ops that the root may be; all of them where it is a kind.
    pub fn root_names(&self) -> Vec<&str> {
        match &self.parts[self.parts.len() - 1] {
            Part::Op { name, .. } => names_of(name),
            Part::Any(_) | Part::Number(_) => Vec::new(),
        }
    }

    fn extend(
        &self,
        graph: &Graph,
        mut agenda: Vec<(usize, Id)>,
        mut found: Found,
        all: &mut Vec<Found>,
        limit: usize,
    ) {
        let Some((part, class)) = agenda.pop() else {
            found.terms.reverse();
            all.push(found);
            return;
        };
        match &self.parts[part] {
            Part::Any(name) => {
                match found.classes.iter().find(|(known, _)| known == name) {
                    Some((_, there)) if *there != class => return,
                    Some(_) => {}
                    None => found.classes.push((name.clone(), class)),
                }
                self.extend(graph, agenda, found, all, limit);
            }
            Part::Number(number) => {
                let constant = graph[class].data.constant;
                if constant.is_some_and(|c| c.to_bits() == number.to_bits()) {
                    self.extend(graph, agenda, found, all, limit);
                }
            }
            Part::Op { name, slot, operands } => {
                for term in &graph[class].nodes {
                    let Head::Op(found_name, op) = term.head else { continue };
                    if !is_one_of(found_name, name) || term.operands.len() != operands.len() {
                        continue;
                    }
                    let op = graph.analysis.ops.get(op);
                    let turned = swapped(op).filter(|_| operands.len() == 2);
                    let straight = (op.clone(), term.operands.clone());
                    let turned =
                        turned.map(|op| (op, term.operands.iter().rev().copied().collect()));
                    for (op, under) in [Some(straight), turned].into_iter().flatten() {
                        if all.len() >= limit {
                            return;
                        }
                        let mut found = found.clone();
                        found.terms.push(term.clone());
                        if let Some(slot) = slot {
                            found.ops.push((slot.clone(), op));
                        }
                        let mut agenda = agenda.clone();
                        let pairs = operands.iter().copied().zip(under);
                        agenda.extend(pairs.map(|(part, id)| (part, graph.find(id))));
                        self.extend(graph, agenda, found, all, limit);
                    }
                }
            }
        }
    }

    /// Adds the pattern's terms for what a left side has found, and the ops that a guard yields.
    /// Returns the root's class and the terms; none when an op does not take its operands.
    pub fn build(
        &self,
        graph: &mut Graph,
        found: &Found,
        ops: &[(&'static str, Op)],
    ) -> Option<(Id, Vec<Term>)> {
        let mut classes: Vec<Id> = Vec::new();
        let mut terms = Vec::new();
        for part in &self.parts {
            let class = match part {
                Part::Any(name) => found.classes.iter().find(|(known, _)| known == name)?.1,
                Part::Number(_) => return None,
                Part::Op { name, slot, operands } => {
                    let yielded = |slot: &String| {
                        let given = ops.iter().find(|(known, _)| known == slot);
                        let there = found.ops.iter().find(|(known, _)| known == slot);
                        given.map(|(_, op)| op).or(there.map(|(_, op)| op)).cloned()
                    };
                    let op = match slot {
                        Some(slot) => yielded(slot)?,
                        None => plain_op(name)?,
                    };
                    let operands = operands.iter().map(|at| classes[*at]).collect();
                    let (class, term) = add(graph, &op, operands)?;
                    terms.push(term);
                    class
                }
            };
            classes.push(class);
        }
        Some((*classes.last()?, terms))
    }
}

/// Adds the term of an op, or finds it with its operands in either order. None when the op does not
/// take the operands.
pub fn add(graph: &mut Graph, op: &Op, operands: Vec<Id>) -> Option<(Id, Term)> {
    let types: Vec<&TensorType> = operands.iter().map(|id| graph[*id].data.ty()).collect();
    if operands.iter().any(|id| graph[*id].data.is_tuple) {
        return None;
    }
    infer(op, &types, &graph.analysis.module).ok()?;
    if let Some(turned) = swapped(op) {
        let turned_operands = operands.iter().rev().copied().collect();
        let term = super::term::op_term(graph, &turned, turned_operands);
        if let Some(there) = graph.lookup(term.clone()) {
            return Some((there, term));
        }
    }
    let term = super::term::op_term(graph, op, operands);
    Some((graph.add(term.clone()), term))
}

/// What a guard sees: what the left side has found.
pub struct Site<'g> {
    /// The e-graph.
    pub graph: &'g Graph,
    /// What the names stand for.
    pub found: &'g Found,
    /// The class of the left side's root.
    pub root: Id,
}

impl Site<'_> {
    /// What is known of a class.
    ///
    /// # Panics
    /// When the left side has no such name, which is a defect of the rule.
    pub fn fact(&self, name: &str) -> &Fact {
        match self.found.classes.iter().find(|(known, _)| known == name) {
            Some((_, class)) => &self.graph[*class].data,
            None => panic!("a guard asks for `?{name}`, which the left side has not"),
        }
    }

    /// The type of a class.
    pub fn ty(&self, name: &str) -> &TensorType {
        self.fact(name).ty()
    }

    /// The type of what the left side computes.
    pub fn root_type(&self) -> &TensorType {
        self.graph[self.root].data.ty()
    }

    /// The ops that compute a class.
    pub fn ops_of(&self, name: &str) -> impl Iterator<Item = &Op> {
        let class = self.found.classes.iter().find(|(known, _)| known == name);
        let terms = class.map_or(&[][..], |(_, class)| &self.graph[*class].nodes);
        terms.iter().filter_map(|term| Some(self.graph.analysis.ops.get(term.op()?)))
    }

    /// The op in a slot.
    ///
    /// # Panics
    /// As [`Site::fact`].
    pub fn op(&self, slot: &str) -> &Op {
        match self.found.ops.iter().find(|(known, _)| known == slot) {
            Some((_, op)) => op,
            None => panic!("a guard asks for `#{slot}`, which the left side has not"),
        }
    }
}

fn parse<'t>(words: &mut impl Iterator<Item = &'t str>, parts: &mut Vec<Part>) -> Option<usize> {
    let word = words.next()?;
    parse_from(word, words, parts)
}

fn parse_from<'t>(
    word: &str,
    words: &mut impl Iterator<Item = &'t str>,
    parts: &mut Vec<Part>,
) -> Option<usize> {
    let part = if word == "(" {
        let head = words.next()?;
        let (name, slot) = match head.split_once('#') {
            Some((name, slot)) => (name, Some(slot.to_owned())),
            None => (head, None),
        };
        let mut operands = Vec::new();
        loop {
            let word = words.next()?;
            if word == ")" {
                break;
            }
            operands.push(parse_from(word, words, parts)?);
        }
        Part::Op { name: name.to_owned(), slot, operands }
    } else if let Some(name) = word.strip_prefix('?') {
        Part::Any(name.to_owned())
    } else if let Some(slot) = word.strip_prefix('#') {
        Part::Op { name: String::new(), slot: Some(slot.to_owned()), operands: Vec::new() }
    } else {
        Part::Number(word.parse().ok()?)
    };
    parts.push(part);
    Some(parts.len() - 1)
}

/// The names of the ops of a kind; the name itself where it is none.
pub(super) fn names_of(name: &str) -> Vec<&str> {
    use crate::op::{Binary, Comparison, Unary};
    match name {
        "unary" => Unary::ALL.iter().map(|op| op.name()).collect(),
        "binary" => Binary::ALL.iter().map(|op| op.name()).collect(),
        "compare" => Comparison::ALL.iter().map(|op| op.name()).collect(),
        _ => vec![name],
    }
}

fn is_one_of(found: &str, name: &str) -> bool {
    found == name || names_of(name).contains(&found)
}

/// The op of a name that needs no attributes.
fn plain_op(name: &str) -> Option<Op> {
    use crate::op::{Binary, Comparison, Unary};
    let unary = Unary::ALL.into_iter().find(|op| op.name() == name).map(Op::Unary);
    let binary = || Binary::ALL.into_iter().find(|op| op.name() == name).map(Op::Binary);
    let compare = || Comparison::ALL.into_iter().find(|op| op.name() == name).map(Op::Compare);
    let select = || (name == "select").then_some(Op::Select);
    unary.or_else(binary).or_else(compare).or_else(select)
}
