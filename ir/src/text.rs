//! The text form of modules: one node per line, canonical, read back to the same module.
//!
//! ```text
//! module mlp
//!   func @block(%x: bf16[B, 1024, 768], %w: bf16[768, 3072]) {
//!     %h: bf16[B, 1024, 3072] = contract bsm,mf->bsf %x %w
//!     return %h
//!   }
//! ```
//! Comments start with `#`. A parameter that is not trained is `frozen`, as in
//! `%w: frozen f32[768, 3072]`.

pub(crate) mod attrs;
pub(crate) mod guard;
pub(crate) mod lex;
mod ops;
pub(crate) mod parse;
mod plan;
pub(crate) mod print;
mod program;

pub use parse::parse_module;
pub use plan::parse_plan;
pub use program::parse_program;
