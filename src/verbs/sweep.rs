//! `sweep`: the fastest plan for every combination of clusters, devices, batches and lengths, as a
//! heat map for people and as CSV or JSON for programs.

use std::path::PathBuf;

use clap::ValueEnum;
use indicatif::ProgressBar;
use ir::lora::Lora;
use kernels::{Bytes, Seconds};
use planner::cluster::Cluster;
use planner::search::request::Chosen;
use planner::tools::Target;

use super::flags::{RequestFlags, refuse_cpus};
use super::gpus::{Subject, adapter_line, answer, plan_row};
use crate::argument::{PathArg, length, positive};
use crate::documents::{Document, Sweep, SweepRow};
use crate::failure::{Exit, Failure, usage};
use crate::job::{self, Limited, Precision, Where};
use crate::output;
use crate::run::model_argument;
use crate::verbs::assume::Assumed;

/// Combinations that are searched at most. Chosen: minutes, at some tenths of a second each.
const CELLS_MAX: usize = 4096;

/// Flags of `sweep`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The model: a directory, that of a run too, a config.json, a .graph text or a preset
    #[arg(value_parser = model_argument())]
    pub model: PathArg,
    /// Clusters: presets or files
    #[arg(long, value_name = "PRESET|FILE", value_delimiter = ',', required = true)]
    pub cluster: Vec<PathArg>,
    /// Numbers of devices [default: all devices of each cluster]
    #[arg(long, visible_alias = "ranks", value_name = "N", value_delimiter = ',')]
    #[arg(value_parser = positive)]
    pub devices: Vec<usize>,
    /// Samples of a step, over all devices [default: 8, or as many as devices]
    #[arg(long, alias = "global-batch-size", value_name = "N", value_delimiter = ',')]
    #[arg(value_parser = positive)]
    pub gbs: Vec<usize>,
    /// Tokens of a sample [default: the longest the model was made for]
    #[arg(long, alias = "seq-length", value_name = "N", value_delimiter = ',')]
    #[arg(value_parser = length)]
    pub seq: Vec<usize>,
    /// What may be chosen
    #[command(flatten)]
    pub limited: Limited,
    /// The element type [default: bf16]
    #[arg(long, value_name = "TYPE", value_parser = job::precision)]
    pub dtype: Option<Precision>,
    /// Freeze the model and train low-rank adapters: as `plan --lora`
    #[arg(long, value_name = "rank=N,alpha=X,targets=NAME,…")]
    pub lora: Option<Lora>,
    /// Plan for a tool, on GPUs: megatron, deepspeed or torchtitan, with a release as in
    /// megatron@core-0.13. The search stays within what it can express, priced as it executes
    #[arg(long, value_name = "TOOL[@RELEASE]", value_parser = job::tool)]
    pub for_tool: Option<Target>,
    /// What is stated of the executor
    #[command(flatten)]
    pub assumed: Assumed,
    /// What the map shows
    #[arg(long, value_enum, value_name = "WHAT", default_value = "tokens")]
    pub show: Shown,
    /// Write all rows to this file, as CSV
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// What a cell of the map shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shown {
    /// Tokens per second of one device
    Tokens,
    /// Seconds of a step
    Step,
    /// Model flops utilisation
    Mfu,
    /// Bytes of the fullest device
    Memory,
}

impl Shown {
    /// What it is, for people.
    fn title(self) -> &'static str {
        match self {
            Shown::Tokens => "tokens/s of one device",
            Shown::Step => "seconds of a step",
            Shown::Mfu => "MFU",
            Shown::Memory => "memory of the fullest device",
        }
    }

    /// The number of a row.
    fn value(self, row: &SweepRow) -> Option<f64> {
        match self {
            Shown::Tokens => row.tokens_per_s_per_device,
            Shown::Step => row.step_time_s,
            Shown::Mfu => row.mfu,
            Shown::Memory => row.peak_mem_bytes,
        }
    }

    fn text(self, value: f64) -> String {
        match self {
            Shown::Tokens => output::count(value as u64),
            Shown::Step => Seconds(value).to_string(),
            Shown::Mfu => format!("{:.1}%", 100.0 * value),
            Shown::Memory => Bytes(value as u64).to_string(),
        }
    }

    /// How good a number is among others, from 0, the worst, to 1, the best.
    fn goodness(self, value: f64, [least, most]: [f64; 2]) -> f64 {
        let part = if most > least { (value - least) / (most - least) } else { 1.0 };
        match self {
            Shown::Tokens | Shown::Mfu => part,
            Shown::Step | Shown::Memory => 1.0 - part,
        }
    }
}

