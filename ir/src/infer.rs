//! The table `infer`: the type of each op's result.

use std::fmt;

use crate::DType;
use crate::dim::{Dim, product};
use crate::module::Module;
use crate::op::{Collective, Convolution, Einsum, Op, Operands, Unary, Windows};
use crate::types::TensorType;

/// A constraint of an op that does not hold, by its number in the op's doc.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpError {
    /// The op's name in texts.
    pub op: &'static str,
    /// The constraint's number.
    pub constraint: u8,
    /// What was found.
    pub found: String,
}

impl fmt::Display for OpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (C{}): {}", self.op, self.constraint, self.found)
    }
}

type Inferred = Result<TensorType, OpError>;

/// The types of an op's results, from those of its operands.
///
/// The number of operands is checked first, as constraint 0.
pub fn infer(
    op: &Op,
    operands: &[&TensorType],
    module: &Module,
) -> Result<Vec<TensorType>, OpError> {
    if let Some(arity) = arity(op)
        && operands.len() != arity
    {
        let found = format!("{} operands in place of {arity}", operands.len());
        return Err(OpError { op: name(op), constraint: 0, found });
    }
    let result = match op {
        Op::Constant { dtype, dims, .. } => Ok(TensorType::new(*dtype, dims.clone())),
        Op::Iota { dim, dtype, dims, .. } => iota_type(*dim, *dtype, dims),
        Op::Random { dtype, dims, start, extent, .. } => {
            random_type(operands[0], *dtype, dims, start.len(), extent.len())
        }
        Op::FoldKey { .. } => key_type("fold_key", operands[0]),
        Op::Unary(unary) => unary_type(*unary, operands[0]),
        Op::Binary(binary) => binary_type(binary.name(), operands[0], operands[1]),
        Op::Compare(comparison) => compare_type(comparison.name(), operands[0], operands[1]),
        Op::Select => select_type(operands[0], operands[1], operands[2]),
        Op::Cast { dtype } => Ok(operands[0].with_dtype(*dtype)),
        Op::Contract(einsum) => contract_type(einsum, operands[0], operands[1]),
        Op::ScaledContract { einsum, runs_first } => scaled_type(einsum, *runs_first, operands),
        Op::Conv(c) => conv_type(c, operands[0], operands[1]),
        Op::Reduce { dims, .. } => reduce_type("reduce", dims, operands[0]),
        Op::Prod { dims } => prod_type(dims, operands[0]),
        Op::ArgMax { dim } => argmax_type(*dim, operands[0]),
        Op::Cumulative { dim, .. } => cumulative_type(*dim, operands[0]),
        Op::Sort { dim, .. } => order_type("sort", *dim, None, operands[0]),
        Op::TopK { dim, count } => order_type("top_k", *dim, Some(*count), operands[0]),
        Op::Reshape { dims } => reshape_type(dims, operands[0]),
        Op::Transpose { perm } => transpose_type(perm, operands[0]),
        Op::Broadcast { new, dims } => broadcast_type(new, dims, operands[0]),
        Op::Slice { dim, start, size } => slice_type(*dim, *start, *size, operands[0]),
        Op::Pad { dim, before, after } => pad_type(*dim, *before + *after, operands[0]),
        Op::Reverse { dims } => reverse_type(dims, operands[0]),
        Op::Window(windows) => window_type(*windows, operands[0]),
        Op::Fold { windows, extent } => fold_type(*windows, *extent, operands[0]),
        Op::Concat { dim } => concat_type(*dim, operands),
        Op::Gather { dim, .. } => gather_type(*dim, operands[0], operands[1]),
        Op::ScatterAdd { dim, size, .. } => scatter_type(*dim, size, operands[0], operands[1]),
        Op::Scatter { dim, .. } => replace_type(*dim, operands),
        Op::DynamicUpdateSlice { dim } => update_type(*dim, operands),
        Op::DynamicSlice { dim, size } => dynamic_slice_type(*dim, size, operands[0], operands[1]),
        Op::Call { function } => return call_types(function, operands, module),
        Op::Collective { kind, .. } => collective_type(kind, operands),
    };
    result.map(|ty| vec![ty])
}

