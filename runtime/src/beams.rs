//! Beam search: the likeliest of the sequences that continue a prompt, several at a time.
//!
//! After each token the likeliest `beams` continuations of all sequences go on (Freitag and
//! Al-Onaizan 2017, §2). A sequence that ends with a stop token competes by its
//! [score](Hypothesis::score); search ends when no sequence that goes on can have a better one than
//! the last of those that have ended, as transformers does with `early_stopping="never"`.

use std::cmp::Ordering;

use crate::error::Failure;
use crate::generate::{Ending, NextLogitsOfMany, check_prompt, not_finite};

/// How sequences are compared, and how many go on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamSearch {
    /// Sequences that go on after each token, at least one.
    pub beams: usize,
    /// The power of the length that divides the logarithm of the probability: 0 compares
    /// probabilities, 1 the mean of a token; more favours long sequences.
    pub length_penalty: f64,
}

/// A continuation of the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// The new tokens, without the stop token.
    pub tokens: Vec<u32>,
    /// The natural logarithm of the probability of these, and of the stop token where there is one.
    pub log_probability: f64,
    /// `log_probability` over the number of new tokens, the stop token with them, to the power of
    /// the length penalty.
    pub score: f64,
    /// Whether a stop token ends it.
    pub is_stopped: bool,
}

/// A sequence that goes on.
#[derive(Clone, Debug)]
struct Beam {
    /// Which of the model's sequences it is.
    place: usize,
    tokens: Vec<u32>,
    log_probability: f64,
}

/// A beam, by its number, and a token after it.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    beam: usize,
    token: u32,
    log_probability: f64,
}

impl Candidate {
    /// The likelier first; of equal ones that of the likelier beam, then of the lower token.
    fn order(&self, other: &Candidate) -> Ordering {
        let falling = other.log_probability.total_cmp(&self.log_probability);
        falling.then(self.beam.cmp(&other.beam)).then(self.token.cmp(&other.token))
    }
}

impl BeamSearch {
    /// The continuations of a prompt with the best scores, the best first: `beams` of them, or
    /// fewer where there are no more.
    ///
    /// # Errors
    /// `E4060` if the prompt is empty or longer than the model can read, `E4061` if no logit is
    /// finite; those of the model.
    pub fn search(
        &self,
        model: &mut dyn NextLogitsOfMany,
        prompt: &[u32],
        ending: &Ending,
    ) -> Result<Vec<Hypothesis>, Failure> {
        check_prompt(prompt, model.capacity())?;
        // The token after the last that is read is new, too.
        let most = ending.tokens_max.min(model.capacity() + 1 - prompt.len());
        let mut found = Finished { search: *self, best: Vec::new() };
        let mut beams = vec![Beam { place: 0, tokens: Vec::new(), log_probability: 0.0 }];
        let mut logits = if most > 0 { model.begin(0, prompt)? } else { &[] };
        for length in 1..=most {
            let candidates = self.candidates(&beams, logits, ending);
            if candidates.is_empty() {
                return Err(not_finite(prompt.len() + length - 1));
            }
            let (ended, go_on): (Vec<Candidate>, Vec<Candidate>) =
                candidates.into_iter().partition(|one| ending.stops.contains(&one.token));
            for one in ended {
                found.add(&beams[one.beam].tokens, one.log_probability, true);
            }
            let (next, copies) = self.placed(&beams, &go_on);
            beams = next;
            if length == most || beams.is_empty() || found.beats_all(&beams, most) {
                break;
            }
            copies.into_iter().for_each(|(from, to)| model.copy(from, to));
            logits = model.go_on(&self.last_tokens(&beams))?;
        }
        for beam in &beams {
            found.add(&beam.tokens, beam.log_probability, false);
        }
        Ok(found.best)
    }

