//! A class of ranks: its calls, what it compiles for them, and where its buffers are.

mod allocate;
mod chunk;
mod exchange;
mod launch;
mod offload;
mod steps;
mod update;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ir::program::{Feed, Group, Program, Step};
use ir::sharding::{Axis, Layout};
use ir::{DType, Dim, Function, Module, Node, Op, Plan, ValueId};

use super::{Compiler, Ends};
use crate::calls::{Call, Calls};
use crate::crossing::{Sums, gradient_adds, must_clear, relayed, rounded_gradients};
use crate::evaluation::{Evaluation, Maker};
use crate::lower::KernelTable;
use crate::partition::Place;
use crate::refusal::Refusal;
use crate::routines::{GradientSums, Layer, LayerDecisions};
use crate::schedule::{Pipeline, Turn};
use crate::store::{BufferId, Shards, Store, WeightPlace};
use crate::weights::{is_late, shards, shares_gradients, weight_places};
use chunk::{Chunk, Routines, own_calls};
use exchange::Exchanges;

/// Where things happen within the work on one micro-batch: on the calls of all chunks.
#[derive(Clone, Copy)]
struct Clock {
    calls: usize,
}

impl Clock {
    fn forward(self, call: usize) -> usize {
        1 + call
    }

    fn backward(self, call: usize) -> usize {
        2 * self.calls - call
    }

    /// When cotangents go from a call, or from what follows the last one, to the call before.
    fn passed(self, call: usize) -> usize {
        2 * self.calls + 1 - call
    }

    fn end(self) -> usize {
        self.passed(0)
    }
}

/// What a forward pass is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Training,
    Evaluation,
}

pub(crate) struct Class<'a> {
    pub(crate) calls: &'a Calls,
    pub(crate) plan: &'a Plan,
    pub(crate) stage: usize,
    context: usize,
    pub(crate) tensor: usize,
    pub(crate) store: Store,
    pub(crate) table: &'a mut KernelTable,
    chunks: Vec<Chunk<'a>>,
    clock: Clock,
    /// By the moments of the clock.
    frames: BTreeMap<usize, BufferId>,
    feeds: BTreeMap<Feed, BufferId>,
    /// What ranks with the same weights exchange around calls.
    exchanges: Exchanges,
    /// Whether parameters are gathered one call ahead, as devices do that compute meanwhile.
    gathers_ahead: bool,
    /// Whether tensor-parallel ranks hold terms of the loss rather than copies.
    pub(crate) loss_is_partial: bool,
}

