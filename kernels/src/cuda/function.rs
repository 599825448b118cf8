//! Device functions: what one is launched with, and what it computes.

use std::fmt;

use ir::DType;

use super::tile::Tile;
use crate::offset::Offset;

/// The device functions of a kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Functions {
    /// In the order of execution: each starts when the one before has ended.
    pub functions: Vec<Function>,
    /// Bytes of each workspace that values are passed in from one function to the next.
    pub workspaces: Vec<u64>,
}

/// An offset that the text names: a scalar of the launch, which is passed, or a constant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// The name.
    pub name: String,
    /// What it is.
    pub offset: Offset,
}

impl Named {
    pub(super) fn new(name: impl Into<String>, offset: Offset) -> Named {
        Named { name: name.into(), offset }
    }

    /// One that is the same in every launch.
    pub(super) fn fixed(name: &str, value: i64) -> Named {
        Named::new(name, Offset::Fixed(value))
    }

    /// Whether it is passed.
    pub(super) fn is_scalar(&self) -> bool {
        matches!(self.offset, Offset::Scalar { .. })
    }
}

/// One device function.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// For people: the kernel, and which part of its work this is.
    pub what: String,
    /// What it is passed, in order, before the scalars.
    pub parameters: Vec<Parameter>,
    /// The offsets that it adds, in order; it is passed those that are scalars of the launch.
    pub offsets: Vec<Named>,
    /// Blocks.
    pub grid: u64,
    /// Threads of a block.
    pub threads: u32,
    /// What it computes, with every decision taken.
    pub tile: Tile,
}

/// A buffer that a function is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Which one.
    pub buffer: Buffer,
    /// The type of its elements.
    pub dtype: DType,
}

/// Where a parameter lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// An input of the kernel.
    Input(usize),
    /// An output of the kernel.
    Output(usize),
    /// One of [`Functions::workspaces`].
    Workspace(usize),
}

impl Function {
    /// Whether threads of a block synchronise.
    pub fn synchronizes(&self) -> bool {
        self.tile.synchronizes()
    }

    /// What it is passed of the scalars of a launch, in order.
    pub fn scalars(&self, launch: &[i64]) -> Vec<i64> {
        let passed = self.offsets.iter().filter(|named| named.is_scalar());
        passed.map(|named| named.offset.of(launch)).collect()
    }
}

impl Parameter {
    /// The name in the text.
    pub fn name(&self) -> String {
        self.buffer.to_string()
    }
}

impl fmt::Display for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Buffer::Input(at) => write!(f, "in{at}"),
            Buffer::Output(at) => write!(f, "out{at}"),
            Buffer::Workspace(at) => write!(f, "workspace{at}"),
        }
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Function { what, grid, threads, tile, .. } = self;
        write!(f, "{what}: {grid} blocks of {threads} threads, {tile}")
    }
}
