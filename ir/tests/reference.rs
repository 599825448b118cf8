//! Imported models against what PyTorch and transformers compute (`tests/reference`), in float64.

#![allow(clippy::unwrap_used)]

extern crate gantline_ir as ir;

use std::path::PathBuf;

use ir::autodiff::training_step;
use ir::import::{
    Decoding, DecodingOptions, LogitsOf, Model, Options, Resolved, Source, Weight, decoding,
    import, resolve,
};
use ir::{DType, Tensor, eval::eval};
use safetensors::SafeTensors;

const CASES: [&str; 4] = ["gpt2-tiny", "gpt2-untied", "llama-tiny", "llama-bias-tied"];

/// The largest error that rounding in another order explains, with room for a factor of ten.
const ERROR_MAX: f64 = 1e-13;

fn directory(case: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "tests", "reference", case].iter().collect()
}

struct Case {
    resolved: Resolved,
    weights: Vec<u8>,
    expected: Vec<u8>,
}

impl Case {
    fn open(case: &str) -> Case {
        let directory = directory(case);
        let read = |name: &str| std::fs::read(directory.join(name)).unwrap();
        Case {
            resolved: resolve(directory.to_str().unwrap()).unwrap(),
            weights: read("model.safetensors"),
            expected: read("expected.safetensors"),
        }
    }

    fn expected(&self, name: &str) -> Tensor {
        tensor(&SafeTensors::deserialize(&self.expected).unwrap(), name)
    }

    fn weights(&self, weights: &[Weight]) -> Vec<Tensor> {
        let file = SafeTensors::deserialize(&self.weights).unwrap();
        weights.iter().map(|weight| load(&file, &weight.source, &weight.dims)).collect()
    }

    fn model(&self) -> Model {
        let options = Options { seq: 16, dtype: DType::F64, dropout: None, documents: false };
        import(&self.resolved.description, &options).unwrap()
    }

    fn decoding(&self, tokens: usize, logits: LogitsOf) -> Decoding {
        let options = DecodingOptions { tokens, capacity: 32, dtype: DType::F64, logits };
        decoding(&self.resolved.description, &options).unwrap()
    }
}

fn tensor(file: &SafeTensors<'_>, name: &str) -> Tensor {
    let view = file.tensor(name).unwrap();
    let words = view.data().chunks_exact(8).map(|b| <[u8; 8]>::try_from(b).unwrap());
    if view.dtype() == safetensors::Dtype::F64 {
        return Tensor::f64(view.shape(), words.map(f64::from_le_bytes).collect());
    }
    Tensor::int(DType::I32, view.shape(), words.map(i64::from_le_bytes).collect())
}

fn load(file: &SafeTensors<'_>, source: &Source, dims: &[usize]) -> Tensor {
    let name = source.names.iter().find(|name| file.tensor(name).is_ok());
    let whole = tensor(file, name.unwrap_or_else(|| panic!("no {}", source.name())));
    assert_eq!(whole.dims, source.dims, "{}", source.name());
    let all = whole.to_f64();
    let mut elements = Vec::new();
    source.each_run(0, dims.iter().product(), |start, len| {
        elements.extend_from_slice(&all[start..start + len]);
    });
    Tensor::f64(dims, elements)
}

/// `max|x − r| / max|r|`, as the reference's README defines it.
fn error(x: &[f64], r: &[f64]) -> f64 {
    assert_eq!(x.len(), r.len());
    let largest = r.iter().fold(0.0, |m: f64, r| m.max(r.abs()));
    x.iter().zip(r).fold(0.0, |m: f64, (x, r)| m.max((x - r).abs())) / largest
}

/// The label of each token is the next one; the last has none.
fn shifted(labels: &Tensor) -> Tensor {
    let [rows, seq] = labels.dims[..] else { panic!("labels of two dims") };
    let labels = labels.to_f64();
    let next = |at: usize| if (at + 1).is_multiple_of(seq) { -100 } else { labels[at + 1] as i64 };
    Tensor::int(DType::I32, &[rows, seq], (0..rows * seq).map(next).collect())
}

