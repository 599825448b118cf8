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
//! the other, which bounds all cuts. Against the fastest step found so far, the bound limits the
//! layers of each stage; cuts within these limits are tried, and they are few where the bound is
//! near.
//!
//! Legend: p stages, m micro-batches; F, B and W seconds of a stage's forward pass, of its backward
//! pass, and of the part of that which only weights need (`bubble`).

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use codegen::schedule::splits_backward;
use rustc_hash::FxHashMap;

use super::Estimator;
use super::collective::{Collectives, Copies};
use super::price::{LayerPrice, Prices};
use super::stage::{Run, Stage, hold, stage};
use super::step::{After, Alone, Breakdown, Step};
use super::terms::Terms;
use crate::configuration::{Configuration, Recompute, Schedule};

/// The part of a step to which the least of the slowest stages is found. Chosen: bounds are
/// further off for other reasons.
const PRECISION: f64 = 1e-5;
/// The part of a step below which a difference is rounding.
const ROUNDING: f64 = 1e-9;

/// Prefix sums over a model's layers, in seconds: entry n is of the first n layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Sums {
    /// F, B and W, nothing recomputed.
    passes: Vec<[f64; 3]>,
    /// Recomputation of the inside of attention.
    attention_s: Vec<f64>,
    /// Recomputation of whole layers.
    whole_s: Vec<f64>,
    /// Recomputation of the n layers that take the least; empty where all layers are alike.
    least_whole_s: Vec<f64>,
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
            least_whole_s: Vec::new(),
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
        if prices.layers.len() > 1 {
            let mut each: Vec<f64> = sums.whole_s.windows(2).map(|s| s[1] - s[0]).collect();
            each.sort_by(f64::total_cmp);
            let first = std::iter::once(0.0);
            let sum = |sum: &mut f64, seconds: f64| {
                *sum += seconds;
                Some(*sum)
            };
            sums.least_whole_s = first.chain(each.into_iter().scan(0.0, sum)).collect();
        }
        sums
    }

    fn depth(&self) -> u32 {
        self.passes.len() as u32 - 1
    }

    /// Seconds that layers `from` to `to` of a stage are recomputed.
    fn recompute_s(&self, recompute: Recompute, from: u32, to: u32) -> f64 {
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

impl Sums {
    /// Lower bound on [`Sums::recompute_s`] that never shrinks when a stage grows: some layers of a
    /// stage are recomputed, and where cheaper ones are added in front, these replace others.
    fn least_again_s(&self, recompute: Recompute, from: u32, to: u32) -> f64 {
        match recompute {
            Recompute::Layers(layers) if !self.least_whole_s.is_empty() => {
                self.least_whole_s[layers.min(to - from) as usize]
            }
            Recompute::Layers(_)
            | Recompute::None
            | Recompute::Auto
            | Recompute::Attention
            | Recompute::Full => self.recompute_s(recompute, from, to),
        }
    }
}

fn add(a: [f64; 3], b: [f64; 3]) -> [f64; 3] {
    [a[0] + b[0], a[1] + b[1], a[2] + b[2]]
}

/// A stage with as many layers as it has room for.
struct Filled {
    to: u32,
    seconds: f64,
    more_s: f64,
}

/// The last number up to `high` for which something holds that holds up to some number; `low` where
/// for none above it. Few are asked where that is near `guess`.
fn last_where(low: u32, high: u32, guess: u32, holds: impl Fn(u32) -> bool) -> u32 {
    let (mut low, mut high) = (low, high);
    let (mut at, mut step) = (guess, 1);
    while low < high {
        at = at.clamp(low + 1, high);
        // No step is longer than half of what is left.
        if holds(at) {
            low = at;
            at = (low + step).min(low + (high - low).div_ceil(2));
        } else {
            high = at - 1;
            at = (high + 1).saturating_sub(step).max(low + (high - low).div_ceil(2));
        }
        step *= 2;
    }
    low
}

/// Lower bound over all stage partitions of one configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LowerBound {
    /// Lower bound on the seconds of the passes, with their messages.
    pub passes_s: f64,
    /// The part of them that is no stage's own.
    shared_s: f64,
}

