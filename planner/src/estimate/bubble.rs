//! How long the passes of a pipeline take: the longest paths through the order of its passes.
//!
//! A step is a graph of passes, each after those that it needs and after the one before it on its
//! stage; no step is shorter than a path through the graph. These are the paths that decide, in
//! closed form, so that a search can afford them. [`events`](crate::search::events) replays the
//! same orders pass by pass: of 36,000 random pipelines the paths are never longer, and of those
//! that are full all but ten are less than 2 % shorter (3.3 % at most).
//!
//! Legend: p stages, m micro-batches; F, B and W seconds of a stage's forward pass, of the
//! gradients of its inputs and of its weights, where W is a part of B unless a zero-bubble schedule
//! splits them; r forward passes that a stage is ahead, d gradients of weights that it puts off.
//!
//! The first B of stage s begins when its forward passes ahead are done and the first micro-batch
//! has gone down and come back: `first = max(Σ_{i<s} F + r Fₛ, Σ F + Σ_{i>s} B)`. From then on
//!
//! - it is busy with all that is left, but for the W that it has put off, and its last gradient
//!   goes up to a stage j that does the W that are left there;
//! - or it is busy until its last F, which goes down and comes back all the way;
//! - or a stage above is busy with some F, of which the last goes down to stage q; there a B turns
//!   and goes up, and a stage is busy with the B that follow it.

use crate::configuration::Schedule;

/// Stages that follow each other and are alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Alike {
    /// The first of them.
    pub(super) index: u32,
    /// How many there are.
    pub(super) count: u32,
    /// Seconds of the forward pass of a micro-batch.
    pub(super) forward_s: f64,
    /// Seconds of the backward pass.
    pub(super) backward_s: f64,
    /// Seconds of it that only weights need.
    pub(super) weight_s: f64,
}

/// Seconds from the first pass to the end of the last, of stages that interleave no chunks.
pub(super) fn passes_s(schedule: Schedule, all: &[Alike], m: u64) -> f64 {
    let count = |alike: &Alike| f64::from(alike.count);
    let p: f64 = all.iter().map(count).sum();
    let m = m as f64;
    // Seconds of F, B and W of a stage, by whether W is put off.
    let split = |alike: &Alike| match schedule {
        Schedule::GPipe | Schedule::OneForwardOneBackward => (alike.backward_s, 0.0),
        Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleH2 => {
            (alike.backward_s - alike.weight_s, alike.weight_s)
        }
    };
    let forward_s: f64 = all.iter().map(|alike| count(alike) * alike.forward_s).sum();
    let backward_s: f64 = all.iter().map(|alike| count(alike) * split(alike).0).sum();
    if schedule == Schedule::GPipe {
        // All forward passes of the slowest stage come before all backward passes of its.
        let slowest = |part: fn(&Alike) -> f64| all.iter().map(part).fold(0.0, f64::max);
        let recompute_s = slowest(|alike| alike.forward_s) + slowest(|alike| alike.backward_s);
        return forward_s + backward_s + (m - 1.0) * recompute_s;
    }
    let first_weight_s = all.first().map_or(0.0, |alike| split(alike).1);
    let (mut begin_s, mut above_s) = (0.0, 0.0);
    let (mut tail_s, mut longest_s) = (f64::NEG_INFINITY, 0.0f64);
    let mut turns = Turns::default();
    for alike in all {
        let (f, (b, w)) = (alike.forward_s, split(alike));
        // Every path is longest at an end of stages that are alike.
        for at in [0, alike.count - 1].into_iter().take(alike.count.min(2) as usize) {
            let s = f64::from(alike.index + at);
            let (begin_s, above_s) = (begin_s + f64::from(at) * f, above_s + f64::from(at) * b);
            let (ahead, late) = match schedule {
                Schedule::GPipe => (m, 0.0),
                Schedule::OneForwardOneBackward => ((p - s).min(m), 0.0),
                Schedule::ZeroBubbleH1 => ((p - s).min(m), s),
                Schedule::ZeroBubbleH2 => ((2.0 * (p - s) - 1.0).min(m), 2.0 * s),
            };
            let left = (late + 1.0).min(m);
            let first_s = (begin_s + ahead * f).max(forward_s + backward_s - above_s - b);
            tail_s = tail_s.max(left * w - above_s);
            let busy_s = (m - ahead) * f + m * (b + w) - left * w;
            longest_s = longest_s.max(first_s + busy_s + above_s + tail_s);
            if m > ahead {
                let pairs_s = (m - ahead) * (f + b) + (m - ahead - late).max(0.0) * w;
                let down_s = forward_s - begin_s - f;
                let back_s = down_s + backward_s + first_weight_s;
                longest_s = longest_s.max(first_s + pairs_s + back_s);
            }
        }
        turns.take(alike);
        if schedule == Schedule::OneForwardOneBackward {
            longest_s = longest_s.max(turns.longest_s(alike, p, m));
        }
        begin_s += count(alike) * f;
        above_s += count(alike) * b;
    }
    longest_s
}

