//! The closed set of operations. The doc of an op is its specification.
//!
//! Every op is pure and has one result, but [`Op::Call`], which has those of its function.
//! Each question about ops (type, value, gradient, cost, factors) is one file with one match.

use std::fmt;

use serde::{Deserialize, Serialize};

pub use crate::convolution::Convolution;
use crate::pieces::PieceOrder;
use crate::random::DrawBits;
use crate::{DType, dim::Dim};

/// An elementwise function of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Unary {
    /// `-x`
    Neg,
    /// `|x|`
    Abs,
    /// `e^x`
    Exp,
    /// The natural logarithm.
    Log,
    /// The square root.
    Sqrt,
    /// `1 / sqrt(x)`
    Rsqrt,
    /// The hyperbolic tangent.
    Tanh,
    /// The error function.
    Erf,
    /// The sine of radians.
    Sin,
    /// The cosine of radians.
    Cos,
    /// The largest integer not above `x`.
    Floor,
    /// The largest power of two not above `|x|`, with the sign of `x`; zero, what is infinite and
    /// what is no number stay.
    PowerFloor,
}

impl Unary {
    /// All of them.
    pub const ALL: [Unary; 12] = [
        Unary::Neg,
        Unary::Abs,
        Unary::Exp,
        Unary::Log,
        Unary::Sqrt,
        Unary::Rsqrt,
        Unary::Tanh,
        Unary::Erf,
        Unary::Sin,
        Unary::Cos,
        Unary::Floor,
        Unary::PowerFloor,
    ];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Unary::Neg => "neg",
            Unary::Abs => "abs",
            Unary::Exp => "exp",
            Unary::Log => "log",
            Unary::Sqrt => "sqrt",
            Unary::Rsqrt => "rsqrt",
            Unary::Tanh => "tanh",
            Unary::Erf => "erf",
            Unary::Sin => "sin",
            Unary::Cos => "cos",
            Unary::Floor => "floor",
            Unary::PowerFloor => "power_floor",
        }
    }
}

/// An elementwise function of two operands of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Binary {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a * b`
    Mul,
    /// `a / b`; of integers rounded down.
    Div,
    /// The larger one.
    Max,
    /// The smaller one.
    Min,
    /// `a ^ b`
    Pow,
}

impl Binary {
    /// All of them.
    pub const ALL: [Binary; 7] =
        [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max, Binary::Min, Binary::Pow];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Binary::Add => "add",
            Binary::Sub => "sub",
            Binary::Mul => "mul",
            Binary::Div => "div",
            Binary::Max => "max",
            Binary::Min => "min",
            Binary::Pow => "pow",
        }
    }
}

/// A comparison of two operands of one type; the result is `bool`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Comparison {
    /// `a == b`
    Eq,
    /// `a < b`
    Lt,
    /// `a <= b`
    Le,
}

impl Comparison {
    /// All of them.
    pub const ALL: [Comparison; 3] = [Comparison::Eq, Comparison::Lt, Comparison::Le];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Comparison::Eq => "eq",
            Comparison::Lt => "lt",
            Comparison::Le => "le",
        }
    }
}

/// How values are combined by a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Combiner {
    /// Added.
    Sum,
    /// The largest.
    Max,
    /// The smallest.
    Min,
}

impl Combiner {
    /// All of them.
    pub const ALL: [Combiner; 3] = [Combiner::Sum, Combiner::Max, Combiner::Min];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Combiner::Sum => "sum",
            Combiner::Max => "max",
            Combiner::Min => "min",
        }
    }
}

/// How a contraction reads its operands.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Operands {
    /// As they are.
    #[default]
    Exact,
    /// Numbers of F32, rounded to the 10 bits of mantissa of TF32: [`formats::tf32`].
    ///
    /// [`formats::tf32`]: crate::formats::tf32
    Tf32,
}

/// The index letters of a contraction: `bsm,mf->bsf`. One letter is one iteration factor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Einsum {
    /// The letters of the first operand's dims.
    pub a: Vec<char>,
    /// The letters of the second operand's dims.
    pub b: Vec<char>,
    /// The letters of the result's dims.
    pub result: Vec<char>,
    /// Whether sums of narrow numbers stay in the type that they are added in, and are not rounded
    /// to that of the operands.
    #[serde(default)]
    pub is_wide: bool,
    /// How elements of the operands are read.
    #[serde(default)]
    pub operands: Operands,
}

