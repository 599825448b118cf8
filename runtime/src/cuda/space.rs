//! What a rank has of its GPU: the memory in which a program gives every buffer its place, and the
//! kernels that it launches there.

use std::ops::Range;

use kernels::Kernel;

use super::context::Failure;
use super::gpus::Gpus;
use super::launch::Launch;
use super::memory::Memory;

/// The memory of a rank on its GPU, with its launches.
#[derive(Debug)]
pub(crate) struct Space {
    memory: Memory,
    launches: Vec<Launch>,
    /// The workspace of launches whose program has none that is large enough: one that was compiled
    /// for another architecture.
    beside: Memory,
}

impl Space {
    /// Memory of exactly `bytes`, all zero, and all kernels, on the GPU of a rank.
    ///
    /// # Errors
    /// There is too little memory, or the kernels are not for this GPU.
    pub(crate) fn new(
        gpus: &Gpus,
        rank: usize,
        kernels: &[Kernel],
        bytes: usize,
    ) -> Result<Space, Failure> {
        let context = &gpus.contexts[rank];
        let launches = gpus.compiled.load(context, kernels)?;
        let mut memory = Memory::new(context, bytes)?;
        memory.fill(0)?;
        Ok(Space { memory, launches, beside: Memory::new(context, 0)? })
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.bytes()
    }

    /// Copies a range from the GPU, after all launches.
    pub(crate) fn read(&self, range: Range<usize>) -> Result<Vec<u8>, Failure> {
        let mut bytes = vec![0; range.len()];
        self.memory.read(range.start, &mut bytes)?;
        Ok(bytes)
    }

    /// The same, to bytes that are there.
    pub(crate) fn read_to(&self, first: usize, bytes: &mut [u8]) -> Result<(), Failure> {
        self.memory.read(first, bytes)
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

    /// Waits for all launches.
    ///
    /// # Errors
    /// One of them has failed.
    pub(crate) fn synchronize(&self) -> Result<(), Failure> {
        self.memory.synchronize()
    }
}
