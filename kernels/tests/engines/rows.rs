//! Block programs against a scalar interpreter of the same instructions.

use gantline_kernels::cpu::{Cpu, Isa, ViewMut};
use gantline_kernels::{
    Access, BinaryOp, Digit, Draw, Instr, Kernel, Offset, Output, ReduceOp, RowInput, Rows, UnaryOp,
};
use ir::DType;
use ir::formats::nearest;
use ir::random::{DrawBits, Key};

use crate::{Buffer, Random, assert_close, run_on_threads, sets};

const KEY: [u32; 4] = [3, 1, 4, 15];
/// `2^32`.
const TURN: f64 = 4_294_967_296.0;

fn erf(x: f64) -> f64 {
    // Simpson's rule on 400 intervals: the error is below 1e-11 on [-7, 7].
    let (n, t) = (400, x.clamp(-7.0, 7.0));
    let f = |i: usize| (-(t * i as f64 / f64::from(n)).powi(2)).exp();
    let sum: f64 = (0..n as usize / 2).map(|i| f(2 * i) + 4.0 * f(2 * i + 1) + f(2 * i + 2)).sum();
    std::f64::consts::FRAC_2_SQRT_PI * t / f64::from(n) / 3.0 * sum
}

fn unary(op: UnaryOp, x: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Exp => x.exp(),
        UnaryOp::Log => x.ln(),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Recip => 1.0 / x,
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Erf => erf(x),
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Floor => x.floor(),
        UnaryOp::PowerFloor if x == 0.0 => x,
        UnaryOp::PowerFloor => x.abs().log2().floor().exp2().copysign(x),
        UnaryOp::Sigmoid => sigmoid(x),
        UnaryOp::Square => x * x,
        UnaryOp::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        }
        UnaryOp::GeluErf => 0.5 * x * (1.0 + erf(x / 2_f64.sqrt())),
        UnaryOp::Silu => x * sigmoid(x),
        UnaryOp::Not => f64::from(u8::from(x == 0.0)),
        UnaryOp::WrapI32 => x - TURN * (x / TURN + 0.5).floor(),
        UnaryOp::WrapU32 => x - TURN * (x / TURN).floor(),
        UnaryOp::Single => f64::from(x as f32),
        UnaryOp::RoundBF16 => nearest(DType::BF16, x),
        UnaryOp::RoundF16 => nearest(DType::F16, x),
        UnaryOp::RoundF8E4M3 => nearest(DType::F8E4M3, x),
        UnaryOp::RoundF8E5M2 => nearest(DType::F8E5M2, x),
    }
}

/// The derivative of a smooth function.
fn slope(op: UnaryOp, x: f64) -> f64 {
    let h = 1e-3;
    let central = |h: f64| (unary(op, x + h) - unary(op, x - h)) / (2.0 * h);
    // Richardson, twice.
    let (a, b, c) = (central(h), central(h / 2.0), central(h / 4.0));
    let (ab, bc) = ((4.0 * b - a) / 3.0, (4.0 * c - b) / 3.0);
    (16.0 * bc - ab) / 15.0
}

fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

fn binary(op: BinaryOp, a: f64, b: f64) -> f64 {
    let truth = |t: bool| f64::from(u8::from(t));
    match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a * b,
        BinaryOp::Div => a / b,
        BinaryOp::Max => larger(a, b),
        BinaryOp::Min => -larger(-a, -b),
        BinaryOp::Pow => a.powf(b),
        BinaryOp::Lt => truth(a < b),
        BinaryOp::Le => truth(a <= b),
        BinaryOp::Eq => truth(a == b),
        BinaryOp::Ge => truth(a >= b),
        BinaryOp::Gt => truth(a > b),
        BinaryOp::And => truth(a != 0.0 && b != 0.0),
        BinaryOp::Or => truth(a != 0.0 || b != 0.0),
        BinaryOp::GeluTanhGrad => b * slope(UnaryOp::GeluTanh, a),
        BinaryOp::GeluErfGrad => b * slope(UnaryOp::GeluErf, a),
        BinaryOp::SiluGrad => b * slope(UnaryOp::Silu, a),
    }
}

