//! Dims that are cut together: those that a factor of some node indexes.

use ir::factors::Factor;
use ir::{Function, Node, ValueId};

/// The dims of all values of a function in classes, and which of the classes are meant.
pub(super) struct Together {
    /// For each value, the number of its first dim.
    first: Vec<usize>,
    /// For each dim, another one of its class; itself for the one that stands for the class.
    parent: Vec<usize>,
    meant: Vec<usize>,
}

impl Together {
    /// The classes that the factors of the nodes make.
    pub(super) fn of<'f>(
        function: &'f Function,
        factors: impl Fn(&'f Node) -> Vec<Factor>,
    ) -> Together {
        let mut first = Vec::with_capacity(function.values.len());
        let mut count = 0;
        for value in &function.values {
            first.push(count);
            count += value.ty.ndim();
        }
        let mut all = Together { first, parent: (0..count).collect(), meant: Vec::new() };
        for node in &function.nodes {
            for factor in factors(node) {
                let mut places = places(node, &factor);
                let Some(one) = places.next() else { continue };
                places.for_each(|other| all.join(one, other));
            }
        }
        all
    }

    fn number(&self, (value, dim): (ValueId, usize)) -> usize {
        self.first[value.index()] + dim
    }

    fn root(&self, mut at: usize) -> usize {
        while self.parent[at] != at {
            at = self.parent[at];
        }
        at
    }

    /// Joins the classes of two dims.
    pub(super) fn join(&mut self, one: (ValueId, usize), other: (ValueId, usize)) {
        let (one, other) = (self.root(self.number(one)), self.root(self.number(other)));
        self.parent[one.max(other)] = one.min(other);
    }

    /// Means the class of a dim.
    pub(super) fn mean(&mut self, place: (ValueId, usize)) {
        self.meant.push(self.number(place));
    }

    /// For each value, its first dim of a class that is meant.
    pub(super) fn dims(&self, function: &Function) -> Vec<Option<usize>> {
        let meant: Vec<usize> = self.meant.iter().map(|at| self.root(*at)).collect();
        let values = function.values.iter().zip(&self.first);
        let dim = |(value, first): (&ir::Value, &usize)| {
            (0..value.ty.ndim()).find(|dim| meant.contains(&self.root(first + dim)))
        };
        values.map(dim).collect()
    }
}

/// The dims that a factor cuts of the operands and results of a node.
pub(super) fn places(node: &Node, factor: &Factor) -> impl Iterator<Item = (ValueId, usize)> {
    let values = node.operands.iter().chain(&node.results).copied();
    let layouts = factor.operands.iter().chain(&factor.results);
    values.zip(layouts).filter_map(|(value, layout)| Some((value, layout.cut_dim()?)))
}
