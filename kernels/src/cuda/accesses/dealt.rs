//! The rows of experts, as accesses are counted for.
//!
//! Which rows experts have depends on how tokens are routed. Counted is what is expected of tokens
//! that are spread evenly: as many pairs of a token and an expert as [`Experts::pairs`] expects,
//! dealt to the experts in turn, and to the tokens in their order.
//!
//! [`Experts::pairs`]: crate::kernel::Experts::pairs

/// The rows of an expert.
#[derive(Clone, Copy)]
pub(super) struct RowsOfExpert {
    /// The first one: a multiple of a tile.
    pub(super) first: usize,
    pub(super) count: usize,
    /// Tiles that have some of them.
    pub(super) tiles: usize,
}

/// The rows of each expert, in tiles of `tile` rows.
pub(super) fn rows_of_experts(pairs: usize, experts: usize, tile: usize) -> Vec<RowsOfExpert> {
    let mut first = 0;
    let rows = |expert: usize| {
        let count = (pairs + experts - 1 - expert) / experts;
        let of = RowsOfExpert { first, count, tiles: count.div_ceil(tile) };
        first += of.tiles * tile;
        of
    };
    (0..experts).map(rows).collect()
}

/// The token of a pair, given how many there are of both.
pub(super) fn token_of(pair: usize, [pairs, tokens]: [usize; 2]) -> usize {
    (pair as u128 * tokens as u128 / pairs.max(1) as u128) as usize
}
