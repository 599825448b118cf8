//! A configuration in the terms of other tools: flags of Megatron-LM, JSON of DeepSpeed, TOML of
//! torchtitan, JSON of Calculon.
//!
//! What a tool has no term for is returned beside the text, never dropped silently.

pub mod groups;
pub mod launch;

use crate::configuration::{Configuration, Offload, Place, Recompute, Schedule};
use crate::estimate::profile::ExpertPlacement;
use crate::tools::{
    Form, Sizes, Target, shard_degree, stages_inside, torchtitan_chunk, torchtitan_ends,
};

pub use crate::tools::Tool;

/// What is left out of every execution of Calculon without recomputation: an assumption about
/// kernels, and no decision of the plan.
pub const NO_SCORES: &str = "attention that writes no scores, said as their recomputation";

/// What a configuration is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// Samples of a step.
    pub global_batch: u32,
    /// Tokens of a sample.
    pub seq: u32,
    /// Layers.
    pub layers: u32,
}

/// A configuration in another tool's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Flags or a file.
    pub text: String,
    /// What the tool has no term for.
    pub left_out: Vec<String>,
}

/// A configuration in the terms of a tool's newest release. What the rules of the tool refuse is
/// left out.
pub fn export(c: &Configuration, purpose: Use, tool: Tool) -> Exported {
    let text = match tool {
        Tool::Megatron => megatron(c, purpose),
        Tool::DeepSpeed => deepspeed(c, purpose),
        Tool::Torchtitan => torchtitan(c, purpose),
        Tool::Calculon => calculon(c, purpose),
    };
    let sizes = Sizes { layers: purpose.layers, seq: purpose.seq, ..Sizes::default() };
    let refused = Target::newest(tool).refusals(c, sizes, Form::Configuration);
    let mut left_out: Vec<String> = refused.into_iter().map(str::to_owned).collect();
    let keeps_all = matches!(c.recompute, Recompute::None | Recompute::Auto);
    if tool == Tool::Calculon && keeps_all {
        left_out.push(NO_SCORES.to_owned());
    }
    Exported { text, left_out }
}

fn megatron(c: &Configuration, purpose: Use) -> String {
    let mut flags: Vec<String> = Vec::new();
    let mut number = |name: &str, number: u32| flags.push(format!("--{name} {number}"));
    number("tensor-model-parallel-size", c.tp);
    number("pipeline-model-parallel-size", c.pp);
    number("context-parallel-size", c.cp);
    if c.ep > 1 {
        number("expert-model-parallel-size", c.ep);
    }
    // Unless told, all ranks of `tp` slice experts.
    let slices = ExpertPlacement::FromTensor.slices(c);
    if slices != c.tp {
        number("expert-tensor-parallel-size", slices);
    }
    number("micro-batch-size", c.microbatch);
    number("global-batch-size", purpose.global_batch);
    number("seq-length", purpose.seq);
    megatron_stages(c, purpose.layers, &mut flags);
    flags.push("--bf16".to_owned());
    let mut flag = |is: bool, text: &str| {
        if is {
            flags.push(text.to_owned());
        }
    };
    flag(c.sequence_parallel, "--sequence-parallel");
    // What `validate_args` of Megatron-LM demands beside a flag is written with it.
    let is_moved = c.offload.optimizer != Place::Device;
    flag(c.zero.stage > 0 || is_moved, "--use-distributed-optimizer");
    let copies = c.dp.saturating_mul(c.cp);
    let divides = c.zero.stage > 0 && c.zero.shard > 0 && copies.is_multiple_of(c.zero.shard);
    let instances = copies.checked_div(c.zero.shard).unwrap_or(1);
    flag(divides, &format!("--num-distributed-optimizer-instances {instances}"));
    let sharding = ["", "", "optim_grads", "optim_grads_params"];
    if c.zero.stage > 1 {
        let strategy = sharding[usize::from(c.zero.stage.min(3))];
        flag(true, "--use-megatron-fsdp");
        flag(true, &format!("--data-parallel-sharding-strategy {strategy}"));
        flag(true, "--ckpt-format fsdp_dtensor");
    }
    let layers = match c.recompute {
        Recompute::None | Recompute::Auto => None,
        Recompute::Attention => {
            flag(true, "--recompute-granularity selective");
            None
        }
        Recompute::Full => Some(("uniform", 1)),
        // It counts those of a chunk.
        Recompute::Layers(count) => Some(("block", count.div_ceil(c.vpp))),
    };
    if let Some((method, count)) = layers {
        flag(true, "--recompute-granularity full");
        flag(true, &format!("--recompute-method {method}"));
        flag(true, &format!("--recompute-num-layers {count}"));
    }
    flag(stages_inside(c), "--use-tp-pp-dp-mapping");
    flag(is_moved, "--optimizer-cpu-offload");
    flag(is_moved, "--use-precision-aware-optimizer");
    // What the execution profile assumes: without these flags a step takes longer than predicted.
    flag(true, "--overlap-grad-reduce");
    flag(c.zero.stage > 0, "--overlap-param-gather");
    flag(true, "--grad-reduce-in-bf16");
    flag(c.tp > 1 && c.sequence_parallel, "--tp-comm-overlap");
    flags.join(" \\\n") + "\n"
}

