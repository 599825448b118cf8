//! Generation: one token after another, each drawn from what a model says of the next.
//!
//! What computes the logits is a [`NextLogits`]; how a token is chosen from them is a
//! [`Sampling`]. A draw is a pure function of the seed and the position in the sequence, so a text
//! that is continued from any of its prefixes continues alike.

use std::cmp::Ordering;
use std::ops::ControlFlow;

use ir::random::{Key, uniform};
use ir::{Diagnostic, Span};

use crate::error::Failure;

/// The site of the draws, as the `random` op has one.
const SALT: u32 = 0x9e6e;

/// How a token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f64,
    /// Only the so many most likely tokens are drawn.
    pub top_k: Option<usize>,
    /// Only the fewest most likely tokens are drawn whose probabilities reach this sum.
    pub top_p: Option<f64>,
    /// Makes other draws.
    pub seed: u32,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: None, top_p: None, seed: 0 };

    /// Chooses a token for a position of the sequence; none if no logit is finite.
    ///
    /// Tokens are ordered by falling logit, equal ones by number. Temperature, `top_k` and `top_p`
    /// are applied in this order.
    pub fn choose(&self, logits: &[f32], position: usize) -> Option<u32> {
        let finite = logits.iter().enumerate().filter(|(_, logit)| logit.is_finite());
        let mut tokens: Vec<(u32, f32)> = finite.map(|(i, &logit)| (i as u32, logit)).collect();
        let falling = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if self.temperature == 0.0 {
            return tokens.into_iter().min_by(falling).map(|(token, _)| token);
        }
        keep_first(&mut tokens, self.top_k.unwrap_or(usize::MAX).max(1), falling);
        let (_, largest) = *tokens.first()?;
        let weight = |&(_, logit): &(u32, f32)| {
            ((f64::from(logit) - f64::from(largest)) / self.temperature).exp()
        };
        let mut weights: Vec<f64> = tokens.iter().map(weight).collect();
        if let Some(share) = self.top_p {
            let limit = share * weights.iter().sum::<f64>();
            let mut sum = 0.0;
            let reaches = |weight: &f64| {
                sum += weight;
                sum >= limit
            };
            let last = weights.iter().position(reaches).unwrap_or(weights.len() - 1);
            weights.truncate(last + 1);
        }
        let stream = Key { seed: self.seed, step: 0, path: 0, sample: 0 }.stream(SALT);
        let drawn = f64::from(uniform(stream, position as u64)) * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let is_beyond = |weight: &f64| {
            sum += weight;
            sum > drawn
        };
        let index = weights.iter().position(is_beyond).unwrap_or(weights.len() - 1);
        Some(tokens[index].0)
    }
}

/// Keeps the first `count` in an order, and puts them in it.
fn keep_first<T>(items: &mut Vec<T>, count: usize, order: impl Fn(&T, &T) -> Ordering) {
    if count < items.len() {
        items.select_nth_unstable_by(count - 1, &order);
        items.truncate(count);
    }
    items.sort_unstable_by(order);
}

/// A model that has read a sequence so far.
pub trait NextLogits {
    /// Reads more tokens, at least one, and returns the logits of the token after them.
    fn read(&mut self, tokens: &[u32]) -> Result<&[f32], Failure>;

    /// How many tokens it can read altogether.
    fn capacity(&self) -> usize;
}

/// A model that decodes a batch of sequences, one per slot.
pub trait NextLogitsOfMany {
    /// The number of slots.
    fn sequences(&self) -> usize;

    /// Tokens of the KV caches of a slot.
    fn capacity(&self) -> usize;

    /// Replaces the sequence of a slot by a prompt, and returns the logits of the next token.
    fn begin(&mut self, sequence: usize, prompt: &[u32]) -> Result<&[f32], Failure>;

    /// Copies the sequence of one slot to another.
    fn copy(&mut self, from: usize, to: usize);

    /// Decodes one token per slot and returns the logits of the next tokens, slot by slot. A slot
    /// without a token becomes free, and its logits are undefined.
    fn go_on(&mut self, tokens: &[Option<u32>]) -> Result<&[f32], Failure>;
}

/// When generation ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// After so many new tokens.
    pub tokens_max: usize,
    /// After one of these tokens, which is not part of the result.
    pub stops: Vec<u32>,
}

