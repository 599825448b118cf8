//! One point of the space of uniform plans: how a training job lies over its ranks.
//!
//! The text form is words in a fixed order; what is at its default is left out, but for the
//! counts of ranks and the micro-batch:
//!
//! ```
//! use gantline_planner::configuration::Configuration;
//! let text = "tp=8 pp=8 dp=2 mbs=1 vpp=3 sp zero=1 recompute=attention";
//! let configuration: Configuration = text.parse().unwrap();
//! assert_eq!(configuration.to_string(), text);
//! assert_eq!(configuration.ranks(), 128);
//! ```

use std::fmt;
use std::str::FromStr;

use ir::import::nearest;
use ir::{Diagnostic, Span};
use serde::{Deserialize, Serialize};

/// The order of micro-batches in a pipeline.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// All forward passes, then all backward passes (Huang et al. 2019).
    GPipe,
    /// One forward, one backward (Narayanan et al. 2019); interleaved where `vpp` is above 1
    /// (Narayanan et al. 2021).
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// Zero bubble with the memory of 1F1B (Qi et al. 2023, ZB-H1): a third of its bubble.
    #[serde(rename = "zb-h1")]
    ZeroBubbleH1,
    /// Zero bubble with twice the activations (Qi et al. 2023, ZB-H2): only the optimizer waits.
    #[serde(rename = "zb-h2")]
    ZeroBubbleH2,
}

impl Schedule {
    /// All of them.
    pub const ALL: [Schedule; 4] = [
        Schedule::GPipe,
        Schedule::OneForwardOneBackward,
        Schedule::ZeroBubbleH1,
        Schedule::ZeroBubbleH2,
    ];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::GPipe => "gpipe",
            Schedule::OneForwardOneBackward => "1f1b",
            Schedule::ZeroBubbleH1 => "zb-h1",
            Schedule::ZeroBubbleH2 => "zb-h2",
        }
    }
}

/// What is computed again in the backward pass.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// The inside of attention: scores, softmax, weighting (Korthikanti et al. 2022, selective).
    Attention,
    /// Layers whole, from their inputs: so many of each stage.
    Layers(u32),
    /// All layers whole.
    Full,
    /// As much as memory asks for; an estimate takes the least that fits.
    Auto,
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Recompute::None => f.write_str("none"),
            Recompute::Attention => f.write_str("attention"),
            Recompute::Layers(count) => write!(f, "layers:{count}"),
            Recompute::Full => f.write_str("full"),
            Recompute::Auto => f.write_str("auto"),
        }
    }
}

/// Where something is between its uses.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// In the device's memory.
    #[default]
    Device,
    /// In the memory of the node.
    Host,
    /// On the node's disk.
    Disk,
}

/// What lies elsewhere than on the device.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct Offload {
    /// Optimizer state and master weights; the update runs where they are.
    pub optimizer: Place,
    /// Weights, fetched before each use.
    pub parameters: Place,
    /// What the backward pass needs, fetched before it.
    pub activations: Place,
}

/// Sharding over data-parallel ranks of what they all hold (Rajbhandari et al. 2020).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct Zero {
    /// 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.
    pub stage: u8,
    /// Ranks over which one copy is cut; 0 for all of `dp` × `cp`.
    pub shard: u32,
}

/// An axis of ranks, for their placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RankAxis {
    /// Tensor parallel.
    Tp,
    /// Context parallel.
    Cp,
    /// Data parallel.
    Dp,
    /// Pipeline parallel.
    Pp,
}

impl RankAxis {
    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            RankAxis::Tp => "tp",
            RankAxis::Cp => "cp",
            RankAxis::Dp => "dp",
            RankAxis::Pp => "pp",
        }
    }
}

/// The usual placement, innermost first: tensor parallel ranks are neighbours, stages far apart.
pub const USUAL_ORDER: [RankAxis; 4] = [RankAxis::Tp, RankAxis::Cp, RankAxis::Dp, RankAxis::Pp];

