//! `explain --for inference`: where a token and a prompt go, why not a neighbour, what memory buys.

use kernels::{Bytes, Seconds};
use planner::cluster::Cluster;
use planner::estimate::serving::Parts;
use serde_json::{Value, json};

use super::page::{self, answered, header, laid, reason, recommended, told};
use super::{Copies, Models, Noted, Row, models, wanted};
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure};
use crate::verbs::flags::{Purpose, RequestFlags, Served};
use crate::verbs::gpus::explain::SIZES;
use crate::{cache, output};

/// Answers `explain` about inference; no where nothing fits.
pub fn explain(asked: &RequestFlags, cluster: Cluster, served: &Served) -> Result<Exit, Failure> {
    let models = models(asked, cluster, served, Noted::Now)?;
    let key = asked.key("explain-inference", &(&models, asked, served));
    cache::answer(key, || explanation(&models, asked, served))
}

fn explanation(
    models: &Models,
    asked: &RequestFlags,
    served: &Served,
) -> Result<(Exit, String), Failure> {
    let estimators = models.estimators()?;
    let copies = Copies::new(models, &estimators, wanted(asked, served)?, served.purpose)?;
    let rows = copies.rows(asked)?;
    let Some(best) = recommended(&copies, &rows) else {
        return Ok(answered(&copies, &rows, asked.json));
    };
    let explained = Explained::of(models, &copies, best, &rows)?;
    let text = match asked.json {
        true => format!("{:#}", explained.document(&copies)),
        false => explained.page(&copies, &reason(&copies, &rows)),
    };
    Ok((Exit::Success, text))
}

/// Everything that is said of a way to lie.
struct Explained<'r> {
    best: &'r Row,
    /// The parts of the pass of a prompt, and of that of a token.
    parts: [Parts; 2],
    working_bytes: f64,
    neighbours: Vec<Neighbour<'r>>,
    resized: Vec<(f64, Row)>,
}

/// A way that differs in one decision.
struct Neighbour<'r> {
    row: &'r Row,
    /// How many more tokens per second and device it gives; none where it does not fit.
    more: Option<f64>,
    why: String,
}

