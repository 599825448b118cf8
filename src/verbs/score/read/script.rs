//! Flags in a shell script: comments, continued lines, quotes, arrays, and variables that the
//! script itself sets to a word.

use std::collections::BTreeMap;

use serde_json::Value as Json;

/// Flags in order, each with the word that follows it, or nothing.
pub(super) fn flags(text: &str) -> Vec<(String, Json)> {
    let words = words(text);
    let mut variables = BTreeMap::new();
    for word in &words {
        if let Some((name, value)) = word.split_once('=')
            && !name.is_empty()
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        {
            variables.insert(name.to_owned(), value.to_owned());
        }
    }
    let words: Vec<String> = words.iter().map(|word| replaced(word, &variables)).collect();
    let is_flag = |word: &str| word.len() > 2 && word.starts_with("--");
    let mut flags = Vec::new();
    for (index, word) in words.iter().enumerate().filter(|(_, word)| is_flag(word)) {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, value),
            None => {
                let next = words.get(index + 1).map_or("", String::as_str);
                (word.as_str(), if is_flag(next) { "" } else { next })
            }
        };
        flags.push((name.to_owned(), Json::from(value)));
    }
    flags
}

/// Words of a script, without comments and quotes. Parentheses end words.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let text = text.replace("\\\n", " ").replace("\\\r\n", " ");
    for line in text.lines() {
        let begins = |at: usize| at == 0 || line[..at].ends_with([' ', '\t']);
        let comment = line.match_indices('#').find(|(at, _)| begins(*at));
        let line = comment.map_or(line, |(at, _)| &line[..at]);
        let parts = line.split(|c: char| c.is_whitespace() || "();".contains(c));
        let parts = parts.map(|part| part.replace(['"', '\''], ""));
        words.extend(parts.filter(|part| !part.is_empty()));
    }
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
