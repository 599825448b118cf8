//! Freezing: which parameters are not trained.
//!
//! `frozen` is an attribute of a parameter of an entry. A layer has one function for all its calls,
//! so a parameter of a layer is frozen where every call passes something frozen for it; then
//! [`autodiff`](crate::autodiff) makes no gradient for it, and none of what only leads there.

use std::collections::BTreeMap;

use crate::call_graph::CallGraph;
use crate::module::{Kind, Module};

/// Freezes the floating-point parameters of all entries that `is_frozen` names, and passes that on
/// to the layers.
///
/// Entries are the functions that no other calls. One sweep, O(nodes + operands).
pub fn freeze(module: &mut Module, is_frozen: impl Fn(&str) -> bool) {
    let calls = CallGraph::of(module);
    let is_called: Vec<bool> =
        module.functions.iter().map(|function| calls.is_called(&function.name)).collect();
    // For each layer, whether all calls so far pass something frozen for each of its parameters.
    let mut passed: BTreeMap<String, Vec<bool>> = BTreeMap::new();
    // Callers stand below what they call, so that the last function is no callee.
    for (at, is_called) in is_called.into_iter().enumerate().rev() {
        let function = &mut module.functions[at];
        if function.kind != Kind::Layer {
            continue;
        }
        let of_calls = passed.remove(&function.name);
        for param in 0..function.param_count {
            let value = &mut function.values[param];
            value.frozen = value.ty.dtype.is_float()
                && match &of_calls {
                    Some(frozen) => frozen[param],
                    None => !is_called && is_frozen(&value.name),
                };
        }
        let function = &module.functions[at];
        for node in &function.nodes {
            let Some(callee) = node.callee() else { continue };
            let all =
                passed.entry(callee.to_owned()).or_insert_with(|| vec![true; node.operands.len()]);
            for (all, operand) in all.iter_mut().zip(&node.operands) {
                *all &= function.value(*operand).frozen;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse_module;
    use crate::verify::verify;

    const TEXT: &str = "module m
  func @layer(%x: f32[B, 2], %w: f32[2, 2], %b: f32[2]) {
    %h: f32[B, 2] = contract bm,mf->bf %x %w
    %c: f32[B, 2] = broadcast new=[0] %b
    %y: f32[B, 2] = add %h %c
    return %y
  }
  func @loss(%w0: f32[2, 2], %b0: f32[2], %w1: f32[2, 2], %b1: f32[2], %x: f32[B, 2]) {
    %y: f32[B, 2] = call @layer %x %w0 %b0
    %z: f32[B, 2] = call @layer %y %w1 %b1
    return %z
  }
";

    /// A parameter of a layer is frozen where all calls pass something frozen.
    #[test]
    fn layers_are_frozen_as_their_calls_are() {
        let mut module = parse_module("m", TEXT).unwrap();
        freeze(&mut module, |name| name != "b1");
        assert_eq!(verify(&module), []);
        let frozen = |module: &Module, function: usize| -> Vec<String> {
            let values = module.functions[function].values.iter();
            values.filter(|value| value.frozen).map(|value| value.name.clone()).collect()
        };
        assert_eq!(frozen(&module, 0), ["w"]);
        assert_eq!(frozen(&module, 1), ["w0", "b0", "w1", "x"]);
        freeze(&mut module, |_| false);
        assert_eq!(module, parse_module("m", TEXT).unwrap());
    }
}
