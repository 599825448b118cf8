//! Vectorised loads and stores of fused loops over rows: a thread takes several columns.

use std::collections::BTreeSet;

use super::index::access;
use super::program::Program;
use super::text::{Text, element, line};
use crate::rows::{Access, Instr, Output, Rows};

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
        let is_loaded = |at: usize| {
            let loads = |instr: &Instr| matches!(instr, Instr::Load { input } if *input == at);
            rows.instrs.iter().any(loads)
        };
        let vectors = rows.vectors();
        let inputs: Vec<Option<(&Access, usize)>> = (rows.inputs.iter().enumerate())
            .map(|(at, input)| {
                is_loaded(at).then_some((&input.access, input.dtype.size() as usize))
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
}

/// Whether all vectors of so many columns, counted from the first, are aligned.
fn is_aligned(access: &Access, width: usize) -> bool {
    let mut digits = access.row.iter().filter(|digit| digit.modulus > 1);
    access.col_stride == 1
        && access.offset.is_multiple_of(width)
        && digits.all(|digit| digit.stride.is_multiple_of(width))
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
