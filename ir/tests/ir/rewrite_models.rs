//! What rewriting does to models: which rules fire, what is found, and that nothing else changes.

use std::collections::BTreeSet;
use std::path::Path;

use gantline_ir::autodiff::{differentiate, training_step};
use gantline_ir::build::Builder;
use gantline_ir::eval::eval;
use gantline_ir::import::{
    DecodingOptions, Description, LogitsOf, Options, decoding, import, resolve,
};
use gantline_ir::inline::inline_composites;
use gantline_ir::op::{Binary, Unary};
use gantline_ir::rewrite::rules::rules;
use gantline_ir::rewrite::saturate::Selection;
use gantline_ir::rewrite::{self, simplify};
use gantline_ir::text::parse_module;
use gantline_ir::verify::verify;
use gantline_ir::{DType, Kind, Module, Tensor, TensorType, ValueId};

use crate::draws::Draws;
use crate::generate;

/// Blocks of models that exporters write with primitives alone, and composites found in them.
const TEXTS: [(&str, &str, &[&str]); 6] = [
    ("bert", include_str!("../models/bert.graph"), &["layer_norm", "attention", "gelu_erf"]),
    ("t5", include_str!("../models/t5.graph"), &["rms_norm", "attention", "gelu_tanh"]),
    ("moe", include_str!("../models/moe.graph"), &["softmax", "silu"]),
    ("resnet", include_str!("../models/resnet.graph"), &[]),
    ("gpt2-export", include_str!("../models/gpt2_export.graph"), &["softmax"]),
    ("convnet-export", include_str!("../models/convnet_export.graph"), &[]),
];

fn described(name: &str) -> Description {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference").join(name);
    resolve(path.to_str().unwrap()).unwrap().description
}

/// Models as primitives: layers with gradients, one step of decoding, and the blocks of `TEXTS`.
pub(crate) fn modules() -> Vec<(String, Module)> {
    let mut modules = Vec::new();
    for name in ["gpt2-tiny", "llama-tiny"] {
        let dtype = DType::F64;
        let options = Options { seq: 4, dtype, dropout: Some(0.1), documents: false };
        let mut training = import(&described(name), &options).unwrap().module;
        training_step(&mut training, "loss").unwrap();
        let options = DecodingOptions { tokens: 2, capacity: 8, dtype, logits: LogitsOf::Last };
        let step = decoding(&described(name), &options).unwrap().model.module;
        modules.push((name.to_owned(), training));
        modules.push((format!("{name}-decoding"), step));
    }
    for (name, text, _) in TEXTS {
        let mut module = parse_module(name, text).unwrap();
        assert_eq!(verify(&module), [], "{name}");
        differentiate(&mut module, "main").unwrap();
        modules.push((name.to_owned(), module));
    }
    for (_, module) in &mut modules {
        inline_composites(module, |_| false);
    }
    modules
}

#[test]
fn every_rule_fires_in_a_model() {
    let mut fired = BTreeSet::new();
    // Exact rules alone, as training is prepared, leave to them what else is recognised at once.
    let exact = rewrite::Options { selection: Selection::exact(), ..Default::default() };
    for (_, module) in modules() {
        for options in [&rewrite::Options::default(), &exact] {
            fired.extend(simplify(&mut module.clone(), options).rules());
        }
    }
    let idle: Vec<&str> = rules().map(|r| r.name).filter(|name| !fired.contains(name)).collect();
    assert_eq!(idle, [""; 0], "of no use in any model");
}

