//! A candidate: the decisions that the search enumerates.

use codegen::calls::Calls;
use codegen::schedule::Pipeline;
use ir::plan::{Keep, Offload, Place, Schedule, Zero};
use ir::{ExpertParallel, Mesh, Module, Plan};
use serde::{Deserialize, Serialize};

use super::Job;
use super::keys::Key;
use crate::configuration::Configuration;
use crate::elaborate::{Name, etp_of, named, of_mesh, splits_sequence};

/// The decisions that the search enumerates; shardings follow from them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Candidate {
    /// The mesh.
    pub mesh: Mesh,
    /// Whether activations between layers are cut along the sequence.
    pub sequence: bool,
    /// How ranks share experts.
    #[serde(default = "shares_none")]
    pub experts: ExpertParallel,
    /// Samples of a micro-batch on one rank.
    pub microbatch_size: usize,
    /// For each layer, in the order of first calls, what is kept.
    pub keeps: Vec<Keep>,
    /// One past the last call of each chunk: chunk `c` is on stage `c mod pp`.
    pub stage_ends: Vec<usize>,
    /// What data-parallel ranks share.
    #[serde(default)]
    pub zero: Zero,
    /// The order of micro-batches.
    #[serde(default)]
    pub schedule: Schedule,
    /// What lies elsewhere than on the device.
    #[serde(default)]
    pub offload: Offload,
}

fn shares_none() -> ExpertParallel {
    ExpertParallel::NONE
}

impl Candidate {
    /// The key under which the layers of the candidate are priced.
    pub(super) fn key(&self) -> Key {
        let (Mesh { dp, cp, tp, .. }, experts) = (self.mesh, self.experts);
        let (sequence, microbatch_size) = (self.sequence, self.microbatch_size);
        Key { dp, experts, cp, tp, sequence, microbatch_size }
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
            experts: plan.experts,
            sequence: splits_sequence(module, calls, plan),
            microbatch_size: plan.microbatch_size,
            keeps: layers.iter().map(keep).collect(),
            stage_ends: plan.stage_ends.clone(),
            zero: plan.zero,
            schedule: plan.schedule,
            offload: plan.offload,
        }
    }

    /// Whether another candidate holds all that this one does: it differs in larger micro-batches
    /// or in values that it does not offload.
    pub(super) fn is_part_of(&self, other: &Candidate) -> bool {
        let keeps = |own: Place, other: Place| own == other || other == Place::Device;
        let is_moved = keeps(self.offload.optimizer, other.offload.optimizer)
            && keeps(self.offload.parameters, other.offload.parameters)
            && keeps(self.offload.activations, other.offload.activations);
        let (microbatch_size, offload) = (self.microbatch_size, self.offload);
        let alike = Candidate { microbatch_size, offload, ..other.clone() };
        is_moved && self.microbatch_size <= other.microbatch_size && alike == *self
    }

    /// Chunks of a stage.
    pub(super) fn chunks(&self) -> usize {
        self.stage_ends.len() / self.mesh.pp
    }

    /// For each chunk of a stage, its first call and one past its last.
    pub(super) fn calls_of(&self, stage: usize) -> Vec<[usize; 2]> {
        let begin = |chunk: usize| chunk.checked_sub(1).map_or(0, |before| self.stage_ends[before]);
        let chunks = (stage..self.stage_ends.len()).step_by(self.mesh.pp);
        chunks.map(|chunk| [begin(chunk), self.stage_ends[chunk]]).collect()
    }

    /// The order of micro-batches.
    pub(super) fn pipeline(&self, job: &Job<'_>) -> Pipeline {
        Pipeline {
            schedule: self.schedule,
            stages: self.mesh.pp,
            chunks: self.chunks(),
            microbatches: self.microbatch_count(job),
        }
    }

    /// Micro-batches of a step.
    pub(super) fn microbatch_count(&self, job: &Job<'_>) -> usize {
        job.global_batch_size / self.mesh.dp / self.microbatch_size
    }

    /// The name of its plans; decisions that the name does not say are counted, but for shardings.
    /// `layer_of` is, for each call, its layer.
    pub(super) fn name(&self, calls: &Calls, layer_of: &[usize]) -> Name {
        let keeps: Vec<Keep> = layer_of.iter().map(|layer| self.keeps[*layer]).collect();
        let decided = Configuration {
            ep: u32::try_from(self.experts.ep).unwrap_or(u32::MAX),
            etp: etp_of(self.mesh, self.experts),
            microbatch: u32::try_from(self.microbatch_size).unwrap_or(u32::MAX),
            sequence_parallel: self.sequence,
            zero: self.zero,
            vpp: u32::try_from(self.chunks()).unwrap_or(u32::MAX),
            schedule: self.schedule,
            offload: self.offload,
            ..of_mesh(self.mesh)
        };
        named(decided, calls, &self.stage_ends, &keeps)
    }
}
