//! What the translation of one operator sees: its operands, attributes, and means to add ops.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::Held;
use super::checks::Limit;
use super::element::Element;
use super::proto::{AttributeProto, NodeProto};
use crate::build::Builder;
use crate::dim::Dim;
use crate::module::ValueId;
use crate::op::{Binary, Combiner, Comparison, Einsum, Op, Unary};
use crate::tensor::Data;
use crate::types::TensorType;
use crate::{DType, Tensor};

/// Elements of a value at most, dims of size zero counted as ones. Chosen: more than any weight or
/// activation of a published model has, and few enough that no product of sizes overflows.
pub(super) const ELEMENTS_MAX: usize = 1 << 33;

/// Refuses dims of more than [`ELEMENTS_MAX`] elements.
pub(super) fn check_size(dims: &[usize]) -> Result<(), String> {
    let count = dims.iter().try_fold(1_usize, |count, dim| count.checked_mul((*dim).max(1)));
    match count {
        Some(0..=ELEMENTS_MAX) => Ok(()),
        Some(_) | None => Err(format!("a value of dims {dims:?}, of more than 2^33 elements")),
    }
}

/// The results of an operator; or why this use of it is not supported.
pub(super) type Translated = Result<Vec<ValueId>, String>;
/// A value, or why it cannot be made.
pub(super) type Made = Result<ValueId, String>;

/// An operand of a node.
#[derive(Clone)]
pub(super) struct Operand {
    pub(super) id: ValueId,
    /// Its elements, where they do not depend on an input, or the input is given.
    pub(super) known: Option<Rc<Tensor>>,
}

/// One node, in the middle of its translation.
pub(super) struct Site<'s, 'm> {
    pub(super) b: &'s mut Builder<'m>,
    pub(super) node: &'s NodeProto,
    /// The version of the set of operators.
    pub(super) opset: i64,
    /// The operands; none where an optional one is left out.
    pub(super) operands: Vec<Option<Operand>>,
    /// The types of operands that are computed in wider ones.
    pub(super) elements: Vec<Option<Element>>,
    /// How new values are named.
    pub(super) name: String,
    /// Results that are numbers and no formula.
    pub(super) held: Vec<(ValueId, Rc<Tensor>)>,
    /// Values that are arrays of numbers.
    pub(super) arrays: Vec<(ValueId, Rc<Tensor>)>,
    /// The types of results that do not have that of an operand, by their index.
    pub(super) stated: Vec<(usize, Element)>,
    /// What elements that depend on inputs are computed from.
    pub(super) forcing: Option<Forcing<'s>>,
    /// Whether any were.
    pub(super) has_forced: Cell<bool>,
    /// Numbers that have to be below limits when the model runs.
    pub(super) demands: Vec<(ValueId, Limit)>,
}

/// Elements of all parameters of a function.
#[derive(Clone, Copy)]
pub(super) struct Forcing<'s> {
    /// Weights and constants.
    pub(super) held: &'s BTreeMap<ValueId, Held>,
    /// Of the inputs, in order.
    pub(super) inputs: &'s [Option<Rc<Tensor>>],
}

impl<'s, 'm> Site<'s, 'm> {
    pub(super) fn new(
        b: &'s mut Builder<'m>,
        node: &'s NodeProto,
        opset: i64,
        operands: Vec<Option<Operand>>,
        elements: Vec<Option<Element>>,
        name: String,
    ) -> Site<'s, 'm> {
        Site {
            b,
            node,
            opset,
            operands,
            elements,
            name,
            held: Vec::new(),
            arrays: Vec::new(),
            stated: Vec::new(),
            forcing: None,
            has_forced: Cell::new(false),
            demands: Vec::new(),
        }
    }
}

impl Site<'_, '_> {
    // Operands.

    pub(super) fn operand(&self, at: usize) -> Made {
        self.optional(at).ok_or_else(|| format!("operand {at} is missing"))
    }

    pub(super) fn optional(&self, at: usize) -> Option<ValueId> {
        self.operands.get(at)?.as_ref().map(|operand| operand.id)
    }

