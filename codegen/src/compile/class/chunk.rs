//! A chunk of a stage: calls that follow each other, and the buffers of what they exchange.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ir::plan::Place;
use ir::program::Feed;
use ir::{DType, Plan, TensorType, ValueId};

use crate::calls::{Call, Calls, Operand};
use crate::crossing::crossing;
use crate::evaluation::Evaluation;
use crate::routines::Layer;
use crate::schedule::{Pipeline, Turn};
use crate::specialise::Source;
use crate::store::{BufferId, Store};

/// The neighbours of a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Before,
    After,
}

/// The routines of a call, in the program.
#[derive(Clone, Copy)]
pub(super) struct Routines {
    pub(super) forward: usize,
    pub(super) backward: usize,
    /// Computes the gradients of weights, where they are late.
    pub(super) weights: Option<usize>,
}

/// What a pass of a micro-batch makes, and later calls or passes read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Item {
    /// A value that calls exchange.
    Value(ValueId),
    /// The gradient of a value.
    Cotangent(ValueId),
    /// A result of a call that is kept for its backward pass: both by number.
    Kept(usize, usize),
    /// A result of a call's backward routine that is kept for late gradients.
    Passed(usize, usize),
}

/// Which copy of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Copy {
    /// The one that a pass makes.
    Made,
    /// What lies elsewhere between two passes.
    Away,
    /// What is fetched from there.
    Fetched,
}

/// When an item is copied, by the calls of its chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offloads {
    /// The call after which its copy begins; none for what comes from the chunk before, whose copy
    /// begins with the pass.
    pub(super) made: Option<usize>,
    /// The call after which it must have ended.
    pub(super) stored: usize,
    /// The moment at which the forward pass uses it last.
    pub(super) used: usize,
    /// The first and the last call of the backward pass that read it, and those of the late
    /// gradients.
    pub(super) read: [Option<(usize, usize)>; 2],
}

/// The room that an item takes.
pub(super) struct Room {
    pub(super) item: Item,
    pub(super) copy: Copy,
    pub(super) place: Place,
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) sizes: Vec<usize>,
    /// When a micro-batch needs it, if it is alone.
    pub(super) span: (usize, usize),
    /// How long it lasts.
    pub(super) until: Until,
}

/// The last pass of a micro-batch that needs something.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// The pass that makes it.
    SamePass,
    /// The backward pass.
    Backward,
    /// The late gradients of weights.
    Weights,
}

impl Room {
    /// Room on the device for what a pass makes.
    pub(super) fn of(
        item: Item,
        name: String,
        (dtype, sizes): (DType, Vec<usize>),
        span: (usize, usize),
        until: Until,
    ) -> Room {
        Room { item, copy: Copy::Made, place: Place::Device, name, dtype, sizes, span, until }
    }

    /// What rooms have in common that can lie in the same place.
    pub(super) fn kind(&self) -> (Place, &str, DType, &[usize]) {
        (self.place, &self.name, self.dtype, &self.sizes)
    }

    /// Whether it is taken when a turn of its chunk begins.
    pub(super) fn begins(&self, turn: Turn) -> bool {
        match self.item {
            Item::Value(_) | Item::Kept(..) => matches!(turn, Turn::Forward { .. }),
            Item::Cotangent(_) | Item::Passed(..) => matches!(turn, Turn::Backward { .. }),
        }
    }

    /// Whether it is left when a turn of its chunk ends.
    pub(super) fn ends(&self, turn: Turn) -> bool {
        match turn {
            Turn::Forward { .. } => false,
            Turn::Backward { .. } => self.until == Until::Backward,
            Turn::Weights { .. } => self.until == Until::Weights,
        }
    }

    pub(super) fn allocate(&self, store: &mut Store, span: (usize, usize)) -> BufferId {
        let Room { name, dtype, sizes, place, .. } = self;
        store.transient_in(*place, name, (*dtype, sizes.clone()), span)
    }
}

