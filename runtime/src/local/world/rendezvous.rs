//! The meeting of a group's members for one collective.
//!
//! A meeting has phases: arrive, work (one or two of them), leave. Only the arrival can fail: a
//! member that is alone may give up, and withdraws what it published under the lock that counts
//! arrivals. Once all have arrived, everyone stays until all have finished, whatever happens
//! elsewhere; that keeps the published addresses valid.

use std::cell::Cell;
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ir::DType;
use ir::random::mix;

use crate::communicator::{Combiner, CommError, Group};
use crate::patience::Patience;

use super::{World, lock};

/// What kind of call a rank makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::local) enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Dispatch,
    Combine,
    Barrier,
    Receive,
}

impl Kind {
    /// Phases between the arrival of all and the departure of all. At least one: calls are read
    /// in it, so nobody may publish the next one yet.
    fn phases(self) -> usize {
        match self {
            Kind::AllReduce => 2,
            Kind::AllGather
            | Kind::ReduceScatter
            | Kind::AllToAll
            | Kind::Dispatch
            | Kind::Combine
            | Kind::Barrier
            | Kind::Receive => 1,
        }
    }
}

/// Everything about a call that all members must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::local) struct Signature {
    kind: Kind,
    dtype: DType,
    exchanged: DType,
    combiner: Option<Combiner>,
    /// The id of the group; of a message, the other rank.
    group: u32,
    /// A hash of the members in order.
    order: u64,
    dims: [usize; 3],
    /// A hash of the counts.
    counts: u64,
}

impl Signature {
    /// A call of a group.
    pub(in crate::local) fn of(kind: Kind, group: &Group, dtype: DType) -> Signature {
        let order = hash(group.members());
        Signature {
            kind,
            dtype,
            exchanged: dtype,
            combiner: None,
            group: group.id(),
            order,
            dims: [0; 3],
            counts: 0,
        }
    }

    /// A message.
    pub(in crate::local) fn message(kind: Kind, other: usize, bytes: usize) -> Signature {
        let dims = [1, bytes, 1];
        let group = u32::try_from(other).expect("a world has fewer than 2^32 ranks");
        let dtype = DType::I8;
        Signature {
            kind,
            dtype,
            exchanged: dtype,
            combiner: None,
            group,
            order: 0,
            dims,
            counts: 0,
        }
    }

    pub(in crate::local) fn exchanging(self, exchanged: DType) -> Signature {
        Signature { exchanged, ..self }
    }

    pub(in crate::local) fn combining(self, combiner: Combiner) -> Signature {
        Signature { combiner: Some(combiner), ..self }
    }

    pub(in crate::local) fn cut(
        self,
        outer: usize,
        middle: usize,
        inner: usize,
        counts: &[usize],
    ) -> Signature {
        Signature { dims: [outer, middle, inner], counts: hash(counts), ..self }
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.kind {
            Kind::AllReduce => "all_reduce",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Dispatch => "dispatch",
            Kind::Combine => "combine",
            Kind::Barrier => return write!(f, "barrier of group {}", self.group),
            Kind::Receive => {
                return write!(f, "receive of {} bytes from rank {}", self.dims[1], self.group);
            }
        };
        let [outer, middle, inner] = self.dims;
        write!(f, "{name}")?;
        if let Some(combiner) = self.combiner {
            write!(f, " {}", combiner.name())?;
        }
        write!(f, " {}[{outer}, {middle}, {inner}]", self.dtype)?;
        if self.exchanged != self.dtype {
            write!(f, " as {}", self.exchanged)?;
        }
        write!(f, " of group {}", self.group)
    }
}

impl Signature {
    /// What messages of the call begin with: all that members must agree on.
    pub(in crate::local) fn header(&self) -> Vec<u8> {
        let text = self.to_string();
        let numbers = [self.order, self.counts, text.len() as u64];
        let mut header = numbers.map(u64::to_le_bytes).concat();
        header.extend_from_slice(text.as_bytes());
        header
    }

