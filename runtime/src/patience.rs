//! Waiting with a limit that counts only time in which this process ran and nobody got on.

use std::time::{Duration, Instant};

/// The longest wait at a time. Time that passes beyond it, as while the process is stopped by
/// SIGSTOP or the machine sleeps, is no waiting.
const SLICE: Duration = Duration::from_millis(100);

/// What is left of a limit on waiting.
///
/// Whoever waits does so for at most [`Patience::slice`] at a time, and counts each wait.
#[derive(Debug)]
pub(crate) struct Patience {
    limit: Duration,
    waited: Duration,
    last: Instant,
    progress: u64,
}

impl Patience {
    /// Begins to wait, for at most `limit` from any progress on.
    pub(crate) fn new(limit: Duration) -> Patience {
        Patience { limit, waited: Duration::ZERO, last: Instant::now(), progress: 0 }
    }

    /// How long to wait now, at most.
    pub(crate) fn slice(&self) -> Duration {
        self.limit.saturating_sub(self.waited).min(SLICE)
    }

    /// Counts the time since the last count: at most two slices, since a wait may wake late. Where
    /// the number of things that others have done is another than before, begins anew.
    pub(crate) fn count(&mut self, progress: u64) {
        let now = Instant::now();
        if progress == self.progress {
            self.waited += now.duration_since(self.last).min(2 * SLICE);
        } else {
            (self.progress, self.waited) = (progress, Duration::ZERO);
        }
        self.last = now;
    }

    /// The time that was counted.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// Whether the limit is reached.
    pub(crate) fn is_over(&self) -> bool {
        self.waited >= self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_beyond_a_slice_is_no_waiting() {
        let mut patience = Patience::new(Duration::from_secs(1));
        // As after SIGCONT: the wait of a slice took a minute.
        patience.last = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        patience.count(0);
        assert_eq!(patience.waited(), 2 * SLICE);
        assert!(!patience.is_over());
    }

    #[test]
    fn waiting_slice_by_slice_comes_to_the_limit() {
        let limit = Duration::from_millis(250);
        let mut patience = Patience::new(limit);
        let start = Instant::now();
        while !patience.is_over() {
            assert!(patience.slice() <= SLICE && !patience.slice().is_zero());
            std::thread::sleep(patience.slice());
            patience.count(0);
        }
        assert!(start.elapsed() >= limit);
    }

    #[test]
    fn who_gets_on_is_waited_for() {
        let mut patience = Patience::new(Duration::from_millis(1));
        for progress in 1..20 {
            std::thread::sleep(Duration::from_millis(2));
            patience.count(progress);
            assert!(!patience.is_over());
        }
        std::thread::sleep(Duration::from_millis(2));
        patience.count(19);
        assert!(patience.is_over());
    }
}
