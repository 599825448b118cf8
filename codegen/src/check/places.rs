//! Where the buffers of a program lie: which bytes are whose.

use std::collections::BTreeSet;
use std::ops::Range;

use ir::plan::Place;
use ir::program::{
    ALIGNMENT, Buffer, BufferId, Contents, Program, STATE_BLOCK, ShardRole, aligned,
};
use kernels::bounds::class_name;

use super::Findings;

/// Weights are padded to as many elements as take whole lines in the narrowest of their types, so
/// that in the widest there are more lines between one and the next. Where several ranks share
/// them, the last one is padded so that all pieces are.
const PADDING_MAX: u64 = ALIGNMENT * 8;

/// The buffers behind the bytes of each buffer.
pub(super) struct Places {
    /// By buffer: ranges of the arena, and the buffer that is no view which has them.
    owners: Vec<Vec<(Range<u64>, u32)>>,
    /// By buffer: where it ends, with the padding after it.
    pub(super) ends: Vec<u64>,
    /// By weight: the stages that hold it.
    pub(super) holders: Vec<BTreeSet<usize>>,
}

impl Places {
    /// Finds the buffers that views are of: of whole buffers that persist, side by side, with the
    /// bytes between one and the next. `ranks` hold the same weights.
    pub(super) fn of(
        program: &Program,
        (all, ranks): (&[Program], usize),
        findings: &mut Findings,
    ) -> Places {
        let persists = |contents: &Contents| {
            let is_view = matches!(contents, Contents::View | Contents::Part { .. });
            let transient = is_view || matches!(contents, Contents::Activation | Contents::Frame);
            let transient = transient || contents.passing().is_some();
            !transient && (contents.outlasts_step() || !matches!(contents, Contents::Shard { .. }))
        };
        let mut bases: Vec<(Range<u64>, u32)> = Vec::new();
        for (at, buffer) in program.buffers.iter().enumerate() {
            if persists(&buffer.contents) && buffer.bytes > 0 {
                bases.push((buffer.offset..buffer.offset + aligned(buffer.bytes), at as u32));
            }
        }
        bases.sort_by_key(|(range, _)| range.start);
        // Those whose states have scales take whole lines of these, each number of which is for a
        // block of numbers that are as wide at most.
        let has_scales = program.buffers.iter().any(|buffer| {
            matches!(
                buffer.contents,
                Contents::Scale { .. } | Contents::Shard { role: ShardRole::Scale(_), .. }
            )
        });
        let padding_max =
            PADDING_MAX.max(if has_scales { ALIGNMENT * STATE_BLOCK as u64 } else { 0 });
        let ends = with_padding(program, &mut bases, padding_max * ranks as u64);
        let mut owners = Vec::new();
        for (at, buffer) in program.buffers.iter().enumerate() {
            let range = buffer.offset..buffer.offset + buffer.bytes;
            if let Contents::Part { of } = buffer.contents {
                owners.push(vec![(range, of.0)]);
                continue;
            }
            if buffer.contents != Contents::View {
                owners.push(vec![(range, at as u32)]);
                continue;
            }
            let mut parts = passing(program, BufferId(at as u32), &range);
            if parts.is_empty() {
                parts = behind(&bases, &range);
            }
            if !tile(&parts, &range) {
                let headline =
                    format!("view `{}` does not lie on buffers that persist", buffer.name);
                findings.add("E2110", &class_name(program), headline);
            }
            owners.push(parts);
        }
        let holders = program.weights.iter().map(|weight| {
            let holds = |p: &&Program| p.weights.iter().any(|w| w.name == weight.name);
            all.iter().filter(holds).map(|p| p.stage).collect()
        });
        Places { owners, ends, holders: holders.collect() }
    }

    /// The bytes of a buffer, with the buffers that own them.
    pub(super) fn of_buffer(&self, buffer: BufferId) -> &[(Range<u64>, u32)] {
        &self.owners[buffer.0 as usize]
    }
}

/// Lets the bytes of weights and gradients reach to the next buffer, or to the end of their arena,
/// where what is between is padding. Where each buffer of the program then ends.
fn with_padding(program: &Program, bases: &mut [(Range<u64>, u32)], padding_max: u64) -> Vec<u64> {
    let of = |buffer: &Buffer| buffer.offset + aligned(buffer.bytes);
    let mut ends: Vec<u64> = program.buffers.iter().map(of).collect();
    let is_no_view = |buffer: &&Buffer| {
        !matches!(buffer.contents, Contents::View | Contents::Part { .. }) && buffer.bytes > 0
    };
    let starts = program.buffers.iter().filter(is_no_view).map(|buffer| buffer.offset);
    let arena_ends = Place::ALL.map(|place| {
        let (bytes, start) = program.arena(place);
        start + bytes
    });
    let mut starts: Vec<u64> = starts.chain(arena_ends).collect();
    starts.sort_unstable();
    for (base, buffer) in bases {
        let next = starts.partition_point(|start| *start < base.end);
        let Some(next) = starts.get(next).copied() else { continue };
        let contents = &program.buffers[*buffer as usize].contents;
        let is_of_weight = contents.outlasts_step() || matches!(contents, Contents::Grad(_));
        if is_of_weight && (base.end..base.end + padding_max).contains(&next) {
            base.end = next;
            ends[*buffer as usize] = next;
        }
    }
    ends
}

/// The parts of a view that calls have for themselves: weights of a bucket, with the bytes between
/// one and the next.
fn passing(program: &Program, view: BufferId, range: &Range<u64>) -> Vec<(Range<u64>, u32)> {
    let is_part = |buffer: &Buffer| buffer.contents.passing().is_some_and(|(_, of)| of == view);
    let own = program.buffers.iter().enumerate().filter(|(_, buffer)| is_part(buffer));
    let mut starts: Vec<(u64, u32)> = own.map(|(at, b)| (b.offset, at as u32)).collect();
    starts.sort_unstable();
    let ends = starts.iter().skip(1).map(|next| next.0).chain([range.end]);
    starts.iter().zip(ends).map(|((start, at), end)| (*start..end, *at)).collect()
}

/// The parts of a range that lie on buffers, in order.
fn behind(bases: &[(Range<u64>, u32)], range: &Range<u64>) -> Vec<(Range<u64>, u32)> {
    let first = bases.partition_point(|(base, _)| base.end <= range.start);
    let meeting = bases[first..].iter().take_while(|(base, _)| base.start < range.end);
    let cut = |(base, at): &(Range<u64>, u32)| {
        (base.start.max(range.start)..base.end.min(range.end), *at)
    };
    meeting.map(cut).collect()
}

/// Whether parts make up a range, without gaps and without overlaps.
fn tile(parts: &[(Range<u64>, u32)], range: &Range<u64>) -> bool {
    let mut at = range.start;
    for (part, _) in parts {
        if part.start != at {
            return false;
        }
        at = part.end;
    }
    at == range.end
}

/// Whether ranks share the update of weights.
pub(super) fn is_split(program: &Program) -> bool {
    program.buffers.iter().any(|b| matches!(b.contents, Contents::Shard { .. }))
}
