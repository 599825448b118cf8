//! Kernels that are measured, numbers for them, and sums of random rows of their results.

use ir::random::mix;
use ir::{DType, formats};
use kernels::arguments::Argument;
use kernels::cuda::{Arch, tiling};
use kernels::{
    Access, Attention, BinaryOp, Copy, CopyLoop, Instr, Kernel, LoopAB, LoopAC, LoopBC, Offset,
    Output, Product, ReduceOp, RowInput, Rows, UnaryOp,
};
use runtime::cuda::memory::Memory;
use serde_json::{Value, json};

/// A kernel, and what a peer needs to know of it.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) kernel: Kernel,
    pub(crate) of: Value,
}

/// Rows of a result that are compared with f64.
const CHECKED: u64 = 48;

/// Products of linear layers: of the model, tokens, the layer's inputs and its outputs.
const LAYERS: [(&str, usize, usize, usize); 12] = [
    ("gpt2 qkv", 8192, 768, 2304),
    ("gpt2 out", 8192, 768, 768),
    ("gpt2 fc", 8192, 768, 3072),
    ("gpt2 proj", 8192, 3072, 768),
    ("8b qkv", 8192, 4096, 6144),
    ("8b out", 8192, 4096, 4096),
    ("8b gate up", 8192, 4096, 28672),
    ("8b down", 8192, 14336, 4096),
    ("70b qkv", 4096, 8192, 10240),
    ("70b out", 4096, 8192, 8192),
    ("70b gate up", 4096, 8192, 57344),
    ("70b down", 4096, 28672, 8192),
];

/// Each layer's output, and the gradients of its input and of its weight, in BF16; weights are
/// `[inputs, outputs]`.
pub(crate) fn products(arch: Arch) -> Vec<Case> {
    let mut all = vec![product(("square", "forward"), [8192; 3], arch)];
    for (name, tokens, inputs, outputs) in LAYERS {
        all.push(product((name, "forward"), [tokens, outputs, inputs], arch));
        all.push(product((name, "dgrad"), [tokens, inputs, outputs], arch));
        all.push(product((name, "wgrad"), [inputs, outputs, tokens], arch));
    }
    all
}

fn product((name, form): (&str, &str), [m, n, k]: [usize; 3], arch: Arch) -> Case {
    let mut p = Product::matrix(m, n, k, DType::BF16);
    p.tiling = tiling(arch, [1, m, n], k);
    match form {
        "dgrad" => {
            p.n = vec![LoopBC { size: n, b: k, c: 1 }];
            p.k = vec![LoopAB { size: k, a: 1, b: 1 }];
        }
        "wgrad" => {
            p.m = vec![LoopAC { size: m, a: 1, c: n }];
            p.k = vec![LoopAB { size: k, a: m, b: n }];
        }
        _ => {}
    }
    let of = json!({ "kind": "product", "form": form, "m": m, "n": n, "k": k });
    Case { name: format!("{name} {form}"), kernel: Kernel::Product(p), of }
}

/// Attention of some models, forward and backward, in BF16: batch, query heads, heads of keys,
/// length, head dim, and whether it is causal.
const HEADS: [(&str, [usize; 5], bool); 5] = [
    ("gpt2", [8, 12, 12, 1024, 64], true),
    ("bert", [32, 12, 12, 512, 64], false),
    ("8b", [2, 32, 8, 4096, 128], true),
    ("8b 16k", [1, 32, 8, 16384, 128], true),
    ("8b all", [2, 32, 8, 4096, 128], false),
];

