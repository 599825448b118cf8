//! All instructions that this machine has, and `vpdpbusd` without it, against sums of products.

use super::steps::Bytes;
use super::*;
use crate::cpu::product::plan;
use crate::cpu::scratch::Buffer;
use crate::kernel::StoredTypes;

/// The result of a product of bytes, by tasks of so many threads.
fn run(
    p: &Product,
    [a, b]: [&[i8]; 2],
    old: &[i32],
    threads: usize,
    by: impl Fn(Part),
) -> Vec<i32> {
    let mut c = old.to_vec();
    let (plan, mut buffer) = (plan(p), Buffer::default());
    let grid = Grid::new(&plan, threads);
    let inputs = [View::of(a), View::of(b)];
    for task in 0..grid.tasks() {
        let (outputs, mut scratch) = ([ViewMut::of(&mut c)], buffer.bump(scratch(p)));
        by(Part::new(p, &plan, (&grid, task), &inputs, &outputs, &mut scratch));
    }
    c
}

/// What computes a part.
type By = Box<dyn Fn(Part)>;

/// Instructions for bytes, by name, and for all operands.
fn multipliers() -> Vec<(String, By)> {
    let mut found: Vec<(String, By)> = vec![
        ("a model of vpdpbusd".to_owned(), Box::new(|part: Part| Bytes::enter(part))),
        ("portable".to_owned(), Box::new(|part: Part| Words::enter(part))),
    ];
    #[cfg(target_arch = "x86_64")]
    {
        let all = [
            (Multiplier::Avx2, Isa::Avx2.is_available()),
            (Multiplier::AvxVnni, is_x86_feature_detected!("avxvnni")),
            (Multiplier::Avx512, Isa::Avx512.is_available()),
            (
                Multiplier::Avx512Vnni,
                Isa::Avx512.is_available() && is_x86_feature_detected!("avx512vnni"),
            ),
        ];
        for (multiplier, _) in all.into_iter().filter(|(_, is_there)| *is_there) {
            for are_bytes in [false, true] {
                let name = format!("{multiplier:?}, bytes: {are_bytes}");
                found.push((name, Box::new(move |part: Part| multiplier.run(are_bytes, part))));
            }
        }
    }
    found
}

/// Bytes of which many are at the ends of their range.
fn bytes(seed: u64, len: usize) -> Vec<i8> {
    let byte = |at: usize| {
        let bits = ir::random::mix(seed.wrapping_mul(0x9e37_79b9).wrapping_add(at as u64));
        match bits >> 61 {
            0 => i8::MIN,
            1 => i8::MAX,
            _ => bits as i8,
        }
    };
    (0..len).map(byte).collect()
}

/// Sizes at the edges of groups, tiles and blocks.
#[test]
fn all_instructions_sum_the_same() {
    let sizes = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 63, 100];
    let pick = |bits: u64| sizes[(bits % sizes.len() as u64) as usize];
    for seed in 0..80 {
        let bits = [0, 1, 2, 3].map(|at| ir::random::mix(1000 * seed + at));
        let mut size = [bits[0], bits[1], bits[2]].map(pick);
        match seed % 10 {
            0 => size[2] = KC + pick(bits[2]),
            1 => size[0] = MC + pick(bits[0]),
            2 => size[1] = NC + pick(bits[1]),
            3 => size[2] = 0,
            _ => {}
        }
        let [m, n, k] = size;
        let mut p = Product::matrix(m, n, k, DType::I32);
        p.stored = StoredTypes { a: DType::I8, b: DType::I8, c: DType::I32 };
        p.accumulate = bits[3] & 1 == 0;
        if bits[3] & 2 == 0 {
            (p.n[0].b, p.k[0].b) = (k, 1);
        }
        let (column, point) = (p.n[0].b, p.k[0].b);
        let (a, b) = (bytes(seed, m * k), bytes(seed + 1, n * k));
        let old: Vec<i32> = (0..m * n).map(|at| ir::random::mix(at as u64) as i32).collect();
        let mut want = if p.accumulate { old.clone() } else { vec![0; m * n] };
        for (at, sum) in want.iter_mut().enumerate() {
            let (i, j) = (at / n, at % n);
            for l in 0..k {
                let product = i32::from(a[i * k + l]) * i32::from(b[j * column + l * point]);
                *sum = sum.wrapping_add(product);
            }
        }
        for (name, by) in multipliers() {
            for threads in [1, 3] {
                let found = run(&p, [&a, &b], &old, threads, &by);
                assert!(found == want, "SEED={seed}, {name}, {threads} threads: {m}x{n}x{k}");
            }
        }
    }
}
