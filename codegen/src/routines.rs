//! The routines of classes of ranks: each layer forward and backward, once.
//!
//! Classes that run the same local function share its routines, and so do plans.

use std::collections::BTreeMap;
use std::sync::Arc;

use ir::autodiff::gradient_name;
use ir::plan::{FunctionPlan, Keep};
use ir::program::Routine;
use ir::{DType, Function, Module, Target, ValueId};
use kernels::pitch::Pitch;

use crate::canonicalise::put_reduced_dims_last;
use crate::chunk::{Chunks, Wide, cut_rows, cut_tokens};
use crate::codes::read_codes;
use crate::empty::remove_empty_nodes;
use crate::fuse::fuse;
use crate::grouping::Choice;
use crate::lower::padded::pitch_of;
use crate::lower::{KernelTable, Lowered, Slots, lower_routine};
use crate::materialise::store_unfit_leaves;
use crate::partition::{Local, Place, Shardings, bindings, partition_bound};
use crate::refusal::Refusal;
use crate::specialise::{Halves, Source, specialise};
use crate::unsharded::Unsharded;

/// What a plan decides about a call of a layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerDecisions<'p> {
    /// The shardings of the layer's values and of its gradient's.
    pub shardings: &'p Shardings,
    /// What is kept for the backward pass.
    pub keep: Keep,
    /// By parameter, whether its gradient is left to a routine of its own; none where it is empty.
    pub is_late: &'p [bool],
}

impl<'p> LayerDecisions<'p> {
    /// The decisions about a call, by its number among those of the layer.
    pub fn of(plan: &'p FunctionPlan, call: usize) -> LayerDecisions<'p> {
        LayerDecisions { shardings: &plan.shardings, keep: plan.keep_of(call), is_late: &[] }
    }
}

/// How the gradients of a layer's parameters are added up.
#[derive(Clone, Copy, Debug)]
pub struct GradientSums<'p> {
    /// By parameter, whether its gradient is added to what its slot holds.
    pub adds: &'p [bool],
    /// By parameter, the type to which its slot rounds, where that is not the gradient's own.
    pub rounded: &'p [Option<DType>],
}

/// A layer as one class of ranks runs it.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The layer's name.
    pub name: String,
    /// How many parameters it has.
    pub param_count: usize,
    /// The parameters that have a gradient, in order.
    pub differentiable: Vec<usize>,
    /// For each of them, whether the gradient is late.
    pub is_late: Vec<bool>,
    /// The forward and backward functions, before fusion.
    pub halves: Arc<Halves>,
    /// The forward routine: parameters, then results and kept values.
    pub forward: Routine,
    /// Which results of the primal are added to their slots.
    pub result_adds: Vec<bool>,
    /// The backward routine: parameters, then gradients of the differentiable parameters that are
    /// not late, and what is passed on to the routine of those that are.
    pub backward: Routine,
    /// The routine of late gradients: parameters, then the gradients.
    pub weights: Option<Routine>,
    /// What is known of the fusion of both halves, of what is in no pieces.
    pub choices: [Option<Choice>; 2],
}

impl Layer {
    /// How many results of the backward routine are passed on to that of late gradients.
    pub fn passed(&self) -> usize {
        let passed = |source: &Source| match source {
            Source::Passed(result) => Some(*result),
            Source::Param(_) | Source::Kept(_) => None,
        };
        let late = self.halves.late.iter().flat_map(|late| &late.params);
        let first = late.filter_map(passed).min();
        first.map_or(0, |first| self.halves.backward.results.len() - first)
    }
}

/// What a fused layer depends on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cut {
    /// The local gradient function.
    local: usize,
    keep: Keep,
    /// By differentiable parameter, whether its gradient is late.
    is_late: Vec<bool>,
    unsharded: Unsharded,
}

/// What the routines of a layer depend on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Variant {
    /// The fused layer.
    fused: usize,
    adds: Vec<bool>,
    rounded: Vec<Option<DType>>,
    accumulate_results: bool,
}

