//! Where layers are cut into stages, and which of them keep what the backward pass needs.
//!
//! A pipeline's step takes `steady · max t + ramp · Σ t + max tail` over its stages' times `t` of
//! one micro-batch: the slowest stage sets the pace, and all of them are passed once. What a stage
//! keeps for the micro-batches in flight must fit beside its weights. A stage takes the fastest
//! mixture of its layers' ways that fits, since both the largest time and the sum grow with it;
//! the cuts are then found by a dynamic programme over (stage, layers so far) whose states are the
//! triples (max, sum, tail) that no other covers. Nothing is rounded, so the answer is the optimum.
//!
//! Alpa (Zheng et al. 2022) runs the same programme once per possible maximum; Rockmate's blocks
//! offer such ways of keeping. Here identical layers are counted, not listed.

use crate::search::branch_and_bound::ROUNDING;

/// One way to run a layer: what it keeps against the time that it takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Way {
    /// Seconds of one micro-batch, forward and backward and what is recomputed.
    pub seconds: f64,
    /// Bytes that are kept for each micro-batch in flight.
    pub kept_bytes: f64,
}

/// Layers that are alike.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Class {
    /// What can be chosen for each layer, at least one.
    pub ways: Vec<Way>,
    /// Bytes of weights, gradients and optimizer states, whatever is chosen.
    pub static_bytes: f64,
    /// Seconds after the last micro-batch: gradients reduced, weights updated.
    pub tail_s: f64,
}

/// What a stage has besides its layers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Extra {
    /// Seconds of one micro-batch.
    pub seconds: f64,
    /// Bytes.
    pub bytes: f64,
    /// Bytes for each micro-batch in flight.
    pub kept_bytes: f64,
    /// Seconds after the last micro-batch.
    pub tail_s: f64,
}

/// A pipeline whose cuts are sought.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pipeline {
    /// The classes.
    pub classes: Vec<Class>,
    /// Runs of equal layers in order: (class, count).
    pub runs: Vec<(usize, usize)>,
    /// What each stage has beside its layers, one for each stage.
    pub extras: Vec<Extra>,
    /// Micro-batches in flight on each stage.
    pub in_flight: Vec<f64>,
    /// How often the slowest stage's time counts.
    pub steady: f64,
    /// How often the sum of all stages' times counts.
    pub ramp: f64,
    /// Bytes that each stage may use.
    pub bytes_max: f64,
}

/// The stages that were found.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cut {
    /// Seconds of a step.
    pub seconds: f64,
    /// Bytes of the fullest stage.
    pub bytes: f64,
    /// The stages in order.
    pub stages: Vec<Stage>,
}

/// One stage of a cut.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stage {
    /// Layers.
    pub layers: usize,
    /// How many layers run in each way, by class.
    pub ways: Vec<Vec<usize>>,
    /// Seconds of one micro-batch.
    pub seconds: f64,
    /// Bytes.
    pub bytes: f64,
    /// Seconds after the last micro-batch.
    pub tail_s: f64,
}

impl Pipeline {
    /// All layers.
    pub(super) fn layers(&self) -> usize {
        self.runs.iter().map(|(_, count)| count).sum()
    }

    /// Stages.
    pub(super) fn stage_count(&self) -> usize {
        self.extras.len()
    }

    /// The step of stages with these times and tails.
    pub(super) fn step(&self, stages: impl IntoIterator<Item = (f64, f64)>) -> f64 {
        let mut all = Totals::NONE;
        for (seconds, tail_s) in stages {
            all = all.with(seconds, tail_s);
        }
        all.step(self)
    }

