//! What kernels are said to use is what the CPU uses, and no element more or less.

#![allow(clippy::wildcard_enum_match_arm, reason = "what is left is alike")]

use ir::op::Operands;
use kernels::Offset;
use kernels::cpu::{Cpu, View, ViewMut};
use kernels::kernel::{
    Attention, Copy, CopyLoop, Experts, Fill, Gather, Line, Lines, LoopAB, LoopABC, LoopAC, LoopBC,
    Pointwise, Positions, Products, Rope, Source, StoredTypes, Tiling, Window,
};
use kernels::rows::{BinaryOp, Digit, Instr, RowInput};
use kernels::verify::verify;

use super::*;

#[test]
fn runs_are_what_loops_reach() {
    assert_eq!(runs(vec![(3, 4), (4, 1)], 5), [5..17]);
    assert_eq!(runs(vec![(4, 1), (3, 4)], 0), [0..12]);
    assert_eq!(runs(vec![(3, 10), (4, 1)], 2), [2..6, 12..16, 22..26]);
    assert_eq!(runs(vec![(3, 10), (0, 1)], 2), []);
    assert_eq!(runs(Vec::new(), 7), [7..8]);
}

/// Elements of each buffer after those that its kernel is said to use.
const BEYOND: usize = 9;
/// What outputs hold before a launch, one after the other.
const OLD: [f32; 2] = [7.0, -3.0];
/// Kernels that are drawn of each kind.
const KERNELS: u64 = 25;

struct Draws(u64);

impl Draws {
    fn below(&mut self, n: usize) -> usize {
        self.0 = ir::random::mix(self.0.wrapping_add(0x9e37_79b9_7f4a_7c15));
        (self.0 % n as u64) as usize
    }

    fn size(&mut self) -> usize {
        2 + self.below(5)
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    /// Strides of loops of some sizes in a tensor whose dims are in any order, with elements
    /// between its lines now and then.
    fn strides(&mut self, sizes: &[usize]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        (1..order.len()).for_each(|at| order.swap(at, self.below(at + 1)));
        let (mut strides, mut next) = (vec![0; sizes.len()], 1 + self.below(2));
        for at in order {
            strides[at] = next;
            next *= sizes[at] + self.below(2);
        }
        strides
    }
}

fn product(r: &mut Draws) -> Product {
    let [batch, m, n, k] = [0; 4].map(|_| r.size());
    let (a, b) = (r.strides(&[batch, m, k]), r.strides(&[batch, k, n]));
    let c = r.strides(&[batch, m, n]);
    Product {
        batch: vec![LoopABC { size: batch, a: a[0], b: b[0], c: c[0] }],
        m: vec![LoopAC { size: m, a: a[1], c: c[1] }],
        n: vec![LoopBC { size: n, b: b[2], c: c[2] }],
        k: vec![LoopAB { size: k, a: a[2], b: b[1] }],
        accumulate: r.coin(),
        dtype: DType::F32,
        stored: StoredTypes::all(DType::F32),
        operands: Operands::Exact,
        borders: Vec::new(),
        scales: None,
        tiling: Tiling::default(),
    }
}

/// One product with a bias and an addend, and one that shares an operand with it.
fn products(r: &mut Draws) -> Kernel {
    let (first, second) = (product(r), product(r));
    let mut part = ProductPart::of(0, 1, first);
    (part.bias, part.addend) = (Some(2), r.coin().then_some(3));
    let next = 3 + usize::from(part.addend.is_some());
    let parts = vec![part, ProductPart::of(next, next + 1, second)];
    Kernel::Products(Products { parts })
}

/// A product, and a program on its result, which is in place now and then.
fn products_with_a_program(r: &mut Draws) -> Kernel {
    let [m, n, k] = [0; 3].map(|_| r.size());
    let product = Product::matrix(m, n, k, DType::F32);
    let (in_place, dtype) = (r.coin(), DType::F32);
    let load = |access| RowInput { dtype, access };
    let full = Access::full(m, n);
    let wide = n + r.below(3);
    let apart = Access {
        row: vec![Digit { div: 1, modulus: m, stride: wide }],
        col_stride: 1,
        offset: r.below(4),
    };
    let store = |access, accumulate| Output::Store { value: 2, access, dtype, accumulate };
    let rows = Rows {
        rows: m,
        cols: n,
        dtype,
        inputs: vec![load(full.clone()), load(Access { offset: 0, ..apart.clone() })],
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Load { input: 1 },
            Instr::Binary { op: BinaryOp::Add, a: 0, b: 1 },
        ],
        outputs: vec![store(full, false), store(apart, r.coin())],
    };
    let then = Pointwise { rows, inputs: vec![Source::Result(0), Source::Operand(3)] };
    let mut part = ProductPart::of(0, 1, product);
    (part.bias, part.then, part.in_place) = (Some(2), Some(then), in_place);
    Kernel::Products(Products { parts: vec![part] })
}

