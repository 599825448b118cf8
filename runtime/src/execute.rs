//! Executes programs: one thread for each rank, with its memory, its threads and its connections.
//!
//! A [`Session`] is made from the programs of all classes of ranks. Between steps the ranks sleep,
//! and the host reads and writes their buffers; during a step nothing but the ranks does. Where a
//! run has several processes, the session of the first one leads: those of the others carry out
//! what it orders (modules `leader` and `follower`).
//!
//! **Failures.** A rank that panics or whose communication fails ends the step on all ranks. The
//! error names the rank that failed first, its step and its instruction, as they stand in the text
//! of its program. After it the session is of no further use. A step that is abandoned leaves
//! weights and states as they were before it, or finishes its update.
//!
//! **Cost.** Arenas, groups and trace buffers are made at the start; a step reserves no memory
//! beyond what kernels use as scratch in their first launch.

mod fault;
mod control;
mod course;
mod describe;
mod leader;
mod finite;
mod follower;
mod memory;
mod rank;
mod shards;
mod spill;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod tiny;

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ir::ids::{self, IGNORED, Ids};
use ir::plan::{Mesh, Place};
use ir::program::{Buffer, BufferId, Contents, Feed, Program, Step};
use ir::sharding::Axis;
use ir::{DType, Diagnostic, Target};
use kernels::Kernel;
use kernels::cpu::Cpu;
use serde::{Deserialize, Serialize};

use crate::communicator::{CommError, Communicator};
use crate::cuda::gpus::Gpus;
use crate::cuda::space::Connection;
use crate::device::Device;
use crate::error::{Error, Failure};
use crate::local::Local;
use crate::local::mover::{Extent, Mover};
use crate::processes::{Peers, ranks_of};
use crate::trace::{Span, Trace, Tracing};

use control::Control;
use course::Course;
use finite::Found;
pub use finite::NotFinite;
pub use follower::{Prepare, Prepared, Share, follow};
use leader::{Command, Followers};
use memory::Memory;
use rank::Runner;
use shards::ShardTable;
pub use shards::{Part, Shard, Values};

/// The programs of all classes of ranks.
#[derive(Clone, Debug)]
pub struct Classes {
    /// One for each stage and each place on the context-parallel and tensor-parallel axes.
    pub programs: Vec<Program>,
    /// What their launches refer to.
    pub kernels: Vec<Kernel>,
    /// The grid of ranks.
    pub mesh: Mesh,
    /// What they look up by tokens and labels.
    pub ids: Ids,
}

impl Classes {
    /// The index of the program of a rank.
    pub fn class_of(&self, rank: usize) -> usize {
        let place = [Axis::Pp, Axis::Cp, Axis::Tp].map(|axis| self.mesh.coordinate(rank, axis));
        let class = self.programs.iter().position(|program| program.place() == place);
        class.expect("every place has a program")
    }

    /// The program of a rank.
    pub fn program_of(&self, rank: usize) -> &Program {
        &self.programs[self.class_of(rank)]
    }

    /// All phases, in a fixed order.
    fn phases(&self) -> impl Iterator<Item = Phase> + use<> {
        let entries = self.programs.first().map_or(0, |program| program.entries.len());
        [Phase::Step, Phase::Evaluate].into_iter().chain((0..entries).map(Phase::Entry))
    }

    /// How a phase cuts the global batch; none if it feeds nothing of samples.
    pub fn samples(&self, phase: Phase) -> Option<Samples> {
        let steps = self.programs.iter().flat_map(|p| steps(p, phase).iter().map(move |s| (p, s)));
        let mut samples: Option<Samples> = None;
        for (program, step) in steps {
            let Step::Feed {
                feed: Feed::Tokens | Feed::Labels | Feed::Documents,
                microbatch,
                buffer,
            } = step
            else {
                continue;
            };
            let [size, part] = buffer_of(program, *buffer).sizes[..] else {
                panic!("tokens, labels and documents have two dims");
            };
            let (dp, count, seq) = (self.mesh.dp, microbatch + 1, part * self.mesh.cp);
            let known = samples.get_or_insert(Samples { size, dp, count, seq });
            assert!(known.size == size && known.seq == seq, "all micro-batches have one size");
            known.count = known.count.max(count);
        }
        samples
    }
}

/// How a global batch lies on micro-batches and ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Samples {
    /// Samples of one micro-batch on one rank.
    pub size: usize,
    /// Ranks along the data-parallel axis.
    pub dp: usize,
    /// Micro-batches.
    pub count: usize,
    /// Tokens of a sample.
    pub seq: usize,
}

