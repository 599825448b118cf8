//! The bytes of a rank, by what holds them: of programs that are compiled, and of a plan, for which
//! no more is compiled than it takes to know.

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use ir::program::{Buffer, BufferId, Contents, Instruction, Ref, ShardRole, Step};
use ir::{Module, Plan, Program, Target, ValueId};
use kernels::{Bytes, Kernel, price};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::calls::{Call, Calls, Operand};
use crate::compile::Compiler;
use crate::crossing::crossing;
pub use crate::executable::{BUFFERS_MAX, NotYet};
use crate::schedule::Pipeline;

/// The bytes of one rank. Activations and frames share room over time: their sum may be more than
/// what the arena needs for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Footprint {
    /// The pipeline stage, from 0.
    #[serde(default)]
    pub stage: usize,
    /// Parameters.
    pub params: u64,
    /// What narrow parameters are rounded from.
    #[serde(default)]
    pub masters: u64,
    /// Gradients.
    pub grads: u64,
    /// Optimizer state.
    pub states: u64,
    /// Keys and values that decoding keeps.
    #[serde(default)]
    pub caches: u64,
    /// Everything else in the arena: what a micro-batch leaves for its backward pass, what calls
    /// need while they run, what is fed.
    pub activations: u64,
    /// Of `activations`: bytes in which only scratch memory of calls lies.
    #[serde(default)]
    pub working: u64,
    /// Of `activations`: bytes in which operands of collectives lie, and nothing that outlives a
    /// call.
    #[serde(default)]
    pub communication: u64,
    /// The whole arena, exactly.
    pub arena: u64,
    /// Scratch of kernels beside the arena, on CPUs; on GPUs it lies in the arena.
    pub workspace: u64,
    /// Messages that the rank has sent and nobody has taken yet, at most.
    #[serde(default)]
    pub mailboxes: u64,
    /// What the plan places in the memory of the host, where that is not the rank's own.
    #[serde(default)]
    pub host: u64,
    /// The same where it is: beside the arenas of CPUs.
    #[serde(default)]
    pub offloaded: u64,
    /// What the plan places on a disk.
    #[serde(default)]
    pub disk: u64,
}

impl Footprint {
    /// The footprints of the programs of all classes of ranks, in their order. `kernels` are those
    /// that they launch on a target, on `threads` threads of a rank where that is a CPU, as it is
    /// where there is none.
    pub fn of_all<P: Borrow<Program>>(
        programs: &[P],
        kernels: &[Kernel],
        target: Option<Target>,
        threads: usize,
    ) -> Vec<Footprint> {
        let is_host = target.and_then(Target::arch).is_none();
        let of = |program: &P| {
            let own = Footprint::of(program.borrow());
            let [host, offloaded] = if is_host { [0, own.host] } else { [own.host, 0] };
            let workspace = workspace(program.borrow(), kernels, target, threads);
            let mailboxes = mailbox_bytes(program.borrow(), programs);
            Footprint { host, offloaded, workspace, mailboxes, ..own }
        };
        programs.iter().map(of).collect()
    }

    /// The footprint of a program of GPUs, but for its messages and workspaces.
    fn of(program: &Program) -> Footprint {
        let (stage, arena) = (program.stage, program.arena_bytes);
        let mut footprint = Footprint { stage, arena, ..Footprint::default() };
        let splits_gradients = program.splits_gradients();
        (footprint.host, footprint.disk) = (program.host_bytes, program.disk_bytes);
        for buffer in on_device(program) {
            match buffer.contents {
                Contents::Param(_) => footprint.params += buffer.bytes,
                Contents::Master(_) => footprint.masters += buffer.bytes,
                Contents::Grad(_) => footprint.grads += buffer.bytes,
                Contents::State { .. } | Contents::Scale { .. } => {
                    footprint.states += buffer.bytes;
                }
                Contents::Shard { role, .. } => match role {
                    ShardRole::Master => footprint.masters += buffer.bytes,
                    ShardRole::State(_) | ShardRole::Scale(_) => footprint.states += buffer.bytes,
                    ShardRole::Param => footprint.params += buffer.bytes,
                    ShardRole::Grad if splits_gradients => footprint.grads += buffer.bytes,
                    // They lie where activations were.
                    ShardRole::Grad | ShardRole::Term | ShardRole::Rounded => {}
                },
                Contents::Cache(_) => footprint.caches += buffer.bytes,
                Contents::Gathered { .. }
                | Contents::Term { .. }
                | Contents::Feed(_)
                | Contents::Stats
                | Contents::Output
                | Contents::Activation
                | Contents::Frame
                | Contents::View
                | Contents::Part { .. } => {}
            }
        }
        let Footprint { params, masters, grads, states, caches, .. } = footprint;
        let persistent = params + masters + grads + states + caches;
        footprint.activations = footprint.arena.saturating_sub(persistent);
        [footprint.working, footprint.communication] = scratch(program);
        footprint
    }