/// How a job lies over its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Configuration {
    /// Tensor-parallel ranks.
    pub tp: u32,
    /// Context-parallel ranks: they share a sequence.
    pub cp: u32,
    /// Expert-parallel ranks: a sub-axis of `dp` × `cp` × `tp`, innermost.
    pub ep: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Chunks of layers that a stage holds, interleaved.
    pub vpp: u32,
    /// Data-parallel ranks.
    pub dp: u32,
    /// Samples of a micro-batch on one data-parallel rank.
    pub microbatch: u32,
    /// Whether tensor-parallel ranks also cut the sequence between products.
    pub sequence_parallel: bool,
    /// Sharding over data-parallel ranks.
    pub zero: Zero,
    /// The order of micro-batches.
    pub schedule: Schedule,
    /// What is computed again.
    pub recompute: Recompute,
    /// What lies elsewhere.
    pub offload: Offload,
    /// Placement of the axes, innermost first: a permutation.
    pub order: [RankAxis; 4],
    /// Layers of each stage, first to last; empty for as even as possible.
    pub stage_layers: Vec<u32>,
}

impl Default for Configuration {
    /// One rank, one sample.
    fn default() -> Configuration {
        Configuration {
            tp: 1,
            cp: 1,
            ep: 1,
            pp: 1,
            vpp: 1,
            dp: 1,
            microbatch: 1,
            sequence_parallel: false,
            zero: Zero::default(),
            schedule: Schedule::default(),
            recompute: Recompute::default(),
            offload: Offload::default(),
            order: USUAL_ORDER,
            stage_layers: Vec::new(),
        }
    }
}

/// The most ranks. Chosen: far above any machine, and products of counts fit in 64 bits.
const RANKS_MAX: f64 = 4_294_967_296.0;

impl Configuration {
    /// Ranks: the product of the axes that are not sub-axes.
    pub fn ranks(&self) -> u64 {
        [self.tp, self.cp, self.pp, self.dp].into_iter().map(u64::from).product()
    }

    /// Ranks along an axis.
    pub fn size(&self, axis: RankAxis) -> u32 {
        match axis {
            RankAxis::Tp => self.tp,
            RankAxis::Cp => self.cp,
            RankAxis::Dp => self.dp,
            RankAxis::Pp => self.pp,
        }
    }

    /// Layers of the deepest stage, of so many in all.
    pub fn deepest(&self, layers: u32) -> u32 {
        self.stage_layers.iter().copied().max().unwrap_or(layers.div_ceil(self.pp))
    }

    /// Layers of a stage, of so many in all, and how many stages from it on have as many. Where the
    /// stages are not told they are as even as possible: the first ones have one more, and where
    /// chunks are interleaved it is those at both ends that have one less, beside the embedding and
    /// the head.
    pub fn layers_of(&self, layers: u32, index: u32) -> (u32, u32) {
        if self.stage_layers.len() == self.pp as usize {
            let rest = &self.stage_layers[index as usize..];
            let alike = rest.iter().take_while(|layers| **layers == rest[0]).count();
            return (rest[0], alike as u32);
        }
        let (each, more) = (layers / self.pp, layers % self.pp);
        let first = if self.vpp > 1 && more > 0 { (self.pp - more) / 2 } else { 0 };
        if index < first {
            (each, first - index)
        } else if index < first + more {
            (each + 1, first + more - index)
        } else {
            (each, self.pp - index)
        }
    }

    /// A chunk's share of so many layers of a stage: chunks that have one less than others come
    /// first in the upper half of the stages, and last in the lower half.
    pub fn chunk_layers(&self, layers: u32, stage: u32, chunk: u32) -> u32 {
        let (each, more) = (layers / self.vpp, layers % self.vpp);
        let is_upper = stage < self.pp.div_ceil(2);
        let has_more = if is_upper { chunk + more >= self.vpp } else { chunk < more };
        each + u32::from(has_more)
    }

    /// Whether a stage of so many layers has enough for its chunks: at least one for each, but for
    /// the first and the last chunk of all, which have the embedding and the head.
    pub fn fills_chunks(&self, layers: u32, index: u32) -> bool {
        let is_end = self.vpp > 1 && (index == 0 || index + 1 == self.pp);
        layers > 0 && layers + u32::from(is_end) >= self.vpp
    }

    /// Whether as many layers are to be computed again as no stage has: all, of so many.
    pub fn computes_all_again(&self, layers: u32) -> bool {
        matches!(self.recompute, Recompute::Layers(again) if again >= self.deepest(layers))
    }

