//! Assembly: module × plan → one program per class of ranks.
//!
//! A class is a place on the pipeline and tensor-parallel axes; data-parallel ranks run the same
//! program. The arena holds what persists (parameters, gradients, optimizer state, feeds), then
//! what one micro-batch needs, packed by lifetime. With several micro-batches in flight their
//! values are given separate room for the whole step.

use std::collections::BTreeMap;
use std::rc::Rc;

use ir::program::{Contents, Feed, Program, Routine, Step};
use ir::sharding::Layout;
use ir::{DType, Diagnostic, Module, Plan, Span, TensorType, ValueId};
use kernels::Kernel;

use crate::calls::{Call, Calls, Operand};
use crate::crossing::{crossing, gradient_adds, must_clear, relayed};
use crate::evaluation::{self, Evaluation, Maker};
use crate::lower::KernelTable;
use crate::partition::{Place, layouts};
use crate::routines::{Layer, Layers};
use crate::schedule::{Turn, one_forward_one_backward};
use crate::specialise::Source;
use crate::store::{BufferId, Store};
use crate::update;
use crate::weights::weight_places;

/// Programs and the kernels that they launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Compiled {
    /// One program per class: stages outermost, then places on the tensor-parallel axis.
    pub programs: Vec<Program>,
    /// The kernels of all programs.
    pub kernels: Vec<Kernel>,
}

/// Compiles a prepared training module under a plan.
///
/// # Errors
/// `E2001` when the entry is no list of calls, `E2002` when the plan does not fit the module.
pub fn compile(module: &Module, entry: &str, plan: &Plan) -> Result<Compiled, Diagnostic> {
    let mut compiler = Compiler::new(module, entry)?;
    let programs = compiler.programs(plan)?;
    Ok(Compiled { programs, kernels: compiler.layers.table.kernels }.checked(plan))
}

impl Compiled {
    /// The same; in debug builds only if [`check`](crate::check) finds nothing wrong. Element types
    /// that are only planned for have no kernels to check.
    ///
    /// # Panics
    /// When it does: what made the programs has a defect.
    pub(crate) fn checked(self, plan: &Plan) -> Compiled {
        if cfg!(debug_assertions) && matches!(plan.dtype, DType::F32 | DType::F64) {
            let found = crate::check::check(&self.programs, &self.kernels, plan);
            let first = found.first();
            let first = first.map(|d| format!("{} {}: {}", d.code, d.span.source, d.headline));
            assert!(first.is_none(), "programs are sound: {}", first.unwrap_or_default());
        }
        self
    }
}

/// Compiles one module under many plans: what they share is compiled once.
#[derive(Debug)]
pub struct Compiler<'m> {
    module: &'m Module,
    calls: Calls,
    /// The calls that evaluate, where they are others.
    evaluated: Option<Calls>,
    layers: Layers<'m>,
}

impl<'m> Compiler<'m> {
    /// A compiler of a prepared training module.
    ///
    /// # Errors
    /// `E2001` when the entry is no list of calls.
    pub fn new(module: &'m Module, entry: &str) -> Result<Compiler<'m>, Diagnostic> {
        let error = |why| Diagnostic::error("E2001", Span::of(format!("@{entry}")), why);
        let calls = Calls::of(module, entry).map_err(error)?;
        if !calls.caches.is_empty() {
            let why = format!("`@{entry}` takes caches, and nothing is trained through them");
            return Err(error(why));
        }
        let function = module.function(entry);
        function.map_or(Ok(()), |f| calls.check_gradients(f)).map_err(error)?;
        let evaluated = evaluation::calls(module, entry, &calls).map_err(error)?;
        Ok(Compiler { module, calls, evaluated, layers: Layers::new(module) })
    }

    /// The calls of the entry.
    pub fn calls(&self) -> &Calls {
        &self.calls
    }

    /// The layers that were compiled so far, and more on demand.
    pub fn layers(&mut self) -> &mut Layers<'m> {
        &mut self.layers
    }

    /// The kernels that all programs so far launch.
    pub fn kernels(&self) -> &[Kernel] {
        self.layers.kernels()
    }

    /// The programs of a plan: stages outermost, then places on the tensor-parallel axis.
    ///
    /// # Errors
    /// `E2002` when the plan does not fit the module.
    pub fn programs(&mut self, plan: &Plan) -> Result<Vec<Program>, Diagnostic> {
        let classes = (0..plan.mesh.pp).flat_map(|s| (0..plan.mesh.tp).map(move |t| (s, t)));
        classes.map(|(stage, tensor)| self.program(plan, stage, tensor)).collect()
    }

