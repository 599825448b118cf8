//! Updates of weights that lie, or whose states lie, elsewhere than on the device (ZeRO-Offload,
//! Ren et al. 2021; ZeRO-Infinity, Rajbhandari et al. 2021).
//!
//! They come chunk by chunk into two sets of buffers: while one chunk is updated, the one before it
//! is copied back, and the next one comes. What is rounded from masters is copied back alone.

use ir::plan::Place;
use ir::program::{BufferId, STATE_BLOCK, Step};

use super::{Class, Updated, update as update_elements};
use crate::store::quantum;

/// Chunks into which a run of weights is cut at least, where it has as many whole lines.
const CHUNKS: usize = 4;
/// Elements of a chunk at most: 16 MiB of each state in f32. Chosen.
const CHUNK_MAX: usize = 4 << 20;

/// Updates elements, wherever they and their states are.
///
/// # Errors
/// A sentence, when the optimizer has no kernel.
pub(super) fn update(
    class: &mut Class<'_>,
    updated: &Updated,
    scalars: [BufferId; 2],
    steps: &mut Vec<Step>,
) -> Result<(), String> {
    let is_away = |buffer: &BufferId| class.store.place(*buffer) != Place::Device;
    let away: Vec<BufferId> = updated.kept().filter(is_away).collect();
    if away.is_empty() {
        return update_elements(class, updated, scalars, steps);
    }
    let quantum = quantum(&class.plan.precision, !updated.scales.is_empty());
    let chunk = updated.elements.div_ceil(CHUNKS).min(CHUNK_MAX).next_multiple_of(quantum);
    let chunk = chunk.min(updated.elements);
    let after = class.clock.end() + 1;
    let sets = [0, 1].map(|_| {
        let staged = |buffer: &BufferId| {
            let per = if updated.scales.contains(buffer) { STATE_BLOCK } else { 1 };
            class.store.staged(*buffer, chunk / per, (after, after))
        };
        away.iter().map(staged).collect::<Vec<BufferId>>()
    });
    let chunks: Vec<Chunk> = (0..updated.elements)
        .step_by(chunk)
        .zip(sets.iter().cycle())
        .map(|(first, set)| {
            let elements = chunk.min(updated.elements - first);
            Chunk::new(class, updated, (first, elements), (&away, set))
        })
        .collect();
    for (at, chunk) in chunks.iter().enumerate() {
        if at == 0 {
            chunk.fetch(steps);
        }
        if let Some(next) = chunks.get(at + 1) {
            next.fetch(steps);
        }
        // A set of buffers is free once the chunk before the last one is stored.
        let is_there = |moved: &&Moved| moved.is_read || at > 1;
        let waits = chunk.moved.iter().filter(is_there);
        steps.extend(waits.map(|moved| Step::Await { buffer: moved.here }));
        update_elements(class, &chunk.updated, scalars, steps)?;
        chunk.store(steps);
    }
    Ok(())
}

impl Updated {
    /// What lasts from one step to the next.
    fn kept(&self) -> impl Iterator<Item = BufferId> {
        let updated = std::iter::once(self.params).chain(self.rounded);
        updated.chain(self.states.clone()).chain(self.scales.clone())
    }
}

/// Some of the elements that are updated.
struct Chunk {
    updated: Updated,
    moved: Vec<Moved>,
}

/// What is copied for an update.
struct Moved {
    /// Where it lies.
    away: BufferId,
    /// Where it is updated.
    here: BufferId,
    /// Whether the update reads it.
    is_read: bool,
}

impl Chunk {
    /// The elements from one on, of which states come into a set of buffers.
    fn new(
        class: &mut Class<'_>,
        updated: &Updated,
        (first, elements): (usize, usize),
        (away, set): (&[BufferId], &[BufferId]),
    ) -> Chunk {
        let mut moved = Vec::new();
        let mut part = |buffer: BufferId, per: usize, is_read: bool| {
            let slice = class.store.slice(buffer, first / per, elements / per);
            let Some(at) = away.iter().position(|other| *other == buffer) else { return slice };
            let here = class.store.first_of(set[at], elements / per);
            moved.push(Moved { away: slice, here, is_read });
            here
        };
        let Updated { is_matrix, params, grads, ref states, ref scales, rounded, .. } = *updated;
        let updated = Updated {
            is_matrix,
            elements,
            params: part(params, 1, true),
            grads: part(grads, 1, true),
            states: states.iter().map(|state| part(*state, 1, true)).collect(),
            scales: scales.iter().map(|scale| part(*scale, STATE_BLOCK, true)).collect(),
            rounded: rounded.map(|rounded| part(rounded, 1, false)),
        };
        Chunk { updated, moved }
    }

    fn fetch(&self, steps: &mut Vec<Step>) {
        let read = self.moved.iter().filter(|moved| moved.is_read);
        steps.extend(read.map(|moved| Step::Move { from: moved.away, to: moved.here }));
    }

    fn store(&self, steps: &mut Vec<Step>) {
        let moves = self.moved.iter();
        steps.extend(moves.map(|moved| Step::Move { from: moved.here, to: moved.away }));
    }
}
