//! Whole paths: model in, programs executed, results compared with other implementations.

// Cases of the interpreter's tests, which name the crate in full.
extern crate ir as gantline_ir;
extern crate kernels as gantline_kernels;

#[path = "../../ir/tests/ir/draws.rs"]
#[allow(dead_code, clippy::unwrap_used)]
mod draws;
#[path = "../../ir/tests/ir/onnx_file.rs"]
#[allow(dead_code)]
mod onnx_file;
#[path = "../../ir/tests/ir/ops.rs"]
#[allow(dead_code, clippy::unwrap_used)]
mod ops;

#[path = "../../ir/tests/families/drawn.rs"]
#[allow(dead_code)]
mod drawn;
#[path = "../../kernels/tests/engines/shim.rs"]
#[allow(dead_code)]
mod shim;

#[path = "../../ir/tests/exports/drawn.rs"]
mod exported;

mod artefact;
mod assumptions;
mod attacks;
mod attention;
mod check;
mod chunks;
mod cli;
mod composites;
mod context;
mod copies;
mod cuda;
mod documents;
mod experts;
mod exports;
mod families;
mod faults;
mod footprints;
mod foreign;
mod fusions;
mod gpus;
mod graphs;
mod groupings;
mod ids;
mod inference;
mod integers;
mod interruption;
mod launches;
mod layouts;
mod limits;
mod lora;
mod mesh;
mod model;
mod names;
mod narrow;
mod nodes;
mod offload;
mod onnx;
mod operators;
mod parallel;
mod passes;
mod paths;
mod plans;
mod precision;
mod printed;
mod processes;
mod quantised;
mod readme;
mod recognition;
mod reference;
mod refusals;
mod rewriting;
mod runs;
mod scratch;
mod serving;
mod states;
mod sums;
mod tables;
mod tools;
mod training;
mod verbs;
mod zero;
