//! The memory of a rank: an arena for each place where buffers lie, that of its device on a GPU
//! where it has one.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ir::plan::Place;
use ir::program::Program;
use kernels::Kernel;

use crate::cuda::context::Failure;
use crate::cuda::copies::Direction;
use crate::cuda::gpus::Gpus;
use crate::cuda::mailboxes::Mailboxes;
use crate::cuda::space::{Connection, Space};
use crate::error::Error;
use crate::local::arena::Arena;
use crate::local::mover::{Extent, Mover};

use super::{DEVICE, rank_error, spill};

/// The memory of a rank.
pub(super) struct Memory {
    /// By [`Place`]; that of the device is empty where there is a GPU.
    arenas: [Arena; 3],
    gpu: Option<Space>,
}

impl Memory {
    /// The memory that a program says; nothing is in it. `place` is that of the rank among those
    /// of this process.
    ///
    /// # Errors
    /// There is too little, or the GPU fails.
    pub(super) fn new(
        program: &Program,
        kernels: &[Kernel],
        (rank, place): (usize, usize),
        gpus: Option<&Gpus>,
        disk: Option<&Path>,
    ) -> Result<Memory, Error> {
        let in_memory = |bytes: u64| {
            let arena = usize::try_from(bytes).ok().and_then(Arena::new);
            arena.ok_or_else(|| rank_error(rank, format!("can't reserve {bytes} bytes of memory")))
        };
        let on_device = program.arena(Place::Device).0;
        let host = in_memory(program.arena(Place::Host).0)?;
        let disk = spill::arena(program.arena(Place::Disk).0, rank, disk)?;
        let space = |gpus| {
            let is_copied = !host.is_empty() || !disk.is_empty();
            let host = is_copied.then(|| host.kept());
            Space::new(gpus, place, kernels, on_device as usize, host)
        };
        let gpu = gpus.map(space).transpose();
        let failed = |why| Error::Gpu {
            reason: format!("rank {rank} has no {on_device} bytes on its GPU: {why}"),
            help: "end other programs there, or plan for less with `--memory`".to_owned(),
        };
        let gpu = gpu.map_err(failed)?;
        let on_device = if gpu.is_some() { 0 } else { on_device };
        Ok(Memory { arenas: [in_memory(on_device)?, host, disk], gpu })
    }

    /// The bytes that are reserved in a place.
    pub(super) fn len(&self, place: Place) -> usize {
        match &self.gpu {
            Some(gpu) if place == Place::Device => gpu.len(),
            _ => self.arenas[place as usize].len(),
        }
    }

