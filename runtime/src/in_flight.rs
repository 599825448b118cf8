//! In-flight batching: a request that ends frees its slot for the next one, between two decode
//! steps (Yu et al. 2022, iteration-level scheduling).
//!
//! The output of a request is that of [`generate`](crate::generate::generate): its draws depend on
//! its own sampling and positions, and never on the rest of the batch.

use std::collections::VecDeque;
use std::time::Instant;

use crate::error::Failure;
use crate::generate::{Ending, NextLogitsOfMany, Sampling, check_prompt, not_finite};

/// A request for a continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// When it ends.
    pub ending: Ending,
}

/// The output of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Continuation {
    /// The new tokens, without a stop token.
    pub tokens: Vec<u32>,
    /// Whether a stop token ends it.
    pub is_stopped: bool,
    /// Seconds from the start of the run to the first output token, and to the last.
    pub seconds: [f64; 2],
}

/// A request in a slot.
struct Going {
    /// Its number.
    number: usize,
    request: Request,
    tokens: Vec<u32>,
    /// Seconds to its first token.
    first_s: f64,
}

/// The state of a run besides its slots.
struct Run<'a> {
    start: Instant,
    capacity: usize,
    /// Called with each request that ends, by its number.
    each: &'a mut dyn FnMut(usize, Result<Continuation, Failure>),
}

/// Processes requests until `next` has no more. `each` is called with every request that ends: its
/// number, and its output or the error of [`generate`](crate::generate::generate). A request takes
/// the first free slot.
///
/// # Errors
/// Those of the model, which end the run.
pub fn continue_all(
    model: &mut dyn NextLogitsOfMany,
    next: &mut dyn FnMut() -> Option<(usize, Request)>,
    each: &mut dyn FnMut(usize, Result<Continuation, Failure>),
) -> Result<(), Failure> {
    let mut run = Run { start: Instant::now(), capacity: model.capacity(), each };
    let mut sequences: Vec<Option<Going>> = (0..model.sequences()).map(|_| None).collect();
    let mut free: VecDeque<usize> = (0..sequences.len()).collect();
    loop {
        while let Some(place) = free.front().copied() {
            let Some((number, request)) = next() else { break };
            sequences[place] = run.begin(model, place, number, request)?;
            if sequences[place].is_some() {
                free.pop_front();
            }
        }
        if free.len() == sequences.len() {
            return Ok(());
        }
        let last = |going: &Option<Going>| going.as_ref()?.tokens.last().copied();
        let tokens: Vec<Option<u32>> = sequences.iter().map(last).collect();
        let logits = model.go_on(&tokens)?;
        let vocab = logits.len() / sequences.len();
        for (place, (sequence, row)) in sequences.iter_mut().zip(logits.chunks(vocab)).enumerate() {
            let Some(going) = sequence.take() else { continue };
            *sequence = run.choose(going, row);
            if sequence.is_none() {
                free.push_back(place);
            }
        }
    }
}

