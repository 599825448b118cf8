//! What is known of a class: the types of its values, numbers, and what they depend on.

use egg::{Analysis, DidMerge, Id};

use super::term::{Graph, Head, Ops, Term};
use crate::dim::Bindings;
use crate::dtype::DType;
use crate::eval::eval_op;
use crate::infer::infer;
use crate::module::Module;
use crate::op::{Binary, Combiner, Op, Unary};
use crate::tensor::{Data, Tensor};
use crate::types::TensorType;

/// The ops and types that the terms of a graph refer to.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The ops.
    pub ops: Ops,
    /// The types of the function's parameters.
    pub params: Vec<TensorType>,
    /// What calls may call: the functions above, and instances of composites that rules add.
    pub module: Module,
}

/// What holds for every term of a class.
#[derive(Clone, Debug, PartialEq)]
pub struct Fact {
    /// The types: one, or those of a call's results.
    pub types: Vec<TensorType>,
    /// Whether it is the tuple of a call's results.
    pub is_tuple: bool,
    /// The number that all elements are, to the bit.
    pub constant: Option<f64>,
    /// No element is less; NaN may be among them all the same.
    pub low: f64,
    /// No element is greater.
    pub high: f64,
    /// Whether it depends on no parameter: a table, which may be recomputed anywhere.
    pub is_table: bool,
}

impl Fact {
    /// The type of a class that is no tuple.
    pub fn ty(&self) -> &TensorType {
        &self.types[0]
    }
}

impl Analysis<Term> for Facts {
    type Data = Fact;

    fn make(graph: &mut Graph, term: &Term, _: Id) -> Fact {
        fact(graph, term)
    }

    fn merge(&mut self, a: &mut Fact, b: Fact) -> DidMerge {
        assert!(
            a.types == b.types && a.is_tuple == b.is_tuple,
            "equal terms have equal types, {:?} and {:?} differ",
            a.types,
            b.types
        );
        let merged = Fact {
            types: b.types.clone(),
            is_tuple: b.is_tuple,
            constant: a.constant.or(b.constant),
            low: a.low.max(b.low),
            high: a.high.min(b.high),
            is_table: a.is_table || b.is_table,
        };
        let did = DidMerge(merged != *a, merged != b);
        *a = merged;
        did
    }

    fn modify(graph: &mut Graph, id: Id) {
        let fact = &graph[id].data;
        let Some(value) = fact.constant.filter(|_| !fact.is_tuple) else { return };
        let TensorType { dtype, dims } = fact.ty().clone();
        let is_there = |term: &Term| term.operands.is_empty() && term.op().is_some();
        if graph[id].nodes.iter().any(is_there) {
            return;
        }
        let number = graph.analysis.ops.intern(&Op::Constant { value, dtype, dims });
        let constant = graph.add(Term { head: Head::Op("constant", number), operands: Vec::new() });
        graph.union(id, constant);
    }
}

fn fact(graph: &Graph, term: &Term) -> Fact {
    let operands: Vec<&Fact> = term.operands.iter().map(|id| &graph[*id].data).collect();
    let is_table = operands.iter().all(|o| o.is_table);
    let unknown = |types: Vec<TensorType>| Fact {
        types,
        is_tuple: false,
        constant: None,
        low: f64::NEG_INFINITY,
        high: f64::INFINITY,
        is_table,
    };
    match term.head {
        Head::Param(at) => {
            let ty = graph.analysis.params[at as usize].clone();
            Fact { is_table: false, ..unknown(vec![ty]) }
        }
        Head::Projection(at) => unknown(vec![operands[0].types[at as usize].clone()]),
        Head::Op(_, op) => {
            let op = graph.analysis.ops.get(op);
            let types: Vec<&TensorType> = operands.iter().map(|o| o.ty()).collect();
            let types = match infer(op, &types, &graph.analysis.module) {
                Ok(types) => types,
                Err(error) => panic!("a term is checked before it is added: {error}"),
            };
            let is_tuple = matches!(op, Op::Call { .. });
            let constant = if is_tuple { None } else { fold(op, &operands) };
            let (low, high) = match constant {
                Some(value) => (value, value),
                _ => range(op, &operands, types[0].dtype),
            };
            Fact { is_tuple, constant, low, high, ..unknown(types) }
        }
    }
}