#[test]
fn logits_and_loss_are_those_of_transformers() {
    for name in CASES {
        let case = Case::open(name);
        let model = case.model();
        let weights = case.weights(&model.weights);
        let with = |more: &[Tensor]| [&weights, more].concat();
        let tokens = case.expected("input_ids");
        let logits =
            &eval(&model.module, "logits", &with(std::slice::from_ref(&tokens))).unwrap()[0];
        let of_logits = error(&logits.to_f64(), &case.expected("logits").to_f64());
        assert!(of_logits < ERROR_MAX, "{name}: logits differ by {of_logits:e}");
        let labels = shifted(&case.expected("labels"));
        let results = eval(&model.module, "loss", &with(&[tokens, labels])).unwrap();
        let loss = results[0].scalar() / results[1].scalar();
        let of_loss = error(&[loss], &case.expected("loss").to_f64());
        assert!(of_loss < ERROR_MAX, "{name}: the loss differs by {of_loss:e}");
    }
}

#[test]
fn every_tensor_of_a_checkpoint_is_a_weight() {
    for name in CASES {
        let case = Case::open(name);
        let file = SafeTensors::deserialize(&case.weights).unwrap();
        let numbers: usize =
            file.tensors().iter().map(|(_, v)| v.shape().iter().product::<usize>()).sum();
        let model = case.model();
        assert_eq!(model.param_count(), numbers as u64, "{name}");
        for tensor in file.names() {
            assert!(model.weights.iter().any(|w| w.source.names.iter().any(|n| n == tensor)));
        }
    }
}

#[test]
fn generation_with_a_padded_prompt_and_a_cache_is_that_of_transformers() {
    for name in CASES {
        let case = Case::open(name);
        let prompt = case.expected("prompt").to_f64();
        let expected = case.expected("generated").to_f64();
        let (prefill, decode) = (case.decoding(8, LogitsOf::Last), case.decoding(1, LogitsOf::All));
        let weights = case.weights(&prefill.model.weights);
        let int = |dims: &[usize], x: &[f64]| Tensor::from_f64(DType::I32, dims, x.to_vec());
        let empty = |cache: &ir::import::Cache| {
            let bound = cache.ty.bind(&[("B".to_owned(), 1)].into());
            Tensor::filled(DType::F64, &bound.sizes().unwrap(), 0.0)
        };
        let mut caches: Vec<Tensor> = prefill.caches.iter().map(empty).collect();
        let mut padded = prompt.clone();
        padded.resize(8, 3.0);
        let last = prompt.len() as f64 - 1.0;
        let mut more = vec![int(&[1, 8], &padded), int(&[1], &[0.0]), int(&[], &[last])];
        let mut module = &prefill.model.module;
        let mut generated = prompt;
        while generated.len() < expected.len() {
            let args = [&weights[..], &caches, &more].concat();
            let mut results = eval(module, "decode", &args).unwrap();
            caches = results.split_off(1);
            let logits = results[0].to_f64();
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            let position = generated.len() as f64;
            generated.push(best as f64);
            more = vec![int(&[1, 1], &[best as f64]), int(&[1], &[position])];
            module = &decode.model.module;
        }
        assert_eq!(generated, expected, "{name}");
    }
}

#[test]
fn gradients_are_those_of_transformers() {
    for name in CASES {
        let case = Case::open(name);
        let mut model = case.model();
        let mut args = case.weights(&model.weights);
        args.push(case.expected("input_ids"));
        args.push(shifted(&case.expected("labels")));
        let entry = training_step(&mut model.module, "loss").unwrap();
        let results = eval(&model.module, &entry, &args).unwrap();
        let count = results[1].scalar();
        let file = SafeTensors::deserialize(&case.expected).unwrap();
        for (weight, gradient) in model.weights.iter().zip(&results[2..]) {
            let mut source = weight.source.clone();
            source.names.iter_mut().for_each(|name| *name = format!("grad.{name}"));
            // The gradient of a key's bias is zero but for rounding, so that only the whole tensor
            // of the checkpoint is a scale to measure by.
            let whole =
                tensor(&file, source.names.iter().find(|n| file.tensor(n).is_ok()).unwrap());
            let scale = whole.max_abs_difference(&Tensor::filled(DType::F64, &whole.dims, 0.0));
            let expected = load(&file, &source, &weight.dims).to_f64();
            let gradient = gradient.to_f64().into_iter().map(|g| g / count);
            let off = gradient.zip(expected).fold(0.0, |m: f64, (g, e)| m.max((g - e).abs()));
            let off = off / scale;
            assert!(off < ERROR_MAX, "{name}: d.{} differs by {off:e}", weight.name);
        }
    }
}
