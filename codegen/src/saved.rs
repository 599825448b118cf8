//! Saved activations in a narrower type: what the backward pass reads of the forward pass is
//! rounded, and the forward pass is not.
//!
//! In a gradient function each activation that is worth keeping is followed by a cast to the type
//! of the role `saved` and one back. The backward pass reads the latter, and what it recomputes
//! from kept values it recomputes from these. So gradients are those of the same rounded numbers
//! whether they are kept or computed a second time.
//!
//! Not rounded: statistics, which are sums; what a composite reads, since its own statistics
//! (attention's `lse`) are of numbers that are not rounded; and the layer of the loss, where the
//! error of a logit would be an exponent's.

use std::collections::BTreeSet;

use ir::autodiff::gradient_name;
use ir::precision::Precision;
use ir::{Class, DType, Function, Kind, Module, Node, Op, Value, ValueId};

use crate::specialise::{SAVED, depends_on, worth_keeping};

/// Rounds what gradient functions save to the type that the precision says; nothing where that is
/// the type in which they compute. O(nodes + operands).
pub(crate) fn round_saved(module: &mut Module, precision: &Precision) {
    if precision.saved.size() >= precision.compute.size() {
        return;
    }
    let is_layer = |f: &&Function| {
        f.kind == Kind::Layer && !f.results.iter().all(|result| f.ty(*result).ndim() == 0)
    };
    let layers = module.functions.iter().filter(is_layer);
    let layers: Vec<(String, usize)> =
        layers.map(|f| (gradient_name(&f.name), f.param_count)).collect();
    for (name, primal_params) in layers {
        if let Some(at) = module.functions.iter().position(|f| f.name == name) {
            let worth = worth_keeping(&module.functions[at], module);
            let rounding =
                Rounding::of(&module.functions[at], worth, primal_params, precision.saved);
            module.functions[at] = rounding.run();
        }
    }
}

struct Rounding<'f> {
    source: &'f Function,
    /// The function, with more values than its source.
    made: Function,
    saved: DType,
    producers: Vec<Option<usize>>,
    /// By node, whether its results are worth keeping.
    worth: Vec<bool>,
    /// By value, whether it depends on a cotangent.
    late: Vec<bool>,
    /// By value, what the backward pass reads in its place, where that is known.
    read: Vec<Option<ValueId>>,
    names: BTreeSet<String>,
}

impl<'f> Rounding<'f> {
    fn of(
        source: &'f Function,
        worth: Vec<bool>,
        primal_params: usize,
        saved: DType,
    ) -> Rounding<'f> {
        let is_cotangent = |id: ValueId| (primal_params..source.param_count).contains(&id.index());
        Rounding {
            source,
            made: Function { nodes: Vec::new(), ..source.clone() },
            saved,
            producers: source.producers(),
            worth,
            late: depends_on(source, is_cotangent),
            read: vec![None; source.values.len()],
            names: source.values.iter().map(|value| value.name.clone()).collect(),
        }
    }

    fn run(mut self) -> Function {
        for node in &self.source.nodes {
            let is_late = self.late[node.results[0].index()];
            let mut node = node.clone();
            if is_late && node.op.class() != Class::Call {
                node.operands = node.operands.iter().map(|operand| self.read(*operand)).collect();
            }
            self.made.nodes.push(node);
        }
        self.made
    }

    /// What the backward pass reads in place of a value.
    fn read(&mut self, value: ValueId) -> ValueId {
        let producer = self.producers[value.index()];
        let Some(at) = producer.filter(|_| !self.late[value.index()]) else { return value };
        if let Some(known) = self.read[value.index()] {
            return known;
        }
        let node = &self.source.nodes[at];
        let read = if self.worth[at] {
            if self.rounds(node, value) { self.round(value) } else { value }
        } else {
            self.recompute(node, value)
        };
        self.read[value.index()] = Some(read);
        read
    }

    fn rounds(&self, node: &Node, value: ValueId) -> bool {
        let dtype = self.source.ty(value).dtype;
        let is_sum = match node.op.class() {
            Class::Reduction => true,
            Class::Call => value != node.results[0],
            Class::Source
            | Class::Elementwise
            | Class::Product
            | Class::Scan
            | Class::View
            | Class::Join
            | Class::Indexed
            | Class::Collective => false,
        };
        !is_sum && dtype.is_float() && dtype.size() > self.saved.size()
    }

    /// The value rounded, in its own type.
    fn round(&mut self, value: ValueId) -> ValueId {
        let (name, ty) = (&self.source.value(value).name, self.source.ty(value));
        let (kept, read) = (format!("{name}{SAVED}"), format!("{name}.rounded"));
        let (saved, own) = (self.saved, ty.dtype);
        let narrow = self.push(&kept, Op::Cast { dtype: saved }, vec![value], saved);
        self.push(&read, Op::Cast { dtype: own }, vec![narrow], own)
    }

    /// What a node that is recomputed yields of rounded operands.
    fn recompute(&mut self, node: &Node, value: ValueId) -> ValueId {
        // A composite reads what is not rounded, as its gradient does.
        if node.op.class() == Class::Call {
            return value;
        }
        let operands: Vec<ValueId> = node.operands.iter().map(|o| self.read(*o)).collect();
        if operands == node.operands {
            return value;
        }
        let name = format!("{}.recomputed", self.source.value(value).name);
        let dtype = self.source.ty(value).dtype;
        self.push_like(&name, node.op.clone(), operands, (value, dtype))
    }

    /// A node on one operand, whose result has the sizes of the operand.
    fn push(&mut self, name: &str, op: Op, operands: Vec<ValueId>, dtype: DType) -> ValueId {
        let like = operands[0];
        self.push_like(name, op, operands, (like, dtype))
    }

    /// A node whose result has the sizes of another value.
    fn push_like(
        &mut self,
        name: &str,
        op: Op,
        operands: Vec<ValueId>,
        (like, dtype): (ValueId, DType),
    ) -> ValueId {
        let ty = self.made.ty(like).with_dtype(dtype);
        let mut unique = name.to_owned();
        while !self.names.insert(unique.clone()) {
            unique.insert(0, 'r');
        }
        let result = ValueId(self.made.values.len() as u32);
        self.made.values.push(Value { name: unique, ty, frozen: false });
        self.made.nodes.push(Node { op, operands, results: vec![result] });
        result
    }
}
