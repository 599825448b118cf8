//! The directory of a run: one writer, and a way out of whatever is damaged in it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Output, Stdio};

use crate::cli::{Scratch, TINY, text};

/// A small run of which every step has a checkpoint.
const FLAGS: &str = "--data text --from-scratch --seq 16 --val-every 0 --save-every 1";

fn scratch(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.write("tiny/config.json", TINY);
    scratch.write("text/a.txt", &text());
    scratch
}

/// Four steps, all checkpoints kept.
fn four_steps(name: &str) -> Scratch {
    let scratch = scratch(name);
    scratch.answer(&format!("train tiny {FLAGS} --steps 4 --keep 0 --out run"));
    scratch
}

fn file_of(scratch: &Scratch, step: u64) -> PathBuf {
    scratch.0.join(format!("run/checkpoints/step-{step}/rank-0.safetensors"))
}

/// Changes the last byte of a file, which is one of the last tensor.
fn flip_last(path: &PathBuf) {
    let mut bytes = fs::read(path).expect("the file is read");
    *bytes.last_mut().expect("it is not empty") ^= 1;
    fs::write(path, bytes).expect("the file is written");
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_run_has_one_writer_and_any_number_of_readers() {
    let scratch = scratch("writers");
    let flags = FLAGS.replace("--val-every 0", "--val-every 1");
    let mut command =
        scratch.command(&[], &format!("train tiny {flags} --steps 90000 --keep 1 --out run"));
    let mut child =
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut lines = BufReader::new(child.stderr.take().expect("it is piped")).lines();
    let is_step = |line: &str| line.trim_start().starts_with(|c: char| c.is_ascii_digit());
    // The line of a step comes before its checkpoint: after the second there is the first one.
    lines.by_ref().filter(|line| line.as_ref().is_ok_and(|line| is_step(line))).nth(1);
    let reader = std::thread::spawn(move || lines.for_each(drop));
    for line in ["train --resume run", &format!("train tiny {FLAGS} --steps 9 --out run")] {
        let output = scratch.run(line);
        let said = errors(&output);
        assert_eq!(output.status.code(), Some(7), "{said}");
        let holder = format!("`run` is being written to by process {} on ", child.id());
        assert!(said.contains(&holder) && said.contains(" since 2"), "{said}");
    }
    // Its only checkpoint is replaced every few milliseconds.
    for _ in 0..8 {
        scratch.answer("generate run --prompt line --max-tokens 2");
        scratch.answer("checkpoint ls run");
    }
    child.kill().expect("it is killed");
    child.wait().expect("it ends");
    reader.join().expect("its messages end");
    let table = scratch.json("checkpoint ls run --json");
    let step = table["checkpoints"][0]["step"].as_u64().expect("a step");
    scratch.answer(&format!("train --resume run --steps {}", step + 2));
}

#[test]
fn a_run_goes_on_from_the_newest_checkpoint_that_is_intact() {
    let scratch = four_steps("intact");
    let expected = fs::read(file_of(&scratch, 4)).expect("the file is read");
    flip_last(&file_of(&scratch, 4));
    let whole = fs::read(file_of(&scratch, 3)).expect("the file is read");
    fs::write(file_of(&scratch, 3), &whole[..whole.len() - 4]).expect("the file is cut");
    let verified = scratch.run("checkpoint verify run --json");
    assert_eq!(verified.status.code(), Some(6));
    let table: serde_json::Value = serde_json::from_slice(&verified.stdout).expect("a document");
    let intact: Vec<_> = (0..4).map(|at| table["checkpoints"][at]["intact"].as_bool()).collect();
    assert_eq!(intact, [Some(true), Some(true), Some(false), Some(false)], "{table:#}");
    let output = scratch.run("train --resume run --steps 4");
    let said = errors(&output);
    assert!(output.status.success(), "{said}");
    let last = "tensor `wte/state1` is damaged";
    for part in [
        "warning[E4041]: the file is damaged: its hash is another",
        "step-4/rank-0.safetensors",
        last,
        "step-3/rank-0.safetensors",
        "bytes instead of",
        "the run goes on from step 2; the 2 steps to 4 are lost and done again",
    ] {
        assert!(said.contains(part), "`{part}` is not in\n{said}");
    }
    assert!(fs::read(file_of(&scratch, 4)).expect("it is there again") == expected);
    scratch.answer("checkpoint verify run");

    // A step that is asked for has no substitute.
    flip_last(&file_of(&scratch, 3));
    let output = scratch.run("train --resume run --step 3 --steps 4");
    assert_eq!(output.status.code(), Some(6));
    let said = errors(&output);
    assert!(said.contains("resume from step 2, which is intact"), "{said}");
    fs::remove_dir_all(scratch.0.join("run/checkpoints/step-4")).expect("removed");
    scratch.answer("train --resume run --step 1 --steps 4");
    assert!(fs::read(file_of(&scratch, 4)).expect("it is there again") == expected);
}

#[test]
fn settings_that_are_lost_are_those_of_the_newest_checkpoint() {
    let scratch = four_steps("settings");
    scratch.answer("train --resume run --steps 5 --lr 0.5");
    let settings = fs::read(scratch.0.join("run/run.toml")).expect("the file is read");
    for lose in [true, false] {
        if lose {
            fs::remove_file(scratch.0.join("run/run.toml")).expect("removed");
        } else {
            scratch.write("run/run.toml", "");
        }
        let output = scratch.run("train --resume run");
        let said = errors(&output);
        assert!(output.status.success(), "{said}");
        let part = "`run/run.toml` is missing or empty: the settings are those of the checkpoint \
                    of step 5";
        assert!(said.contains(part), "{said}");
        assert!(fs::read(scratch.0.join("run/run.toml")).expect("written again") == settings);
    }
}

/// Settings of earlier versions do not say how many bits a draw has: they drew 24.
#[test]
fn runs_of_earlier_versions_keep_their_draws() {
    let scratch = scratch("draws");
    scratch.answer(&format!("train tiny {FLAGS} --dropout 0.3 --steps 3 --keep 0 --out run"));
    let path = scratch.0.join("run/run.toml");
    let settings = fs::read_to_string(&path).expect("the file is read");
    let mut resumed = |draws: &str| {
        let text = settings.replace("draw_bits = 16\n", draws);
        assert!(text != settings || draws.contains("16"), "{settings}");
        scratch.write("run/run.toml", &text);
        scratch.answer("train --resume run --step 1 --steps 3");
        fs::read(file_of(&scratch, 3)).expect("the file is read")
    };
    let [short, none, long] = ["draw_bits = 16\n", "", "draw_bits = 24\n"].map(&mut resumed);
    assert!(none == long && none != short);
    scratch.write("run/run.toml", &settings.replace("draw_bits = 16", "draw_bits = 20"));
    let said = errors(&scratch.run("train --resume run"));
    assert!(said.contains("draws have 24 or 16 bits, not 20"), "{said}");
}

/// What a plan decides of a training needs no flag: ranks, batch, length, types, clipping, decay.
#[test]
fn a_plan_says_what_its_training_is_like() {
    let scratch = scratch("planned");
    let asked = "--ranks 2 --gbs 6 --seq 24 --dtype bf16 --fix dp=2,zero=1";
    scratch.answer(&format!("plan tiny {asked} -o x.plan"));
    let train = "train tiny --data text --from-scratch --val-every 0 --steps 1";
    let run = "--save-every 1 --plan x.plan --out run";
    scratch.answer(&format!("{train} {run}"));
    let settings = fs::read_to_string(scratch.0.join("run/run.toml")).expect("the file is read");
    for part in ["ranks = 2", "gbs = 6", "seq = 24", "dtype = \"bf16\""] {
        assert!(settings.contains(part), "{part} is not in\n{settings}");
    }
    let said = errors(&scratch.run(&format!("{train} --plan x.plan --seq 16 --out other")));
    assert!(said.contains("E5006") && said.contains("--seq 24"), "{said}");
}

#[test]
fn files_of_others_stay_where_checkpoints_lie() {
    let scratch = four_steps("others");
    let ours = ["step-9.tmp/rank-0.safetensors", "LATEST.tmp"];
    let theirs = ["notes.tmp", "step-x.tmp", "step-9.old.tmp", "download.tmp/part"];
    for name in ours.iter().chain(&theirs) {
        scratch.write(&format!("run/checkpoints/{name}"), "kept?");
    }
    scratch.answer("train --resume run --steps 5");
    let is_there = |name: &str| scratch.0.join("run/checkpoints").join(name).exists();
    assert!(!ours.iter().any(|name| is_there(name)));
    assert!(theirs.iter().all(|name| is_there(name)));
}
