//! The artefacts and what stays inside a module.

pub mod build;
pub mod diagnostic;
pub mod dim;
pub mod dtype;
pub mod import;
pub mod infer;
pub mod library;
pub mod sharding;
pub mod factors;
pub mod plan;
pub mod program;
pub mod module;
pub mod op;
pub mod random;
pub mod text;
pub mod types;
pub mod tensor;
pub mod eval;
pub mod verify;
pub mod cost;
pub mod pass;
pub mod inline;
pub mod vjp;
pub mod autodiff;
pub mod recognise;

pub use diagnostic::{Diagnostic, Severity, Span};
pub use dim::{Bindings, Dim};
pub use dtype::DType;
pub use module::{Function, Kind, Module, Node, Value, ValueId};
pub use op::Op;
pub use plan::{Mesh, Plan};
pub use program::Program;
pub use sharding::{Axis, Layout, Sharding};
pub use tensor::Tensor;
pub use types::TensorType;
