//! What holds for every op and every composite, tried on random shapes.

#![allow(clippy::unwrap_used, reason = "a test may fail anywhere")]

mod artefacts;
mod channels;
mod composites;
mod conformance;
mod constraints;
mod draws;
mod generate;
mod gradients;
mod identities;
mod onnx;
mod onnx_edges;
#[allow(dead_code, reason = "other tests use the rest")]
mod onnx_file;
mod onnx_refused;
mod ops;
mod passes;
mod recognise;
mod recognise_attention;
mod recognise_dropout;
mod recognise_rope;
mod rewrite;
mod rewrite_choice;
mod rewrite_integers;
mod rewrite_models;
mod shardings;
mod text;
