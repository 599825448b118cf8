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
        let times = ["step_time_s", "predicted_step_time_s", "tokens_per_s"];
        for time in times.into_iter().chain(["recovery_s", "checkpoint_s"]) {
            step.remove(time);
        }
        step
    };
    text.expect("there are metrics").lines().map(read).collect()
}

/// Both runs have come to the same, to the last bit.
pub(crate) fn assert_equal(scratch: &Scratch, runs: [&str; 2], step: u64) {
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
    for (mesh, steps, more) in [("dp=2,tp=2,zero=1", 20, 30), ("pp=2,tp=2", 200, 300)] {
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
    // Whoever starts the tests may ignore some, as shells do for what runs in the background.
    let wrapper = ["env", "--default-signal=INT,HUP,XFSZ,XCPU"];
    let mut command = scratch.command(&wrapper, line);
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

fn signal(child: &Child, name: &str) {
    let kill = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status();
    assert!(kill.expect("`kill` starts").success());
}

#[test]
fn a_run_that_is_asked_to_stop_writes_a_checkpoint_and_says_so() {
    let scratch = scratch("asked");
    let flags = format!("{} --ranks 2", FLAGS.replace("--save-every 1", "--save-every 0"));
    let mut line = format!("train tiny {flags} --steps 100000 --out asked");
    for name in ["TERM", "INT", "HUP", "USR1", "XCPU"] {
        let (mut child, mut lines) = start(&scratch, &line);
        lines.by_ref().filter(|line| step_of(line).is_some()).take(3).for_each(drop);
        // As GNU `timeout` does: to the child, and to its group.
        signal(&child, name);
        signal(&child, name);
        let rest: Vec<String> = lines.collect();
        assert_eq!(child.wait().expect("it ends").code(), Some(75), "{name} {rest:?}");
        let stopped = latest(&scratch, "asked");
        let said = |text: &str| rest.iter().any(|line| line == text);
        assert!(said(&format!("note: stopped by SIG{name} after step {stopped}")), "{rest:?}");
        assert!(said("  = help: go on with `gantline train --resume asked`"), "{rest:?}");
        "train --resume asked".clone_into(&mut line);
    }
    let steps = latest(&scratch, "asked") + 2;
    scratch.answer(&format!("train --resume asked --steps {steps}"));
    scratch.answer(&format!("train tiny {flags} --steps {steps} --out straight"));
    assert_equal(&scratch, ["straight", "asked"], steps);
}

/// Starts a run whose steps take seconds, and waits for a line that it says.
fn start_slow(
    scratch: &Scratch,
    flags: &str,
    awaited: fn(&str) -> bool,
) -> (Child, impl Iterator<Item = String> + use<>) {
    let wide = TINY.replace("\"n_embd\": 16", "\"n_embd\": 256");
    assert_ne!(wide, TINY, "the model is made larger");
    scratch.write("wide/config.json", &wide);
    scratch.write("text/b.txt", &text().repeat(20));
    let line = "train wide --data text --from-scratch --seq 16 --val-every 0 --save-every 0 \
                --ranks 2 --steps 100000 --out slow";
    let (child, mut lines) = start(scratch, &format!("{line} {flags}"));
    assert!(lines.any(|line| awaited(&line)), "the line is said");
    (child, lines)
}

#[test]
fn a_step_that_is_longer_than_the_grace_is_abandoned_and_the_one_before_kept() {
    let scratch = scratch("grace");
    let is_step = |line: &str| step_of(line).is_some();
    let (mut child, lines) = start_slow(&scratch, "--gbs 256 --grace 1ms", is_step);
    signal(&child, "TERM");
    let rest: Vec<String> = lines.collect();
    assert_eq!(child.wait().expect("it ends").code(), Some(75), "{rest:?}");
    assert_eq!(latest(&scratch, "slow"), 1, "{rest:?}");
    let verified = scratch.run("checkpoint verify slow");
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stdout));
}

#[test]
fn a_second_signal_ends_a_run_at_once() {
    let scratch = scratch("twice");
    let is_begun = |line: &str| line.starts_with("weights ");
    let (mut child, lines) = start_slow(&scratch, "--gbs 4096 --grace 10m", is_begun);
    std::thread::sleep(std::time::Duration::from_millis(500));
    signal(&child, "TERM");
    std::thread::sleep(std::time::Duration::from_millis(1500));
    signal(&child, "TERM");
    let rest: Vec<String> = lines.collect();
    assert_eq!(child.wait().expect("it ends").code(), Some(130), "{rest:?}");
    assert!(!rest.iter().any(|line| line.contains("stopped by")), "{rest:?}");
}

#[test]
fn time_in_which_a_run_is_stopped_is_no_waiting() {
    let scratch = scratch("stopped");
    let plan = scratch.answer("plan tiny --ranks 2 --seq 16 --fix pp=2 --plan");
    scratch.write("given.plan", &plan);
    let flags = format!("{FLAGS} --ranks 2 --plan given.plan --steps 100000");
    let (mut child, mut lines) = start(&scratch, &format!("train tiny {flags} --out stopped"));
    lines.by_ref().filter(|line| step_of(line).is_some()).take(2).for_each(drop);
    signal(&child, "STOP");
    // Longer than the deadline of such short steps.
    std::thread::sleep(std::time::Duration::from_secs(7));
    signal(&child, "CONT");
    lines.by_ref().filter(|line| step_of(line).is_some()).take(2).for_each(drop);
    signal(&child, "TERM");
    let rest: Vec<String> = lines.collect();
    assert_eq!(child.wait().expect("it ends").code(), Some(75), "{rest:?}");
}

#[test]
fn a_run_whose_metrics_may_grow_no_more_keeps_its_last_step() {
    let scratch = scratch("grown");
    let small = TINY.replace("\"n_embd\": 16", "\"n_embd\": 4");
    assert_ne!(small, TINY, "the model is made smaller");
    scratch.write("small/config.json", &small);
    let flags = FLAGS.replace("-every 1", "-every 0");
    let line = format!("train small {flags} --steps 100000 --out grown");
    // 128 or 256 KiB, as the blocks of the shell are; a checkpoint fits.
    let wrapper = ["env", "--default-signal=XFSZ", "sh", "-c", "ulimit -f 256; exec \"$0\" \"$@\""];
    let mut command = scratch.command(&wrapper, &line);
    let output = command.output().expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{errors}");
    let stopped = latest(&scratch, "grown");
    assert!(errors.contains(&format!("stopped by SIGXFSZ after step {stopped}")), "{errors}");
    scratch.answer(&format!("train --resume grown --steps {}", stopped + 2));
    // The line of the last step is what may have been cut.
    let lines = metrics(&scratch, "grown");
    assert_eq!(lines.last().and_then(|line| line["step"].as_u64()), Some(stopped + 2));
    assert!(lines.len() as u64 > stopped, "{} lines of {stopped} steps", lines.len());
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
    // With SIGXFSZ, and where it is ignored.
    for (name, then) in [("limit", ""), ("ignored", "trap '' XFSZ;")] {
        let scratch = two_steps(name);
        let output = resume_limited(&scratch, then);
        assert_told(&output, "File too large");
        assert!(!scratch.0.join("run/checkpoints/step-3.tmp").exists());
        assert_goes_on(&scratch);
    }
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
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{errors}");
    let said = |text: &str| assert!(errors.contains(text), "`{text}` is not in\n{errors}");
    said("error: the disk of `run/checkpoints` has ");
    said(" are needed for 2 checkpoints");
    said("keep fewer checkpoints with --keep");
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
