//! The kernel: what one launch computes, with every decision taken.
//!
//! All sizes are concrete and local to one rank; all strides and offsets count elements, not bytes.
//! Buffers are contiguous and row-major unless strides say otherwise.
//!
//! Legend: B batch, S queries, T keys, H query heads, G key-value heads, D head dim. Of experts:
//! T tokens, E experts, M model, F inside of an expert.

use std::fmt;
use std::ops::Range;

use ir::DType;
use ir::op::Operands;
use ir::random::DrawBits;
use serde::{Deserialize, Serialize};

use crate::border::Border;
use crate::offset::Offset;
use crate::rows::{Output, ReduceOp, Rows};
use crate::units::Flops;

/// One launch. The comment of each variant lists its inputs and outputs in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Kernel {
    /// `a b [scales_a scales_b] -> c`: batched matrix product; scales are there where it has some.
    Product(Product),
    /// As the description lists them: fused elementwise operations and reductions.
    Rows(Rows),
    /// `q k v [bias] [key] -> out lse`: softmax attention; `bias` and `key` are there iff `bias`
    /// and `dropout` are. With `position`: `q k v [bias] position -> out`.
    Attention(Attention),
    /// `q k v [bias] out lse dout [key] -> dq dk dv [dbias]`: its gradient.
    AttentionBwd(Attention),
    /// `x gates w_gate w_up w_down -> y`: a routed feed-forward layer.
    Experts(Experts),
    /// `x gates w_gate w_up w_down dy -> dx dgates dw_gate dw_up dw_down`: its gradient.
    ExpertsBwd(Experts),
    /// `table ids -> rows`: rows of a table, zero where the id is of another shard.
    Gather(Gather),
    /// `ids rows -> table`: adds rows to the table's gradient, in ascending order of rows.
    ScatterAdd(Gather),
    /// `ids rows -> table`: writes rows over what the table holds; of several the last one stays.
    Replace(Gather),
    /// `x -> y`: an operation along one dim that is no sum of its own.
    Lines(Lines),
    /// `x [positions] -> y`: rotary embedding.
    Rope(Rope),
    /// `x -> y`: strided copy.
    Copy(Copy),
    /// `x position -> y`: writes a window of `y` and leaves the rest as it is.
    Place(Window),
    /// `y position -> x`: reads a window of `y`.
    Take(Window),
    /// `-> y`: constant.
    Fill(Fill),
    /// `operands -> results`: products of which none reads another's result.
    Products(Products),
}

/// A loop over a factor of both operands and the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoopABC {
    /// Number of points.
    pub size: usize,
    /// Stride in `a`.
    pub a: usize,
    /// Stride in `b`.
    pub b: usize,
    /// Stride in `c`.
    pub c: usize,
}

/// A loop over a factor of the first operand and the result: rows of the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoopAC {
    /// Number of points.
    pub size: usize,
    /// Stride in `a`.
    pub a: usize,
    /// Stride in `c`.
    pub c: usize,
}

/// A loop over a factor of the second operand and the result: columns of the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoopBC {
    /// Number of points.
    pub size: usize,
    /// Stride in `b`.
    pub b: usize,
    /// Stride in `c`.
    pub c: usize,
}

/// A loop over a contracted factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoopAB {
    /// Number of points.
    pub size: usize,
    /// Stride in `a`.
    pub a: usize,
    /// Stride in `b`.
    pub b: usize,
}

/// The types that the operands and the result of a product are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredTypes {
    /// Of the first operand.
    pub a: DType,
    /// Of the second operand.
    pub b: DType,
    /// Of the result, and of what is added to it after it was rounded.
    pub c: DType,
}

impl StoredTypes {
    /// One type of all three.
    pub fn all(dtype: DType) -> StoredTypes {
        StoredTypes { a: dtype, b: dtype, c: dtype }
    }
}

