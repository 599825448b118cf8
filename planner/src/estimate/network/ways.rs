//! Oversubscription, rails and shapes, against counting.

use super::*;
use crate::cluster::Cluster;
use crate::estimate::devices;
use crate::machine::Machine;

/// An H100 cluster of sixteen nodes with more said of its levels.
fn network(more: &str) -> Network {
    let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
    let text = format!("extends = \"preset:h100\"\n[deployment]\nnodes = 16\n{more}");
    devices::network(&Cluster::parse("mine.toml", &text, &machine).unwrap()).unwrap()
}

fn level(name: &str, more: &str) -> String {
    format!("[[level]]\nname = {name:?}\n{more}\n")
}

/// All collectives and a message, of a group that is evenly spaced.
fn all(network: &Network, [size, stride]: [u64; 2]) -> [f64; 4] {
    let group = Group::apart(size, stride, 128);
    let bytes = 1e9;
    [
        network.all_reduce_s(bytes, group),
        network.gather_s(bytes, group),
        network.exchange_s(bytes, group, 1.0),
        network.send_s(bytes, stride),
    ]
}

const GROUPS: [[u64; 2]; 9] =
    [[2, 1], [8, 1], [16, 1], [128, 1], [16, 8], [32, 4], [4, 6], [2, 64], [10, 12]];

/// Twice as many bytes as go through are half of the bandwidth, at whatever level.
#[test]
fn oversubscription_divides_the_bandwidth() {
    let spine = |more: &str| {
        level("infiniband", "count = 4") + &level("spine", &format!("latency = \"5.5 us\"\n{more}"))
    };
    for (said, meant) in [
        (
            level("infiniband", "oversubscription = 2"),
            level("infiniband", "bandwidth = \"25 GB/s\""),
        ),
        (level("nvlink", "oversubscription = 4.5"), level("nvlink", "bandwidth = \"100 GB/s\"")),
        (
            spine("bandwidth = \"50 GB/s\"\noversubscription = 4"),
            spine("bandwidth = \"12.5 GB/s\""),
        ),
    ] {
        let [plain, said, meant] = ["", &said, &meant].map(network);
        assert_eq!(said, meant);
        let slower = GROUPS.iter().filter(|group| all(&said, **group)[1] > all(&plain, **group)[1]);
        assert!(slower.count() >= 2);
    }
    // A spine alone does not slow down what stays below it.
    let narrow = network(&spine("bandwidth = \"50 GB/s\"\noversubscription = 50"));
    for group in [[8, 1], [32, 1], [4, 8]] {
        assert_eq!(all(&narrow, group), all(&network(""), group), "{group:?}");
    }
}

/// What changes rails, by looking at all ranks of a group and all pairs of them.
fn counted([size, stride]: [u64; 2], of_rail: u64) -> f64 {
    let ranks: Vec<u64> = (0..size).map(|at| at * stride).collect();
    let rail = |rank: u64| rank % 8 / of_rail;
    let (mut alike, mut pairs) = (0.0, 0.0);
    for a in &ranks {
        for b in &ranks {
            pairs += 1.0;
            alike += f64::from(u8::from(rail(*a) == rail(*b)));
        }
    }
    1.0 - alike / pairs
}

/// Devices of equal place share a rail: groups that keep to it are as fast as with switches for
/// all; what changes it hops inside a node or takes the spine, and is never faster.
#[test]
fn rails_join_equal_places() {
    let plain = network("");
    let railed = |rails: u64| network(&level("infiniband", &format!("rails = {rails}")));
    for rails in [1, 2, 4, 8] {
        let (network, of_rail) = (railed(rails), 8 / rails);
        for group in GROUPS {
            let [now, before] = [&network, &plain].map(|network| all(network, group));
            let about = format!("{group:?} of {rails} rails: {now:?}, {before:?}");
            assert!(now.iter().zip(before).all(|(now, before)| *now >= before), "{about}");
            let crossing = network.crossing(Group::apart(group[0], group[1], 128));
            assert!((crossing.exchange - counted(group, of_rail)).abs() < 1e-12, "{about}");
            let shifts = group[1] % 8 >= of_rail && group[1] >= 8;
            assert_eq!(now[3] > before[3], shifts, "{about}");
            if group[1] % 8 == 0 || rails == 1 {
                assert_eq!(now, before, "{about}");
                assert_eq!(crossing, Crossing::default(), "{about}");
            }
            // Whole nodes follow each other on all rails.
            if group[1] == 1 {
                assert_eq!((crossing.ring, now[0]), (0.0, before[0]), "{about}");
            }
        }
        // Every second neighbour of stages six apart changes its place.
        let ring = network.crossing(Group::apart(4, 6, 128)).ring;
        assert_eq!(ring > 0.0, rails > 1, "{ring}");
    }
    // A message to another rail takes both links, or the spine where that is sooner.
    let slow = "bandwidth = \"100 GB/s\"";
    let [near, spine] = [
        level("nvlink", slow) + &level("infiniband", "rails = 8\ncount = 4"),
        level("spine", "bandwidth = \"45 GB/s\"\nlatency = \"5.5 us\""),
    ];
    let without = network(&near.replace("count = 4", "count = 16"));
    let with = network(&(near + &spine));
    let inner_s = 1e9 / (100e9 * without.inner.share);
    let hop_s = without.send_s(1e9, 9) - without.send_s(1e9, 8);
    assert!(hop_s >= inner_s && hop_s < 1.01 * inner_s, "{hop_s}");
    let spine_s = with.send_s(1e9, 9) - with.send_s(1e9, 8);
    assert!(spine_s > 0.0 && spine_s < 0.5 * hop_s, "{spine_s}");
    let exchanges = [&without, &with].map(|network| all(network, [32, 1])[2]);
    assert!(exchanges[1] <= exchanges[0], "{exchanges:?}");
}