    /// The likeliest continuations of all beams: as many as go on, and those with a stop token that
    /// are as likely.
    fn candidates(&self, beams: &[Beam], logits: &[f32], ending: &Ending) -> Vec<Candidate> {
        // After the prompt the logits are those of one sequence.
        let is_first = beams.iter().all(|beam| beam.tokens.is_empty());
        let vocab = logits.len() / if is_first { 1 } else { self.beams };
        let most = self.beams + ending.stops.len();
        let mut all = Vec::new();
        for (beam, before) in beams.iter().enumerate() {
            let row = &logits[before.place * vocab..][..vocab];
            all.extend(likeliest(row, most).into_iter().map(|(token, log_probability)| {
                Candidate { beam, token, log_probability: before.log_probability + log_probability }
            }));
        }
        all.sort_unstable_by(Candidate::order);
        let is_stop = |one: &Candidate| ending.stops.contains(&one.token);
        let mut going = 0;
        all.into_iter()
            .enumerate()
            .take_while(|(_, one)| {
                going += usize::from(!is_stop(one));
                going <= self.beams
            })
            // A stop token counts where it would have gone on.
            .filter(|(at, one)| !is_stop(one) || *at < self.beams)
            .map(|(_, one)| one)
            .collect()
    }

    /// The beams that go on, each at a place of the model, and what is copied to where for it: the
    /// likeliest that goes on from a sequence stays where that is.
    fn placed(&self, beams: &[Beam], go_on: &[Candidate]) -> (Vec<Beam>, Vec<(usize, usize)>) {
        let goes_on = |place: usize| go_on.iter().any(|one| beams[one.beam].place == place);
        let mut free = (0..self.beams).filter(|place| !goes_on(*place)).collect::<Vec<_>>();
        free.reverse();
        let (mut taken, mut copies) = (vec![false; self.beams], Vec::new());
        let placed = go_on.iter().map(|one| {
            let Beam { place: from, tokens, .. } = &beams[one.beam];
            let place = match std::mem::replace(&mut taken[*from], true) {
                false => *from,
                true => {
                    let to = free.pop().expect("no more go on than there are places");
                    copies.push((*from, to));
                    to
                }
            };
            let tokens = tokens.iter().copied().chain([one.token]).collect();
            Beam { place, tokens, log_probability: one.log_probability }
        });
        (placed.collect(), copies)
    }

    /// For each place of the model the token that is read next; none where there is no beam.
    fn last_tokens(&self, beams: &[Beam]) -> Vec<Option<u32>> {
        let mut tokens = vec![None; self.beams];
        for beam in beams {
            tokens[beam.place] = beam.tokens.last().copied();
        }
        tokens
    }

    fn score(&self, log_probability: f64, length: usize) -> f64 {
        log_probability / (length.max(1) as f64).powf(self.length_penalty)
    }
}

/// The best sequences that have ended.
struct Finished {
    search: BeamSearch,
    /// The best first.
    best: Vec<Hypothesis>,
}

impl Finished {
    fn add(&mut self, tokens: &[u32], log_probability: f64, is_stopped: bool) {
        let length = tokens.len() + usize::from(is_stopped);
        let score = self.search.score(log_probability, length);
        let hypothesis = Hypothesis { tokens: tokens.to_vec(), log_probability, score, is_stopped };
        // Of equal ones the first that was found.
        let at = self.best.partition_point(|other| other.score >= score);
        self.best.insert(at, hypothesis);
        self.best.truncate(self.search.beams);
    }

    /// Whether no sequence that goes on up to `most` tokens can be among the best.
    fn beats_all(&self, beams: &[Beam], most: usize) -> bool {
        let Some(last) = self.best.get(self.search.beams - 1) else { return false };
        beams.iter().all(|beam| {
            // Probabilities only fall; a longer sequence has a better score where the penalty is
            // positive.
            let lengths = [beam.tokens.len() + 1, most];
            let scores = lengths.map(|length| self.search.score(beam.log_probability, length));
            last.score >= scores[0].max(scores[1])
        })
    }
}

/// The likeliest tokens of a row of logits, with the logarithms of their probabilities.
fn likeliest(logits: &[f32], count: usize) -> Vec<(u32, f64)> {
    let finite = logits.iter().enumerate().filter(|(_, logit)| logit.is_finite());
    let mut tokens: Vec<(u32, f64)> = finite.map(|(i, &l)| (i as u32, f64::from(l))).collect();
    let Some(largest) = tokens.iter().map(|(_, logit)| *logit).max_by(f64::total_cmp) else {
        return tokens;
    };
    let sum: f64 = tokens.iter().map(|(_, logit)| (logit - largest).exp()).sum();
    let falling = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if count < tokens.len() {
        tokens.select_nth_unstable_by(count, falling);
        tokens.truncate(count);
    }
    let log_sum = largest + sum.ln();
    tokens.iter_mut().for_each(|(_, logit)| *logit -= log_sum);
    tokens
}

