//! Kernel → device functions: which tile programs compute it, how many blocks, which workspaces.

mod aligned;
mod attention;
mod experts;
mod lines;
mod moves;
mod product;
mod reduction;
mod rows;

use super::function::Functions;
use super::moves::Move;
use super::parameter::{Buffer, Parameter};
use crate::arguments::Argument;
use crate::kernel::Kernel;
use ir::target::Arch;

/// The device functions of a kernel that any GPU runs, in the order in which they run.
pub fn functions(kernel: &Kernel) -> Functions {
    functions_of(kernel, None)
}

/// The device functions of a kernel for an architecture, in the order in which they run.
///
/// Buffers then start at multiples of 16 bytes.
pub fn functions_for(kernel: &Kernel, arch: Arch) -> Functions {
    functions_of(kernel, Some(arch))
}

fn functions_of(kernel: &Kernel, arch: Option<Arch>) -> Functions {
    let parameter = |buffer: fn(usize) -> Buffer, (at, of): (usize, &Argument)| Parameter {
        buffer: buffer(at),
        dtype: of.dtype,
    };
    let inputs: Vec<Parameter> =
        kernel.inputs().iter().enumerate().map(|of| parameter(Buffer::Input, of)).collect();
    let outputs: Vec<Parameter> =
        kernel.outputs().iter().enumerate().map(|of| parameter(Buffer::Output, of)).collect();
    let all_parameters = || inputs.iter().chain(&outputs).copied().collect::<Vec<Parameter>>();
    let what = &kernel.to_string();
    let mut all = Functions::default();
    match kernel {
        Kernel::Product(p) => {
            product::function(what, p, (&inputs, outputs[0]), [None, None], (&mut all, arch));
        }
        Kernel::Products(p) => product::functions(what, p, &inputs, &outputs, (&mut all, arch)),
        Kernel::Rows(r) => rows::functions(what, r, &inputs, &outputs, (&mut all, arch)),
        Kernel::Attention(a) => {
            attention::forward(what, a, &inputs, &outputs, (&mut all, arch));
        }
        Kernel::AttentionBwd(a) => {
            attention::backward(what, a, &inputs, &outputs, (&mut all, arch));
        }
        Kernel::Experts(e) => experts::forward(what, e, &inputs, outputs[0], (&mut all, arch)),
        Kernel::ExpertsBwd(e) => {
            experts::backward(what, e, &inputs, &outputs, (&mut all, arch));
        }
        Kernel::Gather(g) => all.functions.push(moves::gather(what, g, all_parameters())),
        Kernel::ScatterAdd(g) | Kernel::Replace(g) => {
            let adds = matches!(kernel, Kernel::ScatterAdd(_));
            moves::scatter(what, g, [inputs[0], inputs[1], outputs[0]], adds, &mut all);
        }
        Kernel::Lines(l) => all.functions.push(lines::function(what, l, all_parameters())),
        Kernel::Rope(r) => all.functions.push(moves::rope(what, r, all_parameters())),
        Kernel::Copy(c) => moves::copy(what, c, [inputs[0], outputs[0]], &mut all),
        Kernel::Place(w) => {
            all.functions.push(moves::window(what, Move::Place(w.clone()), all_parameters()));
        }
        Kernel::Take(w) => {
            all.functions.push(moves::window(what, Move::Take(w.clone()), all_parameters()));
        }
        Kernel::Fill(f) => all.functions.push(moves::fill(what, f, outputs[0])),
    }
    all.functions.retain(|function| function.grid > 0);
    all
}
