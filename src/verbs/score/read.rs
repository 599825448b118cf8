//! Layouts that users have in files: flags of Megatron-LM in a script, JSON of DeepSpeed and of
//! Calculon, TOML of torchtitan, our own TOML and JSON.
//!
//! What a file says and a configuration does not is returned, never dropped silently.

mod script;

use ir::{DType, Diagnostic, Span};
use planner::configuration::{Configuration, Place, Recompute, Schedule, Zero};
use serde_json::Value as Json;

/// What a file does not say.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// Layers of the model.
    pub layers: u32,
    /// Devices, if flags say how many.
    pub devices: Option<u32>,
    /// Data-parallel ranks, if flags say how many: then devices need not be known.
    pub dp: Option<u32>,
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
    pub dtype: Option<DType>,
    /// The model's name and its parameters, if our own plan says so.
    pub model: Option<(String, u64)>,
    /// Names of what it says beside.
    pub left_out: Vec<String>,
}

impl Layout {
    /// A configuration of which nothing else is said.
    pub fn of(configuration: Configuration) -> Layout {
        let (global_batch, seq, dtype, model, left_out) = Default::default();
        Layout { tool: "gantline", configuration, global_batch, seq, dtype, model, left_out }
    }
}

/// Names and values of a file in order, of which some are taken.
struct Said {
    source: String,
    pairs: Vec<(String, Json)>,
    taken: Vec<bool>,
    wrong: Vec<Diagnostic>,
}

fn bad(source: &str, headline: String) -> Diagnostic {
    Diagnostic::error("E5016", Span::of(source), headline)
}

impl Said {
    fn new(source: &str, pairs: Vec<(String, Json)>) -> Said {
        let taken = vec![false; pairs.len()];
        Said { source: source.to_owned(), pairs, taken, wrong: Vec::new() }
    }

    /// The value of a name; the last one where there are several.
    fn value(&mut self, name: &str) -> Option<Json> {
        let mut found = None;
        for ((key, value), taken) in self.pairs.iter().zip(&mut self.taken) {
            if key == name {
                *taken = true;
                found = Some(value.clone());
            }
        }
        found.filter(|value| !value.is_null())
    }

    fn number(&mut self, name: &str) -> Option<u32> {
        let value = self.value(name)?;
        let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
        let number = number.and_then(|n| u32::try_from(n).ok());
        if number.is_none() {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let headline = format!("`{name}` is `{text}`, which is no count");
            self.wrong.push(bad(&self.source, headline).help("write a whole number"));
        }
        number
    }

    /// A count of at least one; 1 where nothing is said.
    fn count(&mut self, name: &str) -> u32 {
        match self.number(name) {
            Some(0) => {
                let headline = format!("`{name}` is 0");
                self.wrong.push(bad(&self.source, headline).help("write 1 or more"));
                1
            }
            Some(number) => number,
            None => 1,
        }
    }

    fn is(&mut self, name: &str) -> bool {
        match self.value(name) {
            Some(Json::Bool(is)) => is,
            Some(Json::String(text)) => text.is_empty() || text == "true",
            Some(_) | None => false,
        }
    }

    fn text(&mut self, name: &str) -> Option<String> {
        let value = self.value(name)?;
        Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
    }

    fn layout(
        self,
        tool: &'static str,
        configuration: Configuration,
        [global_batch, seq]: [Option<u32>; 2],
    ) -> Result<Layout, Vec<Diagnostic>> {
        if !self.wrong.is_empty() {
            return Err(self.wrong);
        }
        let rest = self.pairs.into_iter().zip(self.taken).filter(|(_, taken)| !taken);
        let mut left_out: Vec<String> = rest.map(|((name, _), _)| name).collect();
        left_out.dedup();
        let (dtype, model) = (None, None);
        Ok(Layout { tool, configuration, global_batch, seq, dtype, model, left_out })
    }
}

