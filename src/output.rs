//! What is printed: answers on stdout, everything else on stderr.
//!
//! In a pipe there is no colour and no progress bar. Tables are aligned columns of plain text.
//! Memory is in binary units, bandwidth and time in decimal ones.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};
use std::path::Path;

use serde_json::Value;

use crate::documents::{Document, Infeasible};
use crate::failure::{Exit, Failure, fact, is_no};
use ir::Diagnostic;

/// A text that changes nothing of a terminal but what stands there: control characters, and marks
/// that turn the direction of writing, become pictures of themselves, one for each.
fn visible(text: &str) -> String {
    let shown = |letter: char| match letter {
        '\n' | '\t' => letter,
        '\0'..='\x1f' => char::from_u32(0x2400 + u32::from(letter)).unwrap_or('\u{fffd}'),
        '\x7f' => '\u{2421}',
        '\u{80}'..='\u{9f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => '\u{fffd}',
        _ => letter,
    };
    text.chars().map(shown).collect()
}

/// Prints an answer. A reader that has gone away, as `head` does, changes nothing: the exit code is
/// that of the answer. Where it cannot be written, as on a full disk, the program says so and ends.
pub fn answer(text: &str) {
    let is_terminal = io::stdout().is_terminal();
    let text = if is_terminal { Cow::Owned(visible(text)) } else { Cow::Borrowed(text) };
    let mut stdout = io::stdout().lock();
    let written = writeln!(stdout, "{}", text.trim_end()).and_then(|()| stdout.flush());
    if let Some(error) = written.err().filter(|error| !is_gone(error)) {
        end_unwritten(error);
    }
}

/// Prints a piece of an answer as soon as it is there. A reader that has gone away ends the program
/// quietly.
pub fn stream(piece: &str) {
    let mut stdout = io::stdout().lock();
    match write!(stdout, "{piece}").and_then(|()| stdout.flush()) {
        Ok(()) => {}
        Err(error) if is_gone(&error) => std::process::exit(0),
        Err(error) => end_unwritten(error),
    }
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
}

/// Ends the program, whose answer nobody has.
fn end_unwritten(error: io::Error) -> ! {
    let failure = Failure::World(runtime::Error::io("write", Path::new("the answer"))(error));
    note(&failure.message());
    std::process::exit(failure.exit().code().into())
}

/// Prints a document.
pub fn answer_json(document: &Value) {
    answer(&format!("{document:#}"));
}

/// Prints what is no answer: progress, remarks, errors. Coloured on a terminal.
pub fn note(text: &str) {
    let text = visible(text);
    let text = if is_coloured() { colour(&text) } else { text };
    // There is nobody to tell that stderr cannot be written.
    let _ = writeln!(io::stderr().lock(), "{}", text.trim_end());
}

/// Whether stderr is a terminal that shows progress bars.
pub fn is_interactive() -> bool {
    io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Whether stderr shows colours: a terminal, and the user does not object (no-color.org).
fn is_coloured() -> bool {
    is_interactive() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Marks the kinds of messages at the beginnings of lines.
fn colour(text: &str) -> String {
    let mark = |line: &str| {
        let kinds = [("error", "31"), ("warning", "33"), ("note", "36")];
        let is_of = |kind: &str| {
            let rest = line.strip_prefix(kind)?;
            rest.starts_with([':', '[']).then_some(rest)
        };
        for (kind, code) in kinds {
            if let Some(rest) = is_of(kind) {
                return format!("\x1b[1;{code}m{kind}\x1b[0m{rest}");
            }
        }
        line.to_owned()
    };
    text.lines().map(mark).collect::<Vec<_>>().join("\n")
}

/// A table of text: the first column is left-aligned, the others right-aligned.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with the names of its columns.
    pub fn new<const N: usize>(columns: [&str; N]) -> Table {
        Table { rows: vec![columns.map(str::to_owned).to_vec()] }
    }

    /// A table with any number of columns.
    pub fn of(columns: &[&str]) -> Table {
        Table { rows: vec![columns.iter().map(|name| (*name).to_owned()).collect()] }
    }

    /// Adds a row; rows may be shorter than others.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.to_vec());
    }

    /// Adds a row of any number of cells.
    pub fn cells(&mut self, cells: impl Iterator<Item = String>) {
        self.rows.push(cells.collect());
    }

    /// The text: a line for each row.
    pub fn text(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
                if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            text += "  ";
            text += cells.collect::<Vec<_>>().join("  ").trim_end();
            text.push('\n');
        }
        text
    }
}

