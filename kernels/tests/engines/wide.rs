//! Rows whose numbers do not fit the registers of 256 threads: larger blocks share them, and on
//! GPUs that have clusters several blocks; and sums of few rows.

use gantline_kernels::cpu::Cpu;
use gantline_kernels::cuda::{Arch, Functions, Tile, functions_for};
use gantline_kernels::{
    Access, BinaryOp, Instr, Kernel, Output, ReduceOp, RowInput, Rows, UnaryOp,
};
use ir::DType;

use crate::cuda::share_of_tolerance;
use crate::shim::{Library, compiler};
use crate::{Case, Random, run};

/// A softmax of rows, their largest numbers, and the sum of the logarithms of what they are divided
/// by; with the sums of its columns or without.
pub(crate) fn softmax(dtype: DType, [rows, cols]: [usize; 2], by_column: bool) -> Kernel {
    let reduce = |op, x| Instr::Reduce { op, x };
    let compute = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let store = |value, access| Output::Store { value, access, dtype: compute, accumulate: false };
    let sum = by_column.then_some(Output::ColSum { value: 5, accumulate: true });
    let outputs = vec![
        store(5, Access::full(rows, cols)),
        store(1, Access::per_row(rows)),
        Output::TotalSum { value: 6, accumulate: false },
    ];
    Kernel::Rows(Rows {
        rows,
        cols,
        dtype: compute,
        inputs: vec![RowInput { dtype, access: Access::full(rows, cols) }],
        instrs: vec![
            Instr::Load { input: 0 },
            reduce(ReduceOp::Max, 0),
            Instr::Binary { op: BinaryOp::Sub, a: 0, b: 1 },
            Instr::Unary { op: UnaryOp::Exp, x: 2 },
            reduce(ReduceOp::Sum, 3),
            Instr::Binary { op: BinaryOp::Div, a: 3, b: 4 },
            Instr::Unary { op: UnaryOp::Log, x: 4 },
        ],
        outputs: outputs.into_iter().chain(sum).collect(),
    })
}

/// A norm by the mean of squares, which the blocks of a cluster exchange once for each row.
pub(crate) fn norm(dtype: DType, [rows, cols]: [usize; 2]) -> Kernel {
    let value = 4;
    let access = Access::full(rows, cols);
    Kernel::Rows(Rows {
        rows,
        cols,
        dtype,
        inputs: vec![RowInput { dtype, access: Access::full(rows, cols) }],
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Unary { op: UnaryOp::Square, x: 0 },
            Instr::Reduce { op: ReduceOp::Sum, x: 1 },
            Instr::Unary { op: UnaryOp::Rsqrt, x: 2 },
            Instr::Binary { op: BinaryOp::Mul, a: 0, b: 3 },
        ],
        outputs: vec![
            Output::Store { value, access, dtype, accumulate: false },
            Output::TotalSum { value, accumulate: false },
        ],
    })
}

/// The functions of a kernel of six rows by clusters of two blocks, of which each takes three rows
/// one after the other, as clusters do that have hundreds of rows.
pub(crate) fn in_turn(kernel: &Kernel) -> Functions {
    let mut functions = functions_for(kernel, Arch::Sm90a);
    assert_eq!(share(&functions), [512, 2]);
    for function in &mut functions.functions {
        match &mut function.tile {
            Tile::RowReduction(tile) => {
                assert_eq!((tile.rows.rows, tile.chunk), (6, 1));
                (tile.chunk, tile.blocks, function.grid) = (3, 2, 4);
            }
            Tile::PartialSums(sums) if sums.chunks == 12 => sums.chunks = 4,
            Tile::PartialSums(sums) => sums.chunks = 2,
            other => panic!("{other}: it is no part of a reduction"),
        }
    }
    functions
}

/// The type of a row and its columns; and threads of a block and blocks of a cluster that share it,
/// on GPUs without clusters and with them.
const SHARED: [(DType, usize, [u32; 2], [u32; 2]); 10] = [
    (DType::F32, 12_288, [256, 1], [256, 1]),
    (DType::F32, 12_800, [512, 1], [512, 1]),
    (DType::BF16, 32_000, [512, 1], [512, 1]),
    (DType::F32, 24_580, [512, 1], [512, 2]),
    (DType::F64, 13_001, [512, 1], [512, 2]),
    (DType::BF16, 50_257, [256, 1], [512, 4]),
    (DType::BF16, 81_920, [512, 1], [512, 2]),
    (DType::F32, 98_300, [256, 1], [512, 4]),
    (DType::F32, 128_256, [256, 1], [512, 8]),
    (DType::F32, 200_000, [256, 1], [256, 1]),
];

