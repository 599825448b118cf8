//! Layouts that users have in files: flags of Megatron-LM in a script, JSON of DeepSpeed and of
//! Calculon, TOML of torchtitan, our own TOML and JSON.
//!
//! What a file says and a configuration does not is returned, never dropped silently; what is
//! impossible is reported with its place, all at once.

mod arithmetic;
mod calculon;
mod deepspeed;
mod launched;
mod megatron;
mod nested;
mod said;
mod script;
mod slurm;
mod torchtitan;

use std::path::Path;

use ir::import::nearest;
use ir::lora::Lora;
use ir::{Diagnostic, Span};
use planner::cluster::Cluster;
use planner::configuration::{Configuration, WORDS};
use planner::estimate::profile::{self, Exchange, ExpertPlacement, GANTLINE, PROFILES, Profile};
use planner::estimate::workload::Shape;
use planner::tools::{Target, Tool};
use serde_json::Value as Json;

pub use self::launched::{Launched, launched};
use self::said::{Said, Word, in_order};
pub use self::slurm::Allocation;
use crate::failure::Failure;
use crate::job::Precision;
use crate::{output, planned};

/// What a file does not say, or flags say in its place.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known {
    /// Layers of the model.
    pub layers: u32,
    /// Devices, if flags say how many.
    pub devices: Option<u32>,
    /// Devices of a node of the cluster.
    pub per_node: Option<u32>,
    /// Data-parallel ranks, if flags say how many: then devices need not be known.
    pub dp: Option<u32>,
    /// Tensor-parallel ranks, if flags say how many.
    pub tp: Option<u32>,
    /// Stages, if flags say how many.
    pub pp: Option<u32>,
    /// Context-parallel ranks, if flags say how many.
    pub cp: Option<u32>,
    /// Samples of a micro-batch, if flags say how many.
    pub microbatch: Option<u32>,
    /// Samples of a micro-batch and micro-batches of a step, if the script that names the file says
    /// how many.
    pub script: [Option<u32>; 2],
    /// Samples of a step, if flags say how many.
    pub global_batch: Option<u32>,
    /// The sizes of the model, where it is a decoder.
    pub decoder: Option<DecoderSizes>,
}

/// Sizes of a decoder that scripts name too; 0 where there is nothing of the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecoderSizes {
    /// Elements of a token between layers.
    pub hidden: u32,
    /// Heads of the queries.
    pub heads: u32,
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Elements inside the feed-forward layers.
    pub ffn: u32,
    /// Layers.
    pub layers: u32,
    /// Elements of a head; 0 where its parts differ (low-rank attention).
    pub head_dim: u32,
    /// Elements of the vector that keys and values are made of; 0 without low-rank attention.
    pub kv_rank: u32,
    /// Tokens that the model knows.
    pub vocab: u32,
    /// Whether the feed-forward layers are gated.
    pub is_gated: bool,
    /// Whether the head's weight is the embedding's.
    pub is_tied: bool,
    /// Experts of a layer.
    pub experts: u32,
    /// Experts of a token.
    pub top_k: u32,
}

impl DecoderSizes {
    /// Those of a shape.
    pub fn of(shape: &Shape) -> DecoderSizes {
        let Shape { hidden, heads, kv_heads, ffn, layers, vocab, .. } = *shape;
        let (is_gated, is_tied) = (shape.gated, shape.tied);
        let kv_rank = shape.low_rank.map_or(0, |rank| rank.kv_rank);
        let head_dim = if kv_rank == 0 { shape.head_dim } else { 0 };
        let routed = shape.routed.map(|routed| [routed.experts, routed.top_k]);
        let [experts, top_k] = routed.unwrap_or([0, 0]);
        DecoderSizes {
            hidden,
            heads,
            kv_heads,
            ffn,
            layers,
            head_dim,
            kv_rank,
            vocab,
            is_gated,
            is_tied,
            experts,
            top_k,
        }
    }
}

/// What a file says.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// Whose file it is.
    pub tool: &'static str,
    /// The configuration.
    pub configuration: Configuration,
    /// Samples of a step, if it says so.
    pub global_batch: Option<u32>,
    /// Tokens of a sample, if it says so.
    pub seq: Option<u32>,
    /// The element type, if our own plan says so.
    pub dtype: Option<Precision>,
    /// The model's name and its parameters, if our own plan says so.
    pub model: Option<(String, u64)>,
    /// Whether it is the text of a plan of ours, which decides all.
    pub is_plan: bool,
    /// The adapters that such a plan trains.
    pub lora: Option<Lora>,
    /// Names of what it says beside.
    pub left_out: Vec<String>,
    /// How it was read, where that is not plain.
    pub notes: Vec<String>,
    /// Which collectives run beside computation, if the tool has flags for that.
    pub overlap: Option<Overlap>,
    /// The name of the execution profile, where the file says more than the tool does.
    pub executor: Option<&'static str>,
    /// What it says of the executor beside, as `--assume` states it.
    pub facts: Vec<String>,
}

