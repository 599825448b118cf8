//! Occupancy: how many blocks of a function a multiprocessor holds at once.
//!
//! Limits are those of the CUDA programming guide's table of compute capabilities; what is handed
//! out at a time, registers of a warp by 256 and warps by four, is that of NVIDIA's occupancy
//! calculator.

use std::fmt;

use ir::target::Arch;

/// Lanes of a warp.
const LANES: u32 = 32;
/// Registers of a multiprocessor.
const REGISTERS: u32 = 65536;
/// Registers that are handed out to a warp at a time.
const REGISTERS_AT_ONCE: u32 = 256;
/// Warps whose registers are handed out together: one for each quarter of a multiprocessor.
const WARPS_AT_ONCE: u32 = 4;
/// Bytes of shared memory that the system takes of each block.
const SYSTEM_BYTES: u32 = 1024;
/// Bytes of shared memory that are handed out at a time.
const SHARED_AT_ONCE: u32 = 128;

/// What a function takes of a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Threads of a block.
    pub threads: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of shared memory of a block, static and dynamic.
    pub shared_bytes: u32,
}

/// What no further block fits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Threads of the multiprocessor.
    Threads,
    /// Its registers.
    Registers,
    /// Its shared memory.
    SharedMemory,
    /// Blocks that it holds.
    Blocks,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Limit::Threads => "threads",
            Limit::Registers => "registers",
            Limit::SharedMemory => "shared memory",
            Limit::Blocks => "blocks",
        })
    }
}

/// How many blocks of a function a multiprocessor holds at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Occupancy {
    /// Blocks; none where one does not fit.
    pub blocks: u32,
    /// Their warps over those that a multiprocessor holds.
    pub share: f64,
    /// What limits them.
    pub limit: Limit,
}

impl Occupancy {
    /// That of a function on an architecture.
    pub fn of(arch: Arch, taken: Taken) -> Occupancy {
        let [warps_max, blocks_max, shared_bytes] = match arch {
            Arch::Sm80 => [64, 32, 164 << 10],
            Arch::Sm89 => [48, 24, 100 << 10],
            Arch::Sm90a | Arch::Sm100 => [64, 32, 228 << 10],
        };
        let warps = taken.threads.div_ceil(LANES).max(1);
        let of_warp = (taken.registers.max(1) * LANES).next_multiple_of(REGISTERS_AT_ONCE);
        let with_registers = REGISTERS / of_warp / WARPS_AT_ONCE * WARPS_AT_ONCE;
        let of_block = (taken.shared_bytes + SYSTEM_BYTES).next_multiple_of(SHARED_AT_ONCE);
        let limits = [
            (warps_max / warps, Limit::Threads),
            (with_registers / warps, Limit::Registers),
            (shared_bytes / of_block, Limit::SharedMemory),
            (blocks_max, Limit::Blocks),
        ];
        let (blocks, limit) =
            limits.into_iter().min_by_key(|(blocks, _)| *blocks).expect("there are limits");
        Occupancy { blocks, share: f64::from(blocks * warps) / f64::from(warps_max), limit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(arch: Arch, threads: u32, registers: u32, shared_bytes: u32) -> (u32, f64, Limit) {
        let found = Occupancy::of(arch, Taken { threads, registers, shared_bytes });
        (found.blocks, found.share, found.limit)
    }

    /// The two examples of the CUDA C++ best practices guide, and cases whose limits are plain.
    #[test]
    fn blocks_are_those_of_published_examples() {
        assert_eq!(of(Arch::Sm80, 128, 37, 0), (12, 0.75, Limit::Registers));
        assert_eq!(of(Arch::Sm80, 320, 37, 0), (4, 0.625, Limit::Registers));
        assert_eq!(of(Arch::Sm80, 256, 32, 0), (8, 1.0, Limit::Threads));
        assert_eq!(of(Arch::Sm89, 256, 32, 0), (6, 1.0, Limit::Threads));
        assert_eq!(of(Arch::Sm80, 32, 16, 0), (32, 0.5, Limit::Blocks));
        // 48 KiB and what the system takes, three times in 164 KiB.
        assert_eq!(of(Arch::Sm80, 128, 64, 48 << 10), (3, 0.1875, Limit::SharedMemory));
        assert_eq!(of(Arch::Sm80, 128, 64, 163 << 10).0, 1);
        assert_eq!(of(Arch::Sm80, 128, 64, (163 << 10) + 1).0, 0);
        assert_eq!(of(Arch::Sm90a, 384, 168, 227 << 10), (1, 0.1875, Limit::Registers));
        assert_eq!(of(Arch::Sm90a, 128, 168, (227 << 10) + 1).0, 0);
    }
}
