//! The artefacts and what stays inside a module.

pub mod diagnostic;
pub mod dtype;
pub mod random;

pub use diagnostic::{Diagnostic, Severity, Span};
pub use dtype::DType;
