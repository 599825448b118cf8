//! Guards: the parts of a text that stand under some settings only.
//!
//! ```text
//! when bias and activation == silu {
//!   %h: f32[N] = add %g %b
//! } else when window != 0 {
//!   …
//! } else {
//!   …
//! }
//! %y: f32[B, N] = broadcast new=[0 if not batched, 1 if shared] %x
//! ```
//!
//! A condition is `name`, `not name`, `name == value` or `name != value`, or several joined by
//! `and`. A number is true where it is not zero; a word is only compared. The lines of a guard
//! stand alone and may be nested; an entry of a list in brackets may end in `if CONDITION`.
//!
//! [`select`] works before the text is parsed and blanks what does not stand: every byte stays
//! where it was, so that the parser's diagnostics have their places.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use crate::{Diagnostic, Span};

/// The most diagnostics that one selection reports.
const DIAGNOSTICS_MAX: usize = 20;

/// What a name in a condition stands for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Setting {
    /// True where it is not zero.
    Number(f64),
    /// A boolean.
    Flag(bool),
    /// One of several words, for comparisons.
    Word {
        /// The word that holds.
        word: String,
        /// All that there are: a comparison with any other is an error.
        words: Vec<String>,
    },
}

/// Settings by name.
pub(crate) type Settings = BTreeMap<String, Setting>;

/// The text in which only what stands under the settings is left; the rest is blanks.
///
/// # Errors
/// `E1001` for a guard that cannot be read or braces that do not match, `E1002` for a name or word
/// that is unknown, also in parts that are not selected.
pub(crate) fn select<'t>(
    source: &str,
    text: &'t str,
    settings: &Settings,
) -> Result<Cow<'t, str>, Vec<Diagnostic>> {
    if !has_guards(text) {
        return Ok(Cow::Borrowed(text));
    }
    let mut selection = Selection {
        source,
        settings,
        open: Vec::new(),
        bytes: text.as_bytes().to_vec(),
        diagnostics: Vec::new(),
    };
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        selection.line(at, line.split_once('#').map_or(line, |(code, _)| code));
        at += line.len();
    }
    for open in std::mem::take(&mut selection.open) {
        if let Open::Guard { line, .. } = open {
            selection.fail("E1001", line, "a guard without its `}`");
        }
    }
    let selected = String::from_utf8(selection.bytes);
    match selected {
        Ok(selected) if selection.diagnostics.is_empty() => Ok(Cow::Owned(selected)),
        _ => Err(selection.diagnostics),
    }
}

/// Whether a text has guards, or what looks like one.
pub(crate) fn has_guards(text: &str) -> bool {
    let begins = |line: &str| ["when ", "} else"].iter().any(|g| line.trim_start().starts_with(g));
    text.lines().any(|line| begins(line) || line.contains(" if "))
}

/// An opened brace.
enum Open {
    /// A body.
    Body,
    /// A block of a guard.
    Guard {
        /// Its last line that opened a block.
        line: Range<usize>,
        /// Whether what is around it stands.
        around: bool,
        /// Whether an earlier block of it stood.
        taken: bool,
        /// Whether its present block stands.
        stands: bool,
        /// Whether the present block is the last one.
        is_last: bool,
    },
}

struct Selection<'t> {
    source: &'t str,
    settings: &'t Settings,
    open: Vec<Open>,
    bytes: Vec<u8>,
    diagnostics: Vec<Diagnostic>,
}

