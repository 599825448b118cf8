//! Layout of images: from NCHW to NHWC (channels last), as tensor cores read them.
//!
//! **In:** a module, of which some layers convolve. **Out:** the same module, whose activations
//! between convolutions are NHWC; its inputs, results and weights keep their layout.
//!
//! Convolutions name the order of their dims, and what follows them works on what lies in another
//! order as it does on the usual one: element by element, along the dim that is now elsewhere, or
//! with its dims split and joined where they still lie side by side. Everything else reads its
//! operands in the usual order, into which they are transposed. Kernels of a convolution are
//! transposed where they are used. Layers pass images on as they lie, where all that are called
//! with them, or yield them, want that.

mod layer;
mod moved;
mod passed;

use crate::dim::Dim;
use crate::module::{Function, Kind, Module, ValueId};
use crate::op::Op;

use layer::Layer;

/// Lays the images of all layers with convolutions so, and of layers that they pass images on to.
/// Whether there are convolutions.
pub fn lay_channels_last(module: &mut Module) -> bool {
    let is_layer = |name: &str| module.function(name).is_some_and(|f| f.kind == Kind::Layer);
    let calls = |f: &Function| f.nodes.iter().any(|node| node.callee().is_some_and(is_layer));
    let images = images(module);
    let passes = |f: &Function| f.params().any(|param| is_sample(f, param, &images));
    let is_laid = |f: &Function| f.kind == Kind::Layer && (convolves(f) || passes(f) && !calls(f));
    let all = module.functions.iter().enumerate();
    let found: Vec<usize> = all.filter(|(_, f)| is_laid(f)).map(|(at, _)| at).collect();
    let layers: Vec<(usize, Layer)> =
        found.into_iter().map(|at| (at, layer::lay(module, at, &images))).collect();
    passed::pass_on(module, layers);
    !images.is_empty()
}

fn convolves(function: &Function) -> bool {
    function.nodes.iter().any(|node| matches!(node.op, Op::Conv(_)))
}

/// How many dims the images of a module have.
fn images(module: &Module) -> Vec<usize> {
    let of = |function: &Function| -> Vec<usize> {
        let convolutions = function.nodes.iter().filter(|node| matches!(node.op, Op::Conv(_)));
        let ndims = convolutions.map(|node| function.ty(node.operands[0]).ndim());
        ndims.filter(|ndim| *ndim > 2).collect()
    };
    module.functions.iter().flat_map(of).collect()
}

/// Whether a parameter may be images: it has samples, and as many dims.
fn is_sample(function: &Function, param: ValueId, images: &[usize]) -> bool {
    let dims = &function.ty(param).dims;
    images.contains(&dims.len()) && dims[0].mentions(Dim::BATCH)
}
