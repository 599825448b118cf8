//! Block programs of integers of 64 bits.
//!
//! Every value has a register of [`LANES`] numbers, over which each instruction is one loop. Rows
//! that are longer are cut: a reduction needs a sweep over all pieces of its row before those who
//! read it, in which what it reads is computed once more. Sums modulo `2^64` do not depend on their
//! order, so that tasks may add in any.

use std::sync::Mutex;

use ir::DType;

use super::super::Cpu;
use super::super::formats::{BF16, F8E4M3, F8E5M2, F16, Narrow};
use super::super::moves::piece;
use super::super::scratch::{Bump, lines_of};
use super::super::vector::Scalar;
use super::super::view::{Shared, View, ViewMut};
use crate::rows::{Access, BinaryOp, Digit, Instr, Output, ReduceOp, Rows, UnaryOp};

/// Numbers of a register: eight kibibytes.
const LANES: usize = 1024;
/// Registers for operands that are one number per row, at every point.
const SPREADS: usize = 3;
/// Points below which a task is not worth its dispatch.
const TASK_POINTS: usize = 16_384;

/// Bytes of scratch per thread.
pub(in super::super) fn scratch(rows: &Rows) -> usize {
    lines_of::<i64>((rows.instrs.len() + SPREADS) * LANES)
}

/// Runs a block program that computes in I64.
pub(in super::super) fn execute(cpu: &Cpu, rows: &Rows, inputs: &[View], outputs: &[ViewMut]) {
    for (output, view) in rows.outputs.iter().zip(outputs) {
        let len = match output {
            Output::ColSum { accumulate: false, .. } => rows.cols,
            Output::TotalSum { accumulate: false, .. } => 1,
            Output::Store { .. } | Output::ColSum { .. } | Output::TotalSum { .. } => 0,
        };
        // SAFETY: the argument was checked to hold the sums.
        unsafe { std::slice::from_raw_parts_mut(view.start::<i64>(), len) }.fill(0);
    }
    let points = rows.rows * rows.cols;
    if points == 0 {
        return;
    }
    let inputs: Vec<Shared<u8>> =
        inputs.iter().map(|i| Shared::new(i.start::<u8>().cast_mut())).collect();
    let outputs: Vec<Shared<u8>> = outputs.iter().map(|o| Shared::new(o.start::<u8>())).collect();
    let plan = Plan::of(rows);
    let [row_blocks, pieces] = plan.blocks();
    // A row that is reduced belongs to one task.
    let shares = row_blocks * if plan.sweeps > 1 { 1 } else { pieces };
    let tasks = (points / TASK_POINTS).clamp(1, shares).min(256);
    let cycles = (points * rows.instrs.len()) as u64;
    let adding = Mutex::new(());
    cpu.for_each(tasks, cycles, scratch(rows), |task, bump| {
        let mut machine = Machine::new(&plan, &inputs, &outputs, &adding, bump);
        for share in piece(shares, tasks, task) {
            if plan.sweeps > 1 {
                machine.sweep(share, pieces);
            } else {
                machine.at(share / pieces, share % pieces);
                machine.compute(0);
                machine.write();
            }
        }
    });
}

/// How a program is executed.
struct Plan<'a> {
    rows: &'a Rows,
    /// For each value, whether it is one number per point rather than one per row.
    vectors: Vec<bool>,
    /// For each value, the sweep over the pieces of a row in which it can be computed first; of a
    /// reduction, in which it can be read.
    sweep_of: Vec<usize>,
    /// Sweeps over the pieces of a row.
    sweeps: usize,
    /// Rows of a block.
    block_rows: usize,
    /// Columns of a block.
    block_cols: usize,
}

impl Plan<'_> {
    fn of(rows: &Rows) -> Plan<'_> {
        let is_cut = rows.cols > LANES;
        let mut sweep_of: Vec<usize> = Vec::with_capacity(rows.instrs.len());
        for instr in &rows.instrs {
            let first = instr.operands().map(|o| sweep_of[o]).max().unwrap_or(0);
            let reduces = matches!(instr, Instr::Reduce { .. });
            sweep_of.push(first + usize::from(is_cut && reduces));
        }
        let sweeps = sweep_of.iter().max().map_or(1, |last| last + 1);
        let block_rows = (LANES / rows.cols).clamp(1, rows.rows);
        let block_cols = rows.cols.min(LANES);
        Plan { rows, vectors: rows.vectors(), sweep_of, sweeps, block_rows, block_cols }
    }

    /// How many blocks there are over rows, and over columns.
    fn blocks(&self) -> [usize; 2] {
        let Rows { rows, cols, .. } = self.rows;
        [rows.div_ceil(self.block_rows), cols.div_ceil(self.block_cols)]
    }
}