fn rows(r: &mut Draws) -> Kernel {
    let (a, b, cols, dtype) = (r.size(), r.size(), r.size(), DType::F32);
    let mut access = |has_columns: bool| {
        let strides = r.strides(&[a, b, cols]);
        let outer = Digit { div: b, modulus: a, stride: strides[0] };
        let inner = Digit { div: 1, modulus: b, stride: strides[1] };
        let col_stride = if has_columns { strides[2] } else { 0 };
        Access { row: vec![outer, inner], col_stride, offset: r.below(5) }
    };
    let inputs = [true, false].map(|has_columns| RowInput { dtype, access: access(has_columns) });
    let outputs = [access(true), access(false)];
    let [whole, per_row] = outputs;
    let accumulate = [0; 4].map(|_| r.coin());
    Kernel::Rows(Rows {
        rows: a * b,
        cols,
        dtype,
        inputs: inputs.to_vec(),
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Load { input: 1 },
            Instr::Binary { op: BinaryOp::Add, a: 0, b: 1 },
        ],
        outputs: vec![
            Output::Store { value: 2, access: whole, dtype, accumulate: accumulate[0] },
            Output::Store { value: 1, access: per_row, dtype, accumulate: accumulate[1] },
            Output::ColSum { value: 2, accumulate: accumulate[2] },
            Output::TotalSum { value: 2, accumulate: accumulate[3] },
        ],
    })
}

/// Attention in which every query sees a key, and every key is seen. Where it has a position, that
/// decides how many.
fn attention(r: &mut Draws, position: bool) -> Attention {
    let [batch, queries, more, kv_heads, dim] = [0; 5].map(|_| r.size());
    let keys = queries + more;
    let group = 1 + r.below(2);
    let heads = kv_heads * group;
    let mut lies = |length: usize, heads: usize| {
        let wide = heads + r.below(2);
        [length * wide * dim, wide * dim, dim]
    };
    let (q, out) = (lies(queries, heads), lies(queries, heads));
    let (k, v) = (lies(keys, kv_heads), lies(keys, kv_heads));
    let softcap = if r.coin() { 5.0 } else { 0.0 };
    let bias = r.coin().then(|| {
        let mut stride = keys;
        let [s, h, b] = [queries, heads, batch].map(|size| {
            let own = if r.coin() { stride } else { 0 };
            stride *= if own > 0 { size } else { 1 };
            own
        });
        [b, h, s]
    });
    Attention {
        batch,
        queries,
        keys,
        heads,
        kv_heads,
        dim,
        scale: 0.4,
        causal: true,
        window: 0,
        softcap,
        bias,
        bias_grad: false,
        documents: None,
        query_offset: if position { more } else { keys } as i64,
        position,
        head_offset: Offset::ZERO,
        group,
        dropout: None,
        dtype: DType::F32,
        q,
        k,
        v,
        out,
    }
}

/// Fewer ids than rows; what looks up is told by [`number`].
fn gather(r: &mut Draws) -> Gather {
    let count = r.size();
    let (outer, width) = (r.size(), r.size());
    let (rows, base, accumulate) = (count + 1 + r.below(3), r.below(9), r.coin());
    let base = Offset::Fixed(base as i64);
    Gather { outer, rows, base, width, count, accumulate, dtype: DType::F32 }
}

