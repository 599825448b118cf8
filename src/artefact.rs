//! Artefacts: what `compile` writes into one file, and `run` executes elsewhere.

use std::path::Path;

use ir::import::Model;
use ir::{Diagnostic, Module, Plan, Span, Target};
use kernels::cuda::Arch;
use kernels::{Kernel, price};
use planner::check::check_memory;
use planner::cluster::Kind;
use planner::footprint::{Footprint, fullest};
use planner::machine::Machine as Detected;
use runtime::artefact::{Contents, Limits, Machine, Requirements, read};
use runtime::cuda::context::Context;
use runtime::execute::Classes;
use serde_json::json;

use crate::LOSS;
use crate::documents::{Document, Report};
use crate::failure::Failure;
use crate::job::PlanRequest;

/// What an artefact's file is called at its end.
pub const EXTENSION: &str = "gtl";

/// Compiles a question's module under a plan into what an artefact holds.
///
/// # Errors
/// `E5010` for devices that are not cores of one machine, `E3308` for a plan that does not fit in
/// memory, and those of [`crate::compile`] and [`codegen::check`].
pub fn assemble(
    model: &Model,
    question: &PlanRequest,
    plan: Plan,
    archs: &[Arch],
) -> Result<Contents, Failure> {
    check_executable(question)?;
    let cluster = &question.cluster;
    let classes = crate::compile(&question.module, LOSS, &plan)?;
    let wrong = codegen::check::check(&classes.programs, &classes.kernels, &plan);
    if !wrong.is_empty() {
        return Err(wrong.into());
    }
    let threads = cluster.threads(plan.mesh.ranks());
    let Classes { programs, kernels, .. } = &classes;
    let footprints = Footprint::of_all(programs, kernels, plan.target, threads);
    if let Some(diagnostic) = check_memory(&plan, &footprints, cluster) {
        return Err(diagnostic.into());
    }
    let (need, _) = fullest(&footprints, plan.mesh.dp, (cluster.memory(), cluster.nodes));
    let machine = match archs {
        [] => Machine {
            device: "cpu".to_owned(),
            instruction_set: cluster.device.instruction_set.clone().unwrap_or_else(portable),
            cores: cluster.device.cores,
            memory_bytes: need.0,
        },
        archs => Machine {
            device: "cuda".to_owned(),
            instruction_set: archs.iter().map(Arch::to_string).collect::<Vec<_>>().join(","),
            cores: 1,
            memory_bytes: classes.programs.iter().map(|p| p.arena_bytes).sum::<u64>()
                * plan.mesh.dp as u64
                + plan.mesh.ranks() as u64 * beside(&classes.kernels, plan.target, archs),
        },
    };
    let arenas: Vec<u64> = footprints.iter().map(|f| f.arena).collect();
    let ir::Mesh { pp, dp, cp, tp, .. } = plan.mesh;
    let mesh = [("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)];
    let report = Report {
        model: question.model.clone(),
        params: model.param_count(),
        cluster: cluster.describe(),
        ranks: plan.mesh.ranks() as u64,
        mesh: mesh.map(|(axis, size)| (axis.to_owned(), size as u64)).into(),
        gbs: plan.global_batch_size() as u64,
        seq: plan.seq as u64,
        dtype: plan.dtype().name().to_owned(),
        peak_mem_bytes: footprints.iter().map(Footprint::total).max().unwrap_or(0),
        need_bytes: need.0,
        arena_bytes: arenas,
        predictions: json!(plan.predictions),
    };
    Ok(Contents {
        module: question.module.clone(),
        requirements: Requirements { ranks: plan.mesh.ranks(), machine },
        plan,
        programs: classes.programs,
        kernels: classes.kernels,
        archs: archs.to_vec(),
        report: report.to_json(),
    })
}

/// Bytes of the largest workspace that does not fit the local of its launch, which is as large as
/// the plan's target needs, on any of the architectures: it lies beside the arena.
fn beside(kernels: &[Kernel], target: Option<Target>, archs: &[Arch]) -> u64 {
    let bytes = |kernel: &Kernel, target| price::workspace(kernel, Some(target), 1).0;
    let of = |kernel: &Kernel| {
        let framed = target.map_or(0, |target| bytes(kernel, target));
        let all = archs.iter().map(|arch| bytes(kernel, Target::Cuda(*arch)));
        all.max().filter(|most| *most > framed).unwrap_or(0)
    };
    kernels.iter().map(of).max().unwrap_or(0)
}

/// Programs are made for the cores of one machine; other devices are only planned for.
fn check_executable(question: &PlanRequest) -> Result<(), Diagnostic> {
    let cluster = &question.cluster;
    let unsupported = |headline: String| {
        Diagnostic::error("E5010", Span::of("--cluster"), headline)
            .help("use `--cluster cpu-local`, or a file with `extends = \"preset:cpu-local\"`")
    };
    if cluster.device.kind != Kind::Cpu {
        let headline = format!("`{}` can be planned for, and not be compiled for", cluster.name);
        let wrong = Diagnostic::error("E5010", Span::of("--cluster"), headline);
        return Err(match cluster.target().and_then(Target::arch) {
            Some(arch) => wrong.help(format!("leave it out, and write `--arch {arch}`")),
            None => wrong.help("use `--cluster cpu-local`"),
        });
    }
    if cluster.nodes > 1 {
        let nodes = cluster.nodes;
        return Err(unsupported(format!("an artefact runs on one machine, and not on {nodes}")));
    }
    let lacking = question.precision.lacking().into_iter().next();
    let lacking = lacking.map(|why| Diagnostic::error("E5010", Span::of("--dtype"), why));
    lacking.map_or(Ok(()), |one| Err(one.help("use bf16, f16, f32 or f64")))
}

/// Whether an argument names an artefact: by its name, or by how the file begins.
pub fn is_artefact(path: &Path) -> bool {
    if path.extension().is_some_and(|extension| extension == EXTENSION) {
        return true;
    }
    // Whoever opens a pipe waits for the other end.
    if !path.is_file() {
        return false;
    }
    let mut start = [0; 2];
    let file = std::fs::File::open(path);
    let read = file.and_then(|mut file| std::io::Read::read_exact(&mut file, &mut start));
    read.is_ok() && &start == b"PK"
}

/// Reads an artefact that is to run on this machine: its plan's target is what it runs on.
///
/// # Errors
/// Those of [`read`] and [`check`]; `E4074` for each property that the machine lacks.
pub fn open(path: &Path) -> Result<Contents, Failure> {
    let Detected { cores, memory_bytes, instruction_set } = Detected::detect();
    let mut here = Machine { device: "cpu".to_owned(), instruction_set, cores, memory_bytes };
    let mut contents = read(path, &Limits::default())?;
    // As they were compiled, whatever runs them: what does not fit a frame lies beside it.
    check(&contents)?;
    let gpus = if contents.archs.is_empty() { None } else { gpus_here(cores) };
    match gpus {
        Some((machine, arch)) => {
            contents.plan.target = Some(Target::Cuda(arch));
            here = machine;
        }
        // On cores nothing is a GPU's.
        None => contents.plan.target = contents.plan.target.filter(|it| it.arch().is_none()),
    }
    let unmet = contents.requirements.unmet(&path.display().to_string(), &here);
    if !unmet.is_empty() {
        return Err(unmet.into());
    }
    Ok(contents)
}

/// The GPUs of this machine, and the architecture of the first.
fn gpus_here(cores: usize) -> Option<(Machine, Arch)> {
    let memory_bytes = runtime::cuda::gpus().ok()?.iter().map(|gpu| gpu.memory_bytes).sum();
    let arch = Context::open(0).ok()?.arch()?;
    let instruction_set = arch.name().to_owned();
    Some((Machine { device: "cuda".to_owned(), instruction_set, cores, memory_bytes }, arch))
}

/// Replays the programs of a file that anybody may have made: ranks that would wait for each other,
/// and reads of what nobody wrote, are found before anything runs.
///
/// # Errors
/// Those of [`codegen::check`].
pub fn check(contents: &Contents) -> Result<(), Vec<Diagnostic>> {
    let wrong = codegen::check::check(&contents.programs, &contents.kernels, &contents.plan);
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

/// What runs on every CPU: a cluster need not say more.
fn portable() -> String {
    "portable".to_owned()
}

/// How many different tokens a module knows: the last dim of its logits; 1 if it does not say.
pub fn vocab(module: &Module) -> usize {
    let types = module.function("logits").map(ir::Function::result_types).unwrap_or_default();
    let last = types.first().and_then(|ty| ty.dims.last()?.as_constant()).unwrap_or(1);
    last.clamp(1, i64::from(i32::MAX)) as usize
}