pub(crate) fn attention() -> Vec<Case> {
    let case = |(name, [batch, heads, kv_heads, length, dim], causal): (&str, [usize; 5], bool)| {
        let [q, k] = [heads, kv_heads].map(|heads| Attention::contiguous(length, heads, dim));
        let a = Attention {
            batch,
            queries: length,
            keys: length,
            heads,
            kv_heads,
            dim,
            scale: 1.0 / (dim as f64).sqrt(),
            causal,
            window: 0,
            softcap: 0.0,
            bias: None,
            bias_grad: false,
            documents: None,
            query_offset: 0,
            head_offset: Offset::ZERO,
            group: heads / kv_heads,
            q,
            k,
            v: k,
            out: q,
            dropout: None,
            position: false,
            dtype: DType::BF16,
        };
        let both =
            [("forward", Kernel::Attention(a.clone())), ("backward", Kernel::AttentionBwd(a))];
        both.map(|(pass, kernel)| Case {
            name: format!("{name} {pass}"),
            kernel,
            of: json!({
                "kind": "attention", "pass": pass, "batch": batch, "heads": heads,
                "kv_heads": kv_heads, "length": length, "dim": dim, "causal": causal,
            }),
        })
    };
    HEADS.into_iter().flat_map(case).collect()
}

/// Rows and columns of what moves memory.
const ROWS: usize = 16384;
const COLS: usize = 4096;

fn load(input: usize) -> Instr {
    Instr::Load { input }
}

fn constant(value: f64) -> Instr {
    Instr::Const { value }
}

fn binary(op: BinaryOp, a: usize, b: usize) -> Instr {
    Instr::Binary { op, a, b }
}

fn unary(op: UnaryOp, x: usize) -> Instr {
    Instr::Unary { op, x }
}

fn reduce(op: ReduceOp, x: usize) -> Instr {
    Instr::Reduce { op, x }
}

/// Normalised by mean and variance, with a weight and a bias per column.
fn layer_norm() -> Vec<Instr> {
    vec![
        load(0),
        reduce(ReduceOp::Sum, 0),
        constant(1.0 / COLS as f64),
        binary(BinaryOp::Mul, 1, 2),
        binary(BinaryOp::Sub, 0, 3),
        unary(UnaryOp::Square, 4),
        reduce(ReduceOp::Sum, 5),
        binary(BinaryOp::Mul, 6, 2),
        constant(1e-5),
        binary(BinaryOp::Add, 7, 8),
        unary(UnaryOp::Rsqrt, 9),
        binary(BinaryOp::Mul, 4, 10),
        load(1),
        binary(BinaryOp::Mul, 11, 12),
        load(2),
        binary(BinaryOp::Add, 13, 14),
    ]
}

fn softmax() -> Vec<Instr> {
    vec![
        load(0),
        reduce(ReduceOp::Max, 0),
        binary(BinaryOp::Sub, 0, 1),
        unary(UnaryOp::Exp, 2),
        reduce(ReduceOp::Sum, 3),
        binary(BinaryOp::Div, 3, 4),
    ]
}

/// `m = 0.9 m + 0.1 g`, `v = 0.99 v + 0.01 g²`, `w - 0.001 m / (√v + 1e-8)`, of w, g, m and v: they
/// are values 8, 14 and 22.
fn adam() -> Vec<Instr> {
    vec![
        load(0),
        load(1),
        load(2),
        load(3),
        constant(0.9),
        constant(0.1),
        binary(BinaryOp::Mul, 2, 4),
        binary(BinaryOp::Mul, 1, 5),
        binary(BinaryOp::Add, 6, 7),
        constant(0.99),
        constant(0.01),
        unary(UnaryOp::Square, 1),
        binary(BinaryOp::Mul, 3, 9),
        binary(BinaryOp::Mul, 11, 10),
        binary(BinaryOp::Add, 12, 13),
        unary(UnaryOp::Abs, 14),
        unary(UnaryOp::Sqrt, 15),
        constant(1e-8),
        binary(BinaryOp::Add, 16, 17),
        binary(BinaryOp::Div, 8, 18),
        constant(1e-3),
        binary(BinaryOp::Mul, 19, 20),
        binary(BinaryOp::Sub, 0, 21),
    ]
}

/// A copy of a matrix in BF16, or of its transpose.
fn copy(name: &str, loops: Vec<CopyLoop>) -> Case {
    let copy = Copy {
        loops,
        source_offset: Offset::ZERO,
        target_offset: 0,
        zero_first: 0,
        dtype: DType::BF16,
    };
    let of = json!({ "kind": "memory" });
    Case { name: name.to_owned(), kernel: Kernel::Copy(copy), of }
}

