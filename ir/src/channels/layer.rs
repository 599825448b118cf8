//! The images of one layer.

use std::collections::BTreeMap;

use super::moved::{self, Order, place};
use crate::build::Builder;
use crate::convolution::{Convolution, DimOrder};
use crate::dim::Dim;
use crate::module::{Function, Kind, Module, Node, ValueId};
use crate::op::Op;

/// A layer whose images lie with channels last.
pub(super) struct Layer {
    pub(super) function: Function,
    /// Of each parameter, how all that read it want it to lie, where that is not as it does.
    pub(super) params: Vec<Option<Order>>,
    /// Of each result, how it lies, where that is not as before.
    pub(super) results: Vec<Option<Order>>,
}

/// Lays the images of a layer.
pub(super) fn lay(module: &mut Module, at: usize, images: &[usize]) -> Layer {
    let from = module.functions[at].clone();
    let b = Builder::new(module, from.name.clone(), Kind::Layer);
    let mut of =
        Laying { from: &from, b, usual: Vec::new(), other: Vec::new(), made: BTreeMap::new() };
    of.usual.resize(from.values.len(), None);
    of.other.resize(from.values.len(), None);
    of.params(images);
    from.nodes.iter().for_each(|node| of.node(node));
    let mut results = Vec::new();
    let mut yielded = Vec::new();
    for result in &from.results {
        let other = of.other[result.index()].clone();
        yielded.push(other.as_ref().map_or_else(|| of.usual(*result), |(_, value)| *value));
        results.push(other.map(|(order, _)| order));
    }
    let mut function = of.b.into_function(&yielded);
    crate::pass::remove_dead_nodes(&mut function);
    let params = function.params().map(|param| wanted(&function, param)).collect();
    Layer { function, params, results }
}

/// How all nodes that read a parameter transpose it.
fn wanted(function: &Function, param: ValueId) -> Option<Order> {
    let mut readers = function.nodes.iter().filter(|node| node.operands.contains(&param));
    let order = |node: &Node| {
        let Op::Transpose { perm } = &node.op else { return None };
        Some(perm.clone())
    };
    let first = readers.next().and_then(order)?;
    let is_same = readers.all(|node| order(node).as_ref() == Some(&first));
    (is_same && !function.results.contains(&param)).then_some(first)
}

/// A dimension order, as `transpose` has it.
fn order_of(order: &DimOrder, ndim: usize) -> Order {
    (0..ndim).map(|place| order.dim(place)).collect()
}

/// A layer that is built again.
struct Laying<'m> {
    from: &'m Function,
    b: Builder<'m>,
    /// The values in the usual order, those that were made.
    usual: Vec<Option<ValueId>>,
    /// The values that lie in another, and which.
    other: Vec<Option<(Order, ValueId)>>,
    /// Those that were transposed to lie in an order.
    made: BTreeMap<(ValueId, Order), ValueId>,
}