/// The number that all elements of an op's result are, when it follows from those of the operands.
///
/// Sums are left out: their rounding depends on the number of terms.
#[expect(clippy::wildcard_enum_match_arm, reason = "nothing is known of other ops")]
fn fold(op: &Op, operands: &[&Fact]) -> Option<f64> {
    let constant = |at: usize| operands[at].constant;
    match op {
        Op::Constant { value, dtype, .. } => {
            let value = Tensor::filled(*dtype, &[], *value).scalar();
            (!value.is_nan()).then_some(value)
        }
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast { .. } => {
            let scalar = |o: &&Fact| Some(Tensor::filled(o.ty().dtype, &[], o.constant?));
            let scalars: Vec<Tensor> = operands.iter().map(scalar).collect::<Option<_>>()?;
            let scalars: Vec<&Tensor> = scalars.iter().collect();
            let made = eval_op(op, &scalars, &Bindings::new()).ok()?;
            let value = made.scalar();
            // A constant is a number of binary64, which some integers of 64 bits are not.
            let is_exact = match &made.data {
                Data::Int(numbers) => i128::from(numbers[0]) == value as i128,
                Data::F64(_) | Data::F32(_) | Data::Bool(_) => !value.is_nan(),
            };
            is_exact.then_some(value)
        }
        Op::Reshape { .. }
        | Op::Transpose { .. }
        | Op::Broadcast { .. }
        | Op::Slice { .. }
        | Op::DynamicSlice { .. } => constant(0),
        Op::Reduce { combiner: Combiner::Max | Combiner::Min, .. } => {
            let is_full = |dim: &crate::Dim| dim.as_constant().is_none_or(|size| size > 0);
            constant(0).filter(|_| operands[0].ty().dims.iter().all(is_full))
        }
        _ => None,
    }
}

/// Bounds of the elements, of a type; integers wrap where they leave it.
#[expect(clippy::wildcard_enum_match_arm, reason = "nothing is known of other ops")]
fn range(op: &Op, operands: &[&Fact], dtype: DType) -> (f64, f64) {
    let all = (f64::NEG_INFINITY, f64::INFINITY);
    let of = |at: usize| (operands[at].low, operands[at].high);
    match op {
        // The least integer has no positive twin: it is its own absolute value.
        Op::Unary(Unary::Abs) if !dtype.is_float() => all,
        Op::Unary(Unary::Exp | Unary::Abs | Unary::Sqrt | Unary::Rsqrt) => (0.0, f64::INFINITY),
        Op::Unary(Unary::Tanh | Unary::Erf | Unary::Sin | Unary::Cos) => (-1.0, 1.0),
        Op::Binary(how) => binary_range(*how, of(0), of(1), dtype),
        Op::Select => (of(1).0.min(of(2).0), of(1).1.max(of(2).1)),
        Op::Iota { dim, start, dims, .. } => {
            let size = dims[*dim].as_constant();
            let end = size.map(|size| *start as f64 + size as f64 - 1.0);
            unwrapped(dtype, (*start as f64, end.unwrap_or(f64::INFINITY)))
        }
        Op::Random { .. } => (0.0, 1.0),
        Op::Reshape { .. }
        | Op::Transpose { .. }
        | Op::Broadcast { .. }
        | Op::Slice { .. }
        | Op::DynamicSlice { .. } => of(0),
        _ => all,
    }
}

/// Sums of floats are rounded, so that only their sign is known.
fn binary_range(how: Binary, a: (f64, f64), b: (f64, f64), dtype: DType) -> (f64, f64) {
    let all = (f64::NEG_INFINITY, f64::INFINITY);
    let is_float = dtype.is_float();
    match how {
        Binary::Add if is_float && a.0 >= 0.0 && b.0 >= 0.0 => (0.0, f64::INFINITY),
        Binary::Add | Binary::Sub if is_float => all,
        Binary::Add => unwrapped(dtype, (a.0 + b.0, a.1 + b.1)),
        Binary::Sub => unwrapped(dtype, (a.0 - b.1, a.1 - b.0)),
        Binary::Max => (a.0.max(b.0), a.1.max(b.1)),
        Binary::Min => (a.0.min(b.0), a.1.min(b.1)),
        Binary::Mul | Binary::Div | Binary::Pow => all,
    }
}

/// The bounds of numbers before they are stored in a type: none where an integer of them wraps.
fn unwrapped(dtype: DType, (low, high): (f64, f64)) -> (f64, f64) {
    let (least, most) = match dtype {
        DType::I8 => (f64::from(i8::MIN), f64::from(i8::MAX)),
        DType::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
        DType::U32 => (0.0, f64::from(u32::MAX)),
        // Beyond them bounds are no longer whole numbers.
        DType::I64 => (-9e15, 9e15),
        DType::Bool => (0.0, 1.0),
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => {
            (f64::NEG_INFINITY, f64::INFINITY)
        }
    };
    match low >= least && high <= most {
        true => (low, high),
        false => (f64::NEG_INFINITY, f64::INFINITY),
    }
}
