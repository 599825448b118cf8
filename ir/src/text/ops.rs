//! Ops from the words of a line.

use super::attrs::{Attr, Attrs};
use crate::convolution::DimOrder;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::op::{
    Binary, Collective, Combiner, Comparison, Convolution, Einsum, Op, Operands, Unary, Windows,
};
use crate::pieces::PieceOrder;
use crate::random::DrawBits;
use crate::types::TensorType;

/// What stands after an op and is none of its: the first attribute, or a second word without a
/// name, with what it has. None of an op that is unknown.
pub(super) fn unknown_attribute(head: &str, attrs: &Attrs) -> Option<String> {
    let (bare, known) = attributes_of(head)?;
    let names = || match known {
        [] => "none".to_owned(),
        _ => format!("`{}`", known.join("`, `")),
    };
    let other = attrs.named.keys().find(|name| !known.contains(&name.as_str()));
    let unknown =
        other.map(|name| format!("`{head}` has no attribute `{name}`; it has {}", names()));
    let more = (attrs.bare.len() > bare).then(|| match bare {
        0 => format!("`{head}` takes no word before its operands"),
        _ => format!("`{head}` takes one word before its operands"),
    });
    unknown.or(more)
}

/// How many words without a name an op has, and the names of its attributes.
fn attributes_of(head: &str) -> Option<(usize, &'static [&'static str])> {
    if elementwise(head).is_some() {
        return Some((0, &[]));
    }
    Some(match head {
        "constant" | "call" => (1, &[]),
        "contract" => (1, &["sums", "operands"]),
        "scaled_contract" => (1, &["sums", "runs_first"]),
        "reduce" => (1, &["dims"]),
        "cumulative" | "sort" => (1, &["dim"]),
        "all_reduce" => (1, &["axis"]),
        "cast" => (1, &[]),
        "reshape" => (0, &[]),
        "iota" | "gather" | "scatter_add" | "scatter" => (0, &["dim", "start"]),
        "random" => (0, &["salt", "start", "extent", "per_sample", "bits"]),
        "fold_key" => (0, &["salt"]),
        "conv" => (0, &["stride", "before", "after", "dilation", "spread", "x", "w", "y"]),
        "prod" | "reverse" => (0, &["dims"]),
        "argmax" | "concat" | "dynamic_update_slice" => (0, &["dim"]),
        "dynamic_slice" => (0, &["dim", "size"]),
        "top_k" => (0, &["dim", "count"]),
        "transpose" => (0, &["perm"]),
        "broadcast" => (0, &["new"]),
        "slice" => (0, &["dim", "start", "size"]),
        "pad" => (0, &["dim", "before", "after"]),
        "window" | "fold" => (0, &["dim", "size", "stride", "dilation"]),
        "all_gather" => (0, &["axis", "dim", "counts", "order"]),
        "reduce_scatter" => (0, &["axis", "dim", "counts", "order", "own"]),
        "all_to_all" => (0, &["axis", "pieces"]),
        "dispatch" | "combine" => (0, &["axis", "pieces", "top_k"]),
        _ => return None,
    })
}

