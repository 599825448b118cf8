//! Buffers of a class: values, their cotangents, what is kept, feeds and frames.

use ir::program::{Contents, Feed};
use ir::{DType, ValueId};

use super::Class;
use super::update::SCALARS;
use crate::calls::Operand;
use crate::store::BufferId;

impl Class<'_> {
    pub(super) fn allocate(&mut self) {
        self.allocate_stats();
        for call in 0..self.own.len() {
            for (position, operand) in self.own[call].operands.iter().enumerate() {
                match operand {
                    Operand::Value(value) if !self.is_own(*value) => {
                        self.allocate_slot(*value, 0, call, position);
                    }
                    Operand::Tokens => self.allocate_feed(Feed::Tokens),
                    Operand::Labels => self.allocate_feed(Feed::Labels),
                    Operand::Documents => self.allocate_feed(Feed::Documents),
                    Operand::Key(path) => self.allocate_feed(Feed::Key { path: *path }),
                    Operand::Position => self.allocate_feed(Feed::Position),
                    Operand::Last => self.allocate_feed(Feed::Last),
                    Operand::Value(_) | Operand::Weight(_) | Operand::Cache(_) => {}
                }
            }
            self.allocate_results(call);
            self.allocate_frames(call);
        }
        for (value, ty) in self.relayed.clone() {
            let sizes = ty.sizes().expect("local sizes are bound");
            self.allocate_value(value, 0, "relayed", (ty.dtype, sizes));
        }
    }

    /// Statistics, and what the backward pass of the loss begins with.
    pub(super) fn allocate_stats(&mut self) {
        self.store.stats();
        if self.has_loss() {
            self.store.cotangents_of_results();
        }
    }

    fn is_own(&self, value: ValueId) -> bool {
        self.own.iter().any(|call| call.results.contains(&value))
    }

    fn allocate_feed(&mut self, feed: Feed) {
        self.feed_buffer(feed);
    }

    pub(super) fn feed_buffer(&mut self, feed: Feed) -> BufferId {
        if let Some(there) = self.feeds.get(&feed) {
            return *there;
        }
        let plan = self.plan;
        let of_samples =
            |name: &str| (name.to_owned(), DType::I32, vec![plan.microbatch_size, plan.seq]);
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

    /// Room for a value from `first` on, for its cotangent, and for each micro-batch in flight.
    fn allocate_value(
        &mut self,
        value: ValueId,
        first: usize,
        name: &str,
        (dtype, sizes): (DType, Vec<usize>),
    ) {
        if self.values.contains_key(&(value, 0)) {
            return;
        }
        let (here, elsewhere) = (self.consumers(value), self.crossing[1].contains(&value));
        let mut last = first;
        for consumer in &here {
            last = last.max(self.clock.forward(*consumer));
            if self.backward_reads(*consumer, value) {
                last = last.max(self.clock.backward(*consumer));
            }
        }
        if elsewhere {
            last = last.max(self.clock.calls + 1);
        }
        let producer = (0..self.own.len()).find(|at| self.own[*at].results.contains(&value));
        if let Some(producer) = producer.filter(|at| self.backward_reads(*at, value)) {
            last = last.max(self.clock.backward(producer));
        }
        // From its arrival, or from the first backward call that adds to it, to the producer's.
        let from = here.iter().filter(|_| !elsewhere).map(|c| self.clock.backward(*c)).min();
        let to = producer.map_or(self.clock.end(), |p| self.clock.backward(p));
        for copy in 0..self.in_flight {
            let span = if self.in_flight == 1 { (first, last) } else { (0, self.clock.end()) };
            let buffer =
                self.store.transient(name, Contents::Activation, dtype, sizes.clone(), span);
            self.values.insert((value, copy), buffer);
        }
        let span = (from.unwrap_or(self.clock.calls + 1), to);
        let name = format!("d.{name}");
        let buffer = self.store.transient(&name, Contents::Activation, dtype, sizes, span);
        self.cotangents.insert(value, buffer);
    }

    /// Room for what passes through a slot of a call.
    fn allocate_slot(&mut self, value: ValueId, first: usize, call: usize, slot: usize) {
        let name = format!("{}.{slot}", self.own[call].function);
        let ty = self.slot_type(call, slot);
        self.allocate_value(value, first, &name, ty);
    }

    /// The type of a slot of the forward function: a parameter, or a result after them.
    fn slot_type(&self, call: usize, slot: usize) -> (DType, Vec<usize>) {
        let layer = self.layer(call);
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

    fn allocate_results(&mut self, call: usize) {
        let own = &self.own[call];
        let (param_count, primal) =
            (self.layer(call).param_count, self.layer(call).halves.primal_results);
        for (at, result) in own.results.iter().enumerate() {
            if !self.is_entry_result(*result) {
                self.allocate_slot(*result, self.clock.forward(call), call, param_count + at);
            }
        }
        let results = self.layer(call).halves.forward.results.len();
        for result in primal..results {
            let (dtype, mut sizes) = self.slot_type(call, param_count + result);
            let layer = self.layer(call);
            let forward = &layer.halves.forward;
            // Rows may be padded.
            let bytes = layer.forward.slots[forward.param_count + result].1;
            if let Some((row, outer)) = sizes.split_last_mut() {
                let rows = outer.iter().product::<usize>().max(1);
                *row = (bytes / dtype.size()) as usize / rows;
            }
            let name = format!("{}.{}", own.function, forward.value(forward.results[result]).name);
            for copy in 0..self.in_flight {
                let span = match self.in_flight {
                    1 => (self.clock.forward(call), self.clock.backward(call)),
                    _ => (0, self.clock.end()),
                };
                let buffer =
                    self.store.transient(&name, Contents::Activation, dtype, sizes.clone(), span);
                self.kept.insert((call, result, copy), buffer);
            }
        }
    }

    fn allocate_frames(&mut self, call: usize) {
        let layer = self.layer(call);
        let evaluated = self.evaluation.as_ref().and_then(|e| e.layer(call));
        let evaluated = evaluated.map_or(0, |layer| layer.frame_bytes);
        let frames = [
            (self.clock.forward(call), layer.forward.frame_bytes.max(evaluated)),
            (self.clock.backward(call), layer.backward.frame_bytes),
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
