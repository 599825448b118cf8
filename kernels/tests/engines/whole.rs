//! Kernels of integers of 64 bits against plain arithmetic in 128, on numbers around the ends of
//! 32, 53 and 64 bits.

use gantline_kernels::kernel::{Line, Lines};
use gantline_kernels::verify::verify;
use gantline_kernels::{
    Access, BinaryOp, Digit, Fill, Gather, Instr, Kernel, Offset, Output, ReduceOp, RowInput, Rows,
    UnaryOp,
};
use ir::DType;

use crate::{Buffer, Random, run_on_threads, sets};

const UNARY: [UnaryOp; 7] = [
    UnaryOp::Neg,
    UnaryOp::Abs,
    UnaryOp::Floor,
    UnaryOp::Square,
    UnaryOp::Not,
    UnaryOp::WrapI32,
    UnaryOp::WrapU32,
];

const BINARY: [BinaryOp; 14] = [
    BinaryOp::Add,
    BinaryOp::Sub,
    BinaryOp::Mul,
    BinaryOp::Div,
    BinaryOp::Max,
    BinaryOp::Min,
    BinaryOp::Pow,
    BinaryOp::Lt,
    BinaryOp::Le,
    BinaryOp::Eq,
    BinaryOp::Ge,
    BinaryOp::Gt,
    BinaryOp::And,
    BinaryOp::Or,
];

/// A number at or beside a power of two, a small one, or any.
fn number(random: &mut Random) -> i64 {
    let near = random.below(5) as i64 - 2;
    let power = 1_i64 << random.pick(&[16, 31, 32, 53, 62]);
    match random.below(8) {
        0 | 1 => near,
        2 => power.wrapping_add(near),
        3 => (-power).wrapping_add(near),
        4 => i64::MAX.wrapping_add(near),
        5 => random.below(50) as i64 - 25,
        _ => random.bits() as i64,
    }
}

fn buffer(random: &mut Random, dtype: DType, len: usize) -> Buffer {
    let mut all = |of: fn(i64) -> i64| (0..len).map(|_| of(number(random))).collect::<Vec<i64>>();
    match dtype {
        DType::I64 => Buffer::I64(all(|x| x)),
        DType::I32 => Buffer::I32(all(|x| x).into_iter().map(|x| x as i32).collect()),
        DType::U32 => Buffer::U32(all(|x| x).into_iter().map(|x| x as u32).collect()),
        DType::F32 => Buffer::F32(all(|x| x).into_iter().map(|x| x as f32).collect()),
        DType::F64 => Buffer::F64(all(|x| x).into_iter().map(|x| x as f64).collect()),
        _ => Buffer::Bool(all(|x| x & 1).into_iter().map(|x| x as u8).collect()),
    }
}

/// The elements as integers: towards zero, and to the nearest end.
fn integers(buffer: &Buffer) -> Vec<i64> {
    match buffer {
        Buffer::I64(x) => x.clone(),
        Buffer::I32(x) => x.iter().map(|x| i64::from(*x)).collect(),
        Buffer::U32(x) => x.iter().map(|x| i64::from(*x)).collect(),
        Buffer::F32(x) => x.iter().map(|x| *x as i64).collect(),
        Buffer::F64(x) => x.iter().map(|x| *x as i64).collect(),
        Buffer::Bool(x) => x.iter().map(|x| i64::from(*x)).collect(),
        Buffer::Wide(..) | Buffer::Byte(..) => {
            buffer.numbers().into_iter().map(|x| x as i64).collect()
        }
    }
}

fn unary(op: UnaryOp, x: i64) -> i64 {
    let x = i128::from(x);
    (match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Floor => x,
        UnaryOp::Square => x * x,
        UnaryOp::Not => i128::from(x == 0),
        UnaryOp::WrapI32 => (x + (1 << 31)).rem_euclid(1 << 32) - (1 << 31),
        UnaryOp::WrapU32 => x.rem_euclid(1 << 32),
        other => panic!("{other:?} yields no integers"),
    }) as i64
}

