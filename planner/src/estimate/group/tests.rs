use std::collections::BTreeMap;

use ir::random::mix;

use super::*;
use crate::configuration::USUAL_ORDER;
use crate::estimate::experts::{ExpertPlacement, ExpertRanks};
use crate::search::oracle::seeds;
use crate::search::tests::permutations;

const PLACEMENTS: [ExpertPlacement; 2] =
    [ExpertPlacement::BesideTensor, ExpertPlacement::FromTensor];

/// Ranks of a job, by what they have in common.
type Groups = BTreeMap<Vec<u64>, Vec<u64>>;

/// The place of a rank along each axis.
fn places(c: &Configuration, rank: u64) -> Vec<(Axis, u64)> {
    let mut left = rank;
    let place = |axis: Axis| {
        let size = u64::from(c.size(axis));
        let place = left % size;
        left /= size;
        (axis, place)
    };
    c.order.into_iter().map(place).collect()
}

/// All groups along some axes.
fn along(c: &Configuration, axes: &[Axis]) -> Groups {
    let mut groups = Groups::new();
    for rank in 0..c.ranks() {
        let others = places(c, rank).into_iter().filter(|(axis, _)| !axes.contains(axis));
        groups.entry(others.map(|(_, place)| place).collect()).or_default().push(rank);
    }
    groups
}

/// Each group in parts: of so many members that follow each other, or of one of each such part.
fn parts(groups: &Groups, size: u64, is_across: bool) -> Groups {
    let mut parts = Groups::new();
    for (key, ranks) in groups {
        for (at, rank) in (0..).zip(ranks) {
            let part = if is_across { at % size } else { at / size };
            parts.entry([key.clone(), vec![part]].concat()).or_default().push(*rank);
        }
    }
    parts
}

/// What is counted: the fewest members of a group in a domain that has some, and the most domains.
fn counted(groups: &Groups, domain: u64) -> Spread {
    let mut worst = Spread { least: u64::MAX, domains: 0 };
    for ranks in groups.values() {
        let mut members: BTreeMap<u64, u64> = BTreeMap::new();
        for rank in ranks {
            *members.entry(rank / domain).or_default() += 1;
        }
        worst.least = worst.least.min(*members.values().min().expect("a group has members"));
        worst.domains = worst.domains.max(members.len() as u64);
    }
    worst
}

/// The devices of a node of `node` that `ranks` take: the most, of three quarters and more, that
/// divide them.
fn taken(ranks: u64, node: u64) -> u64 {
    let divides = |n: &u64| ranks.is_multiple_of(*n) && 4 * n >= 3 * node;
    (1..=node).filter(divides).max().filter(|_| ranks > node).unwrap_or(node)
}

/// A random divisor.
fn divisor(n: u64, random: &mut impl FnMut(u64) -> u64) -> u64 {
    divisor_at(n, random(n))
}

/// A divisor by a number that says which.
fn divisor_at(n: u64, which: u64) -> u64 {
    let all: Vec<u64> = (1..=n).filter(|d| n.is_multiple_of(*d)).collect();
    all[which as usize % all.len()]
}

/// The ranks that share experts, and those that have the same ones: beside `tp` where all of its
/// ranks slice experts, else neighbours of the stage.
fn experts_lie(c: &Configuration, [data, stage]: [&Groups; 2], e: &ExpertRanks) -> [Groups; 2] {
    let (ep, slices) = (u64::from(c.ep), e.slices.size());
    if slices == u64::from(c.tp) {
        return [parts(data, ep, false), parts(data, ep, true)];
    }
    let near = parts(stage, ep * slices, false);
    [parts(&near, slices, true), parts(stage, ep * slices, true)]
}

