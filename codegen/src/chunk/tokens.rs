//! Tokens in pieces: a rank has room for the tokens of all ranks that share experts, since any of
//! them may be routed to it. Where that is much, experts are called once for each piece of the
//! tokens: these are dispatched, the terms of experts computed, and combined, piece by piece.
//! Gradients of weights are sums to which each piece adds its term.
//!
//! Nothing is dropped, whatever the router decides, and all ranks have as many pieces.

use ir::build::Builder;
use ir::factors::{Factor, factors};
use ir::op::Collective;
use ir::sharding::Layout;
use ir::{Dim, Function, Kind, Module, Node, Op, Target, TensorType, ValueId};

use super::{Chunks, Limits, around, pieces};

/// How many times as wide as other values the rows of all experts may be. Chosen: what is inside of
/// experts takes five times as much again, and each piece adds to the gradients of all weights,
/// which for 1,024 rows of an expert on an H100 takes a sixth of the time of their products.
const WIDTH: u64 = 4;

/// The dim of `[samples, tokens, width]` that is cut.
const TOKENS: usize = 1;

/// How many pieces the tokens of a rank are dispatched in, `[samples, tokens, width]` in elements
/// of `bytes`, to as many `experts` of each of `ranks` ranks, `top_k` of them for a token: as few
/// as make the rows that experts may have of a piece no longer wide, of those that divide the
/// tokens and leave experts enough. O(tokens).
pub fn token_pieces(
    [samples, tokens, width]: [usize; 3],
    bytes: u64,
    (ranks, experts, top_k): (usize, usize, usize),
    target: Option<Target>,
) -> usize {
    let limits = Limits::of(target);
    let rows = ranks * samples * tokens * top_k.min(experts);
    let (bytes, wide_bytes) = ((rows * width) as u64 * bytes, WIDTH * limits.wide_bytes);
    if ranks == 1 || bytes <= wide_bytes {
        return 1;
    }
    // Evenly routed, a rank computes for as many tokens as it brings.
    let of_expert = samples * tokens * top_k / experts.max(1);
    pieces(tokens, bytes.div_ceil(wide_bytes), of_expert / limits.rows_min).unwrap_or(1)
}

/// A function in which experts, and what brings tokens to them, are one call, and one piece of it;
/// none where no tokens are dispatched, or few.
pub(crate) fn cut_tokens(
    function: &Function,
    module: &mut Module,
    target: Option<Target>,
) -> Option<(Function, Chunks)> {
    let calls = 0..function.nodes.len();
    let regions = calls.filter_map(|at| Region::of(function, module, at, target));
    regions.max_by_key(|region| region.inside.len())?.outline(function, module)
}

/// Experts, and what brings tokens to them and their terms back.
struct Region {
    /// The nodes in their order, and how the operands and results of each lie in pieces.
    inside: Vec<(usize, Factor)>,
    count: usize,
}

impl Region {
    /// What is around a node, if tokens are dispatched to it.
    fn of(
        function: &Function,
        module: &Module,
        at: usize,
        target: Option<Target>,
    ) -> Option<Region> {
        let node = &function.nodes[at];
        let is_dispatched = |before: &usize| {
            let results = &function.nodes[*before].results;
            let is_read = results.iter().any(|result| node.operands.contains(result));
            is_read && routed(&function.nodes[*before]).is_some()
        };
        let dispatches: Vec<usize> = (0..at).filter(is_dispatched).collect();
        let first = &function.nodes[*dispatches.first()?];
        let count = count(function, first, target).filter(|count| *count > 1)?;
        let dispatched = node.operands.iter().position(|o| *o == first.results[0])?;
        let cuts = |factor: &Factor| {
            factor.operands[dispatched] == Layout::cut(TOKENS) && factor.offsets.is_empty()
        };
        let factor = factors(node, function, module).into_iter().find(cuts)?;
        let combines = |after: &usize| {
            let Node { op, operands, .. } = &function.nodes[*after];
            matches!(op, Op::Collective { kind: Collective::Combine { .. }, .. })
                && node.results.contains(&operands[0])
        };
        let exchanged = |at: usize| {
            let Node { operands, results, .. } = &function.nodes[at];
            let cut = |values: &[ValueId]| vec![Layout::cut(TOKENS); values.len()];
            let (operands, results) = (cut(operands), cut(results));
            (at, Factor { units: Dim::from(count), operands, results, offsets: Vec::new() })
        };
        let mut inside: Vec<(usize, Factor)> = dispatches.into_iter().map(exchanged).collect();
        inside.push((at, factor));
        inside.extend((at + 1..function.nodes.len()).filter(combines).map(exchanged));
        Some(Region { inside, count })
    }

