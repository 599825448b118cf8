//! Assembly for inference: entries that only run forward → one program per class of ranks.
//!
//! A program holds several entries, such as one per length of prompt, which share weights, and KV
//! caches where their batch sizes are equal: what persists comes first in the arena, then what a
//! call needs, packed by lifetime as if the entries ran one after the other. A cache is updated in
//! place: the result that replaces it has its buffer.

use std::collections::BTreeMap;

use ir::program::{Contents, Entry, Feed, Program, Step};
use ir::{DType, Diagnostic, Function, Module, Plan, Span, TensorType, ValueId};

use crate::calls::{Call, Calls, Operand};
use crate::chunk::Wide;
use crate::compile::Compiled;
use crate::executable::executed_target;
use crate::lower::KernelTable;
use crate::partition::{Place, bindings, partition_for_output};
use crate::refusal::Refusal;
use crate::routines::routine_in_pieces;
use crate::store::{BufferId, Store};
use crate::unsharded::Unsharded;
use crate::weights::weight_places;

/// An entry of a module, and what it is called in the program.
#[derive(Clone, Debug)]
pub struct Forward<'a> {
    /// The name in the program.
    pub name: String,
    /// The module, prepared for inference.
    pub module: &'a Module,
    /// The entry in it.
    pub entry: &'a str,
    /// Samples of a call on one rank.
    pub samples: usize,
}

/// The entries of a replica: prefill of one sequence for each module, that is, for each bucket;
/// then, for each number of slots above one, a decode step of the first module, whose bucket is
/// one token, with a batch of that many sequences.
pub fn forwards_of<'a>(
    modules: &'a [(usize, Module)],
    entry: &'a str,
    slots: &[usize],
) -> Vec<Forward<'a>> {
    let alone = modules.iter().map(|(tokens, module)| {
        let name = format!("{entry}.{tokens}");
        Forward { name, module, entry, samples: 1 }
    });
    let side_by_side = slots.iter().filter(|samples| **samples > 1).map(|samples| {
        let (tokens, module) = &modules[0];
        let name = format!("{entry}.{tokens}x{samples}");
        Forward { name, module, entry, samples: *samples }
    });
    alone.chain(side_by_side).collect()
}

/// Compiles one entry that only runs forward: `logits`, or `decode` of a module for decoding.
///
/// # Errors
/// Those of [`compile_entries`].
pub fn compile_inference(
    module: &Module,
    entry: &str,
    plan: &Plan,
) -> Result<Compiled, Diagnostic> {
    let samples = plan.microbatch_size;
    compile_entries(&[Forward { name: entry.to_owned(), module, entry, samples }], plan)
}