impl Einsum {
    /// A contraction that rounds its sums to the type of the operands, which are read as they are.
    pub fn new(a: Vec<char>, b: Vec<char>, result: Vec<char>) -> Einsum {
        Einsum { a, b, result, is_wide: false, operands: Operands::Exact }
    }

    /// Reads `bsm,mf->bsf`.
    pub fn parse(text: &str) -> Option<Einsum> {
        let (operands, result) = text.split_once("->")?;
        let (a, b) = operands.split_once(',')?;
        let letters = |s: &str| {
            let ok = s.chars().all(|c| c.is_ascii_alphabetic());
            ok.then(|| s.chars().collect::<Vec<_>>())
        };
        let (a, b, result) = (letters(a)?, letters(b)?, letters(result)?);
        Some(Einsum::new(a, b, result))
    }

    /// Every letter once, in the order of the operands.
    pub fn letters(&self) -> Vec<char> {
        let mut letters = self.a.clone();
        letters.extend(self.b.iter().filter(|c| !self.a.contains(c)));
        letters
    }
}

impl fmt::Display for Einsum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |letters: &[char]| letters.iter().collect::<String>();
        write!(f, "{},{}->{}", text(&self.a), text(&self.b), text(&self.result))
    }
}

/// Windows of a dim: window `i` holds the elements `i * stride + j * dilation` for `j < size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Windows {
    /// The dim.
    pub dim: usize,
    /// The elements of a window.
    pub size: usize,
    /// From one window to the next.
    pub stride: usize,
    /// From one element of a window to the next.
    pub dilation: usize,
}

impl fmt::Display for Windows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Windows { dim, size, stride, dilation } = self;
        write!(f, "dim={dim} size={size} stride={stride} dilation={dilation}")
    }
}

impl Windows {
    /// How many whole windows `extent` elements have; none when that is no number above zero.
    pub fn count(&self, extent: usize) -> Option<usize> {
        let last = self.size.checked_sub(1)?.checked_mul(self.dilation)?;
        let left = extent.checked_sub(last.checked_add(1)?)?;
        (self.dilation > 0).then_some(left.checked_div(self.stride)? + 1)
    }
}

/// A collective of the ranks along one axis of the mesh; only partition makes them.
///
/// `counts` are the elements of the cut dim that each member holds, in the order of the axis.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Collective {
    /// Every member gets the combination of all members' values.
    AllReduce(Combiner),
    /// Every member gets all pieces, put side by side along `dim`.
    AllGather {
        /// The dim along which the pieces lie.
        dim: usize,
        /// The pieces' sizes.
        counts: Vec<usize>,
        /// Where they lie.
        order: PieceOrder,
    },
    /// Every member gets its own piece, along `dim`, of the sum of all members' values.
    ReduceScatter {
        /// The dim that is cut.
        dim: usize,
        /// The pieces' sizes.
        counts: Vec<usize>,
        /// Where they lie.
        order: PieceOrder,
        /// Which piece is this member's own.
        own: usize,
    },
    /// Every member gets its piece of every member's value, in the order of members. Pieces are
    /// equal, and lie along the first dim.
    AllToAll {
        /// The members.
        pieces: usize,
    },
    /// Of tokens and gates, `x[B/pieces, ..., M]` and `gates[B, ..., E/pieces]`: every member gets
    /// the tokens of all members that have a gate for one of its experts. The others have no
    /// numbers: nothing reads them.
    Dispatch {
        /// The members, each with equally many tokens and experts.
        pieces: usize,
        /// Experts of a token.
        top_k: usize,
    },
    /// Of terms and gates, `y[B, ..., M]` and `gates[B/pieces, ..., E]`: every member gets the sums
    /// of its tokens' terms over the members with an expert that a token has a gate for. The terms
    /// of other members are not read.
    Combine {
        /// The members, each with equally many tokens and experts.
        pieces: usize,
        /// Experts of a token.
        top_k: usize,
    },
}

