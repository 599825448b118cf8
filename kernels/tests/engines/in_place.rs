//! Inputs and outputs that may be one buffer.

use gantline_kernels::cpu::{Cpu, Isa, View, ViewMut};
use gantline_kernels::verify::verify;
use gantline_kernels::{Access, BinaryOp, Digit, Instr, Kernel, Output, RowInput, Rows};
use ir::DType;

use crate::rows::{buffers, random_rows};
use crate::{Buffer, Random, run, run_on_threads, same_bits};

/// An access to `[a, b, cols]`, whose dims lie in one of a few orders.
fn access(random: &mut Random, [a, b, cols]: [usize; 3]) -> Access {
    let (outer, inner, col_stride) =
        random.pick(&[(b * cols, cols, 1), (cols, a * cols, 1), (b, 1, a * b), (1, a, a * b)]);
    let split = vec![
        Digit { div: b, modulus: a, stride: outer },
        Digit { div: 1, modulus: b, stride: inner },
    ];
    // Rows that lie one after the other may be one digit.
    let whole = vec![Digit { div: 1, modulus: a * b, stride: inner }];
    let is_one = outer == b * inner && random.below(2) == 0;
    Access { row: if is_one { whole } else { split }, col_stride, offset: random.below(2) }
}

/// Twice its input, and something else that reads nothing of it.
fn random_copies(random: &mut Random) -> Rows {
    let sizes = [0; 3].map(|_| 2 + random.below(5));
    let [a, b, cols] = sizes;
    let dtype = DType::F32;
    let of = random.pick(&[dtype, dtype, DType::I32, DType::F64]);
    let store = |access, value| Output::Store { value, access, dtype, accumulate: false };
    Rows {
        rows: a * b,
        cols,
        dtype,
        inputs: vec![
            RowInput { dtype, access: access(random, sizes) },
            RowInput { dtype: of, access: access(random, sizes) },
        ],
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Load { input: 1 },
            Instr::Binary { op: BinaryOp::Add, a: 0, b: 1 },
        ],
        outputs: vec![store(access(random, sizes), 2), store(access(random, sizes), 0)],
    }
}

/// Whether two accesses use one element at each point.
fn is_alike(r: &Rows, a: &Access, b: &Access) -> bool {
    let element = |x: &Access, row: usize, col: usize| x.row_start(row) + col * x.col_stride;
    let points = (0..r.rows).flat_map(|row| (0..r.cols).map(move |col| (row, col)));
    points.into_iter().all(|(row, col)| element(a, row, col) == element(b, row, col))
}

/// Runs a kernel where output `pair.1` is input `pair.0`.
pub(crate) fn run_in_place(
    cpu: &Cpu,
    kernel: &Kernel,
    inputs: &[Buffer],
    outputs: &mut [Buffer],
    pair: (usize, usize),
) {
    let mut views: Vec<View> = inputs.iter().map(Buffer::view).collect();
    let targets: Vec<ViewMut> = outputs.iter_mut().map(Buffer::view_mut).collect();
    let target = &targets[pair.1];
    // SAFETY: the buffer outlives the launch and is used by nothing else.
    views[pair.0] = unsafe { View::from_raw(target.as_ptr(), target.len()) };
    cpu.execute(kernel, &views, &targets);
}

