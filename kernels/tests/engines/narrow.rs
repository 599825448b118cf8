//! Kernels over narrow types against themselves in F32: a launch gives what that of the widened
//! operands gives, rounded once, bit for bit. That those are right is what the other tests say.

use gantline_kernels::cpu::Isa;
use gantline_kernels::verify::verify;
use gantline_kernels::{
    Access, Attention, Instr, Kernel, Output, Positions, Product, Rope, RowInput, Rows,
    StoredTypes, UnaryOp,
};
use ir::DType;
use ir::formats::{nearest, tf32};
use ir::op::Operands;

use crate::attention::{document_input, key_input, random_attention, random_bias, random_packed};
use crate::product::{Framed, random_product};
use crate::rows::random_rows;
use crate::{Buffer, Random, run_on_threads, sets};

/// The type in place of a narrow one.
fn wide(dtype: DType) -> DType {
    if dtype.is_narrow() { DType::F32 } else { dtype }
}

fn widened(dtype: DType, buffer: &Buffer) -> Buffer {
    if dtype.is_narrow() { Buffer::new(DType::F32, &buffer.numbers()) } else { buffer.clone() }
}

/// Random contents of the arguments that `of` does not say.
fn random_buffers(
    random: &mut Random,
    arguments: &[gantline_kernels::arguments::Argument],
) -> Vec<Buffer> {
    arguments.iter().map(|a| Buffer::new(a.dtype, &random.numbers(a.len))).collect()
}

/// Runs a kernel and the same in F32, and compares.
fn compare(isa: Isa, kernels: [&Kernel; 2], inputs: &[Buffer], old: &[Buffer]) {
    let [narrow, single] = kernels;
    for kernel in kernels {
        verify(kernel).unwrap_or_else(|why| panic!("{kernel:?}: {why}"));
    }
    let widen = |buffers: &[Buffer], arguments: &[gantline_kernels::arguments::Argument]| {
        buffers.iter().zip(arguments).map(|(b, a)| widened(a.dtype, b)).collect::<Vec<_>>()
    };
    let found = run_on_threads(isa, narrow, inputs, old);
    let want = run_on_threads(
        isa,
        single,
        &widen(inputs, &narrow.inputs()),
        &widen(old, &narrow.outputs()),
    );
    for (at, argument) in narrow.outputs().iter().enumerate() {
        let dtype = argument.dtype;
        let want = want[at].numbers().into_iter();
        for (i, (found, want)) in found[at].numbers().into_iter().zip(want).enumerate() {
            let want = if dtype.is_narrow() { nearest(dtype, want) } else { want };
            let same = found.to_bits() == want.to_bits() || found.is_nan() && want.is_nan();
            assert!(same, "output {at}[{i}] is {found}, not {want}, on {isa:?}: {narrow:?}");
        }
    }
}

const RESULTS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const OPERANDS: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2];

fn random_stored(random: &mut Random) -> StoredTypes {
    StoredTypes { a: random.pick(&OPERANDS), b: random.pick(&OPERANDS), c: random.pick(&RESULTS) }
}

fn single(p: &Product) -> Product {
    Product { stored: StoredTypes::all(DType::F32), ..p.clone() }
}

#[test]
fn products_are_those_of_f32_rounded() {
    for case in 0..120 {
        let mut random = Random::new(case);
        let mut p = random_product(&mut random, DType::F32);
        match case % 4 {
            // Few rows, which read the second operand in place; many, of which there are strips.
            1 => {
                let (m, n, k) = (1 + random.below(5), 1 + random.below(200), random.below(600));
                p = Product::matrix(m, n, k, DType::F32);
            }
            2 => {
                let (n, k) = (1 + random.below(70), 200 + random.below(200));
                p = Product::matrix(500 + random.below(700), n, k, DType::F32);
                if random.below(2) == 0 {
                    (p.n[0].b, p.k[0].b) = (k, 1);
                }
            }
            3 => p = Framed::random(&mut random).product(DType::F32),
            _ => {}
        }
        p.stored = random_stored(&mut random);
        p.accumulate &= p.stored.c == DType::F32;
        let kernel = Kernel::Product(p.clone());
        let (inputs, old) = (
            random_buffers(&mut random, &kernel.inputs()),
            random_buffers(&mut random, &kernel.outputs()),
        );
        for isa in sets().into_iter().filter(|isa| !crate::pairs::is_paired(*isa, &p)) {
            compare(isa, [&kernel, &Kernel::Product(single(&p))], &inputs, &old);
        }
    }
}

