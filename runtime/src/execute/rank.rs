//! One rank: runs the steps of its program, one instruction after the other.

use std::any::Any;
use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ir::DType;
use ir::op::Combiner;
use ir::plan::Mesh;
use ir::program::{
    BufferId, Exchange, Feed, Group, Instruction, Program, Ref, Routed, Routine, Step,
};
use ir::sharding::Axis;

use crate::communicator::{self, Blocks, CommError, Communicator, Tokens, Types};
use crate::cuda;
use crate::cuda::nccl::{Collective, Nccl};
use crate::device::Launches;
use crate::local::mover::{Extent, Mover};
use crate::trace::{Span, Tracing};

use super::control::Inputs;
use super::course::{Course, first_update};
use super::fault::Fault;
use super::finite::{self, Found};
use super::memory::{Device, Memory};
use super::{
    Classes, DEVICE, Options, Phase, RankTime, Samples, Seat, buffer_of, describe, extent, range,
    steps,
};

/// Why a rank does not finish a step.
enum Stop {
    Call(CommError),
    Gpu(cuda::context::Failure),
    Abandoned,
}

impl From<CommError> for Stop {
    fn from(error: CommError) -> Stop {
        Stop::Call(error)
    }
}

impl From<cuda::context::Failure> for Stop {
    fn from(failure: cuda::context::Failure) -> Stop {
        Stop::Gpu(failure)
    }
}

/// A collective with what the communicator wants to know about it.
struct Wire {
    group: communicator::Group,
    /// None for an all-reduce.
    blocks: Option<Blocks>,
}

impl Wire {
    /// The collective as NCCL may have it; none where it routes tokens, or nobody else takes part.
    fn collective(&self, exchange: &Exchange) -> Option<Collective<'_>> {
        if self.group.size() == 1 {
            return None;
        }
        match exchange {
            Exchange::AllReduce(combiner) => Some(Collective::AllReduce(combine(*combiner))),
            Exchange::AllGather { .. } => self.blocks.as_ref().map(Collective::AllGather),
            Exchange::ReduceScatter { .. } => self.blocks.as_ref().map(Collective::ReduceScatter),
            Exchange::AllToAll { .. } => Some(Collective::AllToAll),
            Exchange::Dispatch(_) | Exchange::Combine(_) => None,
        }
    }
}

/// The groups in which ranks exchange what NCCL can, and for each rank the bytes of scratch that it
/// takes.
pub(super) fn connections(classes: &Classes) -> (Vec<Vec<usize>>, Vec<usize>) {
    let (mut groups, mut scratch) = (BTreeSet::new(), Vec::new());
    for rank in 0..classes.mesh.ranks() {
        let mut most = 0;
        let routines = classes.program_of(rank).routines.iter();
        for instruction in routines.flat_map(|routine| &routine.instructions) {
            let Instruction::Collective { exchange, dtype, exchanged, .. } = instruction else {
                continue;
            };
            let wire = wire(classes.mesh, rank, instruction);
            let Some(wire) = wire else { continue };
            let types = Types { dtype: *dtype, exchanged: *exchanged };
            let collective = wire.collective(exchange);
            if let Some(collective) = collective.filter(|it| Nccl::has(it, types)) {
                most = most.max(Nccl::scratch_bytes(&collective, *dtype));
                groups.insert(wire.group.members().to_vec());
            }
        }
        scratch.push(most);
    }
    (groups.into_iter().collect(), scratch)
}

/// By phase, the ranks that update; none where all ranks are here, or none updates.
fn updating(classes: &Classes, here: &Range<usize>) -> Vec<Option<communicator::Group>> {
    let ranks = classes.mesh.ranks();
    let of_phase = |phase| {
        let updates = |program: &Program| first_update(program, steps(program, phase)).is_some();
        let updates: Vec<bool> = classes.programs.iter().map(updates).collect();
        let members: Vec<_> = (0..ranks).filter(|rank| updates[classes.class_of(*rank)]).collect();
        (!members.is_empty()).then(|| communicator::Group::new(0, members))
    };
    let is_all_here = here.len() == ranks;
    classes.phases().map(|phase| if is_all_here { None } else { of_phase(phase) }).collect()
}

