//! The table `vjp`: for each op, the cotangents of its operands from that of its result.
//!
//! Integers and booleans have no cotangent. Where a derivative jumps, one side is taken: `abs` has
//! slope 0 at 0, `max` and `min` of equal operands pass everything to the second one (so that
//! `max x 0` is a ReLU of slope 0 at 0), and a reduction to the largest or smallest, cumulative
//! or not, shares it equally among the elements that attain it.

mod conv;

use crate::build::Builder;
use crate::dim::Dim;
use crate::module::{Node, ValueId};
use crate::op::{Binary, Combiner, Comparison, Einsum, Op, Unary, Windows};
use crate::types::TensorType;
use crate::{DType, Diagnostic, Span, infer};

/// A cotangent for each operand that has one.
pub type Cotangents = Vec<Option<ValueId>>;

/// What a gradient is computed from.
struct Site<'s> {
    node: &'s Node,
    /// The cotangent of the result.
    d: ValueId,
    /// How the cotangent of each operand is named.
    names: Vec<String>,
}

/// Adds the nodes that compute the cotangents of a node's operands, from those of its results.
///
/// Calls are not for this table: see [`crate::autodiff`].
///
/// # Errors
/// `E1012` for an op whose gradient cannot be written: a collective, a contraction of codes, a
/// concatenation along a dim of symbolic size.
pub fn vjp(
    b: &mut Builder,
    node: &Node,
    cotangents: &[Option<ValueId>],
) -> Result<Cotangents, Diagnostic> {
    let Some(d) = cotangents[0] else { return Ok(vec![None; node.operands.len()]) };
    let names = node.operands.iter().map(|o| format!("d.{}", b.function().value(*o).name));
    let s = &Site { node, d, names: names.collect() };
    let none = || vec![None; node.operands.len()];
    Ok(match &node.op {
        Op::Constant { .. } | Op::Iota { .. } => none(),
        Op::Random { .. } | Op::FoldKey { .. } => none(),
        Op::Unary(how) => vec![unary(b, s, *how)],
        Op::Binary(how) => binary(b, s, *how),
        Op::Compare(_) => none(),
        Op::Select => select(b, s),
        Op::Cast { .. } => vec![cast(b, s)],
        Op::Contract(einsum) => contract(b, s, einsum),
        Op::Conv(c) => conv::conv(b, s, c),
        Op::Reduce { combiner, dims } => vec![Some(reduce(b, s, *combiner, dims))],
        Op::Prod { dims } => vec![prod(b, s, dims)],
        Op::ArgMax { .. } => none(),
        Op::Cumulative { combiner, dim } => vec![cumulative(b, s, *combiner, *dim)],
        Op::Sort { .. } | Op::TopK { .. } => none(),
        Op::Reshape { .. } => vec![Some(reshape(b, s))],
        Op::Transpose { perm } => vec![Some(transpose(b, s, perm))],
        Op::Broadcast { new, .. } => vec![Some(sum(b, s, new))],
        Op::Slice { dim, start, .. } => vec![Some(slice(b, s, *dim, *start))],
        Op::Pad { dim, before, .. } => vec![Some(piece(b, s, 0, *dim, *before))],
        Op::Reverse { dims } => vec![Some(reverse(b, s, dims))],
        Op::Window(windows) => vec![Some(window(b, s, *windows))],
        Op::Fold { windows, .. } => vec![Some(b.push(&s.names[0], Op::Window(*windows), &[d]))],
        Op::Concat { dim } => concat(b, s, *dim)?,
        Op::Gather { dim, start } => vec![Some(gather(b, s, *dim, *start)), None],
        Op::ScatterAdd { dim, start, .. } => vec![None, Some(scatter_add(b, s, *dim, *start))],
        Op::Scatter { dim, start } => scatter(b, s, *dim, *start),
        Op::DynamicUpdateSlice { dim } => dynamic_update_slice(b, s, *dim),
        Op::DynamicSlice { dim, .. } => vec![Some(dynamic_slice(b, s, *dim)), None],
        Op::Call { .. } | Op::Collective { .. } | Op::ScaledContract { .. } => {
            return Err(no_gradient(b, node, ""));
        }
    })
}

