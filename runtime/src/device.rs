//! What computes the kernels of a rank.

use std::collections::BTreeMap;

use ir::program::{Instruction, Routine};
use kernels::Kernel;
use kernels::cpu::{Cpu, Prepared, View, ViewMut};

/// Executes the launches of one rank, on its memory.
pub trait Device: Send {
    /// Runs one launch, and returns when its outputs are written. The workspace is there where the
    /// program was compiled for a target that needs one, and holds nothing.
    ///
    /// # Panics
    ///
    /// If an argument is missing or shorter than the kernel says: an invariant of the caller.
    fn launch(
        &mut self,
        prepared: &mut Prepared,
        inputs: &[View<'_>],
        outputs: &[ViewMut<'_>],
        workspace: Option<&ViewMut<'_>>,
    );
}

impl Device for Cpu {
    /// The workspace is for GPUs: scratch of CPUs lies beside the arena.
    fn launch(
        &mut self,
        prepared: &mut Prepared,
        inputs: &[View<'_>],
        outputs: &[ViewMut<'_>],
        _: Option<&ViewMut<'_>>,
    ) {
        Cpu::launch(self, prepared, inputs, outputs);
    }
}

/// The launches of some routines, ready to run: a kernel once for all that pass the same scalars.
#[derive(Debug)]
pub struct Launches {
    prepared: Vec<Prepared>,
    /// By routine and instruction; none for collectives.
    places: Vec<Vec<Option<usize>>>,
}

impl Launches {
    /// Prepares what the routines launch.
    ///
    /// # Panics
    ///
    /// If a kernel is not there or does not admit its scalars: programs were verified.
    pub fn new(kernels: &[Kernel], routines: &[Routine]) -> Launches {
        let mut prepared = Vec::new();
        let mut known = BTreeMap::new();
        let mut place = |instruction: &Instruction| {
            let Instruction::Launch { kernel, scalars, .. } = instruction else { return None };
            let place = known.entry((*kernel, scalars.clone())).or_insert_with(|| {
                prepared.push(Prepared::new(&kernels[*kernel], scalars));
                prepared.len() - 1
            });
            Some(*place)
        };
        let mut places = Vec::new();
        for routine in routines {
            places.push(routine.instructions.iter().map(&mut place).collect());
        }
        Launches { prepared, places }
    }

    fn place(&self, routine: usize, instruction: usize) -> usize {
        self.places[routine][instruction].expect("the instruction is a launch")
    }

    /// The launch that an instruction of a routine is.
    ///
    /// # Panics
    ///
    /// If it is none.
    pub fn at(&self, routine: usize, instruction: usize) -> &Prepared {
        &self.prepared[self.place(routine, instruction)]
    }

    /// As [`Launches::at`], to be run.
    ///
    /// # Panics
    ///
    /// As [`Launches::at`].
    pub fn at_mut(&mut self, routine: usize, instruction: usize) -> &mut Prepared {
        let place = self.place(routine, instruction);
        &mut self.prepared[place]
    }
}