/// A batched matrix product: an einsum in canonical form.
///
/// `c[batch, m, n] = sum over k of a[batch, m, k] * b[batch, k, n]`, where each of the four groups
/// is a list of loops, outermost first. A group may be empty: one point. A stride may be zero in an
/// operand; the map of (batch, m, n) into `c` must be injective.
///
/// **Determinism**: `k` is cut into blocks of [`Product::K_BLOCK`] points in its flat order; within
/// a block an element is one chain of fused multiply-adds, blocks are added in ascending order, to
/// the old value when `accumulate`. No other size enters the bits of an element.
///
/// **Pairs**: the sum of a product of two operands of BF16 without borders is that of instructions
/// for pairs, where the machine has them ([`crate::cpu::Isa`]). Its bits then depend on the kernel,
/// `k` and the set of instructions, and as above neither on `m`, `n` and batch, however these are
/// cut, nor on the number of threads. An element starts as zero, or as the old value when
/// `accumulate`; `k`, in its flat order, is filled up with zeros to steps of 32 points. With
/// AVX512-BF16 an element is one chain of fused multiply-adds over all points, of each pair the
/// second one first. With AMX the even and the odd points of a step are a chain each, from zero;
/// their sum is added to the element. In both, a subnormal number counts as zero, whether it is
/// read, old, or a partial sum, and rounding is to nearest whatever the mode.
///
/// **Accuracy**: of an element that does not accumulate, `(k + 4) ε Σ|a b|` from the exact sum for
/// `ε = 2^-23` of F32, before the result is rounded, if no number is subnormal; of F64 likewise.
///
/// **Narrow types**: a product that is summed in F32 reads operands of BF16, F16, F8E4M3 and F8E5M2
/// as the numbers of F32 that they are, and rounds its result to BF16 or F16 once, when the sum
/// over all of `k` is complete. The result of one that accumulates is not narrow.
///
/// **Scales**: a product of codes of F8E4M3 and F8E5M2 may have scales for both operands, F32. Each
/// [`Scales::RUN`] points of `k`, in its flat order, are a run; the sum of a run is multiplied by
/// the scales of its row and of its column before it is added to others. It has no batch and no
/// borders, and whole runs. CPUs read the numbers that codes and scales are.
///
/// **Integers**: a product that is summed in I32 reads elements of I8, and of I32 the low 16 bits
/// as signed numbers. Sums wrap, so that all instructions, threads and cuts give the same bits. It
/// is a launch of its own, on CPUs.
///
/// **Tensor cores** of a GPU sum as [`Tiling`] says. The bits of an element then depend on the
/// kernel's tiling, `k` and the architecture; neither on `m`, `n` and batch, however these are cut,
/// nor on which blocks run when.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Product {
    /// Loops over factors of all three.
    pub batch: Vec<LoopABC>,
    /// Loops over rows.
    pub m: Vec<LoopAC>,
    /// Loops over columns.
    pub n: Vec<LoopBC>,
    /// Loops over the contracted factors.
    pub k: Vec<LoopAB>,
    /// Whether the result is added to what `c` holds.
    pub accumulate: bool,
    /// F32, F64 or I32: the type of sums.
    pub dtype: DType,
    /// The types of elements in memory: `dtype`, or narrower ones.
    pub stored: StoredTypes,
    /// How elements of `a` and `b` are read: rounded ones are of F32, and have no borders.
    #[serde(default)]
    pub operands: Operands,
    /// Dims of `b` with zeros around them.
    #[serde(default)]
    pub borders: Vec<Border>,
    /// Where the scales of both operands lie.
    #[serde(default)]
    pub scales: Option<[Scales; 2]>,
    /// How tensor cores compute it.
    #[serde(default)]
    pub tiling: Tiling,
}

/// Scales of an operand: what a code of one is worth, for each run of `k` and each block of rows of
/// `a` or of columns of `b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scales {
    /// Points of `m` or of `n`, in flat order, that share one.
    pub block: usize,
    /// From one block to the next.
    pub of_block: usize,
    /// From one run to the next.
    pub of_run: usize,
}

impl Scales {
    /// Points of `k` of a run.
    pub const RUN: usize = 128;
}

/// How tensor cores compute a product, chosen from sizes that are not sharded
/// ([`crate::cuda::tiling`]). CPUs and CUDA cores do not look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tiling {
    /// The family of block tiles.
    pub family: Family,
    /// Slices of `k` that are summed apart and then added in ascending order; 1 for the whole of
    /// it. None is empty.
    pub split: usize,
}

/// A family of block tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Family {
    /// Of many rows and columns.
    #[default]
    Wide,
    /// Of few rows, such as those of decoding.
    Skinny,
}

impl Default for Tiling {
    /// Wide block tiles, each of which sums the whole of `k`.
    fn default() -> Tiling {
        Tiling { family: Family::Wide, split: 1 }
    }
}

impl Tiling {
    /// Alignment of slices, in points of `k`: whole steps of all block tiles.
    pub const STEP: usize = 128;

