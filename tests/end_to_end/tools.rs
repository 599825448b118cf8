//! Plans for other tools: what is found is written in the tool's files, and these are read as the
//! same plan at the same price.

use planner::configuration::Configuration;
use serde_json::Value;

use crate::scratch::Scratch;

/// The files of a plan say all of it: `score` reads the layout and the executor from them.
#[test]
fn plans_for_tools_are_scored_from_their_files() {
    let scratch = Scratch::new("for-tools");
    for (model, cluster, devices, gbs, tool) in [
        ("llama-3-70b", "h100", 64, 128, "megatron"),
        ("llama-3-8b", "h100", 8, 64, "megatron"),
        ("gpt3-175b", "a100", 256, 512, "megatron"),
        ("gpt2-xl", "h200", 8, 64, "megatron"),
        ("mixtral-8x7b", "h100", 64, 256, "megatron"),
        ("deepseek-v3", "h100", 512, 1024, "megatron"),
        ("qwen3-30b-a3b", "h100", 64, 256, "megatron"),
        ("qwen3-30b-a3b", "h100", 64, 256, "torchtitan"),
        ("llama-3-8b", "h100", 16, 64, "torchtitan"),
        ("llama-3-70b", "h100", 128, 256, "torchtitan"),
        ("llama-3-8b", "h100", 16, 64, "deepspeed"),
        ("llama-3-70b", "h100", 64, 128, "deepspeed"),
        ("gpt2-xl", "a100", 8, 64, "deepspeed"),
    ] {
        let at = format!("{model} --cluster {cluster}");
        let seq = if model.starts_with("gpt") { 1024 } else { 4096 };
        let asked = format!("{at} --devices {devices} --gbs {gbs} --seq {seq}");
        let found = scratch.json(&format!("plan {asked} --for-tool {tool} --json -o dir"));
        let read = scratch.json(&format!("score {at} --from dir/run.sh --json"));
        assert_eq!(found["text"], read["configuration"], "{asked} {tool}");
        assert_eq!(found["executor"]["profile"], read["style"], "{asked} {tool}");
        let seconds = |answer: &serde_json::Value| answer["step_time_s"].as_f64().unwrap();
        let off = seconds(&read) / seconds(&found) - 1.0;
        assert!(off.abs() < 1e-9, "{asked} {tool}: {off}\n{}", found["text"]);
        let read_at_all = read["left_out"].as_array().is_some();
        assert!(read_at_all && found["executor"]["for_tool"]["measured"].is_string(), "{asked}");
    }
}

/// The model and the cluster of the plans whose files are changed.
const CHANGED: &str = "llama-3-8b --cluster h100";

/// Files of a plan of each tool, and copies with one thing changed.
struct Files(Scratch);

impl Files {
    fn new(name: &str) -> Files {
        let scratch = Scratch::new(name);
        for tool in ["megatron", "deepspeed", "torchtitan"] {
            let asked = "--devices 16 --gbs 64 --seq 8192";
            // Tensor parallelism and recomputation are there to be changed.
            let fixed = if tool == "deepspeed" { "" } else { " --fix tp=2,sp=1,recompute=full" };
            scratch.answer(&format!("plan {CHANGED} {asked} --for-tool {tool} -o {tool}{fixed}"));
        }
        Files(scratch)
    }

    /// Writes the files of a tool to `changed`, one of them with other texts.
    fn change(&self, tool: &str, file: &str, changes: &[(&str, &str)]) {
        let _ = std::fs::remove_dir_all(self.0.0.join("changed"));
        std::fs::create_dir(self.0.0.join("changed")).expect("a directory");
        for entry in std::fs::read_dir(self.0.0.join(tool)).expect("it was written").flatten() {
            let mut text = std::fs::read_to_string(entry.path()).expect("text");
            for (from, to) in changes.iter().filter(|_| entry.file_name() == file) {
                assert!(text.contains(from), "{file}: {from}\n{text}");
                text = text.replacen(from, to, 1);
            }
            self.0.write(&format!("changed/{}", entry.file_name().to_string_lossy()), &text);
        }
    }

    fn score(&self, from: &str) -> std::process::Output {
        self.0.run(&format!("score {CHANGED} --from {from}/run.sh --json"))
    }

    fn seconds(&self, from: &str) -> f64 {
        // A changed plan need not fit.
        let output = self.score(from);
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        answer["step_time_s"].as_f64().expect("seconds")
    }
}

