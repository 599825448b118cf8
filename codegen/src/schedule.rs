//! The order of the micro-batches of a stage.

use ir::plan::Schedule;

/// What a stage does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The forward pass of a micro-batch.
    Forward(usize),
    /// Its backward pass.
    Backward(usize),
}

/// What a stage of one chunk does with its micro-batches, in order. The schedules of zero bubble
/// are those of 1F1B as long as a backward pass is not split.
pub fn turns(schedule: Schedule, [stage, stages]: [usize; 2], count: usize) -> Vec<Turn> {
    match schedule {
        Schedule::GPipe => {
            let forward = (0..count).map(Turn::Forward);
            forward.chain((0..count).map(Turn::Backward)).collect()
        }
        Schedule::OneForwardOneBackward | Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleH2 => {
            one_forward_one_backward(stages, stage, count)
        }
    }
}

/// Micro-batches whose values a stage holds at once, at most.
pub fn in_flight(schedule: Schedule, [stage, stages]: [usize; 2], count: usize) -> usize {
    match schedule {
        Schedule::GPipe => count,
        Schedule::OneForwardOneBackward | Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleH2 => {
            (stages - stage).min(count)
        }
    }
}

/// One forward, one backward, after a warm-up of as many forwards as stages follow.
pub fn one_forward_one_backward(stages: usize, stage: usize, count: usize) -> Vec<Turn> {
    let warm_up = (stages - 1 - stage).min(count);
    let mut turns: Vec<Turn> = (0..warm_up).map(Turn::Forward).collect();
    for microbatch in 0..count {
        if microbatch + warm_up < count {
            turns.push(Turn::Forward(microbatch + warm_up));
        }
        turns.push(Turn::Backward(microbatch));
    }
    turns
}
