//! Blocks of weights against the whole tensor, and files that do not fit.

#![allow(clippy::single_range_in_vec_init)]

use std::convert::Infallible;

use ir::import::{Init, Source};

use super::*;
use crate::scratch::Scratch;

fn weight(
    name: &str,
    dims: &[usize],
    tensor: &str,
    of: &[usize],
    part: Option<Range<usize>>,
) -> Weight {
    let names = vec![format!("model.{tensor}"), tensor.to_owned()];
    let (width, rows) = (of[of.len() - 1], of[..of.len() - 1].iter().product());
    let source = match part {
        None => Source::whole(names, of.to_vec()),
        Some(part) => {
            Source::view(names, of.to_vec(), part.start, [(rows, width), (part.len(), 1)])
        }
    };
    Weight {
        name: name.into(),
        dims: dims.to_vec(),
        init: Init::Zeros,
        source,
        layer: None,
        frozen: false,
    }
}

/// `qkv [3, 8]`, of which `q [3, 2, 2]` are the first columns; `out [2, 6]`; a buffer.
fn model() -> Vec<Weight> {
    vec![
        weight("q", &[3, 2, 2], "qkv", &[3, 8], Some(0..4)),
        weight("k", &[3, 4], "qkv", &[3, 8], Some(4..8)),
        weight("out", &[2, 3, 2], "out", &[2, 6], None),
    ]
}

fn numbers(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect()
}

fn files(scratch: &Scratch, tensors: &[(&str, &[usize])]) -> Weights {
    let named = tensors.iter().map(|(name, dims)| {
        let bytes = numbers(dims.iter().product());
        let values = Values { dtype: DType::F32, dims: dims.to_vec(), bytes };
        Named { name: (*name).to_owned(), values }
    });
    let path = scratch.join("m.safetensors");
    write_named(&path, &named.collect::<Vec<_>>()).unwrap();
    Weights::open(&path).unwrap()
}

fn read(weight: &Weight, files: &Weights, block: &[Range<usize>]) -> Vec<f64> {
    let bytes = read_weight(weight, files, block, DType::F64).unwrap();
    bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect()
}

#[test]
fn blocks_come_from_their_columns() {
    let scratch = Scratch::new("load");
    let files = files(&scratch, &[("model.qkv", &[3, 8]), ("out", &[2, 6])]);
    let model = model();
    assert_eq!(check_weights(&model, &files), []);
    let q = [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0, 16.0, 17.0, 18.0, 19.0];
    assert_eq!(read(&model[0], &files, &[0..3, 0..2, 0..2]), q);
    assert_eq!(read(&model[0], &files, &[1..3, 1..2, 0..2]), [10.0, 11.0, 18.0, 19.0]);
    assert_eq!(read(&model[1], &files, &[1..2, 0..4]), [12.0, 13.0, 14.0, 15.0]);
    assert_eq!(read(&model[2], &files, &[0..2, 1..2, 1..2]), [3.0, 9.0]);
    assert_eq!(read(&model[2], &files, &[1..2, 0..3, 0..2]), [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]);
}

#[test]
fn what_was_taken_apart_is_joined_again() {
    let scratch = Scratch::new("load");
    let files = files(&scratch, &[("qkv", &[3, 8]), ("model.out", &[2, 6])]);
    let mut values = |weight: &Weight| {
        let block = block::whole(&weight.dims);
        let bytes = read_weight(weight, &files, &block, DType::F32).unwrap();
        Ok::<_, Infallible>(Values { dtype: DType::F32, dims: weight.dims.clone(), bytes })
    };
    let Ok(joined) = join_weights(&model(), &mut values);
    let names: Vec<&str> = joined.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["model.qkv", "model.out"]);
    assert_eq!(joined[0].values.dims, [3, 8]);
    assert_eq!(joined[0].values.bytes, numbers(24));
    assert_eq!(joined[1].values.bytes, numbers(12));
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let check = |tensors: &[(&str, &[usize])]| -> Vec<String> {
        let scratch = Scratch::new("load");
        let wrong = check_weights(&model(), &files(&scratch, tensors));
        wrong
            .iter()
            .map(|d| format!("{} {} ({})", d.code, d.headline, d.notes.join("; ")))
            .collect()
    };
    assert_eq!(
        check(&[("qkv", &[3, 8]), ("h.0.attn.bias", &[1])]),
        ["E4006 no tensor `model.out` in the weights (nor is there `out`; there are 2 others)"]
    );
    assert_eq!(
        check(&[("model.qkv", &[3, 9]), ("out", &[2, 6])]),
        ["E4007 tensor `model.qkv` is [3, 9], and the model has [3, 8] \
          (it is the weight `q` of the model)"]
    );
    // A layer that predicts further is left out.
    let further: [(&str, &[usize]); 2] =
        [("model.layers.2.eh_proj.weight", &[2, 4]), ("model.layers.2.mlp.gate.weight", &[2, 2])];
    let fits: [(&str, &[usize]); 2] = [("qkv", &[3, 8]), ("out", &[2, 6])];
    assert_eq!(check(&[&fits[..], &further].concat()), [""; 0]);
    assert_eq!(check(&[&fits[..], &further[1..]].concat()).len(), 1);
    assert_eq!(
        check(&[("qkv", &[3, 8]), ("out", &[2, 6]), ("more", &[5])]),
        ["E4008 tensor `more` belongs to no weight of the model \
          (the model has 36 parameters; these are 5 more)"]
    );
    assert_eq!(
        check(&[("qkv", &[3, 8]), ("out", &[2, 6]), ("more", &[5]), ("rest.a", &[1])]),
        ["E4008 2 tensors belong to no weight of the model, the first is `more` \
          (they are `more`, `rest.a`; the model has 36 parameters; these are 6 more)"]
    );
}

/// A tied weight that a checkpoint has twice: equal copies are one, others are told.
#[test]
fn tensors_that_would_be_one_have_to_be_equal() {
    let check = |bytes: Vec<u8>, dims: &[usize]| -> Vec<String> {
        let scratch = Scratch::new("load");
        let tensor = |name: &str, dims: &[usize], bytes: Vec<u8>| {
            let values = Values { dtype: DType::F32, dims: dims.to_vec(), bytes };
            Named { name: name.to_owned(), values }
        };
        let tensors = [
            tensor("model.out", &[2, 6], numbers(12)),
            tensor("out", dims, bytes),
            tensor("qkv", &[3, 8], numbers(24)),
        ];
        let path = scratch.join("m.safetensors");
        write_named(&path, &tensors).unwrap();
        let wrong = check_weights(&model(), &Weights::open(&path).unwrap());
        wrong
            .iter()
            .map(|d| format!("{} {} ({})", d.code, d.headline, d.notes.join("; ")))
            .collect()
    };
    assert_eq!(check(numbers(12), &[2, 6]), [""; 0]);
    let mut other = numbers(12);
    other[20] ^= 1;
    let headline = "E4009 tensors `model.out` and `out` differ, and the model has one of them \
                    (both are the weight `out` of the model";
    assert_eq!(check(other, &[2, 6]), [format!("{headline})")]);
    let dims = "; one is [2, 6], the other [12])";
    assert_eq!(check(numbers(12), &[12]), [format!("{headline}{dims}")]);
}