/// The op's name in texts.
pub fn name(op: &Op) -> &'static str {
    match op {
        Op::Constant { .. } => "constant",
        Op::Iota { .. } => "iota",
        Op::Random { .. } => "random",
        Op::FoldKey { .. } => "fold_key",
        Op::Unary(unary) => unary.name(),
        Op::Binary(binary) => binary.name(),
        Op::Compare(comparison) => comparison.name(),
        Op::Select => "select",
        Op::Cast { .. } => "cast",
        Op::Contract(_) => "contract",
        Op::ScaledContract { .. } => "scaled_contract",
        Op::Conv(_) => "conv",
        Op::Reduce { .. } => "reduce",
        Op::Prod { .. } => "prod",
        Op::ArgMax { .. } => "argmax",
        Op::Cumulative { .. } => "cumulative",
        Op::Sort { .. } => "sort",
        Op::TopK { .. } => "top_k",
        Op::Reshape { .. } => "reshape",
        Op::Transpose { .. } => "transpose",
        Op::Broadcast { .. } => "broadcast",
        Op::Slice { .. } => "slice",
        Op::Pad { .. } => "pad",
        Op::Reverse { .. } => "reverse",
        Op::Window(_) => "window",
        Op::Fold { .. } => "fold",
        Op::Concat { .. } => "concat",
        Op::Gather { .. } => "gather",
        Op::ScatterAdd { .. } => "scatter_add",
        Op::Scatter { .. } => "scatter",
        Op::DynamicUpdateSlice { .. } => "dynamic_update_slice",
        Op::DynamicSlice { .. } => "dynamic_slice",
        Op::Call { .. } => "call",
        Op::Collective { kind, .. } => match kind {
            Collective::AllReduce(_) => "all_reduce",
            Collective::AllGather { .. } => "all_gather",
            Collective::ReduceScatter { .. } => "reduce_scatter",
            Collective::AllToAll { .. } => "all_to_all",
            Collective::Dispatch { .. } => "dispatch",
            Collective::Combine { .. } => "combine",
        },
    }
}

/// The number of operands, where it is fixed.
pub fn arity(op: &Op) -> Option<usize> {
    match op {
        Op::Constant { .. } | Op::Iota { .. } => Some(0),
        Op::Random { .. }
        | Op::FoldKey { .. }
        | Op::Unary(_)
        | Op::Cast { .. }
        | Op::Reduce { .. }
        | Op::Prod { .. }
        | Op::ArgMax { .. }
        | Op::Cumulative { .. }
        | Op::Sort { .. }
        | Op::TopK { .. }
        | Op::Reshape { .. }
        | Op::Transpose { .. }
        | Op::Broadcast { .. }
        | Op::Slice { .. }
        | Op::Pad { .. }
        | Op::Reverse { .. }
        | Op::Window(_)
        | Op::Fold { .. } => Some(1),
        Op::Collective { kind, .. } => match kind {
            Collective::Dispatch { .. } | Collective::Combine { .. } => Some(2),
            Collective::AllReduce(_)
            | Collective::AllGather { .. }
            | Collective::ReduceScatter { .. }
            | Collective::AllToAll { .. } => Some(1),
        },
        Op::Binary(_)
        | Op::Compare(_)
        | Op::Contract(_)
        | Op::Conv(_)
        | Op::Gather { .. }
        | Op::ScatterAdd { .. }
        | Op::DynamicSlice { .. } => Some(2),
        Op::Select | Op::Scatter { .. } | Op::DynamicUpdateSlice { .. } => Some(3),
        Op::ScaledContract { .. } => Some(4),
        Op::Concat { .. } | Op::Call { .. } => None,
    }
}

fn require(
    op: &'static str,
    constraint: u8,
    holds: bool,
    found: impl FnOnce() -> String,
) -> Result<(), OpError> {
    if holds { Ok(()) } else { Err(OpError { op, constraint, found: found() }) }
}

fn has_dim(op: &'static str, constraint: u8, dim: usize, x: &TensorType) -> Result<(), OpError> {
    require(op, constraint, dim < x.ndim(), || format!("{x} has no dim {dim}"))
}

fn iota_type(dim: usize, dtype: DType, dims: &[Dim]) -> Inferred {
    let ty = TensorType::new(dtype, dims.to_vec());
    has_dim("iota", 1, dim, &ty)?;
    Ok(ty)
}

