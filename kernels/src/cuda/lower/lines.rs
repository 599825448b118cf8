//! The device function of operations along a dim.

use crate::cuda::function::Function;
use crate::cuda::lines::{LineTile, THREADS};
use crate::cuda::parameter::Parameter;
use crate::cuda::tile::Tile;
use crate::kernel::Lines;

/// The function of an operation along a dim.
pub(super) fn function(what: &str, lines: &Lines, parameters: Vec<Parameter>) -> Function {
    let tile = LineTile { lines: lines.clone() };
    Function {
        what: what.to_owned(),
        parameters,
        offsets: Vec::new(),
        grid: tile.threads().div_ceil(THREADS as usize) as u64,
        threads: THREADS,
        tile: Tile::Lines(tile),
    }
}