/// One buffer for an input and an output is allowed only where both use the same elements, and then
/// changes nothing.
#[test]
fn what_may_be_one_buffer_gives_the_same_bits() {
    let (mut allowed, mut refused) = (0, 0);
    let cpu = Cpu::new(1);
    for case in 0..400 {
        let mut random = Random::new(case);
        let r = random_copies(&mut random);
        let kernel = Kernel::Rows(r.clone());
        assert_eq!(verify(&kernel), Ok(()), "{kernel:?}");
        // All buffers are as long as the longest, so that any two can be one.
        let arguments = [kernel.inputs(), kernel.outputs()];
        let len = arguments.iter().flatten().map(|a| a.len).max().unwrap_or(0);
        let inputs: Vec<Buffer> =
            arguments[0].iter().map(|a| Buffer::new(a.dtype, &random.numbers(len))).collect();
        for (i, input) in r.inputs.iter().enumerate() {
            for (o, output) in r.outputs.iter().enumerate() {
                let Output::Store { access, dtype, .. } = output else { continue };
                let is_same = is_alike(&r, access, &input.access);
                let may_be = kernel.in_place().contains(&(i, o));
                assert!(!may_be || is_same && dtype.size() == input.dtype.size(), "{kernel:?}");
                refused += usize::from(!is_same);
                if !may_be || input.dtype != *dtype {
                    continue;
                }
                allowed += 1;
                let mut old = vec![Buffer::new(*dtype, &vec![0.5; len]); 2];
                old[o] = inputs[i].clone();
                let want = run(&cpu, &kernel, &inputs, &old);
                run_in_place(&cpu, &kernel, &inputs, &mut old, (i, o));
                let same = old.iter().zip(&want).all(|(found, want)| same_bits(found, want));
                assert!(same, "input {i} as output {o} of {kernel:?}");
            }
        }
    }
    assert!(allowed > 100 && refused > 100, "{allowed} allowed, {refused} refused");
}

/// What all columns read is read for each of them, which may be after one was written: it is no
/// place to write.
#[test]
fn what_is_read_again_is_no_place_to_write() {
    let dtype = DType::F32;
    for cols in [1, 2, 70_000] {
        let output = |access| Output::Store { value: 1, access, dtype, accumulate: false };
        let rows = Rows {
            rows: 3,
            cols,
            dtype,
            inputs: vec![RowInput { dtype, access: Access::per_row(3) }],
            instrs: vec![Instr::Load { input: 0 }, Instr::Binary { op: BinaryOp::Mul, a: 0, b: 0 }],
            outputs: vec![output(Access::per_row(3)), output(Access::full(3, cols))],
        };
        let kernel = Kernel::Rows(rows);
        assert_eq!(verify(&kernel), Ok(()), "{kernel:?}");
        assert_eq!(kernel.in_place().contains(&(0, 0)), cols == 1, "{kernel:?}");
    }
}

/// A program gives the same bits in place as out of place, on any number of threads.
#[test]
fn work_in_place_gives_the_same_bits() {
    let mut tried = 0;
    for case in 0..60 {
        let mut random = Random::new(case);
        let dtype = random.pick(&[DType::F32, DType::F64]);
        let shape = random.pick(&[(1, 5000), (40, 33), (5, 768), (2, 9000), (700, 1)]);
        let mut r = random_rows(&mut random, dtype, shape, false);
        r.inputs[0] = RowInput { dtype, access: Access::full(shape.0, shape.1) };
        r.instrs[0] = Instr::Load { input: 0 };
        let value = r.vectors().iter().rposition(|&v| v).expect("the first value is a vector");
        let access = Access::full(shape.0, shape.1);
        r.outputs
            .insert(0, Output::Store { value, access: access.clone(), dtype, accumulate: false });
        // The old numbers, elsewhere: they must be read before they are overwritten.
        r.outputs.push(Output::Store { value: 0, access, dtype, accumulate: false });
        let (inputs, mut old) = buffers(&mut random, &r);
        old[0] = inputs[0].clone();
        let isa = Isa::detect();
        // What was a number of each row may be one of each column now, which has no place.
        let vectors = r.vectors();
        let has_place = |output: &Output| match output {
            Output::Store { value, access, .. } => !vectors[*value] || access.col_stride != 0,
            Output::ColSum { .. } | Output::TotalSum { .. } => true,
        };
        if !r.outputs.iter().all(has_place) {
            continue;
        }
        let kernel = Kernel::Rows(r);
        tried += 1;
        let want = run_on_threads(isa, &kernel, &inputs, &old);
        for threads in [1, 2] {
            let mut outputs = old.clone();
            let cpu = Cpu::with_isa(threads, isa);
            run_in_place(&cpu, &kernel, &inputs, &mut outputs, (0, 0));
            for (i, (got, want)) in outputs.iter().zip(&want).enumerate() {
                assert!(same_bits(got, want), "output {i} on {threads} threads of {kernel:#?}");
            }
        }
    }
    assert!(tried >= 40, "{tried} programs");
}