/// Reads a layout.
///
/// # Errors
/// `E5016` for a text that is none of them, or that says something that cannot be; `E5001` where
/// the number of devices is needed and not known.
pub fn read(source: &str, text: &str, known: Known) -> Result<Layout, Vec<Diagnostic>> {
    if text.trim_start().starts_with('{') {
        let json: Json =
            serde_json::from_str(text).map_err(|error| vec![not_json(source, &error)])?;
        return read_json(source, &json, known);
    }
    if let Ok(table) = text.parse::<toml::Table>()
        && let Ok(json) = serde_json::to_value(&table)
    {
        let said = Said::new(source, flat("", &json));
        return match table.contains_key("parallelism") {
            true => torchtitan(said, known),
            false => ours(said),
        };
    }
    if text.contains("--") {
        return megatron(Said::new(source, script::flags(text)), known);
    }
    let headline = "neither flags, nor JSON, nor TOML".to_owned();
    let help = "give a script of Megatron-LM, JSON of DeepSpeed or Calculon, TOML of torchtitan, \
                or our own";
    Err(vec![bad(source, headline).help(help)])
}

fn not_json(source: &str, error: &serde_json::Error) -> Diagnostic {
    let help =
        "mend it there, or write it again: `gantline plan MODEL --cluster h100 -o plan.json`";
    bad(source, format!("not JSON: {error}")).help(help)
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
    pub dtype: Option<DType>,
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

fn read_json(source: &str, json: &Json, known: Known) -> Result<Layout, Vec<Diagnostic>> {
    refuse_groups(source, json).map_err(|one| vec![one])?;
    if json["schema"] == "gantline.plan/1" {
        let Some(text) = json["text"].as_str() else {
            let headline = "the plan has no `text`".to_owned();
            return Err(vec![bad(source, headline).help("give what `plan --json` prints")]);
        };
        let configuration: Configuration = text.parse()?;
        let said = json.get("plan").map(|plan| serde_json::from_value(plan.clone()));
        if !said.is_none_or(|said| said.is_ok_and(|said: Configuration| said == configuration)) {
            let headline = "`plan` and `text` do not say the same".to_owned();
            return Err(vec![bad(source, headline).help("give what `plan --json` prints")]);
        }
        let number = |name: &str| json[name].as_u64().and_then(|n| u32::try_from(n).ok());
        return Ok(Layout {
            tool: "gantline",
            configuration,
            global_batch: number("gbs"),
            seq: number("seq"),
            dtype: json["dtype"].as_str().and_then(|name| name.parse().ok()),
            model: model(json),
            left_out: Vec::new(),
        });
    }
    let said = Said::new(source, flat("", json));
    match json.get("tensor_par") {
        Some(_) => calculon(said),
        None => deepspeed(said, known),
    }
}

/// Names of nested values, joined by points.
fn flat(before: &str, json: &Json) -> Vec<(String, Json)> {
    let Json::Object(object) = json else {
        return vec![(before.trim_end_matches('.').to_owned(), json.clone())];
    };
    object.iter().flat_map(|(name, value)| flat(&format!("{before}{name}."), value)).collect()
}

/// Data-parallel ranks: devices without those of other axes.
fn data_parallel(said: &mut Said, known: Known, c: &Configuration) -> u32 {
    if let Some(dp) = known.dp {
        return dp;
    }
    let Some(devices) = known.devices else {
        let headline = format!("`{}` does not say how many devices there are", said.source);
        let help = "write --devices N or --dp N";
        said.wrong.push(Diagnostic::error("E5001", Span::of("--devices"), headline).help(help));
        return 1;
    };
    let others = [c.tp, c.pp, c.cp].into_iter().fold(1, u32::saturating_mul);
    if !devices.is_multiple_of(others) {
        let headline = format!("{devices} devices are not a multiple of tp · pp · cp = {others}");
        said.wrong.push(bad(&said.source, headline));
    }
    (devices / others).max(1)
}

fn megatron(mut said: Said, known: Known) -> Result<Layout, Vec<Diagnostic>> {
    let mut c = Configuration {
        tp: said.count("--tensor-model-parallel-size"),
        pp: said.count("--pipeline-model-parallel-size"),
        cp: said.count("--context-parallel-size"),
        ep: said.count("--expert-model-parallel-size"),
        microbatch: said.count("--micro-batch-size"),
        sequence_parallel: said.is("--sequence-parallel"),
        ..Configuration::default()
    };
    if let Some(layers) = said.number("--num-layers-per-virtual-pipeline-stage") {
        c.vpp = (known.layers / c.pp / layers.max(1)).max(1);
    }
    if let Some(chunks) = said.number("--num-virtual-stages-per-pipeline-rank") {
        c.vpp = chunks;
    }
    let first = said.number("--decoder-first-pipeline-num-layers");
    let last = said.number("--decoder-last-pipeline-num-layers");
    if (first.is_some() || last.is_some()) && c.pp > 1 {
        c.stage_layers = stages(known.layers, c.pp, first, last);
    }
    if said.is("--use-distributed-optimizer") {
        c.zero.stage = 1;
    }
    let strategy = said.text("--data-parallel-sharding-strategy");
    if said.is("--use-megatron-fsdp") {
        c.zero.stage = match strategy.as_deref() {
            Some("no_shard") | None => c.zero.stage,
            Some("optim") => 1,
            Some("optim_grads") => 2,
            Some(_) => 3,
        };
    }
    if said.is("--use-torch-fsdp2") {
        c.zero.stage = 3;
    }
    let count = said.number("--recompute-num-layers");
    let method = said.text("--recompute-method");
    c.recompute = match said.text("--recompute-granularity").as_deref() {
        Some("selective") => Recompute::Attention,
        Some("full") if method.as_deref() == Some("block") => Recompute::Layers(count.unwrap_or(1)),
        Some("full") => Recompute::Full,
        _ if said.is("--recompute-activations") => Recompute::Attention,
        _ => Recompute::None,
    };
    if said.is("--optimizer-cpu-offload") {
        c.offload.optimizer = Place::Host;
    }
    // Says how, or follows from the rest.
    for name in ["--bf16", "--ckpt-format", "--use-precision-aware-optimizer"] {
        said.value(name);
    }
    let nodes = said.number("--nnodes").unwrap_or(1);
    let each = said.number("--nproc_per_node").or_else(|| said.number("--nproc-per-node"));
    let devices = known.devices.or_else(|| Some(each?.saturating_mul(nodes)));
    c.dp = data_parallel(&mut said, Known { devices, ..known }, &c);
    let batch = said.number("--global-batch-size");
    let seq = said.number("--seq-length");
    said.layout("megatron", c, [batch, seq])
}

/// Layers of stages where the first, the last or both are named: the others share what is left.
fn stages(layers: u32, pp: u32, first: Option<u32>, last: Option<u32>) -> Vec<u32> {
    let named = [first, last].into_iter().flatten();
    let others = pp - named.clone().count() as u32;
    let rest = layers.saturating_sub(named.fold(0, u32::saturating_add));
    let mut left = others;
    let mut given = 0;
    (0..pp)
        .map(|stage| match (stage, first, last) {
            (0, Some(first), _) => first,
            (stage, _, Some(last)) if stage + 1 == pp => last,
            _ => {
                let size = (rest - given).div_ceil(left.max(1));
                (given, left) = (given + size, left.saturating_sub(1));
                size
            }
        })
        .collect()
}

fn deepspeed(mut said: Said, known: Known) -> Result<Layout, Vec<Diagnostic>> {
    let place = |name: Option<String>| match name.as_deref() {
        Some("cpu") => Place::Host,
        Some("nvme") => Place::Disk,
        _ => Place::Device,
    };
    let mut c = Configuration {
        microbatch: said.count("train_micro_batch_size_per_gpu"),
        tp: said.count("tensor_parallel.autotp_size"),
        cp: said.count("sequence_parallel_size"),
        ..Configuration::default()
    };
    let stage = said.number("zero_optimization.stage").unwrap_or(0);
    c.zero = Zero { stage: stage.min(255) as u8, shard: 0 };
    c.offload.optimizer = place(said.text("zero_optimization.offload_optimizer.device"));
    c.offload.parameters = place(said.text("zero_optimization.offload_param.device"));
    if said.is("activation_checkpointing.cpu_checkpointing") {
        c.offload.activations = Place::Host;
    }
    let batch = said.number("train_batch_size");
    let steps = said.number("gradient_accumulation_steps");
    c.dp = match (known.devices, batch, steps) {
        (None, Some(batch), Some(steps)) => {
            let at_once = c.microbatch.saturating_mul(steps.max(1));
            if !batch.is_multiple_of(at_once) {
                let headline = format!("{batch} samples are not a multiple of {at_once}");
                said.wrong.push(bad(&said.source, headline));
            }
            (batch / at_once).max(1)
        }
        _ => data_parallel(&mut said, known, &c),
    };
    let at_once = c.microbatch.saturating_mul(c.dp);
    let batch = batch.or_else(|| Some(steps?.saturating_mul(at_once)));
    said.layout("deepspeed", c, [batch, None])
}

fn torchtitan(mut said: Said, known: Known) -> Result<Layout, Vec<Diagnostic>> {
    let mut c = Configuration {
        tp: said.count("parallelism.tensor_parallel_degree"),
        cp: said.count("parallelism.context_parallel_degree"),
        pp: said.count("parallelism.pipeline_parallel_degree"),
        ep: said.count("parallelism.expert_parallel_degree"),
        ..Configuration::default()
    };
    c.sequence_parallel = c.tp > 1;
    let copies = said.count("parallelism.data_parallel_replicate_degree");
    let name = "parallelism.data_parallel_shard_degree";
    let is_rest = said.value(name).is_none_or(|value| value.as_i64() == Some(-1));
    let shard =
        if is_rest { data_parallel(&mut said, known, &c) / copies } else { said.count(name) };
    c.dp = copies.saturating_mul(shard.max(1));
    if shard > 1 || c.cp > 1 {
        let is_all = copies == 1;
        let ranks = shard.max(1).saturating_mul(c.cp);
        c.zero = Zero { stage: 3, shard: if is_all { 0 } else { ranks } };
    }
    let local = said.number("training.local_batch_size");
    let local = local.or_else(|| said.number("training.batch_size")).unwrap_or(1).max(1);
    let batch = said.number("training.global_batch_size");
    let batch = batch.or(Some(local.saturating_mul(c.dp)));
    let seq = said.number("training.seq_len");
    let chunk = said.number("parallelism.pipeline_parallel_layers_per_stage");
    // What the embedding and the loss count for, in layers.
    let mut end = |name: &str| said.number(&format!("parallelism.pipeline_parallel_{name}"));
    let first = end("first_stage_less_layers").unwrap_or(1);
    let last = end("last_stage_less_layers").unwrap_or(1);
    let microbatch = said.number("parallelism.pipeline_parallel_microbatch_size");
    let schedule = said.text("parallelism.pipeline_parallel_schedule");
    c.microbatch = local;
    if c.pp > 1 {
        c.microbatch = microbatch.unwrap_or(1).max(1);
        c.schedule = match schedule.as_deref() {
            Some("GPipe") => Schedule::GPipe,
            Some("InterleavedZeroBubble" | "ZBVZeroBubble") => Schedule::ZeroBubbleH1,
            _ => Schedule::OneForwardOneBackward,
        };
        if schedule.as_deref() == Some("Interleaved1F1B") {
            let all = known.layers.saturating_add(first).saturating_add(last);
            c.vpp = chunk.map_or(2, |chunk| all.div_ceil(chunk.max(1)) / c.pp).max(1);
        }
    }
    c.recompute = match said.text("activation_checkpoint.mode").as_deref() {
        Some("full") => Recompute::Full,
        Some("selective") => Recompute::Attention,
        _ => Recompute::None,
    };
    said.layout("torchtitan", c, [batch, seq])
}

fn calculon(mut said: Said) -> Result<Layout, Vec<Diagnostic>> {
    let place = |is: bool| if is { Place::Host } else { Place::Device };
    let mut c = Configuration {
        tp: said.count("tensor_par"),
        pp: said.count("pipeline_par"),
        dp: said.count("data_par"),
        microbatch: said.count("microbatch_size"),
        vpp: said.count("pipeline_interleaving"),
        ..Configuration::default()
    };
    c.sequence_parallel = said.text("tensor_par_comm_type").as_deref() == Some("rs_ag") && c.tp > 1;
    c.zero.stage = u8::from(said.is("optimizer_sharding"));
    c.recompute = match said.text("activation_recompute").as_deref() {
        Some("full") => Recompute::Full,
        Some("attn_only") => Recompute::Attention,
        _ => Recompute::None,
    };
    c.offload.parameters = place(said.is("weight_offload"));
    c.offload.activations = place(said.is("activations_offload"));
    c.offload.optimizer = place(said.is("optimizer_offload"));
    let procs = said.number("num_procs");
    if procs.is_some_and(|procs| u64::from(procs) != c.ranks()) {
        let headline = format!("`num_procs` is not tp · pp · dp = {}", c.ranks());
        said.wrong.push(bad(&said.source, headline));
    }
    // Follows from the rest.
    for name in ["seq_par_ag_redo", "training", "tensor_par_net", "data_par_net"] {
        said.value(name);
    }
    said.value("pipeline_par_net");
    let batch = said.number("batch_size");
    said.layout("calculon", c, [batch, None])
}

/// Our own TOML: the words of a configuration's text as keys, with `gbs` and `seq`.
fn ours(mut said: Said) -> Result<Layout, Vec<Diagnostic>> {
    let batch = said.number("gbs");
    let seq = said.number("seq");
    let words: Vec<String> = said
        .pairs
        .iter()
        .filter(|(name, _)| name != "gbs" && name != "seq")
        .filter(|(name, value)| name != "sp" || *value != Json::Bool(false))
        .map(|(name, value)| match (value, value.as_array()) {
            (Json::Bool(true), _) => name.clone(),
            (_, Some(all)) => {
                let all: Vec<String> = all.iter().map(Json::to_string).collect();
                format!("{name}={}", all.join(".").replace('"', ""))
            }
            _ => format!("{name}={}", value.as_str().map_or(value.to_string(), str::to_owned)),
        })
        .collect();
    match words.join(" ").parse::<Configuration>() {
        Ok(c) => {
            said.taken.fill(true);
            said.layout("gantline", c, [batch, seq])
        }
        Err(found) => Err([said.wrong, found].concat()),
    }
}

#[cfg(test)]
mod tests {
    use ir::random::mix;
    use planner::configuration::{Offload, RankAxis, USUAL_ORDER};
    use planner::space::foreign::{Tool, Use, export};

    use super::*;

    const LAYERS: u32 = 96;

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
                layers[0] -= 2;
                layers[c.pp as usize - 1] += 2;
                c.stage_layers = layers;
            }
        }
        if below(6) == 0 {
            c.order = [RankAxis::Cp, RankAxis::Tp, RankAxis::Dp, RankAxis::Pp];
        }
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
                let known = Known { layers: LAYERS, devices: Some(c.ranks() as u32), dp: None };
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
                } else {
                    assert_ne!(*read, c, "SEED={seed} {}: {:?}", tool.name(), exported.left_out);
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
        let layout = read("run.sh", text, Known { layers: 96, devices: None, dp: None }).unwrap();
        assert_eq!(layout.configuration.to_string(), "tp=8 pp=4 dp=2 mbs=2 sp zero=1");
        assert_eq!((layout.global_batch, layout.seq), (Some(64), Some(2048)));
        assert_eq!(layout.left_out, ["--num-layers", "--lr"]);
        let unknown =
            read("run.sh", "--micro-batch-size $N", Known { layers: 96, devices: None, dp: None });
        let codes: Vec<&str> = unknown.unwrap_err().iter().map(|d| d.code).collect();
        assert_eq!(codes, ["E5016", "E5001"]);
    }

    #[test]
    fn our_own_words_are_keys() {
        let text = "tp = 8\npp = 4\ndp = 2\nmbs = 1\nsp = true\nzero = \"3/2\"\n\
                    stages = [1, 1, 1, 3]\ngbs = 64\n\"offload-optimizer\" = \"host\"\n";
        let layout = read("x.toml", text, Known { layers: 6, devices: None, dp: None }).unwrap();
        let said = "tp=8 pp=4 dp=2 mbs=1 sp zero=3/2 offload-optimizer=host stages=1.1.1.3";
        assert_eq!(layout.configuration.to_string(), said);
        assert_eq!(layout.global_batch, Some(64));
        for bad in ["tq = 3", "{", "{\"train_batch_size\": -3}", "nothing", "--x", ""] {
            let _ = read("bad", bad, Known { layers: 6, devices: Some(4), dp: None });
        }
        assert!(read("bad", "tq = 3", Known { layers: 6, devices: Some(4), dp: None }).is_err());
        let bad = "{\"train_batch_size\": -3}";
        assert!(read("bad", bad, Known { layers: 6, devices: Some(4), dp: None }).is_err());
        assert!(
            read("bad", "nothing at all", Known { layers: 6, devices: Some(4), dp: None }).is_err()
        );
        assert_eq!(USUAL_ORDER, Configuration::default().order);
    }
}