/// The layers of one module, compiled for any number of places and plans, each once.
#[derive(Debug)]
pub struct Layers<'m> {
    module: &'m Module,
    pub(crate) table: KernelTable,
    /// The module with bound sizes, by the samples of a micro-batch over all ranks.
    bound: BTreeMap<usize, Module>,
    shardings: BTreeMap<Shardings, usize>,
    /// The local functions, no two of them equal.
    locals: Vec<Local>,
    /// Where each of them is, by its bits.
    locals_by_bytes: BTreeMap<Vec<u8>, usize>,
    /// By function, shardings and place, the local function.
    places: BTreeMap<(String, usize, Place), usize>,
    /// The fused layers, in the order in which they were made.
    fused: Vec<Arc<FusedLayer>>,
    cuts: BTreeMap<Cut, usize>,
    layers: BTreeMap<Variant, Arc<Layer>>,
    /// Routines of what only runs forward, by local function, added results and what all ranks
    /// decide alike.
    forward: BTreeMap<(usize, Vec<bool>, Unsharded), Arc<Routine>>,
}

impl<'m> Layers<'m> {
    /// No layers yet, of a module.
    pub fn new(module: &'m Module) -> Layers<'m> {
        Layers {
            module,
            table: KernelTable::default(),
            bound: BTreeMap::new(),
            shardings: BTreeMap::new(),
            locals: Vec::new(),
            locals_by_bytes: BTreeMap::new(),
            places: BTreeMap::new(),
            fused: Vec::new(),
            cuts: BTreeMap::new(),
            layers: BTreeMap::new(),
            forward: BTreeMap::new(),
        }
    }

    /// The kernels of all layers.
    pub fn kernels(&self) -> &[kernels::Kernel] {
        &self.table.kernels
    }

    /// The layer of one class of ranks.
    ///
    /// With `accumulate_results` its results are added to their slots; gradients are as `sums`
    /// says.
    ///
    /// # Errors
    /// When the plan does not fit the layer or an op has no kernel.
    pub fn layer(
        &mut self,
        name: &str,
        decisions: LayerDecisions<'_>,
        place: Place,
        sums: GradientSums<'_>,
        accumulate_results: bool,
    ) -> Result<Arc<Layer>, Refusal> {
        let fused = self.fused_at(name, decisions, place)?;
        let primal = self.primal(name)?;
        let (adds, rounded) = (sums.adds.to_vec(), sums.rounded.to_vec());
        let variant = Variant { fused, adds, rounded, accumulate_results };
        if let Some(there) = self.layers.get(&variant) {
            return Ok(Arc::clone(there));
        }
        let layer = lower_layer(primal, &self.fused[fused], &variant, &mut self.table)?;
        let layer = Arc::new(layer);
        self.layers.insert(variant, Arc::clone(&layer));
        Ok(layer)
    }

    /// The layer of one class of ranks before it is lowered: what it adds to does not matter here.
    ///
    /// # Errors
    /// When the plan does not fit the layer.
    pub fn fused(
        &mut self,
        name: &str,
        decisions: LayerDecisions<'_>,
        place: Place,
    ) -> Result<Arc<FusedLayer>, Refusal> {
        let at = self.fused_at(name, decisions, place)?;
        Ok(Arc::clone(&self.fused[at]))
    }

    /// The number of a fused layer.
    fn fused_at(
        &mut self,
        name: &str,
        decisions: LayerDecisions<'_>,
        place: Place,
    ) -> Result<usize, Refusal> {
        let (gradient, primal) = (gradient_name(name), self.primal(name)?);
        if self.module.function(&gradient).is_none() {
            return Err(format!("`@{name}` has no gradient function").into());
        }
        let LayerDecisions { shardings, keep, is_late } = decisions;
        let local = self.local(&gradient, shardings, place)?;
        let late = |param: ValueId| is_late.get(param.index()).copied().unwrap_or(false);
        let is_late = primal.differentiable_params().map(late).collect();
        let cut =
            Cut { local, keep, is_late, unsharded: self.unsharded(&gradient, shardings, place) };
        if let Some(there) = self.cuts.get(&cut) {
            return Ok(*there);
        }
        self.fused.push(Arc::new(FusedLayer::new(primal, &self.locals[local], &cut)));
        let at = self.fused.len() - 1;
        self.cuts.insert(cut, at);
        Ok(at)
    }

    fn primal(&self, name: &str) -> Result<&'m Function, Refusal> {
        let primal = self.module.function(name);
        Ok(primal.ok_or_else(|| format!("there is no layer `@{name}`"))?)
    }

