//! One rank of a replay: its memory, and what each instruction does to it.

pub(super) mod batches;
mod moves;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ir::DType;
use ir::op::Combiner;
use ir::plan::Mesh;
use ir::program::{
    BufferId, Contents, Exchange, Feed, Group, Instruction, Program, Ref, ShardRole, Step,
};
use ir::sharding::Axis;

use super::{Message, World};
use crate::check::access::{Effects, Use};
use crate::check::labels::{Label, Labels};
use crate::check::memory::{Memory, Note, Owner, Summed};
use crate::check::places::Places;
use crate::check::{At, Phase, Setup};
use batches::{Unlabelled, turns};
use moves::Moving;

/// Bytes from the start of a value on, with the labels of what they hold.
pub(in crate::check) type Labelled = Vec<(Range<u64>, Label)>;

/// A call with the values of one micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::check) struct Made {
    pub(in crate::check) microbatch: usize,
    pub(in crate::check) step: usize,
}

/// A rank: one of those that run the program of a class.
pub(in crate::check) struct Rank<'a> {
    pub(in crate::check) class: usize,
    pub(in crate::check) program: &'a Program,
    pub(in crate::check) places: &'a Places,
    pub(in crate::check) memory: Memory,
    pub(in crate::check) step: usize,
    /// The instruction of the routine that is being called.
    instruction: Option<usize>,
    /// What is read by the call that is being made.
    call_label: Label,
    /// The bytes to which the current call has added something.
    added: Vec<Range<u64>>,
    /// Whether it has told the others of its collective.
    has_arrived: bool,
    /// The calls that belong to one micro-batch, in order.
    pub(in crate::check) made: Vec<Made>,
    /// Calls that read nothing of any micro-batch, in order: as many for each.
    pub(in crate::check) unlabelled: Vec<Unlabelled>,
    /// For each step, the micro-batch that a call of it belongs to if its routine is called
    /// equally often for each; none before data comes.
    turns: Vec<Option<usize>>,
    /// For each weight, the bytes of its gradient that were added to the norm.
    pub(in crate::check) normed: Vec<u64>,
    /// Gradients that calls have made and nobody has scattered yet, and pieces of these that nobody
    /// has added.
    pub(in crate::check) unsummed: BTreeSet<u32>,
    /// The copies that nobody has awaited.
    moving: Vec<Moving>,
    /// By buffer of the device: of which buffer elsewhere it is a copy, and which step made it so.
    copies: BTreeMap<u32, (BufferId, usize)>,
    /// By buffer of the device: the weights that were rounded to it in an update, with the elements
    /// of each.
    rounded: BTreeMap<u32, Vec<(Range<u64>, usize)>>,
    /// By buffer elsewhere: of which buffer of the device it is a copy.
    stored: BTreeMap<u32, u32>,
    /// By buffer of the device that is copied elsewhere: the one to which it comes back.
    fetched: BTreeMap<u32, u32>,
}

/// A value: its bytes, and as what they are written.
pub(in crate::check) struct Place {
    pub(in crate::check) range: Range<u64>,
    pub(in crate::check) parts: Vec<(Range<u64>, Owner)>,
}

/// What a read found.
#[derive(Clone, Copy)]
struct Seen {
    label: Label,
    /// Axes over which some of it was summed.
    summed: Summed,
    /// Whether it is, or was there as, a sum over micro-batches.
    is_total: bool,
}

