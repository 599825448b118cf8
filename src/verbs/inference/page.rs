//! What is printed of ways to lie for inference.

use kernels::{Bytes, Seconds};
use planner::estimate::profile::Profile;
use planner::estimate::serving::{Lengths, Speculation, Storage};
use serde_json::{Value, json};

use super::{Copies, Row, WORTH};
use crate::documents::{self, Document};
use crate::failure::Exit;
use crate::output::{self, Table};
use crate::verbs::assume;
use crate::verbs::flags::Purpose;
use crate::verbs::gpus::{Subject, assumption_lines};

/// Rows that a page lists at most; documents have all.
const LISTED: usize = 24;

/// Prints all rows; yes where one fits.
pub(super) fn print(copies: &Copies<'_>, rows: &[Row], json: bool) -> Exit {
    let (exit, text) = answered(copies, rows, json);
    output::answer(&text);
    exit
}

/// What is printed of all rows, the best first; yes where one fits.
pub(super) fn answered(copies: &Copies<'_>, rows: &[Row], json: bool) -> (Exit, String) {
    let answer = rows.iter().any(|row| row.fits(copies.purpose));
    let text = if json { format!("{:#}", document(copies, rows)) } else { page(copies, rows) };
    (if answer { Exit::Success } else { Exit::Infeasible }, text)
}

/// The row to take: the first, if it fits.
pub(super) fn recommended<'r>(copies: &Copies<'_>, rows: &'r [Row]) -> Option<&'r Row> {
    rows.first().filter(|row| row.fits(copies.purpose))
}

/// Why a row is the one to take.
pub(super) fn reason(copies: &Copies<'_>, rows: &[Row]) -> String {
    let fitting = rows.iter().filter(|row| row.fits(copies.purpose)).count();
    let what = match copies.purpose {
        Purpose::Prefill => "tokens of prompts",
        Purpose::Training | Purpose::Inference | Purpose::Decode => "new tokens",
    };
    match fitting {
        1 => "the only way that fits".to_owned(),
        _ => format!("the most {what} per second of the {fitting} ways that fit"),
    }
}

fn document(copies: &Copies<'_>, rows: &[Row]) -> Value {
    let told = |row: &Row| told(copies, row);
    let recommended = recommended(copies, rows).map(|row| {
        let mut row = told(row);
        row["reason"] = json!(reason(copies, rows));
        row
    });
    let document = documents::Inference {
        subject: served(copies),
        fits: recommended.is_some(),
        recommended: recommended.and_then(|row| row.as_object().cloned()),
        missing_bytes: missing_bytes(copies, rows),
        rows: rows.iter().map(told).collect(),
    };
    document.to_json()
}

/// What is asked about, for programs.
pub(super) fn served(copies: &Copies<'_>) -> documents::ServedModel {
    let Subject { work, cluster, devices, dtype, .. } = copies.subject;
    documents::ServedModel {
        model: work.name.clone(),
        cluster: cluster.describe(),
        devices: (*devices).into(),
        seq: copies.seq().into(),
        dtype: dtype.name().to_owned(),
        assumptions: work.assumptions.clone(),
        have_bytes: copies.have_bytes(),
        executor: Some(executor(copies)),
    }
}

/// How passes are assumed to be executed, for programs.
pub(super) fn executor(copies: &Copies<'_>) -> documents::Engine {
    let Profile { name, source, attention, .. } = copies.engine;
    documents::Engine {
        profile: name.to_owned(),
        source: source.to_owned(),
        attention: attention.name().to_owned(),
        assumptions: copies.facts().into_iter().map(documents::Assumed::from).collect(),
    }
}

/// One row, for programs.
pub(super) fn told(copies: &Copies<'_>, row: &Row) -> Value {
    let fits = row.fits(copies.purpose);
    json!({
        "layout": row.copy.to_string(),
        "tp": row.copy.tp,
        "pp": row.copy.pp,
        "ep": row.copy.ep,
        "copies": row.copies,
        "fits": fits,
        "weights_bytes": row.held.weights_bytes,
        "cache_bytes_per_token": row.held.cache_bytes_per_token,
        "need_bytes": row.need_bytes,
        "longest_context": row.longest,
        "longest_context_sequences": row.longest_of,
        "sequences": row.sequences,
        "sequences_that_fit": row.most * u64::from(row.copies),
        "prompt_s": row.prompt.filter(|_| fits).map(|prompt| prompt.latency_s),
        "prompt_tokens_per_s_per_device":
            row.prompt_rate(copies.lengths().own_prompt()).filter(|_| fits),
        "token_s_alone": row.single.map(|single| single.latency_s),
        "token_s": row.token_s(),
        "tokens_per_s_per_device": row.rate(),
        "static_batch": row.static_batch,
        "in_flight": row.in_flight,
    })
}