    /// All operands that are there.
    pub(super) fn all(&self) -> Vec<ValueId> {
        self.operands.iter().flatten().map(|operand| operand.id).collect()
    }

    /// The elements of an operand that has to be known when the model is read: where it depends on
    /// inputs, computed for those that are given.
    pub(super) fn known(&self, at: usize) -> Result<Option<Rc<Tensor>>, String> {
        let Some(Some(operand)) = self.operands.get(at) else { return Ok(None) };
        if let Some(known) = operand.known.clone() {
            return Ok(Some(known));
        }
        let forced = self.forcing.and_then(|forcing| forcing.elements(self.b, operand.id));
        self.has_forced.set(self.has_forced.get() || forced.is_some());
        forced.map(Some).ok_or_else(|| format!("operand {at} depends on an input"))
    }

    /// The elements of an operand, where they are at hand.
    pub(super) fn hint(&self, at: usize) -> Option<Rc<Tensor>> {
        self.operands.get(at)?.as_ref()?.known.clone()
    }

    /// The type of an operand's elements.
    pub(super) fn element(&self, at: usize) -> Option<Element> {
        let operand = self.operands.get(at)?.as_ref()?;
        let narrow = self.elements.get(at).copied().flatten();
        Some(narrow.unwrap_or(Element::natural(self.dtype(operand.id))))
    }

    /// States the type of a result that is not that of the first operand of its kind.
    pub(super) fn state(&mut self, result: usize, element: Element) {
        self.stated.push((result, element));
    }

    /// The whole numbers of such an operand; none where it is left out.
    pub(super) fn integers(&self, at: usize) -> Result<Option<Vec<i64>>, String> {
        let whole = |t: Rc<Tensor>| match &t.data {
            Data::Int(numbers) => numbers.clone(),
            Data::F64(_) | Data::F32(_) | Data::Bool(_) => {
                t.to_f64().into_iter().map(|x| x as i64).collect()
            }
        };
        Ok(self.known(at)?.map(whole))
    }

