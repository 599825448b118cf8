//! Arguments of a launch: untyped windows of host memory.

use std::marker::PhantomData;

mod sealed {
    pub trait Sealed {}
}

/// Types whose slices are windows of memory without invalid bit patterns.
pub trait Element: sealed::Sealed + Copy {}

macro_rules! elements {
    ($($element:ty),*) => {$(
        impl sealed::Sealed for $element {}
        impl Element for $element {}
    )*};
}

elements!(f32, f64, i32, i64, u32, u16, u8, i8);

/// An input: memory that the launch reads.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    start: *const u8,
    len: usize,
    memory: PhantomData<&'a [u8]>,
}

/// An output: memory that the launch writes, and may read.
#[derive(Debug)]
pub struct ViewMut<'a> {
    start: *mut u8,
    len: usize,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a view is a shared slice without its type; the launch only reads through it.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}
// SAFETY: a mutable view is an exclusive slice without its type.
unsafe impl Send for ViewMut<'_> {}
// SAFETY: through a shared reference only the executor writes, each task to its own elements.
unsafe impl Sync for ViewMut<'_> {}

impl<'a> View<'a> {
    /// The memory of a slice.
    pub fn of<T: Element>(slice: &'a [T]) -> View<'a> {
        let memory = PhantomData;
        View { start: slice.as_ptr().cast(), len: size_of_val(slice), memory }
    }

    /// The `len` bytes from `start` on.
    ///
    /// # Safety
    ///
    /// They must be readable for `'a`, and written by nobody during a launch other than through
    /// that launch's own outputs.
    pub unsafe fn from_raw(start: *const u8, len: usize) -> View<'a> {
        View { start, len, memory: PhantomData }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.start
    }

    pub(super) fn start<T>(&self) -> *const T {
        self.start.cast()
    }
}

impl<'a> ViewMut<'a> {
    /// The memory of a slice.
    pub fn of<T: Element>(slice: &'a mut [T]) -> ViewMut<'a> {
        let len = size_of_val(slice);
        ViewMut { start: slice.as_mut_ptr().cast(), len, memory: PhantomData }
    }

    /// The `len` bytes from `start` on.
    ///
    /// # Safety
    ///
    /// They must be readable and writable for `'a`, and used by nobody else during a launch, other
    /// than by inputs of that launch where its kernel allows work in place.
    pub unsafe fn from_raw(start: *mut u8, len: usize) -> ViewMut<'a> {
        ViewMut { start, len, memory: PhantomData }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    pub(super) fn start<T>(&self) -> *mut T {
        self.start.cast()
    }
}

/// A pointer that tasks share: each writes elements of its own.
#[derive(Debug)]
pub(super) struct Shared<T>(*mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Shared<T> {
        *self
    }
}

impl<T> Copy for Shared<T> {}

// SAFETY: a pointer alone; each access through it has its own reason.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(super) fn new(pointer: *mut T) -> Shared<T> {
        Shared(pointer)
    }

    /// The pointer; a method, so that closures capture the wrapper.
    pub(super) fn get(self) -> *mut T {
        self.0
    }
}
