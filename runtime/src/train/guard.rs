//! The guard before the update: which steps are done, skipped, or end the run.
//!
//! All ranks see the same loss and norm after their reduction, and stop before the update where it
//! must not be done ([`Scalars::loss_max`], [`Scalars::norm_max`], finite numbers). Here it is
//! decided what these bounds are, and what a step that stopped means for the run.

use ir::plan::Optimizer;

use crate::execute::{Scalars, StepReport};

use super::scaling::{LossScale, Overflow};
use super::spike::{Losses, OnSpike};
use super::{Config, RunState};

/// Steps in a row that are skipped, at most, because they are not finite. Chosen: more than a loss
/// scale takes from its first value down to one.
const SKIPPED_MAX: u64 = 24;

/// Why a step was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skipped {
    /// Its loss or its gradient was not finite.
    NotFinite,
    /// Its loss was a spike.
    Loss,
    /// The norm of its gradient was above the bound.
    Norm,
}

impl Skipped {
    /// The reason, for people.
    pub fn reason(self) -> &'static str {
        match self {
            Skipped::NotFinite => "its loss or gradient is not finite",
            Skipped::Loss => "its loss is a spike",
            Skipped::Norm => "the norm of its gradient is above the bound",
        }
    }

    /// The name in the journal.
    pub fn name(self) -> &'static str {
        match self {
            Skipped::NotFinite => "not finite",
            Skipped::Loss => "loss",
            Skipped::Norm => "norm",
        }
    }
}

/// What a step comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Weights were updated.
    Done,
    /// They were not, and the run goes on.
    Skipped(Skipped),
    /// They were not, after so many steps in a row that were not finite either, and the run ends.
    Failed(u64),
}

/// What the guard knows of the steps so far.
pub(super) struct Guard {
    pub(super) losses: Losses,
    pub(super) loss_scale: Option<LossScale>,
    /// Steps that were skipped in the whole run.
    pub(super) skipped: u64,
    /// Of them the last ones, in a row, that were not finite.
    in_a_row: u64,
}

impl Guard {
    pub(super) fn new(config: &Config) -> Guard {
        let (losses, loss_scale) = (Losses::default(), config.loss_scale);
        Guard { losses, loss_scale, skipped: 0, in_a_row: 0 }
    }

    /// Goes on from a checkpoint.
    pub(super) fn resume(&mut self, state: &RunState) {
        self.loss_scale = self.loss_scale.map(|first| state.loss_scale().unwrap_or(first));
        self.skipped = state.skipped;
    }

    /// The scalars of a step, counted from 1. Skipped steps are none of the optimizer's.
    pub(super) fn scalars(&self, config: &Config, step: u64) -> Scalars {
        let updates = step - self.skipped.min(step - 1);
        let power = i32::try_from(updates).unwrap_or(i32::MAX);
        let correction = |beta: f64| 1.0 - beta.powi(power);
        let (correction1, correction2) = match config.optimizer {
            Optimizer::None | Optimizer::Sgd { .. } => (1.0, 1.0),
            Optimizer::AdamW { beta1, beta2, .. } => (correction(beta1), correction(beta2)),
        };
        let is_skipping = config.on_spike == OnSpike::Skip;
        let norm_max = config.spike_norm.filter(|_| is_skipping);
        Scalars {
            seed: config.seed,
            step: step as u32,
            rate: config.schedule.rate(step - 1),
            correction1,
            correction2,
            clip: config.clip.unwrap_or(f64::INFINITY),
            loss_scale: self.loss_scale.map_or(1.0, |scale| scale.scale),
            loss_max: if is_skipping { self.losses.limit() } else { f64::INFINITY },
            norm_max: norm_max.unwrap_or(f64::INFINITY),
        }
    }

    /// What a step comes to; the next one has the loss scale that follows from it.
    pub(super) fn judge(&mut self, config: &Config, report: &StepReport) -> Verdict {
        let is_finite = report.loss().is_finite() && report.grad_norm.is_finite();
        let overflow = if is_finite { Overflow::None } else { Overflow::Found };
        self.loss_scale = self.loss_scale.map(|scale| scale.after(overflow));
        if is_finite {
            self.in_a_row = 0;
            if !report.is_skipped {
                self.losses.add(report.loss());
                return Verdict::Done;
            }
            self.skipped += 1;
            let is_loss = report.loss() > self.losses.limit();
            return Verdict::Skipped(if is_loss { Skipped::Loss } else { Skipped::Norm });
        }
        let goes_on = config.loss_scale.is_some() || config.on_spike == OnSpike::Skip;
        if !goes_on || self.in_a_row == SKIPPED_MAX {
            return Verdict::Failed(self.in_a_row);
        }
        (self.skipped, self.in_a_row) = (self.skipped + 1, self.in_a_row + 1);
        Verdict::Skipped(Skipped::NotFinite)
    }
}
