//! Products of integers: the same bits as sums that wrap, on every set and however they are cut.

use gantline_kernels::cpu::Cpu;
use gantline_kernels::verify::verify;
use gantline_kernels::{Kernel, Product, StoredTypes};
use ir::DType;

use crate::product::{Framed, random_product, terms};
use crate::{Buffer, Random, run, run_on_threads, sets};

/// An operand with numbers at the ends of its range among others; those of 32 bits fit 16, or do
/// not where `is_any`.
fn operand(random: &mut Random, dtype: DType, len: usize, is_any: bool) -> Buffer {
    let mut number = |low: i64, high: i64| match random.below(8) {
        0 => low,
        1 => high,
        _ => low + random.below((high - low + 1) as usize) as i64,
    };
    if dtype == DType::I8 {
        let bytes = (0..len).map(|_| number(-128, 127) as i8 as u8);
        return Buffer::Byte(dtype, bytes.collect());
    }
    let [low, high] = if is_any { [i32::MIN, i32::MAX] } else { [-32_768, 32_767] };
    Buffer::I32((0..len).map(|_| number(low.into(), high.into()) as i32).collect())
}

/// The numbers that a product reads.
fn read(buffer: &Buffer) -> Vec<i32> {
    match buffer {
        Buffer::Byte(_, x) => x.iter().map(|x| i32::from(x.cast_signed())).collect(),
        Buffer::I32(x) => x.iter().map(|x| i32::from(*x as i16)).collect(),
        other => panic!("{other:?} is no operand of integers"),
    }
}

fn whole(buffer: &Buffer) -> &[i32] {
    let Buffer::I32(x) = buffer else { panic!("results are of 32 bits") };
    x
}

/// Sums that wrap.
fn expected(p: &Product, inputs: &[Buffer], old: &Buffer) -> Vec<i32> {
    let [a, b] = [0, 1].map(|at| read(&inputs[at]));
    let mut c = whole(old).to_vec();
    for (element, terms) in terms(p) {
        let first = if p.accumulate { c[element] } else { 0 };
        let add = |sum: i32, [i, j]: [usize; 2]| sum.wrapping_add(a[i] * b[j]);
        c[element] = terms.into_iter().fold(first, add);
    }
    c
}

fn stored(random: &mut Random) -> StoredTypes {
    let [a, b] = [0; 2].map(|_| random.pick(&[DType::I8, DType::I32]));
    StoredTypes { a, b, c: DType::I32 }
}

