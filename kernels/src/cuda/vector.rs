//! Vectorised loads and stores of fused loops over rows: a thread takes several columns.

use crate::rows::{Access, Instr, Output, RowInput, Rows};

/// Bytes of the widest load.
const BYTES: usize = 16;
/// Most buffers that are accessed by vectors. Chosen: they take 64 registers.
const STREAMS: usize = 16;

/// Columns of a vector, and the buffers that are accessed by vectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vectorized {
    /// Columns of a vector.
    pub width: usize,
    /// For each input, whether it is loaded by vectors.
    pub inputs: Vec<bool>,
    /// For each output, whether it is stored by vectors.
    pub outputs: Vec<bool>,
}

impl Vectorized {
    /// The longest vectors that a program's buffers, which are aligned, can be accessed by.
    pub(super) fn of(rows: &Rows) -> Option<Vectorized> {
        let vectors = rows.vectors();
        let inputs: Vec<Option<(&Access, usize)>> = (rows.inputs.iter().enumerate())
            .map(|(at, input)| {
                is_loaded(rows, at).then_some((&input.access, input.dtype.size() as usize))
            })
            .collect();
        let store = |output: &'_ Output| match output {
            Output::Store { value, dtype, .. } if vectors[*value] => Some(dtype.size() as usize),
            Output::Store { .. } | Output::ColSum { .. } | Output::TotalSum { .. } => None,
        };
        let outputs: Vec<Option<(&Access, usize)>> = (rows.outputs.iter())
            .map(|output| match output {
                Output::Store { access, .. } => Some((access, store(output)?)),
                Output::ColSum { .. } | Output::TotalSum { .. } => None,
            })
            .collect();
        let streams = inputs.iter().chain(&outputs).flatten();
        let streams: Vec<&(&Access, usize)> = streams.filter(|(a, _)| a.col_stride == 1).collect();
        if streams.len() > STREAMS {
            return None;
        }
        let widest = BYTES / streams.iter().map(|(_, size)| *size).max()?;
        let widths = [8, 4, 2].into_iter();
        let mut widths = widths.filter(|w| *w <= widest && rows.cols.is_multiple_of(*w));
        let fits = |width: usize, of: &(&Access, usize)| is_aligned(of.0, width);
        let any = widths.clone().find(|w| streams.iter().any(|of| fits(*w, of)));
        let width = widths.find(|w| streams.iter().all(|of| fits(*w, of))).or(any)?;
        let is_vector = |of: &Option<(&Access, usize)>| of.is_some_and(|of| fits(width, &of));
        Some(Vectorized {
            width,
            inputs: inputs.iter().map(is_vector).collect(),
            outputs: outputs.iter().map(is_vector).collect(),
        })
    }

    /// Vectors of one element, of rows that start anywhere: those of bytes are left out.
    pub(super) fn single(rows: &Rows) -> Option<Vectorized> {
        let is_single = |(at, input): (usize, &RowInput)| {
            is_loaded(rows, at) && input.access.col_stride == 1 && input.dtype.size() > 1
        };
        let inputs: Vec<bool> = rows.inputs.iter().enumerate().map(is_single).collect();
        let outputs = vec![false; rows.outputs.len()];
        inputs.contains(&true).then_some(Vectorized { width: 1, inputs, outputs })
    }
}

/// Whether a program loads an input.
fn is_loaded(rows: &Rows, at: usize) -> bool {
    let loads = |instr: &Instr| matches!(instr, Instr::Load { input } if *input == at);
    rows.instrs.iter().any(loads)
}

/// Whether all vectors of so many columns, counted from the first, are aligned.
fn is_aligned(access: &Access, width: usize) -> bool {
    let mut digits = access.row.iter().filter(|digit| digit.modulus > 1);
    access.col_stride == 1
        && access.offset.is_multiple_of(width)
        && digits.all(|digit| digit.stride.is_multiple_of(width))
}
