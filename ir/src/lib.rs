//! The artefacts, and what stays inside a module.
//!
//! **In:** a model description (a Hugging Face `config.json`, a preset, a `.graph` text).
//! **Out:** a [`Module`], and the nouns that later stages fill: a [`Plan`] and a [`Program`].
//!
//! A module is a list of named functions; a function has typed parameters, nodes in topological
//! order and results. [`Op::Call`] is the only structure: a layer is a function that is called many
//! times, a composite (`softmax`, `attention`) one with a definition in the [`library`], a kernel
//! one that is a single launch. Each question about ops is one table with one exhaustive match:
//! [`infer`] the type, [`eval`] the value, [`vjp`] the gradient, [`cost`] the operations and bytes,
//! [`factors`] the legal shardings and the collectives that they need.
//!
//! **Invariants.**
//! * A module knows no device, no mesh and no sharding; those are in the plan, keyed by function
//!   and value name.
//! * An op is pure and has one result; only a call has those of its function.
//! * Functions stand below those that they call, so there is no recursion, and no loop op.
//! * Equal text means equal artefact: printing is canonical, and what is printed is read back.
//! * Random numbers depend on a key and the index of the global element, never on a cut.
//! * [`vjp`] and [`autodiff`] keep nothing and recompute nothing: what is kept is in the plan.
//! * Deliberately absent: prices of devices, which are in `kernels`, and every choice between
//!   plans.
//!
//! **Reading order.** Nouns: [`dtype`] with [`formats`], [`dim`], [`types`], [`op`], [`class`],
//! [`module`] with its [`call_graph`], [`sharding`], [`precision`], [`plan`], [`program`], with
//! [`text`], [`verify`] and [`ids`]. Tables: [`infer`], [`eval`] over [`tensor`] and [`random`],
//! [`vjp`], [`cost`], [`factors`]. Steps: [`import`], [`build`], [`freeze`], [`lora`],
//! [`channels`], [`autodiff`], [`recognise`](mod@recognise), [`rewrite`], [`inline`],
//! [`outline`], [`pass`].
//!
//! # Diagnostics
//!
//! Those of [`import`] stand there.
//!
//! | code | what is wrong | exit code |
//! |---|---|--:|
//! | `E1001` | a text that is not in the form of a module | 6 |
//! | `E1002` | a name that is unknown, or taken | 6 |
//! | `E1003` | a line whose types are not those that its op yields | 6 |
//! | `E1004` | a value or function that is read before it is defined, or not at all | 6 |
//! | `E1005` | a node whose results have other types than its op yields | 6 |
//! | `E1006` | a name that stands twice | 6 |
//! | `E1007` | a call of a function that is not above the caller | 6 |
//! | `E1008` | a parameter, node or value that is out of order | 6 |
//! | `E1009` | a size that no parameter gives | 6 |
//! | `E1010` | a function to evaluate that is not there, or other arguments than it takes | 6 |
//! | `E1011` | something that the interpreter does not compute | 6 |
//! | `E1012` | an op without gradient | 6 |
//! | `E1013` | a function to differentiate that is not there or gives no loss | 6 |
//! | `E1014` | an attribute that a composite of the library does not have, or needs | 6 |
//! | `E1015` | an attribute of a composite that is out of its bounds | 6 |
//! | `E1016` | a composite with another body than the library's | 6 |
//! | `W1017` | a composite of a text with another body than the library's | 0 |
//! | `E1018` | what is frozen and no parameter, or frozen and passed what is trained | 6 |
//! | `E1021` | a line of a plan that is not understood | 6 |
//! | `E1022` | a decision of a plan that is missing or taken twice | 6 |
//! | `E1023` | a plan of a version that is not known | 6 |
//! | `E1201` | a target of an adapter that matches no weight | 2 |
//! | `E1202` | a rank of an adapter above the dims of a weight | 2 |
//! | `E1203` | targets that adapt some calls of a layer only | 2 |
//! | `E1204` | frozen weights that are stored in another type than they are computed with | 2 |
//! | `E1031` | a line of a program that is not understood | 6 |
//! | `E1032` | a line of a program that is out of its order, or missing | 6 |

pub mod build;
pub mod diagnostic;
pub mod dim;
pub mod dtype;
pub mod formats;
pub mod file;
pub mod import;
pub mod infer;
pub mod library;
pub mod convolution;
mod pieces;
pub mod sharding;
pub mod factors;
pub mod precision;
pub mod target;
pub mod plan;
pub mod program;
pub mod module;
pub mod call_graph;
pub mod op;
pub mod class;
pub mod random;
pub mod text;
pub mod types;
pub mod tensor;
pub mod eval;
mod numbers;
pub mod ids;
pub mod verify;
pub mod cost;
pub mod pass;
pub mod inline;
pub mod outline;
pub mod freeze;
pub mod lora;
pub mod channels;
pub mod vjp;
pub mod autodiff;
pub mod recognise;
pub mod rewrite;

pub use call_graph::CallGraph;
pub use class::Class;
pub use diagnostic::{Diagnostic, Severity, Span};
pub use dim::{Bindings, Dim};
pub use dtype::DType;
pub use module::{Function, Kind, Module, Node, Value, ValueId};
pub use op::Op;
pub use plan::{ExpertParallel, Mesh, Plan};
pub use program::Program;
pub use sharding::{Axis, Layout, Sharding};
pub use target::Target;
pub use tensor::Tensor;
pub use types::TensorType;
