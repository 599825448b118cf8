//! The files of the tree, and as much of Rust's grammar as the rules need.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// What is read. Everything else in a checkout is made by a build or a run.
const ROOTS: &[&str] =
    &[".ci", "benches", "codegen", "ir", "kernels", "planner", "runtime", "src", "tests"];

/// All files.
pub(crate) struct Tree {
    /// Those in Rust, by path.
    pub(crate) sources: Vec<Source>,
    /// All that are text, as path and text; Rust files too.
    pub(crate) texts: Vec<(String, String)>,
}

/// A file in Rust.
pub(crate) struct Source {
    /// From the root of the tree, with `/` between parts.
    pub(crate) path: String,
    pub(crate) text: String,
    /// The text with blanks in place of comments and literals; same offsets.
    pub(crate) code: String,
    /// Whether the whole file is compiled for tests and benchmarks only.
    pub(crate) is_test: bool,
    tests: Vec<Range<usize>>,
}

/// A function with a body.
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) start: usize,
    pub(crate) lines: usize,
    pub(crate) body: Range<usize>,
}

impl Tree {
    pub(crate) fn read(root: &Path) -> Tree {
        let mut paths = Vec::new();
        for entry in fs::read_dir(root).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap_or_default();
            if [".md", ".toml"].iter().any(|end| name.ends_with(end)) {
                paths.push(path);
            } else if ROOTS.contains(&name) {
                walk(&path, &mut paths);
            }
        }
        let texts = paths.iter().filter_map(|path| {
            let name = path.strip_prefix(root).unwrap().to_str()?.replace('\\', "/");
            Some((name, fs::read_to_string(path).ok()?))
        });
        let mut texts: Vec<(String, String)> = texts.collect();
        texts.sort();
        Tree { sources: sources(&texts), texts }
    }
}

fn walk(directory: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { walk(&path, paths) } else { paths.push(path) }
    }
}

fn sources(texts: &[(String, String)]) -> Vec<Source> {
    let mut sources = Vec::new();
    let mut test_files = BTreeSet::new();
    for (path, text) in texts.iter().filter(|(path, _)| path.ends_with(".rs")) {
        let code = code_of(text);
        let (tests, modules) = test_parts(&code);
        test_files.extend(modules.iter().map(|module| format!("{}/{module}", children(path))));
        let is_test = path.split('/').any(|part| part == "tests" || part == "benches");
        sources.push(Source { path: path.clone(), text: text.clone(), code, is_test, tests });
    }
    for source in &mut sources {
        let module = source.path.trim_end_matches(".rs").trim_end_matches("/mod");
        let inside = |test: &String| {
            module.strip_prefix(test.as_str()).is_some_and(|r| r.is_empty() || r.starts_with('/'))
        };
        source.is_test |= test_files.iter().any(inside);
    }
    sources
}

/// The directory of the modules that a file declares.
fn children(path: &str) -> &str {
    let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
    let is_root = ["lib.rs", "main.rs", "mod.rs"].contains(&name);
    if is_root { directory } else { path.trim_end_matches(".rs") }
}

impl Source {
    /// The line, from 1, of an offset.
    pub(crate) fn line(&self, at: usize) -> usize {
        self.text[..at].matches('\n').count() + 1
    }

    /// Whether the code at an offset is compiled for tests only.
    pub(crate) fn is_test_at(&self, at: usize) -> bool {
        self.is_test || self.tests.iter().any(|range| range.contains(&at))
    }

    /// The crate's directory; `src` for the root package.
    pub(crate) fn package(&self) -> &str {
        self.path.split('/').next().unwrap_or_default()
    }

    /// Where a word stands in the code, by itself.
    pub(crate) fn words<'s>(&'s self, word: &'s str) -> impl Iterator<Item = usize> + 's {
        let code = &self.code;
        code.match_indices(word).map(|(at, _)| at).filter(move |at| {
            let before = code[..*at].chars().next_back();
            let after = code[at + word.len()..].chars().next();
            !before.is_some_and(is_word) && !after.is_some_and(is_word)
        })
    }
}

