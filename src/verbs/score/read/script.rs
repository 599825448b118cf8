//! Flags in a shell script: comments, continued lines, quotes, arrays, and variables that the
//! script itself sets to a word, or that Slurm sets.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::Value as Json;

use super::said::Word;
use super::slurm::{self, Allocation};

/// Flags in order, each with the word that follows it, or nothing. Variables of Slurm stand for
/// what they are on the devices of `allocation`.
pub(super) fn flags(text: &str, allocation: Allocation) -> Vec<Word> {
    let words = words(text);
    let mut variables = BTreeMap::new();
    for (word, _) in &words {
        if let Some((name, value)) = word.split_once('=')
            && !name.is_empty()
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        {
            // `NAME=${NAME:-word}` is the word, where nothing else sets it.
            let own = format!("${{{name}:-");
            let default = value.strip_prefix(&own).and_then(|rest| rest.strip_suffix('}'));
            variables.insert(name.to_owned(), default.unwrap_or(value).to_owned());
        }
    }
    // What the script sets counts before what Slurm has set.
    let plain = paired(&words, &variables);
    for (name, value) in slurm::variables(text, &plain, allocation) {
        variables.entry(name.to_owned()).or_insert(value.to_string());
    }
    paired(&words, &variables)
}

/// Flags among words whose variables are replaced, each with the word that follows it, or nothing.
fn paired(words: &[(String, Range<usize>)], variables: &BTreeMap<String, String>) -> Vec<Word> {
    let words: Vec<(String, &Range<usize>)> =
        words.iter().map(|(word, place)| (replaced(word, variables), place)).collect();
    let is_flag = |word: &str| word.len() > 2 && word.starts_with("--");
    let mut flags = Vec::new();
    for (index, (word, own)) in words.iter().enumerate().filter(|(_, (word, _))| is_flag(word)) {
        let (name, value, place) = match word.split_once('=') {
            Some((name, value)) => (name, value, own),
            None => match words.get(index + 1).filter(|(next, _)| !is_flag(next)) {
                Some((next, place)) => (word.as_str(), next.as_str(), place),
                None => (word.as_str(), "", own),
            },
        };
        let places = [(*own).clone(), (*place).clone()];
        flags.push(Word { name: name.to_owned(), value: Json::from(value), places });
    }
    flags
}

/// Words of a script with their places, without comments and quotes. Parentheses without quotes end
/// words, and so does the end of a line that goes on. Quotes are not looked for past a line: an
/// apostrophe in a text is none.
fn words(text: &str) -> Vec<(String, Range<usize>)> {
    let mut words = Vec::new();
    let mut word: Option<(String, Range<usize>)> = None;
    let mut is_comment = false;
    let mut quote = None;
    for (at, c) in text.char_indices() {
        is_comment &= c != '\n';
        quote = quote.filter(|_| c != '\n');
        let rest = &text[at..];
        let goes_on = rest.starts_with("\\\n") || rest.starts_with("\\\r\n");
        let ends = quote.is_none() && "();".contains(c);
        if is_comment || goes_on || c.is_whitespace() || ends {
            words.extend(word.take());
            continue;
        }
        if c == '#' && word.is_none() {
            is_comment = true;
            continue;
        }
        let (letters, place) = word.get_or_insert_with(|| (String::new(), at..at));
        place.end = at + c.len_utf8();
        match quote {
            Some(begun) if c == begun => quote = None,
            None if c == '"' || c == '\'' => quote = Some(c),
            // Quotes inside of others were written for another shell.
            _ if c == '"' || c == '\'' => {}
            _ => letters.push(c),
        }
    }
    words.extend(word);
    words.retain(|(letters, _)| !letters.is_empty());
    words
}

/// A word with what its variables stand for, as far as they are set, and what they stand for.
fn replaced(word: &str, variables: &BTreeMap<String, String>) -> String {
    let mut word = word.to_owned();
    // A variable may stand for another; a loop of them ends here.
    for _ in 0..4 {
        let Some(at) = word.find('$') else { break };
        let rest = &word[at + 1..];
        let (name, after) = match rest.strip_prefix('{').and_then(|rest| rest.split_once('}')) {
            // The default of `${NAME:-word}` counts where nothing is set.
            Some((name, after)) => (name, after),
            None => {
                let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
                rest.split_at(rest.find(|c| !is_name(c)).unwrap_or(rest.len()))
            }
        };
        let (name, default) = match name.split_once(":-") {
            Some((name, default)) => (name, Some(default.to_owned())),
            None => (name, None),
        };
        let Some(value) = variables.get(name).cloned().or(default) else { break };
        word = format!("{}{value}{after}", &word[..at]);
    }
    word
}
