//! Attention on tensor cores (sm_80), executed by the shim: no further from f64 than twice the
//! CPU's kernel, on random shapes; mistakes in the text are found.

use std::ops::Range;

use gantline_kernels::cpu::{Cpu, Isa};
use gantline_kernels::cuda::{Arch, Functions, Tile, functions_for};
use gantline_kernels::{Attention, Kernel, Offset};
use ir::DType;
use ir::random::DrawBits;

use crate::attention::{
    backward, bias_strides, document_input, dropout_of, forward, key_input, of_queries, packed,
    random_attention, random_bias,
};
use crate::flash_warpgroup::windowed;
use crate::shim::{Library, compiler};
use crate::tensor::{for_sm80, mistaken};
use crate::{Buffer, Case, Random, assert_close, run, same_bits};

/// An attention that fits tensor cores.
pub(crate) fn random_flash(random: &mut Random, dims: &[usize]) -> Attention {
    let dtype = random.pick(&[DType::BF16, DType::F16]);
    let mut a = random_attention(random, dtype);
    let (dim, old) = (random.pick(dims), a.dim);
    a.dim = dim;
    a.queries = a.queries.max(16);
    for (strides, length) in
        [(&mut a.q, a.queries), (&mut a.k, a.keys), (&mut a.v, a.keys), (&mut a.out, a.queries)]
    {
        let wide = strides[1] / old;
        *strides = [length * wide * dim, wide * dim, dim];
    }
    a.scale = 1.5 / (dim as f64).sqrt();
    let sizes = [a.batch, a.heads, a.queries, a.keys];
    a.bias = a.bias.map(|_| bias_strides(random, sizes));
    a
}

/// The attention of a case: the last ones are of documents.
pub(crate) fn random_of(case: u64, random: &mut Random) -> Attention {
    let draw = |random: &mut Random, _| random_flash(random, &[16, 48, 64, 64, 80, 128, 128]);
    if case < 16 { draw(random, DType::BF16) } else { packed(random, draw, DType::BF16) }
}

/// A launch, with its outputs in f64.
pub(crate) struct Expected {
    pub(crate) attention: Attention,
    pub(crate) case: Case,
    pub(crate) out: Vec<f64>,
    pub(crate) lse: Vec<f64>,
    /// The distance of the CPU's output.
    pub(crate) distance: f64,
}

impl Expected {
    pub(crate) fn new(random: &mut Random, a: Attention) -> Expected {
        let mut case = Case::new(random, Kernel::Attention(a.clone()));
        if a.bias.is_some() {
            case.inputs[3] = Buffer::new(a.dtype, &random_bias(&a, random));
        }
        if let Some(documents) = document_input(&a) {
            case.inputs[3 + usize::from(a.bias.is_some())] = documents;
        }
        if let Some(key) = key_input(&a) {
            *case.inputs.last_mut().expect("the key is the last input") = key;
        }
        let mut numbers: Vec<Vec<f64>> = case.inputs[..3].iter().map(Buffer::numbers).collect();
        numbers.push(a.bias.map_or(Vec::new(), |_| case.inputs[3].numbers()));
        let mut out = case.old[0].numbers();
        let operands = [&numbers[0], &numbers[1], &numbers[2], &numbers[3]];
        let lse = forward(&a, operands.map(Vec::as_slice), &mut out);
        let cpu = Cpu::with_isa(1, Isa::detect());
        let found = run(&cpu, &case.kernel, &case.inputs, &case.old);
        let distance = distance(&found[0].numbers(), &out);
        Expected { attention: a, case, out, lse, distance }
    }

    /// Whether outputs are further off than twice the CPU's.
    pub(crate) fn is_off(&self, found: &[Buffer]) -> bool {
        let is_off = |(found, want): (f64, &f64)| (found - want).abs() > 1e-4 && found != *want;
        let mut lse = found[1].numbers().into_iter().zip(&self.lse);
        self.share(found) > 1.0 || lse.any(is_off)
    }