/// All values of all points; row scalars are repeated over their row.
fn interpret(r: &Rows, inputs: &[Buffer]) -> Vec<Vec<f64>> {
    let inputs: Vec<Vec<f64>> = inputs.iter().map(Buffer::numbers).collect();
    let digits = |digits: &[Digit], i: usize| digits.iter().map(|d| d.of(i)).sum::<usize>();
    let mut values: Vec<Vec<f64>> = Vec::new();
    for instr in &r.instrs {
        let point = |i: usize| {
            let (row, col) = (i / r.cols, i % r.cols);
            match instr {
                Instr::Load { input } => {
                    let access = &r.inputs[*input].access;
                    inputs[*input][access.row_start(row) + col * access.col_stride]
                }
                Instr::Const { value } => *value,
                Instr::Index { row: d, col_stride, base } => {
                    (base.bound() + (digits(d, row) + col * col_stride) as i64) as f64
                }
                Instr::Unary { op, x } => unary(*op, values[*x][i]),
                Instr::Binary { op, a, b } => binary(*op, values[*a][i], values[*b][i]),
                Instr::Select { condition, a, b } => {
                    if values[*condition][i] != 0.0 {
                        values[*a][i]
                    } else {
                        values[*b][i]
                    }
                }
                Instr::Reduce { op, x } => {
                    let line = values[*x][row * r.cols..(row + 1) * r.cols].iter().copied();
                    match op {
                        ReduceOp::Sum => line.sum(),
                        ReduceOp::Max => line.fold(f64::NEG_INFINITY, larger),
                        ReduceOp::Min => line.fold(f64::INFINITY, |a, b| -larger(-a, -b)),
                    }
                }
                Instr::Random(d) => {
                    let key = Key::from_words(KEY);
                    let sample = u64::from(key.sample) * d.sample_stride;
                    let index = (digits(&d.row, row) + digits(&d.col, col)) as u64;
                    let index = d.offset.bound() as u64 * d.unit + sample + index;
                    f64::from(d.bits.uniform(key.stream(d.salt), index))
                }
            }
        };
        // A reduction is the same for all points of its row.
        let is_reduce = matches!(instr, Instr::Reduce { .. });
        let mut value: Vec<f64> = Vec::with_capacity(r.rows * r.cols);
        for i in 0..r.rows * r.cols {
            let repeat = is_reduce && i % r.cols > 0;
            value.push(if repeat { value[i - 1] } else { point(i) });
        }
        values.push(value);
    }
    values
}

fn expected(r: &Rows, inputs: &[Buffer], old: &[Buffer]) -> Vec<Vec<f64>> {
    let values = interpret(r, inputs);
    let vectors = r.vectors();
    let mut results = Vec::new();
    for (output, old) in r.outputs.iter().zip(old) {
        let mut result = old.numbers();
        match output {
            Output::Store { value, access, dtype, accumulate } => {
                for i in 0..r.rows * r.cols {
                    let (row, col) = (i / r.cols, i % r.cols);
                    let element = access.row_start(row) + col * access.col_stride;
                    let x = match dtype {
                        DType::I32 | DType::U32 => values[*value][i].trunc(),
                        DType::Bool => f64::from(u8::from(values[*value][i] != 0.0)),
                        _ => values[*value][i],
                    };
                    result[element] = if *accumulate { old.numbers()[element] + x } else { x };
                }
            }
            Output::ColSum { value, accumulate } => {
                for (c, sum) in result.iter_mut().enumerate().take(r.cols) {
                    let total: f64 = (0..r.rows).map(|row| values[*value][row * r.cols + c]).sum();
                    *sum = total + if *accumulate { *sum } else { 0.0 };
                }
            }
            Output::TotalSum { value, accumulate } => {
                let step = if vectors[*value] { 1 } else { r.cols };
                let total: f64 = values[*value].iter().step_by(step).sum();
                result[0] = total + if *accumulate { result[0] } else { 0.0 };
            }
        }
        results.push(result);
    }
    results
}

