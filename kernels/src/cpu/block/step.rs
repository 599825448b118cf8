//! One task of a block program, instruction by instruction.

use std::marker::PhantomData;

use ir::DType;
use ir::random::Key;

use super::super::formats::{BF16, F8E4M3, F8E5M2, F16};
use super::super::scratch::Bump;
use super::super::vector::{Scalar, Vector};
use super::super::view::Shared;
use super::Sink;
use super::convert::{Narrow, Stored, Truth, Widen};
use super::functions as f;
use super::lanes::{AddRows, Choose, Draws, Kind, Map, Operand, Ramp, Reduce, Span, Zip};
use super::plan::{Place, Plan, is_dense};
use crate::rows::{Access, BinaryOp, Digit, Draw, Instr, Output, ReduceOp, UnaryOp};

/// The registers and the position of one task.
pub(in super::super) struct Machine<'a, V: Vector> {
    plan: &'a Plan<'a>,
    inputs: &'a [Shared<u8>],
    sinks: &'a [Sink<V::Scalar>],
    lanes: *mut V::Scalar,
    per_row: *mut V::Scalar,
    /// Where the values of the current block are.
    starts: *mut *const V::Scalar,
    block: Block,
}

/// The rows and columns being computed.
#[derive(Clone, Copy)]
struct Block {
    row: usize,
    rows: usize,
    col: usize,
    cols: usize,
}

