//! Requests of a prompt and output tokens: latency of a static batch, and throughput of in-flight
//! batching with chunked prefill, where each pass works on output tokens of some sequences and on
//! prompts of others.

use serde::Serialize;

use super::{Batch, Forward, Load, Parts, Replica, Serving, caches, greatest};

/// The token budget of a pass where the user gives none. Source: the default of TensorRT-LLM's
/// `max_num_tokens`, and of vLLM's `max_num_batched_tokens` on large devices.
pub const PASS_TOKENS: u32 = 8192;

/// The tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Lengths {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Output tokens; 0 where only passes are asked about, at the prompt's length.
    pub output: u32,
    /// Tokens of the prefix that all prompts share, cached once.
    pub shared: u32,
}

impl Lengths {
    /// Tokens of a prompt after the shared prefix, at least one.
    pub fn own_prompt(&self) -> u32 {
        self.prompt.saturating_sub(self.shared).max(1)
    }

    /// Tokens of the whole request.
    pub fn context(&self) -> u64 {
        u64::from(self.prompt) + u64::from(self.output)
    }

    /// Cached tokens at the middle of the output. The time of a pass is linear in the cached
    /// tokens, so that the mean output token takes as long as this one.
    pub fn middle(&self) -> u64 {
        u64::from(self.prompt) + u64::from(self.output) / 2
    }
}

/// Latency of a static batch: requests that start together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StaticBatch {
    /// Time to the first token of every request, in seconds.
    pub prompt_s: f64,
    /// Mean time per output token, in seconds.
    pub token_s: f64,
    /// Seconds to the last token.
    pub total_s: f64,
}

/// In-flight batching: each finished request is replaced by a waiting one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct InFlight {
    /// Concurrent requests of a copy.
    pub sequences: u64,
    /// Prompt tokens of each pass.
    pub prompt_tokens: u32,
    /// Mean time per output token, in seconds.
    pub token_s: f64,
    /// Output tokens per second of a copy.
    pub tokens_per_s: f64,
}

/// The passes of a prefill.
struct Chunks {
    /// Chunks of equal size.
    count: f64,
    /// The first of them.
    first: Batch,
    /// The last of them.
    last: Batch,
    /// What is left.
    rest: Option<Batch>,
}

