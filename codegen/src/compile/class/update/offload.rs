//! Updates of weights that lie, or whose states lie, elsewhere than on the device (ZeRO-Offload,
//! Ren et al. 2021; ZeRO-Infinity, Rajbhandari et al. 2021).
//!
//! They come chunk by chunk into two sets of buffers, which all updates of a step share: while one
//! chunk is updated, the one before it is copied back, and the next one comes. What is rounded from
//! masters is copied back alone.

use std::collections::BTreeMap;

use ir::DType;
use ir::plan::Place;
use ir::program::{BufferId, STATE_BLOCK, Step};

use super::{Class, Updated, update as update_elements};
use crate::store::quantum;

/// Chunks into which a run of weights is cut at least, where it has as many whole lines.
const CHUNKS: usize = 4;
/// Elements of a chunk at most: 16 MiB of each state in f32. Chosen.
const CHUNK_MAX: usize = 4 << 20;

/// Updates elements one run after the other, wherever they and their states are. `done` is called
/// after each run, with its number.
///
/// # Errors
/// A sentence, when the optimizer has no kernel.
pub(super) fn update_all(
    class: &mut Class<'_>,
    all: &[Updated],
    scalars: [BufferId; 2],
    steps: &mut Vec<Step>,
    done: &mut dyn FnMut(&mut Class<'_>, usize, &mut Vec<Step>),
) -> Result<(), String> {
    let mut staging = Staging::new(class, all);
    let mut chunks: Vec<(usize, Chunk)> = Vec::new();
    for (run, updated) in all.iter().enumerate() {
        if away(class, updated).next().is_none() {
            chunks.push((run, Chunk { updated: updated.clone(), moved: Vec::new() }));
            continue;
        }
        let chunk = chunk_of(class, updated);
        for first in (0..updated.elements).step_by(chunk) {
            let elements = chunk.min(updated.elements - first);
            chunks.push((run, Chunk::new(class, updated, (first, elements), &mut staging)));
        }
    }
    for (at, (run, chunk)) in chunks.iter().enumerate() {
        let next = chunks.get(at + 1);
        if at == 0 {
            chunk.fetch(steps);
        }
        if let Some((_, next)) = next {
            next.fetch(steps);
        }
        // Where nothing comes, what was there before has gone.
        steps.extend(chunk.moved.iter().map(|moved| Step::Await { buffer: moved.here }));
        update_elements(class, &chunk.updated, scalars, steps)?;
        chunk.store(steps);
        if next.is_none_or(|(other, _)| other != run) {
            done(class, *run, steps);
        }
    }
    Ok(())
}

/// The elements of a chunk of a run.
fn chunk_of(class: &Class<'_>, updated: &Updated) -> usize {
    let quantum = quantum(&class.plan.precision, !updated.scales.is_empty());
    let chunk = updated.elements.div_ceil(CHUNKS).min(CHUNK_MAX).next_multiple_of(quantum);
    chunk.min(updated.elements).max(1)
}

/// What an update reads and writes that lasts from one step to the next.
#[derive(Clone, Copy)]
struct Kept {
    /// Its number among those of an update.
    role: usize,
    buffer: BufferId,
    /// Elements of weights for each number.
    per: usize,
    /// Whether the update reads it.
    is_read: bool,
}

impl Updated {
    fn kept(&self) -> impl Iterator<Item = Kept> {
        let params = std::iter::once((self.params, 1, true));
        let rounded = self.rounded.map(|buffer| (buffer, 1, false));
        let states = self.states.iter().map(|buffer| (*buffer, 1, true));
        let scales = self.scales.iter().map(|buffer| (*buffer, STATE_BLOCK, true));
        let all = params.chain(rounded).chain(states).chain(scales).enumerate();
        all.map(|(role, (buffer, per, is_read))| Kept { role, buffer, per, is_read })
    }
}

/// What of it lies elsewhere than on the device.
fn away(class: &Class<'_>, updated: &Updated) -> impl Iterator<Item = Kept> {
    updated.kept().filter(|kept| class.store.place(kept.buffer) != Place::Device)
}

/// Two sets of buffers for what comes, by the role of that in an update.
struct Staging {
    sets: [BTreeMap<(usize, DType), BufferId>; 2],
    /// Their first elements, as many as a chunk has.
    parts: BTreeMap<(BufferId, usize), BufferId>,
    /// The set of the next chunk.
    next: usize,
}

impl Staging {
    /// As large as the largest chunk of all updates.
    fn new(class: &mut Class<'_>, all: &[Updated]) -> Staging {
        let mut wanted: BTreeMap<(usize, DType), (usize, BufferId)> = BTreeMap::new();
        for updated in all {
            let chunk = chunk_of(class, updated);
            for Kept { role, buffer, per, .. } in away(class, updated) {
                let key = (role, class.store.dtype(buffer));
                let most = wanted.entry(key).or_insert((0, buffer));
                most.0 = most.0.max(chunk / per);
            }
        }
        let after = class.clock.end() + 1;
        let sets = [0, 1].map(|_| {
            let staged = |(key, (elements, like)): (&_, &(usize, BufferId))| {
                (*key, class.store.staged(*like, *elements, (after, after)))
            };
            wanted.iter().map(staged).collect()
        });
        Staging { sets, parts: BTreeMap::new(), next: 0 }
    }

    /// Room for some elements in the set of the next chunk.
    fn room(&mut self, class: &mut Class<'_>, kept: Kept, elements: usize) -> BufferId {
        let whole = self.sets[self.next][&(kept.role, class.store.dtype(kept.buffer))];
        let part = || class.store.first_of(whole, elements);
        *self.parts.entry((whole, elements)).or_insert_with(part)
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
    /// The elements from one on, of which what lies elsewhere comes into the next set of buffers.
    fn new(
        class: &mut Class<'_>,
        updated: &Updated,
        (first, elements): (usize, usize),
        staging: &mut Staging,
    ) -> Chunk {
        let mut chunk = Chunk { updated: updated.clone(), moved: Vec::new() };
        let own = &mut chunk.updated;
        own.elements = elements;
        own.grads = class.store.slice(own.grads, first, elements);
        let slots = std::iter::once(&mut own.params).chain(&mut own.rounded);
        let slots = slots.chain(&mut own.states).chain(&mut own.scales);
        for (slot, kept) in slots.zip(updated.kept()) {
            let away = class.store.slice(kept.buffer, first / kept.per, elements / kept.per);
            *slot = away;
            if class.store.place(kept.buffer) != Place::Device {
                let here = staging.room(class, kept, elements / kept.per);
                chunk.moved.push(Moved { away, here, is_read: kept.is_read });
                *slot = here;
            }
        }
        staging.next = 1 - staging.next;
        chunk
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