impl<'a, V: Vector> Machine<'a, V> {
    pub(super) fn new(
        plan: &'a Plan<'a>,
        inputs: &'a [Shared<u8>],
        sinks: &'a [Sink<V::Scalar>],
        scratch: &mut Bump,
    ) -> Machine<'a, V> {
        let lanes = scratch.take(plan.lane_registers * plan.lane_stride());
        let per_row = scratch.take(plan.row_registers * plan.row_stride());
        let starts = scratch.take(plan.places.len());
        let block = Block { row: 0, rows: 0, col: 0, cols: 0 };
        Machine { plan, inputs, sinks, lanes, per_row, starts, block }
    }

    /// Computes rows and columns `[from, to)`; `indices` are those of the row task and the task.
    pub(in super::super) fn run(
        &mut self,
        rows: [usize; 2],
        cols: [usize; 2],
        indices: [usize; 2],
    ) {
        let plan = self.plan;
        let [block_rows, block_cols] = [plan.block_rows, plan.block_cols];
        self.block = Block { row: rows[0], rows: block_rows, col: 0, cols: block_cols };
        self.run_steps(&plan.once);
        for row in (rows[0]..rows[1]).step_by(block_rows) {
            self.block.row = row;
            self.block.rows = block_rows.min(rows[1] - row);
            self.start_reductions();
            for (index, phase) in plan.phases.iter().enumerate() {
                self.run_steps(&phase.before);
                for col in (cols[0]..cols[1]).step_by(block_cols) {
                    self.block.col = col;
                    self.block.cols = block_cols.min(cols[1] - col);
                    self.run_steps(&phase.each);
                    if index + 1 == plan.phases.len() {
                        self.write(indices);
                    }
                }
            }
        }
    }

    fn run_steps(&mut self, steps: &[usize]) {
        for &value in steps {
            self.step(value);
        }
    }

    fn step(&mut self, value: usize) {
        match &self.plan.rows.instrs[value] {
            Instr::Load { input } => self.load(value, *input),
            Instr::Const { value: x } => self.fill(value, *x),
            Instr::Index { row, col_stride, base } => {
                self.index(value, row, *col_stride, base.bound());
            }
            Instr::Unary { op, x } => self.unary(value, *op, *x),
            Instr::Binary { op, a, b } => self.binary(value, *op, *a, *b),
            Instr::Select { condition, a, b } => {
                let operands = [*condition, *a, *b].map(|o| self.operand(value, o));
                V::call(Choose { target: self.target(value), operands, span: self.span(value) });
            }
            Instr::Reduce { op, x } => self.reduce(value, *op, *x),
            Instr::Random(draw) => self.random(value, draw),
        }
    }

    /// Lanes that the result of an instruction has, as rows of columns.
    fn span(&self, value: usize) -> Span {
        match self.plan.kinds[value] {
            Kind::Lanes => Span { rows: self.block.rows, cols: self.block.cols },
            Kind::PerRow => Span { rows: 1, cols: self.block.rows },
            Kind::Uniform => Span { rows: 1, cols: 1 },
        }
    }

    /// The register or memory that a value is computed into.
    fn target(&mut self, value: usize) -> *mut V::Scalar {
        let target = match self.plan.places[value] {
            Place::Nowhere => unreachable!("only values with a reader are computed"),
            Place::Lanes(register) | Place::Input(register) => {
                self.lanes.wrapping_add(register * self.plan.lane_stride())
            }
            Place::Rows(register) => self.per_row.wrapping_add(register * self.plan.row_stride()),
            Place::Output(index) => {
                let Output::Store { access, .. } = &self.plan.rows.outputs[index] else {
                    unreachable!("values are computed into stores only");
                };
                let first = access.row_start(self.block.row) + self.block.col;
                self.memory(index).cast::<V::Scalar>().wrapping_add(first)
            }
        };
        self.set_start(value, target);
        target
    }

    fn memory(&self, output: usize) -> *mut u8 {
        match self.sinks[output] {
            Sink::Memory(start) => start.get(),
            Sink::Columns(_) | Sink::Total(_) => unreachable!("sums are no stores"),
        }
    }

    fn set_start(&mut self, value: usize, start: *const V::Scalar) {
        // SAFETY: the table has an entry per value.
        unsafe { *self.starts.add(value) = start }
    }

    fn start(&self, value: usize) -> *const V::Scalar {
        // SAFETY: the table has an entry per value, set before any reader runs.
        unsafe { *self.starts.add(value) }
    }

    /// A value as operand of the instruction that computes `reader`.
    fn operand(&self, reader: usize, value: usize) -> Operand<V::Scalar> {
        let one_lane_per_row = self.plan.kinds[reader] != Kind::Lanes || self.block.cols == 1;
        let kind = match self.plan.kinds[value] {
            Kind::PerRow if one_lane_per_row => Kind::Lanes,
            kind @ (Kind::Lanes | Kind::PerRow | Kind::Uniform) => kind,
        };
        Operand { start: self.start(value), kind }
    }

    fn slice(&mut self, value: usize) -> &mut [V::Scalar] {
        let span = self.span(value);
        let target = self.target(value);
        // SAFETY: the target holds the lanes of the span, and nothing else refers to it now.
        unsafe { std::slice::from_raw_parts_mut(target, span.rows * span.cols) }
    }

    fn fill(&mut self, value: usize, x: f64) {
        self.slice(value).fill(V::Scalar::from_f64(x));
    }

    fn index(&mut self, value: usize, row: &[Digit], col_stride: usize, base: i64) {
        let (block, span) = (self.block, self.span(value));
        let is_lanes = self.plan.kinds[value] == Kind::Lanes;
        let target = self.target(value);
        let (lines, len) = if is_lanes { (span.rows, span.cols) } else { (span.cols, 1) };
        for r in 0..lines {
            let digits: usize = row.iter().map(|d| d.of(block.row + r)).sum();
            let first =
                base + digits as i64 + if is_lanes { block.col * col_stride } else { 0 } as i64;
            V::call(Ramp { target: target.wrapping_add(r * len), first, stride: col_stride, len });
        }
    }

    fn random(&mut self, value: usize, draw: &Draw) {
        let words = self.inputs[draw.key].get().cast::<[u32; 4]>();
        // SAFETY: the key input holds four words.
        let key = Key::from_words(unsafe { words.read_unaligned() });
        let (stream, bits) = (key.stream(draw.salt), draw.bits);
        let offset = draw.offset.bound().cast_unsigned().wrapping_mul(draw.unit);
        let origin = offset.wrapping_add(u64::from(key.sample) * draw.sample_stride);
        let (block, span) = (self.block, self.span(value));
        let is_lanes = self.plan.kinds[value] == Kind::Lanes;
        let target = self.target(value);
        let (lines, len) = if is_lanes { (span.rows, span.cols) } else { (span.cols, 1) };
        for r in 0..lines {
            let digits: usize = draw.row.iter().map(|d| d.of(block.row + r)).sum();
            let base = origin.wrapping_add(digits as u64);
            let target = target.wrapping_add(r * len);
            match draw.col[..] {
                [Digit { div: 1, modulus, stride }] if modulus >= block.col + block.cols => {
                    let (base, stride) = (base + (block.col * stride) as u64, stride as u64);
                    V::call(Draws { target, stream, bits, base, stride, len });
                }
                _ => {
                    for c in 0..len {
                        let col: usize = draw.col.iter().map(|d| d.of(block.col + c)).sum();
                        let x = bits.uniform(stream, base.wrapping_add(col as u64));
                        // SAFETY: the target holds the lanes of the span.
                        unsafe { *target.add(c) = V::Scalar::from_f32(x) };
                    }
                }
            }
        }
    }

    fn start_reductions(&mut self) {
        for (value, instr) in self.plan.rows.instrs.iter().enumerate() {
            if let (Instr::Reduce { op, .. }, Place::Rows(_)) = (instr, self.plan.places[value]) {
                let identity = match op {
                    ReduceOp::Sum => V::Scalar::ZERO,
                    ReduceOp::Max => V::Scalar::LOWEST,
                    ReduceOp::Min => V::Scalar::HIGHEST,
                };
                self.slice(value).fill(identity);
            }
        }
    }

    fn reduce(&mut self, value: usize, op: ReduceOp, x: usize) {
        let target = self.start(value).cast_mut();
        let span = Span { rows: self.block.rows, cols: self.block.cols };
        let start = self.start(x);
        if self.plan.kinds[x] == Kind::Lanes {
            if self.plan.rows.cols == 1 {
                let function = PhantomData;
                return V::call(Map::<f::Same, _> { target, x: start, len: span.rows, function });
            }
            return V::call(Reduce { op, target, x: start, span });
        }
        let per_row = self.plan.kinds[x] == Kind::PerRow;
        for row in 0..span.rows {
            // SAFETY: both registers hold a number per row, or one for all.
            unsafe {
                let x = *start.add(if per_row { row } else { 0 });
                let target = target.add(row);
                *target = match op {
                    ReduceOp::Sum => *target + x * V::Scalar::from_f64(span.cols as f64),
                    ReduceOp::Max => super::lanes::larger(*target, x),
                    ReduceOp::Min => super::lanes::smaller(*target, x),
                };
            }
        }
    }

    fn unary(&mut self, value: usize, op: UnaryOp, x: usize) {
        let len = self.span(value).rows * self.span(value).cols;
        let (x, target) = (self.start(x), self.target(value));
        macro_rules! map {
            ($name:ident) => {
                V::call(Map::<f::$name, V::Scalar> { target, x, len, function: PhantomData })
            };
        }
        match op {
            UnaryOp::Neg => map!(Neg),
            UnaryOp::Abs => map!(Abs),
            UnaryOp::Exp => map!(Exp),
            UnaryOp::Log => map!(Log),
            UnaryOp::Sqrt => map!(Sqrt),
            UnaryOp::Rsqrt => map!(Rsqrt),
            UnaryOp::Recip => map!(Recip),
            UnaryOp::Tanh => map!(Tanh),
            UnaryOp::Erf => map!(Erf),
            UnaryOp::Sin => map!(Sin),
            UnaryOp::Cos => map!(Cos),
            UnaryOp::Floor => map!(Floor),
            UnaryOp::PowerFloor => map!(PowerFloor),
            UnaryOp::Sigmoid => map!(Sigmoid),
            UnaryOp::Square => map!(Square),
            UnaryOp::GeluTanh => map!(GeluTanh),
            UnaryOp::GeluErf => map!(GeluErf),
            UnaryOp::Silu => map!(Silu),
            UnaryOp::Not => map!(Not),
            UnaryOp::WrapI32 => map!(WrapI32),
            UnaryOp::WrapU32 => map!(WrapU32),
            UnaryOp::Single => map!(Single),
            UnaryOp::RoundBF16 => map!(RoundBF16),
            UnaryOp::RoundF16 => map!(RoundF16),
            UnaryOp::RoundF8E4M3 => map!(RoundF8E4M3),
            UnaryOp::RoundF8E5M2 => map!(RoundF8E5M2),
        }
    }

    fn binary(&mut self, value: usize, op: BinaryOp, a: usize, b: usize) {
        let (a, b) = (self.operand(value, a), self.operand(value, b));
        let span = self.span(value);
        let target = self.target(value);
        macro_rules! zip {
            ($name:ident, $a:expr, $b:expr) => {{
                let (a, b) = ($a, $b);
                V::call(Zip::<f::$name, V::Scalar> { target, a, b, span, function: PhantomData })
            }};
        }
        match op {
            BinaryOp::Add => zip!(Add, a, b),
            BinaryOp::Sub => zip!(Sub, a, b),
            BinaryOp::Mul => zip!(Mul, a, b),
            BinaryOp::Div => zip!(Div, a, b),
            BinaryOp::Max => zip!(Max, a, b),
            BinaryOp::Min => zip!(Min, a, b),
            BinaryOp::Pow => zip!(Pow, a, b),
            BinaryOp::Lt => zip!(Lt, a, b),
            BinaryOp::Le => zip!(Le, a, b),
            BinaryOp::Eq => zip!(Eq, a, b),
            BinaryOp::Ge => zip!(Le, b, a),
            BinaryOp::Gt => zip!(Lt, b, a),
            BinaryOp::And => zip!(And, a, b),
            BinaryOp::Or => zip!(Or, a, b),
            BinaryOp::GeluTanhGrad => zip!(GeluTanhGrad, a, b),
            BinaryOp::GeluErfGrad => zip!(GeluErfGrad, a, b),
            BinaryOp::SiluGrad => zip!(SiluGrad, a, b),
        }
    }

    fn load(&mut self, value: usize, input: usize) {
        let plan = self.plan;
        let dtype = plan.rows.inputs[input].dtype;
        let access = &plan.rows.inputs[input].access;
        let first = access.row_start(self.block.row) + self.block.col * access.col_stride;
        let one_line = self.block.rows == 1 || is_dense(access, plan.rows.rows, plan.rows.cols);
        let there = dtype == plan.rows.dtype && access.col_stride == 1 && one_line;
        if there && matches!(plan.places[value], Place::Input(_)) {
            let start = self.inputs[input].get().cast::<V::Scalar>();
            return self.set_start(value, start.wrapping_add(first));
        }
        match dtype {
            DType::F32 => self.widen::<f32>(value, input),
            DType::F64 => self.widen::<f64>(value, input),
            DType::I32 => self.widen::<i32>(value, input),
            DType::U32 => self.widen::<u32>(value, input),
            DType::Bool => self.widen::<Truth>(value, input),
            DType::BF16 => self.widen::<BF16>(value, input),
            DType::F16 => self.widen::<F16>(value, input),
            DType::F8E4M3 => self.widen::<F8E4M3>(value, input),
            DType::F8E5M2 => self.widen::<F8E5M2>(value, input),
            DType::I8 | DType::I64 => unreachable!("block programs do not load {dtype}"),
        }
    }

    fn widen<T: Stored>(&mut self, value: usize, input: usize) {
        let (block, span) = (self.block, self.span(value));
        let access = &self.plan.rows.inputs[input].access;
        let source = self.inputs[input].get().cast::<T>();
        let target = self.target(value);
        if self.plan.kinds[value] == Kind::Lanes {
            for r in 0..span.rows {
                let first = access.row_start(block.row + r) + block.col * access.col_stride;
                V::call(Widen {
                    target: target.wrapping_add(r * span.cols),
                    source: source.wrapping_add(first),
                    stride: access.col_stride,
                    len: span.cols,
                });
            }
            return;
        }
        let (stride, regular) = row_stride(access, self.plan.rows.rows);
        let source = |row: usize| source.wrapping_add(access.row_start(row));
        if regular {
            V::call(Widen { target, source: source(block.row), stride, len: span.cols });
        } else {
            for r in 0..span.cols {
                let target = target.wrapping_add(r);
                V::call(Widen { target, source: source(block.row + r), stride: 1, len: 1 });
            }
        }
    }

    /// Writes the outputs of the block: sums first, as stores may overwrite what they read.
    fn write(&mut self, [row_task, task]: [usize; 2]) {
        for (index, output) in self.plan.rows.outputs.iter().enumerate() {
            match (output, self.sinks[index]) {
                (Output::ColSum { value, .. }, Sink::Columns(partial)) => {
                    let first = row_task * self.plan.rows.cols + self.block.col;
                    let target = partial.get().wrapping_add(first);
                    self.add_rows(*value, target);
                }
                (Output::TotalSum { value, .. }, Sink::Total(partial)) => {
                    let sum = self.total(*value);
                    // SAFETY: the buffer has a sum per task.
                    unsafe { *partial.get().add(task) += sum };
                }
                _ => {}
            }
        }
        for (index, output) in self.plan.rows.outputs.iter().enumerate() {
            let Output::Store { value, access, dtype, accumulate } = output else { continue };
            if self.plan.places[*value] == Place::Output(index) {
                continue;
            }
            if self.store(index, *value, access, *dtype, *accumulate) {
                continue;
            }
            match dtype {
                DType::F32 => self.narrow::<f32>(index, *value, access, *accumulate),
                DType::F64 => self.narrow::<f64>(index, *value, access, *accumulate),
                DType::I32 => self.narrow::<i32>(index, *value, access, *accumulate),
                DType::U32 => self.narrow::<u32>(index, *value, access, *accumulate),
                DType::Bool => self.narrow::<Truth>(index, *value, access, *accumulate),
                DType::BF16 => self.narrow::<BF16>(index, *value, access, *accumulate),
                DType::F16 => self.narrow::<F16>(index, *value, access, *accumulate),
                DType::F8E4M3 => self.narrow::<F8E4M3>(index, *value, access, *accumulate),
                DType::F8E5M2 => self.narrow::<F8E5M2>(index, *value, access, *accumulate),
                DType::I8 | DType::I64 => unreachable!("block programs do not store {dtype}"),
            }
        }
    }

    fn add_rows(&self, value: usize, target: *mut V::Scalar) {
        let span = Span { rows: self.block.rows, cols: self.block.cols };
        if span.cols == 1 {
            let span = Span { rows: 1, cols: span.rows };
            return V::call(Reduce { op: ReduceOp::Sum, target, x: self.start(value), span });
        }
        V::call(AddRows { target, x: self.start(value), span });
    }

    fn total(&self, value: usize) -> f64 {
        let (rows, x) = (self.block.rows, self.start(value));
        let len = match self.plan.kinds[value] {
            Kind::Lanes => rows * self.block.cols,
            // A row scalar counts once, with the first piece of its row.
            Kind::PerRow if self.block.col == 0 => rows,
            Kind::Uniform if self.block.col == 0 => {
                // SAFETY: a uniform register holds a number.
                return rows as f64 * unsafe { (*x).to_f64() };
            }
            Kind::PerRow | Kind::Uniform => return 0.0,
        };
        let mut sum = V::Scalar::ZERO;
        let span = Span { rows: 1, cols: len };
        V::call(Reduce { op: ReduceOp::Sum, target: &mut sum, x, span });
        sum.to_f64()
    }

    /// Stores lanes of the output's own type by vectors; says whether it did.
    fn store(
        &self,
        index: usize,
        value: usize,
        access: &Access,
        dtype: DType,
        accumulate: bool,
    ) -> bool {
        let (block, shape) = (self.block, &self.plan.rows);
        let lanes = self.plan.kinds[value] == Kind::Lanes && access.col_stride == 1;
        if !lanes || dtype != shape.dtype {
            return false;
        }
        let dense = is_dense(access, shape.rows, shape.cols);
        let (lines, len) =
            if dense { (1, block.rows * block.cols) } else { (block.rows, block.cols) };
        let memory = self.memory(index).cast::<V::Scalar>();
        for r in 0..lines {
            let target = memory.wrapping_add(access.row_start(block.row + r) + block.col);
            let x = self.start(value).wrapping_add(r * block.cols);
            if accumulate {
                V::call(AddRows { target, x, span: Span { rows: 1, cols: len } });
            } else {
                V::call(Map::<f::Same, V::Scalar> { target, x, len, function: PhantomData });
            }
        }
        true
    }

    fn narrow<T: Stored>(&self, index: usize, value: usize, access: &Access, accumulate: bool) {
        let memory = self.memory(index).cast::<T>();
        let (block, kind, source) = (self.block, self.plan.kinds[value], self.start(value));
        let shape = &self.plan.rows;
        if kind != Kind::Lanes && access.col_stride == 0 {
            if block.col > 0 {
                return;
            }
            let (stride, regular) = row_stride(access, shape.rows);
            let (lines, len) = if regular { (1, block.rows) } else { (block.rows, 1) };
            for r in 0..lines {
                let target = memory.wrapping_add(access.row_start(block.row + r));
                let source = source.wrapping_add(if kind == Kind::PerRow { r } else { 0 });
                let repeat = kind == Kind::Uniform;
                V::call(Narrow { target, stride, source, repeat, accumulate, len });
            }
            return;
        }
        let dense = kind == Kind::Lanes && is_dense(access, shape.rows, shape.cols);
        let (lines, len) =
            if dense { (1, block.rows * block.cols) } else { (block.rows, block.cols) };
        for r in 0..lines {
            let first = access.row_start(block.row + r) + block.col * access.col_stride;
            let target = memory.wrapping_add(first);
            let operand = Operand { start: source, kind };
            let source = operand.of_row(r, block.cols);
            let (stride, repeat) = (access.col_stride, kind != Kind::Lanes);
            V::call(Narrow { target, stride, source, repeat, accumulate, len });
        }
    }
}

/// The distance of the elements of successive rows, and whether there is one.
fn row_stride(access: &Access, rows: usize) -> (usize, bool) {
    match access.row[..] {
        [Digit { div: 1, modulus, stride }] if modulus >= rows => (stride, true),
        [] => (0, true),
        _ => (0, false),
    }
}
