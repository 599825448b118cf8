//! Parameters, gradients and statistics: what may change them, and what must be summed before.

use std::ops::Range;

use ir::plan::Optimizer;
use ir::program::{
    BufferId, Contents, Exchange, Experts, Group, Instruction, Member, STATE_BLOCK, ShardRole, Step,
};
use ir::sharding::Axis;

use super::labels::{Label, Labels};
use super::memory::{Owner, Summed};
use super::places::is_split;
use super::traffic::World;
use super::traffic::rank::{Place, Rank};
use super::{Phase, Setup};

/// What ranks with the same weights sum: a gradient or a piece of it, what one call makes of it, by
/// the first of its weights, or the norm.
#[derive(Clone, Copy)]
enum Reduced {
    Gradient(usize),
    Term(usize),
    Norm,
}

impl<'a> Rank<'a> {
    /// Notes which gradients a launch adds to the squared norm, which nothing else is added to.
    pub(super) fn count_normed(
        &mut self,
        world: &mut World<'_, 'a>,
        inputs: &[Place],
        outputs: &[Place],
    ) {
        let is_norm = |place: &Place| match place.parts[..] {
            [(ref range, Owner::Buffer(at))] => {
                let buffer = &self.program.buffers[at as usize];
                let norm = buffer.offset + 2 * buffer.dtype.size();
                buffer.contents == Contents::Stats && range.start >= norm
            }
            _ => false,
        };
        let Some(norm) = outputs.iter().find(|place| is_norm(place)) else { return };
        self.check_norm_of_experts(world, norm, inputs);
        for place in inputs {
            for (range, owner) in &place.parts {
                let buffer = match *owner {
                    Owner::Buffer(at) => Some(&self.program.buffers[at as usize]),
                    Owner::Local(..) => None,
                };
                match buffer.map(|buffer| (&buffer.contents, buffer)) {
                    Some((Contents::Grad(weight), buffer)) => {
                        let end = buffer.offset + buffer.bytes;
                        self.normed[*weight] += range.end.min(end).saturating_sub(range.start);
                    }
                    // The pieces of all ranks with the same weights are the whole bucket.
                    Some((Contents::Shard { role: ShardRole::Grad, bucket }, buffer))
                        if *range == (buffer.offset..buffer.offset + buffer.bytes) =>
                    {
                        for (_, weight) in self.weights(&self.buffer(*bucket)) {
                            self.normed[weight] += self.gradient_bytes(world.setup, weight);
                        }
                    }
                    _ => {
                        let text = "counts what is no gradient in the norm".to_owned();
                        world.findings.add_at(world.setup, "E2122", self.at(), text);
                    }
                }
            }
        }
    }

    /// Gradients of experts are summed over all ranks that have the same ones, or first over those
    /// that share one copy of them, and over none with others.
    pub(super) fn check_sharers(&self, world: &mut World<'_, 'a>, place: &Place, group: &Group) {
        if matches!(group, Group::Axis(Axis::Tp | Axis::Pp) | Group::Stages(_)) {
            return;
        }
        let plan = world.setup.plan;
        let data = plan.mesh.data_ranks();
        let shards = plan.zero.ranks(data);
        let is_hybrid = plan.optimizer != Optimizer::None && shards > 1 && shards < data;
        let wanted = |Experts { ranks, .. }: Experts| match is_hybrid {
            true => Group::Strided { count: shards / ranks, stride: ranks },
            false => Group::Copies(ranks),
        };
        for (_, owner) in &place.parts {
            let Owner::Buffer(at) = *owner else { continue };
            let buffer = &self.program.buffers[at as usize];
            let (Contents::Grad(weight) | Contents::Term { weight, .. }) = buffer.contents else {
                continue;
            };
            let experts = self.program.weights[weight].experts;
            if experts.is_some_and(|experts| *group != wanted(experts)) {
                let text = format!("sums `{}` over ranks with other experts", buffer.name);
                world.findings.add_at(world.setup, "E2116", self.at(), text);
            }
        }
    }

