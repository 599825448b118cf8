//! Files that start a tool's training of a plan: its configuration with the model's part, and the
//! command line.
//!
//! What the tool's execution profile assumes is switched on in them, so that what runs is what was
//! priced.

use super::{Use, deepspeed, megatron, torchtitan};
use crate::configuration::{Configuration, Recompute};
use crate::estimate::described::{Decoder, Router};
use crate::tools::{Target, Tool};

#[cfg(test)]
mod tests;

/// The newest releases alone have files: older ones name their flags otherwise.
const WRITTEN: [&str; 3] = ["megatron@core-0.13", "deepspeed@0.16", "torchtitan@0.2"];

/// What is started.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'l> {
    /// The tool.
    pub target: Target,
    /// The plan.
    pub configuration: &'l Configuration,
    /// Its batch, tokens and layers.
    pub purpose: Use,
    /// The model, where it is a decoder.
    pub decoder: Option<&'l Decoder>,
    /// Nodes.
    pub nodes: u32,
    /// Devices of a node.
    pub per_node: u32,
}

/// A file by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its name in the directory.
    pub name: &'static str,
    /// What it holds.
    pub text: String,
}

/// The script that starts the training, in each directory.
pub const SCRIPT: &str = "run.sh";
/// DeepSpeed's configuration beside it.
pub const DEEPSPEED_FILE: &str = "ds_config.json";
/// torchtitan's.
pub const TORCHTITAN_FILE: &str = "train.toml";

/// The files of a plan that the tool can express.
///
/// # Errors
/// What of the model or the release the tool has no flags for.
pub fn files(launch: &Launch<'_>) -> Result<Vec<File>, String> {
    let Launch { target, configuration: c, purpose, .. } = *launch;
    if !WRITTEN.contains(&target.to_string().as_str()) {
        return Err(format!("files are written for {}", WRITTEN.join(", ")));
    }
    let file = |name, text| File { name, text };
    match target.tool() {
        Tool::Megatron => Ok(vec![file(SCRIPT, megatron_script(launch)?)]),
        Tool::DeepSpeed => Ok(vec![
            file(DEEPSPEED_FILE, deepspeed_file(c, purpose)),
            file(SCRIPT, deepspeed_script(launch)),
        ]),
        Tool::Torchtitan => Ok(vec![
            file(TORCHTITAN_FILE, torchtitan_file(launch)?),
            file(SCRIPT, torchtitan_script(launch)),
        ]),
        Tool::Calculon => Err("Calculon trains nothing".to_owned()),
    }
}

/// The first lines of a script; `needs` says what its variables are.
fn head(launch: &Launch<'_>, needs: &str) -> String {
    let Launch { target, configuration, nodes, .. } = launch;
    let mut text = format!("#!/usr/bin/env bash\n# {target}: {configuration}\n# {needs}\n");
    if *nodes > 1 {
        text += &format!(
            "# On {nodes} nodes, with HEAD the name of the first:\n\
             #   srun --nodes={nodes} --ntasks-per-node=1 bash {SCRIPT}\n"
        );
    }
    text + "set -euo pipefail\n"
}

/// The command line of PyTorch's launcher, before the trainer.
fn torchrun(launch: &Launch<'_>) -> String {
    format!(
        "torchrun --nnodes {} --nproc_per_node {} --node_rank \"${{SLURM_NODEID:-0}}\" \\\n  \
         --master_addr \"${{HEAD:-localhost}}\" --master_port 29500 \\\n  ",
        launch.nodes, launch.per_node
    )
}

