//! Codes of 8 bits in blocks that share a scale, as nodes of a function.

use std::collections::BTreeSet;

use ir::infer::{RUN, infer};
use ir::op::{Binary, Combiner, Unary};
use ir::{DType, Dim, Function, Module, Node, Op, TensorType, Value, ValueId};

/// Elements of a block along a dim.
pub const BLOCK: usize = RUN;

/// The least that the largest element of a block of codes is taken for, `2^-100`. Chosen: scales of
/// blocks of zeros are normal numbers, and what products read back is a number of BF16.
pub(crate) const LARGEST_MIN: f64 = 7.888_609_052_210_118e-31;

/// The largest number of a format of codes.
pub(crate) fn code_max(format: DType) -> f64 {
    if format == DType::F8E4M3 { 448.0 } else { 57344.0 }
}

/// A function to which nodes are added, and the module whose functions these may call.
pub(crate) struct Appended<'m> {
    pub(crate) function: Function,
    module: &'m Module,
    names: BTreeSet<String>,
}

/// Numbers as codes: `numbers = codes / scales`.
pub(crate) struct Codes {
    /// Of the format.
    pub(crate) codes: ValueId,
    /// One for each block.
    pub(crate) scale: ValueId,
    /// The same, for each element.
    pub(crate) scales: ValueId,
}

impl<'m> Appended<'m> {
    /// A function without nodes, with the values of another one.
    pub(crate) fn to_values_of(function: &Function, module: &'m Module) -> Appended<'m> {
        Appended {
            function: Function { nodes: Vec::new(), ..function.clone() },
            module,
            names: function.values.iter().map(|value| value.name.clone()).collect(),
        }
    }

    /// Adds a node of one result, whose name is made unique.
    pub(crate) fn push(&mut self, name: &str, op: Op, operands: &[ValueId]) -> ValueId {
        let types: Vec<&TensorType> = operands.iter().map(|o| self.function.ty(*o)).collect();
        let ty = infer(&op, &types, self.module).expect("operands are of one type").remove(0);
        let mut unique = name.to_owned();
        while !self.names.insert(unique.clone()) {
            unique.push('_');
        }
        let result = ValueId(self.function.values.len() as u32);
        self.function.values.push(Value { name: unique, ty, frozen: false });
        self.function.nodes.push(Node { op, operands: operands.to_vec(), results: vec![result] });
        result
    }

    /// Whether an op of some operands yields the type of a value.
    pub(crate) fn is_of_type(&self, op: &Op, operands: &[ValueId], value: ValueId) -> bool {
        let types: Vec<&TensorType> = operands.iter().map(|o| self.function.ty(*o)).collect();
        infer(op, &types, self.module).is_ok_and(|found| found == [self.function.ty(value).clone()])
    }

    /// A value in a type.
    pub(crate) fn cast(&mut self, name: &str, value: ValueId, dtype: DType) -> ValueId {
        if self.function.ty(value).dtype == dtype {
            return value;
        }
        self.push(&format!("{name}.{dtype}"), Op::Cast { dtype }, &[value])
    }

    /// A number with the dims of another value.
    pub(crate) fn constant(&mut self, name: &str, number: f64, like: ValueId) -> ValueId {
        let TensorType { dtype, dims } = self.function.ty(like).clone();
        self.push(name, Op::Constant { value: number, dtype, dims }, &[])
    }

    /// The codes of a value in blocks, given its dims cut in blocks and which of these are inside
    /// of one: the scale of a block is the largest power of two that keeps its largest element
    /// within the format.
    pub(crate) fn codes(
        &mut self,
        (name, value): (&str, ValueId),
        (dims, inside): (&[Dim], &[usize]),
        format: DType,
    ) -> Codes {
        let of = |what: &str| format!("{name}.{what}");
        let cut = self.push(&of("blocks"), Op::Reshape { dims: dims.to_vec() }, &[value]);
        let dtype = self.function.ty(value).dtype.accumulation();
        // Of narrow numbers, so that no pass leaves wide ones to the next.
        let mut largest = self.push(&of("sizes"), Op::Unary(Unary::Abs), &[cut]);
        // Row by row first: what is left of that is small.
        for dim in inside.iter().rev() {
            let reduce = Op::Reduce { combiner: Combiner::Max, dims: vec![*dim] };
            largest = self.push(&of("largest"), reduce, &[largest]);
        }
        let largest = self.cast(&of("largest"), largest, dtype);
        let least = self.constant(&of("least"), LARGEST_MIN, largest);
        let top = self.push(&of("top"), Op::Binary(Binary::Max), &[largest, least]);
        let most = self.constant(&of("most"), code_max(format), top);
        let room = self.push(&of("room"), Op::Binary(Binary::Div), &[most, top]);
        let scale = self.push(&of("scale"), Op::Unary(Unary::PowerFloor), &[room]);
        let wide = self.cast(&of("blocks"), cut, dtype);
        let repeat = Op::Broadcast { new: inside.to_vec(), dims: dims.to_vec() };
        let scales = self.push(&of("scales"), repeat, &[scale]);
        let scaled = self.push(&of("scaled"), Op::Binary(Binary::Mul), &[wide, scales]);
        let codes = self.cast(name, scaled, format);
        Codes { codes, scale, scales }
    }
}