impl<'a> Class<'a> {
    pub(super) fn new(
        compiler: &'a mut Compiler<'_>,
        plan: &'a Plan,
        at: [usize; 3],
    ) -> Result<Class<'a>, Refusal> {
        let [stage, context, tensor] = at;
        let Compiler { module, calls, evaluated, layers: shared, .. } = compiler;
        let (module, calls, evaluated) = (*module, &*calls, evaluated.as_ref());
        if plan.microbatch_count > 1 {
            module.functions.iter().try_for_each(check_draws)?;
        }
        check_rounds(plan)?;
        let place = Place::of(plan, [context, tensor]);
        let mut store = store(module, calls, plan, [stage, tensor])?;
        let mut chunks = Chunk::all(calls, plan, stage)?;
        let mut make = |call: &Call, number: usize, adds: &[bool]| {
            let planned = plan.functions.get(&call.function);
            let planned =
                planned.ok_or_else(|| format!("the plan has nothing for `@{}`", call.function))?;
            let is_last = call.results.iter().any(|r| calls.results.contains(r));
            let is_late = is_late(module, calls, plan, call);
            let decisions =
                LayerDecisions { is_late: &is_late, ..LayerDecisions::of(planned, number) };
            let rounded = rounded_gradients(call, &plan.precision);
            let sums = GradientSums { adds, rounded: &rounded };
            shared.layer(&call.function, decisions, place, sums, is_last)
        };
        let numbers = calls.numbers();
        let mut trained: BTreeMap<String, Arc<Layer>> = BTreeMap::new();
        for (chunk, number) in chunks.iter_mut().zip(plan.chunks_of(stage)) {
            let adds = gradient_adds(chunk.own, &chunk.crossing[1], sums(plan));
            let layers = chunk.own.iter().zip(&numbers[plan.calls_of(number)]).zip(&adds);
            let layers = layers.map(|((call, number), adds)| make(call, *number, adds));
            chunk.layers = layers.collect::<Result<_, _>>()?;
            let make = &mut |call: &Call, adds: &[bool]| make(call, 0, adds);
            chunk.relayed = relayed(calls, chunk.own, &chunk.crossing, make)?;
            let named = chunk.own.iter().zip(&chunk.layers);
            trained.extend(named.map(|(call, layer)| (call.function.clone(), Arc::clone(layer))));
        }
        if let Some(evaluated) = evaluated {
            let mut maker =
                Maker { module, plan, place, trained: &trained, store: &mut store, layers: shared };
            for (chunk, number) in chunks.iter_mut().zip(plan.chunks_of(stage)) {
                let own = own_calls(evaluated, plan, number)?;
                chunk.evaluation = Some(Evaluation::new(&mut maker, own, chunk.own)?);
            }
        }
        let class = Class::with((module, calls), plan, at, store, &mut shared.table)?;
        Ok(Class { chunks, ..class })
    }

    /// A class that has its weights, and no layers.
    pub(super) fn with(
        (module, calls): (&Module, &'a Calls),
        plan: &'a Plan,
        [stage, context, tensor]: [usize; 3],
        store: Store,
        table: &'a mut KernelTable,
    ) -> Result<Class<'a>, Refusal> {
        let chunks = Chunk::all(calls, plan, stage)?;
        Ok(Class {
            calls,
            plan,
            stage,
            context,
            tensor,
            store,
            table,
            clock: Clock { calls: chunks.iter().map(|chunk| chunk.own.len()).sum() },
            chunks,
            frames: BTreeMap::new(),
            feeds: BTreeMap::new(),
            exchanges: Exchanges::default(),
            gathers_ahead: plan.target.is_some_and(|target| target.arch().is_some()),
            loss_is_partial: loss_is_partial(module, calls, plan),
        })
    }

    /// Whether a call of this stage has a result of the entry.
    pub(crate) fn has_loss(&self) -> bool {
        let calls = self.chunks.iter().flat_map(|chunk| chunk.own);
        calls.flat_map(|call| &call.results).any(|result| self.is_entry_result(*result))
    }

    /// The type of losses, norms and scalars.
    pub(crate) fn sums(&self) -> DType {
        self.plan.precision.accumulate
    }

    pub(super) fn ends(mut self) -> Result<Ends, Refusal> {
        self.allocate_stats();
        let scalars = self.feed_buffer(Feed::Scalars);
        let (mut begin, mut finish) = (Vec::new(), Vec::new());
        let clears = clears(self.calls, self.plan, self.stage)?;
        update::begin(&mut self, clears, scalars, &mut begin);
        update::finish(&mut self, scalars, &mut finish)?;
        let routine = |step: &Step| match step {
            Step::Call { routine, .. } => Some(self.store.routine_at(*routine).clone()),
            Step::Feed { .. }
            | Step::Send { .. }
            | Step::Receive { .. }
            | Step::Move { .. }
            | Step::Await { .. } => None,
        };
        Ok(Ends {
            begin: begin.iter().filter_map(routine).collect(),
            finish: finish.iter().filter_map(routine).collect(),
        })
    }

    pub(super) fn program(self) -> Result<Program, Refusal> {
        let count = self.plan.microbatch_count;
        self.assembled(count)
    }

    /// The program of the first micro-batch, in the arena of all: what all have is placed before
    /// their steps are made.
    pub(super) fn skeleton(self) -> Result<Program, Refusal> {
        self.assembled(1)
    }

    /// Values between calls that have places of their own, of all micro-batches in flight.
    pub(super) fn kept_count(&self) -> usize {
        let of_chunk = |chunk: &Chunk<'_>| {
            let results = |layer: &Arc<Layer>| layer.halves.forward.results.len() + layer.passed();
            chunk.layers.iter().map(results).sum::<usize>() * chunk.in_flight
        };
        self.chunks.iter().map(of_chunk).sum()
    }

    fn assembled(mut self, microbatches: usize) -> Result<Program, Refusal> {
        for chunk in &mut self.chunks {
            for layer in &chunk.layers {
                let forward = self.store.routine(&layer.forward);
                let backward = self.store.routine(&layer.backward);
                let weights = layer.weights.as_ref().map(|weights| self.store.routine(weights));
                chunk.routines.push(Routines { forward, backward, weights });
            }
        }
        let pipeline = Pipeline::of(self.plan);
        let made = Pipeline { microbatches, ..pipeline };
        let is_whole = microbatches == pipeline.microbatches;
        self.allocate(if is_whole { pipeline } else { pipeline.first_rounds() });
        let mut steps = Vec::new();
        let scalars = self.feed_buffer(Feed::Scalars);
        steps.push(Step::Feed { feed: Feed::Scalars, microbatch: 0, buffer: scalars });
        let clears = clears(self.calls, self.plan, self.stage)?;
        update::begin(&mut self, clears, scalars, &mut steps);
        let turns = made.turns(self.stage);
        let mut summed = BTreeSet::new();
        for turn in &turns {
            match *turn {
                Turn::Forward { chunk, microbatch } => {
                    self.forward([chunk, microbatch], Pass::Training, &mut steps);
                }
                Turn::Backward { chunk, microbatch } => {
                    self.backward([chunk, microbatch], &mut summed, &mut steps)?;
                }
                Turn::Weights { chunk, microbatch } => {
                    self.weights([chunk, microbatch], &mut summed, &mut steps)?;
                }
            }
        }
        update::finish(&mut self, scalars, &mut steps)?;
        let mut evaluate = Vec::new();
        update::begin_evaluation(&mut self, &mut evaluate);
        for turn in turns {
            if let Turn::Forward { chunk, microbatch } = turn {
                self.forward([chunk, microbatch], Pass::Evaluation, &mut evaluate);
            }
        }
        update::reduce_loss(&mut self, &mut evaluate);
        let (place, steps) = ([self.stage, self.context, self.tensor], [steps, evaluate]);
        Ok(self.store.into_program(&self.plan.model, place, steps, Vec::new()))
    }

    fn is_entry_result(&self, value: ValueId) -> bool {
        self.calls.results.contains(&value)
    }
}