/// Which collectives of data parallelism run beside computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Reductions of gradients, beside the backward pass.
    pub gradients: bool,
    /// Gathers of sharded weights, beside the forward pass.
    pub weights: bool,
    /// Collectives of tensor parallelism, beside products.
    pub tensor: bool,
    /// Whether gradients are reduced in half precision.
    pub in_half: bool,
}

impl Layout {
    /// A configuration of which nothing else is said.
    pub fn of(configuration: Configuration) -> Layout {
        let (global_batch, seq, dtype, model, lora, left_out, notes) = Default::default();
        let facts = Vec::new();
        let (tool, overlap, executor, is_plan) = ("gantline", None, None, false);
        Layout {
            tool,
            configuration,
            global_batch,
            seq,
            dtype,
            model,
            is_plan,
            lora,
            left_out,
            notes,
            overlap,
            executor,
            facts,
        }
    }

    /// The adapters that it is asked about with: its own, or those that are asked for.
    ///
    /// # Errors
    /// `E5006` where a plan has others than are asked for.
    pub fn adapters(&self, path: &str, asked: Option<&Lora>) -> Result<Option<Lora>, Diagnostic> {
        let Some(asked) = asked else { return Ok(self.lora.clone()) };
        if !self.is_plan || self.lora.as_ref() == Some(asked) {
            return Ok(Some(asked.clone()));
        }
        let own = self.lora.as_ref();
        let own = own.map_or("no adapters".to_owned(), |lora| format!("`lora {lora}`"));
        let headline = format!("the plan has {own}, and `--lora {asked}` is asked for");
        let help = "leave out `--lora`, or plan again";
        Err(Diagnostic::error("E5006", Span::of(path), headline).help(help))
    }

    /// The tool that reads such files, where it trains.
    pub fn trainer(&self) -> Option<Tool> {
        Tool::TRAINING.into_iter().find(|tool| tool.name() == self.tool)
    }

    /// The execution profile of the tool that reads such files, where it is another's, on the
    /// devices of a cluster: that of a release, or of the newest one.
    pub fn profile_on(&self, cluster: &Cluster, release: Option<Target>) -> Option<Profile> {
        // A release has a profile of its own, but for a model that is not compiled.
        let counts = |name: &&str| release.is_none() || name.ends_with("eager");
        let said = self.executor.filter(counts).and_then(profile::of_framework);
        let usual = || {
            let target = release.or_else(|| self.trainer().map(Target::newest))?;
            target.profile_on(cluster)
        };
        let profile = said.or_else(usual)?;
        let when = |overlaps| if overlaps { Exchange::Overlapped } else { Exchange::AtEnd };
        Some(match self.overlap {
            Some(Overlap { gradients, weights, tensor, in_half }) => Profile {
                gradients: when(gradients),
                weights: when(weights),
                tensor_hidden: if tensor { profile.tensor_hidden } else { 0.0 },
                ..if in_half { profile } else { profile.summing_in_single() }
            },
            None => profile,
        })
    }

    /// Names of what it says beside and what a step's time or memory may depend on.
    pub fn unread(&self) -> Vec<&str> {
        let idle = match self.tool {
            "megatron" => megatron::IDLE,
            "deepspeed" => deepspeed::IDLE,
            "torchtitan" => torchtitan::IDLE,
            _ => &[],
        };
        let all = self.left_out.iter().map(String::as_str);
        all.filter(|name| !idle.iter().any(|begin| name.starts_with(begin))).collect()
    }

    /// What users are told of how the file was read, in lines, if there is anything.
    pub fn remarks(&self) -> Option<String> {
        let mut text: String = self.notes.iter().map(|note| format!("{note}\n")).collect();
        let unread = self.unread();
        if !unread.is_empty() {
            text += &format!("not read: {}\n", unread.join(", "));
        }
        (!text.is_empty()).then_some(text)
    }

    /// Tells users that beside the answer.
    pub fn note_remarks(&self) {
        if let Some(told) = self.remarks() {
            output::note(&told);
        }
    }
}

/// Reads a layout, or the text of a plan of a model.
///
/// # Errors
/// Those of [`read`] and of [`planned::read`].
pub fn read_for(
    source: &str,
    text: &str,
    model: Option<&Path>,
    known: Known,
) -> Result<Layout, Failure> {
    if !planned::is_plan(text) {
        return Ok(read(source, text, known)?);
    }
    let read = planned::read(source, text, model)?;
    let size = |number: usize| u32::try_from(number).ok();
    Ok(Layout {
        global_batch: size(read.plan.global_batch_size()),
        seq: size(read.plan.seq),
        dtype: Some(Precision::of_plan(&read.plan)),
        model: Some((read.plan.model.clone(), read.model.param_count())),
        notes: read.remark().into_iter().collect(),
        is_plan: true,
        lora: read.plan.lora.clone(),
        ..Layout::of(read.name.configuration)
    })
}

