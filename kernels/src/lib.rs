//! What one launch computes, what it costs, the CPU that runs it, and its text as CUDA C++.
//!
//! In: a [`Kernel`], a closed description of one launch in which every decision is taken: concrete
//! local sizes, strides, element types. Buffers are not part of it; they are passed as ordered
//! lists of arguments.
//! Out: its price ([`price`]), its effect on host memory ([`cpu::Cpu::execute`]), and the device
//! functions that compute it on a GPU ([`cuda::functions_for`]), as CUDA C++.
//!
//! Invariants:
//! * A kernel is plain data: it can be compared, stored and sent, and names no address.
//! * Ranks with equal local sizes have equal kernels: where the piece of a rank begins is a scalar
//!   of the launch ([`offset`]). What changes from step to step is an operand in memory.
//! * The bits of a result depend on the kernel, its inputs and the instruction set, never on the
//!   number of threads. A product's bits do not depend on how its rows are cut either.
//! * Deliberately absent: a kernel knows no graph, no sharding and no stream, and nothing here
//!   chooses between kernels.
//!
//! Reading order: [`kernel`], [`rows`] and [`offset`] are the nouns, [`pitch`] moves the rows
//! of one apart, [`arguments`] says which
//! buffers a kernel wants and [`scalars`] what its launch passes, [`verify`] whether it can be
//! executed, [`bounds`] whether programs stay within what they have, [`price`] what it costs in the
//! units of [`units`], [`cpu`] executes, [`cuda`] prints.
//! Unsafe code lives in [`cpu`] alone.
//!
//! Diagnostics: those of [`bounds`], all with exit code 6.
#![deny(unsafe_code)]

pub mod border;
pub mod offset;
pub mod kernel;
pub mod rows;
mod sums;

pub mod pitch;
pub mod arguments;
pub mod scalars;
pub mod verify;
pub mod bounds;
pub mod price;
pub mod units;

#[allow(unsafe_code)]
pub mod cpu;
pub mod cuda;

pub use border::Border;
pub use kernel::{
    Attention, Copy, CopyLoop, Dropout, Experts, Family, Fill, Gather, Kernel, Line, Lines, LoopAB,
    LoopABC, LoopAC, LoopBC, Pointwise, Positions, Product, ProductPart, Products, Rope, Scales,
    Source, StoredTypes, Tiling, Window,
};
pub use offset::Offset;
pub use rows::{Access, BinaryOp, Digit, Draw, Instr, Output, ReduceOp, RowInput, Rows, UnaryOp};
pub use units::{Bytes, Flops, Seconds};
