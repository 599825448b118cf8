//! Shares of a batch against trying all of them.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::check::groups::check_groups;
use crate::estimate::rates::Arithmetic;
use crate::estimate::workload::Workload;
use crate::estimate::{Job, profile};
use crate::limits::Limits;
use crate::machine::Machine;
use crate::search::branch_and_bound::{Budget, Objective};
use crate::search::models;
use crate::search::request::{EVALUATIONS_MAX, SearchRequest, search};

/// Nodes of presets.
pub(crate) fn cluster(groups: &[(&str, usize)]) -> Cluster {
    let text: String = groups
        .iter()
        .map(|(preset, nodes)| {
            let deployment = format!("[group.deployment]\nnodes = {nodes}\n");
            format!("[[group]]\nextends = \"preset:{preset}\"\n{deployment}")
        })
        .collect();
    let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
    Cluster::parse("mixed.toml", &text, &machine).unwrap()
}

/// A question about a batch, with what is fixed.
pub(crate) fn asked<'a>(
    work: &'a Workload,
    cluster: &'a Cluster,
    batch: u64,
    fix: &[&str],
) -> GroupRequest<'a> {
    let fix: Vec<String> = fix.iter().map(|text| (*text).to_owned()).collect();
    GroupRequest {
        work,
        cluster,
        profile: profile::GANTLINE,
        job: Job { global_batch: batch, arithmetic: Arithmetic::Half },
        limits: Limits::parse(&fix, &[], &[]).unwrap(),
        evaluations_max: EVALUATIONS_MAX,
        for_memory: false,
        set: None,
        stop: &|| false,
    }
}

/// All shares of a batch over groups, tried one by one: so many pieces, and what is left over.
fn tried(asked: &GroupRequest<'_>, [piece, pieces, rest]: [u32; 3]) -> f64 {
    let count = asked.cluster.groups.len();
    let seconds = |group: usize, samples: u32| {
        let estimator = asked.estimator(group).unwrap().of_batch(samples.into());
        let answer = search(&SearchRequest {
            estimator: &estimator,
            devices: asked.devices(group),
            global_batch: samples,
            limits: asked.limits.clone(),
            objective: Objective::Time,
            power: None,
            budget: Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false },
        });
        answer.map_or(f64::INFINITY, |answer| answer.best[0].estimate.step_time_s)
    };
    let mut known = std::collections::BTreeMap::new();
    let mut best = f64::INFINITY;
    let numbers = (pieces + 1).pow(count as u32);
    for (code, takes_rest) in (0..numbers).flat_map(|code| (0..count).map(move |at| (code, at))) {
        let taken = |g: usize| code / (pieces + 1).pow(g as u32) % (pieces + 1);
        if (0..count).map(taken).sum::<u32>() != pieces || (rest == 0 && takes_rest > 0) {
            continue;
        }
        let samples = |g: usize| piece * taken(g) + if g == takes_rest { rest } else { 0 };
        let set: Vec<usize> = (0..count).filter(|g| samples(*g) > 0).collect();
        let mut of = |g: usize, n| *known.entry((g, n)).or_insert_with(|| seconds(g, n));
        let slowest = set.iter().map(|g| of(*g, samples(*g))).fold(0.0, f64::max);
        best = best.min(slowest + asked.exchange_s(&set));
    }
    best
}

/// On small clusters of two and three groups the shares are the best of all.
#[test]
fn shares_are_the_best_of_all() {
    let cases = [
        ("llama-3-8b", 8192, 48, &[("h100", 1), ("a100", 1)][..]),
        ("llama-3-8b", 8192, 40, &[("a100", 1), ("h100", 1)]),
        ("gpt-7.5b", 2048, 8, &[("h100", 1), ("a100", 2), ("v100", 1)]),
        ("gpt-7.5b", 2048, 10, &[("a100", 1), ("h100", 1), ("a100", 1)]),
        // A prime: pieces of four samples, and three that are left over.
        ("llama-3-8b", 8192, 67, &[("h100", 1), ("a100", 1)]),
    ];
    for (model, seq, batch, groups) in cases {
        let mut shape = models::shape(model).unwrap();
        shape.seq = seq;
        let work = shape.workload().unwrap();
        let cluster = cluster(groups);
        let fix = ["placement=usual", "offload=off", "cp=1"];
        let asked = asked(&work, &cluster, batch.into(), &fix);
        let found = share(&asked).unwrap();
        let pieces = [found.piece, (batch - found.rest) / found.piece, found.rest];
        assert!(pieces[1] >= 16 || found.piece == 1, "{pieces:?}");
        let best = tried(&asked, pieces);
        let about = format!("{model}: {found:?}");
        assert!((found.step_time_s / best - 1.0).abs() < 1e-9, "{best}: {about}");
        assert!(found.complete && found.nearest.is_empty(), "{about}");
        assert_eq!(found.shares.iter().map(|s| s.samples).sum::<u32>(), batch, "{about}");
        // Of groups as large, the faster one takes more; the other is worth the exchange.
        let of = |device: &str| {
            let at = groups.iter().position(|(name, _)| *name == device).unwrap();
            found.shares[at].samples
        };
        let shared = of("h100") > of("a100") && of("a100") > 0;
        assert!(groups.len() > 2 || shared, "{about}");
    }
}

