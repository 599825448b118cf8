//! Gantline compiles deep-learning models into one program per device of a cluster, predicts what
//! they cost, and runs them.
//!
//! ```text
//! description ─import→ model ─prepare→ module ─plan→ plan ─compile→ classes ─start→ session
//! ```
//!
//! Each arrow is one function of this file and one crate, and leads from an artefact to the next.
//! The rest of this crate is the command line: [`cli`] reads it, [`job`] turns flags into what the
//! planner is asked, [`verbs`] answer, [`output`] prints, [`failure`] ends a command. A [`run`] is
//! a directory that training leaves behind.
//!
//! ```
//! use gantline::job::{ADAMW, Question};
//! use gantline::{LOSS, compile, import, plan, prepare, start};
//! use ir::{DType, import::{Options, preset}};
//! use planner::{cluster::Cluster, limits::Limits};
//!
//! # fn main() -> Result<(), gantline::failure::Failure> {
//! let description = preset("gpt2-mini").expect("a preset");
//! let model = import(&description, &Options { seq: 32, dtype: DType::F32, dropout: None })?;
//! let question = Question {
//!     module: prepare(&model)?,
//!     model: model.name,
//!     cluster: Cluster::load("cpu-local")?,
//!     ranks: 2,
//!     global_batch_size: 2,
//!     seq: 32,
//!     dtype: DType::F32,
//!     optimizer: ADAMW,
//!     clip: None,
//!     limits: Limits::default(),
//! };
//! let found = plan(&question.job())?;
//! let session = start(compile(&question.module, LOSS, &found.plan)?, 1)?;
//! assert_eq!(session.classes().mesh.ranks(), 2);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod cli;
pub mod job;
pub mod flops;
pub mod run;
pub mod training;
pub mod artefact;
pub mod generation;
pub mod onnx;
pub mod dump;
pub mod schema;
pub mod cache;
pub mod verbs;
pub mod progress;
pub mod output;
pub mod failure;

use std::sync::Arc;
use std::time::Duration;

use codegen::compile::Compiled;
use codegen::prepare::{Preparation, Purpose};
use ir::ids::Ids;
use ir::import::{Description, Model, Options, Resolved};
use ir::rewrite::report::Report;
use ir::rewrite::saturate::Selection;
use ir::{Diagnostic, Module, Plan, Span};
use planner::search::{Found, Job};
use runtime::execute::{Classes, Session};
use runtime::trace::Tracing;

use failure::Failure;

/// The entry that is trained.
pub const LOSS: &str = "loss";

/// How long a rank waits for another before the step fails. Chosen: longer than the slowest kernel
/// on an overloaded machine.
const DEADLINE: Duration = Duration::from_secs(300);

/// The description that a MODEL argument means. Its warnings are said on stderr.
///
/// # Errors
/// Those of [`ir::import::resolve`]; `E5010` for a model of which only the shape is known.
pub fn resolve(model: &str) -> Result<Resolved, Vec<Diagnostic>> {
    let resolved = ir::import::resolve(model).map_err(|wrong| {
        let is_there = std::path::Path::new(model).exists();
        if is_there || planner::space::models::published(model).is_none() {
            return wrong;
        }
        let headline = format!("of `{model}` the shape is known, which is planned for on GPUs");
        let help = format!("write `gantline plan {model} --cluster h100`, or give its directory");
        vec![Diagnostic::error("E5010", Span::of(model), headline).help(help)]
    })?;
    for warning in &resolved.description.warnings {
        output::note(&failure::draw(warning));
    }
    Ok(resolved)
}

/// Description to model: the functions to compute and the weights that they take.
pub fn import(description: &Description, options: &Options) -> Result<Model, Failure> {
    job::check_seq(description, options.seq)?;
    Ok(ir::import::import(description, options)?)
}

/// Model to module: gradients added, composites without a kernel inlined.
pub fn prepare(model: &Model) -> Result<Module, Failure> {
    Ok(prepare_with(model, Selection::exact())?.0)
}

/// As [`prepare`], by other rules; with what they did. `DUMP=dir` has the module written there
/// after each pass.
pub fn prepare_with(model: &Model, selection: Selection) -> Result<(Module, [Report; 2]), Failure> {
    let mut dump = dump::Dump::from_environment();
    let after = &mut |pass: &'static str, module: &Module| dump.write(pass, module);
    let preparation = Preparation { purpose: Purpose::Training, selection, after };
    let prepared = codegen::prepare::prepare(model.module.clone(), LOSS, preparation)?;
    dump.finish()?;
    Ok(prepared)
}

/// Module and cluster to plan: the fastest that fits.
pub fn plan(job: &Job<'_>) -> Result<Found, Failure> {
    Ok(planner::search::search(job)?)
}

/// Module and plan to programs: one for each class of ranks.
pub fn compile(module: &Module, entry: &str, plan: &Plan) -> Result<Classes, Failure> {
    let Compiled { programs, kernels } = codegen::compile::compile(module, entry, plan)?;
    Ok(Classes { programs, kernels, mesh: plan.mesh, ids: Ids::of(module, entry) })
}

/// Programs to session: ranks that wait for work, as threads of this process.
pub fn start(classes: Classes, threads_per_rank: usize) -> Result<Session, Failure> {
    let options =
        runtime::execute::Options { threads_per_rank, deadline: DEADLINE, tracing: Tracing::None };
    Ok(Session::start(Arc::new(classes), &options)?)
}
