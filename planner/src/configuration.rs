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
use ir::plan::parse_order;
use ir::{Axis, Diagnostic, Span};
use serde::{Deserialize, Serialize};

use crate::divisors::divisors;

pub use ir::plan::{Offload, Place, Schedule, USUAL_ORDER, Zero};

/// What is recomputed in the backward pass.
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
    /// Whole layers, from their inputs: this number of layers of each stage.
    Layers(u32),
    /// All layers, from their inputs.
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

/// How a job lies over its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Configuration {
    /// Tensor-parallel ranks.
    pub tp: u32,
    /// Context-parallel ranks: they share a sequence.
    pub cp: u32,
    /// Expert-parallel ranks: a sub-axis of `dp` × `cp` × `tp`, innermost.
    pub ep: u32,
    /// Expert-tensor-parallel ranks: those of `tp` that slice the same experts; 0 for as many as
    /// the executor has, see [`ExpertPlacement`](crate::estimate::profile::ExpertPlacement).
    pub etp: u32,
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
    /// What is recomputed.
    pub recompute: Recompute,
    /// What lies elsewhere.
    pub offload: Offload,
    /// Placement of the axes, innermost first: a permutation.
    pub order: [Axis; 4],
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
            etp: 0,
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
    pub fn size(&self, axis: Axis) -> u32 {
        match axis {
            Axis::Tp => self.tp,
            Axis::Cp => self.cp,
            Axis::Dp => self.dp,
            Axis::Pp => self.pp,
            Axis::Ep => self.ep,
        }
    }

    /// Layers of the deepest stage, in a model of `layers` layers.
    pub fn deepest(&self, layers: u32) -> u32 {
        self.stage_layers.iter().copied().max().unwrap_or(layers.div_ceil(self.pp))
    }

    /// Layers of the stage `index` in a model of `layers` layers, and the number of stages from it
    /// on that have equally many. Without `stage_layers` the stages are as even as possible: the
    /// first ones have one layer more, and where chunks are interleaved the stages at both ends,
    /// which also have the embedding and the head, have one less.
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

    /// Layers of the chunk `chunk` of a stage of `layers` layers. Chunks with one layer less than
    /// others come first in the upper half of the stages, and last in the lower half.
    pub fn chunk_layers(&self, layers: u32, stage: u32, chunk: u32) -> u32 {
        let (each, more) = (layers / self.vpp, layers % self.vpp);
        let is_upper = stage < self.pp.div_ceil(2);
        let has_more = if is_upper { chunk + more >= self.vpp } else { chunk < more };
        each + u32::from(has_more)
    }

    /// Layers of all chunks of a model of `layers` layers, as a micro-batch meets them: the first
    /// of each stage, then the next ones.
    pub fn chunks(&self, layers: u32) -> Vec<u32> {
        let of = |chunk, stage| self.chunk_layers(self.layers_of(layers, stage).0, stage, chunk);
        (0..self.vpp).flat_map(|chunk| (0..self.pp).map(move |stage| of(chunk, stage))).collect()
    }

    /// Whether a stage of `layers` layers has enough for its chunks: at least one for each, except
    /// for the first and the last chunk of all, which have the embedding and the head.
    pub fn fills_chunks(&self, layers: u32, index: u32) -> bool {
        let is_end = self.vpp > 1 && (index == 0 || index + 1 == self.pp);
        layers > 0 && layers + u32::from(is_end) >= self.vpp
    }

    /// Whether `recompute=layers:N` means all layers: no stage of a model of `layers` has more.
    pub fn recomputes_all(&self, layers: u32) -> bool {
        matches!(self.recompute, Recompute::Layers(count) if count >= self.deepest(layers))
    }

    /// Distance between neighbours along an axis, in ranks.
    pub fn stride(&self, axis: Axis) -> u64 {
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

    /// Whether `etp` may be the size of expert tensor parallelism.
    pub(crate) fn may_slice_experts(&self, etp: u32) -> bool {
        let stage = u64::from(self.tp) * u64::from(self.cp) * u64::from(self.dp);
        let shared = u64::from(self.ep) * u64::from(etp);
        shared > 0 && self.tp.is_multiple_of(etp) && stage.is_multiple_of(shared)
    }

    /// Counts by their names in texts.
    fn counts(&self) -> [(&'static str, u32); 7] {
        [
            ("tp", self.tp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("pp", self.pp),
            ("vpp", self.vpp),
            ("dp", self.dp),
            ("mbs", self.microbatch),
        ]
    }

    /// Ranks, as a number that does not overflow.
    fn rank_count(&self) -> f64 {
        [self.tp, self.cp, self.pp, self.dp].map(f64::from).iter().product()
    }

    /// Whether there are ranks, micro-batches and chunks, and not too many to be counted.
    pub(crate) fn is_countable(&self) -> bool {
        self.counts().iter().all(|(_, count)| *count > 0) && self.rank_count() <= RANKS_MAX
    }

    /// Everything about the configuration alone that makes no sense. `layers` is the model's depth.
    ///
    /// # Errors
    /// `E3401`, once for each.
    pub fn check(&self, layers: u32) -> Result<(), Vec<Diagnostic>> {
        let mut wrong = Vec::new();
        let mut say = |headline: String, help: String| {
            let span = Span::of(self.to_string());
            wrong.push(Diagnostic::error("E3401", span, headline).help(help));
        };
        let ranks = self.rank_count();
        if ranks > RANKS_MAX {
            let headline = format!("{ranks:.0} ranks, more than {RANKS_MAX:.0}");
            say(headline, "write smaller counts of ranks".to_owned());
            return Err(wrong);
        }
        for (name, _) in self.counts().into_iter().filter(|(_, count)| *count == 0) {
            say(format!("`{name}` is 0"), format!("write `{name}=1`, or more"));
        }
        let chunks = u64::from(self.pp) * u64::from(self.vpp);
        // The first and the last of interleaved chunks may have none.
        let spare = if self.vpp > 1 && self.pp > 1 { 2 } else { 0 };
        if chunks > u64::from(layers) + spare {
            let headline = format!("{chunks} pipeline chunks of {layers} layers");
            say(headline, format!("use pp · vpp of {layers} at most"));
        }
        if self.vpp > 1 && self.pp == 1 {
            let headline = format!("`vpp` is {} where there is one stage", self.vpp);
            say(headline, "leave `vpp` out, or use pp=2 or more".to_owned());
        }
        if self.vpp > 1 && self.schedule != Schedule::OneForwardOneBackward {
            let headline = format!("`vpp` is {} under {}", self.vpp, self.schedule.name());
            say(headline, "leave `vpp` or `schedule` out: chunks are interleaved by 1f1b".into());
        }
        let others = u64::from(self.tp) * u64::from(self.cp) * u64::from(self.dp);
        if self.ep > 0 && !others.is_multiple_of(u64::from(self.ep)) {
            let headline =
                format!("`ep` is {}, which does not divide tp · cp · dp = {others}", self.ep);
            say(headline, format!("use ep={}", divisor_within(others, self.ep.into())));
        } else if self.etp > 0 && !self.may_slice_experts(self.etp) {
            let (tp, ep, etp) = (self.tp, self.ep, self.etp);
            let near = divisors(tp).into_iter().rfind(|etp| self.may_slice_experts(*etp));
            let shared = u64::from(ep) * u64::from(etp);
            let headline = if tp.is_multiple_of(etp) {
                format!("ep · etp = {shared} does not divide tp · cp · dp = {others}")
            } else {
                format!("`etp` is {etp}, which does not divide tp={tp}")
            };
            let help = near.map_or("leave `etp` out".to_owned(), |near| format!("use etp={near}"));
            say(headline, help);
        }
        if self.zero.stage > 3 {
            say(format!("`zero` is {}", self.zero.stage), "write zero=0 to zero=3".to_owned());
        }
        let all = u64::from(self.dp) * u64::from(self.cp);
        let shard = u64::from(self.zero.shard);
        if shard > 0 && (shard > all || !all.is_multiple_of(shard)) {
            let (stage, near) = (self.zero.stage, divisor_within(all, shard));
            let headline = format!("shards over {shard} of {all} ranks");
            say(headline, format!("write `zero={stage}/{near}`, or `zero={stage}` for all"));
        }
        let named: u64 = self.stage_layers.iter().map(|n| u64::from(*n)).sum();
        let stages = self.stage_layers.len();
        if stages > 0 && (stages != self.pp as usize || named != u64::from(layers)) {
            let pp = self.pp;
            let headline = format!("{stages} stages of {named} layers for pp={pp} of {layers}");
            say(headline, format!("write {pp} numbers that sum to {layers}, or leave them out"));
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }
}

/// The largest divisor of a number that is no larger than another; 1 of nothing.
pub(crate) fn divisor_within(of: u64, most: u64) -> u64 {
    divisors(of).into_iter().rfind(|divisor| *divisor <= most).unwrap_or(1)
}

impl fmt::Display for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp={}", self.tp)?;
        for (name, count) in [("cp", self.cp), ("ep", self.ep)] {
            if count != 1 {
                write!(f, " {name}={count}")?;
            }
        }
        if self.etp != 0 {
            write!(f, " etp={}", self.etp)?;
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
        for (name, place) in self.offload.places() {
            if place != Place::Device {
                write!(f, " offload-{name}={}", place.name())?;
            }
        }
        if self.order != USUAL_ORDER {
            write!(f, " order={}", self.order.map(Axis::name).join("."))?;
        }
        if !self.stage_layers.is_empty() {
            write!(f, " stages={}", stages_text(&self.stage_layers))?;
        }
        Ok(())
    }
}

/// The words of the text form.
pub const WORDS: [&str; 17] = [
    "tp",
    "cp",
    "ep",
    "etp",
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
            let span = || Span { source: "configuration".into(), bytes: start..start + word.len() };
            if let Err((headline, help)) = configuration.read_word(word) {
                wrong.push(Diagnostic::error("E3402", span(), headline).help(help));
                continue;
            }
            let name = word.split('=').next().unwrap_or(word);
            if seen.contains(&name) {
                let headline = format!("`{name}` is said twice");
                wrong.push(Diagnostic::error("E3402", span(), headline).help("write it once"));
            }
            seen.push(name);
        }
        if wrong.is_empty() { Ok(configuration) } else { Err(wrong) }
    }
}

