//! Offsets: where each buffer lies in an arena, given when it is live.

use ir::program::aligned;

/// Bytes that are live from one instruction to another, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// The bytes.
    pub bytes: u64,
    /// The first instruction that touches them.
    pub first: usize,
    /// The last one.
    pub last: usize,
}

impl Lifetime {
    fn meets(&self, other: &Lifetime) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Where buffers lie, and how many bytes that takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// For each buffer, its first byte; all are aligned.
    pub offsets: Vec<u64>,
    /// The bytes of the arena.
    pub bytes: u64,
    /// The largest sum of aligned bytes that are live at one instruction: no packing takes less.
    pub live_bytes_max: u64,
}

/// Packs buffers so that none overlaps another that is live at the same time.
///
/// Three greedy orders are tried and the smallest arena is taken: the longest-lived first, the
/// largest first, and by first use, until one wastes nothing; each buffer goes into the tightest
/// gap that holds it. O(buffers²).
pub fn pack(lifetimes: &[Lifetime]) -> Packing {
    let live_bytes_max = live_bytes_max(lifetimes);
    let mut orders: [Vec<usize>; 3] = std::array::from_fn(|_| (0..lifetimes.len()).collect());
    let size = |at: &usize| std::cmp::Reverse(lifetimes[*at].bytes);
    let span = |at: &usize| std::cmp::Reverse(lifetimes[*at].last - lifetimes[*at].first);
    orders[0].sort_by_key(|at| (span(at), size(at), *at));
    orders[1].sort_by_key(|at| (size(at), lifetimes[*at].first, *at));
    orders[2].sort_by_key(|at| (lifetimes[*at].first, size(at), *at));
    let [first, others @ ..] = &orders;
    let (mut offsets, mut bytes) = place(lifetimes, first);
    for order in others {
        if bytes == live_bytes_max {
            break;
        }
        let (other, less) = place(lifetimes, order);
        if less < bytes {
            (offsets, bytes) = (other, less);
        }
    }
    Packing { offsets, bytes, live_bytes_max }
}

fn place(lifetimes: &[Lifetime], order: &[usize]) -> (Vec<u64>, u64) {
    let mut offsets = vec![0; lifetimes.len()];
    let mut placed: Vec<usize> = Vec::new();
    let mut bytes = 0;
    for at in order {
        let own = &lifetimes[*at];
        let size = aligned(own.bytes);
        let mut taken: Vec<(u64, u64)> = placed
            .iter()
            .filter(|other| lifetimes[**other].meets(own))
            .map(|other| (offsets[*other], offsets[*other] + aligned(lifetimes[*other].bytes)))
            .collect();
        taken.sort_unstable();
        offsets[*at] = tightest_gap(&taken, size);
        bytes = bytes.max(offsets[*at] + size);
        placed.push(*at);
    }
    (offsets, bytes)
}

/// The start of the smallest gap between taken ranges that holds `size` bytes.
fn tightest_gap(taken: &[(u64, u64)], size: u64) -> u64 {
    let mut end = 0;
    let mut best: Option<(u64, u64)> = None;
    for (start, stop) in taken {
        if *start >= end + size {
            let gap = start - end;
            if best.is_none_or(|(smallest, _)| gap < smallest) {
                best = Some((gap, end));
            }
        }
        end = end.max(*stop);
    }
    best.map_or(end, |(_, at)| at)
}

fn live_bytes_max(lifetimes: &[Lifetime]) -> u64 {
    let mut events: Vec<(usize, i8, u64)> = Vec::new();
    for lifetime in lifetimes {
        events.push((lifetime.first, 1, aligned(lifetime.bytes)));
        events.push((lifetime.last + 1, 0, aligned(lifetime.bytes)));
    }
    events.sort_unstable();
    let (mut live, mut most) = (0, 0);
    for (_, starts, bytes) in events {
        if starts == 1 {
            live += bytes;
            most = u64::max(most, live);
        } else {
            live -= bytes;
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_live_overlaps_and_little_is_wasted() {
        let seed = 11;
        let draw = |i: u64, n: u64| ir::random::mix(seed + i) % n;
        for case in 0..50 {
            let lifetimes: Vec<Lifetime> = (0..60)
                .map(|i| {
                    let first = draw(case * 1000 + i * 3, 100) as usize;
                    let last = first + draw(case * 1000 + i * 3 + 1, 20) as usize;
                    Lifetime { bytes: 1 + draw(case * 1000 + i * 3 + 2, 100_000), first, last }
                })
                .collect();
            let packing = pack(&lifetimes);
            for (i, a) in lifetimes.iter().enumerate() {
                for (j, b) in lifetimes.iter().enumerate().skip(i + 1) {
                    let (x, y) = (packing.offsets[i], packing.offsets[j]);
                    let apart = x + a.bytes <= y || y + b.bytes <= x;
                    assert!(apart || !a.meets(b), "seed {seed} case {case}: {i} and {j}");
                }
            }
            assert!(packing.bytes >= packing.live_bytes_max);
            assert!(packing.bytes as f64 <= 1.3 * packing.live_bytes_max as f64, "case {case}");
        }
    }
}
