//! Batches that devices can share: which numbers of samples some layout divides, and which batches
//! next to one that cannot be shared can.

use super::branch_and_bound::Path;
use super::decisions::{self, STEPS, SearchDomain};

/// The largest batch that is looked at. Chosen: sums of its shares take some milliseconds.
const LOOKED_MAX: u32 = 4096;
/// Batches that are looked at where few samples are asked for.
const LOOKED_LEAST: u32 = 1024;

/// Whether any configuration of a frame divides its batch.
pub(super) fn divides(domain: &SearchDomain) -> bool {
    let mut options = vec![Vec::new(); STEPS.len()];
    has_leaf(domain, &Path::default(), &mut options)
}

fn has_leaf(domain: &SearchDomain, path: &Path, buffers: &mut [Vec<u32>]) -> bool {
    let Some((options, buffers)) = buffers.split_first_mut() else { return true };
    decisions::options(domain, path, options);
    options.iter().any(|value| has_leaf(domain, &path.then(*value), buffers))
}

/// The nearest smaller and the nearest larger batch than `batch` that `groups` groups can share,
/// each with at least one sample, as far as there are any among a few thousand. `divides(g, n)`
/// says whether group g can have n samples.
pub(super) fn nearest(
    batch: u32,
    groups: usize,
    mut divides: impl FnMut(usize, u32) -> bool,
) -> Vec<u32> {
    if batch > LOOKED_MAX {
        return Vec::new();
    }
    let most = batch.saturating_mul(2).clamp(LOOKED_LEAST, LOOKED_MAX) as usize;
    let mut sums = vec![false; most + 1];
    sums[0] = true;
    for group in 0..groups {
        let mut next = vec![false; most + 1];
        let shares = (1..=most).filter(|share| divides(group, *share as u32));
        for share in shares.collect::<Vec<_>>() {
            for before in (0..=most - share).filter(|before| sums[*before]) {
                next[before + share] = true;
            }
        }
        sums = next;
    }
    let batch = batch as usize;
    let smaller = (1..batch).rev().find(|sum| sums[*sum]);
    let larger = (batch + 1..=most).find(|sum| sums[*sum]);
    smaller.into_iter().chain(larger).map(|sum| sum as u32).collect()
}

/// Batches in words: `96 or 104`; none where there are none.
pub(super) fn told(batches: &[u32]) -> Option<String> {
    let texts: Vec<String> = batches.iter().map(u32::to_string).collect();
    (!texts.is_empty()).then(|| texts.join(" or "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use crate::search::models;

    /// Sums of multiples, against trying all of them.
    #[test]
    fn nearest_batches_are_sums_of_shares() {
        for units in [&[8, 12][..], &[5], &[6, 6, 9], &[7, 16, 3]] {
            for batch in 1..200u32 {
                let found = nearest(batch, units.len(), |group, n| n.is_multiple_of(units[group]));
                let is_sum = |sum: u32| tried(sum, units);
                let smaller = (1..batch).rev().find(|sum| is_sum(*sum));
                let larger = (batch + 1..).find(|sum| is_sum(*sum));
                let expected: Vec<u32> = smaller.into_iter().chain(larger).collect();
                assert_eq!(found, expected, "{batch} of {units:?}");
            }
        }
        assert_eq!(nearest(LOOKED_MAX + 1, 1, |_, _| true), [0; 0]);
    }

    fn tried(sum: u32, units: &[u32]) -> bool {
        match units {
            [] => sum == 0,
            [first, rest @ ..] => (1..=sum / first).any(|n| tried(sum - n * first, rest)),
        }
    }

    /// What divides is what the tree of decisions has leaves for.
    #[test]
    fn what_divides_has_leaves() {
        let work = models::shape("llama-3-8b").unwrap().workload().unwrap();
        for (fix, multiples) in [("dp=8", 8), ("mbs=6", 6), ("pp=1", 1)] {
            let limits = Limits::parse(&[fix.to_owned()], &[], &[]).unwrap();
            for batch in 1..50 {
                let domain = SearchDomain::new(&work, 8, batch, limits.clone());
                assert_eq!(divides(&domain), batch.is_multiple_of(multiples), "{fix} {batch}");
            }
        }
    }
}