pub(crate) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// A text with blanks in place of the bytes of comments and literals. Line ends stay.
pub(crate) fn code_of(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = at + opaque(&text[at..], at > 0 && is_word(char::from(bytes[at - 1])));
        for byte in code[at..end].iter_mut().filter(|byte| **byte != b'\n') {
            *byte = b' ';
        }
        at = end.max(at + 1);
        while !text.is_char_boundary(at) {
            at += 1;
        }
    }
    String::from_utf8(code).expect("only whole literals and comments are blanked")
}

/// The bytes of the comment or literal that a text begins with, 0 when it begins with neither.
fn opaque(text: &str, in_word: bool) -> usize {
    let to = |end: Option<usize>| end.unwrap_or(text.len());
    if text.starts_with("//") {
        return to(text.find('\n'));
    }
    if text.starts_with("/*") {
        return block_comment(text);
    }
    if text.starts_with('\'') {
        return character(text);
    }
    if text.starts_with('"') {
        return string(text);
    }
    let raw = text.strip_prefix('b').unwrap_or(text).strip_prefix('r');
    if let Some(raw) = raw.filter(|_| !in_word) {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        if raw[hashes..].starts_with('"') {
            let close = format!("\"{}", "#".repeat(hashes));
            let start = text.len() - raw.len() + hashes + 1;
            return to(text[start..].find(&close).map(|end| start + end + close.len()));
        }
    }
    0
}

fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest.starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// A character; a lifetime is none.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => text[3..].find('\'').map_or(text.len(), |end| end + 4),
        Some(_) => chars.next().filter(|(_, c)| *c == '\'').map_or(0, |(at, _)| at + 1),
        None => 0,
    }
}

fn string(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// All functions with bodies, in order; nested ones too.
pub(crate) fn functions(code: &str) -> Vec<Function> {
    let mut functions = Vec::new();
    for (start, _) in code.match_indices("fn ") {
        let name: String = code[start + 3..].chars().take_while(|c| is_word(*c)).collect();
        let in_word = code[..start].chars().next_back().is_some_and(is_word);
        let Some(body) = item_body(&code[start..]).filter(|_| !in_word && !name.is_empty()) else {
            continue;
        };
        let body = start + body.start..start + body.end;
        let lines = code[start..body.end].matches('\n').count() + 1;
        functions.push(Function { name, start, lines, body });
    }
    functions
}

/// The braces of the item that a text begins with; none when it ends in a semicolon.
fn item_body(code: &str) -> Option<Range<usize>> {
    let (mut round, mut curly, mut open) = (0_i32, 0_i32, 0);
    for (at, c) in code.char_indices() {
        match c {
            '(' | '[' => round += 1,
            ')' | ']' => round -= 1,
            ';' if round == 0 && curly == 0 => return None,
            '{' => {
                open = if curly == 0 { at } else { open };
                curly += 1;
            }
            '}' => {
                curly -= 1;
                if curly == 0 {
                    return Some(open..at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

/// The parts of a file that are compiled for tests only, and the names of such modules in files
/// of their own.
pub(crate) fn test_parts(code: &str) -> (Vec<Range<usize>>, Vec<String>) {
    const ATTRIBUTE: &str = "#[cfg(test)]";
    let (mut ranges, mut modules) = (Vec::new(), Vec::new());
    for (start, _) in code.match_indices(ATTRIBUTE) {
        let item = &code[start + ATTRIBUTE.len()..];
        match item_body(item) {
            Some(body) => ranges.push(start..start + ATTRIBUTE.len() + body.end),
            None => {
                let item = item.split(';').next().unwrap_or_default();
                let name = item.rsplit_once("mod ").map(|(_, name)| name.trim().to_owned());
                modules.extend(name);
            }
        }
    }
    (ranges, modules)
}
