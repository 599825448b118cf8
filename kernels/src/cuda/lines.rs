//! Operations along one dim: one thread per line, or per element where elements are independent.

use std::fmt;

use ir::DType;

use super::parameter::Parameter;
use super::program::combined;
use super::text::{Text, element, line};
use crate::kernel::{Line, Lines};
use crate::rows::ReduceOp;

/// Threads of a block.
pub(super) const THREADS: u32 = 256;

/// An operation along a dim.
#[derive(Clone, Debug, PartialEq)]
pub struct LineTile {
    /// What is computed.
    pub lines: Lines,
}

impl LineTile {
    /// Threads per line: one for each element of the result where they are independent.
    pub(super) fn each(&self) -> usize {
        let Lines { extent, result, how, .. } = &self.lines;
        match how {
            Line::Cumulative(_) | Line::Prod | Line::ArgMax => 1,
            Line::Order { .. } => *extent,
            Line::Reverse | Line::Fold { .. } | Line::Pool { .. } => *result,
        }
    }

    /// Threads that are needed.
    pub(super) fn threads(&self) -> usize {
        self.lines.outer * self.each() * self.lines.inner
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let Lines { extent, result, inner, .. } = self.lines;
        let (x, y) = (parameters[0].name(), parameters[1].name());
        line!(text, "const u64 thread = (u64)blockIdx.x * {THREADS} + threadIdx.x;");
        line!(text, "if (thread >= {}) return;", self.threads());
        let each = self.each();
        line!(text, "const u64 column = thread % {inner}, own = thread / {inner} % {each};");
        line!(text, "const u64 outer = thread / {};", inner * each);
        let of =
            |name: &str, length: usize| format!("{name} + outer * {} + column", length * inner);
        line!(text, "const {}* x = {};", element(parameters[0].dtype), of(&x, extent));
        line!(text, "{}* y = {};", element(parameters[1].dtype), of(&y, result));
        self.print_line(text);
    }

    fn print_line(&self, text: &mut Text) {
        let Lines { extent, inner, how, dtype, .. } = self.lines;
        let memory = element(dtype);
        match how {
            Line::Cumulative(op) => {
                line!(text, "{memory} sum = x[0];");
                line!(text, "y[0] = sum;");
                line!(text, "for (u64 at = 1; at < {extent}; at += 1) {{");
                line!(text, "sum = {};", self.combined(op, "sum", &format!("x[at * {inner}]")));
                line!(text, "y[at * {inner}] = sum;");
                text.end();
            }
            Line::Prod => self.print_product(text),
            Line::ArgMax => {
                line!(text, "u64 best = 0;");
                line!(text, "for (u64 at = 1; at < {extent}; at += 1) {{");
                let [a, b] = ["at", "best"].map(|at| format!("x[{at} * {inner}]"));
                line!(text, "if ({}) best = at;", self.is_above(&a, &b));
                text.end();
                line!(text, "y[0] = (i32)best;");
            }
            Line::Order { descending } => self.print_order(descending, text),
            Line::Reverse => line!(text, "y[own * {inner}] = x[({} - own) * {inner}];", extent - 1),
            Line::Fold { size, stride, dilation } => {
                self.print_fold([size, stride, dilation], text);
            }
            Line::Pool { op, size, stride, dilation } => {
                let x = |tap: &str| format!("x[(own * {stride} + {tap} * {dilation}) * {inner}]");
                line!(text, "{memory} sum = {};", x("0"));
                line!(text, "for (u64 tap = 1; tap < {size}; tap += 1) {{");
                line!(text, "sum = {};", self.combined(op, "sum", &x("tap")));
                text.end();
                line!(text, "y[own * {inner}] = sum;");
            }
        }
    }

