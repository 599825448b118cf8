//! What a kernel costs: operations, bytes that must move, and scratch memory.

use ir::{DType, Target};

use crate::kernel::{
    Attention, Copy, Experts, Fill, Gather, Kernel, Line, Lines, Product, Products, Rope, Scales,
    Source, Window,
};
use crate::rows::{Access, BinaryOp, Instr, Output, Rows, UnaryOp};
use crate::units::{Bytes, Flops};

/// Operations that a transcendental function counts as. Chosen: about the length of the
/// polynomials in `cpu::math`.
const TRANSCENDENTAL: u64 = 10;

/// Floating-point operations; one fused multiply-add counts two.
///
/// * product: `2 · batch · m · n · k`; what is added to its result is not counted, what is computed
///   of it is, as rows
/// * attention: two products of `2 · D` per visible pair of query and key, five for the gradient;
///   a causal mask hides about half of the pairs, a window more, and hidden pairs are not counted,
///   unless the position of the queries is known at run time only; a bound of the scores is a
///   transcendental function per pair, and a bias one operation, twice in the gradient; a gradient
///   of the bias computes the scores and their gradients once more. Which pairs documents hide is
///   in the data: none are, which is an upper bound
/// * experts: three products of `2 · M · F` per pair of a token and an expert, eight for the
///   gradient, which computes two of them once more; `top_k` pairs per token
/// * rows: per point (per row for row scalars) one for arithmetic, ten for a transcendental
///   function, one per point and reduction
/// * rotary embedding: three per element; scatter: one per element; copies: none
/// * lines: one per element; an order one per element and halving of a line
pub fn flops(kernel: &Kernel) -> Flops {
    match kernel {
        Kernel::Product(p) => p.flops(),
        Kernel::Products(p) => {
            let products: u64 = p.parts.iter().map(|part| part.product.flops().0).sum();
            Flops(products + pointwise_flops(p).0)
        }
        Kernel::Rows(r) => rows_flops(r),
        Kernel::Attention(a) => attention_flops(a, 4, 1),
        Kernel::AttentionBwd(a) => {
            attention_flops(a, if a.bias_grad { 14 } else { 10 }, 2 + u64::from(a.bias_grad))
        }
        Kernel::Experts(e) => experts_flops(e, 3),
        Kernel::ExpertsBwd(e) => experts_flops(e, 8),
        Kernel::ScatterAdd(g) => Flops((g.outer * g.count * g.width) as u64),
        Kernel::Lines(l) => lines_flops(l),
        Kernel::Rope(r) => Flops((3 * r.batch * r.seq * r.heads * r.dim) as u64),
        Kernel::Gather(_)
        | Kernel::Replace(_)
        | Kernel::Copy(_)
        | Kernel::Place(_)
        | Kernel::Take(_)
        | Kernel::Fill(_) => Flops(0),
    }
}

/// Compulsory traffic: every distinct element read or written once, whatever caches do.
///
/// An accumulated output is read and written. Attention's scores and other scratch do not count.
/// A gathered row is read once per id, an expert once, where there are pairs for all.
pub fn bytes(kernel: &Kernel) -> Bytes {
    match kernel {
        Kernel::Product(p) => product_bytes(p),
        Kernel::Products(p) => products_bytes(p),
        Kernel::Rows(r) => rows_bytes(r),
        Kernel::Attention(a) => attention_bytes(a),
        Kernel::AttentionBwd(a) => attention_bwd_bytes(a),
        Kernel::Experts(e) => experts_bytes(e, 2, 1),
        Kernel::ExpertsBwd(e) => experts_bwd_bytes(e),
        Kernel::Gather(g) | Kernel::Replace(g) => gather_bytes(g, 2),
        Kernel::Lines(l) => lines_bytes(l),
        Kernel::ScatterAdd(g) => scatter_bytes(g),
        Kernel::Rope(r) => rope_bytes(r),
        Kernel::Copy(c) => copy_bytes(c),
        Kernel::Place(w) | Kernel::Take(w) => window_bytes(w),
        Kernel::Fill(f) => fill_bytes(f),
    }
}

/// Of the operations of several products, those of the programs on their results.
pub fn pointwise_flops(p: &Products) -> Flops {
    let then = p.parts.iter().flat_map(|part| &part.then);
    Flops(then.map(|then| rows_flops(&then.rows).0).sum())
}