fn megatron_script(launch: &Launch<'_>) -> Result<String, String> {
    let c = launch.configuration;
    let decoder = launch.decoder.ok_or("`pretrain_gpt.py` trains decoders")?;
    check_groups(decoder)?;
    let mut text = head(launch, "MEGATRON is the directory of Megatron-LM; the data is made up.");
    let is_fsdp = c.zero.stage > 1;
    // `validate_args`: tensor and context parallelism demand one connection, FSDP several.
    if (c.tp > 1 || c.cp > 1) && !is_fsdp {
        text += "export CUDA_DEVICE_MAX_CONNECTIONS=1\n";
    }
    text += &torchrun(launch);
    text += "\"$MEGATRON/pretrain_gpt.py\" \\\n  ";
    let mut flags = decoder_flags(decoder, launch.purpose)?;
    flags.extend(execution_flags(c, decoder));
    // A tokenizer without words has one more, the end of a document.
    flags.push(format!("--vocab-size {}", decoder.shape.vocab.saturating_sub(1)));
    let fixed = [
        "--mock-data",
        "--tokenizer-type NullTokenizer",
        "--train-iters 50",
        "--lr 1e-4",
        "--log-interval 1",
        "--log-throughput",
    ];
    flags.extend(fixed.map(str::to_owned));
    text += megatron(c, launch.purpose).replace(" \\\n", " \\\n  ").trim_end();
    text += " \\\n  ";
    text += &flags.join(" \\\n  ");
    Ok(text + "\n")
}

/// Families that Megatron-LM's flags describe: one name, and the flags that it has beside those of
/// its sizes.
const FAMILIES: [(&str, &[&str]); 9] = [
    ("gpt2", &[]),
    ("llama", &[]),
    ("mistral", &[]),
    ("mixtral", &[]),
    ("qwen2", &["--add-qkv-bias"]),
    ("qwen3", &["--qk-layernorm"]),
    ("qwen3_moe", &["--qk-layernorm"]),
    // Of compressed queries, keys and values.
    ("deepseek_v2", &["--qk-layernorm"]),
    ("deepseek_v3", &["--qk-layernorm"]),
];

/// Megatron-LM's flags of a decoder.
fn decoder_flags(decoder: &Decoder, purpose: Use) -> Result<Vec<String>, String> {
    let shape = &decoder.shape;
    let own = match decoder.family {
        Some(name) => {
            let known = FAMILIES.iter().find(|(known, _)| *known == name);
            let known = known.ok_or_else(|| {
                let names = FAMILIES.map(|(known, _)| known).join(", ");
                format!("Megatron-LM's flags describe {names}, and the model is of `{name}`")
            })?;
            known.1
        }
        None => &[],
    };
    if decoder.has_window {
        return Err("attention within a window, for which no profile was measured".to_owned());
    }
    let mut flags = Vec::new();
    let mut number = |name: &str, number: u32| flags.push(format!("--{name} {number}"));
    number("num-layers", shape.layers);
    number("hidden-size", shape.hidden);
    number("num-attention-heads", shape.heads);
    number("ffn-hidden-size", shape.ffn);
    if shape.low_rank.is_none() {
        number("kv-channels", shape.head_dim);
    }
    number("max-position-embeddings", purpose.seq.max(shape.positions));
    if shape.kv_heads != shape.heads && shape.low_rank.is_none() {
        flags.push("--group-query-attention".to_owned());
        flags.push(format!("--num-query-groups {}", shape.kv_heads));
    }
    let mut flag = |is: bool, text: &str| {
        if is {
            flags.push(text.to_owned());
        }
    };
    flag(shape.positions > 0, "--position-embedding-type learned_absolute");
    flag(shape.positions == 0, "--position-embedding-type rope");
    flag(shape.gated, "--swiglu");
    flag(shape.gated, "--normalization RMSNorm");
    flag(!shape.biases, "--disable-bias-linear");
    flag(!shape.tied, "--untie-embeddings-and-output-weights");
    for text in ["--attention-dropout 0", "--hidden-dropout 0"].iter().chain(own) {
        flag(true, text);
    }
    if let Some(theta) = decoder.theta {
        flag(true, &format!("--rotary-base {theta:.0}"));
    }
    match decoder.rope_type.as_deref() {
        None | Some("default") => {}
        Some("llama3") => flag(true, "--use-rope-scaling"),
        Some(other) => return Err(format!("rotary positions scaled as `{other}`")),
    }
    flags.extend(routed_flags(decoder));
    Ok(flags)
}