    /// Lower bound on the seconds of a step over all stage partitions: all stages equally long,
    /// everything kept where that is fastest.
    pub(super) fn bound(&self) -> f64 {
        let fastest =
            |class: &Class| class.ways.iter().map(|w| w.seconds).fold(f64::INFINITY, f64::min);
        let layers = self.runs.iter().map(|(c, n)| fastest(&self.classes[*c]) * *n as f64);
        let extra = self.extras.iter().map(|e| e.seconds);
        let sum = layers.sum::<f64>() + extra.sum::<f64>();
        let mean = sum / self.stage_count() as f64;
        let widest = self.extras.iter().map(|e| e.seconds).fold(mean, f64::max);
        let tails = self.runs.iter().map(|(c, n)| self.classes[*c].tail_s * *n as f64);
        let tail = tails.sum::<f64>() + self.extras.iter().map(|e| e.tail_s).sum::<f64>();
        self.steady * widest + self.ramp * sum + tail / self.stage_count() as f64
    }

    /// The fastest cut into stages of at least one layer that fits, if its step is below `below`.
    ///
    /// # Cost
    /// O(stages · layers · width) transitions, where width is the range of layers of a stage that
    /// a step below `below` allows.
    pub(super) fn cut(&self, below: f64) -> Option<Cut> {
        let (layers, stages) = (self.layers(), self.stage_count());
        if layers < stages || stages == 0 {
            return None;
        }
        Cutter::new(self, below).cut(layers, stages)
    }

    /// The cut into stages as even as they can be, longer ones first, each with the fastest
    /// mixture that fits.
    pub(super) fn even(&self) -> Option<Cut> {
        let (layers, stages) = (self.layers(), self.stage_count());
        let size = |s: usize| layers / stages + usize::from(s < layers % stages);
        self.at(&(0..stages).map(size).collect::<Vec<_>>())
    }

    /// The partition into stages of `sizes` layers, each with the fastest mixture that fits; none
    /// where a stage does not fit.
    pub(super) fn at(&self, sizes: &[usize]) -> Option<Cut> {
        let mut mixtures = Mixtures::new(self);
        let mut from = 0;
        let mut stages = Vec::new();
        for (s, size) in sizes.iter().enumerate() {
            stages.push(mixtures.stage(self, s, from, from + size)?);
            from += size;
        }
        Some(self.of(stages))
    }

    fn of(&self, stages: Vec<Stage>) -> Cut {
        let bytes = stages.iter().map(|s| s.bytes).fold(0.0, f64::max);
        let seconds = self.step(stages.iter().map(|s| (s.seconds, s.tail_s)));
        Cut { seconds, bytes, stages }
    }

    /// Layers of each class among the layers from `from` to `to`.
    fn counts(&self, from: usize, to: usize) -> Vec<usize> {
        let mut counts = vec![0; self.classes.len()];
        let mut at = 0;
        for (class, count) in &self.runs {
            let (begin, end) = (at.max(from), (at + count).min(to));
            counts[*class] += end.saturating_sub(begin);
            at += count;
        }
        counts
    }
}

/// A mixture of ways of some layers: totals, and how many layers run in each way.
#[derive(Clone, Debug)]
struct Mixture {
    seconds: f64,
    kept_bytes: f64,
    ways: Vec<Vec<usize>>,
}

/// Mixtures that no other covers, by how many layers of each class; the fastest first.
struct Mixtures {
    known: std::collections::HashMap<Vec<usize>, Vec<Mixture>>,
    /// By class: the ways that no other way covers, the fastest first.
    useful: Vec<Vec<(usize, Way)>>,
}

impl Mixtures {
    fn new(pipeline: &Pipeline) -> Mixtures {
        let useful = |class: &Class| {
            let mut ways: Vec<(usize, Way)> = class.ways.iter().copied().enumerate().collect();
            ways.sort_by(|(_, a), (_, b)| {
                a.seconds.total_cmp(&b.seconds).then(a.kept_bytes.total_cmp(&b.kept_bytes))
            });
            let mut least = f64::INFINITY;
            ways.retain(|(_, way)| {
                let keeps = way.kept_bytes < least;
                least = least.min(way.kept_bytes);
                keeps
            });
            ways
        };
        Mixtures {
            known: std::collections::HashMap::new(),
            useful: pipeline.classes.iter().map(useful).collect(),
        }
    }