/// Writes random programs whose numbers stay small and away from poles.
struct Writer<'a> {
    random: &'a mut Random,
    rows: Rows,
    /// Largest magnitude of each value.
    bounds: Vec<f64>,
    /// No operation that turns rounding into more than a rounding.
    smooth: bool,
}

impl Writer<'_> {
    fn push(&mut self, instr: Instr, bound: f64) -> usize {
        self.rows.instrs.push(instr);
        self.bounds.push(bound);
        let value = self.bounds.len() - 1;
        if bound > 8.0 {
            return self.push(Instr::Unary { op: UnaryOp::Tanh, x: value }, 1.0);
        }
        value
    }

    fn value(&mut self) -> usize {
        self.random.below(self.bounds.len())
    }

    fn access(&mut self) -> Access {
        let (r, c) = (self.rows.rows, self.rows.cols);
        match self.random.below(8) {
            0..3 => Access::full(r, c),
            3 => Access::per_row(r),
            4 => Access::per_column(),
            5 => Access::scalar(),
            6 => {
                let div = 1 + self.random.below(3);
                let modulus = 1 + self.random.below(5);
                let row = vec![
                    Digit { div, modulus, stride: c },
                    Digit { div: div * modulus, modulus: r, stride: 3 },
                ];
                Access { row, col_stride: 1, offset: 2 }
            }
            _ => {
                let row = vec![Digit { div: 1, modulus: r, stride: 2 * c + 1 }];
                Access { row, col_stride: 2, offset: 1 }
            }
        }
    }

    fn load(&mut self) {
        let dtype = match self.random.below(5) {
            0 => self.random.pick(&[
                DType::I32,
                DType::U32,
                DType::Bool,
                DType::F32,
                DType::F64,
                DType::BF16,
                DType::F16,
                DType::F8E4M3,
                DType::F8E5M2,
            ]),
            _ => self.rows.dtype,
        };
        let access = self.access();
        self.rows.inputs.push(RowInput { dtype, access });
        let bound = if matches!(dtype, DType::I32 | DType::U32) { 100.0 } else { 1.0 };
        self.push(Instr::Load { input: self.rows.inputs.len() - 1 }, bound);
    }

    /// A value in `[0.5, 8.5]`.
    fn positive(&mut self) -> (usize, f64) {
        let x = self.value();
        let bound = self.bounds[x];
        let x = self.push(Instr::Unary { op: UnaryOp::Abs, x }, bound);
        let half = self.push(Instr::Const { value: 0.5 }, 0.5);
        (self.push(Instr::Binary { op: BinaryOp::Add, a: x, b: half }, 1.0), bound + 0.5)
    }

    fn unary(&mut self) {
        let is_smooth = |op: &UnaryOp| {
            // What is no integer may lie on either side of a step.
            let wraps = matches!(op, UnaryOp::WrapI32 | UnaryOp::WrapU32);
            !wraps && DType::ALL.into_iter().all(|dtype| UnaryOp::rounding(dtype) != Some(*op))
        };
        let smooth: Vec<UnaryOp> = UnaryOp::ALL.into_iter().filter(is_smooth).collect();
        let op = self.random.pick(&smooth);
        let x = self.value();
        let b = self.bounds[x];
        match op {
            UnaryOp::Log | UnaryOp::Sqrt | UnaryOp::Rsqrt | UnaryOp::Recip => {
                let (x, bound) = self.positive();
                self.push(Instr::Unary { op, x }, bound.max(2.0));
            }
            UnaryOp::Exp => drop(self.push(Instr::Unary { op, x }, b.exp())),
            UnaryOp::Square => drop(self.push(Instr::Unary { op, x }, b * b)),
            UnaryOp::Floor | UnaryOp::PowerFloor | UnaryOp::Not if self.smooth => {}
            UnaryOp::Floor => drop(self.push(Instr::Unary { op, x }, b + 1.0)),
            _ => drop(self.push(Instr::Unary { op, x }, b.max(1.0))),
        }
    }

    fn binary(&mut self) {
        let op = self.random.pick(&BinaryOp::ALL);
        let (a, b) = (self.value(), self.value());
        let (x, y) = (self.bounds[a], self.bounds[b]);
        match op {
            BinaryOp::Add | BinaryOp::Sub => drop(self.push(Instr::Binary { op, a, b }, x + y)),
            BinaryOp::Mul => drop(self.push(Instr::Binary { op, a, b }, x * y)),
            BinaryOp::Max | BinaryOp::Min => {
                self.push(Instr::Binary { op, a, b }, x.max(y));
            }
            BinaryOp::Div => {
                let (b, _) = self.positive();
                self.push(Instr::Binary { op, a, b }, 2.0 * x);
            }
            BinaryOp::Pow => {
                let (a, bound) = self.positive();
                let b = self.push(Instr::Unary { op: UnaryOp::Tanh, x: b }, 1.0);
                self.push(Instr::Binary { op, a, b }, bound.max(2.0));
            }
            BinaryOp::GeluTanhGrad | BinaryOp::GeluErfGrad | BinaryOp::SiluGrad => {
                self.push(Instr::Binary { op, a, b }, 1.2 * y);
            }
            _ if self.smooth => {}
            _ => drop(self.push(Instr::Binary { op, a, b }, 1.0)),
        }
    }

    fn other(&mut self) {
        let (r, c) = (self.rows.rows, self.rows.cols);
        match self.random.below(7) {
            0 => {
                let row = vec![Digit { div: 2, modulus: 7, stride: 1 }];
                let col_stride = self.random.below(2);
                self.push(
                    Instr::Index { row, col_stride, base: Offset::Fixed(-3) },
                    (c + 7) as f64,
                );
            }
            1 if !self.smooth => {
                let (condition, a, b) = (self.value(), self.value(), self.value());
                let bound = self.bounds[a].max(self.bounds[b]);
                self.push(Instr::Select { condition, a, b }, bound);
            }
            2 => {
                self.rows.inputs.push(RowInput { dtype: DType::U32, access: Access::scalar() });
                let key = self.rows.inputs.len() - 1;
                let stride = self.random.pick(&[c, c.next_multiple_of(16)]);
                let (inner, rows) =
                    (1 + self.random.below(c), vec![Digit { div: 1, modulus: r, stride }]);
                let col = match self.random.below(3) {
                    0 => vec![Digit { div: 1, modulus: c, stride: 1 }],
                    1 => vec![
                        Digit { div: inner, modulus: c, stride: 1 },
                        Digit { div: 1, modulus: inner, stride: c },
                    ],
                    _ => Vec::new(),
                };
                let draw = Draw {
                    key,
                    salt: 5,
                    bits: self.random.pick(&[DrawBits::B24, DrawBits::B16]),
                    row: rows,
                    col,
                    offset: Offset::Fixed(7),
                    unit: self.random.pick(&[1, 16]),
                    sample_stride: self.random.pick(&[7, 32]),
                };
                self.push(Instr::Random(draw), 1.0);
            }
            3 => {
                let x = self.value();
                let bound = self.bounds[x] * c as f64;
                self.rows.instrs.push(Instr::Reduce { op: ReduceOp::Sum, x });
                self.bounds.push(bound);
                let a = self.bounds.len() - 1;
                let b = self.push(Instr::Const { value: 1.0 / c as f64 }, 1.0);
                let bound = self.bounds[x];
                self.push(Instr::Binary { op: BinaryOp::Mul, a, b }, bound);
            }
            4 => {
                let (x, op) = (self.value(), self.random.pick(&[ReduceOp::Max, ReduceOp::Min]));
                let bound = self.bounds[x];
                self.push(Instr::Reduce { op, x }, bound);
            }
            5 => {
                let value = self.random.number();
                self.push(Instr::Const { value }, 1.0);
            }
            _ => self.load(),
        }
    }

    fn output(&mut self) {
        let (r, c) = (self.rows.rows, self.rows.cols);
        let value = self.value();
        let is_vector = self.rows.vectors()[value];
        let accumulate = self.random.below(3) == 0;
        let output = match self.random.below(4) {
            0 if is_vector => Output::ColSum { value, accumulate },
            1 => Output::TotalSum { value, accumulate },
            _ => {
                let wide = vec![Digit { div: 1, modulus: r, stride: 2 * c + 1 }];
                let access = match self.random.below(4) {
                    0 if !is_vector => Access::per_row(r),
                    1 => Access { row: wide, col_stride: 2, offset: 3 },
                    _ => Access::full(r, c),
                };
                let other = self.random.pick(&[DType::F32, DType::F64, DType::I32, DType::Bool]);
                let exact = self.smooth || accumulate || self.random.below(3) > 0;
                let dtype = if exact { self.rows.dtype } else { other };
                Output::Store { value, access, dtype, accumulate }
            }
        };
        self.rows.outputs.push(output);
    }
}

