//! Integers of 64 bits as integers of 32, where these are proved to be the same.
//!
//! A value whose [`range`](crate::ranges) fits 32 bits has them. A node that reads or yields one
//! which does not fit is computed in 64 bits, and casts stand around it; as all its other integers
//! fit, no cast changes a number. Ids that are only looked up are brought beside the table first
//! where they may be further away: what is outside of it stays outside.

use ir::op::{Binary, Op};
use ir::{DType, Dim, Function, Node, TensorType, Value, ValueId};

use crate::ranges::{Range, ranges};

/// Makes an `i32` of every `i64` that fits, of a function that calls nothing with integers of 64
/// bits. `given` are the ranges of parameters of which more is known than their type.
///
/// Keeps results; those that fit are of type `i32`. O(nodes + operands).
pub fn narrow_integers(function: &mut Function, given: impl Fn(ValueId) -> Option<Range>) {
    if !function.values.iter().any(|value| matches!(value.ty.dtype, DType::I64 | DType::U32)) {
        return;
    }
    let found = ranges(function, given);
    let limits = Range::new(i32::MIN, i32::MAX);
    let fits = |range: &Option<Range>| range.is_some_and(|range| range.is_within(limits));
    let is_narrow: Vec<bool> = function
        .values
        .iter()
        .zip(&found)
        .map(|(value, range)| value.ty.dtype == DType::I64 && fits(range))
        .collect();
    let nodes = std::mem::take(&mut function.nodes);
    for (value, is_narrow) in function.values.iter_mut().zip(&is_narrow) {
        if *is_narrow {
            value.ty.dtype = DType::I32;
        }
    }
    let wide = vec![None; function.values.len()];
    let mut narrow = Narrow { function, ranges: found, is_narrow, wide };
    nodes.into_iter().for_each(|node| narrow.node(node));
}

struct Narrow<'f> {
    function: &'f mut Function,
    /// Of the values that the function had.
    ranges: Vec<Option<Range>>,
    /// Whether a value of 64 bits has 32 now.
    is_narrow: Vec<bool>,
    /// For narrowed values, their copy in 64 bits, where a node needs one.
    wide: Vec<Option<ValueId>>,
}

