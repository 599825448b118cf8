//! A class of ranks: its calls, what it compiles for them, and where its buffers are.

mod allocate;
mod steps;
mod update;

use std::collections::BTreeMap;
use std::sync::Arc;

use ir::plan::Optimizer;
use ir::program::{Feed, Program, Step};
use ir::sharding::Layout;
use ir::{DType, Dim, Function, Module, Node, Op, Plan, TensorType, ValueId};

use super::{Compiler, Ends};
use crate::calls::{Call, Calls, Operand};
use crate::crossing::{crossing, gradient_adds, must_clear, relayed, rounded_gradients};
use crate::evaluation::{Evaluation, Maker};
use crate::executable::executed_target;
use crate::lower::KernelTable;
use crate::partition::{Place, layouts};
use crate::refusal::Refusal;
use crate::routines::{GradientSums, Layer, LayerDecisions};
use crate::schedule::{Turn, in_flight, turns};
use crate::specialise::Source;
use crate::store::{BufferId, Store, WeightPlace};
use crate::weights::weight_places;

/// Where things happen within the work on one micro-batch.
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

    fn end(self) -> usize {
        2 * self.calls + 1
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
    pub(crate) tensor: usize,
    pub(crate) store: Store,
    pub(crate) table: &'a mut KernelTable,
    /// The calls of this stage.
    own: &'a [Call],
    /// The layer of each call: calls of one function differ in the gradients that they add.
    layers: Vec<Arc<Layer>>,
    /// What an evaluation calls; the same as training where none.
    evaluation: Option<Evaluation<'a>>,
    /// For each call, its forward and backward routine.
    routines: Vec<(usize, usize)>,
    /// The values that come from the stage before, and that go to the one after.
    crossing: [Vec<ValueId>; 2],
    /// Those that do both and that no call of this stage takes, with their types.
    relayed: Vec<(ValueId, TensorType)>,
    clock: Clock,
    /// Micro-batches in flight at most.
    in_flight: usize,
    /// Buffers of values, by micro-batch slot.
    values: BTreeMap<(ValueId, usize), BufferId>,
    cotangents: BTreeMap<ValueId, BufferId>,
    /// Kept results, by call, result and micro-batch slot.
    kept: BTreeMap<(usize, usize, usize), BufferId>,
    frames: BTreeMap<usize, BufferId>,
    feeds: BTreeMap<Feed, BufferId>,
    /// Whether tensor-parallel ranks hold terms of the loss rather than copies.
    pub(crate) loss_is_partial: bool,
}

