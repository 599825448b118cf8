//! Elements of values at an index, followed backwards through views.
//!
//! An index of a dim is a list of [`Digit`]s of loop variables, the most significant first, so that
//! a reshape regroups digits, a transpose moves them and a broadcast drops some: what a chain of
//! views between two ops does to an element is one index, however an exporter wrote the chain. That
//! key heads are shared by groups of query heads is a digit that is missing.
//!
//! Legend: an element `x[i, j]` is a value and an index for each of its dims.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::dim::{Bindings, Dim};
use crate::eval::eval_op;
use crate::infer::name;
use crate::module::{Function, Module, Node, ValueId};
use crate::op::{Binary, Op, Unary};
use crate::tensor::Tensor;

/// Pairs of elements that one comparison looks at: chosen, several times what any idiom takes.
const PAIRS_MAX: usize = 200;

/// Elements of a constant that is evaluated at most: the mask of 4096 tokens.
const KNOWN_MAX: usize = 1 << 24;

/// `(variable / stride) % size`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Digit {
    /// The number of the variable.
    pub(super) variable: usize,
    /// What one step of the digit is in the variable.
    pub(super) stride: Dim,
    /// How many numbers the digit has.
    pub(super) size: Dim,
}

/// An index of one dim: digits, the most significant first; none for zero.
pub(super) type Index = Vec<Digit>;

/// An element of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Element {
    /// The value.
    pub(super) value: ValueId,
    /// The index of each dim.
    pub(super) index: Vec<Index>,
}

impl Element {
    /// All digits, in order.
    pub(super) fn digits(&self) -> impl Iterator<Item = &Digit> {
        self.index.iter().flatten()
    }

    /// Whether the element depends on a variable.
    pub(super) fn mentions(&self, variable: usize) -> bool {
        self.digits().any(|digit| digit.variable == variable)
    }
}

/// How many times `b` is in `a`, where that is certain.
pub(super) fn quotient(a: &Dim, b: &Dim) -> Option<Dim> {
    match b.as_constant() {
        Some(0) => None,
        Some(constant) => a.divide(constant),
        None if a == b => Some(Dim::constant(1)),
        None => a.ratio(b).map(Dim::constant),
    }
}

/// Whether a size is one.
pub(super) fn is_one(size: &Dim) -> bool {
    size.as_constant() == Some(1)
}

/// Puts a digit before others, joined with the first where the two are one digit.
fn prepend(digit: Digit, to: &mut Index) {
    if let Some(first) = to.first_mut()
        && first.variable == digit.variable
        && digit.stride == &first.stride * &first.size
    {
        first.size = &first.size * &digit.size;
    } else {
        to.insert(0, digit);
    }
}

/// Digits in a row as indices of dims of the given sizes; none where a digit would be torn.
pub(super) fn regrouped(digits: Vec<Digit>, dims: &[Dim]) -> Option<Vec<Index>> {
    let mut row = Index::new();
    digits.into_iter().rev().for_each(|digit| prepend(digit, &mut row));
    let mut groups = Vec::new();
    for size in dims.iter().rev() {
        let (mut left, mut group) = (size.clone(), Index::new());
        while !is_one(&left) {
            let last = row.pop()?;
            if let Some(rest) = quotient(&left, &last.size) {
                left = rest;
                prepend(last, &mut group);
            } else {
                let rest = quotient(&last.size, &left)?;
                let stride = &last.stride * &left;
                row.push(Digit { variable: last.variable, stride, size: rest });
                prepend(Digit { size: left, ..last }, &mut group);
                left = Dim::constant(1);
            }
        }
        groups.push(group);
    }
    groups.reverse();
    row.is_empty().then_some(groups)
}

/// A function whose elements are looked at.
pub(super) struct Graph<'f> {
    pub(super) function: &'f Function,
    pub(super) module: &'f Module,
    known: &'f dyn Fn(usize) -> Option<Tensor>,
    producers: Vec<Option<usize>>,
    /// Of each value, whether a product sums over what is computed from it.
    multiplied: Vec<bool>,
    variables: RefCell<usize>,
    evaluated: RefCell<BTreeMap<ValueId, Option<Rc<Tensor>>>>,
}

/// Of each value, whether a product sums over what is computed from it, element by element.
#[expect(clippy::wildcard_enum_match_arm, reason = "other ops end the way")]
fn multiplied(function: &Function) -> Vec<bool> {
    let mut multiplied = vec![false; function.values.len()];
    // Readers come after what they read.
    for node in function.nodes.iter().rev() {
        let leads_on = match node.op {
            Op::Contract(_) => true,
            Op::Unary(_) | Op::Binary(_) | Op::Select | Op::Compare(_) | Op::Cast { .. } => {
                multiplied[node.result().index()]
            }
            Op::Reshape { .. } | Op::Transpose { .. } | Op::Broadcast { .. } => {
                multiplied[node.result().index()]
            }
            _ => false,
        };
        if leads_on {
            node.operands.iter().for_each(|operand| multiplied[operand.index()] = true);
        }
    }
    multiplied
}

