//! The text of kernels as CUDA C++, executed by a CPU whose fibers are a block's threads.
//!
//! The cases are those of the other tests here: their kernels and inputs are recorded, compiled
//! into one library, and their results compared with those of the CPU, to the bit where nothing is
//! summed in another order.

use std::collections::BTreeMap;

use gantline_kernels::cpu::{Cpu, Isa};
use gantline_kernels::cuda::{self, Functions, Tile};
use gantline_kernels::{
    Access, Attention, BinaryOp, Instr, Kernel, Offset, Output, ReduceOp, RowInput, Rows, UnaryOp,
};
use ir::DType;

use crate::attention::random_attention;
use crate::shim::{Library, compiler, on_gpu};
use crate::tensor::{Furthest, mistaken};
use crate::{Buffer, Case, Random, Recorded, recorded, run, runs_all};

/// Cases that are taken of each test, and orders of threads: where every kernel is tested, and
/// else.
const CASES: [(usize, &[u64]); 2] = [(24, &[0, 77]), (10, &[77])];

/// Whether results have the bits of the CPU's.
fn is_exact(kernel: &Kernel, functions: &Functions) -> bool {
    let calls_erf = |r: &Rows| {
        r.dtype == DType::F64
            && r.instrs.iter().any(|instr| {
                matches!(
                    instr,
                    Instr::Unary { op: UnaryOp::Erf | UnaryOp::GeluErf, .. }
                        | Instr::Binary { op: BinaryOp::GeluErfGrad, .. }
                )
            })
    };
    let sums = functions.functions.iter().any(|function| match &function.tile {
        Tile::RowReduction(tile) => tile.rows.dtype != DType::I64,
        Tile::Attention(_) | Tile::Flash(_) | Tile::FlashBackward(_) => true,
        Tile::FlashWarpgroup(_) | Tile::FlashWarpgroupBackward(_) => true,
        Tile::Tensor(_) | Tile::Warpgroup(_) | Tile::SliceSum(_) => true,
        Tile::Elementwise(tile) => calls_erf(&tile.rows),
        Tile::PartialSums(_) | Tile::Product(_) | Tile::Lines(_) | Tile::Move(_) => false,
        Tile::Routing(_) => false,
    });
    !sums && !matches!(kernel, Kernel::Attention(_) | Kernel::AttentionBwd(_))
}

/// Whether a kernel computes sines, cosines or powers, which are those of the CPU's library and of
/// CUDA's.
fn calls_a_library(kernel: &Kernel) -> bool {
    let calls = |instr: &Instr| {
        matches!(
            instr,
            Instr::Unary { op: UnaryOp::Sin | UnaryOp::Cos, .. }
                | Instr::Binary { op: BinaryOp::Pow, .. }
        )
    };
    match kernel {
        Kernel::Rows(r) => r.dtype == DType::F64 || r.instrs.iter().any(calls),
        Kernel::Products(p) => {
            let programs = p.parts.iter().flat_map(|part| &part.then);
            programs.flat_map(|then| &then.rows.instrs).any(calls)
        }
        Kernel::Rope(_) => true,
        _ => false,
    }
}

/// How far apart results of a type may be, for sums of numbers of about one.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-11,
        DType::F16 => 2e-3,
        DType::BF16 => 1.6e-2,
        DType::F8E4M3 => 0.13,
        DType::F8E5M2 => 0.26,
        _ => 4e-5,
    }
}

/// Where results differ from those of the CPU by more than they may.
fn difference(
    kernel: &Kernel,
    functions: &Functions,
    want: &[Buffer],
    got: &[Buffer],
) -> Option<String> {
    let Furthest { share, element, found, wanted } =
        share_of_tolerance(kernel, functions, want, got);
    (share > 1.0).then(|| format!("{kernel:?}: element {element} is {found}, not {wanted}"))
}

/// The element that is furthest from the CPU's, as a share of how far it may be.
pub(crate) fn share_of_tolerance(
    kernel: &Kernel,
    functions: &Functions,
    want: &[Buffer],
    got: &[Buffer],
) -> Furthest {
    let is_exact = is_exact(kernel, functions) && !(on_gpu() && calls_a_library(kernel));
    let mut furthest = Furthest::NONE;
    for (output, (want, got)) in kernel.outputs().iter().zip(want.iter().zip(got)) {
        let limit = tolerance(output.dtype);
        for (at, (want, got)) in want.numbers().into_iter().zip(got.numbers()).enumerate() {
            if want.to_bits() == got.to_bits() || want.is_nan() && got.is_nan() {
                continue;
            }
            let share = match is_exact {
                true => f64::INFINITY,
                false if want == got => 0.0,
                false => (want - got).abs() / (limit * (1.0 + want.abs())),
            };
            furthest = furthest.or(share, at, [got, want]);
        }
    }
    furthest
}