/// What a rank needs to run its program.
pub(super) struct Runner {
    classes: Arc<Classes>,
    class: usize,
    rank: usize,
    /// The ranks of this process.
    here: Range<usize>,
    data: usize,
    communicator: Box<dyn Communicator>,
    /// Copies between memory spaces; none where a program has one.
    mover: Option<Mover>,
    /// What computes in memory of the host; none where a GPU does.
    host: Option<Host>,
    /// By routine and instruction; none for launches.
    wires: Vec<Vec<Option<Wire>>>,
    /// By phase.
    samples: Arc<[Option<Samples>]>,
    /// Whether the step goes on.
    course: Arc<Course>,
    /// By phase: the step that begins to update.
    updates: Vec<Option<usize>>,
    /// By phase: the ranks that update, where some are in other processes.
    updating: Vec<Option<communicator::Group>>,
    /// The first value that is not finite; looked for where the step says so.
    found: Option<Found>,
    tracing: Tracing,
    epoch: Instant,
    /// The step and the instruction that are being run.
    at: (usize, Option<usize>),
    waited: Duration,
    /// The ranges of a launch, kept to be used again.
    inputs: Vec<Range<usize>>,
    outputs: Vec<Range<usize>>,
}

/// A device that computes in memory of the host, and what it launches there.
struct Host {
    device: Box<dyn crate::device::Device>,
    launches: Launches,
}

/// A call of a routine: where its slots and its frame are.
#[derive(Clone, Copy)]
struct Call<'a> {
    program: &'a Program,
    routine: &'a Routine,
    slots: &'a [BufferId],
    frame: Option<BufferId>,
}

/// What a rank talks with, computes with, where no GPU does, and copies with.
pub(super) type Parts =
    (Box<dyn Communicator>, Option<Box<dyn crate::device::Device>>, Option<Mover>);

impl Runner {
    pub(super) fn new(
        classes: Arc<Classes>,
        (communicator, device, mover): Parts,
        here: Range<usize>,
        options: &Options,
        samples: Arc<[Option<Samples>]>,
        course: Arc<Course>,
        epoch: Instant,
    ) -> Runner {
        let rank = communicator.rank();
        let class = classes.class_of(rank);
        let program = &classes.programs[class];
        let wire = |instruction: &Instruction| wire(classes.mesh, rank, instruction);
        let wires = |routine: &Routine| routine.instructions.iter().map(wire).collect();
        Runner {
            class,
            rank,
            data: classes.mesh.coordinate(rank, Axis::Dp),
            communicator,
            mover,
            host: device.map(|device| Host {
                device,
                launches: Launches::new(&classes.kernels, &program.routines),
            }),
            wires: program.routines.iter().map(wires).collect(),
            samples,
            course,
            updates: classes.phases().map(|p| first_update(program, steps(program, p))).collect(),
            updating: updating(&classes, &here),
            here,
            found: None,
            tracing: options.tracing,
            epoch,
            at: (0, None),
            waited: Duration::ZERO,
            inputs: Vec::new(),
            outputs: Vec::new(),
            classes,
        }
    }

    /// Runs a phase. A failure, panics included, ends the step on all ranks.
    pub(super) fn run(
        &mut self,
        phase: Phase,
        inputs: &Inputs,
        seat: &mut Seat,
    ) -> Result<RankTime, Fault> {
        let start = Instant::now();
        self.waited = Duration::ZERO;
        self.at = (0, None);
        seat.spans.clear();
        self.found = None;
        let result = catch_unwind(AssertUnwindSafe(|| self.run_steps(phase, inputs, seat)));
        // The host reads what they write.
        let ended = seat.memory.wait_for_all(self.mover.as_mut());
        seat.found = self.found;
        let result = result.map(|done| done.and(ended.map_err(Stop::Gpu)));
        let (cause, failed_call) = match result {
            Ok(Ok(())) => {
                let busy = start.elapsed().saturating_sub(self.waited);
                let (busy_s, wait_s) = (busy.as_secs_f64(), self.waited.as_secs_f64());
                return Ok(RankTime { busy_s, wait_s });
            }
            Ok(Err(Stop::Call(error))) => (error.to_string(), Some(error)),
            Ok(Err(Stop::Gpu(failure))) => (failure.to_string(), None),
            Ok(Err(Stop::Abandoned)) => ("the step was abandoned".to_owned(), None),
            Err(panic) => (format!("panicked: {}", panic_text(&*panic)), None),
        };
        let program = &self.classes.programs[self.class];
        let place = describe::place(program, &self.classes.kernels, steps(program, phase), self.at);
        let reason = format!("{place}: {cause}");
        if failed_call.is_none() {
            self.communicator.abort(&reason);
        }
        let is_cause = !matches!(failed_call, Some(CommError::Peer { .. }));
        Err(Fault { reason, is_cause })
    }