    /// The distance of the output over twice the CPU's.
    pub(crate) fn share(&self, found: &[Buffer]) -> f64 {
        let off = distance(&found[0].numbers(), &self.out);
        match off {
            0.0 => 0.0,
            off if off.is_finite() => off / (2.0 * self.distance),
            _ => f64::INFINITY,
        }
    }
}

/// The root mean square of the difference.
pub(crate) fn distance(found: &[f64], want: &[f64]) -> f64 {
    assert_eq!(found.len(), want.len());
    let squares = found.iter().zip(want).map(|(a, b)| (a - b) * (a - b)).sum::<f64>();
    (squares / want.len() as f64).sqrt()
}

fn is_flash(functions: &Functions) -> bool {
    functions.functions.iter().all(|function| matches!(function.tile, Tile::Flash(_)))
}

#[test]
fn attention_is_as_near_to_f64_as_twice_the_cpu() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let case = |number: u64| {
        let mut random = Random::new(number);
        let a = random_of(number, &mut random);
        Expected::new(&mut random, a)
    };
    let all: Vec<Expected> = (0..30).map(case).collect();
    let functions: Vec<_> = all.iter().map(|expected| for_sm80(&expected.case.kernel)).collect();
    assert!(functions.iter().all(|(_, of)| is_flash(of)), "they run on tensor cores");
    let library = Library::new("flash", functions).expect("there is a compiler");
    for (at, expected) in all.iter().enumerate() {
        let found = expected.case.execute(&library, at, 0);
        let what = &format!("case {at}: {:?}", expected.attention);
        assert_close(&found[1].numbers(), &expected.lse, 3e-5, what);
        let (off, limit) = (distance(&found[0].numbers(), &expected.out), 2.0 * expected.distance);
        assert!(off <= limit, "{what}: {off} off, {limit} at most");
        let again = expected.case.execute(&library, at, 5 + at as u64);
        assert!(found.iter().zip(&again).all(|(a, b)| same_bits(a, b)), "{what}: order matters");
    }
}

/// Attention that does not fit is that of CUDA cores.
#[test]
fn attention_that_does_not_fit_tensor_cores_runs_elsewhere() {
    let fitting = Attention { dim: 64, ..random_flash(&mut Random::new(3), &[64]) };
    let is_flash =
        |a: &Attention| is_flash(&functions_for(&Kernel::Attention(a.clone()), Arch::Sm80));
    assert!(is_flash(&fitting));
    let [b, s, h] = fitting.k;
    for a in [
        Attention { dtype: DType::F32, ..fitting.clone() },
        Attention { dim: 40, ..fitting.clone() },
        Attention { queries: 8, ..fitting.clone() },
        Attention { k: [b + 4, s, h], ..fitting.clone() },
    ] {
        assert!(!is_flash(&a), "{a:?}");
    }
}

/// Positions of samples that are known at run time give the bits of constant ones.
pub(crate) fn check_positions(
    name: &str,
    lower: fn(&Kernel) -> (Kernel, Functions),
    is_on_tensor_cores: fn(&Functions) -> bool,
) {
    let mut random = Random::new(21);
    let (batch, queries, keys, heads, dim) = (3, 150, 280, 2, 64);
    let known =
        Attention { batch, query_offset: 3, ..windowed(&mut random, [queries, keys, heads, dim]) };
    let positions = [0, 87, 240];
    let told = Attention { position: true, ..known.clone() };
    let mut told = Case::new(&mut random, Kernel::Attention(told));
    *told.inputs.last_mut().expect("positions are the last input") =
        Buffer::I32(positions.to_vec());
    let alone = positions.map(|position| {
        let query_offset = known.query_offset + i64::from(position);
        let kernel = Kernel::Attention(Attention { query_offset, ..known.clone() });
        let mut case = Case::new(&mut random, kernel);
        case.inputs.clone_from_slice(&told.inputs[..3]);
        case
    });
    let all: Vec<Case> = [told].into_iter().chain(alone).collect();
    let functions: Vec<_> = all.iter().map(|case| lower(&case.kernel)).collect();
    assert!(functions.iter().all(|(_, of)| is_on_tensor_cores(of)));
    let library = Library::new(name, functions).expect("there is a compiler");
    let outs: Vec<Vec<f64>> = all
        .iter()
        .enumerate()
        .map(|(at, case)| case.execute(&library, at, 0)[0].numbers())
        .collect();
    let sample = queries * heads * dim;
    for b in 0..batch {
        let own = b * sample..(b + 1) * sample;
        assert_eq!(outs[0][own.clone()], outs[1 + b][own], "{name}: sample {b}");
    }
}

