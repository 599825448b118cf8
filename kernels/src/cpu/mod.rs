//! The CPU that executes kernels.

mod view;

pub use view::{Element, View, ViewMut};

use crate::arguments::Argument;
use crate::kernel::Kernel;
use crate::units::Bytes;

/// The threads and the scratch memory of one rank.
#[derive(Debug)]
pub struct Cpu {
    threads: usize,
}

impl Cpu {
    /// A CPU of `threads` threads; with one, kernels run on the thread that launches them.
    pub fn new(threads: usize) -> Cpu {
        Cpu { threads }
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs one launch and returns when its outputs are written.
    ///
    /// # Panics
    ///
    /// If an argument is missing or shorter than the kernel says: an invariant of the caller.
    pub fn execute(&self, kernel: &Kernel, inputs: &[View], outputs: &[ViewMut]) {
        check(&kernel.inputs(), inputs.iter().map(View::len), "input");
        check(&kernel.outputs(), outputs.iter().map(ViewMut::len), "output");
        unimplemented!("the executor")
    }
}

fn check(wanted: &[Argument], lens: impl ExactSizeIterator<Item = usize>, what: &str) {
    assert!(wanted.len() == lens.len(), "a launch passes every {what} its kernel lists");
    for (index, (argument, len)) in wanted.iter().zip(lens).enumerate() {
        let bytes = argument.bytes();
        assert!(bytes <= len, "{what} {index} holds the {bytes} bytes its kernel uses, not {len}");
    }
}

/// Bytes of scratch beyond the arguments; see [`crate::price::workspace`].
pub(crate) fn workspace(_kernel: &Kernel, _threads: usize) -> Bytes {
    Bytes(0)
}
