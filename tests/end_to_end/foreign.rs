//! Layouts in the files of other tools, and in our own: what is wrong is told where it stands, and
//! what is not read is named.

use crate::cli::Scratch;

/// A script of Megatron-LM for sixteen devices.
const SCRIPT: &str = "#!/bin/bash
PARALLEL=(
  --tensor-model-parallel-size 8
  --sequence-parallel
)
TRAIN=(
  --micro-batch-size 1 --global-batch-size 64 --seq-length 2048
  --recompute-granularity selective --use-distributed-optimizer
  --lr 1e-4 --overlap-grad-reduce --moe-permute-fusion
)
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py ${PARALLEL[@]} ${TRAIN[@]}
";

/// Each line ends with its exit code and says all that is given.
#[test]
fn wrong_values_are_told_where_they_stand() {
    let scratch = Scratch::new("foreign");
    let wrong = SCRIPT.replace("selective", "selektive").replace("nnodes 2", "nnodes two");
    scratch.write("wrong.sh", &wrong);
    scratch.write(
        "ds.json",
        "{\n  \"train_batch_size\": 60,\n  \"train_micro_batch_size_per_gpu\": 2,\n  \
         \"gradient_accumulation_steps\": 4,\n  \"zero_optimization\": {\"stage\": 3,\n    \
         \"offload_optimizer\": {\"device\": \"cpuu\"}}\n}\n",
    );
    scratch.write(
        "titan.toml",
        "[training]\nlocal_batch_size = 8\nseq_len = 2048\n[parallelism]\n\
         pipeline_parallel_degree = 2\npipeline_parallel_schedule = \"1F1\"\n",
    );
    scratch.write("ours.toml", "tp = 2\ntq = 3\npp = \"x\"\ngbs = 0\n");
    scratch.write("broken.toml", "tp = 2\npp =\n");
    for (line, code, said) in [
        (
            "--from wrong.sh",
            6,
            &["wrong.sh:8:27", "did you mean `selective`?", "wrong.sh:11:38", "`two`"][..],
        ),
        (
            "--from ds.json --devices 8",
            6,
            &["ds.json:2:23", "micro-batch 2 × accumulation 4 × 8", "ds.json:6:37", "`cpu`?"],
        ),
        ("--from titan.toml --devices 8", 6, &["titan.toml:6:30", "did you mean `1F1B`?"]),
        (
            "--from ours.toml",
            6,
            &["ours.toml:2:1", "did you mean `tp`?", "ours.toml:3:6", "ours.toml:4:7", "1 or more"],
        ),
        ("--from broken.toml", 6, &["broken.toml:2:"]),
        ("--config recompute=ful --gbs 8", 2, &["did you mean `recompute=full`?"]),
        ("--gbs 7 --tp 3 --cp 5 --dp 2", 2, &["divide 32", "equal pieces", "7 samples over dp=2"]),
    ] {
        let output = scratch.run(&format!("score llama-3-8b {line}"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
        for said in said {
            assert!(errors.contains(said), "{line}: {said}: {errors}");
        }
    }
}

/// What is read counts, and what is not and might is named on the page.
#[test]
fn what_is_not_read_is_named() {
    let scratch = Scratch::new("not-read");
    scratch.write("run.sh", SCRIPT);
    let page = scratch.answer("score llama-3-8b --from run.sh");
    assert!(page.contains("tp=8 pp=1 dp=2 mbs=1 sp zero=1 recompute=attention"), "{page}");
    assert!(page.contains("not read: --moe-permute-fusion\n"), "{page}");
    let told = scratch.json("score llama-3-8b --from run.sh --json");
    let left_out: Vec<_> = told["left_out"].as_array().into_iter().flatten().collect();
    assert_eq!(left_out, ["--lr", "--moe-permute-fusion"]);
}

/// A script is priced as the tool that runs it executes, with the overlap that its flags ask for,
/// and refused where it trains another model.
#[test]
fn scripts_are_priced_as_their_tool_executes_them() {
    let scratch = Scratch::new("tool-profile");
    scratch.write("run.sh", SCRIPT);
    scratch.write("late.sh", &SCRIPT.replace("--overlap-grad-reduce", ""));
    scratch.write(
        "gathered.sh",
        &SCRIPT.replace("reduce --moe", "reduce --overlap-param-gather --moe"),
    );
    let line = |rest: &str| format!("score llama-3-8b --cluster h100 --from {rest} --json");
    let step_s = |rest: &str| scratch.json(&line(rest))["step_time_s"].as_f64().expect("a number");
    assert!(step_s("late.sh") > step_s("run.sh"), "reductions at the end take longer");
    assert!(step_s("run.sh") > step_s("gathered.sh"), "gathers beside the forward pass are hidden");
    let [own, asked] =
        ["run.sh", "run.sh --profile gantline"].map(|rest| scratch.json(&line(rest)));
    assert_eq!(asked["style"], "gantline");
    assert_ne!(own["style"], asked["style"]);
    assert_ne!(own["step_time_s"], asked["step_time_s"]);
    scratch.write("deep.sh", &SCRIPT.replace("--lr 1e-4", "--num-layers 40"));
    let refused = scratch.run("score llama-3-8b --from deep.sh");
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(6), "{errors}");
    assert!(errors.contains("of 40 layers, and MODEL has 32"), "{errors}");
}

/// What transformers leaves to its own arguments is taken from flags, which is said.
#[test]
fn what_is_automatic_is_taken_from_flags() {
    let scratch = Scratch::new("automatic");
    let auto = "{\"train_batch_size\": \"auto\", \"train_micro_batch_size_per_gpu\": \"auto\",\
                \"gradient_accumulation_steps\": \"auto\", \"bf16\": {\"enabled\": \"auto\"},\
                \"zero_optimization\": {\"stage\": 3, \"reduce_bucket_size\": \"auto\"}}";
    scratch.write("auto.json", auto);
    let line = "score llama-3-8b --profile gantline --seq 2048 --from auto.json --devices 8";
    let page = scratch.answer(&format!("{line} --gbs 64 --mbs 2"));
    assert!(page.contains("tp=1 pp=1 dp=8 mbs=2 zero=3"), "{page}");
    for said in ["`train_batch_size` is `auto`: `--gbs 64` is taken", "`--mbs 2` is taken"] {
        assert!(page.contains(said), "{page}");
    }
    for (flags, said) in [("", "--gbs N"), (" --gbs 64", "--mbs N"), (" --mbs 2", "--gbs N")] {
        let output = scratch.run(&format!("{line}{flags}"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags}: {errors}");
        assert!(errors.contains(said), "{flags}: {errors}");
    }
}

/// A layout with many stages is a short line, and is read back from it.
#[test]
fn many_stages_are_folded() {
    let scratch = Scratch::new("folded");
    let scored = |stages: &str| {
        let mut command = scratch.command(&[], "score gpt3-175b --cluster a100 --gbs 64 --json");
        let layout = format!("tp=8 pp=64 mbs=1 zero=1 stages={stages}");
        let output = command.args(["--config", &layout]).output().expect("it starts");
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("a document")
    };
    let long = ["1"; 32].iter().chain(&["2"; 32]).copied().collect::<Vec<_>>().join(".");
    let told = scored(&long);
    let text = told["configuration"].as_str().expect("a layout");
    assert!(text.ends_with("stages=1x32.2x32"), "{text}");
    assert_eq!(scored("1x32.2x32")["step_time_s"], told["step_time_s"]);
}
