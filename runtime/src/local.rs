//! The communicator `local`: ranks are threads of one process, buffers are shared memory.
//!
//! A collective is a rendezvous (module `rendezvous`): every member publishes the addresses of its
//! buffers and waits; when all have arrived, each works on its own part of the result, reading
//! the others' buffers in place; nobody leaves before all have finished, so that a buffer stays
//! borrowed for as long as anyone looks at it. Waiting threads park: ranks may exceed cores.
//!
//! A message is copied into a mailbox (module `mailbox`) whose buffers are used again.
//! No call allocates once mailboxes and groups have been used.
//!
//! Ranks of other processes take part through a [`Transport`]: messages travel through it, and
//! groups with members elsewhere exchange by messages alone (module `multiprocess`).
//!
//! **Failures.** The first rank that fails (a mismatch, a deadline, a panic, [`Local::abort`])
//! ends the world: every waiting and every later call of the others returns an error. A panic is
//! noticed when the rank's [`Local`] is dropped, so a rank's thread must own it.

pub mod arena;
pub mod memory;
pub mod mover;
mod reduce;
mod multiprocess;
#[cfg(test)]
mod tests;
mod world;

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use ir::DType;

use crate::communicator::{
    Blocks, Combiner, CommError, Communicator, Counters, Group, Tokens, Types,
};

use multiprocess::MultiProcess;
use world::World;
use world::mailbox::Receiver;
use world::rendezvous::{self, Call, Caller, Kind, Meeting, Signature};
pub use world::{Channel, Transport};

/// The end of one rank in a world whose ranks are threads.
pub struct Local {
    rank: usize,
    world: Arc<World>,
    deadline: Duration,
    counters: Cell<Counters>,
    calls: RefCell<Vec<Call>>,
    /// The members that a token visits.
    visited: RefCell<Vec<usize>>,
}

impl Local {
    /// What tells whether a rank has failed.
    pub(crate) fn watch(&self) -> impl Fn() -> Result<(), CommError> + Send + 'static {
        let world = Arc::clone(&self.world);
        move || world.check()
    }

    /// Makes a world: one end for each of `size` ranks, in rank order, to be moved to its thread.
    pub fn world(size: usize, deadline: Duration) -> Vec<Local> {
        Local::part(size, 0..size, deadline).0
    }

    /// Makes the part of a world that is in this process: one end for each of its ranks, and where
    /// arrives what the others send. [`Inbox::connect`] leads to these.
    pub fn part(size: usize, here: Range<usize>, deadline: Duration) -> (Vec<Local>, Inbox) {
        let world = Arc::new(World::new(size, here.clone()));
        let end = |rank| Local {
            rank,
            world: Arc::clone(&world),
            deadline,
            counters: Cell::default(),
            calls: RefCell::default(),
            visited: RefCell::default(),
        };
        (here.map(end).collect(), Inbox(Arc::clone(&world)))
    }

    fn count(&self, add: impl FnOnce(&mut Counters)) {
        let mut counters = self.counters.get();
        counters.calls += 1;
        add(&mut counters);
        self.counters.set(counters);
    }

    /// Meets the other members; `work` runs between the arrival of all and the departure of all.
    ///
    /// An error of this rank's own ends the world.
    fn meet(
        &self,
        group: &Group,
        call: Call,
        work: impl FnOnce(&Meeting<'_>),
    ) -> Result<(), CommError> {
        self.world.begin(self.rank, call.signature);
        let calls = &mut *self.calls.borrow_mut();
        let caller = Caller { world: &self.world, rank: self.rank, deadline: self.deadline, calls };
        let result = rendezvous::meet(caller, group, call, work);
        self.world.end(self.rank, &result);
        result
    }
}

/// Where what other processes send arrives in this one's part of a world.
#[derive(Clone)]
pub struct Inbox(Arc<World>);

impl Inbox {
    /// Lets a transport lead to the ranks of other processes; once, before any rank calls.
    pub fn connect(&self, transport: Arc<dyn Transport>) {
        self.0.connect(transport);
    }

    /// Whether a message may go from one rank to another of this process.
    pub fn takes(&self, from: usize, to: usize) -> bool {
        from < self.0.size() && !self.0.is_here(from) && self.0.is_here(to)
    }

    /// An empty buffer for a message, which may have been used before.
    pub fn buffer(&self, channel: Channel, from: usize, to: usize) -> Vec<u8> {
        self.0.mailbox(channel, from, to).buffer()
    }

    /// Delivers a message to a rank of this process.
    pub fn deliver(&self, channel: Channel, from: usize, to: usize, message: Vec<u8>) {
        self.0.mailbox(channel, from, to).push(message);
    }

    /// Notes that a rank failed, and that its process has told all others.
    pub fn note_failure(&self, rank: usize, reason: &str) {
        self.0.note_failure(rank, reason);
    }

