//! Products of few rows, and sums over k in slices (sm_80 and sm_90a), executed by the shim:
//! against exact sums, on random shapes and layouts; bits that depend on neither m nor n; mistakes
//! in the
//! text.

use gantline_kernels::cuda::{Arch, Functions, Tile, functions_for};
use gantline_kernels::{Kernel, LoopABC, Product, ProductPart, Products};
use ir::DType;

use crate::shim::{Library, compiler};
use crate::tensor::{is_near, mistaken};
use crate::{Case, Random, same_bits};

const ARCHS: [Arch; 2] = [Arch::Sm80, Arch::Sm90a];

/// The rows of the block tile of a product: those of its first function.
fn block_rows(functions: &Functions) -> usize {
    match &functions.functions[0].tile {
        Tile::Tensor(tile) => tile.shape.tile[0],
        Tile::Warpgroup(tile) => tile.shape.columns,
        tile => panic!("a narrow product runs on tensor cores: {tile}"),
    }
}

/// Whether blocks sum slices of k, and a second function adds them.
fn is_split(functions: &Functions) -> bool {
    let tiles: Vec<&Tile> = functions.functions.iter().map(|function| &function.tile).collect();
    matches!(tiles[..], [_, Tile::SliceSum(_)])
}

/// A product of rows of activations by a weight that is stored by columns or by rows.
fn matrix(random: &mut Random, [m, n, k]: [usize; 3]) -> Product {
    let dtype = random.pick(&[DType::BF16, DType::F16]);
    let mut p = Product::matrix(m, n, k, dtype);
    // Of some, rows have no whole vectors, and TMA cannot copy them.
    let more = random.pick(&[0, 0, 0, 3]);
    let row = |size: usize| size.next_multiple_of(8) + more;
    p.stored.c = random.pick(&[DType::F32, dtype]);
    p.accumulate = p.stored.c == DType::F32 && random.below(2) == 0;
    p.m[0].a = row(k);
    (p.n[0].b, p.k[0].b) = if random.below(2) == 0 { (row(k), 1) } else { (1, row(n)) };
    if random.below(4) == 0 {
        let (a, b) = (row(k) * m.next_multiple_of(8), row(n) * row(k));
        p.batch.push(LoopABC { size: 2, a, b, c: m * n });
    }
    p
}

/// A launch, its product, and which inputs are added to the result.
type Added = (Case, Product, [Option<usize>; 2]);

fn cases(count: u64) -> Vec<Added> {
    let case = |number: u64| {
        let mut random = Random::new(number + 1700);
        let m = random.pick(&[1, 2, 5, 8, 9, 15, 16]);
        let n = random.pick(&[1, 8, 17, 32, 40, 64, 72, 130]);
        let k = random.pick(&[1, 40, 64, 200, 1024, 1025, 1100, 2048, 2100, 3080]);
        let mut p = matrix(&mut random, [m, n, k]);
        if !number.is_multiple_of(3) {
            return (Case::new(&mut random, Kernel::Product(p.clone())), p, [None; 2]);
        }
        p.accumulate = false;
        p.batch.clear();
        let part =
            ProductPart { bias: Some(2), addend: Some(3), ..ProductPart::of(0, 1, p.clone()) };
        let kernel = Kernel::Products(Products { parts: vec![part] });
        (Case::new(&mut random, kernel), p, [Some(2), Some(3)])
    };
    (0..count).map(case).collect()
}

#[test]
fn products_of_few_rows_are_as_near_to_exact_sums_as_the_bound() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let cases = cases(24);
    for arch in ARCHS {
        let of = |(case, ..): &Added| (case.kernel.clone(), functions_for(&case.kernel, arch));
        let all: Vec<(Kernel, Functions)> = cases.iter().map(of).collect();
        let split = all.iter().filter(|(_, of)| is_split(of)).count();
        assert!(std::env::var("SEED").is_ok() || (6..20).contains(&split), "{split} are split");
        let library = Library::new(&format!("skinny-{arch}"), all.clone()).expect("it compiles");
        for (at, (case, p, added)) in cases.iter().enumerate() {
            assert_eq!(block_rows(&all[at].1), 16, "case {at}: {p:?}");
            let found = case.execute(&library, at, 0);
            assert_eq!(library.report(), None, "case {at} for {arch}: {p:?}");
            assert_eq!(is_near(p, case, &found[0], *added), None, "case {at} for {arch}");
            for seed in [5, 91] {
                let again = case.execute(&library, at, seed);
                assert!(same_bits(&again[0], &found[0]), "case {at}: the order changes bits");
            }
        }
    }
}

