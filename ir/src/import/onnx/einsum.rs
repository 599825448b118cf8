//! `Einsum` in all its forms: ellipses, letters that stand twice, any number of operands.

use std::collections::BTreeMap;

use super::site::{Made, Site, Translated};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Combiner, Einsum, Op};

/// Letters of dims that an ellipsis stands for: beyond those of equations.
const ELLIPSIS: [char; 12] = ['À', 'Á', 'Â', 'Ã', 'Ä', 'Å', 'Æ', 'Ç', 'È', 'É', 'Ê', 'Ë'];

/// A value and the letters of its dims.
struct Term {
    id: ValueId,
    letters: Vec<char>,
}

pub(super) fn einsum(s: &mut Site) -> Translated {
    let text: String = s.text("equation", "").chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = match text.split_once("->") {
        Some((left, right)) => (left.to_owned(), Some(right.to_owned())),
        None => (text.clone(), None),
    };
    let operands = s.all();
    let own = s.dtype(*operands.first().ok_or("no operands")?);
    let parts: Vec<&str> = left.split(',').collect();
    if parts.len() != operands.len() {
        return Err(format!("`{text}` of {} operands", operands.len()));
    }
    let mut terms = Vec::new();
    for (part, id) in parts.iter().zip(&operands) {
        let letters = letters(part, s.ndim(*id)).ok_or_else(|| format!("`{text}`"))?;
        // Integers have exact products and sums in f64.
        let wide = if s.is_float(*id) { s.dtype(*id) } else { DType::F64 };
        terms.push(Term { id: s.cast(*id, wide)?, letters });
    }
    let result = result(&left, right.as_deref(), &terms).ok_or_else(|| format!("`{text}`"))?;
    let sizes = sizes(s, &terms)?;
    let mut simple = Vec::new();
    for term in terms {
        simple.push(simplified(s, term, &sizes)?);
    }
    let mut rest = simple.into_iter();
    let mut sum = rest.next().ok_or("no operands")?;
    let mut rest: Vec<Term> = rest.collect();
    while !rest.is_empty() {
        let next = rest.remove(0);
        sum = joined(s, sum, next, &result, &rest)?;
    }
    let y = arranged(s, sum, &result, &sizes)?;
    Ok(vec![s.cast(y, own)?])
}

/// The letters of an operand of so many dims.
fn letters(part: &str, ndim: usize) -> Option<Vec<char>> {
    let is_letter = |c: char| c.is_ascii_alphabetic();
    let Some((before, after)) = part.split_once("...") else {
        let letters: Vec<char> = part.chars().collect();
        return (letters.len() == ndim && letters.iter().all(|c| is_letter(*c))).then_some(letters);
    };
    let named = before.chars().chain(after.chars());
    let count = ndim.checked_sub(named.clone().count()).filter(|count| *count <= ELLIPSIS.len())?;
    if !named.clone().all(is_letter) {
        return None;
    }
    // Aligned at the last dim.
    let hidden = ELLIPSIS[ELLIPSIS.len() - count..].iter().copied();
    Some(before.chars().chain(hidden).chain(after.chars()).collect())
}

/// The letters of the result: those that stand once, in their order, where it is not written.
fn result(left: &str, right: Option<&str>, terms: &[Term]) -> Option<Vec<char>> {
    let is_hidden = |c: &char| ELLIPSIS.contains(c);
    let mut hidden: Vec<char> =
        terms.iter().flat_map(|term| term.letters.iter().copied().filter(is_hidden)).collect();
    hidden.sort_unstable();
    hidden.dedup();
    let Some(right) = right else {
        let count = |c: char| left.chars().filter(|other| *other == c).count();
        let mut once: Vec<char> =
            left.chars().filter(|c| c.is_ascii_alphabetic() && count(*c) == 1).collect();
        once.sort_unstable();
        return Some([hidden, once].concat());
    };
    let found = match right.split_once("...") {
        Some((before, after)) => before.chars().chain(hidden).chain(after.chars()).collect(),
        None => right.chars().collect::<Vec<char>>(),
    };
    let known = |c: &char| terms.iter().any(|term| term.letters.contains(c)) || is_hidden(c);
    let mut once = found.clone();
    once.sort_unstable();
    once.dedup();
    (once.len() == found.len() && found.iter().all(known)).then_some(found)
}

/// The size of each letter's dims; one repeats.
fn sizes(s: &Site, terms: &[Term]) -> Result<BTreeMap<char, usize>, String> {
    let mut sizes = BTreeMap::new();
    for term in terms {
        for (letter, size) in term.letters.iter().zip(s.dims(term.id)) {
            let known = sizes.entry(*letter).or_insert(size);
            match (*known, size) {
                (a, b) if a == b => {}
                (1, b) => *known = b,
                (_, 1) => {}
                (a, b) => return Err(format!("`{letter}` of {a} and of {b}")),
            }
        }
    }
    Ok(sizes)
}

