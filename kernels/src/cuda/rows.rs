//! Fused loops over rows: one thread per point where nothing is reduced, else a [`RowReduction`].
//! Loads and stores are vectors of up to 16 bytes where columns are aligned.

use std::fmt;

use super::parameter::Parameter;
use super::program::Program;
use super::text::{Text, line};
use super::vector::Vectorized;
use crate::rows::Rows;

/// Threads of a block.
pub(super) const THREADS: u32 = 256;

/// One thread per point, or per row where all values are row scalars.
#[derive(Clone, Debug, PartialEq)]
pub struct Elementwise {
    /// The program.
    pub rows: Rows,
    /// Whether a thread takes a row.
    pub by_row: bool,
    /// Elementwise that a thread takes at once, side by side.
    pub vector: Option<Vectorized>,
}

impl Elementwise {
    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let Elementwise { rows, by_row, vector } = self;
        let program = Program::new(rows, names(rows, parameters), vector.as_ref());
        if let Some(vector) = vector {
            return self.print_vectorized(&program, vector.width, parameters, text);
        }
        let (index, points) =
            if *by_row { ("row", rows.rows) } else { ("point", rows.rows * rows.cols) };
        line!(text, "const u64 {index} = (u64)blockIdx.x * {THREADS} + threadIdx.x;");
        line!(text, "if ({index} >= {points}) return;");
        if !by_row {
            line!(text, "const u64 row = point / {}, col = point % {};", rows.cols, rows.cols);
        }
        program.streams(text);
        program.values(text, &(0..rows.instrs.len()).collect());
        for at in 0..rows.outputs.len() {
            program.store(text, at, &parameters[rows.inputs.len() + at].name());
        }
    }

    fn print_vectorized(
        &self,
        program: &Program<'_>,
        width: usize,
        parameters: &[Parameter],
        text: &mut Text,
    ) {
        let Rows { rows, cols, inputs, outputs, .. } = &self.rows;
        let vectors = cols / width;
        line!(text, "const u64 vector = (u64)blockIdx.x * {THREADS} + threadIdx.x;");
        line!(text, "if (vector >= {}) return;", rows * vectors);
        line!(text, "const u64 row = vector / {vectors}, first = vector % {vectors} * {width};");
        program.streams(text);
        let values = (0..self.rows.instrs.len()).collect();
        let target = |at: usize| (at, parameters[inputs.len() + at].name());
        let targets: Vec<(usize, String)> = (0..outputs.len()).map(target).collect();
        program.load_vectors(&values, false, text);
        program.open_stores(&targets, text);
        program.open_columns(text);
        program.values(text, &values);
        targets.iter().for_each(|(at, target)| program.store(text, *at, target));
        text.end();
        program.close_stores(&targets, text);
    }
}

pub(super) fn names(rows: &Rows, parameters: &[Parameter]) -> Vec<String> {
    parameters[..rows.inputs.len()].iter().map(Parameter::name).collect()
}

pub(super) fn show_width(f: &mut fmt::Formatter<'_>, vector: Option<&Vectorized>) -> fmt::Result {
    vector.map_or(Ok(()), |vector| write!(f, ", vectors of {} columns", vector.width))
}

impl fmt::Display for Elementwise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let item = if self.by_row { "row" } else { "point" };
        write!(f, "one thread per {item} of {}x{}", self.rows.rows, self.rows.cols)?;
        show_width(f, self.vector.as_ref())
    }
}
