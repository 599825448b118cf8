//! The limits.

use super::Finding;
use super::source::{Function, Source, Tree, functions};

const FILE_LINES_MAX: usize = 1000;
const FUNCTION_LINES_MAX: usize = 70;
/// For a function that is one table: a match with at least [`TABLE_ARMS_MIN`] arms.
const TABLE_LINES_MAX: usize = 150;
const TABLE_ARMS_MIN: usize = 20;
const COLUMNS_MAX: usize = 100;
/// One `expect` in 1000 lines that are no tests.
const EXPECTS_MAX: usize = 1;

const VAGUE: &[&str] = &["base", "common", "helper", "helpers", "misc", "other", "util", "utils"];

/// Modules that touch memory or foreign functions, as files or directories.
const UNSAFE: &[&str] = &[
    "kernels/src/cpu",
    "kernels/tests/engines/gpu",
    "kernels/tests/engines/shim",
    "runtime/src/cuda",
    "runtime/src/local",
    "runtime/src/map",
    "runtime/src/mpi",
    "runtime/src/nccl",
];

/// Lints that no code may turn off.
const STRICT: &[&str] = &["missing_docs", "undocumented_unsafe_blocks", "unsafe_op_in_unsafe_fn"];

/// Marks of unfinished work, each cut in two so that this file has none.
const OPEN_ENDS: &[[&str; 2]] = &[
    ["TO", "DO"],
    ["FIX", "ME"],
    ["XX", "X"],
    ["todo", "!"],
    ["unimplemented", "!"],
    ["dbg", "!"],
];

/// What belongs to a machine and not to the project, cut in two likewise.
const FOREIGN: &[[&str; 2]] = &[
    ["/wo", "rk/"],
    ["/tm", "p/"],
    ["/ho", "me/"],
    ["/ro", "ot/"],
    ["index.crates", ".io"],
    ["static.crates", ".io"],
    ["pypi", ".org"],
    ["pythonhosted", ".org"],
    ["npmjs", ".org"],
];

pub(crate) fn long_files(tree: &Tree) -> Vec<Finding> {
    let long = |source: &Source| {
        let amount = source.text.lines().count();
        let detail = format!("{amount} lines, at most {FILE_LINES_MAX}");
        let place = source.path.clone();
        (amount > FILE_LINES_MAX).then_some(Finding { rule: "long-file", place, amount, detail })
    };
    tree.sources.iter().filter_map(long).collect()
}

pub(crate) fn long_functions(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in &tree.sources {
        for Function { name, start, lines, body } in functions(&source.code) {
            let is_table = source.code[body].matches(" => ").count() >= TABLE_ARMS_MIN;
            let limit = if is_table { TABLE_LINES_MAX } else { FUNCTION_LINES_MAX };
            if lines > limit {
                let detail = format!("line {}: {lines} lines, at most {limit}", source.line(start));
                let place = format!("{}:{name}", source.path);
                findings.push(Finding { rule: "long-function", place, amount: lines, detail });
            }
        }
    }
    findings
}

pub(crate) fn wide_lines(tree: &Tree) -> Vec<Finding> {
    let is_checked = |path: &str| [".rs", ".cu", ".py"].iter().any(|e| path.ends_with(e));
    count_lines(tree, "wide-lines", |path, line| {
        is_checked(path) && line.chars().count() > COLUMNS_MAX
    })
}

pub(crate) fn vague_names(tree: &Tree) -> Vec<Finding> {
    let vague = |path: &str| {
        let mut parts = path.split('/').map(|part| part.split('.').next().unwrap_or_default());
        parts.any(|part| VAGUE.contains(&part))
    };
    let finding = |path: &str| Finding {
        rule: "vague-name",
        place: path.to_owned(),
        amount: 1,
        detail: "a name that says what is in the file".to_owned(),
    };
    tree.texts.iter().filter(|(path, _)| vague(path)).map(|(path, _)| finding(path)).collect()
}

pub(crate) fn unsafe_outside(tree: &Tree) -> Vec<Finding> {
    let is_home = |path: &str| {
        let mut rest = UNSAFE.iter().filter_map(|home| path.strip_prefix(home));
        rest.any(|rest| rest == ".rs" || rest.starts_with('/'))
    };
    let sources = tree.sources.iter().filter(|source| !is_home(&source.path));
    sources.filter_map(|source| counted("unsafe", source, source.words("unsafe"))).collect()
}

