//! Dependencies do what they are for: what a manifest declares, its package's sources name.

use std::collections::BTreeSet;

use toml::Table;

use super::Finding;
use super::source::{Source, Tree, is_word};

const MANIFEST: &str = "Cargo.toml";

/// The dependencies of each package that none of its sources names, and those of the workspace that
/// no package takes. What only tests and benchmarks name belongs to `[dev-dependencies]`.
pub(crate) fn unused(tree: &Tree) -> Vec<Finding> {
    let manifests = tree.texts.iter().filter(|(path, _)| path.ends_with(MANIFEST));
    let manifests: Vec<(&str, Table)> = manifests
        .map(|(path, text)| (path.as_str(), text.parse().unwrap_or_else(|e| panic!("{path}: {e}"))))
        .collect();
    let mut findings = Vec::new();
    let mut taken = BTreeSet::new();
    for (path, manifest) in manifests.iter().filter(|(_, table)| table.contains_key("package")) {
        let directory = path.trim_end_matches(MANIFEST);
        let product = names(manifest, "dependencies");
        let test = names(manifest, "dev-dependencies");
        let is_unused = |name: &&str| !is_named(tree, directory, name, false);
        let mut unused: Vec<&str> = product.iter().copied().filter(is_unused).collect();
        // A dependency of the product is one of its tests already.
        unused.extend(
            test.iter()
                .copied()
                .filter(|name| product.contains(name) || !is_named(tree, directory, name, true)),
        );
        findings.extend(finding(path, &unused));
        taken.extend(product.into_iter().chain(test));
    }
    let workspace = manifests
        .iter()
        .find_map(|(path, manifest)| Some((path, manifest.get("workspace")?.as_table()?)));
    let (path, workspace) = workspace.expect("a workspace has a manifest of its own");
    let declared = names(workspace, "dependencies");
    let unused: Vec<&str> = declared.into_iter().filter(|name| !taken.contains(name)).collect();
    findings.extend(finding(&format!("{path}:workspace"), &unused));
    findings
}

fn names<'t>(table: &'t Table, key: &str) -> Vec<&'t str> {
    let table = table.get(key).and_then(|value| value.as_table());
    table.map(|table| table.keys().map(String::as_str).collect()).unwrap_or_default()
}

fn finding(place: &str, unused: &[&str]) -> Option<Finding> {
    let (place, amount, detail) = (place.to_owned(), unused.len(), unused.join(", "));
    (amount > 0).then_some(Finding { rule: "unused-dependency", place, amount, detail })
}

/// Whether a source of the package in a directory begins a path with a crate's name.
fn is_named(tree: &Tree, directory: &str, name: &str, in_tests: bool) -> bool {
    let name = name.replace('-', "_");
    let is_own = |source: &&Source| match directory {
        "" => ["src/", "tests/", "benches/"].iter().any(|root| source.path.starts_with(root)),
        directory => source.path.starts_with(directory),
    };
    tree.sources.iter().filter(is_own).any(|source| {
        source.words(&name).any(|at| {
            let (before, after) = (source.code[..at].trim_end(), &source.code[at + name.len()..]);
            let within = before.strip_suffix("::").is_some_and(|path| path.ends_with(is_word));
            let is_path = after.trim_start().starts_with("::") || before.ends_with("use");
            !within && is_path && (in_tests || !source.is_test_at(at))
        })
    })
}