/// Rows and columns of a product have the same bits in all block tiles, and however k is summed.
#[test]
fn bits_do_not_depend_on_the_block_tile() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let [m, n, k] = [40, 136, 2104];
    let mut whole = Product::matrix(m, n, k, DType::BF16);
    (whole.stored.c, whole.accumulate) = (DType::F32, true);
    let part = |rows: usize, columns: usize| {
        let mut part = whole.clone();
        (part.m[0].size, part.n[0].size) = (rows, columns);
        Kernel::Product(part)
    };
    let sizes = [(m, n), (m, 24), (16, n), (5, 40), (1, 8)];
    let kernels = sizes.map(|(rows, columns)| part(rows, columns));
    for arch in ARCHS {
        let all: Vec<(Kernel, Functions)> =
            kernels.iter().map(|kernel| (kernel.clone(), functions_for(kernel, arch))).collect();
        let rows = all.iter().map(|(_, of)| block_rows(of)).collect::<Vec<usize>>();
        assert_eq!(rows, [128, 128, 16, 16, 16]);
        assert_eq!(all.iter().filter(|(_, of)| is_split(of)).count(), 3);
        let library = Library::new(&format!("tiles-{arch}"), all).expect("it compiles");
        let whole = Case::new(&mut Random::new(3), kernels[0].clone());
        let expected = whole.execute(&library, 0, 0)[0].numbers();
        for (at, (rows, columns)) in sizes.into_iter().enumerate() {
            let part = Case { kernel: kernels[at].clone(), ..whole.clone() };
            let found = part.execute(&library, at, 1)[0].numbers();
            for place in (0..rows).flat_map(|row| (0..columns).map(move |col| row * n + col)) {
                let [found, expected] = [found[place], expected[place]];
                assert_eq!(found.to_bits(), expected.to_bits(), "{rows} x {columns} for {arch}");
            }
        }
    }
}

/// What can be wrong: the kernel, its function, what is replaced, which time, and by what.
type Mistake = (usize, usize, &'static str, usize, &'static str);

const MISTAKES_SM80: [Mistake; 15] = [
    (0, 0, "sync_block();", 0, ""),
    (0, 0, "cp_async_wait<5>();", 0, "cp_async_wait<6>();"),
    (0, 0, "cp_async_commit();", 0, ""),
    (0, 0, "step % 7", 0, "step % 6"),
    (0, 0, "first_k = slice * 1024", 0, "first_k = slice * 1016"),
    (0, 0, "left < 16 ? left : 16", 0, "left < 17 ? left : 17"),
    (0, 0, "if (slice == 0) ", 0, ""),
    (0, 0, "if (slice == 0) ", 0, "if (slice == 1) "),
    (0, 0, "(slice * 1ULL + batch)", 0, "(batch)"),
    (0, 1, "slice < 3", 0, "slice < 2"),
    (0, 1, "slice * 630ULL + i", 0, "slice * 629ULL + i"),
    (0, 1, "m = i / 70", 0, "m = i / 71"),
    (1, 0, "% 32 == 0) {", 0, "% 64 == 0) {"),
    (1, 0, "total[i][j][q] = total[i][j][q] + acc[i][j][q];", 0, ""),
    (1, 0, "acc[i][j][q] = total[i][j][q] + acc[i][j][q];", 0, ""),
];