fn key_type(op: &'static str, key: &TensorType) -> Inferred {
    require(op, 1, *key == TensorType::of(DType::U32, &[4]), || format!("the key is {key}"))?;
    Ok(key.clone())
}

fn random_type(
    key: &TensorType,
    dtype: DType,
    dims: &[Dim],
    starts: usize,
    extents: usize,
) -> Inferred {
    key_type("random", key)?;
    require("random", 2, starts == dims.len() && extents == dims.len(), || {
        format!("{starts} starts and {extents} extents for {} dims", dims.len())
    })?;
    Ok(TensorType::new(dtype, dims.to_vec()))
}

fn unary_type(unary: Unary, x: &TensorType) -> Inferred {
    let signed = matches!(x.dtype, DType::I8 | DType::I32 | DType::I64)
        && matches!(unary, Unary::Neg | Unary::Abs);
    require(unary.name(), 1, x.dtype.is_float() || signed, || format!("the operand is {x}"))?;
    Ok(x.clone())
}

fn binary_type(op: &'static str, a: &TensorType, b: &TensorType) -> Inferred {
    require(op, 1, a == b, || format!("a is {a}, b is {b}"))?;
    require(op, 2, a.dtype != DType::Bool, || format!("a is {a}"))?;
    Ok(a.clone())
}

fn compare_type(op: &'static str, a: &TensorType, b: &TensorType) -> Inferred {
    require(op, 1, a == b, || format!("a is {a}, b is {b}"))?;
    Ok(a.with_dtype(DType::Bool))
}

fn select_type(c: &TensorType, a: &TensorType, b: &TensorType) -> Inferred {
    let fits = c.dtype == DType::Bool && c.dims == a.dims;
    require("select", 1, fits, || format!("c is {c}, a is {a}"))?;
    require("select", 2, a == b, || format!("a is {a}, b is {b}"))?;
    Ok(a.clone())
}

fn contract_type(e: &Einsum, a: &TensorType, b: &TensorType) -> Inferred {
    let same = a.dtype == b.dtype && a.dtype.is_float();
    require("contract", 1, same, || format!("a is {a}, b is {b}"))?;
    let dims = contracted_dims(("contract", [2, 3]), e, a, b)?;
    let reads = e.operands == Operands::Exact || a.dtype == DType::F32;
    require("contract", 4, reads, || format!("operands=tf32 of {a}"))?;
    let dtype = if e.is_wide { a.dtype.accumulation() } else { a.dtype };
    Ok(TensorType::new(dtype, dims))
}

