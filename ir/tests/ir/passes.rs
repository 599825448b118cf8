//! Passes keep what a function computes, bit for bit, and leave a module that verifies.

use gantline_ir::autodiff::differentiate;
use gantline_ir::eval::eval;
use gantline_ir::pass::{remove_common_nodes, remove_dead_nodes, take_once, yield_once};
use gantline_ir::text::parse_module;
use gantline_ir::verify::verify;
use gantline_ir::{Function, Module, Tensor};

use crate::draws::{Draws, seeds};
use crate::generate;

/// The bits, so that a NaN equals itself.
pub(crate) fn bits(tensors: &[Tensor]) -> Vec<(Vec<usize>, Vec<u64>)> {
    let of = |t: &Tensor| (t.dims.clone(), t.to_f64().iter().map(|x| x.to_bits()).collect());
    tensors.iter().map(of).collect()
}

fn holds(pass: fn(&mut Function) -> bool) {
    let mut changes = 0;
    for seed in seeds(200) {
        let mut r = Draws::new(seed);
        let module = generate::module(&mut r);
        let args = generate::arguments(&module, "main", &mut r);
        let mut passed: Module = module.clone();
        for function in &mut passed.functions {
            changes += u32::from(pass(function));
            assert!(!pass(function), "SEED={seed}: a second run changes @{}", function.name);
        }
        assert_eq!(verify(&passed), [], "SEED={seed}\n{passed}");
        let (before, after) = (eval(&module, "main", &args), eval(&passed, "main", &args));
        assert_eq!(bits(&before.unwrap()), bits(&after.unwrap()), "SEED={seed}\n{module}");
    }
    assert!(changes > 50 || std::env::var("SEED").is_ok(), "only {changes} changes");
}

#[test]
fn dead_nodes_are_not_missed() {
    holds(remove_dead_nodes);
}

#[test]
fn common_nodes_are_one() {
    holds(remove_common_nodes);
}

/// Values of random programs are too wild for differences: here only that derivatives are modules,
/// compute the same results, and yield a gradient of each parameter's type.
#[test]
fn random_modules_have_derivatives() {
    let mut refused = 0;
    for seed in seeds(200) {
        let mut r = Draws::new(seed);
        let mut module = generate::module(&mut r);
        let mut args = generate::arguments(&module, "main", &mut r);
        let results = eval(&module, "main", &args).unwrap();
        let derivative = match differentiate(&mut module, "main") {
            Ok(derivative) => derivative,
            Err(found) => {
                assert_eq!(found.code, "E1012", "SEED={seed}");
                refused += 1;
                continue;
            }
        };
        assert_eq!(verify(&module), [], "SEED={seed}\n{module}");
        let floats = results.iter().filter(|t| t.dtype.is_float());
        let ones: Vec<Tensor> = floats.map(|t| Tensor::filled(t.dtype, &t.dims, 1.0)).collect();
        args.extend(ones);
        let found = eval(&module, &derivative, &args).unwrap();
        assert_eq!(bits(&found[..results.len()]), bits(&results), "SEED={seed}\n{module}");
        let types: Vec<_> = found[results.len()..].iter().map(Tensor::ty).collect();
        assert_eq!(types, [args[1].ty(), args[2].ty()], "SEED={seed}");
    }
    assert!(refused < 60, "{refused} refused");
}

/// A layer that yields a value twice, to callers that read both.
const TWICE: &str = "module m
  func @stem(%x: f64[3, 4], %w: f64[4, 2]) {
    %y: f64[3, 2] = contract bc,cd->bd %x %w
    %z: f64[3, 2] = tanh %y
    return %y %z %y
  }
  func @head(%a: f64[3, 2], %b: f64[3, 2], %c: f64[3, 2], %u: f64[2, 2]) {
    %s: f64[3, 2] = mul %a %a
    %t: f64[3, 2] = contract bc,cd->bd %c %u
    %p: f64[3, 2] = add %s %t
    %q: f64[3, 2] = add %p %b
    return %q
  }
  func @loss(%x: f64[3, 4], %w: f64[4, 2], %u: f64[2, 2]) {
    %a: f64[3, 2], %b: f64[3, 2], %c: f64[3, 2] = call @stem %x %w
    %q: f64[3, 2] = call @head %a %b %c %u
    return %q
  }
";

/// Each use of a value that a layer yields twice counts in its gradient, and yielding it once is
/// the same.
#[test]
fn what_is_yielded_twice_has_the_gradient_of_both() {
    let twice = parse_module("m", TWICE).unwrap();
    let mut once = twice.clone();
    assert!(yield_once(&mut once) && !yield_once(&mut once.clone()));
    assert_eq!(verify(&once), [], "{once}");
    assert_eq!(once.function("stem").unwrap().results.len(), 2);
    assert!(take_once(&mut once) && !take_once(&mut once.clone()));
    assert_eq!(verify(&once), [], "{once}");
    assert_eq!(once.function("head").unwrap().param_count, 3);
    let mut inlined = TWICE.replace("return %y %z %y", "return %y %z %k");
    inlined = inlined.replace("    return %y %z", "    %k: f64[3, 2] = neg %n\n    return %y %z");
    inlined = inlined.replace("    %z:", "    %n: f64[3, 2] = neg %y\n    %z:");
    let apart = parse_module("m", &inlined).unwrap();
    let gradients = [twice, once, apart].map(|mut module| {
        let gradient = differentiate(&mut module, "loss").unwrap();
        let args = generate::arguments(&module, &gradient, &mut Draws::new(5));
        eval(&module, &gradient, &args).unwrap()
    });
    for other in &gradients[..2] {
        for (found, wanted) in other.iter().zip(&gradients[2]) {
            assert!(found.max_relative_difference(wanted) < 1e-12, "{found:?} {wanted:?}");
        }
    }
}
