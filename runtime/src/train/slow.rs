//! Ranks that are slow.

use crate::execute::RankTime;

/// A rank is slow that computes for more than this many times as long as the median of all.
const TIMES: f64 = 3.0;
/// Steps in a row after which it is told.
const STEPS: u32 = 10;

/// A rank that holds the others up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowRank {
    /// The rank.
    pub rank: usize,
    /// How many times as long as the median of all ranks it computed in the last step.
    pub times: f64,
}

/// How many steps in a row each rank has been slow.
#[derive(Clone, Debug, Default)]
pub struct Paces {
    slow: Vec<u32>,
}

impl Paces {
    /// Adds a step. Names the slowest rank that has been slow for some steps in a row, and again
    /// after as many more.
    pub fn add(&mut self, ranks: &[RankTime]) -> Option<SlowRank> {
        self.slow.resize(ranks.len(), 0);
        let mut busy: Vec<f64> = ranks.iter().map(|rank| rank.busy_s).collect();
        busy.sort_by(f64::total_cmp);
        // Of two ranks the faster one is what is usual.
        let median = *busy.get(busy.len().saturating_sub(1) / 2)?;
        let mut named: Option<SlowRank> = None;
        for (rank, (time, slow)) in ranks.iter().zip(&mut self.slow).enumerate() {
            let times = time.busy_s / median;
            *slow = if times > TIMES { *slow + 1 } else { 0 };
            let is_told = *slow > 0 && slow.is_multiple_of(STEPS);
            if is_told && named.is_none_or(|named| named.times < times) {
                named = Some(SlowRank { rank, times });
            }
        }
        named
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(busy: &[f64]) -> Vec<RankTime> {
        busy.iter().map(|&busy_s| RankTime { busy_s, wait_s: 0.0 }).collect()
    }

    #[test]
    fn a_rank_that_stays_slow_is_named_once_in_ten_steps() {
        let mut paces = Paces::default();
        for count in 1..=30 {
            let named = paces.add(&step(&[1.0, 1.1, 4.0, 0.9]));
            assert_eq!(named.is_some(), count % 10 == 0, "step {count}");
            assert!(named.is_none_or(|named| named.rank == 2 && named.times >= 3.6));
        }
    }

    #[test]
    fn a_rank_that_is_slow_now_and_then_is_not_named() {
        let mut paces = Paces::default();
        for count in 0..100 {
            let slow = if count % 10 == 9 { 1.0 } else { 9.0 };
            assert_eq!(paces.add(&step(&[1.0, slow])), None, "step {count}");
        }
        assert_eq!(paces.add(&step(&[2.9, 1.0])), None);
    }
}