/// The busiest link of a ring, or of a line of `m` of its members, where each sends to each on the
/// shortest way, half of what is as far on both: in parts of what a member sends, over those that a
/// link carries.
fn busiest(m: u64, is_closed: bool) -> f64 {
    let mut load = vec![[0.0; 2]; m as usize];
    for from in 0..m {
        for to in (0..m).filter(|to| *to != from) {
            let [up, down] = [(to + m - from) % m, (from + m - to) % m];
            let ways = match is_closed {
                true if up == down => vec![(true, up, 0.5), (false, down, 0.5)],
                true => vec![(up < down, up.min(down), 1.0)],
                false => vec![(to > from, to.abs_diff(from), 1.0)],
            };
            for (is_up, hops, part) in ways {
                for hop in 0..hops {
                    let at = if is_up { from + hop } else { from + 2 * m - hop - 1 } % m;
                    load[at as usize][usize::from(is_up)] += part;
                }
            }
        }
    }
    // Each member sends an m-th to each, and has half of its bandwidth in each direction.
    let most = load.iter().flatten().fold(0.0f64, |most, load| most.max(*load));
    most / m as f64 / 0.5
}

/// A mesh gives two devices one of its links, a ring half of its bandwidth; exchanges take what the
/// busiest link of a ring carries.
#[test]
fn shapes_bound_what_members_send() {
    let plain = network("");
    let [full, ring] =
        ["full", "ring"].map(|shape| network(&level("nvlink", &format!("shape = {shape:?}"))));
    assert_eq!(network(&level("nvlink", "shape = \"switch\"")), plain);
    // All eight have what their links have together.
    for kind in [0, 1] {
        assert_eq!(all(&full, [8, 1])[kind], all(&plain, [8, 1])[kind]);
        assert_eq!(all(&ring, [8, 1])[kind], all(&plain, [8, 1])[kind]);
    }
    let start_s = plain.inner.start_s;
    let sent = |network: &Network| network.send_s(1e9, 1) - start_s;
    assert!((sent(&full) / sent(&plain) - 7.0).abs() < 1e-9);
    assert!((sent(&ring) / sent(&plain) - 2.0).abs() < 1e-9);
    for members in [2, 4] {
        let [now, before] = [&full, &plain].map(|network| all(network, [members, 1])[1]);
        let slower = 7.0 / (members - 1) as f64;
        assert!(now > 0.9 * slower * before && now < 1.01 * slower * before, "{members}");
    }
    for members in [2_u64, 4, 6, 8, 16] {
        let wires = Wires { shape: Shape::Ring, members };
        let counted = busiest(members, true).max(1.0);
        let share = wires.in_exchanges(members);
        assert!((1.0 / share - counted).abs() < 0.1 * counted, "{members}: {share}, {counted}");
        let line = Wires { shape: Shape::Ring, members: members + 1 };
        let counted = busiest(members, false).max(2.0);
        let share = line.in_exchanges(members);
        assert!((1.0 / share - counted).abs() < 0.1 * counted, "{members}: {share}, {counted}");
    }
    // Nodes may be joined so as well.
    let nodes = network(&level("infiniband", "shape = \"full\""));
    let [two, sixteen] =
        [[16, 1], [128, 1]].map(|group| [all(&nodes, group)[1], all(&plain, group)[1]]);
    assert_eq!(sixteen[0], sixteen[1]);
    assert!(two[0] > 5.0 * two[1], "{two:?}");
}
