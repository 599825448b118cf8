//! Collectives of groups with members in several processes: pieces travel as messages.
//!
//! Each member has a piece of the result to make. Terms of a piece go straight to its maker, who
//! adds them in the order of members, and results straight to whoever wants them: every member
//! sends the bytes that a ring would, and sums have the bits that they have within one process.
//! Pieces travel in rounds of [`ROUND_BYTES`], so that a member holds no more than a round of each
//! other one, and two where that one is ahead.
//!
//! A message begins with the call that it belongs to, so that members that call for different
//! things find out.

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use ir::DType;

use crate::communicator::{Blocks, Combiner, CommError, Group, Tokens, Types};
use crate::convert::{Stored, convert};

use super::reduce;
use super::world::mailbox::Receiver;
use super::world::rendezvous::Signature;
use super::world::{Channel, World};

/// Bytes of a piece that travel at a time. Chosen: many times what a connection has under way.
const ROUND_BYTES: usize = 1 << 20;

/// A call of a group with members in several processes.
pub(super) struct MultiProcess<'a> {
    world: &'a World,
    rank: usize,
    deadline: Duration,
    members: &'a [usize],
    /// The place of this rank among them.
    me: usize,
    signature: Signature,
    /// What its messages begin with.
    header: Vec<u8>,
}

/// A message of another member, without its header.
struct Arrived<'a> {
    call: &'a MultiProcess<'a>,
    from: usize,
    message: Vec<u8>,
}

impl Arrived<'_> {
    fn bytes(&self) -> &[u8] {
        &self.message[self.call.header.len()..]
    }
}

impl Drop for Arrived<'_> {
    fn drop(&mut self) {
        let MultiProcess { world, rank, .. } = self.call;
        let mailbox = world.mailbox(Channel::Collective, self.from, *rank);
        mailbox.release(std::mem::take(&mut self.message));
    }
}