fn matrix(random: &mut Random, [m, n, k]: [usize; 3]) -> Product {
    let mut p = Product::matrix(m, n, k, DType::I32);
    p.stored = stored(random);
    p.accumulate = random.below(2) == 0;
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

fn check(random: &mut Random, p: &Product, is_any: bool) {
    let kernel = Kernel::Product(p.clone());
    verify(&kernel).unwrap_or_else(|why| panic!("{p:?}: {why}"));
    let inputs = kernel.inputs();
    let inputs: Vec<Buffer> =
        inputs.iter().map(|of| operand(random, of.dtype, of.len, is_any)).collect();
    let old = operand(random, DType::I32, kernel.outputs()[0].len, true);
    let want = expected(p, &inputs, &old);
    for isa in sets() {
        let found = run_on_threads(isa, &kernel, &inputs, std::slice::from_ref(&old));
        assert!(whole(&found[0]) == want, "{isa:?} {p:?}");
    }
}

#[test]
fn products_of_integers_wrap() {
    for case in 0..150 {
        let mut random = Random::new(case);
        let edges = [1, 2, 3, 5, 6, 7, 8, 11, 15, 16, 17, 23, 31, 32, 33, 64, 65];
        let p = if case % 3 == 0 {
            let mut p = random_product(&mut random, DType::I32);
            p.stored = stored(&mut random);
            p
        } else {
            let sizes = [0; 3].map(|_| random.pick(&edges));
            matrix(&mut random, sizes)
        };
        check(&mut random, &p, case % 5 == 0);
    }
}

/// Sizes of more than one block of rows, of columns and of `k`.
#[test]
fn large_products_of_integers_wrap() {
    let sizes =
        [[300, 70, 600], [40, 1000, 33], [3, 5, 9000], [600, 40, 1100], [1, 1100, 800], [7, 9, 0]];
    for (case, sizes) in sizes.into_iter().enumerate() {
        let mut random = Random::new(case as u64);
        let p = matrix(&mut random, sizes);
        check(&mut random, &p, false);
    }
}

/// Convolutions read zeros beyond an image, whatever their weights are stored as.
#[test]
fn products_of_integers_have_borders() {
    for case in 0..40 {
        let mut random = Random::new(case);
        let framed = Framed::random(&mut random);
        let mut p = framed.product(DType::I32);
        p.stored.a = random.pick(&[DType::I8, DType::I32]);
        let kernel = Kernel::Product(p.clone());
        verify(&kernel).unwrap_or_else(|why| panic!("{p:?}: {why}"));
        let inputs = kernel.inputs();
        let inputs: Vec<Buffer> =
            inputs.iter().map(|of| operand(&mut random, of.dtype, of.len, false)).collect();
        let old = Buffer::I32(vec![7; kernel.outputs()[0].len]);
        let [weights, image] = [0, 1].map(|at| read(&inputs[at]));
        let real = |x: &[i32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        // Exact in f64; then it wraps.
        let want = framed.reference(&real(&weights), &real(&image));
        let want: Vec<i32> = want.into_iter().map(|x| x as i64 as i32).collect();
        for isa in sets() {
            let found = run_on_threads(isa, &kernel, &inputs, std::slice::from_ref(&old));
            assert!(whole(&found[0]) == want, "{case} {isa:?} {p:?}");
        }
    }
}

/// A rank that has some of the points of `k` adds what the others have, in any order.
#[test]
fn points_of_k_may_be_cut() {
    for case in 0..12 {
        let mut random = Random::new(case);
        let [m, n, k] = [1 + random.below(40), 1 + random.below(40), 2 + random.below(1500)];
        let mut p = Product::matrix(m, n, k, DType::I32);
        p.stored = StoredTypes { a: DType::I32, b: DType::I8, c: DType::I32 };
        let kernel = Kernel::Product(p.clone());
        let inputs = [
            operand(&mut random, DType::I32, m * k, false),
            operand(&mut random, DType::I8, k * n, false),
        ];
        let zeros = Buffer::I32(vec![0; m * n]);
        let cut = 1 + random.below(k - 1);
        for isa in sets() {
            let cpu = Cpu::with_isa(2, isa);
            let all = run(&cpu, &kernel, &inputs, std::slice::from_ref(&zeros));
            let mut sums = zeros.clone();
            for [from, to] in [[cut, k], [0, cut]] {
                let (Buffer::I32(a), Buffer::Byte(_, b)) = (&inputs[0], &inputs[1]) else {
                    panic!("the operands are of these types")
                };
                let a = (0..m).flat_map(|i| a[i * k + from..i * k + to].to_vec()).collect();
                let b = b[from * n..to * n].to_vec();
                let mut part = Product::matrix(m, n, to - from, DType::I32);
                part.stored = p.stored;
                part.accumulate = true;
                let operands = [Buffer::I32(a), Buffer::Byte(DType::I8, b)];
                sums = run(&cpu, &Kernel::Product(part), &operands, &[sums]).remove(0);
            }
            assert_eq!(sums, all[0], "{isa:?}, {m}x{n}x{k} cut at {cut}");
        }
    }
}

#[test]
fn other_types_are_refused() {
    let of = |a, b, c, dtype| {
        let stored = StoredTypes { a, b, c };
        verify(&Kernel::Product(Product { stored, dtype, ..Product::matrix(2, 3, 4, DType::F32) }))
    };
    assert_eq!(of(DType::I8, DType::I32, DType::I32, DType::I32), Ok(()));
    for [a, b, c, dtype] in [
        [DType::I8, DType::I8, DType::I8, DType::I32],
        [DType::I8, DType::F32, DType::I32, DType::I32],
        [DType::I64, DType::I8, DType::I32, DType::I32],
        [DType::U32, DType::I8, DType::I32, DType::I32],
        [DType::I8, DType::I8, DType::I32, DType::F32],
        [DType::I8, DType::I8, DType::I64, DType::I64],
    ] {
        assert!(of(a, b, c, dtype).is_err(), "{a} {b} {c} {dtype}");
    }
}