    /// Ends the world: a rank of another process is lost.
    pub fn fail(&self, rank: usize, reason: &str) {
        self.0.fail(rank, reason);
    }

    /// Notes that a rank of another process has ended.
    pub fn note_end(&self, rank: usize) {
        self.0.note_end(rank);
    }

    /// Notes that ranks of other processes have finished some instructions.
    pub fn note_progress(&self, instructions: u64) {
        self.0.note_progress(instructions);
    }

    /// The instructions that ranks of this process have finished.
    pub fn progress(&self) -> u64 {
        self.0.own_progress()
    }
}

impl Local {
    /// Exchanges messages with the other members, some of which are in other processes.
    ///
    /// An error of this rank's own ends the world.
    fn across_processes(
        &self,
        group: &Group,
        signature: Signature,
        work: impl FnOnce(&MultiProcess<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        self.world.begin(self.rank, signature);
        let Local { rank, world, deadline, .. } = self;
        let multiprocess = MultiProcess::new(world, *rank, *deadline, group, signature);
        let result = world.check().and_then(|()| work(&multiprocess));
        world.end(*rank, &result);
        result
    }
}

impl Communicator for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.world.size()
    }

    fn all_reduce(
        &self,
        group: &Group,
        types: Types,
        combiner: Combiner,
        buffer: &mut [u8],
    ) -> Result<(), CommError> {
        let size = types.dtype.size() as usize;
        assert_eq!(buffer.len() % size, 0, "a buffer holds whole elements");
        let elements = buffer.len() / size;
        let signature = Signature::of(Kind::AllReduce, group, types.dtype)
            .exchanging(types.exchanged)
            .combining(combiner)
            .cut(1, elements, 1, &[]);
        self.check_reducible(types, signature)?;
        let base = buffer.as_mut_ptr();
        if self.world.spans(group) {
            self.across_processes(group, signature, |it| it.all_reduce(types, combiner, buffer))?;
        } else {
            self.meet(group, Call::new(signature, base), |meeting| {
                let n = group.size();
                let part = |i: usize| elements * i / n..elements * (i + 1) / n;
                let mine = part(meeting.position());
                // SAFETY: all members' buffers have `elements` elements (equal signatures) and stay
                // borrowed until all have finished. In this phase member `i` reads part `i` of
                // every buffer and writes part `i` of its own; parts are disjoint.
                unsafe {
                    let at = mine.start * size;
                    let source = |member| meeting.buffer(member).add(at);
                    reduce::combine(types, combiner, n, &source, base.add(at), mine.len());
                }
                meeting.wait_for_all();
                for other in (0..n).filter(|&other| other != meeting.position()) {
                    let (at, len) = (part(other).start * size, part(other).len() * size);
                    // SAFETY: as above; in this phase part `i` is only read in the buffer of member
                    // `i`, and only written in the buffers of the others, each by its owner.
                    unsafe {
                        ptr::copy_nonoverlapping(meeting.buffer(other).add(at), base.add(at), len)
                    };
                }
            })?;
        }
        let n = group.size() as u64;
        let bytes = elements as u64 * types.exchanged.size();
        self.count(|c| c.all_reduce_bytes += 2 * (n - 1) * bytes / n);
        Ok(())
    }

    fn all_gather(
        &self,
        group: &Group,
        dtype: DType,
        blocks: &Blocks,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError> {
        let size = dtype.size() as usize;
        check_buffers(self.rank, group, blocks, send.len() / size, receive.len() / size);
        let total: usize = blocks.counts.iter().sum();
        let signature = Signature::of(Kind::AllGather, group, dtype).cut(
            blocks.outer,
            total,
            blocks.inner,
            &blocks.counts,
        );
        let base = receive.as_mut_ptr();
        if self.world.spans(group) {
            self.across_processes(group, signature, |it| {
                it.all_gather(size, blocks, send, receive)
            })?;
        } else {
            self.meet(group, Call::new(signature, send.as_ptr()), |meeting| {
                let size = blocks.inner * size;
                for (member, ranges) in blocks.order.placed(&blocks.counts).iter().enumerate() {
                    let source = meeting.buffer(member);
                    let mut from = 0;
                    for o in 0..blocks.outer {
                        for range in ranges {
                            let (at, run) = ((o * total + range.start) * size, range.size * size);
                            // SAFETY: equal signatures mean equal blocks, so the member's `send`
                            // holds `outer` times these ranges, one after the other; it is only
                            // read until all have finished, and `receive` is written by its owner
                            // alone.
                            unsafe {
                                ptr::copy_nonoverlapping(source.add(from), base.add(at), run)
                            };
                            from += run;
                        }
                    }
                }
            })?;
        }
        let others = group.size() as u64 - 1;
        self.count(|c| c.all_gather_bytes += others * send.len() as u64);
        Ok(())
    }

    fn reduce_scatter(
        &self,
        group: &Group,
        types: Types,
        combiner: Combiner,
        blocks: &Blocks,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError> {
        let size = types.dtype.size() as usize;
        check_buffers(self.rank, group, blocks, receive.len() / size, send.len() / size);
        let total: usize = blocks.counts.iter().sum();
        let signature = Signature::of(Kind::ReduceScatter, group, types.dtype)
            .exchanging(types.exchanged)
            .combining(combiner)
            .cut(blocks.outer, total, blocks.inner, &blocks.counts);
        self.check_reducible(types, signature)?;
        let base = receive.as_mut_ptr();
        if self.world.spans(group) {
            self.across_processes(group, signature, |it| {
                it.reduce_scatter(types, combiner, blocks, send, receive)
            })?;
        } else {
            self.meet(group, Call::new(signature, send.as_ptr()), |meeting| {
                let me = meeting.position();
                let ranges = blocks.order.placed(&blocks.counts).swap_remove(me);
                let mut to = 0;
                for o in 0..blocks.outer {
                    for range in &ranges {
                        let at = (o * total + range.start) * blocks.inner * size;
                        let run = range.size * blocks.inner;
                        // SAFETY: equal signatures mean that every member's `send` holds the whole
                        // tensor; it is only read until all have finished, and `receive` is written
                        // by its owner alone, from one end to the other.
                        unsafe {
                            let source = |member| meeting.buffer(member).add(at);
                            let target = base.add(to * size);
                            reduce::combine(types, combiner, group.size(), &source, target, run);
                        }
                        to += run;
                    }
                }
            })?;
        }
        let others = ((send.len() - receive.len()) / size) as u64;
        self.count(|c| c.reduce_scatter_bytes += others * types.exchanged.size());
        Ok(())
    }

    fn all_to_all(
        &self,
        group: &Group,
        dtype: DType,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError> {
        assert_eq!(send.len(), receive.len(), "members exchange equal pieces");
        let piece = send.len() / group.size();
        assert_eq!(piece * group.size(), send.len(), "members exchange equal pieces");
        let signature = Signature::of(Kind::AllToAll, group, dtype).cut(1, send.len(), 1, &[]);
        let base = receive.as_mut_ptr();
        if self.world.spans(group) {
            self.across_processes(group, signature, |it| it.all_to_all(send, receive))?;
        } else {
            self.meet(group, Call::new(signature, send.as_ptr()), |meeting| {
                for member in 0..group.size() {
                    let at = meeting.position() * piece;
                    // SAFETY: equal signatures mean equal lengths, so the member's `send` holds a
                    // piece for each; it is only read until all have finished, and `receive` is
                    // written by its owner alone.
                    unsafe {
                        let source = meeting.buffer(member).add(at);
                        ptr::copy_nonoverlapping(source, base.add(member * piece), piece);
                    }
                }
            })?;
        }
        self.count(|c| c.all_to_all_bytes += (send.len() - piece) as u64);
        Ok(())
    }

    fn dispatch(
        &self,
        group: &Group,
        dtype: DType,
        tokens: &Tokens<'_>,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError> {
        let row = self.check_tokens(group, dtype, tokens, [send.len(), receive.len()]);
        let Tokens { rows, width, experts, .. } = *tokens;
        let signature = Signature::of(Kind::Dispatch, group, dtype).cut(rows, width, experts, &[]);
        let (base, mut got) = (receive.as_mut_ptr(), 0);
        if self.world.spans(group) {
            self.across_processes(group, signature, |it| {
                got = it.dispatch(dtype, tokens, send, receive)?;
                Ok(())
            })?;
        } else {
            self.meet(group, Call::new(signature, send.as_ptr()), |meeting| {
                for member in 0..group.size() {
                    let source = meeting.buffer(member);
                    for at in 0..rows {
                        let to = member * rows + at;
                        if !tokens.has_gate(to, dtype) {
                            continue;
                        }
                        got += u64::from(member != meeting.position());
                        // SAFETY: equal signatures mean equal rows, so the member's `send` holds
                        // this one; it is only read until all have finished, and `receive`, which
                        // holds the rows of all members, is written by its owner alone.
                        unsafe {
                            ptr::copy_nonoverlapping(source.add(at * row), base.add(to * row), row);
                        }
                    }
                }
            })?;
        }
        self.count(|c| c.routed_bytes += got * row as u64);
        Ok(())
    }

    fn combine(
        &self,
        group: &Group,
        dtype: DType,
        tokens: &Tokens<'_>,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError> {
        let row = self.check_tokens(group, dtype, tokens, [receive.len(), send.len()]);
        let Tokens { rows, width, experts, .. } = *tokens;
        let types = Types { dtype, exchanged: dtype };
        let signature = Signature::of(Kind::Combine, group, dtype).combining(Combiner::Sum).cut(
            rows,
            width,
            experts,
            &[],
        );
        self.check_reducible(types, signature)?;
        let (members, base, mut got) = (group.size(), receive.as_mut_ptr(), 0);
        let visited = &mut *self.visited.borrow_mut();
        if self.world.spans(group) {
            self.across_processes(group, signature, |it| {
                got = it.combine(dtype, tokens, send, receive)?;
                Ok(())
            })?;
        } else {
            self.meet(group, Call::new(signature, send.as_ptr()), |meeting| {
                let me = meeting.position();
                for at in 0..rows {
                    visited.clear();
                    visited.extend(
                        (0..members).filter(|member| tokens.has_gate(at * members + member, dtype)),
                    );
                    got += visited.iter().filter(|member| **member != me).count() as u64;
                    // SAFETY: equal signatures mean that every member's `send` holds the rows of
                    // all; it is only read until all have finished, and `receive` is written by its
                    // owner alone. A sum of no terms is zero in all types that are summed.
                    unsafe {
                        let target = base.add(at * row);
                        let source =
                            |i: usize| meeting.buffer(visited[i]).add((me * rows + at) * row);
                        match visited.len() {
                            0 => ptr::write_bytes(target, 0, row),
                            n => reduce::combine(types, Combiner::Sum, n, &source, target, width),
                        }
                    }
                }
            })?;
        }
        self.count(|c| c.routed_bytes += got * row as u64);
        Ok(())
    }

    fn send(&self, to: usize, bytes: &[u8]) -> Result<(), CommError> {
        self.world.check()?;
        self.world.send(Channel::Message, self.rank, to, [bytes, &[]]);
        self.count(|c| c.send_bytes += bytes.len() as u64);
        Ok(())
    }

    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<(), CommError> {
        let signature = Signature::message(Kind::Receive, from, bytes.len());
        self.world.begin(self.rank, signature);
        let receiver =
            Receiver { world: &self.world, rank: self.rank, from, deadline: self.deadline };
        let mailbox = self.world.mailbox(Channel::Message, from, self.rank);
        let result = mailbox.take(receiver, bytes);
        self.world.end(self.rank, &result);
        self.count(|_| ());
        result
    }

    fn barrier(&self, group: &Group) -> Result<(), CommError> {
        let signature = Signature::of(Kind::Barrier, group, DType::I8);
        if self.world.spans(group) {
            self.across_processes(group, signature, |it| it.barrier())?;
        } else {
            self.meet(group, Call::new(signature, ptr::null()), |_| ())?;
        }
        self.count(|_| ());
        Ok(())
    }

    fn abort(&self, reason: &str) {
        self.world.fail(self.rank, reason);
    }

    fn advance(&self) {
        self.world.advance();
    }

    fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    fn counters(&self) -> Counters {
        self.counters.get()
    }
}

impl Local {
    /// Asserts what the program promises about tokens, those of one member and those of all; the
    /// bytes of a row.
    fn check_tokens(
        &self,
        group: &Group,
        dtype: DType,
        tokens: &Tokens<'_>,
        [own, all]: [usize; 2],
    ) -> usize {
        let is_member = group.position(self.rank).is_some();
        assert!(is_member, "a rank calls for groups it is a member of");
        let (members, size) = (group.size(), dtype.size() as usize);
        let (rows, row) = (tokens.rows, tokens.width * size);
        assert_eq!([own, all], [rows * row, members * rows * row], "members have equal tokens");
        let gates = members * rows * tokens.experts * size;
        assert_eq!(tokens.gates.len(), gates, "tokens have a gate for each expert");
        row
    }

    fn check_reducible(&self, types: Types, signature: Signature) -> Result<(), CommError> {
        if reduce::supports(types) {
            return Ok(());
        }
        let error = CommError::Unsupported { rank: self.rank, call: signature.to_string() };
        self.world.fail(self.rank, &error.to_string());
        Err(error)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.world.fail(self.rank, "it panicked");
        }
        self.world.leave(self.rank);
    }
}

/// Asserts what the program promises about one rank's own buffers, in elements.
fn check_buffers(rank: usize, group: &Group, blocks: &Blocks, piece: usize, whole: usize) {
    let me = group.position(rank).expect("a rank calls for groups it is a member of");
    assert_eq!(blocks.counts.len(), group.size(), "blocks have one count per member");
    assert_eq!(piece, blocks.piece(me), "the piece has the elements that the blocks say");
    assert_eq!(whole, blocks.total(), "the whole has the elements that the blocks say");
}
