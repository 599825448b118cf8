//! Products of F32 rounded to TF32 (sm_80), and of bytes (sm_89), on tensor cores, executed by the
//! shim: against exact sums of the rounded operands, on random shapes; which products have them;
//! mistakes in the text.

use gantline_kernels::cuda::{Arch, Elements, Functions, Tile, functions_for};
use gantline_kernels::{Kernel, LoopABC, Product, Scales, StoredTypes};
use ir::DType;
use ir::formats::tf32;
use ir::op::Operands;

use crate::shim::{Library, compiler};
use crate::skinny::tiled;
use crate::tensor::{is_near, mistaken, share_of_bound};
use crate::{Buffer, Case, Random, same_bits};

/// What tensor cores multiply a product's operands as, if they do.
fn elements(functions: &Functions) -> Option<Elements> {
    let Tile::Tensor(tile) = &functions.functions[0].tile else { return None };
    Some(tile.elements)
}

/// The first architecture that multiplies operands of a type.
pub(crate) fn arch(p: &Product) -> Arch {
    if p.stored.a == DType::F32 { Arch::Sm80 } else { Arch::Sm89 }
}

fn functions_of(p: &Product) -> (Kernel, Functions) {
    let kernel = Kernel::Product(p.clone());
    (kernel.clone(), functions_for(&kernel, arch(p)))
}

/// A product of matrices that are contiguous along k; those of F32 may be along m or n instead, or
/// along nothing.
pub(crate) fn matrix(random: &mut Random, [a, b, c]: [DType; 3], [m, n, k]: [usize; 3]) -> Product {
    let mut p = Product::matrix(m, n, k, DType::F32);
    p.stored = StoredTypes { a, b, c };
    p.operands = if a == DType::F32 { Operands::Tf32 } else { Operands::Exact };
    p.accumulate = c == DType::F32 && random.below(2) == 0;
    let mut strides = |side: usize| {
        let more = random.pick(&[0, 2, 4, 16]);
        let choices = if a == DType::F32 { 3 } else { 1 };
        match random.below(choices) {
            0 => [k + more, 1],
            1 => [1, side + more + 1],
            _ => [2 * k + more, 2],
        }
    };
    [p.m[0].a, p.k[0].a] = strides(m);
    [p.n[0].b, p.k[0].b] = strides(n);
    if random.below(4) == 0 {
        let more = p.m[0].a * m + p.k[0].a * k;
        p.batch.push(LoopABC { size: 2, a: more.next_multiple_of(2), b: 0, c: m * n });
    }
    p
}

/// A product of codes with scales for each row or each 128, in one of two orders.
pub(crate) fn scaled(random: &mut Random, mut p: Product) -> Product {
    p.batch.clear();
    let [_, m, n, k] = p.sizes();
    p.scales = Some([m, n].map(|side| {
        let block = random.pick(&[1, 128]);
        let (blocks, runs) = (side.div_ceil(block), k / Scales::RUN);
        let [of_block, of_run] = if random.below(2) == 0 { [runs, 1] } else { [1, blocks] };
        Scales { block, of_block, of_run }
    }));
    p
}

/// What the codes of an operand of matrices are worth.
fn worth(p: &Product, at: usize, of: Scales, inputs: &[Buffer]) -> Buffer {
    let [m, n, k] = [(p.m[0].size, p.m[0].a), (p.n[0].size, p.n[0].b), (p.k[0].size, 0)];
    let (rows, stride) = if at == 0 { m } else { n };
    let of_k = if at == 0 { p.k[0].a } else { p.k[0].b };
    let (mut numbers, scales) = (inputs[at].numbers(), inputs[2 + at].numbers());
    for row in 0..rows {
        for point in 0..k.0 {
            let scale = row / of.block * of.of_block + point / Scales::RUN * of.of_run;
            numbers[row * stride + point * of_k] *= scales[scale];
        }
    }
    Buffer::F64(numbers)
}

/// A product, its launch, and the launch whose operands are rounded as tensor cores round them.
pub(crate) struct Rounded {
    pub(crate) product: Product,
    pub(crate) case: Case,
    rounded: Case,
}

impl Rounded {
    pub(crate) fn new(random: &mut Random, product: Product) -> Rounded {
        let case = Case::new(random, Kernel::Product(product.clone()));
        let mut rounded = case.clone();
        match product.scales {
            Some(scales) => {
                for (at, scales) in scales.into_iter().enumerate() {
                    rounded.inputs[at] = worth(&product, at, scales, &case.inputs);
                }
            }
            None => {
                for input in &mut rounded.inputs {
                    if let Buffer::F32(x) = input {
                        x.iter_mut().for_each(|x| *x = tf32(*x));
                    }
                }
            }
        }
        Rounded { product, case, rounded }
    }

    /// The largest share of the bound.
    pub(crate) fn share(&self, found: &Buffer) -> f64 {
        share_of_bound(&self.product, &self.rounded, found, [None; 2]).share
    }

    pub(crate) fn finding(&self, found: &Buffer) -> Option<String> {
        is_near(&self.product, &self.rounded, found, [None; 2])
    }
}

