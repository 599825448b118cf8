//! Products of few rows, and sums over k in slices (sm_80 and sm_90a), executed by the shim:
//! against exact sums, on random shapes and layouts; bits that do not depend on how m and n are
//! sharded; mistakes in the text; which tilings are chosen.

use gantline_kernels::cuda::{Arch, Functions, Tile, functions_for, tiling, waves_filled};
use gantline_kernels::{Family, Kernel, LoopABC, Product, ProductPart, Products, Tiling};
use ir::DType;

use crate::shim::{Library, compiler};
use crate::tensor::{is_near, mistaken};
use crate::{Buffer, Case, Random, same_bits};

const ARCHS: [Arch; 2] = [Arch::Sm80, Arch::Sm90a];

/// The rows of the block tile of a product.
fn block_rows(functions: &Functions) -> usize {
    let rows = functions.functions.iter().find_map(|function| match &function.tile {
        Tile::Tensor(tile) => Some(tile.shape.tile[0]),
        Tile::Warpgroup(tile) => Some(tile.shape.columns),
        _ => None,
    });
    rows.expect("a narrow product runs on tensor cores")
}

/// A product as an architecture tiles it that is not sharded.
pub(crate) fn tiled(p: Product, arch: Arch) -> Product {
    let [batch, m, n, k] = p.sizes();
    Product { tiling: tiling(arch, [batch, m, n], k), ..p }
}

