//! Runs of several processes, on one machine or on many: which of them this is, how they meet, and
//! the connections between them.
//!
//! They are started by what clusters have for it (`srun`, `mpirun`, `torchrun`, Kubernetes), all
//! with the same command, and each has a range of the ranks. The first one leads: it reads files
//! and data, plans, compiles and writes checkpoints; the others need nothing but its address.
//! Every two processes have a TCP connection, on which frames travel; a thread of its own reads
//! each, so that whoever sends never waits for what the receiver does.
//!
//! Where `GANTLINE_SECRET` is set, whoever comes has to know it; else whoever reaches the first
//! one's port is taken for one of them, as with `torch.distributed`.

mod frame;
mod launch;
mod bootstrap;
mod transport;

pub use bootstrap::{Bootstrap, Peers};
pub use launch::{LAUNCHERS, Launch, Launcher};
pub use transport::{Handler, TcpTransport, ranks_of};

use crate::error::Error;

fn refusal(reason: String, help: &str) -> Error {
    Error::Processes { reason, help: help.to_owned() }
}
