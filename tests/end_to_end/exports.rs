//! Models as the two exporters of PyTorch write them, run by kernels: what ONNX Runtime computes.
//!
//! The files of `tests/reference/exports` were written by `tests/reference/exports.py`.

use std::fs;
use std::sync::Mutex;

use runtime::npy;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

use crate::cli::Scratch;
use crate::drawn::each_case;
use crate::exported;

/// The largest error, relative to the largest element of an output: sums in another order.
const ERROR_MAX: f32 = 2e-5;

/// Writes a model with its weights and inputs, and returns the words that run it.
#[expect(clippy::wildcard_enum_match_arm, reason = "the script writes three types")]
fn prepare(case: &str, scratch: &Scratch, sample: &SafeTensors) -> String {
    let model = exported::file(case, "onnx");
    for recipe in exported::recipes(&model) {
        let bytes: Vec<u8> =
            exported::weight(&recipe).into_iter().flat_map(f32::to_le_bytes).collect();
        fs::write(scratch.0.join(recipe), bytes).expect("it is written");
    }
    fs::write(scratch.0.join("model.onnx"), model).expect("it is written");
    let mut line = "run model.onnx --json -o out".to_owned();
    for (name, view) in sample.iter() {
        let Some(name) = name.strip_prefix("in/") else { continue };
        let descr = match view.dtype() {
            Dtype::F32 => "<f4",
            Dtype::I64 => "<i8",
            Dtype::BOOL => "|b1",
            other => panic!("no input of a case is {other:?}"),
        };
        let path = scratch.0.join(format!("{name}.npy"));
        npy::write_as(&path, descr, view.shape(), view.data()).expect("it is written");
        line += &format!(" --input {name}={name}.npy");
    }
    for (name, size) in exported::open_dims(case) {
        line += &format!(" --dim {name}={size}");
    }
    line
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn compiled_exports_compute_what_onnx_runtime_computes() {
    let interpreted = Mutex::new(Vec::new());
    each_case(&exported::names(), |case| {
        let scratch = Scratch::new(&format!("export-{case}"));
        let bytes = exported::file(case, "safetensors");
        let sample = SafeTensors::deserialize(&bytes).expect("the values open");
        let line = prepare(case, &scratch, &sample);
        let output = scratch.run(&line);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{case}: {said}");
        if let Some(note) = said.lines().find(|line| line.contains("by the interpreter")) {
            interpreted.lock().expect("no thread dies").push(format!("{case}: {note}"));
        }
        let document: serde_json::Value =
            serde_json::from_slice(&output.stdout).expect("the answer is one document");
        for port in document["outputs"].as_array().expect("outputs") {
            let [name, file] = ["name", "file"].map(|key| port[key].as_str().expect("a text"));
            let found = npy::read(&scratch.0.join("out").join(file)).expect("an array");
            let wanted = sample.tensor(&format!("out/{name}")).expect("it was computed");
            assert_eq!(found.dims, wanted.shape(), "{case}: {name}");
            let (found, wanted) = (floats(&found.bytes), floats(wanted.data()));
            let largest = wanted.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            for (found, wanted) in found.iter().zip(&wanted) {
                let is_near = (found - wanted).abs() <= ERROR_MAX * largest;
                assert!(is_near, "{case}: {name} has {found}, not {wanted}");
            }
        }
    });
    let found = interpreted.into_inner().expect("no thread dies");
    assert!(found.is_empty(), "each has kernels: {found:#?}");
}