/// Tests of the CPU whose launches are recorded.
pub(crate) const RECORDED: [(&str, fn()); 14] = [
    ("rows", crate::rows::random_programs_match_their_interpretation),
    ("functions", crate::rows::each_function_matches_alone),
    ("integers", crate::whole::random_programs_of_integers_are_exact),
    ("lines", crate::whole::lines_of_integers_are_exact),
    ("products", crate::product::products_of_random_einsums_match),
    ("several", crate::product::products_in_one_launch_have_the_bits_of_each_alone),
    ("programs", crate::product::programs_on_blocks_have_the_bits_of_a_launch_of_their_own),
    ("borders", crate::product::products_read_zeros_beyond_their_borders),
    ("attention", crate::attention::attention_and_its_gradient_match_the_materialised_scores),
    ("documents", crate::attention::attention_within_documents_matches_the_materialised_scores),
    ("positions", crate::attention::a_position_is_added_at_run_time),
    ("windows", crate::moves::a_window_is_placed_and_taken_where_it_fits),
    ("copies", crate::moves::copies_follow_their_strides),
    ("ropes", crate::moves::rotary_embedding_rotates_and_its_inverse_undoes_it),
];

/// A recorded launch: of every other kernel the text has its offsets, of the others the launch
/// passes them.
pub(crate) fn launched(at: usize, recorded: &Recorded) -> Case {
    if at.is_multiple_of(2) { recorded.case.with_scalars() } else { recorded.case.clone() }
}

#[test]
fn text_has_the_results_of_the_cpu() {
    if !Isa::Avx2.is_available() {
        println!("skipped: the CPU that results are compared with has no AVX2");
        return;
    }
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let (count, seeds) = CASES[usize::from(!runs_all())];
    let mut cases: Vec<(&str, Recorded)> = Vec::new();
    for (name, test) in RECORDED {
        let found = recorded(test);
        assert!(found.len() > 2, "the test of {name} runs kernels");
        let step = found.len().div_ceil(count);
        cases.extend(found.into_iter().step_by(step).map(|case| (name, case)));
    }
    let launched: Vec<Case> =
        cases.iter().enumerate().map(|(at, (_, recorded))| launched(at, recorded)).collect();
    assert!(launched.iter().filter(|case| case.scalars.len() > 1).count() > 3);
    let of = |case: &Case| (case.kernel.clone(), cuda::functions(&case.kernel));
    let all: Vec<(Kernel, Functions)> = launched.iter().map(of).collect();
    let library = Library::new("kernels", all.clone()).expect("there is a compiler");
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (at, ((name, recorded), (kernel, functions))) in cases.iter().zip(&all).enumerate() {
        for seed in seeds.iter().copied() {
            let found = launched[at].execute(&library, at, seed);
            assert_eq!(difference(kernel, functions, &recorded.found, &found), None);
        }
        *counts.entry(name).or_default() += 1;
    }
    println!("{counts:?}");
}

/// Of a program without points, sums are zero where they do not accumulate, and nothing is stored.
#[test]
fn programs_without_points_store_nothing() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let program = |(rows, cols): (usize, usize), accumulate: bool| {
        let store = |value, access| {
            let dtype = DType::F32;
            Output::Store { value, access, dtype, accumulate }
        };
        Rows {
            rows,
            cols,
            dtype: DType::F32,
            inputs: vec![RowInput { dtype: DType::F32, access: Access::full(rows, cols) }],
            instrs: vec![Instr::Load { input: 0 }, Instr::Reduce { op: ReduceOp::Max, x: 0 }],
            outputs: vec![
                store(0, Access::full(rows, cols)),
                store(1, Access::per_row(rows)),
                Output::ColSum { value: 0, accumulate },
                Output::TotalSum { value: 0, accumulate },
            ],
        }
    };
    let shapes = [(0, 5), (3, 0), (0, 0)];
    let case = |shape: (usize, usize), accumulate: bool| {
        let kernel = Kernel::Rows(program(shape, accumulate));
        // What lies behind an output belongs to others.
        let old = kernel.outputs().iter().map(|of| Buffer::F32(vec![-0.5; of.len + 4])).collect();
        Case { kernel, scalars: Vec::new(), inputs: vec![Buffer::F32(Vec::new())], old }
    };
    let cases: Vec<Case> =
        shapes.iter().flat_map(|shape| [false, true].map(|adds| case(*shape, adds))).collect();
    let of = |case: &Case| (case.kernel.clone(), cuda::functions(&case.kernel));
    let library = Library::new("without_points", cases.iter().map(of).collect());
    let library = library.expect("there is a compiler");
    for (at, case) in cases.iter().enumerate() {
        let want = run(&Cpu::new(1), &case.kernel, &case.inputs, &case.old);
        assert_eq!(case.execute(&library, at, 0), want, "{:?}", case.kernel);
    }
}

