//! The device functions of fused loops over rows.

use super::moves::fill;
use super::reduction;
use crate::cuda::function::{Function, Functions};
use crate::cuda::parameter::Parameter;
use crate::cuda::program::offsets;
use crate::cuda::rows::{Elementwise, THREADS};
use crate::cuda::tile::Tile;
use crate::cuda::vector::Vectorized;
use crate::kernel::Fill;
use crate::rows::{Instr, Output, Rows};
use ir::target::Arch;

/// The functions of a program on these buffers.
pub(super) fn functions(
    what: &str,
    rows: &Rows,
    inputs: &[Parameter],
    outputs: &[Parameter],
    (all, arch): (&mut Functions, Option<Arch>),
) {
    if rows.rows * rows.cols == 0 {
        return empty_sums(what, rows, outputs, all);
    }
    let parameters: Vec<Parameter> = inputs.iter().chain(outputs).copied().collect();
    let is_point = |output: &Output| match output {
        Output::Store { access, .. } => access.col_stride > 0,
        Output::ColSum { .. } | Output::TotalSum { .. } => false,
    };
    let reduces = rows.instrs.iter().any(|instr| matches!(instr, Instr::Reduce { .. }));
    let vectors = rows.vectors();
    let by_row = rows.outputs.iter().all(|output| {
        matches!(output, Output::Store { access, .. } if access.col_stride == 0)
            && !vectors[output.value()]
    });
    if !reduces && (by_row || rows.outputs.iter().all(is_point)) {
        let points = if by_row { rows.rows } else { rows.rows * rows.cols };
        let vector = if by_row { None } else { Vectorized::of(rows) };
        let threads = points / vector.as_ref().map_or(1, |vector| vector.width);
        all.functions.push(Function {
            what: what.to_owned(),
            parameters,
            offsets: offsets(rows),
            grid: threads.div_ceil(THREADS as usize) as u64,
            threads: THREADS,
            tile: Tile::Elementwise(Elementwise { rows: rows.clone(), by_row, vector }),
        });
        return;
    }
    reduction::functions(what, rows, parameters, outputs, (all, arch));
}

/// The functions of a program without points: its sums are zero, and nothing is stored.
fn empty_sums(what: &str, rows: &Rows, outputs: &[Parameter], all: &mut Functions) {
    for (output, parameter) in rows.outputs.iter().zip(outputs) {
        let len = match output {
            Output::ColSum { accumulate: false, .. } => rows.cols,
            Output::TotalSum { accumulate: false, .. } => 1,
            Output::Store { .. } | Output::ColSum { .. } | Output::TotalSum { .. } => continue,
        };
        let zeros = Fill { len, dtype: parameter.dtype, value: 0.0 };
        all.functions.push(fill(what, &zeros, *parameter));
    }
}
