//! Module × plan → programs.
//!
//! **In:** a training module whose entry is a list of calls of layers, prepared by [`prepare`], and
//! a [`Plan`](ir::Plan).
//! **Out:** one [`Program`](ir::Program) per class of ranks and the kernels that they launch
//! ([`compile::Compiled`]).
//!
//! ```text
//! entry ──calls──▶ calls of layers
//! layer.grad × shardings ──partition──▶ local function ──specialise──▶ forward, backward
//! local function ──fuse──▶ calls of kernels ──lower──▶ routine
//! routines × schedule ──compile──▶ program, its buffers placed by arena
//! ```
//!
//! **Invariants.**
//! * No parallel decision is taken here: shardings, stages, keep sets and micro-batches come from
//!   the plan, and what it says determines every collective.
//! * A routine is compiled once per layer and class, so that the work does not grow with depth.
//! * Offsets are fixed: [`Program::arena_bytes`](ir::Program::arena_bytes) is what a rank
//!   allocates, and what the planner predicts.
//! * Reductions have a fixed order, and the same input gives the same programs.
//! * Deliberately absent: prices of a device, a search among plans, any knowledge of `planner` or
//!   `runtime`. Which nodes share a kernel is searched for ([`grouping`]), by the one price that
//!   knows no device: launches, each as many bytes as [`ir::rewrite::price`] says, and bytes moved.
//!
//! **Reading order.** [`calls`] and [`prepare`] look at the module, [`mod@retype`] and
//! [`mod@quantise`] round it, the latter to codes in [`blocks`]; [`partition`] makes the
//! function of one rank and [`specialise`] cuts it in two; after `empty`, `codes`, `chunk`,
//! [`canonicalise`] and [`materialise`], [`domain`], `precision`, [`grouping`] and [`fuse`] group
//! nodes into kernels, which [`tile`] and [`catalogue`] describe, with the [`scalars`] of their
//! launches; [`tilings`] says how GPUs sum products, from the whole function and the plan's target,
//! as `unsharded` gathers what all ranks decide alike; [`lower`] makes routines of launches, or a
//! [`refusal`], and [`routines`] those of a class; [`arena`] gives offsets, [`schedule`] an order
//! of micro-batches; [`crossing`] says what stages and calls share; [`executable`] says what no
//! program does; [`compile`] assembles, and [`inference`] what only runs forward; [`mod@launched`]
//! says what that comes to, and [`mod@footprint`] how large it is; [`mod@function`] compiles one
//! function without a plan, of integers that [`narrow`] made short where [`ranges`] prove them to
//! be, and `integers` multiplies as such. [`check`] replays the result and calls nothing of the
//! above; in debug builds it looks at everything that is compiled.
//!
//! # Diagnostics
//!
//! | code | what is wrong | exit code |
//! |---|---|--:|
//! | `E2001` | an entry that is no list of calls | 4 |
//! | `E2002` | a plan that does not fit the module | 3 |
//! | `E2003` | nodes without a kernel, all of a function at once; draws that no kernel places | 4 |
//! | `E2004` | a plan whose decisions no program carries out | 4 |
//! | `E2005` | products of 8 bits of sizes that no whole blocks fill | 4 |
//!
//! Those of [`check`] are defects of this crate, and no input's.

pub mod calls;
pub mod partition;
pub mod specialise;
pub mod canonicalise;
pub mod materialise;
pub mod leaf;
pub mod domain;
mod precision;
mod empty;
pub mod blocks;
mod codes;
pub mod chunk;
pub mod tilings;
mod unsharded;
mod epilogue;
mod pool;
pub mod grouping;
mod reachability;
pub mod fuse;
pub mod scalars;
pub mod tile;
pub mod arena;
mod optimizer;
pub mod refusal;
pub mod catalogue;
pub mod lower;
pub mod retype;
pub mod quantise;
mod saved;
pub mod prepare;
pub mod ranges;
pub mod narrow;
mod integers;
pub mod function;
pub mod routines;
pub mod crossing;
mod evaluation;
mod store;
mod weights;
pub mod schedule;
pub mod executable;
pub mod compile;
pub mod inference;
pub mod launched;
pub mod footprint;
pub mod check;

pub use footprint::footprint;
