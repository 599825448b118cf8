//! Copies between the memory spaces of one rank, made by a thread of its own while the rank works.
//!
//! Copies are made in the order in which they begin. What they read and write is lent by its
//! arenas, which refuse whoever would disturb them, until they are awaited.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::arena::{Arena, Lent};

/// A range of bytes in one of several arenas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Which arena.
    pub arena: usize,
    /// The bytes.
    pub range: std::ops::Range<usize>,
}

impl Extent {
    /// Whether some bytes are in both.
    pub(crate) fn meets(&self, other: &Extent) -> bool {
        let (a, b) = (&self.range, &other.range);
        self.arena == other.arena && a.start.max(b.start) < a.end.min(b.end)
    }
}

/// A copy, with what it reads and writes.
struct Job {
    from: Lent,
    to: Lent,
}

/// The thread that copies for one rank.
pub struct Mover {
    /// None once it is to end.
    jobs: Option<Sender<Job>>,
    done: Receiver<Job>,
    /// The copies that nobody has awaited, from where to where.
    pending: VecDeque<[Extent; 2]>,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread.
    pub fn start(rank: usize) -> io::Result<Mover> {
        let (jobs, waiting) = channel::<Job>();
        let (finished, done) = channel();
        let body = move || {
            for job in waiting {
                // SAFETY: this thread makes all copies between the arenas of a rank, one after the
                // other, and gives loans back after their copy alone. The second is written.
                unsafe { job.from.copy_to(&job.to) };
                job.from.let_go();
                job.to.let_go();
                if finished.send(job).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("copies of rank {rank}"));
        let thread = Some(thread.spawn(body)?);
        Ok(Mover { jobs: Some(jobs), done, pending: VecDeque::new(), thread })
    }

    /// Begins a copy from one arena to another.
    ///
    /// # Panics
    /// When the ranges do not lie in their arenas, or the thread has ended.
    pub fn begin(&mut self, arenas: &mut [Arena], [from, to]: [Extent; 2]) {
        assert_ne!(from.arena, to.arena, "copies are made between arenas");
        assert_eq!(from.range.len(), to.range.len(), "a copy is as long as what is copied");
        let job = Job {
            from: arenas[from.arena].lend(from.range.clone(), false),
            to: arenas[to.arena].lend(to.range.clone(), true),
        };
        self.pending.push_back([from, to]);
        let is_taken = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        assert!(is_taken, "the copying thread is alive");
    }

    /// Waits for the copies from and to a range that have begun, and for those before them.
    pub fn wait(&mut self, arenas: &mut [Arena], extent: &Extent) {
        let meets = |ends: &[Extent; 2]| ends.iter().any(|end| end.meets(extent));
        let last = self.pending.iter().rposition(meets);
        (0..last.map_or(0, |last| last + 1)).for_each(|_| self.take_next(arenas));
    }

    /// Waits for all copies.
    pub fn wait_for_all(&mut self, arenas: &mut [Arena]) {
        (0..self.pending.len()).for_each(|_| self.take_next(arenas));
    }

    fn take_next(&mut self, arenas: &mut [Arena]) {
        let (Ok(Job { from, to }), Some([source, target])) =
            (self.done.recv(), self.pending.pop_front())
        else {
            unreachable!("the thread makes all copies that are begun");
        };
        arenas[source.arena].take_back(from);
        arenas[target.arena].take_back(to);
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It copies what is left, which its loans keep.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use ir::random::mix;

    use super::*;

    fn extent(arena: usize, start: usize, len: usize) -> Extent {
        Extent { arena, range: start..start + len }
    }

    /// Copies end in order: bytes that go through several arenas arrive, whatever is awaited.
    #[test]
    fn copies_are_made_in_their_order() {
        let mut arenas = [0, 1, 2].map(|_| Arena::new(4096).expect("memory"));
        let mut mover = Mover::start(0).expect("a thread");
        let mut expected = [0, 1, 2].map(|_| vec![0_u8; 4096]);
        let seed = 5;
        let draw = |i: u64, n: u64| (mix(seed ^ mix(i)) % n) as usize;
        for round in 0..50 {
            let fresh: Vec<u8> = (0..4096).map(|i| draw(round * 5000 + i, 256) as u8).collect();
            arenas[0].bytes_mut(0..4096).copy_from_slice(&fresh);
            expected[0] = fresh;
            for step in 0..6 {
                let at = 100_000 + round * 100 + step * 10;
                let (from, to) = (draw(at, 3), draw(at + 1, 2));
                let to = (from + 1 + to) % 3;
                let len = draw(at + 2, 512);
                let [source, target] = [draw(at + 3, 3500), draw(at + 4, 3500)];
                let ends = [extent(from, source, len), extent(to, target, len)];
                mover.begin(&mut arenas, ends.clone());
                let bytes = expected[from][source..source + len].to_vec();
                expected[to][target..target + len].copy_from_slice(&bytes);
                if draw(at + 5, 3) == 0 {
                    mover.wait(&mut arenas, &ends[draw(at + 6, 2)]);
                }
            }
            mover.wait_for_all(&mut arenas);
            for (arena, expected) in arenas.iter().zip(&expected) {
                assert!(arena.bytes(0..4096) == &expected[..], "seed {seed} round {round}");
            }
        }
    }

    #[test]
    fn what_is_being_copied_is_left_alone() {
        let mut arenas = [0, 1].map(|_| Arena::new(1024).expect("memory"));
        let mut mover = Mover::start(0).expect("a thread");
        mover.begin(&mut arenas, [extent(0, 0, 64), extent(1, 128, 64)]);
        let refused = |work: &mut dyn FnMut()| catch_unwind(AssertUnwindSafe(work)).is_err();
        assert!(!refused(&mut || _ = arenas[0].bytes(0..64)));
        assert!(refused(&mut || _ = arenas[0].bytes_mut(63..65)));
        assert!(refused(&mut || _ = arenas[1].bytes(191..200)));
        assert!(!refused(&mut || _ = arenas[1].bytes_mut(192..256)));
        mover.wait(&mut arenas, &extent(1, 150, 1));
        assert!(!refused(&mut || _ = arenas[1].bytes_mut(128..192)));
    }
}
