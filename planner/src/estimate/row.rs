//! A measured run, as a row of a table, becomes a question to the estimator.
//!
//! The columns are those of published tables of training runs: the model's shape, the devices, the
//! links, the layout, the framework. What a row leaves blank takes a default, and says so.

use ir::import::nearest;

use super::rates::Arithmetic;
use super::style::{self, Style};
use super::workload::{Item, LowRank, Routed, Shape, Workload};
use super::{Estimate, Estimator, Job};
use crate::cluster::Cluster;
use crate::configuration::{Configuration, Recompute, Zero};
use crate::machine::Machine;

/// The columns that a table must have.
pub const COLUMNS: [&str; 8] =
    ["row_id", "layers", "hidden", "heads", "seq_len", "gpu", "n_gpus", "global_batch"];

/// The columns that are read where a table has them.
pub const OPTIONAL: [&str; 32] = [
    "model",
    "params_b",
    "kv_heads",
    "head_dim",
    "ffn",
    "gated_mlp",
    "vocab",
    "n_experts",
    "topk",
    "moe_ffn",
    "gpu_mem_gb",
    "gpus_per_node",
    "intra_bw_gb_s_per_gpu_uni",
    "inter_bw_gb_s_per_node_uni",
    "tp",
    "pp",
    "vp",
    "dp",
    "cp",
    "ep",
    "zero_stage",
    "seq_parallel",
    "micro_batch",
    "grad_accum",
    "recompute",
    "precision",
    "framework",
    "step_time_s",
    "peak_mem_gib",
    "usable_for_time",
    "usable_for_memory",
    "file",
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
    pub style: Style,
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
        let estimator = Estimator::new(&self.work, &self.cluster, self.style, self.job);
        let estimator = estimator.map_err(|diagnostic| diagnostic.headline)?;
        let found = estimator.estimate(&self.configuration);
        found.map_err(|all| all.into_iter().map(|d| d.headline).collect::<Vec<_>>().join("; "))
    }
}

/// Devices as tables name them, with the preset that describes them: the first whose name is the
/// beginning of the table's.
const DEVICES: [(&str, &str); 20] = [
    ("A100-40GB", "a100-40gb"),
    ("A100", "a100"),
    ("H100-96GB", "h100-96gb"),
    ("H100", "h100"),
    ("H800", "h800"),
    ("H200", "h200"),
    ("GH200", "h200"),
    ("B200", "b200"),
    ("B300", "b300"),
    ("GB200", "gb200-nvl72"),
    ("GB300", "gb300-nvl72"),
    ("V100", "v100"),
    ("Tesla V100", "v100"),
    ("RTX 4090", "rtx4090"),
    ("RTX-4090", "rtx4090"),
    ("RTX4090", "rtx4090"),
    ("MI300X", "mi300x"),
    ("NVIDIA A100", "a100"),
    ("NVIDIA H100", "h100"),
    ("NVIDIA H200", "h200"),
];

/// Reads a row.
///
/// # Errors
/// Why the row cannot be expressed, in words.
pub fn read(row: &dyn Columns) -> Result<Question, String> {
    let mut reader = RowReader { row, defaults: Vec::new() };
    let shape = reader.shape()?;
    let work = shape
        .workload()
        .map_err(|all| all.into_iter().map(|d| d.headline).collect::<Vec<_>>().join("; "))?;
    let style = reader.style();
    let mut cluster = reader.cluster()?;
    if let Some(outer) = cluster.levels.get_mut(1) {
        outer.name = style.fabric.to_owned();
    }
    let arithmetic = reader.arithmetic()?;
    let mut configuration = reader.configuration(&style)?;
    if style.balances_stages && (2..=work.depth()).contains(&configuration.pp) {
        configuration.stage_layers = balanced(&work, configuration.pp);
    }
    let global_batch = reader.global_batch(&configuration)?;
    let job = Job { global_batch, arithmetic };
    Ok(Question { work, cluster, style, job, configuration, defaults: reader.defaults })
}

