//! Nodes that compute with experts which ranks share, and what these ranks exchange: tokens are
//! dispatched to the experts that they have gates for, a rank computes the terms of its experts,
//! and these are combined where the tokens are. Gates go all-to-all: a rank gets those of its
//! experts, of all tokens.

use ir::factors::{Factor, factors};
use ir::op::{Collective, Op};
use ir::{Axis, Dim, Kind, Layout, Node, ValueId};

use super::{Choice, EP, EXPERTS_WITH_TP, Layouts, Partition};

/// What tokens go by to the experts of other ranks.
pub(super) struct Routing {
    /// A gate for each token and expert, and the dim of experts.
    gates: (ValueId, usize),
    /// Experts of a token.
    top_k: usize,
    /// The factor of experts: how operands and results lie on `ep`.
    experts: Factor,
}

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

    /// How a node routes tokens that runs along a factor of experts: of its operands that are cut
    /// by experts, gates alone are made where tokens are. None for other nodes.
    pub(super) fn routing(&self, node: &Node, factor: &Factor) -> Result<Option<Routing>, String> {
        for (operand, theirs) in node.operands.iter().zip(&factor.operands) {
            let Some(dim) = theirs.cut_dim() else { continue };
            if self.produced(*operand)?[EP] == Layout::Replicated {
                let top_k = self.attribute(node, "top_k")?;
                let gates = (*operand, dim);
                return Ok(Some(Routing { gates, top_k, experts: factor.clone() }));
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

    /// A node that routes tokens. Tokens of all ranks that share experts lie one rank after the
    /// other, in no order that layouts know; what is of tokens comes back to where these are.
    pub(super) fn routed(
        &mut self,
        node: &Node,
        (all, choices): (&[Vec<Factor>; 4], &[Choice]),
        wanted: &[Layouts],
        routing: &Routing,
    ) -> Result<(), String> {
        let mut operands = Vec::new();
        for ((operand, layouts), theirs) in
            node.operands.iter().zip(wanted).zip(&routing.experts.operands)
        {
            let mut own = *layouts;
            let is_of_experts = self.produced(*operand)?[EP].cut_dim().is_some();
            operands.push(match theirs.cut_dim() {
                Some(_) if is_of_experts => self.shard(*operand, own)?,
                Some(_) => {
                    own[EP] = Layout::Replicated;
                    self.gates(routing, own)?
                }
                None => self.dispatched(*operand, own, routing)?,
            });
        }
        let offsets = self.offsets(node, all, choices)?;
        let op = self.local_op(node, &[], &offsets, &operands)?;
        let name = &self.global.value(node.results[0]).name;
        let locals = self.builder.push_all(name, op, &operands);
        for ((result, theirs), local) in
            node.results.iter().zip(&routing.experts.results).zip(locals)
        {
            let layouts = self.produced(*result)?;
            let here = match *theirs {
                Layout::Partial(_) => self.combined(*result, local, layouts, routing)?,
                Layout::Cut { dim, .. } if layouts[EP] == Layout::Replicated => {
                    let name = self.global.value(*result).name.clone();
                    self.all_to_all(&name, local, [0, dim])
                }
                Layout::Cut { .. } | Layout::Replicated => local,
            };
            let expected = self.local_type(*result, layouts)?;
            let name = &self.global.value(*result).name;
            assert_eq!(*self.builder.ty(here), expected, "the shard of `%{name}`");
            self.define(*result, layouts, here);
        }
        Ok(())
    }

    /// What collectives of experts run along.
    fn experts_axis(&self) -> String {
        let axis = if self.place.takes_tp { EXPERTS_WITH_TP } else { Axis::Ep.name() };
        axis.to_owned()
    }

    /// Tokens of all ranks of `ep` with a gate for an expert of this one, on other axes as is
    /// wanted: ranks of `tp` gather theirs before, which are fewer than those of all. Tokens
    /// without a gate have no numbers, so that nothing else has them.
    fn dispatched(
        &mut self,
        value: ValueId,
        wanted: Layouts,
        routing: &Routing,
    ) -> Result<ValueId, String> {
        let local = self.shard(value, wanted)?;
        let gates = self.gates(routing, self.of_tokens(value, wanted))?;
        let (pieces, top_k) = (self.place.sizes[EP], routing.top_k);
        let (kind, axis) = (Collective::Dispatch { pieces, top_k }, self.experts_axis());
        let name = format!("{}.dispatch", self.global.value(value).name);
        Ok(self.builder.push(&name, Op::Collective { kind, axis }, &[local, gates]))
    }

    /// The sums of a result of a node that routes tokens, of which ranks of `ep` have terms: each
    /// gets those of its tokens.
    fn combined(
        &mut self,
        value: ValueId,
        local: ValueId,
        layouts: Layouts,
        routing: &Routing,
    ) -> Result<ValueId, String> {
        let gates = self.shard(routing.gates.0, self.of_tokens(value, layouts))?;
        let (pieces, top_k) = (self.place.sizes[EP], routing.top_k);
        let (kind, axis) = (Collective::Combine { pieces, top_k }, self.experts_axis());
        let name = format!("{}.combine", self.global.value(value).name);
        Ok(self.builder.push(&name, Op::Collective { kind, axis }, &[local, gates]))
    }

    /// How gates lie of the tokens that a rank has of a value in some layouts.
    fn of_tokens(&self, value: ValueId, layouts: Layouts) -> Layouts {
        let numbers = self.global.ty(value).ndim() - 1;
        let is_of_tokens = |layout: &Layout| layout.cut_dim().is_some_and(|dim| dim < numbers);
        layouts.map(|lies| if is_of_tokens(&lies) { lies } else { Layout::Replicated })
    }

    /// The gates that the tokens of all ranks of `ep` have for the experts of this one, given how
    /// those of a rank's tokens lie.
    fn gates(&mut self, routing: &Routing, tokens: Layouts) -> Result<ValueId, String> {
        let (value, dim) = routing.gates;
        let key = (value, tokens);
        if let Some(there) = self.brought.get(&key) {
            return Ok(*there);
        }
        let local = self.shard(value, tokens)?;
        let name = self.global.value(value).name.clone();
        let brought = self.all_to_all(&name, local, [dim, 0]);
        self.brought.insert(key, brought);
        Ok(brought)
    }

    /// What ranks of `ep` have of a value whose dim `join` was cut over them, cut along dim `split`
    /// instead.
    pub(super) fn all_to_all(
        &mut self,
        name: &str,
        local: ValueId,
        [split, join]: [usize; 2],
    ) -> ValueId {
        let (pieces, axis) = (self.place.sizes[EP], self.experts_axis());
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
        let kind = Collective::AllToAll { pieces };
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
