//! A pipeline's step replayed event by event: every pass of every micro-batch on every stage, with
//! what it waits for.
//!
//! The search prices a step by a formula; here nothing is known of it. Each stage has its own order
//! of passes, as the schedule's authors give it, and a pass begins when its stage is free and what
//! it needs has arrived.

use codegen::schedule::{Pipeline, Turn, splits_backward};

use crate::configuration::{Configuration, Recompute, Schedule};
use crate::estimate::price::{LayerPrice, Prices};
use crate::estimate::{Estimate, Estimator};

/// Passes that are replayed of one step at most. Chosen: a tenth of a second.
const PASSES_MAX: u64 = 4_000_000;

/// Seconds of an estimated step whose passes are replayed, with what the estimate has beside them:
/// messages, exchanges, the update, offload. None where there are too many passes.
pub fn replayed_s(estimator: &Estimator<'_>, estimate: &Estimate) -> Option<f64> {
    let (c, parts) = (&estimate.configuration, &estimate.breakdown);
    let count = estimate.microbatch_count;
    let passes = count.checked_mul(3 * u64::from(c.pp) * u64::from(c.vpp))?;
    if passes > PASSES_MAX {
        return None;
    }
    let prices = estimator.prices(estimator.inside(c));
    let after_s = parts.gradients_s + parts.weights_s + parts.optimizer_s;
    let beside_s = after_s + parts.offload_s + parts.send_s;
    Some(Line::new(c, &prices, count as usize, 0.0).replay() + beside_s)
}

/// A pipeline of stages.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Seconds of the forward pass of one micro-batch, by stage and chunk: all chunks of the first
    /// stage first.
    pub forward_s: Vec<f64>,
    /// Seconds of the backward pass, weights' part included.
    pub backward_s: Vec<f64>,
    /// Seconds of the weights' part, which zero-bubble schedules do later.
    pub weight_s: Vec<f64>,
    /// Seconds from the end of a pass to its arrival at the next stage.
    pub send_s: f64,
    /// Micro-batches.
    pub microbatches: usize,
    /// Chunks that each stage interleaves.
    pub chunks: usize,
    /// The order of passes.
    pub schedule: Schedule,
}

/// A pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Forward,
    Backward,
    Weight,
}

/// A pass of a chunk for a micro-batch.
type Work = (Pass, usize, usize);

impl Line {
    /// The pipeline of a configuration: what each stage computes of one micro-batch.
    pub fn new(c: &Configuration, prices: &Prices, microbatches: usize, send_s: f64) -> Line {
        let chunks = c.vpp as usize;
        let all = c.pp as usize * chunks;
        let mut line = Line {
            forward_s: vec![0.0; all],
            backward_s: vec![0.0; all],
            weight_s: vec![0.0; all],
            send_s,
            microbatches,
            chunks,
            schedule: c.schedule,
        };
        line.add(0, &prices.first, 0.0);
        line.add(all - 1, &prices.last, 0.0);
        let classes = prices.layers.iter();
        let mut layers = classes.flat_map(|(count, price)| (0..*count).map(move |_| price));
        let depth: u32 = prices.layers.iter().map(|(count, _)| count).sum();
        for stage in 0..c.pp {
            let size = c.layers_of(depth, stage).0;
            let recomputed = match c.recompute {
                Recompute::Layers(recomputed) => recomputed.min(size),
                Recompute::Full => size,
                Recompute::None | Recompute::Auto | Recompute::Attention => 0,
            };
            for chunk in 0..c.vpp {
                let recomputed = c.chunk_layers(recomputed, stage, chunk);
                for at in 0..c.chunk_layers(size, stage, chunk) {
                    let price = layers.next().expect("stages hold all layers");
                    let recompute_s = if c.recompute == Recompute::Attention {
                        price.attention_again.total_s()
                    } else if at < recomputed {
                        price.forward_again.total_s()
                    } else {
                        0.0
                    };
                    line.add((stage * c.vpp + chunk) as usize, price, recompute_s);
                }
            }
        }
        line
    }

    /// Adds what takes so long to a chunk, counted over all stages.
    fn add(&mut self, at: usize, price: &LayerPrice, recompute_s: f64) {
        self.forward_s[at] += price.forward.total_s();
        self.backward_s[at] += price.backward.total_s() + recompute_s;
        self.weight_s[at] += price.weight_s;
    }

    fn stages(&self) -> usize {
        self.forward_s.len() / self.chunks
    }

    /// The passes of a stage in order.
    fn order(&self, stage: usize) -> Vec<Work> {
        let Line { schedule, chunks, microbatches, .. } = *self;
        let pipeline = Pipeline { schedule, stages: self.stages(), chunks, microbatches };
        let work = |turn: &Turn| match *turn {
            Turn::Forward { chunk, microbatch } => (Pass::Forward, chunk, microbatch),
            Turn::Backward { chunk, microbatch } => (Pass::Backward, chunk, microbatch),
            Turn::Weights { chunk, microbatch } => (Pass::Weight, chunk, microbatch),
        };
        pipeline.turns(stage).iter().map(work).collect()
    }