/// The registers and the position of one task.
struct Machine<'a> {
    plan: &'a Plan<'a>,
    inputs: &'a [Shared<u8>],
    outputs: &'a [Shared<u8>],
    /// Held by who adds to a sum.
    adding: &'a Mutex<()>,
    registers: &'a mut [i64],
    spreads: &'a mut [i64],
    row: usize,
    rows: usize,
    col: usize,
    cols: usize,
}

impl<'a> Machine<'a> {
    fn new(
        plan: &'a Plan<'a>,
        inputs: &'a [Shared<u8>],
        outputs: &'a [Shared<u8>],
        adding: &'a Mutex<()>,
        bump: &mut Bump,
    ) -> Machine<'a> {
        let len = (plan.rows.instrs.len() + SPREADS) * LANES;
        let start = bump.take::<i64>(len);
        // SAFETY: `take` gave room for as many numbers, which nothing else uses during the task;
        // what an earlier one left there are numbers, too.
        let all = unsafe { std::slice::from_raw_parts_mut(start, len) };
        let (spreads, registers) = all.split_at_mut(SPREADS * LANES);
        Machine {
            plan,
            inputs,
            outputs,
            adding,
            registers,
            spreads,
            row: 0,
            rows: 0,
            col: 0,
            cols: 0,
        }
    }

    /// Goes to a block.
    fn at(&mut self, row_block: usize, piece: usize) {
        let Plan { block_rows, block_cols, rows, .. } = self.plan;
        (self.row, self.col) = (row_block * block_rows, piece * block_cols);
        self.rows = (*block_rows).min(rows.rows - self.row);
        self.cols = (*block_cols).min(rows.cols - self.col);
    }

    /// Computes a row that is in pieces and reduced.
    fn sweep(&mut self, row: usize, pieces: usize) {
        for sweep in 0..self.plan.sweeps {
            for piece in 0..pieces {
                self.at(row, piece);
                self.compute(sweep);
                if sweep + 1 == self.plan.sweeps {
                    self.write();
                }
            }
        }
    }

    /// Runs the instructions that a sweep can run on the block.
    fn compute(&mut self, sweep: usize) {
        let plan = self.plan;
        for (value, instr) in plan.rows.instrs.iter().enumerate() {
            if let Instr::Reduce { op, x } = instr {
                if plan.sweep_of[*x] == sweep || plan.sweeps == 1 {
                    self.reduce(value, *op, *x);
                }
            } else if plan.sweep_of[value] <= sweep {
                self.step(value, instr);
            }
        }
    }

    /// Numbers that a value has in the block.
    fn len(&self, value: usize) -> usize {
        if self.plan.vectors[value] { self.rows * self.cols } else { self.rows }
    }

    fn step(&mut self, value: usize, instr: &Instr) {
        match instr {
            Instr::Load { input } => self.load(value, *input),
            Instr::Const { value: x } => self.target(value).fill(*x as i64),
            Instr::Index { row, col_stride, base } => {
                self.index(value, row, *col_stride, base.bound());
            }
            Instr::Unary { op, x } => {
                let (target, [x]) = self.operands(value, [*x]);
                unary(*op, target, x);
            }
            Instr::Binary { op, a, b } => {
                let (target, [a, b]) = self.operands(value, [*a, *b]);
                binary(*op, target, a, b);
            }
            Instr::Select { condition, a, b } => {
                let (target, [condition, a, b]) = self.operands(value, [*condition, *a, *b]);
                for (((t, c), a), b) in target.iter_mut().zip(condition).zip(a).zip(b) {
                    *t = if *c != 0 { *a } else { *b };
                }
            }
            Instr::Reduce { .. } => unreachable!("reductions are computed apart"),
            Instr::Random(_) => unreachable!("verified: programs of i64 draw nothing"),
        }
    }

    fn target(&mut self, value: usize) -> &mut [i64] {
        let len = self.len(value);
        &mut self.registers[value * LANES..][..len]
    }

    /// The register of a value and those of the operands that it is computed from, each with as
    /// many numbers.
    fn operands<const N: usize>(
        &mut self,
        value: usize,
        operands: [usize; N],
    ) -> (&mut [i64], [&[i64]; N]) {
        let (rows, cols, len) = (self.rows, self.cols, self.len(value));
        let vectors = &self.plan.vectors;
        let (before, own) = self.registers.split_at_mut(value * LANES);
        for (at, operand) in operands.iter().enumerate() {
            if vectors[value] && !vectors[*operand] && cols > 1 {
                let target = self.spreads[at * LANES..][..len].chunks_exact_mut(cols);
                let source = &before[operand * LANES..][..rows];
                target.zip(source).for_each(|(row, x)| row.fill(*x));
            }
        }
        let spreads: &[i64] = self.spreads;
        let mut at = 0;
        let operands = operands.map(|operand| {
            let is_spread = vectors[value] && !vectors[operand] && cols > 1;
            at += 1;
            if is_spread {
                &spreads[(at - 1) * LANES..][..len]
            } else {
                &before[operand * LANES..][..len]
            }
        });
        (&mut own[..len], operands)
    }

    fn index(&mut self, value: usize, row: &[Digit], col_stride: usize, base: i64) {
        let (first_row, col) = (self.row, self.col);
        let cols = if self.plan.vectors[value] { self.cols } else { 1 };
        for (r, line) in self.target(value).chunks_exact_mut(cols).enumerate() {
            let digits: usize = row.iter().map(|d| d.of(first_row + r)).sum();
            let first = base.wrapping_add(digits as i64);
            for (c, x) in line.iter_mut().enumerate() {
                *x = first.wrapping_add(((col + c) * col_stride) as i64);
            }
        }
    }

    fn reduce(&mut self, value: usize, op: ReduceOp, x: usize) {
        let (is_first, is_vector) = (self.col == 0, self.plan.vectors[x]);
        let (rows, cols) = (self.rows, self.cols);
        let (before, own) = self.registers.split_at_mut(value * LANES);
        let own = &mut own[..rows];
        if is_first {
            own.fill(match op {
                ReduceOp::Sum => 0,
                ReduceOp::Max => i64::MIN,
                ReduceOp::Min => i64::MAX,
            });
        }
        for (r, result) in own.iter_mut().enumerate() {
            let source = &before[x * LANES..];
            let line = if is_vector { &source[r * cols..][..cols] } else { &source[r..=r] };
            let all = line.iter().copied();
            let found = match op {
                // The number of a row stands at each of its points.
                ReduceOp::Sum if !is_vector => line[0].wrapping_mul(cols as i64),
                ReduceOp::Sum => all.fold(0, i64::wrapping_add),
                ReduceOp::Max => all.fold(i64::MIN, i64::max),
                ReduceOp::Min => all.fold(i64::MAX, i64::min),
            };
            *result = match op {
                ReduceOp::Sum => result.wrapping_add(found),
                ReduceOp::Max => (*result).max(found),
                ReduceOp::Min => (*result).min(found),
            };
        }
    }

    fn load(&mut self, value: usize, input: usize) {
        let source = self.inputs[input].get();
        let of = &self.plan.rows.inputs[input];
        match of.dtype {
            DType::F32 => self.convert::<f32>(value, source, &of.access, |x| x as i64),
            DType::F64 => self.convert::<f64>(value, source, &of.access, |x| x as i64),
            DType::I32 => self.convert::<i32>(value, source, &of.access, i64::from),
            DType::U32 => self.convert::<u32>(value, source, &of.access, i64::from),
            DType::I64 => self.convert::<i64>(value, source, &of.access, |x| x),
            DType::Bool => self.convert::<u8>(value, source, &of.access, |x| i64::from(x != 0)),
            DType::BF16 => self.convert::<BF16>(value, source, &of.access, from_narrow),
            DType::F16 => self.convert::<F16>(value, source, &of.access, from_narrow),
            DType::F8E4M3 => self.convert::<F8E4M3>(value, source, &of.access, from_narrow),
            DType::F8E5M2 => self.convert::<F8E5M2>(value, source, &of.access, from_narrow),
            DType::I8 => unreachable!("block programs do not load {}", of.dtype),
        }
    }

    fn convert<T: Copy>(
        &mut self,
        value: usize,
        source: *const u8,
        access: &Access,
        widen: impl Fn(T) -> i64,
    ) {
        let source = source.cast::<T>();
        let (row, col) = (self.row, self.col);
        let cols = if self.plan.vectors[value] { self.cols } else { 1 };
        let places = Places::of(access, self.plan.rows.rows);
        for (r, line) in self.target(value).chunks_exact_mut(cols).enumerate() {
            let first = places.row(row + r) + col * access.col_stride;
            // SAFETY: the input was checked to hold all elements of its access.
            unsafe {
                if access.col_stride == 1 {
                    let source = std::slice::from_raw_parts(source.add(first), cols);
                    line.iter_mut().zip(source).for_each(|(x, from)| *x = widen(*from));
                } else {
                    for (c, x) in line.iter_mut().enumerate() {
                        *x = widen(*source.add(first + c * access.col_stride));
                    }
                }
            }
        }
    }

    /// Writes the outputs of the block: sums first, as stores may overwrite what they read.
    fn write(&mut self) {
        for (index, output) in self.plan.rows.outputs.iter().enumerate() {
            match output {
                Output::ColSum { value, .. } => self.add_columns(index, *value),
                Output::TotalSum { value, .. } => self.add_total(index, *value),
                Output::Store { .. } => {}
            }
        }
        for (index, output) in self.plan.rows.outputs.iter().enumerate() {
            let Output::Store { value, access, dtype, .. } = output else { continue };
            match dtype {
                DType::F32 => self.store::<f32>(index, *value, access, |x| x as f32),
                DType::F64 => self.store::<f64>(index, *value, access, |x| x as f64),
                DType::I32 => self.store::<i32>(index, *value, access, |x| x as i32),
                DType::U32 => self.store::<u32>(index, *value, access, |x| x as u32),
                DType::I64 => self.store::<i64>(index, *value, access, |x| x),
                DType::Bool => self.store::<u8>(index, *value, access, |x| u8::from(x != 0)),
                DType::BF16 => self.store::<BF16>(index, *value, access, to_narrow),
                DType::F16 => self.store::<F16>(index, *value, access, to_narrow),
                DType::F8E4M3 => self.store::<F8E4M3>(index, *value, access, to_narrow),
                DType::F8E5M2 => self.store::<F8E5M2>(index, *value, access, to_narrow),
                DType::I8 => unreachable!("block programs do not store {dtype}"),
            }
        }
    }

    fn store<T: Copy>(&self, index: usize, value: usize, to: &Access, narrow: impl Fn(i64) -> T) {
        let target = self.outputs[index].get().cast::<T>();
        let is_vector = self.plan.vectors[value];
        let register = &self.registers[value * LANES..][..self.len(value)];
        let places = Places::of(to, self.plan.rows.rows);
        // What is one number per row is stored once, with the first piece of the row.
        let cols =
            if !is_vector && to.col_stride == 0 { usize::from(self.col == 0) } else { self.cols };
        for r in 0..self.rows {
            let first = places.row(self.row + r) + self.col * to.col_stride;
            for c in 0..cols {
                let x = register[if is_vector { r * self.cols + c } else { r }];
                // SAFETY: the output was checked to hold all elements of its access, each of which
                // one task writes.
                unsafe { *target.add(first + c * to.col_stride) = narrow(x) }
            }
        }
    }

    fn add_columns(&self, index: usize, value: usize) {
        let register = &self.registers[value * LANES..][..self.rows * self.cols];
        let mut sums = vec![0_i64; self.cols];
        for line in register.chunks_exact(self.cols) {
            sums.iter_mut().zip(line).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
        }
        self.add(index, self.col, &sums);
    }

    fn add_total(&self, index: usize, value: usize) {
        let is_counted = self.plan.vectors[value] || self.col == 0;
        let register = &self.registers[value * LANES..][..self.len(value)];
        if is_counted {
            self.add(index, 0, &[register.iter().copied().fold(0, i64::wrapping_add)]);
        }
    }

    fn add(&self, index: usize, first: usize, sums: &[i64]) {
        let _held = super::super::lock(self.adding);
        let target = self.outputs[index].get().cast::<i64>().wrapping_add(first);
        for (at, sum) in sums.iter().enumerate() {
            // SAFETY: the output was checked to hold all sums; who holds the lock alone uses them.
            unsafe {
                let target = target.add(at);
                *target = (*target).wrapping_add(*sum);
            }
        }
    }
}

