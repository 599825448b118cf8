//! Matching: a pattern's values bound to those of a function, backwards from a result.

use std::cell::Cell;

use super::skeleton::{Skeleton, numbers};
use crate::infer::name;
use crate::module::{Function, Node, ValueId};
use crate::op::{Einsum, Op};

/// The most pairs that one search looks at: chosen, a thousand times what the largest template of
/// the library takes when nothing is tried in vain.
const STEPS_MAX: usize = 50_000;

/// For each value of the pattern, what it is bound to.
type Bound = Vec<Option<ValueId>>;

/// A pattern and the function in which it is looked for.
pub(super) struct Matching<'p> {
    pattern: &'p Function,
    /// The numbers of the nodes that have to agree; none when ops have to be equal.
    fixed: Option<&'p [Vec<bool>]>,
    pattern_producers: Vec<Option<usize>>,
    function: &'p Function,
    producers: Vec<Option<usize>>,
    steps: Cell<usize>,
}

impl<'p> Matching<'p> {
    /// Matches up to sizes and attributes.
    pub(super) fn outline(skeleton: &'p Skeleton, function: &'p Function) -> Matching<'p> {
        Matching::new(&skeleton.function, Some(&skeleton.fixed), function)
    }

    /// Matches what is equal.
    pub(super) fn exact(instance: &'p Function, function: &'p Function) -> Matching<'p> {
        Matching::new(instance, None, function)
    }

    fn new(
        pattern: &'p Function,
        fixed: Option<&'p [Vec<bool>]>,
        function: &'p Function,
    ) -> Matching<'p> {
        let (pattern_producers, producers) = (pattern.producers(), function.producers());
        let steps = Cell::new(0);
        Matching { pattern, fixed, pattern_producers, function, producers, steps }
    }

    /// Offers all ways to bind the pairs and what they depend on, until one is accepted.
    pub(super) fn solve(
        &self,
        pairs: Vec<(ValueId, ValueId)>,
        accept: &mut dyn FnMut(&[Option<ValueId>]) -> bool,
    ) -> bool {
        let mut bound = vec![None; self.pattern.values.len()];
        self.search(pairs, &mut bound, accept)
    }

    fn search(
        &self,
        mut pairs: Vec<(ValueId, ValueId)>,
        bound: &mut Bound,
        accept: &mut dyn FnMut(&[Option<ValueId>]) -> bool,
    ) -> bool {
        let Some((inner, outer)) = pairs.pop() else { return accept(bound) };
        self.steps.set(self.steps.get() + 1);
        if self.steps.get() > STEPS_MAX {
            return false;
        }
        if let Some(there) = bound[inner.index()] {
            return self.is_same(there, outer) && self.search(pairs, bound, accept);
        }
        let Some(wanted) = self.pattern_producers[inner.index()] else {
            bound[inner.index()] = Some(outer);
            let found = self.search(pairs, bound, accept);
            bound[inner.index()] = None;
            return found;
        };
        let Some(node) = self.producers[outer.index()] else { return false };
        bound[inner.index()] = Some(outer);
        let found = forms(&self.function.nodes[node]).into_iter().any(|(op, operands)| {
            self.fits(wanted, &op, operands.len()) && {
                let inner = self.pattern.nodes[wanted].operands.iter().copied();
                let more = inner.zip(operands);
                self.search(pairs.iter().copied().chain(more).collect(), bound, accept)
            }
        });
        bound[inner.index()] = None;
        found
    }

    /// Whether two values are one, or equal constants.
    fn is_same(&self, a: ValueId, b: ValueId) -> bool {
        let made = |id: ValueId| self.producers[id.index()].map(|at| &self.function.nodes[at]);
        let equal = |a: &Node, b: &Node| {
            a.operands.is_empty() && b.operands.is_empty() && is_equal(&a.op, &b.op)
        };
        a == b || made(a).zip(made(b)).is_some_and(|(a, b)| equal(a, b))
    }

    fn fits(&self, wanted: usize, op: &Op, operands: usize) -> bool {
        let pattern = &self.pattern.nodes[wanted];
        let wanted_op = with_plain_letters(&pattern.op);
        if pattern.operands.len() != operands {
            return false;
        }
        let Some(fixed) = self.fixed else { return is_equal(&wanted_op, op) };
        let pairs = numbers(&wanted_op).into_iter().zip(numbers(op));
        let mut agree = pairs.zip(&fixed[wanted]);
        is_alike(&wanted_op, op)
            && agree.all(|((a, b), fixed)| !fixed || a.to_bits() == b.to_bits())
    }

    /// Binds the values of the pattern that no result bound so far depends on, as far as the
    /// function has them.
    pub(super) fn extend(&self, bound: &[Option<ValueId>]) -> Bound {
        let mut bound = bound.to_vec();
        for (wanted, node) in self.pattern.nodes.iter().enumerate() {
            if bound[node.result().index()].is_some() {
                continue;
            }
            let operands: Option<Vec<ValueId>> =
                node.operands.iter().map(|o| bound[o.index()]).collect();
            let Some(operands) = operands else { continue };
            let twin = self.function.nodes.iter().find(|node| {
                forms(node).iter().any(|(op, there)| {
                    let mut pairs = there.iter().zip(&operands);
                    self.fits(wanted, op, there.len()) && pairs.all(|(a, b)| self.is_same(*a, *b))
                })
            });
            bound[node.result().index()] = twin.map(Node::result);
        }
        bound
    }

    /// Whether values inside are not used outside, but tables.
    pub(super) fn is_closed(&self, bound: &[Option<ValueId>]) -> bool {
        let tables = self.tables();
        let mut inside = vec![false; self.function.nodes.len()];
        let mut hidden = vec![false; self.function.values.len()];
        for node in &self.pattern.nodes {
            let inner = node.result();
            let Some(outer) = bound[inner.index()] else { continue };
            if let Some(at) = self.producers[outer.index()] {
                inside[at] = true;
            }
            hidden[outer.index()] =
                !tables[inner.index()] && !self.pattern.results.contains(&inner);
        }
        let read = |ids: &[ValueId]| ids.iter().any(|id| hidden[id.index()]);
        let outside = self.function.nodes.iter().zip(&inside).filter(|(_, inside)| !**inside);
        !read(&self.function.results) && !outside.into_iter().any(|(node, _)| read(&node.operands))
    }

    /// The values of the pattern that only depend on constants and integer scalars: other places
    /// may use what equals them.
    fn tables(&self) -> Vec<bool> {
        let mut tables = vec![false; self.pattern.values.len()];
        for param in self.pattern.params() {
            let ty = self.pattern.ty(param);
            tables[param.index()] = !ty.dtype.is_float() && ty.ndim() == 0;
        }
        for node in &self.pattern.nodes {
            let table = node.operands.iter().all(|o| tables[o.index()]);
            tables[node.result().index()] = table;
        }
        tables
    }
}