/// Of products of bytes every third has scales.
pub(crate) fn cases(count: u64) -> Vec<Rounded> {
    let case = |number: u64| {
        let mut random = Random::new(number + 2600);
        let bytes = [DType::F8E4M3, DType::F8E5M2];
        let types = match number % 2 {
            0 => [DType::F32; 3],
            _ => {
                [random.pick(&bytes), random.pick(&bytes), random.pick(&[DType::F32, DType::BF16])]
            }
        };
        let [m, n] = [0; 2].map(|_| random.pick(&[1, 7, 16, 17, 33, 64, 129, 136]));
        let k = random.pick(&[2, 8, 30, 64, 128, 130, 260, 400, 1026]);
        let k = if types[0] == DType::F32 { k - random.below(2) } else { k };
        let has_scales = number % 6 == 1;
        let k = if has_scales { k.next_multiple_of(Scales::RUN) } else { k };
        let product = tiled(matrix(&mut random, types, [m, n, k]), Arch::Sm80);
        let product = if has_scales { scaled(&mut random, product) } else { product };
        Rounded::new(&mut random, product)
    };
    (0..count).map(case).collect()
}

#[test]
fn products_of_other_elements_are_as_near_to_exact_sums_as_the_bound() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let cases = cases(24);
    let all: Vec<(Kernel, Functions)> =
        cases.iter().map(|case| functions_of(&case.product)).collect();
    for (at, (_, functions)) in all.iter().enumerate() {
        let wanted = if at % 2 == 0 { Elements::Tf32 } else { Elements::Bytes };
        assert_eq!(elements(functions), Some(wanted), "{:?}", cases[at].product);
    }
    let library = Library::new("elements", all).expect("there is a compiler");
    for (at, case) in cases.iter().enumerate() {
        let found = case.case.execute(&library, at, 0);
        assert_eq!(case.finding(&found[0]), None, "case {at}");
        let again = case.case.execute(&library, at, 5 + at as u64);
        assert!(same_bits(&again[0], &found[0]), "case {at}: the order of threads changes bits");
    }
}

/// Bytes that are not contiguous along k, or are no whole units, run elsewhere.
#[test]
fn products_of_bytes_are_contiguous_along_k() {
    let rounded = |p: Product| Product { operands: Operands::Tf32, ..p };
    let by_k = |dtype: DType, k: usize| {
        let mut p = Product::matrix(64, 64, k, DType::F32);
        p.stored = StoredTypes { a: dtype, b: dtype, c: DType::F32 };
        (p.n[0].b, p.k[0].b) = (k, 1);
        p
    };
    let by_n = |dtype: DType| {
        let mut p = by_k(dtype, 64);
        (p.n[0].b, p.k[0].b) = (1, 64);
        p
    };
    let (single, byte) = (DType::F32, DType::F8E4M3);
    let of = |p: Product, arch: Arch| elements(&functions_for(&Kernel::Product(p), arch));
    assert_eq!(of(rounded(by_k(single, 64)), Arch::Sm80), Some(Elements::Tf32));
    assert_eq!(of(rounded(by_k(single, 63)), Arch::Sm80), Some(Elements::Tf32));
    assert_eq!(of(by_k(single, 64), Arch::Sm80), None, "F32 is exact");
    assert_eq!(of(rounded(by_n(single)), Arch::Sm80), Some(Elements::Tf32));
    assert_eq!(of(by_k(byte, 64), Arch::Sm89), Some(Elements::Bytes));
    assert_eq!(of(by_k(byte, 63), Arch::Sm89), None, "an odd number of bytes");
    assert_eq!(of(by_k(byte, 64), Arch::Sm80), None, "sm_80 knows no such bytes");
    assert_eq!(of(by_n(byte), Arch::Sm89), None);
}

/// What can be wrong: the kernel, what is replaced, which time, and by what.
const MISTAKES: [(usize, &str, usize, &str); 10] = [
    (0, "round_to_tf32(a[i / 4][i % 4]);", 0, ""),
    (0, "round_to_tf32(b[i / 4][i % 4]);", 0, ""),
    (0, "sync_block();", 0, ""),
    (0, "cp_async_wait<1>();", 0, "cp_async_wait<2>();"),
    (0, "% 64 == 0", 0, "% 32 == 0"),
    (1, "<f8e4m3, f8e5m2>", 0, "<f8e5m2, f8e4m3>"),
    (1, "sync_block();", 0, ""),
    (1, "cp_async_commit();", 0, ""),
    (1, "total[i][j][q] = total[i][j][q] + acc[i][j][q];", 0, ""),
    (1, "% 2 == 0) {", 0, "% 3 == 0) {"),
];

#[test]
fn mistakes_in_products_of_other_elements_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut random = Random::new(5);
    let cases = [[DType::F32; 3], [DType::F8E4M3, DType::F8E5M2, DType::F32]].map(|types| {
        let mut product = matrix(&mut random, types, [70, 136, 1100]);
        product.accumulate = true;
        Rounded::new(&mut random, product)
    });
    let of = |at: usize| functions_of(&cases[at].product);
    let mut all = vec![of(0), of(1)];
    all.extend(MISTAKES.map(|(kernel, ..)| of(kernel)));
    let change = |at: usize, text: String| match at.checked_sub(2).map(|at| MISTAKES[at]) {
        Some((_, right, time, wrong)) => mistaken(&text, (right, time, wrong)),
        None => text,
    };
    let library = Library::changed("elements_mistakes", all, &change).expect("it compiles");
    let right = [0, 1].map(|at: usize| cases[at].case.execute(&library, at, 0));
    let is_found = |kernel: usize, at: usize, seed: u64| {
        let found = cases[kernel].case.execute(&library, at, seed);
        cases[kernel].finding(&found[0]).is_some() || !same_bits(&found[0], &right[kernel][0])
    };
    for kernel in [0, 1] {
        assert!((0..4).all(|seed| !is_found(kernel, kernel, seed)), "nothing is found in the text");
    }
    for (at, mistake) in MISTAKES.iter().enumerate() {
        assert!((0..8).any(|seed| is_found(mistake.0, at + 2, seed)), "{mistake:?} is not found");
    }
}
