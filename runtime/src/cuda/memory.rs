//! Memory of a GPU, and pieces of it.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;

use super::context::{Context, Failure, failure};

/// Memory of a GPU.
#[derive(Debug)]
pub struct Memory {
    start: CUdeviceptr,
    bytes: usize,
    context: Arc<Context>,
}

/// Bytes of a memory.
#[derive(Clone, Debug)]
pub struct Piece<'a> {
    memory: &'a Memory,
    range: Range<usize>,
}

impl Piece<'_> {
    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// A part of these bytes.
    ///
    /// # Panics
    /// There are fewer.
    pub(super) fn part(&self, range: Range<usize>) -> Self {
        let (from, to) = (self.range.start + range.start, self.range.start + range.end);
        assert!(to <= self.range.end, "bytes {range:?} of {}", self.len());
        Piece { memory: self.memory, range: from..to }
    }

    /// Queues a copy of as many bytes of the same GPU to these.
    ///
    /// # Errors
    /// An earlier launch has failed.
    ///
    /// # Panics
    /// They are not as many.
    pub(super) fn copy_from(&self, from: &Piece<'_>) -> Result<(), Failure> {
        assert_eq!(self.len(), from.len(), "a copy is as long as what is copied");
        self.memory.context.bind()?;
        let (to, from, stream) = (self.address(), from.address(), std::ptr::null_mut());
        // SAFETY: both have as many bytes, and stay until the driver has freed them, which waits.
        unsafe { result::memcpy_dtod_async(to, from, self.len(), stream) }
            .map_err(failure("cuMemcpyDtoDAsync"))
    }

    /// Where it starts.
    pub(super) fn address(&self) -> CUdeviceptr {
        self.memory.start + self.range.start as CUdeviceptr
    }
}

impl Memory {
    /// Memory of a GPU, with anything in it.
    ///
    /// # Errors
    /// There is too little of it.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Memory, Failure> {
        context.bind()?;
        // SAFETY: the memory is freed once, when it is dropped.
        let start = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(failure("cuMemAlloc"))?;
        Ok(Memory { start, bytes, context: Arc::clone(context) })
    }

    /// Other memory of the same GPU.
    ///
    /// # Errors
    /// There is too little of it.
    pub(super) fn beside(&self, bytes: usize) -> Result<Memory, Failure> {
        Memory::new(&self.context, bytes)
    }

    /// Waits for all launches on its GPU.
    ///
    /// # Errors
    /// One of them has failed.
    pub(super) fn synchronize(&self) -> Result<(), Failure> {
        self.context.synchronize()
    }

    /// Whether all launches on its GPU have ended.
    ///
    /// # Errors
    /// One of them has failed.
    pub(super) fn is_idle(&self) -> Result<bool, Failure> {
        self.context.is_idle()
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// All of it.
    pub fn whole(&self) -> Piece<'_> {
        self.piece(0..self.bytes)
    }

    /// Some of its bytes.
    ///
    /// # Panics
    /// It has fewer.
    pub fn piece(&self, range: Range<usize>) -> Piece<'_> {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {}", self.bytes);
        Piece { memory: self, range }
    }

    /// Copies bytes to a place in it, after all launches that were queued.
    ///
    /// # Errors
    /// An earlier launch has failed.
    ///
    /// # Panics
    /// There are more than it has.
    pub fn write(&mut self, first: usize, bytes: &[u8]) -> Result<(), Failure> {
        let to = self.piece(first..first + bytes.len()).address();
        self.context.bind()?;
        // SAFETY: the memory has room for the bytes.
        unsafe { result::memcpy_htod_sync(to, bytes) }.map_err(failure("cuMemcpyHtoD"))
    }

    /// Copies bytes from a place in it, after all launches that were queued.
    ///
    /// # Errors
    /// A launch has failed.
    ///
    /// # Panics
    /// It has fewer.
    pub fn read(&self, first: usize, bytes: &mut [u8]) -> Result<(), Failure> {
        let from = self.piece(first..first + bytes.len()).address();
        self.context.bind()?;
        // SAFETY: the memory has as many bytes, and any bytes are valid.
        unsafe { result::memcpy_dtoh_sync(bytes, from) }.map_err(failure("cuMemcpyDtoH"))
    }

    /// Sets each of its bytes.
    ///
    /// # Errors
    /// An earlier launch has failed.
    pub fn fill(&mut self, byte: u8) -> Result<(), Failure> {
        self.context.bind()?;
        // SAFETY: the memory has as many bytes.
        unsafe { result::memset_d8_sync(self.start, byte, self.bytes) }
            .map_err(failure("cuMemsetD8"))
    }

    /// Queues a copy of all bytes of other memory to its start.
    ///
    /// # Errors
    /// An earlier launch has failed.
    ///
    /// # Panics
    /// There are more than it has.
    pub fn copy(&mut self, from: &Memory) -> Result<(), Failure> {
        assert!(from.bytes <= self.bytes, "{} bytes into {}", from.bytes, self.bytes);
        self.context.bind()?;
        // SAFETY: both have as many bytes, and stay until the driver has freed them, which waits.
        unsafe {
            result::memcpy_dtod_async(self.start, from.start, from.bytes, std::ptr::null_mut())
        }
        .map_err(failure("cuMemcpyDtoDAsync"))
    }

    /// Queues a copy of some of its bytes to others, which they have nothing in common with.
    ///
    /// # Errors
    /// An earlier launch has failed.
    ///
    /// # Panics
    /// It does not have these bytes, or some of them are both.
    pub fn copy_within(&mut self, from: Range<usize>, to: usize) -> Result<(), Failure> {
        let len = from.len();
        assert!(from.end <= to || to + len <= from.start, "{from:?} and {to} lie apart");
        let ends = [self.piece(to..to + len), self.piece(from)].map(|piece| piece.address());
        self.context.bind()?;
        // SAFETY: both are bytes of the memory, which stays until the driver has freed it.
        unsafe { result::memcpy_dtod_async(ends[0], ends[1], len, std::ptr::null_mut()) }
            .map_err(failure("cuMemcpyDtoDAsync"))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: it was allocated once; the driver waits for launches that use it.
        let _ = unsafe { result::free_sync(self.start) };
    }
}
