//! Programs: the instructions of one class of ranks.
//!
//! All buffers lie in one arena per memory space, at offsets that are fixed here: they count
//! through the arena of the device, then through that of the host, then through that of the disk.
//! Work is in *routines*, one per specialisation of a function, which are called with slots; so the
//! size of a program grows neither with depth nor with the number of micro-batches but for one
//! `call` each.

use serde::{Deserialize, Serialize};

use crate::DType;
use crate::op::Combiner;
use crate::pieces::PieceOrder;
use crate::plan::Place;
use crate::sharding::Axis;

/// The alignment of every buffer, in bytes: a cache line, and the widest vector.
pub const ALIGNMENT: u64 = 64;

/// Numbers of an optimizer state of 8 bits that share one scale: a range along the last dim of the
/// whole weight.
pub const STATE_BLOCK: usize = 256;

/// Bytes rounded up to the alignment.
pub fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// A buffer of the program: an index into [`Program::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BufferId(pub u32);

/// What a buffer holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Contents {
    /// A parameter: an index into [`Program::weights`].
    Param(usize),
    /// What a parameter is rounded from after each update, where it is narrow.
    Master(usize),
    /// The gradient of a parameter, summed over micro-batches.
    Grad(usize),
    /// The `index`-th optimizer state of a parameter.
    State {
        /// The weight.
        weight: usize,
        /// Which state.
        index: usize,
    },
    /// What the host feeds: tokens, labels, the random key, scalars.
    Feed(Feed),
    /// Loss sum, count and squared gradient norm of the step.
    Stats,
    /// What calls of an inference entry leave for later ones: keys or values of one layer. Counted
    /// as the entry's caches are.
    Cache(usize),
    /// A result of an inference entry, which the host reads before it runs anything else.
    Output,
    /// A part of another buffer, or a run of buffers that lie side by side.
    View,
    /// A part of another buffer, one that does not outlast a step.
    Part {
        /// The buffer.
        of: BufferId,
    },
    /// A value that lives between routine calls.
    Activation,
    /// The scratch memory of one routine call.
    Frame,
    /// What one rank holds of a bucket, which is split over the ranks that hold the same weights.
    Shard {
        /// What it is of each weight in the bucket.
        role: ShardRole,
        /// The view of the bucket's parameters, or, where these are gathered, of those of one call:
        /// weights side by side, padded to pieces of equal length. Of `n` elements over `d` ranks,
        /// rank `r` has those from `r · n / d` on.
        bucket: BufferId,
    },
    /// What the `index`-th optimizer state of a parameter is multiplied by, where that has 8 bits:
    /// one number for each [`STATE_BLOCK`] along the last dim.
    Scale {
        /// The weight.
        weight: usize,
        /// Which state.
        index: usize,
    },
    /// A parameter, gathered from the ranks that hold its pieces for one call (ZeRO 3).
    Gathered {
        /// The weight.
        weight: usize,
        /// The view of its bucket, as gathered for the call.
        bucket: BufferId,
    },
    /// What one call makes of the gradient of a parameter, before ranks sum it (ZeRO 2).
    Term {
        /// The weight.
        weight: usize,
        /// The view of its bucket, as made by the call.
        bucket: BufferId,
    },
}

impl Contents {
    /// The weight and the bucket of what passes through the memory of one call.
    pub fn passing(&self) -> Option<(usize, BufferId)> {
        let (Contents::Gathered { weight, bucket } | Contents::Term { weight, bucket }) = *self
        else {
            return None;
        };
        Some((weight, bucket))
    }

    /// Whether it outlasts a training step: weights, what they are rounded from, and states of the
    /// optimizer.
    pub fn outlasts_step(&self) -> bool {
        match self {
            Contents::Param(_)
            | Contents::Master(_)
            | Contents::State { .. }
            | Contents::Scale { .. } => true,
            Contents::Shard { role, .. } => role.outlasts_step(),
            Contents::Gathered { .. }
            | Contents::Term { .. }
            | Contents::Grad(_)
            | Contents::Feed(_)
            | Contents::Stats
            | Contents::Cache(_)
            | Contents::Output
            | Contents::View
            | Contents::Part { .. }
            | Contents::Activation
            | Contents::Frame => false,
        }
    }
}

