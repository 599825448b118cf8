//! The memory of one rank: one allocation, in which a program gives every buffer its place; or a
//! file on a disk, mapped, for what lies there.
//!
//! All access is by byte ranges, which are checked against the arena and, where one is written,
//! against each other and against what is being copied. What a program gets wrong therefore panics,
//! and corrupts nothing.

use std::alloc::{Layout, alloc, dealloc};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use kernels::arguments::Argument;
use kernels::cpu::{Prepared, View, ViewMut};
use memmap2::MmapMut;

use super::memory::or_none;
use crate::device::Device;

/// The alignment of an arena, in bytes: a page, so that ranks share none.
const PAGE: usize = 4096;
/// A huge page of x86-64 and of most other systems, in bytes. An arena that has room for several
/// begins at one: streams over it then miss the table of pages 512 times less often.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed memory of a fixed size, aligned to a page.
pub struct Arena {
    start: NonNull<u8>,
    len: usize,
    /// What keeps the memory; a copy of some of it keeps it, too.
    memory: Arc<Memory>,
    /// What is being copied, in the order in which that began.
    loans: Vec<Loan>,
}

/// What an arena's bytes are in.
enum Memory {
    Allocated(NonNull<u8>, Layout),
    Mapped { _map: MmapMut },
}

// SAFETY: it owns its memory, as a boxed slice of bytes does.
unsafe impl Send for Memory {}
// SAFETY: through a shared reference its bytes are used by arenas and loans alone.
unsafe impl Sync for Memory {}

// SAFETY: an arena owns its memory, as a boxed slice of bytes does.
unsafe impl Send for Arena {}
// SAFETY: through a shared reference it is only read.
unsafe impl Sync for Arena {}

/// A range that is being copied.
struct Loan {
    range: Range<usize>,
    is_written: bool,
}

/// A range of an arena that is lent to a copy. Until it is given back, nothing else writes it or,
/// where the copy does, reads it.
pub(crate) struct Lent {
    start: *mut u8,
    len: usize,
    memory: Arc<Memory>,
}

// SAFETY: it is used by one thread at a time, as a slice of bytes is.
unsafe impl Send for Lent {}

impl Lent {
    /// Where the bytes start, and how many there are.
    pub(crate) fn bytes(&self) -> (*mut u8, usize) {
        (self.start, self.len)
    }

    /// Copies these bytes over those of another loan.
    ///
    /// # Safety
    /// `to` was lent to be written, no other loan of its bytes or of these is used meanwhile, and
    /// neither is given back before.
    pub(super) unsafe fn copy_to(&self, to: &Lent) {
        assert_eq!(self.len, to.len, "a copy is as long as what is copied");
        // SAFETY: both ranges lie in memory that the loans keep; arenas let nobody else use them,
        // and the caller no other loan. Two ranges of one arena may meet.
        unsafe { std::ptr::copy(self.start, to.start, self.len) };
    }

    /// Lets the system have the memory of what lies on a disk.
    pub(super) fn let_go(&self) {
        self.memory.let_go(self.start, self.len);
    }
}

