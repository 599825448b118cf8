//! The ranks of other processes: what the host that leads a session tells those that follow.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ir::plan::Mesh;
use ir::program::{BufferId, Program};
use ir::{DType, Target};
use kernels::Kernel;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::local::Arrivals;
use crate::processes::{Ears, Peers, Wires, ranks_of};
use crate::trace::{Span, Tracing};

use super::control::{Control, Inputs};
use super::fault::Fault;
use super::finite::Found;
use super::{Cached, Classes, Options, Phase, RankTime, lock};

/// How long a process may say or take nothing before it is lost. Chosen: longer than a machine
/// pauses.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// What processes end with that are told nothing else: a rank or the outside world failed.
const FAILED: u8 = 7;

/// What a session begins with.
#[derive(Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) programs: Vec<Program>,
    pub(super) kernels: Vec<Kernel>,
    pub(super) mesh: Mesh,
    pub(super) target: Option<Target>,
    /// Threads of a rank, where they are the same on all machines.
    pub(super) threads_per_rank: Option<usize>,
    pub(super) deadline: Duration,
    pub(super) tracing: Tracing,
    pub(super) disk: Option<PathBuf>,
}

/// What the host that leads tells another one.
#[derive(Serialize, Deserialize)]
pub(super) enum Order {
    /// Runs a phase; answered by [`Answer::Ran`].
    Run(Phase, Inputs),
    /// Reads some bytes of a buffer.
    Read(usize, BufferId, Range<usize>),
    /// Which of some ranges of buffers is the first with a value that is not finite.
    Examine(usize, Vec<(BufferId, Range<usize>, DType)>),
    /// Overwrites a buffer from a byte of it on; there is no answer.
    Write(usize, BufferId, usize, Vec<u8>),
    /// Copies KV caches; there is no answer.
    Copy([Cached; 2], usize),
    /// What was timed.
    Spans(usize),
    /// Connects GPUs whose groups have these ids, where NCCL has any; answered by
    /// [`Answer::Ready`].
    Connect(Option<Vec<Vec<u8>>>),
    /// Ends the session, with an exit code; there is no answer.
    End(u8),
}

/// What another host answers.
#[derive(Serialize, Deserialize)]
pub(super) enum Answer {
    /// Its ranks are ready, and whether it has NCCL; or why they are not.
    Ready(Result<bool, String>),
    /// What each of its ranks did in a phase, and what it found that is not finite, how long after
    /// the order.
    Ran(Vec<(usize, Result<RankTime, Fault>, Option<(Found, Duration)>)>),
    Bytes(Vec<u8>),
    Examined(Option<usize>),
    Spans(Vec<Span>),
}

/// The other processes of a session, as the one that leads sees them.
pub(super) struct Elsewhere {
    wires: Arc<Wires>,
    /// Answers other than of phases, or why there are none.
    answers: Mutex<Receiver<Result<(usize, Answer), String>>>,
    /// Why none come any more.
    lost: Mutex<Option<String>>,
    step: Arc<Mutex<Step>>,
    /// What the others end with.
    code: AtomicU8,
}

/// What is known of the phase that is being run, or was last.
struct Step {
    /// When it was ordered.
    ordered: Instant,
    /// What ranks found that is not finite.
    found: BTreeMap<usize, Found>,
}

/// What hears the processes that follow.
struct Leading {
    control: Arc<Control>,
    ranks: Vec<Range<usize>>,
    answers: Mutex<Sender<Result<(usize, Answer), String>>>,
    step: Arc<Mutex<Step>>,
}

impl Leading {
    fn ran(
        &self,
        process: usize,
        ranks: Vec<(usize, Result<RankTime, Fault>, Option<(Found, Duration)>)>,
    ) {
        let of_process = ranks.into_iter().filter(|(rank, ..)| self.ranks[process].contains(rank));
        for (rank, answer, found) in of_process {
            if let Some((found, after)) = found {
                let step = &mut *lock(&self.step);
                let when = step.ordered + after;
                step.found.insert(rank, Found { when, ..found });
            }
            self.control.answer(rank, answer);
        }
    }
}

impl Ears for Leading {
    fn hear(&self, process: usize, said: Vec<u8>) {
        let answer = match postcard::from_bytes(&said) {
            Ok(Answer::Ran(ranks)) => return self.ran(process, ranks),
            Ok(answer) => Ok((process, answer)),
            Err(why) => Err(format!("process {process} says what is no answer: {why}")),
        };
        // There is nobody to tell once the session is gone.
        let _ = lock(&self.answers).send(answer);
    }

    fn lose(&self, process: usize, why: &str) {
        self.control.lose(self.ranks[process].clone(), why);
        let _ = lock(&self.answers).send(Err(why.to_owned()));
    }
}

