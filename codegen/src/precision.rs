//! What a kernel computes in: binary32, binary64 where that alone keeps every bit, or integers of
//! 64 bits.
//!
//! Values of f32 are computed in binary32, each with its own rounding, and never beside others of
//! f64. Integers of 32 bits are computed in binary64, which holds them, or beside those of 64 bits;
//! only those that are known to be small, made of counters and constants, are computed beside f32.
//! Sums and extremes of integers are computed in integers of 64 bits.

use ir::op::{Binary, Unary};
use ir::{DType, Function, Node, Op, ValueId};

use crate::leaf::is_leaf;

/// The integers up to this are numbers of binary32.
const SMALL: f64 = 16_777_216.0;

/// What a node computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// It is the same in all.
    Any,
    Single,
    /// Integers of 32 bits: it is the same in the next two.
    Wide,
    Double,
    /// Integers of 64 bits.
    Whole,
}

/// The type in which nodes can be computed together; none where they need several. O(nodes).
pub(crate) fn compute_dtype(
    function: &Function,
    nodes: impl IntoIterator<Item = usize>,
) -> Option<DType> {
    let mut bounds = Bounds::of(function);
    let mut needs = nodes.into_iter().map(|at| bounds.need(&function.nodes[at]));
    Some(match needs.try_fold(Need::Any, together)? {
        Need::Any | Need::Single => DType::F32,
        Need::Wide | Need::Double => DType::F64,
        Need::Whole => DType::I64,
    })
}

/// What two nodes are computed in together; none where they need several types.
pub(crate) fn together(a: Need, b: Need) -> Option<Need> {
    match (a, b) {
        (Need::Any, other) | (other, Need::Any) => Some(other),
        (Need::Wide, other @ (Need::Double | Need::Whole))
        | (other @ (Need::Double | Need::Whole), Need::Wide) => Some(other),
        (a, b) => (a == b).then_some(a),
    }
}

/// The least and the largest integer that leaves hold.
pub(crate) struct Bounds<'f> {
    function: &'f Function,
    /// Found when they are asked for.
    producers: Option<Vec<Option<usize>>>,
}

impl<'f> Bounds<'f> {
    pub(crate) fn of(function: &'f Function) -> Bounds<'f> {
        Bounds { function, producers: None }
    }

    /// What a node is computed in.
    pub(crate) fn need(&mut self, node: &Node) -> Need {
        let function = self.function;
        let mut types =
            node.operands.iter().chain(&node.results).map(|value| function.ty(*value).dtype);
        if types.clone().any(|dtype| dtype == DType::F64) {
            return Need::Double;
        }
        if types.clone().any(DType::is_float) {
            return Need::Single;
        }
        let result = function.ty(node.results[0]).dtype;
        let sums = matches!(node.op, Op::Reduce { .. }) && result != DType::Bool;
        if sums || types.clone().any(|dtype| dtype == DType::I64) {
            return Need::Whole;
        }
        if types.all(|dtype| dtype == DType::Bool) {
            return Need::Any;
        }
        let mut is_small = |value: &ValueId| is_small(self.range(*value));
        let is_exact = if matches!(node.op, Op::Compare(_)) {
            // Rounding keeps the order of any number and one that no other is rounded to.
            node.operands.iter().any(|value| is_apart(self.range(*value)))
        } else {
            node.operands.iter().all(&mut is_small)
                && self.unwrapped(node).is_none_or(|bounds| {
                    let (lowest, highest) = range_of(function.ty(node.result()).dtype);
                    self::is_small(bounds) && lowest <= bounds.0 && bounds.1 <= highest
                })
        };
        if is_exact { Need::Any } else { Need::Wide }
    }

    /// The bounds of a leaf, or of all numbers of a value's type.
    pub(crate) fn range(&mut self, value: ValueId) -> (f64, f64) {
        let function = self.function;
        let ty = function.ty(value);
        let all = range_of(ty.dtype);
        let producers = self.producers.get_or_insert_with(|| function.producers());
        let Some(node) = producers[value.index()].map(|at| &function.nodes[at]) else { return all };
        if !is_leaf(&node.op) {
            return all;
        }
        #[expect(clippy::wildcard_enum_match_arm, reason = "draws are no integers")]
        let (low, high) = match &node.op {
            Op::Constant { value, .. } => (value.trunc(), value.trunc()),
            Op::Iota { dim, start, .. } => {
                let size = ty.dims[*dim].as_constant().unwrap_or(i64::MAX / 2);
                (*start as f64, (*start + size.max(1) - 1) as f64)
            }
            Op::Broadcast { .. } => self.range(node.operands[0]),
            _ => all,
        };
        if all.0 <= low && high <= all.1 { (low, high) } else { all }
    }

    /// The bounds of a function of one integer, or of a sum, a difference or a product of two,
    /// before it wraps.
    pub(crate) fn unwrapped(&mut self, node: &Node) -> Option<(f64, f64)> {
        if let Op::Unary(how) = node.op {
            let (low, high) = self.range(node.operands[0]);
            let least = if how == Unary::Neg { -high } else { low.max(-high).max(0.0) };
            return Some((least, high.max(-low)));
        }
        let Op::Binary(how @ (Binary::Add | Binary::Sub | Binary::Mul)) = node.op else {
            return None;
        };
        let [(a, b), (c, d)] = [0, 1].map(|at| self.range(node.operands[at]));
        let ends = match how {
            Binary::Sub => [a - d, b - c, a - d, b - c],
            Binary::Mul => [a * c, a * d, b * c, b * d],
            Binary::Add | Binary::Div | Binary::Max | Binary::Min | Binary::Pow => {
                [a + c, b + d, a + c, b + d]
            }
        };
        let ends = ends.into_iter();
        Some((ends.clone().fold(f64::INFINITY, f64::min), ends.fold(f64::NEG_INFINITY, f64::max)))
    }
}

/// Whether no other integers are rounded to these.
fn is_apart((low, high): (f64, f64)) -> bool {
    low > -SMALL && high < SMALL
}

fn is_small((low, high): (f64, f64)) -> bool {
    low >= -SMALL && high <= SMALL
}

/// The least and the largest number of a type.
pub(crate) fn range_of(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::Bool => (0.0, 1.0),
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::U32 => (0.0, u32::MAX.into()),
        DType::I64 => (i64::MIN as f64, i64::MAX as f64),
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => {
            (f64::NEG_INFINITY, f64::INFINITY)
        }
    }
}
