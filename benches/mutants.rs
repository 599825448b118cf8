//! Damaged files of every format, through the readers and through the command line.
//!
//! ```text
//! cargo bench --bench mutants -- --cases 10000 --seed 0 --only "score"
//! ```
//! Each format is tried in a process of its own with 2 GiB of address space. It prints, for each,
//! how the copies were answered, and the seeds of those that are wrong: a panic, an abort, a fault,
//! more memory than that, or no answer after 20 s. They are kept in the bench's directory below
//! `target`, and the bench ends with an error where there are any.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

#[path = "../tests/memory/formats.rs"]
#[allow(clippy::unwrap_used, reason = "a bench may fail anywhere")]
mod formats;
#[path = "../tests/memory/mutant.rs"]
mod mutant;
#[path = "../tests/end_to_end/scratch.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod scratch;

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use gantline::cli::{Cli, run};
use gantline::failure::Exit;
use planner::cluster::PRESETS;
use runtime::artefact::{Contents, Limits, decode, encode};
use runtime::execute::{Batch, Options, Phase, Scalars, Session};
use runtime::local::memory::Memory;
use runtime::trace::Tracing;
use scratch::{Scratch, text};

use formats::{Format, contents, expect_panics_of_the_reader, forged, formats, with_programs};
use mutant::mutated;

/// What takes more memory than a process may have ends with this code.
const NO_MEMORY: i32 = 7;
#[global_allocator]
static MEMORY: Memory = Memory { code: NO_MEMORY };

/// KiB of address space of a process.
const MEMORY_KIB: u64 = 2 << 20;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// The exit code of a process that has no answer after that.
const HANGS: i32 = 9;
/// Where the process of a format keeps the seed that it tries, and what it counted.
const AT: &str = "at";
const COUNTS: &str = "counts";

/// A model whose tokens are bytes.
const TINY: &str = r#"{"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16,
  "n_positions": 32, "vocab_size": 256, "bos_token_id": null, "eos_token_id": null,
  "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
"#;

/// A file, and what is done with copies of it that are damaged. An answer is a word for it.
struct Subject {
    name: String,
    /// The file as it should be.
    valid: Vec<u8>,
    /// What becomes of it; the seed says which of several things is done.
    answer: Box<dyn Fn(&[u8], u64) -> String>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let text = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag)?;
        arguments.get(at + 1).cloned()
    };
    let number = |flag: &str, default| text(flag).and_then(|n| n.parse().ok()).unwrap_or(default);
    let (cases, first): (u64, u64) = (number("--cases", 10_000), number("--seed", 0));
    if let Some(name) = text("--child") {
        attempt_all(&name, first..first + cases);
        return ExitCode::SUCCESS;
    }
    let only = text("--only").unwrap_or_default();
    let scratch = Scratch::new("mutants");
    prepare(&scratch);
    let names: Vec<String> = subjects(&scratch.0).into_iter().map(|s| s.name).collect();
    let mut wrong = Vec::new();
    for name in names.iter().filter(|name| name.starts_with(&only)) {
        let start = Instant::now();
        let found = attempt_apart(&scratch.0, name, first..first + cases);
        let counts = fs::read_to_string(scratch.0.join(COUNTS)).unwrap_or_default();
        let seconds = start.elapsed().as_secs_f64();
        println!("{name:<28} {cases} copies, {} wrong, {seconds:.0} s: {counts}", found.len());
        wrong.extend(found);
    }
    println!("{} formats from seed {first}: {} wrong {wrong:?}", names.len(), wrong.len());
    if wrong.is_empty() {
        return ExitCode::SUCCESS;
    }
    // What is wrong is kept.
    std::mem::forget(scratch);
    ExitCode::FAILURE
}

/// Tries all copies of one format in processes: the next begins after the one that another ended
/// at. Returns what is wrong.
fn attempt_apart(folder: &Path, name: &str, seeds: std::ops::Range<u64>) -> Vec<String> {
    for file in [COUNTS, AT] {
        let _ = fs::remove_file(folder.join(file));
    }
    let mut wrong = Vec::new();
    let mut next = seeds.start;
    while next < seeds.end {
        let script = format!("ulimit -c 0; ulimit -v {MEMORY_KIB}; exec \"$0\" \"$@\"");
        let program = std::env::current_exe().expect("the program has a path");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).arg(program).current_dir(folder);
        command.args(["--child", name, "--seed", &next.to_string()]);
        command.args(["--cases", &(seeds.end - next).to_string()]);
        command.env("XDG_CACHE_HOME", folder.join("cache")).stdout(Stdio::null());
        let said = fs::File::create(folder.join("said")).expect("a file is made");
        let status = command.stderr(said).status().expect("the program starts");
        if status.success() {
            break;
        }
        let said = fs::read_to_string(folder.join("said")).unwrap_or_default();
        let at = fs::read_to_string(folder.join(AT)).unwrap_or_default();
        let Ok(at) = at.trim().parse::<u64>() else { panic!("{name}: none was tried: {said}") };
        let last =
            said.lines().rev().find(|line| line.contains("error") || line.contains("panicked"));
        println!("{name}: seed {at}: {status}: {}", last.unwrap_or_default());
        let kept = folder.join("wrong");
        fs::create_dir_all(&kept).expect("it is made");
        let subject = subjects(folder).into_iter().find(|subject| subject.name == name);
        let damaged = mutated(&subject.expect("it is known").valid, at);
        fs::write(kept.join(format!("{}-{at}", name.replace(' ', "-"))), damaged).expect("kept");
        wrong.push(format!("{name}: {at}"));
        next = at + 1;
    }
    wrong
}