fn rope(r: &mut Draws) -> Kernel {
    let [batch, seq, heads, half] = [0; 4].map(|_| r.size());
    let dim = 2 * half;
    let mut lies = || {
        let wide = heads + r.below(2);
        [seq * wide * dim, wide * dim, dim]
    };
    let (x, y) = (lies(), lies());
    let positions =
        [Positions::From(3), Positions::FromInput(1), Positions::FromInputs(1), Positions::Table]
            [r.below(4)];
    let frequencies = (0..half).map(|at| 1.0 / (1 + at) as f64).collect();
    let (inverse, dtype) = (r.coin(), DType::F32);
    let gain = 1.0;
    Kernel::Rope(Rope {
        batch,
        seq,
        heads,
        dim,
        frequencies,
        positions,
        inverse,
        gain,
        dtype,
        x,
        y,
    })
}

fn copy(r: &mut Draws) -> Kernel {
    let sizes = [r.size(), r.size()];
    let (source, target) = (r.strides(&sizes), r.strides(&sizes));
    let one = |at: usize| CopyLoop { size: sizes[at], source: source[at], target: target[at] };
    let source_offset = Offset::Fixed(r.below(5) as i64);
    let target_offset = r.below(5);
    let zero_first = if r.coin() { r.below(20) } else { 0 };
    let loops = vec![one(0), one(1)];
    Kernel::Copy(Copy { loops, source_offset, target_offset, zero_first, dtype: DType::F32 })
}

fn with_gradient_of_bias(a: Attention) -> Attention {
    Attention { bias_grad: a.bias.is_some(), ..a }
}

fn window(r: &mut Draws) -> Window {
    let [positions, more, len, inner] = [0; 4].map(|_| r.size());
    let outer = positions * more;
    Window { outer, positions, len, capacity: len + 1 + r.below(3), inner, dtype: DType::F32 }
}

/// Gates, as all numbers of inputs, are not 0.
fn experts(r: &mut Draws) -> Experts {
    let [tokens, experts, model, inner] = [0; 4].map(|_| r.size());
    let accumulate = [0; 3].map(|_| r.below(2) == 0);
    Experts { tokens, experts, model, inner, top_k: 1, of: experts, accumulate, dtype: DType::F32 }
}

/// A kernel of each kind.
fn drawn(r: &mut Draws) -> Vec<Kernel> {
    let (outer, extent, inner) = (r.size(), r.size(), r.size());
    let lines = |how, result| Lines { outer, extent, result, inner, how, dtype: DType::F32 };
    vec![
        Kernel::Product(product(r)),
        products(r),
        products_with_a_program(r),
        rows(r),
        Kernel::Attention(attention(r, false)),
        Kernel::Attention(attention(r, true)),
        Kernel::AttentionBwd(attention(r, false)),
        Kernel::AttentionBwd(with_gradient_of_bias(attention(r, false))),
        Kernel::Experts(Experts { accumulate: [false; 3], ..experts(r) }),
        Kernel::ExpertsBwd(experts(r)),
        Kernel::Gather(gather(r)),
        Kernel::ScatterAdd(gather(r)),
        Kernel::Replace(gather(r)),
        Kernel::Lines(lines(Line::Reverse, extent)),
        Kernel::Lines(lines(Line::Prod, 1)),
        rope(r),
        copy(r),
        Kernel::Place(window(r)),
        Kernel::Take(window(r)),
        Kernel::Fill(Fill { len: r.size(), value: 0.5, dtype: DType::F32 }),
    ]
}

/// The bits of an element of an input.
fn number(kernel: &Kernel, dtype: DType, at: usize, r: &mut Draws) -> u32 {
    if dtype == DType::F32 {
        return (0.25 + r.below(1000) as f32 / 1000.0).to_bits();
    }
    match kernel {
        // All of them different; the last row is among them.
        Kernel::Gather(g) | Kernel::ScatterAdd(g) | Kernel::Replace(g) => {
            (g.base.bound() as usize + if at + 1 == g.count { g.rows - 1 } else { at }) as u32
        }
        // A position.
        _ => 0,
    }
}

