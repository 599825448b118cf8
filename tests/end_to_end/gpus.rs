//! Plans for GPUs, trained on them: on a driver that executes the text of kernels on the CPU,
//! behind the functions of CUDA and of NVRTC that the program opens at run time.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use kernels::cuda::{device_prelude, host_prelude, host_source};
use serde_json::Value;

use crate::processes;
use crate::scratch::{Scratch, text};
use crate::shim::{Prelude, compiler, options, run};

/// The driver's sources.
const SOURCES: [&str; 2] = [
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/end_to_end/gpus/driver.cpp"),
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/end_to_end/gpus/nccl.cpp"),
];
/// The names that its library is opened by.
const LIBRARIES: [&str; 3] = ["libcuda.so", "libnvrtc.so", "libnccl.so"];

/// A tiny Llama with grouped queries.
const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 257, "max_position_embeddings": 128,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2}"#;

/// A tiny Mixtral.
const EXPERTS: &str = r#"{"model_type": "mixtral", "vocab_size": 256, "hidden_size": 32,
    "max_position_embeddings": 64, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2}"#;
/// Decisions of a pipeline.
const PIPELINED: &str = "--seq 32 --gbs 16 --fix pp=2 --fix dp=2 --fix schedule=gpipe";
/// Decisions that tests share, so that their kernels are compiled once.
const TENSOR: &str = "--seq 33 --gbs 8 --fix tp=2 --fix dp=2 --fix sp=1 --fix zero=1 --fix mbs=4";
/// The same, of what ranks hold shards of.
const SHARDED: &str = "--seq 32 --gbs 4 --fix dp=2 --fix zero=3 --fix mbs=2";

/// Where machine code is kept that tests share: by the prelude behind which it was compiled.
fn cache() -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (host_prelude(), host_source()).hash(&mut hasher);
    let all = Path::new(env!("CARGO_TARGET_TMPDIR")).join("driver-cache");
    let own = format!("{:016x}", hasher.finish());
    for other in std::fs::read_dir(&all).into_iter().flatten().flatten() {
        if other.file_name() != *own {
            let _ = std::fs::remove_dir_all(other.path());
        }
    }
    all.join(own)
}

/// The folder with the driver's libraries; none where this machine has no compiler.
#[allow(clippy::print_stdout)]
fn driver() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let compiler = compiler()?;
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("driver");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("the folder for tests can be written");
        let options = options();
        let prelude = Prelude::new(&compiler, &options, "");
        let mut command = Command::new(&compiler);
        command.arg(format!("-DOPTIONS=\"{}\"", options.join(" ")));
        command.args(["-std=c++17", "-O1", "-Wall", "-fPIC", "-shared", "-o"]);
        command.arg(folder.join(LIBRARIES[0])).args(SOURCES).arg("-ldl");
        command.arg(format!("-DCOMPILER=\"{}\"", compiler.display()));
        let device = folder.join("DEVICE.h");
        std::fs::write(&device, device_prelude()).expect("the folder for tests can be written");
        let files = [("DEVICE_PRELUDE", device), ("HOST_PRELUDE", prelude.header)];
        for (name, path) in files.into_iter().chain([("HOST_OBJECT", prelude.object)]) {
            command.arg(format!("-D{name}=\"{}\"", path.display()));
        }
        run(&mut command);
        for name in &LIBRARIES[1..] {
            // Links to one file are one library when they are opened.
            let linked = std::os::unix::fs::symlink(LIBRARIES[0], folder.join(name));
            linked.expect("links are made");
        }
        Some(folder)
    };
    let built = BUILT.get_or_init(build).as_deref();
    if built.is_none() {
        println!("skipped: no C++ compiler");
    }
    built
}

/// A directory from which commands see GPUs.
struct Machine {
    scratch: Scratch,
    driver: &'static Path,
    cache: PathBuf,
}

impl Machine {
    fn new(name: &str) -> Option<Machine> {
        let driver = driver()?;
        let scratch = Scratch::new(name);
        scratch.write("tiny/config.json", CONFIG);
        scratch.write("experts/config.json", EXPERTS);
        scratch.write("text.txt", &text());
        Some(Machine { scratch, driver, cache: cache() })
    }

    /// What a command does where the environment says more.
    fn run_with(&self, line: &str, environment: &[(&str, &str)]) -> Output {
        self.command(line).envs(environment.iter().copied()).output().expect("the program starts")
    }

    /// A command, where there are four GPUs.
    fn command(&self, line: &str) -> Command {
        let mut command = self.scratch.command(&[], line);
        command.env("LD_LIBRARY_PATH", self.driver).env("GANTLINE_NVRTC", self.driver);
        command.env("XDG_CACHE_HOME", &self.cache).env("FAKE_GPUS", "4");
        command
    }

