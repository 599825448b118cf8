//! The search against trying everything, on random spaces.
//!
//! A random space has seven knobs of random tables: stages, tensor-parallel ranks, micro-batch,
//! schedule, ZeRO stage, offload and placement; and below them every uneven cut of up to five
//! layers of two classes with every choice of what each layer keeps.

mod stages;

use ir::random::mix;

use self::stages::{Class, Extra, Pipeline, Way};
use super::branch_and_bound::{
    Aim, Budget, Counter, Explored, Objective, Path, Score, Tree, explore,
};

/// Random numbers from a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Seeds of random tests: the one in `SEED`, or else `count` seeds from `from` on.
pub(crate) fn seeds(from: u64, count: u64) -> Vec<u64> {
    let asked = std::env::var("SEED").ok().and_then(|text| text.parse().ok());
    asked.map_or_else(|| (from..from + count).collect(), |seed| vec![seed])
}

const KNOBS: usize = 7;
const MBS: [u32; 3] = [1, 2, 4];

/// A space of random tables. Times and bytes fall where they really do: with more ranks and with
/// more shards; otherwise they are anything.
#[derive(Clone)]
struct Space {
    devices: u32,
    batch: u32,
    runs: Vec<(usize, usize)>,
    bytes_max: f64,
    /// Seconds and bytes of a layer by class, way, tp and mbs.
    layers: Vec<Vec<Vec<Vec<Way>>>>,
    head_s: f64,
    weights: Vec<f64>,
    /// By ZeRO stage: part of the weights' bytes, seconds after the last micro-batch.
    zero: Vec<(f64, f64)>,
    /// By offload: part of the kept bytes, slowdown.
    offload: Vec<(f64, f64)>,
    /// By placement: seconds of a boundary between stages.
    order_s: Vec<f64>,
    /// By schedule: how much of the fill and drain is idle, micro-batches in flight per stage.
    schedules: Vec<(f64, f64)>,
}

fn divisors(n: u32) -> impl Iterator<Item = u32> {
    (1..=n).filter(move |d| n.is_multiple_of(*d))
}

impl Space {
    fn random(random: &mut Random) -> Space {
        let devices = [4, 6, 8, 12][random.below(4)];
        let (first, second) = (1 + random.below(3), 1 + random.below(2));
        let classes = 2;
        let ways = 2;
        let mut layers = vec![vec![vec![vec![]; 4]; ways]; classes];
        for class in &mut layers {
            let seconds = random.between(0.5, 2.0);
            let bytes = random.between(0.5, 2.0);
            for (way, by_tp) in class.iter_mut().enumerate() {
                let slower = if way == 0 { 1.0 } else { random.between(1.1, 1.5) };
                let less = if way == 0 { 1.0 } else { random.between(0.1, 0.6) };
                for (tp, by_mbs) in by_tp.iter_mut().enumerate() {
                    for mbs in MBS {
                        let ideal = f64::from(mbs) / (tp + 1) as f64;
                        by_mbs.push(Way {
                            seconds: seconds * slower * ideal * random.between(1.0, 1.4),
                            kept_bytes: bytes * less * ideal * random.between(1.0, 1.2),
                        });
                    }
                }
            }
        }
        Space {
            devices,
            batch: devices * [2, 4, 8][random.below(3)],
            runs: vec![(0, first), (1, second), (0, random.below(2))],
            bytes_max: random.between(4.0, 24.0),
            layers,
            head_s: random.between(0.0, 0.8),
            weights: (0..classes).map(|_| random.between(0.5, 4.0)).collect(),
            zero: (0..3).map(|z| (1.0 / (1 + z) as f64, random.between(0.1, 1.0))).collect(),
            offload: vec![(1.0, 1.0), (random.between(0.2, 0.8), random.between(1.0, 1.3))],
            order_s: (0..2).map(|_| random.between(0.0, 0.1)).collect(),
            schedules: vec![(1.0, 1.0), (random.between(0.2, 0.6), random.between(1.0, 2.0))],
        }
    }

