//! A measured run, as a row of a table, becomes a question to the estimator.
//!
//! The columns are those of published tables of training runs: the model's shape, the devices, the
//! links, the layout, the framework. What a row leaves blank takes a default, and says so.

mod adapters;
pub mod inference;
mod words;

use super::profile::{self, Printed, Profile};
use super::rates::Arithmetic;
use super::workload::{Item, Routed, Shape, Workload};
use super::{Estimate, Estimator, Job, chosen};
use crate::cluster::Cluster;
use crate::configuration::{Configuration, Recompute, Zero};
use crate::machine::Machine;
use crate::search::models;

/// The columns that a table must have.
pub const COLUMNS: [&str; 8] =
    ["row_id", "layers", "hidden", "heads", "seq_len", "gpu", "n_gpus", "global_batch"];

/// The columns of models and devices that are read where a table of either kind has them.
pub const SHARED: [&str; 16] = [
    "params_b",
    "kv_heads",
    "head_dim",
    "ffn",
    "gated_mlp",
    "vocab",
    "n_experts",
    "topk",
    "moe_ffn",
    "dense_layers",
    "shared_ffn",
    "gpu_mem_gb",
    "gpus_per_node",
    "tp",
    "pp",
    "ep",
];

/// The other columns that are read where a table of training has them.
pub const OPTIONAL: [&str; 24] = [
    "etp",
    "model",
    "intra_bw_gb_s_per_gpu_uni",
    "inter_bw_gb_s_per_node_uni",
    "vp",
    "dp",
    "cp",
    "zero_stage",
    "seq_parallel",
    "micro_batch",
    "grad_accum",
    "recompute",
    "precision",
    "framework",
    "step_time_s",
    "peak_mem_gib",
    "mem_kind",
    "usable_for_time",
    "usable_for_memory",
    "file",
    "lora_rank",
    "lora_targets",
    "base_weights",
    "peak_mem_gb",
];

/// A row: the text of a column, empty where the table has none.
pub trait Columns {
    /// The text of a column.
    fn text(&self, column: &str) -> &str;
}

/// A row as the estimator understands it.
#[derive(Clone, Debug)]
pub struct Question {
    /// The model.
    pub work: Workload,
    /// The devices and links.
    pub cluster: Cluster,
    /// The framework.
    pub profile: Profile,
    /// The batch and arithmetic.
    pub job: Job,
    /// The layout.
    pub configuration: Configuration,
    /// What the row does not say and was taken as: `column=value`.
    pub defaults: Vec<String>,
}

impl Question {
    /// Answers it.
    ///
    /// # Errors
    /// Why it cannot be answered, in words.
    pub fn answer(&self) -> Result<Estimate, String> {
        self.answer_blind_to("")
    }

    /// Whether a device has room for what an answer says, or for the same with all layers computed
    /// again where the row leaves open which are.
    pub fn fits(&self, answer: &Estimate, table: &str) -> bool {
        let has_room = |estimate: &Estimate| {
            estimate.memory.total_bytes() <= self.cluster.device.memory_bytes.value
        };
        let is_open = self.defaults.iter().any(|default| default.starts_with("recompute="));
        has_room(answer)
            || is_open && {
                let mut least = self.clone();
                least.configuration.recompute = Recompute::Full;
                least.answer_blind_to(table).is_ok_and(|estimate| has_room(&estimate))
            }
    }

    /// Answers the question without the constants that were chosen with runs of `table` in view;
    /// the row has to be read with [`read_without_source`].
    ///
    /// # Errors
    /// As [`Question::answer`].
    pub fn answer_blind_to(&self, table: &str) -> Result<Estimate, String> {
        let Question { work, cluster, profile, job, .. } = self;
        let estimator = Estimator::without_source(table, work, cluster, *profile, *job);
        let estimator = estimator.map_err(|diagnostic| diagnostic.headline)?;
        let found = estimator.estimate_run(&self.configuration);
        found.map_err(|all| all.into_iter().map(|d| d.headline).collect::<Vec<_>>().join("; "))
    }
}

