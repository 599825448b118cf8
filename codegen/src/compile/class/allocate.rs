//! Buffers of a class: values, their cotangents, what is kept, feeds and frames.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ir::program::{Contents, Feed};
use ir::{DType, ValueId};

use super::Class;
use super::chunk::{Chunk, Item, Room, Until};
use super::update::SCALARS;
use crate::calls::Operand;
use crate::routines::Layer;
use crate::schedule::{Pipeline, Turn};
use crate::store::BufferId;

impl Class<'_> {
    /// Room for the chunks, whose micro-batches come in the order of a pipeline.
    pub(super) fn allocate(&mut self, pipeline: Pipeline) {
        self.allocate_stats();
        for chunk in 0..self.chunks.len() {
            self.allocate_chunk(chunk);
            self.offload_activations(chunk);
        }
        self.allocate_exchanges();
        let is_alone = self.is_alone();
        for chunk in &mut self.chunks {
            let is_shared = |room: &mut Room| is_alone || room.until == Until::SamePass;
            for room in chunk.rooms.extract_if(.., is_shared) {
                let buffer = room.allocate(&mut self.store, room.span);
                chunk.shared.insert((room.item, room.copy), buffer);
            }
        }
        self.allocate_rooms(pipeline);
    }

    /// Gives each micro-batch in flight buffers of its own: those that a backward pass leaves are
    /// taken by the next forward pass of a chunk with the same calls.
    fn allocate_rooms(&mut self, pipeline: Pipeline) {
        let span = (0, self.clock.end());
        let all: Vec<Vec<Room>> =
            self.chunks.iter_mut().map(|chunk| std::mem::take(&mut chunk.rooms)).collect();
        let mut free: BTreeMap<_, BTreeSet<BufferId>> = BTreeMap::new();
        for turn in pipeline.turns(self.stage) {
            let (Turn::Forward { chunk, microbatch }
            | Turn::Backward { chunk, microbatch }
            | Turn::Weights { chunk, microbatch }) = turn;
            let buffers = &mut self.chunks[chunk].buffers;
            for room in all[chunk].iter().filter(|room| room.begins(turn)) {
                let left = free.get_mut(&room.kind()).and_then(BTreeSet::pop_first);
                let buffer = left.unwrap_or_else(|| room.allocate(&mut self.store, span));
                buffers.insert((room.item, room.copy, microbatch), buffer);
            }
            for room in all[chunk].iter().filter(|room| room.ends(turn)) {
                let buffer = buffers[&(room.item, room.copy, microbatch)];
                free.entry(room.kind()).or_default().insert(buffer);
            }
        }
    }

    /// Whether there is never more than one micro-batch in flight, and nothing is put off.
    pub(super) fn is_alone(&self) -> bool {
        let splits = Pipeline::of(self.plan).splits();
        self.chunks.len() == 1 && self.chunks[0].in_flight == 1 && !splits
    }

    fn allocate_chunk(&mut self, chunk: usize) {
        let Chunk { own, before, .. } = self.chunks[chunk];
        for (call, passes) in own.iter().enumerate() {
            for (position, operand) in passes.operands.iter().enumerate() {
                match operand {
                    Operand::Value(value) if !self.chunks[chunk].makes(*value) => {
                        self.allocate_slot(*value, 0, [chunk, call], position);
                    }
                    Operand::Tokens => self.allocate_feed(chunk, Feed::Tokens),
                    Operand::Labels => self.allocate_feed(chunk, Feed::Labels),
                    Operand::Documents => self.allocate_feed(chunk, Feed::Documents),
                    Operand::Key(path) => self.allocate_feed(chunk, Feed::Key { path: *path }),
                    Operand::Position => self.allocate_feed(chunk, Feed::Position),
                    Operand::Last => self.allocate_feed(chunk, Feed::Last),
                    Operand::Value(_) | Operand::Weight(_) | Operand::Cache(_) => {}
                }
            }
            self.allocate_results(chunk, call);
            self.allocate_frames(chunk, before + call, call);
        }
        for (value, ty) in self.chunks[chunk].relayed.clone() {
            let sizes = ty.sizes().expect("local sizes are bound");
            self.allocate_value(value, 0, (chunk, "relayed"), (ty.dtype, sizes));
        }
    }

    /// Statistics, and what the backward pass of the loss begins with.
    pub(super) fn allocate_stats(&mut self) {
        self.store.stats();
        if self.has_loss() {
            self.store.cotangents_of_results();
        }
    }

    fn allocate_feed(&mut self, chunk: usize, feed: Feed) {
        self.feed_buffer(feed);
        self.chunks[chunk].feeds.insert(feed);
    }

    pub(super) fn feed_buffer(&mut self, feed: Feed) -> BufferId {
        if let Some(there) = self.feeds.get(&feed) {
            return *there;
        }
        let plan = self.plan;
        let of_samples = |name: &str| {
            (name.to_owned(), DType::I32, vec![plan.microbatch_size, plan.seq / plan.mesh.cp])
        };
        let (name, dtype, sizes) = match feed {
            Feed::Tokens => of_samples("tokens"),
            Feed::Labels => of_samples("labels"),
            Feed::Documents => of_samples("documents"),
            Feed::Key { path } => (format!("key.{path}"), DType::U32, vec![4]),
            Feed::Scalars => ("scalars".to_owned(), self.sums(), vec![SCALARS]),
            Feed::Position => ("position".to_owned(), DType::I32, Vec::new()),
            Feed::Last => ("last".to_owned(), DType::I32, Vec::new()),
        };
        let buffer = self.store.persistent(&name, Contents::Feed(feed), dtype, sizes);
        self.feeds.insert(feed, buffer);
        buffer
    }

    /// Room for a value from `first` on, and for its cotangent.
    fn allocate_value(
        &mut self,
        value: ValueId,
        first: usize,
        (at, name): (usize, &str),
        (dtype, sizes): (DType, Vec<usize>),
    ) {
        let (chunk, clock) = (&self.chunks[at], self.clock);
        if chunk.rooms.iter().any(|room| room.item == Item::Value(value)) {
            return;
        }
        let forward = |call: usize| clock.forward(chunk.before + call);
        let backward = |call: usize| clock.backward(chunk.before + call);
        let (here, elsewhere) = (chunk.consumers(value), chunk.crossing[1].contains(&value));
        let mut last = first;
        for consumer in &here {
            last = last.max(forward(*consumer));
            if chunk.backward_reads(*consumer, value) {
                last = last.max(backward(*consumer));
            }
        }
        if elsewhere {
            last = last.max(clock.calls + 1);
        }
        let producer = (0..chunk.own.len()).find(|at| chunk.own[*at].results.contains(&value));
        if let Some(producer) = producer.filter(|at| chunk.backward_reads(*at, value)) {
            last = last.max(backward(producer));
        }
        // From its arrival, or from the first backward call that adds to it, to the producer's.
        let from = here.iter().filter(|_| !elsewhere).map(|c| backward(*c)).min();
        let [start, end] = [0, chunk.own.len()].map(|call| clock.passed(chunk.before + call));
        let of_cotangent = (from.unwrap_or(end), producer.map_or(start, backward));
        let is_read = (0..chunk.own.len()).any(|call| chunk.backward_reads(call, value));
        let until = if is_read { Until::Backward } else { Until::SamePass };
        let room = |item, name: String, span, until| {
            let until = if chunk.is_late(item) { Until::Weights } else { until };
            Room::of(item, name, (dtype, sizes.clone()), span, until)
        };
        let of_gradient = format!("d.{name}");
        let rooms = [
            room(Item::Value(value), name.to_owned(), (first, last), until),
            room(Item::Cotangent(value), of_gradient, of_cotangent, Until::SamePass),
        ];
        self.chunks[at].rooms.extend(rooms);
    }

    /// Room for what passes through a slot of a call.
    fn allocate_slot(
        &mut self,
        value: ValueId,
        first: usize,
        [chunk, call]: [usize; 2],
        slot: usize,
    ) {
        let name = format!("{}.{slot}", self.chunks[chunk].own[call].function);
        let ty = slot_type(self.chunks[chunk].layer(call), slot);
        self.allocate_value(value, first, (chunk, &name), ty);
    }

    fn allocate_results(&mut self, at: usize, call: usize) {
        let Chunk { own, before, .. } = self.chunks[at];
        let layer = Arc::clone(&self.chunks[at].layers[call]);
        let (param_count, primal) = (layer.param_count, layer.halves.primal_results);
        let span = (self.clock.forward(before + call), self.clock.backward(before + call));
        for (result, value) in own[call].results.iter().enumerate() {
            if !self.is_entry_result(*value) {
                self.allocate_slot(*value, span.0, [at, call], param_count + result);
            }
        }
        let forward = &layer.halves.forward;
        for result in primal..forward.results.len() {
            let (dtype, mut sizes) = slot_type(&layer, param_count + result);
            // Rows may be padded.
            let bytes = layer.forward.slots[forward.param_count + result].1;
            if let Some((row, outer)) = sizes.split_last_mut() {
                let rows = outer.iter().product::<usize>().max(1);
                *row = (bytes / dtype.size()) as usize / rows;
            }
            let name = &forward.value(forward.results[result]).name;
            let name = format!("{}.{name}", own[call].function);
            let item = Item::Kept(call, result);
            let until =
                if self.chunks[at].is_late(item) { Until::Weights } else { Until::Backward };
            self.chunks[at].rooms.push(Room::of(item, name, (dtype, sizes), span, until));
        }
        let backward = &layer.halves.backward;
        let results = backward.results.iter().enumerate();
        for (result, value) in results.skip(backward.results.len() - layer.passed()) {
            let ty = backward.ty(*value);
            let name = format!("{}.{}", own[call].function, backward.value(*value).name);
            let ty = (ty.dtype, ty.sizes().expect("local sizes are bound"));
            let item = Item::Passed(call, result);
            self.chunks[at].rooms.push(Room::of(item, name, ty, span, Until::Weights));
        }
    }

    /// Room for the frames of a call, by its number on the stage and in its chunk.
    fn allocate_frames(&mut self, chunk: usize, at: usize, call: usize) {
        let chunk = &self.chunks[chunk];
        let layer = chunk.layer(call);
        let evaluated = chunk.evaluation.as_ref().and_then(|e| e.layer(call));
        let evaluated = evaluated.map_or(0, |layer| layer.frame_bytes);
        let late = layer.weights.as_ref().map_or(0, |weights| weights.frame_bytes);
        let frames = [
            (self.clock.forward(at), layer.forward.frame_bytes.max(evaluated)),
            (self.clock.backward(at), layer.backward.frame_bytes.max(late)),
        ];
        let name = format!("{}.frame", layer.name);
        for (position, bytes) in frames {
            if bytes > 0 {
                let buffer = self.store.frame(&name, bytes, position);
                self.frames.insert(position, buffer);
            }
        }
    }
}

/// The type of a slot of the forward function of a layer: a parameter, or a result after them.
fn slot_type(layer: &Layer, slot: usize) -> (DType, Vec<usize>) {
    let forward = &layer.halves.forward;
    let value = match slot.checked_sub(layer.param_count) {
        Some(result) => forward.results[result],
        None => {
            let at = layer.halves.forward_params.iter().position(|p| *p == slot);
            ValueId(at.unwrap_or(0) as u32)
        }
    };
    let ty = forward.ty(value);
    (ty.dtype, ty.sizes().expect("local sizes are bound"))
}
