//! `inspect X.gtl --kernels`: the device functions of a file that was compiled for GPUs.
//!
//! For each: how often a step launches it on the first rank that does, its blocks and threads, the
//! bytes and operations of its kernel, the least time that these take on two GPUs, and what it
//! takes of a multiprocessor (`resources.rs`). Sectors of device memory and turns of the banks of
//! shared memory follow from the tile programs of some families ([`kernels::cuda::Accesses`]), and
//! are not known of others. Where they depend on data, such as how tokens are routed, the page says
//! which data are assumed.

use std::collections::{BTreeMap, BTreeSet};

use ir::program::{Instruction, Step};
use ir::{DType, Diagnostic, Program, Span};
use kernels::cuda::{
    Accesses, Arch, Assumed, Elements, Functions, TensorTile, Tile, functions, functions_for, name,
};
use kernels::{Kernel, Product, price};
use planner::cluster::Cluster;
use rayon::prelude::*;
use runtime::artefact::Contents;
use serde_json::{Value, json};

use crate::documents::{self, Document};
use crate::failure::Failure;
use crate::output::{self, Table};
use crate::verbs::inspect::resources::resources;

/// Clusters whose devices the least times are of.
const DEVICES: [&str; 2] = ["a100", "h100"];

/// What is said of one device function.
struct Line {
    name: String,
    launches: usize,
    grid: u64,
    threads: u32,
    /// Bytes that the functions of its kernel pass on.
    workspace_bytes: u64,
    what: String,
    tile: String,
    /// What all blocks access, where it follows from the tile program.
    accesses: Option<Accesses>,
    /// The data that they are counted of, where data decide.
    assumed: Option<Assumed>,
}

impl Line {
    /// Sectors of device memory, and turns of the banks of shared memory, over the least; none
    /// where they are not known, or where nothing is accessed.
    fn accessed(&self) -> [Option<f64>; 2] {
        let ratio = |[found, least]: [u64; 2]| (least > 0).then(|| found as f64 / least as f64);
        let of = |accesses: Accesses| [accesses.sectors, accesses.turns].map(ratio);
        self.accesses.map_or([None; 2], of)
    }

    /// The same for people.
    fn shown(&self) -> [String; 2] {
        let unknown = if self.accesses.is_some() { "-" } else { "not known" };
        self.accessed().map(|of| of.map_or(unknown.to_owned(), |of| format!("{of:.2}")))
    }
}

/// What is said of a kernel, whose first function is at a place among all.
struct Told {
    at: usize,
    kernel: Kernel,
    /// Whether its operands of F32 are read as TF32.
    rounds: bool,
    launches: usize,
    /// The routines that launch it, and how often a step of the same rank does so.
    routines: BTreeMap<String, usize>,
    lines: Vec<Line>,
}

impl Told {
    /// `block fwd × 4, embed fwd`.
    fn launchers(&self) -> String {
        let launcher = |(name, count): (&String, &usize)| match count {
            1 => name.clone(),
            _ => format!("{name} × {count}"),
        };
        self.routines.iter().map(launcher).collect::<Vec<_>>().join(", ")
    }
}

