//! Products of BF16 by instructions for pairs: bit for bit what [`Product`] says, by scalar
//! arithmetic, and as near to the exact sum as the sum of products of numbers of F32 would be.

use gantline_kernels::cpu::{Cpu, Isa};
use gantline_kernels::verify::verify;
use gantline_kernels::{Kernel, Product, ProductPart, Products, StoredTypes};
use ir::DType;
use ir::formats::nearest;

use crate::product::{random_product, terms};
use crate::{Buffer, Random, run, run_on_threads, sets};

/// Sets that have an instruction for pairs.
fn paired_sets() -> Vec<Isa> {
    sets().into_iter().filter(|isa| matches!(isa, Isa::Amx | Isa::Avx512Bf16)).collect()
}

/// Whether products of such operands are those of pairs on a set.
pub(crate) fn is_paired(isa: Isa, p: &Product) -> bool {
    let stored = [p.stored.a, p.stored.b] == [DType::BF16; 2];
    stored && p.borders.is_empty() && matches!(isa, Isa::Amx | Isa::Avx512Bf16)
}

/// Zero instead of a subnormal number.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
}

fn fma(a: f32, b: f32, c: f32) -> f32 {
    flushed(flushed(a).mul_add(flushed(b), flushed(c)))
}

/// The sum of products of pairs as the contract says, from an old value.
fn sum(isa: Isa, old: f32, terms: &[[f32; 2]]) -> f32 {
    let mut sum = old;
    for step in terms.chunks(32) {
        let mut points = [[0.0; 2]; 32];
        points[..step.len()].copy_from_slice(step);
        if isa == Isa::Amx {
            let mut of = [0.0; 2];
            for (i, [a, b]) in points.into_iter().enumerate() {
                of[i % 2] = fma(a, b, of[i % 2]);
            }
            sum = flushed(flushed(sum) + flushed(of[0] + of[1]));
        } else {
            for pair in points.chunks(2) {
                sum = fma(pair[1][0], pair[1][1], sum);
                sum = fma(pair[0][0], pair[0][1], sum);
            }
        }
    }
    sum
}

/// What a product of pairs gives.
pub(crate) fn expected(isa: Isa, p: &Product, inputs: &[Buffer], old: &Buffer) -> Vec<f64> {
    let [a, b] = [0, 1].map(|at| inputs[at].numbers());
    let mut c = old.numbers();
    for (element, terms) in terms(p) {
        let terms: Vec<[f32; 2]> =
            terms.into_iter().map(|[i, j]| [a[i] as f32, b[j] as f32]).collect();
        let old = if p.accumulate { c[element] as f32 } else { 0.0 };
        let x = f64::from(if terms.is_empty() { old } else { sum(isa, old, &terms) });
        c[element] = if p.stored.c == DType::F32 { x } else { nearest(p.stored.c, x) };
    }
    c
}

fn assert_same(found: &Buffer, want: &[f64], what: &str) {
    for (i, (found, want)) in found.numbers().into_iter().zip(want).enumerate() {
        let same = found.to_bits() == want.to_bits() || found.is_nan() && want.is_nan();
        assert!(same, "{what}: element {i} is {found}, not {want}");
    }
}

fn stored(c: DType) -> StoredTypes {
    StoredTypes { a: DType::BF16, b: DType::BF16, c }
}

/// A product of matrices that lie in one of two ways each.
fn matrix(random: &mut Random, [m, n, k]: [usize; 3]) -> Product {
    let mut p = Product::matrix(m, n, k, DType::BF16);
    p.stored = stored(random.pick(&[DType::F32, DType::BF16, DType::F16]));
    p.accumulate = p.stored.c == DType::F32 && random.below(2) == 0;
    if random.below(2) == 0 {
        (p.m[0].a, p.k[0].a) = (1, m);
    }
    if random.below(2) == 0 {
        (p.n[0].b, p.k[0].b) = (k, 1);
    }
    if random.below(4) == 0 {
        (p.m[0].c, p.n[0].c) = (1, m);
    }
    p
}

fn buffers(random: &mut Random, kernel: &Kernel) -> [Vec<Buffer>; 2] {
    [kernel.inputs(), kernel.outputs()].map(|arguments| {
        arguments.iter().map(|a| Buffer::new(a.dtype, &random.numbers(a.len))).collect()
    })
}