fn no_gradient(b: &Builder, node: &Node, why: &str) -> Diagnostic {
    let span = Span::of(format!("@{}", b.function().name));
    let result = &b.function().value(node.result()).name;
    let op = infer::name(&node.op);
    Diagnostic::error("E1012", span, format!("`%{result}` = `{op}` has no gradient{why}"))
}

impl Site<'_> {
    fn operand(&self, at: usize) -> ValueId {
        self.node.operands[at]
    }

    fn result(&self) -> ValueId {
        self.node.result()
    }
}

/// `x` times a number.
fn scaled(b: &mut Builder, name: &str, x: ValueId, by: f64) -> ValueId {
    let by = b.constant_like(&format!("{name}.factor"), by, x);
    b.mul(name, x, by)
}

fn zero_like(b: &mut Builder, name: &str, x: ValueId) -> ValueId {
    b.constant_like(&format!("{name}.zero"), 0.0, x)
}

fn unary(b: &mut Builder, s: &Site, how: Unary) -> Option<ValueId> {
    let (x, y, d, name) = (s.operand(0), s.result(), s.d, s.names[0].as_str());
    if !b.ty(x).dtype.is_float() {
        return None;
    }
    Some(match how {
        Unary::Neg => b.unary(name, Unary::Neg, d),
        Unary::Abs => abs(b, s),
        Unary::Exp => b.mul(name, d, y),
        Unary::Log => b.binary(name, Binary::Div, d, x),
        Unary::Sqrt => {
            let half = scaled(b, &format!("{name}.half"), d, 0.5);
            b.binary(name, Binary::Div, half, y)
        }
        Unary::Rsqrt => {
            let square = b.mul(&format!("{name}.square"), y, y);
            let cube = b.mul(&format!("{name}.cube"), square, y);
            let slope = scaled(b, &format!("{name}.slope"), cube, -0.5);
            b.mul(name, d, slope)
        }
        Unary::Tanh => {
            let square = b.mul(&format!("{name}.square"), y, y);
            let one = b.constant_like(&format!("{name}.one"), 1.0, y);
            let slope = b.binary(&format!("{name}.slope"), Binary::Sub, one, square);
            b.mul(name, d, slope)
        }
        Unary::Erf => {
            let square = b.mul(&format!("{name}.square"), x, x);
            let minus = b.unary(&format!("{name}.minus"), Unary::Neg, square);
            let gauss = b.unary(&format!("{name}.gauss"), Unary::Exp, minus);
            let scale = std::f64::consts::FRAC_2_SQRT_PI;
            let slope = scaled(b, &format!("{name}.slope"), gauss, scale);
            b.mul(name, d, slope)
        }
        Unary::Sin => {
            let slope = b.unary(&format!("{name}.slope"), Unary::Cos, x);
            b.mul(name, d, slope)
        }
        Unary::Cos => {
            let sin = b.unary(&format!("{name}.sin"), Unary::Sin, x);
            let slope = b.unary(&format!("{name}.slope"), Unary::Neg, sin);
            b.mul(name, d, slope)
        }
        Unary::Floor | Unary::PowerFloor => return None,
    })
}

fn abs(b: &mut Builder, s: &Site) -> ValueId {
    let (x, d, name) = (s.operand(0), s.d, s.names[0].as_str());
    let zero = zero_like(b, name, x);
    let above = b.compare(&format!("{name}.above"), Comparison::Lt, zero, x);
    let below = b.compare(&format!("{name}.below"), Comparison::Lt, x, zero);
    let minus = b.unary(&format!("{name}.minus"), Unary::Neg, d);
    let left = b.push(&format!("{name}.left"), Op::Select, &[below, minus, zero]);
    b.push(name, Op::Select, &[above, d, left])
}