impl Elsewhere {
    /// Connects the parts of a session, and sends the others what it begins with. They make their
    /// ranks meanwhile; [`Elsewhere::wait_until_ready`] waits for that.
    pub(super) fn lead(
        mut peers: Peers,
        classes: &Classes,
        target: Option<Target>,
        (options, threads_per_rank): (&Options, Option<usize>),
        control: &Arc<Control>,
        arrivals: &Arrivals,
    ) -> Result<Elsewhere, Error> {
        let setup = Setup {
            programs: classes.programs.clone(),
            kernels: classes.kernels.clone(),
            mesh: classes.mesh,
            target,
            threads_per_rank,
            deadline: options.deadline,
            tracing: options.tracing,
            disk: options.disk.clone(),
        };
        peers.begin(&encode(&setup))?;
        let size = classes.mesh.ranks();
        let (sender, answers) = channel();
        let step = Step { ordered: Instant::now(), found: BTreeMap::new() };
        let step = Arc::new(Mutex::new(step));
        let ears: Arc<dyn Ears> = Arc::new(Leading {
            control: Arc::clone(control),
            ranks: ranks_of(size, peers.count()),
            answers: Mutex::new(sender),
            step: Arc::clone(&step),
        });
        let wires = Wires::start(peers, size, arrivals, &ears, PATIENCE)?;
        Ok(Elsewhere {
            wires,
            answers: Mutex::new(answers),
            lost: Mutex::default(),
            step,
            code: AtomicU8::new(FAILED),
        })
    }

    /// Waits until all others have made their ranks, or connected their GPUs; whether all have
    /// NCCL.
    pub(super) fn wait_until_ready(&self) -> Result<bool, Error> {
        let mut all_have_nccl = true;
        for _ in self.wires.others() {
            match self.answer()? {
                (_, Answer::Ready(Ok(has_nccl))) => all_have_nccl &= has_nccl,
                (process, Answer::Ready(Err(why))) => {
                    let machine = self.wires.machine_of(process);
                    let reason = format!("process {process}, on {machine}, has no ranks: {why}");
                    let help = "its own message says more".to_owned();
                    return Err(Error::Processes { reason, help });
                }
                (process, _) => return Err(unexpected(process)),
            }
        }
        Ok(all_have_nccl)
    }

    /// Says what the others end with: what this process does.
    pub(super) fn end_with(&self, code: u8) {
        self.code.store(code, Ordering::SeqCst);
    }

    /// Lets the ranks of all others run a phase.
    pub(super) fn run(&self, phase: Phase, inputs: &Inputs) {
        *lock(&self.step) = Step { ordered: Instant::now(), found: BTreeMap::new() };
        self.tell_all(&Order::Run(phase, inputs.clone()));
    }

    /// What ranks found in the last phase that is not finite.
    pub(super) fn found(&self) -> Vec<(usize, Found)> {
        lock(&self.step).found.iter().map(|(rank, found)| (*rank, *found)).collect()
    }

    /// Tells the process of a rank something that it does not answer.
    pub(super) fn tell(&self, rank: usize, order: &Order) {
        self.wires.say(self.wires.process_of(rank), &encode(order));
    }

    /// Tells all others something that they do not answer.
    pub(super) fn tell_all(&self, order: &Order) {
        let order = encode(order);
        self.wires.others().for_each(|process| self.wires.say(process, &order));
    }

    /// What the process of a rank answers.
    fn ask(&self, rank: usize, order: &Order) -> Result<(usize, Answer), Error> {
        self.tell(rank, order);
        self.answer()
    }

    fn answer(&self) -> Result<(usize, Answer), Error> {
        let mut lost = lock(&self.lost);
        if lost.is_none() {
            match lock(&self.answers).recv() {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(why)) => *lost = Some(why),
                Err(_) => *lost = Some("the other processes are gone".to_owned()),
            }
        }
        let reason = lost.clone().unwrap_or_default();
        Err(Error::Processes { reason, help: LOST.to_owned() })
    }

    /// Some bytes of a buffer.
    pub(super) fn read(
        &self,
        rank: usize,
        buffer: BufferId,
        bytes: Range<usize>,
    ) -> Result<Vec<u8>, Error> {
        let len = bytes.len();
        match self.ask(rank, &Order::Read(rank, buffer, bytes))? {
            (_, Answer::Bytes(bytes)) if bytes.len() == len => Ok(bytes),
            (process, _) => Err(unexpected(process)),
        }
    }

    /// Which of some ranges of buffers is the first with a value that is not finite.
    pub(super) fn examine(
        &self,
        rank: usize,
        ranges: Vec<(BufferId, Range<usize>, DType)>,
    ) -> Result<Option<usize>, Error> {
        match self.ask(rank, &Order::Examine(rank, ranges))? {
            (_, Answer::Examined(first)) => Ok(first),
            (process, _) => Err(unexpected(process)),
        }
    }

    /// What was timed in the last phase; nothing, where the process is lost.
    pub(super) fn spans(&self, rank: usize) -> Vec<Span> {
        match self.ask(rank, &Order::Spans(rank)) {
            Ok((_, Answer::Spans(spans))) => spans,
            Ok(_) | Err(_) => Vec::new(),
        }
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        self.tell_all(&Order::End(self.code.load(Ordering::SeqCst)));
        self.wires.close();
    }
}

/// What to do where another process is lost.
const LOST: &str = "its own message says why; go on from the last checkpoint with `--resume`";

pub(super) fn unexpected(process: usize) -> Error {
    let reason = format!("process {process} answers something else than it is asked");
    Error::Processes { reason, help: "start all processes from one program".to_owned() }
}

pub(super) fn encode(said: &impl Serialize) -> Vec<u8> {
    let Ok(bytes) = postcard::to_stdvec(said) else {
        unreachable!("orders, answers and programs have a length, and no maps");
    };
    bytes
}
