//! `validate`: tables of published runs through the command line.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::cli::Scratch;

/// Columns that nothing reads are named, with the one that may be meant.
#[test]
fn columns_that_nothing_reads_are_named() {
    let scratch = Scratch::new("columns");
    let head = "row_id,layers,hidden,heads,seq_len,gpu,n_gpus,global_batch,tp,dp";
    let row = "a,32,4096,32,2048,A100-80GB,8,8,8,1";
    scratch.write("runs.csv", &format!("{head},epp,microbatch,mfu_pct\n{row},1,1,40\n"));
    let output = scratch.run("validate runs.csv --json");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    assert!(
        errors.contains("warning[W5018]") && errors.contains("`epp`, `microbatch`"),
        "{errors}"
    );
    assert!(errors.contains("is `microbatch` meant as `micro_batch`?"), "{errors}");
    let document: Value = serde_json::from_slice(&output.stdout).expect("a document");
    let names = |key: &str| {
        let columns = document["unread_columns"].as_array().expect("a list").iter();
        columns.map(|column| column[key].clone()).collect::<Vec<_>>()
    };
    assert_eq!(names("name"), [json!("epp"), json!("microbatch")]);
    assert_eq!(names("near"), [json!("pp"), json!("micro_batch")]);
    scratch.write("known.csv", &format!("{head}\n{row}\n"));
    assert_eq!(scratch.run("validate known.csv").stderr, b"");
}

/// A table of inference is known by its columns; its runs are predicted beside what was measured,
/// and a row that is none says why.
#[test]
fn tables_of_inference_are_predicted() {
    let scratch = Scratch::new("inference-table");
    let published = Path::new(env!("CARGO_MANIFEST_DIR")).join("planner/tests/inference_runs.csv");
    let text = fs::read_to_string(&published).expect("a table");
    let rows = text.lines().count() - 1;
    scratch.write("runs.csv", &text.replacen("static batch", "streamed", 1));
    let document = scratch.json("validate runs.csv --rows out.csv --json");
    assert_eq!(document["rows"].as_array().map(Vec::len), Some(rows - 1), "{document:#}");
    let reason = document["unexpressed"][0]["reason"].as_str().expect("a reason");
    assert!(reason.contains("`mode` is `streamed`"), "{reason}");
    assert!(document["all"]["time"]["median"].as_f64().expect("a median") < 0.15, "{document:#}");
    let written = fs::read_to_string(scratch.0.join("out.csv")).expect("it is written");
    assert_eq!(written.lines().count(), rows + 1);
    let columns = text.replacen("output_len", "new_tokens", 1).replacen("mode", "kind", 1);
    scratch.write("none.csv", &columns);
    let output = scratch.run("validate none.csv");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{errors}");
    assert!(errors.contains("E5011"), "{errors}");
}

/// Runs that train adapters are predicted as such: without their ranks whole models would be, in
/// several times the memory.
#[test]
fn tables_of_adapters_are_predicted() {
    let scratch = Scratch::new("adapter-table");
    let published = Path::new(env!("CARGO_MANIFEST_DIR")).join("planner/tests/lora_runs.csv");
    let text = fs::read_to_string(&published).expect("a table");
    let rows = text.lines().filter(|line| !line.starts_with('#')).count() - 1;
    scratch.write("runs.csv", &text);
    let output = scratch.run("validate runs.csv --json");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "every column is read");
    let document: Value = serde_json::from_slice(&output.stdout).expect("a document");
    assert_eq!((&document["predicted"], &document["unexpressed"]), (&json!(rows), &json!([])));
    let number = |key: &str| document["all"]["memory"][key].as_f64().expect("a number");
    assert!(number("rows") as usize == rows && number("median") < 0.06, "{document:#}");
    scratch.write("whole.csv", &text.replace("lora_rank", "notes"));
    let whole = scratch.json("validate whole.csv --json");
    let bias = whole["all"]["memory"]["bias"].as_f64().expect("a number");
    assert!(bias > 1.0, "{whole:#}");
}
