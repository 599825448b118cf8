//! What is over a limit today. It may only shrink.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::Finding;

const HEADER: &str = "\
# What is over a limit of tests/tidy: rule, place, size. It only shrinks.
# UPDATE_GOLDEN=1 cargo test --test tidy    lowers the numbers; exceptions are added by hand.
";

/// Sizes by rule and place.
pub(crate) struct Ratchet(BTreeMap<(String, String), usize>);

impl Ratchet {
    pub(crate) fn read(path: &Path) -> Ratchet {
        let text = fs::read_to_string(path).unwrap();
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let entry = |line: &str| {
            let [rule, place, size] = line.split_whitespace().collect::<Vec<_>>()[..] else {
                panic!("tests/tidy.ratchet: `{line}` is not a rule, a place and a size");
            };
            ((rule.to_owned(), place.to_owned()), size.parse().unwrap())
        };
        Ratchet(lines.map(entry).collect())
    }

    pub(crate) fn write(&self, path: &Path) {
        let line =
            |((rule, place), size): (&(String, String), &usize)| format!("{rule} {place} {size}\n");
        let lines: String = self.0.iter().map(line).collect();
        fs::write(path, format!("{HEADER}{lines}")).unwrap();
    }

    /// With each size lowered to what is found; what is not found any more is gone.
    pub(crate) fn tightened(&self, findings: &[Finding]) -> Ratchet {
        let found = sizes(findings);
        let lower = |(key, size): (&(String, String), &usize)| {
            found.get(key).map(|now| (key.clone(), *size.min(now)))
        };
        Ratchet(self.0.iter().filter_map(lower).collect())
    }

    /// One line for everything that grew, is new, or is less than it says here.
    pub(crate) fn compare(&self, findings: &[Finding]) -> Vec<String> {
        let mut complaints = Vec::new();
        let found = sizes(findings);
        for Finding { rule, place, detail, .. } in findings {
            let key = (String::from(*rule), place.clone());
            if found[&key] > self.0.get(&key).copied().unwrap_or(0) {
                complaints.push(format!("{rule} {place}: {detail}"));
            }
        }
        for ((rule, place), size) in &self.0 {
            let now = found.get(&(rule.clone(), place.clone())).copied().unwrap_or(0);
            if now < *size {
                let tighten = "tighten the ratchet: UPDATE_GOLDEN=1 cargo test --test tidy";
                complaints.push(format!("{rule} {place}: was {size}, is {now}; {tighten}"));
            }
        }
        complaints
    }
}

/// The largest finding of each rule and place: two functions of a file may share a name.
fn sizes(findings: &[Finding]) -> BTreeMap<(String, String), usize> {
    let mut sizes = BTreeMap::new();
    for Finding { rule, place, amount, .. } in findings {
        let size = sizes.entry((String::from(*rule), place.clone())).or_insert(0);
        *size = (*amount).max(*size);
    }
    sizes
}