    /// The stage of the layers from `from` to `to` in its fastest mixture that fits.
    fn stage(&mut self, p: &Pipeline, s: usize, from: usize, to: usize) -> Option<Stage> {
        let counts = p.counts(from, to);
        let extra = p.extras[s];
        let of_layers = |part: fn(&Class) -> f64| {
            let parts = p.classes.iter().zip(&counts).map(|(c, n)| part(c) * *n as f64);
            parts.sum::<f64>()
        };
        let fixed = of_layers(|c| c.static_bytes) + extra.bytes + extra.kept_bytes * p.in_flight[s];
        let mixtures = self.mixtures(p, &counts);
        let fits = |m: &&Mixture| fixed + m.kept_bytes * p.in_flight[s] <= p.bytes_max;
        let mixture = mixtures.iter().find(fits)?;
        Some(Stage {
            layers: to - from,
            ways: mixture.ways.clone(),
            seconds: mixture.seconds + extra.seconds,
            bytes: fixed + mixture.kept_bytes * p.in_flight[s],
            tail_s: of_layers(|c| c.tail_s) + extra.tail_s,
        })
    }

    fn mixtures(&mut self, p: &Pipeline, counts: &[usize]) -> &[Mixture] {
        if !self.known.contains_key(counts) {
            let ways = p.classes.iter().map(|c| vec![0; c.ways.len()]).collect();
            let mut all = vec![Mixture { seconds: 0.0, kept_bytes: 0.0, ways }];
            for (class, count) in counts.iter().enumerate() {
                all = uncovered(self.mixed(class, *count, &all));
            }
            self.known.insert(counts.to_vec(), all);
        }
        &self.known[counts]
    }

    /// Each of `all` with `count` layers of a class more, in every mixture of its ways.
    fn mixed(&self, class: usize, count: usize, all: &[Mixture]) -> Vec<Mixture> {
        let ways = &self.useful[class];
        let mut grown = all.to_vec();
        let mut left = vec![count; all.len()];
        for (last, (index, way)) in ways.iter().enumerate().map(|(i, w)| (i + 1 == ways.len(), w)) {
            let mut next = Vec::new();
            let mut next_left = Vec::new();
            for (mixture, left) in grown.iter().zip(&left) {
                let least = if last { *left } else { 0 };
                for n in least..=*left {
                    let mut mixture = mixture.clone();
                    mixture.seconds += way.seconds * n as f64;
                    mixture.kept_bytes += way.kept_bytes * n as f64;
                    mixture.ways[class][*index] = n;
                    next.push(mixture);
                    next_left.push(left - n);
                }
            }
            (grown, left) = (next, next_left);
        }
        grown
    }
}

/// Those that no other covers, the fastest first.
fn uncovered(mut all: Vec<Mixture>) -> Vec<Mixture> {
    all.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.kept_bytes.total_cmp(&b.kept_bytes)));
    let mut least = f64::INFINITY;
    all.retain(|mixture| {
        let keeps = mixture.kept_bytes < least;
        least = least.min(mixture.kept_bytes);
        keeps
    });
    all
}

/// The totals of some stages.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Totals {
    slowest: f64,
    sum: f64,
    tail: f64,
}

impl Totals {
    const NONE: Totals = Totals { slowest: 0.0, sum: 0.0, tail: 0.0 };

    fn with(self, seconds: f64, tail_s: f64) -> Totals {
        Totals {
            slowest: self.slowest.max(seconds),
            sum: self.sum + seconds,
            tail: self.tail.max(tail_s),
        }
    }

    fn step(self, pipeline: &Pipeline) -> f64 {
        pipeline.steady * self.slowest + pipeline.ramp * self.sum + self.tail
    }

    fn covers(self, other: Totals) -> bool {
        self.slowest <= other.slowest && self.sum <= other.sum && self.tail <= other.tail
    }
}

/// A state of the programme: totals, and the way that led there.
#[derive(Clone, Copy)]
struct State {
    totals: Totals,
    /// Where the last stage begins, and which state of that place it extends.
    from: usize,
    state: usize,
}