    /// The routine of a function that only runs forward, with its local function.
    ///
    /// # Errors
    /// Those of [`Layers::layer`].
    pub(crate) fn forward(
        &mut self,
        name: &str,
        shardings: &Shardings,
        place: Place,
        adds: &[bool],
    ) -> Result<(Arc<Routine>, &Function), Refusal> {
        let local = self.local(name, shardings, place)?;
        let unsharded = self.unsharded(name, shardings, place);
        let Local { function, module, .. } = &self.locals[local];
        let key = (local, adds.to_vec(), unsharded);
        if let Some(there) = self.forward.get(&key) {
            return Ok((Arc::clone(there), function));
        }
        let own = (function, module);
        let made = Arc::new(routine_in_pieces(own, &key.2, adds, &[], &mut self.table)?);
        self.forward.insert(key, Arc::clone(&made));
        Ok((made, function))
    }

    /// What follows from a whole function, whose sizes were bound for a place.
    fn unsharded(&self, name: &str, shardings: &Shardings, place: Place) -> Unsharded {
        let bound = self.bound.get(&place.samples());
        let function = bound.and_then(|bound| bound.function(name));
        function
            .map_or_else(Unsharded::default, |function| Unsharded::of(function, shardings, place))
    }

    /// The local function of a place.
    fn local(&mut self, name: &str, shardings: &Shardings, place: Place) -> Result<usize, String> {
        let known = self.shardings.get(shardings).copied();
        let interned = known.unwrap_or_else(|| {
            let next = self.shardings.len();
            self.shardings.insert(shardings.clone(), next);
            next
        });
        let key = (name.to_owned(), interned, place);
        if let Some(there) = self.places.get(&key) {
            return Ok(*there);
        }
        let samples = place.samples();
        let bound = self.bound.entry(samples).or_insert_with(|| {
            let mut bound = self.module.clone();
            bound.bind(&bindings(place));
            bound
        });
        let global = bound.function(name).ok_or_else(|| format!("there is no layer `@{name}`"))?;
        let local = partition_bound(bound, global, shardings, place, &[])?;
        let bytes = postcard::to_stdvec(&local).expect("a function holds numbers and lists");
        let at = *self.locals_by_bytes.entry(bytes).or_insert_with(|| {
            self.locals.push(local);
            self.locals.len() - 1
        });
        self.places.insert(key, at);
        Ok(at)
    }
}

/// A layer as one class of ranks runs it, before it is lowered.
#[derive(Debug)]
pub struct FusedLayer {
    /// The forward and backward functions, before fusion.
    pub halves: Arc<Halves>,
    /// The halves in their order, as calls of kernels.
    pub fused: [Fused; 2],
    /// What is left of the backward pass.
    late: Option<Fused>,
    /// By differentiable parameter, whether its gradient is there.
    is_late: Vec<bool>,
}

impl FusedLayer {
    fn new(primal: &Function, local: &Local, cut: &Cut) -> FusedLayer {
        let (param_count, primal_results) = (primal.param_count, primal.results.len());
        let ends = [param_count, primal_results];
        let halves = specialise(&local.function, &local.module, ends, cut.keep, &cut.is_late);
        let fused = |part: &Function| fused(part, &local.module, &cut.unsharded);
        let late = halves.late.as_ref().map(|late| fused(&late.function));
        let fused = [&halves.forward, &halves.backward].map(fused);
        FusedLayer { halves: Arc::new(halves), fused, late, is_late: cut.is_late.clone() }
    }
}

