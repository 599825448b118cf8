//! Tables: what layers cost when their insides are cut in one way, and what bounds and cuts read of
//! it. They are made once for all configurations that agree with them.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustc_hash::FxHashMap;

use crate::configuration::Recompute;
use crate::estimate::Estimator;
use crate::estimate::cut::Sums;
use crate::estimate::price::{Inside, LayerPrice, Prices};

/// What is recomputed where stages are cut by their times.
pub(super) const AGAIN: [Recompute; 3] = [Recompute::None, Recompute::Attention, Recompute::Full];

/// The tables of one inside, and what bounds read of them.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) prices: Prices,
    /// Layers.
    depth: u32,
    /// Seconds of one micro-batch of all layers and both ends, nothing recomputed.
    sum_s: f64,
    /// Seconds of them in which the device computes.
    pub(super) busy_sum_s: f64,
    /// Seconds of the longest indivisible part: one layer, or the ends with one layer.
    part_s: f64,
    /// Seconds of the shortest layer.
    least_s: f64,
    /// The least part of a layer, or of an end, that its backward pass takes.
    backward_part: f64,
    /// By stages and what is recomputed: the balanced cut.
    cuts: Mutex<FxHashMap<(u32, usize), Arc<Balanced>>>,
    /// What is read of the prices to cut layers, of stages on one node and on several.
    sums: [OnceLock<Sums>; 2],
}

impl Table {
    fn new(prices: Prices) -> Table {
        let both = |price: &LayerPrice| price.forward.total_s() + price.backward.total_s();
        let layers = || prices.layers.iter().map(|(count, price)| (*count, both(price)));
        let ends = both(&prices.first) + both(&prices.last);
        let longest = layers().map(|(_, seconds)| seconds).fold(0.0, f64::max);
        let last = layers().next_back().map_or(0.0, |(_, seconds)| seconds);
        Table {
            depth: layers().map(|(count, _)| count).sum(),
            sum_s: layers().map(|(count, s)| f64::from(count) * s).sum::<f64>() + ends,
            busy_sum_s: prices
                .layers
                .iter()
                .map(|(count, price)| (f64::from(*count), price))
                .chain([(1.0, &prices.first), (1.0, &prices.last)])
                .map(|(count, price)| count * (price.forward.busy_s() + price.backward.busy_s()))
                .sum(),
            part_s: longest.max(last + both(&prices.last)),
            least_s: layers().map(|(_, seconds)| seconds).fold(f64::INFINITY, f64::min),
            backward_part: prices
                .layers
                .iter()
                .map(|(_, price)| price)
                .chain([&prices.first, &prices.last])
                .filter(|price| both(price) > 0.0)
                .map(|price| price.backward.total_s() / both(price))
                .fold(1.0, f64::min),
            cuts: Mutex::default(),
            sums: Default::default(),
            prices,
        }
    }

    /// Lower bound on the bottleneck time, in seconds, over all partitions into `stages` stages:
    /// some stage has at least as many layers as the largest stage of the even partition.
    pub(super) fn bottleneck_s(&self, stages: u32) -> f64 {
        match stages {
            1 => self.sum_s,
            stages => {
                let most = f64::from(self.depth.div_ceil(stages)) * self.least_s;
                (self.sum_s / f64::from(stages)).max(self.part_s).max(most)
            }
        }
    }

    /// Lower bound on the seconds of the passes of `m` micro-batches, where the slowest stage takes
    /// `bottleneck_s` for each. With fewer micro-batches than stages, each goes down and comes back
    /// before the slowest stage ends. That holds without zero-bubble schedules and interleaving,
    /// which need at least as many micro-batches as stages.
    pub(super) fn passes_s(&self, stages: u32, m: u64, bottleneck_s: f64) -> f64 {
        let all_s = m as f64 * bottleneck_s;
        if m >= u64::from(stages) {
            return all_s;
        }
        all_s.max(self.sum_s + (m - 1) as f64 * self.backward_part * bottleneck_s)
    }

    /// The tables of all cuts, of stages that are on different nodes or not.
    pub(super) fn sums(&self, is_far: bool) -> &Sums {
        self.sums[usize::from(is_far)].get_or_init(|| Sums::new(&self.prices, is_far))
    }

    /// The balanced partition into `stages` stages; `recomputed` is an index of [`AGAIN`].
    pub(super) fn balanced(&self, stages: u32, recomputed: usize) -> Arc<Balanced> {
        let mut cuts = lock(&self.cuts);
        let new = || Arc::new(Balanced::new(&self.prices, stages, AGAIN[recomputed]));
        Arc::clone(cuts.entry((stages, recomputed)).or_insert_with(new))
    }
}

