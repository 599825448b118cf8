//! Shardings inside functions: for each layer and its gradient, how every value lies on `dp`, `cp`,
//! `tp` and `ep`.
//!
//! On `dp` a rule decides: what is counted by samples is cut by samples, sums over them stay
//! partial; so on `cp`, by tokens of a sample. Over `ep` the weights of experts are cut by experts,
//! and all else lies as it would without it; where `ep` takes `tp`, tokens are cut over `tp` where
//! experts compute with them. On `tp` a beam search over the nodes in order does,
//! with the op table's factors as options (`beam`). Layers meet in their boundary activations,
//! whose layout is given, and in shared weights, whose layout is enumerated; so the sum of the
//! layers' minima is the minimum.
//!
//! What is found can be derived again from the shardings alone: `codegen::partition::choose` takes
//! the same options, which the search asks for.

mod beam;
mod context;
mod data;
mod experts;
mod problem;
mod roles;
mod together;
mod work;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};

use ir::sharding::pieces;
use ir::{Axis, Bindings, Diagnostic, Dim, ExpertParallel, Layout, Module, Sharding, Span};
use serde::{Deserialize, Serialize};

use crate::link::Link;
use context::ContextLayouts;

pub use beam::BEAM_WIDTH;
pub use experts::experts_of;
pub use roles::{Layer, Role, layers};

/// How fast a rank computes and moves: what the search weighs options by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Floating-point operations per second of products.
    pub flops_per_s: f64,
    /// Bytes per second to and from memory.
    pub memory_bytes_per_s: f64,
    /// The links of the `tp` axis.
    pub link: Link,
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The module: composites that have no factors are inlined, gradient functions are there.
    pub module: &'a Module,
    /// The entry: a chain of calls of layers. `B` is unbound.
    pub entry: &'a str,
    /// Data-parallel ranks.
    pub dp: usize,
    /// Context-parallel ranks.
    pub cp: usize,
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// How ranks share experts.
    pub experts: ExpertParallel,
    /// Samples of a micro-batch on one rank.
    pub microbatch_size: usize,
    /// Whether activations between layers are cut over `tp` along the sequence, or whole.
    pub sequence: bool,
    /// What options are weighed by.
    pub rates: Rates,
}

/// The shardings of each layer's values, and what they cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Sharded {
    /// For each layer, the sharding of each value of its gradient function, or of the layer itself
    /// where it has none.
    pub functions: BTreeMap<String, BTreeMap<String, Sharding>>,
    /// The estimate that was minimised: seconds of one micro-batch over all calls on one rank.
    pub seconds: f64,
    /// Functions in which the beam left out states, so that a better answer may exist.
    pub capped: BTreeSet<String>,
}

/// Finds shardings for all layers that an entry calls.
///
/// Weights of two or more dims are stored cut over `tp`, others as their use wants them. No piece
/// is empty.
///
/// # Errors
/// `E3101` when a layer cannot be cut as asked, `E3102` when the boundary cannot.
///
/// # Determinism
/// Equal requests have equal answers; the beam is counted, not timed.
pub fn shard(request: &Request<'_>) -> Result<Sharded, Diagnostic> {
    let symbolic = request.module;
    let layers = roles::layers(symbolic, request.entry)?;
    let mut bound = symbolic.clone();
    let batch = (request.microbatch_size * request.dp) as i64;
    bound.bind(&Bindings::from([(Dim::BATCH.to_owned(), batch)]));
    let entry = symbolic.function(request.entry).expect("it has layers");
    let context = context::context_layouts(request.cp, entry, &bound, &layers)?;
    let ep = request.experts.ep;
    if ep > 1 && !layers.iter().any(|layer| has_experts(&bound, layer)) {
        let headline = format!("no layer of `{}` has experts for ep={ep}", symbolic.name);
        return Err(Diagnostic::error("E3102", Span::of("ep"), headline).help("leave `ep` out"));
    }
    let shared = shared_weights(&layers);
    let mut best: Option<Sharded> = None;
    let mut reason = None;
    let mut known = Known::new();
    for fixed in storages(&layers, &shared, &bound, request.tp) {
        match shard_all(request, &bound, (&layers, &context), &fixed, &mut known) {
            Ok(found) if best.as_ref().is_none_or(|b| found.seconds < b.seconds) => {
                best = Some(found);
            }
            Ok(_) => {}
            Err(diagnostic) => reason = Some(diagnostic),
        }
    }
    let none = || Diagnostic::error("E3101", Span::of(""), "the entry calls no layers");
    best.ok_or_else(|| reason.unwrap_or_else(none))
}

/// What was found for layers, by their position and the storage of the shared weights they read.
type Known = BTreeMap<(usize, Vec<(String, Layout)>), Result<OneLayer, Diagnostic>>;

