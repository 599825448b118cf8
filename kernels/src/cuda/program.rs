//! Values of fused loops over rows as C++ expressions.

use std::collections::BTreeSet;

use ir::DType;

use super::draws::{DrawNumber, is_aligned, is_by_column};
use super::index::{access, digits};
use super::parameter::Named;
use super::text::{Text, element, line, number};
use super::vector::Vectorized;
use crate::rows::{Access, BinaryOp, Instr, Output, ReduceOp, Rows, UnaryOp};

/// A fused loop over rows that is printed: its values are expressions of the variables `row` and
/// `col`.
pub(super) struct Program<'r> {
    pub(super) rows: &'r Rows,
    /// For each value, whether it differs by column.
    pub(super) vectors: Vec<bool>,
    /// For each value, how many reductions lie one behind the other before it.
    levels: Vec<usize>,
    /// Names of the buffers of inputs.
    pub(super) inputs: Vec<String>,
    /// What is loaded and stored by vectors, whose element is `e`.
    pub(super) vector: Option<Vectorized>,
}

impl<'r> Program<'r> {
    pub(super) fn new(
        rows: &'r Rows,
        inputs: Vec<String>,
        vector: Option<&Vectorized>,
    ) -> Program<'r> {
        let mut levels: Vec<usize> = Vec::with_capacity(rows.instrs.len());
        for instr in &rows.instrs {
            let before = instr.operands().map(|operand| levels[operand]).max().unwrap_or(0);
            levels.push(before + usize::from(matches!(instr, Instr::Reduce { .. })));
        }
        Program { rows, vectors: rows.vectors(), levels, inputs, vector: vector.cloned() }
    }

    /// The type that is computed in.
    pub(super) fn compute(&self) -> &'static str {
        element(self.rows.dtype)
    }

    /// The most reductions one behind the other.
    pub(super) fn depth(&self) -> usize {
        self.levels.iter().max().copied().unwrap_or(0)
    }

    /// The reductions that can be made once those of lower levels are known.
    pub(super) fn reductions(&self, level: usize) -> Vec<(usize, ReduceOp, usize)> {
        let found = self.rows.instrs.iter().enumerate().filter_map(|(at, instr)| {
            let Instr::Reduce { op, x } = instr else { return None };
            (self.levels[at] == level).then_some((at, *op, *x))
        });
        found.collect()
    }

    /// Row scalars of a level that are not reductions.
    pub(super) fn row_scalars(&self, level: usize) -> BTreeSet<usize> {
        let is_meant = |at: &usize| {
            let is_reduction = matches!(self.rows.instrs[*at], Instr::Reduce { .. });
            !self.vectors[*at] && !is_reduction && self.levels[*at] == level
        };
        (0..self.rows.instrs.len()).filter(is_meant).collect()
    }

    /// The vectors that some values are made of, these too; not those that known ones are made of.
    pub(super) fn vectors_of(
        &self,
        values: impl IntoIterator<Item = usize>,
        known: &BTreeSet<usize>,
    ) -> BTreeSet<usize> {
        let mut needed = BTreeSet::new();
        let mut open: Vec<usize> = values.into_iter().collect();
        while let Some(value) = open.pop() {
            if self.vectors[value] && needed.insert(value) && !known.contains(&value) {
                open.extend(self.rows.instrs[value].operands());
            }
        }
        needed
    }

    /// For each pass over a row, the vectors that it needs: one for the reductions of each level
    /// that has some, and the last one for what is stored and summed.
    pub(super) fn passes(&self) -> Vec<BTreeSet<usize>> {
        let none = BTreeSet::new();
        let level = |level: usize| {
            let reduced = self.reductions(level).into_iter().map(|(_, _, x)| x);
            self.vectors_of(reduced, &none)
        };
        let last = self.vectors_of(self.rows.outputs.iter().map(Output::value), &none);
        (0..=self.depth()).map(level).chain([last]).collect()
    }

    /// Prints the streams of all draws, which differ by neither row nor column.
    pub(super) fn streams(&self, text: &mut Text) {
        for (at, instr) in self.rows.instrs.iter().enumerate() {
            if let Instr::Random(draw) = instr {
                let key = &self.inputs[draw.key];
                line!(text, "const u64 stream{at} = stream_of({key}, {}u);", draw.salt);
                line!(
                    text,
                    "const u64 drawn{at} = (u64)draw{at} * {}ULL + (u64){key}[3] * {}ULL;",
                    draw.unit,
                    draw.sample_stride
                );
            }
        }
    }

    /// Prints values, each as a constant of its own.
    pub(super) fn values(&self, text: &mut Text, values: &BTreeSet<usize>) {
        for at in values {
            line!(text, "const {} v{at} = {};", self.compute(), self.value(*at));
        }
    }

    /// The same of a pass over a row, of which some values are kept for the passes behind it, and
    /// known once one has computed them.
    pub(super) fn values_of_pass(
        &self,
        text: &mut Text,
        values: &BTreeSet<usize>,
        kept: &[usize],
        known: &mut BTreeSet<usize>,
    ) {
        let width = self.vector.as_ref().map_or(1, |vector| vector.width);
        for at in values {
            let place = format!("kept_v{at}[turn * {width} + e]");
            if known.contains(at) {
                line!(text, "const {} v{at} = {place};", self.compute());
                continue;
            }
            line!(text, "const {} v{at} = {};", self.compute(), self.value(*at));
            if kept.contains(at) {
                line!(text, "{place} = v{at};");
                known.insert(*at);
            }
        }
    }

    /// The expression of a value that is no reduction.
    fn value(&self, at: usize) -> String {
        let Rows { rows, cols, dtype, .. } = *self.rows;
        let compute = self.compute();
        match &self.rows.instrs[at] {
            Instr::Load { input }
                if self.vector.as_ref().is_some_and(|vector| vector.inputs[*input]) =>
            {
                format!("Load<{compute}>::of(w{input}.x[e])")
            }
            Instr::Load { input } => {
                let place = access(&self.rows.inputs[*input].access, rows, "col");
                format!("Load<{compute}>::of({}[{place}])", self.inputs[*input])
            }
            Instr::Const { value } => number(dtype, *value),
            Instr::Index { row, col_stride, .. } => {
                let row = digits(row, "row", rows);
                let col = if *col_stride > 0 {
                    format!(" + (i64)col * {col_stride}")
                } else {
                    String::new()
                };
                format!("({compute})(index{at} + (i64)({row}){col})")
            }
            Instr::Unary { op, x } => unary(*op, dtype, &format!("v{x}")),
            Instr::Binary { op, a, b } => binary(*op, dtype, &format!("v{a}"), &format!("v{b}")),
            Instr::Select { condition, a, b } => format!("v{condition} != 0 ? v{a} : v{b}"),
            Instr::Reduce { .. } => unreachable!("reductions are printed as loops"),
            Instr::Random(draw) => {
                let (row, col) = (digits(&draw.row, "row", rows), digits(&draw.col, "col", cols));
                let row = format!("drawn{at} + (u64)({row})");
                let is_stepwise = self.vector.is_some() && is_by_column(draw, self.rows.cols);
                let [col, step] = if is_stepwise { ["first", "e"] } else { [col.as_str(), "0"] };
                let place = DrawNumber { row: &row, col, step, is_aligned: is_aligned(draw) };
                format!("({compute}){}", place.draw(draw.bits, &format!("stream{at}")))
            }
        }
    }

    /// Prints a store of a value at `row` and `col`.
    pub(super) fn store(&self, text: &mut Text, at: usize, target: &str) {
        let Output::Store { value, access: place, dtype, accumulate } = &self.rows.outputs[at]
        else {
            return;
        };
        let kept = element(*dtype);
        let target = match &self.vector {
            Some(vector) if vector.outputs[at] => format!("s{at}.x[e]"),
            _ => format!("{target}[{}]", access(place, self.rows.rows, "col")),
        };
        if *accumulate {
            let compute = self.compute();
            let sum = if *dtype == DType::I64 {
                format!("add({target}, v{value})")
            } else if dtype.is_narrow() {
                format!("Store<{kept}>::of(Load<{compute}>::of({target}) + v{value})")
            } else {
                // Of a narrower number than is computed in, the type of the buffer adds.
                format!("{target} + Store<{kept}>::of(({compute})v{value})")
            };
            line!(text, "{target} = {sum};");
        } else {
            line!(text, "{target} = Store<{kept}>::of(v{value});");
        }
    }
}

