//! What is written lies apart from what is read and written at once with it.
//!
//! Where slots lie is known in a call only: a routine says once which of its values must lie apart,
//! and each call is asked whether its buffers do.

use std::collections::BTreeSet;
use std::ops::Range;

use ir::program::{BufferId, Exchange, Instruction, Ref, Routine};

use super::ProgramCheck;

/// Two values of a routine that share no bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Apart {
    written: Place,
    other: Place,
    /// Whether they may also start together, as a kernel allows that computes in place.
    in_place: bool,
}

/// A value, or its first bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    slot: Option<usize>,
    local: Option<usize>,
    bytes_max: u64,
}

impl Place {
    fn of(value: Ref, bytes_max: u64) -> Place {
        match value {
            Ref::Slot(at) => Place { slot: Some(at as usize), local: None, bytes_max },
            Ref::Local(at) => Place { slot: None, local: Some(at as usize), bytes_max },
        }
    }
}

impl ProgramCheck<'_> {
    /// What must lie apart in every call of a routine.
    pub(super) fn apart(&self, routine: &Routine) -> BTreeSet<Apart> {
        let mut all = BTreeSet::new();
        for instruction in &routine.instructions {
            match instruction {
                Instruction::Launch { kernel, inputs, outputs, workspace, .. } => {
                    let Some(kernel) = self.kernels.get(*kernel) else { continue };
                    let in_place = kernel.in_place();
                    let whole = |value: &Ref| Place::of(*value, u64::MAX);
                    if let Some(workspace) = workspace {
                        let apart = |other| Apart {
                            written: whole(workspace),
                            other: whole(other),
                            in_place: false,
                        };
                        all.extend(inputs.iter().chain(outputs).map(apart));
                    }
                    for (at, output) in outputs.iter().enumerate() {
                        let pair = |other: &Ref, in_place: bool| Apart {
                            written: whole(output),
                            other: whole(other),
                            in_place,
                        };
                        let input = |(i, input)| pair(input, in_place.contains(&(i, at)));
                        all.extend(inputs.iter().enumerate().map(input));
                        all.extend(outputs[at + 1..].iter().map(|other| pair(other, false)));
                    }
                }
                Instruction::Collective {
                    exchange,
                    group,
                    dtype,
                    elements,
                    input,
                    output,
                    gates,
                    ..
                } => {
                    if matches!(exchange, Exchange::AllReduce(_)) {
                        continue;
                    }
                    let size = self.group_size(group).unwrap_or(0);
                    let exchanged = self.exchanged(exchange, group, size, *elements);
                    let Ok(elements) = exchanged else { continue };
                    let [sent, received] = elements.map(|n| n as u64 * dtype.size());
                    let written = Place::of(*output, received);
                    let gates = gates.map(|gates| Place::of(gates, u64::MAX));
                    let others = [Some(Place::of(*input, sent)), gates].into_iter().flatten();
                    all.extend(others.map(|other| Apart {
                        written: written.clone(),
                        other,
                        in_place: false,
                    }));
                }
            }
        }
        all
    }

    /// The values of a call that share bytes, and must not; none if all lie as they have to.
    pub(super) fn meeting(
        &self,
        routine: &Routine,
        apart: &BTreeSet<Apart>,
        slots: &[BufferId],
        frame: Option<BufferId>,
    ) -> Option<String> {
        let frame = frame.and_then(|id| self.buffer_at(id)).map_or(0, |frame| frame.offset);
        let range = |place: &Place| -> Option<Range<u64>> {
            let (start, bytes) = match (place.slot, place.local) {
                (Some(at), _) => {
                    let buffer = self.buffer_at(*slots.get(at)?)?;
                    (buffer.offset, buffer.bytes)
                }
                (None, at) => {
                    let local = routine.locals.get(at?)?;
                    (frame.saturating_add(local.offset), local.bytes)
                }
            };
            Some(start..start.saturating_add(bytes.min(place.bytes_max)))
        };
        let name = |place: &Place| match (place.slot, place.local) {
            (Some(at), _) => routine.slots[at].0.clone(),
            (None, at) => at.map_or(String::new(), |at| routine.locals[at].name.clone()),
        };
        let meets = |pair: &&Apart| {
            let (Some(a), Some(b)) = (range(&pair.written), range(&pair.other)) else {
                return false;
            };
            let overlap = a.start.max(b.start) < a.end.min(b.end);
            overlap && !(pair.in_place && a.start == b.start)
        };
        let Apart { written, other, .. } = apart.iter().find(meets)?;
        let (written, other, routine) = (name(written), name(other), &routine.name);
        Some(format!("`{routine}` writes `{written}`, which shares bytes with `{other}`"))
    }
}