    /// Distance between neighbours along an axis, in ranks.
    pub fn stride(&self, axis: RankAxis) -> u64 {
        let inside = self.order.iter().take_while(|inner| **inner != axis);
        inside.map(|inner| u64::from(self.size(*inner))).product()
    }

    /// Ranks over which the parts that ZeRO shards are cut.
    pub fn shard_ranks(&self) -> u32 {
        let all = self.dp.saturating_mul(self.cp);
        if self.zero.stage == 0 {
            1
        } else if self.zero.shard == 0 {
            all
        } else {
            self.zero.shard
        }
    }

    /// Micro-batches of a step on one data-parallel rank, if the batch divides.
    pub fn microbatch_count(&self, global_batch: u64) -> Option<u64> {
        let at_once = u64::from(self.dp) * u64::from(self.microbatch);
        (at_once > 0 && global_batch > 0 && global_batch.is_multiple_of(at_once))
            .then(|| global_batch / at_once)
    }

    /// Everything about the configuration alone that makes no sense. `layers` is the model's depth.
    ///
    /// # Errors
    /// `E3401`, once for each.
    pub fn check(&self, layers: u32) -> Result<(), Vec<Diagnostic>> {
        let span = || Span::of(self.to_string());
        let axes = [self.tp, self.cp, self.pp, self.dp].map(f64::from);
        let ranks: f64 = axes.iter().product();
        if ranks > RANKS_MAX {
            let headline = format!("{ranks:.0} ranks, more than {RANKS_MAX:.0}");
            return Err(vec![Diagnostic::error("E3401", span(), headline)]);
        }
        let mut wrong = Vec::new();
        let counts = [
            ("tp", self.tp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("pp", self.pp),
            ("vpp", self.vpp),
            ("dp", self.dp),
            ("mbs", self.microbatch),
        ];
        for (name, count) in counts {
            if count == 0 {
                wrong.push(format!("`{name}` is 0"));
            }
        }
        let chunks = u64::from(self.pp) * u64::from(self.vpp);
        // The first and the last of interleaved chunks may have none.
        let spare = if self.vpp > 1 && self.pp > 1 { 2 } else { 0 };
        if chunks > u64::from(layers) + spare {
            wrong.push(format!("{chunks} pipeline chunks of {layers} layers"));
        }
        if self.vpp > 1 && self.pp == 1 {
            wrong.push(format!("`vpp` is {} where there is one stage", self.vpp));
        }
        if self.vpp > 1 && self.schedule != Schedule::OneForwardOneBackward {
            wrong.push(format!("`vpp` is {} under {}", self.vpp, self.schedule.name()));
        }
        let others = u64::from(self.tp) * u64::from(self.cp) * u64::from(self.dp);
        if self.ep > 0 && !others.is_multiple_of(u64::from(self.ep)) {
            wrong.push(format!("`ep` is {}, which does not divide {others}", self.ep));
        }
        if self.zero.stage > 3 {
            wrong.push(format!("`zero` is {}", self.zero.stage));
        }
        let all = u64::from(self.dp) * u64::from(self.cp);
        let shard = u64::from(self.zero.shard);
        if shard > 0 && (shard > all || !all.is_multiple_of(shard)) {
            wrong.push(format!("shards over {shard} of {all} ranks"));
        }
        let named: u64 = self.stage_layers.iter().map(|n| u64::from(*n)).sum();
        let has_stages = !self.stage_layers.is_empty();
        if has_stages && (self.stage_layers.len() != self.pp as usize || named != u64::from(layers))
        {
            let stages = self.stage_layers.len();
            wrong.push(format!("{stages} stages of {named} layers for pp={} of {layers}", self.pp));
        }
        if wrong.is_empty() {
            return Ok(());
        }
        Err(wrong.into_iter().map(|text| Diagnostic::error("E3401", span(), text)).collect())
    }
}

impl fmt::Display for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp={}", self.tp)?;
        for (name, count) in [("cp", self.cp), ("ep", self.ep)] {
            if count != 1 {
                write!(f, " {name}={count}")?;
            }
        }
        write!(f, " pp={} dp={} mbs={}", self.pp, self.dp, self.microbatch)?;
        if self.vpp != 1 {
            write!(f, " vpp={}", self.vpp)?;
        }
        if self.sequence_parallel {
            f.write_str(" sp")?;
        }
        match self.zero {
            Zero { stage: 0, .. } => {}
            Zero { stage, shard: 0 } => write!(f, " zero={stage}")?,
            Zero { stage, shard } => write!(f, " zero={stage}/{shard}")?,
        }
        if self.schedule != Schedule::default() {
            write!(f, " schedule={}", self.schedule.name())?;
        }
        if self.recompute != Recompute::None {
            write!(f, " recompute={}", self.recompute)?;
        }
        let Offload { optimizer, parameters, activations } = self.offload;
        let kinds =
            [("optimizer", optimizer), ("parameters", parameters), ("activations", activations)];
        for (name, place) in kinds {
            match place {
                Place::Device => {}
                Place::Host => write!(f, " offload-{name}=host")?,
                Place::Disk => write!(f, " offload-{name}=disk")?,
            }
        }
        if self.order != USUAL_ORDER {
            write!(f, " order={}", self.order.map(RankAxis::name).join("."))?;
        }
        if !self.stage_layers.is_empty() {
            let layers = self.stage_layers.iter().map(u32::to_string).collect::<Vec<_>>();
            write!(f, " stages={}", layers.join("."))?;
        }
        Ok(())
    }
}