const MISTAKES_SM90A: [Mistake; 15] = [
    (0, 0, "sync_block();", 0, ""),
    (0, 0, "mbarrier_init(empty + stage, 4)", 0, "mbarrier_init(empty + stage, 5)"),
    (0, 0, "mbarrier_wait(empty + stage, (count / 8 + 1) % 2);", 0, ""),
    (0, 0, "full + stage, 10240", 0, "full + stage, 8192"),
    (0, 0, "mbarrier_wait(full + stage, count / 8 % 2);", 0, ""),
    (0, 0, "warpgroup_wait<1>(acc);", 0, ""),
    (0, 0, "warpgroup_wait<0>(acc);", 0, ""),
    (0, 0, "mbarrier_arrive(empty + (count - 1) % 8);", 0, "mbarrier_arrive(empty + count % 8);"),
    (0, 0, "first_k = slice * 1024", 0, "first_k = slice * 1016"),
    (0, 0, "if (slice == 0) ", 0, ""),
    (
        0,
        0,
        "((slice * 1ULL + batch) * 9 + n) * 70 + m",
        0,
        "((slice * 1ULL + batch) * 9 + n) * 9 + m",
    ),
    (0, 1, "slice < 3", 0, "slice < 2"),
    (1, 0, "step % 16 == 0", 0, "step % 32 == 0"),
    (1, 0, "total[i] = total[i] + acc[i];", 0, ""),
    (1, 0, "warpgroup_wait<0>(acc);", 0, ""),
];

/// A mistake is found by results beyond the bound, by other bits than those of the right text, or
/// by what the shim reports.
fn check_mistakes(arch: Arch, mistakes: &[Mistake]) {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let product = |m: usize, n: usize, k: usize| {
        let mut p = Product::matrix(m, n, k, DType::BF16);
        (p.m[0].a, p.n[0].b, p.k[0].b) = (k + 8, k + 8, 1);
        (p.stored.c, p.accumulate) = (DType::F32, true);
        p
    };
    let products = [product(9, 70, 2120), product(40, 24, 2120)];
    let kernels = products.clone().map(Kernel::Product);
    let of = |at: usize| (kernels[at].clone(), functions_for(&kernels[at], arch));
    let mut all = vec![of(0), of(1)];
    all.extend(mistakes.iter().map(|(kernel, ..)| of(*kernel)));
    let change = |at: usize, text: String| match at.checked_sub(2).map(|at| mistakes[at]) {
        Some((_, number, right, time, wrong)) if text.contains(&format!("_{number}(")) => {
            mistaken(&text, (right, time, wrong))
        }
        _ => text,
    };
    let name = format!("skinny_mistakes-{arch}");
    let library = Library::changed(&name, all, &change).expect("it compiles");
    let mut random = Random::new(5);
    let cases = kernels.each_ref().map(|kernel| Case::new(&mut random, kernel.clone()));
    let right = [0, 1].map(|at: usize| cases[at].execute(&library, at, 0));
    let finding = |kernel: usize, at: usize, seed: u64| {
        let found = cases[kernel].execute(&library, at, seed);
        let is_near = || is_near(&products[kernel], &cases[kernel], &found[0], [None; 2]);
        let is_same = || same_bits(&found[0], &right[kernel][0]);
        library.report().or_else(is_near).or_else(|| (!is_same()).then(|| "other bits".to_owned()))
    };
    for kernel in [0, 1] {
        assert_eq!((0..4).find_map(|seed| finding(kernel, kernel, seed)), None, "{arch}");
    }
    for (at, mistake) in mistakes.iter().enumerate() {
        let found = (0..8).find_map(|seed| finding(mistake.0, at + 2, seed));
        assert!(found.is_some(), "{mistake:?} is not found for {arch}");
    }
}

#[test]
fn mistakes_in_products_of_few_rows_are_found() {
    check_mistakes(Arch::Sm80, &MISTAKES_SM80);
    check_mistakes(Arch::Sm90a, &MISTAKES_SM90A);
}

/// No thread reads what another one copies, or what nobody wrote.
#[test]
fn products_of_few_rows_have_no_races() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let cases = cases(6);
    let of = |(case, ..): &Added| (case.kernel.clone(), functions_for(&case.kernel, Arch::Sm80));
    let all = cases.iter().map(of).collect();
    let library = Library::checked("skinny_races", all, &|_, text| text).expect("it compiles");
    for (at, (case, ..)) in cases.iter().enumerate() {
        for seed in [0, 3] {
            case.execute(&library, at, seed);
            assert_eq!(library.report(), None, "{:?}", case.kernel);
        }
    }
}