/// Answers `sweep`; no where nothing fits anywhere.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    output::or_document(args.json, swept(args))
}

fn swept(args: &Args) -> Result<Exit, Failure> {
    let rows = rows(args)?;
    // Combinations differ in their devices and sizes, and are executed alike.
    let first = |numbers: &[usize]| numbers.first().copied();
    let sizes = [&args.devices, &args.gbs, &args.seq].map(|list| first(list));
    let (subject, _) = subject(args, &args.cluster[0], sizes)?;
    if let Some(path) = &args.output {
        std::fs::write(path, csv(&rows)?).map_err(runtime::Error::io("write", path))?;
        output::note(&format!("wrote {}", path.display()));
    }
    let exit = match rows.iter().any(|row| row.fits) {
        true => Exit::Success,
        false => Exit::Infeasible,
    };
    if args.json {
        let model = args.model.to_string();
        let executor = Some(subject.executor());
        output::answer_json(&Sweep { model, rows, executor }.to_json());
    } else {
        output::answer(&page(args, &subject, &rows));
    }
    Ok(exit)
}

/// The fastest plan of each combination, clusters outermost, then lengths, devices and batches.
fn rows(args: &Args) -> Result<Vec<SweepRow>, Failure> {
    let or_open = |numbers: &[usize]| -> Vec<Option<usize>> {
        if numbers.is_empty() { vec![None] } else { numbers.iter().copied().map(Some).collect() }
    };
    let [devices, gbs, seq] = [&args.devices, &args.gbs, &args.seq].map(|list| or_open(list));
    let count = [args.cluster.len(), devices.len(), gbs.len(), seq.len()]
        .into_iter()
        .fold(1, usize::saturating_mul);
    if count > CELLS_MAX {
        let headline = format!("{count} combinations, more than {CELLS_MAX}");
        return Err(usage("sweep", headline).help("leave some values out").into());
    }
    let bar = ProgressBar::new(count as u64);
    let mut rows = Vec::with_capacity(count);
    for cluster in &args.cluster {
        for seq in &seq {
            for devices in &devices {
                for gbs in &gbs {
                    rows.push(row(args, cluster, [*devices, *gbs, *seq])?);
                    bar.inc(1);
                }
            }
        }
    }
    bar.finish_and_clear();
    Ok(rows)
}

/// The question of one combination.
fn subject(
    args: &Args,
    cluster: &PathArg,
    [devices, gbs, seq]: [Option<usize>; 3],
) -> Result<(Subject, RequestFlags), Failure> {
    let asked = RequestFlags {
        model: args.model.clone(),
        place: Where { cluster: cluster.clone(), ranks: devices, nodes: None, calibration: None },
        limited: args.limited.clone(),
        seq,
        gbs,
        dtype: args.dtype,
        precision: Vec::new(),
        lora: args.lora.clone(),
        document_mask: false,
        imbalance: None,
        assumed: args.assumed.clone(),
        for_tool: args.for_tool,
        optimizer: "adamw".to_owned(),
        json: false,
        no_cache: true,
    };
    let there: Cluster = asked.place.cluster()?;
    refuse_cpus(&there, "`plan` searches for their ranks")?;
    if !there.groups.is_empty() {
        let headline = format!("`{cluster}` has groups of other devices each");
        return Err(usage("--cluster", headline).help("`plan` searches over groups").into());
    }
    Ok((Subject::quiet(&asked, there)?, asked))
}

/// One combination: its fastest plan, or why there is none.
fn row(args: &Args, cluster: &PathArg, sizes: [Option<usize>; 3]) -> Result<SweepRow, Failure> {
    let (subject, asked) = subject(args, cluster, sizes)?;
    let empty = SweepRow {
        cluster: cluster.to_string(),
        devices: subject.devices.into(),
        gbs: subject.global_batch.into(),
        seq: subject.seq.into(),
        fits: false,
        plan: None,
        step_time_s: None,
        step_time_low_s: None,
        step_time_high_s: None,
        tokens_per_s: None,
        tokens_per_s_per_device: None,
        mfu: None,
        peak_mem_bytes: None,
        reason: None,
    };
    match answer(&subject, &asked) {
        Ok(found) => Ok(filled(&subject, &found.best[0], empty)),
        Err(failure) => Ok(SweepRow { reason: Some(failure.into_no()?.headline), ..empty }),
    }
}