/// A configuration whose layers are to be cut.
pub struct StagePartitions<'a> {
    terms: Terms<'a>,
    c: &'a Configuration,
    prices: &'a Prices,
    sums: &'a Sums,
    count: u64,
    is_far: bool,
    send_s: f64,
    exchanged: Rc<Exchanged>,
}

/// Collectives of stages that were looked at, of configurations that differ at most in what they
/// offload and recompute.
#[derive(Debug, Default)]
pub struct Exchanged {
    copies: OnceCell<Copies>,
    collectives: RefCell<FxHashMap<(u32, u32, u32), Collectives>>,
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
        (prices, sums): (&'a Prices, &'a Sums),
        count: u64,
        exchanged: Rc<Exchanged>,
    ) -> StagePartitions<'a> {
        let terms = self.terms();
        let (is_far, send_s) = (terms.sends_far(c), terms.send_s(c, prices));
        StagePartitions { terms, c, prices, sums, count, is_far, send_s, exchanged }
    }

    /// Whether the stages of a configuration are on different nodes.
    pub fn sends_far(&self, c: &Configuration) -> bool {
        self.terms().sends_far(c)
    }
}

impl StagePartitions<'_> {
    /// What is cut.
    pub fn configuration(&self) -> &Configuration {
        self.c
    }

    fn depth(&self) -> u32 {
        self.sums.depth()
    }

    /// The last layer that a stage can end with, so that there is one for each that follows.
    fn latest(&self, index: u32) -> u32 {
        self.depth() - (self.c.pp - 1 - index)
    }

    fn is_split(&self) -> bool {
        splits_backward(self.c.schedule)
    }

    /// F, B and W, in seconds, of a stage with `recompute_s` seconds of recomputation; B is without
    /// W where a schedule splits them.
    fn passes(&self, index: u32, from: u32, to: u32, recompute_s: f64) -> [f64; 3] {
        let [first, last] = [&self.sums.passes[from as usize], &self.sums.passes[to as usize]];
        let mut all = [last[0] - first[0], last[1] - first[1], last[2] - first[2]];
        all[1] += recompute_s;
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
        let more_s = if is_late { self.passes(0, 0, 1, 0.0)[2] } else { 0.0 };
        let goes_back = m > ahead && self.c.schedule != Schedule::GPipe;
        let back = goes_back.then_some([m - ahead, (m - ahead - late).max(0.0)]);
        Path { factors: [m - ahead, m - 1.0, m - left], more_s, back }
    }

    /// Seconds of the longer of a stage's paths. It grows with the last layer of the stage.
    fn path_s(&self, index: u32, path: &Path, from: u32, to: u32) -> f64 {
        let recompute_s = self.sums.recompute_s(self.c.recompute, from, to);
        self.path_of(index, path, to, self.passes(index, from, to, recompute_s))
    }

    /// Lower bound on the stage's path, in seconds. It grows with the layers of the stage and with
    /// those that follow it.
    fn least_path_s(&self, index: u32, path: &Path, from: u32, to: u32) -> f64 {
        let recompute_s = self.sums.least_again_s(self.c.recompute, from, to);
        self.path_of(index, path, to, self.passes(index, from, to, recompute_s))
    }

    fn path_of(&self, index: u32, path: &Path, to: u32, passes: [f64; 3]) -> f64 {
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
        let recompute_s = match self.c.recompute {
            Recompute::Layers(_) => 0.0,
            whole
            @ (Recompute::None | Recompute::Auto | Recompute::Attention | Recompute::Full) => {
                self.sums.recompute_s(whole, to, self.depth())
            }
        };
        rest[0] + rest[1] + recompute_s - if self.is_split() { rest[2] } else { 0.0 }
    }

    /// The last layer up to which a stage's path takes no longer than `room_s`, and its seconds;
    /// `from` and 0 where it has no room for one. Then those with a layer more, where they were
    /// looked at: unless nothing follows that could have it. It may have about `guess` layers.
    fn filled(&self, index: u32, path: &Path, from: u32, room_s: f64, guess: u32) -> Filled {
        let (took_s, more_s) = (Cell::new(0.0), Cell::new(f64::INFINITY));
        let has_room = |to: u32| {
            let seconds = self.least_path_s(index, path, from, to);
            let has_room = seconds <= room_s;
            if has_room { &took_s } else { &more_s }.set(seconds);
            has_room
        };
        let to = last_where(from, self.latest(index), from + guess, has_room);
        Filled { to, seconds: took_s.get(), more_s: more_s.get() }
    }

    /// The stages whose paths take no longer than `room_s`, each with as many layers as it can
    /// have, and the longest path; where they are too few, the least room in which one could have
    /// more.
    fn fill(&self, paths: &[Path], room_s: f64) -> Result<(Vec<u32>, f64), f64> {
        let (mut from, mut guess) = (0, self.depth() / self.c.pp);
        let (mut longest_s, mut more_s) = (0.0f64, f64::INFINITY);
        let mut layers = Vec::with_capacity(paths.len());
        for (index, path) in (0..).zip(paths) {
            let filled = self.filled(index, path, from, room_s, guess);
            more_s = more_s.min(filled.more_s);
            if filled.to == from {
                return Err(more_s);
            }
            longest_s = longest_s.max(filled.seconds);
            guess = filled.to - from;
            layers.push(guess);
            from = filled.to;
        }
        if from == self.depth() { Ok((layers, longest_s)) } else { Err(more_s) }
    }

    fn paths(&self) -> Vec<Path> {
        (0..self.c.pp).map(|index| self.path(index)).collect()
    }

    /// The layers that some stage has more than, at least. A cut is another's where more of its
    /// layers are to be recomputed than its stages have: that of all layers.
    pub fn deeper_than(&self) -> u32 {
        let even = self.depth().div_ceil(self.c.pp);
        match self.c.recompute {
            Recompute::Layers(recomputed) if recomputed >= even => recomputed,
            Recompute::Layers(_)
            | Recompute::None
            | Recompute::Auto
            | Recompute::Attention
            | Recompute::Full => 0,
        }
    }

    /// Where a stage has to be deep: a partition whose deep stage has the least path and whose
    /// other stages are even, and the lower bound, in seconds, on the path of any deep stage.
    fn least_deep(&self, paths: &[Path]) -> Option<(Vec<u32>, f64)> {
        let (p, depth) = (self.c.pp, self.depth());
        let deep = self.deeper_than().checked_add(1).filter(|deep| (2..=depth).contains(deep))?;
        let begins: Vec<u32> = self.unlike(deep, [0, depth]).collect();
        let of_stage = |(index, path): (u32, &Path)| {
            let seconds = |from: &u32| self.least_path_s(index, path, *from, from + deep);
            (index, begins.iter().map(seconds).fold(f64::INFINITY, f64::min))
        };
        let (at, longest_s) = (0..).zip(paths).map(of_stage).min_by(|a, b| a.1.total_cmp(&b.1))?;
        let (each, more) = ((depth - deep) / (p - 1), (depth - deep) % (p - 1));
        let mut cut: Vec<u32> = (0..p - 1).map(|at| each + u32::from(at < more)).collect();
        cut.insert(at as usize, deep);
        Some((cut, longest_s))
    }

    /// Lower bound on the passes over all stage partitions, and the partition whose longest path is
    /// the least.
    pub fn least(&self) -> (LowerBound, Vec<u32>) {
        let paths = self.paths();
        let depth = self.depth();
        let (each, more) = (depth / self.c.pp, depth % self.c.pp);
        let mut layers: Vec<u32> = (0..self.c.pp).map(|at| each + u32::from(at < more)).collect();
        let mut from = 0;
        let mut high = 0.0f64;
        for ((index, path), layers) in (0..).zip(&paths).zip(&layers) {
            high = high.max(self.least_path_s(index, path, from, from + layers));
            from += layers;
        }
        let shared_s = self.shared_s();
        let (mut low, mut is_near) = (0.0, true);
        while high - low > PRECISION * (shared_s + high) {
            // Often there is none better, or one a layer away.
            let near_s = high - PRECISION * (shared_s + high);
            match self.fill(&paths, if is_near { near_s } else { 0.5 * (low + high) }) {
                Ok(found) => (layers, high) = found,
                Err(more_s) => low = more_s.min(high),
            }
            is_near = !is_near;
        }
        let sends_s = 2.0 * self.send_s * (self.count as f64 + f64::from(self.c.pp - 1));
        if let Some((cut, longest_s)) = self.least_deep(&paths) {
            (layers, low) = (cut, low.max(longest_s));
        }
        (LowerBound { passes_s: shared_s + low + sends_s, shared_s: shared_s + sends_s }, layers)
    }

    /// One micro-batch on each stage; without what is recomputed where that depends on the cut.
    fn shared_s(&self) -> f64 {
        let end = self.sums.passes[self.depth() as usize];
        let [forward_s, backward_s, weight_s] = add(add(end, self.sums.ends[0]), self.sums.ends[1]);
        let recompute_s = match self.c.recompute {
            Recompute::Layers(_) => 0.0,
            whole
            @ (Recompute::None | Recompute::Auto | Recompute::Attention | Recompute::Full) => {
                self.sums.recompute_s(whole, 0, self.depth())
            }
        };
        forward_s + backward_s + recompute_s - if self.is_split() { weight_s } else { 0.0 }
    }

    /// Stages of which none holds more than `bytes_max`, each with as many layers as it can hold.
    pub fn fitting(&self, bytes_max: f64) -> Option<Vec<u32>> {
        let (mut from, mut guess) = (0, self.depth() / self.c.pp);
        let mut layers = Vec::with_capacity(self.c.pp as usize);
        for index in 0..self.c.pp {
            let fits = |to: u32| self.holds(index, from, to, bytes_max);
            let to = last_where(from, self.latest(index), from + guess, fits);
            if to == from {
                return None;
            }
            guess = to - from;
            layers.push(guess);
            from = to;
        }
        (from == self.depth()).then_some(layers)
    }

    fn run(index: u32, from: u32, to: u32) -> Run {
        Run { index, count: 1, from, to }
    }

    /// A stage that does alone what this one does: one of the same kind, with the first layers that
    /// are alike.
    fn alike(&self, index: u32, from: u32, to: u32) -> (u32, u32, u32) {
        let index = if index + 1 == self.c.pp { index } else { index.min(1) };
        let mut start = 0;
        for (count, _) in &self.prices.layers {
            if from < start + count {
                return if to <= start + count { (index, start, start + to - from) } else { break };
            }
            start += count;
        }
        (index, from, to)
    }

    /// A stage, and what it does at the end of a step if it waits for no other.
    fn one(&self, index: u32, from: u32, to: u32) -> (Stage, Alone) {
        let (index, from, to) = self.alike(index, from, to);
        let m = self.count as f64;
        let stage = stage(self.c, self.prices, &StagePartitions::run(index, from, to), self.is_far);
        let copies = self.exchanged.copies.get_or_init(|| self.terms.copies(self.c));
        let mut known = self.exchanged.collectives.borrow_mut();
        let collectives = known.entry((index, from, to));
        let collectives =
            *collectives.or_insert_with(|| self.terms.collectives(self.c, copies, &stage));
        let exchanges = self.terms.exchanges_of(self.c, copies, (&stage, collectives), m);
        (stage, self.terms.alone(self.c, &stage, exchanges, m))
    }

    /// Bytes that a stage holds.
    fn bytes(&self, index: u32, from: u32, to: u32) -> f64 {
        let run = StagePartitions::run(index, from, to);
        let mut stage = Stage::default();
        hold(&mut stage, self.c, self.prices, &run);
        self.terms.held(self.c, self.prices, &run, &stage, self.count).total_bytes()
    }

    /// Whether a stage holds at most `bytes_max` bytes.
    fn holds(&self, index: u32, from: u32, to: u32, bytes_max: f64) -> bool {
        bytes_max == f64::INFINITY || self.bytes(index, from, to) <= bytes_max
    }

    /// The least first layer of each stage, so that what follows has room and fits; none where the
    /// first stage cannot begin at the first layer.
    fn starts(&self, paths: &[Path], [room_s, bytes_max]: [f64; 2]) -> Option<Vec<u32>> {
        let (p, depth) = (self.c.pp, self.depth());
        let mut starts = vec![depth; p as usize + 1];
        let mut guess = depth / p;
        for index in (0..p).rev() {
            let path = &paths[index as usize];
            let to = starts[index as usize + 1];
            let has_room = |layers: u32| {
                self.least_path_s(index, path, to - layers, to) <= room_s
                    && self.holds(index, to - layers, to, bytes_max)
            };
            guess = last_where(0, to - index, guess, has_room);
            if guess == 0 {
                return None;
            }
            starts[index as usize] = to - guess;
        }
        (starts[0] == 0).then_some(starts)
    }

    /// How many layers stages have in the stage partitions whose passes take at most `seconds` and
    /// whose stages hold at most `bytes_max` bytes; none where there is no such partition.
    pub fn room(&self, least: &LowerBound, [seconds, bytes_max]: [f64; 2]) -> Option<Room> {
        let room_s = seconds - least.shared_s;
        let paths = self.paths();
        let starts = self.starts(&paths, [room_s, bytes_max])?;
        let mut ends = Vec::with_capacity(paths.len());
        let (mut end, mut guess) = (0, starts[1]);
        for (index, path) in (0..).zip(&paths) {
            let from = end;
            end = self.filled(index, path, from, room_s, guess).to;
            let holds = |to: u32| self.holds(index, from, to, bytes_max);
            end = last_where(from, end, end, holds);
            guess = end - from;
            ends.push(end);
        }
        let depth = self.depth();
        let p = paths.len();
        let between = (1..p - 1).map(|at| ends[at].saturating_sub(starts[at]));
        Some(Room {
            first: [starts[1], ends[0]],
            last: [depth.saturating_sub(ends[p - 2]), depth - starts[p - 1]],
            most_between: between.max().unwrap_or_default(),
            stage_s: seconds / self.count as f64,
        })
    }

    /// Lower bound, in seconds, on collectives, optimizer update and offload over all stage
    /// partitions within `room`: what the first stage takes alone, the last, or the fullest between
    /// them, for all numbers of layers of the first and the last. `moves` says whether the update
    /// and offload count.
    pub fn after_bound_s(&self, room: &Room, moves: bool) -> f64 {
        let (p, depth) = (self.c.pp, self.depth());
        // No stage waits for more than all backward passes.
        let mut all_s = self.sums.passes[depth as usize][1];
        all_s += self.sums.recompute_s(Recompute::Full, 0, depth);
        all_s += self.sums.ends[0][1] + self.sums.ends[1][1] + f64::from(p) * self.send_s;
        let alone_s = |index: u32, from: u32, to: u32| {
            let (stage, alone) = self.one(index, from, to);
            let mut after = After::waiting(if index == 0 { 0.0 } else { all_s });
            after.take(&alone, 1, self.send_s);
            let mut parts = Breakdown::default();
            after.tell(&mut parts);
            let moved_s = if moves { parts.optimizer_s + parts.offload_s } else { 0.0 };
            let has_room = stage.total_s() - stage.recompute_s <= room.stage_s;
            has_room.then_some(parts.gradients_s + parts.weights_s + moved_s)
        };
        let ends = [(0, room.first), (p - 1, room.last)].map(|(index, [low, high])| {
            let all = (low..=high).map_while(|layers| {
                let from = if index == 0 { 0 } else { depth - layers };
                Some((layers, alone_s(index, from, from + layers)?))
            });
            all.collect::<Vec<_>>()
        });
        let [first, last] = &ends;
        if p == 2 {
            // What one stage has is not the other's.
            let pairs = first.iter().filter_map(|(layers, first_s)| {
                let at =
                    last.binary_search_by_key(&(depth - layers), |(layers, _)| *layers).ok()?;
                Some(first_s.max(last[at].1))
            });
            return pairs.fold(f64::INFINITY, f64::min);
        }
        let most = [first, last].map(|end| end.last().map_or(0, |(layers, _)| *layers));
        // By layers: the least of a stage between with as many or more. One of those between has as
        // many as there are for each, or more.
        let stages = p - 2;
        let fewest = depth.saturating_sub(most[0] + most[1]).div_ceil(stages).max(1);
        let mut between_s = vec![f64::INFINITY; room.most_between as usize + 1];
        for layers in fewest..=room.most_between {
            let begins = self.unlike(layers, [room.first[0], depth - room.last[0]]);
            let least = begins.filter_map(|from| alone_s(1, from, from + layers));
            between_s[layers as usize] = least.fold(f64::INFINITY, f64::min);
        }
        for at in (1..between_s.len()).rev() {
            between_s[at - 1] = between_s[at - 1].min(between_s[at]);
        }
        least_of_pairs([first, last], |layers| {
            let between = depth.saturating_sub(layers).div_ceil(stages);
            between_s.get(between as usize).copied().unwrap_or(f64::INFINITY)
        })
    }

    /// First layers of the distinct stages of `layers` layers between the layers `low` and `high`:
    /// of stages whose layers are of the same kinds in the same order, one.
    fn unlike(&self, layers: u32, [low, high]: [u32; 2]) -> impl Iterator<Item = u32> {
        let runs = self.prices.layers.iter().scan(0, |end, (count, _)| {
            let from = *end;
            *end += count;
            Some((from, *end))
        });
        runs.flat_map(move |(from, end)| {
            let from = from.max(low);
            // Those that end within a run are like the first of them.
            let beyond = (end + 1).saturating_sub(layers).max(from + 1);
            let first = (from < end).then_some(from);
            first.into_iter().chain(beyond..end).filter(move |from| from + layers <= high)
        })
    }
}

