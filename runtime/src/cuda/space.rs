//! What a rank has of its GPU: the memory in which a program gives every buffer its place, and the
//! kernels that it launches there.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ir::DType;
use kernels::Kernel;

use super::context::Failure;
use super::copies::{Copies, Direction};
use super::gpus::Gpus;
use super::launch::Launch;
use super::mailboxes::Mailboxes;
use super::memory::Memory;
use super::nccl::{Collective, Nccl};
use crate::communicator::{CommError, Group};
use crate::local::arena::Lent;
use crate::local::mover::Extent;

/// How often it is asked at once whether a GPU is idle, before the thread sleeps in between.
const SPINS: usize = 1000;
/// How long it sleeps.
const PAUSE: Duration = Duration::from_micros(50);

/// The memory of a rank on its GPU, with its launches.
pub(crate) struct Space {
    memory: Memory,
    launches: Vec<Launch>,
    /// The workspace of launches whose program has none that is large enough: one that was compiled
    /// for another architecture.
    beside: Memory,
    /// Copies from and to the host's memory; none where a program has no other.
    copies: Option<Copies>,
    /// Messages to and from other ranks, and which rank this is.
    mailboxes: Option<(Arc<Mailboxes>, usize)>,
    /// What connects it with the GPUs of other ranks.
    connection: Option<Connection>,
}

/// Collectives with the GPUs of other ranks.
pub(crate) struct Connection {
    pub(crate) nccl: Nccl,
    /// Whether another rank has failed, which would be waited for in vain.
    pub(crate) watch: Box<dyn Fn() -> Result<(), CommError> + Send>,
    /// How long the GPU may be waited for.
    pub(crate) deadline: Duration,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("nccl", &self.nccl).finish_non_exhaustive()
    }
}

impl Space {
    /// Memory of exactly `bytes`, all zero, and all kernels, on the GPU of a rank. Where it is
    /// copied from and to other memory, `host` is what of that may be locked: not what lies on a
    /// disk.
    ///
    /// # Errors
    /// There is too little memory, or the kernels are not for this GPU.
    pub(crate) fn new(
        gpus: &Gpus,
        rank: usize,
        kernels: &[Kernel],
        bytes: usize,
        host: Option<Lent>,
    ) -> Result<Space, Failure> {
        let context = &gpus.contexts[rank];
        let launches = gpus.compiled.load(context, kernels)?;
        let mut memory = Memory::new(context, bytes)?;
        memory.fill(0)?;
        let copies = host.map(|host| Copies::new(context, host)).transpose()?;
        let beside = Memory::new(context, 0)?;
        Ok(Space { memory, launches, beside, copies, mailboxes: None, connection: None })
    }

    /// Lets it send to other ranks, and receive from them.
    pub(crate) fn connect_stages(&mut self, mailboxes: Arc<Mailboxes>, rank: usize) {
        self.mailboxes = Some((mailboxes, rank));
    }

    /// Sends a range to a rank, after all launches that were queued. The receiver is to be told.
    ///
    /// # Errors
    /// The copy cannot be queued.
    pub(crate) fn send(&self, to: usize, range: Range<usize>) -> Result<(), Failure> {
        let (mailboxes, rank) = self.mailboxes();
        mailboxes.send(rank, to, &self.memory.piece(range))
    }

    /// Receives a range from a rank, which has told that it is sent.
    ///
    /// # Errors
    /// The copy cannot be queued.
    pub(crate) fn receive(&mut self, from: usize, range: Range<usize>) -> Result<(), Failure> {
        let (mailboxes, rank) = self.mailboxes();
        mailboxes.receive(from, rank, &self.memory.piece(range))
    }

    fn mailboxes(&self) -> (&Mailboxes, usize) {
        let Some((mailboxes, rank)) = &self.mailboxes else {
            unreachable!("programs with several stages have mailboxes");
        };
        (mailboxes, *rank)
    }

    /// Connects it with the GPUs of other ranks.
    pub(crate) fn connect(&mut self, connection: Connection) {
        self.connection = Some(connection);
    }

    /// Whether it is connected with those of a group.
    pub(crate) fn is_connected(&self, group: &Group) -> bool {
        self.connection.as_ref().is_some_and(|it| it.nccl.has_group(group))
    }

