//! Speculative decoding (Leviathan et al. 2023): cheap drafts of tokens that one pass verifies.

use serde::Serialize;

use super::{Batch, Forward, Held, Parts, Replica, Serving};
use crate::divisors::divisors;
use crate::estimate::Estimator;

/// The length of drafts, and how many of their tokens are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speculation {
    /// Tokens that are drafted for each pass.
    pub drafted: u32,
    /// The probability that a drafted token is accepted where those before it were, from 0 to 1.
    pub acceptance: f64,
}

impl Speculation {
    /// Tokens of a sequence that one pass gives: with acceptance a and k drafted tokens
    /// `(1 − a^(k+1)) / (1 − a)`, as the model adds one of its own after those that it accepts
    /// (Leviathan et al. 2023, equation 1).
    pub fn tokens_per_pass(&self) -> f64 {
        // The sum of the powers up to k: it has no pole at 1.
        (0..=self.drafted).map(|power| self.acceptance.powi(power as i32)).sum()
    }

    /// Tokens of a sequence in the pass that verifies a draft.
    pub fn checked(&self) -> u32 {
        self.drafted.saturating_add(1)
    }
}

/// Speculative decoding on the devices of a copy.
#[derive(Clone, Copy, Debug)]
pub struct Drafting<'a> {
    /// The drafts.
    pub speculation: Speculation,
    /// The draft model, with a pass for each token; none where drafts take no time, as n-grams of
    /// the prompt.
    pub model: Option<Drafter<'a>>,
}

/// A draft model.
#[derive(Clone, Copy, Debug)]
pub struct Drafter<'a> {
    /// Devices, links and its workload.
    pub estimator: &'a Estimator<'a>,
    /// As of [`Serving::latent`].
    pub latent: Option<u32>,
}

impl<'a> Drafting<'a> {
    /// The draft model beside `copy`: whole on each stage, over the largest divisor of the copy's
    /// tensor-parallel ranks that its heads allow.
    fn laid(&self, copy: Replica) -> Option<(Serving<'a>, Replica)> {
        let Drafter { estimator, latent } = self.model?;
        let model = Serving::new(estimator, latent);
        let ways = divisors(copy.tp).into_iter().rev().map(|tp| model.alone(tp, 1));
        Some((model, ways.into_iter().find(|way| model.allows(*way))?))
    }

    /// What the draft model adds to a device.
    pub(super) fn held(&self, copy: Replica) -> Option<Held> {
        let (model, way) = self.laid(copy)?;
        Some(model.held(way))
    }

    /// Seconds of a prefill pass of the draft model.
    pub(super) fn prompt_s(&self, copy: Replica, batch: &Batch) -> f64 {
        self.laid(copy).map_or(0.0, |(model, way)| model.pass(way, batch).latency_s)
    }

    /// Seconds of the drafts before one pass, where the draft model's first pass works on `batch`.
    pub(super) fn drafts_s(&self, copy: Replica, batch: &Batch) -> f64 {
        let Some((model, way)) = self.laid(copy) else { return 0.0 };
        let later = Batch { prompt_tokens: 0, prompt: 0, ..*batch };
        let passes = f64::from(self.speculation.drafted.saturating_sub(1));
        model.pass(way, batch).latency_s + passes * model.pass(way, &later).latency_s
    }
}

impl Serving<'_> {
    /// Time of one output token of each sequence of a batch with one new token each. With
    /// speculation: drafts and the pass that verifies them, over the mean number of tokens that
    /// they give.
    pub fn token_pass(&self, copy: Replica, batch: &Batch) -> Forward {
        let pass = self.pass(copy, &self.checked(batch));
        let Some(drafting) = self.drafting else { return pass };
        let drafts_s = drafting.drafts_s(copy, batch);
        let tokens = drafting.speculation.tokens_per_pass();
        Forward {
            latency_s: (pass.latency_s + drafts_s) / tokens,
            slowest_s: (pass.slowest_s + drafts_s) / tokens,
        }
    }

    /// The batch of the pass that verifies the drafts of a batch of one new token each.
    fn checked(&self, batch: &Batch) -> Batch {
        let tokens = self.drafting.map_or(1, |drafting| drafting.speculation.checked());
        Batch { tokens, all_logits: true, ..*batch }
    }

    /// The parts of [`Serving::token_pass`]'s time from the first layer to the last.
    pub fn token_parts(&self, copy: Replica, batch: &Batch) -> Parts {
        let parts = self.parts_of(copy, &self.checked(batch));
        let Some(drafting) = self.drafting else { return parts };
        let drafted = Parts { draft_s: drafting.drafts_s(copy, batch), ..parts };
        drafted.scaled(1.0 / drafting.speculation.tokens_per_pass())
    }

    /// [`Serving::token_pass`] of `batch` sequences after `cached` tokens.
    pub fn token(&self, copy: Replica, batch: u32, cached: u64) -> Forward {
        self.token_pass(copy, &Batch::of(batch, 1, cached))
    }

    /// Mean tokens of a sequence from one pass.
    pub fn tokens_per_pass(&self) -> f64 {
        self.drafting.map_or(1.0, |drafting| drafting.speculation.tokens_per_pass())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against draws: each drafted token is accepted with probability a until one is not, and the
    /// pass gives one token more.
    #[test]
    fn tokens_of_a_pass_are_those_of_draws() {
        for (drafted, acceptance) in [(0, 0.5), (1, 0.3), (5, 0.8), (8, 0.95), (3, 0.0), (4, 1.0)] {
            let speculation = Speculation { drafted, acceptance };
            let (mut state, mut tokens) = (0x9e37_79b9_7f4a_7c15_u64, 0_u64);
            let passes = 200_000;
            for _ in 0..passes {
                let accepted = (0..drafted).take_while(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let drawn = (state >> 11) as f64 / (1_u64 << 53) as f64;
                    drawn < acceptance
                });
                tokens += accepted.count() as u64 + 1;
            }
            let drawn = tokens as f64 / f64::from(passes);
            let ours = speculation.tokens_per_pass();
            assert!((ours / drawn - 1.0).abs() < 0.01, "{speculation:?}: {ours}, drawn {drawn}");
        }
    }
}
