//! The ranks of other processes: what the host that leads a session tells those that follow.
//!
//! A host that follows makes the same seats and threads for its ranks as the one that leads, from
//! the programs that it is sent, and carries out orders until the last.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ir::ids::Ids;
use ir::plan::Mesh;
use ir::program::{BufferId, Program};
use ir::{DType, Target};
use kernels::Kernel;
use kernels::bounds::verify_programs;
use serde::{Deserialize, Serialize};

use crate::cuda::gpus::Gpus;
use crate::error::{Error, Failure};
use crate::local::{Arrivals, Local};
use crate::processes::{Ears, Peers, Wires, ranks_of};
use crate::trace::{Span, Tracing};

use super::control::{Control, Inputs};
use super::fault::Fault;
use super::finite::Found;
use super::{Cached, Classes, Devices, Options, Phase, RankTime, Session, Watch, cpus, lock};

/// How long a process may take no bytes before it is lost, at least. Chosen: longer than a machine
/// pauses.
const PATIENCE_MIN: Duration = Duration::from_secs(60);

/// What a session begins with.
#[derive(Serialize, Deserialize)]
struct Setup {
    programs: Vec<Program>,
    kernels: Vec<Kernel>,
    mesh: Mesh,
    target: Option<Target>,
    /// Threads of a rank, where they are the same on all machines.
    threads_per_rank: Option<usize>,
    deadline: Duration,
    tracing: Tracing,
    disk: Option<PathBuf>,
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
    /// Ends the session; there is no answer.
    End,
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
        let _ = lock(&self.answers).send(Err(format!("process {process}: {why}")));
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
        let patience = options.deadline.max(PATIENCE_MIN);
        let wires = Wires::start(peers, size, arrivals, &ears, patience)?;
        Ok(Elsewhere { wires, answers: Mutex::new(answers), lost: Mutex::default(), step })
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
        self.tell_all(&Order::End);
        self.wires.close();
    }
}

/// What to do where another process is lost.
const LOST: &str = "its own message says why; go on from the last checkpoint with `--resume`";

fn unexpected(process: usize) -> Error {
    let reason = format!("process {process} answers something else than it is asked");
    Error::Processes { reason, help: "start all processes from one program".to_owned() }
}

fn encode(said: &impl Serialize) -> Vec<u8> {
    let Ok(bytes) = postcard::to_stdvec(said) else {
        unreachable!("orders, answers and programs have a length, and no maps");
    };
    bytes
}

/// Which ranks a process has, and how many threads each of them, where that is said.
pub type Share = (Range<usize>, Option<usize>);

/// Opens what the ranks of a process compute on, by their programs and the target of these.
pub type Prepare<'a> = dyn Fn(&Classes, Option<Target>, Share) -> Result<Prepared, Failure> + 'a;

/// What a process that follows has for its ranks.
pub struct Prepared {
    /// Threads of a rank.
    pub threads_per_rank: usize,
    /// Its GPUs, where programs are for these.
    pub gpus: Option<Gpus>,
}

/// Has ranks of a session that another process leads, until that one ends it.
///
/// # Errors
/// The ranks cannot be made; the leading process is lost.
pub fn follow(mut peers: Peers, prepare: &Prepare<'_>) -> Result<(), Failure> {
    let setup: Setup = postcard::from_bytes(&peers.begun()?).map_err(|_| unexpected(0))?;
    let Setup { programs, kernels, mesh, target, threads_per_rank, deadline, tracing, disk } =
        setup;
    let wrong = verify_programs(&programs, &kernels, mesh);
    if !wrong.is_empty() {
        return Err(wrong.into());
    }
    let classes = Arc::new(Classes { programs, kernels, mesh, ids: Ids::default() });
    let size = mesh.ranks();
    let here = ranks_of(size, peers.count()).swap_remove(peers.launch().process);
    let (locals, arrivals) = Local::part(size, here.clone(), deadline);
    let (sender, orders) = channel();
    let ears: Arc<dyn Ears> = Arc::new(Following(Mutex::new(sender)));
    let wires = Wires::start(peers, size, &arrivals, &ears, deadline.max(PATIENCE_MIN))?;
    let started = prepare(&classes, target, (here.clone(), threads_per_rank)).and_then(|own| {
        let threads_per_rank = own.threads_per_rank;
        let options = Options { threads_per_rank, deadline, tracing, disk };
        let cpu = cpus(threads_per_rank);
        let devices = own.gpus.as_ref().map_or(Devices::Made(&cpu), Devices::Gpus);
        let mut session = Session::without_ranks(classes, here, &options);
        let watches = session.start_ranks(&options, devices, locals)?;
        Ok(Follower { session, gpus: own.gpus, watches, deadline })
    });
    let ready = started.as_ref().map(|_| Gpus::have_nccl()).map_err(ToString::to_string);
    wires.say(0, &encode(&Answer::Ready(ready)));
    let ended = started.and_then(|own| Ok(own.serve(&orders, &wires)?));
    wires.close();
    ended
}

