//! Module × plan → programs.

pub mod partition;