/// Lower bound, in seconds, on the longest of a first stage, a last one and `rest_s` of the layers
/// of both, over all pairs of `ends`. Ends are `(layers, seconds)`, ascending; the more layers they
/// have, the less is the rest.
fn least_of_pairs(ends: [&[(u32, f64)]; 2], rest_s: impl Fn(u32) -> f64) -> f64 {
    // Seconds of as many layers or more.
    let [first, last] = ends.map(|end| {
        let mut end = end.to_vec();
        for at in (1..end.len()).rev() {
            end[at - 1].1 = end[at - 1].1.min(end[at].1);
        }
        end
    });
    let (mut first, mut last) = (&first[..], &last[..]);
    let mut least_s = f64::INFINITY;
    while let ([before @ .., (a, a_s)], [ahead @ .., (b, b_s)]) = (first, last) {
        let (ends_s, rest_s) = (a_s.max(*b_s), rest_s(a + b));
        least_s = least_s.min(ends_s.max(rest_s));
        if rest_s >= ends_s {
            break;
        }
        // The slower end with fewer layers alone can make it less.
        if a_s >= b_s {
            first = before;
        } else {
            last = ahead;
        }
    }
    least_s
}

/// How many layers the stages of cuts can have that are fast enough.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Room {
    /// Of the first stage, at least and at most.
    first: [u32; 2],
    /// Of the last stage.
    last: [u32; 2],
    /// Of one between them, at most.
    most_between: u32,
    /// Seconds of a micro-batch on a stage, at most.
    stage_s: f64,
}

