//! Damaged ONNX files: a diagnostic, never a panic.

use std::collections::BTreeMap;

use bytes::Bytes;
use gantline_ir::import::onnx::{ENTRY, read_onnx};
use gantline_ir::verify::verify;

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
    let files = [("mlp", file("mlp.onnx"), batch), ("blocks", file("blocks.onnx"), sizes)];
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
