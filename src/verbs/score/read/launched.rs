//! Scripts that start DeepSpeed or torchtitan on a configuration in another file.

use std::path::{Path, PathBuf};

use ir::{DType, Diagnostic, Span};
use planner::configuration::Recompute;

use super::deepspeed::{ARGUMENTS, MICRO, STEPS};
use super::said::Word;
use super::script;
use super::slurm::Allocation;
use crate::job::Precision;

/// A script that starts a trainer on the configuration in another file.
#[derive(Clone, Debug, PartialEq)]
pub struct Launched {
    /// The configuration, beside the script unless it says where.
    pub file: PathBuf,
    /// Devices, if it says how many.
    pub devices: Option<u32>,
    /// What the trainer recomputes, if it says so.
    pub recompute: Option<Recompute>,
    /// Tokens of a sample, if it says so.
    pub seq: Option<u32>,
    /// Samples of a micro-batch, and micro-batches of a step, if it says so.
    pub batch: [Option<u32>; 2],
    /// The element type, if it says so.
    pub dtype: Option<Precision>,
}

/// Arguments of trainers that cut texts to samples.
const LENGTHS: [&str; 5] =
    ["--block_size", "--max_length", "--max_seq_length", "--model_max_length", "--seq_length"];

impl Launched {
    /// Refuses a configuration whose type, micro-batch or accumulation differs from the script's
    /// arguments: transformers' Trainer stops there.
    ///
    /// # Errors
    /// `E5016` at the file.
    pub fn check(&self, source: &str, text: &str) -> Result<(), Diagnostic> {
        let json: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
        let types = [("bf16", DType::BF16), ("fp16", DType::F16)];
        for (name, dtype) in types.map(|(name, dtype)| (name, Precision::Of(dtype))) {
            if let Some(own) = self.dtype.filter(|own| *own != dtype)
                && json[name]["enabled"] == true
            {
                let headline = format!("`{name}` is enabled, and the script asks for {own}");
                let wrong = Diagnostic::error("E5016", Span::of(source), headline);
                return Err(wrong.help("write the same type in both, or `auto` here"));
            }
        }
        for ((name, argument), own) in [MICRO, STEPS].into_iter().zip(ARGUMENTS).zip(self.batch) {
            let there = json[name].as_u64();
            if let (Some(own), Some(there)) = (own, there)
                && u64::from(own) != there
            {
                let headline =
                    format!("`{name}` is {there}, and the script has `{argument} {own}`");
                let wrong = Diagnostic::error("E5016", Span::of(source), headline);
                return Err(wrong.help("write the same number in both, or `auto` here"));
            }
        }
        Ok(())
    }
}

/// What a script starts, where that is DeepSpeed or torchtitan: their configuration is a file.
pub fn launched(script: &Path, text: &str, allocation: Allocation) -> Option<Launched> {
    let flags = script::flags(text, allocation);
    let value = |names: &[&str]| {
        // argparse takes dashes for underscores of Trainer's arguments.
        let is_one = |word: &&Word| {
            let spelt = format!("--{}", word.name[2..].replace('-', "_"));
            names.contains(&word.name.as_str()) || names.contains(&spelt.as_str())
        };
        let word = flags.iter().rfind(is_one)?;
        word.value.as_str().filter(|value| !value.is_empty()).map(str::to_owned)
    };
    let number = |names: &[&str]| value(names)?.parse::<u32>().ok();
    let names = ["--deepspeed", "--deepspeed_config", "--job.config_file", "--job.config-file"];
    let file = value(&names).filter(|file| file.ends_with(".json") || file.ends_with(".toml"))?;
    // A variable that nothing sets is no number of nodes.
    let nodes = ["--num_nodes", "--nnodes"];
    let nodes = if value(&nodes).is_some() { number(&nodes) } else { Some(1) };
    let each = number(&["--num_gpus", "--nproc_per_node", "--nproc-per-node"]);
    let is_checkpointed = flags.iter().rfind(|word| word.name == "--gradient_checkpointing");
    let is_off =
        |word: &Word| word.value.as_str().is_some_and(|on| on.eq_ignore_ascii_case("false"));
    let is_on = |name: &str| {
        let word = flags.iter().rfind(|word| word.name == name);
        word.is_some_and(|word| !is_off(word))
    };
    let dtype = [("--bf16", DType::BF16), ("--fp16", DType::F16)].into_iter();
    let dtype = dtype.filter(|(name, _)| is_on(name)).map(|(_, dtype)| Precision::Of(dtype)).next();
    Some(Launched {
        file: script.parent().map_or_else(|| PathBuf::from(&file), |folder| folder.join(&file)),
        devices: each.zip(nodes).map(|(each, nodes)| each.saturating_mul(nodes)),
        recompute: is_checkpointed.filter(|word| !is_off(word)).map(|_| Recompute::Full),
        seq: number(&LENGTHS),
        batch: ARGUMENTS.map(|name| number(&[name])),
        dtype,
    })
}

#[cfg(test)]
mod tests {
    use ir::Axis;
    use ir::random::mix;
    use planner::configuration::{Configuration, Offload, Place, Schedule, USUAL_ORDER, Zero};
    use planner::estimate::described::decoder;
    use planner::search::interop::Use;
    use planner::search::interop::launch::{Launch, files};
    use planner::tools::{Form, Sizes, Target};

    use super::super::{DecoderSizes, Known, read};
    use super::*;