/// In all orders of the axes, for random sizes: what a group's formula says of nodes and of larger
/// domains is what counting the ranks of all such groups says, where extents and domains divide
/// each other; and no better than that elsewhere.
#[test]
fn groups_lie_where_their_ranks_are() {
    let (mut exact, mut worse) = (0, 0);
    for seed in seeds(0, 60) {
        let mut state = seed;
        let mut random = |n: u64| {
            state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
            state % n
        };
        let are_powers = seed % 2 == 0;
        let sizes = if are_powers { [1, 2, 4, 8] } else { [1, 2, 3, 6] };
        let mut size = || sizes[random(4) as usize];
        let (tp, cp, dp, pp) = (size(), size(), size(), size());
        let node = if are_powers { 1 << random(5) } else { 1 + random(18) };
        let ep = divisor(u64::from(tp * cp * dp), &mut random);
        let shard = divisor(u64::from(dp * cp), &mut random);
        let number = random(24);
        let domain = node * (1 + random(3));
        for order in permutations() {
            let ep = ep as u32;
            let c = Configuration { tp, cp, dp, pp, ep, order, ..Configuration::default() };
            use Axis::{Cp, Dp, Pp, Tp};
            let (data, stage) = (along(&c, &[Cp, Dp]), along(&c, &[Tp, Cp, Dp]));
            let ours = Group::data(&c);
            let [beside, from] = PLACEMENTS.map(|placement| ExpertRanks::of(&c, placement));
            let lie = [beside, from].map(|experts| experts_lie(&c, [&data, &stage], &experts));
            let shards = [beside, from].map(|e| divisor_at(e.copies.size(), number));
            for (what, group, ranks) in [
                ("tp", Group::along(&c, Tp), along(&c, &[Tp])),
                ("cp", Group::along(&c, Cp), along(&c, &[Cp])),
                ("dp", Group::along(&c, Dp), along(&c, &[Dp])),
                ("pp", Group::along(&c, Pp), along(&c, &[Pp])),
                ("data", ours, data.clone()),
                ("shards", ours.first(shard), parts(&data, shard, false)),
                ("their copies", ours.every(shard), parts(&data, shard, true)),
                ("stage", Group::stage(&c), stage.clone()),
                ("experts beside tp", beside.ranks, lie[0][0].clone()),
                ("their copies", beside.copies, lie[0][1].clone()),
                ("shards", beside.copies.first(shards[0]), parts(&lie[0][1], shards[0], false)),
                ("copies", beside.copies.every(shards[0]), parts(&lie[0][1], shards[0], true)),
                ("experts from tp", from.ranks, lie[1][0].clone()),
                ("their copies", from.copies, lie[1][1].clone()),
                ("shards", from.copies.first(shards[1]), parts(&lie[1][1], shards[1], false)),
                ("copies", from.copies.every(shards[1]), parts(&lie[1][1], shards[1], true)),
            ] {
                for reach in [node, domain] {
                    let used = reach / node * taken(c.ranks(), node);
                    let (found, truth) = (group.spread(reach, node), counted(&ranks, used));
                    let about = format!(
                        "SEED={seed}: {what} of {c}, shards of {shard} and {shards:?}, {reach} \
                         devices in nodes of {node}: {found:?}, counted {truth:?}"
                    );
                    assert!(ranks.values().all(|all| all.len() as u64 == group.size()), "{about}");
                    assert!(found.least <= truth.least, "{about}");
                    assert!(found.domains >= truth.domains, "{about}");
                    // What is alone stays alone, and what is inside stays inside.
                    assert!(!are_powers || reach != node || found == truth, "{about}");
                    exact += usize::from(found == truth);
                    worse += usize::from(found != truth);
                    let near = Group::near(group.size()).spread(reach, node);
                    assert!(near.least >= found.least && near.domains <= found.domains, "{about}");
                    let own = group.spread(node, node);
                    for alike in [group.alike(node), group.alike_in_parts(node)] {
                        assert_eq!((alike.size(), alike.spread(node, node)), (group.size(), own));
                    }
                }
            }
        }
    }
    assert!(worse * 12 < exact, "{worse} worse than counted, {exact} exact");
}

/// Neighbours that do not divide a node lie across its edge: three of eight, in the third group.
#[test]
fn neighbours_lie_across_edges() {
    for (size, ranks, node, least, domains) in [
        (3, 24, 8, 1, 2),
        (6, 24, 8, 2, 2),
        (12, 24, 8, 4, 2),
        (3, 6, 8, 3, 1),
        // Nodes of which six devices are taken.
        (6, 12, 8, 6, 1),
        // Racks of which 64 devices are.
        (64, 1024, 72, 64, 1),
        (128, 1024, 72, 64, 2),
        (8, 80, 72, 8, 1),
    ] {
        let spread = Group::apart(size, 1, ranks).spread(node, node);
        assert_eq!(spread, Spread { least, domains }, "{size} of {ranks} in nodes of {node}");
    }
    let near = Configuration { tp: 3, dp: 8, order: USUAL_ORDER, ..Configuration::default() };
    assert_eq!(Group::along(&near, Axis::Tp), Group::apart(3, 1, 24));
}
