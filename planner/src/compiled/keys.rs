//! Keys that distinguish layers, and the price of a call of one.

use ir::plan::Keep;
use ir::{ExpertParallel, Mesh};

use crate::divisors::gcd;

/// What the shardings and the routines of layers depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) dp: usize,
    /// How ranks share experts.
    pub(super) experts: ExpertParallel,
    pub(super) cp: usize,
    pub(super) tp: usize,
    pub(super) sequence: bool,
    pub(super) microbatch_size: usize,
}

impl Key {
    /// The same with one copy of the weights: what a rank has does not depend on their number.
    pub(super) fn of_one_copy(self) -> Key {
        let sharers = self.experts.data_ranks(Mesh { tp: self.tp, ..Mesh::ONE });
        Key { dp: sharers / gcd(sharers, self.cp), ..self }
    }
}

/// What a call of a layer takes, forward and backward together, when nobody waits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct CallPrice {
    /// Kernels and collectives of the first rank along `cp` and `tp`.
    pub(super) seconds: f64,
    /// Kernels of all tensor-parallel ranks together, at least.
    pub(super) compute_s: f64,
    /// What `seconds` has for adding to gradients instead of writing them.
    pub(super) added_s: f64,
    /// Bytes that the first rank keeps from forward to backward.
    pub(super) kept_bytes: u64,
    /// Bytes that all tensor-parallel ranks keep together, at least.
    pub(super) kept_bytes_of_all: u64,
}

/// What is asked of a layer: which one, what it keeps, and whether its gradients are added.
pub(super) type LayerQuery = (usize, Keep, bool);