pub(crate) fn random_rows(
    random: &mut Random,
    dtype: DType,
    shape: (usize, usize),
    smooth: bool,
) -> Rows {
    let (rows, cols) = shape;
    let rows =
        Rows { rows, cols, dtype, inputs: Vec::new(), instrs: Vec::new(), outputs: Vec::new() };
    let mut writer = Writer { random, rows, bounds: Vec::new(), smooth };
    writer.load();
    for _ in 0..4 + writer.random.below(12) {
        match writer.random.below(5) {
            0 | 1 => writer.unary(),
            2 | 3 => writer.binary(),
            _ => writer.other(),
        }
    }
    for _ in 0..1 + writer.random.below(3) {
        writer.output();
    }
    writer.rows
}

pub(crate) fn buffers(random: &mut Random, r: &Rows) -> (Vec<Buffer>, Vec<Buffer>) {
    let kernel = Kernel::Rows(r.clone());
    let is_key =
        |i: usize| r.instrs.iter().any(|instr| matches!(instr, Instr::Random(d) if d.key == i));
    let inputs = (kernel.inputs().iter().enumerate())
        .map(|(i, a)| match is_key(i) {
            true => Buffer::U32(KEY.to_vec()),
            false => Buffer::new(a.dtype, &random.numbers(a.len)),
        })
        .collect();
    let old = kernel.outputs().into_iter().map(|a| Buffer::new(a.dtype, &random.numbers(a.len)));
    (inputs, old.collect())
}