/// What hears the process that leads.
struct Following(Mutex<Sender<Result<Order, String>>>);

impl Ears for Following {
    fn hear(&self, process: usize, said: Vec<u8>) {
        if process == 0 {
            let order = postcard::from_bytes(&said).map_err(|why| why.to_string());
            // There is nobody to tell once the session is gone.
            let _ = lock(&self.0).send(order);
        }
    }

    fn lose(&self, process: usize, why: &str) {
        if process == 0 {
            let _ = lock(&self.0).send(Err(format!("the first process: {why}")));
        }
    }
}

/// The ranks of a process that follows.
struct Follower {
    session: Session,
    gpus: Option<Gpus>,
    /// What connects these, until they are connected.
    watches: Vec<Watch>,
    deadline: Duration,
}

impl Follower {
    /// Carries out orders until the last.
    fn serve(
        mut self,
        orders: &Receiver<Result<Order, String>>,
        wires: &Wires,
    ) -> Result<(), Error> {
        let lost =
            |reason| Error::Processes { reason, help: "its own message says why".to_owned() };
        let gone = |_| lost("the first process is gone".to_owned());
        loop {
            let order = orders.recv().map_err(gone)?.map_err(lost)?;
            if matches!(order, Order::End) {
                return Ok(());
            }
            if let Some(answer) = self.carry_out(order)? {
                wires.say(0, &encode(&answer));
            }
        }
    }

    /// Carries out one order; what is answered, where anything is.
    fn carry_out(&mut self, order: Order) -> Result<Option<Answer>, Error> {
        let session = &mut self.session;
        Ok(Some(match order {
            Order::Run(phase, inputs) => {
                let start = Instant::now();
                let ran = session.control.obey(phase, inputs).into_iter();
                let found = |rank| {
                    let found: Option<Found> = lock(session.seat(rank)).found;
                    found.map(|found| (found, found.when.saturating_duration_since(start)))
                };
                Answer::Ran(ran.map(|(rank, it)| (rank, it, found(rank))).collect())
            }
            Order::Read(rank, buffer, bytes) => {
                let bytes =
                    session.lend(rank, |lent| lent.bytes(buffer, bytes).map(Cow::into_owned));
                Answer::Bytes(bytes?)
            }
            Order::Examine(rank, ranges) => {
                Answer::Examined(session.lend(rank, |lent| lent.first_not_finite(&ranges))?)
            }
            Order::Spans(rank) => Answer::Spans(lock(session.seat(rank)).spans.clone()),
            Order::Connect(ids) => {
                let watches = std::mem::take(&mut self.watches);
                let gpus = self.gpus.as_ref();
                let connect = |gpus| session.connect(gpus, watches, self.deadline, ids);
                let connected = gpus.map_or(Ok(()), connect);
                Answer::Ready(connected.map(|()| true).map_err(|why| why.to_string()))
            }
            Order::Write(rank, buffer, first, bytes) => {
                session.write_from(rank, buffer, first, &bytes);
                return Ok(None);
            }
            Order::Copy(ends, tokens) => {
                session.copy_cached(ends, tokens);
                return Ok(None);
            }
            Order::End => return Ok(None),
        }))
    }
}