#[test]
fn positions_are_those_of_samples_on_tensor_cores() {
    match compiler() {
        Some(_) => check_positions("flash_positions", for_sm80, is_flash),
        None => println!("skipped: no C++ compiler"),
    }
}

/// Some of the queries alone have the bits that they have among all.
#[test]
fn bits_of_a_query_on_tensor_cores_do_not_depend_on_other_queries() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut random = Random::new(8);
    let (keys, heads, dim) = (300, 2, 64);
    let layout = |length: usize| Attention::contiguous(length, heads, dim);
    let mut whole = random_flash(&mut random, &[dim]);
    whole = Attention {
        batch: 1,
        queries: 200,
        keys,
        heads,
        kv_heads: heads,
        group: 1,
        head_offset: Offset::ZERO,
        causal: true,
        window: 130,
        softcap: 0.0,
        bias: None,
        dropout: None,
        query_offset: 100,
        q: layout(200),
        k: layout(keys),
        v: layout(keys),
        out: layout(200),
        ..whole
    };
    check_part("flash_part", for_sm80, &mut random, whole, 70..110);
}

/// Some of the queries of an attention without gaps have the bits that they have among all: alone,
/// with dropout, and within documents.
pub(crate) fn check_part(
    name: &str,
    functions: fn(&Kernel) -> (Kernel, Functions),
    random: &mut Random,
    plain: Attention,
    queries: Range<usize>,
) {
    let sizes = [plain.queries, plain.keys];
    let dropped =
        |bits: DrawBits| Attention { dropout: Some(dropout_of(sizes, bits)), ..plain.clone() };
    let packed = |a: Attention| Attention { documents: Some(30), ..a };
    let all = [
        plain.clone(),
        dropped(DrawBits::B24),
        packed(plain.clone()),
        packed(dropped(DrawBits::B16)),
    ];
    let kernels =
        |a: &Attention| [a.clone(), of_queries(a, queries.clone())].map(Kernel::Attention);
    let functions = all.iter().flat_map(kernels).map(|kernel| functions(&kernel)).collect();
    let library = Library::new(name, functions).expect("there is a compiler");
    for (at, whole) in all.iter().enumerate() {
        let [mut all, mut some] = kernels(whole).map(|kernel| Case::new(random, kernel));
        let documents = document_input(whole).into_iter();
        let more: Vec<Buffer> = documents.chain(key_input(whole)).collect();
        all.inputs[3..].clone_from_slice(&more);
        some.inputs = all.inputs.clone();
        let width = whole.heads * whole.dim;
        let own = queries.start * width..queries.end * width;
        some.inputs[0] = Buffer::new(whole.dtype, &all.inputs[0].numbers()[own.clone()]);
        let [all, some] = [all.execute(&library, 2 * at, 0), some.execute(&library, 2 * at + 1, 0)];
        assert_eq!(some[0].numbers(), all[0].numbers()[own], "{whole:?}");
    }
}

/// A gradient, with its outputs in f64 and the distances of the CPU's.
pub(crate) struct ExpectedGradient {
    pub(crate) case: Case,
    gradients: Vec<Vec<f64>>,
    distances: Vec<f64>,
}