/// The shardings of one layer.
#[derive(Clone)]
struct OneLayer {
    shardings: BTreeMap<String, Sharding>,
    seconds: f64,
    capped: bool,
}

fn shard_all(
    request: &Request<'_>,
    bound: &Module,
    (layers, context): (&[Layer], &ContextLayouts),
    fixed: &BTreeMap<String, Layout>,
    known: &mut Known,
) -> Result<Sharded, Diagnostic> {
    let mut all = Sharded { functions: BTreeMap::new(), seconds: 0.0, capped: BTreeSet::new() };
    for (at, layer) in layers.iter().enumerate() {
        let read = fixed.iter().filter(|(weight, _)| layer.param_of(weight).is_some());
        let key = (at, read.map(|(weight, layout)| (weight.clone(), *layout)).collect());
        let found = known.entry(key).or_insert_with(|| {
            let context = context[&layer.name].clone();
            shard_one(request, bound, (layer, context), fixed)
        });
        let found = found.clone()?;
        all.functions.insert(layer.name.clone(), found.shardings);
        all.seconds += found.seconds * layer.calls as f64;
        if found.capped {
            all.capped.insert(layer.name.clone());
        }
    }
    Ok(all)
}

fn shard_one(
    request: &Request<'_>,
    bound: &Module,
    (layer, context): (&Layer, Vec<Layout>),
    fixed: &BTreeMap<String, Layout>,
) -> Result<OneLayer, Diagnostic> {
    let problem = problem::Problem::new(request, bound, (layer, context), fixed)?;
    let experts =
        experts::expert_layouts(request.experts.ep, problem.function, &problem.expert_dims)?;
    let found = beam::search(&problem).map_err(|value| {
        let headline = format!("`tp={}` cannot cut `{}`", request.tp, layer.name);
        Diagnostic::error("E3101", Span::of("--tp"), headline)
            .note(format!("no factor of the node that makes `%{value}` yields its layout"))
            .help(format!("use a tp smaller than {}", request.tp))
    })?;
    let values = problem.function.values.iter().enumerate();
    let shardings = values.map(|(at, value)| {
        let (data, context) = (problem.data[at], problem.context[at]);
        let axes = [Axis::Dp, Axis::Cp, Axis::Tp, Axis::Ep];
        let layouts = [data, context, found.layouts[at], experts[at]];
        (value.name.clone(), Sharding::new(axes.into_iter().zip(layouts)))
    });
    let shardings = shardings.collect();
    Ok(OneLayer { shardings, seconds: found.seconds, capped: found.capped })
}

/// Whether a layer has experts that ranks can share.
fn has_experts(bound: &Module, layer: &Layer) -> bool {
    let function = bound.function(&layer.function);
    function.is_some_and(|f| experts::expert_dims(f, bound).iter().any(Option::is_some))
}

/// Weights of the entry that more than one layer reads.
fn shared_weights(layers: &[Layer]) -> Vec<String> {
    let mut readers: BTreeMap<&String, BTreeSet<&String>> = BTreeMap::new();
    for layer in layers {
        for weights in layer.weights.iter().flatten() {
            for weight in weights {
                readers.entry(weight).or_default().insert(&layer.name);
            }
        }
    }
    readers.into_iter().filter(|(_, l)| l.len() > 1).map(|(w, _)| w.clone()).collect()
}

/// All ways to store the shared weights.
fn storages(
    layers: &[Layer],
    shared: &[String],
    bound: &Module,
    tp: usize,
) -> Vec<BTreeMap<String, Layout>> {
    let mut all = vec![BTreeMap::new()];
    for weight in shared {
        let reads = |l: &&Layer| l.param_of(weight).is_some();
        let Some(layer) = layers.iter().find(reads) else { continue };
        let Some(function) = bound.function(&layer.function) else { continue };
        let Some(param) = layer.param_of(weight) else { continue };
        let sizes = function.values[param].ty.sizes().unwrap_or_default();
        let cuts = cuttable(&sizes, tp);
        let layouts = if cuts.is_empty() { vec![Layout::Replicated] } else { cuts };
        let extend = |map: &BTreeMap<String, Layout>| {
            let with = |layout: &Layout| {
                let mut map = map.clone();
                map.insert(weight.clone(), *layout);
                map
            };
            layouts.iter().map(with).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(extend).collect();
    }
    all
}

/// The cuts of a value that leave no piece empty; none over one rank.
fn cuttable(sizes: &[usize], ranks: usize) -> Vec<Layout> {
    if ranks == 1 {
        return Vec::new();
    }
    let fits = |(_, size): &(usize, &usize)| pieces(**size, 1, ranks).is_some();
    sizes.iter().enumerate().filter(fits).map(|(dim, _)| Layout::cut(dim)).collect()
}