impl Laying<'_> {
    /// Adds the parameters. What may be images lies as images do.
    fn params(&mut self, images: &[usize]) {
        let mut samples = Vec::new();
        for param in self.from.params() {
            let value = self.from.value(param);
            let made = self.b.param(&value.name, value.ty.clone());
            self.b.set_frozen(made, value.frozen);
            self.usual[param.index()] = Some(made);
            if super::is_sample(self.from, param, images) {
                samples.push((param, value.ty.ndim()));
            }
        }
        for (param, ndim) in samples {
            let order = order_of(&DimOrder::channels_last(ndim), ndim);
            let lying = self.lying(param, &order);
            self.other[param.index()] = Some((order, lying));
        }
    }

    /// Adds a node: where what it reads lies in another order, in that.
    fn node(&mut self, node: &Node) {
        if self.in_other_order(node).is_some() {
            return;
        }
        let operands: Vec<ValueId> = node.operands.iter().map(|of| self.usual(*of)).collect();
        let name = |of: &ValueId| self.from.value(*of).name.clone();
        let names: Vec<String> = node.results.iter().map(name).collect();
        let made = self.b.push_named(&names, node.op.clone(), &operands);
        for (result, made) in node.results.iter().zip(made) {
            self.usual[result.index()] = Some(made);
        }
    }

    fn in_other_order(&mut self, node: &Node) -> Option<()> {
        #[expect(clippy::wildcard_enum_match_arm, reason = "what else moves is in one table")]
        match &node.op {
            Op::Conv(convolution) => self.convolve(node, convolution),
            Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Concat { .. } => self.join(node),
            Op::Contract(einsum) => {
                let [a, b] = node.operands[..] else { return None };
                let lie = |of: ValueId| self.other[of.index()].clone();
                let (of_a, of_b) = (lie(a), lie(b));
                of_a.as_ref().or(of_b.as_ref())?;
                let mut einsum = einsum.clone();
                let mut operands = Vec::new();
                for (of, value, letters) in [(of_a, a, &mut einsum.a), (of_b, b, &mut einsum.b)] {
                    if let Some((order, _)) = &of {
                        *letters = order.iter().map(|dim| letters[*dim]).collect();
                    }
                    operands.push(of.map_or_else(|| self.usual(value), |(_, lying)| lying));
                }
                self.yields(node, Op::Contract(einsum), &operands, Vec::new());
                Some(())
            }
            op => {
                let x = *node.operands.first()?;
                let (order, lying) = self.other[x.index()].clone()?;
                let types = [x, node.result()].map(|of| self.from.ty(of));
                let (op, order) = moved::moved(op, &order, types)?;
                let Some(op) = op else {
                    self.other[node.result().index()] = Some((order, lying));
                    return Some(());
                };
                let rest = node.operands[1..].iter().map(|of| self.usual(*of));
                let operands: Vec<ValueId> = [lying].into_iter().chain(rest).collect();
                self.yields(node, op, &operands, order);
                Some(())
            }
        }
    }

    /// Adds the node in whose place another is, whose result lies in an order: none for the usual.
    fn yields(&mut self, node: &Node, op: Op, operands: &[ValueId], order: Order) {
        let result = node.result();
        let made = self.b.push(&self.from.value(result).name, op, operands);
        match order.is_sorted() {
            true => self.usual[result.index()] = Some(made),
            false => self.other[result.index()] = Some((order, made)),
        }
    }

    /// Kernels whose channels lie together as they are stay so.
    fn convolve(&mut self, node: &Node, c: &Convolution) -> Option<()> {
        let [x, w] = node.operands[..] else { return None };
        let kernel = self.from.ty(w).clone();
        let ndim = kernel.ndim();
        if ndim < 3 || c.orders.iter().any(|order| order.named().is_some()) {
            return None;
        }
        let last = DimOrder::channels_last(ndim);
        let order = order_of(&last, ndim);
        let one = Dim::constant(1);
        let is_contiguous = kernel.dims[1] == one || kernel.dims[2..].iter().all(|dim| *dim == one);
        let x = self.lying(x, &order);
        let (w, of_w) = match is_contiguous {
            true => (self.usual(w), DimOrder::default()),
            false => (self.lying(w, &order), last.clone()),
        };
        let orders = [last.clone(), of_w, last];
        self.yields(node, Op::Conv(Convolution { orders, ..c.clone() }), &[x, w], order);
        Some(())
    }

    /// Operands of which one lies in another order lie in that.
    fn join(&mut self, node: &Node) -> Option<()> {
        let lie = |of: &ValueId| self.other[of.index()].clone();
        let (order, _) = node.operands.iter().find_map(lie)?;
        let operands: Vec<ValueId> =
            node.operands.iter().map(|of| self.lying(*of, &order)).collect();
        let mut op = node.op.clone();
        if let Op::Concat { dim } = &mut op {
            *dim = place(&order, *dim);
        }
        self.yields(node, op, &operands, order);
        Some(())
    }

    /// A value in the usual order.
    fn usual(&mut self, of: ValueId) -> ValueId {
        if let Some(made) = self.usual[of.index()] {
            return made;
        }
        let Some((order, lying)) = self.other[of.index()].clone() else {
            panic!("`%{}` is read before it is made", self.from.value(of).name);
        };
        let perm = (0..order.len()).map(|dim| place(&order, dim)).collect();
        let name = format!("{}.usual", self.from.value(of).name);
        let made = self.b.push(&name, Op::Transpose { perm }, &[lying]);
        self.usual[of.index()] = Some(made);
        made
    }

    /// A value in an order. What only repeats is repeated so.
    fn lying(&mut self, of: ValueId, order: &Order) -> ValueId {
        if order.is_sorted() {
            return self.usual(of);
        }
        if let Some((_, lying)) = self.other[of.index()].as_ref().filter(|(is, _)| is == order) {
            return *lying;
        }
        if let Some(made) = self.made.get(&(of, order.clone())) {
            return *made;
        }
        let name = format!("{}.last", self.from.value(of).name);
        let maker = self.from.nodes.iter().find(|node| node.results.contains(&of));
        let lie = |dims: &[Dim]| order.iter().map(|dim| dims[*dim].clone()).collect();
        let made = match maker.map(|node| &node.op) {
            Some(Op::Constant { value, dtype, dims }) => {
                let op = Op::Constant { value: *value, dtype: *dtype, dims: lie(dims) };
                self.b.push(&name, op, &[])
            }
            Some(Op::Broadcast { new, dims }) => {
                let (is_new, of_x) = moved::repeated(order, new);
                let op = Op::Broadcast { new: is_new, dims: lie(dims) };
                let x = maker.map_or(of, |node| node.operands[0]);
                let x = self.lying(x, &of_x);
                self.b.push(&name, op, &[x])
            }
            Some(_) | None => {
                let x = self.usual(of);
                self.b.push(&name, Op::Transpose { perm: order.clone() }, &[x])
            }
        };
        self.made.insert((of, order.clone()), made);
        made
    }
}
