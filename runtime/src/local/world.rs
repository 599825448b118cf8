//! What the ranks of one process share: meeting places, mailboxes, and who failed or left.
//!
//! Ranks of other processes are known by number, and a [`Transport`] leads to them.

pub(super) mod mailbox;
pub(super) mod rendezvous;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::communicator::{CommError, Group};

use mailbox::Mailbox;
use rendezvous::{Place, Signature};

/// What a message is part of. Messages of each are received in the order in which they were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// A send of the program.
    Message,
    /// A collective.
    Collective,
}

impl Channel {
    const COUNT: usize = 2;
}

/// Leads to the ranks of other processes. What it cannot deliver ends the world.
pub trait Transport: Send + Sync {
    /// Carries a message, whose parts follow each other, to a rank that is not here. The bytes are
    /// taken before it returns, and it never waits for that rank.
    fn send(&self, channel: Channel, from: usize, to: usize, parts: [&[u8]; 2]);

    /// Tells the other processes that a rank of this one failed.
    fn broadcast_failure(&self, rank: usize, reason: &str);

    /// Tells the other processes that a rank of this one has ended.
    fn broadcast_end(&self, rank: usize);

    /// The machine of a rank, for messages.
    fn machine(&self, rank: usize) -> String;
}

/// The shared state of a world.
///
/// Locks are taken in the order `places`, then one place or mailbox, then `failure` or `activity`.
pub(super) struct World {
    places: Mutex<Vec<Arc<Place>>>,
    /// The ranks of this process.
    here: Range<usize>,
    /// Leads to the others.
    transport: OnceLock<Arc<dyn Transport>>,
    /// From rank `f` to the `t`-th rank of this process at `(f · here + t) · channels`.
    mailboxes: Vec<Mailbox>,
    failure: Mutex<Option<(usize, String)>>,
    ranks: Vec<Rank>,
    /// Instructions that ranks of this process have finished, all together.
    progress: AtomicU64,
    /// Those of other processes, as far as they have told.
    told: AtomicU64,
}

#[derive(Default)]
struct Rank {
    activity: Mutex<Option<Signature>>,
    left: AtomicBool,
}

impl World {
    pub(super) fn new(size: usize, here: Range<usize>) -> World {
        assert!(here.end <= size, "the ranks of a process are some of the world");
        let mailboxes = size * here.len() * Channel::COUNT;
        World {
            places: Mutex::default(),
            here,
            transport: OnceLock::new(),
            mailboxes: (0..mailboxes).map(|_| Mailbox::default()).collect(),
            failure: Mutex::default(),
            ranks: (0..size).map(|_| Rank::default()).collect(),
            progress: AtomicU64::new(0),
            told: AtomicU64::new(0),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Whether a rank is in this process.
    pub(super) fn is_here(&self, rank: usize) -> bool {
        self.here.contains(&rank)
    }

    /// Whether some member of a group is in another process.
    pub(super) fn spans(&self, group: &Group) -> bool {
        group.members().iter().any(|member| !self.here.contains(member))
    }

    /// The messages from one rank to one of this process.
    pub(super) fn mailbox(&self, channel: Channel, from: usize, to: usize) -> &Mailbox {
        assert!(from < self.size() && self.here.contains(&to), "messages are between ranks");
        let at = from * self.here.len() + to - self.here.start;
        &self.mailboxes[at * Channel::COUNT + channel as usize]
    }

    /// Sends a message, whose parts follow each other.
    pub(super) fn send(&self, channel: Channel, from: usize, to: usize, parts: [&[u8]; 2]) {
        if self.here.contains(&to) {
            self.mailbox(channel, from, to).put(parts);
        } else {
            assert!(to < self.size(), "messages are between ranks of the world");
            let transport = self.transport.get();
            transport.expect("a transport leads to other processes").send(channel, from, to, parts);
        }
    }

    /// Lets a transport lead to the ranks of other processes.
    pub(super) fn connect(&self, transport: Arc<dyn Transport>) {
        assert!(self.transport.set(transport).is_ok(), "a world is connected once");
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

    /// Notes that a rank of this process has finished an instruction.
    pub(super) fn advance(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that ranks of another process have finished some.
    pub(super) fn note_progress(&self, instructions: u64) {
        self.told.fetch_add(instructions, Ordering::Relaxed);
    }

    /// How many instructions the ranks of this process have finished.
    pub(super) fn own_progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// How many instructions ranks have finished.
    pub(super) fn progress(&self) -> u64 {
        self.own_progress().wrapping_add(self.told.load(Ordering::Relaxed))
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
        if let Some(transport) = self.transport.get().filter(|_| !self.here.contains(&rank)) {
            return format!("rank {rank}, which is on {}", transport.machine(rank));
        }
        match *lock(&self.ranks[rank].activity) {
            Some(call) => format!("rank {rank}, which is in {call}"),
            None => format!("rank {rank}, which is between calls"),
        }
    }

    /// Ends the world; the first failure is the one that is reported.
    pub(super) fn fail(&self, rank: usize, reason: &str) {
        let is_news = self.note_failure(rank, reason);
        if let Some(transport) = self.transport.get().filter(|_| is_news) {
            transport.broadcast_failure(rank, reason);
        }
    }

    /// Ends the world in this process; whether it had not ended before.
    pub(super) fn note_failure(&self, rank: usize, reason: &str) -> bool {
        let mut failure = lock(&self.failure);
        let is_news = failure.is_none();
        failure.get_or_insert_with(|| (rank, reason.to_owned()));
        drop(failure);
        self.wake_all();
        is_news
    }

    /// Notes that a rank of this process has ended.
    pub(super) fn leave(&self, rank: usize) {
        self.note_end(rank);
        if let Some(transport) = self.transport.get() {
            transport.broadcast_end(rank);
        }
    }

    /// Notes that a rank has ended, of whichever process.
    pub(super) fn note_end(&self, rank: usize) {
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