    /// The call that a message begins with, in words, which say how it differs from this one.
    pub(in crate::local) fn other(&self, message: &[u8]) -> String {
        let Some((numbers, text)) = message.split_first_chunk::<24>() else {
            return "what is no call".to_owned();
        };
        let [order, counts, length] = [0, 1, 2].map(|at| numbers.as_chunks().0[at]);
        let [order, counts, length] = [order, counts, length].map(u64::from_le_bytes);
        let text = text.get(..length as usize).unwrap_or(text);
        let text = String::from_utf8_lossy(text).into_owned();
        if text != self.to_string() {
            return text;
        }
        text + difference(&Signature { order, counts, ..*self }, self)
    }
}

/// How two calls with equal texts differ.
fn difference(a: &Signature, b: &Signature) -> &'static str {
    match (a.order == b.order, a.counts == b.counts) {
        (true, true) => "",
        (false, _) => " with its members in another order",
        (true, false) => " cut into other pieces",
    }
}

fn hash(numbers: &[usize]) -> u64 {
    numbers.iter().fold(mix(numbers.len() as u64), |h, &n| {
        mix(h.rotate_left(17) ^ mix((n as u64).wrapping_add(0x9e37_79b9_7f4a_7c15)))
    })
}

/// A published call: what it is, and where its buffers are.
#[derive(Clone, Copy)]
pub(in crate::local) struct Call {
    pub(in crate::local) signature: Signature,
    send: *const u8,
}

// SAFETY: the address is only followed between the arrival and the departure of all members,
// while the thread that published it keeps the buffer borrowed.
unsafe impl Send for Call {}

impl Call {
    pub(in crate::local) fn new(signature: Signature, send: *const u8) -> Call {
        Call { signature, send }
    }
}

/// Where the members of one group meet, again and again.
pub(in crate::local) struct Place {
    id: u32,
    /// The members, ascending: independent of the order that a caller believes in.
    members: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Counts completed phases of all meetings.
    phase: u64,
    arrived: Vec<bool>,
    calls: Vec<Option<Call>>,
}