    // Attributes.

    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.node.attribute.iter().find(|a| a.name == name)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.attribute(name).is_some()
    }

    pub(super) fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).map_or(default, |a| a.i)
    }

    pub(super) fn float(&self, name: &str, default: f32) -> f64 {
        f64::from(self.attribute(name).map_or(default, |a| a.f))
    }

    pub(super) fn ints(&self, name: &str) -> Option<Vec<i64>> {
        self.attribute(name).map(|a| a.ints.clone())
    }

    pub(super) fn text(&self, name: &str, default: &str) -> String {
        let found = self.attribute(name).map(|a| String::from_utf8_lossy(&a.s).into_owned());
        found.unwrap_or_else(|| default.to_owned())
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&super::proto::TensorProto> {
        self.attribute(name)?.t.as_ref()
    }

    pub(super) fn texts(&self, name: &str) -> Option<Vec<String>> {
        let text = |s: &bytes::Bytes| String::from_utf8_lossy(s).into_owned();
        self.attribute(name).map(|a| a.strings.iter().map(text).collect())
    }

    pub(super) fn floats(&self, name: &str) -> Option<Vec<f32>> {
        self.attribute(name).map(|a| a.floats.clone())
    }

    /// The list of an attribute, which newer versions have as an operand.
    pub(super) fn list(&self, name: &str, at: usize) -> Result<Option<Vec<i64>>, String> {
        if self.has(name) { Ok(self.ints(name)) } else { self.integers(at) }
    }

    // Types.

    pub(super) fn ty(&self, x: ValueId) -> TensorType {
        self.b.ty(x).clone()
    }

    pub(super) fn dtype(&self, x: ValueId) -> DType {
        self.b.ty(x).dtype
    }

    pub(super) fn dims(&self, x: ValueId) -> Vec<usize> {
        self.b.ty(x).sizes().expect("bound when the model is read")
    }

    pub(super) fn ndim(&self, x: ValueId) -> usize {
        self.b.ty(x).ndim()
    }

    pub(super) fn is_float(&self, x: ValueId) -> bool {
        self.dtype(x).is_float()
    }

    // Ops.

    pub(super) fn push(&mut self, op: Op, operands: &[ValueId]) -> Made {
        let name = self.name.clone();
        let made = self.b.try_push(&name, op, operands).map_err(|error| error.to_string())?;
        let dims = self.b.ty(made).sizes();
        check_size(&dims.ok_or_else(|| format!("a value of type {}", self.b.ty(made)))?)?;
        Ok(made)
    }

    /// A result that is known when the model is read.
    pub(super) fn hold(&mut self, tensor: Tensor) -> Made {
        let id = self.constant(0.0, tensor.dtype, &tensor.dims.clone())?;
        self.held.push((id, Rc::new(tensor)));
        Ok(id)
    }

    /// An array of numbers to compute with.
    pub(super) fn array(&mut self, tensor: Tensor) -> Made {
        let id = self.constant(0.0, tensor.dtype, &tensor.dims.clone())?;
        self.arrays.push((id, Rc::new(tensor)));
        Ok(id)
    }

    /// The elements along a dim at places that are known.
    pub(super) fn picked(&mut self, x: ValueId, dim: usize, places: &[usize]) -> Made {
        let ids = places.iter().map(|at| *at as i64).collect();
        let ids = self.array(Tensor::int(DType::I32, &[places.len()], ids))?;
        self.push(Op::Gather { dim, start: 0 }, &[x, ids])
    }

    pub(super) fn add(&mut self, a: ValueId, b: ValueId) -> Made {
        self.binary(Binary::Add, a, b)
    }

    pub(super) fn sub(&mut self, a: ValueId, b: ValueId) -> Made {
        self.binary(Binary::Sub, a, b)
    }

    pub(super) fn mul(&mut self, a: ValueId, b: ValueId) -> Made {
        self.binary(Binary::Mul, a, b)
    }

    pub(super) fn div(&mut self, a: ValueId, b: ValueId) -> Made {
        self.binary(Binary::Div, a, b)
    }

    pub(super) fn contract(&mut self, einsum: &str, a: ValueId, b: ValueId) -> Made {
        let einsum = Einsum::parse(einsum).ok_or_else(|| format!("`{einsum}`"))?;
        self.push(Op::Contract(einsum), &[a, b])
    }

    /// A range of a dim.
    pub(super) fn cut(&mut self, x: ValueId, dim: usize, start: usize, size: usize) -> Made {
        if start == 0 && self.dims(x)[dim] == size {
            return Ok(x);
        }
        self.push(Op::Slice { dim, start, size }, &[x])
    }

    pub(super) fn concat(&mut self, dim: usize, parts: &[ValueId]) -> Made {
        if let [one] = parts { Ok(*one) } else { self.push(Op::Concat { dim }, parts) }
    }

    /// A whole number of an integer type, exactly: a constant is an `f64`.
    pub(super) fn integer(&mut self, value: i64, dtype: DType, dims: &[usize]) -> Made {
        if is_f64(value) {
            return self.constant(value as f64, dtype, dims);
        }
        let one = self.array(Tensor::int(dtype, &[], vec![value]))?;
        self.broadcast(one, dims)
    }

    /// The numbers along a dim of given dims.
    pub(super) fn index(&mut self, dim: usize, dtype: DType, dims: &[usize]) -> Made {
        self.push(Op::Iota { dim, start: 0, dtype, dims: sizes(dims) }, &[])
    }

    /// An attribute that counts something.
    pub(super) fn count(&self, name: &str, default: usize) -> Result<usize, String> {
        let found = self.int(name, default as i64);
        usize::try_from(found).map_err(|_| format!("{name} is {found}"))
    }

    pub(super) fn constant(&mut self, value: f64, dtype: DType, dims: &[usize]) -> Made {
        self.push(Op::Constant { value, dtype, dims: sizes(dims) }, &[])
    }

    /// A number of the type and dims of a value.
    pub(super) fn number(&mut self, value: f64, like: ValueId) -> Made {
        let TensorType { dtype, dims } = self.ty(like);
        self.push(Op::Constant { value, dtype, dims }, &[])
    }

    pub(super) fn unary(&mut self, how: Unary, x: ValueId) -> Made {
        self.push(Op::Unary(how), &[x])
    }

    /// Of equal types.
    pub(super) fn binary(&mut self, how: Binary, a: ValueId, b: ValueId) -> Made {
        self.push(Op::Binary(how), &[a, b])
    }

    /// A binary op with a number.
    pub(super) fn with(&mut self, how: Binary, a: ValueId, number: f64) -> Made {
        let number = self.number(number, a)?;
        self.binary(how, a, number)
    }

    pub(super) fn compare(&mut self, how: Comparison, a: ValueId, b: ValueId) -> Made {
        self.push(Op::Compare(how), &[a, b])
    }

    pub(super) fn select(&mut self, condition: ValueId, a: ValueId, b: ValueId) -> Made {
        self.push(Op::Select, &[condition, a, b])
    }

    pub(super) fn cast(&mut self, x: ValueId, dtype: DType) -> Made {
        if self.dtype(x) == dtype { Ok(x) } else { self.push(Op::Cast { dtype }, &[x]) }
    }

    pub(super) fn not(&mut self, x: ValueId) -> Made {
        let no = self.number(0.0, x)?;
        self.compare(Comparison::Eq, x, no)
    }

    pub(super) fn reduce(&mut self, combiner: Combiner, dims: Vec<usize>, x: ValueId) -> Made {
        if dims.is_empty() { Ok(x) } else { self.push(Op::Reduce { combiner, dims }, &[x]) }
    }

    pub(super) fn reshape(&mut self, x: ValueId, dims: &[usize]) -> Made {
        if self.dims(x) == dims {
            Ok(x)
        } else {
            self.push(Op::Reshape { dims: sizes(dims) }, &[x])
        }
    }

    pub(super) fn transpose(&mut self, x: ValueId, perm: &[usize]) -> Made {
        if perm.iter().copied().eq(0..self.ndim(x)) {
            return Ok(x);
        }
        self.push(Op::Transpose { perm: perm.to_vec() }, &[x])
    }

    /// A value repeated to the given dims, aligned at the last one; dims of size one repeat.
    pub(super) fn broadcast(&mut self, x: ValueId, dims: &[usize]) -> Made {
        let from = self.dims(x);
        if from.iter().product::<usize>() == 1
            && let Some((value, dtype)) = self.constant_of(x)
        {
            return self.constant(value, dtype, dims);
        }
        let Some(lead) = dims.len().checked_sub(from.len()) else {
            return Err(format!("{from:?} does not repeat to {dims:?}"));
        };
        let repeats = |at: usize| at < lead || (from[at - lead] == 1 && dims[at] != 1);
        let new: Vec<usize> = (0..dims.len()).filter(|at| repeats(*at)).collect();
        let kept = (0..dims.len()).filter(|at| !repeats(*at)).map(|at| from[at - lead]);
        let x = self.reshape(x, &kept.collect::<Vec<_>>())?;
        if new.is_empty() {
            return self.reshape(x, dims);
        }
        self.push(Op::Broadcast { new, dims: sizes(dims) }, &[x])
    }

    /// The number that a value holds everywhere, where a constant made it: what is held elsewhere
    /// is a constant too until the walk ends.
    fn constant_of(&self, x: ValueId) -> Option<(f64, DType)> {
        let own = self.arrays.iter().chain(&self.held);
        let is_held = own.map(|(id, _)| *id).any(|id| id == x)
            || self.forcing.is_some_and(|forcing| forcing.held.contains_key(&x));
        if is_held {
            return None;
        }
        let made_by = self.b.function().nodes.iter().rev().find(|n| n.results.contains(&x))?;
        if let Op::Constant { value, dtype, .. } = made_by.op { Some((value, dtype)) } else { None }
    }

    /// Values repeated to dims that fit them all.
    pub(super) fn aligned(&mut self, values: &[ValueId]) -> Result<Vec<ValueId>, String> {
        let mut dims: Vec<usize> = Vec::new();
        for value in values {
            dims = joint(&dims, &self.dims(*value))?;
        }
        values.iter().map(|value| self.broadcast(*value, &dims)).collect()
    }

    /// Repeats what a reduction made along the dims that it took away.
    pub(super) fn repeat(&mut self, x: ValueId, new: &[usize], like: ValueId) -> Made {
        if new.is_empty() {
            return Ok(x);
        }
        let dims = self.ty(like).dims;
        self.push(Op::Broadcast { new: new.to_vec(), dims }, &[x])
    }

    /// A composite of floating-point numbers of one type.
    pub(super) fn composite(
        &mut self,
        name: &str,
        numbers: &[(&str, f64)],
        of: &[ValueId],
    ) -> Made {
        let dtype = of.first().map(|x| self.dtype(*x));
        if let Some(wrong) =
            of.iter().find(|x| !self.is_float(**x) || Some(self.dtype(**x)) != dtype)
        {
            return Err(format!("an operand of type {}", self.ty(*wrong)));
        }
        let own = self.name.clone();
        Ok(self.b.composite(&own, name, numbers, of)[0])
    }
}

