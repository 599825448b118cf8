//! Reading sequences into caches, piece by piece.
//!
//! A program for decoding has entries for several numbers of tokens of one sequence and, where it
//! holds several side by side, one for a token of each. A prompt is read with those that take the
//! least time, the last of them padded: what padding writes into the caches is seen by no token
//! before it, and is written over by those that follow. It is read alone, and then copied to where
//! its sequence goes on.

use ir::DType;
use ir::plan::buckets::pieces_of;
use ir::program::Contents;

use crate::convert::{Stored, convert};
use crate::error::Failure;
use crate::execute::{Batch, Cached, Phase, Samples, Session};
use crate::generate::{NextLogits, NextLogitsOfMany};

/// A session that reads one sequence, or several side by side.
pub struct Decoder {
    session: Session,
    /// Numbers of tokens of one sequence for which there are entries, ascending, and these entries.
    lengths: Vec<(usize, usize)>,
    /// The entry for a token of each sequence.
    side_by_side: usize,
    capacity: usize,
    /// Tokens that were read by the entries of one sequence.
    position: usize,
    /// Tokens of the sequences that are side by side.
    positions: Vec<usize>,
    fed: Fed,
    /// Of the tokens after those read.
    logits: Vec<f32>,
}

/// Room for what a call is fed.
#[derive(Debug, Default)]
struct Fed {
    tokens: Vec<i32>,
    positions: Vec<i32>,
}

impl Decoder {
    /// Makes a decoder of a session whose weights are there, or will be before it reads.
    ///
    /// # Panics
    /// When the program has no caches, or no entry for one token, or ranks share samples.
    pub fn new(session: Session) -> Decoder {
        let classes = session.classes();
        assert_eq!(classes.mesh.dp, 1, "replicas have sessions of their own");
        let caches = classes.programs.iter().flat_map(|program| &program.buffers);
        let cache = caches.into_iter().find(|b| matches!(b.contents, Contents::Cache(_)));
        let capacity = cache.expect("a program for decoding has caches").sizes[1];
        let entries = 0..classes.programs[0].entries.len();
        let all: Vec<(usize, Samples)> = entries
            .filter_map(|entry| Some((entry, classes.samples(Phase::Entry(entry))?)))
            .collect();
        let alone = all.iter().map(|(_, samples)| samples.size).min();
        let of_one = all.iter().filter(|(_, samples)| Some(samples.size) == alone);
        let mut lengths: Vec<(usize, usize)> =
            of_one.map(|(entry, samples)| (samples.seq, *entry)).collect();
        lengths.sort_unstable();
        assert_eq!(lengths.first().map(|l| l.0), Some(1), "tokens can be read one by one");
        let most = all.iter().max_by_key(|(_, samples)| (samples.size, usize::MAX - samples.seq));
        let (side_by_side, sequences) = most.map_or((0, 0), |(entry, s)| (*entry, s.size));
        Decoder {
            session,
            lengths,
            side_by_side,
            capacity,
            position: 0,
            positions: vec![0; sequences],
            fed: Fed::default(),
            logits: Vec::new(),
        }
    }

    /// Forgets what was read.
    pub fn reset(&mut self) {
        self.position = 0;
    }

    /// Tokens read so far, of one sequence.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Sequences that are read side by side.
    pub fn sequences(&self) -> usize {
        self.positions.len()
    }

    /// Reads tokens of one sequence with one entry; more places than tokens are padded.
    fn call(&mut self, entry: usize, length: usize, tokens: &[u32]) -> Result<(), Failure> {
        self.fed.tokens.clear();
        self.fed.tokens.extend(tokens.iter().map(|&token| token as i32));
        // A token that is there: what hides padding from others multiplies its numbers by zero.
        let padding = self.fed.tokens.last().copied().unwrap_or(0);
        self.fed.tokens.resize(length, padding);
        self.fed.positions.clear();
        self.fed.positions.push(self.position as i32);
        self.infer(entry, tokens.len())?;
        self.position += tokens.len();
        Ok(())
    }

    /// Calls an entry with what is to be fed, with that many tokens of each sample that are no
    /// padding.
    fn infer(&mut self, entry: usize, count: usize) -> Result<(), Failure> {
        let Fed { tokens, positions } = &self.fed;
        let last = count as i32 - 1;
        let batch = Batch { tokens, positions, last, ..Batch::default() };
        self.session.infer(entry, &batch)?;
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

    /// A sequence of those that are side by side.
    fn cached(&self, sequence: usize) -> Cached {
        Cached { samples: self.sequences(), sample: sequence }
    }
}

impl NextLogitsOfMany for Decoder {
    fn sequences(&self) -> usize {
        Decoder::sequences(self)
    }

    fn begin(&mut self, sequence: usize, prompt: &[u32]) -> Result<&[f32], Failure> {
        self.reset();
        NextLogits::read(self, prompt)?;
        if self.sequences() > 1 {
            let alone = Cached { samples: 1, sample: 0 };
            self.session.copy_cached([alone, self.cached(sequence)], prompt.len());
        }
        self.positions[sequence] = prompt.len();
        Ok(&self.logits)
    }

    fn copy(&mut self, from: usize, to: usize) {
        self.session.copy_cached([self.cached(from), self.cached(to)], self.positions[from]);
        self.positions[to] = self.positions[from];
    }

    fn go_on(&mut self, tokens: &[Option<u32>]) -> Result<&[f32], Failure> {
        assert_eq!(tokens.len(), self.sequences(), "a token of each sequence, or none");
        self.fed.tokens.clear();
        self.fed.positions.clear();
        for (token, position) in tokens.iter().zip(&mut self.positions) {
            // A sequence without a token is forgotten: it reads what nobody sees.
            let at = if token.is_some() { *position } else { 0 };
            assert!(at < self.capacity, "the caches hold what is read");
            self.fed.tokens.push(token.map_or(0, |token| token as i32));
            self.fed.positions.push(at as i32);
            *position = if token.is_some() { at + 1 } else { 0 };
        }
        self.infer(self.side_by_side, 1)?;
        Ok(self.logits(self.side_by_side, tokens.len()))
    }

    fn capacity(&self) -> usize {
        self.capacity
    }
}

impl NextLogits for Decoder {
    fn read(&mut self, tokens: &[u32]) -> Result<&[f32], Failure> {
        assert!(!tokens.is_empty(), "at least one token is read");
        assert!(self.position + tokens.len() <= self.capacity, "the caches hold what is read");
        let lengths: Vec<usize> = self.lengths.iter().map(|(length, _)| *length).collect();
        let (mut left, mut last) = (tokens, 0);
        for length in pieces_of(&lengths, tokens.len(), self.capacity - self.position) {
            let (now, rest) = left.split_at(length.min(left.len()));
            let of = lengths.partition_point(|shorter| *shorter < length);
            (left, last) = (rest, self.lengths[of].1);
            self.call(last, length, now)?;
        }
        Ok(self.logits(last, 1))
    }

    fn capacity(&self) -> usize {
        self.capacity
    }
}