    /// The function with one call in place of the region, and the body of that.
    fn outline(self, function: &Function, module: &mut Module) -> Option<(Function, Chunks)> {
        let name = format!("{}.tokens", function.name);
        let mut b = Builder::new(module, name.clone(), Kind::Layer);
        let mut made: Vec<Option<ValueId>> = vec![None; function.values.len()];
        let inputs = self.inputs(function);
        for (input, layout) in &inputs {
            let ty = self.piece(function, *input, *layout)?;
            made[input.index()] = Some(b.param(&function.value(*input).name, ty));
        }
        for (at, _) in &self.inside {
            let node = &function.nodes[*at];
            let operands: Option<Vec<ValueId>> =
                node.operands.iter().map(|o| made[o.index()]).collect();
            let (operands, mut op) = (operands?, node.op.clone());
            if let Op::Call { function: callee } = &mut op {
                let kind = b.module().function(callee).map(|callee| callee.kind.clone());
                let Some(Kind::Composite { name, attributes }) = kind else { return None };
                *callee = b.instance(&name, &attributes, &operands);
            }
            let names: Vec<String> =
                node.results.iter().map(|r| function.value(*r).name.clone()).collect();
            let own = b.push_named(&names, op, &operands);
            node.results.iter().zip(own).for_each(|(r, own)| made[r.index()] = Some(own));
        }
        let outputs = self.outputs(function);
        let results: Option<Vec<ValueId>> =
            outputs.iter().map(|(output, _)| made[output.index()]).collect();
        let chunks = Chunks {
            body: b.into_function(&results?),
            count: self.count,
            operands: inputs.iter().map(|(_, layout)| *layout).collect(),
            results: outputs.iter().map(|(_, layout)| *layout).collect(),
        };
        let call = Node {
            op: Op::Call { function: name },
            operands: inputs.into_iter().map(|(value, _)| value).collect(),
            results: outputs.into_iter().map(|(value, _)| value).collect(),
        };
        Some((around(function, &|at| self.has(at), call), chunks))
    }

    fn has(&self, node: usize) -> bool {
        self.inside.iter().any(|(at, _)| *at == node)
    }

    /// What the region reads of the rest.
    fn inputs(&self, function: &Function) -> Vec<(ValueId, Layout)> {
        let nodes = || self.inside.iter().map(|(at, factor)| (&function.nodes[*at], factor));
        let is_made = |value: ValueId| nodes().any(|(node, _)| node.results.contains(&value));
        let mut inputs: Vec<(ValueId, Layout)> = Vec::new();
        for (node, factor) in nodes() {
            for (operand, layout) in node.operands.iter().zip(&factor.operands) {
                if !is_made(*operand) && inputs.iter().all(|(input, _)| input != operand) {
                    inputs.push((*operand, *layout));
                }
            }
        }
        inputs
    }

    /// What the rest reads of the region.
    fn outputs(&self, function: &Function) -> Vec<(ValueId, Layout)> {
        let outside = function.nodes.iter().enumerate().filter(|(at, _)| !self.has(*at));
        let mut read: Vec<ValueId> = function.results.clone();
        read.extend(outside.flat_map(|(_, node)| &node.operands));
        let results = self.inside.iter().flat_map(|(at, factor)| {
            function.nodes[*at].results.iter().copied().zip(factor.results.iter().copied())
        });
        results.filter(|(result, _)| read.contains(result)).collect()
    }

    /// The type of a piece of a value.
    fn piece(&self, function: &Function, value: ValueId, layout: Layout) -> Option<TensorType> {
        let mut ty = function.ty(value).clone();
        if let Layout::Cut { dim, .. } = layout {
            ty.dims[dim] = ty.dims[dim].divide(i64::try_from(self.count).ok()?)?;
        }
        Some(ty)
    }
}

/// Between how many ranks a node dispatches tokens, and how many experts each has.
fn routed(node: &Node) -> Option<(usize, usize)> {
    let Op::Collective { kind: Collective::Dispatch { pieces, top_k }, .. } = &node.op else {
        return None;
    };
    Some((*pieces, *top_k))
}

/// How many pieces the tokens of a dispatch are worth.
fn count(function: &Function, dispatch: &Node, target: Option<Target>) -> Option<usize> {
    let (ranks, top_k) = routed(dispatch)?;
    let [tokens, gates] = dispatch.operands[..] else { return None };
    let sizes = |value: ValueId| function.ty(value).sizes();
    let tokens_of_rank = <[usize; 3]>::try_from(sizes(tokens)?).ok()?;
    let experts = *sizes(gates)?.last()?;
    let bytes = function.ty(tokens).dtype.size();
    Some(token_pieces(tokens_of_rank, bytes, (ranks, experts, top_k), target))
}
