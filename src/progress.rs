//! The progress of a training run on stderr: a bar on a terminal, plain lines elsewhere.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use runtime::train::{Progress, Skipped, SlowRank, Summary};

use crate::output;

/// Lines of a run without a terminal, besides those with a validation.
const LINES: u64 = 20;

/// Watches a run, and shows how it goes.
pub struct Watcher {
    bar: Option<ProgressBar>,
    every: u64,
    steps: u64,
    done: u64,
    has_header: bool,
    start: Instant,
    step_s: Vec<f64>,
    /// The loss of the first step that was watched.
    pub first_loss: Option<f64>,
    /// The last validation.
    pub validation: Option<f64>,
}

impl Watcher {
    /// Watches a run of `steps` steps, `done` of which are done.
    pub fn new(steps: u64, done: u64) -> Watcher {
        let bar = output::is_interactive().then(|| {
            let template = "{bar:24} {pos}/{len} {msg} {eta} left";
            let style = ProgressStyle::with_template(template);
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(steps).with_position(done).with_style(style)
        });
        Watcher {
            bar,
            every: (steps.saturating_sub(done) / LINES).max(1),
            steps,
            done,
            has_header: false,
            start: Instant::now(),
            step_s: Vec::new(),
            first_loss: None,
            validation: None,
        }
    }

    /// Shows a step.
    pub fn report(&mut self, progress: &Progress) {
        let is_first = self.first_loss.is_none();
        self.first_loss.get_or_insert(progress.loss);
        self.validation = progress.validation.or(self.validation);
        self.step_s.push(progress.step_s);
        if let Some(bar) = &self.bar {
            let tokens = output::count(progress.tokens_per_s as u64);
            let step = output::seconds(progress.step_s);
            let predicted = predicted(progress);
            bar.set_position(progress.step);
            bar.set_message(format!(
                "loss {:.3}, {tokens} tokens/s, {step} a step{predicted}",
                progress.loss
            ));
        }
        if let Some(why) = progress.skipped {
            self.warn(&match (why, progress.loss_scale) {
                (Skipped::NotFinite, Some(scale)) => format!(
                    "step {} overflows with a loss scale of {scale}: skipped, the next has half",
                    progress.step
                ),
                _ => format!("step {} is skipped: {}", progress.step, why.reason()),
            });
        }
        if let Some(above) = progress.spike {
            self.warn(&format!(
                "the loss of step {} leaps to {:.4}, {above:.1} standard deviations above the last",
                progress.step, progress.loss
            ));
        }
        if let Some(SlowRank { rank, times }) = progress.slow {
            self.warn(&format!(
                "rank {rank} computes {times:.1} times as long as half of the ranks, for ten steps"
            ));
        }
        let is_due = progress.step.is_multiple_of(self.every) || is_first;
        if progress.validation.is_some() || (self.bar.is_none() && is_due) {
            self.line(progress);
        }
    }

    fn warn(&self, text: &str) {
        let text = format!("warning: {text}");
        match &self.bar {
            Some(bar) => bar.println(text),
            None => output::note(&text),
        }
    }

    fn line(&mut self, progress: &Progress) {
        let validation = progress.validation.map(|loss| format!("{loss:.4}")).unwrap_or_default();
        let mut text = String::new();
        let step_s = self.median_step_s().unwrap_or(progress.step_s);
        let left = match self.steps.saturating_sub(progress.step) {
            0 => "done".to_owned(),
            steps => output::seconds(step_s * steps as f64),
        };
        if !self.has_header {
            self.has_header = true;
            text += "    step      loss      val      norm        lr  tokens/s    step time";
            text += "  (predicted), left\n";
        }
        text += &format!(
            "{:>8} {:>9.4} {validation:>8} {:>9.3} {:>9.2e} {:>9} {:>12} {}, {left}",
            progress.step,
            progress.loss,
            progress.grad_norm,
            progress.rate,
            output::count(progress.tokens_per_s as u64),
            output::seconds(progress.step_s),
            predicted(progress),
        );
        match &self.bar {
            Some(bar) => bar.println(text),
            None => output::note(&text),
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// The time of half of the steps, at most.
    pub fn median_step_s(&self) -> Option<f64> {
        let mut sorted = self.step_s.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }

    /// What was reached, for stdout.
    pub fn summary(&self, summary: &Summary) -> String {
        let Some(last) = &summary.last else {
            return format!(
                "nothing to do: {} steps are done already; --steps makes the run longer",
                summary.steps
            );
        };
        let took = self.start.elapsed().as_secs();
        let steps = match self.done {
            0 => summary.steps.to_string(),
            done => format!("{} more, {} in all,", summary.steps - done, summary.steps),
        };
        let mut text = format!("steps       {steps} in {} min {:02} s", took / 60, took % 60);
        let median = self.median_step_s().unwrap_or(last.step_s);
        let tokens = last.tokens_per_s * last.step_s / median;
        text += &format!(", {} tokens/s\n", output::count(tokens as u64));
        let first = self.first_loss.unwrap_or(last.loss);
        text += &format!("loss        {first:.4} to {:.4} nats a token\n", last.loss);
        if let Some(validation) = self.validation {
            let bits = validation / std::f64::consts::LN_2;
            text += &format!("validation  {validation:.4} nats, {bits:.3} bits a token");
            let gain = 100.0 * (1.0 - validation / first);
            if self.done == 0 && gain >= 0.5 {
                text += &format!(", {gain:.0} % below the first loss");
            }
            text += "\n";
        }
        text += &format!("step time   {} measured", output::seconds(median));
        if let Some(predicted) = last.predicted_step_s {
            let error = 100.0 * (predicted / median - 1.0);
            text += &format!(", {} predicted ({error:+.0} %)", output::seconds(predicted));
        }
        text +=
            &format!("\ngoodput     {:.1} % of the time went into steps", 100.0 * summary.goodput);
        if let Some(checkpoint) = &summary.checkpoint {
            text += &format!("\ncheckpoint  {}", checkpoint.display());
        }
        text
    }
}

/// The step time that was predicted, in brackets; nothing where none was.
fn predicted(progress: &Progress) -> String {
    let shown = |seconds| format!(" ({})", output::seconds(seconds));
    progress.predicted_step_s.map(shown).unwrap_or_default()
}