impl Place {
    pub(in crate::local) fn new(group: &Group) -> Place {
        let mut members = group.members().to_vec();
        members.sort_unstable();
        let n = members.len();
        let state = State { phase: 0, arrived: vec![false; n], calls: vec![None; n] };
        Place { id: group.id(), members, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(in crate::local) fn is_of(&self, group: &Group) -> bool {
        self.id == group.id()
            && self.members.len() == group.size()
            && group.members().iter().all(|m| self.members.binary_search(m).is_ok())
    }

    /// Wakes everyone who waits here, to look at the state of the world.
    pub(in crate::local) fn wake(&self) {
        let _state = self.lock();
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn slot(&self, rank: usize) -> usize {
        self.members.binary_search(&rank).expect("a meeting is of the group's members")
    }

    /// Marks a member as arrived; the last one opens the next phase. Returns the phase to leave.
    fn arrive(&self, state: &mut State, slot: usize) -> u64 {
        let phase = state.phase;
        state.arrived[slot] = true;
        if state.arrived.iter().all(|&a| a) {
            state.arrived.fill(false);
            state.phase += 1;
            self.changed.notify_all();
        }
        phase
    }

    /// Waits for all members, without a way out.
    fn wait_for_all(&self, slot: usize) {
        let mut state = self.lock();
        let phase = self.arrive(&mut state, slot);
        while state.phase == phase {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Copies what the members of a group published, in the group's order.
    fn read_calls(&self, group: &Group, calls: &mut Vec<Call>) {
        let state = self.lock();
        let published = |&member| state.calls[self.slot(member)].expect("all have arrived");
        calls.clear();
        calls.extend(group.members().iter().map(published));
    }

    /// Publishes a call and waits for all members' calls, until the deadline or the world's end.
    fn gather(
        &self,
        world: &World,
        rank: usize,
        deadline: Duration,
        call: Call,
    ) -> Result<(), CommError> {
        let slot = self.slot(rank);
        let mut patience = Patience::new(deadline);
        let mut state = self.lock();
        world.check()?;
        state.calls[slot] = Some(call);
        let phase = self.arrive(&mut state, slot);
        while state.phase == phase {
            if let Err(error) = self.still_hopeful(world, rank, &state, call, &patience) {
                state.arrived[slot] = false;
                state.calls[slot] = None;
                return Err(error);
            }
            let woken = self.changed.wait_timeout(state, patience.slice());
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
            patience.count(world.progress());
        }
        Ok(())
    }

    /// Whether the missing members can still arrive in time.
    fn still_hopeful(
        &self,
        world: &World,
        rank: usize,
        state: &State,
        call: Call,
        patience: &Patience,
    ) -> Result<(), CommError> {
        world.check()?;
        let missing = || {
            let absent = self.members.iter().zip(&state.arrived).filter(|(_, arrived)| !**arrived);
            absent.map(|(&member, _)| member)
        };
        if let Some(left) = missing().find(|&member| world.has_left(member)) {
            return Err(CommError::Left { rank, call: call.signature.to_string(), left });
        }
        if !patience.is_over() {
            return Ok(());
        }
        let missing = missing().map(|member| world.describe(member)).collect();
        let waited = patience.waited();
        Err(CommError::Deadline { rank, call: call.signature.to_string(), missing, waited })
    }
}

/// All members have arrived, and none leaves.
pub(in crate::local) struct Meeting<'a> {
    place: &'a Place,
    slot: usize,
    position: usize,
    calls: &'a [Call],
    /// Phases that this member still owes to the others.
    owed: Cell<usize>,
}

impl Meeting<'_> {
    /// The position of this rank in the group.
    pub(in crate::local) fn position(&self) -> usize {
        self.position
    }

    /// The published buffer of a member, by position in the group.
    pub(in crate::local) fn buffer(&self, member: usize) -> *const u8 {
        self.calls[member].send
    }

    /// Ends a phase of work: waits until all have done theirs.
    pub(in crate::local) fn wait_for_all(&self) {
        self.owed.set(self.owed.get() - 1);
        self.place.wait_for_all(self.slot);
    }
}

impl Drop for Meeting<'_> {
    /// Pays what is owed, also when the work panicked: nobody may leave before all have finished.
    fn drop(&mut self) {
        while self.owed.get() > 0 {
            self.wait_for_all();
        }
    }
}

/// What two members called, if not all called the same.
fn mismatch(members: &[usize], calls: &[Call]) -> Option<CommError> {
    let first = calls[0].signature;
    let other = calls.iter().position(|call| call.signature != first)?;
    let second = calls[other].signature;
    let (first_call, mut second_call) = (first.to_string(), second.to_string());
    if first_call == second_call {
        second_call += difference(&first, &second);
    }
    Some(CommError::Mismatch { first: members[0], first_call, second: members[other], second_call })
}

/// A rank on its way to a meeting.
pub(in crate::local) struct Caller<'a> {
    pub(in crate::local) world: &'a World,
    pub(in crate::local) rank: usize,
    pub(in crate::local) deadline: Duration,
    /// Room for the calls of all members.
    pub(in crate::local) calls: &'a mut Vec<Call>,
}

/// Meets the other members of a group and works with them.
///
/// `work` calls [`Meeting::wait_for_all`] between its phases; the last phase ends by itself.
pub(in crate::local) fn meet(
    caller: Caller<'_>,
    group: &Group,
    call: Call,
    work: impl FnOnce(&Meeting<'_>),
) -> Result<(), CommError> {
    let Caller { world, rank, deadline, calls } = caller;
    let position = group.position(rank).expect("a rank calls for groups it is a member of");
    let place = world.place(group);
    place.gather(world, rank, deadline, call)?;
    place.read_calls(group, calls);
    let slot = place.slot(rank);
    let meeting = Meeting { place: &place, slot, position, calls, owed: Cell::new(1) };
    if let Some(mismatch) = mismatch(group.members(), meeting.calls) {
        return Err(mismatch);
    }
    meeting.owed.set(call.signature.kind.phases());
    work(&meeting);
    Ok(())
}