impl Narrow<'_> {
    fn node(&mut self, mut node: Node) {
        if let Some((start, rows, at)) = self.look_up(&node) {
            node.operands[at] = self.id(node.operands[at], start, &rows);
        }
        let result = node.results[0];
        let has_narrow_result = self.is_narrow[result.index()];
        let tied = tied_operands(&node);
        let is_wide = |value: &ValueId| self.function.ty(*value).dtype == DType::I64;
        // What is called has the types that it has.
        let runs_wide = matches!(node.op, Op::Call { .. })
            || tied.iter().any(|at| is_wide(&node.operands[*at]))
            || node.results.iter().any(is_wide);
        if runs_wide && !tied.is_empty() {
            for at in tied {
                node.operands[at] = self.widened(node.operands[at]);
            }
            if has_narrow_result {
                let ty = TensorType { dtype: DType::I64, ..self.function.ty(result).clone() };
                let whole = self.value(&format!("{}.wide", self.name(result)), ty);
                node.results = vec![whole];
                self.function.nodes.push(node);
                self.push(Op::Cast { dtype: DType::I32 }, vec![whole], result);
                return;
            }
        } else if has_narrow_result {
            #[expect(clippy::wildcard_enum_match_arm, reason = "other ops state no element type")]
            match &mut node.op {
                Op::Constant { dtype, .. } | Op::Iota { dtype, .. } | Op::Cast { dtype } => {
                    *dtype = DType::I32;
                }
                _ => {}
            }
        }
        // A cast between equal types is a view.
        if matches!(node.op, Op::Cast { .. }) {
            let [from, to] = [node.operands[0], result].map(|value| self.function.ty(value));
            if from.dtype == to.dtype {
                node.op = Op::Reshape { dims: to.dims.clone() };
            }
        }
        self.function.nodes.push(node);
    }

    fn name(&self, value: ValueId) -> String {
        self.function.value(value).name.clone()
    }

    fn value(&mut self, name: &str, ty: TensorType) -> ValueId {
        self.function.values.push(Value::new(name, ty));
        ValueId(self.function.values.len() as u32 - 1)
    }

    fn push(&mut self, op: Op, operands: Vec<ValueId>, result: ValueId) {
        self.function.nodes.push(Node { op, operands, results: vec![result] });
    }

    /// A new value of the dims of another one.
    fn made(&mut self, like: ValueId, dtype: DType, op: Op, operands: Vec<ValueId>) -> ValueId {
        let ty = TensorType { dtype, ..self.function.ty(like).clone() };
        let made = self.value(&format!("{}.{dtype}", self.name(like)), ty);
        self.push(op, operands, made);
        made
    }

    /// A value in 64 bits: constants and counters are made again, others cast.
    fn widened(&mut self, value: ValueId) -> ValueId {
        if !self.is_narrow.get(value.index()).is_some_and(|narrow| *narrow) {
            return value;
        }
        if let Some(there) = self.wide[value.index()] {
            return there;
        }
        let producer = self.function.nodes.iter().rev().find(|n| n.results.contains(&value));
        let producer = producer.map(|node| (node.op.clone(), node.operands.clone()));
        let dtype = DType::I64;
        let wide = match producer {
            Some((Op::Constant { value: number, dims, .. }, _)) => {
                self.made(value, dtype, Op::Constant { value: number, dtype, dims }, Vec::new())
            }
            Some((Op::Iota { dim, start, dims, .. }, _)) => {
                self.made(value, dtype, Op::Iota { dim, start, dtype, dims }, Vec::new())
            }
            Some((Op::Broadcast { new, dims }, operands)) => {
                let x = self.widened(operands[0]);
                self.made(value, dtype, Op::Broadcast { new, dims }, vec![x])
            }
            _ => self.made(value, dtype, Op::Cast { dtype }, vec![value]),
        };
        self.wide[value.index()] = Some(wide);
        wide
    }

    /// Of a node that looks something up: the first id, how many there are, and which operand holds
    /// the ids.
    #[expect(clippy::wildcard_enum_match_arm, reason = "other ops look nothing up")]
    fn look_up(&self, node: &Node) -> Option<(i64, Dim, usize)> {
        let size = |at: usize, dim: usize| self.function.ty(node.operands[at]).dims[dim].clone();
        match &node.op {
            Op::Gather { dim, start } | Op::Scatter { dim, start } => {
                Some((*start, size(0, *dim), 1))
            }
            Op::ScatterAdd { start, size, .. } => Some((*start, size.clone(), 0)),
            _ => None,
        }
    }

    /// Ids as integers of 32 bits. Those outside of the table become the ones beside it.
    fn id(&mut self, ids: ValueId, start: i64, rows: &Dim) -> ValueId {
        let dtype = self.function.ty(ids).dtype;
        if !matches!(dtype, DType::I64 | DType::U32) {
            return ids;
        }
        let limits = Range::new(i32::MIN, i32::MAX);
        let here = self.ranges[ids.index()];
        let to = DType::I32;
        if here.is_some_and(|here| here.is_within(limits)) {
            return self.made(ids, to, Op::Cast { dtype: to }, vec![ids]);
        }
        let end = rows.as_constant().and_then(|rows| start.checked_add(rows));
        let beside = start.checked_sub(1).zip(end);
        let Some((before, end)) = beside.filter(|(a, b)| Range::new(*a, *b).is_within(limits))
        else {
            return ids;
        };
        let dims = self.function.ty(ids).dims.clone();
        let dtype = DType::I64;
        let mut x = ids;
        if self.function.ty(ids).dtype != dtype {
            x = self.made(ids, dtype, Op::Cast { dtype }, vec![ids]);
        }
        for (how, bound) in [(Binary::Max, before), (Binary::Min, end)] {
            let op = Op::Constant { value: bound as f64, dtype, dims: dims.clone() };
            let bound = self.made(ids, dtype, op, Vec::new());
            x = self.made(ids, dtype, Op::Binary(how), vec![x, bound]);
        }
        self.made(ids, to, Op::Cast { dtype: to }, vec![x])
    }
}

/// The operands that have the element type of the result, or of each other.
fn tied_operands(node: &Node) -> Vec<usize> {
    match &node.op {
        // Each of these has a type of its own.
        Op::Constant { .. }
        | Op::Iota { .. }
        | Op::Random { .. }
        | Op::FoldKey { .. }
        | Op::Cast { .. }
        | Op::Sort { .. }
        | Op::TopK { .. }
        | Op::ArgMax { .. } => Vec::new(),
        Op::Select => vec![1, 2],
        // Ids and positions apart.
        Op::Gather { .. } | Op::DynamicSlice { .. } => vec![0],
        Op::ScatterAdd { .. } => vec![1],
        Op::DynamicUpdateSlice { .. } => vec![0, 1],
        Op::Scatter { .. } => vec![0, 2],
        Op::Unary(_)
        | Op::Binary(_)
        | Op::Compare(_)
        | Op::Contract(_)
        | Op::ScaledContract { .. }
        | Op::Conv(_)
        | Op::Reduce { .. }
        | Op::Prod { .. }
        | Op::Cumulative { .. }
        | Op::Reshape { .. }
        | Op::Transpose { .. }
        | Op::Broadcast { .. }
        | Op::Slice { .. }
        | Op::Pad { .. }
        | Op::Reverse { .. }
        | Op::Window(_)
        | Op::Fold { .. }
        | Op::Concat { .. }
        | Op::Call { .. }
        | Op::Collective { .. } => (0..node.operands.len()).collect(),
    }
}
