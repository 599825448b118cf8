//! The search over the whole space: every product of parallelisms, schedules, shards, keeps and
//! offloads, and every cut of the layers into stages.
//!
//! [`tree`] walks decisions one after the other, counts what lies below each without going there,
//! and skips what cannot be better than the best so far. [`stages`] takes one product of decisions
//! and cuts its layers into uneven stages that each keep as much as fits.
//!
//! What skipping relies on is the same in both: every formula of a step's time and memory grows
//! with each of its parts, so that the formula of the least parts is below all.

pub mod stages;
pub mod tree;

#[cfg(test)]
mod oracle;
