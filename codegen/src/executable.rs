//! What plans may decide and programs of this release cannot do: one table, for all commands.

use std::fmt;

use ir::plan::{Offload, Place, Zero};
use ir::{Diagnostic, ExpertParallel, Mesh, Plan, Span, Target};
use serde::{Deserialize, Serialize};

/// The code of a diagnostic that says that a plan cannot be executed.
pub const CODE_NOT_EXECUTABLE: &str = "E2004";

/// Values that are placed in an arena at most. Chosen: half a second.
pub const BUFFERS_MAX: usize = 6_000;

/// What kernels are compiled for. Types that are only planned for have no kernels.
pub(crate) fn executed_target(plan: &Plan) -> Option<Target> {
    plan.target.filter(|_| plan.precision.lacking().is_empty())
}

/// Why no program can be made of a plan yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotYet {
    /// The decisions that no program carries out, or what else stands in the way, in words.
    pub decision: String,
}

impl fmt::Display for NotYet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.decision)
    }
}

impl From<Diagnostic> for NotYet {
    fn from(why: Diagnostic) -> NotYet {
        NotYet { decision: why.headline }
    }
}

/// The decisions of a plan of training that some device may be unable to carry out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Whether the devices are some that no kernels are written for.
    pub lacks_kernels: bool,
    /// Context-parallel ranks.
    pub cp: usize,
    /// The ranks among those of `dp` and `cp` that share experts.
    pub expert_ranks: usize,
    /// See [`shares_whole_samples`].
    pub has_whole_samples: bool,
    /// What data-parallel ranks share.
    pub zero: Zero,
    /// The ranks along `dp` and `cp`.
    pub data_ranks: usize,
    /// What lies elsewhere than on the device.
    pub offload: Offload,
}

impl Features {
    /// The decisions of a plan for one machine.
    pub fn of(plan: &Plan) -> Features {
        Features {
            lacks_kernels: false,
            cp: plan.mesh.cp,
            expert_ranks: plan.experts.data_ranks(plan.mesh),
            has_whole_samples: shares_whole_samples(plan.mesh, plan.experts),
            zero: plan.zero,
            data_ranks: plan.mesh.dp * plan.mesh.cp,
            offload: plan.offload,
        }
    }

    /// Those that no program of this release carries out, in words.
    pub fn lacking(&self) -> Vec<&'static str> {
        let shards = self.zero.ranks(self.data_ranks);
        let is_split = shards > 1;
        let fits = |a: usize, b: usize| a.checked_rem(b) == Some(0);
        let has_whole_shards = fits(shards, self.cp) || fits(self.cp, shards);
        let table = [
            (self.lacks_kernels, "devices that no kernels are written for"),
            (
                self.expert_ranks > 1 && !self.has_whole_samples,
                "an `ep` that takes a part of `cp` (it is to be a multiple of `cp`)",
            ),
            (
                self.expert_ranks > 1 && is_split && !fits(shards, self.expert_ranks),
                "ZeRO over a part of the ranks that share experts",
            ),
            (
                is_split && !has_whole_shards,
                "ZeRO over ranks that are neither a multiple of cp nor a factor",
            ),
            (
                self.offload.parameters != Place::Device && is_split && self.zero.stage < 3,
                "offload of parameters under ZeRO 1 and 2",
            ),
        ];
        table.into_iter().filter(|(lacks, _)| *lacks).map(|(_, words)| words).collect()
    }
}

/// Whether ranks that share experts are all that share the tokens of some samples.
pub fn shares_whole_samples(mesh: Mesh, experts: ExpertParallel) -> bool {
    experts.data_ranks(mesh) == 1 || mesh.besides_experts(experts).is_some_and(|rest| rest.cp == 1)
}

/// Whether programs carry out all that a plan decides.
///
/// # Errors
/// `E2004`, which names every decision that they do not.
pub fn check_executable(plan: &Plan) -> Result<(), Diagnostic> {
    let lacking = Features::of(plan).lacking();
    if lacking.is_empty() {
        return Ok(());
    }
    let headline = format!("no program of this release has {}", lacking.join(", "));
    let help =
        "change that in the plan, or plan for `--cluster cpu-local`: it finds what is executed";
    Err(Diagnostic::error(CODE_NOT_EXECUTABLE, Span::of(plan.model.clone()), headline).help(help))
}
