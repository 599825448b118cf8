//! Steps: what is passed, fed, sent and received is there and fits.

use std::collections::{BTreeSet, HashMap};

use ir::DType;
use ir::plan::Place;
use ir::program::{ALIGNMENT, Buffer, BufferId, Contents, Instruction, Ref, Step};

use super::apart::Apart;
use super::{Findings, MICROBATCHES_MAX, ProgramCheck, phases};

/// How a routine uses its values.
struct Uses {
    /// The element types of each slot; more than one where bits are read.
    types: Vec<Vec<DType>>,
    /// What must lie apart.
    apart: BTreeSet<Apart>,
}

impl ProgramCheck<'_> {
    pub(super) fn steps(&self, findings: &mut Findings) {
        let mut uses: HashMap<usize, Uses> = HashMap::new();
        for (phase, steps) in phases(self.program) {
            for (at, step) in steps.iter().enumerate() {
                if let Err((code, why)) = self.step(step, &mut uses) {
                    findings.add(code, &format!("{}, {phase} {at}", self.place), why);
                }
            }
        }
        for entry in &self.program.entries {
            let is_output = |id: &BufferId| {
                self.buffer_at(*id).is_some_and(|buffer| buffer.contents == Contents::Output)
            };
            findings.require(entry.outputs.iter().all(is_output), "E2104", &self.place, &|| {
                format!("entry `{}` gives buffers that are no outputs", entry.name)
            });
        }
    }

    fn step(
        &self,
        step: &Step,
        uses: &mut HashMap<usize, Uses>,
    ) -> Result<(), (&'static str, String)> {
        let there = |id: BufferId| {
            self.buffer_at(id).ok_or_else(|| ("E2104", format!("buffer {} is not there", id.0)))
        };
        match step {
            Step::Feed { feed, buffer, microbatch } => {
                let buffer = self.on_device(*buffer)?;
                if buffer.contents != Contents::Feed(*feed) {
                    return Err((
                        "E2104",
                        format!("feeds `{}`, which is not fed this", buffer.name),
                    ));
                }
                let counted = *microbatch < MICROBATCHES_MAX;
                counted.then_some(()).ok_or_else(|| ("E2104", format!("micro-batch {microbatch}")))
            }
            Step::Call { routine, slots, frame } => self.call(*routine, slots, *frame, uses),
            Step::Send { to: stage, buffer } | Step::Receive { from: stage, buffer } => {
                self.on_device(*buffer)?;
                if *stage >= self.mesh.pp || *stage == self.program.stage {
                    return Err(("E2104", format!("stage {stage} is no other stage")));
                }
                Ok(())
            }
            Step::Move { from, to } => {
                let [from, to] = [there(*from)?, there(*to)?];
                let is_on_device = |buffer| self.program.place_of(buffer) == Some(Place::Device);
                let is_equal = from.bytes == to.bytes && from.dtype == to.dtype;
                if is_equal && is_on_device(from) != is_on_device(to) {
                    return Ok(());
                }
                let headline = format!("`{}` is not copied to `{}`", from.name, to.name);
                Err(("E2126", headline))
            }
            Step::Await { buffer } => there(*buffer).map(|_| ()),
        }
    }

    /// A buffer that the device uses.
    fn on_device(&self, id: BufferId) -> Result<&Buffer, (&'static str, String)> {
        let buffer =
            self.buffer_at(id).ok_or_else(|| ("E2104", format!("buffer {} is not there", id.0)))?;
        match self.program.place_of(buffer) {
            Some(Place::Host | Place::Disk) => {
                Err(("E2126", format!("uses `{}`, which is not on the device", buffer.name)))
            }
            Some(Place::Device) | None => Ok(buffer),
        }
    }

    fn call(
        &self,
        index: usize,
        slots: &[BufferId],
        frame: Option<BufferId>,
        uses: &mut HashMap<usize, Uses>,
    ) -> Result<(), (&'static str, String)> {
        let routine = self.program.routines.get(index);
        let routine = routine.ok_or_else(|| ("E2104", format!("routine {index} is not there")))?;
        if slots.len() != routine.slots.len() {
            let (passed, wanted) = (slots.len(), routine.slots.len());
            let headline = format!("passes {passed} buffers to `{}` of {wanted}", routine.name);
            return Err(("E2105", headline));
        }
        let used = uses.entry(index).or_insert_with(|| self.uses(index));
        for (at, ((name, bytes), id)) in routine.slots.iter().zip(slots).enumerate() {
            let buffer = self.on_device(*id)?;
            if buffer.bytes < *bytes {
                let Buffer { name: passed, bytes: there, .. } = buffer;
                let headline =
                    format!("passes `{passed}` of {there} bytes as `{name}` of {bytes} bytes");
                return Err(("E2105", headline));
            }
            if let Some(other) = used.types[at].iter().find(|dtype| **dtype != buffer.dtype) {
                let Buffer { name: passed, dtype, .. } = buffer;
                let headline = format!("passes `{passed}` of {dtype} as `{name}` of {other}");
                return Err(("E2107", headline));
            }
        }
        let meeting = self.meeting(routine, &used.apart, slots, frame);
        match frame.map(|id| self.on_device(id)) {
            None if routine.locals.is_empty() => apart(meeting),
            None => Err(("E2105", format!("calls `{}` without a frame", routine.name))),
            Some(Err(why)) => Err(why),
            Some(Ok(frame)) => {
                let fits = frame.contents == Contents::Frame
                    && frame.bytes >= routine.frame_bytes
                    && frame.offset.is_multiple_of(ALIGNMENT);
                let text = || format!("`{}` does not fit its frame", routine.name);
                if fits { apart(meeting) } else { Err(("E2105", text())) }
            }
        }
    }

    /// The element types that the instructions of a routine use its slots as.
    fn uses(&self, index: usize) -> Uses {
        let routine = &self.program.routines[index];
        let mut types: Vec<Vec<DType>> = vec![Vec::new(); routine.slots.len()];
        let mut note = |value: Ref, dtype: DType| {
            if let Ref::Slot(at) = value
                && let Some(types) = types.get_mut(at as usize)
                && !types.contains(&dtype)
            {
                types.push(dtype);
            }
        };
        for instruction in &routine.instructions {
            match instruction {
                Instruction::Launch { kernel, inputs, outputs, .. } => {
                    let Some(kernel) = self.kernels.get(*kernel) else { continue };
                    let arguments = kernel.inputs().into_iter().chain(kernel.outputs());
                    for (argument, value) in arguments.zip(inputs.iter().chain(outputs)) {
                        note(*value, argument.dtype);
                    }
                }
                Instruction::Collective { dtype, input, output, gates, .. } => {
                    note(*input, *dtype);
                    note(*output, *dtype);
                    gates.iter().for_each(|gates| note(*gates, *dtype));
                }
            }
        }
        Uses { types, apart: self.apart(routine) }
    }
}

/// What is wrong with a call whose values meet.
fn apart(meeting: Option<String>) -> Result<(), (&'static str, String)> {
    meeting.map_or(Ok(()), |headline| Err(("E2109", headline)))
}
