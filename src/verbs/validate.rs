//! `validate`: predictions beside the measured runs of a table.

use std::collections::{BTreeMap, BTreeSet};

use ir::{Diagnostic, Span};
use planner::estimate::chosen::{self, Choice};
use planner::estimate::row::inference::{self, InferenceRun};
use planner::estimate::row::{self, Columns};
use planner::validate::{Compared, Summary, by_source, summarise};
use serde_json::{Value, json};

use crate::argument::PathArg;
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, usage};
use crate::output::{self, Table};

/// Flags of `validate`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The table: CSV, one measured run a row; lines that begin with # are comments
    pub table: PathArg,
    /// Write the rows with their predictions to this file
    #[arg(long, value_name = "FILE")]
    pub rows: Option<PathArg>,
    /// Print every row
    #[arg(long)]
    pub all: bool,
    /// Predict each source without what was chosen with its runs in view
    #[arg(long)]
    pub blind: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// The columns that `--rows` adds.
const ADDED: [&str; 4] = [
    "predicted_step_time_s",
    "predicted_step_time_low_s",
    "predicted_step_time_high_s",
    "predicted_peak_mem_gib",
];

/// The largest table that is read. Chosen: a hundred times the largest known one.
const TABLE_BYTES_MAX: u64 = 256 << 20;

/// What a table's runs are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Training,
    Inference,
}

impl Kind {
    /// What a table of these columns is of: only runs of inference have new tokens.
    fn of(columns: &[String]) -> Kind {
        let is_there = |wanted: &str| columns.iter().any(|name| name == wanted);
        if is_there("output_len") && !is_there("seq_len") {
            Kind::Inference
        } else {
            Kind::Training
        }
    }

    /// The columns that a table must have.
    fn needed(self) -> &'static [&'static str] {
        match self {
            Kind::Training => &row::COLUMNS,
            Kind::Inference => &inference::COLUMNS,
        }
    }

    /// The columns that are read.
    fn read(self) -> impl Iterator<Item = &'static str> {
        let (more, measured): (&[_], &[_]) = match self {
            Kind::Training => (&row::OPTIONAL, &[]),
            Kind::Inference => (&inference::OPTIONAL, &inference::MEASURED),
        };
        [self.needed(), &row::SHARED, more, measured].into_iter().flatten().copied()
    }
}

/// A table of texts.
pub struct Runs {
    kind: Kind,
    columns: Vec<String>,
    rows: Vec<csv::StringRecord>,
}

/// Other columns of published tables: what was measured beside times and memory, and where from.
/// Nothing is predicted from them.
const TOLD: [&str; 22] = [
    "active_params_b",
    "derived_fields",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "tflops_kind",
    "mfu_pct",
    "hfu_pct",
    "mfu_peak_tflops",
    "mem_note",
    "status",
    "notes",
    "source",
    "verified",
    "file",
    "latency_stat",
    "ttft_ms",
    "out_tok_s_per_gpu",
    "total_tok_s",
    "req_s",
    "mem_bw_gb_s",
    "usable_for_memory",
];

/// A column that nothing reads, and the known one whose name is like it.
struct Unread<'t> {
    name: &'t str,
    near: Option<&'static str>,
}

impl Runs {
    /// The columns that nothing reads, in order.
    fn unread(&self) -> Vec<Unread<'_>> {
        let read = || self.kind.read();
        let is_known = |name: &&String| read().chain(TOLD).any(|known| known == name.as_str());
        let is_there = |known: &str| self.columns.iter().any(|name| name == known);
        let unread = self.columns.iter().filter(|name| !is_known(name));
        let told = |name: &'_ String| {
            // What a table has under its own name is not what another column means.
            let near = ir::import::nearest(name, read().filter(|known| !is_there(known)));
            near.and_then(|near| read().find(|known| *known == near))
        };
        unread.map(|name| Unread { name, near: told(name) }).collect()
    }

    /// Names the columns that nothing reads.
    fn warning(&self, path: &PathArg) -> Option<Diagnostic> {
        let unread = self.unread();
        let names: Vec<String> = unread.iter().map(|unread| format!("`{}`", unread.name)).collect();
        let headline = match names.len() {
            0 => return None,
            1 => format!("nothing reads the column {}", names[0]),
            count => format!("nothing reads {count} columns: {}", names.join(", ")),
        };
        let near = unread.iter().filter_map(|unread| Some((unread.name, unread.near?)));
        let near: Vec<String> =
            near.map(|(name, near)| format!("is `{name}` meant as `{near}`?")).collect();
        let warning = Diagnostic::warning("W5018", Span::of(path), headline);
        Some(if near.is_empty() { warning } else { warning.help(near.join(" ")) })
    }
}