/// Bytes that the smallest row lacks on its fullest device, where none fits.
fn missing_bytes(copies: &Copies<'_>, rows: &[Row]) -> Option<f64> {
    let none = rows.iter().all(|row| !row.fits(copies.purpose));
    let least = rows.iter().map(|row| row.need_bytes).fold(f64::INFINITY, f64::min);
    let missing = least - copies.have_bytes();
    (none && missing > 0.0 && missing.is_finite()).then_some(missing)
}

/// What is asked about, in three lines.
pub(super) fn header(copies: &Copies<'_>) -> String {
    let Subject { work, cluster, devices, dtype, .. } = copies.subject;
    let mut text = format!("model    {}: ", work.name);
    text += &format!("{} parameters in {dtype}\n", output::count(work.parameters()));
    text += &format!("cluster  {}, {devices} devices\n", cluster.describe());
    let have = Bytes(copies.have_bytes() as u64);
    let batch = match copies.wanted.sequences {
        Some(sequences) => format!("{} sequences at once", output::count(sequences)),
        None => "as many sequences at once as fit and help".to_owned(),
    };
    let requests = &copies.wanted.requests;
    let limits = [("a token", requests.token_time), ("a first token", requests.first_token_time)];
    let limits = limits
        .into_iter()
        .filter_map(|(what, limit_s)| Some(format!(", {what} within {}", Seconds(limit_s?))));
    let limits: String = limits.collect();
    let seq = output::count(copies.seq().into());
    text += &format!("context  {seq} tokens, {batch}{limits}; {have} of a device for a job\n");
    text += &engine_lines(copies);
    text += &requested(copies);
    text + &assumption_lines(work)
}

/// How passes are assumed to be executed, fact by fact.
pub(super) fn engine_lines(copies: &Copies<'_>) -> String {
    let Profile { name, source, .. } = copies.engine;
    format!("engine   {name}: {source}\n{}", assume::lines_of(copies.facts()))
}

/// What requests are and how they are worked on, where flags say it.
fn requested(copies: &Copies<'_>) -> String {
    let mut text = String::new();
    let requests = &copies.wanted.requests;
    if let Some(Lengths { prompt, output, shared }) = copies.wanted.lengths {
        let [prompt, output] = [prompt, output].map(|tokens| output::count(tokens.into()));
        text += &format!("requests {prompt} input tokens, {output} output tokens");
        if shared > 0 {
            text += &format!(", a shared prefix of {}", output::count(shared.into()));
        }
        text.push('\n');
    }
    let Storage { weights, cache } = copies.serving.storage;
    if requests.weight_dtype.is_some() || requests.kv_dtype.is_some() {
        let weights = weights.map_or("as computed with", |format| format.name);
        text += &format!("stored   weights {weights}, KV cache {}\n", cache.name);
    }
    if let Some(Speculation { drafted, acceptance }) = requests.speculation() {
        let by = requests.draft.as_ref().map_or(String::new(), |model| format!(" by {model}"));
        let given = output::number(copies.serving.tokens_per_pass());
        text += &format!(
            "drafts   {drafted} tokens{by} before each pass, acceptance {acceptance}: {given} \
             tokens a pass\n"
        );
    }
    text
}

fn page(copies: &Copies<'_>, rows: &[Row]) -> String {
    let mut text = format!("{}\n{}", header(copies), table(copies, rows).text());
    if rows.len() > LISTED {
        text += &format!("  … and {} more: `--json` lists all\n", rows.len() - LISTED);
    }
    text.push('\n');
    text += &match recommended(copies, rows) {
        Some(best) => taken(copies, best, rows),
        None => refused(copies, rows),
    };
    let prompt = if copies.wanted.lengths.is_some() { "one prompt" } else { "a whole context" };
    let beside = if copies.batches_in_flight() { " and prompts beside" } else { "" };
    text += &format!(
        "\nprompt: {prompt}; alone: one sequence on each copy; longest: tokens of context that fit \
         for each of the sequences under `of`, over all copies; token: from one to the next of a \
         sequence, alone and with all sequences at once{beside}; tokens/s are of one device\n"
    );
    text
}