/// The most diagnostics of one file.
const DIAGNOSTICS_MAX: usize = 20;

fn bad(source: &str, headline: String) -> Diagnostic {
    Diagnostic::error("E5016", Span::of(source), headline)
}

/// Tables of torchtitan's TOML, by which it is known.
const TORCHTITAN: [&str; 4] = ["parallelism", "training", "activation_checkpoint", "job"];

/// Reads a layout.
///
/// # Errors
/// `E5016` for a text that is none of them, or that says something that cannot be; `E5001` where
/// the number of devices is needed and not known.
pub fn read(source: &str, text: &str, known: Known) -> Result<Layout, Vec<Diagnostic>> {
    read_any(source, text, known).map_err(|mut wrong| {
        wrong.truncate(DIAGNOSTICS_MAX);
        wrong
    })
}

fn read_any(source: &str, text: &str, known: Known) -> Result<Layout, Vec<Diagnostic>> {
    if text.trim_start().starts_with('{') {
        let json: Json =
            serde_json::from_str(text).map_err(|error| vec![not_json((source, text), &error)])?;
        return read_json((source, text), &json, known);
    }
    match nested::toml_words(source, text) {
        Ok(words) => {
            let table = |word: &Word| word.name.split('.').next().map(str::to_owned);
            let tables: Vec<String> = words.iter().filter_map(table).collect();
            let said = Said::new(source, words);
            match tables.iter().any(|table| TORCHTITAN.contains(&table.as_str())) {
                true => torchtitan::layout(said, known),
                false => ours(said),
            }
        }
        Err(_) if text.contains("--") && !source.ends_with(".toml") => {
            let allocation = Allocation { devices: known.devices, per_node: known.per_node };
            megatron::layout(Said::new(source, script::flags(text, allocation)), known)
        }
        Err(wrong) if source.ends_with(".toml") || text.contains('=') => Err(wrong),
        Err(_) => {
            let headline = "neither flags, nor JSON, nor TOML".to_owned();
            let help = "give a script of Megatron-LM, JSON of DeepSpeed or Calculon, TOML of \
                        torchtitan, or our own";
            Err(vec![bad(source, headline).help(help)])
        }
    }
}

fn not_json((source, text): (&str, &str), error: &serde_json::Error) -> Diagnostic {
    let help =
        "mend it there, or write it again: `gantline plan MODEL --cluster h100 -o plan.json`";
    let before = text.split_inclusive('\n').take(error.line().saturating_sub(1));
    let line: usize = before.map(str::len).sum();
    let at = line + error.column().saturating_sub(1);
    let bytes = nested::shown(text, at..at + 1);
    let told = error.to_string();
    let message = told.split(" at line ").next().unwrap_or_default();
    let span = Span { source: source.to_owned(), bytes };
    Diagnostic::error("E5016", span, format!("not JSON: {message}")).help(help)
}

/// What a plan over groups says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OfGroups {
    /// The layouts, each after the name of its group.
    pub text: String,
    /// Samples of a step.
    pub global_batch: Option<u32>,
    /// Tokens of a sample.
    pub seq: Option<u32>,
    /// The element type.
    pub dtype: Option<Precision>,
    /// The name of the model, and how many parameters it has.
    pub model: Option<(String, u64)>,
}

/// Reads a plan over groups of devices.
///
/// # Errors
/// `E5016` for a text that is none.
pub fn of_groups(source: &str, text: &str) -> Result<OfGroups, Diagnostic> {
    let help = "give what `plan --json` prints of these groups, or write layouts in `--config`";
    let json: Json = serde_json::from_str(text).unwrap_or_default();
    if json["schema"] != "gantline.plan-groups/1" {
        let headline = format!("`{source}` is no plan over groups, and the cluster has some");
        return Err(bad(source, headline).help(help));
    }
    let group = |group: &Json| {
        let layout = group["text"].as_str()?;
        Some(format!("{}: {layout}", group["group"].as_str()?))
    };
    let texts = json["groups"].as_array().into_iter().flatten().filter_map(group);
    let number = |name: &str| json[name].as_u64().and_then(|n| u32::try_from(n).ok());
    Ok(OfGroups {
        text: texts.collect::<Vec<_>>().join("; "),
        global_batch: number("gbs"),
        seq: number("seq"),
        dtype: json["dtype"].as_str().and_then(|name| name.parse().ok()),
        model: model(&json),
    })
}

/// The model that a plan is for, and how many parameters that has.
fn model(json: &Json) -> Option<(String, u64)> {
    json["model"].as_str().map(str::to_owned).zip(json["params"].as_u64())
}

