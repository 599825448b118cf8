//! Runs that end early, through the command line: what they leave behind goes on, bit for bit.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use serde_json::{Map, Value};

use crate::cli::{Scratch, TINY, text};

/// What every run here is given: dropout, and a validation after each step.
const FLAGS: &str =
    "--data text --from-scratch --seq 16 --val-every 1 --val-batches 1 --save-every 1";

fn scratch(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.write("tiny/config.json", &TINY.replace("0.0", "0.1"));
    scratch.write("text/a.txt", &text());
    scratch
}

/// The files of a checkpoint: weights, states of the optimizer, and the manifest without the
/// settings, such as threads, which may differ, and its hash.
fn checkpoint(scratch: &Scratch, run: &str, step: u64) -> BTreeMap<String, Vec<u8>> {
    let folder = scratch.0.join(run).join(format!("checkpoints/step-{step}"));
    let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let read = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().expect("names are UTF-8");
        let bytes = fs::read(entry.path()).expect("a file is read");
        if name != "manifest.json" {
            return (name, bytes);
        }
        let mut manifest: Value = serde_json::from_slice(&bytes).expect("a manifest is JSON");
        manifest["blake3"].take();
        manifest["state"]["settings"].take();
        (name, manifest.to_string().into_bytes())
    };
    entries.map(|entry| read(entry.expect("an entry is read"))).collect()
}

/// What `metrics.jsonl` holds of each step besides times.
fn metrics(scratch: &Scratch, run: &str) -> Vec<Map<String, Value>> {
    let text = fs::read_to_string(scratch.0.join(run).join("metrics.jsonl"));
    let read = |line: &str| {
        let mut step: Map<String, Value> = serde_json::from_str(line).expect("a line is JSON");
        for time in ["step_time_s", "predicted_step_time_s", "tokens_per_s"] {
            step.remove(time);
        }
        step
    };
    text.expect("there are metrics").lines().map(read).collect()
}

/// Both runs have come to the same, to the last bit.
fn assert_equal(scratch: &Scratch, runs: [&str; 2], step: u64) {
    let [one, other] = runs.map(|run| metrics(scratch, run));
    assert_eq!(one.len() as u64, step, "each step has one line");
    for (a, b) in one.iter().zip(&other) {
        assert_eq!(a, b, "{runs:?}");
    }
    let [one, other] = runs.map(|run| checkpoint(scratch, run, step));
    assert!(one.len() > 1, "a rank has written a file");
    for (name, bytes) in &one {
        assert!(other.get(name) == Some(bytes), "{runs:?} differ in {name} of step {step}");
    }
    assert_eq!(one.len(), other.len());
}

fn latest(scratch: &Scratch, run: &str) -> u64 {
    let text = fs::read_to_string(scratch.0.join(run).join("checkpoints/LATEST"));
    let text = text.expect("there is a checkpoint");
    let step = text.trim().strip_prefix("step-").and_then(|step| step.parse().ok());
    step.unwrap_or_else(|| panic!("LATEST says {text}"))
}

#[test]
fn two_hundred_steps_resumed_to_three_hundred_are_three_hundred() {
    let scratch = scratch("resumed");
    let flags = FLAGS.replace("-every 1", "-every 10");
    for (mesh, steps, more) in [("dp=2,tp=2", 20, 30), ("pp=2,tp=2", 200, 300)] {
        // A plan that no search is asked for: the resumption has to take it from the checkpoint.
        let plan = scratch.answer(&format!("plan tiny --ranks 4 --seq 16 --fix {mesh} --plan"));
        scratch.write("given.plan", &plan);
        let flags = format!("{flags} --ranks 4 --plan given.plan");
        let _ = fs::remove_dir_all(scratch.0.join("whole"));
        let _ = fs::remove_dir_all(scratch.0.join("half"));
        scratch.answer(&format!("train tiny {flags} --steps {more} --out whole --threads 1"));
        scratch.answer(&format!("train tiny {flags} --steps {steps} --out half --threads 2"));
        scratch.answer(&format!("train --resume half --steps {more} --threads 3"));
        assert_equal(&scratch, ["whole", "half"], more);
        let kept = fs::read_to_string(scratch.0.join("half/run.plan"));
        assert_eq!(kept.expect("a run has its plan").trim(), plan.trim(), "{mesh}");
    }
}

