//! The `dp` axis: what is counted by samples is cut by samples.

use ir::factors::{factors, term_ways};
use ir::op::Combiner;
use ir::{Dim, Function, Layout, Module, Node, TensorType};

const TERM: Layout = Layout::Partial(Combiner::Sum);

/// How each value of a function lies on `dp`. The function's `B` is unbound.
///
/// Parameters are cut along the dim that counts samples. A node is cut along the factor that does;
/// a sum over samples is partial, and stays so through ops that are linear in it.
pub(super) fn data_layouts(function: &Function, module: &Module) -> Vec<Layout> {
    let mut layouts = vec![Layout::Replicated; function.values.len()];
    for param in function.params() {
        layouts[param.index()] = by_samples(function.ty(param));
    }
    for node in &function.nodes {
        let results = node_layouts(node, function, module, &layouts);
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
) -> Vec<Layout> {
    let factors = factors(node, function, module);
    if let Some(factor) = factors.into_iter().find(|f| f.units.mentions(Dim::BATCH)) {
        return factor.results;
    }
    let is_so = |way: &Vec<bool>| {
        let operands = node.operands.iter().map(|operand| layouts[operand.index()]);
        operands.zip(way).all(|(layout, is_term)| (layout == TERM) == *is_term)
    };
    let terms = term_ways(&node.op, node.operands.len()).iter().any(is_so);
    vec![if terms { TERM } else { Layout::Replicated }; node.results.len()]
}
