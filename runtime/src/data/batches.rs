//! The batches of a run: a pure function of seed and step.
//!
//! Training tokens are cut into windows of `seq` tokens that don't overlap. An epoch visits each
//! window once, in the order of a keyed permutation: a Feistel network over the next power of
//! four, walked until it falls into the range (Black and Rogaway 2002, "Ciphers with Arbitrary
//! Finite Domains"). There is no stored shuffle, so that position in the data is one number, and
//! every data-parallel layout reads the same global batch.

use std::ops::Range;
use std::sync::Arc;

use ir::ids::IGNORED;
use ir::random::mix;
use ir::{Diagnostic, Span};

use super::Corpus;

/// Rounds of the network. Four make a pseudorandom permutation of random functions; two more for
/// a mixer that is not one.
const ROUNDS: u64 = 6;

/// Tokens of some samples, what follows each, and where its document starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The number of samples.
    pub samples: usize,
    /// The tokens of one sample.
    pub seq: usize,
    /// Tokens, `[samples, seq]`.
    pub inputs: Vec<i32>,
    /// The token after each, `[samples, seq]`; [`IGNORED`] after the last of a document that is
    /// kept apart.
    pub labels: Vec<i32>,
    /// For each token the place of its document's first token in the sample, `[samples, seq]`;
    /// empty where documents are not kept apart.
    pub documents: Vec<i32>,
}

/// The batches of a run.
#[derive(Clone, Debug)]
pub struct Batches {
    tokens: Arc<[u32]>,
    /// The first tokens of documents that are kept apart, ascending.
    documents: Option<Arc<[usize]>>,
    /// Tokens that are trained on; those after it are for validation.
    training: usize,
    seed: u64,
    seq: usize,
    global_batch: usize,
}

impl Batches {
    pub(super) fn new(
        corpus: &Corpus,
        seed: u64,
        seq: usize,
        global_batch: usize,
    ) -> Result<Batches, Diagnostic> {
        assert!(seq > 0 && global_batch > 0, "a batch has samples, and a sample tokens");
        let (tokens, documents) = (Arc::clone(&corpus.tokens), corpus.apart.clone());
        let training = corpus.training_tokens();
        let batches = Batches { tokens, documents, training, seed, seq, global_batch };
        let windows = windows(training, seq);
        if windows >= global_batch {
            return Ok(batches);
        }
        let needed = seq.saturating_mul(global_batch).saturating_add(1);
        let headline = format!(
            "the data has {training} tokens to train on, and one step of {global_batch} samples \
             of {seq} tokens needs {needed}"
        );
        let mut diagnostic = Diagnostic::error("E4032", Span::of("--data"), headline).note(
            "nine tenths of the tokens are trained on, the last tenth is kept for validation",
        );
        let seq_max = training.saturating_sub(1) / global_batch;
        let mut ways = Vec::new();
        if seq_max > 0 {
            ways.push(format!("--seq {seq_max}"));
        }
        if windows > 0 {
            ways.push(format!("--gbs {windows}"));
        }
        ways.push("more data".to_owned());
        diagnostic = diagnostic.help(format!("use {}", ways.join(", or ")));
        Err(diagnostic)
    }

    /// Windows in the training tokens: samples of one epoch.
    pub fn windows(&self) -> usize {
        windows(self.training, self.seq)
    }

    /// Samples `samples` of the global batch of a step, counted from 0.
    pub fn training(&self, step: u64, samples: Range<usize>) -> Batch {
        let mut batch = Batch::default();
        self.fill(step, samples, &mut batch);
        batch
    }

    /// The global batch of a step, in memory that is used again.
    pub(super) fn fill_global(&self, step: u64, batch: &mut Batch) {
        self.fill(step, 0..self.global_batch, batch);
    }

    fn fill(&self, step: u64, samples: Range<usize>, batch: &mut Batch) {
        assert!(samples.end <= self.global_batch, "samples are of the global batch");
        let first = u128::from(step) * self.global_batch as u128;
        self.read(samples.map(|sample| self.start(first + sample as u128)), batch);
    }