/// Paths of 1F1B that turn at a stage: what the stages down to it do of one micro-batch, and the
/// slowest of them.
#[derive(Clone, Copy, Debug, Default)]
struct Turns {
    both_s: f64,
    forward_s: f64,
    backward_s: f64,
}

impl Turns {
    /// Goes down through stages that are alike.
    fn take(&mut self, alike: &Alike) {
        self.both_s += f64::from(alike.count) * (alike.forward_s + alike.backward_s);
        self.forward_s = self.forward_s.max(alike.forward_s);
        self.backward_s = self.backward_s.max(alike.backward_s);
    }

    /// The longest path that turns at one of the stages that were taken last. A stage that is r
    /// ahead does the B of micro-batch k − r + 1 after the F of k.
    fn longest_s(&self, last: &Alike, p: f64, m: f64) -> f64 {
        let pair_s = last.forward_s + last.backward_s;
        let end = f64::from(last.count - 1);
        let few = (p - m - f64::from(last.index)).clamp(0.0, end);
        let path = |at: f64| {
            let ahead = (p - f64::from(last.index) - at).min(m);
            let all = (m - 1.0) * self.forward_s + (ahead - 1.0) * self.backward_s;
            let late = (ahead - 1.0) * self.forward_s + (m - 1.0) * self.backward_s;
            let pairs = (ahead - 1.0) * (self.forward_s + self.backward_s) + (m - ahead) * pair_s;
            self.both_s - (end - at) * pair_s + all.max(late).max(pairs)
        };
        path(0.0).max(path(few)).max(path(end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::events::Line;

    /// Neighbours that are alike are told as one.
    fn grouped(times: &[[f64; 2]]) -> Vec<Alike> {
        let mut all: Vec<Alike> = Vec::new();
        for (index, [forward_s, backward_s]) in times.iter().copied().enumerate() {
            match all.last_mut() {
                Some(last) if [last.forward_s, last.backward_s] == [forward_s, backward_s] => {
                    last.count += 1;
                }
                Some(_) | None => {
                    let (index, weight_s) = (index as u32, 0.0);
                    all.push(Alike { index, count: 1, forward_s, backward_s, weight_s });
                }
            }
        }
        all
    }

    /// 1F1B with one stage of slow forward passes and one of slow backward passes takes exactly as
    /// long as its replay, however few micro-batches there are: the longest path turns between the
    /// two. Without turns it would be a fifth too short.
    #[test]
    fn paths_that_turn_are_seen() {
        let schedule = Schedule::OneForwardOneBackward;
        for p in 2..7 {
            let all = (1..3 * p).flat_map(|m| (0..p * p).map(move |at| (m, at / p, at % p)));
            for ((m, front, back), slow) in all.flat_map(|case| [(case, 2.0), (case, 4.0)]) {
                let mut times = vec![[1.0, 1.0]; p];
                times[front][0] = slow;
                times[back][1] = 6.0 - slow;
                let line = Line {
                    forward_s: times.iter().map(|time| time[0]).collect(),
                    backward_s: times.iter().map(|time| time[1]).collect(),
                    weight_s: vec![0.0; p],
                    send_s: 0.0,
                    microbatches: m,
                    chunks: 1,
                    schedule,
                };
                let told = passes_s(schedule, &grouped(&times), m as u64);
                let replayed = line.replay();
                assert!((told / replayed - 1.0).abs() < 1e-12, "{times:?}, {m}: {told} {replayed}");
            }
        }
    }
}