/// The diagnostic of a plan over groups of devices, where a plan of one kind is wanted.
fn refuse_groups(source: &str, json: &Json) -> Result<(), Diagnostic> {
    if json["schema"] != "gantline.plan-groups/1" {
        return Ok(());
    }
    let headline = "the plan is over groups of other devices each, and one layout is wanted";
    let help = "write the `text` of one of its `groups` as `--config`, for that group alone";
    Err(Diagnostic::error("E5010", Span::of(source), headline).help(help))
}

fn read_json(
    (source, text): (&str, &str),
    json: &Json,
    known: Known,
) -> Result<Layout, Vec<Diagnostic>> {
    refuse_groups(source, json).map_err(|one| vec![one])?;
    let said = Said::new(source, nested::json_words(text));
    if json["schema"] == "gantline.plan/1" {
        return plan(&said, json);
    }
    match json.get("tensor_par") {
        Some(_) => calculon::layout(said),
        None => deepspeed::layout(said, known),
    }
}

/// What `plan --json` prints.
fn plan(said: &Said, json: &Json) -> Result<Layout, Vec<Diagnostic>> {
    let help = "give what `plan --json` prints";
    let Some(text) = json["text"].as_str() else {
        return Err(vec![bad(&said.source, "the plan has no `text`".to_owned()).help(help)]);
    };
    let at = said.place("text");
    let here = |wrong: Diagnostic| Diagnostic { code: "E5016", span: at.clone(), ..wrong };
    let read: Result<Configuration, Vec<Diagnostic>> = text.parse();
    let configuration = read.map_err(|all| all.into_iter().map(here).collect::<Vec<_>>())?;
    let profile = json["executor"]["profile"].as_str();
    let profile = PROFILES.iter().find(|known| Some(known.name) == profile);
    let whole = json.get("plan").map(|plan| serde_json::from_value(plan.clone()));
    if !whole.is_none_or(|whole| whole.is_ok_and(|c: Configuration| c == configuration)) {
        let headline = "`plan` and `text` do not say the same";
        return Err(vec![Diagnostic::error("E5016", at, headline).help(help)]);
    }
    let number = |name: &str| json[name].as_u64().and_then(|n| u32::try_from(n).ok());
    Ok(Layout {
        global_batch: number("gbs"),
        seq: number("seq"),
        dtype: json["dtype"].as_str().and_then(|name| name.parse().ok()),
        model: model(json),
        ..Layout::of(slicing(configuration, profile.unwrap_or(&GANTLINE)))
    })
}

/// The layout with the slices of experts that the plan's executor has, where others have not as
/// many: it is priced as that of any of them.
fn slicing(c: Configuration, executor: &Profile) -> Configuration {
    let others = [ExpertPlacement::BesideTensor, ExpertPlacement::FromTensor];
    let is_plain = others.iter().all(|other| executor.experts.told(*other, &c).etp == 0);
    let etp = if is_plain { 0 } else { executor.experts.slices(&c) };
    Configuration { etp, ..c }
}

/// Data-parallel ranks, if it is known how many there are: devices without those of other axes.
fn data_parallel(said: &mut Said, known: Known, c: &Configuration) -> Option<u32> {
    let devices = match (known.dp, known.devices) {
        (None, Some(devices)) => devices,
        (dp, _) => return dp,
    };
    let axes = [(known.tp, c.tp), (known.pp, c.pp), (known.cp, c.cp)];
    let others = axes.into_iter().map(|(flag, there)| flag.unwrap_or(there));
    let others = others.fold(1, u32::saturating_mul);
    if !devices.is_multiple_of(others) {
        let headline = format!("{devices} devices are not a multiple of tp · pp · cp = {others}");
        let help = "write `--devices` with a multiple of it, or `--dp N`";
        said.wrong.push(bad(&said.source, headline).help(help));
    }
    Some((devices / others).max(1))
}

/// The number of data-parallel ranks, for files that cannot be read without it; refused where
/// nothing says it, with 1 in its place.
fn data_parallel_ranks(said: &mut Said, known: Known, c: &Configuration) -> u32 {
    data_parallel(said, known, c).unwrap_or_else(|| {
        let headline = format!("`{}` does not say how many devices there are", said.source);
        let help = "write --devices N or --dp N";
        said.wrong.push(Diagnostic::error("E5001", Span::of("--devices"), headline).help(help));
        1
    })
}

