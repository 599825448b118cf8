//! Weights against the `safetensors` crate, and headers that lie.

#![allow(clippy::single_range_in_vec_init)]

use std::fs;

use super::*;
use crate::scratch::{Scratch, mutations};

fn bytes<const N: usize, T: Copy>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| to(x)).collect()
}

fn sample() -> Vec<u8> {
    let a = bytes(&[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], f32::to_le_bytes);
    let b = bytes(&[7_i64, -8], i64::to_le_bytes);
    let c = bytes(&[0.5_f32, 1.5], |x| half::bf16::from_f32(x).to_le_bytes());
    let tensors = [
        NewTensor { name: "c", dtype: DType::BF16, dims: &[2, 1], bytes: &c },
        NewTensor { name: "a.weight", dtype: DType::F32, dims: &[2, 3], bytes: &a },
        NewTensor { name: "b \"q\"", dtype: DType::I64, dims: &[2], bytes: &b },
        NewTensor { name: "none", dtype: DType::F16, dims: &[0, 4], bytes: &[] },
    ];
    let mut out = Vec::new();
    write_to(&mut out, &tensors, &BTreeMap::from([("format".into(), "pt".into())])).unwrap();
    out
}

fn codes(result: Result<Weights, Failure>) -> Vec<&'static str> {
    match result {
        Ok(_) => Vec::new(),
        Err(Failure::Input(diagnostics)) => diagnostics.iter().map(|d| d.code).collect(),
        Err(Failure::World(error)) => panic!("{error}"),
    }
}

#[test]
fn the_safetensors_crate_reads_what_is_written() {
    let file = sample();
    let theirs = safetensors::SafeTensors::deserialize(&file).unwrap();
    assert_eq!(theirs.len(), 4);
    let a = theirs.tensor("a.weight").unwrap();
    assert_eq!((a.shape(), a.dtype()), (&[2, 3][..], safetensors::Dtype::F32));
    assert_eq!(a.data()[..4], 1_f32.to_le_bytes());
    assert_eq!(theirs.tensor("b \"q\"").unwrap().data()[8..], (-8_i64).to_le_bytes());
}

#[test]
fn tensors_and_blocks_come_back_in_any_type() {
    let scratch = Scratch::new("weights");
    fs::write(scratch.join(FILE), sample()).unwrap();
    let weights = Weights::open(scratch.path()).unwrap();
    let names: Vec<&str> = weights.tensors().map(|(name, _)| name).collect();
    assert_eq!(names, ["a.weight", "b \"q\"", "c", "none"]);
    assert_eq!(weights.read_f32("a.weight", None).unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert_eq!(weights.read_f64("a.weight", Some(&[0..2, 1..3])).unwrap(), [2.0, 3.0, 5.0, 6.0]);
    assert_eq!(weights.read_f32("c", None).unwrap(), [0.5, 1.5]);
    assert_eq!(weights.read("b \"q\"", Some(&[1..2]), DType::I32).unwrap(), (-8_i32).to_le_bytes());
    assert_eq!(weights.read("none", None, DType::F16).unwrap(), Vec::<u8>::new());
    assert_eq!(weights.read_f32("weight", None).unwrap_err().code, "E4006");
    assert_eq!(weights.read_f32("c", Some(&[0..2, 0..2])).unwrap_err().code, "E4007");
    assert_eq!(weights.read_f32("c", Some(&[0..2])).unwrap_err().code, "E4007");
}

#[test]
fn shards_are_found_through_their_index() {
    let scratch = Scratch::new("shards");
    let one = bytes(&[1.0_f32], f32::to_le_bytes);
    for (file, name) in [("one.safetensors", "x"), ("two.safetensors", "y")] {
        let tensor = NewTensor { name, dtype: DType::F32, dims: &[], bytes: &one };
        write(&scratch.join(file), &[tensor], &BTreeMap::new()).unwrap();
    }
    let index =
        |map: &str| fs::write(scratch.join(INDEX), format!("{{\"weight_map\":{map}}}")).unwrap();
    index(r#"{"x": "one.safetensors", "y": "two.safetensors"}"#);
    let weights = Weights::open(scratch.path()).unwrap();
    assert_eq!(weights.read_f32("y", None).unwrap(), [1.0]);
    index(r#"{"x": "two.safetensors"}"#);
    assert_eq!(codes(Weights::open(scratch.path())), ["E4005"]);
    index(r#"{"x": "../one.safetensors"}"#);
    assert_eq!(codes(Weights::open(scratch.path())), ["E4005"]);
    index(r#"{"x": "three.safetensors"}"#);
    assert_eq!(codes(Weights::open(scratch.path())), ["E4001"]);
    let valid = br#"{"metadata": {}, "weight_map": {"x": "one.safetensors"}}"#;
    for (seed, mutant) in mutations(valid, 300) {
        let _ = (seed, header::parse_index(&mutant, Path::new("mutant")));
    }
}

#[test]
fn headers_that_lie_are_refused() {
    let file = |header: &str, data: usize| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    };
    let code = |bytes: &[u8]| match header::parse(bytes, Path::new("lie")) {
        Ok(_) => "",
        Err(diagnostics) => diagnostics[0].code,
    };
    assert_eq!(code(&file(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 8)), "");
    assert_eq!(code(b"1234567"), "E4002");
    assert_eq!(code(&u64::MAX.to_le_bytes()), "E4002");
    assert_eq!(code(&file("[]", 0)), "E4002");
    for (entry, data, expected) in [
        (r#""dtype":"F32","shape":[2],"data_offsets":[0,8]"#, 9, "E4003"),
        (r#""dtype":"F32","shape":[2],"data_offsets":[0,8]"#, 7, "E4003"),
        (r#""dtype":"F32","shape":[2],"data_offsets":[1,9]"#, 9, "E4003"),
        (r#""dtype":"F32","shape":[3],"data_offsets":[0,8]"#, 8, "E4003"),
        (r#""dtype":"F32","shape":[2],"data_offsets":[8,0]"#, 8, "E4003"),
        (r#""dtype":"F32","shape":[-2],"data_offsets":[0,8]"#, 8, "E4003"),
        (
            r#""dtype":"U8","data_offsets":[0,18446744073709551615],
               "shape":[18446744073709551615]"#,
            8,
            "E4003",
        ),
        (r#""dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]"#, 0, "E4003"),
        (r#""dtype":"F4","shape":[2],"data_offsets":[0,1]"#, 1, "E4004"),
        (r#""dtype":"F32","shape":[2]"#, 8, "E4003"),
    ] {
        assert_eq!(code(&file(&format!("{{\"a\":{{{entry}}}}}"), data)), expected, "{entry}");
    }
    let both = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
        "b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
    assert_eq!(code(&file(both, 6)), "E4003");
}

#[test]
fn mutants_never_panic() {
    let valid = sample();
    let mut refused = 0;
    for (seed, mutant) in mutations(&valid, 600) {
        let result = header::parse(&mutant, Path::new("mutant"));
        refused += usize::from(result.is_err());
        let theirs = safetensors::SafeTensors::read_metadata(&mutant);
        assert!(result.is_err() || theirs.is_ok(), "seed {seed}: accepted here alone");
    }
    assert!(refused > 100, "{refused} refused");
}
