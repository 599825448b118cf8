//! `generate --beams N`: the likeliest continuations.

use std::time::Instant;

use runtime::beams::Hypothesis;
use runtime::generate::Ending;
use runtime::tokens::Tokenizer;

use super::{Args, Told};
use crate::documents;
use crate::failure::{Exit, Failure, usage};
use crate::generation::Generator;
use crate::output;

/// A prompt.
pub(super) struct Asked<'a> {
    pub(super) text: &'a str,
    pub(super) tokens: &'a [u32],
}

/// Answers with the likeliest continuations.
pub(super) fn search(
    args: &Args,
    generator: &mut Generator,
    asked: &Asked<'_>,
    (ending, tokenizer): (&Ending, &Tokenizer),
) -> Result<Exit, Failure> {
    let start = Instant::now();
    let found = generator.search(asked.tokens, args.length_penalty, ending)?;
    let total = start.elapsed().as_secs_f64();
    let text = |one: &Hypothesis| {
        let mut decoder = tokenizer.decoder();
        let pieces: String = one.tokens.iter().map(|token| decoder.push(*token)).collect();
        format!("{}{pieces}{}", asked.text, decoder.finish())
    };
    let beam = |one: &Hypothesis| documents::BeamRow {
        text: text(one),
        tokens: one.tokens.clone(),
        log_probability: one.log_probability,
        score: one.score,
        finish_reason: if one.is_stopped { "stop" } else { "length" }.to_owned(),
    };
    let beams: Vec<documents::BeamRow> = found.iter().map(beam).collect();
    let Some(best) = beams.first().cloned() else {
        let headline = "there is room for no new token".to_owned();
        return Err(usage("--max-tokens", headline).help("write a shorter prompt").into());
    };
    let told = Told {
        text: best.text,
        prompt: asked.tokens.len(),
        first_s: total,
        rest_s: 0.0,
        is_cut: best.finish_reason != "stop",
        tokens: best.tokens,
        beams,
    };
    if !args.json {
        output::stream(&format!("{}\n", told.text));
    }
    told.tell(args);
    generator.end_with(Exit::Success.code());
    Ok(Exit::Success)
}
