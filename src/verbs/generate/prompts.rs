//! `generate --prompts FILE`: many texts, side by side.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use ir::{Diagnostic, Mesh, Plan, Span};
use runtime::generate::{Ending, Sampling};
use runtime::in_flight::{Continuation, Request};
use serde::Deserialize;

use super::{Args, Trained};
use crate::argument::PathArg;
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, read_text, usage};
use crate::output;

/// Texts that a replica continues side by side, where nobody says how many. Chosen: enough that
/// weights are read for several texts at once.
const SLOTS: usize = 8;

/// A line of the file.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Line {
    Prompt(String),
    Request(Asked),
}

/// A line that says more than the prompt.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    prompt: String,
    max_tokens: Option<usize>,
}

/// Answers.
pub(super) fn answer(
    args: &Args,
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
    check_lengths(&asked, &requests, capacity)?;
    let mut generator = match planned {
        Some(plan) => trained.planned(args, plan)?,
        None => {
            // No replica is without a text, and no slot of one is for none.
            let replicas = args.dp.unwrap_or(1).min(requests.len());
            let slots = args.slots.unwrap_or(SLOTS).min(requests.len().div_ceil(replicas));
            trained.generator(args, capacity, [replicas, slots])?
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
    let (mut rows, mut waiting) = (Vec::new(), BTreeMap::new());
    generator.continue_all(&requests, &mut |number, one| {
        waiting.insert(number, row(number, &one));
        // Texts are told in the order of the file.
        while let Some(row) = waiting.remove(&rows.len()) {
            if !args.json {
                output::stream(&format!("{}\n", row.text));
            }
            rows.push(row);
        }
    })?;
    let told = told(rows, start.elapsed().as_secs_f64(), [replicas, slots]);
    if args.json {
        output::answer_json(&told.to_json());
    } else {
        output::note(&format!(
            "{} texts with {} new tokens in {}: {:.0} tokens/s, {slots} side by side on each of \
             {replicas} replicas; the first new token after {} (median)",
            told.texts.len(),
            told.new_tokens,
            output::seconds(told.seconds),
            told.tokens_per_s,
            output::seconds(told.median_first_s),
        ));
    }
    Ok(Exit::Success)
}

/// What is asked for, in tokens.
fn requests(
    args: &Args,
    trained: &Trained,
    asked: &[(Span, Asked)],
    sampling: &Sampling,
) -> Result<Vec<Request>, Failure> {
    let request = |(number, (place, asked)): (usize, &(Span, Asked))| {
        let prompt = trained.tokenizer.encode(asked.prompt.as_bytes(), &place.source)?;
        let tokens_max = asked.max_tokens.unwrap_or(args.max_tokens);
        let seed = sampling.seed.wrapping_add(number as u32);
        let ending = Ending { tokens_max, stops: trained.stops.clone() };
        Ok(Request { prompt, sampling: Sampling { seed, ..*sampling }, ending })
    };
    asked.iter().enumerate().map(request).collect()
}

/// Refuses prompts that the model cannot read, or has nothing to read of.
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
                format!("the prompt has {count} tokens; the model reads from 1 to {capacity}");
            Err(Diagnostic::error("E4060", place.clone(), headline).into())
        }
        None => Ok(()),
    }
}

fn told(
    texts: Vec<documents::ContinuedRow>,
    seconds: f64,
    [replicas, slots]: [usize; 2],
) -> documents::Continued {
    let new_tokens: usize = texts.iter().map(|row| row.tokens.len()).sum();
    let mut firsts: Vec<f64> = texts.iter().map(|row| row.first_s).collect();
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
        let headline = "the plan is for steps of training, and texts are to be continued";
        let help = "`plan MODEL --for inference -o FILE` writes one";
        return Err(Diagnostic::error("E5006", Span::of(&shown), headline).help(help).into());
    }
    Ok((shown, plan))
}

/// What is asked for, and where the file says it.
fn read(file: &Path) -> Result<Vec<(Span, Asked)>, Failure> {
    let text = read_text(file, "--prompts")?;
    let mut end = 0;
    let lines = text.split_inclusive('\n').map(|line| {
        end += line.len();
        (Span { source: file.display().to_string(), bytes: end - line.len()..end }, line.trim())
    });
    let asked = lines.filter(|(_, line)| !line.is_empty()).map(|(place, line)| {
        let read = serde_json::from_str(line).map_err(|_| {
            let headline = "a line that is no prompt";
            Diagnostic::error("E5022", place.clone(), headline)
                .help("write a JSON string, or {\"prompt\": \"…\", \"max_tokens\": 64}")
        })?;
        Ok(match read {
            Line::Prompt(prompt) => (place, Asked { prompt, max_tokens: None }),
            Line::Request(asked) => (place, asked),
        })
    });
    let asked = asked.collect::<Result<Vec<_>, Failure>>()?;
    if asked.is_empty() {
        let headline = format!("`{}` has no prompts", file.display());
        return Err(usage("--prompts", headline).help("write one on each line").into());
    }
    Ok(asked)
}