impl<'a> Rank<'a> {
    /// A rank at the start of a phase: parameters, states and caches are there, and nothing else.
    pub(in crate::check) fn new(setup: &Setup<'a>, class: usize) -> Rank<'a> {
        let program = &setup.programs[class];
        let mut memory = Memory::default();
        for (at, buffer) in program.buffers.iter().enumerate() {
            let note = Note {
                owner: Owner::Buffer(at as u32),
                label: Labels::NONE,
                dtype: buffer.dtype,
                summed: Summed::default(),
                step: None,
            };
            let end = setup.places[class].ends[at];
            match buffer.contents.clone() {
                Contents::Param(_)
                | Contents::Master(_)
                | Contents::State { .. }
                | Contents::Scale { .. }
                | Contents::Cache(_) => {
                    memory.write(buffer.offset..end, note);
                }
                // An arena begins as zeros, and nothing writes between one buffer and the next.
                Contents::Grad(_) => memory.write(buffer.offset + buffer.bytes..end, note),
                contents @ Contents::Shard { .. } if contents.outlasts_step() => {
                    memory.write(buffer.offset..end, note);
                }
                Contents::Shard { .. }
                | Contents::Gathered { .. }
                | Contents::Term { .. }
                | Contents::Feed(_)
                | Contents::Stats
                | Contents::Output
                | Contents::View
                | Contents::Part { .. }
                | Contents::Activation
                | Contents::Frame => {}
            }
        }
        Rank {
            class,
            program,
            places: &setup.places[class],
            memory,
            step: 0,
            instruction: None,
            call_label: Labels::NONE,
            added: Vec::new(),
            has_arrived: false,
            made: Vec::new(),
            unlabelled: Vec::new(),
            turns: turns(program, setup.phase, setup.plan.microbatch_count),
            normed: vec![0; program.weights.len()],
            unsummed: BTreeSet::new(),
            moving: Vec::new(),
            copies: BTreeMap::new(),
            rounded: BTreeMap::new(),
            stored: BTreeMap::new(),
            fetched: BTreeMap::new(),
        }
    }

    pub(in crate::check) fn at(&self) -> At {
        At { class: self.class, step: self.step, instruction: self.instruction }
    }

    fn steps(&self, phase: Phase) -> &'a [Step] {
        phase.steps(self.program)
    }

    pub(in crate::check) fn is_done(&self, phase: Phase) -> bool {
        self.step == self.steps(phase).len()
    }

    /// Takes one step or instruction, if it need not wait for another rank.
    pub(in crate::check) fn advance(&mut self, world: &mut World<'_, 'a>) -> bool {
        let Some(step) = self.steps(world.setup.phase).get(self.step) else { return false };
        match step {
            Step::Feed { feed, microbatch, buffer } => {
                self.feed(world, *feed, *microbatch, *buffer);
                self.step += 1;
            }
            Step::Send { to, buffer } => {
                let (place, dtype) = (self.buffer(*buffer), self.dtype(*buffer));
                let length = place.range.end - place.range.start;
                let seen = self.read(world, &place, 0..length, dtype);
                let name = self.program.buffers[buffer.0 as usize].name.clone();
                world.send(self, *to, Message { length, dtype, label: seen.label, name });
                self.step += 1;
            }
            Step::Receive { from, buffer } => {
                let (place, dtype) = (self.buffer(*buffer), self.dtype(*buffer));
                let length = place.range.end - place.range.start;
                let Some(label) = world.receive(self, *from, length, dtype) else { return false };
                self.write(world, &place, 0..length, (dtype, label));
                self.step += 1;
            }
            Step::Move { from, to } => {
                self.begin_move(world, *from, *to);
                self.step += 1;
            }
            Step::Await { buffer } => {
                self.end_moves(*buffer);
                self.step += 1;
            }
            Step::Call { routine, frame, .. } => return self.call(world, *routine, *frame),
        }
        true
    }

    fn dtype(&self, buffer: BufferId) -> DType {
        self.program.buffers[buffer.0 as usize].dtype
    }

    fn feed(&mut self, world: &mut World<'_, 'a>, feed: Feed, microbatch: usize, buffer: BufferId) {
        let label = match feed {
            Feed::Tokens | Feed::Labels | Feed::Documents | Feed::Key { .. } => {
                world.labels.of(microbatch)
            }
            Feed::Scalars | Feed::Position | Feed::Last => Labels::NONE,
        };
        let count = world.setup.plan.microbatch_count;
        if microbatch >= count {
            let text = format!("feeds micro-batch {microbatch} of {count}");
            world.findings.add_at(world.setup, "E2114", self.at(), text);
        }
        let (place, dtype) = (self.buffer(buffer), self.dtype(buffer));
        let length = place.range.end - place.range.start;
        self.write(world, &place, 0..length, (dtype, label));
    }