fn binary(op: BinaryOp, a: i64, b: i64) -> i64 {
    let (x, y) = (i128::from(a), i128::from(b));
    (match op {
        BinaryOp::Add => x + y,
        BinaryOp::Sub => x - y,
        BinaryOp::Mul => x * y,
        BinaryOp::Div if y == 0 => 0,
        // The euclidean rest of the same sign as the divisor is that of the rounded-down quotient.
        BinaryOp::Div if y > 0 => x.div_euclid(y),
        BinaryOp::Div => (-x).div_euclid(-y),
        BinaryOp::Max => x.max(y),
        BinaryOp::Min => x.min(y),
        BinaryOp::Pow if y < 0 => match a {
            1 => 1,
            -1 if y % 2 == 0 => 1,
            -1 => -1,
            _ => 0,
        },
        // By Euler's theorem, odd numbers repeat after 2^62 steps, and even ones vanish at 64.
        BinaryOp::Pow if a % 2 == 0 => (0..y.min(64)).fold(1, |p, _| (p * x) as i64 as i128),
        BinaryOp::Pow => {
            let digits = (0..63).rev().map(|at| (y >> at) & 1);
            digits.fold(1, |p, digit| {
                let square = (p * p) as i64 as i128;
                if digit == 1 { (square * x) as i64 as i128 } else { square }
            })
        }
        BinaryOp::Lt => i128::from(x < y),
        BinaryOp::Le => i128::from(x <= y),
        BinaryOp::Eq => i128::from(x == y),
        BinaryOp::Ge => i128::from(x >= y),
        BinaryOp::Gt => i128::from(x > y),
        BinaryOp::And => i128::from(x != 0 && y != 0),
        BinaryOp::Or => i128::from(x != 0 || y != 0),
        other => panic!("{other:?} yields no integers"),
    }) as i64
}

/// All values of all points; row scalars are repeated over their row.
fn interpret(r: &Rows, inputs: &[Buffer]) -> Vec<Vec<i64>> {
    let inputs: Vec<Vec<i64>> = inputs.iter().map(integers).collect();
    let mut values: Vec<Vec<i64>> = Vec::new();
    for instr in &r.instrs {
        let point = |i: usize| {
            let (row, col) = (i / r.cols, i % r.cols);
            match instr {
                Instr::Load { input } => {
                    let access = &r.inputs[*input].access;
                    inputs[*input][access.row_start(row) + col * access.col_stride]
                }
                Instr::Const { value } => *value as i64,
                Instr::Index { row: digits, col_stride, base } => {
                    let digits: usize = digits.iter().map(|d| d.of(row)).sum();
                    base.bound().wrapping_add((digits + col * col_stride) as i64)
                }
                Instr::Unary { op, x } => unary(*op, values[*x][i]),
                Instr::Binary { op, a, b } => binary(*op, values[*a][i], values[*b][i]),
                Instr::Select { condition, a, b } => {
                    values[if values[*condition][i] != 0 { *a } else { *b }][i]
                }
                Instr::Reduce { op, x } => {
                    let line = values[*x][row * r.cols..][..r.cols].iter().copied();
                    match op {
                        ReduceOp::Sum => line.map(i128::from).sum::<i128>() as i64,
                        ReduceOp::Max => line.max().unwrap_or(i64::MIN),
                        ReduceOp::Min => line.min().unwrap_or(i64::MAX),
                    }
                }
                Instr::Random(_) => panic!("integers are no draws"),
            }
        };
        let is_reduce = matches!(instr, Instr::Reduce { .. });
        let mut value: Vec<i64> = Vec::with_capacity(r.rows * r.cols);
        for i in 0..r.rows * r.cols {
            let repeat = is_reduce && i % r.cols > 0;
            value.push(if repeat { value[i - 1] } else { point(i) });
        }
        values.push(value);
    }
    values
}

/// What a buffer becomes when elements of it are written.
fn written(old: &Buffer, places: &[(usize, i64)]) -> Buffer {
    let mut new = old.clone();
    for (at, x) in places {
        match &mut new {
            Buffer::I64(y) => y[*at] = *x,
            Buffer::I32(y) => y[*at] = *x as i32,
            Buffer::U32(y) => y[*at] = *x as u32,
            Buffer::F32(y) => y[*at] = *x as f32,
            Buffer::F64(y) => y[*at] = *x as f64,
            Buffer::Bool(y) => y[*at] = u8::from(*x != 0),
            Buffer::Wide(..) | Buffer::Byte(..) => panic!("integers are stored wide"),
        }
    }
    new
}

