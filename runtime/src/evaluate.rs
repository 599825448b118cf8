//! One routine on one device: arrays in, arrays out, with no plan, no steps and no other ranks.

use std::ops::Range;

use ir::program::{ALIGNMENT, Instruction, Ref, Routine};
use kernels::Kernel;
use kernels::cpu::Cpu;

use crate::device::Launches;
use crate::local::arena::Arena;

/// A routine with memory of its own.
pub struct Evaluation {
    routine: Routine,
    prepared: Launches,
    cpu: Cpu,
    arena: Arena,
    slots: Vec<Range<usize>>,
    /// Where the frame begins.
    frame: usize,
}

impl std::fmt::Debug for Evaluation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Evaluation").field("routine", &self.routine.name).finish_non_exhaustive()
    }
}

impl Evaluation {
    /// Memory for a routine of this rank alone, and kernels that are ready to run on `threads`.
    /// None if the system has no such memory.
    pub fn new(routine: Routine, kernels: &[Kernel], threads: usize) -> Option<Evaluation> {
        let round = |bytes: usize| bytes.next_multiple_of(ALIGNMENT as usize);
        let mut end = 0;
        let mut slots = Vec::new();
        for (_, bytes) in &routine.slots {
            let bytes = usize::try_from(*bytes).ok()?;
            slots.push(end..end + bytes);
            end = round(end.checked_add(bytes)?);
        }
        let bytes = end.checked_add(usize::try_from(routine.frame_bytes).ok()?)?;
        Some(Evaluation {
            prepared: Launches::new(kernels, std::slice::from_ref(&routine)),
            cpu: Cpu::new(threads),
            arena: Arena::new(bytes)?,
            slots,
            frame: end,
            routine,
        })
    }

    /// Bytes of all memory.
    pub fn bytes(&self) -> usize {
        self.arena.len()
    }

    /// Launches of one run.
    pub fn launches(&self) -> usize {
        self.routine.instructions.len()
    }

    /// Writes the bytes of a slot: the parameters come first, then the results.
    ///
    /// # Panics
    /// If the slot is not there or holds another number of bytes.
    pub fn write(&mut self, slot: usize, bytes: &[u8]) {
        self.arena.bytes_mut(self.slots[slot].clone()).copy_from_slice(bytes);
    }

    /// The bytes of a slot.
    ///
    /// # Panics
    /// If the slot is not there.
    pub fn read(&self, slot: usize) -> &[u8] {
        self.arena.bytes(self.slots[slot].clone())
    }

    /// Runs all launches.
    ///
    /// # Panics
    /// If the routine has a collective: it is none of one rank.
    pub fn run(&mut self) {
        for (at, instruction) in self.routine.instructions.iter().enumerate() {
            let Instruction::Launch { inputs, outputs, .. } = instruction else {
                panic!("a routine of one rank has no collectives");
            };
            let range = |at: &Ref| match at {
                Ref::Slot(at) => self.slots[*at as usize].clone(),
                Ref::Local(at) => {
                    let local = &self.routine.locals[*at as usize];
                    let start = self.frame + local.offset as usize;
                    start..start + local.bytes as usize
                }
            };
            let inputs: Vec<Range<usize>> = inputs.iter().map(range).collect();
            let outputs: Vec<Range<usize>> = outputs.iter().map(range).collect();
            let prepared = self.prepared.at_mut(0, at);
            self.arena.launch(&mut self.cpu, prepared, [&inputs, &outputs], None);
        }
    }
}
