//! Module × plan → programs.

pub mod calls;
pub mod partition;
pub mod specialise;
pub mod domain;
pub mod fuse;
pub mod tile;
pub mod arena;
pub mod catalogue;
pub mod lower;
pub mod prepare;
pub mod routines;
mod store;
mod update;
pub mod compile;
