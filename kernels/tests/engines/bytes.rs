//! Products of F8E4M3 and F8E5M2 by `wgmma` (sm_90a), executed by the shim: against exact sums, and
//! to the bit against `mma.sync`, whose runs of 128 points of k are the same; mistakes in the text.

use gantline_kernels::cpu::{Cpu, Isa};
use gantline_kernels::cuda::{Arch, Functions, StagedOperand, Tile, functions_for};
use gantline_kernels::{Kernel, Product, ProductPart, Products, Scales, StoredTypes};
use ir::DType;

use crate::elements::{Rounded, matrix, scaled};
use crate::shim::{Library, compiler};
use crate::skinny::tiled;
use crate::tensor::mistaken;
use crate::{Buffer, Case, Random, run, same_bits};

fn on(arch: Arch, p: &Product) -> (Kernel, Functions) {
    let kernel = Kernel::Product(p.clone());
    (kernel.clone(), functions_for(&kernel, arch))
}

/// How both operands of a product by `wgmma` are copied, if that multiplies it.
fn are_mapped(p: &Product) -> Option<bool> {
    let (_, of) = on(Arch::Sm90a, p);
    let tile = of.functions.iter().find_map(|function| match &function.tile {
        Tile::Warpgroup(tile) => Some(tile),
        _ => None,
    })?;
    Some(tile.operands.iter().all(|operand| matches!(operand, StagedOperand::Mapped(_))))
}

/// Products of matrices that are contiguous along k, of which every other has rows that TMA copies,
/// and every third has scales.
fn cases(count: u64) -> Vec<Rounded> {
    let bytes = [DType::F8E4M3, DType::F8E5M2];
    let case = |number: u64| {
        let mut random = Random::new(number + 4400);
        let c = random.pick(&[DType::F32, DType::BF16]);
        let types = [bytes[number as usize % 2], bytes[number as usize / 2 % 2], c];
        let [m, n] = [0; 2].map(|_| random.pick(&[1, 9, 16, 17, 64, 129, 136]));
        let k: usize = random.pick(&[2, 30, 128, 130, 260, 400, 1026, 2064]);
        let is_aligned = (number / 4).is_multiple_of(2);
        let k = if is_aligned { k.next_multiple_of(16) } else { k };
        let has_scales = number % 3 == 1;
        let k = if has_scales { k.next_multiple_of(Scales::RUN) } else { k };
        let mut p = matrix(&mut random, types, [m, n, k]);
        if is_aligned {
            (p.m[0].a, p.n[0].b) = (k, k + 16);
            p.batch.iter_mut().for_each(|l| l.a = m * k);
        }
        let p = tiled(p, Arch::Sm80);
        let p = if has_scales { scaled(&mut random, p) } else { p };
        Rounded::new(&mut random, p)
    };
    (0..count).map(case).collect()
}

#[test]
fn products_of_bytes_by_warpgroups_have_the_bits_of_those_by_warps() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let cases = cases(16);
    let each = |arch: Arch| cases.iter().map(move |case| on(arch, &case.product));
    let mapped = cases.iter().map(|case| are_mapped(&case.product).expect("wgmma multiplies it"));
    let mapped: Vec<bool> = mapped.collect();
    assert!(mapped.iter().filter(|of| **of).count() >= 8 && mapped.contains(&false), "{mapped:?}");
    let all = each(Arch::Sm90a).chain(each(Arch::Sm89)).collect();
    let library = Library::new("bytes", all).expect("there is a compiler");
    for (at, case) in cases.iter().enumerate() {
        let found = case.case.execute(&library, at, 0);
        assert_eq!(library.report(), None, "case {at}: {:?}", case.product);
        assert_eq!(case.finding(&found[0]), None, "case {at}");
        let by_warps = case.case.execute(&library, cases.len() + at, 0);
        assert!(same_bits(&found[0], &by_warps[0]), "case {at}: {:?}", case.product);
        let again = case.case.execute(&library, at, 5 + at as u64);
        assert_eq!(library.report(), None, "case {at}: {:?}", case.product);
        assert!(same_bits(&again[0], &found[0]), "case {at}: the order of threads changes bits");
    }
}

