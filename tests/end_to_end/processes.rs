//! Runs of several processes, on one machine's own network: what they compute, and what happens
//! when one of them is lost, signalled, or of another run.

use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::cli::{Scratch, TINY, text};
use crate::interruption::assert_equal;

/// What every run here is given.
const FLAGS: &str = "--data text --from-scratch --seq 16 --val-every 1 --val-batches 1 \
                     --save-every 1";

/// A tiny Mixtral.
const EXPERTS: &str = r#"{"model_type": "mixtral", "vocab_size": 256, "hidden_size": 16,
    "max_position_embeddings": 64, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2}"#;

/// A process, and what it says.
pub(crate) struct Started {
    child: Child,
    said: JoinHandle<String>,
}

/// Starts processes as a launcher would that says which of them each is.
pub(crate) fn start(count: usize, command: impl Fn(usize) -> Command) -> Vec<Started> {
    start_printing(count, Stdio::null(), command)
}

/// As [`start`], where the first process prints its answer to `answer`.
fn start_printing(count: usize, answer: Stdio, command: impl Fn(usize) -> Command) -> Vec<Started> {
    let mut answer = Some(answer);
    // Ports that the system gives nobody by itself.
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + (std::process::id() % 1000) as u16 * 10;
    let next = || first + NEXT.fetch_add(1, Ordering::Relaxed);
    let mut free =
        std::iter::repeat_with(next).filter(|at| TcpListener::bind(("127.0.0.1", *at)).is_ok());
    let port = free.next().expect("there is a port").to_string();
    let mut start = |process: usize| {
        let mut command = command(process);
        command.env("RANK", process.to_string()).env("WORLD_SIZE", count.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.stdout(answer.take().unwrap_or_else(Stdio::null)).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let mut stderr = child.stderr.take().expect("it is piped");
        let said = std::thread::spawn(move || {
            let mut said = String::new();
            stderr.read_to_string(&mut said).expect("messages are UTF-8");
            said
        });
        Started { child, said }
    };
    (0..count).map(&mut start).collect()
}

/// How processes end, and what they have said.
pub(crate) fn wait(all: Vec<Started>) -> Vec<(ExitStatus, String)> {
    let end = |mut one: Started| {
        for _ in 0..6000 {
            if one.child.try_wait().expect("it is ours").is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        // One that hangs fails its test.
        let _ = one.child.kill();
        let status = one.child.wait().expect("it ends");
        (status, one.said.join().expect("it is read"))
    };
    all.into_iter().map(end).collect()
}

fn scratch(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.write("tiny/config.json", &TINY.replace("0.0", "0.1"));
    scratch.write("experts/config.json", EXPERTS);
    scratch.write("text/a.txt", &text());
    scratch
}

/// Trains in several processes, all of which succeed.
fn train(scratch: &Scratch, count: usize, line: &str) {
    let line = format!("train {line}");
    for (status, said) in wait(start(count, |_| scratch.command(&[], &line))) {
        assert!(status.success(), "{count} processes: gantline {line}\n{said}");
    }
}

/// However ranks are divided among processes, losses, weights and states have the same bits.
#[test]
fn processes_train_as_one() {
    let scratch = scratch("processes");
    for (at, (model, decisions, counts)) in [
        ("tiny", "--ranks 4 --fix tp=2 --fix dp=2 --fix sp=1 --fix zero=1", &[2, 4][..]),
        ("tiny", "--ranks 4 --fix pp=2 --fix dp=2 --fix mbs=1", &[3]),
        ("tiny", "--ranks 2 --fix cp=2 --fix zero=3", &[2]),
        ("experts", "--ranks 4 --fix dp=4 --fix ep=2 --dtype bf16", &[4]),
        // The first stage has nothing to update.
        ("experts", "--ranks 2 --fix pp=2 --lora rank=2,targets=lm_head", &[2]),
    ]
    .into_iter()
    .enumerate()
    {
        let one = format!("one-{at}");
        scratch.answer(&format!("train {model} {FLAGS} {decisions} --steps 3 --out {one}"));
        for count in counts {
            let out = format!("apart-{at}-{count}");
            train(&scratch, *count, &format!("{model} {FLAGS} {decisions} --steps 3 --out {out}"));
            assert_equal(&scratch, [&one, &out], 3);
        }
    }
}

/// What one process began, several go on with, and the other way round.
#[test]
fn runs_go_on_in_other_processes() {
    let scratch = scratch("processes-resumed");
    let flags = format!("{FLAGS} --ranks 4 --fix tp=2 --fix dp=2");
    scratch.answer(&format!("train tiny {flags} --steps 4 --out whole"));
    train(&scratch, 2, &format!("tiny {flags} --steps 2 --out moved"));
    scratch.answer("train --resume moved --steps 3");
    train(&scratch, 3, "--resume moved --steps 4");
    assert_equal(&scratch, ["whole", "moved"], 4);
}

/// Waits until a run has a checkpoint.
fn wait_for_checkpoint(scratch: &Scratch, run: &str) {
    wait_for(&scratch.0.join(run).join("checkpoints/LATEST"));
}

/// Waits until a file has something in it.
fn wait_for(path: &Path) {
    for _ in 0..1800 {
        if std::fs::metadata(path).is_ok_and(|file| file.len() > 0) {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("nothing is written to {}", path.display());
}

/// Ranks of inference in several processes continue prompts as those of one: drawn, likeliest, the
/// best of several, and many with in-flight batching.
#[test]
fn processes_continue_prompts_as_one() {
    let scratch = scratch("processes-prompts");
    scratch.answer(&format!("train tiny {FLAGS} --steps 3 --out run"));
    let prompts = ["the", "a longer prompt too", "of"];
    let lines = prompts.map(|prompt| format!("{prompt:?}\n"));
    scratch.write("prompts.jsonl", &lines.concat());
    for (at, (count, flags)) in [
        (2, "--prompt the --tp 2 --temperature 0"),
        (2, "--prompt the --pp 2 --temperature 0.9 --seed 3"),
        (3, "--prompt the --tp 2 --pp 2 --beams 3"),
        (2, "--prompts prompts.jsonl --slots 2 --tp 2 --seed 5"),
    ]
    .into_iter()
    .enumerate()
    {
        let line = format!("generate run --max-tokens 12 {flags}");
        let one = scratch.answer(&line);
        let path = scratch.0.join(format!("answer-{at}"));
        let answer = std::fs::File::create(&path).expect("a file is made");
        let all = start_printing(count, answer.into(), |_| scratch.command(&[], &line));
        for (status, said) in wait(all) {
            assert!(status.success(), "{count} processes: gantline {line}\n{said}");
        }
        assert_eq!(std::fs::read_to_string(&path).expect("an answer"), one, "{line}");
    }
    let line = "generate run --prompts prompts.jsonl --dp 2";
    let ended = wait(start(2, |_| scratch.command(&[], line)));
    assert_eq!(ended[0].0.code(), Some(2), "{}", ended[0].1);
    assert!(ended[0].1.contains("2 replicas do not share processes"), "{}", ended[0].1);
    assert_eq!(ended[1].0.code(), Some(7), "{}", ended[1].1);
}

/// Whichever process is killed, the others end, say which ranks are gone, and leave what can be
/// gone on with.
#[test]
fn a_process_that_is_lost_ends_the_run() {
    let scratch = scratch("processes-lost");
    let line = format!("train tiny {FLAGS} --ranks 3 --fix dp=3 --gbs 9 --steps 100000 --out run");
    for (lost, line) in [(2, line.as_str()), (0, "train --resume run"), (1, "train --resume run")] {
        let _ = std::fs::remove_file(scratch.0.join("run/checkpoints/LATEST"));
        let mut all = start(3, |_| scratch.command(&[], line));
        wait_for_checkpoint(&scratch, "run");
        all[lost].child.kill().expect("it is killed");
        let ended = wait(all);
        let [first, follower] = [&ended[0], &ended[3 - lost.max(1)]];
        if lost == 0 {
            assert_eq!(follower.0.code(), Some(7), "{}", follower.1);
            assert!(follower.1.contains("the first process"), "{}", follower.1);
        } else {
            assert_eq!(first.0.code(), Some(7), "{}", first.1);
            assert!(
                first.1.contains(&format!("process {lost}, on 127.0.0.1, is gone")),
                "{}",
                first.1
            );
            assert_eq!(follower.0.code(), Some(7), "{}", follower.1);
            assert!(follower.1.contains("the run has failed"), "{}", follower.1);
        }
    }
    scratch.answer("checkpoint verify run");
}

/// A process that neither ends nor goes on is named: when the deadline of a step passes if others
/// wait for its sums, after a minute of silence if it has added its own and not yet answered.
#[test]
fn a_process_that_is_stopped_is_named() {
    let scratch = scratch("processes-stopped");
    // Without checkpoints, before which the first process asks the other ones for their weights.
    let line = "train tiny --data text --from-scratch --seq 16 --val-every 0 --save-every 0 \
                --ranks 2 --fix dp=2 --steps 1000000 --out run";
    let all = start(2, |_| scratch.command(&[], line));
    wait_for(&scratch.0.join("run/metrics.jsonl"));
    let follower = all[1].child.id().to_string();
    let signal = |name: &str| {
        let kill = Command::new("kill").args([name, &follower]).status();
        assert!(kill.expect("`kill` starts").success());
    };
    signal("-STOP");
    let mut all = all.into_iter();
    let leader = wait(all.by_ref().take(1).collect()).remove(0);
    signal("-CONT");
    assert_eq!(leader.0.code(), Some(7), "{}", leader.1);
    let late = "rank 1, which is on 127.0.0.1";
    let silent = "rank 1 failed: process 1, on 127.0.0.1, is gone: it has said nothing for 60.0 s";
    assert!(leader.1.contains(late) || leader.1.contains(silent), "{}", leader.1);
    let follower = wait(all.collect()).remove(0);
    assert!(follower.0.code().is_some(), "it ends by itself: {}", follower.1);
}

/// Launchers signal all processes at once: the run ends after a checkpoint, and goes on.
#[test]
fn a_signal_to_all_processes_ends_the_run_with_a_checkpoint() {
    let scratch = scratch("processes-signal");
    let flags = format!("{FLAGS} --ranks 2 --fix tp=2");
    let all = start(2, |_| {
        // Whoever starts the tests may ignore some.
        let wrapper = ["env", "--default-signal=INT,HUP,XFSZ,XCPU"];
        scratch.command(&wrapper, &format!("train tiny {flags} --steps 100000 --out run"))
    });
    wait_for_checkpoint(&scratch, "run");
    for one in &all {
        let kill = Command::new("kill").args(["-TERM", &one.child.id().to_string()]).status();
        assert!(kill.expect("`kill` starts").success());
    }
    let ended = wait(all);
    assert_eq!(ended[0].0.code(), Some(75), "{}", ended[0].1);
    assert_eq!(ended[1].0.code(), Some(75), "{}", ended[1].1);
    let said = &ended[0].1;
    let step = said.split("after step ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let step: u64 = step.and_then(|step| step.parse().ok()).unwrap_or_else(|| panic!("{said}"));
    train(&scratch, 2, &format!("--resume run --steps {}", step + 2));
    scratch.answer(&format!("train tiny {flags} --steps {} --out whole", step + 2));
    assert_equal(&scratch, ["whole", "run"], step + 2);
}

/// Processes of different runs, or more than ranks, are refused with the reason, as are variables
/// that make no sense.
#[test]
fn processes_that_do_not_belong_together_are_told() {
    let scratch = scratch("processes-refused");
    let line = format!("train tiny {FLAGS} --ranks 2 --steps 1 --out");
    let ended = wait(start(3, |_| scratch.command(&[], &format!("{line} many"))));
    assert_eq!(ended[0].0.code(), Some(2), "{}", ended[0].1);
    assert!(ended[0].1.contains("3 processes are started, and the plan has 2 ranks"));
    assert!(ended[2].1.contains("the first process has ended"), "{}", ended[2].1);
    let ended = wait(start(2, |_| scratch.command(&[], "train tiny --data no --steps 1 --out no")));
    assert_eq!(ended.iter().map(|it| it.0.code()).collect::<Vec<_>>(), [Some(2), Some(7)]);
    assert!(ended[1].1.contains("the first process, on 127.0.0.1:"), "{}", ended[1].1);

    // A process that is of another job is refused, and the run goes on without it.
    let all = start(2, |process| {
        let mut command = scratch.command(&[], &format!("{line} run"));
        command.env("TORCHELASTIC_RUN_ID", process.to_string());
        command
    });
    let (mut leader, stranger) = {
        let mut all = all;
        let stranger = all.remove(1);
        (all, stranger)
    };
    let refused = wait(vec![stranger]).remove(0);
    assert_eq!(refused.0.code(), Some(7));
    assert!(refused.1.contains("it is of another run"), "{}", refused.1);
    leader[0].child.kill().expect("it is killed");
    wait(leader);

    // A launcher that says nonsense.
    for (variables, wanted) in [
        ([("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")], "RANK is 2"),
        ([("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1")], "MASTER_ADDR"),
        ([("RANK", "one"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")], "not a number"),
    ] {
        let mut command = scratch.command(&[], &format!("{line} none"));
        let output = command.envs(variables).output().expect("the program starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(7), "{said}");
        assert!(said.contains(wanted), "{said}");
    }
}
