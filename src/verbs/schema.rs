//! `schema [DOCUMENT]`: what the documents of `--json` hold, as JSON Schema.

use ir::import::nearest;

use crate::documents::{DOCUMENTS, Listed};
use crate::failure::{Exit, Failure, usage};
use crate::output;

/// Flags of `schema`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A document, such as plan [default: list all]
    pub document: Option<String>,
}

/// Answers.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let Some(name) = &args.document else {
        let lines = DOCUMENTS.iter().map(|d| format!("{:<22}  {}", d.name, d.about()));
        output::answer(&lines.collect::<Vec<_>>().join("\n"));
        return Ok(Exit::Success);
    };
    let Some(document) = Listed::find(name) else {
        let short = |document: &'static Listed| {
            let name = document.name.trim_start_matches("gantline.");
            name.split_once('/').map_or(name, |(name, _)| name)
        };
        let near = nearest(name, DOCUMENTS.iter().map(short));
        let help = near.map(|near| format!("did you mean `{near}`?"));
        let help = help.unwrap_or_else(|| "`gantline schema` lists all".to_owned());
        let headline = format!("there is no document `{name}`");
        return Err(usage("DOCUMENT", headline).help(help).into());
    };
    output::answer_json(document.json_schema().as_value());
    Ok(Exit::Success)
}