/// Sums of rows, columns and all, of rows that take a block each.
pub(crate) fn sums(rows: usize) -> Rows {
    let cols = 1100;
    let store = |value, access| {
        let dtype = DType::F32;
        Output::Store { value, access, dtype, accumulate: false }
    };
    Rows {
        rows,
        cols,
        dtype: DType::F32,
        inputs: vec![RowInput { dtype: DType::F32, access: Access::full(rows, cols) }],
        instrs: vec![Instr::Load { input: 0 }, Instr::Reduce { op: ReduceOp::Sum, x: 0 }],
        outputs: vec![
            store(1, Access::per_row(rows)),
            Output::ColSum { value: 0, accumulate: false },
            Output::TotalSum { value: 0, accumulate: false },
        ],
    }
}

/// What can be wrong in sums and in the gradient of attention: the kernel, its function, what is
/// replaced, which time, and by what.
const MISTAKES: [(usize, usize, &str, usize, &str); 14] = [
    (0, 0, "row < (chunk + 1) * 3", 0, "row < chunk * 3 + 2"),
    (0, 0, "sum1[i] = 0", 0, "sum1[i] = 1"),
    (0, 0, "sum1[turn * 4 + e] + v0", 0, "sum1[turn * 4] + v0"),
    (0, 0, "bits = 16", 0, "bits = 8"),
    (0, 0, "warp < 8", 0, "warp < 7"),
    (0, 0, "warp < 8", 1, "warp < 7"),
    (0, 1, "slice < 32", 0, "slice < 31"),
    (0, 2, "chunk < 200", 0, "chunk < 199"),
    (0, 2, "half /= 2", 0, "half /= 4"),
    (1, 0, "- delta", 0, "+ delta"),
    (1, 1, "- delta", 0, "+ delta"),
    (1, 0, "bits = 16", 0, "bits = 8"),
    (1, 1, "slopes[warp * 32 + t]", 0, "weights[warp * 32 + t]"),
    (1, 1, "* (1 - (capped", 0, "* (1 + (capped"),
];

#[test]
fn mistakes_in_the_text_of_sums_and_gradients_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut random = Random::new(6);
    let a = random_attention(&mut random, DType::F32);
    let (queries, keys) = (40, 50);
    let [of_queries, of_keys] = [queries, keys].map(|length| Attention::contiguous(length, 2, 24));
    let a = Attention {
        batch: 1,
        queries,
        keys,
        heads: 2,
        kv_heads: 2,
        group: 1,
        head_offset: Offset::ZERO,
        query_offset: 10,
        dim: 24,
        softcap: 0.8,
        bias: None,
        dropout: None,
        q: of_queries,
        k: of_keys,
        v: of_keys,
        out: of_queries,
        ..a
    };
    let cases = [Kernel::Rows(sums(600)), Kernel::AttentionBwd(a)]
        .map(|kernel| Case::new(&mut random, kernel));
    let of = |case: &Case| (case.kernel.clone(), cuda::functions(&case.kernel));
    let mut all: Vec<(Kernel, Functions)> = cases.iter().map(of).collect();
    all.extend(MISTAKES.map(|(kernel, ..)| of(&cases[kernel])));
    let change = |at: usize, text: String| match at.checked_sub(2).map(|at| MISTAKES[at]) {
        Some((_, number, right, time, wrong)) if text.contains(&format!("_{number}(")) => {
            mistaken(&text, (right, time, wrong))
        }
        _ => text,
    };
    let library = Library::changed("mistakes", all.clone(), &change).expect("there is a compiler");
    let cpu = Cpu::with_isa(1, Isa::detect());
    let want = cases.each_ref().map(|case| run(&cpu, &case.kernel, &case.inputs, &case.old));
    let is_found = |kernel: usize, at: usize| {
        let found = cases[kernel].execute(&library, at, 0);
        difference(&cases[kernel].kernel, &all[at].1, &want[kernel], &found).is_some()
    };
    assert!(!is_found(0, 0) && !is_found(1, 1), "without a mistake nothing is found");
    for (at, mistake) in MISTAKES.iter().enumerate() {
        assert!(is_found(mistake.0, at + 2), "{mistake:?} is not found");
    }
}
