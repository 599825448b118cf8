//! Losses that leap.

use std::collections::VecDeque;

/// Losses that a new one is compared with, at most; as many as llm.c keeps.
const WINDOW: usize = 128;
/// Losses from which on there is a comparison.
const LEAST: usize = 16;
/// Standard deviations above the mean from which on a loss is a spike. Chosen: a normal loss is
/// above it once in 10⁹ steps.
const DEVIATIONS: f64 = 6.0;
/// The smallest standard deviation that is believed, as a share of the mean: losses of a model that
/// hardly learns any more differ by less than matters.
const SHARE: f64 = 0.01;

/// What is done about a loss that leaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnSpike {
    /// It is reported.
    Warn,
    /// The step is not done: weights and states stay, the next batch comes.
    Skip,
    /// The run ends, and its last checkpoint is from before.
    Stop,
}

/// The losses of the last steps.
#[derive(Clone, Debug, Default)]
pub struct Losses {
    last: VecDeque<f64>,
}

impl Losses {
    /// Adds the loss of a step. If it is a spike: how many standard deviations it lies above the
    /// mean of those before.
    pub fn add(&mut self, loss: f64) -> Option<f64> {
        let above = self.above(loss);
        if self.last.len() == WINDOW {
            self.last.pop_front();
        }
        self.last.push_back(loss);
        above
    }

    /// How many standard deviations a loss lies above the mean of the last ones, if it is a spike.
    pub fn above(&self, loss: f64) -> Option<f64> {
        let [mean, deviation] = self.spread();
        let above = (loss - mean) / deviation;
        (self.last.len() >= LEAST && above > DEVIATIONS).then_some(above)
    }

    /// The loss above which one is a spike; infinite where there are too few to tell.
    pub fn limit(&self) -> f64 {
        let [mean, deviation] = self.spread();
        if self.last.len() < LEAST { f64::INFINITY } else { mean + DEVIATIONS * deviation }
    }

    /// The mean, and the standard deviation that is believed.
    fn spread(&self) -> [f64; 2] {
        let count = self.last.len() as f64;
        let mean = self.last.iter().sum::<f64>() / count;
        let variance = self.last.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        [mean, variance.sqrt().max(SHARE * mean.abs())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leap_is_a_spike_and_noise_and_learning_are_none() {
        let mut losses = Losses::default();
        for step in 0..400_u32 {
            let noise = f64::from(step.wrapping_mul(2_654_435_761) >> 16) / 65536.0 - 0.5;
            let loss = 2.0 + 8.0 * (-f64::from(step) / 60.0).exp() + 0.2 * noise;
            assert_eq!(losses.add(loss), None, "step {step}");
        }
        assert!(losses.add(4.0).is_some_and(|above| above > DEVIATIONS));
        assert_eq!(losses.add(2.1), None);
    }

    #[test]
    fn the_first_losses_of_a_run_are_compared_with_nothing() {
        let mut losses = Losses::default();
        assert!((0..LEAST).all(|step| losses.add(10f64.powi(step as i32)).is_none()));
    }
}