/// Compiles entries that only run forward and share weights and caches, all under one plan: its
/// mesh, its shardings and its stages. There is one micro-batch, and the numbers of samples and of
/// tokens are those of each entry. A result that is no cache is whole on all tensor-parallel ranks.
/// Of a plan of inference the programs are those of one replica, which all of them run.
///
/// # Errors
/// `E2001` when an entry is no list of calls, `E2002` when the plan does not fit an entry, or the
/// entries do not share what they should.
pub fn compile_entries(entries: &[Forward<'_>], plan: &Plan) -> Result<Compiled, Diagnostic> {
    if plan.is_inference() && plan.mesh.dp > 1 {
        return compile_entries(entries, &plan.replica());
    }
    let mut calls = Vec::new();
    for forward in entries {
        let found = Calls::of(forward.module, forward.entry);
        let at = || Span::of(format!("@{}", forward.entry));
        calls.push(found.map_err(|why| Diagnostic::error("E2001", at(), why))?);
    }
    let mut table = KernelTable::default();
    let mut programs = Vec::new();
    for stage in 0..plan.mesh.pp {
        for tensor in 0..plan.mesh.tp {
            let program = program(entries, &calls, plan, [stage, tensor], &mut table);
            programs.push(program.map_err(|why| {
                Diagnostic::error(why.code(), Span::of(plan.model.clone()), why.to_string())
                    .note(format!("compiling stage {stage}, tensor-parallel rank {tensor}"))
            })?);
        }
    }
    Compiled::new(programs, table.kernels).checked(plan)
}

fn program(
    entries: &[Forward<'_>],
    calls: &[Calls],
    plan: &Plan,
    [stage, tensor]: [usize; 2],
    table: &mut KernelTable,
) -> Result<Program, Refusal> {
    let mut weights = None;
    for (forward, calls) in entries.iter().zip(calls) {
        let here = weight_places(forward.module, calls, plan, stage, tensor)?;
        if weights.get_or_insert_with(|| here.clone()) != &here {
            return Err(
                format!("`{}` has other weights than the entry before", forward.name).into()
            );
        }
    }
    let store = Store::new(weights.unwrap_or_default(), plan.precision);
    let place = Place {
        sizes: [plan.mesh.dp, 1, 1, plan.mesh.tp],
        takes_tp: false,
        coordinates: [0, 0, 0, tensor],
        microbatch_size: plan.microbatch_size,
        target: executed_target(plan),
    };
    let mut class = Class {
        plan,
        stage,
        place,
        store,
        table,
        caches: BTreeMap::new(),
        feeds: BTreeMap::new(),
        now: 0,
    };
    let mut compiled = Vec::new();
    for (forward, calls) in entries.iter().zip(calls) {
        class.place.microbatch_size = forward.samples;
        let entry = Work::new(&mut class, forward, calls)?.entry();
        let name = &forward.name;
        compiled.push(entry.map_err(|why| why.map(|why| format!("{why}, in `{name}`")))?);
    }
    let steps = [Vec::new(), Vec::new()];
    Ok(class.store.into_program(&plan.model, [stage, 0, tensor], steps, compiled))
}

/// What the entries of a class of ranks share.
struct Class<'a> {
    plan: &'a Plan,
    stage: usize,
    place: Place,
    store: Store,
    table: &'a mut KernelTable,
    /// By number and sizes.
    caches: BTreeMap<(usize, Vec<usize>), BufferId>,
    /// By what is fed, and its sizes.
    feeds: BTreeMap<(Feed, Vec<usize>), BufferId>,
    /// The moment at which the next entry begins.
    now: usize,
}

/// A layer as the class runs it.
struct Layer {
    function: Function,
    routine: usize,
    frame_bytes: u64,
}

/// The work on one entry.
struct Work<'a, 'c> {
    class: &'c mut Class<'a>,
    forward: &'c Forward<'c>,
    calls: &'c Calls,
    /// The calls of this stage.
    own: &'c [Call],
    layers: BTreeMap<&'c str, Layer>,
    values: BTreeMap<ValueId, BufferId>,
    outputs: BTreeMap<usize, BufferId>,
    feeds: BTreeMap<Feed, BufferId>,
}

impl<'a, 'c> Work<'a, 'c> {
    fn new(
        class: &'c mut Class<'a>,
        forward: &'c Forward<'c>,
        calls: &'c Calls,
    ) -> Result<Work<'a, 'c>, Refusal> {
        let ends = &class.plan.stage_ends;
        let begin = if class.stage == 0 { 0 } else { ends[class.stage - 1] };
        if ends.last() != Some(&calls.calls.len()) {
            let (calls, last) = (calls.calls.len(), ends.last().copied().unwrap_or(0));
            return Err(format!("stages end at call {last} of {calls}").into());
        }
        let own = &calls.calls[begin..ends[class.stage]];
        Ok(Work {
            class,
            forward,
            calls,
            own,
            layers: BTreeMap::new(),
            values: BTreeMap::new(),
            outputs: BTreeMap::new(),
            feeds: BTreeMap::new(),
        })
    }

    /// The entry's instructions. Its moments are: the arrival, each call, the departure.
    fn entry(mut self) -> Result<Entry, Refusal> {
        for call in self.own {
            if !self.layers.contains_key(call.function.as_str()) {
                let layer = self.layer(call)?;
                self.layers.insert(&call.function, layer);
            }
        }
        let begin = self.class.now;
        let end = begin + self.own.len() + 1;
        self.class.now = end + 1;
        let mut calls = Vec::new();
        for (at, call) in self.own.iter().enumerate() {
            calls.push(self.call(call, begin + 1 + at, [begin, end]));
        }
        let feeds = self.feeds.iter();
        let mut steps: Vec<Step> = feeds
            .map(|(feed, buffer)| Step::Feed { feed: *feed, microbatch: 0, buffer: *buffer })
            .collect();
        if let Some(value) = self.arriving() {
            steps.push(Step::Receive { from: self.class.stage - 1, buffer: self.values[&value] });
        }
        steps.extend(calls);
        if let Some(value) = self.departing() {
            steps.push(Step::Send { to: self.class.stage + 1, buffer: self.values[&value] });
        }
        let outputs = self.outputs.into_values().collect();
        Ok(Entry { name: self.forward.name.clone(), steps, outputs })
    }

    /// Partitions, fuses and lowers the layer of a call.
    fn layer(&mut self, call: &Call) -> Result<Layer, Refusal> {
        let Forward { module, .. } = self.forward;
        let function = module.function(&call.function);
        let function = function.ok_or_else(|| format!("there is no layer `@{}`", call.function))?;
        let decisions = self.class.plan.functions.get(&call.function);
        let decisions =
            decisions.ok_or_else(|| format!("the plan has nothing for `@{}`", call.function))?;
        let is_output: Vec<bool> =
            call.results.iter().map(|result| self.output_index(*result).is_some()).collect();
        let in_place: Vec<Option<usize>> = call
            .results
            .iter()
            .map(|result| {
                let cache = Operand::Cache(self.calls.replaced_cache(*result)?);
                call.operands.iter().position(|operand| *operand == cache)
            })
            .collect();
        let (shardings, place) = (&decisions.shardings, self.class.place);
        let mut local = partition_for_output(module, function, shardings, place, &is_output)?;
        local.function.name = format!("{}.{}", self.forward.name, call.function);
        let mut whole = function.clone();
        whole.bind(&bindings(place));
        let wide = Wide::of(&local.function, place.target);
        let unsharded = Unsharded { wide, ..Unsharded::of(&whole, shardings, place) };
        let own = (&local.function, &local.module);
        let lowered = routine_in_pieces(own, &unsharded, &[], &in_place, self.class.table)?;
        let frame_bytes = lowered.frame_bytes;
        let routine = self.class.store.routine(&lowered);
        Ok(Layer { function: local.function, routine, frame_bytes })
    }

    /// The place of a value among the entry's results that are no caches.
    fn output_index(&self, value: ValueId) -> Option<usize> {
        let count = self.calls.results.len() - self.calls.caches.len();
        self.calls.results[..count].iter().position(|result| *result == value)
    }

    fn call(&mut self, call: &'c Call, moment: usize, [begin, end]: [usize; 2]) -> Step {
        let mut slots = Vec::new();
        for (at, operand) in call.operands.iter().enumerate() {
            let ty = self.slot_type(call, at);
            slots.push(match operand {
                Operand::Weight(weight) => self.class.store.param(*weight),
                Operand::Cache(cache) => self.class.cache(*cache, self.calls, &ty),
                Operand::Tokens => self.feed(Feed::Tokens, &ty),
                Operand::Labels => self.feed(Feed::Labels, &ty),
                Operand::Documents => self.feed(Feed::Documents, &ty),
                Operand::Key(path) => self.feed(Feed::Key { path: *path }, &ty),
                Operand::Position => self.feed(Feed::Position, &ty),
                Operand::Last => self.feed(Feed::Last, &ty),
                Operand::Value(value) => self.value(*value, call, &ty, [begin, end]),
            });
        }
        for (at, result) in call.results.iter().enumerate() {
            let ty = self.slot_type(call, call.operands.len() + at);
            let cache = self.calls.replaced_cache(*result);
            slots.push(if let Some(cache) = cache {
                self.class.cache(cache, self.calls, &ty)
            } else if let Some(index) = self.output_index(*result) {
                let name = &self.calls_name(*result, call);
                let buffer = self.class.transient(name, Contents::Output, &ty, (moment, end));
                self.outputs.insert(index, buffer);
                buffer
            } else {
                self.value(*result, call, &ty, [moment, end])
            });
        }
        let layer = &self.layers[call.function.as_str()];
        let (routine, bytes) = (layer.routine, layer.frame_bytes);
        let name = format!("{}.frame", call.function);
        let frame = (bytes > 0).then(|| self.class.store.frame(&name, bytes, moment));
        Step::Call { routine, slots, frame }
    }

    /// The local type of a parameter of a call, or of a result after them.
    fn slot_type(&self, call: &Call, slot: usize) -> TensorType {
        let function = &self.layers[call.function.as_str()].function;
        let value = match slot.checked_sub(function.param_count) {
            Some(result) => function.results[result],
            None => ValueId(slot as u32),
        };
        function.ty(value).clone()
    }

    /// The name of a result in the layer that computes it.
    fn calls_name(&self, result: ValueId, call: &Call) -> String {
        let function = &self.layers[call.function.as_str()].function;
        let at = call.results.iter().position(|r| *r == result).unwrap_or(0);
        function.value(function.results[at]).name.clone()
    }

    fn feed(&mut self, feed: Feed, ty: &TensorType) -> BufferId {
        let buffer = self.class.feed(feed, ty);
        self.feeds.insert(feed, buffer);
        buffer
    }

    /// The buffer of a value between calls: from `from` to its last reader, or to the end where
    /// that is another stage.
    fn value(
        &mut self,
        value: ValueId,
        call: &Call,
        ty: &TensorType,
        [from, end]: [usize; 2],
    ) -> BufferId {
        if let Some(there) = self.values.get(&value) {
            return *there;
        }
        let begin = end - self.own.len() - 1;
        let takes = |call: &Call| call.operands.contains(&Operand::Value(value));
        let last = match self.own.iter().rposition(takes) {
            Some(at) if !self.is_read_elsewhere(value) => begin + 1 + at,
            _ => end,
        };
        let name = format!("{}.x", call.function);
        let buffer = self.class.transient(&name, Contents::Activation, ty, (from, last));
        self.values.insert(value, buffer);
        buffer
    }

    fn is_own(&self, value: ValueId) -> bool {
        self.own.iter().any(|call| call.results.contains(&value))
    }

    fn is_read_elsewhere(&self, value: ValueId) -> bool {
        let readers = |calls: &[Call]| {
            calls.iter().filter(|c| c.operands.contains(&Operand::Value(value))).count()
        };
        self.is_own(value) && readers(&self.calls.calls) > readers(self.own)
    }

    /// The value that comes from the stage before.
    fn arriving(&self) -> Option<ValueId> {
        self.values.keys().copied().find(|value| !self.is_own(*value))
    }

    /// The value that goes to the stage after.
    fn departing(&self) -> Option<ValueId> {
        self.values.keys().copied().find(|value| self.is_read_elsewhere(*value))
    }
}

impl Class<'_> {
    /// A KV cache of the entries of one batch size. The caches of each further batch size are
    /// numbered behind those that exist.
    fn cache(&mut self, index: usize, calls: &Calls, ty: &TensorType) -> BufferId {
        let key = (index, sizes(ty));
        if let Some(there) = self.caches.get(&key) {
            return *there;
        }
        let before = self.caches.keys().filter(|(other, _)| *other == index).count();
        let contents = Contents::Cache(before * calls.caches.len() + index);
        let name = &calls.caches[index];
        let buffer = self.store.persistent(name, contents, ty.dtype, key.1.clone());
        self.caches.insert(key, buffer);
        buffer
    }

    fn feed(&mut self, feed: Feed, ty: &TensorType) -> BufferId {
        let key = (feed, sizes(ty));
        if let Some(there) = self.feeds.get(&key) {
            return *there;
        }
        let name = match feed {
            Feed::Tokens => "tokens".to_owned(),
            Feed::Labels => "labels".to_owned(),
            Feed::Documents => "documents".to_owned(),
            Feed::Key { path } => format!("key.{path}"),
            Feed::Scalars => "scalars".to_owned(),
            Feed::Position => "position".to_owned(),
            Feed::Last => "last".to_owned(),
        };
        let contents = Contents::Feed(feed);
        let buffer = self.store.persistent(&name, contents, fed_type(feed, ty), sizes(ty));
        self.feeds.insert(key, buffer);
        buffer
    }

    fn transient(
        &mut self,
        name: &str,
        contents: Contents,
        ty: &TensorType,
        span: (usize, usize),
    ) -> BufferId {
        self.store.transient(name, contents, ty.dtype, sizes(ty), span)
    }
}

/// What the host writes: keys are words, everything else is numbers.
fn fed_type(feed: Feed, ty: &TensorType) -> DType {
    match feed {
        Feed::Key { .. } => DType::U32,
        Feed::Scalars => ty.dtype,
        Feed::Tokens | Feed::Labels | Feed::Documents | Feed::Position | Feed::Last => DType::I32,
    }
}

fn sizes(ty: &TensorType) -> Vec<usize> {
    ty.sizes().expect("local sizes are bound")
}
