//! Gradients against central differences.

use gantline_ir::autodiff::{differentiate, training_step};
use gantline_ir::build::Builder;
use gantline_ir::eval::eval;
use gantline_ir::text::parse_module;
use gantline_ir::{Kind, Module, Op, Tensor};

use crate::draws::{Draws, seeds};
use crate::ops::{Case, cases, kinds};

/// Half the distance of the two points of a difference. Chosen: in f64 the rounding of values near
/// one and the cubic term then both stay near 1e-10.
const STEP: f64 = 1e-6;
/// The largest difference, relative to the larger of one and the gradient.
const TOLERANCE: f64 = 1e-6;

/// The cotangents of the floating-point results.
pub(crate) fn random_cotangents(r: &mut Draws, results: &[Tensor]) -> Vec<Tensor> {
    results.iter().filter(|t| t.dtype.is_float()).map(|t| r.signed(&t.dims)).collect()
}

/// The gradients of the floating-point parameters by the module's derivative.
pub(crate) fn gradients(
    module: &mut Module,
    name: &str,
    args: &[Tensor],
    d: &[Tensor],
) -> Vec<Tensor> {
    let derivative = differentiate(module, name).unwrap();
    let results = module.function(name).unwrap().results.len();
    let args: Vec<Tensor> = args.iter().chain(d).cloned().collect();
    eval(module, &derivative, &args).unwrap().split_off(results)
}

/// The same by central differences.
pub(crate) fn differences(
    module: &Module,
    name: &str,
    args: &[Tensor],
    d: &[Tensor],
) -> Vec<Tensor> {
    let objective = |args: &[Tensor]| -> f64 {
        let results = eval(module, name, args).unwrap();
        let floats = results.iter().filter(|t| t.dtype.is_float());
        let dot = |(y, d): (&Tensor, &Tensor)| -> f64 {
            y.to_f64().iter().zip(d.to_f64()).map(|(y, d)| y * d).sum()
        };
        floats.zip(d).map(dot).sum()
    };
    let mut gradients = Vec::new();
    for (at, arg) in args.iter().enumerate().filter(|(_, t)| t.dtype.is_float()) {
        let numbers = arg.to_f64();
        let slope = |element: usize| {
            let moved = |by: f64| {
                let mut numbers = numbers.clone();
                numbers[element] += by;
                let mut args = args.to_vec();
                args[at] = Tensor::f64(&arg.dims, numbers);
                objective(&args)
            };
            (moved(STEP) - moved(-STEP)) / (2.0 * STEP)
        };
        gradients.push(Tensor::f64(&arg.dims, (0..numbers.len()).map(slope).collect()));
    }
    gradients
}

/// Fails when two lists of gradients differ.
pub(crate) fn assert_close(found: &[Tensor], wanted: &[Tensor], tolerance: f64, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}: the number of gradients");
    for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let difference = found.max_relative_difference(wanted);
        let values = || format!("{:?}\nagainst {:?}", found.to_f64(), wanted.to_f64());
        assert!(difference <= tolerance, "{what}: gradient {at} off by {difference}: {}", values());
    }
}

/// A module with a function `@f` of one node, beside a layer that cases may call.
fn module_of(case: &Case) -> Module {
    let layer = "module m
  func @layer(%x: f64[2, 3], %ids: i32[2]) {
    %y: f64[2, 3] = tanh %x
    %z: f64[2, 3] = gather dim=0 start=0 %y %ids
    %twice: f64[2, 3] = add %z %y
    return %twice %ids %y
  }
";
    let mut module = parse_module("layer", layer).unwrap();
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operand = |(at, t): (usize, &Tensor)| b.param(&format!("x{at}"), t.ty());
    let operands: Vec<_> = case.operands.iter().enumerate().map(operand).collect();
    let results = b.push_all("y", case.op.clone(), &operands);
    b.finish(&results);
    module
}

#[test]
fn every_op_has_the_gradient_of_its_differences() {
    for seed in seeds(40) {
        let mut r = Draws::new(seed);
        for kind in kinds() {
            for case in cases(&kind, &mut r) {
                let mut module = module_of(&case);
                if let Op::Collective { .. } | Op::ScaledContract { .. } = case.op {
                    let refused = differentiate(&mut module, "f").unwrap_err();
                    assert_eq!(refused.code, "E1012");
                    continue;
                }
                let results = eval(&module, "f", &case.operands).unwrap();
                let d = random_cotangents(&mut r, &results);
                let found = gradients(&mut module, "f", &case.operands, &d);
                let wanted = differences(&module, "f", &case.operands, &d);
                let what = format!("SEED={seed} {:?}\n{module}", case.op);
                assert_close(&found, &wanted, TOLERANCE, &what);
            }
        }
    }
}