    /// Whether a parameter is among the slots of the call that is being made.
    fn takes_parameters(&self, world: &World<'_, 'a>) -> bool {
        let step = world.setup.phase.steps(self.program).get(self.step);
        let Some(Step::Call { slots, .. }) = step else { return false };
        let is_parameter = |slot: &BufferId| {
            let buffer = self.program.buffers.get(slot.0 as usize);
            buffer.is_some_and(|buffer| {
                matches!(buffer.contents, Contents::Param(_) | Contents::Gathered { .. })
            })
        };
        slots.iter().any(is_parameter)
    }

    /// Whether a piece of a bucket is among the slots of the call that is being made, as of no call
    /// of a layer.
    fn takes_pieces(&self, world: &World<'_, 'a>) -> bool {
        let step = world.setup.phase.steps(self.program).get(self.step);
        let Some(Step::Call { slots, .. }) = step else { return false };
        let is_piece = |slot: &BufferId| {
            let buffer = self.program.buffers.get(slot.0 as usize);
            buffer.is_some_and(|buffer| matches!(buffer.contents, Contents::Shard { .. }))
        };
        slots.iter().any(is_piece)
    }

    /// Enters a call, runs one instruction of it, or leaves it.
    fn call(&mut self, world: &mut World<'_, 'a>, routine: usize, frame: Option<BufferId>) -> bool {
        let routine = &self.program.routines[routine];
        let Some(at) = self.instruction else {
            if let Some(frame) = frame {
                let range = self.buffer(frame).range;
                self.check_moving(world, &range, true);
                self.memory.clear(range);
            }
            self.call_label = Labels::NONE;
            self.added.clear();
            self.instruction = Some(0);
            return true;
        };
        match routine.instructions.get(at) {
            None => {
                let of_layer = !self.takes_pieces(world);
                let microbatch = world.labels.microbatch(self.call_label);
                if let Some(microbatch) = microbatch.filter(|_| of_layer) {
                    self.made.push(Made { microbatch, step: self.step });
                    self.check_terms(world);
                } else if self.call_label == Labels::NONE && of_layer {
                    let takes_parameters = self.takes_parameters(world);
                    let has_turn = self.turns[self.step].is_some();
                    if has_turn {
                        self.check_terms(world);
                    }
                    let call = Unlabelled { step: self.step, takes_parameters, has_turn };
                    self.unlabelled.push(call);
                }
                self.instruction = None;
                self.step += 1;
            }
            Some(Instruction::Launch { kernel, scalars, inputs, outputs, workspace }) => {
                self.take_workspace(world, *kernel, *workspace);
                let effects = world.setup.effects.launch(*kernel, scalars);
                self.launch(world, effects, inputs, outputs);
                self.instruction = Some(at + 1);
            }
            Some(collective @ Instruction::Collective { .. }) => {
                if self.has_arrived {
                    return false;
                }
                let offer = self.offer(world, collective);
                world.arrive(self, collective, offer);
                self.has_arrived = true;
            }
        }
        true
    }

    pub(in crate::check) fn buffer(&self, id: BufferId) -> Place {
        let buffer = &self.program.buffers[id.0 as usize];
        let parts = self.places.of_buffer(id).iter();
        Place {
            range: buffer.offset..buffer.offset + buffer.bytes,
            parts: parts.map(|(range, owner)| (range.clone(), Owner::Buffer(*owner))).collect(),
        }
    }

    /// Where a value of the current call lies.
    pub(in crate::check) fn place(&self, phase: Phase, value: Ref) -> Place {
        let Step::Call { routine, slots, frame } = &self.steps(phase)[self.step] else {
            unreachable!("values are those of calls");
        };
        match value {
            Ref::Slot(at) => self.buffer(slots[at as usize]),
            Ref::Local(at) => {
                let local = &self.program.routines[*routine].locals[at as usize];
                let frame = frame.expect("bounds: a routine with locals is called with a frame");
                let start = self.program.buffers[frame.0 as usize].offset + local.offset;
                let range = start..start + local.bytes;
                // What is written to a part is read in the whole.
                let owner = Owner::Local(self.step as u32, local.within.unwrap_or(at));
                Place { parts: vec![(range.clone(), owner)], range }
            }
        }
    }