    /// What each step of a training reports that must succeed.
    fn train(&self, line: &str, out: &str, capability: &str) -> Vec<Value> {
        let line = format!("train {line}");
        let output = self.run_with(&line, &[("FAKE_CAPABILITY", capability)]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "gantline {line}\n{errors}");
        self.steps(out)
    }

    /// What each step of a run reports.
    fn steps(&self, out: &str) -> Vec<Value> {
        let steps = std::fs::read_to_string(self.scratch.0.join(out).join("metrics.jsonl"));
        let steps = steps.expect("a run has metrics");
        let read = |line: &str| serde_json::from_str(line).expect("a line is a document");
        steps.lines().map(read).collect()
    }
}

/// The largest relative difference of what steps report, which are as many.
fn difference(ours: &[Value], theirs: &[Value]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let of = |(ours, theirs): (&Value, &Value)| {
        ["loss", "grad_norm", "validation_loss"].map(|key| {
            let [ours, theirs] = [ours, theirs].map(|step| step[key].as_f64().unwrap_or(0.0));
            (ours - theirs).abs() / theirs.abs().max(1e-9)
        })
    };
    ours.iter().zip(theirs).flat_map(of).fold(0.0, f64::max)
}

/// A plan for GPUs is carried out by them, whatever it decides, and trains as on CPU ranks.
#[test]
fn plans_for_gpus_train_as_on_cpus() {
    let Some(machine) = Machine::new("gpus-train") else { return };
    let offloaded = "--fix offload-optimizer=host --fix offload-activations=host";
    let cases = [
        ("a100", "8.0", 1, "--seq 32 --gbs 4 --dtype f32".to_owned(), 2e-5),
        ("h100", "9.0", 4, TENSOR.to_owned(), 2e-3),
        ("h100", "9.0", 4, format!("{PIPELINED} --fix zero=1 --fix mbs=1"), 2e-3),
        ("h100", "9.0", 2, format!("{SHARDED} {offloaded}"), 2e-3),
    ];
    for (at, (cluster, capability, ranks, decisions, tolerance)) in cases.into_iter().enumerate() {
        let asked = format!("plan tiny --cluster {cluster} --devices {ranks} {decisions}");
        machine.scratch.answer(&format!("{asked} -o {at}.plan"));
        let run = |cluster: &str, out: &str| {
            let steps = "--from-scratch --data text.txt --steps 3 --val-every 2 --val-batches 1";
            let line = format!("tiny --cluster {cluster} --plan {at}.plan {steps} --out {out}");
            machine.train(&line, out, capability)
        };
        let on_gpus = run(cluster, &format!("gpus-{at}"));
        let on_cpus = run("cpu-local", &format!("cpus-{at}"));
        let found = difference(&on_gpus, &on_cpus);
        assert!(found <= tolerance, "{asked}: {found:e}\n{on_gpus:#?}\n{on_cpus:#?}");
        assert!(on_gpus.iter().any(|step| step["validation_loss"].is_number()), "{on_gpus:#?}");
    }
}

/// A run for GPUs searches for its plan there, and goes on bit for bit.
#[test]
fn runs_on_gpus_go_on_bit_for_bit() {
    let Some(machine) = Machine::new("gpus-resume") else { return };
    let common = format!(
        "tiny --from-scratch --cluster h100 --ranks 2 --data text.txt --val-every 0 {SHARDED}"
    );
    let whole = machine.train(&format!("{common} --steps 4 --out whole"), "whole", "9.0");
    machine.train(&format!("{common} --steps 2 --out parts"), "parts", "9.0");
    let parts = machine.train("--resume parts --steps 4", "parts", "9.0");
    assert_eq!(difference(&whole, &parts), 0.0, "{whole:#?}\n{parts:#?}");
    let plan = std::fs::read_to_string(machine.scratch.0.join("whole/run.plan"));
    let plan = plan.expect("a run has a plan");
    assert!(plan.contains("of h100\n") && plan.contains("target sm_90a"), "{plan}");
}