fn filled(subject: &Subject, best: &Chosen, empty: SweepRow) -> SweepRow {
    let row = plan_row(subject, best);
    SweepRow {
        fits: row.fits,
        plan: Some(row.text),
        step_time_s: Some(row.step_time_s),
        step_time_low_s: Some(row.step_time_low_s),
        step_time_high_s: Some(row.step_time_high_s),
        tokens_per_s: Some(row.tokens_per_s),
        tokens_per_s_per_device: Some(row.tokens_per_s_per_device),
        mfu: row.mfu,
        peak_mem_bytes: Some(row.peak_mem_bytes),
        ..empty
    }
}

/// All rows, with a header of the keys that they have in JSON.
fn csv(rows: &[SweepRow]) -> Result<Vec<u8>, Failure> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let written = rows.iter().try_for_each(|row| writer.serialize(row));
    let broken = |why: String| usage("--output", format!("the rows cannot be written: {why}"));
    written.map_err(|why| broken(why.to_string()))?;
    Ok(writer.into_inner().map_err(|why| broken(why.to_string()))?)
}

/// A map for each cluster and length: devices down, batches across, the darker the better.
fn page(args: &Args, subject: &Subject, rows: &[SweepRow]) -> String {
    let mut text = format!("model    {}\n", args.model);
    text += &adapter_line(&subject.work);
    text += &subject.executor_lines();
    for map in rows.chunk_by(|a, b| (&a.cluster, a.seq) == (&b.cluster, b.seq)) {
        text += &format!(
            "\n{}, {} tokens a sample: {} by devices (down) and samples of a step (across)\n",
            map[0].cluster,
            output::count(map[0].seq),
            args.show.title()
        );
        let values = || map.iter().filter_map(|row| args.show.value(row));
        let range = [values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max)];
        let lines: Vec<&[SweepRow]> = map.chunk_by(|a, b| a.devices == b.devices).collect();
        let across: Vec<String> = lines[0].iter().map(|row| output::count(row.gbs)).collect();
        // Without --gbs the batch follows the devices.
        let across = if args.gbs.is_empty() { vec!["as devices".to_owned()] } else { across };
        let cell = |row: &SweepRow| match args.show.value(row) {
            Some(value) => {
                let shade = shade(args.show.goodness(value, range));
                format!("{} {shade}{shade}", args.show.text(value))
            }
            None => "no plan   ".to_owned(),
        };
        let mut table: Vec<Vec<String>> =
            vec![std::iter::once(String::new()).chain(across).collect()];
        for line in lines {
            let head = output::count(line[0].devices);
            table.push(std::iter::once(head).chain(line.iter().map(cell)).collect());
        }
        text += &aligned(&table);
    }
    if let Some(best) = best(args.show, rows) {
        let row = &rows[best];
        text += &format!(
            "\nbest     {} on {} x {} with {} samples of {} tokens: {}\n",
            args.show.value(row).map(|value| args.show.text(value)).unwrap_or_default(),
            row.devices,
            row.cluster,
            output::count(row.gbs),
            output::count(row.seq),
            row.plan.as_deref().unwrap_or_default()
        );
    }
    let none: Vec<&SweepRow> = rows.iter().filter(|row| row.reason.is_some()).collect();
    if let Some(first) = none.first() {
        let reason = first.reason.as_deref().unwrap_or_default();
        text += &format!("no plan  for {} of {} combinations: {reason}", none.len(), rows.len());
        text += if none.len() > 1 { ", …\n" } else { "\n" };
    }
    text
}

/// Right-aligned columns, as wide as their widest cells.
fn aligned(table: &[Vec<String>]) -> String {
    let columns = table.iter().map(Vec::len).max().unwrap_or(0);
    let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
    let width = |column| table.iter().map(|row| cell(row, column).chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = widths.iter().enumerate().map(|(at, width)| {
            let text = cell(row, at);
            format!("  {text:>width$}")
        });
        format!("{}\n", cells.collect::<String>().trim_end())
    };
    table.iter().map(line).collect()
}

/// Characters from the worst to the best.
fn shade(goodness: f64) -> char {
    const SHADES: [char; 5] = ['·', '░', '▒', '▓', '█'];
    SHADES[((goodness * 5.0) as usize).min(SHADES.len() - 1)]
}

/// The best row of those that have a plan; the first of equal ones.
fn best(shown: Shown, rows: &[SweepRow]) -> Option<usize> {
    let all = rows.iter().enumerate().filter_map(|(at, row)| Some((at, shown.value(row)?)));
    let better = |(best, value): (usize, f64), (at, other): (usize, f64)| {
        let is_better = match shown {
            Shown::Tokens | Shown::Mfu => other > value,
            Shown::Step | Shown::Memory => other < value,
        };
        if is_better { (at, other) } else { (best, value) }
    };
    all.reduce(better).map(|(at, _)| at)
}