    /// Where ranks hold whole gradients, the squares of experts are summed over those that share
    /// them before those are added that all of these have.
    fn check_norm_of_experts(&self, world: &mut World<'_, 'a>, norm: &Place, inputs: &[Place]) {
        let program = self.program;
        let mut weights = program.weights.iter().enumerate();
        let has_trained = weights.any(|(at, w)| w.experts.is_some() && program.trains(at));
        if is_split(program) || !has_trained {
            return;
        }
        let is_summed = self.sums_of(norm, &(0..norm.range.end - norm.range.start));
        for (_, weight) in inputs.iter().flat_map(|place| self.weights(place)) {
            let shard = program.weights.get(weight);
            let is_expert = shard.is_some_and(|shard| shard.experts.is_some());
            if is_summed.has(Summed::SHARDS) == is_expert {
                let name = shard.map_or("", |shard| &shard.name);
                let text = format!("counts `grads.{name}` in the norm out of its turn");
                world.findings.add_at(world.setup, "E2122", self.at(), text);
            }
        }
    }

    /// The bytes of the gradient of a weight; none of one that is not trained.
    pub(super) fn gradient_bytes(&self, setup: &Setup<'_>, weight: usize) -> u64 {
        let elements = self.program.weights[weight].ranges.iter().map(|r| r.1).product::<usize>();
        let bytes = elements as u64 * setup.plan.precision.gradients.size();
        if self.program.trains(weight) { bytes } else { 0 }
    }

    /// A bucket's pieces are scattered from its gradients, which other stages have added theirs to,
    /// and parameters are gathered from the pieces of their own bucket.
    pub(super) fn check_pieces(
        &self,
        world: &mut World<'_, 'a>,
        collective: &Instruction,
        from: &Place,
    ) {
        let Instruction::Collective { exchange, output, .. } = collective else { return };
        let to = self.place(world.setup.phase, *output);
        let (whole, piece) = match exchange {
            Exchange::AllReduce(_)
            | Exchange::AllToAll { .. }
            | Exchange::Dispatch(_)
            | Exchange::Combine(_) => return,
            Exchange::AllGather { .. } => (&to, from),
            Exchange::ReduceScatter { .. } => (from, &to),
        };
        let weights = self.weights(whole);
        let bucket = self.bucket(piece);
        if weights.is_empty() && bucket.is_none() {
            return;
        }
        let gathers = matches!(exchange, Exchange::AllGather { .. });
        let bucket = bucket.filter(|(role, _)| is_exchanged(*role, gathers)).map(|piece| piece.1);
        if bucket.is_none_or(|bucket| self.weights(&self.buffer(bucket)) != weights) {
            let text = "exchanges pieces of other weights than the whole is of".to_owned();
            world.findings.add_at(world.setup, "E2115", self.at(), text);
        }
        for (range, owner, note) in self.notes(from, 0..from.range.end - from.range.start) {
            let (Owner::Buffer(at), Some(note)) = (owner, note) else { continue };
            let wanted = self.wanted_sums(world.setup, at, range.start);
            if !note.summed.with(Summed::DP).has(wanted) {
                let name = &self.program.buffers[at as usize].name;
                let text = format!("scatters `{name}` before it is summed over stages");
                world.findings.add_at(world.setup, "E2116", self.at(), text);
            }
        }
    }

    /// What a place is a piece of, or a copy of one: as what, of which bucket.
    fn bucket(&self, place: &Place) -> Option<(ShardRole, BufferId)> {
        if let Some(original) = self.original(place) {
            return self.bucket(&original);
        }
        let [(_, Owner::Buffer(at))] = place.parts[..] else { return None };
        let Contents::Shard { role, bucket } = self.program.buffers[at as usize].contents else {
            return None;
        };
        Some((role, bucket))
    }

    /// The weights behind a place, with the elements of each; none if there are none. A bucket of
    /// which the place is a piece counts as one weight, after all others.
    pub(super) fn weights(&self, place: &Place) -> Vec<(Range<u64>, usize)> {
        match self.original(place) {
            Some(original) => self.weights(&original),
            None => self.weights_of_parts(place),
        }
    }