    /// Points of each slice of `k` points but the last.
    pub fn slice(self, k: usize) -> usize {
        k.div_ceil(self.split.max(1)).next_multiple_of(Tiling::STEP)
    }

    /// The same without empty slices.
    pub fn without_empty(self, k: usize) -> Tiling {
        Tiling { split: k.div_ceil(self.slice(k).max(1)).max(1), ..self }
    }
}

/// What differs from the default: ` skinny split 4`.
impl fmt::Display for Tiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.family == Family::Skinny { " skinny" } else { "" })?;
        if self.split == 1 { Ok(()) } else { write!(f, " split {}", self.split) }
    }
}

impl Product {
    /// Points of `k` that one chain of multiply-adds covers. Chosen: two panels of 32 columns of
    /// f32 fit a first-level cache of 48 KiB with what streams past them.
    pub const K_BLOCK: usize = 256;

    /// `2 · batch · m · n · k`.
    pub fn flops(&self) -> Flops {
        Flops(2 * self.sizes().iter().map(|&s| s as u64).product::<u64>())
    }

    /// The product of row-major matrices `a[m, k] b[k, n] -> c[m, n]` of one type, of which narrow
    /// ones are summed in F32.
    pub fn matrix(m: usize, n: usize, k: usize, dtype: DType) -> Product {
        Product {
            batch: Vec::new(),
            m: vec![LoopAC { size: m, a: k, c: n }],
            n: vec![LoopBC { size: n, b: 1, c: 1 }],
            k: vec![LoopAB { size: k, a: 1, b: n }],
            accumulate: false,
            dtype: dtype.accumulation(),
            stored: StoredTypes::all(dtype),
            operands: Operands::Exact,
            borders: Vec::new(),
            scales: None,
            tiling: Tiling::default(),
        }
    }

    /// Points of each slice of `k` but the last.
    pub fn slice(&self) -> usize {
        self.tiling.slice(self.sizes()[3])
    }

    /// Numbers of points of batch, m, n and k.
    pub fn sizes(&self) -> [usize; 4] {
        [
            self.batch.iter().map(|l| l.size).product(),
            self.m.iter().map(|l| l.size).product(),
            self.n.iter().map(|l| l.size).product(),
            self.k.iter().map(|l| l.size).product(),
        ]
    }
}

/// Products in one launch. An operand that several of them read is passed once. Outputs are the
/// results of all products, then those of all [`Pointwise`] programs; where a result is in place,
/// its output is that of the program, which is not listed again.
///
/// The bits of each result are those of its product alone, to which first the bias is added and
/// then the addend, each with one rounding to the type of the result, of which both are; those of a
/// program the bits of a launch of its own, that reads rounded results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Products {
    /// The products, one result each, in order; there is at least one. Sums are of one type.
    pub parts: Vec<ProductPart>,
}

/// One of several products.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProductPart {
    /// The number of the operand that is `a`.
    pub a: usize,
    /// The number of the operand that is `b`.
    pub b: usize,
    /// The numbers of the operands that are scales, where the product has some.
    #[serde(default)]
    pub scales: Option<[usize; 2]>,
    /// The number of the operand that is added to each row of the result: one element for each
    /// point of `n`, in order.
    pub bias: Option<usize>,
    /// The number of the operand, which lies as the result does, that is added last.
    pub addend: Option<usize>,
    /// What is computed of them.
    pub product: Product,
    /// What is computed of the result while a block of it is in a cache.
    pub then: Option<Pointwise>,
    /// Whether the result lies where that program's first output goes, and is overwritten by it.
    #[serde(default)]
    pub in_place: bool,
}

/// A block program without sums over the points of products, run on each block of the last one.
///
/// Its rows and columns are those of the result, which is row-major and has no batch. Where it
/// reads results of earlier products, these and all between are computed by the same tasks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pointwise {
    /// The program; its outputs are stores.
    pub rows: Rows,
    /// Where each of its inputs comes from.
    pub inputs: Vec<Source>,
}

/// Where an input of a [`Pointwise`] program comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// An operand of the launch, by its number.
    Operand(usize),
    /// The result of a product of the launch, by its number: that of the part or an earlier one.
    Result(usize),
}

impl ProductPart {
    /// A product to which nothing is added.
    pub fn of(a: usize, b: usize, product: Product) -> ProductPart {
        ProductPart {
            a,
            b,
            scales: None,
            bias: None,
            addend: None,
            product,
            then: None,
            in_place: false,
        }
    }