fn check(random: &mut Random, r: &Rows, isa: Isa) {
    let (inputs, old) = buffers(random, r);
    let want = expected(r, &inputs, &old);
    let got = run_on_threads(isa, &Kernel::Rows(r.clone()), &inputs, &old);
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let sums = matches!(r.outputs[i], Output::ColSum { .. } | Output::TotalSum { .. });
        let scale = if sums { (r.rows * r.cols) as f64 } else { 1.0 };
        let tolerance: f64 = if r.dtype == DType::F32 { 1e-4 } else { 1e-9 };
        let rounded = matches!(&r.outputs[i], Output::Store { dtype: DType::F32, .. });
        let tolerance = if rounded { tolerance.max(1e-6) } else { tolerance };
        let what = format!("output {i} on {isa:?} of {r:#?}");
        assert_close(&got.numbers(), want, tolerance * scale, &what);
    }
}

#[test]
pub(crate) fn random_programs_match_their_interpretation() {
    let shapes = [
        (1, 1),
        (5, 1),
        (3000, 1),
        (40, 2),
        (7, 7),
        (33, 16),
        (64, 33),
        (300, 100),
        (9, 768),
        (3, 1536),
        (2, 1537),
        (2, 3000),
        (2, 9000),
        (1, 20_000),
    ];
    for case in 0..168 {
        let mut random = Random::new(case);
        let shape = shapes[case as usize % shapes.len()];
        let dtype = random.pick(&[DType::F32, DType::F64]);
        let r = random_rows(&mut random, dtype, shape, dtype == DType::F32);
        let isa = random.pick(&sets());
        check(&mut random, &r, isa);
    }
}