/// Towards zero.
fn from_narrow<T: Narrow>(x: T) -> i64 {
    x.widen() as i64
}

/// With one rounding: integers of more than 53 bits keep whether they were exact.
fn to_narrow<T: Narrow>(x: i64) -> T {
    let magnitude = x.unsigned_abs();
    let lost = 11_u32.saturating_sub(magnitude.leading_zeros());
    let kept = magnitude >> lost;
    let odd = u64::from(kept << lost != magnitude);
    let magnitude = (kept | odd) as f64 * f64::from(1_u32 << lost);
    T::nearest(if x < 0 { -magnitude } else { magnitude }.sticky())
}

/// Where rows begin: with a division for each digit only where they are not evenly spaced.
enum Places<'a> {
    Even { offset: usize, stride: usize },
    Digits(&'a Access),
}

impl Places<'_> {
    fn of(access: &Access, rows: usize) -> Places<'_> {
        let offset = access.offset;
        match access.row[..] {
            [Digit { div: 1, modulus, stride }] if modulus >= rows => {
                Places::Even { offset, stride }
            }
            [] => Places::Even { offset, stride: 0 },
            _ => Places::Digits(access),
        }
    }

    #[inline(always)]
    fn row(&self, row: usize) -> usize {
        match self {
            Places::Even { offset, stride } => offset + row * stride,
            Places::Digits(access) => access.row_start(row),
        }
    }
}

