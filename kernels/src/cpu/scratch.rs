//! Memory that threads reuse from launch to launch.

/// A cache line; vectors of any set are aligned in it.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

/// Bytes that `len` elements of `T` take in a buffer.
pub(super) const fn lines_of<T>(len: usize) -> usize {
    (len * size_of::<T>()).div_ceil(64) * 64
}

/// A buffer that only grows.
#[derive(Default)]
pub(super) struct Buffer {
    lines: Vec<Line>,
}

/// What is left of a buffer during a task.
pub(super) struct Bump {
    next: *mut u8,
    left: usize,
}

impl Buffer {
    /// The first `bytes` of the buffer, which grows if it must. They live until the next call.
    pub(super) fn bump(&mut self, bytes: usize) -> Bump {
        let lines = bytes.div_ceil(64);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line { _bytes: [0; 64] });
        }
        Bump { next: self.lines.as_mut_ptr().cast(), left: lines * 64 }
    }
}

impl Bump {
    /// Takes room for `len` elements, which hold anything.
    pub(super) fn take<T>(&mut self, len: usize) -> *mut T {
        let bytes = lines_of::<T>(len);
        assert!(bytes <= self.left, "a task takes no more scratch than its kernel declares");
        let start = self.next;
        self.left -= bytes;
        self.next = start.wrapping_add(bytes);
        start.cast()
    }

    /// What is left, for work that ends before this takes more.
    pub(super) fn rest(&self) -> Bump {
        Bump { next: self.next, left: self.left }
    }

    /// Takes room for `len` zeros of a number type.
    pub(super) fn zeros<T: super::vector::Scalar>(&mut self, len: usize) -> *mut T {
        let start = self.take::<T>(len);
        // SAFETY: `take` gave room for `len` elements.
        unsafe { std::slice::from_raw_parts_mut(start, len) }.fill(T::ZERO);
        start
    }
}