    /// The pipeline of the decided knobs, with the least of each table where one is open.
    fn pipeline(&self, path: &Path) -> Pipeline {
        let v = path.values();
        let (pp, tp, mbs) = (v[0], v[1], v[2]);
        let dp = self.devices / pp / tp;
        let m = f64::from(self.batch / dp / MBS[mbs as usize]);
        let of = |at: usize, all: &[(f64, f64)]| match v.get(at) {
            Some(value) => all[*value as usize],
            None => all.iter().fold((f64::INFINITY, f64::INFINITY), |least, one| {
                (least.0.min(one.0), least.1.min(one.1))
            }),
        };
        let (idle, flying) = of(3, &self.schedules);
        let (part, tail) = of(4, &self.zero);
        let (kept, slow) = of(5, &self.offload);
        let orders = self.order_s.iter().map(|s| (*s, 0.0)).collect::<Vec<_>>();
        let (boundary_s, _) = of(6, &orders);
        let class = |c: usize| Class {
            ways: (0..2)
                .map(|way| {
                    let table = self.layers[c][way][tp as usize - 1][mbs as usize];
                    Way { seconds: table.seconds * slow, kept_bytes: table.kept_bytes * kept }
                })
                .collect(),
            static_bytes: self.weights[c] * part / f64::from(tp),
            tail_s: self.weights[c] * tail / f64::from(tp),
        };
        let extra = |s: u32| Extra {
            seconds: if s + 1 == pp { self.head_s } else { boundary_s },
            bytes: if s == 0 { 0.3 } else { 0.0 },
            ..Extra::default()
        };
        Pipeline {
            classes: (0..2).map(class).collect(),
            runs: self.runs.clone(),
            extras: (0..pp).map(extra).collect(),
            in_flight: (0..pp).map(|s| flying * f64::from(pp - s).min(m)).collect(),
            steady: m - idle,
            ramp: idle,
            bytes_max: self.bytes_max,
        }
    }

    /// The least step of a leaf over all cuts and all choices for each layer, tried one by one.
    fn exhaustive(&self, path: &Path) -> f64 {
        let p = self.pipeline(path);
        let classes: Vec<usize> =
            p.runs.iter().flat_map(|(class, n)| std::iter::repeat_n(*class, *n)).collect();
        let (layers, stages) = (classes.len(), p.extras.len());
        let mut best = f64::INFINITY;
        for cuts in 0..1u32 << (layers - 1) {
            if cuts.count_ones() as usize + 1 != stages {
                continue;
            }
            for ways in 0..1u32 << layers {
                best = best.min(self.one(&p, &classes, cuts, ways));
            }
        }
        best
    }

    /// The step of one cut and one choice for each layer; infinite where it does not fit.
    fn one(&self, p: &Pipeline, classes: &[usize], cuts: u32, ways: u32) -> f64 {
        let (mut slowest, mut sum, mut tail) = (0.0f64, 0.0, 0.0f64);
        let (mut at, mut s) = (0, 0);
        while at < classes.len() {
            let mut seconds = p.extras[s].seconds;
            let (mut fixed, mut kept, mut after) = (p.extras[s].bytes, 0.0, 0.0);
            loop {
                let class = &p.classes[classes[at]];
                let way = class.ways[(ways >> at & 1) as usize];
                seconds += way.seconds;
                kept += way.kept_bytes;
                fixed += class.static_bytes;
                after += class.tail_s;
                at += 1;
                if at == classes.len() || cuts >> (at - 1) & 1 == 1 {
                    break;
                }
            }
            if fixed + kept * p.in_flight[s] > p.bytes_max {
                return f64::INFINITY;
            }
            (slowest, sum, tail) = (slowest.max(seconds), sum + seconds, tail.max(after));
            s += 1;
        }
        p.steady * slowest + p.ramp * sum + tail
    }

    fn leaves(&self) -> Vec<Path> {
        let mut paths = vec![Path::default()];
        for _ in 0..KNOBS {
            let options = |path: &Path| {
                let mut options = Vec::new();
                self.options(path, &mut options);
                options
            };
            let grow = |path: &Path| options(path).into_iter().map(|v| path.then(v)).collect();
            paths = paths.iter().flat_map(|path| -> Vec<Path> { grow(path) }).collect();
        }
        paths
    }
}

impl Tree for Space {
    type Kept = ();

    fn take_kept(&self, _: &Path) {}

    fn keep(&self, (): ()) {}

    fn kind_depth(&self) -> usize {
        2
    }

