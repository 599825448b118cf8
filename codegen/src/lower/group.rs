//! Horizontal merging: products that wait for nothing but what is there already are one launch.
//!
//! Queries, keys and values, a gate and what it gates, and of a product's two gradients both read
//! one operand: it is passed once, and all threads share the tasks of all. Merging happens after
//! the cut over ranks, so that it takes no sharding away, and each result keeps the bits that it
//! has alone.

use ir::{Function, Op};

/// The most products of one launch. Chosen: the gradients of queries, keys and values are six.
const PARTS_MAX: usize = 8;

/// When a node is computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// At its place.
    Alone,
    /// At its place, with others that come later: these, the node first.
    Together(Vec<usize>),
    /// With an earlier one.
    Done,
}

/// For each node, when it is computed. A product joins the first one before which its operands are
/// there. O(nodes × products).
pub(super) fn turns(function: &Function) -> Vec<Turn> {
    let producers = function.producers();
    let nodes = &function.nodes;
    let products: Vec<usize> =
        (0..nodes.len()).filter(|at| matches!(nodes[*at].op, Op::Contract(_))).collect();
    let dtype = |at: usize| function.ty(nodes[at].result()).dtype;
    let mut turns = vec![Turn::Alone; nodes.len()];
    for (rank, first) in products.iter().enumerate() {
        if turns[*first] == Turn::Done {
            continue;
        }
        let is_ready = |at: &usize| {
            let mut made = nodes[*at].operands.iter().filter_map(|o| producers[o.index()]);
            made.all(|producer| producer < *first)
        };
        let later = products[rank + 1..].iter().copied();
        let joins =
            |at: &usize| turns[*at] == Turn::Alone && dtype(*at) == dtype(*first) && is_ready(at);
        let others: Vec<usize> = later.filter(joins).take(PARTS_MAX - 1).collect();
        if others.is_empty() {
            continue;
        }
        others.iter().for_each(|at| turns[*at] = Turn::Done);
        turns[*first] = Turn::Together([vec![*first], others].concat());
    }
    turns
}
