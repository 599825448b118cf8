//! Stored matrices that are codes of F8E4M3, with a scale for each block of them.
//!
//! A number is its code times the scale of its block, in F32, as in DeepSeek-V3 (DeepSeek-AI 2024,
//! section 3.3.1). Blocks at the ends have the rows and columns that are left.

use std::sync::LazyLock;

use ir::import::{Source, Weight};
use ir::{DType, Diagnostic, formats};

use super::{at, list};
use crate::convert::{Stored, convert};
use crate::weights::{Tensor, Weights};

/// The number of each code.
static NUMBERS: LazyLock<[f32; 256]> = LazyLock::new(|| {
    std::array::from_fn(|code| formats::decode(DType::F8E4M3, code as u16) as f32)
});

/// The scales of a tensor.
pub(super) struct Scales {
    numbers: Vec<f32>,
    /// Rows and columns of a block.
    block: [usize; 2],
    /// Columns of the tensor.
    columns: usize,
}

/// Whether a tensor is codes, which alone mean nothing.
pub(super) fn is_code(tensor: Option<&Tensor>) -> bool {
    let codes = [DType::F8E4M3, DType::F8E5M2].map(Stored::DType);
    tensor.is_some_and(|tensor| codes.contains(&tensor.stored))
}

/// The scales of a tensor of a weight; none of one that is numbers.
///
/// **Errors.** E4006 where they are missing; E4007 where they are not one for each block, or the
/// model says nothing of blocks.
pub(super) fn of(
    weight: &Weight,
    number: usize,
    files: &Weights,
) -> Result<Option<Scales>, Diagnostic> {
    let found = weight.source.names_of(number).find(|name| files.get(name).is_some());
    let Some(name) = found.filter(|name| is_code(files.get(name))) else { return Ok(None) };
    let Some(block) = weight.source.scaled else {
        let headline = format!("`{name}` is of codes, and the config says nothing of their scales");
        return Err(Diagnostic::error("E4007", at(files), headline)
            .note("read are those of `fp8` with a `weight_block_size`")
            .help("store the weights in bf16"));
    };
    if files.get(&name).is_some_and(|codes| codes.stored != Stored::DType(DType::F8E4M3)) {
        let headline =
            format!("`{name}` is of codes of F8_E5M2, and only those of F8_E4M3 are read");
        return Err(
            Diagnostic::error("E4007", at(files), headline).help("store the weights in bf16")
        );
    }
    let scales = files.find(&Source::scales_of(&name))?;
    let dims = &weight.source.dims;
    let blocks: Vec<usize> = dims.iter().zip(block).map(|(n, of)| n.div_ceil(of)).collect();
    if dims.len() != 2 || scales.dims != blocks {
        let headline = format!("the scales of `{name}` are {}", list(&scales.dims));
        let note = format!("it is {}, and a scale is of {block:?} of it", list(dims));
        let help = "check that the weights and the `config.json` belong together";
        return Err(Diagnostic::error("E4007", at(files), headline).note(note).help(help));
    }
    let bytes = convert(scales.stored, files.bytes(scales), DType::F32);
    let numbers = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    Ok(Some(Scales { numbers, block, columns: dims[1] }))
}

impl Scales {
    /// Appends the numbers, in F32, of the codes from an element of the tensor on.
    pub(super) fn decode(&self, codes: &[u8], first: usize, out: &mut Vec<u8>) {
        let [rows, columns] = self.block;
        let per_row = self.columns.div_ceil(columns);
        out.reserve(4 * codes.len());
        let (mut element, mut rest) = (first, codes);
        while !rest.is_empty() {
            let (row, column) = (element / self.columns, element % self.columns);
            let end = (column / columns + 1).saturating_mul(columns).min(self.columns);
            let (run, others) = rest.split_at(rest.len().min(end - column));
            let scale = self.numbers[row / rows * per_row + column / columns];
            for code in run {
                out.extend_from_slice(&(NUMBERS[usize::from(*code)] * scale).to_le_bytes());
            }
            (element, rest) = (element + run.len(), others);
        }
    }
}
