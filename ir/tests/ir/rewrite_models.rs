//! What rewriting does to models: which rules fire, what is found, and that nothing else changes.

use std::collections::BTreeSet;
use std::path::Path;

use gantline_ir::autodiff::{differentiate, training_step};
use gantline_ir::eval::eval;
use gantline_ir::import::{
    DecodingOptions, Description, LogitsOf, Options, decoding, import, resolve,
};
use gantline_ir::inline::inline_composites;
use gantline_ir::rewrite::rules::rules;
use gantline_ir::rewrite::{self, simplify};
use gantline_ir::text::parse_module;
use gantline_ir::verify::verify;
use gantline_ir::{DType, Kind, Module, Tensor};

use crate::draws::Draws;
use crate::generate;

/// Blocks of models that exporters write with primitives alone, and composites found in them.
const TEXTS: [(&str, &str, &[&str]); 6] = [
    ("bert", include_str!("../models/bert.graph"), &["layer_norm", "softmax", "gelu_erf"]),
    ("t5", include_str!("../models/t5.graph"), &["rms_norm", "softmax", "gelu_tanh"]),
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
        let options = Options { seq: 4, dtype, dropout: Some(0.1) };
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
    for (_, mut module) in modules() {
        fired.extend(simplify(&mut module, &rewrite::Options::default()).rules());
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
