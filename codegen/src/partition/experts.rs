//! Nodes that compute with experts which ranks share, and what these ranks exchange: tokens are
//! gathered, a rank computes the terms of its experts, and their sums are scattered. Gates go
//! all-to-all: a rank gets those of its experts, of all tokens.

use ir::factors::{Factor, factors};
use ir::op::{Collective, Op};
use ir::{Axis, Dim, Layout, Node, ValueId};

use super::{EP, Partition};

impl Partition<'_> {
    /// Of a node that computes with experts which ranks share, the factor that these are: a rank
    /// computes with the tokens of all of them.
    pub(super) fn experts_of_rank(
        &self,
        node: &Node,
        all: &[Factor],
        operands: &[Layout],
    ) -> Option<usize> {
        let ordinary = factors(node, self.global, self.module).len();
        let lies =
            |(layout, wanted): (&Layout, &Layout)| layout.cut_dim().is_some() && layout == wanted;
        let is_theirs = |at: &usize| operands.iter().zip(&all[*at].operands).any(lies);
        (ordinary..all.len()).find(is_theirs)
    }

    /// What ranks of `ep` have of a value whose dim `join` was cut over them, cut along dim `split`
    /// instead.
    pub(super) fn all_to_all(
        &mut self,
        name: &str,
        local: ValueId,
        [split, join]: [usize; 2],
    ) -> ValueId {
        let pieces = self.place.sizes[EP];
        let moved = |from: usize, to: usize, ndim: usize| -> Vec<usize> {
            let mut perm: Vec<usize> = (0..ndim).collect();
            let dim = perm.remove(from);
            perm.insert(to, dim);
            perm
        };
        let mut dims = self.builder.ty(local).dims.clone();
        let ndim = dims.len() + 1;
        dims[split] = dims[split].divide(pieces as i64).unwrap_or_else(|| dims[split].clone());
        dims.insert(split, Dim::from(pieces));
        let mut step = |suffix: &str, op: Op, operand: ValueId| {
            self.builder.push(&format!("{name}.{suffix}"), op, &[operand])
        };
        let mut value = step("pieces", Op::Reshape { dims }, local);
        if split > 0 {
            value = step("outer", Op::Transpose { perm: moved(split, 0, ndim) }, value);
        }
        let (kind, axis) = (Collective::AllToAll { pieces }, Axis::Ep.name().to_owned());
        value = step("all_to_all", Op::Collective { kind, axis }, value);
        if join > 0 {
            value = step("inner", Op::Transpose { perm: moved(0, join, ndim) }, value);
        }
        let mut dims = self.builder.ty(value).dims.clone();
        let outer = dims.remove(join);
        dims[join] = &outer * &dims[join];
        self.builder.push(&format!("{name}.joined"), Op::Reshape { dims }, &[value])
    }
}