    fn seconds(&self, stage: usize, (pass, chunk, _): Work) -> f64 {
        let at = stage * self.chunks + chunk;
        match pass {
            Pass::Forward => self.forward_s[at],
            Pass::Backward if self.splits() => self.backward_s[at] - self.weight_s[at],
            Pass::Backward => self.backward_s[at],
            Pass::Weight => self.weight_s[at],
        }
    }

    fn splits(&self) -> bool {
        splits_backward(self.schedule)
    }

    /// When what a pass needs has arrived, if it has been sent.
    fn ready(&self, done: &Done, stage: usize, (pass, chunk, microbatch): Work) -> Option<f64> {
        let (last, chunks) = (self.stages() - 1, self.chunks);
        let at = |pass, stage, chunk| done.at(pass, stage, chunk, microbatch);
        let sent = |pass, stage, chunk| at(pass, stage, chunk).map(|end| end + self.send_s);
        match pass {
            Pass::Forward if stage > 0 => sent(pass, stage - 1, chunk),
            Pass::Forward if chunk > 0 => sent(pass, last, chunk - 1),
            Pass::Forward => Some(0.0),
            Pass::Backward if stage < last => sent(pass, stage + 1, chunk),
            Pass::Backward if chunk + 1 < chunks => sent(pass, 0, chunk + 1),
            Pass::Backward => at(Pass::Forward, stage, chunk),
            Pass::Weight => at(Pass::Backward, stage, chunk),
        }
    }

    /// Seconds from the first pass to the end of the last, where each stage does its passes in
    /// their order.
    pub fn replay(&self) -> f64 {
        let orders: Vec<Vec<Work>> = (0..self.stages()).map(|s| self.order(s)).collect();
        let mut done = Done::new(self);
        let mut next = vec![0; self.stages()];
        let mut free = vec![0.0f64; self.stages()];
        loop {
            let mut moved = false;
            for (stage, order) in orders.iter().enumerate() {
                while let Some(work) = order.get(next[stage]) {
                    let Some(ready) = self.ready(&done, stage, *work) else { break };
                    free[stage] = free[stage].max(ready) + self.seconds(stage, *work);
                    done.end(*work, stage, free[stage]);
                    next[stage] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        let finished = orders.iter().zip(&next).all(|(order, next)| order.len() == *next);
        assert!(finished, "a schedule of all passes does not wait for itself");
        free.into_iter().fold(0.0, f64::max)
    }
}

/// When passes ended.
struct Done {
    chunks: usize,
    stages: usize,
    microbatches: usize,
    ends: Vec<f64>,
}

impl Done {
    fn new(line: &Line) -> Done {
        let (stages, chunks, microbatches) = (line.stages(), line.chunks, line.microbatches);
        let ends = vec![f64::NAN; 3 * stages * chunks * microbatches];
        Done { chunks, stages, microbatches, ends }
    }

    fn index(&self, pass: Pass, stage: usize, chunk: usize, microbatch: usize) -> usize {
        let pass = match pass {
            Pass::Forward => 0,
            Pass::Backward => 1,
            Pass::Weight => 2,
        };
        ((pass * self.stages + stage) * self.chunks + chunk) * self.microbatches + microbatch
    }

    fn at(&self, pass: Pass, stage: usize, chunk: usize, microbatch: usize) -> Option<f64> {
        let end = self.ends[self.index(pass, stage, chunk, microbatch)];
        (!end.is_nan()).then_some(end)
    }

    fn end(&mut self, (pass, chunk, microbatch): Work, stage: usize, seconds: f64) {
        let index = self.index(pass, stage, chunk, microbatch);
        self.ends[index] = seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(p: usize, m: usize, chunks: usize, schedule: Schedule) -> Line {
        Line {
            forward_s: vec![1.0 / chunks as f64; p * chunks],
            backward_s: vec![2.0 / chunks as f64; p * chunks],
            weight_s: vec![1.0 / chunks as f64; p * chunks],
            send_s: 0.0,
            microbatches: m,
            chunks,
            schedule,
        }
    }

    /// The bubbles that the authors give: p-1 passes of all kinds for GPipe and 1F1B (Narayanan et
    /// al. 2019), a v-th of it interleaved (Narayanan et al. 2021), a third of it for ZB-H1 and
    /// none but the fill of the first forward passes for ZB-H2 (Qi et al. 2023, table 2).
    #[test]
    fn bubbles_are_those_of_the_papers() {
        use Schedule::{GPipe, OneForwardOneBackward, ZeroBubbleH1, ZeroBubbleH2};
        for (p, m) in [(2, 8), (4, 8), (4, 16), (8, 32)] {
            let work = 3.0 * m as f64;
            let bubble = |chunks, schedule| line(p, m, chunks, schedule).replay() - work;
            let ends = (p - 1) as f64;
            assert_eq!(bubble(1, GPipe), 3.0 * ends, "p={p} m={m}");
            assert_eq!(bubble(1, OneForwardOneBackward), 3.0 * ends, "p={p} m={m}");
            for v in [2, 4] {
                assert_eq!(bubble(v, OneForwardOneBackward), 3.0 * ends / v as f64, "p={p} v={v}");
            }
            assert_eq!(bubble(1, ZeroBubbleH1), ends, "p={p} m={m}");
            assert!(bubble(1, ZeroBubbleH2) <= ends, "p={p} m={m}");
        }
    }
}