/// Reads a row.
///
/// # Errors
/// Why the row cannot be expressed, in words.
pub fn read(row: &dyn Columns) -> Result<Question, String> {
    read_without_source("", row)
}

/// Reads a row without the constants that were chosen with runs of `table` in view ([`chosen`]).
///
/// # Errors
/// As [`read`].
pub fn read_without_source(table: &str, row: &dyn Columns) -> Result<Question, String> {
    let mut reader = RowReader { row, defaults: Vec::new() };
    let mut shape = reader.shape()?;
    let mut profile = reader.profile();
    chosen::set_aside_of_style(table, &mut profile);
    profile.prints = reader.printed()?.unwrap_or(profile.prints);
    if let Some(words) = profile.vocabulary.filter(|words| *words != shape.vocab) {
        shape.vocab = words;
        reader.defaults.push(format!("vocab={words}"));
    }
    let work = shape
        .workload()
        .map_err(|all| all.into_iter().map(|d| d.headline).collect::<Vec<_>>().join("; "))?;
    let work = reader.adapted(work)?;
    let ranks = reader.ranks()?;
    let mut cluster = reader.cluster(ranks)?;
    if let Some(outer) = cluster.levels.get_mut(1) {
        outer.name = profile.fabric.to_owned();
    }
    let arithmetic = reader.arithmetic()?;
    let mut configuration = reader.configuration(&profile, ranks, work.depth())?;
    if profile.balances_stages && (2..=work.depth()).contains(&configuration.pp) {
        configuration.stage_layers = balanced(&work, configuration.pp);
    }
    let mut items = work.layers.iter().flat_map(|layer| &layer.items);
    let has_experts = items.any(|item| matches!(item, Item::Experts { .. }));
    if configuration.ep > 1 && !has_experts {
        configuration.ep = 1;
        reader.defaults.push("ep=1".into());
    }
    if !has_experts {
        configuration.etp = 0;
    }
    let global_batch = reader.global_batch(&configuration)?;
    let job = Job { global_batch, arithmetic };
    Ok(Question { work, cluster, profile, job, configuration, defaults: reader.defaults })
}

/// Layers of stages with about as many operations each, the head counted with the last: a stage
/// ends with the layer that brings the sum so far to its share (`build_model` of nanotron). A stage
/// may have no layer.
fn balanced(work: &Workload, stages: u32) -> Vec<u32> {
    let flops = |items: &[Item]| items.iter().map(|item| item.forward_flops(0)).sum::<f64>();
    let each: Vec<f64> = work
        .layers
        .iter()
        .flat_map(|layer| vec![flops(&layer.items); layer.count as usize])
        .collect();
    let share = (each.iter().sum::<f64>() + flops(&work.last)) / f64::from(stages);
    let mut counts = vec![0; stages as usize];
    let (mut stage, mut before) = (0, 0.0);
    for layer in each {
        // Sums of equal numbers may be a little less than their product.
        let reached = share * (stage as f64 + 1.0) * (1.0 - 1e-9);
        if stage + 1 < stages as usize && before >= reached {
            stage += 1;
        }
        counts[stage] += 1;
        before += layer;
    }
    counts
}

/// The published shape of a name, however it is written.
fn published(name: &str) -> Option<Shape> {
    let plain = words::plain(name);
    models::names().find(|known| words::plain(known) == plain).and_then(models::shape)
}

/// Layers and hidden size of a model of `billions` billion parameters: `P = 12 l h²` with the
/// ratio of most published models, `h = 128 l`.
fn usual_size(billions: f64) -> (u32, u32) {
    let layers = (billions * 1e9 / (12.0 * 128.0 * 128.0)).cbrt().round().clamp(1.0, 4096.0);
    (layers as u32, 128 * layers as u32)
}

struct RowReader<'r> {
    row: &'r dyn Columns,
    defaults: Vec<String>,
}

