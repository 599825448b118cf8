//! The ranks of other processes, as the leader of a session sees them: commands to their
//! processes, and the replies.

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
use crate::local::Inbox;
use crate::processes::{Handler, Peers, TcpTransport, ranks_of};
use crate::trace::{Span, Tracing};

use super::control::{Control, Inputs};
use super::fault::Fault;
use super::finite::Found;
use super::{Cached, Classes, Options, Phase, RankTime, lock};

/// How long a process may send or take nothing before it is lost. Chosen: longer than a machine
/// pauses.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// The exit code of followers unless the leader sends another: a rank or the outside world failed.
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

/// A command of the leader to a follower.
#[derive(Serialize, Deserialize)]
pub(super) enum Command {
    /// Runs a phase: [`Reply::Ran`].
    Run(Phase, Inputs),
    /// Reads some bytes of a buffer: [`Reply::Bytes`].
    Read(usize, BufferId, Range<usize>),
    /// Looks for the first of some ranges of buffers with a value that is not finite:
    /// [`Reply::Examined`].
    Examine(usize, Vec<(BufferId, Range<usize>, DType)>),
    /// Overwrites a buffer from a byte of it on, without a reply.
    Write(usize, BufferId, usize, Vec<u8>),
    /// Copies KV caches, without a reply.
    Copy([Cached; 2], usize),
    /// Reads what was timed: [`Reply::Spans`].
    Spans(usize),
    /// Connects GPUs whose groups have these NCCL ids: [`Reply::Ready`].
    Connect(Option<Vec<Vec<u8>>>),
    /// Ends the session, with an exit code, without a reply.
    End(u8),
}

/// A reply of a follower.
#[derive(Serialize, Deserialize)]
pub(super) enum Reply {
    /// Its ranks are ready, and whether it has NCCL; or why they are not.
    Ready(Result<bool, String>),
    /// What each of its ranks did in a phase, and what it found that is not finite, with the time
    /// since the command.
    Ran(Vec<(usize, Result<RankTime, Fault>, Option<(Found, Duration)>)>),
    Bytes(Vec<u8>),
    Examined(Option<usize>),
    Spans(Vec<Span>),
}

/// The followers of a session.
pub(super) struct Followers {
    transport: Arc<TcpTransport>,
    /// Replies but those of phases, or why there are none.
    replies: Mutex<Receiver<Result<(usize, Reply), String>>>,
    /// Why no reply comes any more.
    lost: Mutex<Option<String>>,
    step: Arc<Mutex<Step>>,
    /// The exit code of the followers.
    code: AtomicU8,
}

/// What is known of the phase that is being run, or was last.
struct Step {
    /// When it began.
    started: Instant,
    /// What ranks found that is not finite.
    found: BTreeMap<usize, Found>,
}

/// Handles the messages of followers.
struct FollowerHandler {
    control: Arc<Control>,
    ranks: Vec<Range<usize>>,
    replies: Mutex<Sender<Result<(usize, Reply), String>>>,
    step: Arc<Mutex<Step>>,
}

impl FollowerHandler {
    fn ran(
        &self,
        process: usize,
        ranks: Vec<(usize, Result<RankTime, Fault>, Option<(Found, Duration)>)>,
    ) {
        let of_process = ranks.into_iter().filter(|(rank, ..)| self.ranks[process].contains(rank));
        for (rank, answer, found) in of_process {
            if let Some((found, after)) = found {
                let step = &mut *lock(&self.step);
                let when = step.started + after;
                step.found.insert(rank, Found { when, ..found });
            }
            self.control.answer(rank, answer);
        }
    }
}

impl Handler for FollowerHandler {
    fn on_message(&self, process: usize, said: Vec<u8>) {
        let answer = match postcard::from_bytes(&said) {
            Ok(Reply::Ran(ranks)) => return self.ran(process, ranks),
            Ok(answer) => Ok((process, answer)),
            Err(why) => Err(format!("process {process} sends what is no reply: {why}")),
        };
        // The session may be gone.
        let _ = lock(&self.replies).send(answer);
    }

    fn on_loss(&self, process: usize, why: &str) {
        self.control.lose(self.ranks[process].clone(), why);
        let _ = lock(&self.replies).send(Err(why.to_owned()));
    }
}

