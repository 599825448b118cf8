//! Pools: windows of which only one number each is wanted.
//!
//! `w = window x`, `y = reduce w` along the windows is one launch that reads `x`, where nothing
//! else reads `w`: the windows, which repeat what they share, are not stored.

use std::collections::BTreeMap;

use ir::op::{Combiner, Op, Windows};
use ir::{DType, Function, Node};

/// A reduction of windows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pool {
    /// The node of the windows.
    pub(crate) from: usize,
    pub(crate) windows: Windows,
    pub(crate) combiner: Combiner,
}

/// The pools of a function, by the node of the reduction.
///
/// O(nodes + operands).
pub(crate) fn pools(function: &Function) -> BTreeMap<usize, Pool> {
    let producers = function.producers();
    let mut readers = vec![0_usize; function.values.len()];
    for value in function.nodes.iter().flat_map(|node| &node.operands).chain(&function.results) {
        readers[value.index()] += 1;
    }
    let pool = |(at, node): (usize, &Node)| {
        let Op::Reduce { combiner, dims } = &node.op else { return None };
        let value = node.operands[0];
        let from = producers[value.index()]?;
        let Op::Window(windows) = function.nodes[from].op else { return None };
        let counts = matches!(
            function.ty(value).dtype,
            DType::F32 | DType::F64 | DType::I32 | DType::U32 | DType::I64
        );
        let is_it = counts && readers[value.index()] == 1 && dims[..] == [windows.dim + 1];
        is_it.then_some((at, Pool { from, windows, combiner: *combiner }))
    };
    function.nodes.iter().enumerate().filter_map(pool).collect()
}
