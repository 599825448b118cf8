//! `compile MODEL -o X.gtl`: everything that ranks need to run, in one file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use ir::import::{Model, nearest};
use ir::{Diagnostic, Plan, Target};
use kernels::Bytes;
use kernels::cuda::{Arch, Unknown};
use planner::cluster::Kind;
use runtime::artefact::{Contents, encode, write_bytes};

use crate::argument::{PathArg, amount};
use crate::artefact::{EXTENSION, assemble};
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, read_text, usage};
use crate::output;
use crate::training::{check_plan, predicted_here};
use crate::verbs::flags::RequestFlags;

/// Flags of `compile`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The question
    #[command(flatten)]
    pub asked: RequestFlags,
    /// Compile this plan, and search for none; ranks, batch, length and types are the plan's where
    /// no flag says them
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathArg>,
    /// Probability of every dropout [default: as the model's config says]
    #[arg(long, value_name = "P", value_parser = amount)]
    pub dropout: Option<f64>,
    /// Architectures of GPUs that the file has the kernels' text for, as CUDA C++: sm_80, sm_89,
    /// sm_90a, sm_100 [default: the plan's, where one is given]; `run` executes such a file where
    /// such a GPU is
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    pub arch: Vec<String>,
    /// The file to write [default: the model's name with .gtl]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Answers.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let mut archs = archs(&args.arch)?;
    let given = args.plan.as_ref().map(read).transpose()?;
    if let (true, Some((_, plan))) = (archs.is_empty(), &given) {
        // What the plan is for, unless something else is said.
        archs.extend(plan.target.and_then(Target::arch));
    }
    let mut asked =
        given.as_ref().map_or_else(|| args.asked.clone(), |(_, plan)| args.asked.about(plan));
    let cluster = asked.place.cluster()?;
    if given.is_some() && cluster.device.kind == Kind::Gpu {
        // Programs of a plan are made of its text, for the architecture of these devices.
        if args.arch.is_empty() {
            archs = cluster.target().and_then(Target::arch).into_iter().collect();
        }
        asked.place.cluster = "cpu-local".into();
    }
    let mut cluster = asked.place.cluster()?;
    // Kernels are those of the first architecture; the text for others computes the same.
    cluster.compiled_for = archs.first().map(|first| Target::Cuda(*first));
    let (model, question) = asked.question_on(cluster, args.dropout)?;
    let plan = match given {
        // What is predicted of GPUs stays, as their plan says.
        Some((path, plan)) if !archs.is_empty() => check_plan(&path, plan, &question)?,
        Some((path, plan)) => predicted_here(check_plan(&path, plan, &question)?, &question)?,
        None => {
            let mut plan = crate::plan(&question.job())?.plan;
            // Cores were asked how long they take, and not these GPUs.
            plan.predictions.retain(|name, _| archs.is_empty() || !name.starts_with("step_time"));
            plan
        }
    };
    let contents = assemble(&model, &question, plan, &archs)?;
    let path = args.output.clone().unwrap_or_else(|| format!("{}.{EXTENSION}", model.name).into());
    let bytes = encode(&contents).map_err(runtime::Error::io("encode", &path))?;
    write_bytes(&path, &bytes)?;
    if args.asked.json {
        output::answer_json(&document(&path, &bytes, &contents));
    } else {
        output::answer(&page(&path, &bytes, &contents, &model));
    }
    Ok(Exit::Success)
}

/// The plan of a file, and where it comes from.
pub(super) fn read(path: &PathArg) -> Result<(String, Plan), Failure> {
    let (shown, text) = (path.to_string(), read_text(path, "--plan")?);
    let plan = crate::training::training_plan(&shown, &text)?;
    Ok((shown, plan))
}

/// The architectures that are named, in their order.
fn archs(names: &[String]) -> Result<Vec<Arch>, Vec<Diagnostic>> {
    let (mut found, mut wrong) = (BTreeSet::new(), Vec::new());
    for name in names {
        match name.parse::<Arch>() {
            Ok(arch) if found.insert(arch) => {}
            Ok(arch) => {
                let twice = usage("--arch", format!("`{arch}` is named twice"));
                wrong.push(twice.help("name it once"));
            }
            Err(Unknown) => {
                let known = Arch::ALL.map(Arch::name);
                // `sm_90` means the one that has more to its name.
                let longer = known.into_iter().find(|known| known.starts_with(name.as_str()));
                let help = match longer.or_else(|| nearest(name, known)) {
                    Some(near) => format!("did you mean `{near}`?"),
                    None => format!("these are known: {}", known.join(", ")),
                };
                let headline = format!("there is no architecture `{name}`");
                wrong.push(usage("--arch", headline).help(help));
            }
        }
    }
    if wrong.is_empty() { Ok(found.into_iter().collect()) } else { Err(wrong) }
}

/// The document of a compiled file.
pub(super) fn document(path: &Path, bytes: &[u8], contents: &Contents) -> serde_json::Value {
    let document = documents::Compile {
        file: path.display().to_string(),
        bytes: bytes.len() as u64,
        blake3: blake3::hash(bytes).to_hex().to_string(),
        programs: contents.programs.len() as u64,
        kernels: contents.kernels.len() as u64,
        archs: contents.archs.iter().map(Arch::to_string).collect(),
        report: contents.report.clone(),
    };
    document.to_json()
}

fn page(path: &Path, bytes: &[u8], contents: &Contents, model: &Model) -> String {
    let Contents { plan, requirements, .. } = contents;
    let (count, gbs) = (output::count(model.param_count()), plan.global_batch_size());
    let machine = &requirements.machine;
    let cores = match &*machine.device {
        "cpu" => format!("{} cores", machine.cores),
        device => device.to_owned(),
    };
    let beside = |bytes: fn(&ir::program::Program) -> u64, what: &str| {
        let all = contents.programs.iter().map(bytes).sum::<u64>() * plan.mesh.dp as u64;
        if all == 0 { String::new() } else { format!(", {} of {what}", Bytes(all)) }
    };
    // That of CPUs is part of their memory.
    let on_host = match contents.archs.is_empty() {
        true => String::new(),
        false => beside(|program| program.host_bytes, "hosts"),
    };
    let on_disk = beside(|program| program.disk_bytes, "a disk");
    let predicted = plan.predictions.get("step_time_s").map(|p| output::seconds(p.value));
    format!(
        "model   {}: {count} parameters in {}, steps of {gbs} samples of {} tokens\n\
         plan    {} on {}, predicted {} a step\n\
         needs   {} ranks, {cores} with {}, {} of memory{on_host}{on_disk}\n\
         wrote   {}: {} with {} and {}\n",
        model.name,
        plan.dtype(),
        plan.seq,
        plan.mesh,
        plan.cluster,
        predicted.as_deref().unwrap_or("nothing for"),
        requirements.ranks,
        machine.instruction_set,
        Bytes(machine.memory_bytes),
        path.display(),
        Bytes(bytes.len() as u64),
        plural(contents.programs.len(), "program"),
        plural(contents.kernels.len(), "kernel"),
    )
}

fn plural(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
