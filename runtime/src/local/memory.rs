//! The end of a process that gets no memory: it says which limit was reached, and has an exit code.
//!
//! The standard library aborts where an allocation fails, with a signal that says nothing of what
//! to do. A program whose allocator is [`Memory`] ends by itself instead. What can go on without
//! the memory says so when it asks.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use kernels::Bytes;

/// The bytes of stack that a program has from its start on, so that it ends by no fault later.
/// Chosen: what a thread has.
const STACK_BYTES: usize = 2 << 20;

thread_local! {
    /// Whether whoever asks for memory can do without.
    static CAN_DO_WITHOUT: Cell<bool> = const { Cell::new(false) };
}

/// Asks for memory that the caller can do without.
pub(crate) fn or_none<T>(ask: impl FnOnce() -> Option<T>) -> Option<T> {
    let before = CAN_DO_WITHOUT.replace(true);
    let found = ask();
    CAN_DO_WITHOUT.set(before);
    found
}

/// The system's allocator. Where it has no memory, the process says so on stderr and ends.
pub struct Memory {
    /// The exit code of a process that gets no memory.
    pub code: i32,
}

// SAFETY: all is done by the system's allocator, with the caller's layouts and pointers.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller guarantees.
        self.checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller guarantees.
        self.checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: as the caller guarantees.
        self.checked(unsafe { System.realloc(start, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as the caller guarantees.
        unsafe { System.dealloc(start, layout) }
    }
}

impl Memory {
    fn checked(&self, start: *mut u8, bytes: usize) -> *mut u8 {
        // A thread that is about to end has no such variable any more.
        if start.is_null() && !CAN_DO_WITHOUT.try_with(Cell::get).unwrap_or(false) {
            self.end(bytes);
        }
        start
    }

    /// Tells and ends, without any allocation.
    fn end(&self, bytes: usize) -> ! {
        static IS_TOLD: AtomicBool = AtomicBool::new(false);
        if !IS_TOLD.swap(true, Ordering::AcqRel) {
            let mut text = Text::default();
            // What has no room is left out.
            let _ = writeln!(text, "error: the system gives no memory: {bytes} bytes were refused");
            let _ = reason(&mut text);
            text.print();
        } else {
            // Another thread is telling, and ends the process when it has.
            // SAFETY: only waits.
            unsafe { libc::sleep(1) };
        }
        // SAFETY: ends the process; nothing is run any more, as nothing could be that allocates.
        unsafe { libc::_exit(self.code) }
    }

    /// Takes the stack that the program may need, in the thread that calls it.
    ///
    /// # Errors
    /// The exit code where a limit leaves less; stderr has been told which.
    pub fn take_stack(&self) -> Result<(), i32> {
        let mut text = Text::default();
        let needed = Bytes(STACK_BYTES as u64);
        if let Some(bytes) = limit_of(libc::RLIMIT_STACK).filter(|b| *b <= STACK_BYTES as u64) {
            let bytes = Bytes(bytes);
            let _ = writeln!(text, "error: the stack has {bytes}, and {needed} are needed");
            let _ = writeln!(text, "  = help: raise the limit on the stack (`ulimit -s`)");
        } else if let Some(limit) = tightest().filter(|limit| limit.left() <= STACK_BYTES as u64) {
            let _ = writeln!(text, "error: {needed} of memory are needed to begin");
            let _ = limit.write(&mut text);
        } else {
            touch();
            return Ok(());
        }
        text.print();
        Err(self.code)
    }
}

/// Makes the stack as large as it has to be. The compiler touches every page of what a function
/// has on it.
#[inline(never)]
fn touch() {
    let bytes = [0_u8; STACK_BYTES];
    std::hint::black_box(&bytes);
}

/// A limit of the process: on what, what it is set with, bytes at most and bytes in use.
struct Limit {
    what: &'static str,
    flag: &'static str,
    bytes: u64,
    used: u64,
}

impl Limit {
    fn left(&self) -> u64 {
        self.bytes.saturating_sub(self.used)
    }

    fn write(&self, text: &mut Text) -> fmt::Result {
        let Limit { what, flag, bytes, used } = self;
        let (bytes, used) = (Bytes(*bytes), Bytes(*used));
        writeln!(text, "  = note: `ulimit {flag}` allows {bytes}, of which {used} are in use")?;
        writeln!(text, "  = help: raise the limit on {what} (`ulimit {flag}`), or ask for less")
    }
}

fn reason(text: &mut Text) -> fmt::Result {
    match tightest() {
        Some(limit) => limit.write(text),
        None => writeln!(text, "  = help: end other programs, or ask for less"),
    }
}

/// The limit of the process that leaves the least.
fn tightest() -> Option<Limit> {
    let [whole, data] = used();
    let rows = [
        (libc::RLIMIT_AS, "address space", "-v", whole),
        (libc::RLIMIT_DATA, "the size of data", "-d", data),
    ];
    let limit =
        |(resource, what, flag, used)| Some(Limit { what, flag, bytes: limit_of(resource)?, used });
    rows.into_iter().filter_map(limit).min_by_key(Limit::left)
}

/// What `getrlimit` calls a resource.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
type Resource = libc::c_int;

/// The bytes that a limit allows; none where there is no limit.
fn limit_of(resource: Resource) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is written to where there is room for one.
    let answer = unsafe { libc::getrlimit(resource, &mut limit) };
    (answer == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Bytes of address space and of data that the process has; 0 where the system does not tell.
fn used() -> [u64; 2] {
    let mut bytes = [0; 256];
    // SAFETY: the path ends with a zero, the file is read to where there is room, and closed.
    let read = unsafe {
        let file = libc::open(c"/proc/self/statm".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        let read = libc::read(file, bytes.as_mut_ptr().cast(), bytes.len());
        libc::close(file);
        read
    };
    let text = bytes.get(..read.try_into().unwrap_or(0)).unwrap_or_default();
    let pages = |at| -> Option<u64> {
        std::str::from_utf8(text).ok()?.split_ascii_whitespace().nth(at)?.parse().ok()
    };
    // SAFETY: asks for a number.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(0);
    [0, 5].map(|at| pages(at).unwrap_or(0).saturating_mul(page))
}

/// A text that is written without an allocation.
struct Text {
    bytes: [u8; 512],
    len: usize,
}

impl Default for Text {
    fn default() -> Text {
        Text { bytes: [0; 512], len: 0 }
    }
}

impl Text {
    fn print(&self) {
        // SAFETY: the bytes are there. Nobody is left to tell where stderr cannot be written.
        let _ = unsafe { libc::write(libc::STDERR_FILENO, self.bytes.as_ptr().cast(), self.len) };
    }
}

impl Write for Text {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let room = self.bytes.get_mut(self.len..self.len + part.len()).ok_or(fmt::Error)?;
        room.copy_from_slice(part.as_bytes());
        self.len += part.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_do_without_memory_gets_none() {
        let memory = Memory { code: 7 };
        let layout = Layout::from_size_align(isize::MAX as usize - 4096, 64).unwrap();
        // SAFETY: the layout has bytes.
        let asked = or_none(|| std::ptr::NonNull::new(unsafe { memory.alloc(layout) }));
        assert!(asked.is_none());
        assert!(!CAN_DO_WITHOUT.get(), "who asks afterwards cannot");
    }

    #[test]
    fn the_reason_names_the_limit_and_fits() {
        let limit = Limit { what: "address space", flag: "-v", bytes: 100 << 20, used: 99 << 20 };
        let mut text = Text::default();
        writeln!(text, "error: the system gives no memory: {} bytes were refused", usize::MAX)
            .unwrap();
        limit.write(&mut text).unwrap();
        let written = std::str::from_utf8(&text.bytes[..text.len]).unwrap();
        assert!(written.contains("`ulimit -v` allows 100.0 MiB, of which 99.0 MiB are in use"));
        assert!(used()[0] > 1 << 20 || !cfg!(target_os = "linux"), "this process has memory");
        let before = text.len;
        assert!(text.write_str(&"x".repeat(600)).is_err() && text.len == before);
    }
}