/// Bytes of scratch that a kernel needs on a target beyond the arguments, on `threads` threads of a
/// rank where that is a CPU, as it is where there is none: allocated once, kept and reused.
///
/// On GPUs what the functions of the kernel pass on: slices, partial sums, copies of operands.
pub fn workspace(kernel: &Kernel, target: Option<Target>, threads: usize) -> Bytes {
    match target {
        Some(Target::Cuda(arch)) => crate::cuda::functions_for(kernel, arch).workspace(),
        Some(Target::Cpu(_)) | None => crate::cpu::workspace(kernel, threads),
    }
}

fn distinct(loops: impl Iterator<Item = (usize, usize)>) -> u64 {
    loops.map(|(size, stride)| if stride == 0 { size.min(1) } else { size } as u64).product()
}

/// Elements that a product reads of `a` and of `b`, and that it moves of `c`.
fn product_elements(p: &Product) -> [u64; 3] {
    let a = distinct(p.batch.iter().map(|l| (l.size, l.a)))
        * distinct(p.m.iter().map(|l| (l.size, l.a)))
        * distinct(p.k.iter().map(|l| (l.size, l.a)));
    let b = distinct(p.batch.iter().map(|l| (l.size, l.b)))
        * distinct(p.n.iter().map(|l| (l.size, l.b)))
        * distinct(p.k.iter().map(|l| (l.size, l.b)))
        * p.borders.iter().map(|border| border.size as u64).product::<u64>();
    let [batch, m, n, _] = p.sizes().map(|s| s as u64);
    [a, b, batch * m * n * if p.accumulate { 2 } else { 1 }]
}

fn product_bytes(p: &Product) -> Bytes {
    let [a, b, c] = product_elements(p);
    let scales: u64 = scales_bytes(p).into_iter().flatten().sum();
    Bytes(a * p.stored.a.size() + b * p.stored.b.size() + c * p.stored.c.size() + scales)
}

/// Of the scales of both operands, where a product has some.
fn scales_bytes(p: &Product) -> Option<[u64; 2]> {
    let [_, m, n, k] = p.sizes();
    let of = |scales: Scales, side: usize| {
        let count = side.div_ceil(scales.block) * (k / Scales::RUN);
        count as u64 * DType::F32.size()
    };
    p.scales.map(|[a, b]| [of(a, m), of(b, n)])
}

/// An operand of several products is read once: as much of it as the one that reads most does.
/// Programs read results where they are.
fn products_bytes(p: &Products) -> Bytes {
    let mut read = vec![0; p.operand_count()];
    let mut written = 0;
    for part in &p.parts {
        let stored = part.product.stored;
        let [a, b, c] = product_elements(&part.product);
        let [batch, m, n, _] = part.product.sizes().map(|s| s as u64);
        let bias = part.bias.map(|at| (at, n * stored.c.size()));
        let addend = part.addend.map(|at| (at, batch * m * n * stored.c.size()));
        let then = part.then.iter().flat_map(|then| {
            let Rows { rows, cols, .. } = then.rows;
            let read = then.inputs.iter().zip(&then.rows.inputs);
            read.filter_map(move |(source, input)| match source {
                Source::Operand(at) => {
                    Some((*at, access_elements(&input.access, rows, cols) * input.dtype.size()))
                }
                Source::Result(_) => None,
            })
        });
        let scales = scales_bytes(&part.product).into_iter().flatten();
        let factors = [a * stored.a.size(), b * stored.b.size()].into_iter().chain(scales);
        let factors = part.factors().zip(factors);
        for (at, bytes) in factors.chain(bias).chain(addend).chain(then) {
            if let Some(most) = read.get_mut(at) {
                *most = bytes.max(*most);
            }
        }
        written += if part.in_place { 0 } else { c * stored.c.size() };
        written += part.then.iter().map(|then| stored_bytes(&then.rows)).sum::<u64>();
    }
    Bytes(read.iter().sum::<u64>() + written)
}

