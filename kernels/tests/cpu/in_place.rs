//! Inputs and outputs that may be one buffer.

use gantline_kernels::cpu::{Cpu, View, ViewMut};
use gantline_kernels::verify::verify;
use gantline_kernels::{Access, BinaryOp, Digit, Instr, Kernel, Output, RowInput, Rows};
use ir::DType;

use crate::{Buffer, Random, run, same_bits};

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
fn random_rows(random: &mut Random) -> Rows {
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

/// One buffer for an input and an output is allowed only where both use the same elements, and then
/// changes nothing.
#[test]
fn what_may_be_one_buffer_gives_the_same_bits() {
    let (mut allowed, mut refused) = (0, 0);
    let cpu = Cpu::new(1);
    for case in 0..400 {
        let mut random = Random::new(case);
        let r = random_rows(&mut random);
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
                let mut views: Vec<View> = inputs.iter().map(Buffer::view).collect();
                let targets: Vec<ViewMut> = old.iter_mut().map(Buffer::view_mut).collect();
                // SAFETY: the buffer outlives the launch and is used by nothing else.
                views[i] = unsafe { View::from_raw(targets[o].as_ptr(), targets[o].len()) };
                cpu.execute(&kernel, &views, &targets);
                drop(targets);
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
