//! The space of configurations priced by [`Estimator`]: what the walk needs to know of it.
//!
//! Bounds call the step formula itself, at the least of what is open: a step without recomputation
//! and offload is not slower than one with it, and one with both and full sharding not larger than
//! one without. Above the inside of layers, a bound is the work of a stage in equal parts: `m · Σ t
//! / p`, with every axis placed best. That equal steps have equal formulas, and that the bounds
//! hold, is tested on random configurations.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use super::events::Line;
use super::knobs::{self, Frame, STEPS};
use super::tree::{Path, Score, Tree};
use crate::configuration::{Configuration, Offload, Place, Recompute, Zero};
use crate::estimate::Estimator;
use crate::estimate::price::{Inside, LayerPrice, Prices};
use crate::estimate::step::Step;

/// Decisions after which the mesh is known.
const MESH: usize = 3;
/// Decisions after which the inside of layers is known.
const INSIDE: usize = 7;
/// Decisions after which the schedule is known.
const SCHEDULE: usize = 8;

/// The tables of one inside, and what bounds read of them.
#[derive(Debug)]
struct Table {
    prices: Prices,
    /// Seconds of one micro-batch of all layers and both ends, nothing computed again.
    sum_s: f64,
    /// Seconds of the longest indivisible part: one layer, or the ends with one layer.
    part_s: f64,
}

impl Table {
    fn new(prices: Prices) -> Table {
        let both = |price: &LayerPrice| price.forward.total_s() + price.backward.total_s();
        let layers = prices.layers.iter().map(|(count, price)| f64::from(*count) * both(price));
        let ends = both(&prices.first) + both(&prices.last);
        let longest = prices.layers.iter().map(|(_, price)| both(price)).fold(0.0, f64::max);
        let last = prices.layers.last().map_or(0.0, |(_, price)| both(price));
        Table {
            sum_s: layers.sum::<f64>() + ends,
            part_s: longest.max(last + both(&prices.last)),
            prices,
        }
    }

    /// The slowest stage of `stages`, if they were as even as they can be.
    fn pace_s(&self, stages: u32) -> f64 {
        match stages {
            1 => self.sum_s,
            stages => (self.sum_s / f64::from(stages)).max(self.part_s),
        }
    }
}

/// The space of one job.
#[derive(Debug)]
pub struct Space<'a> {
    /// The prices.
    pub estimator: &'a Estimator<'a>,
    /// The values of decisions.
    pub frame: Frame,
    /// Samples of a step.
    pub global_batch: u64,
    tables: RefCell<HashMap<Inside, Rc<Table>>>,
    meshes: RefCell<HashMap<Path, Score>>,
    cuts: RefCell<HashMap<(Inside, u32, u32), Rc<Vec<u32>>>>,
}

