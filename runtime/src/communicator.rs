//! The trait behind which ranks talk: collectives over groups, and messages between two ranks.
//!
//! All implementations keep the same ordering semantics. Calls on one group, and messages from
//! one rank to another, are matched in program order; there are no tags. Every collective blocks
//! the calling rank until its buffers may be reused, and no send waits for its receiver.
//!
//! **Determinism.** A reduction adds in the order of the group's members, in the accumulation
//! dtype, whatever the order of arrival.

use std::time::Duration;

use ir::DType;
use ir::sharding::PieceOrder;
use thiserror::Error;

/// The ranks that take part in a collective, in the order in which pieces are laid out and summed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    id: u32,
    members: Vec<usize>,
}

impl Group {
    /// A group of distinct world ranks.
    ///
    /// Groups with equal `id` and equal members are one group: its calls are matched in program
    /// order. Groups with equal `id` and other members have nothing to do with each other, so an
    /// id may name a mesh axis. Two streams of one rank need two ids.
    pub fn new(id: u32, members: Vec<usize>) -> Group {
        assert!(!members.is_empty(), "a group has members");
        let mut sorted = members.clone();
        sorted.sort_unstable();
        assert!(sorted.windows(2).all(|w| w[0] < w[1]), "the members of a group are distinct");
        Group { id, members }
    }

    /// The number that tells groups with equal members apart.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The world ranks, in order.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// The number of members.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The position of a world rank in the group.
    pub fn position(&self, rank: usize) -> Option<usize> {
        self.members.iter().position(|&m| m == rank)
    }
}

/// How a collective's tensor is cut: the middle dim of a row-major `[outer, Σ counts, inner]`.
///
/// Member `i` owns the piece `[outer, counts[i], inner]`, which in zigzag order are two ranges of
/// the dim, one after the other. Cutting dim `d` of a tensor is
/// `outer = Π dims[..d]`, `inner = Π dims[d + 1..]`, so no dim needs a transpose first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Blocks {
    /// The product of the dims before the one that is cut.
    pub outer: usize,
    /// The product of the dims after the one that is cut.
    pub inner: usize,
    /// Elements of the cut dim owned by each member, in member order; they may differ.
    pub counts: Vec<usize>,
    /// Where they lie in it.
    pub order: PieceOrder,
}

impl Blocks {
    /// A flat vector cut into pieces.
    pub fn flat(counts: Vec<usize>) -> Blocks {
        Blocks { outer: 1, inner: 1, counts, order: PieceOrder::Ascending }
    }

    /// Elements of the piece of one member.
    pub fn piece(&self, member: usize) -> usize {
        self.outer * self.counts[member] * self.inner
    }

    /// Elements of the whole tensor.
    pub fn total(&self) -> usize {
        self.outer * self.counts.iter().sum::<usize>() * self.inner
    }
}

/// The types of the elements of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Types {
    /// In memory.
    pub dtype: DType,
    /// Between ranks: the same, or of f32 a narrow one.
    pub exchanged: DType,
}

impl From<DType> for Types {
    fn from(dtype: DType) -> Types {
        Types { dtype, exchanged: dtype }
    }
}

/// How a reduction combines two elements.
///
/// bf16 and f16 accumulate in f32; f32, f64 and integers in their own type, integers wrapping
/// around. Over `bool`, a sum and a maximum are *or*, a minimum is *and*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Combiner {
    /// Addition.
    Sum,
    /// The greater one; not-a-number if either is.
    Max,
    /// The smaller one; not-a-number if either is.
    Min,
}

impl Combiner {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Combiner::Sum => "sum",
            Combiner::Max => "max",
            Combiner::Min => "min",
        }
    }
}

/// Bytes that one rank has sent, by kind of call: what a bandwidth-optimal ring sends.
///
/// With `n` members and `b` bytes in the whole tensor, one rank sends for
/// - an all-reduce `2 (n - 1) b / n`, rounded down;
/// - an all-gather `n - 1` times its own piece;
/// - a reduce-scatter `b` less its own piece;
/// - an all-to-all what it puts in, less its own piece;
/// - a dispatch and a combination the rows that it *gets* of others: what it sends, these know;
/// - a message its length.
///
/// Over equal pieces, gather and scatter are `(n - 1) b / n`, each half of an all-reduce.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes sent by all-reduces.
    pub all_reduce_bytes: u64,
    /// Bytes sent by all-gathers.
    pub all_gather_bytes: u64,
    /// Bytes sent by reduce-scatters.
    pub reduce_scatter_bytes: u64,
    /// Bytes sent by all-to-alls.
    pub all_to_all_bytes: u64,
    /// Bytes of rows that dispatches and combinations have brought.
    pub routed_bytes: u64,
    /// Bytes sent in messages.
    pub send_bytes: u64,
    /// Calls of all kinds, barriers and receives included.
    pub calls: u64,
}