/// The words of the text form.
const WORDS: [&str; 16] = [
    "tp",
    "cp",
    "ep",
    "pp",
    "vpp",
    "dp",
    "mbs",
    "sp",
    "zero",
    "schedule",
    "recompute",
    "offload-optimizer",
    "offload-parameters",
    "offload-activations",
    "order",
    "stages",
];

impl FromStr for Configuration {
    type Err = Vec<Diagnostic>;

    /// Reads the text form, in any order of words; what is left out is at its default.
    ///
    /// # Errors
    /// `E3402` for each word that says nothing.
    fn from_str(text: &str) -> Result<Configuration, Vec<Diagnostic>> {
        let mut configuration = Configuration::default();
        let mut wrong = Vec::new();
        let mut seen: Vec<&str> = Vec::new();
        for word in text.split_whitespace() {
            let start = word.as_ptr() as usize - text.as_ptr() as usize;
            if let Err(headline) = configuration.read_word(word) {
                let span =
                    Span { source: "configuration".into(), bytes: start..start + word.len() };
                let name = word.split('=').next().unwrap_or(word);
                let diagnostic = Diagnostic::error("E3402", span, headline);
                wrong.push(match nearest(name, WORDS) {
                    Some(near) if near != name => {
                        diagnostic.help(format!("did you mean `{near}`?"))
                    }
                    Some(_) | None => {
                        diagnostic.help(format!("the words are {}", WORDS.join(", ")))
                    }
                });
                continue;
            }
            let name = word.split('=').next().unwrap_or(word);
            if seen.contains(&name) {
                let span =
                    Span { source: "configuration".into(), bytes: start..start + word.len() };
                let headline = format!("`{name}` is said twice");
                wrong.push(Diagnostic::error("E3402", span, headline).help("write it once"));
            }
            seen.push(name);
        }
        if wrong.is_empty() { Ok(configuration) } else { Err(wrong) }
    }
}