/// Kernels whose time is that of their bytes.
pub(crate) fn memory() -> Vec<Case> {
    let full = |dtype| RowInput { dtype, access: Access::full(ROWS, COLS) };
    let per_column = || RowInput { dtype: DType::F32, access: Access::per_column() };
    let store = |value, dtype| Output::Store {
        value,
        access: Access::full(ROWS, COLS),
        dtype,
        accumulate: false,
    };
    let program = |name: &str, inputs, instrs, outputs| Case {
        name: name.to_owned(),
        kernel: Kernel::Rows(Rows {
            rows: ROWS,
            cols: COLS,
            dtype: DType::F32,
            inputs,
            instrs,
            outputs,
        }),
        of: json!({ "kind": "memory" }),
    };
    let [half, single] = [DType::BF16, DType::F32];
    let add = vec![load(0), load(1), binary(BinaryOp::Add, 0, 1)];
    let gelu = vec![load(0), unary(UnaryOp::GeluTanh, 0)];
    let columns = vec![Output::ColSum { value: 0, accumulate: false }];
    let updated = vec![store(22, single), store(8, single), store(14, single), store(22, half)];
    let turned = vec![
        CopyLoop { size: COLS, source: 1, target: ROWS },
        CopyLoop { size: ROWS, source: COLS, target: 1 },
    ];
    let norm = vec![full(half), per_column(), per_column()];
    vec![
        copy("copy", vec![CopyLoop { size: ROWS * COLS, source: 1, target: 1 }]),
        copy("transpose", turned),
        program("add bf16", vec![full(half), full(half)], add, vec![store(2, half)]),
        program("gelu bf16", vec![full(half)], gelu, vec![store(1, half)]),
        program("layer norm bf16", norm, layer_norm(), vec![store(15, half)]),
        program("softmax f32", vec![full(single)], softmax(), vec![store(5, single)]),
        program("adam", vec![full(single); 4], adam(), updated),
        program("sum of rows bf16", vec![full(half)], vec![load(0)], columns),
    ]
}

/// Bytes of random numbers: in `[-1, 1)`, and small integers.
pub(crate) fn numbers(of: &Argument, seed: u64) -> Vec<u8> {
    let mut state = mix(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ of.len as u64);
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    let mut unit = |_| (next() as f64) / f64::from(1_u32 << 30) - 1.0;
    match of.dtype {
        DType::F32 => (0..of.len).map(&mut unit).flat_map(|x| (x as f32).to_le_bytes()).collect(),
        DType::F64 => (0..of.len).map(&mut unit).flat_map(f64::to_le_bytes).collect(),
        DType::BF16 => {
            let code = |x: f64| (((x as f32).to_bits() >> 16) as u16).to_le_bytes();
            (0..of.len).map(&mut unit).flat_map(code).collect()
        }
        DType::F16 => {
            let code = |x: f64| formats::encode(DType::F16, x).to_le_bytes();
            (0..of.len).map(&mut unit).flat_map(code).collect()
        }
        // Small integers, which are true, an id and a position.
        DType::I64
        | DType::I32
        | DType::U32
        | DType::I8
        | DType::Bool
        | DType::F8E4M3
        | DType::F8E5M2 => {
            let size = of.dtype.size() as usize;
            let byte = |at: usize| if at.is_multiple_of(size) { (at / size % 2) as u8 } else { 0 };
            (0..of.len * size).map(byte).collect()
        }
    }
}

/// An element of a result: where it is, what it is, and how far from that it may be.
type Expected = (usize, f64, f64);

fn number(code: u16) -> f64 {
    formats::decode(DType::BF16, code)
}

/// The codes of memory in which numbers of BF16 lie.
fn codes(memory: &Memory) -> Option<Vec<u16>> {
    let mut bytes = vec![0; memory.bytes()];
    memory.read(0, &mut bytes).ok()?;
    let codes = bytes.chunks_exact(2).map(|code| u16::from_le_bytes([code[0], code[1]]));
    Some(codes.collect())
}

