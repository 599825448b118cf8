//! Composites of which plans say how ranks share them, and which have no kernel: what one rank
//! computes of them is inlined.

use ir::{Kind, Node};

use crate::catalogue::is_in_catalogue;
use crate::partition::Local;

/// Replaces the calls of composites without kernels by their nodes, and merges what forward and
/// backward pass both compute. O(n log n) in the nodes; nothing where there are no such calls.
pub(crate) fn inline_local(local: Local) -> Local {
    let Local { function, mut module } = local;
    let lacks_kernel = |node: &Node| {
        let callee = node.callee().and_then(|callee| module.function(callee));
        callee.is_some_and(|callee| match &callee.kind {
            Kind::Composite { name, .. } => !is_in_catalogue(name),
            Kind::Layer | Kind::Kernel => false,
        })
    };
    if !function.nodes.iter().any(lacks_kernel) {
        return Local { function, module };
    }
    module.functions.push(function);
    ir::inline::inline_composites(&mut module, is_in_catalogue);
    let mut function = module.functions.pop().expect("inlining keeps what is no composite");
    ir::pass::remove_casts_to_same(&mut function);
    ir::pass::remove_common_nodes(&mut function);
    ir::pass::remove_dead_nodes(&mut function);
    Local { function, module }
}