/// A row of a table.
struct Run<'t> {
    columns: &'t [String],
    texts: &'t csv::StringRecord,
}

impl Columns for Run<'_> {
    fn text(&self, column: &str) -> &str {
        let at = self.columns.iter().position(|name| name == column);
        at.and_then(|at| self.texts.get(at)).unwrap_or("")
    }
}

/// What became of a row.
enum Outcome {
    /// It was predicted.
    Compared(Box<Compared>),
    /// It cannot be expressed, for a reason.
    Unexpressed(String),
}

/// Answers `validate`.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let runs = read(&args.table)?;
    if let Some(warning) = runs.warning(&args.table) {
        output::note(&crate::failure::draw(&warning));
    }
    let outcomes: Vec<Outcome> =
        runs.rows.iter().map(|texts| compare(&runs, texts, args.blind)).collect();
    if let Some(path) = &args.rows {
        write(path, &runs, &outcomes)?;
        output::note(&format!("wrote {path}"));
    }
    if args.json {
        output::answer_json(&document(&runs, &outcomes, args.blind));
    } else {
        output::answer(&page(args, &runs, &outcomes));
    }
    Ok(Exit::Success)
}

/// Upper limit of diagnostics about names that several rows have. Chosen: that of other
/// diagnostics.
const TWICE_MAX: usize = 20;

/// Reads a table of measured runs.
///
/// # Errors
/// `E5011` for a column that is needed, `E5012` for what is no table; those of the file.
pub fn read(path: &PathArg) -> Result<Runs, Failure> {
    let bytes = std::fs::metadata(path).map(|m| m.len()).unwrap_or(0);
    if bytes > TABLE_BYTES_MAX {
        let headline = format!(
            "`{path}` has {}, more than {}",
            output::bytes(bytes),
            output::bytes(TABLE_BYTES_MAX)
        );
        return Err(usage("FILE", headline).into());
    }
    let text = crate::failure::read_text(path, "FILE")?;
    let mut reader =
        csv::ReaderBuilder::new().comment(Some(b'#')).flexible(false).from_reader(text.as_bytes());
    let broken = |error: csv::Error| {
        let at = error.position().map(|at| at.byte() as usize).unwrap_or(0);
        let span = Span { source: path.to_string(), bytes: at..at };
        Diagnostic::error("E5012", span, format!("the table cannot be read: {error}"))
            .help("write comma-separated values with as many in each row as in the first")
    };
    let columns: Vec<String> =
        reader.headers().map_err(broken)?.iter().map(|name| name.trim().to_owned()).collect();
    let kind = Kind::of(&columns);
    let missing: Vec<Diagnostic> = kind
        .needed()
        .iter()
        .filter(|wanted| !columns.iter().any(|name| name == *wanted))
        .map(|wanted| {
            let headline = format!("the table has no column `{wanted}`");
            let near = ir::import::nearest(wanted, columns.iter().map(String::as_str));
            let help = match near {
                Some(near) => format!("is it the one called `{near}`?"),
                None => format!("a table needs {}", kind.needed().join(", ")),
            };
            Diagnostic::error("E5011", Span::of(path), headline).help(help)
        })
        .collect();
    if !missing.is_empty() {
        return Err(missing.into());
    }
    let rows = reader.records().collect::<Result<Vec<_>, _>>().map_err(broken)?;
    let at = columns.iter().position(|name| name == "row_id");
    let mut seen = BTreeSet::new();
    let id = |row: &csv::StringRecord| at.and_then(|at| row.get(at)).unwrap_or("").to_owned();
    let twice: BTreeSet<String> =
        rows.iter().map(id).filter(|id| !seen.insert(id.clone())).collect();
    let twice = twice.into_iter().take(TWICE_MAX).map(|id| {
        let headline = format!("two rows have the `row_id` `{id}`");
        Diagnostic::error("E5012", Span::of(path), headline).help("name each row otherwise")
    });
    let twice: Vec<Diagnostic> = twice.collect();
    if twice.is_empty() { Ok(Runs { kind, columns, rows }) } else { Err(twice.into()) }
}

/// The prediction of a run of inference beside what was measured.
fn compare_inference(run: &Run<'_>, blind: bool) -> Result<Compared, String> {
    let source = run.text("engine").to_owned();
    let table = if blind { source.as_str() } else { "" };
    let question = InferenceRun::read(table, run)?;
    let answer = question.answer(table)?;
    let group = ["model", "gpu", "n_gpus", "input_len", "output_len", "weight_dtype"];
    let peak = run.text("peak_mem_gib").parse::<f64>().ok();
    Ok(Compared {
        row_id: run.text("row_id").to_owned(),
        source,
        group: group.map(|column| run.text(column)).join(" "),
        measured_s: question.measured_s,
        predicted_s: answer.seconds,
        interval_s: answer.interval_s,
        measured_gib: peak.filter(|gib| *gib > 0.0),
        predicted_gib: answer.bytes / GIB,
        memory: Value::Null,
        fits: answer.fits,
        defaults: question.defaults,
        breakdown: json!(answer.parts),
    })
}

