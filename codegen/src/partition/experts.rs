//! Nodes that compute with experts which ranks share, and what these ranks exchange: tokens are
//! dispatched to the experts that they have gates for, a rank computes the terms of its experts, and
//! these are combined where the tokens are. Gates go all-to-all: a rank gets those of its experts,
//! of all tokens.

use ir::factors::{Factor, factors};
use ir::op::{Collective, Op};
use ir::{Axis, Dim, Kind, Layout, Node, ValueId};

use super::{Choice, EP, Layouts, Partition, VALUE_AXES};

/// What tokens go by to the experts of other ranks.
pub(super) struct Routing {
    /// A gate for each token and expert.
    gates: ValueId,
    /// How ranks of `ep` hold those for their experts.
    theirs: Layout,
    /// Experts of a token.
    top_k: usize,
}

impl Partition<'_> {
    /// How a node routes tokens that computes with experts which ranks share: of its operands that
    /// are cut by experts, gates alone are made where tokens are.
    pub(super) fn routing(
        &self,
        node: &Node,
        all: &[Factor],
        choice: &Choice,
    ) -> Result<Option<Routing>, String> {
        let ordinary = factors(node, self.global, self.module).len();
        let Choice::Cut(at) = *choice else { return Ok(None) };
        let Some(factor) = all.get(at).filter(|_| at >= ordinary) else { return Ok(None) };
        for (operand, theirs) in node.operands.iter().zip(&factor.operands) {
            let lies = self.produced(*operand)?[EP];
            if theirs.cut_dim().is_some() && lies.cut_dim().is_some() && lies != *theirs {
                let top_k = self.attribute(node, "top_k")?;
                return Ok(Some(Routing { gates: *operand, theirs: *theirs, top_k }));
            }
        }
        Ok(None)
    }

    /// A whole number that a call of a composite says.
    fn attribute(&self, node: &Node, name: &str) -> Result<usize, String> {
        let callee = node.callee().and_then(|callee| self.module.function(callee));
        let value = match callee.map(|callee| &callee.kind) {
            Some(Kind::Composite { attributes, .. }) => attributes.get(name),
            _ => None,
        };
        let of = &self.global.value(node.results[0]).name;
        value.map(|value| *value as usize).ok_or_else(|| format!("`%{of}` has no `{name}`"))
    }

    /// An operand of a node that routes tokens: tokens are those of all ranks of `ep` with a gate
    /// for an expert of this one. Others of them have no numbers, so that nothing else has them.
    pub(super) fn dispatched(
        &mut self,
        value: ValueId,
        wanted: Layouts,
        routing: &Routing,
    ) -> Result<ValueId, String> {
        let mut layouts = self.produced(value)?;
        let is_brought = layouts[EP].cut_dim().is_some() && wanted[EP] == Layout::Replicated;
        if !is_brought {
            return self.shard(value, wanted);
        }
        let mut local = self.shard(value, layouts)?;
        let gates = self.gates(routing, value, layouts, routing.theirs)?;
        let (pieces, top_k) = (self.place.sizes[EP], routing.top_k);
        let (kind, axis) = (Collective::Dispatch { pieces, top_k }, Axis::Ep.name().to_owned());
        let name = format!("{}.dispatch", self.global.value(value).name);
        local = self.builder.push(&name, Op::Collective { kind, axis }, &[local, gates]);
        layouts[EP] = Layout::Replicated;
        for axis in (0..VALUE_AXES.len()).rev() {
            if layouts[axis] != wanted[axis] {
                local = self.moved(value, local, &mut layouts, axis, wanted[axis])?;
            }
        }
        Ok(local)
    }

    /// The sums of a result of a node that routes tokens, of which ranks of `ep` have terms: each
    /// gets those of its tokens.
    pub(super) fn combined(
        &mut self,
        value: ValueId,
        local: ValueId,
        mut layouts: Layouts,
        to: Layout,
        routing: &Routing,
    ) -> Result<(), String> {
        let own = self.produced(routing.gates)?[EP];
        if to != own {
            let name = &self.global.value(value).name;
            return Err(format!("`%{name}` does not lie on ep as the gates of its tokens"));
        }
        let gates = self.gates(routing, value, layouts, own)?;
        let (pieces, top_k) = (self.place.sizes[EP], routing.top_k);
        let (kind, axis) = (Collective::Combine { pieces, top_k }, Axis::Ep.name().to_owned());
        let name = format!("{}.combine", self.global.value(value).name);
        let whole = self.builder.push(&name, Op::Collective { kind, axis }, &[local, gates]);
        layouts[EP] = to;
        self.define(value, layouts, whole);
        Ok(())
    }

    /// The gates of the tokens that a rank has of a value in some layouts.
    fn gates(
        &mut self,
        routing: &Routing,
        value: ValueId,
        layouts: Layouts,
        on_ep: Layout,
    ) -> Result<ValueId, String> {
        let numbers = self.global.ty(value).ndim() - 1;
        let is_of_tokens = |layout: &Layout| layout.cut_dim().is_some_and(|dim| dim < numbers);
        let mut wanted =
            layouts.map(|lies| if is_of_tokens(&lies) { lies } else { Layout::Replicated });
        wanted[EP] = on_ep;
        self.shard(routing.gates, wanted)
    }

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
