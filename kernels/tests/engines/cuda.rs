//! The text of kernels as CUDA C++, executed by a CPU whose fibers are a block's threads.
//!
//! The cases are those of the other tests here: their kernels and inputs are recorded, compiled
//! into one library, and their results compared with those of the CPU, to the bit where nothing is
//! summed in another order.

use std::collections::BTreeMap;
use std::ffi::c_void;

use gantline_kernels::Kernel;
use gantline_kernels::cpu::Isa;
use gantline_kernels::cuda::{self, Buffer as Place, Functions, Tile};
use gantline_kernels::{BinaryOp, Instr, Rows, UnaryOp};
use ir::DType;

use crate::shim::{Library, compiler};
use crate::{Buffer, Case, recorded, same_bits, with_scalars};

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
        Tile::Sweeps(tile) => tile.rows.dtype != DType::I64,
        Tile::Attention(_) | Tile::Tensor(_) => true,
        Tile::Points(tile) => calls_erf(&tile.rows),
        Tile::Sum(_) | Tile::Product(_) | Tile::Lines(_) | Tile::Move(_) => false,
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

fn address(buffer: &mut Buffer) -> *mut c_void {
    match buffer {
        Buffer::F32(x) => x.as_mut_ptr().cast(),
        Buffer::F64(x) => x.as_mut_ptr().cast(),
        Buffer::I32(x) => x.as_mut_ptr().cast(),
        Buffer::U32(x) => x.as_mut_ptr().cast(),
        Buffer::I64(x) => x.as_mut_ptr().cast(),
        Buffer::Bool(x) | Buffer::Byte(_, x) => x.as_mut_ptr().cast(),
        Buffer::Wide(_, x) => x.as_mut_ptr().cast(),
    }
}

/// Launches the functions of a case, one after the other.
fn execute(
    library: &Library,
    at: usize,
    (case, scalars): (&Case, &[i64]),
    seed: u64,
) -> Vec<Buffer> {
    let functions = &library.functions()[at];
    let (mut inputs, mut outputs) = (case.inputs.clone(), case.old.clone());
    // What no function writes is no number.
    let mut rooms: Vec<Vec<u64>> = functions
        .workspaces
        .iter()
        .map(|bytes| vec![u64::MAX; bytes.div_ceil(8) as usize])
        .collect();
    for (number, function) in functions.functions.iter().enumerate() {
        let buffers: Vec<*mut c_void> = function
            .passed()
            .into_iter()
            .map(|place| match place {
                Place::Input(at) => address(&mut inputs[at]),
                Place::Output(at) => address(&mut outputs[at]),
                Place::Workspace(at) => rooms[at].as_mut_ptr().cast(),
            })
            .collect();
        // SAFETY: the kernel was verified by the CPU, which ran it on buffers as long as these.
        unsafe { library.launch(at, number, &buffers, scalars, seed) };
    }
    outputs
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
    let mut cases: Vec<(&str, Case)> = Vec::new();
    for (name, test) in tests {
        let found = recorded(test);
        assert!(found.len() > 2, "the test of {name} runs kernels");
        let step = found.len().div_ceil(CASES);
        cases.extend(found.into_iter().step_by(step).map(|case| (name, case)));
    }
    // Of every other kernel the text has its offsets, of the others the launch passes them.
    let launched = |(at, (_, case)): (usize, &(&str, Case))| match at % 2 {
        0 => with_scalars(&case.kernel),
        _ => (case.kernel.clone(), Vec::new()),
    };
    let launched: Vec<(Kernel, Vec<i64>)> = cases.iter().enumerate().map(launched).collect();
    assert!(launched.iter().filter(|(_, scalars)| scalars.len() > 1).count() > 9);
    let all = launched.iter().map(|(kernel, _)| cuda::functions(kernel)).collect();
    let library = Library::new("kernels", all).expect("there is a compiler");
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (at, ((name, case), functions)) in cases.iter().zip(library.functions()).enumerate() {
        for seed in [0, 77] {
            let got = execute(&library, at, (case, &launched[at].1), seed);
            compare(&case.kernel, functions, &case.found, &got);
        }
        *counts.entry(name).or_default() += 1;
    }
    println!("{counts:?}");
}