    fn depth(&self) -> usize {
        KNOBS
    }

    fn options(&self, path: &Path, options: &mut Vec<u32>) {
        let layers = self.runs.iter().map(|(_, n)| *n as u32).sum::<u32>();
        options.clear();
        match *path.values() {
            [] => options.extend(divisors(self.devices).filter(|pp| *pp <= layers)),
            [pp] => options.extend(divisors(self.devices / pp).filter(|tp| *tp <= 4)),
            [pp, tp] => {
                let each = self.batch / (self.devices / pp / tp);
                options.extend((0..3).filter(|i| each.is_multiple_of(MBS[*i as usize])));
            }
            [_, _, _] => options.extend(0..self.schedules.len() as u32),
            [_, _, _, _] => options.extend(0..self.zero.len() as u32),
            _ => options.extend(0..2),
        }
    }

    fn looks_ahead(&self) -> u32 {
        2
    }

    fn keep_ahead(&self, path: &Path, time: u32, options: &mut Vec<u32>) {
        let at = path.values().len() as u32;
        options.retain(|value| (value + at).is_multiple_of(1 + time));
    }

    fn shape(&self, path: &Path) -> u64 {
        match *path.values() {
            [] => 0,
            [pp] => u64::from(pp),
            [pp, tp] => u64::from(pp * tp),
            _ => 0,
        }
    }

    fn bound(&self, path: &Path, _: f64) -> Score {
        if path.values().len() >= 3 {
            return Score { seconds: self.pipeline(path).bound(), bytes: 0.0 };
        }
        let mut options = Vec::new();
        self.options(path, &mut options);
        let bounds = options.iter().map(|v| self.bound(&path.then(*v), f64::INFINITY).seconds);
        Score { seconds: bounds.fold(f64::INFINITY, f64::min), bytes: 0.0 }
    }

    fn score(&self, path: &Path, _: f64, seconds: f64) -> Score {
        match self.pipeline(path).cut(seconds) {
            Some(cut) => Score { seconds: cut.seconds, bytes: cut.bytes },
            None => Score::NEVER,
        }
    }
}

fn explored(space: &Space, evaluations_max: u64) -> Explored {
    let budget = Budget { evaluations_max, stop: &|| false };
    explore(space, &|| space.clone(), Aim::new(Objective::Time, space.bytes_max), &budget)
}

#[test]
fn the_search_finds_what_trying_everything_finds() {
    let seeds = seeds(1, 240);
    let mut gaps = Vec::new();
    for seed in &seeds {
        let space = Space::random(&mut Random(*seed));
        let leaves = space.leaves();
        let best = leaves.iter().map(|leaf| space.exhaustive(leaf)).fold(f64::INFINITY, f64::min);
        let found = explored(&space, u64::MAX);
        assert_eq!(found.total, leaves.len() as u128, "SEED={seed}");
        let accounted = u128::from(found.evaluated) + found.bounded_out + found.too_large;
        assert_eq!(accounted, found.total, "SEED={seed}");
        let seconds = found.best.map_or(f64::INFINITY, |leaf| leaf.score.seconds);
        if best.is_infinite() {
            assert!(seconds.is_infinite(), "SEED={seed}: {seconds} of nothing");
            continue;
        }
        assert!((seconds / best - 1.0).abs() < 1e-9, "SEED={seed}: {seconds}, not {best}");
        let bound = space.bound(&Path::default(), f64::INFINITY).seconds;
        assert!(bound <= best * (1.0 + 1e-9), "SEED={seed}: bound {bound} above {best}");
        gaps.push(best / bound - 1.0);
        // Cut off early, it says how far it may be off, and never too little.
        let few = found.spent / 2 + 1;
        let early = explored(&space, few);
        assert!(early.complete || early.spent >= few, "SEED={seed}: {early:?} of {few}");
        assert!(early.bound_s <= best * (1.0 + 1e-9), "SEED={seed}: {} {best}", early.bound_s);
    }
    gaps.sort_by(f64::total_cmp);
    let least = seeds.len().min(200);
    assert!(gaps.len() >= least, "only {} spaces have a plan that fits", gaps.len());
    let median = gaps[gaps.len() / 2];
    assert!(median <= 0.10, "median gap {median}");
}

