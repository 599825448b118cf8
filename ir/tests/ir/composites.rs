//! Composites: their gradients against those of their definitions, and against differences.

use gantline_ir::autodiff::differentiate;
use gantline_ir::build::Builder;
use gantline_ir::eval::eval;
use gantline_ir::inline::inline_composites;
use gantline_ir::library::{Argument, templates};
use gantline_ir::module::Attributes;
use gantline_ir::{Function, Kind, Module, Op, Tensor};

use crate::draws::{Draws, seeds};
use crate::gradients::{assert_close, differences, gradients, random_cotangents};

/// Attributes and operands of a composite that has a gradient.
fn sample(name: &str, r: &mut Draws) -> (Vec<(&'static str, f64)>, Vec<Tensor>) {
    let count = 1 + r.below(3);
    let dims = r.dims(count);
    let size = 2 + r.below(4);
    let wide: Vec<usize> = dims.iter().copied().chain([size]).collect();
    let (batch, rows, heads, groups) =
        (1 + r.below(2), 1 + r.below(4), 1 + r.below(3), 1 + r.below(2));
    let (q, kv) = ([batch, rows, heads * groups, 4], [batch, rows, groups, 4]);
    let offset = if r.coin() { 0.0 } else { 1000.0 };
    let mut attention = vec![("scale", 0.7), ("group", heads as f64), ("query_offset", offset)];
    match name {
        "layer_norm" => {
            (vec![("eps", 0.1)], vec![r.signed(&wide), r.signed(&[size]), r.signed(&[size])])
        }
        "rms_norm" => (vec![("eps", 0.1)], vec![r.signed(&wide), r.signed(&[size])]),
        "softmax" | "gelu_tanh" | "gelu_erf" | "silu" | "relu" => (vec![], vec![r.signed(&wide)]),
        "dropout" => (vec![("p", 0.3), ("salt", 5.0)], vec![r.signed(&wide), r.key()]),
        "cross_entropy" => (vec![], vec![r.signed(&wide), r.ids(&dims, -1, size as i64)]),
        "attention" => (attention, vec![r.signed(&q), r.signed(&kv), r.signed(&kv)]),
        "attention_dropout" => {
            let all = (heads * groups) as f64;
            attention.extend([("p", 0.3), ("salt", 7.0), ("heads", all)]);
            (attention, vec![r.signed(&q), r.signed(&kv), r.signed(&kv), r.key()])
        }
        "rope" => (vec![("theta", 100.0)], vec![r.signed(&q), r.ids(&[], 0, 9)]),
        _ => panic!("`{name}` has a gradient and needs a sample here"),
    }
}

/// `@f` calls the composite and returns the results whose cotangents its gradient takes.
fn module_of(name: &str, attributes: &[(&str, f64)], operands: &[Tensor]) -> Module {
    let mut module = Module::new(name);
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operand = |(at, t): (usize, &Tensor)| b.param(&format!("x{at}"), t.ty());
    let operands: Vec<_> = operands.iter().enumerate().map(operand).collect();
    let results = b.composite("y", name, attributes, &operands);
    let given = attributes.iter().map(|(name, number)| ((*name).to_owned(), *number)).collect();
    let gradient = templates()[name].definition(&given).gradient.clone().unwrap();
    let callee: &Function = b.module().functions.iter().find(|f| f.name == name).unwrap();
    let taken = |at: usize| {
        let name = callee.value(callee.results[at]).name.clone();
        gradient.arguments.contains(&Argument::Cotangent(name))
    };
    let wanted: Vec<_> = (0..results.len()).filter(|at| taken(*at)).map(|at| results[at]).collect();
    b.finish(&wanted);
    module
}

fn calls(module: &Module, function: &str) -> Vec<String> {
    let nodes = &module.function(function).unwrap().nodes;
    let callee =
        |op: &Op| if let Op::Call { function } = op { Some(function.clone()) } else { None };
    nodes.iter().filter_map(|n| callee(&n.op)).collect()
}

#[test]
fn gradient_composites_are_those_of_the_definitions() {
    for seed in seeds(30) {
        let mut r = Draws::new(seed);
        for template in templates().values() {
            let plain = template.definition(&Attributes::new()).gradient.clone();
            let Some(gradient) = plain else { continue };
            let (attributes, operands) = sample(&template.name, &mut r);
            let mut module = module_of(&template.name, &attributes, &operands);
            let what = format!("SEED={seed} {}", template.name);
            let mut inlined = module.clone();
            assert!(inline_composites(&mut inlined, |_| false), "{what}");
            let results = eval(&module, "f", &operands).unwrap();
            assert_eq!(results, eval(&inlined, "f", &operands).unwrap(), "{what}");
            let d = random_cotangents(&mut r, &results);
            let found = gradients(&mut module, "f", &operands, &d);
            let called = calls(&module, "f.grad");
            let is_instance = |name: &String| name.starts_with(&gradient.callee);
            assert!(called.iter().skip(1).any(is_instance), "{what} calls {called:?}");
            let wanted = gradients(&mut inlined, "f", &operands, &d);
            assert_close(&found, &wanted, 1e-10, &what);
            let differences = differences(&inlined, "f", &operands, &d);
            assert_close(&wanted, &differences, 1e-6, &what);
        }
    }
}

#[test]
fn a_cotangent_of_a_residual_inlines_the_composite() {
    let mut r = Draws::new(3);
    let mut module = Module::new("m");
    let (x, w) = (r.signed(&[3, 4]), r.signed(&[4]));
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let operands = [b.param("x", x.ty()), b.param("w", w.ty())];
    let results = b.composite("y", "rms_norm", &[("eps", 0.1)], &operands);
    b.finish(&results);
    let args = [x, w];
    let d = random_cotangents(&mut r, &eval(&module, "f", &args).unwrap());
    let found = gradients(&mut module, "f", &args, &d);
    assert_eq!(calls(&module, "f.grad"), [""; 0]);
    assert_close(&found, &differences(&module, "f", &args, &d), 1e-6, "rms_norm with rstd");
    assert_eq!(differentiate(&mut module, "f").unwrap(), "f.grad");
}
