//! Steps of a class: what it does with one micro-batch, forward and backward.

use ir::ValueId;
use ir::program::{Feed, Step};

use super::chunk::{Chunk, Item, Side};
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

    fn operand_buffer(&self, chunk: &Chunk<'_>, operand: Operand, microbatch: usize) -> BufferId {
        match operand {
            Operand::Weight(weight) => self.store.param(weight),
            Operand::Tokens => self.feeds[&Feed::Tokens],
            Operand::Labels => self.feeds[&Feed::Labels],
            Operand::Documents => self.feeds[&Feed::Documents],
            Operand::Key(path) => self.feeds[&Feed::Key { path }],
            Operand::Position => self.feeds[&Feed::Position],
            Operand::Last => self.feeds[&Feed::Last],
            Operand::Cache(_) => unreachable!("entries with caches are refused"),
            Operand::Value(value) => chunk.buffer(Item::Value(value), microbatch),
        }
    }

    /// The buffer of a result of a call's forward function.
    fn result_buffer(
        &self,
        chunk: &Chunk<'_>,
        call: usize,
        result: usize,
        microbatch: usize,
    ) -> BufferId {
        match chunk.own[call].results.get(result) {
            Some(value) => {
                let entry = self.calls.results.iter().position(|r| r == value);
                let exchanged = || chunk.buffer(Item::Value(*value), microbatch);
                entry.map_or_else(exchanged, |at| self.store.stat(at))
            }
            None => chunk.buffer(Item::Kept(call, result), microbatch),
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
        for (call, own) in chunk.own.iter().enumerate() {
            let halves = &chunk.layer(call).halves;
            let (params, results, routine) = match evaluation.and_then(|e| e.layer(call)) {
                Some(instead) => (&instead.params, halves.primal_results, instead.routine),
                None => {
                    let results = halves.forward.results.len();
                    (&halves.forward_params, results, chunk.routines[call].forward)
                }
            };
            let params = params.iter();
            let mut slots: Vec<BufferId> =
                params.map(|p| self.operand_buffer(chunk, own.operands[*p], microbatch)).collect();
            slots.extend((0..results).map(|r| self.result_buffer(chunk, call, r, microbatch)));
            let frame = self.frames.get(&self.clock.forward(chunk.before + call)).copied();
            steps.push(Step::Call { routine, slots, frame });
        }
        for (value, to) in chunk.exchanged(Side::After) {
            steps.push(Step::Send { to, buffer: chunk.buffer(Item::Value(value), microbatch) });
        }
    }

    pub(super) fn backward(
        &self,
        [chunk, microbatch]: [usize; 2],
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
        for call in (0..chunk.own.len()).rev() {
            let layer = chunk.layer(call);
            let mut slots = self.slots(chunk, call, &layer.halves.backward_params, microbatch);
            slots.extend(self.gradients(chunk, [call, microbatch], false)?);
            let results = layer.halves.backward.results.len();
            let passed = results - layer.passed()..results;
            slots.extend(passed.map(|at| chunk.buffer(Item::Passed(call, at), microbatch)));
            // All of its gradients may be late.
            if results > 0 || layer.weights.is_none() {
                let frame = self.frames.get(&self.clock.backward(chunk.before + call)).copied();
                steps.push(Step::Call { routine: chunk.routines[call].backward, slots, frame });
            }
        }
        for (value, to) in chunk.exchanged(Side::Before) {
            steps.push(Step::Send { to, buffer: chunk.buffer(Item::Cotangent(value), microbatch) });
        }
        Ok(())
    }

    /// The gradients of weights that a backward pass has put off.
    pub(super) fn weights(
        &self,
        [chunk, microbatch]: [usize; 2],
        steps: &mut Vec<Step>,
    ) -> Result<(), String> {
        let chunk = &self.chunks[chunk];
        self.feed_all(chunk, microbatch, true, steps);
        for call in (0..chunk.own.len()).rev() {
            let late = chunk.layer(call).halves.late.as_ref();
            let (Some(late), Some(routine)) = (late, chunk.routines[call].weights) else {
                continue;
            };
            let mut slots = self.slots(chunk, call, &late.params, microbatch);
            slots.extend(self.gradients(chunk, [call, microbatch], true)?);
            let frame = self.frames.get(&self.clock.backward(chunk.before + call)).copied();
            steps.push(Step::Call { routine, slots, frame });
        }
        Ok(())
    }

    /// The buffers of the parameters of a part of a call's backward pass.
    fn slots(
        &self,
        chunk: &Chunk<'_>,
        call: usize,
        params: &[Source],
        microbatch: usize,
    ) -> Vec<BufferId> {
        let (own, param_count) = (&chunk.own[call], chunk.layer(call).param_count);
        let slot = |source: &Source| match *source {
            Source::Param(at) if at < param_count => {
                self.operand_buffer(chunk, own.operands[at], microbatch)
            }
            Source::Param(at) => {
                self.cotangent_of_result(chunk, own.results[at - param_count], microbatch)
            }
            Source::Kept(result) => self.result_buffer(chunk, call, result, microbatch),
            Source::Passed(result) => chunk.buffer(Item::Passed(call, result), microbatch),
        };
        params.iter().map(slot).collect()
    }

    /// The buffers of the gradients of a call, of those that are late or of the others.
    ///
    /// # Errors
    /// A sentence, when there is one for what is fed.
    fn gradients(
        &self,
        chunk: &Chunk<'_>,
        [call, microbatch]: [usize; 2],
        is_late: bool,
    ) -> Result<Vec<BufferId>, String> {
        let (own, layer) = (&chunk.own[call], chunk.layer(call));
        let mut buffers = Vec::new();
        let params = layer.differentiable.iter().zip(&layer.is_late);
        for (param, _) in params.filter(|(_, late)| **late == is_late) {
            buffers.push(match own.operands[*param] {
                Operand::Weight(weight) => self.store.grad(weight),
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