/// A count with separated thousands: `3,290,624`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of any size with three digits that matter at least: `0.0213`, `3.14`, `1,234,567`.
pub fn number(number: f64) -> String {
    let digits = match number.abs() {
        0.0 => return "0".to_owned(),
        least if least < 1e-9 => return format!("{number:.2e}"),
        small if small < 100.0 => (2.0 - small.log10().floor()).max(0.0) as usize,
        _ => return count(number.round() as u64),
    };
    let text = format!("{number:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Energy: `12.6 kJ`.
pub fn joules(joules: f64) -> String {
    let units = [(1e12, "TJ"), (1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J")];
    let found = units.into_iter().find(|(unit, _)| joules >= *unit);
    let (unit, name) = found.unwrap_or((1e-3, "mJ"));
    format!("{} {name}", number(joules / unit))
}

/// Bytes: `12.6 MiB`.
pub fn bytes(number: u64) -> String {
    kernels::Bytes(number).to_string()
}

/// Operations: `19.7 Mflop`.
pub fn flops(number: u64) -> String {
    kernels::Flops(number).to_string()
}

/// Seconds: `12.3 ms`.
pub fn seconds(number: f64) -> String {
    kernels::Seconds(number).to_string()
}

/// What a verb answered; where that is no and JSON is asked for, prints the document that says why.
///
/// # Errors
/// Those of the verb: users are told as always.
pub fn or_document(is_json: bool, answered: Result<Exit, Failure>) -> Result<Exit, Failure> {
    if let (true, Err(Failure::Input(wrong))) = (is_json, &answered)
        && let Some(first) = wrong.first().filter(|_| wrong.iter().all(is_no))
    {
        answer_json(&infeasible(first));
    }
    answered
}

/// Why the answer is no, and what is near.
fn infeasible(no: &Diagnostic) -> Value {
    let document = Infeasible {
        fits: false,
        code: no.code.to_owned(),
        reason: no.headline.clone(),
        notes: no.notes.clone(),
        help: no.help.clone(),
        have_bytes: fact(no, "have_bytes").as_f64(),
        smallest: fact(no, "smallest").as_object().cloned(),
        nearest: fact(no, "nearest").as_array().cloned().unwrap_or_default(),
    };
    document.to_json()
}

/// Tells the user that a panic is our defect. Ranks report theirs as the error of a step, the
/// reader of tokenisers its as a damaged file.
pub fn install_panic_hook() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let is_reported = |name: &str| name.starts_with("rank ") || name == runtime::tokens::READER;
        if thread.name().is_some_and(is_reported) {
            return;
        }
        if std::env::var_os("GANTLINE_BACKTRACE").is_some() {
            default(panic);
        }
        let payload = panic.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("");
        let at = panic.location().map(|at| format!(" at {}:{}", at.file(), at.line()));
        note(&format!(
            "error: this is a defect of gantline: {text}\n  = note: found{}\n  = help: please \
             report it with the command line; GANTLINE_BACKTRACE=1 shows where it was reached",
            at.unwrap_or_default()
        ));
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_change_a_terminal_is_shown() {
        assert_eq!(visible("a\x1b[31m\tb\x07\n"), "a\u{241b}[31m\tb\u{2407}\n");
        assert_eq!(visible("\u{9b}2J\u{202e}é"), "\u{fffd}2J\u{fffd}é");
    }

    #[test]
    fn tables_align_their_columns() {
        let mut table = Table::new(["name", "count"]);
        table.row(["a".into(), "1".into()]);
        table.row(["longer".into(), count(1_234_567)]);
        assert_eq!(table.text(), "  name        count\n  a               1\n  longer  1,234,567\n");
    }

    #[test]
    fn thousands_are_separated() {
        assert_eq!([0, 999, 1000, 1_000_000].map(count), ["0", "999", "1,000", "1,000,000"]);
    }

    #[test]
    fn numbers_keep_digits_that_matter() {
        let cases = [0.0, 0.021_34, 0.5, 2.5, 3.0, 99.96, 123.4, 1_234_567.0, 1e-12];
        let texts = ["0", "0.0213", "0.5", "2.5", "3", "100", "123", "1,234,567", "1.00e-12"];
        assert_eq!(cases.map(number), texts);
        let energies = [0.25, 12.0, 4_321.0, 7.5e6, 2e15].map(joules);
        assert_eq!(energies, ["250 mJ", "12 J", "4.32 kJ", "7.5 MJ", "2,000 TJ"]);
    }

    #[test]
    fn only_beginnings_of_lines_are_coloured() {
        assert_eq!(
            colour("error[E1]: an error\nerrors"),
            "\x1b[1;31merror\x1b[0m[E1]: an error\nerrors"
        );
    }
}