impl RowReader<'_> {
    fn number(&self, column: &str) -> Result<Option<f64>, String> {
        let text = self.row.text(column).trim();
        if text.is_empty() {
            return Ok(None);
        }
        let plain = match text.to_lowercase().as_str() {
            "true" | "yes" => "1".to_owned(),
            "false" | "no" => "0".to_owned(),
            lower => lower.replace(',', ""),
        };
        match plain.parse::<f64>() {
            Ok(number) if number.is_finite() && number >= 0.0 => Ok(Some(number)),
            Ok(_) | Err(_) => Err(format!("`{column}` is `{text}`, not a number")),
        }
    }

    fn count(&self, column: &str) -> Result<Option<u32>, String> {
        let number = self.number(column)?;
        match number {
            Some(n) if n.fract() == 0.0 && n <= f64::from(u32::MAX) => Ok(Some(n as u32)),
            Some(n) => Err(format!("`{column}` is {n}, not a count")),
            None => Ok(None),
        }
    }

    fn needed(&self, column: &str) -> Result<u32, String> {
        self.count(column)?.ok_or_else(|| format!("`{column}` is blank"))
    }

    /// A count that has to stand in the row or to follow from the model.
    fn count_from(&mut self, column: &str, default: Option<u32>) -> Result<u32, String> {
        match default {
            Some(default) => self.count_or(column, default),
            None => self.needed(column),
        }
    }

    fn count_or(&mut self, column: &str, default: u32) -> Result<u32, String> {
        if let Some(count) = self.count(column)? {
            return Ok(count);
        }
        self.defaults.push(format!("{column}={default}"));
        Ok(default)
    }

    fn flag_or(&mut self, column: &str, default: bool) -> Result<bool, String> {
        Ok(self.count_or(column, u32::from(default))? != 0)
    }

    /// A blank column follows from the model's name, where that is known, else from the others.
    fn shape(&mut self) -> Result<Shape, String> {
        let name = self.row.text("model").to_owned();
        let lower = name.to_lowercase();
        if lower.contains("lora") && self.row.text("lora_rank").trim().is_empty() {
            return Err(format!(
                "`model` is `{name}`, and no `lora_rank` says what its adapters are"
            ));
        }
        let known = published(&name);
        let of = |field: fn(&Shape) -> u32| known.as_ref().map(field);
        let size = self.number("params_b")?.filter(|billions| *billions > 0.0);
        let usual = size.map(usual_size);
        let hidden = self.count_from("hidden", of(|k| k.hidden).or(usual.map(|u| u.1)))?;
        let heads = self.count_or("heads", of(|k| k.heads).unwrap_or(self.usual_heads(hidden)?))?;
        let layers = self.count_from("layers", of(|k| k.layers).or(usual.map(|u| u.0)))?;
        let gated = self.flag_or("gated_mlp", known.as_ref().is_some_and(|k| k.gated))?;
        let routed = self.routed(&lower, hidden, known.as_ref())?;
        let low_rank = match &known {
            Some(known) => known.low_rank,
            None => (lower.contains("deepseek") && routed.is_some()).then_some(models::LOW_RANK),
        };
        // Another size of a known name has its own heads.
        let alike = known.as_ref().filter(|known| known.hidden == hidden && known.heads == heads);
        let [kv_heads, head_dim] = match alike {
            Some(known) => [known.kv_heads, known.head_dim],
            None => [heads, (hidden / heads.max(1)).max(1)],
        };
        let kv_heads = match low_rank {
            Some(_) => heads,
            None => self.count_or("kv_heads", kv_heads)?,
        };
        let head_dim = self.count_or("head_dim", head_dim)?;
        let inner = alike.map_or(hidden.saturating_mul(4), |known| known.ffn);
        let ffn = match routed {
            Some(routed) if routed.dense_layers == 0 => 0,
            _ => self.count_or("ffn", inner)?,
        };
        let seq = self.count_or("seq_len", of(|k| k.seq).unwrap_or(2048))?;
        let mut shape = Shape {
            layers,
            hidden,
            heads,
            kv_heads,
            head_dim,
            ffn,
            gated,
            vocab: self.count_or("vocab", of(|k| k.vocab).unwrap_or(51_200))?,
            seq,
            positions: if gated { 0 } else { seq },
            causal: !lower.contains("bert"),
            biases: !gated,
            tied: !gated,
            routed,
            head_norm: known.as_ref().map_or(0, |known| known.head_norm),
            low_rank,
            name,
        };
        if known.is_none() && self.row.text("gated_mlp").trim().is_empty() {
            self.decide_gating(&mut shape)?;
        }
        self.decide_tying(&mut shape)?;
        Ok(shape)
    }

    /// A model of an unknown name has gates in its feed-forward layers where the count of
    /// parameters says so.
    fn decide_gating(&mut self, shape: &mut Shape) -> Result<(), String> {
        let Some(billions) = self.number("params_b")?.filter(|billions| *billions > 0.0) else {
            return Ok(());
        };
        let with = |gated: bool| Shape {
            gated,
            positions: if gated { 0 } else { shape.seq },
            biases: !gated,
            tied: !gated,
            ..shape.clone()
        };
        let far = |shape: &Shape| {
            let work = shape.workload();
            work.map_or(f64::INFINITY, |w| (w.parameters() as f64 / 1e9 / billions).ln().abs())
        };
        let [plain, gated] = [false, true].map(with);
        if !shape.gated && far(&gated) < far(&plain) {
            self.defaults.retain(|default| default != "gated_mlp=0");
            self.defaults.push("gated_mlp=1".into());
            *shape = gated;
        }
        Ok(())
    }

    /// Gated models share the head's weight only where the count of parameters says so.
    fn decide_tying(&self, shape: &mut Shape) -> Result<(), String> {
        let Some(billions) = self.number("params_b")? else { return Ok(()) };
        if !shape.gated || billions == 0.0 {
            return Ok(());
        }
        let mut far = |tied: bool| {
            shape.tied = tied;
            shape.workload().map_or(f64::INFINITY, |work| {
                (work.parameters() as f64 / 1e9 / billions).ln().abs()
            })
        };
        let (untied, tied) = (far(false), far(true));
        shape.tied = tied < untied;
        Ok(())
    }

    /// Default number of attention heads: the hidden size over the head size (`head_dim`, else
    /// 128), rounded down to a multiple of `kv_heads`.
    fn usual_heads(&self, hidden: u32) -> Result<u32, String> {
        let size = self.count("head_dim")?.filter(|size| *size > 0).unwrap_or(128);
        let heads = (hidden / size).max(1);
        let shared = self.count("kv_heads")?.filter(|shared| *shared > 0).unwrap_or(1);
        Ok((heads / shared).max(1).saturating_mul(shared))
    }

    fn routed(
        &mut self,
        model: &str,
        hidden: u32,
        known: Option<&Shape>,
    ) -> Result<Option<Routed>, String> {
        let known = known.and_then(|known| known.routed);
        let experts = match self.count("n_experts")? {
            Some(experts) => experts,
            None => known.map_or(0, |known| known.experts),
        };
        if experts == 0 {
            return Ok(None);
        }
        let of = |field: fn(Routed) -> u32| known.map(field);
        // Most routed models before 2024, Mixtral among them, visit two.
        let top_k = self.count_or("topk", of(|k| k.top_k).unwrap_or(2.min(experts)))?;
        let ffn = match self.count("moe_ffn")? {
            Some(ffn) => ffn,
            None => self.count_or("ffn", of(|k| k.ffn).unwrap_or(hidden.saturating_mul(4)))?,
        };
        // DeepSeek-AI 2024: one shared expert, three layers that are not routed.
        let deepseek = if model.contains("deepseek") { (ffn, 3) } else { (0, 0) };
        let (shared_ffn, dense_layers) = match known {
            Some(known) => (known.shared_ffn, known.dense_layers),
            None => deepseek,
        };
        let dense_layers = self.count("dense_layers")?.unwrap_or(dense_layers);
        let shared_ffn = self.count("shared_ffn")?.unwrap_or(shared_ffn);
        Ok(Some(Routed { experts, top_k, ffn, shared_ffn, dense_layers }))
    }

    fn profile(&mut self) -> Profile {
        let name = self.row.text("framework");
        let named = profile::of_framework(name);
        let profile = named.unwrap_or(profile::DEFAULT);
        let is_new = words::preset(self.row.text("gpu")).is_ok_and(words::is_new);
        let profile = if is_new { profile::on_new_device(profile) } else { profile };
        if named.is_none_or(|named| named.name != profile.name) {
            self.defaults.push(format!("profile={}", profile.name));
        }
        profile
    }

    /// What the peak of memory counts that a row states, where it says so.
    fn printed(&self) -> Result<Option<Printed>, String> {
        match self.row.text("mem_kind").trim() {
            "" => Ok(None),
            "allocated" => Ok(Some(Printed::Allocated)),
            "reserved" => Ok(Some(Printed::Reserved)),
            "device" => Ok(Some(Printed::Device)),
            other => Err(format!("`mem_kind` is `{other}`, not allocated, reserved or device")),
        }
    }

    fn arithmetic(&mut self) -> Result<Arithmetic, String> {
        if let Some(arithmetic) = words::arithmetic(self.row.text("precision"))? {
            return Ok(arithmetic);
        }
        self.defaults.push("precision=bf16".into());
        Ok(Arithmetic::Half)
    }

    /// Number of devices: `n_gpus`, else the product of the layout's axes.
    fn ranks(&mut self) -> Result<u32, String> {
        if let Some(ranks) = self.count("n_gpus")?.filter(|ranks| *ranks > 0) {
            return Ok(ranks);
        }
        let mut ranks: u32 = 1;
        for axis in ["tp", "pp", "cp", "dp"] {
            ranks = ranks.saturating_mul(self.count(axis)?.unwrap_or(1).max(1));
        }
        self.defaults.push(format!("n_gpus={ranks}"));
        Ok(ranks)
    }

    fn cluster(&mut self, ranks: u32) -> Result<Cluster, String> {
        let gpu = self.row.text("gpu");
        let preset = words::preset(gpu)?;
        let machine = Machine { cores: 1, memory_bytes: 1, instruction_set: String::new() };
        let mut cluster = Cluster::load_on(preset, &machine)
            .map_err(|all| all.into_iter().map(|d| d.headline).collect::<Vec<_>>().join("; "))?;
        let usual = cluster.devices_per_node.unwrap_or(8);
        let in_node = self.count_or("gpus_per_node", usual as u32)?.max(1);
        if let Some(gigabytes) = self.number("gpu_mem_gb")?.or(words::gigabytes(gpu))
            && gigabytes * 1e9 < cluster.device.memory_bytes.value * 0.9
        {
            cluster.device.memory_bytes.value = gigabytes * 1e9;
        }
        // A rack of linked nodes is one domain, whatever a node is.
        let is_rack = cluster.levels[0].count.is_some_and(|count| count > usual);
        if !is_rack {
            cluster.levels[0].count = Some(in_node as usize);
        }
        cluster.devices_per_node = Some(in_node as usize);
        cluster.nodes = ranks.div_ceil(in_node) as usize;
        match self.number("intra_bw_gb_s_per_gpu_uni")? {
            Some(rate) if rate > 0.0 => cluster.levels[0].bandwidth.value = rate * 1e9,
            _ => self.defaults.push("intra_bw=preset".into()),
        }
        match self.number("inter_bw_gb_s_per_node_uni")? {
            Some(rate) if rate > 0.0 && cluster.levels.len() > 1 => {
                cluster.levels[1].bandwidth.value = rate * 1e9 / f64::from(in_node);
            }
            _ => self.defaults.push("inter_bw=preset".into()),
        }
        Ok(cluster)
    }

    fn configuration(
        &mut self,
        profile: &Profile,
        ranks: u32,
        layers: u32,
    ) -> Result<Configuration, String> {
        let (tp, pp, cp) = (self.axis("tp")?, self.axis("pp")?, self.axis("cp")?);
        let model_ranks = tp.saturating_mul(pp).saturating_mul(cp);
        let dp = self.count_or("dp", (ranks / model_ranks).max(1))?;
        let used = model_ranks.saturating_mul(dp);
        if used != ranks {
            self.defaults.push(format!("n_gpus={used}"));
        }
        let microbatch = self.microbatch(dp)?;
        let recompute = words::recompute(self.row.text("recompute")).unwrap_or_else(|| {
            self.defaults.push(format!("recompute={}", profile.usual_recompute));
            words::recompute(profile.usual_recompute).unwrap_or(Recompute::None)
        });
        let sequence_parallel = match self.count("seq_parallel")? {
            Some(flag) => flag != 0,
            None => {
                let flag = profile.usual_sequence_parallel;
                self.defaults.push(format!("seq_parallel={}", u8::from(flag)));
                flag
            }
        };
        let zero = match words::zero(self.row.text("zero_stage")) {
            Some(zero) => zero?,
            None => {
                self.defaults.push(format!("zero_stage={}", profile.usual_zero));
                Zero { stage: profile.usual_zero, shard: 0 }
            }
        };
        Ok(Configuration {
            tp,
            pp,
            cp,
            dp,
            ep: self.experts_cut(
                [tp, cp, dp].map(u64::from).iter().fold(1, |a, b| a.saturating_mul(*b)),
            )?,
            etp: self.count("etp")?.unwrap_or(0),
            vpp: self.chunks(pp, layers)?,
            microbatch,
            sequence_parallel: sequence_parallel && tp > 1,
            zero,
            recompute,
            ..Configuration::default()
        })
    }

    /// Ranks of an axis; one where the row says none.
    fn axis(&mut self, column: &str) -> Result<u32, String> {
        if let Some(ranks) = self.count(column)?.filter(|ranks| *ranks > 0) {
            return Ok(ranks);
        }
        self.defaults.push(format!("{column}=1"));
        Ok(1)
    }

    /// Ranks that share experts: as many of the row's as divide those of a stage.
    fn experts_cut(&mut self, stage_ranks: u64) -> Result<u32, String> {
        let stated = self.count_or("ep", 1)?.max(1);
        let (mut cut, mut rest) = (u64::from(stated), stage_ranks.max(1));
        while rest > 0 {
            (cut, rest) = (rest, cut % rest);
        }
        let cut = u32::try_from(cut).unwrap_or(1);
        if cut != stated {
            self.defaults.push(format!("ep={cut}"));
        }
        Ok(cut)
    }

    /// Chunks of a stage: none where there is one stage, and none without a layer.
    fn chunks(&mut self, pp: u32, layers: u32) -> Result<u32, String> {
        let stated = self.count_or("vp", 1)?.max(1);
        let chunks = if pp == 1 { 1 } else { stated.min((layers / pp).max(1)) };
        if chunks != stated {
            self.defaults.push(format!("vp={chunks}"));
        }
        Ok(chunks)
    }

    /// The micro-batch; a blank one follows from the batch and the accumulation, else it is 1.
    fn microbatch(&mut self, dp: u32) -> Result<u32, String> {
        let batch = self.count("global_batch")?.unwrap_or(0);
        let each = match self.count("grad_accum")? {
            Some(count) if count > 0 && dp > 0 => batch / dp.saturating_mul(count).max(1),
            Some(_) | None => 1,
        };
        Ok(self.count_or("micro_batch", each.max(1))?.max(1))
    }

    /// The batch; as many whole micro-batches as come nearest where the row's does not divide.
    fn global_batch(&mut self, c: &Configuration) -> Result<u64, String> {
        let at_once = u64::from(c.dp) * u64::from(c.microbatch);
        if at_once == 0 {
            return Err(format!("{} data-parallel ranks of {} samples", c.dp, c.microbatch));
        }
        let stated = match (self.count("global_batch")?, self.count("grad_accum")?) {
            (Some(batch), _) => u64::from(batch),
            (None, Some(count)) => u64::from(count) * at_once,
            (None, None) => {
                // Enough to fill a pipeline.
                let batch = at_once * if c.pp > 1 { 4 * u64::from(c.pp) } else { 1 };
                self.defaults.push(format!("global_batch={batch}"));
                batch
            }
        };
        if stated.is_multiple_of(at_once) && stated > 0 {
            return Ok(stated);
        }
        let count = match self.count("grad_accum")? {
            Some(count) if count > 0 => u64::from(count),
            _ => (stated as f64 / at_once as f64).round().max(1.0) as u64,
        };
        self.defaults.push(format!("micro_batches={count}"));
        Ok(count * at_once)
    }
}
