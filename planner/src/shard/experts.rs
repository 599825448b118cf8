//! Expert parallelism: the weights of experts, and what has their dims, are cut by experts.

use std::collections::BTreeMap;

use ir::factors::{EXPERT_FORM, factors, factors_and_forms};
use ir::{Diagnostic, Function, Layout, Module, Node, Span, ValueId};

use super::roles::Layer;
use super::together::{Together, places};

/// Whether a node computes with experts that ranks can share.
pub(super) fn computes_with_experts(node: &Node, function: &Function, module: &Module) -> bool {
    let with = |forms: &[&str]| factors_and_forms(node, function, module, forms).len();
    node.callee().is_some() && with(&[EXPERT_FORM]) > with(&[])
}

/// For each value of a layer's function the dim that counts experts, if any.
pub(super) fn expert_dims(function: &Function, module: &Module) -> Vec<Option<usize>> {
    let of = |node: &Node| factors(node, function, module);
    let mut cut: Vec<(ValueId, usize)> = Vec::new();
    for node in function.nodes.iter().filter(|node| node.callee().is_some()) {
        let all = factors_and_forms(node, function, module, &[EXPERT_FORM]);
        cut.extend(all[of(node).len()..].iter().flat_map(|form| places(node, form)));
    }
    if cut.is_empty() {
        return vec![None; function.values.len()];
    }
    let mut together = Together::of(function, of);
    cut.into_iter().for_each(|place| together.mean(place));
    together.dims(function)
}

/// The weights of routed experts of an entry, by name, and their numbers of experts.
pub fn experts_of(module: &Module, layers: &[Layer]) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for layer in layers {
        let Some(function) = module.function(&layer.function) else { continue };
        let dims = expert_dims(function, module);
        let params = layer.weights.iter().zip(function.values.iter().zip(dims));
        for (names, (param, dim)) in params {
            let (Some(names), Some(dim)) = (names, dim) else { continue };
            let count = param.ty.dims[dim].as_constant().and_then(|n| usize::try_from(n).ok());
            let experts = count.filter(|count| *count > 0);
            found.extend(
                experts.into_iter().flat_map(|n| names.iter().map(move |w| (w.clone(), n))),
            );
        }
    }
    found
}

/// How the values of a function lie on `ep`.
///
/// # Errors
/// `E3101` where ranks do not divide the experts.
pub(super) fn expert_layouts(
    ep: usize,
    function: &Function,
    dims: &[Option<usize>],
) -> Result<Vec<Layout>, Diagnostic> {
    if ep == 1 {
        return Ok(vec![Layout::Replicated; dims.len()]);
    }
    for (value, dim) in function.values.iter().zip(dims) {
        let Some(dim) = dim else { continue };
        let count = value.ty.dims[*dim].as_constant().unwrap_or(0);
        if count % ep as i64 != 0 {
            let headline =
                format!("`ep={ep}` does not divide the {count} experts of `{}`", function.name);
            return Err(Diagnostic::error("E3101", Span::of("ep"), headline)
                .help("use an `ep` that divides the experts"));
        }
    }
    Ok(dims.iter().map(|dim| dim.map_or(Layout::Replicated, Layout::cut)).collect())
}