fn table(copies: &Copies<'_>, rows: &[Row]) -> Table {
    let columns = [
        "copy", "copies", "weights", "KV/token", "longest", "of", "prompt", "tokens/s", "alone",
        "at once", "token", "tokens/s",
    ];
    let bytes = |bytes: f64| Bytes(bytes as u64).to_string();
    let nothing = || "-".to_owned();
    let time = |seconds: Option<f64>| seconds.map_or_else(nothing, |s| Seconds(s).to_string());
    let rate = |rate: Option<f64>| rate.map_or_else(nothing, |n| output::count(n as u64));
    let mut table = Table::new(columns);
    for row in rows.iter().take(LISTED) {
        let fits = row.fits(copies.purpose);
        let mark = if fits { "✓" } else { "✗" };
        table.row([
            format!("{mark} {}", row.copy),
            row.copies.to_string(),
            bytes(row.held.weights_bytes),
            bytes(row.held.cache_bytes_per_token),
            output::count(row.longest),
            output::count(row.longest_of),
            time(row.prompt.filter(|_| fits).map(|prompt| prompt.latency_s)),
            rate(row.prompt_rate(copies.lengths().own_prompt()).filter(|_| fits)),
            time(row.single.map(|single| single.latency_s)),
            if row.sequences > 0 { output::count(row.sequences) } else { nothing() },
            time(row.token_s()),
            rate(row.rate()),
        ]);
    }
    table
}

/// The row to take, why, and which one answers sooner.
fn taken(copies: &Copies<'_>, best: &Row, rows: &[Row]) -> String {
    let prefill = copies.purpose == Purpose::Prefill;
    let own_prompt = copies.lengths().own_prompt();
    let figure = output::count(best.figure(copies.purpose, own_prompt) as u64);
    let what = if prefill { "tokens of prompts/s" } else { "new tokens/s" };
    let mut text = format!("✓ take {}: ", laid(best));
    text += &format!("{figure} {what} of a device, {}\n", reason(copies, rows));
    let seconds = |row: &Row| {
        let pass = if prefill { row.prompt } else { row.single };
        pass.filter(|_| row.fits(copies.purpose)).map(|pass| pass.latency_s)
    };
    let soonest = rows.iter().filter(|row| seconds(row).is_some());
    let soonest = soonest.min_by(|a, b| {
        let [a, b] = [a, b].map(|row| seconds(row).unwrap_or(f64::INFINITY));
        a.total_cmp(&b)
    });
    if let Some((other, time)) = soonest.and_then(|row| Some((row, seconds(row)?)))
        && other.copy != best.copy
    {
        let what = if prefill { "a prompt" } else { "a token alone" };
        text += &format!("  the soonest is {}: {what} in {}\n", other.copy, Seconds(time));
    }
    text + &not_worth_it(copies, best) + &batches(best)
}

/// How many sequences fit, where more than those of the row help little.
fn not_worth_it(copies: &Copies<'_>, best: &Row) -> String {
    if copies.wanted.sequences.is_some() || copies.purpose == Purpose::Prefill {
        return String::new();
    }
    let all = best.most * u64::from(best.copies);
    if all <= best.sequences {
        return String::new();
    }
    let [all, taken] = [all, best.sequences].map(output::count);
    let percent = 100.0 * WORTH;
    format!(
        "  {all} sequences fit; twice as many as {taken} give at most {percent}% more tokens/s: \
         `--gbs N` asks for N\n"
    )
}

/// Latency of a static batch, and prompts of a pass of in-flight batching.
fn batches(best: &Row) -> String {
    let mut text = String::new();
    if let Some(batch) = best.static_batch {
        let sequences = output::count(best.load.sequences);
        let [first, all] = [batch.prompt_s, batch.total_s].map(Seconds);
        text += &format!(
            "  a static batch of {sequences} requests on a copy: first tokens after {first}, last \
             tokens after {all}\n"
        );
    }
    if let Some(requests) = best.in_flight {
        let tokens = output::count(requests.prompt_tokens.into());
        text += &format!(
            "  in-flight batching: {tokens} prompt tokens in each pass, beside the sequences\n"
        );
    }
    text
}

/// A layout with its copies.
pub(super) fn laid(row: &Row) -> String {
    match row.copies {
        1 => format!("{}, one copy", row.copy),
        copies => format!("{}, {copies} copies", row.copy),
    }
}

/// Why no row fits.
pub(super) fn refused(copies: &Copies<'_>, rows: &[Row]) -> String {
    let have = Bytes(copies.have_bytes() as u64);
    if let Some(missing) = missing_bytes(copies, rows) {
        let nearest = rows.first().map_or(String::new(), |row| row.copy.to_string());
        let missing = Bytes(missing as u64);
        return format!("✗ nothing fits in {have}: {nearest} lacks {missing} on a device\n");
    }
    let requests = &copies.wanted.requests;
    let limits = [("a token", requests.token_time), ("a first token", requests.first_token_time)];
    let limits: Vec<String> = limits
        .into_iter()
        .filter_map(|(what, limit_s)| Some(format!("{what} within {}", Seconds(limit_s?))))
        .collect();
    format!("✗ what fits in {have} does not have {}\n", limits.join(" and "))
}