impl Room {
    /// Stages that [`StagePartitions::after_bound_s`] looks at, about.
    pub fn stages(&self) -> u32 {
        let ends = [self.first, self.last].map(|[low, high]| high.saturating_sub(low) + 1);
        ends[0] + ends[1] + self.most_between
    }
}

/// What a stage partition has to be better than.
pub struct Wanted<'a> {
    /// Upper limit of the bytes of the fullest stage.
    pub bytes_max: f64,
    /// Objective value of a step: seconds, or joules of a device.
    pub objective_value: &'a dyn Fn(&Step) -> f64,
    /// Upper bound on the seconds of a step with the given objective value.
    pub seconds: &'a dyn Fn(f64) -> f64,
    /// Objective value of the best plan so far.
    pub below: f64,
    /// Upper limit of the number of stages that are priced.
    pub work_max: u32,
}

/// What was found among all cuts.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Layers of each stage, and the step; none where no cut is better.
    pub best: Option<(Vec<u32>, Step)>,
    /// Whether all cuts were tried or cannot be better.
    pub complete: bool,
}

impl StagePartitions<'_> {
    /// The best of all cuts that are better than what is there. `after_s` is what
    /// [`StagePartitions::after_bound_s`] says.
    ///
    /// **Cost** some hundred operations for each stage that has room.
    pub fn best(&self, least: &LowerBound, after_s: f64, wanted: &Wanted<'_>) -> Found {
        let paths = self.paths();
        let room_s = (wanted.seconds)(wanted.below);
        let most = [room_s - least.shared_s - after_s, wanted.bytes_max];
        let Some(starts) = self.starts(&paths, most) else {
            return Found { best: None, complete: true };
        };
        let mut search = Search {
            cuts: self,
            paths,
            least,
            after_s,
            wanted,
            room_s,
            below: wanted.below,
            starts,
            layers: Vec::new(),
            work: 0,
            best: None,
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
    recompute_s: f64,
}

struct Search<'a> {
    cuts: &'a StagePartitions<'a>,
    paths: Vec<Path>,
    least: &'a LowerBound,
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
    /// Tries the ends of a stage; false where there is no more to be done.
    fn visit(&mut self, index: u32, from: u32, taken: Taken) -> bool {
        let StagePartitions { c, sums, send_s, .. } = *self.cuts;
        let first = self.starts[index as usize + 1].max(from + 1);
        let path_least_s = self.least.passes_s - self.least.shared_s;
        for to in first..=self.cuts.latest(index) {
            self.work += 1;
            if self.work > self.wanted.work_max {
                return false;
            }
            let path = &self.paths[index as usize];
            let path_s = self.cuts.path_s(index, path, from, to);
            let mut next = Taken { path_s: path_s.max(taken.path_s), ..taken };
            if let Recompute::Layers(_) = c.recompute {
                next.recompute_s += sums.recompute_s(c.recompute, from, to);
            }
            let shared_s = self.least.shared_s + next.recompute_s;
            let passes_s = shared_s + next.path_s.max(path_least_s);
            if passes_s + self.after_s >= self.room_s {
                break;
            }
            if !self.cuts.holds(index, from, to, self.wanted.bytes_max) {
                break;
            }
            next.after.take(&self.cuts.one(index, from, to).1, 1, send_s);
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
        let StagePartitions { terms, c, prices, count, .. } = self.cuts;
        if self.layers.iter().max() <= Some(&self.cuts.deeper_than()) {
            return;
        }
        let cut = Configuration { stage_layers: self.layers.clone(), ..(*c).clone() };
        let step = terms.step(&cut, prices, *count);
        let objective_value = (self.wanted.objective_value)(&step);
        if objective_value < self.below * (1.0 - ROUNDING) {
            self.below = objective_value;
            self.room_s = (self.wanted.seconds)(objective_value);
            self.best = Some((self.layers.clone(), step));
        }
    }
}

#[cfg(test)]
mod tests;
