//! Gantline's runtime crate.

#![deny(unsafe_code)]

pub mod communicator;
#[allow(unsafe_code)]
pub mod local;

pub use communicator::{Blocks, Combiner, CommError, Communicator, Counters, Group};