impl<'a> Class<'a> {
    pub(super) fn new(
        compiler: &'a mut Compiler<'_>,
        plan: &'a Plan,
        stage: usize,
        tensor: usize,
    ) -> Result<Class<'a>, Refusal> {
        let Compiler { module, calls, evaluated, layers: shared, .. } = compiler;
        let (module, calls, evaluated) = (*module, &*calls, evaluated.as_ref());
        let own = own_calls(calls, plan, stage)?;
        if plan.microbatch_count > 1 {
            module.functions.iter().try_for_each(check_draws)?;
        }
        let place = Place {
            sizes: [plan.mesh.dp, plan.mesh.tp],
            coordinates: [0, tensor],
            microbatch_size: plan.microbatch_size,
            target: executed_target(plan),
        };
        let crossing = crossings(calls, plan, stage);
        let adds = gradient_adds(own, &crossing[1], plan.microbatch_count);
        let mut make = |call: &Call, number: usize, adds: &[bool]| {
            let planned = plan.functions.get(&call.function);
            let planned =
                planned.ok_or_else(|| format!("the plan has nothing for `@{}`", call.function))?;
            let is_last = call.results.iter().any(|r| calls.results.contains(r));
            let decisions = LayerDecisions::of(planned, number);
            let rounded = rounded_gradients(call, &plan.precision);
            let sums = GradientSums { adds, rounded: &rounded };
            shared.layer(&call.function, decisions, place, sums, is_last)
        };
        let numbers = calls.numbers().into_iter().skip(begin(plan, stage));
        let layers = own.iter().zip(numbers).zip(&adds);
        let layers = layers.map(|((call, number), adds)| make(call, number, adds));
        let layers: Vec<Arc<Layer>> = layers.collect::<Result<_, _>>()?;
        let relayed = relayed(calls, own, &crossing, &mut |call, adds| make(call, 0, adds))?;
        let named = own.iter().zip(&layers);
        let named = named.map(|(call, layer)| (call.function.clone(), Arc::clone(layer)));
        let trained: BTreeMap<String, Arc<Layer>> = named.collect();
        let mut store = store(module, calls, plan, [stage, tensor])?;
        let mut maker =
            Maker { module, plan, place, trained: &trained, store: &mut store, layers: shared };
        let evaluate =
            |calls: &'a Calls| Evaluation::new(&mut maker, own_calls(calls, plan, stage)?, own);
        let evaluation = evaluated.map(evaluate).transpose()?;
        let class = Class::with((module, calls), plan, [stage, tensor], store, &mut shared.table)?;
        Ok(Class { layers, evaluation, relayed, ..class })
    }

    /// A class that has its weights, and no layers.
    pub(super) fn with(
        (module, calls): (&Module, &'a Calls),
        plan: &'a Plan,
        [stage, tensor]: [usize; 2],
        store: Store,
        table: &'a mut KernelTable,
    ) -> Result<Class<'a>, Refusal> {
        let own = own_calls(calls, plan, stage)?;
        Ok(Class {
            calls,
            plan,
            stage,
            tensor,
            store,
            table,
            own,
            layers: Vec::new(),
            evaluation: None,
            routines: Vec::new(),
            crossing: crossings(calls, plan, stage),
            relayed: Vec::new(),
            clock: Clock { calls: own.len() },
            in_flight: in_flight(plan.schedule, [stage, plan.mesh.pp], plan.microbatch_count),
            values: BTreeMap::new(),
            cotangents: BTreeMap::new(),
            kept: BTreeMap::new(),
            frames: BTreeMap::new(),
            feeds: BTreeMap::new(),
            loss_is_partial: loss_is_partial(module, calls, plan),
        })
    }

    /// Whether a call of this stage has a result of the entry.
    pub(crate) fn has_loss(&self) -> bool {
        self.own.iter().flat_map(|call| &call.results).any(|result| self.is_entry_result(*result))
    }

    /// The type of losses, norms and scalars.
    pub(crate) fn sums(&self) -> DType {
        self.plan.precision.accumulate
    }

    pub(super) fn ends(mut self) -> Result<Ends, Refusal> {
        self.allocate_stats();
        let scalars = self.feed_buffer(Feed::Scalars);
        let (mut begin, mut finish) = (Vec::new(), Vec::new());
        let clears = must_clear(self.own, self.plan.microbatch_count);
        update::begin(&mut self, clears, scalars, &mut begin);
        update::finish(&mut self, scalars, &mut finish)?;
        let routine = |step: &Step| match step {
            Step::Call { routine, .. } => Some(self.store.routine_at(*routine).clone()),
            Step::Feed { .. } | Step::Send { .. } | Step::Receive { .. } => None,
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
        let of_calls = self.layers.iter().map(|layer| layer.halves.forward.results.len());
        of_calls.sum::<usize>() * self.in_flight
    }

    fn assembled(mut self, microbatches: usize) -> Result<Program, Refusal> {
        for layer in &self.layers {
            let forward = self.store.routine(&layer.forward);
            let backward = self.store.routine(&layer.backward);
            self.routines.push((forward, backward));
        }
        self.allocate();
        let mut steps = Vec::new();
        let scalars = self.feed_buffer(Feed::Scalars);
        steps.push(Step::Feed { feed: Feed::Scalars, microbatch: 0, buffer: scalars });
        let clears = must_clear(self.own, self.plan.microbatch_count);
        update::begin(&mut self, clears, scalars, &mut steps);
        self.schedule(microbatches, &mut steps)?;
        update::finish(&mut self, scalars, &mut steps)?;
        let mut evaluate = Vec::new();
        update::begin_evaluation(&mut self, &mut evaluate);
        for microbatch in 0..microbatches {
            self.forward(microbatch, Pass::Evaluation, &mut evaluate);
        }
        update::reduce_loss(&mut self, &mut evaluate);
        let (place, steps) = ([self.stage, self.tensor], [steps, evaluate]);
        Ok(self.store.into_program(&self.plan.model, place, steps, Vec::new()))
    }

    fn schedule(&mut self, microbatches: usize, steps: &mut Vec<Step>) -> Result<(), String> {
        let Plan { mesh, schedule, .. } = self.plan;
        for turn in turns(*schedule, [self.stage, mesh.pp], microbatches) {
            match turn {
                Turn::Forward(microbatch) => self.forward(microbatch, Pass::Training, steps),
                Turn::Backward(microbatch) => self.backward(microbatch, steps)?,
            }
        }
        Ok(())
    }

    fn layer(&self, call: usize) -> &Layer {
        &self.layers[call]
    }

    /// The calls of this stage that take a value.
    fn consumers(&self, value: ValueId) -> Vec<usize> {
        let takes = |call: &Call| call.operands.contains(&Operand::Value(value));
        (0..self.own.len()).filter(|at| takes(&self.own[*at])).collect()
    }

    fn is_entry_result(&self, value: ValueId) -> bool {
        self.calls.results.contains(&value)
    }

    /// Whether the backward routine of a call reads an operand.
    fn backward_reads(&self, call: usize, value: ValueId) -> bool {
        let operands = &self.own[call].operands;
        self.layer(call).halves.backward_params.iter().any(|source| match source {
            Source::Param(at) => operands.get(*at) == Some(&Operand::Value(value)),
            Source::Kept(result) => self.own[call].results.get(*result) == Some(&value),
        })
    }
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

/// The calls of a stage.
pub(super) fn own_calls<'a>(
    calls: &'a Calls,
    plan: &Plan,
    stage: usize,
) -> Result<&'a [Call], String> {
    let own = calls.calls.get(begin(plan, stage)..plan.stage_ends[stage]);
    own.ok_or_else(|| "the stages do not fit".to_owned())
}

