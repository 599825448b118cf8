//! The pieces of a dim that ranks hold.

use serde::{Deserialize, Serialize};

/// A contiguous range of one dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The first element.
    pub start: usize,
    /// The number of elements.
    pub size: usize,
}

/// The pieces of a dim of `size` elements over `ranks`, in whole units; the first `units mod ranks`
/// ranks hold one unit more. None when a piece would be empty or a unit cut.
pub fn pieces(size: usize, unit: usize, ranks: usize) -> Option<Vec<Piece>> {
    let (quotient, remainder) = units_per_rank(size, unit, ranks)?;
    let mut start = 0;
    let piece = |rank: usize| {
        let size = (quotient + usize::from(rank < remainder)) * unit;
        start += size;
        Piece { start: start - size, size }
    };
    Some((0..ranks).map(piece).collect())
}

/// Where the pieces that ranks hold of a dim lie in it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum PieceOrder {
    /// One range each, in the order of ranks.
    #[default]
    Ascending,
    /// Two ranges each, all of one size: of `n` ranks, rank `i` has those numbered `i` and
    /// `2 n - 1 - i`, so that all have equal parts of a causal mask.
    Zigzag,
}

impl PieceOrder {
    /// All of them.
    pub const ALL: [PieceOrder; 2] = [PieceOrder::Ascending, PieceOrder::Zigzag];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            PieceOrder::Ascending => "ascending",
            PieceOrder::Zigzag => "zigzag",
        }
    }

    /// What each rank holds of a dim of `size` elements, in whole units and in the order in which
    /// it holds it. None when a rank would have nothing or a unit would be cut, and where zigzag
    /// ranges would differ.
    pub fn shares(self, size: usize, unit: usize, ranks: usize) -> Option<Vec<Vec<Piece>>> {
        match self {
            PieceOrder::Ascending => {
                Some(pieces(size, unit, ranks)?.into_iter().map(|piece| vec![piece]).collect())
            }
            PieceOrder::Zigzag => {
                let all = pieces(size, unit, 2 * ranks)?;
                let is_alike = all.iter().all(|piece| piece.size == all[0].size);
                let both = |rank: usize| vec![all[rank], all[2 * ranks - 1 - rank]];
                is_alike.then(|| (0..ranks).map(both).collect())
            }
        }
    }

    /// Where the pieces of these sizes lie in the whole that they are.
    pub fn placed(self, counts: &[usize]) -> Vec<Vec<Piece>> {
        let (mut before, mut after) = (0, counts.iter().sum::<usize>());
        let place = |count: &usize| match self {
            PieceOrder::Ascending => {
                before += count;
                vec![Piece { start: before - count, size: *count }]
            }
            PieceOrder::Zigzag => {
                let size = count / 2;
                (before, after) = (before + size, after - size);
                vec![Piece { start: before - size, size }, Piece { start: after, size }]
            }
        };
        counts.iter().map(place).collect()
    }

    /// Whether members can have pieces of these sizes in this order.
    pub fn allows(self, counts: &[usize]) -> bool {
        let is_alike = |count: &usize| *count == counts[0] && count.is_multiple_of(2);
        self == PieceOrder::Ascending || counts.iter().all(is_alike)
    }
}

/// The elements of the largest of these pieces.
pub fn largest_piece(size: usize, unit: usize, ranks: usize) -> Option<usize> {
    let (quotient, remainder) = units_per_rank(size, unit, ranks)?;
    Some((quotient + usize::from(remainder > 0)) * unit)
}

/// The units that every rank holds, and how many are left.
fn units_per_rank(size: usize, unit: usize, ranks: usize) -> Option<(usize, usize)> {
    if unit == 0 || ranks == 0 || !size.is_multiple_of(unit) || size / unit < ranks {
        return None;
    }
    Some((size / unit / ranks, size / unit % ranks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_in_whole_units() {
        let starts = |size, unit, ranks| {
            pieces(size, unit, ranks)
                .map(|p| p.iter().map(|p| (p.start, p.size)).collect::<Vec<_>>())
        };
        assert_eq!(starts(9, 1, 4), Some(vec![(0, 3), (3, 2), (5, 2), (7, 2)]));
        assert_eq!(starts(9, 3, 2), Some(vec![(0, 6), (6, 3)]));
        assert_eq!(starts(9, 3, 4), None);
        assert_eq!(starts(3, 1, 4), None);
        for size in 0..40 {
            for (unit, ranks) in [(0, 1), (1, 0), (1, 1), (1, 4), (2, 3), (3, 4), (5, 2)] {
                let sizes = pieces(size, unit, ranks).map(|p| p.iter().map(|p| p.size).max());
                assert_eq!(largest_piece(size, unit, ranks), sizes.flatten(), "{size} by {unit}");
            }
        }
    }

    /// In either order every element is some rank's, once, and where pieces are placed is where
    /// ranks have them.
    #[test]
    fn shares_are_all_of_a_dim() {
        for order in PieceOrder::ALL {
            for (size, unit, ranks) in [(24, 1, 3), (24, 2, 3), (48, 4, 2), (30, 5, 3), (8, 1, 1)] {
                let shares = order.shares(size, unit, ranks).unwrap_or_default();
                let counts: Vec<usize> =
                    shares.iter().map(|s| s.iter().map(|p| p.size).sum()).collect();
                assert_eq!(order.placed(&counts), shares, "{order:?} {size} {unit} {ranks}");
                assert!(order.allows(&counts), "{counts:?}");
                let all = shares.iter().flatten().flat_map(|p| p.start..p.start + p.size);
                let mut all: Vec<usize> = all.collect();
                all.sort_unstable();
                assert_eq!(all, (0..size).collect::<Vec<_>>(), "{order:?} {size} {unit} {ranks}");
            }
        }
        let zigzag = PieceOrder::Zigzag;
        let starts = |share: &Vec<Piece>| share.iter().map(|p| p.start).collect::<Vec<_>>();
        let shares = zigzag.shares(12, 1, 2).unwrap();
        assert_eq!(shares.iter().map(starts).collect::<Vec<_>>(), [[0, 9], [3, 6]]);
        assert_eq!(zigzag.shares(10, 1, 2), None);
        assert_eq!(zigzag.shares(12, 2, 2), None);
        assert!(!zigzag.allows(&[4, 2]) && !zigzag.allows(&[3, 3]));
    }
}
