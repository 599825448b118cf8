//! The text of kernels as CUDA C++, executed by a CPU whose fibers are a block's threads.
//!
//! The cases are those of the other tests here: their kernels and inputs are recorded, compiled
//! into one library, and their results compared with those of the CPU, to the bit where nothing is
//! summed in another order.

use std::collections::BTreeMap;

use gantline_kernels::Kernel;
use gantline_kernels::cpu::{Cpu, Isa};
use gantline_kernels::cuda::{self, Functions, Tile};
use gantline_kernels::{Access, BinaryOp, Instr, Output, ReduceOp, RowInput, Rows, UnaryOp};
use ir::DType;

use crate::shim::{Library, compiler};
use crate::{Buffer, Case, Recorded, recorded, run, same_bits};

/// Cases that are taken of each test.
const CASES: usize = 24;

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
        Tile::Attention(_) | Tile::Flash(_) | Tile::FlashBackward(_) | Tile::Tensor(_) => true,
        Tile::Elementwise(tile) => calls_erf(&tile.rows),
        Tile::PartialSums(_) | Tile::Product(_) | Tile::Lines(_) | Tile::Move(_) => false,
    });
    !sums && !matches!(kernel, Kernel::Attention(_) | Kernel::AttentionBwd(_))
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

fn compare(kernel: &Kernel, functions: &Functions, want: &[Buffer], got: &[Buffer]) {
    for (at, (want, got)) in want.iter().zip(got).enumerate() {
        if is_exact(kernel, functions) {
            let (want_numbers, got_numbers) = (want.numbers(), got.numbers());
            let differs =
                |(a, b): &(&f64, &f64)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
            let found = want_numbers.iter().zip(&got_numbers).position(|pair| differs(&pair));
            assert!(
                found.is_none() || same_bits(want, got),
                "output {at} of {kernel:?} differs at {found:?}: {:?}",
                found.map(|at| (want_numbers[at], got_numbers[at]))
            );
            continue;
        }
        let limit = tolerance(kernel.outputs()[at].dtype);
        for (i, (want, got)) in want.numbers().iter().zip(got.numbers()).enumerate() {
            let close = (want - got).abs() <= limit * (1.0 + want.abs())
                || *want == got
                || want.is_nan() && got.is_nan();
            assert!(close, "output {at} of {kernel:?}: element {i} is {got}, not {want}");
        }
    }
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
    let tests: [(&str, fn()); 11] = [
        ("rows", crate::rows::random_programs_match_their_interpretation),
        ("functions", crate::rows::each_function_matches_alone),
        ("integers", crate::whole::random_programs_of_integers_are_exact),
        ("lines", crate::whole::lines_of_integers_are_exact),
        ("products", crate::product::products_of_random_einsums_match),
        ("several", crate::product::products_in_one_launch_have_the_bits_of_each_alone),
        ("programs", crate::product::programs_on_blocks_have_the_bits_of_a_launch_of_their_own),
        ("borders", crate::product::products_read_zeros_beyond_their_borders),
        ("attention", crate::attention::attention_and_its_gradient_match_the_materialised_scores),
        ("copies", crate::moves::copies_follow_their_strides),
        ("ropes", crate::moves::rotary_embedding_rotates_and_its_inverse_undoes_it),
    ];
    let mut cases: Vec<(&str, Recorded)> = Vec::new();
    for (name, test) in tests {
        let found = recorded(test);
        assert!(found.len() > 2, "the test of {name} runs kernels");
        let step = found.len().div_ceil(CASES);
        cases.extend(found.into_iter().step_by(step).map(|case| (name, case)));
    }
    // Of every other kernel the text has its offsets, of the others the launch passes them.
    let launched = |(at, (_, recorded)): (usize, &(&str, Recorded))| match at % 2 {
        0 => recorded.case.with_scalars(),
        _ => recorded.case.clone(),
    };
    let launched: Vec<Case> = cases.iter().enumerate().map(launched).collect();
    assert!(launched.iter().filter(|case| case.scalars.len() > 1).count() > 9);
    let of = |case: &Case| (case.kernel.clone(), cuda::functions(&case.kernel));
    let all: Vec<(Kernel, Functions)> = launched.iter().map(of).collect();
    let library = Library::new("kernels", all.clone()).expect("there is a compiler");
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (at, ((name, recorded), (kernel, functions))) in cases.iter().zip(&all).enumerate() {
        for seed in [0, 77] {
            compare(kernel, functions, &recorded.found, &launched[at].execute(&library, at, seed));
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