#[test]
fn composites_are_found_in_blocks_as_exporters_write_them() {
    for (name, text, composites) in TEXTS {
        let before = parse_module(name, text).unwrap();
        let mut after = before.clone();
        simplify(&mut after, &rewrite::Options::default());
        assert_eq!(verify(&after), [], "{after}");
        let mut r = Draws::new(3);
        let mut args = generate::arguments(&before, "main", &mut r);
        // A variance is positive.
        let function = before.function("main").unwrap();
        if let Some(at) = function.find("variance").filter(|at| at.index() < function.param_count) {
            let arg = &mut args[at.index()];
            let positive = arg.to_f64().into_iter().map(f64::abs).collect();
            *arg = Tensor::from_f64(arg.dtype, &arg.dims, positive);
        }
        let (a, b) = (eval(&before, "main", &args).unwrap(), eval(&after, "main", &args).unwrap());
        for (a, b) in a.iter().zip(&b) {
            assert!(b.max_relative_difference(a) < 1e-9, "{name}\n{after}");
        }
        let main = after.function("main").unwrap();
        let called = main.nodes.iter().filter_map(|node| after.function(node.callee()?));
        let found: BTreeSet<&str> = called
            .filter_map(|f| match &f.kind {
                Kind::Composite { name, .. } => Some(name.as_str()),
                Kind::Layer | Kind::Kernel => None,
            })
            .collect();
        for composite in composites {
            assert!(found.contains(composite), "no {composite} in {name}\n{after}");
        }
    }
}

/// Adds `step`: what `main` computes, its gradients, and a step of AdamW with them.
///
/// Parameters: those of the gradient of `main`, then two moments for each of its own. Results:
/// those of the gradient, then each parameter and its moments after the step.
fn add_step(module: &mut Module) {
    let gradient = differentiate(module, "main").unwrap();
    let main = module.function("main").unwrap();
    let (count, yields) = (main.param_count, main.results.len());
    let types = module.function(&gradient).unwrap().param_types();
    let is_weight = |at: &usize| types[*at].dtype.is_float();
    let weights: Vec<usize> = (0..count).filter(is_weight).collect();
    let mut b = Builder::new(module, "step", Kind::Layer);
    let params: Vec<ValueId> = types.iter().map(|ty| b.param("p", ty.clone())).collect();
    let moments: Vec<[ValueId; 2]> =
        weights.iter().map(|at| ["m", "v"].map(|name| b.param(name, types[*at].clone()))).collect();
    let mut results = b.call("g", &gradient, &params);
    for (at, (weight, [m, v])) in weights.iter().zip(moments).enumerate() {
        let (w, g) = (params[*weight], results[yields + at]);
        let scaled = |b: &mut Builder<'_>, by: f64, x: ValueId| {
            let by = b.constant_like("by", by, x);
            b.binary("scaled", Binary::Mul, by, x)
        };
        let (old, new) = (scaled(&mut b, 0.9, m), scaled(&mut b, 0.1, g));
        let m = b.add("m", old, new);
        let square = b.binary("square", Binary::Mul, g, g);
        let (old, new) = (scaled(&mut b, 0.95, v), scaled(&mut b, 0.05, square));
        let v = b.add("v", old, new);
        let root = b.unary("root", Unary::Sqrt, v);
        let epsilon = b.constant_like("epsilon", 1e-3, root);
        let root = b.add("root", root, epsilon);
        let by = b.binary("by", Binary::Div, m, root);
        let decay = scaled(&mut b, 0.1, w);
        let by = b.add("by", by, decay);
        let by = scaled(&mut b, 1e-3, by);
        let w = b.binary("w", Binary::Sub, w, by);
        results.extend([w, m, v]);
    }
    b.finish(&results);
}

