//! Models as the two exporters of PyTorch write them: what ONNX Runtime computes, and what is
//! recognised in them.

#![allow(clippy::unwrap_used, reason = "a test may fail anywhere")]

use std::collections::BTreeMap;

use bytes::Bytes;
use gantline_ir::eval::eval;
use gantline_ir::import::onnx::{ENTRY, Given, Onnx, read_onnx};
use gantline_ir::rewrite::{Options, simplify};
use gantline_ir::verify::verify;
use gantline_ir::{DType, Function, Kind, Module, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

#[path = "families/drawn.rs"]
#[allow(dead_code, reason = "the families have weights and names of their own")]
mod drawn;
#[path = "exports/drawn.rs"]
#[allow(dead_code, reason = "other tests write the files of weights")]
mod exports;

/// The largest error, relative to the largest element of an output: sums in another order.
const ERROR_MAX: f64 = 1e-5;

/// How often each composite stands in the models whose names begin so.
const COMPOSITES: &[(&str, &[(&str, usize)])] = &[
    ("bert", &[("attention", 2), ("layer_norm", 5), ("gelu_erf", 2)]),
    ("distilbert", &[("attention", 2), ("layer_norm", 5), ("gelu_erf", 2)]),
    ("gpt2", &[("attention", 2), ("layer_norm", 5), ("gelu_tanh", 2)]),
    ("llama", &[("attention", 2), ("rms_norm", 5), ("silu", 2), ("rope", 4)]),
    ("mistral", &[("attention", 2), ("rms_norm", 5), ("silu", 2), ("rope", 4)]),
    ("gptneox", &[("attention", 2), ("layer_norm", 5), ("gelu_erf", 2), ("rope", 4)]),
    ("bloom", &[("attention", 2), ("layer_norm", 6), ("gelu_tanh", 2)]),
    ("t5encoder", &[("attention", 2), ("rms_norm", 5), ("gelu_tanh", 2)]),
    ("vit", &[("attention", 2), ("layer_norm", 5), ("gelu_erf", 2)]),
    ("swin", &[("attention", 4), ("layer_norm", 11), ("gelu_erf", 4)]),
    ("whisperencoder", &[("attention", 2), ("layer_norm", 5), ("gelu_erf", 4)]),
    ("resnet", &[]),
    ("mobilenet", &[]),
    ("convnext", &[("layer_norm", 5), ("gelu_erf", 3)]),
    ("unet", &[("silu", 1)]),
    ("lstm", &[]),
    ("gru", &[]),
    ("transformer", &[("attention", 6), ("layer_norm", 12), ("gelu_erf", 4)]),
    ("decoderfilled", &[("attention", 2), ("layer_norm", 5), ("gelu_tanh", 2)]),
    ("decoderwhere", &[("attention", 2), ("layer_norm", 5), ("gelu_erf", 2)]),
    ("sdpa", &[("attention", 1)]),
];

/// Models whose masks no input decides: none is left as an operand.
const PROVED: &[&str] = &[
    "gpt2-",
    "llamaplain",
    "mistral",
    "gptneox",
    "decoder",
    "transformer",
    "whisperencoder",
    "vit-legacy",
    "sdpacausal",
    "sdpaplain",
];

fn read(case: &str) -> Onnx {
    let dims = exports::open_dims(case).iter().map(|(name, size)| ((*name).to_owned(), *size));
    let given = Given { dims: dims.collect(), ..Given::default() };
    let mut open = |recipe: &str| {
        let bytes: Vec<u8> =
            exports::weight(recipe).into_iter().flat_map(f32::to_le_bytes).collect();
        Ok(Bytes::from(bytes))
    };
    let bytes = Bytes::from(exports::file(case, "onnx"));
    match read_onnx(case, case, bytes, &given, &mut open) {
        Ok(onnx) => onnx,
        Err(found) => panic!("{case}: {found:?}"),
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the script writes three types")]
fn tensor(view: &TensorView) -> Tensor {
    fn all<const N: usize, T>(bytes: &[u8], of: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.as_chunks::<N>().0.iter().map(|chunk| of(*chunk)).collect()
    }
    match view.dtype() {
        Dtype::F32 => Tensor::f32(view.shape(), all(view.data(), f32::from_le_bytes)),
        Dtype::I64 => Tensor::int(DType::I64, view.shape(), all(view.data(), i64::from_le_bytes)),
        Dtype::BOOL => Tensor::bool(view.shape(), view.data().iter().map(|x| *x != 0).collect()),
        other => panic!("no tensor of a case is {other:?}"),
    }
}

/// Weights and inputs.
fn arguments(onnx: &Onnx, sample: &SafeTensors) -> Vec<Tensor> {
    let weights = onnx.weights.iter().map(|(_, held)| held.tensor());
    let inputs = onnx.inputs.iter().map(|port| {
        let found = tensor(&sample.tensor(&format!("in/{}", port.name)).unwrap());
        Tensor::from_f64(port.ty.dtype, &found.dims, found.to_f64())
    });
    weights.chain(inputs).collect()
}

/// How far results are from what ONNX Runtime computes: the largest of their errors.
fn error(case: &str, onnx: &Onnx, sample: &SafeTensors, results: &[Tensor]) -> f64 {
    let mut error: f64 = 0.0;
    for (port, found) in onnx.outputs.iter().zip(results) {
        let wanted = tensor(&sample.tensor(&format!("out/{}", port.name)).unwrap());
        assert_eq!(found.dims, wanted.dims, "{case}: {}", port.name);
        let (found, wanted) = (found.to_f64(), wanted.to_f64());
        let largest = wanted.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        for (found, wanted) in found.iter().zip(&wanted) {
            let off = (found - wanted).abs() / largest;
            assert!(!off.is_nan(), "{case}: {} has {found}, not {wanted}", port.name);
            error = error.max(off);
        }
    }
    error
}

/// The names of the cases, or of those that begin with `CASE`.
fn cases() -> Vec<String> {
    let names = exports::names();
    assert!(names.len() >= 60, "{names:?}");
    names
}

#[test]
fn exports_compute_what_onnx_runtime_computes() {
    drawn::each_case(&cases(), |case| {
        let onnx = read(case);
        assert_eq!(verify(&onnx.module), [], "{case}");
        let bytes = exports::file(case, "safetensors");
        let sample = SafeTensors::deserialize(&bytes).unwrap();
        let args = arguments(&onnx, &sample);
        let results = eval(&onnx.module, ENTRY, &args).unwrap();
        let off = error(case, &onnx, &sample, &results);
        assert!(off <= ERROR_MAX, "{case}: {off:e} off");
    });
}

/// How often a module calls each composite.
fn composites(module: &Module) -> BTreeMap<&str, usize> {
    let mut found = BTreeMap::new();
    for node in module.functions.iter().flat_map(|f| &f.nodes) {
        let callee = node.callee().and_then(|name| module.function(name));
        if let Some(Kind::Composite { name, .. }) = callee.map(|f| &f.kind) {
            *found.entry(name.as_str()).or_insert(0) += 1;
        }
    }
    found
}

/// Every attention, norm, activation and rotary embedding is recognised, and computes the same.
#[test]
fn composites_of_exports_are_recognised() {
    drawn::each_case(&cases(), |case| {
        let mut onnx = read(case);
        onnx.recognise();
        simplify(&mut onnx.module, &Options::default());
        assert_eq!(verify(&onnx.module), [], "{case}");
        let bytes = exports::file(case, "safetensors");
        let sample = SafeTensors::deserialize(&bytes).unwrap();
        let results = eval(&onnx.module, ENTRY, &arguments(&onnx, &sample)).unwrap();
        let off = error(case, &onnx, &sample, &results);
        assert!(off <= ERROR_MAX, "{case}: {off:e} off");
        let found = composites(&onnx.module);
        let wanted = COMPOSITES.iter().filter(|(model, _)| case.starts_with(model));
        let (_, wanted) = wanted.max_by_key(|(model, _)| model.len()).unwrap();
        for (name, count) in *wanted {
            assert_eq!(found.get(name), Some(count), "{case}: {name} in {found:?}");
        }
        let has_bias = |f: &Function| match &f.kind {
            Kind::Composite { attributes, .. } => attributes.contains_key("bias"),
            Kind::Layer | Kind::Kernel => false,
        };
        let is_proved = PROVED.iter().any(|model| case.starts_with(model));
        assert!(!is_proved || !onnx.module.functions.iter().any(has_bias), "{case}");
    });
}
