//! Evaluation: the loss without what only training does, such as dropout.
//!
//! Beside an entry `loss` there may be `loss_eval`: call for call the same, by layers that compute
//! the same values from fewer parameters. Their values lie as the plan has those of the same name
//! for training, and their results where those of training are, so that an evaluation needs no
//! memory of its own.

use std::collections::BTreeMap;
use std::sync::Arc;

use ir::autodiff::gradient_name;
use ir::{Function, Module, Node, Op, Plan, TensorType};

use crate::calls::{Call, Calls};
use crate::partition::{Place, Shardings};
use crate::prepare::evaluation_name;
use crate::refusal::Refusal;
use crate::routines::{Layer, Layers};
use crate::store::Store;

/// What a stage calls to evaluate.
pub(crate) struct Evaluation<'a> {
    /// The calls of the stage.
    own: &'a [Call],
    /// By the layer's name.
    layers: BTreeMap<&'a str, Forward>,
}

/// A layer that is called instead of one for training.
pub(crate) struct Forward {
    /// For each parameter, that of the training layer.
    pub(crate) params: Vec<usize>,
    /// Its routine in the program.
    pub(crate) routine: usize,
    /// Bytes of the frame of its calls.
    pub(crate) frame_bytes: u64,
}

/// The calls of the entry that evaluates, where there is one.
///
/// # Errors
/// A sentence, when its calls and weights are not those of the entry that is trained.
pub(crate) fn calls(
    module: &Module,
    entry: &str,
    training: &Calls,
) -> Result<Option<Calls>, String> {
    let name = evaluation_name(entry);
    if module.function(&name).is_none() {
        return Ok(None);
    }
    let calls = Calls::of(module, &name)?;
    let results = |calls: &Calls| calls.calls.iter().map(|c| c.results.len()).collect::<Vec<_>>();
    if calls.weights != training.weights || results(&calls) != results(training) {
        return Err(format!("`@{name}` has other weights or calls than `@{entry}`"));
    }
    Ok(Some(calls))
}

impl<'a> Evaluation<'a> {
    /// The layers for the calls `own` of a stage, which stand in for those of `training`.
    pub(crate) fn new(
        maker: &mut Maker<'_, '_>,
        own: &'a [Call],
        training: &[Call],
    ) -> Result<Evaluation<'a>, Refusal> {
        let mut evaluation = Evaluation { own, layers: BTreeMap::new() };
        for (call, trained) in own.iter().zip(training) {
            let name = call.function.as_str();
            if call.function != trained.function && !evaluation.layers.contains_key(name) {
                let layer = maker.layer(name, &trained.function);
                let why = |why: Refusal| why.map(|why| format!("{why}, evaluating `@{name}`"));
                evaluation.layers.insert(name, layer.map_err(why)?);
            }
        }
        Ok(evaluation)
    }

    /// What is called instead of the training layer in a call of the stage; none where that is it.
    pub(crate) fn layer(&self, call: usize) -> Option<&Forward> {
        self.layers.get(self.own[call].function.as_str())
    }
}

/// Makes the layers of one class of ranks.
pub(crate) struct Maker<'m, 'l> {
    pub(crate) module: &'m Module,
    pub(crate) plan: &'m Plan,
    pub(crate) place: Place,
    /// The layers of training.
    pub(crate) trained: &'m BTreeMap<String, Arc<Layer>>,
    pub(crate) store: &'m mut Store,
    pub(crate) layers: &'m mut Layers<'l>,
}

impl Maker<'_, '_> {
    fn layer(&mut self, name: &str, trained: &str) -> Result<Forward, Refusal> {
        let find = |name| self.module.function(name).ok_or("there is no such layer");
        let (function, training) = (find(name)?, find(trained)?);
        let layer = &self.trained[trained];
        let decisions = self.plan.functions.get(trained).ok_or("nothing is planned for it")?;
        let mut shardings = decisions.shardings.clone();
        // What the plan does not list is replicated, and known to be.
        let planned = self.module.function(&gradient_name(trained)).unwrap_or(training);
        for value in &planned.values {
            shardings.entry(value.name.clone()).or_default();
        }
        for (result, planned) in function.results.iter().zip(&training.results) {
            if let Some(sharding) = shardings.get(&training.value(*planned).name) {
                shardings.insert(function.value(*result).name.clone(), sharding.clone());
            }
        }
        follow_casts(function, &mut shardings);
        let adds = &layer.result_adds;
        let (routine, local) = self.layers.forward(name, &shardings, self.place, adds)?;
        let types = |f: &Function| -> Vec<TensorType> {
            f.results[..function.results.len()].iter().map(|r| f.ty(*r).clone()).collect()
        };
        if types(local) != types(&layer.halves.forward) {
            return Err(format!("its results are not those of `@{trained}`").into());
        }
        let params = params(function, training)?;
        let frame_bytes = routine.frame_bytes;
        Ok(Forward { params, routine: self.store.routine(&routine), frame_bytes })
    }
}

/// What is cast in one of both layers only lies as what it is cast from, or to.
fn follow_casts(function: &Function, shardings: &mut Shardings) {
    let casts = || function.nodes.iter().filter(|node| matches!(node.op, Op::Cast { .. }));
    let names = |node: &Node| {
        [node.operands[0], node.result()].map(|value| function.value(value).name.clone())
    };
    for [from, to] in casts().map(names) {
        if let (Some(there), false) = (shardings.get(&from).cloned(), shardings.contains_key(&to)) {
            shardings.insert(to, there);
        }
    }
    for [from, to] in casts().rev().map(names) {
        if let (Some(there), false) = (shardings.get(&to).cloned(), shardings.contains_key(&from)) {
            shardings.insert(from, there);
        }
    }
}

/// For each parameter, the training layer's of the same name.
fn params(function: &Function, trained: &Function) -> Result<Vec<usize>, String> {
    let position = |param| {
        let name = &function.value(param).name;
        let at = trained.params().position(|p| trained.value(p).name == *name);
        at.ok_or_else(|| format!("`@{}` has no parameter `%{name}`", trained.name))
    };
    function.params().map(position).collect()
}