fn unary_flops(op: UnaryOp) -> u64 {
    match op {
        UnaryOp::Neg
        | UnaryOp::Abs
        | UnaryOp::Floor
        | UnaryOp::PowerFloor
        | UnaryOp::Square
        | UnaryOp::Not => 1,
        UnaryOp::Single
        | UnaryOp::RoundBF16
        | UnaryOp::RoundF16
        | UnaryOp::RoundF8E4M3
        | UnaryOp::RoundF8E5M2 => 1,
        UnaryOp::Sqrt | UnaryOp::Rsqrt | UnaryOp::Recip => 4,
        UnaryOp::WrapI32 | UnaryOp::WrapU32 => 4,
        UnaryOp::Exp
        | UnaryOp::Log
        | UnaryOp::Tanh
        | UnaryOp::Erf
        | UnaryOp::Sin
        | UnaryOp::Cos
        | UnaryOp::Sigmoid
        | UnaryOp::GeluTanh
        | UnaryOp::GeluErf
        | UnaryOp::Silu => TRANSCENDENTAL,
    }
}

fn binary_flops(op: BinaryOp) -> u64 {
    match op {
        BinaryOp::Add
        | BinaryOp::Sub
        | BinaryOp::Mul
        | BinaryOp::Max
        | BinaryOp::Min
        | BinaryOp::Lt
        | BinaryOp::Le
        | BinaryOp::Eq
        | BinaryOp::Ge
        | BinaryOp::Gt
        | BinaryOp::And
        | BinaryOp::Or => 1,
        BinaryOp::Div => 4,
        BinaryOp::Pow => 2 * TRANSCENDENTAL,
        BinaryOp::GeluTanhGrad | BinaryOp::GeluErfGrad | BinaryOp::SiluGrad => 2 * TRANSCENDENTAL,
    }
}

fn rows_flops(r: &Rows) -> Flops {
    let vectors = r.vectors();
    let points = |is_vector: bool| (r.rows * if is_vector { r.cols } else { 1 }) as u64;
    let instrs = r.instrs.iter().enumerate().map(|(i, instr)| match instr {
        Instr::Load { .. } | Instr::Const { .. } | Instr::Index { .. } => 0,
        Instr::Unary { op, .. } => unary_flops(*op) * points(vectors[i]),
        Instr::Binary { op, .. } => binary_flops(*op) * points(vectors[i]),
        Instr::Select { .. } => points(vectors[i]),
        Instr::Reduce { x, .. } => points(vectors[*x]),
        Instr::Random(_) => TRANSCENDENTAL * points(vectors[i]),
    });
    let outputs = r.outputs.iter().map(|output| match output {
        Output::Store { value, accumulate, .. } => u64::from(*accumulate) * points(vectors[*value]),
        Output::ColSum { value, .. } | Output::TotalSum { value, .. } => points(vectors[*value]),
    });
    Flops(instrs.chain(outputs).sum())
}

fn access_elements(access: &Access, rows: usize, cols: usize) -> u64 {
    let reach = |d: &crate::rows::Digit| (rows.div_ceil(d.div).min(d.modulus), d.stride);
    distinct(access.row.iter().map(reach).chain([(cols, access.col_stride)])) * rows.min(1) as u64
}

fn rows_bytes(r: &Rows) -> Bytes {
    let loaded = |input: usize| {
        r.instrs.iter().any(|i| matches!(i, Instr::Load { input: loaded } if *loaded == input))
    };
    let inputs = r.inputs.iter().enumerate().map(|(i, input)| {
        let elements = if loaded(i) { access_elements(&input.access, r.rows, r.cols) } else { 4 };
        elements * input.dtype.size()
    });
    Bytes(inputs.sum::<u64>() + stored_bytes(r))
}

/// What the outputs of a block program move.
fn stored_bytes(r: &Rows) -> u64 {
    let outputs = r.outputs.iter().map(|output| {
        let (elements, size, accumulate) = match output {
            Output::Store { access, dtype, accumulate, .. } => {
                (access_elements(access, r.rows, r.cols), dtype.size(), *accumulate)
            }
            Output::ColSum { accumulate, .. } => (r.cols as u64, r.dtype.size(), *accumulate),
            Output::TotalSum { accumulate, .. } => (1, r.dtype.size(), *accumulate),
        };
        elements * size * if accumulate { 2 } else { 1 }
    });
    outputs.sum()
}

