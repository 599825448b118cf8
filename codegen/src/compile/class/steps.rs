//! Steps of a class: what it does with one micro-batch, forward and backward.

use ir::program::{Feed, Step};

use super::{Class, Pass};
use crate::calls::Operand;
use crate::specialise::Source;
use crate::store::BufferId;

impl Class<'_> {
    fn feed_all(&self, microbatch: usize, with_keys: bool, steps: &mut Vec<Step>) {
        for (feed, buffer) in &self.feeds {
            let is_meant = match feed {
                Feed::Scalars => false,
                Feed::Key { .. } => with_keys,
                Feed::Tokens | Feed::Labels | Feed::Documents | Feed::Position | Feed::Last => true,
            };
            if is_meant {
                steps.push(Step::Feed { feed: *feed, microbatch, buffer: *buffer });
            }
        }
    }

    fn operand_buffer(&self, operand: Operand, slot: usize) -> BufferId {
        match operand {
            Operand::Weight(weight) => self.store.param(weight),
            Operand::Tokens => self.feeds[&Feed::Tokens],
            Operand::Labels => self.feeds[&Feed::Labels],
            Operand::Documents => self.feeds[&Feed::Documents],
            Operand::Key(path) => self.feeds[&Feed::Key { path }],
            Operand::Position => self.feeds[&Feed::Position],
            Operand::Last => self.feeds[&Feed::Last],
            Operand::Cache(_) => unreachable!("entries with caches are refused"),
            Operand::Value(value) => self.values[&(value, slot)],
        }
    }

    /// The buffer of a result of a call's forward function.
    fn result_buffer(&self, call: usize, result: usize, slot: usize) -> BufferId {
        match self.own[call].results.get(result) {
            Some(value) => {
                let entry = self.calls.results.iter().position(|r| r == value);
                entry.map_or_else(|| self.values[&(*value, slot)], |at| self.store.stat(at))
            }
            None => self.kept[&(call, result, slot)],
        }
    }

    pub(super) fn forward(&mut self, microbatch: usize, pass: Pass, steps: &mut Vec<Step>) {
        let slot = microbatch % self.in_flight;
        let evaluation = self.evaluation.as_ref().filter(|_| pass == Pass::Evaluation);
        self.feed_all(microbatch, evaluation.is_none(), steps);
        for value in &self.crossing[0] {
            let buffer = self.values[&(*value, slot)];
            steps.push(Step::Receive { from: self.stage - 1, buffer });
        }
        for call in 0..self.own.len() {
            let layer = self.layer(call);
            let halves = &layer.halves;
            let (params, results, routine) = match evaluation.and_then(|e| e.layer(call)) {
                Some(instead) => (&instead.params, halves.primal_results, instead.routine),
                None => {
                    let results = halves.forward.results.len();
                    (&halves.forward_params, results, self.routines[call].0)
                }
            };
            let operands = &self.own[call].operands;
            let mut slots: Vec<BufferId> =
                params.iter().map(|p| self.operand_buffer(operands[*p], slot)).collect();
            slots.extend((0..results).map(|r| self.result_buffer(call, r, slot)));
            let frame = self.frames.get(&self.clock.forward(call)).copied();
            steps.push(Step::Call { routine, slots, frame });
        }
        for value in &self.crossing[1] {
            let buffer = self.values[&(*value, slot)];
            steps.push(Step::Send { to: self.stage + 1, buffer });
        }
    }

    pub(super) fn backward(
        &mut self,
        microbatch: usize,
        steps: &mut Vec<Step>,
    ) -> Result<(), String> {
        let slot = microbatch % self.in_flight;
        if self.in_flight > 1 {
            self.feed_all(microbatch, true, steps);
        }
        for value in &self.crossing[1] {
            let buffer = self.cotangents[value];
            steps.push(Step::Receive { from: self.stage + 1, buffer });
        }
        for call in (0..self.own.len()).rev() {
            let layer = self.layer(call);
            let own = &self.own[call];
            let mut slots = Vec::new();
            for source in &layer.halves.backward_params {
                slots.push(match *source {
                    Source::Param(at) if at < layer.param_count => {
                        self.operand_buffer(own.operands[at], slot)
                    }
                    Source::Param(at) => self.cotangent_of_result(call, at - layer.param_count),
                    Source::Kept(result) => self.result_buffer(call, result, slot),
                });
            }
            for param in &layer.differentiable {
                slots.push(match own.operands[*param] {
                    Operand::Weight(weight) => self.store.grad(weight),
                    Operand::Value(value) => self.cotangents[&value],
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
            let routine = self.routines[call].1;
            let frame = self.frames.get(&self.clock.backward(call)).copied();
            steps.push(Step::Call { routine, slots, frame });
        }
        for value in &self.crossing[0] {
            let buffer = self.cotangents[value];
            steps.push(Step::Send { to: self.stage - 1, buffer });
        }
        Ok(())
    }

    /// The cotangent of the `at`-th floating-point result: the loss scale for the loss sum.
    fn cotangent_of_result(&self, call: usize, at: usize) -> BufferId {
        let value = self.own[call].results[at];
        match self.calls.results.iter().position(|r| *r == value) {
            Some(0) => self.store.constant(1),
            Some(_) => self.store.constant(0),
            None => self.cotangents[&value],
        }
    }
}
