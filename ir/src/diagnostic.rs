//! Diagnostics: what is wrong with an input, where, how we know it, and what to write instead.
//!
//! Built where the fact is known, collected by the caller, drawn by [`render`] alone.

use std::fmt::Write as _;
use std::ops::Range;

/// Whether a diagnostic stops the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The input can't be used.
    Error,
    /// The input is used, and something about it deserves attention.
    Warning,
}

/// A place in a named text: byte offsets.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Span {
    /// The name of the text, as the user knows it: a path, a flag, or empty when there is none.
    pub source: String,
    /// The bytes meant. An empty range at 0 means the whole source.
    pub bytes: Range<usize>,
}

impl Span {
    /// The whole of a source without a text that could be shown: a flag, a directory, a binary.
    pub fn of(source: impl Into<String>) -> Span {
        Span { source: source.into(), bytes: 0..0 }
    }
}

/// One thing that is wrong with an input.
///
/// Codes are `E` or `W` and four digits; the first digit names the crate: 1 `ir`, 2 `kernels` and
/// `codegen`, 3 `planner`, 4 `runtime`, 5 the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Error or warning.
    pub severity: Severity,
    /// The code, for example `E1003`.
    pub code: &'static str,
    /// What is wrong, in the user's words and numbers: lower case, no full stop.
    pub headline: String,
    /// Where.
    pub span: Span,
    /// What the marked text is.
    pub label: Option<String>,
    /// How we know.
    pub notes: Vec<String>,
    /// What to write instead.
    pub help: Option<String>,
    /// The numbers behind it by name, for programs.
    pub facts: Option<Box<serde_json::Value>>,
}

impl Diagnostic {
    /// An error.
    pub fn error(code: &'static str, span: Span, headline: impl Into<String>) -> Diagnostic {
        Diagnostic {
            severity: Severity::Error,
            code,
            headline: headline.into(),
            span,
            label: None,
            notes: Vec::new(),
            help: None,
            facts: None,
        }
    }

    /// A warning.
    pub fn warning(code: &'static str, span: Span, headline: impl Into<String>) -> Diagnostic {
        Diagnostic { severity: Severity::Warning, ..Diagnostic::error(code, span, headline) }
    }

    /// Says what the marked text is.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Diagnostic {
        self.label = Some(label.into());
        self
    }

    /// Adds how we know.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Diagnostic {
        self.notes.push(note.into());
        self
    }

    /// Says what to write instead.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Diagnostic {
        self.help = Some(help.into());
        self
    }

    /// Adds the numbers behind it, for programs.
    #[must_use]
    pub fn facts(mut self, facts: serde_json::Value) -> Diagnostic {
        self.facts = Some(Box::new(facts));
        self
    }
}

/// Draws a diagnostic as text. `text` is the content of its source, where there is one to show.
pub fn render(diagnostic: &Diagnostic, text: Option<&str>) -> String {
    let kind = match diagnostic.severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    };
    let mut out = format!("{kind}[{}]: {}\n", diagnostic.code, diagnostic.headline);
    let mut margin = 1;
    match text {
        Some(text) if !diagnostic.span.bytes.is_empty() => {
            let line = excerpt(&mut out, diagnostic, text);
            margin = line.to_string().len();
        }
        _ if !diagnostic.span.source.is_empty() => {
            let _ = writeln!(out, " --> {}", diagnostic.span.source);
            if let Some(label) = &diagnostic.label {
                let _ = writeln!(out, "  = {label}");
            }
        }
        _ => {}
    }
    let pad = " ".repeat(margin);
    for note in &diagnostic.notes {
        let _ = writeln!(out, "{pad} = note: {note}");
    }
    if let Some(help) = &diagnostic.help {
        let _ = writeln!(out, "{pad} = help: {help}");
    }
    out
}

/// The most characters of a headline that quotes a text. Chosen: three lines of a screen.
const HEADLINE_MAX: usize = 300;

/// A headline without its middle, where it quotes much.
pub(crate) fn shortened(headline: String) -> String {
    let count = headline.chars().count();
    if count <= HEADLINE_MAX {
        return headline;
    }
    let half = HEADLINE_MAX / 2;
    let first: String = headline.chars().take(half).collect();
    let last: String = headline.chars().skip(count - half).collect();
    format!("{first} … {last}")
}

/// The characters of a line that are drawn at most. Chosen: as many as a screen is wide.
const LINE_MAX: usize = 200;

/// Draws the marked line and returns its number.
fn excerpt(out: &mut String, diagnostic: &Diagnostic, text: &str) -> usize {
    let start = floor_char_boundary(text, diagnostic.span.bytes.start);
    let end = floor_char_boundary(text, diagnostic.span.bytes.end).max(start);
    let line_start = text[..start].rfind('\n').map_or(0, |at| at + 1);
    let line_end = text[start..].find('\n').map_or(text.len(), |at| start + at);
    let number = text[..start].matches('\n').count() + 1;
    let column = text[line_start..start].chars().count();
    let place = column + 1;
    let width = text[start..end.min(line_end)].chars().count().max(1);
    let (line, column, width) = window(&text[line_start..line_end], column, width);
    let digits = number.to_string();
    let pad = " ".repeat(digits.len());
    let _ = writeln!(out, "{pad}--> {}:{number}:{place}", diagnostic.span.source);
    let _ = writeln!(out, "{pad} |");
    let _ = writeln!(out, "{digits} | {line}");
    let label = diagnostic.label.as_deref().unwrap_or("");
    let marks = format!("{}{} {label}", " ".repeat(column), "^".repeat(width));
    let _ = writeln!(out, "{pad} | {}", marks.trim_end());
    number
}

/// A line, or what stands around the marked text of a long one; with where the mark is in it.
fn window(line: &str, column: usize, width: usize) -> (String, usize, usize) {
    let count = line.chars().count();
    if count <= LINE_MAX {
        return (line.to_owned(), column, width);
    }
    let first = column.saturating_sub(LINE_MAX / 4).min(count - LINE_MAX);
    let shown: String = line.chars().skip(first).take(LINE_MAX).collect();
    let (before, after) = (first > 0, first + LINE_MAX < count);
    let [before, after] = [before, after].map(|cut| if cut { "…" } else { "" });
    let column = column - first + before.chars().count();
    (format!("{before}{shown}{after}"), column, width.min(LINE_MAX.saturating_sub(column).max(1)))
}

fn floor_char_boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}