impl Samples {
    /// Samples of the global batch.
    pub fn global(self) -> usize {
        self.size * self.dp * self.count
    }

    /// The index in the global batch of the first sample of a micro-batch on one rank.
    pub fn first(self, microbatch: usize, data: usize) -> usize {
        (microbatch * self.dp + data) * self.size
    }
}

/// Which steps of a program are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// [`Program::steps`].
    Step,
    /// [`Program::evaluate`].
    Evaluate,
    /// One of [`Program::entries`].
    Entry(usize),
}

impl Phase {
    /// The place among [`Classes::phases`].
    fn index(self) -> usize {
        match self {
            Phase::Step => 0,
            Phase::Evaluate => 1,
            Phase::Entry(entry) => 2 + entry,
        }
    }
}

fn steps(program: &Program, phase: Phase) -> &[Step] {
    match phase {
        Phase::Step => &program.steps,
        Phase::Evaluate => &program.evaluate,
        Phase::Entry(entry) => &program.entries[entry].steps,
    }
}

fn buffer_of(program: &Program, id: BufferId) -> &Buffer {
    &program.buffers[id.0 as usize]
}

/// How programs are executed; nothing here changes a result.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads of one rank.
    pub threads_per_rank: usize,
    /// How long a rank waits for another before it fails, from the last instruction on that any
    /// rank has finished.
    pub deadline: Duration,
    /// What is timed.
    pub tracing: Tracing,
    /// The directory on whose disk ranks keep what plans place there, in files without names that
    /// vanish with the process; none for the system's own for temporary files.
    pub disk: Option<PathBuf>,
}

/// The tokens and labels of a global batch, sample by sample.
#[derive(Clone, Copy, Debug, Default)]
pub struct Batch<'a> {
    /// `[samples, seq]`
    pub tokens: &'a [i32],
    /// `[samples, seq]`, or empty where a program has no use for them.
    pub labels: &'a [i32],
    /// `[samples, seq]`: for each token the place of its document's first token in the sample;
    /// empty where each sample is one document.
    pub documents: &'a [i32],
    /// `[samples]`: the position of each one's first token, in decoding.
    pub positions: &'a [i32],
    /// The index of the token whose logits are wanted, in decoding.
    pub last: i32,
}

/// The numbers that differ from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scalars {
    /// The seed of the run.
    pub seed: u32,
    /// The optimizer step, from 1 on.
    pub step: u32,
    /// The learning rate.
    pub rate: f64,
    /// `1 - beta1^step`
    pub correction1: f64,
    /// `1 - beta2^step`
    pub correction2: f64,
    /// The norm to which gradients are scaled down; infinite for none.
    pub clip: f64,
    /// What the gradient of the loss is multiplied by while it flows back, and divided by before
    /// the update.
    pub loss_scale: f64,
    /// The largest mean loss with which weights are updated.
    pub loss_max: f64,
    /// The largest norm of the mean gradient with which they are.
    pub norm_max: f64,
}

impl Default for Scalars {
    /// What an evaluation or an inference needs: no update.
    fn default() -> Scalars {
        Scalars {
            seed: 0,
            step: 1,
            rate: 0.0,
            correction1: 1.0,
            correction2: 1.0,
            clip: f64::INFINITY,
            loss_scale: 1.0,
            loss_max: f64::INFINITY,
            norm_max: f64::INFINITY,
        }
    }
}

impl Scalars {
    /// The norm of the mean gradient, from the count and the sum of squares of a step.
    fn norm(&self, [_, count, squares]: [f64; 3]) -> f64 {
        squares.sqrt() / count / self.loss_scale
    }

    /// Whether weights are updated in a step with these sums of losses, counts and squares, which
    /// are equal on all ranks.
    fn allow_update(&self, stats: [f64; 3]) -> bool {
        let is_above = stats[0] / stats[1] > self.loss_max || self.norm(stats) > self.norm_max;
        stats.iter().all(|number| number.is_finite()) && !is_above
    }
}

/// What one step did, and how long it took.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// The sum of the losses of all labels.
    pub loss_sum: f64,
    /// The number of labels that count.
    pub count: f64,
    /// The norm of the mean gradient before it was clipped; 0 in an evaluation.
    pub grad_norm: f64,
    /// Whether the step ended before its update: weights and states keep their bits.
    pub is_skipped: bool,
    /// From the start of the first rank to the end of the last.
    pub seconds: f64,
    /// How each rank spent it.
    pub ranks: Vec<RankTime>,
}