#[cfg(test)]
mod tests {
    use ir::random::mix;

    use super::*;

    const VOCAB: usize = 4;

    /// The logits after a sequence, which follow from a seed.
    fn logits_after(seed: u64, sequence: &[u32]) -> Vec<f32> {
        let state = sequence.iter().fold(mix(seed), |at, token| mix(at ^ (u64::from(*token) + 1)));
        let logit = |token: usize| (mix(state ^ ((token as u64) << 32)) >> 40) as f32 / 4e6;
        (0..VOCAB).map(logit).collect()
    }

    /// The logarithm of the probability of tokens after a prompt.
    fn log_probability(seed: u64, prompt: &[u32], tokens: &[u32]) -> f64 {
        let mut sequence = prompt.to_vec();
        let of = |token: &u32| {
            let all = likeliest(&logits_after(seed, &sequence), VOCAB);
            sequence.push(*token);
            all.into_iter().find(|(other, _)| other == token).expect("logits are finite").1
        };
        tokens.iter().map(of).sum()
    }

    /// Sequences as a model holds them.
    struct Held {
        seed: u64,
        sequences: Vec<Vec<u32>>,
        logits: Vec<f32>,
        capacity: usize,
    }

    impl Held {
        fn of(seed: u64, beams: usize, capacity: usize) -> Held {
            Held { seed, sequences: vec![Vec::new(); beams], logits: Vec::new(), capacity }
        }
    }

    impl NextLogitsOfMany for Held {
        fn sequences(&self) -> usize {
            self.sequences.len()
        }

        fn capacity(&self) -> usize {
            self.capacity
        }

        fn begin(&mut self, sequence: usize, prompt: &[u32]) -> Result<&[f32], Failure> {
            self.sequences[sequence] = prompt.to_vec();
            self.logits = logits_after(self.seed, prompt);
            Ok(&self.logits)
        }

        fn copy(&mut self, from: usize, to: usize) {
            self.sequences[to] = self.sequences[from].clone();
        }

        fn go_on(&mut self, tokens: &[Option<u32>]) -> Result<&[f32], Failure> {
            assert_eq!(tokens.len(), self.sequences.len());
            self.logits.clear();
            for (sequence, token) in self.sequences.iter_mut().zip(tokens) {
                match token {
                    Some(token) => sequence.push(*token),
                    None => sequence.clear(),
                }
                assert!(sequence.len() <= self.capacity, "the model has room");
                self.logits.extend(logits_after(self.seed, sequence));
            }
            Ok(&self.logits)
        }
    }

    /// All sequences of at most some tokens that end with a stop token, or are that long.
    fn all(stops: &[u32], most: usize) -> Vec<(Vec<u32>, bool)> {
        let mut going = vec![Vec::new()];
        let mut all = Vec::new();
        for _ in 0..most {
            let mut longer = Vec::new();
            for tokens in going {
                for token in 0..VOCAB as u32 {
                    match stops.contains(&token) {
                        true => all.push(([&tokens[..], &[token]].concat(), true)),
                        false => longer.push([&tokens[..], &[token]].concat()),
                    }
                }
            }
            going = longer;
        }
        all.extend(going.into_iter().map(|tokens| (tokens, false)));
        all
    }

    fn base() -> u64 {
        std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
    }

    /// With as many beams as sequences the search is exhaustive, whatever the penalty.
    #[test]
    fn wide_searches_find_the_best_of_all_sequences() {
        for seed in base()..base() + 20 {
            for (stops, length_penalty) in
                [(vec![], 1.0), (vec![2], 0.0), (vec![0], 1.0), (vec![1, 3], 2.0), (vec![2], -0.5)]
            {
                let (prompt, most) = ([3, 1], 4);
                let search = BeamSearch { beams: VOCAB.pow(4), length_penalty };
                let mut model = Held::of(seed, search.beams, 10);
                let ending = Ending { tokens_max: most, stops: stops.clone() };
                let found = search.search(&mut model, &prompt, &ending).expect("it is found");
                let scored = all(&stops, most).into_iter().map(|(tokens, is_stopped)| {
                    let log_probability = log_probability(seed, &prompt, &tokens);
                    let score = log_probability / (tokens.len() as f64).powf(length_penalty);
                    let kept = tokens.len() - usize::from(is_stopped);
                    (score, tokens[..kept].to_vec(), is_stopped)
                });
                let mut scored: Vec<_> = scored.collect();
                scored.sort_by(|a, b| b.0.total_cmp(&a.0));
                for (one, (score, tokens, is_stopped)) in found.iter().zip(&scored).take(3) {
                    let case = format!("SEED={seed} {stops:?} {length_penalty}");
                    assert_eq!((&one.tokens, one.is_stopped), (tokens, *is_stopped), "{case}");
                    assert!((one.score - score).abs() < 1e-9, "{case}: {} {score}", one.score);
                }
            }
        }
    }