/// Our own TOML: the words of a configuration's text as keys, with `gbs` and `seq`.
fn ours(mut said: Said) -> Result<Layout, Vec<Diagnostic>> {
    let batch = said.size("gbs");
    let seq = said.size("seq");
    let mut texts: Vec<String> = Vec::new();
    for word in said.words.iter().filter(|word| word.name != "gbs" && word.name != "seq") {
        let Word { name, value, places: [key, own] } = word;
        let at = |bytes| Span { source: said.source.clone(), bytes };
        if !WORDS.contains(&name.as_str()) {
            let names = || WORDS.into_iter().chain(["gbs", "seq"]);
            let help = match nearest(name, names()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("the keys are {}", names().collect::<Vec<_>>().join(", ")),
            };
            let headline = format!("unknown key `{name}`");
            said.wrong.push(Diagnostic::error("E5016", at(key.clone()), headline).help(help));
            continue;
        }
        let text = match (value, value.as_array()) {
            (Json::Bool(true), _) => name.clone(),
            (Json::Bool(false), _) if name == "sp" => continue,
            (_, Some(all)) => {
                let all: Vec<String> = all.iter().map(Json::to_string).collect();
                format!("{name}={}", all.join(".").replace('"', ""))
            }
            _ => format!("{name}={}", word.text()),
        };
        match text.parse::<Configuration>() {
            Ok(_) => texts.push(text),
            Err(found) => said.wrong.extend(found.into_iter().map(|wrong| {
                let headline = format!("`{name}` is {value}, which says nothing");
                Diagnostic { code: "E5016", span: at(own.clone()), headline, ..wrong }
            })),
        }
    }
    if !said.wrong.is_empty() {
        return Err(in_order(said.wrong));
    }
    let configuration = texts.join(" ").parse()?;
    Ok(Layout { global_batch: batch, seq, ..Layout::of(configuration) })
}

#[cfg(test)]
mod tests {
    use ir::Axis;
    use ir::random::mix;
    use planner::configuration::{Offload, Place, Recompute, Schedule, USUAL_ORDER};
    use planner::search::interop::{Tool, Use, export};

    use super::*;

    const LAYERS: u32 = 96;

    /// Nothing but the layers of a model.
    fn of(layers: u32) -> Known {
        Known { layers, ..Known::default() }
    }

    fn random(state: &mut u64) -> Configuration {
        let mut below = |n: u64| {
            *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(*state) % n
        };
        let places = [Place::Device, Place::Host, Place::Disk];
        let mut place = || places[below(4).min(2) as usize * usize::from(below(3) == 0)];
        let offload = Offload { optimizer: place(), parameters: place(), activations: place() };
        let mut c = Configuration {
            tp: 1 << below(4),
            cp: [1, 1, 2][below(3) as usize],
            ep: [1, 1, 2][below(3) as usize],
            pp: 1 << below(4),
            dp: 1 << below(4),
            microbatch: 1 << below(3),
            offload,
            ..Configuration::default()
        };
        c.sequence_parallel = c.tp > 1 && below(2) == 0;
        c.zero.stage = below(4) as u8;
        if c.zero.stage > 0 && c.dp > 2 && below(3) == 0 {
            c.zero.shard = 2 * c.cp;
        }
        c.recompute =
            [Recompute::None, Recompute::Attention, Recompute::Full, Recompute::Layers(3)]
                [below(4) as usize];
        if c.pp > 1 {
            c.schedule = Schedule::ALL[below(4) as usize];
            if c.schedule == Schedule::OneForwardOneBackward {
                c.vpp = [1, 2, 3][below(3) as usize];
            }
            if c.vpp == 1 && below(3) == 0 {
                let mut layers = vec![LAYERS / c.pp; c.pp as usize];
                let from = below(u64::from(c.pp) - 1) as usize;
                layers[from] -= 2;
                layers[c.pp as usize - 1] += 2;
                c.stage_layers = layers;
            }
        }
        c.order = match below(12) {
            0 => [Axis::Cp, Axis::Tp, Axis::Dp, Axis::Pp],
            1 => [Axis::Tp, Axis::Cp, Axis::Pp, Axis::Dp],
            _ => c.order,
        };
        c
    }

    /// A file that says all of a configuration is read as that configuration.
    #[test]
    fn what_is_exported_is_read_back() {
        let asked = std::env::var("SEED").ok().and_then(|text| text.parse().ok());
        for tool in Tool::ALL {
            let mut whole = 0;
            for seed in asked.map_or(0..2000, |seed: u64| seed..seed + 1) {
                let c = random(&mut seed.clone());
                let purpose = Use { global_batch: 64 * c.dp, seq: 2048, layers: LAYERS };
                let exported = export(&c, purpose, tool);
                // DeepSpeed is not told its stages.
                let (devices, pp) = (Some(c.ranks() as u32), Some(c.pp));
                let known = Known { devices, pp, ..of(LAYERS) };
                let read = read("file", &exported.text, known);
                let layout = read.unwrap_or_else(|d| panic!("SEED={seed} {c}: {d:?}"));
                assert_eq!(layout.tool, tool.name());
                assert_eq!(layout.global_batch, Some(purpose.global_batch), "SEED={seed} {c}");
                let says_seq = matches!(tool, Tool::Megatron | Tool::Torchtitan);
                assert_eq!(layout.seq, says_seq.then_some(purpose.seq), "SEED={seed} {c}");
                let batch = u64::from(purpose.global_batch);
                let read = &layout.configuration;
                assert!(read.microbatch_count(batch).is_some(), "SEED={seed}: {c} as {read}");
                if exported.left_out.is_empty() {
                    whole += 1;
                    assert_eq!(*read, c, "SEED={seed} {}: {c} as {read}", tool.name());
                }
            }
            assert!(asked.is_some() || whole >= 20, "{}: {whole} whole", tool.name());
        }
    }