/// What a shard of a bucket holds (ZeRO, Rajbhandari et al. 2020).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ShardRole {
    /// Gradients, summed over the ranks and over all micro-batches.
    Grad,
    /// What is updated.
    Master,
    /// What parameters are gathered from after the update, where they are rounded from what is
    /// updated.
    Rounded,
    /// The optimizer state with this index.
    State(usize),
    /// What that is multiplied by, block by block.
    Scale(usize),
    /// Gradients that one call makes, summed over the ranks.
    Term,
    /// What parameters are gathered from before each call, where that is not what is updated.
    Param,
}

impl ShardRole {
    /// Whether it outlasts a training step.
    pub fn outlasts_step(self) -> bool {
        match self {
            ShardRole::Master | ShardRole::Param | ShardRole::State(_) | ShardRole::Scale(_) => {
                true
            }
            ShardRole::Grad | ShardRole::Term | ShardRole::Rounded => false,
        }
    }
}

/// The dims of the scales of a state, which are those of the weight but for the last one: none of a
/// scalar, or where blocks are no whole ones.
pub fn scale_dims(dims: &[usize]) -> Option<Vec<usize>> {
    let (last, outer) = dims.split_last()?;
    let whole = last.is_multiple_of(STATE_BLOCK);
    whole.then(|| [outer, &[last / STATE_BLOCK]].concat())
}

/// What the host writes before an instruction runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Feed {
    /// `i32[samples, seq]` token ids of a micro-batch.
    Tokens,
    /// `i32[samples, seq]` labels of a micro-batch; those of -100 count for nothing.
    Labels,
    /// `u32[4]`: seed, step, path, first sample on this rank of the micro-batch.
    Key {
        /// The path of the call, folded from zero.
        path: u32,
    },
    /// `[5]`: learning rate, 1 - beta1^step, 1 - beta2^step, clipping norm (infinite for none),
    /// loss scale.
    Scalars,
    /// `i32[]`: the position of the first token, in decoding.
    Position,
    /// `i32[]`: the index of the token whose logits are wanted, in decoding.
    Last,
    /// `i32[samples, seq]`: for each token of a micro-batch, the place of its document's first
    /// token in the sample.
    Documents,
}

/// A range of an arena.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffer {
    /// For people.
    pub name: String,
    /// What it holds.
    pub contents: Contents,
    /// The element type.
    pub dtype: DType,
    /// The local sizes; a frame has bytes.
    pub sizes: Vec<usize>,
    /// The bytes it takes.
    pub bytes: u64,
    /// Its place in the arenas.
    pub offset: u64,
}

/// A weight as one class of ranks holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightShard {
    /// The name of the parameter of the entry.
    pub name: String,
    /// The sizes of the whole weight.
    pub global: Vec<usize>,
    /// For each dim, the first element held and the number held; where ranks share experts, by the
    /// first of these ranks.
    pub ranges: Vec<(usize, usize)>,
    /// How ranks that run this program share it, where they do not hold the same.
    #[serde(default)]
    pub experts: Option<Experts>,
    /// Whether this class counts it: a tied copy in a later stage is not counted again.
    pub owned: bool,
}

impl WeightShard {
    /// For each dim, the first element held and the number held by the rank with a number among
    /// those along `dp` and `cp`.
    pub fn ranges_of(&self, data: usize) -> Vec<(usize, usize)> {
        let mut ranges = self.ranges.clone();
        if let Some(Experts { dim, ranks }) = self.experts
            && let Some((start, size)) = ranges.get_mut(dim)
        {
            *start += data.checked_rem(ranks).unwrap_or(0) * *size;
        }
        ranges
    }
}

/// The cut of a weight over ranks that share experts: neighbours among those along `dp` and `cp`,
/// with equal pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Experts {
    /// The dim that counts experts.
    pub dim: usize,
    /// The ranks.
    pub ranks: usize,
}

/// A value inside a routine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Ref {
    /// A slot of the routine.
    Slot(u32),
    /// A local, at an offset in the frame of the call.
    Local(u32),
}

