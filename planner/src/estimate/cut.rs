//! The cut of the layers into stages that makes a step the fastest, among all cuts that fit.
//!
//! There are too many to try. But no step is shorter than what its first and last micro-batches
//! wait for and what one stage does, whichever that is:
//!
//! ```text
//! T ≥ Σᵢ (Fᵢ + Bᵢ) + maxₛ (αₛ Fₛ + βₛ Bₛ + γₛ Wₛ) + max of what stages exchange
//! ```
//!
//! The sum is the same for all cuts, and the maxima are those of single stages, or of a stage and
//! what follows it: the cut whose largest stage is the least is found by filling stages one after
//! the other, which bounds all cuts. To a step that is known, the bound leaves each stage room for
//! so many layers; cuts within that room are tried, and they are few where the bound is near.
//!
//! Legend: p stages, m micro-batches; F, B and W seconds of a stage's forward pass, of its backward
//! pass, and of the part of that which only weights need (`bubble`).

use super::Estimator;
use super::price::{LayerPrice, Prices};
use super::stage::{Run, Stage, hold, stage};
use super::step::{After, Breakdown, Step, Terms};
use crate::configuration::{Configuration, Recompute, Schedule};

/// Stages that are looked at to find the best cut of one configuration. Chosen: a quarter of a
/// millisecond.
const WORK_MAX: u32 = 1_000;
/// The part of a step to which the least of the slowest stages is found. Chosen: bounds are
/// further off for other reasons.
const PRECISION: f64 = 1e-5;
/// The part of a step below which a difference is rounding.
const ROUNDING: f64 = 1e-9;

/// Seconds of the first layers of a model, for each number of them: tables for all cuts.
#[derive(Clone, Debug, PartialEq)]
pub struct Sums {
    /// F, B and W, nothing computed again.
    passes: Vec<[f64; 3]>,
    /// The inside of attention again.
    attention_s: Vec<f64>,
    /// Whole layers again.
    whole_s: Vec<f64>,
    /// F, B and W of what the first and the last stage have beside layers.
    ends: [[f64; 3]; 2],
}

impl Sums {
    /// The tables of stages that are on different nodes, or not.
    pub fn new(prices: &Prices, is_far: bool) -> Sums {
        let passes = |price: &LayerPrice| {
            let late =
                if is_far { [price.forward_late_s, price.backward_late_s] } else { [0.0; 2] };
            let [forward_s, backward_s] = [price.forward, price.backward].map(|p| p.total_s());
            [forward_s + late[0], backward_s + late[1], price.weight_s]
        };
        let mut sums = Sums {
            passes: vec![[0.0; 3]],
            attention_s: vec![0.0],
            whole_s: vec![0.0],
            ends: [passes(&prices.first), passes(&prices.last)],
        };
        for (count, price) in &prices.layers {
            let late_s = if is_far { price.forward_late_s } else { 0.0 };
            let [attention_s, whole_s] =
                [price.attention_again.total_s(), price.forward_again.total_s() + late_s];
            for _ in 0..*count {
                let before = sums.passes[sums.passes.len() - 1];
                sums.passes.push(add(before, passes(price)));
                sums.attention_s.push(sums.attention_s[sums.attention_s.len() - 1] + attention_s);
                sums.whole_s.push(sums.whole_s[sums.whole_s.len() - 1] + whole_s);
            }
        }
        sums
    }

    fn depth(&self) -> u32 {
        self.passes.len() as u32 - 1
    }

    /// Seconds that layers `from` to `to` of a stage are computed again.
    fn again_s(&self, recompute: Recompute, from: u32, to: u32) -> f64 {
        let [from, to] = [from as usize, to as usize];
        match recompute {
            Recompute::None | Recompute::Auto => 0.0,
            Recompute::Attention => self.attention_s[to] - self.attention_s[from],
            Recompute::Full => self.whole_s[to] - self.whole_s[from],
            Recompute::Layers(layers) => {
                let end = from.saturating_add(layers as usize).min(to);
                self.whole_s[end] - self.whole_s[from]
            }
        }
    }
}

fn add(a: [f64; 3], b: [f64; 3]) -> [f64; 3] {
    [a[0] + b[0], a[1] + b[1], a[2] + b[2]]
}

