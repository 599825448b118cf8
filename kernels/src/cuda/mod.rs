//! Kernels as CUDA C++.
//!
//! In: a [`Kernel`]. Out: the device functions that compute it ([`functions`]), each a [`Tile`]
//! program in which every size is decided, and their text.
//!
//! Invariants:
//! * Text depends on the kernel and the [`Arch`] alone: equal ones have the same bytes of text.
//! * Printers decide nothing, and print no PTX: text calls named functions of a prelude, such as
//!   `cp_async` or `warp_mma`. There are two preludes, [`device_prelude`] for CUDA and
//!   [`host_prelude`] for a CPU on which a block's threads are fibers, so that the text that runs
//!   on a GPU is executed in tests without one; the bodies of the latter are [`host_source`].
//! * What differs by rank or by call is a launch scalar, [`Function::scalars`]. What TMA copies is
//!   described by [`Tile::maps`], which a launch passes after them.
//! * No sum depends on timing: blocks that add to one sum do so in turn. Floating-point numbers are
//!   added atomically by TMA alone, to sums that only the block whose turn it is adds to.
//! * Where the CPU computes maps by polynomials of its own, and in products of F32 and F64, results
//!   have the bits of the CPU's (with [`crate::cpu::Isa::Avx2`], whose reciprocals are exact).
//!   Products that read TF32 ([`ir::op::Operands`]) run on tensor cores.
//! * A launch may start fewer blocks of a function that [is persistent](Function::is_persistent).
//!
//! Reading order: `function` is the noun, its `tile` what it computes; a file for each family has
//! its tile programs and prints them, by `program` the expressions of fused loops over rows, by
//! `index` offsets, by `text` lines; `accesses` counts what the programs access; `lower` chooses
//! the functions of a kernel.

mod accesses;
mod attention;
mod draws;
mod flash;
mod flash_backward;
mod flash_warpgroup;
mod flash_warpgroup_backward;
mod function;
mod grouped;
mod index;
mod lines;
mod loops;
mod lower;
mod mapped;
mod moves;
mod occupancy;
mod parameter;
mod product;
mod program;
mod quads;
mod reduction;
mod routing;
mod rows;
mod scales;
mod shared;
mod slices;
mod tensor;
mod tensor_map;
mod text;
mod tile;
mod tickets;
mod tiling;
mod transpose;
mod turns;
mod vector;
mod warpgroup;

pub use accesses::{Accesses, Assumed};
pub use attention::{AttentionTile, Part};
pub use flash::FlashTile;
pub use flash_backward::FlashBackward;
pub use flash_warpgroup::FlashWarpgroup;
pub use flash_warpgroup_backward::FlashWarpgroupBackward;
pub use function::{Function, Functions};
pub use grouped::{Along, Grouped, Pair, PairGradient};
pub use ir::target::{Arch, Unknown};
pub use lines::LineTile;
pub use lower::{functions, functions_for};
pub use mapped::{MappedOperand, MappedResult};
pub use moves::{Move, RowCopy};
pub use occupancy::{Limit, Occupancy, Taken};
pub use parameter::{Buffer, Named, Parameter};
pub use product::ProductTile;
pub use quads::QuadStore;
pub use reduction::{PartialSums, RowReduction};
pub use routing::{ExpertRows, RoutingStep, RoutingTile};
pub use rows::Elementwise;
pub use scales::ScaleParameters;
pub use shared::Operand;
pub use slices::SliceSum;
pub use tensor::{BlockShape, Elements, OperandCopy, TensorTile};
pub use tensor_map::TensorMap;
pub use tile::Tile;
pub use tiling::{SKINNY_ROWS, tiling, waves_filled};
pub use transpose::Transposition;
pub use vector::Vectorized;
pub use warpgroup::{StagedOperand, WarpgroupShape, WarpgroupTile};

use crate::kernel::Kernel;

/// The functions of the prelude that are the same everywhere.
const PARTS: &str = include_str!("prelude/parts.h");
const DEVICE_PARTS: &str = include_str!("prelude/device.cuh");
const HOST_PARTS: &str = include_str!("prelude/host.h");
/// Closes what hides the prelude's functions from other libraries.
const HOST_END: &str = "#pragma GCC visibility pop";
/// Bodies and state of the prelude for CPUs, in their order.
const HOST_SOURCES: [&str; 3] = [
    include_str!("prelude/host/fibers.cpp"),
    include_str!("prelude/host/tensor_cores.cpp"),
    include_str!("prelude/host/checks.cpp"),
];

/// What stands before the text of functions for a GPU.
pub fn device_prelude() -> String {
    format!("{DEVICE_PARTS}\n{PARTS}")
}

/// What stands before the text of functions for a CPU: a header, to be precompiled. Its functions
/// are those of [`host_source`].
pub fn host_prelude() -> String {
    format!("{HOST_PARTS}\n{PARTS}\n{HOST_END}\n")
}

/// What the text of functions for a CPU calls: compiled once behind [`host_prelude`], it is linked
/// to each library of such text, which has state of its own.
///
/// With `-DSHIM_CHECKED -fsanitize=thread`, as the text has it too, it has the hooks of the
/// compiler's, and checks what they see. With `-DSHIM_COUNTED` as well somebody else's functions
/// behind it count accesses: `shim::count_access` and others that it declares.
pub fn host_source() -> String {
    HOST_SOURCES.join("\n")
}

/// The name of a function of a kernel in [`unit()`]: by both of their numbers.
pub fn name(kernel: usize, function: usize) -> String {
    format!("k{kernel}_{function}")
}

/// The text of everything that some kernels launch, for one architecture: what NVRTC compiles.
///
/// **Determinism**: equal kernels give equal text.
pub fn unit(kernels: &[Kernel], arch: Arch) -> String {
    let mut text = format!("// {arch}\n{}", device_prelude());
    for (at, kernel) in kernels.iter().enumerate() {
        for (number, function) in functions_for(kernel, arch).functions.iter().enumerate() {
            text.push('\n');
            text += &function.text(&name(at, number));
        }
    }
    text
}