    fn run_steps(&mut self, phase: Phase, inputs: &Inputs, seat: &mut Seat) -> Result<(), Stop> {
        let classes = Arc::clone(&self.classes);
        let program = &classes.programs[self.class];
        for (index, step) in steps(program, phase).iter().enumerate() {
            self.at = (index, None);
            if self.updates[phase.index()] == Some(index) {
                if !finite::allows_update(program, &mut seat.memory, &inputs.scalars)? {
                    // All ranks see the same statistics, and stop here.
                    return Ok(());
                }
                if !self.course.begin_update() {
                    return Err(Stop::Abandoned);
                }
                if let Some(updating) = &self.updating[phase.index()] {
                    // Ranks of other processes are on a course of their own: either all have begun
                    // by now, or one has ended the step.
                    self.communicator.barrier(updating)?;
                }
            }
            let start = Instant::now();
            match step {
                Step::Feed { feed, microbatch, buffer } => {
                    let buffer = buffer_of(program, *buffer);
                    seat.memory.device().fill(range(buffer), |target| {
                        self.feed(phase, (*feed, *microbatch), buffer.dtype, inputs, target);
                    })?;
                }
                Step::Call { routine, slots, frame } => {
                    let call = Call {
                        program,
                        routine: &program.routines[*routine],
                        slots,
                        frame: *frame,
                    };
                    self.call(*routine, call, inputs.examines, seat)?;
                }
                Step::Send { to, buffer } => {
                    let range = range(buffer_of(program, *buffer));
                    self.send(self.peer(*to), range, seat.memory.device())?;
                    self.waited += start.elapsed();
                }
                Step::Receive { from, buffer } => {
                    let range = range(buffer_of(program, *buffer));
                    self.receive(self.peer(*from), range, seat.memory.device())?;
                    self.waited += start.elapsed();
                }
                Step::Move { from, to } => {
                    let ends = [*from, *to].map(|buffer| extent(program, buffer));
                    seat.memory.begin_move(self.mover(), ends)?;
                }
                Step::Await { buffer } => {
                    seat.memory.wait(self.mover(), &extent(program, *buffer))?;
                    self.waited += start.elapsed();
                }
            }
            if self.tracing != Tracing::None {
                seat.memory.synchronize()?;
                seat.spans.push(self.span(start));
            }
        }
        Ok(())
    }

    fn send(&self, peer: usize, range: Range<usize>, mut device: Device<'_>) -> Result<(), Stop> {
        if !self.here.contains(&peer) {
            let sent = device.read(range, |bytes| self.communicator.send(peer, bytes))?;
            return Ok(sent?);
        }
        match device {
            Device::Host(arena) => self.communicator.send(peer, arena.bytes(range))?,
            Device::Gpu(gpu) => {
                gpu.send(peer, range)?;
                // The receiver is told that it is on its way.
                self.communicator.send(peer, &[])?;
            }
        }
        Ok(())
    }

    fn receive(
        &self,
        peer: usize,
        range: Range<usize>,
        mut device: Device<'_>,
    ) -> Result<(), Stop> {
        if !self.here.contains(&peer) {
            let received = device.fill(range, |bytes| self.communicator.receive(peer, bytes))?;
            return Ok(received?);
        }
        match device {
            Device::Host(arena) => self.communicator.receive(peer, arena.bytes_mut(range))?,
            Device::Gpu(gpu) => {
                self.communicator.receive(peer, &mut [])?;
                gpu.receive(peer, range)?;
            }
        }
        Ok(())
    }

    fn mover(&mut self) -> &mut Mover {
        let Some(mover) = &mut self.mover else {
            unreachable!("what is copied lies in two memory spaces");
        };
        mover
    }

    /// The rank at the same place of another stage.
    fn peer(&self, stage: usize) -> usize {
        self.classes.mesh.along(self.rank, Axis::Pp, stage)
    }

    fn span(&self, start: Instant) -> Span {
        Span {
            step: self.at.0,
            instruction: self.at.1,
            start_s: start.duration_since(self.epoch).as_secs_f64(),
            seconds: start.elapsed().as_secs_f64(),
        }
    }