fn compare(runs: &Runs, texts: &csv::StringRecord, blind: bool) -> Outcome {
    let run = Run { columns: &runs.columns, texts };
    if runs.kind == Kind::Inference {
        return match compare_inference(&run, blind) {
            Ok(compared) => Outcome::Compared(Box::new(compared)),
            Err(reason) => Outcome::Unexpressed(reason),
        };
    }
    let source = ["file", "framework"].map(|column| run.text(column));
    let source = source.into_iter().find(|text| !text.is_empty()).unwrap_or("");
    let table = if blind { source } else { "" };
    let found = row::read_without_source(table, &run).and_then(|question| {
        let estimate = question.answer_blind_to(table)?;
        Ok((question, estimate))
    });
    let (question, estimate) = match found {
        Ok(found) => found,
        Err(reason) => return Outcome::Unexpressed(reason),
    };
    let positive = |column: &str| run.text(column).parse::<f64>().ok().filter(|n| *n > 0.0);
    // A table that does not say which measurements are sound means all of them.
    let usable = |column: &str| {
        !runs.columns.iter().any(|name| name == column) || run.text(column).trim() == "1"
    };
    let fits = question.fits(&estimate, table);
    let in_gib = || positive("peak_mem_gib").or(positive("peak_mem_gb").map(|gb| gb * 1e9 / GIB));
    let group = ["model", "gpu", "n_gpus", "global_batch", "seq_len", "precision"];
    Outcome::Compared(Box::new(Compared {
        row_id: run.text("row_id").to_owned(),
        source: source.to_owned(),
        group: group.map(|column| run.text(column)).join(" "),
        measured_s: positive("step_time_s").filter(|_| usable("usable_for_time")),
        predicted_s: estimate.step_time_s,
        interval_s: [estimate.step_time_low_s, estimate.step_time_high_s],
        measured_gib: in_gib().filter(|_| usable("usable_for_memory")),
        predicted_gib: estimate.printed_memory.total_bytes() / GIB,
        memory: json!(estimate.printed_memory),
        fits,
        defaults: question.defaults,
        breakdown: json!(estimate.breakdown),
    }))
}

/// Bytes of a GiB.
const GIB: f64 = 1_073_741_824.0;

fn write(path: &PathArg, runs: &Runs, outcomes: &[Outcome]) -> Result<(), Failure> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let header = runs.columns.iter().map(String::as_str).chain(ADDED);
    let fail =
        |error: csv::Error| Failure::from(runtime::Error::io("write", path.path())(error.into()));
    writer.write_record(header).map_err(fail)?;
    for (texts, outcome) in runs.rows.iter().zip(outcomes) {
        let added = match outcome {
            Outcome::Compared(row) => {
                [row.predicted_s, row.interval_s[0], row.interval_s[1], row.predicted_gib]
                    .map(|number| format!("{number:.6}"))
            }
            Outcome::Unexpressed(_) => Default::default(),
        };
        writer.write_record(texts.iter().chain(added.iter().map(String::as_str))).map_err(fail)?;
    }
    let bytes = writer.into_inner().map_err(|error| fail(error.into_error().into()))?;
    std::fs::write(path, bytes)
        .map_err(|error| Failure::from(runtime::Error::io("write", path.path())(error)))
}

fn compared(outcomes: &[Outcome]) -> Vec<Compared> {
    let rows = outcomes.iter().filter_map(|outcome| match outcome {
        Outcome::Compared(row) => Some((**row).clone()),
        Outcome::Unexpressed(_) => None,
    });
    rows.collect()
}

/// Rows that cannot be expressed, with their reasons.
fn unexpressed<'t>(runs: &'t Runs, outcomes: &'t [Outcome]) -> Vec<(&'t str, &'t str)> {
    let id = |texts: &'t csv::StringRecord| {
        let at = runs.columns.iter().position(|name| name == "row_id");
        at.and_then(|at| texts.get(at)).unwrap_or("")
    };
    let rows = runs.rows.iter().zip(outcomes).filter_map(|(texts, outcome)| match outcome {
        Outcome::Unexpressed(reason) => Some((id(texts), reason.as_str())),
        Outcome::Compared(_) => None,
    });
    rows.collect()
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn signed(share: f64) -> String {
    format!("{:+.1} %", 100.0 * share)
}

