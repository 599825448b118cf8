//! Which ranks of a stage hold which experts.

use serde::Serialize;

use super::group::Group;
use crate::configuration::Configuration;
use crate::divisors::gcd;
use ir::Axis;

/// Where the ranks of `ep` lie among those of a stage, and so what cuts experts inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertPlacement {
    /// Along `cp` and `dp`, as far as these go; all ranks of `tp` that are left slice experts.
    BesideTensor,
    /// `ep` neighbours of the stage, those of `tp` first; what `tp` has beyond them slices experts.
    FromTensor,
}

impl ExpertPlacement {
    /// Tensor-parallel ranks that each hold a slice of the same experts.
    pub fn slices(self, c: &Configuration) -> u32 {
        if c.etp > 0 {
            return c.etp;
        }
        let from_tensor = match self {
            ExpertPlacement::BesideTensor => c.ep / gcd(c.ep, c.dp.saturating_mul(c.cp)).max(1),
            ExpertPlacement::FromTensor => gcd(c.ep, c.tp),
        };
        (c.tp / from_tensor.max(1)).max(1)
    }

    /// The configuration that means to executors of `other` what `c` means to those of this.
    pub fn told(self, other: ExpertPlacement, c: &Configuration) -> Configuration {
        let slices = self.slices(c);
        let open = Configuration { etp: 0, ..c.clone() };
        let etp = if slices == other.slices(&open) { 0 } else { slices };
        Configuration { etp, ..open }
    }
}

/// The ranks of a stage by the experts that they hold: `ranks` have different ones, `slices` have
/// parts of the same ones, and `copies` have the same. The three sizes multiply to the stage's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ExpertRanks {
    /// Those that a token may have to go to.
    pub(crate) ranks: Group,
    /// Tensor-parallel ranks that each hold a slice of every expert that `ranks` says.
    pub(crate) slices: Group,
    /// Those that hold the same slices of the same experts.
    pub(crate) copies: Group,
}

impl ExpertRanks {
    /// The ranks of a configuration.
    pub(crate) fn of(c: &Configuration, placement: ExpertPlacement) -> ExpertRanks {
        let (ep, tensor) = (u64::from(c.ep), Group::along(c, Axis::Tp));
        let slices = u64::from(placement.slices(c));
        let (ranks, copies) = if slices == tensor.size() {
            let data = Group::data(c);
            (data.first(ep), data.every(ep))
        } else {
            let stage = Group::stage(c);
            (stage.first(ep * slices).every(slices), stage.every(ep * slices))
        };
        let ranks = if ep == 1 { Group::near(1) } else { ranks };
        ExpertRanks { ranks, slices: tensor.first(slices), copies }
    }
}