    /// A workspace is as large as its kernel needs on the target, and what it held is lost.
    fn take_workspace(&mut self, world: &mut World<'_, 'a>, kernel: usize, local: Option<Ref>) {
        let place = local.map(|local| self.place(world.setup.phase, local));
        let bytes = place.as_ref().map_or(0, |place| place.range.end - place.range.start);
        let wanted = world.setup.effects.workspace(kernel);
        if bytes != wanted {
            let text = format!("passes {bytes} bytes to a kernel whose workspace has {wanted}");
            world.findings.add_at(world.setup, "E2123", self.at(), text);
        }
        if let Some(place) = place {
            self.check_moving(world, &place.range, true);
            self.memory.clear(place.range);
        }
    }

    fn launch(&mut self, world: &mut World<'_, 'a>, effects: &Effects, ins: &[Ref], outs: &[Ref]) {
        let phase = world.setup.phase;
        let inputs: Vec<Place> = ins.iter().map(|r| self.place(phase, *r)).collect();
        let outputs: Vec<Place> = outs.iter().map(|r| self.place(phase, *r)).collect();
        let mut label = Labels::NONE;
        let mut summed = Summed::ALL;
        for (place, used) in inputs.iter().zip(&effects.reads) {
            for run in &used.runs {
                summed = summed.and(self.sums_of(place, run));
                let mut seen = self.read(world, place, run.clone(), used.dtype).label;
                match self.own_term(world, place, run) {
                    Some(own) => seen = own,
                    None => self.check_sums(world, place, run),
                }
                label = world.labels.union(label, seen);
            }
        }
        self.note(world, label);
        inputs.iter().for_each(|place| self.take_piece(place, &outputs));
        self.check_pairs(world, &inputs, &outputs);
        self.note_rounded(&outputs);
        self.count_normed(world, &inputs, &outputs);
        for (place, used) in outputs.iter().zip(&effects.writes) {
            if !used.adds && inputs.iter().all(|input| input.range != place.range) {
                self.check_lost(world, place, &used.runs);
            }
            self.put(world, place, used, (label, summed));
        }
    }

    /// The axes over which all bytes of a run are summed.
    pub(in crate::check) fn sums_of(&self, place: &Place, run: &Range<u64>) -> Summed {
        let notes = self.notes(place, run.clone()).into_iter();
        let summed = notes.filter_map(|(_, _, note)| Some(note?.summed));
        summed.fold(Summed::ALL, Summed::and)
    }

    /// Notes that bytes are summed over axes.
    fn mark(&mut self, place: &Place, run: Range<u64>, summed: Summed) {
        for (range, _, note) in self.notes(place, run) {
            if let Some(note) = note {
                self.memory.write(range, Note { summed: note.summed.with(summed), ..note });
            }
        }
    }

    /// Notes that the current call reads a value.
    fn note(&mut self, world: &mut World<'_, 'a>, label: Label) {
        if let Some(fault) = world.labels.fault(label) {
            world.findings.add_at(world.setup, "E2113", self.at(), fault);
        }
        self.call_label = world.labels.union(self.call_label, label);
    }

    fn put(
        &mut self,
        world: &mut World<'_, 'a>,
        place: &Place,
        used: &Use,
        (label, summed): (Label, Summed),
    ) {
        for run in &used.runs {
            if run.is_empty() {
                continue;
            }
            let mut label = label;
            let is_total = self.is_total(place);
            // What depends on no data is a term all the same: of the micro-batch whose turn it is.
            let is_term = is_total && (used.adds || self.is_only_term(world, place));
            if label == Labels::NONE && (is_term || self.is_term(place)) {
                let turn = self.turns[self.step];
                label = turn.map_or(label, |microbatch| world.labels.of(microbatch));
            }
            let mut sums = Summed::default();
            if used.adds {
                // The sum of two pieces that are summed over ranks is so, too.
                if self.is_piece(place) {
                    sums = summed.and(self.sums_of(place, run));
                } else if self.is_of_stats(place) {
                    // What is added, ranks that share experts have alike.
                    sums = self.sums_of(place, run).and(Summed::SHARDS);
                }
                let start = place.range.start;
                self.added.push(start + run.start..start + run.end);
                let old = self.read(world, place, run.clone(), used.dtype);
                label = world.labels.union(label, old.label);
                if old.is_total || is_total {
                    label = world.labels.summed(label);
                }
            }
            // The first term of one is the whole sum.
            if world.setup.plan.microbatch_count == 1 && is_total {
                label = world.labels.summed(label);
            }
            self.write(world, place, run.clone(), (used.dtype, label));
            self.mark(place, run.clone(), sums);
        }
    }

