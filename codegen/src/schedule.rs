//! The order of the micro-batches of a stage.

/// What a stage does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The forward pass of a micro-batch.
    Forward(usize),
    /// Its backward pass.
    Backward(usize),
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