    /// Bytes of `activations` in which something lies that outlives a call, or that is fed.
    pub fn kept(&self) -> u64 {
        self.activations.saturating_sub(self.working + self.communication)
    }

    /// All bytes in the memory of the rank.
    pub fn total(&self) -> u64 {
        self.arena + self.workspace + self.mailboxes + self.offloaded
    }

    /// What holds bytes, the most first.
    pub fn holders(&self) -> Vec<(&'static str, Bytes)> {
        let mut holders = vec![
            ("parameters", Bytes(self.params)),
            ("master weights", Bytes(self.masters)),
            ("gradients", Bytes(self.grads)),
            ("optimizer state", Bytes(self.states)),
            ("caches", Bytes(self.caches)),
            ("activations", Bytes(self.activations)),
            ("workspaces", Bytes(self.workspace)),
            ("mailboxes", Bytes(self.mailboxes)),
            ("offloaded to the host", Bytes(self.offloaded)),
        ];
        holders.retain(|(name, bytes)| {
            let is_usual = ["parameters", "gradients", "optimizer state", "activations"];
            is_usual.contains(name) || bytes.0 > 0
        });
        holders.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        holders
    }
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> =
            self.holders().iter().map(|(name, bytes)| format!("{name} {bytes}")).collect();
        f.write_str(&parts.join(" · "))
    }
}

/// Scratch of a program's kernels beside the arena on `threads` threads of a rank: they run one
/// after the other. On GPUs it lies in frames.
fn workspace(program: &Program, kernels: &[Kernel], target: Option<Target>, threads: usize) -> u64 {
    if target.and_then(Target::arch).is_some() {
        return 0;
    }
    let instructions = program.routines.iter().flat_map(|r| &r.instructions);
    let bytes = |instruction: &Instruction| match instruction {
        Instruction::Launch { kernel, .. } => {
            price::workspace(&kernels[*kernel], target, threads).0
        }
        Instruction::Collective { .. } => 0,
    };
    instructions.map(bytes).max().unwrap_or(0)
}

/// The buffers in the device's memory.
fn on_device(program: &Program) -> impl Iterator<Item = &Buffer> {
    program.buffers.iter().filter(|buffer| buffer.offset + buffer.bytes <= program.arena_bytes)
}

/// The bytes of the arena in which only scratch memory of calls lies, and those in which operands
/// of collectives lie and nothing that outlives a call.
fn scratch(program: &Program) -> [u64; 2] {
    let range = |buffer: &Buffer| [buffer.offset, buffer.offset + buffer.bytes];
    let splits_gradients = program.splits_gradients();
    let passes = |role: ShardRole| match role {
        ShardRole::Grad => !splits_gradients,
        ShardRole::Term | ShardRole::Rounded => true,
        ShardRole::Master | ShardRole::Param | ShardRole::State(_) | ShardRole::Scale(_) => false,
    };
    let kept = on_device(program).filter(|buffer| match &buffer.contents {
        Contents::Frame
        | Contents::View
        | Contents::Part { .. }
        | Contents::Gathered { .. }
        | Contents::Term { .. } => false,
        Contents::Shard { role, .. } => !passes(*role),
        Contents::Param(_)
        | Contents::Master(_)
        | Contents::Grad(_)
        | Contents::State { .. }
        | Contents::Scale { .. }
        | Contents::Feed(_)
        | Contents::Stats
        | Contents::Cache(_)
        | Contents::Output
        | Contents::Activation => true,
    });
    let mut ranges: Vec<[u64; 2]> = kept.map(range).collect();
    let kept = covered(&mut ranges);
    let exchanged = program.buffers.iter().filter(|buffer| {
        let is_piece = matches!(&buffer.contents, Contents::Shard { role, .. } if passes(*role));
        is_piece || buffer.contents.passing().is_some()
    });
    ranges.extend(exchanged.map(range));
    let steps = program.steps.iter().chain(&program.evaluate);
    let steps = steps.chain(program.entries.iter().flat_map(|entry| &entry.steps));
    let calls: BTreeSet<(usize, BufferId)> = steps.filter_map(call).collect();
    for (routine, frame) in &calls {
        let routine = &program.routines[*routine];
        let start = program.buffers[frame.0 as usize].offset;
        for instruction in &routine.instructions {
            let Instruction::Collective { input, output, gates, .. } = instruction else {
                continue;
            };
            for operand in [input, output].into_iter().chain(gates) {
                let Ref::Local(at) = *operand else { continue };
                let local = &routine.locals[at as usize];
                ranges.push([start + local.offset, start + local.offset + local.bytes]);
            }
        }
    }
    let communicated = covered(&mut ranges);
    let frames = program.buffers.iter().filter(|buffer| buffer.contents == Contents::Frame);
    ranges.extend(frames.map(range));
    [covered(&mut ranges) - communicated, communicated - kept]
}

