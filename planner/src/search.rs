//! The search for plans on GPUs, priced in closed form: every product of parallelisms, schedules,
//! ZeRO stages, recomputation and offload, with every stage partition.
//!
//! [`branch_and_bound`] decides one thing after the other, counts the candidates below each choice
//! without visiting them, and prunes choices whose lower bound is above the best candidate so far,
//! on all threads. [`decisions`] lists the options of each decision, [`uniform`] prices candidates
//! from [`table`]s, [`stage_partition`] finds the best partition of the layers into stages,
//! [`events`] replays a schedule. [`request`] puts them together; [`frontier`] repeats the search
//! for many limits of memory, [`neighbours`] with one decision changed. [`groups`] shares a batch
//! over devices of several kinds, [`hetero_pipeline`] gives each kind pipeline stages. [`models`]
//! are published shapes that need no file, [`interop`] writes plans in the terms of other tools.
//!
//! Pruning is right because every formula of a step's time and memory grows with each of its
//! parts: the formula of the smallest parts is a lower bound.

pub mod hetero_pipeline;
pub mod request;
mod batches;
mod known;
pub mod stage_partition;
pub mod events;
pub mod interop;
pub mod frontier;
pub mod groups;
pub mod decisions;
pub mod models;
pub mod neighbours;
pub mod table;
pub mod branch_and_bound;
pub mod uniform;

#[cfg(test)]
pub(crate) mod oracle;
#[cfg(test)]
mod relations;
#[cfg(test)]
pub(crate) mod tests;