    /// The same without places, copies and an early end.
    fn plainly(search: BeamSearch, seed: u64, prompt: &[u32], ending: &Ending) -> Vec<Vec<u32>> {
        let score = |tokens: &[u32]| {
            let length = tokens.len() as f64;
            log_probability(seed, prompt, tokens) / length.powf(search.length_penalty)
        };
        let is_stopped = |tokens: &Vec<u32>| ending.stops.contains(&tokens[tokens.len() - 1]);
        let (mut going, mut best) = (vec![Vec::new()], Vec::new());
        for _ in 0..ending.tokens_max {
            let next = |tokens: &Vec<u32>| {
                (0..VOCAB as u32).map(|token| [&tokens[..], &[token]].concat()).collect::<Vec<_>>()
            };
            let mut all: Vec<Vec<u32>> = going.iter().flat_map(next).collect();
            let likely = |tokens: &[u32]| log_probability(seed, prompt, tokens);
            all.sort_by(|a, b| likely(b).total_cmp(&likely(a)));
            best.extend(all.iter().take(search.beams).filter(|one| is_stopped(one)).cloned());
            going = all.into_iter().filter(|one| !is_stopped(one)).take(search.beams).collect();
        }
        best.extend(going);
        best.sort_by(|a, b| score(b).total_cmp(&score(a)));
        best.truncate(search.beams);
        for tokens in best.iter_mut().filter(|tokens| is_stopped(tokens)) {
            tokens.pop();
        }
        best
    }

    #[test]
    fn narrow_searches_find_what_plain_ones_do() {
        for seed in base()..base() + 200 {
            let drawn = |at: u64, below: u64| mix(seed ^ (at << 40)) % below;
            let search = BeamSearch {
                beams: 1 + drawn(1, 5) as usize,
                length_penalty: [0.0, 0.6, 1.0, 2.0][drawn(2, 4) as usize],
            };
            let stops = vec![vec![], vec![0], vec![1, 2]].swap_remove(drawn(3, 3) as usize);
            let ending = Ending { tokens_max: 1 + drawn(4, 7) as usize, stops };
            let prompt: Vec<u32> = (0..1 + drawn(5, 3)).map(|at| (at % 4) as u32).collect();
            let mut model = Held::of(seed, search.beams, prompt.len() + ending.tokens_max - 1);
            let found = search.search(&mut model, &prompt, &ending).expect("it is found");
            let case = format!("SEED={seed} {search:?} {ending:?}");
            let tokens: Vec<Vec<u32>> = found.iter().map(|one| one.tokens.clone()).collect();
            assert_eq!(tokens, plainly(search, seed, &prompt, &ending), "{case}");
        }
    }

    #[test]
    fn prompts_and_weights_that_do_not_fit_are_told() {
        let search = BeamSearch { beams: 2, length_penalty: 1.0 };
        let code = |model: &mut dyn NextLogitsOfMany, prompt: &[u32]| {
            let ending = Ending { tokens_max: 9, stops: Vec::new() };
            match search.search(model, prompt, &ending) {
                Err(Failure::Input(diagnostics)) => diagnostics[0].code,
                Err(Failure::World(error)) => panic!("{error}"),
                Ok(found) => panic!("{found:?}"),
            }
        };
        assert_eq!(code(&mut Held::of(1, 2, 8), &[]), "E4060");
        assert_eq!(code(&mut Held::of(1, 2, 8), &[0; 9]), "E4060");
        // The last token is new, and is not read.
        let ending = Ending { tokens_max: 9, stops: Vec::new() };
        let found = search.search(&mut Held::of(1, 2, 8), &[0; 8], &ending).expect("one more");
        assert_eq!(found.iter().map(|one| one.tokens.len()).collect::<Vec<_>>(), [1, 1]);
        assert!(likeliest(&[f32::NAN, f32::NEG_INFINITY], 3).is_empty());
    }
}
