//! The tools that people train with: which plans each of them can execute, and by whose measured
//! runs its steps are priced.
//!
//! `rules` is one table for everything that asks what a tool can express. The search leaves out
//! what a rule refuses as soon as the decisions that the rule reads are taken; an export names the
//! rules that a whole plan breaks. A rule that is in one of the two and not in the other cannot be
//! written.

mod releases;
mod rules;
mod torchtitan;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;

use ir::import::nearest;

pub use releases::Release;
pub use rules::stages_inside;
pub use torchtitan::{shard_degree, torchtitan_chunk, torchtitan_chunks, torchtitan_ends};

use crate::cluster::{Cluster, names};
use crate::configuration::Configuration;
use crate::estimate::legal;
use crate::estimate::profile::{Profile, on_new_device};
use crate::estimate::workload::{Item, Workload};

/// The other tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// Flags of Megatron-LM's `pretrain_gpt.py`.
    Megatron,
    /// The configuration of DeepSpeed.
    DeepSpeed,
    /// The configuration of torchtitan.
    Torchtitan,
    /// The execution of Calculon.
    Calculon,
}

impl Tool {
    /// All of them.
    pub const ALL: [Tool; 4] = [Tool::Megatron, Tool::DeepSpeed, Tool::Torchtitan, Tool::Calculon];

    /// Those that train.
    pub const TRAINING: [Tool; 3] = [Tool::Megatron, Tool::DeepSpeed, Tool::Torchtitan];

    /// The name in sentences.
    pub fn title(self) -> &'static str {
        match self {
            Tool::Megatron => "Megatron-LM",
            Tool::DeepSpeed => "DeepSpeed",
            Tool::Torchtitan => "torchtitan",
            Tool::Calculon => "Calculon",
        }
    }

    /// The name in flags.
    pub fn name(self) -> &'static str {
        match self {
            Tool::Megatron => "megatron",
            Tool::DeepSpeed => "deepspeed",
            Tool::Torchtitan => "torchtitan",
            Tool::Calculon => "calculon",
        }
    }

    /// Its releases, the oldest first; none of a tool that does not train.
    pub fn releases(self) -> &'static [Release] {
        match self {
            Tool::Megatron => releases::MEGATRON,
            Tool::DeepSpeed => releases::DEEPSPEED,
            Tool::Torchtitan => releases::TORCHTITAN,
            Tool::Calculon => &[],
        }
    }

    /// What it cannot express.
    fn rules(self) -> &'static [Rule] {
        match self {
            Tool::Megatron => rules::MEGATRON,
            Tool::DeepSpeed => rules::DEEPSPEED,
            Tool::Torchtitan => rules::TORCHTITAN,
            Tool::Calculon => rules::CALCULON,
        }
    }
}

/// What of a model rules depend on; 0 for what is not known, which breaks no rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Layers.
    pub layers: u32,
    /// Tokens of a sample.
    pub seq: u32,
    /// Heads of keys and values: the greatest number that divides those of all layers.
    pub kv_heads: u32,
    /// Experts of a routed layer.
    pub experts: u32,
}

impl Sizes {
    /// Those of a workload.
    pub fn of(work: &Workload) -> Sizes {
        let items = work.layers.iter().flat_map(|layer| &layer.items);
        let heads = items.filter_map(|item| {
            if let Item::Attention { kv_heads, .. } | Item::Mixing { kv_heads, .. } = item {
                Some(*kv_heads)
            } else {
                None
            }
        });
        let experts = legal::expert_units(work);
        Sizes {
            layers: work.depth(),
            seq: work.seq,
            kv_heads: heads.fold(0, crate::divisors::gcd),
            experts: if experts > 1 { experts } else { 0 },
        }
    }
}

/// The last decision that a rule reads, in the order in which a search takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reads {
    /// Stages, tensor-parallel, context-parallel and data-parallel ranks.
    Mesh,
    /// Expert-parallel ranks.
    Experts,
    /// Sequence parallelism.
    Sequence,
    /// Placement of the axes.
    Order,
    /// The order of micro-batches, and interleaved chunks.
    Schedule,
    /// What data-parallel ranks shard.
    Zero,
    /// What lies elsewhere.
    Offload,
    /// What is recomputed.
    Recompute,
    /// Layers of stages.
    Stages,
}

/// Where a decision is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// In the tool's configuration alone: a file, or flags.
    Configuration,
    /// There, or in the command line that starts the trainer.
    Launch,
}

/// What a rule is asked about.
struct Case<'c> {
    c: &'c Configuration,
    sizes: Sizes,
    /// Place of the release in [`Tool::releases`].
    release: usize,
    form: Form,
}