impl Program<'_> {
    /// Declares the vectors that are kept over all steps of a row.
    pub(super) fn declare_kept(&self, turns: usize, text: &mut Text) {
        for (input, kind, width) in self.vector_loads() {
            line!(text, "Vector<{kind}, {width}> kept{input}[{turns}];");
        }
    }

    /// Prints the loads of those of a step.
    pub(super) fn keep(&self, text: &mut Text) {
        for (input, kind, width) in self.vector_loads() {
            let place = self.first(&self.rows.inputs[input].access);
            let name = &self.inputs[input];
            line!(text, "kept{input}[turn] = load_vector<{kind}, {width}>({name} + {place});");
        }
    }

    /// The inputs that are loaded by vectors, with their types and the vectors' width.
    fn vector_loads(&self) -> impl Iterator<Item = (usize, &'static str, usize)> {
        let of = |vector: &Vectorized, input: usize| vector.inputs[input].then_some(vector.width);
        let inputs = self.rows.inputs.iter().enumerate();
        inputs.filter_map(move |(input, row)| {
            Some((input, element(row.dtype), of(self.vector.as_ref()?, input)?))
        })
    }

    /// Prints the vector loads of the inputs that some values depend on, at columns from `first`;
    /// or names those that are kept.
    pub(super) fn load_vectors(&self, values: &BTreeSet<usize>, keeps: bool, text: &mut Text) {
        let Some(vector) = &self.vector else { return };
        let mut loaded = BTreeSet::new();
        for value in values {
            if let Instr::Load { input } = &self.rows.instrs[*value]
                && vector.inputs[*input]
                && loaded.insert(*input)
            {
                let of = &self.rows.inputs[*input];
                let place = self.first(&of.access);
                let (kind, width, name) = (element(of.dtype), vector.width, &self.inputs[*input]);
                if keeps {
                    line!(text, "const Vector<{kind}, {width}>& w{input} = kept{input}[turn];");
                    continue;
                }
                line!(
                    text,
                    "const Vector<{kind}, {width}> w{input} = \
                     load_vector<{kind}, {width}>({name} + {place});"
                );
            }
        }
    }

    /// The offset of the first element of a thread's vector.
    fn first(&self, of: &Access) -> String {
        access(of, self.rows.rows, "first")
    }

    /// Declares the vectors that are stored, loaded before where the output accumulates.
    pub(super) fn open_stores(&self, targets: &[(usize, String)], text: &mut Text) {
        for (at, target, access, kind, accumulate) in self.vector_stores(targets) {
            let width = self.vector.as_ref().map_or(1, |vector| vector.width);
            line!(text, "Vector<{kind}, {width}> s{at};");
            if accumulate {
                let place = self.first(access);
                line!(text, "s{at} = load_vector<{kind}, {width}>({target} + {place});");
            }
        }
    }

    /// Prints the vector stores.
    pub(super) fn close_stores(&self, targets: &[(usize, String)], text: &mut Text) {
        for (at, target, access, ..) in self.vector_stores(targets) {
            line!(text, "store_vector({target} + {}, s{at});", self.first(access));
        }
    }

    /// Those of some outputs, given with their buffers, that are stored by vectors.
    fn vector_stores<'t>(
        &self,
        targets: &'t [(usize, String)],
    ) -> Vec<(usize, &'t str, &Access, &'static str, bool)> {
        let Some(vector) = &self.vector else { return Vec::new() };
        let store = |(at, target): &'t (usize, String)| match &self.rows.outputs[*at] {
            Output::Store { access, dtype, accumulate, .. } if vector.outputs[*at] => {
                Some((*at, &target[..], access, element(*dtype), *accumulate))
            }
            Output::Store { .. } | Output::ColSum { .. } | Output::TotalSum { .. } => None,
        };
        targets.iter().filter_map(store).collect()
    }

    /// Opens the loop over the elements of a vector, columns from `first`.
    pub(super) fn open_columns(&self, text: &mut Text) {
        let width = self.vector.as_ref().map_or(1, |vector| vector.width);
        line!(text, "UNROLL");
        line!(text, "for (u32 e = 0; e < {width}; e += 1) {{");
        line!(text, "const u64 col = first + e;");
    }
}

