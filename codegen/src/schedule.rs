//! The order of the micro-batches of a stage.

use ir::Plan;
use ir::plan::Schedule;

/// What a stage does next with one of its chunks, by their numbers on the stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The forward pass of a micro-batch.
    Forward {
        /// The chunk.
        chunk: usize,
        /// The micro-batch.
        microbatch: usize,
    },
    /// Its backward pass.
    Backward {
        /// The chunk.
        chunk: usize,
        /// The micro-batch.
        microbatch: usize,
    },
}

/// The pipeline of a plan, as one of its stages sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// The order of micro-batches. Those of zero bubble are that of 1F1B as long as a backward pass
    /// is not split.
    pub schedule: Schedule,
    /// The stages.
    pub stages: usize,
    /// The chunks of a stage.
    pub chunks: usize,
    /// The micro-batches of a step.
    pub microbatches: usize,
}

impl Pipeline {
    /// That of a plan.
    pub fn of(plan: &Plan) -> Pipeline {
        Pipeline {
            schedule: plan.schedule,
            stages: plan.mesh.pp,
            chunks: plan.chunks_per_stage(),
            microbatches: plan.microbatch_count,
        }
    }

    /// What a stage does with its micro-batches, in order: some forward passes, then forward and
    /// backward passes in turn, then the backward passes that are left.
    ///
    /// Chunks take turns (Narayanan et al. 2021): as many micro-batches as there are stages go
    /// through a chunk, then through the next one.
    pub fn turns(&self, stage: usize) -> Vec<Turn> {
        let passes = self.passes();
        let warm_up = self.warm_up(stage);
        let forward = |&(chunk, microbatch): &_| Turn::Forward { chunk, microbatch };
        let backward = |&(chunk, microbatch): &_| Turn::Backward {
            chunk: self.chunks - 1 - chunk,
            microbatch,
        };
        let mut turns: Vec<Turn> = passes[..warm_up].iter().map(forward).collect();
        for (at, pass) in passes.iter().enumerate() {
            turns.extend(passes.get(at + warm_up).map(forward));
            turns.push(backward(pass));
        }
        turns
    }

    /// For each chunk of a stage, the micro-batches whose values it holds at once, at most.
    pub fn in_flight(&self, stage: usize) -> Vec<usize> {
        let (mut held, mut most) = (vec![0; self.chunks], vec![0; self.chunks]);
        for turn in self.turns(stage) {
            match turn {
                Turn::Forward { chunk, .. } => {
                    held[chunk] += 1;
                    most[chunk] = held[chunk].max(most[chunk]);
                }
                Turn::Backward { chunk, .. } => held[chunk] -= 1,
            }
        }
        most
    }

    /// Forward passes of a stage before its first backward pass, but for one where they alternate.
    fn warm_up(&self, stage: usize) -> usize {
        let Pipeline { stages, chunks, microbatches, .. } = *self;
        let later = stages - 1 - stage;
        let warm_up = match (self.schedule, chunks) {
            (Schedule::GPipe, _) => microbatches * chunks,
            (_, 1) => later,
            (_, _) => 2 * later + (chunks - 1) * stages.min(microbatches),
        };
        warm_up.min(microbatches * chunks)
    }

    /// The chunks and micro-batches of forward passes in order.
    fn passes(&self) -> Vec<(usize, usize)> {
        let Pipeline { stages, chunks, microbatches, .. } = *self;
        let round = if chunks == 1 { microbatches } else { stages };
        let mut passes = Vec::with_capacity(chunks * microbatches);
        for first in (0..microbatches).step_by(round.max(1)) {
            let together = first..(first + round).min(microbatches);
            let of_chunk = |chunk| together.clone().map(move |microbatch| (chunk, microbatch));
            passes.extend((0..chunks).flat_map(of_chunk));
        }
        passes
    }
}
