//! Epilogues: a bias and a residual that a product adds to its result before it is written.
//!
//! `y = a · b`, `z = y + bias`, `r = z + x` are one launch where `y` and `z` are read by nothing
//! else: what is added is added last and in this order, so that every bit is that of three
//! launches.
//! A residual has to be there as a buffer: it is a parameter or another such result.

use std::collections::{BTreeMap, BTreeSet};

use ir::op::{Binary, Einsum};
use ir::{Function, Node, Op, ValueId};

use crate::leaf::is_leaf;

/// A product and what is added to its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Epilogue {
    /// The node of the product.
    pub(crate) product: usize,
    /// One element for each column of the product.
    pub(crate) bias: Option<ValueId>,
    /// One element for each element of the result.
    pub(crate) addend: Option<ValueId>,
    /// The nodes that add, the one of the result last.
    pub(crate) adds: Vec<usize>,
}

impl Epilogue {
    /// A product to which nothing is added.
    pub(crate) fn none(product: usize) -> Epilogue {
        Epilogue { product, bias: None, addend: None, adds: Vec::new() }
    }

    /// The node that makes the result.
    pub(crate) fn last(&self) -> usize {
        self.adds.last().copied().unwrap_or(self.product)
    }
}

/// The products of a function to whose results something is added, by their last node.
///
/// O(nodes + operands).
pub(crate) fn epilogues(function: &Function) -> BTreeMap<usize, Epilogue> {
    let uses = Uses::new(function);
    let mut found = BTreeMap::new();
    let mut sums = BTreeSet::new();
    for (product, node) in function.nodes.iter().enumerate() {
        let (Op::Contract(einsum) | Op::ScaledContract { einsum, .. }) = &node.op else { continue };
        // A launch of several products, and what is added to one, is of floating-point numbers.
        if !function.ty(node.result()).dtype.is_float() {
            continue;
        }
        let mut epilogue = Epilogue::none(product);
        let mut result = node.result();
        while let Some((at, other)) = uses.only_add(result) {
            let bias = uses.bias(einsum, other);
            if bias.is_some() && epilogue.adds.is_empty() {
                epilogue.bias = bias;
            } else if epilogue.addend.is_none() && uses.is_buffer(other, result, &sums) {
                epilogue.addend = Some(other);
            } else {
                break;
            }
            epilogue.adds.push(at);
            result = function.nodes[at].result();
        }
        if !epilogue.adds.is_empty() {
            sums.insert(result);
            found.insert(epilogue.last(), epilogue);
        }
    }
    found
}

/// The nodes that epilogues compute, and broadcasts that they alone read, as biases: as a factor
/// of a product, one has to be written.
pub(crate) fn absorbed(
    function: &Function,
    epilogues: &BTreeMap<usize, Epilogue>,
) -> BTreeSet<usize> {
    let of = |e: &Epilogue| [vec![e.product], e.adds.clone()].concat();
    let mut nodes: BTreeSet<usize> = epilogues.values().flat_map(of).collect();
    let uses = Uses::new(function);
    let biases: BTreeMap<usize, ValueId> =
        epilogues.values().filter_map(|e| Some((*e.adds.first()?, e.bias?))).collect();
    for (at, node) in function.nodes.iter().enumerate() {
        if let Op::Broadcast { .. } = node.op {
            let readers = &uses.readers[node.result().index()];
            let is_result = function.results.contains(&node.result());
            if !readers.is_empty()
                && !is_result
                && readers.iter().all(|r| biases.get(r) == node.operands.first())
            {
                nodes.insert(at);
            }
        }
    }
    nodes
}

/// Who makes and who reads each value.
struct Uses<'f> {
    function: &'f Function,
    producers: Vec<Option<usize>>,
    readers: Vec<Vec<usize>>,
}

impl Uses<'_> {
    fn new(function: &Function) -> Uses<'_> {
        let mut readers = vec![Vec::new(); function.values.len()];
        for (at, node) in function.nodes.iter().enumerate() {
            for operand in &node.operands {
                readers[operand.index()].push(at);
            }
        }
        Uses { function, producers: function.producers(), readers }
    }

    fn producer(&self, value: ValueId) -> Option<&Node> {
        self.producers[value.index()].map(|at| &self.function.nodes[at])
    }

    /// The addition that alone reads a value, and its other operand.
    fn only_add(&self, value: ValueId) -> Option<(usize, ValueId)> {
        let [at] = self.readers[value.index()][..] else { return None };
        let node = &self.function.nodes[at];
        let is_alone = !self.function.results.contains(&value);
        let adds = matches!(node.op, Op::Binary(Binary::Add)) && is_alone;
        let other = node.operands.iter().copied().find(|o| *o != value);
        other.filter(|_| adds).map(|other| (at, other))
    }

    /// What a value repeats along all dims of a product's result but its columns.
    fn bias(&self, einsum: &Einsum, value: ValueId) -> Option<ValueId> {
        let node = self.producer(value)?;
        let Op::Broadcast { new, .. } = &node.op else { return None };
        let is_column = |letter: &char| einsum.b.contains(letter) && !einsum.a.contains(letter);
        let columns = einsum.result.iter().map(is_column);
        let fits = columns.enumerate().all(|(dim, is_column)| is_column != new.contains(&dim));
        let source = node.operands[0];
        let is_leaf = self.producer(source).is_some_and(|n| is_leaf(&n.op));
        (fits && !is_leaf).then_some(source)
    }

    /// Whether a value lies in memory anyway, as large as another one.
    fn is_buffer(&self, value: ValueId, as_large_as: ValueId, sums: &BTreeSet<ValueId>) -> bool {
        let is_there = value.index() < self.function.param_count || sums.contains(&value);
        is_there && self.function.ty(value) == self.function.ty(as_large_as)
    }
}