    /// The buffer that a place is all of.
    fn whole(&self, place: &Place) -> Option<&'a Contents> {
        let [(ref range, Owner::Buffer(at))] = place.parts[..] else { return None };
        let buffer = &self.program.buffers[at as usize];
        (*range == (buffer.offset..buffer.offset + buffer.bytes)).then_some(&buffer.contents)
    }

    /// Whether a place is what one call makes of the gradient of one weight.
    fn is_term(&self, place: &Place) -> bool {
        matches!(self.whole(place), Some(Contents::Term { .. }))
    }

    /// Whether a place is one of the statistics of a step.
    fn is_of_stats(&self, place: &Place) -> bool {
        let of = |owner: &Owner| match owner {
            Owner::Buffer(at) => self.program.buffers[*at as usize].contents == Contents::Stats,
            Owner::Local(..) => false,
        };
        place.parts.iter().all(|(_, owner)| of(owner))
    }

    /// Whether a place is this rank's piece of a sum of gradients.
    fn is_piece(&self, place: &Place) -> bool {
        matches!(self.whole(place), Some(Contents::Shard { role: ShardRole::Grad, .. }))
    }

    /// The label of a term of a gradient that the current call has written and reads again, as it
    /// may before anything is added: other gradients are linear in it.
    fn own_term(
        &self,
        world: &mut World<'_, 'a>,
        place: &Place,
        run: &Range<u64>,
    ) -> Option<Label> {
        if !self.is_only_term(world, place) {
            return None;
        }
        let start = place.range.start;
        let (first, end) = (start + run.start, start + run.end);
        let is_added = self.added.iter().any(|added| added.start < end && first < added.end);
        let is_own = |note: Option<Note>| note.is_some_and(|n| n.step == Some(self.step));
        let mut notes = self.notes(place, run.clone()).into_iter();
        if is_added || !notes.all(|(_, _, note)| is_own(note)) {
            return None;
        }
        self.turns[self.step].map(|microbatch| world.labels.of(microbatch))
    }

    /// Whether a place is a gradient, of one micro-batch in all: that is not added to.
    fn is_only_term(&self, world: &World<'_, 'a>, place: &Place) -> bool {
        let one = world.setup.plan.microbatch_count == 1;
        one && place.parts.iter().all(|(_, owner)| self.is_gradient(owner))
    }

    fn is_gradient(&self, owner: &Owner) -> bool {
        match owner {
            Owner::Buffer(at) => {
                matches!(self.program.buffers[*at as usize].contents, Contents::Grad(_))
            }
            Owner::Local(..) => false,
        }
    }

    /// Whether ranks sum what a buffer holds as gradients: whole ones, or pieces of them.
    fn has_gradients(&self, owner: &Owner) -> bool {
        match owner {
            Owner::Buffer(at) => {
                let contents = &self.program.buffers[*at as usize].contents;
                matches!(
                    contents,
                    Contents::Grad(_)
                        | Contents::Term { .. }
                        | Contents::Shard { role: ShardRole::Grad | ShardRole::Term, .. }
                )
            }
            Owner::Local(..) => false,
        }
    }

    /// Whether a place is one for sums over micro-batches.
    fn is_total(&self, place: &Place) -> bool {
        place.parts.iter().any(|(_, owner)| match owner {
            Owner::Buffer(at) => {
                let contents = &self.program.buffers[*at as usize].contents;
                matches!(
                    contents,
                    Contents::Grad(_)
                        | Contents::Stats
                        | Contents::Shard { role: ShardRole::Grad, .. }
                )
            }
            Owner::Local(..) => false,
        })
    }

    /// Reads what this rank puts into a collective.
    fn offer(&mut self, world: &mut World<'_, 'a>, collective: &Instruction) -> Labelled {
        let Instruction::Collective {
            exchange,
            group,
            dtype,
            exchanged,
            elements,
            input,
            gates,
            ..
        } = collective
        else {
            unreachable!("only collectives are offered");
        };
        let phase = world.setup.phase;
        let from = self.place(phase, *input);
        let sent = *elements as u64 * dtype.size();
        let seen = self.read(world, &from, 0..sent, *dtype);
        self.note(world, seen.label);
        if let (Exchange::Dispatch(routed) | Exchange::Combine(routed), Some(gates)) =
            (exchange, gates)
        {
            let [_, _, elements] = routed.elements().expect("bounds: buffers hold gates");
            let from = self.place(phase, *gates);
            let seen = self.read(world, &from, 0..elements as u64 * dtype.size(), *dtype);
            self.note(world, seen.label);
        }
        let one_member = world.size_of(group) == 1;
        let axis = summed_over(group, world.setup.plan.mesh);
        let sums = matches!(
            exchange,
            Exchange::AllReduce(Combiner::Sum)
                | Exchange::ReduceScatter { .. }
                | Exchange::Combine(_)
        );
        if sums && !one_member {
            if seen.summed.has(axis) {
                let text = format!("sums over {} what is summed over it", axis.names());
                world.findings.add_at(world.setup, "E2116", self.at(), text);
            }
            self.check_holders(world, &from, group);
            self.check_sharers(world, &from, group);
        }
        self.check_pieces(world, collective, &from);
        self.take_terms(&from);
        let is_gradient = from.parts.iter().any(|(_, owner)| self.has_gradients(owner));
        let wanted = if is_gradient { world.setup.plan.precision.reduce } else { *dtype };
        if *exchanged != wanted {
            let text = format!("exchanges {dtype} as {exchanged}, where the plan says {wanted}");
            world.findings.add_at(world.setup, "E2116", self.at(), text);
        }
        let notes = self.notes(&from, 0..sent).into_iter();
        let start = from.range.start;
        let labelled = |(range, _, note): (Range<u64>, Owner, Option<Note>)| {
            let label = note.map_or(Labels::NONE, |note| note.label);
            (range.start - start..range.end - start, label)
        };
        notes.map(labelled).collect()
    }

    /// A piece of a call's gradients is added, or all of them to the piece of a rank that has all.
    fn take_piece(&mut self, place: &Place, outputs: &[Place]) {
        let is_piece =
            matches!(self.whole(place), Some(Contents::Shard { role: ShardRole::Term, .. }));
        let is_sum = |output: &Place| match self.whole(output) {
            Some(Contents::Shard { role: ShardRole::Grad, bucket }) => {
                let length = |place: &Place| place.range.end - place.range.start;
                let weights = self.weights(place);
                length(place) == length(output)
                    && !weights.is_empty()
                    && self.weights(&self.buffer(*bucket)) == weights
            }
            _ => false,
        };
        if is_piece || outputs.iter().any(is_sum) {
            self.take_terms(place);
        }
    }

    /// What a place holds is summed with others.
    fn take_terms(&mut self, place: &Place) {
        for (_, owner) in &place.parts {
            if let Owner::Buffer(at) = owner {
                self.unsummed.remove(at);
            }
        }
    }

    /// A gradient is summed over exactly the stages that hold its weight.
    fn check_holders(&self, world: &mut World<'_, 'a>, place: &Place, group: &Group) {
        let Group::Stages(stages) = group else { return };
        for (_, owner) in &place.parts {
            let Owner::Buffer(at) = owner else { continue };
            let buffer = &self.program.buffers[*at as usize];
            let weight = if let Contents::Grad(weight) = buffer.contents {
                Some(weight)
            } else if let Contents::Shard { role: ShardRole::Grad, bucket } = buffer.contents {
                // All weights of a piece have the same holders.
                self.program.members(bucket).first().map(|member| member.weight)
            } else {
                None
            };
            let Some(weight) = weight else { continue };
            let holders = &self.places.holders[weight];
            if stages.len() != holders.len() || !stages.iter().all(|s| holders.contains(s)) {
                let text = format!("sums `{}` over other stages than hold its weight", buffer.name);
                world.findings.add_at(world.setup, "E2116", self.at(), text);
            }
        }
    }

    /// The bytes that a gather or a scatter gives to this rank.
    fn received_bytes(&self, collective: &Instruction) -> u64 {
        let Instruction::Collective { exchange, group, dtype, elements, .. } = collective else {
            return 0;
        };
        let own = match group {
            Group::Axis(Axis::Tp) => self.program.tensor,
            Group::Axis(Axis::Cp) => self.program.context,
            Group::Axis(Axis::Pp) => self.program.stage,
            Group::Stages(stages) => {
                stages.iter().position(|s| *s == self.program.stage).unwrap_or(0)
            }
            Group::Axis(Axis::Dp | Axis::Ep)
            | Group::Data
            | Group::Shards(_)
            | Group::Copies(_)
            | Group::Strided { .. }
            | Group::Experts(_)
            | Group::World => 0,
        };
        let elements = match exchange {
            Exchange::AllReduce(_) => 0,
            Exchange::AllGather { outer, inner, counts, .. } => {
                outer * inner * counts.iter().sum::<usize>()
            }
            Exchange::ReduceScatter { outer, inner, counts, .. } => {
                outer * inner * counts.get(own).copied().unwrap_or(0)
            }
            Exchange::AllToAll { .. } => *elements,
            Exchange::Dispatch(routed) => routed.pieces * routed.rows * routed.width,
            Exchange::Combine(routed) => routed.rows * routed.width,
        };
        elements as u64 * dtype.size()
    }

    /// Writes what a collective gives to this rank, now that all members have arrived.
    /// An all-reduce goes element by element; of the others, everything depends on everything.
    pub(in crate::check) fn conclude(
        &mut self,
        world: &mut World<'_, 'a>,
        all: Label,
        parts: &Labelled,
    ) {
        let Step::Call { routine, .. } = &self.steps(world.setup.phase)[self.step] else {
            unreachable!("collectives are in calls");
        };
        let at = self.instruction.expect("a rank that arrived is at an instruction");
        let collective = &self.program.routines[*routine].instructions[at];
        let Instruction::Collective { exchange, group, dtype, output, .. } = collective else {
            unreachable!("a rank arrives at collectives");
        };
        let place = self.place(world.setup.phase, *output);
        let step = Some(self.step);
        if let Exchange::AllReduce(combiner) = exchange {
            let is_sum = *combiner == Combiner::Sum && world.size_of(group) > 1;
            let over = summed_over(group, world.setup.plan.mesh);
            let axis = if is_sum { over } else { Summed::default() };
            let start = place.range.start;
            self.check_moving(world, &place.range, true);
            let parts = parts.iter().flat_map(|(part, label)| {
                let found = self.memory.read(start + part.start..start + part.end).into_iter();
                found.map(|(range, note)| (range, note, *label))
            });
            for (range, note, label) in parts.collect::<Vec<_>>() {
                if let Some(note) = note {
                    let note = Note { label, summed: note.summed.with(axis), step, ..note };
                    self.memory.write(range, note);
                }
            }
        } else {
            let received = self.received_bytes(collective);
            let mut label = all;
            if self.is_piece(&place) {
                self.check_lost(world, &place, &[0..received]);
                // The first term of one is the whole sum.
                if world.setup.plan.microbatch_count == 1 {
                    label = world.labels.summed(label);
                }
            }
            if matches!(self.whole(&place), Some(Contents::Shard { role: ShardRole::Term, .. })) {
                self.expect_sum(world, &place);
            }
            self.write(world, &place, 0..received, (*dtype, label));
            if matches!(exchange, Exchange::ReduceScatter { .. } | Exchange::Combine(_)) {
                self.mark(&place, 0..received, summed_over(group, world.setup.plan.mesh));
            }
        }
        self.has_arrived = false;
        self.instruction = Some(at + 1);
    }

    /// Reads bytes of a place: they must hold what was last written to it.
    fn read(
        &self,
        world: &mut World<'_, 'a>,
        place: &Place,
        run: Range<u64>,
        dtype: DType,
    ) -> Seen {
        let (start, end) = (place.range.start + run.start, place.range.start + run.end);
        self.check_moving(world, &(start..end), false);
        let mut seen = Seen { label: Labels::NONE, summed: Summed::default(), is_total: false };
        for (range, owner, note) in self.notes(place, run) {
            let name = self.name_of(world.setup.phase, owner);
            let bytes = range.end - range.start;
            let (code, text) = match note {
                None => ("E2111", format!("reads {bytes} bytes of `{name}` that nothing wrote")),
                Some(note) if note.owner != owner => {
                    let other = self.name_of(world.setup.phase, note.owner);
                    let when = note.step.map_or("the start".to_owned(), |s| format!("step {s}"));
                    ("E2112", format!("reads `{name}`, whose bytes hold `{other}` since {when}"))
                }
                Some(note) if note.dtype != dtype => {
                    ("E2117", format!("reads `{name}`, written as {}, as {dtype}", note.dtype))
                }
                Some(note) => {
                    seen.label = world.labels.union(seen.label, note.label);
                    seen.summed = seen.summed.with(note.summed);
                    seen.is_total |= world.labels.is_sum(note.label);
                    continue;
                }
            };
            world.findings.add_at(world.setup, code, self.at(), text);
        }
        seen
    }

    /// The bytes of a place from `run` on, with what they should and do hold.
    pub(in crate::check) fn notes(
        &self,
        place: &Place,
        run: Range<u64>,
    ) -> Vec<(Range<u64>, Owner, Option<Note>)> {
        let (start, end) = (place.range.start + run.start, place.range.start + run.end);
        let mut notes = Vec::new();
        for (part, owner) in &place.parts {
            let range = part.start.max(start)..part.end.min(end);
            if !range.is_empty() {
                let found = self.memory.read(range).into_iter();
                notes.extend(found.map(|(range, note)| (range, *owner, note)));
            }
        }
        notes
    }

    fn write(
        &mut self,
        world: &mut World<'_, 'a>,
        place: &Place,
        run: Range<u64>,
        (dtype, label): (DType, Label),
    ) {
        let (start, end) = (place.range.start + run.start, place.range.start + run.end);
        self.check_moving(world, &(start..end), true);
        for (part, owner) in &place.parts {
            let range = part.start.max(start)..part.end.min(end);
            if range.is_empty() {
                continue;
            }
            self.check_change(world, *owner, &range, label);
            let note = Note {
                owner: *owner,
                label,
                dtype,
                summed: Summed::default(),
                step: Some(self.step),
            };
            self.memory.write(range, note);
        }
    }

    /// The name of what bytes were written as.
    pub(in crate::check) fn name_of(&self, phase: Phase, owner: Owner) -> &'a str {
        match owner {
            Owner::Buffer(at) => &self.program.buffers[at as usize].name,
            Owner::Local(step, at) => match &self.steps(phase)[step as usize] {
                Step::Call { routine, .. } => {
                    &self.program.routines[*routine].locals[at as usize].name
                }
                Step::Feed { .. }
                | Step::Send { .. }
                | Step::Receive { .. }
                | Step::Move { .. }
                | Step::Await { .. } => "a local",
            },
        }
    }
}

/// The axis of a group.
fn summed_over(group: &Group, mesh: Mesh) -> Summed {
    match group {
        Group::Data => Summed::DP,
        Group::Axis(Axis::Dp) if mesh.cp == 1 => Summed::DP,
        Group::Shards(_) | Group::Strided { .. } => Summed::SHARDS,
        Group::Copies(_) => Summed::COPIES,
        Group::Axis(Axis::Tp) => Summed::TP,
        Group::Axis(Axis::Pp) | Group::Stages(_) => Summed::STAGES,
        Group::Axis(Axis::Cp) => Summed::CP,
        Group::Experts(_) => Summed::EXPERTS,
        Group::Axis(Axis::Dp | Axis::Ep) => Summed::default(),
        Group::World => Summed::WORLD,
    }
}
