//! Composites of which plans say how ranks share them, and which have no kernel on a target: what
//! one rank computes of them is inlined.

use ir::{Function, Kind, Module, Node, Target};

use crate::catalogue::has_kernel;
use crate::partition::Local;

/// Whether a function calls a composite that has no kernel on a target.
pub(crate) fn lacks_kernel(module: &Module, function: &Function, target: Option<Target>) -> bool {
    let lacks = |node: &Node| {
        let callee = node.callee().and_then(|callee| module.function(callee));
        callee.is_some_and(|callee| match &callee.kind {
            Kind::Composite { name, .. } => !has_kernel(name, target),
            Kind::Layer | Kind::Kernel => false,
        })
    };
    function.nodes.iter().any(lacks)
}

/// Replaces the calls of composites without kernels by their nodes, and merges what forward and
/// backward pass both compute. O(n log n) in the nodes; nothing where there are no such calls.
pub(crate) fn inline_local(local: Local, target: Option<Target>) -> Local {
    let Local { function, mut module } = local;
    if !lacks_kernel(&module, &function, target) {
        return Local { function, module };
    }
    module.functions.push(function);
    ir::inline::inline_composites(&mut module, |name| has_kernel(name, target));
    let mut function = module.functions.pop().expect("inlining keeps what is no composite");
    ir::pass::remove_casts_to_same(&mut function);
    ir::pass::remove_common_nodes(&mut function);
    ir::pass::remove_dead_nodes(&mut function);
    Local { function, module }
}
