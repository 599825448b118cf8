//! The `dp` axis: what is counted by samples is cut by samples.

use ir::factors::{are_terms, factors, term_ways, zeros};
use ir::op::Combiner;
use ir::{Dim, Function, Layout, Module, Node, TensorType};

const TERM: Layout = Layout::Partial(Combiner::Sum);

/// How each value of a function lies on `dp`. The function's `B` is unbound.
///
/// Parameters are cut along the dim that counts samples. A node is cut along the factor that does;
/// a sum over samples is partial, and stays so through ops that are linear in it.
pub(super) fn data_layouts(function: &Function, module: &Module) -> Vec<Layout> {
    let zeros = zeros(function);
    let mut layouts = vec![Layout::Replicated; function.values.len()];
    for param in function.params() {
        layouts[param.index()] = by_samples(function.ty(param));
    }
    for node in &function.nodes {
        let results = node_layouts(node, function, module, &layouts, &zeros);
        for (result, layout) in node.results.iter().zip(results) {
            layouts[result.index()] = layout;
        }
    }
    layouts
}

fn by_samples(ty: &TensorType) -> Layout {
    let dim = ty.dims.iter().position(|d| d.mentions(Dim::BATCH));
    dim.map_or(Layout::Replicated, Layout::cut)
}

fn node_layouts(
    node: &Node,
    function: &Function,
    module: &Module,
    layouts: &[Layout],
    zeros: &[bool],
) -> Vec<Layout> {
    let factors = factors(node, function, module);
    if let Some(factor) = factors.into_iter().find(|f| f.units.mentions(Dim::BATCH)) {
        return factor.results;
    }
    let operands = || node.operands.iter().map(|o| (layouts[o.index()], zeros[o.index()]));
    let mut ways = term_ways(&node.op, node.operands.len()).into_iter();
    let terms = ways.any(|way| are_terms(&way, operands()));
    vec![if terms { TERM } else { Layout::Replicated }; node.results.len()]
}
