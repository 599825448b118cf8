//! Names and values of a file in order, each with its place, of which some are taken.

use std::collections::BTreeSet;
use std::ops::Range;

use ir::import::{nearest, nearest_within};
use ir::{DType, Diagnostic, Span};
use planner::configuration::Configuration;
use serde_json::Value as Json;

use super::Layout;
use crate::job::Precision;

/// A name and its value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Word {
    pub(super) name: String,
    pub(super) value: Json,
    /// The bytes of the name, and of the value.
    pub(super) places: [Range<usize>; 2],
}

impl Word {
    /// The value as a file has it, without quotes.
    pub(super) fn text(&self) -> String {
        self.value.as_str().map_or_else(|| self.value.to_string(), str::to_owned)
    }
}

/// What a file says.
pub(super) struct Said {
    pub(super) source: String,
    pub(super) words: Vec<Word>,
    taken: Vec<bool>,
    /// Names that were looked for.
    looked_for: BTreeSet<String>,
    pub(super) wrong: Vec<Diagnostic>,
    /// Notes to the user on how the file was read.
    pub(super) notes: Vec<String>,
}

/// Edits from a name that is looked for, within which another one is a misspelling of it. Chosen:
/// no two names that a tool has are so near.
const EDITS_MAX: usize = 2;
/// Characters of a name that can be misspelt so; shorter ones are near to others by chance.
const NAME_MIN: usize = 10;

