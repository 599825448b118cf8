//! Gantline's runtime crate.