    /// Where the window of a sample of the run starts.
    ///
    /// The windows of an epoch start at a random place among the tokens that are too few for one
    /// more window, so that epochs don't always cut the text at the same places.
    pub(super) fn start(&self, sample: u128) -> usize {
        let windows = self.windows();
        let epoch = (sample / windows as u128) as u64;
        let key = mix(mix(self.seed) ^ epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let slack = (self.training - 1) % self.seq;
        let offset = (mix(!key) % (slack as u64 + 1)) as usize;
        let window = permute((sample % windows as u128) as u64, windows as u64, key);
        offset + window as usize * self.seq
    }

    /// Batches of validation; zero if the data is too short for one.
    pub fn validation_batches(&self) -> usize {
        windows(self.tokens.len() - self.training, self.seq) / self.global_batch
    }

    /// Samples `samples` of a batch of validation: windows that follow each other, always the same.
    pub fn validation(&self, batch: usize, samples: Range<usize>) -> Batch {
        assert!(batch < self.validation_batches(), "there is such a batch");
        assert!(samples.end <= self.global_batch, "samples are of the global batch");
        let first = batch * self.global_batch;
        let starts = samples.map(|sample| self.training + (first + sample) * self.seq);
        let mut batch = Batch::default();
        self.read(starts, &mut batch);
        batch
    }

    /// Reads the windows that begin at `starts`.
    fn read(&self, starts: impl ExactSizeIterator<Item = usize>, batch: &mut Batch) {
        let Batch { samples, seq, inputs, labels, documents } = batch;
        (*samples, *seq) = (starts.len(), self.seq);
        inputs.clear();
        labels.clear();
        documents.clear();
        for start in starts {
            let window = &self.tokens[start..start + self.seq + 1];
            inputs.extend(window[..self.seq].iter().map(|&token| token as i32));
            labels.extend(window[1..].iter().map(|&token| token as i32));
            if let Some(firsts) = &self.documents {
                let labels = &mut labels[inputs.len() - self.seq..];
                keep_apart(firsts, start, labels, documents);
            }
        }
    }
}

/// Appends where the document of each token of a window starts in it, and hides the labels that are
/// of another document than their token. `firsts` are the first tokens of all documents, `start` is
/// that of the window.
fn keep_apart(firsts: &[usize], start: usize, labels: &mut [i32], documents: &mut Vec<i32>) {
    let mut next = firsts.partition_point(|first| *first <= start);
    let mut document = 0;
    for (place, label) in labels.iter_mut().enumerate() {
        documents.push(document);
        if firsts.get(next) == Some(&(start + place + 1)) {
            (next, document) = (next + 1, place as i32 + 1);
            *label = IGNORED;
        }
    }
}

/// Windows of `seq` tokens, each with a token after it, in this many tokens.
fn windows(tokens: usize, seq: usize) -> usize {
    tokens.saturating_sub(1) / seq
}

/// A permutation of `0..n` that the key chooses. Expected number of walks: below four.
fn permute(x: u64, n: u64, key: u64) -> u64 {
    let bits = u64::BITS - (n - 1).leading_zeros();
    let half = bits.div_ceil(2).max(1);
    let mask = (1_u64 << half) - 1;
    let mut x = x;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..ROUNDS {
            let f = mix(key ^ mix((round << 32 | 1).wrapping_add(right << 8))) >> 7;
            (left, right) = (right, left ^ (f & mask));
        }
        x = left << half | right;
        if x < n {
            return x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_visit_everything_once() {
        for n in (1..70).chain([127, 128, 129, 1000, 4096, 65_537]) {
            for key in [0, 1, u64::MAX] {
                let mut seen = vec![false; n];
                for x in 0..n {
                    seen[permute(x as u64, n as u64, key) as usize] = true;
                }
                assert!(seen.iter().all(|&s| s), "n={n} key={key}");
            }
        }
    }

    #[test]
    fn permutations_look_random() {
        // The mean distance of neighbours in a random permutation of 0..n is n / 3.
        let n = 10_000;
        let order: Vec<u64> = (0..n).map(|x| permute(x, n, 7)).collect();
        let mean = order.windows(2).map(|w| w[0].abs_diff(w[1]) as f64).sum::<f64>() / n as f64;
        assert!((mean - n as f64 / 3.0).abs() < 100.0, "{mean}");
        let fixed = order.iter().zip(0..).filter(|&(&y, x)| x == y).count();
        assert!(fixed < 10, "{fixed}");
        let same = (0..n).filter(|&x| permute(x, n, 8) == order[x as usize]).count();
        assert!(same < 10, "{same}");
    }
}
