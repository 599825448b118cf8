//! Rectangular blocks of row-major tensors.

use std::ops::Range;

/// Elements of a block.
pub fn elements(block: &[Range<usize>]) -> usize {
    block.iter().map(ExactSizeIterator::len).product()
}

/// The block that is a whole tensor.
pub fn whole(dims: &[usize]) -> Vec<Range<usize>> {
    dims.iter().map(|&dim| 0..dim).collect()
}

/// The blocks that make up a range of a row-major tensor's elements, in order: of a range that
/// begins and ends inside of rows, what is left of the first, whole rows, and some of the last.
pub fn of_elements(range: Range<usize>, dims: &[usize]) -> Vec<Vec<Range<usize>>> {
    if range.is_empty() {
        return Vec::new();
    }
    let Some((&rows, inner)) = dims.split_first() else { return vec![Vec::new()] };
    let row = inner.iter().product::<usize>();
    if range == (0..rows * row) {
        return vec![whole(dims)];
    }
    let within = |at: usize, part: Range<usize>| {
        let blocks = of_elements(part, inner).into_iter();
        blocks.map(move |block| [vec![at..at + 1], block].concat())
    };
    let (first, last) = (range.start.div_ceil(row), range.end / row);
    if first > last {
        return within(last, range.start - last * row..range.end - last * row).collect();
    }
    let mut blocks: Vec<Vec<Range<usize>>> = Vec::new();
    if range.start < first * row {
        blocks.extend(within(first - 1, range.start - (first - 1) * row..row));
    }
    if first < last {
        blocks.push([vec![first..last], whole(inner)].concat());
    }
    if last * row < range.end {
        blocks.extend(within(last, 0..range.end - last * row));
    }
    blocks
}

/// What two blocks of one tensor have in common; some range is empty if that is nothing.
pub fn overlap(a: &[Range<usize>], b: &[Range<usize>]) -> Vec<Range<usize>> {
    let common = |(a, b): (&Range<usize>, &Range<usize>)| {
        let start = a.start.max(b.start);
        start..a.end.min(b.end).max(start)
    };
    a.iter().zip(b).map(common).collect()
}

/// Copies the elements that two blocks of one tensor have in common; returns their number.
///
/// `source` and `target` hold their blocks row-major, in elements of `size` bytes.
/// One `memcpy` for each run that is contiguous in both.
pub fn copy_overlap(
    source: &[u8],
    source_block: &[Range<usize>],
    target: &mut [u8],
    target_block: &[Range<usize>],
    size: usize,
) -> usize {
    assert_eq!(source.len(), elements(source_block) * size, "the source is its block");
    assert_eq!(target.len(), elements(target_block) * size, "the target is its block");
    let common = overlap(source_block, target_block);
    let count = elements(&common);
    if count == 0 {
        return 0;
    }
    // The innermost dims that are whole in both blocks, and the one outside them, are one run.
    let whole_in_both =
        |&dim: &usize| common[dim] == source_block[dim] && common[dim] == target_block[dim];
    let inner = (0..common.len()).rev().take_while(whole_in_both).count();
    let outer = (common.len() - inner).saturating_sub(1);
    let run = elements(&common[outer..]) * size;
    let mut at: Vec<usize> = common.iter().map(|range| range.start).collect();
    for _ in 0..elements(&common[..outer]) {
        let (from, to) = (offset(&at, source_block) * size, offset(&at, target_block) * size);
        target[to..to + run].copy_from_slice(&source[from..from + run]);
        for dim in (0..outer).rev() {
            at[dim] += 1;
            if at[dim] < common[dim].end {
                break;
            }
            at[dim] = common[dim].start;
        }
    }
    count
}

/// The row-major index within a block of a place in the tensor.
fn offset(at: &[usize], block: &[Range<usize>]) -> usize {
    at.iter().zip(block).fold(0, |index, (&x, range)| index * range.len() + (x - range.start))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks of a range have its elements, one after the other.
    #[test]
    fn every_range_of_elements_is_blocks() {
        for dims in [vec![], vec![5], vec![3, 4], vec![2, 3, 4], vec![1, 3, 1, 2]] {
            let count = elements(&whole(&dims));
            for start in 0..=count {
                for end in start..=count {
                    let blocks = of_elements(start..end, &dims);
                    assert!(blocks.len() <= 2 * dims.len().max(1), "{start}..{end} of {dims:?}");
                    let mut at = start;
                    for block in &blocks {
                        let first: Vec<usize> = block.iter().map(|range| range.start).collect();
                        assert_eq!(offset(&first, &whole(&dims)), at, "{start}..{end} of {dims:?}");
                        let last: Vec<usize> = block.iter().map(|range| range.end - 1).collect();
                        at += elements(block);
                        assert_eq!(offset(&last, &whole(&dims)) + 1, at, "one run of elements");
                    }
                    assert_eq!(at, end, "{start}..{end} of {dims:?}");
                }
            }
        }
    }

    #[test]
    fn every_block_of_every_block_is_copied() {
        let dims = [3, 4, 2];
        let ranges =
            |dim: usize| (0..=dim).flat_map(move |start| (start..=dim).map(move |end| start..end));
        let mut blocks = Vec::new();
        for a in ranges(dims[0]) {
            for b in ranges(dims[1]) {
                for c in ranges(dims[2]) {
                    blocks.push([a.clone(), b.clone(), c]);
                }
            }
        }
        let values = |[a, b, c]: &[Range<usize>; 3]| {
            let mut values = Vec::new();
            for i in a.clone() {
                for j in b.clone() {
                    values.extend(c.clone().map(|k| (i * 8 + j * 2 + k + 1) as u8));
                }
            }
            values
        };
        for source in &blocks {
            for target in blocks.iter().step_by(7) {
                let mut out = vec![0; elements(target)];
                let count = copy_overlap(&values(source), source, &mut out, target, 1);
                let common = overlap(source, target);
                assert_eq!(count, elements(&common));
                assert_eq!(count, out.iter().filter(|&&x| x != 0).count());
                assert!(out.iter().zip(values(target)).all(|(&x, y)| x == 0 || x == y));
            }
        }
    }
}