    /// Where the device computes: its arena, or its GPU.
    pub(super) fn device(&mut self) -> Device<'_> {
        match &mut self.gpu {
            Some(gpu) => Device::Gpu(gpu),
            None => Device::Host(&mut self.arenas[DEVICE]),
        }
    }

    /// Reads a range: after all launches, where it lies on a GPU.
    pub(super) fn read(&self, extent: Extent) -> Result<Cow<'_, [u8]>, Failure> {
        match &self.gpu {
            Some(gpu) if extent.arena == DEVICE => gpu.read(extent.range).map(Cow::Owned),
            _ => Ok(Cow::Borrowed(self.arenas[extent.arena].bytes(extent.range))),
        }
    }

    /// Overwrites a range.
    pub(super) fn write(&mut self, extent: Extent, bytes: &[u8]) -> Result<(), Failure> {
        assert_eq!(extent.range.len(), bytes.len(), "what is written fills its place");
        match &mut self.gpu {
            Some(gpu) if extent.arena == DEVICE => gpu.write(extent.range.start, bytes),
            _ => {
                self.arenas[extent.arena].bytes_mut(extent.range).copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Copies a range to another one that is as long, and the same or apart from it.
    pub(super) fn copy(&mut self, [from, to]: [Extent; 2]) -> Result<(), Failure> {
        if from == to {
            return Ok(());
        }
        match &mut self.gpu {
            Some(gpu) if from.arena == DEVICE && to.arena == DEVICE => {
                gpu.copy(from.range, to.range.start)
            }
            _ => {
                let bytes = self.read(from)?.into_owned();
                self.write(to, &bytes)
            }
        }
    }

    /// Begins a copy between two places.
    pub(super) fn begin_move(
        &mut self,
        mover: &mut Mover,
        [from, to]: [Extent; 2],
    ) -> Result<(), Failure> {
        let Some(gpu) = &mut self.gpu else {
            mover.begin(&mut self.arenas, [from, to]);
            return Ok(());
        };
        let (direction, range, there) = match (from.arena, to.arena) {
            (DEVICE, _) => (Direction::ToHost, from.range.clone(), to.clone()),
            (_, DEVICE) => (Direction::ToDevice, to.range.clone(), from.clone()),
            _ => {
                self.finish_copies()?;
                mover.begin(&mut self.arenas, [from, to]);
                return Ok(());
            }
        };
        // Loans end in their order.
        mover.wait_for_all(&mut self.arenas);
        let lent = self.arenas[there.arena].lend(there.range, direction == Direction::ToHost);
        gpu.begin_copy(direction, range, (there.arena, lent), [from, to])
    }

    /// Waits for the copies from and to a range, or lets the GPU wait for them.
    pub(super) fn wait(&mut self, mover: &mut Mover, extent: &Extent) -> Result<(), Failure> {
        mover.wait(&mut self.arenas, extent);
        self.gpu.as_mut().map_or(Ok(()), |gpu| gpu.wait_for_copies(extent))
    }

    /// Waits for all copies and launches.
    pub(super) fn wait_for_all(&mut self, mover: Option<&mut Mover>) -> Result<(), Failure> {
        if let Some(mover) = mover {
            mover.wait_for_all(&mut self.arenas);
        }
        let launched = self.synchronize();
        let copied = self.finish_copies();
        launched.and(copied)
    }

    /// Waits for the copies from and to a GPU.
    fn finish_copies(&mut self) -> Result<(), Failure> {
        let Some(gpu) = &mut self.gpu else { return Ok(()) };
        for (arena, lent) in gpu.finish_copies()? {
            self.arenas[arena].take_back(lent);
            self.arenas[arena].let_go();
        }
        Ok(())
    }

    /// Waits for all launches and collectives.
    pub(super) fn synchronize(&mut self) -> Result<(), Failure> {
        self.gpu.as_mut().map_or(Ok(()), Space::synchronize)
    }

    /// Lets the GPU send to those of other ranks, and receive from them.
    pub(super) fn connect_stages(&mut self, mailboxes: Arc<Mailboxes>, rank: usize) {
        if let Some(gpu) = &mut self.gpu {
            gpu.connect_stages(mailboxes, rank);
        }
    }

    /// Connects the GPU with those of other ranks.
    pub(super) fn connect(&mut self, connection: Connection) {
        if let Some(gpu) = &mut self.gpu {
            gpu.connect(connection);
        }
    }

    /// Lets the system have the memory of what lies on a disk.
    pub(super) fn let_go(&self) {
        self.arenas.iter().for_each(Arena::let_go);
    }
}

/// Where a rank computes, for the length of an instruction.
pub(super) enum Device<'a> {
    /// In memory of the host.
    Host(&'a mut Arena),
    /// On a GPU.
    Gpu(&'a mut Space),
}

impl Device<'_> {
    /// Writes a range, of which `fill` changes every byte.
    pub(super) fn fill<T>(
        &mut self,
        range: Range<usize>,
        fill: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T, Failure> {
        match self {
            Device::Host(arena) => Ok(fill(arena.bytes_mut(range))),
            Device::Gpu(gpu) => {
                let mut bytes = vec![0; range.len()];
                let done = fill(&mut bytes);
                gpu.synchronize()?;
                gpu.write(range.start, &bytes)?;
                Ok(done)
            }
        }
    }

    /// Reads a range.
    pub(super) fn read<T>(
        &mut self,
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, Failure> {
        match self {
            Device::Host(arena) => Ok(read(arena.bytes(range))),
            Device::Gpu(gpu) => {
                gpu.synchronize()?;
                Ok(read(&gpu.read(range)?))
            }
        }
    }

    /// Changes a range.
    pub(super) fn change<T>(
        &mut self,
        range: Range<usize>,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T, Failure> {
        match self {
            Device::Host(arena) => Ok(change(arena.bytes_mut(range))),
            Device::Gpu(gpu) => {
                gpu.synchronize()?;
                let mut bytes = gpu.read(range.clone())?;
                let done = change(&mut bytes);
                gpu.write(range.start, &bytes)?;
                Ok(done)
            }
        }
    }

    /// Writes a range from others that have nothing in common with it. Every byte is written.
    pub(super) fn split<const N: usize, T>(
        &mut self,
        sources: [Range<usize>; N],
        target: Range<usize>,
        work: impl FnOnce([&[u8]; N], &mut [u8]) -> T,
    ) -> Result<T, Failure> {
        match self {
            Device::Host(arena) => {
                let (sources, target) = arena.split(sources, target);
                Ok(work(sources, target))
            }
            Device::Gpu(gpu) => {
                gpu.synchronize()?;
                let mut read = [const { Vec::new() }; N];
                for (bytes, range) in read.iter_mut().zip(sources) {
                    *bytes = gpu.read(range)?;
                }
                // What a collective leaves alone keeps its bytes.
                let mut written = gpu.read(target.clone())?;
                let done = work(read.each_ref().map(Vec::as_slice), &mut written);
                gpu.write(target.start, &written)?;
                Ok(done)
            }
        }
    }
}