/// Continues a prompt; `each` sees every new token as soon as it is chosen, and may end it.
///
/// Ends also when the model can't read more tokens.
/// **Errors.** E4060 if the prompt is empty or longer than the model can read, E4061 if no logit
/// is finite; those of the model.
pub fn generate(
    model: &mut dyn NextLogits,
    prompt: &[u32],
    sampling: &Sampling,
    ending: &Ending,
    each: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<Vec<u32>, Failure> {
    let capacity = model.capacity();
    check_prompt(prompt, capacity)?;
    let mut new = Vec::new();
    while new.len() < ending.tokens_max {
        let length = prompt.len() + new.len();
        if length > capacity {
            break;
        }
        let unread = new.last().map_or(prompt, std::slice::from_ref);
        let Some(token) = sampling.choose(model.read(unread)?, length) else {
            return Err(not_finite(length));
        };
        if ending.stops.contains(&token) {
            break;
        }
        new.push(token);
        if each(token).is_break() {
            break;
        }
    }
    Ok(new)
}

/// Whether a model can continue a prompt.
pub(crate) fn check_prompt(prompt: &[u32], capacity: usize) -> Result<(), Failure> {
    if prompt.is_empty() {
        let headline = "the prompt has no tokens, and the model continues what it has read";
        let wrong = Diagnostic::error("E4060", Span::of("--prompt"), headline);
        return Err(wrong.help("write at least one").into());
    }
    if prompt.len() > capacity {
        let headline =
            format!("the prompt has {} tokens; the model reads at most {capacity}", prompt.len());
        return Err(Diagnostic::error("E4060", Span::of("--prompt"), headline).into());
    }
    Ok(())
}

/// There is no token that may come at a position.
pub(crate) fn not_finite(position: usize) -> Failure {
    let headline = format!("the model gives no finite number for token {position}");
    let help = "check the weights: some are not finite, or do not belong to the model";
    Diagnostic::error("E4061", Span::default(), headline).help(help).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, f32::NAN, 2.0, f32::NEG_INFINITY];

    fn shares(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        let draws = 20_000;
        let mut counts = vec![0.0; logits.len()];
        for position in 0..draws {
            counts[sampling.choose(logits, position).unwrap() as usize] += 1.0 / draws as f64;
        }
        counts
    }

    fn check(sampling: Sampling, expected: [f64; 5]) {
        let total: f64 = expected.iter().sum();
        for (share, expected) in shares(sampling, &LOGITS).into_iter().zip(expected) {
            assert!((share - expected / total).abs() < 0.015, "{share} for {}", expected / total);
            assert_eq!(share == 0.0, expected == 0.0);
        }
    }

    #[test]
    fn draws_follow_the_softmax_of_what_is_kept() {
        let all = Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 5 };
        let e = |x: f64| x.exp();
        check(all, [e(1.0), e(3.0), 0.0, e(2.0), 0.0]);
        check(Sampling { temperature: 2.0, ..all }, [e(0.5), e(1.5), 0.0, e(1.0), 0.0]);
        check(Sampling { top_k: Some(2), ..all }, [0.0, e(3.0), 0.0, e(2.0), 0.0]);
        check(
            Sampling { top_k: Some(9), top_p: Some(1.0), ..all },
            [e(1.0), e(3.0), 0.0, e(2.0), 0.0],
        );
        // The most likely one has 0.665, the two most likely have 0.91.
        check(Sampling { top_p: Some(0.7), ..all }, [0.0, e(3.0), 0.0, e(2.0), 0.0]);
        check(Sampling { top_p: Some(0.6), ..all }, [0.0, 1.0, 0.0, 0.0, 0.0]);
        check(Sampling { top_p: Some(0.0), ..all }, [0.0, 1.0, 0.0, 0.0, 0.0]);
        check(Sampling { top_k: Some(0), ..all }, [0.0, 1.0, 0.0, 0.0, 0.0]);
        check(Sampling::GREEDY, [0.0, 1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn equal_logits_go_by_number_and_equal_seeds_draw_alike() {
        let equal = [0.5; 100];
        assert_eq!(Sampling::GREEDY.choose(&equal, 3), Some(0));
        let three = Sampling { temperature: 1.0, top_k: Some(3), top_p: None, seed: 1 };
        assert!(shares(three, &equal)[..3].iter().all(|share| (share - 1.0 / 3.0).abs() < 0.015));
        let all = |seed| Sampling { temperature: 1.0, top_k: None, top_p: None, seed };
        let draw = |seed| -> Vec<_> { (0..50).map(|i| all(seed).choose(&equal, i)).collect() };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert_eq!(all(0).choose(&[f32::NAN, f32::INFINITY], 0), None);
        assert_eq!(Sampling::GREEDY.choose(&[], 0), None);
    }

    /// Says that the number after the last is most likely; remembers how it was read.
    struct Counting {
        reads: Vec<usize>,
        logits: Vec<f32>,
    }

    impl NextLogits for Counting {
        fn read(&mut self, tokens: &[u32]) -> Result<&[f32], Failure> {
            self.reads.push(tokens.len());
            self.logits = vec![0.0; 10];
            self.logits[(tokens[tokens.len() - 1] as usize + 1) % 10] = 30.0;
            Ok(&self.logits)
        }

        fn capacity(&self) -> usize {
            8
        }
    }

    fn run(prompt: &[u32], ending: Ending) -> (Result<Vec<u32>, &'static str>, Vec<usize>) {
        let mut model = Counting { reads: Vec::new(), logits: Vec::new() };
        let mut seen = Vec::new();
        let mut each = |token| {
            seen.push(token);
            if token == 9 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let sampling = Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 0 };
        let result = generate(&mut model, prompt, &sampling, &ending, &mut each);
        let result = result.map_err(|failure| match failure {
            Failure::Input(diagnostics) => diagnostics[0].code,
            Failure::World(error) => panic!("{error}"),
        });
        assert!(result.is_err() || result.as_ref() == Ok(&seen));
        (result, model.reads)
    }

    #[test]
    fn generation_ends_where_it_should() {
        let ending = |tokens_max, stops: &[u32]| Ending { tokens_max, stops: stops.to_vec() };
        assert_eq!(run(&[1, 2], ending(3, &[])), (Ok(vec![3, 4, 5]), vec![2, 1, 1]));
        assert_eq!(run(&[1, 2], ending(9, &[5])), (Ok(vec![3, 4]), vec![2, 1, 1]));
        assert_eq!(run(&[7], ending(9, &[])), (Ok(vec![8, 9]), vec![1, 1]));
        let to_capacity: Vec<u32> = (1..9).collect();
        assert_eq!(run(&[0], ending(99, &[])), (Ok(to_capacity), vec![1; 8]));
        assert_eq!(run(&[0], ending(0, &[])), (Ok(Vec::new()), Vec::new()));
        assert_eq!(run(&[], ending(1, &[])).0, Err("E4060"));
        assert_eq!(run(&[0; 9], ending(1, &[])).0, Err("E4060"));
    }
}
