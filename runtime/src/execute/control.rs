//! How the host and the threads of ranks hand a step to each other.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::patience::Patience;

use super::course::Course;
use super::fault::Fault;
use super::{Batch, Phase, RankTime, Samples, Scalars, lock, rank_error};

/// How much longer than the ranks' own deadline the host waits for the others once a rank failed.
/// Chosen: a rank that is in a kernel notices a failure at its next call to another rank.
const GRACE: Duration = Duration::from_secs(2);
/// How long the host waits at a time while no rank has failed.
const LONG: Duration = Duration::from_secs(3600);

/// What the ranks of one step read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Inputs {
    pub(super) tokens: Vec<i32>,
    pub(super) labels: Vec<i32>,
    pub(super) documents: Vec<i32>,
    pub(super) positions: Vec<i32>,
    pub(super) last: i32,
    pub(super) scalars: Scalars,
    /// Whether ranks look for the first value that is not finite.
    pub(super) examines: bool,
}

/// The order to the ranks, and their answers.
struct State {
    /// Counts the orders; ranks wait until it changes.
    order: u64,
    /// None to end.
    phase: Option<Phase>,
    answers: Vec<Option<Result<RankTime, Fault>>>,
    /// Why no further step can be run.
    failure: Option<(usize, String)>,
}

/// The meeting of the host and the ranks.
pub(super) struct Control {
    state: Mutex<State>,
    ordered: Condvar,
    answered: Condvar,
    /// The ranks whose answers are waited for.
    awaited: Range<usize>,
    inputs: RwLock<Inputs>,
    deadline: Duration,
    /// Whether the step that is being run goes on.
    pub(super) course: Arc<Course>,
    /// By phase.
    samples: Arc<[Option<Samples>]>,
}

impl Control {
    /// Of some ranks of a world: all of them where the host leads.
    pub(super) fn new(
        size: usize,
        awaited: Range<usize>,
        deadline: Duration,
        samples: Arc<[Option<Samples>]>,
    ) -> Control {
        let answers = (0..size).map(|_| Some(Ok(RankTime::default()))).collect();
        let state = State { order: 0, phase: Some(Phase::Step), answers, failure: None };
        let inputs = Inputs {
            tokens: Vec::new(),
            labels: Vec::new(),
            documents: Vec::new(),
            positions: Vec::new(),
            last: 0,
            scalars: Scalars::default(),
            examines: false,
        };
        Control {
            state: Mutex::new(state),
            ordered: Condvar::new(),
            answered: Condvar::new(),
            awaited,
            inputs: RwLock::new(inputs),
            deadline,
            course: Arc::default(),
            samples,
        }
    }

    /// How each phase cuts the global batch.
    pub(super) fn all_samples(&self) -> Arc<[Option<Samples>]> {
        Arc::clone(&self.samples)
    }

    /// How a phase cuts the global batch.
    pub(super) fn samples(&self, phase: Phase) -> Option<Samples> {
        self.samples[phase.index()]
    }

    /// Orders a phase and waits for all ranks; `tell` tells those of other processes.
    ///
    /// **Errors.** A rank failed, now or before; [`Error::Abandoned`].
    pub(super) fn run(
        &self,
        phase: Phase,
        batch: &Batch<'_>,
        scalars: Scalars,
        examines: bool,
        tell: impl FnOnce(&Inputs),
    ) -> Result<Vec<RankTime>, Error> {
        if let Some((rank, reason)) = &lock(&self.state).failure {
            return Err(rank_error(*rank, reason.clone()));
        }
        if !self.course.begin() {
            return Err(Error::Abandoned);
        }
        self.feed(phase, batch, scalars, examines);
        let mut state = self.order(phase, tell);
        let mut patience: Option<Patience> = None;
        while state.answers.iter().any(Option::is_none) {
            let has_failed = state.answers.iter().flatten().any(Result::is_err);
            if has_failed && patience.is_none() {
                patience = Some(Patience::new(self.deadline.saturating_add(GRACE)));
            }
            // Ranks of an abandoned step end at their next launch: what they hold is kept.
            let is_over = patience.as_ref().is_some_and(Patience::is_over);
            if is_over && !self.course.is_abandoned() {
                break;
            }
            let slice = patience.as_ref().filter(|_| !is_over).map_or(LONG, Patience::slice);
            let waited = self.answered.wait_timeout(state, slice);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if let Some(patience) = &mut patience {
                patience.count(0);
            }
        }
        if self.course.is_abandoned() {
            return Err(Error::Abandoned);
        }
        if let Some((rank, reason)) = first_fault(&state.answers) {
            state.failure = Some((rank, reason.clone()));
            return Err(rank_error(rank, reason));
        }
        let times = state.answers.iter().flatten().flatten();
        Ok(times.copied().collect())
    }

