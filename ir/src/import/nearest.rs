//! The candidate that a mistyped word was meant to be.

/// The candidate with the fewest single-letter edits from the word, of which the first; none when
/// more than a third of the word's letters would have to change.
pub fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    nearest_within(word.chars().count().div_ceil(3), word, candidates)
}

/// The candidate nearest to a word, if so many edits are enough for it.
pub fn nearest_within<'c>(
    edits_max: usize,
    word: &str,
    candidates: impl IntoIterator<Item = &'c str>,
) -> Option<&'c str> {
    candidates
        .into_iter()
        .map(|candidate| (distance(word, candidate), candidate))
        .filter(|(edits, _)| *edits <= edits_max)
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, candidate)| candidate)
}

/// The number of insertions, deletions and replacements, upper and lower case being equal
/// (Wagner and Fischer 1974).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.to_lowercase().chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.to_lowercase().chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_words_are_found_and_distant_ones_are_not() {
        let candidates = ["gpt2", "gpt2-medium", "llama-3-8b"];
        assert_eq!(nearest("gpt2-meduim", candidates), Some("gpt2-medium"));
        assert_eq!(nearest("llama3-8b", candidates), Some("llama-3-8b"));
        assert_eq!(nearest("resnet", candidates), None);
    }
}