#[test]
fn products_of_pairs_are_what_the_contract_says() {
    for case in 0..90 {
        let mut random = Random::new(case);
        let edges = [1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65];
        let p = if case % 3 == 0 {
            let mut p = random_product(&mut random, DType::F32);
            p.stored = stored(random.pick(&[DType::F32, DType::BF16]));
            p.accumulate &= p.stored.c == DType::F32;
            p
        } else {
            let sizes = [0; 3].map(|_| random.pick(&edges));
            matrix(&mut random, sizes)
        };
        let kernel = Kernel::Product(p.clone());
        verify(&kernel).unwrap_or_else(|why| panic!("{p:?}: {why}"));
        let [inputs, old] = buffers(&mut random, &kernel);
        for isa in paired_sets() {
            let found = run_on_threads(isa, &kernel, &inputs, &old);
            let want = expected(isa, &p, &inputs, &old[0]);
            assert_same(&found[0], &want, &format!("{case} {isa:?} {p:?}"));
        }
    }
}

/// Sizes of more than one block of rows, of columns and of `k`.
#[test]
fn large_products_of_pairs_are_what_the_contract_says() {
    for (case, sizes) in
        [[300, 70, 500], [40, 1000, 33], [3, 5, 9000], [600, 40, 4500], [1, 1100, 800]]
            .into_iter()
            .enumerate()
    {
        let mut random = Random::new(case as u64);
        let p = matrix(&mut random, sizes);
        let kernel = Kernel::Product(p.clone());
        let [inputs, old] = buffers(&mut random, &kernel);
        for isa in paired_sets() {
            let found = run_on_threads(isa, &kernel, &inputs, &old);
            let want = expected(isa, &p, &inputs, &old[0]);
            assert_same(&found[0], &want, &format!("{case} {isa:?} {p:?}"));
        }
    }
}

/// `[0, size)` in random pieces.
fn pieces(random: &mut Random, size: usize) -> Vec<[usize; 2]> {
    let mut pieces = Vec::new();
    let mut from = 0;
    while from < size {
        let to = (from + 1 + random.below(size)).min(size);
        pieces.push([from, to]);
        from = to;
    }
    pieces
}

/// A rank that has some of the rows and columns computes the bits that one has who computes all.
#[test]
fn rows_and_columns_may_be_cut() {
    for case in 0..12 {
        let mut random = Random::new(case);
        let [m, n, k] = [1 + random.below(150), 1 + random.below(150), 1 + random.below(900)];
        let mut p = Product::matrix(m, n, k, DType::BF16);
        p.stored.c = random.pick(&[DType::F32, DType::BF16]);
        let whole = Kernel::Product(p.clone());
        let [inputs, old] = buffers(&mut random, &whole);
        let (rows, columns) = (pieces(&mut random, m), pieces(&mut random, n));
        for isa in sets() {
            let cpu = Cpu::with_isa(2, isa);
            let all = run(&cpu, &whole, &inputs, &old)[0].numbers();
            for &[m0, m1] in &rows {
                for &[n0, n1] in &columns {
                    let (m, columns) = (m1 - m0, n1 - n0);
                    let mut part = Product::matrix(m, columns, k, DType::BF16);
                    part.stored.c = p.stored.c;
                    let [a, b] = [0, 1].map(|at| inputs[at].numbers());
                    let b: Vec<f64> =
                        (0..k).flat_map(|i| b[i * n + n0..i * n + n1].to_vec()).collect();
                    let operands =
                        [&a[m0 * k..m1 * k], &b].map(|x| Buffer::new(DType::BF16, x)).to_vec();
                    let old = [Buffer::new(p.stored.c, &vec![0.0; m * columns])];
                    let found = run(&cpu, &Kernel::Product(part), &operands, &old)[0].numbers();
                    for i in 0..m {
                        let want = &all[(m0 + i) * n + n0..(m0 + i) * n + n1];
                        assert_eq!(&found[i * columns..(i + 1) * columns], want, "{isa:?}");
                    }
                }
            }
        }
    }
}

/// The distance to the exact sum that [`Product`] states, on every set.
#[test]
fn products_of_pairs_are_near_the_exact_sum() {
    for case in 0..24 {
        let mut random = Random::new(case);
        let sizes = [1 + random.below(40), 1 + random.below(40), 1 + random.below(1500)];
        let mut p = matrix(&mut random, sizes);
        p.accumulate = false;
        let kernel = Kernel::Product(p.clone());
        let [mut inputs, old] = buffers(&mut random, &kernel);
        if case % 2 == 0 {
            // Of all magnitudes, so that sums cancel.
            for input in &mut inputs {
                let numbers = input.numbers().into_iter();
                let spread = numbers.map(|x| x * 2.0_f64.powi(random.below(40) as i32 - 20));
                *input = Buffer::new(DType::BF16, &spread.collect::<Vec<_>>());
            }
        }
        let [a, b] = [0, 1].map(|at| inputs[at].numbers());
        for isa in sets() {
            let found = run_on_threads(isa, &kernel, &inputs, &old)[0].numbers();
            for (element, terms) in terms(&p) {
                let products = terms.iter().map(|&[i, j]| a[i] * b[j]);
                let (exact, size): (f64, f64) =
                    (products.clone().sum(), products.map(f64::abs).sum());
                let near = (terms.len() + 4) as f64 * f64::from(f32::EPSILON) * size;
                let ulp = match p.stored.c {
                    DType::BF16 => 2.0_f64.powi(-7),
                    DType::F16 => 2.0_f64.powi(-10),
                    _ => 0.0,
                };
                let most = near + ulp * exact.abs().max(2.0_f64.powi(-14));
                let found = found[element];
                let overflows = p.stored.c == DType::F16 && exact.abs() + near > 65_000.0;
                assert!(
                    (found - exact).abs() <= most || overflows,
                    "case {case}, {isa:?}: {found}, not {exact}, of {size}: {p:?}"
                );
            }
        }
    }
}