/// The op of a line; none when the word or its attributes are unknown.
pub(super) fn build_op(
    head: &str,
    attrs: &Attrs,
    operands: &[&TensorType],
    declared: Option<&TensorType>,
    pack: usize,
) -> Option<Op> {
    if let Some(op) = elementwise(head) {
        return Some(op);
    }
    let dims = || declared.map(|ty| ty.dims.clone());
    let dtype = || declared.map(|ty| ty.dtype);
    let first = || operands.first().map(|ty| ty.ndim());
    let bare = attrs.bare.first();
    let bare_word = || if let Some(Attr::Word(word)) = bare { Some(word.as_str()) } else { None };
    let combiner = || Combiner::ALL.into_iter().find(|c| Some(c.name()) == bare_word());
    Some(match head {
        "constant" => {
            let Some(Attr::Number(value)) = bare else { return None };
            Op::Constant { value: *value, dtype: dtype()?, dims: dims()? }
        }
        "iota" => {
            let dim = attrs.dim("dim", declared?.ndim())?;
            let start = attrs.integer_or("start", 0)?;
            Op::Iota { dim, start, dtype: dtype()?, dims: dims()? }
        }
        "random" => random_op(attrs, declared?)?,
        "fold_key" => Op::FoldKey { salt: u32::try_from(attrs.integer("salt")?).ok()? },
        "cast" => Op::Cast { dtype: dtype_of(bare, dtype()?)? },
        "contract" => {
            let is_wide = operands.first().zip(declared).is_some_and(|(a, declared)| {
                a.dtype.is_narrow() && declared.dtype == a.dtype.accumulation()
            });
            let word = |key: &str| match attrs.named.contains_key(key) {
                true => attrs.word(key).map(Some),
                false => Some(None),
            };
            let is_wide = match word("sums")? {
                Some("kept") => true,
                Some(_) => return None,
                None => is_wide,
            };
            let operands = match word("operands")? {
                Some("tf32") => Operands::Tf32,
                Some(_) => return None,
                None => Operands::Exact,
            };
            Op::Contract(Einsum { is_wide, operands, ..Einsum::parse(bare_word()?)? })
        }
        "scaled_contract" => {
            let is_wide = declared?.dtype == DType::F32;
            let numbers = match attrs.named.contains_key("runs_first") {
                true => attrs.dims("runs_first", 2, pack)?,
                false => Vec::new(),
            };
            if numbers.iter().any(|operand| *operand > 1) {
                return None;
            }
            let einsum = Einsum { is_wide, ..Einsum::parse(bare_word()?)? };
            let runs_first = [0, 1].map(|operand| numbers.contains(&operand));
            Op::ScaledContract { einsum, runs_first }
        }
        "conv" => Op::Conv(convolution(attrs, first()?)?),
        "reduce" => Op::Reduce { combiner: combiner()?, dims: attrs.dims("dims", first()?, pack)? },
        "prod" => Op::Prod { dims: attrs.dims("dims", first()?, pack)? },
        "argmax" => Op::ArgMax { dim: attrs.dim("dim", first()?)? },
        "cumulative" => Op::Cumulative { combiner: combiner()?, dim: attrs.dim("dim", first()?)? },
        "sort" => {
            let descending = match bare_word()? {
                "ascending" => false,
                "descending" => true,
                _ => return None,
            };
            Op::Sort { dim: attrs.dim("dim", first()?)?, descending }
        }
        "top_k" => Op::TopK { dim: attrs.dim("dim", first()?)?, count: attrs.size("count")? },
        "reshape" => Op::Reshape { dims: dims()? },
        "transpose" => {
            let perm = attrs.sizes("perm")?;
            let perm = perm.iter().map(|d| usize::try_from(d.as_constant()?).ok());
            Op::Transpose { perm: perm.collect::<Option<_>>()? }
        }
        "broadcast" => {
            let new = attrs.dims("new", declared?.ndim(), pack)?;
            Op::Broadcast { new, dims: dims()? }
        }
        "slice" => {
            let dim = attrs.dim("dim", first()?)?;
            Op::Slice { dim, start: attrs.size("start")?, size: attrs.size("size")? }
        }
        "pad" => {
            let dim = attrs.dim("dim", first()?)?;
            Op::Pad { dim, before: attrs.size("before")?, after: attrs.size("after")? }
        }
        "reverse" => Op::Reverse { dims: attrs.dims("dims", first()?, pack)? },
        "window" => Op::Window(windows(attrs, first()?)?),
        "fold" => {
            let windows = windows(attrs, declared?.ndim())?;
            let extent = declared?.dims.get(windows.dim)?.as_constant()?;
            Op::Fold { windows, extent: usize::try_from(extent).ok()? }
        }
        "concat" => Op::Concat { dim: attrs.dim("dim", first()?)? },
        "gather" => {
            let start = attrs.integer_or("start", 0)?;
            Op::Gather { dim: attrs.dim("dim", first()?)?, start }
        }
        "scatter_add" => {
            let dim = attrs.dim("dim", declared?.ndim())?;
            let start = attrs.integer_or("start", 0)?;
            Op::ScatterAdd { dim, start, size: declared?.dims.get(dim)?.clone() }
        }
        "scatter" => {
            let start = attrs.integer_or("start", 0)?;
            Op::Scatter { dim: attrs.dim("dim", first()?)?, start }
        }
        "dynamic_update_slice" => Op::DynamicUpdateSlice { dim: attrs.dim("dim", first()?)? },
        "dynamic_slice" => {
            let dim = attrs.dim("dim", first()?)?;
            Op::DynamicSlice { dim, size: size_of(attrs, declared?.dims.get(dim)?)? }
        }
        "call" => Op::Call { function: bare_word()?.to_owned() },
        "all_reduce" => collective(attrs, Collective::AllReduce(combiner()?))?,
        "all_gather" => {
            let dim = attrs.dim("dim", first()?)?;
            let (counts, order) = (counts(attrs)?, order(attrs)?);
            collective(attrs, Collective::AllGather { dim, counts, order })?
        }
        "reduce_scatter" => {
            let (dim, own) = (attrs.dim("dim", first()?)?, attrs.size("own")?);
            let (counts, order) = (counts(attrs)?, order(attrs)?);
            collective(attrs, Collective::ReduceScatter { dim, counts, order, own })?
        }
        "all_to_all" => collective(attrs, Collective::AllToAll { pieces: attrs.size("pieces")? })?,
        "dispatch" => {
            let (pieces, top_k) = (attrs.size("pieces")?, attrs.size("top_k")?);
            collective(attrs, Collective::Dispatch { pieces, top_k })?
        }
        "combine" => {
            let (pieces, top_k) = (attrs.size("pieces")?, attrs.size("top_k")?);
            collective(attrs, Collective::Combine { pieces, top_k })?
        }
        _ => return None,
    })
}