    /// The numbers of what its product reads, in the order of [`Kernel::Product`].
    pub fn factors(&self) -> impl Iterator<Item = usize> {
        [self.a, self.b].into_iter().chain(self.scales.into_iter().flatten())
    }

    /// The numbers of all its operands.
    pub fn operands(&self) -> impl Iterator<Item = usize> {
        let then = self.then.iter().flat_map(|then| &then.inputs);
        let read = then.filter_map(|source| match source {
            Source::Operand(at) => Some(*at),
            Source::Result(_) => None,
        });
        self.factors().chain(self.bias).chain(self.addend).chain(read)
    }

    /// The outputs of its program that lie beside the result.
    pub fn beside(&self) -> &[Output] {
        let outputs = self.then.as_ref().map_or(&[][..], |then| &then.rows.outputs);
        outputs.get(usize::from(self.in_place)..).unwrap_or_default()
    }

    /// The first product whose result its program reads.
    fn first_read(&self) -> Option<usize> {
        let then = self.then.iter().flat_map(|then| &then.inputs);
        let read = then.filter_map(|source| match source {
            Source::Operand(_) => None,
            Source::Result(at) => Some(*at),
        });
        read.min()
    }
}

impl Products {
    /// How many operands there are: each number below is one of a part.
    pub fn operand_count(&self) -> usize {
        let last = self.parts.iter().flat_map(ProductPart::operands).max();
        let most: usize = self.parts.iter().map(|part| part.operands().count()).sum();
        last.map_or(0, |last| last.saturating_add(1).min(most))
    }

    /// Runs of parts, in order, that the same tasks compute one after the other.
    pub fn teams(&self) -> Vec<Range<usize>> {
        let mut teams: Vec<Range<usize>> = Vec::new();
        for (at, part) in self.parts.iter().enumerate() {
            let first = part.first_read().unwrap_or(at).min(at);
            let mut team = at..at + 1;
            while let Some(before) = teams.pop_if(|before| before.end > first) {
                team.start = before.start;
            }
            teams.push(team);
        }
        teams
    }

    /// The type of all sums.
    pub fn dtype(&self) -> DType {
        self.parts.first().map_or(DType::F32, |part| part.product.dtype)
    }
}

/// Softmax attention that never stores its scores.
///
/// `q [B, S, H, D]`, `k v [B, T, G, D]`, where there are any `bias` and `document i32 [B, T]`,
/// `out` as `q`, `lse [B, H, S]` contiguous. Query head `h` reads key-value head
/// `(h + head_offset) / group`. A score is the scaled product of a query and a key, then bounded by
/// `softcap`, then with the bias added.
/// With `causal`, key `j` is visible to query `i` iff `j <= i + query_offset` and, with a `window`,
/// `i + query_offset - window < j`. With `documents`, and then without `position`, it is visible
/// only where `document[b, i + documents] = document[b, j]`, for any numbers. A query that sees no
/// key, or for which the bias of all that it sees is minus infinity, gives zeros and an `lse` of
/// minus infinity, and has no gradients. `lse` is the natural logarithm of the sum of exponentials
/// of scores.
///
/// The gradients `dq`, `dk`, `dv` lie as `q`, `k`, `v` do, `dout` as `out`. `dbias` lies as `bias`:
/// it is summed over the dims of stride zero.
///
/// With `position`, for inference over a cache: a last input i32 `[B]` is added to `query_offset`,
/// there is no `lse` and no dropout, and keys that no query of the sample sees are not read.
///
/// **Determinism**: the bits of a query's output depend on no other query, so that cutting
/// queries, heads or batch changes nothing.
///
/// **Narrow types**: tensors of BF16 or F16 are read as the numbers of F32 that they are, all is
/// computed and summed in F32, of which `lse` is, and each element of a result is rounded once: it
/// is that of the launch in F32, rounded.
///
/// **Pairs**: of tensors of BF16, without window and position, products are sums of pairs as those
/// of [`Product`], where the machine has instructions for them. Weights, after dropout, and the
/// gradients of scores are then rounded to BF16 before they are multiplied; the sum of weights and
/// the gradient of the bias are not of rounded ones, and the gradient of the bias is that of F32.
/// The determinism above holds, for bits that depend on the set of instructions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// B.
    pub batch: usize,
    /// S.
    pub queries: usize,
    /// T.
    pub keys: usize,
    /// H, local.
    pub heads: usize,
    /// G, local.
    pub kv_heads: usize,
    /// D.
    pub dim: usize,
    /// Factor of the scores, applied before the mask.
    pub scale: f64,
    /// Whether later keys are hidden.
    pub causal: bool,
    /// How many keys a query sees at most: the last ones up to its position; 0 for any number.
    #[serde(default)]
    pub window: usize,
    /// Bound of the scores, as `softcap · tanh(score / softcap)`; 0 for none.
    #[serde(default)]
    pub softcap: f64,
    /// Strides of the bias over batch, head and query, where there is one; zero over what shares
    /// it. Keys are contiguous.
    #[serde(default)]
    pub bias: Option<[usize; 3]>,
    /// Of a gradient, whether that of the bias is wanted.
    #[serde(default)]
    pub bias_grad: bool,
    /// Where an input numbers the documents that are packed into a sample, a number for each key,
    /// and a query sees the keys of its own document alone: the key whose number is that of query
    /// 0. The numbers of the other queries follow.
    #[serde(default)]
    pub documents: Option<usize>,
    /// Position of query 0 among the keys; negative where the keys start later.
    pub query_offset: i64,
    /// Whether a position of the sample that is known at run time is added to it.
    pub position: bool,
    /// Query heads of local key-value head 0 that come before local query head 0.
    pub head_offset: Offset,
    /// Query heads per key-value head.
    pub group: usize,
    /// Dropout of the normalised scores.
    pub dropout: Option<Dropout>,
    /// F32, F64, BF16 or F16, of all but the key and `lse`.
    pub dtype: DType,
    /// Strides of `q` and `dq` over batch, sequence and head; D is contiguous.
    pub q: [usize; 3],
    /// Strides of `k` and `dk`.
    pub k: [usize; 3],
    /// Strides of `v` and `dv`.
    pub v: [usize; 3],
    /// Strides of `out` and `dout`.
    pub out: [usize; 3],
}