    /// A random plan of 48 layers.
    fn random(seed: u64) -> Configuration {
        let mut state = seed;
        let mut pick = |all: &[u32]| {
            state = mix(state.wrapping_add(0x9e37_79b9));
            all[(state % all.len() as u64) as usize]
        };
        let mut c = Configuration {
            tp: pick(&[1, 1, 2, 4]),
            cp: pick(&[1, 1, 2]),
            pp: pick(&[1, 1, 2, 4]),
            dp: pick(&[1, 2, 4, 8]),
            microbatch: pick(&[1, 2]),
            ..Configuration::default()
        };
        c.sequence_parallel = c.tp > 1 && pick(&[0, 1, 1]) == 1;
        c.zero = Zero { stage: pick(&[0, 1, 2, 3, 3]) as u8, shard: pick(&[0, 0, 0, 2]) };
        // Shards over all ranks have one name, and without shards there is no part of the ranks.
        if c.zero.stage == 0 || c.zero.shard == c.dp * c.cp {
            c.zero.shard = 0;
        }
        let recompute =
            [Recompute::None, Recompute::Attention, Recompute::Full, Recompute::Layers(3 * c.pp)];
        c.recompute = recompute[pick(&[0, 0, 1, 2, 3]) as usize];
        let places = [Place::Device, Place::Device, Place::Host];
        let mut place = || places[pick(&[0, 1, 2]) as usize];
        let (optimizer, parameters) = (place(), place());
        c.offload = Offload { optimizer, parameters, activations: Place::Device };
        if c.pp > 1 {
            c.schedule = [Schedule::default(), Schedule::GPipe][pick(&[0, 0, 0, 1]) as usize];
            c.vpp = if c.schedule == Schedule::default() { pick(&[1, 2, 3]) } else { 1 };
            if c.vpp == 1 && pick(&[0, 1]) == 1 {
                c.stage_layers = vec![48 / c.pp; c.pp as usize];
                c.stage_layers[0] -= 1;
                c.stage_layers[c.pp as usize - 1] += 1;
            }
        }
        let inside = [Axis::Tp, Axis::Cp, Axis::Pp, Axis::Dp];
        c.order = [USUAL_ORDER, inside][pick(&[0, 0, 0, 1]) as usize];
        c
    }

    /// What a tool can express is written in files that are read as the same plan, with nothing
    /// unread that changes the answer: at least fifty random plans of each tool.
    #[test]
    fn files_that_start_a_tool_are_read_back() {
        let asked = std::env::var("SEED").ok().and_then(|text| text.parse().ok());
        for (tool, model) in
            [("megatron", "gpt2-xl"), ("deepspeed", "gpt2-xl"), ("torchtitan", "llama-3-70b")]
        {
            let target = Target::parse(tool).unwrap();
            let decoder = decoder(model).unwrap();
            let (shape, layers) = (decoder.shape.clone(), decoder.shape.layers);
            let sizes = Sizes { layers, seq: 1024, ..Sizes::default() };
            let mut whole = 0;
            for seed in asked.map_or(0..6000, |seed: u64| seed..seed + 1) {
                let c = random(seed);
                let is_even = c.stage_layers.is_empty() || layers == 48;
                let lost = target.refusals(&c, sizes, Form::Launch);
                if !lost.is_empty() || !is_even || c.check(layers).is_err() {
                    continue;
                }
                whole += 1;
                let purpose = Use { global_batch: 64 * c.dp, seq: 1024, layers };
                let devices = c.ranks() as u32;
                let per_node = if devices.is_multiple_of(8) { 8 } else { devices.min(4) };
                let (nodes, decoder) = (devices.div_ceil(per_node), Some(&decoder));
                let files =
                    files(&Launch { target, configuration: &c, purpose, decoder, nodes, per_node });
                let files = files.unwrap_or_else(|why| panic!("SEED={seed} {tool} {c}: {why}"));
                let script = &files.last().unwrap().text;
                let launched = launched(Path::new("dir/run.sh"), script, Allocation::default());
                let named = |one: &&planner::search::interop::launch::File| {
                    launched.as_ref().is_some_and(|started| started.file.ends_with(one.name))
                };
                let text = files.iter().find(named).map_or(script, |file| &file.text);
                let devices = launched.as_ref().and_then(|started| started.devices);
                let shape = Some(DecoderSizes::of(&shape));
                let script = launched.as_ref().map_or([None; 2], |started| started.batch);
                let known = Known { layers, devices, script, decoder: shape, ..Known::default() };
                let name = if tool == "torchtitan" { "train.toml" } else { "file" };
                let layout = read(name, text, known);
                let mut layout =
                    layout.unwrap_or_else(|wrong| panic!("SEED={seed} {c}: {wrong:?}"));
                if let Some(recompute) = launched.and_then(|started| started.recompute) {
                    layout.configuration.recompute = recompute;
                }
                assert_eq!(layout.configuration, c, "SEED={seed} {tool}\n{text}");
                assert_eq!(layout.global_batch, Some(purpose.global_batch), "SEED={seed} {tool}");
                assert_eq!(layout.unread(), [""; 0], "SEED={seed} {tool}: {c}\n{text}");
                assert_eq!(layout.notes, [""; 0], "SEED={seed} {tool}: {c}");
            }
            assert!(asked.is_some() || whole >= 50, "{tool}: {whole} whole");
        }
    }
}
