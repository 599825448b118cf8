//! What computes the kernels of a rank.

use kernels::cpu::{Cpu, Prepared, View, ViewMut};

/// Executes the launches of one rank, on its memory.
pub trait Device: Send {
    /// Runs one launch, and returns when its outputs are written.
    ///
    /// # Panics
    ///
    /// If an argument is missing or shorter than the kernel says: an invariant of the caller.
    fn launch(&mut self, prepared: &mut Prepared, inputs: &[View<'_>], outputs: &[ViewMut<'_>]);
}

impl Device for Cpu {
    fn launch(&mut self, prepared: &mut Prepared, inputs: &[View<'_>], outputs: &[ViewMut<'_>]) {
        Cpu::launch(self, prepared, inputs, outputs);
    }
}