#[test]
fn no_bound_is_above_what_lies_below_it() {
    for seed in &seeds(1001, 40) {
        let space = Space::random(&mut Random(*seed));
        for leaf in space.leaves() {
            let best = space.exhaustive(&leaf);
            let mut path = Path::default();
            for value in leaf.values() {
                path = path.then(*value);
                let bound = space.bound(&path, f64::INFINITY).seconds;
                assert!(bound <= best * (1.0 + 1e-9), "SEED={seed}: {path:?} {bound} {best}");
            }
        }
    }
}

#[test]
fn counting_visits_one_subtree_of_each_shape() {
    for seed in &seeds(3001, 20) {
        let space = Space::random(&mut Random(*seed));
        let count = Counter::default().count(&space, &Path::default());
        assert_eq!(count, space.leaves().len() as u128, "SEED={seed}");
    }
}

/// A pipeline of random layers that is too deep to try everything, with its cuts tried.
fn random_pipeline(random: &mut Random) -> Pipeline {
    let way = |random: &mut Random, slower: f64, less: f64| Way {
        seconds: random.between(1.0, 1.3) * slower,
        kept_bytes: random.between(1.0, 1.3) * less,
    };
    let class = |random: &mut Random| Class {
        ways: vec![way(random, 1.0, 1.0), way(random, 1.05, 0.5), way(random, 1.3, 0.05)],
        static_bytes: random.between(0.5, 1.0),
        tail_s: random.between(0.0, 0.3),
    };
    let stages = 2 + random.below(3);
    Pipeline {
        classes: vec![class(random), class(random)],
        runs: vec![(0, 1 + random.below(3)), (1, 4 + random.below(6)), (0, random.below(2))],
        extras: (0..stages)
            .map(|s| Extra {
                seconds: if s + 1 == stages { random.between(0.0, 2.0) } else { 0.05 },
                bytes: random.between(0.0, 1.0),
                kept_bytes: random.between(0.0, 0.1),
                tail_s: random.between(0.0, 1.0),
            })
            .collect(),
        in_flight: (0..stages).map(|s| (stages - s) as f64).collect(),
        steady: random.between(1.0, 20.0),
        ramp: random.between(0.0, 1.0),
        bytes_max: random.between(8.0, 30.0),
    }
}

#[test]
fn cuts_are_the_best_of_all_cuts() {
    let (mut fitted, mut better) = (0, 0);
    let seeds = seeds(4001, 200);
    for seed in &seeds {
        let pipeline = random_pipeline(&mut Random(*seed));
        let (layers, stages) = (pipeline.layers(), pipeline.stage_count());
        let mut best = f64::INFINITY;
        for cuts in 0..1u32 << (layers - 1) {
            if cuts.count_ones() as usize + 1 == stages {
                let mut sizes = vec![1];
                for layer in 1..layers {
                    match cuts >> (layer - 1) & 1 {
                        1 => sizes.push(1),
                        _ => *sizes.last_mut().unwrap() += 1,
                    }
                }
                best = best.min(pipeline.at(&sizes).map_or(f64::INFINITY, |cut| cut.seconds));
            }
        }
        let found = pipeline.cut(f64::INFINITY);
        let seconds = found.as_ref().map_or(f64::INFINITY, |cut| cut.seconds);
        assert!(seconds == best || (seconds / best - 1.0).abs() < 1e-9, "SEED={seed}");
        let Some(cut) = found else { continue };
        fitted += 1;
        assert!(cut.bytes <= pipeline.bytes_max, "SEED={seed}");
        assert!(pipeline.bound() <= best * (1.0 + 1e-9), "SEED={seed}");
        let even = pipeline.even().map_or(f64::INFINITY, |even| even.seconds);
        assert!(best <= even * (1.0 + 1e-9), "SEED={seed}");
        better += usize::from(best < 0.99 * even);
        // Told a step that is just above, it finds the same; just below, nothing.
        assert_eq!(pipeline.cut(best * 1.001), Some(cut), "SEED={seed}");
        assert_eq!(pipeline.cut(best * 0.999), None, "SEED={seed}");
    }
    let enough = fitted > 100 && better > 30;
    assert!(enough || seeds.len() == 1, "{fitted} fit, {better} are better uneven");
}