/// The routine and the frame of a call.
fn call(step: &Step) -> Option<(usize, BufferId)> {
    match step {
        Step::Call { routine, frame, .. } => Some((*routine, (*frame)?)),
        Step::Feed { .. }
        | Step::Send { .. }
        | Step::Receive { .. }
        | Step::Move { .. }
        | Step::Await { .. } => None,
    }
}

/// The length of the union of ranges, which are sorted.
fn covered(ranges: &mut [[u64; 2]]) -> u64 {
    ranges.sort_unstable();
    let (mut length, mut end) = (0, 0);
    for [start, stop] in ranges {
        length += stop.saturating_sub(end.max(*start));
        end = end.max(*stop);
    }
    length
}

/// Bytes of the messages that a class has sent and that wait to be taken, at most.
///
/// A message is copied when it is sent, so that the sender goes on. How far it may run ahead
/// follows from what it has received: the `j`-th message back was sent after the receiver had taken
/// all that its program takes before it.
fn mailbox_bytes<P: Borrow<Program>>(program: &Program, programs: &[P]) -> u64 {
    let is_peer = |p: &&Program| p.place()[1..] == program.place()[1..];
    let peers = programs.iter().map(Borrow::borrow).filter(is_peer);
    let phases: [fn(&Program) -> &[Step]; 2] = [|p| &p.steps, |p| &p.evaluate];
    let to = |peer: &Program| {
        let of_phase = |steps: &fn(&Program) -> &[Step]| {
            waiting_bytes(program, steps(program), (peer.stage, steps(peer)))
        };
        phases.iter().map(of_phase).max().unwrap_or(0)
    };
    peers.map(to).sum()
}

fn waiting_bytes(program: &Program, steps: &[Step], (peer, theirs): (usize, &[Step])) -> u64 {
    // For each message back, how many the peer has taken before.
    let mut taken = vec![0];
    let mut count = 0;
    for step in theirs {
        if matches!(step, Step::Receive { from, .. } if *from == program.stage) {
            count += 1;
        } else if matches!(step, Step::Send { to, .. } if *to == program.stage) {
            taken.push(count);
        }
    }
    let (mut sent, mut received, mut most) = (0u64, 0, 0);
    for step in steps {
        if matches!(step, Step::Receive { from, .. } if *from == peer) {
            received += 1;
        } else if let Step::Send { to, buffer } = step
            && *to == peer
        {
            sent += 1;
            let bytes = program.buffers[buffer.0 as usize].bytes;
            most = most.max((sent - taken[received]) * bytes);
        }
    }
    most
}

/// The footprint of the rank of a plan that holds the most, as its program would have it; see
/// [`Compiler::footprint`].
///
/// # Errors
/// Those of [`Compiler::footprint`], and an entry that is no list of calls.
pub fn footprint(module: &Module, entry: &str, plan: &Plan) -> Result<Footprint, NotYet> {
    Compiler::new(module, entry)?.footprint(plan)
}