impl Followers {
    /// Connects the parts of a session, and sends the others what it begins with. They make their
    /// ranks meanwhile; [`Followers::wait_until_ready`] waits for that.
    pub(super) fn lead(
        mut peers: Peers,
        classes: &Classes,
        target: Option<Target>,
        (options, threads_per_rank): (&Options, Option<usize>),
        control: &Arc<Control>,
        inbox: &Inbox,
    ) -> Result<Followers, Error> {
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
        peers.send_setup(&encode(&setup))?;
        let size = classes.mesh.ranks();
        let (sender, replies) = channel();
        let step = Step { started: Instant::now(), found: BTreeMap::new() };
        let step = Arc::new(Mutex::new(step));
        let handler: Arc<dyn Handler> = Arc::new(FollowerHandler {
            control: Arc::clone(control),
            ranks: ranks_of(size, peers.count()),
            replies: Mutex::new(sender),
            step: Arc::clone(&step),
        });
        let transport = TcpTransport::start(peers, size, inbox, &handler, PATIENCE)?;
        Ok(Followers {
            transport,
            replies: Mutex::new(replies),
            lost: Mutex::default(),
            step,
            code: AtomicU8::new(FAILED),
        })
    }

    /// Waits until all others have made their ranks, or connected their GPUs; whether all have
    /// NCCL.
    pub(super) fn wait_until_ready(&self) -> Result<bool, Error> {
        let mut all_have_nccl = true;
        for _ in self.transport.others() {
            match self.reply()? {
                (_, Reply::Ready(Ok(has_nccl))) => all_have_nccl &= has_nccl,
                (process, Reply::Ready(Err(why))) => {
                    let machine = self.transport.machine_of(process);
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
        *lock(&self.step) = Step { started: Instant::now(), found: BTreeMap::new() };
        self.send_all(&Command::Run(phase, inputs.clone()));
    }

    /// What ranks found in the last phase that is not finite.
    pub(super) fn found(&self) -> Vec<(usize, Found)> {
        lock(&self.step).found.iter().map(|(rank, found)| (*rank, *found)).collect()
    }

    /// Tells the process of a rank something that it does not answer.
    pub(super) fn send(&self, rank: usize, order: &Command) {
        self.transport.send_control(self.transport.process_of(rank), &encode(order));
    }

    /// Tells all others something that they do not answer.
    pub(super) fn send_all(&self, order: &Command) {
        let order = encode(order);
        self.transport.others().for_each(|process| self.transport.send_control(process, &order));
    }

    /// What the process of a rank replies.
    fn request(&self, rank: usize, order: &Command) -> Result<(usize, Reply), Error> {
        self.send(rank, order);
        self.reply()
    }

    fn reply(&self) -> Result<(usize, Reply), Error> {
        let mut lost = lock(&self.lost);
        if lost.is_none() {
            match lock(&self.replies).recv() {
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
        match self.request(rank, &Command::Read(rank, buffer, bytes))? {
            (_, Reply::Bytes(bytes)) if bytes.len() == len => Ok(bytes),
            (process, _) => Err(unexpected(process)),
        }
    }

    /// Which of some ranges of buffers is the first with a value that is not finite.
    pub(super) fn examine(
        &self,
        rank: usize,
        ranges: Vec<(BufferId, Range<usize>, DType)>,
    ) -> Result<Option<usize>, Error> {
        match self.request(rank, &Command::Examine(rank, ranges))? {
            (_, Reply::Examined(first)) => Ok(first),
            (process, _) => Err(unexpected(process)),
        }
    }

    /// What was timed in the last phase; nothing, where the process is lost.
    pub(super) fn spans(&self, rank: usize) -> Vec<Span> {
        match self.request(rank, &Command::Spans(rank)) {
            Ok((_, Reply::Spans(spans))) => spans,
            Ok(_) | Err(_) => Vec::new(),
        }
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        self.send_all(&Command::End(self.code.load(Ordering::SeqCst)));
        self.transport.close();
    }
}

/// What to do where another process is lost.
const LOST: &str =
    "its own message says why; training goes on from the last checkpoint with `--resume`";

pub(super) fn unexpected(process: usize) -> Error {
    let reason = format!("process {process} replies something else than it is asked");
    Error::Processes { reason, help: "start all processes from one program".to_owned() }
}

pub(super) fn encode(said: &impl Serialize) -> Vec<u8> {
    let Ok(bytes) = postcard::to_stdvec(said) else {
        unreachable!("orders, replies and programs have a length, and no maps");
    };
    bytes
}
