//! The table `eval`: the value of each op, and the reference interpreter made of it.
//!
//! Plain loops over dense tensors: what every other engine is compared with. A call of a composite
//! evaluates its definition. Each result is rounded to its type; of a narrow one it is computed in
//! f32 before. Deliberately absent: collectives, which need peers.

mod conv;
mod elementwise;
mod order;
mod sum;
mod view;

use std::rc::Rc;

use crate::dim::{Bindings, Dim};
use crate::infer::name;
use crate::module::{Function, Module};
use crate::op::Op;
use crate::random::Key;
use crate::tensor::{Data, Tensor, places, strides};
use crate::{DType, Diagnostic, Span, ValueId};

/// Evaluates a function of a module that verifies.
///
/// Symbols such as `B` take the values that the arguments' dims give them.
///
/// # Errors
/// `E1010` when there is no such function or the arguments are not of its parameters' types,
/// `E1011` for a collective, an element type that the interpreter lacks, or a range that does not
/// fit once sizes are known.
pub fn eval(module: &Module, function: &str, args: &[Tensor]) -> Result<Vec<Tensor>, Diagnostic> {
    let span = Span::of(format!("@{function}"));
    let Some(callee) = module.function(function) else {
        return Err(Diagnostic::error("E1010", span, format!("no function `@{function}`")));
    };
    let bindings = bind(callee, args).map_err(|found| Diagnostic::error("E1010", span, found))?;
    let args = args.iter().cloned().map(Rc::new).collect();
    let results = call(module, callee, args, &bindings)?;
    Ok(results.into_iter().map(Rc::unwrap_or_clone).collect())
}

/// The values of the symbols, when the arguments fit the parameters.
pub fn bind(function: &Function, args: &[Tensor]) -> Result<Bindings, String> {
    let params = function.param_types();
    if params.len() != args.len() {
        return Err(format!("{} arguments for {} parameters", args.len(), params.len()));
    }
    let mut bindings = Bindings::new();
    for (ty, arg) in params.iter().zip(args) {
        for (dim, size) in ty.dims.iter().zip(&arg.dims) {
            let symbol = dim.symbols().next().filter(|s| *dim == Dim::symbol(*s));
            if let Some(symbol) = symbol {
                bindings.entry(symbol.to_owned()).or_insert(*size as i64);
            }
        }
    }
    for ((param, ty), arg) in function.params().zip(&params).zip(args) {
        if ty.bind(&bindings) != arg.ty() {
            let name = &function.value(param).name;
            return Err(format!("`%{name}` is {ty}, the argument is {}", arg.ty()));
        }
    }
    Ok(bindings)
}

fn call(
    module: &Module,
    function: &Function,
    args: Vec<Rc<Tensor>>,
    bindings: &Bindings,
) -> Result<Vec<Rc<Tensor>>, Diagnostic> {
    let mut values: Vec<Option<Rc<Tensor>>> = args.into_iter().map(Some).collect();
    values.resize(function.values.len(), None);
    let last_use = last_uses(function);
    for (at, node) in function.nodes.iter().enumerate() {
        let operands: Vec<Rc<Tensor>> = node
            .operands
            .iter()
            .map(|o| values[o.index()].clone().expect("verified: defined before it is used"))
            .collect();
        let results = match node.callee() {
            Some(callee) => {
                let callee = module.function(callee).expect("verified: the callee exists");
                call(module, callee, operands, bindings)?
            }
            None => {
                let operands: Vec<&Tensor> = operands.iter().map(Rc::as_ref).collect();
                let result = eval_op(&node.op, &operands, bindings)
                    .map_err(|found| unsupported(function, &node.op, found))?;
                vec![Rc::new(result)]
            }
        };
        for (id, result) in node.results.iter().zip(results) {
            values[id.index()] = Some(result);
        }
        for operand in node.operands.iter().filter(|o| last_use[o.index()] == at) {
            values[operand.index()] = None;
        }
    }
    let of = |id: &ValueId| values[id.index()].clone().expect("verified: results exist");
    Ok(function.results.iter().map(of).collect())
}

