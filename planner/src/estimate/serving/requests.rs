//! Requests of a prompt and new tokens: how long a batch of them takes, and how many tokens per
//! second copies give that always have requests waiting.

use serde::Serialize;

use super::{Batch, Forward, Load, Parts, Replica, Serving, caches, greatest};

/// The tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Lengths {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// New tokens; 0 where only passes are asked about, at the prompt's length.
    pub output: u32,
    /// Tokens at the start of the prompt that all requests share, cached once.
    pub shared: u32,
}

impl Lengths {
    /// Tokens of a prompt that are worked on, at least one.
    pub fn own_prompt(&self) -> u32 {
        self.prompt.saturating_sub(self.shared).max(1)
    }

    /// Tokens that a request has when it is done.
    pub fn context(&self) -> u64 {
        u64::from(self.prompt) + u64::from(self.output)
    }

    /// Tokens that are cached at the middle of a request's new tokens. Passes take as much longer
    /// for each cached token, so that this is what the mean new token sees.
    pub fn middle(&self) -> u64 {
        u64::from(self.prompt) + u64::from(self.output) / 2
    }
}

/// How a batch of requests goes that start together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StaticBatch {
    /// Seconds until all prompts are done, and each request has its first token.
    pub prompt_s: f64,
    /// Seconds from one token of a request to the next, at the mean.
    pub token_s: f64,
    /// Seconds until the last token.
    pub total_s: f64,
}

/// How requests go where one takes the place of each that is done.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct InFlight {
    /// Requests of a copy that are worked on at once.
    pub sequences: u64,
    /// Tokens of prompts of a group that are worked on in each pass, beside its sequences' tokens.
    pub prompt_tokens: u32,
    /// Seconds from one token of a request to the next, at the mean.
    pub token_s: f64,
    /// New tokens per second of a copy.
    pub tokens_per_s: f64,
}

/// The passes of a prompt.
struct Pieces {
    /// Pieces of equal size.
    count: f64,
    /// The first of them.
    first: Batch,
    /// The last of them.
    last: Batch,
    /// What is left.
    rest: Option<Batch>,
}

impl Serving<'_> {
    /// Whether prompts may be worked on in pieces: each token looks at earlier ones alone.
    pub fn works_in_pieces(&self) -> bool {
        self.estimator.work.layers.iter().all(caches)
    }

    /// The passes of `prompts` prompts together, in pieces of at most `budget` tokens of all of
    /// them. Pieces follow each other through the stages.
    ///
    /// The time of a pass grows in proportion to what is cached, so that pieces take as long as
    /// the mean of the first and the last of equal size.
    pub fn prompt(&self, copy: Replica, prompts: u32, lengths: Lengths, budget: u32) -> Forward {
        let Pieces { count, first, last, rest } = self.pieces(prompts, lengths, budget);
        let [first, last] = [first, last].map(|batch| self.with_draft(copy, &batch));
        let latency_s = first.latency_s.midpoint(last.latency_s);
        let slowest_s = first.slowest_s.midpoint(last.slowest_s);
        let rest_s = rest.map_or(0.0, |batch| self.with_draft(copy, &batch).slowest_s);
        Forward {
            latency_s: latency_s + (count - 1.0) * slowest_s + rest_s,
            slowest_s: count * slowest_s + rest_s,
        }
    }

    /// The parts of the passes of one prompt, in pieces of at most `budget` tokens.
    pub fn prompt_parts(&self, copy: Replica, lengths: Lengths, budget: u32) -> Parts {
        let Pieces { count, first, last, rest } = self.pieces(1, lengths, budget);
        let parts = |batch: &Batch| {
            let draft_s = self.drafting.map_or(0.0, |drafting| drafting.prompt_s(copy, batch));
            Parts { draft_s, ..self.parts_of(copy, batch) }
        };
        let equal = (parts(&first) + parts(&last)).scaled(count / 2.0);
        rest.map_or(equal, |rest| equal + parts(&rest))
    }

    fn pieces(&self, prompts: u32, lengths: Lengths, budget: u32) -> Pieces {
        let own = lengths.own_prompt();
        let shared = u64::from(lengths.shared.min(lengths.prompt));
        let piece = match self.works_in_pieces() {
            true => (budget / prompts.max(1)).clamp(1, own),
            false => own,
        };
        let batch =
            |tokens: u32, before: u32| Batch::of(prompts, tokens, shared + u64::from(before));
        let (count, rest) = (own / piece, own % piece);
        Pieces {
            count: count.into(),
            first: batch(piece, 0),
            last: batch(piece, (count - 1) * piece),
            rest: (rest > 0).then(|| batch(rest, own - rest)),
        }
    }

    /// A pass over prompts, of the model that drafts too.
    fn with_draft(&self, copy: Replica, batch: &Batch) -> Forward {
        let pass = self.pass(copy, batch);
        let draft_s = self.drafting.map_or(0.0, |drafting| drafting.prompt_s(copy, batch));
        Forward { latency_s: pass.latency_s + draft_s, slowest_s: pass.slowest_s + draft_s }
    }

    /// What `sequences` requests on one copy take that start together, their prompts in pieces of
    /// at most `budget` tokens. Groups follow each other through the stages.
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

    /// What one copy gives that always has requests waiting, of which it takes at most `most` at
    /// once, and works on at most `budget` tokens in a pass. None for requests without new tokens.
    ///
    /// Where a pass gives each of b sequences T of its o new tokens, `b T / o` are done in it, and
    /// the prompts of as many are worked on beside the others' tokens. Where these would be more
    /// tokens than the budget, prompts hold requests back.
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

    /// The groups of a copy's sequences, and the pass of one: a token of each of its sequences, at
    /// the middle of its new ones, and the prompts of those that take the place of what is done.
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

    /// Tokens of a pass that checks what was drafted after a batch of one new token each.
    fn checked_tokens(&self, batch: &Batch) -> u64 {
        let each = self.drafting.map_or(1, |drafting| drafting.speculation.checked());
        u64::from(batch.sequences) * u64::from(each) + u64::from(batch.prompt_tokens)
    }

    /// The largest number of sequences, up to `most`, each of which has its next token within
    /// `limit_s` seconds while the prompts of others are worked on; 0 where one alone does not.
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
