//! The codes of diagnostics: each is used, documented in one crate, and has that crate's digit.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use super::source::Tree;

/// The crates and the first digits of their codes.
const CRATES: &[(&str, char)] = &[
    ("ir", '1'),
    ("kernels", '2'),
    ("codegen", '2'),
    ("planner", '3'),
    ("runtime", '4'),
    ("src", '5'),
];

/// The codes in string literals of a crate, outside tests, and one place of each.
fn used(tree: &Tree, package: &str) -> BTreeMap<String, String> {
    let mut used = BTreeMap::new();
    for source in tree.sources.iter().filter(|s| s.package() == package && !s.is_test) {
        for (at, _) in source.text.match_indices('"').filter(|(at, _)| !source.is_test_at(*at)) {
            let code = code_at(&source.text[at + 1..]);
            let quoted = code.filter(|code| source.text[at + 1 + code.len()..].starts_with('"'));
            if let Some(code) = quoted {
                used.entry(code).or_insert_with(|| format!("{}:{}", source.path, source.line(at)));
            }
        }
    }
    used
}

/// The codes in the tables of a crate's docs, as often as they stand there.
fn documented(tree: &Tree, package: &str) -> Vec<String> {
    let lines = tree.sources.iter().filter(|s| s.package() == package).flat_map(|s| s.text.lines());
    let rows = lines.filter_map(|line| line.strip_prefix("//! |"));
    rows.filter_map(|row| code_at(row.trim_start_matches([' ', '`']))).collect()
}

fn code_at(text: &str) -> Option<String> {
    let code = text.get(..5)?;
    let digits = code.strip_prefix(['E', 'W'])?;
    let ends = !text[5..].starts_with(|c: char| c.is_ascii_alphanumeric());
    (ends && digits.bytes().all(|b| b.is_ascii_digit())).then(|| code.to_owned())
}

fn finding(rule: &'static str, package: &str, codes: &[String]) -> Option<Finding> {
    let (place, amount, detail) = (package.to_owned(), codes.len(), codes.join(", "));
    (amount > 0).then_some(Finding { rule, place, amount, detail })
}

/// Codes that a crate reports and its docs do not list.
pub(crate) fn undocumented(tree: &Tree) -> Vec<Finding> {
    let missing = |(package, digit): &(&str, char)| {
        let documented = documented(tree, package);
        let own = used(tree, package).into_iter().filter(|(code, _)| code[1..].starts_with(*digit));
        let missing = own.filter(|(code, _)| !documented.contains(code));
        let missing: Vec<String> = missing.map(|(code, at)| format!("{code} ({at})")).collect();
        finding("undocumented-code", package, &missing)
    };
    CRATES.iter().filter_map(missing).collect()
}

/// Codes that the docs list and nobody reports.
pub(crate) fn documented_but_unused(tree: &Tree) -> Vec<Finding> {
    let stale = |(package, _): &(&str, char)| {
        let used = used(tree, package);
        let stale = documented(tree, package).into_iter().filter(|code| !used.contains_key(code));
        finding("unused-code", package, &stale.collect::<Vec<_>>())
    };
    CRATES.iter().filter_map(stale).collect()
}

/// Codes with another crate's digit. The root package may name the codes of all.
pub(crate) fn of_another_crate(tree: &Tree) -> Vec<Finding> {
    let foreign = |(package, digit): &(&str, char)| {
        let codes = used(tree, package).into_iter();
        let foreign = codes.filter(|(code, _)| *package != "src" && !code[1..].starts_with(*digit));
        let foreign: Vec<String> = foreign.map(|(code, at)| format!("{code} ({at})")).collect();
        finding("foreign-code", package, &foreign)
    };
    CRATES.iter().filter_map(foreign).collect()
}

/// Codes that are listed twice, in one crate or in two.
pub(crate) fn documented_twice(tree: &Tree) -> Vec<Finding> {
    let mut seen = BTreeSet::new();
    let twice = |(package, _): &(&str, char)| {
        let codes = documented(tree, package).into_iter();
        let again: Vec<String> = codes.filter(|code| !seen.insert(code[1..].to_owned())).collect();
        finding("double-code", package, &again)
    };
    CRATES.iter().filter_map(twice).collect()
}