/// A file with something changed on which the step depends takes longer.
#[test]
fn changed_files_of_tools_are_priced() {
    let files = Files::new("for-tools-changed");
    let unfused = ("--swiglu", "--swiglu --attention-backend unfused");
    let serial =
        [("--overlap-grad-reduce", "--log-progress"), ("--overlap-param-gather", "--log-progress")];
    let late = ("\"overlap_comm\": true", "\"overlap_comm\": false");
    for (tool, file, changes) in [
        ("megatron", "run.sh", &[unfused][..]),
        ("megatron", "run.sh", &serial),
        ("deepspeed", "ds_config.json", &[late]),
        ("torchtitan", "train.toml", &[("enable = true", "enable = false")]),
    ] {
        files.change(tool, file, changes);
        let [whole, other] = [tool, "changed"].map(|from| files.seconds(from));
        assert!(other > 1.0001 * whole, "{tool}: {changes:?}: {whole} s, then {other} s");
    }
    // What is written twice is named, and the last counts, as for argparse.
    files.change("megatron", "run.sh", &[("--seq-length", "--seq-length 4096 --seq-length")]);
    let page = files.0.answer(&format!("score {CHANGED} --from changed/run.sh"));
    assert!(page.contains("`--seq-length` is `4096` and then `8192`"), "{page}");
}

/// Files for other models, with flags at which the tool stops, or of another tool are refused.
#[test]
fn files_that_do_not_start_are_refused() {
    let files = Files::new("for-tools-wrong");
    let none = "--log-progress";
    let fp16 = ("\"bf16\"", "\"fp16\": {\"enabled\": true}, \"bf16\"");
    let micro = ("--per_device_train_batch_size ", "--per_device_train_batch_size 1");
    let untied = ("--untie-embeddings-and-output-weights", none);
    let overlap = ("--overlap-grad-reduce", none);
    for (tool, file, change, said) in [
        ("megatron", "run.sh", ("--kv-channels 128", "--kv-channels 64"), "`--kv-channels` is 64"),
        ("megatron", "run.sh", ("--vocab-size 1", "--vocab-size 9"), "MODEL has 128256"),
        ("megatron", "run.sh", ("--swiglu", none), "`--swiglu` is not there"),
        ("megatron", "run.sh", ("--group-query-attention", none), "8 heads of keys"),
        ("megatron", "run.sh", ("--ffn-hidden-size 14336", none), "layers of 14336"),
        ("megatron", "run.sh", untied, "a head with a weight of its own"),
        ("megatron", "run.sh", ("--bf16", "--bf16 --fp16"), "are both there"),
        ("megatron", "run.sh", ("--recompute-method", none), "no method is there"),
        ("megatron", "run.sh", ("--sequence-parallel", none), "`--tp-comm-overlap`"),
        ("megatron", "run.sh", overlap, "write both, or neither"),
        ("torchtitan", "train.toml", ("\"8B\"", "\"70B\""), "MODEL has other sizes"),
        ("torchtitan", "train.toml", ("_size = 64", "_size = 65"), "write a multiple"),
        ("deepspeed", "ds_config.json", fp16, "`fp16` is enabled"),
        ("deepspeed", "run.sh", micro, "write the same number in both"),
        ("deepspeed", "run.sh", ("--bf16", "--fp16"), "write the same type in both"),
    ] {
        files.change(tool, file, &[change]);
        let output = files.score("changed");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(said), "{tool} {change:?}: {errors}");
    }
    let other = format!("score {CHANGED} --from deepspeed/run.sh --for-tool megatron");
    let output = files.0.run(&other);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("a file of DeepSpeed"), "{errors}");
}

