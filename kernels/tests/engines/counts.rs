//! What kernels' text accesses, counted by the shim: sectors of global memory and turns of the
//! banks of shared memory, beside the least that the bytes take; and how many of an architecture's
//! multiprocessors the tiles of products fill.
//!
//! Of shared memory that is what threads access, and `ldmatrix` beside it; what TMA and `wgmma`
//! access there is not counted. The table of kernels on tensor cores takes minutes; all tables:
//! `GANTLINE_TEST_EVERY_KERNEL=1 cargo test --workspace --test engines counts -- --nocapture`.

use gantline_kernels::cuda::{Accesses, Arch, Function, functions_for, tiling, waves_filled};
use gantline_kernels::{
    Access, Attention, BinaryOp, Copy, CopyLoop, Instr, Kernel, LoopAB, LoopAC, LoopBC, Offset,
    Output, Product, ProductPart, Products, ReduceOp, RowInput, Rows, UnaryOp, price,
};
use ir::DType;

use crate::flash_warpgroup::windowed;
use crate::shim::{Counts, Library, compiler};
use crate::{Case, Random, runs_all, wide};

/// Rows and columns of what moves memory.
const ROWS: usize = 24;
const COLS: usize = 4096;
/// Rows whose columns are summed: those of 4,096 rows take the shim a minute.
const SUMMED: usize = 256;

fn load(input: usize) -> Instr {
    Instr::Load { input }
}

fn binary(op: BinaryOp, a: usize, b: usize) -> Instr {
    Instr::Binary { op, a, b }
}

/// A program of rows of a type, and of numbers of F32 for each column.
fn program(dtype: DType, columns: usize, instrs: Vec<Instr>, outputs: Vec<Output>) -> Kernel {
    let mut inputs = vec![RowInput { dtype, access: Access::full(ROWS, COLS) }];
    let per_column = RowInput { dtype: DType::F32, access: Access::per_column() };
    inputs.extend(vec![per_column; columns]);
    Kernel::Rows(Rows { rows: ROWS, cols: COLS, dtype: DType::F32, inputs, instrs, outputs })
}

/// Sums of the columns of BF16.
fn column_sums(rows: usize) -> Kernel {
    let inputs = vec![RowInput { dtype: DType::BF16, access: Access::full(rows, COLS) }];
    let outputs = vec![Output::ColSum { value: 0, accumulate: false }];
    let (dtype, instrs) = (DType::F32, vec![load(0)]);
    Kernel::Rows(Rows { rows, cols: COLS, dtype, inputs, instrs, outputs })
}

fn stored(value: usize, dtype: DType) -> Vec<Output> {
    let access = Access::full(ROWS, COLS);
    vec![Output::Store { value, access, dtype, accumulate: false }]
}

fn softmax() -> Kernel {
    let reduce = |op, x| Instr::Reduce { op, x };
    let instrs = vec![
        load(0),
        reduce(ReduceOp::Max, 0),
        binary(BinaryOp::Sub, 0, 1),
        Instr::Unary { op: UnaryOp::Exp, x: 2 },
        reduce(ReduceOp::Sum, 3),
        binary(BinaryOp::Div, 3, 4),
    ];
    program(DType::F32, 0, instrs, stored(5, DType::F32))
}

/// A norm of rows by the mean of squares, with a weight per column.
fn norm() -> Kernel {
    let instrs = vec![
        load(0),
        Instr::Unary { op: UnaryOp::Square, x: 0 },
        Instr::Reduce { op: ReduceOp::Sum, x: 1 },
        Instr::Unary { op: UnaryOp::Rsqrt, x: 2 },
        binary(BinaryOp::Mul, 0, 3),
        load(1),
        binary(BinaryOp::Mul, 4, 5),
    ];
    program(DType::BF16, 1, instrs, stored(6, DType::BF16))
}

fn copy(dtype: DType, loops: [[usize; 3]; 2]) -> Kernel {
    let loops = loops.map(|[size, source, target]| CopyLoop { size, source, target }).to_vec();
    let (source_offset, target_offset) = (Offset::ZERO, 0);
    Kernel::Copy(Copy { loops, source_offset, target_offset, zero_first: 0, dtype })
}

/// The output of a linear layer, or the gradient of its input or of its weight; weights are
/// `[inputs, outputs]`.
fn product(form: &str, [m, n, k]: [usize; 3], arch: Arch) -> Product {
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
    p
}