/// For each value the node after which it is not needed.
fn last_uses(function: &Function) -> Vec<usize> {
    let mut last = vec![usize::MAX; function.values.len()];
    for (at, node) in function.nodes.iter().enumerate() {
        for operand in &node.operands {
            last[operand.index()] = at;
        }
    }
    for result in &function.results {
        last[result.index()] = usize::MAX;
    }
    last
}

/// Bytes that the interpreter takes at most for a function whose sizes are bound, roughly: of each
/// element that is there at one time, 8 for it and 8 for the place that it is moved from.
pub fn memory_bytes(module: &Module, function: &str) -> u64 {
    let Some(function) = module.function(function) else { return 0 };
    let last_use = last_uses(function);
    let bytes = |id: &ValueId| {
        let count = function.ty(*id).elements().as_constant();
        16_u64.saturating_mul(count.and_then(|count| u64::try_from(count).ok()).unwrap_or(0))
    };
    let mut live: u64 = function.params().map(|id| bytes(&id)).fold(0, u64::saturating_add);
    let mut most = live;
    for (at, node) in function.nodes.iter().enumerate() {
        let inner = node.callee().map_or(0, |callee| memory_bytes(module, callee));
        live = node.results.iter().map(bytes).fold(live, u64::saturating_add);
        most = most.max(live.saturating_add(inner));
        let mut ended: Vec<ValueId> = node.operands.clone();
        ended.retain(|id| last_use[id.index()] == at);
        ended.sort_unstable();
        ended.dedup();
        live = ended.iter().map(bytes).fold(live, u64::saturating_sub);
    }
    most
}

fn unsupported(function: &Function, op: &Op, found: String) -> Diagnostic {
    let headline = format!("the interpreter cannot evaluate `{}`: {found}", name(op));
    Diagnostic::error("E1011", Span::of(format!("@{}", function.name)), headline)
}

/// The value of one op.
///
/// # Errors
/// What the interpreter lacks.
pub fn eval_op(op: &Op, operands: &[&Tensor], bindings: &Bindings) -> Result<Tensor, String> {
    let sizes = |dims: &[Dim]| dims.iter().map(|d| size(d, bindings)).collect::<Vec<_>>();
    let x = |at: usize| operands[at];
    Ok(match op {
        Op::Constant { value, dtype, dims } => Tensor::filled(*dtype, &sizes(dims), *value),
        Op::Iota { dim, start, dtype, dims } => iota(*dim, *start, *dtype, &sizes(dims)),
        Op::Random { salt, start, extent, per_sample, bits, dtype, dims } => {
            let (key, dims) = (key(x(0)), sizes(dims));
            let first = u64::from(key.sample) * u64::from(*per_sample);
            let stream = key.stream(*salt);
            let draw = |index: u64| f64::from(bits.uniform(stream, index));
            let places = random(first, start, &sizes(extent), &dims);
            Tensor::from_f64(*dtype, &dims, places.into_iter().map(draw).collect())
        }
        Op::FoldKey { salt } => Tensor::key(key(x(0)).fold(*salt)),
        Op::Unary(how) => elementwise::unary(*how, x(0)),
        Op::Binary(how) => elementwise::binary(*how, x(0), x(1)),
        Op::Compare(how) => elementwise::compare(*how, x(0), x(1)),
        Op::Select => elementwise::select(x(0), x(1), x(2)),
        Op::Cast { dtype } => cast(*dtype, x(0)),
        Op::Contract(einsum) => sum::contract(einsum, x(0), x(1)),
        Op::ScaledContract { einsum, runs_first } => {
            sum::scaled_contract(einsum, *runs_first, [0, 1, 2, 3].map(x))
        }
        Op::Conv(c) => conv::conv(c, x(0), x(1)),
        Op::Reduce { combiner, dims } => sum::reduce(*combiner, dims, x(0)),
        Op::Prod { dims } => sum::prod(dims, x(0)),
        Op::ArgMax { dim } => sum::argmax(*dim, x(0)),
        Op::Cumulative { combiner, dim } => sum::cumulative(*combiner, *dim, x(0)),
        Op::Sort { dim, descending } => order::order(*descending, *dim, x(0).dims[*dim], x(0)),
        Op::TopK { dim, count } => order::order(true, *dim, fits(*count, x(0).dims[*dim])?, x(0)),
        Op::Reshape { dims } => view::reshape(&sizes(dims), x(0)),
        Op::Transpose { perm } => view::transpose(perm, x(0)),
        Op::Broadcast { new, dims } => view::broadcast(new, &sizes(dims), x(0)),
        Op::Slice { dim, start, size } => {
            view::slice(*dim, *start, fits(*start + *size, x(0).dims[*dim])? - *start, x(0))
        }
        Op::Pad { dim, before, after } => view::pad(*dim, *before, *after, x(0)),
        Op::Reverse { dims } => view::reverse(dims, x(0)),
        Op::Window(windows) => view::window(*windows, x(0)),
        Op::Fold { windows, extent } => view::fold(*windows, *extent, x(0)),
        Op::Concat { dim } => view::concat(*dim, operands),
        Op::Gather { dim, start } => view::gather(*dim, *start, x(0), x(1)),
        Op::ScatterAdd { dim, start, size: rows } => {
            view::scatter_add(*dim, *start, size(rows, bindings), x(0), x(1))
        }
        Op::Scatter { dim, start } => view::scatter(*dim, *start, x(0), x(1), x(2)),
        Op::DynamicUpdateSlice { dim } => {
            fits(x(1).dims[*dim], x(0).dims[*dim])?;
            view::dynamic_update_slice(*dim, x(0), x(1), x(2))
        }
        Op::DynamicSlice { dim, size: rows } => {
            view::dynamic_slice(*dim, fits(size(rows, bindings), x(0).dims[*dim])?, x(0), x(1))
        }
        Op::Call { function } => return Err(format!("`@{function}` is no primitive")),
        Op::Collective { .. } => return Err("it needs the other ranks of its axis".to_owned()),
    })
}