/// The first call of a stage.
fn begin(plan: &Plan, stage: usize) -> usize {
    if stage == 0 { 0 } else { plan.stage_ends[stage - 1] }
}

/// The values that come from the stage before, and that go to the one after.
fn crossings(calls: &Calls, plan: &Plan, stage: usize) -> [Vec<ValueId>; 2] {
    [begin(plan, stage), plan.stage_ends[stage]].map(|at| crossing(calls, at))
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
    let states = plan.optimizer.state_count();
    Store::for_training(weights, states, plan.precision, shards(plan))
}

/// The pieces into which the optimizer's part of weights is split, each on its own rank along `dp`.
pub(super) fn shards(plan: &Plan) -> usize {
    let splits = plan.zero.stage > 0 && plan.optimizer != Optimizer::None;
    if splits { plan.mesh.dp } else { 1 }
}

/// Whether tensor-parallel ranks hold terms of the loss rather than copies.
pub(super) fn loss_is_partial(module: &Module, calls: &Calls, plan: &Plan) -> bool {
    let sharding = calls.calls.last().and_then(|call| {
        let function = module.function(&call.function)?;
        let at = call.results.iter().position(|r| Some(r) == calls.results.first())?;
        let name = &function.value(function.results[at]).name;
        plan.functions.get(&call.function)?.shardings.get(name)
    });
    sharding.is_some_and(|s| matches!(layouts(s)[1], Layout::Partial(_)))
}
