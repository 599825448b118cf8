//! The limits that keep this code readable, as a test.
//!
//! Each rule looks at all files and returns what is over its limit. What is over today stands in
//! `tests/tidy.ratchet` with its size: more fails, and less fails too, until the ratchet is
//! tightened by `UPDATE_GOLDEN=1 cargo test --test tidy`. That only lowers numbers; a new
//! exception is written there by hand.
//!
//! Not checked here, because the compiler and clippy do: documentation of public items, `unwrap`,
//! `// SAFETY:` before unsafe blocks, wildcards in tables, `dbg`, printing.

#![allow(clippy::unwrap_used, reason = "a test may fail anywhere")]

mod codes;
mod dependencies;
mod imports;
mod ratchet;
mod rules;
mod source;

use std::path::Path;

use ratchet::Ratchet;
use source::Tree;

/// Something over a limit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    rule: &'static str,
    /// A path, with `:function` behind it where a function is meant.
    place: String,
    /// How much or how many.
    amount: usize,
    /// What a person should know, with line numbers.
    detail: String,
}

type Rule = fn(&Tree) -> Vec<Finding>;

const RULES: &[Rule] = &[
    rules::long_files,
    rules::long_functions,
    rules::wide_lines,
    rules::vague_names,
    rules::unsafe_outside,
    rules::silenced_lints,
    rules::expects_per_1000_lines,
    rules::expects_without_text,
    rules::open_ends,
    rules::foreign_words,
    rules::unused_golden,
    codes::undocumented,
    codes::documented_but_unused,
    codes::of_another_crate,
    codes::documented_twice,
    dependencies::unused,
    imports::cycles,
];

#[test]
fn the_tree_is_tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tree = Tree::read(root);
    assert!(tree.sources.len() > 100, "only {} Rust files are found", tree.sources.len());
    let findings: Vec<Finding> = RULES.iter().flat_map(|rule| rule(&tree)).collect();
    let path = root.join("tests/tidy.ratchet");
    let ratchet = Ratchet::read(&path);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        ratchet.tightened(&findings).write(&path);
    }
    let complaints = Ratchet::read(&path).compare(&findings);
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn comments_and_literals_are_no_code() {
    let text = "let a = \"fn x() {\"; // unsafe\n/* a /* b */ c */ 'x' '\\'' &'a r#\"{\"#;\n";
    let blank = source::code_of(text);
    assert_eq!(blank.len(), text.len());
    let words: Vec<&str> = blank.split_whitespace().collect();
    assert_eq!(words, ["let", "a", "=", ";", "&'a", ";"]);
}

#[test]
fn functions_and_test_modules_are_found() {
    let text = "fn a() {\n    b();\n}\n#[cfg(test)]\nmod tests {\n    fn c<T>(_: fn(T))\n    \
                where\n        T: X,\n    {\n    }\n}\n#[cfg(test)]\nmod apart;\n";
    let code = source::code_of(text);
    let found: Vec<_> = source::functions(&code).into_iter().map(|f| (f.name, f.lines)).collect();
    assert_eq!(found, [("a".to_owned(), 3), ("c".to_owned(), 5)]);
    let (ranges, files) = source::test_parts(&code);
    assert_eq!(files, ["apart"]);
    assert!(ranges.iter().any(|r| code[r.clone()].contains("fn c")));
    assert!(ranges.iter().all(|r| !code[r.clone()].contains("fn a")));
}