/// Chunks, and layers of stages that are not equal.
fn megatron_stages(c: &Configuration, layers: u32, flags: &mut Vec<String>) {
    let mut number = |name: &str, number: u32| flags.push(format!("--{name} {number}"));
    let chunks = c.chunks(layers);
    let (Some(first), Some(last)) = (chunks.first(), chunks.last()) else { return };
    let is_alike = |chunks: &[u32]| chunks.iter().all(|chunk| *chunk == chunks[0]);
    let inner = chunks.get(1..chunks.len() - 1).unwrap_or_default();
    if is_alike(&chunks) {
        if c.vpp > 1 {
            number("num-layers-per-virtual-pipeline-stage", *first);
        }
    } else if c.vpp == 1 && is_alike(inner) {
        number("decoder-first-pipeline-num-layers", *first);
        number("decoder-last-pipeline-num-layers", *last);
    } else {
        let layout = stage_layout(&chunks);
        flags.push(format!("--pipeline-model-parallel-layout \"{layout}\""));
    }
}

/// Megatron-LM's pipeline layout of `chunks`, the transformer layers of each: `E` the embedding,
/// `t` a transformer layer, `L` the loss, `|` between chunks; equal chunks in a row are written
/// once. `Et*3|(t*4|)*2t*3L` is four stages of 3, 4, 4 and 3 layers.
fn stage_layout(chunks: &[u32]) -> String {
    let Some((last, others)) = chunks.split_last() else { return String::new() };
    let letters = |layers: u32| if layers > 0 { format!("t*{layers}") } else { String::new() };
    let mut text = String::from("E");
    // The first chunk has the embedding, so that it is never written with others.
    if let Some((first, others)) = others.split_first() {
        text += &format!("{}|", letters(*first));
        for run in others.chunk_by(|a, b| a == b) {
            text += &match run.len() {
                1 => format!("{}|", letters(run[0])),
                many => format!("({}|)*{many}", letters(run[0])),
            };
        }
    }
    text + &letters(*last) + "L"
}

