//! The bytes of the fullest place of a plan whose programs are compiled.

pub use codegen::footprint::Footprint;
use kernels::Bytes;

use crate::cluster::Memory;

/// The bytes that ranks need in the fullest place (a rank or a node), and the bytes that it has.
/// `footprints` are those of all classes, each of `dp` ranks, on `nodes` nodes.
pub fn fullest(
    footprints: &[Footprint],
    dp: usize,
    (memory, nodes): (Memory, usize),
) -> (Bytes, Bytes) {
    match memory {
        Memory::PerRank(have) => {
            let most = footprints.iter().map(Footprint::total).max().unwrap_or(0);
            (Bytes(most), Bytes(have))
        }
        Memory::PerNode(have) => {
            let all: u64 = footprints.iter().map(|f| f.total() * dp as u64).sum();
            (Bytes(all.div_ceil(nodes as u64)), Bytes(have))
        }
    }
}
