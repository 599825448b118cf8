//! Whole paths: model in, programs executed, results compared with other implementations.

mod check;
mod cli;
mod inference;
mod mesh;
mod model;
mod parallel;
mod reference;
mod training;
