//! Gantline's codegen crate.