/// For each result of the forward half that is kept, the pitch of its rows, if they are padded.
fn pitches(halves: &Halves, target: Option<Target>) -> Vec<Option<Pitch>> {
    let Halves { forward, primal_results, .. } = halves;
    let pitch = |(at, result): (usize, &ValueId)| {
        pitch_of(forward.ty(*result), target).filter(|_| at >= *primal_results)
    };
    forward.results.iter().enumerate().map(pitch).collect()
}

/// The result of the forward half that a parameter is.
fn kept(params: &[Source], param: usize) -> Option<usize> {
    match params.get(param) {
        Some(Source::Kept(result)) => Some(*result),
        Some(Source::Param(_) | Source::Passed(_)) | None => None,
    }
}

/// The pitches of all slots of a part of the backward pass, where kept values have `pitches`.
fn padded_slots(params: &[Source], pitches: &[Option<Pitch>]) -> Vec<Option<Pitch>> {
    let slots = 0..params.len();
    slots.map(|param| kept(params, param).and_then(|result| pitches[result])).collect()
}

/// How the gradients of parameters are added up, of those that are late or of the others: whether
/// each is added to what its slot holds, and the type to which its slot rounds.
fn sums(
    differentiable: &[usize],
    fused: &FusedLayer,
    variant: &Variant,
    is_late: bool,
) -> (Vec<bool>, Vec<Option<DType>>) {
    let params = differentiable.iter().zip(&fused.is_late);
    let params = params.filter(|(_, late)| **late == is_late);
    params.map(|(param, _)| (variant.adds[*param], variant.rounded[*param])).unzip()
}

/// Lowers both halves of a layer, and what is left of the second.
fn lower_layer(
    primal: &Function,
    fused: &FusedLayer,
    variant: &Variant,
    table: &mut KernelTable,
) -> Result<Layer, Refusal> {
    let halves = Arc::clone(&fused.halves);
    let differentiable: Vec<usize> =
        primal.differentiable_params().map(ir::ValueId::index).collect();
    let result_adds = vec![variant.accumulate_results; primal.results.len()];
    let mut forward_adds = result_adds.clone();
    forward_adds.resize(halves.forward.results.len(), false);
    let (mut adds, mut rounded) = sums(&differentiable, fused, variant, false);
    adds.resize(halves.backward.results.len(), false);
    rounded.resize(halves.backward.results.len(), None);
    let (late_adds, late_rounded) = sums(&differentiable, fused, variant, true);
    let late_params = halves.late.as_ref().map_or(&[][..], |late| &late.params);
    let [front, back] = &fused.fused;
    let choices = [front.choice, back.choice];
    // Kept values have padded rows where both halves can read and write them.
    let mut pitches = pitches(&halves, front.unsharded.target);
    let (forward, backward, weights) = loop {
        let of_front = std::iter::repeat_n(None, halves.forward.param_count);
        let of_front: Vec<_> = of_front.chain(pitches.iter().copied()).collect();
        let of_back = padded_slots(&halves.backward_params, &pitches);
        let slots = Slots { adds: &forward_adds, padded: &of_front, ..Slots::default() };
        let forward = front.lower(slots, table);
        let slots = Slots { adds: &adds, rounded: &rounded, padded: &of_back, in_place: &[] };
        let backward = back.lower(slots, table);
        let of_late = padded_slots(late_params, &pitches);
        let (adds, rounded) = (&late_adds, &late_rounded);
        let slots = Slots { adds, rounded, padded: &of_late, in_place: &[] };
        let late = fused.late.as_ref().map(|late| late.lower(slots, table)).transpose();
        // What has no kernel in either half is said at once.
        let (forward, backward) = match (forward, backward) {
            (Ok(forward), Ok(backward)) => (forward, backward),
            (Err(first), Err(second)) => return Err(first.and(&second)),
            (Err(why), _) | (_, Err(why)) => return Err(why),
        };
        let late = late?;
        let first = halves.forward.param_count;
        let of_results = forward.unpadded.iter().map(|slot| Some(slot - first));
        let of_params = backward.unpadded.iter().map(|slot| kept(&halves.backward_params, *slot));
        let of_late = late.iter().flat_map(|late| &late.unpadded);
        let of_late = of_late.map(|slot| kept(late_params, *slot));
        let left: Vec<usize> = of_results.chain(of_params).chain(of_late).flatten().collect();
        if left.is_empty() {
            break (forward.routine, backward.routine, late.map(|late| late.routine));
        }
        left.into_iter().for_each(|result| pitches[result] = None);
    };
    Ok(Layer {
        name: primal.name.clone(),
        param_count: primal.param_count,
        differentiable,
        is_late: fused.is_late.clone(),
        halves,
        forward,
        result_adds,
        backward,
        weights,
        choices,
    })
}