/// What is known of all cuts of one configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Least {
    /// Not above the seconds of the passes of any cut, with their messages.
    pub passes_s: f64,
    /// The part of them that is no stage's own.
    shared_s: f64,
}

/// A configuration whose layers are to be cut.
#[derive(Clone, Copy)]
pub struct Cuts<'a> {
    terms: Terms<'a>,
    c: &'a Configuration,
    prices: &'a Prices,
    sums: &'a Sums,
    count: u64,
    is_far: bool,
    send_s: f64,
}

/// A path through a step: the factors of a stage's F, B and W, and what comes on top.
#[derive(Clone, Copy)]
struct Path {
    factors: [f64; 3],
    more_s: f64,
    /// Factors of F and B together, and of W, of the path that ends with a trip down from this
    /// stage and all the way back; none where no micro-batch is left to go with.
    back: Option<[f64; 2]>,
}

impl Estimator<'_> {
    /// The cuts of a configuration with one chunk a stage; whatever it says of its stages is left
    /// out. `sums` are the tables of these prices.
    pub fn cuts<'a>(
        &'a self,
        c: &'a Configuration,
        prices: &'a Prices,
        sums: &'a Sums,
        count: u64,
    ) -> Cuts<'a> {
        let terms = self.terms();
        let (is_far, send_s) = (terms.sends_far(c), terms.send_s(c, prices));
        Cuts { terms, c, prices, sums, count, is_far, send_s }
    }

    /// Whether the stages of a configuration are on different nodes.
    pub fn sends_far(&self, c: &Configuration) -> bool {
        self.terms().sends_far(c)
    }
}