    #[test]
    fn scripts_of_megatron_are_read() {
        let text = "#!/bin/bash\nTP=8  # a node\nGPUS_PER_NODE=8\nMODEL=(\n  --num-layers 96\n  \
                    --seq-length 2048 --lr 1e-4\n)\ntorchrun --nproc_per_node ${GPUS_PER_NODE} \
                    --nnodes=8 pretrain_gpt.py \\\n  --tensor-model-parallel-size $TP \\\n  \
                    --pipeline-model-parallel-size \"4\" --sequence-parallel \\\n  \
                    --micro-batch-size 2 --global-batch-size=64 --use-distributed-optimizer\n";
        let layout = read("run.sh", text, of(96)).unwrap();
        assert_eq!(layout.configuration.to_string(), "tp=8 pp=4 dp=2 mbs=2 sp zero=1");
        assert_eq!((layout.global_batch, layout.seq), (Some(64), Some(2048)));
        assert_eq!(layout.left_out, ["--lr"]);
        let unknown = read("run.sh", "--micro-batch-size $N", of(96));
        let codes: Vec<&str> = unknown.unwrap_err().iter().map(|d| d.code).collect();
        assert_eq!(codes, ["E5016", "E5001"]);
    }

    #[test]
    fn our_own_words_are_keys() {
        let text = "tp = 8\npp = 4\ndp = 2\nmbs = 1\nsp = true\nzero = \"3/2\"\n\
                    stages = [1, 1, 1, 3]\ngbs = 64\n\"offload-optimizer\" = \"host\"\n";
        let layout = read("x.toml", text, of(6)).unwrap();
        let said = "tp=8 pp=4 dp=2 mbs=1 sp zero=3/2 offload-optimizer=host stages=1.1.1.3";
        assert_eq!(layout.configuration.to_string(), said);
        assert_eq!(layout.global_batch, Some(64));
        for bad in ["tq = 3", "{", "{\"train_batch_size\": -3}", "nothing", "--x", ""] {
            let _ = read("bad", bad, Known { devices: Some(4), ..of(6) });
        }
        assert!(read("bad", "tq = 3", Known { devices: Some(4), ..of(6) }).is_err());
        let bad = "{\"train_batch_size\": -3}";
        assert!(read("bad", bad, Known { devices: Some(4), ..of(6) }).is_err());
        assert!(read("bad", "nothing at all", Known { devices: Some(4), ..of(6) }).is_err());
        assert_eq!(USUAL_ORDER, Configuration::default().order);
    }

    /// What is wrong with a file, with the texts that are marked.
    fn told(text: &str, known: Known) -> Vec<(String, String)> {
        let found = read("file", text, known).unwrap_err();
        let all = found.into_iter().map(|wrong| {
            assert!(wrong.help.is_some(), "{wrong:?}");
            (text[wrong.span.bytes].to_owned(), wrong.headline + ": " + &wrong.help.unwrap())
        });
        all.collect()
    }

