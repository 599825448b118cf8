//! Copies by tiles in shared memory, executed by the shim with all checks, against the CPU: on
//! random shapes, types and alignments; which copies have them; banks that lanes access; mistakes
//! in the text.

use gantline_kernels::cpu::{Cpu, Isa};
use gantline_kernels::cuda::{Functions, Move, Tile, functions};
use gantline_kernels::{Copy, CopyLoop, Kernel, Offset};
use ir::DType;

use crate::shim::{Library, compiler};
use crate::tensor::mistaken;
use crate::{Case, Random, run, same_bits};

/// A transposition of matrices that lie side by side, rows of both as long as a multiple of a
/// number of elements, or a little longer.
pub(crate) fn transposition(
    random: &mut Random,
    dtype: DType,
    [rows, columns]: [usize; 2],
) -> Copy {
    let unit = random.pick(&[1, 2, 4, 8, 16]);
    let [of_source, of_target] = [columns, rows].map(|size| size.next_multiple_of(unit));
    let outer = 1 + random.below(3);
    let mut loops = vec![
        CopyLoop { size: outer, source: of_source * rows, target: of_target * columns },
        CopyLoop { size: columns, source: 1, target: of_target },
        CopyLoop { size: rows, source: of_source, target: 1 },
    ];
    if random.below(2) == 0 {
        loops.swap(1, 2);
    }
    let offset = |random: &mut Random| random.pick(&[0, 0, unit, 3]);
    Copy {
        loops,
        source_offset: Offset::Fixed(offset(random) as i64),
        target_offset: offset(random),
        zero_first: 0,
        dtype,
    }
}

fn is_by_tiles(functions: &Functions) -> bool {
    let is_it = |tile: &Tile| matches!(tile, Tile::Move(Move::Transpose(_)));
    functions.functions.iter().any(|function| is_it(&function.tile))
}

#[test]
fn transpositions_have_the_results_of_the_cpu() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let case = |number: u64| {
        let mut random = Random::new(number + 3100);
        let dtype = [DType::BF16, DType::F32, DType::F64, DType::Bool][number as usize % 4];
        let sizes = [0; 2].map(|_| random.pick(&[16, 17, 31, 64, 65, 100, 128, 129, 200]));
        let copy = transposition(&mut random, dtype, sizes);
        let kernel = Kernel::Copy(copy.clone());
        (copy, Case::new(&mut random, kernel))
    };
    let all: Vec<(Copy, Case)> = (0..40).map(case).collect();
    let of = |(_, case): &(Copy, Case)| (case.kernel.clone(), functions(&case.kernel));
    let texts: Vec<(Kernel, Functions)> = all.iter().map(of).collect();
    assert!(texts.iter().all(|(_, of)| is_by_tiles(of)), "all have tiles");
    let aligned = |(_, of): &(Kernel, Functions)| match &of.functions[0].tile {
        Tile::Move(Move::Transpose(tile)) => tile.is_aligned,
        _ => [false; 2],
    };
    for wanted in [[true, true], [true, false], [false, true], [false, false]] {
        let found = texts.iter().any(|of| aligned(of) == wanted);
        assert!(found || std::env::var("SEED").is_ok(), "{wanted:?} is among the cases");
    }
    let library = Library::checked("transpose", texts, &|_, text| text).expect("it compiles");
    for (at, (copy, case)) in all.iter().enumerate() {
        let want = run(&Cpu::with_isa(1, Isa::detect()), &case.kernel, &case.inputs, &case.old);
        for seed in [0, 7] {
            let found = case.execute(&library, at, seed);
            assert_eq!(library.report(), None, "{copy:?}");
            assert!(same_bits(&found[0], &want[0]), "{copy:?}");
        }
    }
}

/// Rows that are contiguous in both buffers, or are shorter than a vector, have no tiles.
#[test]
fn copies_of_contiguous_or_short_rows_have_no_tiles() {
    let of = |loops: [[usize; 3]; 2]| {
        let loops = loops.map(|[size, source, target]| CopyLoop { size, source, target });
        let copy = Copy {
            loops: loops.to_vec(),
            source_offset: Offset::ZERO,
            target_offset: 0,
            zero_first: 0,
            dtype: DType::BF16,
        };
        is_by_tiles(&functions(&Kernel::Copy(copy)))
    };
    assert!(of([[64, 1, 32], [32, 64, 1]]));
    assert!(!of([[64, 64, 32], [32, 1, 1]]), "both sides are contiguous along one loop");
    assert!(!of([[64, 1, 7], [7, 64, 1]]), "a row of 7 has no vector of 8");
    assert!(!of([[64, 3, 32], [32, 192, 1]]), "the source is contiguous along no loop");
}

