//! What the ranks of one process share: meeting places, mailboxes, and who failed or left.

pub(super) mod mailbox;
pub(super) mod rendezvous;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::communicator::{CommError, Group};

use mailbox::Mailbox;
use rendezvous::{Place, Signature};

/// The shared state of a world.
///
/// Locks are taken in the order `places`, then one place or mailbox, then `failure` or `activity`.
pub(super) struct World {
    places: Mutex<Vec<Arc<Place>>>,
    /// From rank `f` to rank `t` at `f · size + t`.
    mailboxes: Vec<Mailbox>,
    failure: Mutex<Option<(usize, String)>>,
    ranks: Vec<Rank>,
    /// Instructions that ranks have finished, all together.
    progress: AtomicU64,
}

#[derive(Default)]
struct Rank {
    activity: Mutex<Option<Signature>>,
    left: AtomicBool,
}

impl World {
    pub(super) fn new(size: usize) -> World {
        World {
            places: Mutex::default(),
            mailboxes: (0..size * size).map(|_| Mailbox::default()).collect(),
            failure: Mutex::default(),
            ranks: (0..size).map(|_| Rank::default()).collect(),
            progress: AtomicU64::new(0),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The messages from one rank to another.
    pub(super) fn mailbox(&self, from: usize, to: usize) -> &Mailbox {
        let size = self.size();
        assert!(from < size && to < size, "messages are between ranks of the world");
        &self.mailboxes[from * size + to]
    }

    /// Where a group meets; made on its first call.
    pub(super) fn place(&self, group: &Group) -> Arc<Place> {
        let mut places = lock(&self.places);
        if let Some(place) = places.iter().find(|place| place.is_of(group)) {
            return Arc::clone(place);
        }
        let last = group.members().iter().max();
        assert!(last.is_some_and(|&rank| rank < self.size()), "members are ranks of the world");
        let place = Arc::new(Place::new(group));
        places.push(Arc::clone(&place));
        place
    }

    /// Notes that a rank has finished an instruction.
    pub(super) fn advance(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// How many instructions ranks have finished.
    pub(super) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Notes what a rank is about to do.
    pub(super) fn begin(&self, rank: usize, call: Signature) {
        *lock(&self.ranks[rank].activity) = Some(call);
    }

    /// Notes that a rank has done it, or that it failed, which ends the world.
    pub(super) fn end(&self, rank: usize, result: &Result<(), CommError>) {
        *lock(&self.ranks[rank].activity) = None;
        if let Err(error) = result {
            self.fail(rank, &error.to_string());
        }
    }

    /// A rank and what it is doing, for messages.
    pub(super) fn describe(&self, rank: usize) -> String {
        match *lock(&self.ranks[rank].activity) {
            Some(call) => format!("rank {rank}, which is in {call}"),
            None => format!("rank {rank}, which is between calls"),
        }
    }

    /// Ends the world; the first failure is the one that is reported.
    pub(super) fn fail(&self, rank: usize, reason: &str) {
        lock(&self.failure).get_or_insert_with(|| (rank, reason.to_owned()));
        self.wake_all();
    }

    /// Notes that a rank has ended.
    pub(super) fn leave(&self, rank: usize) {
        self.ranks[rank].left.store(true, Ordering::SeqCst);
        self.wake_all();
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.ranks[rank].left.load(Ordering::SeqCst)
    }

    /// An error if some rank has failed.
    pub(super) fn check(&self) -> Result<(), CommError> {
        match &*lock(&self.failure) {
            Some((rank, reason)) => Err(CommError::Peer { rank: *rank, reason: reason.clone() }),
            None => Ok(()),
        }
    }

    fn wake_all(&self) {
        for place in lock(&self.places).iter() {
            place.wake();
        }
        for mailbox in &self.mailboxes {
            mailbox.wake();
        }
    }
}

/// Locks, also after a panic elsewhere: no invariant spans a panic under these locks.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