impl<'a> Space<'a> {
    /// The space of a frame.
    pub fn new(estimator: &'a Estimator<'a>, frame: Frame) -> Space<'a> {
        let global_batch = u64::from(frame.global_batch);
        Space {
            estimator,
            frame,
            global_batch,
            tables: RefCell::default(),
            meshes: RefCell::default(),
            cuts: RefCell::default(),
        }
    }

    /// Tables that were made.
    pub fn table_count(&self) -> usize {
        self.tables.borrow().len()
    }

    fn table(&self, inside: Inside) -> Rc<Table> {
        if let Some(table) = self.tables.borrow().get(&inside) {
            return Rc::clone(table);
        }
        let table = Rc::new(Table::new(self.estimator.prices(inside)));
        self.tables.borrow_mut().insert(inside, Rc::clone(&table));
        table
    }

    /// The step of a whole configuration.
    pub fn step(&self, c: &Configuration) -> Step {
        let count = c.microbatch_count(self.global_batch).expect("the walk divides the batch");
        self.estimator.step(c, &self.table(Inside::of(c)).prices, count)
    }

    /// The seconds of a configuration's passes, replayed event by event: all of its step but what
    /// is exchanged, updated and moved.
    pub fn replay(&self, c: &Configuration) -> f64 {
        let count = c.microbatch_count(self.global_batch).expect("the walk divides the batch");
        Line::new(c, &self.table(Inside::of(c)).prices, count as usize, 0.0).replay()
    }

    /// The configuration of a leaf, with its stages cut unevenly where that is faster.
    pub fn configuration(&self, path: &Path, bytes_max: f64) -> (Configuration, Step) {
        let even = knobs::configuration(&self.frame, path);
        let step = self.step(&even);
        let cut = self.cut(&even);
        if cut.is_empty() {
            return (even, step);
        }
        let uneven = Configuration { stage_layers: cut.to_vec(), ..even.clone() };
        let other = self.step(&uneven);
        let faster = other.breakdown.total_s() < step.breakdown.total_s();
        let bytes = [step, other].map(|step| step.memory.total_bytes());
        let fits = bytes[1] <= bytes_max || bytes[1] < bytes[0];
        if faster && fits { (uneven, other) } else { (even, step) }
    }

    /// Layers of stages that are cut by their times, so that the slowest one is as fast as can be;
    /// nothing where chunks are interleaved.
    fn cut(&self, c: &Configuration) -> Rc<Vec<u32>> {
        if c.pp == 1 || c.vpp > 1 {
            return Rc::default();
        }
        let again = match c.recompute {
            Recompute::None | Recompute::Auto => 0,
            Recompute::Attention => 1,
            Recompute::Full => 2,
            Recompute::Layers(_) => return Rc::default(),
        };
        let inside = Inside::of(c);
        let key = (inside, c.pp, again);
        if let Some(cut) = self.cuts.borrow().get(&key) {
            return Rc::clone(cut);
        }
        let cut = Rc::new(bottleneck(&self.table(inside).prices, c.pp, again));
        self.cuts.borrow_mut().insert(key, Rc::clone(&cut));
        cut
    }

    /// Not above any leaf below a path that does not say where axes are placed: each is placed
    /// best.
    fn unplaced(&self, path: &Path) -> f64 {
        if path.values().len() + 1 == INSIDE {
            let c = knobs::configuration(&self.frame, path);
            return self.pace(&c, Inside { tp_stride: 1, cp_stride: 1, ..Inside::of(&c) });
        }
        let mut options = Vec::new();
        knobs::options(&self.frame, path, &mut options);
        let below = options.iter().map(|value| self.unplaced(&path.then(*value)));
        below.fold(f64::INFINITY, f64::min)
    }

    /// Seconds in which the slowest stage works on all micro-batches, at least.
    fn pace(&self, c: &Configuration, inside: Inside) -> f64 {
        let count = c.microbatch_count(self.global_batch).expect("the walk divides the batch");
        count as f64 * self.table(inside).pace_s(c.pp)
    }

    /// What uneven stages may gain over even ones, at most.
    fn slack_s(&self, c: &Configuration, step: &Step) -> f64 {
        if c.pp == 1 || c.vpp > 1 {
            return 0.0;
        }
        let pace = self.pace(c, Inside::of(c));
        let parts = &step.breakdown;
        let busy = parts.products_s + parts.attention_s + parts.rows_s + parts.dispatch_s;
        let busy = busy + parts.tensor_s + parts.context_s + parts.expert_s;
        // What is exchanged after the last micro-batch is at most as uneven as the layers.
        let tail = parts.gradients_s + parts.weights_s + parts.optimizer_s + parts.offload_s;
        let layers = f64::from(self.frame.layers);
        let (stages, most) = (f64::from(c.pp), f64::from(self.frame.layers.div_ceil(c.pp)));
        let again = parts.recompute_s * (1.0 - layers / (stages * most));
        (busy - pace).max(0.0) + again + tail * (1.0 - pace / busy.max(pace))
    }

    fn bound_below_inside(&self, path: &Path, below: f64) -> Score {
        let c = knobs::configuration(&self.frame, path);
        let decided = path.values().len();
        if decided == STEPS.len() {
            let step = self.step(&c);
            let seconds = step.breakdown.total_s() - self.slack_s(&c, &step);
            return Score { seconds, bytes: uneven_bytes(&c, step.memory.total_bytes()) };
        }
        let mut fast = Configuration { recompute: Recompute::None, ..c.clone() };
        if decided <= SCHEDULE {
            fast.zero = Zero::default();
        }
        // What is kept decides how much is moved, and what is computed again hides moves and
        // collectives both, so that moves are free until that is known.
        fast.offload.activations = Place::Device;
        fast.offload.parameters = Place::Device;
        let step = self.step(&fast);
        let tail = if decided <= SCHEDULE {
            step.breakdown.gradients_s + step.breakdown.weights_s + step.breakdown.optimizer_s
        } else {
            0.0
        };
        let seconds = step.breakdown.total_s() - tail - self.slack_s(&c, &step);
        if seconds >= below {
            return Score { seconds, bytes: 0.0 };
        }
        Score { seconds, bytes: self.least_bytes(&c, decided) }
    }

    /// Bytes that no leaf below has less of.
    fn least_bytes(&self, c: &Configuration, decided: usize) -> f64 {
        let mut small = c.clone();
        let zeros = if decided <= SCHEDULE {
            small.offload = Offload {
                optimizer: Place::Host,
                parameters: Place::Host,
                activations: Place::Host,
            };
            vec![Zero { stage: 2, shard: 0 }, Zero { stage: 3, shard: 0 }]
        } else {
            vec![c.zero]
        };
        if decided == SCHEDULE + 1 {
            small.offload = Offload {
                optimizer: Place::Host,
                parameters: Place::Host,
                activations: Place::Host,
            };
        }
        let mut least = f64::INFINITY;
        for zero in zeros {
            for recompute in [Recompute::None, Recompute::Attention, Recompute::Full] {
                small.zero = zero;
                small.recompute = recompute;
                least = least.min(self.step(&small).memory.total_bytes());
            }
        }
        uneven_bytes(c, least)
    }
}