/// Whether blocks sum slices of k: the last block of a tile adds those of a skinny product, and a
/// second function those of a wide one.
fn is_split(functions: &Functions) -> bool {
    let tiles: Vec<&Tile> = functions.functions.iter().map(|function| &function.tile).collect();
    let by_tickets = match tiles[..] {
        [.., Tile::SliceSum(_)] => false,
        [.., Tile::Tensor(tile)] => tile.tickets.is_some(),
        [.., Tile::Warpgroup(tile)] => tile.tickets.is_some(),
        _ => return false,
    };
    assert_eq!(by_tickets, functions.tickets > 0);
    by_tickets || matches!(tiles[..], [.., Tile::SliceSum(_)])
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
pub(crate) type Added = (Case, Product, [Option<usize>; 2]);

pub(crate) fn cases(count: u64) -> Vec<Added> {
    let case = |number: u64| {
        let mut random = Random::new(number + 1700);
        let is_wide = number % 4 == 1;
        let m = if is_wide { random.pick(&[17, 40, 130]) } else { random.pick(&[1, 2, 5, 9, 16]) };
        let n = random.pick(&[1, 8, 17, 32, 40, 64, 72, 130]);
        let k = random.pick(&[1, 40, 64, 200, 1024, 1025, 1100, 2048, 2100, 3080]);
        let mut p = tiled(matrix(&mut random, [m, n, k]), Arch::Sm90a);
        if is_wide {
            p.tiling.split = random.pick(&[2, 3, 5]);
            p.tiling = p.tiling.without_empty(k);
        }
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
            let rows = if p.tiling.family == Family::Skinny { 16 } else { 128 };
            assert_eq!(block_rows(&all[at].1), rows, "case {at}: {p:?}");
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

/// A product, and its parts that some ranks have where m or n are sharded, each with its first row
/// and column.
fn sharded(whole: &Product) -> Vec<(Product, [usize; 2])> {
    let [_, m, n, _] = whole.sizes();
    let mut parts = vec![(whole.clone(), [0, 0])];
    for ranks in [2, 4] {
        for rank in 0..ranks {
            let [rows, columns] = [m, n].map(|size| rank * size / ranks..(rank + 1) * size / ranks);
            let [mut by_m, mut by_n] = [whole.clone(), whole.clone()];
            (by_m.m[0].size, by_n.n[0].size) = (rows.len(), columns.len());
            parts.extend([(by_m, [rows.start, 0]), (by_n, [0, columns.start])]);
        }
    }
    parts
}

/// A buffer from an element on.
fn from(dtype: DType, buffer: &Buffer, start: usize) -> Buffer {
    Buffer::new(dtype, &buffer.numbers()[start..])
}

/// Ranks that share the rows or columns of a product, whose tiling is that of the whole, find the
/// bits of the whole.
#[test]
fn bits_do_not_depend_on_how_m_and_n_are_sharded() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    const K: usize = 1160;
    let product = |m: usize, split: usize, family: Family| {
        let mut whole = Product::matrix(m, 136, K, DType::BF16);
        (whole.stored.c, whole.accumulate) = (DType::F32, true);
        Product { tiling: Tiling { family, split }, ..whole }
    };
    let wholes = [
        product(140, 3, Family::Wide),
        product(40, 1, Family::Wide),
        product(16, 3, Family::Skinny),
    ];
    for arch in ARCHS {
        for (number, whole) in wholes.iter().enumerate() {
            let parts = sharded(whole);
            let kernel = |(part, _): &(Product, [usize; 2])| {
                let kernel = Kernel::Product(part.clone());
                (kernel.clone(), functions_for(&kernel, arch))
            };
            let all: Vec<(Kernel, Functions)> = parts.iter().map(kernel).collect();
            let split = all.iter().filter(|(_, of)| is_split(of)).count();
            assert_eq!(split, if whole.tiling.split > 1 { parts.len() } else { 0 });
            let library = Library::new(&format!("shards-{number}-{arch}"), all);
            let library = library.expect("it compiles");
            let case = Case::new(&mut Random::new(3), Kernel::Product(whole.clone()));
            let expected = case.execute(&library, 0, 0)[0].numbers();
            for (at, (part, [row, column])) in parts.iter().enumerate() {
                let (n, shift) = (136, row * 136 + column);
                let mut own = Case { kernel: Kernel::Product(part.clone()), ..case.clone() };
                own.inputs[0] = from(DType::BF16, &own.inputs[0], row * K);
                own.inputs[1] = from(DType::BF16, &own.inputs[1], *column);
                own.old[0] = from(DType::F32, &own.old[0], shift);
                let found = own.execute(&library, at, 1)[0].numbers();
                let [_, rows, columns, _] = part.sizes();
                for place in (0..rows).flat_map(|row| (0..columns).map(move |c| row * n + c)) {
                    let [found, expected] = [found[place], expected[shift + place]];
                    assert_eq!(found.to_bits(), expected.to_bits(), "{part:?} for {arch}");
                }
            }
        }
    }
}

/// The products of a layer whose block tiles are fewer than the multiprocessors: what fills them
/// before and after k is split. Sizes are m, n, and k.
#[test]
fn splits_fill_waves_of_few_block_tiles() {
    let products: [(&str, Arch, [usize; 3], usize, [u32; 2]); 12] = [
        ("gpt2 weight gradient 768", Arch::Sm90a, [768, 768, 8192], 3, [27, 82]),
        ("gpt2 weight gradient 768", Arch::Sm80, [768, 768, 8192], 3, [33, 100]),
        ("gpt2 weight gradient 768", Arch::Sm100, [768, 768, 8192], 4, [24, 97]),
        ("gpt2 weight gradient 2304", Arch::Sm90a, [768, 2304, 8192], 1, [82, 82]),
        ("gpt2 weight gradient 2304", Arch::Sm80, [768, 2304, 8192], 1, [100, 100]),
        ("gpt2 projection", Arch::Sm90a, [8192, 768, 768], 1, [97, 97]),
        ("gpt2 mlp of 1024 tokens", Arch::Sm90a, [1024, 768, 3072], 2, [36, 73]),
        ("8B k, v of 1024 tokens", Arch::Sm90a, [1024, 1024, 4096], 2, [48, 97]),
        ("8B weight gradient of k, v", Arch::Sm90a, [1024, 4096, 8192], 1, [97, 97]),
        ("8B down of 256 tokens", Arch::Sm90a, [256, 4096, 14336], 2, [48, 97]),
        ("70B down of 128 tokens", Arch::Sm90a, [128, 8192, 28672], 2, [48, 97]),
        ("70B k, v of 512 tokens", Arch::Sm80, [512, 1024, 8192], 3, [30, 89]),
    ];
    for (what, arch, [m, n, k], split, filled) in products {
        let found = tiling(arch, [1, m, n], k);
        let tiles = m.div_ceil(128) * n.div_ceil(128);
        let percent = |split: usize| (100.0 * waves_filled(arch, tiles * split)).round() as u32;
        let shown = (found.split, [percent(1), percent(found.split)]);
        println!("{what} on {arch}: {m}x{n}x{k} split {}, {:?} %", shown.0, shown.1);
        assert_eq!(shown, (split, filled), "{what} on {arch}");
        assert!(split == 1 || found.slice(k) >= 512, "{what}: slices are long");
        assert_eq!(found.family, Family::Wide);
    }
    assert_eq!(
        tiling(Arch::Sm80, [1, 16, 4096], 4096),
        Tiling { family: Family::Skinny, split: 4 }
    );
}

/// What can be wrong: the kernel, its function, what is replaced, which time, and by what.
type Mistake = (usize, usize, &'static str, usize, &'static str);

const MISTAKES_SM80: [Mistake; 24] = [
    (0, 0, "sync_block();", 0, ""),
    (0, 0, "cp_async_wait<5>();", 0, "cp_async_wait<6>();"),
    (0, 0, "cp_async_commit();", 0, ""),
    (0, 0, "step % 7", 0, "step % 6"),
    (0, 0, "first_k = slice * 768", 0, "first_k = slice * 760"),
    (0, 0, "left < 12 ? left : 12", 0, "left < 13 ? left : 13"),
    (0, 0, "if (slice > 0) continue;", 0, ""),
    (0, 0, "if (slice > 0) continue;", 0, "if (slice != 1) continue;"),
    (0, 0, "(slice * 1ULL + batch)", 0, "(batch)"),
    (0, 0, "of < 3", 0, "of < 2"),
    (0, 0, "of * 630ULL", 0, "of * 629ULL"),
    (0, 0, "for (u32 of = 0; of < 3; of += 1)", 0, "for (u32 of = 3; of-- > 0;)"),
    (0, 0, "sync_block();", 1, ""),
    (0, 0, "sync_block_or(is_last)", 0, "is_last"),
    (0, 0, "blockIdx.x % 3, 3)", 0, "blockIdx.x / 3, 3)"),
    (0, 0, "blockIdx.x % 3, 3)", 0, "blockIdx.x % 3, 2)"),
    (1, 0, "% 32 == 0) {", 0, "% 64 == 0) {"),
    (1, 0, "total[i][j][q] = total[i][j][q] + acc[i][j][q];", 0, ""),
    (1, 0, "acc[i][j][q] = total[i][j][q] + acc[i][j][q];", 0, ""),
    (2, 0, "first_k = slice * 768", 0, "first_k = slice * 760"),
    (2, 0, "left < 24 ? left : 24", 0, "left < 25 ? left : 25"),
    (2, 0, "if (slice > 0) continue;", 0, ""),
    (2, 0, "(slice * 1ULL + batch)", 0, "(batch)"),
    (2, 1, "for (u32 slice = 0; slice < 3; slice += 1)", 0, "for (u32 slice = 3; slice-- > 0;)"),
];

const MISTAKES_SM90A: [Mistake; 26] = [
    (0, 0, "sync_block();", 0, ""),
    (0, 0, "mbarrier_init(empty + stage, 4)", 0, "mbarrier_init(empty + stage, 5)"),
    (0, 0, "mbarrier_wait(empty + stage, (count / 8 + 1) % 2);", 0, ""),
    (0, 0, "full + stage, 10240", 0, "full + stage, 8192"),
    (0, 0, "mbarrier_wait(full + stage, count / 8 % 2);", 0, ""),
    (0, 0, "warpgroup_wait<1>(acc);", 0, ""),
    (0, 0, "warpgroup_wait<0>(acc);", 0, ""),
    (0, 0, "mbarrier_arrive(empty + (count - 1) % 8);", 0, "mbarrier_arrive(empty + count % 8);"),
    (0, 0, "first_k = slice * 768", 1, "first_k = slice * 760"),
    (0, 0, "if (slice == 0) ", 0, ""),
    (
        0,
        0,
        "((slice * 1ULL + batch) * 9 + n) * 70 + m",
        0,
        "((slice * 1ULL + batch) * 9 + n) * 9 + m",
    ),
    (0, 0, "of < 3", 0, "of < 2"),
    (0, 0, "sync_warpgroup(1);", 0, ""),
    (0, 0, "sync_warpgroup_or(1, is_last)", 0, "is_last"),
    (0, 0, "blockIdx.x % 2, 3)", 0, "blockIdx.x / 3, 3)"),
    (0, 0, "blockIdx.x % 2, 3)", 0, "blockIdx.x % 2, 2)"),
    (1, 0, "step % 16 == 0", 0, "step % 32 == 0"),
    (1, 0, "total[i] = total[i] + acc[i];", 0, ""),
    (1, 0, "warpgroup_wait<0>(acc);", 0, ""),
    (2, 0, "first_k = slice * 768", 0, "first_k = slice * 760"),
    (2, 0, "left < 12 ? left : 12", 1, "left < 13 ? left : 13"),
    (2, 0, "tile / 1 % 1", 1, "tile / 1"),
    (2, 0, "(u32)(tile / 1)", 0, "(u32)(tile / 2)"),
    (2, 0, "(slice * 1ULL + batch)", 0, "(batch)"),
    (2, 0, "if (slice == 0) ", 0, ""),
    (2, 1, "for (u32 slice = 0; slice < 3; slice += 1)", 0, "for (u32 slice = 3; slice-- > 0;)"),
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
    let split = Tiling { family: Family::Wide, split: 3 };
    let products = [
        Product { tiling: Tiling { family: Family::Skinny, ..split }, ..product(9, 70, 2120) },
        product(40, 24, 2120),
        Product { tiling: split, ..product(40, 24, 2120) },
    ];
    let kernels = products.clone().map(Kernel::Product);
    let of = |at: usize| (kernels[at].clone(), functions_for(&kernels[at], arch));
    let mut all = vec![of(0), of(1), of(2)];
    all.extend(mistakes.iter().map(|(kernel, ..)| of(*kernel)));
    let change = |at: usize, text: String| match at.checked_sub(3).map(|at| mistakes[at]) {
        Some((_, number, right, time, wrong)) if text.contains(&format!("_{number}(")) => {
            mistaken(&text, (right, time, wrong))
        }
        _ => text,
    };
    let name = format!("skinny_mistakes-{arch}");
    let library = Library::changed(&name, all, &change).expect("it compiles");
    let mut random = Random::new(5);
    let cases = kernels.each_ref().map(|kernel| Case::new(&mut random, kernel.clone()));
    let right = [0, 1, 2].map(|at: usize| cases[at].execute(&library, at, 0));
    let finding = |kernel: usize, at: usize, seed: u64| {
        let found = cases[kernel].execute(&library, at, seed);
        let is_near = || is_near(&products[kernel], &cases[kernel], &found[0], [None; 2]);
        let is_same = || same_bits(&found[0], &right[kernel][0]);
        library.report().or_else(is_near).or_else(|| (!is_same()).then(|| "other bits".to_owned()))
    };
    for kernel in [0, 1, 2] {
        assert_eq!((0..4).find_map(|seed| finding(kernel, kernel, seed)), None, "{arch}");
    }
    for (at, mistake) in mistakes.iter().enumerate() {
        let found = (0..8).find_map(|seed| finding(mistake.0, at + 3, seed));
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
