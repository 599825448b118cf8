use super::*;
use crate::eval::eval;
use crate::import::{Architecture, Description, Options, import, preset, read_config};
use crate::inline::inline_calls;
use crate::random::mix;
use crate::text::parse_module;
use crate::verify::verify;
use crate::{DType, Tensor};

/// A small model of the family that a config names.
fn described(config: &str) -> Description {
    read_config("config.json", config, "small").unwrap()
}

fn gpt2(layers: usize) -> Description {
    described(&format!(
        r#"{{"model_type": "gpt2", "n_layer": {layers}, "n_head": 2, "n_embd": 8,
            "n_positions": 16, "vocab_size": 11}}"#
    ))
}

fn llama(layers: usize) -> Description {
    described(&format!(
        r#"{{"model_type": "llama", "num_hidden_layers": {layers}, "num_attention_heads": 2,
            "num_key_value_heads": 1, "hidden_size": 8, "intermediate_size": 12,
            "max_position_embeddings": 16, "vocab_size": 11, "rms_norm_eps": 1e-5}}"#
    ))
}

/// The logits of a model as one flat function, beside what it was flattened from; how many weights
/// it has.
fn flattened(description: &Description) -> (Module, Module, usize) {
    let options = Options { seq: 5, dtype: DType::F64, dropout: Some(0.0), documents: false };
    let model = import(description, &options).unwrap();
    let layered = model.module;
    let mut flat = layered.clone();
    let at = flat.functions.iter().position(|f| f.name == "logits").unwrap();
    let is_layer = |callee: &Function, _: &str| callee.kind == Kind::Layer;
    inline_calls(&mut flat.functions[at], &layered, is_layer);
    flat.functions.retain(|f| f.kind != Kind::Layer || f.name == "logits");
    (layered, flat, model.weights.len())
}

fn arguments(module: &Module) -> Vec<Tensor> {
    let bindings = [("B".to_owned(), 2)].into();
    let types = module.function("logits").unwrap().param_types();
    let one = |(at, ty): (usize, &TensorType)| {
        let dims = ty.bind(&bindings).sizes().unwrap();
        let count = dims.iter().product::<usize>() as u64;
        let word = |n: u64| mix(at as u64 * 1_000_003 + n);
        if ty.dtype.is_float() {
            let number = |n| (word(n) >> 11) as f64 / (1_u64 << 53) as f64 - 0.5;
            Tensor::f64(&dims, (0..count).map(number).collect())
        } else {
            Tensor::int(ty.dtype, &dims, (0..count).map(|n| (word(n) % 11) as i64).collect())
        }
    };
    types.iter().enumerate().map(one).collect()
}

fn calls_of(module: &Module, function: &str, callee: &str) -> usize {
    let nodes = &module.function(function).unwrap().nodes;
    nodes.iter().filter(|n| n.callee() == Some(callee)).count()
}

/// Inlined and outlined again, a model has its layers back: as many calls of one function, of as
/// many nodes, and bit for bit the same logits.
#[test]
fn layers_of_models_are_found_again_after_inlining() {
    for (describe, layers) in [(gpt2 as fn(usize) -> Description, 5), (llama, 4), (gpt2, 2)] {
        let (layered, mut flat, weights) = flattened(&describe(layers));
        let args = arguments(&layered);
        let wanted = eval(&layered, "logits", &args).unwrap();
        assert_eq!(calls_of(&flat, "logits", "block"), 0);
        let made = outline(&mut flat, "logits", weights);
        assert_eq!(verify(&flat), [], "{flat}");
        assert_eq!(made, ["logits.block"], "{flat}");
        assert_eq!(calls_of(&flat, "logits", "logits.block"), layers, "{flat}");
        let block = flat.function("logits.block").unwrap();
        let given = layered.function("block").unwrap();
        assert_eq!(block.nodes.len(), given.nodes.len(), "{flat}");
        assert_eq!(block.param_count, given.param_count, "{flat}");
        assert_eq!(block.results.len(), given.results.len(), "{flat}");
        assert_eq!(eval(&flat, "logits", &args).unwrap(), wanted);
    }
}

/// What is left to do after outlining does not grow with depth, nor does its text but by calls.
#[test]
fn functions_do_not_grow_with_depth() {
    let nodes = |layers: usize| {
        let (_, mut flat, weights) = flattened(&gpt2(layers));
        outline(&mut flat, "logits", weights);
        let count = |f: &Function| f.nodes.len();
        (flat.functions.iter().map(count).sum::<usize>(), flat.functions.len())
    };
    let ((few, functions), (many, more_functions)) = (nodes(3), nodes(12));
    assert_eq!(functions, more_functions);
    assert_eq!(many - few, 9, "one call for each further layer");
}

/// Blocks that differ in a constant, in which value they read twice, or in a size are not one.
#[test]
fn near_repeats_stay_apart() {
    let block = |x: &str, y: &str, at: usize, scale: f64, other: &str| {
        format!(
            "    %a{at}: f64[4] = constant {scale}
    %b{at}: f64[4] = mul {x} %w{at}
    %c{at}: f64[4] = mul %b{at} %a{at}
    %d{at}: f64[4] = tanh %c{at}
    %e{at}: f64[4] = add %d{at} {other}
    %f{at}: f64[4] = exp %e{at}
    %g{at}: f64[4] = mul %f{at} %w{at}
    {y}: f64[4] = add %g{at} {x}
"
        )
    };
    let module = |first: String, second: String| {
        let text = format!(
            "module m\n  func @main(%w0: f64[4], %w1: f64[4], %x: f64[4]) {{\n{first}{second}    \
             return %z\n  }}\n"
        );
        parse_module("m", &text).unwrap()
    };
    let mut same = module(block("%x", "%y", 0, 0.5, "%b0"), block("%y", "%z", 1, 0.5, "%b1"));
    assert_eq!(outline(&mut same, "main", 2), ["main.block"], "{same}");
    assert_eq!(calls_of(&same, "main", "main.block"), 2);
    for second in [block("%y", "%z", 1, 0.25, "%b1"), block("%y", "%z", 1, 0.5, "%c1")] {
        let mut other = module(block("%x", "%y", 0, 0.5, "%b0"), second);
        let before = other.to_string();
        assert_eq!(outline(&mut other, "main", 2), [""; 0], "{other}");
        assert_eq!(other.to_string(), before);
    }
}

/// Presets import as layers: there is nothing left to outline.
#[test]
fn layered_models_stay_as_they_are() {
    let description = preset("gpt2").unwrap();
    assert!(matches!(description.architecture, Architecture::Family(_)));
    let options = Options { seq: 8, dtype: DType::F32, dropout: Some(0.0), documents: false };
    let mut model = import(&description, &options).unwrap();
    let before = model.module.clone();
    assert_eq!(outline(&mut model.module, "logits", model.weights.len()), [""; 0]);
    assert_eq!(model.module, before);
}