/// A value that lives during one call, in its frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalBuffer {
    /// For people.
    pub name: String,
    /// The bytes it takes.
    pub bytes: u64,
    /// Its place in the frame.
    pub offset: u64,
    /// The local that this one is a part of: what is written to either is read in both. A whole is
    /// no part.
    pub within: Option<u32>,
}

/// A collective of the ranks along an axis.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exchange {
    /// Every member gets the combination; in place.
    AllReduce(Combiner),
    /// Every member gets all pieces along the middle dim of `[outer, sum of counts, inner]`.
    AllGather {
        /// Elements before the dim.
        outer: usize,
        /// Elements after the dim.
        inner: usize,
        /// The members' pieces.
        counts: Vec<usize>,
        /// Where they lie.
        #[serde(default)]
        order: PieceOrder,
    },
    /// Every member gets its piece of the sum.
    ReduceScatter {
        /// Elements before the dim.
        outer: usize,
        /// Elements after the dim.
        inner: usize,
        /// The members' pieces.
        counts: Vec<usize>,
        /// Where they lie.
        #[serde(default)]
        order: PieceOrder,
    },
    /// Every member gets its piece of what each one has, in the order of members.
    AllToAll {
        /// The members. A member's elements are one piece for each, of equal length.
        pieces: usize,
    },
    /// Every member gets, of the tokens of all members in their order, those with a gate for one of
    /// its experts. Others are not written, or with anything: nothing reads them.
    Dispatch(Routed),
    /// Every member gets the sums of its tokens' terms, in the order of members, over those members
    /// with an expert that a token has a gate for; zero where there is none. Other terms are not
    /// read.
    Combine(Routed),
}

/// Tokens of ranks that share experts, and how they are routed. A gate of a token is a number other
/// than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Routed {
    /// The members.
    pub pieces: usize,
    /// Tokens of a member.
    pub rows: usize,
    /// Elements of a token.
    pub width: usize,
    /// Experts of a member.
    pub experts: usize,
    /// Experts of a token: as many are expected.
    pub top_k: usize,
}

impl Routed {
    /// The elements of the tokens of one member, and of all; of the gates of one member's tokens
    /// for all experts, which are as many as those of all tokens for one member's experts.
    pub fn elements(&self) -> Option<[usize; 3]> {
        let piece = self.rows.checked_mul(self.width)?;
        let gates = self.rows.checked_mul(self.experts)?.checked_mul(self.pieces)?;
        Some([piece, piece.checked_mul(self.pieces)?, gates])
    }

    /// The tokens of a member that are expected to have a gate for an expert of a given member:
    /// each has gates for `top_k` different ones, any as likely as any other.
    pub fn visitors(&self) -> f64 {
        self.rows as f64 * visited(self.pieces, self.experts, self.top_k)
    }
}

/// The share of tokens that have one of their `top_k` different experts among `experts`, of which
/// each of `ranks` ranks has as many.
pub fn visited(ranks: usize, experts: usize, top_k: usize) -> f64 {
    let all = ranks.saturating_mul(experts);
    let misses = |drawn: usize| {
        let left = all.saturating_sub(drawn).max(1) as f64;
        all.saturating_sub(experts).saturating_sub(drawn) as f64 / left
    };
    1.0 - (0..top_k.min(all)).map(misses).product::<f64>()
}

impl Exchange {
    /// A gather of a flat vector, of whose pieces members have one each.
    pub fn gather_of(counts: Vec<usize>) -> Exchange {
        Exchange::AllGather { outer: 1, inner: 1, counts, order: PieceOrder::Ascending }
    }

    /// A sum of flat vectors, of which members get a piece each.
    pub fn scatter_of(counts: Vec<usize>) -> Exchange {
        Exchange::ReduceScatter { outer: 1, inner: 1, counts, order: PieceOrder::Ascending }
    }
}

