//! Tiles of 16-bit elements in shared memory: copies by `cp.async`, and fragments by `ldmatrix`.
//!
//! A row is cut into chunks of 16 bytes, and the chunks of a row are permuted by an XOR with its
//! number (the swizzle), so that the eight rows of a matrix of `ldmatrix` lie in different banks.

use super::text::{Text, line};

/// Elements of a chunk of 16 bytes.
const CHUNK: usize = 8;
/// Elements of all banks.
const BANKS: usize = 64;

/// A tile, row by row.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedTile {
    /// The number of rows.
    pub(super) rows: usize,
    /// Elements of a row: a power of two, two chunks at least.
    pub(super) columns: usize,
}

impl SharedTile {
    pub(super) fn elements(self) -> usize {
        self.rows * self.columns
    }

    /// The swizzled offset of an element.
    pub(super) fn offset(self, row: &str, column: &str) -> String {
        let (chunks, rows_of_banks) = (self.columns / CHUNK, (BANKS / self.columns).max(1));
        let row_of_banks = match rows_of_banks {
            1 => row.to_owned(),
            rows => format!("{row} / {rows}"),
        };
        let swizzle = chunks.min(BANKS / CHUNK);
        let columns = self.columns;
        format!(
            "({row} * {columns} + (({column} / 8 ^ {row_of_banks} % {swizzle}) * 8) + {column} % 8)"
        )
    }

    /// The same as a number.
    pub(super) fn place(self, row: usize, column: usize) -> usize {
        let (chunks, rows_of_banks) = (self.columns / CHUNK, (BANKS / self.columns).max(1));
        let swizzle = chunks.min(BANKS / CHUNK);
        let chunk = (column / CHUNK) ^ (row / rows_of_banks % swizzle);
        row * self.columns + chunk * CHUNK + column % CHUNK
    }

    /// Opens the loop over the vectors of `width` elements that a thread copies: those of the first
    /// `columns` of each row, with their `to_row` and `to_column`.
    pub(super) fn open_copies(self, [columns, width, threads]: [usize; 3], text: &mut Text) {
        let per_row = columns / width;
        let count = self.rows * per_row;
        line!(text, "UNROLL");
        line!(text, "for (u32 i = threadIdx.x; i < {count}; i += {threads}) {{");
        line!(text, "const u32 to_row = i / {per_row}, to_column = i % {per_row} * {width};");
    }
}

/// Prints a copy of `width` elements to shared memory: by `cp.async` where there are several.
pub(super) fn copy(width: usize, [to, from, is_there]: [&str; 3], text: &mut Text) {
    match width {
        1 => line!(text, "copy_element({to}, {from}, {is_there});"),
        _ => line!(text, "cp_async<{}>({to}, {from}, {is_there});", width * 2),
    }
}

/// The operand of `mma.sync` that fragments are of: `a` is m × k, `b` is k × n.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// The first one.
    A,
    /// The second one.
    B,
}

/// Fragments of 16 rows (of `a`) or columns (of `b`) each, and of 16 along k.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fragments<'a> {
    pub(super) operand: Operand,
    /// Whether the columns of the tile are along k.
    pub(super) k_major: bool,
    /// The array of registers, and how many fragments it has.
    pub(super) registers: (&'a str, usize),
}

/// The row and the column whose address a lane gives: the numbers that
/// [`Fragments::print_ldmatrix`] prints.
pub(super) fn lane_of_matrix(operand: Operand, k_major: bool, lane: usize) -> [usize; 2] {
    match (operand == Operand::A) == k_major {
        true => [lane % 16, lane / 16 * 8],
        false => [lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8],
    }
}

impl Fragments<'_> {
    /// Prints the loads of fragments from a tile, which starts at an address; the first element's
    /// coordinates along m or n, and along k.
    pub(super) fn print_ldmatrix(
        self,
        tile: SharedTile,
        [start, side, k]: [&str; 3],
        text: &mut Text,
    ) {
        let (registers, count) = self.registers;
        // A lane gives the address of a row of 8 elements of the four matrices, which are those of
        // the registers in their order: in `a` along m first, in `b` along k first.
        let [lane_row, lane_column] = match (self.operand == Operand::A) == self.k_major {
            true => ["lane % 16", "lane / 16 * 8"],
            false => ["lane / 16 * 8 + lane % 8", "lane / 8 % 2 * 8"],
        };
        let (row, column, load) = match self.k_major {
            true => (format!("{side} + i * 16"), k.to_owned(), "ldmatrix"),
            false => (k.to_owned(), format!("{side} + i * 16"), "ldmatrix_trans"),
        };
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {count}; i += 1) {{");
        line!(text, "const u32 row = {row} + {lane_row}, column = {column} + {lane_column};");
        line!(text, "{load}({registers}[i], {start} + {});", tile.offset("row", "column"));
        text.end();
    }
}
