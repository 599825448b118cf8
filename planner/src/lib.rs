//! Gantline's planner crate.
