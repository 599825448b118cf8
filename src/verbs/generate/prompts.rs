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
use crate::job::positions_max;
use crate::output;

/// Texts that a replica continues side by side, where nobody says how many. Chosen: enough that
/// weights are read for several texts at once.
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
    let room = capacity.min(positions_max(&trained.description));
    check_lengths(&asked, &requests, room)?;
    note_cut(&requests, planned.as_ref().map(|(_, plan)| plan.seq));
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
    let mut told = Told { is_json: args.json, rows: Vec::new(), waiting: BTreeMap::new(), next: 0 };
    let mut failed = BTreeMap::new();
    generator.continue_all(&requests, &mut |number, one| {
        let row =
            one.map(|one| row(number, &one)).map_err(|failure| failed.insert(number, failure));
        told.tell(number, row.ok());
    })?;
    let document = continued(told.rows, start.elapsed().as_secs_f64(), [replicas, slots]);
    if args.json {
        output::answer_json(&document.to_json());
    } else {
        output::note(&summary(&document));
    }
    // What could be continued is told; the first that could not decides how the run ends.
    match failed.into_iter().next() {
        Some((number, failure)) => Err(at_line(failure.into(), &asked[number].0)),
        None => Ok(Exit::Success),
    }
}

/// Texts that are told in the order of the file.
struct Told {
    is_json: bool,
    rows: Vec<documents::ContinuedRow>,
    /// Those that wait for texts before them; none for one that could not be continued.
    waiting: BTreeMap<usize, Option<documents::ContinuedRow>>,
    next: usize,
}

impl Told {
    fn tell(&mut self, number: usize, row: Option<documents::ContinuedRow>) {
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

/// What is said of all texts.
fn summary(document: &documents::Continued) -> String {
    let documents::Continued { texts, new_tokens, seconds, tokens_per_s, .. } = document;
    let (texts, seconds) = (texts.len(), output::seconds(*seconds));
    format!(
        "{texts} texts with {new_tokens} new tokens in {seconds}: {tokens_per_s:.0} tokens/s, up \
         to {} side by side on each of {} replicas; the first new token after {} (median)",
        document.slots,
        document.replicas,
        output::seconds(document.median_first_s),
    )
}

/// A failure that is about a line of the file.
fn at_line(failure: Failure, place: &Span) -> Failure {
    match failure {
        Failure::Input(wrong) => {
            let at = |one: Diagnostic| Diagnostic { span: place.clone(), ..one };
            Failure::Input(wrong.into_iter().map(at).collect())
        }
        Failure::World(error) => Failure::World(error),
    }
}

/// What is asked for, in tokens.
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

/// Says of texts that a plan has no room for that they end where its caches do.
fn note_cut(requests: &[Request], seq: Option<usize>) {
    // The last token is new, and is not read.
    let needs =
        |one: &&Request| one.prompt.len().saturating_add(one.ending.tokens_max.saturating_sub(1));
    let Some(seq) = seq else { return };
    let cut = requests.iter().filter(|one| needs(one) > seq).count();
    if cut > 0 {
        output::note(&format!("{cut} texts end after {seq} tokens at most: the plan has no more"));
    }
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
