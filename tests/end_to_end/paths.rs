//! Paths whose bytes are no UTF-8, in every place of the command line that takes one.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use ir::DType;
use runtime::npy;

use crate::cli::{Scratch, tiny};

/// Text with each `é` as one byte, which is Latin-1 and no UTF-8.
fn latin(text: &str) -> OsString {
    OsString::from_vec(text.chars().map(|letter| u32::from(letter) as u8).collect())
}

/// Runs a line whose words are Latin-1; what it answers on stdout.
fn answer(scratch: &Scratch, line: &str) -> String {
    let mut command = scratch.command(&[], "");
    let program = PathBuf::from(command.get_program());
    command = std::process::Command::new(program);
    command.args(line.split(' ').map(latin)).current_dir(&scratch.0);
    command.env("XDG_CACHE_HOME", scratch.0.join(latin("caché")));
    let output = command.output().expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "gantline {line}\n{errors}");
    assert!(!errors.contains("defect"), "gantline {line}\n{errors}");
    String::from_utf8(output.stdout).expect("answers are UTF-8")
}

/// A directory whose model, data, tokens and clusters all lie below names that are no UTF-8.
fn files(name: &str) -> Scratch {
    let scratch = tiny(name);
    let at = |name: &str| scratch.0.join(latin(name));
    fs::rename(scratch.0.join("tiny"), at("modèle")).expect("it is renamed");
    fs::rename(scratch.0.join("text"), at("donnée")).expect("it is renamed");
    fs::rename(at("donnée/a.txt"), at("donnée/é.txt")).expect("it is renamed");
    let ids: Vec<u8> = (0..32_i64).flat_map(|id| (id * 7 % 256).to_le_bytes()).collect();
    for name in ["entré.npy", "étiqueté.npy"] {
        npy::write(&at(name), DType::I64, &[2, 16], &ids).expect("it is written");
    }
    fs::write(at("clé.toml"), "name = \"mine\"\nextends = \"file:base.toml\"\n").expect("written");
    scratch.write("base.toml", "name = \"base\"\nextends = \"preset:cpu-local\"\n");
    fs::write(at("disposé.sh"), "--tensor-model-parallel-size 8 --num-layers 32\n").expect("it");
    scratch
}

fn is_there(scratch: &Scratch, name: &str) -> bool {
    scratch.0.join(latin(name)).exists()
}

#[test]
fn runs_are_trained_resumed_and_exported_at_paths_that_are_no_text() {
    let scratch = files("paths-runs");
    answer(&scratch, "calibrate --budget 0.05 -o mesuré.toml");
    let plan = "plan modèle --ranks 2 --seq 16 --gbs 4 --cluster clé.toml -o plané.plan";
    answer(&scratch, plan);
    assert!(is_there(&scratch, "plané.plan"));
    let flags = "--data donnée --from-scratch --seq 16 --gbs 4 --ranks 2 --val-every 0";
    let places = "--cluster clé.toml --calibration mesuré.toml --plan plané.plan";
    answer(&scratch, &format!("train modèle {flags} {places} --steps 2 --out allé"));
    answer(&scratch, "train --resume allé --steps 4");
    answer(&scratch, &format!("train modèle {flags} {places} --steps 4 --out droité"));
    let weights = |run: &str| {
        let path = scratch.0.join(latin(run)).join("checkpoints/step-4/rank-0.safetensors");
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    assert!(weights("allé") == weights("droité"), "a resumption is the same run");
    for line in ["checkpoint ls allé", "checkpoint verify allé"] {
        assert!(answer(&scratch, line).contains('4'), "{line}");
    }
    answer(&scratch, "export allé --to hf -o sorti\u{e9}");
    answer(&scratch, "generate allé --prompt a --max-tokens 2");
    answer(&scratch, "generate sortié --prompt a --max-tokens 2");
    let line = "run sortié --input input_ids=entré.npy --labels étiqueté.npy --grad --output rendé";
    answer(&scratch, line);
    assert!(is_there(&scratch, "rendé/grads.safetensors"));
    // What is lost of the settings is in the checkpoint, paths too.
    fs::remove_file(scratch.0.join(latin("allé/run.toml"))).expect("it is removed");
    answer(&scratch, "train --resume allé --steps 5");
}

#[test]
fn models_plans_and_artefacts_lie_at_paths_that_are_no_text() {
    let scratch = files("paths-verbs");
    let flags = "--ranks 2 --seq 16 --gbs 4";
    let asked = format!("modèle {flags} --cluster clé.toml");
    answer(&scratch, "inspect modèle");
    answer(&scratch, "inspect modèle/config.json --json");
    answer(&scratch, "export modèle --to dot -o dessiné.dot");
    answer(&scratch, "export modèle --to graph -o écrité.graph");
    answer(&scratch, "inspect écrité.graph");
    answer(&scratch, &format!("plan {asked} -o plané.plan"));
    answer(&scratch, &format!("fit {asked}"));
    answer(&scratch, &format!("explain {asked} --plan plané.plan --json"));
    answer(&scratch, "verify modèle --ranks 2 --seq 16 --json");
    answer(&scratch, &format!("compile {asked} --plan plané.plan -o compilé.gtl --json"));
    answer(&scratch, "inspect compilé.gtl --json");
    answer(&scratch, "run compilé.gtl");
    answer(&scratch, "cluster show clé.toml");
    answer(&scratch, "cluster validate clé.toml");
    answer(&scratch, "cluster detect -o machiné.toml");
    answer(&scratch, "man -o pagés");
    answer(&scratch, "score llama-3-8b --from disposé.sh --devices 8 --gbs 8 --json");
    answer(&scratch, "plan llama-3-8b --cluster h100 --devices 8 --gbs 8 -o gpué.json");
    answer(&scratch, "explain llama-3-8b --cluster h100 --devices 8 --gbs 8 --plan gpué.json");
    answer(&scratch, "export gpué.json --lossy --to megatron -o drapeaux\u{e9}");
    for name in ["dessiné.dot", "machiné.toml", "pagés", "drapeaux\u{e9}"] {
        assert!(is_there(&scratch, name), "{name:?}");
    }
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/onnx");
    for (from, to) in [("blocks.onnx", "blocké.onnx"), ("blocks.data", "blocks.data")] {
        fs::copy(reference.join(from), scratch.0.join(latin(to))).expect("it is copied");
    }
    fs::copy(reference.join("blocks.x.npy"), scratch.0.join(latin("x=é.npy"))).expect("copied");
    answer(&scratch, "inspect blocké.onnx --dim batch=2 --dim seq=5");
    answer(&scratch, "run blocké.onnx --dim batch=2 --dim seq=5 --input x=x=é.npy --output rendé");
    assert!(is_there(&scratch, "rendé/y.npy"));
}

#[test]
fn tables_are_read_from_and_written_to_paths_that_are_no_text() {
    let scratch = files("paths-tables");
    let columns = planner::estimate::row::COLUMNS;
    let row = format!("a{}", ",8".repeat(columns.len()));
    let table = format!("row_id,{}\n{row}\n", columns.join(","));
    fs::write(scratch.0.join(latin("tablé.csv")), table).expect("it is written");
    let output = scratch.command(&[], "validate none.csv").output().expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    answer(&scratch, "validate tablé.csv --rows prédité.csv");
    assert!(is_there(&scratch, "prédité.csv"));
}