    /// Queues a collective of ranges.
    ///
    /// # Errors
    /// It cannot be started.
    ///
    /// # Panics
    /// The space is not connected, the rank not in the group, or a range is too short.
    pub(crate) fn exchange(
        &mut self,
        group: &Group,
        collective: &Collective<'_>,
        dtype: DType,
        ranges: [Range<usize>; 2],
    ) -> Result<(), Failure> {
        let Some(connection) = &mut self.connection else {
            unreachable!("asked before: it is connected");
        };
        let pieces = ranges.map(|range| self.memory.piece(range));
        connection.nccl.start(group, collective, dtype, pieces)
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.bytes()
    }

    /// Begins a copy of a range from or to what is lent of an arena, after all launches that were
    /// queued; `ends` are what it copies from and to.
    ///
    /// # Errors
    /// It cannot be queued.
    pub(crate) fn begin_copy(
        &mut self,
        direction: Direction,
        range: Range<usize>,
        host: (usize, Lent),
        ends: [Extent; 2],
    ) -> Result<(), Failure> {
        let Some(copies) = &mut self.copies else {
            unreachable!("there is memory of the host to copy to");
        };
        copies.begin(direction, &self.memory.piece(range), host, ends)
    }

    /// Lets launches that are queued from now on wait for the copies from and to a range.
    ///
    /// # Errors
    /// The wait cannot be queued.
    pub(crate) fn wait_for_copies(&mut self, extent: &Extent) -> Result<(), Failure> {
        self.copies.as_mut().map_or(Ok(()), |copies| copies.wait(extent))
    }

    /// Waits for all copies, and returns what they have of which arena.
    ///
    /// # Errors
    /// One of them has failed.
    pub(crate) fn finish_copies(&mut self) -> Result<Vec<(usize, Lent)>, Failure> {
        self.copies.as_mut().map_or(Ok(Vec::new()), Copies::finish)
    }

    /// Copies a range from the GPU, after all launches.
    pub(crate) fn read(&self, range: Range<usize>) -> Result<Vec<u8>, Failure> {
        let mut bytes = vec![0; range.len()];
        self.memory.read(range.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies bytes to the GPU, after all launches.
    pub(crate) fn write(&mut self, first: usize, bytes: &[u8]) -> Result<(), Failure> {
        self.memory.write(first, bytes)
    }

    /// Copies a range to another place, after all launches.
    pub(crate) fn copy(&mut self, from: Range<usize>, to: usize) -> Result<(), Failure> {
        self.memory.copy_within(from, to)
    }

    /// Queues a launch of a kernel on ranges.
    ///
    /// # Errors
    /// It cannot be started.
    ///
    /// # Panics
    /// A range is not in the memory, or is shorter than the kernel says.
    pub(crate) fn launch(
        &mut self,
        kernel: usize,
        scalars: &[i64],
        [inputs, outputs]: [&[Range<usize>]; 2],
        workspace: Option<Range<usize>>,
    ) -> Result<(), Failure> {
        let launch = &self.launches[kernel];
        let wanted = launch.workspace_bytes();
        let own = workspace.filter(|range| range.len() >= wanted);
        if own.is_none() && self.beside.bytes() < wanted {
            self.beside = self.memory.beside(wanted)?;
        }
        let own = own.map_or(self.beside.whole(), |range| self.memory.piece(range));
        let pieces = |ranges: &[Range<usize>]| -> Vec<_> {
            ranges.iter().map(|range| self.memory.piece(range.clone())).collect()
        };
        launch.start(scalars, &pieces(inputs), &pieces(outputs), &own)
    }

    /// Waits for all launches and collectives.
    ///
    /// # Errors
    /// One of them has failed, or a rank that takes part in one.
    pub(crate) fn synchronize(&mut self) -> Result<(), Failure> {
        let waited = match &self.connection {
            Some(connection) => wait(&self.memory, connection),
            None => self.memory.synchronize(),
        };
        if waited.is_err()
            && let Some(connection) = &mut self.connection
        {
            connection.nccl.abort();
        }
        waited
    }
}

/// Waits until a GPU is idle, or a rank has failed that it waits for.
fn wait(memory: &Memory, Connection { watch, deadline, .. }: &Connection) -> Result<(), Failure> {
    let (start, mut spins) = (Instant::now(), 0);
    while !memory.is_idle()? {
        spins += 1;
        if spins < SPINS {
            std::thread::yield_now();
            continue;
        }
        watch().map_err(|error| Failure::new("a collective", error.to_string()))?;
        if start.elapsed() > *deadline {
            let told = format!("it has not ended after {} s", deadline.as_secs_f64());
            return Err(Failure::new("a launch or a collective", told));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
