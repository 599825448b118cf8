//! The search over the whole space: every product of parallelisms, schedules, shards, keeps and
//! offloads, and every cut of the layers into stages.
//!
//! [`tree`] walks decisions one after the other, counts what lies below each without going there,
//! and skips what cannot be better than the best so far, on all threads. [`knobs`] names the
//! decisions, [`uniform`] prices them from [`table`]s, [`cuts`] finds the best cut of each into
//! stages, [`events`] replays a schedule, and [`ask`] puts them together, [`frontier`] for many
//! limits of memory, [`neighbours`] with one decision changed; [`groups`] shares a batch
//! over devices of several kinds, and [`across`] stages. [`models`] are shapes that need no file.
//!
//! What skipping relies on is the same everywhere: every formula of a step's time and memory grows
//! with each of its parts, so that the formula of the least parts is below all.

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