impl Configuration {
    fn read_word(&mut self, word: &str) -> Result<(), String> {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        let bad = || format!("`{word}` says nothing");
        let number = |text: &str| text.parse::<u32>().map_err(|_| bad());
        match name {
            "tp" => self.tp = number(value)?,
            "cp" => self.cp = number(value)?,
            "ep" => self.ep = number(value)?,
            "pp" => self.pp = number(value)?,
            "vpp" => self.vpp = number(value)?,
            "dp" => self.dp = number(value)?,
            "mbs" => self.microbatch = number(value)?,
            "sp" if value.is_empty() || value == "1" => self.sequence_parallel = true,
            "sp" if value == "0" => self.sequence_parallel = false,
            "zero" => {
                let (stage, shard) = value.split_once('/').unwrap_or((value, "0"));
                let stage = stage.parse().map_err(|_| bad())?;
                self.zero = Zero { stage, shard: number(shard)? };
            }
            "schedule" => {
                let found = Schedule::ALL.into_iter().find(|s| s.name() == value);
                self.schedule = found.ok_or_else(bad)?;
            }
            "recompute" => {
                self.recompute = match value.strip_prefix("layers:") {
                    Some(count) => Recompute::Layers(number(count)?),
                    None => recompute(value).ok_or_else(bad)?,
                }
            }
            "offload-optimizer" => self.offload.optimizer = place(value).ok_or_else(bad)?,
            "offload-parameters" => self.offload.parameters = place(value).ok_or_else(bad)?,
            "offload-activations" => self.offload.activations = place(value).ok_or_else(bad)?,
            "order" => self.order = order(value).ok_or_else(bad)?,
            "stages" => {
                let layers: Result<Vec<u32>, String> = value.split('.').map(number).collect();
                self.stage_layers = layers?;
            }
            _ => return Err(format!("there is no word `{name}`")),
        }
        Ok(())
    }
}

fn recompute(name: &str) -> Option<Recompute> {
    match name {
        "none" => Some(Recompute::None),
        "attention" | "attn" => Some(Recompute::Attention),
        "full" | "layer" => Some(Recompute::Full),
        "auto" => Some(Recompute::Auto),
        _ => None,
    }
}

fn place(name: &str) -> Option<Place> {
    match name {
        "device" => Some(Place::Device),
        "host" => Some(Place::Host),
        "disk" => Some(Place::Disk),
        _ => None,
    }
}

/// Reads a placement of the axes, as texts name it: `tp.cp.dp.pp`.
pub(crate) fn order(text: &str) -> Option<[RankAxis; 4]> {
    let axis = |name: &str| USUAL_ORDER.into_iter().find(|axis| axis.name() == name);
    let axes: Vec<RankAxis> = text.split('.').map(axis).collect::<Option<_>>()?;
    let order: [RankAxis; 4] = axes.try_into().ok()?;
    let mut sorted = order;
    sorted.sort();
    (sorted == USUAL_ORDER).then_some(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_read_back() {
        let texts = [
            "tp=1 pp=1 dp=1 mbs=1",
            "tp=8 cp=2 ep=4 pp=4 dp=8 mbs=2 vpp=3 sp zero=3/8 recompute=layers:2",
            "tp=2 pp=4 dp=1 mbs=1 schedule=zb-h2 recompute=auto offload-optimizer=host \
             offload-activations=disk order=tp.dp.cp.pp stages=3.4.4.1",
        ];
        for text in texts {
            let configuration: Configuration = text.parse().unwrap();
            assert_eq!(configuration.to_string(), text);
        }
        for text in
            ["tq=3", "tp=", "tp=-1", "order=tp.tp.cp.dp", "zero=x", "sp=2", "stages=", "tp=8 tp=4"]
        {
            let found = text.parse::<Configuration>().unwrap_err();
            assert_eq!((found.len(), found[0].code), (1, "E3402"), "{text}");
        }
    }

    #[test]
    fn strides_follow_the_order() {
        let mut c: Configuration = "tp=2 cp=3 pp=5 dp=7 mbs=1".parse().unwrap();
        assert_eq!([c.stride(RankAxis::Dp), c.stride(RankAxis::Pp)], [6, 42]);
        c.order = order("pp.tp.cp.dp").unwrap();
        assert_eq!([c.stride(RankAxis::Pp), c.stride(RankAxis::Tp)], [1, 5]);
        assert_eq!(
            (c.ranks(), c.microbatch_count(14), c.microbatch_count(15)),
            (210, Some(2), None)
        );
    }

    #[test]
    fn all_that_is_wrong_is_said() {
        let c: Configuration = "tp=0 pp=4 dp=3 mbs=1 vpp=8 zero=3/2 stages=1.2".parse().unwrap();
        assert_eq!(c.check(16).unwrap_err().len(), 4);
        assert!(
            "tp=2 pp=4 dp=3 mbs=1 stages=4.4.4.4"
                .parse::<Configuration>()
                .unwrap()
                .check(16)
                .is_ok()
        );
    }
}
