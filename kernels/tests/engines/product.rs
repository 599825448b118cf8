//! Products of random einsums.

use gantline_kernels::cpu::{Cpu, Isa};
use gantline_kernels::verify::verify;
use gantline_kernels::{
    Access, BinaryOp, Border, Instr, Kernel, LoopAB, LoopABC, LoopAC, LoopBC, Output, Pointwise,
    Product, ProductPart, Products, RowInput, Rows, Source, StoredTypes, Tiling, UnaryOp,
};
use ir::DType;
use ir::op::Operands;

use crate::{Buffer, Random, assert_close, run, run_on_threads, same_bits, sets};

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

pub(crate) fn random_product(random: &mut Random, dtype: DType) -> Product {
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
        stored: StoredTypes::all(dtype),
        operands: Operands::Exact,
        borders: Vec::new(),
        scales: None,
        tiling: Tiling::default(),
    }
}

/// A convolution of two dims of an image of some channels as a product whose columns have borders,
/// and what it computes: `image[C, Y, X]` and `kernels[O, C, V, U]`.
pub(crate) struct Framed {
    channels: usize,
    outputs: usize,
    image: [usize; 2],
    kernel: [usize; 2],
    result: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
    spread: [usize; 2],
    before: [i64; 2],
}

impl Framed {
    pub(crate) fn random(random: &mut Random) -> Framed {
        let mut pair = |low: usize, most: usize| [0, 1].map(|_| low + random.below(most));
        let (image, kernel, result) = (pair(1, 24), pair(1, 4), pair(1, 40));
        let (stride, dilation) = (pair(1, 3), pair(1, 2));
        let before = pair(0, 6).map(|n| n as i64 - 2);
        let spread = if random.below(3) == 0 { [2, 1 + random.below(3)] } else { [1, 1] };
        let (channels, outputs) = (1 + random.below(70), 1 + random.below(30));
        Framed { channels, outputs, image, kernel, result, stride, dilation, spread, before }
    }

    pub(crate) fn product(&self, dtype: DType) -> Product {
        let [points, taps, results] = [self.image, self.kernel, self.result].map(|[a, b]| a * b);
        let (step, of_y) = ([self.image[1], 1], [self.result[1], 1]);
        let side = |at: usize| LoopBC { size: self.result[at], b: 0, c: of_y[at] };
        let tap = |at: usize| LoopAB { size: self.kernel[at], a: [self.kernel[1], 1][at], b: 0 };
        let border = |at: usize| Border {
            n: at,
            k: 1 + at,
            stride: self.stride[at],
            dilation: self.dilation[at],
            before: self.before[at],
            spread: self.spread[at],
            size: self.image[at],
            step: step[at],
        };
        Product {
            batch: Vec::new(),
            m: vec![LoopAC { size: self.outputs, a: self.channels * taps, c: results }],
            n: vec![side(0), side(1)],
            k: vec![LoopAB { size: self.channels, a: taps, b: points }, tap(0), tap(1)],
            accumulate: false,
            dtype,
            stored: StoredTypes::all(dtype),
            operands: Operands::Exact,
            borders: vec![border(0), border(1)],
            scales: None,
            tiling: Tiling::default(),
        }
    }

    /// What one element of the result reads of the image for one tap, without the channel.
    fn read(&self, y: [usize; 2], tap: [usize; 2]) -> Option<usize> {
        let mut element = 0;
        for at in 0..2 {
            let position = (y[at] * self.stride[at] + tap[at] * self.dilation[at]) as i64;
            let position = position - self.before[at];
            let (size, spread) = (self.image[at] as i64, self.spread[at] as i64);
            if position < 0 || position % spread != 0 || position / spread >= size {
                return None;
            }
            element = element * self.image[at] + (position / spread) as usize;
        }
        Some(element)
    }

    pub(crate) fn reference(&self, kernels: &[f64], image: &[f64]) -> Vec<f64> {
        let (points, taps) =
            (self.image.iter().product::<usize>(), self.kernel[0] * self.kernel[1]);
        let mut all = Vec::new();
        for output in 0..self.outputs {
            for y in 0..self.result[0] * self.result[1] {
                let y = [y / self.result[1], y % self.result[1]];
                let mut sum = 0.0;
                for tap in 0..taps {
                    let element = self.read(y, [tap / self.kernel[1], tap % self.kernel[1]]);
                    for channel in 0..self.channels {
                        let weight = kernels[(output * self.channels + channel) * taps + tap];
                        sum += element.map_or(0.0, |e| weight * image[channel * points + e]);
                    }
                }
                all.push(sum);
            }
        }
        all
    }
}