/// A kernel whose accesses are counted, by its name.
type Counted = (&'static str, Arch, Kernel);

/// Kernels that move memory.
fn streams() -> Vec<Counted> {
    let arch = Arch::Sm80;
    let half = DType::BF16;
    let gelu = vec![load(0), Instr::Unary { op: UnaryOp::GeluTanh, x: 0 }];
    let turned = |[rows, columns]: [usize; 2]| [[columns, 1, rows], [rows, columns, 1]];
    vec![
        ("copy of rows, BF16", arch, copy(half, [[64, 512, 640], [512, 1, 1]])),
        ("transposition, BF16", arch, copy(half, turned([256, 192]))),
        ("transposition, F32", arch, copy(DType::F32, turned([256, 192]))),
        ("transposition of bytes", arch, copy(DType::Bool, turned([256, 256]))),
        ("GELU, BF16", arch, program(half, 0, gelu, stored(1, half))),
        ("softmax, F32", arch, softmax()),
        ("RMS norm, BF16", arch, norm()),
        ("sums of columns of few rows, BF16", arch, column_sums(ROWS)),
        ("softmax by a cluster, F64", Arch::Sm90a, wide::softmax(DType::F64, [2, 16_384], false)),
    ]
}

/// Products by `mma.sync`, whose results are stored in each of their ways.
fn products() -> Vec<Counted> {
    let arch = Arch::Sm80;
    let by = |form| product(form, [128, 128, 32], arch);
    let added =
        ProductPart { bias: Some(2), addend: Some(3), ..ProductPart::of(0, 1, by("forward")) };
    let mut old = by("wgrad");
    old.stored.c = DType::F32;
    old.accumulate = true;
    let skinny = product("forward", [8, 64, 1024], arch);
    let one = Kernel::Product;
    let added = Kernel::Products(Products { parts: vec![added] });
    vec![
        ("product by mma.sync, forward, with a bias and an addend", arch, added),
        ("the same, dgrad, alone", arch, one(by("dgrad"))),
        ("the same, wgrad, added to F32", arch, one(old)),
        ("skinny product by mma.sync", arch, one(skinny)),
    ]
}

/// Kernels of other families.
fn others() -> Vec<Counted> {
    let (older, newer) = (Arch::Sm80, Arch::Sm90a);
    let a = windowed(&mut Random::new(11), [128, 256, 1, 64]);
    let a = Attention { window: 0, ..a };
    vec![
        ("sums of columns, BF16", older, column_sums(SUMMED)),
        ("attention by mma.sync", older, Kernel::Attention(a.clone())),
        ("its gradient by mma.sync", older, Kernel::AttentionBwd(a.clone())),
        (
            "product by wgmma, forward",
            newer,
            Kernel::Product(product("forward", [128, 128, 128], newer)),
        ),
        ("attention by wgmma", newer, Kernel::Attention(a.clone())),
        ("its gradient by wgmma", newer, Kernel::AttentionBwd(a)),
    ]
}

/// How many times the least something is.
fn times([found, least]: [u64; 2]) -> f64 {
    if least == 0 { 1.0 } else { found as f64 / least as f64 }
}

/// What follows from the tile programs of some functions, if it does of all.
pub(crate) fn derived(functions: &[Function]) -> Option<Accesses> {
    let sum = |all: Accesses, of: Accesses| all.plus(1, of);
    let each: Option<Vec<Accesses>> = functions.iter().map(Function::accesses).collect();
    Some(each?.into_iter().fold(Accesses::default(), sum))
}

/// Counts what kernels access, with the bytes of all requests over the compulsory ones.
fn counted(name: &str, all: &[Counted]) -> Vec<(f64, Counts)> {
    let texts = all.iter().map(|(_, arch, kernel)| (kernel.clone(), functions_for(kernel, *arch)));
    let library = Library::counted(name, texts.collect()).expect("there is a compiler");
    let of = |(at, (what, _, kernel)): (usize, &Counted)| {
        let case = Case::new(&mut Random::new(at as u64), kernel.clone());
        case.execute(&library, at, 0);
        assert_eq!(library.report(), None, "{what}");
        let counts = library.counts();
        if let Some(derived) = derived(&library.functions(at).functions) {
            let is_tensor = counts.matrix_turns[1] > 0;
            let turns = if is_tensor { counts.matrix_turns } else { counts.turns };
            assert_eq!(derived, Accesses { sectors: counts.sectors, turns }, "{what}");
        }
        ((32 * counts.sectors[1]) as f64 / price::bytes(kernel).0 as f64, counts)
    };
    all.iter().enumerate().map(of).collect()
}

#[test]
fn streams_take_the_sectors_and_turns_of_their_bytes() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let all = streams();
    println!("| kernel | bytes of requests over compulsory | sectors | turns of banks |");
    println!("|---|--:|--:|--:|");
    for ((what, ..), (asked, counts)) in all.iter().zip(counted("counts", &all)) {
        let [sectors, turns] = [counts.sectors, counts.turns].map(times);
        println!("| {what} | {asked:.2} | {sectors:.2} | {turns:.2} |");
        assert!(sectors <= 1.05 && turns <= 1.0, "{what}: {counts:?}");
    }
}