impl Attention {
    /// The local key-value head that local query head `head` reads.
    pub fn kv_head(&self, head: usize) -> usize {
        (head + self.head_offset.bound() as usize) / self.group
    }

    /// The keys that query `query` sees. The position that a launch passes is not counted.
    #[inline(always)]
    pub fn visible(&self, query: usize) -> Range<usize> {
        if !self.causal {
            return 0..self.keys;
        }
        let end = (query as i64 + self.query_offset + 1).clamp(0, self.keys as i64);
        let start = if self.window == 0 {
            0
        } else {
            (query as i64 + self.query_offset + 1 - self.window as i64).clamp(0, end)
        };
        start as usize..end as usize
    }

    /// Strides over batch, sequence and head of a contiguous `[B, length, heads, D]`.
    pub fn contiguous(length: usize, heads: usize, dim: usize) -> [usize; 3] {
        [length * heads * dim, heads * dim, dim]
    }
}

/// Which scores are dropped: a pure function of the run-time key and the global position.
///
/// A score is kept iff `bits.uniform(key.stream(salt), index) >= p`, then scaled by `1 / (1 - p)`,
/// with `index = ((b * heads_total + h) * queries_total + s) * keys_total + t` in global
/// coordinates: `b = key.sample + sample_offset + local`, the others their base plus the local
/// index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// Probability of dropping.
    pub p: f64,
    /// The site.
    pub salt: u32,
    /// The bits of a draw.
    pub bits: DrawBits,
    /// Global index of local sample 0, from the key's sample on.
    pub sample_offset: u64,
    /// Global number of query heads.
    pub heads_total: u64,
    /// Global index of local query head 0.
    pub head_base: Offset,
    /// Global number of queries.
    pub queries_total: u64,
    /// Global index of local query 0.
    pub query_base: u64,
    /// Global number of keys.
    pub keys_total: u64,
    /// Global index of local key 0.
    pub key_base: u64,
}