impl Cuts<'_> {
    fn depth(&self) -> u32 {
        self.sums.depth()
    }

    /// The last layer that a stage can end with, so that there is one for each that follows.
    fn latest(&self, index: u32) -> u32 {
        self.depth() - (self.c.pp - 1 - index)
    }

    fn is_split(&self) -> bool {
        matches!(self.c.schedule, Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleH2)
    }

    /// F, B and W of a stage; B is without W where a schedule splits them.
    fn passes(&self, index: u32, from: u32, to: u32) -> [f64; 3] {
        let [first, last] = [&self.sums.passes[from as usize], &self.sums.passes[to as usize]];
        let mut all = [last[0] - first[0], last[1] - first[1], last[2] - first[2]];
        all[1] += self.sums.again_s(self.c.recompute, from, to);
        if index == 0 {
            all = add(all, self.sums.ends[0]);
        }
        if index + 1 == self.c.pp {
            all = add(all, self.sums.ends[1]);
        }
        if self.is_split() {
            all[1] -= all[2];
        } else {
            all[2] = 0.0;
        }
        all
    }

    /// The longest path through a step that all of a stage's passes are on: what it has beyond one
    /// micro-batch on each stage (`bubble`).
    fn path(&self, index: u32) -> Path {
        let (p, s, m) = (f64::from(self.c.pp), f64::from(index), self.count as f64);
        let (ahead, late) = match self.c.schedule {
            Schedule::GPipe => (1.0, 0.0),
            Schedule::OneForwardOneBackward => ((p - s).min(m), 0.0),
            Schedule::ZeroBubbleH1 => ((p - s).min(m), s),
            Schedule::ZeroBubbleH2 => ((2.0 * (p - s) - 1.0).min(m), 2.0 * s),
        };
        // Whatever was put off, the first stage does the gradients of its weights last.
        let is_late = self.is_split() && index > 0;
        let left = if is_late { (late + 1.0).min(m) } else { 0.0 };
        let more_s = if is_late { self.passes(0, 0, 1)[2] } else { 0.0 };
        let goes_back = m > ahead && self.c.schedule != Schedule::GPipe;
        let back = goes_back.then_some([m - ahead, (m - ahead - late).max(0.0)]);
        Path { factors: [m - ahead, m - 1.0, m - left], more_s, back }
    }

    /// Seconds of the longer of a stage's paths. It grows with the layers of the stage, and with
    /// those that follow it.
    fn path_s(&self, index: u32, path: &Path, from: u32, to: u32) -> f64 {
        let passes = self.passes(index, from, to);
        let own = path.factors.iter().zip(passes).map(|(factor, seconds)| factor * seconds);
        let own_s = own.sum::<f64>() + path.more_s;
        let [f, b, w] = passes;
        match path.back {
            Some([pairs, late]) => own_s.max(self.rest_s(index, to) + pairs * (f + b) + late * w),
            None => own_s,
        }
    }

    /// One micro-batch on all stages after one that ends with a layer.
    fn rest_s(&self, index: u32, to: u32) -> f64 {
        if index + 1 == self.c.pp {
            return 0.0;
        }
        let [end, at] = [self.depth(), to].map(|layer| self.sums.passes[layer as usize]);
        let rest = [0, 1, 2].map(|part| end[part] - at[part] + self.sums.ends[1][part]);
        let again_s = match self.c.recompute {
            Recompute::Layers(_) => 0.0,
            whole
            @ (Recompute::None | Recompute::Auto | Recompute::Attention | Recompute::Full) => {
                self.sums.again_s(whole, to, self.depth())
            }
        };
        rest[0] + rest[1] + again_s - if self.is_split() { rest[2] } else { 0.0 }
    }

    /// The last layer up to which a stage's path takes no longer than `room_s`; `from` where it
    /// has no room for one.
    fn filled(&self, index: u32, path: &Path, from: u32, room_s: f64) -> u32 {
        let (mut low, mut high) = (from, self.latest(index));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.path_s(index, path, from, middle) <= room_s {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        low
    }

    /// The stages whose paths take no longer than `room_s`, each with as many layers as it can
    /// have.
    fn fill(&self, paths: &[Path], room_s: f64) -> Option<Vec<u32>> {
        let mut from = 0;
        let mut layers = Vec::with_capacity(paths.len());
        for (index, path) in (0..).zip(paths) {
            let to = self.filled(index, path, from, room_s);
            if to == from {
                return None;
            }
            layers.push(to - from);
            from = to;
        }
        (from == self.depth()).then_some(layers)
    }

    fn paths(&self) -> Vec<Path> {
        (0..self.c.pp).map(|index| self.path(index)).collect()
    }

    /// What no cut's passes are below, with the cut whose longest path is the least.
    pub fn least(&self) -> (Least, Vec<u32>) {
        let paths = self.paths();
        let depth = self.depth();
        let (each, more) = (depth / self.c.pp, depth % self.c.pp);
        let mut layers: Vec<u32> = (0..self.c.pp).map(|at| each + u32::from(at < more)).collect();
        let mut from = 0;
        let mut high = 0.0f64;
        for ((index, path), layers) in (0..).zip(&paths).zip(&layers) {
            high = high.max(self.path_s(index, path, from, from + layers));
            from += layers;
        }
        let shared_s = self.shared_s();
        let mut low = 0.0;
        while high - low > PRECISION * (shared_s + high) {
            let middle = 0.5 * (low + high);
            match self.fill(&paths, middle) {
                Some(found) => (layers, high) = (found, middle),
                None => low = middle,
            }
        }
        let sends_s = 2.0 * self.send_s * (self.count as f64 + f64::from(self.c.pp - 1));
        (Least { passes_s: shared_s + low + sends_s, shared_s: shared_s + sends_s }, layers)
    }

    /// One micro-batch on each stage; without what is computed again where that depends on the cut.
    fn shared_s(&self) -> f64 {
        let end = self.sums.passes[self.depth() as usize];
        let [forward_s, backward_s, weight_s] = add(add(end, self.sums.ends[0]), self.sums.ends[1]);
        let again_s = match self.c.recompute {
            Recompute::Layers(_) => 0.0,
            whole
            @ (Recompute::None | Recompute::Auto | Recompute::Attention | Recompute::Full) => {
                self.sums.again_s(whole, 0, self.depth())
            }
        };
        forward_s + backward_s + again_s - if self.is_split() { weight_s } else { 0.0 }
    }

    /// Stages of which none holds more than `bytes_max`, each with as many layers as it can hold.
    pub fn fitting(&self, bytes_max: f64) -> Option<Vec<u32>> {
        let mut from = 0;
        let mut layers = Vec::with_capacity(self.c.pp as usize);
        for index in 0..self.c.pp {
            let (mut low, mut high) = (from, self.latest(index));
            while low < high {
                let middle = low + (high - low).div_ceil(2);
                let run = Run { index, count: 1, from, to: middle };
                let mut stage = Stage::default();
                hold(&mut stage, self.c, self.prices, &run);
                let held = self.terms.held(self.c, self.prices, &run, &stage, self.count);
                if held.total_bytes() <= bytes_max {
                    low = middle;
                } else {
                    high = middle - 1;
                }
            }
            if low == from {
                return None;
            }
            layers.push(low - from);
            from = low;
        }
        (from == self.depth()).then_some(layers)
    }

    fn stage(&self, index: u32, from: u32, to: u32) -> (Run, Stage) {
        let run = Run { index, count: 1, from, to };
        (run, stage(self.c, self.prices, &run, self.is_far))
    }

    /// Not above the seconds in which any cut exchanges, updates and moves, of those whose step is
    /// below `below_s`: what the first stage alone takes, or the last, or one with as many layers
    /// as the fullest has. `moves` says whether the update and moves count.
    pub fn least_after_s(&self, below_s: f64, moves: bool) -> f64 {
        let (p, depth, m) = (self.c.pp, self.depth(), self.count as f64);
        // No stage is slower than the step, and waits for no more than all backward passes.
        let room_s = below_s / m;
        let mut all_s = self.sums.passes[depth as usize][1];
        all_s += self.sums.again_s(self.c.recompute, 0, depth);
        all_s += self.sums.ends[0][1] + self.sums.ends[1][1] + f64::from(p) * self.send_s;
        let fullest = depth.div_ceil(p);
        let alone_s = |index: u32, from: u32, to: u32| {
            let (run, stage) = self.stage(index, from, to);
            let mut after = After::waiting(if index == 0 { 0.0 } else { all_s });
            after.take(&self.terms, self.c, (&run, &stage), [self.send_s, m]);
            let mut parts = Breakdown::default();
            after.tell(&mut parts);
            let moved_s = if moves { parts.optimizer_s + parts.offload_s } else { 0.0 };
            (stage.total_s() - stage.again_s, parts.gradients_s + parts.weights_s + moved_s)
        };
        let least_of = |index: u32, from: u32, window: &dyn Fn(u32) -> (u32, u32)| {
            let mut found = [f64::INFINITY; 2];
            for layers in from..=depth - (p - 1) {
                let (from, to) = window(layers);
                let (seconds, after_s) = alone_s(index, from, to);
                if seconds > room_s && layers > 1 {
                    break;
                }
                found[0] = found[0].min(after_s);
                if layers >= fullest {
                    found[1] = found[1].min(after_s);
                }
            }
            found
        };
        let first = least_of(0, 1, &|layers| (0, layers));
        let last = least_of(p - 1, 1, &|layers| (depth - layers, depth));
        let mut full_s = first[1].min(last[1]);
        if p > 2 {
            let low = least_of(1, fullest, &|layers| (0, layers));
            let high = least_of(1, fullest, &|layers| (depth - layers, depth));
            full_s = full_s.min(low[1]).min(high[1]);
        }
        // Of many kinds of layers a stage may have any.
        if self.prices.layers.len() > 2 {
            full_s = 0.0;
        }
        first[0].max(last[0]).max(full_s)
    }
}