/// Micro-batches go through interleaved chunks in rounds of pp. In a shorter round a stage would
/// receive messages in another order than its neighbour sends them.
fn check_rounds(plan: &Plan) -> Result<(), String> {
    let (count, pp) = (plan.microbatch_count, plan.mesh.pp);
    if plan.chunks_per_stage() == 1 || count.is_multiple_of(pp) {
        return Ok(());
    }
    Err(format!("{pp} interleaved stages do not divide {count} micro-batches"))
}

/// Samples of several micro-batches are told apart along the first dim of a draw only.
fn check_draws(function: &Function) -> Result<(), String> {
    let counts_samples = |dim: &Dim| dim.mentions(Dim::BATCH);
    let is_off = |node: &&Node| {
        let Op::Random { dims, .. } = &node.op else { return false };
        dims.iter().skip(1).any(counts_samples)
    };
    match function.nodes.iter().find(is_off) {
        Some(node) => Err(format!(
            "`%{}` draws along the batch, which is not its first dim: put it first, then transpose",
            function.value(node.result()).name
        )),
        None => Ok(()),
    }
}

/// How gradients of weights are added up. Where some are late, calls do not come to a weight in the
/// reverse of their order, so that the first to come is not known.
fn sums(plan: &Plan) -> Sums {
    if shares_gradients(plan) {
        return Sums::OfEachCall;
    }
    let splits = Pipeline::of(plan).splits();
    let least = if splits { 2 } else { 1 };
    Sums::OfStep { terms: plan.microbatch_count.max(least) }
}

/// Whether gradients of a stage are added to before anything was written to them in a step.
///
/// # Errors
/// A sentence, when the plan has other calls.
pub(super) fn clears(calls: &Calls, plan: &Plan, stage: usize) -> Result<bool, String> {
    for chunk in plan.chunks_of(stage) {
        if must_clear(own_calls(calls, plan, chunk)?, sums(plan)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The weights of a class, with gradients and optimizer states.
fn store(
    module: &Module,
    calls: &Calls,
    plan: &Plan,
    [stage, tensor]: [usize; 2],
) -> Result<Store, String> {
    let weights = weight_places(module, calls, plan, stage, tensor)?;
    Ok(training_store(weights, plan))
}

/// Room for weights and for what training them takes.
pub(super) fn training_store(weights: Vec<WeightPlace>, plan: &Plan) -> Store {
    let states = (plan.optimizer.state_count(), plan.offload);
    let precision = plan.precision;
    let shards = shards(plan);
    if shares_gradients(plan) {
        let gathers = plan.zero.stage > 2;
        return Store::for_units(weights, states, precision, shards, gathers);
    }
    Store::for_training(weights, states, precision, shards)
}

/// The ranks that hold the same weights.
pub(super) fn data_group(plan: &Plan) -> Group {
    if plan.mesh.cp == 1 { Group::Axis(Axis::Dp) } else { Group::Data }
}

/// Those of them over which ZeRO shards one copy of weights, or of the experts that a rank has.
pub(super) fn shard_group(plan: &Plan, is_expert: bool) -> Group {
    let Shards { whole: count, experts } = shards(plan);
    let stride = plan.experts.data_ranks(plan.mesh);
    match is_expert {
        true if experts * stride == plan.mesh.data_ranks() => Group::Copies(stride),
        true => Group::Strided { count: experts, stride },
        false if count == plan.mesh.data_ranks() => data_group(plan),
        false => Group::Shards(count),
    }
}

/// Those of them that have the same shard; none where there is one copy.
pub(super) fn copies_group(plan: &Plan) -> Option<Group> {
    let count = shards(plan).whole;
    (count < plan.mesh.data_ranks()).then_some(Group::Copies(count))
}

/// Whether tensor-parallel ranks hold terms of the loss rather than copies.
pub(super) fn loss_is_partial(module: &Module, calls: &Calls, plan: &Plan) -> bool {
    let sharding = calls.calls.last().and_then(|call| {
        let function = module.function(&call.function)?;
        let at = call.results.iter().position(|r| Some(r) == calls.results.first())?;
        let name = &function.value(function.results[at]).name;
        plan.functions.get(&call.function)?.shardings.get(name)
    });
    sharding.is_some_and(|s| matches!(s.on(Axis::Tp), Layout::Partial(_)))
}