fn binary(b: &mut Builder, s: &Site, how: Binary) -> Cotangents {
    let (x, z, d) = (s.operand(0), s.operand(1), s.d);
    if !b.ty(x).dtype.is_float() {
        return vec![None, None];
    }
    let (of_x, of_z) = (s.names[0].as_str(), s.names[1].as_str());
    let (dx, dz) = match how {
        Binary::Add => (d, d),
        Binary::Sub => (d, b.unary(of_z, Unary::Neg, d)),
        Binary::Mul => (b.mul(of_x, d, z), b.mul(of_z, d, x)),
        Binary::Div => {
            let dx = b.binary(of_x, Binary::Div, d, z);
            let product = b.mul(&format!("{of_z}.product"), dx, s.result());
            (dx, b.unary(of_z, Unary::Neg, product))
        }
        Binary::Max => larger(b, s, z, x),
        Binary::Min => larger(b, s, x, z),
        Binary::Pow => (pow_base(b, s), pow_exponent(b, s)),
    };
    vec![Some(dx), Some(dz)]
}

/// The first operand gets all where `low < high`, else the second one.
fn larger(b: &mut Builder, s: &Site, low: ValueId, high: ValueId) -> (ValueId, ValueId) {
    let name = s.names[0].as_str();
    let first = b.compare(&format!("{name}.chosen"), Comparison::Lt, low, high);
    let zero = zero_like(b, name, s.d);
    let dx = b.push(name, Op::Select, &[first, s.d, zero]);
    (dx, b.push(&s.names[1], Op::Select, &[first, zero, s.d]))
}

/// `d · b · a^(b-1)`, zero where `b` is zero.
fn pow_base(b: &mut Builder, s: &Site) -> ValueId {
    let (base, exponent, name) = (s.operand(0), s.operand(1), s.names[0].as_str());
    let one = b.constant_like(&format!("{name}.one"), 1.0, exponent);
    let less = b.binary(&format!("{name}.less"), Binary::Sub, exponent, one);
    let power = b.binary(&format!("{name}.power"), Binary::Pow, base, less);
    let slope = b.mul(&format!("{name}.slope"), exponent, power);
    let product = b.mul(&format!("{name}.product"), s.d, slope);
    let zero = zero_like(b, name, exponent);
    let flat = b.compare(&format!("{name}.flat"), Comparison::Eq, exponent, zero);
    b.push(name, Op::Select, &[flat, zero, product])
}

/// `d · a^b · log a`, zero where `a` is not positive.
fn pow_exponent(b: &mut Builder, s: &Site) -> ValueId {
    let (base, name) = (s.operand(0), s.names[1].as_str());
    let log = b.unary(&format!("{name}.log"), Unary::Log, base);
    let slope = b.mul(&format!("{name}.slope"), s.result(), log);
    let product = b.mul(&format!("{name}.product"), s.d, slope);
    let zero = zero_like(b, name, base);
    let positive = b.compare(&format!("{name}.positive"), Comparison::Lt, zero, base);
    b.push(name, Op::Select, &[positive, product, zero])
}

fn select(b: &mut Builder, s: &Site) -> Cotangents {
    if !b.ty(s.result()).dtype.is_float() {
        return vec![None; 3];
    }
    let condition = s.operand(0);
    let zero = zero_like(b, &s.names[1], s.d);
    let da = b.push(&s.names[1], Op::Select, &[condition, s.d, zero]);
    let db = b.push(&s.names[2], Op::Select, &[condition, zero, s.d]);
    vec![None, Some(da), Some(db)]
}

fn cast(b: &mut Builder, s: &Site) -> Option<ValueId> {
    let (from, to) = (b.ty(s.operand(0)).dtype, b.ty(s.result()).dtype);
    let both = from.is_float() && to.is_float();
    both.then(|| b.push(&s.names[0], Op::Cast { dtype: from }, &[s.d]))
}

/// Two contractions of the same factors: `bsm,mf->bsf` gives `bsf,mf->bsm` and `bsm,bsf->mf`. The
/// cotangent of a wide result is rounded to the type of the operands first, as they were.
fn contract(b: &mut Builder, s: &Site, einsum: &Einsum) -> Cotangents {
    let Einsum { a, b: other, result, operands, .. } = einsum.clone();
    let of_a = Einsum { operands, ..Einsum::new(result.clone(), other.clone(), a.clone()) };
    let of_b = Einsum { operands, ..Einsum::new(a, result, other) };
    let dtype = b.ty(s.operand(0)).dtype;
    let d = match b.ty(s.d).dtype == dtype {
        true => s.d,
        false => b.push(&format!("{}.d", s.names[0]), Op::Cast { dtype }, &[s.d]),
    };
    let da = b.push(&s.names[0], Op::Contract(of_a), &[d, s.operand(1)]);
    let db = b.push(&s.names[1], Op::Contract(of_b), &[s.operand(0), d]);
    vec![Some(da), Some(db)]
}

