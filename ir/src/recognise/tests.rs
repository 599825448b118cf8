//! Composites inlined and found again, in models and one by one; what must not be found.

use super::*;
use crate::build::Builder;
use crate::eval::eval;
use crate::import::{DecodingOptions, LogitsOf, Options, decoding, import, preset};
use crate::inline::inline_composites;
use crate::{DType, Tensor, text::parse_module};

/// The calls of composites in each function that is none: function, composite, attributes, types.
fn calls(module: &Module) -> Vec<String> {
    let mut calls = Vec::new();
    for function in &module.functions {
        for node in &function.nodes {
            let Op::Call { function: callee } = &node.op else { continue };
            let callee = module.function(callee).unwrap();
            if let Kind::Composite { name, attributes } = &callee.kind {
                let types = callee.param_types();
                let types: Vec<String> = types.iter().map(ToString::to_string).collect();
                calls.push(format!("{} {name} {attributes:?} {types:?}", function.name));
            }
        }
    }
    calls.sort();
    calls
}

fn check(module: &Module) {
    let mut inlined = module.clone();
    inline_composites(&mut inlined, |_| false);
    assert!(calls(&inlined).is_empty());
    let mut found = inlined.clone();
    let count = recognise(&mut found);
    assert_eq!(calls(&found), calls(module), "{found}");
    assert_eq!(count, calls(module).len());
    let printed = found.to_string();
    assert_eq!(parse_module("found", &printed).unwrap(), found);
}

#[test]
fn composites_of_models_are_found_again_after_inlining() {
    for name in ["gpt2", "llama-3-8b"] {
        for dropout in [0.0, 0.1] {
            let options = Options { seq: 32, dtype: DType::F32, dropout: Some(dropout) };
            check(&import(&preset(name).unwrap(), &options).unwrap().module);
        }
        let logits = LogitsOf::Last;
        let options = DecodingOptions { tokens: 4, capacity: 32, dtype: DType::F32, logits };
        check(&decoding(&preset(name).unwrap(), &options).unwrap().model.module);
    }
}

#[test]
fn every_composite_of_the_library_is_found_in_its_own_definition() {
    for template in templates().values() {
        let numbers = (3..).map(f64::from);
        let given = template.attributes.iter().zip(numbers);
        let given: Vec<(&str, f64)> = given.map(|((name, _), n)| (name.as_str(), n)).collect();
        let mut module = Module::new("m");
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let types = template.sample_types(12);
        let operands: Vec<ValueId> =
            types.into_iter().enumerate().map(|(at, ty)| b.param(&format!("p{at}"), ty)).collect();
        let results = b.composite("y", &template.name, &given, &operands);
        b.finish(&results);
        check(&module);
    }
}

#[test]
fn recognised_modules_compute_the_same_bits() {
    let options = Options { seq: 4, dtype: DType::F64, dropout: Some(0.0) };
    let mut model = import(&preset("gpt2-mini").unwrap(), &options).unwrap();
    let ids = |x: &[i64]| Tensor::int(DType::I32, &[1, 4], x.to_vec());
    let mut args: Vec<Tensor> = Vec::new();
    for (seed, weight) in model.weights.iter().enumerate() {
        let draw = |at: usize| f64::from(crate::random::uniform(seed as u64, at as u64)) / 8.0;
        let count = weight.count() as usize;
        args.push(Tensor::f64(&weight.dims, (0..count).map(draw).collect()));
    }
    args.extend([ids(&[5, 6, 7, 8]), ids(&[6, 7, 8, -1])]);
    let before = eval(&model.module, "loss", &args).unwrap();
    inline_composites(&mut model.module, |_| false);
    recognise(&mut model.module);
    assert_eq!(eval(&model.module, "loss", &args).unwrap(), before);
}

/// What becomes of one function.
fn recognised(body: &str) -> String {
    let mut module = parse_module("m", &format!("module m\n{body}")).unwrap();
    recognise(&mut module);
    module.functions.last().unwrap().to_string()
}

#[test]
fn operands_may_be_swapped_and_letters_be_others() {
    let text = recognised(
        "  func @f(%x: f32[2, 6], %w: f32[6, 8]) {
    %h: f32[2, 8] = contract qr,pq->pr %w %x
    %one: f32[2, 8] = constant 1
    %n: f32[2, 8] = neg %h
    %e: f32[2, 8] = exp %n
    %d: f32[2, 8] = add %e %one
    %y: f32[2, 8] = div %h %d
    return %y
  }
",
    );
    assert!(text.contains("%y: f32[2, 8] = call @silu %h"), "{text}");
    assert!(!text.contains("exp"), "{text}");
}

const SOFTMAX: &str = "  func @f(%x: f32[2, 6]) {
    %max: f32[2] = reduce max dims=[1] %x
    %max_m: f32[2, 6] = broadcast new=[1] %max
    %shifted: f32[2, 6] = sub %x %max_m
    %e: f32[2, 6] = exp %shifted
    %sum: f32[2] = reduce sum dims=[1] %e
    %sum_m: f32[2, 6] = broadcast new=[1] %sum
    %y: f32[2, 6] = div %e %sum_m
    return %y
  }
";

#[test]
fn what_is_used_outside_or_is_not_equal_is_left_alone() {
    assert!(recognised(SOFTMAX).contains("call @softmax %x"));
    let used = SOFTMAX.replace("return %y", "return %y %e");
    assert!(!recognised(&used).contains("call"));
    let other = SOFTMAX.replace("reduce sum dims=[1]", "reduce min dims=[1]");
    assert!(!recognised(&other).contains("call"));
    let other = SOFTMAX.replace("f32[2, 6]", "f32[6, 6]").replace("f32[2]", "f32[6]");
    let other = other
        .replace("%sum_m: f32[6, 6] = broadcast new=[1]", "%sum_m: f32[6, 6] = broadcast new=[0]");
    assert!(!recognised(&other).contains("call"));
}

#[test]
fn a_call_that_needs_its_own_result_is_not_made() {
    let text = recognised(
        "  func @f(%x: f32[6, 6], %b: f32[6]) {
    %n: f32[6] = constant 6
    %e: f32[6] = constant 0.5
    %square: f32[6, 6] = mul %x %x
    %square_sum: f32[6] = reduce sum dims=[1] %square
    %mean: f32[6] = div %square_sum %n
    %mean_e: f32[6] = add %mean %e
    %rstd: f32[6] = rsqrt %mean_e
    %w: f32[6] = mul %rstd %b
    %rstd_m: f32[6, 6] = broadcast new=[1] %rstd
    %normal: f32[6, 6] = mul %x %rstd_m
    %w_m: f32[6, 6] = broadcast new=[0] %w
    %y: f32[6, 6] = mul %normal %w_m
    return %y
  }
",
    );
    assert!(!text.contains("call"), "`%w` is made of `%rstd`: {text}");
}