    /// The program of one class.
    ///
    /// # Errors
    /// As [`Compiler::programs`].
    pub fn program(
        &mut self,
        plan: &Plan,
        stage: usize,
        tensor: usize,
    ) -> Result<Program, Diagnostic> {
        let class = Class::new(self, plan, stage, tensor);
        class.and_then(Class::program).map_err(|why| refused(plan, stage, tensor, why))
    }

    /// What the program of one class does before its first micro-batch and after its last one,
    /// without the work of compiling what is between.
    ///
    /// # Errors
    /// As [`Compiler::programs`].
    pub fn ends(&mut self, plan: &Plan, stage: usize, tensor: usize) -> Result<Ends, Diagnostic> {
        let Compiler { module, calls, layers, .. } = self;
        let class = Class::empty((*module, &*calls), plan, [stage, tensor], &mut layers.table);
        class.and_then(Class::ends).map_err(|why| refused(plan, stage, tensor, why))
    }
}

/// What a class does before its first micro-batch and after its last one, routine by routine.
#[derive(Clone, Debug, PartialEq)]
pub struct Ends {
    /// Clearing.
    pub begin: Vec<Routine>,
    /// Reductions and updates.
    pub finish: Vec<Routine>,
}

fn refused(plan: &Plan, stage: usize, tensor: usize, why: String) -> Diagnostic {
    Diagnostic::error(crate::lower::refusal_code(&why), Span::of(plan.model.clone()), why)
        .note(format!("compiling stage {stage}, tensor-parallel rank {tensor}"))
}

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
    pub(crate) dtype: DType,
    /// The calls of this stage.
    own: &'a [Call],
    /// The layer of each call: calls of one function differ in the gradients that they add.
    layers: Vec<Rc<Layer>>,
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
    /// The name of the loss sum in the layer that computes it.
    loss_name: String,
}

impl<'a> Class<'a> {
    fn new(
        compiler: &'a mut Compiler<'_>,
        plan: &'a Plan,
        stage: usize,
        tensor: usize,
    ) -> Result<Class<'a>, String> {
        let Compiler { module, calls, evaluated, layers: shared } = compiler;
        let (module, calls, evaluated) = (*module, &*calls, evaluated.as_ref());
        let own = own_calls(calls, plan, stage)?;
        let place = Place {
            sizes: [plan.mesh.dp, plan.mesh.tp],
            coordinates: [0, tensor],
            microbatch_size: plan.microbatch_size,
        };
        let crossing = crossings(calls, plan, stage);
        let adds = gradient_adds(own, &crossing[1], plan.microbatch_count);
        let mut make = |call: &Call, adds: &[bool]| {
            let decisions = plan.functions.get(&call.function);
            let decisions = decisions
                .ok_or_else(|| format!("the plan has nothing for `@{}`", call.function))?;
            let is_last = call.results.iter().any(|r| calls.results.contains(r));
            shared.layer(&call.function, decisions, place, adds, is_last)
        };
        let layers = own.iter().zip(&adds).map(|(call, adds)| make(call, adds));
        let layers: Vec<Rc<Layer>> = layers.collect::<Result<_, _>>()?;
        let relayed = relayed(calls, own, &crossing, &mut make)?;
        let named = own.iter().zip(&layers);
        let named = named.map(|(call, layer)| (call.function.clone(), Rc::clone(layer)));
        let trained: BTreeMap<String, Rc<Layer>> = named.collect();
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
    fn empty(
        (module, calls): (&Module, &'a Calls),
        plan: &'a Plan,
        place: [usize; 2],
        table: &'a mut KernelTable,
    ) -> Result<Class<'a>, String> {
        let store = store(module, calls, plan, place)?;
        Class::with((module, calls), plan, place, store, table)
    }

    fn with(
        (module, calls): (&Module, &'a Calls),
        plan: &'a Plan,
        [stage, tensor]: [usize; 2],
        store: Store,
        table: &'a mut KernelTable,
    ) -> Result<Class<'a>, String> {
        let own = own_calls(calls, plan, stage)?;
        Ok(Class {
            calls,
            plan,
            stage,
            tensor,
            store,
            table,
            dtype: plan.dtype,
            own,
            layers: Vec::new(),
            evaluation: None,
            routines: Vec::new(),
            crossing: crossings(calls, plan, stage),
            relayed: Vec::new(),
            clock: Clock { calls: own.len() },
            in_flight: (plan.mesh.pp - stage).min(plan.microbatch_count),
            values: BTreeMap::new(),
            cotangents: BTreeMap::new(),
            kept: BTreeMap::new(),
            frames: BTreeMap::new(),
            feeds: BTreeMap::new(),
            loss_name: loss_name(module, calls),
        })
    }

