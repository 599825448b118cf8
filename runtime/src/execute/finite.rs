//! Values that are not finite: whether a step may update, and where the first of them arose.

use std::fmt;
use std::time::Instant;

use ir::DType;
use ir::program::{BufferId, Contents, Program, Ref, Routine, Step};
use kernels::Kernel;
use serde::{Deserialize, Serialize};

use crate::convert::{Stored, convert};
use crate::cuda;
use crate::local::mover::Extent;

use super::memory::Memory;
use super::{DEVICE, Scalars, buffer_of, describe, range};

/// Where the first value that is not finite arose in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFinite {
    /// The rank.
    pub rank: usize,
    /// The tensor: a weight, or a value of a routine.
    pub tensor: String,
    /// The layer, by what the names of its weights have in common; none for the work between.
    pub layer: Option<String>,
    /// The step and the instruction as they stand in the text of the program; none for a weight
    /// that was not finite before.
    pub place: Option<String>,
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotFinite { rank, tensor, layer, place } = self;
        write!(f, "the first value that is not finite is in `{tensor}`")?;
        if let Some(layer) = layer {
            write!(f, " of layer `{layer}`")?;
        }
        write!(f, " on rank {rank}")?;
        match place {
            Some(place) => write!(f, ": {place}"),
            None => f.write_str(", before the step"),
        }
    }
}

/// What a rank found when it looked.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Found {
    /// The step, the instruction and its output.
    pub(super) at: (usize, usize, usize),
    /// When it was found, which orders what several ranks find.
    #[serde(skip, default = "Instant::now")]
    pub(super) when: Instant,
    /// Whether it is a negative infinity, which masks are made of, and no other.
    pub(super) is_mask_like: bool,
}

/// The values of one kind that a range of an arena holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Values {
    Finite,
    /// Some are negative infinities, the others finite.
    NegativeInfinity,
    /// Some are NaN or positive infinities.
    Wrong,
}

/// Looks at numbers; integers are finite.
pub(super) fn values(dtype: DType, bytes: &[u8]) -> Values {
    let of = |number: f64| match number {
        number if number.is_finite() => Values::Finite,
        number if number == f64::NEG_INFINITY => Values::NegativeInfinity,
        _ => Values::Wrong,
    };
    let worse = |a: Values, b: Values| match (a, b) {
        (Values::Wrong, _) | (_, Values::Wrong) => Values::Wrong,
        (Values::NegativeInfinity, _) | (_, Values::NegativeInfinity) => Values::NegativeInfinity,
        (Values::Finite, Values::Finite) => Values::Finite,
    };
    if dtype == DType::F32 {
        let numbers = bytes.as_chunks().0.iter().map(|&b| f64::from(f32::from_le_bytes(b)));
        return numbers.map(of).fold(Values::Finite, worse);
    }
    if dtype == DType::F64 {
        let numbers = bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b));
        return numbers.map(of).fold(Values::Finite, worse);
    }
    if !dtype.is_float() {
        return Values::Finite;
    }
    let wide = convert(Stored::DType(dtype), bytes, DType::F64);
    values(DType::F64, &wide)
}

/// Loss sum, count and sum of squares.
pub(super) fn stats(dtype: DType, bytes: &[u8]) -> [f64; 3] {
    let wide = convert(Stored::DType(dtype), bytes, DType::F64);
    [0, 1, 2].map(|at| wide.as_chunks().0.get(at).map_or(0.0, |&b| f64::from_le_bytes(b)))
}

/// Whether the statistics of a step, which are equal on all ranks, allow an update; true where
/// there are none.
///
/// # Errors
/// The GPU on which they are has failed.
pub(super) fn allows_update(
    program: &Program,
    memory: &mut Memory,
    scalars: &Scalars,
) -> Result<bool, cuda::context::Failure> {
    let buffer = program.buffers.iter().find(|buffer| buffer.contents == Contents::Stats);
    let Some(buffer) = buffer else { return Ok(true) };
    let len = buffer.sizes.iter().product::<usize>() * buffer.dtype.size() as usize;
    let start = range(buffer).start;
    memory.synchronize()?;
    let bytes = memory.read(Extent { arena: DEVICE, range: start..start + len })?;
    Ok(scalars.allow_update(stats(buffer.dtype, &bytes)))
}

/// Whether values are worth noting: none where they are not.
pub(super) fn look(bytes: &[u8], dtype: DType, at: (usize, usize, usize)) -> Option<Found> {
    let is_mask_like = match values(dtype, bytes) {
        Values::Finite => return None,
        Values::NegativeInfinity => true,
        Values::Wrong => false,
    };
    Some(Found { at, when: Instant::now(), is_mask_like })
}

/// Puts what a rank found into words.
pub(super) fn told(
    program: &Program,
    kernels: &[Kernel],
    steps: &[Step],
    rank: usize,
    found: Found,
) -> NotFinite {
    let (step, instruction, output) = found.at;
    let place = Some(describe::place(program, kernels, steps, (step, Some(instruction))));
    let Some(Step::Call { routine, slots, .. }) = steps.get(step) else {
        return NotFinite { rank, tensor: "a value".to_owned(), layer: None, place };
    };
    let routine = &program.routines[*routine];
    let written = super::course::outputs(&routine.instructions[instruction])[output];
    let tensor = name_of(program, routine, slots, written);
    NotFinite { rank, tensor, layer: layer_of(program, slots), place }
}

fn name_of(program: &Program, routine: &Routine, slots: &[BufferId], value: Ref) -> String {
    match value {
        Ref::Slot(slot) => buffer_of(program, slots[slot as usize]).name.clone(),
        Ref::Local(local) => routine.locals[local as usize].name.clone(),
    }
}

/// What the names of the weights of a call have in common, up to a dot.
fn layer_of(program: &Program, slots: &[BufferId]) -> Option<String> {
    let weight = |id: &BufferId| {
        let contents = &buffer_of(program, *id).contents;
        let (Contents::Param(weight)
        | Contents::Grad(weight)
        | Contents::Gathered { weight, .. }
        | Contents::Term { weight, .. }) = contents
        else {
            return None;
        };
        Some(&program.weights[*weight].name)
    };
    let mut names = slots.iter().filter_map(weight);
    let first: Vec<&str> = names.next()?.split('.').collect();
    let common = names.fold(first.len() - 1, |common, name| {
        first.iter().zip(name.split('.')).take(common).take_while(|(a, b)| *a == b).count()
    });
    (common > 0).then(|| first[..common].join("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_not_finite_are_seen_in_every_float() {
        let f32s =
            |numbers: &[f32]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(values(DType::F32, &f32s(&[1.0, f32::MAX, -0.0])), Values::Finite);
        assert_eq!(values(DType::F32, &f32s(&[f32::NEG_INFINITY, 1.0])), Values::NegativeInfinity);
        assert_eq!(values(DType::F32, &f32s(&[f32::NEG_INFINITY, f32::NAN])), Values::Wrong);
        assert_eq!(values(DType::F64, &f64::INFINITY.to_le_bytes()), Values::Wrong);
        // bf16 and f16 have their infinities here.
        assert_eq!(values(DType::BF16, &[0x80, 0x7f]), Values::Wrong);
        assert_eq!(values(DType::F16, &[0x00, 0x7c]), Values::Wrong);
        assert_eq!(values(DType::I32, &[0xff; 4]), Values::Finite);
    }
}