/// Bytes that are not contiguous along k run elsewhere, as do those of older architectures.
#[test]
fn warpgroups_multiply_bytes_that_are_contiguous_along_k() {
    let mut p = Product::matrix(64, 64, 128, DType::F32);
    let dtype = DType::F8E4M3;
    p.stored = StoredTypes { a: dtype, b: dtype, c: DType::F32 };
    assert_eq!(are_mapped(&p), None, "the second operand is contiguous along n");
    (p.n[0].b, p.k[0].b) = (128, 1);
    assert_eq!(are_mapped(&p), Some(true));
    let (_, older) = on(Arch::Sm89, &p);
    assert!(matches!(older.functions[0].tile, Tile::Tensor(_)));
}

/// CPUs read the numbers that codes and scales are. Of several products in one launch, one has the
/// bits that it has alone, whatever operands the others read.
#[test]
fn products_with_scales_read_what_codes_are_worth() {
    let cpu = Cpu::with_isa(1, Isa::Avx2);
    for seed in 0..12 {
        let mut random = Random::new(seed + 7100);
        let types = [DType::F8E4M3, DType::F8E5M2, random.pick(&[DType::F32, DType::BF16])];
        let [m, n] = [0; 2].map(|_| random.pick(&[1, 9, 64, 130]));
        let k = random.pick(&[128, 384]);
        let p = matrix(&mut random, types, [m, n, k]);
        let p = scaled(&mut random, p);
        let case = Rounded::new(&mut random, p);
        let Case { kernel, inputs, old, .. } = &case.case;
        let found = run(&cpu, kernel, inputs, old);
        assert_eq!(case.finding(&found[0]), None, "seed {seed}");
        let part =
            ProductPart { scales: Some([1, 4]), ..ProductPart::of(2, 3, case.product.clone()) };
        let other = Product::matrix(m, n, 40, DType::F32);
        let parts = vec![ProductPart::of(0, 5, other), part];
        let several = Kernel::Products(Products { parts });
        let arguments = several.inputs();
        let mut all: Vec<Buffer> =
            arguments.iter().map(|of| Buffer::new(of.dtype, &random.numbers(of.len))).collect();
        for (to, from) in [(2, 0), (3, 1), (1, 2), (4, 3)] {
            all[to] = inputs[from].clone();
        }
        let results = [Buffer::new(DType::F32, &random.numbers(m * n)), old[0].clone()];
        let both = run(&cpu, &several, &all, &results);
        assert!(same_bits(&both[1], &found[0]), "seed {seed}");
    }
}

/// What can be wrong: what is replaced, which time, and by what.
const MISTAKES: [(&str, usize, &str); 9] = [
    ("<f8e4m3, f8e5m2>", 0, "<f8e5m2, f8e4m3>"),
    ("total[i] = total[i] + acc[i];", 0, ""),
    ("acc[i] = 0;", 0, ""),
    ("acc[i] = total[i] + acc[i];", 0, "acc[i] = acc[i];"),
    ("warpgroup_wait<0>(acc);", 0, ""),
    ("step * 128", 0, "step * 64"),
    ("k < 4", 0, "k < 3"),
    ("b + k * 2", 0, "b + k * 4"),
    ("if (step > 0) {", 0, "if (step > 1) {"),
];

#[test]
fn mistakes_in_products_of_bytes_by_warpgroups_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut random = Random::new(7);
    let types = [DType::F8E4M3, DType::F8E5M2, DType::F32];
    let mut product = matrix(&mut random, types, [70, 136, 528]);
    product.batch.clear();
    (product.m[0].a, product.n[0].b, product.accumulate) = (528, 528, true);
    let case = Rounded::new(&mut random, product);
    let of = || on(Arch::Sm90a, &case.product);
    let all = (0..=MISTAKES.len()).map(|_| of()).collect();
    let change = |at: usize, text: String| match at.checked_sub(1) {
        Some(at) => mistaken(&text, MISTAKES[at]),
        None => text,
    };
    let library = Library::changed("bytes_mistakes", all, &change).expect("it compiles");
    let right = case.case.execute(&library, 0, 0);
    assert_eq!(library.report(), None);
    let is_found = |at: usize, seed: u64| {
        let found = case.case.execute(&library, at, seed);
        library.report().is_some() || !same_bits(&found[0], &right[0])
    };
    assert!((0..4).all(|seed| !is_found(0, seed)), "nothing is found in the text");
    for (at, mistake) in MISTAKES.iter().enumerate() {
        assert!((0..8).any(|seed| is_found(at + 1, seed)), "{mistake:?} is not found");
    }
}