/// Tries copies of one format in this process, which ends at the first that is wrong.
fn attempt_all(name: &str, seeds: std::ops::Range<u64>) {
    expect_panics_of_the_reader();
    let subject = subjects(Path::new(".")).into_iter().find(|subject| subject.name == name);
    let subject = subject.expect("it is known");
    // Of layouts some are told that they do not fit.
    let answer = (subject.answer)(&subject.valid, 0);
    let is_answered = ["read", "executed", "exit 0", "exit 3"].contains(&answer.as_str());
    assert!(is_answered, "{name}: the file itself: {answer}");
    let begun = Arc::new(AtomicU64::new(0));
    watch(Arc::clone(&begun));
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    // What the process before this one counted.
    let before = fs::read_to_string(COUNTS).unwrap_or_default();
    for pair in before.split(", ") {
        if let Some((word, count)) = pair.rsplit_once(' ') {
            counts.insert(word.to_owned(), count.parse().unwrap_or(0));
        }
    }
    let tell = |counts: &BTreeMap<String, u64>| {
        let pairs: Vec<String> = counts.iter().map(|(word, n)| format!("{word} {n}")).collect();
        fs::write(COUNTS, pairs.join(", ")).expect("it is written");
    };
    for seed in seeds {
        fs::write(AT, seed.to_string()).expect("it is written");
        begun.fetch_add(1, Ordering::SeqCst);
        let damaged = mutated(&subject.valid, seed);
        let attempt = || (subject.answer)(&damaged, seed);
        match catch_unwind(AssertUnwindSafe(attempt)) {
            Ok(answer) => *counts.entry(answer).or_default() += 1,
            Err(_) => {
                tell(&counts);
                std::process::exit(101);
            }
        }
    }
    tell(&counts);
}

/// Ends the process where one copy takes too long.
fn watch(begun: Arc<AtomicU64>) {
    thread::spawn(move || {
        let (mut last, mut since) = (0, Instant::now());
        loop {
            thread::sleep(Duration::from_millis(500));
            let now = begun.load(Ordering::SeqCst);
            if now != last {
                (last, since) = (now, Instant::now());
            } else if since.elapsed() > PATIENCE {
                std::process::exit(HANGS);
            }
        }
    });
}

/// Runs a line of the command line.
fn command(line: &str) -> String {
    let words = std::iter::once("gantline").chain(line.split(' '));
    let parsed = Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{line}: {error}"));
    let exit = run(&parsed.verb).unwrap_or_else(|failure| {
        // As users are told.
        assert!(!failure.message().contains("defect"), "{}", failure.message());
        failure.exit()
    });
    assert_ne!(exit, Exit::Bug, "{line}");
    format!("exit {}", exit.code())
}

/// Lines of the command line that read a file, each with how many copies are passed by for one.
fn of_lines(name: String, file: &Path, lines: Vec<(u64, String)>) -> Subject {
    let valid = fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    // The file itself is damaged and stays so until the process ends.
    let kept = PathBuf::from(format!("{}.whole", file.display()));
    let valid = fs::read(&kept).unwrap_or(valid);
    fs::write(&kept, &valid).expect("it is written");
    fs::write(file, &valid).expect("it is written");
    let file = file.to_owned();
    let answer = move |bytes: &[u8], seed: u64| {
        fs::write(&file, bytes).expect("it is written");
        let due = lines.iter().filter(|(every, _)| seed.is_multiple_of(*every));
        due.fold(String::new(), |_, (_, line)| command(line))
    };
    Subject { name, valid, answer: Box::new(answer) }
}

