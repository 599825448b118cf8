//! Updates of weights whose states lie elsewhere than on the device (ZeRO-Offload, Ren et al. 2021;
//! ZeRO-Infinity, Rajbhandari et al. 2021).
//!
//! States and masters come chunk by chunk into two sets of buffers: while one chunk is updated, the
//! one before it is copied back, and the next one comes.

use ir::plan::Place;
use ir::program::{BufferId, STATE_BLOCK, Step};

use super::{Class, Updated, update as update_elements};
use crate::store::quantum;

/// Chunks into which a run of weights is cut at least, where it has as many whole lines.
const CHUNKS: usize = 4;
/// Elements of a chunk at most: 16 MiB of each state in f32. Chosen.
const CHUNK_MAX: usize = 4 << 20;

/// Updates elements, wherever their states are.
///
/// # Errors
/// A sentence, when the optimizer has no kernel.
pub(super) fn update(
    class: &mut Class<'_>,
    updated: &Updated,
    scalars: [BufferId; 2],
    steps: &mut Vec<Step>,
) -> Result<(), String> {
    let away: Vec<BufferId> = updated.kept().filter(|kept| is_away(class, *kept)).collect();
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
            class.store.staged(*buffer, chunk / per, after)
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
        steps.extend(chunk.moved.iter().map(|(_, here)| Step::Await { buffer: *here }));
        update_elements(class, &chunk.updated, scalars, steps)?;
        chunk.store(steps);
    }
    Ok(())
}

impl Updated {
    /// What lasts from one step to the next, but for what layers read.
    fn kept(&self) -> impl Iterator<Item = BufferId> {
        std::iter::once(self.params).chain(self.states.clone()).chain(self.scales.clone())
    }
}

fn is_away(class: &Class<'_>, buffer: BufferId) -> bool {
    class.store.place(buffer) != Place::Device
}

/// Some of the elements that are updated.
struct Chunk {
    updated: Updated,
    /// What is copied: where it lies, and where it is updated.
    moved: Vec<(BufferId, BufferId)>,
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
        let mut part = |buffer: BufferId, per: usize| {
            let slice = class.store.slice(buffer, first / per, elements / per);
            let Some(at) = away.iter().position(|other| *other == buffer) else { return slice };
            let here = class.store.first_of(set[at], elements / per);
            moved.push((slice, here));
            here
        };
        let Updated { is_matrix, params, grads, ref states, ref scales, rounded, .. } = *updated;
        let updated = Updated {
            is_matrix,
            elements,
            params: part(params, 1),
            grads: part(grads, 1),
            states: states.iter().map(|state| part(*state, 1)).collect(),
            scales: scales.iter().map(|scale| part(*scale, STATE_BLOCK)).collect(),
            rounded: rounded.map(|rounded| part(rounded, 1)),
        };
        Chunk { updated, moved }
    }

    fn fetch(&self, steps: &mut Vec<Step>) {
        steps.extend(self.moved.iter().map(|(away, here)| Step::Move { from: *away, to: *here }));
    }

    fn store(&self, steps: &mut Vec<Step>) {
        steps.extend(self.moved.iter().map(|(away, here)| Step::Move { from: *here, to: *away }));
    }
}
