//! Device functions: what one is launched with, and what it computes.

use std::fmt;

use super::parameter::{Named, Parameter};
use super::tile::Tile;

/// The device functions of a kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Functions {
    /// In the order of execution: each starts when the one before has ended.
    pub functions: Vec<Function>,
    /// Bytes of each workspace that values are passed in from one function to the next.
    pub workspaces: Vec<u64>,
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
    /// Blocks: of a persistent function as many as there are tiles, of which a launch starts those
    /// that run at once.
    pub grid: u64,
    /// Threads of a block.
    pub threads: u32,
    /// What it computes, with every decision taken.
    pub tile: Tile,
}

impl Function {
    /// Whether threads of a block synchronise.
    pub fn synchronizes(&self) -> bool {
        self.tile.synchronizes()
    }

    /// Whether fewer blocks compute the same, each several tiles.
    pub fn is_persistent(&self) -> bool {
        self.tile.is_persistent()
    }

    /// What it is passed of the scalars of a launch, in order.
    pub fn scalars(&self, launch: &[i64]) -> Vec<i64> {
        let passed = self.offsets.iter().filter(|named| named.is_scalar());
        passed.map(|named| named.offset.of(launch)).collect()
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Function { what, grid, threads, tile, .. } = self;
        write!(f, "{what}: {grid} blocks of {threads} threads, {tile}")
    }
}