/// Each function alone, in both types, beside lanes and row scalars.
#[test]
pub(crate) fn each_function_matches_alone() {
    let mut random = Random::new(1);
    for dtype in [DType::F32, DType::F64] {
        for isa in sets() {
            for cols in [1, 7, 40] {
                let inputs = [Access::full(6, cols), Access::per_row(6), Access::scalar()];
                let inputs = inputs.map(|access| RowInput { dtype, access }).to_vec();
                let load = |input: usize| Instr::Load { input };
                let mut instrs = vec![load(0), load(1), load(2), Instr::Const { value: 1.25 }];
                let add = |a: usize, b: usize| Instr::Binary { op: BinaryOp::Add, a, b };
                instrs.extend([add(0, 3), add(1, 3), add(2, 3)]);
                // A function that rounds goes to the other side of a tie for the smallest error.
                let is_single = |op| op == UnaryOp::Single;
                let rounds = |op| DType::ALL.into_iter().any(|d| UnaryOp::rounding(d) == Some(op));
                for op in UnaryOp::ALL.into_iter().filter(|op| is_single(*op) || !rounds(*op)) {
                    instrs.extend([4, 5, 6].map(|x| Instr::Unary { op, x }));
                }
                for op in BinaryOp::ALL {
                    let pairs = [(4, 4), (4, 5), (5, 4), (4, 6), (6, 4), (5, 6), (6, 5), (5, 5)];
                    instrs.extend(pairs.map(|(a, b)| Instr::Binary { op, a, b }));
                }
                for (condition, a, b) in [(4, 5, 6), (5, 4, 6), (6, 5, 4), (5, 6, 5)] {
                    instrs.push(Instr::Select { condition, a, b });
                }
                let access = Access::full(6, cols);
                let store = |value: usize| Output::Store {
                    value,
                    access: access.clone(),
                    dtype,
                    accumulate: false,
                };
                let outputs = (7..instrs.len()).map(store).collect();
                let r = Rows { rows: 6, cols, dtype, inputs, instrs, outputs };
                let (inputs, old) = buffers(&mut random, &r);
                let want = expected(&r, &inputs, &old);
                let got = run_on_threads(isa, &Kernel::Rows(r.clone()), &inputs, &old);
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let what = format!("{:?} of {cols} columns on {isa:?}", r.instrs[7 + i]);
                    let tolerance = if dtype == DType::F32 { 6e-7 } else { 2e-10 };
                    // A floor or comparison may see a sum rounded to f32 on the other side.
                    assert_close(&got.numbers(), want, tolerance, &what);
                }
            }
        }
    }
}

/// The larger and the smaller of numbers of which one is none is none, wherever that one is.
#[test]
fn what_is_no_number_stays_so() {
    for dtype in [DType::F32, DType::F64] {
        for (isa, cols) in sets().into_iter().flat_map(|isa| [1, 7, 40, 150].map(|c| (isa, c))) {
            let input = |access| RowInput { dtype, access };
            let pair = |op, a, b| Instr::Binary { op, a, b };
            let mut instrs = vec![Instr::Load { input: 0 }, Instr::Load { input: 1 }];
            for op in [BinaryOp::Max, BinaryOp::Min] {
                instrs.extend([pair(op, 0, 1), pair(op, 1, 0), pair(op, 0, 0)]);
            }
            for op in [ReduceOp::Max, ReduceOp::Min] {
                instrs.extend([0, 1].map(|x| Instr::Reduce { op, x }));
            }
            let access = Access::full(cols, cols);
            let store = |value: usize| {
                let access = access.clone();
                Output::Store { value, access, dtype, accumulate: false }
            };
            let outputs = (2..instrs.len()).map(store).collect();
            let inputs = vec![input(access.clone()), input(Access::per_row(cols))];
            let r = Rows { rows: cols, cols, dtype, inputs, instrs, outputs };
            // In row i, column i; and every third number per row.
            let of = |i: usize| if i.is_multiple_of(cols + 1) { f64::NAN } else { i as f64 - 3.0 };
            let lanes: Vec<f64> = (0..cols * cols).map(of).collect();
            let per_row: Vec<f64> =
                (0..cols).map(|i| if i % 3 == 0 { f64::NAN } else { 5.0 }).collect();
            let inputs = [Buffer::new(dtype, &lanes), Buffer::new(dtype, &per_row)];
            let old = vec![Buffer::new(dtype, &vec![0.0; cols * cols]); r.outputs.len()];
            let want = expected(&r, &inputs, &old);
            let got = run_on_threads(isa, &Kernel::Rows(r.clone()), &inputs, &old);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let same = |(x, y): (&f64, &f64)| x == y || x.is_nan() && y.is_nan();
                let all = got.numbers().iter().zip(want).all(same);
                assert!(all, "{:?} of {cols} columns on {isa:?}", r.instrs[2 + i]);
            }
        }
    }
}

