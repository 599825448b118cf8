//! Classes of ops, for the tables that treat whole groups of ops alike.
//!
//! A table that asks the same of all views asks for the class; a new op then joins them in one
//! place, here.

use crate::dim::Dim;
use crate::op::{Binary, Comparison, Op};

/// A group of ops that most tables treat alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Makes a value of its attributes, or of a key.
    Source,
    /// One result element from the operands' elements at the same index.
    Elementwise,
    /// Sums products: what matrix units compute.
    Product,
    /// Fewer elements than its operand, each of many.
    Reduction,
    /// Elements that depend on all others along a dim: running sums, orders.
    Scan,
    /// Moves elements of one operand to places that the attributes say, or fills with zeros; a
    /// linear map, term by term.
    View,
    /// Puts operands side by side.
    Join,
    /// Reads or writes where an operand says.
    Indexed,
    /// A function of the module.
    Call,
    /// An exchange with other ranks.
    Collective,
}

/// The sizes of its result that an op states itself.
#[derive(Debug)]
pub enum Stated<'o> {
    /// None: they follow from the operands.
    Nothing,
    /// All dims.
    All(&'o mut Vec<Dim>),
    /// One of them.
    One {
        /// Which dim of the result.
        dim: usize,
        /// Its size.
        size: &'o mut Dim,
    },
}

impl Op {
    /// The group that the op belongs to.
    pub fn class(&self) -> Class {
        match self {
            Op::Constant { .. } | Op::Iota { .. } | Op::Random { .. } | Op::FoldKey { .. } => {
                Class::Source
            }
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast { .. } => {
                Class::Elementwise
            }
            Op::Cumulative { .. } | Op::Sort { .. } | Op::TopK { .. } => Class::Scan,
            Op::Contract(_) | Op::ScaledContract { .. } | Op::Conv(_) => Class::Product,
            Op::Reduce { .. } | Op::Prod { .. } | Op::ArgMax { .. } => Class::Reduction,
            Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::Broadcast { .. }
            | Op::Slice { .. }
            | Op::Pad { .. }
            | Op::Reverse { .. }
            | Op::Window(_)
            | Op::Fold { .. } => Class::View,
            Op::Concat { .. } => Class::Join,
            Op::Gather { .. }
            | Op::ScatterAdd { .. }
            | Op::Scatter { .. }
            | Op::DynamicUpdateSlice { .. }
            | Op::DynamicSlice { .. } => Class::Indexed,
            Op::Call { .. } => Class::Call,
            Op::Collective { .. } => Class::Collective,
        }
    }

    /// The sizes of the result that stand in the op, to be replaced by others.
    pub fn stated_sizes(&mut self) -> Stated<'_> {
        match self {
            Op::Constant { dims, .. }
            | Op::Iota { dims, .. }
            | Op::Random { dims, .. }
            | Op::Reshape { dims }
            | Op::Broadcast { dims, .. } => Stated::All(dims),
            Op::ScatterAdd { dim, size, .. } | Op::DynamicSlice { dim, size } => {
                Stated::One { dim: *dim, size }
            }
            Op::FoldKey { .. }
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Compare(_)
            | Op::Select
            | Op::Cast { .. }
            | Op::Contract(_)
            | Op::ScaledContract { .. }
            | Op::Conv(_)
            | Op::Reduce { .. }
            | Op::Prod { .. }
            | Op::ArgMax { .. }
            | Op::Cumulative { .. }
            | Op::Sort { .. }
            | Op::TopK { .. }
            | Op::Transpose { .. }
            | Op::Slice { .. }
            | Op::Pad { .. }
            | Op::Reverse { .. }
            | Op::Window(_)
            | Op::Fold { .. }
            | Op::Concat { .. }
            | Op::Gather { .. }
            | Op::Scatter { .. }
            | Op::DynamicUpdateSlice { .. }
            | Op::Call { .. }
            | Op::Collective { .. } => Stated::Nothing,
        }
    }

    /// Whether its two operands may change places without changing a bit.
    pub fn is_commutative(&self) -> bool {
        matches!(
            self,
            Op::Binary(Binary::Add | Binary::Mul | Binary::Max | Binary::Min)
                | Op::Compare(Comparison::Eq)
        )
    }
}
