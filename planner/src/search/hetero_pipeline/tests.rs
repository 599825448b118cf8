//! Pipelines over groups against steps of one kind of devices, and against trying everything.

use std::collections::BTreeSet;

use super::*;
use crate::cluster::Cluster;
use crate::configuration::Place;
use crate::estimate::rates::Arithmetic;
use crate::estimate::workload::Workload;
use crate::estimate::{Job, profile};
use crate::limits::Limits;
use crate::search::groups::tests::{asked, cluster};
use crate::search::groups::{self, Grouped};
use crate::search::models;
use crate::search::oracle::{Random, seeds};

fn workload(model: &str, layers: u32, seq: u32) -> Workload {
    let mut shape = models::shape(model).unwrap();
    (shape.layers, shape.seq) = (layers, seq);
    shape.workload().unwrap()
}

/// Random uneven pipelines on devices of one kind: told as one section, or as two where stages are
/// on different nodes anyway, they cost what the step of devices that are alike costs.
#[test]
fn lines_on_one_kind_of_devices_are_its_steps() {
    let seeds = seeds(0, 60);
    let is_all = seeds.len() > 1;
    let (mut cut_in_two, mut intervals, mut within) = (0, 0, 0);
    for seed in seeds {
        let mut random = Random(seed);
        let mut below = |n: usize| random.below(n);
        let work = workload(["gpt-7.5b", "deepseek-v2"][below(2)], 8 + below(9) as u32, 2048);
        let cluster = Cluster::load(["h100", "a100"][below(2)]).unwrap();
        let (tp, dp, pp) = ([1, 2, 8][below(3)], [1, 4][below(2)], 2 + below(5) as u32);
        let mut layers = vec![1; pp as usize];
        for _ in pp..work.depth() {
            layers[below(pp as usize)] += 1;
        }
        let c = Configuration {
            tp,
            dp,
            pp,
            sequence_parallel: tp > 1,
            zero: Zero { stage: below(2) as u8, shard: 0 },
            recompute: AGAIN[below(3)].1,
            stage_layers: layers.clone(),
            ..Configuration::default()
        };
        let count = 1 + below(12) as u64;
        let job = Job { global_batch: count * u64::from(dp), arithmetic: Arithmetic::Half };
        let estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
        let prices = estimator.prices(estimator.inside(&c));
        let section =
            Section { estimator: &estimator, configuration: &c, prices: &prices, link: None };
        let whole = estimator.step(&c, &prices, count);
        let at = 1 + below(pp as usize - 1);
        let mut lines = vec![vec![(section, &layers[..])]];
        if tp * dp >= 8 {
            lines.push(vec![(section, &layers[..at]), (section, &layers[at..])]);
            cut_in_two += 1;
        }
        for line in lines {
            let found = line::step(&line, count);
            let pairs = found.breakdown.parts().into_iter().zip(whole.breakdown.parts());
            for ((name, ours), (_, theirs)) in pairs {
                let off = (ours - theirs).abs();
                assert!(off <= 1e-9 * theirs, "SEED={seed}: {c}: {name} {ours}, not {theirs}");
            }
            let bytes = found.stages.iter().map(|stage| stage.memory.total_bytes());
            let fullest = bytes.fold(0.0, f64::max);
            assert_eq!(fullest, whole.memory.total_bytes(), "SEED={seed}: {c}");
            // Beside the passes of its stages a device computes the update.
            let busy_s: f64 = found.stages.iter().map(|stage| stage.busy_s).sum();
            let busy_s = busy_s * count as f64 / f64::from(pp) + whole.breakdown.optimizer_s;
            assert!((busy_s / whole.busy_s - 1.0).abs() < 1e-9, "SEED={seed}: {c}: {busy_s} s");
            if let Ok(told) = estimator.estimate(&c) {
                let bounds_s = [told.step_time_low_s, told.step_time_high_s];
                let off = |at: usize| (found.interval_s[at] / bounds_s[at] - 1.0).abs();
                assert!(off(0) < 1e-9 && off(1) < 1e-9, "SEED={seed}: {c}: {found:?}");
                intervals += 1;
            }
        }
        // Between sections messages leave the node.
        if tp * dp * pp <= 8 {
            let apart = line::step(&[(section, &layers[..at]), (section, &layers[at..])], count);
            let [near_s, far_s] = [whole.breakdown, apart.breakdown].map(|parts| parts.send_s);
            assert!(far_s > near_s, "SEED={seed}: {c}: {far_s} s, and {near_s} s within a node");
            within += 1;
        }
    }
    let enough = cut_in_two > 5 && intervals > 20 && within > 2;
    assert!(enough || !is_all, "{cut_in_two}, {intervals}, {within}");
}

