//! Prefill buckets: the lengths in tokens for which prefill is compiled. A prompt is split into
//! chunks of these lengths.

/// Cost of a chunk besides its tokens, in tokens: it reads all weights once. Chosen: about where
/// matrix products stop being memory-bound.
const CALL_TOKENS: usize = 16;

/// The shortest bucket besides one token. Chosen: below it, padding costs next to nothing.
const SHORTEST: usize = 8;

/// The usual buckets for KV caches of `capacity` tokens: 1, 8, 16, 32, …
pub fn usual_buckets(capacity: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(SHORTEST), |length| length.checked_mul(2));
    std::iter::once(1).chain(powers.take_while(|length| *length <= capacity)).collect()
}

/// Splits a prompt of `tokens` tokens into chunks of the least total cost; the last one may be
/// padded. `buckets` ascend from 1; `room` is the number of free cache positions, which padding
/// takes too.
pub fn pieces_of(buckets: &[usize], tokens: usize, room: usize) -> Vec<usize> {
    // Tokens that are left, and the longest bucket that they fill, until none are.
    let mut filled = Vec::new();
    let mut left = tokens;
    while left > 0 {
        let longest = buckets[buckets.partition_point(|length| *length <= left) - 1];
        filled.push((left, longest));
        left -= longest;
    }
    // Backwards: the next chunk is the longest bucket that is filled, or the shortest that holds
    // all tokens that are left.
    let (spare, mut cost, mut pieces) = (room - tokens, 0, Vec::new());
    for (left, longest) in filled.into_iter().rev() {
        let piecewise = (CALL_TOKENS + longest + cost, longest);
        let whole = buckets.get(buckets.partition_point(|length| *length < left));
        let whole = whole.filter(|length| **length <= left + spare);
        let best = whole.map_or(piecewise, |all| piecewise.min((CALL_TOKENS + all, *all)));
        if best.1 >= left {
            pieces.clear();
        }
        cost = best.0;
        pieces.push(best.1);
    }
    pieces.reverse();
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pieces, which fit where they are read.
    fn pieces(buckets: &[usize], tokens: usize, room: usize) -> Vec<usize> {
        let pieces = pieces_of(buckets, tokens, room);
        assert!(pieces.iter().all(|piece| buckets.contains(piece)), "{pieces:?}");
        assert!(pieces.iter().sum::<usize>() <= room, "{pieces:?} stay inside of the caches");
        let before: usize = pieces.iter().rev().skip(1).sum();
        assert!(before < tokens && pieces.iter().sum::<usize>() >= tokens, "{pieces:?}");
        pieces
    }

    #[test]
    fn a_prompt_is_read_with_few_calls_and_little_padding() {
        let buckets = usual_buckets(100);
        assert_eq!(buckets, [1, 8, 16, 32, 64]);
        assert_eq!(pieces(&buckets, 1, 100), [1]);
        assert_eq!(pieces(&buckets, 5, 100), [8]);
        assert_eq!(pieces(&buckets, 17, 100), [32]);
        assert_eq!(pieces(&buckets, 33, 100), [32, 1]);
        assert_eq!(pieces(&buckets, 60, 100), [64]);
        assert_eq!(pieces(&buckets, 100, 100), [64, 32, 1, 1, 1, 1]);
        assert_eq!(pieces(&buckets, 3, 5), [1, 1, 1]);
        for tokens in 1..=100 {
            for room in tokens..tokens + 10 {
                pieces(&buckets, tokens, room);
            }
        }
        assert_eq!(usual_buckets(5), [1]);
        assert_eq!(pieces(&[1], 100_000, 100_000).len(), 100_000);
    }
}
