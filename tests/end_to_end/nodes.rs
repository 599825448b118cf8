//! Operators of ONNX files as kernels: each has some, which compute what the interpreter does.
//!
//! The sample holds the smallest case of each operator and its types among those that the onnx
//! package generates; `ir/tests/ir/onnx.rs` compares the interpreter with their outputs.

use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use ir::eval::eval;
use ir::import::onnx::{Array, ENTRY, Given, read_onnx};
use ir::rewrite::{Options, simplify};
use ir::{DType, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use crate::integers::compiled;

/// The largest difference, relative to the larger of one and the number: functions of kernels in
/// f32, and sums in another order.
const TOLERANCE: f64 = 2e-5;

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

#[test]
fn every_operator_runs_as_kernels() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/onnx/nodes.safetensors");
    let bytes = std::fs::read(path).expect("the sample is there");
    let sample = SafeTensors::deserialize(&bytes).expect("it is a safetensors file");
    let parts: BTreeMap<&str, TensorView> = sample.iter().collect();
    let (mut ran, mut wrong) = (0, Vec::new());
    for (key, model) in &parts {
        let Some(name) = key.strip_suffix("/model") else { continue };
        let start = format!("{name}/in/");
        let ins: BTreeMap<String, Tensor> = parts
            .iter()
            .filter_map(|(key, view)| Some((key.strip_prefix(&start)?.to_owned(), tensor(view))))
            .collect();
        let arrays = ins.iter().map(|(name, tensor)| (name.clone(), Array::from(tensor)));
        let given = Given { inputs: arrays.collect(), ..Given::default() };
        let mut open = |_: &str| Err("nothing is beside it".to_owned());
        let model = Bytes::copy_from_slice(model.data());
        let onnx = read_onnx(name, name, model, &given, &mut open).expect("it is imported");
        let weights = onnx.weights.iter().map(|(_, held)| held.tensor());
        let inputs = onnx.inputs.iter().map(|port| {
            let found = &ins[&port.name];
            Tensor::from_f64(port.ty.dtype, &found.dims, found.to_f64())
        });
        let args: Vec<Tensor> = weights.chain(inputs).collect();
        let known: Vec<bool> = (0..args.len()).map(|at| at < onnx.weights.len()).collect();
        let wanted = eval(&onnx.module, ENTRY, &args).expect("it evaluates");
        let mut module = onnx.module.clone();
        simplify(&mut module, &Options::default());
        match compiled(&module, ENTRY, &args, &known) {
            Ok((found, _)) if found.len() == wanted.len() => {
                let off = found.iter().zip(&wanted).map(|(x, y)| x.max_relative_difference(y));
                let off = off.fold(0.0, f64::max);
                if off > TOLERANCE {
                    wrong.push(format!("{name}: {off:e} off"));
                }
            }
            Ok(_) => wrong.push(format!("{name}: another number of results")),
            Err(why) => wrong.push(format!("{name}: {why}")),
        }
        ran += 1;
    }
    assert!(ran > 300 && wrong.is_empty(), "of {ran}: {wrong:#?}");
}
