//! Padded rows: narrow values that tensor cores multiply, whose rows would not start where TMA
//! copies from.
//!
//! Padding is part of the buffer and never of the value. Nothing reads or writes it, so that it
//! changes no bit of a result, and no parameter, checkpoint or count knows of it: what is padded
//! are locals, and what is kept for the backward pass.

use ir::program::{Instruction, Ref};
use ir::target::{Arch, Target};
use ir::{DType, TensorType};
use kernels::Kernel;
use kernels::pitch::{Pitch, with_pitch};
use kernels::verify::verify;

use super::{Home, KernelTable, Lower};

/// Alignment of rows, in bytes: a sector of memory, which no two rows then share, and twice the
/// alignment that TMA requires.
const ROW_ALIGNMENT: usize = 32;

/// Elements of the shortest row that is padded. Chosen: as many as a block tile has; padding is
/// then at most an eighth.
const ROW_MIN: usize = 128;

/// The pitch of a value's rows on a target, where they are to be padded.
pub(crate) fn pitch_of(ty: &TensorType, target: Option<Target>) -> Option<Pitch> {
    // Earlier and later tile programs copy rows as their sizes allow.
    if target?.arch()? != Arch::Sm90a {
        return None;
    }
    let sizes = ty.sizes()?;
    let (row, outer) = sizes.split_last()?;
    let unit = ROW_ALIGNMENT / ty.dtype.size() as usize;
    let is_padded = matches!(ty.dtype, DType::BF16 | DType::F16)
        && *row >= ROW_MIN
        && !row.is_multiple_of(unit)
        && outer.iter().product::<usize>() > 1;
    is_padded.then(|| Pitch { row: *row, pitch: row.next_multiple_of(unit) })
}

/// The bytes of a value whose rows have a pitch.
pub(crate) fn padded_bytes(ty: &TensorType, pitch: Pitch) -> Option<u64> {
    Some(ty.bytes()? / pitch.row as u64 * pitch.pitch as u64)
}

impl Lower<'_> {
    /// Pads the slots that are asked for, then all locals that can be; of slots those are returned
    /// that something reads or writes which cannot have padded rows. O(locals × instructions).
    pub(super) fn pad_rows(&mut self) -> Vec<usize> {
        if self.unsharded.target.and_then(Target::arch).is_none() {
            return Vec::new();
        }
        let mut left = Vec::new();
        for (slot, pitch) in self.slots.padded.iter().enumerate() {
            let Some(pitch) = pitch else { continue };
            let place = Ref::Slot(slot as u32);
            match padded(&self.instructions, self.table, place, *pitch) {
                Some(launches) => self.relaunch(launches),
                None => left.push(slot),
            }
        }
        for local in 0..self.locals.len() {
            let Some((pitch, bytes)) = self.pitch_of_local(local) else { continue };
            let place = Ref::Local(local as u32);
            if let Some(launches) = padded(&self.instructions, self.table, place, pitch)
                && launches.iter().any(|(_, kernel)| is_product(kernel))
            {
                self.relaunch(launches);
                self.locals[local].bytes = bytes;
            }
        }
        left
    }

    /// The pitch of a local and its bytes with it, where all values that lie in it have that, and
    /// it is no part and has none.
    fn pitch_of_local(&self, local: usize) -> Option<(Pitch, u64)> {
        let is_part = |at: usize| self.locals[at].within;
        let is_whole = is_part(local).is_none()
            && (0..self.locals.len()).all(|at| is_part(at) != Some(local as u32));
        let here = Some(Home::Local(local as u32));
        let values = self.function.values.iter().zip(&self.home).filter(|(_, home)| **home == here);
        let mut found = values.map(|(value, _)| {
            let pitch = pitch_of(&value.ty, self.unsharded.target)?;
            Some((pitch, padded_bytes(&value.ty, pitch)?))
        });
        let first = found.next()??;
        (is_whole && found.all(|other| other == Some(first))).then_some(first)
    }

    fn relaunch(&mut self, launches: Vec<(usize, Kernel)>) {
        for (at, changed) in launches {
            if let Instruction::Launch { kernel, .. } = &mut self.instructions[at] {
                *kernel = self.table.add(changed);
            }
        }
    }
}

fn is_product(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Product(_) | Kernel::Products(_))
}

/// The kernels of all launches that read or write a place when its rows have a pitch, by
/// instruction; none where one of them cannot.
fn padded(
    instructions: &[Instruction],
    table: &KernelTable,
    place: Ref,
    pitch: Pitch,
) -> Option<Vec<(usize, Kernel)>> {
    let mut launches = Vec::new();
    for (at, instruction) in instructions.iter().enumerate() {
        match instruction {
            Instruction::Launch { kernel, inputs, outputs, .. } => {
                let arguments = inputs.iter().chain(outputs).enumerate();
                let here: Vec<usize> =
                    arguments.filter(|(_, there)| **there == place).map(|(at, _)| at).collect();
                if here.is_empty() {
                    continue;
                }
                let kernel = table.kernels[*kernel].clone();
                let kernel =
                    here.into_iter().try_fold(kernel, |k, at| with_pitch(&k, at, pitch))?;
                verify(&kernel).ok()?;
                launches.push((at, kernel));
            }
            Instruction::Collective { input, output, gates, .. } => {
                if [*input, *output].into_iter().chain(*gates).any(|there| there == place) {
                    return None;
                }
            }
        }
    }
    Some(launches)
}