impl<'a> MultiProcess<'a> {
    pub(super) fn new(
        world: &'a World,
        rank: usize,
        deadline: Duration,
        group: &'a Group,
        signature: Signature,
    ) -> MultiProcess<'a> {
        let me = group.position(rank).expect("a rank calls for groups it is a member of");
        let header = signature.header();
        MultiProcess { world, rank, deadline, members: group.members(), me, signature, header }
    }

    fn send(&self, member: usize, bytes: &[u8]) {
        let to = self.members[member];
        self.world.send(Channel::Collective, self.rank, to, [&self.header, bytes]);
    }

    /// The next message of a member, of as many bytes.
    fn receive(&self, member: usize, bytes: usize) -> Result<Arrived<'_>, CommError> {
        let from = self.members[member];
        let MultiProcess { world, rank, deadline, .. } = *self;
        let mailbox = world.mailbox(Channel::Collective, from, rank);
        let receiver = Receiver { world, rank, from, deadline };
        let message = mailbox.wait(receiver, &|| self.signature.to_string())?;
        if !message.starts_with(&self.header) || message.len() != self.header.len() + bytes {
            let first_call = self.signature.other(&message);
            let second_call = self.signature.to_string();
            return Err(CommError::Mismatch { first: from, first_call, second: rank, second_call });
        }
        Ok(Arrived { call: self, from, message })
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.members.len()).filter(move |member| *member != me)
    }

    /// Adds the terms of a part of the result, this rank's own and those that arrive.
    fn add(
        &self,
        types: Types,
        combiner: Combiner,
        own: &[u8],
        target: &mut [u8],
    ) -> Result<(), CommError> {
        let receive = |member| self.receive(member, types.bytes(own.len()));
        let arrived: Vec<Arrived<'_>> = self.others().map(receive).collect::<Result<_, _>>()?;
        let mut terms: Vec<Cow<'_, [u8]>> =
            arrived.iter().map(|term| types.restored(term.bytes())).collect();
        terms.insert(self.me, own.into());
        let terms: Vec<&[u8]> = terms.iter().map(AsRef::as_ref).collect();
        reduce::combine_slices(types, combiner, &terms, target);
        Ok(())
    }

    pub(super) fn all_reduce(
        &self,
        types: Types,
        combiner: Combiner,
        buffer: &mut [u8],
    ) -> Result<(), CommError> {
        let (size, n) = (types.dtype.size() as usize, self.members.len());
        let mut own = Vec::new();
        for round in buffer.chunks_mut(n * (ROUND_BYTES / size) * size) {
            let elements = round.len() / size;
            let part = |i: usize| elements * i / n * size..elements * (i + 1) / n * size;
            let mine = part(self.me);
            for member in self.others() {
                self.send(member, &types.exchanged(&round[part(member)]));
            }
            own.clear();
            own.extend_from_slice(&round[mine.clone()]);
            self.add(types, combiner, &own, &mut round[mine.clone()])?;
            let result = types.exchanged(&round[mine]);
            self.others().for_each(|member| self.send(member, &result));
            drop(result);
            for member in self.others() {
                let part = part(member);
                let arrived = self.receive(member, types.bytes(part.len()))?;
                round[part].copy_from_slice(&types.restored(arrived.bytes()));
            }
        }
        Ok(())
    }

    pub(super) fn all_gather(
        &self,
        size: usize,
        blocks: &Blocks,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError> {
        let runs: Vec<Runs> =
            (0..self.members.len()).map(|member| Runs::new(blocks, member, size)).collect();
        let place = |runs: &Runs, from: usize, bytes: &[u8], receive: &mut [u8]| {
            runs.walk(from..from + bytes.len(), |whole, piece| {
                receive[whole].copy_from_slice(&bytes[piece.start - from..piece.end - from]);
            });
        };
        place(&runs[self.me], 0, send, receive);
        for round in rounds(&runs) {
            let own = clip(&round, send.len());
            self.others().for_each(|member| self.send(member, &send[own.clone()]));
            for member in self.others() {
                let part = clip(&round, runs[member].bytes);
                let arrived = self.receive(member, part.len())?;
                place(&runs[member], part.start, arrived.bytes(), receive);
            }
        }
        Ok(())
    }

    pub(super) fn reduce_scatter(
        &self,
        types: Types,
        combiner: Combiner,
        blocks: &Blocks,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError> {
        let size = types.dtype.size() as usize;
        let runs: Vec<Runs> =
            (0..self.members.len()).map(|member| Runs::new(blocks, member, size)).collect();
        let mut packed = Vec::new();
        for round in rounds(&runs) {
            let pack = |member: usize, packed: &mut Vec<u8>| {
                packed.clear();
                let part = clip(&round, runs[member].bytes);
                runs[member].walk(part, |whole, _| packed.extend_from_slice(&send[whole]));
            };
            for member in self.others() {
                pack(member, &mut packed);
                self.send(member, &types.exchanged(&packed));
            }
            pack(self.me, &mut packed);
            let part = clip(&round, receive.len());
            self.add(types, combiner, &packed, &mut receive[part])?;
        }
        Ok(())
    }

    pub(super) fn all_to_all(&self, send: &[u8], receive: &mut [u8]) -> Result<(), CommError> {
        let piece = send.len() / self.members.len();
        let part = |member: usize, from: usize, bytes: usize| {
            let start = member * piece + from;
            start..start + bytes
        };
        let own = part(self.me, 0, piece);
        receive[own.clone()].copy_from_slice(&send[own]);
        for from in (0..piece).step_by(ROUND_BYTES) {
            let bytes = ROUND_BYTES.min(piece - from);
            self.others().for_each(|member| self.send(member, &send[part(member, from, bytes)]));
            for member in self.others() {
                let arrived = self.receive(member, bytes)?;
                receive[part(member, from, bytes)].copy_from_slice(arrived.bytes());
            }
        }
        Ok(())
    }

    /// Gets rows of other members, as many as have a gate; how many these are.
    pub(super) fn dispatch(
        &self,
        dtype: DType,
        tokens: &Tokens<'_>,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<u64, CommError> {
        let row = tokens.width * dtype.size() as usize;
        let rows = tokens.rows;
        let is_wanted = |member: usize, at: usize| tokens.has_gate(member * rows + at, dtype);
        let arrived = self.fetch(rows, row, is_wanted, |_, at| &send[at * row..][..row])?;
        let mut got = 0;
        for member in 0..self.members.len() {
            let wanted = (0..rows).filter(|at| is_wanted(member, *at));
            let mut arrived = arrived[member].as_ref().map(|it| it.bytes().chunks_exact(row));
            for at in wanted {
                let to = (member * rows + at) * row;
                let source = match &mut arrived {
                    Some(arrived) => arrived.next().unwrap_or_default(),
                    None => &send[at * row..][..row],
                };
                receive[to..to + row].copy_from_slice(source);
                got += u64::from(member != self.me);
            }
        }
        Ok(got)
    }

    /// Adds rows of other members, those that have a gate; how many these are.
    pub(super) fn combine(
        &self,
        dtype: DType,
        tokens: &Tokens<'_>,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<u64, CommError> {
        let (members, rows) = (self.members.len(), tokens.rows);
        let row = tokens.width * dtype.size() as usize;
        let is_wanted = |member: usize, at: usize| tokens.has_gate(at * members + member, dtype);
        let source = |member: usize, at: usize| &send[(member * rows + at) * row..][..row];
        let arrived = self.fetch(rows, row, is_wanted, source)?;
        let mut arrived: Vec<_> =
            arrived.iter().map(|it| it.as_ref().map(|it| it.bytes().chunks_exact(row))).collect();
        let (mut terms, mut got) = (Vec::new(), 0);
        for (at, target) in receive.chunks_exact_mut(row).enumerate() {
            terms.clear();
            for member in (0..members).filter(|member| is_wanted(*member, at)) {
                terms.push(match &mut arrived[member] {
                    Some(arrived) => arrived.next().unwrap_or_default(),
                    None => source(member, at),
                });
                got += u64::from(member != self.me);
            }
            if terms.is_empty() {
                target.fill(0);
            } else {
                reduce::combine_slices(dtype.into(), Combiner::Sum, &terms, target);
            }
        }
        Ok(got)
    }

    /// Asks the other members for rows, and gives them those that they ask for: by member, one
    /// after the other; none for this rank.
    fn fetch<'b>(
        &self,
        rows: usize,
        row: usize,
        is_wanted: impl Fn(usize, usize) -> bool,
        source: impl Fn(usize, usize) -> &'b [u8],
    ) -> Result<Vec<Option<Arrived<'_>>>, CommError> {
        for member in self.others() {
            let wanted: Vec<u8> = (0..rows).map(|at| u8::from(is_wanted(member, at))).collect();
            self.send(member, &wanted);
        }
        let mut packed = Vec::new();
        for member in self.others() {
            let asked = self.receive(member, rows)?;
            packed.clear();
            for (at, _) in asked.bytes().iter().enumerate().filter(|(_, asked)| **asked != 0) {
                packed.extend_from_slice(source(member, at));
            }
            self.send(member, &packed);
        }
        let mut arrived = Vec::new();
        for member in 0..self.members.len() {
            let wanted = (0..rows).filter(|at| is_wanted(member, *at)).count();
            let is_other = member != self.me;
            arrived.push(is_other.then(|| self.receive(member, wanted * row)).transpose()?);
        }
        Ok(arrived)
    }

    pub(super) fn barrier(&self) -> Result<(), CommError> {
        self.others().for_each(|member| self.send(member, &[]));
        self.others().try_for_each(|member| self.receive(member, 0).map(drop))
    }
}