/// Number of visible pairs of query and key of one head.
fn visible_pairs(a: &Attention) -> u64 {
    if !a.causal || a.position {
        let seen = if a.window == 0 { a.keys } else { a.window.min(a.keys) };
        return (a.queries * seen) as u64;
    }
    (0..a.queries).map(|i| a.visible(i).len() as u64).sum()
}

fn attention_flops(a: &Attention, per_dim: u64, scores: u64) -> Flops {
    let heads = (a.batch * a.heads) as u64;
    let bound = if a.softcap == 0.0 { 0 } else { TRANSCENDENTAL };
    let per_score = scores * (bound + u64::from(a.bias.is_some()));
    Flops((per_dim * a.dim as u64 + per_score) * heads * visible_pairs(a))
}

/// Elements of the bias.
fn bias_elements(a: &Attention) -> u64 {
    let strides = a.bias.map(|[b, h, s]| [(a.batch, b), (a.heads, h), (a.queries, s), (a.keys, 1)]);
    strides.map_or(0, |loops| distinct(loops.into_iter()))
}

/// Bytes of the numbers of documents.
fn document_bytes(a: &Attention) -> u64 {
    if a.documents.is_some() { (a.batch * a.keys) as u64 * ir::DType::I32.size() } else { 0 }
}

/// Keys that some query sees, where a window leaves out the others.
fn keys_read(a: &Attention) -> usize {
    if a.window == 0 {
        return a.keys;
    }
    let last = a.queries.saturating_sub(1);
    if a.position {
        return a.keys.min(a.window + last);
    }
    a.visible(last).end - a.visible(0).start.min(a.visible(last).end)
}

/// Elements of a tensor laid out as `q`, as `k`, and of `lse`.
fn attention_elements(a: &Attention) -> [u64; 3] {
    let query = (a.batch * a.queries * a.heads * a.dim) as u64;
    let key = (a.batch * a.keys * a.kv_heads * a.dim) as u64;
    [query, key, (a.batch * a.queries * a.heads) as u64]
}

fn attention_bytes(a: &Attention) -> Bytes {
    let [query, _, lse] = attention_elements(a);
    let key = (a.batch * keys_read(a) * a.kv_heads * a.dim) as u64;
    let lse = if a.position { 0 } else { lse * a.dtype.accumulation().size() };
    let elements = 2 * query + 2 * key + bias_elements(a);
    Bytes(elements * a.dtype.size() + lse + document_bytes(a))
}

fn attention_bwd_bytes(a: &Attention) -> Bytes {
    let [query, key, lse] = attention_elements(a);
    let bias = bias_elements(a) * if a.bias_grad { 2 } else { 1 };
    let lse = lse * a.dtype.accumulation().size();
    Bytes((4 * query + 4 * key + bias) * a.dtype.size() + lse + document_bytes(a))
}

fn experts_flops(e: &Experts, products: u64) -> Flops {
    Flops(2 * products * e.pairs() as u64 * (e.model * e.inner) as u64)
}

/// Bytes of weights that are read, of `tokens` tensors `[T, M]` and of `gates` tensors `[T, E]`.
fn experts_bytes(e: &Experts, tokens: u64, gates: u64) -> Bytes {
    let read = e.experts.min(e.pairs());
    let weights = 3 * (read * e.inner * e.model) as u64;
    let rows = tokens * (e.tokens * e.model) as u64 + gates * (e.tokens * e.experts) as u64;
    Bytes((weights + rows) * e.dtype.size())
}

fn experts_bwd_bytes(e: &Experts) -> Bytes {
    let moves: u64 = e.accumulate.iter().map(|adds| if *adds { 2 } else { 1 }).sum();
    let written = moves * e.weights() as u64 * e.dtype.accumulation().size();
    Bytes(experts_bytes(e, 3, 2).0 + written)
}

fn gather_bytes(g: &Gather, moves: u64) -> Bytes {
    Bytes(moves * (g.outer * g.count * g.width) as u64 * g.dtype.size() + 4 * g.count as u64)
}

fn scatter_bytes(g: &Gather) -> Bytes {
    let zeroed = if g.accumulate { 0 } else { (g.outer * g.rows * g.width) as u64 };
    Bytes(gather_bytes(g, 3).0 + zeroed * g.dtype.size())
}

