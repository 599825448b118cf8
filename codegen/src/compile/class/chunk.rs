//! A chunk of a stage: calls that follow each other, and the buffers of what they exchange.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ir::program::Feed;
use ir::{Plan, TensorType, ValueId};

use crate::calls::{Call, Calls, Operand};
use crate::crossing::crossing;
use crate::evaluation::Evaluation;
use crate::routines::Layer;
use crate::schedule::Pipeline;
use crate::specialise::Source;
use crate::store::BufferId;

/// The neighbours of a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Before,
    After,
}

/// What a class has of one of its chunks. Calls are counted over the chunk.
pub(super) struct Chunk<'a> {
    /// The calls.
    pub(super) own: &'a [Call],
    /// The calls of the stage before them.
    pub(super) before: usize,
    /// The layer of each call: calls of one function differ in the gradients that they add.
    pub(super) layers: Vec<Arc<Layer>>,
    /// What an evaluation calls; the same as training where none.
    pub(super) evaluation: Option<Evaluation<'a>>,
    /// For each call, its forward and backward routine.
    pub(super) routines: Vec<(usize, usize)>,
    /// The stages of the chunk before and of the one after.
    neighbours: [Option<usize>; 2],
    /// The values that come from the chunk before, and that go to the one after.
    pub(super) crossing: [Vec<ValueId>; 2],
    /// Those that do both and that no call of this chunk takes, with their types.
    pub(super) relayed: Vec<(ValueId, TensorType)>,
    /// Micro-batches in flight at most.
    pub(super) in_flight: usize,
    /// What is fed to the calls.
    pub(super) feeds: BTreeSet<Feed>,
    /// Buffers of values, by micro-batch slot.
    pub(super) values: BTreeMap<(ValueId, usize), BufferId>,
    pub(super) cotangents: BTreeMap<ValueId, BufferId>,
    /// Kept results, by call, result and micro-batch slot.
    pub(super) kept: BTreeMap<(usize, usize, usize), BufferId>,
}

impl<'a> Chunk<'a> {
    /// The chunks of a stage, without their layers.
    ///
    /// # Errors
    /// A sentence, when the plan has other calls.
    pub(super) fn all(
        calls: &'a Calls,
        plan: &Plan,
        stage: usize,
    ) -> Result<Vec<Chunk<'a>>, String> {
        let all = plan.stage_ends.len();
        let in_flight = Pipeline::of(plan).in_flight(stage);
        let mut chunks: Vec<Chunk<'a>> = Vec::new();
        for (number, in_flight) in plan.chunks_of(stage).zip(in_flight) {
            let range = plan.calls_of(number);
            let own = calls.calls.get(range.clone()).ok_or("the stages do not fit")?;
            let stage_of = |other: usize| (other < all).then(|| other % plan.mesh.pp);
            chunks.push(Chunk {
                own,
                before: chunks.last().map_or(0, |last| last.before + last.own.len()),
                layers: Vec::new(),
                evaluation: None,
                routines: Vec::new(),
                neighbours: [number.checked_sub(1).and_then(stage_of), stage_of(number + 1)],
                crossing: [range.start, range.end].map(|at| crossing(calls, at)),
                relayed: Vec::new(),
                in_flight,
                feeds: BTreeSet::new(),
                values: BTreeMap::new(),
                cotangents: BTreeMap::new(),
                kept: BTreeMap::new(),
            });
        }
        Ok(chunks)
    }

    pub(super) fn layer(&self, call: usize) -> &Layer {
        &self.layers[call]
    }

    /// The micro-batch slot in which the values of a micro-batch lie.
    pub(super) fn slot(&self, microbatch: usize) -> usize {
        microbatch % self.in_flight
    }

    /// The values that a neighbour makes or takes, and its stage.
    pub(super) fn exchanged(&self, side: Side) -> impl Iterator<Item = (ValueId, usize)> {
        let side = side as usize;
        let stage = self.neighbours[side];
        self.crossing[side].iter().filter_map(move |value| Some((*value, stage?)))
    }

    pub(super) fn makes(&self, value: ValueId) -> bool {
        self.own.iter().any(|call| call.results.contains(&value))
    }

    /// The calls that take a value.
    pub(super) fn consumers(&self, value: ValueId) -> Vec<usize> {
        let takes = |call: &Call| call.operands.contains(&Operand::Value(value));
        (0..self.own.len()).filter(|at| takes(&self.own[*at])).collect()
    }

    /// Whether the backward routine of a call reads an operand or a result.
    pub(super) fn backward_reads(&self, call: usize, value: ValueId) -> bool {
        let operands = &self.own[call].operands;
        self.layer(call).halves.backward_params.iter().any(|source| match source {
            Source::Param(at) => operands.get(*at) == Some(&Operand::Value(value)),
            Source::Kept(result) => self.own[call].results.get(*result) == Some(&value),
        })
    }
}