/// Why a call between ranks failed. After one, the world is of no further use to any rank.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CommError {
    /// Members of one group made different calls.
    #[error("rank {first} called {first_call}, but rank {second} called {second_call}")]
    Mismatch {
        /// A member of the group.
        first: usize,
        /// What it called.
        first_call: String,
        /// A member that called something else.
        second: usize,
        /// What that one called.
        second_call: String,
    },
    /// A rank did not arrive in time.
    #[error("rank {rank} waited {} s in {call} for {}", waited.as_secs_f64(), missing.join(", "))]
    Deadline {
        /// Who waited.
        rank: usize,
        /// The call in which it waited.
        call: String,
        /// The ranks that did not arrive, each with what it was seen doing.
        missing: Vec<String>,
        /// How long it waited.
        waited: Duration,
    },
    /// A rank ended, and is still needed.
    #[error("rank {rank} waits in {call} for rank {left}, which has ended")]
    Left {
        /// Who waited.
        rank: usize,
        /// The call in which it waited.
        call: String,
        /// The rank that has ended.
        left: usize,
    },
    /// Another rank failed.
    #[error("rank {rank} failed: {reason}")]
    Peer {
        /// The rank that failed first.
        rank: usize,
        /// Why.
        reason: String,
    },
    /// No such reduction.
    #[error("rank {rank} called {call}: elements of this type are not reduced")]
    Unsupported {
        /// Who called.
        rank: usize,
        /// What it called.
        call: String,
    },
}

/// Tokens that members of a group bring to their experts, and their gates. A gate is there if it
/// is a number other than 0.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Of each member.
    pub rows: usize,
    /// Elements of a token.
    pub width: usize,
    /// Experts of each member.
    pub experts: usize,
    /// Of the element type.
    pub gates: &'a [u8],
}

impl Tokens<'_> {
    /// Whether any of the gates is there that a token has for the experts of one member. Gates are
    /// counted in rows of `experts`, and are floats: either zero is 0.
    pub fn has_gate(&self, row: usize, dtype: DType) -> bool {
        let size = dtype.size() as usize;
        let is_there = |gate: &[u8]| match gate.split_last() {
            Some((sign, rest)) => sign & 0x7f != 0 || rest.iter().any(|byte| *byte != 0),
            None => false,
        };
        let bytes = self.experts * size;
        self.gates[row * bytes..][..bytes].chunks_exact(size).any(is_there)
    }
}

/// One rank's end of a world of ranks.
///
/// **Constraints.** The calling rank is a member of the group; `blocks` has one count per member;
/// buffers have exactly the bytes that dtype and blocks say. These are asserted: they are
/// properties of the program, checked when it was compiled. What only comparing ranks can reveal
/// is an error.
pub trait Communicator: Send {
    /// The world rank of this end.
    fn rank(&self) -> usize;

    /// The number of ranks in the world.
    fn size(&self) -> usize;

    /// Combines the members' buffers element by element; every member gets the result.
    ///
    /// Where elements are exchanged as a narrower type, terms and results are rounded to it.
    fn all_reduce(
        &self,
        group: &Group,
        types: Types,
        combiner: Combiner,
        buffer: &mut [u8],
    ) -> Result<(), CommError>;

    /// Puts the members' pieces together; every member gets the whole tensor.
    ///
    /// **Shapes.** `send: [outer, counts[me], inner]`, `receive: [outer, Σ counts, inner]`.
    fn all_gather(
        &self,
        group: &Group,
        dtype: DType,
        blocks: &Blocks,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError>;

    /// Combines the members' tensors element by element; every member gets its piece. Where
    /// elements are exchanged as a narrower type, terms and results are rounded to it.
    ///
    /// **Shapes.** `send: [outer, Σ counts, inner]`, `receive: [outer, counts[me], inner]`.
    fn reduce_scatter(
        &self,
        group: &Group,
        types: Types,
        combiner: Combiner,
        blocks: &Blocks,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError>;

    /// Gives every member its piece of what this one has, and gets the own piece of all.
    ///
    /// **Shapes.** `send` and `receive`: `[group, piece]`.
    fn all_to_all(
        &self,
        group: &Group,
        dtype: DType,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError>;

    /// Gets, of the tokens of all members in their order, those with a gate for one of this
    /// member's experts. The rows of others are not written.
    ///
    /// **Shapes.** `send: [rows, width]`, `receive: [group, rows, width]`, the gates of all tokens
    /// for this member's experts: `[group, rows, experts]`.
    fn dispatch(
        &self,
        group: &Group,
        dtype: DType,
        tokens: &Tokens<'_>,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError>;

    /// Sums the terms of this member's tokens, in the order of members, over those with an expert
    /// that a token has a gate for; other terms are not read. Zero where there is none.
    ///
    /// **Shapes.** `send: [group, rows, width]`, `receive: [rows, width]`, the gates of this
    /// member's tokens for all experts: `[rows, group, experts]`.
    fn combine(
        &self,
        group: &Group,
        dtype: DType,
        tokens: &Tokens<'_>,
        send: &[u8],
        receive: &mut [u8],
    ) -> Result<(), CommError>;

    /// Sends a message. Never waits for the receiver: the bytes are taken before it returns, so
    /// that no order of sends and receives deadlocks unless a message is truly missing.
    fn send(&self, to: usize, bytes: &[u8]) -> Result<(), CommError>;

    /// Receives the oldest message from a rank; its length must be that of `bytes`.
    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<(), CommError>;

    /// Returns once every member has called it.
    fn barrier(&self, group: &Group) -> Result<(), CommError>;

    /// Tells all other ranks that this one has failed: their calls return [`CommError::Peer`].
    fn abort(&self, reason: &str);

    /// Notes that this rank has finished an instruction: whoever waits begins its deadline anew.
    fn advance(&self);

    /// How long a call waits for another rank before it fails, from the last instruction on that
    /// any rank has finished.
    fn set_deadline(&mut self, deadline: Duration);

    /// Bytes sent so far.
    fn counters(&self) -> Counters;
}