impl Said {
    pub(super) fn new(source: &str, words: Vec<Word>) -> Said {
        Said {
            source: source.to_owned(),
            taken: vec![false; words.len()],
            words,
            looked_for: BTreeSet::new(),
            wrong: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// The last word of a name, which counts; all of them are taken.
    fn word(&mut self, name: &str) -> Option<&Word> {
        let is_new = self.looked_for.insert(name.to_owned());
        let mut found: Option<&Word> = None;
        for (at, word) in self.words.iter().enumerate().filter(|(_, word)| word.name == name) {
            self.taken[at] = true;
            if let Some(before) = found.filter(|before| is_new && before.value != word.value) {
                let [before, word] = [before, word].map(Word::text);
                self.notes.push(format!("`{name}` is `{before}` and then `{word}`, which counts"));
            }
            found = Some(word);
        }
        found.filter(|word| !word.value.is_null())
    }

    /// Whether a name is there. Its value, if any, is not looked at.
    pub(super) fn has(&mut self, name: &str) -> bool {
        self.word(name).is_some()
    }

    /// Where the value of a name stands; the whole file where it has none.
    pub(super) fn place(&self, name: &str) -> Span {
        let word = self.words.iter().rfind(|word| word.name == name);
        let bytes = word.map_or(0..0, |word| word.places[1].clone());
        Span { source: self.source.clone(), bytes }
    }

    /// Adds what is wrong with the value of a name, and the way out.
    pub(super) fn refuse(&mut self, name: &str, headline: String, help: impl Into<String>) {
        let place = self.place(name);
        self.wrong.push(Diagnostic::error("E5016", place, headline).help(help));
    }

    /// A whole number of a range; what is none is refused.
    pub(super) fn number_in(&mut self, name: &str, range: Range<u32>) -> Option<u32> {
        let word = self.word(name)?;
        let (value, text) = (&word.value, word.text());
        let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
        let number = number.and_then(|n| u32::try_from(n).ok());
        if number.is_some_and(|number| range.contains(&number)) {
            return number;
        }
        let (headline, help) = match number {
            None if is_of_slurm(&text) => {
                let headline = format!("`{name}` is `{text}`, and it is not known what Slurm sets");
                (headline, "`--devices N`, as many as the script's nodes have".into())
            }
            None => (format!("`{name}` is `{text}`, which is no count"), "a whole number".into()),
            Some(_) if range.end == u32::MAX => {
                (format!("`{name}` is {text}"), format!("{} or more", range.start))
            }
            Some(_) => {
                let help = format!("a number of {} to {}", range.start, range.end - 1);
                (format!("`{name}` is {text}"), help)
            }
        };
        self.refuse(name, headline, format!("write {help}"));
        None
    }

    /// A whole number.
    pub(super) fn number(&mut self, name: &str) -> Option<u32> {
        self.number_in(name, 0..u32::MAX)
    }

    /// A count of at least one, if it is said.
    pub(super) fn size(&mut self, name: &str) -> Option<u32> {
        self.number_in(name, 1..u32::MAX)
    }

    /// A count of at least one; 1 where nothing is said.
    pub(super) fn count(&mut self, name: &str) -> u32 {
        self.size(name).unwrap_or(1)
    }

    /// Whether a name is true; false where it is not there.
    pub(super) fn is(&mut self, name: &str) -> bool {
        let Some(word) = self.word(name) else { return false };
        let text = word.text();
        match text.as_str() {
            "true" | "True" | "1" => true,
            "false" | "False" | "0" => false,
            _ => {
                let headline = format!("`{name}` is `{text}`, which is neither true nor false");
                self.refuse(name, headline, "write true or false");
                false
            }
        }
    }

    /// The half precision that is switched on, by the names of bf16 and of fp16 and whether each is
    /// on; both together are refused.
    pub(super) fn half_precision(&mut self, names: [(&str, bool); 2]) -> Option<Precision> {
        let [(bf16, is_bf16), (fp16, is_fp16)] = names;
        if is_bf16 && is_fp16 {
            let headline = format!("`{bf16}` and `{fp16}` are both there");
            self.refuse(fp16, headline, "leave one of them out");
        }
        let found = [(DType::BF16, is_bf16), (DType::F16, is_fp16)].into_iter().find(|one| one.1);
        found.map(|(dtype, _)| Precision::Of(dtype))
    }

    /// One of a few values; another one is refused.
    pub(super) fn choice<T: Copy>(&mut self, name: &str, all: &[(&str, T)]) -> Option<T> {
        self.choice_as(name, all, |a, b| a == b)
    }

    /// One of a few values, where `is_same` compares texts; another one is refused.
    pub(super) fn choice_as<T: Copy>(
        &mut self,
        name: &str,
        all: &[(&str, T)],
        is_same: impl Fn(&str, &str) -> bool,
    ) -> Option<T> {
        let text = self.word(name)?.text();
        let found = all.iter().find(|(choice, _)| is_same(choice, &text));
        if found.is_none() {
            let choices: Vec<&str> = all.iter().map(|(choice, _)| *choice).collect();
            let near = nearest(&text, choices.iter().copied());
            let help = match near {
                Some(near) => format!("did you mean `{near}`? it is one of {}", one_of(&choices)),
                None => format!("write one of {}", one_of(&choices)),
            };
            let headline = format!("`{name}` is `{text}`, which is not known");
            self.refuse(name, headline, help);
        }
        found.map(|(_, value)| *value)
    }

    /// The text of a name.
    pub(super) fn text(&mut self, name: &str) -> Option<String> {
        Some(self.word(name)?.text())
    }

    /// Takes the names away whose value is left to another program, and returns them.
    pub(super) fn take_auto(&mut self) -> Vec<String> {
        let is_auto = |word: &Word| word.value.as_str() == Some("auto");
        let autos = self.words.iter().filter(|word| is_auto(word));
        let names = autos.map(|word| word.name.clone()).collect();
        self.words.retain(|word| !is_auto(word));
        self.taken.truncate(self.words.len());
        names
    }

    /// What was read, unless anything was wrong: all of it, in the order of the file.
    pub(super) fn layout(
        mut self,
        tool: &'static str,
        configuration: Configuration,
        [global_batch, seq]: [Option<u32>; 2],
    ) -> Result<Layout, Vec<Diagnostic>> {
        let mut left_out: Vec<String> = Vec::new();
        for at in 0..self.words.len() {
            if self.taken[at] {
                continue;
            }
            let word = self.words[at].clone();
            let names = self.looked_for.iter().map(String::as_str);
            let near = nearest_within(EDITS_MAX, &word.name, names).map(str::to_owned);
            match near.filter(|_| word.name.len() >= NAME_MIN) {
                Some(near) => {
                    let [bytes, _] = word.places;
                    let place = Span { source: self.source.clone(), bytes };
                    let headline = format!("`{}` is not known", word.name);
                    let help = format!("did you mean `{near}`?");
                    self.wrong.push(Diagnostic::error("E5016", place, headline).help(help));
                }
                None if left_out.contains(&word.name) => {}
                None => left_out.push(word.name),
            }
        }
        if !self.wrong.is_empty() {
            return Err(in_order(self.wrong));
        }
        let notes = self.notes;
        let layout = Layout::of(configuration);
        Ok(Layout { tool, global_batch, seq, left_out, notes, ..layout })
    }
}

/// Whether a text has a variable that Slurm sets.
fn is_of_slurm(text: &str) -> bool {
    text.contains("$SLURM_") || text.contains("${SLURM_")
}

/// Names, as a help line lists them.
fn one_of(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// Diagnostics of a file in its order, and those of flags after them: the exit code is that of the
/// first one.
pub(super) fn in_order(mut wrong: Vec<Diagnostic>) -> Vec<Diagnostic> {
    wrong.sort_by_key(|one| (one.code == "E5001", one.span.bytes.start));
    wrong
}