impl ExpectedGradient {
    /// Of the outputs of a forward pass in f64.
    pub(crate) fn new(random: &mut Random, a: &Attention) -> ExpectedGradient {
        let a = Attention { bias_grad: false, ..a.clone() };
        let Expected { case: Case { inputs, .. }, out, lse, .. } = Expected::new(random, a.clone());
        let mut case = Case::new(random, Kernel::AttentionBwd(a.clone()));
        let operands = 3 + usize::from(a.bias.is_some()) + usize::from(a.documents.is_some());
        case.inputs[..operands].clone_from_slice(&inputs[..operands]);
        case.inputs[operands] = Buffer::new(a.dtype, &out);
        case.inputs[operands + 1] = Buffer::F32(lse.iter().map(|&x| x as f32).collect());
        if let Some(key) = key_input(&a) {
            *case.inputs.last_mut().expect("the key is the last input") = key;
        }
        let found = run(&Cpu::with_isa(1, Isa::detect()), &case.kernel, &case.inputs, &case.old);
        let mut all: Vec<Vec<f64>> =
            case.old.iter().map(|old| vec![0.0; old.numbers().len()]).collect();
        all.push(Vec::new());
        let [dq, dk, dv, none] = &mut all[..] else { unreachable!("three gradients") };
        let mut numbers: Vec<Vec<f64>> = case.inputs[..3].iter().map(Buffer::numbers).collect();
        numbers.push(a.bias.map_or(Vec::new(), |_| case.inputs[3].numbers()));
        numbers.push(case.inputs[operands + 2].numbers());
        let of = |at: usize| &numbers[at][..];
        backward(&a, [of(0), of(1), of(2), of(3), of(4)], [dq, dk, dv, none]);
        all.truncate(3);
        // Elements between the heads stay.
        for ((gradient, old), found) in all.iter_mut().zip(&case.old).zip(&found) {
            let others = old.numbers().into_iter().zip(found.numbers());
            for (x, (old, found)) in gradient.iter_mut().zip(others) {
                *x = if *x == 0.0 && old == found { old } else { *x };
            }
        }
        let pairs = found.iter().zip(&all);
        let distances = pairs.map(|(found, want)| distance(&found.numbers(), want)).collect();
        ExpectedGradient { case, gradients: all, distances }
    }

    /// The largest distance of a gradient over twice the CPU's.
    pub(crate) fn share(&self, found: &[Buffer]) -> f64 {
        let all = found.iter().zip(&self.gradients).zip(&self.distances);
        let shares = all.map(|((found, want), of_cpu)| {
            let off = distance(&found.numbers(), want);
            if off == 0.0 { 0.0 } else { off / (2.0 * of_cpu) }
        });
        shares.fold(0.0, |most, share| if share > most || share.is_nan() { share } else { most })
    }

    /// The first gradient that is further off than twice the CPU's.
    pub(crate) fn off(&self, found: &[Buffer]) -> Option<String> {
        let mut all = found.iter().zip(&self.gradients).zip(&self.distances).enumerate();
        all.find_map(|(at, ((found, want), of_cpu))| {
            let (off, limit) = (distance(&found.numbers(), want), 2.0 * of_cpu);
            (off > limit || off.is_nan()).then(|| format!("gradient {at} is {off} off, {limit}"))
        })
    }
}

pub(crate) fn is_flash_backward(functions: &Functions) -> bool {
    let is_flash = |tile: &Tile| matches!(tile, Tile::FlashBackward(_));
    functions.functions.iter().filter(|function| is_flash(&function.tile)).count() == 1
}

#[test]
fn gradients_of_attention_are_as_near_to_f64_as_twice_the_cpu() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let case = |number: u64| {
        let mut random = Random::new(400 + number);
        let a = random_of(number, &mut random);
        ExpectedGradient::new(&mut random, &a)
    };
    let all: Vec<ExpectedGradient> = (0..22).map(case).collect();
    let functions: Vec<_> = all.iter().map(|expected| for_sm80(&expected.case.kernel)).collect();
    assert!(functions.iter().all(|(_, of)| is_flash_backward(of)), "they run on tensor cores");
    let library = Library::new("flash_backward", functions).expect("there is a compiler");
    for (at, expected) in all.iter().enumerate() {
        let found = expected.case.execute(&library, at, 0);
        assert_eq!(expected.off(&found), None, "case {at}: {:?}", expected.case.kernel);
        let again = expected.case.execute(&library, at, 5 + at as u64);
        assert!(found.iter().zip(&again).all(|(a, b)| same_bits(a, b)), "case {at}: order matters");
    }
}