fn unary(op: UnaryOp, target: &mut [i64], x: &[i64]) {
    let pairs = target.iter_mut().zip(x);
    match op {
        UnaryOp::Neg => pairs.for_each(|(t, x)| *t = x.wrapping_neg()),
        UnaryOp::Abs => pairs.for_each(|(t, x)| *t = x.wrapping_abs()),
        UnaryOp::Square => pairs.for_each(|(t, x)| *t = x.wrapping_mul(*x)),
        UnaryOp::Not => pairs.for_each(|(t, x)| *t = i64::from(*x == 0)),
        UnaryOp::WrapI32 => pairs.for_each(|(t, x)| *t = i64::from(*x as i32)),
        UnaryOp::WrapU32 => pairs.for_each(|(t, x)| *t = i64::from(*x as u32)),
        UnaryOp::Floor => target.copy_from_slice(x),
        UnaryOp::Exp
        | UnaryOp::Log
        | UnaryOp::Sqrt
        | UnaryOp::Rsqrt
        | UnaryOp::Recip
        | UnaryOp::Tanh
        | UnaryOp::Erf
        | UnaryOp::Sin
        | UnaryOp::Cos
        | UnaryOp::PowerFloor
        | UnaryOp::Sigmoid
        | UnaryOp::GeluTanh
        | UnaryOp::GeluErf
        | UnaryOp::Silu
        | UnaryOp::Single
        | UnaryOp::RoundBF16
        | UnaryOp::RoundF16
        | UnaryOp::RoundF8E4M3
        | UnaryOp::RoundF8E5M2 => unreachable!("verified: `{op:?}` yields no integers"),
    }
}