fn lines_flops(l: &Lines) -> Flops {
    let elements = (l.outer * l.extent * l.inner) as u64;
    match l.how {
        Line::Order { .. } => Flops(elements * u64::from(l.extent.max(2).ilog2())),
        Line::Reverse => Flops(0),
        Line::Cumulative(_) | Line::Prod | Line::ArgMax | Line::Fold { .. } => Flops(elements),
        Line::Pool { size, .. } => Flops((l.outer * l.result * size * l.inner) as u64),
    }
}

fn lines_bytes(l: &Lines) -> Bytes {
    let size = l.dtype.size();
    let written = match l.how {
        Line::ArgMax | Line::Order { .. } => 4,
        Line::Cumulative(_)
        | Line::Prod
        | Line::Reverse
        | Line::Fold { .. }
        | Line::Pool { .. } => size,
    };
    let lines = (l.outer * l.inner) as u64;
    Bytes(lines * (l.extent as u64 * size + l.result as u64 * written))
}

fn rope_bytes(r: &Rope) -> Bytes {
    Bytes(2 * (r.batch * r.seq * r.heads * r.dim) as u64 * r.dtype.size())
}

fn copy_bytes(c: &Copy) -> Bytes {
    let read = distinct(c.loops.iter().map(|l| (l.size, l.source)));
    let written: u64 = c.loops.iter().map(|l| l.size as u64).product();
    Bytes((read + written + c.zero_first as u64) * c.dtype.size())
}

fn window_bytes(w: &Window) -> Bytes {
    Bytes(2 * (w.outer * w.len * w.inner) as u64 * w.dtype.size())
}

fn fill_bytes(f: &Fill) -> Bytes {
    Bytes(f.len as u64 * f.dtype.size())
}

#[cfg(test)]
mod tests {
    use ir::DType;

    use super::*;

    fn attention(causal: bool) -> Attention {
        let layout = Attention::contiguous(100, 2, 16);
        Attention {
            batch: 3,
            queries: 100,
            keys: 100,
            heads: 2,
            kv_heads: 2,
            dim: 16,
            scale: 0.25,
            causal,
            window: 0,
            softcap: 0.0,
            bias: None,
            bias_grad: false,
            documents: None,
            query_offset: 0,
            position: false,
            head_offset: crate::Offset::ZERO,
            group: 1,
            dropout: None,
            dtype: DType::F32,
            q: layout,
            k: layout,
            v: layout,
            out: layout,
        }
    }

    #[test]
    fn a_product_is_priced_by_its_sizes() {
        let kernel = Kernel::Product(Product::matrix(4, 5, 6, DType::F32));
        assert_eq!(flops(&kernel), Flops(240));
        assert_eq!(bytes(&kernel), Bytes(4 * (24 + 30 + 20)));
        assert_eq!(kernel.to_string(), "product 4x5x6 f32");
    }

    /// Of a CPU by threads; of a GPU what its functions pass on.
    #[test]
    fn a_workspace_follows_from_kernel_and_target() {
        let tiling = crate::Tiling { split: 3, ..Default::default() };
        let split = Product { tiling, ..Product::matrix(300, 40, 4096, DType::BF16) };
        let [whole, split] = [Product::matrix(300, 40, 4096, DType::BF16), split];
        let of = |p: &Product, target: Option<Target>, threads: usize| {
            workspace(&Kernel::Product(p.clone()), target, threads).0
        };
        for arch in ir::target::Arch::ALL {
            let target = Some(Target::Cuda(arch));
            assert_eq!(of(&whole, target, 1), 0, "{arch}");
            assert_eq!(of(&split, target, 1), 3 * 300 * 40 * 4, "{arch}");
            assert_eq!(of(&split, target, 8), of(&split, target, 1), "{arch}");
        }
        let cpu = Some(Target::Cpu(ir::target::InstructionSet::Avx512));
        assert!(of(&whole, cpu, 4) > of(&whole, cpu, 1), "each thread has its own");
        assert_eq!(of(&split, cpu, 4), of(&whole, None, 4));
    }