/// How experts are sliced over tensor-parallel ranks is in the files of tools, and is read from
/// them, also where it is what the tool does unasked.
#[test]
fn slices_of_experts_are_in_the_files_of_tools() {
    let scratch = Scratch::new("for-tools-slices");
    let asked = "mixtral-8x7b --cluster h100 --devices 16 --gbs 64 --seq 4096";
    let seconds = |answer: &serde_json::Value| answer["step_time_s"].as_f64().unwrap();
    for (tool, tp, ep, etp) in [
        ("megatron", 4, 1, "2"),
        ("megatron", 4, 1, ""),
        ("megatron", 4, 2, "4"),
        ("megatron", 4, 2, ""),
        ("megatron", 2, 8, "1"),
        ("torchtitan", 2, 4, "2"),
        ("torchtitan", 2, 4, ""),
        ("torchtitan", 4, 1, ""),
    ] {
        let etp = if etp.is_empty() { String::new() } else { format!(",etp={etp}") };
        let fixed = format!("tp={tp},ep={ep}{etp},pp=1");
        let line = format!("plan {asked} --for-tool {tool} --fix {fixed} --json");
        let found = scratch.json(&line);
        scratch.write("found.json", &found.to_string());
        let file = if tool == "megatron" { "flags.sh" } else { "titan.toml" };
        scratch.answer(&format!("export found.json --to {tool} --lossy -o {file}"));
        let score = "score mixtral-8x7b --cluster h100 --devices 16 --gbs 64 --seq 4096";
        let read = scratch.json(&format!("{score} --from {file} --for-tool {tool} --json"));
        let means = |answer: &serde_json::Value, key: &str| {
            let text = answer[key].as_str().expect("a name");
            text.replace(" etp=1", "").replace(" etp=4", "").replace(" etp=2", "")
        };
        assert_eq!(means(&found, "text"), means(&read, "configuration"), "{tool} {fixed}");
        let off = seconds(&read) / seconds(&found) - 1.0;
        assert!(off.abs() < 1e-9, "{tool} {fixed}: {off}: {}", read["configuration"]);
        // As a plan of ours, which slices over all ranks unless told otherwise, it is no other.
        let ours = scratch.json(&format!("{score} --from found.json --for-tool {tool} --json"));
        let off = seconds(&ours) / seconds(&found) - 1.0;
        assert!(off.abs() < 1e-9, "{tool} {fixed}: {off}: {}", ours["configuration"]);
    }
    // Ours are sliced over all ranks of `tp`, or whole: as is faster, where both can be.
    for (fixed, wanted) in [
        ("tp=2,ep=2,etp=2,dp=4", None),
        ("tp=2,ep=2,dp=4", Some("--expert-tensor-parallel-size 1")),
        ("tp=4,ep=8,dp=4", Some("--expert-tensor-parallel-size 1")),
        ("tp=4,etp=1,dp=4", Some("--expert-tensor-parallel-size 1")),
        ("tp=4,ep=2,etp=2,dp=4", Some("--expert-tensor-parallel-size 2")),
    ] {
        let found = scratch.json(&format!("plan {asked} --fix {fixed} --json"));
        scratch.write("ours.json", &found.to_string());
        let script = scratch.answer("export ours.json --to megatron --lossy");
        let flag = script.lines().find(|line| line.contains("expert-tensor"));
        assert_eq!(flag.map(|line| line.trim_end_matches(['\\', ' '])), wanted, "{fixed}");
    }
    for (limit, said) in [
        ("--max etp=2", "write `--fix etp=N`"),
        ("--forbid etp", "write `--fix etp=N`"),
        ("--fix etp=3", "`--fix etp=3`"),
    ] {
        let output = scratch.run(&format!("plan {asked} {limit}"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(said), "{limit}: {errors}");
    }
}

/// `--moe-router-pre-softmax` follows `norm_topk_prob`.
#[test]
fn megatron_is_told_how_experts_are_weighted() {
    let scratch = Scratch::new("for-tools-experts");
    for is_normed in [true, false] {
        let layers = r#""model_type": "qwen3_moe", "num_hidden_layers": 4"#;
        let config = format!(r#"{{{layers}, "norm_topk_prob": {is_normed}}}"#);
        scratch.write("own/config.json", &config);
        let asked = "plan own --cluster h100 --devices 8 --gbs 64 --seq 1024";
        scratch.answer(&format!("{asked} --for-tool megatron -o dir"));
        let script = std::fs::read_to_string(scratch.0.join("dir/run.sh")).expect("a script");
        assert!(script.contains("--qk-layernorm"), "{script}");
        assert_eq!(script.contains("--moe-router-pre-softmax"), !is_normed, "{script}");
    }
}

/// What does not go together is refused with what does.
#[test]
fn what_a_tool_cannot_do_is_refused() {
    let scratch = Scratch::new("for-tools-refused");
    let at = "llama-3-8b --cluster h100 --devices 8";
    for (line, said) in [
        (format!("plan {at} --for-tool megatron@core-0.9"), "`megatron@core-0.13`"),
        (format!("plan {at} --for-tool titan"), "megatron, deepspeed, torchtitan"),
        (format!("plan {at} --for-tool deepspeed --fix pp=2"), "`--fix pp=2`"),
        (format!("plan {at} --for inference --for-tool megatron"), "asks about inference"),
        ("plan gpt2-mini --ranks 2 --for-tool megatron".to_owned(), "the cluster has CPUs"),
        (
            format!("plan {at} --for-tool torchtitan@0.0.2 -o dir"),
            "files are written for megatron@core-0.13",
        ),
        (
            "plan gpt2 --cluster h100 --devices 8 --for-tool torchtitan -o dir".to_owned(),
            "torchtitan has the models llama3 8B",
        ),
        (format!("plan {at} --for-tool megatron --dtype f16 -o dir"), "written in bf16"),
        (
            "plan deepseek-v2 --cluster h200 --devices 256 --gbs 1024 --seq 4096 \
             --for-tool megatron -o dir"
                .to_owned(),
            "scores a group of experts by its 2 best, the model by its 1",
        ),
    ] {
        let output = scratch.run(&line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(said), "{line}: {errors}");
    }
    let mut command = scratch.command(&[], "score llama-3-8b --gbs 8 --for-tool torchtitan");
    let output = command.args(["--config", "dp=8 zero=1"]).output().expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("shards of optimizer state or gradients alone"), "{errors}");
}

/// Variables that Slurm alone sets are those of the devices that are asked about, or of the
/// script's directives; where it is not known what they are, flags with them are refused.
#[test]
fn variables_of_slurm_follow_from_devices() {
    let scratch = Scratch::new("tools-slurm");
    let flags = "--tensor-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 64";
    let script = |directives: &str, launch: &str| {
        scratch.write("run.sh", &format!("{directives}\n{launch} pretrain.py {flags}\n"));
    };
    let score = |more: &str| {
        let at = "score llama-3-8b --cluster h100 --from run.sh --seq 2048 --json";
        let output = scratch.run(format!("{at} {more}").trim_end());
        let document: Option<Value> = serde_json::from_slice(&output.stdout).ok();
        let layout = document.map(|one| one["configuration"].as_str().map(str::to_owned));
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (layout.flatten(), errors)
    };
    let nodes = "torchrun --nnodes $SLURM_NNODES --nproc_per_node";
    let tasks = "N=${SLURM_NTASKS}\nsrun torchrun --nnodes $N --nproc_per_node";
    let sbatch = "#SBATCH --nodes=4";
    for (directives, launch, devices, dp) in [
        ("", format!("{nodes} 8"), "--devices 32", 4),
        ("", format!("{nodes} 4"), "--devices 32", 4),
        ("", format!("{nodes} $SLURM_GPUS_ON_NODE"), "--devices 32", 4),
        ("", format!("{tasks} 8"), "--devices 16", 2),
        (sbatch, format!("{nodes} 8"), "", 4),
        (sbatch, format!("{nodes} 8"), "--devices 32", 4),
        ("SLURM_NNODES=2", format!("{nodes} 8"), "", 2),
    ] {
        script(directives, &launch);
        let (layout, errors) = score(devices);
        let layout: Configuration =
            layout.unwrap_or_else(|| panic!("{launch}: {errors}")).parse().unwrap();
        assert_eq!((layout.tp, layout.dp), (8, dp), "{directives} {launch} {devices}");
    }
    for (directives, launch, devices) in [
        ("", format!("{nodes} 8"), ""),
        ("", format!("{nodes} 8"), "--devices 20"),
        (sbatch, format!("{nodes} 8"), "--devices 64"),
        (sbatch, format!("{nodes} 8"), "--devices 16"),
        ("", "srun --ntasks $SLURM_NTASKS --nnodes $SLURM_NTASKS".to_owned(), "--devices 32"),
    ] {
        script(directives, &launch);
        let (layout, errors) = score(devices);
        assert_eq!(layout, None, "{directives} {launch} {devices}");
        let is_told =
            errors.contains("not known what Slurm sets") && errors.contains("--devices N");
        assert!(is_told, "{launch}: {errors}");
    }
    // A trainer of DeepSpeed has as many ranks as its launcher starts.
    let ds = "{\"train_batch_size\": 64, \"zero_optimization\": {\"stage\": 3}}";
    scratch.write("ds.json", ds);
    script(sbatch, &format!("{nodes} 8 train.py --deepspeed ds.json"));
    assert!(score("").0.expect("a layout").contains("dp=32"));
    script("", &format!("{nodes} 8 train.py --deepspeed ds.json"));
    let (layout, errors) = score("");
    assert!(layout.is_none() && errors.contains("how many devices"), "{layout:?} {errors}");
}