fn expected(r: &Rows, inputs: &[Buffer], old: &[Buffer]) -> Vec<Buffer> {
    let (values, vectors) = (interpret(r, inputs), r.vectors());
    let sum = |numbers: &mut dyn Iterator<Item = i64>| numbers.map(i128::from).sum::<i128>();
    let output = |(output, old): (&Output, &Buffer)| match output {
        Output::Store { value, access, .. } => {
            let place = |i: usize| {
                let (row, col) = (i / r.cols, i % r.cols);
                (access.row_start(row) + col * access.col_stride, values[*value][i])
            };
            written(old, &(0..r.rows * r.cols).map(place).collect::<Vec<_>>())
        }
        Output::ColSum { value, accumulate } => {
            let place = |col: usize| {
                let mut column = (0..r.rows).map(|row| values[*value][row * r.cols + col]);
                let start = if *accumulate { integers(old)[col] } else { 0 };
                (col, (i128::from(start) + sum(&mut column)) as i64)
            };
            written(old, &(0..r.cols).map(place).collect::<Vec<_>>())
        }
        Output::TotalSum { value, accumulate } => {
            let step = if vectors[*value] { 1 } else { r.cols };
            let start = if *accumulate { integers(old)[0] } else { 0 };
            let all = sum(&mut values[*value].iter().step_by(step).copied());
            written(old, &[(0, (i128::from(start) + all) as i64)])
        }
    };
    r.outputs.iter().zip(old).map(output).collect()
}

const TYPES: [DType; 6] = [DType::I64, DType::I32, DType::U32, DType::Bool, DType::F32, DType::F64];

fn random_access(random: &mut Random, rows: usize, cols: usize) -> Access {
    match random.below(7) {
        0..3 => Access::full(rows, cols),
        3 => Access::per_row(rows),
        4 => Access::per_column(),
        5 => Access::scalar(),
        _ => {
            let div = 1 + random.below(3);
            let modulus = 1 + random.below(5);
            let row = vec![
                Digit { div, modulus, stride: cols },
                Digit { div: div * modulus, modulus: rows, stride: 3 },
            ];
            Access { row, col_stride: 2, offset: 2 }
        }
    }
}

fn random_rows(random: &mut Random, (rows, cols): (usize, usize)) -> Rows {
    let mut r = Rows {
        rows,
        cols,
        dtype: DType::I64,
        inputs: Vec::new(),
        instrs: Vec::new(),
        outputs: Vec::new(),
    };
    for at in 0..6 + random.below(14) {
        let count = r.instrs.len();
        let any = |random: &mut Random| random.below(count);
        let instr = match random.below(if at < 2 { 1 } else { 9 }) {
            0 => {
                let dtype = if random.below(2) == 0 { DType::I64 } else { random.pick(&TYPES) };
                let access = random_access(random, rows, cols);
                r.inputs.push(RowInput { dtype, access });
                Instr::Load { input: r.inputs.len() - 1 }
            }
            1 => Instr::Const { value: (number(random) >> 11 << 11) as f64 },
            2 => {
                let row = vec![Digit { div: 2, modulus: 7, stride: 1 }];
                Instr::Index {
                    row,
                    col_stride: random.below(2),
                    base: Offset::Fixed(number(random)),
                }
            }
            3 => Instr::Unary { op: random.pick(&UNARY), x: any(random) },
            4 => {
                let [condition, a, b] = [0; 3].map(|_| any(random));
                Instr::Select { condition, a, b }
            }
            5 => {
                let op = random.pick(&[ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min]);
                Instr::Reduce { op, x: any(random) }
            }
            _ => Instr::Binary { op: random.pick(&BINARY), a: any(random), b: any(random) },
        };
        r.instrs.push(instr);
    }
    let vectors = r.vectors();
    for _ in 0..1 + random.below(4) {
        let value = random.below(r.instrs.len());
        let accumulate = random.below(2) == 0;
        r.outputs.push(match random.below(5) {
            0 if vectors[value] => Output::ColSum { value, accumulate },
            1 => Output::TotalSum { value, accumulate },
            other => {
                let strided = vec![Digit { div: 1, modulus: rows, stride: 2 * cols + 1 }];
                let access = match other {
                    2 if !vectors[value] => Access::per_row(rows),
                    3 => Access { row: strided, col_stride: 2, offset: 3 },
                    _ => Access::full(rows, cols),
                };
                let dtype = if random.below(2) == 0 { DType::I64 } else { random.pick(&TYPES) };
                Output::Store { value, access, dtype, accumulate: false }
            }
        });
    }
    r
}

#[test]
pub(crate) fn random_programs_of_integers_are_exact() {
    let shapes = [
        (1, 1),
        (5, 1),
        (3000, 1),
        (40, 2),
        (7, 7),
        (300, 100),
        (3, 1023),
        (2, 1025),
        (2, 9000),
        (1, 40_000),
        (40_000, 1),
    ];
    for case in 0..220 {
        let mut random = Random::new(case);
        let r = random_rows(&mut random, shapes[case as usize % shapes.len()]);
        let kernel = Kernel::Rows(r.clone());
        assert_eq!(verify(&kernel), Ok(()), "{r:#?}");
        let mut buffers = |all: Vec<gantline_kernels::arguments::Argument>| {
            all.iter().map(|a| buffer(&mut random, a.dtype, a.len)).collect::<Vec<_>>()
        };
        let (inputs, old) = (buffers(kernel.inputs()), buffers(kernel.outputs()));
        let isa = random.pick(&sets());
        let got = run_on_threads(isa, &kernel, &inputs, &old);
        assert!(got == expected(&r, &inputs, &old), "{r:#?}");
    }
}