    /// As [`Rank::weights`], of the buffers that a place lies on, whatever was copied there.
    pub(super) fn weights_of_parts(&self, place: &Place) -> Vec<(Range<u64>, usize)> {
        let of = |(range, owner): &(Range<u64>, Owner)| {
            let Owner::Buffer(at) = owner else { return None };
            let buffer = &self.program.buffers[*at as usize];
            let is_scale = matches!(
                buffer.contents,
                Contents::Scale { .. } | Contents::Shard { role: ShardRole::Scale(_), .. }
            );
            let per = if is_scale { STATE_BLOCK as u64 } else { 1 };
            let element = |byte: u64| (byte - buffer.offset) / buffer.dtype.size() * per;
            let elements = element(range.start)..element(range.end);
            match buffer.contents {
                Contents::Param(weight)
                | Contents::Master(weight)
                | Contents::Grad(weight)
                | Contents::State { weight, .. }
                | Contents::Scale { weight, .. }
                | Contents::Gathered { weight, .. }
                | Contents::Term { weight, .. } => Some((elements, weight)),
                Contents::Shard { bucket, .. } => {
                    Some((elements, self.program.weights.len() + bucket.0 as usize))
                }
                Contents::Feed(_)
                | Contents::Stats
                | Contents::Cache(_)
                | Contents::Output
                | Contents::View
                | Contents::Part { .. }
                | Contents::Activation
                | Contents::Frame => None,
            }
        };
        place.parts.iter().filter_map(of).collect()
    }

    /// As [`Rank::weights`]; of the piece of a bucket that is all of it, the weights of the bucket.
    fn updated(&self, place: &Place) -> Vec<(Range<u64>, usize)> {
        let found = self.weights(place);
        let [(ref piece, at)] = found[..] else { return found };
        if at < self.program.weights.len() {
            return found;
        }
        let original = self.original(place);
        let [(_, Owner::Buffer(owner))] = original.as_ref().unwrap_or(place).parts[..] else {
            return found;
        };
        let elements = |at: u32| {
            let buffer = &self.program.buffers[at as usize];
            buffer.bytes / buffer.dtype.size()
        };
        let Some((role, bucket)) = self.bucket(place) else { return found };
        let per = if matches!(role, ShardRole::Scale(_)) { STATE_BLOCK as u64 } else { 1 };
        if elements(owner) * per != elements(bucket.0) {
            return found;
        }
        let size = self.program.buffers[bucket.0 as usize].dtype.size();
        let bucket = self.buffer(bucket);
        let start = bucket.range.start;
        let of = |(range, owner): &(Range<u64>, Owner)| {
            let before = (range.start - start) / size;
            let part = Place { range: range.clone(), parts: vec![(range.clone(), *owner)] };
            let (elements, weight) = self.weights_of_parts(&part).pop()?;
            let from = piece.start.max(before) - before + elements.start;
            let to = piece.end.checked_sub(before)?.min(elements.end);
            (from < to).then_some((from..to, weight))
        };
        bucket.parts.iter().filter_map(of).collect()
    }

    /// Parameters and states are changed by the gradients and states of the same elements.
    pub(super) fn check_pairs(
        &self,
        world: &mut World<'_, 'a>,
        inputs: &[Place],
        outputs: &[Place],
    ) {
        for output in outputs.iter().filter(|place| self.is_kept(place)) {
            let changed = self.updated(output);
            let mut paired = inputs.iter().map(|place| self.updated(place));
            if paired.any(|weights| !weights.is_empty() && weights != changed) {
                let text = "updates parameters by what belongs to other elements".to_owned();
                world.findings.add_at(world.setup, "E2115", self.at(), text);
            }
        }
    }

    /// A layer's call writes all of each gradient that it is passed, and what it has made before
    /// was scattered.
    pub(super) fn check_terms(&mut self, world: &mut World<'_, 'a>) {
        let step = &world.setup.phase.steps(self.program)[self.step];
        let Step::Call { slots, .. } = step else { return };
        for slot in slots {
            let buffer = &self.program.buffers[slot.0 as usize];
            if matches!(buffer.contents, Contents::Term { .. }) {
                self.expect_sum(world, &self.buffer(*slot));
            }
            let range = buffer.offset..buffer.offset + buffer.bytes;
            let mut notes = self.memory.read(range).into_iter();
            let is_written = notes.all(|(_, note)| note.is_some_and(|n| n.step == Some(self.step)));
            let is_gradient = matches!(buffer.contents, Contents::Grad(_) | Contents::Term { .. });
            if is_gradient && !is_written {
                let text = format!("does not add its term to `{}`", buffer.name);
                world.findings.add_at(world.setup, "E2113", self.at(), text);
            }
        }
    }