impl Configuration {
    /// Reads a word of the text form: `recompute=full`.
    ///
    /// # Errors
    /// What is wrong with it, and what to write.
    pub fn read_word(&mut self, word: &str) -> Result<(), (String, String)> {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        let bad = || (format!("`{word}` says nothing"), allowed(name, value));
        let number = |text: &str| text.parse::<u32>().map_err(|_| bad());
        match name {
            "tp" => self.tp = number(value)?,
            "cp" => self.cp = number(value)?,
            "ep" => self.ep = number(value)?,
            "etp" => self.etp = number(value)?,
            "pp" => self.pp = number(value)?,
            "vpp" => self.vpp = number(value)?,
            "dp" => self.dp = number(value)?,
            "mbs" => self.microbatch = number(value)?,
            "sp" if value.is_empty() || value == "1" => self.sequence_parallel = true,
            "sp" if value == "0" => self.sequence_parallel = false,
            "sp" => return Err(bad()),
            "zero" => {
                let (stage, shard) = value.split_once('/').unwrap_or((value, "0"));
                let stage = stage.parse().map_err(|_| bad())?;
                self.zero = Zero { stage, shard: number(shard)? };
            }
            "schedule" => {
                self.schedule = schedule(value).ok_or_else(bad)?;
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
            "order" => self.order = parse_order(value).ok_or_else(bad)?,
            "stages" => {
                self.stage_layers = read_stages(value).ok_or_else(bad)?;
            }
            _ => {
                let help = match nearest(name, WORDS) {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => format!("the words are {}", WORDS.join(", ")),
                };
                return Err((format!("there is no word `{name}`"), help));
            }
        }
        Ok(())
    }
}

/// What a word may say, or what it nearly says.
fn allowed(name: &str, value: &str) -> String {
    let one_of = |names: &[&str]| match nearest(value, names.iter().copied()) {
        Some(near) => format!("did you mean `{name}={near}`?"),
        None => format!("write `{name}=` with one of {}", names.join(", ")),
    };
    match name {
        "sp" => "write `sp`, or `sp=0`".to_owned(),
        "zero" => "write `zero=1`, or over how many ranks too: `zero=3/8`".to_owned(),
        "schedule" => one_of(&Schedule::ALL.map(Schedule::name)),
        "recompute" => one_of(&["none", "attention", "full", "auto", "layers:2"]),
        "order" => "write the four axes, innermost first: `order=tp.cp.dp.pp`".to_owned(),
        "stages" => {
            "write the layers of each stage: `stages=8.8.8.7`, or `stages=8x3.7`".to_owned()
        }
        _ if name.starts_with("offload-") => one_of(&["device", "host", "disk"]),
        _ => format!("write a whole number, such as `{name}=8`"),
    }
}

/// Equal stages in a row that are written as one. Chosen: fewer are read faster than counted.
const RUN_MIN: usize = 4;

/// Layers of stages, `7.8x62.6`: runs of equal ones with how many there are.
fn stages_text(layers: &[u32]) -> String {
    let runs = layers.chunk_by(|a, b| a == b).flat_map(|run| match run.len() {
        RUN_MIN.. => vec![format!("{}x{}", run[0], run.len())],
        _ => run.iter().map(u32::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(".")
}

/// The most stages that a text may have. Chosen: more than any model has layers.
const STAGES_MAX: usize = 1 << 16;

fn read_stages(text: &str) -> Option<Vec<u32>> {
    let mut layers = Vec::new();
    for run in text.split('.') {
        let (each, count) = run.split_once('x').unwrap_or((run, "1"));
        let count: usize = count.parse().ok()?;
        if layers.len().saturating_add(count) > STAGES_MAX {
            return None;
        }
        layers.extend(std::iter::repeat_n(each.parse::<u32>().ok()?, count));
    }
    Some(layers)
}

/// A schedule, also by the names that peers give it: 1F1B interleaves the chunks of a stage.
fn schedule(name: &str) -> Option<Schedule> {
    match name {
        "interleaved" => Some(Schedule::OneForwardOneBackward),
        "zb" => Some(Schedule::ZeroBubbleH1),
        _ => Schedule::ALL.into_iter().find(|schedule| schedule.name() == name),
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
    Place::ALL.into_iter().find(|place| place.name() == name)
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
            "tp=1 pp=9 dp=1 mbs=1 stages=3.4x5.1.1.1",
        ];
        for text in texts {
            let configuration: Configuration = text.parse().unwrap();
            assert_eq!(configuration.to_string(), text);
        }
        for text in [
            "tq=3",
            "tp=",
            "tp=-1",
            "order=tp.tp.cp.dp",
            "zero=x",
            "sp=2",
            "stages=",
            "tp=8 tp=4",
            "stages=1x",
            "stages=1x99999999999",
            "stages=x3",
        ] {
            let found = text.parse::<Configuration>().unwrap_err();
            assert_eq!((found.len(), found[0].code), (1, "E3402"), "{text}");
        }
    }

    /// An unknown word is answered with the words that are allowed, and with the nearest one.
    #[test]
    fn words_that_say_nothing_have_a_way_out() {
        for (text, help) in [
            ("recompute=ful", "did you mean `recompute=full`?"),
            ("recompute=sometimes", "one of none, attention, full, auto, layers:2"),
            ("schedule=1f1", "did you mean `schedule=1f1b`?"),
            ("offload-optimizer=cpuu", "one of device, host, disk"),
            ("pp=x", "write a whole number, such as `pp=8`"),
            ("zero=a", "`zero=3/8`"),
            ("order=tp", "tp.cp.dp.pp"),
            ("stages=1.x", "layers of each stage"),
            ("sp=yes", "`sp=0`"),
            ("recompte=full", "did you mean `recompute`?"),
            ("nothing=1", "the words are tp, cp"),
        ] {
            let found = text.parse::<Configuration>().unwrap_err();
            let told = found[0].help.clone().unwrap_or_default();
            assert!(told.contains(help), "{text}: {told}");
        }
    }

    #[test]
    fn strides_follow_the_order() {
        let mut c: Configuration = "tp=2 cp=3 pp=5 dp=7 mbs=1".parse().unwrap();
        assert_eq!([c.stride(Axis::Dp), c.stride(Axis::Pp)], [6, 42]);
        c.order = parse_order("pp.tp.cp.dp").unwrap();
        assert_eq!([c.stride(Axis::Pp), c.stride(Axis::Tp)], [1, 5]);
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
