//! `inspect X.gtl`: the plan, the kernels and the programs of a compiled file, as text.
//!
//! The text of a plan is one that `compile --plan` takes. That of a program has every buffer with
//! its offset, every launch and exchange in order; [`ir::text::parse_program`] reads it.

use std::fmt::Write;

use ir::Diagnostic;
use runtime::artefact::{Contents, Limits, read};

use super::{Args, kernels};
use crate::failure::{Exit, Failure, usage};
use crate::output;
use crate::verbs::compile;

/// Answers.
pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    check_flags(args)?;
    let path = args.model.path();
    let contents = read(path, &Limits::default())?;
    if args.kernels {
        let source = args.model.to_string();
        if args.json {
            output::answer_json(&kernels::document(&source, &contents)?);
        } else {
            output::answer(&kernels::page(&source, &contents)?);
        }
    } else if args.json {
        let bytes = ir::file::read(path).map_err(runtime::Error::io("read", path))?;
        output::answer_json(&compile::document(path, &bytes, &contents));
    } else {
        output::answer(&page(&contents));
    }
    Ok(Exit::Success)
}

/// What was decided when the file was written.
fn check_flags(args: &Args) -> Result<(), Vec<Diagnostic>> {
    let given = [
        ("--seq", args.seq.is_some()),
        ("--dtype", args.dtype.is_some()),
        ("--dim", !args.dim.is_empty()),
        ("--fusions", args.fusions),
        ("--explain", args.explain.is_some()),
        ("--no-rule", !args.no_rule.is_empty()),
    ];
    let wrong = given.into_iter().filter(|(_, is_given)| *is_given).map(|(flag, _)| {
        usage(flag, format!("`{}` is a compiled file, whose kernels are chosen", args.model))
            .help("leave the flag out, or inspect the model")
    });
    let wrong: Vec<Diagnostic> = wrong.collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

fn page(contents: &Contents) -> String {
    let Contents { plan, kernels, programs, .. } = contents;
    let mut text = format!("{plan}\n# the kernels, as programs number them\n");
    for (at, kernel) in kernels.iter().enumerate() {
        let _ = writeln!(text, "k{at} {kernel}");
    }
    for program in programs {
        let _ = write!(text, "\n{program}");
    }
    text
}
