//! `generate --prompts FILE`: many prompts, with in-flight batching.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use ir::{Diagnostic, Mesh, Plan, Span};
use runtime::generate::{Ending, Sampling};
use runtime::in_flight::{Continuation, Request};
use runtime::processes::Bootstrap;
use serde::Deserialize;

use super::{Args, Trained};
use crate::argument::PathArg;
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, read_text, usage};
use crate::job::positions_max;
use crate::output;

/// Slots of a replica without `--slots`. Chosen: a decode step reads the weights once for all.
const SLOTS: usize = 8;

/// A line of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    prompt: String,
    max_tokens: Option<usize>,
}

/// Answers.
pub(super) fn answer(
    (args, bootstrap): (&Args, Option<Bootstrap>),
    trained: &Trained,
    file: &Path,
    sampling: &Sampling,
) -> Result<Exit, Failure> {
    let asked = read(file)?;
    let requests = requests(args, trained, &asked, sampling)?;
    let planned = args.plan.as_ref().map(read_plan).transpose()?;
    let lengths = requests.iter().map(|one| (one.prompt.len(), one.ending.tokens_max));
    let capacity = match &planned {
        Some((_, plan)) => plan.seq,
        None => trained.capacity(&lengths.collect::<Vec<_>>()),
    };
    let room = capacity.min(positions_max(&trained.description));
    check_lengths(&asked, &requests, room)?;
    note_cut(&requests, planned.as_ref().map(|(_, plan)| plan.seq));
    let mut generator = match planned {
        Some(plan) => trained.planned((args, bootstrap), plan)?,
        None => {
            // No more replicas and slots than prompts.
            let replicas = args.dp.unwrap_or(1).min(requests.len());
            let slots = args.slots.unwrap_or(SLOTS).min(requests.len().div_ceil(replicas));
            trained.generator((args, bootstrap), capacity, [replicas, slots])?
        }
    };
    let Plan { mesh: Mesh { dp: replicas, .. }, microbatch_size: slots, .. } = *generator.plan();
    let row = |number: usize, one: &Continuation| {
        let mut decoder = trained.tokenizer.decoder();
        let pieces: String = one.tokens.iter().map(|token| decoder.push(*token)).collect();
        documents::ContinuedRow {
            text: format!("{}{pieces}{}", asked[number].1.prompt, decoder.finish()),
            tokens: one.tokens.clone(),
            prompt_tokens: requests[number].prompt.len() as u64,
            first_s: one.seconds[0],
            last_s: one.seconds[1],
            finish_reason: if one.is_stopped { "stop" } else { "length" }.to_owned(),
        }
    };
    let start = Instant::now();
    let mut ordered =
        Ordered { is_json: args.json, rows: Vec::new(), waiting: BTreeMap::new(), next: 0 };
    let mut failed = BTreeMap::new();
    generator.continue_all(&requests, &mut |number, one| {
        let row =
            one.map(|one| row(number, &one)).map_err(|failure| failed.insert(number, failure));
        ordered.push(number, row.ok());
    })?;
    let document = continued(ordered.rows, start.elapsed().as_secs_f64(), [replicas, slots]);
    if args.json {
        output::answer_json(&document.to_json());
    } else {
        output::note(&summary(&document));
    }
    // All that succeeded is printed; the first failure decides the exit code.
    match failed.into_iter().next() {
        Some((number, failure)) => Err(at_line(failure.into(), &asked[number].0)),
        None => {
            generator.end_with(Exit::Success.code());
            Ok(Exit::Success)
        }
    }
}

/// Prints continuations in the order of the file.
struct Ordered {
    is_json: bool,
    rows: Vec<documents::ContinuedRow>,
    /// Rows that wait for earlier ones; none for a prompt that failed.
    waiting: BTreeMap<usize, Option<documents::ContinuedRow>>,
    next: usize,
}

impl Ordered {
    fn push(&mut self, number: usize, row: Option<documents::ContinuedRow>) {
        self.waiting.insert(number, row);
        while let Some(row) = self.waiting.remove(&self.next) {
            self.next += 1;
            let Some(row) = row else { continue };
            if !self.is_json {
                output::stream(&format!("{}\n", row.text));
            }
            self.rows.push(row);
        }
    }
}

/// One line about the whole run.
fn summary(document: &documents::Continued) -> String {
    let documents::Continued { texts, new_tokens, seconds, tokens_per_s, .. } = document;
    let (texts, seconds) = (texts.len(), output::seconds(*seconds));
    format!(
        "{texts} prompts, {new_tokens} output tokens in {seconds}: {tokens_per_s:.0} tokens/s with \
         {} slots on each of {} replicas; median time to first token {}",
        document.slots,
        document.replicas,
        output::seconds(document.median_first_s),
    )
}

/// A failure with the place of its line in the file.
fn at_line(failure: Failure, place: &Span) -> Failure {
    match failure {
        Failure::Input(wrong) => {
            let at = |one: Diagnostic| Diagnostic { span: place.clone(), ..one };
            Failure::Input(wrong.into_iter().map(at).collect())
        }
        Failure::World(error) => Failure::World(error),
    }
}

