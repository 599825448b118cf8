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
//! use gantline::job::{ADAMW, PlanRequest};
//! use gantline::{LOSS, compile, import, plan, prepare, start};
//! use ir::{DType, import::{Options, preset}, precision::Precision};
//! use planner::{cluster::Cluster, limits::Limits};
//!
//! # fn main() -> Result<(), gantline::failure::Failure> {
//! let description = preset("gpt2-mini").expect("a preset");
//! let options = Options { seq: 32, dtype: DType::F32, dropout: None, documents: false };
//! let model = import(&description, &options)?;
//! let question = PlanRequest {
//!     module: prepare(&model)?,
//!     model: model.name,
//!     cluster: Cluster::load("cpu-local")?,
//!     ranks: 2,
//!     global_batch_size: 2,
//!     seq: 32,
//!     precision: Precision::uniform(DType::F32),
//!     optimizer: ADAMW,
//!     clip: None,
//!     lora: None,
//!     limits: Limits::default(),
//! };
//! let found = plan(&question.job())?;
//! let session = start(compile(&question.module, LOSS, &found.plan)?, None, 1)?;
//! assert_eq!(session.classes().mesh.ranks(), 2);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod cli;
pub mod argument;
pub mod job;
pub mod flops;
mod ops;
pub mod run;
pub mod training;
pub mod adapters;
pub mod planned;
pub mod processes;
pub mod artefact;
pub mod generation;
pub mod onnx;
pub mod dump;
pub mod documents;
pub mod cache;
pub mod probe;
pub mod verbs;
pub mod progress;
pub mod output;
pub mod failure;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use codegen::compile::Compiled;
use codegen::prepare::{Preparation, Purpose};
use ir::ids::Ids;
use ir::import::{Description, Model, Options, Resolved};
use ir::precision::Precision;
use ir::random::DrawBits;
use ir::rewrite::report::Report;
use ir::rewrite::saturate::Selection;
use ir::{DType, Diagnostic, Module, Plan, Span, Target};
use kernels::{Bytes, Kernel};
use planner::compiled::{Found, Job};
use planner::footprint::Footprint;
use runtime::cuda::gpus::Gpus;
use runtime::execute::{Classes, Session};
use runtime::trace::Tracing;

use failure::Failure;

/// The entry that is trained.
pub const LOSS: &str = "loss";

/// How long a rank waits for another before a step without a prediction fails. Chosen: longer than
/// the slowest kernel on an overloaded machine.
const DEADLINE: Duration = Duration::from_secs(300);
/// The least deadline of a rank, for steps that are predicted to take next to no time.
const DEADLINE_MIN: Duration = Duration::from_secs(5);
/// From how long on it is said that kernels were compiled. Chosen: what users wonder about.
const TOLD_FROM: Duration = Duration::from_secs(2);
/// The same on GPUs, whose first step loads kernels and lets NCCL connect them. Chosen.
const GPU_DEADLINE_MIN: Duration = Duration::from_secs(60);
/// Deadline of a rank, in predicted steps: a rank that takes longer is not slow, it hangs.
const DEADLINE_STEPS: f64 = 5.0;

/// How long a step may go on without any rank finishing an instruction before it fails; `step_s`
/// is the predicted seconds of a step.
fn deadline(step_s: Option<f64>) -> Duration {
    let of_steps = |step_s: f64| Duration::try_from_secs_f64(DEADLINE_STEPS * step_s).ok();
    step_s.and_then(of_steps).map_or(DEADLINE, |steps| steps.max(DEADLINE_MIN))
}

/// The description that a MODEL argument means. Its warnings are said on stderr.
///
/// # Errors
/// Those of [`ir::import::resolve`]; `E5010` for a model of which only the shape is known.
pub fn resolve(model: impl AsRef<Path>) -> Result<Resolved, Vec<Diagnostic>> {
    let resolved = resolve_quietly(model.as_ref())?;
    for warning in &resolved.description.warnings {
        output::note(&failure::draw(warning));
    }
    Ok(resolved)
}

/// As [`resolve`], of a description whose warnings were said.
pub(crate) fn resolve_quietly(path: &Path) -> Result<Resolved, Vec<Diagnostic>> {
    ir::import::resolve(path).map_err(|wrong| {
        let name = path.to_str().filter(|_| !path.exists());
        let known = name.filter(|name| planner::search::models::published(name).is_some());
        let Some(model) = known else { return wrong };
        let headline = format!("`{model}` can be planned but not built: it has no importer yet");
        let help = format!("write `gantline plan {model} --cluster h100`, or give its directory");
        vec![Diagnostic::error("E5010", Span::of(model), headline).help(help)]
    })
}

/// Description to model: the functions to compute and the weights that they take.
pub fn import(description: &Description, options: &Options) -> Result<Model, Failure> {
    import_drawing(description, options, DrawBits::B16)
}

/// As [`import`], where dropout draws `bits`.
pub fn import_drawing(
    description: &Description,
    options: &Options,
    bits: DrawBits,
) -> Result<Model, Failure> {
    job::check_seq(description, options.seq)?;
    Ok(ir::import::import_drawing(description, options, bits)?)
}

/// Chooses the layout of images for a target: channels last (NHWC) where tensor cores multiply,
/// which copy them by vectors. CUDA cores, which multiply exact F32, read and store NCHW by whole
/// sectors.
pub fn choose_layout(model: &mut Model, target: Option<Target>, precision: &Precision) {
    let has_tensor_cores = target.is_some_and(|target| target.arch().is_some());
    if has_tensor_cores && precision.compute.is_narrow() {
        ir::channels::lay_channels_last(&mut model.module);
    }
}

