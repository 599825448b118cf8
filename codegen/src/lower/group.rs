//! Horizontal merging: products that wait for nothing but what is there already are one launch.
//!
//! Queries, keys and values, a gate and what it gates, and of a product's two gradients both read
//! one operand: it is passed once, and all threads share the tasks of all. What a fused kernel
//! computes point by point of their results, such as an activation or the product of a gate and
//! what it gates, is computed by the same launch.
//! Merging happens after the cut over ranks, so that it takes no sharding away, and each result
//! keeps the bits that it has alone.

use std::collections::BTreeSet;

use ir::{Function, Kind, Module, Op, ValueId};
use kernels::Access;

use crate::domain::Domain;
use crate::epilogue::{Epilogue, absorbed, epilogues};
use crate::tile::{Tile, lower_pointwise};

/// The most products of one launch. Chosen: the gradients of queries, keys and values are six.
const PARTS_MAX: usize = 8;

/// When a node is computed.
#[derive(Clone, Debug)]
pub(super) enum Turn {
    /// At its place, by itself.
    Alone,
    /// At its place, with what is added to it, and with other products that come later.
    Together(Vec<Member>),
    /// With another one.
    Done,
}

/// A product of a launch.
#[derive(Clone, Debug)]
pub(super) struct Member {
    /// The product and what is added to it.
    pub(super) sum: Epilogue,
    /// The fused kernel that is computed of its result, and its program.
    pub(super) then: Option<(usize, Tile)>,
}

/// For each node, when it is computed. A product joins the first one before which its operands are
/// there. O(nodes × products).
pub(super) fn turns(function: &Function, module: &Module) -> Vec<Turn> {
    let nodes = &function.nodes;
    let mut items = epilogues(function);
    let absorbed = absorbed(function, &items);
    for (product, node) in nodes.iter().enumerate() {
        let is_product =
            matches!(node.op, Op::Contract(_) | Op::ScaledContract { .. } | Op::Conv(_))
                && function.ty(node.result()).dtype.is_float();
        if is_product && !absorbed.contains(&product) {
            items.insert(product, Epilogue::none(product));
        }
    }
    let is_absorbed = |at: usize| if absorbed.contains(&at) { Turn::Done } else { Turn::Alone };
    let mut turns: Vec<Turn> = (0..nodes.len()).map(is_absorbed).collect();
    let dtype = |item: &Epilogue| function.ty(nodes[item.product].result()).dtype;
    let mut programs =
        Programs { function, module, producers: function.producers(), done: BTreeSet::new() };
    let mut waiting: Vec<(usize, Epilogue)> = items.into_iter().collect();
    while !waiting.is_empty() {
        let (place, first) = waiting.remove(0);
        let is_ready = |item: &Epilogue| {
            let read =
                nodes[item.product].operands.iter().copied().chain(item.bias).chain(item.addend);
            programs.are_there(read, place)
        };
        let mut sums = vec![first.clone()];
        waiting.retain(|(at, item)| {
            let joins = sums.len() < PARTS_MAX && dtype(item) == dtype(&first) && is_ready(item);
            if joins {
                sums.push(item.clone());
                turns[*at] = Turn::Done;
            }
            !joins
        });
        let members = programs.attach(sums, place);
        for (node, _) in members.iter().filter_map(|member| member.then.as_ref()) {
            turns[*node] = Turn::Done;
        }
        let is_plain = |member: &Member| member.sum.adds.is_empty() && member.then.is_none();
        if members.len() > 1 || !members.iter().all(is_plain) {
            turns[place] = Turn::Together(members);
        }
    }
    turns
}

/// The fused kernels of a function that products compute.
struct Programs<'f> {
    function: &'f Function,
    module: &'f Module,
    producers: Vec<Option<usize>>,
    done: BTreeSet<usize>,
}

