//! What prices of items keep to on every device.

use ir::random::mix;

use super::*;
use crate::cluster::{Cluster, Kind, PRESETS};
use crate::configuration::Configuration;
use crate::estimate::workload::{Layer, Workload};
use crate::estimate::{Estimator, profile};
use crate::machine::Machine;

const ARITHMETICS: [Arithmetic; 5] =
    [Arithmetic::F32, Arithmetic::Tf32, Arithmetic::Half, Arithmetic::F8, Arithmetic::F4];

/// A product or a routed layer of any size: powers of two, their multiples, and odd ones.
fn item(below: &mut impl FnMut(u64) -> u32) -> Item {
    let mut size = || match below(3) {
        0 => 64 << below(8),
        1 => 8 * (1 + below(1500)),
        _ => 1 + below(20_000),
    };
    let (k, n) = (size(), size());
    if below(3) > 0 {
        let cut = [Cut::Columns, Cut::Rows, Cut::Whole][below(3) as usize];
        return Item::Product { k, n, cut, bias: below(2) == 0 };
    }
    let count = 1 << (1 + below(8));
    let top_k = 1 + below(u64::from(count.min(8)));
    Item::Experts { count, top_k, width: k, ffn: n.min(4096), gated: below(2) == 0, busiest: 1.0 }
}

/// In the same layout more tokens are never faster, whatever their number is divisible by: neither
/// are the kernels of products and routed layers, nor, on one device, a whole pass.
#[test]
fn more_tokens_are_never_faster() {
    let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
    let asked = std::env::var("SEED").ok().and_then(|text| text.parse().ok());
    let mut grown = 0;
    for (name, _) in PRESETS {
        let cluster = Cluster::load_on(name, &machine).unwrap();
        if cluster.device.kind == Kind::Cpu {
            continue;
        }
        for seed in asked.map_or(0..60, |seed: u64| seed..seed + 1) {
            let mut state = seed;
            let mut below = |n: u64| {
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                (mix(state) % n) as u32
            };
            let items = vec![item(&mut below)];
            let arithmetic = ARITHMETICS[below(5) as usize];
            let tp = 1 << below(4);
            let ep = 1 << below(4);
            let ep = if let Item::Experts { count, .. } = items[0] { count.min(ep) } else { 1 };
            let mut tokens = 1 + below(40);
            let mut before = [0.0_f64; 4];
            for _ in 0..24 {
                let work = Workload {
                    name: "w".into(),
                    seq: tokens,
                    width: 1,
                    layers: Vec::new(),
                    first: items.clone(),
                    last: Vec::new(),
                    tied: false,
                    tensor_units: None,
                    assumptions: Vec::new(),
                    frozen: None,
                };
                let job = Job { global_batch: 1, arithmetic };
                let estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
                let c = Configuration { tp, ep, ..Configuration::default() };
                let inside = estimator.inside(&c).near();
                let price = estimator.prices(inside).first;
                let alone = |pass: &Pass| if tp * ep == 1 { pass.total_s() } else { 0.0 };
                let now = [
                    price.forward.busy_s(),
                    price.backward.busy_s(),
                    alone(&price.forward),
                    alone(&price.backward),
                ];
                for (before, now) in before.iter().zip(now) {
                    let is_slower = now >= before * (1.0 - 1e-12);
                    let what = format!("{arithmetic:?} {:?} tp={tp} ep={ep}", items[0]);
                    assert!(is_slower, "SEED={seed} {name}: {tokens} tokens of {what}: {now} s");
                }
                grown += usize::from(now[0] > before[0]);
                before = now;
                tokens += 1 + below(u64::from(1 + tokens / 4));
            }
        }
    }
    assert!(asked.is_some() || grown > 10_000, "{grown} were slower");
}

/// All wait for the busiest rank: twice the average of tokens costs what twice as many experts of a
/// token cost. Ranks that have all experts are not busier than others.
#[test]
fn the_busiest_rank_counts() {
    let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
    let cluster = Cluster::load_on("h100", &machine).unwrap();
    let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
    // Tokens go to each of their experts alone, so that twice as many are twice as far.
    let profile =
        profile::Profile { experts_once: false, experts_again: false, ..profile::GANTLINE };
    let price = |top_k: u32, busiest: f64, ep: u32| {
        let experts =
            Item::Experts { count: 64, top_k, width: 2048, ffn: 1408, gated: true, busiest: 1.0 };
        let layer = Layer { name: "l".into(), count: 1, width: 2048, items: vec![experts] };
        let work = Workload {
            name: "w".into(),
            seq: 4096,
            width: 2048,
            layers: vec![layer],
            first: Vec::new(),
            last: Vec::new(),
            tied: false,
            tensor_units: None,
            assumptions: Vec::new(),
            frozen: None,
        };
        let work = work.routed_unevenly(busiest).unwrap();
        let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
        let c = Configuration { ep, dp: 64, ..Configuration::default() };
        estimator.prices(estimator.inside(&c)).layers[0].1
    };
    for ep in [8, 32] {
        let [even, busy, twice] = [price(2, 1.0, ep), price(2, 2.0, ep), price(4, 1.0, ep)];
        assert_eq!(busy.forward, twice.forward, "ep={ep}");
        assert_eq!(busy.backward, twice.backward, "ep={ep}");
        assert_eq!(busy.saved_bytes, twice.saved_bytes, "ep={ep}");
        assert!(busy.forward.total_s() > 1.2 * even.forward.total_s(), "ep={ep}");
    }
    assert_eq!(price(2, 1.0, 1), price(2, 2.0, 1));
}