pub(crate) fn silenced_lints(tree: &Tree) -> Vec<Finding> {
    let found = |source: &Source| {
        let all = STRICT.iter().flat_map(|lint| source.words(lint));
        counted("silenced-lint", source, all.filter(|at| !source.is_test_at(*at)))
    };
    tree.sources.iter().filter_map(found).collect()
}

pub(crate) fn expects_per_1000_lines(tree: &Tree) -> Vec<Finding> {
    let mut packages: Vec<&str> = tree.sources.iter().map(Source::package).collect();
    packages.dedup();
    let mut findings = Vec::new();
    for package in packages {
        let own = tree.sources.iter().filter(|s| s.package() == package && !s.is_test);
        let (mut count, mut lines) = (0, 0);
        for source in own {
            count += source.expects().count();
            lines += source.text.lines().count();
        }
        let amount = (count * 1000).div_ceil(lines.max(1));
        if amount > EXPECTS_MAX {
            let detail = format!("{count} `expect`s in {lines} lines");
            let place = package.to_owned();
            findings.push(Finding { rule: "expects-per-1000-lines", place, amount, detail });
        }
    }
    findings
}

pub(crate) fn expects_without_text(tree: &Tree) -> Vec<Finding> {
    let found = |source: &Source| {
        let silent = source.expects().filter(|at| {
            let argument = source.text[*at..].trim_start();
            let text = argument.strip_prefix('"').and_then(|rest| rest.split('"').next());
            text.is_some_and(|text| !text.trim().contains(' '))
        });
        counted("expect-without-text", source, silent)
    };
    tree.sources.iter().filter_map(found).collect()
}

pub(crate) fn open_ends(tree: &Tree) -> Vec<Finding> {
    count_lines(tree, "open-end", |_, line| contains_any(line, OPEN_ENDS))
}

pub(crate) fn foreign_words(tree: &Tree) -> Vec<Finding> {
    count_lines(tree, "foreign-word", |_, line| contains_any(line, FOREIGN))
}

/// A golden file that no test reads, by its name or by its directory's.
pub(crate) fn unused_golden(tree: &Tree) -> Vec<Finding> {
    let is_read = |path: &str| {
        let Some((package, golden)) = path.split_once("golden/") else { return true };
        let name = golden.rsplit('/').next().unwrap_or_default();
        let directory = format!("golden/{}", golden.trim_end_matches(name).trim_end_matches('/'));
        let package = package.split('/').next().unwrap_or_default();
        let mut readers = tree.sources.iter().filter(|source| source.path.starts_with(package));
        readers.any(|s| s.text.contains(name) || s.text.contains(directory.trim_end_matches('/')))
    };
    let unused = tree.texts.iter().filter(|(path, _)| !is_read(path));
    let finding = |path: &String| Finding {
        rule: "unused-golden",
        place: path.clone(),
        amount: 1,
        detail: "no test reads it".to_owned(),
    };
    unused.map(|(path, _)| finding(path)).collect()
}

impl Source {
    /// Where the arguments of `expect` begin that is called outside tests. A parser's own
    /// `expect` takes no text and does not count.
    fn expects(&self) -> impl Iterator<Item = usize> + '_ {
        const CALL: &str = ".expect(";
        let calls = self.code.match_indices(CALL).map(|(at, _)| at + CALL.len());
        calls.filter(|at| {
            let argument = self.text[*at..].trim_start();
            !self.is_test_at(*at) && (argument.starts_with('"') || argument.starts_with("&format!"))
        })
    }
}

fn contains_any(line: &str, words: &[[&str; 2]]) -> bool {
    words.iter().any(|halves| line.contains(&halves.concat()))
}

fn counted(
    rule: &'static str,
    source: &Source,
    found: impl Iterator<Item = usize>,
) -> Option<Finding> {
    let lines: Vec<String> = found.map(|at| source.line(at).to_string()).collect();
    let (amount, detail) = (lines.len(), format!("lines {}", lines.join(", ")));
    (amount > 0).then_some(Finding { rule, place: source.path.clone(), amount, detail })
}

fn count_lines(
    tree: &Tree,
    rule: &'static str,
    is_over: impl Fn(&str, &str) -> bool,
) -> Vec<Finding> {
    let found = |(path, text): &(String, String)| {
        let lines = text.lines().enumerate().filter(|(_, line)| is_over(path, line));
        let lines: Vec<String> = lines.map(|(at, _)| (at + 1).to_string()).collect();
        let (amount, detail) = (lines.len(), format!("lines {}", lines.join(", ")));
        (amount > 0).then_some(Finding { rule, place: path.clone(), amount, detail })
    };
    tree.texts.iter().filter_map(found).collect()
}