/// Threads of a block and blocks of a cluster of the first function.
fn share(functions: &Functions) -> [u32; 2] {
    let Tile::RowReduction(tile) = &functions.functions[0].tile else {
        panic!("{}: it reduces rows", functions.functions[0]);
    };
    [tile.threads, tile.cluster]
}

/// Blocks and clusters are as large as a row needs them, and find what the CPU finds in any order.
#[test]
fn wide_rows_are_shared_by_as_many_threads_as_keep_them() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut cases = Vec::new();
    for (at, (dtype, cols, without, with)) in SHARED.into_iter().enumerate() {
        for (arch, wanted) in [(Arch::Sm80, without), (Arch::Sm90a, with), (Arch::Sm100, with)] {
            let kernel = softmax(dtype, [2 + at % 2, cols], false);
            let functions = functions_for(&kernel, arch);
            assert_eq!(share(&functions), wanted, "{dtype} {cols} for {arch}");
            if arch != Arch::Sm100 {
                cases.push((Case::new(&mut Random::new(at as u64), kernel), functions));
            }
        }
    }
    // With sums of columns in registers, and without.
    let double = DType::F64;
    let several = [softmax(double, [6, 12_304], true), norm(double, [6, 12_301])];
    for (at, kernel) in several.into_iter().enumerate() {
        let functions = in_turn(&kernel);
        cases.push((Case::new(&mut Random::new(at as u64), kernel), functions));
    }
    let of = |(case, functions): &(Case, Functions)| (case.kernel.clone(), functions.clone());
    let library = Library::new("wide", cases.iter().map(of).collect()).expect("it compiles");
    for (at, (case, functions)) in cases.iter().enumerate() {
        let want = run(&Cpu::new(1), &case.kernel, &case.inputs, &case.old);
        let found = [0, 5, 14].map(|seed| case.execute(&library, at, seed));
        let furthest = share_of_tolerance(&case.kernel, functions, &want, &found[0]);
        let what = &functions.functions[0];
        assert!(furthest.share <= 1.0, "{what}: element {}", furthest.element);
        assert!(found.iter().all(|other| *other == found[0]), "{what}: order matters");
    }
}

/// Sums of columns, or of all.
fn sums(rows: usize, cols: usize, output: Output) -> Kernel {
    let dtype = DType::F32;
    let inputs = vec![RowInput { dtype, access: Access::full(rows, cols) }];
    let instrs = vec![Instr::Load { input: 0 }];
    Kernel::Rows(Rows { rows, cols, dtype, inputs, instrs, outputs: vec![output] })
}

/// Few rows leave no warp without columns, a block that has all rows needs no second function, and
/// a sum of all of one long row is spread over the GPU.
#[test]
fn sums_of_few_rows_use_all_threads() {
    let functions = |kernel: &Kernel| functions_for(kernel, Arch::Sm80);
    let by = |kernel: &Kernel| match &functions(kernel).functions[0].tile {
        Tile::RowReduction(tile) => tile.group,
        other => panic!("{other}: it reduces rows"),
    };
    let all = sums(1, 1_000_000, Output::TotalSum { value: 0, accumulate: false });
    assert_eq!(by(&all), 256);
    assert!(functions(&all).functions[0].grid >= 108, "{}", functions(&all).functions[0]);
    let cases: Vec<Case> = [1, 3, 7, 8, 24, 64, 65, 300]
        .map(|rows| {
            let output = Output::ColSum { value: 0, accumulate: rows % 2 == 1 };
            let kernel = sums(rows, 300 + rows % 3, output);
            assert_eq!(by(&kernel), if rows < 8 { 256 } else { 32 }, "{rows} rows");
            assert_eq!(functions(&kernel).functions.len(), if rows <= 64 { 1 } else { 2 });
            Case::new(&mut Random::new(rows as u64), kernel)
        })
        .into();
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let of = |case: &Case| (case.kernel.clone(), functions(&case.kernel));
    let library = Library::new("few", cases.iter().map(of).collect()).expect("it compiles");
    for (at, case) in cases.iter().enumerate() {
        let want = run(&Cpu::new(1), &case.kernel, &case.inputs, &case.old);
        let found = case.execute(&library, at, 5);
        let furthest = share_of_tolerance(&case.kernel, library.functions(at), &want, &found);
        assert!(furthest.share <= 1.0, "{}: element {}", case.kernel, furthest.element);
    }
}