/// Every pipeline over two groups, in both orders, with every cut: its least step.
fn tried(asked: &GroupRequest<'_>) -> f64 {
    let mut best = f64::INFINITY;
    let depth = asked.work.depth();
    let allow = |decision, number: u32| asked.limits.allow(decision, number as usize);
    let all: Vec<Estimator<'_>> = (0..2).map(|group| asked.estimator(group).unwrap()).collect();
    let heads = SearchDomain::new(asked.work, 8, asked.batch(), Limits::default()).heads;
    for (front, back) in [(0, 1), (1, 0)] {
        for code in 0..1u32 << 14 {
            let power = |from: u32, bits: u32| 1 << (code >> from & ((1 << bits) - 1));
            let (dp, mbs, tps) = (power(0, 2), power(2, 2), [power(4, 2), power(6, 2)]);
            let sps = [code >> 8 & 1, code >> 9 & 1];
            let (zero, cp) = (code >> 10 & 3, power(12, 2));
            let shape = [front, back].into_iter().zip(tps).zip(sps);
            let stages = shape.clone().map(|((group, tp), _)| {
                let ranks = asked.devices(group);
                if ranks.is_multiple_of(dp * cp * tp) { ranks / (dp * cp * tp) } else { 0 }
            });
            let stages: Vec<u32> = stages.collect();
            let pp = stages[0] + stages[1];
            let wrong = stages.contains(&0)
                || pp > depth
                || !asked.batch().is_multiple_of(dp * mbs)
                || tps.iter().any(|tp| !heads.is_multiple_of(*tp) || !allow(Decision::Tp, *tp))
                || tps.iter().zip(sps).any(|(tp, sp)| *tp == 1 && sp == 1)
                || sps.iter().any(|sp| !allow(Decision::Sp, *sp))
                || (dp * cp == 1 && zero > 0)
                || !allow(Decision::Cp, cp)
                || !allow(Decision::Mbs, mbs)
                || !allow(Decision::Dp, dp);
            if wrong {
                continue;
            }
            for (_, recompute) in AGAIN {
                let configurations: Vec<(usize, Configuration)> = shape
                    .clone()
                    .map(|((group, tp), sp)| {
                        let c = Configuration {
                            tp,
                            cp,
                            dp,
                            pp,
                            microbatch: mbs,
                            sequence_parallel: sp == 1,
                            zero: Zero { stage: zero as u8, shard: 0 },
                            recompute,
                            ..Configuration::default()
                        };
                        (group, c)
                    })
                    .collect();
                best = best.min(best_cut(asked, &all, &configurations, &stages, dp * mbs));
            }
        }
    }
    best
}

