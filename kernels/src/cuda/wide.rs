//! Block programs whose threads take some columns at once, by wide loads and stores.

use std::collections::BTreeSet;

use super::index::access;
use super::program::Program;
use super::text::{Text, element, line};
use crate::rows::{Access, Instr, Output, Rows};

/// Bytes of the widest load.
const BYTES: usize = 16;
/// Most buffers that are read and written so. Chosen: they take 64 registers.
const STREAMS: usize = 16;

/// Columns that a thread takes at once, and what it loads and stores so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wide {
    /// How many columns.
    pub width: usize,
    /// For each input, whether as many elements are loaded at once.
    pub inputs: Vec<bool>,
    /// For each output, whether as many are stored.
    pub outputs: Vec<bool>,
}

impl Wide {
    /// The widest way to read and write a program's buffers, which are aligned.
    pub(super) fn of(rows: &Rows) -> Option<Wide> {
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
        let is_wide = |of: &Option<(&Access, usize)>| of.is_some_and(|of| fits(width, &of));
        Some(Wide {
            width,
            inputs: inputs.iter().map(is_wide).collect(),
            outputs: outputs.iter().map(is_wide).collect(),
        })
    }
}

/// Whether all runs of so many columns, counted from the first, are aligned.
fn is_aligned(access: &Access, width: usize) -> bool {
    let mut digits = access.row.iter().filter(|digit| digit.modulus > 1);
    access.col_stride == 1
        && access.offset.is_multiple_of(width)
        && digits.all(|digit| digit.stride.is_multiple_of(width))
}

impl Program<'_> {
    /// Prints the wide loads of the inputs that some values are made of, of columns from `first`.
    pub(super) fn load_wide(&self, values: &BTreeSet<usize>, text: &mut Text) {
        let Some(wide) = &self.wide else { return };
        let mut loaded = BTreeSet::new();
        for value in values {
            if let Instr::Load { input } = &self.rows.instrs[*value]
                && wide.inputs[*input]
                && loaded.insert(*input)
            {
                let of = &self.rows.inputs[*input];
                let place = self.first(&of.access);
                let (kind, width, name) = (element(of.dtype), wide.width, &self.inputs[*input]);
                line!(
                    text,
                    "const Wide<{kind}, {width}> w{input} = \
                     load_wide<{kind}, {width}>({name} + {place});"
                );
            }
        }
    }

    /// Where the first of a thread's columns lies.
    fn first(&self, of: &Access) -> String {
        access(of, self.rows.rows).replace("col", "first")
    }

    /// Prints room for what is stored at once, and what is there where it is added to.
    pub(super) fn open_stores(&self, targets: &[(usize, String)], text: &mut Text) {
        for (at, target, access, kind, accumulate) in self.wide_stores(targets) {
            let width = self.wide.as_ref().map_or(1, |wide| wide.width);
            line!(text, "Wide<{kind}, {width}> s{at};");
            if accumulate {
                let place = self.first(access);
                line!(text, "s{at} = load_wide<{kind}, {width}>({target} + {place});");
            }
        }
    }

    /// Prints the wide stores.
    pub(super) fn close_stores(&self, targets: &[(usize, String)], text: &mut Text) {
        for (at, target, access, ..) in self.wide_stores(targets) {
            line!(text, "store_wide({target} + {}, s{at});", self.first(access));
        }
    }

    /// Those of some outputs, given with their buffers, that are stored at once.
    fn wide_stores<'t>(
        &self,
        targets: &'t [(usize, String)],
    ) -> Vec<(usize, &'t str, &Access, &'static str, bool)> {
        let Some(wide) = &self.wide else { return Vec::new() };
        let store = |(at, target): &'t (usize, String)| match &self.rows.outputs[*at] {
            Output::Store { access, dtype, accumulate, .. } if wide.outputs[*at] => {
                Some((*at, &target[..], access, element(*dtype), *accumulate))
            }
            Output::Store { .. } | Output::ColSum { .. } | Output::TotalSum { .. } => None,
        };
        targets.iter().filter_map(store).collect()
    }

    /// Opens the loop over a thread's columns from `first`.
    pub(super) fn open_columns(&self, text: &mut Text) {
        let width = self.wide.as_ref().map_or(1, |wide| wide.width);
        line!(text, "UNROLL");
        line!(text, "for (u32 e = 0; e < {width}; e += 1) {{");
        line!(text, "const u64 col = first + e;");
    }
}
