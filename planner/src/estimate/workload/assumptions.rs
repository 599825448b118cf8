//! What models compute and a workload leaves out, in words.

use ir::import::{AttentionTraits, FamilyModel};
use ir::{Function, Kind, Module};

use super::ATTENTION;

/// What is left out of a model of a family, whose shape has rotary embeddings priced or not, for
/// samples of `seq` tokens.
pub(in crate::estimate) fn of_family(model: &FamilyModel, seq: u32, rotates: bool) -> Vec<String> {
    let layers = 0..model.layers.len();
    let mut all = of_layers(&layers.map(|at| model.attention_traits(at)).collect::<Vec<_>>(), seq);
    if !rotates && (0..model.layers.len()).any(|at| model.attention_traits(at).is_rotated) {
        all.push("rotary embeddings are not priced".to_owned());
    }
    if model.caps_logits() {
        all.push("the soft cap of logits is not priced".to_owned());
    }
    all
}

/// What the work of a module leaves out, in words. Its layers are the functions that `main` calls;
/// a sample has `seq` tokens.
pub(super) fn of_module(module: &Module, main: &Function, seq: u32) -> Vec<String> {
    let called = |function: &Function| {
        let names = function.nodes.iter().filter_map(|node| node.callee().map(str::to_owned));
        names.filter_map(|name| module.function(&name)).collect::<Vec<_>>()
    };
    let mut layers: Vec<AttentionTraits> = Vec::new();
    for function in std::iter::once(main).chain(called(main)) {
        layers.extend(called(function).into_iter().filter_map(traits));
    }
    of_layers(&layers, seq)
}

/// What a call of attention computes.
fn traits(function: &Function) -> Option<AttentionTraits> {
    let Kind::Composite { name, attributes } = &function.kind else { return None };
    let number = |key: &str| attributes.get(key).copied().filter(|number| *number != 0.0);
    name.starts_with(ATTENTION).then(|| AttentionTraits {
        window: number("window").map(|window| window as usize),
        soft_cap: number("softcap"),
        is_biased: number("bias").is_some(),
        is_rotated: false,
    })
}

fn of_layers(layers: &[AttentionTraits], seq: u32) -> Vec<String> {
    let is_shorter = |window: &usize| *window < seq as usize;
    let mut windows: Vec<usize> = layers.iter().filter_map(|layer| layer.window).collect();
    windows.retain(is_shorter);
    windows.sort_unstable();
    windows.dedup();
    let mut all = Vec::new();
    for window in windows {
        let count = layers.iter().filter(|layer| layer.window == Some(window)).count();
        all.push(format!(
            "windows of {window} tokens in {count} of {} layers are priced as attention to all \
             earlier tokens",
            layers.len()
        ));
    }
    if layers.iter().any(|layer| layer.soft_cap.is_some()) {
        all.push("soft caps of attention scores are not priced".to_owned());
    }
    if layers.iter().any(|layer| layer.is_biased) {
        all.push("biases of attention scores are not priced".to_owned());
    }
    all
}