    /// The combination as lines have it, for elements in memory.
    fn combined(&self, op: ReduceOp, a: &str, b: &str) -> String {
        match (self.lines.dtype, op) {
            (DType::F32 | DType::F64 | DType::I64, _) => combined(op, self.lines.dtype, a, b),
            (DType::Bool, ReduceOp::Sum) => format!("byte((u8)({a}.bits + {b}.bits))"),
            (DType::Bool, ReduceOp::Max) => format!("({a}.bits > {b}.bits ? {a} : {b})"),
            (DType::Bool, ReduceOp::Min) => format!("({a}.bits < {b}.bits ? {a} : {b})"),
            (dtype, ReduceOp::Sum) => format!("({})((u32){a} + (u32){b})", element(dtype)),
            (_, ReduceOp::Max) => format!("({a} > {b} ? {a} : {b})"),
            (_, ReduceOp::Min) => format!("({a} < {b} ? {a} : {b})"),
        }
    }

    /// Whether one element is above another; a NaN is above all numbers.
    fn is_above(&self, a: &str, b: &str) -> String {
        if self.lines.dtype.is_float() {
            format!("({a} > {b} || (is_nan({a}) && !is_nan({b})))")
        } else if self.lines.dtype == DType::Bool {
            format!("{a}.bits > {b}.bits")
        } else {
            format!("{a} > {b}")
        }
    }

    fn print_product(&self, text: &mut Text) {
        let Lines { extent, inner, dtype, .. } = self.lines;
        let memory = element(dtype);
        let (sum, next) = match dtype {
            DType::F32 | DType::F64 => ("double", format!("sum * x[at * {inner}]")),
            DType::I64 => ("i64", format!("mul(sum, x[at * {inner}])")),
            DType::Bool => ("u32", format!("sum * x[at * {inner}].bits")),
            DType::I32
            | DType::U32
            | DType::I8
            | DType::BF16
            | DType::F16
            | DType::F8E4M3
            | DType::F8E5M2 => ("u32", format!("sum * (u32)x[at * {inner}]")),
        };
        line!(text, "{sum} sum = 1;");
        line!(text, "for (u64 at = 0; at < {extent}; at += 1) sum = {next};");
        let result = if dtype == DType::Bool {
            "byte((u8)sum)".to_owned()
        } else {
            format!("({memory})sum")
        };
        line!(text, "y[0] = {result};");
    }

    /// Prints the place of the thread's element in the order: as many as come before it.
    fn print_order(&self, descending: bool, text: &mut Text) {
        let Lines { extent, result, inner, .. } = self.lines;
        let (own, other) = (format!("x[own * {inner}]"), format!("x[at * {inner}]"));
        let (own_first, other_first) = match descending {
            false => (self.is_above(&other, &own), self.is_above(&own, &other)),
            true => (self.is_above(&own, &other), self.is_above(&other, &own)),
        };
        line!(text, "u64 place = 0;");
        line!(text, "for (u64 at = 0; at < {extent}; at += 1) {{");
        line!(text, "if ({other_first} || (at < own && !({own_first}))) place += 1;");
        text.end();
        line!(text, "if (place < {result}) y[place * {inner}] = (i32)own;");
    }

    fn print_fold(&self, [size, stride, dilation]: [usize; 3], text: &mut Text) {
        let Lines { extent, inner, dtype, .. } = self.lines;
        let memory = element(dtype);
        let zero = if dtype == DType::Bool { "byte(0)" } else { "0" };
        line!(text, "{memory} sum = {zero};");
        line!(text, "for (u64 at = 0; at < {extent}; at += 1) {{");
        line!(text, "if (at / {size} * {stride} + at % {size} * {dilation} != own) continue;");
        let next = self.combined(ReduceOp::Sum, "sum", &format!("x[at * {inner}]"));
        line!(text, "sum = {next};");
        text.end();
        line!(text, "y[own * {inner}] = sum;");
    }
}

impl fmt::Display for LineTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.each() == 1 { "one thread per line" } else { "one thread per element" })
    }
}
