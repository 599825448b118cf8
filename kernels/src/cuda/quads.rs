//! Rows of accumulators of `mma.sync` and `wgmma`, as quads store them.
//!
//! Of every 8 columns a lane has two adjacent ones, and the four lanes of a quad share a row. Two
//! bytes an element, a quad would store 16 bytes of a sector of 32. It therefore exchanges the
//! pairs of two or four such tiles first: then each lane has 4 or 8 adjacent columns of one tile,
//! and the quad stores whole sectors. Of 4 bytes an element pairs are enough.

use ir::DType;

use super::text::{Text, element, line};

/// How many columns a lane stores at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuadStore {
    /// The type in memory.
    pub dtype: DType,
    /// 8, 4, 2 or 1.
    pub width: usize,
}

impl QuadStore {
    /// The widest of `tiles` tiles of 8 columns, where rows and their ends are at multiples of
    /// `aligned` elements.
    pub(super) fn of(dtype: DType, tiles: usize, aligned: usize) -> QuadStore {
        let most = match dtype.size() {
            2 if tiles.is_multiple_of(4) => 8,
            2 if tiles.is_multiple_of(2) => 4,
            2 | 4 => 2,
            _ => 1,
        };
        let width = [8, 4, 2].into_iter().find(|width| *width <= most.min(aligned));
        QuadStore { dtype, width: width.unwrap_or(1) }
    }

    /// Tiles whose pairs a quad exchanges.
    pub(super) fn tiles(self) -> usize {
        if self.exchanges() { self.width / 2 } else { 1 }
    }

    fn exchanges(self) -> bool {
        self.dtype.size() == 2 && self.width > 2
    }

    /// The first column of a lane's vector, counted from the first of its tiles; alone an element
    /// is that of accumulator `q`.
    pub(super) fn column(self) -> &'static str {
        match (self.width, self.tiles()) {
            (1, _) => "lane % 4 * 2 + q % 2",
            (_, 4) => "lane % 4 * 8",
            (_, 2) => "lane % 2 * 8 + lane / 2 % 2 * 4",
            _ => "lane % 4 * 2",
        }
    }

    /// The same as a number.
    pub(super) fn column_of(self, lane: usize, q: usize) -> usize {
        match (self.width, self.tiles()) {
            (1, _) => lane % 4 * 2 + q % 2,
            (_, 4) => lane % 4 * 8,
            (_, 2) => lane % 2 * 8 + lane / 2 % 2 * 4,
            _ => lane % 4 * 2,
        }
    }

    /// Prints `x`, the vector of a lane, given the two sums that it has of the tile of a number.
    /// All lanes of the warp run it.
    pub(super) fn print_vector(self, x: &str, sums: impl Fn(&str) -> [String; 2], text: &mut Text) {
        let (kept, tiles, width) = (element(self.dtype), self.tiles(), self.width);
        if !self.exchanges() {
            line!(text, "Vector<{kept}, 2> {x};");
            for (e, sum) in sums("0").iter().enumerate() {
                line!(text, "{x}.x[{e}] = Store<{kept}>::of({sum});");
            }
            return;
        }
        line!(text, "u32 {x}_pairs[{tiles}];");
        for tile in 0..tiles {
            let [low, high] = sums(&tile.to_string());
            line!(text, "{x}_pairs[{tile}] = packed<{kept}>({low}, {high});");
        }
        line!(text, "exchange_columns({x}_pairs);");
        line!(text, "Vector<{kept}, {width}> {x} = vector_of<{kept}>({x}_pairs);");
    }
}