impl<'f> Graph<'f> {
    /// A graph; `known` tells the elements of parameters that are constants.
    pub(super) fn new(
        function: &'f Function,
        module: &'f Module,
        known: &'f dyn Fn(usize) -> Option<Tensor>,
    ) -> Graph<'f> {
        Graph {
            function,
            module,
            known,
            producers: function.producers(),
            multiplied: multiplied(function),
            variables: RefCell::new(0),
            evaluated: RefCell::new(BTreeMap::new()),
        }
    }

    /// The node that makes a value.
    pub(super) fn node(&self, value: ValueId) -> Option<&'f Node> {
        self.producers[value.index()].map(|at| &self.function.nodes[at])
    }

    /// The op that makes an element.
    pub(super) fn op(&self, of: &Element) -> Option<&'f Op> {
        self.node(of.value).map(|node| &node.op)
    }

    /// The sizes of a value.
    pub(super) fn dims(&self, value: ValueId) -> &'f [Dim] {
        &self.function.ty(value).dims
    }

    /// Whether a product sums over what is computed from a value, element by element.
    pub(super) fn is_multiplied(&self, value: ValueId) -> bool {
        self.multiplied[value.index()]
    }

    /// The index along a dim of the given size by a variable of its own.
    pub(super) fn fresh(&self, size: &Dim) -> Index {
        if is_one(size) {
            return Index::new();
        }
        *self.variables.borrow_mut() += 1;
        let variable = *self.variables.borrow();
        vec![Digit { variable, stride: Dim::constant(1), size: size.clone() }]
    }

    /// Any element of a value, by a variable for each dim.
    pub(super) fn any(&self, value: ValueId) -> Element {
        let index = self.dims(value).iter().map(|size| self.fresh(size)).collect();
        Element { value, index }
    }

    /// The element that an element is by views alone.
    pub(super) fn peel(&self, of: &Element) -> Element {
        let mut at = of.clone();
        while let Some(under) = self.under(&at) {
            at = under;
        }
        at
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "other ops are no views")]
    fn under(&self, of: &Element) -> Option<Element> {
        let node = self.node(of.value)?;
        let value = *node.operands.first()?;
        let index = match &node.op {
            Op::Reshape { .. } => {
                let digits = of.digits().cloned().collect();
                regrouped(digits, self.dims(value))?
            }
            Op::Transpose { perm } => {
                let mut index = vec![Index::new(); perm.len()];
                for (at, from) in perm.iter().enumerate() {
                    index[*from].clone_from(&of.index[at]);
                }
                index
            }
            Op::Broadcast { new, .. } => {
                let kept = (0..of.index.len()).filter(|at| !new.contains(at));
                kept.map(|at| of.index[at].clone()).collect()
            }
            Op::Gather { dim, start } => {
                let shared = self.shared(node.operands[1], *start, &self.dims(value)[*dim])?;
                let digits = of.index[*dim].clone();
                let heads = regrouped(digits, &[self.dims(value)[*dim].clone(), shared])?;
                let mut index = of.index.clone();
                index[*dim].clone_from(&heads[0]);
                index
            }
            Op::Cast { dtype } if *dtype == self.function.ty(value).dtype => of.index.clone(),
            _ => return None,
        };
        Some(Element { value, index })
    }

    /// How many ids in a row are equal, where ids count up from `start` to `start + size` so.
    fn shared(&self, ids: ValueId, start: i64, size: &Dim) -> Option<Dim> {
        let ids = self.evaluate(ids).filter(|ids| ids.dims.len() == 1)?.to_f64();
        let size = size.as_constant().filter(|size| *size > 0)?;
        let shared =
            (ids.len() as i64).checked_div(size).filter(|s| s * size == ids.len() as i64)?;
        let mut wanted = (0..).map(|at| (start + at / shared.max(1)) as f64);
        let is_so = shared > 0 && ids.iter().all(|id| Some(*id) == wanted.next());
        is_so.then(|| Dim::constant(shared))
    }

    /// The operands of an elementwise op at the index of its result.
    #[expect(clippy::wildcard_enum_match_arm, reason = "other ops are not elementwise")]
    pub(super) fn operands(&self, of: &Element) -> Vec<Element> {
        let Some(node) = self.node(of.value) else { return Vec::new() };
        match node.op {
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast { .. } => {
                let at = |value: &ValueId| {
                    self.peel(&Element { value: *value, index: of.index.clone() })
                };
                node.operands.iter().map(at).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The operand of an elementwise function of one.
    pub(super) fn unary(&self, of: &Element, wanted: Unary) -> Option<Element> {
        let of = self.peel(of);
        let is_it = matches!(self.op(&of)?, Op::Unary(how) if *how == wanted);
        is_it.then(|| self.operands(&of).pop())?
    }

    /// The operands of an elementwise function of two.
    pub(super) fn binary(&self, of: &Element, wanted: Binary) -> Option<[Element; 2]> {
        let of = self.peel(of);
        let is_it = matches!(self.op(&of)?, Op::Binary(how) if *how == wanted);
        is_it.then(|| self.operands(&of).try_into().ok())?
    }

    /// The number that an element is, whatever its index.
    pub(super) fn constant(&self, of: &Element) -> Option<f64> {
        self.constant_within(of, 6)
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "other ops are not folded")]
    fn constant_within(&self, of: &Element, depth: usize) -> Option<f64> {
        let of = self.peel(of);
        let node = self.node(of.value)?;
        match &node.op {
            Op::Constant { value, dtype, .. } => Some(Tensor::filled(*dtype, &[], *value).scalar()),
            Op::Unary(_) | Op::Binary(_) | Op::Cast { .. } if depth > 0 => {
                let mut scalars = Vec::new();
                for operand in self.operands(&of) {
                    let dtype = self.function.ty(operand.value).dtype;
                    let value = self.constant_within(&operand, depth - 1)?;
                    scalars.push(Tensor::filled(dtype, &[], value));
                }
                let scalars: Vec<&Tensor> = scalars.iter().collect();
                Some(eval_op(&node.op, &scalars, &Bindings::new()).ok()?.scalar())
            }
            _ => None,
        }
    }

    /// Whether two elements are equal: the same value at the same index, or the same elementwise
    /// ops or reductions of such.
    pub(super) fn same(&self, a: &Element, b: &Element) -> bool {
        self.same_within(a, b, &mut PAIRS_MAX.clone())
    }

    fn same_within(&self, a: &Element, b: &Element, left: &mut usize) -> bool {
        let (a, b) = (self.peel(a), self.peel(b));
        if a == b {
            return true;
        }
        let (Some(of_a), Some(of_b)) = (self.node(a.value), self.node(b.value)) else {
            return false;
        };
        *left = left.saturating_sub(1);
        if *left == 0 || name(&of_a.op) != name(&of_b.op) {
            return false;
        }
        if let (Some(a), Some(b)) = (self.constant(&a), self.constant(&b)) {
            return a.to_bits() == b.to_bits();
        }
        if let (Op::Reduce { combiner, dims }, Op::Reduce { combiner: other, dims: more }) =
            (&of_a.op, &of_b.op)
        {
            let of = |e: &Element, dims: &[usize], with: &[Index]| self.inside(e, dims, with);
            let with: Vec<Index> = self.reduced(&a).iter().map(|size| self.fresh(size)).collect();
            return combiner == other
                && self.reduced(&a) == self.reduced(&b)
                && self.same_within(&of(&a, dims, &with), &of(&b, more, &with), left);
        }
        let (x, y) = (self.operands(&a), self.operands(&b));
        !x.is_empty()
            && x.len() == y.len()
            && of_a.op == of_b.op
            && x.iter().zip(&y).all(|(x, y)| self.same_within(x, y, left))
    }

    /// The sizes of the dims that a reduction takes away.
    pub(super) fn reduced(&self, of: &Element) -> Vec<Dim> {
        match self.node(of.value) {
            Some(Node { op: Op::Reduce { dims, .. }, operands, .. }) => {
                dims.iter().map(|dim| self.dims(operands[0])[*dim].clone()).collect()
            }
            Some(_) | None => Vec::new(),
        }
    }

    /// The operand of a reduction, at the given indices of the dims that it takes away.
    pub(super) fn inside(&self, of: &Element, dims: &[usize], with: &[Index]) -> Element {
        let value = self.node(of.value).map_or(of.value, |node| node.operands[0]);
        let mut index = of.index.clone();
        for (dim, with) in dims.iter().zip(with) {
            index.insert(*dim, with.clone());
        }
        self.peel(&Element { value, index })
    }

    /// The elements of a value that depends on no input.
    pub(super) fn evaluate(&self, value: ValueId) -> Option<Rc<Tensor>> {
        if let Some(there) = self.evaluated.borrow().get(&value) {
            return there.clone();
        }
        let made = self.evaluated_now(value);
        self.evaluated.borrow_mut().insert(value, made.clone());
        made
    }

    fn evaluated_now(&self, value: ValueId) -> Option<Rc<Tensor>> {
        let ty = self.function.ty(value);
        if ty.count().is_none_or(|count| count > KNOWN_MAX) {
            return None;
        }
        let Some(node) = self.node(value) else {
            return (self.known)(value.index()).filter(|tensor| tensor.ty() == *ty).map(Rc::new);
        };
        if node.callee().is_some() || matches!(node.op, Op::Contract(_) | Op::Conv(_)) {
            return None;
        }
        let operands: Vec<Rc<Tensor>> =
            node.operands.iter().map(|operand| self.evaluate(*operand)).collect::<Option<_>>()?;
        let operands: Vec<&Tensor> = operands.iter().map(Rc::as_ref).collect();
        eval_op(&node.op, &operands, &Bindings::new()).ok().map(Rc::new)
    }
}