/// Starts a run that has no end, and reads what it reports of each step.
fn start(scratch: &Scratch, line: &str) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut command = scratch.command(&[], line);
    let mut child =
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let stderr = child.stderr.take().expect("it is piped");
    (child, BufReader::new(stderr).lines().map(|line| line.expect("messages are UTF-8")))
}

/// The step of a line of progress.
fn step_of(line: &str) -> Option<u64> {
    line.split_whitespace().next()?.parse().ok()
}

#[test]
fn runs_that_are_killed_go_on_from_their_last_checkpoint() {
    let scratch = scratch("killed");
    let flags = format!("{FLAGS} --ranks 2 --keep 2");
    let mut line = format!("train tiny {flags} --steps 100000 --out killed");
    // The line of a step is written just before its checkpoint.
    for wait in [7, 2, 3, 5] {
        let (mut child, lines) = start(&scratch, &line);
        let seen: Vec<u64> = lines.filter_map(|line| step_of(&line)).take(wait).collect();
        child.kill().expect("it is killed");
        assert_eq!(child.wait().expect("it ends").signal(), Some(9));
        assert_eq!(seen.len(), wait, "{seen:?}");
        let complete = seen.last().expect("a step was seen") - 1;
        assert!(latest(&scratch, "killed") >= complete, "{seen:?}");
        "train --resume killed".clone_into(&mut line);
    }
    let steps = latest(&scratch, "killed") + 3;
    scratch.answer(&format!("train --resume killed --steps {steps}"));
    scratch.answer(&format!("train tiny {flags} --steps {steps} --out straight"));
    assert_equal(&scratch, ["straight", "killed"], steps);
}

#[test]
fn a_run_that_is_asked_to_stop_writes_a_checkpoint_and_says_so() {
    let scratch = scratch("asked");
    let flags = format!("{} --ranks 2", FLAGS.replace("--save-every 1", "--save-every 0"));
    let (mut child, mut lines) =
        start(&scratch, &format!("train tiny {flags} --steps 100000 --out asked"));
    lines.by_ref().filter(|line| step_of(line).is_some()).take(3).for_each(drop);
    let kill = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(kill.expect("`kill` starts").success());
    let rest: Vec<String> = lines.collect();
    assert_eq!(child.wait().expect("it ends").code(), Some(75), "{rest:?}");
    let stopped = latest(&scratch, "asked");
    let said = |text: &str| rest.iter().any(|line| line == text);
    assert!(said(&format!("note: stopped by SIGTERM after step {stopped}")), "{rest:?}");
    assert!(said("  = help: go on with `gantline train --resume asked`"), "{rest:?}");
    let steps = stopped + 2;
    scratch.answer(&format!("train --resume asked --steps {steps}"));
    scratch.answer(&format!("train tiny {flags} --steps {steps} --out straight"));
    assert_equal(&scratch, ["straight", "asked"], steps);
}

/// A shell that lets files grow to 16 or 32 KiB, as its blocks are, and then starts the program.
/// A checkpoint has larger ones; nothing else comes near.
fn limited(then: &str) -> String {
    format!("{then} ulimit -c 0; ulimit -f 32; exec \"$0\" \"$@\"")
}

fn resume_limited(scratch: &Scratch, then: &str) -> std::process::Output {
    let script = limited(then);
    let mut command = scratch.command(&["sh", "-c", &script], "train --resume run --steps 4");
    command.output().expect("the program starts")
}

/// A run that has a checkpoint of step 2.
fn two_steps(name: &str) -> Scratch {
    let scratch = scratch(name);
    scratch.answer(&format!("train tiny {FLAGS} --ranks 2 --steps 2 --out run"));
    scratch
}

