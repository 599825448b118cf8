//! Products of random einsums.

use gantline_kernels::cpu::{Cpu, Isa};
use gantline_kernels::verify::verify;
use gantline_kernels::{Kernel, LoopAB, LoopABC, LoopAC, LoopBC, Product, ProductPart, Products};
use ir::DType;

use crate::{Buffer, Random, assert_close, run, run_on_threads, sets};

/// Row-major strides of factors in a random order.
fn strides(random: &mut Random, sizes: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i + 1));
    }
    let mut strides = vec![0; sizes.len()];
    let mut next = 1;
    for i in order {
        strides[i] = next;
        next *= sizes[i] + usize::from(random.below(4) == 0);
    }
    strides
}

fn random_product(random: &mut Random, dtype: DType) -> Product {
    let groups: Vec<Vec<usize>> = [3, 40, 40, 40]
        .map(|most| (0..random.below(3)).map(|_| 1 + random.below(most)).collect())
        .to_vec();
    let [batch, m, n, k] = [0, 1, 2, 3].map(|g| groups[g].clone());
    let a = strides(random, &[&batch[..], &m, &k].concat());
    let b = strides(random, &[&batch[..], &n, &k].concat());
    let c = strides(random, &[&batch[..], &m, &n].concat());
    let p = batch.len();
    let batch_loop = |(i, &size)| LoopABC { size, a: a[i], b: b[i], c: c[i] };
    Product {
        batch: batch.iter().enumerate().map(batch_loop).collect(),
        m: m.iter()
            .enumerate()
            .map(|(i, &size)| LoopAC { size, a: a[p + i], c: c[p + i] })
            .collect(),
        n: (n.iter().enumerate())
            .map(|(i, &size)| LoopBC { size, b: b[p + i], c: c[p + m.len() + i] })
            .collect(),
        k: (k.iter().enumerate())
            .map(|(i, &size)| LoopAB { size, a: a[p + m.len() + i], b: b[p + n.len() + i] })
            .collect(),
        accumulate: random.below(2) == 0,
        dtype,
    }
}

/// All offsets of a list of (size, stride) loops, in order.
fn offsets(loops: impl Iterator<Item = (usize, usize)>) -> Vec<usize> {
    loops.fold(vec![0], |outer, (size, stride)| {
        outer.iter().flat_map(|o| (0..size).map(move |i| o + i * stride)).collect()
    })
}

fn reference(p: &Product, a: &[f64], b: &[f64], c: &mut [f64]) {
    let batch = [
        offsets(p.batch.iter().map(|l| (l.size, l.a))),
        offsets(p.batch.iter().map(|l| (l.size, l.b))),
        offsets(p.batch.iter().map(|l| (l.size, l.c))),
    ];
    let (ma, mc) =
        (offsets(p.m.iter().map(|l| (l.size, l.a))), offsets(p.m.iter().map(|l| (l.size, l.c))));
    let (nb, nc) =
        (offsets(p.n.iter().map(|l| (l.size, l.b))), offsets(p.n.iter().map(|l| (l.size, l.c))));
    let (ka, kb) =
        (offsets(p.k.iter().map(|l| (l.size, l.a))), offsets(p.k.iter().map(|l| (l.size, l.b))));
    for e in 0..batch[0].len() {
        for (ma, mc) in ma.iter().zip(&mc) {
            for (nb, nc) in nb.iter().zip(&nc) {
                let terms = ka.iter().zip(&kb);
                let sum: f64 =
                    terms.map(|(ka, kb)| a[batch[0][e] + ma + ka] * b[batch[1][e] + nb + kb]).sum();
                let element = &mut c[batch[2][e] + mc + nc];
                *element = if p.accumulate { *element + sum } else { sum };
            }
        }
    }
}

#[test]
fn products_of_random_einsums_match() {
    for case in 0..60 {
        let mut random = Random::new(case);
        for dtype in [DType::F32, DType::F64] {
            let p = random_product(&mut random, dtype);
            let kernel = Kernel::Product(p.clone());
            let lens: Vec<usize> =
                kernel.inputs().iter().chain(&kernel.outputs()).map(|a| a.len).collect();
            let [a, b, c] = [0, 1, 2].map(|i| Buffer::new(dtype, &random.numbers(lens[i])));
            let mut want = c.numbers();
            reference(&p, &a.numbers(), &b.numbers(), &mut want);
            for isa in sets() {
                let inputs = [a.clone(), b.clone()];
                let got = run_on_threads(isa, &kernel, &inputs, std::slice::from_ref(&c));
                let tolerance = if dtype == DType::F32 { 1e-4 } else { 1e-13 };
                assert_close(&got[0].numbers(), &want, tolerance, &format!("{isa:?} {p:?}"));
            }
        }
    }
}