fn binary(op: BinaryOp, target: &mut [i64], a: &[i64], b: &[i64]) {
    #[inline(always)]
    fn zip(target: &mut [i64], a: &[i64], b: &[i64], of: impl Fn(i64, i64) -> i64) {
        for ((t, a), b) in target.iter_mut().zip(a).zip(b) {
            *t = of(*a, *b);
        }
    }
    match op {
        BinaryOp::Add => zip(target, a, b, i64::wrapping_add),
        BinaryOp::Sub => zip(target, a, b, i64::wrapping_sub),
        BinaryOp::Mul => zip(target, a, b, i64::wrapping_mul),
        BinaryOp::Div => zip(target, a, b, floor_div),
        BinaryOp::Max => zip(target, a, b, i64::max),
        BinaryOp::Min => zip(target, a, b, i64::min),
        BinaryOp::Pow => zip(target, a, b, power),
        BinaryOp::Lt => zip(target, a, b, |a, b| i64::from(a < b)),
        BinaryOp::Le => zip(target, a, b, |a, b| i64::from(a <= b)),
        BinaryOp::Eq => zip(target, a, b, |a, b| i64::from(a == b)),
        BinaryOp::Ge => zip(target, a, b, |a, b| i64::from(a >= b)),
        BinaryOp::Gt => zip(target, a, b, |a, b| i64::from(a > b)),
        BinaryOp::And => zip(target, a, b, |a, b| i64::from(a != 0 && b != 0)),
        BinaryOp::Or => zip(target, a, b, |a, b| i64::from(a != 0 || b != 0)),
        BinaryOp::GeluTanhGrad | BinaryOp::GeluErfGrad | BinaryOp::SiluGrad => {
            unreachable!("verified: `{op:?}` yields no integers")
        }
    }
}

/// The quotient rounded down; zero where the divisor is.
fn floor_div(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    let (quotient, rest) = (a.wrapping_div(b), a.wrapping_rem(b));
    quotient - i64::from(rest != 0 && (rest < 0) != (b < 0))
}

/// A power; a negative one is the quotient of one and the positive one, rounded towards zero.
fn power(a: i64, b: i64) -> i64 {
    if b < 0 {
        return match a {
            1 => 1,
            -1 => 1 - 2 * (b & 1),
            _ => 0,
        };
    }
    let (mut product, mut square, mut rest) = (1_i64, a, b);
    while rest > 0 {
        if rest & 1 == 1 {
            product = product.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        rest >>= 1;
    }
    product
}