impl<'r> Explained<'r> {
    fn of(
        models: &Models,
        copies: &Copies<'_>,
        best: &'r Row,
        rows: &'r [Row],
    ) -> Result<Explained<'r>, Failure> {
        let neighbours = neighbours(best, rows);
        let neighbours = neighbours.into_iter().map(|row| compared(copies, best, row));
        let mut resized = Vec::new();
        for size in SIZES {
            let mut estimators = models.estimators()?;
            estimators.model.memory_bytes *= size;
            let memory_bytes = estimators.model.memory_bytes;
            let other = Copies::new(models, &estimators, copies.wanted.clone(), copies.purpose)?;
            resized.push((memory_bytes, other.row(best.copy, best.copies)));
        }
        let batch = best.load.batch.max(1);
        Ok(Explained {
            best,
            parts: copies.parts(best),
            working_bytes: copies.serving.working_bytes(best.copy, batch, copies.piece()),
            neighbours: neighbours.collect(),
            resized,
        })
    }

    /// What holds the bytes of the fullest device.
    fn memory(&self, copies: &Copies<'_>) -> [(&'static str, f64); 4] {
        let held = self.best.held;
        let [context, shared] = copies.context();
        let own = context.saturating_sub(shared) as f64;
        let tokens = self.best.load.sequences.max(1) as f64 * own + shared as f64;
        [
            ("weights", held.weights_bytes),
            ("KV cache", held.cache_bytes_per_token * tokens),
            ("working", self.working_bytes),
            ("reserve", held.reserve_bytes),
        ]
    }

    /// Tokens of context, over all sequences of a copy, that a GiB more on each device holds.
    fn tokens_per_gib(&self) -> f64 {
        f64::from(1 << 30) / self.best.held.cache_bytes_per_token
    }

    fn page(&self, copies: &Copies<'_>, why: &str) -> String {
        let mut text = format!("{}\nTake {}: {why}\n", header(copies), laid(self.best));
        let [prompt, token] = &self.parts;
        let apart_s = self.best.token_s().unwrap_or(0.0);
        if copies.purpose != Purpose::Prefill {
            let all = output::count(self.best.sequences);
            let beside = if self.best.in_flight.is_some() { ", with prompts beside," } else { "" };
            text += &format!("\nWhere a token of each of {all} sequences{beside} goes");
            text += &parts(copies, token, apart_s);
        }
        text += "\nWhere a prompt goes";
        text += &parts(copies, prompt, prompt.total_s());
        let memory = self.memory(copies);
        let need = Bytes(memory.iter().map(|(_, bytes)| bytes).sum::<f64>() as u64);
        let have = Bytes(copies.have_bytes() as u64);
        text += &format!("\nMemory {need} of {have}; what the fullest device holds:\n");
        for (name, bytes) in memory {
            text += &format!("  {name:<12}{:>12}\n", Bytes(bytes as u64).to_string());
        }
        text += "\nWhy not, each with as many sequences as it takes…\n";
        let names = || self.neighbours.iter().map(|other| other.row.copy.to_string());
        let width = names().map(|name| name.len()).max().unwrap_or(0);
        for (other, name) in self.neighbours.iter().zip(names()) {
            let more = other.more.map_or(String::new(), |more| format!("{more:+.0} tokens/s"));
            text += &format!("  {name:<width$}  {more:>16}  {}\n", other.why);
        }
        text += &helps(if copies.purpose == Purpose::Prefill { prompt } else { token });
        text + &self.sizes(copies)
    }

    /// A line for each size of memory: what the same layout holds and gives.
    fn sizes(&self, copies: &Copies<'_>) -> String {
        let mut text = "With other memory the same copies hold and give…\n".to_owned();
        for (bytes, row) in &self.resized {
            let memory = Bytes(*bytes as u64).to_string();
            let said = match row.rate() {
                None => "nothing: they do not fit".to_owned(),
                Some(rate) => format!(
                    "{} sequences, {} tokens/s of a device; {} tokens of context, {} at once",
                    output::count(row.sequences),
                    output::count(rate as u64),
                    output::count(row.longest),
                    output::count(row.longest_of),
                ),
            };
            text += &format!("  {memory:>11}  {said}\n");
        }
        let tokens = self.tokens_per_gib();
        let seq = f64::from(copies.seq());
        text += &format!(
            "A GiB more on each device holds {} tokens more of a copy, {} times {}\n",
            output::count(tokens as u64),
            output::number(tokens / seq),
            output::count(copies.seq().into()),
        );
        text
    }

    fn document(&self, copies: &Copies<'_>) -> Value {
        let [prompt, token] = &self.parts;
        let tokens = self.tokens_per_gib();
        let others = self.neighbours.iter().map(|other| {
            let mut row = told(copies, other.row);
            row["more_tokens_per_s_per_device"] = json!(other.more);
            row["reason"] = json!(other.why);
            row
        });
        let resized = self
            .resized
            .iter()
            .map(|(bytes, row)| json!({"memory_bytes": bytes, "row": told(copies, row)}));
        let memory = self.memory(copies).into_iter();
        let memory = memory.map(|(name, bytes)| (name.to_owned(), bytes));
        let latency = |parts: &Parts| {
            let [low, high] = copies.serving.factors(parts);
            let time_s = parts.total_s();
            let (low_s, high_s) = (low * time_s, high * time_s);
            documents::Latency { time_s, low_s, high_s, breakdown: *parts }
        };
        let document = documents::ExplainInference {
            subject: page::served(copies),
            row: told(copies, self.best),
            token: latency(token),
            prompt: latency(prompt),
            memory: memory.collect(),
            neighbours: others.collect(),
            other_memory: resized.collect(),
            tokens_per_gib: tokens,
            sequences_per_gib: tokens / f64::from(copies.seq()),
        };
        document.to_json()
    }
}

/// Where the time of a pass goes, of which one starts every `apart_s`.
fn parts(copies: &Copies<'_>, parts: &Parts, apart_s: f64) -> String {
    let pass_s = parts.total_s();
    let total_s = pass_s.max(apart_s);
    let [low, high] = copies.serving.factors(parts).map(|factor| Seconds(factor * total_s));
    let mut text = format!(" ({}, or {low} to {high})\n", Seconds(total_s));
    let waiting = ("waiting", total_s - pass_s);
    for (name, seconds) in parts.parts().into_iter().chain([waiting]) {
        let share = seconds / total_s;
        if share < 1e-6 {
            continue;
        }
        let bar = "█".repeat((share * 28.0).round() as usize);
        let time = Seconds(seconds).to_string();
        text += format!("  {name:<14}{time:>10} {:>6.1}%  {bar}", 100.0 * share).trim_end();
        text.push('\n');
    }
    text
}