/// The offsets of a program, as its text names them.
pub(super) fn offsets(rows: &Rows) -> Vec<Named> {
    let offset = |(at, instr): (usize, &Instr)| match instr {
        Instr::Random(draw) => Some(Named::new(format!("draw{at}"), draw.offset)),
        Instr::Index { base, .. } => Some(Named::new(format!("index{at}"), *base)),
        Instr::Load { .. }
        | Instr::Const { .. }
        | Instr::Unary { .. }
        | Instr::Binary { .. }
        | Instr::Select { .. }
        | Instr::Reduce { .. } => None,
    };
    rows.instrs.iter().enumerate().filter_map(offset).collect()
}

/// The combination of two numbers.
pub(super) fn combined(op: ReduceOp, dtype: DType, a: &str, b: &str) -> String {
    match op {
        ReduceOp::Sum => binary(BinaryOp::Add, dtype, a, b),
        ReduceOp::Max => binary(BinaryOp::Max, dtype, a, b),
        ReduceOp::Min => binary(BinaryOp::Min, dtype, a, b),
    }
}

/// What combines with any number to that.
pub(super) fn identity(op: ReduceOp, dtype: DType) -> String {
    let whole = dtype == DType::I64;
    match op {
        ReduceOp::Sum => number(dtype, 0.0),
        ReduceOp::Max if whole => number(dtype, i64::MIN as f64),
        ReduceOp::Min if whole => number(dtype, i64::MAX as f64),
        ReduceOp::Max => number(dtype, f64::NEG_INFINITY),
        ReduceOp::Min => number(dtype, f64::INFINITY),
    }
}