/// What a node computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    /// `constant 0.5` — every element is the number. The type is part of the op.
    ///
    /// - (C1) of an integer type, the number is one of its integers; of `bool`, 0 or 1
    Constant {
        /// The number; it is exact in the element type or rounded to it.
        value: f64,
        /// The element type of the result.
        dtype: DType,
        /// The dims of the result.
        dims: Vec<Dim>,
    },
    /// `iota dim=1 start=0` — each element is its index along `dim`, plus `start`.
    ///
    /// - (C1) the dim exists
    /// - (C2) every number is one of the element type
    Iota {
        /// The dim that is counted.
        dim: usize,
        /// The number of the first element.
        start: i64,
        /// The element type of the result.
        dtype: DType,
        /// The dims of the result.
        dims: Vec<Dim>,
    },
    /// `random salt=3 key` — uniform in `[0, 1)`, a function of the key, the salt and the element's
    /// index in the global tensor (see [`crate::random`]). Along the first dim that counts from the
    /// key's sample: with `per_sample=0` all samples draw the same numbers.
    ///
    /// - (C1) the key is `u32[4]`
    /// - (C2) `start` and `extent` have one entry for every dim
    /// - (C3) the elements are among those of `extent`, but along the first dim
    Random {
        /// Tells this site from others of the same call.
        salt: u32,
        /// For each dim, the global index of the first local element.
        start: Vec<i64>,
        /// For each dim, the global size; that of the first is not used.
        extent: Vec<Dim>,
        /// Indices of the first dim that belong to one sample; 0 where it counts no samples.
        per_sample: u32,
        /// The bits of a draw.
        bits: DrawBits,
        /// The element type of the result.
        dtype: DType,
        /// The dims of the result.
        dims: Vec<Dim>,
    },
    /// `fold_key salt=3 key` — the key of a nested call.
    ///
    /// - (C1) the key is `u32[4]`
    FoldKey {
        /// Tells this call from others.
        salt: u32,
    },
    /// An elementwise function of one floating-point operand.
    ///
    /// - (C1) the operand is floating-point; `neg` and `abs` take signed integers too
    Unary(Unary),
    /// An elementwise function of two operands.
    ///
    /// - (C1) both operands have the same type
    /// - (C2) the type is not `bool`
    Binary(Binary),
    /// An elementwise comparison, with a `bool` result.
    ///
    /// - (C1) both operands have the same type
    Compare(Comparison),
    /// `select c a b` — `a` where `c` holds, else `b`.
    ///
    /// - (C1) `c` is `bool` and has the dims of `a`
    /// - (C2) `a` and `b` have the same type
    Select,
    /// `cast f32 x` — the nearest value of another element type; to integers towards zero.
    Cast {
        /// The element type of the result.
        dtype: DType,
    },
    /// `contract bmk,kn->bmn a b` — sums products over the shared factors, as an einsum does.
    ///
    /// - (C1) `a` and `b` have the same floating-point element type
    /// - (C2) every factor has one size
    /// - (C3) every result factor stands in `a` or `b`; no factor stands twice in one operand;
    ///   a factor that is summed stands in both
    /// - (C4) operands that are rounded (`operands=tf32`) are of f32
    ///
    /// Accumulates in f32 (f64 for f64), which is the type of the result where it is wide: where
    /// the text declares it so. Of wide operands `sums=kept` says that the result is not to be
    /// rounded where these become narrow. Cost: 2 flops per point of the factor space.
    Contract(Einsum),
    /// `scaled_contract bsm,fm->bsf runs_first=[1] a b scales_a scales_b` — sums products of codes
    /// of 8 bits: over each run of 128 points of the summed factors, in the order of `a`, the sum
    /// of products times the scales of both rows, which is what codes of one are worth.
    ///
    /// The scales of an operand are a matrix: a row for each point of the factors that the operand
    /// alone has, in their order, or for 128 of them that follow each other, and a column for each
    /// run; or by runs first.
    ///
    /// - (C1) `a` and `b` are of f8e4m3 or f8e5m2, the scales of f32, the result of f32 or bf16
    /// - (C2) the einsum is one of `contract`, and no factor is in both operands and the result
    /// - (C3) sizes are fixed, and runs are whole
    /// - (C4) scales have a row for each row of their operand, or for 128, and a column for each
    ///   run
    ///
    /// Accumulates in f32. Has no gradient. Cost: that of `contract`.
    ScaledContract {
        /// The letters; wide where the result is of f32.
        einsum: Einsum,
        /// Of each operand, whether its scales lie by runs first.
        runs_first: [bool; 2],
    },
    /// `conv stride=[2, 2] before=[1, 1] after=[1, 1] dilation=[1, 1] spread=[1, 1] x w` — for each
    /// sample and kernel, the sum of the products of the kernel with each window of `x`:
    /// `x[N, g*C, …]`, `w[g*O, C, …]` yield `[N, g*O, …]`. Channels fall into `g` groups; the
    /// kernels of a group see its channels only. `x=[0, 2, 3, 1]` says that the dims of `x` lie in
    /// another order, as [`Op::Transpose`] would lay them; so do `w=` and `y=`, of the result.
    ///
    /// - (C1) `x` and `w` have the same floating-point element type and number of dims, two or more
    /// - (C2) the channels of `x` are a multiple `g` of those of `w`, and `g` divides the kernels
    /// - (C3) spatial sizes are fixed
    /// - (C4) each list has one entry for every spatial dim; stride, dilation and spread are
    ///   positive, and one window fits
    /// - (C5) the dims of `x`, `w` and the result are named once each
    ///
    /// Accumulates in f32 (f64 for f64). Cost: 2 flops per element of the result and of a kernel.
    Conv(Convolution),
    /// `reduce sum dims=[2] x` — combines along dims, which the result has no more.
    ///
    /// - (C1) the dims exist, in ascending order
    Reduce {
        /// How elements are combined.
        combiner: Combiner,
        /// The dims that vanish.
        dims: Vec<usize>,
    },
    /// `prod dims=[2] x` — multiplies along dims, which the result has no more.
    ///
    /// - (C1) the dims exist, in ascending order
    /// - (C2) the operand is not `bool`
    ///
    /// Where a factor is zero, the second derivative is that of the product of the others.
    Prod {
        /// The dims that vanish.
        dims: Vec<usize>,
    },
    /// `argmax dim=1 x` — the index, an `i32`, of the first of the largest elements along a dim,
    /// which the result has no more. A NaN is larger than every number.
    ///
    /// - (C1) the dim exists
    /// - (C2) the operand is not `bool`
    ///
    /// The index is 0 where there is no element.
    ArgMax {
        /// The dim that vanishes.
        dim: usize,
    },
    /// `cumulative sum dim=1 x` — each element is the combination of those up to and including it
    /// along a dim.
    ///
    /// - (C1) the dim exists
    /// - (C2) the operand is not `bool`
    ///
    /// Sums accumulate in f64 for f64, else in f32, in ascending order.
    Cumulative {
        /// How elements are combined.
        combiner: Combiner,
        /// The dim.
        dim: usize,
    },
    /// `sort ascending dim=1 x` — the indices, `i32`, that sort the elements along a dim. Equal
    /// elements stay in order; a NaN is larger than every number.
    ///
    /// - (C1) the dim exists
    Sort {
        /// The dim.
        dim: usize,
        /// Whether the largest come first.
        descending: bool,
    },
    /// `top_k dim=1 count=4 x` — the indices, `i32`, of the largest elements along a dim, the
    /// largest first; the first `count` of a descending [`Op::Sort`].
    ///
    /// - (C1) the dim exists
    /// - (C2) there are `count` elements
    TopK {
        /// The dim.
        dim: usize,
        /// How many.
        count: usize,
    },
    /// `reshape x` — the same elements in row-major order under other dims.
    ///
    /// - (C1) the number of elements stays
    Reshape {
        /// The dims of the result.
        dims: Vec<Dim>,
    },
    /// `transpose perm=[1, 0] x` — dim `i` of the result is dim `perm[i]` of the operand.
    ///
    /// - (C1) `perm` is a permutation of the operand's dims
    Transpose {
        /// For each dim of the result, that of the operand.
        perm: Vec<usize>,
    },
    /// `broadcast new=[0, 1] x` — repeats the operand along dims that the result has in addition.
    ///
    /// - (C1) the result without its new dims has the operand's dims
    Broadcast {
        /// The dims of the result that the operand lacks, ascending.
        new: Vec<usize>,
        /// The dims of the result.
        dims: Vec<Dim>,
    },
    /// `slice dim=1 start=0 size=8 x` — a range of one dim.
    ///
    /// - (C1) the dim exists and the range lies in it
    Slice {
        /// The dim.
        dim: usize,
        /// The first index that stays.
        start: usize,
        /// How many stay.
        size: usize,
    },
    /// `pad dim=1 before=0 after=8 x` — zeros before and after along one dim: the transpose of
    /// [`Op::Slice`].
    ///
    /// - (C1) the dim exists
    Pad {
        /// The dim.
        dim: usize,
        /// Zeros before.
        before: usize,
        /// Zeros after.
        after: usize,
    },
    /// `reverse dims=[1] x` — the elements in opposite order along dims.
    ///
    /// - (C1) the dims exist, in ascending order
    Reverse {
        /// The dims.
        dims: Vec<usize>,
    },
    /// `window dim=1 size=3 stride=2 dilation=1 x` — the dim becomes two: the windows, `stride`
    /// apart, and the elements of a window, `dilation` apart. Only whole windows count.
    ///
    /// - (C1) the dim exists and has a fixed size
    /// - (C2) size, stride and dilation are positive, and one window fits
    Window(Windows),
    /// `fold dim=1 size=3 stride=2 dilation=1 x` — the transpose of [`Op::Window`]: adds windows
    /// into zeros, window after window.
    ///
    /// - (C1) the dim and the next one exist, and count the windows of `extent` elements
    /// - (C2) size, stride and dilation are positive, and one window fits
    Fold {
        /// The windows.
        windows: Windows,
        /// The size of the result's dim.
        extent: usize,
    },
    /// `concat dim=1 a b …` — operands side by side.
    ///
    /// - (C1) the operands agree in all but the dim
    Concat {
        /// The dim along which they lie.
        dim: usize,
    },
    /// `gather dim=0 start=0 table ids` — picks slices of the table along `dim`; the ids' dims
    /// replace it. The slice of an id outside `[start, start + size)` is zero.
    ///
    /// - (C1) ids are `i32`, `i64` or `u32`
    /// - (C2) the dim exists
    Gather {
        /// The dim of the table that the ids index.
        dim: usize,
        /// The id of the table's first slice.
        start: i64,
    },
    /// `scatter_add dim=0 start=0 ids x` — the transpose of [`Op::Gather`]: adds slices into a zero
    /// table, in the order of the ids. Ids outside the table are left out.
    ///
    /// - (C1) ids are `i32`, `i64` or `u32`
    /// - (C2) `x` has the ids' dims in place of `dim`
    ScatterAdd {
        /// The dim of the table that the ids index.
        dim: usize,
        /// The id of the table's first slice.
        start: i64,
        /// The size of that dim.
        size: Dim,
    },
    /// `scatter dim=0 start=0 x ids updates` — `x` with its slices of the given ids along `dim`
    /// replaced; of several for one id the last one stays. Ids outside are left out.
    ///
    /// - (C1) ids are `i32`, `i64` or `u32`
    /// - (C2) `updates` has the element type of `x`, and the ids' dims in place of `dim`
    Scatter {
        /// The dim of `x` that the ids index.
        dim: usize,
        /// The id of the first slice of `x`.
        start: i64,
    },
    /// `dynamic_update_slice dim=1 x update at` — `x` with `update` written from index `at` on.
    ///
    /// - (C1) `at` is an `i32` scalar or, where the dim is not the first, has an `i32` for each
    ///   point of the first dim of `x`
    /// - (C2) `update` agrees with `x` in all but the dim, and is not larger there
    ///
    /// An index that would write past the end is clamped, so that all of `update` fits.
    DynamicUpdateSlice {
        /// The dim along which the position is counted.
        dim: usize,
    },
    /// `dynamic_slice dim=1 size=4 x at` — the range of `size` from index `at` on.
    ///
    /// - (C1) `at` is an `i32` scalar or, where the dim is not the first, has an `i32` for each
    ///   point of the first dim of `x`
    /// - (C2) the dim exists and `size` is not larger
    ///
    /// An index that would read past the end is clamped.
    DynamicSlice {
        /// The dim.
        dim: usize,
        /// How many elements are kept.
        size: Dim,
    },
    /// `call @f a b …` — the results of a function.
    ///
    /// - (C1) the function exists and the operands have its parameters' types
    Call {
        /// The function's name.
        function: String,
    },
    /// A collective along an axis of the mesh; in local modules only.
    Collective {
        /// What is done.
        kind: Collective,
        /// The axis.
        axis: String,
    },
}