/// Not above the bytes of the fullest stage of any cut, given those of an even one.
///
/// The stage with the most micro-batches in flight may have fewer layers. If stage i holds
/// `n (w + a (p - i))`, the fullest holds at least `L / Σ 1/(w + a (p - i))`, which for no weights
/// is the even one by the harmonic number of p.
fn uneven_bytes(c: &Configuration, bytes: f64) -> f64 {
    if c.pp == 1 || c.vpp > 1 {
        return bytes;
    }
    bytes / (1..=c.pp).map(|i| 1.0 / f64::from(i)).sum::<f64>()
}

impl Tree for Space<'_> {
    fn depth(&self) -> usize {
        STEPS.len()
    }

    fn settles(&self) -> bool {
        false
    }

    fn kind_depth(&self) -> usize {
        MESH
    }

    fn options(&self, path: &Path, options: &mut Vec<u32>) {
        knobs::options(&self.frame, path, options);
    }

    fn shape(&self, path: &Path) -> u64 {
        knobs::shape(&self.frame, path)
    }

    fn bound(&self, path: &Path, below: f64) -> Score {
        let decided = path.values().len();
        if decided < INSIDE {
            if decided > MESH {
                let seconds = self.unplaced(path);
                // Where axes are placed does not matter to memory.
                let known = decided + 1 == INSIDE && seconds < below;
                let c = knobs::configuration(&self.frame, path);
                let bytes = if known { self.least_bytes(&c, decided) } else { 0.0 };
                return Score { seconds, bytes };
            }
            if let Some(score) = self.meshes.borrow().get(path) {
                return *score;
            }
            let mut options = Vec::new();
            self.options(path, &mut options);
            let seconds = match decided {
                MESH => self.unplaced(path),
                _ => {
                    let bounds = options.iter().map(|v| self.bound(&path.then(*v), below).seconds);
                    bounds.fold(f64::INFINITY, f64::min)
                }
            };
            let score = Score { seconds, bytes: 0.0 };
            self.meshes.borrow_mut().insert(*path, score);
            return score;
        }
        if decided == INSIDE {
            let c = knobs::configuration(&self.frame, path);
            return Score { seconds: self.pace(&c, Inside::of(&c)), bytes: 0.0 };
        }
        self.bound_below_inside(path, below)
    }

    fn score(&self, path: &Path, bytes_max: f64, _: f64) -> Score {
        let (_, step) = self.configuration(path, bytes_max);
        Score { seconds: step.breakdown.total_s(), bytes: step.memory.total_bytes() }
    }
}

/// Layers of each stage such that the slowest is as fast as can be: the least time is sought by
/// bisection, and for a time each stage takes as many layers as it has time for.
fn bottleneck(prices: &Prices, stages: u32, again: u32) -> Vec<u32> {
    let seconds = |price: &LayerPrice| {
        let again_s = match again {
            0 => 0.0,
            1 => price.attention_again.total_s(),
            _ => price.forward_again.total_s(),
        };
        price.forward.total_s() + price.backward.total_s() + again_s
    };
    let layers: Vec<f64> = prices
        .layers
        .iter()
        .flat_map(|(count, price)| std::iter::repeat_n(seconds(price), *count as usize))
        .collect();
    let ends = |price: &LayerPrice| price.forward.total_s() + price.backward.total_s();
    let extra = |stage: u32| {
        let first = if stage == 0 { ends(&prices.first) } else { 0.0 };
        first + if stage + 1 == stages { ends(&prices.last) } else { 0.0 }
    };
    let fill = |pace_s: f64| {
        let mut at = 0;
        let mut sizes = Vec::new();
        for stage in 0..stages {
            let begin = at;
            let mut sum = extra(stage);
            let left = (stages - stage - 1) as usize;
            while at + left < layers.len() && sum + layers[at] <= pace_s {
                sum += layers[at];
                at += 1;
            }
            if at == begin {
                return None;
            }
            sizes.push((at - begin) as u32);
        }
        (at == layers.len()).then_some(sizes)
    };
    let total = layers.iter().sum::<f64>() + extra(0) + extra(stages - 1);
    let (mut low, mut high) = (total / f64::from(stages), total);
    let mut best = fill(high);
    // Forty halvings leave less than rounding.
    for _ in 0..40 {
        let middle = 0.5 * (low + high);
        match fill(middle) {
            Some(sizes) => (best, high) = (Some(sizes), middle),
            None => low = middle,
        }
    }
    best.unwrap_or_default()
}