/// Whether an `f64` is exactly this number.
pub(super) fn is_f64(value: i64) -> bool {
    (value as f64) as i128 == i128::from(value)
}

/// The dims that two dims repeat to.
pub(super) fn joint(a: &[usize], b: &[usize]) -> Result<Vec<usize>, String> {
    let ndim = a.len().max(b.len());
    let size = |of: &[usize], at: usize| (at + of.len()).checked_sub(ndim).map_or(1, |at| of[at]);
    let one = |at: usize| match (size(a, at), size(b, at)) {
        (x, y) if x == y => Ok(x),
        (1, y) => Ok(y),
        (x, 1) => Ok(x),
        _ => Err(format!("{a:?} and {b:?} do not repeat to common dims")),
    };
    (0..ndim).map(one).collect()
}

/// The index of a dim, negative ones from the end.
pub(super) fn dim_at(axis: i64, ndim: usize) -> Result<usize, String> {
    let at = if axis < 0 { axis + ndim as i64 } else { axis };
    let found = usize::try_from(at).ok().filter(|at| *at < ndim);
    found.ok_or_else(|| format!("axis {axis} of {ndim} dims"))
}

/// Dims of fixed sizes.
pub(super) fn sizes(dims: &[usize]) -> Vec<Dim> {
    dims.iter().map(|d| Dim::from(*d)).collect()
}