/// Products of TF32 are those of operands that were rounded before, bit for bit.
#[test]
fn products_of_tf32_are_those_of_rounded_operands() {
    for case in 0..60 {
        let mut random = Random::new(case);
        let mut p = random_product(&mut random, DType::F32);
        if case % 2 == 1 {
            let (m, n, k) = (1 + random.below(90), 1 + random.below(200), random.below(600));
            p = Product::matrix(m, n, k, DType::F32);
            p.accumulate = random.below(2) == 0;
        }
        let exact = Kernel::Product(p.clone());
        let kernel = Kernel::Product(Product { operands: Operands::Tf32, ..p });
        let inputs = random_buffers(&mut random, &kernel.inputs());
        let old = random_buffers(&mut random, &kernel.outputs());
        let round = |buffer: &Buffer| {
            let numbers = buffer.numbers().into_iter().map(|x| f64::from(tf32(x as f32)));
            Buffer::new(DType::F32, &numbers.collect::<Vec<_>>())
        };
        let rounded: Vec<Buffer> = inputs.iter().map(round).collect();
        verify(&kernel).unwrap_or_else(|why| panic!("{kernel:?}: {why}"));
        for isa in sets() {
            let found = run_on_threads(isa, &kernel, &inputs, &old);
            let want = run_on_threads(isa, &exact, &rounded, &old);
            assert_eq!(found, want, "on {isa:?}: {kernel:?}");
        }
    }
}

#[test]
fn powers_of_two_are_found_below_all_numbers() {
    let smallest = f32::from_bits(1);
    let numbers = [0.0, -0.0, smallest, -3.0 * smallest, f32::MIN_POSITIVE, 0.75, -1.0, 447.9];
    let found = [0.0, -0.0, smallest, -2.0 * smallest, f32::MIN_POSITIVE, 0.5, -1.0, 256.0];
    let mut numbers: Vec<f64> = numbers.map(f64::from).to_vec();
    numbers.extend([f64::from(f32::MAX), f64::INFINITY, f64::NEG_INFINITY, f64::NAN]);
    let mut expected: Vec<f64> = found.map(f64::from).to_vec();
    expected.extend([2.0_f64.powi(127), f64::INFINITY, f64::NEG_INFINITY, f64::NAN]);
    for dtype in [DType::F32, DType::F64] {
        let access = || Access::full(1, numbers.len());
        let kernel = Kernel::Rows(Rows {
            rows: 1,
            cols: numbers.len(),
            dtype,
            inputs: vec![RowInput { dtype, access: access() }],
            instrs: vec![Instr::Load { input: 0 }, Instr::Unary { op: UnaryOp::PowerFloor, x: 0 }],
            outputs: vec![Output::Store { value: 1, access: access(), dtype, accumulate: false }],
        });
        let (inputs, old) = ([Buffer::new(dtype, &numbers)], [Buffer::new(dtype, &numbers)]);
        for isa in sets() {
            let found = run_on_threads(isa, &kernel, &inputs, &old)[0].numbers();
            let same = |(found, want): (&f64, &f64)| {
                found.to_bits() == want.to_bits() || found.is_nan() && want.is_nan()
            };
            assert!(found.iter().zip(&expected).all(same), "{found:?}, not {expected:?}, {isa:?}");
        }
    }
}

