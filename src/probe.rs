//! What this machine reaches, measured once and kept.
//!
//! Without a calibration the planner knows the rates of a common server core. A machine that asks
//! about itself is measured instead, for about a second; the rates, of two digits, are kept beside
//! the answers that were found before, in a file as `calibrate` writes it, by what the machine is.

use std::path::{Path, PathBuf};
use std::time::Instant;

use planner::calibrate::Sizes;
use planner::calibration::Calibration;
use planner::machine::{Machine, Ticks};

use crate::cache;
use crate::failure::Failure;
use crate::output;
use crate::verbs::calibrate::measured;

/// Seconds that measuring takes, about.
const BUDGET_S: f64 = 1.2;
/// The version of what is measured, raised where it is measured otherwise.
const VERSION: u32 = 2;
/// The share of the cores' time that others may take while rates are measured, for these to be
/// kept. Chosen: a tenth, which the medians of the rounds hardly see.
const OTHERS_MAX: f64 = 0.1;
/// What says how a machine is calibrated where no flag does.
pub const VARIABLE: &str = "GANTLINE_CALIBRATION";
/// What asks for the rates of the datasheet.
pub const NONE: &str = "none";

/// The rates of this machine: those that are kept, or else measured now and kept. A note tells the
/// user which.
///
/// # Errors
/// The system starts no threads.
pub fn rates() -> Result<Calibration, Failure> {
    let path = path();
    if let Some((path, kept)) = path.as_deref().and_then(|path| Some((path, read(path)?))) {
        output::note(&format!("rates    of this machine, as kept in {}", path.display()));
        return Ok(kept);
    }
    let (start, before) = (Instant::now(), Ticks::now());
    let found = measured(&Sizes::FEW, BUDGET_S)?;
    let took = output::seconds(start.elapsed().as_secs_f64());
    let others = Ticks::now().zip(before).and_then(|(now, before)| now.others_since(before));
    if let Some(others) = others.filter(|others| *others > OTHERS_MAX) {
        let share = 100.0 * others;
        output::note(&format!(
            "rates    of this machine, measured in {took} beside other work, which took \
             {share:.0}% of its cores: predictions hold for a machine so busy, and the rates are \
             not kept"
        ));
        return Ok(found);
    }
    let kept = path.filter(|path| write(path, &found.to_string()).is_ok());
    let kept = kept.map_or(String::new(), |path| format!(" and kept in {}", path.display()));
    output::note(&format!("rates    of this machine, measured in {took}{kept}"));
    Ok(found)
}

/// Where the rates of a machine like this one are kept.
fn path() -> Option<PathBuf> {
    let Machine { cores, instruction_set, .. } = Machine::detect();
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = processor.lines().find(|line| line.starts_with("model name"));
    let version = env!("CARGO_PKG_VERSION");
    let profile = if cfg!(debug_assertions) { "checked" } else { "plain" };
    let all = format!("{VERSION} {version} {profile} {cores} {instruction_set} {processor:?}");
    let name = &blake3::hash(all.as_bytes()).to_hex()[..16];
    Some(cache::folder("machines")?.join(format!("{name}.toml")))
}

/// What was kept; none where it cannot be read.
fn read(path: &Path) -> Option<Calibration> {
    let text = ir::file::read_text(path).ok()?;
    Calibration::parse(&path.display().to_string(), &text).ok()
}

fn write(path: &Path, text: &str) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let part = path.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&part, text)?;
    std::fs::rename(&part, path)
}