impl Memory {
    /// Lets the system have the memory of whole pages of a file, which keep their bytes there: what
    /// lies on a disk takes none of the process.
    fn let_go(&self, start: *mut u8, len: usize) {
        #[cfg(target_os = "linux")]
        if let Memory::Mapped { .. } = *self {
            let before = start.align_offset(PAGE);
            let whole = len.saturating_sub(before) / PAGE * PAGE;
            if whole > 0 {
                // SAFETY: the pages lie in a shared map of a file, which is there as long as this;
                // whoever reads them next has them from the file.
                unsafe { libc::madvise(start.add(before).cast(), whole, libc::MADV_DONTNEED) };
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (self, start, len);
    }
}

impl Arena {
    /// An arena of exactly `bytes`, all zero; none if the system has no such memory.
    pub fn new(bytes: usize) -> Option<Arena> {
        let align = if bytes >= 4 * HUGE_PAGE { HUGE_PAGE } else { PAGE };
        let layout = Layout::from_size_align(bytes, align).ok()?;
        if bytes == 0 {
            return Some(Arena::of(NonNull::dangling(), layout));
        }
        // SAFETY: the layout has bytes.
        let start = or_none(|| NonNull::new(unsafe { alloc(layout) }))?;
        // Before the pages are touched, for their first use decides their size.
        ask_for_huge_pages(start, layout);
        // SAFETY: the memory has these bytes and belongs to nobody else.
        unsafe { start.write_bytes(0, bytes) };
        Some(Arena::of(start, layout))
    }

    fn of(start: NonNull<u8>, layout: Layout) -> Arena {
        let memory = Arc::new(Memory::Allocated(start, layout));
        Arena { start, len: layout.size(), memory, loans: Vec::new() }
    }

    /// An arena of the bytes of a file, which nobody else has.
    ///
    /// # Errors
    /// The system does not map it.
    pub fn of_file(file: &File) -> io::Result<Arena> {
        // SAFETY: nobody else has the file, so that its bytes change through this map alone, and it
        // keeps its length.
        let mut map = unsafe { MmapMut::map_mut(file)? };
        let (start, len) = (NonNull::from(&mut map[..]).cast::<u8>(), map.len());
        Ok(Arena { start, len, memory: Arc::new(Memory::Mapped { _map: map }), loans: Vec::new() })
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lets the system have the memory of what lies on a disk: it is read from there next time.
    pub fn let_go(&self) {
        self.memory.let_go(self.start.as_ptr(), self.len);
    }

    /// Reads a range.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        let start = self.at(&range);
        self.check_read(&range);
        // SAFETY: the range is in the arena, whose bytes are initialised and borrowed with it.
        unsafe { slice::from_raw_parts(start, range.len()) }
    }

    /// Writes a range.
    pub fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let start = self.at(&range);
        self.check_written(&range);
        // SAFETY: as above; the arena is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(start, range.len()) }
    }

    /// Reads ranges and writes another that has nothing in common with them.
    pub fn split<const N: usize>(
        &mut self,
        sources: [Range<usize>; N],
        target: Range<usize>,
    ) -> ([&[u8]; N], &mut [u8]) {
        let to = self.at(&target);
        self.check_written(&target);
        let read = sources.map(|source| {
            assert!(!overlaps(&source, &target), "what is read at once with a write lies apart");
            let from = self.at(&source);
            self.check_read(&source);
            // SAFETY: the range is in the arena, which is borrowed exclusively, and is not written.
            unsafe { slice::from_raw_parts(from, source.len()) }
        });
        // SAFETY: as above; it has nothing in common with those that are read.
        (read, unsafe { slice::from_raw_parts_mut(to, target.len()) })
    }

    /// Runs a kernel on ranges.
    ///
    /// **Constraints**, asserted: ranges start at elements and are as long as the kernel says;
    /// outputs are disjoint; an output meets an input only if the kernel computes that one in
    /// place, and then both start together; the workspace lies apart from all.
    pub fn launch(
        &mut self,
        device: &mut dyn Device,
        prepared: &mut Prepared,
        [inputs, outputs]: [&[Range<usize>]; 2],
        workspace: Option<Range<usize>>,
    ) {
        let in_place = prepared.in_place();
        for (index, output) in outputs.iter().enumerate() {
            let is_apart = |(at, input): (usize, &Range<usize>)| {
                !overlaps(input, output)
                    || input.start == output.start && in_place.contains(&(at, index))
            };
            let are_apart = inputs.iter().enumerate().all(is_apart);
            assert!(are_apart, "outputs lie apart from inputs, or in place");
            let others = &outputs[index + 1..];
            assert!(!others.iter().any(|other| overlaps(other, output)), "outputs lie apart");
        }
        let is_apart = |of: &Range<usize>| {
            let mut others = inputs.iter().chain(outputs);
            others.all(|other| !overlaps(other, of))
        };
        assert!(workspace.as_ref().is_none_or(is_apart), "a workspace lies apart");
        inputs.iter().for_each(|range| self.check_read(range));
        outputs.iter().chain(&workspace).for_each(|range| self.check_written(range));
        let (reads, writes) = (prepared.inputs(), prepared.outputs());
        let read = |(index, range): (usize, &Range<usize>)| {
            let start = self.aligned(range, reads.get(index));
            // SAFETY: the range is in the arena, which is borrowed exclusively for the launch;
            // only the launch's outputs write, and meet this range only as the kernel allows.
            unsafe { View::from_raw(start, range.len()) }
        };
        let write = |(index, range): (usize, &Range<usize>)| {
            let start = self.aligned(range, writes.get(index));
            // SAFETY: as above, and outputs are disjoint.
            unsafe { ViewMut::from_raw(start, range.len()) }
        };
        let inputs: Vec<View<'_>> = inputs.iter().enumerate().map(read).collect();
        let outputs: Vec<ViewMut<'_>> = outputs.iter().enumerate().map(write).collect();
        let workspace = workspace.map(|range| {
            let start = self.aligned(&range, None);
            // SAFETY: as above, and it lies apart from all of them.
            unsafe { ViewMut::from_raw(start, range.len()) }
        });
        device.launch(prepared, &inputs, &outputs, workspace.as_ref());
    }

    /// All bytes, for whoever needs to know where they are; nothing is lent.
    pub(crate) fn kept(&self) -> Lent {
        Lent { start: self.start.as_ptr(), len: self.len, memory: Arc::clone(&self.memory) }
    }

    /// Lends a range to a copy that reads or writes it.
    pub(crate) fn lend(&mut self, range: Range<usize>, is_written: bool) -> Lent {
        let (start, len) = (self.at(&range), range.len());
        self.loans.push(Loan { range, is_written });
        Lent { start, len, memory: Arc::clone(&self.memory) }
    }

    /// Takes back the loan that is the oldest: copies end in the order in which they began.
    pub(crate) fn take_back(&mut self, lent: Lent) {
        assert!(!self.loans.is_empty(), "what is given back was lent");
        self.loans.remove(0);
        drop(lent);
    }

    fn check_read(&self, range: &Range<usize>) {
        let is_apart = |loan: &Loan| !loan.is_written || !overlaps(&loan.range, range);
        assert!(self.loans.iter().all(is_apart), "nothing reads what a copy is writing");
    }

    fn check_written(&self, range: &Range<usize>) {
        let is_apart = |loan: &Loan| !overlaps(&loan.range, range);
        assert!(self.loans.iter().all(is_apart), "nothing writes what is being copied");
    }

    /// The address of a range that lies in the arena.
    fn at(&self, range: &Range<usize>) -> *mut u8 {
        let len = self.len();
        assert!(
            range.start <= range.end && range.end <= len,
            "bytes {}..{} lie in an arena of {len}",
            range.start,
            range.end
        );
        // SAFETY: the start is at most the end of the memory.
        unsafe { self.start.as_ptr().add(range.start) }
    }

    /// As `at`, for a range whose elements a kernel uses: it starts at one. Whole buffers are
    /// aligned to cache lines, views of them need not be.
    fn aligned(&self, range: &Range<usize>, argument: Option<&Argument>) -> *mut u8 {
        let size = argument.map_or(1, |argument| argument.dtype.size() as usize);
        assert!(range.start.is_multiple_of(size), "views are aligned to their elements");
        self.at(range)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Memory::Allocated(start, layout) = self else { return };
        if layout.size() > 0 {
            // SAFETY: allocated with this layout, and not used any more.
            unsafe { dealloc(start.as_ptr(), *layout) }
        }
    }
}

/// Asks the system for huge pages where an arena begins at one; it may not have any.
fn ask_for_huge_pages(start: NonNull<u8>, layout: Layout) {
    #[cfg(target_os = "linux")]
    if layout.align() == HUGE_PAGE {
        let whole = layout.size() / HUGE_PAGE * HUGE_PAGE;
        // SAFETY: the pages are whole and within the allocation, and the advice changes no byte.
        let _ = unsafe { libc::madvise(start.as_ptr().cast(), whole, libc::MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, layout);
}

fn overlaps(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::DType;
    use kernels::{Kernel, Product};

    #[test]
    fn memory_is_zeroed_aligned_and_exact() {
        let mut arena = Arena::new(5000).unwrap();
        assert_eq!(arena.len(), 5000);
        assert!(arena.bytes(0..5000).iter().all(|&byte| byte == 0));
        assert!(arena.bytes(0..0).as_ptr().addr().is_multiple_of(PAGE));
        arena.bytes_mut(4999..5000)[0] = 7;
        let ([from], to) = arena.split([4999..5000], 0..1);
        to.copy_from_slice(from);
        assert_eq!(arena.bytes(0..2), [7, 0]);
        assert!(Arena::new(0).unwrap().is_empty());
        let large = Arena::new(4 * HUGE_PAGE + 3).unwrap();
        assert!(large.bytes(0..1).as_ptr().addr().is_multiple_of(HUGE_PAGE));
        assert!(large.bytes(0..large.len()).iter().all(|&byte| byte == 0));
        assert!(Arena::new(usize::MAX).is_none());
    }

    #[test]
    fn ranges_that_no_program_has_are_refused() {
        let refused = |work: &dyn Fn(&mut Arena)| {
            let mut arena = Arena::new(1024).unwrap();
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&mut arena))).is_err()
        };
        assert!(refused(&|arena| _ = arena.bytes(1000..1025)));
        assert!(refused(&|arena| _ = arena.split([0..65], 64..128)));
        let launch_with = |arena: &mut Arena, inputs: [usize; 2], output: usize, workspace| {
            let kernel = Kernel::Product(Product::matrix(2, 2, 2, DType::F32));
            let range = |start: usize| start..start + 16;
            arena.launch(
                &mut kernels::cpu::Cpu::new(1),
                &mut Prepared::new(&kernel, &[]),
                [&inputs.map(range), &[range(output)]],
                workspace,
            );
        };
        let launch = |arena: &mut Arena, inputs: [usize; 2], output: usize| {
            launch_with(arena, inputs, output, None);
        };
        assert!(refused(&|arena| launch_with(arena, [0, 64], 128, Some(136..200))));
        assert!(refused(&|arena| launch_with(arena, [0, 64], 128, Some(8..64))));
        assert!(!refused(&|arena| launch_with(arena, [0, 64], 128, Some(192..256))));
        assert!(refused(&|arena| launch(arena, [0, 64], 64)));
        assert!(refused(&|arena| launch(arena, [0, 66], 128)));
        assert!(!refused(&|arena| launch(arena, [0, 68], 128)));
        assert!(!refused(&|arena| launch(arena, [0, 0], 64)));
    }
}
