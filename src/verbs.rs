//! The verbs of the command line, one file each: its flags, and what it answers.

pub mod flags;
pub mod inspect;
pub mod models;
pub mod fusions;
pub mod plan;
pub mod compile;
pub mod gpus;
pub mod cost;
pub mod compare;
pub mod sweep;
pub mod train;
pub mod checkpoint;
pub mod generate;
pub mod run;
pub mod verify;
pub mod calibrate;
pub mod validate;
pub mod score;
pub mod inference;
pub mod cluster;
pub mod export;
pub mod doctor;
pub mod schema;
pub mod completions;
pub mod man;