    /// What is written to a place must be summed with others before it is overwritten.
    pub(super) fn expect_sum(&mut self, world: &mut World<'_, 'a>, place: &Place) {
        for (_, owner) in &place.parts {
            let Owner::Buffer(at) = *owner else { continue };
            if !self.unsummed.insert(at) {
                let name = &self.program.buffers[at as usize].name;
                let text = format!("overwrites `{name}`, which nobody has added");
                world.findings.add_at(world.setup, "E2113", self.at(), text);
            }
        }
    }

    /// Terms of a gradient are added to, not overwritten.
    pub(super) fn check_lost(&self, world: &mut World<'_, 'a>, place: &Place, runs: &[Range<u64>]) {
        for (_, owner, note) in runs.iter().flat_map(|run| self.notes(place, run.clone())) {
            let (Owner::Buffer(at), Some(note)) = (owner, note) else { continue };
            let buffer = &self.program.buffers[at as usize];
            let role =
                if let Contents::Shard { role, .. } = buffer.contents { Some(role) } else { None };
            let is_grad = matches!(buffer.contents, Contents::Grad(_));
            let is_grad = is_grad || role == Some(ShardRole::Grad);
            if is_grad && note.owner == owner && note.label != Labels::NONE {
                let text = format!("overwrites terms of `{}`", buffer.name);
                world.findings.add_at(world.setup, "E2113", self.at(), text);
            }
        }
    }

    /// Gradients and statistics that a launch reads are summed over all ranks that have terms.
    pub(super) fn check_sums(&self, world: &mut World<'_, 'a>, place: &Place, run: &Range<u64>) {
        for (range, owner, note) in self.notes(place, run.clone()) {
            let (Owner::Buffer(at), Some(note)) = (owner, note) else { continue };
            let wanted = self.wanted_sums(world.setup, at, range.start);
            if note.owner == owner && !note.summed.has(wanted) {
                let name = &self.program.buffers[at as usize].name;
                let text = format!("reads `{name}` before it is summed over {}", wanted.names());
                world.findings.add_at(world.setup, "E2116", self.at(), text);
            }
        }
    }

    /// The axes over which bytes of a buffer must be summed before they are read.
    pub(super) fn wanted_sums(&self, setup: &Setup<'_>, buffer: u32, byte: u64) -> Summed {
        let mesh = setup.plan.mesh;
        let buffer = &self.program.buffers[buffer as usize];
        let sums = |many: bool, axis: Summed| if many { axis } else { Summed::default() };
        if byte >= buffer.offset + buffer.bytes {
            // Between one buffer and the next are zeros.
            return Summed::default();
        }
        let first = |members: &[Member]| members.first().map_or(usize::MAX, |first| first.weight);
        let is_shared = |weight: usize| self.places.holders[weight].len() > 1;
        let (summed, over_stages) = match buffer.contents {
            Contents::Grad(weight) => (Reduced::Gradient(weight), is_shared(weight)),
            // Loss sum and count, then the squared norm, in which ranks with the same weights
            // agree.
            Contents::Stats if byte < buffer.offset + 2 * buffer.dtype.size() => {
                return sums(mesh.ranks() > 1, Summed::WORLD);
            }
            Contents::Stats => (Reduced::Norm, mesh.pp > 1),
            // Where calls have scattered their terms, stages sum pieces, else whole gradients.
            Contents::Shard { role: ShardRole::Grad, bucket } => {
                let members = self.program.members(bucket);
                let is_shared = members.iter().any(|member| is_shared(member.weight));
                let over_stages = is_shared && self.program.splits_gradients();
                (Reduced::Gradient(first(&members)), over_stages)
            }
            Contents::Shard { role: ShardRole::Term, bucket } => {
                (Reduced::Term(first(&self.program.members(bucket))), false)
            }
            Contents::Gathered { .. }
            | Contents::Term { .. }
            | Contents::Shard { .. }
            | Contents::Param(_)
            | Contents::Master(_)
            | Contents::State { .. }
            | Contents::Scale { .. }
            | Contents::Feed(_)
            | Contents::Cache(_)
            | Contents::Output
            | Contents::View
            | Contents::Part { .. }
            | Contents::Activation
            | Contents::Frame => return Summed::default(),
        };
        let over_tensor = mesh.tp > 1 && buffer.contents == Contents::Stats;
        self.wanted_over_data(setup, summed)
            .with(sums(over_tensor, Summed::TP))
            .with(sums(over_stages, Summed::STAGES))
    }