/// An output may take the place of an input that is read at the same points.
#[test]
fn programs_of_integers_may_run_in_place() {
    use gantline_kernels::cpu::Cpu;

    use crate::in_place::run_in_place;
    for (rows, cols) in [(1, 50_000), (3, 2000), (900, 40)] {
        let mut random = Random::new(7);
        let access = Access::full(rows, cols);
        let dtype = DType::I64;
        let r = Rows {
            rows,
            cols,
            dtype,
            inputs: vec![RowInput { dtype, access: access.clone() }],
            instrs: vec![
                Instr::Load { input: 0 },
                Instr::Reduce { op: ReduceOp::Sum, x: 0 },
                Instr::Binary { op: BinaryOp::Mul, a: 0, b: 1 },
            ],
            outputs: vec![Output::Store { value: 2, access, dtype, accumulate: false }],
        };
        let kernel = Kernel::Rows(r.clone());
        assert_eq!(kernel.in_place(), [(0, 0)]);
        let x = buffer(&mut random, dtype, rows * cols);
        let want = expected(&r, std::slice::from_ref(&x), std::slice::from_ref(&x));
        let (inputs, mut outputs) = ([x.clone()], [x]);
        run_in_place(&Cpu::new(2), &kernel, &inputs, &mut outputs, (0, 0));
        assert!(outputs[0] == want[0], "{rows}x{cols}");
    }
}

#[test]
fn programs_of_integers_have_no_fractions() {
    let of = |instr: Instr| {
        Kernel::Rows(Rows {
            rows: 1,
            cols: 1,
            dtype: DType::I64,
            inputs: vec![RowInput { dtype: DType::U32, access: Access::scalar() }],
            instrs: vec![Instr::Load { input: 0 }, instr],
            outputs: vec![Output::Store {
                value: 1,
                access: Access::scalar(),
                dtype: DType::I64,
                accumulate: false,
            }],
        })
    };
    let constant = |value: f64| of(Instr::Const { value });
    for op in UnaryOp::ALL {
        let kernel = of(Instr::Unary { op, x: 0 });
        assert_eq!(verify(&kernel).is_ok(), UNARY.contains(&op), "{op:?}");
    }
    for op in BinaryOp::ALL {
        let kernel = of(Instr::Binary { op, a: 0, b: 0 });
        assert_eq!(verify(&kernel).is_ok(), BINARY.contains(&op), "{op:?}");
    }
    for value in [0.5, f64::NAN, f64::INFINITY, 1e19] {
        assert!(verify(&constant(value)).is_err(), "{value}");
    }
    assert_eq!(verify(&constant(-(63.0_f64.exp2()))), Ok(()));
}

#[test]
pub(crate) fn lines_of_integers_are_exact() {
    for case in 0..120 {
        let mut random = Random::new(case);
        let (outer, extent, inner) =
            (1 + random.below(4), 3 + random.below(9), 1 + random.below(4));
        let (size, stride, dilation) = (2, 1 + random.below(2), 1 + random.below(2));
        let windows = (extent - dilation - 1) / stride + 1;
        let how = random.pick(&[
            Line::Cumulative(ReduceOp::Sum),
            Line::Cumulative(ReduceOp::Max),
            Line::Cumulative(ReduceOp::Min),
            Line::Prod,
            Line::ArgMax,
            Line::Order { descending: false },
            Line::Reverse,
            Line::Pool { op: ReduceOp::Sum, size, stride, dilation },
            Line::Pool { op: ReduceOp::Max, size, stride, dilation },
        ]);
        let result = match how {
            Line::Prod | Line::ArgMax => 1,
            Line::Pool { .. } => windows,
            _ => extent,
        };
        let dtype = random.pick(&[DType::I64, DType::I64, DType::I32, DType::U32]);
        let kernel = Kernel::Lines(Lines { outer, extent, result, inner, how, dtype });
        assert_eq!(verify(&kernel), Ok(()), "{kernel}");
        let x = buffer(&mut random, dtype, outer * extent * inner);
        let old = buffer(&mut random, kernel.outputs()[0].dtype, outer * result * inner);
        let numbers: Vec<i128> = integers(&x).into_iter().map(i128::from).collect();
        let combined = |op: ReduceOp, all: &[i128]| match op {
            ReduceOp::Sum => all.iter().sum(),
            ReduceOp::Max => *all.iter().max().unwrap(),
            ReduceOp::Min => *all.iter().min().unwrap(),
        };
        let mut places = Vec::new();
        for (o, i) in (0..outer).flat_map(|o| (0..inner).map(move |i| (o, i))) {
            let at = |e: usize| (o * extent + e) * inner + i;
            let line: Vec<i128> = (0..extent).map(|e| numbers[at(e)]).collect();
            let mut order: Vec<usize> = (0..extent).collect();
            order.sort_by_key(|e| line[*e]);
            let y = |place: usize| match how {
                Line::Cumulative(op) => combined(op, &line[..=place]) as i64,
                Line::Prod => line.iter().fold(1_i128, |p, x| (p * x) as i64 as i128) as i64,
                Line::ArgMax => {
                    let largest = combined(ReduceOp::Max, &line);
                    line.iter().position(|x| *x == largest).unwrap() as i64
                }
                Line::Order { .. } => order[place] as i64,
                Line::Pool { op, .. } => {
                    let taps = [0, 1].map(|tap| line[place * stride + tap * dilation]);
                    combined(op, &taps) as i64
                }
                _ => line[extent - 1 - place] as i64,
            };
            places.extend((0..result).map(|p| ((o * result + p) * inner + i, y(p))));
        }
        let want = written(&old, &places);
        let got = run_on_threads(sets()[0], &kernel, &[x], &[old]);
        assert!(got[0] == want, "{kernel}");
    }
}