#[test]
fn attention_is_that_of_f32_rounded() {
    for case in 0..40 {
        let mut random = Random::new(case);
        let dtype = random.pick(&[DType::BF16, DType::F16]);
        let draw = if case % 4 == 2 { random_packed } else { random_attention };
        let mut a = draw(&mut random, dtype);
        if case % 4 == 3 {
            (a.position, a.dropout, a.causal) = (true, None, true);
            let few = 1 + random.below(6);
            if a.bias.is_none_or(|strides| strides[2] == 0) {
                a.queries = a.queries.min(few);
            }
        }
        let kernels = [a.clone(), Attention { dtype: DType::F32, ..a.clone() }];
        let [narrow, single] = kernels.clone().map(Kernel::Attention);
        let mut inputs = random_buffers(&mut random, &narrow.inputs()[..3]);
        inputs.extend(a.bias.map(|_| Buffer::new(dtype, &random_bias(&a, &mut random))));
        inputs.extend(document_input(&a));
        inputs.extend(key_input(&a));
        let positions = (0..a.batch).map(|_| random.below(a.keys) as i32).collect();
        inputs.extend(a.position.then_some(Buffer::I32(positions)));
        let old = random_buffers(&mut random, &narrow.outputs());
        // Those of pairs are others, and compared with the materialised scores.
        let is_paired = dtype == DType::BF16 && a.window == 0 && !a.position;
        let is_other = |isa: &Isa| !(is_paired && matches!(isa, Isa::Amx | Isa::Avx512Bf16));
        for isa in sets().into_iter().filter(is_other) {
            compare(isa, [&narrow, &single], &inputs, &old);
            if a.position {
                continue;
            }
            let forward = run_on_threads(isa, &narrow, &inputs, &old);
            let operands = 3 + usize::from(a.bias.is_some()) + usize::from(a.documents.is_some());
            let rest = inputs.split_off(operands);
            inputs.extend(forward);
            let [dout] = &random_buffers(&mut random, &narrow.outputs()[..1])[..] else { return };
            inputs.push(dout.clone());
            inputs.extend(rest.clone());
            for bias_grad in [false, a.bias.is_some()] {
                let [narrow, single] =
                    kernels.clone().map(|a| Kernel::AttentionBwd(Attention { bias_grad, ..a }));
                let old = random_buffers(&mut random, &narrow.outputs());
                compare(isa, [&narrow, &single], &inputs, &old);
            }
            inputs.truncate(operands);
            inputs.extend(rest);
        }
    }
}

#[test]
fn rotary_embedding_is_that_of_f32_rounded() {
    for case in 0..24 {
        let mut random = Random::new(case);
        let (batch, seq, heads) = (1 + random.below(2), 1 + random.below(9), 1 + random.below(3));
        let dim = 2 * (1 + random.below(40));
        let wide = heads + random.below(2);
        let layout = [seq * wide * dim, wide * dim, dim];
        let rope = |dtype: DType| {
            Kernel::Rope(Rope {
                batch,
                seq,
                heads,
                dim,
                frequencies: (0..dim / 2).map(|i| 0.7_f64.powi(i as i32)).collect(),
                positions: Positions::From(3),
                inverse: case % 2 == 0,
                gain: 1.25,
                dtype,
                x: layout,
                y: layout,
            })
        };
        for dtype in [DType::BF16, DType::F16] {
            let kernel = rope(dtype);
            let inputs = random_buffers(&mut random, &kernel.inputs());
            let old = random_buffers(&mut random, &kernel.outputs());
            for isa in sets() {
                compare(isa, [&kernel, &rope(DType::F32)], &inputs, &old);
            }
        }
    }
}

/// Random programs whose arguments are of random types.
#[test]
fn programs_are_those_of_f32_rounded() {
    let shapes =
        [(1, 1), (5, 1), (300, 1), (40, 2), (7, 7), (33, 16), (64, 33), (9, 768), (2, 1537)];
    for case in 0..180 {
        let mut random = Random::new(5000 + case);
        let shape = shapes[case as usize % shapes.len()];
        let mut narrow = random_rows(&mut random, DType::F32, shape, false);
        let is_key = |r: &Rows, at: usize| {
            r.instrs.iter().any(|i| matches!(i, gantline_kernels::Instr::Random(d) if d.key == at))
        };
        for at in 0..narrow.inputs.len() {
            if !is_key(&narrow, at) && random.below(2) == 0 {
                narrow.inputs[at].dtype = random.pick(&OPERANDS);
            }
        }
        for output in &mut narrow.outputs {
            if let Output::Store { dtype, accumulate, .. } = output
                && random.below(3) > 0
            {
                // What is added to is no number of 8 bits.
                let sums = [DType::BF16, DType::F16];
                *dtype = random.pick(if *accumulate { &sums[..] } else { &OPERANDS[..] });
            }
        }
        let mut single = narrow.clone();
        single.inputs.iter_mut().for_each(|input| input.dtype = wide(input.dtype));
        for output in &mut single.outputs {
            if let Output::Store { dtype, .. } = output {
                *dtype = wide(*dtype);
            }
        }
        let (inputs, old) = crate::rows::buffers(&mut random, &narrow);
        let isa = random.pick(&sets());
        compare(isa, [&Kernel::Rows(narrow), &Kernel::Rows(single)], &inputs, &old);
    }
}
