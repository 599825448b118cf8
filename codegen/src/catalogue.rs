//! The catalogue: which kernel computes an op or a composite that is not fused.

use ir::module::Attributes;
use ir::op::{Binary, Combiner, Einsum, Windows};
use ir::random::DrawBits;
use ir::{DType, Function, Op, TensorType};
use kernels::kernel::{
    Attention, Copy, CopyLoop, Dropout, Experts, Fill, Gather, Line, Lines, LoopAB, LoopABC,
    LoopAC, LoopBC, Positions, Product, Rope, Scales, StoredTypes, Tiling, Window,
};
use kernels::rows::{Access, BinaryOp, Draw, Instr, Output, ReduceOp, RowInput, Rows, UnaryOp};
use kernels::{Kernel, Offset};

use crate::refusal::Refusal;
use crate::scalars::Scalars;
use crate::tile::{Places, digits, global_places};

/// Composites that have a kernel of their own; all others are inlined before planning.
pub const CATALOGUE: [&str; 15] = [
    "attention",
    "attention_bwd",
    "attention_dropout",
    "attention_dropout_bwd",
    "attention_cached",
    "rope",
    "rope_scaled",
    "gelu_tanh",
    "gelu_tanh_bwd",
    "gelu_erf",
    "gelu_erf_bwd",
    "silu",
    "silu_bwd",
    "experts",
    "experts_bwd",
];

/// Whether a composite stays a call when a module is prepared for planning.
pub fn is_in_catalogue(composite: &str) -> bool {
    CATALOGUE.contains(&composite)
}

/// Whether the kernel of a composite can add a result, by number, to what its output holds:
/// gradients of weights are added up over micro-batches.
pub(crate) fn can_add(composite: &str, result: usize) -> bool {
    composite == "experts_bwd" && result >= EXPERTS_WEIGHTS
}

/// Results of the gradient of experts that come before those of weights.
const EXPERTS_WEIGHTS: usize = 2;

