//! Horizontal merging: products that wait for nothing but what is there already are one launch.
//!
//! Queries, keys and values, a gate and what it gates, and of a product's two gradients both read
//! one operand: it is passed once, and all threads share the tasks of all. Merging happens after
//! the cut over ranks, so that it takes no sharding away, and each result keeps the bits that it
//! has alone.

use ir::{Function, Op};

use crate::epilogue::{Epilogue, absorbed, epilogues};

/// The most products of one launch. Chosen: the gradients of queries, keys and values are six.
const PARTS_MAX: usize = 8;

/// When a node is computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// At its place, by itself.
    Alone,
    /// At its place, with what is added to it, and with other products that come later.
    Together(Vec<Epilogue>),
    /// With another one.
    Done,
}

/// For each node, when it is computed. A product joins the first one before which its operands are
/// there. O(nodes × products).
pub(super) fn turns(function: &Function) -> Vec<Turn> {
    let (producers, nodes) = (function.producers(), &function.nodes);
    let mut items = epilogues(function);
    let absorbed = absorbed(function, &items);
    for (product, node) in nodes.iter().enumerate() {
        if matches!(node.op, Op::Contract(_)) && !absorbed.contains(&product) {
            items.insert(product, Epilogue::none(product));
        }
    }
    let is_absorbed = |at: usize| if absorbed.contains(&at) { Turn::Done } else { Turn::Alone };
    let mut turns: Vec<Turn> = (0..nodes.len()).map(is_absorbed).collect();
    let dtype = |item: &Epilogue| function.ty(nodes[item.product].result()).dtype;
    let mut waiting: Vec<(usize, Epilogue)> = items.into_iter().collect();
    while !waiting.is_empty() {
        let (place, first) = waiting.remove(0);
        let is_ready = |item: &Epilogue| {
            let read =
                nodes[item.product].operands.iter().copied().chain(item.bias).chain(item.addend);
            let mut made = read.filter_map(|value| producers[value.index()]);
            made.all(|producer| producer < place)
        };
        let mut members = vec![first.clone()];
        waiting.retain(|(at, item)| {
            let joins = members.len() < PARTS_MAX && dtype(item) == dtype(&first) && is_ready(item);
            if joins {
                members.push(item.clone());
                turns[*at] = Turn::Done;
            }
            !joins
        });
        if members.len() > 1 || !first.adds.is_empty() {
            turns[place] = Turn::Together(members);
        }
    }
    turns
}