fn reduce(b: &mut Builder, s: &Site, combiner: Combiner, over: &[usize]) -> ValueId {
    let (x, name) = (s.operand(0), s.names[0].as_str());
    let TensorType { dtype, dims } = b.ty(x).clone();
    let repeat = Op::Broadcast { new: over.to_vec(), dims: dims.clone() };
    match combiner {
        Combiner::Sum => b.push(name, repeat, &[s.d]),
        Combiner::Max | Combiner::Min => {
            let best = b.push(&format!("{name}.best"), repeat.clone(), &[s.result()]);
            let hit = b.compare(&format!("{name}.hit"), Comparison::Eq, x, best);
            let zero = zero_like(b, name, x);
            let one = Op::Constant { value: 1.0, dtype, dims };
            let one = b.push(&format!("{name}.one"), one, &[]);
            let ones = b.push(&format!("{name}.ones"), Op::Select, &[hit, one, zero]);
            let sum = Combiner::Sum;
            let count = b.reduce(&format!("{name}.count"), sum, over.to_vec(), ones);
            let share = b.binary(&format!("{name}.share"), Binary::Div, s.d, count);
            let shares = b.push(&format!("{name}.shares"), repeat, &[share]);
            b.push(name, Op::Select, &[hit, shares, zero])
        }
    }
}

/// `d` times the product of the other factors. That is the product of all factors that are not
/// zero, divided by the own one: where all are not zero, and at the zero where there is one.
fn prod(b: &mut Builder, s: &Site, over: &[usize]) -> Option<ValueId> {
    let (x, name) = (s.operand(0), s.names[0].as_str());
    let TensorType { dtype, dims } = b.ty(x).clone();
    if !dtype.is_float() {
        return None;
    }
    let named = |part: &str| format!("{name}.{part}");
    let repeat = Op::Broadcast { new: over.to_vec(), dims };
    let zero = zero_like(b, name, x);
    let one = b.constant_like(&named("one"), 1.0, x);
    let is_zero = b.compare(&named("is_zero"), Comparison::Eq, x, zero);
    let factors = b.push(&named("factors"), Op::Select, &[is_zero, one, x]);
    let product = b.push(&named("product"), Op::Prod { dims: over.to_vec() }, &[factors]);
    let slope = b.mul(&named("slope"), s.d, product);
    let slopes = b.push(&named("slopes"), repeat.clone(), &[slope]);
    let shares = b.binary(&named("shares"), Binary::Div, slopes, factors);
    // The product of the others has no zero when all zeros are the own one.
    let own = b.push(&named("own"), Op::Select, &[is_zero, one, zero]);
    let count = b.reduce(&named("count"), Combiner::Sum, over.to_vec(), own);
    let counts = b.push(&named("counts"), repeat, &[count]);
    let alone = b.compare(&named("alone"), Comparison::Eq, counts, own);
    Some(b.push(name, Op::Select, &[alone, shares, zero]))
}

