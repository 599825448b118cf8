//! Block programs: elementwise expressions fused with reductions over rows and columns.
//!
//! The domain is `rows` × `cols` points. A program is a list of instructions in single assignment:
//! instruction `i` defines value `i`, from earlier values. A value is a **vector** (one number per
//! point) or a **row scalar** (one number per row, constants included); operations mix them freely
//! and a row scalar stands for all points of its row. Numbers are of the compute type, truth is
//! 1 and falsehood 0, and anything but 0 counts as true.
//!
//! Narrow types ([`DType::is_narrow`]) are read exactly and rounded to where they are stored.
//! [`UnaryOp::rounding`] rounds values on the way, so that fusing nodes changes no bit.
//!
//! Programs of I64 are exact: sums, differences, products and powers are modulo `2^64`, quotients
//! are rounded down and zero where the divisor is, a negative power is the quotient of one and the
//! positive one, rounded towards zero. They draw nothing and have no function that is not one of
//! integers ([`UnaryOp::is_whole`], [`BinaryOp::is_whole`]).

use ir::DType;
use ir::random::DrawBits;
use serde::{Deserialize, Serialize};

use crate::offset::Offset;

/// A fused kernel: its inputs and outputs are the launch's, in order.
///
/// An output may be the same buffer as an input with the same access: points are read before they
/// are written. Any other overlap is outside the contract.
///
/// **Determinism**: row reductions depend on `cols` and the instruction set only; column and total
/// sums are taken over blocks of rows whose cut depends on the shape alone, in ascending order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rows {
    /// R.
    pub rows: usize,
    /// C.
    pub cols: usize,
    /// Compute type: F32, F64 or I64.
    pub dtype: DType,
    /// The launch's inputs.
    pub inputs: Vec<RowInput>,
    /// Value `i` is the result of instruction `i`.
    pub instrs: Vec<Instr>,
    /// The launch's outputs.
    pub outputs: Vec<Output>,
}

/// An input buffer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowInput {
    /// F32, F64, I32, U32, Bool or narrow, and I64 where the program computes in it; converted to
    /// the compute type, to I64 towards zero. Key inputs of [`Instr::Random`] are U32 and are never
    /// loaded.
    pub dtype: DType,
    /// Which element each point reads.
    pub access: Access,
}

/// One digit of a row or column index in mixed radix: it contributes
/// `(index / div) % modulus * stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digit {
    /// Product of the sizes of faster digits.
    pub div: usize,
    /// Size of the digit.
    pub modulus: usize,
    /// Elements per step.
    pub stride: usize,
}

impl Digit {
    /// The contribution of `index`.
    #[inline]
    pub fn of(&self, index: usize) -> usize {
        index / self.div % self.modulus * self.stride
    }
}

/// Which element of a buffer a point uses: `offset + sum of row digits + col * col_stride`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// Digits of the row index; none where rows do not matter.
    pub row: Vec<Digit>,
    /// Elements per column; zero where columns do not matter.
    pub col_stride: usize,
    /// First element.
    pub offset: usize,
}

impl Access {
    /// A row-major `[rows, cols]`.
    pub fn full(rows: usize, cols: usize) -> Access {
        Access {
            row: vec![Digit { div: 1, modulus: rows, stride: cols }],
            col_stride: 1,
            offset: 0,
        }
    }

    /// One element per row.
    pub fn per_row(rows: usize) -> Access {
        Access { row: vec![Digit { div: 1, modulus: rows, stride: 1 }], col_stride: 0, offset: 0 }
    }

    /// One element per column.
    pub fn per_column() -> Access {
        Access { row: Vec::new(), col_stride: 1, offset: 0 }
    }

    /// One element for all.
    pub fn scalar() -> Access {
        Access { row: Vec::new(), col_stride: 0, offset: 0 }
    }

    /// First element that row `row` uses.
    #[inline]
    pub fn row_start(&self, row: usize) -> usize {
        self.offset + self.row.iter().map(|d| d.of(row)).sum::<usize>()
    }

