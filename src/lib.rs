//! Gantline.