/// What can be wrong in the text: what is replaced, which time, and by what.
const MISTAKES: [(&str, usize, &str); 30] = [
    ("sync_block();", 0, ""),
    ("sync_block();", 1, ""),
    ("cp_async_wait<1>();", 0, ""),
    ("cp_async_wait<0>();", 0, ""),
    ("cp_async_wait<0>();", 0, "cp_async_wait<1>();"),
    ("cp_async_commit();", 0, ""),
    ("cp_async_commit();", 1, ""),
    ("cp_async_commit();", 2, ""),
    ("step % 2", 0, "(step + 1) % 2"),
    ("(step + 1) % 2", 0, "step % 2"),
    ("step + 1 < steps", 0, "step + 2 < steps"),
    ("< all_begin", 0, "< 0"),
    ("> all_end", 0, "> 300"),
    ("j <= s + offset", 0, "j < s + offset"),
    ("j > s + offset - 150", 0, "j >= s + offset - 150"),
    ("+ offset + 1 - 150, end) / 64 * 64", 0, "+ offset + 1 - 150, end) / 64 * 64 + 64"),
    ("first_query + 127 : 149", 0, "first_query + 63 : 149"),
    ("shuffle_xor(top, 1)", 0, "top"),
    ("shuffle_xor(top, 2)", 0, "top"),
    ("shuffle_xor(sum, 1)", 0, "sum"),
    ("shuffle_xor(sum, 2)", 0, "sum"),
    ("row_max[i][r] = top;", 0, ""),
    ("row_sum[i][r] * rescale", 0, "row_sum[i][r]"),
    ("acc[i][n][2 * r] * rescale", 0, "acc[i][n][2 * r]"),
    ("scores[i][t / 8 + 1]", 0, "scores[i][t / 8]"),
    ("ldmatrix(k_fragments", 0, "ldmatrix_trans(k_fragments"),
    ("ldmatrix_trans(v_fragments", 0, "ldmatrix(v_fragments"),
    ("^ row % 8", 1, "^ row / 2 % 4"),
    ("warp * 32 + i * 16 + lane / 4 + r * 8", 0, "warp * 32 + i * 16 + lane / 4"),
    ("fmaf(row_max[i][r], ", 1, "fmaf(row_sum[i][r], "),
];

/// Mistakes, barriers and waits that are left out among them, give wrong results or races.
#[test]
fn mistakes_in_the_text_of_attention_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut random = Random::new(11);
    let (queries, keys, heads, dim) = (150, 290, 1, 64);
    let layout = |length: usize| Attention::contiguous(length, heads, dim);
    let a = Attention {
        batch: 1,
        queries,
        keys,
        heads,
        kv_heads: heads,
        dim,
        scale: 0.25,
        causal: true,
        window: 150,
        softcap: 0.0,
        bias: None,
        bias_grad: false,
        documents: None,
        query_offset: 140,
        position: false,
        head_offset: Offset::ZERO,
        group: 1,
        dropout: None,
        dtype: DType::BF16,
        q: layout(queries),
        k: layout(keys),
        v: layout(keys),
        out: layout(queries),
    };
    let expected = Expected::new(&mut random, a);
    let change = |at: usize, text: String| match at {
        0 => text,
        _ => mistaken(&text, MISTAKES[at - 1]),
    };
    let all = vec![for_sm80(&expected.case.kernel); MISTAKES.len() + 1];
    let library = Library::checked("flash_mistakes", all, &change).expect("there is a compiler");
    let is_found = |at: usize, seed: u64| {
        let found = expected.case.execute(&library, at, seed);
        library.report().is_some() || expected.is_off(&found)
    };
    assert!((0..8).all(|seed| !is_found(0, seed)), "without a mistake nothing is found");
    for (at, mistake) in MISTAKES.iter().enumerate() {
        assert!((0..8).any(|seed| is_found(at + 1, seed)), "{mistake:?} is not found");
    }
}