impl Site<'_, '_> {
    /// Demands that ids are below `rows`, or negative and from `-rows` on.
    pub(super) fn demand_rows(&mut self, ids: ValueId, rows: usize) -> Result<(), String> {
        if self.are_places(ids, rows) {
            return Ok(());
        }
        // -1 - id is the distance from the end.
        let minus = self.number(-1.0, ids)?;
        let from_end = self.sub(minus, ids)?;
        let distance = self.binary(Binary::Max, ids, from_end)?;
        let distance = self.cast(distance, DType::F64)?;
        self.demand(distance, Limit::Rows(rows))
    }

    /// Demands that every number is below a limit.
    pub(super) fn demand(&mut self, numbers: ValueId, of: Limit) -> Result<(), String> {
        let all = (0..self.ndim(numbers)).collect();
        let most = self.reduce(Combiner::Max, all, numbers)?;
        self.demands.push((most, of));
        Ok(())
    }

    /// Whether ids were made by an op that yields places along a dim of at most `rows` elements.
    fn are_places(&self, ids: ValueId, rows: usize) -> bool {
        let mut at = ids;
        loop {
            let nodes = &self.b.function().nodes;
            let Some(node) = nodes.iter().rev().find(|n| n.results.contains(&at)) else {
                return false;
            };
            #[expect(clippy::wildcard_enum_match_arm, reason = "few ops yield or move places")]
            match &node.op {
                Op::ArgMax { dim } | Op::TopK { dim, .. } | Op::Sort { dim, .. } => {
                    return self.dims(node.operands[0])[*dim] <= rows;
                }
                Op::Cast { .. } | Op::Reshape { .. } | Op::Slice { .. } => at = node.operands[0],
                _ => return false,
            }
        }
    }
}
