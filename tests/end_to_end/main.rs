//! Whole paths: model in, programs executed, results compared with other implementations.

mod artefact;
mod check;
mod cli;
mod gpt2;
mod inference;
mod interruption;
mod launches;
mod mesh;
mod model;
mod onnx;
mod parallel;
mod readme;
mod reference;
mod training;
mod verbs;