#[test]
fn look_ups_of_integers_and_truths_are_exact() {
    for case in 0..60 {
        let mut random = Random::new(case);
        let (rows, width, count) = (1 + random.below(9), 1 + random.below(6), random.below(90));
        let (base, outer) = (random.below(4), 1 + random.below(3));
        let accumulate = random.below(2) == 0;
        let dtype = random.pick(&[DType::I64, DType::I32, DType::U32, DType::Bool]);
        let first = Offset::Fixed(base as i64);
        let g = Gather { outer, rows, base: first, width, count, accumulate, dtype };
        let ids: Vec<i32> = (0..count).map(|_| random.below(rows + 6) as i32 - 1).collect();
        let table = buffer(&mut random, dtype, outer * rows * width);
        let source = buffer(&mut random, dtype, outer * count * width);
        let (t, s) = (integers(&table), integers(&source));
        let place = |i: usize| {
            let row = usize::try_from(ids[i / width % count]).ok()?.checked_sub(base)?;
            (row < rows).then(|| (i / width / count * rows + row) * width + i % width)
        };
        let all = || 0..outer * count * width;
        let element = |i: usize| (i, place(i).map_or(0, |at| t[at]));
        let want = written(&source, &all().map(element).collect::<Vec<_>>());
        let ids = Buffer::I32(ids.clone());
        let run = |kernel: Kernel, inputs: &[Buffer], old: &Buffer| {
            assert_eq!(verify(&kernel), Ok(()), "{kernel}");
            run_on_threads(sets()[0], &kernel, inputs, std::slice::from_ref(old)).remove(0)
        };
        let got = run(Kernel::Gather(g.clone()), &[table.clone(), ids.clone()], &source);
        assert!(got == want, "gather of {dtype}");
        let inputs = [ids, source.clone()];
        let moved: Vec<(usize, i64)> = all().filter_map(|i| Some((place(i)?, s[i]))).collect();
        let got = run(Kernel::Replace(g.clone()), &inputs, &table);
        assert!(got == written(&table, &moved), "replace of {dtype}");
        if dtype != DType::Bool {
            let mut sums = if accumulate { t.clone() } else { vec![0; t.len()] };
            moved.iter().for_each(|(at, x)| sums[*at] = sums[*at].wrapping_add(*x));
            let sums: Vec<(usize, i64)> = sums.into_iter().enumerate().collect();
            let got = run(Kernel::ScatterAdd(g), &inputs, &table);
            assert!(got == written(&table, &sums), "scatter of {dtype}");
        }
    }
}

#[test]
fn fills_hold_integers_of_64_bits() {
    for (value, want) in [(-(63.0_f64.exp2()), i64::MIN), (63.0_f64.exp2(), i64::MAX), (3.0, 3)] {
        let kernel = Kernel::Fill(Fill { len: 2, value, dtype: DType::I64 });
        assert_eq!(verify(&kernel), Ok(()));
        let got = run_on_threads(sets()[0], &kernel, &[], &[Buffer::I64(vec![5; 3])]);
        assert!(got[0] == Buffer::I64(vec![want, want, 5]), "{value}");
    }
}
