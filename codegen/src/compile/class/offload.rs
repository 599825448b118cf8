//! Activations that lie elsewhere than on the device between passes: what a forward pass makes is
//! copied there while the next call runs, and is fetched again one call before it is read.

use ir::plan::Place;
use ir::program::Step;

use super::chunk::{Chunk, Copy, Item, Offloads, Room, Until};
use super::{Class, Clock};

/// The passes in which items are fetched.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fetching {
    Backward,
    Weights,
}

impl Class<'_> {
    /// Gives what the backward pass of a chunk reads room elsewhere, where the plan says so: all
    /// but what is read again so soon that nothing would be gained.
    pub(super) fn offload_activations(&mut self, at: usize) {
        let (place, clock) = (self.plan.offload.activations, self.clock);
        if place == Place::Device {
            return;
        }
        let chunk = &mut self.chunks[at];
        // The backward pass of a micro-batch is the next to come.
        let follows = chunk.in_flight == 1;
        let rooms = std::mem::take(&mut chunk.rooms);
        for room in rooms {
            let offloads = chunk.offloads_of(&room, clock).filter(|offloads| {
                let [stored, fetched] = offloads.spans(chunk, clock);
                !follows || fetched.0 > stored.1.max(offloads.used) + 1
            });
            let Some(offloads) = offloads else {
                chunk.rooms.push(room);
                continue;
            };
            let [stored, fetched] = offloads.spans(chunk, clock);
            let Room { item, ref name, dtype, ref sizes, span, until, .. } = room;
            let copy = |copy, place, name: String, span, until| Room {
                copy,
                place,
                span,
                ..Room::of(item, name, (dtype, sizes.clone()), span, until)
            };
            let last = stored.1.max(offloads.used);
            let device = Place::Device;
            let rooms = [
                copy(Copy::Made, device, name.clone(), (span.0, last), Until::SamePass),
                copy(Copy::Away, place, format!("{name}.away"), (stored.0, fetched.1), until),
                copy(Copy::Fetched, device, format!("{name}.back"), fetched, Until::SamePass),
            ];
            chunk.rooms.extend(rooms);
            chunk.offloads.insert(item, offloads);
        }
    }

    /// Begins the copies of what is there after a call, or at the start of the pass, and ends those
    /// that must have ended by then.
    pub(super) fn store(
        &self,
        chunk: &Chunk<'_>,
        made: Option<usize>,
        microbatch: usize,
        steps: &mut Vec<Step>,
    ) {
        for (item, _) in chunk.offloads.iter().filter(|(_, offloads)| offloads.made == made) {
            let copy = |copy| chunk.copy(*item, copy, microbatch);
            steps.push(Step::Move { from: copy(Copy::Made), to: copy(Copy::Away) });
        }
        let ends = |offloads: &Offloads| made == Some(offloads.stored);
        for (item, _) in chunk.offloads.iter().filter(|(_, offloads)| ends(offloads)) {
            steps.push(Step::Await { buffer: chunk.copy(*item, Copy::Made, microbatch) });
        }
    }

    /// Begins to fetch what the call after this one reads in a pass, and waits for what this one
    /// does; of the first call, both.
    pub(super) fn fetch(
        &self,
        chunk: &Chunk<'_>,
        (call, pass): (usize, Fetching),
        microbatch: usize,
        steps: &mut Vec<Step>,
    ) {
        let read = |offloads: &Offloads| offloads.read[pass as usize];
        let begun = chunk.offloads.iter().filter_map(|(item, offloads)| {
            let (first, _) = read(offloads)?;
            (chunk.fetched_at(first) == call).then_some((first, *item))
        });
        // What is read sooner comes first.
        let mut begun: Vec<(usize, Item)> = begun.collect();
        begun.sort_by_key(|(first, _)| std::cmp::Reverse(*first));
        for (_, item) in begun {
            let copy = |copy| chunk.copy(item, copy, microbatch);
            steps.push(Step::Move { from: copy(Copy::Away), to: copy(Copy::Fetched) });
        }
        let is_read = |offloads: &Offloads| read(offloads).is_some_and(|(first, _)| first == call);
        for (item, _) in chunk.offloads.iter().filter(|(_, offloads)| is_read(offloads)) {
            steps.push(Step::Await { buffer: chunk.copy(*item, Copy::Fetched, microbatch) });
        }
    }
}

impl Offloads {
    /// From when to when an item is being stored, and from when to when what is fetched is there.
    fn spans(&self, chunk: &Chunk<'_>, clock: Clock) -> [(usize, usize); 2] {
        let forward = |call: usize| clock.forward(chunk.before + call);
        let backward = |call: usize| clock.backward(chunk.before + call);
        let first = self.made.map_or(0, forward);
        let reads = self.read.iter().flatten();
        let fetched = reads.map(|(at, last)| (backward(chunk.fetched_at(*at)), backward(*last)));
        let all = fetched.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
        [(first, forward(self.stored)), all.unwrap_or((clock.end(), clock.end()))]
    }
}

impl Chunk<'_> {
    /// The call before which a fetch begins of what a call of a backward pass reads first.
    fn fetched_at(&self, call: usize) -> usize {
        (call + 1).min(self.own.len() - 1)
    }

    /// When an item is copied that is read after its forward pass; none of others.
    fn offloads_of(&self, room: &Room, clock: Clock) -> Option<Offloads> {
        let item = room.item;
        let forward = |call: usize| clock.forward(self.before + call);
        let (made, used) = match item {
            Item::Value(value) => {
                let made = self.own.iter().position(|call| call.results.contains(&value));
                let last = self.consumers(value).into_iter().map(forward).max().unwrap_or(0);
                // It is there until it is sent to other chunks.
                let is_sent = self.crossing[1].contains(&value);
                (made, if is_sent { clock.calls + 1 } else { last })
            }
            Item::Kept(call, _) => (Some(call), forward(call)),
            Item::Cotangent(_) | Item::Passed(..) => return None,
        };
        if room.until == Until::SamePass {
            return None;
        }
        // Backward passes go from the last call to the first.
        let ends = |reads: &dyn Fn(usize) -> bool| {
            let mut all = (0..self.own.len()).filter(|call| reads(*call));
            let last = all.next()?;
            Some((all.next_back().unwrap_or(last), last))
        };
        let backward =
            ends(&|call| self.reads(call, &self.layer(call).halves.backward_params, item));
        let late = ends(&|call| {
            let late = self.layer(call).halves.late.as_ref();
            late.is_some_and(|late| self.reads(call, &late.params, item))
        });
        let next = made.map_or(0, |made| made + 1);
        let stored = next.min(self.own.len() - 1);
        Some(Offloads { made, stored, used, read: [backward, late] })
    }
}
