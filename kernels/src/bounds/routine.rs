//! Routines: instructions refer to slots and locals that hold what kernels and groups use.

use ir::op::Combiner;
use ir::plan::Mesh;
use ir::program::{ALIGNMENT, Exchange, Group, Instruction, LocalBuffer, Ref, Routed, Routine};
use ir::{Axis, DType};

use crate::arguments::Argument;
use crate::scalars::admit;

use super::{Findings, ProgramCheck};

impl ProgramCheck<'_> {
    pub(super) fn routines(&self, findings: &mut Findings) {
        for routine in &self.program.routines {
            let place = format!("{}, routine `{}`", self.place, routine.name);
            for local in &routine.locals {
                let end = local.offset.checked_add(local.bytes);
                let fits = end.is_some_and(|end| end <= routine.frame_bytes)
                    && local.offset.is_multiple_of(ALIGNMENT);
                findings.require(fits, "E2103", &place, &|| {
                    let (name, frame) = (&local.name, routine.frame_bytes);
                    format!("local `{name}` does not lie in its frame of {frame} bytes")
                });
            }
            for (whole, part) in misplaced_parts(&routine.locals) {
                let headline = format!("local `{part}` is no part of its own of `{whole}`");
                findings.add("E2103", &place, headline);
            }
            for (at, instruction) in routine.instructions.iter().enumerate() {
                let place = format!("{place}, instruction {at}");
                if let Err((code, why)) = self.instruction(routine, instruction) {
                    findings.add(code, &place, why);
                }
            }
        }
    }

    fn instruction(&self, routine: &Routine, instruction: &Instruction) -> Fitting {
        match instruction {
            Instruction::Launch { kernel, scalars, inputs, outputs, workspace } => {
                let there = self.kernels.get(*kernel).zip(self.scalars.get(*kernel));
                let (kernel, ranges) =
                    there.ok_or_else(|| ("E2104", "no such kernel".to_owned()))?;
                admit(ranges, scalars).map_err(|why| ("E2106", why))?;
                arguments(routine, &kernel.inputs(), inputs, "input")?;
                arguments(routine, &kernel.outputs(), outputs, "output")?;
                workspace.map_or(Ok(()), |there| is_local(routine, there))
            }
            Instruction::Collective {
                exchange,
                group,
                dtype,
                exchanged,
                elements,
                input,
                output,
                gates,
            } => {
                let size = self.group_size(group)?;
                let [sent, received] = self.exchanged(exchange, group, size, *elements)?;
                if matches!(exchange, Exchange::AllReduce(_)) && input != output {
                    return Err(("E2108", "an all-reduce is not in place".to_owned()));
                }
                let is_sum = matches!(
                    exchange,
                    Exchange::AllReduce(Combiner::Sum) | Exchange::ReduceScatter { .. }
                );
                gates_fit(routine, exchange, *gates, *dtype)?;
                let rounds = is_sum && *dtype == DType::F32 && exchanged.is_narrow();
                if exchanged != dtype && !rounds {
                    let headline = format!("{dtype} is not exchanged as {exchanged} here");
                    return Err(("E2108", headline));
                }
                holds(routine, *input, sent, *dtype)?;
                holds(routine, *output, received, *dtype)
            }
        }
    }

    pub(super) fn group_size(&self, group: &Group) -> Result<usize, (&'static str, String)> {
        match group {
            Group::Axis(axis) => Ok(self.mesh.size(*axis)),
            Group::World => Ok(self.mesh.ranks()),
            Group::Data => Ok(self.mesh.data_ranks()),
            Group::Strided { count, stride } => {
                let is_share =
                    count.checked_mul(*stride).is_some_and(|n| self.mesh.has_shards_of(n));
                if !is_share || !self.mesh.has_shards_of(*stride) {
                    let text = format!("{count} ranks, {stride} apart, are no equal share");
                    return Err(("E2104", text));
                }
                Ok(*count)
            }
            Group::Shards(count) | Group::Copies(count) => {
                let Mesh { dp, cp, .. } = self.mesh;
                if !self.mesh.has_shards_of(*count) {
                    let text = format!("{count} ranks are no equal share of dp={dp} and cp={cp}");
                    return Err(("E2104", text));
                }
                Ok(if matches!(group, Group::Shards(_)) { *count } else { dp * cp / count })
            }
            Group::Experts(count) => {
                let on_data =
                    count.checked_div(self.mesh.tp).filter(|n| n * self.mesh.tp == *count);
                if !on_data.is_some_and(|on_data| self.mesh.has_shards_of(on_data)) {
                    let Mesh { dp, cp, tp, .. } = self.mesh;
                    let text =
                        format!("{count} ranks are no equal share of tp={tp}, dp={dp} and cp={cp}");
                    return Err(("E2104", text));
                }
                Ok(*count)
            }
            Group::Stages(stages) => {
                let mut sorted = stages.clone();
                sorted.sort_unstable();
                sorted.dedup();
                let there = sorted.last().is_some_and(|last| *last < self.mesh.pp);
                let own = stages.contains(&self.program.stage);
                match sorted.len() == stages.len() && there && own {
                    true => Ok(stages.len()),
                    false => Err(("E2104", format!("stages {stages:?} are no group of this one"))),
                }
            }
        }
    }

    /// The elements that a collective sends and receives on this class of ranks.
    pub(super) fn exchanged(
        &self,
        exchange: &Exchange,
        group: &Group,
        size: usize,
        elements: usize,
    ) -> Result<[usize; 2], (&'static str, String)> {
        let (outer, inner, counts) = match exchange {
            Exchange::AllReduce(_) => return Ok([elements, elements]),
            Exchange::AllToAll { pieces } => {
                if *pieces != size || !elements.is_multiple_of(size) {
                    let headline = format!("{pieces} pieces of {elements} for a group of {size}");
                    return Err(("E2108", headline));
                }
                return Ok([elements, elements]);
            }
            Exchange::Dispatch(routed) | Exchange::Combine(routed) => {
                let [piece, whole, _] = routed_elements(routed)?;
                let is_combined = matches!(exchange, Exchange::Combine(_));
                let both = if is_combined { [whole, piece] } else { [piece, whole] };
                let fits = routed.pieces == size && both[0] == elements;
                let text = || format!("{elements} elements of {routed:?} for a group of {size}");
                return if fits { Ok(both) } else { Err(("E2108", text())) };
            }
            Exchange::AllGather { outer, inner, counts, order }
            | Exchange::ReduceScatter { outer, inner, counts, order } => {
                if !order.allows(counts) {
                    let headline = format!("pieces {counts:?} in {} order", order.name());
                    return Err(("E2108", headline));
                }
                (*outer, *inner, counts)
            }
        };
        if counts.len() != size {
            let headline = format!("{} pieces for a group of {size}", counts.len());
            return Err(("E2108", headline));
        }
        let times = |count: usize| {
            let points = outer.checked_mul(inner)?.checked_mul(count)?;
            (points <= 1 << 40).then_some(points)
        };
        let whole = counts.iter().try_fold(0_usize, |n, c| n.checked_add(*c)).and_then(times);
        let whole = whole.ok_or_else(|| ("E2108", "pieces without bounds".to_owned()))?;
        // Ranks along `dp` run one program: their pieces are equal, or it fits some of them only.
        let own: Vec<usize> = match group {
            Group::Axis(Axis::Tp) => vec![counts[self.program.tensor]],
            Group::Axis(Axis::Cp) => vec![counts[self.program.context]],
            Group::Axis(Axis::Pp) => vec![counts[self.program.stage]],
            Group::Stages(stages) => {
                let own = stages.iter().zip(counts).filter(|(s, _)| **s == self.program.stage);
                own.map(|(_, count)| *count).collect()
            }
            Group::Axis(Axis::Dp | Axis::Ep)
            | Group::Data
            | Group::Shards(_)
            | Group::Copies(_)
            | Group::Strided { .. }
            | Group::Experts(_)
            | Group::World => counts.clone(),
        };
        let piece = own.first().copied().and_then(times).unwrap_or(0);
        let is_gather = matches!(exchange, Exchange::AllGather { .. });
        let sent = if is_gather { piece } else { whole };
        if sent != elements || own.iter().any(|count| *count != own[0]) {
            let headline = format!("puts in {elements} elements where its piece has {sent}");
            return Err(("E2108", headline));
        }
        Ok(if is_gather { [piece, whole] } else { [whole, piece] })
    }
}