/// Feed-forward layers of several experts, of which each token passes those that its gates name:
/// `y[t] = Σ over e of gates[t, e] · w_down[e] (silu(w_gate[e] x[t]) ∘ w_up[e] x[t])`.
///
/// `x y dx dy [T, M]`, `gates dgates [T, E]`, `w_gate w_up [E, F, M]`, `w_down [E, M, F]`, all
/// contiguous. A token and an expert are a pair where the gate between them is not 0, as is one
/// that is no number. Nothing is computed of what is no pair: weights of an expert without pairs
/// are not read, their gradients are zero, and so is `dgates` where there is no pair. A router that
/// hides experts multiplies its gates by a mask, or by what is zero where they are hidden, so that
/// these gradients are multiplied by zero.
///
/// **Room**: on CPUs a token may be in any number of pairs. On GPUs there is room for `top_k` of
/// each, as many as a router chooses: `y` and `dx` of a token in more are NaN, and so are its
/// gradients of gates and of the weights of the first `top_k` of its experts.
///
/// Gradients of weights are stored in the type of sums.
///
/// **Determinism**: an element of `y` and `dx` is summed over experts in ascending order, one of a
/// gradient of weights over tokens in ascending order, as [`Product`] sums over `k`. The bits of a
/// token's `y`, `dx` and `dgates` depend on no other token; how many threads there are, and how
/// pairs are cut into passes, changes none.
///
/// **Narrow types**: tensors of BF16 or F16 are read as the numbers of F32 that they are, and all
/// is computed and summed in F32; each element of `y`, `dx` and `dgates` is rounded once.
///
/// **Pairs of numbers**: of tensors of BF16, products are those of pairs, as of [`Product`], where
/// the machine has instructions for them. What is multiplied by `w_down`, and the gradients of what
/// was multiplied by `w_gate` and `w_up`, are then rounded to BF16 before they are multiplied.
///
/// **On GPUs** both are rounded to the type of tensors before they are multiplied, and tensor cores
/// sum as of [`Product`] with the default [`Tiling`]: in a gradient of weights over the tokens of
/// the expert. On CUDA cores results of F32 and F64 have the CPU's bits, but for gradients of
/// gates. A gate that is no number has such a gradient. Rows of tokens without gates are not read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Experts {
    /// T, less than 2^32.
    pub tokens: usize,
    /// E.
    pub experts: usize,
    /// M.
    pub model: usize,
    /// F.
    pub inner: usize,
    /// Pairs that a token is expected to have with these and the experts of other ranks: what work
    /// is counted by.
    pub top_k: usize,
    /// E of all of these ranks together.
    pub of: usize,
    /// Of a gradient, whether `dw_gate`, `dw_up` and `dw_down` are added to what they hold.
    #[serde(default)]
    pub accumulate: [bool; 3],
    /// F32, F64, BF16 or F16, of all but gradients of weights.
    pub dtype: DType,
}

impl Experts {
    /// Pairs that are expected, of tokens that pass all experts alike.
    pub fn pairs(&self) -> usize {
        let all = self.tokens as u128 * self.top_k as u128 * self.experts as u128;
        usize::try_from(all.div_ceil(self.of.max(1) as u128)).unwrap_or(usize::MAX)
    }

    /// Elements of the weights of one kind, of all experts.
    pub fn weights(&self) -> usize {
        self.experts * self.inner * self.model
    }
}

/// Look-up in a shard of a table: `table [outer, rows, width]`, `ids i32 [count]`, rows
/// `[outer, count, width]`.
///
/// Row `id - base` of the local table is meant; ids outside `[base, base + rows)` give zero rows
/// and receive nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gather {
    /// Tables, each looked up with the same ids.
    pub outer: usize,
    /// Rows of the local table.
    pub rows: usize,
    /// Global id of local row 0.
    pub base: Offset,
    /// Elements of a row.
    pub width: usize,
    /// Number of ids.
    pub count: usize,
    /// `ScatterAdd` only: keep what the table holds instead of zeroing it first.
    pub accumulate: bool,
    /// Of table and rows: F32, F64, I32, U32 or I64; integers wrap where rows are added. Bool and
    /// narrow types too where rows are only moved.
    pub dtype: DType,
}

/// An operation along the middle dim of `x [outer, extent, inner]`, which yields
/// `y [outer, result, inner]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lines {
    /// Elements of the dims before.
    pub outer: usize,
    /// Length of a line of `x`.
    pub extent: usize,
    /// Length of a line of `y`.
    pub result: usize,
    /// Elements of the dims after.
    pub inner: usize,
    /// What is done.
    pub how: Line,
    /// F32, F64, I32, U32 or I64, of `x`; Bool where elements are only compared or moved, narrow
    /// types where they are only moved.
    pub dtype: DType,
}

