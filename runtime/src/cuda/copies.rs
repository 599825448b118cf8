//! Copies between a GPU and the host's memory, on a stream of their own, while the GPU computes.
//!
//! A copy begins after the launches that were queued before it, and is made in the order in which
//! copies begin. What waits for one is the stream of launches, and not the rank.

use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::result::{self, event, stream};
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUstream};

use super::context::{Context, Failure, failure};
use super::memory::Piece;
use crate::local::arena::Lent;
use crate::local::mover::Extent;

/// Copies that have begun.
pub(super) struct Copies {
    context: Arc<Context>,
    stream: CUstream,
    /// Each with what it copies from and to, and the event that follows it; the oldest first.
    pending: VecDeque<([Extent; 2], CUevent)>,
    /// Events that nobody waits for any more.
    idle: Vec<CUevent>,
    /// What copies have of which arena, until the host knows that they have ended.
    lent: Vec<(usize, Lent)>,
    /// Memory of the host that is locked into its pages, from where copies are fast.
    locked: Option<Lent>,
}

// SAFETY: handles of the driver, which takes calls of any thread.
unsafe impl Send for Copies {}

/// Where a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the GPU to the host.
    ToHost,
    /// From the host to the GPU.
    ToDevice,
}

impl Copies {
    /// Copies of a GPU. `host` is memory that they will read and write and that may be locked; what
    /// the system does not lock is copied all the same.
    ///
    /// # Errors
    /// The GPU has no more streams.
    pub(super) fn new(context: &Arc<Context>, host: Lent) -> Result<Copies, Failure> {
        context.bind()?;
        let stream = stream::create(stream::StreamKind::NonBlocking);
        let stream = stream.map_err(failure("cuStreamCreate"))?;
        let lock = |lent: &Lent| {
            let (start, len) = lent.bytes();
            // SAFETY: the memory is kept until it is unlocked.
            len > 0 && unsafe { sys::cuMemHostRegister_v2(start.cast(), len, 0) }.result().is_ok()
        };
        let locked = Some(host).filter(lock);
        let (pending, idle, lent) = (VecDeque::new(), Vec::new(), Vec::new());
        Ok(Copies { context: Arc::clone(context), stream, pending, idle, lent, locked })
    }

    /// Begins a copy, after all launches that were queued.
    ///
    /// # Errors
    /// It cannot be queued.
    ///
    /// # Panics
    /// The ends differ in length.
    pub(super) fn begin(
        &mut self,
        direction: Direction,
        device: &Piece<'_>,
        (arena, host): (usize, Lent),
        ends: [Extent; 2],
    ) -> Result<(), Failure> {
        self.context.bind()?;
        let (start, len) = host.bytes();
        assert_eq!(len, device.len(), "a copy is as long as what is copied");
        let [after, done] = [self.event()?, self.event()?];
        // SAFETY: the events and the stream exist; the null stream always does.
        unsafe {
            event::record(after, std::ptr::null_mut()).map_err(failure("cuEventRecord"))?;
            sys::cuStreamWaitEvent(self.stream, after, 0)
                .result()
                .map_err(failure("cuStreamWaitEvent"))?;
        }
        // SAFETY: what is lent stays until the host knows that the copy has ended, and nothing else
        // uses it meanwhile; the memory of the GPU stays as long as this.
        unsafe {
            match direction {
                Direction::ToHost => {
                    let bytes = std::slice::from_raw_parts_mut(start, len);
                    result::memcpy_dtoh_async(bytes, device.address(), self.stream)
                        .map_err(failure("cuMemcpyDtoHAsync"))?;
                }
                Direction::ToDevice => {
                    let bytes = std::slice::from_raw_parts(start.cast_const(), len);
                    result::memcpy_htod_async(device.address(), bytes, self.stream)
                        .map_err(failure("cuMemcpyHtoDAsync"))?;
                }
            }
            event::record(done, self.stream).map_err(failure("cuEventRecord"))?;
        }
        self.idle.push(after);
        self.pending.push_back((ends, done));
        self.lent.push((arena, host));
        Ok(())
    }

    /// Lets launches that are queued from now on wait for the copies from and to a range.
    ///
    /// # Errors
    /// The wait cannot be queued.
    pub(super) fn wait(&mut self, extent: &Extent) -> Result<(), Failure> {
        let meets = |(ends, _): &([Extent; 2], CUevent)| ends.iter().any(|end| end.meets(extent));
        let Some(last) = self.pending.iter().rposition(meets) else { return Ok(()) };
        self.context.bind()?;
        // SAFETY: the event exists and was recorded; the null stream always exists.
        unsafe { sys::cuStreamWaitEvent(std::ptr::null_mut(), self.pending[last].1, 0) }
            .result()
            .map_err(failure("cuStreamWaitEvent"))?;
        // Copies are made in their order, so that those before it have ended, too.
        self.idle.extend(self.pending.drain(..=last).map(|(_, event)| event));
        Ok(())
    }

    /// Waits for all copies, and returns what they have of which arena.
    ///
    /// # Errors
    /// One of them has failed.
    pub(super) fn finish(&mut self) -> Result<Vec<(usize, Lent)>, Failure> {
        self.context.bind()?;
        // SAFETY: the stream exists.
        let done = unsafe { sys::cuStreamSynchronize(self.stream) }.result();
        self.idle.extend(self.pending.drain(..).map(|(_, event)| event));
        done.map_err(failure("cuStreamSynchronize"))?;
        Ok(std::mem::take(&mut self.lent))
    }

    /// An event that nobody waits for.
    fn event(&mut self) -> Result<CUevent, Failure> {
        let new = || event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let found = self.idle.pop().map_or_else(new, Ok);
        found.map_err(failure("cuEventCreate"))
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // What copies still use is given back after they have ended.
        let _ = self.finish();
        // SAFETY: nobody else has the events, the stream and the locks, and no copy is left.
        unsafe {
            for event in self.idle.drain(..) {
                let _ = event::destroy(event);
            }
            if let Some(lent) = &self.locked {
                let _ = sys::cuMemHostUnregister(lent.bytes().0.cast());
            }
            let _ = sys::cuStreamDestroy_v2(self.stream);
        }
    }
}