struct Cutter<'a> {
    pipeline: &'a Pipeline,
    below: f64,
    mixtures: Mixtures,
    /// By number of layers: the least seconds of the layers before it.
    before_s: Vec<f64>,
}

impl<'a> Cutter<'a> {
    fn new(pipeline: &'a Pipeline, below: f64) -> Cutter<'a> {
        let mut before_s = vec![0.0];
        for (class, count) in &pipeline.runs {
            let ways = &pipeline.classes[*class].ways;
            let least = ways.iter().map(|w| w.seconds).fold(f64::INFINITY, f64::min);
            for _ in 0..*count {
                before_s.push(before_s[before_s.len() - 1] + least);
            }
        }
        Cutter { pipeline, below, mixtures: Mixtures::new(pipeline), before_s }
    }

    fn cut(mut self, layers: usize, stages: usize) -> Option<Cut> {
        let start = State { totals: Totals::NONE, from: 0, state: 0 };
        let mut table: Vec<Vec<Vec<State>>> = vec![vec![vec![]; layers + 1]];
        table[0][0].push(start);
        for s in 0..stages {
            let after = stages - s - 1;
            let mut next: Vec<Vec<State>> = vec![vec![]; layers + 1];
            for (from, states) in table[s].iter().enumerate().take(layers).skip(s) {
                if states.is_empty() {
                    continue;
                }
                // The last stage takes what is left; the others leave one layer for each to come.
                let first = if after == 0 { layers } else { from + 1 };
                let ends = next.iter_mut().enumerate().take(layers - after + 1).skip(first);
                for (to, ended) in ends {
                    if !self.extend(s, (from, to), states, ended) {
                        break;
                    }
                }
            }
            table.push(next);
        }
        let ends = &table[stages][layers];
        let step = |state: &State| state.totals.step(self.pipeline);
        let best = (0..ends.len()).min_by(|a, b| step(&ends[*a]).total_cmp(&step(&ends[*b])))?;
        Some(self.traced(&table, best))
    }

    /// Adds the states that end with stage `s` of the layers between. Says whether a longer stage
    /// is worth a look.
    fn extend(
        &mut self,
        s: usize,
        (from, to): (usize, usize),
        states: &[State],
        next: &mut Vec<State>,
    ) -> bool {
        let p = self.pipeline;
        // A longer stage is never smaller, and never faster.
        let Some(stage) = self.mixtures.stage(p, s, from, to) else { return false };
        let layers = self.before_s.len() - 1;
        let rest_s = self.before_s[layers] - self.before_s[to]
            + p.extras[s + 1..].iter().map(|e| e.seconds).sum::<f64>();
        let after = p.extras.len() - s - 1;
        let bottleneck_s = if after == 0 { 0.0 } else { rest_s / after as f64 };
        let mut useful = false;
        for (index, state) in states.iter().enumerate() {
            let totals = state.totals.with(stage.seconds, stage.tail_s);
            let least = Totals {
                slowest: totals.slowest.max(bottleneck_s),
                sum: totals.sum + rest_s,
                tail: totals.tail,
            };
            let short = totals.slowest < bottleneck_s;
            if least.step(p) * (1.0 - ROUNDING) >= self.below {
                // Only the pace of what is left may improve with a longer stage.
                useful |= short;
                continue;
            }
            useful = true;
            if next.iter().any(|other| other.totals.covers(totals)) {
                continue;
            }
            next.retain(|other| !totals.covers(other.totals));
            next.push(State { totals, from, state: index });
        }
        useful
    }

    fn traced(mut self, table: &[Vec<Vec<State>>], best: usize) -> Cut {
        let mut stages = Vec::new();
        let (mut to, mut at) = (self.before_s.len() - 1, best);
        for s in (0..self.pipeline.stage_count()).rev() {
            let state = table[s + 1][to][at];
            let stage = self.mixtures.stage(self.pipeline, s, state.from, to);
            stages.push(stage.expect("a state is made of a stage that fits"));
            (to, at) = (state.from, state.state);
        }
        stages.reverse();
        self.pipeline.of(stages)
    }
}
