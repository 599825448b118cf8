//! The new weights, and where checkpoints of peft have them.
//!
//! peft has two matrices for each module: `lora_A.weight` [r, in] and `lora_B.weight` [out, r], in
//! the order of a linear layer, whatever that of the adapted tensor is. A weight may be a view of
//! the tensor: its part of `in` and `out` follows from the strides of the view.

use super::{Candidate, init_of_a, module_of};
use crate::import::{Init, Source, Weight};

/// What peft puts before the names of modules.
const PREFIX: &str = "base_model.model.";

/// The `A` of a weight: [r, in], in the order of the weight's own dims.
pub(super) fn down(candidate: &Candidate<'_>, name: &str, rank: usize, is_module: bool) -> Weight {
    let dims: Vec<usize> = [rank].into_iter().chain(part(candidate, true)).collect();
    let [inner, _] = candidate.sizes();
    let source = view(candidate, true).filter(|_| is_module).map(|(total, start, axes)| {
        let axes = [(rank, total)].into_iter().chain(axes);
        Source::view(names(candidate.weight, "lora_A"), vec![rank, total], start, axes)
    });
    new_weight(candidate, name.to_owned(), dims, init_of_a(inner), source)
}

/// The `B` of a weight: [out, r], in the order of the weight's own dims.
pub(super) fn up(candidate: &Candidate<'_>, rank: usize, is_module: bool) -> Weight {
    let dims: Vec<usize> = part(candidate, false).into_iter().chain([rank]).collect();
    let name = format!("{}.lora_b", candidate.weight.name);
    let source = view(candidate, false).filter(|_| is_module).map(|(total, start, axes)| {
        let axes = axes.into_iter().map(|(size, stride)| (size, stride * rank));
        let axes = axes.chain([(rank, 1)]);
        Source::view(names(candidate.weight, "lora_B"), vec![total, rank], start * rank, axes)
    });
    new_weight(candidate, name, dims, Init::Zeros, source)
}

fn new_weight(
    candidate: &Candidate<'_>,
    name: String,
    dims: Vec<usize>,
    init: Init,
    source: Option<Source>,
) -> Weight {
    let source = source.unwrap_or_else(|| Source::whole(vec![name.clone()], dims.clone()));
    Weight { name, dims, init, source, layer: candidate.weight.layer, frozen: false }
}

fn names(weight: &Weight, which: &str) -> Vec<String> {
    vec![format!("{PREFIX}{}.{which}.weight", module_of(weight))]
}

/// The dims that are summed over, or the others.
fn part(candidate: &Candidate<'_>, is_in: bool) -> Vec<usize> {
    let dims = candidate.weight.dims.iter().zip(&candidate.contracted);
    dims.filter(|(_, c)| **c == is_in).map(|(size, _)| *size).collect()
}

/// A side of the adapted tensor: its size, the first entry that is the weight's, and sizes and
/// strides of the weight's axes along it. None where the tensor is no matrix whose two sides are
/// what is summed over and what is not.
fn view(candidate: &Candidate<'_>, is_in: bool) -> Option<(usize, usize, Vec<(usize, usize)>)> {
    let source = &candidate.weight.source;
    let [rows, columns] = source.dims[..] else { return None };
    let (start, axes) = source.by_dim(&candidate.weight.dims)?;
    let is_row = |stride: usize| stride >= columns;
    let mut sides = [Vec::new(), Vec::new()];
    let mut on_rows: [Option<bool>; 2] = [None; 2];
    for (axes, contracted) in axes.iter().zip(&candidate.contracted) {
        let side = usize::from(!contracted);
        for (size, stride) in axes.iter().filter(|(size, _)| *size > 1) {
            // All axes of a side lie along one dim of the tensor.
            if *on_rows[side].get_or_insert(is_row(*stride)) != is_row(*stride) {
                return None;
            }
            let stride = if is_row(*stride) { stride / columns } else { *stride };
            sides[side].push((*size, stride));
        }
    }
    let of_in = on_rows[0].or(on_rows[1].map(|is| !is))?;
    if on_rows[1].is_some_and(|of_out| of_out == of_in) {
        return None;
    }
    let is_rows = of_in == is_in;
    let (total, start) = if is_rows { (rows, start / columns) } else { (columns, start % columns) };
    let [ins, outs] = sides;
    Some((total, start, if is_in { ins } else { outs }))
}