/// Locks `guarded`, also after a thread that held it has panicked: no value here is ever left half
/// written.
fn lock<T>(guarded: &Mutex<T>) -> MutexGuard<'_, T> {
    guarded.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tables that were made: those of jobs that differ in their batch alone are the same. Threads
/// share them.
#[derive(Clone, Debug, Default)]
pub struct Tables(Arc<Mutex<FxHashMap<Inside, Arc<Table>>>>);

impl Tables {
    /// How many there are.
    pub fn count(&self) -> usize {
        lock(&self.0).len()
    }

    /// That of an inside, or of one that costs the same.
    pub(super) fn of(&self, inside: Inside, estimator: &Estimator<'_>) -> Arc<Table> {
        let alike = estimator.inside_alike(inside);
        if let Some(table) = lock(&self.0).get(&alike) {
            return Arc::clone(table);
        }
        // Two threads may make the same one.
        let table = Arc::new(Table::new(estimator.prices(alike)));
        Arc::clone(lock(&self.0).entry(alike).or_insert(table))
    }
}

/// The stage partition with the least bottleneck time.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Balanced {
    /// Layers of each stage; empty for the even partition.
    pub(super) layers: Vec<u32>,
    /// Lower bound on the bottleneck time, in seconds, over all stage partitions.
    pub(super) least_s: f64,
}

impl Balanced {
    /// The least time of the slowest stage is sought by bisection; for a time each stage takes as
    /// many layers as it has time for.
    fn new(prices: &Prices, stages: u32, recomputed: Recompute) -> Balanced {
        let both = |price: &LayerPrice| price.forward.total_s() + price.backward.total_s();
        let seconds = |price: &LayerPrice| {
            both(price)
                + match recomputed {
                    Recompute::Attention => price.attention_again.total_s(),
                    Recompute::Full => price.forward_again.total_s(),
                    Recompute::None | Recompute::Auto | Recompute::Layers(_) => 0.0,
                }
        };
        let runs: Vec<(u32, f64)> =
            prices.layers.iter().map(|(count, price)| (*count, seconds(price))).collect();
        let ends = [both(&prices.first), both(&prices.last)];
        let depth: u32 = runs.iter().map(|(count, _)| count).sum();
        let all: f64 = runs.iter().map(|(count, s)| f64::from(*count) * s).sum();
        let total = all + ends[0] + ends[1];
        let (mut low, mut high) = (total / f64::from(stages), total);
        let mut best = fill(&runs, ends, stages, high);
        // Halved until a thousandth of a thousandth of it is left.
        while best.is_some() && high - low > 1e-6 * high {
            let middle = 0.5 * (low + high);
            match fill(&runs, ends, stages, middle) {
                Some(sizes) => (best, high) = (Some(sizes), middle),
                None => low = middle,
            }
        }
        let mut layers = best.unwrap_or_default();
        let (each, more) = (depth / stages, depth % stages);
        if layers.iter().zip(0..).all(|(n, at)| *n == each + u32::from(at < more)) {
            layers.clear();
        }
        Balanced { layers, least_s: low }
    }
}

/// Stages of layers of which none takes longer than `pace_s`, as many in each as there can be.
/// `runs` are equal layers and the seconds of one, `ends` what the first and the last stage have
/// beside them.
fn fill(runs: &[(u32, f64)], ends: [f64; 2], stages: u32, bottleneck_s: f64) -> Option<Vec<u32>> {
    let mut left: u32 = runs.iter().map(|(count, _)| count).sum();
    let mut runs = runs.iter().copied();
    let (mut count, mut each_s) = runs.next()?;
    let mut sizes = Vec::with_capacity(stages as usize);
    for stage in 0..stages {
        let after = stages - stage - 1;
        let mut room_s = bottleneck_s;
        room_s -= if stage == 0 { ends[0] } else { 0.0 };
        room_s -= if after == 0 { ends[1] } else { 0.0 };
        let mut size = 0;
        loop {
            if count == 0 {
                let Some(next) = runs.next() else { break };
                (count, each_s) = next;
            }
            let fits = if room_s < each_s { 0 } else { (room_s / each_s) as u32 };
            let taken = fits.min(count).min((left - size).saturating_sub(after));
            size += taken;
            count -= taken;
            room_s -= f64::from(taken) * each_s;
            if count > 0 || taken == 0 {
                break;
            }
        }
        if size == 0 {
            return None;
        }
        left -= size;
        sizes.push(size);
    }
    (left == 0).then_some(sizes)
}