/// Those of experts, and of attention through a shared vector.
fn routed_flags(decoder: &Decoder) -> Vec<String> {
    let mut flags = Vec::new();
    let shape = &decoder.shape;
    if let Some(routed) = shape.routed {
        let mut number = |name: &str, number: u32| flags.push(format!("--{name} {number}"));
        number("num-experts", routed.experts);
        number("moe-router-topk", routed.top_k);
        number("moe-ffn-hidden-size", routed.ffn);
        if routed.shared_ffn > 0 {
            number("moe-shared-expert-intermediate-size", routed.shared_ffn);
        }
        if routed.dense_layers > 0 {
            let (dense, rest) = (routed.dense_layers, shape.layers - routed.dense_layers);
            flags.push(format!("--moe-layer-freq \"([0]*{dense}+[1]*{rest})\""));
        }
        flags.push("--moe-grouped-gemm".to_owned());
        flags.push("--moe-router-dtype fp32".to_owned());
        flags.extend(router_flags(decoder));
    }
    if let Some(rank) = shape.low_rank {
        flags.push("--multi-latent-attention".to_owned());
        let mut number = |name: &str, number: u32| flags.push(format!("--{name} {number}"));
        if rank.q_rank > 0 {
            number("q-lora-rank", rank.q_rank);
        }
        number("kv-lora-rank", rank.kv_rank);
        number("qk-head-dim", rank.plain_dim);
        number("qk-pos-emb-head-dim", rank.rope_dim);
        number("v-head-dim", rank.v_dim);
    }
    flags
}

/// Refuses a router whose groups Megatron-Core scores otherwise: by the sum of the
/// `topk / group-topk` best of each (`group_limited_topk` in moe_utils.py).
fn check_groups(decoder: &Decoder) -> Result<(), String> {
    let Router { is_sigmoid, groups, .. } = decoder.router;
    let (Some([_, open]), Some(routed)) = (groups, decoder.shape.routed) else { return Ok(()) };
    let (summed, wanted) = (routed.top_k / open.max(1), if is_sigmoid { 2 } else { 1 });
    if summed == wanted {
        return Ok(());
    }
    Err(format!(
        "Megatron-Core scores a group of experts by its {summed} best, the model by its {wanted}"
    ))
}

/// How experts are chosen.
fn router_flags(decoder: &Decoder) -> Vec<String> {
    let Router { is_sigmoid, groups, gain } = decoder.router;
    let mut flags = Vec::new();
    if is_sigmoid {
        flags.push("--moe-router-score-function sigmoid".to_owned());
        flags.push("--moe-router-enable-expert-bias".to_owned());
    } else if decoder.keeps_shares {
        flags.push("--moe-router-pre-softmax".to_owned());
    }
    if let Some([all, open]) = groups {
        flags.push(format!("--moe-router-num-groups {all}"));
        flags.push(format!("--moe-router-group-topk {open}"));
    }
    flags.extend(gain.map(|gain| format!("--moe-router-topk-scaling-factor {gain}")));
    flags
}

/// What the execution profile assumes of Megatron-Core's kernels.
fn execution_flags(c: &Configuration, decoder: &Decoder) -> Vec<String> {
    let mut flags = Vec::new();
    let mut flag = |is: bool, text: &str| {
        if is {
            flags.push(text.to_owned());
        }
    };
    let is_fsdp = c.zero.stage > 1;
    flag(true, "--cross-entropy-loss-fusion");
    flag(is_fsdp, "--no-gradient-accumulation-fusion");
    if decoder.shape.routed.is_some() {
        if c.ep > 1 {
            flag(true, "--moe-token-dispatcher-type flex");
            flag(true, "--moe-enable-deepep");
        } else {
            flag(true, "--moe-token-dispatcher-type alltoall");
        }
    }
    flags
}

/// The configuration without the batch of a step, which follows from the micro-batch, accumulation
/// and ranks: transformers' Trainer counts all ranks as data-parallel, and refuses another product.
fn deepspeed_file(c: &Configuration, purpose: Use) -> String {
    let is_batch = |line: &&str| line.contains("\"train_batch_size\"");
    deepspeed(c, purpose).lines().filter(|line| !is_batch(line)).map(|l| format!("{l}\n")).collect()
}

