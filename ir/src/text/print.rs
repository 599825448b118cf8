//! Printing: canonical, so that equal text is an equal module.

use std::fmt;

use crate::infer;
use crate::module::{Function, Kind, Module, Node, ValueId};
use crate::op::{Collective, Convolution, Op, Operands};
use crate::pieces::PieceOrder;
use crate::random::DrawBits;

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "module {}", self.name)?;
        for function in &self.functions {
            write!(f, "{function}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Layer => write!(f, "  func @{}", self.name)?,
            Kind::Kernel => write!(f, "  kernel @{}", self.name)?,
            Kind::Composite { name, attributes } => {
                let list = attributes.iter().map(|(k, v)| format!("{k}={v:?}"));
                let list = list.collect::<Vec<_>>().join(", ");
                write!(f, "  composite @{} = {name}({list}) ", self.name)?;
            }
        }
        let params = self.params().map(|p| typed(self, p)).collect::<Vec<_>>().join(", ");
        writeln!(f, "({params}) {{")?;
        for node in &self.nodes {
            writeln!(f, "    {}", line(self, node))?;
        }
        writeln!(f, "    return{}", names(self, &self.results))?;
        writeln!(f, "  }}")
    }
}

/// What stands before the type of a parameter that is not trained.
pub(super) const FROZEN: &str = "frozen";

fn typed(function: &Function, id: ValueId) -> String {
    let value = function.value(id);
    match value.frozen {
        true => format!("%{}: {FROZEN} {}", value.name, value.ty),
        false => format!("%{}: {}", value.name, value.ty),
    }
}

fn names(function: &Function, ids: &[ValueId]) -> String {
    ids.iter().map(|id| format!(" %{}", function.value(*id).name)).collect()
}

/// One node as it stands in a text.
pub(crate) fn line(function: &Function, node: &Node) -> String {
    let results = node.results.iter().map(|r| typed(function, *r)).collect::<Vec<_>>().join(", ");
    let head = infer::name(&node.op);
    let mut attributes = attributes(&node.op);
    // Of narrow operands the type of the result tells.
    if matches!(&node.op, Op::Contract(einsum) if einsum.is_wide)
        && !function.ty(node.operands[0]).dtype.is_narrow()
    {
        attributes += " sums=kept";
    }
    format!("{results} = {head}{attributes}{}", names(function, &node.operands))
}

/// Where pieces lie, unless that is one after the other.
fn ordered(order: PieceOrder) -> String {
    if order == PieceOrder::default() { String::new() } else { format!(" order={}", order.name()) }
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    let items = items.iter().map(T::to_string).collect::<Vec<_>>().join(", ");
    format!("[{items}]")
}

impl fmt::Display for Convolution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Convolution { stride, before, after, dilation, spread, orders } = self;
        write!(f, " stride={} before={} after={}", list(stride), list(before), list(after))?;
        write!(f, " dilation={} spread={}", list(dilation), list(spread))?;
        let named = ["x", "w", "y"].into_iter().zip(orders);
        named
            .filter_map(|(name, order)| Some((name, order.named()?)))
            .try_for_each(|(name, order)| write!(f, " {name}={}", list(order)))
    }
}

fn attributes(op: &Op) -> String {
    match op {
        Op::Constant { value, .. } => format!(" {value:?}"),
        Op::Iota { dim, start, .. } => format!(" dim={dim} start={start}"),
        Op::Random { salt, start, extent, per_sample, bits, .. } => {
            let mut text = format!(" salt={salt} start={} extent={}", list(start), list(extent));
            if *per_sample != 1 {
                text += &format!(" per_sample={per_sample}");
            }
            if *bits != DrawBits::B24 {
                text += &format!(" bits={}", bits.count());
            }
            text
        }
        Op::FoldKey { salt } => format!(" salt={salt}"),
        Op::Contract(einsum) => match einsum.operands {
            Operands::Exact => format!(" {einsum}"),
            Operands::Tf32 => format!(" {einsum} operands=tf32"),
        },
        Op::ScaledContract { einsum, runs_first } => {
            let numbers = [0, 1].into_iter().filter(|operand: &usize| runs_first[*operand]);
            match numbers.collect::<Vec<usize>>() {
                none if none.is_empty() => format!(" {einsum}"),
                numbers => format!(" {einsum} runs_first={}", list(&numbers)),
            }
        }
        Op::Reduce { combiner, dims } => format!(" {} dims={}", combiner.name(), list(dims)),
        Op::Cumulative { combiner, dim } => format!(" {} dim={dim}", combiner.name()),
        Op::Window(windows) | Op::Fold { windows, .. } => format!(" {windows}"),
        Op::Conv(c) => c.to_string(),
        Op::Sort { dim, descending } => {
            format!(" {} dim={dim}", if *descending { "descending" } else { "ascending" })
        }
        Op::TopK { dim, count } => format!(" dim={dim} count={count}"),
        Op::Prod { dims } | Op::Reverse { dims } => format!(" dims={}", list(dims)),
        Op::Transpose { perm } => format!(" perm={}", list(perm)),
        Op::Broadcast { new, .. } => format!(" new={}", list(new)),
        Op::Slice { dim, start, size } => format!(" dim={dim} start={start} size={size}"),
        Op::Pad { dim, before, after } => format!(" dim={dim} before={before} after={after}"),
        Op::Gather { dim, start }
        | Op::Scatter { dim, start }
        | Op::ScatterAdd { dim, start, .. } => {
            format!(" dim={dim} start={start}")
        }
        Op::ArgMax { dim }
        | Op::Concat { dim }
        | Op::DynamicUpdateSlice { dim }
        | Op::DynamicSlice { dim, .. } => format!(" dim={dim}"),
        Op::Call { function } => format!(" @{function}"),
        Op::Collective { kind, axis } => match kind {
            Collective::AllReduce(combiner) => format!(" {} axis={axis}", combiner.name()),
            Collective::AllGather { dim, counts, order } => {
                format!(" dim={dim} counts={}{} axis={axis}", list(counts), ordered(*order))
            }
            Collective::ReduceScatter { dim, counts, order, own } => {
                let (counts, order) = (list(counts), ordered(*order));
                format!(" dim={dim} counts={counts}{order} own={own} axis={axis}")
            }
            Collective::AllToAll { pieces } => format!(" pieces={pieces} axis={axis}"),
            Collective::Dispatch { pieces, top_k } | Collective::Combine { pieces, top_k } => {
                format!(" pieces={pieces} top_k={top_k} axis={axis}")
            }
        },
        Op::Unary(_)
        | Op::Binary(_)
        | Op::Compare(_)
        | Op::Select
        | Op::Cast { .. }
        | Op::Reshape { .. } => String::new(),
    }
}