/// The declared type, if the word that may stand before the operand is it.
fn dtype_of(bare: Option<&Attr>, declared: DType) -> Option<DType> {
    let said = bare.map(|attr| if let Attr::Word(word) = attr { word.parse().ok() } else { None });
    said.is_none_or(|said| said == Some(declared)).then_some(declared)
}

/// The declared size, if the one that may be said is it.
fn size_of(attrs: &Attrs, declared: &Dim) -> Option<Dim> {
    let is_it = match attrs.named.contains_key("size") {
        true => attrs.integer("size")? == declared.as_constant()?,
        false => true,
    };
    is_it.then(|| declared.clone())
}

/// Lists that are not there are of ones, or of zeros for the padding.
fn convolution(attrs: &Attrs, ndim: usize) -> Option<Convolution> {
    let spatial = ndim.saturating_sub(2);
    let list = |key: &str, default: i64| match attrs.named.contains_key(key) {
        true => attrs.sizes(key)?.iter().map(Dim::as_constant).collect::<Option<Vec<i64>>>(),
        false => Some(vec![default; spatial]),
    };
    let steps = |key: &str| -> Option<Vec<usize>> {
        list(key, 1)?.into_iter().map(|n| usize::try_from(n).ok()).collect()
    };
    let order = |key: &str| match attrs.named.contains_key(key) {
        true => {
            let dims =
                attrs.sizes(key)?.iter().map(Dim::as_constant).collect::<Option<Vec<_>>>()?;
            let dims = dims.into_iter().map(|dim| usize::try_from(dim).ok());
            Some(DimOrder::new(ndim, dims.collect::<Option<_>>()?))
        }
        false => Some(DimOrder::default()),
    };
    Some(Convolution {
        stride: steps("stride")?,
        before: list("before", 0)?,
        after: list("after", 0)?,
        dilation: steps("dilation")?,
        spread: steps("spread")?,
        orders: [order("x")?, order("w")?, order("y")?],
    })
}

fn windows(attrs: &Attrs, ndim: usize) -> Option<Windows> {
    let one = |key: &str| if attrs.named.contains_key(key) { attrs.size(key) } else { Some(1) };
    let (size, stride, dilation) = (attrs.size("size")?, one("stride")?, one("dilation")?);
    Some(Windows { dim: attrs.dim("dim", ndim)?, size, stride, dilation })
}

fn elementwise(head: &str) -> Option<Op> {
    if head == "select" {
        return Some(Op::Select);
    }
    let unary = Unary::ALL.into_iter().find(|u| u.name() == head).map(Op::Unary);
    let binary = Binary::ALL.into_iter().find(|b| b.name() == head).map(Op::Binary);
    let compare = Comparison::ALL.into_iter().find(|c| c.name() == head).map(Op::Compare);
    unary.or(binary).or(compare)
}

fn random_op(attrs: &Attrs, declared: &TensorType) -> Option<Op> {
    let list = |key: &str| match attrs.named.contains_key(key) {
        true => attrs.sizes(key).map(Some),
        false => Some(None),
    };
    let start = match list("start")? {
        Some(list) => list.iter().map(Dim::as_constant).collect::<Option<Vec<_>>>()?,
        None => vec![0; declared.ndim()],
    };
    let extent = list("extent")?.unwrap_or_else(|| declared.dims.clone());
    let salt = u32::try_from(attrs.integer("salt")?).ok()?;
    let extent = extent.iter().all(Dim::is_size).then_some(extent)?;
    let per_sample = match attrs.named.contains_key("per_sample") {
        true => u32::try_from(attrs.integer("per_sample")?).ok()?,
        false => 1,
    };
    let bits = match attrs.named.contains_key("bits") {
        true => DrawBits::of(u32::try_from(attrs.integer("bits")?).ok()?)?,
        false => DrawBits::B24,
    };
    let (dtype, dims) = (declared.dtype, declared.dims.clone());
    Some(Op::Random { salt, start, extent, per_sample, bits, dtype, dims })
}

fn collective(attrs: &Attrs, kind: Collective) -> Option<Op> {
    Some(Op::Collective { kind, axis: attrs.word("axis")?.to_owned() })
}

/// Where pieces lie; in ascending order where nothing is said.
fn order(attrs: &Attrs) -> Option<PieceOrder> {
    if !attrs.named.contains_key("order") {
        return Some(PieceOrder::default());
    }
    let word = attrs.word("order")?;
    PieceOrder::ALL.into_iter().find(|order| order.name() == word)
}

fn counts(attrs: &Attrs) -> Option<Vec<usize>> {
    attrs.sizes("counts")?.iter().map(|d| usize::try_from(d.as_constant()?).ok()).collect()
}