/// A layer of a large network has more points times taps than there can be elements.
#[test]
fn large_convolutions_can_be_executed() {
    let framed = Framed {
        channels: 64,
        outputs: 64,
        image: [224; 2],
        kernel: [3; 2],
        result: [224; 2],
        stride: [1; 2],
        dilation: [1; 2],
        spread: [1; 2],
        before: [1; 2],
    };
    assert_eq!(verify(&Kernel::Product(framed.product(DType::F32))), Ok(()));
}

#[test]
pub(crate) fn products_read_zeros_beyond_their_borders() {
    for case in 0..60 {
        let mut random = Random::new(case);
        let framed = Framed::random(&mut random);
        for dtype in [DType::F32, DType::F64] {
            let p = framed.product(dtype);
            let kernel = Kernel::Product(p.clone());
            verify(&kernel).unwrap_or_else(|why| panic!("{p:?}: {why}"));
            let lens: Vec<usize> =
                kernel.inputs().iter().chain(&kernel.outputs()).map(|a| a.len).collect();
            let [a, b, c] = [0, 1, 2].map(|i| Buffer::new(dtype, &random.numbers(lens[i])));
            let want = framed.reference(&a.numbers(), &b.numbers());
            for isa in sets() {
                let inputs = [a.clone(), b.clone()];
                let got = run_on_threads(isa, &kernel, &inputs, std::slice::from_ref(&c));
                let tolerance = if dtype == DType::F32 { 1e-4 } else { 1e-13 };
                assert_close(&got[0].numbers(), &want, tolerance, &format!("{case} {isa:?} {p:?}"));
            }
        }
    }
}

/// All offsets of a list of (size, stride) loops, in order.
fn offsets(loops: impl Iterator<Item = (usize, usize)>) -> Vec<usize> {
    loops.fold(vec![0], |outer, (size, stride)| {
        outer.iter().flat_map(|o| (0..size).map(move |i| o + i * stride)).collect()
    })
}