/// The ranks that take part in a collective.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Group {
    /// The ranks along an axis.
    Axis(Axis),
    /// The ranks that hold the same weights: those along `dp` and `cp`, of which `cp` is counted
    /// first.
    Data,
    /// A shard group: this many neighbours of [`Group::Data`], over which ZeRO shards one copy, or
    /// which share experts.
    Shards(usize),
    /// A replica group: the ranks of [`Group::Data`] with the same shard, of shard groups of this
    /// size.
    Copies(usize),
    /// Of shard groups of `count` · `stride` ranks, the ones that are `stride` apart: of ranks that
    /// share experts, those with the same ones.
    Strided {
        /// The members.
        count: usize,
        /// How far apart they are.
        stride: usize,
    },
    /// This many ranks that share experts, all of `tp` first: those along `tp` of neighbours of
    /// [`Group::Data`], of which members with the same place on `tp` follow each other.
    Experts(usize),
    /// The ranks of these stages with the same place on the other axes.
    Stages(Vec<usize>),
    /// All ranks.
    World,
}

/// An instruction of a routine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Instruction {
    /// One kernel.
    Launch {
        /// Index into the kernel table.
        kernel: usize,
        /// What differs by rank and not from step to step, in the order of the kernel's slots.
        scalars: Vec<i64>,
        /// What it reads.
        inputs: Vec<Ref>,
        /// What it writes.
        outputs: Vec<Ref>,
        /// The local in which its functions on a GPU pass on what others of them read: slices,
        /// partial sums, copies of operands. It holds nothing before and nothing after.
        workspace: Option<Ref>,
    },
    /// One collective.
    Collective {
        /// What is done.
        exchange: Exchange,
        /// Among whom.
        group: Group,
        /// The element type.
        dtype: DType,
        /// The type to which terms and results of a sum are rounded, as if elements were exchanged
        /// as it: that of the elements, or of an all-reduce of f32 a narrow one.
        exchanged: DType,
        /// Elements that this rank puts in.
        elements: usize,
        /// What it reads; the same as the output for an all-reduce.
        input: Ref,
        /// What it writes.
        output: Ref,
        /// The gates by which a dispatch and a combination go, of the element type: of the tokens
        /// of all members for this one's experts, and of this one's tokens for all experts.
        gates: Option<Ref>,
    },
}

/// Work that is called with slots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Routine {
    /// For people: the function, its specialisation.
    pub name: String,
    /// What the slots are, for people and for the checker: name and bytes.
    pub slots: Vec<(String, u64)>,
    /// The values that live in the frame.
    pub locals: Vec<LocalBuffer>,
    /// The bytes of the frame.
    pub frame_bytes: u64,
    /// What is done.
    pub instructions: Vec<Instruction>,
}

/// A step of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// The host writes a buffer for a micro-batch.
    Feed {
        /// What.
        feed: Feed,
        /// For which micro-batch.
        microbatch: usize,
        /// Into what.
        buffer: BufferId,
    },
    /// A routine runs.
    Call {
        /// Index into [`Program::routines`].
        routine: usize,
        /// The buffers for its slots.
        slots: Vec<BufferId>,
        /// The frame; none for a routine without locals.
        frame: Option<BufferId>,
    },
    /// A buffer goes to the same place of another stage.
    Send {
        /// The stage.
        to: usize,
        /// The buffer.
        buffer: BufferId,
    },
    /// A buffer comes from the same place of another stage.
    Receive {
        /// The stage.
        from: usize,
        /// The buffer.
        buffer: BufferId,
    },
    /// A copy from one memory space to another begins: one of the buffers is the device's. Copies
    /// of a rank are made in the order in which they begin, while its other steps go on. Until one
    /// is awaited, nothing but further copies writes what it reads, or uses what it writes.
    Move {
        /// What is copied.
        from: BufferId,
        /// Where to, of equal length.
        to: BufferId,
    },
    /// Waits for the copies from and to a buffer that have begun.
    Await {
        /// The buffer.
        buffer: BufferId,
    },
}

/// One of the things that a program for inference can be asked to do: all entries share weights
/// and caches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The name, such as `decode.16`.
    pub name: String,
    /// The instructions of one call.
    pub steps: Vec<Step>,
    /// The results that are no caches, whole on `tp`; none on a class of ranks that lacks them.
    pub outputs: Vec<BufferId>,
}