impl Programs<'_> {
    /// Whether values are parameters or made before a node.
    fn are_there(&self, values: impl Iterator<Item = ValueId>, place: usize) -> bool {
        values.filter_map(|value| self.producers[value.index()]).all(|producer| producer < place)
    }

    /// The products of a launch at `place`, with the fused kernels that are computed of their
    /// results. Those of one kernel follow each other, the kernel belongs to the last one.
    fn attach(&mut self, sums: Vec<Epilogue>, place: usize) -> Vec<Member> {
        let mut left: Vec<Option<Epilogue>> = sums.into_iter().map(Some).collect();
        let mut members = Vec::new();
        for node in 0..self.function.nodes.len() {
            if let Some((team, tile)) = self.team(node, &left, place) {
                self.done.insert(node);
                let sums: Vec<Epilogue> = team.iter().filter_map(|at| left[*at].take()).collect();
                members.extend(sums.into_iter().map(|sum| Member { sum, then: None }));
                if let Some(last) = members.last_mut() {
                    last.then = Some((node, tile));
                }
            }
        }
        members.extend(left.into_iter().flatten().map(|sum| Member { sum, then: None }));
        members
    }

    /// The products whose results a fused kernel reads, and its program on their blocks: if it
    /// reads any of those that are left, and nothing else that is not there yet.
    fn team(
        &self,
        node: usize,
        left: &[Option<Epilogue>],
        place: usize,
    ) -> Option<(Vec<usize>, Tile)> {
        let Function { nodes, .. } = self.function;
        let kernel = self.module.function(nodes[node].callee()?)?;
        if kernel.kind != Kind::Kernel || self.done.contains(&node) {
            return None;
        }
        let result = |sum: &Epilogue| nodes[sum.last()].result();
        let is_read = |sum: &Epilogue| nodes[node].operands.contains(&result(sum));
        let read = left.iter().enumerate().filter(|(_, sum)| sum.as_ref().is_some_and(is_read));
        let (team, sums): (Vec<usize>, Vec<&Epilogue>) =
            read.filter_map(|(at, sum)| Some((at, sum.as_ref()?))).unzip();
        let results: Vec<ValueId> = sums.iter().map(|sum| result(sum)).collect();
        let others = nodes[node].operands.iter().copied().filter(|o| !results.contains(o));
        if team.is_empty() || !self.are_there(others, place) {
            return None;
        }
        let mut domains = sums.iter().map(|sum| self.matrix(sum.product));
        let domain = domains.next()??;
        if !domains.all(|other| other.as_ref() == Some(&domain)) {
            return None;
        }
        let tile = lower_pointwise(kernel, self.module, &domain)?;
        let dtype = self.function.ty(results[0]).dtype;
        let whole = Access::full(tile.rows.rows, tile.rows.cols);
        let fits = tile.rows.inputs.iter().zip(&tile.inputs).all(|(input, param)| {
            let is_result = results.contains(&nodes[node].operands[param.index()]);
            input.dtype == dtype && (!is_result || input.access == whole)
        });
        (fits && tile.rows.dtype == dtype).then_some((team, tile))
    }

    /// The rows and columns of a product whose result is one matrix, rows first.
    fn matrix(&self, product: usize) -> Option<Domain> {
        let node = &self.function.nodes[product];
        let sizes = self.function.ty(node.result()).sizes()?;
        if let Op::Conv(c) = &node.op {
            // A row for each channel, of one sample and one group.
            let channels = |at: usize| {
                let ty = self.function.ty(node.operands[at]);
                c.orders[at].usual(&ty.dims).get(1).cloned()
            };
            let is_usual = c.orders[2].named().is_none();
            let is_matrix = is_usual && sizes.first() == Some(&1) && channels(0) == channels(1);
            return is_matrix.then_some(Domain { sizes, split: 2 });
        }
        let (Op::Contract(einsum) | Op::ScaledContract { einsum, .. }) = &node.op else {
            return None;
        };
        let sides = einsum.result.iter().map(|l| (einsum.a.contains(l), einsum.b.contains(l)));
        let sides: Vec<(bool, bool)> = sides.collect();
        let split = sides.iter().take_while(|side| **side == (true, false)).count();
        let is_matrix = sides[split..].iter().all(|side| *side == (false, true));
        is_matrix.then_some(Domain { sizes, split })
    }
}