/// Softmax and cross-entropy over a vocabulary: three sweeps over a long row.
#[test]
fn a_long_row_is_reduced_in_sweeps() {
    let (rows, cols) = (3, 50_257);
    for dtype in [DType::F32, DType::F64] {
        let load = |input: usize| Instr::Load { input };
        let binary = |op: BinaryOp, a: usize, b: usize| Instr::Binary { op, a, b };
        let r = Rows {
            rows,
            cols,
            dtype,
            inputs: vec![
                RowInput { dtype, access: Access::full(rows, cols) },
                RowInput { dtype: DType::I32, access: Access::per_row(rows) },
            ],
            instrs: vec![
                load(0),
                Instr::Reduce { op: ReduceOp::Max, x: 0 },
                binary(BinaryOp::Sub, 0, 1),
                Instr::Unary { op: UnaryOp::Exp, x: 2 },
                Instr::Reduce { op: ReduceOp::Sum, x: 3 },
                binary(BinaryOp::Div, 3, 4),
                load(1),
                Instr::Index { row: Vec::new(), col_stride: 1, base: Offset::ZERO },
                binary(BinaryOp::Eq, 6, 7),
                binary(BinaryOp::Sub, 5, 8),
                Instr::Unary { op: UnaryOp::Log, x: 4 },
                binary(BinaryOp::Add, 10, 1),
                binary(BinaryOp::Mul, 0, 8),
                Instr::Reduce { op: ReduceOp::Sum, x: 12 },
                binary(BinaryOp::Sub, 11, 13),
            ],
            outputs: vec![
                Output::Store {
                    value: 9,
                    access: Access::full(rows, cols),
                    dtype,
                    accumulate: false,
                },
                Output::Store {
                    value: 14,
                    access: Access::per_row(rows),
                    dtype,
                    accumulate: false,
                },
                Output::TotalSum { value: 14, accumulate: false },
                Output::ColSum { value: 9, accumulate: true },
            ],
        };
        for isa in sets() {
            check(&mut Random::new(2), &r, isa);
        }
    }
}

/// Each index is rounded by itself, also past the integers that f32 has.
#[test]
fn indices_are_the_nearest_numbers() {
    let (rows, cols) = (2, 100);
    for (base, col_stride) in [(-3, 1), ((1 << 24) - 40, 1), ((1 << 24) + 1, 3), (0, 400_009)] {
        let r = Rows {
            rows,
            cols,
            dtype: DType::F32,
            inputs: Vec::new(),
            instrs: vec![Instr::Index { row: Vec::new(), col_stride, base: Offset::Fixed(base) }],
            outputs: vec![Output::Store {
                value: 0,
                access: Access::full(rows, cols),
                dtype: DType::F32,
                accumulate: false,
            }],
        };
        let want = |i: usize| (base + (i % cols * col_stride) as i64) as f32;
        let want: Vec<f32> = (0..rows * cols).map(want).collect();
        for isa in sets() {
            let mut found = vec![0.0f32; rows * cols];
            let cpu = Cpu::with_isa(1, isa);
            cpu.execute(&Kernel::Rows(r.clone()), &[], &[ViewMut::of(&mut found)]);
            assert_eq!(found, want, "{isa:?} from {base} in steps of {col_stride}");
        }
    }
}
