use super::*;
use crate::estimate::Job;
use crate::estimate::price::Pass;
use crate::estimate::profile;
use crate::estimate::rates::Arithmetic;
use crate::estimate::tests::{gpt3, machine};
use crate::search::oracle::{Random, seeds};

/// A layer of random passes; what it recomputes is its forward pass.
fn layer(random: &mut Random) -> LayerPrice {
    let pass = |products_s: f64| Pass { products_s, ..Pass::default() };
    // Of some kinds the forward pass takes longer than all passes of others.
    let forward_s = random.between(0.01, 0.1) * [1.0, 10.0][random.below(2)];
    let backward_s = forward_s * random.between(1.0, 2.5);
    LayerPrice {
        forward: pass(forward_s),
        backward: pass(backward_s),
        weight_s: backward_s * 0.4,
        forward_again: pass(forward_s),
        attention_again: pass(forward_s * 0.1),
        saved_bytes: 1e6,
        input_bytes: 1e5,
        ..LayerPrice::default()
    }
}

/// All cuts of so many layers into stages.
fn all_cuts(depth: u32, stages: u32) -> Vec<Vec<u32>> {
    if stages == 1 {
        return vec![vec![depth]];
    }
    let mut all = Vec::new();
    for first in 1..=depth + 1 - stages {
        let rest = all_cuts(depth - first, stages - 1).into_iter();
        all.extend(rest.map(|rest| [&[first], &rest[..]].concat()));
    }
    all
}

/// Layers of up to three kinds, and a pipeline of them.
fn drawn(random: &mut Random) -> (Prices, Configuration, u64) {
    let kinds = 1 + random.below(3);
    let layers: Vec<(u32, LayerPrice)> =
        (0..kinds).map(|_| (1 + random.below(4) as u32, layer(random))).collect();
    let depth: u32 = layers.iter().map(|(count, _)| count).sum();
    let (first, last) = (layer(random), layer(random));
    let prices = Prices {
        layers,
        first,
        last,
        boundary_bytes: 1e6,
        tied_parameters: 0.0,
        tied_moments: 0.0,
        tied_frozen_bytes: 0.0,
    };
    let (pp, schedule) = (2 + random.below(3) as u32, Schedule::ALL[random.below(4)]);
    let recomputed = Recompute::Layers(1 + random.below(depth as usize) as u32);
    let recompute = if random.below(5) == 0 { Recompute::Full } else { recomputed };
    let c = Configuration { pp, schedule, recompute, ..Configuration::default() };
    (prices, c, u64::from(2 * pp) + random.below(9) as u64)
}

fn has_room(room: &Room, cut: &[u32]) -> bool {
    let is_in = |at: u32, [low, high]: [u32; 2]| (low..=high).contains(&at);
    let between = &cut[1..cut.len() - 1];
    is_in(cut[0], room.first)
        && is_in(cut[cut.len() - 1], room.last)
        && between.iter().all(|layers| *layers <= room.most_between)
}

/// Where layers differ, and some of each stage are recomputed: no cut is faster than the bound,
/// no cut that is fast enough has other numbers of layers than there is room for, and the best one
/// is found.
#[test]
fn no_cut_of_unlike_layers_is_below_the_bound() {
    let (work, cluster) = (gpt3(), crate::cluster::Cluster::load_on("h100", &machine()).unwrap());
    let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
    let estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
    let seeds = seeds(0, 160);
    let is_all = seeds.len() > 1;
    let (mut shrinking, mut counted) = (0, 0);
    for seed in seeds {
        let (prices, c, count) = drawn(&mut Random(seed));
        let depth: u32 = prices.layers.iter().map(|(count, _)| count).sum();
        if c.pp > depth {
            continue;
        }
        let sums = Sums::new(&prices, estimator.sends_far(&c));
        let cuts = estimator.cuts(&c, (&prices, &sums), count, Rc::default());
        let of = |layers: &Vec<u32>| Configuration { stage_layers: layers.clone(), ..c.clone() };
        // Where more layers are recomputed than an even stage has, some stage is deeper.
        let is_own = |cut: &Vec<u32>| cut.iter().any(|layers| *layers > cuts.deeper_than());
        let all: Vec<_> = all_cuts(depth, c.pp).into_iter().filter(is_own).collect();
        if all.is_empty() {
            continue;
        }
        let about = format!("SEED={seed}: {c} of {count}, {:?}", prices.layers);
        let (least, _) = cuts.least();
        let passes: Vec<f64> =
            all.iter().map(|cut| estimator.passes(&of(cut), &prices, count).total_s()).collect();
        let fastest_s = passes.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(least.passes_s <= fastest_s * (1.0 + 1e-9), "{least:?}, {fastest_s}: {about}");
        for factor in [1.0 + 1e-9, 1.1, 1.5] {
            let most = [fastest_s * factor, f64::INFINITY];
            let room = cuts.room(&least, most).expect("there is room for the best");
            for (cut, _) in all.iter().zip(&passes).filter(|(_, s)| **s <= fastest_s * factor) {
                assert!(has_room(&room, cut), "{cut:?} {room:?}: {about}");
                counted += 1;
            }
        }
        let total = |cut: &Vec<u32>| estimator.step(&of(cut), &prices, count).breakdown.total_s();
        let best_s = all.iter().map(total).fold(f64::INFINITY, f64::min);
        let wanted = Wanted {
            bytes_max: f64::INFINITY,
            objective_value: &|step| step.breakdown.total_s(),
            seconds: &|seconds| seconds,
            below: best_s * 1.01,
            work_max: u32::MAX,
        };
        let found = cuts.best(&least, 0.0, &wanted);
        let (_, step) = found.best.unwrap_or_else(|| panic!("nothing is found: {about}"));
        let found_s = step.breakdown.total_s();
        assert!((found_s / best_s - 1.0).abs() < 1e-9, "{found_s}, {best_s}: {about}");
        // Stages that take less time for having more layers.
        let paths = cuts.paths();
        shrinking += (1..depth)
            .filter(|from| {
                let path_s = |from| cuts.path_s(1, &paths[1], from, depth);
                path_s(from - 1) < path_s(*from)
            })
            .count();
    }
    assert!(!is_all || (shrinking > 20 && counted > 500), "{shrinking} shrinking, {counted} cuts");
}