    /// One more than the largest element used over a domain, zero for an empty one.
    pub fn extent(&self, rows: usize, cols: usize) -> usize {
        if rows == 0 || cols == 0 {
            return 0;
        }
        let reach = |d: &Digit| ((rows - 1) / d.div).min(d.modulus - 1) * d.stride;
        self.offset + self.row.iter().map(reach).sum::<usize>() + (cols - 1) * self.col_stride + 1
    }
}

/// One instruction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Instr {
    /// The element of an input; a row scalar where the access has no column stride.
    Load {
        /// Index among the inputs.
        input: usize,
    },
    /// A constant.
    Const {
        /// Its value; of a program of I64, an integer.
        value: f64,
    },
    /// `base + sum of row digits + col * col_stride` as a number, such as a column index.
    Index {
        /// Digits of the row index.
        row: Vec<Digit>,
        /// Factor of the column index; zero makes a row scalar.
        col_stride: usize,
        /// Added to it.
        base: Offset,
    },
    /// A function of one value.
    Unary {
        /// The function.
        op: UnaryOp,
        /// Its argument.
        x: usize,
    },
    /// A function of two values.
    Binary {
        /// The function.
        op: BinaryOp,
        /// First argument.
        a: usize,
        /// Second argument.
        b: usize,
    },
    /// `a` where `condition` is not zero, else `b`.
    Select {
        /// The condition.
        condition: usize,
        /// Taken where true.
        a: usize,
        /// Taken where false.
        b: usize,
    },
    /// Reduction over the columns of each row: a row scalar.
    Reduce {
        /// The combiner.
        op: ReduceOp,
        /// The value reduced.
        x: usize,
    },
    /// A number uniform in `[0, 1)`.
    Random(Draw),
}

/// A random draw: `bits.uniform(key.stream(salt), index)`.
///
/// `index = offset * unit + key.sample * sample_stride + sum of row and column digits` is the
/// row-major position of the point in the global tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draw {
    /// The input that holds the key, u32\[4\].
    pub key: usize,
    /// The site.
    pub salt: u32,
    /// The bits of a draw.
    pub bits: DrawBits,
    /// Digits of the row index.
    pub row: Vec<Digit>,
    /// Digits of the column index; none makes a row scalar.
    pub col: Vec<Digit>,
    /// Index of the first point, in units.
    pub offset: Offset,
    /// Points of a unit.
    pub unit: u64,
    /// Elements of the global tensor per sample.
    pub sample_stride: u64,
}

/// Functions of one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum UnaryOp {
    /// `-x`
    Neg,
    /// `|x|`
    Abs,
    /// `e^x`
    Exp,
    /// Natural logarithm.
    Log,
    /// Square root.
    Sqrt,
    /// `1 / sqrt(x)`
    Rsqrt,
    /// `1 / x`
    Recip,
    /// Hyperbolic tangent.
    Tanh,
    /// Error function.
    Erf,
    /// Sine.
    Sin,
    /// Cosine.
    Cos,
    /// Largest integer that is not larger.
    Floor,
    /// The largest power of two not above `|x|`, with the sign of `x`.
    PowerFloor,
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// `x * x`
    Square,
    /// `x / 2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`
    GeluTanh,
    /// `x / 2 * (1 + erf(x / sqrt 2))`
    GeluErf,
    /// `x * sigmoid(x)`
    Silu,
    /// 1 where `x` is zero, else 0.
    Not,
    /// The integer of 32 bits with a sign that is `x` modulo `2^32`. The compute type is I64, or
    /// F64 and `x` an integer of at most 50 bits.
    WrapI32,
    /// As [`UnaryOp::WrapI32`], without a sign.
    WrapU32,
    /// The nearest number of F32.
    Single,
    /// The nearest number of BF16, as [`ir::formats`] has it; the others alike.
    RoundBF16,
    /// Of F16.
    RoundF16,
    /// Of F8E4M3.
    RoundF8E4M3,
    /// Of F8E5M2.
    RoundF8E5M2,
}