/// Gates are there where tokens are routed, and nowhere else.
fn gates_fit(routine: &Routine, exchange: &Exchange, gates: Option<Ref>, dtype: DType) -> Fitting {
    let routed = match exchange {
        Exchange::Dispatch(routed) | Exchange::Combine(routed) => Some(routed),
        Exchange::AllReduce(_)
        | Exchange::AllGather { .. }
        | Exchange::ReduceScatter { .. }
        | Exchange::AllToAll { .. } => None,
    };
    match (routed, gates) {
        (Some(routed), Some(gates)) => {
            let [_, _, elements] = routed_elements(routed)?;
            holds(routine, gates, elements, dtype)
        }
        (Some(_), None) => Err(("E2108", "routes tokens without gates".to_owned())),
        (None, Some(_)) => Err(("E2108", "has gates and routes no tokens".to_owned())),
        (None, None) => Ok(()),
    }
}

fn routed_elements(routed: &Routed) -> Result<[usize; 3], (&'static str, String)> {
    let is_bound = |n: &usize| *n <= 1 << 40;
    let sizes = [routed.width, routed.experts];
    let elements = routed.elements().filter(|all| all.iter().chain(&sizes).all(is_bound));
    elements.ok_or_else(|| ("E2108", "tokens without bounds".to_owned()))
}

