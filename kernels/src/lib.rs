//! Gantline's kernels crate.