/// What a launch leaves in outputs that held something.
fn launched(cpu: &Cpu, kernel: &Kernel, inputs: &[Vec<u32>], old: f32) -> Vec<Vec<u32>> {
    let len = |argument: &Argument| argument.len + BEYOND;
    let fresh = |argument: &Argument| vec![old.to_bits(); len(argument)];
    let mut outputs: Vec<Vec<u32>> = kernel.outputs().iter().map(fresh).collect();
    let views: Vec<View<'_>> = inputs.iter().map(|input| View::of(input)).collect();
    let targets: Vec<ViewMut<'_>> = outputs.iter_mut().map(|o| ViewMut::of(o)).collect();
    cpu.execute(kernel, &views, &targets);
    drop(targets);
    outputs
}

/// The elements of runs of bytes of four-byte elements.
fn elements(used: &Use) -> Vec<usize> {
    let runs = used.runs.iter().map(|run| run.start as usize / 4..run.end as usize / 4);
    runs.flatten().collect()
}

/// Nothing outside of what is read matters; its first and its last element do, and one between them
/// where reads are exact.
fn check_reads(cpu: &Cpu, kernel: &Kernel, inputs: &[Vec<u32>], what: &str) {
    let results = launched(cpu, kernel, inputs, OLD[0]);
    for (at, used) in effects(kernel).reads.iter().enumerate() {
        let read = elements(used);
        let mut poisoned = inputs.to_vec();
        for element in (0..inputs[at].len()).filter(|element| !read.contains(element)) {
            poisoned[at][element] = f32::NAN.to_bits();
        }
        let found = launched(cpu, kernel, &poisoned, OLD[0]);
        assert_eq!(found, results, "{what}: input {at} is read beyond what it is said to be");
        // Which part of a window's whole is taken is known at run time.
        let is_superset = matches!(kernel, Kernel::Take(_)) && at == 0;
        let is_exact = matches!(
            kernel,
            Kernel::Product(_) | Kernel::Products(_) | Kernel::Rows(_) | Kernel::Copy(_)
        );
        let middle = read.get(read.len() / 2).filter(|_| is_exact);
        let some = read.first().into_iter().chain(middle).chain(read.last());
        for element in some.filter(|_| !is_superset) {
            let mut changed = inputs.to_vec();
            let number = &mut changed[at][*element];
            *number = match used.dtype {
                DType::F32 => (f32::from_bits(*number) + 1.0).to_bits(),
                _ => *number + 1,
            };
            let found = launched(cpu, kernel, &changed, OLD[0]);
            assert_ne!(found, results, "{what}: element {element} of input {at} is not read");
        }
    }
}

/// What is written follows from the inputs, unless it is added to, and the rest stays.
fn check_writes(cpu: &Cpu, kernel: &Kernel, inputs: &[Vec<u32>], what: &str) {
    let [a, b] = OLD.map(|old| launched(cpu, kernel, inputs, old));
    for (at, used) in effects(kernel).writes.iter().enumerate() {
        let written = elements(used);
        let mut kept = 0;
        for element in 0..a[at].len() {
            let found = [a[at][element], b[at][element]];
            let stays = found == OLD.map(f32::to_bits);
            if !written.contains(&element) {
                assert!(stays, "{what}: element {element} of output {at} is written");
            } else if used.adds {
                kept += usize::from(found[0] != found[1]);
            } else {
                let same = found[0] == found[1];
                assert!(same, "{what}: element {element} of output {at} is not written");
            }
        }
        assert!(!used.adds || kept > 0, "{what}: nothing is added to output {at}");
    }
}

/// Launches on buffers that are longer than is wanted, with other numbers in what should not
/// matter.
#[test]
fn kernels_use_what_they_are_said_to_use() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let cpu = Cpu::new(1);
    for seed in seed.map_or(0..KERNELS, |seed| seed..seed + 1) {
        let mut r = Draws(seed);
        for kernel in drawn(&mut r) {
            let what = format!("SEED={seed}, {kernel:?}");
            assert_eq!(verify(&kernel), Ok(()), "{what}");
            let arguments = kernel.inputs().into_iter();
            let inputs: Vec<Vec<u32>> = arguments
                .map(|Argument { dtype, len }| {
                    (0..len + BEYOND).map(|at| number(&kernel, dtype, at, &mut r)).collect()
                })
                .collect();
            check_reads(&cpu, &kernel, &inputs, &what);
            check_writes(&cpu, &kernel, &inputs, &what);
        }
    }
}