    /// Values that are none are refused where they stand, all at once, with what is near.
    #[test]
    fn misspelt_values_are_marked() {
        let script = "A=x\nrun --recompute-granularity ful \\\n --recompute-method \"blok\"\n\
                      --data-parallel-sharding-strategy=optims --micro-batch-size 0 \\\n\
                      --tensor-model-paralel-size 2 --nproc_per_node 8\n";
        let json = "{\"zero_optimization\": {\"stage\": 4, \"offload_optimizer\":\n\
                    {\"device\": \"cpuu\"}}, \"train_batch_sise\": 8, \
                    \"activation_checkpointing\": {\"cpu_checkpointing\": \"ture\"}}";
        let titan = "[parallelism]\npipeline_parallel_degree = 2\n\
                     pipeline_parallel_schedule = \"1F2B\"\n[activation_checkpoint]\n\
                     mode = \"ful\"\n";
        let calculon = "{\"tensor_par\": 2, \"num_procs\": 8, \"data_par\": 2,\
                        \"activation_recompute\": \"attn\", \"optimizer_sharding\": 3}";
        let ours = "tq = 3\npp = \"x\"\ngbss = 8\nrecompute = \"ful\"\nstages = [1, \"a\"]\n";
        for (text, wrong) in [
            (
                script,
                &[
                    ("ful", "did you mean `full`?"),
                    ("\"blok\"", "did you mean `block`?"),
                    ("--data-parallel-sharding-strategy=optims", "did you mean `optim`?"),
                    ("0", "1 or more"),
                    ("--tensor-model-paralel-size", "did you mean `--tensor-model-parallel-size`?"),
                ][..],
            ),
            (
                json,
                &[
                    ("4", "a number of 0 to 3"),
                    ("\"cpuu\"", "did you mean `cpu`?"),
                    ("\"train_batch_sise\"", "did you mean `train_batch_size`?"),
                    ("\"ture\"", "true or false"),
                ],
            ),
            (titan, &[("\"1F2B\"", "did you mean `1F1B`?"), ("\"ful\"", "`full`")]),
            (calculon, &[("8", "write 4"), ("\"attn\"", "`attn_only`"), ("3", "true or false")]),
            (
                ours,
                &[
                    ("tq", "did you mean `tp`?"),
                    ("\"x\"", "a whole number"),
                    ("gbss", "did you mean `gbs`?"),
                    ("\"ful\"", "did you mean `recompute=full`?"),
                    ("[1, \"a\"]", "layers of each stage"),
                ],
            ),
            ("{\"tensor_par\": 2,\n  oops}", &[("o", "mend it")]),
            ("tp = 8\npp = \n", &[(" ", "write `key")]),
        ] {
            let found = told(text, Known { devices: Some(8), ..of(6) });
            let marked: Vec<&str> = found.iter().map(|(marked, _)| marked.as_str()).collect();
            assert_eq!(marked, wrong.iter().map(|(marked, _)| *marked).collect::<Vec<_>>());
            for ((_, told), (_, said)) in found.iter().zip(wrong) {
                assert!(told.contains(said), "{told}");
            }
        }
    }

    /// Three numbers of DeepSpeed's batch hold each other; what is `auto` is what flags say.
    #[test]
    fn batches_of_deepspeed_are_products() {
        let text = |batch: &str, micro: &str, steps: &str| {
            format!(
                "{{\"train_batch_size\": {batch}, \"train_micro_batch_size_per_gpu\": {micro}, \
                 \"gradient_accumulation_steps\": {steps}, \"zero_optimization\": {{\
                 \"stage\": 3, \"reduce_bucket_size\": \"auto\"}}}}"
            )
        };
        let auto = "\"auto\"";
        let ranks = Known { devices: Some(8), ..of(6) };
        let flags = |gbs, mbs| Known { global_batch: gbs, microbatch: mbs, ..ranks };
        for (said, known, [dp, micro, batch]) in [
            (text("64", "2", "4"), ranks, [8, 2, 64]),
            (text("64", "2", "4"), of(6), [8, 2, 64]),
            (text("64", "2", "4"), flags(Some(128), None), [8, 2, 128]),
            (text("64", "null", "4"), ranks, [8, 2, 64]),
            (text("64", "2", "null"), ranks, [8, 2, 64]),
            (text("64", "null", "null"), ranks, [8, 8, 64]),
            (text("null", "2", "4"), ranks, [8, 2, 64]),
            (text(auto, auto, auto), flags(Some(64), Some(4)), [8, 4, 64]),
            (text(auto, auto, "2"), flags(Some(64), None), [8, 4, 64]),
            (text(auto, "1", auto), flags(Some(64), None), [8, 1, 64]),
            (text("64", "2", "4"), Known { tp: Some(2), ..of(6) }, [8, 2, 64]),
            (text("64", "4", "4"), Known { tp: Some(2), ..ranks }, [4, 4, 64]),
        ] {
            let layout = read("ds.json", &said, known).unwrap_or_else(|all| panic!("{all:?}"));
            let c = &layout.configuration;
            assert_eq!([c.dp, c.microbatch, layout.global_batch.unwrap()], [dp, micro, batch]);
            assert_eq!(layout.left_out, [""; 0], "{said}");
            let filled = said.matches("size\": \"auto\"").count() - 1
                + said.matches("per_gpu\": \"auto\"").count();
            let told = layout.notes.len() + usize::from(said.contains("\"auto\", \"gradient_acc"));
            assert!(filled == 0 || told >= filled, "{said}: {:?}", layout.notes);
        }
        let open = read("ds.json", &text(auto, "1", auto), ranks).unwrap();
        assert_eq!(open.global_batch, None);
        for (said, known, wrong) in [
            (text("65", "2", "4"), ranks, "micro-batch 2 × accumulation 4 × 8 ranks are 64"),
            (text("65", "2", "4"), of(6), "not a multiple of micro-batch × accumulation = 8"),
            (text("64", "null", "3"), ranks, "not a multiple of ranks × accumulation = 24"),
            (text(auto, auto, auto), flags(Some(64), None), "write --mbs N"),
            (text(auto, auto, "3"), flags(Some(64), None), "ranks × accumulation = 24"),
        ] {
            let found = told(&said, known);
            assert!(found.len() == 1 && found[0].1.contains(wrong), "{found:?}");
        }
    }