/// The kernel of an op with local sizes; `add` asks it to add to what the output holds. Where the
/// pieces of this rank begin is added to `scalars`.
///
/// # Errors
/// A sentence that names the op, when there is no kernel for it.
#[expect(clippy::wildcard_enum_match_arm, reason = "an op that is not listed has no kernel")]
pub fn kernel_of_op(
    op: &Op,
    operands: &[&TensorType],
    result: &TensorType,
    add: bool,
    scalars: &mut Scalars,
) -> Result<Kernel, Refusal> {
    let sizes = result.sizes().ok_or("a local size is open")?;
    match op {
        Op::Contract(einsum) => Ok(Kernel::Product(product(einsum, operands, &sizes, result, add))),
        Op::ScaledContract { einsum, runs_first } => {
            let mut product = product(einsum, operands, &sizes, result, add);
            product.scales = scales(&product, *runs_first, [operands[2], operands[3]]);
            Ok(Kernel::Product(product))
        }
        Op::Gather { dim, start } => {
            Ok(Kernel::Gather(look_up(operands[0], operands[1], (*dim, *start), false, scalars)?))
        }
        Op::ScatterAdd { dim, start, .. } => {
            Ok(Kernel::ScatterAdd(look_up(result, operands[0], (*dim, *start), add, scalars)?))
        }
        Op::Window(windows) => Ok(Kernel::Copy(unfold(*windows, operands[0], result)?)),
        Op::Fold { windows, .. } => {
            lines(operands[0], windows.dim, 2, sizes[windows.dim], fold(*windows))
        }
        Op::Cumulative { combiner, dim } => {
            lines(operands[0], *dim, 1, sizes[*dim], Line::Cumulative(reduction(*combiner)))
        }
        Op::ArgMax { dim } => lines(operands[0], *dim, 1, 1, Line::ArgMax),
        Op::Sort { dim, descending } => {
            lines(operands[0], *dim, 1, sizes[*dim], Line::Order { descending: *descending })
        }
        Op::TopK { dim, count } => {
            lines(operands[0], *dim, 1, *count, Line::Order { descending: true })
        }
        Op::Binary(Binary::Div) if matches!(result.dtype, DType::I32 | DType::U32) => {
            Ok(Kernel::Rows(quotient(result.dtype, sizes.iter().product())))
        }
        Op::Binary(Binary::Pow) if matches!(result.dtype, DType::I32 | DType::U32) => {
            Ok(Kernel::Rows(power(result.dtype, sizes.iter().product())))
        }
        Op::Cast { dtype } => Ok(Kernel::Rows(cast(operands[0].dtype, *dtype, &sizes)?)),
        Op::Constant { value, dtype, .. } => {
            Ok(Kernel::Fill(Fill { len: sizes.iter().product(), value: *value, dtype: *dtype }))
        }
        Op::Iota { dim, start, dtype, .. } => {
            let base = scalars.offset(*start, Scalars::ANY);
            Ok(Kernel::Rows(count(*dim, base, *dtype, &sizes)))
        }
        Op::Random { salt, start, extent, per_sample, bits, dtype, dims } => {
            let places = global_places(start, extent, dims, *per_sample);
            Ok(Kernel::Rows(drawn((*salt, *bits), places, *dtype, &sizes, scalars)))
        }
        Op::Broadcast { new, .. } => Ok(Kernel::Copy(repeat(new, &sizes, result.dtype))),
        Op::Slice { dim, start, .. } => {
            Ok(Kernel::Copy(cut(operands[0], (*dim, *start), &sizes, result.dtype, scalars)?))
        }
        Op::Transpose { perm } => Ok(Kernel::Copy(permute(operands[0], perm, result.dtype)?)),
        Op::Pad { dim, before, .. } => Ok(Kernel::Copy(pad(operands[0], *dim, *before, &sizes)?)),
        Op::DynamicSlice { dim, .. } => {
            Ok(Kernel::Take(window(operands[0], result, operands[1], *dim)?))
        }
        _ => Err(lacking(format!("there is no kernel for `{}` yet", ir::infer::name(op)))),
    }
}

fn lacking(why: String) -> Refusal {
    Refusal::NoKernel(why)
}

pub(crate) fn row_major(sizes: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; sizes.len()];
    for dim in (0..sizes.len().saturating_sub(1)).rev() {
        strides[dim] = strides[dim + 1] * sizes[dim + 1];
    }
    strides
}

fn product(
    einsum: &Einsum,
    operands: &[&TensorType],
    sizes: &[usize],
    result: &TensorType,
    add: bool,
) -> Product {
    let (a_sizes, b_sizes) =
        (operands[0].sizes().unwrap_or_default(), operands[1].sizes().unwrap_or_default());
    let (a_strides, b_strides, c_strides) =
        (row_major(&a_sizes), row_major(&b_sizes), row_major(sizes));
    let place = |letters: &[char], letter: char| letters.iter().position(|c| *c == letter);
    let mut product = Product {
        batch: Vec::new(),
        m: Vec::new(),
        n: Vec::new(),
        k: Vec::new(),
        accumulate: add,
        dtype: result.dtype.accumulation(),
        stored: StoredTypes { a: operands[0].dtype, b: operands[1].dtype, c: result.dtype },
        operands: einsum.operands,
        borders: Vec::new(),
        scales: None,
        tiling: Tiling::default(),
    };
    for letter in &einsum.result {
        let c = place(&einsum.result, *letter).map_or(0, |at| c_strides[at]);
        match (place(&einsum.a, *letter), place(&einsum.b, *letter)) {
            (Some(a), Some(b)) => {
                let size = a_sizes[a];
                product.batch.push(LoopABC { size, a: a_strides[a], b: b_strides[b], c });
            }
            (Some(a), None) => product.m.push(LoopAC { size: a_sizes[a], a: a_strides[a], c }),
            (None, Some(b)) => product.n.push(LoopBC { size: b_sizes[b], b: b_strides[b], c }),
            (None, None) => {}
        }
    }
    for (at, letter) in einsum.a.iter().enumerate() {
        if let (None, Some(b)) = (place(&einsum.result, *letter), place(&einsum.b, *letter)) {
            product.k.push(LoopAB { size: a_sizes[at], a: a_strides[at], b: b_strides[b] });
        }
    }
    product
}