fn page(args: &Args, runs: &Runs, outcomes: &[Outcome]) -> String {
    let rows = compared(outcomes);
    let all = summarise(rows.iter());
    let mut text = String::from("step time\n");
    let mut table =
        Table::new(["source", "rows", "median", "mean", "max", "bias", "in 80 %", "width"]);
    let mut add = |name: &str, summary: &Summary| {
        let time = summary.time;
        if time.rows > 0 {
            table.row([
                name.to_owned(),
                time.rows.to_string(),
                percent(time.median),
                percent(time.mean),
                percent(time.max),
                signed(time.bias),
                percent(summary.coverage),
                format!("{:.2}", summary.width),
            ]);
        }
    };
    let sources = by_source(&rows);
    sources.iter().for_each(|(name, summary)| add(name, summary));
    add("all", &all);
    text += &table.text();
    if all.memory.rows > 0 {
        text += "\npeak memory\n";
        let mut table = Table::new(["source", "rows", "median", "mean", "max", "bias"]);
        for (name, summary) in sources.iter().chain([(&"all".to_owned(), &all)]) {
            let memory = summary.memory;
            if memory.rows > 0 {
                table.row([
                    name.clone(),
                    memory.rows.to_string(),
                    percent(memory.median),
                    percent(memory.mean),
                    percent(memory.max),
                    signed(memory.bias),
                ]);
            }
        }
        text += &table.text();
    }
    let ranking = all.ranking;
    text += &format!(
        "\nranking  tau {:.3} over {} groups of {} rows; regret {} on average, {} at most\n",
        ranking.tau,
        ranking.groups,
        ranking.rows,
        percent(ranking.regret_mean),
        percent(ranking.regret_max)
    );
    text += &format!(
        "fit      {} of {} rows that ran are predicted not to fit\n",
        all.refused, all.time.rows
    );
    if args.blind {
        text += &set_aside(&sources);
    }
    let left = unexpressed(runs, outcomes);
    text += &format!("rows     {} predicted, {} not\n", rows.len(), left.len());
    for (id, reason) in &left {
        text += &format!("  {id}: {reason}\n");
    }
    if args.all {
        text += &listing(&rows);
    }
    text
}

/// What the predictions of each source do without.
fn set_aside(sources: &BTreeMap<String, Summary>) -> String {
    let mut text = String::from("\nwithout what was chosen with a source in view\n");
    for source in sources.keys() {
        for Choice { name, instead, .. } in chosen::seen(source) {
            text += &format!("  {source}: {name}; instead {instead}\n");
        }
    }
    text
}

fn listing(rows: &[Compared]) -> String {
    let mut table = Table::new(["row", "measured", "predicted", "error", "memory", "defaults"]);
    for row in rows {
        table.row([
            row.row_id.clone(),
            row.measured_s.map(output::seconds).unwrap_or_default(),
            output::seconds(row.predicted_s),
            row.time_error().map(signed).unwrap_or_default(),
            row.memory_error().map(signed).unwrap_or_default(),
            row.defaults.join(" "),
        ]);
    }
    format!("\n{}", table.text())
}

fn document(runs: &Runs, outcomes: &[Outcome], blind: bool) -> Value {
    let rows = compared(outcomes);
    let left = unexpressed(runs, outcomes);
    let rows_json: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "row_id": row.row_id,
                "source": row.source,
                "step_time_s": row.predicted_s,
                "step_time_low_s": row.interval_s[0],
                "step_time_high_s": row.interval_s[1],
                "peak_mem_bytes": row.predicted_gib * GIB,
                "memory": row.memory,
                "fits": row.fits,
                "time_error": row.time_error(),
                "memory_error": row.memory_error(),
                "defaults": row.defaults,
                "breakdown": row.breakdown,
            })
        })
        .collect();
    let sources = by_source(&rows);
    let without: Vec<Value> = sources
        .keys()
        .filter(|_| blind)
        .flat_map(|source| chosen::seen(source).map(move |choice| (source, choice)))
        .map(|(source, choice)| {
            json!({ "source": source, "name": choice.name, "instead": choice.instead })
        })
        .collect();
    let left = left.iter().map(|(id, reason)| json!({ "row_id": id, "reason": reason }));
    let unread = runs.unread();
    let unread = unread.iter().map(|unread| json!({ "name": unread.name, "near": unread.near }));
    let document = documents::Validate {
        predicted: rows.len() as u64,
        unexpressed: left.collect(),
        all: summarise(rows.iter()),
        sources,
        without,
        unread_columns: unread.collect(),
        rows: rows_json,
    };
    document.to_json()
}
