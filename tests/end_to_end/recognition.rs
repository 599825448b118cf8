//! Composites found in layers that are written out of primitives, before they are differentiated:
//! training runs their kernels, and computes what the text says.

use std::collections::BTreeSet;

use codegen::prepare::{Preparation, Purpose, prepare};
use ir::autodiff::gradient_name;
use ir::import::{self, Description, Model, read_graph};
use ir::plan::Keep;
use ir::random::Key;
use ir::rewrite::saturate::Selection;
use ir::{DType, Kind, Mesh, Module, Tensor};
use runtime::execute::{Batch, Scalars};

use crate::mesh::{Weights, arguments, batch, random_weights};
use crate::model::{Wanted, load, plan, session};

const SEQ: usize = 6;
const SAMPLES: usize = 2;

/// A decoder's block as exporters write it: RMS norm, rotary embedding, attention of shared key
/// heads by a stored scale and a mask that is computed, layer norm, GELU by tanh, SiLU.
const BLOCK: &str = include_str!("block.graph");

fn description(text: &str, dtype: DType) -> Description {
    let is_double = dtype == DType::F64;
    let text = if is_double { text.replace("f32[", "f64[") } else { text.to_owned() };
    read_graph("block.graph", &text, "block").expect("it is a model")
}

fn model(dtype: DType) -> Model {
    model_of(BLOCK, dtype)
}

fn model_of(text: &str, dtype: DType) -> Model {
    let options = import::Options { seq: SEQ, dtype, dropout: Some(0.0), documents: false };
    import::import(&description(text, dtype), &options).expect("the model is imported")
}

/// The same with dropout of what weighs values, whose draws count heads and rows in that order.
fn with_dropout() -> String {
    let product = "%o: f32[B, 4, 6, 4] = contract bhsn,bhnd->bhsd %p %vh";
    let dropped = "%draw: f32[B, 4, 6, 6] = random salt=5 %key
    %rate: f32[B, 4, 6, 6] = constant 0.25
    %dropped: bool[B, 4, 6, 6] = lt %draw %rate
    %nothing: f32[B, 4, 6, 6] = constant 0
    %left: f32[B, 4, 6, 6] = select %dropped %nothing %p
    %more: f32[B, 4, 6, 6] = constant 1.3333333333333333
    %thin: f32[B, 4, 6, 6] = mul %left %more
    %o: f32[B, 4, 6, 4] = contract bhsn,bhnd->bhsd %thin %vh";
    let block = |x: &str, name: &str| format!("= call @block {x} {name}.ln1");
    let mut text = BLOCK.replace(product, dropped);
    text = text.replace("%down: f32[8, 12]) {", "%down: f32[8, 12], %key: u32[4]) {");
    text = text
        .replace("%labels: i32[B, 6]) {\n    %x0", "%labels: i32[B, 6], %key: u32[4]) {\n    %x0");
    for (at, name) in ["a", "b"].into_iter().enumerate() {
        let call = text
            .lines()
            .find(|line| line.contains(&block(&format!("%x{at}"), &format!("%{name}"))));
        let call = call.expect("the entry calls the block").to_owned();
        let folded =
            format!("    %{name}.key: u32[4] = fold_key salt={at} %key\n{call} %{name}.key");
        text = text.replace(&call, &folded);
    }
    text
}

/// The module as it is differentiated, and as it is planned.
fn prepared(model: &Model, selection: Selection) -> [Module; 2] {
    let mut differentiated = Module::default();
    let after = &mut |pass, module: &Module| {
        if pass == "autodiff" {
            differentiated = module.clone();
        }
    };
    let preparation = Preparation {
        purpose: Purpose::Training,
        selection,
        precision: ir::precision::Precision::uniform(DType::F32),
        after,
    };
    let prepared = prepare(model.module.clone(), "loss", preparation);
    let (prepared, _) = prepared.expect("the module is prepared");
    [differentiated, prepared]
}

/// The composites that a function calls.
fn called<'m>(module: &'m Module, function: &str) -> BTreeSet<&'m str> {
    let function = module.function(function).expect("it is there");
    let callees = function.nodes.iter().filter_map(|node| module.function(node.callee()?));
    let name = |callee: &'m ir::Function| match &callee.kind {
        Kind::Composite { name, .. } => Some(name.as_str()),
        Kind::Layer | Kind::Kernel => None,
    };
    callees.filter_map(name).collect()
}