/// Where the scales of a product of matrices lie.
fn scales(
    product: &Product,
    runs_first: [bool; 2],
    types: [&TensorType; 2],
) -> Option<[Scales; 2]> {
    let [_, m, n, _] = product.sizes();
    let of = |at: usize, side: usize| {
        let [first, second] = types[at].sizes()?[..] else { return None };
        let (blocks, of_block, of_run) =
            if runs_first[at] { (second, 1, second) } else { (first, second, 1) };
        let block = if blocks == side { 1 } else { Scales::RUN };
        Some(Scales { block, of_block, of_run })
    };
    Some([of(0, m)?, of(1, n)?])
}

/// Look-ups along a dim of a table whose first row is of the id `start`.
///
/// # Errors
/// A sentence, when there is no kernel for the types.
pub(crate) fn look_up(
    table: &TensorType,
    ids: &TensorType,
    (dim, start): (usize, i64),
    accumulate: bool,
    scalars: &mut Scalars,
) -> Result<Gather, Refusal> {
    let sizes = table.sizes().ok_or("a table's size is open")?;
    if start < 0 {
        return Err(lacking(format!("tables that start at id {start} have no kernel yet")));
    }
    if ids.dtype != DType::I32 {
        return Err(lacking(format!("ids of {} have no kernel yet: use i32", ids.dtype)));
    }
    Ok(Gather {
        outer: sizes[..dim].iter().product(),
        rows: sizes[dim],
        base: scalars.offset(start, Scalars::ANY),
        width: sizes[dim + 1..].iter().product(),
        count: ids.count().ok_or("the number of ids is open")?,
        accumulate,
        dtype: table.dtype,
    })
}

/// Lines along `merged` dims from `dim` on, which yield lines of another length.
fn lines(
    x: &TensorType,
    dim: usize,
    merged: usize,
    result: usize,
    how: Line,
) -> Result<Kernel, Refusal> {
    let sizes = x.sizes().ok_or("a local size is open")?;
    Ok(Kernel::Lines(Lines {
        outer: sizes[..dim].iter().product(),
        extent: sizes[dim..dim + merged].iter().product(),
        result,
        inner: sizes[dim + merged..].iter().product(),
        how,
        dtype: x.dtype,
    }))
}

fn fold(Windows { size, stride, dilation, .. }: Windows) -> Line {
    Line::Fold { size, stride, dilation }
}

pub(crate) fn reduction(combiner: Combiner) -> ReduceOp {
    match combiner {
        Combiner::Sum => ReduceOp::Sum,
        Combiner::Max => ReduceOp::Max,
        Combiner::Min => ReduceOp::Min,
    }
}

/// Windows that overlap where they read.
fn unfold(w: Windows, operand: &TensorType, result: &TensorType) -> Result<Copy, Refusal> {
    let open = "a local size is open";
    let (from, to) = (operand.sizes().ok_or(open)?, result.sizes().ok_or(open)?);
    let mut source = row_major(&from);
    let step = source[w.dim];
    source.splice(w.dim..=w.dim, [step * w.stride, step * w.dilation]);
    Ok(copy(loops_of(&to, &source, &row_major(&to)), result.dtype))
}

