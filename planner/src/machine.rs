//! The machine that this runs on: read once, written into the cluster.

use std::fs;

use serde::{Deserialize, Serialize};

/// What a CPU cluster takes from the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Threads that run at once.
    pub cores: usize,
    /// Bytes of memory that this process may use.
    pub memory_bytes: u64,
    /// The widest instruction set.
    pub instruction_set: String,
}

impl Machine {
    /// Reads the machine. A container's limits count.
    pub fn detect() -> Machine {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Machine { cores, memory_bytes: memory_bytes(), instruction_set: instruction_set() }
    }
}

fn instruction_set() -> String {
    format!("{:?}", kernels::cpu::Isa::detect()).to_lowercase()
}

/// The smaller one of the machine's memory and the group's limit; 1 GiB where neither can be read.
fn memory_bytes() -> u64 {
    let total = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|l| l.starts_with("MemTotal:"))?;
        let kibibytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kibibytes * 1024)
    });
    let limit = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limits = [
        limit("/sys/fs/cgroup/memory.max"),
        limit("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        total,
    ];
    limits.into_iter().flatten().min().unwrap_or(1 << 30)
}
