//! Whether a step goes on: it may be abandoned until the first rank begins its update.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use ir::program::{Instruction, Program, Ref, Step};

use super::{buffer_of, range};

const OPEN: u8 = 0;
const ABANDONED: u8 = 1;
const UPDATING: u8 = 2;

/// The course of the step that is being run, shared by its ranks and whoever wants it to end.
///
/// Either all ranks update their weights or none does: an update begins only on a course that is
/// not abandoned, and a course on which one has begun is abandoned no more.
#[derive(Default)]
pub(super) struct Course {
    state: AtomicU8,
    is_wanted: AtomicBool,
}

impl Course {
    /// Begins a step; whether there is one to begin.
    pub(super) fn begin(&self) -> bool {
        self.state.store(OPEN, Ordering::SeqCst);
        if self.is_wanted.load(Ordering::SeqCst) {
            self.state.store(ABANDONED, Ordering::SeqCst);
        }
        !self.is_abandoned()
    }

    /// Ends the step at its next launches, and lets no other begin. A step in its update is
    /// finished first.
    pub(super) fn abandon(&self) {
        self.is_wanted.store(true, Ordering::SeqCst);
        let _ = self.state.compare_exchange(OPEN, ABANDONED, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Whether ranks are to end the step.
    pub(super) fn is_abandoned(&self) -> bool {
        self.state.load(Ordering::SeqCst) == ABANDONED
    }

    /// Begins the update of a rank; whether it may.
    pub(super) fn begin_update(&self) -> bool {
        let began = self.state.compare_exchange(OPEN, UPDATING, Ordering::SeqCst, Ordering::SeqCst);
        matches!(began, Ok(_) | Err(UPDATING))
    }
}

/// The first of some steps that writes a parameter or a state of the optimizer, in place or through
/// a view; none in an evaluation.
pub(super) fn first_update(program: &Program, steps: &[Step]) -> Option<usize> {
    let kept = program.buffers.iter().filter(|buffer| buffer.contents.outlasts_step()).map(range);
    let mut kept: Vec<Range<usize>> = kept.collect();
    kept.sort_unstable_by_key(|kept| kept.start);
    let is_write = |written: &Range<usize>| {
        // Buffers that are kept have no byte in common, so their ends ascend too.
        let next = kept.partition_point(|kept| kept.end <= written.start);
        kept.get(next).is_some_and(|kept| kept.start < written.end)
    };
    steps.iter().position(|step| match step {
        Step::Feed { buffer, .. } | Step::Receive { buffer, .. } => {
            is_write(&range(buffer_of(program, *buffer)))
        }
        Step::Call { routine, slots, .. } => {
            let written = program.routines[*routine].instructions.iter().flat_map(outputs);
            let slot = |value: &Ref| match value {
                Ref::Slot(slot) => Some(range(buffer_of(program, slots[*slot as usize]))),
                Ref::Local(_) => None,
            };
            written.filter_map(slot).any(|written| is_write(&written))
        }
        Step::Move { to, .. } => is_write(&range(buffer_of(program, *to))),
        Step::Send { .. } | Step::Await { .. } => false,
    })
}

/// What an instruction writes.
pub(super) fn outputs(instruction: &Instruction) -> &[Ref] {
    match instruction {
        Instruction::Launch { outputs, .. } => outputs,
        Instruction::Collective { output, .. } => std::slice::from_ref(output),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_update_or_none() {
        let course = Course::default();
        assert!(course.begin() && course.begin_update());
        course.abandon();
        assert!(!course.is_abandoned() && course.begin_update(), "the update is finished");
        assert!(!course.begin(), "no other step begins");

        let course = Course::default();
        assert!(course.begin());
        course.abandon();
        assert!(course.is_abandoned() && !course.begin_update());
    }

    #[test]
    fn ranks_that_race_with_an_abandonment_agree() {
        for _ in 0..200 {
            let course = Course::default();
            assert!(course.begin());
            let updates: Vec<bool> = std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..3).map(|_| scope.spawn(|| course.begin_update())).collect();
                course.abandon();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            let all = updates[0];
            assert!(updates.iter().all(|&is| is == all), "{updates:?}");
        }
    }
}