/// The derivative of a derivative, against differences of the derivative.
#[test]
fn gradients_of_linear_ops_have_gradients() {
    for seed in seeds(8) {
        let mut r = Draws::new(seed);
        let is_tried = |kind: &Op| {
            matches!(kind, Op::Conv(_) | Op::Window(_) | Op::Fold { .. })
                || matches!(kind, Op::Reverse { .. } | Op::Scatter { .. } | Op::Contract(_))
        };
        for kind in kinds().into_iter().filter(is_tried) {
            for case in cases(&kind, &mut r) {
                let mut module = module_of(&case);
                let results = eval(&module, "f", &case.operands).unwrap();
                let first = random_cotangents(&mut r, &results);
                let name = differentiate(&mut module, "f").unwrap();
                let args: Vec<Tensor> = case.operands.iter().chain(&first).cloned().collect();
                let results = eval(&module, &name, &args).unwrap();
                let d = random_cotangents(&mut r, &results);
                let found = gradients(&mut module, &name, &args, &d);
                let wanted = differences(&module, &name, &args, &d);
                let what = format!("SEED={seed} {:?}\n{module}", case.op);
                assert_close(&found, &wanted, TOLERANCE, &what);
            }
        }
    }
}

fn gradient_of(op: &str, args: &[Tensor]) -> Vec<f64> {
    let n = args[0].count();
    let text = match args.len() {
        1 => format!("module m\n func @f(%x: f64[{n}]) {{\n {op} %x\n return %y\n }}\n"),
        _ => format!(
            "module m\n func @f(%x: f64[{n}], %z: f64[{n}]) {{\n {op} %x %z\n return %y\n }}\n"
        ),
    };
    let mut module = parse_module("m", &text).unwrap();
    let results = eval(&module, "f", args).unwrap();
    let d: Vec<Tensor> =
        results.iter().map(|t| Tensor::f64(&t.dims, vec![1.0; t.count()])).collect();
    gradients(&mut module, "f", args, &d).iter().flat_map(Tensor::to_f64).collect()
}

#[test]
fn kinks_take_the_side_that_is_documented() {
    let t = |x: &[f64]| Tensor::f64(&[x.len()], x.to_vec());
    assert_eq!(gradient_of("%y: f64[1] = abs", &[t(&[0.0])]), [0.0]);
    assert_eq!(gradient_of("%y: f64[1] = max", &[t(&[2.0]), t(&[2.0])]), [0.0, 1.0]);
    assert_eq!(gradient_of("%y: f64[1] = min", &[t(&[2.0]), t(&[2.0])]), [0.0, 1.0]);
    let shared = gradient_of("%y: f64[] = reduce max dims=[0]", &[t(&[1.0, 3.0, 3.0])]);
    assert_eq!(shared, [0.0, 0.5, 0.5]);
    assert_eq!(gradient_of("%y: f64[1] = pow", &[t(&[0.0]), t(&[0.0])]), [0.0, 0.0]);
}

const MODEL: &str = "module m
  func @layer(%x: f64[B, 3], %w: f64[3, 3]) {
    %h: f64[B, 3] = contract bm,mn->bn %x %w
    %t: f64[B, 3] = tanh %h
    %y: f64[B, 3] = add %x %t
    return %y
  }
  func @model(%table: f64[5, 3], %w0: f64[3, 3], %w1: f64[3, 3], %unused: f64[2], %ids: i32[B]) {
    %x0: f64[B, 3] = gather dim=0 start=0 %table %ids
    %x1: f64[B, 3] = call @layer %x0 %w0
    %x2: f64[B, 3] = call @layer %x1 %w1
    %logits: f64[B, 5] = contract bm,vm->bv %x2 %table
    %p: f64[B, 5] = mul %logits %logits
    %sum: f64[] = reduce sum dims=[0, 1] %p
    %count: f64[] = constant 4
    return %sum %count
  }
";

#[test]
fn a_model_of_layers_trains() {
    let mut r = Draws::new(1);
    let mut module = parse_module("m", MODEL).unwrap();
    let mut args = vec![r.signed(&[5, 3]), r.signed(&[3, 3]), r.signed(&[3, 3]), r.signed(&[2])];
    args.push(r.ids(&[4], 0, 5));
    assert_eq!(training_step(&mut module, "model").unwrap(), "step_part");
    let text = module.to_string();
    assert_eq!(parse_module("text", &text).unwrap(), module, "{text}");
    let results = eval(&module, "step_part", &args).unwrap();
    assert_eq!(results[..2], eval(&module, "model", &args).unwrap());
    let d = [Tensor::f64(&[], vec![1.0]), Tensor::f64(&[], vec![0.0])];
    let wanted = differences(&module, "model", &args, &d);
    assert_close(&results[2..], &wanted, TOLERANCE, &text);
    let step = module.function("step_part").unwrap();
    let primal = module.function("model").unwrap();
    let names = |f: &gantline_ir::Function, n: usize| -> Vec<String> {
        f.nodes[..n].iter().map(|n| f.value(n.result()).name.clone()).collect()
    };
    assert_eq!(names(step, primal.nodes.len()), names(primal, primal.nodes.len()));
    let refused = training_step(&mut module, "layer").unwrap_err();
    assert_eq!(refused.code, "E1013");
}
