//! Steps of a class: what it does with one micro-batch, forward and backward.

use std::collections::BTreeSet;

use ir::ValueId;
use ir::program::{Feed, Step};

use super::chunk::{Chunk, Copy, Item, Side};
use super::exchange::Moment;
use super::offload::Fetching;
use super::{Class, Pass};
use crate::calls::Operand;
use crate::specialise::Source;
use crate::store::BufferId;

impl Class<'_> {
    fn feed_all(
        &self,
        chunk: &Chunk<'_>,
        microbatch: usize,
        with_keys: bool,
        steps: &mut Vec<Step>,
    ) {
        for feed in &chunk.feeds {
            let is_meant = match feed {
                Feed::Scalars => false,
                Feed::Key { .. } => with_keys,
                Feed::Tokens | Feed::Labels | Feed::Documents | Feed::Position | Feed::Last => true,
            };
            if is_meant {
                steps.push(Step::Feed { feed: *feed, microbatch, buffer: self.feeds[feed] });
            }
        }
    }

    /// The buffer of an operand of a call at a moment.
    fn operand_buffer(
        &self,
        chunk: &Chunk<'_>,
        (operand, moment): (Operand, Moment),
        microbatch: usize,
    ) -> BufferId {
        match operand {
            Operand::Weight(weight) => {
                let gathered = self.exchanges.param(moment, weight);
                gathered.unwrap_or_else(|| self.store.param(weight))
            }
            Operand::Tokens => self.feeds[&Feed::Tokens],
            Operand::Labels => self.feeds[&Feed::Labels],
            Operand::Documents => self.feeds[&Feed::Documents],
            Operand::Key(path) => self.feeds[&Feed::Key { path }],
            Operand::Position => self.feeds[&Feed::Position],
            Operand::Last => self.feeds[&Feed::Last],
            Operand::Cache(_) => unreachable!("entries with caches are refused"),
            Operand::Value(value) => {
                self.buffer_at(chunk, (Item::Value(value), moment), microbatch)
            }
        }
    }

    /// The buffer of something that a forward pass has made, at a moment: where it lies elsewhere
    /// between passes, a backward pass has a copy.
    fn buffer_at(
        &self,
        chunk: &Chunk<'_>,
        (item, moment): (Item, Moment),
        microbatch: usize,
    ) -> BufferId {
        let is_fetched = moment.0 > self.clock.calls && chunk.offloads.contains_key(&item);
        let copy = if is_fetched { Copy::Fetched } else { Copy::Made };
        chunk.copy(item, copy, microbatch)
    }

    /// The buffer of a result of a call's forward function, at a moment.
    fn result_buffer(
        &self,
        chunk: &Chunk<'_>,
        (call, moment): (usize, Moment),
        result: usize,
        microbatch: usize,
    ) -> BufferId {
        match chunk.own[call].results.get(result) {
            Some(value) => {
                let entry = self.calls.results.iter().position(|r| r == value);
                let exchanged = || self.buffer_at(chunk, (Item::Value(*value), moment), microbatch);
                entry.map_or_else(exchanged, |at| self.store.stat(at))
            }
            None => self.buffer_at(chunk, (Item::Kept(call, result), moment), microbatch),
        }
    }

    pub(super) fn forward(
        &self,
        [chunk, microbatch]: [usize; 2],
        pass: Pass,
        steps: &mut Vec<Step>,
    ) {
        let chunk = &self.chunks[chunk];
        let evaluation = chunk.evaluation.as_ref().filter(|_| pass == Pass::Evaluation);
        self.feed_all(chunk, microbatch, evaluation.is_none(), steps);
        for (value, from) in chunk.exchanged(Side::Before) {
            steps
                .push(Step::Receive { from, buffer: chunk.buffer(Item::Value(value), microbatch) });
        }
        let stores = |made: Option<usize>, steps: &mut Vec<Step>| {
            if pass == Pass::Training {
                self.store(chunk, made, microbatch, steps);
            }
        };
        stores(None, steps);
        let moment = |call: usize| (self.clock.forward(chunk.before + call), false);
        let moments: Vec<Moment> = (0..chunk.own.len()).map(moment).collect();
        for (call, own) in chunk.own.iter().enumerate() {
            let moment = moments[call];
            self.bring_weights(&moments, call, steps);
            let halves = &chunk.layer(call).halves;
            let (params, results, routine) = match evaluation.and_then(|e| e.layer(call)) {
                Some(instead) => (&instead.params, halves.primal_results, instead.routine),
                None => {
                    let results = halves.forward.results.len();
                    (&halves.forward_params, results, chunk.routines[call].forward)
                }
            };
            let operand =
                |p: &usize| self.operand_buffer(chunk, (own.operands[*p], moment), microbatch);
            let mut slots: Vec<BufferId> = params.iter().map(operand).collect();
            let result = |r| self.result_buffer(chunk, (call, moment), r, microbatch);
            slots.extend((0..results).map(result));
            let frame = self.frames.get(&moment.0).copied();
            steps.push(Step::Call { routine, slots, frame });
            stores(Some(call), steps);
        }
        for (value, to) in chunk.exchanged(Side::After) {
            steps.push(Step::Send { to, buffer: chunk.buffer(Item::Value(value), microbatch) });
        }
    }

    /// Begins to fetch, and gathers, the weights that a call of a pass reads, or, as they are
    /// brought ahead of time, those of a later one; before the first, of all up to that.
    fn bring_weights(&self, pass: &[Moment], call: usize, steps: &mut Vec<Step>) {
        let [gathered, fetched] = self.ahead().map(|ahead| {
            let first = if call == 0 { 0 } else { call + ahead };
            pass.get(first..=call + ahead).or(pass.get(first..)).unwrap_or_default()
        });
        fetched.iter().for_each(|moment| self.exchanges.fetch(*moment, steps));
        gathered.iter().for_each(|moment| self.exchanges.gather(*moment, steps));
    }

    /// The backward pass of a micro-batch. `summed` are the units that have sums of gradients.
    pub(super) fn backward(
        &self,
        [chunk, microbatch]: [usize; 2],
        summed: &mut BTreeSet<usize>,
        steps: &mut Vec<Step>,
    ) -> Result<(), String> {
        let chunk = &self.chunks[chunk];
        if chunk.in_flight > 1 || self.chunks.len() > 1 {
            self.feed_all(chunk, microbatch, true, steps);
        }
        for (value, from) in chunk.exchanged(Side::After) {
            steps.push(Step::Receive {
                from,
                buffer: chunk.buffer(Item::Cotangent(value), microbatch),
            });
        }
        let moment = |call: usize| (self.clock.backward(chunk.before + call), false);
        let moments: Vec<Moment> = (0..chunk.own.len()).rev().map(moment).collect();
        for (at, moment) in moments.iter().copied().enumerate() {
            let call = chunk.own.len() - 1 - at;
            let layer = chunk.layer(call);
            self.fetch(chunk, (call, Fetching::Backward), microbatch, steps);
            self.bring_weights(&moments, at, steps);
            self.exchanges.clear(moment, steps);
            let mut slots =
                self.slots(chunk, (call, moment), &layer.halves.backward_params, microbatch);
            slots.extend(self.gradients(chunk, (call, moment), microbatch)?);
            let results = layer.halves.backward.results.len();
            let passed = results - layer.passed()..results;
            slots.extend(passed.map(|at| chunk.buffer(Item::Passed(call, at), microbatch)));
            // All of its gradients may be late.
            if results > 0 || layer.weights.is_none() {
                let frame = self.frames.get(&moment.0).copied();
                steps.push(Step::Call { routine: chunk.routines[call].backward, slots, frame });
            }
            self.exchanges.scatter(moment, summed, steps);
        }
        for (value, to) in chunk.exchanged(Side::Before) {
            steps.push(Step::Send { to, buffer: chunk.buffer(Item::Cotangent(value), microbatch) });
        }
        Ok(())
    }

    /// The gradients of weights that a backward pass has put off. `summed` are the units that have
    /// sums of gradients.
    pub(super) fn weights(
        &self,
        [chunk, microbatch]: [usize; 2],
        summed: &mut BTreeSet<usize>,
        steps: &mut Vec<Step>,
    ) -> Result<(), String> {
        let chunk = &self.chunks[chunk];
        self.feed_all(chunk, microbatch, true, steps);
        for call in (0..chunk.own.len()).rev() {
            self.fetch(chunk, (call, Fetching::Weights), microbatch, steps);
            let late = chunk.layer(call).halves.late.as_ref();
            let (Some(late), Some(routine)) = (late, chunk.routines[call].weights) else {
                continue;
            };
            let moment = (self.clock.backward(chunk.before + call), true);
            self.exchanges.fetch(moment, steps);
            self.exchanges.gather(moment, steps);
            self.exchanges.clear(moment, steps);
            let mut slots = self.slots(chunk, (call, moment), &late.params, microbatch);
            slots.extend(self.gradients(chunk, (call, moment), microbatch)?);
            let frame = self.frames.get(&moment.0).copied();
            steps.push(Step::Call { routine, slots, frame });
            self.exchanges.scatter(moment, summed, steps);
        }
        Ok(())
    }

    /// The buffers of the parameters of a part of a call's backward pass.
    fn slots(
        &self,
        chunk: &Chunk<'_>,
        (call, moment): (usize, Moment),
        params: &[Source],
        microbatch: usize,
    ) -> Vec<BufferId> {
        let (own, param_count) = (&chunk.own[call], chunk.layer(call).param_count);
        let slot = |source: &Source| match *source {
            Source::Param(at) if at < param_count => {
                self.operand_buffer(chunk, (own.operands[at], moment), microbatch)
            }
            Source::Param(at) => {
                self.cotangent_of_result(chunk, own.results[at - param_count], microbatch)
            }
            Source::Kept(result) => self.result_buffer(chunk, (call, moment), result, microbatch),
            Source::Passed(result) => chunk.buffer(Item::Passed(call, result), microbatch),
        };
        params.iter().map(slot).collect()
    }

    /// The buffers of the gradients of a call, of those that are late or of the others, as its
    /// moment says.
    ///
    /// # Errors
    /// A sentence, when there is one for what is fed.
    fn gradients(
        &self,
        chunk: &Chunk<'_>,
        (call, moment): (usize, Moment),
        microbatch: usize,
    ) -> Result<Vec<BufferId>, String> {
        let (own, layer) = (&chunk.own[call], chunk.layer(call));
        let mut buffers = Vec::new();
        let params = layer.differentiable.iter().zip(&layer.is_late);
        for (param, _) in params.filter(|(_, late)| **late == moment.1) {
            buffers.push(match own.operands[*param] {
                Operand::Weight(weight) => {
                    let term = self.exchanges.term(moment, weight);
                    term.unwrap_or_else(|| self.store.grad(weight))
                }
                Operand::Value(value) => chunk.buffer(Item::Cotangent(value), microbatch),
                Operand::Tokens
                | Operand::Labels
                | Operand::Documents
                | Operand::Key(_)
                | Operand::Position
                | Operand::Last
                | Operand::Cache(_) => {
                    return Err(format!("`@{}` has a gradient for what is fed", own.function));
                }
            });
        }
        Ok(buffers)
    }

    /// The cotangent of a floating-point result: the loss scale for the loss sum.
    fn cotangent_of_result(
        &self,
        chunk: &Chunk<'_>,
        value: ValueId,
        microbatch: usize,
    ) -> BufferId {
        match self.calls.results.iter().position(|r| *r == value) {
            Some(0) => self.store.constant(1),
            Some(_) => self.store.constant(0),
            None => chunk.buffer(Item::Cotangent(value), microbatch),
        }
    }
}