/// The bytes of a warp's accesses that each bank of four bytes serves: no more than it has turns
/// for, which are one for every 128 bytes.
fn turns(places: impl Iterator<Item = (usize, usize)>) -> usize {
    let mut banks = vec![std::collections::BTreeSet::new(); 32];
    for (start, bytes) in places {
        (start / 4..=(start + bytes - 1) / 4).for_each(|word| {
            banks[word % 32].insert(word);
        });
    }
    banks.iter().map(|words| words.len()).max().unwrap_or(0)
}

/// The swizzle of the text: where an element lies in shared memory, in bytes.
fn place(bytes: usize, row: usize, column: usize) -> usize {
    let (width, side) = (16 / bytes, 128 / bytes);
    (row * side + ((column / width) ^ (row / width)) * width + column % width) * bytes
}

/// Vectors are stored, eight lanes at a time, and elements of four columns are loaded, without two
/// lanes in one bank.
#[test]
fn tiles_have_no_bank_conflicts() {
    for bytes in [1, 2, 4, 8] {
        let (width, side) = (16 / bytes, 128 / bytes);
        let mut seen = vec![false; side * side];
        for row in 0..side {
            for column in 0..side {
                let was_seen =
                    std::mem::replace(&mut seen[place(bytes, row, column) / bytes], true);
                assert!(!was_seen, "places are different");
            }
            let stored = (0..8).map(|vector| (place(bytes, row, vector * width), 16));
            assert_eq!(turns(stored), 1, "{bytes} bytes, row {row}");
        }
        for first in (0..side).step_by(4) {
            for e in 0..width {
                let lanes = (0..32).map(|lane| (lane % 8 * width + e, first + lane / 8));
                let loaded = lanes.map(|(row, column)| (place(bytes, row, column), bytes));
                assert!(turns(loaded) <= bytes.div_ceil(4), "{bytes} bytes, column {first}");
            }
        }
    }
}

/// What can be wrong in the text: what is replaced, which time, and by what.
const MISTAKES: [(&str, usize, &str); 6] = [
    ("sync_block();", 0, ""),
    ("(vector ^ row / 8)", 0, "(vector ^ row % 8)"),
    ("(column / 8 ^ vector)", 0, "(column / 8 ^ vector / 2)"),
    ("x >= 100", 1, "x >= 96"),
    ("y + 8 <= 68", 0, "y + 8 <= 60"),
    ("% 2 * 64", 0, "% 1 * 64"),
];

#[test]
fn mistakes_in_the_text_of_transpositions_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let loops = vec![
        CopyLoop { size: 100, source: 1, target: 72 },
        CopyLoop { size: 68, source: 104, target: 1 },
    ];
    let (source_offset, target_offset) = (Offset::ZERO, 0);
    let copy = Copy { loops, source_offset, target_offset, zero_first: 0, dtype: DType::BF16 };
    let kernel = Kernel::Copy(copy);
    let case = Case::new(&mut Random::new(4), kernel.clone());
    let change = |at: usize, text: String| match at.checked_sub(1) {
        Some(at) => mistaken(&text, MISTAKES[at]),
        None => text,
    };
    let all = vec![(kernel.clone(), functions(&kernel)); 1 + MISTAKES.len()];
    let library = Library::checked("transpose_mistakes", all, &change).expect("it compiles");
    let want = run(&Cpu::with_isa(1, Isa::detect()), &kernel, &case.inputs, &case.old);
    let is_found = |at: usize, seed: u64| {
        let found = case.execute(&library, at, seed);
        library.report().is_some() || !same_bits(&found[0], &want[0])
    };
    assert!((0..8).all(|seed| !is_found(0, seed)), "without a mistake nothing is found");
    for (at, mistake) in MISTAKES.iter().enumerate() {
        assert!((0..8).any(|seed| is_found(at + 1, seed)), "{mistake:?} is not found");
    }
}