/// The loss and all gradients of one step.
fn step(module: &Module, dtype: DType, model: &Model, weights: &Weights) -> Vec<Vec<f64>> {
    let wanted = Wanted {
        mesh: Mesh::ONE,
        microbatch_size: SAMPLES,
        microbatch_count: 1,
        keep: Keep::Full,
        sequence: false,
    };
    let plan = plan(module, SEQ, dtype, wanted).expect("a plan");
    let mut session = session(module, &plan);
    load(&mut session, weights);
    let (tokens, labels) = batch(3, SAMPLES, SEQ, 20);
    let batch = Batch { tokens: &tokens, labels: &labels, ..Batch::default() };
    let scalars = Scalars {
        seed: 7,
        step: 1,
        rate: 0.0,
        correction1: 0.1,
        correction2: 0.001,
        clip: f64::INFINITY,
        ..Scalars::default()
    };
    let loss = session.step(&batch, scalars).expect("the step runs").loss_sum;
    let grad = |weight: &import::Weight| {
        session.read_grad(&weight.name).expect("the gradient is there").to_f64()
    };
    std::iter::once(vec![loss]).chain(model.weights.iter().map(grad)).collect()
}

/// The same by the interpreter, of the text as it stands.
fn interpreted(model: &Model, weights: &Weights) -> Vec<Vec<f64>> {
    let mut module = model.module.clone();
    let step = ir::autodiff::training_step(&mut module, "loss").expect("it is differentiable");
    let (tokens, labels) = batch(3, SAMPLES, SEQ, 20);
    let mut args = arguments(model, weights, [&tokens, &labels], SEQ);
    if model.module.function("loss").is_some_and(|entry| entry.find("key").is_some()) {
        args.push(Tensor::key(Key { seed: 7, step: 1, path: 0, sample: 0 }));
    }
    let results = ir::eval::eval(&module, &step, &args).expect("the step evaluates");
    let grads = results[2..2 + model.weights.len()].iter();
    std::iter::once(&results[0]).chain(grads).map(Tensor::to_f64).collect()
}

fn assert_near(found: &[Vec<f64>], wanted: &[Vec<f64>], most: f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let largest = wanted.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        assert!(largest > 0.0, "{what}: result {at} is nothing but zeros");
        for (x, y) in found.iter().zip(wanted) {
            assert!((x - y).abs() <= most * largest, "{what}: result {at} is {x}, not {y}");
        }
    }
}

#[test]
fn blocks_of_primitives_train_with_the_kernels_of_composites() {
    let wanted = ["attention", "gelu_tanh", "layer_norm", "rms_norm", "rope", "silu"];
    let backward =
        ["attention_bwd", "gelu_tanh_bwd", "layer_norm_bwd", "rms_norm_bwd", "rope", "silu_bwd"];
    let weights = random_weights(&model(DType::F64), 5);
    let reference = interpreted(&model(DType::F64), &weights);
    for (dtype, most) in [(DType::F64, 1e-10), (DType::F32, 2e-5)] {
        let model = model(dtype);
        let [differentiated, found] = prepared(&model, Selection::for_models());
        assert_eq!(called(&differentiated, "block"), BTreeSet::from(wanted));
        let of_gradient = called(&differentiated, &gradient_name("block"));
        assert!(backward.iter().all(|name| of_gradient.contains(name)), "{of_gradient:?}");
        let [differentiated, plain] = prepared(&model, Selection::exact());
        assert_eq!(called(&differentiated, "block"), BTreeSet::from(["softmax"]));
        let found = step(&found, dtype, &model, &weights);
        assert_near(&found, &reference, most, &format!("{dtype}, and the interpreter"));
        let plain = step(&plain, dtype, &model, &weights);
        assert_near(&found, &plain, most, &format!("{dtype}, without recognition"));
    }
}

#[test]
fn dropout_of_attention_trains_with_its_kernel_and_its_draws() {
    let text = with_dropout();
    let weights = random_weights(&model_of(&text, DType::F64), 5);
    let reference = interpreted(&model_of(&text, DType::F64), &weights);
    let kept = interpreted(&model(DType::F64), &weights);
    assert!((reference[0][0] - kept[0][0]).abs() > 1e-6 * kept[0][0].abs(), "nothing is dropped");
    for (dtype, most) in [(DType::F64, 1e-10), (DType::F32, 2e-5)] {
        let model = model_of(&text, dtype);
        let [differentiated, found] = prepared(&model, Selection::for_models());
        assert!(called(&differentiated, "block").contains("attention_dropout"));
        let of_gradient = called(&differentiated, &gradient_name("block"));
        assert!(of_gradient.contains("attention_dropout_bwd"), "{of_gradient:?}");
        let found = step(&found, dtype, &model, &weights);
        assert_near(&found, &reference, most, &format!("{dtype}, and the interpreter"));
        let [_, plain] = prepared(&model, Selection::exact());
        let plain = step(&plain, dtype, &model, &weights);
        assert_near(&found, &plain, most, &format!("{dtype}, without recognition"));
    }
}
