//! Random modules: every op may occur, types are right, `B` is a symbol.

use gantline_ir::build::Builder;
use gantline_ir::infer::infer;
use gantline_ir::op::{Binary, Combiner, Comparison, Convolution, Einsum, Unary, Windows};
use gantline_ir::random::DrawBits;
use gantline_ir::{DType, Dim, Kind, Module, Op, Tensor, TensorType, ValueId};

use crate::draws::Draws;
use crate::ops::{kinds, order};

/// What `B` is when a generated module is evaluated.
pub(crate) const BATCH: usize = 3;

/// A module of two layers and an entry `@main` that calls them.
pub(crate) fn module(r: &mut Draws) -> Module {
    let mut module = Module::new("random");
    let mut layers = Vec::new();
    for name in ["first", "second", "main"] {
        let node_count = 5 + r.below(25);
        layers.push(function(&mut module, name, &layers, node_count, r));
    }
    module
}

/// Arguments of a generated function.
pub(crate) fn arguments(module: &Module, function: &str, r: &mut Draws) -> Vec<Tensor> {
    let bindings = [(Dim::BATCH.to_owned(), BATCH as i64)].into();
    let types = module.function(function).unwrap().param_types();
    let argument = |ty: TensorType| {
        let ty = ty.bind(&bindings);
        let dims = ty.sizes().unwrap();
        match ty.dtype {
            DType::Bool => r.bools(&dims),
            DType::I32 => r.ids(&dims, -1, 4),
            DType::U32 => r.key(),
            DType::F64 => r.signed(&dims),
            DType::F32
            | DType::BF16
            | DType::F16
            | DType::F8E4M3
            | DType::F8E5M2
            | DType::I8
            | DType::I64 => panic!("no parameters of {} are generated", ty.dtype),
        }
    };
    types.into_iter().map(argument).collect()
}

/// The types of a function's parameters, for samples of a given count.
pub(crate) fn bound_types(module: &Module, function: &str, batch: i64) -> Vec<TensorType> {
    let bindings = [(Dim::BATCH.to_owned(), batch)].into();
    let types = module.function(function).unwrap().param_types();
    types.iter().map(|ty| ty.bind(&bindings)).collect()
}

fn function(
    module: &mut Module,
    name: &str,
    layers: &[String],
    node_count: usize,
    r: &mut Draws,
) -> String {
    let mut b = Builder::new(module, name, Kind::Layer);
    let batch = || Dim::symbol(Dim::BATCH);
    let matrix = || vec![batch(), Dim::from(3)];
    b.param("key", TensorType::of(DType::U32, &[4]));
    b.param("x", TensorType::new(DType::F64, matrix()));
    b.param("w", TensorType::of(DType::F64, &[3, 2]));
    b.param("ids", TensorType::new(DType::I32, [batch()]));
    b.param("mask", TensorType::new(DType::Bool, matrix()));
    b.param("at", TensorType::scalar(DType::I32));
    let kinds = kinds();
    let mut added = 0;
    while added < node_count {
        let count = b.function().values.len();
        let values: Vec<ValueId> = (0..3).map(|_| ValueId(r.below(count) as u32)).collect();
        let kind = &kinds[r.below(kinds.len())];
        let Some((op, operands)) = node(kind, &b, &values, layers, r) else { continue };
        let types: Vec<&TensorType> = operands.iter().map(|o| b.ty(*o)).collect();
        let fits = infer(&op, &types, b.module());
        // Whether a constant update fits into `B` elements is not known before `B` is.
        let is_unbound = if let Op::DynamicUpdateSlice { dim } = &op {
            types[0].dims.get(*dim) != types[1].dims.get(*dim)
        } else {
            false
        };
        if !is_unbound && fits.is_ok_and(|types| types.iter().all(is_small)) {
            b.push_all("v", op, &operands);
            added += 1;
        }
    }
    let last = b.function().values.len() as u32 - 1;
    b.finish(&[ValueId(last), ValueId(1), ValueId(last / 2 + 3)])
}

fn is_small(ty: &TensorType) -> bool {
    let count = ty.bind(&[(Dim::BATCH.to_owned(), BATCH as i64)].into()).count();
    ty.ndim() <= 5 && count.is_some_and(|count| (1..500).contains(&count))
}