    fn feed(
        &self,
        phase: Phase,
        (feed, microbatch): (Feed, usize),
        dtype: DType,
        inputs: &Inputs,
        target: &mut [u8],
    ) {
        let samples = self.samples[phase.index()];
        let first = samples.map_or(0, |samples| samples.first(microbatch, self.data));
        let rows = |source: &[i32], target: &mut [u8]| {
            let samples = samples.expect("who feeds tokens, labels or documents has samples");
            let start = first * samples.seq;
            let pieces = tokens_of(self.classes.mesh, self.rank, samples.seq);
            let rows = source[start..].chunks(samples.seq).take(samples.size);
            let own = rows.flat_map(|row| pieces.iter().map(|piece| &row[piece.clone()]));
            put(&own.collect::<Vec<_>>().concat(), i32::to_le_bytes, target);
        };
        let scalars = inputs.scalars;
        match feed {
            Feed::Tokens => rows(&inputs.tokens, target),
            Feed::Labels => rows(&inputs.labels, target),
            Feed::Documents => rows(&inputs.documents, target),
            Feed::Key { path } => {
                let words = [scalars.seed, scalars.step, path, first as u32];
                put(&words, u32::to_le_bytes, target);
            }
            Feed::Scalars => {
                let values = in_order(scalars);
                if dtype == DType::F64 {
                    put(&values, f64::to_le_bytes, target);
                } else {
                    assert_eq!(dtype, DType::F32, "scalars are f32 or f64");
                    put(&values, |x| (x as f32).to_le_bytes(), target);
                }
            }
            Feed::Position => {
                let samples = samples.expect("who feeds positions has samples");
                put(&inputs.positions[first..first + samples.size], i32::to_le_bytes, target);
            }
            Feed::Last => put(&[inputs.last], i32::to_le_bytes, target),
        }
    }

    fn call(
        &mut self,
        index: usize,
        call: Call<'_>,
        examines: bool,
        seat: &mut Seat,
    ) -> Result<(), Stop> {
        let step = self.at.0;
        for (position, instruction) in call.routine.instructions.iter().enumerate() {
            if self.course.is_abandoned() {
                return Err(Stop::Abandoned);
            }
            self.at = (step, Some(position));
            let start = Instant::now();
            match instruction {
                Instruction::Launch { kernel, scalars, inputs, outputs, workspace } => {
                    self.inputs.clear();
                    self.inputs.extend(inputs.iter().map(|&r| call.range(r)));
                    self.outputs.clear();
                    self.outputs.extend(outputs.iter().map(|&r| call.range(r)));
                    let workspace = workspace.map(|there| call.range(there));
                    let arguments = [&self.inputs[..], &self.outputs[..]];
                    match (seat.memory.device(), &mut self.host) {
                        (Device::Gpu(gpu), _) => {
                            gpu.launch(*kernel, scalars, arguments, workspace)?;
                        }
                        (Device::Host(arena), Some(Host { device, launches })) => {
                            let prepared = launches.at_mut(index, position);
                            arena.launch(&mut **device, prepared, arguments, workspace);
                        }
                        (Device::Host(_), None) => unreachable!("a rank has a device"),
                    }
                    if examines && self.found.is_none_or(|found| found.is_mask_like) {
                        seat.memory.synchronize()?;
                        self.examine(*kernel, (step, position), &seat.memory)?;
                    }
                }
                Instruction::Collective {
                    exchange,
                    dtype,
                    exchanged,
                    elements,
                    input,
                    output,
                    gates,
                    ..
                } => {
                    let wire = self.wires[index][position].as_ref();
                    let wire = wire.expect("every collective is wired");
                    let ranges = [call.range(*input), call.range(*output)];
                    let ranges = (ranges, gates.map(|gates| call.range(gates)));
                    let types = Types { dtype: *dtype, exchanged: *exchanged };
                    let exchange = (exchange, types, *elements);
                    self.exchange(wire, exchange, ranges, seat.memory.device())?;
                    self.waited += start.elapsed();
                }
            }
            self.communicator.advance();
            if self.tracing == Tracing::Instructions {
                seat.memory.synchronize()?;
                seat.spans.push(self.span(start));
            }
        }
        self.at = (step, None);
        Ok(())
    }

