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
    /// Its backward pass; where a schedule splits that, the gradients of activations alone.
    Backward {
        /// The chunk.
        chunk: usize,
        /// The micro-batch.
        microbatch: usize,
    },
    /// Its gradients of weights, where a schedule puts them off.
    Weights {
        /// The chunk.
        chunk: usize,
        /// The micro-batch.
        microbatch: usize,
    },
}

impl Turn {
    /// The chunk whose turn it is.
    pub fn chunk(self) -> usize {
        match self {
            Turn::Forward { chunk, .. }
            | Turn::Backward { chunk, .. }
            | Turn::Weights { chunk, .. } => chunk,
        }
    }
}

/// Whether a schedule computes the gradients of weights apart from those of activations.
pub fn splits_backward(schedule: Schedule) -> bool {
    match schedule {
        Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleH2 => true,
        Schedule::GPipe | Schedule::OneForwardOneBackward => false,
    }
}

/// The pipeline of a plan, as one of its stages sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// The order of micro-batches.
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
    /// Interleaved (Narayanan et al. 2021), pp micro-batches go through a chunk, then through the
    /// next one. Under zero bubble (Qi et al. 2023, figures 2 and 3) a stage puts off the gradients
    /// of weights of its first micro-batches, the more of them the later it begins, so that the
    /// stages before get their gradients sooner.
    pub fn turns(&self, stage: usize) -> Vec<Turn> {
        let passes = self.passes();
        let put_off = self.put_off(stage);
        let warm_up = self.warm_up(stage);
        let forward = |&(chunk, microbatch): &_| Turn::Forward { chunk, microbatch };
        let backward = |&(chunk, microbatch): &_| Turn::Backward {
            chunk: self.chunks - 1 - chunk,
            microbatch,
        };
        let weights = |&(chunk, microbatch): &_| Turn::Weights { chunk, microbatch };
        let mut turns: Vec<Turn> = passes[..warm_up].iter().map(forward).collect();
        for (at, pass) in passes.iter().enumerate() {
            turns.extend(passes.get(at + warm_up).map(forward));
            turns.push(backward(pass));
            if let Some(done) = put_off.and_then(|late| at.checked_sub(late)) {
                turns.push(weights(&passes[done]));
            }
        }
        let left = put_off.map_or(0, |late| late.min(passes.len()));
        turns.extend(passes[passes.len() - left..].iter().map(weights));
        turns
    }

    /// Whether the gradients of weights are computed apart from those of activations.
    pub fn splits(&self) -> bool {
        splits_backward(self.schedule)
    }

    /// Of how many micro-batches a stage puts off the gradients of weights; none where they are not
    /// computed apart.
    fn put_off(&self, stage: usize) -> Option<usize> {
        match self.schedule {
            Schedule::GPipe | Schedule::OneForwardOneBackward => None,
            Schedule::ZeroBubbleH1 => Some(stage),
            Schedule::ZeroBubbleH2 => Some(2 * stage),
        }
    }

    /// For each chunk of a stage, the micro-batches whose values it holds at once, at most: until
    /// the gradients of weights are there.
    pub fn in_flight(&self, stage: usize) -> Vec<usize> {
        let of = |chunk: usize| {
            let mut only = vec![0; self.chunks];
            only[chunk] = 1;
            self.most_held(stage, &only) as usize
        };
        (0..self.chunks).map(of).collect()
    }

    /// Whether the work of a chunk on a micro-batch ends with a turn.
    fn ends(&self, turn: Turn) -> bool {
        match turn {
            Turn::Forward { .. } => false,
            Turn::Backward { .. } => !self.splits(),
            Turn::Weights { .. } => true,
        }
    }

    /// The first micro-batches, after which stages have no more in flight: two rounds are ahead at
    /// most, and one is like the next.
    pub fn first_rounds(&self) -> Pipeline {
        let microbatches = match self.schedule {
            Schedule::GPipe => self.microbatches,
            Schedule::OneForwardOneBackward | Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleH2 => {
                self.microbatches.min(4 * self.stages)
            }
        };
        Pipeline { microbatches, ..*self }
    }

    /// The most that a stage holds at once of what each micro-batch in flight has on its chunks.
    pub fn most_held(&self, stage: usize, of_chunk: &[u64]) -> u64 {
        let (mut held, mut most) = (0, 0);
        for turn in self.first_rounds().turns(stage) {
            if let Turn::Forward { chunk, .. } = turn {
                held += of_chunk[chunk];
                most = held.max(most);
            } else if self.ends(turn) {
                held -= of_chunk[turn.chunk()];
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
            (Schedule::ZeroBubbleH2, _) => 2 * later,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Pipeline> {
        let sizes = (1..=6).flat_map(|stages| (1..=4).map(move |chunks| (stages, chunks)));
        let of = |(stages, chunks, schedule)| {
            (1..=7).map(move |rounds| {
                let microbatches = rounds * stages;
                Pipeline { schedule, stages, chunks, microbatches }
            })
        };
        let schedules = |(stages, chunks)| {
            let schedules = Schedule::ALL.into_iter();
            schedules.map(move |schedule| (stages, chunks, schedule))
        };
        let is_legal =
            |&(_, chunks, schedule): &_| chunks == 1 || schedule == Schedule::OneForwardOneBackward;
        sizes.flat_map(schedules).filter(is_legal).flat_map(of)
    }

    /// What stages have in flight follows from their first rounds.
    #[test]
    fn later_rounds_hold_no_more() {
        for pipeline in all() {
            for stage in 0..pipeline.stages {
                let mut held = vec![0usize; pipeline.chunks];
                let mut most = held.clone();
                for turn in pipeline.turns(stage) {
                    match turn {
                        Turn::Forward { chunk, .. } => held[chunk] += 1,
                        Turn::Backward { .. } if pipeline.splits() => {}
                        Turn::Backward { chunk, .. } | Turn::Weights { chunk, .. } => {
                            held[chunk] -= 1;
                        }
                    }
                    most.iter_mut().zip(&held).for_each(|(most, held)| *most = *held.max(most));
                }
                assert_eq!(pipeline.in_flight(stage), most, "{pipeline:?} {stage}");
            }
        }
    }

    /// Between each two stages messages are sent in the order in which they are received, those of
    /// both passes together, and every micro-batch goes through every chunk once.
    #[test]
    fn messages_arrive_in_the_order_in_which_they_are_sent() {
        for pipeline in all() {
            let Pipeline { stages, chunks, microbatches, .. } = pipeline;
            let last = stages * chunks - 1;
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            for stage in 0..stages {
                let turns = pipeline.turns(stage);
                let kinds = if pipeline.splits() { 3 } else { 2 };
                assert_eq!(turns.len(), kinds * chunks * microbatches, "{pipeline:?} {stage}");
                for turn in turns {
                    let (is_forward, chunk, microbatch) = match turn {
                        Turn::Forward { chunk, microbatch } => (true, chunk, microbatch),
                        Turn::Backward { chunk, microbatch } => (false, chunk, microbatch),
                        Turn::Weights { .. } => continue,
                    };
                    let at = chunk * stages + stage;
                    let (to, from) = (at.checked_add(1), at.checked_sub(1));
                    let (to, from) = if is_forward { (to, from) } else { (from, to) };
                    let message = |a: usize, b: usize| (a % stages, b % stages, a, b, microbatch);
                    sent.extend(to.filter(|to| *to <= last).map(|to| message(at, to)));
                    received
                        .extend(from.filter(|from| *from <= last).map(|from| message(from, at)));
                }
            }
            // A stable sort keeps the order between two stages.
            sent.sort_by_key(|(from, to, ..)| (*from, *to));
            received.sort_by_key(|(from, to, ..)| (*from, *to));
            assert_eq!(sent, received, "{pipeline:?}");
        }
    }
}