/// The offset of each element of the result, and those of all factors of its terms, in order.
pub(crate) fn terms(p: &Product) -> Vec<(usize, Vec<[usize; 2]>)> {
    let batch = offsets(p.batch.iter().map(|l| (l.size, l.a)))
        .into_iter()
        .zip(offsets(p.batch.iter().map(|l| (l.size, l.b))))
        .zip(offsets(p.batch.iter().map(|l| (l.size, l.c))));
    let m: Vec<_> = offsets(p.m.iter().map(|l| (l.size, l.a)))
        .into_iter()
        .zip(offsets(p.m.iter().map(|l| (l.size, l.c))))
        .collect();
    let n: Vec<_> = offsets(p.n.iter().map(|l| (l.size, l.b)))
        .into_iter()
        .zip(offsets(p.n.iter().map(|l| (l.size, l.c))))
        .collect();
    let k: Vec<_> = offsets(p.k.iter().map(|l| (l.size, l.a)))
        .into_iter()
        .zip(offsets(p.k.iter().map(|l| (l.size, l.b))))
        .collect();
    let mut all = Vec::new();
    for ((a, b), c) in batch {
        for (ma, mc) in &m {
            for (nb, nc) in &n {
                let terms = k.iter().map(|(ka, kb)| [a + ma + ka, b + nb + kb]).collect();
                all.push((c + mc + nc, terms));
            }
        }
    }
    all
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
pub(crate) fn products_of_random_einsums_match() {
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
pub(crate) fn products_in_one_launch_have_the_bits_of_each_alone() {
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
            parts.push(ProductPart { bias, addend, ..ProductPart::of(a, b, product) });
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

/// A random program over a matrix: what its inputs are, and a store of each of its last values.
fn random_program(random: &mut Random, results: usize, [m, n]: [usize; 2], dtype: DType) -> Rows {
    let mut rows =
        Rows { rows: m, cols: n, dtype, inputs: Vec::new(), instrs: Vec::new(), outputs: vec![] };
    for input in 0..results + random.below(3) {
        let access = match random.below(4) {
            0 if input >= results => Access::per_column(),
            1 if input >= results => Access::per_row(m),
            2 if input >= results => Access::scalar(),
            _ => Access::full(m, n),
        };
        rows.inputs.push(RowInput { dtype, access });
        rows.instrs.push(Instr::Load { input });
    }
    rows.instrs.push(Instr::Const { value: 0.5 });
    for _ in 0..2 + random.below(4) {
        let values = rows.instrs.len();
        let [a, b] = [0, 1].map(|_| random.below(values));
        let unary = [UnaryOp::GeluTanh, UnaryOp::GeluErf, UnaryOp::Silu, UnaryOp::Exp];
        let binary = [BinaryOp::Add, BinaryOp::Mul, BinaryOp::Max, BinaryOp::SiluGrad];
        rows.instrs.push(match random.below(2) {
            0 => Instr::Unary { op: random.pick(&unary), x: a },
            _ => Instr::Binary { op: random.pick(&binary), a, b },
        });
    }
    // What is stored depends on a result, so that it has columns.
    for _ in 0..1 + random.below(2) {
        let last = rows.instrs.len() - 1;
        rows.instrs.push(Instr::Binary { op: BinaryOp::Add, a: random.below(results), b: last });
        let (value, accumulate) = (last + 1, random.below(3) == 0);
        let access = Access::full(m, n);
        rows.outputs.push(Output::Store { value, access, dtype, accumulate });
    }
    rows
}

/// A program on the blocks of one result or of two has the bits that it has in a launch after them.
#[test]
pub(crate) fn programs_on_blocks_have_the_bits_of_a_launch_of_their_own() {
    let mut in_place = 0;
    for case in 0..16 {
        let mut random = Random::new(case);
        let dtype = if case % 2 == 0 { DType::F32 } else { DType::F64 };
        let [m, n, k] = [0; 3].map(|_| {
            let most = random.pick(&[3, 70, 1100]);
            1 + random.below(most)
        });
        let (k, results) = (k.min(1 + 1_000_000 / (m * n)), 1 + random.below(2));
        let rows = random_program(&mut random, results, [m, n], dtype);
        let product =
            Product { accumulate: random.below(4) == 0, ..Product::matrix(m, n, k, dtype) };
        let mut parts: Vec<ProductPart> =
            (0..results).map(|at| ProductPart::of(0, 1 + at, product.clone())).collect();
        parts[results - 1].bias = Some(results + 1);
        let alone: Vec<Kernel> = (0..results)
            .map(|at| {
                let part = ProductPart { a: 0, b: 1, ..parts[at].clone() };
                let bias = part.bias.map(|_| 2);
                Kernel::Products(Products { parts: vec![ProductPart { bias, ..part }] })
            })
            .collect();
        let operands = (results..rows.inputs.len()).map(|at| Source::Operand(at + 2));
        let inputs = (0..results).map(Source::Result).chain(operands).collect();
        parts[results - 1].then = Some(Pointwise { rows: rows.clone(), inputs });
        let kernel = Kernel::Products(Products { parts });
        assert_eq!(verify(&kernel), Ok(()), "{kernel:?}");
        let mut buffers = |arguments: Vec<gantline_kernels::arguments::Argument>| -> Vec<Buffer> {
            arguments.iter().map(|a| Buffer::new(dtype, &random.numbers(a.len))).collect()
        };
        let (inputs, old) = (buffers(kernel.inputs()), buffers(kernel.outputs()));
        for isa in sets() {
            let together = run_on_threads(isa, &kernel, &inputs, &old);
            let mut passed = Vec::new();
            for (at, alone) in alone.iter().enumerate() {
                let operands =
                    [&inputs[0], &inputs[1 + at], &inputs[results + 1]].map(Clone::clone);
                let operands = &operands[..alone.inputs().len()];
                passed.extend(run_on_threads(isa, alone, operands, &old[at..=at]));
            }
            let mut want = passed.clone();
            passed.extend(inputs.iter().skip(results + 2).cloned());
            want.extend(run_on_threads(isa, &Kernel::Rows(rows.clone()), &passed, &old[results..]));
            let same = together.iter().zip(&want).all(|(a, b)| same_bits(a, b));
            assert!(same && together.len() == want.len(), "case {case}, {isa:?}: {kernel:?}");
            let Kernel::Products(mut products) = kernel.clone() else { continue };
            products.parts[results - 1].in_place = true;
            let placed = Kernel::Products(products);
            if verify(&placed).is_ok() {
                // The result is not there, the program's first output is.
                let (mut old, mut want) = (old.clone(), want.clone());
                old.remove(results - 1);
                want.remove(results - 1);
                let found = run_on_threads(isa, &placed, &inputs, &old);
                let same = found.iter().zip(&want).all(|(a, b)| same_bits(a, b));
                assert!(same && found.len() == want.len(), "case {case}, {isa:?}: {placed:?}");
                in_place += 1;
            }
        }
    }
    assert!(in_place >= 3, "only {in_place} results in place");
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