impl StepReport {
    /// The loss of one label, on average.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.count
    }
}

/// How a rank spent a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankTime {
    /// In launches and feeds.
    pub busy_s: f64,
    /// In calls to other ranks, most of it waiting for them.
    pub wait_s: f64,
}

/// The memory of a rank, lent to the host.
pub struct Lent<'a> {
    program: &'a Program,
    memory: Lender<'a>,
}

/// Where the memory of a rank is.
enum Lender<'a> {
    /// In this process.
    Here(&'a Memory),
    /// In another one; the rank.
    Followers(&'a Followers, usize),
}

impl<'a> Lent<'a> {
    /// Some bytes of a buffer: a copy, where they lie on a GPU or in another process.
    ///
    /// # Errors
    /// The process is gone.
    ///
    /// # Panics
    /// When the buffer has fewer, or the GPU has failed.
    pub fn bytes(&self, buffer: BufferId, bytes: Range<usize>) -> Result<Cow<'a, [u8]>, Error> {
        match self.memory {
            Lender::Here(memory) => Ok(read(self.program, memory, buffer, bytes)),
            Lender::Followers(followers, rank) => {
                followers.read(rank, buffer, bytes).map(Cow::Owned)
            }
        }
    }

    /// Which of some ranges of buffers is the first with a value that is not finite.
    fn first_not_finite(
        &self,
        ranges: &[(BufferId, Range<usize>, DType)],
    ) -> Result<Option<usize>, Error> {
        if let Lender::Followers(followers, rank) = self.memory {
            return followers.examine(rank, ranges.to_vec());
        }
        for (at, (buffer, bytes, dtype)) in ranges.iter().enumerate() {
            let values = finite::values(*dtype, &self.bytes(*buffer, bytes.clone())?);
            if values != finite::Values::Finite {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// The bytes that were reserved in a memory space.
    pub fn arena_bytes(&self, place: Place) -> u64 {
        match self.memory {
            Lender::Here(memory) => memory.len(place) as u64,
            Lender::Followers(..) => self.program.arena(place).0,
        }
    }
}

/// Where the memory of a rank's device is, among its arenas.
const DEVICE: usize = Place::Device as usize;

/// What a rank owns that the host looks at between steps.
struct Seat {
    memory: Memory,
    spans: Vec<Span>,
    /// What is not finite in the step that was run last, where it was looked for.
    found: Option<Found>,
}

/// Ends the step of a session from another thread, at the next launches of its ranks.
#[derive(Clone)]
pub struct Abandon(Arc<Course>);

impl Abandon {
    /// Ends the step, and lets no other begin. A step in which a rank has begun to update its
    /// weights is finished first: either all ranks update or none does.
    pub fn now(&self) {
        self.0.abandon();
    }
}

/// What tells whether another rank has failed.
type Watch = Box<dyn Fn() -> Result<(), CommError> + Send>;

/// What the ranks of a session compute on.
#[derive(Clone, Copy)]
enum Devices<'a> {
    /// In memory of the host, on what is made for each rank.
    Made(&'a dyn Fn(usize) -> io::Result<Box<dyn Device>>),
    /// On a GPU each.
    Gpus(&'a Gpus),
}

/// What the processors of this machine compute on.
fn cpus(threads_per_rank: usize) -> impl Fn(usize) -> io::Result<Box<dyn Device>> {
    move |_| Ok(Box::new(Cpu::start(threads_per_rank)?) as Box<dyn Device>)
}

/// The ranks of a run, ready to run steps.
pub struct Session {
    classes: Arc<Classes>,
    control: Arc<Control>,
    /// The ranks of this process.
    here: Range<usize>,
    /// Those of the others, where there are any and this one leads.
    followers: Option<Followers>,
    /// Of the ranks of this process.
    seats: Vec<Arc<Mutex<Seat>>>,
    threads: Vec<JoinHandle<()>>,
    /// Found out when it is first asked for.
    shards: OnceLock<ShardTable>,
}

impl Session {
    /// Reserves the memory of all ranks and starts their threads.
    ///
    /// **Errors.** Memory or threads are lacking; the error names the rank.
    pub fn start(classes: Arc<Classes>, options: &Options) -> Result<Session, Error> {
        Session::start_on(classes, options, &cpus(options.threads_per_rank))
    }

    /// As [`Session::start`], with the ranks of this process and of others that [`follow`]: on GPUs
    /// of this machine, where there are any. `threads_per_rank` is the number of threads of
    /// a rank on all machines; without it each process takes its share of the cores.
    ///
    /// **Errors.** As there; a process is lost or cannot start its ranks.
    pub fn lead(
        classes: Arc<Classes>,
        (options, threads_per_rank): (&Options, Option<usize>),
        (target, gpus): (Option<Target>, Option<&Gpus>),
        peers: Peers,
    ) -> Result<Session, Error> {
        let size = classes.mesh.ranks();
        let here = ranks_of(size, peers.count()).swap_remove(0);
        let (locals, inbox) = Local::part(size, here.clone(), options.deadline);
        let mut session = Session::without_ranks(classes, here, options);
        let (classes, control) = (&session.classes, &session.control);
        let how = (options, threads_per_rank);
        let followers = Followers::lead(peers, classes, target, how, control, &inbox)?;
        session.followers = Some(followers);
        let cpu = cpus(options.threads_per_rank);
        let devices = gpus.map_or(Devices::Made(&cpu), Devices::Gpus);
        let watches = session.start_ranks(options, devices, locals)?;
        let Some(followers) = &session.followers else { return Ok(session) };
        let all_have_nccl = followers.wait_until_ready()?;
        if let Some(gpus) = gpus.filter(|_| all_have_nccl) {
            let ids = Gpus::ids(session.nccl_groups().len())?;
            followers.send_all(&Command::Connect(ids.clone()));
            session.connect(gpus, watches, options.deadline, ids)?;
            followers.wait_until_ready()?;
        }
        Ok(session)
    }

    /// As [`Session::start`], on GPUs, which have the kernels of these programs.
    ///
    /// **Errors.** As there; a GPU has too little memory, or fails.
    pub fn start_on_gpus(
        classes: Arc<Classes>,
        options: &Options,
        gpus: &Gpus,
    ) -> Result<Session, Error> {
        Session::start_with(classes, options, Devices::Gpus(gpus))
    }

    /// As [`Session::start`], on other devices: `device` makes that of a rank.
    ///
    /// **Errors.** As there, and those of `device`, which is out of threads.
    pub fn start_on(
        classes: Arc<Classes>,
        options: &Options,
        device: &dyn Fn(usize) -> io::Result<Box<dyn Device>>,
    ) -> Result<Session, Error> {
        Session::start_with(classes, options, Devices::Made(device))
    }

    fn start_with(
        classes: Arc<Classes>,
        options: &Options,
        devices: Devices<'_>,
    ) -> Result<Session, Error> {
        let size = classes.mesh.ranks();
        let mut session = Session::without_ranks(classes, 0..size, options);
        let locals = Local::world(size, options.deadline);
        let watches = session.start_ranks(options, devices, locals)?;
        if let Devices::Gpus(gpus) = devices {
            let ids = Gpus::ids(session.nccl_groups().len())?;
            session.connect(gpus, watches, options.deadline, ids)?;
        }
        Ok(session)
    }

    fn without_ranks(classes: Arc<Classes>, here: Range<usize>, options: &Options) -> Session {
        let size = classes.mesh.ranks();
        let samples = classes.phases().map(|phase| classes.samples(phase)).collect();
        // The first process hears of all ranks, the others of their own.
        let awaited = if here.start == 0 { 0..size } else { here.clone() };
        let control = Arc::new(Control::new(size, awaited, options.deadline, samples));
        let (seats, threads) = (Vec::new(), Vec::with_capacity(here.len()));
        let shards = OnceLock::new();
        Session { classes, control, here, followers: None, seats, threads, shards }
    }

    /// Reserves the memory of the ranks of this process and starts their threads; what tells each
    /// whether another one has failed.
    fn start_ranks(
        &mut self,
        options: &Options,
        devices: Devices<'_>,
        locals: Vec<Local>,
    ) -> Result<Vec<Watch>, Error> {
        for rank in self.here.clone() {
            let seat = self.make_seat(rank, options, devices)?;
            self.seats.push(Arc::new(Mutex::new(seat)));
        }
        if let Devices::Gpus(gpus) = devices
            && self.classes.mesh.pp > 1
        {
            let mailboxes = Arc::new(gpus.mailboxes(self.here.start));
            for (rank, seat) in self.here.clone().zip(&self.seats) {
                lock(seat).memory.connect_stages(Arc::clone(&mailboxes), rank);
            }
        }
        let epoch = Instant::now();
        let watches = locals.iter().map(|local| Box::new(local.watch()) as Watch).collect();
        for local in locals {
            let rank = local.rank();
            let classes = Arc::clone(&self.classes);
            let control = Arc::clone(&self.control);
            let seat = Arc::clone(self.seat(rank));
            let samples = control.all_samples();
            let here = self.here.clone();
            let course = Arc::clone(&control.course);
            let make = || {
                let is_away = |place| classes.program_of(rank).arena(place).0 > 0;
                let moves = [Place::Host, Place::Disk].into_iter().any(is_away);
                let mover = if moves { Some(Mover::start(rank)?) } else { None };
                let local = Box::new(local) as Box<dyn Communicator>;
                let device = match devices {
                    Devices::Made(make) => Some(make(rank)?),
                    Devices::Gpus(_) => None,
                };
                let parts = (local, device, mover);
                Ok(Runner::new(classes, parts, here, options, samples, course, epoch))
            };
            let refused = |source| Error::Threads { whom: format!("rank {rank}"), source };
            let mut runner = catch_unwind(AssertUnwindSafe(make))
                .map_err(|panic| rank_error(rank, rank::panic_text(&*panic).to_owned()))?
                .map_err(refused)?;
            let body = move || {
                control.serve(rank, |phase, inputs| runner.run(phase, inputs, &mut lock(&seat)));
            };
            let thread = std::thread::Builder::new().name(format!("rank {rank}")).spawn(body);
            let thread = thread.map_err(refused)?;
            self.threads.push(thread);
        }
        Ok(watches)
    }

    /// What a rank of this process owns.
    fn seat(&self, rank: usize) -> &Arc<Mutex<Seat>> {
        &self.seats[rank - self.here.start]
    }

    /// The groups of ranks that exchange something that NCCL can, in one order on all processes.
    fn nccl_groups(&self) -> Vec<Vec<usize>> {
        rank::connections(&self.classes).0
    }

    /// Connects the GPUs of ranks, where there are ids for their groups.
    fn connect(
        &self,
        gpus: &Gpus,
        watches: Vec<Watch>,
        deadline: Duration,
        ids: Option<Vec<Vec<u8>>>,
    ) -> Result<(), Error> {
        let Some(ids) = ids.filter(|ids| !ids.is_empty()) else { return Ok(()) };
        let (groups, scratch) = rank::connections(&self.classes);
        let is_here = |rank: &usize| self.here.contains(rank);
        let groups = groups.into_iter().zip(ids).filter(|(group, _)| group.iter().any(is_here));
        let groups: Vec<_> = groups.collect();
        let ends = gpus.connect(self.here.start, &groups, &scratch[self.here.clone()])?;
        for ((seat, nccl), watch) in self.seats.iter().zip(ends).zip(watches) {
            lock(seat).memory.connect(Connection { nccl, watch, deadline });
        }
        Ok(())
    }

    fn make_seat(
        &self,
        rank: usize,
        options: &Options,
        devices: Devices<'_>,
    ) -> Result<Seat, Error> {
        let program = self.classes.program_of(rank);
        let gpus = match devices {
            Devices::Made(_) => None,
            Devices::Gpus(gpus) => Some(gpus),
        };
        let kernels = &self.classes.kernels;
        let memory = Memory::new(
            program,
            kernels,
            (rank, rank - self.here.start),
            gpus,
            options.disk.as_deref(),
        )?;
        let spans = |phase| options.tracing.span_count(program, steps(program, phase));
        let spans = self.classes.phases().map(spans).max().unwrap_or(0);
        Ok(Seat { memory, spans: Vec::with_capacity(spans), found: None })
    }

    /// Says with which exit code other processes of the run end when this session does: with that
    /// of a failure where nothing is said.
    pub fn end_with(&self, code: u8) {
        if let Some(followers) = &self.followers {
            followers.end_with(code);
        }
    }

    /// The programs.
    pub fn classes(&self) -> &Classes {
        &self.classes
    }

    /// Lets another thread end a step of this session, after which its memory can still be read.
    pub fn abandon(&self) -> Abandon {
        Abandon(Arc::clone(&self.control.course))
    }

    /// Runs a step again whose loss or gradient is not finite, and finds the first value in it that
    /// is not: NaN or infinite, negative infinities only where there is nothing else. None if the
    /// step has no such value.
    ///
    /// **Errors.** As [`Session::step`].
    pub fn examine(
        &mut self,
        batch: &Batch<'_>,
        scalars: Scalars,
    ) -> Result<Option<NotFinite>, Failure> {
        if let Some(weight) = self.weight_not_finite()? {
            return Ok(Some(weight));
        }
        self.order(Phase::Step, batch, scalars, true)?;
        let here = self.here.clone().zip(&self.seats);
        let found = here.filter_map(|(rank, seat)| Some((rank, lock(seat).found?)));
        let found = found.chain(self.followers.iter().flat_map(Followers::found));
        let first = found.min_by_key(|(_, found)| (found.is_mask_like, found.when));
        Ok(first.map(|(rank, found)| {
            let program = self.classes.program_of(rank);
            finite::told(program, &self.classes.kernels, &program.steps, rank, found)
        }))
    }

    /// Orders a phase and waits for all ranks.
    fn order(
        &self,
        phase: Phase,
        batch: &Batch<'_>,
        scalars: Scalars,
        examines: bool,
    ) -> Result<Vec<RankTime>, Error> {
        let followers = self.followers.as_ref();
        self.control.run(phase, batch, scalars, examines, |inputs| {
            if let Some(followers) = followers {
                followers.run(phase, inputs);
            }
        })
    }

    /// The first weight or state of the optimizer that has a value that is not finite.
    ///
    /// **Errors.** A process with ranks is lost.
    pub fn weight_not_finite(&self) -> Result<Option<NotFinite>, Error> {
        let kept = self.shards().iter().filter(|shard| shard.part != Part::Grad);
        let kept: Vec<&Shard> = kept.collect();
        for of_rank in kept.chunk_by(|a, b| a.rank == b.rank) {
            let range = |shard: &&Shard| (shard.buffer, shard.range(), shard.dtype);
            let ranges: Vec<_> = of_rank.iter().map(range).collect();
            let first = self.lend(of_rank[0].rank, |lent| lent.first_not_finite(&ranges))?;
            let Some(shard) = first.and_then(|first| of_rank.get(first)) else { continue };
            let tensor = match shard.part {
                Part::State(index) => format!("{}/state{index}", shard.name),
                Part::Scale(index) => format!("{}/state{index}.scale", shard.name),
                Part::Weight | Part::Rounded | Part::Grad => shard.name.clone(),
            };
            let layer = tensor.rsplit_once('.').map(|(layer, _)| layer.to_owned());
            return Ok(Some(NotFinite { rank: shard.rank, tensor, layer, place: None }));
        }
        Ok(None)
    }

    /// Runs one training step on all ranks. Where its loss or gradient is not finite, it ends
    /// before the update: weights and states keep their bits.
    ///
    /// **Shapes.** The batch holds the samples of all micro-batches and ranks: micro-batch `m` of
    /// data coordinate `r` is [`Samples::size`] samples from [`Samples::first`]`(m, r)` on.
    /// **Errors.** E4035 for tokens or labels that the programs do not know, before any rank runs;
    /// a rank fails.
    pub fn step(&mut self, batch: &Batch<'_>, scalars: Scalars) -> Result<StepReport, Failure> {
        self.run(Phase::Step, batch, scalars)
    }

    /// Computes the loss of a batch on all ranks and changes no parameter.
    ///
    /// **Errors.** As [`Session::step`].
    pub fn evaluate(&mut self, batch: &Batch<'_>) -> Result<StepReport, Failure> {
        self.run(Phase::Evaluate, batch, Scalars::default())
    }

    /// Calls an entry of a program for inference on all ranks; [`Session::output`] has its results.
    ///
    /// **Errors.** As [`Session::step`].
    pub fn infer(&mut self, entry: usize, batch: &Batch<'_>) -> Result<StepReport, Failure> {
        self.run(Phase::Entry(entry), batch, Scalars::default())
    }

    /// A result of the entry that was called last, of all samples, sample by sample.
    ///
    /// # Errors
    /// The process of a rank is lost.
    ///
    /// # Panics
    /// When the entry has no such result.
    pub fn output(&self, entry: usize, index: usize) -> Result<Values, Error> {
        let mesh = self.classes.mesh;
        let (mut bytes, mut sizes, mut dtype) = (Vec::new(), Vec::new(), DType::F32);
        for data in 0..mesh.dp {
            let has = |stage: &usize| {
                let program = self.classes.program_of(mesh.rank([*stage, data, 0, 0]));
                program.entries[entry].outputs.len() > index
            };
            let stage = (0..mesh.pp).find(has).expect("an entry's results are on some stage");
            let rank = mesh.rank([stage, data, 0, 0]);
            let program = self.classes.program_of(rank);
            let id = program.entries[entry].outputs[index];
            let buffer = buffer_of(program, id);
            (sizes, dtype) = (buffer.sizes.clone(), buffer.dtype);
            let len = sizes.iter().product::<usize>() * dtype.size() as usize;
            self.lend(rank, |lent| {
                lent.bytes(id, 0..len).map(|read| bytes.extend_from_slice(&read))
            })?;
        }
        sizes[0] *= mesh.dp;
        Ok(Values { dtype, dims: sizes, bytes })
    }

    fn run(
        &mut self,
        phase: Phase,
        batch: &Batch<'_>,
        scalars: Scalars,
    ) -> Result<StepReport, Failure> {
        let start = Instant::now();
        self.check_ids(phase, batch)?;
        let ranks = self.order(phase, batch, scalars, false)?;
        let seconds = start.elapsed().as_secs_f64();
        let stats = self.stats();
        let [loss_sum, count, _] = stats;
        let (grad_norm, is_skipped) = match phase {
            Phase::Step => (scalars.norm(stats), !scalars.allow_update(stats)),
            Phase::Evaluate | Phase::Entry(_) => (0.0, false),
        };
        Ok(StepReport { loss_sum, count, grad_norm, is_skipped, seconds, ranks })
    }

    /// Refuses ids that no table has a row for: kernels would take zeros for it.
    fn check_ids(&self, phase: Phase, batch: &Batch<'_>) -> Result<(), Diagnostic> {
        let columns = self.control.samples(phase).map_or(1, |samples| samples.seq);
        let ids = &self.classes.ids;
        let unknown = ids
            .unknown(ids::Feed::Tokens, batch.tokens, columns)
            .or_else(|| ids.unknown(ids::Feed::Labels, batch.labels, columns));
        unknown.map_or(Ok(()), |unknown| {
            let wrong = Diagnostic::error("E4035", ir::Span::default(), unknown.to_string());
            let note = format!("samples and places count from 0; a label of {} is none", IGNORED);
            Err(wrong.note(note).help("use the model's own tokeniser"))
        })
    }

    /// Loss sum, count and squared gradient norm, which are equal on all ranks; zeros if none.
    fn stats(&self) -> [f64; 3] {
        let program = self.classes.program_of(0);
        let index = program.buffers.iter().position(|b| b.contents == Contents::Stats);
        let Some(index) = index else { return [0.0; 3] };
        let buffer = &program.buffers[index];
        let bytes = 0..buffer.bytes as usize;
        // The first rank is in the process that leads.
        finite::stats(buffer.dtype, &self.bytes(0, BufferId(index as u32), bytes))
    }

    /// Overwrites a buffer of one rank from its start.
    pub fn write(&mut self, rank: usize, buffer: BufferId, bytes: &[u8]) {
        self.write_from(rank, buffer, 0, bytes);
    }

    /// Overwrites a buffer of one rank from a byte of it on.
    fn write_from(&mut self, rank: usize, buffer: BufferId, first: usize, bytes: &[u8]) {
        let Extent { arena, range } = extent(self.classes.program_of(rank), buffer);
        assert!(first + bytes.len() <= range.len(), "a buffer has room for what is written");
        if let Some(followers) = self.followers.as_ref().filter(|_| !self.here.contains(&rank)) {
            return followers.send(rank, &Command::Write(rank, buffer, first, bytes.to_vec()));
        }
        let range = range.start + first..range.start + first + bytes.len();
        let memory = &mut lock(self.seat(rank)).memory;
        memory.write(Extent { arena, range }, bytes).unwrap_or_else(|why| panic!("{why}"));
        memory.let_go();
    }

    /// Copies the first `tokens` tokens of a sample's KV caches, `[from, to]`.
    ///
    /// # Panics
    /// When there are no such samples, or no room for as many tokens.
    pub fn copy_cached(&mut self, [from, to]: [Cached; 2], tokens: usize) {
        if let Some(followers) = &self.followers {
            followers.send_all(&Command::Copy([from, to], tokens));
        }
        for (rank, seat) in self.here.clone().zip(&self.seats) {
            let program = self.classes.program_of(rank);
            let memory = &mut lock(seat).memory;
            let pairs = caches_of(program, from.samples).zip(caches_of(program, to.samples));
            for (source, target) in pairs {
                let ends = [(source, from), (target, to)].map(|(at, cached)| {
                    let buffer = buffer_of(program, at);
                    let Extent { arena, range } = extent(program, at);
                    let elements: usize = buffer.sizes[2..].iter().product();
                    let row = elements * buffer.dtype.size() as usize;
                    assert!(cached.sample < buffer.sizes[0] && tokens <= buffer.sizes[1]);
                    let start = range.start + cached.sample * row * buffer.sizes[1];
                    Extent { arena, range: start..start + row * tokens }
                });
                memory.copy(ends).unwrap_or_else(|why| panic!("{why}"));
                memory.let_go();
            }
        }
    }

    /// The bytes of a buffer of one rank.
    ///
    /// # Panics
    /// When the process of the rank is gone.
    pub fn read(&self, rank: usize, buffer: BufferId) -> Vec<u8> {
        let bytes = 0..buffer_of(self.classes.program_of(rank), buffer).bytes as usize;
        self.bytes(rank, buffer, bytes)
    }

    /// Some bytes of a buffer of one rank.
    fn bytes(&self, rank: usize, buffer: BufferId, bytes: Range<usize>) -> Vec<u8> {
        let bytes = self.lend(rank, |lent| lent.bytes(buffer, bytes).map(Cow::into_owned));
        bytes.unwrap_or_else(|why| panic!("{why}"))
    }

    /// Lends the memory of a rank, for reading without a copy.
    pub fn lend<T>(&self, rank: usize, work: impl FnOnce(&Lent<'_>) -> T) -> T {
        let program = self.classes.program_of(rank);
        if let Some(followers) = self.followers.as_ref().filter(|_| !self.here.contains(&rank)) {
            return work(&Lent { program, memory: Lender::Followers(followers, rank) });
        }
        let memory = &lock(self.seat(rank)).memory;
        let result = work(&Lent { program, memory: Lender::Here(memory) });
        memory.let_go();
        result
    }

    /// What was timed in the last step.
    pub fn trace(&self) -> Trace {
        let spans = |rank: usize| match &self.followers {
            Some(followers) if !self.here.contains(&rank) => followers.spans(rank),
            _ => lock(self.seat(rank)).spans.clone(),
        };
        let phase = self.control.last_phase();
        let name = |rank: usize, span: &Span| {
            let program = self.classes.program_of(rank);
            describe::span(program, &self.classes.kernels, steps(program, phase), span)
        };
        Trace::new((0..self.classes.mesh.ranks()).map(spans).collect(), name)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let all_answered = self.control.stop();
        for thread in self.threads.drain(..) {
            if all_answered {
                // A rank's panics are caught and reported by its step.
                let _ = thread.join();
            }
        }
    }
}

/// The KV caches of a sample, among those of the entries of a batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cached {
    /// Batch size of the entries on one rank.
    pub samples: usize,
    /// The sample.
    pub sample: usize,
}

/// The KV caches of the entries of a batch size, in the order of their numbers.
fn caches_of(program: &Program, samples: usize) -> impl Iterator<Item = BufferId> {
    let caches = program.buffers.iter().enumerate().filter_map(|(at, buffer)| {
        let Contents::Cache(number) = buffer.contents else { return None };
        (buffer.sizes[0] == samples).then_some((number, BufferId(at as u32)))
    });
    let mut caches: Vec<_> = caches.collect();
    caches.sort_unstable();
    caches.into_iter().map(|(_, id)| id)
}

/// Some bytes of a buffer, read by the host.
fn read<'a>(
    program: &Program,
    memory: &'a Memory,
    buffer: BufferId,
    bytes: Range<usize>,
) -> Cow<'a, [u8]> {
    let Extent { arena, range } = extent(program, buffer);
    assert!(bytes.end <= range.len(), "bytes {bytes:?} of {}", range.len());
    let range = range.start + bytes.start..range.start + bytes.end;
    memory.read(Extent { arena, range }).unwrap_or_else(|why| panic!("{why}"))
}

/// Where a buffer lies: in which arena, and which bytes of it.
fn extent(program: &Program, id: BufferId) -> Extent {
    let buffer = buffer_of(program, id);
    let place = program.place_of(buffer).expect("verified: buffers lie in arenas");
    let start = buffer.offset - program.arena(place).1;
    Extent { arena: place as usize, range: start as usize..(start + buffer.bytes) as usize }
}

/// The bytes that a buffer takes, counted through all arenas; one of the device's, in that.
fn range(buffer: &Buffer) -> std::ops::Range<usize> {
    buffer.offset as usize..(buffer.offset + buffer.bytes) as usize
}

fn rank_error(rank: usize, reason: String) -> Error {
    Error::Communication(CommError::Peer { rank, reason })
}

/// Locks, also after a panic followers: ranks catch theirs, and no invariant spans one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