    /// Flags without a value are there, whatever word comes next; what is unread is named, but for
    /// what no step depends on.
    #[test]
    fn flags_of_megatron_stand_alone() {
        let text = "A=(\n --sequence-parallel\n)\nB=(--use-distributed-optimizer)\nrun ${A[@]} \
                    --tensor-model-parallel-size 2 --overlap-grad-reduce pretrain.py --lr 3 \
                    --num-experts 8 --recompute-granularity full --recompute-method uniform \
                    --recompute-num-layers 2";
        let layout = read("run.sh", text, Known { devices: Some(8), ..of(96) }).unwrap();
        assert_eq!(
            layout.configuration.to_string(),
            "tp=2 pp=1 dp=4 mbs=1 sp zero=1 recompute=full"
        );
        assert_eq!(layout.left_out, ["--lr", "--num-experts"]);
        assert_eq!(layout.unread(), ["--num-experts"]);
        let overlap = Overlap { gradients: true, weights: false, tensor: false, in_half: false };
        assert_eq!(layout.overlap, Some(overlap));
        assert_eq!(layout.notes.len(), 1);
        let uneven = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3";
        let found = told(uneven, Known { devices: Some(8), ..of(32) });
        assert!(found[0].1.contains("a stage has 8 layers"), "{found:?}");
        let near = "[parallelism]\npipeline_parallel_degree = 2\n\
                    pipeline_parallel_schedule = \"interleavedZeroBubble\"\n";
        let layout = read("t.toml", near, Known { devices: Some(8), ..of(32) }).unwrap();
        assert!(layout.notes[0].contains("zb-h1"), "{:?}", layout.notes);
    }

    /// Stages that are laid out by hand, and shards over some of the ranks.
    #[test]
    fn layouts_of_megatron_are_unrolled() {
        let script = |pp: u32, layout: &str| {
            let size = format!("--pipeline-model-parallel-size {pp}");
            format!("run {size} --pipeline-model-parallel-layout {layout}\n")
        };
        let known = |layers| Known { devices: Some(8), ..of(layers) };
        for (pp, layout, layers, said) in [
            (4, "'E,t*4|t*5|t*4|t*3,L'", 16, "pp=4 dp=2 mbs=1 stages=4.5.4.3"),
            (4, "\"Ett|(tt|)*2ttL\"", 8, "pp=4 dp=2 mbs=1"),
            (4, "\"Ettt|(tt|)*2tL\"", 8, "pp=4 dp=2 mbs=1 stages=3.2.2.1"),
            (4, "\"Ett|(tt|)*6ttL\"", 16, "pp=4 dp=2 mbs=1 vpp=2"),
            (2, "\"'Et*3|t*2mL'\"", 5, "pp=2 dp=4 mbs=1"),
            (4, "\"E|(t|)*6L\"", 6, "pp=4 dp=2 mbs=1 vpp=2"),
            (4, "\"Et|(t|)*3(t|)*3L\"", 7, "pp=4 dp=2 mbs=1 vpp=2"),
            (4, "\"E|(t|)*4tt|t|L\"", 7, "pp=4 dp=2 mbs=1 vpp=2 stages=1.3.2.1"),
        ] {
            let layout = read("run.sh", &script(pp, layout), known(layers));
            let layout = layout.unwrap_or_else(|wrong| panic!("{wrong:?}"));
            assert_eq!(layout.configuration.to_string(), format!("tp=1 {said}"));
            assert_eq!(layout.left_out, [""; 0]);
        }
        for (layout, said) in [
            ("\"Et|x\"", "no layout of stages"),
            ("\"E|t*8L\"", "without a transformer layer"),
            ("\"Et*|tL\"", "no layout of stages"),
            ("\"E(t|t\"", "no layout of stages"),
            ("\"Et)*3|tL\"", "no layout of stages"),
            ("\"Et*9999999999|tL\"", "no layout of stages"),
            ("\"Et*3|t*4L\"", "7 layers in 2 stages"),
            ("\"Et*3|t*4|t*1L\"", "8 layers in 3 stages"),
            ("\"Et*3|t*2|t*2|t*1L\"", "chunks that are not priced"),
        ] {
            let found = told(&script(2, layout), known(8));
            assert!(found.len() == 1 && found[0].1.contains(said), "{layout}: {found:?}");
            assert_eq!(found[0].0, layout);
        }
        let parts = "run --use-distributed-optimizer --num-distributed-optimizer-instances 2\n";
        let layout = read("run.sh", parts, known(8)).unwrap();
        assert_eq!(layout.configuration.to_string(), "tp=1 pp=1 dp=8 mbs=1 zero=1/4");
        assert!(told(&parts.replace('2', "3"), known(8))[0].1.contains("dp · cp is 8"));
    }
}