/// What types cannot say while sizes are symbols.
fn fits(size: usize, whole: usize) -> Result<usize, String> {
    if size <= whole { Ok(size) } else { Err(format!("{size} elements of {whole}")) }
}

fn size(dim: &Dim, bindings: &Bindings) -> usize {
    let size = dim.bind(bindings).as_constant().and_then(|size| usize::try_from(size).ok());
    size.unwrap_or_else(|| panic!("checked: every size is bound, `{dim}` is not"))
}

fn key(key: &Tensor) -> Key {
    let Data::Int(words) = &key.data else { panic!("verified: a key is u32[4]") };
    Key::from_words([words[0] as u32, words[1] as u32, words[2] as u32, words[3] as u32])
}

fn iota(dim: usize, start: i64, dtype: DType, dims: &[usize]) -> Tensor {
    let mut steps = vec![0; dims.len()];
    steps[dim] = 1;
    let numbers: Vec<i64> = places(dims, &steps, 0).iter().map(|at| *at as i64 + start).collect();
    cast(dtype, &Tensor::int(DType::I64, dims, numbers))
}

/// The row-major index in the global tensor of each element, where the first dim starts at the
/// index `first`: the number of its draw.
fn random(first: u64, start: &[i64], extent: &[usize], dims: &[usize]) -> Vec<u64> {
    let steps = strides(extent);
    let origin = start.iter().zip(&steps).enumerate().map(|(at, (start, step))| {
        let first = if at == 0 { first } else { 0 };
        (*start as u64 + first) * *step as u64
    });
    let origin: u64 = origin.sum();
    places(dims, &steps, 0).iter().map(|at| origin + *at as u64).collect()
}

fn cast(dtype: DType, x: &Tensor) -> Tensor {
    match (&x.data, dtype) {
        (Data::Int(numbers), DType::I8 | DType::I32 | DType::I64 | DType::U32) => {
            Tensor::int(dtype, &x.dims, numbers.clone())
        }
        // Rounded once.
        (Data::Int(numbers), DType::F32) => {
            Tensor::f32(&x.dims, numbers.iter().map(|n| *n as f32).collect())
        }
        (Data::F64(_) | Data::F32(_) | Data::Int(_) | Data::Bool(_), _) => {
            Tensor::from_f64(dtype, &x.dims, x.to_f64())
        }
    }
}
