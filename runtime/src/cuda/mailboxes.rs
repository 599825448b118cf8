//! Messages between the GPUs of one process: copied from one to the other, without the host.
//!
//! A message is copied to memory of its receiver's GPU when it is sent, so that no sender waits for
//! its receiver. When a receiver asks for it, it is there or on its way: the ranks tell each other.
//! Memory is used again once a message was received. The sender's GPU waits for that, which cannot
//! be in vain: all messages of a step come before its collectives across stages.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::context::{Context, Failure, Moment, failure};
use super::memory::{Memory, Piece};

/// The mailboxes of all pairs of ranks.
pub(crate) struct Mailboxes {
    contexts: Vec<Arc<Context>>,
    /// The rank of the first of them.
    first: usize,
    /// From the `f`-th rank to the `t`-th at `f · ranks + t`.
    boxes: Vec<Mutex<Mailbox>>,
}

/// The messages from one rank to another.
#[derive(Default)]
struct Mailbox {
    /// In the order in which they were sent.
    sent: VecDeque<Message>,
    /// Memory whose messages were received.
    free: Vec<Message>,
}

/// Memory of the receiver's GPU, and the moment from which on it holds what it is to, or is read no
/// more.
struct Message {
    memory: Memory,
    ready: Moment,
}

impl Mailboxes {
    /// Mailboxes of ranks on these GPUs, from a first one on.
    pub(crate) fn new(contexts: &[Arc<Context>], first: usize) -> Mailboxes {
        let boxes = (0..contexts.len().pow(2)).map(|_| Mutex::default()).collect();
        Mailboxes { contexts: contexts.to_vec(), first, boxes }
    }

    fn between(&self, from: usize, to: usize) -> MutexGuard<'_, Mailbox> {
        let [from, to] = [from, to].map(|rank| rank - self.first);
        let mailbox = &self.boxes[from * self.contexts.len() + to];
        mailbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends bytes of a rank's GPU to another rank, after all launches that were queued.
    ///
    /// # Errors
    /// The receiver's GPU has too little memory, or the copy cannot be queued.
    pub(crate) fn send(&self, from: usize, to: usize, bytes: &Piece<'_>) -> Result<(), Failure> {
        let [source, target] = [from, to].map(|rank| &self.contexts[rank - self.first]);
        let mut mailbox = self.between(from, to);
        let fits = |message: &Message| message.memory.bytes() == bytes.len();
        let memory = match mailbox.free.iter().position(fits) {
            Some(at) => {
                let Message { memory, ready } = mailbox.free.swap_remove(at);
                ready.precedes_launches_of(source)?;
                memory
            }
            None => Memory::new(target, bytes.len())?,
        };
        source.bind()?;
        let (there, here) = (memory.whole().address(), bytes.address());
        // SAFETY: both have as many bytes, and stay until the driver has freed them, which waits.
        unsafe {
            let stream = std::ptr::null_mut();
            let [source, target] = [source.handle(), target.handle()];
            sys::cuMemcpyPeerAsync(there, target, here, source, bytes.len(), stream)
        }
        .result()
        .map_err(failure("cuMemcpyPeerAsync"))?;
        let ready = source.moment()?;
        mailbox.sent.push_back(Message { memory, ready });
        Ok(())
    }

    /// Receives the oldest message that was sent by a rank.
    ///
    /// # Errors
    /// The copy cannot be queued.
    ///
    /// # Panics
    /// There is none, or it has another length.
    pub(crate) fn receive(&self, from: usize, to: usize, bytes: &Piece<'_>) -> Result<(), Failure> {
        let target = &self.contexts[to - self.first];
        let mut mailbox = self.between(from, to);
        let Some(message) = mailbox.sent.pop_front() else {
            unreachable!("the ranks have told each other that it is sent");
        };
        assert_eq!(message.memory.bytes(), bytes.len(), "messages have one length on both ends");
        message.ready.precedes_launches_of(target)?;
        bytes.copy_from(&message.memory.whole())?;
        let ready = target.moment()?;
        mailbox.free.push(Message { memory: message.memory, ready });
        Ok(())
    }
}