/// Something that a tool cannot express.
struct Rule {
    /// What the plan has and the tool has no term for.
    what: &'static str,
    reads: Reads,
    breaks: fn(&Case<'_>) -> bool,
}

/// A tool at one of its releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    tool: Tool,
    release: usize,
}

impl Target {
    /// The newest release of a tool.
    pub fn newest(tool: Tool) -> Target {
        Target { tool, release: tool.releases().len().saturating_sub(1) }
    }

    /// Reads `megatron`, or `megatron@core-0.13`; without a release it is the newest.
    ///
    /// # Errors
    /// What is wrong, and the way out.
    pub fn parse(text: &str) -> Result<Target, (String, String)> {
        let (name, release) = match text.split_once('@') {
            Some((name, release)) => (name, Some(release)),
            None => (text, None),
        };
        let names = || Tool::TRAINING.into_iter().map(Tool::name);
        let Some(tool) = Tool::TRAINING.into_iter().find(|tool| tool.name() == name) else {
            let help = match nearest(name, names()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("write one of {}", names().collect::<Vec<_>>().join(", ")),
            };
            return Err((format!("no tool `{name}` is planned for"), help));
        };
        let Some(release) = release else { return Ok(Target::newest(tool)) };
        let all = tool.releases();
        if let Some(place) = all.iter().position(|known| known.name == release) {
            return Ok(Target { tool, release: place });
        }
        let near = releases::nearest_to(all, release);
        let known: Vec<&str> = all.iter().map(|known| known.name).collect();
        let headline = format!("no run of {} {release} was measured", tool.title());
        let mut help = format!("the nearest that was is `{name}@{near}`");
        if known.len() > 1 {
            help += &format!("; measured are {}", known.join(", "));
        }
        Err((headline, help))
    }

    /// The tool.
    pub fn tool(self) -> Tool {
        self.tool
    }

    /// The release; none of a tool that does not train.
    pub fn release(self) -> Option<&'static Release> {
        self.tool.releases().get(self.release)
    }

    /// The execution profile on the devices of a cluster.
    ///
    /// Releases that wrote scores to memory are not run on devices of 2022 and later: there it is
    /// the release that followed, and its times are less certain.
    pub fn profile_on(self, cluster: &Cluster) -> Option<Profile> {
        let profile = self.release()?.profile;
        let is_new = names::year(&cluster.name).is_none_or(|year| year >= 2022);
        Some(if is_new { on_new_device(profile) } else { profile })
    }

    /// Whose numbers the prices are, for people: the runs that were measured, and what was put in
    /// the place of a release that is older than the devices.
    pub fn whose_numbers(self, cluster: &Cluster) -> String {
        let (Some(release), Some(profile)) = (self.release(), self.profile_on(cluster)) else {
            return String::new();
        };
        let mut text = format!("{} ({})", release.measured, release.profile.source);
        if profile != release.profile {
            let (name, attention) = (profile.name, profile.attention.name());
            let doubt = 100.0 * profile.doubt;
            text += &format!(
                "; {} is newer than these runs: priced as {name} with {attention}, {doubt:.0} % \
                 less certain",
                cluster.name
            );
        }
        text
    }

    /// Everything of a configuration that the tool cannot express, in a few words each.
    pub fn refusals(self, c: &Configuration, sizes: Sizes, form: Form) -> Vec<&'static str> {
        let case = Case { c, sizes, release: self.release, form };
        let broken = self.tool.rules().iter().filter(|rule| (rule.breaks)(&case));
        broken.map(|rule| rule.what).collect()
    }

    /// Whether no rule refuses `c` whose last decision is `reads`. Later decisions may be open, and
    /// rules of earlier ones were asked when those were taken.
    pub fn allows(self, reads: Reads, c: &Configuration, sizes: Sizes) -> bool {
        let case = Case { c, sizes, release: self.release, form: Form::Launch };
        let mut rules = self.tool.rules().iter().filter(|rule| rule.reads == reads);
        !rules.any(|rule| (rule.breaks)(&case))
    }

    /// Whether stages may have other numbers of layers than is usual.
    pub fn takes_uneven_stages(self) -> bool {
        let uneven = Configuration { pp: 2, stage_layers: vec![3, 1], ..Configuration::default() };
        self.allows(Reads::Stages, &uneven, Sizes { layers: 4, ..Sizes::default() })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.release() {
            Some(release) => write!(f, "{}@{}", self.tool.name(), release.name),
            None => f.write_str(self.tool.name()),
        }
    }
}