/// Counts, and prints their table: sectors, and turns of banks and of `ldmatrix`, are the least.
fn assert_are_least(name: &str, all: &[Counted]) {
    println!(
        "| kernel | bytes of requests over compulsory | sectors | turns of banks | ldmatrix |"
    );
    println!("|---|--:|--:|--:|--:|");
    for ((what, ..), (asked, counts)) in all.iter().zip(counted(name, all)) {
        let of = [counts.sectors, counts.turns, counts.matrix_turns];
        let [sectors, turns, of_matrices] = of.map(times);
        println!("| {what} | {asked:.2} | {sectors:.2} | {turns:.2} | {of_matrices:.2} |");
        let is_least = turns <= 1.0 && of_matrices <= 1.0;
        assert!(sectors <= 1.05 && is_least, "{what}: {counts:?}");
    }
}

#[test]
fn products_take_the_sectors_of_their_bytes_and_load_without_bank_conflicts() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    assert_are_least("counts-products", &products());
}

#[test]
fn other_matrices_are_loaded_without_bank_conflicts() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    if !runs_all() {
        return;
    }
    assert_are_least("counts-others", &others());
}

/// Products of linear layers: of the model, tokens, the layer's inputs and its outputs.
const LAYERS: [(&str, usize, usize, usize); 12] = [
    ("GPT-2 qkv", 8192, 768, 2304),
    ("GPT-2 out", 8192, 768, 768),
    ("GPT-2 fc", 8192, 768, 3072),
    ("GPT-2 proj", 8192, 3072, 768),
    ("8B qkv", 8192, 4096, 6144),
    ("8B out", 8192, 4096, 4096),
    ("8B gate and up", 8192, 4096, 28672),
    ("8B down", 8192, 14336, 4096),
    ("70B qkv", 4096, 8192, 10240),
    ("70B out", 4096, 8192, 8192),
    ("70B gate and up", 4096, 8192, 57344),
    ("70B down", 4096, 28672, 8192),
];

/// Tiles of products fill most of the multiprocessors of an A100 and of an H100 for as long as they
/// run. The others are printed.
#[test]
fn tiles_of_layers_fill_the_multiprocessors() {
    println!(
        "| product | m, n, k | architecture | tiles | slices | filled |\n|---|---|---|--:|--:|--:|"
    );
    let (mut count, mut few) = (0, 0);
    for arch in [Arch::Sm80, Arch::Sm90a] {
        for (name, tokens, inputs, outputs) in LAYERS {
            for (form, sizes) in [
                ("forward", [tokens, outputs, inputs]),
                ("dgrad", [tokens, inputs, outputs]),
                ("wgrad", [inputs, outputs, tokens]),
            ] {
                let p = product(form, sizes, arch);
                let split = p.tiling.split;
                let of = functions_for(&Kernel::Product(p), arch);
                let blocks = of.functions[0].grid as usize;
                let filled = waves_filled(arch, blocks);
                count += 1;
                if filled >= 0.85 {
                    continue;
                }
                few += 1;
                let [m, n, k] = sizes;
                let tiles = blocks / split;
                println!(
                    "| {name} {form} | {m}, {n}, {k} | {arch} | {tiles} | {split} | {filled:.2} |"
                );
            }
        }
    }
    println!("{few} of {count} fill less than 0.85");
    assert!(few * 3 < count, "{few} of {count} fill less than 0.85");
}