/// Elements of another type.
fn cast(from: DType, to: DType, sizes: &[usize]) -> Result<Rows, Refusal> {
    let known = |dtype| {
        matches!(
            dtype,
            DType::F32 | DType::F64 | DType::I32 | DType::U32 | DType::I64 | DType::Bool
        )
    };
    if !known(from) || !known(to) {
        return Err(lacking(format!("there is no kernel that casts {from} to {to} yet")));
    }
    let count = sizes.iter().product();
    let access = Access::full(1, count);
    // In binary64 all of these types are exact but i64.
    let is_whole = from == DType::I64 || to == DType::I64;
    let mut instrs = vec![Instr::Load { input: 0 }];
    // Integers wrap, others become the nearest integer towards zero.
    match (from, to) {
        (DType::I32, DType::U32) => instrs.push(Instr::Unary { op: UnaryOp::WrapU32, x: 0 }),
        (DType::U32, DType::I32) => instrs.push(Instr::Unary { op: UnaryOp::WrapI32, x: 0 }),
        _ => {}
    }
    let value = instrs.len() - 1;
    let output = Output::Store { value, access: access.clone(), dtype: to, accumulate: false };
    Ok(Rows {
        rows: 1,
        cols: count,
        dtype: if is_whole { DType::I64 } else { DType::F64 },
        inputs: vec![RowInput { dtype: from, access }],
        instrs,
        outputs: vec![output],
    })
}

/// Quotients of integers, rounded down; zero where the divisor is.
///
/// In binary64 the quotient of two numbers of 32 bits that is no integer is further from the next
/// one than rounding moves it, so that the result is exact.
fn quotient(dtype: DType, count: usize) -> Rows {
    let access = Access::full(1, count);
    let input = RowInput { dtype, access: access.clone() };
    let wrap = if dtype == DType::U32 { UnaryOp::WrapU32 } else { UnaryOp::WrapI32 };
    Rows {
        rows: 1,
        cols: count,
        dtype: DType::F64,
        inputs: vec![input.clone(), input],
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Load { input: 1 },
            Instr::Binary { op: BinaryOp::Div, a: 0, b: 1 },
            Instr::Unary { op: UnaryOp::Floor, x: 2 },
            Instr::Const { value: 0.0 },
            Instr::Binary { op: BinaryOp::Eq, a: 1, b: 4 },
            Instr::Select { condition: 5, a: 4, b: 3 },
            // The least number by minus one wraps.
            Instr::Unary { op: wrap, x: 6 },
        ],
        outputs: vec![Output::Store { value: 7, access, dtype, accumulate: false }],
    }
}

/// Powers of integers of 32 bits, which wrap.
fn power(dtype: DType, count: usize) -> Rows {
    let access = Access::full(1, count);
    let input = RowInput { dtype, access: access.clone() };
    Rows {
        rows: 1,
        cols: count,
        dtype: DType::I64,
        inputs: vec![input.clone(), input],
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Load { input: 1 },
            Instr::Binary { op: BinaryOp::Pow, a: 0, b: 1 },
        ],
        outputs: vec![Output::Store { value: 2, access, dtype, accumulate: false }],
    }
}

/// What a kernel computes in that only stores elements of a type: other integers than those of 64
/// bits keep all their bits in binary64.
pub(crate) fn stored_in(dtype: DType) -> DType {
    if matches!(dtype, DType::F32 | DType::I64) { dtype } else { DType::F64 }
}

/// A counter along one dim, stored.
fn count(dim: usize, base: Offset, dtype: DType, sizes: &[usize]) -> Rows {
    let count: usize = sizes.iter().product();
    let mut strides = vec![0; sizes.len()];
    strides[dim] = 1;
    let row = digits(sizes, &strides);
    stored(Instr::Index { row, col_stride: 0, base }, Vec::new(), dtype, count)
}