/// Groups sum gradients in a ring, through the slowest network: two send each gradient once, three
/// a third of them four times. A group without a network is refused.
#[test]
fn gradients_cross_once() {
    let work = models::shape("llama-3-8b").unwrap().workload().unwrap();
    let joined = cluster(&[("h100", 1), ("a100", 1)]);
    let mut apart = joined.clone();
    apart.groups[1].levels.truncate(1);
    let asked = |cluster| asked(&work, cluster, 16, &[]);
    // 8,030,261,248 gradients of 4 bytes through eight ports of 25 GB/s.
    let expected_s = 8_030_261_248.0 * 4.0 / (8.0 * 25e9);
    let found_s = asked(&joined).exchange_s(&[0, 1]);
    assert!((found_s / expected_s - 1.0).abs() < 1e-3, "{found_s} {expected_s}");
    let ring = cluster(&[("h100", 1), ("a100", 1), ("a100", 1)]);
    let found_s = asked(&ring).exchange_s(&[0, 1, 2]);
    assert!((found_s / (expected_s / 3.0 * 4.0) - 1.0).abs() < 1e-3, "{found_s} {expected_s}");
    let refused = plan(&asked(&apart)).unwrap_err();
    assert_eq!(refused[0].code, "E3404", "{refused:?}");
}

/// A link between groups bounds what crosses it, and only where it is narrower than their networks.
#[test]
fn links_between_groups_are_crossed() {
    let mut shape = models::shape("llama-3-8b").unwrap();
    shape.seq = 2048;
    let work = shape.workload().unwrap();
    let plain = cluster(&[("h100", 1), ("a100", 1)]);
    let linked = |bandwidth: &str, latency: &str| {
        let link = format!(
            "[[link]]\nbetween = [\"h100\", \"a100\"]\nbandwidth = {bandwidth:?}\n\
             latency = {latency:?}\n"
        );
        let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
        Cluster::parse("mixed.toml", &format!("{plain}{link}"), &machine).unwrap()
    };
    let narrow = linked("10 GB/s", "1 ms");
    let asked = |cluster| asked(&work, cluster, 16, &[]);
    // Each gradient of 4 bytes crosses once, in two steps.
    let expected_s = 8_030_261_248.0 * 4.0 / 10e9 + 2e-3;
    let found_s = asked(&narrow).exchange_s(&[0, 1]);
    assert!((found_s / expected_s - 1.0).abs() < 1e-9, "{found_s} {expected_s}");
    assert_eq!(asked(&narrow).exchange_s(&[1]), 0.0);
    let wide = linked("10 TB/s", "0 us");
    let steps = [&plain, &wide, &narrow].map(|cluster| plan(&asked(cluster)).unwrap());
    let [plain_s, wide_s, narrow_s] = steps.each_ref().map(Grouped::step_time_s);
    assert_eq!(plain_s, wide_s, "{steps:?}");
    assert!(narrow_s >= plain_s, "{steps:?}");
    // A pipeline over both waits for its messages: forward and backward of each micro-batch.
    let layouts: [(usize, Configuration); 2] = [
        (0, "tp=8 dp=1 pp=1 mbs=1 sp stages=20".parse().unwrap()),
        (1, "tp=8 dp=1 pp=1 mbs=1 sp stages=12".parse().unwrap()),
    ];
    let slow = linked("100 MB/s", "0 us");
    let line_s = |cluster| score_line(&asked(cluster), &layouts).unwrap().step_time_s;
    let message_s = 2048.0 * 4096.0 * 2.0 / 100e6;
    let more_s = line_s(&slow) - line_s(&plain);
    // Sixteen micro-batches, of which one fills the pipeline; passes hide a part.
    let most_s = 2.0 * 17.0 * message_s;
    assert!(more_s > 0.5 * most_s && more_s < 1.01 * most_s, "{more_s} of {most_s}");
    assert_eq!(line_s(&wide), line_s(&plain));
}

