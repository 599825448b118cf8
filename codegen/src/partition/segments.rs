//! Nodes that count from their place in a sample, of which a rank has pieces from several places.
//!
//! Of a sample, context-parallel ranks have two pieces each, one from either end. What counts from
//! its first token, such as a position, the rows of a causal mask or the elements of a draw, is
//! computed for each piece by itself, and the results are put side by side.

use ir::factors::{Factor, Offset};
use ir::op::Op;
use ir::sharding::{Layout, Piece};
use ir::{Node, ValueId};

use super::{CP, Choice, Layouts, Partition, TP, length};

/// The pieces of a rank, and what counts from their places.
pub(super) struct Segments {
    /// In units of the factor: where each piece lies in the whole.
    pieces: Vec<Piece>,
    /// How many units the whole has.
    units: usize,
    /// How operands and results are cut into them.
    factor: Factor,
    /// What other axes add to attributes.
    offsets: Vec<(Offset, i64)>,
}

impl Partition<'_> {
    /// The pieces in which a node is computed; none where nothing counts from places along `cp`.
    pub(super) fn segments(
        &self,
        node: &Node,
        factors: &[Vec<Factor>; 4],
        choices: &[Choice],
    ) -> Result<Option<Segments>, String> {
        let Choice::Cut(at) = choices[CP] else { return Ok(None) };
        let factor = factors[CP][at].clone();
        if factor.offsets.is_empty() {
            return Ok(None);
        }
        let name = &self.global.value(node.results[0]).name;
        let coordinates = self.place.coordinates;
        let units = self.units(node, &factor)?;
        let shares = self.shares(name, units, 1, CP)?;
        let mut pieces = shares[coordinates[CP]].clone();
        if choices[TP] == choices[CP] {
            // Ranks that share tokens have each a range of these pieces.
            let shares = self.shares(name, length(&pieces), 1, TP)?;
            pieces = within(&pieces, shares[coordinates[TP]][0]);
        }
        let offsets = self.offsets(node, factors, choices)?;
        Ok(Some(Segments { pieces, units, factor, offsets }))
    }

    /// The results of a node, computed piece by piece.
    pub(super) fn in_segments(
        &mut self,
        node: &Node,
        segments: &Segments,
        layouts: &[Layouts],
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>, String> {
        let Segments { pieces, units, factor, offsets } = segments;
        let whole = self.sizes(node.results[0], layouts[0])?;
        let name = self.global.value(node.results[0]).name.clone();
        let (mut parts, mut first) = (Vec::new(), 0);
        for Piece { start, size } in pieces {
            let mut own = offsets.clone();
            own.extend(factor.offsets_at(*start, *units));
            let mut sizes = whole.clone();
            if let Layout::Cut { dim, unit } = factor.results[0] {
                sizes[dim] = size * unit;
            }
            let slice = |(operand, layout): (&ValueId, &Layout)| match *layout {
                Layout::Cut { dim, unit } if pieces.len() > 1 => {
                    let op = Op::Slice { dim, start: first * unit, size: size * unit };
                    let name = self.builder.function().value(*operand).name.clone();
                    self.builder.push(&format!("{name}.piece"), op, &[*operand])
                }
                Layout::Cut { .. } | Layout::Replicated | Layout::Partial(_) => *operand,
            };
            let operands: Vec<ValueId> = operands.iter().zip(&factor.operands).map(slice).collect();
            let op = self.local_op(node, &sizes, &own, &operands)?;
            parts.push(self.builder.push_all(&format!("{name}.piece"), op, &operands));
            first += size;
        }
        let join = |(at, result): (usize, &ValueId)| {
            let of_pieces: Vec<ValueId> = parts.iter().map(|part| part[at]).collect();
            let name = &self.global.value(*result).name;
            match factor.results[at] {
                Layout::Cut { dim, .. } => self.joined(name, dim, &of_pieces),
                Layout::Replicated | Layout::Partial(_) => {
                    let sum = |a: ValueId, b: &ValueId| self.builder.add(name, a, *b);
                    of_pieces[1..].iter().fold(of_pieces[0], sum)
                }
            }
        };
        Ok(node.results.iter().enumerate().map(join).collect())
    }

    /// Pieces side by side along a dim.
    pub(super) fn joined(&mut self, name: &str, dim: usize, parts: &[ValueId]) -> ValueId {
        match parts {
            [one] => *one,
            several => self.builder.push(name, Op::Concat { dim }, several),
        }
    }

    /// The term of a whole that is zero but for this rank's pieces of a dim.
    pub(super) fn term(
        &mut self,
        name: &str,
        local: ValueId,
        (dim, unit, size): (usize, usize, usize),
        axis: usize,
    ) -> Result<ValueId, String> {
        let shares = self.shares(name, size, unit, axis)?;
        let (mut term, mut first) = (None, 0);
        for piece in shares[self.place.coordinates[axis]].clone() {
            let slice = Op::Slice { dim, start: first, size: piece.size };
            let part = self.builder.push(&format!("{name}.piece"), slice, &[local]);
            let after = size - piece.start - piece.size;
            let pad = Op::Pad { dim, before: piece.start, after };
            let padded = self.builder.push(&format!("{name}.term"), pad, &[part]);
            term = Some(match term {
                None => padded,
                Some(before) => self.builder.add(&format!("{name}.terms"), before, padded),
            });
            first += piece.size;
        }
        term.ok_or_else(|| format!("`%{name}` has no piece here"))
    }
}

/// What a range of pieces side by side is of each of them.
fn within(pieces: &[Piece], range: Piece) -> Vec<Piece> {
    let mut first = 0;
    let cut = |piece: &Piece| {
        let before = first;
        first += piece.size;
        let start = range.start.max(before);
        let end = (range.start + range.size).min(first);
        (start < end).then(|| Piece { start: piece.start + start - before, size: end - start })
    };
    pieces.iter().filter_map(cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_pieces_are_found_in_the_whole() {
        let pieces = [Piece { start: 2, size: 4 }, Piece { start: 20, size: 4 }];
        let found = |start, size| {
            let found = within(&pieces, Piece { start, size });
            found.iter().map(|piece| (piece.start, piece.size)).collect::<Vec<_>>()
        };
        assert_eq!(found(0, 4), [(2, 4)]);
        assert_eq!(found(3, 3), [(5, 1), (20, 2)]);
        assert_eq!(found(5, 3), [(21, 3)]);
    }
}
