//! The batches of the steps to come, read on a thread while a step runs.
//!
//! What is read depends on nothing but the number of the step, so that reading ahead changes no
//! order. Two batches go round between the thread and the training: one that is trained on, and one
//! that is filled; no step allocates.

use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::{Batch, Batches};
use crate::error::Error;

/// Batches that go round.
const BATCHES: usize = 2;

/// Reads ahead until it is dropped, which waits for its thread.
pub struct Prefetch {
    /// What comes, and what goes back; none while the thread is ended.
    channels: Option<(Receiver<Batch>, SyncSender<Batch>)>,
    thread: Option<JoinHandle<()>>,
    current: Option<Batch>,
    /// The step of the next batch.
    next: u64,
}

impl Prefetch {
    /// Begins to read the global batches of steps, counted from 0.
    ///
    /// **Errors.** The system starts no thread.
    pub fn start(batches: &Batches, steps: Range<u64>) -> Result<Prefetch, Error> {
        let (full, ready) = sync_channel(BATCHES);
        let (empty, free) = sync_channel(BATCHES);
        for _ in 0..BATCHES {
            empty.send(Batch::default()).expect("the other end is in this function");
        }
        let (batches, next) = (batches.clone(), steps.start);
        let read = move || {
            for step in steps {
                let Ok(mut batch) = free.recv() else { return };
                batches.fill_global(step, &mut batch);
                if full.send(batch).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("data".to_owned()).spawn(read);
        let thread =
            thread.map_err(|source| Error::Threads { whom: "the data".to_owned(), source })?;
        let channels = Some((ready, empty));
        Ok(Prefetch { channels, thread: Some(thread), current: None, next })
    }

    /// The batch of the next step.
    ///
    /// # Panics
    /// After the last step; and, with the same words, where reading a batch panicked.
    pub fn next_batch(&mut self) -> &Batch {
        if let (Some(used), Some((_, empty))) = (self.current.take(), &self.channels) {
            // Nobody takes it after the last batch was read.
            let _ = empty.send(used);
        }
        let ready = self.channels.as_ref().and_then(|(ready, _)| ready.recv().ok());
        let Some(batch) = ready else { self.end() };
        self.next += 1;
        self.current.insert(batch)
    }

    /// Says why there is no batch.
    fn end(&mut self) -> ! {
        self.channels = None;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
        panic!("step {} is beyond those that are read", self.next);
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.channels = None;
        if let Some(thread) = self.thread.take() {
            // Its panic has been told by the call that waited for the batch, or matters no more.
            let _ = thread.join();
        }
    }
}