/// What was found scores as it was found; no other shares of the same layouts are faster.
#[test]
fn what_is_found_scores_the_same() {
    let mut shape = models::shape("llama-3-8b").unwrap();
    shape.seq = 8192;
    let work = shape.workload().unwrap();
    let cluster = cluster(&[("h100", 1), ("a100", 1)]);
    let asked = asked(&work, &cluster, 48, &["pp=1", "mbs=1"]);
    let found = share(&asked).unwrap();
    let layout = |share: &Share| Some(share.chosen.as_ref()?.configuration.clone());
    let layouts: Vec<_> = found.shares.iter().map(layout).collect();
    assert!(layouts.iter().all(Option::is_some), "{found:?}");
    let scored = score(&asked, &layouts).unwrap();
    assert!((scored.step_time_s / found.step_time_s - 1.0).abs() < 1e-9, "{scored:?}");
    let alone = score(&asked, &[layouts[0].clone(), None]).unwrap();
    assert!(alone.step_time_s > scored.step_time_s && alone.shares[0].samples == 48);
    // Groups that are alike keep the layouts that they are given.
    let alike = self::cluster(&[("h100", 1), ("h100", 1)]);
    let other: Configuration = "tp=4 dp=2 mbs=1 sp zero=1 recompute=full".parse().unwrap();
    let given = [layouts[0].clone(), Some(other)];
    let told = score(&self::asked(&work, &alike, 48, &[]), &given).unwrap();
    assert_eq!(told.shares.iter().map(layout).collect::<Vec<_>>(), given);
    let wrong = Configuration { dp: 3, ..Configuration::default() };
    let refused = score(&asked, &[Some(wrong.clone()), Some(wrong)]).unwrap_err();
    assert_eq!(refused.iter().map(|d| d.code).collect::<Vec<_>>(), ["E3401"; 2]);
}

#[test]
fn what_no_group_can_hold_is_refused() {
    let work = models::shape("gpt-1t").unwrap().workload().unwrap();
    let cluster = cluster(&[("h100", 1), ("a100", 1)]);
    let asked = asked(&work, &cluster, 2, &["offload=off"]);
    assert_eq!(share(&asked).unwrap_err()[0].code, "E3201");
    let least = GroupRequest { for_memory: true, ..asked.clone() };
    assert_eq!(plan(&least).unwrap_err()[0].code, "E3201");
    let alone = GroupRequest { cluster: &cluster.groups[0], ..asked };
    assert_eq!(share(&alone).unwrap_err()[0].code, "E3404");
}

/// Batches that the groups' devices do not divide are refused with those next to it that they do;
/// where one group alone divides a batch, that is said.
#[test]
fn batches_that_groups_cannot_share_are_told() {
    let work = models::shape("llama-3-8b").unwrap().workload().unwrap();
    let cluster = cluster(&[("h100", 1), ("a100", 1)]);
    let asked = |batch| asked(&work, &cluster, batch, &["dp=4"]);
    for for_memory in [false, true] {
        let refused = plan(&GroupRequest { for_memory, ..asked(67) }).unwrap_err();
        assert_eq!(refused[0].code, "E3203", "{refused:?}");
        assert!(refused[0].help.as_ref().unwrap().starts_with("use 64 or 68 "), "{refused:?}");
    }
    assert_eq!(share(&asked(4)).unwrap().nearest, [8]);
    assert_eq!(share(&asked(68)).unwrap().nearest, [0; 0]);
    let layout: Configuration = "dp=4 tp=2 mbs=1 sp zero=1 recompute=full".parse().unwrap();
    let refused = score(&asked(67), &[Some(layout.clone()), Some(layout)]).unwrap_err();
    assert!(refused[0].help.as_ref().unwrap().ends_with("64 or 68"), "{refused:?}");
}

/// A search that is stopped has a legal answer, which it does not call the best, or none.
#[test]
fn what_a_clock_cuts_off_is_told() {
    let mut shape = models::shape("llama-3-8b").unwrap();
    shape.seq = 4096;
    let work = shape.workload().unwrap();
    let cluster = cluster(&[("h100", 1), ("a100", 1)]);
    let mut told = [0, 0];
    for looks_max in [0, 3, 30, 300] {
        let looks = AtomicU32::new(0);
        let stop = || looks.fetch_add(1, Ordering::Relaxed) >= looks_max;
        let asked = GroupRequest { stop: &stop, ..asked(&work, &cluster, 48, &[]) };
        match share(&asked) {
            Ok(shared) => {
                assert!(
                    !shared.complete || looks.load(Ordering::Relaxed) <= looks_max,
                    "{shared:?}"
                );
                assert_eq!(check_groups(&asked, &Grouped::Shares(shared)), []);
                told[0] += 1;
            }
            Err(refused) => {
                assert_eq!(refused[0].code, "E3205", "{refused:?}");
                told[1] += 1;
            }
        }
    }
    assert!(told[0] > 0 && told[1] > 0, "{told:?}");
}