/// Forward, backward and optimizer of the blocks of exporters, before and after.
#[test]
fn steps_of_blocks_are_cheaper_and_equal() {
    for (name, text, composites) in TEXTS {
        let mut before = parse_module(name, text).unwrap();
        add_step(&mut before);
        assert_eq!(verify(&before), [], "{name}");
        let mut r = Draws::new(11);
        let mut args = generate::arguments(&before, "step", &mut r);
        let step = before.function("step").unwrap();
        let main = before.function("main").unwrap();
        for (at, param) in step.params().enumerate() {
            // Variances, and what is summed up of squares, are positive.
            let is_variance =
                main.params().nth(at).is_some_and(|p| main.value(p).name == "variance");
            if is_variance || step.value(param).name.starts_with('v') {
                let positive = args[at].to_f64().into_iter().map(f64::abs).collect();
                args[at] = Tensor::from_f64(args[at].dtype, &args[at].dims, positive);
            }
        }
        let wanted = eval(&before, "step", &args).unwrap();
        let mut after = before.clone();
        let report = simplify(&mut after, &rewrite::Options::default());
        assert_eq!(verify(&after), [], "{name}");
        assert!(composites.is_empty() || !report.rules().is_empty(), "{name}");
        for (before, after) in report.functions.iter().map(|f| (&f.before, &f.after)) {
            assert!(after.price() <= before.price(), "{name}");
        }
        let found = eval(&after, "step", &args).unwrap();
        assert!(
            wanted.len() >= 3 * main.param_types().iter().filter(|ty| ty.dtype.is_float()).count()
        );
        for (at, (a, b)) in wanted.iter().zip(&found).enumerate() {
            assert!(a.to_f64().iter().all(|x| x.is_finite()), "{name}: result {at}");
            assert!(b.max_relative_difference(a) < 1e-9, "{name}: result {at}");
        }
    }
}

/// Twenty steps of descent on the interpreter, in f32: primitives alone, against what is found in
/// them, attention and its gradient among it.
#[test]
fn twenty_steps_with_and_without_attention_have_equal_losses() {
    for name in ["gpt2-tiny", "llama-tiny"] {
        let options = Options { seq: 4, dtype: DType::F32, dropout: Some(0.0), documents: false };
        let mut flat = import(&described(name), &options).unwrap().module;
        inline_composites(&mut flat, |_| false);
        let mut fused = flat.clone();
        simplify(&mut fused, &rewrite::Options::default());
        let is_attention = |f: &gantline_ir::Function| match &f.kind {
            Kind::Composite { name, .. } => name.starts_with("attention"),
            Kind::Layer | Kind::Kernel => false,
        };
        assert!(fused.functions.iter().any(is_attention), "{name}: {fused}");
        assert!(!flat.functions.iter().any(is_attention), "{name}");
        let losses = [flat, fused].map(|mut module| {
            let entry = training_step(&mut module, "loss").unwrap();
            losses_of(&module, &entry)
        });
        assert!(losses[0][19] < 0.95 * losses[0][0], "{name} does not learn: {:?}", losses[0]);
        for (step, (a, b)) in losses[0].iter().zip(&losses[1]).enumerate() {
            assert!((a - b).abs() <= 1e-5 * a.abs(), "{name}, step {step}: {a} or {b}");
        }
    }
}

/// The mean losses of twenty steps of descent by a gradient.
fn losses_of(module: &Module, entry: &str) -> Vec<f64> {
    let mut r = Draws::new(5);
    let types: Vec<TensorType> = generate::bound_types(module, entry, 2);
    let mut args: Vec<Tensor> = types
        .iter()
        .map(|ty| {
            let dims = ty.sizes().unwrap();
            let count: usize = dims.iter().product();
            if ty.dtype == DType::U32 {
                return r.key();
            }
            if !ty.dtype.is_float() {
                return r.ids(&dims, 0, 9);
            }
            let numbers = (0..count).map(|_| r.number(-0.3, 0.3)).collect();
            Tensor::from_f64(ty.dtype, &dims, numbers)
        })
        .collect();
    let mut losses = Vec::new();
    for _ in 0..20 {
        let results = eval(module, entry, &args).unwrap();
        let count = results[1].scalar();
        losses.push(results[0].scalar() / count);
        let floats = args.iter_mut().filter(|arg| arg.dtype.is_float());
        for (weight, grad) in floats.zip(&results[2..]) {
            let pairs = weight.to_f64().into_iter().zip(grad.to_f64());
            let moved = pairs.map(|(w, g)| w - 0.1 * g / count).collect();
            *weight = Tensor::from_f64(weight.dtype, &weight.dims, moved);
        }
    }
    losses
}