/// Draws, stored: for what reads them and is no block program.
fn drawn(
    (salt, bits): (u32, DrawBits),
    places: Places,
    dtype: DType,
    sizes: &[usize],
    scalars: &mut Scalars,
) -> Rows {
    let count: usize = sizes.iter().product();
    let Places { strides, offset, unit, sample_stride } = places;
    let row = digits(sizes, &strides);
    let offset = scalars.offset(offset.cast_signed(), Scalars::any_of(unit));
    let draw = Draw { key: 0, salt, bits, row, col: Vec::new(), offset, unit, sample_stride };
    let key = RowInput { dtype: DType::U32, access: Access::scalar() };
    stored(Instr::Random(draw), vec![key], dtype, count)
}

/// A loop over `count` elements that stores what one instruction makes of each element's index.
fn stored(instr: Instr, inputs: Vec<RowInput>, dtype: DType, count: usize) -> Rows {
    Rows {
        rows: count,
        cols: 1,
        dtype: stored_in(dtype),
        inputs,
        instrs: vec![instr],
        outputs: vec![Output::Store {
            value: 0,
            access: Access::per_row(count),
            dtype,
            accumulate: false,
        }],
    }
}

fn copy(loops: Vec<CopyLoop>, dtype: DType) -> Copy {
    Copy { loops, source_offset: Offset::ZERO, target_offset: 0, zero_first: 0, dtype }
}

/// The window `part` of `whole` along a dim.
///
/// # Errors
/// A sentence, when there is no kernel for the type of the position.
pub(crate) fn window(
    whole: &TensorType,
    part: &TensorType,
    position: &TensorType,
    dim: usize,
) -> Result<Window, Refusal> {
    if position.dtype != DType::I32 {
        let dtype = position.dtype;
        return Err(lacking(format!("positions of {dtype} have no kernel yet: use i32")));
    }
    let whole = whole.sizes().ok_or("a local size is open")?;
    let len = part.sizes().ok_or("a local size is open")?[dim];
    Ok(Window {
        outer: whole[..dim].iter().product(),
        positions: position.sizes().ok_or("a local size is open")?.iter().product(),
        len,
        capacity: whole[dim],
        inner: whole[dim + 1..].iter().product(),
        dtype: part.dtype,
    })
}

fn repeat(new: &[usize], sizes: &[usize], dtype: DType) -> Copy {
    let target = row_major(sizes);
    let mut loops: Vec<CopyLoop> = Vec::new();
    let mut step = 1;
    for dim in (0..sizes.len()).rev() {
        let source = if new.contains(&dim) { 0 } else { step };
        if source != 0 {
            step *= sizes[dim];
        }
        loops.push(CopyLoop { size: sizes[dim], source, target: target[dim] });
    }
    loops.reverse();
    copy(loops, dtype)
}

pub(crate) fn loops_of(sizes: &[usize], source: &[usize], target: &[usize]) -> Vec<CopyLoop> {
    let strides = source.iter().zip(target);
    let loops = sizes.iter().zip(strides);
    loops.map(|(size, (s, t))| CopyLoop { size: *size, source: *s, target: *t }).collect()
}

/// The piece of an operand that begins at `start` along a dim.
pub(crate) fn cut(
    operand: &TensorType,
    (dim, start): (usize, usize),
    sizes: &[usize],
    dtype: DType,
    scalars: &mut Scalars,
) -> Result<Copy, Refusal> {
    let whole = operand.sizes().ok_or("a local size is open")?;
    let source = row_major(&whole);
    let last = whole[dim].saturating_sub(sizes[dim]);
    let offsets = 0..=(last * source[dim]) as i64;
    Ok(Copy {
        source_offset: scalars.offset((start * source[dim]) as i64, offsets),
        ..copy(loops_of(sizes, &source, &row_major(sizes)), dtype)
    })
}

fn permute(operand: &TensorType, perm: &[usize], dtype: DType) -> Result<Copy, Refusal> {
    let from = operand.sizes().ok_or("a local size is open")?;
    let strides = row_major(&from);
    let sizes: Vec<usize> = perm.iter().map(|p| from[*p]).collect();
    let source: Vec<usize> = perm.iter().map(|p| strides[*p]).collect();
    Ok(copy(loops_of(&sizes, &source, &row_major(&sizes)), dtype))
}