    /// Orders a phase.
    fn order(&self, phase: Phase, tell: impl FnOnce(&Inputs)) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        state.order += 1;
        state.phase = Some(phase);
        state.answers[self.awaited.clone()].fill_with(|| None);
        self.ordered.notify_all();
        drop(state);
        tell(&self.inputs.read().unwrap_or_else(PoisonError::into_inner));
        lock(&self.state)
    }

    /// Carries out an order of the host that leads, and waits for the ranks of this process: what
    /// each answers.
    pub(super) fn obey(
        &self,
        phase: Phase,
        inputs: Inputs,
    ) -> Vec<(usize, Result<RankTime, Fault>)> {
        self.course.begin();
        *self.inputs.write().unwrap_or_else(PoisonError::into_inner) = inputs;
        let mut state = self.order(phase, |_| ());
        while state.answers.iter().any(Option::is_none) {
            state = self.answered.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let answers = state.answers[self.awaited.clone()].iter();
        self.awaited.clone().zip(answers.flatten().cloned()).collect()
    }

    /// What a rank answers.
    pub(super) fn answer(&self, rank: usize, answer: Result<RankTime, Fault>) {
        lock(&self.state).answers[rank] = Some(answer);
        self.answered.notify_all();
    }

    /// Ranks that are gone: they answer nothing more.
    pub(super) fn lose(&self, ranks: Range<usize>, why: &str) {
        let fault = Fault { reason: why.to_owned(), is_cause: true };
        let mut state = lock(&self.state);
        state.failure.get_or_insert_with(|| (ranks.start, why.to_owned()));
        for answer in state.answers[ranks].iter_mut().filter(|answer| answer.is_none()) {
            *answer = Some(Err(fault.clone()));
        }
        self.answered.notify_all();
    }

    /// Copies what the ranks will read into memory that is used again.
    fn feed(&self, phase: Phase, batch: &Batch<'_>, scalars: Scalars, examines: bool) {
        let mut inputs = self.inputs.write().unwrap_or_else(PoisonError::into_inner);
        inputs.documents.clear();
        inputs.documents.extend_from_slice(batch.documents);
        if let Some(samples) = self.samples[phase.index()] {
            let wanted = samples.global() * samples.seq;
            let fits = |given: &[i32]| given.is_empty() || given.len() == wanted;
            assert!(
                fits(batch.tokens) && fits(batch.labels) && fits(batch.documents),
                "a global batch has {} samples of {} tokens",
                samples.global(),
                samples.seq
            );
            let positions = batch.positions.len();
            assert!([0, samples.global()].contains(&positions), "each sample has a position");
            let starts = batch.documents.chunks(samples.seq).flat_map(|row| row.iter().zip(0..));
            let mut is_start = starts.map(|(&start, token)| (0..=token).contains(&start));
            assert!(is_start.all(|holds| holds), "a document starts at one of its tokens");
            // Where nothing is said, each sample is one document.
            inputs.documents.resize(wanted, 0);
        }
        inputs.tokens.clear();
        inputs.tokens.extend_from_slice(batch.tokens);
        inputs.labels.clear();
        inputs.labels.extend_from_slice(batch.labels);
        inputs.positions.clear();
        inputs.positions.extend_from_slice(batch.positions);
        inputs.last = batch.last;
        inputs.scalars = scalars;
        inputs.examines = examines;
    }

    /// The life of a rank's thread: carries out orders until the last.
    pub(super) fn serve(
        &self,
        rank: usize,
        mut work: impl FnMut(Phase, &Inputs) -> Result<RankTime, Fault>,
    ) {
        let mut done = 0;
        loop {
            let mut state = lock(&self.state);
            while state.order == done {
                state = self.ordered.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            done = state.order;
            let Some(phase) = state.phase else { return };
            drop(state);
            let inputs = self.inputs.read().unwrap_or_else(PoisonError::into_inner);
            let answer = work(phase, &inputs);
            drop(inputs);
            self.answer(rank, answer);
        }
    }

    /// The phase that was run last.
    pub(super) fn last_phase(&self) -> Phase {
        lock(&self.state).phase.unwrap_or(Phase::Step)
    }

    /// Orders the threads to end; whether none is still in a step.
    pub(super) fn stop(&self) -> bool {
        let mut state = lock(&self.state);
        state.order += 1;
        state.phase = None;
        self.ordered.notify_all();
        state.answers.iter().all(Option::is_some)
    }
}

/// The rank that failed by itself, rather than because another did, and why.
fn first_fault(answers: &[Option<Result<RankTime, Fault>>]) -> Option<(usize, String)> {
    let faults: Vec<(usize, &Fault)> = answers
        .iter()
        .enumerate()
        .filter_map(|(rank, answer)| Some((rank, answer.as_ref()?.as_ref().err()?)))
        .collect();
    let found = faults.iter().find(|(_, fault)| fault.is_cause).or(faults.first());
    found.map(|(rank, fault)| (*rank, fault.reason.clone()))
}