/// Model to module: gradients added, composites without a kernel inlined.
pub fn prepare(model: &Model) -> Result<Module, Failure> {
    prepare_as(model, &Precision::uniform(DType::F32))
}

/// Model to module, with the element types of `precision`; the model has the type of its sums.
pub fn prepare_as(model: &Model, precision: &Precision) -> Result<Module, Failure> {
    Ok(prepare_with(model, Selection::for_models(), precision)?.0)
}

/// Model to module as [`prepare_as`], with the selected rewrite rules; also returns what the rules
/// did. `DUMP=dir` writes the module there after each pass.
pub fn prepare_with(
    model: &Model,
    selection: Selection,
    precision: &Precision,
) -> Result<(Module, [Report; 2]), Failure> {
    let mut dump = dump::Dump::from_environment();
    let after = &mut |pass: &'static str, module: &Module| dump.write(pass, module);
    let (purpose, precision) = (Purpose::Training, *precision);
    let preparation = Preparation { purpose, selection, precision, after };
    let prepared = codegen::prepare::prepare(model.module.clone(), LOSS, preparation)?;
    dump.finish()?;
    Ok(prepared)
}

/// Module and cluster to plan: the fastest that fits.
pub fn plan(job: &Job<'_>) -> Result<Found, Failure> {
    Ok(planner::compiled::search(job)?)
}

/// Module and plan to programs: one for each class of ranks.
pub fn compile(module: &Module, entry: &str, plan: &Plan) -> Result<Classes, Failure> {
    let Compiled { programs, kernels } = codegen::compile::compile(module, entry, plan)?;
    Ok(Classes { programs, kernels, mesh: plan.mesh, ids: Ids::of(module, entry) })
}

/// Compares what the ranks of this process will hold with what it can get now: `E5020`. The page
/// cache gives way, and counts as free.
fn check_memory(
    classes: &Classes,
    here: Range<usize>,
    threads_per_rank: usize,
) -> Result<(), Diagnostic> {
    let footprints = Footprint::of_all(&classes.programs, &classes.kernels, None, threads_per_rank);
    let ranks = here.len();
    let of = |part: fn(&Footprint) -> u64| -> u64 {
        here.clone().map(|rank| part(&footprints[classes.class_of(rank)])).sum()
    };
    let need = of(Footprint::total);
    let Some(limit) = planner::machine::tightest().filter(|limit| limit.left() < need) else {
        return Ok(());
    };
    let (need, left) = (Bytes(need), Bytes(limit.left()));
    let headline = format!("the run needs {need} of memory, and {left} are left");
    let [arenas, workspaces, mailboxes] =
        [of(|f| f.arena), of(|f| f.workspace), of(|f| f.mailboxes)].map(Bytes);
    let parts = format!(
        "{ranks} ranks hold {arenas} in arenas, {workspaces} in workspaces, \
         {mailboxes} in mailboxes"
    );
    Err(Diagnostic::error("E5020", Span::default(), headline)
        .note(parts)
        .note(limit.describe())
        .help(format!("end other programs, or plan for less with `--memory {left}`")))
}

/// Programs to session: ranks that wait for work, as threads of this process, on what the programs
/// are compiled for.
pub fn start(
    classes: Classes,
    target: Option<Target>,
    threads_per_rank: usize,
) -> Result<Session, Failure> {
    start_predicted(classes, target, threads_per_rank, None, None)
}

/// The GPUs of this machine with some numbers, one for each rank, with kernels that are compiled
/// for them; none for a target of CPUs. All `ranks` of the run may be more.
///
/// # Errors
/// Those of [`Gpus::open`].
pub fn gpus(
    target: Option<Target>,
    (numbers, ranks): (Range<usize>, usize),
    kernels: &[Kernel],
) -> Result<Option<Gpus>, runtime::Error> {
    let Some(arch) = target.and_then(Target::arch) else { return Ok(None) };
    let start = Instant::now();
    let gpus = Gpus::open(numbers, kernels, arch, cache::folder("kernels").as_deref())?;
    if start.elapsed() > TOLD_FROM {
        let (count, took) = (kernels.len(), output::seconds(start.elapsed().as_secs_f64()));
        output::note(&format!("kernels  {count} compiled for {arch} in {took}"));
    }
    if ranks > 1 && !Gpus::have_nccl() {
        let slow = "GPUs exchange through the host's memory";
        output::note(&format!("warning: {slow}: the loader finds no `libnccl.so` (see `doctor`)"));
    }
    Ok(Some(gpus))
}

/// Programs to session, where a step is predicted to take `step_s` seconds: a rank that takes much
/// longer is taken to hang. Ranks of a target that is a GPU run on those of this machine, others on
/// its cores. What the plan places on a disk lies on that of a directory; the system's for
/// temporary files, where there is none.
pub fn start_predicted(
    classes: Classes,
    target: Option<Target>,
    threads_per_rank: usize,
    step_s: Option<f64>,
    disk: Option<PathBuf>,
) -> Result<Session, Failure> {
    let (deadline, tracing) = (deadline(step_s), Tracing::None);
    let mut options = runtime::execute::Options { threads_per_rank, deadline, tracing, disk };
    let ranks = 0..classes.mesh.ranks();
    if let Some(gpus) = gpus(target, (ranks.clone(), ranks.end), &classes.kernels)? {
        options.deadline = deadline.max(GPU_DEADLINE_MIN);
        return Ok(Session::start_on_gpus(Arc::new(classes), &options, &gpus)?);
    }
    check_memory(&classes, ranks, threads_per_rank)?;
    Ok(Session::start(Arc::new(classes), &options)?)
}