/// Files that the lines read.
fn prepare(scratch: &Scratch) {
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let copy = |from: &str, to: &str| {
        let to = scratch.0.join(to);
        fs::create_dir_all(to.parent().expect("it has one")).expect("it is made");
        fs::copy(reference.join(from), to).expect("it is copied");
    };
    copy("models/moe.graph", "moe.graph");
    for part in ["config.json", "model.safetensors"] {
        copy(&format!("reference/gpt2-tiny/{part}"), &format!("w/{part}"));
    }
    scratch.write("tiny/config.json", TINY);
    copy("reference/onnx/mlp.onnx", "mlp.onnx");
    copy("reference/onnx/blocks.onnx", "blocks.onnx");
    copy("reference/onnx/blocks.data", "blocks.data");
    copy("reference/onnx/mlp.x.npy", "x.npy");
    copy("calculon/winner-64.json", "calculon.json");
    copy("../planner/src/preset/h100.toml", "h100.toml");
    copy("../planner/tests/measured_runs.csv", "measured.csv");
    let table = fs::read_to_string(scratch.0.join("measured.csv")).expect("it is text");
    let rows: Vec<&str> = table.lines().take(6).collect();
    scratch.write("runs.csv", &rows.join("\n"));
    scratch.write("text/a.txt", &text());
    scratch.write("run.sh", formats::MEGATRON);
    scratch.write("ds.json", formats::DEEPSPEED);
    scratch.write("titan.toml", formats::TORCHTITAN);
    scratch.write("ours.toml", "tp = 2\npp = 2\ndp = 4\nmbs = 1\nzero = 1\n");
    scratch.write("tokenizer.json", formats::TOKENIZER);
    scratch.write("calibration.toml", formats::CALIBRATION);
    scratch.write(
        "mine.toml",
        "name = \"mine\"\nextends = \"preset:cpu-local\"\n\
        [device]\ncores = 2\nisa = \"portable\"\n[device.memory]\ncapacity = \"1 GiB\"\n",
    );
    let zeros = vec![0; 4 * 16];
    let ids = scratch.0.join("ids.npy");
    runtime::npy::write(&ids, ir::DType::I32, &[1, 16], &zeros).expect("it is written");
    let train = "train tiny --data text --from-scratch --ranks 2 --seq 16 --val-every 0";
    scratch.answer(&format!("{train} --steps 1 --gbs 2 --out run"));
    let plan = scratch.answer("plan tiny --ranks 2 --seq 16 --gbs 2 --plan");
    scratch.write("x.plan", &plan);
    let layout = scratch.answer("plan llama-3-8b --cluster h100 --devices 16 --gbs 64 --json");
    scratch.write("ours.json", &layout);
}

/// Lines of the command line that read a file: the name of a format, the file, of how many copies
/// one is given to the line, and the line.
const LINES: &str = "\
graph | moe.graph | 1 | inspect moe.graph
graph | moe.graph | 8 | inspect moe.graph --json
config.json | tiny/config.json | 1 | inspect tiny --seq 8
config.json | tiny/config.json | 4 | plan tiny --cluster h100 --devices 8 --gbs 8 --no-cache
config.json | tiny/config.json | 50 | plan tiny --ranks 1 --seq 8 --gbs 1 --no-cache
safetensors | w/model.safetensors | 1 | run w --input input_ids=ids.npy
npy | ids.npy | 1 | run w --input input_ids=ids.npy
plan | x.plan | 1 | train tiny --data text --from-scratch --ranks 2 --seq 16 --gbs 2 --dry-run \
--steps 1 --out d --plan x.plan
GPUs | h100.toml | 1 | cluster show h100.toml
GPUs | h100.toml | 4 | plan gpt2 --cluster h100.toml --devices 8 --gbs 8 --no-cache
CPUs | mine.toml | 1 | cluster show mine.toml
CPUs | mine.toml | 50 | plan tiny --cluster mine.toml --ranks 1 --seq 8 --gbs 1 --no-cache
calibration | calibration.toml | 20 | plan tiny --ranks 1 --seq 8 --gbs 1 --no-cache \
--calibration calibration.toml
onnx | mlp.onnx | 1 | inspect mlp.onnx --dim batch=3
onnx | mlp.onnx | 2 | run mlp.onnx --dim batch=3 --input x=x.npy
onnx blocks | blocks.onnx | 1 | inspect blocks.onnx --dim batch=2 --dim seq=3
tokenizer | tokenizer.json | 1 | generate run --tokenizer tokenizer.json --prompt ab \
--max-tokens 1 --seed 1
run.toml | run/run.toml | 1 | checkpoint verify run
run.toml | run/run.toml | 4 | generate run --prompt a --max-tokens 1 --seed 1
metrics | run/metrics.jsonl | 1 | checkpoint verify run
manifest | run/checkpoints/step-1/manifest.json | 1 | checkpoint verify run
manifest | run/checkpoints/step-1/manifest.json | 4 | generate run --prompt a --max-tokens 1
table | runs.csv | 1 | validate runs.csv --json
Megatron-LM | run.sh | 1 | score llama-3-8b --cluster h100 --devices 16 --from run.sh
DeepSpeed | ds.json | 1 | score llama-3-8b --cluster h100 --devices 16 --from ds.json
Calculon | calculon.json | 1 | score gpt3-175b --cluster a100 --devices 64 --from calculon.json
torchtitan | titan.toml | 1 | score llama-3-8b --cluster h100 --devices 16 --from titan.toml
our plan | ours.json | 1 | score llama-3-8b --cluster h100 --devices 16 --from ours.json
our layout | ours.toml | 1 | \
score llama-3-8b --cluster h100 --devices 16 --gbs 64 --from ours.toml";

