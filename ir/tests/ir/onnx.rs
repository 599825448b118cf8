//! ONNX files: what onnx computed, and damaged ones, which are a diagnostic and never a panic.

use std::collections::BTreeMap;

use bytes::Bytes;
use gantline_ir::eval::eval;
use gantline_ir::import::onnx::{Array, ENTRY, Given, read_onnx};
use gantline_ir::verify::verify;
use gantline_ir::{DType, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use crate::draws::{Draws, seeds};

fn file(name: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/reference/onnx/");
    std::fs::read(format!("{folder}{name}")).unwrap()
}

/// Flips, removes and copies bytes. What still reads must verify.
#[test]
fn mutated_files_never_panic() {
    let sizes = BTreeMap::from([("batch".to_owned(), 2), ("seq".to_owned(), 3)]);
    let batch = BTreeMap::from([("batch".to_owned(), 2)]);
    let given = |dims| Given { dims, ..Given::default() };
    let files =
        [("mlp", file("mlp.onnx"), given(batch)), ("blocks", file("blocks.onnx"), given(sizes))];
    let data = Bytes::from(file("blocks.data"));
    let mut accepted = 0;
    for seed in seeds(400) {
        let mut r = Draws::new(seed);
        let (name, bytes, dims) = &files[r.below(2)];
        let mut bytes = bytes.clone();
        for _ in 0..r.below(4) {
            let (at, from) = (r.below(bytes.len()), r.below(bytes.len()));
            let length = r.below(12).min(bytes.len() - from);
            match r.below(4) {
                0 => bytes[at] ^= 1 << r.below(8),
                1 => bytes[at] = r.below(256) as u8,
                2 => drop(bytes.drain(from..from + length)),
                _ => {
                    let piece = bytes[from..from + length].to_vec();
                    bytes.splice(at..at, piece);
                }
            }
        }
        let read = || {
            let mut open = |_: &str| Ok(data.clone());
            read_onnx("mutated", name, Bytes::from(bytes.clone()), dims, &mut open)
        };
        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(read)) {
            Ok(Ok(model)) => {
                accepted += 1;
                assert_eq!(verify(&model.module), [], "SEED={seed}");
                let params = model.module.function(ENTRY).unwrap().param_count;
                assert_eq!(params, model.weights.len() + model.inputs.len(), "SEED={seed}");
            }
            Ok(Err(found)) => assert!(!found.is_empty(), "SEED={seed}"),
            Err(_) => panic!("SEED={seed}: panics on {name}"),
        }
    }
    assert!(accepted > 50 || std::env::var("SEED").is_ok(), "only {accepted} were harmless");
}

/// A tensor of the sample, which holds three types of elements.
#[expect(clippy::wildcard_enum_match_arm, reason = "the script writes three types")]
fn tensor(view: &TensorView) -> Tensor {
    fn all<const N: usize, T>(bytes: &[u8], of: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.as_chunks::<N>().0.iter().map(|chunk| of(*chunk)).collect()
    }
    match view.dtype() {
        Dtype::F64 => Tensor::f64(view.shape(), all(view.data(), f64::from_le_bytes)),
        Dtype::F32 => Tensor::f32(view.shape(), all(view.data(), f32::from_le_bytes)),
        Dtype::I64 => Tensor::int(DType::I64, view.shape(), all(view.data(), i64::from_le_bytes)),
        other => panic!("no tensor of the sample is {other:?}"),
    }
}

/// The smallest cases of each operator and its types among those that the onnx package generates;
/// all of them run by `tests/reference/onnx_nodes.py`.
#[test]
fn operators_compute_what_onnx_computes() {
    let cases = compared("nodes.safetensors");
    assert!(cases.0 > 300 && cases.1 > 250, "only {cases:?} cases");
}

/// Control flow, functions and narrow types: `tests/reference/onnx_graphs.py`.
#[test]
fn graphs_compute_what_onnx_runtime_computes() {
    assert_eq!(compared("graphs.safetensors"), (8, 8));
}

/// Compares all cases of a file: read for the inputs that are given, and, where no operator has to
/// know these, for all. How many there are, and how many of the latter.
fn compared(file_name: &str) -> (usize, usize) {
    let bytes = file(file_name);
    let sample = SafeTensors::deserialize(&bytes).unwrap();
    let parts: BTreeMap<&str, TensorView> = sample.iter().collect();
    let mut cases = (0, 0);
    for (name, model) in parts.iter().filter_map(|(key, v)| Some((key.strip_suffix("/model")?, v)))
    {
        let of = |kind: &str| -> BTreeMap<String, Tensor> {
            let ports = parts.iter().filter_map(|(key, view)| {
                let port = key.strip_prefix(name)?.strip_prefix(kind)?;
                Some((port.to_owned(), tensor(view)))
            });
            ports.collect()
        };
        let (ins, outs) = (of("/in/"), of("/out/"));
        let arrays = ins.iter().map(|(name, tensor)| (name.clone(), Array::from(tensor)));
        let given = Given { inputs: arrays.collect(), ..Given::default() };
        let model = Bytes::copy_from_slice(model.data());
        assert_eq!(compare(name, &model, &given, &ins, &outs), Ok(()));
        cases.0 += 1;
        let for_all = compare(name, &model, &Given::default(), &ins, &outs);
        cases.1 += usize::from(for_all.is_ok());
    }
    cases
}

/// Panics where a result differs.
///
/// # Errors
/// Why the model is refused.
fn compare(
    name: &str,
    model: &Bytes,
    given: &Given,
    ins: &BTreeMap<String, Tensor>,
    outs: &BTreeMap<String, Tensor>,
) -> Result<(), String> {
    let mut open = |_: &str| Err("nothing is beside it".to_owned());
    let onnx = read_onnx(name, name, model.clone(), given, &mut open);
    let onnx = onnx.map_err(|found| format!("{name}: {}", found[0].headline))?;
    let weights = onnx.weights.iter().map(|(_, held)| held.tensor());
    let inputs = onnx.inputs.iter().map(|port| {
        let found = &ins[&port.name];
        Tensor::from_f64(port.ty.dtype, &found.dims, found.to_f64())
    });
    let args: Vec<Tensor> = weights.chain(inputs).collect();
    let results = eval(&onnx.module, ENTRY, &args).unwrap();
    for (port, found) in onnx.outputs.iter().zip(&results) {
        let wanted = &outs[&port.name];
        assert_eq!(found.dims, wanted.dims, "{name}: {}", port.name);
        // Some expected values are written with four digits; those of bf16 were rounded after
        // every step.
        let bits = if port.element.name() == "bf16" { 1e-2 } else { 1e-3 };
        let tolerance = if port.ty.dtype.is_float() { bits } else { 0.0 };
        for (found, wanted) in found.to_f64().into_iter().zip(wanted.to_f64()) {
            let near = (found - wanted).abs() <= tolerance * wanted.abs().max(0.1);
            let same = near || found == wanted || (found.is_nan() && wanted.is_nan());
            assert!(same, "{name}: {} has {found}, not {wanted}", port.name);
        }
    }
    Ok(())
}