/// Whatever operands they share, and to whichever something is added.
#[test]
fn products_in_one_launch_have_the_bits_of_each_alone() {
    for case in 0..16 {
        let mut random = Random::new(case);
        let dtype = if case % 2 == 0 { DType::F32 } else { DType::F64 };
        let mut operands = 0;
        let mut parts = Vec::new();
        for _ in 0..1 + random.below(4) {
            let mut draw = |random: &mut Random| {
                let at = random.below(operands + 1);
                operands = operands.max(at + 1);
                at
            };
            let (a, b) = (draw(&mut random), draw(&mut random));
            let [bias, addend] = [0, 1].map(|_| (random.below(2) == 0).then(|| draw(&mut random)));
            let product = random_product(&mut random, dtype);
            parts.push(ProductPart { a, b, bias, addend, product });
        }
        let kernel = Kernel::Products(Products { parts: parts.clone() });
        assert_eq!(verify(&kernel), Ok(()), "{kernel:?}");
        let mut buffers = |arguments: Vec<gantline_kernels::arguments::Argument>| -> Vec<Buffer> {
            arguments.iter().map(|a| Buffer::new(dtype, &random.numbers(a.len))).collect()
        };
        let (inputs, outputs) = (buffers(kernel.inputs()), buffers(kernel.outputs()));
        for isa in sets() {
            let together = run_on_threads(isa, &kernel, &inputs, &outputs);
            for (at, part) in parts.iter().enumerate() {
                let operands = [inputs[part.a].clone(), inputs[part.b].clone()];
                let alone = Kernel::Product(part.product.clone());
                let alone = run_on_threads(isa, &alone, &operands, &outputs[at..=at]);
                let want = added(part, alone[0].numbers(), &inputs);
                assert_eq!(
                    together[at].numbers(),
                    want,
                    "case {case}, {isa:?}, part {at}: {kernel:?}"
                );
            }
        }
    }
}

/// A result to which the bias and the addend of a part are added.
fn added(part: &ProductPart, mut c: Vec<f64>, inputs: &[Buffer]) -> Vec<f64> {
    let p = &part.product;
    let loops = p.batch.iter().map(|l| (l.size, l.c)).chain(p.m.iter().map(|l| (l.size, l.c)));
    let rows = offsets(loops);
    let columns = offsets(p.n.iter().map(|l| (l.size, l.c)));
    // A sum of two numbers of f32 is exact enough in f64 to be rounded once more.
    let round = |x: f64| if p.dtype == DType::F32 { f64::from(x as f32) } else { x };
    let [bias, addend] = [part.bias, part.addend].map(|at| at.map(|at| inputs[at].numbers()));
    for row in &rows {
        for (j, column) in columns.iter().enumerate() {
            let element = &mut c[row + column];
            if let Some(bias) = &bias {
                *element = round(*element + bias[j]);
            }
            if let Some(addend) = &addend {
                *element = round(*element + addend[row + column]);
            }
        }
    }
    c
}

#[test]
fn an_empty_contraction_gives_zeros() {
    let kernel = Kernel::Product(Product::matrix(3, 5, 0, DType::F32));
    let empty = Buffer::F32(Vec::new());
    let got = run(&Cpu::new(1), &kernel, &[empty.clone(), empty], &[Buffer::F32(vec![7.0; 15])]);
    assert_eq!(got[0], Buffer::F32(vec![0.0; 15]));
}

/// Rows `[from, to)` of a product alone have the bits that they have in the whole product.
#[test]
fn bits_of_a_row_do_not_depend_on_how_rows_are_cut() {
    for case in 0..30 {
        let mut random = Random::new(case);
        let (m, n, k) = (1 + random.below(150), 1 + random.below(150), 1 + random.below(700));
        let (transposed_a, transposed_b) = (random.below(2) == 0, random.below(2) == 0);
        let a = random.numbers(m * k);
        let b = Buffer::new(DType::F32, &random.numbers(k * n));
        let product = |m: usize| {
            let mut p = Product::matrix(m, n, k, DType::F32);
            if transposed_a {
                (p.m[0].a, p.k[0].a) = (1, m);
            }
            if transposed_b {
                (p.n[0].b, p.k[0].b) = (k, 1);
            }
            Kernel::Product(p)
        };
        // Rows of `a`, laid out for a product of these rows alone.
        let part = |from: usize, to: usize| {
            let rows = to - from;
            let element = |i: usize| {
                let (r, c) = if transposed_a { (i % rows, i / rows) } else { (i / k, i % k) };
                a[(from + r) * k + c]
            };
            Buffer::new(DType::F32, &(0..rows * k).map(element).collect::<Vec<_>>())
        };
        let multiply = |isa: Isa, from: usize, to: usize| {
            let old = Buffer::F32(vec![0.0; (to - from) * n]);
            let inputs = [part(from, to), b.clone()];
            let cpu = Cpu::with_isa(1 + from % 3, isa);
            run(&cpu, &product(to - from), &inputs, &[old])[0].numbers()
        };
        for isa in sets() {
            let whole = multiply(isa, 0, m);
            let mut from = 0;
            while from < m {
                let to = (from + 1 + random.below(40) * random.below(2)).min(m);
                let got = multiply(isa, from, to);
                assert_eq!(
                    got,
                    whole[from * n..to * n],
                    "{isa:?} rows {from}..{to} of {m}x{n}x{k}"
                );
                from = to;
            }
        }
    }
}