    #[test]
    fn a_causal_mask_hides_half_of_the_pairs() {
        let full = flops(&Kernel::Attention(attention(false)));
        assert_eq!(full, Flops(4 * 3 * 2 * 16 * 100 * 100));
        assert_eq!(flops(&Kernel::Attention(attention(true))), Flops(full.0 * 101 / 200));
        assert_eq!(flops(&Kernel::AttentionBwd(attention(false))), Flops(full.0 * 5 / 2));
    }

    #[test]
    fn a_window_hides_more_and_a_bias_is_read_once() {
        let whole = attention(true);
        let window = Attention { window: 10, ..whole.clone() };
        // Of 100 queries the first nine see less than ten keys.
        let pairs = 100 * 10 - 45;
        assert_eq!(flops(&Kernel::Attention(window.clone())), Flops(4 * 3 * 2 * 16 * pairs));
        let before = bytes(&Kernel::Attention(whole.clone())).0;
        assert_eq!(bytes(&Kernel::Attention(window.clone())).0, before);
        let cached = Attention { position: true, queries: 1, ..window };
        assert_eq!(flops(&Kernel::Attention(cached.clone())), Flops(4 * 3 * 2 * 16 * 10));
        let all = Attention { window: 0, ..cached.clone() };
        let [less, all] = [cached, all].map(|a| bytes(&Kernel::Attention(a)).0);
        assert_eq!(all - less, 4 * 2 * 3 * 2 * 16 * 90);
        // One number per head and key.
        let biased = Attention { bias: Some([0, 100, 0]), ..whole };
        assert_eq!(bytes(&Kernel::Attention(biased.clone())).0 - before, 4 * 2 * 100);
        let wanted = Attention { bias_grad: true, ..biased.clone() };
        let [with, without] = [wanted, biased].map(|a| flops(&Kernel::AttentionBwd(a)).0);
        assert!(with > without && with < without * 3 / 2, "{with} {without}");
    }

    #[test]
    fn experts_are_priced_by_the_pairs_that_are_expected() {
        let (tokens, experts, model, inner, top_k) = (10, 8, 3, 5, 2);
        let (accumulate, dtype) = ([false; 3], DType::BF16);
        let of = experts;
        let e = Experts { tokens, experts, model, inner, top_k, of, accumulate, dtype };
        let forward = Kernel::Experts(e.clone());
        assert_eq!(flops(&forward), Flops(2 * 3 * 20 * 15));
        assert_eq!(bytes(&forward), Bytes(2 * (3 * 8 * 15 + 2 * 30 + 80)));
        let backward = |accumulate| Kernel::ExpertsBwd(Experts { accumulate, ..e.clone() });
        assert_eq!(flops(&backward([false; 3])), Flops(2 * 8 * 20 * 15));
        let [once, twice] = [[false; 3], [true, false, true]].map(|a| bytes(&backward(a)).0);
        assert_eq!(once, 2 * (3 * 8 * 15 + 3 * 30 + 2 * 80) + 4 * 3 * 8 * 15);
        assert_eq!(twice - once, 4 * 2 * 8 * 15);
        let one = Experts { tokens: 1, ..e.clone() };
        assert_eq!(bytes(&Kernel::Experts(one)), Bytes(2 * (3 * 2 * 15 + 2 * 3 + 8)));
    }

    #[test]
    fn a_block_program_is_priced_by_point_and_row() {
        let input = |access| crate::rows::RowInput { dtype: DType::F32, access };
        let rows = Rows {
            rows: 10,
            cols: 7,
            dtype: DType::F32,
            inputs: vec![input(Access::full(10, 7)), input(Access::per_column())],
            instrs: vec![
                Instr::Load { input: 0 },
                Instr::Load { input: 1 },
                Instr::Binary { op: BinaryOp::Add, a: 0, b: 1 },
                Instr::Reduce { op: crate::rows::ReduceOp::Sum, x: 2 },
                Instr::Unary { op: UnaryOp::Exp, x: 3 },
            ],
            outputs: vec![Output::Store {
                value: 4,
                access: Access::per_row(10),
                dtype: DType::F32,
                accumulate: true,
            }],
        };
        let kernel = Kernel::Rows(rows);
        assert_eq!(flops(&kernel), Flops(70 + 70 + 10 * TRANSCENDENTAL + 10));
        assert_eq!(bytes(&kernel), Bytes(4 * (70 + 7 + 20)));
    }
}
