//! Learning-rate schedules.

use std::f64::consts::PI;

use ir::{Diagnostic, Span};

/// How the rate falls after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decay {
    /// Not at all.
    #[default]
    Constant,
    /// In a straight line.
    Linear,
    /// In half a cosine.
    Cosine,
}

/// A learning rate as a function of the step.
///
/// With steps `t` counted from 0, `w` steps of warm-up, the end of decay `d` and the smallest
/// ratio `m`, the rate is `peak` times
/// - `(t + 1) / w` for `t < w`;
/// - then `m + (1 - m) f(x)` with `x = min(1, (t - w) / (d - w))`, where `f` is 1 if constant,
///   `1 - x` if linear, `(1 + cos π x) / 2` if cosine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The greatest rate.
    pub peak: f64,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// How the rate falls.
    pub decay: Decay,
    /// The step, counted from the start of the run, at which the rate is smallest. Has nothing to
    /// do with how long the run is, so that a longer run repeats a shorter one.
    pub decay_steps: Option<u64>,
    /// The smallest rate as a share of the greatest.
    pub ratio_min: f64,
}

impl Schedule {
    /// Warm-up, then a constant rate.
    pub fn constant(peak: f64, warmup_steps: u64) -> Schedule {
        Schedule { peak, warmup_steps, decay: Decay::Constant, decay_steps: None, ratio_min: 0.0 }
    }

    /// Whether the numbers make sense together: E4050 for each that doesn't.
    pub fn check(&self) -> Vec<Diagnostic> {
        let wrong =
            |flag: &str, headline: String| Diagnostic::error("E4050", Span::of(flag), headline);
        let mut found = Vec::new();
        if !(self.peak.is_finite() && self.peak >= 0.0) {
            let headline = format!("{} is not a learning rate", self.peak);
            found.push(wrong("--lr", headline).help("use a number such as 3e-4"));
        }
        if !(0.0..=1.0).contains(&self.ratio_min) {
            let headline = format!("{} is not a share of the learning rate", self.ratio_min);
            found.push(wrong("--lr-min-ratio", headline).help("use a number from 0 to 1"));
        }
        match (self.decay, self.decay_steps) {
            (Decay::Linear | Decay::Cosine, None) => {
                let headline = "a learning rate that falls needs the step at which it has fallen";
                found.push(
                    wrong("--lr-decay", headline.to_owned())
                        .help("add --lr-decay-steps N, for example the steps of the whole run"),
                );
            }
            (Decay::Linear | Decay::Cosine, Some(steps)) if steps <= self.warmup_steps => {
                let headline = format!(
                    "the learning rate has fallen at step {steps}, and rises until step {}",
                    self.warmup_steps
                );
                let help = format!("use more than {} steps", self.warmup_steps);
                found.push(wrong("--lr-decay-steps", headline).help(help));
            }
            (Decay::Constant, Some(_)) => {
                let headline = "a constant learning rate has no end of decay".to_owned();
                let help = "add --lr-decay cosine or linear, or leave the steps out";
                found.push(wrong("--lr-decay-steps", headline).help(help));
            }
            (Decay::Constant, None) | (Decay::Linear | Decay::Cosine, Some(_)) => {}
        }
        found
    }

    /// The rate of a step, counted from 0.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let span = self.decay_steps.unwrap_or(0).saturating_sub(self.warmup_steps).max(1);
        let x = ((step - self.warmup_steps) as f64 / span as f64).min(1.0);
        let share = match self.decay {
            Decay::Constant => return self.peak,
            Decay::Linear => 1.0 - x,
            Decay::Cosine => (1.0 + (PI * x).cos()) / 2.0,
        };
        self.peak * (self.ratio_min + (1.0 - self.ratio_min) * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} is not {b}");
    }

    #[test]
    fn rates_rise_then_stay_or_fall() {
        let constant = Schedule::constant(2.0, 4);
        let rates: Vec<f64> = (0..6).map(|step| constant.rate(step)).collect();
        assert_eq!(rates, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]);
        assert_eq!(Schedule::constant(2.0, 0).rate(0), 2.0);
        let falling = |decay| Schedule { decay, decay_steps: Some(14), ratio_min: 0.1, ..constant };
        for decay in [Decay::Linear, Decay::Cosine] {
            near(falling(decay).rate(3), 2.0);
            near(falling(decay).rate(4), 2.0);
            near(falling(decay).rate(9), 1.1);
            near(falling(decay).rate(14), 0.2);
            near(falling(decay).rate(u64::MAX), 0.2);
        }
        near(falling(Decay::Linear).rate(5), 1.82);
        near(falling(Decay::Cosine).rate(5), 0.2 + 0.9 * (1.0 + (PI / 10.0).cos()));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let good = Schedule::constant(1e-3, 10);
        assert_eq!(good.check(), []);
        let bad = [
            Schedule { peak: f64::NAN, ..good },
            Schedule { peak: -1.0, ..good },
            Schedule { ratio_min: 1.5, ..good },
            Schedule { decay: Decay::Cosine, ..good },
            Schedule { decay: Decay::Cosine, decay_steps: Some(10), ..good },
            Schedule { decay_steps: Some(100), ..good },
        ];
        for schedule in bad {
            let found = schedule.check();
            assert_eq!((found.len(), found[0].code), (1, "E4050"), "{schedule:?}");
            assert!(found[0].help.is_some());
        }
        let all = Schedule { peak: -1.0, ratio_min: 2.0, decay: Decay::Linear, ..good };
        assert_eq!(all.check().len(), 3);
    }
}