/// A weight in a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The weight: an index into [`Program::weights`].
    pub weight: usize,
    /// Its first element among those of the bucket.
    pub first: usize,
}

/// The instructions of one class of ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// The model.
    pub name: String,
    /// The stage of the class.
    pub stage: usize,
    /// The place of the class on the context-parallel axis.
    #[serde(default)]
    pub context: usize,
    /// The place of the class on the tensor-parallel axis.
    pub tensor: usize,
    /// The weights that it holds.
    pub weights: Vec<WeightShard>,
    /// All buffers.
    pub buffers: Vec<Buffer>,
    /// The bytes of the device's arena.
    pub arena_bytes: u64,
    /// The bytes of the arena in the memory of the host.
    pub host_bytes: u64,
    /// The bytes of the arena on a disk.
    pub disk_bytes: u64,
    /// The largest sum of bytes, each rounded to the alignment, that are live at once on the
    /// device.
    pub live_bytes_max: u64,
    /// The routines.
    pub routines: Vec<Routine>,
    /// The instructions of one training step; none in a program for inference.
    pub steps: Vec<Step>,
    /// The instructions that only compute the loss of a batch, up to and with the reduction of the
    /// statistics; none where there is no loss. They change no parameter, gradient or state.
    #[serde(default)]
    pub evaluate: Vec<Step>,
    /// What a program for inference can be asked to do; none in one for training.
    #[serde(default)]
    pub entries: Vec<Entry>,
}

impl Program {
    /// The place of the class on the pipeline, context-parallel and tensor-parallel axes.
    pub fn place(&self) -> [usize; 3] {
        [self.stage, self.context, self.tensor]
    }

    /// The bytes of an arena, and the offset at which it begins.
    pub fn arena(&self, place: Place) -> (u64, u64) {
        let Program { arena_bytes, host_bytes, disk_bytes, .. } = *self;
        match place {
            Place::Device => (arena_bytes, 0),
            Place::Host => (host_bytes, arena_bytes),
            Place::Disk => (disk_bytes, arena_bytes.saturating_add(host_bytes)),
        }
    }

    /// The memory space in which a buffer lies; none if it is in no arena.
    pub fn place_of(&self, buffer: &Buffer) -> Option<Place> {
        let end = buffer.offset.checked_add(buffer.bytes)?;
        Place::ALL.into_iter().find(|place| {
            let (bytes, start) = self.arena(*place);
            start <= buffer.offset && start.checked_add(bytes).is_some_and(|last| end <= last)
        })
    }

    /// The weights in a bucket, which its view names.
    pub fn members(&self, bucket: BufferId) -> Vec<Member> {
        let Some(whole) = self.buffers.get(bucket.0 as usize) else { return Vec::new() };
        let range = whole.offset..whole.offset + whole.bytes;
        let gathered = |buffer: &Buffer| {
            let (weight, its) = buffer.contents.passing()?;
            (its == bucket).then_some(weight)
        };
        let resident = |buffer: &Buffer| {
            let Contents::Param(weight) = buffer.contents else { return None };
            range.contains(&buffer.offset).then_some(weight)
        };
        let passes = self.buffers.iter().any(|buffer| gathered(buffer).is_some());
        let member = |buffer: &Buffer| {
            let weight = if passes { gathered(buffer) } else { resident(buffer) }?;
            let before = buffer.offset.checked_sub(whole.offset)?;
            Some(Member { weight, first: (before / buffer.dtype.size()) as usize })
        };
        self.buffers.iter().filter_map(member).collect()
    }

    /// Whether a weight is trained: whether there is a gradient for it.
    pub fn trains(&self, weight: usize) -> bool {
        let is_gradient = |buffer: &Buffer| {
            let (Contents::Grad(its) | Contents::Term { weight: its, .. }) = buffer.contents else {
                return false;
            };
            its == weight
        };
        self.buffers.iter().any(is_gradient)
    }

    /// Whether ranks share gradients, not only what is updated (ZeRO 2 and 3).
    pub fn splits_gradients(&self) -> bool {
        self.buffers.iter().any(|buffer| matches!(buffer.contents, Contents::Term { .. }))
    }
}