fn pad(operand: &TensorType, dim: usize, before: usize, sizes: &[usize]) -> Result<Copy, Refusal> {
    let from = operand.sizes().ok_or("a local size is open")?;
    let target = row_major(sizes);
    Ok(Copy {
        target_offset: before * target[dim],
        zero_first: sizes.iter().product(),
        ..copy(loops_of(&from, &row_major(&from), &target), operand.dtype)
    })
}

/// The kernel of a composite of the catalogue; `adds` asks it to add results, by number, to what
/// their outputs hold, where it can.
///
/// # Errors
/// A sentence that names the composite, when there is no kernel for it.
pub fn kernel_of_composite(
    name: &str,
    attributes: &Attributes,
    function: &Function,
    adds: &[bool],
    scalars: &mut Scalars,
) -> Result<Kernel, Refusal> {
    let mut attention = |dropout| attention(attributes, function, dropout, scalars);
    match name {
        "attention" => Ok(Kernel::Attention(attention(false)?)),
        "attention_bwd" => Ok(Kernel::AttentionBwd(attention(false)?)),
        "attention_dropout" => Ok(Kernel::Attention(attention(true)?)),
        "attention_dropout_bwd" => Ok(Kernel::AttentionBwd(attention(true)?)),
        "attention_cached" => {
            Ok(Kernel::Attention(Attention { position: true, causal: true, ..attention(false)? }))
        }
        "experts" => Ok(Kernel::Experts(experts(attributes, function)?)),
        "experts_bwd" => {
            let mut experts = experts(attributes, function)?;
            for (accumulate, add) in experts.accumulate.iter_mut().zip(&adds[EXPERTS_WEIGHTS..]) {
                *accumulate = *add;
            }
            Ok(Kernel::ExpertsBwd(experts))
        }
        "rope" | "rope_scaled" => Ok(Kernel::Rope(rope(attributes, function)?)),
        _ => Err(lacking(format!("there is no kernel for the composite `{name}` yet"))),
    }
}

fn sizes_of(function: &Function, name: &str) -> Result<Vec<usize>, String> {
    let sizes = function.find(name).and_then(|v| function.ty(v).sizes());
    sizes.ok_or_else(|| format!("`@{}` has no `%{name}` of fixed size", function.name))
}

fn attention(
    attributes: &Attributes,
    function: &Function,
    dropout: bool,
    scalars: &mut Scalars,
) -> Result<Attention, Refusal> {
    let (q, k) = (sizes_of(function, "q")?, sizes_of(function, "k")?);
    let number = |name: &str| attributes.get(name).copied().unwrap_or(0.0);
    for name in ["window", "softcap"] {
        let value = number(name);
        let is_whole = name == "softcap" || value.fract() == 0.0;
        if !(is_whole && (0.0..=f64::from(1 << 30)).contains(&value)) {
            return Err(format!("`{name}` of attention is {value}").into());
        }
    }
    let window = number("window") as usize;
    let whole = |name: &str| number(name) as i64;
    let group = whole("group").max(1);
    let (heads, kv_heads) = (q[2] as i64, k[2] as i64);
    // Key-value head 0 of this rank serves query heads from `group * kv_offset` on.
    let first = whole("head_offset") - group * whole("kv_offset");
    let head_offset = scalars.offset(first, 0..=group * kv_heads - heads);
    let dropped = dropout.then(|| Dropout {
        p: number("p"),
        salt: number("salt") as u32,
        bits: DrawBits::of_composite(attributes),
        sample_offset: 0,
        heads_total: number("heads") as u64,
        head_base: scalars.offset(whole("head_offset"), 0..=whole("heads") - heads),
        queries_total: (number("queries") as u64).max(q[1] as u64),
        query_base: number("query_start") as u64,
        keys_total: k[1] as u64,
        key_base: 0,
    });
    Ok(Attention {
        batch: q[0],
        queries: q[1],
        keys: k[1],
        heads: q[2],
        kv_heads: k[2],
        dim: q[3],
        scale: number("scale"),
        causal: number("query_offset") < k[1] as f64 || window > 0,
        window,
        softcap: number("softcap"),
        bias: (number("bias") != 0.0).then(|| bias_strides(attributes, &q, k[1])),
        bias_grad: number("bias_grad") != 0.0,
        documents: (number("documents") != 0.0).then(|| number("query_start") as usize),
        query_offset: number("query_offset") as i64,
        position: false,
        head_offset,
        group: group as usize,
        dropout: dropped,
        dtype: function.ty(ir::ValueId(0)).dtype,
        q: Attention::contiguous(q[1], q[2], q[3]),
        k: Attention::contiguous(k[1], k[2], k[3]),
        v: Attention::contiguous(k[1], k[2], k[3]),
        out: Attention::contiguous(q[1], q[2], q[3]),
    })
}

