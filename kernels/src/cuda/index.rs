//! Element offsets as C++ expressions of linear indices.

use crate::rows::{Access, Digit};

/// The offset that the digits of a linear index below `size` add up to, `0` where there are none.
pub(super) fn digits(digits: &[Digit], index: &str, size: usize) -> String {
    let digit = |d: &Digit| {
        let reached = size.div_ceil(d.div.max(1));
        if d.stride == 0 || reached <= 1 || d.modulus <= 1 {
            return None;
        }
        let mut text = index.to_owned();
        if d.div > 1 {
            text += &format!(" / {}", d.div);
        }
        if d.modulus < reached {
            text += &format!(" % {}", d.modulus);
        }
        Some(times(&text, d.stride))
    };
    sum(digits.iter().filter_map(digit))
}

/// The element offset of an access at `row`, one of `rows`, and the column named `col`, as an
/// expression.
pub(super) fn access(access: &Access, rows: usize, col: &str) -> String {
    let row = digits(&access.row, "row", rows);
    let row = Some(row).filter(|text| text != "0");
    let col = (access.col_stride > 0).then(|| times(col, access.col_stride));
    let offset = (access.offset > 0).then(|| access.offset.to_string());
    sum(row.into_iter().chain(col).chain(offset))
}

/// The offset of a linear index over nested loops, outermost first, given as sizes and strides.
pub(super) fn nest(loops: &[[usize; 2]], index: &str) -> String {
    let mut inside = 1;
    let mut terms = Vec::new();
    for (at, [size, stride]) in loops.iter().enumerate().rev() {
        let is_outermost = loops[..at].iter().all(|[size, _]| *size <= 1);
        if *size > 1 && *stride > 0 {
            terms.push(times(&coordinate(index, inside, *size, is_outermost), *stride));
        }
        inside *= (*size).max(1);
    }
    terms.reverse();
    sum(terms.into_iter())
}

/// The coordinate of a linear index in loop `at` of nested loops of these sizes.
pub(super) fn coordinate_of(sizes: &[usize], at: usize, index: &str) -> String {
    let inside = sizes[at + 1..].iter().product();
    let is_outermost = sizes[..at].iter().all(|size| *size <= 1);
    coordinate(index, inside, sizes[at], is_outermost)
}

fn coordinate(index: &str, inside: usize, size: usize, is_outermost: bool) -> String {
    let mut text = index.to_owned();
    if inside > 1 {
        text += &format!(" / {inside}");
    }
    if !is_outermost {
        text += &format!(" % {size}");
    }
    text
}

fn times(text: &str, factor: usize) -> String {
    if factor == 1 { text.to_owned() } else { format!("{text} * {factor}") }
}

fn sum(terms: impl Iterator<Item = String>) -> String {
    let terms: Vec<String> = terms.collect();
    if terms.is_empty() { "0".to_owned() } else { terms.join(" + ") }
}
