//! Import cycles: files of one package that name each other's items, directly or around corners.
//!
//! Read from the text as rustc resolves it, as far as a path of names goes: `use`, `pub use`, globs
//! and paths in code, outside tests. Methods are not followed. A module and those below it are one
//! thing in several files, so that what a file takes from a module that it is part of is no import.

use std::collections::{BTreeMap, BTreeSet};

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;

use super::Finding;
use super::source::{Source, Tree, is_word};

/// The most cycles in the tree, and the most files in one.
const CYCLES_MAX: usize = 2;
const FILES_MAX: usize = 4;

/// How often names are looked up in each other: through re-exports of re-exports.
const HOPS_MAX: usize = 12;

const ITEMS: &[&str] =
    &["const", "enum", "fn", "macro_rules", "mod", "static", "struct", "trait", "type", "union"];

/// The names of a path.
type Names<'t> = Vec<&'t str>;

/// A file as the module that it is.
#[derive(Default)]
struct File<'t> {
    path: &'t str,
    /// What it defines.
    items: BTreeSet<&'t str>,
    /// What it calls by a name of its own.
    uses: BTreeMap<&'t str, Names<'t>>,
    globs: Vec<Names<'t>>,
    /// The paths in its code, and single names where there are globs.
    paths: BTreeSet<Names<'t>>,
}

/// All modules by their paths, the package first.
struct Files<'t>(BTreeMap<Names<'t>, File<'t>>);

/// More cycles than there may be, and longer ones.
pub(crate) fn cycles(tree: &Tree) -> Vec<Finding> {
    let files = Files::of(tree);
    let mut names: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    for (module, file) in &files.0 {
        for path in &file.paths {
            let Some((of, found, name)) = files.find(module, path, HOPS_MAX) else { continue };
            if !module.starts_with(of) {
                names.entry((file.path, found.path)).or_default().insert(name);
            }
        }
    }
    let graph = DiGraphMap::<&str, ()>::from_edges(names.keys().copied());
    let mut cycles = tarjan_scc(&graph);
    cycles.retain(|files| files.len() > 1);
    cycles.iter_mut().for_each(|files| files.sort_unstable());
    cycles.sort();
    let describe = |files: &[&str]| {
        let inside = names.iter().filter(|((a, b), _)| files.contains(a) && files.contains(b));
        let lines = inside.map(|((a, b), names)| {
            format!("\n  {a} -> {b}: {}", names.iter().copied().collect::<Vec<_>>().join(", "))
        });
        lines.collect::<String>()
    };
    let long = cycles.iter().filter(|files| files.len() > FILES_MAX).map(|files| Finding {
        rule: "long-import-cycle",
        place: files[0].to_owned(),
        amount: files.len(),
        detail: format!("{} files, at most {FILES_MAX}{}", files.len(), describe(files)),
    });
    let all: String = cycles.iter().map(|files| describe(files)).collect();
    let many = (cycles.len() > CYCLES_MAX).then(|| Finding {
        rule: "import-cycles",
        place: "all".to_owned(),
        amount: cycles.len(),
        detail: format!("{} cycles, at most {CYCLES_MAX}{all}", cycles.len()),
    });
    long.chain(many).collect()
}