impl UnaryOp {
    /// All functions of one value.
    pub const ALL: [UnaryOp; 26] = [
        UnaryOp::Neg,
        UnaryOp::Abs,
        UnaryOp::Exp,
        UnaryOp::Log,
        UnaryOp::Sqrt,
        UnaryOp::Rsqrt,
        UnaryOp::Recip,
        UnaryOp::Tanh,
        UnaryOp::Erf,
        UnaryOp::Sin,
        UnaryOp::Cos,
        UnaryOp::Floor,
        UnaryOp::PowerFloor,
        UnaryOp::Sigmoid,
        UnaryOp::Square,
        UnaryOp::GeluTanh,
        UnaryOp::GeluErf,
        UnaryOp::Silu,
        UnaryOp::Not,
        UnaryOp::WrapI32,
        UnaryOp::WrapU32,
        UnaryOp::Single,
        UnaryOp::RoundBF16,
        UnaryOp::RoundF16,
        UnaryOp::RoundF8E4M3,
        UnaryOp::RoundF8E5M2,
    ];

    /// What rounds to a type of floating-point numbers, unless that holds all numbers of programs.
    pub fn rounding(dtype: DType) -> Option<UnaryOp> {
        match dtype {
            DType::F32 => Some(UnaryOp::Single),
            DType::BF16 => Some(UnaryOp::RoundBF16),
            DType::F16 => Some(UnaryOp::RoundF16),
            DType::F8E4M3 => Some(UnaryOp::RoundF8E4M3),
            DType::F8E5M2 => Some(UnaryOp::RoundF8E5M2),
            DType::F64 | DType::I8 | DType::I32 | DType::I64 | DType::U32 | DType::Bool => None,
        }
    }

    /// Whether it yields integers of integers.
    pub fn is_whole(self) -> bool {
        match self {
            UnaryOp::Neg
            | UnaryOp::Abs
            | UnaryOp::Floor
            | UnaryOp::Square
            | UnaryOp::Not
            | UnaryOp::WrapI32
            | UnaryOp::WrapU32 => true,
            UnaryOp::Exp
            | UnaryOp::Log
            | UnaryOp::Sqrt
            | UnaryOp::Rsqrt
            | UnaryOp::Recip
            | UnaryOp::Tanh
            | UnaryOp::Erf
            | UnaryOp::Sin
            | UnaryOp::Cos
            | UnaryOp::PowerFloor
            | UnaryOp::Sigmoid
            | UnaryOp::GeluTanh
            | UnaryOp::GeluErf
            | UnaryOp::Silu
            | UnaryOp::Single
            | UnaryOp::RoundBF16
            | UnaryOp::RoundF16
            | UnaryOp::RoundF8E4M3
            | UnaryOp::RoundF8E5M2 => false,
        }
    }
}

/// Functions of two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum BinaryOp {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a * b`
    Mul,
    /// `a / b`
    Div,
    /// The larger; NaN where one is.
    Max,
    /// The smaller; NaN where one is.
    Min,
    /// `a^b`
    Pow,
    /// `a < b`
    Lt,
    /// `a <= b`
    Le,
    /// `a == b`
    Eq,
    /// `a >= b`
    Ge,
    /// `a > b`
    Gt,
    /// Both not zero.
    And,
    /// Not both zero.
    Or,
    /// `b` times the derivative of [`UnaryOp::GeluTanh`] at `a`.
    GeluTanhGrad,
    /// `b` times the derivative of [`UnaryOp::GeluErf`] at `a`.
    GeluErfGrad,
    /// `b` times the derivative of [`UnaryOp::Silu`] at `a`.
    SiluGrad,
}

impl BinaryOp {
    /// All functions of two values.
    pub const ALL: [BinaryOp; 17] = [
        BinaryOp::Add,
        BinaryOp::Sub,
        BinaryOp::Mul,
        BinaryOp::Div,
        BinaryOp::Max,
        BinaryOp::Min,
        BinaryOp::Pow,
        BinaryOp::Lt,
        BinaryOp::Le,
        BinaryOp::Eq,
        BinaryOp::Ge,
        BinaryOp::Gt,
        BinaryOp::And,
        BinaryOp::Or,
        BinaryOp::GeluTanhGrad,
        BinaryOp::GeluErfGrad,
        BinaryOp::SiluGrad,
    ];