/// Everything that is tried; files are below a directory.
fn subjects(folder: &Path) -> Vec<Subject> {
    let read = folder.join("read");
    fs::create_dir_all(&read).expect("it is made");
    // One cluster of GPUs stands for all.
    let is_other = |name: &str| {
        let is_preset = PRESETS.iter().any(|(preset, _)| *preset == name);
        is_preset && !matches!(name, "h100" | "cpu-local")
    };
    let formats = formats(&read).into_iter().filter(|format| !is_other(format.name));
    let mut all: Vec<Subject> = formats.map(of_format).collect();
    all.extend(executed());
    let mut lines: Vec<(String, &str, Vec<(u64, String)>)> = Vec::new();
    for row in LINES.lines() {
        let cells: Vec<&str> = row.split(" | ").collect();
        let [name, file, every, line] = cells[..] else { panic!("four cells: {row}") };
        let name = format!("line: {name}");
        let of_line = (every.parse().expect("a number"), line.to_owned());
        match lines.last_mut().filter(|(last, ..)| *last == name) {
            Some((_, _, lines)) => lines.push(of_line),
            None => lines.push((name, file, vec![of_line])),
        }
    }
    let of_row = |(name, file, lines)| of_lines(name, &folder.join::<&str>(file), lines);
    all.extend(lines.into_iter().map(of_row));
    all
}

fn of_format(format: Format) -> Subject {
    let Format { name, valid, read } = format;
    let answer = move |bytes: &[u8], _| match read(bytes) {
        Ok(()) => "read".to_owned(),
        Err(_) => "refused".to_owned(),
    };
    Subject { name: name.to_owned(), valid, answer: Box::new(answer) }
}

/// Artefacts whose hashes are right: what is accepted is executed.
fn executed() -> [Subject; 3] {
    let whole = contents();
    let artefact = encode(&whole).expect("it is encoded");
    let parts = formats::unpacked(&artefact);
    let member = |name: &'static str, shown: &str| {
        let (valid, parts) = (parts[name].clone(), parts.clone());
        let answer = move |bytes: &[u8], _| execute(&forged(&parts, name, bytes));
        Subject { name: format!("executed: {shown}"), valid, answer: Box::new(answer) }
    };
    let valid = serde_json::to_vec(&whole.programs).expect("programs are numbers and texts");
    let answer = move |bytes: &[u8], _| match with_programs(&whole, bytes) {
        Ok(artefact) => execute(&artefact),
        Err(_) => "refused".to_owned(),
    };
    let name = "executed: fields".to_owned();
    [
        member("kernels.postcard", "kernels"),
        member("programs.postcard", "programs"),
        Subject { name, valid, answer: Box::new(answer) },
    ]
}

/// Reads an artefact as a command does, and runs a step of what is accepted. None may panic or
/// wait for ever.
fn execute(artefact: &[u8]) -> String {
    let Ok(contents) = decode("x.gtl", artefact, &Limits::default()) else {
        return "refused".to_owned();
    };
    if gantline::artefact::check(&contents).is_err() {
        return "refused by its replay".to_owned();
    }
    let flops: f64 = contents.kernels.iter().map(|k| kernels::price::flops(k).0 as f64).sum();
    // As E5020 and whoever waits for it would.
    if flops > 1e9 || contents.arena_bytes() > 256 << 20 {
        return "too large".to_owned();
    }
    match step(contents) {
        Ok(()) => "executed".to_owned(),
        Err(failure) => {
            let text = failure.to_string();
            assert!(!text.contains("panicked"), "{text}");
            assert!(!text.contains("waited"), "{text}");
            "failed".to_owned()
        }
    }
}

fn step(contents: Contents) -> Result<(), runtime::Failure> {
    let deadline = Duration::from_secs(5);
    let options = Options { threads_per_rank: 1, deadline, tracing: Tracing::None, disk: None };
    let classes = Arc::new(contents.into_classes("loss"));
    let samples = classes.samples(Phase::Step);
    let tokens = vec![1; samples.map_or(0, |s| s.global() * s.seq).min(1 << 20)];
    let batch = Batch { tokens: &tokens, labels: &tokens, ..Batch::default() };
    let mut session = Session::start(classes, &options)?;
    session.step(&batch, Scalars::default()).map(drop)
}