    /// Looks for values that are not finite in what the last launch wrote.
    fn examine(
        &mut self,
        kernel: usize,
        (step, position): (usize, usize),
        memory: &Memory,
    ) -> Result<(), cuda::context::Failure> {
        let outputs = self.classes.kernels[kernel].outputs();
        for (output, argument) in outputs.iter().enumerate() {
            let range = Extent { arena: DEVICE, range: self.outputs[output].clone() };
            let bytes = memory.read(range)?;
            let found = finite::look(&bytes, argument.dtype, (step, position, output));
            let is_worse = |found: &Found| self.found.is_none() || !found.is_mask_like;
            if let Some(found) = found.filter(is_worse) {
                self.found = Some(found);
                return Ok(());
            }
        }
        Ok(())
    }

    /// The place of this rank among the members of a group.
    fn place_in(&self, group: &communicator::Group) -> usize {
        group.position(self.rank).expect("a rank exchanges in its own groups")
    }

    fn exchange(
        &self,
        wire: &Wire,
        (exchange, types, elements): (&Exchange, Types, usize),
        ([input, output], gates): ([Range<usize>; 2], Option<Range<usize>>),
        mut device: Device<'_>,
    ) -> Result<(), Stop> {
        let dtype = types.dtype;
        let cut = |range, elements| cut(range, elements * dtype.size() as usize);
        let (group, communicator) = (&wire.group, &*self.communicator);
        if let Device::Gpu(gpu) = &mut device
            && let Some(collective) = wire.collective(exchange)
            && gpu.is_connected(group)
            && Nccl::has(&collective, types)
        {
            let received = collective.received(elements, self.place_in(group));
            let ranges = [cut(input, elements), cut(output, received)];
            return Ok(gpu.exchange(group, &collective, dtype, ranges)?);
        }
        let blocks = || wire.blocks.as_ref().expect("gathers and scatters have blocks");
        match exchange {
            Exchange::AllReduce(combiner) => {
                assert_eq!(input.start, output.start, "an all-reduce works in place");
                device.change(cut(output, elements), |buffer| {
                    communicator.all_reduce(group, types, combine(*combiner), buffer)
                })
            }
            Exchange::AllGather { .. } => {
                let blocks = blocks();
                let ranges = ([cut(input, elements)], cut(output, blocks.total()));
                device.split(ranges.0, ranges.1, |[send], receive| {
                    communicator.all_gather(group, dtype, blocks, send, receive)
                })
            }
            Exchange::ReduceScatter { .. } => {
                let blocks = blocks();
                let own = blocks.piece(self.place_in(group));
                let ranges = ([cut(input, elements)], cut(output, own));
                let sum = communicator::Combiner::Sum;
                device.split(ranges.0, ranges.1, |[send], receive| {
                    communicator.reduce_scatter(group, types, sum, blocks, send, receive)
                })
            }
            Exchange::AllToAll { .. } => {
                let ranges = ([cut(input, elements)], cut(output, elements));
                device.split(ranges.0, ranges.1, |[send], receive| {
                    communicator.all_to_all(group, dtype, send, receive)
                })
            }
            Exchange::Dispatch(routed) | Exchange::Combine(routed) => {
                let (Some(gates), Some([own, all, of_gates])) = (gates, routed.elements()) else {
                    unreachable!("bounds: buffers hold tokens and their gates");
                };
                let is_combined = matches!(exchange, Exchange::Combine(_));
                let received = if is_combined { own } else { all };
                let read = [cut(input, elements), cut(gates, of_gates)];
                let Routed { rows, width, experts, .. } = *routed;
                device.split(read, cut(output, received), |[send, gates], receive| {
                    let tokens = Tokens { rows, width, experts, gates };
                    match is_combined {
                        true => communicator.combine(group, dtype, &tokens, send, receive),
                        false => communicator.dispatch(group, dtype, &tokens, send, receive),
                    }
                })
            }
        }??;
        Ok(())
    }
}

impl Call<'_> {
    /// Where a value of the call is in the arena.
    fn range(&self, value: Ref) -> Range<usize> {
        match value {
            Ref::Slot(slot) => range(buffer_of(self.program, self.slots[slot as usize])),
            Ref::Local(local) => {
                let local = &self.routine.locals[local as usize];
                let frame = self.frame.expect("a routine with locals is called with a frame");
                let frame = range(buffer_of(self.program, frame));
                let start = frame.start + local.offset as usize;
                let end = start + local.bytes as usize;
                assert!(end <= frame.end, "locals lie in their frame");
                start..end
            }
        }
    }
}