/// The page of the functions of a file.
///
/// # Errors
/// `E5010` where the file has none, those of presets.
pub(super) fn page(source: &str, contents: &Contents) -> Result<String, Failure> {
    check(source, contents)?;
    let devices = devices()?;
    let archs: Vec<String> = contents.archs.iter().map(Arch::to_string).collect();
    let mut text = format!("text for {}\n\n", archs.join(", "));
    let mut table = Table::new([
        "function", "launches", "blocks", "threads", "bytes", "flop", "a100", "h100", "sectors",
        "banks",
    ]);
    let all = kernels(contents);
    for told in &all {
        for (number, line) in told.lines.iter().enumerate() {
            let of_kernel = |shown: String| if number == 0 { shown } else { String::new() };
            let [a100, h100] = [0, 1].map(|at: usize| least_s(told, &devices[at]));
            let [sectors, banks] = line.shown();
            table.row([
                line.name.clone(),
                line.launches.to_string(),
                output::count(line.grid),
                line.threads.to_string(),
                of_kernel(price::bytes(&told.kernel).to_string()),
                of_kernel(price::flops(&told.kernel).to_string()),
                of_kernel(output::seconds(a100)),
                of_kernel(output::seconds(h100)),
                sectors,
                banks,
            ]);
        }
    }
    text += &table.text();
    text += "\nbytes, operations and least times are those of all functions of a kernel\n\
             sectors of device memory and turns of the banks of shared memory are over the least \
             that their bytes take\n";
    let assumed: BTreeSet<Assumed> =
        all.iter().flat_map(|told| &told.lines).filter_map(|line| line.assumed).collect();
    for of in assumed {
        text += &format!("where data decide, sectors and turns are those of {of}\n");
    }
    text.push('\n');
    let (resources, known) = resources(contents);
    match known {
        Ok(compiler) => {
            for of in resources {
                text += &format!("on {}, as {compiler} compiles them\n\n", of.arch);
                text += &format!("{}\n", of.table().text());
            }
        }
        Err(why) => {
            text += &format!("registers, shared memory and occupancy: not known; {why}\n\n");
        }
    }
    for told in &all {
        for line in &told.lines {
            text += &format!("{} {}; {}\n", line.name, line.what, line.tile);
        }
        if !told.routines.is_empty() {
            text += &format!("  launched by {}\n", told.launchers());
        }
    }
    Ok(text)
}

/// The document of the functions of a file.
///
/// # Errors
/// Those of [`page`].
pub(super) fn document(source: &str, contents: &Contents) -> Result<Value, Failure> {
    check(source, contents)?;
    let devices = devices()?;
    let (resources, known) = resources(contents);
    let kernel = |told: &Told| {
        let line = |line: &Line| {
            let [sectors, banks] = line.accessed();
            json!({
                "name": line.name,
                "what": line.what,
                "tile": line.tile,
                "blocks": line.grid,
                "threads": line.threads,
                "sectors_over_least": sectors,
                "bank_turns_over_least": banks,
                "accesses_assume": line.assumed.map(|of| of.to_string()),
            })
        };
        let least = DEVICES
            .iter()
            .zip(&devices)
            .map(|(name, device)| ((*name).to_owned(), json!(least_s(told, device))));
        let resources = resources
            .iter()
            .map(|of| (of.arch.name().to_owned(), of.of_kernel(told.at)))
            .collect::<serde_json::Map<String, Value>>();
        json!({
            "kernel": told.at,
            "text": told.kernel.to_string(),
            "launches": told.launches,
            "routines": told.routines,
            "bytes": price::bytes(&told.kernel).0,
            "flops": price::flops(&told.kernel).0,
            "workspace_bytes": told.lines.first().map_or(0, |line| line.workspace_bytes),
            "least_s": least.collect::<serde_json::Map<String, Value>>(),
            "functions": told.lines.iter().map(line).collect::<Vec<Value>>(),
            "resources": resources,
        })
    };
    let archs = contents.archs.iter().map(Arch::to_string).collect();
    let kernels = kernels(contents).iter().map(kernel).collect();
    let (compiler, why) = (known.as_ref().ok().cloned(), known.err());
    Ok(documents::Kernels { archs, compiler, why_not_compiled: why, kernels }.to_json())
}

fn check(source: &str, contents: &Contents) -> Result<(), Diagnostic> {
    if !contents.archs.is_empty() {
        return Ok(());
    }
    let headline = format!("`{source}` is compiled for CPUs, and has no text of kernels");
    let help = "compile it with `--arch sm_80,sm_90a`, or leave --kernels out";
    Err(Diagnostic::error("E5010", Span::of("--kernels"), headline).help(help))
}