fn deepspeed(c: &Configuration, purpose: Use) -> String {
    let device = |place: Place| match place {
        Place::Device => "\"none\"",
        Place::Host => "\"cpu\"",
        // It takes no disk without a path; this is the one that its documentation shows.
        Place::Disk => "\"nvme\", \"nvme_path\": \"/local_nvme\"",
    };
    let count = purpose.global_batch / c.dp / c.microbatch;
    let mut lines = vec![
        format!("  \"train_batch_size\": {}", purpose.global_batch),
        format!("  \"train_micro_batch_size_per_gpu\": {}", c.microbatch),
        format!("  \"gradient_accumulation_steps\": {count}"),
        "  \"bf16\": {\"enabled\": true}".to_owned(),
    ];
    // Activations are moved by trainers that call DeepSpeed's checkpointing themselves: a rule of
    // the tool refuses them.
    let Offload { optimizer, parameters, activations: _ } = c.offload;
    let mut zero = format!("  \"zero_optimization\": {{\"stage\": {}", c.zero.stage);
    if optimizer != Place::Device {
        zero += &format!(", \"offload_optimizer\": {{\"device\": {}}}", device(optimizer));
    }
    if parameters != Place::Device {
        zero += &format!(", \"offload_param\": {{\"device\": {}}}", device(parameters));
    }
    // The execution profile assumes it; unsaid, stage 3 alone has it.
    zero += ", \"overlap_comm\": true";
    lines.push(zero + "}");
    if c.tp > 1 {
        lines.push(format!("  \"tensor_parallel\": {{\"autotp_size\": {}}}", c.tp));
    }
    if c.cp > 1 {
        lines.push(format!("  \"sequence_parallel_size\": {}", c.cp));
    }
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

fn torchtitan(c: &Configuration, purpose: Use) -> String {
    let shard = shard_degree(c);
    let schedule = match (c.schedule, c.vpp) {
        (Schedule::GPipe, _) => "GPipe",
        (Schedule::OneForwardOneBackward, 2..) => "Interleaved1F1B",
        // Zero-bubble schedules of torchtitan take two stages of a rank at least.
        (Schedule::OneForwardOneBackward | Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleH2, _) => {
            "1F1B"
        }
    };
    // Without stages, a local batch is what is computed at once, and gradients are accumulated.
    let local = if c.pp > 1 { purpose.global_batch / c.dp } else { c.microbatch };
    let mut text = format!(
        "[training]\nlocal_batch_size = {local}\nglobal_batch_size = {}\nseq_len = {}\n",
        purpose.global_batch, purpose.seq
    );
    text += &format!("\n[parallelism]\ndata_parallel_replicate_degree = {}\n", c.dp / shard);
    text += &format!("data_parallel_shard_degree = {shard}\n");
    text += &format!("tensor_parallel_degree = {}\n", c.tp);
    text += &format!("context_parallel_degree = {}\n", c.cp);
    text += &format!("pipeline_parallel_degree = {}\n", c.pp);
    text += &format!("expert_parallel_degree = {}\n", c.ep);
    if c.ep > 1 {
        let slices = ExpertPlacement::FromTensor.slices(c);
        text += &format!("expert_tensor_parallel_degree = {slices}\n");
    }
    if c.pp > 1 {
        text += &format!("pipeline_parallel_schedule = \"{schedule}\"\n");
        text += &format!("pipeline_parallel_microbatch_size = {}\n", c.microbatch);
        // Unless told, it counts the embedding and the loss as a layer each.
        let ends = torchtitan_ends(c, purpose.layers).unwrap_or(0);
        if let Some(chunk) = torchtitan_chunk(c, purpose.layers, ends) {
            text += &format!("pipeline_parallel_layers_per_stage = {chunk}\n");
        }
        for end in ["first", "last"] {
            text += &format!("pipeline_parallel_{end}_stage_less_layers = {ends}\n");
        }
    }
    let mode = match c.recompute {
        Recompute::None | Recompute::Auto => "none",
        Recompute::Attention => "selective",
        Recompute::Full | Recompute::Layers(_) => "full",
    };
    text += &format!("\n[activation_checkpoint]\nmode = \"{mode}\"\n");
    if mode == "selective" {
        // What the profile recomputes; it is every second layer unless told.
        text += "selective_ac_option = \"op\"\n";
    }
    text
}

fn calculon(c: &Configuration, purpose: Use) -> String {
    // Calculon knows attention that writes its scores alone. Ours never does (Dao et al. 2022): the
    // backward pass computes them again, as in `attn_only`, which holds as much and takes as long.
    let recompute = match c.recompute {
        Recompute::None | Recompute::Auto | Recompute::Attention => "attn_only",
        Recompute::Full | Recompute::Layers(_) => "full",
    };
    // Networks are numbered from the inside; neighbours within a node are on the first.
    let net = |outside: bool| u32::from(outside);
    let elsewhere = |place: Place| place != Place::Device;
    let text = [
        ("num_procs", (c.ranks() / u64::from(c.cp)).to_string()),
        ("tensor_par", c.tp.to_string()),
        ("pipeline_par", c.pp.to_string()),
        ("data_par", c.dp.to_string()),
        ("tensor_par_net", net(c.tp > 8).to_string()),
        ("pipeline_par_net", net(c.tp * c.dp * c.pp > 8).to_string()),
        ("data_par_net", net(c.tp * c.dp > 8).to_string()),
        ("batch_size", purpose.global_batch.to_string()),
        ("microbatch_size", c.microbatch.to_string()),
        ("datatype", "\"float16\"".to_owned()),
        ("fused_activation", "true".to_owned()),
        ("attention_type", "\"multihead\"".to_owned()),
        ("activation_recompute", format!("\"{recompute}\"")),
        ("pipeline_interleaving", c.vpp.to_string()),
        ("optimizer_sharding", (c.zero.stage >= 1 && c.dp > 1).to_string()),
        (
            "tensor_par_comm_type",
            if c.sequence_parallel { "\"rs_ag\"" } else { "\"ar\"" }.to_owned(),
        ),
        ("tensor_par_overlap", "\"none\"".to_owned()),
        // What is recomputed is gathered again with it.
        ("seq_par_ag_redo", (c.sequence_parallel && recompute != "full").to_string()),
        ("data_par_overlap", (c.dp > 1).to_string()),
        ("weight_offload", elsewhere(c.offload.parameters).to_string()),
        ("activations_offload", elsewhere(c.offload.activations).to_string()),
        ("optimizer_offload", elsewhere(c.offload.optimizer).to_string()),
        ("training", "true".to_owned()),
    ];
    let lines: Vec<String> =
        text.iter().map(|(name, value)| format!("  \"{name}\": {value}")).collect();
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const USE: Use = Use { global_batch: 64, seq: 2048, layers: 96 };

    fn configuration(text: &str) -> Configuration {
        text.parse().unwrap()
    }

    #[test]
    fn every_tool_gets_the_ranks_and_the_batch() {
        let c = configuration("tp=8 pp=8 dp=1 mbs=1 vpp=3 sp zero=1 recompute=attention");
        let text = |tool| export(&c, USE, tool).text;
        let megatron = text(Tool::Megatron);
        for flag in [
            "--tensor-model-parallel-size 8",
            "--pipeline-model-parallel-size 8",
            "--num-layers-per-virtual-pipeline-stage 4",
            "--sequence-parallel",
            "--use-distributed-optimizer",
            "--recompute-granularity selective",
        ] {
            assert!(megatron.contains(flag), "{megatron}");
        }
        assert_eq!(export(&c, USE, Tool::Megatron).left_out, [""; 0]);
        assert!(
            text(Tool::Torchtitan).contains("pipeline_parallel_schedule = \"Interleaved1F1B\"")
        );
        assert!(text(Tool::Calculon).contains("\"activation_recompute\": \"attn_only\""));
        assert!(text(Tool::DeepSpeed).contains("\"gradient_accumulation_steps\": 64"));
        assert!(toml::from_str::<toml::Value>(&text(Tool::Torchtitan)).is_ok());
    }

    #[test]
    fn what_a_tool_cannot_say_is_told() {
        let c = configuration(
            "tp=2 cp=2 pp=4 dp=8 mbs=1 zero=3/4 schedule=zb-h1 recompute=layers:2 \
             offload-activations=host order=tp.dp.cp.pp stages=23.24.25.24",
        );
        for tool in Tool::ALL {
            let left = export(&c, USE, tool).left_out;
            assert!(!left.is_empty(), "{}", tool.name());
            assert!(left.iter().any(|what| what.contains("placement")), "{left:?}");
        }
        let left = export(&c, USE, Tool::Megatron).left_out;
        assert!(left.contains(&"schedule zb-h1".to_owned()), "{left:?}");
    }

    /// Uneven stages and shards over some ranks are told to Megatron-LM as it takes them.
    #[test]
    fn megatron_is_told_stages_and_parts_of_shards() {
        let told = |text: &str, layers: u32| {
            export(&configuration(text), Use { layers, ..USE }, Tool::Megatron)
        };
        for (text, layers, said) in [
            ("pp=4 stages=23.24.25.24", 96, "layout \"Et*23|t*24|t*25|t*24L\""),
            ("pp=7 stages=3.4.4.4.5.5.3", 28, "layout \"Et*3|(t*4|)*3(t*5|)*2t*3L\""),
            ("pp=5 stages=4.4.4.3.5", 20, "layout \"Et*4|(t*4|)*2t*3|t*5L\""),
            ("pp=4", 30, "layout \"Et*8|t*8|t*7|t*7L\""),
            ("pp=4 vpp=8 stages=7.9.9.7", 32, "layout \"E|t*1|t*2|(t*1|)*26t*2|t*1|L\""),
            ("pp=2 vpp=2 recompute=layers:6", 32, "--recompute-num-layers 3"),
            ("pp=4 stages=3.4.4.5", 16, "--decoder-first-pipeline-num-layers 3"),
            ("dp=8 zero=1/2", 96, "--num-distributed-optimizer-instances 4"),
            ("dp=4 cp=2 zero=3/4", 96, "--num-distributed-optimizer-instances 2"),
        ] {
            let exported = told(text, layers);
            assert!(exported.text.contains(said), "{text}: {}", exported.text);
            assert_eq!(exported.left_out, [""; 0], "{text}");
        }
        assert!(!told("pp=4", 32).text.contains("layout"));
    }

    fn toml_of(text: &str) -> toml::Table {
        toml::from_str(text).unwrap()
    }

    /// Numbers that follow from others are those that the tools compute from them: DeepSpeed
    /// refuses a batch that is not micro-batch · accumulation · ranks, and torchtitan gives a
    /// pipeline the whole local batch, and counts the embedding and the loss as layers unless told.
    #[test]
    fn numbers_that_follow_agree() {
        for text in [
            "tp=2 pp=1 dp=8 mbs=2 sp zero=3",
            "tp=2 pp=4 dp=8 mbs=2 sp zero=3/4",
            "tp=4 pp=8 dp=4 mbs=4 sp vpp=3 zero=3/2",
        ] {
            let c = configuration(text);
            let replicas = i64::from(c.dp);
            let megatron = export(&c, USE, Tool::Megatron).text;
            assert!(megatron.contains("--seq-length 2048 "), "{megatron}");
            assert!(megatron.contains("--global-batch-size 64 "), "{megatron}");
            // Its numbers are on lines of their own.
            let deepspeed = export(&c, USE, Tool::DeepSpeed).text;
            let number = |name: &str| -> i64 {
                let after = deepspeed.split(&format!("\"{name}\": ")).nth(1).unwrap();
                after.split([',', '\n']).next().unwrap().parse().unwrap()
            };
            let at_once = number("train_micro_batch_size_per_gpu") * replicas;
            assert_eq!(at_once * number("gradient_accumulation_steps"), 64, "{deepspeed}");
            assert_eq!(number("train_batch_size"), 64, "{deepspeed}");
            let torchtitan = toml_of(&export(&c, USE, Tool::Torchtitan).text);
            let number = |table: &str, name: &str| torchtitan[table][name].as_integer().unwrap();
            let axis = |name: &str| number("parallelism", name);
            let local = number("training", "local_batch_size");
            let shards = axis("data_parallel_shard_degree");
            assert_eq!(shards * axis("data_parallel_replicate_degree"), replicas, "{text}");
            assert_eq!(number("training", "seq_len"), 2048);
            if c.pp == 1 {
                assert_eq!(local, i64::from(c.microbatch), "{text}");
                continue;
            }
            assert_eq!(local * replicas, 64, "{text}");
            assert_eq!(axis("pipeline_parallel_microbatch_size"), i64::from(c.microbatch));
            let chunks = i64::from(c.pp * c.vpp);
            assert_eq!(axis("pipeline_parallel_layers_per_stage") * chunks, 96, "{text}");
            for end in ["first", "last"] {
                assert_eq!(axis(&format!("pipeline_parallel_{end}_stage_less_layers")), 0);
            }
        }
    }

    /// Calculon's networks are numbered from the inside: an axis is on the first where all ranks
    /// that it spans are on a node of eight. What is not recomputed is gathered again.
    #[test]
    fn calculon_gets_its_networks() {
        for (text, nets, redo) in [
            ("tp=8 pp=1 dp=1 mbs=1 sp recompute=attention", [0, 0, 0], true),
            ("tp=4 pp=1 dp=2 mbs=1 recompute=attention", [0, 0, 0], false),
            ("tp=8 pp=8 dp=1 mbs=1 sp recompute=full", [0, 1, 0], false),
            ("tp=4 pp=2 dp=4 mbs=1 sp recompute=attention", [0, 1, 1], true),
            ("tp=16 pp=1 dp=1 mbs=1 recompute=full", [1, 1, 1], false),
        ] {
            let c = configuration(text);
            let said = export(&c, USE, Tool::Calculon).text;
            let names = ["tensor_par_net", "pipeline_par_net", "data_par_net"];
            for (name, net) in names.into_iter().zip(nets) {
                assert!(said.contains(&format!("\"{name}\": {net},")), "{text}: {said}");
            }
            assert!(said.contains(&format!("\"seq_par_ag_redo\": {redo},")), "{text}: {said}");
            let overlaps = c.dp > 1;
            assert!(said.contains(&format!("\"data_par_overlap\": {overlaps},")), "{said}");
        }
    }
}