fn unary(op: UnaryOp, dtype: DType, x: &str) -> String {
    let compute = element(dtype);
    if dtype == DType::I64 {
        return match op {
            UnaryOp::Neg => format!("neg({x})"),
            UnaryOp::Abs => format!("{x} < 0 ? neg({x}) : {x}"),
            UnaryOp::Square => format!("mul({x}, {x})"),
            UnaryOp::Not => format!("(i64)({x} == 0)"),
            UnaryOp::WrapI32 => format!("(i64)(i32)(u32)(u64){x}"),
            UnaryOp::WrapU32 => format!("(i64)(u32)(u64){x}"),
            UnaryOp::Floor => x.to_owned(),
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
        };
    }
    let one = number(dtype, 1.0);
    match op {
        UnaryOp::Neg => format!("-{x}"),
        UnaryOp::Abs => format!("abs_of({x})"),
        UnaryOp::Exp => format!("exp_of({x})"),
        UnaryOp::Log => format!("log_of({x})"),
        UnaryOp::Sqrt => format!("sqrt_of({x})"),
        UnaryOp::Rsqrt => format!("{one} / sqrt_of({x})"),
        UnaryOp::Recip => format!("{one} / {x}"),
        UnaryOp::Tanh => format!("tanh_of({x})"),
        UnaryOp::Erf => format!("erf_of({x})"),
        UnaryOp::Sin => format!("sin_of({x})"),
        UnaryOp::Cos => format!("cos_of({x})"),
        UnaryOp::Floor => format!("floor_of({x})"),
        UnaryOp::PowerFloor => format!("power_floor({x})"),
        UnaryOp::Sigmoid => format!("sigmoid_of({x})"),
        UnaryOp::Square => format!("{x} * {x}"),
        UnaryOp::GeluTanh => format!("gelu_tanh({x})"),
        UnaryOp::GeluErf => format!("{x} * normal_below({x})"),
        UnaryOp::Silu => format!("{x} * sigmoid_of({x})"),
        UnaryOp::Not => format!("({compute})({x} == 0)"),
        UnaryOp::WrapI32 => format!("wrapped({x}, ({compute})0.5)"),
        UnaryOp::WrapU32 => format!("wrapped({x}, ({compute})0.0)"),
        UnaryOp::Single => format!("rounded<float>({x})"),
        UnaryOp::RoundBF16 => format!("rounded<bf16>({x})"),
        UnaryOp::RoundF16 => format!("rounded<f16>({x})"),
        UnaryOp::RoundF8E4M3 => format!("rounded<f8e4m3>({x})"),
        UnaryOp::RoundF8E5M2 => format!("rounded<f8e5m2>({x})"),
    }
}

fn binary(op: BinaryOp, dtype: DType, a: &str, b: &str) -> String {
    let compute = element(dtype);
    let is_whole = dtype == DType::I64;
    let truth = |text: String| format!("({compute})({text})");
    match op {
        BinaryOp::Add if is_whole => format!("add({a}, {b})"),
        BinaryOp::Sub if is_whole => format!("sub({a}, {b})"),
        BinaryOp::Mul if is_whole => format!("mul({a}, {b})"),
        BinaryOp::Div if is_whole => format!("floor_div({a}, {b})"),
        BinaryOp::Pow if is_whole => format!("power({a}, {b})"),
        BinaryOp::Add => format!("{a} + {b}"),
        BinaryOp::Sub => format!("{a} - {b}"),
        BinaryOp::Mul => format!("{a} * {b}"),
        BinaryOp::Div => format!("{a} / {b}"),
        BinaryOp::Pow => format!("pow_of({a}, {b})"),
        BinaryOp::Max => format!("larger({a}, {b})"),
        BinaryOp::Min => format!("smaller({a}, {b})"),
        BinaryOp::Lt => truth(format!("{a} < {b}")),
        BinaryOp::Le => truth(format!("{a} <= {b}")),
        BinaryOp::Eq => truth(format!("{a} == {b}")),
        BinaryOp::Ge => truth(format!("{a} >= {b}")),
        BinaryOp::Gt => truth(format!("{a} > {b}")),
        BinaryOp::And => truth(format!("{a} != 0 && {b} != 0")),
        BinaryOp::Or => truth(format!("{a} != 0 || {b} != 0")),
        BinaryOp::GeluTanhGrad => format!("gelu_tanh_grad({a}, {b})"),
        BinaryOp::GeluErfGrad => format!("gelu_erf_grad({a}, {b})"),
        BinaryOp::SiluGrad => format!("silu_grad({a}, {b})"),
    }
}