/// Sums run backwards. For a largest or smallest so far, each cotangent is shared equally among
/// the elements up to its own that attain it, by a table of all pairs of indices.
fn cumulative(b: &mut Builder, s: &Site, combiner: Combiner, dim: usize) -> Option<ValueId> {
    let (x, name) = (s.operand(0), s.names[0].as_str());
    let TensorType { dtype, dims } = b.ty(x).clone();
    if !dtype.is_float() {
        return None;
    }
    let named = |part: &str| format!("{name}.{part}");
    if combiner == Combiner::Sum {
        let back = b.push(&named("back"), Op::Reverse { dims: vec![dim] }, &[s.d]);
        let sums = b.push(&named("sums"), Op::Cumulative { combiner, dim }, &[back]);
        return Some(b.push(name, Op::Reverse { dims: vec![dim] }, &[sums]));
    }
    // Dim `dim` counts the result's elements, the next one those of the operand.
    let mut pairs = dims;
    pairs.insert(dim, pairs[dim].clone());
    let along = |new: usize| Op::Broadcast { new: vec![new], dims: pairs.clone() };
    let elements = b.push(&named("elements"), along(dim), &[x]);
    let best = b.push(&named("best"), along(dim + 1), &[s.result()]);
    let hit = b.compare(&named("hit"), Comparison::Eq, elements, best);
    let result_at = b.iota(&named("result_at"), dim, DType::I32, pairs.clone());
    let operand_at = b.iota(&named("operand_at"), dim + 1, DType::I32, pairs.clone());
    let before = b.compare(&named("before"), Comparison::Le, operand_at, result_at);
    let zero = zero_like(b, name, elements);
    let one = b.constant_like(&named("one"), 1.0, elements);
    let hits = b.push(&named("hits"), Op::Select, &[hit, one, zero]);
    let ones = b.push(&named("ones"), Op::Select, &[before, hits, zero]);
    let count = b.reduce(&named("count"), Combiner::Sum, vec![dim + 1], ones);
    let share = b.binary(&named("share"), Binary::Div, s.d, count);
    let shares = b.push(&named("shares"), along(dim + 1), &[share]);
    let taken = b.mul(&named("taken"), shares, ones);
    Some(b.reduce(name, Combiner::Sum, vec![dim], taken))
}

fn window(b: &mut Builder, s: &Site, windows: Windows) -> ValueId {
    let extent = b.ty(s.operand(0)).dims[windows.dim].as_constant();
    let extent = extent.and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
    b.push(&s.names[0], Op::Fold { windows, extent }, &[s.d])
}

fn reverse(b: &mut Builder, s: &Site, dims: &[usize]) -> ValueId {
    b.push(&s.names[0], Op::Reverse { dims: dims.to_vec() }, &[s.d])
}

fn reshape(b: &mut Builder, s: &Site) -> ValueId {
    let dims = b.ty(s.operand(0)).dims.clone();
    b.push(&s.names[0], Op::Reshape { dims }, &[s.d])
}

fn transpose(b: &mut Builder, s: &Site, perm: &[usize]) -> ValueId {
    let mut inverse = vec![0; perm.len()];
    for (at, from) in perm.iter().enumerate() {
        inverse[*from] = at;
    }
    b.push(&s.names[0], Op::Transpose { perm: inverse }, &[s.d])
}

fn sum(b: &mut Builder, s: &Site, over: &[usize]) -> ValueId {
    b.reduce(&s.names[0], Combiner::Sum, over.to_vec(), s.d)
}

fn position(b: &mut Builder, name: &str, at: usize) -> ValueId {
    b.constant(&format!("{name}.at"), at as f64, TensorType::scalar(DType::I32))
}

/// Zeros around the cotangent; written into zeros where the dim's size is symbolic.
fn slice(b: &mut Builder, s: &Site, dim: usize, start: usize) -> ValueId {
    let (x, name) = (s.operand(0), s.names[0].as_str());
    let size = |ty: &TensorType| ty.dims[dim].as_constant().and_then(|n| usize::try_from(n).ok());
    match (size(b.ty(x)), size(b.ty(s.d))) {
        (Some(whole), Some(size)) => {
            let after = whole - start - size;
            b.push(name, Op::Pad { dim, before: start, after }, &[s.d])
        }
        _ => {
            let zero = zero_like(b, name, x);
            let at = position(b, name, start);
            b.push(name, Op::DynamicUpdateSlice { dim }, &[zero, s.d, at])
        }
    }
}

/// The cotangent of an operand that lies in the result from `start` on.
fn piece(b: &mut Builder, s: &Site, operand: usize, dim: usize, start: usize) -> ValueId {
    let name = s.names[operand].as_str();
    let size = b.ty(s.operand(operand)).dims[dim].clone();
    match size.as_constant().and_then(|n| usize::try_from(n).ok()) {
        Some(size) => b.push(name, Op::Slice { dim, start, size }, &[s.d]),
        None => {
            let at = position(b, name, start);
            b.push(name, Op::DynamicSlice { dim, size }, &[s.d, at])
        }
    }
}