/// What a class has of one of its chunks. Calls are counted over the chunk.
pub(super) struct Chunk<'a> {
    /// The calls.
    pub(super) own: &'a [Call],
    /// The number of the first of them among the calls of the entry.
    pub(super) first: usize,
    /// The calls of the stage before them.
    pub(super) before: usize,
    /// The layer of each call: calls of one function differ in the gradients that they add.
    pub(super) layers: Vec<Arc<Layer>>,
    /// What an evaluation calls; the same as training where none.
    pub(super) evaluation: Option<Evaluation<'a>>,
    /// For each call, its routines.
    pub(super) routines: Vec<Routines>,
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
    /// What each micro-batch needs, until it is allocated.
    pub(super) rooms: Vec<Room>,
    /// What micro-batches have that they need in one turn only, or that are never in flight at
    /// once.
    pub(super) shared: BTreeMap<(Item, Copy), BufferId>,
    /// What each micro-batch has of its own.
    pub(super) buffers: BTreeMap<(Item, Copy, usize), BufferId>,
    /// When what lies elsewhere between passes is copied.
    pub(super) offloads: BTreeMap<Item, Offloads>,
}

/// The calls of a chunk, which is counted among those of all stages.
///
/// # Errors
/// A sentence, when the plan has other calls.
pub(super) fn own_calls<'a>(
    calls: &'a Calls,
    plan: &Plan,
    chunk: usize,
) -> Result<&'a [Call], String> {
    let own = calls.calls.get(plan.calls_of(chunk));
    own.ok_or_else(|| "the stages do not fit".to_owned())
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
            let own = own_calls(calls, plan, number)?;
            let stage_of = |other: usize| (other < all).then(|| other % plan.mesh.pp);
            chunks.push(Chunk {
                own,
                first: range.start,
                before: chunks.last().map_or(0, |last| last.before + last.own.len()),
                layers: Vec::new(),
                evaluation: None,
                routines: Vec::new(),
                neighbours: [number.checked_sub(1).and_then(stage_of), stage_of(number + 1)],
                crossing: [range.start, range.end].map(|at| crossing(calls, at)),
                relayed: Vec::new(),
                in_flight,
                feeds: BTreeSet::new(),
                rooms: Vec::new(),
                shared: BTreeMap::new(),
                buffers: BTreeMap::new(),
                offloads: BTreeMap::new(),
            });
        }
        Ok(chunks)
    }

    pub(super) fn layer(&self, call: usize) -> &Layer {
        &self.layers[call]
    }

    /// Where something of a micro-batch lies.
    pub(super) fn buffer(&self, item: Item, microbatch: usize) -> BufferId {
        self.copy(item, Copy::Made, microbatch)
    }

    /// Where a copy of it lies.
    pub(super) fn copy(&self, item: Item, copy: Copy, microbatch: usize) -> BufferId {
        let shared = self.shared.get(&(item, copy)).copied();
        shared.unwrap_or_else(|| self.buffers[&(item, copy, microbatch)])
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
        self.reads(call, &self.layer(call).halves.backward_params, Item::Value(value))
    }

    /// Whether late gradients of weights read something.
    pub(super) fn is_late(&self, item: Item) -> bool {
        let late = |call: &usize| {
            let late = self.layer(*call).halves.late.as_ref();
            late.is_some_and(|late| self.reads(*call, &late.params, item))
        };
        (0..self.own.len()).any(|call| late(&call))
    }

    /// Whether something is among the parameters of a routine of a call.
    pub(super) fn reads(&self, call: usize, params: &[Source], item: Item) -> bool {
        let Call { operands, results, .. } = &self.own[call];
        let param_count = self.layer(call).param_count;
        let read = |source: &Source| match *source {
            Source::Param(at) if at < param_count => {
                if let Operand::Value(value) = operands[at] {
                    Some(Item::Value(value))
                } else {
                    None
                }
            }
            Source::Param(at) => Some(Item::Cotangent(results[at - param_count])),
            Source::Kept(result) => Some(match results.get(result) {
                Some(value) => Item::Value(*value),
                None => Item::Kept(call, result),
            }),
            Source::Passed(result) => Some(Item::Passed(call, result)),
        };
        params.iter().any(|source| read(source) == Some(item))
    }
}
