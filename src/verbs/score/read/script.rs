//! Flags in a shell script: comments, continued lines, quotes, arrays, and variables that the
//! script itself sets to a word or to arithmetic, or that Slurm sets.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::Value as Json;

use super::arithmetic::{decimal, evaluated, split_at_end};
use super::said::Word;
use super::slurm::{self, Allocation};

/// Flags in order, each with the word that follows it, or nothing. Variables of Slurm stand for
/// what they are on the devices of `allocation`.
pub(super) fn flags(text: &str, allocation: Allocation) -> Vec<Word> {
    let words = words(text);
    let plain = paired(&words, &assigned(&words, BTreeMap::new()));
    let slurm = slurm::variables(text, &plain, allocation).into_iter();
    let set = slurm.map(|(name, value)| (name.to_owned(), value.to_string())).collect();
    paired(&words, &assigned(&words, set))
}

/// Variables that words set, one after the other, where some are set before them. Arithmetic is
/// evaluated where it stands, with what is set before it; other words are kept as they are. What is
/// set in branches, loops and here-documents counts as if it were set once.
fn assigned(
    words: &[(String, Range<usize>)],
    mut variables: BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    for (word, _) in words {
        let Some((name, value)) = word.split_once('=') else { continue };
        // What is added to is not known any more.
        if let Some(name) = name.strip_suffix(['+', '-', '*', '/', '%']) {
            variables.remove(name);
        }
        if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            // `NAME=${NAME:-word}` is the word, where nothing else sets it.
            let own = format!("${{{name}:-");
            let default = value.strip_prefix(&own).and_then(|rest| rest.strip_suffix('}'));
            let value = match default.unwrap_or(value) {
                // It may use the variable's previous value.
                arithmetic if arithmetic.contains("$((") => replaced(arithmetic, &variables),
                word => word.to_owned(),
            };
            variables.insert(name.to_owned(), value);
        }
    }
    variables
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
/// words, and so does the end of a line that goes on; those of arithmetic are of its word. Quotes
/// are not looked for past a line: an apostrophe in a text is none. Variables and arithmetic in
/// single quotes count too: such words are often commands for another shell.
fn words(text: &str) -> Vec<(String, Range<usize>)> {
    let mut words = Vec::new();
    let mut word: Option<(String, Range<usize>)> = None;
    let mut is_comment = false;
    let mut quote = None;
    let mut arithmetic_end = 0;
    for (at, c) in text.char_indices() {
        is_comment &= c != '\n';
        quote = quote.filter(|_| c != '\n');
        let rest = &text[at..];
        if at >= arithmetic_end && !is_comment {
            let arithmetic = rest.strip_prefix("$((").and_then(split_at_end);
            arithmetic_end = arithmetic.map_or(0, |(_, after)| text.len() - after.len());
        }
        if at < arithmetic_end {
            let (letters, place) = word.get_or_insert_with(|| (String::new(), at..at));
            place.end = at + c.len_utf8();
            match c {
                '"' | '\\' => {}
                c if c.is_whitespace() => letters.push(' '),
                c => letters.push(c),
            }
            continue;
        }
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

/// Variables and arithmetic of a word that are replaced at most: a loop of variables ends here.
const REPLACED_MAX: usize = 16;

/// A word with what its variables and its arithmetic stand for, as far as they are set, and what
/// they stand for.
fn replaced(word: &str, variables: &BTreeMap<String, String>) -> String {
    let variable = |rest: &str| variable(rest, variables);
    let number_at = |rest: &str| {
        let (value, left) = variable(rest)?;
        Some((decimal(&filled(&value, &variable))?, left))
    };
    let arithmetic = |rest: &str| {
        let (text, after) = split_at_end(rest.strip_prefix("((")?)?;
        Some((evaluated(text, &number_at)?.to_string(), after.len()))
    };
    filled(word, &|rest| arithmetic(rest).or_else(|| variable(rest)))
}

/// A word with each `$` replaced, the first one first, until one cannot be. `stands_for` gets the
/// text after a `$`, and returns what replaces its start and how many bytes of it are left.
fn filled(word: &str, stands_for: &dyn Fn(&str) -> Option<(String, usize)>) -> String {
    let mut word = word.to_owned();
    for _ in 0..REPLACED_MAX {
        let Some(at) = word.find('$') else { break };
        let Some((value, left)) = stands_for(&word[at + 1..]) else { break };
        word = format!("{}{value}{}", &word[..at], &word[word.len() - left..]);
    }
    word
}

/// What a variable stands for that a text starts with, and how many bytes of the text are left.
fn variable(rest: &str, variables: &BTreeMap<String, String>) -> Option<(String, usize)> {
    let (name, after) = match rest.strip_prefix('{').and_then(|rest| rest.split_once('}')) {
        Some(split) => split,
        None => {
            let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
            rest.split_at(rest.find(|c| !is_name(c)).unwrap_or(rest.len()))
        }
    };
    // The default of `${NAME:-word}` counts where nothing is set.
    let (name, default) = match name.split_once(":-") {
        Some((name, default)) => (name, Some(default.to_owned())),
        None => (name, None),
    };
    let value = variables.get(name).cloned().or(default)?;
    Some((value, after.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the flags of a script are, on some devices of nodes of eight.
    fn said(script: &str, devices: Option<u32>) -> Vec<String> {
        let flags = flags(script, Allocation { devices, per_node: Some(8) });
        flags.iter().map(|word| format!("{}={}", word.name, word.value.as_str().unwrap())).collect()
    }

    #[test]
    fn arithmetic_is_evaluated_as_a_shell_does() {
        let script = "GPUS_PER_NODE=8\nNNODES=${NNODES:-4}\n\
            WORLD_SIZE=$(($GPUS_PER_NODE * $NNODES))  # of all\n\
            TP=4; PP=2\nDP=\"$(( WORLD_SIZE / (TP*PP) ))\"\n\
            DP=$((DP * 1))\n\
            torchrun --nnodes $NNODES x.py --global-batch-size $(( DP * 16 )) \\\n\
            --micro-batch-size=$((DP/2)) --train-iters $((UNSET + 1)) --lr $TP$PP.$((TP-1))\n";
        let expected = [
            "--nnodes=4",
            "--global-batch-size=64",
            "--micro-batch-size=2",
            "--train-iters=$((UNSET + 1))",
            "--lr=42.3",
        ];
        assert_eq!(said(script, None), expected);
        for (script, expected) in [
            ("A=4\nx --a $((\"$A\" * \\\n 2))", "--a=8"),
            ("A=4; B=${A}$((A*2))\nx --a $B", "--a=48"),
            ("A=4; A=$((A+1)); A=$((A+1))\nx --a $((A))", "--a=6"),
            ("A=4; A+=4\nx --a $((A*2))", "--a=$((A*2))"),
            ("A=4; ((A+=4))\nx --a $((A*2))", "--a=$((A*2))"),
            ("A=010\nx --a $((A))", "--a=$((A))"),
            ("A=4\n# $((A\nx --a $((A)) é", "--a=4"),
            ("x --a é$((2))é", "--a=é2é"),
        ] {
            assert_eq!(said(script, None), [expected], "{script}");
        }
    }

    #[test]
    fn arithmetic_knows_what_slurm_sets() {
        let script = "WORLD=$((SLURM_NNODES * 8))\nsrun x.py --global-batch-size $((WORLD * 2))\n";
        assert_eq!(said(script, Some(32)), ["--global-batch-size=64"]);
        assert_eq!(said(script, None), ["--global-batch-size=$((WORLD * 2))"]);
    }

    /// Variables that stand for each other end, however many they are.
    #[test]
    fn loops_of_variables_end() {
        assert_eq!(said("A=$A$A\nB=$((B + B))\nx --a $((A)) --b $B", None).len(), 2);
        assert_eq!(said(&format!("{}\nx --a 1", "$((".repeat(300_000)), None), ["--a=1"]);
    }
}