/// What a cut has to be better than.
pub struct Wanted<'a> {
    /// Bytes of the fullest stage at most.
    pub bytes_max: f64,
    /// What is to be small of a step.
    pub worth: &'a dyn Fn(&Step) -> f64,
    /// The seconds of a step that is worth so much, at most.
    pub seconds: &'a dyn Fn(f64) -> f64,
    /// What is known to be there already.
    pub below: f64,
}

/// What was found among all cuts.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Layers of each stage, and the step; none where no cut is better.
    pub best: Option<(Vec<u32>, Step)>,
    /// Whether all cuts were tried or cannot be better.
    pub complete: bool,
}

impl Cuts<'_> {
    /// The best of all cuts that are better than what is there. `after_s` is what
    /// [`Cuts::least_after_s`] says.
    ///
    /// **Cost** some hundred operations for each stage that has room; at most a quarter of a
    /// millisecond.
    pub fn best(&self, least: &Least, after_s: f64, wanted: &Wanted<'_>) -> Found {
        let mut search = Search {
            cuts: self,
            paths: self.paths(),
            least,
            after_s,
            wanted,
            room_s: (wanted.seconds)(wanted.below),
            below: wanted.below,
            starts: Vec::new(),
            layers: Vec::new(),
            work: 0,
            best: None,
        };
        search.starts = match search.starts() {
            Some(starts) => starts,
            None => return Found { best: None, complete: true },
        };
        let complete = search.visit(0, 0, Taken::default());
        Found { best: search.best, complete }
    }
}