    /// Whether it yields integers of integers.
    pub fn is_whole(self) -> bool {
        match self {
            BinaryOp::Add
            | BinaryOp::Sub
            | BinaryOp::Mul
            | BinaryOp::Div
            | BinaryOp::Max
            | BinaryOp::Min
            | BinaryOp::Pow
            | BinaryOp::Lt
            | BinaryOp::Le
            | BinaryOp::Eq
            | BinaryOp::Ge
            | BinaryOp::Gt
            | BinaryOp::And
            | BinaryOp::Or => true,
            BinaryOp::GeluTanhGrad | BinaryOp::GeluErfGrad | BinaryOp::SiluGrad => false,
        }
    }
}

/// Combiners of row reductions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// Sum; of a row scalar, `cols` times it.
    Sum,
    /// Largest; NaN where one is.
    Max,
    /// Smallest; NaN where one is.
    Min,
}

/// What is done with a value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Output {
    /// Every point (or, where the access has no column stride, every row) is stored.
    Store {
        /// The value; a vector needs a column stride, a row scalar is repeated over one.
        value: usize,
        /// Where each point goes: injective.
        access: Access,
        /// F32, F64, I32, U32, Bool or narrow; converted from the compute type, to integers
        /// truncating, to narrow types with one rounding. Programs of I64 store that too, and wrap
        /// to integers of 32 bits.
        dtype: DType,
        /// Whether it is added to what the buffer holds: F32, F64, and BF16 and F16, where the sum
        /// is rounded once.
        accumulate: bool,
    },
    /// Sum over rows: `[C]` of the compute type.
    ColSum {
        /// The value.
        value: usize,
        /// Whether it is added to what the buffer holds.
        accumulate: bool,
    },
    /// Sum over all points of a vector, or over all rows of a row scalar: one element of the
    /// compute type, summed in F64, or in I64 by programs of that.
    TotalSum {
        /// The value.
        value: usize,
        /// Whether it is added to what the buffer holds.
        accumulate: bool,
    },
}

impl Rows {
    /// For each value, whether it is a vector rather than a row scalar.
    pub fn vectors(&self) -> Vec<bool> {
        vectors(&self.inputs, &self.instrs)
    }
}

/// For each value of a block program, whether it is a vector rather than a row scalar.
pub fn vectors(inputs: &[RowInput], instrs: &[Instr]) -> Vec<bool> {
    let mut vector = Vec::with_capacity(instrs.len());
    for instr in instrs {
        let is_vector = match instr {
            Instr::Load { input } => inputs[*input].access.col_stride != 0,
            Instr::Const { .. } | Instr::Reduce { .. } => false,
            Instr::Index { col_stride, .. } => *col_stride != 0,
            Instr::Unary { x, .. } => vector[*x],
            Instr::Binary { a, b, .. } => vector[*a] || vector[*b],
            Instr::Select { condition, a, b } => vector[*condition] || vector[*a] || vector[*b],
            Instr::Random(draw) => !draw.col.is_empty(),
        };
        vector.push(is_vector);
    }
    vector
}

impl Instr {
    /// The values it reads, in order.
    pub fn operands(&self) -> impl Iterator<Item = usize> {
        let operands = match *self {
            Instr::Load { .. } | Instr::Const { .. } | Instr::Index { .. } | Instr::Random(_) => {
                [None; 3]
            }
            Instr::Unary { x, .. } | Instr::Reduce { x, .. } => [Some(x), None, None],
            Instr::Binary { a, b, .. } => [Some(a), Some(b), None],
            Instr::Select { condition, a, b } => [Some(condition), Some(a), Some(b)],
        };
        operands.into_iter().flatten()
    }
}

impl Output {
    /// The value it consumes.
    pub fn value(&self) -> usize {
        match self {
            Output::Store { value, .. }
            | Output::ColSum { value, .. }
            | Output::TotalSum { value, .. } => *value,
        }
    }
}