impl<'t> Files<'t> {
    fn of(tree: &'t Tree) -> Files<'t> {
        let sources = tree.sources.iter().filter(|source| !source.is_test);
        Files(sources.filter_map(|s| Some((module(&s.path)?, File::of(s)))).collect())
    }

    /// The file that defines what a path means in a module, with the module that the file is and
    /// the name of the item there. A path of a module alone means no item.
    fn find<'f>(
        &'f self,
        module: &[&'t str],
        path: &[&'t str],
        hops: usize,
    ) -> Option<(&'f Names<'t>, &'f File<'t>, &'t str)> {
        let (first, rest) = path.split_first()?;
        let hops = hops.checked_sub(1)?;
        match *first {
            "crate" => return self.find(&module[..1], rest, hops),
            "self" => return self.find(module, rest, hops),
            "super" => return self.find(&module[..module.len().checked_sub(1)?], rest, hops),
            _ => {}
        }
        let child = [module, &[*first]].concat();
        let below = self.0.contains_key(&child).then(|| self.find(&child, rest, hops));
        if let Some(found) = below.flatten() {
            return Some(found);
        }
        let (own, file) = self.0.get_key_value(module)?;
        if file.items.contains(first) {
            return Some((own, file, first));
        }
        let renamed = file.uses.get(first).filter(|target| target[..] != *path);
        let renamed = renamed.map(|target| [target, rest].concat());
        let globs = file.globs.iter().filter(|glob| glob.last() != Some(first));
        let through = globs.map(|glob| [glob, path].concat());
        let mut elsewhere = renamed.into_iter().chain(through);
        let found = elsewhere.find_map(|path| self.find(module, &path, hops));
        found.or_else(|| self.find(&[*first], rest, hops))
    }
}

impl<'t> File<'t> {
    fn of(source: &'t Source) -> File<'t> {
        let mut file = File { path: &source.path, ..File::default() };
        let tokens = tokens(source);
        let mut depth = 0_usize;
        let mut at = 0;
        while at < tokens.len() {
            let next = tokens.get(at + 1).copied().unwrap_or_default();
            match tokens[at] {
                "{" => depth += 1,
                "}" => depth = depth.saturating_sub(1),
                // Not that of `impl Iterator + use<'a>`.
                "use" if next != "<" => {
                    let end = tokens[at..].iter().position(|token| *token == ";");
                    let end = end.map_or(tokens.len(), |end| at + end);
                    file.add_uses(&mut Vec::new(), &mut tokens[at + 1..end].iter().copied());
                    at = end;
                }
                word if ITEMS.contains(&word) && depth == 0 => {
                    let after = tokens.get(at + 2).copied().unwrap_or_default();
                    // What `mod name;` declares is a file of its own.
                    if (word, after) != ("mod", ";") {
                        file.items.insert(if next == "!" { after } else { next });
                    }
                }
                word if word.starts_with(is_word) => {
                    let mut path = vec![word];
                    while tokens.get(at + 1) == Some(&"::")
                        && let Some(next) = tokens.get(at + 2).filter(|t| t.starts_with(is_word))
                    {
                        path.push(next);
                        at += 2;
                    }
                    file.paths.insert(path);
                }
                _ => {}
            }
            at += 1;
        }
        let has_globs = !file.globs.is_empty();
        file.paths.retain(|path| path.len() > 1 || has_globs);
        file.paths.extend(file.uses.values().cloned());
        file
    }

    /// Reads a tree of `use` to its end, or to the brace or comma that ends it.
    fn add_uses(&mut self, before: &mut Names<'t>, tokens: &mut impl Iterator<Item = &'t str>) {
        let (depth, mut alias) = (before.len(), None);
        let mut is_open = true;
        loop {
            let token = tokens.next();
            match token {
                Some("::") => {}
                Some("{") => {
                    self.add_uses(before, tokens);
                    is_open = false;
                }
                Some("as") => alias = tokens.next(),
                Some("," | "}") | None => {
                    if is_open && before.len() > depth {
                        self.add_use(before, alias);
                    }
                    before.truncate(depth);
                    (alias, is_open) = (None, true);
                    if token != Some(",") {
                        return;
                    }
                }
                Some(name) => before.push(name),
            }
        }
    }

    fn add_use(&mut self, path: &[&'t str], alias: Option<&'t str>) {
        let path = if let [whole @ .., "self"] = path { whole } else { path };
        match path {
            [glob @ .., "*"] => self.globs.push(glob.to_vec()),
            [.., last] => _ = self.uses.insert(alias.unwrap_or(last), path.to_vec()),
            [] => {}
        }
    }
}

/// Words, `::` and single signs of the code outside tests.
fn tokens(source: &Source) -> Vec<&str> {
    let code = &source.code;
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(first) = code[at..].chars().next() {
        let word = code[at..].find(|c| !is_word(c)).unwrap_or(code.len() - at);
        let length = match first {
            _ if word > 0 => word,
            ':' if code[at..].starts_with("::") => 2,
            _ => first.len_utf8(),
        };
        if !first.is_whitespace() && !source.is_test_at(at) {
            tokens.push(&code[at..at + length]);
        }
        at += length;
    }
    tokens
}

/// The module that a file of a library is, the package first.
fn module(path: &str) -> Option<Names<'_>> {
    let (package, inner) = match path.strip_prefix("src/") {
        Some(inner) => ("gantline", inner),
        None => path.split_once("/src/")?,
    };
    let inner = inner.strip_suffix(".rs")?;
    let inner = inner.strip_suffix("/mod").unwrap_or(inner);
    let names = inner.split('/').filter(|name| *name != "lib");
    Some(std::iter::once(package).chain(names).collect())
}
