//! A candidate: the decisions that the search enumerates.

use std::fmt;

use codegen::calls::Calls;
use ir::plan::Keep;
use ir::{Mesh, Module, Plan};
use serde::{Deserialize, Serialize};

use super::Job;
use super::keys::Key;
use crate::elaborate::splits_sequence;

/// The decisions that the search enumerates; shardings follow from them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Candidate {
    /// The mesh.
    pub mesh: Mesh,
    /// Whether activations between layers are cut along the sequence.
    pub sequence: bool,
    /// Samples of a micro-batch on one rank.
    pub microbatch_size: usize,
    /// For each layer, in the order of first calls, what is kept.
    pub keeps: Vec<Keep>,
    /// One past the last call of each stage.
    pub stage_ends: Vec<usize>,
}

impl Candidate {
    /// The key under which the layers of the candidate are priced.
    pub(super) fn key(&self) -> Key {
        let Mesh { dp, tp, .. } = self.mesh;
        Key { dp, tp, sequence: self.sequence, microbatch_size: self.microbatch_size }
    }

    /// The decisions of a plan that someone else made. `layers` are those that the entry calls, in
    /// the order of first calls.
    pub(super) fn of_plan(
        plan: &Plan,
        calls: &Calls,
        layers: &[String],
        module: &Module,
    ) -> Candidate {
        let keep = |layer: &String| plan.functions.get(layer).map_or(Keep::Full, |f| f.keep);
        Candidate {
            mesh: plan.mesh,
            sequence: splits_sequence(module, calls, plan),
            microbatch_size: plan.microbatch_size,
            keeps: layers.iter().map(keep).collect(),
            stage_ends: plan.stage_ends.clone(),
        }
    }

    /// Micro-batches of a step.
    pub(super) fn microbatch_count(&self, job: &Job<'_>) -> usize {
        job.global_batch_size / self.mesh.dp / self.microbatch_size
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mesh { pp, dp, tp, .. } = self.mesh;
        let axes = [("dp", dp), ("tp", tp), ("pp", pp)];
        let mut words: Vec<String> =
            axes.iter().filter(|(_, n)| *n > 1).map(|(name, n)| format!("{name}{n}")).collect();
        if words.is_empty() {
            words.push("one rank".to_owned());
        }
        if self.sequence {
            words.push("sp".to_owned());
        }
        words.push(format!("mbs{}", self.microbatch_size));
        if self.keeps.iter().all(|k| *k == Keep::None) {
            words.push("recompute".to_owned());
        } else if self.keeps.contains(&Keep::None) {
            words.push("part recompute".to_owned());
        }
        f.write_str(&words.join(" "))
    }
}
