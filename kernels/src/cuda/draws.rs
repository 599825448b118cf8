//! Random draws.

use ir::random::{DrawBits, SHARED_DRAWS};

use crate::rows::{Digit, Draw};

/// The number of a draw, a sum of three: of a row's first one, of a column, and of a step from
/// there that has no bit in common with the column, in a loop that is unrolled.
pub(super) struct DrawNumber<'a> {
    pub(super) row: &'a str,
    pub(super) col: &'a str,
    pub(super) step: &'a str,
    /// Whether that of a row's first one is a multiple of [`SHARED_DRAWS`]. Draws of a thread then
    /// share mixes.
    pub(super) is_aligned: bool,
}

impl DrawNumber<'_> {
    /// The draw.
    pub(super) fn draw(&self, bits: DrawBits, stream: &str) -> String {
        let DrawNumber { row, col, step, is_aligned } = self;
        let sum = || format!("(u64)({row}) + (u64)({col}) + (u64)({step})");
        match bits {
            DrawBits::B24 => format!("uniform({stream}, {})", sum()),
            DrawBits::B16 if *is_aligned => {
                format!("uniform_short({stream}, {row}, (u64)({col}), (u64)({step}))")
            }
            DrawBits::B16 => format!("uniform_short({stream}, 0, {}, 0)", sum()),
        }
    }
}

/// Whether the number of the first draw of every row is a multiple of [`SHARED_DRAWS`].
pub(super) fn is_aligned(draw: &Draw) -> bool {
    let rows = draw.row.iter().map(|digit| digit.stride as u64);
    rows.chain([draw.unit, draw.sample_stride]).all(|number| number % SHARED_DRAWS == 0)
}

/// Whether columns of a row are drawn side by side.
pub(super) fn is_by_column(draw: &Draw, cols: usize) -> bool {
    matches!(draw.col[..], [Digit { div: 1, modulus, stride: 1 }] if modulus >= cols)
}