/// GPUs exchange by NCCL what they would else exchange through the host's memory, to the same bits
/// where NCCL adds in the order of ranks: also pieces that are not alike, such as are strided, and
/// what experts exchange.
#[test]
fn gpus_exchange_by_nccl() {
    let Some(machine) = Machine::new("gpus-nccl") else { return };
    let alone = machine.scratch.0.join("alone");
    std::fs::create_dir_all(&alone).expect("the folder is made");
    for name in &LIBRARIES[..2] {
        let linked = std::os::unix::fs::symlink(machine.driver.join(name), alone.join(name));
        linked.expect("links are made");
    }
    let alone = alone.display().to_string();
    for (at, (ranks, decisions, calls)) in [
        (4, format!("tiny {TENSOR}"), 4),
        (2, "tiny --gbs 2 --seq 128 --fix cp=2 --fix mbs=2".to_owned(), 2),
        (2, "experts --gbs 4 --seq 32 --fix dp=2 --fix ep=2".to_owned(), 2),
    ]
    .into_iter()
    .enumerate()
    {
        let steps = |out: &str, environment: &[(&str, &str)]| {
            let asked = format!(
                "train {decisions} --from-scratch --cluster h100 --ranks {ranks} \
                 --data text.txt --steps 2 --val-every 0 --out {out}"
            );
            let output = machine.run_with(&asked, environment);
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "gantline {asked}\n{errors}");
            (machine.steps(out), errors)
        };
        let (connected, told) = steps(&format!("nccl-{at}"), &[("FAKE_TELLS", "1")]);
        let ends =
            told.lines().filter(|line| line.starts_with("nccl: ") && *line != "nccl: 0 calls");
        assert!(ends.count() >= calls, "{decisions}: {told}");
        assert!(!told.contains("through the host's memory"), "{told}");
        let (staged, told) = steps(&format!("host-{at}"), &[("LD_LIBRARY_PATH", &alone)]);
        assert!(told.contains("through the host's memory"), "{told}");
        assert_eq!(difference(&connected, &staged), 0.0, "{decisions}");
    }
}