/// What is wrong in some elements of a result, against sums in f64.
pub(crate) fn wrong(case: &Case, inputs: &[Memory], outputs: &[Memory]) -> Option<String> {
    let halves = |p: &Product| [p.stored.a, p.stored.b, p.stored.c] == [DType::BF16; 3];
    let is_matrix = |p: &Product| [p.batch.len(), p.m.len(), p.n.len(), p.k.len()] == [0, 1, 1, 1];
    let plain = |p: &Product| halves(p) && is_matrix(p) && !p.accumulate;
    let expected: Box<dyn Fn(&[Vec<u16>], u64) -> Expected> = match &case.kernel {
        Kernel::Product(p) if plain(p) => Box::new(|inputs, draw| of_product(p, inputs, draw)),
        Kernel::Attention(a) if a.dtype == DType::BF16 && a.dropout.is_none() => {
            Box::new(|inputs, draw| of_attention(a, inputs, draw))
        }
        Kernel::Product(_)
        | Kernel::Products(_)
        | Kernel::Rows(_)
        | Kernel::Attention(_)
        | Kernel::AttentionBwd(_)
        | Kernel::Experts(_)
        | Kernel::ExpertsBwd(_)
        | Kernel::Gather(_)
        | Kernel::ScatterAdd(_)
        | Kernel::Replace(_)
        | Kernel::Lines(_)
        | Kernel::Rope(_)
        | Kernel::Copy(_)
        | Kernel::Place(_)
        | Kernel::Take(_)
        | Kernel::Fill(_) => return None,
    };
    let operands = inputs.iter().take(3).map(codes).collect::<Option<Vec<_>>>();
    let (Some(operands), Some(result)) = (operands, outputs.first().and_then(codes)) else {
        return Some("results cannot be read".to_owned());
    };
    (0..CHECKED).find_map(|draw| {
        let (at, want, bound) = expected(&operands, draw);
        let got = number(result[at]);
        let is_near = (got - want).abs() <= bound;
        (!is_near).then(|| format!("element {at} is {got}, not {want} within {bound:.1e}"))
    })
}

/// A random place below a bound.
fn pick(draw: u64, salt: u64, below: usize) -> usize {
    mix(draw * 7 + salt * 1_000_003) as usize % below
}

fn of_product(p: &Product, inputs: &[Vec<u16>], draw: u64) -> Expected {
    let [i, j] = [pick(draw, 1, p.m[0].size), pick(draw, 2, p.n[0].size)];
    let (mut sum, mut scale) = (0.0, 0.0);
    for l in 0..p.k[0].size {
        let a = number(inputs[0][i * p.m[0].a + l * p.k[0].a]);
        let b = number(inputs[1][j * p.n[0].b + l * p.k[0].b]);
        sum += a * b;
        scale += (a * b).abs();
    }
    (i * p.m[0].c + j * p.n[0].c, sum, scale * 2e-6 + sum.abs() / 256.0)
}

fn of_attention(a: &Attention, inputs: &[Vec<u16>], draw: u64) -> Expected {
    let [sample, head] = [pick(draw, 1, a.batch), pick(draw, 2, a.heads)];
    let [query, d] = [pick(draw, 3, a.queries), pick(draw, 4, a.dim)];
    let place = |strides: [usize; 3], at: usize, head: usize| {
        sample * strides[0] + at * strides[1] + head * strides[2]
    };
    let kv = head / a.group;
    let score = |key: usize| {
        let (q, k) = (place(a.q, query, head), place(a.k, key, kv));
        let dot = (0..a.dim).map(|d| number(inputs[0][q + d]) * number(inputs[1][k + d]));
        dot.sum::<f64>() * a.scale
    };
    let weights: Vec<f64> = a.visible(query).map(|key| score(key).exp()).collect();
    let values = a.visible(query).map(|key| number(inputs[2][place(a.v, key, kv) + d]));
    let sum: f64 = weights.iter().zip(values).map(|(w, v)| w * v).sum();
    let want = sum / weights.iter().sum::<f64>();
    (place(a.out, query, head) + d, want, 4e-3 + want.abs() / 128.0)
}