fn deepspeed_script(launch: &Launch<'_>) -> String {
    let (c, Use { global_batch, seq, .. }) = (launch.configuration, launch.purpose);
    let needs = "TRAINER is a script that takes the arguments of transformers' Trainer, such as\n\
                 # run_clm.py; ARGUMENTS are those of the model and the data.";
    let mut text = head(launch, needs);
    let steps = global_batch / c.dp / c.microbatch;
    text += &torchrun(launch);
    text += &format!(
        "\"$TRAINER\" ${{ARGUMENTS:-}} \\\n  \
         --deepspeed {DEEPSPEED_FILE} --bf16 --block_size {seq} \\\n  \
         --per_device_train_batch_size {} --gradient_accumulation_steps {steps}",
        c.microbatch
    );
    if c.recompute == Recompute::Full {
        text += " \\\n  --gradient_checkpointing";
    }
    text + "\n"
}

/// A model of torchtitan: its name and flavor; layers, hidden elements, heads, heads of keys,
/// elements inside the feed-forward layers, or inside an expert where all are routed, and experts.
pub type Flavor = (&'static str, &'static str, [u32; 6]);

/// torchtitan 0.2.1, torchtitan/models/*/__init__.py.
pub const FLAVORS: [Flavor; 12] = [
    ("llama3", "8B", [32, 4096, 32, 8, 14_336, 0]),
    ("llama3", "70B", [80, 8192, 64, 8, 28_672, 0]),
    ("llama3", "405B", [126, 16_384, 128, 8, 53_248, 0]),
    ("qwen3", "0.6B", [28, 1024, 16, 8, 3072, 0]),
    ("qwen3", "1.7B", [28, 2048, 16, 8, 6144, 0]),
    ("qwen3", "4B", [36, 2560, 32, 8, 9728, 0]),
    ("qwen3", "8B", [36, 4096, 32, 8, 12_288, 0]),
    ("qwen3", "14B", [40, 5120, 40, 8, 17_408, 0]),
    ("qwen3", "32B", [64, 5120, 64, 8, 25_600, 0]),
    ("qwen3", "30B-A3B", [48, 2048, 32, 4, 768, 128]),
    ("qwen3", "235B-A22B", [94, 4096, 64, 4, 1536, 128]),
    ("deepseek_v3", "671B", [61, 7168, 128, 128, 18_432, 256]),
];

fn torchtitan_file(launch: &Launch<'_>) -> Result<String, String> {
    let flavor = launch.decoder.and_then(|decoder| {
        let shape = &decoder.shape;
        let experts = shape.routed.map_or(0, |routed| routed.experts);
        let sizes = [shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn, experts];
        let is_of = |name: &str| {
            decoder.family.is_none_or(|family| name.starts_with(family.trim_end_matches("_moe")))
        };
        FLAVORS.iter().find(|(name, _, own)| *own == sizes && is_of(name))
    });
    let Some((name, flavor, _)) = flavor else {
        let known = FLAVORS.map(|(name, flavor, _)| format!("{name} {flavor}")).join(", ");
        return Err(format!("torchtitan has the models {known}, and the model is none of them"));
    };
    let mut text = format!(
        "[job]\ndump_folder = \"./outputs\"\n\n[model]\nname = \"{name}\"\nflavor = \"{flavor}\"\n\
         hf_assets_path = \"./assets\"\n\n"
    );
    text += &torchtitan(launch.configuration, launch.purpose);
    text += "\n[compile]\nenable = true\ncomponents = [\"model\", \"loss\"]\n";
    Ok(text)
}

fn torchtitan_script(launch: &Launch<'_>) -> String {
    let needs = "The tokenizer lies in ./assets: scripts/download_hf_assets.py of torchtitan.";
    head(launch, needs)
        + &torchrun(launch)
        + &format!("-m torchtitan.train --job.config_file {TORCHTITAN_FILE}\n")
}
