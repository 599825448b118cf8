//! Windows of a buffer, at positions that are known at run time.

use super::Cpu;
use super::view::{Shared, View, ViewMut};
use crate::kernel::Window;

/// Bytes that one cycle of one thread copies, about.
const BYTES_PER_CYCLE: usize = 4;

/// Writes a window.
pub(super) fn place(cpu: &Cpu, w: &Window, inputs: &[View], outputs: &[ViewMut]) {
    let source = Shared::new(inputs[0].start::<u8>().cast_mut());
    let target = Shared::new(outputs[0].start::<u8>());
    let (small, large, positions) = strides(w, &inputs[1]);
    cpu.for_each(w.outer, cycles(w), 0, |outer, _| {
        let first = first(w, positions, outer);
        // SAFETY: the arguments were checked to hold the window and the whole, in which the window
        // lies; a task writes its own part.
        unsafe {
            let target = target.get().add(outer * large + first);
            target.copy_from_nonoverlapping(source.get().add(outer * small), small);
        }
    });
}

/// Reads a window.
pub(super) fn take(cpu: &Cpu, w: &Window, inputs: &[View], outputs: &[ViewMut]) {
    let source = Shared::new(inputs[0].start::<u8>().cast_mut());
    let target = Shared::new(outputs[0].start::<u8>());
    let (small, large, positions) = strides(w, &inputs[1]);
    cpu.for_each(w.outer, cycles(w), 0, |outer, _| {
        let first = first(w, positions, outer);
        // SAFETY: as in `place`.
        unsafe {
            let source = source.get().add(outer * large + first);
            target.get().add(outer * small).copy_from_nonoverlapping(source, small);
        }
    });
}

/// Bytes of a window and of a whole per point of `outer`, and the positions.
fn strides<'v>(w: &Window, positions: &'v View) -> (usize, usize, &'v [i32]) {
    assert!(w.len <= w.capacity, "a window is no longer than the whole");
    let row = w.inner * w.dtype.size() as usize;
    // SAFETY: the input was checked to hold them, and nobody writes it meanwhile.
    let positions = unsafe { std::slice::from_raw_parts(positions.start::<i32>(), w.positions) };
    (w.len * row, w.capacity * row, positions)
}

/// Bytes before the window of a point of `outer`.
fn first(w: &Window, positions: &[i32], outer: usize) -> usize {
    let position = positions[outer * w.positions / w.outer];
    let first = usize::try_from(position).unwrap_or(0).min(w.capacity - w.len);
    first * w.inner * w.dtype.size() as usize
}

fn cycles(w: &Window) -> u64 {
    (w.outer * w.len * w.inner * w.dtype.size() as usize / BYTES_PER_CYCLE) as u64
}