/// An op of a kind with operands that it may take.
fn node(
    kind: &Op,
    b: &Builder,
    values: &[ValueId],
    layers: &[String],
    r: &mut Draws,
) -> Option<(Op, Vec<ValueId>)> {
    let (x, y) = (values[0], values[1]);
    let ty = b.ty(x).clone();
    let like = |wanted: &TensorType| -> Option<ValueId> {
        let all = (0..b.function().values.len() as u32).rev().map(ValueId);
        all.into_iter().find(|v| b.ty(*v) == wanted && *v != x)
    };
    let dim = if ty.ndim() > 0 { r.below(ty.ndim()) } else { 0 };
    let size = || ty.dims.get(dim).and_then(Dim::as_constant).map(|n| n as usize);
    let dtypes = [DType::F64, DType::I32, DType::F32];
    let (key, ids, at) = (ValueId(0), ValueId(3), ValueId(5));
    Some(match kind {
        Op::Constant { .. } => {
            let value = [0.5, -0.0, 1e-300, f64::INFINITY, 3.0, -1e9][r.below(6)];
            (Op::Constant { value, dtype: DType::F64, dims: ty.dims }, vec![])
        }
        Op::Iota { .. } => {
            let dtype = dtypes[r.below(2)];
            (Op::Iota { dim, start: r.below(9) as i64 - 4, dtype, dims: ty.dims }, vec![])
        }
        Op::Random { .. } => {
            let start = ty.dims.iter().map(|_| r.below(3) as i64).collect();
            let extent = ty.dims.iter().map(|d| d + &Dim::from(2)).collect();
            let salt = r.below(5) as u32;
            let (per_sample, dtype) = (r.below(3) as u32, DType::F64);
            let (bits, dims) = ([DrawBits::B24, DrawBits::B16][r.below(2)], ty.dims);
            (Op::Random { salt, start, extent, per_sample, bits, dtype, dims }, vec![key])
        }
        Op::FoldKey { .. } => (Op::FoldKey { salt: r.below(9) as u32 }, vec![key]),
        Op::Unary(_) => (Op::Unary(Unary::ALL[r.below(Unary::ALL.len())]), vec![x]),
        Op::Binary(_) => (Op::Binary(Binary::ALL[r.below(Binary::ALL.len())]), vec![x, like(&ty)?]),
        Op::Compare(_) => (Op::Compare(Comparison::ALL[r.below(3)]), vec![x, like(&ty)?]),
        Op::Select => (Op::Select, vec![like(&ty.with_dtype(DType::Bool))?, x, like(&ty)?]),
        Op::Cast { .. } => (Op::Cast { dtype: dtypes[r.below(3)] }, vec![x]),
        Op::Contract(_) => (Op::Contract(einsum(&ty, b.ty(y), r)), vec![x, y]),
        Op::ScaledContract { .. } => return None,
        Op::Conv(_) => {
            let spatial = ty.ndim().checked_sub(2)?;
            let steps = |r: &mut Draws| (0..spatial).map(|_| 1 + r.below(2)).collect::<Vec<_>>();
            let padding = |r: &mut Draws| (0..spatial).map(|_| r.below(3) as i64).collect();
            let (stride, dilation, spread) = (steps(r), steps(r), steps(r));
            let (before, after) = (padding(r), padding(r));
            let orders = [0; 3].map(|_| order(ty.ndim(), r));
            let c = Convolution { stride, before, after, dilation, spread, orders };
            (Op::Conv(c), vec![x, y])
        }
        Op::Reduce { .. } => {
            let dims = (0..ty.ndim()).filter(|_| r.coin()).collect();
            (Op::Reduce { combiner: Combiner::ALL[r.below(3)], dims }, vec![x])
        }
        Op::Prod { .. } => (Op::Prod { dims: vec![dim] }, vec![x]),
        Op::ArgMax { .. } => (Op::ArgMax { dim }, vec![x]),
        Op::Cumulative { .. } => {
            (Op::Cumulative { combiner: Combiner::ALL[r.below(3)], dim }, vec![x])
        }
        Op::Sort { .. } => (Op::Sort { dim, descending: r.coin() }, vec![x]),
        Op::TopK { .. } => (Op::TopK { dim, count: r.below(size()? + 1) }, vec![x]),
        Op::Reshape { .. } => (Op::Reshape { dims: vec![ty.elements(), Dim::from(1)] }, vec![x]),
        Op::Transpose { .. } => (Op::Transpose { perm: (0..ty.ndim()).rev().collect() }, vec![x]),
        Op::Broadcast { .. } => {
            let mut dims = ty.dims;
            dims.insert(dim, [Dim::from(2), Dim::symbol(Dim::BATCH)][r.below(2)].clone());
            (Op::Broadcast { new: vec![dim], dims }, vec![x])
        }
        Op::Slice { .. } => {
            let start = r.below(size()?);
            (Op::Slice { dim, start, size: 1 + r.below(size()? - start) }, vec![x])
        }
        Op::Pad { .. } => (Op::Pad { dim, before: r.below(3), after: r.below(3) }, vec![x]),
        Op::Reverse { .. } => (Op::Reverse { dims: vec![dim] }, vec![x]),
        Op::Window(_) => {
            let [size, stride, dilation] = [1 + r.below(3), 1 + r.below(2), 1 + r.below(2)];
            (Op::Window(Windows { dim, size, stride, dilation }), vec![x])
        }
        Op::Fold { .. } => {
            let size = ty.dims.get(dim + 1)?.as_constant()? as usize;
            let count = ty.dims[dim].as_constant()? as usize;
            let windows = Windows { dim, size, stride: 1 + r.below(2), dilation: 1 };
            let extent = (count.max(1) - 1) * windows.stride + size;
            (Op::Fold { windows, extent }, vec![x])
        }
        Op::Concat { .. } => (Op::Concat { dim }, vec![x, x, y][..2 + r.below(2)].to_vec()),
        Op::Gather { .. } => (Op::Gather { dim, start: r.below(3) as i64 - 1 }, vec![x, ids]),
        Op::ScatterAdd { .. } => {
            let size = Dim::from(1 + r.below(4));
            (Op::ScatterAdd { dim, start: r.below(3) as i64 - 1, size }, vec![ids, x])
        }
        Op::Scatter { .. } => (Op::Scatter { dim, start: r.below(3) as i64 - 1 }, vec![x, ids, y]),
        Op::DynamicUpdateSlice { .. } => (Op::DynamicUpdateSlice { dim }, vec![x, y, at]),
        Op::DynamicSlice { .. } => {
            let size = ty.dims.get(dim)?.clone();
            (Op::DynamicSlice { dim, size }, vec![x, at])
        }
        Op::Call { .. } => {
            let callee = layers.get(r.below(3))?;
            let like = |ty: &TensorType| values.iter().copied().find(|v| b.ty(*v) == ty);
            let params = b.module().function(callee)?.param_types();
            let own = |at: usize| ValueId(at as u32);
            let given = params.iter().enumerate().map(|(at, ty)| like(ty).unwrap_or(own(at)));
            (Op::Call { function: callee.clone() }, given.collect())
        }
        Op::Collective { .. } => return None,
    })
}

/// Factors with equal sizes are shared at random; what stands in both may be summed.
pub(crate) fn einsum(a: &TensorType, b: &TensorType, r: &mut Draws) -> Einsum {
    let letter = |at: usize| (b'a' + at as u8) as char;
    let in_a: Vec<char> = (0..a.ndim()).map(letter).collect();
    let mut in_b = Vec::new();
    for (at, size) in b.dims.iter().enumerate() {
        let shared = (0..a.ndim()).find(|d| a.dims[*d] == *size && !in_b.contains(&letter(*d)));
        in_b.push(shared.filter(|_| r.coin()).map_or(letter(a.ndim() + at), letter));
    }
    let all = Einsum::new(in_a.clone(), in_b.clone(), Vec::new());
    let both = |c: &char| in_a.contains(c) && in_b.contains(c);
    let result = all.letters().into_iter().filter(|c| !both(c) || r.coin()).rev().collect();
    Einsum { result, ..all }
}