/// The least step of all cuts that fit; a cut is a set of the places between layers.
fn best_cut(
    asked: &GroupRequest<'_>,
    all: &[Estimator<'_>],
    configurations: &[(usize, Configuration)],
    stages: &[u32],
    at_once: u32,
) -> f64 {
    let (depth, pp) = (asked.work.depth(), stages[0] + stages[1]);
    let count = u64::from(asked.batch() / at_once);
    let insides = configurations
        .iter()
        .zip(stages)
        .map(|((group, c), pp)| all[*group].inside(&Configuration { pp: *pp, ..c.clone() }));
    let pairs = configurations.iter().zip(insides);
    let prices: Vec<Prices> =
        pairs.map(|((group, _), inside)| all[*group].prices(inside)).collect();
    let mut best = f64::INFINITY;
    for cut in (0..1u32 << (depth - 1)).filter(|cut| cut.count_ones() + 1 == pp) {
        let mut layers = vec![1];
        for layer in 1..depth {
            match cut >> (layer - 1) & 1 {
                1 => layers.push(1),
                _ => *layers.last_mut().unwrap() += 1,
            }
        }
        let (front, back) = layers.split_at(stages[0] as usize);
        let section = |at: usize| Section {
            estimator: &all[configurations[at].0],
            configuration: &configurations[at].1,
            prices: &prices[at],
            link: None,
        };
        let found = line::step(&[(section(0), front), (section(1), back)], count);
        let fits = found.stages.iter().enumerate().all(|(stage, cost)| {
            let group = configurations[usize::from(stage >= stages[0] as usize)].0;
            cost.memory.total_bytes() <= all[group].memory_bytes
        });
        if fits {
            best = best.min(found.breakdown.total_s());
        }
    }
    best
}

/// On small jobs the pipeline is the best of all, whether all cuts are tried or not; and it is one:
/// every layer on one stage, every rank used once, all within memory.
#[test]
fn stages_over_groups_are_the_best_of_all() {
    let cases = [
        ("gpt-7.5b", 6, 8, &[("h100", 1), ("v100", 1)][..], &["cp=1"][..]),
        ("llama-3-8b", 7, 4, &[("a100", 1), ("h100", 1)], &["cp=1"]),
        ("llama-3-8b", 6, 2, &[("a100", 1), ("h100", 1)], &["sp=0"]),
        ("llama-3-8b", 15, 16, &[("v100", 1), ("h100", 1)], &["tp=2", "mbs=1", "dp=1", "cp=1"]),
    ];
    for (model, layers, batch, groups, fix) in cases {
        let work = workload(model, layers, 2048);
        let cluster = cluster(groups);
        let asked = asked(&work, &cluster, batch, fix);
        let found = across(&asked, f64::INFINITY).unwrap().unwrap();
        let best = tried(&asked);
        let about = format!("{model} of {layers}: {found:#?}");
        assert!((found.step_time_s / best - 1.0).abs() < 1e-9, "{best}: {about}");
        let cuts = if layers < 10 { StagePartitions::All } else { StagePartitions::Moves };
        assert_eq!((found.cuts, found.complete), (cuts, true), "{about}");
        // What is found costs the same where it is given.
        let layout = |part: &Part| (part.group, part.configuration.clone());
        let layouts: Vec<_> = found.parts.iter().map(layout).collect();
        let given = groups::score_line(&asked, &layouts).unwrap();
        assert_eq!(given.parts, found.parts, "{about}");
        assert_eq!((given.step_time_s, given.breakdown), (found.step_time_s, found.breakdown));
        let mut first_layer = 0;
        let mut ranks = Vec::new();
        for part in &found.parts {
            let c = &part.configuration;
            assert_eq!(part.first_layer, first_layer, "{about}");
            first_layer += c.stage_layers.iter().sum::<u32>();
            assert_eq!((c.ranks(), c.stage_layers.len()), (8, c.pp as usize), "{about}");
            assert!(part.peak_bytes <= part.have_bytes, "{about}");
            ranks.extend(part.first_rank..part.first_rank + part.ranks);
        }
        ranks.sort_unstable();
        assert_eq!((first_layer, ranks), (layers, (0..16).collect::<Vec<u32>>()), "{about}");
    }
}

/// What a line is told to cost is what its sections cost, part by part.
fn check_told(asked: &GroupRequest<'_>, found: &HeteroPipeline) {
    let pp: u32 = found.parts.iter().map(|part| part.configuration.pp).sum();
    // The cut says which layers stages have; the configuration does not.
    let whole =
        |part: &Part| Configuration { pp, stage_layers: Vec::new(), ..part.configuration.clone() };
    let configurations: Vec<Configuration> = found.parts.iter().map(whole).collect();
    let estimators = found.parts.iter().map(|part| asked.estimator(part.group).unwrap());
    let estimators: Vec<Estimator<'_>> = estimators.collect();
    let parts = estimators.iter().zip(&found.parts);
    let prices: Vec<Prices> =
        parts.map(|(all, part)| all.prices(all.inside(&part.configuration))).collect();
    let sections: Vec<(Section<'_>, &[u32])> = (0..found.parts.len())
        .map(|at| {
            let (estimator, prices) = (&estimators[at], &prices[at]);
            let section =
                Section { estimator, configuration: &configurations[at], prices, link: None };
            (section, &found.parts[at].configuration.stage_layers[..])
        })
        .collect();
    let step = line::step(&sections, found.microbatch_count);
    assert!((step.breakdown.total_s() / found.step_time_s - 1.0).abs() < 1e-9, "{found:?}");
    let mut stages = step.stages.iter();
    for (part, c) in found.parts.iter().zip(&configurations) {
        let own: Vec<_> = stages.by_ref().take(part.configuration.pp as usize).collect();
        let peak = own.iter().map(|stage| stage.memory.total_bytes()).fold(0.0, f64::max);
        assert_eq!(part.peak_bytes, peak, "{found:?}");
        let busy_s = own.iter().map(|stage| stage.busy_s).sum::<f64>() / own.len() as f64;
        let busy_s = busy_s * found.microbatch_count as f64;
        assert!((part.busy_s / busy_s - 1.0).abs() < 1e-9 && busy_s < found.step_time_s);
        assert!(asked.limits.allow_all(c), "{} and {c}", asked.limits);
    }
}

/// Lines keep to what is fixed, and there is none where it is what lines do not have.
#[test]
fn lines_keep_to_limits() {
    let work = workload("gpt-7.5b", 6, 2048);
    let routed = workload("mixtral-8x7b", 4, 2048);
    let cluster = cluster(&[("h100", 1), ("a100", 1)]);
    for fix in [
        "mbs=2",
        "pp=4",
        "dp=2",
        "tp=4",
        "recompute=full",
        "recompute=none",
        "keep=none",
        "zero=0",
        "zero=3",
    ] {
        let asked = asked(&work, &cluster, 8, &[fix]);
        let found = across(&asked, f64::INFINITY).unwrap();
        check_told(&asked, &found.unwrap_or_else(|| panic!("there is a line of {fix}")));
    }
    let experts = asked(&routed, &cluster, 16, &["ep=8", "cp=1"]);
    check_told(&experts, &across(&experts, f64::INFINITY).unwrap().unwrap());
    for fix in ["vpp=2", "offload=on", "schedule=gpipe", "shard=2", "order=dp.tp.cp.pp"] {
        let asked = asked(&work, &cluster, 8, &[fix]);
        assert_eq!(across(&asked, f64::INFINITY).unwrap(), None, "{fix}");
    }
}

/// With a little less memory than the fastest line holds, another one is the best that fits.
#[test]
fn lines_keep_to_memory() {
    let cluster = cluster(&[("h100", 1), ("a100", 1)]);
    for (layers, batch, fix) in
        [(6, 8, &["cp=1", "sp=0"][..]), (15, 16, &["tp=2", "mbs=1", "dp=1", "cp=1"])]
    {
        let work = workload("gpt-7.5b", layers, 2048);
        let free = asked(&work, &cluster, batch, fix);
        let fastest = across(&free, f64::INFINITY).unwrap().unwrap();
        let fullest = fastest.parts.iter().map(|part| part.peak_bytes).fold(0.0, f64::max);
        let bytes = 0.9 * fullest;
        let fix: Vec<String> = fix.iter().map(|text| (*text).to_owned()).collect();
        let limits = Limits::parse(&fix, &[], &[format!("memory={}B", bytes as u64)]).unwrap();
        let tight = GroupRequest { limits, ..free.clone() };
        let found = across(&tight, f64::INFINITY).unwrap().unwrap();
        assert!(found.parts.iter().all(|part| part.peak_bytes <= bytes), "{found:?}");
        assert!(found.step_time_s > fastest.step_time_s, "{found:?}");
        let best = tried(&tight);
        assert!((found.step_time_s / best - 1.0).abs() < 1e-9, "{best}: {found:?}");
    }
}

/// Layouts that make no pipeline together are refused, each for its reason.
#[test]
fn layouts_that_make_no_pipeline_are_refused() {
    let (work, cluster, batch, found) = small_line();
    let asked = asked(&work, &cluster, batch.into(), &[]);
    let layout = |part: &Part| (part.group, part.configuration.clone());
    let layouts: Vec<_> = found.parts.iter().map(layout).collect();
    type Change = fn(&mut Configuration);
    let changes: [(&str, Change); 7] = [
        ("other copies", |c| c.zero.stage = 3 - c.zero.stage),
        ("other copies", |c| c.microbatch *= 2),
        ("stages", |c| c.pp += 1),
        ("is not", |c| c.vpp = 2),
        ("is not", |c| c.offload.optimizer = Place::Host),
        ("does not divide", |c| (c.tp, c.pp) = (64, c.pp)),
        ("layers", |c| c.stage_layers[0] += 1),
    ];
    for (said, change) in changes {
        let mut changed = layouts.clone();
        change(&mut changed[1].1);
        let refused = groups::score_line(&asked, &changed).unwrap_err();
        assert!(refused.iter().all(|d| d.code == "E3401"), "{refused:?}");
        assert!(refused.iter().any(|d| d.headline.contains(said)), "{said}: {refused:?}");
    }
    assert_eq!(groups::score_line(&asked, &[]).unwrap_err()[0].code, "E3401");
}

/// A model that only one group can hold alone: with stages the other one helps. Told a step that is
/// just faster, the search finds nothing.
#[test]
fn stages_use_what_cannot_hold_a_copy() {
    let work = workload("gpt-18.4b", 40, 2048);
    let cluster = cluster(&[("h100", 1), ("v100", 2)]);
    let asked = asked(&work, &cluster, 64, &[]);
    let shared = groups::share(&asked).unwrap();
    let way = groups::plan(&asked).unwrap();
    let Grouped::Stages(across_both) = &way else { panic!("{way:?}") };
    assert!(way.step_time_s() < shared.step_time_s, "{shared:?} {way:?}");
    let held = |group| {
        let part = across_both.parts.iter().find(|part| part.group == group).unwrap();
        part.configuration.stage_layers.iter().sum::<u32>()
    };
    assert!(held(0) > held(1), "{way:?}");
    assert_eq!(across(&asked, way.step_time_s() * 0.999).unwrap(), None);
    // A set of one group alone has no pipeline over groups, and shares are its own plan.
    let alone = groups::plan(&GroupRequest { set: Some(vec![0]), ..asked.clone() }).unwrap();
    assert!(matches!(&alone, Grouped::Shares(_)) && alone.devices() == 8, "{alone:?}");
    assert!(alone.step_time_s() >= way.step_time_s());
}

/// A job of few layers on two kinds of devices, and its fastest pipeline over both.
pub(crate) fn small_line() -> (Workload, Cluster, u32, HeteroPipeline) {
    let work = workload("gpt-7.5b", 6, 2048);
    let cluster = cluster(&[("h100", 1), ("v100", 1)]);
    let found = across(&asked(&work, &cluster, 8, &[]), f64::INFINITY).unwrap().unwrap();
    (work, cluster, 8, found)
}

/// Orders of a few groups are all that there are, told apart by their kinds; of many they are told
/// to be some.
#[test]
fn orders_are_all_or_said_to_be_some() {
    let ways = |kinds: &[usize]| {
        let (found, are_all) = orders(kinds);
        let told: BTreeSet<Vec<usize>> =
            found.iter().map(|order| order.iter().map(|group| kinds[*group]).collect()).collect();
        assert_eq!(told.len(), found.len(), "an order twice");
        (found.len(), are_all)
    };
    assert_eq!(ways(&[0]), (0, true));
    assert_eq!(ways(&[0, 0]), (1, true));
    assert_eq!(ways(&[0, 1, 2]), (6 + 6, true));
    assert_eq!(ways(&[0, 0, 0, 0, 4, 4, 4, 4]), (4 + 8 + 16 + 30 + 50 + 70 + 70, true));
    assert_eq!(ways(&[0, 1, 2, 3, 4, 5]), (30 + 120 + 360 + 720 + 720, true));
    assert_eq!(ways(&[0, 1, 2, 3, 4, 5, 6]), (42 + 210 + 840, false));
}
