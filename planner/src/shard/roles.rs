//! What the parameters of layers are, as the calls of an entry show.

use std::collections::BTreeMap;

use ir::{Diagnostic, Dim, Function, Module, Op, Span, ValueId};

/// What a parameter of a layer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Comes from the layer before.
    Activation,
    /// A parameter of the model.
    Weight,
    /// Ids, a position or a random key: the same on all tensor-parallel ranks.
    Feed,
    /// What an earlier call left, cut as the layer's result that replaces it.
    Cache,
}

/// A function that an entry calls, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// The function's name.
    pub name: String,
    /// The function that is sharded: `NAME.grad`, or the function itself.
    pub function: String,
    /// The number of calls.
    pub calls: usize,
    /// For each parameter of the function, what it is.
    pub roles: Vec<Role>,
    /// For each parameter, the entry's parameters that the calls pass as weights.
    pub weights: Vec<Option<Vec<String>>>,
    /// For each result, whether another layer reads it.
    pub passes_on: Vec<bool>,
    /// For each result, the parameter whose cache it replaces in the next call of the entry.
    pub replaces: Vec<Option<usize>>,
}

impl Layer {
    /// The parameter that a weight of the entry is passed as.
    pub fn param_of(&self, weight: &str) -> Option<usize> {
        let passes = |names: &Option<Vec<String>>| {
            names.as_ref().is_some_and(|names| names.iter().any(|n| n == weight))
        };
        self.weights.iter().position(passes)
    }
}

/// The layers that an entry calls, in the order of their first calls.
///
/// # Errors
/// `E3103` when the module has no such entry.
pub fn layers(module: &Module, entry: &str) -> Result<Vec<Layer>, Diagnostic> {
    let Some(entry) = module.function(entry) else {
        let headline = format!("`{}` has no entry `{entry}`", module.name);
        return Err(Diagnostic::error("E3103", Span::of(""), headline));
    };
    let makers: BTreeMap<ValueId, (usize, usize)> = entry
        .nodes
        .iter()
        .enumerate()
        .flat_map(|(at, n)| n.results.iter().enumerate().map(move |(i, r)| (*r, (at, i))))
        .collect();
    let replaced = caches(entry);
    let mut layers: Vec<Layer> = Vec::new();
    let mut place = BTreeMap::new();
    for (at, node) in entry.nodes.iter().enumerate() {
        let Op::Call { function } = &node.op else { continue };
        let Some(callee) = module.function(function) else { continue };
        let known = layers.iter().position(|l| l.name == *function);
        let index = known.unwrap_or_else(|| {
            layers.push(new_layer(module, callee));
            layers.len() - 1
        });
        place.insert(at, index);
        let layer = &mut layers[index];
        layer.calls += 1;
        for (param, operand) in node.operands.iter().enumerate() {
            layer.roles[param] = role(entry, *operand);
            if layer.roles[param] == Role::Weight {
                let name = entry.value(*operand).name.clone();
                layer.weights[param].get_or_insert_default().push(name);
            }
        }
        for (at, result) in node.results.iter().enumerate() {
            let cache = replaced.get(result);
            let param = cache.and_then(|c| node.operands.iter().position(|o| o == c));
            layer.replaces[at] = param.or(layer.replaces[at]);
        }
        for operand in &node.operands {
            if let Some((maker, result)) = makers.get(operand)
                && let Some(maker) = place.get(maker)
            {
                layers[*maker].passes_on[*result] = true;
            }
        }
    }
    Ok(layers)
}

/// For the results of an entry that replace its caches, the caches: both stand in one order, the
/// results last.
fn caches(entry: &Function) -> BTreeMap<ValueId, ValueId> {
    let caches: Vec<ValueId> = entry.params().filter(|p| role(entry, *p) == Role::Cache).collect();
    let first = entry.results.len().saturating_sub(caches.len());
    entry.results[first..].iter().copied().zip(caches).collect()
}

fn new_layer(module: &Module, callee: &Function) -> Layer {
    let gradient = format!("{}.grad", callee.name);
    let has_gradient = module.function(&gradient).is_some();
    Layer {
        name: callee.name.clone(),
        function: if has_gradient { gradient } else { callee.name.clone() },
        calls: 0,
        roles: vec![Role::Feed; callee.param_count],
        weights: vec![None; callee.param_count],
        passes_on: vec![false; callee.results.len()],
        replaces: vec![None; callee.results.len()],
    }
}

fn role(entry: &Function, operand: ValueId) -> Role {
    let ty = entry.ty(operand);
    let is_param = operand.index() < entry.param_count;
    match (ty.dtype.is_float(), is_param) {
        (false, _) => Role::Feed,
        (true, false) => Role::Activation,
        (true, true) if ty.dims.iter().any(|d| d.mentions(Dim::BATCH)) => Role::Cache,
        (true, true) => Role::Weight,
    }
}