/// The dims of the result of a contraction; constraints are of sizes, and of letters.
fn contracted_dims(
    (op, [of_sizes, of_letters]): (&'static str, [u8; 2]),
    e: &Einsum,
    a: &TensorType,
    b: &TensorType,
) -> Result<Vec<Dim>, OpError> {
    let ndims = e.a.len() == a.ndim() && e.b.len() == b.ndim();
    require(op, of_sizes, ndims, || format!("`{e}` for {a} and {b}"))?;
    let size = |letter: char| {
        let in_a = e.a.iter().position(|c| *c == letter).map(|at| &a.dims[at]);
        let in_b = e.b.iter().position(|c| *c == letter).map(|at| &b.dims[at]);
        (in_a, in_b)
    };
    for letter in e.letters() {
        if let (Some(x), Some(y)) = size(letter) {
            let both = || format!("factor `{letter}` is {x} in a, {y} in b");
            require(op, of_sizes, x == y, both)?;
        }
    }
    require(op, of_letters, factors_are_simple(e), || format!("`{e}`"))?;
    Ok(e.result.iter().filter_map(|c| size(*c).0.or(size(*c).1).cloned()).collect())
}

/// Points of a run of a scaled contraction, and rows of a block of scales.
pub const RUN: usize = 128;

fn scaled_type(e: &Einsum, runs_first: [bool; 2], operands: &[&TensorType]) -> Inferred {
    let op = "scaled_contract";
    let [a, b, scales_a, scales_b] = operands[..] else { unreachable!("it has four operands") };
    let codes = |ty: &TensorType| matches!(ty.dtype, DType::F8E4M3 | DType::F8E5M2);
    let typed = codes(a) && codes(b) && [scales_a, scales_b].iter().all(|u| u.dtype == DType::F32);
    let all = || format!("a is {a}, b is {b}, their scales are {scales_a} and {scales_b}");
    require(op, 1, typed, all)?;
    let dims = contracted_dims((op, [2, 2]), e, a, b)?;
    let is_batch = |c: &char| e.a.contains(c) && e.b.contains(c);
    let plain = e.operands == Operands::Exact && !e.result.iter().any(is_batch);
    require(op, 2, plain, || format!("`{e}`"))?;
    let sides = [(&e.a, a, scales_a, runs_first[0]), (&e.b, b, scales_b, runs_first[1])];
    for (letters, ty, scales, runs_first) in sides {
        let sizes = ty.sizes().zip(scales.sizes());
        require(op, 3, sizes.is_some(), all)?;
        let (sizes, mut scales) = sizes.unwrap_or_default();
        let points = |summed: bool| -> usize {
            let of_side = letters.iter().zip(&sizes).filter(|(c, _)| is_batch(c) == summed);
            of_side.map(|(_, size)| size).product()
        };
        require(op, 3, points(true).is_multiple_of(RUN), all)?;
        let last = scales.len().min(1);
        scales.rotate_left(if runs_first { last } else { 0 });
        let of_rows = [points(false), points(false).div_ceil(RUN)];
        let fits =
            scales.len() == 2 && of_rows.contains(&scales[0]) && scales[1] == points(true) / RUN;
        require(op, 4, fits, all)?;
    }
    let dtype = if e.is_wide { DType::F32 } else { DType::BF16 };
    Ok(TensorType::new(dtype, dims))
}

fn factors_are_simple(e: &Einsum) -> bool {
    let once =
        |letters: &[char]| letters.iter().enumerate().all(|(i, c)| !letters[..i].contains(c));
    once(&e.a)
        && once(&e.b)
        && once(&e.result)
        && e.result.iter().all(|c| e.a.contains(c) || e.b.contains(c))
        && e.letters().iter().all(|c| e.result.contains(c) || (e.a.contains(c) && e.b.contains(c)))
}

fn conv_type(c: &Convolution, x: &TensorType, w: &TensorType) -> Inferred {
    let both = || format!("x is {x}, w is {w}, with{c}");
    let same = x.dtype == w.dtype && x.dtype.is_float() && x.ndim() == w.ndim() && x.ndim() >= 2;
    require("conv", 1, same, both)?;
    require("conv", 5, c.orders.iter().all(|order| order.fits(x.ndim())), both)?;
    let [of_x, of_w, of_y] = &c.orders;
    let (lying_x, lying_w, dtype) = (x, w, x.dtype);
    let (x, w) = (of_x.usual(&lying_x.dims), of_w.usual(&lying_w.dims));
    let groups = x[1].ratio(&w[1]);
    let whole = groups.is_some_and(|groups| w[0].divide(groups).is_some());
    require("conv", 2, whole, both)?;
    let sizes = |dims: &[Dim]| dims[2..].iter().map(fixed).collect::<Option<Vec<_>>>();
    let sizes = sizes(&x).zip(sizes(&w));
    require("conv", 3, sizes.is_some(), both)?;
    let spatial = sizes.and_then(|(x, w)| c.result_sizes(&x, &w));
    require("conv", 4, spatial.is_some(), both)?;
    let spatial = spatial.unwrap_or_default().into_iter().map(Dim::from);
    let dims: Vec<Dim> = [x[0].clone(), w[0].clone()].into_iter().chain(spatial).collect();
    Ok(TensorType::new(dtype, of_y.lying(&dims)))
}

fn has_dims(op: &'static str, dims: &[usize], x: &TensorType) -> Result<(), OpError> {
    let ascending = dims.windows(2).all(|w| w[0] < w[1]) && dims.iter().all(|d| *d < x.ndim());
    require(op, 1, ascending, || format!("dims {dims:?} of {x}"))
}

fn reduce_type(op: &'static str, dims: &[usize], x: &TensorType) -> Inferred {
    has_dims(op, dims, x)?;
    let left = x.dims.iter().enumerate().filter(|(at, _)| !dims.contains(at));
    Ok(TensorType::new(x.dtype, left.map(|(_, d)| d.clone())))
}

fn prod_type(dims: &[usize], x: &TensorType) -> Inferred {
    require("prod", 2, x.dtype != DType::Bool, || format!("the operand is {x}"))?;
    reduce_type("prod", dims, x)
}

fn argmax_type(dim: usize, x: &TensorType) -> Inferred {
    require("argmax", 2, x.dtype != DType::Bool, || format!("the operand is {x}"))?;
    Ok(reduce_type("argmax", &[dim], x)?.with_dtype(DType::I32))
}

fn cumulative_type(dim: usize, x: &TensorType) -> Inferred {
    has_dim("cumulative", 1, dim, x)?;
    require("cumulative", 2, x.dtype != DType::Bool, || format!("the operand is {x}"))?;
    Ok(x.clone())
}

fn order_type(op: &'static str, dim: usize, count: Option<usize>, x: &TensorType) -> Inferred {
    has_dim(op, 1, dim, x)?;
    let mut ty = x.with_dtype(DType::I32);
    if let Some(count) = count {
        require(op, 2, no_larger(&Dim::from(count), &x.dims[dim]), || format!("{count} of {x}"))?;
        ty.dims[dim] = Dim::from(count);
    }
    Ok(ty)
}

fn reverse_type(dims: &[usize], x: &TensorType) -> Inferred {
    has_dims("reverse", dims, x)?;
    Ok(x.clone())
}

fn reshape_type(dims: &[Dim], x: &TensorType) -> Inferred {
    let ty = TensorType::new(x.dtype, dims.to_vec());
    require("reshape", 1, product(dims) == x.elements(), || format!("{x} to {ty}"))?;
    Ok(ty)
}

fn transpose_type(perm: &[usize], x: &TensorType) -> Inferred {
    let mut sorted = perm.to_vec();
    sorted.sort_unstable();
    let is_perm = sorted == (0..x.ndim()).collect::<Vec<_>>();
    require("transpose", 1, is_perm, || format!("perm {perm:?} of {x}"))?;
    Ok(TensorType::new(x.dtype, perm.iter().map(|p| x.dims[*p].clone())))
}

fn broadcast_type(new: &[usize], dims: &[Dim], x: &TensorType) -> Inferred {
    let kept = dims.iter().enumerate().filter(|(at, _)| !new.contains(at)).map(|(_, d)| d);
    let ty = TensorType::new(x.dtype, dims.to_vec());
    let fits = kept.eq(x.dims.iter()) && new.iter().all(|n| *n < dims.len());
    require("broadcast", 1, fits, || format!("{x} to {ty} with new dims {new:?}"))?;
    Ok(ty)
}

fn fixed(dim: &Dim) -> Option<usize> {
    dim.as_constant().and_then(|size| usize::try_from(size).ok())
}

fn window_type(windows: Windows, x: &TensorType) -> Inferred {
    let dim = windows.dim;
    let extent = x.dims.get(dim).and_then(fixed);
    require("window", 1, extent.is_some(), || format!("{x} has no dim {dim} of a fixed size"))?;
    let count = extent.and_then(|extent| windows.count(extent));
    require("window", 2, count.is_some(), || format!("{windows} of {x}"))?;
    let mut ty = x.clone();
    let sizes = [count.unwrap_or(0), windows.size].map(Dim::from);
    ty.dims.splice(dim..=dim, sizes);
    Ok(ty)
}

fn fold_type(windows: Windows, extent: usize, x: &TensorType) -> Inferred {
    let dim = windows.dim;
    let count = windows.count(extent);
    require("fold", 2, count.is_some(), || format!("{windows} of {extent} elements"))?;
    let wanted = [count.unwrap_or(0), windows.size].map(Dim::from);
    let fits = x.dims.get(dim..).is_some_and(|dims| dims.starts_with(&wanted));
    require("fold", 1, fits, || format!("{windows} of {extent} elements from {x}"))?;
    let mut ty = x.clone();
    ty.dims.splice(dim..dim + 2, [Dim::from(extent)]);
    Ok(ty)
}

fn with_dim(x: &TensorType, dim: usize, size: Dim) -> TensorType {
    let mut ty = x.clone();
    ty.dims[dim] = size;
    ty
}

fn slice_type(dim: usize, start: usize, size: usize, x: &TensorType) -> Inferred {
    has_dim("slice", 1, dim, x)?;
    let inside = x.dims[dim].as_constant().is_none_or(|n| (start + size) as i64 <= n);
    require("slice", 1, inside, || format!("{start}..{} of dim {dim} of {x}", start + size))?;
    Ok(with_dim(x, dim, Dim::from(size)))
}

fn pad_type(dim: usize, more: usize, x: &TensorType) -> Inferred {
    has_dim("pad", 1, dim, x)?;
    Ok(with_dim(x, dim, &x.dims[dim] + &Dim::from(more)))
}

fn concat_type(dim: usize, operands: &[&TensorType]) -> Inferred {
    let Some(first) = operands.first() else {
        return Err(OpError { op: "concat", constraint: 1, found: "no operands".into() });
    };
    has_dim("concat", 1, dim, first)?;
    let mut size = Dim::constant(0);
    for x in operands {
        let fits = x.ndim() == first.ndim()
            && with_dim(x, dim, Dim::from(0)) == with_dim(first, dim, Dim::from(0));
        require("concat", 1, fits, || format!("{first} beside {x}"))?;
        size = &size + &x.dims[dim];
    }
    Ok(with_dim(first, dim, size))
}

fn is_index(dtype: DType) -> bool {
    matches!(dtype, DType::I32 | DType::I64 | DType::U32)
}

fn gather_type(dim: usize, table: &TensorType, ids: &TensorType) -> Inferred {
    require("gather", 1, is_index(ids.dtype), || format!("the ids are {ids}"))?;
    has_dim("gather", 2, dim, table)?;
    let dims = table.dims[..dim].iter().chain(&ids.dims).chain(&table.dims[dim + 1..]);
    Ok(TensorType::new(table.dtype, dims.cloned()))
}

fn scatter_type(dim: usize, size: &Dim, ids: &TensorType, x: &TensorType) -> Inferred {
    require("scatter_add", 1, is_index(ids.dtype), || format!("the ids are {ids}"))?;
    let fits = dim + ids.ndim() <= x.ndim() && x.dims[dim..dim + ids.ndim()] == ids.dims[..];
    require("scatter_add", 2, fits, || format!("ids {ids} at dim {dim} of {x}"))?;
    let after = &x.dims[dim + ids.ndim()..];
    let dims = x.dims[..dim].iter().chain([size]).chain(after);
    Ok(TensorType::new(x.dtype, dims.cloned()))
}

fn replace_type(dim: usize, operands: &[&TensorType]) -> Inferred {
    let (x, ids, updates) = (operands[0], operands[1], operands[2]);
    require("scatter", 1, is_index(ids.dtype), || format!("the ids are {ids}"))?;
    let there = updates.dims.get(dim..dim + ids.ndim());
    let fits = dim < x.ndim() && there == Some(&ids.dims[..]) && updates.dtype == x.dtype && {
        let after = &updates.dims[dim + ids.ndim()..];
        updates.dims[..dim] == x.dims[..dim] && *after == x.dims[dim + 1..]
    };
    let found = || format!("updates {updates} of ids {ids} at dim {dim} of {x}");
    require("scatter", 2, fits, found)?;
    Ok(x.clone())
}

fn update_type(dim: usize, operands: &[&TensorType]) -> Inferred {
    let (x, update, at) = (operands[0], operands[1], operands[2]);
    let is_start = is_start(dim, x, at);
    require("dynamic_update_slice", 1, is_start, || format!("the position is {at}"))?;
    has_dim("dynamic_update_slice", 2, dim, x)?;
    let fits = update.ndim() == x.ndim()
        && with_dim(update, dim, x.dims[dim].clone()) == *x
        && no_larger(&update.dims[dim], &x.dims[dim]);
    require("dynamic_update_slice", 2, fits, || format!("{update} into {x} along dim {dim}"))?;
    Ok(x.clone())
}

fn dynamic_slice_type(dim: usize, size: &Dim, x: &TensorType, at: &TensorType) -> Inferred {
    let is_start = is_start(dim, x, at);
    require("dynamic_slice", 1, is_start, || format!("the position is {at}"))?;
    has_dim("dynamic_slice", 2, dim, x)?;
    let fits = no_larger(size, &x.dims[dim]);
    require("dynamic_slice", 2, fits, || format!("{size} of dim {dim} of {x}"))?;
    Ok(with_dim(x, dim, size.clone()))
}

/// Whether a tensor says where ranges along a dim of `x` begin: all of them, or those of each point
/// of the first dim.
fn is_start(dim: usize, x: &TensorType, at: &TensorType) -> bool {
    let is_of_each = dim > 0 && x.dims.get(..1) == Some(&at.dims[..]);
    at.dtype == DType::I32 && (at.ndim() == 0 || is_of_each)
}

fn no_larger(a: &Dim, b: &Dim) -> bool {
    match (a.as_constant(), b.as_constant()) {
        (Some(a), Some(b)) => a <= b,
        _ => true,
    }
}

fn call_types(
    function: &str,
    operands: &[&TensorType],
    module: &Module,
) -> Result<Vec<TensorType>, OpError> {
    let Some(callee) = module.function(function) else {
        let found = format!("no function `@{function}` before the call");
        return Err(OpError { op: "call", constraint: 1, found });
    };
    let params = callee.param_types();
    let text = |types: &mut dyn Iterator<Item = String>| types.collect::<Vec<_>>().join(", ");
    require("call", 1, params.iter().eq(operands.iter().copied()), || {
        let given = text(&mut operands.iter().map(|t| t.to_string()));
        let wanted = text(&mut params.iter().map(|t| t.to_string()));
        format!("`@{function}` takes ({wanted}), the operands are ({given})")
    })?;
    Ok(callee.result_types())
}

fn collective_type(kind: &Collective, operands: &[&TensorType]) -> Inferred {
    let x = operands[0];
    match kind {
        Collective::AllReduce(_) => Ok(x.clone()),
        Collective::AllGather { dim, counts, order } => {
            has_dim("all_gather", 1, *dim, x)?;
            require("all_gather", 2, order.allows(counts), || {
                format!("pieces of {counts:?} in {} order", order.name())
            })?;
            Ok(with_dim(x, *dim, Dim::from(counts.iter().sum::<usize>())))
        }
        Collective::ReduceScatter { dim, counts, order, own } => {
            has_dim("reduce_scatter", 1, *dim, x)?;
            let whole = Dim::from(counts.iter().sum::<usize>());
            let fits = x.dims[*dim] == whole && *own < counts.len() && order.allows(counts);
            require("reduce_scatter", 2, fits, || format!("piece {own} of {counts:?} of {x}"))?;
            Ok(with_dim(x, *dim, Dim::from(counts[*own])))
        }
        Collective::AllToAll { pieces } => {
            has_dim("all_to_all", 1, 0, x)?;
            let count = i64::try_from(*pieces).ok();
            let fits = count.is_some_and(|count| count > 0 && x.dims[0].divide(count).is_some());
            require("all_to_all", 2, fits, || format!("{pieces} pieces of {x}"))?;
            Ok(x.clone())
        }
        Collective::Dispatch { pieces, .. } => routed("dispatch", x, operands[1], *pieces),
        Collective::Combine { pieces, .. } => {
            let here = x.dims.first().and_then(|dim| dim.divide(i64::try_from(*pieces).ok()?));
            let here = here.map(|dim| with_dim(x, 0, dim));
            require("combine", 1, here.is_some(), || format!("{pieces} pieces of {x}"))?;
            let here = here.unwrap_or_else(|| x.clone());
            routed("combine", &here, operands[1], 1)?;
            Ok(here)
        }
    }
}

/// The type of the tokens of all members, of those of one, where gates are for as many.
fn routed(op: &'static str, x: &TensorType, gates: &TensorType, pieces: usize) -> Inferred {
    has_dim(op, 1, 0, x)?;
    let all = with_dim(x, 0, &Dim::from(pieces) * &x.dims[0]);
    let tokens = |ty: &TensorType| ty.dims[..ty.ndim().saturating_sub(1)].to_vec();
    let fits = pieces > 0 && tokens(&all) == tokens(gates) && gates.dtype == x.dtype;
    require(op, 2, fits, || format!("gates {gates} for {all}"))?;
    Ok(all)
}