impl Serving<'_> {
    /// Whether prefill can be chunked: all attention is causal.
    pub fn can_chunk_prompts(&self) -> bool {
        self.estimator.work.layers.iter().all(caches)
    }

    /// Prefill of `prompts` prompts together, in chunks of at most `budget` tokens over all of
    /// them. Chunks are pipelined through the stages.
    ///
    /// The time of a pass is linear in the cached tokens, so that equal chunks take as long as the
    /// mean of the first and the last.
    pub fn prompt(&self, copy: Replica, prompts: u32, lengths: Lengths, budget: u32) -> Forward {
        let Chunks { count, first, last, rest } = self.chunks(prompts, lengths, budget);
        let [first, last] = [first, last].map(|batch| self.with_draft(copy, &batch));
        let latency_s = first.latency_s.midpoint(last.latency_s);
        let slowest_s = first.slowest_s.midpoint(last.slowest_s);
        let rest_s = rest.map_or(0.0, |batch| self.with_draft(copy, &batch).slowest_s);
        Forward {
            latency_s: latency_s + (count - 1.0) * slowest_s + rest_s,
            slowest_s: count * slowest_s + rest_s,
        }
    }

    /// The parts of the prefill of one prompt, in chunks of at most `budget` tokens.
    pub fn prompt_parts(&self, copy: Replica, lengths: Lengths, budget: u32) -> Parts {
        let Chunks { count, first, last, rest } = self.chunks(1, lengths, budget);
        let parts = |batch: &Batch| {
            let draft_s = self.drafting.map_or(0.0, |drafting| drafting.prompt_s(copy, batch));
            Parts { draft_s, ..self.parts_of(copy, batch) }
        };
        let equal = (parts(&first) + parts(&last)).scaled(count / 2.0);
        rest.map_or(equal, |rest| equal + parts(&rest))
    }

    fn chunks(&self, prompts: u32, lengths: Lengths, budget: u32) -> Chunks {
        let own = lengths.own_prompt();
        let shared = u64::from(lengths.shared.min(lengths.prompt));
        let piece = match self.can_chunk_prompts() {
            true => (budget / prompts.max(1)).clamp(1, own),
            false => own,
        };
        let batch =
            |tokens: u32, before: u32| Batch::of(prompts, tokens, shared + u64::from(before));
        let (count, rest) = (own / piece, own % piece);
        Chunks {
            count: count.into(),
            first: batch(piece, 0),
            last: batch(piece, (count - 1) * piece),
            rest: (rest > 0).then(|| batch(rest, own - rest)),
        }
    }

    /// A prefill pass of the model and of its draft model.
    fn with_draft(&self, copy: Replica, batch: &Batch) -> Forward {
        let pass = self.pass(copy, batch);
        let draft_s = self.drafting.map_or(0.0, |drafting| drafting.prompt_s(copy, batch));
        Forward { latency_s: pass.latency_s + draft_s, slowest_s: pass.slowest_s + draft_s }
    }

    /// Latency of a static batch of `sequences` requests on one copy, prefilled in chunks of at
    /// most `budget` tokens. Groups are pipelined through the stages.
    pub fn static_batch(
        &self,
        copy: Replica,
        sequences: u64,
        lengths: Lengths,
        budget: u32,
    ) -> StaticBatch {
        let Load { groups, batch, .. } = Load::of(sequences, copy.pp);
        let prompt = self.prompt(copy, batch, lengths, budget);
        let prompt_s = prompt.latency_s + f64::from(groups - 1) * prompt.slowest_s;
        let token_s = self.token(copy, batch, lengths.middle()).turn_s(groups);
        let later = f64::from(lengths.output.saturating_sub(1));
        StaticBatch { prompt_s, token_s, total_s: prompt_s + later * token_s }
    }

    /// Throughput of one copy that always has requests waiting, with at most `most` concurrent
    /// requests and `budget` tokens in a pass. None for requests without output tokens.
    ///
    /// A pass gives each of b sequences T of its o output tokens, so that `b T / o` requests finish
    /// in it and as many prompts are prefilled. Where that exceeds the budget, fewer requests run
    /// at once.
    pub fn in_flight(
        &self,
        copy: Replica,
        most: u64,
        lengths: Lengths,
        budget: u32,
    ) -> Option<InFlight> {
        if most == 0 || lengths.output == 0 {
            return None;
        }
        let groups = Load::of(most, copy.pp).groups;
        let is_within = |count: u64| {
            let (_, batch) = self.mixed(copy, count, lengths);
            count <= u64::from(groups) || self.checked_tokens(&batch) <= u64::from(budget)
        };
        let sequences = greatest(most, is_within);
        let (groups, batch) = self.mixed(copy, sequences, lengths);
        let token_s = self.token_pass(copy, &batch).turn_s(groups);
        Some(InFlight {
            sequences,
            prompt_tokens: batch.prompt_tokens,
            token_s,
            tokens_per_s: sequences as f64 / token_s,
        })
    }

    /// The groups of a copy's sequences, and the pass of one group: a token of each sequence, at
    /// the middle of its output, and the prompts of those that replace finished requests.
    pub fn mixed(&self, copy: Replica, sequences: u64, lengths: Lengths) -> (u32, Batch) {
        let Load { groups, batch, .. } = Load::of(sequences, copy.pp);
        let new = f64::from(lengths.own_prompt()) / f64::from(lengths.output.max(1));
        let prompts = f64::from(batch) * self.tokens_per_pass() * new;
        let beside = Batch {
            prompt_tokens: prompts.ceil() as u32,
            prompt: lengths.own_prompt(),
            ..Batch::of(batch, 1, lengths.middle())
        };
        (groups, beside)
    }

    /// Tokens of the pass that verifies the drafts of a batch of one new token each.
    fn checked_tokens(&self, batch: &Batch) -> u64 {
        let each = self.drafting.map_or(1, |drafting| drafting.speculation.checked());
        u64::from(batch.sequences) * u64::from(each) + u64::from(batch.prompt_tokens)
    }

    /// The largest number of concurrent requests, up to `most`, whose time per output token is at
    /// most `limit_s` with prompts beside; 0 where that of one request is not.
    pub fn most_in_flight_within(
        &self,
        copy: Replica,
        most: u64,
        lengths: Lengths,
        limit_s: f64,
    ) -> u64 {
        greatest(most, |count| {
            let (groups, batch) = self.mixed(copy, count, lengths);
            self.token_pass(copy, &batch).turn_s(groups) <= limit_s
        })
    }
}
