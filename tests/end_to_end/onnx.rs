//! ONNX files from outside: what onnx's own evaluator computes, and what is refused.
//!
//! The files of `tests/reference/onnx` were written by `tests/reference/onnx_models.py`.

use std::fs;
use std::path::{Path, PathBuf};

use runtime::npy;
use serde_json::Value;

use crate::cli::Scratch;

/// The largest difference from numpy in f32: sums are added in another order.
const TOLERANCE: f32 = 1e-5;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/onnx")
}

fn numbers(path: &Path) -> (Vec<usize>, Vec<f32>) {
    let array = npy::read(path).expect("an array");
    let bytes = array.bytes.as_chunks().0;
    (array.dims, bytes.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

#[test]
fn models_compute_what_onnx_computes() {
    let scratch = Scratch::new("onnx-values");
    let at = folder().display().to_string();
    let cases =
        [("mlp", "--dim batch=3"), ("convnet", ""), ("blocks", "--dim batch=2 --dim seq=5")];
    for (name, dims) in cases {
        let line = format!("run {at}/{name}.onnx --input x={at}/{name}.x.npy -o {name} {dims}");
        let said = scratch.run(line.trim());
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(!said.contains("by the interpreter"), "{name} has kernels: {said}");
        let found = numbers(&scratch.0.join(name).join("y.npy"));
        let wanted = numbers(&folder().join(format!("{name}.y.npy")));
        assert_eq!(found.0, wanted.0, "{name}");
        for (found, wanted) in found.1.iter().zip(&wanted.1) {
            let off = (found - wanted).abs() / wanted.abs().max(1.0);
            assert!(off <= TOLERANCE, "{name}: {found}, not {wanted}");
        }
    }
}

#[test]
fn a_model_is_timed_as_often_as_asked() {
    let scratch = Scratch::new("onnx-bench");
    let at = folder().display().to_string();
    let line = format!("run {at}/mlp.onnx --input x={at}/mlp.x.npy --dim batch=3 --bench 3 --json");
    let document = scratch.json(&line);
    let seconds = document["seconds"].as_array().expect("times");
    let seconds: Vec<f64> = seconds.iter().filter_map(Value::as_f64).collect();
    assert!(seconds.len() == 3 && seconds.is_sorted() && seconds[0] > 0.0, "{document:#}");
    let dims = document["outputs"][0]["dims"].as_array().expect("dims");
    assert_eq!(dims[0], 3, "{document:#}");
}

/// The three layers of the flat graph are one function, in which norms and the like are found.
#[test]
fn layers_of_a_flat_graph_are_found() {
    let scratch = Scratch::new("onnx-layers");
    let at = folder().display().to_string();
    let line = format!("inspect {at}/blocks.onnx --dim batch=2 --dim seq=5 --json");
    let document = scratch.json(&line);
    let functions = document["functions"].as_array().expect("functions");
    let of = |name: &str| -> &Value {
        let found = functions.iter().find(|f| f["name"] == name);
        &found.unwrap_or_else(|| panic!("no {name} in {document:#}"))["ops"]
    };
    assert_eq!(of("main")["@main.block"], 3, "{document:#}");
    for (op, count) in [("contract", 6), ("attention", 1), ("layer_norm", 2), ("gelu_erf", 1)] {
        assert_eq!(of("main.block")[op], count, "{op} in {document:#}");
    }
}

/// What rewriting makes of the layers of a flat graph: no more launches and bytes, and each change
/// by the rule that made it.
#[test]
fn fusions_of_a_flat_graph_are_shown() {
    let scratch = Scratch::new("onnx-fusions");
    let line = format!("inspect {}/blocks.onnx --dim batch=2 --dim seq=5", folder().display());
    let document = scratch.json(&format!("{line} --fusions --json"));
    let functions = document["passes"][0]["functions"].as_array().expect("functions");
    let block = functions.iter().find(|f| f["name"] == "main.block");
    let block = block.unwrap_or_else(|| panic!("no layer in {document:#}"));
    for what in ["launches", "bytes"] {
        let [before, after] = ["before", "after"].map(|at| block[at][what].as_u64().expect(what));
        assert!(after <= before, "{what}: {after} after, {before} before");
    }
    let rule = "layer_norm";
    assert!(block["uses"][rule].as_u64() >= Some(1), "{block:#}");
    let changed = block["changes"].as_array().expect("changes");
    let by_rule =
        |c: &&Value| c["rules"].as_array().is_some_and(|rules| rules.iter().any(|r| r == rule));
    let value = changed.iter().find(by_rule).expect("a value that the rule changed");
    let value = value["value"].as_str().expect("a name");
    let said = scratch.run(&format!("{line} --explain {value}"));
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains(rule), "{said}");
    refusal(&scratch, &format!("{line} --fusions --no-rule none"), 2);
}

/// Replaces what is as long, in all places.
fn replaced(name: &str, pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = fs::read(folder().join(name)).expect("the model is there");
    for (from, to) in pairs {
        assert_eq!(from.len(), to.len(), "a length stands before a text");
        let places: Vec<usize> =
            (0..bytes.len()).filter(|at| bytes[*at..].starts_with(from.as_bytes())).collect();
        assert!(!places.is_empty(), "{from}");
        for at in places {
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        }
    }
    bytes
}

fn refusal(scratch: &Scratch, line: &str, code: i32) -> String {
    let output = scratch.run(line);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{line}\n{text}");
    text
}

/// No flag is without effect.
#[test]
fn flags_that_mean_nothing_are_refused() {
    let scratch = Scratch::new("onnx-flags");
    let at = folder().display().to_string();
    let line = format!("run {at}/mlp.onnx --dim batch=3 --input x={at}/mlp.x.npy");
    let more = "--grad --labels no.npy --tp 4 --weights none --dtype f64 --cluster cpu-local \
                --ranks 2 --calibration none";
    let text = refusal(&scratch, &format!("{line} {more}"), 2);
    for flag in more.split(' ').filter(|word| word.starts_with("--")) {
        let flag = if flag == "--tp" { "--fix" } else { flag };
        assert!(text.contains(&format!("--> {flag}\n")), "{flag}\n{text}");
    }
    let text = refusal(&scratch, &format!("{line} --input x=other.npy"), 2);
    assert!(text.contains("give it once"), "{text}");
    let text = refusal(&scratch, &format!("{line} --dim batch=4"), 2);
    assert!(text.contains("the dim `batch` is 3 and 4"), "{text}");
    let inspected = format!("inspect {at}/mlp.onnx --dim batch=3 --seq 5 --dtype f64");
    let text = refusal(&scratch, &inspected, 2);
    assert!(text.contains("--> --seq") && text.contains("--> --dtype"), "{text}");
    for line in ["inspect gpt2 --dim Q=7", "run gpt2 --dim Q=7 --input input_ids=no.npy"] {
        let text = refusal(&scratch, line, 2);
        assert!(text.contains("--> --dim"), "{line}\n{text}");
    }
}

#[test]
fn what_cannot_be_read_is_said_at_once() {
    let scratch = Scratch::new("onnx-refused");
    let write = |name: &str, bytes: &[u8]| fs::write(scratch.0.join(name), bytes).expect("it is");
    write(
        "blocks.onnx",
        &replaced("blocks.onnx", &[("Softmax", "Hardwax"), ("\x03Erf", "\x03Xrf")]),
    );
    fs::copy(folder().join("blocks.data"), scratch.0.join("blocks.data")).expect("it is copied");

    let text = refusal(&scratch, "inspect blocks.onnx --dim batch=2 --dim seq=3", 4);
    for part in ["E1111", "the operator `Hardwax` is not supported", "the operator `Xrf`"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert_eq!(text.matches("= note: of nodes `/").count(), 2, "{text}");

    let text = refusal(&scratch, "inspect blocks.onnx", 2);
    assert!(text.contains("E1112") && text.contains("--dim batch=N --dim seq=N"), "{text}");
    let text = refusal(&scratch, "inspect blocks.onnx --dim batch=2 --dim seq=3 --dim s=4", 2);
    assert!(text.contains("E1113") && text.contains("no input has a dim `s`"), "{text}");

    fs::remove_file(scratch.0.join("blocks.data")).expect("it is removed");
    let text = refusal(&scratch, "inspect blocks.onnx --dim batch=2 --dim seq=3", 6);
    assert!(text.contains("E1110") && text.contains("blocks.data"), "{text}");

    write("half.onnx", &replaced("mlp.onnx", &[])[..500]);
    let text = refusal(&scratch, "inspect half.onnx --dim batch=2", 6);
    assert!(text.contains("E1110"), "{text}");

    let mlp = folder().join("mlp.onnx").display().to_string();
    let text = refusal(&scratch, &format!("run {mlp} --dim batch=3 --input z=none.npy"), 2);
    assert!(text.contains("no input `z`") && text.contains("`x` is not given"), "{text}");
}