impl Types {
    /// Elements as they travel.
    fn exchanged(self, bytes: &[u8]) -> Cow<'_, [u8]> {
        let Types { dtype, exchanged } = self;
        if dtype == exchanged {
            return bytes.into();
        }
        convert(Stored::DType(dtype), bytes, exchanged).into()
    }

    /// Elements as they are in memory, from what travels.
    fn restored(self, bytes: &[u8]) -> Cow<'_, [u8]> {
        Types { dtype: self.exchanged, exchanged: self.dtype }.exchanged(bytes)
    }

    /// Bytes that some bytes of memory are when they travel.
    fn bytes(self, bytes: usize) -> usize {
        bytes / self.dtype.size() as usize * self.exchanged.size() as usize
    }
}

/// Where the piece of a member lies in a whole tensor, in bytes.
struct Runs {
    /// The ranges, in the order of the piece.
    ranges: Vec<Range<usize>>,
    bytes: usize,
}

impl Runs {
    fn new(blocks: &Blocks, member: usize, size: usize) -> Runs {
        let total: usize = blocks.counts.iter().sum();
        let width = blocks.inner * size;
        let placed = blocks.order.placed(&blocks.counts).swap_remove(member);
        let at = |o: usize| placed.iter().map(move |range| (o * total + range.start, range.size));
        let runs = (0..blocks.outer).flat_map(at);
        let ranges = runs.map(|(start, count)| start * width..(start + count) * width).collect();
        Runs { ranges, bytes: blocks.piece(member) * size }
    }

    /// Calls for each part of the whole that has some bytes of the piece, and which these are.
    fn walk(&self, wanted: Range<usize>, mut work: impl FnMut(Range<usize>, Range<usize>)) {
        let mut before = 0;
        for run in &self.ranges {
            let (from, to) = (wanted.start.max(before), wanted.end.min(before + run.len()));
            if from < to {
                work(run.start + from - before..run.start + to - before, from..to);
            }
            before += run.len();
        }
    }
}

/// The rounds in which all pieces travel, as ranges of bytes of a piece.
fn rounds(runs: &[Runs]) -> impl Iterator<Item = Range<usize>> + use<> {
    let longest = runs.iter().map(|runs| runs.bytes).max().unwrap_or(0);
    (0..longest).step_by(ROUND_BYTES).map(|start| start..start + ROUND_BYTES)
}

/// What a round has of a piece.
fn clip(round: &Range<usize>, bytes: usize) -> Range<usize> {
    round.start.min(bytes)..round.end.min(bytes)
}
