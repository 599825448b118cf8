//! Goodput of a run that fails now and then: how often to save, and what part of the time counts.
//!
//! After J. T. Daly, *A higher order estimate of the optimum checkpoint interval for restart dumps*
//! (2006): failures come as a Poisson process with a mean time `M` between them; `τ` seconds of
//! steps are followed by a save of `δ` seconds, and a failure costs what was done since the last
//! save, and `R` seconds to start again. Then `τ` seconds of steps take on average
//!
//! ```text
//! M e^(R/M) (e^((τ+δ)/M) − 1)
//! ```

/// What interrupts a run, and what that costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interruptions {
    /// Mean seconds between failures of the whole job: `M`.
    pub mtbf_s: f64,
    /// Seconds in which a checkpoint is saved and no step is computed: `δ`.
    pub save_s: f64,
    /// Seconds from a failure to the first step after it: `R`.
    pub restart_s: f64,
}

impl Interruptions {
    /// Those of a job on `devices`, each of which fails on its own after `mtbf_s` on average.
    pub fn of_devices(devices: f64, mtbf_s: f64, save_s: f64, restart_s: f64) -> Interruptions {
        Interruptions { mtbf_s: mtbf_s / devices, save_s, restart_s }
    }

    /// The share of the time that goes into steps that count, with a save after every `interval_s`
    /// seconds of steps: 0 to 1.
    pub fn goodput(&self, interval_s: f64) -> f64 {
        let Interruptions { mtbf_s: m, save_s, restart_s } = *self;
        let taken_s = m * (restart_s / m).exp() * ((interval_s + save_s) / m).exp_m1();
        if taken_s > 0.0 { interval_s / taken_s } else { 1.0 }
    }

    /// Seconds of steps between saves with the best goodput: the root of
    /// `(τ/M − 1) e^((τ+δ)/M) + 1`, which lies between 0 and `M`.
    pub fn best_interval_s(&self) -> f64 {
        let Interruptions { mtbf_s: m, save_s, .. } = *self;
        let slope = |interval: f64| (interval / m - 1.0) * ((interval + save_s) / m).exp() + 1.0;
        let (mut low, mut high) = (0.0, m);
        for _ in 0..200 {
            let middle = 0.5 * (low + high);
            if slope(middle) > 0.0 { high = middle } else { low = middle }
        }
        0.5 * (low + high)
    }
}

#[cfg(test)]
mod tests {
    use ir::random::{mix, uniform};

    use super::*;

    /// Where saves are short, the optimum is Young's √(2 δ M) (1974).
    #[test]
    fn short_saves_are_as_often_as_young_says() {
        for (mtbf_s, save_s) in [(1e5, 1.0), (1e6, 10.0), (4e4, 0.1)] {
            let run = Interruptions { mtbf_s, save_s, restart_s: 0.0 };
            let young = (2.0 * save_s * mtbf_s).sqrt();
            let ratio = run.best_interval_s() / young;
            assert!((ratio - 1.0).abs() < 0.01, "{mtbf_s} {save_s}: {ratio}");
        }
    }

    /// No other interval has a better goodput.
    #[test]
    fn the_best_interval_is_the_best() {
        for seed in 0..200 {
            let draw = |at: u64| f64::from(uniform(mix(seed), at));
            let mtbf_s = 10f64.powf(2.0 + 5.0 * draw(0));
            let run = Interruptions {
                mtbf_s,
                save_s: mtbf_s * 10f64.powf(-4.0 + 4.0 * draw(1)),
                restart_s: mtbf_s * draw(2),
            };
            let best = run.best_interval_s();
            for factor in [0.3, 0.8, 0.98, 1.02, 1.3, 3.0] {
                let other = run.goodput(factor * best);
                assert!(run.goodput(best) >= other, "seed {seed}, {run:?}: {factor}");
            }
        }
    }

    /// A run that is simulated failure by failure has the goodput of the formula.
    #[test]
    fn simulated_runs_have_this_goodput() {
        for (seed, save_s, restart_s) in [(1, 60.0, 300.0), (2, 600.0, 60.0), (3, 5.0, 1800.0)] {
            let run = Interruptions { mtbf_s: 10_000.0, save_s, restart_s };
            let interval = run.best_interval_s();
            let mut at = 0_u64;
            let mut until_failure = || {
                at += 1;
                -run.mtbf_s * f64::from(1.0 - uniform(mix(seed), at)).ln()
            };
            let (mut time, mut done, mut fails_in) = (0.0, 0.0, until_failure());
            while done < 3000.0 * interval {
                // A failure during a restart starts it again, as in the formula.
                if fails_in >= interval + save_s {
                    (time, done) = (time + interval + save_s, done + interval);
                    fails_in -= interval + save_s;
                } else {
                    time += fails_in;
                    fails_in = until_failure();
                    while fails_in < restart_s {
                        time += fails_in;
                        fails_in = until_failure();
                    }
                    (time, fails_in) = (time + restart_s, fails_in - restart_s);
                }
            }
            let (found, expected) = (done / time, run.goodput(interval));
            assert!((found / expected - 1.0).abs() < 0.02, "{run:?}: {found}, {expected}");
        }
    }
}
