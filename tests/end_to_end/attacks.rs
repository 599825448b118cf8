//! Files that are made to do harm: each is refused, soon, with a word about it.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::cli::{Scratch, tiny};

/// No file may keep a command for longer than this.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs a line; its exit code and what it says. It is ended where it takes too long.
fn attempt(scratch: &Scratch, line: &str) -> (Option<i32>, String) {
    let begun = Instant::now();
    let mut command = scratch.command(&["timeout", "-s", "KILL", "30"], line);
    let output = command.output().expect("the program starts");
    assert!(begun.elapsed() < PATIENCE, "gantline {line} hangs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn pipes_and_devices_are_not_opened() {
    let scratch = tiny("pipes");
    let made = Command::new("mkfifo").arg(scratch.0.join("pipe")).status();
    assert!(made.expect("`mkfifo` starts").success());
    Command::new("mkfifo").arg(scratch.0.join("pipe.graph")).status().expect("it starts");
    std::fs::create_dir(scratch.0.join("piped")).expect("the directory is made");
    Command::new("mkfifo").arg(scratch.0.join("piped/config.json")).status().expect("it starts");
    let train = "train tiny --data text --from-scratch --steps 1 --out out";
    for file in ["pipe", "/dev/zero", "/dev/urandom"] {
        for line in [
            format!("inspect {file}"),
            format!("run {file}"),
            format!("plan tiny --cluster {file}"),
            format!("plan tiny --calibration {file}"),
            format!("{train} --plan {file}"),
            format!("{train} --tokenizer {file}"),
            format!("train tiny --data {file} --from-scratch --steps 1 --out out"),
            format!("score llama-3-8b --from {file}"),
            format!("validate {file}"),
            format!("cluster show {file}"),
        ] {
            let (code, said) = attempt(&scratch, &line);
            assert!(matches!(code, Some(2 | 4 | 6 | 7)), "{line}: {code:?} {said}");
            assert!(said.contains("error") && !said.contains("defect"), "{line}: {said}");
        }
    }
    for line in ["inspect pipe.graph", "inspect piped", "plan piped/config.json"] {
        let (code, said) = attempt(&scratch, line);
        assert!(matches!(code, Some(2 | 4 | 6 | 7)), "{line}: {code:?} {said}");
    }
}

#[test]
fn files_that_extend_each_other_without_end_are_refused() {
    let scratch = tiny("extends");
    for file in 0..200 {
        let text = format!("extends = \"file:c{}.toml\"\n", file + 1);
        scratch.write(&format!("c{file}.toml"), &text);
    }
    scratch.write("c200.toml", "name = \"end\"\nextends = \"preset:cpu-local\"\n");
    let (code, said) = attempt(&scratch, "plan tiny --cluster c0.toml");
    assert_eq!(code, Some(6), "{said}");
    assert!(said.contains("error[E3008]: more than 16 files extend each other"), "{said}");
    let (code, said) = attempt(&scratch, "plan tiny --cluster c190.toml");
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn nothing_of_a_file_that_is_no_cluster_is_shown() {
    let scratch = tiny("foreign-cluster");
    scratch.write("shadow", "root:$6$secret:19000:0:99999:7:::\nalso = \"secret\"\n");
    for line in ["plan tiny --cluster shadow", "cluster show shadow"] {
        let (code, said) = attempt(&scratch, line);
        assert_eq!(code, Some(6), "{said}");
        assert!(said.contains("error[E3001]") && !said.contains("secret"), "{said}");
    }
    // Of a cluster file the line is shown.
    scratch.write("mine.toml", "extends = \"preset:cpu-local\"\nnoodles == 3\n");
    let (_, said) = attempt(&scratch, "plan tiny --cluster mine.toml");
    assert!(said.contains("noodles == 3"), "{said}");
}

#[test]
#[cfg(unix)]
fn external_data_stays_beside_its_model() {
    use std::os::unix::fs::symlink;
    let scratch = tiny("linked");
    let reference = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/onnx");
    let at = |name: &str| scratch.0.join(name);
    for folder in ["model", "blobs", "cache"] {
        std::fs::create_dir(at(folder)).expect("the directory is made");
    }
    let copy = |name: &str, to: &str| {
        std::fs::copy(reference.join(name), at(to)).expect("the file is copied");
    };
    copy("blocks.onnx", "model/blocks.onnx");
    copy("blocks.data", "elsewhere.data");
    let line = "inspect model/blocks.onnx --dim batch=2 --dim seq=3";
    symlink(at("elsewhere.data"), at("model/blocks.data")).expect("it is linked");
    let (code, said) = attempt(&scratch, line);
    assert_eq!(code, Some(6), "{said}");
    assert!(said.contains("a link that leads away from the model"), "{said}");
    // A cache of downloads links both to where the bytes are.
    for (name, blob) in [("blocks.onnx", "blobs/1"), ("blocks.data", "blobs/2")] {
        copy(name, blob);
        symlink(at(blob), at("cache").join(name)).expect("it is linked");
    }
    let (code, said) = attempt(&scratch, &line.replace("model/", "cache/"));
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn control_characters_of_files_do_not_reach_the_terminal() {
    let scratch = tiny("control");
    let escape = "\x1b]0;title\x07\x1b[2J\u{202e}";
    scratch.write("bad.graph", &format!("module m\n  func @loss(%w: {escape}f32[4]) {{\n"));
    scratch.write("bad.toml", &format!("extends = \"preset:{escape}\"\n"));
    scratch.write("bad/config.json", "{\"model_type\": \"gpt\\u001b[2J\\u0007\"}");
    for line in ["inspect bad.graph", "plan tiny --cluster bad.toml", "inspect bad"] {
        let (code, said) = attempt(&scratch, line);
        assert!(matches!(code, Some(2 | 4 | 6)), "{line}: {code:?} {said}");
        let is_active = |letter: char| letter.is_control() && !matches!(letter, '\n' | '\t');
        assert!(!said.contains(is_active) && !said.contains('\u{202e}'), "{line}: {said:?}");
    }
}
