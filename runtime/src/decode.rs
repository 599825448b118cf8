//! Reading sequences into caches, piece by piece.
//!
//! A program for decoding has entries for several numbers of tokens. A prompt is read with those
//! that take the least time, the last of them padded: what padding writes into the caches is seen
//! by no token before it, and is written over by those that follow.

use ir::DType;
use ir::program::Contents;

use crate::beams::NextLogitsOfBeams;
use crate::convert::{Stored, convert};
use crate::error::Failure;
use crate::execute::{Batch, Phase, Samples, Session};
use crate::generate::NextLogits;

/// What a call costs besides its tokens, in tokens: it reads all weights once. Chosen: about where
/// products stop being bound by memory.
const CALL_TOKENS: usize = 16;

/// A session that reads one sequence, or several of one length.
pub struct Decoder {
    session: Session,
    /// Numbers of tokens for which there are entries, ascending, and these entries.
    lengths: Vec<(usize, usize)>,
    capacity: usize,
    /// Tokens read so far.
    position: usize,
    /// Room for the tokens of a call.
    tokens: Vec<i32>,
    /// Of the token after those read.
    logits: Vec<f32>,
}

impl Decoder {
    /// Makes a decoder of a session whose weights are there, or will be before it reads.
    ///
    /// # Panics
    /// When the program has no caches, or no entry for one token.
    pub fn new(session: Session) -> Decoder {
        let classes = session.classes();
        let caches = classes.programs.iter().flat_map(|program| &program.buffers);
        let cache = caches.into_iter().find(|b| matches!(b.contents, Contents::Cache(_)));
        let capacity = cache.expect("a program for decoding has caches").sizes[1];
        let entries = classes.programs[0].entries.len();
        let samples = |entry| classes.samples(Phase::Entry(entry));
        let mut lengths: Vec<(usize, usize)> =
            (0..entries).filter_map(|entry| Some((samples(entry)?.seq, entry))).collect();
        lengths.sort_unstable();
        assert_eq!(lengths.first().map(|l| l.0), Some(1), "tokens can be read one by one");
        let (tokens, logits) = (Vec::new(), Vec::new());
        Decoder { session, lengths, capacity, position: 0, tokens, logits }
    }

    /// Forgets what was read.
    pub fn reset(&mut self) {
        self.position = 0;
    }

    /// Tokens read so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Reads tokens with one entry; more places than tokens are padded. Where there are several
    /// samples, all of them are this sequence.
    fn call(&mut self, entry: usize, length: usize, tokens: &[u32]) -> Result<(), Failure> {
        let samples = self.session.classes().samples(Phase::Entry(entry));
        let samples = samples.map_or(1, |samples| samples.global());
        self.tokens.clear();
        for _ in 0..samples {
            self.tokens.extend(tokens.iter().map(|&token| token as i32));
            self.tokens.extend(std::iter::repeat_n(0, length - tokens.len()));
        }
        self.infer(entry, tokens.len())
    }

    /// Calls an entry, with that many tokens of each sample that are no padding.
    fn infer(&mut self, entry: usize, count: usize) -> Result<(), Failure> {
        let batch = Batch {
            tokens: &self.tokens,
            position: self.position as i32,
            last: count as i32 - 1,
            ..Batch::default()
        };
        self.session.infer(entry, &batch)?;
        self.position += count;
        Ok(())
    }

    /// The logits that an entry has given of the first samples.
    fn logits(&mut self, entry: usize, samples: usize) -> &[f32] {
        let output = self.session.output(entry, 0);
        let vocab = output.dims[output.dims.len() - 1];
        let row = samples * vocab * output.dtype.size() as usize;
        let bytes = convert(Stored::DType(output.dtype), &output.bytes[..row], DType::F32);
        self.logits.clear();
        self.logits.extend(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)));
        &self.logits
    }
}

/// Each sample is a sequence.
impl NextLogitsOfBeams for Decoder {
    fn read_prompt(&mut self, tokens: &[u32]) -> Result<&[f32], Failure> {
        self.reset();
        self.read(tokens)
    }

    fn go_on(&mut self, copies: &[(usize, usize)], tokens: &[u32]) -> Result<&[f32], Failure> {
        assert!(self.position < self.capacity, "the caches hold what is read");
        self.session.copy_cached(copies, self.position);
        let one = self.lengths[0].1;
        let samples = self.session.classes().samples(Phase::Entry(one));
        self.tokens.clear();
        // Ranks along `dp` do the same.
        let all = tokens.iter().cycle().take(samples.map_or(tokens.len(), Samples::global));
        self.tokens.extend(all.map(|&token| token as i32));
        self.infer(one, 1)?;
        Ok(self.logits(one, tokens.len()))
    }

    fn capacity(&self) -> usize {
        self.capacity
    }
}

impl NextLogits for Decoder {
    fn read(&mut self, tokens: &[u32]) -> Result<&[f32], Failure> {
        assert!(!tokens.is_empty(), "at least one token is read");
        assert!(self.position + tokens.len() <= self.capacity, "the caches hold what is read");
        let (mut left, mut last) = (tokens, 0);
        while !left.is_empty() {
            let room = self.capacity - self.position;
            let (length, entry) = self.lengths[next(&self.lengths, left.len(), room).1];
            let (now, rest) = left.split_at(length.min(left.len()));
            self.call(entry, length, now)?;
            (left, last) = (rest, entry);
        }
        Ok(self.logits(last, 1))
    }

    fn capacity(&self) -> usize {
        self.capacity
    }
}

/// The cost of reading `left` tokens, at most `room`, and the place of the length to begin with:
/// the smallest that holds all of them, or the largest that is filled.
fn next(lengths: &[(usize, usize)], left: usize, room: usize) -> (usize, usize) {
    if left == 0 {
        return (0, 0);
    }
    let below = lengths.partition_point(|(length, _)| *length <= left) - 1;
    let filled = lengths[below].0;
    let rest = next(lengths, left - filled, room - filled).0;
    let piecewise = (CALL_TOKENS + filled + rest, below);
    let at_once = lengths.partition_point(|(length, _)| *length < left);
    match lengths.get(at_once) {
        Some((length, _)) if *length <= room => piecewise.min((CALL_TOKENS + length, at_once)),
        _ => piecewise,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lengths of the calls that read `count` tokens.
    fn calls(lengths: &[usize], count: usize, capacity: usize) -> Vec<usize> {
        let lengths: Vec<(usize, usize)> = lengths.iter().map(|length| (*length, 0)).collect();
        let (mut read, mut calls) = (0, Vec::new());
        while read < count {
            let length = lengths[next(&lengths, count - read, capacity - read).1].0;
            assert!(read + length <= capacity, "a call stays inside of the caches");
            calls.push(length);
            read += length;
        }
        calls
    }

    #[test]
    fn a_prompt_is_read_with_few_calls_and_little_padding() {
        let lengths = [1, 8, 16, 32, 64];
        assert_eq!(calls(&lengths, 1, 100), [1]);
        assert_eq!(calls(&lengths, 5, 100), [8]);
        assert_eq!(calls(&lengths, 17, 100), [32]);
        assert_eq!(calls(&lengths, 33, 100), [32, 1]);
        assert_eq!(calls(&lengths, 60, 100), [64]);
        assert_eq!(calls(&lengths, 100, 100), [64, 32, 1, 1, 1, 1]);
        assert_eq!(calls(&lengths, 3, 5), [1, 1, 1]);
        for count in 1..=100 {
            for capacity in count..count + 10 {
                calls(&lengths, count, capacity);
            }
        }
    }
}
