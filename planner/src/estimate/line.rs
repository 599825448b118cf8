//! A pipeline whose stages lie on devices of several kinds, one kind after another.
//!
//! The formula is that of [`step`](super::step), which sees stages and not where they are: each
//! stage computes, exchanges and holds what it does on its own devices. A message between stages is
//! as slow as the slowest one of the pipeline; from one kind of devices to the next it leaves their
//! nodes.

use super::memory::Memory;
use super::network::INNER_INTERFERENCE;
use super::price::Prices;
use super::stage::{Run, Stage, stage};
use super::step::{After, Breakdown, passes_of};
use super::terms::Terms;
use super::{Estimator, interval};
use crate::configuration::Configuration;

/// Stages that follow each other on devices of one kind.
#[derive(Clone, Copy, Debug)]
pub struct Section<'a> {
    /// Prices steps on these devices.
    pub estimator: &'a Estimator<'a>,
    /// How they are used; `pp` is the number of stages of all sections.
    pub configuration: &'a Configuration,
    /// The tables of the configuration's inside.
    pub prices: &'a Prices,
    /// The link to the next section, where it is narrower than the networks of both.
    pub link: Option<Trunk>,
}

/// A link that all ranks of a stage share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trunk {
    /// Bytes per second, each direction.
    pub bytes_per_s: f64,
    /// Seconds to the first byte.
    pub latency_s: f64,
}

/// What one stage of a line costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageCost {
    /// Seconds of a micro-batch, forward and backward.
    pub seconds: f64,
    /// Seconds of it in which a device computes.
    pub busy_s: f64,
    /// What a device holds.
    pub memory: Memory,
}

/// What a step of a line costs.
#[derive(Clone, Debug, PartialEq)]
pub struct LineStep {
    /// Where the time goes.
    pub breakdown: Breakdown,
    /// One in ten steps is shorter than the first, one in ten longer than the second.
    pub interval_s: [f64; 2],
    /// The stages in order.
    pub stages: Vec<StageCost>,
}

/// Layers of a stage: its index, its first layer, and the first one that it has not.
pub type Slot = (u32, u32, u32);

impl Section<'_> {
    fn terms(&self) -> Terms<'_> {
        self.estimator.terms()
    }

    fn stage(&self, (index, from, to): Slot, is_far: bool) -> (Run, Stage) {
        let run = Run { index, count: 1, from, to };
        (run, stage(self.configuration, self.prices, &run, is_far))
    }

    /// What a stage costs in a step of `count` micro-batches, without its messages.
    pub fn cost(&self, slot: Slot, is_far: bool, count: u64) -> StageCost {
        let (run, stage) = self.stage(slot, is_far);
        self.told(&run, &stage, count)
    }

    fn told(&self, run: &Run, stage: &Stage, count: u64) -> StageCost {
        StageCost {
            seconds: stage.total_s(),
            busy_s: stage.pass.busy_s() + stage.again_busy_s,
            memory: self.terms().held(self.configuration, self.prices, run, stage, count),
        }
    }

    /// Seconds that a micro-batch waits for the link to the next section, which its copies share;
    /// nothing hides more of it than a forward pass takes.
    fn link_s(&self, slowest_s: f64) -> f64 {
        let Some(link) = self.link else { return 0.0 };
        let c = self.configuration;
        let copies = f64::from(c.dp) * f64::from(c.cp);
        let seconds = link.latency_s + copies * self.prices.boundary_bytes / link.bytes_per_s;
        let forward_s = slowest_s / 3.0;
        let hidden = if self.terms().profile.sends_hidden { seconds.min(forward_s) } else { 0.0 };
        seconds - hidden + hidden * INNER_INTERFERENCE
    }

    /// Seconds of a message to the next stage, which is in another section or not.
    fn send_s(&self, leaves: bool) -> f64 {
        let near = self.terms().stages_apart(self.configuration);
        let apart = if leaves { u64::MAX } else { near };
        self.terms().send_over_s(self.configuration, self.prices, apart)
    }
}

/// The step of `count` micro-batches on sections that follow each other, each with the layers of
/// its stages.
pub fn step(sections: &[(Section<'_>, &[u32])], count: u64) -> LineStep {
    let leaves = sections.len() > 1;
    let (mut at, mut send_s, mut first_layer) = (0, 0.0f64, 0);
    let mut stages = Vec::new();
    for (section, layers) in sections {
        if layers.len() > 1 {
            send_s = send_s.max(section.send_s(false));
        }
        if leaves {
            send_s = send_s.max(section.send_s(true));
        }
        let is_far = leaves || section.terms().sends_far(section.configuration);
        for count in *layers {
            let slot = (at, first_layer, first_layer + count);
            stages.push((section, section.stage(slot, is_far)));
            (at, first_layer) = (at + 1, first_layer + count);
        }
    }
    let runs: Vec<(Run, Stage)> = stages.iter().map(|(_, stage)| *stage).collect();
    let slowest_s = runs.iter().map(|(_, stage)| stage.total_s()).fold(0.0, f64::max);
    let links = sections.iter().map(|(section, _)| section.link_s(slowest_s));
    send_s = links.fold(send_s, f64::max);
    let mut breakdown = passes_of(sections[0].0.configuration, send_s, &runs, count);
    let mut after = After::default();
    for (section, (run, stage)) in &stages {
        let (terms, c, m) = (section.terms(), section.configuration, count as f64);
        let exchanges = terms.exchanges(c, &terms.copies(c), stage, m);
        after.take(&terms.alone(c, stage, exchanges, m), run.count, send_s);
    }
    after.tell(&mut breakdown);
    let seconds = breakdown.total_s();
    let factors = sections.iter().map(|(section, _)| {
        let Estimator { rates, job, profile, .. } = section.estimator;
        interval::factors(&breakdown, rates, job.arithmetic, profile.doubt)
    });
    let [low, high] = factors
        .fold([1.0f64, 1.0f64], |widest, [low, high]| [widest[0].min(low), widest[1].max(high)]);
    LineStep {
        breakdown,
        interval_s: [seconds * low, seconds * high],
        stages: stages.iter().map(|(s, (run, stage))| s.told(run, stage, count)).collect(),
    }
}