impl Run<'_> {
    /// Prefills a prompt and chooses the first output token; none where that ends the request.
    fn begin(
        &mut self,
        model: &mut dyn NextLogitsOfMany,
        place: usize,
        number: usize,
        request: Request,
    ) -> Result<Option<Going>, Failure> {
        if let Err(failure) = check_prompt(&request.prompt, self.capacity) {
            (self.each)(number, Err(failure));
            return Ok(None);
        }
        let going = Going { number, request, tokens: Vec::new(), first_s: 0.0 };
        if going.request.ending.tokens_max == 0 {
            self.end(going, false);
            return Ok(None);
        }
        let logits = model.begin(place, &going.request.prompt)?;
        Ok(self.choose(going, logits))
    }

    /// Chooses the next token of a request; none where it ends.
    fn choose(&mut self, mut going: Going, logits: &[f32]) -> Option<Going> {
        let Request { prompt, sampling, ending } = &going.request;
        let position = prompt.len() + going.tokens.len();
        let Some(token) = sampling.choose(logits, position) else {
            (self.each)(going.number, Err(not_finite(position)));
            return None;
        };
        if going.tokens.is_empty() {
            going.first_s = self.start.elapsed().as_secs_f64();
        }
        if ending.stops.contains(&token) {
            self.end(going, true);
            return None;
        }
        going.tokens.push(token);
        // The last token is new, and is not read.
        if going.tokens.len() == ending.tokens_max || position + 1 > self.capacity {
            self.end(going, false);
            return None;
        }
        Some(going)
    }

    fn end(&mut self, going: Going, is_stopped: bool) {
        let seconds = [going.first_s, self.start.elapsed().as_secs_f64()];
        let continuation = Continuation { tokens: going.tokens, is_stopped, seconds };
        (self.each)(going.number, Ok(continuation));
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use ir::random::mix;

    use super::*;
    use crate::generate::{NextLogits, generate};

    const VOCAB: usize = 6;

    /// Sequences as a model holds them; logits follow from the tokens.
    struct Held {
        sequences: Vec<Option<Vec<u32>>>,
        capacity: usize,
        logits: Vec<f32>,
        /// Calls, and the sequences that read a token in them.
        calls: Vec<usize>,
    }

    impl Held {
        fn of(sequences: usize, capacity: usize) -> Held {
            let sequences = vec![None; sequences];
            Held { sequences, capacity, logits: Vec::new(), calls: Vec::new() }
        }
    }

    /// A token after which no number is finite.
    const POISON: u32 = 1000;

    fn logits_after(sequence: &[u32]) -> Vec<f32> {
        if sequence.contains(&POISON) {
            return vec![f32::NAN; VOCAB];
        }
        let state = sequence.iter().fold(mix(7), |at, token| mix(at ^ (u64::from(*token) + 1)));
        (0..VOCAB as u64).map(|token| (mix(state ^ (token << 32)) >> 40) as f32 / 4e6).collect()
    }

    impl NextLogitsOfMany for Held {
        fn sequences(&self) -> usize {
            self.sequences.len()
        }

        fn capacity(&self) -> usize {
            self.capacity
        }

        fn begin(&mut self, sequence: usize, prompt: &[u32]) -> Result<&[f32], Failure> {
            self.sequences[sequence] = Some(prompt.to_vec());
            self.logits = logits_after(prompt);
            Ok(&self.logits)
        }

        fn copy(&mut self, from: usize, to: usize) {
            self.sequences[to] = self.sequences[from].clone();
        }

        fn go_on(&mut self, tokens: &[Option<u32>]) -> Result<&[f32], Failure> {
            self.calls.push(tokens.iter().flatten().count());
            self.logits.clear();
            for (sequence, token) in self.sequences.iter_mut().zip(tokens) {
                match (token, sequence) {
                    (Some(token), Some(sequence)) => {
                        sequence.push(*token);
                        assert!(sequence.len() <= self.capacity, "the model has room");
                        self.logits.extend(logits_after(sequence));
                    }
                    (None, sequence) => {
                        *sequence = None;
                        self.logits.extend([f32::NAN; VOCAB]);
                    }
                    (Some(_), None) => panic!("a sequence goes on that has read nothing"),
                }
            }
            Ok(&self.logits)
        }
    }

    /// One sequence.
    struct Alone(Vec<u32>, usize, Vec<f32>);

    impl NextLogits for Alone {
        fn read(&mut self, tokens: &[u32]) -> Result<&[f32], Failure> {
            self.0.extend(tokens);
            self.2 = logits_after(&self.0);
            Ok(&self.2)
        }

        fn capacity(&self) -> usize {
            self.1
        }
    }

    fn requests(seed: u64, capacity: usize) -> Vec<Request> {
        let drawn = |at: u64, below: u64| (mix(seed ^ (at << 40)) % below) as usize;
        let request = |at: u64| Request {
            prompt: (0..=drawn(9 * at, capacity as u64)).map(|i| (i % VOCAB) as u32).collect(),
            sampling: Sampling {
                temperature: [0.0, 1.0][drawn(9 * at + 1, 2)],
                top_k: None,
                top_p: None,
                seed: drawn(9 * at + 2, 100) as u32,
            },
            ending: Ending {
                tokens_max: drawn(9 * at + 3, 9),
                stops: vec![vec![], vec![0], vec![1, 2]].swap_remove(drawn(9 * at + 4, 3)),
            },
        };
        (0..1 + drawn(500, 12) as u64).map(request).collect()
    }

    #[test]
    fn batched_requests_have_the_output_of_each_alone() {
        let base = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
        for seed in base..base + 300 {
            let capacity = 1 + (mix(seed) % 12) as usize;
            let requests = requests(seed, capacity);
            let sequences = 1 + (mix(seed ^ 3) % 5) as usize;
            let mut model = Held::of(sequences, capacity);
            let mut waiting = requests.iter().cloned().enumerate();
            let mut found = vec![None; requests.len()];
            let mut each = |number: usize, one: Result<Continuation, Failure>| {
                let one = one.unwrap_or_else(|why| panic!("SEED={seed}: {why:?}"));
                assert!(found[number].replace(one).is_none(), "SEED={seed}: it ends once");
            };
            let done = continue_all(&mut model, &mut || waiting.next(), &mut each);
            assert!(done.is_ok(), "SEED={seed}");
            for (at, request) in requests.iter().enumerate() {
                let found = found[at].as_ref().unwrap_or_else(|| panic!("SEED={seed}: {at}"));
                let mut alone = Alone(Vec::new(), capacity, Vec::new());
                let Request { prompt, sampling, ending } = request;
                let mut each = |_| ControlFlow::Continue(());
                let wanted = generate(&mut alone, prompt, sampling, ending, &mut each);
                let wanted = wanted.unwrap_or_else(|_| panic!("SEED={seed}: it is generated"));
                assert_eq!(found.tokens, wanted, "SEED={seed}: {request:?}");
                let is_full = prompt.len() + wanted.len() > capacity;
                let is_cut = wanted.len() == ending.tokens_max || is_full;
                assert_eq!(found.is_stopped, !is_cut, "SEED={seed}: {request:?}");
                assert!(found.seconds[0] <= found.seconds[1]);
            }
            // While requests are queued, no slot is idle.
            let tokens: usize = model.calls.iter().sum();
            let busy = model.calls.iter().filter(|count| **count == sequences).count();
            let longest = requests.iter().map(|r| r.ending.tokens_max).max().unwrap_or(0);
            assert!(model.calls.len() <= busy + longest, "SEED={seed}: {tokens} in {model:?}");
        }
    }

    impl std::fmt::Debug for Held {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "{:?}", self.calls)
        }
    }

    /// A request that fails is reported, and changes no other request.
    #[test]
    fn a_request_that_fails_ends_alone() {
        let ending = Ending { tokens_max: 3, stops: Vec::new() };
        let request = |prompt: Vec<u32>| Request {
            prompt,
            sampling: Sampling::GREEDY,
            ending: ending.clone(),
        };
        let prompts = [vec![1], vec![], vec![2, 3], vec![0; 9], vec![POISON], vec![3], vec![4]];
        let mut waiting = prompts.into_iter().map(request).enumerate();
        let mut found = Vec::new();
        let done = continue_all(&mut Held::of(2, 8), &mut || waiting.next(), &mut |at, one| {
            let code = |failure: Failure| match failure {
                Failure::Input(diagnostics) => diagnostics[0].code,
                Failure::World(error) => panic!("{error}"),
            };
            found.push((at, one.map(|one| one.tokens.len()).map_err(code)));
        });
        assert!(done.is_ok());
        found.sort_by_key(|(at, _)| *at);
        let ends: Vec<_> = found.into_iter().map(|(_, end)| end).collect();
        let [empty, long, poison] = ["E4060", "E4060", "E4061"].map(Err);
        assert_eq!(ends, [Ok(3), empty, Ok(3), long, poison, Ok(3), Ok(3)]);
    }
}