/// The kernel of `experts` and its gradient.
fn experts(attributes: &Attributes, function: &Function) -> Result<Experts, Refusal> {
    let (x, up) = (sizes_of(function, "x")?, sizes_of(function, "w_up")?);
    let number = |name: &str| attributes.get(name).map_or(0, |number| *number as usize);
    let of = number("of").max(up[0]);
    Ok(Experts {
        tokens: x[0] * x[1],
        experts: up[0],
        model: up[2],
        inner: up[1],
        top_k: number("top_k").clamp(1, of.max(1)),
        of,
        accumulate: [false; 3],
        dtype: function.ty(ir::ValueId(0)).dtype,
    })
}

/// Strides of a contiguous bias over batch, heads and queries; zero over those that share it.
fn bias_strides(attributes: &Attributes, q: &[usize], keys: usize) -> [usize; 3] {
    let mut stride = keys;
    let mut own = |flag: &str, size: usize| {
        if attributes.get(flag).is_none_or(|set| *set == 0.0) {
            return 0;
        }
        let own = stride;
        stride *= size;
        own
    };
    let queries = own("bias_queries", q[1]);
    let heads = own("bias_heads", q[2]);
    [own("bias_batch", q[0]), heads, queries]
}

/// The kernel of `rope` and `rope_scaled`; without a ramp the factor is exactly one.
fn rope(attributes: &Attributes, function: &Function) -> Result<Rope, Refusal> {
    let x = sizes_of(function, "x")?;
    let number = |key: &str, default| attributes.get(key).copied().unwrap_or(default);
    let theta = number("theta", 10_000.0);
    let frequency = |pair: usize| {
        let frequency = theta.powf(-2.0 * pair as f64 / x[3] as f64);
        let ramp = number("offset", 0.0)
            + number("by_pair", 0.0) * pair as f64
            + number("by_frequency", 0.0) * frequency;
        frequency * (1.0 + ramp.clamp(0.0, 1.0) * number("stretch", 0.0))
    };
    Ok(Rope {
        batch: x[0],
        seq: x[1],
        heads: x[2],
        dim: x[3],
        frequencies: (0..x[3] / 2).map(frequency).collect(),
        positions: match number("by_sample", 0.0) {
            0.0 => Positions::FromInput(number("start", 0.0) as u64),
            _ => Positions::FromInputs(number("start", 0.0) as u64),
        },
        inverse: attributes.get("sign").is_some_and(|sign| *sign < 0.0),
        gain: number("gain", 1.0),
        dtype: function.ty(ir::ValueId(0)).dtype,
        x: Attention::contiguous(x[1], x[2], x[3]),
        y: Attention::contiguous(x[1], x[2], x[3]),
    })
}
