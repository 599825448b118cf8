//! `cluster`: which clusters are known, what one is, and whether a file describes one.

use planner::cluster::{Cluster, PRESETS};
use serde_json::{Value, json};

use crate::failure::{Exit, Failure};
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
        cluster: String,
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
    /// Say everything that is wrong with a file
    Validate {
        /// A preset or a file
        cluster: String,
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
            let found = Cluster::load(cluster)?;
            if *json {
                let mut document = json!(found);
                document["schema"] = json!("gantline.cluster/1");
                output::answer_json(&document);
            } else {
                output::answer(&found.to_string());
            }
        }
        Asked::Validate { cluster } => {
            let found = Cluster::load(cluster)?;
            output::answer(&format!("{cluster} is a cluster: {}", found.describe()));
        }
    }
    Ok(Exit::Success)
}

fn list(json: bool) -> Result<(), Failure> {
    let mut table = Table::new(["preset", "device", "memory", "memory/s", "links", "between"]);
    let mut rows: Vec<Value> = Vec::new();
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
        rows.push(json!({ "preset": name, "device": device.name }));
    }
    if json {
        output::answer_json(&json!({ "schema": "gantline.clusters/1", "presets": rows }));
    } else {
        output::answer(&table.text());
    }
    Ok(())
}
