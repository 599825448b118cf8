//! What the tile programs of kernels say of their accesses is what the shim counts where it
//! executes their text: sectors of device memory, and turns of the banks of shared memory.
//!
//! Launches of other tests are taken, of odd shapes too; those of `counts` are compared there.
//! All of them take minutes:
//! `GANTLINE_TEST_EVERY_KERNEL=1 cargo test --workspace --test engines derived -- --nocapture`.

use std::collections::BTreeMap;

use gantline_kernels::cuda::{Accesses, Arch, Functions, Tile, functions_for};
use gantline_kernels::{Kernel, Product};
use ir::DType;

use crate::counts::derived;
use crate::rows::{buffers, random_rows};
use crate::shim::{Library, compiler};
use crate::{Case, Random, elements, moves, recorded, runs_all, tensor, transpose};

/// Launches of a test that are taken.
const LAUNCHES: usize = 2;
/// The same of all.
const ALL: usize = 40;
/// Rows and columns of random programs.
const SHAPES: [(usize, usize); 7] =
    [(7, 7), (40, 60), (3, 768), (33, 16), (2, 1100), (64, 33), (300, 1)];
/// Launches that are compiled into one library.
const AT_ONCE: usize = 40;

/// The name of the family of a tile program.
fn family(tile: &Tile) -> &'static str {
    match tile {
        Tile::Elementwise(_) => "elementwise",
        Tile::RowReduction(_) => "reduction over rows",
        Tile::PartialSums(_) => "second pass of sums",
        Tile::Tensor(_) => "product by mma.sync",
        Tile::SliceSum(_) => "sum of slices",
        Tile::Move(_) => "move",
        _ => "not known",
    }
}

/// Launches with the functions of their kernels.
fn launches(count: usize) -> Vec<(Case, Functions)> {
    let mut all = Vec::new();
    let mut add = |case: Case, arch: Arch| {
        let functions = functions_for(&case.kernel, arch);
        all.push((case, functions));
    };
    for number in 0..3 * count {
        let shape = SHAPES[number % SHAPES.len()];
        let mut random = Random::new(number as u64);
        let rows = random_rows(&mut random, DType::F32, shape, true);
        let (inputs, old) = buffers(&mut random, &rows);
        add(Case { kernel: Kernel::Rows(rows), scalars: Vec::new(), inputs, old }, Arch::Sm80);
    }
    for test in [
        moves::copies_follow_their_strides,
        moves::rotary_embedding_rotates_and_its_inverse_undoes_it,
    ] {
        let found = recorded(test);
        let step = found.len().div_ceil(count);
        found.into_iter().step_by(step).for_each(|of| add(of.case, Arch::Sm80));
    }
    // The shim counts a million products a second.
    let is_small = |p: &Product| p.sizes().iter().product::<usize>() < 100_000;
    let few = tensor::cases(64).into_iter().filter(|(_, p, _)| is_small(p)).take(count);
    few.for_each(|(case, ..)| add(case, Arch::Sm80));
    let few = elements::cases(64).into_iter().filter(|of| is_small(&of.product)).take(count);
    few.for_each(|of| add(of.case, elements::arch(&of.product)));
    for accumulate in [false, true] {
        let mut p = Product::matrix(17, 24, 256, DType::BF16);
        (p.stored.c, p.tiling.split, p.accumulate) = (DType::F32, 2, accumulate);
        add(Case::new(&mut Random::new(1), Kernel::Product(p)), Arch::Sm80);
    }
    for (at, dtype) in [DType::F32, DType::BF16, DType::Bool].into_iter().enumerate() {
        let copy = transpose::transposition(&mut Random::new(at as u64), dtype, [70, 45 + at]);
        add(Case::new(&mut Random::new(at as u64), Kernel::Copy(copy)), Arch::Sm80);
    }
    all
}

#[test]
fn derived_accesses_are_those_that_the_shim_counts() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut known: Vec<(Case, Functions, Accesses)> = Vec::new();
    for (case, functions) in launches(if runs_all() { ALL } else { LAUNCHES }) {
        if let Some(of) = derived(&functions.functions) {
            known.push((case, functions, of));
        }
    }
    let mut families: BTreeMap<&str, usize> = BTreeMap::new();
    let mut wrong = 0;
    for (chunk, some) in known.chunks(AT_ONCE).enumerate() {
        let texts = some.iter().map(|(case, of, _)| (case.kernel.clone(), of.clone())).collect();
        let library = Library::counted(&format!("derived-{chunk}"), texts).expect("it compiles");
        for (at, (case, functions, of)) in some.iter().enumerate() {
            case.execute(&library, at, 0);
            let counted = library.counts();
            let is_tensor = functions.functions.iter().any(|f| matches!(f.tile, Tile::Tensor(_)));
            let turns = if is_tensor { counted.matrix_turns } else { counted.turns };
            for function in &functions.functions {
                *families.entry(family(&function.tile)).or_default() += 1;
            }
            let found = Accesses { sectors: counted.sectors, turns };
            let texts = functions.functions.iter().map(ToString::to_string);
            let texts: Vec<String> = texts.collect();
            if *of != found {
                println!("{of:?}, counted {found:?}: {texts:?} {:?}", case.kernel);
                wrong += 1;
            }
        }
    }
    println!("{families:?}");
    assert_eq!(wrong, 0, "what is derived of these is not what is counted");
    assert!(families.len() == 6 && families.values().all(|count| *count > 0), "{families:?}");
}
