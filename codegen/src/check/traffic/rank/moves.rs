//! Copies between memory spaces.
//!
//! They are made in their order while a rank goes on. So what a copy writes is there for the next
//! copies at once, and for everybody else once it is awaited; until then nobody else writes what it
//! reads, or uses what it writes.

use std::ops::Range;

use ir::program::{BufferId, Contents, ShardRole};

use super::super::World;
use super::{Place, Rank, Seen};
use crate::check::memory::{Note, Owner};

/// A copy that has begun.
pub(super) struct Moving {
    from: Range<u64>,
    to: Range<u64>,
}

fn meet(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

impl<'a> Rank<'a> {
    /// Begins a copy: what is read must be there, and what outlasts the step is overwritten by what
    /// was copied from it.
    pub(super) fn begin_move(&mut self, world: &mut World<'_, 'a>, from: BufferId, to: BufferId) {
        let others = std::mem::take(&mut self.moving);
        let [source, target] = [from, to].map(|buffer| self.buffer(buffer));
        let length = source.range.end - source.range.start;
        let Seen { .. } = self.read(world, &source, 0..length, self.dtype(from));
        let origin = self.copies.get(&from.0);
        let is_copy = origin.is_some_and(|(of, _)| self.buffer(*of).range == target.range);
        let of = self.rounded.get(&from.0);
        let is_rounded =
            self.is_params(&target) && of.is_some_and(|of| *of == self.weights(&target));
        if self.outlasts_step(&target) && !is_copy && !is_rounded {
            let name = &self.program.buffers[to.0 as usize].name;
            let text = format!("overwrites `{name}` by what is no copy of it");
            world.findings.add_at(world.setup, "E2115", self.at(), text);
        }
        let is_fetched = target.range.end <= self.program.arena_bytes;
        let step = Some(self.step);
        for (range, _, note) in self.notes(&source, 0..length) {
            let Some(note) = note else { continue };
            let [start, end] = [range.start, range.end].map(|byte| byte - source.range.start);
            if is_fetched {
                let there = target.range.start + start..target.range.start + end;
                for (part, owner) in &target.parts {
                    let part = part.start.max(there.start)..part.end.min(there.end);
                    if !part.is_empty() {
                        self.memory.write(part, Note { owner: *owner, step, ..note });
                    }
                }
            } else {
                self.write(world, &target, start..end, (note.dtype, note.label));
                self.mark(&target, start..end, note.summed);
            }
        }
        if is_fetched {
            self.copies.insert(to.0, (from, self.step));
            self.rounded.remove(&to.0);
            self.check_home(world, from, to);
            let wanted = self.weights_of_parts(&target);
            let is_other = wanted != self.weights(&source) || !self.is_params(&source);
            if !wanted.is_empty() && is_other {
                let name = &self.program.buffers[to.0 as usize].name;
                let text = format!("fetches other weights to `{name}`");
                world.findings.add_at(world.setup, "E2115", self.at(), text);
            }
        } else {
            self.stored.insert(to.0, from.0);
        }
        self.moving = others;
        self.moving.push(Moving { from: source.range, to: target.range });
    }

    /// Each value that is copied elsewhere comes back to one place, and to that no other does.
    fn check_home(&mut self, world: &mut World<'_, 'a>, from: BufferId, to: BufferId) {
        let Some(made) = self.stored.get(&from.0).copied() else { return };
        let others = self.fetched.iter();
        let is_taken = others.clone().any(|(other, home)| *home == to.0 && *other != made);
        let is_moved = self.fetched.get(&made).is_some_and(|home| *home != to.0);
        if is_taken || is_moved {
            let name = |at: u32| &self.program.buffers[at as usize].name;
            let text =
                format!("fetches `{}` to the place of another, `{}`", name(made), name(to.0));
            world.findings.add_at(world.setup, "E2112", self.at(), text);
        }
        self.fetched.insert(made, to.0);
    }

    /// Whether all of a place are weights as layers read them, or pieces of these.
    fn is_params(&self, place: &Place) -> bool {
        place.parts.iter().all(|(_, owner)| match owner {
            Owner::Buffer(at) => matches!(
                self.program.buffers[*at as usize].contents,
                Contents::Param(_) | Contents::Shard { role: ShardRole::Param, .. }
            ),
            Owner::Local(..) => false,
        })
    }

    /// Notes what a launch writes besides weights and states that it updates: the same elements, as
    /// weights that are rounded, which lie elsewhere than on the device between steps.
    pub(in crate::check) fn note_rounded(&mut self, outputs: &[Place]) {
        let updated = outputs.iter().find(|place| self.is_kept(place));
        let updated = updated.map(|place| self.weights(place));
        for place in outputs {
            let [(ref range, Owner::Buffer(at))] = place.parts[..] else { continue };
            if self.original(place).is_some() || *range != place.range {
                continue;
            }
            match &updated {
                Some(weights) => _ = self.rounded.insert(at, weights.clone()),
                None => _ = self.rounded.remove(&at),
            }
        }
    }

    /// Whether bytes of a copy of what outlasts the step were changed since they came.
    pub(in crate::check) fn is_changed_copy(&self, buffer: u32, range: &Range<u64>) -> bool {
        let Some((original, came)) = self.copies.get(&buffer) else { return false };
        let outlasts = self.outlasts_step(&self.buffer(*original));
        let is_later = |note: &Note| note.step.is_some_and(|step| step != *came);
        let mut notes = self.memory.read(range.clone()).into_iter();
        outlasts && notes.any(|(_, note)| note.as_ref().is_some_and(is_later))
    }

    /// Ends the copies from and to a buffer, and those before them.
    pub(super) fn end_moves(&mut self, buffer: BufferId) {
        let range = self.buffer(buffer).range;
        let touches = |moving: &Moving| meet(&moving.from, &range) || meet(&moving.to, &range);
        let ended = self.moving.iter().rposition(touches).map_or(0, |last| last + 1);
        self.moving.drain(..ended);
    }

    /// What a place of the device is a copy of; none where it is no copy.
    pub(in crate::check) fn original(&self, place: &Place) -> Option<Place> {
        let [(ref range, Owner::Buffer(at))] = place.parts[..] else { return None };
        let (original, _) = self.copies.get(&at)?;
        (*range == place.range).then(|| self.buffer(*original))
    }

    /// Whether some of a place, or of what it is a copy of, outlasts the step.
    pub(in crate::check) fn is_kept(&self, place: &Place) -> bool {
        let original = self.original(place);
        self.outlasts_step(original.as_ref().unwrap_or(place))
    }

    /// Whether some of a place outlasts the step.
    pub(in crate::check) fn outlasts_step(&self, place: &Place) -> bool {
        place.parts.iter().any(|(_, owner)| match owner {
            Owner::Buffer(at) => self.program.buffers[*at as usize].contents.outlasts_step(),
            Owner::Local(..) => false,
        })
    }

    /// Bytes that are read or written are not being copied.
    pub(super) fn check_moving(
        &self,
        world: &mut World<'_, 'a>,
        range: &Range<u64>,
        is_written: bool,
    ) {
        let disturbs =
            |moving: &&Moving| meet(&moving.to, range) || is_written && meet(&moving.from, range);
        if self.moving.iter().find(disturbs).is_some() {
            let verb = if is_written { "writes" } else { "reads" };
            let text = format!("{verb} what is being copied, before the copy is awaited");
            world.findings.add_at(world.setup, "E2127", self.at(), text);
        }
    }
}