/// What can be wrong in the text of a part of the gradient, by the number of its function.
const GRADIENT_MISTAKES: [(usize, &str, usize, &str); 27] = [
    (1, "sync_block();", 0, ""),
    (1, "sync_block();", 1, ""),
    (1, "sync_block();", 2, ""),
    (1, "sync_block();", 3, ""),
    (1, "sync_block();", 4, ""),
    (1, "cp_async_wait<0>();", 0, ""),
    (1, "cp_async_commit();", 0, ""),
    (1, "cp_async_commit();", 1, ""),
    (1, "(step + 1) % 2", 0, "step % 2"),
    (1, "j <= s + offset", 0, "j < s + offset"),
    (1, "j > s + offset - 70", 0, "j >= s + offset - 70"),
    (1, "first_row - offset, ", 0, "first_row - offset + 64, "),
    (1, "first_row - offset + 164", 0, "first_row - offset + 100"),
    (1, "(slope - delta)", 0, "slope"),
    (1, "scores[0][t / 8 + 1]", 0, "scores[0][t / 8]"),
    (1, "(step + 1) / steps_of_head", 0, "(step + 1) / (2 * steps_of_head)"),
    (1, "ldmatrix_trans(", 0, "ldmatrix("),
    (1, "ldmatrix_trans(a[i]", 0, "ldmatrix(a[i]"),
    // Turns.
    (1, "wait_for_turn(next_turn, turn);", 0, ";"),
    (1, "end_turn(next_turn, turn + 1);", 0, ";"),
    (1, "end_turn(next_turn, turn + 1);", 0, "end_turn(next_turn, turn);"),
    (1, "(u32)(last_own - own)", 0, "(u32)(own - first_own)"),
    (1, "own == first_own", 0, "own == last_own"),
    (1, "if (turn > 0) {", 0, "if (turn > 1) {"),
    (1, "+ offset + 31", 0, "+ offset"),
    (1, "+ offset + 1 - 70", 0, "+ offset + 64 - 70"),
    (1, "tile_of_all * 2048", 0, "tile_of_all * 1024"),
];

#[test]
fn mistakes_in_the_text_of_gradients_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut random = Random::new(12);
    let (queries, keys, heads, dim) = (150, 200, 2, 64);
    let layout = |length: usize, heads: usize| Attention::contiguous(length, heads, dim);
    let a = Attention {
        batch: 1,
        queries,
        keys,
        heads,
        kv_heads: 1,
        dim,
        causal: true,
        window: 70,
        softcap: 0.0,
        bias: None,
        query_offset: 50,
        head_offset: Offset::ZERO,
        group: 2,
        dropout: None,
        dtype: DType::BF16,
        q: layout(queries, heads),
        k: layout(keys, 1),
        v: layout(keys, 1),
        out: layout(queries, heads),
        ..random_flash(&mut random, &[dim])
    };
    let expected = ExpectedGradient::new(&mut random, &a);
    let change = |at: usize, text: String| match at.checked_sub(1).map(|at| GRADIENT_MISTAKES[at]) {
        Some((number, right, time, wrong)) if text.contains(&format!("_{number}(")) => {
            mistaken(&text, (right, time, wrong))
        }
        _ => text,
    };
    let all = vec![for_sm80(&expected.case.kernel); GRADIENT_MISTAKES.len() + 1];
    let library = Library::checked("gradient_mistakes", all, &change).expect("there is a compiler");
    let is_found = |at: usize, seed: u64| {
        let found = expected.case.execute(&library, at, seed);
        library.report().is_some() || expected.off(&found).is_some()
    };
    assert!((0..8).all(|seed| !is_found(0, seed)), "without a mistake nothing is found");
    for (at, mistake) in GRADIENT_MISTAKES.iter().enumerate() {
        assert!((0..8).any(|seed| is_found(at + 1, seed)), "{mistake:?} is not found");
    }
}
