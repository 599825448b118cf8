//! Reading sequences into caches, piece by piece.
//!
//! A program for decoding has an entry for each prefill bucket, with one sequence, and where it has
//! several slots an entry for a decode step of all of them. A prompt is split into the chunks that
//! take the least time, the last one padded: no earlier token attends to padding, and later ones
//! overwrite its keys and values. Prefill writes KV caches of its own, which are then copied into
//! the slot.

use ir::DType;
use ir::plan::buckets::pieces_of;
use ir::program::Contents;

use crate::convert::{Stored, convert};
use crate::error::Failure;
use crate::execute::{Batch, Cached, Phase, Samples, Session};
use crate::generate::{NextLogits, NextLogitsOfMany};

/// A session that decodes one sequence, or a batch of them.
pub struct Decoder {
    session: Session,
    /// Prefill buckets in tokens, ascending, and their entries.
    lengths: Vec<(usize, usize)>,
    /// The entry of a decode step of all slots.
    decode_step: usize,
    capacity: usize,
    /// Tokens in the KV caches of prefill.
    position: usize,
    /// Tokens in the KV caches of each slot.
    positions: Vec<usize>,
    fed: Fed,
    /// Of the tokens after those read.
    logits: Vec<f32>,
}

/// Buffers for the feeds of a call.
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
        let (decode_step, sequences) = most.map_or((0, 0), |(entry, s)| (*entry, s.size));
        Decoder {
            session,
            lengths,
            decode_step,
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

    /// Slots.
    pub fn sequences(&self) -> usize {
        self.positions.len()
    }

    /// Prefills a chunk, padded to the bucket.
    fn call(&mut self, entry: usize, length: usize, tokens: &[u32]) -> Result<(), Failure> {
        self.fed.tokens.clear();
        self.fed.tokens.extend(tokens.iter().map(|&token| token as i32));
        // The mask multiplies the values of padding by zero, so that they have to be finite: a
        // token of the prompt is.
        let padding = self.fed.tokens.last().copied().unwrap_or(0);
        self.fed.tokens.resize(length, padding);
        self.fed.positions.clear();
        self.fed.positions.push(self.position as i32);
        self.infer(entry, tokens.len())?;
        self.position += tokens.len();
        Ok(())
    }

    /// As [`Session::end_with`].
    pub fn end_with(&self, code: u8) {
        self.session.end_with(code);
    }

    /// Calls an entry with the feeds, of which `count` tokens per sample are no padding.
    fn infer(&mut self, entry: usize, count: usize) -> Result<(), Failure> {
        let Fed { tokens, positions } = &self.fed;
        let last = count as i32 - 1;
        let batch = Batch { tokens, positions, last, ..Batch::default() };
        self.session.infer(entry, &batch)?;
        Ok(())
    }

    /// The logits that an entry has given of the first samples.
    fn logits(&mut self, entry: usize, samples: usize) -> Result<&[f32], Failure> {
        let output = self.session.output(entry, 0)?;
        let vocab = output.dims[output.dims.len() - 1];
        let row = samples * vocab * output.dtype.size() as usize;
        let bytes = convert(Stored::DType(output.dtype), &output.bytes[..row], DType::F32);
        self.logits.clear();
        self.logits.extend(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)));
        Ok(&self.logits)
    }

    /// The KV caches of a slot.
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
            // An idle slot decodes at position 0, and nothing reads the result.
            let at = if token.is_some() { *position } else { 0 };
            assert!(at < self.capacity, "the caches hold what is read");
            self.fed.tokens.push(token.map_or(0, |token| token as i32));
            self.fed.positions.push(at as i32);
            *position = if token.is_some() { at + 1 } else { 0 };
        }
        self.infer(self.decode_step, 1)?;
        self.logits(self.decode_step, tokens.len())
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
        self.logits(last, 1)
    }

    fn capacity(&self) -> usize {
        self.capacity
    }
}