/// What is done with each line.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Line {
    /// Each element becomes the combination of those up to it, in ascending order.
    Cumulative(ReduceOp),
    /// One element: the product, of floating-point numbers accumulated in f64.
    Prod,
    /// One i32: the index of the first of the largest; a NaN is larger than every number.
    ArgMax,
    /// The i32 indices of the first elements of the order; equal ones stay in order.
    Order {
        /// Whether the largest come first.
        descending: bool,
    },
    /// The elements in opposite order.
    Reverse,
    /// `x` is windows of `size` elements, which are added into zeros, window after window.
    Fold {
        /// Elements of a window.
        size: usize,
        /// From one window to the next.
        stride: usize,
        /// From one element of a window to the next.
        dilation: usize,
    },
    /// One element for each window of `x`: the combination of its elements, in ascending order.
    Pool {
        /// How elements are combined.
        op: ReduceOp,
        /// As for a fold.
        size: usize,
        /// As for a fold.
        stride: usize,
        /// As for a fold.
        dilation: usize,
    },
}

impl Line {
    /// The name, for people.
    pub fn name(self) -> &'static str {
        match self {
            Line::Cumulative(_) => "cumulative",
            Line::Prod => "prod",
            Line::ArgMax => "argmax",
            Line::Order { .. } => "order",
            Line::Reverse => "reverse",
            Line::Fold { .. } => "fold",
            Line::Pool { .. } => "pool",
        }
    }
}

/// Rotary embedding of `x [B, S, H, D]` in the half-rotation style: pairs `(i, i + D/2)`.
///
/// With `a = position * frequencies[i]`: `y[i] = x[i] cos a - x[i + D/2] sin a` and
/// `y[i + D/2] = x[i + D/2] cos a + x[i] sin a`, both times `gain`; `inverse` negates `a`, which is
/// the gradient.
/// `y` may be `x` if the strides agree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// B.
    pub batch: usize,
    /// S.
    pub seq: usize,
    /// H.
    pub heads: usize,
    /// D, even.
    pub dim: usize,
    /// Angle per position of each of the D/2 pairs.
    pub frequencies: Vec<f64>,
    /// Where positions come from.
    pub positions: Positions,
    /// Whether to rotate back.
    pub inverse: bool,
    /// What cosines and sines are multiplied with.
    pub gain: f64,
    /// F32, F64, BF16 or F16; the last two are computed in F32 and rounded once.
    pub dtype: DType,
    /// Strides of `x` over batch, sequence and head; D is contiguous.
    pub x: [usize; 3],
    /// Strides of `y`.
    pub y: [usize; 3],
}

/// The position of sequence element `s` of sample `b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Positions {
    /// `offset + s`; there is no second input.
    From(u64),
    /// `offset + input + s`, with a second input i32 of one element.
    FromInput(u64),
    /// `offset + input[b] + s`, with a second input i32 `[B]`.
    FromInputs(u64),
    /// `input[b, s]`, with a second input i32 `[B, S]`.
    Table,
}

/// One loop of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyLoop {
    /// Number of points.
    pub size: usize,
    /// Stride in the source; zero repeats.
    pub source: usize,
    /// Stride in the target.
    pub target: usize,
}

/// A strided copy: transposition, slice, concatenation, padding, broadcast.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Copy {
    /// Loops, outermost first.
    pub loops: Vec<CopyLoop>,
    /// First element read.
    pub source_offset: Offset,
    /// First element written.
    pub target_offset: usize,
    /// Elements of the target to zero first, from its start; zero leaves the rest untouched.
    pub zero_first: usize,
    /// Any type; only its size matters.
    pub dtype: DType,
}

/// A window of `y [outer, capacity, inner]` along its middle dim: `x [outer, len, inner]` stands
/// from a position on that is known at run time: an input i32 `[positions]`, each of which counts
/// for `outer / positions` points that follow each other.
///
/// A window that would end past the capacity or start before zero is moved back inside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Elements of the dims before.
    pub outer: usize,
    /// Numbers of the input, of which `outer` is a multiple.
    pub positions: usize,
    /// Length of the window.
    pub len: usize,
    /// Length of the whole, at least `len`.
    pub capacity: usize,
    /// Elements of the dims after.
    pub inner: usize,
    /// Any type; only its size matters.
    pub dtype: DType,
}

/// Fills a buffer with one value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fill {
    /// Number of elements.
    pub len: usize,
    /// The value, converted to the type.
    pub value: f64,
    /// F32, F64, I32, U32, I64, Bool or narrow.
    pub dtype: DType,
}

