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
                    (&halves.forward_params, results, chunk.routines[call].0)
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
            steps.push(Step::Receive { from, buffer: chunk.cotangents[&value] });
        }
        for (call, own) in chunk.own.iter().enumerate().rev() {
            let layer = chunk.layer(call);
            let mut slots = Vec::new();
            for source in &layer.halves.backward_params {
                slots.push(match *source {
                    Source::Param(at) if at < layer.param_count => {
                        self.operand_buffer(chunk, own.operands[at], microbatch)
                    }
                    Source::Param(at) => {
                        self.cotangent_of_result(chunk, own.results[at - layer.param_count])
                    }
                    Source::Kept(result) => self.result_buffer(chunk, call, result, microbatch),
                });
            }
            for param in &layer.differentiable {
                slots.push(match own.operands[*param] {
                    Operand::Weight(weight) => self.store.grad(weight),
                    Operand::Value(value) => chunk.cotangents[&value],
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
            let routine = chunk.routines[call].1;
            let frame = self.frames.get(&self.clock.backward(chunk.before + call)).copied();
            steps.push(Step::Call { routine, slots, frame });
        }
        for (value, to) in chunk.exchanged(Side::Before) {
            steps.push(Step::Send { to, buffer: chunk.cotangents[&value] });
        }
        Ok(())
    }

    /// The cotangent of a floating-point result: the loss scale for the loss sum.
    fn cotangent_of_result(&self, chunk: &Chunk<'_>, value: ValueId) -> BufferId {
        match self.calls.results.iter().position(|r| *r == value) {
            Some(0) => self.store.constant(1),
            Some(_) => self.store.constant(0),
            None => chunk.cotangents[&value],
        }
    }
}