impl Compiler<'_> {
    /// The footprint of the rank of a plan that holds the most, without mailboxes and the
    /// workspaces of CPUs, which depend on threads.
    ///
    /// Of stages whose calls are alike one program is made, for the first of them, which has most
    /// micro-batches in flight; of tensor-parallel ranks that of the first, whose pieces are the
    /// largest; of the step, one micro-batch.
    ///
    /// **Cost.** That of compiling each layer once, and of placing buffers: in proportion to the
    /// square of kept values times micro-batches in flight, of which there may be
    /// [`BUFFERS_MAX`].
    ///
    /// # Errors
    /// What no program carries out, the first node without a kernel, or more values than are
    /// placed.
    pub fn footprint(&mut self, plan: &Plan) -> Result<Footprint, NotYet> {
        crate::executable::check_executable(plan)?;
        let mut most = Footprint::default();
        for stage in distinct_stages(self.calls(), plan) {
            let program = self.skeleton(plan, stage)?;
            let own = Footprint::of(&program);
            if own.total() > most.total() {
                most = own;
            }
        }
        Ok(most)
    }
}

/// The first of each kind of stages: those of one kind have equal calls, and later ones no more
/// micro-batches in flight.
fn distinct_stages(calls: &Calls, plan: &Plan) -> Vec<usize> {
    let pipeline = Pipeline::of(plan);
    let mut seen: Vec<(Vec<ChunkKind<'_>>, Vec<usize>)> = Vec::new();
    let mut distinct = Vec::new();
    for stage in 0..plan.mesh.pp {
        let kind: Vec<ChunkKind<'_>> =
            plan.chunks_of(stage).map(|chunk| ChunkKind::of(calls, plan, chunk)).collect();
        let mut held = pipeline.in_flight(stage);
        held.push(pipeline.most_held(stage, &vec![1; pipeline.chunks]) as usize);
        let covers = |most: &[usize]| held.iter().zip(most).all(|(held, most)| held <= most);
        if !seen.iter().any(|(other, most)| *other == kind && covers(most)) {
            seen.push((kind, held));
            distinct.push(stage);
        }
    }
    distinct
}

/// All of a chunk that buffers depend on, but for the micro-batches in flight.
#[derive(PartialEq)]
struct ChunkKind<'c> {
    /// For each call its function and what it keeps.
    calls: Vec<(&'c str, ir::plan::Keep)>,
    /// Operands and results of all calls, then what arrives and what leaves: by where each was
    /// mentioned first.
    mentions: Vec<usize>,
    /// Whether weights and results are the entry's own, or held elsewhere too.
    is_shared: Vec<bool>,
}

impl<'c> ChunkKind<'c> {
    fn of(calls: &'c Calls, plan: &Plan, chunk: usize) -> ChunkKind<'c> {
        let Range { start: begin, end } = plan.calls_of(chunk);
        let end = end.min(calls.calls.len());
        let own = &calls.calls[begin.min(end)..end];
        let numbers = calls.numbers();
        let keep = |(call, number): (&'c Call, &usize)| {
            let planned = plan.functions.get(&call.function);
            (&*call.function, planned.map_or(ir::plan::Keep::Full, |f| f.keep_of(*number)))
        };
        let kept = own.iter().zip(&numbers[begin.min(end)..end]).map(keep).collect();
        let mut names: Vec<Operand> = Vec::new();
        let mut mention = |operand: Operand| {
            // Keys differ from call to call, and are as large.
            let operand =
                if matches!(operand, Operand::Key(_)) { Operand::Key(0) } else { operand };
            names.iter().position(|name| *name == operand).unwrap_or_else(|| {
                names.push(operand);
                names.len() - 1
            })
        };
        let mut mentions = Vec::new();
        let mut is_shared = Vec::new();
        let elsewhere = |weight: usize| {
            let before = calls.calls[..begin.min(end)].iter();
            let mut others = before.chain(&calls.calls[end..]).flat_map(|call| &call.operands);
            others.any(|operand| *operand == Operand::Weight(weight))
        };
        let is_result = |value: &ValueId| calls.results.contains(value);
        for call in own {
            for operand in &call.operands {
                mentions.push(mention(*operand));
                if let Operand::Weight(weight) = operand {
                    is_shared.push(elsewhere(*weight));
                }
            }
            mentions.extend(call.results.iter().map(|value| mention(Operand::Value(*value))));
            is_shared.extend(call.results.iter().map(is_result));
        }
        for at in [begin, end] {
            let values = crossing(calls, at);
            mentions.push(values.len());
            mentions.extend(values.into_iter().map(|value| mention(Operand::Value(value))));
        }
        ChunkKind { calls: kept, mentions, is_shared }
    }
}