/// Layers of stages with about as many operations each, the head counted with the last: a stage
/// ends where the sum of its predecessors and itself passes its share. A stage may have no layer.
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
        if stage + 1 < stages as usize && before + layer / 2.0 > share * (stage as f64 + 1.0) {
            stage += 1;
        }
        counts[stage] += 1;
        before += layer;
    }
    counts
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
        match text.parse::<f64>() {
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

    fn shape(&mut self) -> Result<Shape, String> {
        let name = self.row.text("model").to_owned();
        let lower = name.to_lowercase();
        let (hidden, heads) = (self.needed("hidden")?, self.needed("heads")?);
        let gated = self.flag_or("gated_mlp", false)?;
        let routed = self.routed(&lower)?;
        let low_rank = (lower.contains("deepseek") && routed.is_some()).then_some(LowRank {
            q_rank: 1536,
            kv_rank: 512,
            plain_dim: 128,
            rope_dim: 64,
            v_dim: 128,
        });
        let kv_heads = if low_rank.is_some() { heads } else { self.count_or("kv_heads", heads)? };
        let head_dim = self.count_or("head_dim", hidden / heads.max(1))?;
        let ffn = match routed {
            Some(routed) if routed.dense_layers == 0 => 0,
            _ => self.count_or("ffn", hidden.saturating_mul(4))?,
        };
        let mut shape = Shape {
            layers: self.needed("layers")?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            ffn,
            gated,
            vocab: self.count_or("vocab", 51_200)?,
            seq: self.needed("seq_len")?,
            causal: !lower.contains("bert"),
            biases: !gated && !lower.contains("mpt"),
            tied: !gated,
            routed,
            low_rank,
            name,
        };
        self.decide_tying(&mut shape)?;
        Ok(shape)
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

    fn routed(&mut self, model: &str) -> Result<Option<Routed>, String> {
        let Some(experts) = self.count("n_experts")?.filter(|experts| *experts > 0) else {
            return Ok(None);
        };
        let top_k = self.needed("topk")?;
        let ffn = match self.count("moe_ffn")? {
            Some(ffn) => ffn,
            None => self.needed("ffn")?,
        };
        let deepseek = model.contains("deepseek");
        // DeepSeek-AI 2024: one shared expert, three layers that are not routed.
        let (shared_ffn, dense_layers) = if deepseek { (ffn, 3) } else { (0, 0) };
        Ok(Some(Routed { experts, top_k, ffn, shared_ffn, dense_layers }))
    }

    fn style(&mut self) -> Style {
        let name = self.row.text("framework");
        style::of_framework(name).unwrap_or_else(|| {
            self.defaults.push(format!("style={}", style::DEFAULT.name));
            style::DEFAULT
        })
    }

    fn arithmetic(&mut self) -> Result<Arithmetic, String> {
        let text = self.row.text("precision").to_lowercase();
        match text.as_str() {
            "fp32" | "f32" => Ok(Arithmetic::F32),
            "tf32" => Ok(Arithmetic::Tf32),
            "fp16" | "bf16" | "f16" | "amp" | "mixed" => Ok(Arithmetic::Half),
            "" => {
                self.defaults.push("precision=bf16".into());
                Ok(Arithmetic::Half)
            }
            text if text.starts_with("fp8") || text.starts_with("mxfp8") => Ok(Arithmetic::F8),
            text => Err(format!("`precision` is `{text}`, which no device file has")),
        }
    }

    fn cluster(&mut self) -> Result<Cluster, String> {
        let gpu = self.row.text("gpu");
        let found = DEVICES.iter().find(|(name, _)| gpu.starts_with(name));
        let Some((_, preset)) = found else {
            let near = nearest(gpu, DEVICES.iter().map(|(name, _)| *name));
            let near = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
            return Err(format!("`gpu` is `{gpu}`, which no preset describes{near}"));
        };
        let machine = Machine { cores: 1, memory_bytes: 1, instruction_set: String::new() };
        let mut cluster = Cluster::load_on(preset, &machine)
            .map_err(|all| all.into_iter().map(|d| d.headline).collect::<Vec<_>>().join("; "))?;
        let ranks = self.needed("n_gpus")?.max(1);
        let usual = cluster.devices_per_node.unwrap_or(8);
        let in_node = self.count_or("gpus_per_node", usual as u32)?.max(1);
        if let Some(gigabytes) = self.number("gpu_mem_gb")?
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

    fn configuration(&mut self, style: &Style) -> Result<Configuration, String> {
        let (tp, pp) = (self.count_or("tp", 1)?.max(1), self.count_or("pp", 1)?.max(1));
        let cp = self.count_or("cp", 1)?.max(1);
        let ranks = self.needed("n_gpus")?;
        let model_ranks = tp.saturating_mul(pp).saturating_mul(cp);
        let dp = self.count_or("dp", (ranks / model_ranks).max(1))?;
        let microbatch = self.microbatch(dp)?;
        let recompute = match self.row.text("recompute") {
            "none" => Recompute::None,
            "selective" | "attention" => Recompute::Attention,
            "full" => Recompute::Full,
            "" => {
                self.defaults.push(format!("recompute={}", style.usual_recompute));
                match style.usual_recompute {
                    "full" => Recompute::Full,
                    "attention" => Recompute::Attention,
                    _ => Recompute::None,
                }
            }
            other => return Err(format!("`recompute` is `{other}`")),
        };
        let sequence_parallel = match self.count("seq_parallel")? {
            Some(flag) => flag != 0,
            None => {
                let flag = style.usual_sequence_parallel;
                self.defaults.push(format!("seq_parallel={}", u8::from(flag)));
                flag
            }
        };
        let stage = self.count_or("zero_stage", 0)?;
        Ok(Configuration {
            tp,
            pp,
            cp,
            dp,
            ep: self.count_or("ep", 1)?.max(1),
            vpp: self.count_or("vp", 1)?.max(1),
            microbatch,
            sequence_parallel: sequence_parallel && tp > 1,
            zero: Zero { stage: stage.min(255) as u8, shard: 0 },
            recompute,
            ..Configuration::default()
        })
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
            (None, None) => return Err("`global_batch` is blank".into()),
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