/// The requests, in tokens.
fn requests(
    args: &Args,
    trained: &Trained,
    asked: &[(Span, Asked)],
    sampling: &Sampling,
) -> Result<Vec<Request>, Failure> {
    let request = |(number, (place, asked)): (usize, &(Span, Asked))| {
        let prompt = trained.tokenizer.encode(asked.prompt.as_bytes(), &place.source);
        let prompt = prompt.map_err(|why| at_line(why.into(), place))?;
        let tokens_max = asked.max_tokens.unwrap_or(args.max_tokens);
        let seed = sampling.seed.wrapping_add(number as u32);
        let ending = Ending { tokens_max, stops: trained.stops.clone() };
        Ok(Request { prompt, sampling: Sampling { seed, ..*sampling }, ending })
    };
    asked.iter().enumerate().map(request).collect()
}

/// Notes how many sequences are truncated by the capacity of the plan's KV caches.
fn note_cut(requests: &[Request], seq: Option<usize>) {
    // The last token is new, and is not read.
    let needs =
        |one: &&Request| one.prompt.len().saturating_add(one.ending.tokens_max.saturating_sub(1));
    let Some(seq) = seq else { return };
    let cut = requests.iter().filter(|one| needs(one) > seq).count();
    if cut > 0 {
        output::note(&format!(
            "{cut} sequences are truncated: the plan has KV caches of {seq} tokens"
        ));
    }
}

/// Refuses prompts that are empty or longer than the KV caches.
fn check_lengths(
    asked: &[(Span, Asked)],
    requests: &[Request],
    capacity: usize,
) -> Result<(), Failure> {
    let mut both = asked.iter().zip(requests);
    match both.find(|(_, one)| !(1..=capacity).contains(&one.prompt.len())) {
        Some(((place, _), one)) => {
            let count = one.prompt.len();
            let headline =
                format!("the prompt has {count} tokens; from 1 to {capacity} can be read");
            Err(Diagnostic::error("E4060", place.clone(), headline).into())
        }
        None => Ok(()),
    }
}

fn continued(
    texts: Vec<documents::ContinuedRow>,
    seconds: f64,
    [replicas, slots]: [usize; 2],
) -> documents::Continued {
    let new_tokens: usize = texts.iter().map(|row| row.tokens.len()).sum();
    let with_tokens = texts.iter().filter(|row| !row.tokens.is_empty());
    let mut firsts: Vec<f64> = with_tokens.map(|row| row.first_s).collect();
    firsts.sort_by(f64::total_cmp);
    documents::Continued {
        new_tokens: new_tokens as u64,
        seconds,
        tokens_per_s: if seconds > 0.0 { new_tokens as f64 / seconds } else { 0.0 },
        median_first_s: firsts.get(firsts.len() / 2).copied().unwrap_or(0.0),
        replicas: replicas as u64,
        slots: slots as u64,
        texts,
    }
}

/// The plan of inference in a file, and the file's name.
fn read_plan(path: &PathArg) -> Result<(String, Plan), Failure> {
    let (shown, text) = (path.to_string(), read_text(path, "--plan")?);
    let plan = ir::text::parse_plan(&shown, &text)?;
    if !plan.is_inference() {
        let headline = "this is a plan of training, and `generate` needs one of inference";
        let help = "`plan MODEL --for inference -o FILE` writes one";
        return Err(Diagnostic::error("E5006", Span::of(&shown), headline).help(help).into());
    }
    Ok((shown, plan))
}

/// The prompts, with the place of each in the file.
fn read(file: &Path) -> Result<Vec<(Span, Asked)>, Failure> {
    let text = read_text(file, "--prompts")?;
    let mut end = 0;
    let lines = text.split_inclusive('\n').map(|line| {
        end += line.len();
        let span = Span { source: file.display().to_string(), bytes: end - line.len()..end };
        (span, line.trim_start_matches('\u{feff}').trim())
    });
    let asked = lines.filter(|(_, line)| !line.is_empty()).map(|(place, line)| {
        let read = match line.starts_with('{') {
            true => serde_json::from_str(line),
            false => {
                let alone = |prompt| Asked { prompt, max_tokens: None };
                serde_json::from_str(line).map(alone)
            }
        };
        let read = read.map_err(|why| {
            let headline = "a line that is no prompt";
            Diagnostic::error("E5022", place.clone(), headline)
                .note(why.to_string())
                .help("write a JSON string, or {\"prompt\": \"…\", \"max_tokens\": 64}")
        })?;
        Ok((place, read))
    });
    let asked = asked.collect::<Result<Vec<_>, Failure>>()?;
    if asked.is_empty() {
        let headline = format!("`{}` has no prompts", file.display());
        return Err(usage("--prompts", headline).help("write one on each line").into());
    }
    Ok(asked)
}
