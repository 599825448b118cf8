//! Seeded random numbers for tests. `SEED=n` replays one seed.

use gantline_ir::random::mix;
use gantline_ir::{DType, Tensor};

/// A stream of random numbers.
pub(crate) struct Draws {
    state: u64,
}

/// The seeds of a test: the one of the environment, or `0..count`.
pub(crate) fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("SEED") {
        Ok(seed) => vec![seed.parse().expect("SEED is a number")],
        Err(_) => (0..count).collect(),
    }
}

impl Draws {
    pub(crate) fn new(seed: u64) -> Draws {
        Draws { state: mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) }
    }

    pub(crate) fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.word() % bound as u64) as usize
    }

    pub(crate) fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    /// Uniform in `[low, high)`.
    pub(crate) fn number(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.word() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// `count` sizes from 1 to 4.
    pub(crate) fn dims(&mut self, count: usize) -> Vec<usize> {
        (0..count).map(|_| 1 + self.below(4)).collect()
    }

    /// Numbers of magnitude 0.2 to 1.5, so that no kink at zero is near.
    pub(crate) fn signed(&mut self, dims: &[usize]) -> Tensor {
        let count = dims.iter().product();
        let draw = |_| if self.coin() { self.number(0.2, 1.5) } else { -self.number(0.2, 1.5) };
        Tensor::f64(dims, (0..count).map(draw).collect())
    }

    /// Numbers from 0.2 to 1.5.
    pub(crate) fn positive(&mut self, dims: &[usize]) -> Tensor {
        let count = dims.iter().product();
        Tensor::f64(dims, (0..count).map(|_| self.number(0.2, 1.5)).collect())
    }

    /// Integers from `low` to below `high`.
    pub(crate) fn ids(&mut self, dims: &[usize], low: i64, high: i64) -> Tensor {
        let count = dims.iter().product();
        let draw = |_| low + self.below((high - low) as usize) as i64;
        Tensor::int(DType::I32, dims, (0..count).map(draw).collect())
    }

    pub(crate) fn bools(&mut self, dims: &[usize]) -> Tensor {
        let count = dims.iter().product();
        Tensor::bool(dims, (0..count).map(|_| self.coin()).collect())
    }

    pub(crate) fn key(&mut self) -> Tensor {
        Tensor::int(DType::U32, &[4], (0..4).map(|_| (self.word() >> 40) as i64).collect())
    }
}