/// Names of wholes and of parts which do not lie in them. Parts may share bytes: of two values that
/// are written one after another, the second may be made of the first.
fn misplaced_parts(locals: &[LocalBuffer]) -> Vec<(String, String)> {
    let end = |local: &LocalBuffer| local.offset.saturating_add(local.bytes);
    let mut found = Vec::new();
    for part in locals {
        let Some(at) = part.within else { continue };
        let whole = locals.get(at as usize).filter(|whole| whole.within.is_none());
        if !whole.is_some_and(|whole| whole.offset <= part.offset && end(part) <= end(whole)) {
            let name = whole.map_or_else(|| format!("l{at}"), |whole| whole.name.clone());
            found.push((name, part.name.clone()));
        }
    }
    found
}

type Fitting = Result<(), (&'static str, String)>;

/// Where a value lies and how many bytes it has; a local has an offset in the frame.
fn extent(routine: &Routine, value: Ref) -> Result<u64, (&'static str, String)> {
    let bytes = match value {
        Ref::Slot(at) => routine.slots.get(at as usize).map(|slot| slot.1),
        Ref::Local(at) => routine.locals.get(at as usize).map(|local| local.bytes),
    };
    bytes.ok_or_else(|| match value {
        Ref::Slot(at) => ("E2104", format!("slot {at} is not there")),
        Ref::Local(at) => ("E2104", format!("local {at} is not there")),
    })
}

fn name(routine: &Routine, value: Ref) -> &str {
    match value {
        Ref::Slot(at) => &routine.slots[at as usize].0,
        Ref::Local(at) => &routine.locals[at as usize].name,
    }
}

fn holds(routine: &Routine, value: Ref, elements: usize, dtype: DType) -> Fitting {
    let bytes = extent(routine, value)?;
    let wanted = (elements as u64).checked_mul(dtype.size());
    if wanted.is_none_or(|wanted| wanted > bytes) {
        let name = name(routine, value);
        let headline = format!("`{name}` holds {bytes} bytes, not {elements} elements of {dtype}");
        return Err(("E2108", headline));
    }
    Ok(())
}

/// Whether a workspace is a local that is no part of another.
fn is_local(routine: &Routine, workspace: Ref) -> Fitting {
    extent(routine, workspace)?;
    let Ref::Local(at) = workspace else {
        return Err(("E2106", "a workspace is no local".to_owned()));
    };
    match routine.locals[at as usize].within {
        None => Ok(()),
        Some(_) => Err(("E2106", "a workspace is a part of another local".to_owned())),
    }
}

fn arguments(routine: &Routine, wanted: &[Argument], passed: &[Ref], what: &str) -> Fitting {
    if wanted.len() != passed.len() {
        let headline = format!("passes {} {what}s to a kernel of {}", passed.len(), wanted.len());
        return Err(("E2106", headline));
    }
    for (index, (argument, value)) in wanted.iter().zip(passed).enumerate() {
        let bytes = extent(routine, *value)?;
        let wanted = argument.bytes() as u64;
        if wanted > bytes {
            let name = name(routine, *value);
            let headline = format!("{what} {index}, `{name}`, holds {bytes} of {wanted} bytes");
            return Err(("E2106", headline));
        }
    }
    Ok(())
}
