//! `cluster`: which clusters are known, what one is, and whether a file describes one;
//! what this machine is.

use std::path::{Path, PathBuf};

use ir::Span;
use planner::cluster::detect::{self, Found};
use planner::cluster::{Cluster, PRESETS};
use planner::machine::Machine;

use crate::argument::PathArg;
use crate::documents::{self, Clusters, Detect, Document, GpuRow, PresetRow};
use crate::failure::{self, Exit, Failure};
use crate::output::{self, Table};

/// What is asked about clusters.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Asked {
    /// List the presets
    Ls {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
    /// Print a cluster with the origin of each number, as a file that reads back
    Show {
        /// A preset or a file
        cluster: PathArg,
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
    /// Write a file about this machine: its GPUs, or its cores where there are none
    Detect {
        /// The file [default: stdout]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
        /// Print one JSON document
        #[arg(long, conflicts_with = "output")]
        json: bool,
    },
    /// Say everything that is wrong with a file
    Validate {
        /// A preset or a file
        cluster: PathArg,
    },
}

/// Flags of `cluster`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// What is asked
    #[command(subcommand)]
    pub asked: Asked,
}

/// Answers `cluster`.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    match &args.asked {
        Asked::Ls { json } => list(*json)?,
        Asked::Show { cluster, json } => {
            let found = named(cluster)?;
            if *json {
                output::answer_json(&documents::Cluster { cluster: found }.to_json());
            } else {
                output::answer(&found.to_string());
            }
        }
        Asked::Detect { output, json } => detect(output.as_deref(), *json)?,
        Asked::Validate { cluster } => {
            let found = named(cluster)?;
            found.doubts().iter().for_each(|doubt| output::note(&failure::draw(doubt)));
            output::answer(&format!("{cluster} is a cluster: {}", found.describe()));
        }
    }
    Ok(Exit::Success)
}

/// The cluster that an argument names, which other verbs have a flag for.
fn named(cluster: &PathArg) -> Result<Cluster, Failure> {
    Cluster::load(cluster).map_err(|mut wrong| {
        for wrong in wrong.iter_mut().filter(|wrong| wrong.span == Span::of("--cluster")) {
            wrong.span = Span::of("CLUSTER");
        }
        Failure::Input(wrong)
    })
}

/// Asks the driver of NVIDIA GPUs, if there is one, and the system.
fn detect(path: Option<&Path>, json: bool) -> Result<(), Failure> {
    let machine = Machine::detect();
    let (found, absent) = match runtime::cuda::gpus() {
        Ok(gpus) => (gpus, None),
        Err(absent) => (Vec::new(), Some(absent.to_string())),
    };
    let found: Vec<Found> = found
        .into_iter()
        .map(|gpu| Found { name: gpu.name, memory_bytes: gpu.memory_bytes })
        .collect();
    let text = detect::text(&machine, &found, absent.as_deref());
    if json {
        let gpu = |gpu: Found| {
            let preset = detect::preset(&gpu.name).map(str::to_owned);
            GpuRow { name: gpu.name, memory_bytes: gpu.memory_bytes, preset }
        };
        let document = Detect {
            cores: machine.cores as u64,
            memory_bytes: machine.memory_bytes,
            instruction_set: machine.instruction_set,
            gpus: found.into_iter().map(gpu).collect(),
            absent,
            file: text,
        };
        output::answer_json(&document.to_json());
        return Ok(());
    }
    match path {
        Some(path) => {
            std::fs::write(path, text).map_err(runtime::Error::io("write", path))?;
            output::note(&format!("wrote {}", path.display()));
        }
        None => output::answer(&text),
    }
    Ok(())
}

fn list(json: bool) -> Result<(), Failure> {
    let mut table = Table::new(["preset", "device", "memory", "memory/s", "links", "between"]);
    let mut presets = Vec::new();
    for (name, _) in PRESETS {
        let cluster = Cluster::load(name)?;
        let device = &cluster.device;
        let rate = |value: f64| format!("{:.0} GB/s", value / 1e9);
        let link = |at: usize| {
            cluster.levels.get(at).map_or(String::new(), |level| rate(level.bandwidth.value))
        };
        table.row([
            name.to_owned(),
            device.name.clone(),
            output::bytes(device.memory_bytes.value as u64),
            rate(device.memory_bandwidth.value),
            link(0),
            link(1),
        ]);
        presets.push(PresetRow { preset: name.to_owned(), device: device.name.clone() });
    }
    if json {
        output::answer_json(&Clusters { presets }.to_json());
    } else {
        output::answer(&table.text());
    }
    Ok(())
}