/// What a hundredth less of the largest parts saves.
fn helps(parts: &Parts) -> String {
    let total_s = parts.total_s();
    let mut parts = parts.parts();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let largest = parts.iter().take(4).filter(|(_, seconds)| *seconds > 0.0);
    let largest = largest.map(|(name, seconds)| format!("{name} -{:.2}%", seconds / total_s));
    format!("\nWhat 1% less of it saves: {}\n", largest.collect::<Vec<_>>().join(", "))
}

/// The nearest ways below and above in tp and in pp, each with the best experts for it, and in how
/// experts lie alone. Rows are the best first.
fn neighbours<'r>(best: &Row, rows: &'r [Row]) -> Vec<&'r Row> {
    let decisions: [fn(&Row) -> u32; 3] = [|row| row.copy.tp, |row| row.copy.pp, |row| row.copy.ep];
    // What stays where another one changes: the first two, and both for experts.
    let same: [&[usize]; 3] = [&[1], &[0], &[0, 1]];
    let mut found: Vec<&Row> = Vec::new();
    for (decision, same) in decisions.into_iter().zip(same) {
        let alike = |row: &&Row| same.iter().all(|at| decisions[*at](row) == decisions[*at](best));
        let values = || rows.iter().filter(alike).map(decision);
        let below = values().filter(|value| *value < decision(best)).max();
        let above = values().filter(|value| *value > decision(best)).min();
        let is = |value: u32| rows.iter().filter(alike).find(|row| decision(row) == value);
        found.extend(below.into_iter().chain(above).filter_map(is));
    }
    found
}

/// What a neighbour gives more, and what takes longer there.
fn compared<'r>(copies: &Copies<'_>, best: &Row, row: &'r Row) -> Neighbour<'r> {
    let (purpose, prompt_tokens) = (copies.purpose, copies.lengths().own_prompt());
    if !row.fits(purpose) {
        let short = row.need_bytes - copies.have_bytes();
        let why = match short > 0.0 {
            true => format!("does not fit: {} too much", Bytes(short as u64)),
            false => "has its tokens too late".to_owned(),
        };
        return Neighbour { row, more: None, why };
    }
    let more = row.figure(purpose, prompt_tokens) - best.figure(purpose, prompt_tokens);
    // Device time of a token: what a rate is the inverse of.
    let spent = |row: &Row| {
        let [prompt, token] = copies.parts(row);
        let (parts, turn_s, tokens) = match purpose {
            Purpose::Prefill => {
                // Of one prompt, as its parts are.
                let apart_s = row.prompts.map_or(0.0, |prompts| prompts.apart_s());
                let stages = f64::from(row.copy.pp);
                (prompt, stages * apart_s, stages * f64::from(prompt_tokens * row.copies))
            }
            Purpose::Training | Purpose::Inference | Purpose::Decode => {
                (token, row.token_s().unwrap_or(0.0), row.sequences as f64)
            }
        };
        // Of a pipeline whose stages are all busy each stage has its part of all groups' passes.
        let groups = turn_s / parts.total_s();
        let each = row.devices() / tokens * groups;
        parts.parts().map(|(name, seconds)| (name, seconds * each))
    };
    let grown = spent(best).into_iter().zip(spent(row)).map(|((name, a), (_, b))| (name, b - a));
    let sign = if more < 0.0 { 1.0 } else { -1.0 };
    let most = grown.map(|(name, s)| (name, sign * s)).max_by(|a, b| a.1.total_cmp(&b.1));
    let why = match most {
        Some((name, seconds)) if seconds > 0.0 => {
            let sign = if sign > 0.0 { "+" } else { "-" };
            format!("{name} {sign}{} of a device for a token", Seconds(seconds))
        }
        Some(_) | None => "as fast".to_owned(),
    };
    Neighbour { row, more: Some(more), why }
}