    /// Of the ranks along `dp` and `cp`, those over which gradients, their terms or the norm of
    /// them must be summed.
    fn wanted_over_data(&self, setup: &Setup<'_>, summed: Reduced) -> Summed {
        let program = self.program;
        let ranks = setup.plan.mesh.data_ranks();
        let sums = |many: bool, axis: Summed| if many { axis } else { Summed::default() };
        // Without an update nothing is shared.
        let is_updated = setup.plan.optimizer != Optimizer::None;
        let has_copies = !is_updated || setup.plan.zero.ranks(ranks) < ranks;
        let of_shards = sums(ranks > 1, if has_copies { Summed::SHARDS } else { Summed::DP });
        let of_experts = |weight: usize| program.weights.get(weight)?.experts;
        // Experts have copies on every ep-th of the ranks only: of all, or of those that share one
        // copy of all weights.
        let shards = setup.plan.zero.ranks(ranks);
        let is_hybrid = is_updated && shards > 1 && has_copies;
        let of_copy = |weight: usize| match of_experts(weight) {
            Some(experts) if is_hybrid => sums(experts.ranks < shards, Summed::SHARDS),
            Some(experts) => sums(experts.ranks < ranks, Summed::COPIES),
            None => of_shards,
        };
        let over_all = sums(ranks > 1, Summed::DP);
        match summed {
            Reduced::Gradient(weight) if of_experts(weight).is_none() => over_all,
            Reduced::Gradient(weight) => of_copy(weight).with(sums(is_hybrid, Summed::COPIES)),
            Reduced::Term(weight) => of_copy(weight),
            Reduced::Norm if is_split(program) => of_shards,
            Reduced::Norm => {
                let is_shared = |weight: &usize| of_experts(*weight).is_some();
                let mut all = 0..program.weights.len();
                let is_shared = all.any(|weight| is_shared(&weight) && program.trains(weight));
                sums(is_shared, Summed::SHARDS)
            }
        }
    }

    /// Parameters and states change once, at the end, by what all micro-batches say.
    pub(super) fn check_change(
        &self,
        world: &mut World<'_, 'a>,
        owner: Owner,
        range: &Range<u64>,
        label: Label,
    ) {
        let Owner::Buffer(at) = owner else { return };
        let buffer = &self.program.buffers[at as usize];
        let is_kept = buffer.contents.outlasts_step();
        let name = &buffer.name;
        let text = match world.setup.phase {
            Phase::Step if self.is_changed_copy(at, range) => format!("changes `{name}` again"),
            Phase::Evaluate | Phase::Entry(_)
                if is_kept
                    || matches!(
                        buffer.contents,
                        Contents::Grad(_) | Contents::Shard { role: ShardRole::Grad, .. }
                    ) =>
            {
                format!("what only runs forward changes `{name}`")
            }
            Phase::Step if is_kept => {
                let old = self.memory.read(range.clone());
                if old.iter().any(|(_, note)| note.is_some_and(|n| n.step.is_some())) {
                    format!("changes `{name}` again")
                } else if !world.labels.is_complete(label) {
                    format!("changes `{name}` by other than the sum over all micro-batches")
                } else {
                    return;
                }
            }
            Phase::Step | Phase::Evaluate | Phase::Entry(_) => return,
        };
        world.findings.add_at(world.setup, "E2115", self.at(), text);
    }
}

/// Whether a piece in a role is gathered, or scattered to.
fn is_exchanged(role: ShardRole, gathers: bool) -> bool {
    match role {
        ShardRole::Grad | ShardRole::Term => !gathers,
        ShardRole::Master | ShardRole::Param | ShardRole::Rounded => gathers,
        ShardRole::State(_) | ShardRole::Scale(_) => false,
    }
}