/// Whether a node may be one of the op up to sizes and attributes, in any of its forms.
pub(super) fn matches_both_ways(op: &Op, node: &Node) -> bool {
    let op = with_plain_letters(op);
    forms(node).iter().any(|(form, _)| is_alike(&op, form))
}

/// The ways to write a node: operands of a commutative op both ways, products with plain letters.
fn forms(node: &Node) -> Vec<(Op, Vec<ValueId>)> {
    let plain = (with_plain_letters(&node.op), node.operands.clone());
    let swapped = |op: Op| {
        let operands = node.operands.iter().rev().copied().collect();
        vec![plain.clone(), (op, operands)]
    };
    if let Op::Contract(einsum) = &node.op {
        let Einsum { a, b, result } = einsum.clone();
        return swapped(with_plain_letters(&Op::Contract(Einsum { a: b, b: a, result })));
    }
    if node.op.is_commutative() { swapped(node.op.clone()) } else { vec![plain] }
}

/// A product with the letters `a`, `b`, `c` in the order in which they come up; other ops as is.
fn with_plain_letters(op: &Op) -> Op {
    let Op::Contract(einsum) = op else { return op.clone() };
    let letters = einsum.letters();
    let plain = |letter: &char| {
        let at = letters.iter().position(|l| l == letter).unwrap_or(0);
        char::from_u32('a' as u32 + at as u32).unwrap_or(*letter)
    };
    let all = |letters: &[char]| letters.iter().map(plain).collect();
    Op::Contract(Einsum { a: all(&einsum.a), b: all(&einsum.b), result: all(&einsum.result) })
}

/// Equality, by which zeros of different sign differ.
fn is_equal(a: &Op, b: &Op) -> bool {
    match (a, b) {
        (Op::Constant { value: x, .. }, Op::Constant { value: y, .. }) => {
            x.to_bits() == y.to_bits() && a == b
        }
        _ => a == b,
    }
}

/// Equality up to what sizes and attributes decide.
fn is_alike(a: &Op, b: &Op) -> bool {
    match (a, b) {
        (Op::Contract(a), Op::Contract(b)) => a == b,
        (Op::Reduce { combiner: a, .. }, Op::Reduce { combiner: b, .. }) => a == b,
        _ => name(a) == name(b),
    }
}