/// GPUs of several machines train as those of one do: to the same bits, by NCCL, which here meets
/// in files; messages of a pipeline, and what NCCL does not have, travel between the processes.
#[test]
fn gpus_of_several_machines_train_as_those_of_one() {
    let Some(machine) = Machine::new("gpus-apart") else { return };
    std::fs::create_dir_all(machine.scratch.0.join("meetings")).expect("the folder is made");
    let meetings = machine.scratch.0.join("meetings").display().to_string();
    for (at, decisions) in [
        format!("tiny {TENSOR}"),
        "tiny --seq 32 --gbs 16 --fix pp=2 --fix dp=2 --fix zero=1 --fix mbs=1".to_owned(),
        "experts --gbs 4 --seq 32 --fix dp=2 --fix ep=2".to_owned(),
    ]
    .iter()
    .enumerate()
    {
        let ranks = if at == 2 { 2 } else { 4 };
        let asked = |out: &str| {
            format!(
                "train {decisions} --from-scratch --cluster h100 --ranks {ranks} \
                 --data text.txt --steps 2 --val-every 1 --val-batches 1 --out {out}"
            )
        };
        let (one, apart) = (format!("one-{at}"), format!("apart-{at}"));
        let output = machine.run_with(&asked(&one), &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let own = (ranks / 2).to_string();
        let environment =
            [("FAKE_GPUS", own.as_str()), ("FAKE_MEETINGS", &meetings), ("FAKE_TELLS", "1")];
        let outputs = processes::start(2, |_| {
            let mut command = machine.command(&asked(&apart));
            command.envs(environment);
            command
        });
        for (output, errors) in processes::wait(outputs) {
            assert!(output.success(), "{decisions}\n{errors}");
            let calls = |line: &&str| line.starts_with("nccl: ") && *line != "nccl: 0 calls";
            assert!(errors.lines().any(|line| calls(&line)), "{decisions}\n{errors}");
        }
        let both = [one, apart].map(|out| machine.steps(&out));
        assert_eq!(difference(&both[0], &both[1]), 0.0, "{decisions}");
    }
}

/// Requests are continued on GPUs as on CPUs, under a plan that was searched for them, too; the
/// programs of a file for GPUs compute what those for CPUs do.
#[test]
fn gpus_infer_as_cpus() {
    let Some(machine) = Machine::new("gpus-infer") else { return };
    let answer = |line: &str| {
        let output = machine.run_with(line, &[("FAKE_CAPABILITY", "8.0")]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "gantline {line}\n{errors}");
        String::from_utf8(output.stdout).expect("answers are UTF-8")
    };
    let steps = "--data text.txt --gbs 8 --seq 32 --steps 20 --val-every 0 --out run";
    answer(&format!("train tiny --from-scratch {steps}"));
    machine.scratch.write("prompts.jsonl", "\"line 7\"\n\"no more\"\n\"says 4\"\n");
    let asked = "generate run --prompts prompts.jsonl --max-tokens 6 --temperature 0";
    let plan = "plan tiny --for inference --cluster a100 --dtype f32 --devices 4 --fix tp=2 \
                --input-len 8 --output-len 8 --gbs 4";
    answer(&format!("{plan} -o run.plan"));
    let text = std::fs::read_to_string(machine.scratch.0.join("run.plan"));
    let text = text.expect("the plan is written");
    assert!(text.contains("on [pp=1, dp=2, tp=2] of a100\n  target sm_80\n"), "{text}");
    assert!(text.contains("predict tokens_per_s "), "{text}");
    let on_cpus = answer(&format!("{asked} --slots 2"));
    assert_eq!(answer(&format!("{asked} --slots 2 --dp 2 --tp 2 --cluster a100")), on_cpus);
    assert_eq!(answer(&format!("{asked} --plan run.plan --cluster a100")), on_cpus);
    // On the second of its architectures, whose workspaces are larger than those of the first.
    let common = "compile tiny --ranks 2 --gbs 4 --seq 32 --dtype bf16";
    answer(&format!("{common} --arch sm_80,sm_90a -o gpus.gtl"));
    answer(&format!("{common} -o cpus.gtl"));
    let loss = |file: &str| -> f64 {
        let line = format!("run {file} --weights run --json");
        let output = machine.run_with(&line, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let told: Value = serde_json::from_slice(&output.stdout).expect("one document");
        told["loss"].as_f64().unwrap_or_else(|| panic!("a loss: {told:#}"))
    };
    let [ours, theirs] = ["gpus.gtl", "cpus.gtl"].map(loss);
    assert!((ours - theirs).abs() <= 2e-3 * theirs, "{ours} and {theirs}");
}

/// GPUs are seen, and what is seen is a cluster to train on.
#[test]
fn gpus_are_seen() {
    let Some(machine) = Machine::new("gpus-seen") else { return };
    let memory = ("FAKE_BYTES", "85520809984");
    let named = [("FAKE_NAME", "NVIDIA H100 80GB HBM3"), ("FAKE_GPUS", "2"), memory];
    let answer = |line: &str| {
        let output = machine.run_with(line, &named);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("answers are UTF-8")
    };
    let page = answer("doctor");
    assert!(page.contains("of one machine and on its GPUs\n"), "{page}");
    assert!(page.contains("gpu 1    NVIDIA H100 80GB HBM3, 79.65 GiB: kernels for sm_90a\n"));
    assert!(page.contains("  found    NCCL: "), "{page}");
    let told: Value = serde_json::from_str(&answer("doctor --json")).expect("one document");
    assert_eq!(told["executes_on"], serde_json::json!(["cpu", "cuda"]));
    answer("cluster detect -o here.toml");
    let steps = "--from-scratch --data text.txt --steps 1 --val-every 0 --ranks 2";
    let told = answer(&format!("train tiny {steps} --cluster here.toml {SHARDED} --out run"));
    assert!(told.contains("steps       1 in "), "{told}");
}

/// What is lacking is told, with what there is.
#[test]
fn what_gpus_lack_is_told() {
    let Some(machine) = Machine::new("gpus-lacking") else { return };
    let asked = format!(
        "train tiny --from-scratch --cluster h100 --ranks 2 --steps 1 --data text.txt \
         --out run {SHARDED}"
    );
    for (variable, value, says) in [
        ("FAKE_GPUS", "1", "the plan is for 2 GPUs, and this machine has 1 GPU"),
        ("FAKE_GPUS", "0", "the driver sees no GPU"),
        ("FAKE_CAPABILITY", "8.0", "the plan is for sm_90a, and GPU 0 (a fake GPU) is sm_80"),
        ("FAKE_CAPABILITY", "7.0", "an architecture for which no kernels are written"),
        ("FAKE_BYTES", "300000", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("GANTLINE_NVRTC", "nowhere", "no compiler of CUDA C++"),
        ("LD_LIBRARY_PATH", "nowhere", "there is no `libcuda.so`"),
    ] {
        let output = machine.run_with(&asked, &[(variable, value)]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(7), "{variable}={value}: {errors}");
        assert!(errors.contains(says), "{variable}={value}: {errors}");
        let _ = std::fs::remove_dir_all(machine.scratch.0.join("run"));
    }
    let plan = format!("plan tiny --cluster h100 --devices 2 {SHARDED} -o sharded.plan");
    machine.scratch.answer(&plan);
    let line = "train tiny --from-scratch --cluster h100 --plan sharded.plan --data text.txt \
                --steps 1 --document-mask --eod-token 10 --out run";
    let output = machine.run_with(line, &[]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("E5006") && errors.contains("of one document each"), "{errors}");
    let _ = std::fs::remove_dir_all(machine.scratch.0.join("run"));
    // Weights that are not finite any more are looked for in the memory of GPUs.
    let line = asked.replace("--steps 1", "--steps 3") + " --lr 1e30 --warmup 0";
    let output = machine.run_with(&line, &[]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("not finite"), "{errors}");
    assert!(errors.contains("on rank ") && errors.contains("(launch "), "{errors}");
}
