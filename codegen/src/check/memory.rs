//! The arena of one rank, each byte with a note of what it holds.

use std::collections::BTreeMap;
use std::ops::Range;

use ir::DType;

use super::labels::Label;

/// What bytes were written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// A buffer that is no view.
    Buffer(u32),
    /// A local of one call: the step that calls, and the local.
    Local(u32, u32),
}

/// Axes over which a value was summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Summed(u8);

impl Summed {
    /// Over all that hold the same weights: the ranks of one copy of what is split, and the copies.
    pub(super) const DP: Summed = Summed(17);
    pub(super) const SHARDS: Summed = Summed(1);
    pub(super) const COPIES: Summed = Summed(16);
    pub(super) const TP: Summed = Summed(2);
    pub(super) const STAGES: Summed = Summed(4);
    pub(super) const WORLD: Summed = Summed(8);
    pub(super) const CP: Summed = Summed(32);
    /// Over ranks of `tp` and of those that hold the same weights, which share experts.
    pub(super) const EXPERTS: Summed = Summed(64);
    pub(super) const ALL: Summed = Summed(127);

    pub(super) fn with(self, other: Summed) -> Summed {
        Summed(self.0 | other.0)
    }

    /// What two sums have in common.
    pub(super) fn and(self, other: Summed) -> Summed {
        Summed(self.0 & other.0)
    }

    pub(super) fn has(self, other: Summed) -> bool {
        self.0 & other.0 == other.0
    }

    /// The axes, for people.
    pub(super) fn names(self) -> String {
        let axes = [(Summed::DP, "dp"), (Summed::TP, "tp"), (Summed::STAGES, "stages")];
        let others =
            [(Summed::WORLD, "all ranks"), (Summed::CP, "cp"), (Summed::EXPERTS, "tp and dp")];
        let axes = axes.into_iter().chain(others);
        let shards = (Summed::SHARDS, "the ranks of a copy");
        let shards = (!self.has(Summed::DP)).then_some(shards);
        axes.chain(shards)
            .filter(|(axis, _)| self.has(*axis))
            .map(|(_, name)| name)
            .collect::<Vec<_>>()
            .join(", ")
    }
}

/// What is known about bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Note {
    pub(super) owner: Owner,
    pub(super) label: Label,
    pub(super) dtype: DType,
    pub(super) summed: Summed,
    /// The step that wrote them; none for what is there from the start.
    pub(super) step: Option<usize>,
}

/// Notes by range; bytes without one are undefined.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    /// By first byte: one past the last, and the note.
    cells: BTreeMap<u64, (u64, Note)>,
}

impl Memory {
    /// Makes bytes undefined.
    pub(super) fn clear(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        if let Some((start, (end, note))) = self.before(range.start)
            && end > range.start
        {
            self.cells.insert(start, (range.start, note));
            if end > range.end {
                self.cells.insert(range.end, (end, note));
            }
        }
        let inside: Vec<u64> = self.cells.range(range.clone()).map(|(start, _)| *start).collect();
        for start in inside {
            if let Some((end, note)) = self.cells.remove(&start)
                && end > range.end
            {
                self.cells.insert(range.end, (end, note));
            }
        }
    }

    /// The last cell that starts before a byte.
    fn before(&self, byte: u64) -> Option<(u64, (u64, Note))> {
        self.cells.range(..byte).next_back().map(|(start, cell)| (*start, *cell))
    }

    pub(super) fn write(&mut self, range: Range<u64>, note: Note) {
        if !range.is_empty() {
            self.clear(range.clone());
            self.cells.insert(range.start, (range.end, note));
        }
    }

    /// The notes of a range in order; none for undefined bytes.
    pub(super) fn read(&self, range: Range<u64>) -> Vec<(Range<u64>, Option<Note>)> {
        let mut found = Vec::new();
        let mut at = range.start;
        let first = self.before(range.start).filter(|(_, (end, _))| *end > range.start);
        let rest = self.cells.range(range.clone()).map(|(start, cell)| (*start, *cell));
        for (start, (end, note)) in first.into_iter().chain(rest) {
            if at < start {
                found.push((at..start, None));
            }
            let from = start.max(range.start);
            at = end.min(range.end);
            found.push((from..at, Some(note)));
        }
        if at < range.end {
            found.push((at..range.end, None));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::labels::Labels;

    #[test]
    fn ranges_are_as_in_a_list_of_bytes() {
        let note = |owner| Note {
            owner: Owner::Buffer(owner),
            label: Labels::NONE,
            dtype: DType::F32,
            summed: Summed::default(),
            step: None,
        };
        let mut memory = Memory::default();
        let mut bytes = [None; 50];
        let draw = |i: u64, n: u64| ir::random::mix(i) % n;
        for i in 0..2000 {
            let start = draw(3 * i, 50);
            let end = start + draw(3 * i + 1, 51 - start);
            let owner = (draw(3 * i + 2, 5) > 0).then_some(i as u32);
            match owner {
                Some(owner) => memory.write(start..end, note(owner)),
                None => memory.clear(start..end),
            }
            bytes[start as usize..end as usize].fill(owner.map(note));
            let from = draw(7 * i, 50);
            let to = from + draw(7 * i + 5, 51 - from);
            let mut at = from;
            for (range, found) in memory.read(from..to) {
                assert_eq!(range.start, at);
                at = range.end;
                assert!(range.into_iter().all(|byte| bytes[byte as usize] == found));
            }
            assert_eq!(at, to);
        }
    }
}
