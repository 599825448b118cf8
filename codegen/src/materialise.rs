//! Leaves that are stored: where no kernel can compute them at the points of their readers.
//!
//! [`fuse`](crate::fuse) computes constants, counters and broadcasts again in every group that
//! reads them. A broadcast whose elements are not evenly spaced along a row, or one of another
//! leaf, has no place in a row; a view of the same dims before its reader, which costs nothing,
//! makes it a buffer.

use ir::{Function, Module, Node, Op, Value, ValueId};

use crate::domain::{Domain, Sites};
use crate::fuse::is_fusible;

/// Puts views between fusible nodes that fit no domain and the leaves that they read, as few as
/// make them fit.
///
/// Keeps results and their types. O(nodes × operands) where all fit.
pub fn store_unfit_leaves(function: &mut Function, module: &Module) {
    let sites = Sites::new(function);
    let is_unfit = |at: &usize| {
        is_fusible(&function.nodes[*at], function, module) && sites.domain(&[*at]).is_none()
    };
    let unfit: Vec<usize> = (0..function.nodes.len()).filter(is_unfit).collect();
    let mut views = 0;
    for at in unfit {
        views += store_operands(function, at + views);
    }
}

/// Stores leaves among the operands of a node until it fits a domain; how many views that took.
fn store_operands(function: &mut Function, at: usize) -> usize {
    let mut views = 0;
    let operands = function.nodes[at].operands.clone();
    for operand in operands {
        if Domain::of(function, &[at + views]).is_some() {
            break;
        }
        let producer = function.producers()[operand.index()];
        let op = producer.map(|producer| &function.nodes[producer].op);
        if matches!(op, Some(Op::Broadcast { .. } | Op::Iota { .. })) {
            store(function, at + views, operand);
            views += 1;
        }
    }
    views
}

/// Puts a view of a value before a node that reads it.
fn store(function: &mut Function, at: usize, operand: ValueId) {
    let Value { name, ty, .. } = function.value(operand).clone();
    let view = ValueId(function.values.len() as u32);
    let op = Op::Reshape { dims: ty.dims.clone() };
    function.values.push(Value::new(format!("{name}.stored"), ty));
    for read in &mut function.nodes[at].operands {
        if *read == operand {
            *read = view;
        }
    }
    function.nodes.insert(at, Node { op, operands: vec![operand], results: vec![view] });
}