/// What is no number, infinite, large or subnormal.
#[test]
fn special_numbers_are_those_of_the_contract() {
    let special = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        3.3e38,
        -3.3e38,
        0.0,
        -0.0,
        1.2e-38,
        1e-39,
        -1e-40,
        1e-20,
        1.0,
    ];
    for case in 0..60 {
        let mut random = Random::new(case);
        let sizes = [1 + random.below(20), 1 + random.below(20), 1 + random.below(70)];
        let p = matrix(&mut random, sizes);
        let kernel = Kernel::Product(p.clone());
        let [mut inputs, mut old] = buffers(&mut random, &kernel);
        let rare = random.pick(&[2, 20, 300]);
        for buffer in inputs.iter_mut().chain(&mut old) {
            let mut numbers = buffer.numbers();
            for x in &mut numbers {
                if random.below(rare) == 0 {
                    *x = random.pick(&special);
                }
            }
            *buffer = match buffer {
                Buffer::Wide(dtype, _) => Buffer::new(*dtype, &numbers),
                _ => Buffer::new(DType::F32, &numbers),
            };
        }
        for isa in paired_sets() {
            let found = run(&Cpu::with_isa(2, isa), &kernel, &inputs, &old);
            let want = expected(isa, &p, &inputs, &old[0]);
            assert_same(&found[0], &want, &format!("{case} {isa:?} {p:?}"));
        }
    }
}

/// Each with one rounding, whatever else is in the launch.
#[test]
fn parts_are_products_to_which_something_is_added() {
    for case in 0..16 {
        let mut random = Random::new(case);
        let c = random.pick(&[DType::F32, DType::BF16]);
        let [m, n] = [0; 2].map(|_| 1 + random.below(300));
        let parts: Vec<ProductPart> = (0..1 + random.below(3))
            .map(|at| {
                let mut p = Product::matrix(m, n, 1 + random.below(100), DType::BF16);
                p.stored.c = c;
                let added = [3, 4].map(|add| (random.below(2) == 0).then_some(5 * at + add - 1));
                let [bias, addend] = added;
                ProductPart { bias, addend, ..ProductPart::of(5 * at, 5 * at + 1, p) }
            })
            .collect();
        // Numbers of operands without gaps.
        let mut used: Vec<usize> = parts.iter().flat_map(ProductPart::operands).collect();
        used.sort_unstable();
        let at = |old: usize| used.iter().position(|&u| u == old).expect("it is used");
        let parts: Vec<ProductPart> = parts
            .iter()
            .map(|part| ProductPart {
                a: at(part.a),
                b: at(part.b),
                bias: part.bias.map(at),
                addend: part.addend.map(at),
                ..part.clone()
            })
            .collect();
        let kernel = Kernel::Products(Products { parts: parts.clone() });
        assert_eq!(verify(&kernel), Ok(()), "{kernel:?}");
        let [inputs, old] = buffers(&mut random, &kernel);
        for isa in paired_sets() {
            let found = run_on_threads(isa, &kernel, &inputs, &old);
            for (part, found) in parts.iter().zip(&found) {
                let operands = [inputs[part.a].clone(), inputs[part.b].clone()];
                let mut want = expected(isa, &part.product, &operands, &old[0]);
                let [bias, addend] =
                    [part.bias, part.addend].map(|at| at.map(|at| inputs[at].numbers()));
                for (i, x) in want.iter_mut().enumerate() {
                    let added = [bias.as_ref().map(|b| b[i % n]), addend.as_ref().map(|a| a[i])];
                    for y in added.into_iter().flatten() {
                        *x = nearest(c, *x + y);
                    }
                }
                assert_same(found, &want, &format!("{case} {isa:?}"));
            }
        }
    }
}
