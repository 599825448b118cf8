//! The messages from one rank to another, in order.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::communicator::CommError;
use crate::patience::Patience;

use super::{World, lock};

/// A queue of messages whose buffers are used again.
///
/// Its memory is that of the most messages ever in flight, which the pipeline schedule bounds.
#[derive(Default)]
pub(in crate::local) struct Mailbox {
    messages: Mutex<Messages>,
    arrived: Condvar,
}

#[derive(Default)]
struct Messages {
    waiting: VecDeque<Vec<u8>>,
    free: Vec<Vec<u8>>,
}

/// Who receives, from whom.
#[derive(Clone, Copy)]
pub(in crate::local) struct Receiver<'a> {
    pub(in crate::local) world: &'a World,
    pub(in crate::local) rank: usize,
    pub(in crate::local) from: usize,
    pub(in crate::local) deadline: Duration,
}

impl Mailbox {
    /// Copies a message, whose parts follow each other, into the queue.
    pub(in crate::local) fn put(&self, parts: [&[u8]; 2]) {
        let mut buffer = self.buffer();
        parts.iter().for_each(|part| buffer.extend_from_slice(part));
        self.push(buffer);
    }

    /// An empty buffer for a message.
    pub(in crate::local) fn buffer(&self) -> Vec<u8> {
        let mut buffer = lock(&self.messages).free.pop().unwrap_or_default();
        buffer.clear();
        buffer
    }

    /// Puts a message into the queue.
    pub(in crate::local) fn push(&self, message: Vec<u8>) {
        lock(&self.messages).waiting.push_back(message);
        self.arrived.notify_one();
    }

    /// Gives a buffer back, to be used again.
    pub(in crate::local) fn release(&self, buffer: Vec<u8>) {
        lock(&self.messages).free.push(buffer);
    }

    /// Wakes whoever waits here, to look at the state of the world.
    pub(in crate::local) fn wake(&self) {
        let _messages = lock(&self.messages);
        self.arrived.notify_all();
    }

    /// Takes the oldest message; waits for it if there is none.
    pub(in crate::local) fn take(
        &self,
        receiver: Receiver<'_>,
        bytes: &mut [u8],
    ) -> Result<(), CommError> {
        let message = self.wait(receiver, &|| receive_call(receiver.from, bytes.len()))?;
        if message.len() != bytes.len() {
            return Err(CommError::Mismatch {
                first: receiver.from,
                first_call: format!("send of {} bytes to rank {}", message.len(), receiver.rank),
                second: receiver.rank,
                second_call: receive_call(receiver.from, bytes.len()),
            });
        }
        bytes.copy_from_slice(&message);
        self.release(message);
        Ok(())
    }

    /// Takes the oldest message, in a call that is described; waits for it if there is none.
    pub(in crate::local) fn wait(
        &self,
        receiver: Receiver<'_>,
        call: &dyn Fn() -> String,
    ) -> Result<Vec<u8>, CommError> {
        let Receiver { world, rank, from, deadline } = receiver;
        let mut patience = Patience::new(deadline);
        let mut messages = lock(&self.messages);
        loop {
            if let Some(message) = messages.waiting.pop_front() {
                return Ok(message);
            }
            world.check()?;
            if world.has_left(from) {
                return Err(CommError::Left { rank, call: call(), left: from });
            }
            if patience.is_over() {
                let (missing, waited) = (vec![world.describe(from)], patience.waited());
                return Err(CommError::Deadline { rank, call: call(), missing, waited });
            }
            let woken = self.arrived.wait_timeout(messages, patience.slice());
            messages = woken.unwrap_or_else(PoisonError::into_inner).0;
            patience.count(world.progress());
        }
    }
}

fn receive_call(from: usize, bytes: usize) -> String {
    format!("receive of {bytes} bytes from rank {from}")
}