impl Selection<'_> {
    fn fail(&mut self, code: &'static str, bytes: Range<usize>, headline: impl Into<String>) {
        if self.diagnostics.len() < DIAGNOSTICS_MAX {
            let span = Span { source: self.source.to_owned(), bytes };
            let headline = crate::diagnostic::shortened(headline.into());
            self.diagnostics.push(Diagnostic::error(code, span, headline));
        }
    }

    fn blank(&mut self, bytes: Range<usize>) {
        for byte in &mut self.bytes[bytes] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
    }

    fn stands(&self) -> bool {
        self.open.iter().all(|open| !matches!(open, Open::Guard { stands: false, .. }))
    }

    /// One line from byte `start` on, without its comment.
    fn line(&mut self, start: usize, line: &str) {
        let code = line.trim();
        let first = start + (line.len() - line.trim_start().len());
        let span = first..first + code.len();
        let first_word = code.split([' ', '{']).next().unwrap_or_default();
        if first_word == "when" {
            let around = self.stands();
            let stands = self.opening(code, span.clone()).unwrap_or(false);
            let (taken, is_last) = (stands, false);
            self.open.push(Open::Guard { line: span.clone(), around, taken, stands, is_last });
            self.blank(span);
        } else if let Some(rest) = code.strip_prefix('}').map(str::trim_start)
            && let Some(rest) = rest.strip_prefix("else")
        {
            self.alternative(rest.trim_start(), span.clone());
            self.blank(span);
        } else if code == "}" && matches!(self.open.last(), Some(Open::Guard { .. })) {
            self.open.pop();
            self.blank(span);
        } else {
            self.braces(&span, code);
            self.lists(first, code);
            if !self.stands() {
                self.blank(span);
            }
        }
    }

    /// The condition of `when CONDITION {`.
    fn opening(&mut self, code: &str, span: Range<usize>) -> Option<bool> {
        let inner = code.strip_prefix("when").and_then(|rest| rest.strip_suffix('{'));
        let Some(condition) = inner else {
            self.fail("E1001", span, "a guard is a line `when CONDITION {`");
            return None;
        };
        let at = span.start + "when".len();
        self.condition(condition, at)
    }

    /// `} else {` or `} else when CONDITION {`, from behind `else` on.
    fn alternative(&mut self, rest: &str, span: Range<usize>) {
        let Some(Open::Guard { around, mut taken, is_last, .. }) = self.open.pop() else {
            self.fail("E1001", span, "`else` without a guard before it");
            self.open.push(Open::Body);
            return;
        };
        if is_last {
            self.fail("E1001", span.clone(), "a second `else` of one guard");
        }
        let holds = if rest == "{" {
            true
        } else {
            let at = span.end - rest.len();
            self.opening(rest, at..span.end).unwrap_or(false)
        };
        let stands = holds && !taken;
        taken |= stands;
        self.open.push(Open::Guard { line: span, around, taken, stands, is_last: rest == "{" });
    }

    /// The braces of bodies, which close within the block that they open in.
    fn braces(&mut self, span: &Range<usize>, code: &str) {
        for brace in code.chars().filter(|c| matches!(c, '{' | '}')) {
            if brace == '{' {
                self.open.push(Open::Body);
                continue;
            }
            match self.open.last() {
                Some(Open::Body) => {
                    self.open.pop();
                }
                Some(Open::Guard { .. }) => {
                    self.fail("E1001", span.clone(), "the `}` of a guard stands alone on its line");
                }
                None => self.fail("E1001", span.clone(), "a `}` that closes nothing"),
            }
        }
    }

    /// The entries of lists that do not stand, in a line from byte `first` on.
    fn lists(&mut self, first: usize, code: &str) {
        let mut from = 0;
        while let Some(open) = code[from..].find('[').map(|at| from + at + 1) {
            let Some(close) = code[open..].find(']').map(|at| open + at) else { return };
            from = close;
            if code[open..close].contains(" if ") {
                self.list(first + open, &code[open..close]);
            }
        }
    }

    /// Leaves of a list the entries that stand, each where it was.
    fn list(&mut self, start: usize, list: &str) {
        let mut kept: Vec<Range<usize>> = Vec::new();
        let mut at = 0;
        for entry in list.split(',') {
            let (value, condition) = match entry.split_once(" if ") {
                Some((value, condition)) => (value, Some((condition, at + value.len() + 4))),
                None => (entry, None),
            };
            let holds = condition.is_none_or(|(condition, within)| {
                self.condition(condition, start + within).unwrap_or(false)
            });
            let from = at + (value.len() - value.trim_start().len());
            if holds && !value.trim().is_empty() {
                kept.push(from..from + value.trim().len());
            }
            at += entry.len() + 1;
        }
        self.blank(start..start + list.len());
        for (number, entry) in kept.iter().enumerate() {
            let there = start + entry.start..start + entry.end;
            self.bytes[there.clone()].copy_from_slice(list[entry.clone()].as_bytes());
            if number + 1 < kept.len() {
                // The comma, or the blank before `if`, stood here.
                self.bytes[there.end] = b',';
            }
        }
    }

    /// Whether all parts of a condition hold; none where one cannot be read.
    fn condition(&mut self, condition: &str, at: usize) -> Option<bool> {
        let words = words(condition);
        let mut holds = Some(true);
        for part in words.split(|(word, _)| *word == "and") {
            let span = match (part.first(), part.last()) {
                (Some((_, first)), Some((last, end))) => at + first..at + end + last.len(),
                _ => at..at + condition.len(),
            };
            let part: Vec<&str> = part.iter().map(|(word, _)| *word).collect();
            let found = match part[..] {
                [name] => self.truth(name, span),
                ["not", name] => self.truth(name, span).map(|truth| !truth),
                [name, "==", value] => self.equal(name, value, span),
                [name, "!=", value] => self.equal(name, value, span).map(|equal| !equal),
                _ => {
                    let headline = "expected `name`, `not name`, `name == value` or \
                                    `name != value`, joined by `and`";
                    self.fail("E1001", span, headline);
                    None
                }
            };
            holds = holds.zip(found).map(|(all, this)| all && this);
        }
        holds
    }

    fn setting(&mut self, name: &str, span: Range<usize>) -> Option<Setting> {
        let setting = self.settings.get(name).cloned();
        if setting.is_none() {
            let known: Vec<&str> = self.settings.keys().map(String::as_str).collect();
            let known = known.join("`, `");
            self.fail("E1002", span, format!("`{name}` is no setting; there are `{known}`"));
        }
        setting
    }

    fn truth(&mut self, name: &str, span: Range<usize>) -> Option<bool> {
        match self.setting(name, span.clone())? {
            Setting::Number(number) => Some(number != 0.0),
            Setting::Flag(flag) => Some(flag),
            Setting::Word { word, .. } => {
                let headline = format!("`{name}` is a word: write `{name} == {word}`");
                self.fail("E1001", span, headline);
                None
            }
        }
    }

    fn equal(&mut self, name: &str, value: &str, span: Range<usize>) -> Option<bool> {
        let (equal, wanted) = match self.setting(name, span.clone())? {
            Setting::Number(number) => {
                (value.parse().ok().map(|value: f64| value == number), "a number".to_owned())
            }
            Setting::Flag(flag) => {
                (value.parse().ok().map(|value: bool| value == flag), "`true` or `false`".into())
            }
            Setting::Word { word, words } => {
                let is_known = words.iter().any(|known| known == value);
                (is_known.then_some(word == value), format!("one of `{}`", words.join("`, `")))
            }
        };
        if equal.is_none() {
            self.fail("E1002", span, format!("`{name}` is {wanted}, never `{value}`"));
        }
        equal
    }
}

/// The words of a condition, with the bytes where they start.
fn words(condition: &str) -> Vec<(&str, usize)> {
    let mut words: Vec<(&str, usize)> = Vec::new();
    let mut at = 0;
    while at < condition.len() {
        let rest = &condition[at..];
        let is_sign = |c: char| matches!(c, '=' | '!');
        let Some(first) = rest.chars().next() else { break };
        let len = if first.is_whitespace() {
            first.len_utf8()
        } else if is_sign(first) {
            rest.find(|c: char| !is_sign(c)).unwrap_or(rest.len())
        } else {
            rest.find(|c: char| c.is_whitespace() || is_sign(c)).unwrap_or(rest.len())
        };
        if !first.is_whitespace() {
            words.push((&rest[..len], at));
        }
        at += len;
    }
    words
}

#[cfg(test)]
mod tests;