/// The run goes on to step 4 as if nothing had been.
fn assert_goes_on(scratch: &Scratch) {
    assert_eq!(latest(scratch, "run"), 2);
    scratch.answer("train --resume run --steps 4");
    scratch.answer(&format!("train tiny {FLAGS} --ranks 2 --steps 4 --out straight"));
    assert_equal(scratch, ["straight", "run"], 4);
    assert!(!scratch.0.join("run/checkpoints/step-3.tmp").exists());
}

#[test]
fn a_crash_in_the_middle_of_a_checkpoint_loses_only_that() {
    let scratch = two_steps("torn");
    // SIGXFSZ ends the process inside the call that writes beyond the limit.
    let output = resume_limited(&scratch, "");
    assert_eq!(output.status.signal(), Some(25), "{}", String::from_utf8_lossy(&output.stderr));
    let torn = fs::metadata(scratch.0.join("run/checkpoints/step-3.tmp/rank-0.safetensors"));
    let whole = checkpoint(&scratch, "run", 2)["rank-0.safetensors"].len() as u64;
    let torn = torn.expect("the crash left a piece of a file").len();
    assert!(torn > 0 && torn < whole, "{torn} of {whole} bytes");
    assert_goes_on(&scratch);
}

/// What must be told of a checkpoint of step 3 that could not be written.
fn assert_told(output: &std::process::Output, cause: &str) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{errors}");
    let said = |text: &str| assert!(errors.contains(text), "`{text}` is not in\n{errors}");
    said("error: can't write the checkpoint of step 3: can't write `run/checkpoints/step-3.tmp/");
    said(cause);
    said("the checkpoint of step 2 is intact");
    said("  = help: make room, then go on with `gantline train --resume run`");
}

#[test]
fn a_file_beyond_a_limit_is_told_and_the_previous_checkpoint_is_intact() {
    let scratch = two_steps("limit");
    let output = resume_limited(&scratch, "trap '' XFSZ;");
    assert_told(&output, "File too large");
    assert!(!scratch.0.join("run/checkpoints/step-3.tmp").exists());
    assert_goes_on(&scratch);
}

#[test]
fn a_full_disk_is_told_and_the_previous_checkpoint_is_intact() {
    let scratch = two_steps("disk");
    // A disk of its own, in a name space that ends with the command: room for the checkpoint that
    // is there, and half of the next.
    let script = "mkdir aside && cp -r run/. aside && room=$(($(du -sk aside | cut -f1) + 64)) &&
        mount -t tmpfs -o size=${room}k none run && cp -r aside/. run || exit 99
        \"$0\" \"$@\"; code=$?; rm -r aside && cp -r run aside; exit $code";
    let probe =
        Command::new("unshare").args(["-rm", "mount", "-t", "tmpfs", "none", "/mnt"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this system lets nobody mount a file system of their own");
        return;
    }
    let mut command =
        scratch.command(&["unshare", "-rm", "sh", "-c", script], "train --resume run --steps 4");
    let output = command.output().expect("the program starts");
    assert_told(&output, "No space left on device");
    fs::remove_dir_all(scratch.0.join("run")).expect("the run is removed");
    fs::rename(scratch.0.join("aside"), scratch.0.join("run")).expect("it is replaced");
    assert_goes_on(&scratch);
}

#[test]
fn a_run_without_a_checkpoint_says_how_to_begin_again() {
    let scratch = scratch("early");
    let flags = FLAGS.replace("--save-every 1", "--save-every 0");
    let (mut child, mut lines) =
        start(&scratch, &format!("train tiny {flags} --steps 100000 --out early"));
    assert!(lines.any(|line| step_of(&line).is_some()));
    child.kill().expect("it is killed");
    child.wait().expect("it ends");
    let output = scratch.run("train --resume early");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("begin again with `--out early`"), "{errors}");
    scratch.answer(&format!("train tiny {FLAGS} --steps 1 --out early"));
}