/// Fuses and lowers one local function. A result that `accumulate` marks is added to what its slot
/// holds; one for which `in_place` names a parameter updates that.
///
/// # Errors
/// All that has no kernel.
pub fn routine(
    function: &Function,
    composites: &Module,
    accumulate: &[bool],
    in_place: &[Option<usize>],
    table: &mut KernelTable,
) -> Result<Routine, Refusal> {
    let unsharded = Unsharded { wide: Wide::of(function, None), ..Unsharded::default() };
    routine_in_pieces((function, composites), &unsharded, accumulate, in_place, table)
}

/// Lowers a function as [`routine`] does, with what is decided for all ranks.
pub(crate) fn routine_in_pieces(
    (function, composites): (&Function, &Module),
    unsharded: &Unsharded,
    accumulate: &[bool],
    in_place: &[Option<usize>],
    table: &mut KernelTable,
) -> Result<Routine, Refusal> {
    let slots = Slots { adds: accumulate, in_place, ..Slots::default() };
    Ok(fused(function, composites, unsharded).lower(slots, table)?.routine)
}

/// A function whose fusible nodes are calls of kernels.
#[derive(Debug)]
pub struct Fused {
    /// The function.
    pub function: Function,
    /// The composites and the kernels that it calls.
    pub module: Module,
    /// What is known of the choice of kernels; none where there are too many nodes to tell.
    pub choice: Option<Choice>,
    chunks: Vec<Chunks>,
    unsharded: Unsharded,
}

impl Fused {
    fn lower(&self, slots: Slots<'_>, table: &mut KernelTable) -> Result<Lowered, Refusal> {
        let Fused { function, module, chunks, unsharded, .. } = self;
        lower_routine((function, module), (chunks, unsharded), slots, table)
            .map_err(|refusal| refusal.map(|why| format!("`@{}`: {why}", function.name)))
    }
}

/// Groups the nodes of one local function.
fn fused(function: &Function, composites: &Module, unsharded: &Unsharded) -> Fused {
    let mut module = composites.clone();
    let mut function = function.clone();
    remove_empty_nodes(&mut function);
    ir::pass::remove_common_nodes(&mut function);
    read_codes(&mut function, composites, unsharded.target);
    let mut chunks = Vec::new();
    let mut take = |function: &mut Function, cut: Option<(Function, Chunks)>| {
        let Some((whole, part)) = cut else { return };
        *function = whole;
        chunks.push(part);
    };
    if !unsharded.is_piece {
        let rows = cut_rows(&function, composites, &unsharded.wide);
        take(&mut function, rows);
        let tokens = cut_tokens(&function, &mut module, unsharded.target);
        take(&mut function, tokens);
    }
    put_reduced_dims_last(&mut function);
    store_unfit_leaves(&mut function, &module);
    let (function, choice) = fuse(&function, &mut module, unsharded.target);
    Fused { function, module, choice, chunks, unsharded: unsharded.clone() }
}
