//! The bytes of a rank, by what holds them.

use std::borrow::Borrow;
use std::fmt;

use ir::Program;
use ir::program::{Contents, Instruction, ShardRole, Step};
use kernels::{Bytes, Kernel, price};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cluster::Memory;

/// The bytes of one rank. Activations and frames share room over time: their sum may be more than
/// what the arena needs for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Footprint {
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
    /// The whole arena, exactly.
    pub arena: u64,
    /// Scratch of kernels beside the arena.
    pub workspace: u64,
    /// Messages that the rank has sent and nobody has taken yet, at most.
    #[serde(default)]
    pub mailboxes: u64,
}

impl Footprint {
    /// The footprints of the programs of all classes of ranks, in their order. `kernels` are those
    /// that they launch, on `threads` threads of a rank.
    pub fn of_all<P: Borrow<Program>>(
        programs: &[P],
        kernels: &[Kernel],
        threads: usize,
    ) -> Vec<Footprint> {
        let of = |program: &P| Footprint {
            mailboxes: mailbox_bytes(program.borrow(), programs),
            ..Footprint::of(program.borrow(), kernels, threads)
        };
        programs.iter().map(of).collect()
    }

    /// The footprint of a program, but for its messages.
    fn of(program: &Program, kernels: &[Kernel], threads: usize) -> Footprint {
        let mut footprint = Footprint { arena: program.arena_bytes, ..Footprint::default() };
        let instructions = program.routines.iter().flat_map(|r| &r.instructions);
        let workspace = |instruction: &Instruction| match instruction {
            Instruction::Launch { kernel, .. } => price::workspace(&kernels[*kernel], threads).0,
            Instruction::Collective { .. } => 0,
        };
        footprint.workspace = instructions.map(workspace).max().unwrap_or(0);
        for buffer in &program.buffers {
            match buffer.contents {
                Contents::Param(_) => footprint.params += buffer.bytes,
                Contents::Master(_) => footprint.masters += buffer.bytes,
                Contents::Grad(_) => footprint.grads += buffer.bytes,
                Contents::State { .. } => footprint.states += buffer.bytes,
                Contents::Shard { role, .. } => match role {
                    ShardRole::Master => footprint.masters += buffer.bytes,
                    ShardRole::State(_) => footprint.states += buffer.bytes,
                    // They lie where activations were.
                    ShardRole::Grad | ShardRole::Rounded => {}
                },
                Contents::Cache(_) => footprint.caches += buffer.bytes,
                Contents::Feed(_)
                | Contents::Stats
                | Contents::Output
                | Contents::Activation
                | Contents::Frame
                | Contents::View => {}
            }
        }
        let Footprint { params, masters, grads, states, caches, .. } = footprint;
        let persistent = params + masters + grads + states + caches;
        footprint.activations = footprint.arena.saturating_sub(persistent);
        footprint
    }

    /// All bytes.
    pub fn total(&self) -> u64 {
        self.arena + self.workspace + self.mailboxes
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
        ];
        holders.retain(|(name, bytes)| {
            !["master weights", "caches", "mailboxes"].contains(name) || bytes.0 > 0
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

/// Bytes of the messages that a class has sent and that wait to be taken, at most.
///
/// A message is copied when it is sent, so that the sender goes on. How far it may run ahead
/// follows from what it has received: the `j`-th message back was sent after the receiver had taken
/// all that its program takes before it.
fn mailbox_bytes<P: Borrow<Program>>(program: &Program, programs: &[P]) -> u64 {
    let peers =
        programs.iter().map(Borrow::borrow).filter(|p: &&Program| p.tensor == program.tensor);
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
        match step {
            Step::Receive { from, .. } if *from == program.stage => count += 1,
            Step::Send { to, .. } if *to == program.stage => taken.push(count),
            Step::Receive { .. } | Step::Send { .. } | Step::Feed { .. } | Step::Call { .. } => {}
        }
    }
    let (mut sent, mut received, mut most) = (0u64, 0, 0);
    for step in steps {
        match step {
            Step::Receive { from, .. } if *from == peer => received += 1,
            Step::Send { to, buffer } if *to == peer => {
                sent += 1;
                let bytes = program.buffers[buffer.0 as usize].bytes;
                most = most.max((sent - taken[received]) * bytes);
            }
            Step::Receive { .. } | Step::Send { .. } | Step::Feed { .. } | Step::Call { .. } => {}
        }
    }
    most
}

/// The bytes that ranks need in the fullest place (a rank or a node), and the bytes that it has.
/// `footprints` are those of all classes, each of `dp` ranks, on `nodes` nodes.
pub fn fullest(
    footprints: &[Footprint],
    dp: usize,
    (memory, nodes): (Memory, usize),
) -> (Bytes, Bytes) {
    match memory {
        Memory::PerRank(have) => {
            let most = footprints.iter().map(Footprint::total).max().unwrap_or(0);
            (Bytes(most), Bytes(have))
        }
        Memory::PerNode(have) => {
            let all: u64 = footprints.iter().map(|f| f.total() * dp as u64).sum();
            (Bytes(all.div_ceil(nodes as u64)), Bytes(have))
        }
    }
}
