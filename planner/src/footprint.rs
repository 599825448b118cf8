//! The bytes of a rank, by what holds them.

use std::fmt;

use ir::Program;
use ir::program::Contents;
use kernels::{Bytes, Kernel, price};
use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, Memory};

/// The bytes of one rank. Activations and frames share room over time: their sum may be more than
/// what the arena needs for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footprint {
    /// Parameters.
    pub params: u64,
    /// Gradients.
    pub grads: u64,
    /// Optimizer state.
    pub states: u64,
    /// Keys and values that decoding keeps.
    #[serde(default)]
    pub caches: u64,
    /// Everything else in the arena: what a micro-batch leaves for its backward pass, what calls
    /// need while they run, what is fed.
    pub activations: u64,
    /// The whole arena, exactly.
    pub arena: u64,
    /// Scratch of kernels beside the arena.
    pub workspace: u64,
}

impl Footprint {
    /// The footprint of a program whose kernels run on so many threads.
    pub fn of(program: &Program, kernels: &[Kernel], threads: usize) -> Footprint {
        let mut footprint = Footprint { arena: program.arena_bytes, ..Footprint::default() };
        let largest = kernels.iter().map(|k| price::workspace(k, threads).0).max();
        footprint.workspace = largest.unwrap_or(0);
        for buffer in &program.buffers {
            match buffer.contents {
                Contents::Param(_) => footprint.params += buffer.bytes,
                Contents::Grad(_) => footprint.grads += buffer.bytes,
                Contents::State { .. } => footprint.states += buffer.bytes,
                Contents::Cache(_) => footprint.caches += buffer.bytes,
                Contents::Feed(_)
                | Contents::Stats
                | Contents::Output
                | Contents::Activation
                | Contents::Frame
                | Contents::View => {}
            }
        }
        let persistent = footprint.params + footprint.grads + footprint.states + footprint.caches;
        footprint.activations = footprint.arena.saturating_sub(persistent);
        footprint
    }

    /// All bytes.
    pub fn total(&self) -> u64 {
        self.arena + self.workspace
    }

    /// What holds bytes, the most first.
    pub fn holders(&self) -> Vec<(&'static str, Bytes)> {
        let mut holders = vec![
            ("parameters", Bytes(self.params)),
            ("gradients", Bytes(self.grads)),
            ("optimizer state", Bytes(self.states)),
            ("caches", Bytes(self.caches)),
            ("activations", Bytes(self.activations)),
            ("workspaces", Bytes(self.workspace)),
        ];
        holders.retain(|(name, bytes)| *name != "caches" || bytes.0 > 0);
        holders.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        holders
    }
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> =
            self.holders().iter().map(|(name, bytes)| format!("{name} {bytes}")).collect();
        f.write_str(&parts.join(" · "))
    }
}

/// The bytes of the fullest place, and those that it has. `footprints` are those of all classes,
/// each of `dp` ranks.
pub fn fullest(footprints: &[Footprint], dp: usize, cluster: &Cluster) -> (Bytes, Bytes) {
    match cluster.memory() {
        Memory::PerRank(have) => {
            let most = footprints.iter().map(Footprint::total).max().unwrap_or(0);
            (Bytes(most), Bytes(have))
        }
        Memory::PerNode(have) => {
            let all: u64 = footprints.iter().map(|f| f.total() * dp as u64).sum();
            (Bytes(all.div_ceil(cluster.nodes as u64)), Bytes(have))
        }
    }
}
