//! `checkpoint`: which checkpoints a run has, and whether each is what was written.

use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use ir::{Diagnostic, Span};
use runtime::checkpoint::{Checkpoint, Store};
use runtime::lock::utc;
use serde_json::{Value, json};

use crate::documents::{Checkpoints, Document};
use crate::failure::{Exit, Failure, draw};
use crate::output::{self, Table};
use crate::run::Run;

/// What is asked about checkpoints.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Asked {
    /// List the checkpoints of a run
    Ls {
        /// The directory of a run
        run: PathBuf,
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
    /// Read every byte of the checkpoints of a run, and say which are intact
    Verify {
        /// The directory of a run
        run: PathBuf,
        /// Only the checkpoint of this step
        #[arg(long, value_name = "N")]
        step: Option<u64>,
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
}

/// Flags of `checkpoint`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// What is asked
    #[command(subcommand)]
    pub asked: Asked,
}

/// What is known of the checkpoint of a step.
struct Row {
    step: u64,
    is_latest: bool,
    bytes: Option<u64>,
    /// Seconds since 1970.
    saved_s: Option<u64>,
    /// What is damaged; none where nobody looked.
    damage: Option<Vec<Diagnostic>>,
}

/// Answers `checkpoint`.
///
/// # Errors
/// `E5003` for what is no run, `E4040` where there is no checkpoint.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let (folder, only, is_verified, json) = match &args.asked {
        Asked::Ls { run, json } => (run, None, false, *json),
        Asked::Verify { run, step, json } => (run, *step, true, *json),
    };
    if !Run::is_at(folder) {
        let shown = folder.display().to_string();
        let headline = format!("`{shown}` is no directory of a run");
        let wrong = Diagnostic::error("E5003", Span::of(shown), headline);
        return Err(wrong.help("name a directory that `gantline train --out` wrote").into());
    }
    let run = Run { folder: folder.clone() };
    let rows = rows(&run.store(None), only, is_verified)?;
    if json {
        let checkpoints = rows.iter().map(Row::to_json).collect();
        let run = folder.display().to_string();
        output::answer_json(&Checkpoints { run, checkpoints }.to_json());
    } else {
        output::answer(&text(&rows));
        let damage = rows.iter().filter_map(|row| row.damage.as_ref()).flatten();
        damage.for_each(|wrong| output::note(draw(wrong).trim_end()));
    }
    let is_damaged = rows.iter().any(|row| row.damage.as_ref().is_some_and(|d| !d.is_empty()));
    Ok(if is_damaged { Exit::BadFile } else { Exit::Success })
}

/// The checkpoints, ascending; all bytes of them are read where they are to be verified.
fn rows(store: &Store, only: Option<u64>, is_verified: bool) -> Result<Vec<Row>, Failure> {
    let steps = store.steps()?;
    let latest = store.latest_step()?;
    if only.is_some_and(|step| !steps.contains(&step)) || steps.is_empty() {
        // Says which steps there are.
        store.open(only.unwrap_or(0))?;
    }
    let mut rows = Vec::new();
    for step in steps.into_iter().filter(|step| only.is_none_or(|only| only == *step)) {
        let opened = store.open(step);
        if !store.folder_of(step).is_dir() {
            // Its run has removed it since.
            continue;
        }
        let saved = std::fs::metadata(store.folder_of(step)).and_then(|folder| folder.modified());
        let saved = saved.ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let bytes = opened.as_ref().ok().map(Checkpoint::bytes);
        let damage =
            match opened.and_then(|opened| if is_verified { opened.verify() } else { Ok(()) }) {
                Ok(()) => is_verified.then(Vec::new),
                Err(runtime::Failure::Input(found)) => Some(found),
                Err(runtime::Failure::World(error)) => return Err(error.into()),
            };
        let is_latest = latest == Some(step);
        rows.push(Row { step, is_latest, bytes, saved_s: saved.map(|s| s.as_secs()), damage });
    }
    Ok(rows)
}

impl Row {
    fn to_json(&self) -> Value {
        let texts = |found: &Vec<Diagnostic>| found.iter().map(|d| d.headline.clone()).collect();
        let damage: Option<Vec<String>> = self.damage.as_ref().map(texts);
        json!({
            "step": self.step,
            "latest": self.is_latest,
            "bytes": self.bytes,
            "saved_s": self.saved_s,
            "intact": damage.as_ref().map(Vec::is_empty),
            "damage": damage.unwrap_or_default(),
        })
    }

    fn state(&self) -> &'static str {
        match &self.damage {
            None => "",
            Some(found) if found.is_empty() => "intact",
            Some(_) => "damaged",
        }
    }
}

fn text(rows: &[Row]) -> String {
    let mut table = Table::new(["step", "saved", "size", "", "state"]);
    for row in rows {
        table.row([
            row.step.to_string(),
            row.saved_s.map(utc).unwrap_or_default(),
            row.bytes.map(output::bytes).unwrap_or_default(),
            if row.is_latest { "latest" } else { "" }.to_owned(),
            row.state().to_owned(),
        ]);
    }
    table.text()
}