/// The first bytes of a buffer of a collective.
fn cut(range: Range<usize>, bytes: usize) -> Range<usize> {
    let end = range.start + bytes;
    assert!(end <= range.end, "a collective's buffers hold its elements");
    range.start..end
}

/// The scalars in the order of the feed.
fn in_order(scalars: super::Scalars) -> [f64; 5] {
    let super::Scalars { rate, correction1, correction2, clip, loss_scale, .. } = scalars;
    [rate, correction1, correction2, clip, loss_scale]
}

/// Which tokens of a sample a rank is fed.
fn tokens_of(mesh: Mesh, rank: usize, tokens: usize) -> Vec<Range<usize>> {
    if mesh.cp == 1 {
        return vec![0..tokens];
    }
    let shares = Axis::Cp.piece_order().shares(tokens, 1, mesh.cp);
    let mut shares = shares.expect("a program that cuts samples cuts them into equal pieces");
    let own = shares.swap_remove(mesh.coordinate(rank, Axis::Cp)).into_iter();
    own.map(|piece| piece.start..piece.start + piece.size).collect()
}

/// Writes numbers as little-endian bytes.
fn put<T: Copy, const N: usize>(values: &[T], to: impl Fn(T) -> [u8; N], target: &mut [u8]) {
    assert_eq!(values.len() * N, target.len(), "a feed fills its buffer");
    for (&value, target) in values.iter().zip(target.as_chunks_mut().0) {
        *target = to(value);
    }
}

/// What the communicator wants to know about an instruction; none for a launch.
fn wire(mesh: Mesh, rank: usize, instruction: &Instruction) -> Option<Wire> {
    let Instruction::Collective { exchange, group, .. } = instruction else { return None };
    let blocks = match exchange {
        Exchange::AllReduce(_)
        | Exchange::AllToAll { .. }
        | Exchange::Dispatch(_)
        | Exchange::Combine(_) => None,
        Exchange::AllGather { outer, inner, counts, order }
        | Exchange::ReduceScatter { outer, inner, counts, order } => {
            let (outer, inner, order) = (*outer, *inner, *order);
            Some(Blocks { outer, inner, counts: counts.clone(), order })
        }
    };
    Some(Wire { group: communicator::Group::new(0, members(mesh, rank, group)), blocks })
}

/// The ranks of a group that a rank is in.
fn members(mesh: Mesh, rank: usize, group: &Group) -> Vec<usize> {
    let along = |axis| move |at| mesh.along(rank, axis, at);
    let data = |index| mesh.along_data(rank, index);
    match group {
        Group::World => (0..mesh.ranks()).collect(),
        Group::Stages(stages) => stages.iter().copied().map(along(Axis::Pp)).collect(),
        Group::Axis(axis) => (0..mesh.size(*axis)).map(along(*axis)).collect(),
        Group::Data => (0..mesh.data_ranks()).map(data).collect(),
        Group::Shards(count) => {
            let first = mesh.data_index(rank) / count * count;
            (first..first + count).map(data).collect()
        }
        Group::Experts(count) => {
            let on_data = count / mesh.tp;
            let first = mesh.data_index(rank) / on_data * on_data;
            let of_place = |tensor| {
                let with = mesh.along(rank, Axis::Tp, tensor);
                (first..first + on_data).map(move |index| mesh.along_data(with, index))
            };
            (0..mesh.tp).flat_map(of_place).collect()
        }
        Group::Strided { count, stride } => {
            let index = mesh.data_index(rank);
            let first = index / (count * stride) * (count * stride) + index % stride;
            (first..first + count * stride).step_by(*stride).map(data).collect()
        }
        Group::Copies(count) => {
            let own = mesh.data_index(rank) % count;
            (own..mesh.data_ranks()).step_by(*count).map(data).collect()
        }
    }
}

fn combine(combiner: Combiner) -> communicator::Combiner {
    match combiner {
        Combiner::Sum => communicator::Combiner::Sum,
        Combiner::Max => communicator::Combiner::Max,
        Combiner::Min => communicator::Combiner::Min,
    }
}

/// What a panic said.
pub(super) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