/// What the stages so far take.
#[derive(Clone, Copy, Default)]
struct Taken {
    after: After,
    path_s: f64,
    again_s: f64,
}

struct Search<'a> {
    cuts: &'a Cuts<'a>,
    paths: Vec<Path>,
    least: &'a Least,
    after_s: f64,
    wanted: &'a Wanted<'a>,
    /// Seconds that a better step is below.
    room_s: f64,
    below: f64,
    /// The first layer of each stage at least, so that what follows has room.
    starts: Vec<u32>,
    layers: Vec<u32>,
    work: u32,
    best: Option<(Vec<u32>, Step)>,
}

impl Search<'_> {
    /// The least first layer of each stage; none where the first stage cannot begin at the first
    /// layer.
    fn starts(&self) -> Option<Vec<u32>> {
        let (p, depth) = (self.cuts.c.pp, self.cuts.depth());
        let path_room_s = self.room_s - self.least.shared_s - self.after_s;
        let mut starts = vec![depth; p as usize + 1];
        for index in (0..p).rev() {
            let path = &self.paths[index as usize];
            let to = starts[index as usize + 1];
            let has_room = |from: u32| self.cuts.path_s(index, path, from, to) <= path_room_s;
            let (mut low, mut high) = (index, to);
            while low < high {
                let middle = low.midpoint(high);
                if has_room(middle) { high = middle } else { low = middle + 1 }
            }
            if low == to {
                return None;
            }
            starts[index as usize] = low;
        }
        (starts[0] == 0).then_some(starts)
    }

    /// Tries the ends of a stage; false where there is no more to be done.
    fn visit(&mut self, index: u32, from: u32, taken: Taken) -> bool {
        let Cuts { c, sums, count, send_s, .. } = *self.cuts;
        let first = self.starts[index as usize + 1].max(from + 1);
        let path_least_s = self.least.passes_s - self.least.shared_s;
        for to in first..=self.cuts.latest(index) {
            self.work += 1;
            if self.work > WORK_MAX {
                return false;
            }
            let path = &self.paths[index as usize];
            let path_s = self.cuts.path_s(index, path, from, to);
            let mut next = Taken { path_s: path_s.max(taken.path_s), ..taken };
            if let Recompute::Layers(_) = c.recompute {
                next.again_s += sums.again_s(c.recompute, from, to);
            }
            let shared_s = self.least.shared_s + next.again_s;
            let passes_s = shared_s + next.path_s.max(path_least_s);
            if passes_s + self.after_s >= self.room_s {
                break;
            }
            let (run, stage) = self.cuts.stage(index, from, to);
            let memory = self.cuts.terms.held(c, self.cuts.prices, &run, &stage, count);
            if memory.total_bytes() > self.wanted.bytes_max {
                break;
            }
            next.after.take(&self.cuts.terms, c, (&run, &stage), [send_s, count as f64]);
            let mut parts = Breakdown::default();
            next.after.tell(&mut parts);
            if passes_s + parts.total_s().max(self.after_s) >= self.room_s {
                continue;
            }
            self.layers.push(to - from);
            let goes_on = if index + 1 == c.pp {
                self.price();
                true
            } else {
                self.visit(index + 1, to, next)
            };
            self.layers.pop();
            if !goes_on {
                return false;
            }
        }
        true
    }

    fn price(&mut self) {
        let Cuts { terms, c, prices, count, .. } = self.cuts;
        let cut = Configuration { stage_layers: self.layers.clone(), ..(*c).clone() };
        let step = terms.step(&cut, prices, *count);
        let worth = (self.wanted.worth)(&step);
        if worth < self.below * (1.0 - ROUNDING) {
            self.below = worth;
            self.room_s = (self.wanted.seconds)(worth);
            self.best = Some((self.layers.clone(), step));
        }
    }
}