fn devices() -> Result<Vec<Cluster>, Vec<Diagnostic>> {
    DEVICES.iter().map(Cluster::load).collect()
}

/// All kernels with their functions, and how often a step launches them.
fn kernels(contents: &Contents) -> Vec<Told> {
    let told = |(at, kernel): (usize, &Kernel)| {
        let mut of = contents.programs.iter().map(|program| routines(program, at));
        let routines = of.find(|found| !found.is_empty()).unwrap_or_default();
        let launches = routines.values().sum();
        // Functions of other architectures may have other tiles.
        let all = match contents.archs.first() {
            Some(arch) => functions_for(kernel, *arch),
            None => functions(kernel),
        };
        let (workspace_bytes, Functions { functions, .. }) = (all.workspace().0, all);
        let is_rounded = |tile: &TensorTile| tile.elements == Elements::Tf32;
        let rounds = functions.iter().any(|f| matches!(&f.tile, Tile::Tensor(t) if is_rounded(t)));
        let lines = functions.iter().enumerate().map(|(number, function)| Line {
            name: name(at, number),
            launches,
            grid: function.grid,
            threads: function.threads,
            workspace_bytes,
            what: function.what.clone(),
            tile: function.tile.to_string(),
            accesses: function.accesses(),
            assumed: function.assumed(),
        });
        Told { at, kernel: kernel.clone(), rounds, launches, routines, lines: lines.collect() }
    };
    contents.kernels.par_iter().enumerate().map(told).collect()
}

/// The routines of a program that launch a kernel, and how often a step does.
fn routines(program: &Program, kernel: usize) -> BTreeMap<String, usize> {
    let is_it = |instruction: &&Instruction| {
        let Instruction::Launch { kernel: launched, .. } = instruction else { return false };
        *launched == kernel
    };
    let mut found = BTreeMap::new();
    for step in &program.steps {
        let Step::Call { routine, .. } = step else { continue };
        let routine = &program.routines[*routine];
        let count = routine.instructions.iter().filter(is_it).count();
        if count > 0 {
            *found.entry(routine.name.clone()).or_default() += count;
        }
    }
    found
}

/// The least time of a kernel: its bytes at the device's bandwidth, or its operations at its peak.
/// Products that round to TF32 have half of BF16's, as the datasheets of both devices say.
fn least_s(told: &Told, cluster: &Cluster) -> f64 {
    let kernel = &told.kernel;
    let widest = |p: &Product| p.stored.a.size().max(p.stored.b.size());
    let operand_bytes = match kernel {
        Kernel::Product(p) => widest(p),
        Kernel::Products(p) => p.parts.iter().map(|of| widest(&of.product)).max().unwrap_or(4),
        Kernel::Attention(a) | Kernel::AttentionBwd(a) => a.dtype.size(),
        Kernel::Experts(e) | Kernel::ExpertsBwd(e) => e.dtype.size(),
        Kernel::Rows(_)
        | Kernel::Gather(_)
        | Kernel::ScatterAdd(_)
        | Kernel::Replace(_)
        | Kernel::Lines(_)
        | Kernel::Rope(_)
        | Kernel::Copy(_)
        | Kernel::Place(_)
        | Kernel::Take(_)
        | Kernel::Fill(_) => 4,
    };
    let flops_per_s = match (operand_bytes, told.rounds) {
        (1, _) => cluster.flops_per_s(DType::F8E4M3, 1).value,
        (2, _) => cluster.flops_per_s(DType::BF16, 1).value,
        (_, true) => cluster.flops_per_s(DType::BF16, 1).value / 2.0,
        (_, false) => cluster.flops_per_s(DType::F32, 1).value,
    };
    let bytes_s = price::bytes(kernel).0 as f64 / cluster.memory_bandwidth(1).value;
    let flops_s = price::flops(kernel).0 as f64 / flops_per_s;
    bytes_s.max(flops_s)
}