/// A term in which every letter stands once, and none of those that repeat.
fn simplified(s: &mut Site, term: Term, sizes: &BTreeMap<char, usize>) -> Result<Term, String> {
    let Term { mut id, mut letters } = term;
    while let Some((first, second)) = twice(&letters) {
        // The diagonal of two dims: every n + 1-th element of both as one.
        let mut perm: Vec<usize> =
            (0..letters.len()).filter(|at| *at != first && *at != second).collect();
        let outer: Vec<usize> = perm.iter().map(|at| s.dims(id)[*at]).collect();
        let size = s.dims(id)[first];
        if s.dims(id)[second] != size {
            return Err(format!("the diagonal of {} and {size}", s.dims(id)[second]));
        }
        let letter = letters[first];
        letters = perm.iter().map(|at| letters[*at]).collect();
        letters.push(letter);
        perm.extend([first, second]);
        let turned = s.transpose(id, &perm)?;
        let flat = s.reshape(turned, &[&outer[..], &[size * size]].concat())?;
        let places: Vec<usize> = (0..size).map(|at| at * (size + 1)).collect();
        id = s.picked(flat, outer.len(), &places)?;
    }
    let dims = s.dims(id);
    let keeps = |at: &usize| dims[*at] == sizes[&letters[*at]];
    let kept: Vec<usize> = (0..letters.len()).filter(keeps).collect();
    let id = s.reshape(id, &kept.iter().map(|at| dims[*at]).collect::<Vec<_>>())?;
    Ok(Term { id, letters: kept.into_iter().map(|at| letters[at]).collect() })
}

fn twice(letters: &[char]) -> Option<(usize, usize)> {
    let second = (0..letters.len()).find(|at| letters[..*at].contains(&letters[*at]))?;
    Some((letters.iter().position(|c| *c == letters[second])?, second))
}

/// A term without the letters that nothing else has.
fn summed(s: &mut Site, term: Term, needed: impl Fn(&char) -> bool) -> Result<Term, String> {
    let gone: Vec<usize> =
        (0..term.letters.len()).filter(|at| !needed(&term.letters[*at])).collect();
    let id = s.reduce(Combiner::Sum, gone, term.id)?;
    Ok(Term { id, letters: term.letters.into_iter().filter(needed).collect() })
}

fn joined(s: &mut Site, a: Term, b: Term, result: &[char], rest: &[Term]) -> Result<Term, String> {
    let later = |c: &char| result.contains(c) || rest.iter().any(|term| term.letters.contains(c));
    let (of_a, of_b) = (a.letters.clone(), b.letters.clone());
    let a = summed(s, a, |c| later(c) || of_b.contains(c))?;
    let b = summed(s, b, |c| later(c) || of_a.contains(c))?;
    let mut letters: Vec<char> = a.letters.iter().copied().filter(later).collect();
    letters.extend(b.letters.iter().filter(|c| later(c) && !a.letters.contains(c)));
    // Those of an ellipsis are named anew, since equations have letters of one byte.
    let mut names: BTreeMap<char, char> = BTreeMap::new();
    let mut free = ('a'..='z').chain('A'..='Z');
    for letter in a.letters.iter().chain(&b.letters) {
        if !names.contains_key(letter) {
            names.insert(*letter, free.next().ok_or("too many dims")?);
        }
    }
    let named = |letters: &[char]| letters.iter().map(|c| names[c]).collect::<Vec<char>>();
    let (a_named, b_named) = (named(&a.letters), named(&b.letters));
    let einsum = Einsum::new(a_named, b_named, named(&letters));
    let id = s.push(Op::Contract(einsum), &[a.id, b.id])?;
    Ok(Term { id, letters })
}

/// A term with the dims of the result, in their order.
fn arranged(s: &mut Site, term: Term, result: &[char], sizes: &BTreeMap<char, usize>) -> Made {
    let term = summed(s, term, |c| result.contains(c))?;
    let there: Vec<char> = result.iter().copied().filter(|c| term.letters.contains(c)).collect();
    let place = |c: &char| term.letters.iter().position(|other| other == c).unwrap_or(0);
    let perm: Vec<usize> = there.iter().map(place).collect();
    let turned = s.transpose(term.id, &perm)?;
    // What is not there repeats, once.
    let dims: Vec<usize> = result.iter().map(|c| sizes[c]).collect();
    s.reshape(turned, &dims)
}