/// What it computes and how much of it, for people: `product 64x3072x768 f32`.
impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kernel::Product(p) => display_product(f, p),
            Kernel::Rows(r) => {
                write!(f, "rows {}x{} {} of {} instrs", r.rows, r.cols, r.dtype, r.instrs.len())
            }
            Kernel::Attention(a) => display_attention(f, "attention", a),
            Kernel::AttentionBwd(a) => display_attention(f, "attention-bwd", a),
            Kernel::Experts(e) => display_experts(f, "experts", e),
            Kernel::ExpertsBwd(e) => display_experts(f, "experts-bwd", e),
            Kernel::Gather(g) => {
                write!(f, "gather {} of {}x{} {}", g.count, g.rows, g.width, g.dtype)
            }
            Kernel::ScatterAdd(g) => {
                write!(f, "scatter-add {} to {}x{} {}", g.count, g.rows, g.width, g.dtype)
            }
            Kernel::Replace(g) => {
                write!(f, "replace {} of {}x{} {}", g.count, g.rows, g.width, g.dtype)
            }
            Kernel::Lines(l) => {
                let Lines { outer, extent, inner, how, dtype, .. } = l;
                write!(f, "{} {outer}x{extent}x{inner} {dtype}", how.name())
            }
            Kernel::Rope(r) => {
                write!(f, "rope {}x{}x{}x{} {}", r.batch, r.seq, r.heads, r.dim, r.dtype)
            }
            Kernel::Copy(c) => {
                let points: usize = c.loops.iter().map(|l| l.size).product();
                write!(f, "copy {points} {}", c.dtype)
            }
            Kernel::Place(w) => display_window(f, "place", w),
            Kernel::Take(w) => display_window(f, "take", w),
            Kernel::Fill(x) => write!(f, "fill {} {} with {}", x.len, x.dtype, x.value),
            Kernel::Products(p) => {
                for (at, part) in p.parts.iter().enumerate() {
                    f.write_str(if at == 0 { "" } else { " and " })?;
                    display_product(f, &part.product)?;
                    if let Some(then) = &part.then {
                        write!(f, " then {} instrs", then.rows.instrs.len())?;
                    }
                }
                Ok(())
            }
        }
    }
}

fn display_product(f: &mut fmt::Formatter<'_>, p: &Product) -> fmt::Result {
    let [batch, m, n, k] = p.sizes();
    f.write_str("product ")?;
    if batch != 1 {
        write!(f, "{batch} of ")?;
    }
    write!(f, "{m}x{n}x{k} ")?;
    let StoredTypes { a, b, c } = p.stored;
    if [a, b] == [c, c] { write!(f, "{c}") } else { write!(f, "{a}*{b}->{c}") }?;
    f.write_str(if p.operands == Operands::Tf32 { " by tf32" } else { "" })?;
    f.write_str(if p.scales.is_some() { " with scales" } else { "" })?;
    f.write_str(if p.accumulate { " accumulating" } else { "" })?;
    write!(f, "{}", p.tiling)
}

fn display_experts(f: &mut fmt::Formatter<'_>, name: &str, e: &Experts) -> fmt::Result {
    let Experts { tokens, experts, model, inner, top_k, of, dtype, .. } = e;
    write!(f, "{name} {top_k} of {of} e{experts} t{tokens} m{model} f{inner} {dtype}")?;
    f.write_str(if e.accumulate.contains(&true) { " accumulating" } else { "" })
}

fn display_window(f: &mut fmt::Formatter<'_>, name: &str, w: &Window) -> fmt::Result {
    write!(f, "{name} {}x{} of {}x{} {}", w.outer, w.len, w.capacity, w.inner, w.dtype)
}

fn display_attention(f: &mut fmt::Formatter<'_>, name: &str, a: &Attention) -> fmt::Result {
    let causal = if a.causal { " causal" } else { "" };
    let Attention { batch, queries, keys, heads, dim, dtype, .. } = a;
    f.write_str(name)?;
    f.write_str(causal)?;
    if a.window > 0 {
        write!(f, " window {}", a.window)?;
    }
    if a.softcap != 0.0 {
        write!(f, " softcap {}", a.softcap)?;
    }
    f.write_str(if a.bias.is_some() { " bias" } else { "" })?;
    match a.documents {
        None => {}
        Some(0) => f.write_str(" documents")?,
        Some(start) => write!(f, " documents from {start}")?,
    }
    write!(f, " b{batch} s{queries} t{keys} h{heads} d{dim} {dtype}")
}