fn concat(b: &mut Builder, s: &Site, dim: usize) -> Result<Cotangents, Diagnostic> {
    if !b.ty(s.result()).dtype.is_float() {
        return Ok(vec![None; s.node.operands.len()]);
    }
    let mut start = Dim::constant(0);
    let mut pieces = Vec::new();
    for (at, operand) in s.node.operands.iter().enumerate() {
        let Some(from) = start.as_constant().and_then(|n| usize::try_from(n).ok()) else {
            return Err(no_gradient(b, s.node, ": an operand starts at a symbolic index"));
        };
        pieces.push(Some(piece(b, s, at, dim, from)));
        start = &start + &b.ty(*operand).dims[dim];
    }
    Ok(pieces)
}

fn gather(b: &mut Builder, s: &Site, dim: usize, start: i64) -> ValueId {
    let size = b.ty(s.operand(0)).dims[dim].clone();
    b.push(&s.names[0], Op::ScatterAdd { dim, start, size }, &[s.operand(1), s.d])
}

fn scatter_add(b: &mut Builder, s: &Site, dim: usize, start: i64) -> ValueId {
    b.push(&s.names[1], Op::Gather { dim, start }, &[s.d, s.operand(0)])
}

/// What was replaced gets nothing; of several updates of one slice the last one gets it all.
fn scatter(b: &mut Builder, s: &Site, dim: usize, start: i64) -> Cotangents {
    let (x, ids, updates) = (s.operand(0), s.operand(1), s.operand(2));
    if !b.ty(x).dtype.is_float() {
        return vec![None; 3];
    }
    let name = s.names[2].clone();
    let named = |part: &str| format!("{name}.{part}");
    let zero = zero_like(b, &name, updates);
    let dx = b.push(&s.names[0], Op::Scatter { dim, start }, &[s.d, ids, zero]);
    // The number of each update is written where the update is, and read again.
    let (of_ids, of_updates) = (b.ty(ids).clone(), b.ty(updates).clone());
    let (flat, of_ids_ndim) = (vec![of_ids.elements()], of_ids.ndim());
    let number = b.iota(&named("number"), 0, DType::I32, flat);
    let numbers = b.push(&named("numbers"), Op::Reshape { dims: of_ids.dims }, &[number]);
    let slots = TensorType::new(DType::I32, [b.ty(x).dims[dim].clone()]);
    let nobody = b.constant(&named("nobody"), -1.0, slots);
    let owner = Op::Scatter { dim: 0, start };
    let owner = b.push(&named("owner"), owner, &[nobody, ids, numbers]);
    let last = b.push(&named("last"), Op::Gather { dim: 0, start }, &[owner, ids]);
    let stays = b.compare(&named("stays"), Comparison::Eq, last, numbers);
    let beside = (0..of_updates.ndim()).filter(|at| !(dim..dim + of_ids_ndim).contains(at));
    let repeat = Op::Broadcast { new: beside.collect(), dims: of_updates.dims.clone() };
    let stay = b.push(&named("stay"), repeat, &[stays]);
    let read = b.push(&named("read"), Op::Gather { dim, start }, &[s.d, ids]);
    let dupdates = b.push(&name, Op::Select, &[stay, read, zero]);
    vec![Some(dx), None, Some(dupdates)]
}

fn dynamic_update_slice(b: &mut Builder, s: &Site, dim: usize) -> Cotangents {
    let (update, at) = (s.operand(1), s.operand(2));
    let zero = zero_like(b, &s.names[0], update);
    let dx = b.push(&s.names[0], Op::DynamicUpdateSlice { dim }, &[s.d, zero, at]);
    let size = b.ty(update).dims[dim].clone();
    let dupdate = b.push(&s.names[1], Op::DynamicSlice { dim, size }, &[s.d, at]);
    vec![Some(dx), Some(dupdate), None]
}

fn dynamic_slice(b: &mut Builder, s: &Site, dim: usize) -> ValueId {
    let zero = zero_like(b, &s.names[0], s.operand(0));
    b.push(&s.names[0], Op::DynamicUpdateSlice { dim }, &[zero, s.d, s.operand(1)])
}