    fn ends(mut self) -> Result<Ends, String> {
        self.store.stats();
        let scalars = self.feed_buffer(Feed::Scalars);
        let (mut begin, mut finish) = (Vec::new(), Vec::new());
        let clears = must_clear(self.own, self.plan.microbatch_count);
        update::begin(&mut self, clears, &mut begin);
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

    fn program(mut self) -> Result<Program, String> {
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
        update::begin(&mut self, clears, &mut steps);
        self.schedule(&mut steps)?;
        update::finish(&mut self, scalars, &mut steps)?;
        let mut evaluate = Vec::new();
        update::begin_evaluation(&mut self, &mut evaluate);
        for microbatch in 0..self.plan.microbatch_count {
            self.forward(microbatch, Pass::Evaluation, &mut evaluate);
        }
        update::reduce_loss(&mut self, &mut evaluate);
        let (place, steps) = ([self.stage, self.tensor], [steps, evaluate]);
        Ok(self.store.into_program(&self.plan.model, place, steps, Vec::new()))
    }

    fn schedule(&mut self, steps: &mut Vec<Step>) -> Result<(), String> {
        let Plan { mesh, microbatch_count, .. } = self.plan;
        for turn in one_forward_one_backward(mesh.pp, self.stage, *microbatch_count) {
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

    fn allocate(&mut self) {
        self.store.stats();
        for call in 0..self.own.len() {
            for (position, operand) in self.own[call].operands.iter().enumerate() {
                match operand {
                    Operand::Value(value) if !self.is_own(*value) => {
                        self.allocate_slot(*value, 0, call, position);
                    }
                    Operand::Tokens => self.allocate_feed(Feed::Tokens),
                    Operand::Labels => self.allocate_feed(Feed::Labels),
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

    fn is_own(&self, value: ValueId) -> bool {
        self.own.iter().any(|call| call.results.contains(&value))
    }

    fn allocate_feed(&mut self, feed: Feed) {
        self.feed_buffer(feed);
    }

    fn feed_buffer(&mut self, feed: Feed) -> BufferId {
        if let Some(there) = self.feeds.get(&feed) {
            return *there;
        }
        let plan = self.plan;
        let (name, dtype, sizes) = match feed {
            Feed::Tokens => ("tokens".to_owned(), DType::I32, vec![plan.microbatch_size, plan.seq]),
            Feed::Labels => ("labels".to_owned(), DType::I32, vec![plan.microbatch_size, plan.seq]),
            Feed::Key { path } => (format!("key.{path}"), DType::U32, vec![4]),
            Feed::Scalars => ("scalars".to_owned(), self.dtype, vec![4]),
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
            let (dtype, sizes) = self.slot_type(call, param_count + result);
            let layer = &self.layer(call).halves.forward;
            let name = format!("{}.{}", own.function, layer.value(layer.results[result]).name);
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

    fn feed_all(&self, microbatch: usize, with_keys: bool, steps: &mut Vec<Step>) {
        for (feed, buffer) in &self.feeds {
            let is_meant = match feed {
                Feed::Scalars => false,
                Feed::Key { .. } => with_keys,
                Feed::Tokens | Feed::Labels | Feed::Position | Feed::Last => true,
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

    fn forward(&mut self, microbatch: usize, pass: Pass, steps: &mut Vec<Step>) {
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

    fn backward(&mut self, microbatch: usize, steps: &mut Vec<Step>) -> Result<(), String> {
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

    /// Whether tensor-parallel ranks hold terms of the loss rather than copies.
    pub(crate) fn loss_is_partial(&self) -> bool {
        let last = self.calls.calls.last();
        let sharding = last.and_then(|call| {
            let plan = self.plan.functions.get(&call.function)?;
            plan.shardings.get(self.loss_name.as_str())
        });
        sharding.is_some_and(|s| matches!(layouts(s)[1], Layout::Partial(_)))
    }

    /// The cotangent of the `at`-th floating-point result: one for the loss sum.
    fn cotangent_of_result(&self, call: usize, at: usize) -> BufferId {
        let value = self.own[call].results[at];
        match self.calls.results.iter().position(|r| *r == value) {
            Some(0) => self.store.constant(1),
            Some(_) => self.store.constant(0),
            None => self.cotangents[&value],
        }
    }
}

/// The calls of a stage.
fn own_calls<'a>(calls: &'a Calls, plan: &Plan, stage: usize) -> Result<&'a [Call], String> {
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
    Ok(Store::new(weights, Some(plan.optimizer.state_count()), plan.dtype))
}

/// The name of the loss sum in the layer that computes it.
fn loss_name(module: &Module, calls: &Calls) -> String {
    let name = calls.calls.last().and_then(|call| {
        let function = module.function(&call.function)?;
        let at = call.results.iter().position(|r| Some(r) == calls.results.first())?;
        Some(function.value(function.results[at]).name.clone())
    });
    name.unwrap_or_default()
}
